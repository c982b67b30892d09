#!/usr/bin/env bash
# Does a gate survive depth? Final loss of the convex and the additive gate at 4 to 32 blocks of width 64, 300 steps of
# 1,024 tokens: a sweep of the learning rate with seed 1 at each depth, then seeds 2 and 3 at the best rate. About half
# an hour on two cores.
#     bash results/stability.sh                  prints the table, writes results/stability.json and .png
set -euo pipefail
. "$(dirname "$0")/common.sh"
variants() {   # label, flags
  echo "pre --residual pre"
  echo "half --residual review --gate_input none"
  echo "review --residual review"
  echo "convex --residual convex"
  echo "convex-bias-3 --residual convex --gate_bias -3"
}
line() {  # depth, learning rate, seed, label, flags
  echo "runs/stability/$1-$4-lr$2-seed$3 --n_layer $1 --lr $2 --seed $3 --n_embd 64 --block_size 64 --max_iters 300" \
       "--eval_interval 100 ${*:5}"
}
LABELS=$(for depth in 4 8 16 32; do variants | while read -r label flags; do echo "$depth-$label"; done; done)

for depth in 32 16 8 4; do
  for lr in 1.5e-3 3e-3; do variants | while read -r label flags; do line $depth $lr 1 "$label" $flags; done; done
done | run_all
"$PYTHON" results/compare.py runs/stability --best $LABELS | while read -r name lr; do
  label=${name#*-}; flags=$(variants | grep "^$label " | cut -d" " -f2-)
  for seed in 2 3; do line "${name%%-*}" "$lr" $seed "$label" $flags; done
done | run_all
for depth in 4 8 16 32; do
  "$PYTHON" results/compare.py runs/stability --out runs/stability/$depth.json $(echo "$LABELS" | grep "^$depth-")
done
"$PYTHON" results/stability.py
