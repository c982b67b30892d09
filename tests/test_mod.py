"""Skipping sublayers token by token (Mixture-of-Depths): GPT.forward(..., tau=)."""
import dataclasses
import math

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import model as M
import train
from model import KVCache, RESIDUALS
from test_residuals import build, ids, logits, no_eps, perturb, rms, same  # noqa: F401, no_eps is a fixture

INF = float("inf")


def varied(**flags):
    """A NAG model whose gains differ a lot between tokens and sublayers; sublayer 4 is shut, sublayer 5 turns
    back."""
    model = perturb(build("nag", **{"n_layer": 4, **flags}), 0.2)
    with torch.no_grad():
        for l, (r, _) in enumerate(model.sublayers(), start=1):
            r.w.mul_(3)
            r.alpha.copy_(torch.tensor({4: 0.0, 5: -0.7}.get(l, 0.8 + 0.05 * l)))
    return model


class Wary(M.Template):
    """A reader's own residual, which knows before a sublayer runs how much of its update it will take."""
    knows_gain = True

    def __init__(self, config, l):
        super().__init__(config, l)
        self.w = torch.nn.Parameter(torch.zeros(config.width))

    def gain(self, x):
        return torch.sigmoid(self.norm(x) @ self.w)[..., None]

    def write(self, x, update, gain=None):
        return x + (self.gain(x) if gain is None else gain) * update


def test_a_residual_of_ones_own_can_skip(monkeypatch):
    monkeypatch.setitem(RESIDUALS, "wary", Wary)
    model, idx, kept = perturb(build("wary"), 0.5).eval(), ids(), []
    tau, realised = train.calibrate(model, [idx], 0.3)
    with torch.no_grad():
        whole, _ = model(idx, tau=tau, kept=kept)
        cache = KVCache(model, len(idx))
        steps = [model(idx[:, t:t + 1], cache=cache, tau=tau)[0] for t in range(idx.shape[1])]
    assert 0.25 < realised < 0.35 and 1 - sum(train.shares(kept)) / len(kept) == pytest.approx(realised)
    same(torch.cat(steps, dim=1), whole)


def masked(model, idx, tau):
    """
    The same by other means: every sublayer runs for every token, the write of those below tau is thrown away.
    -> logits, the (2L, B, T) decisions
    """
    stream, rope, decisions = model.ends.start(model.wte(idx)), model.rope(0, idx.shape[1]), []
    for residual, sublayer in model.sublayers():
        r, s = stream
        m = (residual.p.softmax(0) * torch.sigmoid(r @ residual.w.T + residual.b)).sum(-1)
        gain = residual.alpha * m.clamp_min(1e-6) ** torch.nn.functional.softplus(residual.beta)
        keep = gain.abs() > tau
        r2, s2 = residual.write(stream, sublayer(r, rope))
        stream = torch.where(keep[..., None], r2, r), torch.where(keep[..., None], s2, s)
        decisions.append(keep)
    return model.head(model.ends.finish(stream)), torch.stack(decisions)


def tau_for(model, idx, rate):
    """
    A threshold below which about a share `rate` of the dense model's gains lies. It is far from every gain:
    at sublayer 1 equal tokens have equal gains, and a quantile that hits one leaves the decision to rounding.
    """
    with torch.no_grad():
        gains = [residual.gain(stream).abs() for (residual, _), (_, stream, _)
                 in zip(model.sublayers(), model.walk(idx, tau=-1))]
    gains = torch.stack(gains).flatten().sort().values
    at = next(i for i in range(int(rate * len(gains)), len(gains)) if gains[i] - gains[i - 1] > 1e-6)
    return (gains[at - 1] + gains[at]).item() / 2


RATES = [0.15, 0.3, 0.5, 0.7, 0.9, 0.99]
SHAPES = [{}, dict(activation="swiglu", nag_head="linear"), dict(tie=True, n_head=4)]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tau_0_is_the_dense_model(dtype):
    for model in build("nag", dtype), perturb(build("nag", dtype)):
        for tau in (-1.0, 0.0):
            assert torch.equal(model(ids(), tau=tau)[0], model(ids())[0])


@pytest.mark.parametrize("tau", [-1.0, 0.0, 0.3, INF])
@pytest.mark.parametrize("name", [name for name in RESIDUALS if name != "nag"])
def test_residuals_without_a_rule_run_every_token(name, tau):
    model = perturb(build(name))
    assert torch.equal(model(ids(), tau=tau)[0], model(ids())[0])


@torch.no_grad()
@pytest.mark.parametrize("name", RESIDUALS)
def test_a_negative_tau_decodes_as_the_dense_model_does(name):
    """To the bit: no residual has to know a score for it, and no gain is computed by another product."""
    model = perturb(build(name)).eval()
    tokens = [model.generate(ids(1, 3), 12, temperature=0, tau=tau) for tau in (-1.0, None)]
    caches = [KVCache(model, 2) for _ in tokens]
    for part in ids(2, 8).split([4, 1, 1, 1, 1], dim=1):
        a, b = (model(part, cache=cache, tau=tau)[0] for cache, tau in zip(caches, (-1.0, None)))
        assert torch.equal(a, b)
    assert torch.equal(*tokens)


@torch.no_grad()
@pytest.mark.parametrize("runs", [0, 1, 3])
def test_a_decoded_token_that_skips_runs_no_product(runs):
    """Nothing but gains and head; keys and values only of an attention that a later token runs."""
    model, idx = varied().eval(), ids(1, 16)
    C, tau = model.config.n_embd, torch.full((2 * model.config.n_layer,), INF)
    tau[:2 * runs] = -1.0
    model(idx[:, :15], cache=(cache := KVCache(model, 1)), tau=INF)      # skips everything
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(idx[:, 15:], cache=cache, tau=tau)
    gains = 4 * 2 * (C + 4) * model.config.nag_directions      # of four sublayers; anew for a turned stream
    keys_values, attention, mlp = 15 * 4 * C * C, 8 * C * C + 4 * 16 * C, 16 * C * C
    spent = counter.get_total_flops() - 2 * C * model.config.vocab_size
    assert spent == pytest.approx(runs * (keys_values + attention + mlp) + 2 * gains, abs=2 * runs * gains)
    if not runs:
        assert spent == 2 * gains


def test_removed_sublayers_neither_run_nor_skip():
    model, idx = stretched(block_size=64), ids(4, 64)
    whole = model.flops_per_token(share=[0.5] * 8)
    model.remove([2, 3, 6])
    tau, realised = train.calibrate(model, [idx], 0.3)
    kept = []
    with torch.no_grad():
        model(idx, tau=tau, kept=kept)
    there = [share for share, run in zip(train.shares(kept), model.present()) if run]
    assert len(there) == 5 and 1 - sum(there) / 5 == pytest.approx(realised, abs=1e-9)
    assert realised == pytest.approx(0.3, abs=0.01)
    assert model.flops_per_token(share=[0.5] * 8) < whole
    assert model.flops_per_token(share=[1.0] * 8) == model.flops_per_token()


def test_tau_infinite_leaves_the_embedding(no_eps):
    model = varied()
    with torch.no_grad():
        r, s = model.ends.start(model.wte(ids()))
        head = model.lm_head.weight - model.lm_head.weight.mean(-1, keepdim=True)
        cosine = torch.nn.functional.normalize(r, dim=-1) @ torch.nn.functional.normalize(head, dim=-1).T
        same(model(ids(), tau=INF)[0], s.exp() * cosine)
        assert torch.equal(model(ids(), tau=INF)[0], model.head(model.ends.finish((r, s))))
        assert (model(ids(), tau=INF)[0] - logits(model)).abs().max() > 0.1


@pytest.mark.parametrize("flags", SHAPES, ids=str)
def test_gathering_equals_masking(flags):
    """Logits, loss and the gradients of all parameters. The rates are such that every odd case occurs."""
    model, idx, targets = varied(**flags), ids(3, 16), ids(3, 16, seed=1)
    uneven, empty, partly_empty = 0, 0, 0
    for rate in RATES:
        tau = tau_for(model, idx, rate)
        right, decisions = masked(model, idx, tau)
        out, loss = model(idx, targets, tau=tau)
        same(out, right, 1e-10)
        reference = torch.nn.functional.cross_entropy(right.flatten(0, 1), targets.flatten())
        same(loss, reference, 1e-10)
        mine, his = gradients(model, loss), gradients(model, reference)
        for key in his:
            same(mine[key], his[key], 1e-10)
        count = decisions.sum(-1)                                             # (2L, B)
        uneven += (count.amin(1) != count.amax(1)).sum()
        empty += (count.sum(1) == 0).sum()
        partly_empty += ((count.amin(1) == 0) & (count.amax(1) > 0)).sum()
        assert 0 < decisions.double().mean() < 1
    assert uneven > 5 and empty > 5 and partly_empty > 0


def test_skipped_tokens_keep_their_stream():
    model, idx = varied(), ids(3, 16)
    tau, rope = tau_for(model, idx, 0.5), model.rope(0, 16)
    with torch.no_grad():
        stream, skipped = model.ends.start(model.wte(idx)), 0
        for residual, sublayer in model.sublayers():
            before, skip = stream, M.Skip(tau=torch.tensor(tau), kv="all")
            stream, keep = M.step(before, residual, sublayer, rope, skip=skip)
            assert torch.equal(residual.gain(before).abs().squeeze(-1) > tau, keep)
            for x, y in zip(before, stream):
                assert torch.equal(x[~keep], y[~keep])
            assert ((stream[0] - before[0])[keep].abs().amax(-1) > 0).all()
            skipped += (~keep).sum()
    assert 0.2 * 8 * 48 < skipped < 0.8 * 8 * 48


def decided(model, idx, tau=None):
    """Logits and the (2L, B, T) decisions of a forward pass."""
    kept = []
    with torch.no_grad():
        out = model(idx, tau=tau, kept=kept)[0]
    # where all tokens run, there is nothing to decide
    return out, torch.stack([torch.ones_like(idx).bool() if keep is None else keep for keep in kept])


@pytest.mark.parametrize("rate", RATES)
def test_decisions_are_causal_and_of_one_sequence_only(rate):
    model, idx, t = varied(), ids(3, 16), 7
    tau = tau_for(model, idx, rate)
    later, others = idx.clone(), idx.clone()
    later[:, t:] = (later[:, t:] + 1 + ids(3, 16 - t, 62, seed=2)) % 64
    others[1:] = ids(2, 16, seed=3)
    out, decisions = decided(model, idx, tau)
    out2, decisions2 = decided(model, later, tau)
    assert torch.equal(decisions[:, :, :t], decisions2[:, :, :t])
    same(out[:, :t], out2[:, :t])
    assert (out[:, t:] - out2[:, t:]).abs().amax(-1).min() > 1e-9
    out3, decisions3 = decided(model, others, tau)
    assert torch.equal(decisions[:, 0], decisions3[:, 0])
    same(out[0], out3[0])
    assert torch.equal(decisions, masked(model, idx, tau)[1])


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("pieces", [[1] * 16, [5, 1, 1, 4, 1, 3, 1]], ids=str)
def test_cached_decoding_equals_the_full_forward(rate, pieces):
    model, idx = varied(), ids(3, 16)
    tau, cache, out = tau_for(model, idx, rate), M.KVCache(model, 3), []
    with torch.no_grad():
        for piece in idx.split(pieces, dim=1):
            out.append(model(piece, cache=cache, tau=tau)[0])
        full = model(idx, tau=tau)[0]
    same(torch.cat(out, dim=1), full)
    assert (full - logits(model, idx)).abs().max() > 1e-3


def test_generate_with_skipping_equals_generate_without_a_cache():
    model, idx = varied(), ids(3, 4)
    tau = tau_for(model, ids(3, 16), 0.5)
    right = idx
    with torch.no_grad():
        for _ in range(12):
            right = torch.cat((right, model(right, tau=tau)[0][:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(model.generate(idx, 12, temperature=0, tau=tau), right)
    assert not torch.equal(model.generate(idx, 12, temperature=0), right)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("rate", RATES + [None])
def test_skipped_tokens_cost_keys_and_values_only(rate, activation):
    """By the flop counter, forward and backward: queries, scores, output and the MLP run for kept tokens
    only."""
    model, idx = varied(activation=activation), ids(3, 16)
    tau = INF if rate is None else tau_for(model, idx, rate)
    decisions = masked(model, idx, tau)[1]
    C, (_, hidden, fan_out), BT = 16, M.block_shapes(model.config)[0], 48
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, depth=None) as counter:
        model(idx, tau=tau)
    by_module = {key: sum(ops.values()) for key, ops in counter.get_flop_counts().items()}
    total = 2 * BT * C * 64
    for i in range(4):
        rows = decisions[2 * i].sum().item()
        attn = (BT * 2 * C * 2 * C if rows else 0) + rows * 2 * (2 * C * C) + 4 * rows * 16 * C
        mlp = 2 * C * (hidden + fan_out) * decisions[2 * i + 1].sum().item()
        assert by_module.get(f"GPT.blocks.{i}.attn", 0) == attn
        assert by_module.get(f"GPT.blocks.{i}.mlp", 0) == mlp
        total += attn + mlp + 2 * BT * model.blocks[i].attn_residual.cost()[1]
    assert counter.get_total_flops() == total
    if rate is None:
        assert decisions.sum() == 0
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(idx, idx, tau=tau)[1].backward()
    assert counter.get_total_flops() <= 3 * total


def test_more_skipping_costs_less():
    model, idx, seen = varied(), ids(3, 16), []
    for tau in [0.0] + [tau_for(model, idx, rate) for rate in RATES] + [INF]:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(idx, tau=tau)
        seen.append(counter.get_total_flops())
    assert seen == sorted(seen, reverse=True) and seen[-1] < 0.5 * seen[0]


@pytest.mark.parametrize("shape", [(1, 1), (1, 16), (5, 2)])
def test_odd_batches(shape):
    model, idx = varied(), ids(*shape)
    for rate in (0.3, 0.6, 0.95):
        tau = tau_for(model, idx, rate)
        same(model(idx, tau=tau)[0], masked(model, idx, tau)[0], 1e-10)


def test_skipping_in_bf16_autocast():
    """The decision is taken in fp32: autocast changes the stream a little, but not by rounding the gain."""
    model = varied().float()
    residual = model.blocks[0].attn_residual
    r = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    r = r / rms(r)
    exact = residual.gain((r, None))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(residual.gain((r, None)), exact) and exact.dtype == torch.float32
        out, _ = model(ids(3, 16), tau=0.3)
    assert out.isfinite().all()


def test_threshold_out_of_the_ordinary_trains():
    """A step with everything skipped still has gradients for embedding and head, and none that isn't
    finite."""
    model = varied()
    model(ids(), ids(seed=1), tau=INF)[1].backward()
    assert model.wte.weight.grad.abs().max() > 0 and model.lm_head.weight.grad.abs().max() > 0
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert math.isfinite(model.ends.g.grad.item()) and model.ends.g.grad != 0


# ----------------------------------------------------------------------------- flags of the rule

# tests/test_residuals.py flips every other flag of GPTConfig
MOD_FLAGS = {"mod", "mod_rate", "mod_on", "mod_scope", "mod_kv", "mod_least", "mod_explore", "mod_floor",
             "layer_drop", "layer_drop_rule"}


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def stretched(**flags):
    """Like varied, but no sublayer is shut."""
    model = varied(**flags)
    with torch.no_grad():
        model.blocks[1].mlp_residual.alpha.fill_(0.9)
    return model


def modulator(residual, r):
    near = torch.sigmoid(r @ residual.w.T + residual.b)
    return (residual.p.softmax(0) * near).sum(-1).clamp_min(1e-6) ** F.softplus(residual.beta)


@pytest.mark.parametrize("rate", RATES)
def test_mod_on_m_decides_by_the_modulator_alone(rate):
    model, idx = stretched(mod_on="m"), ids(3, 16)
    with torch.no_grad():
        ms = torch.stack([modulator(r, stream[0]) for (r, _), (_, stream, _)
                          in zip(model.sublayers(), model.walk(idx, tau=-1))])
        tau = ms.flatten().quantile(rate).item() + 1e-5
        _, decisions = decided(model, idx, tau)
        walk = zip(model.sublayers(), model.walk(idx, tau=tau))
        by_hand = torch.stack([modulator(r, stream[0]).abs() > tau for (r, _), (_, stream, _) in walk])
    assert torch.equal(decisions, by_hand) and 0 < decisions.double().mean() < 1
    by_gain = stretched(mod_on="gain")
    assert not torch.equal(decisions, decided(by_gain, idx, tau)[1])
    assert torch.equal(logits(model, idx), logits(by_gain, idx))


@pytest.mark.parametrize("tau", [-1.0, 0.0])
def test_mod_on_m_of_a_shut_sublayer(tau):
    """m does not depend on alpha: a sublayer with alpha 0 is not skipped for that."""
    assert decided(varied(mod_on="m"), ids(), tau)[1].all()


# ----------------------------------------------------------------------------- keys of kept tokens only

def turned(x, turn):
    """RMSNorm and rotary embedding, written out. x (B, T, nh, hs), turn (T, nh, hs)."""
    x = x / (x.square().mean(-1, keepdim=True) + M.EPS).sqrt()
    (a, b), (cos, sin) = (each.unflatten(-1, (-1, 2)).unbind(-1) for each in (x, turn))
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def attention_among(attn, x, rope, keep):
    """Dense attention (B, T, C) in which the keys of tokens that are not kept (B, T) are hidden."""
    q, k, v = attn.c_attn(x).chunk(3, dim=-1)
    q, k, v = (y.unflatten(-1, (attn.n_head, attn.hs)) for y in (q, k, v))
    q, k = turned(q, rope[:, :attn.n_head]), turned(k, rope[:, :attn.n_head])
    scores = torch.einsum("bihc,bjhc->bhij", q, k) / attn.hs ** 0.5
    here = torch.eye(x.shape[1], dtype=torch.bool)          # else a row without a key would be NaN
    seen = torch.ones_like(here).tril() & (keep[:, None] | here)
    y = torch.einsum("bhij,bjhc->bihc", scores.masked_fill(~seen[:, None], -INF).softmax(-1), v)
    return attn.c_proj(y.flatten(-2))


def masked_among(model, idx, keeps=None, tau=None, scales=None):
    """
    Like masked, for keys and values of kept tokens only, and for any residual: every sublayer runs on all.
    -> logits, the decisions: keeps (2L, B, T), or by the gain
    """
    stream, rope, decisions = model.ends.start(model.wte(idx)), model.rope(0, idx.shape[1]), []
    for l, (residual, sublayer) in enumerate(model.sublayers()):
        keep = residual.gain(stream).abs().squeeze(-1) > tau if keeps is None else keeps[l]
        x = residual.read(stream)
        update = attention_among(sublayer, x, rope, keep) if l % 2 == 0 else sublayer(x)
        new = residual.write(stream, update if scales is None else update * scales[l])
        choose = lambda a, b: torch.where(keep[..., None], a, b)
        stream = tuple(map(choose, new, stream)) if isinstance(stream, tuple) else choose(new, stream)
        decisions.append(keep)
    return model.head(model.ends.finish(stream)), torch.stack(decisions)


def same_gradients(model, loss, reference, other=None, tol=1e-10):
    """Also of the loss. other: the model that the reference comes from, if it is not the same."""
    same(loss, reference, 1e-10)
    mine, his = gradients(model, loss), gradients(other or model, reference)
    for key in his:
        same(mine[key], his[key], tol)


@pytest.mark.parametrize("flags", SHAPES, ids=str)
def test_kept_gathering_equals_masking(flags):
    model, idx, targets = varied(mod_kv="kept", **flags), ids(3, 16), ids(3, 16, seed=1)
    empty, partly_empty, differs = 0, 0, 0
    for rate in RATES:
        tau = tau_for(model, idx, rate)
        right, decisions = masked_among(model, idx, tau=tau)
        out, loss = model(idx, targets, tau=tau)
        same(out, right, 1e-10)
        assert torch.equal(decided(model, idx, tau)[1], decisions)
        same_gradients(model, loss, F.cross_entropy(right.flatten(0, 1), targets.flatten()))
        count = decisions.sum(-1)
        empty += (count.sum(1) == 0).sum()
        partly_empty += ((count.amin(1) == 0) & (count.amax(1) > 0)).sum()
        differs += (right - masked(model, idx, tau)[0]).abs().max() > 1e-4
    assert empty > 5 and partly_empty > 0 and differs > 3


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("pieces", [[1] * 16, [5, 1, 1, 4, 1, 3, 1]], ids=str)
def test_kept_cached_decoding_equals_the_full_forward(rate, pieces):
    model, idx = varied(mod_kv="kept"), ids(3, 16)
    tau, cache = tau_for(model, idx, rate), M.KVCache(model, 3)
    for _ in range(2):   # the second time with a cache that has been used
        cache.clear()
        out, kept = [], []
        with torch.no_grad():
            for piece in idx.split(pieces, dim=1):
                out.append(model(piece, cache=cache, tau=tau, kept=kept)[0])
        full, decisions = decided(model, idx, tau)
        same(torch.cat(out, dim=1), full)
        assert torch.equal(torch.stack([torch.cat(kept[l::8], dim=1) for l in range(8)]), decisions)
        assert torch.equal(torch.stack([layer.count for layer in cache.layers]), decisions[::2].sum(-1))


@pytest.mark.parametrize("rate", RATES)
def test_kept_decisions_are_causal(rate):
    model, idx, t = varied(mod_kv="kept"), ids(3, 16), 7
    tau, later, others = tau_for(model, idx, rate), idx.clone(), idx.clone()
    later[:, t:] = (later[:, t:] + 1 + ids(3, 16 - t, 62, seed=2)) % 64
    others[1:] = ids(2, 16, seed=3)
    out, decisions = decided(model, idx, tau)
    out2, decisions2 = decided(model, later, tau)
    assert torch.equal(decisions[:, :, :t], decisions2[:, :, :t])
    same(out[:, :t], out2[:, :t])
    out3, decisions3 = decided(model, others, tau)
    assert torch.equal(decisions[:, 0], decisions3[:, 0])
    same(out[0], out3[0])


@pytest.mark.parametrize("rate", RATES + [None])
def test_kept_costs_what_is_kept(rate):
    model, idx, C = varied(mod_kv="kept"), ids(3, 16), 16
    tau = INF if rate is None else tau_for(model, idx, rate)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        _, decisions = decided(model, idx, tau)
    total = 2 * 48 * C * 64 + sum(2 * 24 * r.cost()[1] for r in model.residuals())
    for attn, mlp in zip(decisions[::2], decisions[1::2]):
        count = attn.sum(-1)
        rows, K, S = count.sum().item(), count.max().item(), 3 if count.sum() else 0
        total += rows * 2 * 4 * C * C + 4 * S * K * K * C + 2 * 8 * C * C * mlp.sum().item()
    assert counter.get_total_flops() == total


# ----------------------------------------------------------------------------- router

def routed(rate=0.25, **flags):
    return perturb(build("pre", mod="router", mod_rate=rate, n_layer=4, **flags), 0.2)


class Ones(torch.nn.Module):
    def forward(self, x):
        return torch.ones_like(x[..., :1])


@pytest.mark.parametrize("n_layer", [2, 3, 5])
def test_a_router_reaches_its_rate_at_any_depth(n_layer):
    model, kept = build("pre", mod="router", mod_rate=0.25, n_layer=n_layer, block_size=96).train(), []
    model(ids(2, 96), kept=kept)
    assert 1 - sum(train.shares(kept)) / len(kept) == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("rate, T", [(0.25, 16), (0.125, 16), (0.45, 16), (0.3, 7), (0.45, 1)])
def test_a_routed_block_runs_a_fixed_number_per_sequence(rate, T):
    model = routed(rate).train()
    x, block = torch.randn(5, T, 16, generator=rng(), dtype=torch.float64), model.blocks[1]
    rope = model.rope(0, T)
    after, (keep, also), _ = block(x, rope)
    assert keep is also and (keep.sum(1) == max(1, round((1 - 2 * rate) * T))).all()
    assert torch.equal(after[~keep], x[~keep]) and ((after - x)[keep].abs().amax(-1) > 0).all()
    weight = block.router(M.rms_norm(x)).squeeze(-1)
    lowest, highest = weight.masked_fill(~keep, INF).amin(1), weight.masked_fill(keep, -INF).amax(1)
    assert (lowest > highest).all()
    model.eval()
    after, (keep, _), _ = block(x, rope)
    assert torch.equal(keep, weight > 0) and torch.equal(after[~keep], x[~keep])


def test_a_routed_block_equals_masking():
    """In training and in evaluation; attention among the kept tokens, the change times the weight."""
    model, x = routed(), torch.randn(5, 16, 16, generator=rng(), dtype=torch.float64)
    block, rope = model.blocks[1], model.rope(0, 16)
    for training in (True, False):
        model.train(training)
        after, (keep, _), _ = block(x, rope)
        h = x + attention_among(block.attn, block.attn_residual.read(x), rope, keep)
        h = h + block.mlp(block.mlp_residual.read(h))
        weight = block.router(x / (x.square().mean(-1, keepdim=True) + M.EPS).sqrt())
        same(after, torch.where(keep[..., None], x + weight * (h - x), x), 1e-10)


@pytest.mark.parametrize("training", [True, False])
def test_router_that_keeps_all_is_the_dense_model(training):
    model, dense = routed().train(training), perturb(build("pre", n_layer=4), 0.2)
    for block in model.blocks[1::2]:
        block.router, block.rate = Ones(), 0.0
    assert {k for k, _ in model.named_parameters()} == {k for k, _ in dense.named_parameters()}
    same(model(ids())[0], dense(ids())[0], 1e-10)
    mine = gradients(model, model(ids(), ids(seed=1))[1])
    for key, g in gradients(dense, dense(ids(), ids(seed=1))[1]).items():
        same(mine[key], g, 1e-10)


def test_router_sees_the_future_in_training_only():
    model, idx, earlier = routed(), ids(4, 16), {}
    other = idx.clone()
    other[:, -1] = (other[:, -1] + 1 + ids(4, 1, 62, seed=2)[:, 0]) % 64
    for training in (True, False):
        model.train(training)
        change = (logits(model, idx) - logits(model, other)).abs()
        assert change[:, -1].min() > 0
        earlier[training] = change[:, :-1].max()
    assert earlier[True] > 1e-3 and earlier[False] < 1e-12


@pytest.mark.parametrize("pieces", [[1] * 16, [5, 1, 1, 4, 1, 3, 1], [16]], ids=str)
def test_router_cached_decoding_equals_the_full_forward(pieces):
    model, idx, out = routed().eval(), ids(3, 16), []
    cache = M.KVCache(model, 3)
    with torch.no_grad():
        for piece in idx.split(pieces, dim=1):
            out.append(model(piece, cache=cache)[0])
        kept = []
        same(torch.cat(out, dim=1), model(idx, kept=kept)[0])
    assert [k is None for k in kept] == [True, True, False, False] * 2
    share = torch.stack([k for k in kept if k is not None]).double().mean()
    assert 0.1 < share < 0.9


def test_router_learns_by_its_auxiliary_loss():
    """Part of the training loss only; written out from the weights that the routers gave."""
    model, idx, targets, seen, kept = routed().train(), ids(3, 16), ids(3, 16, seed=1), [], []
    for block in model.blocks[1::2]:
        block.router.register_forward_hook(lambda module, args, out: seen.append(out.squeeze(-1)))
    out, loss = model(idx, targets, kept=kept)
    ce = F.cross_entropy(out.flatten(0, 1), targets.flatten())
    auxiliary = [(F.softplus(w) - w * k).mean() for w, k in zip(seen, kept[2::4])]
    same(loss - ce, M.ROUTER_LOSS * (auxiliary[0] + auxiliary[1]) / 2, 1e-10)
    assert loss - ce > 1e-4
    for p in (ce, loss):
        model.zero_grad()
        p.backward(retain_graph=True)
        assert all(block.router.weight.grad.abs().max() > 1e-8 for block in model.blocks[1::2])
    model.eval()
    out, loss = model(idx, targets)
    same(loss, F.cross_entropy(out.flatten(0, 1), targets.flatten()), 1e-14)


# ----------------------------------------------------------------------------- layer_drop

@pytest.mark.parametrize("name", [name for name in RESIDUALS if build(name).ends.single])
def test_layer_drop_is_for_training_only(name):
    plain = perturb(build(name)).train()
    assert torch.equal(perturb(build(name, layer_drop_rule="linear")).train()(ids())[0], plain(ids())[0])
    model = perturb(build(name, layer_drop=0.5)).eval()
    assert torch.equal(model(ids())[0], plain(ids())[0])
    half = [0.5] * len(list(model.sublayers()))
    assert model.flops_per_token(share=half) == plain.flops_per_token(share=half)
    model.train()
    a, b, c = (model(ids(), generator=rng(seed))[0] for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c) and not torch.equal(a, plain(ids())[0])


def test_layer_drop_leaves_the_mean_update():
    """Survivors are scaled by 1 / (1 - p): over 4000 draws the mean update is the dense one."""
    model, plain = perturb(build(n_layer=1, layer_drop=0.3)).train(), perturb(build(n_layer=1))
    idx, p = ids(8, 4), 0.3
    with torch.no_grad():
        for l, (_, before, after) in enumerate(plain.walk(idx)):
            if l == 2:
                break
            residual, sublayer = list(model.sublayers())[l]
            total = torch.zeros_like(before)
            for seed in range(500):
                skip = model.skips(8, 4, generator=rng(seed))[0][l]
                total += M.step(before, residual, sublayer, model.rope(0, 4), skip=skip)[0] - before
            dense = after - before
            ratio = (total * dense).sum((1, 2)) / 500 / dense.square().sum((1, 2))                  # (B,)
            assert (ratio - 1).abs().max() < 4 * (p / (1 - p) / 500) ** 0.5
            assert abs(ratio.mean() - 1) < 4 * (p / (1 - p) / 4000) ** 0.5
            for b in range(8):   # not the size alone: a multiple of it
                same(total[b] / 500, dense[b] * ratio[b], 1e-9)


@pytest.mark.parametrize("rule", ["constant", "linear"])
def test_layer_drop_rules(rule):
    model = build(n_layer=4, layer_drop=0.4, layer_drop_rule=rule).train()
    skips = [skip for pair in model.skips(20000, 3, generator=rng()) for skip in pair]
    for l, skip in enumerate(skips, start=1):
        drop = 0.4 * l / 8 if rule == "linear" else 0.4
        assert (skip.keep == skip.keep[:, :1]).all()   # whole sequences
        assert 1 - skip.keep.double().mean() == pytest.approx(drop, abs=4 * (drop / 20000) ** 0.5)
        assert skip.scale.item() == pytest.approx(1 / (1 - drop))
    both = torch.stack([skip.keep[:, 0] for skip in skips]).double()
    assert (torch.corrcoef(both) - torch.eye(8)).abs().max() < 0.04   # each for itself


@pytest.mark.parametrize("name", ["pre", "nag", "peri", "keel"])
def test_layer_drop_equals_masking(name):
    model = perturb(build(name, layer_drop=0.5, layer_drop_rule="linear"), 0.2).train()
    idx, targets, partly, empty = ids(3, 16), ids(3, 16, seed=1), 0, 0
    for seed in range(8):
        skips = [skip for pair in model.skips(3, 16, generator=rng(seed)) for skip in pair]
        keeps, scales = [skip.keep for skip in skips], [skip.scale for skip in skips]
        right, _ = masked_among(model, idx, keeps, scales=scales)
        kept = []
        out, loss = model(idx, targets, generator=rng(seed), kept=kept)
        assert all(map(torch.equal, kept, keeps))
        same(out, right, 1e-10)
        same_gradients(model, loss, F.cross_entropy(right.flatten(0, 1), targets.flatten()))
        share = torch.stack(keeps).double().mean((1, 2))
        partly, empty = partly + ((share > 0) & (share < 1)).sum(), empty + (share == 0).sum()
    assert partly > 5 and empty > 0


# ----------------------------------------------------------------------------- exploration and floor

def test_exploration_and_floor_are_for_training_only():
    flags = dict(mod_rate=0.25, mod_explore=0.1, mod_floor=0.2)
    model, idx, kept = stretched(**flags).train(), ids(6, 16), []
    forced = torch.stack([skip.force for pair in model.skips(6, 16, INF, rng(3)) for skip in pair])
    model(idx, tau=INF, generator=rng(3), kept=kept)
    kept = torch.stack(kept)
    assert (kept.double().mean((1, 2)) >= 0.2).all() and kept.double().mean() < 0.5
    assert (kept & forced).sum() == forced.sum() and (kept & ~forced).sum() > 0
    assert forced.double().mean() == pytest.approx(0.1, abs=0.04)
    assert not decided(model.eval(), idx, INF)[1].any()
    model = stretched(**flags | dict(mod_rate=0.0)).train()   # a threshold given by hand is not training
    assert not decided(model, idx, INF)[1].any()


@pytest.mark.parametrize("floor", [0.0, 0.01, 0.3, 0.99])
def test_floor_takes_the_highest_scores(floor):
    model, kept = stretched(mod_rate=0.005, mod_explore=0.0, mod_floor=floor).train(), []
    idx, number = torch.arange(64).view(4, 16), math.ceil(floor * 64)     # no two tokens are equal
    with torch.no_grad():
        model(idx, tau=INF, kept=kept)
        walk = zip(model.sublayers(), model.walk(idx, tau=INF))
        for keep, ((residual, _), (_, before, _)) in zip(kept, walk, strict=False):
            score = residual.gain(before).abs().squeeze(-1)
            assert keep.sum() == number
            lowest = score.flatten().sort(descending=True).values[number - 1]
            assert torch.equal(keep, score >= lowest) or not number


def test_exploration_alone_runs_what_was_drawn():
    model, kept = stretched(mod_rate=0.25, mod_explore=0.3, mod_floor=0.0).train(), []
    model(ids(6, 16), tau=INF, generator=rng(4), kept=kept)
    forced = [skip.force for pair in model.skips(6, 16, INF, rng(4)) for skip in pair]
    assert all(map(torch.equal, kept, forced))


# ----------------------------------------------------------------------------- calibrate and steer

@pytest.mark.parametrize("scope", ["global", "kind", "layer"])
@pytest.mark.parametrize("flags", [{}, dict(mod_on="m", mod_kv="kept")], ids=str)
def test_calibrate(scope, flags):
    model, batches = stretched(mod_scope=scope, block_size=64, **flags), list(ids(8, 64).split(3))
    found = []
    for rate in (0.1, 0.25, 0.5, 0.75):
        tau, realised = train.calibrate(model, batches, rate)
        decisions = torch.cat([decided(model, idx, tau)[1] for idx in batches], dim=1)
        skipped = 1 - decisions.double().mean().item()
        assert skipped == pytest.approx(rate, abs=0.01) and skipped == pytest.approx(realised, abs=1e-9)
        assert tau.shape == (8,) and len(tau.unique()) == {"global": 1, "kind": 2, "layer": 8}[scope]
        assert scope == "layer" or len(tau[::2].unique()) == len(tau[1::2].unique()) == 1
        found.append(tau)
    assert all((a <= b).all() for a, b in zip(found, found[1:]))
    tau, realised = train.calibrate(model, batches, 0.0)
    out, decisions = decided(model, batches[0], tau)
    assert realised == 0 and decisions.all() and torch.equal(out, model(batches[0])[0])


@pytest.mark.parametrize("mod_on", ["gain", "m"])
@pytest.mark.parametrize("reach", [1, 3, 8, 50])
def test_ahead_decides_what_the_sublayers_would(mod_on, reach):
    """... of each stream anew, and without a look at it while it stays the same."""
    model = varied(mod_on=mod_on)
    residuals = [residual for residual, _ in model.sublayers()]
    with torch.no_grad():
        residuals[3].alpha.zero_()
    ahead, tau = M.Ahead(residuals, reach), torch.linspace(0.1, 0.6, 8, dtype=torch.float64)
    streams, looks = [model.start(ids(3, 1))[0], model.start(ids(3, 1, seed=5))[0]], []
    for l in range(8):
        stream = streams[l // 5]
        gain, keep, n_kept = ahead.decide(l, tau[l:], stream)
        right, decisions, n = M.Skip(tau=tau[l]).decide(residuals[l], stream)
        torch.testing.assert_close(gain, right, rtol=0, atol=1e-12)
        assert torch.equal(keep, decisions) and n_kept == n
        looks.append(ahead.first)
    assert len(set(looks)) == -(-5 // reach) + -(-3 // reach)   # five sublayers at one stream, then three


@pytest.mark.parametrize("T", [20, 600])   # of more than 256 kept queries, some at a time
def test_attend_one_by_one_is_one_call_on_a_rectangle(T):
    keep = torch.rand(4, T, generator=rng()) < torch.tensor([0.3, 0.9, 1.0, 0.0])[:, None]   # one keeps none
    rows = M.Rows(keep)
    rows.arrange()
    q, k, v = (torch.randn(*shape, 2, 8, dtype=torch.float64, generator=rng(i), requires_grad=True)
               for i, shape in enumerate([(len(rows.index),), (4, T + 5), (4, T + 5)], start=1))
    position = rows.place + 5   # five tokens are in the cache
    y = rows.unpad(M.attend(rows.pad(q), k, v, M.causal_mask(rows.pad(position), T + 5)))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        ours = M.attend_one_by_one(q, k, v, position, rows.count.tolist())
    torch.testing.assert_close(ours, y, rtol=0, atol=1e-12)
    whole = 4 * q.numel() * (T + 5)   # of each query with each key
    assert counter.get_total_flops() <= whole * (1 if T == 20 else 0.8)
    assert counter.get_total_flops() > whole / 2
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (ours, y)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-11)


def test_attention_in_pieces_is_causal_attention():
    q, k, v = (torch.randn(2, 150, 2, 8, dtype=torch.float64, generator=rng(i), requires_grad=True)
               for i in range(3))
    outs, flops = [], []
    for attend in (lambda *x: F.scaled_dot_product_attention(
                       *(each.transpose(1, 2) for each in x), is_causal=True).transpose(1, 2),
                   lambda *x: M.attend_in_pieces(*x, torch.arange(150))):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            out = attend(q, k, v)
            outs.append((out, *torch.autograd.grad((out * torch.arange(8)).sum(), (q, k, v))))
        flops.append(counter.get_total_flops())
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(M.attend(q, k, v, is_causal=True), outs[0][0], rtol=0, atol=1e-12)
    pieces = M.attend_in_pieces(q, k, v, torch.arange(150))
    assert torch.equal(M.attend(q, k, v, is_causal=True), pieces)   # outside of MATH
    assert flops[1] < 0.7 * flops[0]


def test_calibrate_lets_attentions_that_few_skip_run_whole():
    model, batches = stretched(block_size=64), list(ids(8, 64).split(3))
    ran = lambda tau: torch.cat([decided(model, idx, tau)[1] for idx in batches], dim=1).double().mean((1, 2))
    for rate in (0.1, 0.3, 0.5):
        before = 1 - ran(train.calibrate(model, batches, rate)[0])
        least = before[::2].median().item() + 0.01   # half of the attentions, or more, are below that
        tau, realised = train.calibrate(model, batches, rate, least=least)
        whole, after = tau == -1, 1 - ran(tau)
        assert whole[::2].any() and not whole[1::2].any() and (before[whole] < least + 0.1).all()
        kept = []
        model(batches[0], tau=tau, kept=kept)
        assert [keep is None for keep in kept] == whole.tolist()   # no decision, in any pass without a cache
        assert (after[whole] == 0).all() and len(tau[~whole].unique()) == 1
        assert after.mean() == pytest.approx(rate, abs=0.01)
        assert after.mean() == pytest.approx(realised, abs=1e-9)
    both = [train.calibrate(model, batches, 0.9, least=least) for least in (1.0, 0.0)]
    assert (both[0][0] == both[1][0]).all()                      # MLPs alone can't skip nine tenths
    for scope in ("kind", "layer"):                              # where attentions have a rate of their own
        by_group = stretched(block_size=64, mod_scope=scope)
        assert (train.calibrate(by_group, batches, 0.1, least=0.5)[0] > 0).all()


def test_calibrate_is_a_pure_function():
    model, found = stretched(block_size=64, mod_rate=0.25).train(), []
    for seed in range(6):
        torch.manual_seed(seed)
        found.append([train.calibrate(model, [ids(4, 64)], rate)[0].tolist() for rate in (0.25, 0.75)])
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("scope", ["global", "kind", "layer"])
def test_steer_moves_each_group_towards_the_target(scope):
    model = build("nag", mod_rate=0.25, mod_scope=scope, n_layer=2)
    model.tau.fill_(0.5)
    train.steer(model, [1.0, 0.2, 0.75, 0.1], 0.25, False)
    moves = {"global": [-1.0] * 4, "kind": [1.0, -1.0] * 2, "layer": [1.0, -1.0, 0.0, -1.0]}[scope]
    assert torch.equal((model.tau - 0.5).sign(), torch.tensor(moves, dtype=model.tau.dtype))
    before = model.tau.clone()
    train.steer(model, [0.75] * 4, 0.25, False)
    assert torch.equal(model.tau, before)


def test_attentions_that_few_skip_run_whole_between_looks():
    """Their thresholds come back for one step in ten, to see whether more tokens would skip them by now."""
    model = build("nag", mod_rate=0.25, n_layer=2)
    model.tau.fill_(0.5)
    few, many = 0.8, 0.7
    assert train.look(model, 20)
    train.steer(model, [few, few, many, many], 0.25, True)
    assert model.tau.sign().tolist() == [-1, 1, 1, 1] and model.tau[1] == model.tau[2] == model.tau[3]
    assert not train.look(model, 21)
    train.steer(model, [1.0, few, few, many], 0.25, False)
    assert model.tau.sign().tolist() == [-1, 1, 1, 1]
    assert train.look(model, 30) and (model.tau > 0).all() and len(model.tau.unique()) == 1
    model = build("nag", mod_rate=0.25, n_layer=2, mod_scope="kind")
    assert not train.look(model, 20)


# ----------------------------------------------------------------------------- cost

# ----------------------------------------------------------------------------- cost

COSTS = [("nag", dict(mod_kv="all")), ("nag", dict(mod_kv="kept")),
         ("nag", dict(mod_kv="all", mod_scope="layer")), ("nag", dict(mod_kv="kept", mod_scope="layer")),
         ("nag", dict(mod_kv="kept", mod_rate=0.25)),
         ("pre", dict(mod="router", mod_rate=0.25)), ("pre", dict(layer_drop=0.25)),
         ("review", dict(mod="router", mod_rate=0.25)), ("review", dict(layer_drop=0.25)),
         ("nag", dict(layer_drop=0.25))]


@pytest.mark.parametrize("residual, flags", COSTS, ids=str)
def test_flops_of_a_training_step_by_formula(residual, flags):
    """
    Exactly, but for the rectangle that attention pads its tokens to where it sees kept ones only: it is as
    wide as the sequence with the most of them, where the formula takes the mean.
    """
    model = perturb(build(residual, n_layer=2, n_head=4, n_embd=64, block_size=128, **flags), 0.05)
    idx, kept, T, C, by_gain = ids(8, 128), [], 128, 64, residual == "nag" and "layer_drop" not in flags
    tau = train.calibrate(model, [idx], 0.25)[0] if by_gain else None
    model.train()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(idx, idx, tau=tau, generator=rng(1), kept=kept)[1].backward()
    share, padding = train.shares(kept), 0
    for keep in kept[::2]:
        if by_gain and not keep.all() and flags["mod_kv"] == "kept":
            K, N = keep.sum(1).max().item(), keep.sum().item()
            padding += 4 * C * (8 * K * K - N * N / 8)
    assert 0 <= 1 - sum(share) / 4 <= 0.4 and min(share) < 0.95
    formula = 8 * T * model.flops_per_token(share=share)
    assert counter.get_total_flops() == pytest.approx(3 * (formula + padding), rel=1e-9)
    assert counter.get_total_flops() == pytest.approx(3 * formula, rel=0.05)
    if by_gain:   # where nobody runs an attention, it has no keys
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.eval()(idx, tau=math.inf)
        assert counter.get_total_flops() == pytest.approx(8 * T * model.flops_per_token(share=[0.0] * 4))
    dense = model.flops_per_token()
    assert dense == model.flops_per_token(share=[1.0] * 4) > model.flops_per_token(share=share)


# ----------------------------------------------------------------------------- flags

NAG, DROP = dict(residual="nag", mod_rate=0.25), dict(residual="pre", layer_drop=0.3)
FLIPS = dict(mod=(dict(residual="pre"), dict(mod="router", mod_rate=0.25)),
             mod_rate=(dict(residual="nag"), 0.25),
             mod_on=(NAG, "m"), mod_kv=(NAG, "kept"), mod_explore=(NAG, 0.3), mod_floor=(NAG, 0.7),
             layer_drop=(dict(residual="pre"), 0.3), layer_drop_rule=(DROP, "linear"),
             mod_scope=(NAG, "layer"), mod_least=(NAG, 0.0))


def test_no_mod_flag_is_dead():
    assert FLIPS.keys() == MOD_FLAGS <= {field.name for field in dataclasses.fields(M.GPTConfig)}

    def visible(training, **flags):
        model = perturb(build(**flags), 0.2).train(training)
        tau = 0.3 if flags["residual"] == "nag" else None
        loss = model(ids(4, 16), ids(4, 16, seed=1), tau=tau, generator=rng())[1].item()
        least = model.config.mod_least
        return loss, train.calibrate(model.eval(), [ids(4, 16)], 0.3, least)[0].tolist() if tau else None

    for name, (needs, value) in FLIPS.items():
        flip = value if isinstance(value, dict) else {name: value}
        plain, flipped = visible(True, **needs), visible(True, **{**needs, **flip})
        assert plain == visible(True, **needs)
        of_thresholds = name in ("mod_scope", "mod_least")
        assert (plain[0] != flipped[0]) == (not of_thresholds), name
        assert not of_thresholds or plain[1] != flipped[1]
        if name in ("mod_rate", "mod_explore", "mod_floor", "layer_drop", "layer_drop_rule"):
            assert visible(False, **needs) == visible(False, **{**needs, **flip}), name


BAD = [(dict(mod="routers"), "--mod routers", "geometric, router"),
       (dict(mod_on="a"), "--mod_on a", "gain, m"),
       (dict(mod_scope="all"), "--mod_scope all", "global, kind, layer"),
       (dict(mod_kv="some"), "--mod_kv some", "all, kept"),
       (dict(layer_drop=0.1, layer_drop_rule="cubic"), "--layer_drop_rule cubic", "constant, linear"),
       *[({name: value, "residual": "nag"}, f"--{name} {value}", "is a share")
         for name in ("mod_rate", "mod_least", "mod_explore", "mod_floor", "layer_drop")
         for value in (1.0, -0.1, 2.0)],
       *[({name: math.nan, "residual": "nag"}, f"--{name} nan", "finite")
         for name in ("mod_rate", "mod_least", "mod_explore", "mod_floor", "layer_drop")],
       *[(dict(mod="router", mod_rate=rate, n_layer=2), f"--mod router --mod_rate {rate}", "0.45")
         for rate in (0.0, 0.46, 0.9)],
       (dict(mod_rate=0.97, residual="nag"), "--mod_rate 0.97", "lower --mod_rate"),
       (dict(mod="router", mod_rate=0.25, n_layer=1), "--mod router --mod_rate 0.25", "two blocks"),
       (dict(mod="router", mod_rate=0.25, residual="nag"), "--mod router --residual nag", "--residual pre"),
       *[(dict(mod_rate=0.25, residual=name), f"--mod_rate 0.25 --residual {name}", "--residual nag")
         for name in RESIDUALS if name != "nag"],
       (dict(mod_rate=0.25, layer_drop=0.1, residual="nag"), "--mod_rate 0.25 --layer_drop 0.1", "leave one"),
       (dict(mod="router", mod_rate=0.25, layer_drop=0.1), "--mod_rate 0.25 --layer_drop 0.1", "leave one")]


@pytest.mark.parametrize("flags, names, remedy", BAD, ids=str)
def test_bad_configs(flags, names, remedy):
    with pytest.raises(ValueError) as e:
        build(**flags)
    assert len([line for line in str(e.value).splitlines() if names in line and remedy in line]) == 1
    assert all(line.startswith("--") for line in str(e.value).splitlines())


# ----------------------------------------------------------------------------- torch.compile

@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kv", ["all", "kept"])
def test_compiled_blocks_are_not_made_anew_for_every_count(kv, training, backend):
    """12 numbers of kept tokens, 4 blocks: all graphs are made for the first number."""
    model, plain = (stretched(block_size=64, mod_scope="layer", mod_kv=kv) for _ in range(2))
    idx = ids(4, 64)
    torch._dynamo.reset()
    counters.clear()
    for block in model.blocks:
        block.compile(backend=backend)
    graphs, counts = [], set()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for i in range(12):
            tau, kept = train.calibrate(plain, [idx], 0.1 + 0.06 * i)[0], []
            with torch.set_grad_enabled(training):
                out, loss = model(idx, idx, tau=tau, kept=kept)
                right = plain(idx, idx, tau=tau)
            same(out, right[0], 1e-10)
            if training:
                same_gradients(model, loss, right[1], plain, 1e-8)   # eager mode's backward is by hand
            graphs.append(counters["stats"]["unique_graphs"])
            counts.add(sum(keep.sum().item() for keep in kept))
    torch._dynamo.reset()
    assert len(counts) == 12 and graphs[1:] == graphs[1:2] * 11 and 0 < graphs[-1] <= 20, graphs


def test_compiled_training_stays_below_the_recompile_limit():
    """As in train.py: dense first, then attention and MLP that all, some or no tokens run; evaluations."""
    model, plain = (stretched(block_size=32, mod_rate=0.3) for _ in range(2))
    idx, n = ids(4, 32), 2 * len(model.blocks)
    limits = [train.calibrate(plain, [idx], 0.05 + 0.1 * i)[0].max().item() for i in range(8)]
    taus = [-1.0] + [[(-1.0, limit, 100.0)[(l // 2 + l + i) % 3] for l in range(n)]
                     for i, limit in enumerate(limits)]
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        model.compile_blocks(backend="eager")
        for i, tau in enumerate(taus):
            for training in (False, True):
                with torch.set_grad_enabled(training):
                    out, right = (each.train(training)(idx, tau=tau, generator=rng(i))[0]
                                  for each in (model, plain))
                same(out, right, 1e-10)
    torch._dynamo.reset()
