"""
The two operations on rows that torch has no fast way to do. A row is the C numbers of one token.

    nag_write    turns NAG's direction towards an update
    depth_sum    adds up n sources, each with its weight per token: a read across depth

Why these two, and no others? What counts is what an op moves between memory and chip. Rows of C numbers that
move per token, forward + backward:

                 eager torch     here
    nag_write    20 + 56         3 + 5
    depth_sum    3n + 8n         (n + 1) + (2n + 1)

Eager torch is the definition below, in which every operation is a pass over memory. torch.compile would fuse
either op just as well, but depth_sum anew for each n, and a read across depth has another n in every
sublayer. In eager mode there is nothing but these kernels. What the other residuals do to a row is a few
passes, which are little beside a sublayer, and for most norms torch has kernels of its own.

What has to be known of Triton: kernel[(N,)](...) runs a function as N programs, side by side. Here each has
one row, whose number is tl.program_id(0), and holds it in registers as a block of numbers, whose size must be
a power of 2. x_ptr + row * C + cols is a block of addresses. A mask says which are inside the row: the others
read 0, and are not written. A tl.constexpr is compiled in.

A kernel computes in fp32 whatever it is given. No two programs write to the same place, so results repeat
bit for bit. Each op has, in this order: its definition in torch, which *is* the op, and runs on a CPU and in
float64; a kernel forward; a kernel backward, which recomputes what it can; the autograd.Function that joins
them; a function that chooses. `python kernels.py` checks both, and on a GPU it measures their speed.
"""
import functools
import os
from types import SimpleNamespace

import torch
from torch.autograd.function import once_differentiable

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")   # Triton looks at it once, when it is imported.
try:
    import triton
    import triton.language as tl
except ImportError:   # There is no Triton for Windows or a Mac.
    triton, tl = None, SimpleNamespace(constexpr=int)   # for the kernels' signatures

EPS = 1e-6     # Is added inside the roots of norms. (torch's own default, by dtype, is 8e-3 in bf16.)
TINY = 1e-10   # The same, where a weak vector has to come out at full size all the same.
HALF = torch.bfloat16, torch.float16
INTERPRETED = triton is not None and triton.knobs.runtime.interpret   # Kernels run on a CPU, slowly.

def why_no_triton():
    """-> None where --kernels on can work, else a sentence that says why not."""
    if triton is None:
        return "Triton isn't installed; pip install triton, or use --kernels auto"
    if not (torch.cuda.is_available() or INTERPRETED):
        return "needs a CUDA GPU, or TRITON_INTERPRET=1 to try kernels on a CPU; use --kernels auto"
    return None

def use_triton(x, kernels):
    """Whether to run Triton kernels on the tensor x. kernels: auto (on a GPU), on (there, and on a CPU in the
    interpreter) or off. Never in float64."""
    if kernels == "off" or triton is None or x.dtype not in (torch.float32, *HALF):
        return False
    if INTERPRETED:   # It can't read the memory of a GPU, and torch.compile can't look into it.
        return kernels == "on" and x.device.type == "cpu" and not torch.compiler.is_compiling()
    return x.is_cuda

def jit(function):
    return triton.jit(function) if triton else function

def launch(kernel, rows, *arguments, **constants):
    """Run one program of the kernel per row of rows (N, C), on the arguments, C and the constants."""
    N, C = rows.shape
    if N == 0:
        return
    block = 1 << (C - 1).bit_length()       # the next power of 2
    # A warp is 32 threads. With 8 numbers per thread many programs fit on the chip side by side.
    constants |= {"BLOCK": block, "num_warps": max(1, min(16, block // 256))}
    if torch.compiler.is_compiling():       # The compiled code takes care of the device.
        kernel[(N,)](*arguments, C, **constants)
    else:                                   # It may be another GPU than the current one.
        with torch.cuda.device_of(rows):
            kernel[(N,)](*arguments, C, **constants)

def as_rows(x):
    """(..., C) -> (N, C), row after row in memory, which is how kernels find them"""
    return x.reshape(-1, x.shape[-1]).contiguous()

def check_rows(op, rows, numbers=()):
    """Raise ValueError unless rows are (..., C) and alike, and numbers (..., 1), of the rows' dtype or fp32.
    (A kernel would read on, wherever that leads.)"""
    first = rows[0]
    for x in rows:
        if (x.shape, x.dtype, x.device) != (first.shape, first.dtype, first.device):
            raise ValueError(f"{op}: got rows {tuple(first.shape)} {first.dtype} on {first.device} and rows "
                             f"{tuple(x.shape)} {x.dtype} on {x.device}; cast them so that they are alike")
    for x in numbers:
        fits = x.shape == (*first.shape[:-1], 1) and x.device == first.device
        if not fits or x.dtype not in (first.dtype, torch.float32):
            raise ValueError(f"{op}: got {tuple(x.shape)} {x.dtype} on {x.device} where the rows need "
                             f"{(*first.shape[:-1], 1)} {first.dtype} or torch.float32 on {first.device}")

# ----------------------------------------------------------------------------- NAG's write

def nag_write_definition(r, log_rms, u, gain):
    u = u - u.mean(-1, keepdim=True)
    o = u - r * (u * r).mean(-1, keepdim=True)                       # Orthogonal to r, because |r|^2 = C.
    size = gain * (o.square().mean(-1, keepdim=True) + TINY).rsqrt()
    out = torch.addcmul(r, o, size) * (1 + gain * gain).rsqrt()
    return out.to(r.dtype), log_rms + (0.5 * torch.log1p(gain * gain)).to(log_rms.dtype)

@jit
def nag_row(r_ptr, u_ptr, gain_ptr, row, cols, C, TINY: tl.constexpr):
    """The start of forward and backward. t, gain, scale and shrink are one number each. (Callers pass row and
    cols: if made here, torch.compile would believe that the callers' stores change r, u and gain.)"""
    inside = cols < C
    r = tl.load(r_ptr + row * C + cols, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * C + cols, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + row).to(tl.float32)
    u = tl.where(inside, u - tl.sum(u) / C, 0.0)
    t = tl.sum(u * r) / C
    o = u - r * t                              # A closed form of |o| would lose its digits if u is along r.
    scale = tl.rsqrt(tl.sum(o * o) / C + TINY)
    shrink = tl.rsqrt(1.0 + gain * gain)
    return r, o, t, gain, scale, shrink

@jit
def nag_write_forward(r_ptr, log_rms_ptr, u_ptr, gain_ptr, out_ptr, log_rms_out_ptr, C,
                      TINY: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)        # 64 bits, as row * C can be more than 2^31.
    cols = tl.arange(0, BLOCK)
    r, o, t, gain, scale, shrink = nag_row(r_ptr, u_ptr, gain_ptr, row, cols, C, TINY)
    tl.store(out_ptr + row * C + cols, (r + o * (gain * scale)) * shrink, mask=cols < C)
    log_rms = tl.load(log_rms_ptr + row).to(tl.float32)
    tl.store(log_rms_out_ptr + row, log_rms + 0.5 * tl.log(1.0 + gain * gain))

@jit
def nag_write_backward(g_ptr, g_log_rms_ptr, r_ptr, u_ptr, gain_ptr, d_r_ptr, d_u_ptr, d_gain_ptr, C,
                       TINY: tl.constexpr, BLOCK: tl.constexpr):
    """g: the loss's gradient by out; g_log_rms: by log_rms_out; g_r, g_o: means of g * r, g * o; d_x: by x"""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < C
    r, o, t, gain, scale, shrink = nag_row(r_ptr, u_ptr, gain_ptr, row, cols, C, TINY)
    g = tl.load(g_ptr + row * C + cols, mask=inside, other=0.0).to(tl.float32)
    g_log_rms = tl.load(g_log_rms_ptr + row).to(tl.float32)
    g_r = tl.sum(g * r) / C
    g_o = tl.sum(g * o) / C
    # out = shrink * r + step * o. By gain: (shrink)' = -gain * shrink^3, and (gain * shrink)' = shrink^3.
    step = gain * scale * shrink
    d_o = step * (g - o * (scale * scale * g_o))
    # o = u - t * r with t = mean(u * r), where u is centred.
    along = tl.sum(d_o * r) / C
    d_r = g * shrink - d_o * t - (o + r * t) * along
    d_u = d_o - r * along
    d_u = d_u - tl.sum(d_u) / C
    d_gain = shrink * shrink * (shrink * C * (scale * g_o - gain * g_r) + gain * g_log_rms)
    tl.store(d_r_ptr + row * C + cols, d_r, mask=inside)
    tl.store(d_u_ptr + row * C + cols, d_u, mask=inside)
    tl.store(d_gain_ptr + row, d_gain)

class NagWrite(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r, log_rms, u, gain):   # (N, C), (N, 1), (N, C), (N, 1)
        out = torch.empty_like(r)
        log_rms_out = torch.empty_like(log_rms)
        launch(nag_write_forward, r, r, log_rms, u, gain, out, log_rms_out, TINY=TINY)
        ctx.save_for_backward(r, u, gain)
        return out, log_rms_out

    @staticmethod
    @once_differentiable
    def backward(ctx, g, g_log_rms):
        r, u, gain = ctx.saved_tensors
        d_r = torch.empty_like(r)
        d_u = torch.empty_like(u)
        d_gain = torch.empty_like(gain)
        launch(nag_write_backward, r, g.contiguous(), g_log_rms.contiguous(), r, u, gain, d_r, d_u, d_gain,
               TINY=TINY)
        return d_r, g_log_rms, d_u, d_gain

def nag_write(r, log_rms, u, gain, kernels="auto"):
    """
    Turn the direction r by the angle atan(gain) towards the part of the update u that is orthogonal to r.
    The norm that r stands for grows by sqrt(1 + gain^2) (NAG, arXiv:2606.16112, eqs. 10-17).

    r (..., C) of norm sqrt(C), u (..., C) as the sublayer has returned it, log_rms and gain (..., 1) of r's
    dtype or fp32 -> the new r, of norm sqrt(C) again, and the new log_rms. ValueError if u has another dtype
    than r. (Sublayers cast what they return to the dtype of the stream. Keep it in fp32, also under autocast:
    in bf16, rounding changes the norm of r.) Can be differentiated once.
    """
    check_rows("nag_write", (r, u), (log_rms, gain))
    if not use_triton(r, kernels):
        return nag_write_definition(r, log_rms, u, gain)
    out, log_rms_out = NagWrite.apply(as_rows(r), as_rows(log_rms), as_rows(u), as_rows(gain))
    return out.view(r.shape), log_rms_out.view(log_rms.shape)

# ----------------------------------------------------------------------------- a sum over depth

def depth_sum_definition(weights, sources):
    total = weights[0] * sources[0]
    for weight, source in zip(weights[1:], sources[1:]):
        total = torch.addcmul(total, weight, source)
    return total.to(sources[0].dtype)

@jit
def depth_sum_forward(table_ptr, weight_ptr, out_ptr, n, N, C, BLOCK: tl.constexpr):
    """table: the addresses of n sources (N, C), as a kernel can't have n arguments; weight (n, N)"""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < C
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.range(n, num_stages=3):   # The next two sources are under way meanwhile.
        source_ptr = tl.multiple_of(tl.load(table_ptr + i).to(out_ptr.dtype), 16)   # the address as a pointer
        v = tl.load(source_ptr + row * C + cols, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + tl.cast(i, tl.int64) * N + row).to(tl.float32)
        total += v * weight
    tl.store(out_ptr + row * C + cols, total, mask=inside)

@jit
def depth_sum_backward(table_ptr, weight_ptr, g_ptr, d_weight_ptr, d_sources_ptr, n, N, C,
                       BLOCK: tl.constexpr):
    """d_weight (n, N), d_sources (n, N, C)"""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < C
    g = tl.load(g_ptr + row * C + cols, mask=inside, other=0.0).to(tl.float32)
    for i in tl.range(n, num_stages=3):
        source_ptr = tl.multiple_of(tl.load(table_ptr + i).to(g_ptr.dtype), 16)
        v = tl.load(source_ptr + row * C + cols, mask=inside, other=0.0).to(tl.float32)
        place = tl.cast(i, tl.int64) * N + row
        weight = tl.load(weight_ptr + place).to(tl.float32)
        tl.store(d_weight_ptr + place, tl.sum(g * v))
        tl.store(d_sources_ptr + place * C + cols, g * weight, mask=inside)

class DepthSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights, *sources):   # (n, N), n of (N, C)
        n, N = weights.shape
        out = torch.empty_like(sources[0])
        launch(depth_sum_forward, out, table(sources), weights, out, n, N)
        ctx.save_for_backward(weights, *sources)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        weights, *sources = ctx.saved_tensors
        n, N = weights.shape
        d_weights = torch.empty_like(weights)
        d_sources = g.new_empty(n, *g.shape)
        launch(depth_sum_backward, g, table(sources), weights, g.contiguous(), d_weights, d_sources, n, N)
        return d_weights, *d_sources.unbind()

def table(sources):
    """The addresses of tensors, as a tensor beside them"""
    return to_device(tuple(source.data_ptr() for source in sources), sources[0].device)

@functools.lru_cache(maxsize=4096)   # Tensors come back to the same places step after step.
def to_device(addresses, device):
    return torch.tensor(addresses, dtype=torch.int64, device=device)

def depth_sum(weights, sources, kernels="auto"):
    """
    The sum of weights[i] * sources[i] over n sources, as in a read across depth (Attention Residuals,
    arXiv:2603.15031, eq. 4; DenseFormer, arXiv:2402.02622).

    weights: a tensor (n, ..., 1) or (n,), or n tensors (..., 1) or (), of the sources' dtype or fp32;
    sources: n tensors (..., C) -> (..., C) of the sources' dtype. ValueError if the sources differ in shape,
    dtype or device, or if the weights do not fit. Can be differentiated once.
    """
    if len(sources) == 0 or len(weights) != len(sources):
        raise ValueError(f"depth_sum: got {len(weights)} weights for {len(sources)} sources; each needs one")
    check_rows("depth_sum", sources)
    if weights[0].dim() > 0:
        check_rows("depth_sum", sources[:1], weights[:1])
    # While torch.compile traces, tensors have no addresses. It fuses the definition, once for each n.
    if not use_triton(sources[0], kernels) or torch.compiler.is_compiling():
        return depth_sum_definition(weights, sources)
    if not torch.is_tensor(weights):
        weights = torch.stack(tuple(weights))
    if weights.dim() == 1:
        weights = weights.view(-1, *(1 for _ in sources[0].shape))
    weights = weights.expand(-1, *sources[0].shape[:-1], 1).reshape(len(sources), -1).contiguous()
    out = DepthSum.apply(weights, *(aligned(as_rows(source)) for source in sources))
    return out.view(sources[0].shape)

def aligned(x):
    """At an address from which 16 bytes can be loaded at a time: Triton can't see in a table whether it is.
    (Whole tensors are, parts of tensors may not be.)"""
    return x.clone() if x.data_ptr() % 16 else x

# ----------------------------------------------------------------------------- python kernels.py

def inputs_of(op, N=6, C=20, n=4, dtype=torch.float32, device="cpu"):
    """-> random inputs of nag_write, or weights and n sources for depth_sum. All require gradients. Rows are
    of the dtype, and what is one number per token is fp32."""
    torch.manual_seed(N + C)
    if op is nag_write:
        r, u = torch.randn(2, N, C, dtype=torch.float64)
        r = r - r.mean(-1, keepdim=True)
        r = r * (r.square().mean(-1, keepdim=True) + TINY).rsqrt()
        inputs = [r.to(dtype), torch.randn(N, 1), u.to(dtype), torch.rand(N, 1)]
    else:
        inputs = [torch.randn(n, N, 1), *torch.randn(n, N, C, dtype=torch.float64).to(dtype).unbind()]
    return [x.to(device).clone().requires_grad_() for x in inputs]

def run(op, inputs, kernels):
    """-> a tuple of what the op returns"""
    if op is nag_write:
        return nag_write(*inputs, kernels=kernels)
    return (depth_sum(inputs[0], inputs[1:], kernels),)

def errors(op, N, C, n, dtype, device="cpu"):
    """-> the largest relative RMS errors of the kernels to the definition in float64: forward, backward"""
    inputs = inputs_of(op, N, C, n, dtype, device)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    ours = run(op, inputs, "on")
    exact = run(op, exact_inputs, "off")
    upstream = [torch.randn_like(y) for y in ours]   # Gradients of some loss by the outputs.
    our_gradients = torch.autograd.grad(ours, inputs, upstream)
    exact_gradients = torch.autograd.grad(exact, exact_inputs, [g.double() for g in upstream])
    return largest_error(ours, exact), largest_error(our_gradients, exact_gradients)

def largest_error(tensors, exact_tensors):
    found = []
    for ours, exact in zip(tensors, exact_tensors):
        found.append((ours.double() - exact).square().sum() / exact.square().sum().clamp_min(1e-30))
    return torch.stack(found).max().sqrt().item()   # A NaN comes through.

def check(device, shapes):
    """Print the errors of both ops. SystemExit if one is larger than rounding makes it."""
    for op in (nag_write, depth_sum):
        for dtype in (torch.float32, *HALF):
            bound = 1e-5 if dtype == torch.float32 else 1e-2
            for N, C, n in shapes:
                forward, backward = errors(op, N, C, n, dtype, device)
                print(f"{op.__name__:10} {str(dtype):15} {N:5} x {C:<5} n = {n:<3} errors: forward "
                      f"{forward:.1e}, backward {backward:.1e}, bound {bound:.0e}")
                if not (forward < bound and backward < bound):   # A NaN is an error, too.
                    raise SystemExit("kernels.py: this error is too large")

def bench(device="cuda", N=16384, C=1024, n=9):
    """Print milliseconds, and which share of the speed of a plain copy the kernels reach. The timer replays
    recorded launches: Python's time doesn't count. Backward is the time of both passes less the forward's."""
    timer = triton.testing.do_bench_cudagraph
    large = torch.empty(N * C * 16, device=device)
    copy_speed = 2 * large.nbytes / timer(large.clone)
    print(f"{N} x {C}, n = {n}: milliseconds forward + backward; a copy moves {copy_speed / 1e6:.0f} GB/s")
    compiled = torch.compile(run)
    for op, rows in ((nag_write, (3, 5)), (depth_sum, (n + 1, 2 * n + 1))):
        for dtype in (torch.float32, torch.bfloat16):
            inputs = inputs_of(op, N, C, n, dtype, device)
            for way, function in (("eager", run), ("compiled", compiled), ("ours", run)):
                arguments = function, op, inputs, "on" if way == "ours" else "off"
                forward = timer(functools.partial(*arguments))
                backward = timer(functools.partial(both_ways, *arguments)) - forward
                print(f"{op.__name__:10} {str(dtype):15} {way:9} {forward:7.3f} + {backward:7.3f}")
            speeds = [row * N * C * dtype.itemsize / time for row, time in zip(rows, (forward, backward))]
            print(f"ours: {speeds[0] / copy_speed:.0%} and {speeds[1] / copy_speed:.0%} of the copy's speed")

def both_ways(function, op, inputs, kernels):
    outputs = function(op, inputs, kernels)
    torch.autograd.grad(outputs, inputs, outputs)   # Any gradients by the outputs will do.

def main():
    if triton is None:
        raise SystemExit(f"kernels.py: {why_no_triton()}")
    if torch.cuda.is_available():
        check("cuda", [(999, 1000, 9), (4096, 4096, 40)])
        bench()
    else:
        check("cpu", [(7, 123, 5), (16, 256, 40)])

if __name__ == "__main__":
    from sentences import start
    start(main)
