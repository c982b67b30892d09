"""kernels.py against its definitions, forward and backward. Without a GPU, the kernels run in
Triton's interpreter (see conftest.py)."""

import runpy

import pytest
import torch
import torch.nn.functional as F

import kernels
from conftest import ROOT, ids, make, same
from kernels import depth_sum, nag_write, use_triton

if kernels.why_no_triton():
    pytest.skip("triton " + kernels.why_no_triton(), allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
each_op = pytest.mark.parametrize("op", ["nag_write", "depth_sum"])

def inputs_of(op, N=6, C=20, n=4, dtype=torch.float32):
    """x, u, gate of nag_write, or weights and n sources of depth_sum"""
    torch.manual_seed(N + C)
    rows, scalars = torch.randn(n, N, C, device=DEVICE), torch.randn(n, N, device=DEVICE)
    if op == "nag_write":
        x = F.layer_norm(rows[0], (C,), eps=1e-10)
        inputs = [x.to(dtype), rows[1].to(dtype), scalars[0, :, None]]
    else:
        inputs = [scalars, *rows.to(dtype).unbind()]
    return [x.clone().requires_grad_() for x in inputs]

def run(op, inputs, kernels="on"):
    if op == "nag_write":
        return nag_write(*inputs, kernels)
    return depth_sum(inputs[0], inputs[1:], kernels)

def result_and_gradients(op, inputs, kernels="on", **options):
    result = run(op, inputs, kernels)
    torch.manual_seed(0)
    g = torch.randn(result.shape[::-1]).T.bfloat16().to(result)   # the same in each dtype
    return [result, *torch.autograd.grad(result, inputs, g, **options)]

@each_op
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2),
                                          (torch.float16, 1e-2)])
@pytest.mark.parametrize("N, C, n", [(5, 16, 2), (1, 50, 2), (2, 123, 9)])
def test_errors_are_those_of_rounding(op, dtype, bound, N, C, n):
    inputs = inputs_of(op, N, C, n, dtype)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    right = result_and_gradients(op, doubles, "off")
    for mine, exact in zip(result_and_gradients(op, inputs), right):
        assert (mine - exact).norm() < bound * exact.norm()

@each_op
def test_no_rows(op):
    assert all(x.numel() == 0 or (x == 0).all()
               for x in result_and_gradients(op, inputs_of(op, N=0)))

@each_op
def test_second_derivatives_are_refused(op):
    """Also by torch.autograd.grad with respect to a tensor that only the first derivative uses."""
    inputs = inputs_of(op)
    _, *gradients = result_and_gradients(op, inputs, create_graph=True)
    for i, gradient in enumerate(gradients):
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(gradient.sum(), inputs[0], retain_graph=True)
    inputs = inputs_of(op)
    (run(op, inputs, "on").square().sum()).backward(create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        sum(x.grad.sum() for x in inputs).backward()

@pytest.mark.parametrize("kernels", ["on", "off"])
def test_nag_write_of_an_update_without_a_part_orthogonal_to_x(kernels):
    x, _, gate = inputs_of("nag_write")
    for u in torch.zeros_like(x), 2 * x.detach():
        u.requires_grad_()
        new = nag_write(x, u, torch.ones_like(gate), kernels)
        same(new, x / 2 ** 0.5, 0.1)
        assert torch.stack(torch.autograd.grad(new.sum(), (x, u))).isfinite().all()

@each_op
def test_parts_of_tensors(op):
    """Rows that are not contiguous, or begin at any address"""
    inputs = inputs_of(op)
    parts = [F.pad(x.detach(), (1, 2))[..., 1:-2].requires_grad_() for x in inputs]
    for mine, right in zip(result_and_gradients(op, parts), result_and_gradients(op, inputs)):
        same(mine, right, 1e-6)
    assert kernels.as_rows(torch.ones(9)[1:]).data_ptr() % 16 == 0   # the kernels count on it

def test_wrong_shapes_are_refused():
    x, u, gate = inputs_of("nag_write")
    weights, *sources = inputs_of("depth_sum")
    for wrong in (x[:, :-1], u, gate), (x, u.bfloat16(), gate), (x, u, gate[:-1]):
        with pytest.raises(ValueError, match="rows must be alike"):
            nag_write(*wrong, "on")
    with pytest.raises(ValueError, match="3 weights for 4 sources"):
        depth_sum(weights[:-1], sources)
    with pytest.raises(ValueError, match="rows must be alike"):
        depth_sum(weights, [*sources[:-1], sources[-1][:-1]], "on")

@pytest.mark.parametrize("residual", ["nag", "attnres"])
def test_a_model_is_the_same_with_kernels(residual, monkeypatch):
    found, idx, launch, launched = [], ids(1, 3).to(DEVICE), kernels.launch, []
    monkeypatch.setattr(kernels, "launch", lambda *args: launched.append(way) or launch(*args))
    for way in "on", "off":
        model = make(residual, n_layer=2, dtype=torch.float32, kernels=way).to(DEVICE)
        logits, loss = model(idx, idx)
        found.append([logits, *torch.autograd.grad(loss, list(model.parameters()))])
    same(*found, 1e-4)
    assert set(launched) == {"on"}

def test_when_kernels_run():
    x = torch.ones(2, 4, device=DEVICE)
    assert use_triton(x, "on") and not use_triton(x, "off") and not use_triton(x.double(), "on")
    assert use_triton(x, "auto") == x.is_cuda
    compiled = torch.compile(lambda x: x * use_triton(x, "on"), backend="eager", fullgraph=True)
    assert not compiled(x).any()   # torch.compile makes kernels from the definitions

def test_the_script_prints_small_errors(capsys):
    runpy.run_path(str(ROOT / "kernels.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    errors = [float(word) for line in lines for word in line.split(":")[1].split()]
    assert len(lines) == 6 and max(errors) < 1e-5
