"""
Does a cost for turning make skipping free, and does it know who needs depth? Takes trained runs of
NAG on the steps text, lets tokens skip, and counts the steps that are left.

    python results/run.py cost                      # trains them
    python results/cost.py runs/results/cost-*      # appends to runs.csv, as experiment "cost"

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
from analyze import ALL_RUN, flip, mean_loss, right_by_steps, steps_learned
from flags import flag, parse, refuse, say, start
from model import ByFunction, ByGain, Runner, Without
from runs import open_run, read_settings

BELOW = 0.02, 0.05, 0.1, 0.2
CONTROLLED = 0.05, 0.1   # the angles at which both controls are measured
ASKED = "copies", "one step", "two steps", "three steps", "four steps", "five steps", "six steps"

@dataclass
class CostConfig:
    runs: list = flag(None, "run folders of the steps text")
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
    def measure(idx, targets):
        runner = Runner(inspected.model, decider)
        inspected.model(idx, runner=runner)
        return 1 - analyze.who_ran(runner).float().mean(0, keepdim=True)
    return analyze.by_steps(inspected, measure)[0]

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
    args, = parse((CostConfig,), argv, __doc__, positional=("runs",))
    known = {(row["variant"], row["seed"]) for row in run.read_runs(args.out)}
    for folder in args.runs:
        model, config = open_run(folder)
        lr = read_settings(folder)["lr"]
        puzzle, seed = prepare.load_meta(config["data"]).get("steps"), str(config["seed"])
        if not puzzle or not config["residual"].startswith("nag"):
            refuse(f"{folder}: is no run of nag on the steps text; name one")
        name = "NAG that pays" if model.config.gain_cost else "plain NAG"
        name += "" if model.config.n_layer == 6 else f", {model.config.n_layer} blocks"
        if (f"{name}, all run", seed) in known:
            continue
        windows = prepare.windows_of(config["data"], "val", config["block_size"], 512)
        inspected = analyze.Run(model, config, windows, puzzle)
        torch.manual_seed(0)
        to_choose_by = prepare.windows_of(config["data"], "train", config["block_size"], 64)
        for what, skipped, right in measure(inspected, analyze.in_batches(*to_choose_by)):
            row = dict(experiment="cost", variant=f"{name}, {what}", seed=seed, lr=f"{lr:g}",
                       skipped=f"{skipped:.3f}", command=f"results/cost.py {Path(folder).name}")
            if right is not None:
                row |= dict(right=" ".join(f"{share:.3f}" for share in right),
                            steps=f"{steps_learned(right, inspected.guess):.3f}")
            run.append(args.out, dict.fromkeys(run.COLUMNS, "") | row)
            say(f"{row['variant']}, seed {seed}: {row.get('steps', 'no')} steps, "
                f"{skipped:.1%} skipped")

if __name__ == "__main__":
    torch.set_num_threads(1)
    os.chdir(ROOT)
    start(main)
