"""
Does a cost for turning make skipping free, and does it know who needs depth? Takes trained runs of
NAG on the steps text, lets tokens skip, and counts the steps that are left.

    python results/run.py cost      # trains them
    python results/cost.py          # appends to runs.csv

The rule, written before seeds 7 to 11 ran. A cost makes skipping *free* if, over these seeds, a
fifth or more of all sublayer runs is skipped below a gain of 0.05, as in training, and the steps
are equal within 0.25 to those of NAG that never skips, at equal training FLOPs. It *knows who
needs depth* if, skipping below 0.1, digits to be copied skip more than those six steps away, and
if it is ahead of both controls, which skip as much:

    a fixed set   of sublayers for all tokens, chosen one by one: each time the one without which
                  the loss is lowest, on training windows. Not a whole number of sublayers is
                  skipped, so it is a mix: some texts run the smaller set, the others the larger
    coins         each sublayer is skipped by as many tokens as by gain, but by random ones
"""
import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "results"), str(ROOT)]
import analyze
import prepare
import run
from analyze import ALL_RUN, flip, mean_loss, right_by_steps
from flags import flag, parse, say, start
from model import ByFunction, ByGain, Without

BELOW = 0.02, 0.05, 0.1, 0.2
CONTROLLED = 0.05, 0.1   # the angles at which both controls are measured
ASKED = "copies", "one step", "two steps", "three steps", "four steps", "five steps", "six steps"

@dataclass
class CostConfig:
    experiment: str = flag("cost", "the experiment in runs.csv whose runs are measured")
    out: str = flag("results/runs.csv", "file of the lines")

def greedy_sets(model, windows, most):
    """-> `most` sets of places: of one sublayer, of two, .., each with the one more that is missed
    least"""
    gone, found = set(), []
    for _ in range(most):
        rest = {*range(1, 2 * len(model.order) + 1)} - gone
        losses = {place: mean_loss(model, windows, Without(gone | {place}, ALL_RUN))
                  for place in rest}
        gone = gone | {min(losses, key=losses.get)}
        found.append(gone)
    return found

def fixed_set(inspected, sets, share):
    """-> right digits by steps asked if `share` of the sublayers is removed: a mix of two sets"""
    count = share * 2 * len(inspected.model.order)
    smaller, part = int(count), count % 1
    right = [np.array(right_by_steps(inspected, Without(gone, ALL_RUN))[0])
             for gone in ([set()] + sets)[smaller:smaller + 2]]
    return (1 - part) * right[0] + part * right[1]

def skipped_by_steps(inspected, decider):
    """-> the share of the sublayer runs that is skipped, by steps asked"""
    def skipped(idx, targets):
        _, ran = inspected.forward(idx, decider)
        return 1 - ran.float().mean(0, keepdim=True)
    return analyze.by_steps(inspected, skipped)[0]

def measure(inspected, windows):
    """Yields what was done, share skipped, and right digits by steps asked (or None). windows: of
    the training text, in batches, to choose a fixed set by"""
    model = inspected.model
    found = {below: right_by_steps(inspected, ByGain(model.config, below)) for below in BELOW}
    skipped = {below: float(1 - sum(ran) / len(ran)) for below, (_, ran) in found.items()}
    yield "all run", 0.0, right_by_steps(inspected, ALL_RUN)[0]
    for below in BELOW:
        yield f"below {below}", skipped[below], found[below][0]
    if not model.config.gain_cost:
        return   # It hardly skips, so there is nothing to control.
    most = int(max(skipped[below] for below in CONTROLLED) * 2 * len(model.order)) + 1
    sets = greedy_sets(model, windows, most)
    for below in CONTROLLED:
        yield f"a fixed set for {below}", skipped[below], fixed_set(inspected, sets, skipped[below])
        coins = ByFunction(functools.partial(flip, found[below][1]))
        yield f"coins for {below}", skipped[below], right_by_steps(inspected, coins)[0]
        for asked, share in zip(ASKED, skipped_by_steps(inspected, ByGain(model.config, below))):
            yield f"below {below}, {asked}", share, None

@torch.no_grad()
def main(argv=None):
    args, = parse((CostConfig,), argv, __doc__)
    known = {(row["variant"], row["seed"]) for row in run.read_runs(args.out)}
    for row in run.trained(args.experiment, args.out):
        if (f"{row['variant']}, all run", row["seed"]) in known:
            continue
        folder = run.folder_of(row)
        inspected = run.inspect(folder)
        config = inspected.config
        training = prepare.windows_of(config["data"], "train", config["block_size"], 64)
        torch.manual_seed(0)   # for the coins
        # All of a run is measured before its first line is written: so it is there whole, or not.
        found = list(measure(inspected, analyze.in_batches(*training)))
        for what, skipped, right in found:
            line = dict.fromkeys(run.COLUMNS, "") | dict(
                experiment=row["experiment"], variant=f"{row['variant']}, {what}", seed=row["seed"],
                lr=row["lr"], skipped=f"{skipped:.3f}", command=f"results/cost.py {folder.name}")
            if right is not None:
                line |= run.learned(right, inspected)
            run.append(args.out, line)
        say(f"{row['variant']}, seed {row['seed']}: measured")

if __name__ == "__main__":
    torch.set_num_threads(1)
    os.chdir(ROOT)
    start(main)
