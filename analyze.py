"""Measures what each layer of one or several runs does, and draws a page of figures.

    python analyze.py runs/steps-pre runs/steps-nag --out figures       # open figures/index.html
    python analyze.py runs/pre runs/attnres --only magnitudes,reads     # some statistics
    python analyze.py --list                                            # names and titles of all

Writes OUT/index.html, numbers.json, a picture per statistic and, for the puzzle, play.html.
Sublayers are called a0, m0, a1, m1, ...: attention and MLP of block 0, of block 1, ... Runs trained
with --mod skip tokens here, too.

A statistic is a function of a Run (a model and windows of validation text). Copy this one, paste it
above "# drawings" below, and run --only length:

    @statistic("Length of the stream", depth="sublayer", x="rms")
    def length(run):
        '''Does the residual stream grow with depth?

        Its rms after each sublayer, a mean over the tokens that run it.'''
        def of_batch(idx, targets):
            rec = Record(run.model, idx)
            lengths = [rms(as_tensor(stream))[mask].mean()
                       for stream, mask in zip(rec.streams[1:], rec.masks)]
            return torch.stack(lengths)
        line = mean_over(run.quarter, of_batch)
        return {"": {"stream": line}}, f"It grows {line[-1] / line[0]:.1f}-fold."

It returns what is drawn and, if you like, a sentence. Lines: {panel: {name: numbers or (x, y)
pairs}}; with draw="map", {panel: matrix} and names of "rows" and "columns". A single panel has no
title: "". More options are keywords of draw_lines and draw_map.
"""

import base64
import copy
import inspect
import io
import itertools
import json
import math
import re
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import matplotlib.style
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure   # not pyplot: a notebook keeps its own backend

import prepare
from flags import UserError, flag, make, parse
from flags import run as run_script
from model import (AttnRes, DenseFormer, DropBlocks, GatedResidual, GatePolicy, HyperConnections,
                   Router, Trace, apply_rotary, attention, expand_mask, flops_per_token, map_stream,
                   num_params, rms_norm)
from train import evaluate, fork_rng, open_run, steps_asked

# -----------------------------------------------------------------------------
# statistics and runs

class Statistic(NamedTuple):
    measure: callable
    title: str
    caption: str      # the first paragraph of the docstring
    definition: str   # the others
    draw: str
    rare: bool        # folded on the page
    options: dict

STATISTICS = {}   # in the order of the page

def statistic(title, draw="lines", rare=False, **options):
    """A decorator that registers a statistic. draw: a key of DRAWINGS; options: its keywords"""
    def register(measure):
        caption, _, definition = (inspect.getdoc(measure) or title).partition("\n\n")
        STATISTICS[measure.__name__] = Statistic(
            torch.no_grad()(measure), title, caption, definition, draw, rare, options)
        return measure
    return register

class NotHere(UserError):
    """One sentence: why a statistic does not exist for a run."""

def mean_over(batches, of_batch):
    """The mean over windows of of_batch(idx, targets), a number or a tensor."""
    torch.manual_seed(0)   # for --mod random
    total = sum(len(idx) * of_batch(idx, targets) for idx, targets in batches)
    return total / sum(len(idx) for idx, _ in batches)

def dense(trace):   # a policy: no token skips
    return None

KNOWN = 0.9   # a model, or a probe, knows a step if this share of its digits is right

class Run:
    """A trained model, and validation windows to measure it on"""

    def __init__(self, model, settings, windows, meta, log=()):
        """model: in evaluation mode. windows: x, y (n, T). meta: of the data set (meta.json). log:
        the lines of metrics.jsonl"""
        self.model, self.settings, self.log = model, settings, list(log)
        self.tokenizer, self.puzzle = meta["tokenizer"], meta.get("steps")
        x, y = windows

        def batches(first, step):
            return list(zip(x[first::step].split(8), y[first::step].split(8)))

        self.batches = batches(0, 1)
        self.quarter = batches(0, 4)         # for what is slow
        self.other_quarter = batches(2, 4)   # for choosing what to remove
        token_bytes = prepare.token_bytes(self.tokenizer, model.config.vocab_size)
        self.metrics = evaluate(model, x, y, token_bytes, self.puzzle)
        self.n_layers = 2 * len(model.block_order)
        self.names = [f"{kind}{i}" for i in range(self.n_layers // 2) for kind in "am"]

    def loss(self, policy=None, removed=(), batches=None):
        """Nats per token. policy: in place of the model's own; removed: layer_idx to leave out"""
        def of_batch(idx, targets):
            return self.model(idx, targets, trace=Trace(self.model, policy, removed))[1].item()
        return mean_over(batches or self.quarter, of_batch)

    def loss_rise(self, policy=None, removed=()):
        return self.loss(policy, removed) - self.base_loss

    @cached_property
    def base_loss(self):   # of the model's own policy, on the quarter
        return self.loss()

    def layers_of_block(self, block_idx):
        """The places of a block's sublayers in the order of running (several with --repeat)"""
        places = [i for i, b in enumerate(self.model.block_order) if b == block_idx]
        return [place for i in places for place in (2 * i, 2 * i + 1)]

    @cached_property
    def block_ablation(self):
        """How much the loss rises without each block"""
        return [self.loss_rise(removed=self.layers_of_block(block_idx))
                for block_idx in range(len(self.model.blocks))]

    def run_rates(self, policy=None, batches=None):
        """The share of tokens that run each sublayer (2L,)"""
        def of_batch(idx, targets):
            trace = Trace(self.model, policy)
            self.model(idx, trace=trace)
            return torch.tensor([trace.run_rate(i) for i in range(self.n_layers)])
        return mean_over(batches or self.batches, of_batch)

    def need_puzzle(self):
        if not self.puzzle:
            raise NotHere("it is for the puzzle (prepare.py steps)")
        if self.model.config.block_size < 2 * self.puzzle["cells"] + 2:
            raise NotHere("its windows are shorter than a line and its answer")

    def by_steps(self, of_batch):
        """of_batch(idx, targets) -> (B, T). Its mean over the digits after 0, 1, 2, ... steps"""
        self.need_puzzle()
        torch.manual_seed(0)
        values = torch.cat([of_batch(idx, targets).double() for idx, targets in self.batches])
        asked = torch.cat([steps_asked(idx, self.puzzle["cells"]) for idx, _ in self.batches])
        return [values[asked == n].mean().item() for n in range(self.puzzle["most"] + 1)]

    def right_by_steps(self, policy=None, removed=()):
        """The share of right digits after 0, 1, 2, ... steps"""
        def is_right(idx, targets):
            logits, _ = self.model(idx, trace=Trace(self.model, policy, removed))
            return logits.argmax(-1) == targets
        return self.by_steps(is_right)

    @cached_property
    def right(self):
        return self.right_by_steps()

    @cached_property
    def asked(self):
        """Steps that lines ask for in probe and patching: as many as this run (after open_runs: as
        all runs) knows, at least 1"""
        known = list(itertools.takewhile(lambda share: share >= KNOWN, self.right))
        return max(1, len(known) - 1)

    def value(self, policy=None, removed=()):
        """Steps learned on the puzzle, and on other text the rise of the loss"""
        if not self.puzzle:
            return self.loss_rise(policy, removed)
        return steps_of(self.right_by_steps(policy, removed))

def steps_of(right):
    """Shares of right digits after 0, 1, 2, ... steps -> steps learned"""
    if any(map(math.isnan, right)):
        raise NotHere("its windows lack lines of some letters; give more --windows")
    return sum(max(0.0, share - 0.1) / 0.9 for share in right[1:])

def skip_policy(model):
    """The policy of the training, or gates below 0.05 (3 degrees) where there are gates"""
    if model.policy is not None and not isinstance(model.policy, DropBlocks):
        return model.policy
    return GatePolicy(model.config, below=0.05) if hasattr(model.final, "gate") else None

# -----------------------------------------------------------------------------
# recording a forward pass

def rms(x):
    return x.square().mean(-1).sqrt()

def as_tensor(stream):
    """The stream as one tensor (B, T, C): the mean of several streams, the sum of all sources of
    Attention Residuals, the vector (direction and length) of NAG"""
    if torch.is_tensor(stream):
        return stream.mean(-2) if stream.dim() == 4 else stream
    first, second = stream[0], stream[1]
    if not torch.is_tensor(first):
        return sum(first)
    if torch.is_tensor(second) and second.shape[-1] == 1:
        return first * second.exp()
    return first

def angle(x, y):
    """Degrees between vectors (..., C). The arc cosine would lose the digits of small angles."""
    x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
    return 2 * torch.atan2((x - y).norm(dim=-1), (x + y).norm(dim=-1)).rad2deg()

class Record:
    """One forward pass: streams (2L + 1: the embedding's, and one after each sublayer), updates
    (2L, each (B, T, C), zeros where a token skips), residuals (2L) and masks (2L, B, T)"""

    def __init__(self, model, idx, policy=None, removed=()):
        self.model, self.embedding = model, model.wte(idx)
        trace = Trace(model, policy, removed, keep_streams=True)
        self.updates = [torch.zeros_like(self.embedding) for _ in range(2 * len(model.block_order))]

        def keep(module, inputs, output):   # an MLP gets (N, C): only the tokens that run
            update = self.updates[trace.layer_idx]
            if output.dim() == 3:
                update.copy_(output)
            else:
                update[trace.masks[trace.layer_idx]] = output

        sublayers = [f for block in model.blocks for f in (block.attn, block.mlp)]
        hooks = [f.register_forward_hook(keep) for f in sublayers]
        try:
            model(idx, trace=trace)
        finally:
            for hook in hooks:
                hook.remove()
        self.streams = trace.streams
        full = torch.ones(idx.shape, dtype=torch.bool)
        self.masks = torch.stack([full if mask is None else full & mask for mask in trace.masks])
        self.residuals = [residual for i in model.block_order for residual in
                          (model.blocks[i].attn_residual, model.blocks[i].mlp_residual)]

    @cached_property
    def reads(self):
        """What each sublayer, and last the head, gets (2L + 1)"""
        pairs = [read_and_write(*each) for each in zip(self.residuals, self.streams, self.updates)]
        return [read for read, _ in pairs] + [self.model.final.reduce(self.streams[-1])]

    def rotations(self):
        """The angle by which each sublayer rotates the stream, (2L, B, T) degrees"""
        return torch.stack([angle(x, y) for x, y in
                            itertools.pairwise(map(as_tensor, self.streams))])

    def identity_error(self):
        """The largest relative error of streams made from recorded streams and updates: 0 but for
        rounding. (Not with a router, which scales updates.)"""
        errors = []
        for i, (residual, update) in enumerate(zip(self.residuals, self.updates)):
            x, y = self.streams[i], as_tensor(self.streams[i + 1])
            new = as_tensor(self.where_run(i, read_and_write(residual, x, update)[1], x))
            errors.append(((new - y).norm() / y.norm()).item())
        return max(errors)

    def where_run(self, layer, new, old):
        """The stream after a layer: new where tokens ran it, old where they skipped"""
        mask = self.masks[layer]
        if mask.all() or not self.residuals[layer].can_skip:
            return new
        return map_stream(lambda new, old: torch.where(expand_mask(mask, new), new, old), new, old)

def read_and_write(residual, stream, update):
    """-> what the sublayer reads, and the stream after it returned `update`"""
    read = []

    def f(x):
        read.append(x.clone())
        return update.clone()   # a residual may add to it in place

    stream = residual(stream, f)
    return read[0], stream

def effects(rec):
    """(2L + 1 readers, 2L + 1 writers): how much a reader's input changes if one writer's update is
    set to zero, |read - read without| / |read|, a mean over tokens. nan: the writer comes later.

    The residuals run again from that writer on (0: the embedding). All other updates stay as
    recorded: no attention and no MLP is computed again."""
    if isinstance(rec.model.policy, Router):
        raise NotHere("a router changes the stream, too, not only the residuals do")
    n = len(rec.updates)
    table = torch.full((n + 1, n + 1), math.nan, dtype=rec.embedding.dtype)
    for writer in range(n + 1):
        if writer == 0:
            stream = rec.model.final.expand(torch.zeros_like(rec.embedding))
        else:
            stream = rec.streams[writer - 1]
        for layer in range(max(0, writer - 1), n):
            is_writer = layer == writer - 1
            update = torch.zeros_like(rec.embedding) if is_writer else rec.updates[layer]
            read, new = read_and_write(rec.residuals[layer], stream, update)
            if not is_writer:
                table[layer, writer] = part_gone(rec.reads[layer], read)
            stream = rec.where_run(layer, new, stream)
        table[n, writer] = part_gone(rec.reads[n], rec.model.final.reduce(stream))
    return table

def part_gone(usual, without):
    return ((usual - without).norm(dim=-1) / usual.norm(dim=-1).clamp_min(1e-30)).mean()

# -----------------------------------------------------------------------------
# the puzzle: the answer, and the lines inside

@statistic("How many steps it has learned", x="steps asked for", y="share of right digits")
def steps(run):
    """A line's letter asks for a number of steps: a 0, b 1, c 2. A step replaces each digit, by a
    table that also looks at its left neighbour. Each step needs the digits of the step before, so
    more steps need more depth.

    Digits of the second half of a line count; the first ones may be learned by heart. Steps
    learned: (share - 0.1) / 0.9, summed over 1, 2, ... steps, as 0.1 is right by guessing."""
    return {"": {"right": run.right}}, (
        f"{steps_of(run.right):.1f} of {run.puzzle['most']} steps learned.")

def lines_after(digits, n_steps, table):
    """digits (..., cells) -> (n_steps + 1, ..., cells): after 0, 1, ... steps"""
    lines = [torch.as_tensor(digits)]
    for _ in range(n_steps):
        lines.append(prepare.next_line(lines[-1], table))
    return torch.stack(lines)

def answered_lines(puzzle, n_steps, n):
    """n random lines that ask for n_steps, with right answers -> token ids (n, 2 * cells + 2), and
    the digits after 0, 1, ... steps (n_steps + 1, n, cells). A line's digits stand in columns 1 to
    cells; the answer's are predicted in the last ones (its last digit is not among the tokens)."""
    rng = torch.Generator().manual_seed(0)
    digits = torch.randint(10, (n, puzzle["cells"]), generator=rng)
    lines = lines_after(digits, n_steps, puzzle["table"])
    letter, newline = torch.full((n, 1), ord("a")), torch.full((n, 1), ord("\n"))
    line, answer = digits + ord("0"), lines[-1, :, :-1] + ord("0")
    return torch.cat([letter + n_steps, line, newline, letter, answer], dim=1), lines

def vectors_of(model, idx, cells):
    """Windows idx (n, T) of answered_lines -> {(where, block_idx): (n * cells, C)}: the stream
    after a block, with rms 1, at the line's digits (where = "line"), or where the answer's are
    predicted ("answer")"""
    trace, vectors = Trace(model, keep_streams=True), {}
    model(idx, trace=trace)
    for block_idx, stream in enumerate(trace.streams[2::2]):
        x = rms_norm(as_tensor(stream))
        vectors["line", block_idx] = x[:, 1:cells + 1].flatten(0, 1)
        vectors["answer", block_idx] = x[:, cells + 2:].flatten(0, 1)
    return vectors

def fit_probe(vectors, digits):
    """A linear probe by ridge regression: vectors (N, C), digits (N, k) -> weights (C + 1, k, 10),
    whose scores are near 1 for the right digit and near 0 for the others"""
    inputs = F.pad(vectors.double(), (0, 1), value=1.0)
    wanted = F.one_hot(digits, 10).double().flatten(1)
    gram = inputs.T @ inputs + torch.eye(inputs.shape[1])
    return torch.linalg.solve(gram, inputs.T @ wanted).unflatten(1, (-1, 10))

def read_probe(weights, vectors):   # -> digits (n, k)
    inputs = F.pad(vectors.double(), (0, 1), value=1.0)
    return torch.einsum("nc,ckd->nkd", inputs, weights).argmax(-1)

@torch.no_grad()
def fit_probes(model, puzzle, n_steps):
    """Probes for lines that ask for n_steps, fitted on 500 lines, and what they read of 500 others
    -> {(where, block_idx): weights}, {(where, block_idx): shares of right digits after 0, 1, ...
    steps}"""
    idx, lines = answered_lines(puzzle, n_steps, 1000)
    digits, probes, shares = lines.flatten(1).T, {}, {}
    half = len(digits) // 2
    for key, vectors in vectors_of(model, idx, puzzle["cells"]).items():
        probes[key] = fit_probe(vectors[:half], digits[:half])
        is_right = read_probe(probes[key], vectors[half:]) == digits[half:]
        shares[key] = is_right.double().mean(0).tolist()
    return probes, shares

def furthest(shares, block_idx):
    """-> (steps, where) of the furthest digits that a probe reads after a block, or None"""
    n_steps = len(shares["line", block_idx])
    for steps, where in itertools.product(reversed(range(n_steps)), ("answer", "line")):
        if shares[where, block_idx][steps] >= KNOWN:
            return steps, where
    return None

def read_inside(model, puzzle, line, probes, shares):
    """What probes read while the model answers a line such as f314159265358 -> a list of
    (block_idx, digits, steps), or (block_idx, "", None) where no line can be read; the answer"""
    cells, n_steps = puzzle["cells"], ord(line[0]) - ord("a")
    idx = torch.tensor([[*f"{line}\na".encode()]])   # the answer's letter is drawn at random
    idx = model.generate(idx, cells, temperature=0, n_vocab=256)
    answer = re.sub("[^0-9]", "?", bytes(idx[0, -cells:].tolist()).decode("latin1"))
    vectors = vectors_of(model, idx[:, :-1], cells)
    rows = []
    for block_idx in range(len(model.block_order)):
        digits, steps = "", None
        if furthest(shares, block_idx):
            steps, where = furthest(shares, block_idx)
            read = read_probe(probes[where, block_idx], vectors[where, block_idx])
            digits = "".join(map(str, read[:, steps].tolist()))
        rows.append((block_idx, digits, steps))
    return rows, answer

@torch.no_grad()
def lines_inside(model, data, line):
    """The rows of read_inside, for lines of a data set"""
    puzzle = prepare.load_meta(data)["steps"]
    probes, shares = fit_probes(model, puzzle, ord(line[0]) - ord("a"))
    return read_inside(model, puzzle, line, probes, shares)[0]

@statistic("Lines inside the model (linear probe)", draw="map", x="line after so many steps",
           y="block", label="share of digits read")
def probe(run):
    """The text never shows the lines between a line and its answer. A linear probe looks for their
    digits in the stream: where the line stands, and where the answer is predicted. Wrong digits
    are red.

    Ridge regression from the stream, with rms 1, to the digit of this cell after 0, 1, ... steps;
    shares of right digits of other lines. A probe that ignores the left neighbour gets half of
    them. All runs get lines of the same letter, which all of them know if they can."""
    run.need_puzzle()
    n_steps, n_blocks = run.asked, len(run.model.block_order)
    probes, shares = fit_probes(run.model, run.puzzle, n_steps)
    panels = {f"at the {where}": [shares[where, b] for b in range(n_blocks)]
              for where in ("line", "answer")}
    line = chr(ord("a") + n_steps) + "3141592653589793"[:run.puzzle["cells"]]
    rows, answer = read_inside(run.model, run.puzzle, line, probes, shares)
    first = torch.tensor([int(digit) for digit in line[1:]])
    after = ["".join(map(str, digits.tolist()))
             for digits in lines_after(first, n_steps, run.puzzle["table"])]
    digits = [("line", line, line, "")]
    digits += [(f"after block {b}", read, after[steps], f"the line after {steps} steps")
               if read else (f"after block {b}", "", "", "none can be read")
               for b, read, steps in rows]
    digits.append(("answer", answer, after[-1], f"the line after {n_steps} steps"))
    read = ", ".join("none" if steps is None else str(steps) for _, _, steps in rows)
    axes = dict(rows=list(range(n_blocks)), columns=list(range(n_steps + 1)))
    return panels | axes | dict(digits=digits), (
        f"Steps that can be read after blocks 0 to {n_blocks - 1}: {read} (of {n_steps}).")

@statistic("Which block fetches the line (activation patching)", depth="block",
           x="share of right digits, patched after the block")
def patching(run):
    """A probe sees that digits are there, not that the model uses them. So after a block, the
    stream at a line is replaced by that of another line. Whose answer comes out?

    400 lines of random digits with right answers, of the same letter for all runs; the second half
    of the answers' digits. (Its first half, which is in the text, belongs to its own line: so after
    an early patch neither answer comes out whole.) No token skips."""
    run.need_puzzle()
    if isinstance(run.model.policy, Router):
        raise NotHere("a router changes the stream, too")
    model, cells, n_steps = run.model, run.puzzle["cells"], run.asked
    idx, lines = answered_lines(run.puzzle, n_steps, 400)
    right, own, other = lines[-1, :, cells // 2:], [], []
    for block_idx in range(len(model.block_order)):
        logits = patched_logits(model, idx, block_idx, slice(0, cells + 2))
        answer = logits[:, -right.shape[1]:].argmax(-1) - ord("0")
        own.append((answer == right).float().mean().item())
        other.append((answer == right.roll(1, dims=0)).float().mean().item())
    fetched = next(b for b, share in enumerate(own) if share >= 0.95 * own[-1])
    sentence = (f"Block {fetched} fetches the line, which is no longer needed after it "
                f"({own[fetched]:.0%} of the digits are right).")
    if own[-1] < KNOWN:
        sentence = f"It does not know these answers ({own[-1]:.0%} right), so this shows nothing."
    return {"": {"its own answer": own, "the other line's answer": other}}, sentence

def patched_logits(model, idx, block_idx, columns):
    """After a block, window i gets the stream of window i - 1 in these columns."""
    def patch(x):
        x = x.clone()
        x[:, columns] = x.roll(1, dims=0)[:, columns]
        return x
    stream = model.final.expand(model.wte(idx))
    for i, b in enumerate(model.block_order):
        stream = model.blocks[b](stream, model.rotary[:idx.shape[1]])
        if i == block_idx:
            stream = map_stream(patch, stream)
    return model.logits(stream)

@statistic("Do hard digits skip less?", x="steps asked for", y="share of sublayers skipped")
def skips_by_steps(run):
    """Copies need no depth. Do they skip more sublayers than digits that take many steps? Then the
    line falls.

    A mean over the tokens that predict the digit. Skipping: see skip_rate."""
    policy = skip_policy(run.model)
    if policy is None:
        raise NotHere("no token skips, and its residual has no gate")
    def skipped(idx, targets):
        return 1 - Record(run.model, idx, policy).masks.double().mean(0)
    shares = run.by_steps(skipped)
    return {"": {"skipped": shares}}, (
        f"Copies skip {shares[0]:.0%}, digits after {run.asked} steps {shares[run.asked]:.0%}.")

# -----------------------------------------------------------------------------
# any text: training, streams, reads and writes

@statistic("Validation loss", y="nats per token", from_zero=False)
def curves(run):
    """By iterations, by FLOPs and by seconds: which run leads may depend on the horizontal axis.

    As logged in training, without the loss of the first weights. FLOPs are those of the matrix
    products, without skipped ones; seconds are those of the machine that trained."""
    lines = [line for line in run.log if "val_loss" in line and line["step"] > 0]
    if not lines:
        raise NotHere("its metrics.jsonl has no evaluation")
    panels = {f"by {name}": {"loss": [(line[key], line["val_loss"]) for line in lines]}
              for name, key in (("iterations", "step"), ("FLOPs", "flops"), ("seconds", "seconds"))}
    return panels, (f"{lines[-1]['val_loss']:.3f} nats after {lines[-1]['step']:,} iterations and "
                    f"{lines[-1]['seconds']:,.0f} seconds.")

@statistic("PreNorm dilution: how large updates and the stream are", depth="sublayer")
def magnitudes(run):
    """In PreNorm the stream is the sum of all updates, so it grows with depth, and an update of the
    same size rotates it less: dilution. A trained model can answer with larger updates. Attention
    Residuals start a new sum after each group; NAG's gate sets the rotation.

    Means over tokens. Update: the output of the attention or MLP, 0 where a token skips. Stream:
    after the sublayer; the mean of several streams, and the newest source of Attention Residuals.
    Change: |stream after - stream before| / |stream before|, and rotation: the angle between both,
    where the stream of Attention Residuals is the sum of all sources. Source: arXiv:2603.15031."""
    errors = []

    def of_batch(idx, targets):
        rec = Record(run.model, idx)
        errors.append(rec.identity_error())
        x = torch.stack([as_tensor(stream) for stream in rec.streams])
        newest = torch.stack([newest_sum(stream) for stream in rec.streams[1:]])
        change = (x[1:] - x[:-1]).norm(dim=-1) / x[:-1].norm(dim=-1)
        values = rms(torch.stack(rec.updates)), rms(newest), change, rec.rotations()
        return torch.stack([value.mean((1, 2)) for value in values])

    update, stream, change, rotation = mean_over(run.quarter, of_batch).tolist()
    growth = sum(stream[-2:]) / sum(stream[:2])
    sentence = (f"From the first block to the last, the stream grows {growth:.1f}-fold, and an "
                f"update's rotation of it goes from {sum(rotation[:2]) / 2:.0f}° to "
                f"{sum(rotation[-2:]) / 2:.0f}°.")
    numbered = list(enumerate(update))
    return {"update (rms)": {"attention": numbered[::2], "MLP": numbered[1::2]},
            "stream (rms)": {"stream": stream}, "change / stream": {"stream": change},
            "rotation (degrees)": {"stream": rotation}}, f"{sentence} {identity(errors)}"

def newest_sum(stream):
    """What updates are added to: as_tensor, but the newest source of Attention Residuals"""
    has_sources = isinstance(stream, tuple) and isinstance(stream[0], tuple)
    return stream[0][-1] if has_sources else as_tensor(stream)

def identity(errors):
    return f"(Check: recorded updates make the recorded streams, largest error {max(errors):.0e}.)"

@statistic("Who reads whom", draw="map", x="writer", y="reader", power=0.6,
           label="part of what the reader gets that is gone without the writer")
def reads(run):
    """Row: a sublayer that reads, last the head. Column: what wrote it; e is the embedding. In
    PreNorm all sublayers read one growing sum, so rows are alike and fade downward. Where readers
    choose, rows differ. Dark diagonal: each sublayer mostly reads the one before. Dark column: all
    later sublayers read this one.

    |read - read without the writer| / |read|, a mean over tokens. The residuals run again with
    zeros for the writer's update; attentions and MLPs don't, so their updates stay. Gates and
    softmax weights may react. It measures a sublayer's input, not whether it uses it."""
    errors = []

    def of_batch(idx, targets):
        rec = Record(run.model, idx)
        errors.append(rec.identity_error())
        return effects(rec)

    table = mean_over(run.quarter, of_batch)
    next_reader = table.diagonal()[1:]
    first, second = next_reader.chunk(2)
    names = dict(columns=["e", *run.names], rows=[*run.names, "head"])
    return {"": table} | names, (
        f"Without a sublayer, the next reader loses {first.mean():.0%} of its input in the first "
        f"half of the depth, and {second.mean():.0%} in the second. {identity(errors)}")

@statistic("Weights over depth", draw="map", x="source or stream", y="reader",
           label="weight, a mean over tokens")
def depth_weights(run):
    """The weights with which sublayers read and write. Attention
    Residuals: the softmax over all sources so far. Hyper-connections, Gated Residual: how strongly
    each of the n streams is read and written. DenseFormer: the weights of earlier outputs.

    A mean over tokens (of Gated Residual also over channels). Rows are sublayers, the last one is
    the head. e: the embedding. A source of Block Attention Residuals has the name of its newest
    sublayer."""
    residuals = [*run.model.residuals(), run.model.final]
    if isinstance(run.model.final, AttnRes):
        return attnres_weights(run, residuals)
    if isinstance(run.model.final, DenseFormer):
        n = len(run.model.blocks)
        rows = [F.pad(residual.weights, (0, n - residual.block_idx - 1), value=math.nan)
                for residual in residuals[1::2]]
        blocks = list(range(n))
        return {"": torch.stack(rows)} | dict(columns=["e", *blocks], rows=blocks), ""
    if not isinstance(run.model.final, (HyperConnections, GatedResidual)):
        raise NotHere("its residuals have no weights over depth")

    def of_batch(idx, targets):
        rec = Record(run.model, idx)
        return torch.stack([torch.stack([weight.mean((0, 1)) for weight in
                                         read_and_write_weights(residual, X)])
                            for residual, X in zip(rec.residuals, rec.streams)], dim=1)

    read, write = mean_over(run.quarter, of_batch)   # (2L, n)
    n, most_read = read.shape[1], set(read.argmax(-1).tolist())
    return {"read": read, "write": write, "rows": run.names, "columns": list(range(n))}, (
        f"Sublayers differ in the stream that they read most: {len(most_read)} of {n} occur.")

def read_and_write_weights(residual, X):   # -> two tensors (B, T, n)
    if isinstance(residual, HyperConnections):
        read, write, _ = residual.weights(X)
        return read, write
    r = residual.normalized(X)
    return residual.read_gate(r).mean(-1), residual.write_weights(r)

def attnres_weights(run, residuals):
    n_sources = len(Record(run.model, run.quarter[0][0][:1]).streams[-1][0])

    def of_batch(idx, targets):
        rows, rec = [], Record(run.model, idx)
        for residual, (_, keys) in zip(residuals, rec.streams):
            weights = residual.weights(keys) if len(keys) > 1 else torch.ones(1, 1, 1)
            rows.append(F.pad(weights.mean((1, 2)), (0, n_sources - len(keys)), value=math.nan))
        return torch.stack(rows)

    table = mean_over(run.quarter, of_batch)
    group = run.model.final.group
    columns = ["e", *run.names[group - 1::group]]
    if len(columns) < n_sources:
        columns.append(run.names[-1])
    newest = np.mean([row[~row.isnan()][-1].item() for row in table[1:]])
    equal = np.mean([1 / (~row.isnan()).sum().item() for row in table[1:]])
    return {"": table} | dict(columns=columns, rows=[*run.names, "head"]), (
        f"The newest source gets {newest:.0%} of the weight on average ({equal:.0%} if all were "
        f"equal), the embedding {table[1:, 0].mean():.0%}.")

@statistic("Ablation: the loss without a sublayer or a block", depth="block", log=True,
           x="rise of the loss (nats)")
def ablation(run):
    """A removed sublayer leaves the stream as it is, and nothing is trained afterwards. Near 0: it
    could go.

    As in LLM-Drop, arXiv:2406.15786. With --repeat, a block is removed wherever it runs."""
    layers = [run.layers_of_block(block_idx) for block_idx in range(len(run.model.blocks))]
    lines = {name: [run.loss_rise(removed=of_block[i::2]) for of_block in layers]
             for i, name in enumerate(("attention", "MLP"))}
    rises = run.block_ablation
    most, least = np.argmax(rises), np.argmin(rises)
    return {"without a sublayer": lines, "without the block": {"block": rises}}, (
        f"Block {most} matters most, {rises[most]:.2f} nats, and block {least} least, "
        f"{rises[least]:.3f}.")

@statistic("Logit lens: what the head reads after each block", depth="block", x="loss (nats)")
def logit_lens(run):
    """The loss if the final norm and the head read the stream after an earlier block. They were
    trained on the last one only, so a high loss does not mean that nothing is there.

    Row -1 is the embedding. As in arXiv:2505.13898."""
    def of_batch(idx, targets):
        streams = Record(run.model, idx).streams[::2]
        return torch.stack([F.cross_entropy(run.model.logits(stream).flatten(0, 1),
                                            targets.flatten()) for stream in streams])
    losses = mean_over(run.quarter, of_batch).tolist()
    half = losses[len(losses) // 2]
    return {"": {"loss": list(enumerate(losses, -1))}}, (
        f"{half:.2f} nats after half of the blocks, {losses[-1]:.2f} at the end.")

# -----------------------------------------------------------------------------
# any text: skipping

@statistic("Which sublayers are skipped", depth="sublayer", x="share of tokens that skip it")
def skip_rate(run):
    """A sublayer that nearly all tokens skip could be removed, and one that none skips saves
    nothing. Depth adapts to the token where the share is in between.

    Tokens skip as in training, or, where none did, by gates below 0.05 (3 degrees)."""
    policy = skip_policy(run.model)
    if policy is None:
        raise NotHere("no token skips, and its residual has no gate")
    skipped = 1 - run.run_rates(policy)
    return {"": {"skipped": skipped}}, (
        f"{skipped.mean():.0%} of all (token, sublayer) pairs are skipped. "
        f"{(skipped >= 0.9).sum()} of {len(skipped)} sublayers are skipped by 90 % of the tokens.")

@statistic("What skipping costs", x="skipped (%)")
def skip_curve(run):
    """By gate, tokens skip the sublayers that would rotate them least. Two controls skip as much:
    random tokens, and a fixed set of sublayers that all tokens skip. Skipping adapts to the token
    only where it beats the fixed set.

    By gate: one threshold, the lowest 10, 25, 40 and 50 % of all gates. Random: of each sublayer,
    as many tokens as by gate. Fixed set: sublayers chosen by their loss on other windows, greedily,
    by rotation, or each on its own, whichever is best. As trained: --mod."""
    model, n = run.model, run.n_layers
    if isinstance(model.policy, Router):
        raise NotHere("a router changes the stream, too")
    if not model.final.can_skip:
        raise NotHere("tokens can't skip with this rule")
    batches = run.batches if run.puzzle else run.quarter
    full_value, most = run.value(dense), 0.5
    lines = {"fixed set": [(0.0, full_value)]}
    if hasattr(model.final, "gate"):
        lines = {"by gate": [(0.0, full_value)]} | lines | {"random": [(0.0, full_value)]}
        trace = Trace(model, dense_with_gates)
        model(run.other_quarter[0][0], trace=trace)
        gates = torch.stack(trace.gates).abs().flatten()
        for share in 0.1, 0.25, 0.4, 0.5:
            policy = GatePolicy(model.config, below=max(1e-9, gates.quantile(share).item()))
            rates = run.run_rates(policy, batches)
            most = 1 - rates.mean().item()
            lines["by gate"].append((100 * most, run.value(policy)))
            lines["random"].append((100 * most, run.value(random_policy(rates))))
    for removed in fixed_sets(run, min(n - 1, math.ceil(n * most))):
        lines["fixed set"].append((100 * len(removed) / n, run.value(dense, removed)))
    if skip_policy(model) is model.policy is not None:
        skipped = 1 - run.run_rates(model.policy, batches).mean().item()
        lines["as trained"] = [(100 * skipped, run.value(model.policy))]
    at_a_quarter = ", ".join(f"{np.interp(25, *zip(*line)):.2f} ({name})"
                             for name, line in lines.items() if len(line) > 1)
    what = "steps learned" if run.puzzle else "rise of the loss (nats)"
    return {what: lines}, (f"{what.capitalize()} where 25 % are skipped: {at_a_quarter}; "
                           f"{full_value:.2f} where none are.")

def dense_with_gates(trace):   # a policy: no token skips, and all gates are computed
    trace.gate()

def random_policy(run_rates):
    """Random tokens run, of each sublayer a share run_rates (2L,)"""
    return lambda trace: torch.rand(trace.idx.shape) < run_rates[trace.layer_idx]

def fixed_sets(run, most):
    """-> sets of 1, 2, ... most layer_idx, with the least loss on other windows if all tokens skip
    them: each the best of three candidates"""
    @cache
    def loss(removed):
        return run.loss(dense, removed, run.other_quarter)

    def rotation(idx, targets):
        return Record(run.model, idx, dense).rotations().mean((1, 2))

    by_rotation = mean_over(run.other_quarter, rotation).argsort().tolist()
    by_loss = sorted(by_rotation, key=lambda layer_idx: loss(frozenset([layer_idx])))
    greedy, sets = frozenset(), []
    for n in range(1, most + 1):
        greedy = min((greedy | {layer_idx} for layer_idx in by_rotation if layer_idx not in greedy),
                     key=loss)
        sets.append(min(greedy, frozenset(by_rotation[:n]), frozenset(by_loss[:n]), key=loss))
    return sets

@statistic("How far each sublayer rotates each token", draw="map", x="token",
           y="sublayer", label="degrees (grey: the token skips)", power=0.6)
def depth_map(run):
    """The angle between a token's stream before and after each sublayer. Grey: it skips.

    At the start of a validation window, as in NAG's appendix A, arXiv:2606.16112. Skipping: see
    skip_rate."""
    idx = run.batches[0][0][:1, :64]
    rec = Record(run.model, idx, skip_policy(run.model))
    tokenizer = prepare.get_tokenizer(run.tokenizer)
    tokens = [tokenizer.decode_single_token_bytes(token).decode(errors="replace")
              for token in idx[0].tolist()]
    tokens = [repr(token.replace("\n", "↵"))[1:-1] for token in tokens]   # a tab becomes \t
    rotation = rec.rotations()[:, 0]
    table = rotation.masked_fill(~rec.masks[:, 0], math.nan)
    most = rotation.mean(1).argmax()
    return {"": table, "columns": tokens, "rows": run.names}, (
        f"{run.names[most]} rotates most, by {rotation[most].mean():.0f}° on average.")

# -----------------------------------------------------------------------------
# any text: pruning, outliers, quantization

def logged_gradients(run):
    """Gradient norms of blocks, logged after the warmup (n, L), per root of the block's size: else
    wide blocks of --taper would have larger ones"""
    last_step = run.log[-1]["step"] if run.log else 0
    norms = [line["grad_norms"] for line in run.log
             if "grad_norms" in line and line["step"] >= run.settings["warmup"] * last_step]
    if len(norms) < 2 or len(run.model.blocks) == 1:
        raise NotHere("its metrics.jsonl has no gradient norms of several blocks")
    return np.array(norms) / np.sqrt([num_params(block) for block in run.model.blocks])

def rank_correlation(x, y):
    """Spearman's: 1 for the same order, -1 for the opposite one; 0 where all values are equal"""
    def ranks(values):
        values = np.asarray(values)
        return (values[:, None] > values).sum(1) + (values[:, None] == values).sum(1) / 2
    x, y = ranks(x), ranks(y)
    return 0.0 if min(x.std(), y.std()) == 0 else np.corrcoef(x, y)[0, 1]

@statistic("Gradient fan-in asymmetry", rare=True, depth="block", x="gradient / mean")
def fan_in(run):
    """In PreNorm a gradient reaches a block through each later block and along the stream, so early
    blocks have a larger fan-in. Do gradients follow it, and do they predict ablation?

    Gradient: norm per root of the block's size, a mean over the training after the warmup. Fan-in:
    n if n blocks run from this one on; n (n + 1) / 2 with --deep_supervision, where each of them
    has a loss of its own. Source: arXiv:2606.26538."""
    gradients, expected = logged_gradients(run).mean(0), np.zeros(len(run.model.blocks))
    n = np.arange(len(run.model.block_order), 0, -1.0)
    if run.model.config.deep_supervision:
        n = n * (n + 1) / 2
    np.add.at(expected, run.model.block_order, n)
    lines = {"measured": gradients / gradients.mean(), "fan-in": expected / expected.mean()}
    with_fan_in = rank_correlation(gradients, expected)
    with_ablation = rank_correlation(gradients, run.block_ablation)
    return {"": lines}, (f"Rank correlation of gradients with the fan-in: {with_fan_in:.2f}, with "
                         f"ablation: {with_ablation:.2f}.")

@statistic("CascadeFlow pruning: which blocks can go first", rare=True, x="blocks removed",
           y="rise of the loss (nats)")
def pruning(run):
    """CascadeFlow removes the block with the smallest gradients in training, and needs no text.
    Beside it: Block Influence, which needs some, the last blocks first, and a random order.

    CascadeFlow: gradients as in fan_in (arXiv:2606.26538). Block Influence: 1 - cosine of the
    stream before and after the block (ShortGPT, arXiv:2403.03853), on other windows. Ablation: on
    the windows of this figure, so its line is optimistic. Random: a mean over five orders."""
    gradients, n_blocks = logged_gradients(run), len(run.model.blocks)

    def change(idx, targets):
        streams = map(as_tensor, Record(run.model, idx).streams[::2])
        return torch.stack([1 - F.cosine_similarity(x, y, dim=-1).mean()
                            for x, y in itertools.pairwise(streams)])

    influence = np.zeros(n_blocks)
    np.add.at(influence, run.model.block_order, mean_over(run.other_quarter, change).numpy())

    @cache
    def rise(blocks):
        return run.loss_rise(removed=[i for b in blocks for i in run.layers_of_block(b)])

    def line(order):
        return [rise(frozenset(order[:n])) for n in range(n_blocks)]

    scores = {"CascadeFlow": gradients.mean(0), "Block Influence": influence,
              "ablation": run.block_ablation, "last first": -np.arange(n_blocks)}
    lines = {name: line(np.argsort(score, kind="stable").tolist())
             for name, score in scores.items()}
    rng = np.random.default_rng(0)
    lines["random"] = np.mean([line(rng.permutation(n_blocks).tolist()) for _ in range(5)], axis=0)
    half, n = len(gradients) // 2, max(1, n_blocks // 4)
    stable = rank_correlation(gradients[:half].mean(0), gradients[half:].mean(0))
    rises = ", ".join(f"{line[n]:.2f} ({name})" for name, line in lines.items())
    return {"": lines}, (f"Without {n} of {n_blocks} blocks, the loss rises by {rises}. The orders "
                         f"of gradients in both halves of the training correlate by {stable:.2f}.")

def attention_to_first(attn, rotary, x):
    """The share of attention that queries in the second half of windows give to the first token, a
    mean over heads. x (B, T, C): the input of the attention"""
    q, k, _ = map(attn.heads, attn.c_attn(x).chunk(3, dim=-1))
    q, k = apply_rotary(rms_norm(q), rotary), apply_rotary(rms_norm(k), rotary)
    is_first = torch.zeros_like(q)
    is_first[:, 0] = 1   # with these values, the output is the first token's share
    return attention(q, k, is_first)[:, x.shape[1] // 2:].mean()

@statistic("Attention sinks and outlier channels", rare=True, depth="sublayer")
def sinks(run):
    """Heads that find nothing often attend to the first token, a sink; and a few channels of the
    stream may grow very large. NAG's paper (arXiv:2606.16112) reports less of both.

    Sink: the share of attention that the second half of a window gives to its first token. Largest
    channel and kurtosis (3 for a normal distribution): of the stream before each sublayer."""
    def of_batch(idx, targets):
        rec, rotary = Record(run.model, idx), run.model.rotary[:idx.shape[1]]
        shares = [attention_to_first(run.model.blocks[b].attn, rotary, x)
                  for b, x in zip(run.model.block_order, rec.reads[::2])]
        shares = torch.stack(shares).repeat_interleave(2)   # one per sublayer, as the others
        x = torch.stack([as_tensor(stream) for stream in rec.streams[:-1]])
        largest = x.abs().amax(-1) / rms(x).clamp_min(1e-30)
        x = x - x.mean(-1, keepdim=True)
        kurtosis = x.pow(4).mean(-1) / x.square().mean(-1).square().clamp_min(1e-30)
        return torch.stack([shares, largest.mean((1, 2)), kurtosis.mean((1, 2))])

    shares, largest, kurtosis = mean_over(run.quarter, of_batch).tolist()
    T = run.quarter[0][0].shape[1]
    equal = np.mean(1 / np.arange(T // 2 + 1, T + 1))
    return {"attention to the first token": {"share": list(enumerate(shares))[::2]},
            "largest channel / rms": {"stream": largest}, "kurtosis": {"stream": kurtosis}}, (
        f"At most {max(shares):.1%} of an attention goes to the first token ({equal:.1%} if it "
        f"went to all alike). The largest channel is {max(largest):.0f} times the rms.")

@statistic("Quantization: the loss with fewer bits per weight", rare=True, log=True,
           x="bits per weight", y="rise of the loss (nats)")
def quantization(run):
    """All matrices of the GPT are rounded to few bits, embedding and head included, and nothing is
    trained afterwards.

    Each row is rounded to the nearest of 2^bits - 1 values around 0. Parameters of the residuals
    stay as they are."""
    model, rises = copy.deepcopy(run.model), {}
    matrices = [(ours.weight, theirs.weight) for ours, theirs
                in zip(model.modules(), run.model.modules())
                if isinstance(ours, (nn.Linear, nn.Embedding))]
    for bits in 8, 6, 4, 3:
        for rounded, weight in matrices:
            step = weight.abs().amax(1, keepdim=True).clamp_min(1e-30) / (2 ** (bits - 1) - 1)
            rounded.copy_((weight / step).round() * step)
        quantized = copy.copy(run)
        quantized.model = model
        rises[bits] = quantized.loss() - run.base_loss
    return {"": {"rise": list(rises.items())}}, (
        f"The loss rises by {rises[4]:.3f} nats at 4 bits, and by {rises[3]:.3f} at 3.")

# -----------------------------------------------------------------------------
# drawings

# A drawing gets results, {run: what the statistic returned}, and colors, {run: color}. Its other
# keywords are those of @statistic. With depth="block" or "sublayer", depth is the vertical axis,
# downward, and the numbers of a line are horizontal.

# Okabe and Ito's colors, which color-blind people can tell apart
COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f4f24", "#333333"]
STYLES = ["o-", "s--", "^:", "v-.", "D-"]
GREYS = ["#4d4d4d", "#222222", "#777777", "#a8a8a8", "#c8c8c8"]
STYLE = {"font.size": 9.5, "axes.titlesize": 10.5, "axes.spines.top": False,
         "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "lines.linewidth": 1.5,
         "lines.markersize": 4, "legend.frameon": False, "text.parse_math": False,
         "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans", "Arial", "sans-serif"]}

def new_figure(titles, colors, width, height, **labels):
    """-> a figure, and its axes, one per title (run, panel), at most three in a row. width, height:
    of a panel, in inches"""
    n_columns = 2 if len(titles) == 4 else min(3 if width < 5 else 2, len(titles))
    n_rows = math.ceil(len(titles) / n_columns)
    figure = Figure((width * n_columns, height * n_rows + 0.6), layout="constrained")
    grid = [figure.add_subplot(n_rows, n_columns, i + 1) for i in range(len(titles))]
    for axes, (run, panel) in zip(grid, titles):
        axes.set_title(": ".join(filter(None, (run, panel))), color=colors.get(run, "black"))
        axes.set(**labels)
    return figure, grid

def draw_lines(results, colors, x="", y="", depth="", log=False, from_zero=True):
    """{panel: {name: line}} of each run. Color: the run; marker: the name. Panels with more than
    two lines are drawn per run. log: a symlog scale, linear below 0.01"""
    lines = [(run, panel, name, line) for run, panels in results.items()
             for panel, named in panels.items() for name, line in named.items()]
    names = list(dict.fromkeys(name for _, _, name, _ in lines))
    per_run = any(len(named) > 2 for panels in results.values() for named in panels.values())
    styles = dict(zip(names, itertools.cycle(STYLES)))
    greys = dict(zip(names, itertools.cycle(GREYS)))
    titles = list(dict.fromkeys((run if per_run else "", panel) for run, panel, _, _ in lines))
    width = 5.0 if len(titles) == 1 else 3.7
    figure, grid = new_figure(titles, colors, width, 3.3 if depth else 2.9, xlabel=x,
                              ylabel=y or depth)
    for axes, (_, panel) in zip(grid, titles):
        first = grid[[title for _, title in titles].index(panel)]
        axes.sharex(first) if depth else axes.sharey(first)   # panels of all runs have one scale
        if log:
            set_scale = axes.set_xscale if depth else axes.set_yscale
            set_scale("symlog", linthresh=0.01)
            (axes.xaxis if depth else axes.yaxis).set_major_formatter("{x:g}")
    for run, panel, name, line in lines:
        points = np.array(line, dtype=float)   # None becomes nan
        if points.ndim == 1:
            points = np.stack((np.arange(len(points)), points), axis=1)
        color = greys[name] if per_run and name != names[0] else colors[run]
        across, down = reversed(points.T) if depth else points.T
        axes = grid[titles.index((run if per_run else "", panel))]
        axes.plot(across, down, styles[name], color=color, markersize=7 if len(points) == 1 else 4)
    for axes in grid:
        if depth:
            low, high = axes.get_ylim()
            places = range(math.ceil(low), math.floor(high) + 1)
            labels = [f"{'am'[i % 2]}{i // 2}" if depth == "sublayer" else i for i in places]
            every = math.ceil(len(labels) / 24)
            axes.set_yticks(places[::every], labels[::every])
            axes.invert_yaxis()
        low, _ = axes.get_xlim() if depth else axes.get_ylim()
        if from_zero and low > 0:
            axes.set_xlim(0) if depth else axes.set_ylim(0)
    entries = {} if per_run else {run: axes.plot([], [], color=colors[run], lw=3)[0]
                                  for run in results}
    if len(names) > 1:
        entries |= {name: axes.plot([], [], styles[name], color=greys[name])[0] for name in names}
    if len(entries) > 1:
        figure.legend(entries.values(), entries, loc="outside lower left",
                      ncols=2 if len(titles) == 1 else 4)
    return figure

def draw_map(results, colors, x="", y="", label="", power=1):
    """{panel: matrix} of each run, the first row at the top; nan is grey. A run may have names of
    its "rows" and "columns". label: of the colors; power: below 1, small numbers differ more"""
    matrices = {(run, panel): np.array(matrix, dtype=float) for run, panels in results.items()
                for panel, matrix in panels.items() if panel not in ("rows", "columns", "digits")}
    low = min(0, *(np.nanmin(matrix) for matrix in matrices.values()))
    high = max(1e-30, *(np.nanmax(matrix) for matrix in matrices.values()))
    if low < 0:
        norm, colormap = Normalize(-max(-low, high), max(-low, high)), "RdBu_r"
    else:
        norm, colormap = PowerNorm(power, 0, high), "magma_r"
    n_rows, n_columns = np.max([matrix.shape for matrix in matrices.values()], axis=0)
    width, height = (min(10, max(4.2, 0.27 * n_columns)), min(10, max(2.6, 0.27 * n_rows)))
    figure, grid = new_figure(list(matrices), colors, width, height + 0.6, xlabel=x, ylabel=y)
    for axes, ((run, _), matrix) in zip(grid, matrices.items()):
        axes.set_facecolor("0.88")
        image = axes.imshow(matrix, aspect="auto", norm=norm, cmap=colormap, interpolation="none")
        axes.grid(False)
        columns, rows = (results[run].get(key, list(range(n)))
                         for key, n in zip(("columns", "rows"), reversed(matrix.shape)))
        axes.set_xticks(range(len(columns)), columns, rotation=90 if len(columns) > 12 else 0)
        axes.set_yticks(range(len(rows)), rows)
        axes.tick_params(labelsize=8 if max(n_rows, n_columns) <= 30 else 6)
        for (i, j), number in np.ndenumerate(matrix):
            if n_columns <= 14 and not math.isnan(number):
                text = f"{number:.2f}".replace("0.", ".") if high < 2 else f"{number:.0f}"
                is_dark = norm(number) > 0.5 if low == 0 else abs(norm(number) - 0.5) > 0.3
                axes.text(j, i, text, ha="center", va="center", fontsize=7,
                          color="white" if is_dark else "black")
    figure.colorbar(image, ax=grid, label=label, location="bottom", aspect=40, fraction=0.05,
                    pad=0.02)
    return figure

DRAWINGS = {"lines": draw_lines, "map": draw_map}

def picture(name, results, colors):   # -> SVG
    found = STATISTICS[name]
    file = io.StringIO()
    with matplotlib.style.context(["default", STYLE | {"svg.hashsalt": name}]):
        DRAWINGS[found.draw](results, colors, **found.options).savefig(file, format="svg")
    return file.getvalue()

# -----------------------------------------------------------------------------
# live page

TOKENS = "\n0123456789abcdefghij"   # the page gets the rows of wte and lm_head of these
TITLES = dict(pre="PreNorm", nag="NAG", attnres="Attention Residuals")

def write_play_page(runs, out):
    """play.html, on which models of the puzzle run in the browser (their weights are in it)"""
    puzzle = next((run.puzzle for run in runs.values() if run.puzzle), None)
    models = []
    for name, run in runs.items():
        why = why_not_live(run, puzzle)
        if why:
            print(f"play.html: without {name}, {why}")
        else:
            models.append(live_model(name, run))
    if models:
        titles = [model["name"] for model in models]
        for model in models:
            if titles.count(model["name"]) > 1:
                model["name"] = model["run"]
        report = puzzle | dict(tokens=TOKENS, models=models)
        template = (Path(__file__).parent / "web" / "play.html").read_text(encoding="utf-8")
        (out / "play.html").write_text(
            template.replace("MODELS<", json.dumps(report).replace("<", "\\u003c") + "<", 1),
            encoding="utf-8")
        print(f"{out}/play.html runs {', '.join(model['run'] for model in models)} live")

def why_not_live(run, puzzle):
    """One phrase: why the page can't run a model. It has three rules and the default blocks."""
    config = run.model.config
    if not run.puzzle:
        return "it was not trained on the puzzle (prepare.py steps)"
    if run.puzzle != puzzle:
        return "its puzzle is another one"
    if config.block_size < 2 * (puzzle["cells"] + 1):
        return "its windows are shorter than a line and its answer"
    if config.residual.split(":")[0] not in TITLES:
        return f"the page has no {config.residual} (only {', '.join(TITLES)})"
    if config.mod.split(":")[0] not in ("none", "gate", "drop"):
        return f"the page has no --mod {config.mod}"
    if (config.norm, config.activation, config.repeat) != ("rms", "gelu", ""):
        return "the page has no --norm, --activation and --repeat other than the defaults"

@torch.no_grad()
def live_model(name, run):
    """-> what play.html needs of a model: weights and probes as float16, in base64"""
    model, config, policy = run.model, run.model.config, run.model.policy
    residual, rows = config.residual.split(":")[0], [ord(token) for token in TOKENS]
    tensors = {key: tensor[rows] if key.startswith(("wte", "lm_head")) else tensor
               for key, tensor in model.state_dict().items() if not key.startswith("policy")}
    probes = {}
    for n_steps in range(run.puzzle["most"] + 1):
        weights, shares = fit_probes(model, run.puzzle, n_steps)
        for where, block_idx in weights:   # the furthest line that can be read there
            share = shares[where, block_idx]
            steps = max((j for j in range(n_steps + 1) if share[j] >= KNOWN), default=None)
            if steps is not None:
                key = f"{n_steps} {where} {block_idx}"
                probes[key] = dict(steps=steps, share=round(share[steps], 3))
                furthest_weights = weights[where, block_idx][:, steps].T
                tensors[f"probe.{n_steps}.{where}.{block_idx}"] = furthest_weights
    numbers = torch.cat([tensor.flatten() for tensor in tensors.values()])
    return dict(
        run=name, name=TITLES[residual], residual=residual,
        group=getattr(model.final, "group", 1),
        n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd, probes=probes,
        threshold=float(policy.threshold) if isinstance(policy, GatePolicy) else 0.0,
        shapes={key: list(tensor.shape) for key, tensor in tensors.items()},
        weights=base64.b64encode(numbers.half().numpy().astype("<f2").tobytes()).decode())

# -----------------------------------------------------------------------------
# the page

@dataclass
class AnalyzeConfig:
    runs: list = flag(None, "run folders")
    out: str = flag("figures", "folder of the page")
    only: str = flag("", "some statistics, such as reads,skip_curve; default: all")
    windows: int = flag(0, "validation windows; 0: as many as in training", 0, 1e6)
    data: str = flag("", "data set of the runs, if it has moved")
    list: bool = flag(False, "print the names and titles of all statistics")

@torch.no_grad()
def main(argv=None):
    config = make(AnalyzeConfig, parse([AnalyzeConfig], argv, __doc__, positional="runs"))
    if config.list:
        for name, found in STATISTICS.items():
            print(f"{name:16}{found.title}")
        return
    names = config.only.split(",") if config.only else list(STATISTICS)
    for name in names:
        if name not in STATISTICS:
            raise UserError(f"--only {name}: unknown; choose from {', '.join(STATISTICS)}")
    out = Path(config.out)
    is_ours = (out / "numbers.json").exists()
    if out.is_file() or out.is_dir() and any(out.iterdir()) and not is_ours:
        raise UserError(f"--out {out}: has files, but none of this script; take another folder")
    with fork_rng("cpu"):
        runs = open_runs(config)
        out.mkdir(parents=True, exist_ok=True)
        (out / "play.html").unlink(missing_ok=True)   # of other runs
        cards = describe(runs)
        if not config.only:
            write_play_page(runs, out)
        found, figures = {}, {}
        for name in names:
            found[name] = measure(name, runs)
            results, _, _ = found[name]
            if results:
                colors = {run: card["color"] for run, card in cards.items()}
                figures[name] = picture(name, results, colors)
                (out / f"{name}.svg").write_text(figures[name], encoding="utf-8")
    results = {name: results for name, (results, _, _) in found.items()}
    (out / "numbers.json").write_text(json.dumps(dict(runs=cards, statistics=results), indent=1))
    (out / "index.html").write_text(page(cards, found, figures, out), encoding="utf-8")
    print(f"{out}/index.html shows {', '.join(runs)}; open it in a browser")

def open_runs(config):
    """-> {name: Run}; the name is the folder's, or its path if two have the same"""
    if not config.runs:
        raise UserError("give run folders, such as runs/steps-pre")
    names, runs = [Path(path).resolve().name for path in config.runs], {}
    for path, name in zip(config.runs, names):
        model, settings = open_run(path)
        settings["data"] = config.data or settings["data"]
        n = max(4, config.windows or settings["eval_windows"])   # some statistics take a quarter
        windows = prepare.windows_of(settings["data"], "val", model.config.block_size, n)
        meta = prepare.load_meta(settings["data"])
        lines = Path(path, "metrics.jsonl").read_text().splitlines(keepends=True)
        log = [json.loads(line) for line in lines if line.endswith("\n")]   # a kill may cut one off
        run = Run(model, settings, windows, meta, log)
        if not math.isfinite(run.metrics["val_loss"]):
            raise UserError(f"{path}: its loss is {run.metrics['val_loss']}: it diverged")
        runs[name if names.count(name) == 1 else path] = run
    of_puzzle = [run for run in runs.values() if run.puzzle]
    asked = min((run.asked for run in of_puzzle), default=1)
    for run in of_puzzle:
        run.asked = asked
    return runs

def describe(runs):
    """-> {name: the numbers of its card}"""
    cards = {}
    for (name, run), color in zip(runs.items(), itertools.cycle(COLORS)):
        config, last = run.model.config, run.log[-1] if run.log else {}
        mod = "" if config.mod == "none" else f", {config.mod}"
        tokens = last.get("step", 0) * run.settings["batch_size"] * config.block_size
        max_iters = 0 if run.settings["max_flops"] else run.settings["max_iters"]
        cards[name] = dict(
            color=color, model=f"{config.residual}{mod}, {config.n_layer} x {config.n_embd}",
            data=Path(run.settings["data"]).name, iterations=last.get("step", 0),
            max_iters=max_iters, n_params=num_params(run.model),
            flops=flops_per_token(run.model), tokens_per_second=tokens / last.get("seconds", 1),
            **run.metrics)
    return cards

def measure(name, runs):
    """-> results {run: lines or matrices}, sentences {run: text}, missing {run: why}"""
    results, sentences, missing = {}, {}, {}
    for run_name, run in runs.items():
        print(f"{name} of {run_name}", file=sys.stderr)
        try:
            returned = STATISTICS[name].measure(run)
        except UserError as why:
            missing[run_name] = str(why)
            continue
        drawn, sentence = returned if isinstance(returned, tuple) else (returned, "")
        results[run_name], sentences[run_name] = plain(drawn), sentence
        print(f"{name} of {run_name}: {sentence}")
    return results, sentences, missing

def plain(drawn):
    """Lists in place of tensors and arrays, None in place of nan"""
    text = json.dumps(drawn, default=lambda value: value.tolist())
    return json.loads(text, parse_constant=lambda constant: None)

def page(cards, found, figures, out):
    sections = []
    for name, (results, sentences, missing) in found.items():
        about = STATISTICS[name]
        digits = {run: drawn["digits"] for run, drawn in results.items() if "digits" in drawn}
        sections.append(dict(
            name=name, title=about.title, caption=about.caption, definition=about.definition,
            rare=about.rare, figure=figures.get(name), digits=digits, sentences=sentences,
            missing=missing))
    report = dict(cards=cards, sections=sections, has_play=(out / "play.html").exists())
    template = (Path(__file__).parent / "web" / "page.html").read_text(encoding="utf-8")
    # a "</script>" in a text must not end the script of the page
    text = json.dumps(report).replace("<", "\\u003c")
    return template.replace(">REPORT<", f">{text}<")

if __name__ == "__main__":
    run_script(main)
