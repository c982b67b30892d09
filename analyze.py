"""
What each layer of one or several runs does: a page of figures that opens in any browser.

    python analyze.py runs/nag runs/pre --out figures           # then open figures/index.html
    python analyze.py runs/nag --text "def add(a, b):"          # with a map of a text of your own
    python analyze.py runs/nag --only removal,skip_curve
    python analyze.py --list                                    # each statistic in a sentence

Writes OUT/index.html, OUT/STATISTIC.png and OUT/numbers.json. Sublayers have the numbers l = 1 .. 2L in the
order in which they run: odd ones are attention, even ones MLP. Windows and loss are those of train.py, so a
checkpoint has one loss everywhere. A model that was trained with skipping skips here, too.
"""
import base64, codecs, functools, io, itertools, json, math, os, sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

os.environ["MPLBACKEND"] = "agg"   # Figures go to files only. Without this, matplotlib may want a window.
import matplotlib
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.ticker import EngFormatter

import prepare
from flags import flag, parse, printable, refuse, say, start
from model import (ByFunction, EVERYONE, SHARPNESS, Without, all_run, calibrate, flops_per_token,
                   num_params, ran_shares, why_not)
from processes import pick_device, pick_threads
from runs import explain_write_errors, open_run, read_metrics, write_file
from train import evaluate

@dataclass
class AnalyzeConfig:
    runs: list = flag(None, "run folders")
    out: str = flag("figures", "folder of the page, the figures and the numbers")
    only: str = flag("", "some statistics, such as removal,skip_curve; without it all")
    list: bool = flag(False, "print each statistic in a sentence")
    text: str = flag("", "a text, or a file with one, for the map of tokens and sublayers")
    skip: float = flag(0.25, "share of sublayer runs to skip, if the training has set none", 0, 0.95)
    windows: int = flag(0, "validation windows; 0: as many as in training", 0, 1e6)
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "auto: cuda where there is one")

STATS = {}   # name -> a statistic, in the order of a lesson

def stat(section, title, ylabel="", draw="lines", finding=None, **options):
    """Makes the function below it a statistic. The first paragraph of its docstring is the caption, the rest
    says how it is defined, and where it comes from. It gets a Run and returns what its drawing wants:

        lines        {panel: {name: line}}; a line is [y, ...] or [[x, y], ...]; the panel may be the y label
        heat         {panel: matrix}, a list of rows from below; None is grey
        depth_map    {"tokens": [text, ...], "size": rows of numbers, "ran": rows of booleans}

    NotHere says why a run can't have it. finding: a function from what it returned to a sentence for the page.
    options: of the drawing; first=1: at the top of the page."""
    def add(measure):
        caption, definition = (" ".join(part.split()) for part in measure.__doc__.split("\n\n", 1))
        STATS[measure.__name__] = SimpleNamespace(
            measure=torch.no_grad()(measure), section=section, title=title, ylabel=ylabel, draw=draw,
            finding=finding, options=options, caption=caption, definition=definition)
        return STATS[measure.__name__].measure
    return add

class NotHere(Exception):
    """One sentence: why a run can't have a statistic."""

class Run:
    """What a statistic gets: a run, and the ways through its model. windows: x, y (n, T)"""
    def __init__(self, model, config, history, args, windows, steps=None):
        self.model = model        # in eval mode
        self.steps = steps        # what meta.json says of the steps text: table, cells, most; None: another text
        self.config = config      # config.json
        self.history = history    # step -> what metrics.jsonl says about it
        self.args = args
        self.batches = in_batches(*(part.to(model.device) for part in windows))   # of (idx, targets)
        token_bytes = prepare.token_bytes(config, model.config.vocab_size)
        self.loss, self.bits, _ = evaluate(model, *windows, token_bytes, 8)   # nats per token, bits per byte

    # What is measured often is measured on every fourth window, and what is chosen, by as many other ones.
    # Windows are in the order of the text, so these, and every fourth of them, are from all over it.
    some = functools.cached_property(lambda self: every_fourth(self.batches, 0))
    others = functools.cached_property(lambda self: every_fourth(self.batches, 2))
    few = functools.cached_property(lambda self: every_fourth(self.some, 0))
    few_others = functools.cached_property(lambda self: every_fourth(self.others, 0))
    loss_of_some = functools.cached_property(lambda self: mean_loss(self.model, self.some))

    def streams(self, idx, decider=None):
        """The stream before each sublayer and at the end, as vectors: (2L + 1, B, T, C)"""
        found = []
        for _, before, after, _ in self.model.walk(idx, decider=decider):
            found.append(self.model.ends.as_tensor(before))
        return torch.stack([*found, self.model.ends.as_tensor(after)])

    def ends_of_blocks(self, idx):
        """The embedding's stream and that after each block, as the head can read them: L + 1 of them"""
        walk = list(self.model.walk(idx))
        return [before for _, before, _, _ in walk[::2]] + [walk[-1][2]]

    def visits(self, idx, decider=None):
        """Yields what walk does, and by what: residual, sublayer f, stream before, stream after, keep."""
        walk, sublayers = self.model.walk(idx, decider=decider), self.model.sublayers(idx)
        for (_, before, after, keep), (_, residual, f) in zip(walk, sublayers):
            yield residual, f, before, after, keep

    def steps_text(self):
        if not self.steps:
            raise NotHere("the depth of its text is not known; prepare.py steps makes one where it is")
        return self.steps

    def mean(self, measure, batches=None):
        """The mean over batches of measure(idx), a tensor"""
        batches = batches or self.batches
        return sum(measure(idx) for idx, _ in batches) / len(batches)

    def loss_with(self, decider):
        """The loss if this decider says who runs what: that of all windows, and its change on every fourth one.
        The change is far surer than a loss of so few windows: the same windows are in both of its terms."""
        return self.loss + mean_loss(self.model, self.some, decider) - self.loss_of_some

    def loss_without(self, numbers):
        return self.loss_with(Without(numbers, self.model.decider))

    @functools.cached_property
    def decider(self):
        """Who skips: as in training, or else, if this model can skip, by thresholds for --skip."""
        if self.config["mod_rate"] > 0 or why_not(self.model, "skip"):
            return self.model.decider
        return self.calibrate(self.args.skip)

    def calibrate(self, rate):
        """A threshold at which the model skips this share, found on windows from all over the text"""
        return calibrate(self.model, [idx for idx, _ in self.others], rate)

def in_batches(x, y):
    size = math.gcd(len(x), 8)   # All batches are as large, so that their means can be averaged.
    return list(zip(x.split(size), y.split(size)))

def every_fourth(batches, first):
    return in_batches(*(torch.cat(part)[first::4] for part in zip(*batches)))

def mean_loss(model, batches, decider=None):
    losses = [model(idx, targets, decider=decider)[1].item() for idx, targets in batches]
    return sum(losses) / len(losses)

def by_kind(values):
    """A value per sublayer -> a line of attentions and one of MLPs, with a value per block"""
    values = values.tolist() if torch.is_tensor(values) else values
    return {"attention": values[::2], "MLP": values[1::2]}

# ----------------------------------------------------------------------------- the steps text

STEPS = "The steps text"   # What is asked for is known, so these figures are right or wrong.

def steps_found(result):
    right, guessing = result["share of right digits"].values()
    wrong = [k for k, share in enumerate(right) if share < 0.95] + [len(right)]
    if wrong[0] == 0:
        return "has not even learned to copy a line"
    return (f"{steps_learned(right, guessing[0]):.1f} steps learned, where each counts by how far its share is above "
            f"guessing; at least 95 % of the digits are right up to {wrong[0] - 1} steps; shares of right digits: "
            + ", ".join(f"{share:.2f}" for share in right))

def steps_learned(right, guess):
    """Shares of right digits by steps asked, 0, 1, .. -> how many steps have been learned: each step
    counts by how far its share is above guessing. 3.0: three steps, and no more"""
    return sum(max(0.0, share - guess) / (1 - guess) for share in right[1:])

@stat(STEPS, "How many steps it has learned", finding=steps_found, x="steps asked for", start=0)
def steps(run):
    """How many of the digits are right, by the steps that lead to them. The further right a line falls, the better.

    Digits of the right half of a line, whose line before is in the window: each can be known, so the floor of
    the loss is 0. On the left, digits repeat soon, and can be guessed. Guessing: 1 / symbols, ln(symbols)."""
    symbols, n = len(run.steps_text()["table"]), run.steps_text()["most"] + 1
    def measure(idx, targets):
        logits = run.model(idx)[0]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return torch.stack((logits.argmax(-1) == targets, loss.view_as(targets)))
    right, loss = by_steps(run, measure)
    return {"share of right digits": {"measured": right, "guessing": [1 / symbols] * n},
            "loss (nats per digit)": {"measured": loss, "guessing": [math.log(symbols)] * n}}

def by_steps(run, measure):
    """measure(idx, targets) (rows, B, T) -> its mean over the digits of each number of steps: rows of numbers"""
    text, total, count = run.steps_text(), 0, 0
    for idx, targets in run.batches:
        asked, cell = prepare.steps_asked(torch.cat((idx[:, :1], targets), 1), text["cells"])
        asked = torch.where(cell >= text["cells"] // 2, asked, -1)
        is_asked = F.one_hot(asked + 1, text["most"] + 2)[..., 1:].double()                 # (B, T, steps)
        total = total + torch.einsum("rbt,bts->rs", measure(idx, targets).double(), is_asked)
        count = count + is_asked.sum((0, 1))
    if not count.all():
        raise NotHere("its validation windows lack some number of steps; give it more of them, with --windows")
    return (total / count).tolist()

@stat(STEPS, "What the head can read after each block", "blocks run", "heat", x="steps asked for",
      label="share of right digits", first_row=0, first_column=0, vmax=1)
def lens_by_steps(run):
    """What the head says after each block. A dark row can't be read yet, which doesn't mean that its block is idle.

    Share of right digits, as above. Final norm and head, applied to the stream after each block (row 0: to the
    embedding). Source: the logit lens, as in arXiv:2505.13898."""
    def measure(idx, targets):
        ends = run.ends_of_blocks(idx)
        return torch.stack([run.model.head(stream).argmax(-1) == targets for stream in ends])
    return {"": by_steps(run, measure)}

def removal_by_steps_found(result):
    left = [sum(row) / len(row) for row in result[""]]
    best = left.index(max(left))
    return (f"without block {best + 1}, {left[best]:.0%} of the digits are right, the most; without block 1, 2, ..: "
            + ", ".join(f"{share:.2f}" for share in left) + " (means over the rows)")

@stat(STEPS, "What is left without a block", "block left out", "heat", removal_by_steps_found, x="steps asked for",
      label="share of right digits", first_column=0, vmax=1)
def removal_by_steps(run):
    """Right digits without one block. A bright row: the model hardly needs this block.

    The stream passes a removed block unchanged; nothing is trained after it. Digits as above."""
    blocks = range(len(run.model.blocks))
    deciders = [Without(sublayers_of(run.model, block), run.model.decider) for block in blocks]
    def measure(idx, targets):
        return torch.stack([run.model(idx, decider=each)[0].argmax(-1) == targets for each in deciders])
    return {"": by_steps(run, measure)}

def depth_by_steps_found(result):
    ran, right = (panel["measured"] for panel in result.values())
    known = max((k for k, share in enumerate(right) if share >= 0.9), default=0)
    most = f"{known} steps, the most of which 90 % are right, {ran[known]:.1%}"
    if known == 0:
        most = f"{right[0]:.0%} of their digits are right"
    return (f"copies run {ran[0]:.1%} of the sublayers, and {most}; for 0, 1, .. steps: "
            + ", ".join(f"{share:.3f}" for share in ran))

@stat(STEPS, "Who skips", finding=depth_by_steps_found, x="steps asked for", start=0, limits=(0, 1.02))
def depth_by_steps(run):
    """Whether a token that needs less depth gets less: flat lines say that skipping knows no tokens.

    Counted where the digit is predicted, one character before it. Thresholds as in the map of tokens and
    sublayers."""
    run.steps_text()
    if run.config["mod_rate"] == 0 and (why := why_not(run.model, "skip")):
        raise NotHere(why)
    def measure(idx, targets):
        keeps = []
        logits = run.model(idx, decider=run.decider, keeps=keeps)[0]
        ran = [torch.ones_like(targets) if keep is EVERYONE else keep.float() for keep in keeps]
        return torch.stack((torch.stack(ran).mean(0), (logits.argmax(-1) == targets).float()))
    ran, right = by_steps(run, measure)
    return {"share of the sublayers that ran": {"measured": ran}, "share of right digits": {"measured": right}}

@stat(STEPS, "What can be known, and what cannot", "nats per token", x="blocks run", start=0)
def known_loss(run):
    """The loss of the digits that can be known, and of all the rest: letters, first lines, and line ends.

    Final norm and head after each block, as above. Here left digits count, too. The rest has a floor above 0."""
    text, sums = run.steps_text(), torch.zeros(2, len(run.model.order) + 1)
    n = torch.zeros(2, 1)
    for idx, targets in run.batches:
        asked, _ = prepare.steps_asked(torch.cat((idx[:, :1], targets), 1), text["cells"])
        groups = torch.stack((asked >= 0, asked < 0)).float().cpu()
        for i, stream in enumerate(run.ends_of_blocks(idx)):
            loss = F.cross_entropy(run.model.head(stream).transpose(1, 2), targets, reduction="none")
            sums[:, i] += (groups * loss.cpu()).sum((1, 2))
        n += groups.sum((1, 2))[:, None]
    known, rest = (sums / n).tolist()
    return {"": {"can be known": known, "the rest": rest}}

# ----------------------------------------------------------------------------- any text

@stat("The stream", "Loss while training", "loss (nats per token)", x="training tokens")
def loss_curve(run):
    """The loss on validation windows and on training batches, comparable between runs on the same data.

    As train.py has logged them. A training loss is that of a single step."""
    tokens, history = run.config["batch_size"] * run.config["block_size"], run.history.items()
    validation = [[step * tokens, entry["val_loss"]] for step, entry in history if "val_loss" in entry]
    training = [[step * tokens, entry["loss"]] for step, entry in history if "loss" in entry]
    return {"": {"validation": validation, "training": training}}

@stat("The stream", "Size of the stream", "root mean square", log=True, start=0, x="sublayers run")
def stream_norm(run):
    """A growing stream makes equal updates a smaller part: PreNorm dilution. NAG's are shares of it.

    |x| / sqrt(C) before each sublayer and at the end, mean over tokens, also without first tokens, which can
    be outliers. NAG: e^s, the norm that its direction stands for. Source: NAG, arXiv:2606.16112, figure 3."""
    size = run.mean(lambda idx: run.streams(idx).square().mean(-1).sqrt().mean(1))   # (2L + 1, T)
    return {"": {"all tokens": size.mean(1).tolist(), "without first tokens": size[:, 1:].mean(1).tolist()}}

def update_found(result):
    turned, summed = result["angle (degrees)"]["MLP"][-1], result["angles summed (degrees)"]["both"][-1]
    change = itertools.chain.from_iterable(zip(*result["|change| / |stream|"].values()))
    return (f"the last MLP turns the stream by {turned:.0f} degrees, and all sublayers together by {summed:.0f}; "
            f"|change| / |stream| of sublayer 1, 2, ..: " + ", ".join(f"{each:.2f}" for each in change))

@stat("The stream", "What a sublayer changes", finding=update_found, x="block", log=True, first=1)
def update(run):
    """How much of the stream each sublayer rewrites and how far it turns it: near 0, it hardly does anything.

    Means over tokens of |after - before| / |before| and of the angle between before and after, which is also
    summed over depth. NAG turns by atan|gain|. Sources: arXiv:2505.13898; NAG, arXiv:2606.16112, figure 3."""
    def measure(idx):
        x = run.streams(idx)
        return torch.stack((relative(x[1:], x[:-1]), angles(x[1:], x[:-1]).rad2deg())).mean((2, 3))
    change, angle = run.mean(measure)
    return {"|change| / |stream|": by_kind(change), "angle (degrees)": by_kind(angle),
            "angles summed (degrees)": {"both": angle.cumsum(0)[1::2].tolist()}}

def relative(after, before):
    return (after - before).norm(dim=-1) / before.norm(dim=-1).clamp_min(1e-30)

def angles(x, y):
    """Between vectors (..., C), in radians. The arc cosine would lose half the digits of a small angle."""
    x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
    return 2 * torch.atan2((x - y).norm(dim=-1), (x + y).norm(dim=-1))

@stat("The stream", "Gradient per sublayer", "norm of the gradient", log=True, x="block")
def gradient_norm(run):
    """How strongly the loss pulls on the weights of each sublayer; AdamW then divides this size away.

    Euclidean norm of d(mean loss) / d(parameters of the sublayer and of its residual)."""
    with torch.enable_grad():
        for idx, targets in run.some:
            (run.model(idx, targets)[1] / len(run.some)).backward()
    pulls = []
    for pair in (pair for block in run.model.blocks for pair in block.pairs()):
        gradients = [p.grad for module in pair for p in module.parameters() if p.grad is not None]
        pulls.append(torch.nn.utils.get_total_norm(gradients).item())
    run.model.zero_grad()
    return {"": by_kind(pulls)}

@stat("The blocks", "Where the prediction forms", "nats per token", start=0, x="blocks run", first=1)
def logit_lens(run):
    """What the head would say after each block: its loss, and how far that is from the final prediction.

    Final norm and head, applied to the stream after each block (0: to the embedding). Distance: KL divergence
    from the final prediction to this one. Means over tokens. Source: arXiv:2505.13898."""
    rows = torch.zeros(len(run.model.order) + 1, 2)
    for idx, targets in run.batches:
        ends = run.ends_of_blocks(idx)
        final = run.model.head(ends[-1]).log_softmax(-1)
        for row, stream in zip(rows, ends):   # One at a time: with GPT-2's vocabulary, each takes gigabytes.
            here = run.model.head(stream).log_softmax(-1)
            row[0] += F.nll_loss(here.flatten(0, 1), targets.flatten()).item() / len(run.batches)
            row[1] += (final.exp() * (final - here)).sum(-1).mean().item() / len(run.batches)
    loss, distance = rows.T.tolist()
    return {"loss": {"after each block": loss}, "distance": {"after each block": distance}}

@stat("The blocks", "Who depends on whom", "block left out", "heat", x="later block", label="change")
def causal_score(run):
    """A row says how much the updates of later blocks change without one block; dark: they do without it.

    |u without the block - u| / |u|, u the update of a later block; mean over the tokens of two windows.
    Source: arXiv:2505.13898 (there, the maximum over tokens)."""
    idx, rows, blocks = run.few[0][0][::4], [], range(len(run.model.order))
    updates = run.streams(idx)[::2].diff(dim=0)                                             # (L, B, T, C)
    for i in blocks:
        changed = run.streams(idx, Without({2 * i + 1, 2 * i + 2}, run.model.decider))[::2].diff(dim=0)
        score = relative(changed, updates).mean((1, 2)).tolist()
        rows.append([score[later] if later > i else None for later in blocks])
    return {"": rows}

def removal_found(result):
    worth = result["one block"]["block"]
    best, least = worth.index(max(worth)), worth.index(min(worth))
    return (f"block {best + 1} is worth most, {worth[best]:.2f} nats, and block {least + 1} least, "
            f"{worth[least]:.2f}")

@stat("What can go", "What a sublayer is worth", "loss increase (nats)", finding=removal_found,
      x="without block", log=True, first=1)
def removal(run):
    """How much the loss rises without one sublayer, or without a whole block; near 0: it could go.

    What is removed does not run, and the stream passes unchanged, an outer norm (post) included. With
    attnres there is a source less. A block that --repeat runs several times is removed wherever it runs.
    Nothing is trained after it. Sources: LLM-Drop, arXiv:2406.15786; arXiv:2505.13898."""
    one = [run.loss_without({l + 1}) - run.loss for l in range(2 * len(run.model.order))]
    block = [run.loss_without(sublayers_of(run.model, i)) - run.loss for i in range(len(run.model.blocks))]
    return {"one sublayer": by_kind(one), "one block": {"block": block}}

def sublayers_of(model, block):
    """Numbers, from 1, of the sublayers that are runs of a block, numbered from 0"""
    return {l for i, number in enumerate(model.order) if number == block for l in (2 * i + 1, 2 * i + 2)}

@stat("What can go", "Removing more and more", "loss (nats per token)", start=0, x="removed", same_y=True)
def prune_curve(run):
    """Blocks, attentions or MLPs go in a method's order, which must beat random orders and `last first`.

    Lowest score first, no training after. CascadeFlow: gradient norms of a block, summed over the training, /
    sqrt(size), arXiv:2606.26538; magnitude: sum |w|; influence, attention, MLP: 1 - cos(stream before, stream
    after), arXiv:2403.03853, arXiv:2406.15786; worth: the loss without it alone. Scores are of other windows
    than losses. Random: the mean of three orders."""
    if run.model.config.repeat or run.model.config.mod == "router":
        raise NotHere("routed or repeated blocks don't stand alone")
    blocks, generator = run.model.blocks, torch.Generator().manual_seed(0)
    stays = run.mean(lambda idx: stay(run.streams(idx)), run.others)
    numbers = [sublayers_of(run.model, i) for i in range(len(blocks))]
    scores = block_scores(run) | {"attention": stays[::2], "MLP": stays[1::2]}
    groups = {"block": numbers, "attention": [{min(own)} for own in numbers],
              "MLP": [{max(own)} for own in numbers]}
    chance = {}
    for kind, group in groups.items():
        three = [loss_by_order(run, torch.rand(len(blocks), generator=generator), group) for _ in range(3)]
        chance[kind] = torch.tensor(three).mean(0).tolist()
    return {method: {"this order": loss_by_order(run, score, groups.get(method, numbers)),
                     "at random": chance.get(method, chance["block"])} for method, score in scores.items()}

def block_scores(run):
    """{method: a score for each block}. The lowest is to go first."""
    blocks = run.model.blocks
    without = [Without(sublayers_of(run.model, i), run.model.decider) for i in range(len(blocks))]
    scores = {"magnitude": [sum(p.abs().sum() for p in block.parameters()) for block in blocks],
              "influence": run.mean(lambda idx: stay(run.streams(idx)[::2]), run.others),
              "worth": [mean_loss(run.model, run.others, decider) for decider in without],
              "last first": [-i for i in range(len(blocks))]}
    if sums := gradient_sums(run):
        sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
        scores = {"CascadeFlow": [norm / size ** 0.5 for norm, size in zip(sums, sizes)]} | scores
    return scores

def stay(x):
    return (1 - F.cosine_similarity(x[:-1], x[1:], dim=-1)).mean((1, 2))

def gradient_sums(run):
    """Gradient norm of each block, summed over the training, as of the last evaluation. []: not known."""
    sums = [entry["grad_norms"] for entry in run.history.values()
            if any(entry.get("grad_norms", [])) and len(entry["grad_norms"]) == len(run.model.blocks)]
    return sums[-1] if sums else []

def loss_by_order(run, scores, groups):
    """The loss without the 0, 1, .. half of the groups of sublayers that have the lowest scores"""
    order, losses, gone = torch.as_tensor(scores).argsort(stable=True).tolist(), [run.loss], set()
    for i in order[:len(order) // 2]:
        gone = gone | groups[i]
        losses.append(run.loss_without(gone))
    return losses

@stat("What can go", "Gradient fan-in", "share of the summed gradient norms", x="block")
def fan_in(run):
    """How strongly the training has pulled on each block, beside a count of the gradients that reach it.

    Gradient norms of a block, summed over the training, / the sum of all. a and b are fitted. F = L - i + 1,
    or F (F + 1) / 2 under deep supervision; repeated blocks sum over places. Source: arXiv:2606.26538."""
    share, count = torch.tensor(gradient_sums(run)), torch.zeros(len(run.model.blocks))
    if len(share) == 0:
        raise NotHere("its metrics.jsonl holds no gradient norms yet")
    for F_l, block in zip(range(len(run.model.order), 0, -1), run.model.order):
        count[block] += F_l * (F_l + 1) / 2 if run.model.config.deep_supervision else F_l
    share, design = share / share.sum(), torch.stack((torch.ones_like(count), count), dim=1)
    fit = design @ torch.linalg.lstsq(design, share[:, None], driver="gelsd").solution
    return {"": {"measured": share.tolist(), "best a + b F": fit[:, 0].tolist()}}

def gain_found(result):
    return f"the last MLP has a mean gain of {result['']['MLP'][-1]:.2f}"

@stat("NAG", "Gain", "mean |gain|", finding=gain_found, log=True, x="block")
def gain(run):
    """The relative size of each sublayer's write, known before it runs; the step size is the most it can be.

    gain = alpha m, alpha the step size; mean over all tokens. Source: arXiv:2606.16112, figure 5."""
    gains = run.mean(lambda idx: all_gains(run, idx).mean((1, 2)))
    steps = [(residual.alpha * residual.warm).abs().item() for residual, *_ in run.visits(run.batches[0][0])]
    return {"": by_kind(gains) | {f"step size, {kind}": line for kind, line in by_kind(steps).items()}}

def all_gains(run, idx):
    """-> |gain| (2L, B, T)"""
    if not run.model.ends.knows_gain:
        raise NotHere("only nag has gains, directions and norms apart from each other")
    return torch.stack([residual.gain(before).abs()[..., 0] for residual, _, before, *_ in run.visits(idx)])

@stat("NAG", "Where sublayers write", "sublayer", "heat", x="sublayer", label="cosine", vmin=-1, cmap="PiYG")
def direction_similarity(run):
    """Cosines of the directions at which sublayers write most; at 1, two write at the same mean direction.

    Of v = sum over tokens of |gain| times direction. Source: arXiv:2606.16112, figure 6."""
    def measure(idx):
        directions = torch.stack([before[0] for _, _, before, *_ in run.visits(idx)])
        return torch.einsum("lbt,lbtc->lc", all_gains(run, idx), directions)
    preferred = F.normalize(run.mean(measure), dim=-1)
    return {"": (preferred @ preferred.T).tolist()}

@stat("NAG", "The norm as confidence", "mean loss (nats per token)", x="tenth of the tokens, by rising norm")
def norm_confidence(run):
    """Tokens in ten groups by the norm of their last stream; where the line falls, a larger norm errs less.

    Norm e^s of the stream that the head reads. Source: zyphra.com/our-work/norm-agnostic-residual-network."""
    all_gains(run, run.batches[0][0][:1])   # says if there are none
    norms, losses = [], []
    for idx, targets in run.batches:
        *_, (_, _, stream, _) = run.model.walk(idx)
        norms.append(stream[1].flatten())
        logits = run.model.head(stream).flatten(0, 1)
        losses.append(F.cross_entropy(logits, targets.flatten(), reduction="none"))
    tenths = torch.cat(losses)[torch.cat(norms).argsort(stable=True)].tensor_split(10)
    return {"": {"loss": [part.mean().item() for part in tenths]}}

@stat("Reading", "Attention over depth", "reading sublayer", "heat", x="source (0: embedding)",
      label="mean weight", first_row=2, first_column=0)
def depth_attention(run):
    """A row says what a sublayer reads, from the embedding to the newest source; one colour: PreNorm's sum.

    Mean over tokens of the softmax weights of reads 2 .. 2L, and of the head's, 2L + 1. A source is the sum
    of a group (Full: an update). What is read may not be needed. Source: arXiv:2603.15031, figure 8."""
    if not hasattr(run.model.ends, "weigh"):
        raise NotHere("only attnres reads earlier sublayers with weights of its own")
    def measure(idx):
        reads = zip(run.model.residuals()[1:], run.model.walk(idx))
        rows = [residual.weigh(after).mean((1, 2)) for residual, (_, _, after, _) in reads]   # (sources,)
        return torch.nn.utils.rnn.pad_sequence(rows, True, math.nan)
    return {"": run.mean(measure).tolist()}

@stat("Reading", "Gates", "sublayer", "heat", x="gate", label="share", first_column=0.025, step=0.05)
def gate(run):
    """A row says how a sublayer's gates are spread over tokens and channels; in one bin: a constant would do.

    Share of the values in 20 bins from 0 to 1. Source: Review Residuals, arXiv:2606.31859."""
    if not hasattr(run.model.ends, "convex"):
        raise NotHere("it has no gates; review, convex and highway have")
    def measure(idx):
        shares = []
        for residual, f, h, after, _ in run.visits(idx):   # after is h + r u, or convex h + r (u - h).
            r = (after - h) / (f(residual.read(h)) - residual.convex * h)
            shares.append(torch.histc(r.nan_to_num(0).clamp(0, 1), 20, 0, 1) / r.numel())
        return torch.stack(shares)
    return {"": run.mean(measure).tolist()}

@stat("Reading", "Attention sink", "mean attention", x="block")
def sink(run):
    """Attention to first tokens. Spread evenly, each gets about ln(T) / T (0.04 at T = 128). More is a sink.

    Means over heads and queries 2 .. T. Sources: arXiv:2506.19697; NAG, arXiv:2606.16112, section IV-E."""
    weights = run.mean(lambda idx: attention_weights(run, idx))[:, 1:]                      # (L, T - 1, T)
    return {"": {"to the first token": weights[..., 0].mean(1).tolist(),
                 "to the first four": weights[..., :4].sum(2).mean(1).tolist()}}

def attention_weights(run, idx):
    """Of each block, mean over sequences and heads: (L, T queries, T keys)"""
    T, found = idx.shape[1], []
    hidden, rotation = torch.ones(T, T, dtype=torch.bool, device=idx.device).triu(1), run.model.rotation[:T]
    for residual, f, before, *_ in itertools.islice(run.visits(idx), 0, None, 2):           # the attentions
        q, k, _ = f.module.qkv(residual.read(before), rotation)                             # (B, T, nh, hs)
        scores = torch.einsum("bqhc,bkhc->bhqk", q, k) * SHARPNESS / f.module.head_size
        found.append(scores.masked_fill(hidden, -math.inf).softmax(-1).mean((0, 1)))
    return torch.stack(found)

@stat("Reading", "Outlier channels", "excess kurtosis", x="before block")
def outliers(run):
    """Whether few channels hold most of the stream; at 0, they are spread like a Gaussian.

    Excess kurtosis over channels, mean over tokens of a fourth of the windows. Source: arXiv:2506.19697."""
    def measure(idx):
        x = run.streams(idx)[:-1:2]
        x = x - x.mean(-1, keepdim=True)
        return (x.pow(4).mean(-1) / x.square().mean(-1).square().clamp_min(1e-30) - 3).mean((1, 2))
    return {"": {"stream": run.mean(measure, run.some).tolist()}}

@stat("Skipping", "What each sublayer writes for each token", "sublayer", "depth_map",
      x="token (grey: it skips, or would)", label="size of the write",
      columns=1, cmap="Blues", first=1)
def depth_map(run):
    """How much each sublayer writes for each token of a text; dark: much; grey: it skips, or would.

    Size relative to the stream: NAG's gain, which decides, or else |change| / |stream|. Thresholds are those
    of the training, or else those at which the share --skip (0.25) skips. The text is --text, or the start of
    the first validation window. Source: NAG, arXiv:2606.16112, appendix A."""
    encoding, idx = prepare.get_tokenizer(run.config["tokenizer"]), run.batches[0][0][:1, :64]
    if run.args.text:
        idx = idx.new_tensor([encoding.encode_ordinary(run.args.text[:10_000])[:run.model.config.block_size]])
    found = {"tokens": [], "size": [], "ran": []}
    for residual, _, before, after, keep in run.visits(idx, run.decider):
        size = relative(run.model.ends.as_tensor(after), run.model.ends.as_tensor(before))
        size = residual.gain(before).abs()[..., 0] if residual.knows_gain else size
        found["size"].append(size[0].tolist())
        found["ran"].append([True] * idx.shape[1] if keep is EVERYONE else keep[0].tolist())
    decoder = codecs.getincrementaldecoder("utf-8")("replace")   # The last token of a character shows it.
    for token in idx[0].tolist():
        found["tokens"].append(decoder.decode(encoding.decode_single_token_bytes(token)))
    return found

@stat("Skipping", "Who skips what", "share of the tokens that skip", x="block")
def skip_share(run):
    """How many tokens skip each sublayer; an attention that few would skip runs for all of them.

    Thresholds as in the map. Source: NAG, arXiv:2606.16112, appendix A."""
    if run.config["mod_rate"] == 0 and (why := why_not(run.model, "skip")):
        raise NotHere(why)
    return {"": by_kind(1 - torch.tensor(shares_ran(run, run.decider)))}

def shares_ran(run, decider):
    """Share of the tokens that run each sublayer"""
    def measure(idx):
        keeps = []
        run.model(idx, decider=decider, keeps=keeps)
        return torch.tensor([float(share) for share in ran_shares(keeps)])
    return run.mean(measure, run.some).tolist()

def skip_found(result):
    lines, said = result[""], []
    dense, dense_loss = lines["by gain"][0]
    for name in "by gain", "random tokens", "removed":
        flops, loss = lines[name][2]   # asked to skip 20 %
        said.append(f"{name} {loss - dense_loss:+.3f} nats for {1 - flops / dense:.0%} less")
    return "; ".join(said)

@stat("Skipping", "Loss against compute", "loss (nats per token)", finding=skip_found,
      x="executed FLOPs per token", first=1)
def skip_curve(run):
    """More and more is skipped, from right to left, without further training; lower left is better.

    Matmul FLOPs of what runs in a forward pass. Thresholds for 10, 20, .. 60 %, found on other windows, as
    are the two controls. Random tokens: in each sublayer as many as by gain. Removed: sublayers do not run
    at all, those first whose removal alone costs least. Source: arXiv:2606.16112, section VI."""
    if why := why_not(run.model, "skip"):
        raise NotHere(why)
    model, generator, dense = run.model, torch.Generator().manual_seed(0), run.loss_with(all_run)
    found = {name: [[flops_per_token(model), dense]] for name in ("by gain", "random tokens", "removed")}
    if run.config["mod_rate"] > 0:
        found["as trained"] = [[flops_per_token(model, ran=shares_ran(run, model.decider)), run.loss]]
    numbers = range(1, 2 * len(model.order) + 1)
    cheapest = sorted(numbers, key=lambda l: mean_loss(model, run.few_others, Without({l})))
    for rate in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
        decider = run.calibrate(rate)
        ran = shares_ran(run, decider)
        flops = flops_per_token(model, ran=ran)
        found["by gain"].append([flops, run.loss_with(decider)])
        coins = torch.rand(len(ran), *run.some[0][0].shape, generator=generator).to(model.device)
        by_coin = [coin < share for coin, share in zip(coins, ran)]
        by_chance = ByFunction(lambda place, *_: (by_coin[place - 1], None))
        found["random tokens"].append([flops, run.loss_with(by_chance)])
        gone = {*cheapest[:round(rate * len(ran))]}
        flops = flops_per_token(model, ran=[l not in gone and 1.0 for l in numbers])
        found["removed"].append([flops, run.loss_with(Without(gone))])
    return {"": found}

@stat("Skipping", "What a token could skip", "loss (nats per token)", x="share of the block runs left out")
def could_skip(run):
    """The loss if each token leaves out the blocks that hardly lengthen its stream, more and more of them.

    LAC, arXiv:2505.14467: with d the growth of the stream's norm in a block, a token needs the first block
    and those with d >= a (max - min of d before); from left to right a = 0.05, 0.1, .. 0.8. A second pass
    leaves out the others. It saves no time, and means little where a norm bounds the stream (post, ngpt)."""
    if not run.model.ends.can_skip:
        raise NotHere("its tokens can't pass by a block")
    points = [[0.0, run.loss]]
    for a in (0.05, 0.1, 0.2, 0.4, 0.8):
        left_out, loss = 0.0, run.loss - run.loss_of_some
        for idx, targets in run.some:
            growth = run.streams(idx)[::2].norm(dim=-1).diff(dim=0)                         # (L, B, T)
            span = growth.cummax(0).values - growth.cummin(0).values
            needed = torch.cat((torch.ones_like(growth[:1]) > 0, growth[1:] >= a * span[:-1]))
            decider = ByFunction(lambda place, *_: (needed[(place - 1) // 2], None))
            loss += mean_loss(run.model, [(idx, targets)], decider) / len(run.some)
            left_out += (1 - needed.float().mean().item()) / len(run.some)
        points.append([left_out, loss])
    return {"": {"by growth": points}}

@stat("Skipping", "The last blocks at once", "loss increase (nats per token)", x="iterations")
def layer_parallel(run):
    """The error of running the last blocks in parallel, on guesses of their inputs that improve step by step.

    Identity Newton, arXiv:2605.17842: all inputs start as that of the first of these blocks. Then each is
    that plus the updates before. Exact after as many iterations as blocks. Blocks must add to the stream."""
    (idx, targets), model, found = run.few[0], run.model, {}
    inputs = [before for l, before, _, _ in model.walk(idx) if l % 2 == 1]
    if len(inputs) < 2 or not torch.is_tensor(inputs[0]) or inputs[0].dim() != 3 or model.config.mod == "router":
        raise NotHere("needs two or more blocks that add to a stream of one tensor")
    full, sublayers = mean_loss(model, [(idx, targets)]), list(model.sublayers(idx))
    for n in (n for n in (2, 4, 8) if n <= len(inputs)):
        ends, errors = torch.stack([inputs[-n]] * n), []
        for _ in range(n - 1):
            updates = []
            for i, x in enumerate([inputs[-n], *ends[:-1]], start=len(inputs) - n):
                after = x
                for _, residual, f in sublayers[2 * i:2 * i + 2]:
                    after = residual(after, f)
                updates.append(after - x)
            ends = inputs[-n] + torch.stack(updates).cumsum(0)
            loss = F.cross_entropy(model.head(ends[-1]).flatten(0, 1), targets.flatten())
            errors.append(loss.item() - full)
        found[f"last {n}"] = errors
    return {"": found}

# ----------------------------------------------------------------------------- drawings

COLORS = "#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #7f4f24 #333333".split()
STYLES = ["o-", "s--", "^:", "v-."]

def draw_lines(stat, results, colors):
    """A panel per group of lines. The colour says which run, the dashes which line."""
    panels, how = {title: None for result in results.values() for title in result}, stat.options
    names = list({name: None for result in results.values() for group in result.values() for name in group})
    styles = dict(zip(names, itertools.cycle(STYLES)))
    figure, grid = make_grid(stat, len(panels), columns=3, sharey=how.get("same_y", False))
    for axes, title in zip(grid, panels):
        axes.set(title=title if stat.ylabel else "", xlabel=how["x"], ylabel=stat.ylabel or title)
        x = ()   # for a panel without lines
        for run, result in results.items():
            for name, line in result.get(title, {}).items():
                pairs = [y if type(y) is list else (x, y) for x, y in enumerate(line, how.get("start", 1))]
                x, y = zip(*pairs) if pairs else ((), ())
                width = 3 if names.index(name) == 0 < len(names) - 1 else 1.3   # to be seen below another
                axes.plot(x, y, styles[name], color=colors[run], ms=3.5, lw=width, alpha=0.85)
        if how.get("limits"):
            axes.set_ylim(how["limits"])
        axes.xaxis.get_major_locator().set_params(integer=all(isinstance(value, int) for value in x))
        if how.get("log") and (axes.dataLim.y0 > 0 or axes.dataLim.y1 > 0.1):   # A removal may help: below 0.
            if axes.dataLim.y0 > 0:
                axes.set_yscale("log")
            else:
                axes.set_yscale("symlog", linthresh=0.01)
                axes.set_ylabel(f"{axes.get_ylabel()}, linear below 0.01")
            axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
        if axes.dataLim.x1 >= 1e4:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))   # 5M
        axes.grid(alpha=0.25)
    entries = {run: axes.plot([], [], color=colors[run], lw=3)[0] for run in results}
    if len(names) > 1:
        entries |= {name: axes.plot([], [], styles[name], color="0.3", ms=3.5)[0] for name in names}
    figure.legend(entries.values(), entries, loc="outside lower left", ncols=3, frameon=False)
    return figure

def make_grid(stat, n, columns, **options):
    columns = min(n, columns)
    rows = math.ceil(n / columns)
    figure, grid = plt.subplots(rows, columns, figsize=(max(5.6, 3.9 * columns), 3.1 * rows + 0.9),
                                layout="constrained", squeeze=False, **options)
    figure.suptitle(stat.title, x=0.01, ha="left", fontweight="bold")
    for axes in grid.flat[n:]:
        axes.set_axis_off()
    return figure, grid.flat

def draw_heat(stat, results, colors):
    """A panel per run and matrix, the lowest number at the lower left. Small maps have their numbers in them."""
    how, found = stat.options, [(run, *each) for run, result in results.items() for each in result.items()]
    figure, grid = make_grid(stat, len(found), columns=how.get("columns", 2))
    for axes, (run, title, matrix) in zip(grid, found):
        values = torch.tensor([[math.nan if x is None else x for x in row] for row in matrix])
        left, step = how.get("first_column", 1), how.get("step", 1)
        left, bottom, (rows, columns) = left - step / 2, how.get("first_row", 1) - 0.5, values.shape
        image = axes.imshow(values.numpy(), origin="lower", aspect="auto", interpolation="nearest",
                            extent=(left, left + columns * step, bottom, bottom + rows),
                            vmin=how.get("vmin", 0), vmax=how.get("vmax"), cmap=how.get("cmap", "viridis"))
        axes.set(xlabel=how["x"], ylabel=stat.ylabel, facecolor="0.85")
        axes.set_title(f"{run} {title}", color=colors[run])
        if step == 1 and max(rows, columns) <= 16:
            axes.set_xticks(range(math.ceil(left), math.ceil(left) + columns))
            axes.set_yticks(range(math.ceil(bottom), math.ceil(bottom) + rows))
        if how.get("vmax") == 1 and rows * columns <= 140:
            write_numbers(axes, values.tolist(), math.ceil(left), math.ceil(bottom))
        elif how.get("vmax") != 1:   # Each panel has a scale of its own.
            figure.colorbar(image, ax=axes, label=how["label"])
    if how.get("vmax") == 1:
        figure.colorbar(image, ax=figure.axes, label=how["label"])
    return figure

def write_numbers(axes, values, left, bottom):
    """A share such as .73 into each field of a map"""
    for y, row in enumerate(values, bottom):
        for x, value in enumerate(row, left):
            axes.text(x, y, f"{value:.2f}".removeprefix("0"), ha="center", va="center", fontsize=7,
                      color="black" if value > 0.6 else "white")

def draw_depth_map(stat, results, colors):
    """A heat map per run, of what was not skipped, with the tokens below"""
    figure = draw_heat(stat, {run: {"": [[size if ran else None for size, ran in zip(*rows)]
                                         for rows in zip(result["size"], result["ran"])]}
                              for run, result in results.items()}, colors)
    for axes, result in zip(figure.axes, results.values()):
        tokens = [repr(token)[1:-1].replace("\\n", "↵") for token in result["tokens"]]   # no line ends
        axes.set_xticks(range(1, len(tokens) + 1), tokens, fontsize=7, family="monospace",
                        rotation=90 if max(map(len, tokens)) > 2 else 0)
    return figure

DRAWINGS = {"lines": draw_lines, "heat": draw_heat, "depth_map": draw_depth_map}

# ----------------------------------------------------------------------------- main

def main(argv=None):
    if "--list" in (argv or sys.argv):   # needs no runs
        print("\n".join(f"{name:22}{stat.caption}" for name, stat in STATS.items()))
        return
    args, = parse((AnalyzeConfig,), argv, __doc__, positional=("runs",))
    only = {*args.only.split(",")} if args.only else {*STATS}
    for name in only - {*STATS}:
        refuse(f"--only {name}: no such statistic; choose from {', '.join(STATS)}")
    wanted = [name for name in STATS if name in only]   # in the order of a lesson
    if os.path.isfile(args.text):
        with open(args.text, encoding="utf-8", errors="replace") as f:
            args.text = f.read(10_000)   # A map shows block_size tokens.
    runs = open_runs(args)
    refuse_if_taken(Path(args.out))   # now, not after minutes of measuring
    results = {name: {} for name in wanted}
    for run_name, run in runs.items():
        print(printable(f"{run_name}: measuring {len(wanted)} statistics"), file=sys.stderr)
        for name in wanted:
            torch.manual_seed(0)   # --mod random draws the same coins, whatever --only names.
            try:
                results[name][run_name] = STATS[name].measure(run)
            except NotHere as why:
                results[name][run_name] = str(why)
                if args.only:   # Else it is on the page, beside all the others.
                    print(printable(f"{run_name}: {name}: {why}"), file=sys.stderr)
    save(Path(args.out), runs, results)
    say(f"{args.out}/index.html shows {', '.join(runs)}; open it in a browser")

def refuse_if_taken(out):
    """Makes the folder. SystemExit if it can't be written to, or has files of our names that we have not made"""
    with explain_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        found = {"index.html", "numbers.json", *(f"{name}.png" for name in STATS)} & {*os.listdir(out)}
        if not os.access(out, os.W_OK):
            raise PermissionError("you may not write there")
        if found and not are_our_numbers(out / "numbers.json"):
            refuse(f"--out {out}: has a {min(found)} that is none of ours; take another folder")

def are_our_numbers(path):
    """Does a numbers.json begin as `save` writes it? (It may be large.)"""
    if not path.is_file():
        return False
    with open(path, errors="replace") as f:
        return f.read(10) == '{\n "runs":'

def open_runs(args):
    """-> {name: Run}, where the name is the folder's, or its whole path if two have the same"""
    names, runs = [Path(path).resolve().name for path in args.runs], {}
    for path, name in zip(args.runs, names):
        device = pick_device(args.device)
        model, config = open_run(path, device)
        pick_threads(model.config, device)
        n = max(4, args.windows or config["eval_windows"])   # Some are for measuring, others to choose by.
        windows = prepare.val_windows(config["data"], config["block_size"], n)
        steps_text = prepare.load_meta(config["data"]).get("steps")
        run = Run(model, config, read_metrics(path), args, windows, steps_text)
        if not math.isfinite(run.loss):
            refuse(f"{path}: its loss is {run.loss}, so there is nothing to see; train it with a lower --lr")
        runs[printable(name if names.count(name) == 1 else path)] = run
    return runs

def save(out, runs, results):
    """Figures, numbers and page"""
    colors = dict(zip(runs, itertools.cycle(COLORS)))
    matplotlib.rcParams["text.parse_math"] = False   # A dollar sign is part of a name or of a text.
    about = {name: dict(config=run.config, color=colors[name], loss=run.loss, bits=run.bits,
                        parameters=num_params(run.model), flops=flops_per_token(run.model))
             for name, run in runs.items()}
    page, results = {}, json.loads(json.dumps(results), parse_constant=lambda name: None)   # JSON has no nan.
    numbers = json.dumps(dict(runs=about, statistics=results), indent=1)
    write_file(out / "numbers.json", lambda f: f.write(numbers.encode()))   # `refuse_if_taken` looks for it.
    # The steps text comes first, and then what a newcomer should see first.
    order = sorted(results, key=lambda name: (STATS[name].section != STEPS, not STATS[name].options.get("first")))
    for name in order:
        stat = STATS[name]
        measured = {run: result for run, result in results[name].items() if not isinstance(result, str)}
        found = {run: stat.finding(result) for run, result in measured.items()} if stat.finding else {}
        page[name] = vars(stat) | dict(measure=None, finding=found, results=results[name], image="", width=0)
        if measured:
            figure, png = DRAWINGS[stat.draw](stat, measured, colors), io.BytesIO()
            figure.savefig(png, format="png", dpi=130)
            page[name] |= dict(width=figure.get_figwidth() * 80,
                               image="data:image/png;base64," + base64.b64encode(png.getvalue()).decode())
            write_file(out / f"{name}.png", lambda f: f.write(png.getvalue()))
            plt.close(figure)
    template = (Path(__file__).parent / "analyze.html").read_text(encoding="utf-8")
    report = json.dumps(dict(runs=about, statistics=page)).replace("<", "\\u003c")   # No text ends a script.
    write_file(out / "index.html", lambda f: f.write(template.replace("REPORT", report).encode()))

if __name__ == "__main__":
    start(main)
