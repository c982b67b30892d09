#!/usr/bin/env bash
# torch 2.13.0, Python 3.10 to 3.14, CPU. Our guess: 2 * 5 * 7 = 70 FLOPs for both products, and for an attention
# the same number whichever way a CPU computes it.
# Seen: 0 for a matrix times a vector, and 70 if the vector is a matrix of one column. 0 for the attention that a CPU
# chooses, and 4 * 2 * 16 * 16 * 8 = 16384 with SDPBackend.MATH. FlopCounterMode knows no formula for mv, addmv and the
# flash attention of CPUs, and what it doesn't know counts as nothing, without a word. So a model whose gate or score is
# x @ v, for a vector v, has fewer FLOPs by this counter than by hand, and on a CPU a Transformer has no attention.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.3.5 2>/dev/null
"$folder/env/bin/python" - <<'PYTHON'
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

def count(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()

print("torch", torch.__version__)
x, v = torch.ones(5, 7), torch.ones(7)
found = {"x @ v": count(lambda: x @ v), "torch.mv(x, v)": count(lambda: torch.mv(x, v)),
         "x.view(1, 5, 7) @ v": count(lambda: x.view(1, 5, 7) @ v), "x @ v[:, None]": count(lambda: x @ v[:, None]),
         "F.linear(x, v[None])": count(lambda: torch.nn.functional.linear(x, v[None]))}
q = torch.ones(1, 2, 16, 8)   # 2 heads, 16 tokens, 8 channels
found["attention"] = count(lambda: scaled_dot_product_attention(q, q, q))
with sdpa_kernel(SDPBackend.MATH):
    found["attention, MATH"] = count(lambda: scaled_dot_product_attention(q, q, q))
for name, flops in found.items():
    print(f"{name:22} {flops} FLOPs")
assert list(found.values()) == [0, 0, 0, 70, 70, 0, 16384], "this has changed"
PYTHON
