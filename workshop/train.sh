# The runs of the workshop, one after another: twenty minutes of one idle core.
#
#     SEED=107 bash workshop/train.sh >> runs.log &
#
# It uses a copy of the code, so you can edit model.py meanwhile. Started again, it goes on where it was.
#
# For teachers. The day before, run it, and train w-broken, w-steady and w-cheat as the page says. Hand out
# runs/ and your model.py only to those who can't train: this script goes on with a ready run, whatever its
# seed. Offline: pip download -d wheels -r requirements.txt pytest pytest-xdist, once on each kind of machine
# that people bring. Then PIP_NO_INDEX=1 PIP_FIND_LINKS=$PWD/wheels make. On a shared server:
# export OMP_NUM_THREADS=1, a core a person, and for each a copy of the repository without runs/.
seed=${SEED:-100}
code=$(mktemp -d)
cp *.py "$code" || exit 1

train() {   # the name of a run, then flags
  out=runs/w-$1
  shift
  if test -f "$out/ckpt.pt"
  then python "$code/train.py" --out "$out" --resume
  else python "$code/train.py" --out "$out" --device cpu --seed "$seed" "$@"
  fi
}
puzzle() { train "$@" --data data/steps --n_embd 64 --mlp_ratio 2 --schedule wsd; }
deep() { train "$@" --data data/stdlib --n_layer 24 --n_embd 32 --batch_size 8 --max_iters 100 --eval_interval 25; }

# Those of the first exercises come first.
puzzle 4 --n_layer 4 --max_iters 1000
puzzle 1 --n_layer 1 --max_iters 1000
puzzle 2 --n_layer 2 --max_iters 1000
puzzle skip --n_layer 6 --max_iters 1250 --residual nag --gate_lr 3e-3 --mod gain:rate=0.25
puzzle attnres --n_layer 4 --max_iters 1000 --residual attnres
deep convex --residual convex
deep review --residual review
deep convex-3 --residual convex:bias=-3
puzzle nag --n_layer 6 --max_iters 1250 --residual nag --gate_lr 3e-3
puzzle pay --n_layer 6 --max_iters 1250 --residual nag --gate_lr 3e-3 --gain_cost 0.2 --mod gain:below=0.05
