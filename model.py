"""
A GPT in which the residual connection is a part that you can swap.

A Transformer of L blocks is 2L *sublayers* (attention, MLP, attention, ...) around a *stream*. A *residual*
is a function of the stream and of a sublayer f, and its code is its equation. For PreNorm this is
x + f(norm(x)). All else is the same for all variants:

    stream = ends.start(embedding)
    for residual, f in sublayers:
        stream = residual(stream, f)
    logits = head(ends.finish(stream))

What a stream is, is the residual's own business: one tensor (PreNorm), a direction and a log-norm (NAG),
all updates so far (Attention Residuals), several tensors in parallel (hyper-connections, SiameseNorm).

The real loop is GPT.walk. Before each sublayer it asks a function `decide` which tokens shall run it.
Thresholds, a router, LayerDrop, removed sublayers and early exit are answers to this question.

Sizes: B sequences of T tokens, C the width of the stream, L blocks, N kept tokens of a batch, S keys that a
query may see, nh heads of width hs, V tokens in the vocabulary.
"""
import functools
import inspect
import itertools
import math
import re
import zlib
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from kernels import EPS, TINY, depth_sum, nag_write, use_triton, why_no_triton   # EPS 1e-6, TINY 1e-10

# --- config
@dataclass
class GPTConfig:
    """A field is a flag, its comment the help. A range at the comment's beginning is checked."""
    # model
    residual: str = "pre"           # a key of RESIDUALS with options, such as nag or hyper:kind=mhc,n=2
    n_layer: int = 12               # [1, 4096] blocks; a block is two sublayers, attention and MLP
    n_head: int = 4                 # [1, 1024] attention heads
    n_embd: int = 128               # [2, 65536] width of the stream
    block_size: int = 128           # [1, 1048576] longest context, in tokens
    vocab_size: int = 320           # [1, 16777216] tokens; train.py takes it from the data
    activation: Literal["gelu", "relu2", "swiglu"] = "gelu"  # of the MLP; swiglu has as many parameters
    mlp_ratio: float = 4.0          # [0.01, 1024] width of the MLP's hidden layer / n_embd
    norm: Literal["rms", "layer", "single", "dyt", "none"] = "rms"  # of the stream
    tie: bool = False               # the head shares the embedding's weights
    init: Literal["width", "gpt2"] = "width"  # first weights: std 1 / sqrt(fan in), or GPT-2's 0.02
    taper: Literal["none", "linear", "cosine"] = "none"  # widths over depth, from taper_start to taper_end
    taper_start: float = 1.5        # [0.01, 100] relative width of the first block
    taper_end: float = 0.5          # [0.01, 100] relative width of the last block
    taper_on: Literal["mlp", "both"] = "mlp"  # taper hidden units only, or attention heads, too
    repeat: str = ""                # 9:3 runs block 9 three times, 9-12:3 the blocks 9 to 12 three times over
    deep_supervision: bool = False  # training: mean loss after each block
    kernels: Literal["auto", "on", "off"] = "auto"  # Triton kernels; auto: on CUDA
    seed: int = 1337                # [0, 2147483647] of the initial weights and of train.py's data order
    # skipping
    mod: Literal["geometric", "router"] = "geometric"  # who decides: a token's gain, or a router
    mod_rate: float = 0.0           # [0, 0.95] Mixture-of-Depths: share of sublayer runs that training skips
    layer_drop: float = 0.0         # [0, 0.95] training: probability that a sequence skips a sublayer

EMBEDDING_STD, LOGIT_STD = 3.0, 0.8   # with --init width, of the embedding and of first logits

def first_stds(config):
    """The first std of the embedding and of the head. For other matrices see init_weights."""
    if config.init == "gpt2":   # for width 768
        return 0.02, 0.02
    return EMBEDDING_STD, LOGIT_STD * config.n_embd ** -0.5

def generator(config, name):   # torch uses 32 bits of a seed.
    return torch.Generator().manual_seed(zlib.crc32(f"{config.seed} {name}".encode()))

# --- the protocol of a residual
def check_option(name, value, is_right, wanted):
    if not is_right:
        raise ValueError(f"--residual: option {name}={value} must be {wanted}")

class Residual(nn.Module):
    """The protocol, with the answers that most residuals share. A model makes 2L + 1 residuals: one for each
    sublayer l = 1 .. 2L (odd l: attention, even l: MLP), and the end, l = 2L + 1, which starts and finishes
    the stream.

        start(x)             x (B, T, C), the embedding -> the first stream
        forward(stream, f)   -> the stream after sublayer f, a function (..., C) -> (..., C)
        finish(stream)       -> (B, T, C), what the head reads
        as_tensor(stream)    -> (B, T, C), the stream as one vector per token, for measurements
        read(stream)         -> (B, T, C), what f will get

    A token that skips a sublayer keeps its stream. forward then gets the other tokens only, (N, ...) in place
    of (B, T, ...), so it must not mix tokens. A residual with knows_gain has one method more:

        gain(stream)         -> (B, T, 1), the relative size of the coming write, forward's third argument"""
    can_skip = True        # whether a token can pass by a sublayer
    knows_gain = False     # whether there is a method `gain`
    stream_grows = False   # whether each sublayer adds tensors to the stream
    warmup = 0.0           # share of the training before writes have full size
    own_lr = ()            # names of parameters that train at --gate_lr
    not_matrices = ()      # names of parameters (n, C) that are n vectors: no weight decay
    def __init__(self, config, l):
        super().__init__()
        self.config, self.is_end = config, l > 2 * config.n_layer

    def start(self, x):
        return x

    def finish(self, stream):
        return self.norm(self.as_tensor(stream))   # A subclass makes self.norm.

    def as_tensor(self, stream):
        return stream[0] if isinstance(stream, tuple) else stream

    def read(self, stream):
        """forward runs with an f that only notes down what it gets."""
        notes = []
        def f(x):
            notes.append(x)
            return torch.zeros_like(x)
        self(stream, f)
        return notes[0]

    def head_weight(self, weight):
        """The head's matrix (V, C) -> the one that it multiplies with."""
        return weight

    @torch.no_grad()
    def init_sublayer(self, sublayer):
        """Rescales first weights, here as GPT-2 does: 2L updates have the variance of one."""
        sublayer.c_proj.weight.mul_((2 * self.config.n_layer) ** -0.5)

    def before_step(self, progress):
        """Hears what share of the training will be over after the coming step."""

    def constrain(self, module):
        """After a step, brings the weights of a sublayer, wte or lm_head back where they belong."""

    def flops(self):
        """FLOPs of matrix products per token. By default each matrix is in one product."""
        return sum(2 * p.numel() for p in self.parameters() if p.dim() == 2)

class Template(Residual):
    """Copy me. PreNorm whose updates are multiplied by one learned number each: x <- x + b f(norm(x)).

    Rename the class, give it a key of RESIDUALS, and change the equation. A keyword argument such as `first`
    becomes an option, --residual template:first=0.5. With own_lr = ("b",), b trains at --gate_lr. With an
    init_sublayer that does nothing, f stays as it was drawn."""
    def __init__(self, config, l, first=1.0):
        """first: initial value of b"""
        super().__init__(config, l)
        self.norm = make_norm(config)
        if not self.is_end:   # The end only starts and finishes the stream.
            self.b = nn.Parameter(torch.tensor(first))

    def forward(self, x, f):
        return x + self.b * f(self.norm(x))

# --- norms
def make_norm(config):
    """The norm of the stream that --norm names: a module (..., C) -> (..., C)."""
    if config.norm == "rms":
        return nn.RMSNorm(config.n_embd, EPS)
    if config.norm == "layer":
        return nn.LayerNorm(config.n_embd, EPS, bias=False)
    return nn.Identity() if config.norm == "none" else Norm(config)

def unit(x, eps=EPS):
    """x / rms(x), the direction of x at norm sqrt(C)."""
    return F.rms_norm(x, x.shape[-1:], eps=eps)

def centred(x):
    return x - x.mean(-1, keepdim=True)

class Norm(nn.Module):
    """single: one weight for all channels (arXiv:2506.19697); dyt: a tanh (arXiv:2503.10622)"""
    def __init__(self, config):
        super().__init__()
        self.is_single = config.norm == "single"
        self.weight = nn.Parameter(torch.tensor(1.0) if self.is_single else torch.ones(config.n_embd))
        if not self.is_single:
            self.slope = nn.Parameter(torch.tensor(0.5))
            self.bias = nn.Parameter(torch.zeros(config.n_embd))

    def forward(self, x):
        if self.is_single:
            return unit(x) * self.weight
        return torch.tanh(self.slope * x) * self.weight + self.bias

# --- the additive family
class Additive(Residual):
    """x <- n_out(a x + b n_post(f(s n_in(x))))

    Most residuals of the literature are a row of ADDITIVE: a function -> dict. What it lacks is left out."""
    def __init__(self, config, l, row, **options):
        super().__init__(config, l)
        self.row = row(config.n_embd, config.n_layer, l, **options)
        for name in ("n_embed", "n_final") if self.is_end else ("n_in", "n_post", "n_out"):
            wanted = self.row.get(name, name == "n_final")
            setattr(self, name, make_norm(config) if wanted else nn.Identity())
        # The constants are tensors: for Python numbers, torch.compile would make a graph per layer.
        for name in ("a", "b", "s"):
            constant = torch.tensor(float(self.row[name])) if name in self.row else None
            self.register_buffer(name, constant, persistent=False)
        if "learned_b" in self.row and not self.is_end:   # replaces the buffer
            self.b = nn.Parameter(self.row["learned_b"])

    def start(self, x):
        return self.n_embed(x)

    def forward(self, x, f):
        u = f(times(self.s, self.n_in(x)))
        return self.n_out(times(self.a, x) + times(self.b, self.n_post(u)))

    def finish(self, x):
        x = self.n_final(x)
        return x / first_stds(self.config)[0] if "unscale" in self.row else x

    @torch.no_grad()
    def init_sublayer(self, sublayer):
        sublayer.c_proj.weight.mul_(self.row.get("c_proj", (2 * self.config.n_layer) ** -0.5))
        sublayer.value_weight().mul_(self.row.get("values", 1.0))

def times(factor, x):
    return x if factor is None else factor * x

def mixln(C, L, l, alpha=0.25):
    """alpha: share of the blocks, from the first, that are PostNorm"""
    if (l + 1) // 2 <= int(alpha * L + 1e-9):   # the number of the block, from 1
        return dict(n_out=True)
    return dict(n_in=True, n_final=alpha < 1)

# The table. A row is a function of the width C, the number of blocks L, the sublayer's number l, and options.
#   n_in, n_post, n_out   the norms that a sublayer has
#   a, b, s               constants;  learned_b: the first value of a b that is learned
#   n_embed, n_final      norms of the embedding (default: no) and the last stream (default: yes)
#   unscale               divide by the embedding's first std, where no norm does that
#   c_proj, values        factors of first weights: of c_proj (default: (2L)^-1/2), of values or c_fc
ADDITIVE = {
    "pre": lambda C, L, l: dict(n_in=True),
    # PostNorm, the Transformer of 2017. The last sublayer's n_out is the final norm.
    "post": lambda C, L, l: dict(n_out=True, n_final=False),
    # Peri-LN (arXiv:2502.02732). embed: normalise the embedding, too, as the paper does.
    "peri": lambda C, L, l, embed=False: dict(n_in=True, n_post=True, n_embed=embed),
    # OLMo 2 (arXiv:2501.00656): the norm is on the update alone.
    "reordered": lambda C, L, l: dict(n_post=True),
    # LayerNorm Scaling (arXiv:2502.05795), which does the job of a small c_proj.
    "lns": lambda C, L, l: dict(n_in=True, s=((l + 1) // 2) ** -0.5, c_proj=1.0),
    # DeepNorm (arXiv:2203.00555). Its bound on the update holds with these first weights only.
    "deepnorm": lambda C, L, l: dict(n_out=True, a=(2 * L) ** 0.25, n_final=False,
                                     c_proj=(8 * L) ** -0.25, values=(8 * L) ** -0.25),
    "mixln": mixln,   # Mix-LN (arXiv:2412.13795)
    # ReZero (arXiv:2003.04887): no norms at all; and SkipInit (arXiv:2002.10444). b starts at 0.
    "rezero": lambda C, L, l: dict(learned_b=torch.tensor(0.0), n_final=False, unscale=True),
    "skipinit": lambda C, L, l: dict(n_in=True, learned_b=torch.tensor(0.0)),
    # LayerScale (arXiv:2103.17239): a b per channel. init: its first value.
    "layerscale": lambda C, L, l, init=0.1: dict(n_in=True, learned_b=torch.full((C,), init)),
    # CompleteP (arXiv:2505.01618) without its rule for AdamW's eps. A rate tuned at 6 blocks fits all depths.
    "completep": lambda C, L, l: dict(n_in=True, b=6 / L, c_proj=12 ** -0.5),
}

# --- NAG
class NAG(Residual):
    """Norm-AGnostic residual (Figliolia and Millidge 2026, arXiv:2606.16112, eqs. 3-24). The stream is a
    pair: a direction (B, T, C) of rms 1, and the log (B, T, 1) of the rms that it stands for. A write
    turns the direction by the angle atan(gain) towards the part of the update that is orthogonal to it. The
    gain is a function of the direction alone, so it is known *before* the sublayer runs. A token that would
    hardly turn may skip the sublayer: this is Mixture-of-Depths without a router."""
    own_lr = "alpha", "beta", "w", "b", "p", "g"
    knows_gain = True
    def __init__(self, config, l, directions=32, power=0.5, temp=LOGIT_STD, head="cos", warmup=0.0):
        """directions: preferred ones per sublayer; power: the first step size of sublayer l is l ** -power;
        temp: std of the first logits; head: cos (logits are rms x cosine) or linear; warmup: share of the
        training in which step sizes rise from 0"""
        super().__init__(config, l)
        check_option("head", head, head in ("cos", "linear"), "cos or linear")
        check_option("directions", directions, directions >= 1, "1 or more")
        check_option("power", power, -8 <= power <= 8, "from -8 to 8")
        check_option("temp", temp, temp > 0, "above 0")
        check_option("warmup", warmup, 0 <= warmup <= 0.9, "from 0 to 0.9")
        C, self.head, self.warmup = config.n_embd, head, warmup
        if self.is_end:
            self.g = nn.Parameter(torch.tensor(self.first_g(power, temp)))
            return
        rng = generator(config, f"w {l}")
        self.alpha = nn.Parameter(torch.tensor(l ** -power))   # step size, of any sign, eqs. 23, 24
        self.beta = nn.Parameter(torch.tensor(math.log(math.e - 1)))   # softplus of this is 1
        self.w = nn.Parameter(torch.randn(directions, C, generator=rng) * C ** -0.5)   # preferred directions
        self.b = nn.Parameter(torch.zeros(directions))
        self.p = nn.Parameter(torch.zeros(directions))         # logits of the directions' weights
        self.register_buffer("warm", torch.tensor(1.0), persistent=False)   # 0 to 1 during the warm-up

    def first_g(self, power, temp):
        """g is the log of what the embedding is multiplied by (eq. 18). With it the first logits have the
        std temp. With g = 0 they would be nearly equal."""
        embedding_std, head_std = first_stds(self.config)
        root = self.config.n_embd ** 0.5
        logit_std_at_rms_one = 1 / root if self.head == "cos" else head_std * root   # 1 / root: a cosine's
        # A write adds log1p(gain^2) / 2 to the log of the rms. gain, below, is alpha m; m is about 1/2 first.
        numbers = [l for i in block_order(self.config) for l in (2 * i + 1, 2 * i + 2)]
        growth = sum(0.5 * math.log1p((0.5 * l ** -power) ** 2) for l in numbers)
        return math.log(temp / logit_std_at_rms_one / embedding_std) - growth

    def before_step(self, progress):
        if not self.is_end and self.warmup > 0:
            self.warm.fill_(min(1.0, progress / self.warmup))

    def start(self, x):   # (B, T, C) -> (B, T, C), (B, T, 1)
        x = centred(x)    # A mean would stay for ever, as updates are centred.
        rms = x.square().mean(-1, keepdim=True).clamp_min(EPS ** 2).sqrt()
        return x / rms, rms.log() + self.g

    def gain(self, stream):
        """-> alpha m (..., 1). m in (0, 1] says how near the direction is to preferred ones (eq. 13)."""
        near = F.linear(stream[0], self.w, self.b).sigmoid() @ self.p.softmax(0)   # (...,) in (0, 1)
        m = near[..., None].clamp_min(EPS) ** F.softplus(self.beta)   # At 0 the slope could be infinite.
        return self.alpha * self.warm * m

    def read(self, stream):
        return stream[0]

    def forward(self, stream, f, gain=None):
        direction, log_rms = stream
        gain = self.gain(stream) if gain is None else gain
        u = f(direction)
        if use_triton(u, self.config.kernels):   # On a GPU, one kernel does what follows.
            return nag_write(direction, log_rms, u, gain, self.config.kernels)
        u = centred(u)
        u = u - direction * (u * direction).mean(-1, keepdim=True)         # eqs. 10, 11: orthogonal now
        size = gain * (u.square().mean(-1, keepdim=True) + TINY).rsqrt()   # eq. 12: u * rsqrt has rms 1
        direction = torch.addcmul(direction, u, size)                      # eq. 14: direction + size * u
        direction = direction * (1 + gain.square()).rsqrt()                # eq. 16: of rms 1 again
        return direction, log_rms + 0.5 * torch.log1p(gain.square())       # eqs. 15, 17

    def finish(self, stream):
        direction, log_rms = stream
        return direction * (log_rms.exp() / (self.config.n_embd if self.head == "cos" else 1))

    def head_weight(self, weight):
        # Rows get rms 1, so that <direction, row> / C, see finish, is a cosine.
        return unit(centred(weight), eps=EPS ** 2) if self.head == "cos" else weight

    def init_sublayer(self, sublayer):
        """Nothing: the write would undo a factor of c_proj."""

    def as_tensor(self, stream):
        return stream[0] * stream[1].exp()

# --- reads across depth
class AttnRes(Residual):
    """Attention Residuals (Kimi Team 2026, arXiv:2603.15031, eqs. 2-4). Nothing is added up. The n sources
    v_i are the embedding and all updates so far. Each sublayer l, and the head, reads a weighted mean of
    them, by a query q_l that is a parameter:

        read l = norm(n sum_i p_i v_i),    p = softmax_i(q_l . (key_weight_l unit(v_i)))

    Queries start at zero. Then all p_i are 1 / n, and the read is exactly that of PreNorm.

    With block > 1 (Block AttnRes, section 3.2), a source is the sum of `block` updates in a row, those of a
    depth block. After three blocks of the Transformer, so six updates, Full AttnRes has seven
    sources, and block=2 has four.

    A new source meets the queries of all reads at once, as one large product is faster. The stream is a pair:
    all queries (2L, C), and a dict from the depth block (0: the embedding) to (source, its scores)."""
    can_skip = False
    stream_grows = True
    not_matrices = "query", "key_weight"
    def __init__(self, config, l, block=1):
        """block: sublayers in a depth block; 1 is Full AttnRes"""
        super().__init__(config, l)
        check_option("block", block, block >= 1, "1 or more")
        self.l, self.depth_block, self.norm = l, (l - 1) // block + 1, make_norm(config)
        if self.is_end:   # Row l - 2 belongs to read l. Read 1 has one source, so any row will do.
            self.query = nn.Parameter(torch.zeros(2 * config.n_layer, config.n_embd))
            self.key_weight = nn.Parameter(torch.ones(2 * config.n_layer, config.n_embd))

    def read(self, stream):
        values = [v for v, _ in stream[1].values()]
        weights = len(values) * self.weigh(stream)[..., None]
        return self.norm(depth_sum(weights, values, self.config.kernels))   # sum of weights[i] * values[i]

    finish = read

    def weigh(self, stream):
        """-> the weights p of all n sources for this read, (n, B, T)"""
        return torch.stack([scores[self.l - 2] for _, scores in stream[1].values()]).softmax(0)

    def forward(self, stream, f):
        queries, sources = stream
        v = f(self.read(stream))
        if self.depth_block in sources:   # It has begun: its sum grows.
            v = sources[self.depth_block][0] + v
        return queries, sources | {self.depth_block: (v, self.scores(v, queries))}

    def start(self, x):
        queries = self.query * self.key_weight
        return queries, {0: (x, self.scores(x, queries))}

    def scores(self, v, queries):
        return (unit(v) @ queries.mT).unbind(-1)

    def as_tensor(self, stream):
        return sum(v for v, _ in stream[1].values())   # what the stream of PreNorm would be

    def flops(self):
        return 4 * self.config.n_layer * self.config.n_embd   # Each new or grown source meets 2L queries.

class DenseFormer(Residual):
    """PreNorm, and after each block a sum of the embedding and of all blocks' outputs so far, weighted by
    parameters (Pagliardini et al. 2024, arXiv:2402.02622). The stream is x and a dict of those outputs."""
    can_skip = False
    stream_grows = True
    def __init__(self, config, l):
        super().__init__(config, l)
        self.norm = make_norm(config)
        self.block = l // 2 if l % 2 == 0 else None   # the block that ends here
        if self.block:   # Its own output has the weight 1 at first, all others 0.
            self.share = nn.Parameter(torch.eye(self.block + 1)[-1])

    def start(self, x):
        return x, {0: x}

    def forward(self, stream, f):
        x, outputs = stream
        x = x + f(self.norm(x))
        if self.block:
            outputs = outputs | {self.block: x}   # Removed blocks have none.
            x = depth_sum(self.share[list(outputs)], list(outputs.values()), self.config.kernels)
        return x, outputs

class X0(Residual):
    """PreNorm, and before each block a learned share of the embedding is added, as in modded-nanoGPT. The
    stream is x and the embedding."""
    def __init__(self, config, l):
        super().__init__(config, l)
        self.norm, self.share = make_norm(config), None
        if l % 2 == 1 and not self.is_end:
            self.share = nn.Parameter(torch.tensor([1.0, 0.0]))

    def start(self, x):
        return x, x.clone()   # A tensor that comes twice would cost torch.compile one more graph.

    def forward(self, stream, f):
        x, embedding = stream
        if self.share is not None:
            x = self.share[0] * x + self.share[1] * embedding
        return x + f(self.norm(x)), embedding

# --- gates
class Gated(Residual):
    """PreNorm whose update u passes a gate with a number per channel, which sees the stream h, u, or both:

        h <- h + r u,    r = sigmoid(W_h unit(h) + W_u unit(u) + b)

    This is `review` (Kramer 2026, arXiv:2606.31859). `highway`, a baseline of that paper, sees h only.
    `convex` is (1 - r) h + r u, which fails with depth unless b starts well below 0; convex:inputs=h,bias=-3
    is the Highway layer of 2015. W starts at zero, and the gate at 1/2."""
    def __init__(self, config, l, inputs="hu", convex=False, bias=0.0):
        """inputs: what the gate sees, hu, h or u; convex: (1 - r) h in place of h; bias: first value of b"""
        super().__init__(config, l)
        check_option("inputs", inputs, inputs in ("hu", "h", "u"), "hu, h or u")
        C, self.convex, self.norm = config.n_embd, convex, make_norm(config)
        if not self.is_end:
            self.W = nn.ParameterDict({name: nn.Parameter(torch.zeros(C, C)) for name in inputs})
            self.b = nn.Parameter(torch.full((C,), bias))

    def forward(self, h, f):
        u = f(self.norm(h))
        seen = {"h": h, "u": u}
        products = [F.linear(unit(seen[name], eps=1e-5), W) for name, W in self.W.items()]
        r = (sum(products) + self.b).sigmoid()
        return (1 - r) * h + r * u if self.convex else h + r * u

# --- several streams
class Hyper(Residual):
    """Hyper-connections: n parallel streams, x (B, T, n, C). A sublayer reads their mixture by weights pre
    (n), its update goes to each of them by weights post (n), and a matrix res (n, n) mixes them:

        x <- res x + post f(norm(pre x))

    All three depend on the token. res is doubly stochastic, so that mixing keeps the streams' sum: for
    kind=lite a mixture of the n! permutations (arXiv:2601.05732), for kind=mhc by 20 Sinkhorn steps
    (arXiv:2512.24880). At first all streams are the one of PreNorm."""
    can_skip = False   # A token that skips would miss the mixing by res.
    def __init__(self, config, l, kind="lite", n=4):
        """kind: lite or mhc; n: number of streams, at most 5 for lite"""
        super().__init__(config, l)
        check_option("kind", kind, kind in ("lite", "mhc"), "lite or mhc")
        most = 5 if kind == "lite" else 64
        check_option("n", n, 1 <= n <= most, f"from 1 to {most}")
        self.kind, self.n, self.norm = kind, n, make_norm(config)
        if self.is_end:
            return
        own = torch.eye(n)[(l - 1) % n]   # At first, a sublayer reads one stream.
        if kind == "lite":                # A weight per permutation. The first one changes nothing.
            matrices = [torch.eye(n)[list(order)].flatten() for order in itertools.permutations(range(n))]
            self.register_buffer("permutations", torch.stack(matrices), persistent=False)   # (n!, n n)
            res = torch.full((len(matrices),), -8.0)
            res[0] = 0.0
        else:
            res = 8 * torch.eye(n).flatten() - 8
        # Logits of pre, post and res: static ones, and what depends on the token. 8 own - 4 means
        # sigmoid(4) = 0.98 of the own stream and 0.02 of the others.
        self.sizes = n, n, len(res)
        self.static = nn.Parameter(torch.cat((8 * own - 4, torch.zeros(n), res)))
        self.dynamic = nn.Parameter(torch.zeros(sum(self.sizes), n * config.n_embd))
        self.scale = nn.Parameter(torch.full((3,), 0.01))   # of the dynamic parts of pre, post and res

    def start(self, x):
        return x[..., None, :].repeat_interleave(self.n, dim=-2)

    def forward(self, x, f):
        pre, post, res = self.weights(x)
        u = f(self.norm((pre[..., None, :] @ x).squeeze(-2)))
        return res @ x + post[..., None] * u[..., None, :]

    def weights(self, x):
        static = self.static.split(self.sizes)
        dynamic = F.linear(unit(x.flatten(-2)), self.dynamic).split(self.sizes, dim=-1)
        pre, post, res = (static[i] + self.scale[i] * dynamic[i] for i in range(3))
        if self.kind == "lite":
            res = (res.softmax(-1) @ self.permutations).unflatten(-1, (self.n, self.n))
        else:
            res = sinkhorn(res.unflatten(-1, (self.n, self.n)))
        return pre.sigmoid(), 2 * post.sigmoid(), res

    def as_tensor(self, x):
        return x.mean(-2)

    def flops(self):
        if self.is_end:
            return 0
        n, C = self.n, self.config.n_embd
        make_res = 2 * self.permutations.numel() if self.kind == "lite" else 0
        return 2 * self.dynamic.numel() + make_res + 2 * n * C * (1 + n)

def sinkhorn(logits, steps=20):
    """(..., n, n) -> positive matrices whose rows and (up to the last step) columns sum to 1."""
    for _ in range(steps):   # In logarithms nothing overflows.
        logits = logits - logits.logsumexp(-2, keepdim=True)
        logits = logits - logits.logsumexp(-1, keepdim=True)
    return logits.exp()

class Siamese(Residual):
    """SiameseNorm (arXiv:2602.08064, in the form of the released code). Two streams: y grows as in PreNorm, x
    is kept small by a norm as in PostNorm. Sublayers read their sum. Block i adds 1 / sqrt(2 i) of f to x."""
    can_skip = False   # A token that skips would miss the norm of x.
    def __init__(self, config, l):
        super().__init__(config, l)
        self.n_x, self.n_y, self.n_in = make_norm(config), make_norm(config), make_norm(config)
        self.register_buffer("share", torch.tensor((l + l % 2) ** -0.5), persistent=False)

    def start(self, x):
        return x, x.clone()

    def forward(self, stream, f):
        y, x = stream
        x = self.n_x(x)
        u = f(self.n_in(x + self.n_y(y)))
        return y + u, x + self.share * u

    def finish(self, stream):
        y, x = stream
        return self.n_in(self.n_x(x) + self.n_y(y))

# --- nGPT
class NGPT(Residual):
    """nGPT (Loshchilov et al. 2024, arXiv:2410.01131). The stream stays on a sphere and moves towards the
    normalised update by a learned step per channel, h <- unit(h + |alpha| (unit(f(h)) - h)). Weights are
    normalised along the stream's axis after each optimizer step. unit gives norm sqrt(C) where the paper has
    1, so its factors sqrt(C) in the MLP and sqrt(hs) in attention are not needed."""
    def __init__(self, config, l):
        super().__init__(config, l)
        # Parameters start at 1 / sqrt(C), the size of the weights, so that one learning rate fits all.
        self.root = config.n_embd ** 0.5
        if self.is_end:
            self.logit_scale = nn.Parameter(torch.full((config.vocab_size,), 1 / self.root))
        else:
            self.alpha = nn.Parameter(torch.full((config.n_embd,), 1 / self.root))

    def start(self, x):
        return unit(x)

    def forward(self, h, f):
        step = self.alpha.abs() * (0.05 * self.root)
        return unit(torch.addcmul(h, step, unit(f(h)) - h))

    def finish(self, h):
        return h

    def head_weight(self, weight):
        # The paper's first logits are cosines. With --init width they have the std LOGIT_STD.
        first = LOGIT_STD * self.root if self.config.init == "width" else 1.0
        return weight * (first * self.logit_scale)[:, None]

    def init_sublayer(self, sublayer):
        """Rows of weights can't learn a length, so queries, keys and hidden units get learned scales."""
        sublayer.make_scale()

    @torch.no_grad()
    def constrain(self, module):
        for name, p in module.named_parameters():
            if p.dim() == 2:
                p.div_(p.norm(dim=0 if "c_proj" in name else 1, keepdim=True))

# What --residual can be: a class, and the arguments that the name stands for.
RESIDUALS = {name: (Additive, dict(row=row)) for name, row in ADDITIVE.items()} | {
    "nag": (NAG, {}), "attnres": (AttnRes, {}), "denseformer": (DenseFormer, {}), "x0": (X0, {}),
    "review": (Gated, {}), "convex": (Gated, dict(convex=True)), "highway": (Gated, dict(inputs="h")),
    "hyper": (Hyper, {}), "siamese": (Siamese, {}), "ngpt": (NGPT, {}), "template": (Template, {})}

# --- kept tokens
class Rows:
    """Where the kept tokens of a batch lie, in their order:

        keep [[1, 0, 1, 1],    N is 4, index 0 2 3 5 (among all B T tokens),
              [0, 1, 0, 0]]    place 0 2 3 1 (in their sequences), count 3 1 (per sequence)"""
    def __init__(self, keep):
        self.keep = keep   # (B, T) bool
        self.index = keep.flatten().nonzero().squeeze(1)   # (N,)
        self.place = self.index % keep.shape[1]   # (N,)
        self.count = keep.sum(1).tolist()   # B numbers

    def take(self, stream):
        """Tensors (B, T, ...) -> (N, ...)"""
        if isinstance(stream, tuple):
            return tuple(self.take(x) for x in stream)
        return stream.flatten(0, 1).index_select(0, self.index)

    def put(self, stream, kept):
        """Tensors (B, T, ...) -> the same with the kept tokens (N, ...) replaced"""
        if isinstance(stream, tuple):
            return tuple(self.put(x, new) for x, new in zip(stream, kept))
        return stream.flatten(0, 1).index_copy(0, self.index, kept).view_as(stream)

    def spread(self, kept):
        """(N, ...) -> (B, T, ...), zero where no token is kept"""
        return self.put(kept.new_zeros(*self.keep.shape, *kept.shape[1:]), kept)

def run_all(stream, residual, f, gain=None):
    """A sublayer that all tokens run. compile_blocks and checkpoint_blocks wrap this function."""
    return residual(stream, f) if gain is None else residual(stream, f, gain)

def run_kept(stream, residual, f, keep, gain, run):
    """A sublayer that the tokens keep (B, T) run. One that skips costs its gain, and in an attention also its
    key and value, which later tokens see (unless a router or LayerDrop decides). f.make_keys makes those of
    all tokens; f.kept, (N, C) -> (N, C), attends to them. f: a Bound. run: run_all, or that wrapped."""
    rows = Rows(keep)
    if len(rows.index) == keep.numel():
        return run(stream, residual, f, gain)
    keys = f.make_keys(residual.read(stream)) if f.skippers_make_keys else None
    if len(rows.index) == 0:
        return stream
    if f.mixes_tokens:   # Its shapes vary too much to be compiled.
        f, run = functools.partial(f.kept, rows=rows, keys=keys), run_all
    gain = None if gain is None else rows.take(gain)
    return rows.put(stream, run(rows.take(stream), residual, f, gain))

# --- sublayers
def rotate(x, rotation):
    """RoPE: channels 2i and 2i + 1 of x (..., nh, hs) are a point in the plane. It turns by the angle whose
    cosine and sine rotation (..., 1, hs / 2, 2) holds."""
    pairs = torch.view_as_complex(x.to(rotation.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.view_as_complex(rotation)).flatten(-2).to(x.dtype)

def attend(q, k, v, mask=None):
    """K queries q (B, K, nh, hs), k, v (B, S, nh, hs), mask (1 or B, K, S) -> as q. No mask: causal."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, mask[:, None]).transpose(1, 2)

def attend_kept(q, k, v, mask, rows):
    """The same for kept queries (N, nh, hs) and the mask of all tokens (1 or B, T, S) -> (N, nh, hs)"""
    B = len(rows.count)
    mask = mask.expand(B, -1, -1)
    if q.device.type == "cpu":   # Sequences keep different numbers of tokens: one call each.
        each = zip(range(B), q.split(rows.count), rows.place.split(rows.count))
        return torch.cat([attend(queries[None], k[b:b + 1], v[b:b + 1], mask[b:b + 1, place])[0]
                          for b, queries, place in each if len(place)])
    # B calls would keep a GPU waiting. One call pads: a query is at (sequence, column) of a rectangle.
    column = torch.cat([torch.arange(n, device=q.device) for n in rows.count])
    sequence = rows.index // rows.keep.shape[1]
    longest = max(rows.count)
    queries = q.new_zeros(B, longest, *q.shape[1:]).index_put((sequence, column), q)
    seen = mask.new_ones(B, longest, k.shape[1]).index_put((sequence, column), mask[sequence, rows.place])
    return attend(queries, k, v, seen)[sequence, column]

def with_mask(k, v, remember=None, exists=None):
    """k, v (B, T, nh, hs), and which exist (B, T; None: all) -> k, v (B, S, nh, hs), with older ones first
    if there is `remember`, this layer's KVCache.append; and the mask (1 or B, T, S) of who sees which."""
    T = k.shape[1]
    if remember:
        k, v, exists = remember(k, v, exists)   # exists (B, S) now
    S = k.shape[1]
    mask = torch.ones(T, S, dtype=torch.bool, device=k.device).tril(S - T)[None]
    return k, v, mask if exists is None else mask & exists[:, None]

class Attention(nn.Module):
    """Causal multi-head attention with RoPE and normalised queries and keys. rotation is that of the T
    positions. remember: see with_mask."""
    mixes_tokens = True
    def __init__(self, config, n_head):
        super().__init__()
        self.n_head, self.head_size = n_head, config.n_embd // config.n_head
        self.width = n_head * self.head_size
        self.c_attn = nn.Linear(config.n_embd, 3 * self.width, bias=False)
        self.c_proj = nn.Linear(self.width, config.n_embd, bias=False)
        self.q_scale = self.k_scale = None   # numbers per channel, if the residual wants them

    def heads(self, x, weight):
        """x (..., C) -> as many (..., nh, hs) as the weight has parts: queries, keys and values"""
        return F.linear(x, weight).unflatten(-1, (-1, self.n_head, self.head_size)).unbind(-3)

    def turned(self, x, rotation, scale):
        x = rotate(unit(x), rotation)
        return x if scale is None else x * scale.view(self.n_head, self.head_size)

    def forward(self, x, rotation, remember=None):
        q, k, v = self.heads(x, self.c_attn.weight)
        q = self.turned(q, rotation, self.q_scale)
        k = self.turned(k, rotation, self.k_scale)
        mask = None
        if remember:
            k, v, mask = with_mask(k, v, remember)
        return self.c_proj(attend(q, k, v, mask).flatten(-2))

    def kept(self, x, rotation, remember, rows, keys):
        """x (N, C) -> (N, C). keys: of all tokens, by make_keys; None: kept tokens see only each other's."""
        q, = self.heads(x, self.c_attn.weight[:self.width])
        q = self.turned(q, rotation[rows.place], self.q_scale)
        if keys is None:
            k, v = self.heads(x, self.c_attn.weight[self.width:])
            k = self.turned(k, rotation[rows.place], self.k_scale)
            keys = with_mask(rows.spread(k), rows.spread(v), remember, rows.keep)
        return self.c_proj(attend_kept(q, *keys, rows).flatten(-2))

    def make_keys(self, x, rotation, remember=None):
        k, v = self.heads(x, self.c_attn.weight[self.width:])
        return with_mask(self.turned(k, rotation, self.k_scale), v, remember)

    def value_weight(self):
        return self.c_attn.weight[2 * self.width:]

    def make_scale(self):
        self.q_scale = nn.Parameter(torch.ones(self.width))
        self.k_scale = nn.Parameter(torch.ones(self.width))

class MLP(nn.Module):
    mixes_tokens = False
    def __init__(self, config, hidden):
        super().__init__()
        self.activation = config.activation
        self.c_fc = nn.Linear(config.n_embd, hidden * (2 if config.activation == "swiglu" else 1), bias=False)
        self.c_proj = nn.Linear(hidden, config.n_embd, bias=False)
        self.scale = None   # a number per unit, if the residual wants one

    def forward(self, x, rotation=None, remember=None):
        x = self.c_fc(x)
        if self.scale is not None:
            x = x * self.scale
        if self.activation == "gelu":
            x = F.gelu(x)
        elif self.activation == "relu2":
            x = F.relu(x).square()
        else:
            gate, x = x.chunk(2, dim=-1)
            x = F.silu(gate) * x
        return self.c_proj(x)

    def value_weight(self):
        return self.c_fc.weight

    def make_scale(self):
        self.scale = nn.Parameter(torch.ones(self.c_fc.out_features))

class Bound:
    """A sublayer f as residuals see it, a function of x alone: positions, memory and autocast are bound. Only
    sublayers and the head run in half precision, so what is added up over depth stays exact."""
    def __init__(self, sublayer, rotation, remember, half, skippers_make_keys):
        self.sublayer, self.bound, self.half = sublayer, (rotation, remember), half
        self.mixes_tokens = sublayer.mixes_tokens
        self.skippers_make_keys = skippers_make_keys and sublayer.mixes_tokens

    def __call__(self, x):
        with autocast(x, self.half):
            return self.sublayer(x, *self.bound).to(x.dtype)

    def kept(self, x, rows, keys):
        with autocast(x, self.half):
            return self.sublayer.kept(x, *self.bound, rows, keys).to(x.dtype)

    def make_keys(self, x):
        with autocast(x, self.half):
            return self.sublayer.make_keys(x, *self.bound)

def autocast(x, half):
    return torch.autocast(x.device.type, dtype=half or torch.bfloat16, enabled=half is not None)

# --- router and block
class Router(nn.Linear):
    """The router of Raposo et al. 2024 (arXiv:2404.02258). A linear map gives every token a weight. Those
    with the largest of a sequence run the block, and its change is multiplied by the weight, which teaches
    the router. This looks at later tokens. So outside of training, tokens with a weight above 0 run."""
    def __init__(self, config):
        super().__init__(config.n_embd, 1, bias=False)
        # Only every second block has a router. It skips the share of the block before it, too.
        self.rate = config.mod_rate * config.n_layer / (config.n_layer // 2)
        self.keep, self.loss = None, 0.0   # `route` sets both, and scale_change clears keep.

    def route(self, x):
        weight = self(unit(x)).squeeze(-1)   # (B, T)
        if self.training:
            most = weight.topk(max(1, round((1 - self.rate) * x.shape[1])), dim=1).indices
            keep = torch.zeros_like(weight, dtype=torch.bool).scatter(1, most, True)
        else:
            keep = weight > 0
        self.loss = F.binary_cross_entropy_with_logits(weight, keep.to(weight.dtype))
        self.before, self.weight_of_token, self.keep = x, weight[..., None], keep

    def scale_change(self, after):
        if self.keep is None:   # Nobody has asked this router.
            return after
        self.keep = None
        return self.before + self.weight_of_token * (after - self.before)

class Block(nn.Module):
    def __init__(self, config, i):
        super().__init__()
        n_head, hidden = block_widths(config)[i]
        self.attn = Attention(config, n_head)
        self.attn_residual = make_residual(config, 2 * i + 1)
        self.mlp = MLP(config, hidden)
        self.mlp_residual = make_residual(config, 2 * i + 2)
        self.router = Router(config) if config.mod == "router" and i % 2 == 1 else None

    def pairs(self):
        return (self.attn_residual, self.attn), (self.mlp_residual, self.mlp)

# --- the model
ROUTER_LOSS = 0.01       # weight of the loss that teaches a router what the top-k chose
SKIPPING_STARTS = 0.05   # All tokens run until this share of a training, plus any warm-up, is over. Then
FIRST_TAU = 0.02         # those with |gain| <= tau skip. tau starts here, too low for any to skip.
LEAST_SKIPPED = 0.25     # An attention that a smaller share would skip is run by all.

class GPT(nn.Module):
    """Decoder-only Transformer. Raises ValueError with one sentence per problem of the config."""
    def __init__(self, config: GPTConfig):
        super().__init__()
        bad = problems(config)
        if bad:
            raise ValueError("\n".join(bad))
        self.config = c = config
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.blocks = nn.ModuleList([Block(c, i) for i in range(c.n_layer)])
        self.order = block_order(c)   # The blocks as they run, from 0.
        self.ends = make_residual(c, 2 * c.n_layer + 1)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.embed_scale = 1.0
        if c.tie:   # One matrix can't be a large embedding and a small head: it is drawn as the head's.
            self.wte.weight = self.lm_head.weight
            self.embed_scale = first_stds(c)[0] / first_stds(c)[1]
        # RoPE turns pair i by the angle position * 10000^(-2i / hs).
        hs = c.n_embd // c.n_head
        angle = torch.outer(torch.arange(c.block_size), 1e4 ** -(torch.arange(0, hs, 2) / hs))
        rotation = torch.stack((angle.cos(), angle.sin()), dim=-1)[:, None]   # (block_size, 1, hs / 2, 2)
        self.register_buffer("rotation", rotation, persistent=False)
        # The thresholds, see move_thresholds. Below 0: all run.
        has_tau = c.mod == "geometric" and c.mod_rate > 0
        self.register_buffer("tau", torch.full((2 * len(self.order),), -1.0) if has_tau else None)
        self.register_buffer("tau_steps", torch.tensor(0) if has_tau else None)
        self.run = run_all   # compile_blocks and checkpoint_blocks replace it.
        self.half = None     # train.py sets torch.bfloat16 on a GPU.
        self.init_weights()

    def walk(self, idx, cache=None, decide=None):
        """The one loop over the depth. Yields (l, stream before, stream after, keep) of the sublayers l = 1,
        2, ... as they run. (With --repeat some run several times, so l may be larger than the residual's.)
        decide(l, residual, stream) -> (keep, gain) says who runs sublayer l; gain is None if not known."""
        decide = decide or self.decide
        run = self.run if cache is None else run_all   # a step of decoding is too small to compile
        stream = self.ends.start(self.wte(idx) * self.embed_scale)
        for l, residual, f in self.sublayers(idx, cache):
            before = stream
            keep, gain = decide(l, residual, stream)
            if keep is None:          # All tokens run it.
                stream = run(stream, residual, f)
            elif keep is not False:   # These tokens (B, T) run it. False: it is removed.
                stream = run_kept(stream, residual, f, keep, gain, run)
            if l % 2 == 0 and self.router(l):
                stream = self.router(l).scale_change(stream)
            yield l, before, stream, keep

    def forward(self, idx, targets=None, cache=None, decide=None, kept=None):
        """idx, targets (B, T) of token ids -> logits (B, T, V), mean cross entropy in nats (None if no
        targets). kept: a list that gets walk's `keep` of each sublayer. cache: a KVCache."""
        losses, supervised = [], self.training and self.config.deep_supervision and targets is not None
        for l, _, stream, keep in self.walk(idx, cache, decide):
            if kept is not None:
                kept.append(keep)
            if supervised and l % 2 == 0 and l < 2 * len(self.order):
                losses.append(cross_entropy(self.head(stream), targets))
        logits = self.head(stream)
        if targets is None:
            return logits, None
        loss = (cross_entropy(logits, targets) + sum(losses)) / (1 + len(losses))
        if self.training and self.config.mod == "router":
            of_routers = [block.router.loss for block in self.blocks if block.router]
            loss = loss + ROUTER_LOSS * sum(of_routers) / len(of_routers)
        return logits, loss

    def head(self, stream):
        x, weight = self.ends.finish(stream), self.ends.head_weight(self.lm_head.weight)
        with autocast(x, self.half):
            return F.linear(x, weight).to(x.dtype)

    def sublayers(self, idx, cache=None):
        start = 0 if cache is None else cache.length
        end = start + idx.shape[1]
        if end > self.config.block_size:
            raise ValueError(f"{end} tokens do not fit block_size {self.config.block_size}")
        if cache is not None:   # It grows now, because walk's consumer may stop early.
            cache.span, cache.length = slice(start, end), end
        for i, number in enumerate(self.order):
            block = self.blocks[number]
            remember = None if cache is None else functools.partial(cache.append, i)
            for l, (residual, sublayer) in enumerate(block.pairs(), start=2 * i + 1):
                yield l, residual, Bound(sublayer, self.rotation[start:end], remember, self.half,
                                         self.skippers_make_keys(block))

    def skippers_make_keys(self, block):
        """Not if a router decides, as in its paper, nor if LayerDrop does, as whole sequences skip."""
        return block.router is None and not (self.training and self.config.layer_drop)

    def router(self, l):
        return self.blocks[self.order[(l - 1) // 2]].router

    def residuals(self):
        return [residual for block in self.blocks for residual, _ in block.pairs()] + [self.ends]

    @property
    def device(self):
        return self.rotation.device

    @property
    def decide(self):
        if self.config.mod == "router":
            return self.ask_router
        if self.training and self.config.layer_drop:
            return self.drop_layer
        return all_run if self.tau is None else by_threshold(self.tau)

    def ask_router(self, l, residual, stream):
        router = self.router(l)
        if router and (l % 2 == 1 or router.keep is None):   # Even l asks only if the attention is removed.
            router.route(stream)
        return (router.keep if router else None), None

    def drop_layer(self, l, residual, stream):
        """A `decide`: LayerDrop (arXiv:1909.11556), a coin per sequence. Updates are not rescaled."""
        x = residual.as_tensor(stream)
        runs = torch.rand(len(x), 1, device=x.device) >= self.config.layer_drop
        return runs.expand(x.shape[:2]), None

    def before_step(self, progress):
        """Before each step and evaluation. progress: (step + 1) / steps"""
        for residual in self.residuals():
            residual.before_step(progress)
        if self.tau is not None and self.tau.max() < 0 and progress > SKIPPING_STARTS + self.ends.warmup:
            self.tau.fill_(FIRST_TAU)

    def after_step(self, ran):   # ran: share of the tokens that ran each sublayer
        self.constrain()
        if self.tau is not None and self.tau.max() > 0:
            self.move_thresholds(ran)

    def move_thresholds(self, ran):
        """All sublayers have one threshold, which rises while too few tokens skip. But an attention that few
        would skip runs whole (-1), as this is faster. Every tenth step all attentions are tried again."""
        rate, skipped = self.config.mod_rate, 1 - sum(ran) / len(ran)
        one_for_all = self.tau.max() * math.exp(0.2 * (rate - skipped) / rate)
        self.tau_steps += 1
        whole = self.tau < 0
        whole[::2] |= 1 - torch.tensor(ran[::2], device=self.device) < LEAST_SKIPPED
        self.tau = torch.where(whole & (self.tau_steps % 10 > 0), -1.0, one_for_all)

    @torch.no_grad()
    def constrain(self):
        for block in self.blocks:
            for residual, sublayer in block.pairs():
                residual.constrain(sublayer)
        self.ends.constrain(self.wte)
        self.ends.constrain(self.lm_head)

    def why_not(self, what):
        """what: skip or exit -> None, or why the model can't. All can remove sublayers."""
        routed = self.config.mod == "router"
        if what == "skip" and (routed or not self.ends.knows_gain):
            return f"--residual {self.config.residual} knows no gain, or a router decides; use a run of nag"
        if what == "exit" and (routed or not self.ends.can_skip):
            return f"--residual {self.config.residual} can't skip, or a router decides; use a run of pre"

    @torch.no_grad()
    def stream_tokens(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None, decide=None,
                      n_vocab=None):
        """In eval mode, continues idx (B, T). Yields new tokens (B, 1), and forward's `kept` of the pass that
        led to each. n_vocab: number of tokens, if the head has more rows. Old tokens need no stream: all that
        a new one sees of them is their keys and values, in the cache."""
        size, cache = self.config.block_size, None
        for _ in range(max_new_tokens):
            fresh = idx[:, -1:]
            if cache is None or cache.length == size:
                fresh = idx[:, -size:] if cache is None else idx[:, -max(1, size // 2):]   # A full one: half.
                cache = KVCache(self, len(idx))
            kept = []
            logits, _ = self(fresh, cache=cache, decide=decide, kept=kept)
            token = pick(logits[:, -1, :n_vocab], temperature, top_k, generator)
            idx = torch.cat((idx, token), dim=1)
            yield token, kept

    def generate(self, idx, max_new_tokens, **options):
        new = [token for token, _ in self.stream_tokens(idx, max_new_tokens, **options)]
        return torch.cat([idx, *new], dim=1)

    def compile_blocks(self, **options):
        """torch.compile of what all tokens run and of MLPs on kept tokens: two graphs for all blocks, more if
        widths differ. If streams grow, sublayers alone are compiled."""
        torch._dynamo.config.recompile_limit = 64   # The default 8 is too low for skipping and tapers.
        if self.ends.stream_grows:
            call = torch.compile(Bound.__call__, **options)
            self.run = lambda stream, residual, f, gain=None: residual(stream, functools.partial(call, f))
        else:
            self.run = torch.compile(run_all, **options)

    def checkpoint_blocks(self):
        """After compile_blocks. The backward pass runs again what all tokens run, and MLPs on kept ones."""
        self.run = functools.partial(checkpoint, self.run, use_reentrant=False, preserve_rng_state=False)

    @torch.no_grad()
    def init_weights(self):
        """Every Linear and Embedding has a generator of its own, seeded by its name: variants with the same
        seed have the same draws. Residuals may rescale."""
        c = self.config
        stds = dict(zip((self.wte, self.lm_head), first_stds(c)))
        for name, module in self.named_modules():
            is_matrix = isinstance(module, (nn.Linear, nn.Embedding))
            if is_matrix and not (c.tie and module is self.wte):
                std = stds.get(module, module.weight.shape[1] ** -0.5 if c.init == "width" else 0.02)
                module.weight.normal_(generator=generator(c, name)).mul_(std)
        for block in self.blocks:
            for residual, sublayer in block.pairs():
                residual.init_sublayer(sublayer)
        self.constrain()

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, T=None, ran=None):
        """FLOPs of matrix products of one token's forward pass at context length T. A training step is three
        times that. Masked scores and all gains count. ran: see ran_shares; default: all run."""
        c, T, ran = self.config, T or self.config.block_size, ran or [1.0] * 2 * len(self.order)
        exits = len(self.order) if self.training and c.deep_supervision else 1
        total = self.ends.flops() + exits * 2 * c.vocab_size * c.n_embd
        for i, number in enumerate(self.order):
            block = self.blocks[number]
            total += 2 * c.n_embd if block.router else 0
            for (residual, sublayer), share in zip(block.pairs(), ran[2 * i:2 * i + 2]):
                if share is False:
                    continue
                total += residual.flops() * (1 if residual.knows_gain else share)
                if sublayer.mixes_tokens:
                    total += 4 * T * sublayer.width * share
                    if self.skippers_make_keys(block):   # Half of an attention's matrices are for that.
                        share = (1 + share) / 2
                total += share * sum(2 * p.numel() for p in sublayer.parameters() if p.dim() == 2)
        return total

def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

def ran_shares(kept):
    """forward's `kept` -> share of the tokens that ran each sublayer; False: it is removed"""
    return [1.0 if keep is None else False if keep is False else keep.float().mean().item() for keep in kept]

# --- what can decide
def all_run(l, residual, stream):
    return None, None

def by_threshold(tau):
    """A `decide`: a token skips sublayer l if |gain| is at most tau[l - 1]. Below 0, all tokens run it."""
    tau = torch.as_tensor(tau).tolist()   # once per pass, not per sublayer: the CPU waits for the GPU here

    def decide(l, residual, stream):
        if tau[l - 1] < 0:
            return None, None
        gain = residual.gain(stream)
        # A hard decision, without gradients: gains learn from the tokens that do run.
        return gain.detach().abs().squeeze(-1) > tau[l - 1], gain
    return decide

def without(numbers, decide=all_run):
    """A `decide`: the sublayers of these numbers are removed. Of the others, `decide` decides."""
    def decide_others(l, residual, stream):
        return (False, None) if l in numbers else decide(l, residual, stream)
    return decide_others

# --- cache and sampling
class KVCache:
    """Keys and values, a layer per attention as they run. GPT.sublayers sets length and span for all."""
    def __init__(self, model, batch_size):
        self.length, self.span = 0, slice(0, 0)
        self.keys, self.values, self.exists = [], [], []
        for number in model.order:
            block = model.blocks[number]
            shape = batch_size, model.config.block_size, block.attn.n_head, block.attn.head_size
            zeros = torch.zeros(shape, dtype=model.half or model.wte.weight.dtype, device=model.device)
            self.keys.append(zeros)
            self.values.append(zeros.clone())
            self.exists.append(torch.zeros(shape[:2], dtype=torch.bool, device=model.device))

    def append(self, layer, k, v, exists=None):
        """k, v (B, T, nh, hs) of the newest tokens, and which exist (B, T; None: all) -> those of all S,
        (B, S, nh, hs) and (B, S)"""
        keys, values, there = self.keys[layer], self.values[layer], self.exists[layer]
        keys[:, self.span], values[:, self.span] = k, v
        there[:, self.span] = True if exists is None else exists
        return keys[:, :self.length], values[:, :self.length], there[:, :self.length]

def pick(logits, temperature=1.0, top_k=None, generator=None):
    """logits (B, V) -> one token id each (B, 1)"""
    if temperature < 1e-6:
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature
    if top_k:
        best = logits.topk(min(top_k, logits.shape[-1]))
        logits = torch.full_like(logits, -math.inf).scatter(1, best.indices, best.values)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)

# --- shapes of the blocks
def block_widths(config):
    """(attention heads, hidden units) of each block. With --taper (CascadeFormer, arXiv:2606.26538; cosine:
    arXiv:2606.23670) they go from taper_start to taper_end, and their sum stays but for rounding."""
    c, hidden = config, config.mlp_ratio * config.n_embd
    # swiglu has three matrices where gelu has two, so two thirds of the units.
    hidden = max(1, round(hidden * 2 / 3) if c.activation == "swiglu" else int(hidden))
    if c.taper == "none":
        return [(c.n_head, hidden)] * c.n_layer
    depth = [i / max(1, c.n_layer - 1) for i in range(c.n_layer)]
    if c.taper == "cosine":
        depth = [(1 - math.cos(math.pi * u)) / 2 for u in depth]
    wide = [c.taper_start + (c.taper_end - c.taper_start) * u for u in depth]
    wide = [w * c.n_layer / sum(wide) for w in wide]
    heads = [max(1, round(w * c.n_head)) if c.taper_on == "both" else c.n_head for w in wide]
    units = [8 * max(1, round(w * hidden / 8)) for w in wide]   # multiples of 8 are fast
    return list(zip(heads, units))

def block_order(config):
    """The blocks, from 0, in the order in which they run."""
    blocks = list(range(config.n_layer))
    if not config.repeat:
        return blocks
    found = re.fullmatch("([0-9]{1,6})(?:-([0-9]{1,6}))?:([0-9]{1,3})", config.repeat)
    first, last, count = (int(number or found[1]) for number in found.groups()) if found else (0, 0, 0)
    if not 1 <= first <= last <= config.n_layer or not 0 < count * (last + 1 - first) <= 4096:
        raise ValueError(f"--repeat {config.repeat}: say blocks and how often, such as 9-12:3")
    return blocks[:first - 1] + blocks[first - 1:last] * count + blocks[last:]

# --- options of residuals
def make_residual(config, l):
    kind, options = read_residual(config.residual)
    return kind(config, l, **options)

def options_of(name):
    kind, given = RESIDUALS[name]
    parameters = inspect.signature(given.get("row", kind)).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return defaults | {key: value for key, value in given.items() if key != "row"}

def read_residual(text):
    """hyper:kind=mhc,n=2 -> Hyper, dict(kind="mhc", n=2)"""
    name, _, options = text.partition(":")
    if name not in RESIDUALS:
        raise ValueError(f"--residual {name}: unknown; choose from {', '.join(RESIDUALS)}")
    kind, arguments = RESIDUALS[name]
    known = options_of(name)
    for key, _, value in (option.partition("=") for option in filter(None, options.split(","))):
        if key not in known:
            right = ", ".join(f"{key}={default}" for key, default in known.items()) or "none"
            raise ValueError(f"--residual {text}: {name} has no option {key!r}; its options are {right}")
        try:
            arguments = arguments | {key: convert(value, type(known[key]))}
        except ValueError:
            raise ValueError(f"--residual {text}: {key} must be a {type(known[key]).__name__}, such as "
                             f"{known[key]}") from None
    return kind, arguments

def convert(text, kind):
    if kind is bool:
        return ("0", "false", "1", "true").index(text.lower()) >= 2
    if kind in (int, float) and not abs(kind(text)) <= 1e4:   # or nan
        raise ValueError
    return kind(text)

# --- checks
def problems(config):
    c, bad = config, field_problems(config)
    try:
        order = block_order(c)
        kind, _ = read_residual(c.residual)
        if bad:
            return bad
        with torch.device("meta"):   # takes no memory
            stream = make_residual(c, 2 * c.n_layer + 1).start(torch.empty(1, 1, c.n_embd))
    except ValueError as error:
        return bad + [str(error)]
    one_tensor = isinstance(stream, torch.Tensor) and stream.dim() == 3
    rules = [   # (is it wrong, why, what to do)
        (c.n_embd % (2 * c.n_head), f"--n_embd {c.n_embd}: must be an even multiple of --n_head {c.n_head}"),
        (c.kernels == "on" and why_no_triton(), f"--kernels on: {why_no_triton()}"),
        (c.mod_rate and c.layer_drop, "--mod_rate and --layer_drop: both decide who skips; drop one"),
        (c.layer_drop and not kind.can_skip,
         f"--layer_drop: tokens can't skip with --residual {c.residual}; use pre or nag"),
        (c.mod == "router" and not one_tensor,
         f"--mod router: the stream of --residual {c.residual} isn't one tensor; use pre"),
        (c.mod == "router" and not 0 < c.mod_rate * c.n_layer <= 0.9001 * (c.n_layer // 2),
         f"--mod_rate {c.mod_rate}: every second block has a router; use more than 0, at most "
         f"{0.9 * (c.n_layer // 2) / c.n_layer:.2f}, and two blocks or more"),
        (c.mod == "geometric" and c.mod_rate and not kind.knows_gain,
         f"--mod_rate: --residual {c.residual} knows no gain; use nag, or --mod router"),
        (len(order) > c.n_layer and kind.stream_grows,
         f"--repeat: the stream of --residual {c.residual} has places for 2L updates; use pre"),
    ]
    return [sentence for wrong, sentence in rules if wrong]

source = functools.cache(inspect.getsource)   # It is slow.
def field_problems(config):
    """A sentence per field that is none of its choices, or out of range."""
    bad = []
    ranges = dict(re.findall(r"^    (\w+):.*?  # \[(\S+, \S+)\]", source(type(config)), re.M))
    for field in fields(config):
        value, choices = getattr(config, field.name), get_args(field.type)
        if choices and value not in choices:
            bad.append(f"--{field.name} {value}: unknown; choose from {', '.join(map(str, choices))}")
        if field.name in ranges:
            low, high = ranges[field.name].split(", ")
            if not float(low) <= value <= float(high):   # or nan
                bad.append(f"--{field.name} {value}: must be from {low} to {high}")
    return bad
