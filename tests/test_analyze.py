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
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import analyze
import model as M
import prepare
import train
from analyze import Record, effects, read_and_write
from conftest import (ids, logits, make, refused, rms_norm_by_hand as rms_norm, same,
                      sublayers_by_hand)
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

def gates_of(rec):   # (2L, B, T)
    return torch.stack([residual.gate(stream)[..., 0].abs()
                        for residual, stream in zip(rec.residuals, rec.streams)])

# -----------------------------------------------------------------------------
# recording a forward pass

@pytest.mark.parametrize("residual, config", [
    *((name, {}) for name in (*M.RESIDUALS, "own", "attnres:group=3", "hyper:kind=mhc")),
    *((name, dict(mod="random:rate=0.4")) for name in ("pre", "peri", "gated", "own", "x0")),
    ("pre", dict(repeat="1-2:2")), ("nag", dict(mod="gate:below=0.3")),
    ("pre", dict(mod="router:rate=0.3")), ("pre", dict(mod="drop:rate=0.2"))], ids=str)
def test_record(residual, config):
    """Residuals that run again with the recorded updates come to the same streams and logits, and
    the updates are what the sublayers make of what they read."""
    model, mod = make(residual, n_layer=4, **config), config.get("mod", "none").split(":")[0]
    torch.manual_seed(0)
    rec = Record(model, ids())
    torch.manual_seed(0)
    same(model.final.head(rec.reads[-1], model.lm_head), logits(model))
    assert rec.masks.all() == (mod in ("none", "drop")) and rec.masks.any()
    sublayers = [f for _, _, f in sublayers_by_hand(model)]
    assert len(sublayers) == len(rec.updates) == len(rec.masks) == len(rec.streams) - 1
    for i, (f, update, mask) in enumerate(zip(sublayers, rec.updates, rec.masks)):
        assert (update[~mask] == 0).all()
        same(update[mask], f(rec.reads[i])[mask])
        if mod != "router":   # it changes the stream, too
            new = read_and_write(rec.residuals[i], rec.streams[i], update)[1]
            map_stream(same, rec.where_run(i, new, rec.streams[i]), rec.streams[i + 1])
    assert mod == "router" or rec.identity_error() < 1e-12
    rec.updates[3] *= -1
    assert rec.identity_error() > 1e-3

def test_nag_rotates_by_its_gate():
    rec = Record(make("nag", mod="gate:below=0.3"), ids())
    gates = gates_of(rec)
    assert 0 < rec.masks.sum() < rec.masks.numel() and torch.equal(rec.masks, gates >= 0.3)
    same(rec.rotations(), gates.atan().rad2deg() * rec.masks, 1e-6)
    tiny = analyze.angle(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1e-10]))
    assert tiny.item() == pytest.approx(math.degrees(1e-10))   # its cosine is 1 in floating point

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

@pytest.mark.parametrize("residual", ["nag", "own", "hyper", "unet", "attnres:group=3"])
def test_reads_equal_a_run_from_the_embedding_on(residual):
    """... in which the writer writes zeros, and gates and weights react. Means over windows"""
    run = run_of(residual, n=36, mod="gate:below=0.3" if residual == "nag" else "none")
    found, _ = analyze.reads(run)   # in batches of 8 windows and of 1
    rec = Record(run.model, windows_of(run)[0])
    writers = [rec.embedding, *rec.updates]
    for writer in range(len(writers)):
        x, *updates = [torch.zeros_like(x) if i == writer else x for i, x in enumerate(writers)]
        stream, reads = run.model.final.expand(x), []
        for i, (residual, update) in enumerate(zip(rec.residuals, updates)):
            read, new = read_and_write(residual, stream, update)
            stream = rec.where_run(i, new, stream)
            reads.append(read)
        reads.append(run.model.final.reduce(stream))
        for reader in range(writer, len(writers)):
            usual = rec.reads[reader]
            gone = (usual - reads[reader]).norm(dim=-1) / usual.norm(dim=-1)
            same(found[""][reader, writer], gone.mean(), 1e-9)
    assert found["columns"] == ["e", "a0", "m0", "a1", "m1", "a2", "m2", "a3", "m3"]
    assert found["rows"] == [*found["columns"][1:], "head"]

# -----------------------------------------------------------------------------
# streams

@pytest.mark.parametrize("residual", ["pre", "x0", "unet", "attnres:group=4", "hyper", "nag"])
def test_magnitudes(residual):
    run = run_of(residual)
    idx, _ = windows_of(run)
    trace, found = Trace(run.model, keep_streams=True), []
    logits(run.model, idx, trace=trace)
    streams = trace.streams
    total = newest = dict(
        pre=lambda s: s, x0=lambda s: s[0], unet=lambda s: s[0], attnres=lambda s: sum(s[0]),
        hyper=lambda s: s.mean(-2), nag=lambda s: s[0] * s[1].exp())[residual.split(":")[0]]
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
    (1, ["e", "a0", "m0", "a1", "m1", "a2", "m2", "a3", "m3"]), (3, ["e", "a1", "m2", "m3"])])
def test_softmax_weights_over_depth(group, sources):
    """arXiv:2603.15031, eqs. 2 to 4, a mean over tokens"""
    run = run_of(f"attnres:group={group}")
    rec = Record(run.model, windows_of(run)[0])
    found, _ = analyze.depth_weights(run)
    assert found["columns"] == sources and found["rows"][::8] == ["a0", "head"]
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

@pytest.mark.parametrize("residual", ["hyper", "hyper:kind=mhc,n=2", "gated"])
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
    stream = Record(run.model, idx).streams[3]
    centered = stream - stream.mean(-1, keepdim=True)
    kurtosis = centered.pow(4).mean(-1) / centered.square().mean(-1) ** 2
    assert panels["kurtosis"]["stream"][3] == pytest.approx(kurtosis.mean().item())
    largest = (stream.abs().amax(-1) / rms(stream)).mean().item()
    assert panels["largest channel / rms"]["stream"][3] == pytest.approx(largest)

# -----------------------------------------------------------------------------
# losses, gradients and pruning

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

def test_curves():
    run = run_of()
    run.log = [dict(step=0, flops=0, seconds=1, val_loss=9.0), dict(step=2, loss=3.0),
               dict(step=3, flops=30, seconds=2, val_loss=2.0),
               dict(step=4, flops=70, seconds=5, val_loss=1.5)]
    panels, _ = analyze.curves(run)
    assert [panel["loss"] for panel in panels.values()] == [
        [(3, 2.0), (4, 1.5)], [(30, 2.0), (70, 1.5)], [(2, 2.0), (5, 1.5)]]

def log_gradients(run, *norms):
    """At iterations 2, 4, 6, ...; half of them are the warmup. Wide blocks have larger ones."""
    sizes = np.array([M.num_params(block) for block in run.model.blocks])
    run.log = [dict(step=2 * n, grad_norms=each * sizes ** 0.5) for n, each in enumerate(norms, 1)]

@pytest.mark.parametrize("flags, fan_in", [
    (dict(taper="linear"), [4, 3, 2, 1]), (dict(repeat="1:2"), [5, 4 + 3, 2, 1]),
    (dict(deep_supervision=True, repeat="1:2"), [15, 10 + 6, 3, 1])])
def test_fan_in_is_linear_or_quadratic(flags, fan_in):
    run = run_of(**flags)
    log_gradients(run, [9, 9, 9, 9.0], [4, 1, 1, 5.0], [4, 1, 3, 1.0])
    lines = analyze.fan_in(run)[0][""]
    assert lines["fan-in"] == pytest.approx(np.array(fan_in) / np.mean(fan_in))
    assert lines["measured"] == pytest.approx(np.array([4, 1, 2, 3]) / 2.5)   # without the warmup

def test_rank_correlation():
    ranks = analyze.rank_correlation
    assert ranks([4, 1, 2, 3], [4, 3, 2, 1]) == pytest.approx(1 - 6 * 8 / 60)   # Spearman's formula
    assert ranks([1, 1, 2, 3], [9, 9, 4, 0]) == pytest.approx(-1)   # equal ones share a rank

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
    of_one = [rise(run, place).expected for place in places]   # random: a mean
    assert lines["random"][0] == 0 and min(of_one) < lines["random"][1] < max(of_one)

# -----------------------------------------------------------------------------
# skipping

def test_random_tokens_are_the_same_whatever_else_is_measured():
    alone, after_others = run_of(mod="random:rate=0.5"), run_of(mod="random:rate=0.5")
    assert after_others.block_ablation and analyze.reads(after_others)
    assert analyze.ablation(alone) == analyze.ablation(after_others)
    run, rates = run_of("nag", n=64), torch.linspace(0, 1, 2 * L)
    same(run.run_rates(analyze.random_policy(rates)), rates, 0.1)

@pytest.mark.parametrize("mod, below", [("none", 0.05), ("gate:below=0.6", 0.6)])
def test_skip_rate(mod, below):
    run = run_of("nag", mod=mod)
    run.model.blocks[1].mlp_residual.alpha.mul_(-0.2)   # the gate's size counts, not its sign
    rec = Record(run.model, torch.cat([idx for idx, _ in run.batches]),
                 GatePolicy(run.model.config, below=below))
    skipped = analyze.skip_rate(run)[0][""]["skipped"]
    same(skipped, (gates_of(rec) < below).double().mean((1, 2)).float(), 1e-6)
    assert 0 < skipped.mean() < 1

@pytest.mark.parametrize("residual", ["nag", "pre"])
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
    gates = gates_of(Record(run.model, run.other_quarter[0][0]))   # they set the thresholds
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

def test_skip_curve_of_a_model_trained_to_skip():
    run = run_of("nag", mod="gate:below=99")
    [lines] = analyze.skip_curve(run)[0].values()
    assert lines["as trained"] == [(100, pytest.approx(0))]
    full = loss_of(run, policy=analyze.dense) - loss_of(run)
    assert lines["by gate"][0] == lines["fixed set"][0] == (0, pytest.approx(full))

def test_depth_map():
    """The angle of each token in each sublayer, nan if it skips"""
    run = run_of("nag")
    idx = torch.tensor([[*"a\té$x$\n".encode(), 256, *b"xyz"]])
    run.batches = [(idx, idx)]
    found, _ = analyze.depth_map(run)
    assert found["columns"] == ["a", r"\t", "\ufffd", "\ufffd", "$", "x", "$", "↵",
                                "<|endoftext|>", "x", "y", "z"]   # é has two bytes
    rec = Record(run.model, idx, GatePolicy(run.model.config, below=0.05))
    gates = gates_of(rec)[:, 0]
    right = gates.atan().rad2deg().where(gates >= 0.05, torch.nan)
    torch.testing.assert_close(found[""], right, equal_nan=True)
    assert 0 < right.isnan().sum() < right.numel()

# -----------------------------------------------------------------------------
# every statistic on every rule, and one's own

def lacks(residual, mod):
    """Statistics that a model does not have"""
    name, missing = residual.split(":")[0], set()
    if name != "nag" and mod.split(":")[0] in ("none", "drop"):   # drop: in training only
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
    ("nag", "gate:rate=0.25"), ("pre", "router:rate=0.2"), ("pre", "drop:rate=0.2"),
    ("x0", "random:rate=0.2")])
def test_every_statistic_runs_or_refuses_in_a_sentence(residual, mod, steps_data):
    model = make(residual, dtype=torch.float32, n_layer=2, block_size=32, vocab_size=320, mod=mod)
    if mod.startswith("gate"):
        model.policy.threshold.fill_(0.4)
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
            panels = {key: value for key, value in results["a"].items()
                      if key not in ("rows", "columns", "digits")}
            assert re.search(r"\d", json.dumps([*panels.values()], allow_nan=False))
            assert "\n" not in sentences["a"] and found.draw in analyze.DRAWINGS
    assert missing == lacks(residual, mod)
    assert all(map(torch.equal, model.parameters(), before))

def test_the_example_can_be_copied(monkeypatch):
    code = textwrap.dedent(re.search(r" {4}@statistic.*?\n\n(?=\S)", analyze.__doc__, re.S)[0])
    monkeypatch.setattr(analyze, "STATISTICS", {})
    exec(code, vars(analyze).copy())
    [(name, about)] = analyze.STATISTICS.items()
    assert "depth" in about.caption and "rms" in about.definition
    run = run_of()
    results, sentences, missing = analyze.measure(name, {"a": run})
    trace = Trace(run.model, keep_streams=True)
    logits(run.model, windows_of(run)[0], trace=trace)
    [[line]] = [panel.values() for panel in results["a"].values()]
    assert line == pytest.approx([rms(stream).mean().item() for stream in trace.streams[1:]])
    assert sentences["a"] and not missing
    assert analyze.picture(name, results, {"a": "#0072b2"}).lstrip().startswith("<?xml")

# -----------------------------------------------------------------------------
# figures

def test_maps_show_their_numbers():
    """A number stands where its color is, and the first row is at the top."""
    results = {"run": {"": [[0, 1], [2, None]], "rows": ["a0", "m0"], "columns": ["e", "x"]}}
    figure = analyze.draw_map(results, {"run": "r"})
    figure.draw_without_rendering()
    axes = figure.axes[0]
    values = axes.images[0].get_array()
    for text in axes.texts:
        column, row = text.get_position()
        assert values[row, column] == float(text.get_text()) == results["run"][""][row][column]
    assert len(axes.texts) == 3 and axes.yaxis_inverted()
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

# -----------------------------------------------------------------------------
# the page and the command line

@pytest.fixture(scope="module")
def made(steps_data, tmp_path_factory):
    """A folder with two runs, nag and pre, and their page in out"""
    folder = tmp_path_factory.mktemp("analyze")
    flags = ("--n_layer 2 --n_embd 16 --n_head 2 --block_size 32 --batch_size 4 --max_iters 6 "
             "--log_interval 2 --eval_windows 16 --device cpu").split()
    runs = [str(folder / residual) for residual in ("nag", "pre")]
    for path in runs:
        train.main(["--data", str(steps_data), "--out", path, "--residual", path[-3:], *flags])
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    analyze.main([*runs, "--out", str(folder / "out")])
    assert torch.equal(before[0], torch.get_rng_state())   # a notebook goes on as it would
    assert before[1] == np.random.get_state()[1].tolist()
    return folder, runs

def report_of(out):
    """What the page shows, and numbers.json"""
    [report] = re.findall(r'id="report">(.*?)</script>', (out / "index.html").read_text(), re.S)
    return [json.loads(text, parse_constant=pytest.fail)   # NaN is no JSON
            for text in (report, (out / "numbers.json").read_text())]

def test_page(made):
    folder, runs = made
    report, numbers = report_of(folder / "out")
    assert report["has_play"] and report["cards"] == numbers["runs"]
    for path in runs:
        last = [json.loads(line) for line in open(f"{path}/metrics.jsonl")][-1]
        card = numbers["runs"][path[-3:]]
        for name in "val_loss", "val_bpb", "val_steps", "val_skip_rate":
            assert card[name] == pytest.approx(last[name], abs=1e-5)
        assert card["iterations"] == card["max_iters"] == 6 and card["data"] == "data"
        assert card["tokens_per_second"] == pytest.approx(6 * 4 * 32 / last["seconds"])
    assert [section["name"] for section in report["sections"]] == list(analyze.STATISTICS)
    for section in report["sections"]:
        results = numbers["statistics"][section["name"]]
        assert {*results} == {*section["sentences"]} == {"nag", "pre"} - {*section["missing"]}
        if results:
            assert (folder / f"out/{section['name']}.svg").read_text() == section["figure"]
    missing = {section["name"]: {*section["missing"]} for section in report["sections"]}
    assert missing["skip_rate"] == {"pre"} and missing["depth_weights"] == {"nag", "pre"}

@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium to see the page in")
def test_a_browser_shows_it(made, tmp_path):
    folder, _ = made
    flags = ("--headless --no-sandbox --disable-gpu --dump-dom --virtual-time-budget=5000 "
             f"--user-data-dir={tmp_path}/chromium file://{folder}/out/index.html")
    shown = subprocess.run(["chromium", *flags.split()], capture_output=True, text=True, timeout=60)
    report, numbers = report_of(folder / "out")
    assert shown.stdout.count("<svg") == sum(map(bool, numbers["statistics"].values()))
    assert all(section["title"] in shown.stdout.split("</script>")[-1]
               for section in report["sections"])

def test_some_statistics_on_data_that_moved(made, steps_data, tmp_path):
    _, runs = made
    data, out = shutil.copytree(steps_data, tmp_path / "moved"), tmp_path / "out"
    for only in "reads,ablation", "reads":   # the second one over the page of the first
        analyze.main([runs[1], "--only", only, "--data", str(data), "--out", str(out)])
        report, _ = report_of(out)
        assert report["cards"]["pre"]["data"] == "moved" and not report["has_play"]
        assert {section["name"] for section in report["sections"]} == {*only.split(",")}

def test_what_others_have_made_stays(made, tmp_path):
    (tmp_path / "index.html").write_text("mine")
    assert str(tmp_path) in refused(analyze.main, [made[1][1], "--out", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]
    assert (tmp_path / "index.html").read_text() == "mine"

def test_a_run_that_diverged(made, tmp_path):
    run = shutil.copytree(made[1][1], tmp_path / "run")
    checkpoint = torch.load(run / "ckpt.pt")
    checkpoint["model"]["lm_head.weight"][0, 0] = torch.nan
    torch.save(checkpoint, run / "ckpt.pt")
    assert "nan" in refused(analyze.main, [str(run), "--out", str(tmp_path / "out")])

@pytest.mark.parametrize("flags, message", [
    ("PRE --only remuval", "remuval"), ("PRE --windows -1", "must be from"),
    ("", "give run folders"), ("PRE nowhere", "nowhere"), ("PRE --data nowhere", "nowhere")])
def test_mistakes(made, tmp_path, flags, message):
    """What is refused leaves nothing."""
    flags = flags.replace("PRE", made[1][1]).split()
    assert message in refused(analyze.main, [*flags, "--out", str(tmp_path / "out")])
    assert not list(tmp_path.iterdir())
