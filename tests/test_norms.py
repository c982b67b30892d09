"""
The norms of --norm, one by one against their definitions, and what whole models owe to them: conversions of
weights from one norm to another that leave the logits alone, and the negative control.
"""
import pytest
import torch
import torch.nn.functional as F

import kernels
import model as M
from test_residuals import build, ids, logits, no_eps, only_matrices, perturb, rms, same  # noqa: F401

PLAIN = [kind for kind in M.NORMS if kind != "batch"]


def some(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def norm(kind, C=16):
    return M.Norm(M.GPTConfig(norm=kind, n_embd=C)).double()


def formula(n, x):
    """A norm's definition, with loops where another one might broadcast."""
    C = x.shape[-1]
    out = torch.empty_like(x)
    for place in torch.cartesian_prod(*map(torch.arange, x.shape[:-1])).tolist():
        v = x[tuple(place)]
        size = (sum(v ** 2) / C + kernels.EPS) ** 0.5
        if n.kind == "layer":
            mean = sum(v) / C
            y = (v - mean) / (sum((v - mean) ** 2) / C + kernels.EPS) ** 0.5 * n.gain
        elif n.kind == "crms":
            last = -sum(v)
            y = v / ((sum(v ** 2) + last ** 2) / (C + 1) + kernels.EPS) ** 0.5 * n.gain
        else:
            y = {"rms": lambda: v / size * n.gain, "single": lambda: v / size * n.gain.item(),
                 "none": lambda: v,
                 "seednorm": lambda: (torch.tanh(sum(v * n.beta)) * n.alpha + n.gain) * v / size,
                 "dyt": lambda: n.gain * torch.tanh(n.a * v) + n.bias,
                 "bhyt": lambda: n.gain * torch.tanh(n.lam * v / (10 * size))}[n.kind]()
        out[tuple(place)] = y
    return out


@pytest.mark.parametrize("kind", PLAIN)
def test_formula(kind):
    n = perturb(norm(kind), 0.4)
    x = 1.7 * some(2, 3, n.gain.numel() if kind in ("rms", "crms") else 16)
    with torch.no_grad():
        same(n(x), formula(n, x), 1e-13)


@pytest.mark.parametrize("kind", PLAIN)
def test_invariances(kind, no_eps):  # noqa: F811
    """To the scale of the input, to a shift of it, to a rotation."""
    n, x = perturb(norm(kind), 0.4), some(3, 5, norm(kind).gain.numel() if kind == "crms" else 16)
    Q = torch.linalg.qr(some(x.shape[-1], x.shape[-1], seed=1))[0]
    far = lambda a, b: (a - b).abs().max().item()
    with torch.no_grad():
        assert (far(n(5 * x), n(x)) < 1e-12) == (kind in ("rms", "layer", "crms", "single", "bhyt"))
        assert (far(n(x + 3), n(x)) < 1e-12) == (kind == "layer")
        assert (far(n(x @ Q), n(x) @ Q) < 1e-12) == (kind in ("single", "none"))


@pytest.mark.parametrize("kind", ["rms", "layer", "single", "bhyt", "seednorm"])
def test_size_at_the_start(kind, no_eps):  # noqa: F811
    """sqrt(C) at unit gain; BHyT's branches are quieter, about lambda / 10 per channel."""
    n, x = norm(kind, 256), some(64, 256)
    with torch.no_grad():
        if kind != "bhyt":
            same(n(x).norm(dim=-1), torch.full((64,), 16.0, dtype=torch.float64), 1e-12)
            return
        for lam, size in ((1, 0.099), (2, 0.192), (3, 0.277)):
            n.lam.fill_(lam)
            assert rms(n(x)).mean().item() == pytest.approx(size, rel=0.03)
        peaked = 1e3 * torch.eye(256, dtype=torch.float64)[:1]           # the largest argument of all
        same(n(peaked).max(), torch.tanh(torch.tensor(3 * 16 / 10, dtype=torch.float64)), 1e-12)


@pytest.mark.parametrize("kind", ["seednorm", "dyt", "bhyt"])
def test_bounds(kind):
    n = perturb(norm(kind), 0.7)
    with torch.no_grad():
        bound = dict(seednorm=lambda: (n.gain.abs() + n.alpha.abs()) * 4,
                     dyt=lambda: n.gain.abs() + n.bias.abs(),
                     bhyt=lambda: n.gain.abs() * torch.tanh(n.lam.abs() * 4 / 10))[kind]()
        for scale in (1e-3, 1.0, 1e3, 1e6):
            for x in (some(100, 16), torch.eye(16, dtype=torch.float64)):
                assert (n(scale * x).abs() <= bound * (1 + 1e-9)).all()
        largest = n(1e6 * torch.cat((torch.eye(16), -torch.eye(16))).double()).abs().amax(0)
        # dyt and bhyt reach it; seednorm where tanh has the sign of the gain
        assert (largest > 0.99 * bound).float().mean() >= (0.25 if kind == "seednorm" else 1)


# ----------------------------------------------------------------------------- conversions

def recentred(state):
    """Whatever writes to the stream, centred over its channels."""
    over = lambda key: 1 if "wte" in key else 0 if "c_proj" in key else None
    return {key: v if over(key) is None else v - v.mean(over(key), keepdim=True) for key, v in state.items()}


SCALARS = [("pre", {}), ("lns", {}), ("skipinit", {}), ("denseformer", {}), ("pre", dict(x0=True)),
           ("pre", dict(value_residual=True)), ("pre", dict(activation="swiglu"))]


@pytest.mark.parametrize("name, flags", SCALARS, ids=str)
def test_pre_layernorm_is_recentred_pre_rmsnorm(name, flags):
    """Of every residual that scales updates by numbers only: the stream's mean then stays 0."""
    layer = perturb(build(name, norm="layer", **flags), 0.3)
    rms_ = build(name, norm="rms", **flags)
    rms_.load_state_dict(recentred(layer.state_dict()))
    same(logits(rms_), logits(layer), 1e-12)
    rms_.load_state_dict(layer.state_dict())
    assert (logits(rms_) - logits(layer)).abs().max() > 1e-2             # and not without
    # a second conversion changes nothing
    again = recentred(recentred(layer.state_dict()))
    assert all((v - again[key]).abs().max() < 1e-15 for key, v in recentred(layer.state_dict()).items())


@pytest.mark.parametrize("name, flags", [v for v in SCALARS if v[0] != "denseformer"], ids=str)
def test_pre_layernorm_is_pre_crmsnorm(name, flags):
    """All but the last entry of the stream are stored, whose column moves into those of the others."""
    layer, small = perturb(build(name, norm="layer", **flags), 0.3), build(name, norm="crms", **flags)
    full, state = recentred(layer.state_dict()), {}
    of = dict(c_attn="attn_residual.n_in.gain", c_fc="mlp_residual.n_in.gain")
    for key, v in full.items():
        if "wte" in key:
            v = v[:, :-1]
        elif "c_proj" in key:
            v = v[:-1]
        elif "c_attn" in key or "c_fc" in key or "lm_head" in key:
            start, kind = ".".join(key.split(".")[:2]), key.split(".")[-2]
            v = v * full[f"{start}.{of[kind]}" if kind in of else "ends.n_in.gain"]
            v = v[:, :-1] - v[:, -1:]
        elif key.endswith("gain"):
            v = torch.ones(15, dtype=torch.float64)
        state[key] = v
    small.load_state_dict(state)
    same(logits(small), logits(layer), 1e-12)
    assert small.num_params() < layer.num_params()


def test_a_model_with_single_norms_has_no_preferred_basis():
    """Rotate the stream: what writes to it and what reads it. Gains per channel notice."""
    Q = torch.linalg.qr(some(16, 16, seed=1))[0]
    for kind in ("single", "none", "rms"):
        model = perturb(build("pre", norm=kind), 0.3)
        before = logits(model)
        with torch.no_grad():
            for key, p in model.named_parameters():
                if only_matrices(key, p):
                    p.copy_(Q.T @ p if "c_proj" in key else p @ Q)
        change = (logits(model) - before).abs().max()
        assert change < 1e-12 if kind != "rms" else change > 1e-2


@pytest.mark.parametrize("kind", ["rms", "layer", "single"])
def test_gains_fold_into_the_matrices_that_follow(kind):
    model = perturb(build("pre", norm=kind), 0.3)
    before = logits(model)
    with torch.no_grad():
        for residual, sublayer in [*model.sublayers(), (model.ends, model.lm_head)]:
            n, matrix = residual.n_in, next(sublayer.modules())
            matrix = matrix if isinstance(matrix, torch.nn.Linear) else next(matrix.children())
            matrix.weight.mul_(n.gain)
            n.gain.fill_(1.0)
    same(logits(model), before, 1e-12)


def test_dyt_scales_the_embedding():
    """By a learned number, at first sqrt(C): tanh of values near 0.02 would do nothing."""
    model = perturb(build("pre", norm="dyt"), 0.1)
    out, scale = logits(model), model.embed_scale.item()
    with torch.no_grad():
        model.wte.weight.mul_(scale)
        model.embed_scale.fill_(1.0)
    same(logits(model), out, 1e-13)
    assert build("pre", norm="dyt", n_embd=64, n_head=2).embed_scale.item() == 8
    assert build("pre").embed_scale is None


@pytest.mark.parametrize("name", sorted({*M.RESIDUALS} - {"nag", "ngpt", "rezero"}))
@pytest.mark.parametrize("kind", [*M.NORMS])
def test_every_norm_of_a_residual_is_of_the_kind(name, kind):
    model = build(name, norm=kind)
    norms = [module for module in model.modules() if isinstance(module, M.Norm)]
    assert norms and {n.kind for n in norms} == {kind}
    width = 15 if kind == "crms" else 16
    assert model.wte.weight.shape == (64, width) and model.blocks[0].mlp.c_proj.weight.shape[0] == width


# ----------------------------------------------------------------------------- the negative control

def leak(model):
    """How much earlier logits change with the last token, relative to what its own do."""
    idx = ids()
    other = idx.clone()
    other[:, -1] = (other[:, -1] + 1) % 64
    change = (logits(model, idx) - logits(model, other)).abs().amax(-1)
    return (change[:, :-1].max() / change[:, -1].min()).item()


@pytest.mark.parametrize("name", ["pre", "post", "attnres", "review"])
def test_batch_statistics_are_not_causal(name):
    model = perturb(build(name, norm="batch"))
    assert leak(model.train()) > 1e-3
    assert leak(model.eval()) < 1e-12


def test_gradients_reach_earlier_tokens_through_batch_statistics():
    n, x = norm("batch"), some(2, 5, 16).requires_grad_()
    for training in (True, False):
        grad, = torch.autograd.grad(n.train(training)(x)[0, 1].sum(), x)
        assert grad[0, 1].all() and bool(grad[1].any()) == training and bool(grad[0, 2:].any()) == training


def test_running_statistics_of_batch_norm():
    model = perturb(build("pre", norm="batch"))
    seen = [n for n in model.modules() if isinstance(n, M.Norm)]
    assert all((n.square == 1).all() for n in seen)
    assert sum(key.endswith(".square") for key in model.state_dict()) == len(seen) == 7
    logits(model.eval())
    assert all((n.square == 1).all() for n in seen)                      # evaluation leaves them
    for _ in range(200):
        logits(model.train())
    same(logits(model), logits(model.eval()), 1e-6)                      # they converge to those of the batch
    # frozen, the norm is a linear map, and folds into the matrix that follows
    n, matrix = model.blocks[1].mlp_residual.n_in, model.blocks[1].mlp.c_fc.weight
    x = some(3, 16)
    with torch.no_grad():
        same(F.linear(n(x), matrix), F.linear(x, matrix * (n.gain / (n.square + kernels.EPS).sqrt())), 1e-13)
