"""analyze.py: records and statistics against what they must be for models that one can see through,
in float64; then figures, the page and the command line. The puzzle's statistics are in
test_inside.py."""

import itertools
import json
import math
import re
import shutil
import subprocess
import textwrap
from functools import cache, partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import analyze
import model as M
import prepare
import train
from analyze import NotHere, Record, effects, read_and_write
from conftest import (ROOT, attention_by_hand, ids, logits, make, randn, refused,
                      rms_norm_by_hand as rms_norm, same, sublayers_by_hand)
from model import GatePolicy, Trace, map_stream

pytestmark = pytest.mark.usefixtures("own_residual")
L = 4   # blocks

@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield

def run_of(residual="pre", n=12, **config):
    """A Run with n windows of random tokens"""
    model = make(residual, **dict(n_layer=L, vocab_size=320) | config)
    settings = dict(data="nowhere", warmup=0.5)
    windows = ids(n, 12, V=256), ids(n, 12, V=256, seed=1)
    return analyze.Run(model, settings, windows, dict(tokenizer="bytes"))

def windows_of(run, first=0):
    """Every fourth window: idx, targets"""
    return [torch.cat(part)[first::4] for part in zip(*run.batches)]

def loss_of(run, first=0, policy=None, removed=()):
    idx, targets = windows_of(run, first)
    return run.model(idx, targets, trace=Trace(run.model, policy, removed))[1].item()

def rise(run, removed):
    return pytest.approx(loss_of(run, removed=removed) - loss_of(run), abs=1e-9)

def rms(x):
    return x.square().mean(-1).sqrt()

def where_run(mask, new, stream):
    if mask.all():   # a stream may gain tensors
        return new
    return map_stream(lambda x, new: torch.where(M.expand_mask(mask, x), new, x), stream, new)

# -----------------------------------------------------------------------------
# recording a forward pass

@pytest.mark.parametrize("residual, config", [
    *((name, {}) for name in (*M.RESIDUALS, "own", "attnres:group=3", "hyper:kind=mhc")),
    ("pre", dict(repeat="1-2:2")), ("nag", dict(mod="gate:below=0.3")),
    ("pre", dict(mod="router:rate=0.3")), ("pre", dict(mod="drop:rate=0.2")),
    *((name, dict(mod="random:rate=0.4")) for name in ("pre", "peri", "gated", "own", "x0"))],
    ids=str)
def test_record(residual, config):
    """Residuals that run again with the recorded updates come to the same streams and logits, and
    the updates are what the sublayers make of what they read."""
    model, mod = make(residual, n_layer=4, **config), config.get("mod", "none")
    torch.manual_seed(0)
    rec = Record(model, ids())
    torch.manual_seed(0)
    same(model.final.head(rec.reads[-1], model.lm_head), logits(model))
    assert rec.masks.all() == (mod.split(":")[0] in ("none", "drop")) and rec.masks.any()
    sublayers = [f for _, _, f in sublayers_by_hand(model)]
    assert len(sublayers) == len(rec.updates) == len(rec.masks) == len(rec.streams) - 1
    for i, (f, update, mask) in enumerate(zip(sublayers, rec.updates, rec.masks)):
        assert (update[~mask] == 0).all()
        same(update[mask], f(rec.reads[i])[mask])
        if "router" not in mod:   # it changes the stream, too
            new = read_and_write(rec.residuals[i], rec.streams[i], update)[1]
            map_stream(same, where_run(mask, new, rec.streams[i]), rec.streams[i + 1])

def test_records_leave_the_model_as_it_was():
    model = make()
    with pytest.raises(ZeroDivisionError):
        Record(model, ids(), lambda trace: 1 / 0)
    assert not any(module._forward_hooks for module in model.modules())

@pytest.mark.parametrize("residual", [
    "pre", "nag", "attnres", "attnres:group=3", "unet", "siamese"])
def test_record_without_sublayers(residual):
    """What is removed writes nothing, and nobody reads it."""
    rec = Record(make(residual), ids(), removed=(3,))
    assert not rec.updates[3].any() and not rec.masks[3].any() and rec.masks[4].all()
    if residual in ("pre", "nag"):   # others can't skip: there, their rule gets an update of zeros
        map_stream(same, rec.streams[3], rec.streams[4])
    table = effects(rec)
    assert table[4:, 4].max() == 0 and table[4:, 3].min() > 0

class InPlace(M.Residual):
    """PreNorm that changes the update which f returns"""
    def forward(self, x, f):
        return f(self.norm(x)).add_(x)

@pytest.mark.parametrize("mod", ["none", "random:rate=0.4"])
@pytest.mark.parametrize("residual", [*M.RESIDUALS, "attnres:group=3", "in place"])
def test_identity(residual, mod, monkeypatch):
    monkeypatch.setitem(M.RESIDUALS, "in place", InPlace)
    if residual != "in place" and not make(residual).final.can_skip:
        mod = "none"
    rec = Record(make(residual, mod=mod), ids())
    before = torch.stack(rec.updates)
    assert rec.identity_error() < 1e-12
    assert len(rec.reads) == 7 and effects(rec).nansum() > 0
    assert torch.equal(torch.stack(rec.updates), before)

def test_identity_finds_a_wrong_update():
    rec = Record(make("nag"), ids())
    rec.updates[3] *= -1
    assert rec.identity_error() > 1e-3

def test_as_tensor():
    a, b, c = (randn(2, 3, 8, seed=seed) for seed in range(3))
    same(analyze.as_tensor(a), a)
    same(analyze.as_tensor(torch.stack([a, b], -2)), (a + b) / 2)
    same(analyze.as_tensor(((a, b, c), (a, a, a))), a + b + c)             # attnres
    same(analyze.as_tensor((a, b[..., :1])), a * b[..., :1].exp())         # nag
    for stream in (a, b), (a, ()), (a, (a, c)), (a, b, c):                 # x0, unet, denseformer
        same(analyze.as_tensor(stream), a)

def test_angles():
    x, y = randn(5, 8), randn(5, 8, seed=1)
    same(analyze.angle(x, y), F.cosine_similarity(x, y, dim=-1).acos().rad2deg(), 1e-8)
    tiny = analyze.angle(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1e-10]))
    assert tiny.item() == pytest.approx(math.degrees(1e-10))   # its cosine is 1 in floating point
    same(analyze.angle(x, -3 * x), torch.full((5,), 180.0).double())

def test_nag_rotates_by_its_gate():
    rec = Record(make("nag", mod="gate:below=0.3"), ids())
    gates = torch.stack([residual.gate(stream)[..., 0]
                         for residual, stream in zip(rec.residuals, rec.streams)])
    assert 0 < rec.masks.sum() < rec.masks.numel() and torch.equal(rec.masks, gates.abs() >= 0.3)
    same(rec.rotations(), gates.abs().atan().rad2deg() * rec.masks, 1e-6)

# -----------------------------------------------------------------------------
# reads

class Chain(M.Residual):
    """Each sublayer reads the update of the one before, and nothing else."""
    def forward(self, x, f):
        return f(self.norm(x))

class SecondLast(M.Residual):
    """Sublayer j reads the update of sublayer j - 2."""
    def expand(self, x):
        return x, x.clone()

    def forward(self, stream, f):
        new, old = stream
        return f(self.norm(old)), new

    def reduce(self, stream):
        return self.norm(stream[0])

def test_reads_of_rules_that_one_can_see_through(monkeypatch):
    monkeypatch.setitem(M.RESIDUALS, "chain", Chain)
    monkeypatch.setitem(M.RESIDUALS, "second", SecondLast)
    table = effects(Record(make("chain"), ids()))
    assert torch.equal(table.isnan(), torch.ones(7, 7).triu(1).bool())   # what comes later
    same(table.tril().nan_to_num(0), torch.eye(7).double())
    table = effects(Record(make("second"), ids()))
    writers = torch.tensor([0, 0, 1, 2, 3, 4, 6])   # the head reads the newest one
    same(table.nan_to_num(0), F.one_hot(writers, 7).double())

@pytest.mark.parametrize("residual, mod", [
    ("nag", "gate:below=0.3"), ("own", "random:rate=0.4"), ("hyper", "none"), ("unet", "none"),
    ("pre", "random:rate=0.4"), ("gated", "random:rate=0.4"), ("attnres:group=3", "none"),
    ("post", "random:rate=0.4")])
def test_reads_equal_a_run_from_the_embedding_on(residual, mod):
    """... in which the writer writes zeros, and gates and weights react."""
    rec = Record(make(residual, mod=mod), ids())
    writers, table = [rec.embedding, *rec.updates], effects(rec)
    for writer in range(len(writers)):
        x, *updates = [torch.zeros_like(x) if i == writer else x for i, x in enumerate(writers)]
        stream, reads = rec.model.final.expand(x), []
        for residual, update, mask in zip(rec.residuals, updates, rec.masks):
            read, new = read_and_write(residual, stream, update)
            stream = where_run(mask, new, stream)
            reads.append(read)
        reads.append(rec.model.final.reduce(stream))
        for reader in range(writer, len(writers)):
            usual = rec.reads[reader]
            gone = (usual - reads[reader]).norm(dim=-1) / usual.norm(dim=-1)
            same(table[reader, writer], gone.mean())

def test_reads_are_a_mean_over_windows():
    run = run_of(n=36)   # batches of 8 windows and of 1
    found, sentence = analyze.reads(run)
    right = effects(Record(run.model, windows_of(run)[0]))
    same(found[""].nan_to_num(-1), right.nan_to_num(-1), 1e-9)
    assert found["columns"] == ["e", "a0", "m0", "a1", "m1", "a2", "m2", "a3", "m3"]
    assert found["rows"] == [*found["columns"][1:], "head"]

# -----------------------------------------------------------------------------
# streams

@pytest.mark.parametrize("residual", ["pre", "attnres:group=4", "hyper", "nag"])
def test_magnitudes(residual):
    run = run_of(residual)
    idx, _ = windows_of(run)
    trace, found = Trace(run.model, keep_streams=True), []
    logits(run.model, idx, trace=trace)
    streams = trace.streams
    total = newest = dict(pre=lambda s: s, attnres=lambda s: sum(s[0]), hyper=lambda s: s.mean(-2),
                          nag=lambda s: s[0] * s[1].exp())[residual.split(":")[0]]
    if residual == "attnres:group=4":   # a new sum after each group
        newest = lambda s: s[0][-1]
    for before, after in itertools.pairwise(streams):
        x, y = total(before), total(after)
        cosine = (x * y).sum(-1) / x.norm(dim=-1) / y.norm(dim=-1)
        found.append([rms(newest(after)).mean(), ((y - x).norm(dim=-1) / x.norm(dim=-1)).mean(),
                      cosine.acos().rad2deg().mean()])
    stream, change, rotation = torch.tensor(found).T.tolist()
    panels, _ = analyze.magnitudes(run)
    assert panels["stream (rms)"]["stream"] == pytest.approx(stream)
    assert panels["change / stream"]["stream"] == pytest.approx(change)
    assert panels["rotation (degrees)"]["stream"] == pytest.approx(rotation)
    if residual == "pre":   # |u| / |x|
        attention, mlp = panels["update (rms)"].values()
        sizes = [rms(y - x).mean().item() for x, y in itertools.pairwise(streams)]
        assert attention == [(i, pytest.approx(sizes[i])) for i in range(0, 8, 2)]
        assert mlp == [(i, pytest.approx(sizes[i])) for i in range(1, 8, 2)]

@pytest.mark.parametrize("group, sources", [
    (1, ["e", "a0", "m0", "a1", "m1", "a2", "m2", "a3", "m3"]), (3, ["e", "a1", "m2", "m3"]),
    (4, ["e", "m1", "m3"])])
def test_softmax_weights_over_depth(group, sources):
    """arXiv:2603.15031, eqs. 2 to 4, a mean over tokens"""
    run = run_of(f"attnres:group={group}")
    rec = Record(run.model, windows_of(run)[0])
    found, _ = analyze.depth_weights(run)
    assert found["columns"] == sources and found["rows"][::8] == ["a0", "head"]
    same(found[""].nansum(1), torch.ones(9).double())
    assert found[""][0, 0] == 1
    written = [rec.embedding]
    for i, residual in enumerate([*rec.residuals, run.model.final]):
        if i > 0:
            query = residual.query * residual.key_weight
            phi = torch.stack([(query * rms_norm(source)).sum(-1).exp() for source in written])
            same(found[""][i, :len(written)], (phi / phi.sum(0)).mean((1, 2)), 1e-8)
        assert found[""][i, len(written):].isnan().all()
        if i < 8:
            written = [*written, rec.updates[i]] if i % group == 0 else [
                *written[:-1], written[-1] + rec.updates[i]]

@pytest.mark.parametrize("residual", [
    "hyper", "hyper:kind=mhc,n=2", "hyper:kind=identity", "gated"])
def test_read_and_write_weights(residual):
    run = run_of(residual)
    found, _ = analyze.depth_weights(run)
    trace = Trace(run.model, keep_streams=True)
    logits(run.model, windows_of(run)[0], trace=trace)
    for i, (residual, X) in enumerate(zip(run.model.residuals(), trace.streams)):
        if residual.config.residual == "gated":
            r = residual.normalized(X)
            weights = residual.read_gate(r).mean(-1), residual.write_weights(r)
        else:
            weights = residual.weights(X)
        same(found["read"][i], weights[0].mean((0, 1)))
        same(found["write"][i], weights[1].mean((0, 1)))
    assert found["rows"] == run.names and len(found["columns"]) == found["read"].shape[1]

def test_weights_of_denseformer():
    run = run_of("denseformer")
    table = analyze.depth_weights(run)[0][""]
    for block_idx, block in enumerate(run.model.blocks):
        assert torch.equal(table[block_idx, :block_idx + 2], block.mlp_residual.weights)
        assert table[block_idx, block_idx + 2:].isnan().all()

def test_sinks():
    run = run_of()
    idx, _ = windows_of(run)
    attn, x = run.model.blocks[1].attn, Record(run.model, idx).reads[2]
    q, k = ((x @ w.T).view(*x.shape[:2], 2, 8) for w in attn.c_attn.weight.chunk(3)[:2])
    q, k = (M.apply_rotary(rms_norm(y), run.model.rotary[:12]) for y in (q, k))
    scores = torch.einsum("bihc,bjhc->bhij", q, k) * 128 ** 0.5 / 8
    scores = scores.masked_fill(torch.ones(12, 12).bool().triu(1), -math.inf)
    first = scores.softmax(-1)[:, :, 6:, 0].mean().item()
    panels, _ = analyze.sinks(run)
    shares = dict(panels["attention to the first token"]["share"])
    assert list(shares) == [0, 2, 4, 6] and shares[2] == pytest.approx(first)
    x = Record(run.model, idx).streams[3]
    centered = x - x.mean(-1, keepdim=True)
    kurtosis = centered.pow(4).mean(-1) / centered.square().mean(-1) ** 2
    assert panels["kurtosis"]["stream"][3] == pytest.approx(kurtosis.mean().item())
    largest = panels["largest channel / rms"]["stream"]
    assert largest[3] == pytest.approx((x.abs().amax(-1) / rms(x)).mean().item())

# -----------------------------------------------------------------------------
# losses

def test_means_over_batches():
    sizes = [3, 5, 1]
    batches = [(torch.full((n, 2), n), None) for n in sizes]
    mean = analyze.mean_over(batches, lambda idx, _: idx.double().mean())
    assert mean.item() == pytest.approx((9 + 25 + 1) / 9)
    run = run_of(n=45)   # some statistics take every fourth window, others choose on other ones
    assert run.loss() == pytest.approx(loss_of(run)) == run.base_loss
    assert run.loss(batches=run.other_quarter) == pytest.approx(loss_of(run, first=2))
    assert run.metrics["val_loss"] == pytest.approx(run.loss(batches=run.batches), rel=1e-6)
    assert run.loss() != pytest.approx(loss_of(run, first=2))

@pytest.mark.parametrize("residual", ["pre", "nag", "attnres", "own"])
def test_ablation_and_logit_lens(residual):
    run = run_of(residual)
    lens = analyze.logit_lens(run)[0][""]["loss"]
    assert [block for block, _ in lens] == [-1, 0, 1, 2, 3]
    idx, targets = windows_of(run)
    embedding = run.model.logits(run.model.final.expand(run.model.wte(idx)))
    first = F.cross_entropy(embedding.flatten(0, 1), targets.flatten()).item()
    assert lens[0][1] == pytest.approx(first) and lens[-1][1] == pytest.approx(run.base_loss)
    panels, _ = analyze.ablation(run)
    assert panels["without a sublayer"]["attention"][2] == rise(run, {4})
    assert panels["without a sublayer"]["MLP"][1] == rise(run, {3})
    assert panels["without the block"]["block"] == [rise(run, {2 * i, 2 * i + 1}) for i in range(L)]

def test_ablation_of_zeros_is_0():
    run = run_of()
    for f in run.model.blocks[2].attn, run.model.blocks[2].mlp:
        f.c_proj.weight.zero_()
    panels, _ = analyze.ablation(run)
    lines = [*panels["without a sublayer"].values(), *panels["without the block"].values()]
    for line in lines:
        assert [abs(value) < 1e-12 for value in line] == [False, False, True, False]

def test_a_repeated_block_is_removed_wherever_it_runs():
    run = run_of(repeat="1-2:2")   # blocks 0 1 2 1 2 3
    assert run.block_ablation[2] == rise(run, {4, 5, 8, 9})
    assert analyze.ablation(run)[0]["without a sublayer"]["MLP"][1] == rise(run, {3, 7})

def test_quantization():
    run = run_of()
    before = [p.clone() for p in run.model.parameters()]
    rises = dict(analyze.quantization(run)[0][""]["rise"])
    assert list(rises) == [8, 6, 4, 3] and all(map(torch.equal, run.model.parameters(), before))
    usual = loss_of(run)
    for bits, largest in (8, 127), (4, 7), (3, 3):   # integers from -largest to largest
        for p, original in zip(run.model.parameters(), before):
            if p.dim() == 2:
                size = original.abs().amax(1, keepdim=True)
                p.copy_((original / size * largest).round() / largest * size)
        assert rises[bits] == pytest.approx(loss_of(run) - usual, abs=1e-9)
        assert bits == 8 or abs(rises[bits]) > 1e-4
    del run.__dict__["base_loss"]
    again = dict(analyze.quantization(run)[0][""]["rise"])
    assert abs(again[3]) < 1e-12 < abs(again[4])   # what has these values already, keeps them

def test_curves():
    run = run_of()
    with pytest.raises(NotHere):
        analyze.curves(run)
    run.log = [dict(step=0, flops=0, seconds=1, val_loss=9.0), dict(step=2, loss=3.0),
               dict(step=3, flops=30, seconds=2, val_loss=2.0),
               dict(step=4, flops=70, seconds=5, val_loss=1.5)]
    panels, _ = analyze.curves(run)
    assert [panel["loss"] for panel in panels.values()] == [
        [(3, 2.0), (4, 1.5)], [(30, 2.0), (70, 1.5)], [(2, 2.0), (5, 1.5)]]

# -----------------------------------------------------------------------------
# gradients and pruning

def log_gradients(run, *norms):
    """At iterations 2, 4, 6, ...; half of them are the warmup."""
    run.log = [dict(step=2 * n, grad_norms=each) for n, each in enumerate(norms, 1)]

@pytest.mark.parametrize("flags, fan_in", [
    (dict(), [4, 3, 2, 1]), (dict(repeat="1:2"), [5, 4 + 3, 2, 1]),
    (dict(deep_supervision=True), [10, 6, 3, 1]),
    (dict(deep_supervision=True, repeat="1:2"), [15, 10 + 6, 3, 1])])
def test_fan_in_is_linear_or_quadratic(flags, fan_in):
    run = run_of(**flags)
    with pytest.raises(NotHere):
        analyze.fan_in(run)
    log_gradients(run, [9, 9, 9, 9.0], [4, 1, 1, 5.0], [4, 1, 3, 1.0])
    lines = analyze.fan_in(run)[0][""]
    assert lines["fan-in"] == pytest.approx(np.array(fan_in) / np.mean(fan_in))
    assert lines["measured"] == pytest.approx(np.array([4, 1, 2, 3]) / 2.5)   # without the warmup

def test_rank_correlation():
    ranks = analyze.rank_correlation
    assert ranks([4, 1, 2, 3], [4, 3, 2, 1]) == pytest.approx(1 - 6 * 8 / 60)   # Spearman's formula
    assert ranks([1, 1, 2, 3], [9, 9, 4, 0]) == pytest.approx(-1)   # equal ones share a rank
    assert ranks([1, 1, 1], [1, 2, 3]) == 0

def test_gradients_of_wide_blocks_are_larger():
    run = run_of(taper="linear")
    norms = [M.num_params(block) ** 0.5 for block in run.model.blocks]
    log_gradients(run, norms, norms)
    run.log[0]["step"] = run.log[1]["step"]
    assert norms[0] > 1.1 * norms[3]
    assert analyze.logged_gradients(run) == pytest.approx(np.ones((2, 4)))
    del run.model.blocks[1:]
    with pytest.raises(NotHere):
        analyze.fan_in(run)

@pytest.mark.parametrize("flags, places", [
    (dict(), [{0, 1}, {2, 3}, {4, 5}, {6, 7}]),
    (dict(repeat="1:2"), [{0, 1}, {2, 3, 4, 5}, {6, 7}, {8, 9}])])
def test_which_blocks_go_first(flags, places):
    run = run_of(**flags)
    log_gradients(run, [1, 2, 3, 4.0], [4, 1, 1, 4.0], [4, 1, 3, 2.0])
    lines = analyze.pruning(run)[0][""]
    streams = Record(run.model, windows_of(run, first=2)[0]).streams[::2]
    changes = [1 - F.cosine_similarity(*pair, dim=-1).mean().item()
               for pair in itertools.pairwise(streams)]
    influence = np.bincount(run.model.block_order, changes)
    orders = {"CascadeFlow": [1, 2, 3, 0], "Block Influence": np.argsort(influence),
              "ablation": np.argsort(run.block_ablation), "last first": [3, 2, 1, 0]}
    for name, order in orders.items():
        assert lines[name] == [rise(run, set().union(*(places[b] for b in order[:n])))
                               for n in range(L)]
    for n, mean in enumerate(lines["random"]):   # between the best and the worst set
        rises = [rise(run, set().union(*blocks)).expected
                 for blocks in itertools.combinations(places, n)]
        assert min(rises) - 1e-9 <= mean <= max(rises) + 1e-9 and (n == 0 or mean != min(rises))

# -----------------------------------------------------------------------------
# skipping

def test_random_tokens_are_the_same_whatever_else_is_measured():
    alone, after_others = run_of(mod="random:rate=0.5"), run_of(mod="random:rate=0.5")
    assert after_others.block_ablation and analyze.reads(after_others)
    assert analyze.ablation(alone) == analyze.ablation(after_others)
    run, rates = run_of("nag", n=64), torch.linspace(0, 1, 2 * L)
    same(run.run_rates(analyze.random_policy(rates)), rates, 0.1)

@pytest.mark.parametrize("residual, mod, is_own, below", [
    ("pre", "none", True, None), ("pre", "random:rate=0.2", True, None),
    ("pre", "drop:rate=0.2", False, None),   # which skips in training only
    ("nag", "none", False, 0.05), ("nag", "gate:below=0.2", True, 0.2)])
def test_skip_policy(residual, mod, is_own, below):
    model = make(residual, mod=mod)
    policy = analyze.skip_policy(model)
    assert (policy is model.policy) == is_own
    assert below is None or policy.threshold.item() == pytest.approx(below)
    assert policy is not None or mod in ("none", "drop:rate=0.2")

@pytest.mark.parametrize("mod", ["none", "gate:below=0.6"])
def test_skip_rate(mod):
    run = run_of("nag", mod=mod)
    below = dict(none=0.05).get(mod, 0.6)
    run.model.blocks[1].mlp_residual.alpha.mul_(-0.2)   # the gate's size counts, not its sign
    rec = Record(run.model, torch.cat([idx for idx, _ in run.batches]),
                 GatePolicy(run.model.config, below=below))
    skipped = analyze.skip_rate(run)[0][""]["skipped"]
    same(skipped, 1 - rec.masks.double().mean((1, 2)).float(), 1e-6)
    assert 0 < skipped.mean() < 1

@pytest.mark.parametrize("residual", ["nag", "pre", "attnres", "peri"])
def test_fixed_sets(residual):
    """No worse than greedy, by rotation or each on its own; of one sublayer, the best. All on the
    windows on which they are chosen"""
    run = run_of(residual, n_layer=3)
    run.model.lm_head.weight.mul_(5)   # the model is surer, so that losses differ
    layers = range(6)

    @cache
    def loss(removed):
        return loss_of(run, first=2, policy=analyze.dense, removed=removed)

    rotation = Record(run.model, windows_of(run, first=2)[0]).rotations().mean((1, 2)).tolist()
    alone = [loss(frozenset([i])) for i in layers]
    orders = [sorted(layers, key=lambda i: score[i]) for score in (rotation, alone)]
    greedy = frozenset()
    for n, found in enumerate(analyze.fixed_sets(run, 5), 1):
        greedy = min((greedy | {i} for i in layers if i not in greedy), key=loss)
        others = [loss(frozenset(order[:n])) for order in orders]
        best = min(loss(frozenset(each)) for each in itertools.combinations(layers, n))
        assert len(found) == n and best - 1e-12 <= loss(found) <= min(loss(greedy), *others) + 1e-12
        assert n > 1 or loss(found) == best

def test_skip_curve():
    run = run_of("nag", n=64)
    run.model.blocks[1].mlp_residual.alpha.fill_(-0.6)   # the gate's size counts, not its sign
    run.model.blocks[2].attn_residual.alpha.fill_(0.16)
    [lines] = analyze.skip_curve(run)[0].values()
    by_gate, fixed, random = lines["by gate"], lines["fixed set"], lines["random"]
    rec = Record(run.model, run.other_quarter[0][0])   # its gates set the thresholds
    gates = torch.stack([residual.gate(stream).abs()
                         for residual, stream in zip(rec.residuals, rec.streams)])
    for share, point in zip((0.1, 0.25, 0.4, 0.5), by_gate[1:]):
        policy = GatePolicy(run.model.config, below=gates.quantile(share).item())
        masks = Record(run.model, windows_of(run)[0], policy).masks
        skipped = 100 * (1 - masks.double().mean().item())
        rise_by_gate = loss_of(run, policy=policy) - loss_of(run)
        assert point == pytest.approx((skipped, rise_by_gate), abs=1e-4)
        assert abs(skipped - 100 * share) < 10
    assert [x for x, _ in random] == [x for x, _ in by_gate] and random[3] != by_gate[3]
    assert [x for x, _ in fixed] == [100 * n / (2 * L) for n in range(len(fixed))]
    assert fixed[-1][0] >= by_gate[-1][0] > 40
    assert fixed[3][1] == rise(run, analyze.fixed_sets(run, 3)[2])
    assert by_gate[0] == fixed[0] == random[0] == (0.0, pytest.approx(0))

def test_a_model_trained_to_skip_skips_in_every_statistic():
    run = run_of("nag", mod="gate:below=99")
    rotation = analyze.magnitudes(run)[0]["rotation (degrees)"]["stream"]
    assert rotation == pytest.approx([0] * 2 * L)
    assert analyze.depth_map(run)[0][""].isnan().all()
    assert (analyze.skip_rate(run)[0][""]["skipped"] == 1).all()
    [lines] = analyze.skip_curve(run)[0].values()
    assert lines["as trained"] == [(100, pytest.approx(0))]
    full = loss_of(run, policy=analyze.dense) - loss_of(run)
    assert lines["by gate"][0] == lines["fixed set"][0] == (0, pytest.approx(full))

@pytest.mark.parametrize("residual", ["nag", "pre"])
def test_depth_map(residual):
    """The angle of each token in each sublayer, nan if it skips"""
    run = run_of(residual)
    idx = torch.tensor([[*"a\té$x$\n".encode(), 256, *b"xyz"]])
    run.batches = [(idx, idx)]
    found, _ = analyze.depth_map(run)
    assert found["columns"] == ["a", r"\t", "\ufffd", "\ufffd", "$", "x", "$", "↵",
                                "<|endoftext|>", "x", "y", "z"]   # é has two bytes
    policy = GatePolicy(run.model.config, below=0.05) if residual == "nag" else None
    rec = Record(run.model, idx, policy)
    assert rec.masks.all() == (residual == "pre")
    right = rec.rotations().where(rec.masks, torch.nan)[:, 0]
    torch.testing.assert_close(found[""], right, equal_nan=True)

# -----------------------------------------------------------------------------
# every statistic on every rule, and one's own

def lacks(residual, mod):
    """Statistics that a model does not have"""
    name, missing = residual.split(":")[0], set()
    if name != "nag" and mod.split(":")[0] in ("none", "drop"):
        missing |= {"skip_rate", "skips_by_steps"}
    if name not in ("attnres", "hyper", "gated", "denseformer"):
        missing |= {"depth_weights"}
    cannot_skip = "siamese", "unet", "attnres", "denseformer", "hyper"
    if name in cannot_skip and "identity" not in residual:
        missing |= {"skip_curve"}
    if mod.startswith("router"):
        missing |= {"skip_curve", "reads", "patching"}
    return missing

@pytest.mark.parametrize("residual, mod", [
    *((name, "none") for name in (*M.RESIDUALS, "own", "attnres:group=3", "hyper:kind=identity")),
    ("nag", "gate:rate=0.25"), ("nag", "random:rate=0.2"), ("pre", "router:rate=0.2"),
    ("pre", "drop:rate=0.2"), ("x0", "random:rate=0.2")])
def test_every_statistic_runs_or_refuses_in_a_sentence(residual, mod, steps_data):
    model = make(residual, dtype=torch.float32, n_layer=2, block_size=32, vocab_size=320, mod=mod)
    if residual == "nag" and "rate" in mod:
        getattr(model.policy, "threshold", torch.zeros(())).fill_(0.4)
    windows = prepare.windows_of(steps_data, "val", 32, 16)
    settings, meta = dict(data=steps_data, warmup=0), prepare.load_meta(steps_data)
    log = [dict(step=step, grad_norms=[2.0, 1.0], val_loss=3.0, flops=1e9, seconds=step)
           for step in (1, 2, 3)]
    run = analyze.Run(model, settings, windows, meta, log)
    before, missing = [p.clone() for p in model.parameters()], set()
    for name, found in analyze.STATISTICS.items():
        with torch.enable_grad():   # a notebook's default
            results, sentences, why_not = analyze.measure(name, {"a": run})
        if why_not:
            missing.add(name)
            assert not results and re.fullmatch("[^\n]{20,140}", why_not["a"])
        else:
            assert re.fullmatch("[^\n]*", sentences["a"])
            json.dumps(results, allow_nan=False)
            panels = {key: value for key, value in results["a"].items()
                      if key not in ("rows", "columns", "digits")}
            assert panels and found.title and found.caption and found.draw in analyze.DRAWINGS
            assert re.search(r"\d", json.dumps([*panels.values()]))   # not only nan
    assert missing == lacks(residual, mod)
    assert all(map(torch.equal, model.parameters(), before))

def test_the_example_can_be_copied(monkeypatch):
    code = textwrap.dedent(re.search(r" {4}@statistic.*?\n\n(?=\S)", analyze.__doc__, re.S)[0])
    assert len(code.splitlines()) > 5
    monkeypatch.setattr(analyze, "STATISTICS", {})
    exec(code, vars(analyze).copy())
    [name] = analyze.STATISTICS
    run = run_of()
    results, sentences, missing = analyze.measure(name, {"a": run})
    trace = Trace(run.model, keep_streams=True)
    logits(run.model, windows_of(run)[0], trace=trace)
    [[line]] = [panel.values() for panel in results["a"].values()]
    assert line == pytest.approx([rms(stream).mean().item() for stream in trace.streams[1:]])
    assert sentences["a"] and not missing
    assert analyze.picture(name, results, {"a": "#0072b2"}).lstrip().startswith("<?xml")

def test_a_statistic_of_ones_own(monkeypatch):
    monkeypatch.setattr(analyze, "STATISTICS", {})

    @analyze.statistic("My own", draw="map", label="x")
    def mine(run):
        """What it is.

        How it is measured."""
        if run == "b":
            raise NotHere("it has none")
        return {"": torch.tensor([[math.nan, 1.0], [2.0, math.inf]]), "n": np.arange(2)}, "So."

    found = analyze.STATISTICS["mine"]
    assert (found.title, found.caption, found.definition) == ("My own", "What it is.",
                                                               "How it is measured.")
    results, sentences, missing = analyze.measure("mine", dict(a="a", b="b"))
    assert results == {"a": {"": [[None, 1.0], [2.0, None]], "n": [0, 1]}}
    assert sentences == {"a": "So."} and missing == {"b": "it has none"}
    with pytest.raises(ZeroDivisionError):   # a mistake in it keeps its traceback
        analyze.statistic("Wrong")(lambda run: 1 / 0)
        analyze.measure("<lambda>", dict(a="a"))

# -----------------------------------------------------------------------------
# figures

def test_maps_show_their_numbers():
    """A number stands where its color is, and the first row is at the top."""
    results = {"run": {"": [[0, 1], [2, None]], "rows": ["a0", "m0"], "columns": ["e", "x"]}}
    figure = analyze.draw_map(results, {"run": "r"})
    figure.draw_without_rendering()
    axes = figure.axes[0]
    by_place = {text.get_position(): text.get_text() for text in axes.texts}
    assert len(by_place) == 3
    values = axes.images[0].get_array()
    for (column, row), text in by_place.items():
        assert values[row, column] == float(text)
    height = [axes.transData.transform((0, row))[1] for row in (0, 1)]
    assert height[0] > height[1]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a0", "m0"]

def test_lines_show_their_numbers():
    results = {"a": {"p": {"line": [5, 6, None], "points": [(1, 7), (3, 8)]}},
               "b": {"p": {"line": [1]}}}
    colors = dict(a="r", b="b")
    axes = analyze.draw_lines(results, colors).axes[0]
    line, points, other = axes.lines[:3]
    assert np.array_equal(line.get_xydata(), [[0, 5], [1, 6], [2, math.nan]], equal_nan=True)
    assert points.get_xydata().tolist() == [[1, 7], [3, 8]] and other.get_color() == "b"
    axes = analyze.draw_lines(results, colors, depth="sublayer").axes[0]
    assert axes.lines[1].get_xydata().tolist() == [[7, 1], [8, 3]]   # depth goes downward
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert axes.yaxis_inverted() and labels == ["a0", "m0", "a1", "m1"]
    results["a"]["p"]["third"] = [3]   # more lines than two: a panel per run
    assert len(analyze.draw_lines(results, colors).axes) == 2

def test_figures_do_not_depend_on_a_notebooks_style():
    import matplotlib
    name, results = "logit_lens", {"a$": {"": {"loss": [1, 2]}}}
    with matplotlib.rc_context({"text.usetex": True, "figure.facecolor": "black"}):
        svg = analyze.picture(name, results, {"a$": "r"})
        assert matplotlib.rcParams["text.usetex"]
        assert analyze.draw_lines(results, {"a$": "r"}).canvas.manager is None   # not pyplot's
    assert "fill: #ffffff" in svg

# -----------------------------------------------------------------------------
# the page and the command line

@pytest.fixture(scope="module")
def made(steps_data, tmp_path_factory):
    """Two runs of the same name in folders of odd names, and their page"""
    folder = tmp_path_factory.mktemp("analyze")
    shutil.copytree(steps_data, folder / "data")
    flags = ("--n_layer 2 --n_embd 16 --n_head 2 --block_size 32 --batch_size 4 --max_iters 6 "
             "--log_interval 2 --eval_windows 16 --device cpu").split()
    runs = [f"{folder}/nag/</script>/a$x^$b", f"{folder}/pre/a$x^$b"]
    for path, residual in zip(runs, ("nag", "pre")):
        train.main(["--data", f"{folder}/data", "--out", path, "--residual", residual, *flags])
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), torch.get_num_threads()
    analyze.main([*runs, "--out", f"{folder}/out"])
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), torch.get_num_threads()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    return folder, runs

def read_json(text):
    def fail(constant):
        raise ValueError(f"{constant} isn't JSON")
    return json.loads(text, parse_constant=fail)

def report_of(out):
    """What the page shows, and numbers.json"""
    page = (out / "index.html").read_text()
    template = (ROOT / "web/page.html").read_text()
    assert page.count("<script") == template.count("<script") and page.count("</script") == 2
    [report] = re.findall(r'id="report">(.*?)</script>', page, re.S)
    assert len(page) < len(template) + len(report)
    return read_json(report), read_json((out / "numbers.json").read_text())

def test_page(made):
    folder, runs = made
    report, numbers = report_of(folder / "out")
    assert list(report["cards"]) == list(numbers["runs"]) == runs   # of the same name: whole paths
    for path in runs:
        log = [json.loads(line) for line in open(f"{path}/metrics.jsonl")]
        card, last = numbers["runs"][path], log[-1]
        for name in "val_loss", "val_bpb", "val_steps", "val_skip_rate":
            assert card[name] == pytest.approx(last[name], abs=1e-5)
        assert card["iterations"] == card["max_iters"] == 6 and card["data"] == "data"
        assert card["tokens_per_second"] == pytest.approx(6 * 4 * 32 / last["seconds"])
    opened = analyze.open_runs(analyze.AnalyzeConfig(runs[:1]))
    [run] = opened.values()
    for max_flops, iterations in (run.log[-1]["flops"] * 2, 12), (run.log[-1]["flops"] - 1, 6):
        run.settings["max_flops"] = max_flops   # in place of max_iters
        [card] = analyze.describe(opened).values()
        assert card["max_iters"] == iterations
    assert [section["name"] for section in report["sections"]] == list(analyze.STATISTICS)
    assert list(numbers["statistics"]) == list(analyze.STATISTICS)
    for section in report["sections"]:
        results = numbers["statistics"][section["name"]]
        assert {*results} == {*section["sentences"]} == {*runs} - {*section["missing"]}
        svg = folder / f"out/{section['name']}.svg"
        assert svg.exists() == bool(results)
        assert not results or svg.read_text() == section["figure"]
    missing = {section["name"]: {*section["missing"]} for section in report["sections"]}
    assert missing["skip_rate"] == {runs[1]} and missing["depth_weights"] == {*runs}
    assert missing["probe"] == set()

@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium to see the page in")
def test_a_browser_shows_it(made, tmp_path):
    """... without scrolling sideways, on a phone"""
    folder, _ = made
    n_figures = sum(map(bool, report_of(folder / "out")[1]["statistics"].values()))
    count = """<script>document.title = [document.querySelectorAll(".figure > svg").length,
        document.documentElement.scrollWidth].join("|")</script></body>"""
    page = (folder / "out/index.html").read_text().replace("</body>", count)
    (tmp_path / "page.html").write_text(page)
    (tmp_path / "frame.html").write_text("<iframe src=page.html width=390 height=900 "
                                         "onload='this.after(contentDocument.title)'></iframe>")
    flags = ("--headless --no-sandbox --disable-gpu --dump-dom --allow-file-access-from-files "
             f"--virtual-time-budget=5000 --user-data-dir={tmp_path}/chromium")
    dom = subprocess.run(["chromium", *flags.split(), f"file://{tmp_path}/frame.html"],
                         capture_output=True, text=True, timeout=60).stdout
    figures, width = re.search(r"</iframe>(.*?)<", dom, re.S)[1].split("|")
    assert int(figures) == n_figures and int(width) <= 390

@pytest.fixture
def main(made, tmp_path, capsys):
    """analyze.main on flags, in which NAG and PRE are the runs -> the report, if it makes one"""
    def call(*flags, out=tmp_path / "out"):
        flags = [dict(zip(("NAG", "PRE"), made[1])).get(flag, str(flag)) for flag in flags]
        analyze.main([*flags, "--out", str(out)])
        return report_of(out)[0]
    return call

def test_some_statistics(main, made, tmp_path, capsys):
    report = main("PRE", "PRE", "--only", "reads,ablation")   # twice the same run is one
    assert list(report["cards"]) == made[1][1:] and not report["has_play"]
    assert {section["name"] for section in report["sections"]} == {"reads", "ablation"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "index.html", "numbers.json", "reads.svg", "ablation.svg"}
    again = main("PRE", "--only", "ablation")   # over its own page
    assert list(again["cards"]) == ["a$x^$b"]
    assert "ablation of a$x^$b: " in capsys.readouterr().out

def test_play_page(main, monkeypatch):
    """The page refers to the live page only if it has been written for these runs."""
    monkeypatch.setattr(analyze, "STATISTICS", {})   # all of none
    for writes in False, True, False:
        write = lambda runs, out: writes and (out / "play.html").write_text("")
        monkeypatch.setattr(analyze, "write_play_page", write)
        assert main("PRE")["has_play"] == writes

def test_what_others_have_made_stays(main, tmp_path):
    (tmp_path / "file").write_text("mine")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "index.html").write_text("mine")
    for out in tmp_path / "file", folder:
        assert str(out) in refused(partial(main, "PRE", "--only", "reads", out=out))
    assert [path.name for path in folder.iterdir()] == ["index.html"]
    assert (folder / "index.html").read_text() == (tmp_path / "file").read_text() == "mine"

def test_data_that_moved_and_windows(main, made, tmp_path):
    folder, runs = made
    moved = shutil.copytree(folder / "data", tmp_path / "moved")
    report = main("PRE", "--only", "logit_lens", "--data", moved)
    assert report["cards"]["a$x^$b"]["data"] == "moved"
    opened = analyze.open_runs(analyze.AnalyzeConfig([runs[0]], windows=1))
    assert [sum(len(idx) for idx, _ in run.batches) for run in opened.values()] == [4]
    both = analyze.open_runs(analyze.AnalyzeConfig(runs, windows=8)).values()
    assert [sum(len(idx) for idx, _ in run.batches) for run in both] == [8, 8]

def test_all_runs_are_asked_for_what_all_know(made, monkeypatch):
    right = dict(nag=[1.0, 0.95, 0.95], pre=[1.0, 0.95, 0.2])
    of_run = property(lambda run: right[run.model.config.residual])
    monkeypatch.setattr(analyze.Run, "right", of_run)
    for paths, asked in (made[1], 1), (made[1][:1], 2):
        runs = analyze.open_runs(analyze.AnalyzeConfig(paths)).values()
        assert {run.asked for run in runs} == {asked}

def test_a_run_that_was_killed(main, made, tmp_path):
    run = shutil.copytree(made[1][1], tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "los')
    assert main(run, "--only", "curves")["cards"]["run"]["iterations"] == 6

def test_a_run_that_diverged(main, made, tmp_path):
    run = shutil.copytree(made[1][1], tmp_path / "run")
    checkpoint = torch.load(run / "ckpt.pt")
    checkpoint["model"]["lm_head.weight"][0, 0] = torch.nan
    torch.save(checkpoint, run / "ckpt.pt")
    assert "nan" in refused(main, run)

@pytest.mark.parametrize("flags, words", [
    ("PRE --only remuval", "remuval"), ("PRE --only reads,", "choose from"),
    ("PRE --windows -1", "must be from"), ("", "give run folders"), ("nowhere", "nowhere"),
    ("PRE nowhere", "nowhere"), ("PRE --data nowhere", "nowhere"), ("PRE --olny reads", "--olny")])
def test_bad_input(main, tmp_path, flags, words):
    """What is refused leaves nothing."""
    assert words in refused(main, *flags.split())
    assert not list(tmp_path.iterdir())

def test_list(capsys):
    analyze.main(["--list"])
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(analyze.STATISTICS)
