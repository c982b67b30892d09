"""
What each layer of one or several runs does: a page of figures that opens in any browser.

    python analyze.py runs/steps-pre runs/steps-nag --out figures   # then open figures/index.html
    python analyze.py runs/nag --text "def add(a, b):"              # with a map of your own text
    python analyze.py runs/nag --only removal,skip_curve
    python analyze.py --list                                        # each statistic in a sentence

Writes OUT/index.html, OUT/STATISTIC.png and OUT/numbers.json. Sublayers have the numbers 1 .. 2L in
the order in which they run: odd ones are attention, even ones MLP. Windows and loss are those of
train.py, so a checkpoint has one loss everywhere. A model that was trained to skip skips here, too.
"""
import base64
import codecs
import functools
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
import torch.nn.functional as F

import prepare
from flags import flag, parse, printable, refuse, say, start
from inside import (NotHere, answers, ends_of_blocks, in_words, inside_of, lines_after, patch,
                    questions, some_digits, spelled)
from model import (ByFunction, ByGain, Decider, EVERYONE, Runner, Without, flops_per_token,
                   num_params, why_not)
from processes import pick_device, pick_threads
from runs import explain_write_errors, open_run, read_metrics, write_file
from train import evaluate

@dataclass
class AnalyzeConfig:
    runs: list = flag(None, "run folders")
    out: str = flag("figures", "folder of the page, the figures and the numbers")
    only: str = flag("", "some statistics, such as removal,skip_curve; without it the page's")
    list: bool = flag(False, "print each statistic in a sentence")
    text: str = flag("", "a text, or a file with one, for the map of tokens and sublayers")
    asked: int = flag(0, "look for the lines inside of lines that ask for so many steps; 0: for "
                      "the most that the model has learned", 0, 25)
    skip_below: float = flag(0.05, "a token skips what would turn it by less (a gain), if the run "
                             "was not trained to skip", 0, 100)
    windows: int = flag(0, "validation windows; 0: as many as in training", 0, 1e6)
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "auto: cuda where there is one")

STATS = {}   # name -> a statistic, in the order of the page

def stat(title, page="story", draw="lines", finding=None, **options):
    """Makes the function below it a statistic. The first paragraph of its docstring is the caption,
    the rest says how it is defined, and where it comes from. It gets a Run and returns what its
    drawing wants:

        lines        {panel: {name: line}}; a line is [y, ...] or [[x, y], ...]
        heat         {panel: matrix}, a list of rows from below; None is grey
        bars         {panel: {name: length}}
        and three drawings of one statistic each

    NotHere says why a run can't have it. page: does it stand in the story, or under More? finding:
    a function from what it returned to a sentence for the page. options: of the drawing"""
    def add(measure):
        paragraphs = measure.__doc__.split("\n\n", 1)
        caption, definition = (" ".join(part.split()) for part in paragraphs)
        STATS[measure.__name__] = SimpleNamespace(
            measure=torch.no_grad()(measure), title=title, page=page, draw=draw, finding=finding,
            options=options, caption=caption, definition=definition)
        return STATS[measure.__name__].measure
    return add

class Run:
    """What a statistic gets: a run, and the ways through its model. windows: x, y (n, T)"""
    def __init__(self, model, config, history, args, windows, steps=None):
        self.model = model        # in eval mode
        self.steps = steps        # what meta.json says of the steps text; None: it is another text
        self.config = config      # config.json
        self.history = history    # step -> what metrics.jsonl says about it
        self.args = args
        self.batches = in_batches(*(part.to(model.device) for part in windows))   # (idx, targets)
        token_bytes = prepare.token_bytes(config, model.config.vocab_size)
        self.loss, self.bits, _ = evaluate(model, *windows, token_bytes, 8)   # nats per token

    # What is measured often is measured on every fourth window, and what is chosen, by as many
    # others. Windows are in the order of the text, so both are from all over it.
    some = functools.cached_property(lambda self: every_fourth(self.batches, 0))
    others = functools.cached_property(lambda self: every_fourth(self.batches, 2))
    right = functools.cached_property(lambda self: right_by_steps(self)[0])
    loss_of_some = functools.cached_property(lambda self: mean_loss(self.model, self.some))

    def streams(self, idx):
        """The stream before each sublayer and at the end, as vectors: (2L + 1, B, T, C)"""
        walk, as_tensor = list(self.model.walk(idx)), self.model.ends.as_tensor
        befores = [as_tensor(before) for _, before, _ in walk]
        return torch.stack([*befores, as_tensor(walk[-1][2])])

    def writes(self, idx, runner=None):
        """How much each sublayer writes: (2L, B, T), |gain| where there is one, or else |change| /
        |stream|. (Of a token that skips, it is what it would write, or 0.)"""
        found, residuals = [], (residual for _, residual, _ in self.model.sublayers(idx))
        for residual, (_, before, after) in zip(residuals, self.model.walk(idx, runner=runner)):
            if residual.knows_gain:
                found.append(residual.gain(before).abs()[..., 0])
            else:
                found.append(relative(residual.as_tensor(after), residual.as_tensor(before)))
        return torch.stack(found)

    def steps_text(self):
        if not self.steps:
            raise NotHere("it is for the steps text (prepare.py steps), whose depth is known")
        return self.steps

    def mean(self, measure, batches=None):
        """The mean over batches of measure(idx), a tensor"""
        batches = batches or self.batches
        return sum(measure(idx) for idx, _ in batches) / len(batches)

    def loss_with(self, decider):
        """The loss if this decider says who runs what: that of all windows, and its change on every
        fourth one. The change is surer than a loss of so few windows: both its terms have them."""
        return self.loss + mean_loss(self.model, self.some, decider) - self.loss_of_some

    def loss_without(self, places):
        return self.loss_with(Without(places, self.model.decider))

    @property
    def skipping(self):
        """Who skips: as in training, or else who would turn by less than --skip_below"""
        if self.model.config.mod != "all":
            return self.model.decider
        return self.by_gain(self.args.skip_below)

    def by_gain(self, below):
        decider = ByGain(self.model.config, below)
        if why := why_not(decider, self.model.config):
            raise NotHere(why)
        return decider

    def depths(self, idx):
        """With skipping -> the share of the sublayers that run for each token (B, T), and logits"""
        runner = Runner(self.model, self.skipping)
        logits, _ = self.model(idx, runner=runner)
        return torch.stack([mask_of(keep, idx) for keep in runner.keeps]).float().mean(0), logits

def mask_of(keep, idx):
    """A decider's answer -> bools (B, T)"""
    if torch.is_tensor(keep):
        return keep
    return torch.full(idx.shape, keep is EVERYONE, device=idx.device)

def in_batches(x, y):
    size = math.gcd(len(x), 8)   # All batches are as large, so that their means can be averaged.
    return list(zip(x.split(size), y.split(size)))

def every_fourth(batches, first):
    return in_batches(*(torch.cat(part)[first::4] for part in zip(*batches)))

def mean_loss(model, batches, decider=None):
    losses = [model(*batch, runner=Runner(model, decider))[1].item() for batch in batches]
    return sum(losses) / len(losses)

def by_kind(values):
    """A value per sublayer -> a line of attentions and one of MLPs, with a value per block"""
    values = values.tolist() if torch.is_tensor(values) else values
    return {"attention": values[::2], "MLP": values[1::2]}

# ================================================================================= the steps text

# What is asked for is known, so these figures are right or wrong.

def by_steps(run, measure):
    """measure(idx, targets) (rows, B, T) -> its mean over the digits of each number of steps: rows
    of numbers. Digits of the right half of a line, because on the left, digits repeat soon, and can
    be guessed; and only where the line before is in the window, so that they can be known."""
    text, total, count = run.steps_text(), 0, 0
    for idx, targets in run.batches:
        asked, cell = prepare.steps_asked(torch.cat((idx[:, :1], targets), 1), text["cells"])
        asked = torch.where(cell >= text["cells"] // 2, asked, -1)
        is_asked = F.one_hot(asked + 1, text["most"] + 2)[..., 1:].double()        # (B, T, steps)
        total = total + torch.einsum("rbt,bts->rs", measure(idx, targets).double(), is_asked)
        count = count + is_asked.sum((0, 1))
    if not count.all():
        raise NotHere("its validation windows lack some number of steps; give it more of them, "
                      "with --windows")
    return (total / count).tolist()

def right_by_steps(run, decider=None):
    """-> the share of right digits by steps asked, and the share that ran each sublayer, in all
    batches"""
    ran = []
    def measure(idx, targets):
        runner = Runner(run.model, decider)
        logits, _ = run.model(idx, runner=runner)
        ran.append(runner.ran())
        return (logits.argmax(-1) == targets)[None]
    right, = by_steps(run, measure)
    return right, [sum(shares) / len(ran) for shares in zip(*ran)]

def steps_learned(right, guess):
    """Shares of right digits by steps asked, 0, 1, .. -> how many steps have been learned: each
    step counts by how far its share is above guessing. 3.0: three steps, and no more"""
    return sum(max(0.0, share - guess) / (1 - guess) for share in right[1:])

def most_learned(right):
    """The last number of steps of which 90 % of the digits are right"""
    return max((k for k, share in enumerate(right) if share >= 0.9), default=0)

@stat("The puzzle", draw="table")
def puzzle(run):
    """A line, and what the model writes if it asks for 0, 1, 2, .. steps. Wrong digits are red.

    The likeliest digit each time, after this line alone. What is right follows from the table."""
    text = run.steps_text()
    lines = [chr(ord("a") + k) + some_digits(text) for k in range(text["most"] + 1)]
    return {"lines": lines, "answers": answers(run.model, lines, text),
            "true": [spelled(lines_after(line, text)[-1]) for line in lines]}

def steps_found(result):
    right, guessing = result["share of right digits"].values()
    wrong = [k for k, share in enumerate(right) if share < 0.95] + [len(right)]
    if wrong[0] == 0:
        return "it has not even learned to copy a line"
    learned = steps_learned(right, guessing[0])
    return (f"{learned:.1f} steps learned; up to {in_words(wrong[0] - 1)}, 95 % of the digits are "
            f"right")

@stat("How many steps it has learned", finding=steps_found, x="steps asked for", start=0)
def steps(run):
    """The further right a line falls, the more steps the model can do.

    Digits of the right half of a line, whose line before is in the window: each can be known. On
    the left, digits repeat soon, and can be guessed. Steps learned: the sum over 1, 2, .. steps of
    how far a share is above guessing, which is 1 / symbols."""
    guess = 1 / len(run.steps_text()["table"])
    guessing = [guess] * len(run.right)
    return {"share of right digits": {"measured": run.right, "guessing": guessing}}

def k_of(run):
    """Of which lines we look inside: --asked, or the most steps that the model has learned"""
    k, most = run.args.asked or max(1, most_learned(run.right)), run.steps_text()["most"]
    if k > most:
        raise NotHere(f"its lines ask for {in_words(most)} at most, not for --asked {k}")
    return k

def inside_found(result):
    told, known = [], 0
    for block, row in enumerate(result["examples"][0]["blocks"]):
        if row and row["steps"] > known:
            known, here = row["steps"], ", still in the line" * (row["place"] == "line")
            told.append(f"{in_words(known)} after block {block}{here}")
    asked = in_words(result["asked"])
    return f"of lines that ask for {asked}, a probe can read " + ("; ".join(told) or "nothing new")

@stat("The lines inside, which nobody wrote", draw="inside", finding=inside_found)
def lines_inside(run):
    """The text never has the lines between a line and its answer, but the model makes them: a
    linear probe reads their digits in the stream. About .5 is not yet knowing: if the probe knows a
    digit but not its left neighbour, two digits are left for the next step. In an untrained model
    it reads what a token itself says, and no more; of shuffled digits, it reads one in ten.

    Ridge regression from unit(stream after a block) to the digit in this cell after 0, 1, .. steps;
    share of right digits on other windows. Left: at the digits of the line. Middle: where the
    answer's digits are predicted. Right: one line, and the newest digits that can be read (share at
    least .9). Lines ask for --asked steps, or for the most of which 90 % are right."""
    text, k, (idx, targets) = run.steps_text(), k_of(run), run.batches[0]
    inside = inside_of(run.model, run.config["data"], text, k)
    letter, lines = chr(ord("a") + k), questions(idx.cpu(), targets.cpu(), text, k)[2][0]
    lines = [some_digits(text), *map(spelled, lines[:4])]
    return dict(asked=k, line=inside.share["line"], answer=inside.share["answer"],
                examples=[inside.example(letter + line) for line in lines])

def patched_found(result):
    at_line, _ = result.values()
    own = at_line["its own answer"]
    fetched = next((block for block, share in enumerate(own, 1) if share >= 0.9), None)
    if fetched is None:
        return "up to the last block, the answer hangs on where the line stands"
    return (f"block {fetched} fetches the line: after it, nothing hangs on where the line stands "
            f"({own[fetched - 1]:.0%} of the digits stay)")

@stat("Which block fetches the line", finding=patched_found, x="patched after block",
      limits=(-0.03, 1.03), ylabel="share of the digits")
def patched(run):
    """A probe shows that something is there, but not that it is used. So the stream of another line
    takes the place of this one's, and we see whose answer comes out.

    400 lines of random digits, alone in their windows, that ask for as many steps as in the figure
    above; the right half of their answers' digits. Of two answers, one digit in ten is the same by
    chance. Before the line is fetched, neither place alone makes an answer, because the answer's
    own digits so far are a source, too."""
    return patch(run.model, run.steps_text(), k_of(run))

def removal_by_steps_found(result):
    left = [sum(row) / len(row) for row in result[""]]
    best = left.index(max(left))
    worst = left.index(min(left))
    return (f"without block {worst + 1}, {left[worst]:.0%} of all these digits are right; without "
            f"block {best + 1}, which does least, {left[best]:.0%}")

@stat("What breaks without a block", draw="heat", finding=removal_by_steps_found,
      x="steps asked for", y="block left out", label="share of right digits", first_column=0,
      vmax=1)
def removal_by_steps(run):
    """Right digits without one block. A bright row: the model hardly needs this block.

    The stream passes a removed block unchanged; nothing is trained after it. Digits as in the first
    figure."""
    blocks = range(len(run.model.blocks))
    without = [Without(sublayers_of(run.model, block), run.model.decider) for block in blocks]
    return {"": [right_by_steps(run, decider)[0] for decider in without]}

def sublayers_of(model, block):
    """The places, from 1, of the sublayers that are runs of a block, numbered from 0"""
    return {place for i, number in enumerate(model.order) if number == block
            for place in (2 * i + 1, 2 * i + 2)}

def gain_found(result):
    rises = [max(row) - row[0] for row in result[""]]
    place = rises.index(max(rises))
    row = result[""][place]
    most = row.index(max(row))
    return (f"sublayer {place + 1} tells digits apart best: it writes {row[0]:.2f} for copies, and "
            f"{row[most]:.2f} for {in_words(most)}")

@stat("What turns, and for whom", draw="heat", finding=gain_found, x="steps asked for",
      y="sublayer", label="mean gain", first_column=0, cmap="Blues")
def gain_by_steps(run):
    """How much each sublayer turns the stream, by the steps that the digit asks for. A row of one
    colour treats all digits alike. Pale on the left and dark on the right: it works for those who
    need it. On the far right stands what the model has not learned.

    Mean gain (the tangent of the angle) where the digit is predicted; of residuals without gains,
    |change| / |stream|. Digits as in the first figure. With a --gain_cost, rows differ."""
    return {"": by_steps(run, lambda idx, targets: run.writes(idx))}

def who_skips_found(result):
    ran = result["share of the sublayers that run"]["measured"]
    right, full = result["share of right digits"].values()
    known, guess = max(1, most_learned(full)), 1 / 10
    return (f"copies run {ran[0]:.0%} of the sublayers, and {in_words(known)} {ran[known]:.0%}; "
            f"{steps_learned(right, guess):.2f} steps are learned so, and "
            f"{steps_learned(full, guess):.2f} if all run")

@stat("Who skips", finding=who_skips_found, x="steps asked for", start=0, limits=(0, 1.04))
def who_skips(run):
    """Whether a digit that needs less depth gets less. A flat line: skipping knows no digits.

    A token skips what would turn it by less than --skip_below (0.05, which are 3 degrees), or as it
    was trained. Counted where the digit is predicted. Digits as in the first figure."""
    def measure(idx, targets):
        depth, logits = run.depths(idx)
        return torch.stack((depth, logits.argmax(-1) == targets))
    run.steps_text(), run.skipping   # say if there are none
    ran, right = by_steps(run, measure)
    full, _ = right_by_steps(run, ALL_RUN)
    return {"share of the sublayers that run": {"measured": ran},
            "share of right digits": {"measured": right, "if all run": full}}

ALL_RUN = Decider()

# ======================================================================================= any text

def skip_found(result):
    [(what, lines)] = result.items()
    skipped, value = lines["by gain"][2]   # below 0.05
    left = {control: f"{lines[control][2][1]:.2f}" for control in ("a fixed set", "coins")}
    return (f"below 0.05, {skipped:.0%} of the sublayer runs are skipped; {what}: {value:.2f}, and "
            f"{lines['by gain'][0][1]:.2f} if all run; with a fixed set {left['a fixed set']}, and "
            f"with coins {left['coins']}")

@stat("What skipping costs", finding=skip_found, x="share of the sublayer runs skipped")
def skip_curve(run):
    """Tokens skip what would turn them by less than 0.02, 0.05, 0.1, 0.2, 0.4. A line that stays
    level skips for nothing. Two controls skip as much: a fixed set of sublayers, and coins.

    Nothing is trained after it. Fixed set: for all tokens, the sublayers of lowest mean gain.
    Coins: each sublayer is skipped by as many tokens as by gain, but by random ones. Steps learned
    as in the first figure."""
    model, twice_L = run.model, 2 * len(run.model.order)
    run.by_gain(0)   # says if there are no gains
    gains = run.mean(lambda idx: run.writes(idx, Runner(model, ALL_RUN)).mean((1, 2)), run.others)
    lines = {"by gain": [], "a fixed set": [], "coins": []}
    for below in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4):
        point, ran = skip_point(run, run.by_gain(below))
        lines["by gain"].append(point)
        number = round(point[0] * twice_L)
        fixed = {place + 1 for place in gains.argsort()[:number].tolist()}
        lines["a fixed set"].append(skip_point(run, Without(fixed, ALL_RUN))[0])
        lines["coins"].append(skip_point(run, ByFunction(functools.partial(flip, ran)))[0])
    if model.config.mod != "all":
        lines["as trained"] = [skip_point(run, model.decider)[0]]
    return {"steps learned" if run.steps else "loss (nats per token)": lines}

def flip(ran, runner):
    """A decider's answer, by coins: each sublayer has its own share of tokens that run"""
    return torch.rand(runner.shape, device=runner.model.device) < ran[runner.place - 1]

def skip_point(run, decider):
    """-> [share skipped, steps learned or loss], and the share that ran each sublayer"""
    if run.steps:
        right, ran = right_by_steps(run, decider)
        value = steps_learned(right, 1 / len(run.steps["table"]))
    else:
        rans = []
        for idx, _ in run.some:
            runner = Runner(run.model, decider)
            run.model(idx, runner=runner)
            rans.append(runner.ran())
        ran = [sum(shares) / len(rans) for shares in zip(*rans)]
        value = run.loss_with(decider)
    return [1 - sum(ran) / len(ran), value], ran

KINDS = ("a blank after a blank", "another blank", "the first letter of a word", "a further letter",
         "a digit", "punctuation")
BLANKS, DIGITS = " \t\r\n", "0123456789"
LETTERS = "_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

def kind_of_character(before, here):
    """Bytes (B, T) -> numbers of KINDS (B, T)"""
    def among(x, characters):
        return torch.isin(x, torch.tensor([*characters.encode()], device=x.device))
    kinds = torch.full_like(here, KINDS.index("punctuation"))
    kinds[among(here, BLANKS)] = 1
    kinds[among(here, BLANKS) & among(before, BLANKS)] = 0
    kinds[among(here, LETTERS)] = 2
    kinds[among(here, LETTERS) & among(before, LETTERS + DIGITS)] = 3
    kinds[among(here, DIGITS)] = 4
    return kinds

def deep_found(result):
    ran = result["share of the sublayers that run"]
    low, high = min(ran, key=ran.get), max(ran, key=ran.get)
    return f"{low} runs {ran[low]:.0%} of the sublayers, and {high} {ran[high]:.0%}"

@stat("Which characters run deep", draw="bars", finding=deep_found)
def deep_characters(run):
    """The share of the sublayers that run, by the kind of character that is predicted, and the loss
    of such characters: does depth go where the loss is?

    A token skips what would turn it by less than --skip_below (0.05, which are 3 degrees), or as it
    was trained. The mean loss is that with skipping."""
    if run.config["tokenizer"] != "bytes" or run.steps:
        raise NotHere("its tokens are no characters of an ordinary text")
    total = torch.zeros(3, len(KINDS), dtype=torch.double)
    for idx, targets in run.batches:
        depth, logits = run.depths(idx)
        loss = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        is_kind = F.one_hot(kind_of_character(idx, targets), len(KINDS)).double()
        values = torch.stack((depth, loss, torch.ones_like(loss))).double()
        total += torch.einsum("rbt,btk->rk", values, is_kind).cpu()
    ran, loss = (total[:2] / total[2].clamp_min(1)).tolist()
    there = [i for i in range(len(KINDS)) if total[2, i] > 0]
    return {"share of the sublayers that run": {KINDS[i]: ran[i] for i in there},
            "loss (nats)": {KINDS[i]: loss[i] for i in there}}

def depth_by_loss_found(result):
    ran = result["share of the sublayers that run"]["tokens"]
    return f"the easiest tenth runs {ran[0]:.0%} of the sublayers, and the hardest {ran[-1]:.0%}"

@stat("Do hard tokens run deep?", finding=depth_by_loss_found,
      x="tenth of the tokens, by rising loss")
def depth_by_loss(run):
    """The share of the sublayers that run, of tokens in ten groups by their loss. A line that rises
    spends depth on what is hard to predict.

    Who skips: as in the figure of characters. The loss is that with all sublayers."""
    if run.steps:
        raise NotHere("on the steps text, the figure by steps says more")
    depths, losses = [], []
    for idx, targets in run.batches:
        depths.append(run.depths(idx)[0].flatten())
        logits, _ = run.model(idx, runner=Runner(run.model, ALL_RUN))
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none"))
    tenths = torch.cat(depths)[torch.cat(losses).argsort(stable=True)].tensor_split(10)
    return {"share of the sublayers that run": {"tokens": [part.mean().item() for part in tenths]}}

@stat("What each sublayer writes for each token", draw="depth_map", y="sublayer", cmap="Blues",
      x="token (grey: it skips)", label="gain", columns=1)
def depth_map(run):
    """Dark: the sublayer turns the stream of this token much. Grey: the token skips it.

    NAG's gain, or else |change| / |stream|. Who skips: as in the figure of characters; without
    gains, nobody. The text is --text, or the start of a validation window: of the first eight, that
    in which depth varies most. Source: NAG, arXiv:2606.16112, appendix A."""
    if run.steps and not run.args.text:
        raise NotHere("on the steps text, the figures by steps say more; --text makes a map")
    encoding, idx = prepare.get_tokenizer(run.config["tokenizer"]), run.batches[0][0][:, :72]
    try:
        decider = run.skipping
        idx = idx[run.depths(idx)[0].std(1).argmax()][None]
    except NotHere:
        decider, idx = ALL_RUN, idx[:1]
    if run.args.text:
        tokens = encoding.encode_ordinary(run.args.text[:10_000])[:run.model.config.block_size]
        idx = idx.new_tensor([tokens])
    runner, tokens = Runner(run.model, decider), []
    size = run.writes(idx, runner)[:, 0].tolist()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")   # A character may be many tokens.
    for token in idx[0].tolist():
        tokens.append(decoder.decode(encoding.decode_single_token_bytes(token)))
    ran = [mask_of(keep, idx)[0].tolist() for keep in runner.keeps]
    return dict(tokens=tokens, size=size, ran=ran)

# ------------------------------------------------------------------------- the stream, under More

def update_found(result):
    turned = result["turned by (degrees)"]["MLP"][-1]
    length = [y for _, y in result["length of the stream"]["stream"]]
    return (f"the last MLP turns the stream by {turned:.0f} degrees; at the end, the stream is "
            f"{length[-1] / length[0]:.1f} times as long as at its start")

@stat("What a sublayer changes", page="more", finding=update_found, x="block",
      log="|change| / |stream|")
def update(run):
    """How far each sublayer turns the stream, and how long that gets. In PreNorm, in a long stream
    equal updates are a smaller part; NAG's gains are parts.

    Means over tokens of |after - before| / |before|, of the angle between before and after, and of
    |x| / sqrt(C) at the start (0) and after each block. NAG turns by atan|gain|. Sources:
    arXiv:2505.13898; NAG, arXiv:2606.16112, figure 3."""
    def measure(idx):
        x = run.streams(idx)
        size = x.square().mean(-1).sqrt()
        return torch.stack((relative(x[1:], x[:-1]), angles(x[1:], x[:-1]).rad2deg(), size[1:],
                            size[:-1])).mean((2, 3))
    change, angle, size, before = run.mean(measure)
    lengths = list(enumerate([before[0].item(), *size[1::2].tolist()]))
    return {"|change| / |stream|": by_kind(change), "turned by (degrees)": by_kind(angle),
            "length of the stream": {"stream": lengths}}

def relative(after, before):
    return (after - before).norm(dim=-1) / before.norm(dim=-1).clamp_min(1e-30)

def angles(x, y):
    """Between vectors (..., C), in radians. (Of small angles, the arc cosine loses the digits.)"""
    x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
    return 2 * torch.atan2((x - y).norm(dim=-1), (x + y).norm(dim=-1))

@stat("What the head can read after each block", page="more", x="blocks run", start=0)
def logit_lens(run):
    """The loss if the head read the stream after each block. Where it is high, the head can't read
    yet. But it was trained to read the last block, so something else may be there.

    Final norm and head, applied to the stream after each block (0: to the embedding). Source: the
    logit lens, as in arXiv:2505.13898."""
    losses = torch.zeros(len(run.model.order) + 1)
    for idx, targets in run.batches:
        for i, stream in enumerate(ends_of_blocks(run.model, idx)):
            loss = F.cross_entropy(run.model.head(stream).flatten(0, 1), targets.flatten())
            losses[i] += loss.item() / len(run.batches)
    return {"loss (nats per token)": {"after each block": losses.tolist()}}

def removal_found(result):
    worth = result["without the block"]["block"]
    best, least = worth.index(max(worth)), worth.index(min(worth))
    return (f"block {best + 1} is worth most, {worth[best]:.2f} nats, and block {least + 1} least, "
            f"{worth[least]:.2f}")

@stat("What a sublayer is worth", page="more", finding=removal_found, x="block", log=True,
      ylabel="loss increase (nats)")
def removal(run):
    """How much the loss rises without one sublayer, or without a whole block; near 0: it could go.

    The stream passes what is removed unchanged, an outer norm (post) included. With attnres there
    is a source less. A block that --repeat runs several times is removed wherever it runs. Nothing
    is trained after it. Sources: LLM-Drop, arXiv:2406.15786; arXiv:2505.13898."""
    places = range(1, 2 * len(run.model.order) + 1)
    one = [run.loss_without({place}) - run.loss for place in places]
    block = [run.loss_without(sublayers_of(run.model, i)) - run.loss
             for i in range(len(run.model.blocks))]
    return {"without one sublayer": by_kind(one), "without the block": {"block": block}}

@stat("Loss while training", page="more", x="training tokens")
def loss_curve(run):
    """The loss on validation windows and on training batches, to compare runs on the same data.

    As train.py has logged them. A training loss is that of a single step."""
    tokens = run.config["batch_size"] * run.config["block_size"]
    found = {"validation": "val_loss", "training": "loss"}
    return {"loss (nats per token)": {
        name: [[step * tokens, entry[key]] for step, entry in run.history.items() if key in entry]
        for name, key in found.items()}}

def block_scores(run):
    """{method: a score for each block}. The lowest is to go first."""
    blocks = run.model.blocks
    without = [Without(sublayers_of(run.model, i), run.model.decider) for i in range(len(blocks))]
    def stay(idx):
        x = run.streams(idx)[::2]
        return (1 - F.cosine_similarity(x[:-1], x[1:], dim=-1)).mean((1, 2))
    scores = {"magnitude": [sum(p.abs().sum() for p in block.parameters()) for block in blocks],
              "influence": run.mean(stay, run.others),
              "worth": [mean_loss(run.model, run.others, decider) for decider in without],
              "last first": [-i for i in range(len(blocks))]}
    if sums := gradient_sums(run):
        sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
        scores["CascadeFlow"] = [norm / size ** 0.5 for norm, size in zip(sums, sizes)]
    return scores

def gradient_sums(run):
    """Gradient norm of each block, summed over the training, as last noted. []: not known."""
    sums = [entry.get("grad_norms", []) for entry in run.history.values()]
    sums = [each for each in sums if len(each) == len(run.model.blocks) and any(each)]
    return sums[-1] if sums else []

# =========================================================================================== main

def main(argv=None):
    if "--list" in (argv or sys.argv):   # needs no runs
        print("\n".join(f"{name:18}{stat.caption}" for name, stat in STATS.items()))
        return
    [args] = parse((AnalyzeConfig,), argv, __doc__, positional=("runs",))
    named = args.only.split(",") if args.only else list(STATS)
    for name in named:
        if name not in STATS:
            refuse(f"--only {name}: no such statistic; choose from {', '.join(STATS)}")
    wanted = [name for name in STATS if name in named]   # in the order of the page
    args.text = prepare.text_or_file(args.text)
    runs = open_runs(args)
    refuse_if_taken(Path(args.out))   # now, not after minutes of measuring
    results = {name: {} for name in wanted}
    for run_name, run in runs.items():
        print(printable(f"{run_name}: measuring {len(wanted)} statistics"), file=sys.stderr)
        for name in wanted:
            torch.manual_seed(0)   # --mod coins draws the same coins, whatever --only names.
            try:
                results[name][run_name] = STATS[name].measure(run)
            except NotHere as why:
                results[name][run_name] = str(why)
                if args.only:   # Else it is on the page, beside all the others.
                    print(printable(f"{run_name}: {name}: {why}"), file=sys.stderr)
    save(Path(args.out), runs, results)
    say(f"{args.out}/index.html shows {', '.join(runs)}; open it in a browser")

def refuse_if_taken(out):
    """Makes the folder. SystemExit if it can't be written to, or has files of our names that we
    have not made"""
    ours = {"index.html", "numbers.json", *(f"{name}.png" for name in STATS)}
    with explain_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        found = ours & {*os.listdir(out)}
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
        n = max(4, args.windows or config["eval_windows"])   # for measuring, and to choose by
        windows = prepare.val_windows(config["data"], config["block_size"], n)
        steps_text = prepare.load_meta(config["data"]).get("steps")
        run = Run(model, config, read_metrics(path), args, windows, steps_text)
        if not math.isfinite(run.loss):
            refuse(f"{path}: its loss is {run.loss}, so there is nothing to see; train it with a "
                   f"lower --lr")
        runs[printable(name if names.count(name) == 1 else path)] = run
    return runs

def save(out, runs, results):
    """Figures, numbers and page"""
    import draw   # here, because it loads matplotlib, and who only measures needs none
    colors, page = draw.colors_of(runs), {}
    about = {name: dict(config=run.config, color=colors[name], loss=run.loss, bits=run.bits,
                        parameters=num_params(run.model), flops=flops_per_token(run.model))
             for name, run in runs.items()}
    # JSON has no nan.
    results = json.loads(json.dumps(results), parse_constant=lambda name: None)
    numbers = json.dumps(dict(runs=about, statistics=results), indent=1)
    # `refuse_if_taken` looks for it.
    write_file(out / "numbers.json", lambda f: f.write(numbers.encode()))
    for name, found in results.items():
        stat = STATS[name]
        found = {run: result for run, result in found.items() if not isinstance(result, str)}
        says = {run: stat.finding(result) for run, result in found.items()} if stat.finding else {}
        page[name] = dict(title=stat.title, page=stat.page, caption=stat.caption, finding=says,
                          definition=stat.definition, results=results[name], image="", width=0)
        if found and stat.draw in draw.DRAWINGS:
            png, width = draw.as_png(stat, found, colors)
            write_file(out / f"{name}.png", lambda f: f.write(png))
            image = "data:image/png;base64," + base64.b64encode(png).decode()
            page[name] |= dict(image=image, width=80 * width)
    template = (Path(__file__).parent / "analyze.html").read_text(encoding="utf-8")
    # Without a <, no text ends a script.
    report = json.dumps(dict(runs=about, statistics=page)).replace("<", "\\u003c")
    write_file(out / "index.html", lambda f: f.write(template.replace("REPORT", report).encode()))

if __name__ == "__main__":
    start(main)
