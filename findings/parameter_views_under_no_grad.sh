#!/usr/bin/env bash
# torch 2.13.0, Python 3.10 to 3.14, CPU. Our guess: False, as the documentation of torch.no_grad says ("the result
# of every computation will have requires_grad=False", factory functions excepted).
# Seen: a computation says False, but a view of a Parameter (a slice, a reshape) says True, with no grad_fn, and it
# is no leaf that anybody made. So FlopCounterMode, which follows modules by hooks on the gradients of what they get,
# finds no gradient function, and raises AssertionError. Whoever passes a module a part of another one's weight, in
# an evaluation whose FLOPs are counted, meets it. (What helps: give the module the weight, and slice inside.)
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.3.5 2>/dev/null
"$folder/env/bin/python" - <<'PYTHON'
import torch
from torch.utils.flop_counter import FlopCounterMode

class Product(torch.nn.Module):
    def forward(self, x, weight):
        return x @ weight.T

print("torch", torch.__version__)
weight, x = torch.nn.Parameter(torch.ones(4, 3)), torch.ones(2, 3)
with torch.no_grad():
    found = {"2 * weight": 2 * weight, "weight[:2]": weight[:2], "weight.view(3, 4)": weight.view(3, 4)}
    for name, tensor in found.items():
        print(f"{name:20} requires_grad={tensor.requires_grad}  grad_fn={tensor.grad_fn}")
    try:
        with FlopCounterMode(display=False):
            Product()(x, weight[:2])
        said = "no error"
    except AssertionError as error:
        said = f"AssertionError: {error}"
print("a module gets weight[:2] under FlopCounterMode:", said)
assert [tensor.requires_grad for tensor in found.values()] == [False, True, True], "this has changed"
assert said == "AssertionError: Expected gradient function to be set", "this has changed"
PYTHON
