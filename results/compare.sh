#!/usr/bin/env bash
# The default CPU run with several residuals at equal tokens: a sweep of four learning rates with one seed, then two
# more seeds at each residual's best rate. About an hour on two cores; prints a table, writes results/compare.json.
#   bash results/compare.sh [residual ...]          PYTHON=.venv/bin/python by default
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
RESIDUALS=${*:-pre nag lns}
export OMP_NUM_THREADS=1   # two runs side by side use two cores better than one run on both

rates() {  # four a residual; nag's optimum is higher than the others'
  case $1 in nag) echo "1.5e-3 3e-3 6e-3 1.2e-2" ;; *) echo "7.5e-4 1.5e-3 3e-3 6e-3" ;; esac
}

run() {  # residual, learning rate, seed; a finished run is not repeated, an interrupted one goes on
  out=runs/compare/$1-lr$2-seed$3
  [ -f "$out/done" ] && return
  again=$([ -f "$out/ckpt.pt" ] && echo --resume || true)
  "$PYTHON" train.py --residual "$1" --lr "$2" --seed "$3" --out "$out" $again > /dev/null && touch "$out/done"
}
export -f run; export PYTHON

"$PYTHON" prepare.py stdlib > /dev/null
for r in $RESIDUALS; do for lr in $(rates $r); do echo "$r $lr 1"; done; done | xargs -P 2 -L 1 bash -c 'run "$@"' _
"$PYTHON" results/compare.py $RESIDUALS --best | while read -r r lr; do echo "$r $lr 2"; echo "$r $lr 3"; done |
  xargs -P 2 -L 1 bash -c 'run "$@"' _
"$PYTHON" results/compare.py $RESIDUALS
