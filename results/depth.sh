#!/usr/bin/env bash
# NAG against PreNorm and others at 6 to 96 blocks of width 64: 100 steps of 1,024 tokens, three seeds, each at
# the best learning rate of a sweep. Under half an hour on two cores.
#     bash results/depth.sh                      prints tables, writes results/depth.json and results/depth.png
#     SWEEP=1 bash results/depth.sh              the sweeps, too: over an hour
#     DEPTHS=96 bash results/depth.sh pre nag    some of the depths and residuals, `pre` first
#     DEPTHS=96 SCALE=gpu bash results/depth.sh pre nag
set -euo pipefail
SIZE="--n_embd 64 --block_size 64" STEPS=100 LRS=
. "$(dirname "$0")/common.sh"
[ $SCALE = cpu ] && NAMES=${*:-pre nag lns peri attnres} || NAMES=${*:-pre nag}
[ $SCALE = cpu ] && DEPTHS=${DEPTHS:-96 48 24 12 6} || DEPTHS=${DEPTHS:-12 6}   # the longest first
rates() {   # depth-residual
  case ${1#*-} in
    nag) echo ${LRS:-6e-3 1.2e-2 2.4e-2 4.8e-2} ;;
    peri) echo ${LRS:-9.6e-2 1.92e-1 3.84e-1 7.68e-1} ;;
    *) echo ${LRS:-7.5e-4 1.5e-3 3e-3 6e-3} ;;
  esac
}
line() {  # depth-residual, learning rate, seed
  depth=${1%%-*} name=${1#*-}
  flags="--residual $name"
  # 8 depth blocks, as in the paper
  [ $name = attnres ] && flags="$flags --attnres_block $((depth < 12 ? 2 : depth / 4))"
  echo "$RUNS/depth/$1-lr$2-seed$3 $SIZE --n_layer $depth $flags --lr $2 --seed $3" \
       "--max_iters $STEPS --eval_interval $STEPS"
}

LABELS=$(for depth in $DEPTHS; do for name in $NAMES; do echo $depth-$name; done; done)
three_seeds $RUNS/depth $LABELS
py results/compare.py $RUNS/depth --out $JSON $LABELS
py results/depth.py
