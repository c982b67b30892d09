"""What model.py promises, in float64. Each residual equals its equations, written out once more
from its paper. Then come what all have in common, first weights, refusals, training, sampling."""
import itertools, math, shutil
from functools import partial

import pytest, torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import model as M
from conftest import (TINY, count_flops, decode, gradients, ids, logits, make, same, same_gradients,
                      some, sublayers_by_hand, unit)

pytestmark = pytest.mark.usefixtures("own_residual")

# ----------------------------------------------------------------------------- equations

# An oracle takes a model, the embeddings x (B, T, C), and the options that --residual names. It
# returns the logits. In a block i = 1 .. L are the sublayers l = 2 i - 1 and 2 i.

def norm(n, x):
    """What the norm module n makes of x (..., C), from its definition"""
    if n.kind == "none":
        return x
    if n.kind == "dyt":
        return (n.slope * x).tanh() * n.weight + n.bias
    if n.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return unit(x) * n.weight

def sigmoid(x):
    return 1 / (1 + (-x).exp())

def head(model, x):
    return norm(model.ends.norm, x) @ model.lm_head.weight.T

# The next x, where it is one vector. N: the norm; r: the residual, for its other parameters
STEPS = dict(
    pre=lambda x, f, N, r, i, L: x + f(N(x)),
    template=lambda x, f, N, r, i, L: x + r.b * f(N(x)),
    post=lambda x, f, N, r, i, L: N(x + f(x)),
    peri=lambda x, f, N, r, i, L: x + norm(r.norm_update, f(N(x))),
    reordered=lambda x, f, N, r, i, L: x + N(f(x)),
    deepnorm=lambda x, f, N, r, i, L: N((2 * L) ** 0.25 * x + f(x)),
    lns=lambda x, f, N, r, i, L: x + f(N(x) / i ** 0.5),
    mixln=lambda x, f, N, r, i, L, alpha=0.25:
        N(x + f(x)) if i <= math.floor(alpha * L) else x + f(N(x)))

def one_vector(model, x, **options):
    name, L = model.config.residual.split(":")[0], model.config.n_layer
    for l, residual, f in sublayers_by_hand(model):
        N = partial(norm, residual.norm)
        x = STEPS[name](x, f, N, residual, (l + 1) // 2, L, **options)
    if name in ("post", "deepnorm") or options.get("alpha") == 1:   # The last step has a norm.
        return x @ model.lm_head.weight.T
    return head(model, x)

def denseformer(model, x):
    """arXiv:2402.02622, eqs. 3, 4"""
    outputs = [x]
    for l, residual, f in sublayers_by_hand(model):
        x = x + f(norm(residual.norm, x))
        if l % 2 == 0:
            outputs.append(x)
            x = sum(weight * output for weight, output in zip(residual.weights, outputs))
    return head(model, x)

def review(model, h, inputs="hu", convex=False, **_):
    """arXiv:2606.31859"""
    for l, residual, f in sublayers_by_hand(model):
        u = f(norm(residual.norm, h))
        z = residual.bias
        if "h" in inputs:
            z = z + unit(h, eps=1e-5) @ residual.W["h"].T
        if "u" in inputs:
            z = z + unit(u, eps=1e-5) @ residual.W["u"].T
        gate = sigmoid(z)
        h = (1 - gate) * h + gate * u if convex else h + gate * u
    return head(model, h)

def siamese(model, y):
    """arXiv:2602.08064, and its code"""
    x, ends = y, model.ends
    for l, residual, f in sublayers_by_hand(model):
        x = norm(residual.norm_x, x)
        u = f(norm(residual.norm, x + norm(residual.norm_y, y)))
        x, y = x + u / math.sqrt(2 * ((l + 1) // 2)), y + u
    return head(model, norm(ends.norm_x, x) + norm(ends.norm_y, y))

def attnres(model, x, group=1):
    """arXiv:2603.15031, eqs. 2-4 and section 3.2"""
    sums, ends = {0: x}, model.ends   # number of a group of updates: their sum

    def read(l):
        if l == 1:
            return x
        sources = torch.stack(list(sums.values()))
        keys = unit(sources) * ends.key_weight[l - 2]
        weights = (keys * ends.query[l - 2]).sum(-1, keepdim=True).softmax(0)
        return len(sources) * (weights * sources).sum(0)   # n times the mean

    for l, residual, f in sublayers_by_hand(model):
        update, number = f(norm(residual.norm, read(l))), (l - 1) // group + 1
        sums[number] = sums.get(number, 0) + update
    return head(model, read(2 * model.config.n_layer + 1))

def gated(model, x, n=4):
    """arXiv:2608.30320, sections 2.2 and 3.3, copy by copy"""
    def read(rule, copies):
        r = [unit(R) * weight for R, weight in zip(copies, rule.norm_weight.chunk(n))]
        row = torch.cat(r, dim=-1) / n
        hidden = row @ rule.down.T
        gates = sigmoid((hidden * sigmoid(hidden)) @ rule.up.T).chunk(n, dim=-1)
        return sum(gate * r_i for gate, r_i in zip(gates, r)) / n, row

    copies = [x] * n
    for l, residual, f in sublayers_by_hand(model):
        x, row = read(residual, copies)
        update, s = f(x), 2 * sigmoid(row @ residual.to_write.T)
        copies = [R + s[..., i:i + 1] * update for i, R in enumerate(copies)]
    return read(model.ends, copies)[0] @ model.lm_head.weight.T

def sinkhorn(logits):
    """arXiv:2512.24880, 20 steps; and algorithm 2 of arXiv:1705.09634, which makes sums exact"""
    res = logits.exp()
    for _ in range(20):
        res = res / res.sum(-2, keepdim=True)
        res = res / res.sum(-1, keepdim=True)
    res = res / res.sum(-2, keepdim=True).clamp_min(1)
    lack_i, lack_j = 1 - res.sum(-1), 1 - res.sum(-2)
    total = lack_i.sum(-1).clamp_min(1e-6)[..., None, None]
    return res + lack_i[..., :, None] * lack_j[..., None, :] / total

def permutations(logits, n):
    """arXiv:2601.05732: matrices whose rows are those of the identity, in another order"""
    matrices = [torch.eye(n).double()[list(order)] for order in itertools.permutations(range(n))]
    return torch.einsum("...p,pij->...ij", logits.softmax(-1), torch.stack(matrices))

def hyper(model, x, kind="identity", n=4):
    """arXiv:2512.24880 (mhc), arXiv:2601.05732 (lite), and without res (identity)"""
    X = [x] * n
    sizes = [n, n] + dict(identity=[], mhc=[n * n], lite=[math.factorial(n)])[kind]
    for l, residual, f in sublayers_by_hand(model):
        dynamic = (unit(torch.cat(X, dim=-1)) @ residual.dynamic.T).split(sizes, dim=-1)
        parts = zip(residual.static.split(sizes), residual.scale, dynamic)
        pre, post, *res = [static + scale * logits for static, scale, logits in parts]
        pre, post = sigmoid(pre), 2 * sigmoid(post)
        u = f(norm(residual.norm, sum(pre[..., i:i + 1] * X[i] for i in range(n))))
        if kind != "identity":   # res[..., i, j]: how much of stream j goes to stream i
            res = sinkhorn(res[0].unflatten(-1, (n, n))) if kind == "mhc" else permutations(*res, n)
            X = [sum(res[..., i, j, None] * X[j] for j in range(n)) for i in range(n)]
        X = [X[i] + post[..., i:i + 1] * u for i in range(n)]
    return head(model, sum(X) / n)

def nag(model, x, **_):
    """arXiv:2606.16112, eqs. 3-18, direction and length apart"""
    x = x - x.mean(-1, keepdim=True)
    length = x.square().mean(-1, keepdim=True).sqrt()
    r, s = x / length, length.log() + model.ends.log_scale
    for l, residual, f in sublayers_by_hand(model):
        update = f(r)
        update = update - update.mean(-1, keepdim=True)
        side = update - (update * r).mean(-1, keepdim=True) * r
        near = sigmoid(r @ residual.preferred.T + residual.bias)
        m = (near * residual.votes.softmax(0)).sum(-1, keepdim=True) ** F.softplus(residual.beta)
        gain = residual.alpha * m
        r = (r + gain * unit(side, eps=1e-10)) / (1 + gain ** 2).sqrt()
        s = s + 0.5 * (1 + gain ** 2).log()
    rows = model.lm_head.weight - model.lm_head.weight.mean(-1, keepdim=True)
    return s.exp() * F.normalize(r, dim=-1) @ F.normalize(rows, dim=-1).T

ORACLES = dict.fromkeys(STEPS, one_vector) | dict(
    denseformer=denseformer, review=review, highway=partial(review, inputs="h"),
    convex=partial(review, convex=True), siamese=siamese, attnres=attnres, gated=gated,
    hyper=hyper, nag=nag)

NAMES = [*M.RESIDUALS, "own"]
VARIANTS = [(name, {}) for name in NAMES] + [
    *(("pre", dict(norm=kind)) for kind in ("layer", "single", "dyt", "none")),
    ("pre", dict(activation="swiglu")), ("peri", dict(activation="relu2")),
    ("pre", dict(repeat="2:3")), ("nag", dict(repeat="1-2:2")), ("nag:directions=5,power=8", {}),
    ("mixln:alpha=0.7", {}), ("mixln:alpha=1", {}), ("own:form=dict", {}),
    ("attnres:group=4", dict(norm="layer")), ("attnres:group=99", {}),
    ("review:inputs=u,bias=-1", {}), ("convex:inputs=h,bias=-3", {}),
    ("gated:n=2", dict(n_embd=8)), ("hyper:kind=mhc,n=3", {}), ("hyper:kind=lite,n=3", {})]

@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def model(request):
    residual, config = request.param
    return make(residual, noise=0.4, **config)

def test_a_model_is_its_equations(model):
    """Logits, and in training the gradients of all parameters"""
    name, _, text = model.config.residual.partition(":")
    if name not in ORACLES:
        return   # A residual of your own has no equation but its code.
    options = M.read_options(text, M.option_defaults(M.RESIDUALS[name]), {})
    right = ORACLES[name](model, model.wte(ids()), **options)
    same(logits(model), right.detach())
    his = gradients(model, (right * some(*right.shape)).sum())
    mine, _ = model.train()(ids())
    same_gradients(gradients(model, (mine * some(*right.shape)).sum()), his, 1e-6)
    model.eval()

# ----------------------------------------------------------------------------- what all have

def test_cached_decoding_is_the_full_forward(model):
    """It is not, if a rule looks at later tokens: a cache has none yet."""
    same(decode(model, ids(2, 16), [1, 5, 1, 4, 1, 1, 3]), logits(model, ids(2, 16)))

def test_counted_flops_are_those_of_torch(model):
    for T in 1, 16:
        counted = count_flops(lambda: logits(model, ids(2, T)))
        assert counted == pytest.approx(2 * T * M.flops_per_token(model, T=T), rel=1e-9)
    assert M.flops_per_token(model) == M.flops_per_token(model, T=16)   # its block_size

def test_saved_weights_are_the_whole_model(model):
    other = make(**vars(model.config) | dict(noise=0, seed=7))
    assert not torch.equal(logits(other), logits(model))
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other), logits(model))

@pytest.mark.parametrize("depth", [1, 64])
@pytest.mark.parametrize("residual", NAMES)
def test_first_logits_have_a_sane_size(residual, depth):
    """At every depth, so that the loss starts near that of chance, and gradients come through"""
    model = make(residual, noise=0, dtype=torch.float32, n_layer=depth, n_embd=32)
    out, _ = model(ids(1, 8))
    assert 0.3 < out.std(-1).mean() < 1.2
    found = gradients(model, M.cross_entropy(out, ids(1, 8, seed=1)))
    assert all(g.isfinite().all() for g in found.values()) and found["wte.weight"].any()

@pytest.mark.parametrize("residual", NAMES)
def test_products_in_bfloat16_leave_the_stream_alone(residual):
    """compute_in rounds what sublayers and head compute. In the stream, roundings would add up."""
    model = make(residual, noise=0.05, dtype=torch.float32, n_layer=6)
    exact = logits(model)
    model.compute_in(torch.bfloat16)
    stream, rounded = model.ends.as_tensor(model.walk(ids())[-1]), logits(model)
    assert stream.dtype == rounded.dtype == torch.float32 and (stream.bfloat16() != stream).any()
    assert 0 < (rounded - exact).norm() < 0.2 * exact.norm()   # convex: by up to 0.08

@pytest.mark.parametrize("residual", M.RESIDUALS)
def test_no_tensor_is_on_the_wrong_device(residual):
    """The nearest thing to a GPU that every machine has: torch's meta device, which knows shapes
    only. A tensor that is made on the CPU by mistake does not fit to those of the model."""
    model = M.GPT(M.GPTConfig(residual, **TINY)).to("meta")
    idx = torch.zeros(2, 8, dtype=torch.long, device="meta")
    model(idx, idx)[1].backward()
    assert all(p.grad.device.type == "meta" for p in model.parameters())
    assert decode(model.eval(), idx, [6, 2]).device.type == "meta"

# ----------------------------------------------------------------------------- how models start

@pytest.mark.parametrize("init, wanted", [
    ("width", [3, 0.1, 1 / 8, 1 / 16]), ("gpt2", [0.02] * 4), ("embedding", [3] + [0.02] * 3)])
def test_first_weights_have_their_std(init, wanted):
    model = make("nag", noise=0, init=init, n_embd=64, vocab_size=320)   # It rescales nothing.
    modules = model.wte, model.lm_head, model.blocks[1].attn.c_attn, model.blocks[1].mlp.c_proj
    assert [module.weight.std().item() for module in modules] == pytest.approx(wanted, rel=0.05)

@pytest.mark.parametrize("residual", NAMES)
def test_draws_are_those_of_pre(residual):
    """Up to a factor, wherever two residuals share a matrix. So comparisons are fair."""
    fresh = dict(make(residual, noise=0).named_parameters())
    for name, right in make(noise=0).named_parameters():
        if right.dim() == 2:
            for a, b in zip(fresh[name].split(16), right.split(16)):   # queries and keys apart
                same(a / a.norm(), b / b.norm(), 1e-12)

def test_no_two_parameters_have_the_same_draws():
    matrices = [p for p in make("nag", noise=0, n_layer=12).parameters() if p.dim() == 2]
    seen = {tuple((p / p.std()).flatten()[:4].tolist()) for p in matrices}
    assert len(matrices) == 50 + 24 == len(seen)
    assert not torch.equal(make(noise=0, seed=7).wte.weight, make(noise=0).wte.weight)

@pytest.mark.parametrize("residual, tolerance", [
    ("attnres", 1e-12), ("attnres:group=3", 1e-12), ("template", 1e-14), ("denseformer", 1e-14),
    ("mixln:alpha=0", 1e-14), ("review:bias=40", 1e-12), ("highway:bias=40", 1e-12),
    ("hyper", 1e-6), ("hyper:kind=lite", 1e-6), ("hyper:kind=mhc,n=3", 1e-6)])
def test_starts_as_pre(residual, tolerance):
    """AttnRes without queries above all. Hyper reads 1.04 times the stream, which the epsilon of a
    norm notices."""
    same(logits(make(residual, noise=0)), logits(make("pre", noise=0)), tolerance)

@pytest.mark.parametrize("residual, repeat", [("nag", ""), ("nag:power=0.25", "2-5:3")])
def test_first_logits_of_nag_have_their_size(residual, repeat):
    model = make(residual, noise=0, n_layer=12, n_embd=64, vocab_size=320, repeat=repeat)
    spread = logits(model, ids(4, 16, 320)).std(-1).mean()
    assert spread == pytest.approx(0.8, rel=0.1)

def test_first_values_are_the_papers():
    pre = make(noise=0, n_embd=64).blocks[1]
    assert pre.mlp.c_proj.weight.std().item() == pytest.approx((256 * 6) ** -0.5, rel=0.03)
    small = (8 * 3) ** -0.25   # DeepNorm's factor for values, hidden units and c_proj
    for name, factor, values in (("attnres", 1, 1), ("lns", 6 ** 0.5, 1), ("nag", 6 ** 0.5, 1),
                                 ("deepnorm", small * 6 ** 0.5, small)):   # relative to PreNorm
        block = make(name, noise=0, n_embd=64).blocks[1]
        same(block.mlp.c_proj.weight, factor * pre.mlp.c_proj.weight, 1e-12)
        same(block.attn.c_attn.weight[128:], values * pre.attn.c_attn.weight[128:], 1e-12)
    assert M.MixLN(M.GPTConfig(n_layer=50), 58, alpha=0.58).is_post   # 0.58 * 50 is below 29.
    for l, residual in enumerate(make("hyper:n=3", noise=0).residuals()[:-1]):
        assert residual.static[:3].argmax() == l % 3   # Copies are read in turn.

# ----------------------------------------------------------------------------- numbers at an edge

def test_nag_has_finite_gradients_where_gates_are_shut_and_updates_are_0():
    model = make("nag", noise=0)
    with torch.no_grad():
        model.blocks[0].mlp.c_proj.weight.zero_()
        model.blocks[1].mlp_residual.bias.fill_(-1e4)
        model.blocks[1].mlp_residual.beta.fill_(-3.0)   # At 0, m^0.05 is infinitely steep.
    found = gradients(model, model(ids(), ids(seed=1))[1])
    assert all(g.isfinite().all() for g in found.values())

@pytest.mark.parametrize("n", [2, 4])
def test_mixing_matrices_keep_all_sums_after_a_training_too(n):
    """There, logits of +-50 were seen. 20 Sinkhorn steps alone leave columns off by 0.99."""
    for spread in 0.5, 8.0, 50.0:
        logits = (spread * some(64, n, n)).float().requires_grad_()
        matrix = M.doubly_stochastic(logits)
        same(matrix.sum(-1), torch.ones(64, n), 1e-5)
        same(matrix.sum(-2), torch.ones(64, n), 1e-5)
        assert matrix.min() >= -1e-5
        (matrix * some(n, n).float()).sum().backward()
        assert logits.grad.isfinite().all() and logits.grad.abs().max() < 100

@pytest.mark.parametrize("repeat, order", [
    ("", [0, 1, 2, 3]), ("2:3", [0, 1, 1, 1, 2, 3]), ("2-3:2", [0, 1, 2, 1, 2, 3])])
def test_the_order_of_blocks(repeat, order):
    assert M.block_order(M.GPTConfig(n_layer=4, repeat=repeat)) == order

@pytest.mark.parametrize("config, widths", [
    (dict(taper="cosine"), [384, 320, 192, 128]), (dict(taper="linear", n_layer=1), [256]),
    (dict(taper="cosine", taper_start=0.5, taper_end=1.5), [128, 192, 320, 384]),
    (dict(taper="linear", taper_start=9, taper_end=3), [384, 296, 216, 128]),
    (dict(activation="swiglu"), [171] * 4)])
def test_tapers_have_the_published_profiles(config, widths):
    blocks = make(**dict(n_layer=4, n_embd=64, n_head=4) | config).blocks   # 256 units on average
    assert [block.mlp.c_proj.in_features for block in blocks] == widths

REFUSED = [   # what is wrong, and what the sentence needs to say
    (dict(residual="prenorm"), "prenorm: unknown; choose from pre"),
    (dict(residual="nag:steps=3"), "no option 'steps'"),
    (dict(residual="nag:directions=many"), "whole number"),
    (dict(residual="nag:power=x"), "a number"), (dict(residual="convex:convex=2"), "true or false"),
    (dict(residual="attnres:group=0"), "group=0"), (dict(residual="review:inputs=uh"), "hu"),
    (dict(residual="mixln:alpha=7"), "from 0 to 1"),
    (dict(residual="hyper:kind=mhcc"), "lite, mhc"), (dict(residual="hyper:n=6,kind=lite"), "n=6"),
    (dict(residual="nag", norm="layer"), "--norm layer: --residual nag has no norm"),
    (dict(norm="batch"), "--norm 'batch'"), (dict(n_layer=4097), "must be from 1 to 4096"),
    (dict(n_head=3), "multiple of --n_head 3"), (dict(n_head=16), "multiple of --n_head 16"),
    (dict(repeat="9:3"), "--repeat 9:3"), (dict(repeat="2"), "--repeat 2"),
    (dict(repeat="3-2:2"), "--repeat 3-2:2"), (dict(repeat="1-3:171"), "512 runs at most"),
    (dict(repeat="2:2", residual="attnres"), "the stream of --residual attnres"),
    (dict(mod="skip"), "--mod skip: unknown; choose from all"),
    (dict(mod="gain:rate=0.25"), "--mod gain:rate=0.25: not with --residual pre"),
    (dict(gain_cost=0.1), "--gain_cost 0.1: --residual pre knows no gain"),
    (dict(mod="gain", residual="nag"), "needs a rate, or below"),
    (dict(mod="gain:rate=0.2,below=0.1", residual="nag"), "needs a rate, or below"),
    (dict(mod="coins", residual="siamese"), "its tokens can't skip"),
    (dict(mod="coins", residual="hyper:kind=mhc"), "its tokens can't skip"),
    (dict(mod="router", residual="nag"), "its stream isn't one tensor"),
    (dict(mod="router", residual="gated"), "its stream isn't one tensor"),   # four dimensions
    (dict(mod="router:rate=0.4"), "1 of 3 blocks have a router, too few for this rate"),
    (dict(mod="router:rate=0.5"), "from 0.001 to 0.45")]

@pytest.mark.parametrize("config, words", REFUSED, ids=str)
def test_what_can_not_be_built_is_one_sentence(config, words):
    with pytest.raises(ValueError) as error:
        make(**config)
    assert words in str(error.value) and "\n" not in str(error.value)

def test_problems_are_told_at_once_and_a_context_that_is_too_long_is_refused():
    assert len(M.GPTConfig(n_layer=0, activation="tanh", norm="batch").problems()) == 3
    for pieces in [17], [16, 1]:
        with pytest.raises(ValueError, match="17.*block_size 16"):
            decode(make(), ids(1, 17), pieces)

# ----------------------------------------------------------------------------- training

@pytest.mark.parametrize("residual, config", [
    ("nag", {}), ("attnres", {}), ("pre", dict(mod="router")), ("pre", dict(repeat="2:3"))])
def test_deep_supervision_is_the_mean_over_all_blocks(residual, config):
    model, idx, targets = make(residual, deep_supervision=True, **config), ids(), ids(seed=1)
    trip, found = M.Trip(model.train()), []
    counted = count_flops(lambda: found.append(model(idx, targets, trip=trip)[1]))
    assert counted == pytest.approx(24 * M.flops_per_token(model, trip), rel=1e-9)
    losses = [M.cross_entropy(model.head(stream), targets) for stream in model.walk(idx)[2::2]]
    same(found[0], sum(losses) / len(model.order) + model.decider.loss(trip), 1e-12)
    same(trip.cross_entropy, losses[-1], 1e-12)   # This one is reported.
    last = M.cross_entropy(model.eval()(idx)[0], targets)
    same(model(idx, targets)[1], last, 1e-12)     # In evaluation, it is the only one.

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

@pytest.mark.parametrize("residual, mod", [
    ("pre", "all"), ("nag", "all"), ("attnres", "all"), ("own", "all"), ("dropped", "all"),
    ("gated", "coins:rate=0.3"), ("nag", "gain:below=0.3")])
def test_checkpoints_change_nothing(residual, mod, monkeypatch):
    """Nor what is drawn: dropout's gradients were 117 % off without the random state. The backward
    pass runs sublayers again, but asks nobody who runs."""
    monkeypatch.setitem(M.RESIDUALS, "dropped", Dropped)
    model, ran = make(residual, mod=mod), []
    model.blocks[1].mlp.c_fc.register_forward_hook(lambda *_: ran.append(1))
    same_step(model, checkpoints=True)
    assert len(ran) == 3   # once more in the backward pass

@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler here")
@pytest.mark.parametrize("residual", ["pre", "nag", "attnres:group=3"])
def test_a_step_compiled_by_inductor(residual):
    torch._dynamo.reset()
    same_step(make(residual, dtype=torch.float32, n_layer=2), 1e-4, compiles=True)

@pytest.mark.parametrize("residual, config, checkpoints", [
    *((name, {}, False) for name in NAMES),
    ("nag", dict(gain_cost=0.1), False), ("nag", dict(gain_cost=0.1), True),
    ("attnres:group=3", dict(deep_supervision=True), False), ("pre", dict(mod="router"), False),
    ("nag", dict(gain_cost=0.1, mod="gain:below=0.3"), False),
    ("nag", dict(mod="gain:rate=0.3"), True), ("gated", dict(mod="coins"), False)], ids=str)
def test_compiled_steps_are_those_of_eager_mode(residual, config, checkpoints):
    """Losses, what a Trip knows, and gradients that two parts of a batch add up. The last step
    compiles nothing, though a training's progress has changed what a gain costs."""
    torch._dynamo.reset()
    model, counter = make(residual, n_layer=2, **config).train(), CompileCounterWithBackend("eager")
    net = M.for_training(model, compiles=True, checkpoints=checkpoints, backend=counter,
                         fullgraph=True)

    def step(call, number):
        model.zero_grad()
        found = []
        for part in range(2):
            torch.manual_seed(part)
            trip = M.needed_trip(model, progress=0.4 + 0.1 * number)
            _, loss = call(ids(seed=2 * number + part), ids(seed=9), trip=trip)
            (loss / 2).backward()
            found.append(loss)
            if trip:
                found += [trip.cross_entropy, trip.skipped()]
            if trip and trip.mean_gain() is not None:
                found.append(trip.mean_gain())
        return [*found, *(p.grad for p in model.parameters() if p.grad is not None)]

    for number in range(4):
        graphs = counter.frame_count
        same(step(net, number), step(model, number), 1e-9)
    assert counter.frame_count == graphs
    if "mod" not in config and not checkpoints:   # Where nobody skips, a pass is one graph.
        assert graphs <= 1 + ("gain_cost" in config)
    logits(model.eval())
    assert counter.frame_count == graphs   # Only training is compiled.

# ----------------------------------------------------------------------------- sampling

def test_generate():
    """When the cache is full, it starts anew from the newer half of the context."""
    model = make("nag")
    make_trip = partial(M.Trip, model, without={3})
    generate = partial(model.generate, ids(2, 5), make_trip=make_trip)

    def best(idx):
        return logits(model, idx, trip=make_trip()).argmax(-1)

    out = generate(40, temperature=0)
    assert out.shape == (2, 45) and torch.equal(generate(40, top_k=1), out)
    assert torch.equal(best(out[:, :16])[:, 4:], out[:, 5:17])
    assert torch.equal(best(out[:, 9:17])[:, -1], out[:, 17])
    out = model.generate(ids(2, 10), 4, temperature=0, make_trip=make_trip)
    assert torch.equal(best(out[:, :-1])[:, 9:], out[:, 10:])   # All of the text is read.
    assert make(block_size=1).generate(ids(2, 5), 3).shape == (2, 8)
    trips = [trip for _, trip in M.new_tokens(model, ids(2, 5), 12, make_trip=make_trip)]
    assert len(trips) == 12 and all(trip.answers[2] is False for trip in trips)
    model.n_vocab = 9   # as train.open_run sets it: the rest of the vocabulary is padding
    draws = [generate(12, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert draws[0][:, 5:].max() < 9
    with pytest.raises(ValueError, match="no token to go on from"):
        model.generate(ids(1, 0), 4)

@pytest.mark.parametrize("temperature, top_k", [(1.0, 99), (2.0, None), (2.0, 2)])
def test_a_token_is_drawn_by_its_probability(temperature, top_k):
    """Of the top_k best alone, and more evenly the higher the temperature"""
    model, many = make(n_layer=1, vocab_size=4), torch.zeros(20000, 1, dtype=torch.long)
    drawn = model.generate(many, 1, temperature=temperature, top_k=top_k,
                           generator=torch.Generator().manual_seed(0))
    exact = logits(model, many[:1])[0, -1]
    least = exact.sort().values[-(top_k or 4):][0]
    right = (exact / temperature).masked_fill(exact < least, -math.inf).softmax(0)
    same(drawn[:, 1].bincount(minlength=4) / len(many), right.float(), 0.02)
