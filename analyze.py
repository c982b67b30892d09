"""
What each layer of one or several runs does: a page of figures that opens in any browser.

    python analyze.py runs/steps-pre runs/steps-nag --out figures   # then open figures/index.html
    python analyze.py runs/nag --text "def add(a, b):"              # with a map of your own text
    python analyze.py runs/nag --only removal,skip_curve            # some statistics
    python analyze.py --list                                        # their names and titles

Writes OUT/index.html, OUT/STATISTIC.png and OUT/numbers.json. Sublayers have the numbers 1 .. 2L in
the order in which they run: odd ones are attention, even ones MLP. Windows and loss are those of
train.py, so a checkpoint has one loss everywhere. A model that was trained to skip skips here, too.
"""
import base64
import codecs
import functools
import inspect
import json
import math
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

import prepare
from flags import flag, parse, printable, refuse, say, start
from inside import KNOWN, WINDOWS, Inside, NotHere, ends_of_blocks, patch
from model import (ByFunction, ByGain, Decider, Runner, Without, flops_per_token, num_params,
                   sublayers_of, who_ran, why_not)
from processes import pick_device, pick_threads
from runs import data_of, explain_write_errors, open_run, read_metrics, write_file
from steps import (answers, in_words, lines_that_ask, solve, some_digits, spelled,
                   steps_asked)
from train import evaluate

@dataclass
class AnalyzeConfig:
    runs: list = flag(None, "run folders")
    out: str = flag("figures", "folder of the page, the figures and the numbers")
    only: str = flag("", "some statistics, such as removal,skip_curve; without it all of them")
    text: str = flag("", "a text, or a file with one, for the map of tokens and sublayers")
    asked: int = flag(0, "look for the lines inside of lines that ask for so many steps; 0: for "
                      "the most that the model has learned", 0, 25)
    skip_below: float = flag(0.05, "a token skips what would turn it by less (a gain), if the run "
                             "was not trained to skip", 0, 100)
    windows: int = flag(0, "validation windows; 0: as many as in training", 0, 1e6)
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "auto: cuda where there is one")

# ============================================================================= what a statistic is

STATS = {}   # name -> Statistic, in the order of the page

# What a statistic returns, for each way to draw it. A line is [y, ...] or [[x, y], ...]. A matrix
# is a list of rows, from below, and None in it is grey. Tensors will do, too.
RETURNS = {"lines": "{panel: {name: line}}", "heat": "{panel: matrix}"}

class Statistic:
    """Something to measure of a Run, and how the page shows it. The first paragraph of the
    function's docstring is the caption. The rest says how it is defined, and where it comes from.

    draw: a key of DRAWINGS in draw.py, or None: the page draws it; options: of the drawing"""
    def __init__(self, measure, title, draw, options):
        caption, _, definition = (inspect.getdoc(measure) or title).partition("\n\n")
        self.caption, self.definition = " ".join(caption.split()), " ".join(definition.split())
        self.measure, self.title, self.draw, self.options = measure, title, draw, options
        self.says = None

    @torch.no_grad()
    def __call__(self, run):
        """-> what its drawing wants. NotHere says why this run can't have it."""
        return self.measure(run)

    def verdict(self, says):
        """A decorator. says(result, run) -> a sentence or two for the page: what can be seen"""
        self.says = says
        return says

def stat(title, draw="lines", **options):
    """A decorator: makes a statistic of the function below it. That gets a Run, and its name is
    what --only calls it."""
    def add(measure):
        STATS[measure.__name__] = Statistic(measure, title, draw, options)
        return STATS[measure.__name__]
    return add

class Run:
    """What a statistic gets: a trained model, and validation windows to measure it on"""
    def __init__(self, model, config, history, args, windows, puzzle=None):
        """windows: x, y (n, T)"""
        self.model = model        # in eval mode
        self.config = config      # config.json
        self.history = history    # step -> what metrics.jsonl says about it
        self.args = args          # AnalyzeConfig
        self.puzzle = puzzle      # what meta.json says of the steps text; None: it is another text
        self.batches = in_batches(*(part.to(model.device) for part in windows))   # (idx, targets)
        token_bytes = prepare.token_bytes(config, model.config.vocab_size)
        self.loss, self.bits, _ = evaluate(model, *windows, token_bytes, 8)   # nats per token

    @functools.cached_property
    def some(self):
        """Every fourth window, from all over the text: for slow measurements"""
        return every_fourth(self.batches, 0)

    @functools.cached_property
    def others(self):
        """As many other ones: to choose something by, before it is measured on those of `some`"""
        return every_fourth(self.batches, 2)

    @functools.cached_property
    def loss_of_some(self):
        return mean_loss(self.model, self.some)

    def change_with(self, decider):
        """By how much the loss of these windows changes if this decider says who runs what"""
        return mean_loss(self.model, self.some, decider) - self.loss_of_some

    def mean(self, measure, batches=None):
        """The mean over batches of measure(idx), a tensor"""
        batches = batches or self.batches
        return sum(measure(idx) for idx, _ in batches) / len(batches)

    def streams(self, idx, runner=None):
        """The stream before each sublayer and at the end, as vectors: (2L + 1, B, T, C)"""
        walk, as_tensor = list(self.model.walk(idx, runner=runner)), self.model.ends.as_tensor
        befores = [as_tensor(before) for _, before, _ in walk]
        return torch.stack([*befores, as_tensor(walk[-1][2])])

    def degrees(self, idx, runner=None):
        """The angle by which each sublayer turns the stream: (2L, B, T); 0 where a token skips"""
        x = self.streams(idx, runner)
        return angles(x[1:], x[:-1]).rad2deg()

    def forward(self, idx, decider=None):
        """-> logits, and who ran each sublayer, bools (2L, B, T)"""
        runner = Runner(self.model, decider)
        logits, _ = self.model(idx, runner=runner)
        return logits, who_ran(runner)

    @property
    def skipping(self):
        """Who skips: as in training, or else who would turn by less than --skip_below"""
        if self.model.decider.needs_tensor:
            raise NotHere("without its routers, which would show what skipping costs, it is "
                          "another model")
        if self.model.config.mod != "all":
            return self.model.decider
        return self.by_gain(self.args.skip_below)

    def by_gain(self, below):
        """The decider of --mod gain:below=..., if the model knows gains"""
        decider = ByGain(self.model.config, below)
        if why := why_not(decider, self.model.config):
            raise NotHere(why)
        return decider

    # --- On the steps text only

    def need_puzzle(self):
        if not self.puzzle:
            raise NotHere("it is for the steps text (prepare.py steps), whose depth is known")
        return self.puzzle

    @functools.cached_property
    def right(self):
        """The share of right digits by steps asked: 0, 1, .."""
        return right_by_steps(self)[0]

    @property
    def guess(self):
        """The share of digits that are right by chance"""
        return 1 / len(self.need_puzzle()["table"])

    @property
    def known(self):
        """Up to how many steps at least 90 % of the digits are right; 0 if not even copies are"""
        unknown = [k for k, share in enumerate(self.right) if share < KNOWN]
        return max(0, min(unknown, default=len(self.right)) - 1)

    @property
    def asked(self):
        """Of which lines we look inside: --asked, or the most steps that the model has learned"""
        most = self.need_puzzle()["most"]
        if self.args.asked > most:
            raise NotHere(f"its lines ask for {in_words(most)} at most, not for --asked "
                          f"{self.args.asked}")
        return self.args.asked or max(1, self.known)

def in_batches(x, y):
    size = math.gcd(len(x), 8)   # All batches are as large, so that their means can be averaged.
    return list(zip(x.split(size), y.split(size)))

def every_fourth(batches, first):
    return in_batches(*(torch.cat(part)[first::4] for part in zip(*batches)))

def mean_loss(model, batches, decider=None):
    losses = [model(*batch, runner=Runner(model, decider))[1].item() for batch in batches]
    return sum(losses) / len(losses)

def angles(x, y):
    """Between vectors (..., C), in radians. (Of small angles, the arc cosine loses the digits.)"""
    x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
    return 2 * torch.atan2((x - y).norm(dim=-1), (x + y).norm(dim=-1))

def by_kind(values):
    """A value per sublayer -> a line of attentions and one of MLPs, with a value per block"""
    return {"attention": values[::2], "MLP": values[1::2]}

ALL_RUN = Decider()

# ================================================================================= the steps text

# What is asked for is known, so these figures are right or wrong.

def by_steps(run, measure):
    """measure(idx, targets) (rows, B, T) -> its mean over the digits of each number of steps: rows
    of numbers. Digits of the right half of a line, because on the left, digits repeat soon, and can
    be guessed; and only where the line before is in the window, so that they can be known."""
    puzzle, values, steps = run.need_puzzle(), [], []
    for idx, targets in run.batches:
        asked, cell = steps_asked(torch.cat((idx[:, :1], targets), 1), puzzle["cells"])
        steps.append(torch.where(cell >= puzzle["cells"] // 2, asked, -1))
        values.append(measure(idx, targets).double())
    values, steps = torch.cat(values, 1), torch.cat(steps)
    numbers = range(puzzle["most"] + 1)
    if not all((steps == k).any() for k in numbers):
        raise NotHere("its validation windows lack some number of steps; give it more of them, "
                      "with --windows")
    return torch.stack([values[:, steps == k].mean(1) for k in numbers], 1).tolist()

def right_by_steps(run, decider=None):
    """-> the share of right digits by steps asked, and the share that ran each sublayer, in all
    batches (2L,)"""
    ran = []
    def is_right(idx, targets):
        logits, who = run.forward(idx, decider)
        ran.append(who.float().mean((1, 2)))
        return (logits.argmax(-1) == targets)[None]
    [right] = by_steps(run, is_right)
    return right, sum(ran) / len(ran)

def steps_learned(right, guess):
    """Shares of right digits by steps asked, 0, 1, .. -> how many steps have been learned: each
    step counts by how far its share is above guessing. 3.0: three steps, and no more"""
    return sum(max(0.0, share - guess) / (1 - guess) for share in right[1:])

@stat("The puzzle", draw=None)
def puzzle(run):
    """After each line of the text comes one with as many digits. The letter says how many steps
    lead there: a 0, b 1, c 2. In a step, each digit becomes another, which depends on itself and on
    its left neighbour. What has the model learned? Here it writes the answers. Wrong digits are
    red.

    The likeliest digit each time, after this line alone. What is right follows from the table."""
    about = run.need_puzzle()
    lines = [chr(ord("a") + k) + some_digits(about) for k in range(about["most"] + 1)]
    return {"lines": lines, "answers": answers(run.model, lines, about),
            "true": [solve(line, about)[-1] for line in lines]}

@stat("How many steps it has learned", x="steps asked for", first_x=0)
def steps(run):
    """The further right a line falls, the more steps the model can do.

    Digits of the right half of a line, whose line before is in the window: each can be known. On
    the left, digits repeat soon, and can be guessed. Steps learned: the sum over 1, 2, .. steps of
    how far a share is above guessing, which is 1 / symbols."""
    guessing = [run.guess] * len(run.right)
    return {"share of right digits": {"measured": run.right, "guessing": guessing}}

@steps.verdict
def steps_found(result, run):
    if run.right[0] < KNOWN:
        return "It has not even learned to copy a line."
    return (f"{steps_learned(run.right, run.guess):.1f} steps learned. Up to "
            f"{in_words(run.known)}, at least {KNOWN:.0%} of the digits are right.")

@stat("The lines inside, which nobody wrote", draw="inside", first_x=0, first_y=0,
      x="the line after so many steps", y="blocks run", label="share of digits read")
def lines_inside(run):
    """The text never has the lines between a line and its answer. A linear probe looks for their
    digits in the stream. Choose a line, and see the furthest digits that it reads after each block.
    The figure shows which share it reads: on the left where the line stands, on the right where the
    answer is predicted. Without its left neighbour, a digit has two possible successors: .5.

    Ridge regression from unit(stream after a block) to the digit in this cell after 0, 1, .. steps;
    share of right digits on other windows. Digits of a line are shown if this share is at least .9.
    Lines ask for --asked steps, or for the most of which 90 % are right. Our tests check that the
    probe reads no such line in an untrained model, nor shuffled digits."""
    k = run.asked
    windows = prepare.windows_of(run.config["data"], "val", run.model.config.block_size, WINDOWS)
    inside = Inside(run.model, run.puzzle, windows, k)
    idx, targets = run.batches[0]
    _, _, lines = lines_that_ask(idx.cpu(), targets.cpu(), k, run.puzzle)
    examples = [chr(ord("a") + k) + digits
                for digits in [some_digits(run.puzzle), *map(spelled, lines[:4])]]
    return dict(asked=k, line=inside.share_by_block("line"),
                answer=inside.share_by_block("answer"),
                examples=[inside.example(line) for line in examples])

@lines_inside.verdict
def lines_inside_found(result, run):
    told, before = [], 0
    for block, row in enumerate(result["examples"][0]["blocks"]):
        if row and row["steps"] > before:
            told.append(f"{in_words(row['steps'])} after block {block}")
            before = row["steps"]
    return (f"Of lines that ask for {in_words(result['asked'])}, a probe can read "
            f"{', then '.join(told or ['nothing new'])}.")

@stat("Which block fetches the line", x="patched after block", y="share of the digits")
def patched(run):
    """After one block, the stream of another line takes the place of this one's. Whose answer comes
    out? At some block, the answer stops needing the place where the line stands.

    400 lines of random digits, alone in their windows, that ask for as many steps as in the figure
    above; the right half of their answers' digits. Chance is 1 / symbols. Before the line is
    fetched, one share stands higher, because the answer so far is still fed in."""
    return patch(run.model, run.puzzle, run.asked)

@patched.verdict
def patched_found(result, run):
    own = result["where the line stands"]["its own answer"]
    if own[-1] < KNOWN:
        return "It doesn't know these answers, so a patch shows nothing."
    block = next(b for b, share in enumerate(own, 1) if share >= 0.95 * own[-1])
    return (f"After block {block}, the answer no longer needs the line's place, so that block "
            f"fetches it.")

@stat("What breaks without a block", draw="heat", x="steps asked for", first_x=0, first_y=0,
      y="block left out (0: none)", label="share of right digits")
def removal_by_steps(run):
    """Right digits without one block. The lowest row is the whole model: it hardly needs a block
    whose row is as bright.

    The stream passes a removed block unchanged; nothing is trained after it. Digits as in the first
    figure."""
    run.need_puzzle()
    without = [Without(sublayers_of(run.model, block), run.model.decider)
               for block in range(len(run.model.blocks))]
    return {"": [run.right, *(right_by_steps(run, decider)[0] for decider in without)]}

@removal_by_steps.verdict
def removal_by_steps_found(result, run):
    intact, *without = [statistics.mean(row[:run.known + 1]) for row in result[""]]
    worst, least = without.index(min(without)), without.index(max(without))
    return (f"Up to {in_words(run.known)}, which it has learned, {intact:.0%} of the digits are "
            f"right. Without block {worst + 1}, {without[worst]:.0%} are; without block "
            f"{least + 1}, which does least, {without[least]:.0%}.")

@stat("What turns, and for whom", draw="heat", x="steps asked for", first_x=0, y="sublayer",
      label="mean angle (degrees)", cmap="Blues")
def gain_by_steps(run):
    """How far each sublayer turns the stream, by the steps that the line asks for (0: a copy). A
    row of one colour treats all digits alike. Pale on the left and dark on the right: it works for
    those who need it. On the far right may stand what the model has not learned.

    Mean angle between the stream before and after, where the digit is predicted; 0 if it skips.
    NAG's gain is the tangent of this angle: 0.05 is 3 degrees. Digits as in the first figure."""
    return {"": by_steps(run, lambda idx, targets: run.degrees(idx))}

@gain_by_steps.verdict
def gain_by_steps_found(result, run):
    if run.known == 0:
        return "It has learned no steps, so it has no digits to tell apart."
    learned = [row[:run.known + 1] for row in result[""]]
    number, row = max(enumerate(learned, 1), key=lambda each: max(each[1]) - each[1][0])
    return (f"Sublayer {number} tells learned digits apart best: it turns copies by {row[0]:.0f} "
            f"degrees, and digits after {in_words(row.index(max(row)))} by {max(row):.0f}.")

@stat("Who skips", x="steps asked for", first_x=0)
def who_skips(run):
    """Whether a digit that needs less depth gets less. A level line: all digits skip alike.

    A token skips what would turn it by less than --skip_below (0.05, which are 3 degrees), or as it
    was trained. Counted where the digit is predicted. Digits as in the first figure."""
    def ran_and_right(idx, targets):
        logits, who = run.forward(idx, run.skipping)
        return torch.stack((who.float().mean(0), logits.argmax(-1) == targets))
    ran, right = by_steps(run, ran_and_right)
    full, _ = right_by_steps(run, ALL_RUN)
    n_sublayers = 2 * len(run.model.order)
    return {"sublayers that run for a digit": {"as it skips": [n_sublayers * x for x in ran]},
            "share of right digits": {"as it skips": right, "if all run": full}}

@who_skips.verdict
def who_skips_found(result, run):
    ran = result["sublayers that run for a digit"]["as it skips"]
    right, full = result["share of right digits"].values()
    known = max(1, run.known)
    return (f"Of {2 * len(run.model.order)} sublayers, copies run {ran[0]:.1f}, and "
            f"{in_words(known)} {ran[known]:.1f}. Skipping so, "
            f"{steps_learned(right, run.guess):.2f} steps are learned, and "
            f"{steps_learned(full, run.guess):.2f} if all run.")

# ======================================================================================= any text

BELOW = 0.0, 0.02, 0.05, 0.1, 0.2, 0.4   # gains

@stat("What skipping costs", x="share of the sublayer runs skipped")
def skip_curve(run):
    """Tokens skip what would turn them by less than 0.02, 0.05, 0.1, 0.2, 0.4. A line that stays
    level skips for nothing. Two controls skip as much: coins, and a fixed set of sublayers, which
    is as near as whole sublayers can be.

    Fixed set: for all tokens, the sublayers of lowest mean gain; left out where it would be empty.
    Coins: each sublayer is skipped by as many tokens as by gain, but by random ones. As trained: a
    model that skipped in training, as it did there. It was trained for none of the others. Steps
    learned as in the first figure."""
    model = run.model
    def mean_gains(idx):
        runner = Runner(model, run.by_gain(0))   # All run, and all gains are asked for.
        model(idx, runner=runner)
        return torch.stack([gain.abs().mean() for gain in runner.gains])
    weakest_first = run.mean(mean_gains, run.others).argsort() + 1   # places of sublayers
    lines = {"by gain": [], "a fixed set": [], "coins": []}
    for below in BELOW:
        point, ran = skip_point(run, run.by_gain(below))
        lines["by gain"].append(point)
        weakest = weakest_first[:round(point[0] * len(ran))].tolist()
        if weakest:
            lines["a fixed set"].append(skip_point(run, Without(weakest, ALL_RUN))[0])
        lines["coins"].append(skip_point(run, ByFunction(functools.partial(flip, ran)))[0])
    if model.config.mod != "all":
        lines["as trained"] = [skip_point(run, model.decider)[0]]
    return {"steps learned" if run.puzzle else "loss (nats per token)": lines}

def flip(ran, runner):
    """A decider's answer, by coins: each sublayer has its own share of tokens that run"""
    return torch.rand(runner.shape, device=runner.model.device) < ran[runner.place - 1]

def skip_point(run, decider):
    """-> [share skipped, steps learned or loss], and the share that ran each sublayer (2L,)"""
    if run.puzzle:
        right, ran = right_by_steps(run, decider)
        value = steps_learned(right, run.guess)
    else:
        ran = run.mean(lambda idx: run.forward(idx, decider)[1].float().mean((1, 2)), run.some)
        value = run.loss + run.change_with(decider)
    return [1 - ran.mean().item(), value], ran

@skip_curve.verdict
def skip_found(result, run):
    [(what, lines)] = result.items()
    place = BELOW.index(0.1)
    (_, full), (skipped, value) = lines["by gain"][0], lines["by gain"][place]
    _, by_coins = lines["coins"][place]
    fixed = lines["a fixed set"][place - len(BELOW):]   # It begins with the first one of any size.
    by_set = f"{fixed[0][1]:.2f} with a fixed set, " if len(fixed) == len(BELOW) - place else ""
    return (f"Below 0.1 (6 degrees), {skipped:.0%} of the sublayer runs are skipped. "
            f"{what.capitalize()}: {value:.2f}; {by_set}{by_coins:.2f} with coins; {full:.2f} if "
            f"all run.")

A_TEXT = 'def add(a, b):\n    """The sum of two numbers"""\n    return a + b\n'

@stat("What each sublayer turns for each token", draw="depth_map", y="sublayer", cmap="Blues",
      x="token (grey: it skips)", label="angle (degrees)", columns=1, power=0.5)
def depth_map(run):
    """Dark: the sublayer turns the stream of this token much. Grey: the token skips it.

    The angle between the stream before and after. Who skips: who would turn by less than
    --skip_below (0.05, which are 3 degrees), or as it was trained; without gains, nobody. The text
    is --text, or a short function. Source: NAG, arXiv:2606.16112, appendix A."""
    if run.puzzle and not run.args.text:
        raise NotHere("on the steps text, the figures by steps say more; --text makes a map")
    encoding = prepare.get_tokenizer(run.config["tokenizer"])
    tokens = encoding.encode_ordinary(run.args.text[:10_000] or A_TEXT)
    tokens = tokens[:run.model.config.block_size]
    idx = torch.tensor([tokens], device=run.model.device)
    try:
        runner = Runner(run.model, run.skipping)
    except NotHere:
        runner = Runner(run.model, ALL_RUN)
    degrees = run.degrees(idx, runner)[:, 0]
    degrees[~who_ran(runner)[:, 0]] = math.nan
    decoder = codecs.getincrementaldecoder("utf-8")("replace")   # A character may be many tokens.
    parts = [decoder.decode(encoding.decode_single_token_bytes(token)) for token in tokens]
    return dict(tokens=parts, degrees=degrees)

@stat("How the stream turns, and how long it gets", x="block")
def stream(run):
    """How far each sublayer turns the stream, and how long the stream is. If it gets longer, so
    that later blocks turn it less, that is PreNorm dilution.

    Means over tokens of the angle between the stream before and after, and of |x| / sqrt(C) at the
    start (0) and after each block. NAG turns by atan|gain|. Sources: arXiv:2505.13898; NAG,
    arXiv:2606.16112, figure 3."""
    turned = run.mean(lambda idx: run.degrees(idx).mean((1, 2)))
    ends = run.mean(lambda idx: run.streams(idx)[::2].square().mean(-1).sqrt().mean((1, 2)))
    return {"turned by (degrees)": by_kind(turned),
            "length of the stream": {"stream": list(enumerate(ends.tolist()))}}

@stream.verdict
def stream_found(result, run):
    turned = result["turned by (degrees)"]["MLP"][-1]
    length = [y for _, y in result["length of the stream"]["stream"]]
    return (f"The last MLP turns the stream by {turned:.0f} degrees. At the end, the stream is "
            f"{length[-1] / length[0]:.1f} times as long as at its start.")

@stat("What the head can read after each block", x="blocks run", first_x=0)
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
    return {"loss (nats per token)": {"after each block": losses}}

@logit_lens.verdict
def logit_lens_found(result, run):
    losses = result["loss (nats per token)"]["after each block"]
    worse = [block for block, loss in enumerate(losses) if loss > losses[-1] + 0.1]
    early = max(worse, default=-1) + 1
    if early == len(losses) - 1:
        return "Before the last block has run, the head reads worse by more than 0.1 nats."
    return f"From block {early} on, the head reads as well as at the end, to 0.1 nats."

@stat("What a sublayer is worth", x="block", log=True, y="loss increase (nats)")
def removal(run):
    """How much the loss rises without one sublayer, or without a whole block; near 0: it could go.

    The stream passes what is removed unchanged, an outer norm (post) included. With attnres there
    is a source less. A block that --repeat runs several times is removed wherever it runs. Nothing
    is trained after it. Sources: LLM-Drop, arXiv:2406.15786; arXiv:2505.13898."""
    def worth(places):
        return run.change_with(Without(places, run.model.decider))
    one = [worth({place}) for place in range(1, 2 * len(run.model.order) + 1)]
    block = [worth(sublayers_of(run.model, i)) for i in range(len(run.model.blocks))]
    return {"without one sublayer": by_kind(one), "without the block": {"block": block}}

@removal.verdict
def removal_found(result, run):
    worth = result["without the block"]["block"]
    best, least = worth.index(max(worth)), worth.index(min(worth))
    return (f"Block {best + 1} is worth most, {worth[best]:.2f} nats, and block {least + 1} least, "
            f"{worth[least]:.2f}.")

# ============================================================================ from runs to a page

def main(argv=None):
    if "--list" in (argv or sys.argv):   # needs no runs
        print("\n".join(f"{name:18}{stat.title}" for name, stat in STATS.items()))
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
    # name of a statistic -> {name of a run: what was found, or why that run can't have it}
    results, missing = ({name: {} for name in wanted} for _ in range(2))
    for run_name, run in runs.items():
        for name in wanted:
            print(printable(f"{run_name}: measuring {name}"), file=sys.stderr)
            torch.manual_seed(0)   # --mod coins draws the same coins, whatever --only names.
            try:
                results[name][run_name] = as_plain(STATS[name](run), name)
            except NotHere as why:
                missing[name][run_name] = str(why)
                print(printable(f"{run_name}: no {name}, because {why}"), file=sys.stderr)
    save(Path(args.out), runs, results, missing)
    say(f"{args.out}/index.html shows {', '.join(runs)}; open it in a browser")

def open_runs(args):
    """-> {name: Run}, where the name is the folder's, or its whole path if two have the same"""
    names, runs = [Path(path).resolve().name for path in args.runs], {}
    for path, name in zip(args.runs, names):
        device = pick_device(args.device)
        model, config = open_run(path, device)
        pick_threads(model.config, device)
        n = max(4, args.windows or config["eval_windows"])   # for measuring, and to choose by
        data = data_of(path, config)
        windows = prepare.windows_of(data, "val", config["block_size"], n)
        puzzle = prepare.load_meta(data).get("steps")
        run = Run(model, config, read_metrics(path), args, windows, puzzle)
        if not math.isfinite(run.loss):
            refuse(f"{path}: its loss is {run.loss}, so there is nothing to see; train it with a "
                   f"lower --lr")
        runs[printable(name if names.count(name) == 1 else path)] = run
    return runs

def as_plain(result, name):
    """What a statistic has returned -> the same as JSON has it: lists for tensors, None for nan.
    SystemExit if it can't be drawn, which may happen to a statistic of your own"""
    text = json.dumps(result, default=lambda tensor: tensor.tolist())
    result = json.loads(text, parse_constant=lambda nan: None)
    draw = STATS[name].draw
    kind = {"lines": dict, "heat": list}.get(draw, object)   # of a panel
    panels = result.values() if isinstance(result, dict) else []
    if not panels or not all(isinstance(panel, kind) for panel in panels):
        refuse(f"{name} in analyze.py returns no {RETURNS.get(draw, 'dict')}, which "
               f"draw={draw!r} needs; see RETURNS there")
    return result

def refuse_if_taken(out):
    """Makes the folder. SystemExit if it can't, or there are files of our names that others have
    made"""
    ours = {"index.html", "numbers.json", *(f"{name}.png" for name in STATS)}
    page = out / "index.html"   # It is written first.
    with explain_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        is_ours = page.exists() and 'id="report"' in page.read_text(errors="replace")
        if not is_ours and ours & {*os.listdir(out)}:
            refuse(f"--out {out}: has a page that is none of ours; take another folder")

def save(out, runs, results, missing):
    """Page, numbers and figures"""
    import draw   # here, because it loads matplotlib, and who only measures needs none
    colors, page, figures = draw.colors_of(runs), {}, {}
    about = {name: dict(config=run.config, color=colors[name], loss=run.loss, bits=run.bits,
                        parameters=num_params(run.model), flops=flops_per_token(run.model))
             for name, run in runs.items()}
    for name, found in results.items():
        stat, image, width, says = STATS[name], "", 0, {}
        if stat.says:
            says = {run: stat.says(result, runs[run]) for run, result in found.items()}
        if found and stat.draw:
            figures[name], width = draw.as_png(stat, found, colors)
            image = "data:image/png;base64," + base64.b64encode(figures[name]).decode()
        page[name] = dict(title=stat.title, caption=stat.caption, definition=stat.definition,
                          verdicts=says, results=found, missing=missing[name], image=image,
                          width=80 * width)
    template = (Path(__file__).parent / "analyze.html").read_text(encoding="utf-8")
    # Without a <, no text ends a script.
    report = json.dumps(dict(runs=about, statistics=page)).replace("<", "\\u003c")
    numbers = json.dumps(dict(runs=about, statistics=results, missing=missing), indent=1)
    write_file(out / "index.html", lambda f: f.write(template.replace("REPORT", report).encode()))
    write_file(out / "numbers.json", lambda f: f.write(numbers.encode()))
    for name, png in figures.items():
        write_file(out / f"{name}.png", lambda f: f.write(png))

if __name__ == "__main__":
    start(main)
