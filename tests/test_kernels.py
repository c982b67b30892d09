"""kernels.py against the definitions, forward and backward. Without a GPU, kernels run in Triton's
interpreter (see conftest.py). `python kernels.py` runs test_errors alone. `python test_kernels.py
FOLDER` compiles the kernels for a GPU that isn't there."""
import os, runpy, subprocess, sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest, torch
import torch.nn.functional as F
import kernels
from conftest import ROOT, ids, make, refused, same
from kernels import depth_sum, nag_write, triton, use_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
each_op = pytest.mark.parametrize("op", ["nag_write", "depth_sum"])
if triton is None and __name__ != "__main__":
    pytest.skip("triton isn't installed", allow_module_level=True)

NAG = make("nag", n_layer=1, kernels="off").blocks[0].attn_residual

def inputs_of(op, N=6, C=20, n=4, dtype=torch.float32):
    """-> random inputs: those of nag_write, or weights and n sources. Scalars are float32."""
    torch.manual_seed(N + C)
    scalars, rows = torch.randn(n, N, 1, device=DEVICE), torch.randn(n, N, C, device=DEVICE)
    inputs = [scalars, *rows.to(dtype).unbind()]
    if op == "nag_write":
        direction = F.layer_norm(rows[0], (C,), eps=kernels.TINY)   # rms 1
        inputs = [direction.to(dtype), scalars[0], rows[1].to(dtype), scalars[1].abs()]
    return [x.clone().requires_grad_() for x in inputs]

def run(op, inputs, by_kernel=True):
    """-> what the op returns, or its definition"""
    if op == "depth_sum":
        return (depth_sum(inputs[0], inputs[1:], "on" if by_kernel else "off"),)
    return nag_write(*inputs) if by_kernel else NAG.write(*inputs)

def results(op, inputs, by_kernel=True):
    """-> what the op returns, and the gradients of some loss by its inputs"""
    outputs = run(op, inputs, by_kernel)
    torch.manual_seed(0)
    g = [torch.randn(y.shape).bfloat16().to(y) for y in outputs]   # the same in each dtype
    return [*outputs, *torch.autograd.grad(outputs, inputs, g)]

SHAPES = [(5, 16, 2), (1, 50, 2), (2, 123, 9), (0, 16, 3)]   # N, C, n
if DEVICE == "cuda":
    SHAPES += [(999, 1000, 9), (512, 4096, 40)]

@each_op
def test_errors_are_those_of_rounding(op):
    """... of kernels, compared with the definition in float64: relative ones (rms)"""
    for dtype, bound in (torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-2):
        for N, C, n in SHAPES:
            inputs = inputs_of(op, N, C, n, dtype)
            doubles = [x.detach().double().requires_grad_() for x in inputs]
            pairs = zip(results(op, inputs), results(op, doubles, by_kernel=False))
            errors = [((x - y).norm() / y.norm().clamp_min(1e-15)).item() for x, y in pairs]
            shown = " ".join(f"{error:.0e}" for error in errors[:6])
            print(f"{op:9} {N:3} x {C:<4} n = {n:<2}  {dtype!s:14}  bound {bound:.0e}  {shown}")
            assert all(error < bound for error in errors)   # A NaN isn't.

@pytest.mark.parametrize("residual", ["nag", "attnres", "denseformer"])
def test_a_model_is_the_same_with_kernels(residual):
    """So what they compute is in the papers: test_model.py has their equations."""
    found, idx = [], ids(1, 3).to(DEVICE)
    for way in "on", "off":
        model = make(residual, n_layer=2, dtype=torch.float32, kernels=way).to(DEVICE)
        out, loss = model(idx, idx)
        found.append([out, *torch.autograd.grad(loss, list(model.parameters()))])
    same(*found, 1e-4)

@pytest.mark.parametrize("shape", [(7, 20), (2, 3, 2, 8), (1, 1), (0, 4)])
def test_gradients_by_hand_on_a_cpu_are_those_of_autograd(shape):
    """Of a norm, and of NAG's write, in float64"""
    torch.manual_seed(0)
    x, update = torch.randn(2, *shape).double().requires_grad_().unbind()
    log_length, gain = torch.randn(2, *shape[:-1], 1).double().requires_grad_().unbind()
    direction = F.rms_norm(x.detach(), shape[-1:]).requires_grad_()
    definition = partial(F.rms_norm, normalized_shape=shape[-1:], eps=1e-6)
    for inputs, by_hand, right in (
            ((x,), partial(kernels.rms_norm, eps=1e-6), definition),
            ((direction, log_length, update, gain), kernels.NagWriteOnCPU.apply, NAG.write)):
        found = []
        for function in by_hand, right:
            outputs = function(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            loss = sum((out.sin() * out.detach().cos()).sum() for out in outputs)
            found.append([*outputs, *torch.autograd.grad(loss, inputs)])
        same(*found, 1e-10)

@pytest.mark.parametrize("by_kernel", [True, False])
def test_nag_write_of_nothing(by_kernel):
    """No update, and one that has no part orthogonal to the direction"""
    direction, _, _, gain = inputs_of("nag_write")
    one = torch.ones_like(gain)
    for update in torch.zeros_like(direction), 2 * direction.detach():
        update.requires_grad_()
        new, log_length = run("nag_write", [direction, 0 * one, update, one], by_kernel)
        same([new, log_length.exp()], [direction / 2 ** 0.5, 2 ** 0.5 * one], 0.1)
        assert torch.stack(torch.autograd.grad(new.sum(), (direction, update))).isfinite().all()

@each_op
def test_results_repeat_and_a_graph_can_be_used_twice(op):
    inputs = inputs_of(op, C=50)
    before = [x.detach().clone() for x in inputs]
    torch.use_deterministic_algorithms(True)   # This fills new memory with NaN.
    try:
        first, again = results(op, inputs), results(op, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(x.isfinite().all() for x in first)   # So every place was written.
    same([*again, *inputs], [*first, *before], 0)   # bit for bit
    outputs = run(op, inputs)
    g = [torch.ones_like(y, requires_grad=True) for y in outputs]
    once = torch.autograd.grad(outputs, inputs, g, retain_graph=True)
    twice = torch.autograd.grad(outputs, inputs, g, create_graph=True)
    same(twice, once, 0)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        twice[-1].sum().backward()

@each_op
def test_tensors_that_lie_otherwise_in_memory(op):
    inputs = inputs_of(op, C=30)
    strided = [torch.stack((x, x), -1)[..., 0].detach() for x in inputs]
    shifted = [torch.cat((x.new_zeros(1), x.flatten()))[1:].view_as(x).detach() for x in inputs]
    assert all(kernels.as_rows(x).data_ptr() % 16 == 0 for x in shifted)   # 16 bytes at a time
    for others in strided, shifted:
        same(results(op, inputs), results(op, [x.requires_grad_() for x in others]), 1e-6)
    # The gradient of a sum is one number, expanded: all of its strides are 0.
    sums = [sum(y.sum() for y in run(op, inputs, by_kernel)) for by_kernel in (True, False)]
    same(*[torch.autograd.grad(y, inputs) for y in sums], 1e-5)

def test_what_does_not_fit_is_refused():
    direction, log_length, update, gain = inputs_of("nag_write")
    for misfits in (update.bfloat16(), gain), (update[:3], gain), (update, gain.expand(6, 20)):
        with pytest.raises(ValueError, match="nag_write: got"):
            nag_write(direction, log_length, *misfits)
    weights, x, y = inputs_of("depth_sum", n=2)
    for misfits in ((weights, [x, y.double()]), (weights, [x, y[:1]]), (weights, [x]),
                    (weights[:0], [])):
        with pytest.raises(ValueError, match="depth_sum: got"):
            depth_sum(*misfits, "on")

def test_who_chooses_what(monkeypatch):
    x = torch.zeros(1, device=DEVICE)
    assert use_triton(x, "on") and use_triton(x, "auto") == (DEVICE == "cuda")
    assert not use_triton(x, "off") and not use_triton(x.double(), "on")
    on_cpu = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    assert kernels.fast_nag_write(on_cpu, "auto") == kernels.NagWriteOnCPU.apply
    assert kernels.fast_nag_write(on_cpu, "off") is None
    for other in on_cpu.detach(), on_cpu.bfloat16(), on_cpu.to("meta"):
        assert kernels.fast_nag_write(other, "auto") is None and not kernels.suits_cpu(other)
    with monkeypatch.context() as patch:   # A graph takes the definition.
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert not use_triton(x, "on") and not kernels.suits_cpu(on_cpu)
    kernels.launch(None, 0, 4)   # A GPU can't launch no programs at all.
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    assert not use_triton(torch.zeros(1), "on")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "use --kernels auto" in kernels.why_no_triton()
    monkeypatch.setitem(sys.modules, "triton", None)   # Importing it fails.
    said = refused(runpy.run_path, str(ROOT / "kernels.py"), None, "__main__")
    assert said.startswith("kernels.py: needs Triton 3.4 or later; pip")

@pytest.mark.skipif(DEVICE == "cuda", reason="is about a GPU that isn't there")
def test_kernels_for_an_h200(tmp_path):
    env = dict(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path), PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, __file__, tmp_path], env=os.environ | env,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("registers") == 4

def compile_only(kernel, *arguments, **options):
    """In the place of a launch. Registers that do not suffice are spilled to the stack, which is
    slow. So are loads and stores of less than 16 bytes at a time."""
    made = run_kernel(kernel, *arguments, **options | dict(warmup=True))   # It compiles only.
    cubin = Path(sys.argv[1], "cubin")
    cubin.write_bytes(made.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.check_output([tool, "-res-usage", cubin], text=True)
    registers, stack = (int(usage.split(f"{word}:")[1].split()[0]) for word in ("REG", "STACK"))
    wide = made.asm["ptx"].count(".v4") + made.asm["ptx"].count("cp.async.cg")
    print(kernel.fn.__name__, registers, "registers,", stack, "bytes of stack,", wide, "are wide")
    assert registers <= 64 and stack == 0 and wide >= 2

if __name__ == "__main__":
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0,
        get_current_stream=lambda device: 0))
    kernels.use_triton = lambda x, way: True
    run_kernel, triton.JITFunction.run = triton.JITFunction.run, compile_only
    for op in "nag_write", "depth_sum":
        results(op, inputs_of(op, C=4096, dtype=torch.bfloat16))
