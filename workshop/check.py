"""
Does a residual keep its promise? What each sublayer does to one token, measured:

    python workshop/check.py runs/w-nag

Of each sublayer it prints the promise: the gain of NAG, or |b| if the residual has a b. Beside it stand the tangent of
the angle by which the token's stream turns, and |change| / |stream|.
"""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from runs import open_run

def promise(residual, stream):
    if residual.knows_gain:
        return residual.gain(stream)[0, -1].abs().item()
    return residual.b.abs().item() if hasattr(residual, "b") else float("nan")

@torch.no_grad()
def main(run):
    model, _ = open_run(run)
    idx = torch.tensor([[*b"c314159265358\na"]])
    print("sublayer    promise    tangent of the angle    |change| / |stream|")
    for residual, (place, before, after) in zip(model.residuals(), model.walk(idx)):
        x, y = (residual.as_tensor(stream)[0, -1].double() for stream in (before, after))
        along = (x @ y) / x.norm()
        tangent = (y.square().sum() - along ** 2).clamp_min(0).sqrt() / along
        print(f"{place:5d} {promise(residual, before):14.6f} {tangent:18.6f} {(y - x).norm() / x.norm():23.6f}")

if __name__ == "__main__":
    main(*sys.argv[1:])
