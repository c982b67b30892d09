#!/usr/bin/env bash
# Residuals at equal tokens: a sweep of the learning rate with seed 1, then seeds 2 and 3 at the best rate.
#     bash results/compare.sh [residual ...]     about 40 minutes on two cores; prints the table of the README
set -euo pipefail
SIZE="--n_layer 12" STEPS=420 LRS="7.5e-4 1.5e-3 3e-3 6e-3"
. "$(dirname "$0")/common.sh"
RESIDUALS=${*:-pre nag lns}

line() { echo "$RUNS/compare/$1-lr$2-seed$3 --residual $1 --lr $2 --seed $3 $SIZE --max_iters $STEPS"; }

for r in $RESIDUALS; do for lr in $LRS; do line $r $lr 1; done; done | run_all
best $RUNS/compare $RESIDUALS | while read -r r lr; do
  line $r $lr 2; line $r $lr 3
done | run_all
py results/compare.py $RUNS/compare --out $OUT/compare.json $RESIDUALS
