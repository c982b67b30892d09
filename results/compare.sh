#!/usr/bin/env bash
# Residuals at equal tokens: a sweep of the learning rate with seed 1, then seeds 2 and 3 at the best rate.
#     bash results/compare.sh [residual ...]     about an hour on two cores; prints the table of the README
set -euo pipefail
. "$(dirname "$0")/common.sh"
RESIDUALS=${*:-pre nag lns}

line() { echo "runs/compare/$1-lr$2-seed$3 --residual $1 --lr $2 --seed $3"; }

for r in $RESIDUALS; do for lr in 7.5e-4 1.5e-3 3e-3 6e-3; do line $r $lr 1; done; done | run_all
"$PYTHON" results/compare.py runs/compare --best $RESIDUALS | while read -r r lr; do
  line $r $lr 2; line $r $lr 3
done | run_all
"$PYTHON" results/compare.py runs/compare --out results/compare.json $RESIDUALS
