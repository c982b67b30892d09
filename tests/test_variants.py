"""
The residuals that read across depth or gate their updates, and the norms: generic properties of every option,
then the algebra of the specs, against independent formulas. Float64 throughout.
"""
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import kernels
import model as M
from test_residuals import (build, gained_norm, ids, logits, no_eps, only_matrices, perturb,  # noqa: F401
                            rms, same, streams, take_over)


# ----------------------------------------------------------------------------- Attention Residuals

@pytest.mark.parametrize("shift", [-80.0, 0.0, 80.0])
@pytest.mark.parametrize("dtype, tol", [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_merge_at_extreme_scores(shift, dtype, tol):
    rng = torch.Generator().manual_seed(0)
    sources = [torch.randn(5, 7, 16, generator=rng, dtype=dtype) for _ in range(6)]
    w = torch.randn(3, 16, generator=rng, dtype=dtype)
    w = w + shift * sources[4][0, 0] / sources[4][0, 0].norm() / 4        # scores of one token to about +-80
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            ahead = kernels.depth_read_ahead(w, sources[:4])
            for i in range(3):
                right = kernels.depth_read_reference(w[i].double(), [v.double() for v in sources])
                merged = kernels.depth_read(w[i], sources[4:], ahead[i])
                assert (merged - right).abs().max() <= tol * right.abs().max()
                alone = kernels.depth_read(w[i], sources[4:5], ahead[i])
                right = kernels.depth_read_reference(w[i].double(), [v.double() for v in sources[:5]])
                assert (alone - right).abs().max() <= tol * right.abs().max()


def test_one_source_gives_no_gradient_to_its_query():
    rng = torch.Generator().manual_seed(0)
    w, v = (torch.randn(*shape, generator=rng, requires_grad=True) for shape in ((16,), (4, 16)))
    kernels.depth_read(w, [v]).square().sum().backward()
    assert not w.grad.any() and v.grad.any()


@pytest.mark.parametrize("n, with_ahead, with_gain", [(3, False, False), (3, True, False), (1, True, True),
                                                      (0, True, True), (2, False, True), (4, True, True)])
def test_gradcheck_of_a_read(n, with_ahead, with_gain):
    rng = torch.Generator().manual_seed(n)
    new = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64, requires_grad=True)
    w, sources, o, lse, gain = new(6), [new(2, 3, 6) for _ in range(n)], new(2, 3, 6), new(2, 3), new(6)

    def read(w, gain, o, lse, *sources):
        return kernels.depth_read(w, sources, (o, lse) if with_ahead else None, gain if with_gain else None)

    assert torch.autograd.gradcheck(read, (w, gain, o, lse, *sources))
    right = kernels.depth_read_reference(w, sources, (o, lse) if with_ahead else None,
                                         gain if with_gain else None)
    same(read(w, gain, o, lse, *sources), right, 1e-13)


def test_gradcheck_of_reads_ahead(monkeypatch):
    rng = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64, requires_grad=True)
    w, sources = new(3, 6), [new(2, 3, 6) for _ in range(4)]
    flat = lambda *inputs: tuple(t for pair in kernels.depth_read_ahead(inputs[0], inputs[1:]) for t in pair)
    assert torch.autograd.gradcheck(flat, (w, *sources))
    whole = flat(w, *sources)
    monkeypatch.setattr(kernels, "pieces", lambda n_rows, size: [slice(i, i + 1) for i in range(n_rows)])
    for a, b in zip(flat(w, *sources), whole, strict=True):
        same(a, b, 1e-14)
    assert torch.autograd.gradcheck(flat, (w, *sources))


def saved_bytes(function):
    """Bytes of the distinct storages that autograd keeps for the backward pass."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = function()
    return sum(storage.nbytes() for storage in kept.values()), out


@pytest.mark.parametrize("flags", [dict(attnres_block=1), dict(attnres_block=4),
                                   dict(attnres_weights="sigmoid")], ids=str)
def test_memory_is_linear_in_depth(flags):
    idx, size = ids(8, 16), {}
    for n_layer in (8, 16, 24):
        model = build("attnres", torch.float32, n_layer=n_layer, n_embd=64, **flags)
        weights = sum(p.numel() for p in model.parameters()) * 4
        size[n_layer] = saved_bytes(lambda: model(idx, idx)[1])[0] - weights
    bend = (size[24] - size[16]) / (size[16] - size[8])
    # what grows faster are the scores, one number where a source has C
    assert bend < 1.12
    sources = lambda n: [torch.randn(8, 16, 64, requires_grad=True) for _ in range(n)]
    stacked = {n: saved_bytes(lambda: [torch.stack(vs[:k]).softmax(0).sum(0) for vs in [sources(n)] for k in
                                       range(1, n + 1)])[0] for n in (16, 32, 48)}
    assert (stacked[48] - stacked[32]) / (stacked[32] - stacked[16]) > 1.5


def test_denseformer():
    pre = perturb(build("pre", n_layer=4))
    model = build("denseformer", n_layer=4)
    with torch.no_grad():
        mine = {name.replace(".norm.", ".n_in."): p for name, p in model.named_parameters()}
        for name, p in pre.named_parameters():
            mine[name].copy_(p)
    assert torch.equal(logits(model), logits(pre))                       # the last weight 1, the others 0
    perturb(model, 0.5, only=lambda name, p: name.endswith(".a"))
    with torch.no_grad():
        rope, x = model.rope(0, 12), model.wte(ids())
        past = [x]
        for i, block in enumerate(model.blocks):
            x = x + block.attn(gained_norm(x, block.attn_residual.norm.gain), rope)
            past.append(x + block.mlp(gained_norm(x, block.mlp_residual.norm.gain)))
            assert block.mlp_residual.a.shape == (i + 2,)
            x = sum(a * v for a, v in zip(block.mlp_residual.a, past, strict=True))
        right = gained_norm(x, model.ends.norm.gain) @ model.lm_head.weight.T
    same(logits(model), right)
    assert (right - logits(pre)).abs().max() > 1e-3
    # without the MLP of block 2, which would end it, the weights of its output have nothing to weigh
    model.remove([4])
    with torch.no_grad():
        x = model.wte(ids())
        past = {0: x}
        for i, block in enumerate(model.blocks):
            x = x + block.attn(gained_norm(x, block.attn_residual.norm.gain), rope)
            if i != 1:
                past[i + 1] = x + block.mlp(gained_norm(x, block.mlp_residual.norm.gain))
                x = sum(block.mlp_residual.a[number] * v for number, v in past.items())
        same(logits(model), gained_norm(x, model.ends.norm.gain) @ model.lm_head.weight.T)


# ----------------------------------------------------------------------------- gates

def gated(residual="review", l=3, scale=0.5, **flags):
    model = perturb(build(residual, n_layer=2, **flags), scale)
    return list(model.sublayers())[l - 1][0]


def some(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


H, U = some(4, 5, 16), 0.3 * some(4, 5, 16, seed=1)


def test_gate_formulas():
    review, highway = gated(), gated("highway")
    z = unit(H) @ review.W["h"].T + unit(U) @ review.W["u"].T + review.b
    same(review.write(H, U), H + torch.sigmoid(z) * U)
    together = torch.cat((unit(H), unit(U)), -1) @ torch.cat((review.W["h"], review.W["u"]), 1).T + review.b
    same(review.gate(H, U), torch.sigmoid(together), 1e-14)
    same(highway.write(H, U), H + torch.sigmoid(unit(H) @ highway.W["h"].T + highway.b) * U)
    convex = gated("convex")
    r = torch.sigmoid(unit(H) @ convex.W["h"].T + unit(U) @ convex.W["u"].T + convex.b)
    same(convex.write(H, U), (1 - r) * H + r * U)
    old = gated("convex", gate_input="h", gate_bias=-3.0)                # Highway networks, 2015
    T = torch.sigmoid(unit(H) @ old.W["h"].T + old.b)
    same(old.write(H, U), T * U + (1 - T) * H)
    diag = gated(gate_rank="diag")
    same(diag.gate(H, U), torch.sigmoid(diag.W["h"] * unit(H) + diag.W["u"] * unit(U) + diag.b))
    low = gated(gate_rank="3")
    z = (unit(H) @ low.W["h"].T + unit(U) @ low.W["u"].T) @ low.up.T + low.b
    same(low.gate(H, U), torch.sigmoid(z))
    assert low.up.shape == (16, 3) and low.W["h"].shape == (3, 16)
    double = gated(gate_range=2.0)
    same(double.gate(H, U), 2 * gated().gate(H, U))


def test_gate_invariants():
    fresh = build("review", n_layer=2).blocks[1].mlp_residual
    assert torch.equal(fresh.write(H, U), H + U / 2)
    with torch.no_grad():
        fresh.b.fill_(30.0)
        same(fresh.write(H, U), H + U, 3e-13)
    doubled = build("review", n_layer=2, gate_range=2.0).blocks[1].mlp_residual
    assert torch.equal(doubled.write(H, U), H + U)                       # PreNorm
    closed = build("convex", n_layer=2, gate_bias=-30.0).blocks[1].mlp_residual
    same(closed.write(H, U), H, 1e-12)
    review = gated()
    with torch.no_grad():
        review.W["u"].zero_()
    assert torch.equal(review.gate(H, U), review.gate(H, some(4, 5, 16, seed=9)))
    assert not torch.equal(gated().gate(H, U), gated().gate(H, some(4, 5, 16, seed=9)))
    large = gated()                                                      # the epsilon matters less and less
    same(large.gate(1e4 * H, 1e4 * U), large.gate(1e6 * H, 1e5 * U), 1e-8)
    constant = build("review", n_layer=2, gate_input="none")
    assert (constant.blocks[0].mlp_residual.gate(H, U) == 0.5).all()
    assert constant.num_params() == build("pre", n_layer=2).num_params()
    same(build("review", n_layer=2, gate_input="none", gate_bias=-3.0).blocks[0].mlp_residual.gate(H, U),
         torch.full((16,), 1 / (1 + math.exp(3)), dtype=torch.float64))


def test_gate_sizes():
    C, L = 16, 3
    pre = build("pre").num_params()
    for residual, flags, extra in (("review", {}, 2 * C * C + C), ("convex", {}, 2 * C * C + C),
                                   ("highway", {}, C * C + C), ("review", dict(gate_rank="diag"), 3 * C),
                                   ("review", dict(gate_rank="5"), 3 * 5 * C + C),
                                   ("review", dict(gate_input="u"), C * C + C)):
        assert build(residual, **flags).num_params() - pre == 2 * L * extra, (residual, flags)
    # the cleaner match of the specs: equal up to the biases
    review, highway, standard = (build(r, mlp_ratio=float(m)).num_params() for r, m in
                                 (("review", 4), ("highway", 5), ("pre", 6)))
    assert review - standard == highway - standard == 2 * L * C


# ----------------------------------------------------------------------------- several streams

@pytest.mark.parametrize("kind", ["hc", "mhc", "lite"])
def test_hyper_starts_as_pre_in_every_stream(kind, no_eps):  # noqa: F811
    model, pre = (build(name, n_layer=5, **flags)
                  for name, flags in (("hyper", dict(hyper_kind=kind)), ("pre", {})))
    same(logits(model), logits(pre), 1e-6 if kind == "mhc" else 1e-11)   # sinkhorn's columns: almost 1
    for (_, a, _), (_, b, _) in zip(model.walk(ids()), pre.walk(ids())):
        same(a, b[..., None, :].expand_as(a), 1e-6 if kind == "mhc" else 1e-11)
    residual = model.blocks[1].attn_residual                             # sublayer 3 reads stream 2
    pre_, post, res = residual.gain(some(1, 1, 4, 16))
    assert pre_.argmax() == 2 and (pre_[..., 2] > 0.98).all() and (post == 1).all()
    assert res.diagonal(dim1=-2, dim2=-1).min() > dict(hc=1 - 1e-9, mhc=0.998, lite=0.992)[kind]


def hyper_reference(residual, X, kind):
    """pre, post, res of one token's streams X (4, C), from the papers."""
    n, parts = 4, residual.sizes
    if kind == "hc":
        z = torch.tanh(gained_norm(X, 1.0) @ residual.dynamic.T)
        scale = torch.tensor(5 * [residual.scale[0]] + [residual.scale[1]])
        z = residual.static + scale * z
        return z[:, 0], z[:, 5], z[:, 1:5].T
    a, b, c = (gained_norm(X.flatten(), 1.0) @ residual.dynamic.T).split(parts)
    sa, sb, sc = residual.static.split(parts)
    k = residual.scale
    pre, post, mixing = torch.sigmoid(sa + k[0] * a), 2 * torch.sigmoid(sb + k[1] * b), sc + k[2] * c
    if kind == "lite":
        res = sum(p * torch.eye(n, dtype=X.dtype)[list(order)] for p, order in
                  zip(mixing.softmax(0), itertools.permutations(range(n))))
    else:
        res = mixing.exp().view(n, n)
        for _ in range(20):
            res = res / res.sum(0, keepdim=True)
            res = res / res.sum(1, keepdim=True)
    return pre, post, res


@pytest.mark.parametrize("kind", ["hc", "mhc", "lite"])
def test_hyper_formulas(kind):
    model = perturb(build("hyper", n_layer=2, hyper_kind=kind), 0.8)
    residual, X, u = model.blocks[1].attn_residual, some(2, 3, 4, 16), some(2, 3, 16, seed=1)
    with torch.no_grad():
        read, written = residual.read(X, residual.gain(X)), residual.write(X, u, residual.gain(X))
        for b in range(2):
            for t in range(3):
                pre, post, res = hyper_reference(residual, X[b, t], kind)
                same(read[b, t], gained_norm(pre @ X[b, t], residual.norm.gain))
                same(written[b, t], res @ X[b, t] + post[:, None] * u[b, t])
                if kind != "hc":
                    same(res.sum(1), torch.ones(4, dtype=torch.float64), 1e-12)
                    same(res.sum(0), torch.ones(4, dtype=torch.float64), 1e-12 if kind == "lite" else 0.05)


def test_products_of_doubly_stochastic_matrices():
    model = perturb(build("hyper", n_layer=30, n_embd=8, hyper_kind="lite"), 2.0)
    free = perturb(build("hyper", n_layer=30, n_embd=8, hyper_kind="hc"), 0.1)
    X, one = some(4, 8), torch.ones(4, dtype=torch.float64)
    with torch.no_grad():
        products = []
        for m in (model, free):
            product = torch.eye(4, dtype=torch.float64)
            for residual, _ in m.sublayers():
                product = residual.gain(X)[2] @ product
            products.append(product)
    same(products[0].sum(0), one, 1e-12)
    same(products[0].sum(1), one, 1e-12)
    assert torch.linalg.matrix_norm(products[0], 2) == pytest.approx(1, abs=1e-12)
    # mixing keeps the mean of the streams
    same((products[0] @ X).mean(0), X.mean(0), 1e-12)
    assert torch.linalg.matrix_norm(products[1], 2) > 1.5
    logits_ = 3 * some(60, 4, 4)
    doubly = M.sinkhorn(logits_)
    same(doubly.sum(-1), torch.ones(60, 4, dtype=torch.float64), 1e-12)
    error = [(M.sinkhorn(logits_, steps).sum(-2) - 1).abs().mean() for steps in (5, 10, 20)]
    assert error[0] > error[1] > error[2]


def test_siamese():
    model = perturb(build("siamese", n_layer=3))
    with torch.no_grad():
        rope, x = model.rope(0, 12), model.wte(ids())
        y = x
        for i, block in enumerate(model.blocks, start=1):
            for r, sublayer in ((block.attn_residual, block.attn), (block.mlp_residual, block.mlp)):
                x = gained_norm(x, r.n_x.gain)
                u = sublayer(gained_norm(x + gained_norm(y, r.n_y.gain), r.n_in.gain), rope)
                x, y = x + u / math.sqrt(2 * i), y + u
        ends = model.ends
        h = gained_norm(gained_norm(x, ends.n_x.gain) + gained_norm(y, ends.n_y.gain), ends.n_in.gain)
    same(logits(model), h @ model.lm_head.weight.T)


def test_siamese_without_x_is_pre(no_eps):  # noqa: F811
    model, pre = build("siamese"), build("pre")
    with torch.no_grad():
        for r in model.residuals():
            r.n_x.gain.zero_()
    for a, b in zip(streams(model), streams(pre), strict=True):
        same(a, b)
    same(logits(model), logits(pre))


def test_ngpt(no_eps):  # noqa: F811
    model = build("ngpt", n_layer=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(ids(), ids(seed=1))[1].backward()
        optimizer.step()
        model.constrain()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            if p.dim() == 2:
                same(p.norm(dim=0 if "c_proj" in name else 1),
                     torch.ones(p.shape[1 if "c_proj" in name else 0], dtype=torch.float64), 1e-12)
    for x in streams(model):
        same(rms(x), torch.ones(2, 12, 1, dtype=torch.float64), 1e-12)
    r = perturb(model, 0.1).blocks[1].mlp_residual
    h, u = H / rms(H), U
    alpha = 0.05 * 4 * r.alpha.abs()
    moved = F.normalize(h, dim=-1) + alpha * (F.normalize(u, dim=-1) - F.normalize(h, dim=-1))
    same(r.write(h, u), 4 * F.normalize(moved, dim=-1))
    with torch.no_grad():
        r.alpha.zero_()
    same(r.write(h, u), h, 1e-14)
    fresh = build("ngpt")
    h = F.normalize(streams(fresh)[-1], dim=-1)
    same(logits(fresh), h @ F.normalize(fresh.lm_head.weight, dim=-1).T)
    assert fresh.blocks[0].mlp_residual.alpha[0].item() * 0.05 * 4 == pytest.approx(0.05)


def test_value_residual():
    base, model = perturb(build("pre")), build("pre", value_residual=True)
    take_over(model, base, strict=False)
    seen = []
    for block in model.blocks:
        block.attn.register_forward_hook(lambda module, args, out: seen.append(out))
    logits(model)
    first, mixed = seen[0], seen[1]
    with torch.no_grad():
        for block in model.blocks[1:]:
            assert block.attn.mix.tolist() == [0.5, 0.5]
            block.attn.mix.copy_(torch.tensor([0.0, 1.0]))
    assert model.blocks[0].attn.mix is None
    seen.clear()
    same(logits(model), logits(base), 1e-14)
    assert torch.equal(seen[0], first) and not torch.equal(seen[1], mixed)
    # SVFormer: all layers use the first values
    with torch.no_grad():
        for block in model.blocks[1:]:
            block.attn.mix.copy_(torch.tensor([1.0, 0.0]))
            other = block.attn.c_attn.weight[32:]
            other.copy_(some(16, 16, seed=3))
    a = logits(model)
    with torch.no_grad():
        for block in model.blocks[1:]:
            block.attn.c_attn.weight[32:] = some(16, 16, seed=4)
    assert torch.equal(logits(model), a)


def test_x0():
    base, model = perturb(build("pre")), build("pre", x0=True)
    take_over(model, base, strict=False)
    assert torch.equal(logits(model), logits(base))
    perturb(model, 0.5, only=lambda name, p: name == "x0")
    with torch.no_grad():
        rope, x0 = model.rope(0, 12), model.wte(ids())
        x = x0
        for (a, b), block in zip(model.x0, model.blocks, strict=True):
            x = a * x + b * x0
            x = x + block.attn(block.attn_residual.read(x), rope)
            x = x + block.mlp(block.mlp_residual.read(x))
        right = model.head(model.ends.finish(x))
    same(logits(model), right)


# ----------------------------------------------------------------------------- norms

def norm(kind, C=16, **flags):
    return M.Norm(M.GPTConfig(norm=kind, n_embd=C, **flags)).double()


def centred(model, full):
    """A Pre-LN model's weights, with whatever writes to the stream centred over its channels."""
    with torch.no_grad():
        state = {key: value.clone() for key, value in full.state_dict().items()}
        for key in state:
            if "wte" in key:
                state[key] -= state[key].mean(1, keepdim=True)
            elif "c_proj" in key:
                state[key] -= state[key].mean(0, keepdim=True)
    model.load_state_dict(state)
    return model


def test_pre_layernorm_is_recentred_pre_rmsnorm():
    layer = perturb(build("pre", norm="layer"), 0.3)
    same(logits(centred(build("pre", norm="rms"), layer)), logits(layer), 1e-12)
    assert (logits(take_over(build("pre", norm="rms"), layer)) - logits(layer)).abs().max() > 1e-2


def test_pre_layernorm_is_pre_crmsnorm():
    """The stream stores C - 1 entries; what reads it folds the gains, and the column of the missing entry,
    in."""
    layer = perturb(build("pre", norm="layer"), 0.3)
    rms_form, small = centred(build("pre", norm="rms"), layer).state_dict(), build("pre", norm="crms")
    assert small.wte.weight.shape == (64, 15)
    state = {}
    for key, value in rms_form.items():
        before = key.replace("attn.c_attn", "attn_residual.n_in").replace("mlp.c_fc", "mlp_residual.n_in")
        gain = rms_form.get(before.replace("weight", "gain").replace("lm_head", "ends.n_in"))
        if "wte" in key:
            state[key] = value[:, :-1]
        elif "c_proj" in key:
            state[key] = value[:-1]
        elif key.endswith(("c_attn.weight", "c_fc.weight", "lm_head.weight")):
            scaled = value * gain
            state[key] = scaled[:, :-1] - scaled[:, -1:]
        elif key.endswith("gain"):
            state[key] = torch.ones(15, dtype=torch.float64)
    small.load_state_dict(state)
    same(logits(small), logits(layer), 1e-12)


def test_norms():
    x = some(3, 5, 16)
    zero_mean = x - x.mean(-1, keepdim=True)
    same(norm("crms")(zero_mean[..., :-1]), norm("rms")(zero_mean)[..., :-1], 1e-14)
    same(norm("layer")(3 * x + 7), norm("layer")(x), 1e-6)
    assert (norm("rms")(x + 7) - norm("rms")(x)).abs().max() > 0.1
    same(norm("layer")(x), F.layer_norm(x, (16,), eps=kernels.EPS), 1e-14)
    Q = torch.linalg.qr(some(16, 16, seed=1))[0]
    single, rms_ = perturb(norm("single"), 0.5), perturb(norm("rms"), 0.5)
    assert single.gain.shape == ()
    same(single(x @ Q), single(x) @ Q, 1e-13)
    assert (rms_(x @ Q) - rms_(x) @ Q).abs().max() > 0.1
    assert norm("none")(x) is x and not list(norm("none").parameters())


def test_seednorm():
    x, seed = some(3, 5, 16), norm("seednorm")
    same(seed(x), norm("rms")(x), 1e-15)
    perturb(seed, 0.7)
    gain = torch.tanh((x * seed.beta).sum(-1, keepdim=True)) * seed.alpha + seed.gain
    same(seed(x), gain * gained_norm(x, 1.0))
    assert (seed(1e3 * x).abs() <= (seed.gain.abs() + seed.alpha.abs()) * 4 + 1e-9).all()
    # lets the size through, up to a limit
    assert (seed(2 * x) - seed(x)).abs().max() > 1e-2
    same(seed(1e5 * x), seed(1e6 * x), 1e-9)


def test_bounded_norms(no_eps):  # noqa: F811
    x, bhyt, dyt = some(3, 5, 16), norm("bhyt"), norm("dyt")
    same(bhyt(17 * x), bhyt(x), 1e-14)
    same(bhyt(x), torch.tanh(0.2 * x / rms(x)), 1e-14)
    assert (dyt(17 * x) - dyt(x)).abs().max() > 0.1
    same(dyt(x), torch.tanh(x / 2), 1e-15)
    for size, error in ((0.1, 3.4e-2), (0.01, 3.5e-4)):                  # -> (lam / 10) R(x)
        with torch.no_grad():
            bhyt.lam.fill_(10 * size)
        limit = size * x / rms(x)
        found = ((bhyt(x) - limit).abs().max() / limit.abs().max()).item()
        assert error / 4 < found < 2 * error
    assert build("pre", norm="dyt").embed_scale.item() == 4


def test_batch_norm_sees_the_future_in_training_only():
    model, idx = perturb(build("pre", norm="batch")), ids()
    other = idx.clone()
    other[:, -1] = (other[:, -1] + 1) % 64
    change = lambda: (logits(model, idx) - logits(model, other)).abs().amax(-1)[:, :-1].max()
    assert model.train() and change() > 1e-6                             # not causal, as the theory says
    model.eval()
    assert change() < 1e-14
    x, n = some(3, 5, 16), norm("batch")
    same(n(x).square().mean((0, 1)), torch.ones(16, dtype=torch.float64), 1e-5)
    same(n.square, 0.9 + 0.1 * x.square().mean((0, 1)), 1e-12)
    n.eval()
    same(n(x), x / (n.square + kernels.EPS).sqrt())
