"""The hand-derived backwards of kernels.py against their references: values, gradients, finite differences,
NaN."""
import pytest
import torch

import kernels


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
        return kernels.RotateNormed.apply, kernels.rotate_normed_reference, (rand(2, T, nh, C), turn)
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
    for a, b in zip(torch.autograd.grad(ours, wanted, upstream), torch.autograd.grad(theirs, wanted, upstream)):
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
        y = kernels.nag_write(r, f, a)
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
