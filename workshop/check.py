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
def measure(model, idx):
    """-> of each sublayer: promise, tangent, |change| / |stream|, all of the last token of idx (1, T)"""
    rows, streams = [], model.walk(idx)
    for residual, before, after in zip(model.residuals(), streams, streams[1:]):
        x, y = (residual.as_tensor(stream)[0, -1].double() for stream in (before, after))
        along = x @ y / x.norm()
        across = (y - along * x / x.norm()).norm()
        rows.append([promise(residual, before), (across / along).item(), ((y - x).norm() / x.norm()).item()])
    return rows

def main(run):
    model, _ = open_run(run)
    print("sublayer    promise    tangent of the angle    |change| / |stream|")
    for place, row in enumerate(measure(model, torch.tensor([[*b"c314159265358\na"]])), 1):
        print("{:5d} {:14.6f} {:18.6f} {:23.6f}".format(place, *row))

if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("name a run: python workshop/check.py runs/w-nag")
    main(sys.argv[1])
