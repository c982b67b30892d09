#!/usr/bin/env bash
# torch 2.13.0, Python 3.10 to 3.14, CPU. Our guess: 2 * 5 * 7 = 70 FLOPs for both products.
# Seen: 0 for a matrix times a vector, and 70 if the vector is a matrix of one column. FlopCounterMode knows no
# formula for mv and addmv, and what it doesn't know counts as nothing, without a word. So a model whose gate or
# score is x @ v, for a vector v, has fewer FLOPs by this counter than by hand; the same through F.linear or
# nn.Linear with one output is counted.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.3.5 2>/dev/null
"$folder/env/bin/python" - <<'PYTHON'
import torch
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
for name, flops in found.items():
    print(f"{name:22} {flops} FLOPs")
assert list(found.values()) == [0, 0, 0, 70, 70], "this has changed"
PYTHON
