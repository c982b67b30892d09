"""
Every residual of model.py: generic properties of all of them, then the algebra that each one promises.
Float64 throughout; where an identity is exact only without the epsilon inside the roots, `no_eps` takes that
out.
"""
import dataclasses
import io
import itertools
import math
import re
import zlib

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import kernels
import model as M
from model import GPT, GPTConfig, RESIDUALS

NAMES = list(RESIDUALS)
TINY = dict(n_layer=3, n_head=2, n_embd=16, block_size=16, vocab_size=64)

# Options of residuals, and flags that go with several. nag, ngpt and rezero have no norm to replace.
OPTIONS = [
    *(("attnres", flags) for flags in (
        dict(attnres_block=2), dict(attnres_block=4), dict(attnres_blocks=1), dict(attnres_weights="sigmoid"),
        dict(attnres_weights="static"), dict(attnres_key_norm=False), dict(attnres_window=2),
        dict(attnres_block=2, attnres_weights="sigmoid", attnres_key_norm=False),
        dict(attnres_block=2, attnres_weights="static"), dict(norm="layer"), dict(value_residual=True))),
    *(("hyper", flags) for flags in (dict(hyper_kind="hc"), dict(hyper_kind="mhc"), dict(hyper_n=1),
                                     dict(hyper_n=2, value_residual=True))),
    *(("review", flags) for flags in (
        dict(gate_rank="diag"), dict(gate_rank="3"), dict(gate_input="u"), dict(gate_input="none"),
        dict(gate_range=2.0), dict(gate_bias=-3.0), dict(norm="crms"), dict(x0=True))),
    ("convex", dict(gate_input="h", gate_bias=-3.0)), ("highway", dict(gate_rank="diag", gate_input="u")),
    *(("pre", dict(norm=kind)) for kind in M.NORMS if kind != "rms"), ("peri", dict(norm="bhyt")),
    ("post", dict(norm="single")), ("siamese", dict(norm="layer")), ("hyper", dict(norm="crms")),
    ("pre", dict(value_residual=True)), ("pre", dict(x0=True)), ("pre", dict(value_residual=True, x0=True)),
    ("nag", dict(value_residual=True)), ("ngpt", dict(value_residual=True))]
VARIANTS = [(name, {}) for name in NAMES] + OPTIONS


def over(variants):
    """A test of each: name and flags of a model."""
    label = lambda name, flags: "-".join([name, *(f"{key}={value}" for key, value in flags.items())])
    return pytest.mark.parametrize("name, flags", variants, ids=[label(*variant) for variant in variants])


every = over(VARIANTS)
additive = pytest.mark.parametrize("name", list(M.PRESETS))


# ----------------------------------------------------------------------------- helpers

def build(residual="pre", dtype=torch.float64, **flags):
    """A tiny GPT, made under `dtype` so that constants such as 1 / sqrt(3) have its precision, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return GPT(GPTConfig(residual=residual, **{**TINY, **flags}))
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def perturb(model, scale=0.2, only=lambda name, p: True):
    """Add noise that depends on a parameter's name and shape only, so that shared parameters stay shared."""
    for name, p in model.named_parameters():
        if only(name, p):
            rng = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            p.add_(scale * torch.randn(p.shape, generator=rng, dtype=torch.float64).to(p.dtype))
    return model


def ids(B=2, T=12, V=TINY["vocab_size"], seed=0):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


def logits(model, idx=None):
    with torch.no_grad():
        return model(ids() if idx is None else idx)[0]


def same(a, b, tol=1e-11):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def rms(x):
    return x.square().mean(-1, keepdim=True).sqrt()


def streams(model, idx=None):
    """The stream as one vector per token before sublayer 1, after sublayer 1, ..., after sublayer 2L."""
    with torch.no_grad():
        return [model.ends.as_tensor(before) for _, before, _ in model.walk(ids() if idx is None else idx)]


def only_matrices(name, p):
    return name.endswith((".weight", "wte.weight", "lm_head.weight"))


@pytest.fixture
def no_eps(monkeypatch):
    monkeypatch.setattr(kernels, "EPS", 0.0)
    monkeypatch.setattr(kernels, "TINY", 0.0)
    monkeypatch.setattr(M, "EPS", 0.0)


# ----------------------------------------------------------------------------- all residuals

@every
def test_causal(name, flags):
    """In training, too, but for the norm over the batch."""
    model, idx, t = perturb(build(name, **flags)), ids(), 5
    model.train(flags.get("norm") != "batch")
    other = idx.clone()
    other[:, t] = (other[:, t] + 1) % TINY["vocab_size"]
    change = (logits(model, idx) - logits(model, other)).abs().amax(-1)                  # (B, T)
    assert change[:, :t].max() < 1e-12
    assert change[:, t:].min() > 1e-9


@every
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_gradients_reach_every_parameter(name, flags, activation):
    model = perturb(build(name, activation=activation, **flags))
    model(ids(8, 16), ids(8, 16, seed=1))[1].backward()
    for key, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), key
        parts = p.grad.chunk(3) if "c_attn" in key else p.grad.chunk(2) if "c_fc" in key else [p.grad]
        assert all(part.abs().max() > 1e-12 for part in parts), key


def test_every_variant_is_a_function_of_its_own():
    """With the same shared weights no two of them give the same logits."""
    out = [logits(perturb(build(name, n_layer=4, **flags))) for name, flags in VARIANTS]
    for a, b in itertools.combinations(range(len(VARIANTS)), 2):
        assert (out[a] - out[b]).abs().max() > 1e-3, (VARIANTS[a], VARIANTS[b])


def test_template_starts_as_pre():
    """What a copy of it is measured against: equal at first, another function as soon as b moves."""
    assert torch.equal(logits(build("template")), logits(build("pre")))
    moved = perturb(build("template"), only=lambda name, p: name.endswith(".b"))
    assert (logits(moved) - logits(build("pre"))).abs().max() > 1e-6


SHAPES = [{}, dict(activation="swiglu"), dict(activation="relu2"), dict(tie=True),
          dict(activation="swiglu", mlp_ratio=2.7, n_layer=1, vocab_size=70, nag_directions=5,
               nag_head="linear")]


@pytest.mark.parametrize("name, flags, shape", [
    *((name, {}, shape) for name in NAMES for shape in SHAPES),
    *((name, flags, shape) for name, flags in OPTIONS for shape in (SHAPES[0], SHAPES[-1]))], ids=str)
def test_parameter_and_flop_counts(name, flags, shape):
    model = build(name, **flags, **shape)
    assert model.num_params() == sum(p.numel() for p in model.parameters())
    for T in (1, 7, 16):
        # others go uncounted on CPUs
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(ids(2, T, 64))
        assert counter.get_total_flops() == pytest.approx(2 * T * model.flops_per_token(T), rel=1e-9)
    assert model.flops_per_token() == model.flops_per_token(model.config.block_size)


# What a variant has besides the tables and the matrices of its blocks, in parameters and matmul FLOPs per
# token, by hand: C channels, L blocks, n = 2L sublayers, V tokens, F outputs of c_fc
EXTRA = {
    ("pre",): lambda C, L, n, V, F: ((n + 1) * C, 0),
    ("post",): lambda C, L, n, V, F: (n * C, 0),
    ("peri",): lambda C, L, n, V, F: ((2 * n + 1) * C, 0),
    ("reordered",): lambda C, L, n, V, F: ((n + 1) * C, 0),
    ("rezero",): lambda C, L, n, V, F: (n, 0),
    ("skipinit",): lambda C, L, n, V, F: ((n + 1) * C + n, 0),
    ("layerscale",): lambda C, L, n, V, F: ((2 * n + 1) * C, 0),
    ("deepnorm",): lambda C, L, n, V, F: (n * C, 0),
    ("keel",): lambda C, L, n, V, F: (2 * (n - 1) * C, 0),
    ("denseformer",): lambda C, L, n, V, F: ((n + 1) * C + L * (L + 3) // 2, 0),
    ("siamese",): lambda C, L, n, V, F: (3 * (n + 1) * C, 0),
    ("ngpt",): lambda C, L, n, V, F: (n * C + L * (2 * C + F) + V, 0),
    ("template",): lambda C, L, n, V, F: ((n + 1) * C + n, 0),
    # with n = 6 all reads share one pass, over the embedding
    ("attnres",): lambda C, L, n, V, F: ((n + 1) * C + 2 * n * C, 4 * C * n),
    # passes of two reads, over 1, 2, .. sources; the first has one reader, the last one
    ("attnres", ("attnres_block", 2)): lambda C, L, n, V, F: (
        (n + 1) * C + 2 * n * C, 4 * C * (1 + 2 * sum(range(2, L + 1)) + L + 1)),
    ("attnres", ("attnres_weights", "sigmoid")): lambda C, L, n, V, F: ((n + 1) * C + 2 * n * C, 0),
    ("attnres", ("attnres_weights", "static")): lambda C, L, n, V, F: ((n + 1) * C + n * (n + 1), 0),
    ("attnres", ("attnres_key_norm", False)): lambda C, L, n, V, F: ((n + 1) * C + n * C, 0),
    ("review",): lambda C, L, n, V, F: ((n + 1) * C + n * (2 * C * C + C), n * 4 * C * C),
    ("convex",): lambda C, L, n, V, F: ((n + 1) * C + n * (2 * C * C + C), n * 4 * C * C),
    ("highway",): lambda C, L, n, V, F: ((n + 1) * C + n * (C * C + C), n * 2 * C * C),
    ("review", ("gate_rank", "diag")): lambda C, L, n, V, F: ((n + 1) * C + n * 3 * C, 0),
    ("review", ("gate_rank", "3")): lambda C, L, n, V, F: ((n + 1) * C + n * (9 * C + C), n * 18 * C),
    ("review", ("gate_input", "u")): lambda C, L, n, V, F: ((n + 1) * C + n * (C * C + C), n * 2 * C * C),
    ("review", ("gate_input", "none")): lambda C, L, n, V, F: ((n + 1) * C, 0),
    # logits of 4 reads, 4 writes and 24 permutations from 4C numbers; the permutations' mean; read and mix
    ("hyper",): lambda C, L, n, V, F: ((n + 1) * C + n * (32 * 4 * C + 32 + 3),
                                       n * (2 * 32 * 4 * C + 2 * 24 * 16 + 2 * 4 * C + 2 * 16 * C)),
    ("hyper", ("hyper_kind", "mhc")): lambda C, L, n, V, F: ((n + 1) * C + n * (24 * 4 * C + 24 + 3),
                                                             n * (2 * 24 * 4 * C + 2 * 4 * C + 2 * 16 * C)),
    ("hyper", ("hyper_kind", "hc")): lambda C, L, n, V, F: ((n + 1) * C + n * (6 * C + 4 * 6 + 2),
                                                            n * (4 * 2 * 6 * C + 2 * 4 * C + 2 * 16 * C)),
    ("pre", ("value_residual", True)): lambda C, L, n, V, F: ((n + 1) * C + 2 * (L - 1), 0),
    ("pre", ("x0", True)): lambda C, L, n, V, F: ((n + 1) * C + 2 * L, 0),
    ("pre", ("norm", "layer")): lambda C, L, n, V, F: ((n + 1) * C, 0),
    ("pre", ("norm", "single")): lambda C, L, n, V, F: (n + 1, 0),
    ("pre", ("norm", "seednorm")): lambda C, L, n, V, F: ((n + 1) * 3 * C, 0),
    ("pre", ("norm", "dyt")): lambda C, L, n, V, F: ((n + 1) * (2 * C + 1) + 1, 0),
    ("pre", ("norm", "bhyt")): lambda C, L, n, V, F: ((n + 1) * (C + 1), 0),
    ("pre", ("norm", "none")): lambda C, L, n, V, F: (0, 0),
    ("pre", ("norm", "batch")): lambda C, L, n, V, F: ((n + 1) * C, 0)}


@pytest.mark.parametrize("key", EXTRA, ids=str)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_extra_parameters_and_flops_by_hand(key, activation):
    name, *flags = key
    model, C, L, T = build(name, activation=activation, **dict(flags)), 16, 3, 12
    hidden = model.blocks[0].mlp.c_proj.in_features
    fan_out = 2 * hidden if activation == "swiglu" else hidden
    parameters, flops = EXTRA[key](C, L, 2 * L, 64, fan_out)
    matrices = 64 * C + L * (4 * C * C + (fan_out + hidden) * C)         # the head's, but not the embedding
    assert model.num_params() == 64 * C + matrices + parameters
    assert model.flops_per_token(T) == 2 * matrices + L * 4 * T * C + flops


@every
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_a_training_step_is_three_forward_passes(name, flags, activation):
    """Exactly: the embedding is trained, so that even the first matrix has an input that wants a gradient."""
    model = build(name, activation=activation, **flags)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids(), ids(seed=1))[1].backward()
    expected = 3 * 24 * model.flops_per_token(12)
    for residual, _ in model.sublayers():   # a constant factor wants no gradient
        expected -= 24 * 2 * getattr(residual, "permutations", torch.zeros(0)).numel()
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-9)


@every
def test_save_and_load(name, flags):
    model, file = perturb(build(name, tie=name in ("post", "nag"), **flags)), io.BytesIO()
    logits(model)                                                # moves the statistics of a batch norm
    model.eval()
    torch.save({"model": model.state_dict(), "config": dataclasses.asdict(model.config)}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    saved["config"]["seed"] += 1
    fresh = build(**saved["config"]).eval()
    assert not torch.equal(logits(fresh), logits(model))
    fresh.load_state_dict(saved["model"])
    assert torch.equal(logits(fresh), logits(model))


@every
@pytest.mark.parametrize("depth", [1, 64])
def test_depths_1_and_64_run(name, flags, depth):
    model = build(name, torch.float32, n_layer=depth, n_embd=8, **flags)
    loss = model(ids(), ids(seed=1))[1]
    loss.backward()
    assert loss.isfinite() and 0 < loss < 10
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert model.wte.weight.grad.abs().max() > 0


# What init a variant has, beyond N(0, 0.02): factors on (c_proj, the values of c_attn, c_fc) for L blocks
INITS = {"scaled": lambda L: ((2 * L) ** -0.5, 1, 1), "plain": lambda L: (1, 1, 1),
         "deepnorm": lambda L: ((8 * L) ** -0.25,) * 3}
INIT_OF = dict(lns="plain", nag="plain", deepnorm="deepnorm", **{name: "scaled" for name in (
    "pre", "post", "peri", "reordered", "mixln", "keel", "rezero", "skipinit", "layerscale", "template")})


# ngpt's rows are normalised one by one, crms leaves a column out
@over([(name, flags) for name, flags in VARIANTS if name != "ngpt" and flags.get("norm") != "crms"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_same_seed_same_shared_weights(name, flags, activation):
    plain = dict(build("lns", activation=activation).named_parameters())
    mine = {k: p for k, p in build(name, activation=activation, **flags).named_parameters()
            if only_matrices(k, p)}
    assert mine.keys() == {k for k, p in plain.items() if only_matrices(k, p)}
    for key, p in mine.items():
        pieces = zip(p.chunk(3), plain[key].chunk(3)) if "c_attn" in key else [(p, plain[key])]
        for i, (a, b) in enumerate(pieces):
            factor = (a.flatten()[0] / b.flatten()[0]).item()
            same(a, factor * b)
            if name in INIT_OF:
                proj, value, fc = INITS[INIT_OF[name]](3)
                right = (proj if "c_proj" in key else fc if "c_fc" in key
                         else value if "c_attn" in key and i == 2 else 1)
                assert factor == pytest.approx(right, abs=1e-12), key
            if factor == 1:
                assert torch.equal(a, b), key
    assert plain["blocks.0.mlp.c_fc.weight"].std().item() == pytest.approx(0.02, rel=0.2)


@every
def test_construction_depends_on_the_config_alone(name, flags):
    torch.manual_seed(1)
    first = build(name, torch.float32, **flags)
    torch.manual_seed(2)
    torch.randn(7)
    second = build(name, torch.float32, **flags)
    third = build(name, torch.float32, seed=5, **flags)
    state = second.state_dict()
    assert all(torch.equal(p, state[key]) for key, p in first.state_dict().items())
    assert not torch.equal(third.wte.weight, first.wte.weight)
    # no two random matrices of one model are equal either
    matrices = [(k, p) for k, p in first.named_parameters() if p.dim() == 2 and not k.endswith(".static")]
    for (a, p), (b, q) in itertools.combinations(matrices, 2):
        n = min(p.shape[0], q.shape[0])
        assert p.shape[1] != q.shape[1] or not torch.allclose(p[:n], q[:n]) or not p.any(), (a, b)


@every
def test_cached_decoding_equals_the_full_forward(name, flags):
    model, idx = perturb(build(name, **flags)).eval(), ids(2, 16)
    cache, out = M.KVCache(model, 2), []
    with torch.no_grad():
        for piece in idx.split([5, 1, 4, 1, 1, 4], dim=1):
            out.append(model(piece, cache=cache)[0])
    same(torch.cat(out, dim=1), logits(model, idx))
    keys = M.KVCache(build(), 2).layers[0].keys                  # nothing else is kept per past token
    assert all(layer.keys.shape == keys.shape and not layer.waiting for layer in cache.layers)


@every
def test_gradients_do_not_depend_on_who_derived_them(name, flags, no_eps, monkeypatch):
    """Autograd through the references, as torch.compile has it, against the backward passes derived by
    hand."""
    model = perturb(build(name, **flags))

    def gradients():
        model.zero_grad()
        model(ids(), ids(seed=1))[1].backward()
        return [p.grad.clone() for p in model.parameters()]

    mine = gradients()
    for switch in ("by_hand", "saves_little"):
        monkeypatch.setattr(kernels, switch, lambda x: False)
    for a, b in zip(mine, gradients(), strict=True):
        assert (a - b).norm() <= 1e-10 * b.norm() + 1e-15


def tensors(stream):
    """All tensors of a stream, whatever it is made of, that depend on anything."""
    if isinstance(stream, torch.Tensor):
        return (stream,) if stream.requires_grad else ()
    return tuple(t for part in stream for t in tensors(part)) if isinstance(stream, (tuple, list)) else ()


@over([(name, flags) for name, flags in VARIANTS if not {"value_residual", "x0"} & flags.keys()])
def test_gradcheck_of_read_and_write(name, flags):
    for l in (1, 2, 3):
        small = dict(n_embd=6, n_head=1, n_layer=2, nag_directions=3, hyper_n=2)
        model = perturb(build(name, **{**small, **flags}))
        residual = next(r for i, (r, _) in enumerate(model.sublayers(), 1) if i == l)
        keys, values = zip(*residual.named_parameters()) if list(residual.parameters()) else ((), ())
        rng = torch.Generator().manual_seed(l)
        shape = 2, 2, model.config.width
        x, f = (torch.randn(shape, generator=rng, dtype=torch.float64, requires_grad=True) for _ in range(2))

        class Through(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.ends = residual, model.ends

            def forward(self, x, f):
                stream = self.ends.start(x)
                after = self.inner.write(stream, f)
                return self.inner.read(stream), *tensors(after)

        through = Through()

        def function(x, f, *parameters):
            named = {"inner." + k: p for k, p in zip(keys, parameters)}
            return torch.func.functional_call(through, named, (x, f))

        assert torch.autograd.gradcheck(function, (x, f, *(p.detach().requires_grad_() for p in values)))


# ----------------------------------------------------------------------------- config

# flag: (the other flags it needs to matter, another value)
FLIPS = dict(residual=({}, "post"), n_layer=({}, 4), n_head=({}, 4), n_embd=({}, 32), block_size=({}, 17),
             vocab_size=({}, 65), activation=({}, "relu2"), mlp_ratio=({}, 3.0), tie=({}, True), seed=({}, 2),
             mixln_alpha=(dict(residual="mixln"), 0.7), layerscale_init=(dict(residual="layerscale"), 0.2),
             nag_directions=(dict(residual="nag"), 8), nag_power=(dict(residual="nag"), 0.6),
             nag_head=(dict(residual="nag"), "linear"), nag_temp=(dict(residual="nag"), 0.4),
             norm=({}, "layer"), value_residual=({}, True), x0=({}, True),
             gate_input=(dict(residual="review"), "h"), gate_bias=(dict(residual="review"), 1.0),
             gate_range=(dict(residual="review"), 2.0), gate_rank=(dict(residual="review"), "3"),
             attnres_block=(dict(residual="attnres"), 2), attnres_blocks=(dict(residual="attnres"), 2),
             attnres_weights=(dict(residual="attnres"), "static"),
             attnres_key_norm=(dict(residual="attnres"), False), attnres_window=(dict(residual="attnres"), 2),
             hyper_kind=(dict(residual="hyper"), "hc"), hyper_n=(dict(residual="hyper"), 2),
             taper=({}, "linear"), taper_start=(dict(taper="linear"), 2.0),
             taper_end=(dict(taper="linear"), 0.7), taper_on=(dict(taper="linear"), "both"),
             taper_match=(dict(taper="linear", taper_end=1.0), "none"), share_every=({}, 2),
             share_rank=(dict(share_every=1), 2), repeat=({}, "2:2"), deep_supervision=({}, True),
             transfer=({}, "completep"), base_depth=(dict(transfer="completep"), 2))


def test_no_flag_is_dead():
    # these are shown to matter there, --kernels is shown not to in test_kernels
    from test_mod import MOD_FLAGS
    assert FLIPS.keys() | MOD_FLAGS | {"kernels"} == {f.name for f in dataclasses.fields(GPTConfig)}

    def visible(**flags):
        model = build(**flags)
        try:
            longest = model(ids(1, 17))[0].shape
        except ValueError as e:
            longest = str(e)
        loss = model.train()(ids(), ids(seed=1))[1].item()
        shapes = {k: p.shape for k, p in model.named_parameters()}
        return longest, shapes, logits(model).numpy().tobytes(), loss

    for name, (needs, value) in FLIPS.items():
        assert visible(**needs) == visible(**needs)
        assert visible(**needs) != visible(**{**needs, name: value}), name


def test_residual_flags_leave_the_other_residuals_alone():
    for name, (needs, value) in FLIPS.items():
        if "residual" in needs:
            assert torch.equal(logits(build("peri")), logits(build("peri", **{name: value}))), name


BAD = dict(residual="prenorm", n_layer=0, n_head=3, n_embd=0, block_size=0, vocab_size=-1, mixln_alpha=1.5,
           nag_temp=0.0, nag_directions=0, mlp_ratio=-1.0, activation="tanh", nag_head="cosine",
           norm="batchnorm", gate_input="uh", gate_range=0.0, gate_rank="low", attnres_block=0,
           attnres_blocks=-1, attnres_window=-2, attnres_weights="linear", hyper_kind="mhc-lite", hyper_n=0,
           gate_bias=math.inf)


def test_all_problems_are_reported_at_once():
    with pytest.raises(ValueError) as e:
        GPT(GPTConfig(**{**BAD, "n_embd": 15}))
    for name in BAD:
        assert f"--{name} " in str(e.value), name
    assert "Traceback" not in str(e.value) and len(str(e.value).splitlines()) >= len(BAD) - 1


@pytest.mark.parametrize("name", BAD)
def test_each_problem_by_itself(name):
    with pytest.raises(ValueError) as e:
        GPT(GPTConfig(**{**TINY, name: BAD[name]}))
    assert f"--{name} {BAD[name]}" in str(e.value)


@pytest.mark.parametrize("bad", [dict(n_embd=18, n_head=6), dict(n_embd=15, n_head=1),
                                 dict(n_embd=16, n_head=16), dict(mixln_alpha=math.nan), dict(mlp_ratio=0.01),
                                 dict(nag_temp=-1.0), dict(nag_temp=math.nan), dict(mlp_ratio=math.nan),
                                 dict(hyper_n=6), dict(attnres_block=2, attnres_blocks=2),
                                 dict(x0=True, residual="siamese"), dict(attnres_window=2, attnres_block=2),
                                 dict(norm="layer", residual="nag"), dict(layer_drop=0.1, residual="hyper"),
                                 dict(norm="dyt", residual="ngpt"),
                                 dict(value_residual=True, layer_drop=0.2),
                                 dict(value_residual=True, taper="linear", taper_on="both")], ids=str)
def test_more_bad_configs(bad):
    with pytest.raises(ValueError) as e:
        GPT(GPTConfig(**{**TINY, **bad}))
    assert all(f"--{name} {value}" in str(e.value) for name, value in bad.items())


def test_heads_that_are_suggested_fit():
    for C in range(1, 65):
        for h in range(1, 20):
            problems = GPTConfig(n_embd=C, n_head=h).problems()
            if problems and "try --n_head " in problems[0]:
                remedy = problems[0].split("try --n_head ")[1]
                for suggestion in re.findall(r"\d+", remedy):
                    config = GPTConfig(n_embd=C, n_head=int(suggestion))
                    assert "even --n_embd" in remedy or not config.problems()
            assert bool(problems) == (C % (2 * h) != 0)


@pytest.mark.parametrize("n_embd", [64, 128, 192, 768])
def test_swiglu_has_the_parameters_of_gelu(n_embd):
    count = [c.num_params()
             for c in (build(n_embd=n_embd, n_layer=1, activation=a) for a in ("gelu", "swiglu"))]
    mlp = 8 * n_embd ** 2
    assert abs(count[1] - count[0]) < 0.005 * mlp


# ----------------------------------------------------------------------------- torch.compile

# Graphs for 6 blocks. mixln: post blocks and pre blocks. keel: the first block is of its own kind. lns: the
# first block has s = 1, and so no s. attnres, denseformer: attention and MLP, since their streams grow.
# hyper, siamese: the streams of the first block are one tensor.
GRAPHS = dict(mixln=2, keel=2, attnres=2, denseformer=2, hyper=2, siamese=2)


def compiled(name, backend, **flags):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, idx = perturb(build(name, n_layer=6, **flags), only=only_matrices), ids()
    plain, loss = model(idx, idx)
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.compile_blocks(fullgraph=True, backend=backend)
    for _ in range(2):
        model.zero_grad()
        out, loss = model(idx, idx)
        loss.backward()
    same(out, plain, 1e-9)
    for p, g in zip(model.parameters(), gradients):
        assert (p.grad - g).norm() <= 1e-6 * g.norm() + 1e-15
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@over([(name, flags) for name, flags in VARIANTS if "hyper_n" not in flags])
def test_blocks_share_their_compiled_graph(name, flags):
    assert compiled(name, "eager", **flags) == GRAPHS.get(name, 1) + flags.get("value_residual", False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pre", "nag"])
def test_blocks_share_their_compiled_graph_with_inductor(name):
    assert compiled(name, "inductor") == 1


# ----------------------------------------------------------------------------- the additive family

def table(name, N, block, kind, alpha=0.25):
    """n_in, n_post, n_out, a, s, final norm of x <- N_out(a x + b N_post(F(s N_in(x)))), from the papers."""
    pre, post = (1, 0, 0, 1, 1, 1), (0, 0, 1, 1, 1, 0)
    if name in ("pre", "skipinit", "layerscale"):
        return pre
    if name == "post":
        return post
    if name == "mixln":
        return (post if block <= math.floor(alpha * N) else pre)[:5] + (1,)
    if name == "keel" and block == 1:
        return pre[:5] + (0,) if kind == "attn" else post
    return dict(peri=(1, 1, 0, 1, 1, 1), reordered=(0, 1, 0, 1, 1, 1), lns=(1, 0, 0, 1, block ** -0.5, 1),
                deepnorm=(0, 0, 1, (2 * N) ** 0.25, 1, 0), keel=(1, 0, 1, 2 * N, 1, 0),
                rezero=(0, 0, 0, 1, 1, 0))[name]


def gained_norm(x, gain):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + kernels.EPS) * gain


@torch.no_grad()
def reference(model, name, idx):
    """The additive family written down once more, from the table above. -> streams, logits"""
    N, x = model.config.n_layer, model.wte(idx)
    rope, seen = model.rope(0, idx.shape[1]), [model.wte(idx)]
    for block in range(1, N + 1):
        b = model.blocks[block - 1]
        for kind, sublayer, r in (("attn", b.attn, b.attn_residual), ("mlp", b.mlp, b.mlp_residual)):
            n_in, n_post, n_out, a, s, final = table(name, N, block, kind)
            h = s * gained_norm(x, r.n_in.gain) if n_in else x
            u = sublayer(h, rope)
            u = gained_norm(u, r.n_post.gain) if n_post else u
            x = a * x + (u if r.b is None else r.b * u)
            x = gained_norm(x, r.n_out.gain) if n_out else x
            norms = (r.n_in, r.n_post, r.n_out)
            assert [bool(g is not None) for g in norms] == [bool(n) for n in (n_in, n_post, n_out)]
            seen.append(x)
    h = gained_norm(x, model.ends.n_in.gain) if final else x
    return seen, h @ model.lm_head.weight.T


@additive
@pytest.mark.parametrize("n_layer", [1, 5])
def test_additive_family_is_its_table(name, n_layer):
    model = perturb(build(name, n_layer=n_layer))
    seen, out = reference(model, name, ids())
    for mine, right in zip(streams(model), seen, strict=True):
        same(mine, right)
    same(logits(model), out)
    for r in model.residuals():                          # b where the paper has one, and nowhere else
        shape = {"rezero": (), "skipinit": (), "layerscale": (16,)}.get(name) if r is not model.ends else None
        assert shape == (None if r.b is None else tuple(r.b.shape))


def take_over(model, other, strict=True):
    """model with the parameters of other."""
    left = model.load_state_dict(other.state_dict(), strict=strict)
    assert not left.unexpected_keys
    return model


def test_lns_with_s_1_is_pre():
    pre = perturb(build("pre", n_layer=5))
    lns = take_over(build("lns", n_layer=5), pre)
    assert (logits(lns) - logits(pre)).abs().max() > 1e-3
    changed = 0
    for r in lns.residuals():
        if r.s is not None:
            r.s.fill_(1.0)
            changed += 1
    assert changed == 10                                 # both sublayers of all 5 blocks
    same(logits(lns), logits(pre))


def test_lns_is_pre_with_gains_1_over_sqrt_block():
    pre = perturb(build("pre", n_layer=5))
    lns = take_over(build("lns", n_layer=5), pre)
    with torch.no_grad():
        for l, (r, _) in enumerate(pre.sublayers(), start=1):
            r.n_in.gain.mul_(((l + 1) // 2) ** -0.5)
    same(logits(lns), logits(pre))


def test_lns_leaves_attention_weights_alone(no_eps, monkeypatch):
    """Queries and keys are normalised: s_l reaches the values only."""
    lns, seen = perturb(build("lns", n_layer=5)), []
    original = F.scaled_dot_product_attention
    monkeypatch.setattr(M.F, "scaled_dot_product_attention", lambda q, k, v, *rest, **options: (
        seen.append((q, k, v)), original(q, k, v, *rest, **options))[1])
    logits(lns)
    lns.blocks[3].attn_residual.s.mul_(0.37)
    logits(lns)
    assert len(seen) == 10
    for (q, k, v), (q2, k2, v2) in zip(seen[:4], seen[5:9]):
        same(q2, q)
        same(k2, k)
    same(v2, 0.37 * v)
    assert (seen[4][0] - seen[9][0]).abs().max() > 1e-3  # the next block's stream is another one


def test_mixln_alpha_0_is_pre():
    mix = perturb(build("mixln", mixln_alpha=0.0, n_layer=4))
    same(logits(mix), logits(perturb(build("pre", n_layer=4))))


def test_mixln_alpha_1_is_post():
    mix, post = (perturb(build(name, mixln_alpha=1.0, n_layer=4)) for name in ("mixln", "post"))
    same(logits(mix), logits(post))
    assert mix.num_params() == post.num_params()


@pytest.mark.parametrize("alpha, n_layer, count", [
    (0.25, 12, 3), (0.25, 6, 1), (0.25, 3, 0), (0.06, 32, 1), (0.5, 3, 1)])
def test_mixln_share_of_post_blocks(alpha, n_layer, count):
    kinds = [[r.n_out is not None and r.n_in is None for r in (b.attn_residual, b.mlp_residual)]
             for b in build("mixln", n_layer=n_layer, mixln_alpha=alpha).blocks]
    assert kinds == [[True] * 2] * count + [[False] * 2] * (n_layer - count)


def test_deepnorm_with_a_1_and_standard_init_is_post():
    post = perturb(build("post"))
    deep = take_over(build("deepnorm"), post)
    assert (logits(deep) - logits(post)).abs().max() > 1e-3
    for r, _ in deep.sublayers():
        r.a.fill_(1.0)
    same(logits(deep), logits(post))


def test_deepnorm_constants_at_12_blocks():
    deep, plain = build("deepnorm", n_layer=12), build("lns", n_layer=12)
    for (r, mine), (_, his) in zip(deep.sublayers(), plain.sublayers(), strict=True):
        assert r.a.item() == pytest.approx(2.213, abs=1e-3)
        assert r.a.item() == pytest.approx(24 ** 0.25, rel=1e-12)
        ratio = lambda a, b: (a / b).detach().mean().item()
        assert ratio(mine.c_proj.weight, his.c_proj.weight) == pytest.approx(0.3195, abs=1e-4)
        assert ratio(mine.value_weight(), his.value_weight()) == pytest.approx(96 ** -0.25, rel=1e-9)
    # q and k
    assert torch.equal(deep.blocks[3].attn.c_attn.weight[:32], plain.blocks[3].attn.c_attn.weight[:32])


def test_peri_triangle_bound(no_eps):
    """With unit gains a sublayer adds a vector of norm sqrt(C), however large its weights are."""
    model = perturb(build("peri", n_layer=6), scale=3.0, only=only_matrices)
    seen = streams(model)
    for k, x in enumerate(seen):
        assert (x.norm(dim=-1) <= seen[0].norm(dim=-1) + k * 4 + 1e-9).all()
    for x, y in itertools.pairwise(seen):
        same(rms(y - x), torch.ones(2, 12, 1, dtype=torch.float64))


def test_post_norm_has_rms_1_after_every_sublayer(no_eps):
    one = torch.ones(2, 12, 1, dtype=torch.float64)
    for name, flags, last in ("post", {}, 8), ("deepnorm", {}, 8), ("mixln", dict(mixln_alpha=0.5), 4):
        seen = streams(perturb(build(name, n_layer=4, **flags), only=only_matrices))
        for x in seen[1:last + 1]:
            same(rms(x), one, 1e-12)
        assert (rms(seen[0]) - one).abs().max() > 0.1
        assert last == 8 or (rms(seen[last + 1]) - one).abs().max() > 0.01


@pytest.mark.parametrize("name", ["rezero", "skipinit"])
def test_b_0_is_the_identity_that_can_be_left(name):
    model = build(name)
    assert all(r.b.shape == () and r.b == 0 for r, _ in model.sublayers())
    for x in streams(model):
        assert torch.equal(x, model.wte(ids()))
    assert torch.equal(logits(model), model.head(model.ends.finish(model.wte(ids()))))
    model(ids(), ids(seed=1))[1].backward()
    for r, sublayer in model.sublayers():
        assert r.b.grad.abs() > 1e-10
        assert all(p.grad.abs().max() == 0 for p in sublayer.parameters())
    assert not any(".n_" in key for key, _ in model.named_parameters()) or name == "skipinit"


def test_layerscale_1_is_pre():
    pre = perturb(build("pre"))
    scale = take_over(build("layerscale"), pre, strict=False)
    assert (logits(scale) - logits(pre)).abs().max() > 1e-3
    with torch.no_grad():
        for r, _ in scale.sublayers():
            assert r.b.shape == (16,) and (r.b == 0.1).all()
            r.b.fill_(1.0)
    same(logits(scale), logits(pre))


def test_layerscale_is_linear_near_0():
    def change(eps):
        seen = streams(perturb(build("layerscale", layerscale_init=eps), only=only_matrices))
        return seen[-1] - seen[0]
    ratio = change(1e-5).norm() / change(1e-6).norm()
    assert ratio == pytest.approx(10, abs=2e-3)
    same(change(1e-8) * 1e8, change(1e-7) * 1e7, 1e-4)


def test_keel_limit_of_a_large_a(no_eps):
    model = perturb(build("keel", n_layer=4), 0.1)
    for l, (r, _) in enumerate(model.sublayers(), start=1):
        assert (r.a is None) == (l <= 2) and (l <= 2 or r.a == 8.0)
        if l > 2:
            r.a.fill_(1e9)
    seen = streams(model)
    for l, (r, _) in enumerate(model.sublayers(), start=1):
        limit = gained_norm(seen[l - 1], r.n_out.gain if l > 2 else 1.0)
        difference = (seen[l] - limit).abs().max()
        assert difference < 1e-8 if l > 2 else difference > 1e-3


def test_keel_relative_update_is_bounded(no_eps):
    """|R(a x + u) - x| / |x| <= 2 |u| / (a |x|) for a normalised x and unit gains."""
    model = build("keel", n_layer=4)
    r, rng = model.blocks[2].mlp_residual, torch.Generator().manual_seed(0)
    x, u = (torch.randn(50, 16, generator=rng, dtype=torch.float64) for _ in range(2))
    x, u = x / rms(x), u * torch.logspace(-3, 2, 50, dtype=torch.float64)[:, None]
    moved = (r.write(x, u) - x).norm(dim=-1) / x.norm(dim=-1)
    bound = 2 * u.norm(dim=-1) / (8 * x.norm(dim=-1))
    assert (moved <= bound).all() and (moved[:20] > bound[:20] / 8).all()


def test_keel_first_block():
    first, second = build("keel").blocks[:2]
    assert [first.attn_residual.n_in is not None, first.attn_residual.n_out is not None] == [True, False]
    assert [first.mlp_residual.n_in is not None, first.mlp_residual.n_out is not None] == [False, True]
    for r in (second.attn_residual, second.mlp_residual):
        assert r.n_in is not None and r.n_out is not None and r.n_post is None and r.a == 2 * 3


@pytest.mark.parametrize("name, n_layer, b, growth", [
    ("pre", 12, None, 25), ("pre", 48, None, 97), ("skipinit", 12, 24 ** -0.5, 2.0),
    ("skipinit", 48, 96 ** -0.5, 2.0), ("skipinit", 12, 1 / 24, 1.04), ("skipinit", 48, 1 / 96, 1.01),
    ("lns", 12, None, 7.2), ("lns", 48, None, 9.9), ("peri", 12, None, 25), ("post", 12, None, 1)])
def test_norm_growth_with_unit_variance_branches(name, n_layer, b, growth):
    """The mean square of a stream that starts at 1, with random orthogonal maps as sublayers."""
    C, rng = 128, torch.Generator().manual_seed(0)

    def orthogonal():
        q, r = torch.linalg.qr(torch.randn(C, C, generator=rng, dtype=torch.float64))
        return q * r.diagonal().sign()                   # without the signs it isn't uniform: it leans to -1

    model = build(name, n_layer=n_layer, n_embd=C, vocab_size=1)
    x = torch.randn(256, C, generator=rng, dtype=torch.float64)
    with torch.no_grad():
        for r, _ in model.sublayers():
            if b is not None:
                r.b.fill_(b)
            h = r.read(x) * (7.0 if name == "peri" else 1.0)  # whose norm after the sublayer undoes any scale
            x = r.write(x, h @ orthogonal())
    assert x.square().mean().item() == pytest.approx(growth, rel=0.04)


# ----------------------------------------------------------------------------- NAG

def direction(*shape, seed=0):
    """Random directions: mean zero, norm sqrt(C)."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = x - x.mean(-1, keepdim=True)
    return x / rms(x)


def nag(l=3, scale=0.5, **flags):
    """The residual of sublayer l, perturbed."""
    model = perturb(build("nag", n_layer=(l + 1) // 2, **flags), scale)
    return list(model.sublayers())[l - 1][0]


def m_of(residual, r):
    return residual.modulator(r)


def test_nag_write_is_a_rotation(no_eps):
    """Orthogonal update, norm kept exactly, cosine and gain as the paper has them, m as eq. 13 has it."""
    for seed in range(5):
        residual = nag(seed + 1)
        r, f = direction(4, 7, 16, seed=seed), 3 * direction(4, 7, 16, seed=seed + 50) + 0.7
        s = torch.linspace(-2, 3, 28, dtype=torch.float64).view(4, 7, 1)
        with torch.no_grad():
            turned, s2 = residual.write((r, s), f)
            m = (residual.p.softmax(0) * torch.sigmoid(r @ residual.w.T + residual.b)).sum(-1, keepdim=True)
            a = residual.alpha * m ** F.softplus(residual.beta)
        same(residual.gain((r, None)).detach(), a)
        grown = turned * (1 + a * a).sqrt()              # r + a u
        u = (grown - r) / a
        assert (u * r).mean(-1).abs().max() < 1e-12
        same(rms(u), torch.ones_like(s))
        same(turned.norm(dim=-1), torch.full((4, 7), 4.0, dtype=torch.float64), 1e-12)
        same((turned * r).mean(-1, keepdim=True), 1 / (1 + a * a).sqrt())
        same((s2 - s).exp(), (1 + a * a).sqrt())
        assert turned.mean(-1).abs().max() < 1e-12       # f had a mean; the direction gets none
        # u is what remains of the centred f: r and u span it
        centred = f - f.mean(-1, keepdim=True)
        same((centred * r).mean(-1, keepdim=True) * r + (centred * u).mean(-1, keepdim=True) * u, centred)
        assert ((centred * u).mean(-1) > 0).all()


def test_nag_lanes_are_the_additive_form(no_eps):
    """R <- R + rho alpha m u over 40 sublayers, with rho = rms(R): (r, s) is (R / rho, log rho)."""
    model, idx = perturb(build("nag", n_layer=20)), ids()
    rope, root = model.rope(0, 12), 4.0
    with torch.no_grad():
        R = model.wte(idx)
        R = (R - R.mean(-1, keepdim=True)) * model.ends.g.exp()
        walk = list(model.walk(idx))
        for (residual, sublayer), (_, _, (r, s)) in zip(model.sublayers(), walk):
            rho = rms(R)
            f = sublayer(R / rho, rope)
            f = f - f.mean(-1, keepdim=True)
            f = f - (f * R).sum(-1, keepdim=True) / (R * R).sum(-1, keepdim=True) * R
            u = root * f / f.norm(dim=-1, keepdim=True)
            gates = torch.sigmoid((R / rho) @ residual.w.T + residual.b)
            m = (residual.p.softmax(0) * gates).sum(-1, keepdim=True)
            R = R + rho * residual.alpha * m ** F.softplus(residual.beta) * u
            same(rms(R).log(), s, 1e-10)
            same(R / rms(R), r, 1e-10)
        E = model.lm_head.weight - model.lm_head.weight.mean(-1, keepdim=True)
        cosine = F.normalize(R, dim=-1) @ F.normalize(E, dim=-1).T
        same(logits(model), rms(R) * cosine, 1e-9)
    assert len(walk) == 41


def test_nag_directions_do_not_see_the_scale_of_the_embedding(no_eps):
    model, c = perturb(build("nag", n_layer=6)), 7.5
    with torch.no_grad():
        before = [after for _, after, _ in model.walk(ids())]
        model.wte.weight.mul_(c)
        after = [after for _, after, _ in model.walk(ids())]
    for (r, s), (r2, s2) in zip(before, after, strict=True):
        same(r2, r)
        same(s2, s + math.log(c))


def test_nag_stays_centred_and_of_norm_sqrt_c(no_eps):
    for model in build("nag", n_layer=20), perturb(build("nag", n_layer=20), 0.5):
        for _, (r, _), _ in model.walk(ids()):
            assert r.mean(-1).abs().max() < 1e-12
            same(rms(r), torch.ones(2, 12, 1, dtype=torch.float64))


@pytest.mark.parametrize("T", [128, 1024])
def test_nag_norm_at_the_default_size(T):
    """The epsilon costs norm where an update is tiny, such as the mean of many random values at
    initialisation."""
    model = GPT(GPTConfig(residual="nag", n_layer=4, block_size=T))
    with torch.no_grad():
        for _, (r, _), _ in model.walk(ids(1, T, 320)):
            assert r.mean(-1).abs().max() < 1e-5
            assert (rms(r) - 1).abs().max() < 5e-3


@pytest.mark.parametrize("power", [0.25, 0.5, 1.0])
def test_nag_initial_values(power):
    model = build("nag", nag_power=power, nag_directions=7)
    for l, (r, _) in enumerate(model.sublayers(), start=1):
        assert r.alpha.shape == () and r.alpha.item() == pytest.approx(l ** -power, rel=1e-12)
        assert F.softplus(r.beta).item() == pytest.approx(1, rel=1e-12)
        assert r.w.shape == (7, 16) and r.b.shape == (7,) and r.p.shape == (7,)
        assert not r.b.any() and not r.p.any()
        assert r.w.std().item() == pytest.approx(16 ** -0.5, rel=0.3)
    assert len({r.w[0, 0].item() for r, _ in model.sublayers()}) == 6


@pytest.mark.parametrize("p, gain", [(0.25, 34), (0.5, 5.0), (0.75, 2.5), (1.0, 1.9)])
def test_nag_total_growth(p, gain):
    """The table of the specs for m = 1 at 24 sublayers; 2L + 1 telescopes at p = 1/2."""
    model = build("nag", n_layer=12, nag_power=p)
    with torch.no_grad():
        stream = direction(1, 2, 16), torch.zeros(1, 2, 1, dtype=torch.float64)
        for r, _ in model.sublayers():
            r.b.fill_(1e3)                               # every sigmoid is 1
            stream = r.write(stream, direction(1, 2, 16, seed=1))
    assert stream[1].exp().max().item() == pytest.approx(gain, rel=0.03)
    assert p != 0.5 or stream[1].exp().max().item() == pytest.approx(5, rel=1e-9)


def test_nag_m_is_between_0_and_1():
    for seed in range(5):
        residual = nag(seed + 1, scale=1.0)
        m = m_of(residual, direction(20, 16, seed=seed))
        assert (m > 0).all() and (m < 1).all() and m.std() > 0.01


@pytest.mark.parametrize("beta", [-3.0, 0.54, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nag_closed_gate_has_finite_gradients(beta, dtype):
    residual = build("nag", dtype).blocks[1].mlp_residual
    with torch.no_grad():
        residual.b.fill_(-1e4)                           # every sigmoid is exactly 0
        residual.beta.fill_(beta)
    r, f = (direction(3, 16, seed=i).to(dtype).requires_grad_() for i in range(2))
    turned, s = residual.write((r, torch.zeros(3, 1, dtype=dtype)), f)
    (turned.sin().sum() + s.sum()).backward()
    assert turned.isfinite().all() and s.isfinite().all()
    for key, p in [*residual.named_parameters(), ("r", r), ("f", f)]:
        assert p.grad.isfinite().all(), key
    right = 1e-6 ** math.log1p(math.exp(beta))
    assert m_of(residual, r.detach()).max().item() == pytest.approx(right, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nag_update_of_0(dtype):
    """f = 0, and f parallel to r or to the ones, have no orthogonal part: R = r exp(s) stays, gradients are
    finite."""
    residual = nag().to(dtype)
    r = direction(3, 16).to(dtype)
    s = torch.tensor([[0.5], [-1.0], [2.0]], dtype=dtype)
    for f in torch.zeros(3, 16, dtype=dtype), 2 * r, torch.full((3, 16), 4.0, dtype=dtype):
        x, f = r.clone().requires_grad_(), f.clone().requires_grad_()
        turned, s2 = residual.write((x, s), f)
        same(turned * s2.exp(), r * s.exp(), 1e-10 if dtype is torch.float64 else 1e-2)
        residual.zero_grad()
        (turned.sin().sum() + s2.sum()).backward()
        for key, p in [*residual.named_parameters(), ("r", x), ("f", f)]:
            assert p.grad.isfinite().all() and p.grad.abs().max() < 1e5, key


def test_nag_does_not_see_the_scale_of_f():
    residual, r = nag(), direction(4, 16)
    s, f = torch.zeros(4, 1, dtype=torch.float64), direction(4, 16, seed=1) + 0.3
    a, b, minus = (residual.write((r, s), f * c)[0] for c in (1e3, 1e5, -1e3))
    same(a, b, 1e-9)
    assert (a - minus).abs().max() > 0.1
    same(residual.write((r, s), f)[0], b, 1e-5)


@pytest.mark.parametrize("flags", [{}, dict(nag_directions=5, n_layer=4, n_embd=8), dict(tie=True)], ids=str)
def test_nag_parameter_count(flags):
    model = build("nag", **flags)
    L, C, n = model.config.n_layer, model.config.n_embd, model.config.nag_directions
    plain = sum(p.numel() for key, p in build("pre", **flags).named_parameters() if ".n_" not in key)
    assert model.num_params() == plain + 2 * L * (C * n + 2 * n + 2) + 1


@pytest.mark.parametrize("head", ["cos", "linear"])
@pytest.mark.parametrize("depth", [2, 12, 48])
def test_nag_initial_logits(head, depth):
    out = logits(build("nag", n_layer=depth, nag_head=head, n_embd=64, vocab_size=320), ids(2, 16, 320))
    assert 0.3 < out.std(-1).mean() < 1 and out.std(-1).mean() == pytest.approx(0.5, rel=0.2)


@pytest.mark.parametrize("head", ["cos", "linear"])
def test_nag_temperature_sets_the_initial_logits(head):
    small, large = (logits(build("nag", nag_head=head, nag_temp=t)) for t in (0.5, 1.5))
    same(3 * small, large, 1e-10)


def test_nag_cos_logits_are_bounded():
    model = perturb(build("nag", n_layer=4), 1.0)
    with torch.no_grad():
        *_, (_, (r, s), out) = model.walk(ids())
        assert (out.abs() <= s.exp() * (1 + 1e-9)).all()
        # and the bound is reached by a row along r
        model.lm_head.weight[5] = 3 * r[1, 7] + 0.2
        out = logits(model)
    assert out[1, 7, 5].item() == pytest.approx(s[1, 7].exp().item(), rel=1e-5)


def test_nag_logits_do_not_see_the_scale_and_mean_of_head_rows(no_eps):
    model = perturb(build("nag"))
    out = logits(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(torch.linspace(0.5, 3, 64, dtype=torch.float64)[:, None]).add_(0.3)
    same(out, logits(model))


def test_nag_stream_in_bf16_keeps_its_norm():
    """192 sublayers, the direction rounded to bf16 after each."""
    model = build("nag", torch.float32, n_layer=96, n_embd=64)
    stream = direction(2, 8, 64).bfloat16(), torch.zeros(2, 8, 1)
    with torch.no_grad():
        for l, (residual, _) in enumerate(model.sublayers(), start=1):
            stream = residual.write(stream, direction(2, 8, 64, seed=l).bfloat16())
            assert stream[0].dtype == torch.bfloat16 and stream[1].dtype == torch.float32
            assert (rms(stream[0].double()) - 1).abs().max() < 5e-3
        assert stream[1].max() > 0.5
        # the norm is measured, not predicted: an error of the past is gone
        off = residual.write((stream[0] * 1.1, stream[1]), stream[0].roll(3, -1))[0]
        assert (rms(off.double()) - 1).abs().max() < 5e-3


@every
def test_bf16_autocast(name, flags):
    """As train.py runs it on a GPU. NAG's stream stays fp32 and so needs no repair."""
    model = build(name, torch.float32, n_layer=24, n_embd=32, **flags)
    with torch.no_grad():
        exact = [before for _, before, _ in model.walk(ids())]
        with torch.autocast("cpu", torch.bfloat16):
            mine = [before for _, before, _ in model.walk(ids())]
        for stream, right in zip(mine, exact, strict=True):
            if name == "nag":
                assert stream[0].dtype == stream[1].dtype == torch.float32
                assert (rms(stream[0]) - rms(right[0])).abs().max() < 1e-3
        mine, exact = map(model.ends.as_tensor, (mine[-1], exact[-1]))
        assert (mine - exact).norm() / exact.norm() < 0.05


@over([(name, flags) for name, flags in VARIANTS if name not in ("nag", "ngpt")])
def test_autocast_leaves_a_stream_of_fp32_alone(name, flags):
    """Sublayers compute in bf16, but rounding what is passed on would add up over depth."""
    model = build(name, torch.float32, **flags)
    x, none = direction(2, 3, model.config.width).float(), torch.zeros(2, 3, model.config.width)
    for residual, _ in model.sublayers():
        with torch.no_grad():
            exact = model.ends.as_tensor(residual.write(model.ends.start(x), none))
            with torch.autocast("cpu", torch.bfloat16):
                mine = model.ends.as_tensor(residual.write(model.ends.start(x), none))
        assert mine.dtype == torch.float32 and (mine - exact).abs().max() < 1e-5


@every
def test_weight_decay_is_for_matrices(name, flags):
    """Not for queries, gains, mixing matrices that start as the identity, ...: decay would pull them to 0."""
    from train import TrainConfig, make_optimizers
    model = build(name, torch.float32, **flags)
    groups = make_optimizers(model, TrainConfig())["optimizer"].param_groups
    decayed = {p for group in groups if group["weight_decay"] for p in group["params"]}
    of_gates = tuple(f".{end}" for end in ("W.h", "W.u", "up", "dynamic"))
    by_its_paper = (".alpha", ".beta") if model.config.norm == "seednorm" else ()
    for key, p in model.named_parameters():
        matrix = key.endswith((".weight", *by_its_paper)) or key.endswith(of_gates) and p.dim() == 2
        assert (p in decayed) == matrix, key


@every
def test_a_model_converted_to_bf16_runs(name, flags):
    model = build(name, torch.float32, **flags).bfloat16()
    exact = logits(build(name, torch.float32, **flags))
    assert (logits(model).float() - exact).norm() / exact.norm() < 0.05


# ----------------------------------------------------------------------------- whole models, from the papers

def attention_by_hand(attn, x, first=None, scale=1.0):
    """Causal attention with RoPE and unit queries and keys -> (B, T, C), values (B, T, nh, hs)."""
    (B, T, C), hs = x.shape, attn.hs
    q, k, v = (y.view(B, T, -1, hs) for y in (x @ attn.c_attn.weight.T).chunk(3, dim=-1))
    angle = torch.arange(T)[:, None] * 1e4 ** -(torch.arange(0, hs, 2, dtype=torch.float64) / hs)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]                       # (T, 1, hs / 2)

    def rotated(y):
        y = torch.complex(y[..., ::2], y[..., 1::2]) * turn
        return F.normalize(torch.stack((y.real, y.imag), -1).flatten(-2), dim=-1)

    q, k = (rotated(y) * s for y, s in zip((q, k), scale if isinstance(scale, tuple) else (scale, scale)))
    v = v if first is None else attn.mix[0] * first + attn.mix[1] * v
    scores = torch.einsum("btnh,bsnh->bnts", q, k) * hs ** 0.5
    scores = scores.masked_fill(torch.ones(T, T).tril() == 0, -math.inf)
    return torch.einsum("bnts,bsnh->btnh", scores.softmax(-1), v).flatten(-2) @ attn.c_proj.weight.T, v


def test_ngpt_is_the_papers(no_eps):
    """There the stream has norm 1, here sqrt(C): factors move, the model stays the same."""
    model, C, unit = perturb(build("ngpt"), 0.3), 16, lambda x: F.normalize(x, dim=-1)
    model.constrain()
    with torch.no_grad():
        h = unit(model.wte(ids()))
        for block in model.blocks:
            scale = tuple(s.view(-1, 8) for s in block.attn.scale.chunk(2))          # s_qk, per channel
            u, _ = attention_by_hand(block.attn, h, scale=scale)
            alpha = block.attn_residual.alpha.abs() * 0.05 / C ** -0.5
            h = unit(h + alpha * (unit(u) - h))
            inside = (h @ block.mlp.c_fc.weight.T) * block.mlp.scale * C ** 0.5      # s_uv sqrt(C)
            alpha = block.mlp_residual.alpha.abs() * 0.05 / C ** -0.5
            h = unit(h + alpha * (unit(F.gelu(inside) @ block.mlp.c_proj.weight.T) - h))
        right = (h @ model.lm_head.weight.T) * model.ends.logit_scale * C ** 0.5     # s_z
    same(logits(model), right, 1e-10)


@pytest.mark.parametrize("lambdas", [None, (0.5, 0.5), (1.0, 0.0)])
def test_value_residual_is_resformer(lambdas, no_eps):
    model = perturb(build("pre", value_residual=True))
    with torch.no_grad():
        x, first = model.wte(ids()), None
        for block in model.blocks:
            if lambdas and block.attn.mix is not None:
                block.attn.mix.copy_(torch.tensor(lambdas))
            u, v = attention_by_hand(block.attn, gained_norm(x, block.attn_residual.n_in.gain), first)
            first, x = v if first is None else first, x + u
            x = x + block.mlp(gained_norm(x, block.mlp_residual.n_in.gain))
        same(logits(model), gained_norm(x, model.ends.n_in.gain) @ model.lm_head.weight.T, 1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_value_residual_and_x0_can_be_switched_off_by_their_weights(name):
    base = perturb(build(name))
    flags = dict(value_residual=True, x0=build(name).ends.one_tensor and name != "ngpt")
    model = take_over(build(name, **flags), base, strict=False)
    started = logits(model)
    with torch.no_grad():
        for block in model.blocks[1:]:
            block.attn.mix.copy_(torch.tensor([0.0, 1.0]))
    same(logits(model), logits(base), 1e-13)
    assert (started - logits(base)).abs().max() > 1e-3                   # (1/2, 1/2) does something


def test_one_hyper_stream_is_pre_with_two_scalar_gates():
    for kind in ("lite", "mhc"):
        model = perturb(build("hyper", hyper_n=1, hyper_kind=kind), 0.8)
        r = model.blocks[1].attn_residual
        x, u = direction(2, 3, 16) * 1.5, direction(2, 3, 16, seed=1)
        a, b, _ = (r.static + r.scale.repeat_interleave(torch.tensor(r.sizes)) * (
            gained_norm(x, 1.0) @ r.dynamic.T)).unbind(-1)
        same(r.read(x[..., None, :]), gained_norm(torch.sigmoid(a)[..., None] * x, r.norm.gain))
        same(r.write(x[..., None, :], u)[..., 0, :], x + 2 * torch.sigmoid(b)[..., None] * u)


def test_a_product_of_60_mhc_matrices():
    """After 20 Sinkhorn steps rows sum to one, columns almost."""
    model = perturb(build("hyper", n_layer=30, hyper_kind="mhc"), 0.3)
    X, product, one = direction(4, 16), torch.eye(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    with torch.no_grad():
        for residual, _ in model.sublayers():
            res = residual.gain(X)[2]
            same(res.sum(-1), one, 1e-12)
            same(res.sum(-2), one, 1e-2)
            product = res @ product
        same(product.sum(-1), one, 1e-12)
        same((product @ X).mean(0), X.mean(0), 0.05)
        assert torch.linalg.matrix_norm(product, 2) == pytest.approx(1, abs=0.02)
        rng = torch.Generator().manual_seed(0)
        for size, tol in ((0.3, 1e-5), (1.0, 1e-5), (3.0, 0.3)):
            doubly = M.sinkhorn(size * torch.randn(100, 4, 4, generator=rng, dtype=torch.float64))
            same(doubly.sum(-2), one.expand(100, 4), tol)
    mixed = build("hyper", hyper_kind="mhc").blocks[0].mlp_residual.gain(X)[2]
    assert mixed.diagonal().mean().item() == pytest.approx(0.9990, abs=1e-4)
    identity = 1 / (1 + 23 * math.exp(-8))                    # 0.9923; the others fix 5/23 of the places
    lite = build("hyper").blocks[0].mlp_residual.gain(X)[2]
    assert lite.diagonal().mean().item() == pytest.approx(identity + (1 - identity) * 5 / 23, abs=1e-9)


def test_a_gate_at_its_start():
    """r = 1/2 whatever comes in, so the derivatives are 1 and 1/2; that of W is not 0: it learns at once."""
    r = build("review").blocks[1].mlp_residual
    h, u = (direction(5, 16, seed=i).requires_grad_() for i in range(2))
    g = direction(5, 16, seed=2)
    r.write(h, u).backward(g)
    same(h.grad, g)
    same(u.grad, g / 2)
    unit = lambda x: (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()).detach()
    slope = (g * u / 4).detach()                                         # dL/dr r (1 - r)
    same(r.W["h"].grad, slope.T @ unit(h))
    same(r.W["u"].grad, slope.T @ unit(u))
    same(r.b.grad, slope.sum(0))


def test_a_gate_sees_directions_only(monkeypatch):
    """Without the epsilon of its norms."""
    monkeypatch.setattr(M, "rms_norm", lambda x, gain=None, eps=None: x / rms(x))
    r = perturb(build("review")).blocks[1].mlp_residual
    h, u = direction(5, 16), direction(5, 16, seed=1)
    with torch.no_grad():
        same(r.gate(7.3 * h, 1e-4 * u), r.gate(h, u), 1e-13)
        assert (r.gate(-h, u) - r.gate(h, u)).abs().max() > 0.01


def test_review_without_the_update_is_highway():
    highway = perturb(build("highway"))
    assert torch.equal(logits(take_over(build("review", gate_input="h"), highway)), logits(highway))
    same(logits(perturb(build("review", gate_input="u"))), logits(perturb(build("highway", gate_input="u"))))
