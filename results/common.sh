# Sourced by the other scripts of this folder, which say SIZE, STEPS and LRS or LR before: run things from the
# repository's root, two at a time.
#     SCALE=gpu bash results/X.sh    the same runs at the sizes of the table below, one at a time on one GPU
#     SWEEP=1 bash results/X.sh      find the learning rates anew; else they are those of results/*.json
#     DRY=1 bash results/X.sh        print the commands instead
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}
export OMP_NUM_THREADS=1   # two runs side by side use two cores better than one run on both
SCALE=${SCALE:-cpu} DRY=${DRY:-} SWEEP=${SWEEP:-} RUNS=runs OUT=results JOBS=2 DROP=
[ "$SCALE" = cpu ] || [ "$SCALE" = gpu ] || { echo "SCALE=$SCALE: use cpu or gpu" >&2; exit 1; }

if [ "$SCALE" = gpu ]; then   # the one place that says what a GPU changes
  RUNS=runs/gpu OUT=results/gpu JOBS=1 OMP_NUM_THREADS=8
  # Within ten minutes a command: 10 s to start and 4 steps of 32,768 tokens per second at 12 x 768 are
  # estimates until a GPU has run this; compiling would cost more than it gains. Rates are three times apart.
  SIZE="--data data/python --n_layer 12 --n_head 12 --n_embd 768 --block_size 1024 --batch_size 32"
  SIZE="$SIZE --no-compile"
  LRS="5e-4 1.5e-3 4.5e-3" LR=1.5e-3
  DROP="ckpt.pt best.pt"   # 2 GB a checkpoint would fill the disk; those that are analysed stay
  case $(basename "$0" .sh) in
    compare | residuals) STEPS=100 ;;   # three residuals a command
    mod) STEPS=70 ;;
    claims) STEPS=100 DROP=best.pt ;;
    widths) STEPS=60 ;;
    gfa) STEPS=50 DROP=best.pt ;;
    prune) STEPS=300 DROP=best.pt ;;
    # narrow, since it is the depth that counts; 48 and 96 blocks are a command each (DEPTHS=96)
    depth) STEPS=50 SIZE="${SIZE/--n_head 12 --n_embd 768/--n_head 4 --n_embd 256}" ;;
    stability) STEPS=90 SIZE="${SIZE/--n_head 12 --n_embd 768/--n_head 4 --n_embd 256}" ;;
  esac
fi
JSON=$OUT/$(basename "$0" .sh).json
export PYTHON RUNS OUT DROP

py() {
  if [ "$DRY" ]; then echo "python $*"; else "$PYTHON" "$@"; fi
}

run() {  # run folder, flags of train.py; a finished run is not repeated, an interrupted one goes on
  out=$1; shift
  [ -f "$out/done" ] && return
  again=$([ -f "$out/ckpt.pt" ] && echo --resume || true)
  "$PYTHON" train.py --out "$out" "$@" $again > /dev/null || return
  touch "$out/done"
  for name in $DROP; do rm -f "$out/$name"; done
}
export -f run

run_all() {  # lines "folder flags..." on stdin
  if [ "$DRY" ]; then sed "s/^/python train.py --out /"; return; fi
  xargs -P $JOBS -I{} bash -c 'run {}'
}

rates() { echo $LRS; }   # label -> learning rates with which its sweep begins; scripts may have their own

known() {  # label -> the learning rate that an earlier sweep found; nothing if none did, or with SWEEP=1
  [ "$SWEEP" ] || [ ! -f $JSON ] || "$PYTHON" -c "
import json, sys
print(json.load(open(sys.argv[1])).get(sys.argv[2], {}).get('lr', ''))" $JSON $1
}

begin() { lr=$(known $1); echo ${lr:-$(rates $1)}; }

best() {  # folder, labels -> lines "label rate": the learning rate that is best for seed 1, where seeds lack
  if [ "$DRY" ]; then first "${@:2}"; return; fi   # a dry run can't know
  "$PYTHON" results/compare.py "$1" --best "${@:2}"
}

first() { for label in "$@"; do echo $label $(begin $label | cut -d" " -f1); done; }

edge() {  # folder, labels -> lines "label rate": the next rate of a sweep whose best is its first or last
  if [ "$DRY" ] || [ $SCALE = gpu ]; then return; fi   # a GPU's ten minutes have no room for it
  "$PYTHON" results/compare.py "$1" --edge "${@:2}"
}

sweep() {  # folder, labels: seed 1 at each rate, and on where the best was the first or last
  for label in "${@:2}"; do for lr in $(begin $label); do line $label $lr 1; done; done | run_all
  for _ in 1 2 3 4 5; do
    edge "$@" | while read -r label lr; do line $label $lr 1; done | run_all
  done
}

three_seeds() {  # folder, labels: a sweep, then seeds 2 and 3 at its best rate; `line` has a run's flags
  sweep "$@"
  best "$@" | while read -r label lr; do line $label $lr 2; line $label $lr 3; done | run_all
}

chosen() {  # JSON of compare.py, labels -> lines "label rate": the rate of the three seeds
  if [ "$DRY" ]; then first "${@:2}"; return; fi
  "$PYTHON" -c "
import json, sys
for label in sys.argv[2:]:
    print(label, json.load(open(sys.argv[1]))[label]['lr'])" "$@"
}

flops() {  # flags of train.py with --max_iters -> matmul FLOPs of that run
  if [ "$DRY" ]; then echo 1e12; return; fi
  "$PYTHON" - "$@" <<< "
import sys
import prepare, train
from model import GPT
gpt, config, _ = train.resolve(sys.argv[1:])
gpt.vocab_size = -(-prepare.load_meta(config.data)['vocab_size'] // 64) * 64   # as train.py has it
print(3 * config.max_iters * config.batch_size * gpt.block_size * GPT(gpt).flops_per_token())"
}

python_sources() {  # 100 MB of this machine's sources, as files of 1 MB: folders hold more than sources
  mkdir -p data/python-text
  find "$("$PYTHON" -c "import sysconfig; print(sysconfig.get_path('stdlib'))")" \
       "$("$PYTHON" -c "import sysconfig; print(sysconfig.get_path('purelib'))")" -name "*.py" -print0 |
    sort -zu | xargs -0 cat | iconv -c -f UTF-8 -t UTF-8 | head -c 100M | split -C 1M - data/python-text/part-
}

if [ ! "$DRY" ]; then
  mkdir -p $OUT
  if [ "$SCALE" = cpu ]; then "$PYTHON" prepare.py stdlib > /dev/null
  elif [ ! -f data/python/meta.json ]; then
    [ -d data/python-text ] || python_sources || true   # head ends the pipe before find is done
    "$PYTHON" prepare.py text --input data/python-text --out data/python --tokenizer ${TOKENIZER:-gpt2}
  fi
fi
