"""
Attention Residuals against a loop over sources that is written from the paper's equations (arXiv:2603.15031)
and knows nothing of shared passes, lists that grow, or hand-derived gradients: values and gradients of all
parameters, for every option and with sublayers left out. Then the two kernels by themselves.
"""
import pytest
import torch

import kernels
import model as M
from test_residuals import build, ids, logits, no_eps, perturb, same  # noqa: F401
from test_variants import saved_bytes

L, N = 6, 12   # blocks, sublayers
OPTIONS = [
    *(dict(attnres_block=S) for S in (1, 2, 3, 4, 5, 6, 12, 13)),
    *(dict(attnres_blocks=n) for n in (1, 2, 3, 12)),
    dict(attnres_weights="sigmoid"), dict(attnres_weights="static"), dict(attnres_key_norm=False),
    dict(attnres_window=1), dict(attnres_window=3), dict(attnres_window=3, attnres_weights="sigmoid"),
    dict(attnres_window=3, attnres_weights="static"), dict(attnres_window=3, attnres_key_norm=False),
    dict(attnres_block=4, attnres_weights="sigmoid", attnres_key_norm=False),
    dict(attnres_block=4, attnres_weights="static"), dict(attnres_block=2, attnres_key_norm=False),
    dict(attnres_block=4, norm="layer"), dict(norm="seednorm"), dict(norm="none", attnres_blocks=4)]
every = pytest.mark.parametrize("flags", OPTIONS, ids=str)


def unit(x):
    return x / x.square().mean(-1, keepdim=True).sqrt()


def reference(model, idx, without=()):
    """-> logits, number of sources per read. The size of a depth block: from the flags."""
    c, ends, rope = model.config, model.ends, model.rope(0, idx.shape[1])
    S = -(-N // c.attnres_blocks) if c.attnres_blocks else c.attnres_block
    sums, counts = {0: model.wte(idx)}, []   # number of the depth block: sum of its updates so far

    def read(l, norm):
        numbers = sorted(sums)
        if c.attnres_window:
            numbers = numbers[:1] + numbers[1:][-c.attnres_window:]
        sources = [sums[number] for number in numbers]
        counts.append(len(sources))
        if l == 1:
            return norm(sources[0])
        if c.attnres_weights == "static":
            weights = ends.logits[l - 2, numbers].softmax(0)[:, None, None, None]
        else:
            keys = [unit(v) * ends.key_gain[l - 2] for v in sources] if c.attnres_key_norm else sources
            scores = torch.stack([(k * ends.query[l - 2]).sum(-1, keepdim=True) for k in keys])
            weights = scores.sigmoid() if c.attnres_weights == "sigmoid" else scores.softmax(0)
        mean = (weights * torch.stack(sources)).sum(0)
        return unit(mean) * norm.gain if c.norm == "rms" else norm(len(sources) * mean)

    for l, (residual, sublayer) in enumerate(model.sublayers(), start=1):
        if l not in without:
            update, number = sublayer(read(l, residual.norm), rope), (l - 1) // S + 1
            sums[number] = sums[number] + update if number in sums else update
    return read(N + 1, ends.norm) @ model.lm_head.weight.T, counts


def gradients(model, out):
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)
    return torch.autograd.grad((out * weights).sum(), [*model.parameters()])


def close(a, b, tol):
    for x, y in zip(a, b, strict=True):
        assert (x - y).norm() <= tol * y.norm() + 1e-14


@every
def test_values_and_gradients_are_those_of_the_papers_equations(flags, no_eps):  # noqa: F811
    model = perturb(build("attnres", n_layer=L, **flags), 0.5)
    right, counts = reference(model, ids())
    out = model(ids())[0]
    same(out, right, 1e-10)
    same(logits(model), right, 1e-10)        # decoding's forward pass is another one
    close(gradients(model, out), gradients(model, right), 1e-9)
    S, window = model.blocks[0].mlp_residual.size, flags.get("attnres_window", N)
    there = [s // S + (s % S != 0) for s in range(N)] + [-(-N // S)]     # besides the embedding
    assert counts == [min(n, window) + 1 for n in there]
    assert [len(stream.sources) for _, stream, _ in model.walk(ids())] == counts


@every
def test_without_its_queries_it_is_pre(flags, no_eps):  # noqa: F811
    """Equal weights, that is: however they are made. A window forgets, and so it is not."""
    norm = dict(norm=flags.get("norm", "rms"))
    model, pre = build("attnres", n_layer=L, **flags), perturb(build("pre", n_layer=L, **norm))
    with torch.no_grad():
        mine = {name.replace(".norm.", ".n_in."): p for name, p in model.named_parameters()}
        for name, p in pre.named_parameters():
            mine[name].copy_(p)
    if "attnres_window" in flags:
        assert (logits(model) - logits(pre)).abs().max() > 1e-2
        return
    same(logits(model), logits(pre), 1e-10)
    for m in (model, pre):
        m(ids(), ids(seed=1))[1].backward()
    close([mine[name].grad for name, _ in pre.named_parameters()], [p.grad for p in pre.parameters()], 1e-10)


def test_a_wide_window_is_full(no_eps):  # noqa: F811
    wide, full = (perturb(build("attnres", n_layer=L, attnres_window=w), 0.5) for w in (N, 0))
    same(logits(wide), logits(full), 1e-11)


@pytest.mark.parametrize("S", [1, 2, 4, 5])
@pytest.mark.parametrize("without", [{1}, {4}, {5}, {8}, {1, 2, 3, 4}, {7, 8, 9, 10}, {12}, {*range(1, 13)}],
                         ids=str)
@pytest.mark.parametrize("weights", ["softmax", "static"])
def test_a_sublayer_left_out_is_a_source_less(S, without, weights, no_eps):  # noqa: F811
    """Also where it opens or closes a depth block, or the whole depth block is gone."""
    model = perturb(build("attnres", n_layer=L, attnres_block=S, attnres_weights=weights), 0.7)
    with torch.no_grad():
        *_, (_, _, out) = model.walk(ids(), without)
        same(out, reference(model, ids(), without)[0], 1e-10)


@pytest.mark.parametrize("flags", [dict(attnres_block=1), dict(attnres_block=4), dict(attnres_block=5),
                                   dict(norm="layer")], ids=str)
@pytest.mark.parametrize("scale", [1.0, 80.0])
def test_gradients_of_two_phases_are_those_of_one(flags, scale, monkeypatch):
    model = perturb(build("attnres", n_layer=L, **flags), 0.5)
    with torch.no_grad():
        model.ends.query.mul_(scale)                                     # scores of many tens
    out = model(ids())[0]
    mine = gradients(model, out)
    assert any(stream.ahead for _, stream, _ in model.walk(ids()))
    monkeypatch.setattr(M.AttnRes, "read_ahead", lambda self, stream, *rest: stream)
    direct = model(ids())[0]
    same(out, direct, 1e-10)
    close(mine, gradients(model, direct), 1e-8)


@every
def test_weights_for_figures_are_those_of_the_read(flags, no_eps):  # noqa: F811
    model = perturb(build("attnres", n_layer=L, **flags), 0.5)
    readers = [residual for residual, _ in model.sublayers()] + [model.ends]
    with torch.no_grad():
        for reader, (l, stream, _) in zip(readers, model.walk(ids()), strict=True):
            weights = reader.weigh(stream)
            mean = sum(p[..., None] * v for p, v in zip(weights, stream.sources, strict=True))
            same(reader.norm(len(weights) * mean if l > 1 else mean), reader.read(stream), 1e-10)
            if flags.get("attnres_weights") != "sigmoid":
                same(weights.sum(0), torch.ones_like(weights[0]), 1e-12)


# ----------------------------------------------------------------------------- memory

@pytest.mark.parametrize("name, flags", [("attnres", {}), ("attnres", dict(attnres_block=4)),
                                         ("attnres", dict(attnres_window=3)), ("denseformer", {})], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_is_linear_in_depth(name, flags, device, monkeypatch):
    """What grows faster is a few numbers per token and pair of sublayers, where a source has C."""
    if device == "cuda":
        monkeypatch.setattr(kernels, "by_hand", lambda x: False)         # the path that a GPU takes
    size, C, idx = {}, 256, ids(2, 16)
    for n_layer in (8, 16, 24):
        model = build(name, torch.float32, n_layer=n_layer, n_embd=C, **flags)
        before = sum(p.numel() for p in model.parameters()) * 4
        size[n_layer] = saved_bytes(lambda: model(idx, idx)[1])[0] - before
    second = (size[24] - 2 * size[16] + size[8]) / (4 * idx.numel())     # in numbers per token
    per_pair = second / 16 ** 2   # of (read, source), n^2 / 2 of them, and n rises in steps of 16
    assert per_pair < 4 < C / 4


# ----------------------------------------------------------------------------- kernels

def inputs(n, dtype=torch.float64, S=3, C=6, spread=1.0):
    rng = torch.Generator().manual_seed(n)
    new = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    return new(S, C), [new(2, 5, C) for _ in range(n)], new(C), new(2, 5, C), new(2, 5)


def both(function, *tensors):
    """Values and gradients, by hand and by autograd through the reference."""
    results = []
    for by_hand in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not by_hand:
                for switch in ("by_hand", "saves_little"):
                    patch.setattr(kernels, switch, lambda x: False)
            out = function(*tensors)
            out = out if isinstance(out, tuple) else (out,)
            wanted = [t for t in tensors if t.requires_grad]
            rng = torch.Generator().manual_seed(1)
            seeds = [torch.randn(o.shape, generator=rng, dtype=torch.float64).to(o.dtype) for o in out]
            results.append((*out, *torch.autograd.grad(out, wanted, seeds, allow_unused=True)))
    return results


CASES = [(n, ahead, gain) for n in (0, 1, 2, 5) for ahead in (False, True) for gain in (False, True)
         if n or ahead]


@pytest.mark.parametrize("n, ahead, gain", CASES)
@pytest.mark.parametrize("dtype, tol", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_a_read_by_hand_is_the_reference(n, ahead, gain, dtype, tol):
    w, sources, g, o, lse = inputs(n, dtype)

    def read(w, g, o, lse, *sources):
        return kernels.depth_read(w, sources, (o, lse) if ahead else None, g if gain else None)

    mine, right = both(read, w[0].detach().requires_grad_(), g, o, lse, *sources)
    for a, b in zip(mine, right, strict=True):
        if b is None:   # not used
            assert a is None or not a.any()
        else:
            same(a, b, tol * max(1, b.abs().max().item()))


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("dtype, tol", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_reads_ahead_by_hand_are_the_reference(n, S, dtype, tol, rows, monkeypatch):
    w, sources, *_ = inputs(n, dtype, S)
    monkeypatch.setattr(kernels, "pieces", lambda n_rows, size: [slice(i, min(i + rows, n_rows))
                                                                 for i in range(0, n_rows, rows)])
    flat = lambda *all: tuple(t for pair in kernels.depth_read_ahead(all[0], all[1:]) for t in pair)
    mine, right = both(flat, w, *sources)
    for a, b in zip(mine, right, strict=True):
        same(a, b, tol * b.abs().max().item() + 1e-14)


@pytest.mark.parametrize("gain", [False, True])
def test_one_source_gives_its_query_exactly_no_gradient(gain):
    for dtype in (torch.float32, torch.float64):
        w, sources, g, *_ = inputs(1, dtype)
        out = kernels.depth_read(w[0], sources, None, g if gain else None)
        assert not torch.autograd.grad(out.square().sum(), w)[0].any()


@pytest.mark.parametrize("n_layer", [1, 2, 3, 6, 12])
def test_number_of_depth_blocks(n_layer):
    """--attnres_blocks gives that many, or says that it can't."""
    possible = {-(-2 * n_layer // size) for size in range(1, 2 * n_layer + 1)}
    for blocks in range(1, 2 * n_layer + 3):
        problems = M.GPTConfig(residual="attnres", n_layer=n_layer, attnres_blocks=blocks).problems()
        assert bool(problems) == (blocks not in possible)
        if problems:
            assert f"--attnres_blocks {blocks} " in problems[0].replace(":", " ")
        else:
            *_, (_, stream, _) = build("attnres", n_layer=n_layer, attnres_blocks=blocks).walk(ids())
            assert len(stream.sources) == blocks + 1


def test_pieces_cover_all_rows():
    for n_rows, size in ((1, 1), (10, 2 ** 20), (7, 2 ** 21), (5, 2 ** 30), (4097, 512)):
        parts = kernels.pieces(n_rows, size)
        assert [i for part in parts for i in range(n_rows)[part]] == [*range(n_rows)]
        lengths = [part.stop - part.start for part in parts]
        assert all(length * size <= 2 ** 21 or length == 1 for length in lengths)


def test_reads_leave_their_inputs_alone_and_take_any_strides():
    w, sources, g, o, lse = inputs(3)
    before = [t.detach().clone() for t in (w, g, o, lse, *sources)]
    turned = [v.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for v in sources]

    def run(sources):
        ahead = kernels.depth_read_ahead(w, sources[:2])
        out = kernels.depth_read(w[0], sources[2:], ahead[0], g)
        out = out + kernels.depth_read(w[1], sources, (o, lse), g)
        return out, torch.autograd.grad(out.sum(), sources)              # a gradient without strides

    (out, grads), (out2, grads2) = run(sources), run(turned)
    same(out, out2, 1e-14)
    for a, b in zip(grads, grads2, strict=True):
        same(a, b, 1e-13)
    assert all(torch.equal(a, b) for a, b in zip((w, g, o, lse, *sources), before, strict=True))


@pytest.mark.parametrize("dtype, tol", [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("shift", [-80.0, 80.0])
def test_merge_at_extreme_scores_has_exact_gradients(dtype, tol, shift):
    """A source that outweighs all others, or that they outweigh, before and after the merge."""
    w, sources, *_ = inputs(6, torch.float64, S=1, C=16)
    for favourite in (1, 4):   # seen ahead; seen afterwards
        q = w[0] + shift * sources[favourite][0, 0] / sources[favourite][0, 0].norm() / 4

        def run(to, ahead):
            v = [x.detach().to(to).requires_grad_() for x in sources]
            p = q.detach().to(to).requires_grad_()
            if ahead:
                out = kernels.depth_read(p, v[3:], kernels.depth_read_ahead(p[None], v[:3])[0])
            else:
                out = kernels.depth_read_reference(p, v)
            return out, *torch.autograd.grad(out.square().sum(), [p, *v])

        for a, b in zip(run(dtype, True), run(torch.float64, False), strict=True):
            assert (a - b).abs().max() <= 30 * tol * b.abs().max()
