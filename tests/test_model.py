"""model.py against the papers, in float64: each residual connection is written once more, stream by
stream, from its paper's equations. Then what all residuals share: initial values, cached decoding,
FLOPs, second derivatives; tapers, repeated blocks, training and sampling."""

import math
import shutil
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import model as M
from conftest import (attention_by_hand, count_flops, decode, gradients, ids, logits, make, randn,
                      rms_norm_by_hand as rms_norm, same, same_gradients, sublayers_by_hand)

pytestmark = pytest.mark.usefixtures("own_residual")

# -----------------------------------------------------------------------------
# the papers' equations
#
# An oracle takes a model, the embeddings x (B, T, C) and the residual's options, and returns logits

def norm(module, x):
    if module.kind == "dyt":
        return (module.alpha * x).tanh() * module.weight
    if module.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return rms_norm(x) * module.weight

def sigmoid(x):
    return 1 / (1 + (-x).exp())

def head(model, x):
    return norm(model.final.norm, x) @ model.lm_head.weight.T

# rules whose stream is one tensor. N: the norm, r: the residual, block = 1 .. L
STEPS = dict(
    pre=lambda x, f, N, r, block, L: x + f(N(x)),
    template=lambda x, f, N, r, block, L: x + r.b * f(N(x)),
    post=lambda x, f, N, r, block, L: N(x + f(x)),
    peri=lambda x, f, N, r, block, L: x + norm(r.norm_out, f(N(x))),
    reordered=lambda x, f, N, r, block, L: x + N(f(x)),
    deepnorm=lambda x, f, N, r, block, L: N((2 * L) ** 0.25 * x + f(x)),
    lns=lambda x, f, N, r, block, L: x + f(N(x) / block ** 0.5),
    mixln=lambda x, f, N, r, block, L, alpha=0.25:
        N(x + f(x)) if block <= math.floor(alpha * L) else x + f(N(x)))

def one_tensor(model, x, **options):
    name, L = model.config.residual.split(":")[0], model.config.n_layer
    for layer_idx, residual, f in sublayers_by_hand(model):
        N = partial(norm, residual.norm)
        x = STEPS[name](x, f, N, residual, layer_idx // 2 + 1, L, **options)
    if name in ("post", "deepnorm") or options.get("alpha") == 1:   # the last sublayer has a norm
        return x @ model.lm_head.weight.T
    return head(model, x)

def x0(model, x):
    """nanochat, modded-nanogpt"""
    embedding = x
    for _, residual, f in sublayers_by_hand(model):
        x = residual.a * x + residual.b * embedding
        x = x + f(norm(residual.norm, x))
    return head(model, x)

def unet(model, x):
    """modded-nanogpt: blocks 0, 1, ... of the first half are added to L - 1, L - 2, ..."""
    L, outputs = model.config.n_layer, {}
    for layer_idx, residual, f in sublayers_by_hand(model):
        block_idx = layer_idx // 2
        mirror = L - 1 - block_idx
        if layer_idx % 2 == 0 and mirror < block_idx:
            x = x + residual.s * outputs[mirror]
        x = x + f(norm(residual.norm, x))
        outputs[block_idx] = x
    return head(model, x)

def denseformer(model, x):
    """arXiv:2402.02622, eqs. 3, 4"""
    outputs = [x]
    for layer_idx, residual, f in sublayers_by_hand(model):
        x = x + f(norm(residual.norm, x))
        if layer_idx % 2 == 1:
            outputs.append(x)
            x = sum(weight * output for weight, output in zip(residual.weights, outputs))
    return head(model, x)

def review(model, h, inputs="hu", convex=False, **_):
    """arXiv:2606.31859"""
    for _, residual, f in sublayers_by_hand(model):
        u = f(norm(residual.norm, h))
        z = residual.bias
        if "h" in inputs:
            z = z + rms_norm(h, eps=1e-5) @ residual.W["h"].T
        if "u" in inputs:
            z = z + rms_norm(u, eps=1e-5) @ residual.W["u"].T
        gate = sigmoid(z)
        h = (1 - gate) * h + gate * u if convex else h + gate * u
    return head(model, h)

def siamese(model, y):
    """arXiv:2602.08064, and the released code"""
    x, final = y, model.final
    for layer_idx, residual, f in sublayers_by_hand(model):
        x = norm(residual.norm_x, x)
        u = f(norm(residual.norm, x + norm(residual.norm_y, y)))
        x, y = x + u / math.sqrt(2 * (layer_idx // 2 + 1)), y + u
    return head(model, norm(final.norm_x, x) + norm(final.norm_y, y))

def attnres(model, x, group=1):
    """arXiv:2603.15031, eqs. 2 to 4 and section 3.2: b_0 is the embedding, b_n the sum of the
    updates of group n so far"""
    b = [x]

    def read(residual):
        if len(b) == 1:
            return b[0]
        phi = [(residual.query * rms_norm(k) * residual.key_weight).sum(-1).exp() for k in b]
        return sum(phi_i[..., None] * v for phi_i, v in zip(phi, b)) / sum(phi)[..., None]

    for layer_idx, residual, f in sublayers_by_hand(model):
        update = f(norm(residual.norm, read(residual)))
        if layer_idx % group == 0:
            b.append(update)
        else:
            b[-1] = b[-1] + update
    return head(model, read(model.final))

def gated(model, x, n=4):
    """arXiv:2608.30320, sections 2.2 and 3.3"""
    def read(residual, R):
        weights = residual.norm_weight.chunk(n)
        r = [rms_norm(R[i]) * weights[i] for i in range(n)]
        row = torch.cat(r, dim=-1) / n
        hidden = row @ residual.down.T
        gates = sigmoid((hidden * sigmoid(hidden)) @ residual.up.T).chunk(n, dim=-1)
        return sum(gates[i] * r[i] for i in range(n)) / n, row

    R = [x] * n
    for _, residual, f in sublayers_by_hand(model):
        x, row = read(residual, R)
        update, s = f(x), 2 * sigmoid(row @ residual.to_write.T)
        R = [R[i] + s[..., i:i + 1] * update for i in range(n)]
    return read(model.final, R)[0] @ model.lm_head.weight.T

def hyper(model, x, kind="hc", n=4):
    """arXiv:2409.19606, algorithm 2, or arXiv:2512.24880, eqs. 7 to 9; stream by stream"""
    H = [x] * n
    for _, residual, f in sublayers_by_hand(model):
        read, write, mix = (hc_weights if kind == "hc" else mhc_weights)(residual, H, n, kind)
        u = f(norm(residual.norm, sum(read[i] * H[i] for i in range(n))))
        H = [sum(mix[i][j] * H[j] for j in range(n)) + write[i] * u for i in range(n)]
    total = sum(H)
    return head(model, total if kind == "hc" else total / n)

# both return numbers per token, (B, T, 1): read[i], write[i], and mix[i][j], how much of stream j
# goes to stream i

def hc_weights(residual, H, n, kind):
    """eqs. 10 to 13: A_r[j][i] is how much of stream j goes to stream i"""
    A_m, B, A_r = residual.static[:n], residual.static[n:2 * n], residual.static[2 * n:].view(n, n)
    s_m, s_b, s_r = residual.scale
    W_m, W_b, W_r = residual.dynamic[0], residual.dynamic[1], residual.dynamic[2:]
    H_bar = [rms_norm(h) for h in H]
    def dynamic(i, w):
        return (H_bar[i] * w).sum(-1, keepdim=True).tanh()
    read = [A_m[i] + s_m * dynamic(i, W_m) for i in range(n)]
    write = [B[i] + s_b * dynamic(i, W_b) for i in range(n)]
    mix = [[A_r[j, i] + s_r * dynamic(j, W_r[i]) for j in range(n)] for i in range(n)]
    return read, write, mix

def mhc_weights(residual, X, n, kind):
    row = rms_norm(torch.cat(X, dim=-1)) @ residual.dynamic.T
    def part(k, start, stop):   # logits of part k: static, and dynamic
        return residual.static[start:stop] + residual.scale[k] * row[..., start:stop]
    read = sigmoid(part(0, 0, n))
    write = 2 * sigmoid(part(1, n, 2 * n))
    if kind == "identity":
        mix = torch.eye(n).double().expand(*row.shape[:-1], n, n)
    else:
        mix = part(2, 2 * n, 2 * n + n * n).unflatten(-1, (n, n)).exp()
        for _ in range(300):   # Sinkhorn's algorithm, until it converges
            mix = mix / mix.sum(-2, keepdim=True)
            mix = mix / mix.sum(-1, keepdim=True)
    per_stream = lambda x: [x[..., i, None] for i in range(n)]
    return per_stream(read), per_stream(write), [per_stream(mix[..., i, :]) for i in range(n)]

def nag(model, x, **_):
    """arXiv:2606.16112, eqs. 3 to 18: a direction r of rms 1, and s = log(length)"""
    x = x - x.mean(-1, keepdim=True)
    length = x.square().mean(-1, keepdim=True).sqrt()
    r, s = x / length, length.log() + model.final.log_scale
    for _, residual, f in sublayers_by_hand(model):
        u = f(r)
        u = u - u.mean(-1, keepdim=True)
        u = u - (u * r).mean(-1, keepdim=True) * r
        u = u / (u.square().mean(-1, keepdim=True) + 1e-10).sqrt()
        m = (sigmoid(r @ residual.w.T + residual.b) * residual.p.softmax(0)).sum(-1, keepdim=True)
        gate = residual.alpha * m ** F.softplus(residual.beta)
        r = (r + gate * u) / (1 + gate ** 2).sqrt()
        s = s + 0.5 * (1 + gate ** 2).log()
    rows = model.lm_head.weight - model.lm_head.weight.mean(-1, keepdim=True)
    return s.exp() * F.normalize(r, dim=-1) @ F.normalize(rows, dim=-1).T

ORACLES = dict.fromkeys(STEPS, one_tensor) | dict(
    x0=x0, unet=unet, denseformer=denseformer, review=review, siamese=siamese, attnres=attnres,
    highway=partial(review, inputs="h"), convex=partial(review, convex=True), gated=gated,
    hyper=hyper, nag=nag)

VARIANTS = [(name, {}) for name in M.RESIDUALS] + [
    ("pre", dict(norm="dyt")), ("pre", dict(activation="swiglu")),
    ("post", dict(norm="layer", activation="relu2")), ("pre", dict(repeat="1:3")),
    ("nag", dict(repeat="0-1:2")),
    ("nag:directions=5,power=8", {}), ("mixln:alpha=0.7", {}), ("mixln:alpha=1", {}),
    ("unet", dict(n_layer=4)), ("attnres:group=3", {}), ("attnres:group=4", dict(norm="layer")),
    ("attnres:group=99", {}), ("review:inputs=u,bias=-1", {}), ("convex:inputs=h,bias=-3", {}),
    ("gated:n=2", dict(n_embd=8)), ("hyper:n=3", {}), ("hyper:kind=mhc", {}),
    ("hyper:kind=mhc,n=3", {}), ("hyper:kind=identity,n=3", {})]

def name_of(variant):
    return "-".join([variant[0], *(f"{k}={v}" for k, v in variant[1].items())])

@pytest.fixture(scope="module", params=VARIANTS + [("own", {})], ids=name_of)
def model(request):
    residual, config = request.param
    model = make(residual, noise=0.4, **config)
    if "mhc" in residual:   # towards equal logits, where 20 of Sinkhorn's steps converge
        for residual in model.residuals():
            residual.static.data[2 * residual.n:] *= 0.1
            residual.dynamic.data *= 0.1
    return model

def test_logits_and_gradients_equal_the_papers_equations(model):
    name, _, options = model.config.residual.partition(":")
    if name not in ORACLES:
        pytest.skip("a user's own residual")
    options = M.read_options(options, M.RESIDUALS[name])
    right = ORACLES[name](model, model.wte(ids()), **options)
    mine = model(ids())[0]
    same(mine, right)
    g = randn(*right.shape)
    right = gradients(model, (right * g).sum())
    assert all(gradient.any() for gradient in right.values())   # no parameter is without use
    same_gradients(gradients(model, (mine * g).sum()), right, 1e-6)

# -----------------------------------------------------------------------------
# what all residuals share

def test_cached_decoding_equals_the_full_pass(model):
    same(decode(model, ids(2, 16), [1, 5, 1, 4, 1, 1, 3]), logits(model, ids(2, 16)))

def test_later_tokens_and_other_sequences_change_nothing(model):
    idx = ids(2, 12)
    other = idx.clone()
    other[0, 7:] = ids(1, 5, seed=1)
    other[1] = ids(1, 12, seed=2)
    assert torch.equal(logits(model, idx)[0, :7], logits(model, other)[0, :7])
    assert not torch.allclose(logits(model, idx)[0, 7:], logits(model, other)[0, 7:])

def test_flops_equal_those_of_torch(model):
    """flops_per_token counts a pass over block_size tokens. torch counts no products of a matrix
    and a vector: the scores of Attention Residuals."""
    counted = count_flops(lambda: logits(model, ids(2, 16)))
    if isinstance(model.final, M.AttnRes):
        counted += 2 * 16 * sum(residual.flops() for residual in [*model.residuals(), model.final])
    assert counted == pytest.approx(2 * 16 * M.flops_per_token(model), rel=1e-9)

def test_state_dict_is_the_whole_model(model):
    other = make(**vars(model.config) | dict(noise=0, seed=7))
    assert not torch.equal(logits(other), logits(model))
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other), logits(model))
    assert "rotary" not in model.state_dict()   # a checkpoint fits any block_size

@pytest.mark.parametrize("residual", [*M.RESIDUALS, "attnres:group=3", "hyper:kind=mhc"])
def test_hessian_vector_products_equal_difference_quotients(residual):
    """With plain autograd. (Attention's fused kernels have no second derivative in torch.)"""
    model = make(residual, noise=0.1, n_layer=2, n_embd=8, vocab_size=16)
    params, idx = list(model.parameters()), ids(2, 6, V=16)
    v = [randn(*p.shape, seed=i) for i, p in enumerate(params)]

    def gradient(**options):
        loss = model(idx, idx.roll(-1, 1))[1]
        return torch.autograd.grad(loss, params, **options)

    def gradient_at(step):
        for p, direction in zip(params, v):
            p.data.add_(direction, alpha=step)
        return torch.cat([g.flatten() for g in gradient()])

    with sdpa_kernel(SDPBackend.MATH):
        slope = sum((g * direction).sum() for g, direction in zip(gradient(create_graph=True), v))
        product = torch.cat([g.flatten() for g in torch.autograd.grad(slope, params)])
        eps = 1e-5
        quotient = (gradient_at(eps) - gradient_at(-2 * eps)) / (2 * eps)
    assert (product - quotient).norm() < 1e-5 * quotient.norm()

@pytest.mark.parametrize("residual", M.RESIDUALS)
def test_products_in_bfloat16_leave_the_stream_in_float32(residual):
    model, tensors = make(residual, noise=0.05, dtype=torch.float32, n_layer=6), []
    policy = (lambda trace: ids() > 20) if model.final.can_skip else None   # some tokens skip
    exact = logits(model, trace=M.Trace(model, policy))
    model.compute_in(torch.bfloat16)
    for block in model.blocks:
        for sublayer in block.attn, block.mlp:
            sublayer.register_forward_hook(lambda sublayer, args, out: tensors.append(out))
    trace = M.Trace(model, policy, keep_streams=True)
    rounded = logits(model, trace=trace)
    M.map_stream(tensors.append, trace.streams[-1])
    for tensor in [rounded, *tensors]:
        assert tensor.dtype == torch.float32
    assert (tensors[-1].bfloat16() != tensors[-1]).any()
    assert torch.equal(rounded.bfloat16(), rounded)   # as the head is a product, too
    assert 0 < (rounded - exact).norm() < 0.2 * exact.norm()
    assert logits(model.bfloat16()).isfinite().all()

@pytest.mark.parametrize("residual", M.RESIDUALS)
def test_no_tensor_is_on_the_wrong_device(residual):
    """torch's meta device stands for a GPU: a tensor made on the CPU would not fit."""
    model = make(residual, dtype=torch.float32).to("meta")
    idx = torch.zeros(2, 8, dtype=torch.long, device="meta")
    model(idx, idx)[1].backward()
    assert decode(model, idx, [6, 2]).device.type == "meta"

inductor = partial(pytest.param, "inductor", marks=[pytest.mark.slow, pytest.mark.skipif(
    not shutil.which("g++"), reason="torch.compile needs a C++ compiler")])

@pytest.mark.parametrize("backend, residual", [
    ("eager", "pre"), ("eager", "nag"), ("eager", "attnres:group=3"), ("eager", "hyper:kind=mhc"),
    ("eager", "unet"), inductor("pre"), inductor("nag")])
def test_compiled_pass_equals_the_eager_one(backend, residual):
    """--compile, where no token skips: a pass is one graph."""
    torch._dynamo.reset()
    model, found = make(residual, n_layer=2).train(), []
    for call in model, torch.compile(model, backend=backend, fullgraph=True):
        loss = call(ids(), ids(seed=1))[1]
        found.append((loss.detach(), gradients(model, loss)))
    same(found[1][0], found[0][0])
    same_gradients(found[1][1], found[0][1])

# -----------------------------------------------------------------------------
# initial values

@pytest.mark.parametrize("init, stds", [("width", [3, 0.1, 1 / 8, 1 / 16]), ("gpt2", [0.02] * 4)])
def test_initial_weights_have_their_std(init, stds):
    model = make("nag", noise=0, init=init, n_embd=64, vocab_size=320)   # nag rescales none
    modules = model.wte, model.lm_head, model.blocks[1].attn.c_attn, model.blocks[1].mlp.c_proj
    assert [module.weight.std().item() for module in modules] == pytest.approx(stds, rel=0.05)

@pytest.mark.parametrize("residual", [*M.RESIDUALS, "own"])
def test_initial_weights_of_all_residuals_are_equal(residual):
    """Up to a factor, wherever two residuals share a matrix, so comparisons are paired."""
    others = dict(make(residual, noise=0).named_parameters())
    for name, weight in make(noise=0).named_parameters():
        if weight.dim() == 2:
            for a, b in zip(others[name].split(16), weight.split(16)):   # values apart
                same(a / a.norm(), b / b.norm(), 1e-12)

def test_initial_weights_differ_by_name_and_seed():
    matrices = [p for p in make("nag", noise=0, n_layer=12).parameters() if p.dim() == 2]
    assert len(matrices) == 2 + 12 * (4 + 2)
    assert len({tuple((p / p.std()).flatten()[:4].tolist()) for p in matrices}) == len(matrices)
    gates = [r.to_write / r.to_write.norm() for r in make("gated", noise=0).residuals()]
    assert not torch.allclose(gates[0], gates[1])
    assert not torch.equal(make(noise=0, seed=7).wte.weight, make(noise=0).wte.weight)

@pytest.mark.parametrize("residual, tolerance", [
    ("template", 1e-14), ("x0", 1e-14), ("denseformer", 1e-14), ("mixln:alpha=0", 1e-14),
    ("review:bias=40", 1e-12), ("highway:bias=40", 1e-12), ("hyper", 1e-4),
    ("hyper:kind=identity", 1e-5), ("hyper:kind=mhc,n=3", 1e-5)])
def test_starts_as_prenorm(residual, tolerance):
    """Up to a factor that a norm takes out, but for its eps: n streams add up to n times x."""
    same(logits(make(residual, noise=0)), logits(make("pre", noise=0)), tolerance)

@pytest.mark.parametrize("residual", ["attnres", "attnres:group=3", "attnres:group=4"])
def test_attnres_starts_as_prenorm(residual):
    """Queries start at 0: a mean of all sources is their sum, up to a factor."""
    model = make(residual, noise=0)
    assert not any(r.query.any() for r in [*model.residuals()[1:], model.final])
    same(logits(model), logits(make("pre", noise=0)), 1e-4)

def test_deepnorm_factors():
    """arXiv:2203.00555: beta = (8 L)^(-1/4) scales values, hidden units and outputs; --init draws
    them. alpha = (2 L)^(1/4) is in the equations above."""
    L, C = 5, 16
    deepnorm = make("deepnorm", noise=0, n_layer=L).blocks[1]
    plain = make("nag", noise=0, n_layer=L).blocks[1]   # scales nothing
    beta = (8 * L) ** -0.25
    same(deepnorm.attn.c_attn.weight[2 * C:], beta * plain.attn.c_attn.weight[2 * C:], 1e-12)
    same(deepnorm.attn.c_attn.weight[:2 * C], plain.attn.c_attn.weight[:2 * C], 1e-12)
    for name in "attn.c_proj", "mlp.c_fc", "mlp.c_proj":
        same(deepnorm.get_submodule(name).weight, beta * plain.get_submodule(name).weight, 1e-12)

def test_c_proj_starts_smaller_by_sqrt_of_2L():
    plain = make("nag", noise=0).blocks[1]
    for name, factor in ("pre", 6 ** -0.5), ("attnres", 6 ** -0.5), ("own", 6 ** -0.5), ("lns", 1):
        block = make(name, noise=0).blocks[1]
        for part in "attn.c_proj", "mlp.c_proj":
            same(block.get_submodule(part).weight, factor * plain.get_submodule(part).weight, 1e-12)
        same(block.attn.c_attn.weight, plain.attn.c_attn.weight, 1e-12)

@pytest.mark.parametrize("residual, config", [
    ("nag", {}), ("nag", dict(init="gpt2")), ("nag:power=0.25", dict(repeat="1-4:3"))])
def test_initial_logits_of_nag_have_std_08(residual, config):
    model = make(residual, noise=0, n_layer=12, n_embd=64, vocab_size=320, **config)
    assert logits(model, ids(4, 16, 320)).std(-1).mean() == pytest.approx(0.8, rel=0.1)

def test_initial_values_of_the_residuals():
    nag = make("nag:power=0.7", noise=0).residuals()
    alphas = [l ** -0.7 for l in range(1, 7)]   # eq. 24
    assert [r.alpha.item() for r in nag] == pytest.approx(alphas)
    assert F.softplus(nag[3].beta).item() == pytest.approx(1)
    assert nag[3].w.std().item() == pytest.approx(16 ** -0.5, rel=0.1)   # as of random directions
    assert not nag[3].b.any() and not nag[3].p.any()
    for layer_idx, r in enumerate(make("hyper:n=3", noise=0).residuals()):
        assert r.static[:3].tolist() == torch.eye(3)[layer_idx % 3].tolist()
        assert r.static[3:].tolist() == [1] * 3 + torch.eye(3).flatten().tolist()
        assert not r.dynamic.any() and r.scale.tolist() == pytest.approx([0.01] * 3)
    for layer_idx, r in enumerate(make("hyper:kind=mhc,n=3", noise=0).residuals()):
        X = randn(1, 1, 3, 16)
        read, write, mix = r.weights(X)
        assert read.argmax() == layer_idx % 3
    gated = make("gated", noise=0, n_embd=64).residuals()[2]
    for name, n_in in ("down", 4 * 64), ("up", 8), ("to_write", 4 * 64):
        assert getattr(gated, name).std().item() == pytest.approx(n_in ** -0.5, rel=0.1)
    assert make("unet").residuals()[4].s.item() != 1 and make("unet", noise=0).residuals()[4].s == 1
    assert [name for name, _ in make("unet").named_parameters() if name.endswith(".s")] == [
        "blocks.2.attn_residual.s"]   # of three blocks, the middle one has no mirror image

OWN_PARAMS = dict(template="b", x0="a b", unet="s", attnres="query key_weight",
                  gated="down up to_write", nag="alpha beta w b p log_scale")

@pytest.mark.parametrize("name", M.RESIDUALS)
def test_own_params_are_those_that_adamw_trains(name):
    model = make(name)
    own = {param for r in [*model.residuals(), model.final] for param in r.own_params}
    assert own == set(OWN_PARAMS.get(name, "").split())
    has = {param for r in [*model.residuals(), model.final] for param, _ in r.named_parameters()}
    assert own <= has

# -----------------------------------------------------------------------------
# mistakes that well-known implementations made: the table in model.py's part 2

def hyper_alone(kind, n=3):
    """A residual of hyper-connections without dynamic weights, its part of `static` that mixes, and
    a random stream."""
    residual = make(f"hyper:kind={kind},n={n}", noise=0, n_layer=1).blocks[0].mlp_residual
    return residual, residual.static.data[2 * n:].view(n, n), randn(1, 1, n, 16)

@pytest.mark.parametrize("kind", ["hc", "mhc"])
def test_hyper_mixing_is_applied(kind):
    """Two streams change places if the matrix says so, and u = 0 adds nothing."""
    residual, mix, X = hyper_alone(kind, n=2)
    swap = torch.tensor([[0, 1], [1, 0]])
    mix.copy_(swap if kind == "hc" else 80 * swap - 40)
    same(residual(X, torch.zeros_like), X.flip(-2))

@pytest.mark.parametrize("kind", ["hc", "mhc"])
def test_hyper_mixing_is_not_transposed(kind):
    """hc: A_r[i, j] is how much of stream i goes to stream j (the paper: A_r^T H). mhc: H_res[i, j]
    is how much of stream j goes to stream i (H_res X)."""
    residual, mix, X = hyper_alone(kind)
    cycle = torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]])
    mix.copy_(cycle if kind == "hc" else 80 * cycle - 40)
    right = [2, 0, 1] if kind == "hc" else [1, 2, 0]
    same(residual(X, torch.zeros_like), X[..., right, :])

@pytest.mark.parametrize("kind, threshold", [("hc", 0.02), ("mhc", 5e-5)])
def test_hyper_mixing_leaves_its_start(kind, threshold):
    """A short training moves the static and the dynamic part of the matrix."""
    model = make(f"hyper:kind={kind},n=2", noise=0).train()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for step in range(30):
        model(ids(seed=step % 3), ids(seed=step % 3))[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    for residual in model.residuals()[1:]:   # at first, all streams are equal
        X = randn(2, 5, 2, 16)
        mix = residual.weights(X)[2].reshape(10, 4)
        at_first = make(f"hyper:kind={kind},n=2", noise=0).residuals()[1].weights(X)[2]
        assert (mix - at_first.reshape(10, 4)).abs().max() > threshold
        assert mix.std(0).max() > threshold / 1000   # the dynamic part, too

def test_attnres_sources():
    """The embedding is a source once, not twice, and every sublayer has as many sources as the
    paper says: the embedding, each group that is complete, and the sum of the current group."""
    for group in 1, 3, 4:
        model = make(f"attnres:group={group}", n_layer=4)
        trace = M.Trace(model, keep_streams=True)
        logits(model, trace=trace)
        n_sources = [len(sources) for sources, keys in trace.streams]
        assert n_sources == [1 + math.ceil(l / group) for l in range(9)]
        flops = [residual.flops() for residual in [*model.residuals(), model.final]]
        assert flops == [0] + [2 * 16 * n for n in n_sources[1:]]   # a score per source
        sources, keys = trace.streams[-1]
        same(sources[0], model.wte(ids()).detach())
        assert len(keys) == len(sources)
        for source, key in zip(sources, keys):
            same(key, rms_norm(source))

@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("spread", [0.5, 8.0, 50.0])
def test_mhc_matrices_are_doubly_stochastic(n, spread):
    """Also for logits of +-50, as trained models have: there, 20 of Sinkhorn's steps leave columns
    off by 0.99."""
    logits = (spread * randn(64, n, n)).float().requires_grad_()
    matrix = M.sinkhorn(logits)
    same(matrix.sum(-1), torch.ones(64, n), 1e-5)
    same(matrix.sum(-2), torch.ones(64, n), 1e-5)
    assert matrix.min() >= -1e-5
    (matrix * randn(n, n).float()).sum().backward()
    assert logits.grad.isfinite().all() and logits.grad.abs().max() < 100

def test_nag_gradients_are_finite():
    """Where the update is 0, the embedding constant, or m is 0 and m^beta infinitely steep"""
    model = make("nag", noise=0, dtype=torch.float32)
    with torch.no_grad():
        model.wte.weight[ids()[0, 0]] = 1.0
        model.blocks[0].mlp.c_proj.weight.zero_()
        model.blocks[1].mlp_residual.b.fill_(-1e4)
        model.blocks[1].mlp_residual.beta.fill_(-3.0)
    found = gradients(model, model(ids(), ids(seed=1))[1])
    assert all(g.isfinite().all() for g in found.values())

def test_nag_streams_are_centered_directions_of_rms_1():
    model = make("nag", noise=0.4)
    trace = M.Trace(model, keep_streams=True)
    logits(model, trace=trace)
    for x, log_length in trace.streams:
        same(x.square().mean(-1), torch.ones(2, 12).double(), 1e-6)
        same(x.mean(-1), torch.zeros(2, 12).double(), 1e-6)

# -----------------------------------------------------------------------------
# settings

@pytest.mark.parametrize("repeat, order", [
    ("", [0, 1, 2, 3]), ("1:3", [0, 1, 1, 1, 2, 3]), ("0-1:2", [0, 1, 0, 1, 2, 3]),
    ("2-3:1", [0, 1, 2, 3])])
def test_block_order(repeat, order):
    assert M.block_order(M.GPTConfig(n_layer=4, repeat=repeat)) == order

@pytest.mark.parametrize("config, widths", [
    (dict(taper="cosine"), [384, 320, 192, 128]), (dict(taper="linear", n_layer=1), [256]),
    (dict(taper="cosine", taper_start=0.5, taper_end=1.5), [128, 192, 320, 384]),
    (dict(taper="linear", taper_start=9, taper_end=3), [384, 296, 216, 128]),
    (dict(activation="swiglu"), [171] * 4), (dict(mlp_ratio=0.5), [32] * 4)])
def test_tapers_have_the_published_widths(config, widths):
    blocks = make(**dict(n_layer=4, n_embd=64, n_head=4) | config).blocks   # the mean is 256
    assert [block.mlp.c_proj.in_features for block in blocks] == widths

def test_options():
    assert int(0.58 * 50) == 28   # a rounding error: 29 blocks are meant
    assert make("mixln:alpha=0.58", n_layer=50, n_embd=4).residuals()[57].is_post
    assert make("mixln:alpha=0.5", n_layer=4).residuals()[4].is_post is False
    assert make("template:start=0.5", noise=0).residuals()[0].b == 0.5

REFUSED = [   # settings, and words of the sentence
    (dict(residual="prenorm"), "prenorm: unknown; choose from pre, "),
    (dict(residual="nag:steps=3"), "option steps"), (dict(residual="attnres:group=0"), "group=0"),
    (dict(residual="hyper:kind=mhcc"), "hc, mhc, identity"),
    (dict(n_layer=0), "n_layer"), (dict(n_head=16), "even multiple"),
    (dict(n_head=3), "even multiple of --n_head 3"),
    *((dict(repeat=text), f"--repeat {text}: give blocks of 0 to 2")
      for text in ("3:3", "2", "2-1:2", "1:513", "1:0", "1:2x")),
    *((dict(repeat="1:2", residual=name), "has a part per sublayer")
      for name in ("attnres:group=3", "denseformer", "unet")),
    (dict(mod="skip"), "--mod skip: unknown; choose from none, gate"),
    (dict(mod="gate:rate=0.25"), "--residual pre has no gate; use nag"),
    (dict(mod="gate", residual="nag"), "either rate or below"),
    (dict(mod="gate:rate=0.2,below=0.1", residual="nag"), "either rate or below"),
    (dict(gate_loss=0.1), "--gate_loss 0.1: --residual pre has no gate"),
    *((dict(mod="random", residual=name), "tokens can't skip")
      for name in ("siamese", "unet", "attnres", "denseformer", "hyper", "hyper:kind=mhc")),
    *((dict(mod="router", residual=name), "isn't (B, T, C)") for name in ("nag", "gated")),
    *((dict(norm="layer", residual=name), "has its own") for name in ("nag", "gated")),
    (dict(mod="router:rate=0.4"), "too few blocks have a router"),
    (dict(mod="router:rate=0.25", n_layer=4, repeat="2:5"), "too few blocks have a router")]

@pytest.mark.parametrize("config, words", REFUSED, ids=str)
def test_settings_that_make_no_model_are_refused_in_one_sentence(config, words):
    with pytest.raises(M.UserError) as error:
        make(**config)
    assert words in str(error.value) and "\n" not in str(error.value)

def test_more_tokens_than_block_size_are_refused():
    for lengths in [17], [16, 1]:
        with pytest.raises(M.UserError, match="17 tokens do not fit into block_size 16"):
            decode(make(), ids(1, 17), lengths)
    assert decode(make(), ids(1, 16), [16]).shape == (1, 16, 64)

# -----------------------------------------------------------------------------
# training and sampling

@pytest.mark.parametrize("residual", ["pre", "nag", "attnres"])
def test_deep_supervision_is_the_mean_over_all_blocks(residual):
    model, idx, targets = make(residual, deep_supervision=True), ids(), ids(seed=1)
    keep = M.Trace(model, keep_streams=True)
    logits(model, trace=keep)
    losses = [F.cross_entropy(model.logits(stream).flatten(0, 1), targets.flatten())
              for stream in keep.streams[2::2]]
    trace = M.Trace(model.train())
    counted, found = [], []
    counted = count_flops(lambda: found.append(model(idx, targets, trace=trace)))
    if residual != "attnres":   # torch counts no products of a matrix and a vector
        assert counted == pytest.approx(24 * M.flops_per_token(model, trace), rel=1e-9)
    assert found[0][0] is None and len(losses) == 3
    same(found[0][1], sum(losses) / 3, 1e-12)
    same(model(idx, targets)[1], sum(losses) / 3, 1e-12)   # makes its own trace
    same(trace.cross_entropy, losses[-1].detach(), 1e-12)  # of the last block, which is reported
    assert not trace.cross_entropy.requires_grad
    same(model.eval()(idx, targets)[1], losses[-1], 1e-12)
    assert M.flops_per_token(model) == M.flops_per_token(make(residual))

def test_loss_is_the_mean_cross_entropy():
    model, idx, targets = make(), ids(), ids(seed=1)
    out, loss = model(idx, targets)
    right = -out.log_softmax(-1).gather(-1, targets[..., None]).mean()
    same(loss, right, 1e-12)
    assert model(idx)[1] is None
    out, loss = model.train()(idx, targets)
    assert out is None
    same(loss, right, 1e-12)

def test_generate():
    """When the cache is full, it starts again with the newer half of the text."""
    model = make("nag")
    make_trace = partial(M.Trace, model, removed=[2])
    generate = partial(model.generate, ids(2, 5), make_trace=make_trace)

    def best(idx):
        return logits(model, idx, trace=make_trace()).argmax(-1)

    out = generate(40, temperature=0)
    assert out.shape == (2, 45) and torch.equal(generate(40, top_k=1), out)
    assert torch.equal(out[:, :5], ids(2, 5))
    assert torch.equal(best(out[:, :16])[:, 4:], out[:, 5:17])
    assert torch.equal(best(out[:, 9:25])[:, 7:], out[:, 17:26])   # the newer half, then more
    assert not torch.equal(model.generate(ids(2, 5), 40, temperature=0), out)   # nothing removed
    long = ids(30, 20)
    after = model.generate(long, 1, temperature=0, make_trace=make_trace)
    assert torch.equal(after, torch.cat((long, best(long[:, -16:])[:, -1:]), dim=1))
    assert make(block_size=1).generate(ids(2, 5), 3).shape == (2, 8)
    draws = [generate(12, n_vocab=9, generator=torch.Generator().manual_seed(seed))
             for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert draws[0][:, 5:].max() < 9   # the rest of the vocabulary is padding

@pytest.mark.parametrize("temperature, top_k", [(1.0, 99), (2.0, None), (2.0, 2)])
def test_tokens_are_drawn_by_their_probability(temperature, top_k):
    model, many = make(n_layer=1, vocab_size=4), torch.zeros(20000, 1, dtype=torch.long)
    drawn = model.generate(many, 1, temperature=temperature, top_k=top_k,
                           generator=torch.Generator().manual_seed(0))
    exact = logits(model, many[:1])[0, -1]
    least = exact.sort().values[-(top_k or 4):][0]
    right = (exact / temperature).masked_fill(exact < least, -math.inf).softmax(0)
    same(drawn[:, 1].bincount(minlength=4) / len(many), right.float(), 0.02)
