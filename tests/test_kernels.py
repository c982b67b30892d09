"""kernels.py. Without a GPU its kernels run in Triton's interpreter (see conftest.py). This file, run as a
program, compiles and traces them for a GPU that isn't there."""
import os, subprocess, sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest, torch
import kernels
from conftest import ROOT, ids, make, refused, same
from kernels import depth_sum, errors, inputs_of, nag_write, run, triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
make_inputs = partial(inputs_of, device=DEVICE)
each_op = pytest.mark.parametrize("op", [nag_write, depth_sum])

def results(op, inputs, way="on"):
    """-> what the op returns, and the gradients of some loss by its inputs"""
    outputs = run(op, inputs, way)
    return [*outputs, *torch.autograd.grad(sum((y * y).sum() for y in outputs), inputs)]

@pytest.mark.skipif(triton is None, reason="triton isn't installed")
@pytest.mark.parametrize("residual", ["nag", "attnres", "denseformer"])
def test_a_model_is_the_same_with_kernels(residual):
    """So what they compute is in the papers: test_model.py has their equations."""
    found, idx = [], ids().to(DEVICE)
    for way in ("on", "off"):
        model = make(residual, dtype=torch.float32, kernels=way).to(DEVICE)
        out, loss = model(idx, idx)
        found.append([out, *torch.autograd.grad(loss, list(model.parameters()))])
    same(*found, 1e-4)

@pytest.mark.parametrize("way", ["on", "off"])
def test_nag_write_of_nothing(way):
    """No update, and one that has no part orthogonal to r"""
    r, _, _, gain = make_inputs(nag_write)
    one = torch.ones_like(gain)
    for u in (torch.zeros_like(r), 2 * r.detach()):
        u.requires_grad_()
        out, log_rms = nag_write(r, 0 * one, u, one, kernels=way)
        same([out, log_rms.exp()], [r / 2 ** 0.5, 2 ** 0.5 * one], 0.1)
        assert torch.stack(torch.autograd.grad(out.sum(), (r, u))).isfinite().all()

@pytest.mark.parametrize("way", ["on", "off"])
def test_depth_sum_is_a_sum_with_weights_of_any_kind(way):
    sources = [v.view(2, 3, 20) for v in make_inputs(depth_sum, n=3)[1:]]
    shares = torch.randn(4, device=DEVICE, requires_grad=True)   # one weight per source, as in DenseFormer
    weights = shares.view(4, 1, 1, 1).expand(4, 2, 3, 1)         # one per source and token, as in AttnRes
    for each in (shares, shares.unbind(), weights, list(weights)):
        ours = depth_sum(each, [*sources, sources[0]], way)      # One of the sources is there twice.
        exact = sum(weight * v for weight, v in zip(each, [*sources, sources[0]]))
        gradients = [torch.autograd.grad(y.sin().sum(), [shares, *sources]) for y in (ours, exact)]
        same([ours, *gradients[0]], [exact, *gradients[1]], 1e-5)

@each_op
@pytest.mark.parametrize("N, C, n", [(5, 16, 2), (1, 50, 1), (3, 123, 9), (0, 16, 3)])
def test_errors_are_those_of_rounding(op, N, C, n):
    assert max(errors(op, N, C, n, torch.float32, DEVICE)) < 1e-5
    assert max(errors(op, N, C, n, torch.bfloat16, DEVICE)) < 1e-2   # The interpreter doesn't round to bf16.

def test_a_nan_is_an_error(monkeypatch):
    monkeypatch.setattr(kernels, "errors", lambda *_: (0.0, torch.nan))
    assert "too large" in refused(kernels.check, "cpu", [(1, 1, 1)])

@each_op
@pytest.mark.skipif(triton is None, reason="triton isn't installed")
def test_results_repeat_and_a_graph_can_be_used_twice(op):
    inputs = make_inputs(op, C=50)
    before = [x.detach().clone() for x in inputs]
    torch.use_deterministic_algorithms(True)    # This fills new memory with NaN: is every place written?
    try:
        outputs = run(op, inputs, "on")
        upstream = [torch.randn_like(y, requires_grad=True) for y in outputs]
        first = torch.autograd.grad(outputs, inputs, upstream, retain_graph=True)
        second = torch.autograd.grad(outputs, inputs, [2 * g for g in upstream], retain_graph=True)
        again = run(op, inputs, "on")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(x.isfinite().all() for x in (*outputs, *first))
    # Bit for bit (doubling is exact), and the inputs are untouched.
    same([*outputs, *[2 * g for g in first], *inputs], [*again, *second, *before], 0)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.grad(outputs, inputs, upstream, create_graph=True)[-1].sum().backward()
    inputs[2].data[0, 0] = torch.nan   # of an update, or of a source: its row has NaN, too, and no other row
    assert run(op, inputs, "on")[0].isnan().any(1).tolist() == [True] + 5 * [False]

@each_op
def test_tensors_that_lie_otherwise_in_memory(op):
    inputs = make_inputs(op, C=30)
    strided = [torch.stack((x, x), -1)[..., 0].detach().requires_grad_() for x in inputs]
    shifted = [torch.cat((x.new_zeros(1), x.flatten()))[1:].view_as(x).detach() for x in inputs]
    assert all(not x.is_contiguous() for x in strided) and all(x.data_ptr() % 16 for x in shifted)
    assert all(kernels.aligned(x).data_ptr() % 16 == 0 for x in shifted)   # The interpreter doesn't care.
    for others in (strided, [x.requires_grad_() for x in shifted]):
        same(results(op, inputs), results(op, others), 1e-6)
    # The gradient of a sum is one number, expanded: all of its strides are 0.
    sums = [sum(y.sum() for y in run(op, inputs, way)) for way in ("on", "off")]
    same(*[torch.autograd.grad(y, inputs) for y in sums], 1e-5)

def test_what_does_not_fit_is_refused():
    r, log_rms, u, gain = make_inputs(nag_write)
    weights, *v = make_inputs(depth_sum, n=2)
    wrong = [(r, log_rms, u.bfloat16(), gain), (r, log_rms, u[:3], gain), (r, log_rms[:1], u, gain),
             (r, log_rms, u, gain.double()), (r, log_rms, u, gain.expand(6, 20)),
             (weights, [v[0], v[1].double()]), (weights, [v[0], v[1][:1]]), (weights, v[:1]),
             (weights[:0], []), (weights.expand(2, 6, 20), v)]
    for inputs in wrong:
        op = nag_write if len(inputs) == 4 else depth_sum
        with pytest.raises(ValueError, match=f"{op.__name__}: got"):
            op(*inputs)

def test_who_chooses_what(monkeypatch):
    launched = []
    monkeypatch.setattr(kernels, "launch", lambda kernel, *arguments, **constants: launched.append(kernel))
    for op in (nag_write, depth_sum):
        run(op, make_inputs(op), "off")
        run(op, make_inputs(op, dtype=torch.float64), "on")
        assert not launched
        run(op, make_inputs(op), "auto" if DEVICE == "cuda" else "on")
        assert bool(launched) == (triton is not None)
        launched.clear()
    monkeypatch.undo()
    kernels.launch(None, torch.zeros(0, 4))   # A GPU can't launch no programs at all.
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    assert not kernels.use_triton(torch.zeros(1), "on")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "use --kernels auto" in kernels.why_no_triton()
    code = "import sys; sys.modules['triton'] = None; import kernels; print(kernels.why_no_triton())"
    assert b"pip install triton" in subprocess.check_output([sys.executable, "-c", code], cwd=ROOT)

@each_op
def test_compiled_whole(op, monkeypatch):
    right = results(op, make_inputs(op))
    if op is depth_sum:   # As on a GPU: what is traced has no addresses, so there must be no kernel.
        monkeypatch.setattr(kernels, "use_triton", lambda x, way: True)
    inputs = make_inputs(op)
    outputs = torch.compile(run, fullgraph=True, backend="aot_eager")(op, inputs, "on")
    gradients = torch.autograd.grad(sum((y * y).sum() for y in outputs), inputs)
    same([*outputs, *gradients], right, 1e-5)

@pytest.mark.skipif(triton is None or DEVICE == "cuda", reason="is about a GPU that isn't there")
def test_kernels_for_an_h200(tmp_path):
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__, tmp_path], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("registers") == 4 and "written" in done.stdout

# ----------------------------------------------------------------------------- python test_kernels.py FOLDER

def compile_only(kernel, *arguments, **options):
    """In the place of a launch. Registers that do not suffice are spilled to the stack, which is slow. So are
    loads and stores of less than 16 bytes at a time."""
    made = run_kernel(kernel, *arguments, **options | dict(warmup=True))   # Triton compiles, and runs nothing.
    cubin = Path(sys.argv[1], "cubin")
    cubin.write_bytes(made.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.check_output([tool, "-res-usage", cubin], text=True)
    registers, stack = [int(usage.split(f"{word}:")[1].split()[0]) for word in ("REG", "STACK")]
    wide = made.asm["ptx"].count(".v4") + made.asm["ptx"].count("cp.async.cg")
    print(f"{kernel.fn.__name__}: {registers} registers, {stack} bytes of stack, {wide} accesses of 16 bytes")
    assert registers <= 64 and stack == 0 and wide >= 2

def check_what_is_written(joint, *_, **__):
    """In the place of dividing a traced graph into forward and backward. torch.compile must see what a kernel
    writes, else it copies whatever the kernel is given."""
    written = [name for node in joint.graph.nodes for name in node.kwargs.get("tensors_to_clone", [])]
    print("written:", written)
    assert written == ["out_ptr", "log_rms_out_ptr", "d_r_ptr", "d_u_ptr", "d_gain_ptr"]
    raise SystemExit   # Its code couldn't run here.

if __name__ == "__main__":
    from torch._dynamo.backends.common import aot_autograd
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0))
    torch.utils._triton.has_triton = lambda: True
    kernels.use_triton = lambda x, way: True
    run_kernel, triton.JITFunction.run = triton.JITFunction.run, compile_only
    for op in (nag_write, depth_sum):
        results(op, make_inputs(op, C=4096, dtype=torch.bfloat16))
    backend = aot_autograd(fw_compiler=None, partition_fn=check_what_is_written)
    torch.compile(run, fullgraph=True, backend=backend)(nag_write, make_inputs(nag_write), "on")
