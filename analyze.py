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
# The parts of this file: what a statistic is (1), the Run that it gets (2), lines and answers of
# the steps text (3), the statistics of the steps text (4) and of any text (5), the drawings (6),
# the page and the command (7). Its words:
#
#     L         how many blocks run; one that --repeat runs twice counts twice
#     place     the number of a sublayer, from 1 to 2L
#     Runner    runs the sublayers of one pass, and notes which tokens ran which
#     decider   says which tokens run a sublayer; the others skip it. From model.py, part 3:
#               Decider(None)             all tokens run all sublayers
#               ByGain(config, below)     a token skips where its gain is lower than that
#               Without(places, decider)  nobody runs these; of the others, that decider decides
#               (places_of(model, block) are those of a block: attention, MLP)
#     gain      the tangent of the angle by which a token's stream is turned: 0.05 is 3 degrees
#
# On the steps text, a line asks for the digits after some steps, and the next line has them: so it
# is the answer, and asks in its turn. Its words:
#
#     puzzle    what meta.json says of it: its table of a step, how many cells, the most steps
#     cell      a digit's place in its line, 0, 1, ..; `cells` is how many a line has
#     asked     how many steps lead to an answer, as the letter of the line before says
#     known     at least 90 % of the digits are right
import base64
import codecs
import functools
import inspect
import io
import itertools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

import prepare
from flags import flag, parse, refuse, start
from model import (GPT, ByFunction, ByGain, Decider, Runner, Without, flops_per_token, num_params,
                   places_of, unit, why_not)
from train import data_of_run, evaluate, open_run, read_metrics, say

# ===================================================================== part 1: what a statistic is

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
# of numbers, here one for each sublayer, or of pairs [x, y]. With draw="heat", numbers are shown as
# colours: {panel: matrix}. Part 6 has all drawings, and their keywords, such as x.

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

class NotHere(Exception):
    """One sentence: why a run can't have what was asked for"""

# ============================================================ part 2: the Run that a statistic gets

def in_batches(x, y):
    """Windows x, y (n, T) -> [(idx, targets), ...]: eight windows each; the last may have fewer"""
    return list(zip(x.split(8), y.split(8)))

def mean_over(batches, of_batch):
    """of_batch(idx, targets) -> a number or a tensor, the mean over these windows. Returns the mean
    over all windows of the batches."""
    total = sum(len(idx) * of_batch(idx, targets) for idx, targets in batches)
    return total / sum(len(idx) for idx, _ in batches)

def mean_loss(model, batches, decider=None):
    """Nats per token. decider: says who runs what, in place of the model's own"""
    def loss_of(idx, targets):
        _, loss = model(idx, targets, runner=Runner(model, decider))
        return loss.item()
    return mean_over(batches, loss_of)

def after_blocks(model, idx):
    """-> L + 1 streams: that of the embedding, and that after each block, which is two sublayers"""
    return model.walk(idx)[::2]

def angles(x, y):
    """Between vectors (..., C), in radians. (Of small angles, the arc cosine loses the digits.)"""
    x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
    return 2 * torch.atan2((x - y).norm(dim=-1), (x + y).norm(dim=-1))

def once(measure):
    """A decorator: makes a property of a Run, measured once, when a statistic first asks for it"""
    def measure_apart(run):
        # With --mod coins, it tosses coins. We give it its own, from seed 0, and then put torch's
        # generators back. So a statistic tosses the same ones, whether it was the first to ask or
        # not.
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(0)
            return measure(run)
    return functools.cached_property(measure_apart)

KNOWN = 0.9   # From this share of right digits on, a model knows them, or a probe can read them.

def steps_learned(right, guess):
    """How many steps of the puzzle have been learned: a sum over 1, 2, .. steps. Each counts 1 if
    all of its digits are right, and 0 if no more are right than by guessing.

    right: shares of right digits by steps asked: 0, 1, ..; guess: the share by guessing"""
    return sum(max(0.0, share - guess) / (1 - guess) for share in right[1:])

@dataclass
class Run:
    """A trained model, and validation windows to measure it on"""
    model: GPT                   # in eval mode
    config: dict                 # of the run folder
    windows: tuple               # x, y (n, T)
    puzzle: dict | None = None   # None, if it is a run on another text
    text: str = ""               # --text
    skip_below: float = 0.05     # --skip_below
    folder: str | None = None    # of the run; None: nobody knows what was logged
    warning: str = ""            # a sentence, if its data have changed since

    def __post_init__(self):
        x, y = (part.to(self.model.device) for part in self.windows)
        self.batches = in_batches(x, y)
        self.quarter = in_batches(x[::4], y[::4])           # for what is slow
        self.other_quarter = in_batches(x[2::4], y[2::4])   # to choose a fixed set by
        token_bytes = prepare.token_bytes(self.config["tokenizer"], self.model.config.vocab_size)
        # Nats per token, and bits per byte of text
        self.loss, self.bits, _ = evaluate(self.model, *self.windows, token_bytes, batch_size=8)

    def mean(self, of_idx, batches=None):
        """of_idx(idx) -> a tensor, the mean over these windows. Returns that over all windows."""
        return mean_over(batches or self.batches, lambda idx, targets: of_idx(idx))

    def forward(self, idx, decider=None):
        """-> logits, and who ran each sublayer, bools (2L, B, T)"""
        runner = Runner(self.model, decider)
        logits, _ = self.model(idx, runner=runner)
        return logits, runner.who_ran()

    def watch(self, idx, decider=None):
        """-> the stream before each sublayer and at the end, as vectors (2L + 1, B, T, C), and who
        ran each sublayer, bools (2L, B, T)"""
        runner = Runner(self.model, decider)
        streams = self.model.walk(idx, runner)
        # A stream may be several tensors. as_tensor makes one of them.
        vectors = [self.model.ends.as_tensor(stream) for stream in streams]
        return torch.stack(vectors), runner.who_ran()

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

    @once
    def loss_of_quarter(self):
        return mean_loss(self.model, self.quarter)

    def loss_rise(self, decider):
        """By how much the loss rises if this decider says who runs what, on a quarter of the
        windows"""
        return mean_loss(self.model, self.quarter, decider) - self.loss_of_quarter

    @once
    def worth(self):
        """-> a list: by how much the loss rises without block 1, 2, .."""
        return [self.loss_rise(without(self, [block])) for block in range(len(self.model.blocks))]

    # --- On the steps text (part 3): what is right, and so what it has learned

    def by_steps(self, of_targets):
        """of_targets(idx, targets) -> values (rows, B, T) of all targets, such as a row a sublayer.
        Returns for each row a list: its means over the digits to which 0, 1, .. steps lead.

        Only the second half of a line counts. Digits of the first half depend on few others, so a
        model may have learned them by heart."""
        cells = self.puzzle["cells"]
        values, asked = [], []
        for idx, targets in self.batches:
            batch_values = of_targets(idx, targets).double()
            window, column, steps = find_answers(idx, cells)
            for cell in range(cells // 2, cells):
                inside = column + cell < idx.shape[1]   # An answer's end may lie beyond its window.
                values.append(batch_values[:, window[inside], column[inside] + cell])
                asked.append(steps[inside])
        values, asked = torch.cat(values, 1), torch.cat(asked)
        means = []
        for k in range(self.puzzle["most"] + 1):
            if not (asked == k).any():
                # If none can fit, this says so instead.
                check_length(self.model.config.block_size, cells)
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

    @once
    def right(self):
        """These shares, of the model as it is"""
        return self.right_by_steps()

    @property
    def guess(self):
        """The share of digits that are right by chance"""
        return 1 / len(self.puzzle["table"])

    @property
    def most_known(self):
        """The most steps up to which digits are known. 0: it knows no step, and copies at best"""
        for k, share in enumerate(self.right):
            if share < KNOWN:
                return max(0, k - 1)
        return len(self.right) - 1

    @property
    def k(self):
        """The most steps that it knows, or one if it knows none: what a closer look asks for"""
        return max(1, self.most_known)

    def steps_with(self, decider):
        """How many steps it has learned if this decider says who runs what"""
        return steps_learned(self.right_by_steps(decider), self.guess)

# ------------------------------------------------------------------------------------ who runs what

ALL_RUN = Decider(None)   # All tokens run all sublayers.

def by_gain(run, below):
    """The decider of --mod gain:below=..: a token skips a sublayer that would turn it by less, if
    the residual knows this before (as NAG does). NotHere if not"""
    decider = ByGain(run.model.config, below)
    if why := why_not(decider, run.model.config):
        raise NotHere(why)
    return decider

def without(run, blocks):
    """-> the decider that removes these blocks, from 0. Who skips the others: as in training"""
    places = {place for block in blocks for place in places_of(run.model, block)}
    return Without(places, run.model.decider)

def skipping(run):
    """-> the decider that says who skips: as in training, or else by --skip_below"""
    if run.model.config.mod != "all":
        return run.model.decider
    return by_gain(run, run.skip_below)

# ===================================================== part 3: lines and answers of the steps text

# What a step is, and its table, is on prepare.py's page, part 5. A step may make 5877 of 3141, and
# 1085 of 5877. So c3141, which asks for two steps, is answered by 1085.

def in_words(n):
    """2 -> two steps"""
    words = "no one two three four five six seven eight nine ten".split()
    return f"{words[n] if n < len(words) else n} step{'s' * (n != 1)}"

# ------------------------------------------------------------------------------------- in a window

# A window is a row of T tokens, idx, and of their targets: each token is to predict the next one.
# A token's place in its window is its column. If lines had four digits only, c3141 and its answer
# would stand like this:
#
#     column      0  1  2  3  4  5  6  7  8  9 10
#     token       c  3  1  4  1  ↵  a  1  0  8  5
#     "line"         0  1  2  3                      cells, where the line's digits stand
#     "answer"                      0  1  2  3       cells, where the answer's are predicted
#
# So the answer's cell 0 is predicted where its letter is.

def line_length(cells):
    """How many columns a line takes: its letter, its digits, its newline"""
    return 1 + cells + 1

def find_answers(idx, cells):
    """Windows idx (n, T) -> all N answers in them. (The whole line before is in the window, too, or
    nobody could know them.) Their ends may lie beyond it. Returns three tensors (N,):

    window, column   the answer's letter is idx[window, column]
    asked            how many steps lead to it, as the letter of the line before says"""
    is_letter = (idx >= ord("a")) & (idx <= ord("z"))
    # The first line of a document is no answer. In front of it stands a 256, and no newline.
    after_newline = idx.roll(1, dims=1) == ord("\n")   # Each column gets the token left of it.
    is_answer = is_letter & after_newline
    # There the line before is not all in the window. (And column 0 got the window's last token.)
    is_answer[:, :line_length(cells)] = False
    window, column = is_answer.nonzero().T
    asked = idx[window, column - line_length(cells)] - ord("a")
    return window, column, asked

def columns_of(column, cells):
    """Where is each cell? column (N,): those of the answers' letters. Returns columns (N, cells):
    {"line": .., "answer": ..}, as in the picture"""
    answer = column[:, None] + torch.arange(cells, device=column.device)
    # A line's digit stands one line before the answer's, which is predicted a column earlier.
    return {"line": answer - line_length(cells) + 1, "answer": answer}

def find_lines(idx, k, cells):
    """All N lines that ask for k steps, and whose whole answer is in the window. (Its last digit
    may be the last target.) Returns three tensors:

    window, column (N,)   the answer's letter is idx[window, column]
    digits (N, cells)     those of the line"""
    window, column, asked = find_answers(idx, cells)
    chosen = (asked == k) & (column + cells <= idx.shape[1])
    window, column = window[chosen], column[chosen]
    tokens = idx[window[:, None], columns_of(column, cells)["line"]]
    return window, column, tokens - ord("0")

def check_length(T, cells):
    """NotHere if a line and its answer are too long for a window"""
    if line_length(cells) + cells > T:
        raise NotHere("a line and its answer don't fit into its --block_size")

# ------------------------------------------------------------------ a line to type, and its answer

def some_digits(puzzle):
    """For a line: those of pi, the first sixteen again and again. (With 6 symbols, 9 becomes 3.)"""
    of_pi = ("3141592653589793" * 7)[:puzzle["cells"]]
    return "".join(str(int(digit) % len(puzzle["table"])) for digit in of_pi)

def lines_after(digits, steps, table):
    """digits (..., cells) -> a tensor (steps + 1, ..., cells): the digits after 0, 1, .. steps"""
    lines = [torch.as_tensor(digits)]
    for _ in range(steps):
        lines.append(prepare.next_line(lines[-1], table))
    return torch.stack(lines)

def solve(line, puzzle):
    """b314159265358 -> ["314159265358", "587723131420"], its digits after no step and after one. As
    many as it asks for: so the last of them is the right answer."""
    steps, digits = ord(line[0]) - ord("a"), [int(digit) for digit in line[1:]]
    return [spelled(each) for each in lines_after(digits, steps, puzzle["table"])]

def answers(model, lines, puzzle):
    """-> tokens (lines, cells): what a model answers to each line, the likeliest each time. (We
    write the answer's letter, because the text draws it at random.)"""
    idx = torch.stack([tokens_of(f"{line}\na") for line in lines]).to(model.device)
    return model.generate(idx, puzzle["cells"], temperature=0)[:, idx.shape[1]:].cpu()

def tokens_of(text):
    """A token is a byte. "a0" -> tensor([97, 48])"""
    return torch.tensor(list(text.encode()))

def spelled(digits):
    """A tensor of digits -> a text. What is no digit becomes a question mark."""
    return "".join(str(digit) if 0 <= digit <= 9 else "?" for digit in digits.tolist())

# ============================================================= part 4: statistics of the steps text

# -------------------------------------------------------------------- what it answers, and how well

@stat("The puzzle", draw=None, needs_puzzle=True)
def written(run):
    """After each line of the text comes one with as many digits. The letter says how many steps
    lead there: a 0, b 1, c 2. A step replaces each digit, by a table that also asks for its left
    neighbour. What has the model learned? Here it writes the answers. Wrong digits are red.

    The likeliest digit each time, after this line alone. What is right follows from the table."""
    digits = some_digits(run.puzzle)
    lines = [chr(ord("a") + k) + digits for k in range(run.puzzle["most"] + 1)]
    found = answers(run.model, lines, run.puzzle)
    return {"lines": lines, "answers": [spelled(tokens - ord("0")) for tokens in found],
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

# --------------------------------------------------------------------------------- the lines inside

# A line that asks for two steps, such as c3141, has a line between it and its answer, which the
# text never shows. Is it inside of the model? A probe looks for it, in a model that is trained. It
# is a linear map from the stream of one token, after a block, to a digit. Cell 0 of c3141 is a 3
# after no step, a 5 after one, which nobody wrote, and a 1 after two. We look for all three in two
# places: where the line's 3 stands, and where the answer's 1 is predicted. The words, besides those
# of part 3:
#
#     k        how many steps a line asks for; `steps` counts from 0 to k
#     where    "line" or "answer": in which columns we look (there is a picture in part 3)
#     block    after which block we look; 0: at the embedding. Each run of one counts (--repeat).
#     vector   what a probe reads: the stream of one token, divided by its rms
#     share    which part of some digits is right, from 0 to 1
#     true     the right digits, by the table (`answer` is what the model says)

WINDOWS = 1024   # of validation text: half of them to fit probes, half to see what these read

class Probes:
    """For each number of steps a linear map, from a vector to a score for each symbol. The symbol
    with the highest score is what it reads."""
    def __init__(self, vectors, digits, symbols):
        """Fits them. vectors (N, C); digits (N, k + 1): those that they should read there, after 0,
        1, .. k steps, from 0 to symbols - 1"""
        inputs = with_one(vectors)
        # The scores that these maps should give. Its columns: the symbols after 0 steps, then those
        # after 1, .. k. The right symbols have a 1, and the others a 0.
        wanted = F.one_hot(digits, symbols).double().flatten(1)   # (N, (k + 1) * symbols)
        # Ridge regression: |inputs @ weights - wanted|² + |weights|² shall be as small as can be.
        # There its gradient is 0. That is a linear system for each column, with the same left side,
        # so one call solves them all.
        system = inputs.T @ inputs + torch.eye(inputs.shape[1])
        self.weights = torch.linalg.solve(system, inputs.T @ wanted)   # (C + 1, (k + 1) * symbols)
        self.symbols = symbols

    def read(self, vectors):
        """vectors (N, C) -> digits (N, k + 1)"""
        scores = with_one(vectors) @ self.weights
        return scores.unflatten(1, (-1, self.symbols)).argmax(-1)

def with_one(vectors):
    """(N, C) -> (N, C + 1). The 1 is for the constant of the map."""
    return F.pad(vectors.double(), (0, 1), value=1.0)

@torch.no_grad()
def vectors_and_digits(model, puzzle, windows, k):
    """Of all N cells of the lines in windows (n, T) that ask for k steps. Returns two things:

    vectors   {(where, block): (N, C)}, on the CPU, wherever the model is
    digits    (N, k + 1): those of these cells after 0, 1, .. k steps"""
    vectors, digits = {}, []   # lists of parts, of 64 windows each
    for idx in windows.split(64):
        window, column, of_lines = find_lines(idx, k, puzzle["cells"])
        columns = columns_of(column, puzzle["cells"])
        for block, stream in enumerate(after_blocks(model, idx.to(model.device))):
            of_tokens = unit(model.ends.as_tensor(stream)).cpu()            # (64, T, C)
            for where in columns:
                of_cells = of_tokens[window[:, None], columns[where]]       # (lines, cells, C)
                vectors.setdefault((where, block), []).append(of_cells.flatten(0, 1))
        of_steps = lines_after(of_lines, k, puzzle["table"])                # (k + 1, lines, cells)
        digits.append(of_steps.flatten(1).T)
    return {key: torch.cat(parts) for key, parts in vectors.items()}, torch.cat(digits)

class Inside:
    """What probes read of lines that ask for k steps

    probes[where, block]          fitted to one half of the windows
    share[where, block][steps]    of the digits in the other half, as they read them"""
    def __init__(self, model, puzzle, windows, k):
        """windows (n, T): tokens of validation text. NotHere if they have too few such lines"""
        check_length(windows.shape[1], puzzle["cells"])
        self.model, self.puzzle, self.k = model, puzzle, k
        self.blocks = range(len(model.order) + 1)
        self.probes, self.share = {}, {}
        half = len(windows) // 2
        vectors, digits = vectors_and_digits(model, puzzle, windows[:half], k)
        other_vectors, other_digits = vectors_and_digits(model, puzzle, windows[half:], k)
        if min(len(digits), len(other_digits)) < 200:
            raise NotHere(f"its validation text has too few lines that ask for {in_words(k)}: "
                          f"fewer than 200 digits")
        for key in vectors:   # Each is (where, block).
            self.probes[key] = Probes(vectors[key], digits, symbols=len(puzzle["table"]))
            is_right = self.probes[key].read(other_vectors[key]) == other_digits
            self.share[key] = is_right.double().mean(0).tolist()

    def share_by_block(self, where):
        """-> for each block, from 0 on, the list of the shares after 0, 1, .. k steps"""
        return [self.share[where, block] for block in self.blocks]

    def furthest(self, block):
        """-> (steps, where) of the furthest digits that can be read after a block, or None"""
        for steps in range(self.k, -1, -1):
            for where in "answer", "line":   # If both have them: in the answer they are of use.
                if self.share[where, block][steps] >= KNOWN:
                    return steps, where
        return None

    def example(self, line):
        """What can be read while the model answers a line that asks for k steps -> a dict, such as

            dict(line="c3141", answer="1085", true="1085", blocks=[row, row, ..])

        blocks: for each block, from 0 on, None if nothing can be read, or the furthest digits, as

            dict(steps=1, where="line", share=0.99, digits="5877", true="5877")

        share: how often these probes are right, on other lines; digits: what they read here"""
        [answer] = answers(self.model, [line], self.puzzle)
        # Here the line is the only one of its window. The answer's last digit predicts no cell.
        idx = torch.cat([tokens_of(f"{line}\na"), answer[:-1]])[None]
        vectors, digits = vectors_and_digits(self.model, self.puzzle, idx, self.k)
        rows = []
        for block in self.blocks:
            row, furthest = None, self.furthest(block)
            if furthest:
                steps, where = furthest
                read = self.probes[where, block].read(vectors[where, block])
                row = dict(steps=steps, where=where, share=self.share[where, block][steps],
                           digits=spelled(read[:, steps]), true=spelled(digits[:, steps]))
            rows.append(row)
        return dict(line=line, answer=spelled(answer - ord("0")), true=spelled(digits[:, self.k]),
                    blocks=rows)

@stat("The lines inside, which nobody wrote", draw="probes", needs_puzzle=True,
      x="the line after so many steps", first_x=0, y="blocks run", first_y=0,
      label="share of digits read", share=True)
def lines_inside(run):
    """The text never has the lines between a line and its answer. A linear probe looks for their
    digits in the stream. Choose a line, and see the furthest digits that it reads after each block.
    The figure shows which share it reads: on the left where the line stands, on the right where the
    answer is predicted. Who doesn't know the left neighbour can choose among as many digits as the
    table has different rows: with two, .5 is no step.

    Ridge regression from unit(stream after a block) to the digit in this cell after 0, 1, .. steps;
    share of right digits on other windows. Digits of a line are shown if this share is at least .9.
    Lines ask for the most steps of which the model gets 90 % right. Our tests check that the probe
    reads no such line in an untrained model, nor shuffled digits."""
    k, T = run.k, run.model.config.block_size
    # To fit probes takes many windows, whatever --windows says.
    windows, _ = prepare.windows_of(run.config["data"], "val", T, WINDOWS)
    inside = Inside(run.model, run.puzzle, windows, k)
    idx, _ = run.batches[0]
    _, _, in_text = find_lines(idx.cpu(), k, run.puzzle["cells"])   # digits (N, cells)
    examples = [some_digits(run.puzzle)] + [spelled(digits) for digits in in_text[:4]]
    letter = chr(ord("a") + k)
    found = dict(asked=k, line=inside.share_by_block("line"),
                 answer=inside.share_by_block("answer"),
                 examples=[inside.example(letter + digits) for digits in examples])
    furthest = [inside.furthest(block) for block in inside.blocks]
    steps = ["none" if each is None else str(each[0]) for each in furthest]
    sentence = f"After block 0, 1, .. a probe reads up to step {', '.join(steps)}, of {k}."
    return found, sentence if run.most_known else f"The model knows no step. {sentence}"

# ------------------------------------------------------------------------ does the answer need it?

# A probe sees that digits are there, but not that the model uses them. So we change what is there.
# A window has a line and its right answer, so a model says each digit after the right ones before
# it, as in training. After one block, the stream of another window takes the place of this one's,
# in the columns of the line, or in those of the answer. Whose answer does the model say?

def random_windows(puzzle, k, n):
    """n windows: in each a line of random digits, and its right answer. Returns idx (n, T), without
    the answer's last digit, which nobody reads, and the answers (n, cells), as tokens."""
    cells, generator = puzzle["cells"], torch.Generator().manual_seed(0)
    digits = torch.randint(len(puzzle["table"]), (n, cells), generator=generator)
    answer = lines_after(digits, k, puzzle["table"])[-1] + ord("0")
    parts = [torch.full((n, 1), ord("a") + k),   # the line's letter
             digits + ord("0"),
             torch.full((n, 1), ord("\n")),
             torch.full((n, 1), ord("a")),       # the answer's; the text draws it at random
             answer[:, :-1]]
    return torch.cat(parts, 1), answer

class PatchingRunner(Runner):
    """Runs the sublayers of a pass. After one block, some columns of window i get the stream of
    window i - 1, and those of the first window that of the last. Their tokens stay."""
    def __init__(self, model, block, columns):
        super().__init__(model)
        self.block, self.columns = block, columns

    def run(self, stream, residual, f):
        """The model calls it for each sublayer, at self.place 1, 2, 3, .. -> the stream after it"""
        stream = super().run(stream, residual, f)
        block_ends_here = self.place == 2 * self.block   # A block is two sublayers.
        return self.with_patch(stream) if block_ends_here else stream

    def with_patch(self, stream):
        """stream: (n, T, ...), or a tuple of such tensors, as with --residual nag"""
        if isinstance(stream, tuple):
            return tuple(self.with_patch(part) for part in stream)
        stream = stream.clone()
        stream[:, self.columns] = stream.roll(1, dims=0)[:, self.columns]
        return stream

def said_after_patch(model, idx, answer, columns):
    """idx, answer: as random_windows returns them; columns: what is patched, a slice. Which share
    of an answer does the model say, if we patch after block 1, 2, ..? Returns two lists: shares of
    its own answer, and of the other line's."""
    cells = answer.shape[1]
    own, other = [], []
    for block in range(1, len(model.order) + 1):
        logits, _ = model(idx, runner=PatchingRunner(model, block, columns))
        said = logits[:, -cells:].argmax(-1)   # The last columns predict the answer.
        for shares, wanted in (own, answer), (other, answer.roll(1, dims=0)):
            second_half = (said == wanted)[:, cells // 2:]   # see by_steps
            shares.append(second_half.float().mean().item())
    return own, other

@stat("Which block fetches the line", needs_puzzle=True, x="patched after block",
      y="share of the digits", share_y=True)
def patched(run):
    """After one block, the stream of another line takes the place of this one's. Whose answer comes
    out? At some block, the answer stops needing the place where the line stands.

    400 lines of random digits, alone in their windows, that ask for as many steps as in the figure
    above, and the second half of their answers. Chance is 1 / symbols. After an early patch, the
    line belongs to one answer, and the digits so far to the other: so neither comes out whole, but
    one share is above chance."""
    model, cells = run.model, run.puzzle["cells"]
    if model.ends.stream_grows:   # as with --residual attnres
        raise NotHere("its stream has a part for each block, so there is no one state to patch")
    check_length(model.config.block_size, cells)
    idx, answer = random_windows(run.puzzle, run.k, 400)
    idx, answer = idx.to(model.device), answer.to(model.device)
    begin = line_length(cells)   # of the answer: the column of its letter
    panels = {}
    for where, columns in [("where the line stands", slice(0, begin)),
                           ("where the answer is predicted", slice(begin, None))]:
        own, other = said_after_patch(model, idx, answer, columns)
        panels[where] = {"its own answer": own, "the other line's answer": other}
    own = panels["where the line stands"]["its own answer"]
    if own[-1] < KNOWN:
        return panels, "It doesn't know these answers, so a patch shows nothing."
    block = next(block for block, share in enumerate(own, 1) if share >= 0.95 * own[-1])
    return panels, (f"Block {block} fetches the line. After it, the answer no longer needs the "
                    f"line's place.")

# ------------------------------------------------------------- who works, and who skips, by steps

@stat("What breaks without a block", draw="heat", needs_puzzle=True, x="steps asked for", first_x=0,
      y="block left out (0: none)", first_y=0, share=True)
def removal_by_steps(run):
    """Right digits without one block. The lowest row is the whole model. If another row is as
    bright, the model hardly needs that block.

    The stream passes a removed block unchanged; nothing is trained after it."""
    blocks = range(len(run.model.blocks))
    rows = [run.right] + [run.right_by_steps(without(run, [block])) for block in blocks]
    panels, most = {"share of right digits": rows}, run.most_known
    if most == 0:
        return panels, "It knows no step, so nothing can be missed."
    block = min(blocks, key=lambda block: rows[block + 1][most])   # Row 0 is the whole model.
    return panels, (f"Block {block + 1} is missed most. Without it, {rows[block + 1][most]:.0%} of "
                    f"the digits after {in_words(most)} are right.")

@stat("What turns, and for whom", draw="heat", needs_puzzle=True, x="steps asked for", first_x=0,
      y="sublayer")
def gain_by_steps(run):
    """How far each sublayer turns the stream, by the steps that the line asks for (0: a copy). A
    row of one colour treats all digits alike. Pale on the left and dark on the right: it works for
    those who need it. On the far right may stand what the model has not learned.

    Mean angle between the stream before and after, where the digit is predicted; 0 if it skips."""
    # A gain is the tangent of such an angle. The figure has degrees, because all runs have those.
    rows = run.by_steps(lambda idx, targets: run.degrees(idx))
    panels, most = {"mean angle (degrees)": rows}, run.most_known
    if most == 0:
        return panels, "It knows no step, so no sublayer works for one."
    more = [row[most] - row[0] for row in rows]
    return panels, (f"Sublayer {more.index(max(more)) + 1} turns digits after {in_words(most)} by "
                    f"{max(more):.0f} degrees more than copies.")

@stat("Who skips", needs_puzzle=True, x="steps asked for", first_x=0)
def who_skips(run):
    """Whether a digit that needs less depth gets less. A level line: all digits skip alike.

    A token skips what would turn it by less than --skip_below, or as it was trained. Counted where
    the digit is predicted."""
    decider = skipping(run)
    if decider.changes_stream():
        raise NotHere(f"--mod {run.model.config.mod} changes the stream, too, as a router scales "
                      f"what its block adds: without it, this is another model")
    def ran_and_right(idx, targets):
        logits, ran = run.forward(idx, decider)
        is_right = logits.argmax(-1) == targets
        return torch.stack((ran.float().sum(0), is_right.float()))
    n_run, right = run.by_steps(ran_and_right)   # n_run: how many sublayers a digit runs
    if_all_run = run.right_by_steps(ALL_RUN)
    panels = {"sublayers that run for a digit": {"as it skips": n_run},
              "share of right digits": {"as it skips": right, "if all run": if_all_run}}
    return panels, (f"A copied digit runs {n_run[0]:.1f} sublayers, and one after "
                    f"{in_words(run.k)} {n_run[run.k]:.1f}.")

# =================================================================== part 5: statistics of any text

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
    deciders = [by_gain(run, below) for below in BELOW]
    turned = run.mean(lambda idx: run.degrees(idx, ALL_RUN).mean((1, 2)), run.other_quarter)
    weakest_first = (turned.argsort() + 1).tolist()   # places of sublayers
    ways = {"by gain": [], "a fixed set": [], "coins": []}
    for decider in deciders:
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
        what, batches, of_decider = "steps learned", run.batches, run.steps_with
    else:
        what, batches, of_decider = "rise of the loss (nats)", run.quarter, run.loss_rise
    lines = {name: [[skipped, of_decider(decider)] for skipped, decider in points]
             for name, points in ways_to_skip(run, batches).items()}
    at = BELOW.index(0.1)
    (_, if_all_run), (skipped, by_gains) = lines["by gain"][0], lines["by gain"][at]
    by_coins = lines["coins"][at][1]
    return {what: lines}, (f"Below 0.1 (6 degrees), {skipped:.0%} of the sublayer runs are "
                           f"skipped. {what.capitalize()}: {by_gains:.2f}; with coins "
                           f"{by_coins:.2f}; if all run {if_all_run:.2f}.")

A_TEXT = 'def add(a, b):\n    """The sum of two numbers"""\n    return a + b\n'

@stat("What each sublayer turns for each token", draw="token_map", x="token (grey: it skips)",
      y="sublayer", power=0.5)
def depth_map(run):
    """Dark: the sublayer turns the stream of this token much. Grey: the token skips it.

    The angle between the stream before and after. Who skips: who would turn by less than
    --skip_below, or as it was trained; without gains, nobody. The text is --text, or a short
    function. Source: NAG, arXiv:2606.16112, appendix A."""
    if run.puzzle and not run.text:
        raise NotHere("on the steps text, the figures by steps say more; --text makes a map")
    encoding = prepare.get_tokenizer(run.config["tokenizer"])
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
    panels = {"turned by (degrees)": {"attention": turned[::2], "MLP": turned[1::2]},
              "length of the stream": {"stream": by_block}}
    longer = lengths[-1] / lengths[0]
    return panels, f"At the end, the stream is {longer:.1f} times as long as at its start."

@stat("What the head can read after each block", x="blocks run", first_x=0)
def logit_lens(run):
    """The loss if the head read the stream after each block. Where it is high, the head can't read
    yet. But it was trained to read the last block, so something else may be there.

    Final norm and head, applied to the stream after each block (0: to the embedding). Source: the
    logit lens, as in arXiv:2505.13898."""
    def losses_of(idx, targets):
        logits = [run.model.head(stream) for stream in after_blocks(run.model, idx)]
        return torch.stack([F.cross_entropy(each.flatten(0, 1), targets.flatten())
                            for each in logits])
    losses = mean_over(run.batches, losses_of)
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
    panels = {"without one sublayer": {"attention": [worth(places[::2]) for places in blocks],
                                       "MLP": [worth(places[1::2]) for places in blocks]},
              "without the block": {"block": run.worth}}
    most = max(run.worth)
    return panels, f"Block {run.worth.index(most) + 1} is worth most, {most:.2f} nats."

def gradients_of(run):
    """-> for each block the norm of its gradient in the training (blocks,): a mean over what
    train.py has logged after the warmup, in which gradients say little of what will become of a
    block. Per root of the block's size, or with --taper, wide blocks would always win. NotHere if
    nothing was logged"""
    if len(run.model.blocks) == 1:
        raise NotHere("one block has nobody to be compared with")
    norms = []
    for step, entry in (read_metrics(run.folder) if run.folder else {}).items():
        if "grad_norms" not in entry:   # It is an evaluation.
            continue
        # The warmup is a share of the run, whose end --max_flops or --max_iters tells.
        if run.config.get("max_flops"):
            progress = entry["flops"] / run.config["max_flops"]
        else:
            progress = step / run.config["max_iters"]
        if progress >= run.config["warmup"]:
            norms.append(entry["grad_norms"])
    if not norms:
        raise NotHere("its folder has no gradient norms of blocks after the warmup, in "
                      "metrics.jsonl")
    sizes = [sum(p.numel() for p in block.parameters()) for block in run.model.blocks]
    return torch.tensor(norms).double().mean(0) / torch.tensor(sizes).sqrt()

def ranks_of(values):
    """How many values are larger than each, so 0 for the largest. Equal ones share a rank: the mean
    of those that they would take, one after the other."""
    values = torch.as_tensor(values).double()
    larger = (values[:, None] < values).sum(1)
    equal = (values[:, None] == values).sum(1)   # itself included
    return larger + (equal - 1) / 2

def rank_correlation(x, y):
    """Spearman's. 1: both have the same order; -1: the opposite one. x, y: numbers of all blocks"""
    return torch.corrcoef(torch.stack([ranks_of(x), ranks_of(y)]))[0, 1].item()

@stat("Gradients, and what blocks are worth", x="block")
def fan_in(run):
    """In PreNorm, a block's gradient comes to it through each later block, and past all of them. So
    the earlier a block, the more comes in. Do gradients fall like this, and do they tell what a
    block is worth?

    Norm of a block's gradient per root of its size, a mean over what was logged in the training,
    after its warmup. Fan-in: how many blocks run from this one on (of a block that --repeat runs
    twice, the sum), scaled to the same mean. Rank correlation: Spearman's. Source: Gradient Fan-in
    Asymmetry, arXiv:2606.26538."""
    gradients, order = gradients_of(run), run.model.order
    counts = torch.zeros(len(gradients))
    for n_before, block in enumerate(order):
        counts[block] += len(order) - n_before
    panels = {"gradient": {"measured": gradients,
                           "as the fan-in": counts / counts.mean() * gradients.mean()},
              "loss increase without it (nats)": {"measured": run.worth}}
    return panels, (f"Rank correlation of the gradients with the fan-in: "
                    f"{rank_correlation(gradients, counts):.2f}; with what blocks are worth: "
                    f"{rank_correlation(gradients, run.worth):.2f}.")

def orders_to_remove(run):
    """-> {name: the blocks, in the order in which they go}. NotHere as for gradients_of"""
    gradients, blocks = gradients_of(run).tolist(), range(len(run.model.blocks))
    of_sublayers = run.mean(lambda idx: run.degrees(idx).mean((1, 2)), run.quarter).tolist()
    turned = [sum(of_sublayers[place - 1] for place in places_of(run.model, block))
              for block in blocks]
    scores = {"CascadeFlow": gradients,
              "least worth": run.worth,
              "least angle": turned,
              "last first": [-block for block in blocks]}
    # The block with the lowest score goes first.
    return {name: sorted(blocks, key=lambda block: score[block]) for name, score in scores.items()}

@stat("Which blocks can go first", x="blocks removed", first_x=0, asinh=True)
def pruning(run):
    """Blocks are removed, one after another, and nothing is trained after it. CascadeFlow begins
    with the one that had the least gradients in the training, so it needs no text. Is its line as
    low as those that need some, and lower than if the last blocks go first?

    Gradients as above. Least worth: the loss rises least without this block alone, on the same
    windows. Least angle: its sublayers turn the stream least. Source: CascadeFlow Pruning,
    arXiv:2606.26538."""
    n_blocks = len(run.model.blocks)
    @functools.cache   # Different orders often come to the same blocks.
    def rise(removed):
        return run.loss_rise(without(run, removed))
    lines = {name: [rise(frozenset(order[:n])) for n in range(n_blocks)]
             for name, order in orders_to_remove(run).items()}
    n = max(1, n_blocks // 3)
    rises = ", ".join(f"{line[n]:.2f} ({name})" for name, line in lines.items())
    return ({"loss increase (nats)": lines},
            f"Without {n} of {n_blocks} blocks, the loss rises by {rises}.")

# ================================================================================= part 6: drawings

# A drawing gets results, {run: what a statistic has returned}, and colors, {run: colour}. It
# returns a figure. Its other keywords are what stands in @stat(...). Only here is matplotlib
# imported, so who only measures needs none.

# Colours of Okabe and Ito, which the colour-blind can tell apart, too, and two more
COLORS = "#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #7f4f24 #333333".split()
STYLES = ["o-", "s--", "^:", "v-."]

def new_figure(n_panels, panels_a_row, width, height):
    """-> a figure, and the axes of its panels. width, height: of a panel, in inches"""
    from matplotlib.figure import Figure   # not pyplot: a notebook keeps its own backend
    columns = min(n_panels, panels_a_row)
    rows = math.ceil(n_panels / columns)
    size = max(5.6, width * columns), height * rows + 0.6   # 0.6: room for a legend
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in grid[n_panels:]:
        axes.set_axis_off()
    return figure, grid[:n_panels]

def all_keys(dicts):
    """The keys of all of them, once each, in their order"""
    return list(dict.fromkeys(key for each in dicts for key in each))

def x_and_y(line, first_x):
    """[[x, y], ...], or [y, ...] that begins at first_x -> all x, and all y"""
    if line and isinstance(line[0], list):
        return zip(*line)
    return range(first_x, first_x + len(line)), line

def draw_lines(results, colors, x="", y="", first_x=1, share_x=False, share_y=False, asinh=False):
    """{panel: {name: line}} of each run. The colour says which run, the dashes which line.

    x, y: names of the axes (without y, the panel's name); first_x: where [y, ...] begins; share_x,
    share_y: values are between 0 and 1; asinh: y grows as in a logarithm, but goes through 0"""
    titles = all_keys(results.values())
    names = all_keys(panel for panels in results.values() for panel in panels.values())
    styles = dict(zip(names, itertools.cycle(STYLES)))
    figure, grid = new_figure(len(titles), 3, 4.2, 3.2)
    for axes, title in zip(grid, titles):
        for run, panels in results.items():
            for name, line in panels.get(title, {}).items():
                xs, ys = x_and_y(line, first_x)
                size = 10 if len(ys) == 1 else 4   # A small single point would be overlooked.
                axes.plot(xs, ys, styles[name], color=colors[run], alpha=0.85, lw=1.6, ms=size)
        axes.set(xlabel=x, ylabel=y or title, title=title if y else "")
        axes.grid(alpha=0.25)
        if share_x:
            axes.xaxis.set_major_formatter("{x:.0%}")
        else:
            axes.locator_params(axis="x", integer=True)
        if share_y:
            axes.set_ylim(-0.03, 1.03)
        if asinh:   # The numbers next to 0 would overlap, so we leave them out.
            axes.set_yscale("asinh", linear_width=0.01)
            axes.yaxis.set_major_formatter(lambda y, _: "" if 0 < abs(y) < 0.01 else f"{y:g}")
    # The legend shows a thick line for each run, and a grey one for each name, without any points.
    entries = {run: axes.plot([], [], color=colors[run], lw=3)[0] for run in results}
    if len(names) > 1:
        entries |= {name: axes.plot([], [], styles[name], color="0.3", ms=4)[0] for name in names}
    figure.legend(entries.values(), entries, loc="outside lower left", ncols=3, frameon=False)
    return figure

def draw_heat(results, colors, x="", y="", first_x=1, first_y=1, label="", share=False, power=1,
              panels_a_row=2):
    """{panel: matrix} of each run: numbers as colours. A matrix is a list of rows, the lowest
    first. One with few columns has its numbers, and None is grey.

    x, y: names of the axes; first_x, first_y: where they begin; label: what the numbers are; share:
    they go to 1; power: 0.5 makes small numbers differ, too"""
    from matplotlib.colors import PowerNorm
    matrices = {(run, panel): np.array(matrix, dtype=float)   # None becomes nan.
                for run, panels in results.items() for panel, matrix in panels.items()}
    # All panels have one scale.
    largest = 1 if share else max(np.nanmax(matrix, initial=0) for matrix in matrices.values())
    figure, grid = new_figure(len(matrices), panels_a_row, 4.6, 3.6)
    for axes, ((run, panel), matrix) in zip(grid, matrices.items()):
        rows, columns = matrix.shape
        # The middles of its cells have whole numbers.
        extent = first_x - 0.5, first_x + columns - 0.5, first_y - 0.5, first_y + rows - 0.5
        image = axes.imshow(matrix, origin="lower", extent=extent, aspect="auto",
                            cmap="viridis" if share else "Blues", interpolation="nearest",
                            norm=PowerNorm(power, 0, largest))
        axes.set(xlabel=x, ylabel=y, facecolor="0.85")   # Where there is no number, it is grey.
        axes.set_title(f"{run}: {panel}", color=colors[run])
        axes.locator_params(axis="y", nbins=16, integer=True)
        if columns <= 16:
            axes.set_xticks(range(first_x, first_x + columns))
            for (row, column), number in np.ndenumerate(matrix):
                write_number(axes, first_x + column, first_y + row, number, image, share)
    figure.colorbar(image, ax=list(grid), label=label)
    return figure

def write_number(axes, x, y, number, image, share):
    """A number in its cell: .73 for a share, and 12 for degrees"""
    if not math.isnan(number):
        red, green, blue, _ = image.cmap(image.norm(number))
        text = f"{number:.2f}".removeprefix("0") if share else f"{number:.0f}"
        axes.text(x, y, text, ha="center", va="center", fontsize=7,
                  color="white" if red + green + blue < 1.5 else "black")

def draw_probes(results, colors, **options):
    """Two heat maps of each run: what is read where the line stands, and where the answer is
    predicted"""
    shares = {run: {"where the line stands": found["line"],
                    "where the answer is predicted": found["answer"]}
              for run, found in results.items()}
    return draw_heat(shares, colors, **options)

def draw_token_map(results, colors, **options):
    """A matrix of each run with a column per token, and the tokens below"""
    degrees = {run: {"angle (degrees)": found["degrees"]} for run, found in results.items()}
    figure = draw_heat(degrees, colors, panels_a_row=1, **options)
    figure.set_figwidth(12)
    for axes, found in zip(figure.axes, results.values()):   # The colour bar's axes come last.
        # repr writes a tab as '\t'. We leave its quotes out.
        tokens = [repr(token.replace("\n", "↵"))[1:-1] for token in found["tokens"]]
        axes.set_xticks(range(1, len(tokens) + 1), tokens, fontsize=8, family="monospace",
                        rotation=90 if max(map(len, tokens)) > 2 else 0)
    return figure

DRAWINGS = {"lines": draw_lines, "heat": draw_heat, "probes": draw_probes,
            "token_map": draw_token_map}

def as_png(statistic, results, colors):
    """-> bytes of a figure, and its width in inches"""
    import matplotlib
    png = io.BytesIO()
    with matplotlib.rc_context({"text.parse_math": False}):   # A $ is part of a name, or of a text.
        figure = DRAWINGS[statistic.draw](results, colors, **statistic.options)
        figure.savefig(png, format="png", dpi=130)
    return png.getvalue(), figure.get_figwidth()

# =============================================================== part 7: the page, and the command

@dataclass
class AnalyzeConfig:
    runs: list = flag(None, "run folders")
    out: str = flag("figures", "folder of the page, the figures and the numbers")
    only: str = flag("", "some statistics, such as removal,skip_curve; without it all of them")
    text: str = flag("", "a text, or a file with one, for the map of tokens and sublayers")
    skip_below: float = flag(0.05, "a token skips a sublayer that would turn its stream by less (a "
                             "gain), if the run was not trained to skip", 0, 100)
    windows: int = flag(0, "validation windows; 0: as many as in training", 0, 1e6)
    data: str = flag("", "the data set of these runs, if it isn't where it was in training")
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "auto: cuda where there is one")

def main(argv=None):
    if "--list" in (sys.argv if argv is None else argv):   # needs no runs
        print("\n".join(f"{name:18}{statistic.title}" for name, statistic in STATS.items()))
        return
    [args] = parse((AnalyzeConfig,), argv, __doc__, positional=("runs",))
    wanted = args.only.replace(" ", "").split(",") if args.only else list(STATS)
    for name in wanted:
        if name not in STATS:
            refuse(f"--only {name}: no such statistic; choose from {', '.join(STATS)}")
    runs = open_runs(args)
    out = Path(args.out)
    make_folder(out)   # now, not after minutes of measuring
    if any(STATS[name].draw for name in wanted):
        import matplotlib   # If it is missing, we hear it now, too.
    found = measure_all(runs, wanted)
    about = {name: about_run(run, color)
             for (name, run), color in zip(runs.items(), itertools.cycle(COLORS))}
    write_numbers(out, about, found)
    write_page(out, about, found)
    say(f"{out}/index.html shows {', '.join(runs)}; open it in a browser")

def open_runs(args):
    """-> {name: Run}, where the name is the folder's, or its whole path if two have the same"""
    text = prepare.text_or_file(args.text)
    names = [Path(path).resolve().name for path in args.runs]
    runs = {}
    for path, name in zip(args.runs, names):
        model, config = open_run(path, args.device)
        config["data"], warning = data_of_run(path, config, args.data)
        if warning:
            print(warning, file=sys.stderr)
        n = max(4, args.windows or config["eval_windows"])   # four, because some measure a quarter
        windows = prepare.windows_of(config["data"], "val", config["block_size"], n)
        puzzle = prepare.load_meta(config["data"]).get("steps")
        run = Run(model, config, windows, puzzle, text, args.skip_below, path, warning)
        if not math.isfinite(run.loss):
            refuse(f"{path}: its loss is {run.loss}, so there is nothing to see; train it with a "
                   f"lower --lr")
        runs[name if names.count(name) == 1 else path] = run
    return runs

def make_folder(out):
    """SystemExit if it has files, but no page of ours"""
    if out.is_file():
        refuse(f"--out {out}: is a file; name a folder")
    numbers = out / "numbers.json"   # the first file of a page
    out.mkdir(parents=True, exist_ok=True)
    is_ours = numbers.exists() and '"statistics":' in numbers.read_text(errors="replace")
    # A kill may have left what was unfinished.
    files = [path for path in out.iterdir() if not path.name.startswith(prepare.UNFINISHED)]
    if files and not is_ours:
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
            torch.manual_seed(0)   # Coins fall the same, whatever else is measured: see `once`.
            try:
                if STATS[name].needs_puzzle and not run.puzzle:
                    raise NotHere("it is for the steps text (prepare.py steps), whose depth is "
                                  "known")
                returned = STATS[name].measure(run)
                drawn, sentence = returned if isinstance(returned, tuple) else (returned, "")
                of_runs["results"][run_name] = as_json(drawn)
                if sentence:
                    of_runs["sentences"][run_name] = sentence
            except NotHere as why:
                print(f"{run_name}: no {name}, because {why}", file=sys.stderr)
                of_runs["missing"][run_name] = str(why)
    return found

def as_json(value):
    """As numbers.json has it: lists for tensors, and None for what is no number. NotHere if it has
    something else"""
    try:
        text = json.dumps(value, default=lambda tensor: tensor.tolist())
    except (AttributeError, TypeError, ValueError) as error:   # such as a set, or a tuple as a key
        raise NotHere(f"what it returned has no form in numbers.json ({error}); use dicts, lists, "
                      f"tensors, numbers and texts")
    return json.loads(text, parse_constant=lambda nan: None)

def about_run(run, color):
    """-> what the page says of it above all figures"""
    return dict(config=run.config, color=color, loss=run.loss, bits=run.bits, warning=run.warning,
                parameters=num_params(run.model), flops=flops_per_token(run.model))

def write_numbers(out, about, found):
    """numbers.json: what was measured, and why something could not be. (What can't be drawn stands
    here all the same.) about: {run: as about_run returns it}; found: as measure_all returns it"""
    numbers = dict(runs=about, statistics={name: each["results"] for name, each in found.items()},
                   missing={name: each["missing"] for name, each in found.items()})
    with prepare.whole_file(out / "numbers.json") as file:
        file.write(json.dumps(numbers, indent=1).encode())

def write_page(out, about, found):
    """The page, and its figures as files, too. about, found: as above"""
    colors = {name: each["color"] for name, each in about.items()}
    entries = {}
    for name, of_runs in found.items():
        statistic = STATS[name]
        entries[name] = dict(title=statistic.title, caption=statistic.caption,
                             definition=statistic.definition, **of_runs)
        if statistic.draw and of_runs["results"]:
            entries[name] |= figure_of(name, of_runs, colors, out)
    template = (Path(__file__).parent / "analyze.html").read_text(encoding="utf-8")
    # JSON may write < as \u003c. So a </script> in a text doesn't end the script of the page.
    report = json.dumps(dict(runs=about, statistics=entries)).replace("<", "\\u003c")
    with prepare.whole_file(out / "index.html") as file:
        file.write(template.replace("REPORT", report).encode())

def figure_of(name, of_runs, colors, out):
    """Draws a statistic, as a file -> what the page needs to show it, or why it can't be drawn. So
    if a new statistic of yours returns something else, the others still have their page."""
    try:
        png, inches = as_png(STATS[name], of_runs["results"], colors)
    except Exception as error:   # It can be any: what it got has some other form.
        why = (f"it can't be drawn ({type(error).__name__}: {error}); lines are "
               "{panel: {name: line}}, and heat maps {panel: matrix}")
        print(f"no figure of {name}, because {why}", file=sys.stderr)
        return dict(missing=of_runs["missing"] | dict.fromkeys(of_runs["results"], why))
    with prepare.whole_file(out / f"{name}.png") as file:
        file.write(png)
    return dict(image="data:image/png;base64," + base64.b64encode(png).decode(),
                width=80 * inches)   # in pixels of the page

if __name__ == "__main__":
    start(main)
