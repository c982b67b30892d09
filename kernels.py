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
    """Whether to use the hand-derived backward for x: in eager mode, on a CPU."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def mean(x):
    return x.mean(-1, keepdim=True)


# ----------------------------------------------------------------------------- RMSNorm

def rms_norm_reference(x, gain):
    return F.rms_norm(x, x.shape[-1:], gain, EPS)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain):
        scale = mean(x.square()).add_(EPS).rsqrt_()         # (..., 1)
        normed = x * scale
        ctx.save_for_backward(normed, gain, scale)
        return normed * gain

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        normed, gain, scale = ctx.saved_tensors
        both = (grad * normed).flatten(0, -2)               # (N, C)
        along = torch.mv(both, gain / -gain.numel()).view_as(scale)
        return (grad * gain).addcmul_(normed, along).mul_(scale), both.sum(0)


def rms_norm(x, gain=None):
    """x / rms(x) over the last dimension, times gain (C,) if there is one. Same shape as x (..., C)."""
    return RMSNorm.apply(x, gain) if gain is not None and by_hand(x) else rms_norm_reference(x, gain)


# ----------------------------------------------------------------------------- queries and keys

def turn_(y, x, sin, sign=1):
    """y += sign * (the sine part of x's rotation), in place and half by half: cheaper than rolling a copy of
    x."""
    h = x.shape[-1] // 2
    y[..., :h].addcmul_(x[..., h:], sin[..., :h], value=sign)
    y[..., h:].addcmul_(x[..., :h], sin[..., h:], value=sign)
    return y


def rotate_normed_reference(x, cos, sin):
    x = rms_norm_reference(x, None)
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class RotateNormed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        scale = mean(x.square()).add_(EPS).rsqrt_()          # a rotation and a scaling commute
        y = turn_(x * cos, x, sin).mul_(scale)
        ctx.save_for_backward(y, cos, sin, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        y, cos, sin, scale = ctx.saved_tensors
        grad = (y * mean(grad * y).neg_()).add_(grad)        # the part along y can't change a normed vector
        return turn_(grad * cos, grad, sin, sign=-1).mul_(scale), None, None


def rotate_normed(x, cos, sin):
    """
    RMSNorm over the last dimension, then the rotary embedding: channels i and i + hs/2 are a pair that turns
    by an angle proportional to the position. x (..., nh, hs); cos (T, nh, hs), sin likewise, its first half
    negated.
    """
    return (RotateNormed.apply if by_hand(x) else rotate_normed_reference)(x, cos, sin)


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
        t = mean(o * r)
        o = o.addcmul_(r, t, value=-1)
        scale = mean(o.square()).add_(TINY).rsqrt_()                  # 1 / rms(o)
        shrink = (1 + a * a).rsqrt_()                                 # 1 / sqrt(1 + a^2)
        ctx.save_for_backward(r, o, a, t, scale, shrink)
        return (r * shrink).addcmul_(o, a * scale * shrink)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        # r' = shrink r + step o, where o is orthogonal to r and r has mean zero; factors are one number per
        # token
        r, o, a, t, scale, shrink = ctx.saved_tensors
        step = a * scale * shrink
        g_r, g_o = mean(grad * r), mean(grad * o)                     # <grad, .> / C
        pull = -step * scale * scale * g_o                            # through the 1 / rms(o) inside step
        along = step * g_r  # what dL/do has along r, and o can't have
        d_o = (grad * step).addcmul_(o, pull)
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
