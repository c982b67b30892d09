"""
Is PreNorm diluted here, and does another residual cure it? Takes trained runs of 24 blocks, and
looks at each block: at the first weights, and at the end.

    python results/run.py ill --out mine    # writes mine/ill.csv

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
"""
import csv
import statistics

import numpy as np

from analyze import mean_loss
from model import GPT, Without, places_of

COLUMNS = ["variant", "seed", "when", "measure", "values", "commit", "command"]

def rms(x):
    return x.square().mean(-1).sqrt()

def stream_and_change(model, idx):
    """-> two lists, with a number a block; see above"""
    handed_on, changes, before = [], [], None
    for stream in model.walk(idx)[::2]:   # the embedding's, and those after blocks
        now = model.ends.as_tensor(stream)
        if before is not None:
            source = now
            if model.ends.stream_grows:
                source = list(stream[1].values())[-1].value   # of AttnRes: that of the last group
            handed_on.append(rms(source).mean().item())
            changes.append((rms(now - before) / rms(before)).mean().item())
        before = now
    return handed_on, changes

def measure(inspected, history):
    """Yields lines of ill.csv. history: what metrics.jsonl says, by step"""
    for when, name, values in numbers_by_block(inspected.model, inspected.batches, history):
        yield dict(when=when, measure=name, values=" ".join(f"{value:.4g}" for value in values))

def numbers_by_block(model, batches, history):
    """Yields (when, measure, a number a block)"""
    new = GPT(model.config).eval().to(model.device)
    for when, each in ("first weights", new), ("trained", model):
        stream, change = np.mean([stream_and_change(each, idx) for idx, _ in batches], axis=0)
        yield when, "stream", stream
        yield when, "change", change
    logged = [entry["grad_norms"] for entry in history.values() if "grad_norms" in entry]
    yield "trained", "gradient", np.mean(logged, axis=0).tolist()
    whole = mean_loss(model, batches)
    yield "trained", "worth", [
        mean_loss(model, batches, Without(places_of(model, i), model.decider)) - whole
        for i in range(len(model.blocks))]

def read_lines(path):
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
