#!/usr/bin/env bash
# Does a skipped sublayer run save the time that its FLOPs say? Trains NAG at two sizes, 150 steps of 2,048 tokens,
# then times both, and random weights of the first size, against themselves without skipping. On an idle machine
# with 24 GB: five processes train side by side.
#     bash results/mod_speed.sh                  prints the table, writes results/mod_speed.json
set -euo pipefail
SIZE="--block_size 256 --batch_size 8" STEPS=150 LR=3e-3
. "$(dirname "$0")/common.sh"
JOBS=1   # each run has the machine to itself
# glibc asks for pages of 2 MB: buffers of ever new sizes then hardly wait for new pages. Without effect elsewhere.
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1
[ $SCALE = cpu ] && { SHAPES="12x256 24x384" T=256 DEVICE=cpu; unset OMP_NUM_THREADS; } ||
  { SHAPES="12x768 24x1024" T=1024 DEVICE=cuda; }
for shape in $SHAPES; do
  C=${shape#*x}
  echo "$RUNS/mod_speed/$shape-seed1 $SIZE --n_layer ${shape%x*} --n_head $((C / 64)) --n_embd $C" \
       "--residual nag --alpha_warmup 0.3 --lr $LR --seed 1 --max_iters $STEPS --eval_interval $STEPS"
done | run_all
py results/mod_speed.py --runs $(printf "$RUNS/mod_speed/%s-seed1 " $SHAPES) --shapes ${SHAPES%% *}x$T \
  --device $DEVICE --out $OUT/mod_speed.json
