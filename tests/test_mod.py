"""Skipping sublayers token by token (Mixture-of-Depths): GPT.forward(..., tau=)."""
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import model as M
from model import RESIDUALS
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


def test_tau_infinite_leaves_the_embedding(no_eps):
    model = varied()
    with torch.no_grad():
        r, s = model.ends.start(model.wte(ids()))
        head = model.lm_head.weight - model.lm_head.weight.mean(-1, keepdim=True)
        cosine = torch.nn.functional.normalize(r, dim=-1) @ torch.nn.functional.normalize(head, dim=-1).T
        same(model(ids(), tau=INF)[0], s.exp() * cosine)
        assert torch.equal(model(ids(), tau=INF)[0], model.head(model.ends.finish((r, s))))
        assert (model(ids(), tau=INF)[0] - logits(model)).abs().max() > 0.1


@pytest.mark.parametrize("flags", [{}, dict(activation="swiglu", nag_head="linear"), dict(tie=True, n_head=4)], ids=str)
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
    return out, torch.stack(kept)


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
    C, (hidden, fan_out), BT = 16, M.mlp_shape(model.config), 48
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, depth=None) as counter:
        model(idx, tau=tau)
    by_module = {key: sum(ops.values()) for key, ops in counter.get_flop_counts().items()}
    total = 2 * BT * C * 64
    for i in range(4):
        count = decisions[2 * i].sum(-1)
        rows, K, S = count.sum().item(), count.max().item(), (count > 0).sum().item()
        attn = BT * 2 * C * 2 * C + rows * 2 * (2 * C * C) + 4 * S * K * 16 * C   # padded to the longest row
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
