#!/usr/bin/env bash
# What the Triton kernels give on a GPU: each op against torch.compile and a copy, then GPT-2 small (12 x 768,
# context 1024, bf16, compiled blocks): are the losses of 50 steps those of --kernels off, and tokens/s. 10 minutes.
#     bash results/kernels.sh                    writes results/kernels_gpu.json, prints the rest
set -euo pipefail
. "$(dirname "$0")/common.sh"
[ "$DRY" ] || "$PYTHON" -c "import torch, sys; sys.exit(not torch.cuda.is_available())" || {
  echo "results/kernels.sh: needs a CUDA GPU" >&2; exit 1; }
JOBS=1 DROP="ckpt.pt best.pt"
# bytes, but GPT-2's vocabulary: the head takes a third of the time
SIZE="--n_layer 12 --n_head 12 --n_embd 768 --block_size 1024 --vocab_size 50304 --batch_size 64 --grad_accum 4"
py kernels.py --quick --out results/kernels_gpu.json
for flags in "pre" "nag" "attnres --attnres_blocks 8" "attnres"; do
  for kernels in on off; do
    echo "$RUNS/kernels/${flags// /}-$kernels-seed1 $SIZE --lr 1e-3 --seed 1 --residual $flags" \
         "--kernels $kernels --max_iters 50 --log_interval 10 --eval_interval 50"
  done
done | run_all
[ "$DRY" ] || "$PYTHON" - $RUNS/kernels/*-seed1 <<< "
import json, sys
for run in sys.argv[1:]:
    rows = [row for row in map(json.loads, open(run + '/metrics.jsonl')) if 'tok_s' in row]
    print(run, f'{rows[-1][\"tok_s\"]:.0f} tokens/s, losses', *(f'{row[\"loss\"]:.4f}' for row in rows))"
