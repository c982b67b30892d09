"""
Does a cost for turning make skipping free, and does it know who needs depth? Takes trained runs of
NAG, lets tokens skip, and counts the steps that are left, or, on code, the bits.

    python results/run.py cost --out mine    # On code it is the experiment `price`.

The rule, written before seeds 7 to 11 ran. (They left both questions open. So seeds 12 to 16 were
added, and all ten decide.) A cost makes skipping *free* if, over these seeds, a
fifth or more of all sublayer runs is skipped below a gain of 0.05, as in training, and the steps
are equal within 0.25 to those of NAG that never skips, at equal training FLOPs. It *knows who
needs depth* if, skipping below 0.1, digits to be copied skip more than those six steps away, and
if it is ahead of both controls, which skip as much:

    a fixed set   of sublayers for all tokens, chosen one by one: each time the one without which
                  the loss is lowest, on training windows. Not a whole number of sublayers is
                  skipped, so it is a mix: some texts run the smaller set, the others the larger
    coins         each sublayer is skipped by as many tokens as by gain, but by random ones
"""
import numpy as np
import torch

import dataset
from analyze import ALL_RUN, coins, in_batches, mean_loss, steps_learned
from model import ByGain, Without

BELOW = 0.02, 0.05, 0.1, 0.2
CONTROLLED = 0.05, 0.1   # the angles at which both controls are measured
ASKED = "copies", "one step", "two steps", "three steps", "four steps", "five steps", "six steps"

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

def score(inspected, decider):
    """-> an array: the share of right digits by steps asked, or, of code, bits per byte alone"""
    if inspected.puzzle:
        return np.array(inspected.right_by_steps(decider))
    loss = mean_loss(inspected.model, inspected.batches, decider)
    return np.array([inspected.bits * loss / inspected.loss])

def as_columns(score, inspected):
    """-> columns of runs.csv"""
    if not inspected.puzzle:
        return dict(bits=f"{score.item():.5f}")
    return dict(right=" ".join(f"{share:.3f}" for share in score),
                steps=f"{steps_learned(score, inspected.guess):.3f}")

def fixed_set(inspected, sets, share):
    """-> the score if `share` of the sublayers is removed: a mix of two sets"""
    count = share * 2 * len(inspected.model.order)
    smaller, part = int(count), count % 1
    scores = [score(inspected, Without(gone, ALL_RUN))
              for gone in ([set()] + sets)[smaller:smaller + 2]]
    return (1 - part) * scores[0] + part * scores[1]

def skipped_by_steps(inspected, decider):
    """-> the share of the sublayer runs that is skipped, by steps asked"""
    def skipped(idx, targets):
        _, ran = inspected.forward(idx, decider)
        return 1 - ran.float().mean(0, keepdim=True)
    return inspected.by_steps(skipped)[0]

def measure(inspected):
    """Yields what is skipped, and columns of runs.csv"""
    model, config = inspected.model, inspected.config
    def columns(skipped, score):
        return dict(skipped=f"{skipped:.3f}", **as_columns(score, inspected))

    yield "all run", columns(0.0, score(inspected, ALL_RUN))
    ran, skipped = {}, {}
    for below in BELOW:
        decider = ByGain(model.config, below)
        ran[below] = inspected.share_that_ran(decider)
        skipped[below] = 1 - ran[below].mean().item()
        yield f"below {below}", columns(skipped[below], score(inspected, decider))

    most = int(max(skipped[below] for below in CONTROLLED) * 2 * len(model.order)) + 1
    windows = dataset.windows_of(config["data"], "train", config["block_size"], 64)
    sets = greedy_sets(model, in_batches(*windows), most)
    torch.manual_seed(0)   # for the coins
    for below in CONTROLLED:
        removed = fixed_set(inspected, sets, skipped[below])
        yield f"a fixed set for {below}", columns(skipped[below], removed)
        at_random = score(inspected, coins(ran[below]))
        yield f"coins for {below}", columns(skipped[below], at_random)
        if inspected.puzzle:
            shares = skipped_by_steps(inspected, ByGain(model.config, below))
            for asked, share in zip(ASKED, shares):
                yield f"below {below}, {asked}", dict(skipped=f"{share:.3f}")
