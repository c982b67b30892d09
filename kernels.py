"""
Row-wise operations whose backward is worth deriving by hand.

In eager mode every primitive reads and writes whole (B, T, C) tensors, and autograd adds a few more for each
of them: at small widths these passes, not the matrix products, are what a residual costs. Each op here has a
reference of a few lines that *is* the definition, and a Function with the same forward and a backward derived
by hand.

The wrapper takes the Function in eager mode on a CPU; elsewhere it takes the reference, which torch.compile
fuses. The tests hold the two equal in float64 and check the gradients against finite differences.
"""
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

EPS = 1e-6  # inside every root; torch's own default depends on the dtype and is 8e-3 in bf16

# The same for NAG's updates, which are often weak (rms 1e-3 and less at initialisation) and must be brought
# to full size all the same: with EPS, r would lose up to a percent of its norm in every sublayer.
TINY = 1e-10


def by_hand(x):
    """Whether to use the hand-derived backward for x: in eager mode, on a CPU, at 32 bits or more."""
    return x.device.type == "cpu" and x.itemsize >= 4 and not torch.compiler.is_compiling()


def mean(x):
    return x.mean(-1, keepdim=True)


# ----------------------------------------------------------------------------- RMSNorm

def rms_norm_reference(x, gain):
    return F.rms_norm(x, x.shape[-1:], gain, EPS)


def inverse_rms(x, eps):
    """1 / rms(x) over the last dimension, (..., 1), in one pass and without a copy of x * x."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain):
        scale = inverse_rms(x, EPS)
        ctx.save_for_backward(x, gain, scale)
        return (x * scale).mul_(gain)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, gain, scale = ctx.saved_tensors
        both = grad * x
        rows = both.flatten(0, -2)                          # (N, C)
        d_gain = torch.mv(rows.t(), scale.flatten())
        along = torch.mv(rows, gain / -gain.numel()).view_as(scale).mul_(scale).mul_(scale)
        return torch.mul(grad, gain, out=both).addcmul_(x, along).mul_(scale), d_gain


def rms_norm(x, gain=None):
    """x / rms(x) over the last dimension, times gain (C,) if there is one. Same shape as x (..., C)."""
    return RMSNorm.apply(x, gain) if gain is not None and by_hand(x) else rms_norm_reference(x, gain)


# ----------------------------------------------------------------------------- queries and keys

def rotate(x, turn):
    """Channels 2i and 2i + 1 as a complex number, times that of turn: one pass. Both (..., hs)."""
    x, turn = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, turn))
    x, turn = (torch.view_as_complex(each.unflatten(-1, (-1, 2))) for each in (x, turn))
    return torch.view_as_real(x * turn).flatten(-2)


def rotate_normed_reference(x, turn):
    x = rms_norm_reference(x, None).unflatten(-1, (-1, 2))
    (a, b), (cos, sin) = x.unbind(-1), turn.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


class RotateNormed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, turn):
        scale = inverse_rms(x, EPS)                               # a rotation and a scaling commute
        y = rotate(x, turn).mul_(scale)
        ctx.save_for_backward(y, turn, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        y, turn, scale = ctx.saved_tensors
        part = grad * y
        along = mean(part).neg_()
        torch.addcmul(grad, y, along, out=part)              # the part along y can't change a normed vector
        back = turn.clone()
        back[..., 1::2].neg_()                               # the conjugate turns back
        return rotate(part, back).mul_(scale), None


def rotate_normed(x, turn):
    """
    RMSNorm over the last dimension, then the rotary embedding: channels 2i and 2i + 1 are a pair that turns
    by an angle proportional to the position. x (..., nh, hs); turn (T, nh, hs) holds cosine and sine of each
    pair.
    """
    return (RotateNormed.apply if by_hand(x) else rotate_normed_reference)(x, turn)


# ----------------------------------------------------------------------------- NAG's write

def nag_write_reference(r, f, a):
    f = f - mean(f)
    f = f - r * mean(f * r)                                 # orthogonal to r, since |r|^2 = C
    step = a * (mean(f.square()) + TINY).rsqrt()
    return torch.addcmul(r, f, step) * (1 + a * a).rsqrt()


class NagWrite(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r, f, a):
        o = f - mean(f)
        buffer = o * r
        t = mean(buffer)
        o.addcmul_(r, t, value=-1)
        scale = inverse_rms(o, TINY)
        shrink = (1 + a * a).rsqrt_()                                 # 1 / sqrt(1 + a^2)
        ctx.save_for_backward(r, o, a, t, scale, shrink)
        return torch.mul(r, shrink, out=buffer).addcmul_(o, a * scale * shrink)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        # r' = shrink r + step o, where o is orthogonal to r and r has mean zero; factors are one number per
        # token
        r, o, a, t, scale, shrink = ctx.saved_tensors
        step, buffer = a * scale * shrink, grad * r
        g_r = mean(buffer)                                            # <grad, .> / C
        g_o = mean(torch.mul(grad, o, out=buffer))
        pull = -step * scale * scale * g_o                            # through the 1 / rms(o) inside step
        along = step * g_r  # what dL/do has along r, and o can't have
        d_o = torch.mul(grad, step, out=buffer).addcmul_(o, pull)
        d_r = (grad * shrink).addcmul_(d_o, t.neg()).addcmul_(o, along.neg()).addcmul_(r, -along * t)
        d_f = d_o.addcmul_(r, along, value=-1).sub_(mean(grad) * step)
        d_a = (scale * g_o - a * g_r) * (shrink ** 3 * r.shape[-1])
        return d_r, d_f, d_a


def nag_write(r, f, a):
    """
    Turn the direction r by the angle atan(a) towards the part of f that is orthogonal to it (NAG eqs. 10-16).
    r (..., C) of norm sqrt(C) and mean zero, f (..., C) any vector, a (..., 1) -> (..., C) of norm sqrt(C)
    again.
    """
    return (NagWrite.apply if by_hand(r) else nag_write_reference)(r, f, a)


# ----------------------------------------------------------------------------- rows of kept tokens
# torch's own indexing does the same, but its backward must expect an index that occurs twice, and sums; ours
# copies. An index here never occurs twice.

class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.n = len(x)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad.new_zeros(ctx.n, *grad.shape[1:]).index_copy_(0, *ctx.saved_tensors, grad), None


def gather_rows(x, index):
    """Rows of x: (M, ...), index (N,) -> (N, ...)."""
    return GatherRows.apply(x, index)


class ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index, n):
        ctx.save_for_backward(index)
        return x.new_zeros(n, *x.shape[1:]).index_copy_(0, index, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad.index_select(0, *ctx.saved_tensors), None, None


def scatter_rows(x, index, n):
    """The inverse of gather_rows: x (N, ...) -> (n, ...), zero where no index points."""
    return ScatterRows.apply(x, index, n)


class Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        return x.index_select(0, index), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_rows, d_rest):
        return d_rest.index_copy(0, *ctx.saved_tensors, d_rows), None


class Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rest, index, rows):
        ctx.save_for_backward(index)
        return rest.index_copy(0, index, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        # rest's rows at index had no influence, but part overwrites their gradient anyway
        return grad, None, grad.index_select(0, *ctx.saved_tensors)


def part(x, index):
    """
    x (M, ...) -> its rows at index (N, ...), and a rest that is good for one thing: `join`. The two go
    together: one copy per direction, where indexing and its inverse would add up three tensors of x's size.
    """
    return Part.apply(x, index)


def join(rest, index, rows):
    """The x that `part` has got, with rows (N, ...) in the place of those at index."""
    return Join.apply(rest, index, rows)
