#!/usr/bin/env bash
# Residuals at equal tokens, three seeds, each at the best learning rate of a sweep.
#     bash results/compare.sh                    20 minutes, by half its runs; prints the table of the README
#     SWEEP=1 bash results/compare.sh            the sweep, too: 40 minutes
#     bash results/compare.sh pre peri           other residuals; a new one is swept
set -euo pipefail
SIZE="--n_layer 12" STEPS=420 LRS="7.5e-4 1.5e-3 3e-3 6e-3"
. "$(dirname "$0")/common.sh"
RESIDUALS=${*:-pre nag lns}
line() { echo "$RUNS/compare/$1-lr$2-seed$3 --residual $1 --lr $2 --seed $3 $SIZE --max_iters $STEPS"; }

three_seeds $RUNS/compare $RESIDUALS
py results/compare.py $RUNS/compare --out $JSON $RESIDUALS
