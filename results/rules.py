"""
Two questions that take more than a loss: what run.py measures of trained models, and the rules by
which summarize.py and README.md answer. (Rules were written before the seeds that decide had run.)

1. Does a cost for turning make skipping free, and does it know who needs depth? Takes trained runs
of NAG, lets tokens skip, and counts the steps that are left, or, on code, the bits.

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

All this was measured up to commit e690699, where NAG paid from the start. Whether training is free
stayed open. Now the cost comes late (cost_factor in model.py; seeds 17 to 19 chose it). The rule
for this, written before seeds 20 to 29 ran:

    python results/run.py late --out mine         # and `late depth`; on code `late price`

At the FLOPs of above, paying late is *free in training* if, over these seeds, a fifth or more of
all sublayer runs is skipped below 0.05, and the steps are equal within 0.25 to those of NAG that
never skips, or better. Whether a seventh step is learned is a coin at this length of training. So
bits per byte stand beside the steps, with a margin of 0.02, but don't decide. It *knows who needs
depth* if, below 0.05, six steps run more than copies on nine of ten seeds, and if it is ahead of
both controls. More blocks *are worth their price* if eight or twelve that pay late (seeds 20 to 24)
are better than six that all run. The same is asked of twelve on code (seeds 7 to 11; the models
that all run are those of `price`, so they were known).

2. Is PreNorm diluted here, and does another residual cure it? Takes trained runs of 24 blocks, and
looks at each block: at the first weights, and at the end.

    python results/run.py ill --out mine     # writes mine/ill.csv

A line of ill.csv is a measure of a run, with a number a block. All are means over tokens:

    stream     the rms of what a block hands on: of the stream after it. With Block Attention
               Residuals, of its source so far, which begins anew every three blocks
    change     |stream after - stream before| / |stream before|. (Block Attention Residuals: of the
               sum of all updates, which is what PreNorm's stream would be)
    gradient   the norm of the gradient of its weights, mean over steps of the training
    worth      the rise of the loss (nats) without the block

The rule, written before seeds 2 to 4 ran. PreNorm *is diluted* if, in all three seeds, the slope
of log stream on log block is 0.4 to 0.6 or more, and the stream grows with the block (Spearman's
correlation above 0.8), and the median change of the last eight blocks is below half of that of the
first eight. NAG *cures* that if this ratio of changes is nearer to 1 than PreNorm's in all three
seeds. Block Attention Residuals keep their outputs *bounded* if the largest stream is less than 3
times the smallest, and the first block of a group hands on less than the block before it. Gradients
and worth are reported: no rule.

`fanin` looks at Gradient Fan-in Asymmetry (CascadeFormer, arXiv:2606.26538): PreNorm, 12 blocks,
300 iterations, text. In PreNorm, the gradient at a block is a sum over all later blocks, so there
are fewer terms the deeper it is. The paper says that gradients fall with depth and go with what
blocks are worth, that equal gradients don't restore the worth of late blocks, and that running
these several times does. Our rule, written before seeds 2 to 5 ran: gradients *fall* if Spearman's
correlation with the block is below -0.5 in all four seeds, and *go with worth* if their rank
correlation with it is above 0.5 in all four. Something *restores* late blocks if the last third's
share of the worth of all blocks is larger than in the plain run of the same seed and optimizer, in
all four seeds. AdamW hardly sees how large gradients are, so only SGD's are made equal. (SGD was
left out later, because at two rates it hardly trained.) Blocks 1 to 4 that run thrice are the
control: a block that is removed is removed wherever it runs.

Two runs of width 768 ask whether NAG's lead with GPT-2's first weights is one of narrow models: std
0.02 was meant for about this width. It is, if the lead is smaller there than with width 64. (On a
GPU, bfloat16, 16,384 tokens a step. Seed 1 has chosen among the rates 5e-4, 1e-3 and 2e-3. The rule
was written before a run of this width.)

`lasts` asks whether NAG's lead with AdamW and GPT-2's first weights is one of the start, and
whether the embedding makes it. Code, six blocks, 300 and 3,000 iterations: PreNorm, NAG, and
PreNorm with GPT-2's first weights but for its embedding, which has std 3 (--init embedding). Rates:
seed 1 chooses of 0.001, 0.002 and 0.006 (0.012, too, if that was the best). The rule, written
before seeds 30 to 33 ran: the lead *lasts* if NAG is better than PreNorm at 3,000 iterations, too.
It *is one of the start* if it is smaller there than at 300, surely, and NAG isn't better at 3,000,
or leads by less than a fifth of the lead at 300. The embedding *makes the lead*, at a length, if
PreNorm with it is better than PreNorm, and better than NAG or equal within 0.02; it makes *a part*
if PreNorm with it is better than PreNorm, and worse than NAG.
"""
import csv
import statistics

import numpy as np
import torch

import prepare
from analyze import ALL_RUN, coins, mean_loss, steps_learned
from model import ByGain, GPT, Trip, places_of

# ------------------------------------------------------------------------- 1: a cost for turning

BELOW = 0.02, 0.05, 0.1, 0.2
CONTROLLED = 0.05, 0.1   # the angles at which both controls are measured
ASKED = "copies", "one step", "two steps", "three steps", "four steps", "five steps", "six steps"

def score(run, decider, without=()):
    """run: a Run of analyze.py -> an array: the share of right digits by steps asked, or, of code,
    bits per byte alone"""
    if run.puzzle:
        return np.array(run.right_by_steps(decider, without))
    return np.array([run.bits * mean_loss(run.model, run.batches, decider, without) / run.loss])

def as_columns(score, run):
    """-> columns of runs.csv"""
    if not run.puzzle:
        return dict(bits=f"{score.item():.5f}")
    return dict(right=" ".join(f"{share:.3f}" for share in score),
                steps=f"{steps_learned(score, run.guess):.3f}")

def greedy_sets(model, windows, most):
    """-> `most` sets of places: of one sublayer, of two, .., each with the one more that is missed
    least"""
    gone, found = set(), []
    for _ in range(most):
        rest = {*range(1, 2 * len(model.order) + 1)} - gone
        losses = {place: mean_loss(model, windows, ALL_RUN, gone | {place})
                  for place in rest}
        gone = gone | {min(losses, key=losses.get)}
        found.append(gone)
    return found

def score_of_fixed_set(run, sets, share):
    """-> the score if `share` of the sublayers is removed: a mix of two sets"""
    count = share * 2 * len(run.model.order)
    smaller, part = int(count), count % 1
    scores = [score(run, ALL_RUN, gone) for gone in ([set()] + sets)[smaller:smaller + 2]]
    return (1 - part) * scores[0] + part * scores[1]

def skipped_by_steps(run, decider):
    """-> the share of the sublayer runs that is skipped, by steps asked"""
    def skipped(idx, targets):
        trip = Trip(run.model, decider)
        run.model(idx, trip=trip)
        return 1 - trip.who_ran().float().mean(0, keepdim=True)
    return run.by_steps(skipped)[0]

def measure_skipping(run):
    """Yields what is skipped, and columns of runs.csv"""
    model, config = run.model, run.config
    def columns(skipped, score):
        return dict(skipped=f"{skipped:.3f}", **as_columns(score, run))

    yield "all run", columns(0.0, score(run, ALL_RUN))
    ran, skipped = {}, {}
    for below in BELOW:
        decider = ByGain(model.config, below=below)
        ran[below] = run.share_that_ran(decider)
        skipped[below] = 1 - ran[below].mean().item()
        yield f"below {below}", columns(skipped[below], score(run, decider))

    most = int(max(skipped[below] for below in CONTROLLED) * 2 * len(model.order)) + 1
    windows = prepare.windows_of(config["data"], "train", config["block_size"], 64)
    sets = greedy_sets(model, list(zip(*(tokens.split(8) for tokens in windows))), most)
    torch.manual_seed(0)   # for the coins
    for below in CONTROLLED:
        removed = score_of_fixed_set(run, sets, skipped[below])
        yield f"a fixed set for {below}", columns(skipped[below], removed)
        at_random = score(run, coins(ran[below]))
        yield f"coins for {below}", columns(skipped[below], at_random)
        if run.puzzle:
            shares = skipped_by_steps(run, ByGain(model.config, below=below))
            for asked, share in zip(ASKED, shares):
                yield f"below {below}, {asked}", dict(skipped=f"{share:.3f}")

# ------------------------------------------------------------------------------------ 2: dilution

ILL_COLUMNS = ["variant", "seed", "when", "measure", "values", "commit", "command"]

def rms(x):
    return x.square().mean(-1).sqrt()

def stream_and_change(model, idx):
    """-> two lists, with a number a block; see above"""
    handed_on, changes = [], []
    streams = model.walk(idx)[::2]   # before block 1, and after each block, which is two sublayers
    for earlier, stream in zip(streams, streams[1:]):
        before, now = model.ends.as_tensor(earlier), model.ends.as_tensor(stream)
        source = model.ends.running_sum(stream)   # of AttnRes: that of the last group
        handed_on.append(rms(source).mean().item())
        changes.append((rms(now - before) / rms(before)).mean().item())
    return handed_on, changes

def numbers_by_block(model, batches, history):
    """Yields (when, measure, a number a block). history: what metrics.jsonl says, by step"""
    new = GPT(model.config).eval().to(model.device)
    for when, each in ("first weights", new), ("trained", model):
        stream, change = np.mean([stream_and_change(each, idx) for idx, _ in batches], axis=0)
        yield when, "stream", stream
        yield when, "change", change
    logged = [entry["grad_norms"] for entry in history.values() if "grad_norms" in entry]
    yield "trained", "gradient", np.mean(logged, axis=0).tolist()
    whole = mean_loss(model, batches)
    yield "trained", "worth", [
        mean_loss(model, batches, without=places_of(model, i)) - whole
        for i in range(len(model.blocks))]

def measure_blocks(run, history):
    """Yields lines of ill.csv."""
    for when, name, values in numbers_by_block(run.model, run.batches, history):
        yield dict(when=when, measure=name, values=" ".join(f"{value:.4g}" for value in values))

def read_ill(path):
    """ill.csv -> {(variant, when, measure): {seed: numbers}}"""
    found = {}
    with open(path, newline="", encoding="utf-8") as f:
        for line in csv.DictReader(f):
            key = line["variant"], line["when"], line["measure"]
            numbers = [float(number) for number in line["values"].split()]
            found.setdefault(key, {})[line["seed"]] = numbers
    return found

def slope(values):
    """Of log value on log block, by least squares"""
    blocks = np.arange(1, len(values) + 1)
    return np.polyfit(np.log(blocks), np.log(values), 1)[0]

def rank_correlation(xs, ys):
    """Spearman's. Equal values have the mean of their ranks."""
    ranks = [[(values < value).sum() + (values <= value).sum() for value in values]
             for values in (np.array(xs), np.array(ys))]
    return np.corrcoef(*ranks)[0, 1]

def spearman(values):
    """Rank correlation of a value with its block"""
    return rank_correlation(range(len(values)), values)

def late_by_early(values):
    """Median of the last third of the blocks / median of the first third"""
    third = len(values) // 3
    return statistics.median(values[-third:]) / statistics.median(values[:third])

def late_share(values):
    """Of the last third of the blocks, in the sum of all"""
    return sum(values[-(len(values) // 3):]) / sum(values)
