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
    return x.device.type == "cpu" and saves_little(x)


def saves_little(x):
    """The same on any device, for an op whose reference would keep much more for its backward."""
    return x.itemsize >= 4 and not torch.compiler.is_compiling()


def mean(x):
    return x.mean(-1, keepdim=True)


# ----------------------------------------------------------------------------- RMSNorm

def rms_norm_reference(x, gain, eps=None):
    return F.rms_norm(x, x.shape[-1:], gain, EPS if eps is None else eps)


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


def rms_norm(x, gain=None, eps=None):
    """x / rms(x) over the last dimension, times gain (C,) if there is one. Same shape as x (..., C)."""
    if gain is not None and eps is None and by_hand(x):
        return RMSNorm.apply(x, gain)
    return rms_norm_reference(x, gain, eps)


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


# ----------------------------------------------------------------------------- reading across depth
# Attention over the sources of a stream, once per token (Attention Residuals, arXiv:2603.15031, eqs. 2-4):
# keys are the normalised sources, values the sources themselves, and a query w is a parameter. Sources come
# as a list: a stack of them, kept for each read's backward, would cost memory quadratic in depth. Since
# queries are known beforehand, several reads can share one pass over the sources that exist already
# (`depth_read_ahead`); each of them then merges what came later (`depth_read` with `ahead`), as in online
# softmax. Both are exact.

def inverse_rms_reference(v):
    return (v.square().mean(-1) + EPS).rsqrt()


def depth_read_reference(w, sources, ahead=None, gain=None):
    scores, values = [(v @ w) * inverse_rms_reference(v) for v in sources], list(sources)
    if ahead is not None:
        values, scores = [ahead[0], *values], [ahead[1], *scores]
    weights = torch.stack(scores).softmax(0)[..., None]                              # (n, ..., 1)
    out = weights[0] * values[0]
    for p, v in zip(weights[1:], values[1:]):
        out = torch.addcmul(out, p, v)
    return out if gain is None else rms_norm_reference(out, gain, TINY)


def weighted(values, p):
    """n x (..., C), (n, ..., 1) -> (..., C), with p summing to 1"""
    if len(values) == 2:
        return torch.lerp(*values, p[1])
    out = values[0] * p[0]
    for v, weight in zip(values[1:], p[1:]):
        out.addcmul_(v, weight)
    return out


class DepthRead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, gain, o, lse, *sources):
        scale = [inverse_rms(v, EPS) for v in sources]
        scores = [torch.matmul(v, w)[..., None].mul_(r) for v, r in zip(sources, scale)]
        values = sources if o is None else (o, *sources)
        p = torch.stack(scores if o is None else [lse[..., None], *scores]).softmax(0)   # (n, ..., 1)
        out = weighted(values, p)
        norm = None if gain is None else inverse_rms(out, TINY)
        ctx.save_for_backward(w, gain, norm, p, *values, *scale, *scores)
        ctx.n, ctx.ahead = len(sources), o is not None
        return out if gain is None else out.mul_(norm).mul_(gain)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        w, gain, norm, p, *rest = ctx.saved_tensors
        n, C = ctx.n, w.numel()
        values, scale, scores = rest[:n + ctx.ahead], rest[n + ctx.ahead:][:n], rest[n + ctx.ahead:][n:]
        buffer, d_gain, factor = torch.empty_like(grad), None, 1.0
        if gain is not None:   # through the norm: the mean is computed once more, in place of keeping it
            out = weighted(values, p)
            torch.mul(grad, out, out=buffer)
            d_gain = torch.mv(buffer.flatten(0, -2).t(), norm.flatten())
            along = torch.matmul(buffer, gain / -C)[..., None].mul_(norm).mul_(norm)
            grad, factor = (grad * gain).addcmul_(out, along), norm      # d_out is grad * factor
            inner = along * norm * (-C * TINY)                           # <d_out, out>: 0, up to the epsilon
        else:
            dots = [torch.mul(grad, v, out=buffer).sum(-1, keepdim=True) for v in values]
            inner = sum(weight * dot for weight, dot in zip(p, dots))
        d_w, d_values, d_scores, p_ahead = torch.zeros_like(w), [], [], p[0]
        for v, r, score, weight in zip(values[ctx.ahead:], scale, scores, p[ctx.ahead:]):
            d_score = weight * (torch.mul(grad, v, out=buffer).sum(-1, keepdim=True).mul_(factor) - inner)
            d_score = d_score if len(p) > 1 else torch.zeros_like(weight)            # exactly
            d_dot = d_score * r                                                      # of <w, v>
            d_w.addmv_(v.flatten(0, -2).t(), d_dot.flatten())
            d_v = (grad * (weight * factor)).addcmul_(w, d_dot)
            d_values.append(d_v.addcmul_(v, d_dot * score * r / -C))                 # through 1 / rms(v)
            d_scores.append(d_score)
        if not ctx.ahead:
            return d_w, d_gain, None, None, *d_values
        # those of all scores sum to 0, since the weights sum to 1
        d_lse = -sum(d_scores)[..., 0] if d_scores else torch.zeros_like(p_ahead[..., 0])
        return d_w, d_gain, grad * (p_ahead * factor), d_lse, *d_values


def depth_read(w, sources, ahead=None, gain=None):
    """
    w (C,), sources n x (..., C) -> their mean (..., C), weighted by the softmax of <w, v> / rms(v) over the
    sources v. ahead: a pair (o (..., C), lse (...,)) that depth_read_ahead has got from further sources. With
    gain (C,), the RMSNorm of the mean.
    """
    if by_hand(w) and torch.is_grad_enabled():
        return DepthRead.apply(w, gain, *(ahead or (None, None)), *sources)
    if ahead is not None and len(sources) == 1 and not torch.is_grad_enabled():   # decoding, in few calls
        v, (o, lse) = sources[0], ahead
        out = torch.lerp(o, v, torch.sigmoid((v @ w) * inverse_rms(v, EPS)[..., 0] - lse)[..., None])
        return out if gain is None else (out * inverse_rms(out, TINY)).mul_(gain)
    return depth_read_reference(w, sources, ahead, gain)


def depth_read_ahead_reference(w, *sources):
    v = torch.stack(sources, dim=-2)                                                 # (..., n, C)
    scores = (v @ w.t()) * inverse_rms_reference(v)[..., None]                       # (..., n, S)
    o = scores.softmax(-2).transpose(-1, -2) @ v
    return scores.logsumexp(-2), *o.unbind(-2)


def pieces(n_rows, row_size):
    """Slices of the rows, each of at most 8 MB in fp32: of what is stacked, only so much exists at a time."""
    size = max(1, 2 ** 21 // row_size)
    return [slice(i, min(i + size, n_rows)) for i in range(0, n_rows, size)]


class DepthReadAhead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, *sources):
        flat = [v.flatten(0, -2) for v in sources]                                   # n x (N, C)
        (N, C), n, S = flat[0].shape, len(flat), len(w)
        o, scale = [torch.empty_like(flat[0]) for _ in range(S)], w.new_empty(N, n, 1)
        scores = w.new_empty(N, n, S)
        for rows in pieces(N, n * C):
            v = torch.stack([x[rows] for x in flat], dim=1)
            scale[rows] = inverse_rms(v, EPS)
            scores[rows] = torch.matmul(v, w.t()).mul_(scale[rows])
            for out, part in zip(o, torch.matmul(scores[rows].softmax(1).mT, v).unbind(1)):
                out[rows] = part
        lse = scores.logsumexp(1)                                                    # (N, S)
        ctx.save_for_backward(w, scale, scores, lse, *sources)
        return lse.view(*sources[0].shape[:-1], S), *(out.view_as(sources[0]) for out in o)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_lse, *d_o):
        w, scale, scores, lse, *sources = ctx.saved_tensors
        flat, d_o = ([x.flatten(0, -2) for x in parts] for parts in (sources, d_o))
        d_lse = d_lse.flatten(0, -2)
        (N, C), n, d_w = flat[0].shape, len(flat), torch.zeros_like(w)
        d_flat = [torch.empty_like(x) for x in flat]
        for rows in pieces(N, n * C):
            v, d_out = (torch.stack([x[rows] for x in parts], dim=1) for parts in (flat, d_o))
            p = (scores[rows] - lse[rows, None]).exp_()                              # (N, n, S)
            d_p = torch.matmul(v, d_out.mT)
            d_dot = (d_p - (p * d_p).sum(1, keepdim=True)).add_(d_lse[rows, None]).mul_(p).mul_(scale[rows])
            pull = (d_dot * scores[rows]).sum(-1, keepdim=True).mul_(scale[rows]).div_(-C)
            torch.addmm(d_w, d_dot.flatten(0, 1).t(), v.flatten(0, 1), out=d_w)
            d_v = torch.matmul(p, d_out)
            torch.addmm(d_v.view(-1, C), d_dot.flatten(0, 1), w, out=d_v.view(-1, C))
            for out, part in zip(d_flat, d_v.addcmul_(v, pull).unbind(1)):
                out[rows] = part
        return d_w, *(d.view_as(v) for d, v in zip(d_flat, sources))


def depth_read_ahead(w, sources):
    """
    S reads at once: w (S, C), sources n x (..., C) -> for each read a pair that depth_read takes as `ahead`:
    the weighted mean (..., C), and the logarithm of the sum of the exponentials of the scores (...,).
    """
    fast = saves_little(w) and torch.is_grad_enabled()   # the reference's stacks: memory quadratic in depth
    lse, *o = (DepthReadAhead.apply if fast else depth_read_ahead_reference)(w, *sources)
    return list(zip(o, lse.unbind(-1)))


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
