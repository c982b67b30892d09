#!/usr/bin/env bash
# Every residual at one small scale: 6 blocks of width 64, 300 steps of 1,024 tokens, three seeds, each at the
# best learning rate of a sweep. Prints the table of results/tables.md.
#     bash results/residuals.sh                  20 minutes on two cores, by the 13 s of a run
#     SWEEP=1 bash results/residuals.sh          the sweep, too: 50 minutes, by the same
#     SCALE=gpu bash results/residuals.sh pre siamese ngpt       some of them, `pre` first
set -euo pipefail
SIZE="--n_layer 6 --n_embd 64 --block_size 64" STEPS=300 LRS="1.5e-3 3e-3 6e-3 1.2e-2"
. "$(dirname "$0")/common.sh"

variants() {   # label, flags
  for r in pre post peri reordered lns mixln deepnorm keel rezero skipinit layerscale nag attnres \
           denseformer; do
    echo "$r --residual $r"
  done
  echo "attnres-block3 --residual attnres --attnres_block 3"
  for r in review convex highway siamese; do echo "$r --residual $r"; done
  echo "convex-bias-3 --residual convex --gate_bias -3"
  echo "half --residual review --gate_input none"
  for kind in lite mhc hc; do echo "hyper-$kind --residual hyper --hyper_kind $kind"; done
  echo "ngpt --residual ngpt --warmup 0 --weight_decay 0"
  echo "pre-value_residual --residual pre --value_residual"
  echo "pre-x0 --residual pre --x0"
  # the gates against PreNorm and Highway of the same size: specs, "cleaner match"
  echo "pre-mlp6 --residual pre --mlp_ratio 6"
  echo "highway-mlp5 --residual highway --mlp_ratio 5"
}
LABELS=${*:-$(variants | cut -d" " -f1)}
line() {  # label, learning rate, seed
  echo "$RUNS/residuals/$1-lr$2-seed$3 $SIZE --max_iters $STEPS --eval_interval $((STEPS / 2))" \
       "--gate_lr 3e-3 --lr $2 --seed $3 $(variants | grep "^$1 " | cut -d" " -f2-)"
}

[ $SCALE = gpu ] && FAR= || FAR="2.4e-2 4.8e-2"
rates() {   # gates may have a second best rate, far from the first
  case $1 in pre | review | half | highway* | convex-bias-3 | pre-mlp6) echo $LRS $FAR ;;
    *) echo $LRS ;;
  esac
}
three_seeds $RUNS/residuals $LABELS
py results/compare.py $RUNS/residuals --sort --out $JSON $LABELS
[ $SCALE = gpu ] || [ "$*" ] && exit   # speed.py times a CPU, and all of them
# parameters, time of a step, memory, decoding: one interleaved run
OMP_NUM_THREADS=2 py results/speed.py --n_layer 6 --n_embd 64 --block_size 64 --batch_size 16 --rounds 15 \
  --out $OUT/residuals_speed.json pre post peri reordered lns mixln deepnorm keel rezero skipinit layerscale \
  nag attnres "attnres --attnres_block 3" denseformer review convex highway siamese hyper \
  "hyper --hyper_kind mhc" "hyper --hyper_kind hc" ngpt "pre --value_residual" "pre --x0"
