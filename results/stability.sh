#!/usr/bin/env bash
# Does a gate survive depth? Final loss of the convex and the additive gate at 4 to 32 blocks of width 64, 300
# steps of 1,024 tokens, three seeds, each at the better of two learning rates. Less than half an hour on two
# cores, which it takes with both.
#     bash results/stability.sh                  prints the table, writes results/stability.json and .png
#     SWEEP=1 bash results/stability.sh          both learning rates
#     DEPTHS=32 SCALE=gpu bash results/stability.sh pre review convex      some of the depths and gates
set -euo pipefail
SIZE="--n_embd 64 --block_size 64" STEPS=300 LRS="1.5e-3 3e-3"
. "$(dirname "$0")/common.sh"
variants() {   # label, flags
  echo "pre --residual pre"
  echo "half --residual review --gate_input none"
  echo "review --residual review"
  echo "convex --residual convex"
  echo "convex-bias-3 --residual convex --gate_bias -3"
}
DEPTHS=${DEPTHS:-32 16 8 4} LABELS=${*:-$(variants | cut -d" " -f1)}
line() {  # depth-label, learning rate, seed
  echo "$RUNS/stability/$1-lr$2-seed$3 $SIZE --n_layer ${1%%-*} --lr $2 --seed $3 --max_iters $STEPS" \
       "--eval_interval $((STEPS / 3)) $(variants | grep "^${1#*-} " | cut -d" " -f2-)"
}
edge() { :; }   # two rates each, wherever the best is

LABELS=$(for depth in $DEPTHS; do for label in $LABELS; do echo $depth-$label; done; done)
three_seeds $RUNS/stability $LABELS
py results/compare.py $RUNS/stability --out $JSON $LABELS
py results/stability.py
