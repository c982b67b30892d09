#!/usr/bin/env bash
# x-transformers 2.31.10, torch 2.13.0, CPU. Our guess: a Decoder is causal with every residual option that it takes:
# the logits of the first tokens do not depend on the last one. Options that can't be causal are refused.
# Seen: three options of a Decoder, taken without a word, look at later tokens. orthog_residual=True and
# attn_orthog_projected_values=True take out the part along the residual (along the values) by one dot product over
# the whole sequence, not one for each token; mv_split_residual=True uses means over the whole sequence. So in
# training a token can look at what it is to predict, and what a model predicts while it writes (later tokens not
# there yet) isn't what it predicts in training: the logits for a prefix are not the first logits for the longer
# text. gate_residual, scale_residual and integrate_layers are causal, as expected. Nothing in the README says so; for
# images, without an order, it would be no fault.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q x-transformers==2.31.10 torch==2.13.0 numpy==2.3.5 einops==0.8.2 einx==0.4.3 \
    torch-einops-utils==0.2.0 2>/dev/null
OMP_NUM_THREADS=1 "$folder/env/bin/python" - <<'PYTHON'
import importlib.metadata
import torch
from x_transformers import Decoder, TransformerWrapper

print("x-transformers", importlib.metadata.version("x-transformers"), "torch", torch.__version__)
options = [{}, dict(gate_residual=True), dict(scale_residual=True), dict(integrate_layers=True),
           dict(orthog_residual=True), dict(mv_split_residual=True), dict(attn_orthog_projected_values=True)]
tokens = torch.randint(0, 50, (4, 12), generator=torch.Generator().manual_seed(0))
other = tokens.clone()
other[:, -1] = (other[:, -1] + 1) % 50
leaks = []
for option in options:
    torch.manual_seed(0)
    layers = Decoder(dim=32, depth=4, heads=4, attn_dim_head=8, verbose=False, **option)
    model = TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers).eval()
    with torch.no_grad():
        logits = model(tokens)
        relative = logits.std()
        last = ((model(other) - logits)[:, 0].abs().max() / relative).item()
        prefix = ((model(tokens[:, :6]) - logits[:, :6]).abs().max() / relative).item()
    leaks.append((last, prefix))
    print(f"{', '.join(option) or 'no option':29} first logits change by {last:.1e} with the last token, "
          f"by {prefix:.1e} if the second half is left out (in standard deviations)")
assert all(max(pair) < 1e-5 for pair in leaks[:4]) and all(min(pair) > 1e-4 for pair in leaks[4:]), "this has changed"
PYTHON
