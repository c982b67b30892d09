#!/usr/bin/env bash
# Gradient fan-in asymmetry and its interventions: 12 blocks of width 64, 300 steps of 1,024 tokens, three
# seeds. About 25 minutes on two cores.
#     bash results/gfa.sh                        prints the table, writes results/gfa.json
#     bash results/gfa.sh repeat-early           some of its rows
set -euo pipefail
SIZE="--n_layer 12 --n_embd 64 --block_size 64" STEPS=300
LR=1.5e-3   # one rate, since the models differ in little else
. "$(dirname "$0")/common.sh"
variants() {
  echo "adamw --lr $LR"
  echo "adamw-equalized --lr $LR --equalize_grads"
  # no decay: at such a rate it would drive MLPs to zero faster than their gradients move them
  echo "sgd --optimizer sgd --lr 0.3 --gate_lr 0.3 --weight_decay 0"
  echo "sgd-equalized --optimizer sgd --lr 0.3 --gate_lr 0.3 --weight_decay 0 --equalize_grads"
  echo "repeat-late --lr $LR --repeat 9-12:3"
  echo "repeat-early --lr $LR --repeat 1-4:3"
  echo "unrolled --lr $LR --n_layer 20"
  echo "deep-supervision --lr $LR --deep_supervision"
}
LABELS=$(echo ${*:-$(variants | cut -d" " -f1)})
for seed in 1 2 3; do
  variants | while read -r label flags; do
    [[ " $LABELS " = *" $label "* ]] || continue
    echo "$RUNS/gfa/$label-seed$seed $SIZE --max_iters $STEPS --eval_interval $((STEPS / 3))" \
         "--seed $seed $flags"
  done
done | run_all
FOLDERS=$(for label in $LABELS; do echo $RUNS/gfa/$label-seed{1,2,3}; done)
py analyze.py $FOLDERS --out $RUNS/gfa/figures --windows 64 --only fan_in block_removal
py results/gfa.py $LABELS
