# Trains the models of the workshop, one after another: twenty minutes of one idle core.
#
#     make workshop                                         # all of it, with what it needs
#     SEED=107 bash workshop/train.sh >> runs.log &         # another seed, in the background
#
# It uses a copy of the code, so model.py can be edited meanwhile. Started again, it continues. On a
# shared server: export OMP_NUM_THREADS=1, one core and one copy of the repository per person.
code=$(mktemp -d)
cp *.py "$code" || exit 1

train() {   # name of the run, flags
  name=$1
  shift
  python "$code/train.py" --out "runs/w-$name" --resume --device cpu --seed "${SEED:-1337}" "$@"
}
puzzle() { train "$@" --data data/steps --n_embd 64 --mlp_ratio 2 --schedule wsd; }
deep() {
  train "$@" --data data/stdlib --n_layer 24 --n_embd 32 --batch_size 8 --max_iters 100 \
    --eval_interval 25
}

# Exercises 1 to 5
puzzle 1 --n_layer 1 --max_iters 1000
puzzle 2 --n_layer 2 --max_iters 1000
puzzle 4 --n_layer 4 --max_iters 1000
puzzle 6 --n_layer 6 --max_iters 1250
puzzle attnres --n_layer 4 --max_iters 1000 --residual attnres
deep convex --residual convex
deep review --residual review
deep convex-3 --residual convex:bias=-3

# Exercises 6 to 8
puzzle nag --n_layer 6 --max_iters 1250 --residual nag --residual_lr 3e-3
puzzle skip --n_layer 6 --max_iters 1250 --residual nag --residual_lr 3e-3 --mod gate:rate=0.25
puzzle loss --n_layer 6 --max_iters 1250 --residual nag --residual_lr 3e-3 --gate_loss 0.2 \
  --mod gate:below=0.05
