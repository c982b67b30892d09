#!/usr/bin/env bash
# Mixture-of-Depths in pretraining at equal executed FLOPs: what a run saves by skipping, it spends on more
# tokens. 12 blocks of width 64, the FLOPs of 600 dense steps of 1,024 tokens, three seeds; learning rates are
# the best of a sweep of `nag` and `pre` without skipping and of the router. Under half an hour on two cores.
#     bash results/mod.sh                        prints the table, writes results/mod.json and results/mod.png
#     SWEEP=1 bash results/mod.sh                the sweep, too: ten minutes more
#     RATES="0.1 0.6" bash results/mod.sh        other rates beside those that are there
set -euo pipefail
SIZE="--n_layer 12 --n_embd 64 --block_size 64" STEPS=600 LRS="1.5e-3 3e-3 6e-3"
. "$(dirname "$0")/common.sh"
[ $SCALE = cpu ] && RATES=${RATES:-0.125 0.2 0.25 0.375 0.5} || RATES=${RATES:-0.2 0.25}
PRE="--residual pre --max_flops $(flops $SIZE --residual pre --max_iters $STEPS)"
NAG="--residual nag --max_flops $(flops $SIZE --residual nag --max_iters $STEPS)"
line() {  # label, learning rate, seed
  case $1 in
    pre-0) flags=$PRE ;;
    router-*) flags="$PRE --mod router --mod_rate ${1#*-}" ;;
    nag-*) flags="$NAG --mod_rate ${1#*-}" ;;
  esac
  echo "$RUNS/mod/$1-lr$2-seed$3 $SIZE $flags --eval_interval $((STEPS / 2)) --lr $2 --seed $3"
}

SWEPT="nag-0 pre-0 router-0.25"
three_seeds $RUNS/mod $SWEPT
py results/compare.py $RUNS/mod --out $RUNS/mod/swept.json $SWEPT
chosen $RUNS/mod/swept.json nag-0 | while read -r _ lr; do   # as without skipping
  for rate in $RATES; do for seed in 1 2 3; do line nag-$rate $lr $seed; done; done
done | run_all
py results/mod.py
