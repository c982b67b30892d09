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
# The parts of this file: what a statistic is (1), what it gets (2), the statistics of the steps
# text (3) and of any text (4), the drawings (5), the page and the command (6). Its words:
#
#     L         how many blocks run; one that --repeat runs twice counts twice
#     place     the number of a sublayer, from 1 to 2L; places_of(model, block) are those of a block
#     decider   says which tokens run a sublayer; the others skip it (model.py, part 3)
#     gain      the tangent of the angle by which a token's stream is turned: 0.05 is 3 degrees
#     puzzle    what meta.json says of the steps text (prepare.py, part 1): its table, cells, most
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

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure   # not pyplot: a notebook keeps the backend that it has chosen
from matplotlib.ticker import MaxNLocator

import prepare
from flags import flag, parse, refuse, start
from model import (ByFunction, ByGain, Decider, Runner, Without, flops_per_token, num_params,
                   places_of, unit, why_not)
from prepare import whole_file
from train import evaluate, open_run, say

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
# of numbers, here one for each sublayer, or of pairs [x, y]. The other drawings are in part 5.

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

# =================================================================== part 2: what a statistic gets

KNOWN = 0.9   # From this share of right digits on, a model knows them, and a probe can read them.

def in_batches(x, y):
    """Windows x, y (n, T) -> [(idx, targets), ...], all of one size, so that means are fair"""
    size = math.gcd(len(x), 8)
    return list(zip(x.split(size), y.split(size)))

def mean_loss(model, batches, decider=None):
    """Nats per token. decider: says who runs what, in place of the model's own"""
    losses = [model(idx, targets, runner=Runner(model, decider))[1].item()
              for idx, targets in batches]
    return sum(losses) / len(losses)

def angles(x, y):
    """Between vectors (..., C), in radians. (Of small angles, the arc cosine loses the digits.)"""
    x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
    return 2 * torch.atan2((x - y).norm(dim=-1), (x + y).norm(dim=-1))

class Run:
    """A trained model, and validation windows to measure it on"""
    def __init__(self, model, config, windows, puzzle=None, text="", skip_below=0.05):
        """model: in eval mode; config: of the run folder; windows: x, y (n, T); puzzle: None, if it
        is a run on another text; text, skip_below: the flags"""
        self.model, self.config, self.puzzle = model, config, puzzle
        self.text, self.skip_below = text, skip_below
        x, y = (part.to(model.device) for part in windows)
        self.batches = in_batches(x, y)
        self.quarter = in_batches(x[::4], y[::4])           # for what is slow
        self.other_quarter = in_batches(x[2::4], y[2::4])   # to choose a fixed set by
        token_bytes = prepare.token_bytes(config["tokenizer"], model.config.vocab_size)
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
        runner = Runner(self.model, decider)
        # A stream may be several tensors. as_tensor makes one of them.
        streams = [self.model.ends.as_tensor(stream) for stream in self.model.walk(idx, runner)]
        return torch.stack(streams), runner.who_ran()

    def degrees(self, idx, decider=None):
        """The angle by which each sublayer turns the stream: (2L, B, T); 0 where a token skips"""
        streams, _ = self.watch(idx, decider)
        return angles(streams[1:], streams[:-1]).rad2deg()

    def share_that_ran(self, decider, batches=None):
        """-> the share of the tokens that ran each sublayer (2L,)"""
        return self.mean(lambda idx: self.forward(idx, decider)[1].float().mean((1, 2)), batches)

    @functools.cached_property
    def loss_of_quarter(self):
        return mean_loss(self.model, self.quarter)

    def loss_rise(self, decider):
        """By how much the loss rises with this decider, on a quarter of the windows"""
        return mean_loss(self.model, self.quarter, decider) - self.loss_of_quarter

    # --- On the steps text: what is right, and so what it has learned

    def by_steps(self, measure):
        """measure(idx, targets) -> values (rows, B, T) of all targets, such as a row a sublayer.
        Returns for each row a list: its means over the digits that are 0, 1, .. steps away from the
        line before. Only the second half of a line counts: see right_digits."""
        cells = self.puzzle["cells"]
        values, asked = [], []
        for idx, targets in self.batches:
            steps, cell = steps_of_targets(idx, targets, cells)
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

# ------------------------------------------------------------------------------------ who runs what

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

# ---------------------------------------------------------------------- lines of the steps text

def in_words(n):
    """2 -> two steps"""
    words = "no one two three four five six seven eight nine ten".split()
    return f"{words[n] if n < len(words) else n} step{'s' * (n != 1)}"

def tokens_of(text):
    """A token is a byte. "a0" -> tensor([97, 48])"""
    return torch.tensor(list(text.encode()))

def spelled(digits):
    """A tensor of digits -> a text. What is no digit becomes a question mark."""
    return "".join(str(digit) if 0 <= digit <= 9 else "?" for digit in digits.tolist())

def some_digits(puzzle):
    """The first sixteen of pi, again and again; without all ten digits, 0, 1, .. again and again"""
    if len(puzzle["table"]) == 10:
        return ("3141592653589793" * 7)[:puzzle["cells"]]
    return "".join(str(i % len(puzzle["table"])) for i in range(puzzle["cells"]))

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
    """What a model answers to each line, digit by digit the likeliest. (We write the answer's
    letter, because the text draws it at random.)"""
    idx = torch.stack([tokens_of(f"{line}\na") for line in lines]).to(model.device)
    tokens = model.generate(idx, puzzle["cells"], temperature=0)[:, idx.shape[1]:]
    return [spelled(answer - ord("0")) for answer in tokens]

# A window is a row of T + 1 tokens, and a token's place in it is its column. A model reads idx, all
# but the last, and predicts targets, all but the first. If lines had four digits only, c3141 and
# its answer would stand like this:
#
#     column     0  1  2  3  4  5  6  7  8  9 10
#     token      c  3  1  4  1  ↵  a  1  0  8  5
#     "line"        0  1  2  3                      cells, where the line's digits stand
#     "answer"                     0  1  2  3       cells, where the answer's are predicted
#
# A token predicts the next one: so the answer's cell 0 is predicted where its letter is.

def steps_of_targets(idx, targets, cells):
    """Windows (n, T) -> two tensors (n, T). How many steps lead to each target, as the letter of
    the line before says; -1 where nobody can know: it is no digit, or that line is not in the
    window. And the target's cell, which is only of use where the steps are known"""
    tokens = torch.cat((idx[:, :1], targets), 1)
    column = torch.arange(tokens.shape[1], device=tokens.device)
    # Of each token: the last newline up to here. Behind it stand the letter, and then cell 0.
    newline = torch.where(tokens == ord("\n"), column, -1).cummax(1).values
    cell = column - newline - 2
    letter = tokens.gather(1, (newline + 1).clamp(max=idx.shape[1]))
    line_before = newline - cells - 1   # the column of its letter
    steps = tokens.gather(1, line_before.clamp(min=0)) - ord("a")
    # Between documents stands a 256. The first line of a document is no answer.
    is_known = (line_before >= 0) & (0 <= cell) & (cell < cells) & (letter != 256)
    return torch.where(is_known, steps, -1)[:, 1:], cell[:, 1:]   # Targets begin in column 1.

def find_lines(idx, targets, k, puzzle):
    """Windows (n, T) -> all N lines that ask for k steps, and whose whole answer is in the window:

    window, column (N,)   cell 0 of the answer is predicted at idx[window, column]
    digits (N, cells)     those of the line"""
    cells = puzzle["cells"]
    steps, cell = steps_of_targets(idx, targets, cells)
    begins = (steps == k) & (cell == 0)
    begins[:, idx.shape[1] - cells + 1:] = False   # There the answer goes on beyond the window.
    window, column = begins.nonzero().T
    columns = column[:, None] + torch.arange(cells, device=idx.device) - (cells + 1)   # of the line
    return window, column, idx[window[:, None], columns] - ord("0")

# ============================================================= part 3: statistics of the steps text

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

def steps_learned(right, guess):
    """A sum over 1, 2, .. steps. Each counts 1 if all of its digits are right, and 0 if no more are
    than by guessing. right: shares of right digits by steps asked: 0, 1, ..; guess: by guessing"""
    return sum(max(0.0, share - guess) / (1 - guess) for share in right[1:])

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

# A line that asks for two steps or more has lines between it and its answer, which the text never
# shows. Are they inside of the model? A probe looks for them: a linear map from a vector, the
# stream of one token after a block, to a digit. Block 0 is the embedding; each run of a block
# counts (--repeat). We look in two places, `where`: "line" and "answer", as drawn in part 2.

WINDOWS = 1024   # of validation text: half of them to fit probes, half to see what these read

def fit_probes(vectors, digits, symbols):
    """vectors (N, C + 1); digits (k + 1, N), from 0 to symbols - 1. A probe for each row of digits
    -> weights (k + 1, C + 1, symbols), which give each symbol a score"""
    wanted = F.one_hot(digits, symbols).double()   # the scores (k + 1, N, symbols): one 1, else 0
    # Ridge regression: |vectors @ weights - wanted|² + |weights|² shall be as small as can be.
    # There its gradient is 0, and that is a linear system for the weights.
    system = vectors.T @ vectors + torch.eye(vectors.shape[1])
    return torch.linalg.solve(system, vectors.T @ wanted)

def read(vectors, weights):
    """What probes read: vectors (N, C + 1) -> digits (k + 1, N), those with the highest score"""
    return (vectors @ weights).argmax(-1)

def after_blocks(model, idx):
    """-> L + 1 streams: of the embedding, and after each block. (A walk returns those after 0, 1,
    2, .. sublayers, and a block is two of them.)"""
    return model.walk(idx)[::2]

@torch.no_grad()
def vectors_of(model, idx, window, column, cells):
    """For probes: {(where, block): vectors of all cells of some lines, (lines * cells, C + 1)}. A
    vector is the stream of a token, divided by its rms, and a 1, for the constant of the map.
    window, column: as find_lines returns them"""
    vectors = {}
    for block, stream in enumerate(after_blocks(model, idx.to(model.device))):
        # A stream may be several tensors: as_tensor makes one of them, (n, T, C).
        of_tokens = unit(model.ends.as_tensor(stream)).cpu().double()
        of_tokens = F.pad(of_tokens, (0, 1), value=1.0)
        for where, begin in dict(line=column - (cells + 1), answer=column).items():
            columns = begin[:, None] + torch.arange(cells)
            vectors[where, block] = of_tokens[window[:, None], columns].flatten(0, 1)
    return vectors

def vectors_and_digits(model, puzzle, x, y, k):
    """Of all cells of the lines that ask for k steps, in windows x, y (n, T): their vectors, and
    their digits (k + 1, lines * cells) after 0, 1, .. k steps"""
    vectors, digits = [], []   # 64 windows at a time
    for idx, targets in zip(x.split(64), y.split(64)):
        window, column, written = find_lines(idx, targets, k, puzzle)
        vectors.append(vectors_of(model, idx, window, column, puzzle["cells"]))
        digits.append(lines_after(written, k, puzzle["table"]).flatten(1))
    digits = torch.cat(digits, 1)
    if digits.shape[1] < 200:
        raise NotHere(f"its validation text has too few lines that ask for {in_words(k)}: fewer "
                      f"than 200 digits")
    return {key: torch.cat([each[key] for each in vectors]) for key in vectors[0]}, digits

def look_inside(model, puzzle, windows, k, lines):
    """Fits probes to half of the windows, for lines that ask for k steps. Returns a dict:

    line, answer   for each block, from 0 on: which share of the digits after 0, 1, .. k steps they
                   read right in the other half of the windows, where the line or the answer stands
    examples       what they read in each of these lines: see read_line"""
    x, y = windows
    half = len(x) // 2
    vectors, digits = vectors_and_digits(model, puzzle, x[:half], y[:half], k)
    other_vectors, other_digits = vectors_and_digits(model, puzzle, x[half:], y[half:], k)
    probes, share = {}, {}
    for key in vectors:   # Each is (where, block).
        probes[key] = fit_probes(vectors[key], digits, symbols=len(puzzle["table"]))
        is_right = read(other_vectors[key], probes[key]) == other_digits
        share[key] = is_right.double().mean(1).tolist()
    blocks = range(len(model.order) + 1)
    return dict(asked=k, line=[share["line", block] for block in blocks],
                answer=[share["answer", block] for block in blocks],
                examples=[read_line(model, puzzle, line, probes, share) for line in lines])

def read_line(model, puzzle, line, probes, share):
    """-> dict(line=, answer= (of the model), true=, blocks=): for each block None, or the furthest
    digits that a probe can read: dict(steps=1, where="line", share=.99, digits="58", true="58")"""
    [answer] = answers(model, [line], puzzle)
    lines = solve(line, puzzle)   # the digits after 0, 1, .. k steps
    # One window, and the line is at its beginning. The answer's last digit predicts no cell.
    idx = tokens_of(f"{line}\na{answer[:-1]}")[None]
    window, column = torch.tensor([0]), torch.tensor([len(line) + 1])
    vectors = vectors_of(model, idx, window, column, puzzle["cells"])
    rows = []
    for block in range(len(model.order) + 1):
        row = None
        for steps, true in enumerate(lines):
            for where in "line", "answer":   # A later one takes the place of an earlier one.
                if share[where, block][steps] >= KNOWN:
                    digits = read(vectors[where, block], probes[where, block])[steps]
                    row = dict(steps=steps, where=where, share=share[where, block][steps],
                               digits=spelled(digits), true=true)
        rows.append(row)
    return dict(line=line, answer=answer, true=lines[-1], blocks=rows)

@stat("The lines inside, which nobody wrote", draw="heat", needs_puzzle=True,
      panels=dict(line="where the line stands", answer="where the answer is predicted"),
      x="the line after so many steps", first_x=0, y="blocks run", first_y=0,
      label="share of digits read", share=True)
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
    # To fit probes takes many windows, whatever --windows says.
    T = run.model.config.block_size
    windows = prepare.windows_of(run.config["data"], "val", T, WINDOWS)
    idx, targets = run.batches[0]
    _, _, in_text = find_lines(idx.cpu(), targets.cpu(), k, run.puzzle)   # digits (N, cells)
    digits = [some_digits(run.puzzle)] + [spelled(each) for each in in_text[:4]]
    lines = [chr(ord("a") + k) + each for each in digits]
    found = look_inside(run.model, run.puzzle, windows, k, lines)
    blocks = found["examples"][0]["blocks"]
    steps = ", ".join(str(row["steps"]) if row else "none" for row in blocks)
    return found, f"After block 0, 1, .. a probe reads up to step {steps}, of {k}."

# ------------------------------------------------------------------------ does the answer need it?

# A probe sees that digits are there, but not that the model uses them. So we change what is there:
# after one block, the stream of another line takes the place of this one's.

class PatchingRunner(Runner):
    """After one block, some columns of each window get the stream of the window before, and those
    of the first window that of the last."""
    def __init__(self, model, block, columns):
        super().__init__(model)
        self.last_place, self.columns = 2 * block, columns   # A block is two sublayers.

    def run(self, stream, residual, f):
        stream = super().run(stream, residual, f)
        return self.patched(stream) if self.place == self.last_place else stream

    def patched(self, stream):
        """stream: (n, T, ...), or a tuple of such tensors, as with --residual nag"""
        if isinstance(stream, tuple):
            return tuple(self.patched(part) for part in stream)
        stream = stream.clone()
        stream[:, self.columns] = stream.roll(1, dims=0)[:, self.columns]
        return stream

def random_windows(puzzle, k, n):
    """n windows: in each a line of random digits, and its right answer. Returns idx (n, T), without
    the answer's last digit, and the answers (n, cells), as tokens. So a model says each digit after
    the right ones before it, as in training."""
    cells, generator = puzzle["cells"], torch.Generator().manual_seed(0)
    digits = torch.randint(len(puzzle["table"]), (n, cells), generator=generator)
    answer = lines_after(digits, k, puzzle["table"])[-1] + ord("0")
    letter = torch.full((n, 1), ord("a") + k)
    between = tokens_of("\na").expand(n, 2)
    return torch.cat((letter, digits + ord("0"), between, answer[:, :-1]), 1), answer

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
    if 2 * cells + 2 > model.config.block_size:
        raise NotHere("a line and its answer don't fit into its --block_size")
    idx, answer = random_windows(run.puzzle, run.most_known, 400)
    idx, answer = idx.to(model.device), answer.to(model.device)
    def share_of(whose, said):
        return (said == whose)[:, cells // 2:].float().mean().item()
    panels = {}
    for where, columns in [("where the line stands", slice(cells + 2)),
                           ("where the answer is predicted", slice(cells + 2, None))]:
        own, other = [], []
        for block in range(1, len(model.order) + 1):
            logits, _ = model(idx, runner=PatchingRunner(model, block, columns))
            said = logits[:, -cells:].argmax(-1)   # The last columns predict the answer.
            own.append(share_of(answer, said))
            other.append(share_of(answer.roll(1, dims=0), said))
        panels[where] = {"its own answer": own, "the other line's answer": other}
    own = panels["where the line stands"]["its own answer"]
    if own[-1] < KNOWN:
        return panels, "It doesn't know these answers, so a patch shows nothing."
    block = next(block for block, share in enumerate(own, 1) if share >= 0.95 * own[-1])
    return panels, (f"Block {block} fetches the line. After it, the answer no longer needs the "
                    f"line's place.")

# ------------------------------------------------------------- who works, and who skips, by steps

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
    return rows, (f"Block {block} is missed most. Without it, {rows[block][most]:.0%} of the "
                  f"digits after {in_words(most)} are right.")

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
    return rows, (f"Sublayer {place} turns digits after {in_words(most)} by {more[place]:.0f} "
                  f"degrees more than copies.")

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
    panels = {"sublayers that run for a digit": {"as it skips": n_run},
              "share of right digits": {"as it skips": right,
                                        "if all run": run.right_by_steps(ALL_RUN)}}
    most = run.most_known
    return panels, (f"A copied digit runs {n_run[0]:.1f} sublayers, and one after {in_words(most)} "
                    f"{n_run[most]:.1f}.")

# =================================================================== part 4: statistics of any text

def coins(shares):
    """-> a decider that tosses a coin for each token. shares (2L,): that of the tokens which is to
    run each sublayer"""
    def decide(runner):
        # runner.shape is (B, T), and runner.place that of the sublayer that comes next, from 1.
        return torch.rand(runner.shape, device=runner.model.device) < shares[runner.place - 1]
    return ByFunction(decide)

BELOW = 0.0, 0.02, 0.05, 0.1, 0.2, 0.4   # gains; below 0.0 nobody skips

@stat("What skipping costs", x="share of the sublayer runs skipped", share_x=True)
def skip_curve(run):
    """Tokens skip what would turn them by less than 0.02, 0.05, 0.1, 0.2, 0.4. Where a line stays
    level, skipping costs nothing. Two controls skip as much: coins, and a fixed set of sublayers,
    which is as near as whole sublayers can be.

    Fixed set: the sublayers that turn least, for all tokens; left out where it would be empty.
    Coins: each sublayer is skipped by as many tokens as by gain, on average, but by random ones. As
    trained: as the model skipped in training. It was trained for none of the others."""
    what, batches, measure = "rise of the loss (nats)", run.quarter, run.loss_rise
    if run.puzzle:
        what, batches = "steps learned", run.batches
        measure = lambda decider: steps_learned(run.right_by_steps(decider), run.guess)
    by_gains = {below: by_gain(run, below) for below in BELOW}
    # The fixed set is chosen by a quarter of the windows on which no loss is measured.
    turned = run.mean(lambda idx: run.degrees(idx, ALL_RUN).mean((1, 2)), run.other_quarter)
    weakest_first = (turned.argsort() + 1).tolist()   # places of sublayers
    lines = {"by gain": [], "a fixed set": [], "coins": []}   # of points [share skipped, measured]
    for decider in by_gains.values():
        shares = run.share_that_ran(decider, batches)
        skipped = 1 - shares.mean().item()
        lines["by gain"].append([skipped, measure(decider)])
        lines["coins"].append([skipped, measure(coins(shares))])
        n_removed = round(skipped * len(shares))
        if n_removed > 0:
            fixed_set = Without(weakest_first[:n_removed], ALL_RUN)
            lines["a fixed set"].append([n_removed / len(shares), measure(fixed_set)])
    if run.model.config.mod != "all":
        skipped = 1 - run.share_that_ran(run.model.decider, batches).mean().item()
        lines["as trained"] = [[skipped, measure(run.model.decider)]]
    at = BELOW.index(0.1)
    (_, if_all_run), (skipped, value) = lines["by gain"][0], lines["by gain"][at]
    return {what: lines}, (f"Below 0.1 (6 degrees), {skipped:.0%} of the sublayer runs are "
                           f"skipped. {what.capitalize()}: {value:.2f}; with coins "
                           f"{lines['coins'][at][1]:.2f}; if all run {if_all_run:.2f}.")

A_TEXT = 'def add(a, b):\n    """The sum of two numbers"""\n    return a + b\n'

@stat("What each sublayer turns for each token", draw="token_map", panels=dict(degrees=""),
      x="token (grey: it skips)", y="sublayer", power=0.5, label="angle (degrees)", panels_a_row=1)
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
    panels = {"turned by (degrees)": {"attention": turned[::2], "MLP": turned[1::2]},
              "length of the stream": {"stream": list(enumerate(lengths))}}   # 0: at the start
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

# ================================================================================= part 5: drawings

# A drawing gets results, {run: what a statistic has returned}, and colors, {run: colour}. It
# returns a figure. Its other keywords are what stands in @stat(...).

# Colours of Okabe and Ito, which the colour-blind can tell apart, too, and two more
COLORS = "#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #7f4f24 #333333".split()
STYLES = ["o-", "s--", "^:", "v-."]

def new_figure(n_panels, panels_a_row, width, height):
    """-> a figure, and the axes of its panels. width, height: of a panel, in inches"""
    columns = min(n_panels, panels_a_row)
    rows = math.ceil(n_panels / columns)
    size = max(5.6, width * columns), height * rows + 0.6   # 0.6: room for a legend
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in grid[n_panels:]:
        axes.set_axis_off()
    return figure, grid[:n_panels]

def draw_lines(results, colors, x="", y="", first_x=1, share_x=False, share_y=False, asinh=False):
    """{panel: {name: line}} of each run. A line is [y, ...] or [[x, y], ...]. The colour says which
    run, the dashes which line. x, y: names of the axes (without y, the panel's); first_x: where
    [y, ...] begins; share_x, share_y: values are between 0 and 1; asinh: y grows as in a logarithm,
    but goes through 0"""
    panels = {}   # {panel: [(run, name, line), ...]}
    for run, of_run in results.items():
        for panel, lines in of_run.items():
            panels.setdefault(panel, []).extend((run, name, line) for name, line in lines.items())
    names = dict.fromkeys(name for lines in panels.values() for _, name, _ in lines)
    styles = dict(zip(names, itertools.cycle(STYLES)))
    figure, grid = new_figure(len(panels), 3, 4.2, 3.2)
    for axes, (panel, lines) in zip(grid, panels.items()):
        for run, name, line in lines:
            points = line if isinstance(line[0], list) else list(enumerate(line, first_x))
            size = 10 if len(points) == 1 else 4   # A small single point would be overlooked.
            axes.plot(*zip(*points), styles[name], color=colors[run], alpha=0.85, lw=1.6, ms=size)
        axes.set(xlabel=x, ylabel=y or panel, title=panel if y else "")
        axes.grid(alpha=0.25)
        if share_x:
            axes.xaxis.set_major_formatter("{x:.0%}")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
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

def draw_heat(results, colors, panels=None, x="", y="", first_x=1, first_y=1, label="", share=False,
              power=1, panels_a_row=2):
    """Numbers as colours: a matrix of each run, which is a list of rows, the lowest first. A narrow
    one has its numbers, and None is grey. x, y: names of the axes; first_x, first_y: where they
    begin; label: what the numbers are; share: they go to 1; power: 0.5 makes small numbers differ,
    too; panels: {key: title}, if what is drawn of a run is a dict with several matrices"""
    matrices = []   # title, colour of the title, numbers
    for run, result in results.items():
        for key, title in (panels or {"": ""}).items():
            numbers = np.array(result[key] if key else result, dtype=float)   # None becomes nan.
            matrices.append((f"{run}: {title}" if title else run, colors[run], numbers))
    # All panels have one scale.
    largest = 1 if share else max(np.nanmax(each, initial=0) for _, _, each in matrices)
    figure, grid = new_figure(len(matrices), panels_a_row, 4.6, 3.6)
    for axes, (title, color, numbers) in zip(grid, matrices):
        rows, columns = numbers.shape
        # The middles of its cells have whole numbers.
        extent = first_x - 0.5, first_x + columns - 0.5, first_y - 0.5, first_y + rows - 0.5
        image = axes.imshow(numbers, origin="lower", extent=extent, aspect="auto",
                            cmap="viridis" if share else "Blues", interpolation="nearest",
                            norm=PowerNorm(power, 0, largest))
        axes.set(xlabel=x, ylabel=y, facecolor="0.85")
        axes.set_title(title, color=color)
        axes.yaxis.set_major_locator(MaxNLocator(16, integer=True))
        if columns <= 16:
            axes.set_xticks(range(first_x, first_x + columns))
            for (row, column), number in np.ndenumerate(numbers):
                if not math.isnan(number):
                    text = f"{number:.2f}".removeprefix("0") if share else f"{number:.0f}"
                    is_dark = sum(image.cmap(image.norm(number))[:3]) < 1.5   # red, green and blue
                    axes.text(first_x + column, first_y + row, text, ha="center", va="center",
                              fontsize=7, color="white" if is_dark else "black")
    figure.colorbar(image, ax=list(grid), label=label)
    return figure

def draw_token_map(results, colors, **options):
    """A matrix of each run with a column per token, and the tokens below"""
    figure = draw_heat(results, colors, **options)
    figure.set_figwidth(12)
    for axes, result in zip(figure.axes, results.values()):
        # repr writes a tab as '\t'. We leave its quotes out.
        tokens = [repr(token.replace("\n", "↵"))[1:-1] for token in result["tokens"]]
        axes.set_xticks(range(1, len(tokens) + 1), tokens, fontsize=8, family="monospace",
                        rotation=90 if max(map(len, tokens)) > 2 else 0)
    return figure

DRAWINGS = {"lines": draw_lines, "heat": draw_heat, "token_map": draw_token_map}

# =============================================================== part 6: the page, and the command

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
    out.mkdir(parents=True, exist_ok=True)   # now, not after minutes of measuring
    if (out / "index.html").exists() and not (out / "numbers.json").exists():
        refuse(f"--out {out}: its index.html is no page of ours; take another folder")
    write_page(out, runs, measure_all(runs, wanted))
    say(f"{out}/index.html shows {', '.join(runs)}; open it in a browser")

def open_runs(args):
    """-> {name: Run}, where the name is the folder's, or its whole path if two have the same"""
    text = prepare.text_or_file(args.text)
    names = [Path(path).resolve().name for path in args.runs]
    runs = {}
    for path, name in zip(args.runs, names):
        model, config = open_run(path, args.device)
        n = max(4, args.windows or config["eval_windows"])   # four, because some measure a quarter
        windows = prepare.windows_of(config["data"], "val", config["block_size"], n)
        puzzle = prepare.load_meta(config["data"]).get("steps")
        name = name if names.count(name) == 1 else path
        runs[name] = Run(model, config, windows, puzzle, text, args.skip_below)
    return runs

def measure_all(runs, wanted):
    """-> {statistic: dict(results={run: what is drawn}, sentences={run: a sentence},
    missing={run: why it can't have it})}, in the order of the page"""
    found = {name: dict(results={}, sentences={}, missing={}) for name in STATS if name in wanted}
    for run_name, run in runs.items():
        for name, of_runs in found.items():
            print(f"{run_name}: measuring {name}", file=sys.stderr)
            torch.manual_seed(0)   # Coins fall the same, whatever else is measured.
            try:
                if STATS[name].needs_puzzle and not run.puzzle:
                    raise NotHere("it is for the steps text (prepare.py steps), whose depth is "
                                  "known")
                returned = STATS[name].measure(run)
            except NotHere as why:
                print(f"{run_name}: no {name}, because {why}", file=sys.stderr)
                of_runs["missing"][run_name] = str(why)
                continue
            if isinstance(returned, tuple):
                returned, of_runs["sentences"][run_name] = returned
            of_runs["results"][run_name] = as_json(returned)
    return found

def as_json(value):
    """As numbers.json has it: lists for tensors, and None for what is no number"""
    text = json.dumps(value, default=lambda tensor: tensor.tolist())
    return json.loads(text, parse_constant=lambda nan: None)

def write_page(out, runs, found):
    """Writes figures, numbers and page to the folder `out`. found: as measure_all returns it"""
    colors = dict(zip(runs, itertools.cycle(COLORS)))
    about = {name: dict(config=run.config, color=colors[name], loss=run.loss, bits=run.bits,
                        parameters=num_params(run.model), flops=flops_per_token(run.model))
             for name, run in runs.items()}
    numbers = dict(runs=about, statistics={name: each["results"] for name, each in found.items()},
                   missing={name: each["missing"] for name, each in found.items()})
    with whole_file(out / "numbers.json") as file:
        file.write(json.dumps(numbers, indent=1).encode())
    entries = {}
    for name, of_runs in found.items():
        statistic = STATS[name]
        entries[name] = dict(title=statistic.title, caption=statistic.caption,
                             definition=statistic.definition, **of_runs)
        if statistic.draw and of_runs["results"]:
            png = io.BytesIO()
            with matplotlib.rc_context({"text.parse_math": False}):   # A $ is part of a text.
                figure = DRAWINGS[statistic.draw](of_runs["results"], colors, **statistic.options)
                figure.savefig(png, format="png", dpi=130)
            with whole_file(out / f"{name}.png") as file:
                file.write(png.getvalue())
            image = base64.b64encode(png.getvalue()).decode()
            entries[name]["image"] = f"data:image/png;base64,{image}"
            entries[name]["width"] = 80 * figure.get_figwidth()   # in pixels of the page
    template = (Path(__file__).parent / "analyze.html").read_text(encoding="utf-8")
    # JSON may write < as \u003c. So a </script> in a text doesn't end the script of the page.
    report = json.dumps(dict(runs=about, statistics=entries)).replace("<", "\\u003c")
    with whole_file(out / "index.html") as file:
        file.write(template.replace("REPORT", report).encode())

if __name__ == "__main__":
    start(main)
