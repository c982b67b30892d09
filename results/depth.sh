#!/usr/bin/env bash
# NAG against PreNorm at 6 to 48 blocks of width 64, 200 steps of 1,024 tokens: for each depth and residual a sweep of
# the learning rate with seed 1, then seeds 2 and 3 at the best rate. About 15 minutes on two cores.
#     bash results/depth.sh                      prints the table, writes results/depth.json and results/depth.png
set -euo pipefail
. "$(dirname "$0")/common.sh"
line() {  # depth, residual, learning rate, seed
  echo "runs/depth/$1-$2-lr$3-seed$4 --residual $2 --lr $3 --seed $4 --n_layer $1 --n_embd 64 --block_size 64" \
       "--max_iters 200 --eval_interval 100"
}

for depth in 48 24 12 6; do
  for lr in 1.5e-3 3e-3 6e-3 1.2e-2; do line $depth pre $lr 1; line $depth nag $lr 1; done
done | run_all
"$PYTHON" results/depth.py --best | while read -r depth r lr; do line $depth $r $lr 2; line $depth $r $lr 3; done | run_all
"$PYTHON" results/depth.py
