#!/usr/bin/env bash
# Widths over depth: five profiles with the parameters of the uniform model, and CascadeFormer (narrower
# towards the end, trained on more tokens) at the uniform model's training FLOPs. 8 blocks of width 64, 300
# steps of 1,024 tokens, three seeds; one learning rate, since the models differ in nothing else. About 8
# minutes on two cores.
#     bash results/widths.sh
set -euo pipefail
SIZE="--n_layer 8 --n_embd 64 --block_size 64" STEPS=300 LR=3e-3
. "$(dirname "$0")/common.sh"
FLOPS=$(flops $SIZE --max_iters $STEPS)
variants() {
  echo "uniform --max_iters $STEPS"
  echo "taper --max_iters $STEPS --taper linear --taper_on both"
  echo "cosine --max_iters $STEPS --taper cosine"
  echo "fanin --max_iters $STEPS --taper fanin --taper_on both"
  echo "reverse --max_iters $STEPS --taper linear --taper_on both --taper_start 0.5 --taper_end 1.5"
  echo "ends --max_iters $STEPS --taper ends --taper_on both"
  echo "cascade --max_flops $FLOPS --taper linear --taper_on both --taper_match none --taper_start 1" \
       "--taper_end 0.6"
}
for seed in 1 2 3; do
  variants | while read -r label flags; do
    echo "$RUNS/widths/$label-lr$LR-seed$seed $SIZE --lr $LR --eval_interval $((STEPS / 2))" \
         "--seed $seed $flags"
  done
done | run_all
py results/compare.py $RUNS/widths --out $OUT/widths.json $(variants | cut -d" " -f1)
[ $SCALE = gpu ] && exit   # speed.py times a CPU
OMP_NUM_THREADS=2 py results/speed.py --n_layer 8 --n_embd 256 --block_size 128 --out $OUT/widths_speed.json \
  "pre" "pre --taper linear --taper_on both" "pre --taper fanin --taper_on both" \
  "pre --taper linear --taper_on both --taper_start 0.5 --taper_end 1.5" "pre --taper ends --taper_on both" \
  "pre --taper linear --taper_on both --taper_match none --taper_start 1 --taper_end 0.6"
