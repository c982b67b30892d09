"""Does a residual do what its equation says? Measures each sublayer at one token.

    python workshop/check.py runs/w-nag

promise: the gate of NAG, or |b| of a residual that has a b. Beside it, the tangent of the angle by
which the sublayer rotates the stream, and |change of the stream| / |stream|.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from analyze import as_tensor
from flags import UserError, run
from model import Trace
from train import open_run

@torch.no_grad()
def measure(model, idx):
    """idx (1, T) -> (promise, tangent, relative change) of each sublayer, at the last token"""
    trace = Trace(model, policy=lambda trace: None, keep_streams=True)   # no token skips
    model(idx, trace=trace)
    rows = []
    for residual, before, after in zip(model.residuals(), trace.streams, trace.streams[1:]):
        x, y = (as_tensor(stream)[0, -1].double() for stream in (before, after))
        along = x @ y / x.norm()
        across = (y - along * x / x.norm()).norm()
        promise = torch.tensor(float("nan"))
        if hasattr(residual, "gate"):
            promise = residual.gate(before)[0, -1]
        elif hasattr(residual, "b"):
            promise = residual.b
        rows.append((promise.abs().item(), (across / along).item(),
                     ((y - x).norm() / x.norm()).item()))
    return rows

def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 1:
        raise UserError("give a run, such as runs/w-nag")
    model, _ = open_run(argv[0])
    print("sublayer   promise   tangent   change / stream")
    for layer_idx, row in enumerate(measure(model, torch.tensor([[*b"c314159265358\na"]]))):
        name = "am"[layer_idx % 2] + str(layer_idx // 2)
        print(f"{name:8}" + "{:10.6f}{:10.6f}{:18.6f}".format(*row))

if __name__ == "__main__":
    run(main)
