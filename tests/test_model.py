"""What model.py promises, in float64: every variant equals its equations, written out once more in a plain
loop, and has the properties that all share. First values, refusals, shapes, graphs."""
import inspect, itertools, math, shutil
from functools import partial

import pytest, torch
import torch.nn as nn
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.decomposition import select_decomp_table

import model as M
from conftest import (TINY, count_flops, decode, gradients, ids, logits, make, same, same_gradients, some,
                      streams, sublayers_by_hand, unit)

# ----------------------------------------------------------------------------- equations

def norm(model, n, x):
    """The norm module n of a model at x (..., C), from its definition"""
    kind = model.config.norm
    if kind == "dyt":
        return (n.slope * x).tanh() * n.weight + n.bias
    x = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    return x if kind == "none" else unit(x) * n.weight

def additive_row(name, L, i, alpha):
    """norm_in, norm_update, norm_out, a, b, s of x <- norm_out(a x + b norm_update(f(s norm_in(x)))), and
    whether the last stream is normalised, from the papers. i: number of the block; None: b is learned"""
    if name == "mixln":
        return (0, 0, 1, 1, 1, 1, alpha < 1) if i <= math.floor(alpha * L) else (1, 0, 0, 1, 1, 1, 1)
    return dict(
        pre=(1, 0, 0, 1, 1, 1, 1), template=(1, 0, 0, 1, None, 1, 1),
        post=(0, 0, 1, 1, 1, 1, 0), peri=(1, 1, 0, 1, 1, 1, 1),
        reordered=(0, 1, 0, 1, 1, 1, 1), lns=(1, 0, 0, 1, 1, i ** -0.5, 1),
        deepnorm=(0, 0, 1, (2 * L) ** 0.25, 1, 1, 0))[name]

def additive(model, x, alpha=0.25, **_):
    name, L = model.config.residual.split(":")[0], model.config.n_layer
    for l, residual, f in sublayers_by_hand(model):
        norm_in, norm_update, norm_out, a, b, s, norm_final = additive_row(name, L, (l + 1) // 2, alpha)
        u = f(s * norm(model, residual.norm, x) if norm_in else s * x)
        if norm_update:
            u = norm(model, residual.norm_update if norm_in else residual.norm, u)
        x = a * x + (residual.b if b is None else b) * u
        x = norm(model, residual.norm, x) if norm_out else x
    x = norm(model, model.ends.norm, x) if norm_final else x
    return x @ model.lm_head.weight.T

def denseformer(model, x):
    """arXiv:2402.02622, eqs. 3, 4"""
    outputs = [x]
    for l, residual, f in sublayers_by_hand(model):
        x = x + f(norm(model, residual.norm, x))
        if l % 2 == 0:
            outputs.append(x)
            x = torch.einsum("i,ibtc->btc", residual.weights, torch.stack(outputs))
    return norm(model, model.ends.norm, x) @ model.lm_head.weight.T

def review(model, h, inputs="hu", convex=False, **_):
    for l, residual, f in sublayers_by_hand(model):
        u = f(norm(model, residual.norm, h))
        z = residual.bias
        for name, seen in (("h", h), ("u", u)):
            if name in inputs:
                z = z + (seen / (seen.square().mean(-1, keepdim=True) + 1e-5).sqrt()) @ residual.W[name].T
        r = 1 / (1 + (-z).exp())
        h = (1 - r) * h + r * u if convex else h + r * u
    return norm(model, model.ends.norm, h) @ model.lm_head.weight.T

def nag(model, x, **_):
    """arXiv:2606.16112, eqs. 3-18, direction and norm apart"""
    C = x.shape[-1]
    x = x - x.mean(-1, keepdim=True)
    rho = x.norm(dim=-1, keepdim=True) / C ** 0.5
    r, s = x / rho, rho.log() + model.ends.log_scale
    for l, residual, f in sublayers_by_hand(model):
        update = f(r)
        update = update - update.mean(-1, keepdim=True)
        update = update - (update * r).sum(-1, keepdim=True) / C * r
        u = unit(update, eps=1e-10)
        near = torch.sigmoid(r @ residual.preferred.T + residual.bias)
        m = (near * residual.votes.softmax(0)).sum(-1, keepdim=True) ** F.softplus(residual.beta)
        gain = residual.alpha * m
        r = (r + gain * u) / (1 + gain ** 2).sqrt()
        s = s + 0.5 * (1 + gain ** 2).log()
    rows = model.lm_head.weight - model.lm_head.weight.mean(-1, keepdim=True)
    return s.exp() * F.normalize(r, dim=-1) @ F.normalize(rows, dim=-1).T

def gated(model, x, n=4):
    """arXiv:2608.30320, sections 2.2 and 3.3, copy by copy"""
    def read(rule, copies):
        r = [unit(R) * weight for R, weight in zip(copies, rule.norm_weight.chunk(n))]
        row = torch.cat(r, dim=-1) / n
        hidden = row @ rule.down.T
        gates = torch.sigmoid((hidden * hidden.sigmoid()) @ rule.up.T).chunk(n, dim=-1)
        return sum(gate * r_i for gate, r_i in zip(gates, r)) / n, row

    copies = [x] * n
    for l, residual, f in sublayers_by_hand(model):
        x, row = read(residual, copies)
        update, s = f(x), 2 / (1 + (-row @ residual.to_write.T).exp())
        copies = [R + s[..., i:i + 1] * update for i, R in enumerate(copies)]
    return read(model.ends, copies)[0] @ model.lm_head.weight.T

def attnres(model, x, group=1):
    """arXiv:2603.15031, eqs. 2-4 and section 3.2"""
    sums, ends = {0: x}, model.ends   # number of the group: the sum of its updates

    def read(l, n):
        sources = torch.stack(list(sums.values()))
        if l == 1:
            return norm(model, n, x)
        keys = unit(sources) * ends.key_weight[l - 2]
        weights = (keys * ends.query[l - 2]).sum(-1, keepdim=True).softmax(0)
        return norm(model, n, len(sources) * (weights * sources).sum(0))

    for l, residual, f in sublayers_by_hand(model):
        update, number = f(read(l, residual.norm)), (l - 1) // group + 1
        sums[number] = sums.get(number, 0) + update
    return read(2 * model.config.n_layer + 1, ends.norm) @ model.lm_head.weight.T

def siamese(model, y):
    x = y
    for l, residual, f in sublayers_by_hand(model):
        x = norm(model, residual.norm_x, x)
        u = f(norm(model, residual.norm, x + norm(model, residual.norm_y, y)))
        x, y = x + u / math.sqrt(2 * ((l + 1) // 2)), y + u
    end = model.ends
    h = norm(model, end.norm, norm(model, end.norm_x, x) + norm(model, end.norm_y, y))
    return h @ model.lm_head.weight.T

def sinkhorn(logits):
    """arXiv:2512.24880, 20 steps; and algorithm 2 of arXiv:1705.09634, which makes the sums exact"""
    res = logits.exp()
    for _ in range(20):
        res = res / res.sum(-2, keepdim=True)
        res = res / res.sum(-1, keepdim=True)
    res = res / res.sum(-2, keepdim=True).clamp_min(1)
    lack_i, lack_j = 1 - res.sum(-1), 1 - res.sum(-2)
    total = lack_i.sum(-1).clamp_min(1e-6)[..., None, None]
    return res + lack_i[..., :, None] * lack_j[..., None, :] / total

def hyper(model, x, kind="identity", n=4):
    """arXiv:2512.24880 (mhc), arXiv:2601.05732 (lite), and without res (identity)"""
    X = [x] * n
    for l, residual, f in sublayers_by_hand(model):
        sizes = [n, n, dict(identity=0, mhc=n * n, lite=math.factorial(n))[kind]]
        dynamic = (unit(torch.cat(X, dim=-1)) @ residual.dynamic.T).split(sizes, dim=-1)
        static = residual.static.split(sizes)
        pre, post, *res = [static[i] + residual.scale[i] * dynamic[i] for i in range(len(residual.scale))]
        pre, post = 1 / (1 + (-pre).exp()), 2 / (1 + (-post).exp())
        u = f(norm(model, residual.norm, sum(pre[..., i:i + 1] * X[i] for i in range(n))))
        mixed = X
        if kind == "lite":   # res[..., i, j]: how much of stream j goes to stream i
            orders = zip(res[0].softmax(-1).unbind(-1), itertools.permutations(range(n)))
            res = sum(p[..., None, None] * torch.eye(n, dtype=x.dtype)[list(order)] for p, order in orders)
        if kind == "mhc":
            res = sinkhorn(res[0].unflatten(-1, (n, n)))
        if kind != "identity":
            mixed = [sum(res[..., i, j, None] * X[j] for j in range(n)) for i in range(n)]
        X = [mixed[i] + post[..., i:i + 1] * u for i in range(n)]
    return norm(model, model.ends.norm, sum(X) / n) @ model.lm_head.weight.T

# ----------------------------------------------------------------------------- the variants

class Momentum(M.Residual):
    """A residual that a reader might write, whose stream is x and a decaying sum of what was added to it."""
    def __init__(self, config, l, keep=0.5):
        super().__init__(config, l)
        if self.has_sublayer:
            self.keep = nn.Parameter(torch.tensor(keep))

    def start(self, x):
        return x, x.clone()   # torch.compile would make one more graph for a tensor that comes twice

    def forward(self, stream, f):
        x, added = stream
        added = self.keep * added + f(self.norm(x))
        return x + added, added

ADDITIVE = "pre", "template", "post", "peri", "reordered", "lns", "deepnorm", "mixln"
ORACLES = dict.fromkeys(ADDITIVE, additive) | dict(
    denseformer=denseformer, nag=nag, attnres=attnres, siamese=siamese, gated=gated, hyper=hyper,
    review=review, highway=partial(review, inputs="h"), convex=partial(review, convex=True))

NAMES = [*M.RESIDUALS, "momentum"]
VARIANTS = [(name, {}) for name in NAMES] + [
    ("mixln", dict(n_layer=5)), ("mixln:alpha=0.7", {}), ("mixln:alpha=1", {}),
    *(("pre", dict(norm=kind)) for kind in ("layer", "single", "dyt", "none")), ("post", dict(norm="layer")),
    ("peri", dict(activation="relu2")), ("pre", dict(activation="swiglu")),
    ("pre", dict(init="gpt2")), ("momentum:keep=0.3", {}), ("nag:directions=5,power=8", {}),
    ("attnres:group=2", {}), ("attnres:group=4", dict(norm="layer")), ("attnres:group=99", {}),
    ("review:inputs=u,bias=-1", {}), ("convex:inputs=h,bias=-3", {}), ("gated:n=2", dict(n_embd=8)),
    ("hyper:kind=mhc,n=3", {}), ("hyper:kind=lite,n=3", {}),
    ("attnres", dict(taper="linear")), ("pre", dict(repeat="2:3")), ("nag", dict(repeat="1-2:2")),
    ("siamese", dict(repeat="2-3:2")), ("hyper", dict(repeat="2:2")),
    ("review", dict(deep_supervision=True)), ("nag", dict(deep_supervision=True))]

@pytest.fixture(autouse=True, scope="module")
def own_residual():
    with pytest.MonkeyPatch.context() as patch:
        if "momentum" not in M.RESIDUALS:   # A reader may have put README's there.
            patch.setitem(M.RESIDUALS, "momentum", Momentum)
        yield

@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def model(request):
    """A model of each variant, made once. given: the config's fields but for the residual"""
    residual, given = request.param
    model = make(residual, noise=0.4, **given)
    model.given = given
    return model

def test_a_model_is_its_equations(model):
    """Logits, and in training the gradients of all parameters"""
    name, _, text = model.config.residual.partition(":")
    if name not in ORACLES:
        return   # A residual of your own has no equation but its code.
    written = M.read_options(text, M.option_defaults(M.RESIDUALS[name]), {})
    right = ORACLES[name](model, model.wte(ids()), **written)
    same(logits(model.eval()), right.detach())
    his = gradients(model, (right * some(*right.shape)).sum())
    mine = model.train()(ids())[0]
    same_gradients(gradients(model, (mine * some(*right.shape)).sum()), his, 1e-6)
    model.eval()

# ----------------------------------------------------------------------------- properties of all variants

def test_cached_decoding_is_the_full_forward(model):
    """It is not, if a rule looks at later tokens: a cache has none yet."""
    same(decode(model, ids(2, 16), [1, 5, 1, 4, 1, 1, 3]), logits(model, ids(2, 16)))

def test_counted_flops_are_those_of_torch(model):
    for T in (1, 7, 16):
        counted = count_flops(lambda: logits(model, ids(2, T)))
        assert counted == pytest.approx(2 * T * M.flops_per_token(model, T=T), rel=1e-9)
    assert M.flops_per_token(model) == M.flops_per_token(model, T=16)   # its block_size

def test_saved_weights_are_the_whole_model(model):
    fresh = make(model.config.residual, noise=0, seed=7, **model.given)
    assert not torch.equal(logits(fresh), logits(model))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(logits(fresh), logits(model))

@pytest.mark.parametrize("residual", NAMES)
def test_draws_are_those_of_pre(residual):
    """Up to a factor, wherever two residuals share a matrix"""
    fresh = dict(make(residual, noise=0).named_parameters())
    for name, right in make(noise=0).named_parameters():
        if right.dim() == 2:
            for a, b in zip(fresh[name].split(16), right.split(16)):   # queries, keys and values apart
                same(a / a.norm(), b / b.norm(), 1e-12)

def test_first_logits_have_a_sane_size(model):
    """A standard deviation of about 0.5 with --init width, so that the loss starts near that of chance"""
    if model.config.init == "gpt2" or model.config.norm in ("dyt", "none"):   # Nothing sets the last size.
        return
    config = model.given | dict(n_embd=64, vocab_size=320)
    out = logits(make(model.config.residual, noise=0, dtype=torch.float32, **config), ids(4, 16, 320))
    assert 0.3 < out.std(-1).mean() < 1.2

@pytest.mark.parametrize("repeat, order", [("", [0, 1, 2, 3]), ("2:3", [0, 1, 1, 1, 2, 3]), ("2-3:2", [0, 1, 2, 1, 2, 3]),
                                           ("4:2", [0, 1, 2, 3, 3])])
def test_the_order_of_blocks(repeat, order):
    assert M.block_order(M.GPTConfig(n_layer=4, repeat=repeat)) == order

@pytest.mark.parametrize("init, wanted", [("width", (3, 0.1, 1 / 8, 1 / 16)), ("gpt2", (0.02,) * 4),
                                          ("embedding", (3, 0.02, 0.02, 0.02))])
def test_first_weights_have_their_std(init, wanted):
    model = M.GPT(M.GPTConfig("nag", 2, init=init, n_embd=64, vocab_size=320))   # It rescales nothing.
    block = model.blocks[1]
    weights = [module.weight for module in (model.wte, model.lm_head, block.attn.c_attn, block.mlp.c_proj)]
    assert [weight.std().item() for weight in weights] == pytest.approx(wanted, rel=0.05)

@pytest.mark.parametrize("residual, repeat", [("nag", ""), ("nag:power=0.25", "2-5:3")])
def test_first_logits_of_nag_have_their_size(residual, repeat):
    model = make(residual, noise=0, n_layer=12, n_embd=64, vocab_size=320, repeat=repeat)
    assert logits(model, ids(4, 16, 320)).std(-1).mean() == pytest.approx(0.8, rel=0.1)

@pytest.mark.parametrize("depth", [1, 64])
@pytest.mark.parametrize("residual", NAMES)
def test_depths_1_and_64_run(residual, depth):
    model = make(residual, noise=0, dtype=torch.float32, n_layer=depth, n_embd=8)
    loss = model(ids(1, 8), ids(1, 8, seed=1))[1]
    grads = gradients(model, loss)
    assert 2 < loss < 10 and all(g.isfinite().all() for g in grads.values()) and grads["wte.weight"].any()

@pytest.mark.parametrize("residual", NAMES)
def test_products_in_bfloat16_leave_the_stream_alone(residual):
    """compute_in rounds what sublayers and head compute. In the stream, roundings would add up."""
    model = make(residual, noise=0.05, dtype=torch.float32, n_layer=6)
    exact = [*streams(model), logits(model)]
    model.compute_in(torch.bfloat16)
    rounded = [*streams(model), logits(model)]
    assert all(x.dtype == torch.float32 for x in rounded) and torch.equal(rounded[0], exact[0])
    for ours, other in zip(rounded[-2:], exact[-2:]):
        assert 0 < (ours - other).norm() < 0.2 * other.norm()   # convex: by up to 0.08
    stream = model.walk(ids())[-1]
    model.compute_in(None)
    assert not torch.equal(model.head(stream), rounded[-1])

# ----------------------------------------------------------------------------- how residuals start

@pytest.mark.parametrize("residual, tolerance, config", [
    ("attnres", 1e-12, {}), ("attnres:group=5", 1e-12, dict(norm="layer")), ("template", 1e-14, {}),
    ("denseformer", 1e-14, {}), ("mixln:alpha=0", 1e-14, {}), ("review:bias=40", 1e-12, {}),
    ("highway:bias=40", 1e-12, {}), ("hyper", 1e-6, {}), ("hyper:kind=lite", 1e-6, {}),
    ("hyper:kind=mhc,n=3", 1e-6, {})])
def test_starts_as_pre(residual, tolerance, config):
    """AttnRes without queries above all, for which no epsilon is touched. Hyper reads 1.04 times the
    stream, which the epsilon of the norm notices."""
    config = dict(n_layer=5) | config
    pre, model = make(**config), make(residual, noise=0, **config)
    for name, p in pre.named_parameters():
        if p.dim() == 1:   # Norms stay at 1, because their names may differ.
            torch.nn.init.ones_(p)
    model.load_state_dict(pre.state_dict(), strict=False)
    same(logits(model), logits(pre), tolerance)

def test_first_values_are_the_papers():
    """Of c_proj relative to the (2L)^-1/2 of PreNorm. DeepNorm's values have a factor, too."""
    pre = make(noise=0, n_embd=64).blocks[1]
    assert pre.mlp.c_proj.weight.std().item() == pytest.approx((256 * 6) ** -0.5, rel=0.03)
    deep, root = 24 ** -0.25, 6 ** 0.5
    factors = dict(attnres=1, lns=root, nag=root, deepnorm=deep * root)
    for name, c_proj in factors.items():
        block = make(name, noise=0, n_embd=64).blocks[1]
        same(block.mlp.c_proj.weight, c_proj * pre.mlp.c_proj.weight, 1e-12)
        scale = deep if name == "deepnorm" else 1
        same(block.attn.c_attn.weight[128:], scale * pre.attn.c_attn.weight[128:], 1e-12)
    assert all((residual.bias == 0).all() for residual in make("convex", noise=0).residuals()[:-1])
    assert M.MixLN(M.GPTConfig(n_layer=50), 58, alpha=0.58).is_post   # 0.58 * 50 is below 29.
    for l, residual in enumerate(make("hyper:n=3", noise=0).residuals()[:-1]):
        assert residual.static[:3].argmax() == l % 3   # Streams are read in turn.
    for residual in make("nag:directions=7", noise=0).residuals()[:-1]:
        assert residual.preferred.shape == (7, 16) and not residual.bias.any() and not residual.votes.any()

def test_no_two_parameters_have_the_same_draws():
    model = make("nag", noise=0, n_layer=12, n_embd=32)
    drawn = {name: p for name, p in model.named_parameters() if p.dim() == 2}
    seen = {tuple((p / p.std()).flatten()[:4].tolist()) for p in drawn.values()}
    assert len(drawn) == 50 + 24 == len(seen)
    assert not torch.equal(make(noise=0, seed=7).wte.weight, make(noise=0).wte.weight)

def test_nag_has_finite_gradients_where_gates_are_shut_and_updates_are_0():
    model = make("nag", noise=0)
    with torch.no_grad():
        model.blocks[0].mlp.c_proj.weight.zero_()
        model.blocks[1].mlp_residual.bias.fill_(-1e4)
        model.blocks[1].mlp_residual.beta.fill_(-3.0)   # The slope of m^0.05 at m = 0 would be infinite.
    assert all(g.isfinite().all() for g in gradients(model, model(ids(), ids(seed=1))[1]).values())

@pytest.mark.parametrize("residual, bound", [("hyper:kind=mhc", 1e-5), ("hyper:kind=mhc,n=2", 1e-5), ("hyper:kind=lite", 1e-6)])
def test_mixing_matrices_keep_all_sums_after_a_training_too(residual, bound):
    """There, logits of +-50 were seen. 20 Sinkhorn steps alone leave columns that are off by 0.99."""
    rule = make(residual, noise=0, dtype=torch.float32).blocks[0].mlp_residual
    n, size = rule.n, rule.static.numel() - 2 * rule.n
    for spread in 0.5, 8.0, 50.0:
        logits = (spread * some(64, size)).float().requires_grad_()
        if "lite" in residual:
            matrix = (logits.softmax(-1) @ rule.permutations).unflatten(-1, (n, n))
        else:
            matrix = M.doubly_stochastic(logits.unflatten(-1, (n, n)))
        for axis in -1, -2:
            same(matrix.sum(axis), torch.ones(64, n), bound)
        assert matrix.min() >= -bound
        (matrix * some(n, n).float()).sum().backward()
        assert logits.grad.isfinite().all() and logits.grad.abs().max() < 100
        # So the mean of the streams is what it was, plus what the sublayer has added.
        streams = some(64, n, 5).float()
        same((matrix @ streams).mean(-2), streams.mean(-2), 10 * bound)

def test_the_loop_is_three_calls_away_from_an_attention():
    """GPT.forward, Block.forward, Residual.forward, what knows positions and cache, Attention.forward"""
    model, seen = make(), []
    class Spy(M.Attention):
        def forward(self, *given, **named):
            frames = [frame for frame in inspect.stack() if frame.filename == M.__file__]
            seen.append([frame.function for frame in frames])
            return super().forward(*given, **named)
    model.blocks[1].attn.__class__ = Spy
    logits(model)
    assert seen == [["__call__", "forward", "forward", "forward"]]   # and the spy's own, of this file

# ----------------------------------------------------------------------------- refusals

REFUSED = [   # what is wrong, and words that the sentence needs
    (dict(residual="prenorm"), ["--residual", "prenorm", "attnres", "momentum"]),
    (dict(residual="nag:steps=3"), ["nag", "no option 'steps'", "directions"]),
    (dict(residual="nag:directions=many"), ["directions", "whole number"]),
    (dict(residual="nag:power=x"), ["power", "a number"]),
    (dict(residual="convex:convex=2"), ["convex", "true or false"]),
    (dict(residual="attnres:group=0"), ["group=0"]), (dict(residual="review:inputs=uh"), ["inputs", "hu"]),
    (dict(residual="mixln:alpha=7"), ["mixln", "alpha=7", "from 0 to 1"]),
    (dict(residual="hyper:kind=mhcc"), ["kind", "mhc"]),
    (dict(residual="hyper:n=6,kind=lite"), ["n=6", "5"]),
    *((dict(residual=name, norm="layer"), ["--norm layer", name]) for name in ("nag", "gated")),
    (dict(norm="batch"), ["--norm 'batch'", "rms"]), (dict(mlp_ratio=math.nan), ["--mlp_ratio nan"]),
    *((dict(n_head=wrong), ["--n_embd 16", f"--n_head {wrong}"]) for wrong in (3, 16)),
    (dict(n_layer=4097), ["--n_layer 4097: must be from 1 to 4096"]),
    *((dict(repeat=wrong), [f"--repeat {wrong}"])
      for wrong in ("9:3", "2", "3-2:2", "2:0", "1-3:171")),   # 513 runs of blocks
    (dict(repeat="2:2", residual="attnres"), ["--repeat", "attnres"]),
    (dict(mod="skip"), ["--mod skip", "coins"]),
    (dict(mod="gain:rate=0.25"), ["--mod gain", "use nag"]), (dict(gain_cost=0.1), ["--gain_cost 0.1", "use nag"]),
    *((dict(mod=mod, residual="nag"), ["rate", "below"]) for mod in ("gain", "gain:rate=0.2,below=0.1")),
    *((dict(mod="coins", residual=name), ["--mod coins", name])
      for name in ("attnres", "denseformer", "hyper:kind=mhc", "siamese")),
    *((dict(mod="router", residual=name), ["--mod router", name]) for name in ("nag", "gated", "hyper")),
    (dict(mod="router:rate=0.2", n_layer=1), ["0 of 1 blocks have a router"]),
    (dict(mod="router:rate=0.4"), ["1 of 3 blocks have a router, too few for this rate"]),
    (dict(mod="router:rate=0.4", n_layer=5), ["2 of 5 blocks have a router, too few"]),
    (dict(mod="router:rate=0.5"), ["rate=0.5", "from 0.001 to 0.45"])]

@pytest.mark.parametrize("config, words", REFUSED, ids=str)
def test_what_can_not_be_built_is_one_sentence(config, words):
    found = M.config_problems(M.GPTConfig(**(dict(n_layer=3, n_head=2, n_embd=16) | config)))
    assert len(found) == 1 and "\n" not in found[0] and all(word in found[0] for word in words), found
    with pytest.raises(ValueError) as error:
        make(**config)
    assert found[0] in str(error.value)

def test_problems_are_told_at_once_and_a_context_that_is_too_long_is_refused():
    assert len(M.config_problems(M.GPTConfig(n_layer=0, activation="tanh", norm="batch"))) == 3
    for pieces in [17], [16, 1]:
        with pytest.raises(ValueError, match="17.*block_size 16"):
            decode(make(), ids(1, 17), pieces)

# ----------------------------------------------------------------------------- shapes, graphs, text

def test_tapers_have_the_published_profiles():
    size = dict(n_layer=4, n_embd=64, n_head=4)   # 256 hidden units on average
    for given, right in ((dict(taper="cosine"), [384, 320, 192, 128]), (dict(activation="swiglu"), [171] * 4),
                         (dict(taper="linear", n_layer=1), [256]),
                         (dict(taper="cosine", taper_start=0.5, taper_end=1.5), [128, 192, 320, 384]),
                         (dict(taper="linear", taper_start=9, taper_end=3), [384, 296, 216, 128])):
        blocks = make(**(size | given)).blocks
        assert [block.mlp.c_proj.in_features for block in blocks] == right

@pytest.mark.parametrize("residual, config", [
    ("nag", {}), ("attnres", {}), ("pre", dict(mod="router")), ("pre", dict(repeat="2:3"))])
def test_deep_supervision_is_the_mean_over_all_blocks(residual, config):
    model, idx, targets = make(residual, deep_supervision=True, **config), ids(), ids(seed=1)
    def losses():   # after a router has weighed what its block changes
        return [F.cross_entropy(model.head(after).flatten(0, 1), targets.flatten())
                for after in model.walk(idx)[2::2]]
    trip = M.Trip(model.train())
    found = []
    counted = count_flops(lambda: found.append(model(idx, targets, trip=trip)[1]))
    same(found[0], sum(losses()) / len(model.order) + model.decider.loss(trip), 1e-12)
    same(trip.cross_entropy, losses()[-1], 1e-12)   # This one is reported.
    assert counted == pytest.approx(24 * M.flops_per_token(model, trip), rel=1e-9)
    same(model.eval()(idx, targets)[1], losses()[-1], 1e-12)

def same_step(model, tolerance=1e-6, **options):
    """Whether for_training gives the loss and gradients of the model"""
    found = []
    for call in model.train(), M.for_training(model, **options):
        torch.manual_seed(0)
        none, loss = call(ids(), ids(seed=1))
        assert none is None
        found.append((loss.detach(), gradients(model, loss)))
    same(found[1][0], found[0][0], tolerance)
    same_gradients(found[1][1], found[0][1], tolerance)

class Dropped(M.Residual):
    """PreNorm with dropout, as a reader might write it"""
    def forward(self, x, f):
        return x + F.dropout(f(self.norm(x)), 0.5, self.training)

@pytest.mark.parametrize("residual", ["pre", "nag", "attnres", "hyper", "gated", "momentum", "dropped"])
def test_checkpoints_change_nothing(residual, monkeypatch):
    """Nor what is drawn: dropout's gradients were 117 % off without the random state."""
    monkeypatch.setitem(M.RESIDUALS, "dropped", Dropped)
    model, ran = make(residual), []
    model.blocks[1].mlp.c_fc.register_forward_hook(lambda *_: ran.append(1))
    same_step(model, checkpoints=True)
    assert len(ran) == 3   # once more in the backward pass

@pytest.mark.parametrize("residual, config, graphs, also_checkpoints", [
    *((name, {}, 1, False) for name in NAMES),
    ("nag", dict(gain_cost=0.1), 1, False), ("pre", dict(deep_supervision=True), 1, False),
    ("attnres:group=3", dict(deep_supervision=True), 1, False), ("nag", dict(gain_cost=0.1), None, True),
    ("nag", dict(gain_cost=0.1, mod="gain:below=0.3"), None, False), ("pre", dict(mod="router"), None, False),
    ("nag", dict(mod="gain:rate=0.3"), None, True), ("gated", dict(mod="coins"), None, False)], ids=str)
def test_compiled_steps_are_those_of_eager_mode(residual, config, graphs, also_checkpoints):
    """Loss, what a Trip knows, and gradients that two parts of a batch add up. Where nobody skips, a pass is one
    graph, also if a training's progress changes what a gain costs; later steps compile nothing."""
    def steps(net):
        found = []
        for step in range(4):
            model.zero_grad()
            for part in range(2):
                torch.manual_seed(part)
                trip = M.needed_trip(model, progress=0.4 + 0.1 * step)
                _, loss = net(ids(seed=2 * step + part), ids(seed=9), trip=trip)
                (loss / 2).backward()
                known = [trip.cross_entropy, torch.tensor(trip.skipped())] if trip else []
                if trip and trip.mean_gain() is not None:
                    known.append(trip.mean_gain().detach())
                found.append([loss.detach(), *known, *[torch.zeros(1) if p.grad is None else p.grad.clone() for p in model.parameters()]])
            counts.append(counter.frame_count)
        return found
    torch._dynamo.reset()
    model, counter, counts = make(residual, n_layer=2, **config).train(), CompileCounterWithBackend("eager"), []
    right = steps(model)
    net = M.for_training(model, compiles=True, checkpoints=also_checkpoints, backend=counter, fullgraph=True)
    for mine, its in zip(steps(net), right, strict=True):
        for a, b in zip(mine, its, strict=True):
            same(a, b, 1e-9)
    assert counts[-1] == counts[-2], "a graph anew in a later step"
    assert not graphs or counts[-1] <= graphs + (config.get("gain_cost", 0) > 0), counts
    whole = logits(model.eval())
    if "coins" not in config.get("mod", ""):
        same(decode(model, ids(), [4] + [1] * 8), whole)
    assert counter.frame_count == counts[-1]   # Only training is compiled.

@pytest.mark.parametrize("residual", ["pre", pytest.param("attnres:group=3", marks=pytest.mark.slow)])
def test_no_logits_in_float32_leave_a_compiled_graph(residual):
    """Neither as a result, nor for the backward pass. Those in bfloat16 do."""
    model, idx, left = make(residual, dtype=torch.float32, vocab_size=192, n_layer=1).train(), ids(), []
    model.compute_in(torch.bfloat16)
    def look(graph, _):
        outputs = [node.meta["val"] for node in graph.graph.output_node().args[0] if isinstance(node, torch.fx.Node)]
        left.extend((x.dtype, x.numel()) for x in outputs if torch.is_tensor(x))
        return make_boxed_func(graph)
    net = M.for_training(model, compiles=True, fullgraph=True, backend=aot_autograd(
        fw_compiler=look, bw_compiler=look, decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition))
    torch._dynamo.reset()
    none, loss = net(idx, idx)
    loss.backward()
    size = idx.numel() * 192
    assert none is None and (torch.float32, size) not in left and (torch.bfloat16, size) in left, left

@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler here")
@pytest.mark.parametrize("residual", ["pre", "nag", "attnres:group=3"])
def test_a_step_compiled_by_inductor(residual):
    torch._dynamo.reset()
    model = make(residual, dtype=torch.float32, n_layer=2)
    same_step(model, 1e-4, compiles=True)

def test_generate():
    """When the cache is full, it starts anew from the newer half of the context, and goes on from there."""
    model = make("nag")
    make_trip = partial(M.Trip, model, without={3})
    generate = partial(model.generate, ids(2, 5), make_trip=make_trip)

    def best(idx):
        return logits(model, idx, trip=make_trip()).argmax(-1)

    out = generate(40, temperature=0)
    assert out.shape == (2, 45) and torch.equal(generate(40, top_k=1), out)
    assert torch.equal(best(out[:, :16])[:, 4:], out[:, 5:17])
    assert torch.equal(best(out[:, 9:17])[:, -1], out[:, 17])
    out = model.generate(ids(2, 10), 4, temperature=0, make_trip=make_trip)   # All of the text is read.
    assert torch.equal(best(out[:, :-1])[:, 9:], out[:, 10:])
    assert make(block_size=1).generate(ids(2, 5), 3).shape == (2, 8)
    trips = [trip for _, trip in M.new_tokens(model, ids(2, 5), 12, make_trip=make_trip)]
    assert len(trips) == 12 and all(trip.answers[2] is False for trip in trips)
    model.n_vocab = 9   # as train.open_run sets it
    draws = [generate(12, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert draws[0][:, 5:].max() < 9   # The rest of the vocabulary is padding.
    with pytest.raises(ValueError, match="no token to go on from"):
        model.generate(ids(1, 0), 4)

def test_a_token_is_drawn_by_its_probability():
    """Of the top_k best alone, and more evenly the higher the temperature"""
    model, many = make(n_layer=1, vocab_size=4, block_size=2), torch.zeros(20000, 1, dtype=torch.long)
    exact = logits(model, many[:1])[0, -1]
    for temperature, top_k in (1.0, 99), (2.0, None), (2.0, 2):
        drawn = model.generate(many, 1, temperature=temperature, top_k=top_k, generator=torch.Generator().manual_seed(0))
        least = exact.sort().values[-(top_k or 4):][0]
        right = (exact / temperature).masked_fill(exact < least, -math.inf).softmax(0)
        same(drawn[:, 1].bincount(minlength=4) / len(many), right.float(), 0.02)

@pytest.mark.parametrize("residual", M.RESIDUALS)
def test_no_tensor_is_on_the_wrong_device(residual):
    """The nearest thing to a GPU that every machine has: torch's meta device, which knows shapes only. A
    tensor that is made on the CPU by mistake does not fit to those of the model."""
    gpt = M.GPT(M.GPTConfig(residual, **TINY)).to("meta")
    idx = torch.zeros(2, 8, dtype=torch.long, device="meta")
    gpt(idx, idx)[1].backward()
    assert all(p.grad.device.type == "meta" for p in gpt.parameters())
    gpt, cache = gpt.eval(), M.KVCache(gpt.config.block_size)
    for part in idx[:, :6], idx[:, 6:]:
        found, _ = gpt(part, cache=cache)
        assert found.device.type == "meta" and found.shape == (2, part.shape[1], 64)
