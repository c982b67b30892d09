"""
What each layer of one or several runs does, as JSON and figures.

    python analyze.py runs/pre runs/nag --out figures
    python analyze.py runs/nag --only removal gradient_norm
    python analyze.py runs/nag --only depth_map --skip 0.4 --text "def f(x):"

Writes OUT/depth.json and one OUT/STATISTIC.png per statistic, all runs in each that can have it. Sublayers
are numbered l = 1 .. 2L: odd ones are attention, even ones MLP. The statistics are measured on fixed
validation windows, a model trained with skipping at the thresholds of its training.
"""
import argparse
import codecs
import io
import json
import math
import sys
import textwrap
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Callable, NamedTuple

import matplotlib
import torch
import torch.nn.functional as F

from model import GPT
from prepare import get_tokenizer
from sample import (BLOCK_SCORES, PRUNE_METHODS, candidates, loss_without, over_writes, prune, prune_score,
                    to_remove)
from train import (Parser, calibrate, load_run, pick_device, read_metrics, shares, skip_threshold,
                   val_windows, write_file)

matplotlib.use("Agg")
warnings.filterwarnings("ignore", message="Glyph .* missing")   # a text may have any character
import matplotlib.pyplot as plt  # noqa: E402  (the backend has to be chosen first)
from matplotlib.colors import ListedColormap  # noqa: E402


# ----------------------------------------------------------------------------- statistics
# Each takes (model, batches), a list of (idx, targets) of equal shape, and the settings that its row of
# STATS names. It returns {name: [number per sublayer]}, of which draw_stat draws the first, or what its own
# draw function understands. ValueError, with the reason: this model can't have the statistic.

@torch.no_grad()
def stream_norm(model, batches):
    """
    |x_l| / sqrt(C), the root mean square of the stream before sublayer l and, as number 2L + 1, at the end.
    Mean and median over tokens, and the mean without each window's first token, which in trained models can
    be an outlier that dominates the mean. NAG: exp(s). Source: NAG paper, figure 3.
    """
    rms = lambda model, stream: model.ends.as_tensor(stream).double().square().mean(-1).sqrt()     # (B, T)
    norms = [torch.stack([rms(model, before) for _, before, _ in model.walk(idx)]) for idx, _ in batches]
    norms = torch.cat(norms, dim=1)  # (2L + 1, all windows, T)
    return {"mean": norms.mean((1, 2)).tolist(), "median": norms.flatten(1).median(1).values.tolist(),
            "mean_without_first_token": norms[:, :, 1:].mean((1, 2)).tolist()}


def relative(before, after):
    return (after - before).norm(dim=-1) / before.norm(dim=-1).clamp_min(1e-30)


def relative_update(model, batches):
    """Mean over tokens of |x_after - x_before| / |x_before|. Source: Csordas et al. 2025,
    arXiv:2505.13898."""
    return {"mean": over_writes(model, batches, relative).tolist()}


def cosine(model, batches):
    """Mean over tokens of cos(x_before, x_after). NAG: 1 / sqrt(1 + gain^2), eq. 15. Source:
    arXiv:2505.13898."""
    return {"mean": over_writes(model, batches, partial(F.cosine_similarity, dim=-1)).tolist()}


def gradient_norm(model, batches):
    """Euclidean norm of d(mean loss) / d(parameters of sublayer l and of its residual), over all batches at
    once."""
    model.zero_grad(set_to_none=True)
    for idx, targets in batches:
        (model(idx, targets)[1] / len(batches)).backward()
    norms = []
    for residual, sublayer in model.sublayers():
        grads = [p.grad for p in (*residual.parameters(), *sublayer.parameters()) if p.grad is not None]
        norms.append(sum(grad.double().square().sum().item() for grad in grads) ** 0.5)
    model.zero_grad(set_to_none=True)
    return {"norm": norms}


@torch.no_grad()
def removal(model, batches):
    """
    Loss without sublayer l minus the loss with all of them, in nats per token. A removed sublayer does not
    run and the stream passes it unchanged, an outer norm (post, deepnorm, keel) included; hyper, siamese: all
    parallel streams do; attnres: a source less, the weights of the others sum to 1. Source: LLM-Drop,
    arXiv:2406.15786.
    """
    full, sublayers = loss_without(model, batches), range(1, 2 * len(model.blocks) + 1)
    return {"loss_increase": [loss_without(model, batches, {l}) - full for l in meter("removal", sublayers)],
            "full_loss": full}


def meter(name, items):
    """The items, with a report of the time to go every five seconds. A short wait needs none."""
    begin = told = time.perf_counter()
    for i, item in enumerate(items, start=1):
        yield item
        now = time.perf_counter()
        left = (now - begin) / i * (len(items) - i)
        if left > 5 and now - told > 5:
            print(f"  {name}: {i} of {len(items)}, {left:.0f} s to go", file=sys.stderr)
            told = now


def rotation(model, batches):
    """
    Angle in degrees between the stream before and after a sublayer, mean over tokens: summed from the
    embedding up to sublayer l, and of each. A skipped token counts with 0. NAG without skipping:
    atan|alpha m|. Source: NAG paper, figure 3.
    """
    def angle(x, y):   # acos would lose half the digits of a small angle
        x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
        return 2 * torch.atan2((x - y).norm(dim=-1), (x + y).norm(dim=-1)).rad2deg()

    each = over_writes(model, batches, angle)
    return {"cumulative": each.cumsum(0).tolist(), "mean": each.tolist()}


# -- blocks

def mixed(tokens, before, after):
    """The stream `before` where tokens (T,) is true, else `after`."""
    if isinstance(before, tuple):
        return tuple(mixed(tokens, a, b) for a, b in zip(before, after))
    return torch.where(tokens.view(-1, *[1] * (before.dim() - 2)), before, after)


@torch.no_grad()
def boundaries(model, idx, skip=None, tokens=None, order=None):
    """
    The streams before each block and at the end (L + 1). skip: number (from 0) of a block that does not run,
    or not for the tokens (T,); order: other than 0, 1, ...
    """
    if not model.ends.one_graph and (skip is not None or order):
        raise ValueError(f"blocks of --residual {model.config.residual} read each other by number")
    stream, embedding = model.start(idx)
    rope, first, streams = model.rope(0, idx.shape[1]), [] if model.config.value_residual else None, [stream]
    skips = model.skips(*idx.shape)
    for place, i in enumerate(order or range(len(model.blocks))):
        before = model.shortcut(place, stream, embedding)
        stream = before
        if i != skip or tokens is not None:
            stream = model.blocks[i](before, rope, None, skips[i], first)[0]
        if i == skip and tokens is not None:
            stream = mixed(tokens, before, stream)
        streams.append(stream)
    return streams


def vectors(model, streams):
    """Streams -> (number, B, T, C)"""
    return torch.stack([model.ends.as_tensor(stream) for stream in streams]).double()


def loss_at(model, stream, targets):
    logits = model.head(model.ends.finish(stream)).double()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


def contribution(model, batches):
    """
    Size of an update relative to the stream that it is added to, mean over tokens: of a block, |a + m| / |h|,
    of its attention, |a| / |h|, and of its MLP, |m| / |h + a|. Source: arXiv:2505.13898.
    """
    each, blocks = (over_writes(model, batches, relative, span).tolist() for span in (1, 2))
    return {"block": blocks, "attention": each[::2], "mlp": each[1::2]}


@torch.no_grad()
def causal_score(model, batches):
    """
    C(s, l) = |u_l without block s - u_l| / |u_l|, u_l the update of block l, mean over the tokens of two
    windows: how much block l depends on block s. `future`: s is left out for the first half of the window
    only, and C read off the second half, which must get it through attention. Source: arXiv:2505.13898 (there
    the maximum).
    """
    idx, L = batches[0][0][:2], len(model.blocks)
    first = torch.arange(idx.shape[1], device=idx.device) < idx.shape[1] // 2
    full = vectors(model, boundaries(model, idx)).diff(dim=0)                              # (L, B, T, C)

    def row(s, tokens):
        seen = slice(None) if tokens is None else ~tokens
        change = vectors(model, boundaries(model, idx, s, tokens)).diff(dim=0) - full
        score = change[:, :, seen].norm(dim=-1) / full[:, :, seen].norm(dim=-1).clamp_min(1e-30)
        return [score[l].mean().item() if l > s else None for l in range(L)]

    return {"matrix": [row(s, None) for s in range(L)], "future": [row(s, first) for s in range(L)]}


@torch.no_grad()
def block_removal(model, batches):
    """
    Loss without block l minus the loss with all, in nats per token; depth score: mean block number weighted
    by that (where it is above 0). A repeated block is removed at one of its places; `all_uses`, if there is
    one: at all of them. Source: arXiv:2505.13898.
    """
    full, L = loss_without(model, batches), len(model.blocks)
    worth = [loss_without(model, batches, block) - full
             for block in meter("block_removal", candidates("loss", model))]
    positive, order = [max(0.0, w) for w in worth], model.config.order()
    places = [[l for i, used in enumerate(order) if used == block for l in (2 * i + 1, 2 * i + 2)]
              for block in sorted({*order})]
    more = {} if len(places) == L else {
        "all_uses": [loss_without(model, batches, {*uses}) - full for uses in places]}
    return {"loss_increase": worth, "full_loss": full, "depth_score": sum(
        (i + 1) * w for i, w in enumerate(positive)) / max(sum(positive), 1e-30)} | more


@torch.no_grad()
def angular_distance(model, batches):
    """
    Mean angle / pi between the streams before blocks i and j (L + 1, L + 1), all tokens; per length k of a
    span, the first block of the one that turns the last token least, and by how much. Source:
    arXiv:2403.17887.
    """
    total, last = 0.0, 0.0   # (L + 1, L + 1)
    for idx, _ in batches:
        z = F.normalize(vectors(model, boundaries(model, idx)).flatten(1, 2), dim=-1)  # (L + 1, tokens, C)
        angle = torch.einsum("int,jnt->ijn", z, z).clamp(-1, 1).arccos() / math.pi
        total = total + angle.mean(-1) / len(batches)
        last = last + angle.unflatten(-1, idx.shape)[..., -1].mean(-1) / len(batches)
    spans = [last.diagonal(k) for k in range(1, len(model.blocks))]
    return {"matrix": total.fill_diagonal_(0.0).tolist(),
            "best_first": [d.argmin().item() + 1 for d in spans],
            "best_distance": [d.min().item() for d in spans]}


@torch.no_grad()
def permutation_score(model, batches):
    """
    |loss with blocks i and j swapped - loss| / loss, on the first batch. 0: their order does not matter.
    Source: github.com/keyu-wang-2002/DepthBench.
    """
    (idx, targets), L = batches[0], len(model.blocks)
    full, matrix = loss_at(model, boundaries(model, idx)[-1], targets), [[0.0] * L for _ in range(L)]
    for i, j in meter("permutation_score", [(i, j) for i in range(L) for j in range(i)]):
        order = list(range(L))
        order[i], order[j] = j, i
        loss = loss_at(model, boundaries(model, idx, order=order)[-1], targets)
        matrix[i][j] = matrix[j][i] = abs(loss - full) / full
    return {"matrix": matrix}


@torch.no_grad()
def logit_lens(model, batches):
    """
    What the head reads in the stream after each block (0: in the embedding): loss; KL divergence of that
    prediction from the final one; share of its 5 likeliest tokens that are among the final 5, all means over
    tokens; expected calibration error, the sum over 15 bins of confidence of |hits - confidence| / tokens.
    Source: arXiv:2505.13898, calibration arXiv:2308.11838.
    """
    rows, gaps = [], 0.0
    for idx, targets in batches:
        lens = lambda stream: model.head(model.ends.finish(stream)).double().log_softmax(-1).flatten(0, 1)
        streams = boundaries(model, idx)
        final, flat, row, gap = lens(streams[-1]), targets.flatten(), [], []
        for p in map(lens, streams):   # one at a time: with GPT-2's vocabulary each takes gigabytes
            confidence, guess = p.exp().max(-1)
            bins = (confidence * 15).long().clamp_max(14)
            gap.append(p.new_zeros(15).index_add_(0, bins, (guess == flat).to(p) - confidence) / len(p))
            same = (p.topk(5).indices[:, :, None] == final.topk(5).indices[:, None]).sum((1, 2)) / 5.0
            row.append([F.nll_loss(p, flat), (final.exp() * (final - p)).sum(-1).mean(), same.mean()])
        rows.append(torch.tensor(row))
        gaps = gaps + torch.stack(gap) / len(batches)   # (L + 1, 15): a bin takes tokens of all windows
    names = "loss", "kl_from_final", "top5_overlap"
    return {**dict(zip(names, torch.stack(rows).mean(0).T.tolist())),
            "calibration_error": gaps.abs().sum(1).tolist()}


@torch.no_grad()
def kurtosis(model, batches):
    """
    Excess kurtosis over channels of the stream before each block and at the end: mean and median over tokens
    (single tokens dominate the mean), and the largest |entry| / root mean square. Source: arXiv:2506.19697.
    """
    z = torch.cat([vectors(model, boundaries(model, idx)).flatten(1, 2) for idx, _ in batches], dim=1)
    each = excess_kurtosis(z)                                                              # (L + 1, tokens)
    largest = z.abs().amax((1, 2)) / z.square().mean((1, 2)).sqrt().clamp_min(1e-30)
    return {"median": each.median(1).values.tolist(), "mean": each.mean(1).tolist(),
            "largest": largest.tolist()}


def excess_kurtosis(x):
    """(..., C) -> (...,); 0 for a Gaussian"""
    x = x - x.mean(-1, keepdim=True)
    return x.pow(4).mean(-1) / x.square().mean(-1).square().clamp_min(1e-300) - 3


@torch.no_grad()
def effective_rank(model, batches):
    """
    Of all tokens' streams Z (tokens, C) before each block and at the end: exp of the entropy of the squared
    singular values' shares, and stable rank |Z|_F^2 / |Z|_2^2. Source: DepthBench, where
    a low one is called token collapse.
    """
    z = torch.cat([vectors(model, boundaries(model, idx)).flatten(1, 2) for idx, _ in batches], dim=1)
    ranks = [ranks_of(each) for each in z]
    return {"effective": [e for e, _ in ranks], "stable": [r for _, r in ranks]}


def ranks_of(z):
    power = torch.linalg.svdvals(z).square()
    share = power / power.sum()
    return (-share.xlogy(share).sum()).exp().item(), (power.sum() / power.max()).item()


@torch.no_grad()
def jacobian(model, batches):
    """
    |J v - v| / |v| of each block's map of the stream, v random, by central differences with steps of |x| /
    100, on the first window: 0 is the identity. Source: arXiv:2605.17842 (closeness to identity).
    """
    if not model.ends.one_tensor or model.config.value_residual or model.config.x0:
        raise ValueError("needs blocks that are maps of a stream of one tensor alone")
    idx, rows = batches[0][0][:1], []
    streams, rope, skips = boundaries(model, idx), model.rope(0, idx.shape[1]), model.skips(1, idx.shape[1])
    for block, x, pair in zip(model.blocks, streams, skips):
        v = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
        step = 1e-2 * x.norm() / v.norm()
        up, down = (block(x + sign * step * v, rope, None, pair)[0] for sign in (1, -1))
        rows.append((((up - down) / (2 * step) - v).norm() / v.norm()).item())
    return {"distance": rows}


# -- attention, weights

def attention_weights(model, idx):
    """Of each block, mean over sequences and heads: (T queries, T keys)"""
    walk, T = list(model.walk(idx)), idx.shape[1]
    hidden = torch.ones(T, T, dtype=torch.bool, device=idx.device).triu(1)
    for block, (_, before, _) in zip(model.blocks, walk[::2]):
        x = block.attn_residual.read(before)
        q, k, _ = (each.transpose(1, 2) for each in block.attn.qkv(x, model.rope(0, T)))      # (B, nh, T, hs)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -math.inf)
        yield scores.softmax(-1).double().mean((0, 1))


@torch.no_grad()
def attention_sink(model, batches):
    """
    Mean attention of the queries 2 .. T to the first token, to the first four and to the query's own, per
    block. Sources: arXiv:2506.19697; NAG paper, section IV-E.
    """
    weights = [torch.stack(list(attention_weights(model, idx)))[:, 1:] for idx, _ in batches]  # (L, T - 1, T)
    mean = torch.stack(weights).mean(0)
    return {"share": mean[..., 0].mean(1).tolist(), "first_four": mean[..., :4].sum(2).mean(1).tolist(),
            "own": mean.diagonal(1, 1, 2).mean(1).tolist()}


@torch.no_grad()
def attention_map(model, batches):
    """
    Mean attention of the first 64 queries to each key, over blocks, heads and windows; None: hidden. Source:
    NAG paper, figure 7.
    """
    weights = torch.stack([w for idx, _ in batches for w in attention_weights(model, idx[:, :64])]).mean(0)
    return {"matrix": [[float(f"{w:.3g}") for w in row[:t + 1]] + [None] * (len(row) - t - 1)
                       for t, row in enumerate(weights.tolist())]}


@torch.no_grad()
def weight_outliers(model, batches):
    """
    Of each matrix of the sublayers, in order: |mean| / standard deviation (0: centred on zero), largest
    |entry| / root mean square, excess kurtosis (0: a Gaussian). Source: NAG paper, section IV-D.
    """
    found = {name: p.double().flatten() for name, p in model.blocks.named_parameters() if p.dim() == 2
             and name.split(".")[1] in ("attn", "mlp")}
    return {"off_centre": [(w.mean().abs() / w.std()).item() for w in found.values()],
            "largest": [(w.abs().max() / w.square().mean().sqrt()).item() for w in found.values()],
            "excess_kurtosis": [excess_kurtosis(w).item() for w in found.values()], "matrix": [*found]}


@torch.no_grad()
def heavy_tail(model, batches):
    """
    Exponent alpha of the power law that the eigenvalues of W^T W follow from some smallest one on, per
    sublayer (of c_attn, c_fc): maximum likelihood, the start with the least Kolmogorov-Smirnov distance; its
    standard error, (alpha - 1) / sqrt(n), and the number n of eigenvalues in the tail. None: no tail, all
    eigenvalues are within 10 % of those of a Gaussian matrix (Marchenko-Pastur). Source: arXiv:2507.17912.
    """
    fits = []
    for _, sublayer in model.sublayers():
        W = (sublayer.c_attn if sublayer.mixes_tokens else sublayer.c_fc).weight.double()
        power, n, m = torch.linalg.svdvals(W).square(), max(W.shape), min(W.shape)
        edge = W.square().mean() * n * (1 + (m / n) ** 0.5) ** 2
        fits.append(power_law(power) if power.max() > 1.1 * edge else (None, None, 0))
    return dict(zip(("alpha", "standard_error", "tail"), map(list, zip(*fits))))


def power_law(x):
    """Positive numbers (N,) -> alpha of their tail, its standard error, size of the tail."""
    x, best = x.sort().values.cpu(), (math.inf, None, None, 0)
    for i in range(max(1, len(x) - 9)):   # ten numbers at least
        tail = x[i:]
        n, alpha = len(tail), (1 + len(tail) / (tail / tail[0]).log().sum()).item()
        model = 1 - (tail / tail[0]).pow(1 - alpha)
        distance = (model - torch.arange(n, dtype=x.dtype) / n).abs().max().item()
        best = min(best, (distance, alpha, (alpha - 1) / n ** 0.5, n))
    return best[1:]


@torch.no_grad()
def quantisation(model, batches):
    """
    Loss increase (nats per token) when the blocks' matrices are rounded to b bits, symmetrically, a scale per
    row: b = 8, 6, 4, 3. Source: arXiv:2309.05210.
    """
    matrices = [p for block in model.blocks for p in block.parameters() if p.dim() == 2]
    kept, full, losses = [p.clone() for p in matrices], loss_without(model, batches), {}
    for bits in meter("quantisation", (8, 6, 4, 3)):
        for p, original in zip(matrices, kept):
            p.copy_(rounded(original, bits))
        losses[bits] = loss_without(model, batches) - full
    for p, original in zip(matrices, kept):
        p.copy_(original)
    return {"bits": list(losses), "loss_increase": list(losses.values())}


def rounded(W, bits):
    scale = W.abs().amax(1, keepdim=True).clamp_min(1e-30) / (2 ** (bits - 1) - 1)
    return (W / scale).round() * scale


@torch.no_grad()
def norm_growth(model, batches):
    """
    PreNorm dilution. Mean square of the stream before block l of a fresh model of the same config, the
    embedding's being 1, beside the bounds 1 + l/2 and 1 + 3l/2 of Xiong et al. 2020 for a PreNorm Transformer
    at their init (arXiv:2002.04745; ours scales c_proj down, so that it grows less). share: |update| of each
    sublayer of the trained model / the sum of all, and the effective number of sublayers, exp of their
    entropy.
    """
    fresh = GPT(model.config).to(batches[0][0].device).eval()
    z = vectors(fresh, boundaries(fresh, batches[0][0])).square().mean((1, 2, 3))
    sizes, blocks = over_writes(model, batches, lambda x, y: (y - x).norm(dim=-1)), range(len(z))
    share = sizes / sizes.sum().clamp_min(1e-30)
    return {"initial": (z / z[0]).tolist(), "lower": [1 + l / 2 for l in blocks],
            "upper": [1 + 3 * l / 2 for l in blocks], "share": share.tolist(),
            "effective_sublayers": (-share.xlogy(share).sum()).exp().item()}


# -- pruning and gradient fan-in

def ranks(x):
    """Ranks of (N,) numbers, equal ones share their mean rank."""
    x = torch.as_tensor(x, dtype=torch.float64, device="cpu")
    return ((x[:, None] > x).sum(1) + (x[:, None] >= x).sum(1) - 1).double() / 2


def spearman(a, b):
    return correlation(ranks(a), ranks(b))


def halves(batches):
    """Every second window, to choose by, and the others, to measure on: disjoint, as many, batches alike."""
    x, y = (torch.cat(part) for part in zip(*batches))
    half = len(x) // 2
    if not half:
        raise ValueError("needs two --windows or more, since half of them are to choose by")
    size = math.gcd(half, len(batches[0][0]))
    return [list(zip(x[i:2 * half:2].split(size), y[i:2 * half:2].split(size))) for i in (0, 1)]


def needs_blocks(model):
    if model.config.mod == "router" or model.config.repeat:
        raise ValueError("routed or repeated blocks don't stand alone")


def removal_curve(model, halved, method, most, norms=None, scores=None):
    """
    Loss on the second half without the 0 .. most that a method scores lowest on the first, in one shot. Of
    `random`, the mean of five orders: a single one may be lucky.
    """
    each = [scores]
    if method == "random":
        each = [torch.rand(len(model.blocks), generator=torch.Generator().manual_seed(i)) for i in range(5)]
    curves = [[loss_without(model, halved[1], to_remove(method, k, model, halved[0], norms, one))
               for k in range(most + 1)] for one in each]
    return [sum(losses) / len(losses) for losses in zip(*curves)]


def prune_curve(model, batches, norms=None):
    """
    Loss (nats per token) after removing the 0 to 8 blocks that a method scores lowest, without further
    training; every second window is for the scores. rank_correlation: Spearman's, of a score with the true
    loss after removing that block alone. stability: Spearman's, of the scores on one half of the windows with
    those on the other, of the methods that look at data (span: single blocks; attention, mlp and sublayer:
    drop_curve's). Methods: sample.py --prune. Source: arXiv:2606.26538.
    """
    needs_blocks(model)
    halved, methods = halves(batches), [name for name in PRUNE_METHODS if name != "cfp" or norms is not None]
    scores, again = ({name: prune_score(name, model, half, norms) for name in methods} for half in halved)
    blocks = [name for name in methods if name in BLOCK_SCORES]
    most = min(8, sum(any(block.runs) for block in model.blocks) - 1)
    return {"loss": {name: removal_curve(model, halved, name, most, norms, scores[name])
                     for name in meter("prune_curve", blocks)},
            "rank_correlation": {name: spearman(scores[name], again["loss"]) for name in blocks
                                 if name not in ("random", "span")},
            "stability": {name: spearman(scores[name], again[name]) for name in methods
                          if name not in ("cfp", "magnitude", "reverse", "random")},
            "scores": {name: scores[name].tolist() for name in blocks}}


def drop_curve(model, batches):
    """
    Loss (nats per token) after removing the 0 .. L / 2 attention sublayers, MLPs or blocks of which the
    stream comes out most as it went in, by 1 - mean cos (`scores`), in one shot and without further training;
    every second window is for the scores. Source: LLM-Drop, arXiv:2406.15786.
    """
    needs_blocks(model)
    halved, curves, scores = halves(batches), {}, {}
    for name, method in (("attention", "attention"), ("mlp", "mlp"), ("block", "influence")):
        score = prune_score(method, model, halved[0])
        scores[name] = score.tolist()
        curves[name] = removal_curve(model, halved, method, len(model.blocks) // 2, scores=score)
    return {**curves, "scores": scores}


def fan_in(model, batches, norms=None, history=()):
    """
    Gradient norm of each block, summed over the training after its warm-up, / the sum of all blocks; beside
    it the least-squares fit a + b F(l) of the theory's count of gradient terms, F = L - l + 1, or under deep
    supervision F = (L - l + 1)(L - l + 2) / 2, with R^2 and rank correlation; and Spearman's correlation of
    the sums at a share of the training with the final ones. Source: arXiv:2606.26538.
    """
    if norms is None:
        raise ValueError("holds no gradient norms, which training collects after its warm-up, of blocks with "
                         "weights of their own")
    pull, L = norms[2 * len(norms) // 3:], len(model.blocks)
    pull, left = pull / pull.sum(), torch.arange(L, 0, -1, dtype=torch.float64)
    count = left * (left + 1) / 2 if model.config.deep_supervision else left
    design = torch.stack((torch.ones(L, dtype=torch.float64), count), dim=1)
    fit = design @ torch.linalg.lstsq(design, pull[:, None]).solution[:, 0]
    spread = (pull - pull.mean()).square().sum()
    # what was summed up at each evaluation
    sums = [(row["step"], torch.tensor(row["grad_norms"])[2 * L:])
            for row in history if any(row.get("grad_norms", []))]
    return {"share": pull.tolist(), "fit": fit.tolist(), "rank_correlation": spearman(pull, count),
            "r_squared": (1 - (pull - fit).square().sum() / spread).item() if spread else None,
            "stability_steps": [step for step, _ in sums],
            "stability": [spearman(row, pull) for _, row in sums]}


# -- NAG's gates

def needs_nag(model):
    if model.config.residual != "nag":
        raise ValueError("only nag has these gains, directions and norms")


def needs_thresholds(model):
    if not model.can_skip:
        raise ValueError("needs a residual that knows a gain before a sublayer runs, such as nag, without "
                         "--mod router, --value_residual and --repeat")


@torch.no_grad()
def gain(model, batches):
    """
    Relative size of the write, alpha m, of all tokens, also those that skip: mean |alpha m|, mean alpha m,
    and alpha. Source: NAG paper, figure 5.
    """
    needs_nag(model)
    gains = [torch.stack([residual.gain(before).double().flatten() for (residual, _), (_, before, _)
                          in zip(model.sublayers(), model.walk(idx))]) for idx, _ in batches]
    gains = torch.cat(gains, dim=1)   # (2L, all tokens)
    return {"mean_abs": gains.abs().mean(1).tolist(), "mean": gains.mean(1).tolist(),
            "alpha": [(residual.alpha * residual.warm).item() for residual, _ in model.sublayers()]}


@torch.no_grad()
def direction_similarity(model, batches):
    """
    Cosines (2L, 2L) between the preferred directions v_l = sum_t m_l(t) r_l(t) / sum_t m_l(t) of the
    sublayers, r the direction of the stream (C); `unweighted`, a control, has m = 1. And their means over all
    pairs of attention (MLP) sublayers that are 0, 1, .. L - 1 blocks apart. Source: NAG paper, figure 6.
    """
    needs_nag(model)
    weighted, plain = 0, 0
    for idx, _ in batches:
        parts = [(residual.modulator(before[0]).double(), before[0].double())
                 for (residual, _), (_, before, _) in zip(model.sublayers(), model.walk(idx))]
        # (2L, C); a cosine doesn't know that the sum is not divided by that of m
        weighted = weighted + torch.stack([(m * r).sum((0, 1)) for m, r in parts])
        plain = plain + torch.stack([r.sum((0, 1)) for _, r in parts])
    matrix, control = (F.normalize(v, dim=-1) @ F.normalize(v, dim=-1).T for v in (weighted, plain))
    apart = lambda part: [part.diagonal(d).mean().item() for d in range(len(part))]
    return {"matrix": matrix.tolist(), "attention_by_distance": apart(matrix[::2, ::2]),
            "mlp_by_distance": apart(matrix[1::2, 1::2]), "unweighted": control.tolist()}


def correlation(x, y):
    """Pearson's, of two (N,). None if one of them is constant."""
    x, y = x - x.mean(), y - y.mean()
    scale = (x.norm() * y.norm()).item()
    return (x @ y).item() / scale if scale else None


def auroc(score, correct):
    """
    Area under the ROC curve: the probability that a correct token scores above a wrong one, a tie counts
    half. Both (N,), correct bool. None if all are correct, or none.
    """
    _, which, count = score.unique(return_inverse=True, return_counts=True)
    rank = (count.cumsum(0) - (count - 1) / 2)[which]   # from 1; equal scores share their mean rank
    right, wrong = correct.sum().item(), (~correct).sum().item()
    return (rank[correct].sum().item() - right * (right + 1) / 2) / (right * wrong) if right * wrong else None


@torch.no_grad()
def norm_confidence(model, batches):
    """
    Does the log-norm s of a token's last stream say how sure the model is of the next token? Mean loss (nats)
    in each tenth of the tokens by rising s, and of all; Pearson correlations of s with the loss, the entropy
    of the prediction and whether its likeliest token is right; AUROC of s and of minus the entropy for that.
    Source: zyphra.com/our-work/norm-agnostic-residual-network.
    """
    needs_nag(model)
    rows = []
    for idx, targets in batches:
        *_, (_, (_, s), logits) = model.walk(idx)
        logp, targets = logits.double().log_softmax(-1), targets[..., None]
        rows.append(torch.stack([s.double(), -logp.gather(-1, targets),
                                 -(logp.exp() * logp).sum(-1, keepdim=True),
                                 (logp.argmax(-1, keepdim=True) == targets).double()]).flatten(1))
    s, loss, entropy, correct = torch.cat(rows, dim=1)   # (all tokens,) each
    deciles = loss[s.argsort(stable=True)].tensor_split(10)
    return {"loss_by_decile": [part.mean().item() for part in deciles], "loss": loss.mean().item(),
            "correlation_with_loss": correlation(s, loss),
            "correlation_with_entropy": correlation(s, entropy),
            "correlation_with_correct": correlation(s, correct), "auroc": auroc(s, correct == 1),
            "auroc_of_entropy": auroc(-entropy, correct == 1)}


# -- reading across depth, gates, parallel streams

@torch.no_grad()
def depth_attention(model, batches):
    """
    AttnRes: mean weight (over tokens) that the read of sublayer l = 2 .. 2L, or of the head, 2L + 1, gives to
    each source: the embedding (number 0), and each depth block's sum, numbered from 1 (Full: each sublayer's
    output). Weights of a read sum to 1 (softmax). Further, per read: entropy of the mean weights / its
    maximum, weight on the newest source and on the embedding; per source: sum of the weights it gets. Source:
    arXiv:2603.15031, figure 8.
    """
    if model.config.residual != "attnres":
        raise ValueError("only attnres reads earlier sublayers with weights of their own")
    total = {}
    for idx, _ in batches:
        for residual, (l, stream, _) in zip(model.residuals(), model.walk(idx)):
            if l > 1:   # the first read has one source
                weights = residual.weigh(stream).double().mean(dim=(1, 2)) / len(batches)
                row = total.setdefault(l, {})
                for number, weight in zip(stream.block, weights.tolist()):
                    row[number] = row.get(number, 0.0) + weight
    sources = sorted({number for row in total.values() for number in row})
    rows = [torch.tensor(list(row.values()), dtype=torch.float64) for row in total.values()]
    return {"matrix": [[row.get(number) for number in sources] for row in total.values()],
            "reads": list(total), "sources": sources,
            "entropy": [(-(w / w.sum()).xlogy(w / w.sum()).sum() / math.log(len(w))).item() for w in rows],
            "newest": [w[-1].item() for w in rows], "embedding": [w[0].item() for w in rows],
            "received": [sum(row.get(number, 0.0) for row in total.values()) for number in sources]}


@torch.no_grad()
def gate(model, batches):
    """
    Review, convex, highway: share of the gate's values r, over tokens and channels, in 20 equal bins from 0
    to --gate_range, per sublayer (2L, 20); mean per sublayer, and per quarter of the depth. Source:
    arXiv:2606.31859.
    """
    if not hasattr(model.ends, "gate"):
        raise ValueError(f"--residual {model.config.residual} has no gate; review, convex and highway have")
    if model.config.mod == "router" or not all(model.present()):
        raise ValueError("routed or removed sublayers have no gate that is open for every token")
    histogram, means, top = 0.0, 0.0, model.config.gate_range
    for idx, _ in batches:
        rope, first = model.rope(0, idx.shape[1]), [] if model.config.value_residual else None
        gates = [r.gate(h, sublayer(r.read(h), rope, first=first)).double()
                 for (r, sublayer), (_, h, _) in zip(model.sublayers(), model.walk(idx))]
        counts = torch.stack([torch.histc(g, 20, 0, top) / g.numel() for g in gates])
        histogram = histogram + counts / len(batches)
        means = means + torch.stack([g.mean() for g in gates]) / len(batches)
    return {"mean": means.tolist(), "histogram": histogram.tolist(), "range": top,
            "quarters": [part.mean().item() for part in means.tensor_split(4)]}


@torch.no_grad()
def stream_mixing(model, batches):
    """
    Hyper-connections: means over tokens of what a sublayer reads of each of the n streams, pre (2L, n),
    writes to each, post (2L, n), and of the matrix by which it mixes them, res (2L, n, n); the product of all
    res, last sublayer first, its largest absolute row and column sums and spectral norm. Source:
    arXiv:2512.24880.
    """
    if model.config.residual != "hyper":
        raise ValueError("only hyper has streams to mix")
    means = [0.0, 0.0, 0.0]
    for idx, _ in batches:
        gains = [r.gain(before) for (r, _), (_, before, _) in zip(model.sublayers(), model.walk(idx))]
        for i, parts in enumerate(zip(*gains)):
            mean = torch.stack([part.double().mean(dim=(0, 1)) for part in parts])
            means[i] = means[i] + mean / len(batches)
    pre, post, res = means
    product = torch.linalg.multi_dot(list(res.flip(0)))
    return {"pre": pre.tolist(), "post": post.tolist(), "res": res.tolist(), "product": product.tolist(),
            "largest_row_sum": product.abs().sum(1).max().item(),
            "largest_column_sum": product.abs().sum(0).max().item(),
            "spectral_norm": torch.linalg.matrix_norm(product, 2).item()}


# -- skipping

def skips_by_itself(model):
    return model.tau is not None or model.config.mod == "router"


@torch.no_grad()
def run_with(model, batches, tau):
    """-> mean loss in nats per token, share of the tokens that ran each sublayer (2L,)."""
    loss, ran = 0.0, 0.0
    for idx, targets in batches:
        kept = []
        loss += model(idx, targets, tau=tau, kept=kept)[1].item() / len(batches)
        ran += torch.tensor(shares(kept), dtype=torch.float64) / len(batches)
    return loss, ran


def share_skipped(model, ran):
    """Of all sublayer runs; ran (2L,). Sublayers that were removed don't count."""
    return 1 - ran[torch.tensor(model.present())].mean().item()


def skip_share(model, batches, tau=None):
    """
    Share of the tokens that skip sublayer l, and of all sublayer runs: at the thresholds that the model was
    trained with, or by its router, or at tau (2L,) if it was trained dense. Source: NAG paper, appendix A.
    """
    if not skips_by_itself(model):
        needs_thresholds(model)
    _, ran = run_with(model, batches, tau)
    return {"skipped": (1 - ran).tolist(), "mean": share_skipped(model, ran),
            "tau": tau if tau is None else tau.tolist()}


RATES = 0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75


def skip_curve(model, batches):
    """
    Loss (nats per token) against the share of sublayer runs skipped and against the matmul FLOPs of one
    token's forward pass, as executed; tau (2L,) per point. Every second window sets the thresholds, the
    others are measured. One threshold for all sublayers, as in the paper: attentions that few tokens skip do
    not run whole, as they do elsewhere. Source: NAG paper, section VI.
    """
    needs_thresholds(model)
    calibration, measured = halves(batches)
    points = []
    for rate in meter("skip_curve", RATES):
        tau, _ = calibrate(model, [x for x, _ in calibration], rate)
        loss, ran = run_with(model, measured, tau)
        points.append(dict(loss=loss, realised=share_skipped(model, ran),
                           flops=model.flops_per_token(share=ran.tolist()), wanted=rate, tau=tau.tolist()))
    return {name: [point[name] for point in points] for name in points[0]}


@torch.no_grad()
def depth_map(model, batches, tau=None, text=None, tokenizer="bytes"):
    """
    Which sublayers (rows, 2L) each token of a text ran: 1, or 0 if it skipped or the sublayer was
    removed. Thresholds as in skip_share.
    text: its first block_size tokens; default: 96 tokens of the first window. Source: NAG paper, appendix A.
    """
    if not skips_by_itself(model):
        needs_thresholds(model)
    encoding, idx, kept = get_tokenizer(tokenizer), batches[0][0][:1, :96], []
    if text is not None:
        idx = idx.new_tensor([encoding.encode_ordinary(text)[:model.config.block_size]])
    model(idx, tau=tau, kept=kept)
    ran = [[int(there)] * idx.shape[1] if keep is None else keep[0].int().tolist()
           for keep, there in zip(kept, model.present())]
    # where a character is several tokens, the last of them shows it
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    tokens = [decoder.decode(encoding.decode_single_token_bytes(t)) for t in idx[0].tolist()]
    skipped = 1 - sum(map(sum, ran)) / (sum(model.present()) * len(tokens))
    return {"ran": ran, "skipped": skipped, "text": encoding.decode(idx[0].tolist()), "tokens": tokens}


def loss_curve(model, batches, history=()):
    """What train.py has logged: nats per token, of training averaged since the last point, of validation."""
    of = lambda name, key: [row[name] for row in history if key in row]
    return {"tokens": of("tokens", "loss"), "loss": of("loss", "loss"),
            "val_tokens": of("tokens", "val_loss"), "val_loss": of("val_loss", "val_loss")}


# ----------------------------------------------------------------------------- figures

def save_figure(path, stat, results):
    write_file(path, lambda f: draw_figure(f, stat, results))


def draw_figure(file, stat, results):
    """One statistic as a PNG: its drawing, a title, and a caption that says how to read it."""
    figure = plt.figure(figsize=(6.4, 4.4), dpi=130)
    stat.draw(figure, stat, results)
    width, height = figure.get_size_inches()
    caption = textwrap.wrap(stat.caption, int(15.5 * width))
    figure.suptitle(stat.title, x=0.14 / width, ha="left", fontweight="bold")
    figure.text(0.14 / width, 0.07 / height, "\n".join(caption), fontsize=9, color="0.3", va="bottom")
    figure.tight_layout(rect=(0, (0.1 + 0.15 * len(caption)) / height, 1, 1))
    figure.savefig(file, format="png")
    plt.close(figure)


def save_page(path, title, images):
    """A page of PNG images in rows, each in its own size, so that all have letters of one size."""
    images = [plt.imread(file) for file in images]
    width, rows = max(2496, *(image.shape[1] for image in images)), [[]]   # three figures of common size
    for image in images:
        if sum(each.shape[1] for each in rows[-1]) + image.shape[1] > width:
            rows.append([])
        rows[-1].append(image)
    y = 80 + sum(max(len(image) for image in row) for row in rows)
    figure = plt.figure(figsize=(width / 130, y / 130), dpi=130)
    figure.text(0.14 * 130 / width, 1 - 40 / y, title, fontsize=16, va="center")
    y -= 80
    for row in rows:
        for i, image in enumerate(row):
            figure.figimage(image, sum(each.shape[1] for each in row[:i]), y - len(image))
        y -= max(len(image) for image in row)
    write_file(path, lambda f: figure.savefig(f, format="png"))
    plt.close(figure)


def present(results):
    """(colour, label, result) of the runs that have the statistic. A run has one colour in all figures."""
    return [(f"C{i % 10}", label, result) for i, (label, result) in enumerate(results.items()) if result]


def line_axes(figure, stat, xlabel):
    axes = figure.subplots()
    axes.set(xlabel=xlabel, ylabel=stat.ylabel)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def draw_stat(figure, stat, results):
    """One line per run over the sublayers; attention and MLP differ in their markers."""
    axes = line_axes(figure, stat, "sublayer l, from embedding to head (circles: attention, squares: MLP)")
    everything = []
    for color, label, result in present(results):
        values = next(iter(result.values()))
        everything += values
        axes.plot(range(1, len(values) + 1), values, color=color, lw=1.2, label=label)
        for first, marker in ((0, "o"), (1, "s")):   # attention, MLP
            axes.plot(range(1 + first, len(values) + 1, 2), values[first::2], marker, color=color, ms=4,
                      mfc=color if first else "white")
    if stat.log and min(everything) > 0:
        axes.set_yscale("log")
    elif stat.log:   # a sublayer whose removal helps is below zero
        # a power of ten: a tick within the linear part would lie on that of 0
        linear = max(1e-4, max(map(abs, everything)) / 1e3)
        axes.set_yscale("symlog", linthresh=10 ** math.ceil(math.log10(linear)))
        axes.axhline(0, color="0.6", lw=0.8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=9)


def draw_gain(figure, stat, results):
    draw_stat(figure, stat, results)
    for color, _, result in present(results):
        sizes = [abs(alpha) for alpha in result["alpha"]]
        figure.axes[0].plot(range(1, len(sizes) + 1), sizes, ":", color=color, lw=1.2)


def draw_lines(figure, stat, results, keys, xlabel, start=1, x=None, bounds=()):
    """One line per run and key, a dash pattern per key; grey ones for bounds, which all runs share."""
    axes = line_axes(figure, stat, xlabel)
    for key, style in zip(bounds, ("--", ":")):
        values = max((result[key] for *_, result in present(results)), key=len)
        axes.plot(range(start, start + len(values)), values, style, color="0.5", lw=1.2, label=f"{key} bound")
    for color, label, result in present(results):
        for key, style in zip(keys, ("-", "--", ":", "-.")):
            values = [math.nan if v is None else v for v in result[key]]
            places = result[x] if x else range(start, start + len(values))
            axes.plot(places, values, style, marker="o", ms=3, color=color, lw=1.2,
                      label=label if len(keys) == 1 else f"{label}: {key.replace('_', ' ')}")
    if stat.log:
        axes.set_yscale("log")
    axes.xaxis.get_major_locator().set_params(integer=x is None)
    axes.legend(frameon=False, fontsize=9)


def draw_prune(figure, stat, results):
    found = present(results)
    figure.set_size_inches(6.4 * len(found), 4.4)
    for axes, (_, label, result) in zip(figure.subplots(1, len(found), squeeze=False, sharey=True)[0], found):
        for (i, (name, losses)), marker in zip(enumerate(result["loss"].items()), "os^vDPX*"):
            rhos = (result[key].get(name) for key in ("rank_correlation", "stability"))
            axes.plot(losses, marker + "-", ms=5, lw=1.2, color=f"C{i}", mfc="none",
                      label=", ".join((name, *("–" if rho is None else f"{rho:+.2f}" for rho in rhos))))
        axes.set(xlabel="blocks removed", ylabel=stat.ylabel, title=label)
        axes.grid(alpha=0.25)
        # beside the curves: it has a line per method, and would hide some
        axes.legend(frameon=False, fontsize=8, title="method, rank\ncorrelation, stability", title_fontsize=8,
                    loc="upper left", bbox_to_anchor=(1, 1))


def draw_deciles(figure, stat, results):
    axes = line_axes(figure, stat, "tenth of the tokens, from the smallest norm to the largest")
    for color, label, result in present(results):
        axes.plot(range(1, 11), result["loss_by_decile"], "o-", color=color, ms=4, lw=1.2, label=label)
        axes.axhline(result["loss"], color=color, lw=0.8, ls=":")
    axes.plot([], [], ":", color="0.4", lw=0.8, label="mean of all tokens")
    axes.set_xticks(range(1, 11))
    axes.legend(frameon=False, fontsize=9)


class Panel(NamedTuple):
    """A heat map. first: numbers of its lowest row and of its leftmost column."""
    title: str
    matrix: list
    xlabel: str
    ylabel: str = ""       # default: the statistic's
    first: tuple = (1, 1)
    label: str = ""
    step: float = 1.0      # of the x axis
    rows: float = 1.0      # of the y axis


def draw_panels(figure, stat, results, panels, columns=4, **options):
    """Heat maps, the lowest number at the lower left; panels: a run's result -> its Panels."""
    found = [(label, panel) for _, label, result in present(results) for panel in panels(result)]
    columns = min(columns, len(found))
    rows = -(-len(found) // columns)
    figure.set_size_inches(max(4.5, 3.9 * columns), 3.2 * rows + 0.7)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (label, panel) in zip(grid, found):
        matrix = torch.tensor([[math.nan if x is None else x for x in row] for row in panel.matrix])
        (n, m), (y, x) = matrix.shape, panel.first
        edges = (x - panel.step / 2, x + (m - 0.5) * panel.step,
                 y - panel.rows / 2, y + (n - 0.5) * panel.rows)
        image = axes.imshow(matrix.numpy(), origin="lower", aspect="auto", extent=edges, **options)
        axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel or stat.ylabel)
        axes.set_title(f"{label}{panel.title and ', '}{panel.title}", fontsize=9)
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=axis is axes.yaxis or panel.step == 1)
        figure.colorbar(image, ax=axes, label=panel.label, fraction=0.046)
    for axes in grid[len(found):]:
        axes.set_axis_off()


def depth_attention_panels(result):
    """Sublayers that attend, with the head as the last of them, and MLPs read apart."""
    parts = [("attention and head", 1), ("MLP", 0)]
    return [Panel(who, [row for row, l in zip(result["matrix"], result["reads"]) if l % 2 == odd],
                  "source (0: embedding)", first=(2 + odd, 0), label="mean weight", rows=2.0)
            for who, odd in parts]


def matrix_panels(result, xlabel, label):
    names = [("", "matrix")] + ([("later tokens", "future")] if "future" in result else [])
    return [Panel(title, result[key], xlabel, label=label) for title, key in names]


def gate_panels(result):
    step = result["range"] / 20
    return [Panel("", result["histogram"], "gate", first=(1, step / 2), label="share of tokens and channels",
                  step=step)]


def mixing_panels(result):
    flat = [[x for row in res for x in row] for res in result["res"]]
    return [Panel("read", result["pre"], "stream"), Panel("written", result["post"], "stream"),
            Panel("mixed", flat, "to and from: 1-1, 1-2, .."),
            Panel("all sublayers", result["product"], "from stream", "to stream")]


def draw_map(figure, stat, results):
    """One panel per run, sublayers upwards, tokens to the right."""
    found = present(results)
    longest, n = max(len(r["tokens"]) for *_, r in found), max(len(r["ran"]) for *_, r in found)
    height = min(5, max(2, 0.1 * n + 0.8))
    figure.set_size_inches(min(24, max(7, 0.115 * longest + 1)), len(found) * height + 0.9)
    for axes, (_, label, result) in zip(figure.subplots(len(found), squeeze=False)[:, 0], found):
        T, n = len(result["tokens"]), len(result["ran"])
        axes.imshow(result["ran"], vmin=0, vmax=1, cmap=ListedColormap(["#e6e6e6", "#23395d"]),
                    origin="lower", aspect="auto", interpolation="nearest",
                    extent=(-0.5, T - 0.5, 0.5, n + 0.5))
        axes.set_ylabel(stat.ylabel)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_title(f"{label}: {result['skipped']:.0%} skipped", fontsize=9, loc="left")
        labels = [t.translate({10: "\\n", 13: "\\r", 9: "\\t"}) for t in result["tokens"]]
        # a dollar sign is text, not the start of a formula
        axes.set_xticks(range(T), labels, fontsize=6, family="monospace", parse_math=False,
                        rotation=90 if max(map(len, labels)) > 2 else 0)
        axes.tick_params(axis="x", length=0, pad=3)


def draw_loss(figure, stat, results):
    axes = line_axes(figure, stat, "training tokens")
    for color, label, result in present(results):
        axes.plot(result["tokens"], result["loss"], color=color, lw=0.8)
        axes.plot(result["val_tokens"], result["val_loss"], "o-", color=color, ms=4, lw=1.4, label=label)
    axes.legend(frameon=False, fontsize=9)


# ----------------------------------------------------------------------------- the table

class Stat(NamedTuple):
    measure: Callable
    title: str
    ylabel: str
    caption: str
    log: bool = False
    draw: Callable = draw_stat   # (figure, stat, {run: what measure returned, or None})
    settings: tuple = ()         # of tau, text, tokenizer, norms and history, those that measure takes


STATS = {
    "stream_norm": Stat(
        stream_norm, "Norm of the stream", "root mean square before sublayer l",
        "A stream that grows makes every later update a smaller part of it (PreNorm dilution). The last "
        "point is the stream that the head reads.", log=True),
    "relative_update": Stat(
        relative_update, "Relative update", "|change| / |stream|",
        "How much of the stream each sublayer rewrites: near 0 it hardly does anything, at 1 the change is "
        "as large as what was there.", log=True),
    "cosine": Stat(
        cosine, "Rotation", "cosine of stream before and after",
        "1: the sublayer leaves the direction of the stream, all that a norm lets later layers see, as it "
        "was. Lower: it turns it."),
    "gradient_norm": Stat(
        gradient_norm, "Gradient per sublayer", "norm of the loss gradient",
        "How strongly the loss pulls on each sublayer's weights. An even line: all depths learn.", log=True),
    "removal": Stat(
        removal, "What a sublayer is worth", "loss increase when removed (nats/token)",
        "Each point is the model with that one sublayer taken out, not retrained. Near 0: delete it.",
        log=True),
    "contribution": Stat(
        contribution, "Contribution of a block", "|update| / |stream|",
        "What a block, its attention and its MLP add, relative to the stream they add it to.", log=True,
        draw=partial(draw_lines, keys=("block", "attention", "mlp"), xlabel="block")),
    "block_removal": Stat(
        block_removal, "What a block is worth", "loss increase when removed (nats/token)",
        "Each point is the model with that one block taken out, not retrained.",
        draw=partial(draw_lines, keys=("loss_increase",), xlabel="block")),
    "causal_score": Stat(
        causal_score, "Who depends on whom", "block left out",
        "A row: how much the updates of later blocks change when a block is left out. Dark: they do without "
        "it. Later tokens: it is left out in the first half of the text, and they are in the second.",
        draw=partial(draw_panels, columns=2, vmin=0, vmax=1, cmap="viridis",
                     panels=partial(matrix_panels, xlabel="later block", label="relative change"))),
    "angular_distance": Stat(
        angular_distance, "Angle between depths", "before block",
        "Dark: the stream points the same way before both blocks. A dark square: what is between may go.",
        draw=partial(draw_panels, panels=partial(matrix_panels, xlabel="before block", label="angle / pi"),
                     vmin=0, cmap="viridis")),
    "permutation_score": Stat(
        permutation_score, "Swapped blocks", "block",
        "Relative increase of the loss when two blocks change places. Dark: their order hardly matters.",
        draw=partial(draw_panels, panels=partial(matrix_panels, xlabel="block", label="|change| / loss"),
                     vmin=0, cmap="viridis")),
    "logit_lens": Stat(
        logit_lens, "Logit lens", "nats per token",
        "The head applied to the stream after each block: loss, and distance from the final prediction.",
        draw=partial(draw_lines, keys=("loss", "kl_from_final"), start=0,
                     xlabel="after block (0: embedding)")),
    "calibration": Stat(
        logit_lens, "Calibration of the logit lens", "expected calibration error",
        "How far the confidence in the likeliest token is from how often it is right. 0: says what it knows.",
        draw=partial(draw_lines, keys=("calibration_error",), start=0, xlabel="after block (0: embedding)")),
    "kurtosis": Stat(
        kurtosis, "Outlier channels", "excess kurtosis",
        "0: channels are spread like a Gaussian. Large: a few of them hold most of the stream's norm.",
        draw=partial(draw_lines, keys=("median", "mean"), xlabel="before block")),
    "effective_rank": Stat(
        effective_rank, "Rank of the stream", "effective rank",
        "How many directions the tokens' streams use. Falling: tokens become alike.",
        draw=partial(draw_lines, keys=("effective", "stable"), xlabel="before block")),
    "jacobian": Stat(
        jacobian, "Closeness to the identity", "|J v - v| / |v|",
        "How far a block's map is from doing nothing, in random directions.",
        draw=partial(draw_lines, keys=("distance",), xlabel="block")),
    "attention_sink": Stat(
        attention_sink, "Attention sink", "mean attention to the first token",
        "High: heads that have nothing to say rest on the first token. Dashed: on the first four.",
        draw=partial(draw_lines, keys=("share", "first_four"), xlabel="block")),
    "attention_map": Stat(
        attention_map, "Attention by position", "query",
        "Mean of all blocks and heads. A bright left edge: a sink. A bright diagonal: tokens see themselves.",
        draw=partial(draw_panels, panels=partial(matrix_panels, xlabel="key", label="mean attention"),
                     norm="log", cmap="viridis")),
    "heavy_tail": Stat(
        heavy_tail, "Heavy tails of the weights", "alpha",
        "Exponent of the eigenvalues' power law, of well-trained layers mostly 2 to 6; a gap: no tail yet. "
        "Small matrices have few eigenvalues: see the standard errors in depth.json.",
        draw=partial(draw_lines, keys=("alpha",), xlabel="sublayer l")),
    "weight_outliers": Stat(
        weight_outliers, "Outliers of the weights", "per matrix",
        "Largest |entry| / root mean square, 4 to 5 for a Gaussian; |mean| / standard deviation, near 0 if "
        "centred. Excess kurtosis: see depth.json.", log=True,
        draw=partial(draw_lines, keys=("largest", "off_centre"), xlabel="matrix, from embedding to head")),
    "quantisation": Stat(
        quantisation, "Rounded weights", "loss increase (nats/token)",
        "Matrices of the blocks rounded to the nearest of 2^b values per row. Flat: easy to quantise.",
        draw=partial(draw_lines, keys=("loss_increase",), xlabel="bits", x="bits")),
    "norm_growth": Stat(
        norm_growth, "Growth of the stream before training", "mean square, embedding = 1",
        "Measured at initialisation; grey: the bounds of Xiong et al. for PreNorm at their init.", log=True,
        draw=partial(draw_lines, keys=("initial",), bounds=("lower", "upper"), start=0,
                     xlabel="after block (0: embedding)")),
    "fan_in": Stat(
        fan_in, "Gradient fan-in", "share of the summed gradient norms",
        "Solid: measured over the training. Dashed: the theory's count of gradient terms, fitted.",
        draw=partial(draw_lines, keys=("share", "fit"), xlabel="block"), settings=("norms", "history")),
    "prune_curve": Stat(
        prune_curve, "Pruning", "loss (nats/token)",
        "Blocks removed in each method's order, without further training; `reverse` needs no score. Numbers: "
        "how well it ranks what each block is worth alone, and how much alike on the other half of the text.",
        draw=draw_prune, settings=("norms",)),
    "drop_curve": Stat(
        drop_curve, "Attention, MLPs or blocks removed", "loss (nats/token)",
        "Up to half of them, those that change the stream's direction least, without further training. Flat: "
        "they are redundant. A block is an attention and an MLP: half as many save as much.",
        draw=partial(draw_lines, keys=("block", "attention", "mlp"), start=0, xlabel="number removed")),
    "rotation": Stat(
        rotation, "Cumulative rotation", "degrees turned up to sublayer l",
        "How far the sublayers turn the stream, added up. Where the line is flat, depth is idle."),
    "gain": Stat(
        gain, "Gain", "mean |alpha m|",
        "The relative size of each sublayer's write, known before it runs. Near 0: shut. Dotted: |alpha|, "
        "the most that it can be.", log=True, draw=draw_gain),
    "direction_similarity": Stat(
        direction_similarity, "Preferred directions", "sublayer",
        "Cosine of the stream directions at which two sublayers write most. 1: they serve the same tokens.",
        draw=partial(draw_panels, panels=partial(matrix_panels, xlabel="sublayer", label="cosine"),
                     vmin=-1, vmax=1, cmap="RdBu_r")),
    "depth_attention": Stat(
        depth_attention, "Attention over depth", "reading sublayer",
        "A row: what a sublayer reads, from the embedding (0) to the newest source. One colour: PreNorm's "
        "sum. A bright column: many read it. Weight is not importance: what is read may not be needed.",
        draw=partial(draw_panels, panels=depth_attention_panels, columns=2, cmap="viridis", vmin=0)),
    "gate": Stat(
        gate, "Gates", "sublayer l",
        "A row: how a sublayer's gates are spread over tokens and channels. In one bin: a constant would do.",
        draw=partial(draw_panels, panels=gate_panels, cmap="viridis", vmin=0)),
    "stream_mixing": Stat(
        stream_mixing, "Mixing of the streams", "sublayer l",
        "Means over tokens. Mixed: n columns per target stream; bright where a stream stays itself, dark "
        "elsewhere: the streams stay apart. All sublayers: where what enters a stream below ends up on top.",
        draw=partial(draw_panels, panels=mixing_panels, cmap="viridis", vmin=0)),
    "norm_confidence": Stat(
        norm_confidence, "The norm as confidence", "mean loss (nats/token)",
        "Tokens in ten groups by the norm of their last stream. Falling: a larger norm is a surer model.",
        draw=draw_deciles),
    "skip_share": Stat(
        skip_share, "Who skips what", "share of the tokens that skip sublayer l",
        "Thresholds: a model's own if it was trained to skip, else set to skip --skip of all sublayer runs.",
        settings=("tau",)),
    "skip_curve": Stat(
        skip_curve, "Loss against skipping", "loss (nats/token)",
        "One model per line, at rising thresholds, not retrained. A line that stays flat skips at no cost.",
        draw=partial(draw_lines, keys=("loss",), x="realised",
                     xlabel="share of the sublayer runs that are skipped")),
    "flops_curve": Stat(
        skip_curve, "Loss against compute", "loss (nats/token)",
        "One model per line: dense on the right, skipping more and more to the left. Lower left is better.",
        draw=partial(draw_lines, keys=("loss",), x="flops", xlabel="executed forward FLOPs per token")),
    "depth_map": Stat(
        depth_map, "Depth per token", "sublayer l",
        "Dark: the token ran the sublayer; light: it skipped it. Odd rows are attention, even rows MLP.",
        draw=draw_map, settings=("tau", "text", "tokenizer")),
    "loss_curve": Stat(
        loss_curve, "Loss curves", "loss (nats/token)",
        "Thin lines: training loss, averaged since the last point. Dots: loss on the fixed validation "
        "windows. Compare runs on the same data only.", draw=draw_loss, settings=("history",)),
}


# ----------------------------------------------------------------------------- main

def parse(argv):
    parser = Parser("analyze.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    allow_abbrev=False)
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument("--out", default="figures", help="folder of the results (default figures)")
    parser.add_argument("--windows", type=int, default=16, help="validation windows (default 16)")
    parser.add_argument("--batch_size", type=int, default=8, help="windows per forward pass (default 8)")
    names = ", ".join(STATS)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"some of: {names}")
    parser.add_argument("--skip", type=float, default=0.25, metavar="RATE", help="share of the sublayer runs "
                        "that a dense-trained model skips in skip_share and depth_map (default 0.25)")
    parser.add_argument("--prune", metavar="METHOD:K", help="the models without K blocks, see sample.py")
    parser.add_argument("--text", help="text of depth_map (default: the start of the first window)")
    parser.add_argument("--text_file", help="UTF-8 file with the text of depth_map")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")
    parser.add_argument("--best", action="store_true", help="the best checkpoints instead of the last ones")
    args = parser.parse(argv)
    for name in args.only:
        if name not in STATS:
            parser.error(f"--only {name}: no such statistic; choose from {names}")
    for name in ("windows", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be 1 or more")
    if not 0 <= args.skip < 1:
        parser.error(f"--skip {args.skip}: is a share; use a value from 0 to below 1")
    if args.text is not None and args.text_file is not None:
        parser.error("--text and --text_file: give one of them")
    if args.text_file is not None:
        args.text = parser.read("--text_file", args.text_file)
    if args.text == "":
        parser.error(f"--text{'_file ' + args.text_file if args.text_file else ''}: is empty; give some text")
    if Path(args.out).exists() and not Path(args.out).is_dir():
        parser.error(f"--out {args.out}: is a file; name a folder")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; use --device cpu")
    return args


def name_runs(runs):
    """{label: folder}: the folder's name, or its whole path where two runs share a name."""
    names = [Path(run).resolve().name for run in runs]
    return {name if names.count(name) == 1 else str(run): run for name, run in zip(names, runs)}


def main(argv=None):
    args = parse(argv)
    runs, out = name_runs(args.runs), Path(args.out)
    try:   # now, not after minutes of measuring
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--out {out}: can't make that folder ({error.strerror}); name another one")
    which = "best.pt" if args.best else "ckpt.pt"
    loaded = {label: load_run(run, pick_device(vars(args)), which)
              # all of them before the first is measured: an error comes at once
              for label, run in runs.items()}
    if len({config["data"] for _, config in loaded.values()}) > 1:
        print("analyze.py: these runs have different --data, their losses can't be compared", file=sys.stderr)
    wanted = args.only or [*STATS]
    results, lacking = {}, {}   # lacking: {(label, reason): names}
    for label, (model, config) in loaded.items():
        windows = val_windows(config["data"], config["block_size"], args.windows)
        x, y = (t.to(model.turn.device) for t in windows)
        # batches of one size, so that their means can be averaged
        size = max(n for n in range(1, min(args.batch_size, args.windows) + 1) if args.windows % n == 0)
        batches = list(zip(x.split(size), y.split(size)))
        shown = ("residual", "n_layer", "n_head", "n_embd", "data", "mod", "mod_rate")
        results[label] = {"config": {key: config[key] for key in shown if key in config}}
        settings = dict(tau=None, text=args.text, tokenizer=config["tokenizer"], norms=model.grad_norms,
                        history=read_metrics(runs[label]))
        if args.prune:
            results[label]["removed"] = sorted(prune(model, runs[label], config, args.prune))
        if any("tau" in STATS[name].settings for name in wanted) and model.can_skip:
            if not skips_by_itself(model):
                settings["tau"] = skip_threshold(runs[label], model, config, args.skip, which)
        measured = {}   # two statistics may be two views of one measurement
        for name in wanted:
            measure, given = STATS[name].measure, {key: settings[key] for key in STATS[name].settings}
            try:
                if measure not in measured:
                    measured[measure] = measure(model, batches, **given)
                results[label][name] = measured[measure]
            except ValueError as reason:
                lacking.setdefault((label, str(reason)), []).append(name)
    for (label, reason), names in lacking.items():
        # what no run has is another residual's: not worth a word, unless it was asked for
        names = [name for name in names if args.only or any(name in run for run in results.values())]
        if names:
            print(f"analyze.py: {label}: left out of {', '.join(names)}: {reason}", file=sys.stderr)
    report = dict(windows=args.windows, skip=args.skip, runs=results)
    write_file(out / "depth.json", lambda f: f.write(json.dumps(report, indent=1).encode() + b"\n"))
    drawn = [name for name in wanted if any(name in run for run in results.values())]
    for name in drawn:
        found = {label: run.get(name) for label, run in results.items()}
        save_figure(out / f"{name}.png", STATS[name], found)
    pages = {}   # name: (title, figures)
    if not args.only:   # a page per run, and one that compares them
        for label, run in results.items():
            images = {name: io.BytesIO() for name in drawn if name in run}
            for name, image in images.items():
                draw_figure(image, STATS[name], {label: run[name]})
                image.seek(0)
            title = ", ".join(f"{key} {value}" for key, value in run["config"].items())
            pages[f"report-{label.replace('/', '-')}"] = f"{label}: {title}", [*images.values()]
        if len(runs) > 1:
            pages["comparison"] = " / ".join(runs), [out / f"{name}.png" for name in drawn]
    for name, (title, images) in pages.items():
        save_page(out / f"{name}.png", title, images)
    print(f"{out}: depth.json" + "".join(f", {name}.png" for name in (*drawn, *pages)))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
