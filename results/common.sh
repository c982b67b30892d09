# Sourced by the other scripts of this folder: run things from the repository's root, two at a time.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}
export OMP_NUM_THREADS=1   # two runs side by side use two cores better than one run on both

run() {  # run folder, flags of train.py; a finished run is not repeated, an interrupted one goes on
  out=$1; shift
  [ -f "$out/done" ] && return
  again=$([ -f "$out/ckpt.pt" ] && echo --resume || true)
  "$PYTHON" train.py --out "$out" "$@" $again > /dev/null && touch "$out/done"
}
export -f run; export PYTHON

run_all() {  # lines "folder flags..." on stdin
  xargs -P 2 -I{} bash -c 'run {}'
}

"$PYTHON" prepare.py stdlib > /dev/null
