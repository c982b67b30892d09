"""The hand-derived backwards of kernels.py against their references: values, gradients, finite differences,
NaN."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels
import model as model_file
from model import GPT, GPTConfig
from test_residuals import build, ids, perturb

ROOT = Path(__file__).resolve().parents[1]


def unit_direction(*shape):
    r = torch.randn(*shape, dtype=torch.float64)
    r = r - r.mean(-1, keepdim=True)
    return r / r.square().mean(-1, keepdim=True).sqrt()


def make(op, T=5, nh=3, C=8):
    """-> (Function, reference, inputs) with random float64 inputs; the ones to differentiate require grad."""
    torch.manual_seed(0)
    rand = lambda *shape: torch.randn(*shape, dtype=torch.float64).requires_grad_()
    if op == "rms_norm":
        return kernels.RMSNorm.apply, kernels.rms_norm_reference, (rand(2, T, C), rand(C))
    if op == "rotate_normed":
        angle = torch.rand(T, 1, C // 2, dtype=torch.float64)
        turn = torch.stack((angle.cos(), angle.sin()), -1).flatten(-2).repeat(1, nh, 1)
        joined = lambda op: lambda x, turn: torch.stack(op(x, turn, 2), -3)
        inputs = rand(2, T, 3, nh, C), turn
        return joined(kernels.RotateNormed.apply), joined(kernels.rotate_normed_reference), inputs
    r = unit_direction(2, T, C).requires_grad_()
    return kernels.NagWrite.apply, kernels.nag_write_reference, (r, rand(2, T, C), rand(2, T, 1))


OPS = ["rms_norm", "rotate_normed", "nag_write"]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [dict(), dict(T=1), dict(C=2), dict(T=7, C=30), dict(T=0)])
def test_function_equals_reference(op, shape):
    function, reference, inputs = make(op, **shape)
    ours, theirs = function(*inputs), reference(*inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    wanted = [x for x in inputs if x.requires_grad]
    upstream = torch.randn_like(ours)
    grads = [torch.autograd.grad(y, wanted, upstream) for y in (ours, theirs)]
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("op", OPS)
def test_function_against_finite_differences(op):
    function, _, inputs = make(op)
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("op", OPS)
def test_strided_inputs_and_expanded_gradients(op):
    function, reference, inputs = make(op)
    strided = [torch.stack((x, x), -1)[..., 0].detach().requires_grad_(x.requires_grad) for x in inputs]
    y = function(*strided)
    # sum sends an expanded gradient
    grads = torch.autograd.grad(y.sum(), [x for x in strided if x.requires_grad])
    expected = torch.autograd.grad(reference(*inputs).sum(), [x for x in inputs if x.requires_grad])
    for a, b in zip(grads, expected):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("op", OPS)
def test_inputs_stay_untouched(op):
    function, _, inputs = make(op)
    before = [x.detach().clone() for x in inputs]
    function(*inputs).square().sum().backward()
    assert all(torch.equal(x, b) for x, b in zip(inputs, before))


def test_nag_write_of_nothing_is_finite():
    r = unit_direction(1, 3, 8).requires_grad_()
    # no update; one without an orthogonal part
    for f in (torch.zeros(1, 3, 8, dtype=torch.float64), r.detach() * 2):
        f.requires_grad_()
        a = torch.ones(1, 3, 1, dtype=torch.float64, requires_grad=True)
        y, s = kernels.nag_write(r, torch.zeros_like(a), f, a)
        y.sum().backward()
        torch.testing.assert_close(y, r / 2 ** 0.5)   # u = 0, and the lane has grown by sqrt(2) all the same
        assert all(torch.isfinite(x.grad).all() for x in (r, f, a))


def test_wrapper_uses_the_reference_under_compile():
    x, gain = torch.randn(4, 8), torch.ones(8)
    seen = []
    compiled = torch.compile(lambda x: (seen.append(kernels.by_hand(x)), kernels.rms_norm(x, gain))[1],
                             backend="eager", fullgraph=False)
    torch.testing.assert_close(compiled(x), kernels.rms_norm(x, gain))
    assert kernels.by_hand(x) and True not in seen


# ----------------------------------------------------------------------------- Triton
# On a GPU as they are; elsewhere in Triton's interpreter (conftest.py), which runs the same source on a CPU.

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [dict(N=5, C=16), dict(N=1, C=50, n=1, S=1), dict(N=15, C=123, n=7, S=5), dict(N=0, C=16)]
NAMES = ["nag_write", "nag_write, 70 % kept", "nag_gain", "depth_read", "depth_read, norm",
         "depth_read, ahead", "depth_read_ahead", "part_normed"]

needs_triton = pytest.mark.skipif(kernels.triton is None, reason="triton isn't installed")


def example(name, N=6, C=20, n=4, S=3, **options):
    return list(kernels.examples(N, C, n, S, **options))[NAMES.index(name)]


def on_device(example, dtype=torch.float32):
    return [x.detach().to(DEVICE, torch.float32 if i in example.wide else dtype).requires_grad_()
            for i, x in enumerate(example.inputs)]


def gradients(run, inputs):
    outputs = [y for y in run(*inputs)]
    return [*outputs, *torch.autograd.grad(outputs, inputs, [torch.ones_like(y) for y in outputs])]


@needs_triton
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_triton_equals_the_reference_in_float64(name, shape, dtype):
    errors = kernels.compare(example(name, **shape, rounds=dtype != torch.float32), dtype, DEVICE)
    assert max(errors.values()) <= kernels.error_bound(dtype, DEVICE), errors


@needs_triton
@pytest.mark.parametrize("name", NAMES)
def test_triton_writes_all_of_its_buffers_and_repeats_bit_for_bit(name):
    one = example(name)
    inputs = on_device(one)
    results = []
    try:
        torch.use_deterministic_algorithms(True)   # fills fresh memory with NaN
        assert torch.empty(3).isnan().all() and torch.utils.deterministic.fill_uninitialized_memory
        for _ in range(2):
            results.append(gradients(lambda *x: one.run("on", *x)[:2], inputs))
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(*results):
        assert a.isfinite().all() and torch.equal(a, b)


@needs_triton
@pytest.mark.parametrize("name", NAMES)
def test_triton_takes_strided_shifted_and_expanded_tensors(name):
    one = example(name)
    inputs = on_device(one)
    plain = gradients(lambda *x: one.run("on", *x)[:2], inputs)
    strided = [torch.stack((x.detach(),) * 2, -1)[..., 0].requires_grad_() for x in inputs]
    shift = lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view_as(x)
    shifted = [shift(x.detach()).requires_grad_() for x in inputs]
    for other in (strided, shifted):
        assert any(not x.is_contiguous() or x.data_ptr() % 16 for x in other)
        for a, b in zip(plain, gradients(lambda *x: one.run("on", *x)[:2], other)):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    # sum sends back one number, expanded: all strides are 0
    expanded = torch.autograd.grad(sum(y.sum() for y in one.run("on", *inputs)[:2]), inputs)
    for a, b in zip(plain[-len(inputs):], expanded):
        torch.testing.assert_close(a, b)


@needs_triton
@pytest.mark.parametrize("name", NAMES)
def test_triton_behind_a_cat_compiles_whole(name):
    one = example(name)
    inputs = on_device(one)
    halves = [half.detach().requires_grad_() for x in inputs
              for half in ((x[:len(x) // 2], x[len(x) // 2:]) if x.dim() else (x, x))]

    def run(*halves):   # cat's backward sends slices, which aren't contiguous
        whole = [torch.cat(pair) if pair[0].dim() else pair[0] for pair in zip(halves[::2], halves[1::2])]
        outputs = [torch.cat((y, y), -1) * 2.0 for y in one.run("on", *whole)[:2] if y.dim() > 1]
        weights = [torch.arange(1.0, y.numel() + 1, device=y.device).view_as(y) for y in outputs]
        return [(y * weight).sum()[None] for y, weight in zip(outputs, weights)]

    def results(run):
        outputs = run(*halves)
        return [*outputs, *torch.autograd.grad(outputs, halves, [torch.ones_like(y) for y in outputs],
                                               allow_unused=True)]
    for a, b in zip(results(run), results(torch.compile(run, fullgraph=True, backend="aot_eager"))):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_references_against_finite_differences(name):
    one = example(name, N=3, C=6, n=2, S=2)
    inputs = [x.detach().requires_grad_() for x in one.inputs]
    assert torch.autograd.gradcheck(lambda *x: tuple(one.reference(*x)), inputs)


@needs_triton
def test_nobody_is_kept():
    r, s = torch.randn(4, 8, device=DEVICE), torch.randn(4, 1, device=DEVICE)
    f, slot = r.new_empty(0, 8).requires_grad_(), torch.full((4,), -1, device=DEVICE)
    r.requires_grad_()
    out, s_out = kernels.nag_write_rows(r, s, f, torch.ones_like(s), slot)
    assert torch.equal(out, r) and torch.equal(s_out, s)
    upstream = torch.randn_like(out)
    d_r, d_f = torch.autograd.grad(out, (r, f), upstream)
    assert torch.equal(d_r, upstream) and d_f.shape == f.shape
    rows, normed, _ = kernels.part_normed(r, slot[:0], torch.ones(8, device=DEVICE), "on")
    assert rows.shape == normed.shape == (0, 8)


@needs_triton
def test_reads_of_a_source_share_one_buffer_for_its_gradient():
    torch.manual_seed(0)
    v = [torch.randn(4, 8, device=DEVICE, requires_grad=True) for _ in range(3)]
    w = torch.randn(4, 8, device=DEVICE, requires_grad=True)

    def run(kernels_, source):
        a = [source(x) for x in v]
        first = kernels.depth_read(w[0], a[:1], kernels=kernels_)
        ahead = kernels.depth_read_ahead(w[1:3], a[:2], kernels_)
        reads = [kernels.depth_read(q, a[2:], pair, kernels=kernels_) for q, pair in zip(w[1:3], ahead)]
        last = kernels.depth_read(w[3], [*a, a[0]], kernels=kernels_)   # one of them twice
        return sum(y.square().sum() for y in (first, *reads, last)) + a[0].sum()   # a use that is no read
    grads = [torch.autograd.grad(run(*way), [*v, w]) for way in (
        ("off", lambda x: x), ("on", lambda x: x), ("on", lambda x: kernels.depth_source(x, "on")))]
    for other in grads[1:]:
        for a, b in zip(grads[0], other):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    seen = []   # n reads of one source: one buffer, the same for all
    x = kernels.depth_source(v[0], "on")
    loss = sum(kernels.depth_read(q, [x], kernels="on").sum() for q in w)
    original = kernels.gradient_places
    kernels.gradient_places = lambda *args: (seen.append(original(*args)), seen[-1])[1]
    try:
        loss.backward()
    finally:
        kernels.gradient_places = original
    assert len({places[0].data_ptr() for places, _ in seen}) == 1
    assert [begun for _, begun in seen] == [[0], [1], [1], [1]] and x.sink.buffer is None


@needs_triton
@pytest.mark.parametrize("size", [1, 2])
def test_more_sources_than_a_kernel_takes_go_by_the_definition(size, monkeypatch):
    monkeypatch.setattr(kernels, "MOST_SOURCES", 3)
    flags, found = dict(residual="attnres", n_layer=3, n_embd=16, n_head=2, attnres_block=size), []
    for choice in ("on", "off"):
        model = perturb(build(**flags, kernels=choice).float().to(DEVICE))
        loss = model(ids().to(DEVICE), ids(seed=1).to(DEVICE))[1]
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for ours, reference in zip(*found):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-6)


@needs_triton
def test_compiled_blocks_take_any_number_of_rows():
    """layer_drop keeps other numbers of rows in every step, which must not mean other graphs."""
    model = build(n_layer=2, layer_drop=0.4, kernels="on").float().to(DEVICE).train()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.compile_blocks(backend="eager")
    graphs, counts = [], set()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for seed in range(6):
            kept, idx = [], ids(6, 2).to(DEVICE)
            model(idx, idx, generator=torch.Generator(DEVICE).manual_seed(seed), kept=kept)[1].backward()
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            counts |= {keep.sum().item() for keep in kept}
    torch._dynamo.reset()
    assert len(counts) > 3 and graphs[3:] == graphs[3:4] * 3, graphs   # sizes 0 and 1 are special


@needs_triton
def test_no_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    problem, = GPTConfig(kernels="on").problems()
    assert "--kernels on: needs a CUDA GPU" in problem and not GPTConfig(kernels="auto").problems()
    assert not kernels.on_triton(torch.zeros(1), "on") and not kernels.on_triton(torch.zeros(1), "auto")


LAUNCHED = dict(nag={"nag_gain", "nag_write"}, attnres={"depth_read", "depth_read_ahead"},
                pre={"part_normed"}, lns={"part_normed"})
MODELS = [dict(residual="nag"), dict(residual="nag", mod_rate=0.25),
          dict(residual="nag", mod_rate=0.25, mod_kv="kept"), dict(residual="attnres"),
          dict(residual="attnres", attnres_block=3), dict(residual="attnres", attnres_window=2),
          dict(residual="pre", mod="router", mod_rate=0.25), dict(residual="lns", layer_drop=0.5)]


def train(kernels, steps, **options):
    """-> losses, and the gradients of the first step"""
    shape = dict(n_layer=2, n_head=2, n_embd=24, block_size=6, vocab_size=32)
    model = GPT(GPTConfig(**shape, kernels=kernels, **options)).to(DEVICE).train()
    if model.tau is not None:
        model.tau.fill_(0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, skips = torch.Generator().manual_seed(1), torch.Generator(DEVICE).manual_seed(2)
    losses, first = [], {}
    for _ in range(steps):
        idx = torch.randint(32, (2, 6), generator=data).to(DEVICE)
        _, loss = model(idx, idx.roll(-1, 1), generator=skips)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        first = first or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, first


def watch(monkeypatch):
    """-> a list that gets the name of each kernel that is launched"""
    launched, launch = [], kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda kernel, *args, **options: (
        launched.append(kernel.fn.__name__), launch(kernel, *args, **options)))
    return launched


@needs_triton
@pytest.mark.parametrize("options", MODELS, ids=str)
def test_a_model_launches_its_kernels_and_no_others(options, monkeypatch):
    launched = watch(monkeypatch)
    train("on", 1, **options)
    wanted = LAUNCHED[options["residual"]] - ({"depth_read_ahead"} if "attnres_window" in options else set())
    assert {*launched} == {f"{op}_{way}" for op in wanted for way in ("forward", "backward")}
    launched.clear()
    train("off", 1, **options)
    assert not launched


@needs_triton
def test_kept_tokens_are_written_in_one_pass(monkeypatch):
    launched = watch(monkeypatch)
    monkeypatch.setattr(model_file, "put", None)   # as it would be without the kernel: rows out, and in again
    train("on", 1, residual="nag", mod_rate=0.25)
    assert launched.count("nag_write_forward") == 4


def test_sources_of_a_table_are_aligned():
    x = torch.zeros(9, dtype=torch.float32)
    assert x.data_ptr() % 16 == 0
    plain, shifted = kernels.aligned([x[:4], x[1:5]])
    assert plain.data_ptr() == x.data_ptr() and shifted.data_ptr() % 16 == 0


@needs_triton
@pytest.mark.parametrize("options", MODELS, ids=str)
def test_a_model_with_triton_learns_the_same(options):
    (losses, grads), (expected, expected_grads) = (train(kernels, 2, **options) for kernels in ("on", "off"))
    assert losses == pytest.approx(expected, abs=1e-5) and grads.keys() == expected_grads.keys()
    scale = max(g.abs().max() for g in expected_grads.values())
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-3, atol=1e-5 * float(scale), msg=name)


@needs_triton
@pytest.mark.parametrize("options", MODELS[1:5], ids=str)
def test_a_model_with_triton_decodes_the_same(options):
    shape, tokens = dict(n_layer=2, n_head=2, n_embd=24, block_size=12, vocab_size=32), []
    tau = 0.3 if options["residual"] == "nag" else None
    for kernels_ in ("on", "off"):
        model = GPT(GPTConfig(**shape, kernels=kernels_, **options)).to(DEVICE).eval()
        idx = torch.arange(6, device=DEVICE).view(2, 3)
        tokens.append(model.generate(idx, 4, temperature=0, tau=tau))
        with torch.no_grad():
            tokens.append(model(tokens[0], tau=tau)[0])
    assert torch.equal(tokens[0], tokens[2])
    torch.testing.assert_close(tokens[1], tokens[3], rtol=1e-4, atol=1e-5)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(residual="nag"), dict(residual="attnres", attnres_block=2)],
                         ids=str)
def test_a_compiled_model_with_triton(options):
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=24, block_size=6, vocab_size=32, kernels="on",
                          **options))
    model, idx = model.to(DEVICE), torch.arange(12, device=DEVICE).view(2, 6)
    losses = []
    for compiled in (False, True):
        if compiled:
            model.compile_blocks(fullgraph=True)
        model.zero_grad()
        loss = model(idx, idx)[1]
        loss.backward()
        losses.append((loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    assert losses[0][0] == pytest.approx(losses[1][0], abs=1e-5)
    for a, b in zip(losses[0][1], losses[1][1]):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("options", MODELS, ids=str)
def test_fifty_steps_with_triton(options):
    assert train("on", 50, **options)[0] == pytest.approx(train("off", 50, **options)[0], abs=2e-3)


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(kernels.triton is None or DEVICE == "cuda", reason="compiles for a GPU that isn't there")
def test_every_kernel_compiles_for_sm_90(tmp_path):
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, ROOT / "kernels.py", "--out", tmp_path / "sm90.json"], env=env,
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads((tmp_path / "sm90.json").read_text())
    launched = {name for name in vars(kernels) if name.endswith(("_forward", "_backward"))}
    assert {row["kernel"] for row in rows} == launched and all(row["stack"] == 0 for row in rows)
