#!/usr/bin/env bash
# mhc 0.5.5, torch 2.13.0, CPU. Our guess: MHCSequential is a residual network whose skips mix earlier states, so
# gradients flow through the skips, and the first of 50 layers learns. The README promises gradient flow at 200 layers,
# and the project's guide to troubleshooting says that detach_history=False is the default.
# Seen: it is True. Each state is cut off from the graph before it gets into a skip, so the forward pass has skips and
# the backward pass has none: the gradient goes through every layer's weights one after the other, and vanishes as in a
# network without skips. At 50 layers the first layer's is less than 1e-30 of what it is with detach_history=False, at
# equal outputs. With layers that output 0 (many people start a residual network so) there is none at all.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q mhc==0.5.5 torch==2.13.0 numpy==2.3.5 matplotlib==3.10.7 2>/dev/null
OMP_NUM_THREADS=1 "$folder/env/bin/python" - <<'PYTHON'
import importlib.metadata
import torch
from mhc import MHCSequential

print("mhc", importlib.metadata.version("mhc"), "torch", torch.__version__)
class Layer(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.LayerNorm(32), torch.nn.Linear(32, 32))

def run(depth, **choice):
    torch.manual_seed(0)
    model = MHCSequential([Layer() for _ in range(depth)], max_history=4, mode="mhc", constraint="simplex", **choice)
    output = model(torch.randn(8, 32))
    output.square().mean().backward()
    first, last = (model.wrapped_modules[i][1].weight.grad.abs().max().item() for i in (0, -1))
    print(f"{depth} layers, {choice or 'default'}: gradient of the first layer {first:.1e}, of the last {last:.1e}")
    return output, first, last

def zero(**choice):
    torch.manual_seed(0)
    first, *others = [Layer() for _ in range(6)]
    for layer in others:
        torch.nn.init.zeros_(layer[1].weight)
    model = MHCSequential([first, *others], **choice)
    model(torch.randn(8, 32)).square().mean().backward()
    found = first[1].weight.grad.abs().max().item()
    print(f"6 layers, the last 5 start at 0, {choice or 'default'}: gradient of the first layer {found:.1e}")
    return found

found = {depth: (run(depth), run(depth, detach_history=False)) for depth in (10, 50)}
nothing, something = zero(), zero(detach_history=False)
for default, attached in found.values():
    assert torch.equal(default[0], attached[0]), "this has changed"
assert found[10][0][1] < 1e-3 < 0.1 < found[10][1][1], "this has changed"
assert found[50][0][1] < 1e-25 < 0.1 < found[50][1][1] and nothing == 0 < something, "this has changed"
PYTHON
