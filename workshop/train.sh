# The runs of the workshop, one after another: 12 minutes of one idle core.
#
#     SEED=107 bash workshop/train.sh > runs.log &
#
# It uses a copy of the code, so you can edit model.py meanwhile. Started again, it goes on where it was.
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
steps() { train "$@" --data data/steps --n_embd 64 --mlp_ratio 2 --schedule wsd --max_iters 1000; }
text() { train "$@" --data data/stdlib --n_embd 64 --max_tokens 3e5; }

steps 4 --n_layer 4
steps 1 --n_layer 1
steps 2 --n_layer 2
steps nag --n_layer 4 --residual nag --gate_lr 3e-3
steps mod --n_layer 4 --residual nag --gate_lr 3e-3 --mod_rate 0.25
steps again --n_layer 2 --repeat 2:3
text text --residual pre
text text-nag --residual nag
text text-gpt2 --residual pre --init gpt2
text text-nag-gpt2 --residual nag --init gpt2
