"""Mixture-of-Depths in float64: policies, traces, and what a token that skips costs and changes.
The reference: every token runs every sublayer, and where it skips, the result is thrown away."""

import math
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import model as M
from flags import UserError
from conftest import (count_flops, decode, gradients, ids, logits, make, randn,
                      rms_norm_by_hand as rms_norm, same, same_gradients, sublayers_by_hand)

pytestmark = pytest.mark.usefixtures("own_residual")
IDX, TARGETS = ids(3, 16), ids(3, 16, seed=1)
CAN_SKIP = [name for name in [*M.RESIDUALS, "hyper:kind=identity", "own"]
            if name == "own" or make(name, n_layer=1).final.can_skip]
CANNOT_SKIP = [name for name in M.RESIDUALS if name not in CAN_SKIP] + ["attnres:group=3"]

def nag(**config):
    """Gates differ a lot between tokens and sublayers. That of sublayer 3 is 0, that of 4 < 0."""
    model = make("nag", **dict(n_layer=4) | config)
    for layer_idx, residual in enumerate(model.residuals()):
        residual.w.data *= 3
        residual.alpha.data.fill_({3: 0.0, 4: -0.7}.get(layer_idx, 0.8 + 0.05 * layer_idx))
    return model

def loss(model, *args, **options):
    return model(IDX, TARGETS, trace=M.Trace(model, *args, **options))[1]

def gates_of_all(model, policy=lambda trace: None):
    """|gate| of all tokens before each sublayer, (2L, B, T)"""
    gates = []
    def ask(trace):
        gates.append(trace.gate().abs().squeeze(-1))
        return policy(trace)
    model(IDX, trace=M.Trace(model, ask))
    return torch.stack(gates)

def choose(mask, new, old):
    """Of streams (tensors, or tuples of them): new where mask (B, T) is True, else old."""
    if isinstance(new, tuple):
        return tuple(choose(mask, *pair) for pair in zip(new, old))
    return torch.where(mask.view(*mask.shape, *[1] * (new.dim() - 2)), new, old)

def masked_pass(model, masks, idx=IDX):
    """-> logits of the reference"""
    stream = model.final.expand(model.wte(idx))
    for mask, (_, residual, f) in zip(masks, sublayers_by_hand(model)):
        stream = choose(mask, residual(stream, f), stream)
    return model.logits(stream)

def same_as_masked(model, policy=None):
    """Compares logits, loss and gradients with the reference; returns the masks."""
    trace = M.Trace(model, policy)
    out = logits(model, IDX, trace=trace)
    masks = torch.stack([torch.ones(IDX.shape, dtype=torch.bool) if mask is None else mask
                         for mask in trace.masks])
    right = masked_pass(model, masks)
    same(out, right.detach())
    right = gradients(model, F.cross_entropy(right.flatten(0, 1), TARGETS.flatten()))
    same_gradients(gradients(model, loss(model, policy)), right)
    return masks

# -----------------------------------------------------------------------------
# a pass that skips equals the masked dense pass

RUNS = torch.rand(6, 3, 16, generator=torch.Generator().manual_seed(0)) > 0.5
RUNS[0, 0], RUNS[1, 1], RUNS[2], RUNS[3], RUNS[4] = False, False, False, False, True

@pytest.mark.parametrize("residual", CAN_SKIP)
def test_skipping_equals_the_masked_dense_pass(residual):
    """Skipped tokens keep their stream, and their keys and values. Masks have uneven rows, and rows
    of no token; no token runs sublayers 2 and 3, all run 4."""
    masks = same_as_masked(make(residual), lambda trace: RUNS[trace.layer_idx])
    assert torch.equal(masks, RUNS)

@pytest.mark.parametrize("config", [{}, dict(repeat="1-2:2"), dict(activation="swiglu")], ids=str)
@pytest.mark.parametrize("below", [0.3, 0.45, 0.6, 2.0])
def test_tokens_whose_gate_is_small_skip(config, below):
    model = nag(mod=f"gate:below={below}", **config)
    masks = same_as_masked(model)
    assert torch.equal(masks, gates_of_all(model, model.policy) >= below)
    assert 0 < masks.sum() < masks.numel() if below < 1 else not masks.any()

def channel(trace):
    """A user's policy as a function: it looks at a number of the stream."""
    stream = trace.stream
    while isinstance(stream, tuple):
        stream = stream[0]
    return stream.flatten(2)[..., trace.layer_idx] > 0

class Learned(nn.Module):
    """A user's policy as a module, in place of model.policy: it returns a weight, too."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(16, 1).double()

    def forward(self, trace):
        weight = self.line(rms_norm(trace.stream)).squeeze(-1)
        return weight > 0, weight

@pytest.mark.parametrize("residual, config, policy", [
    ("nag", dict(mod="gate:below=0.5"), None), ("nag", dict(mod="gate:below=9"), None),
    ("nag", dict(mod="gate:below=0.5", repeat="1:3"), None), ("pre", dict(mod="router"), None),
    ("pre", dict(n_layer=4), "module"), *((name, {}, channel) for name in CAN_SKIP)])
@pytest.mark.parametrize("removed", [(), (2, 5)])
def test_cached_decoding_with_skipping_equals_the_full_pass(residual, config, policy, removed):
    model = nag(**config) if residual == "nag" else make(residual, **dict(n_layer=4) | config)
    if policy == "module":
        torch.manual_seed(0)
        policy = Learned()
    full = M.Trace(model, policy, removed)
    right = logits(model, IDX, trace=full)
    make_trace = lambda start: M.Trace(model, policy, removed)
    same(decode(model, IDX, [1, 5, 1, 1, 4, 1, 3], make_trace), right)
    assert 0 < full.skip_rate() <= 1

def test_cached_keys_of_skipped_tokens():
    """All tokens have keys and values in an attention that no token, or some, run."""
    model, cache = make(), M.KVCache()
    fail = lambda *_: pytest.fail("no token runs sublayer 3")
    hook = model.blocks[1].mlp.register_forward_hook(fail)
    logits(model, IDX, cache=cache, trace=M.Trace(model, lambda trace: RUNS[trace.layer_idx]))
    assert cache.length == 16 and [cache.layer(i).k.shape[1] for i in range(3)] == [16] * 3
    hook.remove()
    removed = M.KVCache()
    logits(model, IDX, cache=removed, trace=M.Trace(model, removed=(2,)))
    assert removed.layer(1).k is None and removed.layer(2).v.shape == (3, 16, 2, 8)

def test_a_policy_that_returns_a_weight_scales_the_update():
    model, policy = make(n_layer=2), Learned()
    x = model.wte(IDX)
    for _, residual, f in sublayers_by_hand(model):
        weight = policy.line(rms_norm(x))
        x = torch.where(weight > 0, x + weight * f(residual.norm(x)), x)
    same(logits(model, IDX, trace=M.Trace(model, policy)), model.logits(x).detach())
    loss(model, policy).backward()
    assert policy.line.weight.grad.abs().sum() > 0

def test_removed_sublayers_do_not_run():
    """They compute nothing, and policies decide on the others only."""
    for residual in "pre", "nag", "x0", *CANNOT_SKIP:
        model, ran, asked = make(residual, n_layer=5), [], []
        for i, block in enumerate(model.blocks):
            block.attn.register_forward_hook(lambda *_, i=i: ran.append(2 * i))
            block.mlp.register_forward_hook(lambda *_, i=i: ran.append(2 * i + 1))
        trace = M.Trace(model, lambda trace: asked.append(trace.layer_idx), removed=[2, 7])
        out = logits(model, IDX, trace=trace)
        assert ran == asked == [0, 1, 3, 4, 5, 6, 8, 9]
        assert trace.masks[2] is trace.masks[7] is False and trace.skip_rate() == pytest.approx(0.2)
        if residual in CANNOT_SKIP:   # its update is 0
            for module in model.blocks[1].attn, model.blocks[3].mlp:
                module.c_proj.weight.data.zero_()
            same(out, logits(model, IDX))
            continue
        masks = [torch.full(IDX.shape, layer_idx not in (2, 7)) for layer_idx in range(10)]
        same(out, masked_pass(model, masks).detach())

@pytest.mark.parametrize("residual", CANNOT_SKIP)
def test_residuals_that_cannot_skip_refuse_a_policy(residual):
    model = make(residual)
    with pytest.raises(UserError, match="can't skip"):
        model(IDX, trace=M.Trace(model, lambda trace: IDX > IDX.min()))
    same(logits(model, IDX, trace=M.Trace(model, lambda trace: IDX >= 0)), logits(model, IDX))
    with pytest.raises(ValueError):   # a stream that has changed its structure
        M.map_stream(torch.add, (IDX, IDX), (IDX,))

# -----------------------------------------------------------------------------
# traces

def test_a_trace_records_the_pass():
    model = nag(repeat="1:2", mod="gate:below=0.5")
    trace, places = M.Trace(model, keep_streams=True, progress=0.25), []
    def policy(t):
        assert t is trace and t.model is model and t.progress == 0.25
        assert torch.equal(t.gate(), t.residual.gate(t.stream)) and t.gate() is t.gate()
        places.append((t.layer_idx, t.residual.layer_idx))
        return model.policy(t)
    trace.policy = policy
    logits(model, IDX, trace=trace)
    assert places == list(zip(range(10), [0, 1, 2, 3, 2, 3, 4, 5, 6, 7]))
    assert len(trace.masks) == len(trace.gates) == 10 and len(trace.streams) == 11
    same(trace.streams[0][0], model.final.expand(model.wte(IDX))[0].detach())
    same(model.logits(trace.streams[-1]).detach(), logits(model, IDX))   # makes its own trace
    shares = [mask.double().mean().item() for mask in trace.masks]
    assert [trace.run_rate(i) for i in range(10)] == pytest.approx(shares)
    assert trace.skip_rate() == pytest.approx(1 - sum(shares) / 10)
    assert M.Trace(model).streams == [] and M.Trace(make()).progress == 1
    trace = M.Trace(make())
    logits(make(), trace=trace)
    assert trace.masks == trace.gates == [None] * 6 and trace.skip_rate() == 0
    with pytest.raises(UserError, match="one forward pass"):
        logits(make(), trace=trace)

@pytest.mark.parametrize("residual, config", [
    ("pre", {}), ("review", {}), ("gated", {}), ("x0", {}), ("pre", dict(mod="router", n_layer=4)),
    ("nag", {}), ("nag", dict(mod="gate:below=0.5"))], ids=str)
def test_flops_with_skipping_equal_those_of_torch(residual, config):
    """Skipped tokens of an attention compute keys and values; removed sublayers compute nothing."""
    model = nag(**config) if residual == "nag" else make(residual, **config)
    policy = None if config else lambda trace: RUNS[[0, 1, 2, 3, 4, 5, 0, 1][trace.layer_idx]]
    for trace in M.Trace(model, policy), M.Trace(model, policy, removed=[0, 5]):
        counted = count_flops(lambda: logits(model, IDX, trace=trace))
        assert counted == pytest.approx(48 * M.flops_per_token(model, trace), rel=1e-7)
        assert trace.skip_rate() > 0

# -----------------------------------------------------------------------------
# gate: thresholds, rates, an auxiliary loss

def trace_of(model, progress, idx=IDX):
    trace = M.Trace(model, progress=progress)
    model(idx, trace=trace)
    return trace

def test_a_threshold_follows_the_quantile_of_all_gates():
    """One threshold for all sublayers moves to it at once in the first update, then by a fifth of
    the way. The rate grows from 0 to its value between 10 and 30 % of the training."""
    model = nag(mod="gate:rate=0.4")
    identity = lambda x: x
    gates = gates_of_all(model).flatten().sort().values
    for progress, share in (0.05, 1 / gates.numel()), (0.2, 0.2), (0.3, 0.4), (1.0, 0.4):
        model.policy.threshold.zero_()
        trace = trace_of(model, progress)   # a threshold of 0: no token skips
        assert trace.skip_rate() == 0
        model.policy.update([trace], identity)
        right = gates[round(share * gates.numel()) - 1]
        same(model.policy.threshold, right.detach(), 1e-6)
    model.policy.threshold.fill_(0.9)
    trace = trace_of(model, 1.0)
    quantile = torch.stack(trace.gates).abs().flatten().kthvalue(round(0.4 * 8 * 48)).values
    model.policy.update([trace], identity)
    same(model.policy.threshold, (0.9 * 0.8 + 0.2 * quantile).detach(), 1e-6)

def test_the_threshold_is_a_mean_over_micro_batches_and_processes():
    model = nag(mod="gate:rate=0.3")
    traces = [trace_of(model, 1.0, idx) for idx in (IDX, ids(2, 16, seed=5))]
    def update(traces, all_reduce_mean=lambda x: x):
        model.policy.threshold.zero_()
        model.policy.update(traces, all_reduce_mean)
        return model.policy.threshold.item()
    first, second = update(traces[:1]), update(traces[1:])
    assert first != second and update(traces) == pytest.approx((first + second) / 2)
    assert update(traces[:1], lambda x: x + 1) == pytest.approx(first + 1)

def test_thresholds_are_saved_and_fixed_ones_are_not():
    model, again = nag(mod="gate:rate=0.4"), nag(mod="gate:rate=0.4")
    model.policy.update([trace_of(model, 1.0)], lambda x: x)
    again.load_state_dict(model.state_dict())
    assert again.policy.threshold == model.policy.threshold > 0
    assert torch.equal(logits(again, IDX), logits(model, IDX))
    fixed = nag(mod="gate:below=0.5")
    assert fixed.policy.threshold == 0.5 and "policy.threshold" not in fixed.state_dict()
    before = fixed.policy.threshold.clone()
    fixed.policy.update([trace_of(fixed, 1.0)], lambda x: x)
    assert fixed.policy.threshold == before

def test_a_training_skips_its_rate_and_so_does_a_text_afterwards():
    model = make("nag", noise=0, n_layer=4, mod="gate:rate=0.4").train()
    optimizer, shares = torch.optim.AdamW(model.parameters(), 3e-3), []
    for step in range(100):
        trace, idx = M.Trace(model, progress=step / 100), ids(9, 16, seed=step)
        model(idx, idx.roll(-1, 1), trace=trace)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        model.policy.update([trace], lambda x: x)
        shares.append(trace.skip_rate())
    assert shares[0] == 0 and abs(sum(shares[-30:]) / 30 - 0.4) < 0.02
    trace = M.Trace(model.eval())
    logits(model, ids(32, 16, seed=999), trace=trace)
    assert abs(trace.skip_rate() - 0.4) < 0.03

@pytest.mark.parametrize("mod", ["none", "gate:below=0.5", "random:rate=0.4"])
@pytest.mark.parametrize("progress, share", [(0.2, 0), (0.6, 0.5), (0.95, 1)])
def test_gate_loss_is_the_mean_gate_of_all_tokens(mod, progress, share):
    """In training only, also of tokens that skip; every parameter of a gate learns from it."""
    model, found = nag(gate_loss=2.0, mod=mod, repeat="1:2").train(), []
    for part in (lambda: loss(model, progress=progress), lambda: loss(model, progress=0),
                 lambda: gates_of_all(model, model.policy or (lambda trace: None)).mean()):
        torch.manual_seed(0)   # the same random masks
        found.append(part())
    total, free, gate = found
    same(total, free + 2 * share * gate)
    total, free, gate = (gradients(model, x) for x in found)
    same_gradients(total, {name: free[name] + 2 * share * gate[name] for name in free})
    for name in "alpha", "beta", "p", "w", "b":
        assert gate[f"blocks.0.mlp_residual.{name}"].abs().max() > 1e-6
    plain = nag(mod=mod).eval()
    torch.manual_seed(0)
    right = plain(IDX, TARGETS)[1]
    model = nag(gate_loss=2.0, mod=mod).eval()
    torch.manual_seed(0)
    trace = M.Trace(model)
    same(model(IDX, TARGETS, trace=trace)[1], right)
    assert "gate" in mod or trace.gates == [None] * 8

# -----------------------------------------------------------------------------
# router, random, drop

def router_by_hand(model, idx, capacity):
    """arXiv:2404.02258, eq. 1, per sublayer -> logits, auxiliary loss, share of tokens that run"""
    x, losses, shares = model.wte(idx), [], []
    for layer_idx, residual, f in sublayers_by_hand(model):
        if layer_idx // 2 % 2 == 0:   # blocks 1, 3, .. have a router
            x = x + f(residual.norm(x))
            shares.append(1.0)
            continue
        number = layer_idx // 4 * 2 + layer_idx % 2
        weight = rms_norm(x) @ model.policy.routers[number].weight[0]
        runs = weight > 0
        if model.training:
            runs = torch.zeros_like(runs)
            for b in range(len(idx)):
                best = weight[b].argsort(descending=True)[:max(1, round(capacity * idx.shape[1]))]
                runs[b, best] = True
        x = torch.where(runs[..., None], x + weight[..., None] * f(residual.norm(x)), x)
        losses.append(-torch.where(runs, weight.sigmoid(), (-weight).sigmoid()).log().mean())
        shares.append(runs.double().mean().item())
    return model.logits(x), 0.01 * sum(losses) / len(losses), shares

@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rate, T, repeat, routed", [
    (0.25, 16, "", 2 / 4), (0.45, 7, "", 2 / 4), (0.45, 1, "", 2 / 4), (0.25, 16, "1:3", 4 / 6)])
def test_router_equals_its_definition(rate, T, repeat, routed, training):
    """The best tokens of a sequence run in training, those of weight > 0 outside; the update is
    multiplied by the weight; an auxiliary loss teaches weights their sign. routed: the share of
    blocks that have a router."""
    model = make(mod=f"router:rate={rate}", n_layer=4, repeat=repeat).train(training)
    idx, targets, trace = IDX[:, :T], TARGETS[:, :T], M.Trace(model)
    out, auxiliary, shares = router_by_hand(model, idx, capacity=1 - rate / routed)
    if not training:
        same(logits(model, idx), out.detach())
    right = F.cross_entropy(out.flatten(0, 1), targets.flatten()) + training * auxiliary
    mine = model(idx, targets, trace=trace)[1]
    same(mine, right, 1e-12)
    same_gradients(gradients(model, mine), gradients(model, right))
    assert [trace.run_rate(i) for i in range(len(shares))] == pytest.approx(shares)
    if training and T == 16:
        assert trace.skip_rate() == pytest.approx(rate)

def test_routers_start_alike_for_a_seed():
    a, b = (make(mod="router", noise=0, n_layer=4, n_embd=64).policy.routers for _ in range(2))
    assert len(a) == 4 and all(torch.equal(x.weight, y.weight) for x, y in zip(a, b))
    assert a[0].weight.std().item() == pytest.approx(1 / 8, rel=0.2)
    assert not torch.equal(a[0].weight, a[1].weight)
    assert len(make(mod="router:rate=0.2", n_layer=5).policy.routers) == 4   # blocks 1 and 3

def test_random_masks_are_independent():
    """... of tokens, sequences and sublayers, in training and outside"""
    torch.manual_seed(0)
    model = make(mod="random:rate=0.3", n_layer=2, n_embd=4)
    trace = M.Trace(model)
    logits(model, ids(2000, 2), trace=trace)
    masks = torch.cat([mask.double().T for mask in trace.masks])   # (4 sublayers * 2 tokens, B)
    assert (masks.mean(1) - 0.7).abs().max() < 0.04
    assert (masks.corrcoef() - torch.eye(8)).abs().max() < 0.09
    assert trace.skip_rate() == pytest.approx(0.3, abs=0.02)

def test_drop_skips_blocks_of_a_sequence():
    """In training, a block is skipped with probability 4 rate depth (1 - progress)."""
    torch.manual_seed(0)
    model, idx = make(mod="drop:rate=0.2", n_embd=4).train(), ids(2000, 2)
    trace = M.Trace(model, progress=0.25)
    loss = model(idx, idx, trace=trace)[1]
    masks = torch.stack(trace.masks).double()   # (6, B, T)
    runs = masks[::2, :, 0]
    assert torch.equal(masks, runs.repeat_interleave(2, dim=0)[..., None].expand(6, 2000, 2))
    keep_rate = 1 - 4 * 0.2 * torch.tensor([1 / 4, 2 / 4, 3 / 4]) * 0.75
    assert (runs.mean(1) - keep_rate).abs().max() < 0.04
    assert (runs.corrcoef() - torch.eye(3)).abs().max() < 0.09   # blocks are independent
    x = model.wte(idx)
    for mask, (layer_idx, residual, f) in zip(masks, sublayers_by_hand(model)):
        x = x + (mask / keep_rate[layer_idx // 2])[..., None] * f(residual.norm(x))
    same(loss, F.cross_entropy(model.logits(x).flatten(0, 1), idx.flatten()), 1e-6)
    trace = M.Trace(model.eval())
    logits(model, idx, trace=trace)
    assert trace.masks == [None] * 6
