#!/usr/bin/env bash
# Which score finds the blocks that a model can do without? A 24-block model of width 64, 300 steps of 1,024
# tokens, three seeds: loss after removing 1 to 8 blocks, no further training. About 4 minutes on two cores.
#     bash results/prune.sh                      prints the table, writes results/prune.json
set -euo pipefail
SIZE="--n_embd 64 --block_size 64" STEPS=300 LR=1.5e-3
. "$(dirname "$0")/common.sh"
for seed in 1 2 3; do
  echo "$RUNS/prune/pre-seed$seed $SIZE --n_layer 24 --max_iters $STEPS --lr $LR --seed $seed" \
       "--eval_interval $((STEPS / 20))"
done | run_all
py analyze.py $RUNS/prune/pre-seed{1,2,3} --out $RUNS/prune/figures --windows 64 \
  --only prune_curve drop_curve fan_in
py results/prune.py
