#!/usr/bin/env bash
# Mixture-of-Depths in pretraining at equal executed FLOPs: what a run saves by skipping, it spends on more tokens.
# Before it: bash results/compare.sh, whose runs are the rates 0. About 20 minutes on two cores.
#     bash results/mod.sh                        prints the table, writes results/mod.json and results/mod.png
set -euo pipefail
. "$(dirname "$0")/common.sh"
flops() { "$PYTHON" -c "
from model import GPT, GPTConfig
print(3 * 420 * 16 * 128 * GPT(GPTConfig(residual='$1')).flops_per_token())"; }

NAG=$(flops nag) PRE=$(flops pre)
for seed in 1 2 3; do
  for rate in 0.125 0.25 0.375; do
    echo "runs/mod/nag-$rate-seed$seed --residual nag --lr 1.5e-3 --seed $seed --mod_rate $rate --max_flops $NAG"
  done
  echo "runs/mod/router-0.25-seed$seed --residual pre --lr 1.5e-3 --seed $seed --mod router --mod_rate 0.25 --max_flops $PRE"
done | run_all
"$PYTHON" results/mod.py
