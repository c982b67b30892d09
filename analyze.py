"""
What each layer of one or several runs does: a page of figures that opens in any browser.

    python analyze.py runs/steps-pre runs/steps-nag --out figures       # open figures/index.html
    python analyze.py runs/pre runs/attnres --only magnitudes,reads     # some statistics
    python analyze.py runs/nag --text "def add(a, b):"                  # a map of your own text
    python analyze.py --list                                            # their names and titles

Writes OUT/index.html, OUT/STATISTIC.png and OUT/numbers.json. Sublayers have the numbers 1 .. 2L (L
blocks in running order): odd ones are attention, even ones MLP. Tokens that skip sublayers in a
run's training (--mod) skip them here, too. Windows and loss are those of train.py, in float32. (A
training on a GPU computes in bfloat16, so its log may differ in the third decimal.)
"""
# The parts of this file: what a statistic is (1), the Run that it gets (2), a pass in which all is
# noted (3), the statistics of any text (4) and of the steps text (5), the drawings (6), the page
# and the command (7). A Trip, a decider and a place are those of model.py, part 3.
import base64
import copy
import functools
import inspect
import io
import itertools
import json
import math
import os
import sys
import textwrap
import traceback
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import matplotlib.style
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.colors import PowerNorm, to_hex
from matplotlib.figure import Figure   # not pyplot: a notebook keeps its own backend

import prepare
from flags import flag, parse, refuse, start
from model import (AttnRes, ByGain, Decider, Norm, SomeTokens, Trip, attend, flops_per_token,
                   map_stream, num_params, places_of, unit)
from train import data_of_run, evaluate, open_run, progress_of, read_metrics, say

# ===================================================================== part 1: what a statistic is

# A statistic is a function that measures something of a Run: a model, and windows of text. It
# returns what is drawn, {panel: {name: line}}, and a sentence about it. (Without a sentence, return
# what is drawn alone.) A line is a list, an array or a tensor of numbers, such as one for each
# sublayer, or of pairs [x, y]. With draw="heat", numbers are shown as colours: {panel: matrix}.
#
# The page shows the title, the first paragraph of the docstring, a figure, and each run's sentence.
# The second paragraph, how it is defined, opens if one clicks. A whole one, to copy to part 4:
#
#     @stat("How long the stream is", x="sublayer", y="rms")
#     def lengths(run):
#         """Does it grow with depth?"""
#         def of_batch(idx, targets):
#             streams = run.model.walk(idx)[1:]   # one after each sublayer
#             tensors = torch.stack([run.model.ends.as_tensor(stream) for stream in streams])
#             return tensors.square().mean(-1).sqrt().mean((1, 2))
#         line = mean_over(run.quarter, of_batch)
#         return {"": {"measured": line}}, f"It grows {line[-1] / line[0]:.1f}-fold."

STATS = {}   # name: Statistic, in the order of the page, which is that of a lesson
Statistic = namedtuple("Statistic", "measure title caption definition draw options")

def stat(title, draw="lines", **options):
    """A decorator: the function below it is a statistic, which --only calls by the function's name.
    draw: a key of DRAWINGS (part 6); options: keywords of that drawing, such as x"""
    def add(measure):
        measure = torch.no_grad()(measure)   # It measures, and nothing learns.
        caption, _, definition = (inspect.getdoc(measure) or title).partition("\n\n")
        STATS[measure.__name__] = Statistic(measure, title, caption, definition, draw, options)
        return measure
    return add

class NotHere(Exception):
    """One sentence: why a run can't have what was asked for"""

# ============================================================ part 2: the Run that a statistic gets

def mean_over(batches, of_batch):
    """of_batch(idx, targets) -> a number or a tensor, the mean over these windows. Returns the mean
    over all windows of the batches."""
    torch.manual_seed(0)   # Coins fall the same each time, whatever was measured before.
    total = sum(len(idx) * of_batch(idx, targets) for idx, targets in batches)
    return total / sum(len(idx) for idx, _ in batches)

def mean_loss(model, batches, decider=None, without=()):
    """Nats per token. decider: says who runs what, in place of the model's own; without: places of
    sublayers that nobody runs"""
    def loss_of(idx, targets):
        _, loss = model(idx, targets, trip=Trip(model, decider, without))
        return loss.item()
    return mean_over(batches, loss_of)

ALL_RUN = Decider()   # All tokens run all sublayers.
KNOWN = 0.9   # From this share of right digits on, a model knows them, or a probe can read them.

class Run:
    """A trained model, and validation windows to measure it on"""
    def __init__(self, model, config, windows, puzzle=None, text="", folder=None):
        """model: in eval mode; windows: x, y (n, T); puzzle: what meta.json says of the steps text,
        or None: it is another one; text: --text; folder: of the run, with its log, or None"""
        self.model, self.config, self.puzzle, self.text = model, config, puzzle, text
        self.guess = 1 / len(puzzle["table"]) if puzzle else 0   # the share that is right by chance
        self.log = dict(sorted(read_metrics(folder).items())) if folder else {}   # by iteration
        x, y = (part.to(model.device) for part in windows)
        def in_batches(first, step):
            return list(zip(x[first::step].split(8), y[first::step].split(8)))
        self.batches = in_batches(0, 1)
        self.quarter = in_batches(0, 4)         # for what is slow
        self.other_quarter = in_batches(2, 4)   # to choose what is removed
        token_bytes = prepare.token_bytes(config["tokenizer"], model.config.vocab_size)
        # Nats per token, and bits per byte of text, as train.py has them
        self.loss, self.bits, _ = evaluate(model, x, y, token_bytes)

    def share_that_ran(self, decider, batches=None):
        """-> the share of the tokens that ran each sublayer (2L,)"""
        def shares(idx, targets):
            trip = Trip(self.model, decider)
            self.model(idx, trip=trip)
            return trip.who_ran().float().mean((1, 2))
        return mean_over(batches or self.batches, shares)

    @functools.cached_property
    def quarter_loss(self):
        return mean_loss(self.model, self.quarter)

    def loss_rise(self, decider=None, without=()):
        """By how much the loss rises, on a quarter of the windows. See mean_loss."""
        return mean_loss(self.model, self.quarter, decider, without) - self.quarter_loss

    def loss_rise_without(self, blocks):
        """The same without these blocks, from 0. Of the others, tokens skip as in training."""
        return self.loss_rise(without={
            place for block in blocks for place in places_of(self.model, block)})

    @functools.cached_property
    def worth(self):
        """-> a list: by how much the loss rises without block 1, 2, .."""
        return [self.loss_rise_without([block]) for block in range(len(self.model.blocks))]

    # --- On the steps text (part 5): what is right, and so what it has learned

    def by_steps(self, of_targets):
        """of_targets(idx, targets) -> values (rows, B, T) of all targets, such as a row a sublayer.
        Returns for each row a list: its means over the digits to which 0, 1, .. steps lead. NotHere
        if it is no steps text, or has too few windows"""
        if not self.puzzle:
            raise NotHere("it is for the steps text (prepare.py steps), whose depth is known")
        torch.manual_seed(0)
        values, asked = [], []
        for idx, targets in self.batches:
            values.append(of_targets(idx, targets).double().flatten(1))
            asked.append(steps_asked(idx, self.puzzle["cells"]).flatten())
        values, asked = torch.cat(values, 1), torch.cat(asked)
        means = [values[:, asked == k].mean(1) for k in range(self.puzzle["most"] + 1)]
        if torch.stack(means).isnan().any():
            raise NotHere("its windows lack lines of some number of steps; give it more --windows")
        return torch.stack(means, 1).tolist()

    def right_by_steps(self, decider=None, without=()):
        """-> the shares of right digits by steps asked: 0, 1, .."""
        def is_right(idx, targets):
            logits, _ = self.model(idx, trip=Trip(self.model, decider, without))
            return (logits.argmax(-1) == targets)[None]
        [right] = self.by_steps(is_right)
        return right

    def steps_with(self, decider=None, without=()):
        """How many steps it has learned if this decider says who runs what"""
        return steps_learned(self.right_by_steps(decider, without), self.guess)

    @functools.cached_property
    def right(self):
        """The shares of right digits of the model as it is"""
        return self.right_by_steps()

    @property
    def k(self):
        """The most steps that it knows, or one if it knows none: a closer look asks for so many."""
        known = itertools.takewhile(lambda share: share >= KNOWN, self.right)
        return max(1, len([*known]) - 1)

def steps_learned(right, guess):
    """Shares of right digits by steps asked: 0, 1, ..; and the share by guessing -> how many steps
    have been learned: each counts 1 if all is right, and 0 if no more is right than by guessing."""
    return sum(max(0.0, share - guess) / (1 - guess) for share in right[1:])

def skipping(model):
    """-> the decider that says who skips: as in training. If all ran there, but there are gains, it
    is those below 0.05, which is 3 degrees."""
    if model.config.mod == "all" and model.ends.knows_gain:
        return ByGain(model.config, below=0.05)
    return model.decider

def refuse_routers(model):
    """NotHere if its decider changes the stream after a sublayer, as a router does"""
    if type(model.decider).after is not Decider.after:
        raise NotHere(f"--mod {model.config.mod} changes the stream, too, not just residuals do")

# ========================================================= part 3: a pass in which all is noted

# A residual gives a sublayer f something to read, and makes the next stream of its update, which f
# returns. So an f of ours can note both, whatever form a stream has.

def rms(x):
    return x.square().mean(-1).sqrt()

def angles(x, y):
    """Between vectors (..., C), in degrees. (Of small angles, the arc cosine loses the digits.)"""
    x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
    return 2 * torch.atan2((x - y).norm(dim=-1), (x + y).norm(dim=-1)).rad2deg()

NORMS = Norm, nn.RMSNorm, nn.LayerNorm   # the last two: of a class of your own

def run_rule(residual, stream, update=None):
    """Runs a residual whose sublayer returns `update` (B, T, C), whatever it gets. Returns what it
    gets, the same before the norm, and the next stream. None: it is model.ends, and the head reads
    """
    found, normed = [], []

    def f(x):   # The last norm that ran before f is that of what it gets. There may be none.
        found[:] = x, normed[-1] if normed else x
        return update

    hooks = [module.register_forward_pre_hook(lambda module, inputs: normed.append(inputs[0]))
             for module in residual.modules() if isinstance(module, NORMS)]
    if update is None:
        f(residual.finish(stream))
        next_stream = None
    else:
        next_stream = residual(stream, f)
    for hook in hooks:
        hook.remove()
    read, raw = found
    if isinstance(residual, AttnRes):   # It multiplies a mean of n sources by n.
        raw = raw / len(stream[1])
    return read, raw, next_stream

def where_ran(ran, new, old):
    """The next stream: new where a token ran, bools (B, T), and old where it skipped"""
    if ran.all() or not ran.any():   # A stream that grows has no part to put anything in.
        return new if ran.any() else old
    some = SomeTokens(ran)
    return some.put(old, some.gather(new))

class Pass:
    """A pass of windows idx (B, T), and all that happens in it, in the order of running:

    streams     before each sublayer, and the last one: 2L + 1
    ran         who ran: bools (2L, B, T)
    updates     what each sublayer returns, (B, T, C); zeros where a token skips: 2L
    reads       what each sublayer, and at last the head, gets, (B, T, C): 2L + 1. (A token that
                skips an attention reads, too, to make its key.)
    raws        the same before its norm
    residuals   the rules of all of these

    decider, without: see Trip"""
    def __init__(self, model, idx, decider=None, without=()):
        self.model, self.embedding = model, model.wte(idx)
        self.updates = [torch.zeros_like(self.embedding) for _ in range(2 * len(model.order))]
        self.places = []   # those that were asked for an update
        self.trip = Trip(model, decider, without)
        hooks = [residual.register_forward_pre_hook(self.note) for residual in model.residuals()]
        try:
            self.streams = model.walk(idx, self.trip)
        finally:
            for hook in hooks:
                hook.remove()
        self.ran = self.trip.who_ran()
        if len(self.places) > len({*self.places}):
            raise NotHere("its residual runs a sublayer twice, so there is no one update")
        blocks = [model.blocks[number] for number in model.order]
        self.residuals = [residual for block in blocks
                          for residual in (block.attn_residual, block.mlp_residual)] + [model.ends]
        rules = zip(self.residuals, self.streams, [*self.updates, None])
        self.reads, self.raws, _ = zip(*(run_rule(*each) for each in rules))

    def note(self, residual, arguments):
        """Called before each residual, for the tokens that run -> its arguments, with an f that
        notes what it returns"""
        stream, f, *gain = arguments
        place, answer = self.trip.place, self.trip.answers[-1]

        def noting(x):
            update = f(x)   # (B, T, C), or, if some tokens skip, (N, C)
            if answer is True:
                self.updates[place - 1] = update
            else:
                self.updates[place - 1][answer] = update.flatten(0, -2)
            self.places.append(place)
            return update

        return stream, noting, *gain

    def degrees(self):
        """By how much what is read turns, from each sublayer to the next reader: (2L, B, T)"""
        return torch.stack([angles(*pair) for pair in itertools.pairwise(self.raws)])

    def effects(self):
        """-> (2L + 1 readers, 2L + 1 writers): which part of what a reader reads is gone without a
        writer, |read - read without it| / |read|, a mean over tokens. nan where none can read.

        From a writer on (0: the embedding), which writes zeros, the rules run once more. All others
        write what they did: no attention and no MLP is computed again."""
        refuse_routers(self.model)
        n = len(self.reads)
        table = torch.full((n, n), math.nan, dtype=self.embedding.dtype)
        for writer in range(n):
            stream = self.streams[max(0, writer - 1)]   # that before it has written
            updates = [*self.updates, None]             # The head writes nothing.
            if writer == 0:
                stream = self.model.ends.start(torch.zeros_like(self.embedding))
            else:
                updates[writer - 1] = torch.zeros_like(self.embedding)
            for place in range(max(1, writer), n + 1):   # place n: the head reads
                read, _, new = run_rule(self.residuals[place - 1], stream, updates[place - 1])
                if place > writer:
                    usual = self.reads[place - 1]
                    gone = (usual - read).norm(dim=-1) / usual.norm(dim=-1).clamp_min(1e-30)
                    table[place - 1, writer] = gone.mean()
                if place < n:
                    stream = where_ran(self.ran[place - 1], new, stream)
        return table

# =================================================================== part 4: statistics of any text

@stat("How fast it learns", y="validation loss (nats)", from_zero=False)
def curves(run):
    """By iterations, by what was computed, and by time: who leads may depend on what you count. Is
    a gap still growing when the learning rate falls, at the end?

    Validation loss, as logged, without that of the first weights. FLOPs: matrix products of the
    training, without what tokens skip. Seconds: of the training alone, on its machine."""
    losses = {step: entry["val_loss"] for step, entry in run.log.items()
              if "val_loss" in entry and step > 0}
    if not losses:
        raise NotHere("its metrics.jsonl has no evaluation")
    def at_evaluations(key):   # Between two lines of the log, we interpolate.
        logged = {0: 0.0} | {step: entry[key] for step, entry in run.log.items() if key in entry}
        return np.interp([*losses], [*logged], [*logged.values()])
    panels = {"by iteration": [*losses], "by FLOPs": at_evaluations("flops"),
              "by seconds": at_evaluations("seconds")}
    return {name: {"validation": [*zip(x, losses.values())]} for name, x in panels.items()}, (
        f"{losses[max(losses)]:.3f} nats after {max(losses):,} iterations and "
        f"{panels['by seconds'][-1]:,.0f} seconds.")

@stat("How large updates are, and what they meet", x="sublayer")
def magnitudes(run):
    """PreNorm adds up all updates, so the sum grows. Later ones must be larger, or turn what is
    read by less: dilution. Attention Residuals read a mean. With attnres:group=4, a sum starts anew
    after four updates: a saw-tooth.

    Rms, a mean over tokens. Update: what a sublayer returns; 0 where a token skips. Read: before
    the norm. (NAG reads a direction, so 1.) Sum: what updates are added to. Turns: the angle
    between what a sublayer and what the next one reads; where readers choose, as in attnres, their
    choice counts, too. Source: arXiv:2603.15031."""
    def of_batch(idx, targets):
        found = Pass(run.model, idx)
        sums = [run.model.ends.running_sum(stream) for stream in found.streams[1:]]
        sizes = [torch.stack([rms(x).mean() for x in each])
                 for each in (found.updates, found.raws[:-1], sums)]
        return torch.stack([*sizes, found.degrees().mean((1, 2))])
    update, read, sums, turned = mean_over(run.quarter, of_batch).tolist()
    numbered = [*enumerate(update, 1)]
    falls = sum(after < 0.8 * before for before, after in itertools.pairwise(sums))
    return {"what is read (rms)": {"both": read}, "sum of updates (rms)": {"both": sums},
            "update (rms)": {"attention": numbered[::2], "MLP": numbered[1::2]},
            "what is read turns by (degrees)": {"both": turned}}, (
        f"From the first block to the last, what is read grows "
        f"{sum(read[-2:]) / max(1e-30, sum(read[:2])):.1f}-fold. The sum of updates falls {falls} "
        f"times by more than a fifth.")

@stat("Who reads whom", draw="heat", x="writer (column)", y="reader (row)", power=0.6,
      label="Part of what a reader (row) reads that is gone without a writer (column). Rows alike, "
            "and paler below: all read one growing sum. Rows that differ: each reader chooses. e: "
            "the embedding; a1, m1: attention and MLP of block 1; head: predicts the next token.")
def reads(run):
    """Where all hand on one sum, as in PreNorm, rows look alike, and fade. Rules that choose have
    rows of their own. A dark diagonal is a chain, and a dark column is read by all.

    |read - read without the writer| / |read|, a mean over tokens; a norm can make it more than 1.
    The rules run again, with zeros for one writer's update, but no attention or MLP. So gates,
    gains and scores react, and updates don't. It is what is there to be read, used or not, and a
    mean over tokens hides their different choices. NAG's head reads a length, too, which comes from
    the embedding. Alike: the part that two neighbours' rows share, each scaled to a sum of 1."""
    effect = mean_over(run.quarter, lambda idx, targets: Pass(run.model, idx).effects())
    effect = effect.cpu().numpy()
    names = [f"{kind}{number + 1}" for number in range(len(run.model.order)) for kind in "am"]
    table, alike = np.nan_to_num(effect), []
    for reader in range(1, len(table) - 2):   # and the next one, but the head; of what both read
        rows = table[reader:reader + 2, :reader + 1]
        rows = rows / np.maximum(1e-30, rows.sum(1, keepdims=True))
        alike.append(rows.min(0).sum())
    first, second = np.array_split(np.diag(table)[1:], 2)   # of the next reader
    return {"": effect, "columns": ["e", *names], "rows": [*names, "head"]}, (
        f"What two neighbours read is alike to {np.mean(alike or [1]):.0%}. Without a sublayer, "
        f"the next reader loses {first.mean():.0%} of what it reads in the first half of the "
        f"depth, and {second.mean():.0%} in the second.")

def attention_to_first(attn, rotation, x):
    """The share of attention that queries in the second half of windows give to the first token, a
    mean over heads. x (B, T, C): what it reads"""
    q, k, _ = attn.c_attn(x).chunk(3, dim=-1)
    q, k = attn.turned(q, rotation), attn.turned(k, rotation)
    values = torch.zeros_like(q)   # The first token has a 1: a mean of the values is its share.
    values[:, 0] = 1
    return attend(q, k, values)[:, x.shape[1] // 2:].mean()

@stat("Attention sinks and heavy tails", x="sublayer")
def sinks(run):
    """Heads that have nothing to do look at the first token, a sink. And a few channels may become
    very large. NAG's paper (arXiv:2606.16112) has less of both.

    Sink: what the second half of a window gives to its first token, a mean over heads. Largest
    channel: max |x| / rms(x) of what is read before the norm. Kurtosis: 3 if it were normal."""
    if not run.model.decider.skippers_make_keys:
        raise NotHere("its tokens that skip have no keys, so attention is over others")
    def of_batch(idx, targets):
        found = Pass(run.model, idx)
        rotation = run.model.rotation[:idx.shape[1]]
        shares = [attention_to_first(run.model.blocks[number].attn, rotation, x)
                  for number, x in zip(run.model.order, found.reads[::2])]
        x = torch.stack(found.raws[:-1])   # (2L, B, T, C)
        largest = x.abs().amax(-1) / rms(x).clamp_min(1e-30)
        x = x - x.mean(-1, keepdim=True)
        kurtosis = x.pow(4).mean(-1) / x.square().mean(-1).square().clamp_min(1e-30)
        shares = torch.stack(shares).repeat_interleave(2)   # twice, to have one for each sublayer
        return torch.stack([shares, largest.mean((1, 2)), kurtosis.mean((1, 2))])
    shares, largest, kurtosis = mean_over(run.quarter, of_batch).tolist()
    T = run.batches[0][0].shape[1]   # If a query looks at all tokens alike, the first one gets:
    equal = np.mean(1 / np.arange(T // 2 + 1, T + 1))
    return {"attention to the first token": {"measured": [*enumerate(shares, 1)][::2]},
            "largest channel / rms": {"measured": largest}, "kurtosis": {"measured": kurtosis}}, (
        f"At most {max(shares):.1%} of an attention goes to the first token (to all alike: "
        f"{equal:.1%}).")

@stat("What fewer bits cost", x="bits per weight", y="rise of the loss (nats)", log=True)
def rounding(run):
    """Numbers of 32 bits need four times the memory of numbers of 8. How few will do? All matrices
    are rounded to few bits, with embedding and head, and nothing is trained after it.

    Each row is rounded to the nearest of 2^bits - 1 values around 0. (Parameters of the residuals
    stay as they are.)"""
    rises = {}
    for bits in 8, 6, 4, 3:
        model = copy.deepcopy(run.model)
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                largest = module.weight.abs().amax(1, keepdim=True).clamp_min(1e-30)
                step = largest / (2 ** (bits - 1) - 1)
                module.weight.copy_((module.weight / step).round() * step)
        rises[bits] = mean_loss(model, run.quarter) - run.quarter_loss
    return {"": {"rounded": [*rises.items()]}}, (
        f"The loss rises by {rises[4]:.3f} nats at 4 bits, and by {rises[3]:.3f} at 3.")

@stat("What the head can read after each block", x="blocks run", y="loss (nats)", first_x=0)
def logit_lens(run):
    """The loss if the head read the stream after each block. It was trained to read the last one,
    so where it is high, something else may be there.

    The logit lens, as in arXiv:2505.13898: final norm and head. 0: of the embedding."""
    def losses_of(idx, targets):
        logits = [run.model.head(stream) for stream in run.model.walk(idx)[::2]]
        return torch.stack([F.cross_entropy(each.flatten(0, 1), targets.flatten())
                            for each in logits])
    losses = mean_over(run.batches, losses_of).tolist()
    return {"": {"after each block": losses}}, (
        f"{losses[len(losses) // 2]:.2f} nats after half of the blocks, {losses[-1]:.2f} at last.")

@stat("What a sublayer is worth", x="block", y="rise of the loss (nats)", log=True)
def removal(run):
    """How much the loss rises without one sublayer, or without a whole block; near 0: it could go.

    The stream passes what is removed unchanged, wherever --repeat runs it. Nothing is trained after
    it. As in LLM-Drop, arXiv:2406.15786."""
    blocks = [places_of(run.model, block) for block in range(len(run.model.blocks))]
    lines = {name: [run.loss_rise(without=places[first::2]) for places in blocks]
             for first, name in enumerate(("attention", "MLP"))}
    most, least = np.argmax(run.worth), np.argmin(run.worth)
    return {"without one sublayer": lines, "without the block": {"block": run.worth}}, (
        f"Block {most + 1} is worth most, {run.worth[most]:.2f} nats, and block {least + 1} least, "
        f"{run.worth[least]:.3f}.")

def gradients_of(run):
    """-> the norm of each block's gradient, as logged in the training after the warmup (n, blocks).
    Per root of the block's size, or with --taper, wide blocks would always win"""
    end = max(run.log, default=0)
    norms = [entry["grad_norms"] for step, entry in run.log.items()
             if "grad_norms" in entry and step >= run.config["warmup"] * end]
    if not norms or len(run.model.blocks) == 1:
        raise NotHere("its metrics.jsonl has no gradient norms of several blocks to compare")
    sizes = [sum(p.numel() for p in block.parameters()) for block in run.model.blocks]
    return np.array(norms) / np.sqrt(sizes)

def rank_correlation(x, y):
    """Spearman's. 1: both have the same order; -1: the opposite one. Equal values share a rank."""
    ranks = np.array([[(values < each).sum() + (values == each).sum() / 2 for each in values]
                      for values in (np.asarray(x), np.asarray(y))])
    is_flat = (ranks.std(1) == 0).any()   # All values of one are equal, so there is no order.
    return 0.0 if is_flat else np.corrcoef(ranks)[0, 1]

@stat("Gradients, and what blocks are worth", x="block", y="gradient / mean")
def fan_in(run):
    """In PreNorm, a block's gradient comes through each later block, and past it: the earlier a
    block, the larger its fan-in. Do gradients fall like this, and tell what a block is worth?

    Gradient: norm per root of the block's size, a mean over the log after the warmup. Fan-in: n if
    n blocks run from this one on, and n (n + 1) / 2 with --deep_supervision, where a loss follows
    each of them; if --repeat runs it twice, the sum. Worth: as in removal. Rank correlation:
    Spearman's. Source: arXiv:2606.26538."""
    gradients, ways = gradients_of(run).mean(0), np.zeros(len(run.model.blocks))
    n = np.arange(len(run.model.order), 0, -1.0)
    if run.model.config.deep_supervision:
        n = n * (n + 1) / 2
    np.add.at(ways, run.model.order, n)
    lines = {"measured": gradients / gradients.mean(), "as the fan-in": ways / ways.mean()}
    return {"": lines}, (
        f"Rank correlation of gradients with the fan-in: {rank_correlation(gradients, ways):.2f}; "
        f"with what blocks are worth: {rank_correlation(gradients, run.worth):.2f}.")

@stat("Which blocks can go first", x="blocks removed", y="rise of the loss (nats)", first_x=0)
def pruning(run):
    """CascadeFlow first removes the block that had the least gradients in the training, so it needs
    no text. Is its line as low as that of the usual score, which needs some? Is it lower than if
    the last blocks go first, or random ones?

    Gradients as in fan_in (arXiv:2606.26538). Usual score: 1 - cosine of what is read before and
    after a block (ShortGPT, arXiv:2403.03853). Least worth: as in removal, on these same windows,
    which is too kind to it. Any: a mean of five random orders. Stable: the rank correlation of
    gradients in both halves of the training."""
    logged, n_blocks = gradients_of(run), len(run.model.blocks)
    def change(idx, targets):
        raws = Pass(run.model, idx).raws[::2]   # before each block, and the head's
        return torch.stack([1 - F.cosine_similarity(*pair, dim=-1).mean()
                            for pair in itertools.pairwise(raws)])
    usual = np.zeros(n_blocks)
    np.add.at(usual, run.model.order, mean_over(run.other_quarter, change).cpu().numpy())
    rise = functools.cache(run.loss_rise_without)   # Different orders come to the same blocks.
    def line(order):
        return [rise(frozenset(order[:n])) for n in range(n_blocks)]
    scores = {"CascadeFlow": logged.mean(0), "usual score": usual, "least worth": run.worth,
              "last first": -np.arange(n_blocks)}
    lines = {name: line(np.argsort(score, kind="stable").tolist())
             for name, score in scores.items()}
    rng = np.random.default_rng(0)
    lines["any"] = np.mean([line(rng.permutation(n_blocks).tolist()) for _ in range(5)], 0)
    half, n = len(logged) // 2, max(1, n_blocks // 4)
    stable = rank_correlation(logged[:len(logged) - half].mean(0), logged[half:].mean(0))
    rises = ", ".join(f"{line[n]:.2f} ({name})" for name, line in lines.items())
    return {"": lines}, (f"Without {n} of {n_blocks} blocks, the loss rises by {rises}. "
                         f"CascadeFlow's score is stable to {stable:.2f}.")

@stat("Who skips", x="sublayer", y="share of the tokens that skip it")
def who_skips(run):
    """A sublayer that nearly all tokens skip could be removed: that is no adaptive depth. What
    counts is between 0 and 1.

    A token skips as it was trained to, or else if its gain is below 0.05 (3 degrees)."""
    decider = skipping(run.model)
    if type(decider) is Decider:
        raise NotHere(f"--residual {run.model.config.residual} knows no gain, so all tokens run")
    skipped = 1 - run.share_that_ran(decider).cpu().numpy()
    return {"": {"measured": skipped}}, (
        f"{skipped.mean():.0%} of the sublayer runs are skipped. Nine tokens of ten skip "
        f"{(skipped >= 0.9).sum()} of {len(skipped)} sublayers.")

def coins(shares):
    """A decider that tosses a coin for each token. shares (2L,): of the tokens that are to run each
    sublayer"""
    return lambda trip: torch.rand(trip.shape, device=trip.model.device) < shares[trip.place - 1]

def fixed_sets(run, most):
    """-> sets of 1, 2, .. most places, which all tokens skip: those without which the loss is least
    on other windows. Each is the best of three: the one before with the place whose removal costs
    least; those that turn least; those whose removal alone costs least."""
    @functools.cache
    def loss(removed):
        return mean_loss(run.model, run.other_quarter, ALL_RUN, removed)
    def turned(idx, targets):
        return Pass(run.model, idx, ALL_RUN).degrees().mean((1, 2))
    weakest = (mean_over(run.other_quarter, turned).argsort() + 1).tolist()
    cheapest = sorted(weakest, key=lambda place: loss(frozenset([place])))
    greedy, sets = frozenset(), []
    for n in range(1, most + 1):
        greedy = min((greedy | {place} for place in weakest if place not in greedy), key=loss)
        sets.append(min(greedy, frozenset(weakest[:n]), frozenset(cheapest[:n]), key=loss))
    return sets

@stat("What skipping costs", x="sublayer runs skipped (%)")
def skip_curve(run):
    """By gain, tokens skip what would turn them least. Two controls skip as much: coins, and a
    fixed set of sublayers, which all tokens skip. Skipping adapts to the token only where its line
    is better than that set's. (Only NAG knows a gain.)

    By gain: one threshold for all sublayers, that of the lowest 10, 25, 40 and 50 % of all gains.
    Fixed set: sublayers whose removal costs the least loss, on other windows (fixed_sets). Coins:
    of each sublayer, as many random tokens skip as by gain. As trained: as --mod says."""
    refuse_routers(run.model)
    model, what, batches, value_of = run.model, "rise of the loss", run.quarter, run.loss_rise
    if run.puzzle:
        what, batches, value_of = "steps learned", run.batches, run.steps_with
    n, if_all_run, most = 2 * len(model.order), value_of(ALL_RUN), 0.5
    lines = {"by gain": [], "a fixed set": [[0.0, if_all_run]], "coins": []}
    if model.ends.knows_gain:
        lines |= {"by gain": [[0.0, if_all_run]], "coins": [[0.0, if_all_run]]}
        found = Pass(model, run.other_quarter[0][0], ALL_RUN)
        gains = torch.stack([residual.gain(stream).abs() for residual, stream
                             in zip(found.residuals[:-1], found.streams)])
        for share in 0.1, 0.25, 0.4, 0.5:
            decider = ByGain(model.config, below=max(1e-9, np.quantile(gains.cpu(), share)))
            who_ran = run.share_that_ran(decider, batches)
            most = 1 - who_ran.mean().item()   # It isn't quite the share.
            lines["by gain"].append([100 * most, value_of(decider)])
            lines["coins"].append([100 * most, value_of(coins(who_ran))])
    for places in fixed_sets(run, min(n - 1, math.ceil(n * most))):
        lines["a fixed set"].append([100 * len(places) / n, value_of(ALL_RUN, places)])
    if model.config.mod != "all":
        share = 1 - run.share_that_ran(model.decider, batches).mean().item()
        lines["as trained"] = [[100 * share, value_of(model.decider)]]
    at_a_quarter = [f"{np.interp(25, *zip(*line)):.2f} ({name})" for name, line in lines.items()
                    if len(line) > 1]
    return {what: lines}, (
        f"{what.capitalize()} if 25 % of the sublayer runs are skipped: {', '.join(at_a_quarter)}; "
        f"if all run: {if_all_run:.2f}.")

@stat("What each sublayer turns for each token", draw="heat", x="token (grey: it skips)",
      y="sublayer", label="degrees", power=0.6)
def depth_map(run):
    """Dark: after this sublayer, something else is read of this token. Grey: the token skips it.

    The angle of `magnitudes`. Who skips: as in who_skips; without gains, nobody. The text is
    --text, or the start of a validation window. Source: NAG, arXiv:2606.16112, appendix A."""
    encoding = prepare.get_tokenizer(run.config["tokenizer"])
    tokens = encoding.encode_ordinary(run.text[:10_000])[:run.model.config.block_size]
    if not tokens:
        tokens = run.batches[0][0][0, :64].tolist()
    found = Pass(run.model, torch.tensor([tokens], device=run.model.device), skipping(run.model))
    names = [encoding.decode_single_token_bytes(token).decode(errors="replace") for token in tokens]
    names = [repr(name.replace("\n", "↵"))[1:-1] for name in names]   # repr writes a tab as '\t'.
    degrees = found.degrees()[:, 0]
    turned = degrees.mean(1)
    return {"": degrees.masked_fill(~found.ran[:, 0], math.nan), "columns": names}, (
        f"Sublayer {turned.argmax() + 1} turns most, by {turned.max():.0f}°. "
        f"{1 - found.ran.double().mean():.0%} of these sublayer runs are skipped.")

# ============================================================= part 5: statistics of the steps text

# A line asks for the digits after some steps, by its letter (a: 0, b: 1, ..). The next line has
# them: it is the answer, and asks in its turn (prepare.py, part 5). If lines had only four digits,
# c3141, which asks for two steps, and its answer would stand like this in a window:
#
#     column      0  1  2  3  4  5  6  7  8  9 10
#     token       c  3  1  4  1  ↵  a  1  0  8  5
#     "line"         0  1  2  3                      cells, where the line's digits stand
#     "answer"                      0  1  2  3       cells, where the answer's are predicted
#
# So from a letter to the next it is cells + 2 columns.

def in_words(n):
    """2 -> two steps"""
    words = "no one two three four five six seven eight nine ten".split()
    return f"{words[n] if n < len(words) else n} step{'s' * (n != 1)}"

def find_answers(idx, cells):
    """Windows idx (n, T) -> all N answers in them whose line before is in the window, too, or
    nobody could know them: their windows and the columns of their letters (N,), and how many steps
    lead to them (N,). (Their ends may lie beyond the window.)"""
    is_answer = (idx >= ord("a")) & (idx <= ord("z")) & (idx.roll(1, dims=1) == ord("\n"))
    is_answer[:, :cells + 2] = False   # There the line before is not all in the window.
    window, column = is_answer.nonzero().T
    return window, column, idx[window, column - (cells + 2)] - ord("a")

def steps_asked(idx, cells):
    """Windows idx (n, T) -> (n, T): how many steps lead to the digit that is predicted there, if it
    is in the second half of an answer; else -1. Digits of the first half depend on few others, so a
    model may have learned them by heart."""
    window, column, steps = find_answers(idx, cells)
    asked = F.pad(torch.full_like(idx, -1), (0, cells))   # An answer may end beyond its window.
    for cell in range(cells // 2, cells):
        asked[window, column + cell] = steps
    return asked[:, :idx.shape[1]]

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

def example_line(k, puzzle):
    """A line that asks for k steps. Its digits are those of pi, the first sixteen again and again.
    (With 6 symbols, 9 becomes 3.)"""
    of_pi = ("3141592653589793" * 7)[:puzzle["cells"]]
    return chr(ord("a") + k) + "".join(str(int(digit) % len(puzzle["table"])) for digit in of_pi)

def answers(model, lines, puzzle):
    """-> tokens (lines, cells): what a model answers to each line, the likeliest each time. (We
    write the answer's letter, because the text draws it at random.)"""
    idx = torch.tensor([[*f"{line}\na".encode()] for line in lines], device=model.device)
    return model.generate(idx, puzzle["cells"], temperature=0)[:, idx.shape[1]:].cpu()

def spelled(digits):
    """A tensor of digits -> a text. What is no digit becomes a question mark."""
    return "".join(str(digit) if 0 <= digit <= 9 else "?" for digit in digits.tolist())

@stat("How many steps it has learned", x="steps asked for", first_x=0, y="share of right digits")
def right_digits(run):
    """A line's letter says how many steps lead to the next one: a 0, b 1, c 2. A step replaces each
    digit, by a table that also asks for its left neighbour. Below the figure, the model answers a
    line; wrong digits are red.

    Digits in the second half of a line count: the first ones may be learned by heart. Steps
    learned: how far a share is above guessing (1 / symbols), summed over 1, 2, .. steps."""
    lines = [example_line(k, run.puzzle) for k in range(len(run.right))]
    said = [spelled(tokens - ord("0")) for tokens in answers(run.model, lines, run.puzzle)]
    rows = [[line, [digits, solve(line, run.puzzle)[-1]]] for line, digits in zip(lines, said)]
    knows = in_words(run.k) if min(run.right[:2]) >= KNOWN else "none"
    return {"": {"measured": run.right, "guessing": [run.guess] * len(lines)},
            "table": [["the line", "its answer"], *rows]}, (
        f"{steps_learned(run.right, run.guess):.1f} steps learned. Those that it knows, with "
        f"{KNOWN:.0%} of the digits right: {knows}.")

# --------------------------------------------------------------------------------- the lines inside

# A line that asks for two steps has a line between it and its answer, which the text never shows.
# Is it inside of the model? A probe looks for it: a linear map from the stream of one token, after
# a block, to a digit. It looks in two places: where the line's digit stands, and where the answer's
# is predicted. `where` is "line" or "answer".

WINDOWS = 1024   # of validation text: half of them to fit probes, half to see what these read

def fit_probe(vectors, digits, symbols):
    """Ridge regression. vectors (N, C); digits (N, k + 1): those that it should read there, after
    0, 1, .. k steps -> a function from vectors (n, C) to digits (n, k + 1)"""
    def with_one(vectors):
        return F.pad(vectors.double(), (0, 1), value=1.0)   # The 1 is for the constant of the map.
    inputs = with_one(vectors)
    # The scores that it should give: of the symbols after 0 steps, after 1, .. The right ones have
    # a 1, all others a 0.
    wanted = F.one_hot(digits, symbols).double().flatten(1)   # (N, (k + 1) * symbols)
    # |inputs @ weights - wanted|² + |weights|² shall be as small as can be. There its gradient is
    # 0. That is a linear system for each column.
    system = inputs.T @ inputs + torch.eye(inputs.shape[1])
    weights = torch.linalg.solve(system, inputs.T @ wanted)

    def read(vectors):
        return (with_one(vectors) @ weights).unflatten(1, (-1, symbols)).argmax(-1)

    return read

@torch.no_grad()
def vectors_and_digits(model, puzzle, windows, k):
    """Of all N cells of the lines in windows (n, T) that ask for k steps. Returns two things:

    vectors   {(where, block): (N, C)}: the stream after a block (0: the embedding), with rms 1
    digits    (N, k + 1): those of these cells after 0, 1, .. k steps"""
    vectors, digits, cells = {}, [], puzzle["cells"]
    for idx in windows.split(64):
        window, column, asked = find_answers(idx, cells)
        whole = (asked == k) & (column + cells <= idx.shape[1])   # The last digit may be a target.
        window, answer = window[whole, None], column[whole, None] + torch.arange(cells)
        # A line's digit stands one line before the answer's, which is predicted a column earlier.
        columns = {"line": answer - (cells + 1), "answer": answer}
        for block, stream in enumerate(model.walk(idx.to(model.device))[::2]):
            of_tokens = unit(model.ends.as_tensor(stream)).cpu()   # (64, T, C)
            for where in columns:
                of_cells = of_tokens[window, columns[where]]       # (lines, cells, C)
                vectors.setdefault((where, block), []).append(of_cells.flatten(0, 1))
        of_lines = idx[window, columns["line"]] - ord("0")
        digits.append(lines_after(of_lines, k, puzzle["table"]).flatten(1).T)
    return {key: torch.cat(parts) for key, parts in vectors.items()}, torch.cat(digits)

class Inside:
    """What probes read of lines that ask for k steps

    probes[where, block]          fitted to one half of the windows
    share[where, block][steps]    of the digits in the other half, as they read them"""
    def __init__(self, model, puzzle, windows, k):
        """windows (n, T): tokens of validation text. NotHere if they have too few such lines"""
        self.model, self.puzzle, self.k = model, puzzle, k
        self.blocks = range(len(model.order) + 1)
        self.probes, self.share = {}, {}
        half = len(windows) // 2
        vectors, digits = vectors_and_digits(model, puzzle, windows[:half], k)
        other_vectors, other_digits = vectors_and_digits(model, puzzle, windows[half:], k)
        if min(len(digits), len(other_digits)) < 200:
            raise NotHere(f"its validation windows have fewer than 200 digits of lines that ask "
                          f"for {in_words(k)}, with their answers")
        for key in vectors:   # Each is (where, block).
            self.probes[key] = fit_probe(vectors[key], digits, symbols=len(puzzle["table"]))
            is_right = self.probes[key](other_vectors[key]) == other_digits
            self.share[key] = is_right.double().mean(0).tolist()

    def furthest(self, block):
        """-> (steps, where) of the furthest digits that can be read after a block, or None"""
        # If both places have them, the answer comes first: there they are of use.
        places = itertools.product(range(self.k, -1, -1), ("answer", "line"))
        return next(((steps, where) for steps, where in places
                     if self.share[where, block][steps] >= KNOWN), None)

    def example(self, line):
        """What can be read while the model answers a line that asks for k steps -> such as

            dict(line="c3141", answer="1085", true="1085", blocks=[None, row, ..])

        row: the furthest digits after a block, as read here, and how often that is right elsewhere:
        dict(steps=1, where="line", share=0.99, digits="5877", true="5877"); None: nothing"""
        [answer] = answers(self.model, [line], self.puzzle)
        # Here the line is the only one of its window. The answer's last digit predicts no cell.
        idx = torch.cat([torch.tensor([*f"{line}\na".encode()]), answer[:-1]])[None]
        vectors, digits = vectors_and_digits(self.model, self.puzzle, idx, self.k)
        rows = []
        for block in self.blocks:
            row, furthest = None, self.furthest(block)
            if furthest:
                steps, where = furthest
                read = self.probes[where, block](vectors[where, block])
                row = dict(steps=steps, where=where, share=self.share[where, block][steps],
                           digits=spelled(read[:, steps]), true=spelled(digits[:, steps]))
            rows.append(row)
        return dict(line=line, answer=spelled(answer - ord("0")), true=spelled(digits[:, self.k]),
                    blocks=rows)

@stat("The lines inside, which nobody wrote", draw="heat", first_x=0, first_y=0, y="blocks run",
      x="the line after so many steps", label="share of digits read")
def lines_inside(run):
    """The text never has the lines between a line and its answer. A linear probe looks for their
    digits in the stream, where the line stands, and where the answer is predicted. Below the
    figure is one line, and the furthest digits that it reads after each block.

    Ridge regression from unit(stream) to the digit in this cell after 0, 1, .. steps; the share of
    right digits on other windows. Who doesn't know the left neighbour is right by half, so .5 is no
    step. To be read, digits need a share of .9. Lines ask for the most steps that it knows."""
    # To fit probes takes many windows, whatever --windows says.
    T, k = run.batches[0][0].shape[1], run.k
    windows, _ = prepare.windows_of(run.config["data"], "val", T, WINDOWS)
    inside = Inside(run.model, run.puzzle, windows, k)
    shares = {where: [inside.share[where, block] for block in inside.blocks]
              for where in ("line", "answer")}
    example = inside.example(example_line(k, run.puzzle))
    rows, steps = [["", example["line"], ""]], []
    for block, row in enumerate(example["blocks"]):
        read = ["nothing yet", ""]
        if row:
            read = [[row["digits"], row["true"], row["steps"] / k],
                    f"{in_words(row['steps'])}, in the {row['where']}"]
        rows.append([f"after block {block}" if block else "embedding", *read])
        steps.append(str(row["steps"]) if row else "none")
    rows.append(["the answer", [example["answer"], example["true"]], "wrong digits are red"])
    return {"where the line stands": shares["line"],
            "where the answer is predicted": shares["answer"], "table": rows}, (
        f"After block 0, 1, .. a probe reads up to step {', '.join(steps)}, of {k}, if {KNOWN:.0%} "
        f"of its digits are to be right.")

# ------------------------------------------------------------------------ does the answer need it?

class Patch(Decider):
    """All run. After one block, some columns of window i get the stream of window i - 1, and those
    of the first window that of the last. Their tokens stay."""
    def __init__(self, block, columns):
        super().__init__()
        self.block, self.columns = block, columns

    def after(self, trip, stream):
        if trip.place != 2 * self.block:   # A block is two sublayers.
            return stream
        def patched(x):   # (n, T, ...)
            x = x.clone()
            x[:, self.columns] = x.roll(1, dims=0)[:, self.columns]
            return x
        return map_stream(patched, stream)

@stat("Which block fetches the line", x="patched after block", y="share of the digits")
def patched(run):
    """A probe sees that digits are there, but not that the model uses them. So where a line stands,
    the stream of another line takes its place after one block. Whose answer comes out? At some
    block, the answer stops needing the place where the line stands.

    400 lines of random digits, with right answers, of as many steps as in the figure above; the
    second half of these answers. All sublayers run. After an early patch, the line belongs to one
    answer, and the digits so far to the other: so neither comes out whole."""
    model, k, cells = run.model, run.k, run.puzzle["cells"]
    if model.ends.stream_grows:   # as with --residual attnres
        raise NotHere("its stream has a part for each block, so there is no one state to patch")
    refuse_routers(model)
    generator = torch.Generator().manual_seed(0)
    digits = torch.randint(len(run.puzzle["table"]), (400, cells), generator=generator)
    right = lines_after(digits, k, run.puzzle["table"])[-1]
    texts = [f"{chr(ord('a') + k)}{spelled(line)}\na{spelled(answer[:-1])}".encode()
             for line, answer in zip(digits, right)]
    idx = torch.tensor([[*text] for text in texts], device=model.device)
    right = right.to(model.device) + ord("0")
    own, other = [], []
    for block in range(1, len(model.order) + 1):
        patch = Patch(block, slice(0, cells + 2))   # up to the answer's letter
        logits, _ = model(idx, trip=Trip(model, patch))
        said = logits[:, -cells:].argmax(-1)        # The last columns predict the answer.
        for shares, wanted in (own, right), (other, right.roll(1, dims=0)):
            shares.append((said == wanted)[:, cells // 2:].float().mean().item())
    block = next(block for block, share in enumerate(own, 1) if share >= 0.95 * own[-1])
    sentence = (f"Block {block} fetches the line. Patched after it, {own[block - 1]:.0%} of the "
                f"answer's digits are right.")
    if own[-1] < KNOWN:
        sentence = (f"It doesn't know these answers ({own[-1]:.0%} of their digits are right), so "
                    f"a patch shows nothing.")
    return {"": {"its own answer": own, "the other line's answer": other}}, sentence

@stat("What turns, and for whom", draw="heat", first_x=0, x="steps asked for", y="sublayer",
      label="degrees")
def gain_by_steps(run):
    """By how much a sublayer turns what is read, by the steps that the line asks for (0: a copy). A
    row of one colour treats all digits alike.

    The angle of magnitudes, a mean over where the digit is predicted; 0 if it skips, where all read
    one stream."""
    rows = run.by_steps(lambda idx, targets: Pass(run.model, idx).degrees())
    more = [row[run.k] - row[0] for row in rows]
    place = np.abs(more).argmax()
    return {"": rows}, (
        f"Sublayer {place + 1} differs most: it turns digits after {in_words(run.k)} by "
        f"{more[place]:+.0f}°, compared with copies.")

@stat("Who needs less depth", x="steps asked for", y="share of the sublayers skipped", first_x=0)
def skips_by_steps(run):
    """Copies need no depth. Do they skip more than digits that take many steps?

    A mean over where the digit is predicted. Who skips: as in who_skips."""
    decider = skipping(run.model)
    def skipped(idx, targets):
        trip = Trip(run.model, decider)
        run.model(idx, trip=trip)
        return 1 - trip.who_ran().double().mean(0)[None]
    [shares] = run.by_steps(skipped)
    return {"": {"measured": shares}}, (
        f"Copies skip {shares[0]:.0%}, digits after {in_words(run.k)} {shares[run.k]:.0%}.")

# ================================================================================= part 6: drawings

# A drawing gets results, {run: what a statistic has returned}, colors, {run: colour}, and how many
# panels may stand in a row. It returns a figure. Its other keywords are what stands in @stat(...).

# Those of Okabe and Ito, which the colour-blind can tell apart, too, and two more; and many more
COLORS = "#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #7f4f24 #333333".split()
COLORS += [to_hex(color) for color in colormaps["tab20b"].colors]
STYLES = ["o-", "s--", "^:", "v-.", "D-"]
GREYS = ["#4d4d4d", "#222222", "#777777", "#a8a8a8", "#c8c8c8"]
# Whatever your own matplotlibrc says
PRINT = {"font.size": 9.5, "axes.titlesize": 10.5, "axes.spines.top": False,
         "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "lines.linewidth": 1.5,
         "lines.markersize": 4, "legend.frameon": False,
         "text.parse_math": False}   # A $ is part of a name, or of a text.

def new_figure(titles, colors, columns, width, height, **labels):
    """-> a figure, and its axes, one for each title (run, panel): one of both may be "". width,
    height: of a panel, in inches"""
    rows = math.ceil(len(titles) / columns)
    figure = Figure((width * columns, height * rows + 0.6), layout="constrained")   # and a legend
    grid = [figure.add_subplot(rows, columns, 1 + number) for number in range(len(titles))]
    for axes, (run, panel) in zip(grid, titles):
        axes.set_title(": ".join(filter(None, (run, panel))), color=colors.get(run, "black"))
        axes.set(**labels)
    return figure, grid

def draw_lines(results, colors, columns, x="", y="", first_x=1, from_zero=True, log=False):
    """{panel: {name: line}} of each run. The colour says which run, the dashes which line. Where a
    panel has more than two lines, each run has its own: the first line in colour, the others grey.

    first_x: where [y, ...] begins; from_zero: does y begin at 0? log: it grows as a logarithm, but
    goes through 0"""
    lines = [(run, panel, name, line) for run, panels in results.items()
             for panel, named in panels.items() for name, line in named.items()]
    names = [*dict.fromkeys(name for _, _, name, _ in lines)]
    by_run = any(len(named) > 2 for panels in results.values() for named in panels.values())
    styles = dict(zip(names, itertools.cycle(STYLES)))
    greys = dict(zip(names, itertools.cycle(GREYS if by_run else GREYS[:1])))
    titles = [*dict.fromkeys((run if by_run else "", panel) for run, panel, _, _ in lines)]
    columns = min(columns, 2 if len(titles) == 4 else len(titles))
    width = 5.0 if columns == 1 else 3.7
    figure, grid = new_figure(titles, colors, columns, width, 2.9, xlabel=x, ylabel=y)
    for axes, (_, panel) in zip(grid, titles):
        if by_run:   # Panels that show the same have the same scale.
            axes.sharey(grid[[title for _, title in titles].index(panel)])
    for run, panel, name, line in lines:
        axes = grid[titles.index((run if by_run else "", panel))]
        points = np.array(line, dtype=float)   # None becomes nan.
        if points.ndim == 1:
            points = np.stack((first_x + np.arange(len(points)), points), 1)
        axes.plot(*points.T, styles[name], markersize=8 if len(points) == 1 else 4,
                  color=greys[name] if by_run and name != names[0] else colors[run])
    for axes in grid:
        axes.locator_params(axis="x", integer=True)
        if log:
            axes.set_yscale("symlog", linthresh=0.01)
            axes.yaxis.set_major_formatter("{x:g}")
        if from_zero and axes.get_ylim()[0] > 0:
            axes.set_ylim(0)
    entries = {} if by_run else {run: axes.plot([], [], color=colors[run], lw=3)[0]
                                 for run in results}
    if len(names) > 1:
        entries |= {name: axes.plot([], [], styles[name], color=greys[name])[0] for name in names}
    figure.legend(entries.values(), entries, loc="outside lower left", ncols=2 * columns)
    return figure

def draw_heat(results, colors, columns, x="", y="", label="", first_x=1, first_y=1, power=1):
    """{panel: matrix} of each run: numbers as colours. A matrix is a list of rows, and None is
    grey. A run may also have names of its "columns"; and of its "rows", which then begin at the
    top, as in a table.

    label: what the colour says; first_x, first_y: numbers of the first column and row; power: with
    0.6, small numbers differ, too"""
    matrices = {(run, panel): np.array(matrix, dtype=float)   # None becomes nan.
                for run, found in results.items() for panel, matrix in found.items()
                if panel not in ("rows", "columns")}
    largest = max(np.nanmax(matrix, initial=1e-30) for matrix in matrices.values())
    norm = PowerNorm(power, 0, largest)
    most = max(matrix.shape[1] for matrix in matrices.values())
    is_table = any("rows" in found for found in results.values())
    width = min(10, max(4.4, 0.27 * most))   # in inches
    columns = min(columns, len(matrices), 2 if is_table or width < 6 else 1)
    figure, grid = new_figure([*matrices], colors, columns, width, width if is_table else 3.4,
                              xlabel=x, ylabel=y, facecolor="white" if is_table else "0.88")
    for axes, ((run, _), matrix) in zip(grid, matrices.items()):
        names, (n_rows, n_columns) = results[run], matrix.shape
        left, low = first_x - 0.5, first_y - 0.5   # The middle of a cell is a whole number.
        image = axes.imshow(matrix, aspect="auto", norm=norm, cmap="magma_r", origin="lower",
                            extent=(left, left + n_columns, low, low + n_rows))
        axes.grid(False)
        axes.locator_params(integer=True, nbins=16)
        if "columns" in names:
            axes.set_xticks(range(1, n_columns + 1), names["columns"])
            axes.tick_params(labelsize=min(9, 50 * width / most))
        if "rows" in names:
            axes.set_yticks(range(1, n_rows + 1), names["rows"])
            axes.tick_params(axis="x", rotation=90 if n_columns > 26 else 0)
            axes.invert_yaxis()
        for (row, column), number in np.ndenumerate(matrix):
            if most <= 14 and not math.isnan(number):
                text = f"{number:.2f}".removeprefix("0") if largest < 2 else f"{number:.0f}"
                axes.text(left + column + 0.5, low + row + 0.5, text, ha="center", va="center",
                          fontsize=7, color="white" if norm(number) > 0.5 else "black")
    figure.colorbar(image, ax=grid, label=textwrap.fill(label, round(12 * figure.get_figwidth())),
                    location="bottom", aspect=40, fraction=0.05, pad=0.02)
    return figure

DRAWINGS = {"lines": draw_lines, "heat": draw_heat}

def as_picture(statistic, results, colors, columns):
    """-> a figure for the page: its png, as text, and its width in pixels. columns: how many panels
    may stand in a row"""
    drawn = {run: {panel: found for panel, found in panels.items() if panel != "table"}
             for run, panels in results.items()}
    png = io.BytesIO()
    with matplotlib.style.context(["default", PRINT]):
        figure = DRAWINGS[statistic.draw](drawn, colors, columns, **statistic.options)
        figure.savefig(png, format="png", dpi=144)
    return dict(png=base64.b64encode(png.getvalue()).decode(), width=96 * figure.get_figwidth())

# =============================================================== part 7: the page, and the command

@dataclass
class AnalyzeConfig:
    runs: list = flag(None, "run folders")
    out: str = flag("figures", "folder of the page, the figures and the numbers")
    only: str = flag("", "some statistics, such as reads,skip_curve; without it all of them")
    text: str = flag("", "a text, or a file with one, for the map of tokens and sublayers")
    windows: int = flag(0, "validation windows; 0: as many as in training", 0, 1e6)
    data: str = flag("", "the data set of these runs, if it isn't where it was in training")

def main(argv=None):
    if "--list" in (sys.argv if argv is None else argv):   # needs no runs
        print("\n".join(f"{name:18}{statistic.title}" for name, statistic in STATS.items()))
        return
    [args] = parse((AnalyzeConfig,), argv, __doc__, positional=("runs",))
    wanted = args.only.replace(" ", "").split(",") if args.only else list(STATS)
    for name in wanted:
        if name not in STATS:
            refuse(f"--only {name}: no such statistic; choose from {', '.join(STATS)}")
    runs, out = open_runs(args), Path(args.out)
    make_folder(out)   # now, not after minutes of measuring
    about = about_runs(runs)
    found = {name: show(name, runs, about) for name in STATS if name in wanted}

    def write(name, content):
        with prepare.whole_file(out / name) as file:
            file.write(content)

    numbers = dict(runs=about, statistics={name: each["results"] for name, each in found.items()},
                   missing={name: each["missing"] for name, each in found.items()})
    write("numbers.json", json.dumps(numbers, indent=1).encode())
    for name, each in found.items():
        if each["pictures"]:
            write(f"{name}.png", base64.b64decode(each["pictures"][0]["png"]))
    template = (Path(__file__).parent / "analyze.html").read_text(encoding="utf-8")
    # JSON may write < as \u003c. So a </script> in a text doesn't end the script of the page.
    report = json.dumps(dict(runs=about, statistics=found)).replace("<", "\\u003c")
    write("index.html", template.replace("REPORT", report).encode())
    say(f"{out}/index.html shows {', '.join(runs)}; open it in a browser")

def make_folder(out):
    """SystemExit if it has files, but no page of ours"""
    out.mkdir(parents=True, exist_ok=True)
    numbers = out / "numbers.json"   # the first file of a page
    is_ours = numbers.exists() and '"statistics":' in numbers.read_text(errors="replace")
    if any(out.iterdir()) and not is_ours:
        refuse(f"--out {out}: has files, but no page of ours; take another folder")

def open_runs(args):
    """-> {name: Run}, where the name is the folder's, or its whole path if two have the same"""
    names, runs = [Path(path).resolve().name for path in args.runs], {}
    text = prepare.text_or_file(args.text)
    for path, name in zip(args.runs, names):
        model, config = open_run(path)
        config["data"], warning = data_of_run(path, config, args.data, model)
        n = max(4, args.windows or config["eval_windows"])   # four, because some measure a quarter
        windows = prepare.windows_of(config["data"], "val", config["block_size"], n)
        puzzle = prepare.load_meta(config["data"]).get("steps")
        run = Run(model, config, windows, puzzle, text, path)
        if not math.isfinite(run.loss):
            refuse(f"{path}: its loss is {run.loss}, so there is nothing to see; train it with a "
                   f"lower --lr")
        progress = progress_of(SimpleNamespace(**config), config["step"], config["flops"])
        if not warning and progress < 1:
            warning = f"{path} has had {progress:.0%} of its training: it goes on, or was stopped"
        run.warning = warning   # also if its data, or its loss, have changed since the training
        if warning:
            print(warning, file=sys.stderr)
        runs[name if names.count(name) == 1 else path] = run
    return runs

def about_runs(runs):
    """-> {run: what the page says of it above all figures}"""
    return {name: dict(config=run.config, color=color, data=os.path.relpath(run.config["data"]),
                       loss=run.loss, bits=run.bits, warning=run.warning,
                       iterations=max(run.log, default=0), parameters=num_params(run.model),
                       flops=flops_per_token(run.model))
            for (name, run), color in zip(runs.items(), itertools.cycle(COLORS))}

def show(name, runs, about):
    """Measures and draws one statistic -> all that the page shows of it. One that fails becomes a
    sentence, so that the others have their page all the same."""
    statistic, results, sentences, missing, pictures = STATS[name], {}, {}, {}, []
    for run_name, run in runs.items():
        print(f"{name} of {run_name}", file=sys.stderr)
        try:
            results[run_name], sentences[run_name] = as_lists(statistic.measure(run))
        except NotHere as why:
            missing[run_name] = str(why)
        except (Exception, SystemExit) as error:   # A statistic of your own may raise any.
            traceback.print_exc()
            missing[run_name] = f"it ended with {error!r:.200}"
    colors = {run: each["color"] for run, each in about.items()}
    try:
        if results:   # one for a laptop, and one for a phone
            pictures = [as_picture(statistic, results, colors, columns) for columns in (3, 1)]
    except Exception as error:
        why = (f"it can't be drawn ({error!r:.100}): lines are {{panel: {{name: line}}}}, and a "
               f"heat map {{panel: matrix}}, of lists, arrays and tensors")
        missing |= dict.fromkeys(results, why)
        results, sentences = {}, {}
    for run_name, why in missing.items():
        print(f"no {name} of {run_name}, because {why}", file=sys.stderr)
    return dict(title=statistic.title, caption=statistic.caption, definition=statistic.definition,
                results=results, sentences=sentences, missing=missing, pictures=pictures)

def as_lists(returned):
    """What a statistic has returned -> what is drawn, with lists for tensors and arrays, and None
    for what is no number, as numbers.json has it; and its sentence, if it has one"""
    drawn, sentence = returned if isinstance(returned, tuple) else (returned, "")
    text = json.dumps(drawn, default=lambda value: value.tolist())
    return json.loads(text, parse_constant=lambda nan: None), str(sentence)

if __name__ == "__main__":
    start(main)
