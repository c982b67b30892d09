"""Blocks of different widths, shared and repeated blocks, removed sublayers, deep supervision. Float64."""
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import model as M
from test_residuals import build, ids, logits, perturb, same

SIZE = dict(n_layer=6, n_head=4, n_embd=64)
FORMS = [dict(taper="linear"), dict(taper="cosine", taper_on="both"), dict(taper="fanin", taper_on="both"),
         dict(taper="step", taper_on="both", taper_match="flops"), dict(taper="ends"),
         dict(taper="cosine", taper_start=0.5, taper_end=1.5),
         dict(taper="linear", taper_match="none", taper_start=1.0),
         dict(taper="cosine", activation="swiglu"), dict(taper="cosine", residual="nag"),
         dict(taper="cosine", residual="attnres", taper_on="both"), dict(taper="cosine", residual="ngpt"),
         dict(taper="cosine", residual="hyper"), dict(taper="cosine", norm="crms"),
         dict(taper="cosine", tie=True), dict(share_every=2), dict(share_every=4),
         dict(share_every=2, share_rank=3), dict(share_every=1, residual="nag"), dict(repeat="4:3"),
         dict(repeat="3-5:2"), dict(share_every=3, share_rank=2, activation="swiglu", residual="review"),
         dict(repeat="2-6:3", residual="nag"), dict(repeat="1:2", residual="post")]
every = pytest.mark.parametrize("flags", FORMS, ids=lambda flags: " ".join(map(str, flags.values())))


@every
def test_counts_cache_and_causality(flags):
    model, idx = perturb(build(**SIZE, **flags)).eval(), ids(2, 16)
    assert model.num_params() == sum(p.numel() for p in model.parameters())
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        full = model(idx)[0]
    assert counter.get_total_flops() == pytest.approx(32 * model.flops_per_token(16), rel=1e-9)
    cache, out = M.KVCache(model, 2), []
    with torch.no_grad():
        for piece in idx.split([5, 1, 4, 1, 1, 4], dim=1):
            out.append(model(piece, cache=cache)[0])
    same(torch.cat(out, dim=1), full.detach(), 1e-10)
    other = idx.clone()
    other[:, 7] = (other[:, 7] + 1) % 64
    change = (logits(model, other) - full).abs().amax(-1)
    assert change[:, :7].max() < 1e-12 and change[:, 7:].min() > 1e-9


@every
def test_gradients_and_saving(flags):
    model = perturb(build(**SIZE, **flags))
    model(ids(), ids(seed=1))[1].backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().max() > 1e-12 for p in model.parameters())
    fresh = build(**{**SIZE, **flags}, seed=7)
    assert not torch.equal(logits(fresh), logits(model))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(logits(fresh), logits(model))


# ----------------------------------------------------------------------------- tapers

@pytest.mark.parametrize("taper", ["linear", "cosine", "step", "fanin", "ends"])
@pytest.mark.parametrize("n_layer", [1, 5, 12])
def test_profiles_have_the_closed_form(taper, n_layer):
    m = M.taper_profile(M.GPTConfig(taper=taper, n_layer=n_layer, taper_start=1.5, taper_end=0.5))
    if taper in ("linear", "cosine", "step"):
        assert sum(m) / n_layer == pytest.approx(1, abs=1e-12) or taper == "step"
        assert n_layer == 1 and m == [1] or (m[0], m[-1]) == pytest.approx((1.5, 0.5))
        assert all(a >= b for a, b in itertools.pairwise(m))
    elif taper == "fanin" and n_layer > 1:
        assert m[0] == pytest.approx(2 * n_layer / (n_layer + 1)) and m[-1] == max(0.25, 2 / (n_layer + 1))
        assert max(0.25, 2 * (n_layer - 3) / (n_layer + 1)) == pytest.approx(m[3])
    elif taper == "ends" and n_layer > 1:
        assert m == pytest.approx(m[::-1]) and m[0] == 1.5 and min(m) < 0.7
    if taper == "cosine" and n_layer == 12:
        assert m[3] == pytest.approx(0.5 + 0.5 * (1 + math.cos(math.pi * 3 / 11)))


def test_published_widths():
    """12 blocks of width 768: 4608 ... 1536 hidden units, in all 36,864 (specs, 6.1)."""
    shapes = M.block_shapes(M.GPTConfig(taper="linear", n_layer=12, n_embd=768, n_head=12))
    assert (shapes[0][1], shapes[-1][1], sum(hidden for _, hidden, _ in shapes)) == (4608, 1536, 36864)


def test_a_flat_taper_is_the_uniform_model():
    flat = build(**SIZE, taper="linear", taper_start=1.0, taper_end=1.0, taper_on="both")
    assert torch.equal(logits(flat), logits(build(**SIZE)))


@pytest.mark.parametrize("flags", [f for f in FORMS if "taper" in f and f.get("taper_match") != "none"],
                         ids=str)
def test_matched_within_one_percent_in_both_directions(flags):
    for start, end in ((1.5, 0.5), (0.5, 1.5)):
        config = M.GPTConfig(**{**SIZE, **flags, "taper_start": start, "taper_end": end})
        assert abs(M.taper_miss(config)) <= 0.01 and not config.problems()
        model, uniform = M.GPT(config), M.GPT(M.GPTConfig(**{**SIZE, **flags, "taper": "none"}))
        if flags.get("taper_match") == "flops":
            assert model.flops_per_token() == pytest.approx(uniform.flops_per_token(), rel=0.011)
        elif flags.get("residual") != "ngpt":
            assert model.num_params() == pytest.approx(uniform.num_params(), rel=0.011)


def test_wide_blocks_start_no_louder():
    model, uniform = (build(**{**SIZE, "n_embd": 128}, taper=kind) for kind in ("linear", "none"))
    for block, plain in zip(model.blocks, uniform.blocks):
        hidden = block.mlp.c_proj.in_features
        expected = 0.02 / 12 ** 0.5 * (512 / hidden) ** 0.5
        assert block.mlp.c_proj.weight.std().item() == pytest.approx(expected, rel=0.05)
        assert torch.equal(block.attn.c_proj.weight, plain.attn.c_proj.weight)


@pytest.mark.parametrize("flags", [dict(taper="linear", n_layer=2, n_embd=8, n_head=1, taper_on="both",
                                        taper_end=0.1)], ids=str)
def test_what_can_not_match_is_refused(flags):
    problems = M.GPTConfig(**flags).problems()
    assert len(problems) == 1 and "--taper " in problems[0] and "--taper_match none" in problems[0]


def test_as_many_compiled_graphs_as_widths():
    """More than torch.compile makes of one function if nobody asks."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build(n_layer=10, n_embd=64, block_size=16, taper="linear")
    assert len(set(M.block_shapes(model.config))) == 10
    model.compile_blocks(fullgraph=True, backend="eager")
    model(ids(), ids())[1].backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 10


# ----------------------------------------------------------------------------- shared and repeated blocks

def test_sharing():
    untied, tied = build(**SIZE), build(**SIZE, share_every=6)
    assert torch.equal(logits(tied), logits(untied))
    two = perturb(build(**SIZE, share_every=2))
    assert two.blocks[4].mlp is two.blocks[0].mlp and two.blocks[5].attn is two.blocks[1].attn
    assert len({id(r) for r in two.residuals()}) == 13                   # norms stay private
    ranked = build(**SIZE, share_every=2, share_rank=3)
    assert torch.equal(logits(ranked), logits(build(**SIZE, share_every=2)))     # b = 0 at first
    sides = (64 + 192) + (64 + 64) + (64 + 256) + (256 + 64)
    assert ranked.num_params() - build(**SIZE, share_every=2).num_params() == 4 * 3 * sides
    # a full-rank change can be any weights: those of an untied model
    full, target = build(**SIZE, share_every=2, share_rank=64), perturb(build(**SIZE))
    state = target.state_dict()
    with torch.no_grad():
        for key, p in full.named_parameters():
            if key in state:
                p.copy_(state[key])
        for i, block in enumerate(full.blocks):
            for kind, name in itertools.product(("attn", "mlp"), ("c_attn", "c_fc", "c_proj")):
                layer = getattr(getattr(block, kind), name, None)
                if isinstance(layer, M.LowRank):
                    difference = state[f"blocks.{i}.{kind}.{name}.weight"] - layer.linear.weight
                    u, s, v = torch.linalg.svd(difference, full_matrices=False)
                    layer.b[:, :len(s)], layer.a[:len(s)] = u * s, v
                    layer.b[:, len(s):], layer.a[len(s):] = 0, 0
    same(logits(full), logits(target), 1e-10)


def test_one_step_keeps_tied_weights_identical():
    model = perturb(build(**SIZE, share_every=2))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(ids(), ids(seed=1))[1].backward()
    optimizer.step()
    assert torch.equal(model.blocks[0].mlp.c_fc.weight, model.blocks[4].mlp.c_fc.weight)
    state = model.state_dict()
    assert torch.equal(state["blocks.0.mlp.c_fc.weight"], state["blocks.4.mlp.c_fc.weight"])


def test_repetition_is_the_unrolled_model():
    repeated = perturb(build(**SIZE, repeat="2-3:2"))
    assert repeated.config.order() == [0, 1, 2, 1, 2, 3, 4, 5] and len(repeated.blocks) == 8
    unrolled = build(**{**SIZE, "n_layer": 8})
    with torch.no_grad():
        for mine, theirs in zip(repeated.blocks, unrolled.blocks):
            theirs.load_state_dict(mine.state_dict())
        for name in ("wte", "lm_head", "ends"):
            getattr(unrolled, name).load_state_dict(getattr(repeated, name).state_dict())
    same(logits(repeated), logits(unrolled), 1e-14)
    # the same values to start from as without the repetition, behind it, too
    again, plain = build(**SIZE, repeat="2-3:2"), build(**SIZE)
    assert torch.equal(again.blocks[7].mlp.c_fc.weight, plain.blocks[5].mlp.c_fc.weight)
    for model in (repeated, unrolled):
        model(ids(), ids(seed=1))[1].backward()
    both = unrolled.blocks[1].mlp.c_fc.weight.grad + unrolled.blocks[3].mlp.c_fc.weight.grad
    # the gradient is the sum over the uses
    same(repeated.blocks[1].mlp.c_fc.weight.grad, both, 1e-12)
    assert repeated.num_params() == build(**SIZE).num_params()


# ----------------------------------------------------------------------------- removal, deep supervision

@pytest.mark.parametrize("residual", ["pre", "nag", "attnres", "hyper"])
def test_removed_sublayers_do_not_run(residual):
    model, whole = (perturb(build(residual, **SIZE)).eval() for _ in range(2))
    model.remove([])
    assert torch.equal(logits(model), logits(whole))
    ran = []
    for l, (_, sublayer) in enumerate(model.sublayers(), start=1):
        sublayer.register_forward_hook(lambda module, args, out, l=l: ran.append(l))
    model.remove([3, 8])
    *_, (_, _, right) = whole.walk(ids(), without={3, 8})
    same(logits(model), right.detach(), 1e-14 if residual != "attnres" else 1e-9)
    assert ran == [1, 2, 4, 5, 6, 7, 9, 10, 11, 12]
    cache, idx = M.KVCache(model, 2), ids(2, 16)
    assert [layer is None for layer in cache.layers] == [False, True, False, False, False, False]
    with torch.no_grad():
        out = torch.cat([model(piece, cache=cache)[0] for piece in idx.split([5, 1, 10], dim=1)], dim=1)
    same(out, logits(model, idx), 1e-10)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(idx)
    if residual != "attnres":   # whose shared passes cost the same with a source less
        assert counter.get_total_flops() == pytest.approx(32 * model.flops_per_token(16), rel=1e-9)


def test_a_zeroed_branch_can_be_removed():
    model = perturb(build(**SIZE)).eval()
    with torch.no_grad():
        model.blocks[2].mlp.c_proj.weight.zero_()
    before = logits(model)
    model.remove([6])
    assert torch.equal(logits(model), before)


def test_deep_supervision():
    model = perturb(build(**SIZE, deep_supervision=True))
    idx, targets = ids(), ids(seed=1)
    losses = []
    for l, _, after in model.walk(idx):
        if l % 2 == 0:
            out = model.head(model.ends.finish(after))
            losses.append(F.cross_entropy(out.flatten(0, 1), targets.flatten()))
    assert len(losses) == 6
    same(model.train()(idx, targets)[1], sum(losses) / 6, 1e-12)
    same(model.eval()(idx, targets)[1], losses[-1], 1e-12)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.train()(idx, targets)
    assert counter.get_total_flops() == pytest.approx(24 * model.flops_per_token(12), rel=1e-9)
