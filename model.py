"""
A GPT in which the residual connection is a part that you can swap.

A Transformer with L blocks is 2L *sublayers* (attention, MLP, attention, MLP, ...) around a *stream*. A
residual says what a sublayer reads from the stream and how its update is written back. That is all that the
variants of this file differ in:

    stream = ends.start(embedding)
    for sublayer, residual in sublayers:
        stream = residual.write(stream, sublayer(residual.read(stream)))
    logits = head(ends.finish(stream))

What a stream is, is the residual's own business: a tensor (PreNorm), a direction and a log-norm (NAG), ...
Read from top to bottom: config, norm, residuals, attention, MLP, block, GPT.
"""
import dataclasses
import math
import zlib
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import EPS, nag_write, rms_norm, rotate_normed

# ----------------------------------------------------------------------------- config

@dataclass
class GPTConfig:
    residual: str = "pre"         # how sublayers read and write the stream, a key of RESIDUALS
    n_layer: int = 12             # blocks; a block is two sublayers, attention and MLP
    n_head: int = 4               # attention heads
    n_embd: int = 128             # width of the stream
    block_size: int = 128         # longest context, in tokens
    vocab_size: int = 320         # tokens; train.py takes it from the data, rounded up to a multiple of 64
    activation: Literal["gelu", "relu2", "swiglu"] = "gelu"  # of the MLP; swiglu has no more parameters
    mlp_ratio: float = 4.0        # width of the MLP's hidden layer / n_embd
    tie: bool = False             # the head shares the embedding's weights
    seed: int = 1337              # of the initial weights and, in train.py, of the data order
    mixln_alpha: float = 0.25     # mixln: share of the blocks, from the first, that are post-norm
    layerscale_init: float = 0.1  # layerscale: initial value of the per-channel gain
    nag_directions: int = 32      # nag: preferred directions per sublayer (C)
    nag_power: float = 0.5        # nag: initial step size of sublayer l is l ** -nag_power
    nag_head: Literal["cos", "linear"] = "cos"  # nag: logits exp(s) x cosine, or exp(s) x linear
    nag_temp: float = 0.5         # nag: standard deviation of the logits at initialisation

    def problems(self) -> list[str]:
        """Every reason why this config can't be built, one sentence each, naming the flags and a remedy."""
        bad = []
        for field in dataclasses.fields(self):
            value, choices = getattr(self, field.name), get_args(field.type)
            if choices and value not in choices:
                bad.append(f"--{field.name} {value}: unknown; choose from {', '.join(choices)}")
            elif isinstance(value, float) and not math.isfinite(value):
                bad.append(f"--{field.name} {value}: must be a finite number")
        if not 0 <= self.seed < 2 ** 31:
            bad.append(f"--seed {self.seed}: must be from 0 to {2 ** 31 - 1}")
        if self.residual not in RESIDUALS:
            bad.append(f"--residual {self.residual}: unknown; choose from {', '.join(RESIDUALS)}")
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "nag_directions"):
            if getattr(self, name) < 1:
                bad.append(f"--{name} {getattr(self, name)}: must be 1 or more")
        if self.n_head >= 1 and self.n_embd % (2 * self.n_head):  # RoPE rotates pairs of channels in a head
            fits = [h for h in range(1, self.n_embd // 2 + 1) if self.n_embd % (2 * h) == 0]
            near = sorted(sorted(fits, key=lambda h: abs(h - self.n_head))[:4])
            bad.append(f"--n_head {self.n_head} --n_embd {self.n_embd}: n_embd must be an even multiple of "
                       f"n_head; try --n_head {' or '.join(map(str, near)) or '1 with an even --n_embd'}")
        if not self.mlp_ratio * self.n_embd >= 1:
            bad.append(f"--mlp_ratio {self.mlp_ratio}: leaves the MLP no hidden unit; use a larger one")
        if not 0 <= self.mixln_alpha <= 1:
            bad.append(f"--mixln_alpha {self.mixln_alpha}: is a share of the blocks; use a value from 0 to 1")
        if not self.nag_temp > 0:
            bad.append(f"--nag_temp {self.nag_temp}: is a standard deviation; use one above 0, such as 0.5")
        return bad


INIT_STD = 0.02  # of every weight matrix, before a residual rescales it


def widen(x):
    """Half precision to fp32; fp32 and fp64 as they are. The stream's own arithmetic is never done in
    bf16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ----------------------------------------------------------------------------- residuals

class Residual(nn.Module):
    """
    The protocol, with the answers that most residuals share. A model of L blocks makes 2L + 1 of these:
    number l = 1 .. 2L belongs to sublayer l (odd l: attention, even l: MLP), number 2L + 1 opens and closes
    the stream.

        start(embedding)       (B, T, C) -> stream
        read(stream)           -> (B, T, C), the sublayer's input
        keep(stream, tau)      -> (B, T) bool, the tokens that should run the sublayer; None: all of them
        write(stream, update)  -> the stream after the sublayer's output (B, T, C) has been written
        finish(stream)         -> (B, T, C), the input of the head
        as_tensor(stream)      -> (B, T, C), the stream as one vector per token, for measurements

    A skipped token is simply not written: its stream stays what it was. So `write` also gets streams of kept
    tokens only, (N, C) in place of (B, T, C), and must not mix tokens.
    """
    gates = ()  # names of the parameters that train.py gives their own learning rate and no weight decay

    def start(self, x):
        return x

    def keep(self, stream, tau):
        return None  # a residual without a rule of its own runs every token

    def as_tensor(self, stream):
        return stream

    def head_weight(self, weight):
        return weight  # (V, C), for residuals whose head isn't an ordinary linear layer

    def init_sublayer(self, sublayer):
        """Rescale the freshly drawn weights of this residual's sublayer, in place."""


@dataclass
class Row:
    """One row of the additive family: x <- N_out(a x + b N_post(F(s N_in(x)))). False leaves a norm out."""
    n_in: bool = False
    n_post: bool = False
    n_out: bool = False
    a: float | None = None        # None: 1
    b: float | None = None        # learned if a number is given: its initial value
    b_vector: bool = False        # one b per channel instead of one for all
    s: float | None = None        # None: 1
    init: Literal["scaled", "plain", "deepnorm"] = "scaled"  # see Additive.init_sublayer
    n_final: bool = True          # a norm before the head


# Each preset is a function of (config, l) because some treat their first blocks differently. The block of
# sublayer l is (l + 1) // 2, counted from 1. Sources and equations: README. lns and `init`: its authors warn
# against the scaled init, which does the same job a second time; deepnorm's bound on the update holds with
# its init gain only.
PRESETS = {
    "pre": lambda c, l: Row(n_in=True),
    "post": lambda c, l: Row(n_out=True, n_final=False),
    "peri": lambda c, l: Row(n_in=True, n_post=True),
    "reordered": lambda c, l: Row(n_post=True),
    "lns": lambda c, l: Row(n_in=True, s=((l + 1) // 2) ** -0.5, init="plain"),
    "mixln": lambda c, l: (Row(n_out=True) if (l + 1) // 2 <= int(c.mixln_alpha * c.n_layer + 1e-9) else
                           Row(n_in=True, n_final=c.mixln_alpha < 1)),
    "deepnorm": lambda c, l: Row(n_out=True, a=(2 * c.n_layer) ** 0.25, init="deepnorm", n_final=False),
    "keel": lambda c, l: (Row(n_in=True) if l == 1 else Row(n_out=True, n_final=False) if l == 2 else
                          Row(n_in=True, n_out=True, a=2.0 * c.n_layer, n_final=False)),
    "rezero": lambda c, l: Row(b=0.0, n_final=False),
    "skipinit": lambda c, l: Row(n_in=True, b=0.0),
    "layerscale": lambda c, l: Row(n_in=True, b=c.layerscale_init, b_vector=True),
}


class Additive(Residual):
    """
    x <- N_out(a x + b N_post(F(s N_in(x)))), every N an RMSNorm with a learned gain. The stream is the tensor
    x. Most residuals of the literature are a row of this one table (PRESETS): PreNorm, PostNorm, LayerNorm
    Scaling, ...
    """
    def __init__(self, preset, config, l):
        super().__init__()
        row, self.config = PRESETS[preset](config, l), config
        self.init, is_end = row.init, l > 2 * config.n_layer
        # the end needs one norm at most, the final one, and it sits where a sublayer's n_in would
        n_in, n_post, n_out = (row.n_final, False, False) if is_end else (row.n_in, row.n_post, row.n_out)
        gain = lambda wanted: nn.Parameter(torch.ones(config.n_embd)) if wanted else None
        self.n_in, self.n_post, self.n_out = gain(n_in), gain(n_post), gain(n_out)
        # constants that depend on depth are tensors: a Python float would make torch.compile start over per
        # layer
        constant = lambda value: None if value is None or is_end else torch.tensor(value)
        self.register_buffer("a", constant(row.a), persistent=False)
        self.register_buffer("s", constant(row.s), persistent=False)
        self.b = None
        if row.b is not None and not is_end:
            self.b = nn.Parameter(torch.full((config.n_embd,) if row.b_vector else (), row.b))

    def read(self, x):  # (B, T, C) -> (B, T, C)
        if self.n_in is None:
            return x
        # scaling the gain (C numbers) scales the norm's output (B T C numbers)
        return rms_norm(x, self.n_in if self.s is None else self.n_in * self.s)

    def write(self, x, update):
        if self.n_post is not None:
            update = rms_norm(update, self.n_post)
        if self.b is not None:
            update = update * self.b
        x = (x if self.a is None else x * self.a) + update
        return x if self.n_out is None else rms_norm(x, self.n_out)

    def finish(self, x):
        return self.read(x)

    def init_sublayer(self, sublayer):
        if self.init == "scaled":  # GPT-2: the sum of 2L updates starts with the variance of one
            sublayer.c_proj.weight.mul_((2 * self.config.n_layer) ** -0.5)
        elif self.init == "deepnorm":  # Wang et al. 2022: gain (8N)^(-1/4) on everything but queries and keys
            sublayer.c_proj.weight.mul_((8 * self.config.n_layer) ** -0.25)
            sublayer.value_weight().mul_((8 * self.config.n_layer) ** -0.25)

    def cost(self):
        """(parameters, forward matmul FLOPs per token) of this residual."""
        C = self.config.n_embd
        n_norms = sum(g is not None for g in (self.n_in, self.n_post, self.n_out))
        return C * n_norms + (0 if self.b is None else self.b.numel()), 0


class NAG(Residual):
    """
    Norm-AGnostic residual (Figliolia and Millidge 2026, arXiv:2606.16112, eqs. 3-24; specs in the README).
    The stream is a pair: a direction r (B, T, C), always of norm sqrt(C), and the log of the norm it stands
    for, s (B, T, 1). A write turns r by the angle atan(alpha m) towards the part of the update that is
    orthogonal to r; how far is known from r alone, *before* the sublayer runs. A token that would hardly turn
    may skip it: Mixture-of-Depths without a router.
    """
    gates = ("alpha", "beta", "w", "b", "p", "g")

    def __init__(self, config, l):
        super().__init__()
        C, n, self.config = config.n_embd, config.nag_directions, config
        self.is_end = l > 2 * config.n_layer
        if self.is_end:
            self.g = nn.Parameter(torch.tensor(self.initial_g()))   # log of the encoding gain, eq. 18
            return
        rng = torch.Generator().manual_seed(config.seed * 1000 + l)
        self.alpha = nn.Parameter(torch.tensor(l ** -config.nag_power))  # step size, any sign, eqs. 23, 24
        self.beta = nn.Parameter(torch.tensor(math.log(math.e - 1)))  # exponent softplus(beta) = 1
        self.w = nn.Parameter(torch.randn(n, C, generator=rng) * C ** -0.5)       # preferred directions
        self.b = nn.Parameter(torch.zeros(n))
        self.p = nn.Parameter(torch.zeros(n))                                     # logits of their weights

    def initial_g(self):
        """The g that gives the first logits a standard deviation of nag_temp; with g = 0 they all but
        agree."""
        c, root = self.config, self.config.n_embd ** 0.5
        # at initialisation m is close to 1/2, so sublayer l adds log(1 + (alpha_l / 2)^2) / 2 to the log-norm
        growth = sum(0.5 * math.log1p(0.25 * l ** (-2 * c.nag_power)) for l in range(1, 2 * c.n_layer + 1))
        logit_std = 1 / root if c.nag_head == "cos" else INIT_STD * root          # at log-norm 0
        return math.log(c.nag_temp / logit_std) - growth - math.log(INIT_STD)

    def start(self, x):  # (B, T, C) -> (B, T, C), (B, T, 1)
        wide = widen(x)
        # else a mean stays that no (centred) update could ever change
        wide = wide - wide.mean(-1, keepdim=True)
        rho = wide.square().mean(-1, keepdim=True).clamp_min(EPS ** 2).sqrt()
        return (wide / rho).to(x.dtype), rho.log() + widen(self.g)  # the log-norm is never stored in bf16

    def read(self, stream):
        return stream[0]

    def gain(self, r):
        """alpha m(r), signed (B, T, 1): the relative size of the write that r is about to get, eq. 13."""
        with torch.autocast(r.device.type, enabled=False):   # the skip decision hangs on it: not in bf16
            alpha, beta, w, b, p = map(widen, (self.alpha, self.beta, self.w, self.b, self.p))
            near = torch.sigmoid(F.linear(widen(r), w, b))  # (B, T, n)
            base = F.linear(near, p.softmax(0)[None])       # (B, T, 1), in (0, 1)
            # as exp(beta log), with a floor: 0 ** beta has an infinite slope, and has ended runs of others
            return alpha * torch.exp(F.softplus(beta) * base.clamp_min(1e-6).log())

    def keep(self, stream, tau):
        return self.gain(stream[0]).abs().squeeze(-1) > tau

    def write(self, stream, f):
        r, s = stream
        a = self.gain(r)
        turned = nag_write(widen(r), widen(f), a)
        if r.dtype in (torch.bfloat16, torch.float16):  # rounding would add up: measure the norm
            turned = rms_norm(turned).to(r.dtype)
        return turned, s + 0.5 * torch.log1p(a * a)  # the log of the factor sqrt(1 + a^2), eqs. 15, 17

    def finish(self, stream):
        r, s = stream
        return (r * (s.exp() / self.config.n_embd if self.config.nag_head == "cos" else s.exp())).to(r.dtype)

    def head_weight(self, weight):
        if self.config.nag_head == "linear":
            return weight
        # rows of norm sqrt(C): <r, row> / C is a cosine
        return rms_norm(weight - weight.mean(-1, keepdim=True))

    def as_tensor(self, stream):
        return stream[0] * stream[1].exp()

    def cost(self):
        C, n = self.config.n_embd, self.config.nag_directions
        return (1, 0) if self.is_end else (n * C + 2 * n + 2, 2 * n * C + 2 * n)


RESIDUALS = {**{name: partial(Additive, name) for name in PRESETS}, "nag": NAG}


# ----------------------------------------------------------------------------- sublayers

class Attention(nn.Module):
    """Causal multi-head attention with RoPE and normalised queries and keys."""
    def __init__(self, config):
        super().__init__()
        C, self.n_head, self.hs = config.n_embd, config.n_head, config.n_embd // config.n_head
        self.c_attn = nn.Linear(C, 3 * C, bias=False)
        self.c_proj = nn.Linear(C, C, bias=False)

    def value_weight(self):
        return self.c_attn.weight[2 * self.c_proj.in_features:]

    def heads(self, x):
        return x.unflatten(-1, (-1, self.hs))                                        # (..., nh, hs)

    def forward(self, x, rope, cache=None, rows=None):
        """
        x (B, T, C) -> (B, T, C). With rows, the (N,) kept tokens of the B T tokens: -> (N, C), and nothing
        but their keys and values is computed of the others. With a cache (keys, values, start): the tokens
        continue it.
        """
        B, T, C = x.shape
        if rows is None:
            qk, v = self.heads(self.c_attn(x)).split((2 * self.n_head, self.n_head), dim=-2)
            q, k = rotate_normed(qk, rope).chunk(2, dim=-2)                          # (B, T, nh, hs) each
            keys, values, start = extend(cache, k, v)
            # one token sees all of the cache, a prompt sees what is behind it: only a later chunk needs a
            # mask
            later = start > 0 and T > 1
            mask = causal_mask(torch.arange(start, start + T, device=x.device), keys) if later else None
            causal = T > 1 and not later
            y = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask, is_causal=causal)
            return self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        w_q, w_kv = self.c_attn.weight.split((C, 2 * C))
        k, v = map(self.heads, F.linear(x, w_kv).split(C, dim=-1))
        rope = rope[:, :self.n_head]
        keys, values, start = extend(cache, rotate_normed(k, rope), v)
        q = self.heads(F.linear(x.flatten(0, 1)[rows], w_q))                         # (N, nh, hs)
        sequence, place = rows // T, rows % T
        q = rotate_normed(q, rope[place])
        # attention wants a rectangle: the kept tokens of a sequence move to its left, the slots they leave
        # stay zero
        count = torch.bincount(sequence, minlength=B)
        slot = torch.arange(len(rows), device=x.device) - (count.cumsum(0) - count)[sequence]
        K = int(count.max())
        padded = q.new_zeros(B, K, *q.shape[1:]).index_put((sequence, slot), q)      # (B, K, nh, hs)
        position = place.new_zeros(B, K).index_put((sequence, slot), place + start)
        y = F.scaled_dot_product_attention(padded.transpose(1, 2), keys, values, causal_mask(position, keys))
        return self.c_proj(y.transpose(1, 2)[sequence, slot].flatten(-2))


def extend(cache, k, v):
    """Append k, v (B, T, nh, hs) to the cache, if any. -> all keys and values (B, nh, S, hs), and where T
    starts."""
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if cache is None:
        return k, v, 0
    keys, values, start = cache
    end = start + k.shape[2]
    keys[:, :, start:end], values[:, :, start:end] = k, v
    return keys[:, :, :end], values[:, :, :end], start


def causal_mask(position, keys):
    """position (T,) or (B, T) of the queries -> bool (T, S) or (B, 1, T, S), true where a key may be seen."""
    seen = torch.arange(keys.shape[2], device=keys.device) <= position[..., None]
    return seen if position.dim() == 1 else seen[:, None]


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.activation = config.activation
        hidden, fan_out = mlp_shape(config)
        self.c_fc = nn.Linear(config.n_embd, fan_out, bias=False)
        self.c_proj = nn.Linear(hidden, config.n_embd, bias=False)

    def value_weight(self):
        return self.c_fc.weight

    def forward(self, x, rope=None, cache=None, rows=None):
        """x (B, T, C) -> (B, T, C), or (N, C) for the kept rows of the B T tokens."""
        x = self.c_fc(x if rows is None else x.flatten(0, 1)[rows])
        if self.activation == "gelu":
            x = F.gelu(x)
        elif self.activation == "relu2":
            x = F.relu(x).square()
        else:
            gate, x = x.chunk(2, dim=-1)
            x = F.silu(gate) * x
        return self.c_proj(x)


def mlp_shape(config):
    """(hidden units, outputs of c_fc). swiglu has three matrices where gelu has two, so two thirds of the
    units."""
    if config.activation == "swiglu":
        hidden = max(1, round(config.mlp_ratio * config.n_embd * 2 / 3))
        return hidden, 2 * hidden
    return (int(config.mlp_ratio * config.n_embd),) * 2


# ----------------------------------------------------------------------------- block and model

def take(stream, rows):
    """The kept tokens of a stream: tensors (B, T, ...) -> (N, ...)."""
    return tuple(take(x, rows) for x in stream) if isinstance(stream, tuple) else stream.flatten(0, 1)[rows]


def put(stream, rows, kept):
    """The stream with the kept tokens replaced. The inverse of take."""
    if isinstance(stream, tuple):
        return tuple(put(x, rows, k) for x, k in zip(stream, kept))
    return stream.flatten(0, 1).index_copy(0, rows, kept).view_as(stream)


def step(stream, residual, sublayer, rope, cache=None, tau=None):
    """One sublayer. With a threshold tau, the tokens that the residual wants to skip are gathered away
    first."""
    keep = None if tau is None else residual.keep(stream, tau)                       # (B, T)
    if keep is None:
        return residual.write(stream, sublayer(residual.read(stream), rope, cache))
    rows = keep.flatten().nonzero().squeeze(1)                                       # (N,)
    update = sublayer(residual.read(stream), rope, cache, rows)                      # (N, C)
    return put(stream, rows, residual.write(take(stream, rows), update))


class Block(nn.Module):
    """Two sublayers, each with its residual. i counts blocks from 0, so the sublayers are 2i + 1 and 2i +
    2."""
    def __init__(self, config, i):
        super().__init__()
        self.attn, self.attn_residual = Attention(config), RESIDUALS[config.residual](config, 2 * i + 1)
        self.mlp, self.mlp_residual = MLP(config), RESIDUALS[config.residual](config, 2 * i + 2)

    def forward(self, stream, rope, cache=None, tau=None):
        stream = step(stream, self.attn_residual, self.attn, rope, cache, tau)
        return step(stream, self.mlp_residual, self.mlp, rope, tau=tau)


class GPT(nn.Module):
    """Decoder-only Transformer. Raises ValueError with one sentence per problem of the config."""
    def __init__(self, config: GPTConfig):
        super().__init__()
        if config.problems():
            raise ValueError("\n".join(config.problems()))
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        self.ends = RESIDUALS[config.residual](config, 2 * config.n_layer + 1)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie:
            self.lm_head.weight = self.wte.weight
        hs = config.n_embd // config.n_head
        angle = torch.outer(torch.arange(config.block_size), 1e4 ** -(torch.arange(0, hs, 2) / hs))
        # (block_size, 2 nh, hs), the same for all heads of q and k: long rows are faster than short ones
        pairs = torch.stack((angle.cos(), angle.sin()), dim=-1).flatten(1)           # cos, sin, cos, sin, ...
        self.register_buffer("turn", pairs[:, None].repeat(1, 2 * config.n_head, 1), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        # Every matrix is drawn from its own generator, seeded by its name: two variants with the same seed
        # start from the same values wherever they share a parameter, however many parameters either has
        # besides.
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                rng = torch.Generator().manual_seed(self.config.seed + (zlib.crc32(name.encode()) << 20))
                module.weight.normal_(std=INIT_STD, generator=rng)
        for residual, sublayer in self.sublayers():
            residual.init_sublayer(sublayer)

    def sublayers(self):
        """The 2L pairs (residual, sublayer) in the order in which they run."""
        for block in self.blocks:
            yield block.attn_residual, block.attn
            yield block.mlp_residual, block.mlp

    def rope(self, start, T):
        return self.turn[start:start + T]

    def hidden(self, idx, cache=None, tau=None):
        """idx (B, T) -> what the head reads (B, T, C). tau: skip threshold, a number (Mixture-of-Depths)."""
        start = 0 if cache is None else cache.length
        if start + idx.shape[1] > self.config.block_size:
            raise ValueError(f"{start + idx.shape[1]} tokens do not fit block_size {self.config.block_size}")
        rope = self.rope(start, idx.shape[1])
        stream = self.ends.start(self.wte(idx))
        for i, block in enumerate(self.blocks):
            stream = block(stream, rope, cache and cache.layer(i), tau)
        if cache is not None:
            cache.length += idx.shape[1]
        return self.ends.finish(stream)

    def head(self, x):
        """(..., C) -> logits (..., V)."""
        return F.linear(x, self.ends.head_weight(self.lm_head.weight))

    def forward(self, idx, targets=None, cache=None, tau=None):
        """idx, targets (B, T) of token ids -> logits (B, T, V), mean cross entropy in nats (None without
        targets)."""
        logits = self.head(self.hidden(idx, cache, tau))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(widen(logits).flatten(0, 1), targets.flatten())

    def walk(self, idx, without=()):
        """
        The forward pass one sublayer at a time, for measurements. Yields (l, stream before, stream after) for
        l = 1 .. 2L, then (2L + 1, last stream, logits). The sublayers numbered in `without` are skipped: they
        do not run, and the stream passes them unchanged.
        """
        rope, stream = self.rope(0, idx.shape[1]), self.ends.start(self.wte(idx))
        for l, (residual, sublayer) in enumerate(self.sublayers(), start=1):
            before, stream = stream, stream if l in without else step(stream, residual, sublayer, rope)
            yield l, before, stream
        yield l + 1, stream, self.head(self.ends.finish(stream))

    @torch.no_grad()
    def stream_tokens(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, generator=None,
                      n_vocab=None, tau=None):
        """Continue idx (B, T) with a KV cache; yields one (B, 1) of new tokens at a time. temperature 0 is
        greedy."""
        cache = KVCache(self, idx.shape[0])
        for _ in range(max_new_tokens):
            if cache.length == 0 or cache.length == self.config.block_size:
                # empty or full: (re)start from the newest tokens. Keeping half makes that rare enough to cost
                # little
                keep = self.config.block_size if cache.length == 0 else self.config.block_size // 2
                cache.length, fresh = 0, idx[:, -max(1, keep):]
            logits = self.head(self.hidden(fresh, cache, tau)[:, -1])[:, :n_vocab]
            fresh = pick(widen(logits), temperature, top_k, top_p, generator)
            idx = torch.cat((idx, fresh), dim=1)
            yield fresh

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, **options):
        """idx (B, T) -> (B, T + max_new_tokens). Options: see stream_tokens."""
        fresh = self.stream_tokens(idx, max_new_tokens, temperature, top_k, **options)
        return torch.cat([idx, *fresh], dim=1)

    def num_params(self):
        """Number of parameters, by formula; a tied head counts once."""
        c, (hidden, fan_out) = self.config, mlp_shape(self.config)
        blocks = c.n_layer * c.n_embd * (4 * c.n_embd + fan_out + hidden)
        tables = c.vocab_size * c.n_embd * (1 if c.tie else 2)
        return blocks + tables + sum(residual.cost()[0] for residual in self.residuals())

    def flops_per_token(self, T=None):
        """
        Matmul FLOPs of one token's forward pass at context length T (default block_size), by formula; a
        training step is three times that. Attention scores count in full, as torch.utils.flop_counter does,
        though half are masked.
        """
        c, (hidden, fan_out) = self.config, mlp_shape(self.config)
        T = c.block_size if T is None else T
        block = 2 * c.n_embd * (4 * c.n_embd + fan_out + hidden) + 4 * T * c.n_embd
        return c.n_layer * block + 2 * c.vocab_size * c.n_embd + sum(r.cost()[1] for r in self.residuals())

    def residuals(self):
        return [residual for residual, _ in self.sublayers()] + [self.ends]


class KVCache:
    """Keys and values of the tokens so far, room for block_size of them: (L, B, nh, block_size, hs) each."""
    def __init__(self, model, batch_size):
        c, weight = model.config, model.lm_head.weight
        shape = c.n_layer, batch_size, c.n_head, c.block_size, c.n_embd // c.n_head
        self.keys, self.values = weight.new_zeros(shape), weight.new_zeros(shape)
        self.length = 0

    def layer(self, i):
        return self.keys[i], self.values[i], self.length


def pick(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """logits (B, V) -> one token id each (B, 1). top_k and top_p (the smallest set with that probability)
    combine."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p is not None:
        probs, order = logits.softmax(-1).sort(descending=True)
        # a token stays if the tokens likelier than it hold less than top_p: the first one always does
        gone = (probs.cumsum(-1) - probs >= top_p).scatter(1, order, probs.cumsum(-1) - probs >= top_p)
        logits = logits.masked_fill(gone, -math.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
