#!/usr/bin/env bash
# Mixture-of-Depths in pretraining at equal executed FLOPs: what a run saves by skipping, it spends on more
# tokens. Before it: bash results/compare.sh, whose runs are the rates 0. About half an hour on two cores.
#     bash results/mod.sh                        prints the table, writes results/mod.json and results/mod.png
#     RATES="0.2 0.5" bash results/mod.sh        other rates beside those that are there
set -euo pipefail
SIZE="--n_layer 12" STEPS=420 LRS="1.5e-3"
. "$(dirname "$0")/common.sh"
[ $SCALE = cpu ] && RATES=${RATES:-0.125 0.25 0.375} || RATES=${RATES:-0.2 0.25}
chosen $OUT/compare.json pre nag | while read -r r lr; do   # each at the rate of its dense run
  LIMIT="--lr $lr --max_flops $(flops $SIZE --residual $r --max_iters $STEPS)"
  for seed in 1 2 3; do
    if [ $r = pre ]; then
      echo "$RUNS/mod/router-0.25-seed$seed --residual pre --seed $seed $SIZE --mod router" \
           "--mod_rate 0.25 $LIMIT"
    else for rate in $RATES; do
      echo "$RUNS/mod/nag-$rate-seed$seed --residual nag --seed $seed $SIZE --mod_rate $rate $LIMIT"
    done; fi
  done
done | run_all
py results/mod.py
