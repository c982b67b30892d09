#!/usr/bin/env bash
# NAG against PreNorm and others at 6 to 96 blocks of width 64, 200 steps of 1,024 tokens: for each depth and
# residual a sweep of the learning rate with seed 1, on until its best is inside, then seeds 2 and 3 at the best
# rate. Minutes on two cores: 16 for 6 and 12 blocks, 16 for 24, 34 for 48 and 61 for 96, less for fewer residuals.
#     bash results/depth.sh                  6 and 12 blocks; prints tables, adds to results/depth.json and .png
#     DEPTHS=96 bash results/depth.sh pre nag nag-warm       other depths, some of the residuals, `pre` first
#     DEPTHS=96 SCALE=gpu bash results/depth.sh pre nag
set -euo pipefail
SIZE="--n_embd 64 --block_size 64" STEPS=200 LRS=
. "$(dirname "$0")/common.sh"
DEPTHS=${DEPTHS:-6 12}
[ $SCALE = cpu ] && NAMES=${*:-pre nag nag-warm lns peri attnres} || NAMES=${*:-pre nag}
variant() {   # name -> learning rates at which its sweep starts
  case $1 in
    pre) echo "7.5e-4 1.5e-3 3e-3" ;;
    nag | nag-warm) echo "3e-3 6e-3 1.2e-2" ;;
    lns) echo "7.5e-4 1.5e-3 3e-3" ;;
    peri) echo "9.6e-2 1.92e-1 3.84e-1" ;;
    attnres) echo "7.5e-4 1.5e-3 3e-3" ;;
  esac
}
rates() { echo ${LRS:-$(variant ${1#*-})}; }
flags() {   # blocks, name -> flags
  case $2 in
    nag-warm) echo "--residual nag --alpha_warmup 0.3" ;;   # the step sizes of NAG rise from 0
    attnres) echo "--residual attnres --attnres_block $(($1 < 12 ? 2 : $1 / 4))" ;;   # 8 blocks, as in the paper
    *) echo "--residual $2" ;;
  esac
}
line() {  # depth-residual, learning rate, seed
  echo "$RUNS/depth/$1-lr$2-seed$3 $SIZE --n_layer ${1%%-*} $(flags ${1%%-*} ${1#*-}) --lr $2 --seed $3" \
       "--max_iters $STEPS --eval_interval $((STEPS / 2))"
}

for depth in $DEPTHS; do
  LABELS=$(for name in $NAMES; do echo $depth-$name; done)
  for label in $LABELS; do
    for lr in $(rates $label); do line $label $lr 1; done
  done | run_all
  for _ in 1 2 3 4 5; do   # on, where the best rate was the last one tried
    edge $RUNS/depth $LABELS | while read -r label lr; do line $label $lr 1; done | run_all
  done
  best $RUNS/depth $LABELS | while read -r label lr; do line $label $lr 2; line $label $lr 3; done | run_all
  py results/compare.py $RUNS/depth --out $RUNS/depth/$depth.json $LABELS
done
py results/depth.py
