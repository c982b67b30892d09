"""
What each layer of one or several runs does: a page of figures that opens in any browser.

    python analyze.py runs/steps-pre runs/steps-nag --out figures   # then open figures/index.html
    python analyze.py runs/nag --text "def add(a, b):"              # with a map of your own text
    python analyze.py runs/nag --only removal,skip_curve            # some statistics
    python analyze.py --list                                        # their names and titles

Writes OUT/index.html, OUT/STATISTIC.png and OUT/numbers.json. Sublayers have the numbers 1 .. 2L (L
blocks in running order): odd ones are attention, even ones MLP. Windows and loss are those of
train.py, so a checkpoint has one loss everywhere. Tokens that skip sublayers in a run's training
(--mod) skip them here, too.
"""
import codecs
import functools
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

import dataset
from documents import text_or_file
from files import explain_write_errors
from flags import flag, parse
from inside import KNOWN, WINDOWS, Inside, NotHere, after_blocks
from model import ByFunction, ByGain, Decider, Runner, Without, places_of, why_not
from patch import patch
from processes import pick_device, set_threads
from runs import open_run
from sentences import printable, refuse, say, start
from steps import answers, find_lines, in_words, solve, some_digits, spelled, steps_of_targets
from train import evaluate

# The words of this file:
#
#     L         how many blocks run; one that --repeat runs twice counts twice
#     place     the number of a sublayer, from 1 to 2L
#     walk      one pass through all sublayers. A Runner runs them, and notes who ran which
#     decider   says which tokens run a sublayer; the others skip it. From model.py, part 3:
#               Decider()                 all tokens run all sublayers
#               ByGain(config, below)     a token skips where its gain is lower than that
#               Without(places, decider)  nobody runs these; of the others, that decider decides
#               (places_of(model, block) are those of a block: attention, MLP)
#     gain      the tangent of the angle by which a token's stream is turned: 0.05 is 3 degrees
#     NotHere   an exception: why a run can't have what was asked for, in a sentence
#
# And of the steps text (steps.py), also called the puzzle. In a step, all digits of a line are
# replaced by a table. The letter in front says how many steps lead to the next line, so we know
# what a model should answer. Here these are two (c):
#
#     c314159265358
#     d108515848740
#
#     puzzle        what meta.json says of this text: its table of a step, how many digits a line
#                   has, and the most steps
#     cell          a digit's column in its line, 0, 1, ..
#     steps asked   how many steps lead to a digit, as the letter of the line before says; -1 where
#                   nobody can know: it is no digit, or that line is not in the window
#     known         at least 90 % of the digits are right (KNOWN, in inside.py)

# ============================================================================= what a statistic is

# A statistic is a function that measures something of a Run: a model, and windows of text. It
# returns what is drawn, and a sentence about it. This is a whole one:
#
#     @stat("How far the stream turns", x="sublayer")
#     def turned(run):
#         """A sublayer that hardly turns the stream may be one to remove.
#
#         The angle between the stream before and after, a mean over all tokens."""
#         # run.degrees has an angle for each sublayer and each token, (2L, B, T).
#         degrees = run.mean(lambda idx: run.degrees(idx).mean((1, 2)))
#         return {"degrees": {"all tokens": degrees}}, f"At most by {max(degrees):.0f} degrees."
#
# The page shows the title, the first paragraph, a figure, and each run's sentence. The second
# paragraph, how it is defined, opens if one clicks. Without a sentence, return what is drawn alone.
#
# Without another draw=, that is drawn as lines: {panel: {name: line}}. A line is a list or a tensor
# of numbers, here one for each sublayer, or of pairs [x, y]. The other drawings are in draw.py.

@dataclass
class Statistic:
    measure: Callable    # the function
    title: str
    caption: str
    definition: str
    draw: str | None     # the name of a drawing; None: analyze.html shows the puzzle as a table
    options: dict        # what the drawing is told
    needs_puzzle: bool   # Is it for the steps text only?

STATS = {}   # name -> Statistic, in the order of the page

def stat(title, draw="lines", needs_puzzle=False, **options):
    """A decorator: the function below it is a statistic, which --only calls by the function's name.
    options: keywords of the drawing"""
    def add(measure):
        measure = torch.no_grad()(measure)   # It measures, and nothing learns.
        caption, _, definition = (inspect.getdoc(measure) or title).partition("\n\n")
        STATS[measure.__name__] = Statistic(measure, title, caption, definition, draw, options,
                                            needs_puzzle)
        return measure
    return add

# =========================================================================== what a statistic gets

def in_batches(x, y):
    """Windows x, y (n, T) -> [(idx, targets), ...]. All batches have the same size, so that their
    means can be averaged."""
    size = math.gcd(len(x), 8)
    return list(zip(x.split(size), y.split(size)))

def mean_loss(model, batches, decider=None):
    """Nats per token. decider: says who runs what, in place of the model's own"""
    total = 0.0
    for idx, targets in batches:
        _, loss = model(idx, targets, runner=Runner(model, decider))
        total += loss.item()
    return total / len(batches)

def angles(x, y):
    """Between vectors (..., C), in radians. (Of small angles, the arc cosine loses the digits.)"""
    x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
    return 2 * torch.atan2((x - y).norm(dim=-1), (x + y).norm(dim=-1))

def steps_learned(right, guess):
    """How many steps have been learned: a sum over 1, 2, .. steps. Each counts 1 if all of its
    digits are right, and 0 if no more are right than by guessing.

    right: shares of right digits by steps asked: 0, 1, ..; guess: the share by guessing"""
    return sum(max(0.0, share - guess) / (1 - guess) for share in right[1:])

class Run:
    """A trained model, and validation windows to measure it on"""
    def __init__(self, model, config, windows, puzzle=None, text="", skip_below=0.05):
        """windows: x, y (n, T)"""
        self.model = model             # in eval mode
        self.config = config           # of the run folder
        self.puzzle = puzzle           # None, if it is a run on another text
        self.text = text               # --text
        self.skip_below = skip_below   # --skip_below
        x, y = (part.to(model.device) for part in windows)
        self.batches = in_batches(x, y)
        self.quarter = in_batches(x[::4], y[::4])           # for what is slow
        self.other_quarter = in_batches(x[2::4], y[2::4])   # to choose a fixed set by
        token_bytes = dataset.token_bytes(config["tokenizer"], model.config.vocab_size)
        # Nats per token, and bits per byte of text
        self.loss, self.bits, _ = evaluate(model, *windows, token_bytes, batch_size=8)

    def mean(self, measure, batches=None):
        """The mean over batches of measure(idx), a tensor"""
        batches = batches or self.batches
        return sum(measure(idx) for idx, _ in batches) / len(batches)

    def forward(self, idx, decider=None):
        """-> logits, and who ran each sublayer, bools (2L, B, T)"""
        runner = Runner(self.model, decider)
        logits, _ = self.model(idx, runner=runner)
        return logits, runner.who_ran()

    def watch(self, idx, decider=None):
        """-> the stream before each sublayer and at the end, as vectors (2L + 1, B, T, C), and who
        ran each sublayer, bools (2L, B, T)"""
        runner, streams = Runner(self.model, decider), []
        for _, stream in self.model.walk(idx, runner=runner):
            # A stream may be several tensors. as_tensor makes one of them.
            streams.append(self.model.ends.as_tensor(stream))
        return torch.stack(streams), runner.who_ran()

    def degrees(self, idx, decider=None):
        """The angle by which each sublayer turns the stream: (2L, B, T); 0 where a token skips"""
        streams, _ = self.watch(idx, decider)
        return angles(streams[1:], streams[:-1]).rad2deg()

    def share_that_ran(self, decider, batches=None):
        """-> the share of the tokens that ran each sublayer (2L,)"""
        def share(idx):
            _, ran = self.forward(idx, decider)
            return ran.float().mean((1, 2))
        return self.mean(share, batches)

    @functools.cached_property
    def loss_of_quarter(self):
        return mean_loss(self.model, self.quarter)

    def loss_rise(self, decider):
        """By how much the loss rises if this decider says who runs what, on a quarter of the
        windows"""
        return mean_loss(self.model, self.quarter, decider) - self.loss_of_quarter

    # --- On the steps text: what is right, and so what it has learned

    def by_steps(self, measure):
        """measure(idx, targets) -> values (rows, B, T) of all targets, such as a row a sublayer.
        Returns for each row a list: its means over the digits that are 0, 1, .. steps away from the
        line before.

        Only the second half of a line counts. Digits of the first half depend on few others, so a
        model may have learned them by heart. And the line before must be in the window, or nobody
        can know them."""
        cells = self.puzzle["cells"]
        values, asked = [], []
        for idx, targets in self.batches:
            steps, cell = steps_of_targets(idx, targets, cells)   # of each target, (B, T)
            asked.append(torch.where(cell >= cells // 2, steps, -1))   # -1: It doesn't count.
            values.append(measure(idx, targets).double())
        values, asked = torch.cat(values, 1), torch.cat(asked)
        means = []
        for k in range(self.puzzle["most"] + 1):
            if not (asked == k).any():
                raise NotHere(f"its validation windows have no line that asks for {in_words(k)}; "
                              f"give it more of them, with --windows")
            means.append(values[:, asked == k].mean(1))
        return torch.stack(means, 1).tolist()

    def right_by_steps(self, decider=None):
        """-> the shares of right digits by steps asked: 0, 1, .."""
        def is_right(idx, targets):
            logits, _ = self.forward(idx, decider)
            return (logits.argmax(-1) == targets)[None]
        [right] = self.by_steps(is_right)
        return right

    @functools.cached_property
    def right(self):
        """These shares, of the model as it is"""
        return self.right_by_steps()

    @property
    def guess(self):
        """The share of digits that are right by chance"""
        return 1 / len(self.puzzle["table"])

    @property
    def most_known(self):
        """The most steps up to which digits are known. If there are none, we look at one step."""
        for k, share in enumerate(self.right):
            if share < KNOWN:
                return max(1, k - 1)
        return len(self.right) - 1

    def steps_with(self, decider):
        """How many steps it has learned if this decider says who runs what"""
        return steps_learned(self.right_by_steps(decider), self.guess)

# --- Who runs what

ALL_RUN = Decider()   # All tokens run all sublayers.

def by_gain(run, below):
    """The decider of --mod gain:below=..: a token skips a sublayer that would turn it by less, if
    the residual knows this before (as NAG does). NotHere if not"""
    decider = ByGain(run.model.config, below)
    if why := why_not(decider, run.model.config):
        raise NotHere(why)
    return decider

def skipping(run):
    """-> the decider that says who skips: as in training, or else by --skip_below"""
    if run.model.config.mod != "all":
        return run.model.decider
    return by_gain(run, run.skip_below)

# ================================================================================= the steps text

@stat("The puzzle", draw=None, needs_puzzle=True)
def written(run):
    """After each line of the text comes one with as many digits. The letter says how many steps
    lead there: a 0, b 1, c 2. A step replaces each digit, by a table that also asks for its left
    neighbour. What has the model learned? Here it writes the answers. Wrong digits are red.

    The likeliest digit each time, after this line alone. What is right follows from the table."""
    digits = some_digits(run.puzzle)
    lines = [chr(ord("a") + k) + digits for k in range(run.puzzle["most"] + 1)]
    return {"lines": lines, "answers": answers(run.model, lines, run.puzzle),
            "true": [solve(line, run.puzzle)[-1] for line in lines]}   # its last line

@stat("How many steps it has learned", needs_puzzle=True, x="steps asked for", first_x=0,
      share_y=True)
def right_digits(run):
    """The more steps a model can do, the later its curve falls.

    Here, and wherever figures go by steps, digits in the second half of a line count: the first
    ones depend on few others, and may be learned by heart. And the line before must be in the
    window, or nobody can know them. Steps learned: how far a share is above guessing (1 / symbols),
    summed over 1, 2, .. steps."""
    guessing = [run.guess] * len(run.right)
    panels = {"share of right digits": {"measured": run.right, "guessing": guessing}}
    return panels, f"{steps_learned(run.right, run.guess):.1f} steps learned."

@stat("The lines inside, which nobody wrote", draw="lines_inside", needs_puzzle=True)
def lines_inside(run):
    """The text never has the lines between a line and its answer. A linear probe looks for their
    digits in the stream. Choose a line, and see the furthest digits that it reads after each block.
    The figure shows which share it reads: on the left where the line stands, on the right where the
    answer is predicted. Without its left neighbour, there are two digits to choose from: .5.

    Ridge regression from unit(stream after a block) to the digit in this cell after 0, 1, .. steps;
    share of right digits on other windows. Digits of a line are shown if this share is at least .9.
    Lines ask for the most steps of which the model gets 90 % right. Our tests check that the probe
    reads no such line in an untrained model, nor shuffled digits."""
    k = run.most_known
    # Inside fits the probes. That takes many windows, whatever --windows says.
    windows = dataset.windows_of(run.config["data"], "val", run.model.config.block_size, WINDOWS)
    inside = Inside(run.model, run.puzzle, windows, k)
    idx, targets = run.batches[0]
    _, _, in_text = find_lines(idx.cpu(), targets.cpu(), k, run.puzzle)   # digits (N, cells)
    letter = chr(ord("a") + k)
    examples = [some_digits(run.puzzle)] + [spelled(digits) for digits in in_text[:4]]
    found = dict(asked=k, line=inside.share_by_block("line"),
                 answer=inside.share_by_block("answer"),
                 examples=[inside.example(letter + digits) for digits in examples])
    furthest = [inside.furthest(block) for block in range(inside.n_runs + 1)]
    steps = ["none" if each is None else str(each[0]) for each in furthest]
    return found, f"After block 0, 1, .. a probe reads up to step {', '.join(steps)}, of {k}."

@stat("Which block fetches the line", needs_puzzle=True, x="patched after block",
      y="share of the digits", share_y=True)
def patched(run):
    """After one block, the stream of another line takes the place of this one's. Whose answer comes
    out? At some block, the answer stops needing the place where the line stands.

    400 lines of random digits, alone in their windows, that ask for as many steps as in the figure
    above, and the second half of their answers. Chance is 1 / symbols. After an early patch, the
    line belongs to one answer, and the digits so far to the other: so neither comes out whole, but
    one share is above chance."""
    found = patch(run.model, run.puzzle, run.most_known)
    panels = {"where the line stands": found["line"],
              "where the answer is predicted": found["answer"]}
    own = found["line"]["its own answer"]   # its share, if patched after block 1, 2, ..
    if own[-1] < KNOWN:
        return panels, "It doesn't know these answers, so a patch shows nothing."
    block = next(block for block, share in enumerate(own, 1) if share >= 0.95 * own[-1])
    sentence = (f"Block {block} fetches the line. After it, the answer no longer needs the line's "
                f"place.")
    return panels, sentence

@stat("What breaks without a block", draw="heat", needs_puzzle=True, x="steps asked for", first_x=0,
      y="block left out (0: none)", first_y=0, label="share of right digits", share=True)
def removal_by_steps(run):
    """Right digits without one block. The lowest row is the whole model. If another row is as
    bright, the model hardly needs that block.

    The stream passes a removed block unchanged; nothing is trained after it."""
    rows = [run.right]
    for block in range(len(run.model.blocks)):
        without = Without(places_of(run.model, block), run.model.decider)
        rows.append(run.right_by_steps(without))
    most = run.most_known
    if run.right[most] < KNOWN:
        return rows, "It knows no step, so nothing can be missed."
    block = min(range(1, len(rows)), key=lambda block: rows[block][most])
    sentence = (f"Block {block} is missed most. Without it, {rows[block][most]:.0%} of the digits "
                f"after {in_words(most)} are right.")
    return rows, sentence

@stat("What turns, and for whom", draw="heat", needs_puzzle=True, x="steps asked for", first_x=0,
      y="sublayer", label="mean angle (degrees)")
def gain_by_steps(run):
    """How far each sublayer turns the stream, by the steps that the line asks for (0: a copy). A
    row of one colour treats all digits alike. Pale on the left and dark on the right: it works for
    those who need it. On the far right may stand what the model has not learned.

    Mean angle between the stream before and after, where the digit is predicted; 0 if it skips."""
    rows = run.by_steps(lambda idx, targets: run.degrees(idx))
    most = run.most_known
    more = {place: row[most] - row[0] for place, row in enumerate(rows, 1)}
    place = max(more, key=more.get)
    sentence = (f"Sublayer {place} turns digits after {in_words(most)} by {more[place]:.0f} "
                f"degrees more than copies.")
    return rows, sentence

@stat("Who skips", needs_puzzle=True, x="steps asked for", first_x=0)
def who_skips(run):
    """Whether a digit that needs less depth gets less. A level line: all digits skip alike.

    A token skips what would turn it by less than --skip_below, or as it was trained. Counted where
    the digit is predicted."""
    decider = skipping(run)
    if decider.changes_stream():
        raise NotHere(f"--mod {run.model.config.mod} changes the stream, too, as a router scales what "
                      f"its block adds: without it, this is another model")
    def ran_and_right(idx, targets):
        logits, ran = run.forward(idx, decider)
        is_right = logits.argmax(-1) == targets
        return torch.stack((ran.float().sum(0), is_right.float()))
    n_run, right = run.by_steps(ran_and_right)   # n_run: how many sublayers a digit runs
    if_all_run = run.right_by_steps(ALL_RUN)
    panels = {"sublayers that run for a digit": {"as it skips": n_run},
              "share of right digits": {"as it skips": right, "if all run": if_all_run}}
    most = run.most_known
    sentence = (f"A copied digit runs {n_run[0]:.1f} sublayers, and one after {in_words(most)} "
                f"{n_run[most]:.1f}.")
    return panels, sentence

# ======================================================================================= any text

def coins(shares):
    """-> a decider that tosses a coin for each token. shares (2L,): that of the tokens which is to
    run each sublayer"""
    def decide(runner):
        # runner.shape is (B, T), and runner.place that of the sublayer that comes next, from 1.
        return torch.rand(runner.shape, device=runner.model.device) < shares[runner.place - 1]
    return ByFunction(decide)

BELOW = 0.0, 0.02, 0.05, 0.1, 0.2, 0.4   # gains; below 0.0 nobody skips

def ways_to_skip(run, batches):
    """-> {name of a line: [(share of the sublayer runs that is skipped, decider), ...]}. The shares
    are those in these batches."""
    # The fixed set is chosen by a quarter of the windows on which no loss is measured. (Steps are
    # measured on all windows.)
    turned = run.mean(lambda idx: run.degrees(idx, ALL_RUN).mean((1, 2)), run.other_quarter)
    weakest_first = (turned.argsort() + 1).tolist()   # places of sublayers
    ways = {"by gain": [], "a fixed set": [], "coins": []}
    for below in BELOW:
        decider = by_gain(run, below)
        shares = run.share_that_ran(decider, batches)
        skipped = 1 - shares.mean().item()
        ways["by gain"].append((skipped, decider))
        ways["coins"].append((skipped, coins(shares)))
        n_removed = round(skipped * len(shares))
        if n_removed > 0:
            fixed_set = Without(weakest_first[:n_removed], ALL_RUN)
            ways["a fixed set"].append((n_removed / len(shares), fixed_set))
    if run.model.config.mod != "all":
        skipped = 1 - run.share_that_ran(run.model.decider, batches).mean().item()
        ways["as trained"] = [(skipped, run.model.decider)]
    return ways

@stat("What skipping costs", x="share of the sublayer runs skipped", share_x=True)
def skip_curve(run):
    """Tokens skip what would turn them by less than 0.02, 0.05, 0.1, 0.2, 0.4. Where a line stays
    level, skipping costs nothing. Two controls skip as much: coins, and a fixed set of sublayers,
    which is as near as whole sublayers can be.

    Fixed set: the sublayers that turn least, for all tokens; left out where it would be empty.
    Coins: each sublayer is skipped by as many tokens as by gain, on average, but by random ones. As
    trained: as the model skipped in training. It was trained for none of the others."""
    if run.puzzle:
        what, batches, measure = "steps learned", run.batches, run.steps_with
    else:
        what, batches, measure = "rise of the loss (nats)", run.quarter, run.loss_rise
    lines = {}
    for name, points in ways_to_skip(run, batches).items():
        lines[name] = [[skipped, measure(decider)] for skipped, decider in points]
    at = BELOW.index(0.1)
    (_, if_all_run), (skipped, by_gains) = lines["by gain"][0], lines["by gain"][at]
    by_coins = lines["coins"][at][1]
    sentence = (f"Below 0.1 (6 degrees), {skipped:.0%} of the sublayer runs are skipped. "
                f"{what.capitalize()}: {by_gains:.2f}; with coins {by_coins:.2f}; if all run "
                f"{if_all_run:.2f}.")
    return {what: lines}, sentence

A_TEXT = 'def add(a, b):\n    """The sum of two numbers"""\n    return a + b\n'

@stat("What each sublayer turns for each token", draw="depth_map")
def depth_map(run):
    """Dark: the sublayer turns the stream of this token much. Grey: the token skips it.

    The angle between the stream before and after. Who skips: who would turn by less than
    --skip_below, or as it was trained; without gains, nobody. The text is --text, or a short
    function. Source: NAG, arXiv:2606.16112, appendix A."""
    if run.puzzle and not run.text:
        raise NotHere("on the steps text, the figures by steps say more; --text makes a map")
    encoding = dataset.get_tokenizer(run.config["tokenizer"])
    tokens = encoding.encode_ordinary(run.text[:10_000] or A_TEXT)
    tokens = tokens[:run.model.config.block_size]
    try:
        decider = skipping(run)
    except NotHere:
        decider = ALL_RUN
    idx = torch.tensor([tokens], device=run.model.device)
    streams, ran = run.watch(idx, decider)
    degrees = angles(streams[1:], streams[:-1]).rad2deg()[:, 0]
    degrees[~ran[:, 0]] = math.nan
    decoder = codecs.getincrementaldecoder("utf-8")("replace")   # A character may be many tokens.
    parts = [decoder.decode(encoding.decode_single_token_bytes(token)) for token in tokens]
    return dict(tokens=parts, degrees=degrees)

def by_kind(values):
    """A value per sublayer -> a line of attentions and one of MLPs, with a value per block"""
    return {"attention": values[::2], "MLP": values[1::2]}

@stat("How the stream turns, and how long it gets", x="block")
def turning(run):
    """How far each sublayer turns the stream, and how long the stream is. If it gets longer, so
    that later blocks turn it less, that is PreNorm dilution.

    Means over tokens of the angle between the stream before and after, and of |x| / sqrt(C) at the
    start (0) and after each block. NAG's gain is the tangent of the angle: 0.05 is 3 degrees.
    Sources: arXiv:2505.13898; NAG, arXiv:2606.16112, figure 3."""
    turned = run.mean(lambda idx: run.degrees(idx).mean((1, 2)))
    def lengths_of(idx):
        streams, _ = run.watch(idx)
        return streams[::2].square().mean(-1).sqrt().mean((1, 2))   # A block is two sublayers.
    lengths = run.mean(lengths_of).tolist()
    by_block = [[block, length] for block, length in enumerate(lengths)]   # 0: at the start
    panels = {"turned by (degrees)": by_kind(turned),
              "length of the stream": {"stream": by_block}}
    longer = lengths[-1] / lengths[0]
    return panels, f"At the end, the stream is {longer:.1f} times as long as at its start."

@stat("What the head can read after each block", x="blocks run", first_x=0)
def logit_lens(run):
    """The loss if the head read the stream after each block. Where it is high, the head can't read
    yet. But it was trained to read the last block, so something else may be there.

    Final norm and head, applied to the stream after each block (0: to the embedding). Source: the
    logit lens, as in arXiv:2505.13898."""
    losses = torch.zeros(len(run.model.order) + 1)
    for idx, targets in run.batches:
        for i, stream in enumerate(after_blocks(run.model, idx)):
            loss = F.cross_entropy(run.model.head(stream).flatten(0, 1), targets.flatten())
            losses[i] += loss.item() / len(run.batches)
    panels = {"loss (nats per token)": {"after each block": losses}}
    block = next(block for block, loss in enumerate(losses) if loss <= losses[-1] + 0.1)
    return panels, f"After block {block}, the head reads as well as at the end, to 0.1 nats."

@stat("What a sublayer is worth", x="block", y="loss increase (nats)", asinh=True)
def removal(run):
    """How much the loss rises without one sublayer, or without a whole block; near 0: it could go.

    The stream passes what is removed unchanged. What --repeat runs several times is removed
    wherever it runs. Nothing is trained after it. Sources: LLM-Drop, arXiv:2406.15786;
    arXiv:2505.13898."""
    def worth(places):
        return run.loss_rise(Without(places, run.model.decider))
    blocks = [places_of(run.model, block) for block in range(len(run.model.blocks))]
    of_blocks = [worth(places) for places in blocks]
    panels = {"without one sublayer": {"attention": [worth(places[::2]) for places in blocks],
                                       "MLP": [worth(places[1::2]) for places in blocks]},
              "without the block": {"block": of_blocks}}
    most = max(of_blocks)
    return panels, f"Block {of_blocks.index(most) + 1} is worth most, {most:.2f} nats."

# ============================================================================ from runs to a page

@dataclass
class AnalyzeConfig:
    runs: list = flag(None, "run folders")
    out: str = flag("figures", "folder of the page, the figures and the numbers")
    only: str = flag("", "some statistics, such as removal,skip_curve; without it all of them")
    text: str = flag("", "a text, or a file with one, for the map of tokens and sublayers")
    skip_below: float = flag(0.05, "a token skips a sublayer that would turn its stream by less (a "
                             "gain), if the run was not trained to skip", 0, 100)
    windows: int = flag(0, "validation windows; 0: as many as in training", 0, 1e6)
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "auto: cuda where there is one")

def main(argv=None):
    if "--list" in (argv or sys.argv):   # needs no runs
        print("\n".join(f"{name:18}{statistic.title}" for name, statistic in STATS.items()))
        return
    [args] = parse((AnalyzeConfig,), argv, __doc__, positional=("runs",))
    wanted = args.only.split(",") if args.only else list(STATS)
    for name in wanted:
        if name not in STATS:
            refuse(f"--only {name}: no such statistic; choose from {', '.join(STATS)}")
    runs = open_runs(args)
    out = Path(args.out)
    make_folder(out)   # now, not after minutes of measuring
    import draw   # here, because it loads matplotlib, and who only measures needs none
    found = measure_all(runs, wanted)
    draw.write_page(out, runs, STATS, found)
    say(f"{out}/index.html shows {', '.join(runs)}; open it in a browser")

def open_runs(args):
    """-> {name: Run}, where the name is the folder's, or its whole path if two have the same"""
    device = pick_device(args.device)
    text = text_or_file(args.text)
    names = [Path(path).resolve().name for path in args.runs]
    runs = {}
    for path, name in zip(args.runs, names):
        model, config = open_run(path, device)
        set_threads(model.config.n_embd, device)
        data = config["data"]
        n = max(4, args.windows or config["eval_windows"])   # four, because some measure a quarter
        windows = dataset.windows_of(data, "val", config["block_size"], n)
        puzzle = dataset.load_meta(data).get("steps")
        run = Run(model, config, windows, puzzle, text, args.skip_below)
        if not math.isfinite(run.loss):
            refuse(f"{path}: its loss is {run.loss}, so there is nothing to see; train it with a "
                   f"lower --lr")
        runs[printable(name if names.count(name) == 1 else path)] = run
    return runs

def make_folder(out):
    """SystemExit if that can't be, or if it has files, but no page of ours"""
    page = out / "index.html"
    with explain_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        is_ours = page.exists() and 'id="report"' in page.read_text(errors="replace")
        if any(out.iterdir()) and not is_ours:
            refuse(f"--out {out}: has files, but no page of ours; take another folder")

def measure_all(runs, wanted):
    """-> {statistic: what it says of the runs}, in the order of the page. That is a dict:

    results     {run: what is drawn}, as in numbers.json
    sentences   {run: a sentence}
    missing     {run: why it can't have it}"""
    found = {name: dict(results={}, sentences={}, missing={}) for name in STATS if name in wanted}
    for run_name, run in runs.items():
        for name, of_runs in found.items():
            print(f"{run_name}: measuring {name}", file=sys.stderr)
            torch.manual_seed(0)   # Coins fall the same, whatever else is measured.
            try:
                result, sentence = measured(STATS[name], run)
            except NotHere as why:
                print(f"{run_name}: no {name}, because {why}", file=sys.stderr)
                of_runs["missing"][run_name] = str(why)
                continue
            of_runs["results"][run_name] = as_json(result)
            if sentence:
                of_runs["sentences"][run_name] = sentence
    return found

def measured(statistic, run):
    """-> what is drawn, and the sentence, or None if there is none. NotHere says why this run can't
    have it."""
    if statistic.needs_puzzle and not run.puzzle:
        raise NotHere("it is for the steps text (prepare.py steps), whose depth is known")
    returned = statistic.measure(run)
    drawn, sentence = returned if isinstance(returned, tuple) else (returned, None)
    panels = list(drawn.values()) if isinstance(drawn, dict) else [drawn]
    if statistic.draw == "lines" and not all(isinstance(panel, dict) for panel in panels):
        raise NotHere("lines are drawn of {panel: {name: line}}, and it returned something else")
    return drawn, sentence

def as_json(value):
    """As numbers.json has it: lists for tensors, and None for what is no number"""
    if torch.is_tensor(value):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: as_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

if __name__ == "__main__":
    start(main)
