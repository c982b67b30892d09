#!/usr/bin/env bash
# What the papers say about norms, contributions, gradients, attention sinks, outliers and rounding, on one
# set of runs: 12 blocks of width 64, 300 steps of 1,024 tokens, three seeds. Learning rates are the best of a
# sweep with seed 1. About 15 minutes on two idle cores.
#     bash results/claims.sh               prints a table, writes results/claims.json and results/claims.png
#     SWEEP=1 bash results/claims.sh       the sweep, too: half an hour (claims.json holds one)
#     SCALE=gpu bash results/claims.sh pre nag attnres       some of them, `pre` first
set -euo pipefail
SIZE="--n_layer 12 --n_embd 64 --block_size 64" STEPS=300 LRS=
. "$(dirname "$0")/common.sh"
variants() {   # label, learning rates of the sweep with the best one first, flags
  echo "pre 1.5e-3,7.5e-4,3e-3 --residual pre"
  echo "nag 3e-3,1.5e-3,6e-3 --residual nag"
  echo "lns 3e-3,7.5e-4,1.5e-3,6e-3 --residual lns"
  echo "peri 4.8e-2,6e-3,1.2e-2,2.4e-2 --residual peri"
  echo "attnres 1.5e-3,7.5e-4,3e-3 --residual attnres"
  # 8 depth blocks, as in the paper
  echo "attnres-block3 1.5e-3,7.5e-4,3e-3,6e-3 --residual attnres --attnres_block 3"
  echo "hyper-lite 1.5e-3,7.5e-4,3e-3 --residual hyper"
}
LABELS=${*:-$(variants | cut -d" " -f1)}
rates() {
  sweep=$(variants | grep "^$1 " | cut -d" " -f2)
  if [ "$LRS" ]; then echo $LRS; elif [ "${SWEEP:-}" ]; then echo ${sweep//,/ }; else echo ${sweep%%,*}; fi
}
line() {  # label, learning rate, seed
  echo "$RUNS/claims/$1-lr$2-seed$3 $SIZE --gate_lr 3e-3 --max_iters $STEPS --eval_interval $((STEPS / 3))" \
       "--lr $2 --seed $3 $(variants | grep "^$1 " | cut -d" " -f3-)"
}

for label in $LABELS; do for lr in $(rates $label); do line $label $lr 1; done; done | run_all
best $RUNS/claims $LABELS | while read -r label lr; do line $label $lr 2; line $label $lr 3; done | run_all
py results/compare.py $RUNS/claims --out $RUNS/claims/compare.json $LABELS
FOLDERS=$(chosen $RUNS/claims/compare.json $LABELS |
  while read -r label lr; do echo $RUNS/claims/$label-lr$lr-seed{1,2,3}; done)
py analyze.py $FOLDERS --out $RUNS/claims/figures --windows 64 --only stream_norm contribution gradient_norm \
  attention_sink kurtosis weight_outliers quantisation norm_growth skip_curve
py results/claims.py
