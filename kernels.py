"""
Row-wise operations of the residuals, for which torch has none: NAG's write, the read across depth of
Attention Residuals, the gathering of the tokens that Mixture-of-Depths keeps.

What such an op costs is the rows it moves between memory and chip. Rows of width C, read or written per
token, forward + backward, for n sources and S queries; what is one number per token is left out:

    op                        eager torch, n 9, S 4    torch.compile at best        here
    nag_write                       20 + 58            3 + 5                        3 + 5
    nag_write_rows, share k kept    19 + 54            2 + 3k and 2 + 5k            2 + k and 3 + 2k
    depth_read                      62 + 216           2n + 1 and 6n + 2            n + 1 and 3n + 2
    depth_read with RMSNorm         69 + 239           2n + 2 and 6n + 4            n + 2 and 3n + 2
    depth_read_ahead               393 + 1524          2n + S and 6n + 2S           n + S and 3n + 2S
    part_normed, share k kept        9 + 33            3k and 2 + 4k                3k and 2 + 4k

Eager: counted by `python kernels.py --rows`, of the references below, k = 0.7. torch.compile: what is left if
all that can be is fused, by hand: a softmax over n sources takes two passes over them, forward and backward,
autograd adds up their n gradients, 3 rows each, where ours go into one buffer (n rows less, where a source
has none yet), and a stream is copied before its kept rows are overwritten. NAG's product with its preferred
directions isn't counted: see nag_gain.

Each op has, in this order: a reference of a few lines that *is* the definition; where the CPU's eager mode
needs it, the same with a backward derived by hand, since there every primitive is a pass over memory; the
same in Triton; a wrapper that chooses. A Triton kernel computes in fp32 whatever it is given, holds one row
at a time in registers, and adds up what belongs to a parameter per program: results repeat bit for bit.

    python kernels.py              every op against its reference; on a GPU its speed, too, elsewhere the
                                   registers of each kernel, compiled for an H100 or H200 (sm_90)
    TRITON_INTERPRET=1 python ...  runs Triton kernels on a CPU, slowly: the tests do
"""
import functools
import os
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch.utils._python_dispatch
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError:   # optional where there is no CUDA
    triton, tl = None, SimpleNamespace(constexpr=int)

EPS = 1e-6  # inside every root; torch's own default depends on the dtype and is 8e-3 in bf16

# The same for NAG's updates, which are often weak (rms 1e-3 and less at initialisation) and must be brought
# to full size all the same: with EPS, r would lose up to a percent of its norm in every sublayer.
TINY = 1e-10

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
STAGES = 3           # sources of a read across depth that are fetched at a time
MOST_SOURCES = 200   # of a read across depth: 99 blocks of Full AttnRes


def on_triton(x, kernels):
    """Whether to launch Triton kernels for x. kernels: auto, on or off (--kernels)."""
    if kernels == "off" or triton is None or x.itemsize > 4:   # they compute in fp32
        return False
    return x.is_cuda or kernels == "on" and INTERPRETED


def why_no_triton():
    """-> None where --kernels on can work, else a sentence."""
    if triton is None:
        return "triton isn't installed; pip install triton, or use --kernels auto"
    if not (torch.cuda.is_available() or INTERPRETED):
        return "needs a CUDA GPU, or TRITON_INTERPRET=1 to try kernels on a CPU; use --kernels auto"
    return None


def by_hand(x):
    """Whether to use the hand-derived backward for x: in eager mode, on a CPU, at 32 bits or more."""
    return x.device.type == "cpu" and saves_little(x)


def saves_little(x):
    """The same on any device, for an op whose reference would keep much more for its backward."""
    return x.itemsize >= 4 and not torch.compiler.is_compiling()


class NoContext:
    """The ctx of a Function's forward through which nothing will be differentiated"""
    def save_for_backward(self, *tensors):
        pass


def call(function, *inputs):
    """
    function.apply, or where no gradients are wanted its forward alone: apply takes longer than a small op,
    and to decode a token is nothing but small ops.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function.apply(*inputs)
    return function.forward(NoContext(), *inputs)


def widen(x):
    """Half precision to fp32; fp32 and fp64 as they are. The stream's own arithmetic is never in bf16."""
    return x if x.itemsize >= 4 else x.float()


def mean(x):
    return x.mean(-1, keepdim=True)


# ----------------------------------------------------------------------------- launching Triton

jit = triton.jit if triton else lambda kernel: kernel


def layout(C, tile):
    """-> BLOCK and warps of a program that has tile rows of C numbers in its registers"""
    block = triton.next_power_of_2(C)
    return block, max(1, min(16, tile * block // 512))


def launch(kernel, programs, C, *arguments, tile=1, **constants):
    """Run that many programs."""
    if programs:
        block, warps = layout(C, tile)
        kernel[(programs,)](*arguments, BLOCK=block, num_warps=warps, **constants)


def programs_for(rows):
    """Programs of a kernel that loops over rows: many per place on a GPU, few enough to add up their sums."""
    return min(rows, 4096)


def op(schema, allocate, mutates=()):
    """
    A decorator: a function that fills tensors becomes an op that torch.compile takes as it is. allocate makes
    the tensors from the op's arguments; the function gets them, and then the arguments.
    """
    def wrap(fill):
        def run(*arguments):
            results = allocate(*arguments)
            fill(*(results if isinstance(results, tuple) else (results,)), *arguments)
            return results
        name = f"nanodepth::{fill.__name__}"
        made = torch.library.custom_op(name, run, mutates_args=mutates, schema=schema)
        made.register_fake(allocate)
        return made
    return wrap


def like(x, *shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device=x.device)


@functools.lru_cache(maxsize=4096)   # tensors come back to the same places step after step
def to_device(numbers, device):
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def flat_rows(*tensors):
    """(..., C) -> (N, C), contiguous"""
    return [x.reshape(-1, x.shape[-1]).contiguous() for x in tensors]


def aligned(tensors):
    """At addresses from which kernels can load 16 bytes at a time, which Triton can't see in a table."""
    return [x.clone() if x.data_ptr() % 16 else x for x in tensors]


def table(*lists):
    """Addresses of tensors, and other numbers, list by list, for kernels with any number of inputs."""
    numbers = tuple(x.data_ptr() if torch.is_tensor(x) else int(x) for each in lists for x in each)
    return to_device(numbers, next(x for each in lists for x in each if torch.is_tensor(x)).device)


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
        # LayerNorm's backward, told that the mean is zero, lacks only that our mean isn't held at zero
        x, gain, scale = ctx.saved_tensors
        grad = grad.contiguous()
        dx, d_gain, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, gain.shape, torch.zeros_like(scale), scale, gain, None, (True, True, False))
        held = torch.mv(grad.view(-1, len(gain)), gain / len(gain)).view_as(scale)
        return dx.add_(held.mul_(scale)), d_gain


def rms_norm(x, gain=None, eps=None):
    """x / rms(x) over the last dimension, times gain (C,) if there is one. Same shape as x (..., C)."""
    if gain is not None and eps is None and by_hand(x):
        return call(RMSNorm, x, gain)
    return rms_norm_reference(x, gain, eps)


# ----------------------------------------------------------------------------- queries and keys

def as_complex(x):
    """Channels 2i and 2i + 1 of x (..., hs) as a complex number, (..., hs / 2)"""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def rotate_normed_reference(x, turn, n):
    def rotated(x):
        (a, b), (cos, sin) = (each.unflatten(-1, (-1, 2)).unbind(-1) for each in (x, turn))
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

    parts = x.unbind(-3)
    return *(rotated(rms_norm_reference(part, None)) for part in parts[:n]), *parts[n:]


class RotateNormed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, turn, n):
        turn, parts = as_complex(turn), x.unbind(-3)
        turned = [torch.view_as_real(as_complex(part) * turn).flatten(-2) for part in parts[:n]]
        scales = [inverse_rms(y, EPS) for y in turned]            # a rotation leaves the norm as it is
        turned = [y.mul_(scale) for y, scale in zip(turned, scales)]
        ctx.save_for_backward(turn, *turned, *scales)
        return *turned, *parts[n:]

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        turn, *saved = ctx.saved_tensors
        n = len(saved) // 2
        dx = grads[0].new_empty(*grads[0].shape[:-2], len(grads), *grads[0].shape[-2:])
        back = turn.conj().resolve_conj()
        for to, grad, y, scale in zip(dx.unbind(-3), grads, saved[:n], saved[n:]):
            part = grad * y
            # what lies along y can't change a normed vector
            part = torch.addcmul(grad, y, mean(part).neg_(), out=part).mul_(scale)
            torch.mul(as_complex(part), back, out=as_complex(to))
        for to, grad in zip(dx.unbind(-3)[n:], grads[n:]):
            to.copy_(grad)
        return dx, None, None


def rotate_normed(x, turn, n):
    """
    x (..., parts, nh, hs) -> its parts (..., nh, hs). The first n, queries and keys, go through an RMSNorm
    over the last dimension and the rotary embedding: channels 2i and 2i + 1 are a pair that turns by an angle
    proportional to the position. turn (T, nh or 1, hs) holds cosine and sine of each pair.
    """
    return call(RotateNormed, x, turn, n) if by_hand(x) else rotate_normed_reference(x, turn, n)


class Prefixes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ends):
        return tuple(x[:, :end] for end in ends)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        *shorter, dx = grads
        dx = dx.clone(memory_format=torch.contiguous_format)   # not ours to change
        for grad in shorter:
            dx[:, :grad.shape[1]] += grad
        return dx, None


def prefixes(x, ends):
    """
    x (B, T, ...) -> x[:, :end] for each of the ends, of which the last is T. Backward adds up their gradients
    in one buffer; that of a slice is as large as x, and zero almost everywhere.
    """
    return call(Prefixes, x, ends)


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


@jit
def nag_write_forward(r_ptr, s_ptr, f_ptr, a_ptr, slot_ptr, out_ptr, s_out_ptr, C,
                      TINY: tl.constexpr, EPS: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)                                                       # (BLOCK,) as all rows
    inside = cols < C
    slot = row if slot_ptr is None else tl.load(slot_ptr + row)
    runs = cols < tl.where(slot >= 0, C, 0)             # of a token that skips, nothing but r is read
    r = tl.load(r_ptr + row * C + cols, mask=inside, other=0.0).to(tl.float32)
    f = tl.load(f_ptr + slot * C + cols, mask=runs, other=0.0).to(tl.float32)
    a = tl.where(slot >= 0, tl.load(a_ptr + row), 0.0)
    f = tl.where(inside, f - tl.sum(f) / C, 0.0)
    o = f - r * (tl.sum(f * r) / C)                     # from registers: a closed form of |o| would cancel
    shrink = tl.rsqrt(1.0 + a * a)
    out = (r + o * (a * tl.rsqrt(tl.sum(o * o) / C + TINY))) * shrink
    if ROUNDS:                                          # a stream in bf16: measure the norm, or it drifts
        out = tl.where(slot >= 0, out * tl.rsqrt(tl.sum(out * out) / C + EPS), out)
    tl.store(out_ptr + row * C + cols, out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(s_out_ptr + row, tl.load(s_ptr + row) - tl.log(shrink))


@jit
def nag_write_backward(g_ptr, gs_ptr, r_ptr, f_ptr, a_ptr, slot_ptr, dr_ptr, df_ptr, da_ptr, C,
                       TINY: tl.constexpr, EPS: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)                                                       # (BLOCK,) as all rows
    inside = cols < C
    slot = row if slot_ptr is None else tl.load(slot_ptr + row)
    runs = cols < tl.where(slot >= 0, C, 0)
    g = tl.load(g_ptr + row * C + cols, mask=inside, other=0.0).to(tl.float32)
    r = tl.load(r_ptr + row * C + cols, mask=inside, other=0.0).to(tl.float32)
    f = tl.load(f_ptr + slot * C + cols, mask=runs, other=0.0).to(tl.float32)
    a = tl.where(slot >= 0, tl.load(a_ptr + row), 0.0)
    f = tl.where(inside, f - tl.sum(f) / C, 0.0)        # the forward pass once more, from r, f and a
    t = tl.sum(f * r) / C
    o = f - r * t
    scale, shrink = tl.rsqrt(tl.sum(o * o) / C + TINY), tl.rsqrt(1.0 + a * a)
    step = a * scale * shrink
    if ROUNDS:
        out = r * shrink + o * step
        size = tl.rsqrt(tl.sum(out * out) / C + EPS)
        g = tl.where(slot >= 0, (g - out * (size * size * tl.sum(g * out) / C)) * size, g)
    g_r, g_o = tl.sum(g * r) / C, tl.sum(g * o) / C
    d_o = g * step - o * (step * scale * scale * g_o)   # the second term: through 1 / rms(o) inside step
    along = step * g_r                                  # what dL/do has along r, and o can't have
    dr = g * shrink - d_o * t - o * along - r * (along * t)
    df = d_o - r * along - tl.sum(g) / C * step
    da = (scale * g_o - a * g_r) * shrink * shrink * shrink * C + tl.load(gs_ptr + row) * a * shrink * shrink
    tl.store(dr_ptr + row * C + cols, dr.to(dr_ptr.dtype.element_ty), mask=inside)
    tl.store(df_ptr + slot * C + cols, df.to(df_ptr.dtype.element_ty), mask=runs)
    tl.store(da_ptr + row, tl.where(slot >= 0, da, 0.0))


def write_options(r):
    return dict(TINY=TINY, EPS=EPS, ROUNDS=r.itemsize < 4)


@op("(Tensor r, Tensor s, Tensor f, Tensor a, Tensor? slot) -> (Tensor, Tensor)",
    lambda r, s, f, a, slot: (torch.empty_like(r), torch.empty_like(s)))
def nag_write_op(out, s_out, r, s, f, a, slot):
    N, C = r.shape
    launch(nag_write_forward, N, C, r, s, f, a, slot, out, s_out, C, **write_options(r))


@op("(Tensor g, Tensor gs, Tensor r, Tensor f, Tensor a, Tensor? slot) -> (Tensor, Tensor, Tensor)",
    lambda g, gs, r, f, a, slot: (torch.empty_like(r), torch.empty_like(f), torch.empty_like(a)))
def nag_write_back(dr, df, da, g, gs, r, f, a, slot):
    N, C = r.shape
    launch(nag_write_backward, N, C, g, gs, r, f, a, slot, dr, df, da, C, **write_options(r))


class NagWriteTriton(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r, s, f, a, slot):
        ctx.save_for_backward(r, f, a, slot)
        return nag_write_op(r, s, f, a, slot)

    @staticmethod
    @once_differentiable
    def backward(ctx, g, gs):
        dr, df, da = nag_write_back(g.contiguous(), gs.contiguous(), *ctx.saved_tensors)
        return dr, gs, df, da, None


def nag_write_rows(r, s, f, a, slot=None):
    """
    nag_write in Triton, for the N kept tokens among those of r, s and a, in one pass. f (N, C) has their
    updates: a token's is row slot (...,) of it; -1: none, and the token stays as it was. None: all are kept.
    """
    out, s_out = NagWriteTriton.apply(*flat_rows(r, widen(s), f, widen(a)),
                                      None if slot is None else slot.flatten())
    return out.view_as(r), s_out.view_as(s)


def nag_turn(r, f, a):
    """The new direction of nag_write, in torch."""
    wide = widen(r), widen(f), a
    turned = call(NagWrite, *wide) if by_hand(r) else nag_write_reference(*wide)
    if r.itemsize < 4:   # rounding would add up over depth: measure the norm
        turned = rms_norm(turned).to(r.dtype)
    return turned


def nag_grow(s, a):
    """The new log-norm of nag_write, in torch."""
    return s + 0.5 * torch.log1p(widen(a).square())


def nag_write(r, s, f, a, kernels="auto"):
    """
    Turn the direction r by the angle atan(a) towards the part of f that is orthogonal to it, and let the
    log-norm s grow by log(1 + a^2) / 2 (NAG eqs. 10-17). r (..., C) of norm sqrt(C) and mean zero, f (..., C)
    any vector, a and s (..., 1) -> (..., C) of norm sqrt(C) again, (..., 1).
    """
    return nag_write_rows(r, s, f, a) if on_triton(r, kernels) else (nag_turn(r, f, a), nag_grow(s, a))


# ----------------------------------------------------------------------------- NAG's modulator

FLOOR = 1e-6   # of m's base: 0 ** beta has an infinite slope for beta < 1, and has ended runs of others


def nag_gain_reference(z, p, alpha, beta):
    base = F.linear(torch.sigmoid(z), p[None])              # (..., 1), in (0, 1)
    return alpha * base.clamp_min(FLOOR) ** beta


@jit
def nag_gain_forward(z_ptr, p_ptr, alpha_ptr, beta_ptr, a_ptr, N, C, FLOOR: tl.constexpr, ROWS: tl.constexpr,
                     BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)                  # (ROWS,)
    cols = tl.arange(0, BLOCK)                                                       # (BLOCK,), directions
    inside = (row < N)[:, None] & (cols < C)[None, :]                                # (ROWS, BLOCK)
    z = tl.load(z_ptr + row[:, None] * C + cols[None, :], mask=inside, other=0.0)
    p = tl.load(p_ptr + cols, mask=cols < C, other=0.0)
    base = tl.maximum(tl.sum(tl.sigmoid(z) * p[None, :], axis=1), FLOOR)
    m = tl.exp(tl.load(beta_ptr) * tl.log(base))
    tl.store(a_ptr + row, tl.load(alpha_ptr) * m, mask=row < N)


@jit
def nag_gain_backward(g_ptr, z_ptr, p_ptr, alpha_ptr, beta_ptr, dz_ptr, sums_ptr, N, C, FLOOR: tl.constexpr,
                      ROWS: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)                                                       # (BLOCK,), directions
    p = tl.load(p_ptr + cols, mask=cols < C, other=0.0)
    alpha, beta = tl.load(alpha_ptr), tl.load(beta_ptr)
    dp = tl.zeros((BLOCK,), tl.float32)                 # sums over the rows of this program
    d_alpha, d_beta = tl.sum(dp), tl.sum(dp)
    for tile in range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)                    # (ROWS,)
        inside = (row < N)[:, None] & (cols < C)[None, :]                            # (ROWS, BLOCK)
        near = tl.sigmoid(tl.load(z_ptr + row[:, None] * C + cols[None, :], mask=inside, other=0.0))
        g = tl.load(g_ptr + row, mask=row < N, other=0.0)
        total = tl.sum(near * p[None, :], axis=1)
        base = tl.maximum(total, FLOOR)
        m = tl.exp(beta * tl.log(base))
        d_base = tl.where(total >= FLOOR, g * alpha * beta * m / base, 0.0)
        d_alpha += tl.sum(g * m)
        d_beta += tl.sum(g * alpha * m * tl.log(base))
        dp += tl.sum(d_base[:, None] * near, axis=0)
        dz = d_base[:, None] * p[None, :] * near * (1.0 - near)
        tl.store(dz_ptr + row[:, None] * C + cols[None, :], dz, mask=inside)
    here = sums_ptr + tl.program_id(0) * (C + 2)
    tl.store(here + cols, dp, mask=cols < C)
    tl.store(here + C, d_alpha)
    tl.store(here + C + 1, d_beta)


GAIN_ROWS = 32


@op("(Tensor z, Tensor p, Tensor alpha, Tensor beta) -> Tensor",
    lambda z, p, alpha, beta: like(z, len(z), 1))
def nag_gain_op(a, z, p, alpha, beta):
    N, C = z.shape
    launch(nag_gain_forward, -(-N // GAIN_ROWS), C, z, p, alpha, beta, a, N, C, tile=GAIN_ROWS, FLOOR=FLOOR,
           ROWS=GAIN_ROWS)


@op("(Tensor g, Tensor z, Tensor p, Tensor alpha, Tensor beta) -> (Tensor, Tensor)",
    lambda g, z, p, *_: (torch.empty_like(z), like(z, programs_for(-(-len(z) // GAIN_ROWS)), len(p) + 2)))
def nag_gain_back(dz, sums, g, z, p, alpha, beta):
    N, C = z.shape
    launch(nag_gain_backward, len(sums), C, g, z, p, alpha, beta, dz, sums, N, C, tile=GAIN_ROWS, FLOOR=FLOOR,
           ROWS=GAIN_ROWS)


class NagGainTriton(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, p, alpha, beta):
        ctx.save_for_backward(z, p, alpha, beta)
        return nag_gain_op(z, p, alpha, beta)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        dz, sums = nag_gain_back(g.contiguous(), *ctx.saved_tensors)
        sums = sums.sum(0)
        return dz, sums[:-2], sums[-2], sums[-1]


def nag_gain(z, p, alpha, beta, kernels="auto"):
    """
    alpha m, m = (sum_i p_i sigmoid(z_i)) ** beta (NAG eq. 13). z (..., n): how near the direction is to each
    of the n preferred ones, p (n,), alpha and beta () -> (..., 1). It comes before the write, since the skip
    rule decides by it whether there is one. z is a matrix product, torch's business: here, the n preferred
    directions would be read once per few rows, which is more than reading the one direction once more.
    """
    if on_triton(z, kernels) and z.dtype == torch.float32:
        a = NagGainTriton.apply(z.flatten(0, -2).contiguous(), p.contiguous(), alpha, beta)
        return a.view(*z.shape[:-1], 1)
    return nag_gain_reference(z, p, alpha, beta)


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


@jit
def depth_read_forward(table_ptr, w_ptr, gain_ptr, o_ptr, lse_ptr, out_ptr, mean_ptr, total_ptr, stats_ptr,
                       n, N, C, EPS: tl.constexpr, TINY: tl.constexpr, STAGES: tl.constexpr,
                       BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)                                                       # (BLOCK,) as all rows
    inside = cols < C
    w = tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        here = tl.cast(row, tl.int64) * C + cols
        top, total = -float("inf"), 0.0                 # online softmax: largest score, sum of exponentials
        out = tl.zeros((BLOCK,), tl.float32)
        if o_ptr is not None:                           # what was read ahead is one more source
            top, total = tl.load(lse_ptr + row), 1.0
            out = tl.load(o_ptr + here, mask=inside, other=0.0).to(tl.float32)
        for i in tl.range(n, num_stages=STAGES):        # the next sources are under way meanwhile
            source = tl.multiple_of(tl.load(table_ptr + i).to(out_ptr.dtype), 16)
            v = tl.load(source + here, mask=inside, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(v * v) / C + EPS)
            score = tl.sum(v * w) * scale
            tl.store(stats_ptr + i * N + row, scale)
            tl.store(stats_ptr + (n + i) * N + row, score)
            new = tl.maximum(top, score)
            old, p = tl.exp(top - new), tl.exp(score - new)
            out, total, top = out * old + v * p, total * old + p, new
        out = out / total
        tl.store(total_ptr + row, top + tl.log(total))
        if gain_ptr is not None:
            tl.store(mean_ptr + here, out.to(mean_ptr.dtype.element_ty), mask=inside)
            gain = tl.load(gain_ptr + cols, mask=inside, other=0.0).to(tl.float32)
            out = out * tl.rsqrt(tl.sum(out * out) / C + TINY) * gain
        tl.store(out_ptr + here, out.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def depth_read_backward(table_ptr, g_ptr, w_ptr, gain_ptr, o_ptr, lse_ptr, mean_ptr, total_ptr, stats_ptr,
                        do_ptr, d_lse_ptr, dw_ptr, d_gain_ptr, n, N, C, TINY: tl.constexpr,
                        STAGES: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)                                                       # (BLOCK,) as all rows
    inside = cols < C
    w = tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    dw, d_gain = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)      # of this program's rows
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        here = tl.cast(row, tl.int64) * C + cols
        g = tl.load(g_ptr + here, mask=inside, other=0.0).to(tl.float32)
        out = tl.load(mean_ptr + here, mask=inside, other=0.0).to(tl.float32)
        if gain_ptr is not None:                        # through the norm
            gain = tl.load(gain_ptr + cols, mask=inside, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(out * out) / C + TINY)
            d_gain += g * out * scale
            g = g * gain
            g = (g - out * (scale * scale * tl.sum(g * out) / C)) * scale
        inner, total = tl.sum(g * out), tl.load(total_ptr + row)
        if o_ptr is not None:
            o = tl.load(o_ptr + here, mask=inside, other=0.0).to(tl.float32)
            p = tl.exp(tl.load(lse_ptr + row) - total)
            tl.store(do_ptr + here, (g * p).to(do_ptr.dtype.element_ty), mask=inside)
            tl.store(d_lse_ptr + row, p * (tl.sum(g * o) - inner))
        for i in tl.range(n, num_stages=STAGES):        # the next sources are under way meanwhile
            source = tl.multiple_of(tl.load(table_ptr + i).to(g_ptr.dtype), 16)
            place = tl.multiple_of(tl.load(table_ptr + n + i).to(g_ptr.dtype), 16)   # of its gradient
            begun = cols < C * tl.load(table_ptr + 2 * n + i)                        # or nothing there yet
            v = tl.load(source + here, mask=inside, other=0.0).to(tl.float32)
            scale, score = tl.load(stats_ptr + i * N + row), tl.load(stats_ptr + (n + i) * N + row)
            p = tl.exp(score - total)
            d_dot = p * (tl.sum(g * v) - inner) * scale                              # of <w, v>
            if o_ptr is None:
                d_dot = tl.where(n > 1, d_dot, 0.0)     # exactly: a single weight is 1 whatever its score
            dv = g * p + w * d_dot - v * (d_dot * score * scale / C)
            dw += v * d_dot
            dv += tl.load(place + here, mask=begun, other=0.0).to(tl.float32)
            tl.store(place + here, dv.to(g_ptr.dtype.element_ty), mask=inside)
    tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * C + cols, dw, mask=inside)
    if gain_ptr is not None:
        tl.store(d_gain_ptr + tl.program_id(0).to(tl.int64) * C + cols, d_gain, mask=inside)


def depth_read_results(w, gain, o, lse, sources):
    v = sources[0]
    mean = torch.empty_like(v) if gain is not None else like(v, 0, dtype=v.dtype)
    return torch.empty_like(v), mean, like(v, len(v)), like(v, 2, len(sources), len(v))


@op("(Tensor w, Tensor? gain, Tensor? o, Tensor? lse, Tensor[] sources) -> (Tensor, Tensor, Tensor, Tensor)",
    depth_read_results)
def depth_read_op(out, mean, total, stats, w, gain, o, lse, sources):
    (N, C), sources = out.shape, aligned(sources)
    launch(depth_read_forward, programs_for(N), C, table(sources), w, gain, o, lse, out, mean, total, stats,
           len(sources), N, C, EPS=EPS, TINY=TINY, STAGES=STAGES)


def depth_read_gradients(g, w, gain, o, lse, mean, *_):
    sums = like(g, programs_for(len(g)), len(w))
    wanted = lambda x, size: like(g, 0) if x is None else torch.empty_like(size)
    return sums, wanted(gain, sums), wanted(o, o), wanted(o, lse)


@op("(Tensor g, Tensor w, Tensor? gain, Tensor? o, Tensor? lse, Tensor mean, Tensor total, Tensor stats, "
    "Tensor[] sources, Tensor(a!)[] places, int[] begun) -> (Tensor, Tensor, Tensor, Tensor)",
    depth_read_gradients, mutates=("places",))
def depth_read_back(dw, d_gain, do, d_lse, g, w, gain, o, lse, mean, total, stats, sources, places, begun):
    (N, C), sources = g.shape, aligned(sources)
    launch(depth_read_backward, len(dw), C, table(sources, places, begun), g, w, gain, o, lse, mean, total,
           stats, do, d_lse, dw, d_gain, len(sources), N, C, TINY=TINY, STAGES=STAGES)


class Sink:
    """Where all reads of one source add up its gradient, in place of n tensors and n - 1 sums of autograd."""
    buffer = None


def sinks_of(sources):
    """Their sinks, or None; one that is there twice, once: kernels fetch ahead of what they store."""
    sinks = [getattr(v, "sink", None) for v in sources]
    return [None if sink in sinks[:i] else sink for i, sink in enumerate(sinks)]


class Source(torch.autograd.Function):
    """The identity. Its backward runs after those of all that used its output: the sum is complete then."""
    @staticmethod
    def forward(ctx, v, sink):
        ctx.sink, ctx.shape = sink, v.shape
        ctx.set_materialize_grads(False)
        return v.view_as(v)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        total, ctx.sink.buffer = ctx.sink.buffer, None   # (N, C)
        total = total if total is None else total.view(ctx.shape)
        return g if total is None else total if g is None else total + g, None


def depth_source(v, kernels="auto"):
    """v (..., C), which many reads are going to see: with Triton, they share one buffer for its gradient."""
    if on_triton(v, kernels) and v.requires_grad and not torch.compiler.is_compiling():
        sink = Sink()
        v = Source.apply(v, sink)
        v.sink = sink
    return v


def gradient_places(sources):
    """-> for each source (N, C) the tensor for its gradient, and whether it holds a part of it already."""
    places, begun = [], []
    for v, sink in sources:
        begun.append(int(sink is not None and sink.buffer is not None))
        places.append(sink.buffer.view_as(v) if begun[-1] else torch.empty_like(v))
        if sink is not None:
            sink.buffer = places[-1]
    return places, begun


class DepthReadTriton(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sinks, w, gain, o, lse, *sources):
        out, mean, total, stats = depth_read_op(w, gain, o, lse, sources)
        ctx.sinks, ctx.mean_is_out = sinks, gain is None
        ctx.save_for_backward(w, gain, o, lse, out if gain is None else mean, total, stats, *sources)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        w, gain, o, lse, mean, total, stats, *sources = ctx.saved_tensors
        places, begun = gradient_places(zip(sources, ctx.sinks))
        dw, d_gain, do, d_lse = depth_read_back(g.contiguous(), w, gain, o, lse, mean, total, stats, sources,
                                                places, begun)
        return (None, dw.sum(0).to(w.dtype), None if gain is None else d_gain.sum(0).to(gain.dtype),
                None if o is None else do, None if o is None else d_lse,
                *(None if sink else place for sink, place in zip(ctx.sinks, places)))


def depth_read(w, sources, ahead=None, gain=None, kernels="auto"):
    """
    w (C,), sources n x (..., C) -> their mean (..., C), weighted by the softmax of <w, v> / rms(v) over the
    sources v. ahead: a pair (o (..., C), lse (...,)) that depth_read_ahead has got from further sources. With
    gain (C,), the RMSNorm of the mean. In Triton up to MOST_SOURCES sources.
    """
    if 1 <= len(sources) <= MOST_SOURCES and on_triton(sources[0], kernels):
        shape, sinks = sources[0].shape, sinks_of(sources)
        o, lse = (None, None) if ahead is None else (*flat_rows(ahead[0]), ahead[1].flatten().contiguous())
        rest = (w.contiguous(), gain if gain is None else gain.contiguous(), o, lse)
        if torch.is_grad_enabled():
            return DepthReadTriton.apply(sinks, *rest, *flat_rows(*sources)).view(shape)
        return depth_read_op(*rest, flat_rows(*sources))[0].view(shape)
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


# S queries see each source once. QUERIES of them are in registers, with their results; more go in groups.

@jit
def depth_read_ahead_forward(table_ptr, w_ptr, o_ptr, lse_ptr, scale_ptr, score_ptr, first, n, N, C, S,
                             EPS: tl.constexpr, QUERIES: tl.constexpr, STAGES: tl.constexpr,
                             BLOCK: tl.constexpr):
    cols, q = tl.arange(0, BLOCK), first + tl.arange(0, QUERIES)                     # (BLOCK,), (QUERIES,)
    inside, there = cols < C, q < S
    both = there[:, None] & inside[None, :]                                          # (QUERIES, BLOCK)
    w = tl.load(w_ptr + q[:, None] * C + cols[None, :], mask=both, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        here = tl.cast(row, tl.int64) * C
        top, total = tl.full((QUERIES,), -float("inf"), tl.float32), tl.zeros((QUERIES,), tl.float32)
        out = tl.zeros((QUERIES, BLOCK), tl.float32)
        for i in tl.range(n, num_stages=STAGES):        # the next sources are under way meanwhile
            source = tl.multiple_of(tl.load(table_ptr + i).to(o_ptr.dtype), 16)
            v = tl.load(source + here + cols, mask=inside, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(v * v) / C + EPS)
            score = tl.sum(w * v[None, :], axis=1) * scale                           # (QUERIES,)
            tl.store(scale_ptr + i * N + row, scale)
            tl.store(score_ptr + (tl.cast(i, tl.int64) * N + row) * S + q, score, mask=there)
            new = tl.maximum(top, score)
            old, p = tl.exp(top - new), tl.exp(score - new)
            out, total, top = out * old[:, None] + v[None, :] * p[:, None], total * old + p, new
        place = q.to(tl.int64)[:, None] * N * C + here + cols[None, :]
        tl.store(o_ptr + place, (out / total[:, None]).to(o_ptr.dtype.element_ty), mask=both)
        tl.store(lse_ptr + row * S + q, top + tl.log(total), mask=there)


@jit
def depth_read_ahead_backward(table_ptr, w_ptr, o_ptr, lse_ptr, scale_ptr, score_ptr, d_lse_ptr, dw_ptr,
                              first, n, N, C, S, QUERIES: tl.constexpr, STAGES: tl.constexpr,
                              BLOCK: tl.constexpr):
    cols, q = tl.arange(0, BLOCK), first + tl.arange(0, QUERIES)                     # (BLOCK,), (QUERIES,)
    inside, there = cols < C, q < S
    both = there[:, None] & inside[None, :]                                          # (QUERIES, BLOCK)
    w = tl.load(w_ptr + q[:, None] * C + cols[None, :], mask=both, other=0.0).to(tl.float32)
    d_o_ptr = tl.multiple_of(tl.load(table_ptr + 3 * n + q, mask=there, other=0).to(o_ptr.dtype), 16)
    dw = tl.zeros((QUERIES, BLOCK), tl.float32)         # of this program's rows
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        here = tl.cast(row, tl.int64) * C
        g = tl.load(d_o_ptr[:, None] + (here + cols)[None, :], mask=both, other=0.0).to(tl.float32)
        o = tl.load(o_ptr + q.to(tl.int64)[:, None] * N * C + here + cols[None, :], mask=both, other=0.0)
        lse = tl.load(lse_ptr + row * S + q, mask=there, other=float("inf"))         # inf: p = 0
        pull = tl.load(d_lse_ptr + row * S + q, mask=there, other=0.0) - tl.sum(g * o.to(tl.float32), axis=1)
        for i in tl.range(n, num_stages=STAGES):        # the next sources are under way meanwhile
            source = tl.multiple_of(tl.load(table_ptr + i).to(o_ptr.dtype), 16)
            place = tl.multiple_of(tl.load(table_ptr + n + i).to(o_ptr.dtype), 16)   # of its gradient
            begun = cols < C * tl.where(first > 0, 1, tl.load(table_ptr + 2 * n + i))
            v = tl.load(source + here + cols, mask=inside, other=0.0).to(tl.float32)
            scale = tl.load(scale_ptr + i * N + row)
            score = tl.load(score_ptr + (tl.cast(i, tl.int64) * N + row) * S + q, mask=there, other=0.0)
            p = tl.exp(score - lse)                                                  # (QUERIES,)
            d_dot = p * (tl.sum(g * v[None, :], axis=1) + pull) * scale              # of <w, v>
            dv = tl.sum(g * p[:, None] + w * d_dot[:, None], axis=0) - v * (tl.sum(d_dot * score) * scale / C)
            dw += v[None, :] * d_dot[:, None]
            dv += tl.load(place + here + cols, mask=begun, other=0.0).to(tl.float32)
            tl.store(place + here + cols, dv.to(o_ptr.dtype.element_ty), mask=inside)
    place = (tl.program_id(0).to(tl.int64) * S + q[:, None]) * C + cols[None, :]
    tl.store(dw_ptr + place, dw, mask=both)


def queries_at_once(S, C):
    """As many as fit into registers: a power of 2."""
    return min(triton.next_power_of_2(S), max(1, 8192 // triton.next_power_of_2(C)))


def depth_read_ahead_results(w, sources):
    (N, C), n, S = sources[0].shape, len(sources), len(w)
    return like(w, S, N, C, dtype=sources[0].dtype), like(w, N, S), like(w, n, N), like(w, n, N, S)


@op("(Tensor w, Tensor[] sources) -> (Tensor, Tensor, Tensor, Tensor)", depth_read_ahead_results)
def depth_read_ahead_op(o, lse, scale, score, w, sources):
    (S, N, C), sources = o.shape, aligned(sources)
    size = queries_at_once(S, C)
    for first in range(0, S, size):
        launch(depth_read_ahead_forward, programs_for(N), C, table(sources), w, o, lse, scale, score, first,
               len(sources), N, C, S, tile=size, EPS=EPS, QUERIES=size, STAGES=STAGES)


@op("(Tensor w, Tensor o, Tensor lse, Tensor scale, Tensor score, Tensor d_lse, Tensor[] d_o, "
    "Tensor[] sources, Tensor(a!)[] places, int[] begun) -> Tensor",
    lambda w, o, *_: like(w, programs_for(o.shape[1]), *w.shape), mutates=("places",))
def depth_read_ahead_back(dw, w, o, lse, scale, score, d_lse, d_o, sources, places, begun):
    (S, N, C), sources, d_o = o.shape, aligned(sources), aligned(d_o)
    size = queries_at_once(S, C)
    for first in range(0, S, size):   # one after the other: each adds to the sources' gradients
        launch(depth_read_ahead_backward, len(dw), C, table(sources, places, begun, d_o), w, o, lse, scale,
               score, d_lse, dw, first, len(sources), N, C, S, tile=size, QUERIES=size,
               STAGES=STAGES)


class DepthReadAheadTriton(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sinks, w, *sources):
        o, lse, scale, score = depth_read_ahead_op(w, sources)
        ctx.sinks = sinks
        ctx.save_for_backward(w, o, lse, scale, score, *sources)
        return lse, *o.unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_lse, *d_o):
        w, o, lse, scale, score, *sources = ctx.saved_tensors
        places, begun = gradient_places(zip(sources, ctx.sinks))
        dw = depth_read_ahead_back(w, o, lse, scale, score, d_lse.contiguous(), flat_rows(*d_o), sources,
                                   places, begun)
        grads = (None if sink else place for sink, place in zip(ctx.sinks, places))
        return None, dw.sum(0).to(w.dtype), *grads


def depth_read_ahead(w, sources, kernels="auto"):
    """
    S reads at once: w (S, C), sources n x (..., C) -> for each read a pair that depth_read takes as `ahead`:
    the weighted mean (..., C), and the logarithm of the sum of the exponentials of the scores (...,). In
    Triton up to MOST_SOURCES sources.
    """
    if len(sources) <= MOST_SOURCES and on_triton(sources[0], kernels):
        shape, sinks = sources[0].shape, sinks_of(sources)
        lse, *o = DepthReadAheadTriton.apply(sinks, w.contiguous(), *flat_rows(*sources))
        return [(each.view(shape), part.view(shape[:-1])) for each, part in zip(o, lse.unbind(-1))]
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
    return call(GatherRows, x, index)


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
    return call(ScatterRows, x, index, n)


class Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        return x.flatten(0, -2).index_select(0, index), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_rows, d_rest):
        dx = d_rest.clone(memory_format=torch.contiguous_format)   # not a view: autograd adds to it in place
        dx.flatten(0, -2).index_copy_(0, *ctx.saved_tensors, d_rows)
        return dx, None


class Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rest, index, rows):
        ctx.save_for_backward(index)
        return rest.flatten(0, -2).index_copy(0, index, rows).view_as(rest)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        # rest's rows at index had no influence, but part overwrites their gradient anyway
        return grad, None, grad.flatten(0, -2).index_select(0, *ctx.saved_tensors)


def part(x, index):
    """
    x (..., C), M rows -> those at index (N, C), and a rest that is good for one thing: `join`. The two go
    together: one copy per direction, where indexing and its inverse would add up three tensors of x's size.
    """
    return call(Part, x, index)


@jit
def part_normed_forward(x_ptr, index_ptr, gain_ptr, rows_ptr, out_ptr, N, C, EPS: tl.constexpr,
                        BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)                                                       # (BLOCK,) as all rows
    inside = cols < C
    gain = tl.load(gain_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        here = tl.cast(row, tl.int64) * C + cols
        x = tl.load(x_ptr + tl.load(index_ptr + row) * C + cols, mask=inside, other=0.0)
        tl.store(rows_ptr + here, x, mask=inside)
        x = x.to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x) / C + EPS) * gain
        tl.store(out_ptr + here, x.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def part_normed_backward(d_rows_ptr, g_ptr, rows_ptr, index_ptr, gain_ptr, dx_ptr, d_gain_ptr, N, C,
                         EPS: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)                                                       # (BLOCK,) as all rows
    inside = cols < C
    gain = tl.load(gain_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    d_gain = tl.zeros((BLOCK,), tl.float32)             # of this program's rows
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        here = tl.cast(row, tl.int64) * C + cols
        x = tl.load(rows_ptr + here, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + here, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x) / C + EPS)
        d_gain += g * x * scale
        g = g * gain
        dx = (g - x * (scale * scale * tl.sum(g * x) / C)) * scale
        dx += tl.load(d_rows_ptr + here, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + tl.load(index_ptr + row) * C + cols, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(d_gain_ptr + tl.program_id(0).to(tl.int64) * C + cols, d_gain, mask=inside)


@op("(Tensor x, Tensor index, Tensor gain) -> (Tensor, Tensor)",
    # not len(index), for which torch.compile would fix the number of rows
    lambda x, index, gain: tuple(like(x, index.shape[0], x.shape[1], dtype=x.dtype) for _ in range(2)))
def part_normed_op(rows, out, x, index, gain):
    N, C = rows.shape
    launch(part_normed_forward, programs_for(N), C, x, index, gain, rows, out, N, C, EPS=EPS)


@op("(Tensor d_rest, Tensor d_rows, Tensor g, Tensor rows, Tensor index, Tensor gain) -> (Tensor, Tensor)",
    lambda d_rest, d_rows, *_: (d_rest.clone(), like(d_rows, programs_for(d_rows.shape[0]), d_rows.shape[1])))
def part_normed_back(dx, d_gain, d_rest, d_rows, g, rows, index, gain):
    N, C = rows.shape
    launch(part_normed_backward, len(d_gain), C, d_rows, g, rows, index, gain, dx, d_gain, N, C, EPS=EPS)


class PartNormedTriton(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index, gain):
        rows, out = part_normed_op(x, index, gain)
        ctx.save_for_backward(rows, index, gain)
        return rows, out, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_rows, g, d_rest):
        grads = (x.contiguous() for x in (d_rest, d_rows, g))
        dx, d_gain = part_normed_back(*grads, *ctx.saved_tensors)
        return dx, None, d_gain.sum(0).to(ctx.saved_tensors[-1].dtype)


def part_normed(x, index, gain, kernels="auto"):
    """`part`, and the RMSNorm of the rows, times gain (C,) -> rows (N, C), normed rows (N, C), rest."""
    if on_triton(x, kernels):
        rows, normed, rest = PartNormedTriton.apply(x.flatten(0, -2).contiguous(), index, gain.contiguous())
        return rows, normed, rest.view_as(x)
    rows, rest = part(x, index)
    return rows, rms_norm(rows, gain), rest


def join(rest, index, rows):
    """The x (..., C) that `part` has got, with rows (N, C) in the place of those at index."""
    return call(Join, rest, index, rows)


# ----------------------------------------------------------------------------- checks and figures

class Example(NamedTuple):
    """One op on random numbers, to check or to time it."""
    name: str
    run: object           # kernels, inputs -> outputs
    reference: object     # inputs -> outputs, by the definition
    inputs: list          # float64; those named in `wide` stay wide when the others are cast
    wide: tuple           # positions of parameters and of what is one number per token
    rows: tuple           # of width C that must move, forward and backward, per token; see the table above


def examples(N, C, n=5, S=3, seed=0, rounds=False, device="cpu"):
    """Every op for N tokens of width C, n sources, S queries. rounds: for a stream in half precision."""
    rng = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(shape, generator=rng, dtype=torch.float64)
    r = rand(N, C)
    r = r - mean(r)
    r = r / (mean(r * r) + 1e-30).sqrt()
    keep = torch.rand(N, generator=rng) < 0.7
    slot = torch.where(keep, keep.cumsum(0) - 1, -1)
    index, kept = keep.nonzero().squeeze(1), int(keep.sum())
    slot, index = slot.to(device), index.to(device)   # now, not while the op is timed
    sources, w, gain = [rand(N, C) for _ in range(n)], rand(S, C) / C ** 0.5, 1 + 0.1 * rand(C)
    a, s = rand(N, 1), rand(N, 1)
    share = kept / max(N, 1)

    def write(r, s, f, a):
        turned = nag_write_reference(r, f, a)
        return rms_norm_reference(turned, None) if rounds else turned, s + 0.5 * torch.log1p(a * a)

    def write_rows(r, s, f, a):
        here = index.to(r.device)
        turned = write(r[here], s[here], f, a[here])
        return tuple(old.index_copy(0, here, new) for old, new in zip((r, s), turned))

    def read_rows(x, gain):
        rows = x[index.to(x.device)]
        return rows, rms_norm_reference(rows, gain), x.index_fill(0, index.to(x.device), 0.0)

    def read_all(w, *sources):
        pairs = [(depth_read_reference(q, sources), torch.stack(
            [(v @ q) * inverse_rms_reference(v) for v in sources]).logsumexp(0)) for q in w]
        return [x for pair in pairs for x in pair]

    yield Example("nag_write", lambda k, r, s, f, a: nag_write(r, s, f, a, k), write,
                  [r, s, rand(N, C), a], (1, 3), (3, 5))
    yield Example("nag_write, 70 % kept", lambda _, r, s, f, a: nag_write_rows(r, s, f, a, slot.to(r.device)),
                  write_rows, [r, s, rand(kept, C), a], (1, 3), (2 + share, 3 + 2 * share))
    yield Example("nag_gain", lambda k, *x: (nag_gain(*x, k),), lambda *x: (nag_gain_reference(*x),),
                  [rand(N, 32), rand(32).softmax(0), rand(), rand().exp()], (0, 1, 2, 3), (32 / C, 64 / C))
    yield Example(f"depth_read, {n} sources", lambda k, w, *v: (depth_read(w, v, kernels=k),),
                  lambda w, *v: (depth_read_reference(w, v),), [w[0], *sources], (0,), (n + 1, 2 * n + 2))
    yield Example(f"depth_read, {n} sources, norm",
                  lambda k, w, g, *v: (depth_read(w, v, gain=g, kernels=k),),
                  lambda w, g, *v: (depth_read_reference(w, v, gain=g),), [w[0], gain, *sources], (0, 1),
                  (n + 2, 2 * n + 2))
    yield Example("depth_read, 1 source ahead, norm",
                  lambda k, w, g, o, l, v: (depth_read(w, [v], (o, l), g, k),),
                  lambda w, g, o, l, v: (depth_read_reference(w, [v], (o, l), g),),
                  [w[0], gain, rand(N, C), rand(N), sources[0]], (0, 1, 3), (4, 6))
    yield Example(f"depth_read_ahead, {n} sources, {S} queries",
                  lambda k, w, *v: [x for pair in depth_read_ahead(w, v, k) for x in pair], read_all,
                  [w, *sources], (0,), (n + S, 2 * n + 2 * S))
    yield Example("part_normed, 70 % kept", lambda k, x, g: part_normed(x, index.to(x.device), g, k),
                  read_rows, [rand(N, C), gain], (1,), (3 * share, 2 + 4 * share))


def relative_rms(ours, exact):
    """rms(ours - exact) / rms(exact), in float64; 0 of nothing"""
    ours, exact = ours.detach().double(), exact.detach().double()
    error = (ours - exact).square().sum() / exact.square().sum().clamp_min(1e-30)
    return float(error.sqrt()) if exact.numel() else 0.0


def compare(example, dtype, device="cpu", kernels="on"):
    """-> {output or gradient: relative RMS error} of an example in dtype, to the reference in float64."""
    cast = lambda x, i: x.to(device, torch.float32 if i in example.wide else dtype).requires_grad_()
    ours = [cast(x.detach(), i) for i, x in enumerate(example.inputs)]
    exact = [x.detach().double().cpu().requires_grad_() for x in ours]
    got, wanted = example.run(kernels, *ours), example.reference(*exact)
    if "part" in example.name:   # the rest has no meaning at the rows that were taken
        got, wanted = got[:2], wanted[:2]
    upstream = [torch.randn(y.shape, generator=torch.Generator().manual_seed(i)) for i, y in enumerate(got)]
    grads = torch.autograd.grad(got, ours, [g.to(y) for g, y in zip(upstream, got)])
    exact_grads = torch.autograd.grad(wanted, exact, [g.to(y).double().cpu() for g, y in zip(upstream, got)])
    errors = {f"output {i}": relative_rms(y.cpu(), w) for i, (y, w) in enumerate(zip(got, wanted))}
    pairs = enumerate(zip(grads, exact_grads))
    return errors | {f"d input {i}": relative_rms(g.cpu(), w) for i, (g, w) in pairs}


def worst(errors):
    return max(errors.items(), key=lambda item: item[1])


def error_bound(dtype, device):
    """Relative RMS. The interpreter cuts bf16 off where a GPU rounds, which is twice the error."""
    return 1e-5 if dtype == torch.float32 else 1e-2 if (dtype, device) == (torch.bfloat16, "cpu") else 5e-3


def check(device):
    """Print the largest error of every op. -> whether all are within bounds"""
    fine = True
    print(f"relative RMS error to float64, the worst of outputs and gradients, on {device}")
    small, large = [(33, 123, 5, 3), (65, 256, 9, 4)], [(1000, 1000, 9, 6), (513, 4096, 24, 3)]
    for N, C, n, S in small if device == "cpu" else large:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for example in examples(N, C, n, S, rounds=dtype != torch.float32):
                name, error = worst(compare(example, dtype, device))
                bound = error_bound(dtype, device)
                fine &= error <= bound
                print(f"{example.name:38} {N:5} x {C:<5} {str(dtype)[6:]:9} {error:.1e} {name:10} "
                      f"{'ok' if error <= bound else f'TOO LARGE, bound {bound}'}")
    return fine


class CountRows(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the numbers that eager ops read and write."""
    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.__name__ and "detach" not in func.__name__:
            both = torch.utils._pytree.tree_leaves((args, kwargs, out))
            # an expanded number is one number
            self.total += sum(x.numel() for x in both if torch.is_tensor(x) and 0 not in x.stride())
        return out


def count_rows(N=256, C=1024, n=9, S=4):
    print(f"rows of width C moved per token, forward + backward ({n} sources, {S} queries)")
    for example in examples(N, C, n, S):
        x = [each.float().requires_grad_() for each in example.inputs]
        with CountRows() as forward:
            y = example.reference(*x)
        with CountRows() as backward:
            torch.autograd.grad(list(y), x, [torch.ones_like(each) for each in y])
        print(f"{example.name:38} eager {forward.total / N / C:6.1f} + {backward.total / N / C:6.1f}    "
              f"here {example.rows[0]:6.1f} + {example.rows[1]:6.1f}")


def registers(capability=90, dtype=torch.bfloat16):
    """
    Compile every kernel for a GPU that need not be there, and print what ptxas has made of it: registers per
    thread, bytes of stack (more than 0: spilled registers), 16-byte loads and stores out of all.
    """
    import subprocess, tempfile
    from pathlib import Path
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    global launch, INTERPRETED
    seen, really, was = {}, launch, INTERPRETED
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    types = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64"}

    def launch(kernel, programs, C, *arguments, tile=1, **constants):
        block, warps = layout(C, tile)
        constants["BLOCK"] = block
        signature, fixed, hints = {}, dict(constants), {}
        for i, (name, x) in enumerate(zip(kernel.arg_names, arguments)):
            signature[name] = types[x.dtype] if torch.is_tensor(x) else "constexpr" if x is None else "i32"
            if x is None:
                fixed[name] = None
            elif torch.is_tensor(x) or x % 16 == 0:
                hints[i,] = [["tt.divisibility", 16]]
        signature |= {name: "constexpr" for name in constants}
        key = kernel.fn.__name__, block, tuple(signature.items())
        if key in seen:
            return
        fixed = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
        made = triton.compile(ASTSource(kernel, signature, fixed, hints), options={"num_warps": warps},
                              target=GPUTarget("cuda", capability, 32))
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
        number = lambda field: int(usage.split(f"{field}:")[1].split()[0])
        memory = [line for line in made.asm["ptx"].splitlines() if "ld.global" in line or "st.global" in line]
        seen[key] = dict(kernel=key[0], width=C, warps=warps, registers=number("REG"),
                         stack=number("STACK"), shared=number("SHARED"), accesses=len(memory),
                         wide=sum(".v4" in line for line in memory))
        print("{kernel:28} {width:5}  {warps:2} warps  {registers:3} registers  {stack:4} bytes of stack  "
              "{wide:2} of {accesses:2} accesses of 16 bytes".format(**seen[key]))

    try:
        INTERPRETED = True   # so that a CPU's tensors get as far as a launch
        for C in (1024, 2048, 4096):
            for example in examples(16, C, 9, 8):
                compare(example, dtype)
    finally:
        launch, INTERPRETED = really, was
    return list(seen.values())


def time_ops(shapes, device="cuda"):
    """-> per op and shape, in bf16: milliseconds of eager, compiled and ours, GB/s, share of the copy's."""
    bench = functools.partial(triton.testing.do_bench, return_mode="median")
    found, x = [], torch.empty(2 ** 28, dtype=torch.bfloat16, device=device)
    y = torch.empty_like(x)
    copy = 2 * x.nbytes / bench(lambda: y.copy_(x)) / 1e6   # GB/s
    print(f"{torch.cuda.get_device_name()}: a copy runs at {copy:.0f} GB/s")
    for N, C, n, S in shapes:
        for example in examples(N, C, n, S, device=device):
            inputs = [v.to(device, torch.float32 if i in example.wide else torch.bfloat16).requires_grad_()
                      for i, v in enumerate(example.inputs)]
            row = dict(op=example.name, tokens=N, width=C)
            eager = lambda *x: [y.to(torch.bfloat16) for y in example.reference(*map(widen, x))]
            ways = dict(ours=functools.partial(example.run, "on"), eager=eager, compiled=torch.compile(eager))
            for way, run in ways.items():
                try:
                    outputs = list(run(*inputs))
                    grads = [torch.randn_like(v) for v in outputs]
                    row[f"{way}_forward_ms"] = bench(lambda: run(*inputs))
                    row[f"{way}_backward_ms"] = bench(
                        lambda: torch.autograd.grad(outputs, inputs, grads, retain_graph=True))
                except torch.OutOfMemoryError:
                    row[f"{way}_forward_ms"] = row[f"{way}_backward_ms"] = float("nan")
                torch._dynamo.reset()
            size = min(v.itemsize for v in inputs)
            for rows, part in zip(example.rows, ("forward", "backward")):
                row[f"{part}_gb_s"] = rows * N * C * size / row[f"ours_{part}_ms"] / 1e6
                row[f"{part}_of_copy"] = row[f"{part}_gb_s"] / copy
                times = "  ".join(f"{way} {row[f'{way}_{part}_ms']:7.3f}" for way in ways)
                print(f"{example.name:38} {N:6} x {C:<5} {part:8} {times} ms  "
                      f"{row[f'{part}_gb_s']:5.0f} GB/s  {row[f'{part}_of_copy']:4.0%} of the copy")
            found.append(row)
    return dict(device=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__,
                copy_gb_s=copy, rows=found)


def main():
    import argparse, json, sys
    parser = argparse.ArgumentParser(description="Check every op against its reference; time it on a GPU.")
    parser.add_argument("--rows", action="store_true", help="count the rows that the eager references move")
    parser.add_argument("--quick", action="store_true", help="time three shapes only")
    parser.add_argument("--out", help="JSON file for what was measured")
    args = parser.parse_args()
    if args.out and (args.rows or not os.path.isdir(os.path.dirname(args.out) or ".")):
        why = "--rows writes no file; leave one of them out" if args.rows else "make its folder first"
        parser.error(f"--out {args.out}: {why}")
    if triton is None:
        raise SystemExit(f"kernels.py: {why_no_triton()}")
    if args.rows:
        return count_rows()
    found, fine = None, True
    if torch.cuda.is_available():
        fine = check("cuda")
        wide = [(16384, C, 9, 8) for C in (512, 1000, 1024, 2048, 4096, 768)]
        more = [(N, 1024, n, 8) for N in (8192, 65536) for n in (9, 24, 49)]
        found = time_ops([(16384, C, 9, 8) for C in (768, 1024, 2048)] if args.quick else wide + more)
    elif INTERPRETED:
        fine = check("cpu")
    else:   # the interpreter must be asked for before triton is imported, and can't compile
        os.environ["TRITON_INTERPRET"] = "1"
        import subprocess
        fine = subprocess.run([sys.executable, __file__]).returncode == 0
        print("compiled for sm_90 (H100, H200)")
        found = registers()
    if args.out and found:
        with open(args.out + ".tmp", "w") as file:
            file.write(json.dumps(found, indent=1) + "\n")
        os.replace(args.out + ".tmp", args.out)
    sys.exit(not fine)


if __name__ == "__main__":
    main()
