#!/usr/bin/env bash
# Widths over depth: five profiles with the parameters of the uniform model, and CascadeFormer (narrower towards the
# end, trained on more tokens) at the uniform model's training FLOPs. 8 blocks of width 64, 300 steps of 1,024 tokens,
# three seeds; one learning rate, since the models differ in nothing else. About 5 minutes on two cores.
#     bash results/widths.sh
set -euo pipefail
. "$(dirname "$0")/common.sh"
SIZE="--n_layer 8 --n_embd 64 --block_size 64 --lr 3e-3 --eval_interval 150"
FLOPS=$("$PYTHON" -c "
from model import GPT, GPTConfig
print(3 * 300 * 1024 * GPT(GPTConfig(n_layer=8, n_embd=64, block_size=64)).flops_per_token())")
variants() {
  echo "uniform --max_iters 300"
  echo "taper --max_iters 300 --taper linear --taper_on both"
  echo "cosine --max_iters 300 --taper cosine"
  echo "fanin --max_iters 300 --taper fanin --taper_on both"
  echo "reverse --max_iters 300 --taper linear --taper_on both --taper_start 0.5 --taper_end 1.5"
  echo "ends --max_iters 300 --taper ends --taper_on both"
  echo "cascade --max_flops $FLOPS --taper linear --taper_on both --taper_match none --taper_start 1 --taper_end 0.6"
}
for seed in 1 2 3; do
  variants | while read -r label flags; do echo "runs/widths/$label-lr3e-3-seed$seed $SIZE --seed $seed $flags"; done
done | run_all
"$PYTHON" results/compare.py runs/widths --out results/widths.json $(variants | cut -d" " -f1)
OMP_NUM_THREADS=2 "$PYTHON" results/speed.py --n_layer 8 --n_embd 256 --block_size 128 --out results/widths_speed.json \
  "pre" "pre --taper linear --taper_on both" "pre --taper fanin --taper_on both" \
  "pre --taper linear --taper_on both --taper_start 0.5 --taper_end 1.5" "pre --taper ends --taper_on both" \
  "pre --taper linear --taper_on both --taper_match none --taper_start 1 --taper_end 0.6"
