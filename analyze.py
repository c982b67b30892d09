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
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
import torch.nn.functional as F

import prepare
from flags import flag, parse, printable, refuse, say, start
from inside import (KNOWN, NotHere, answers, ends_of_blocks, in_words, inside_of, lines_after,
                    patch, questions, some_digits, spelled, sublayers_of, who_ran)
from model import (ByFunction, ByGain, Decider, Runner, Without, flops_per_token, num_params,
                   why_not)
from processes import pick_device, pick_threads
from runs import data_of, explain_write_errors, open_run, read_metrics, write_file
from steps import steps_asked
from train import evaluate

@dataclass
class AnalyzeConfig:
    runs: list = flag(None, "run folders")
    out: str = flag("figures", "folder of the page, the figures and the numbers")
    only: str = flag("", "some statistics, such as removal,skip_curve; without it the page's")
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
    what it returned, and the Run -> sentences for the page. options: of the drawing"""
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
    def __init__(self, model, config, history, args, windows, puzzle=None):
        self.model = model        # in eval mode
        self.puzzle = puzzle      # what meta.json says of the steps text; None: it is another text
        self.config = config      # config.json
        self.history = history    # step -> what metrics.jsonl says about it
        self.args = args
        self.batches = in_batches(*(part.to(model.device) for part in windows))   # (idx, targets)
        token_bytes = prepare.token_bytes(config, model.config.vocab_size)
        self.loss, self.bits, _ = evaluate(model, *windows, token_bytes, 8)   # nats per token

    # Every fourth window each, from all over the text. `some`: for slow measurements. `others`: to
    # choose by, so that choice and test differ.
    some = functools.cached_property(lambda self: every_fourth(self.batches, 0))
    others = functools.cached_property(lambda self: every_fourth(self.batches, 2))
    loss_of_some = functools.cached_property(lambda self: mean_loss(self.model, self.some))
    right = functools.cached_property(lambda self: right_by_steps(self)[0])
    known = property(lambda self: max(1, most_learned(self.right)))     # steps
    guess = property(lambda self: 1 / len(self.need_puzzle()["table"]))   # right digits by chance

    def need_puzzle(self):
        if not self.puzzle:
            raise NotHere("it is for the steps text (prepare.py steps), whose depth is known")
        return self.puzzle

    def streams(self, idx, runner=None):
        """The stream before each sublayer and at the end, as vectors: (2L + 1, B, T, C)"""
        walk, as_tensor = list(self.model.walk(idx, runner=runner)), self.model.ends.as_tensor
        befores = [as_tensor(before) for _, before, _ in walk]
        return torch.stack([*befores, as_tensor(walk[-1][2])])

    def degrees(self, idx, runner=None):
        """The angle by which each sublayer turns the stream: (2L, B, T); 0 where a token skips"""
        x = self.streams(idx, runner)
        return angles(x[1:], x[:-1]).rad2deg()

    def mean(self, measure, batches=None):
        """The mean over batches of measure(idx), a tensor"""
        batches = batches or self.batches
        return sum(measure(idx) for idx, _ in batches) / len(batches)

    def change_with(self, decider):
        """By how much the loss of every fourth window changes if this decider says who runs what"""
        return mean_loss(self.model, self.some, decider) - self.loss_of_some

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
        return who_ran(runner).float().mean(0), logits

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
    puzzle, total, count = run.need_puzzle(), 0, 0
    for idx, targets in run.batches:
        asked, cell = steps_asked(torch.cat((idx[:, :1], targets), 1), puzzle["cells"])
        asked = torch.where(cell >= puzzle["cells"] // 2, asked, -1)
        is_asked = F.one_hot(asked + 1, puzzle["most"] + 2)[..., 1:].double()        # (B, T, steps)
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
    """The last number of steps of which 90 % of the digits are right; 0 if there is none"""
    return max((k for k, share in enumerate(right) if share >= KNOWN), default=0)

@stat("The puzzle", draw="table")
def puzzle(run):
    """A line, and what the model writes if it asks for 0, 1, 2, .. steps. Wrong digits are red.

    The likeliest digit each time, after this line alone. What is right follows from the table."""
    about = run.need_puzzle()
    lines = [chr(ord("a") + k) + some_digits(about) for k in range(about["most"] + 1)]
    return {"lines": lines, "answers": answers(run.model, lines, about),
            "true": [spelled(lines_after(line, about)[-1]) for line in lines]}

def steps_found(result, run):
    if run.right[0] < KNOWN:
        return "It has not even learned to copy a line."
    return (f"{steps_learned(run.right, run.guess):.1f} steps learned. Up to "
            f"{in_words(most_learned(run.right))}, at least {KNOWN:.0%} of the digits are right.")

@stat("How many steps it has learned", finding=steps_found, x="steps asked for", start=0)
def steps(run):
    """The further right a line falls, the more steps the model can do.

    Digits of the right half of a line, whose line before is in the window: each can be known. On
    the left, digits repeat soon, and can be guessed. Steps learned: the sum over 1, 2, .. steps of
    how far a share is above guessing, which is 1 / symbols."""
    guessing = [run.guess] * len(run.right)
    return {"share of right digits": {"measured": run.right, "guessing": guessing}}

def k_of(run):
    """Of which lines we look inside: --asked, or the most steps that the model has learned"""
    k, most = run.args.asked or run.known, run.puzzle["most"]
    if k > most:
        raise NotHere(f"its lines ask for {in_words(most)} at most, not for --asked {k}")
    return k

def inside_found(result, run):
    told, before, jumps, asked = [], 0, {}, result["asked"]
    for block, row in enumerate(result["examples"][0]["blocks"]):
        if row and row["steps"] > before:
            told.append(f"{in_words(row['steps'])} after block {block}")
            jumps[block], before = row["steps"] - before, row["steps"]
    says = f"Of lines that ask for {in_words(asked)}, a probe can read "
    says += ", then ".join(told or ["nothing new"]) + "."
    if before == asked and len(jumps) > 1:
        says += " So some can be read before the answer."
    most = max(jumps, key=jumps.get, default=0)
    if jumps and jumps[most] > 1:
        says += f" Block {most} does {in_words(jumps[most])} at once."
    return says

@stat("The lines inside, which nobody wrote", draw="inside", finding=inside_found)
def lines_inside(run):
    """The text never has the lines between a line and its answer. A linear probe looks for their
    digits in the stream. Without its left neighbour, a digit has two possible successors: .5.

    Ridge regression from unit(stream after a block) to the digit in this cell after 0, 1, .. steps;
    share of right digits on other windows. Left: at the digits of the line. Middle: where the
    answer's digits are predicted. Right: one line, and the furthest digits that can be read (share
    at least .9). Lines ask for --asked steps, or for the most of which 90 % are right. Our tests
    check that the probe reads no such line in an untrained model, nor shuffled digits."""
    puzzle, (idx, targets) = run.need_puzzle(), run.batches[0]
    k = k_of(run)
    inside = inside_of(run.model, run.config["data"], puzzle, k)
    first, lines = chr(ord("a") + k), questions(idx.cpu(), targets.cpu(), puzzle, k)[2][0]
    lines = [some_digits(puzzle), *map(spelled, lines[:4])]
    return dict(asked=k, line=inside.share["line"], answer=inside.share["answer"],
                examples=[inside.example(first + line) for line in lines])

def patched_found(result, run):
    own = result["where the line stands"]["its own answer"]
    if own[-1] < KNOWN:
        return "It doesn't know these answers, so a patch shows nothing."
    block = next(b for b, share in enumerate(own, 1) if share >= 0.95 * own[-1])
    return (f"After block {block}, the answer no longer needs the line's place, so that block "
            f"fetches it.")

@stat("Which block fetches the line", finding=patched_found, x="patched after block",
      limits=(-0.03, 1.03), ylabel="share of the digits")
def patched(run):
    """After one block, the stream of another line takes the place of this one's. Whose answer comes
    out? At some block, the answer stops needing the place where the line stands.

    400 lines of random digits, alone in their windows, that ask for as many steps as in the figure
    above; the right half of their answers' digits. Chance is 1 / symbols. Before the line is
    fetched, one share stands higher, because the answer so far is still fed in."""
    puzzle = run.need_puzzle()
    return patch(run.model, puzzle, k_of(run))

def removal_by_steps_found(result, run):
    known = most_learned(run.right)
    intact, *without = [statistics.mean(row[:known + 1]) for row in result[""]]
    worst, least = without.index(min(without)), without.index(max(without))
    return (f"Up to {in_words(known)}, which it has learned, {intact:.0%} of the digits are right. "
            f"Without block {worst + 1}, {without[worst]:.0%} are; without block "
            f"{least + 1}, which does least, {without[least]:.0%}.")

@stat("What breaks without a block", draw="heat", finding=removal_by_steps_found,
      x="steps asked for", y="block left out", label="share of right digits", first_column=0,
      first_row=0, lowest="none", vmax=1)
def removal_by_steps(run):
    """Right digits without one block. The lowest row is the whole model: it hardly needs a block
    whose row is as bright.

    The stream passes a removed block unchanged; nothing is trained after it. Digits as in the first
    figure."""
    run.need_puzzle()
    without = [Without(sublayers_of(run.model, block), run.model.decider)
               for block in range(len(run.model.blocks))]
    return {"": [run.right, *(right_by_steps(run, decider)[0] for decider in without)]}

def gain_found(result, run):
    known = most_learned(run.right)
    if known == 0:
        return "It has learned no steps, so it has no digits to tell apart."
    rows = [row[:known + 1] for row in result[""]]
    rises = [max(row) - row[0] for row in rows]
    number = rises.index(max(rises))
    copies, most = rows[number][0], max(rows[number])
    return (f"Sublayer {number + 1} tells learned digits apart best: it turns copies by "
            f"{copies:.0f} degrees, and digits after {in_words(rows[number].index(most))} by "
            f"{most:.0f}.")

@stat("What turns, and for whom", draw="heat", finding=gain_found, x="steps asked for",
      y="sublayer", label="mean angle (degrees)", first_column=0, cmap="Blues")
def gain_by_steps(run):
    """How far each sublayer turns the stream, by the steps that the digit asks for. A row of one
    colour treats all digits alike. Pale on the left and dark on the right: it works for those who
    need it. On the far right stands what the model has not learned.

    Mean angle between the stream before and after, where the digit is predicted; 0 if it skips.
    NAG's gain is the tangent of this angle: 0.05 is 3 degrees. Digits as in the first figure."""
    return {"": by_steps(run, lambda idx, targets: run.degrees(idx))}

def who_skips_found(result, run):
    ran = result["share of the sublayers that run"]["as it skips"]
    right, full = result["share of right digits"].values()
    return (f"Copies run {ran[0]:.0%} of the sublayers, and {in_words(run.known)} "
            f"{ran[run.known]:.0%}. Skipping so, {steps_learned(right, run.guess):.2f} steps are "
            f"learned, and {steps_learned(full, run.guess):.2f} if all run.")

@stat("Who skips", finding=who_skips_found, x="steps asked for", start=0, limits=(0, 1.04))
def who_skips(run):
    """Whether a digit that needs less depth gets less. A flat line: all digits skip alike.

    A token skips what would turn it by less than --skip_below (0.05, which are 3 degrees), or as it
    was trained. Counted where the digit is predicted. Digits as in the first figure."""
    def measure(idx, targets):
        depth, logits = run.depths(idx)
        return torch.stack((depth, logits.argmax(-1) == targets))
    run.need_puzzle(), run.skipping   # say if there are none
    ran, right = by_steps(run, measure)
    full, _ = right_by_steps(run, ALL_RUN)
    return {"share of the sublayers that run": {"as it skips": ran},
            "share of right digits": {"as it skips": right, "if all run": full}}

ALL_RUN = Decider()

# ======================================================================================= any text

BELOW = 0.0, 0.02, 0.05, 0.1, 0.2, 0.4

def skip_found(result, run):
    [(what, lines)] = result.items()
    skipped, value = lines["by gain"][BELOW.index(0.05)]
    controls = {name: lines[name][BELOW.index(0.05)][1] for name in ("a fixed set", "coins")}
    told = [f"with {name} {value:.2f}" for name, value in controls.items() if value is not None]
    return (f"Below 0.05 (3 degrees), {skipped:.0%} of the sublayer runs are skipped. "
            f"{what.capitalize()}: {value:.2f}; {', '.join(told)}; if all run, "
            f"{lines['by gain'][0][1]:.2f}.")

@stat("What skipping costs", finding=skip_found, x="share of the sublayer runs skipped")
def skip_curve(run):
    """Tokens skip what would turn them by less than 0.02, 0.05, 0.1, 0.2, 0.4. A line that stays
    level skips for nothing. Two controls skip as much: coins, and a fixed set of sublayers, which
    is as near as whole sublayers can be.

    Fixed set: for all tokens, the sublayers of lowest mean gain; left out where it would be empty.
    Coins: each sublayer is skipped by as many tokens as by gain, but by random ones. As trained: a
    model that skipped in training, as it did there. The others were never trained to skip. Steps
    learned as in the first figure."""
    model, twice_L = run.model, 2 * len(run.model.order)
    def mean_gains(idx):
        runner = Runner(model, run.by_gain(0))   # All run, and all gains are asked for.
        model(idx, runner=runner)
        return torch.stack([gain.abs().mean() for gain in runner.gains])
    gains = run.mean(mean_gains, run.others)
    lines = {"by gain": [], "a fixed set": [], "coins": []}
    for below in BELOW:
        point, ran = skip_point(run, run.by_gain(below))
        lines["by gain"].append(point)
        fixed = {place + 1 for place in gains.argsort()[:round(point[0] * twice_L)].tolist()}
        lines["a fixed set"].append(skip_point(run, Without(fixed, ALL_RUN))[0] if fixed
                                    else [point[0], None])
        lines["coins"].append(skip_point(run, ByFunction(functools.partial(flip, ran)))[0])
    if model.config.mod != "all":
        lines["as trained"] = [skip_point(run, model.decider)[0]]
    return {"steps learned" if run.puzzle else "loss (nats per token)": lines}

def flip(ran, runner):
    """A decider's answer, by coins: each sublayer has its own share of tokens that run"""
    return torch.rand(runner.shape, device=runner.model.device) < ran[runner.place - 1]

def skip_point(run, decider):
    """-> [share skipped, steps learned or loss], and the share that ran each sublayer"""
    if run.puzzle:
        right, ran = right_by_steps(run, decider)
        value = steps_learned(right, run.guess)
    else:
        rans = []
        for idx, _ in run.some:
            runner = Runner(run.model, decider)
            run.model(idx, runner=runner)
            rans.append(runner.ran())
        ran = [sum(shares) / len(rans) for shares in zip(*rans)]
        value = run.loss + run.change_with(decider)
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

def deep_found(result, run):
    ran = result["share of the sublayers that run"]
    low, high = min(ran, key=ran.get), max(ran, key=ran.get)
    says = f"{low} runs {ran[low]:.0%} of the sublayers, and {high} {ran[high]:.0%}."
    return says[0].upper() + says[1:]

@stat("Which characters run deep", draw="bars", finding=deep_found)
def deep_characters(run):
    """The share of the sublayers that run, by the kind of character that is predicted, and the loss
    of such characters: does depth go where the loss is?

    A token skips what would turn it by less than --skip_below (0.05, which are 3 degrees), or as it
    was trained. The mean loss is that with skipping."""
    if run.config["tokenizer"] != "bytes" or run.puzzle:
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

def depth_by_loss_found(result, run):
    ran = result["share of the sublayers that run"]["tokens"]
    return f"The easiest tenth runs {ran[0]:.0%} of the sublayers, and the hardest {ran[-1]:.0%}."

@stat("Do hard tokens run deep?", finding=depth_by_loss_found,
      x="tenth of the tokens, by rising loss")
def depth_by_loss(run):
    """The share of the sublayers that run, of tokens in ten groups by their loss. A line that rises
    spends depth on what is hard to predict.

    Who skips: as in the figure of characters. The loss is that with all sublayers."""
    if run.puzzle:
        raise NotHere("on the steps text, the figure by steps says more")
    depths, losses = [], []
    for idx, targets in run.batches:
        depths.append(run.depths(idx)[0].flatten())
        logits, _ = run.model(idx, runner=Runner(run.model, ALL_RUN))
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none"))
    tenths = torch.cat(depths)[torch.cat(losses).argsort(stable=True)].tensor_split(10)
    return {"share of the sublayers that run": {"tokens": [part.mean().item() for part in tenths]}}

@stat("What each sublayer turns for each token", draw="depth_map", y="sublayer", cmap="Blues",
      x="token (grey: it skips)", label="angle (degrees)", columns=1)
def depth_map(run):
    """Dark: the sublayer turns the stream of this token much. Grey: the token skips it.

    The angle between the stream before and after. Who skips: as in the figure of characters;
    without gains, nobody. The text is --text, or the start of a validation window: of the first
    eight, that in which depth varies most. Source: NAG, arXiv:2606.16112, appendix A."""
    if run.puzzle and not run.args.text:
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
    degrees = run.degrees(idx, runner)[:, 0].tolist()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")   # A character may be many tokens.
    for token in idx[0].tolist():
        tokens.append(decoder.decode(encoding.decode_single_token_bytes(token)))
    return dict(tokens=tokens, degrees=degrees, ran=who_ran(runner)[:, 0].tolist())

# ------------------------------------------------------------------------- the stream, under More

def update_found(result, run):
    turned = result["turned by (degrees)"]["MLP"][-1]
    length = [y for _, y in result["length of the stream"]["stream"]]
    return (f"The last MLP turns the stream by {turned:.0f} degrees. At the end, the stream is "
            f"{length[-1] / length[0]:.1f} times as long as at its start.")

@stat("What a sublayer changes", page="more", finding=update_found, x="block",
      log="|change| / |stream|")
def update(run):
    """How much each sublayer changes the stream, how far it turns it, and how long the stream is.

    Means over tokens of |after - before| / |before|, of the angle between before and after, and of
    |x| / sqrt(C) at the start (0) and after each block. NAG turns by atan|gain|. Sources:
    arXiv:2505.13898; NAG, arXiv:2606.16112, figure 3."""
    def measure(idx):
        x = run.streams(idx)
        size = x.square().mean(-1).sqrt()
        change = (x[1:] - x[:-1]).norm(dim=-1) / x[:-1].norm(dim=-1).clamp_min(1e-30)
        angle = angles(x[1:], x[:-1]).rad2deg()
        return torch.stack((change, angle, size[1:], size[:-1])).mean((2, 3))
    change, angle, size, before = run.mean(measure)
    lengths = list(enumerate([before[0].item(), *size[1::2].tolist()]))
    return {"|change| / |stream|": by_kind(change), "turned by (degrees)": by_kind(angle),
            "length of the stream": {"stream": lengths}}

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

def removal_found(result, run):
    worth = result["without the block"]["block"]
    best, least = worth.index(max(worth)), worth.index(min(worth))
    return (f"Block {best + 1} is worth most, {worth[best]:.2f} nats, and block {least + 1} least, "
            f"{worth[least]:.2f}.")

@stat("What a sublayer is worth", page="more", finding=removal_found, x="block", log=True,
      ylabel="loss increase (nats)")
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

@stat("Loss while training", page="more", x="training tokens")
def loss_curve(run):
    """The loss on validation windows and on training batches, to compare runs on the same data.

    As train.py has logged them. A training loss is that of a single step."""
    tokens = run.config["batch_size"] * run.config["block_size"]
    found = {"validation": "val_loss", "training": "loss"}
    return {"loss (nats per token)": {
        name: [[step * tokens, entry[key]] for step, entry in run.history.items() if key in entry]
        for name, key in found.items()}}

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
        for name in wanted:
            print(printable(f"{run_name}: measuring {name}"), file=sys.stderr)
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
    ours, numbers = {"index.html", *(f"{name}.png" for name in STATS)}, out / "numbers.json"
    with explain_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError("you may not write there")
        if numbers.exists():
            taken = not numbers.read_text(errors="replace").startswith(BEGINS)
        else:
            taken = ours & {*os.listdir(out)}
        if taken:
            refuse(f"--out {out}: has a page that is none of ours; take another folder")

def open_runs(args):
    """-> {name: Run}, where the name is the folder's, or its whole path if two have the same"""
    names, runs = [Path(path).resolve().name for path in args.runs], {}
    for path, name in zip(args.runs, names):
        device = pick_device(args.device)
        model, config = open_run(path, device)
        pick_threads(model.config, device)
        n = max(4, args.windows or config["eval_windows"])   # for measuring, and to choose by
        data = data_of(path, config)
        windows = prepare.val_windows(data, config["block_size"], n)
        puzzle = prepare.load_meta(data).get("steps")
        run = Run(model, config, read_metrics(path), args, windows, puzzle)
        if not math.isfinite(run.loss):
            refuse(f"{path}: its loss is {run.loss}, so there is nothing to see; train it with a "
                   f"lower --lr")
        runs[printable(name if names.count(name) == 1 else path)] = run
    return runs

BEGINS = '{\n "runs":'   # so does a numbers.json of ours

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
    write_file(out / "numbers.json", lambda f: f.write(numbers.encode()))
    for name, found in results.items():
        stat = STATS[name]
        found = {run: result for run, result in found.items() if not isinstance(result, str)}
        says = {}
        if stat.finding:
            says = {run: stat.finding(result, runs[run]) for run, result in found.items()}
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
