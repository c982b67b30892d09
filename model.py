"""
A GPT in which the residual connection is a part that you can swap.

A Transformer is a chain of sublayers: attention, MLP, attention, MLP, and so on. Each reads one
vector per token, and adds something to it. This running sum is the stream. The rule by which a
sublayer reads the stream and changes it is the residual. Here each rule is one small class, and all
else is shared, so that you can read the rules side by side, and compare them fairly.

The whole model is this loop:

    stream = ends.start(embedding)
    for residual, f in sublayers:
        stream = residual(stream, f)     # PreNorm, the usual rule: stream + f(norm(stream))
    logits = head(ends.finish(stream))

(Don't write it with torch's while_loop or scan: in torch 2.13, these lose gradients in silence.)
Our words, for B sequences of T tokens, of which each has C = n_embd numbers in the stream:

    stream     what flows through the depth: a tensor (B, T, C) in PreNorm, and, in some other
               rules, several tensors in a tuple
    sublayer   an attention or an MLP; a residual sees it as a function f: (..., C) -> (..., C)
    update     what f returns
    block      an attention and the MLP after it. A model has L = n_layer blocks, 2L sublayers.
               (block_size is unrelated: as in nanoGPT, it is the longest context.)
    l          the number of a residual, 1 .. 2L. Odd ones go with an attention, even with an MLP.
    ends       one more residual, l = 2L + 1. It has no sublayer: it starts and finishes the stream.
    trip       the record of a pass in which tokens may skip (part 3); a plain pass has none

Part 1 is a whole GPT, whose rule is PreNorm: read it from top to bottom. Part 2 has the other
residuals (--residual). In part 3 tokens skip sublayers (--mod), and part 4 has some tools. If you
know nanoGPT, these are new: RoPE in place of wpe, RMSNorm, normalised queries and keys, a head that
is not tied to the embedding, other first weights, no biases, no dropout, and a cache in sampling.
"""
import itertools
import math
import re
import zlib
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from flags import Mistake, field_problems, flag, option_defaults, read_options
from kernels import TINY, depth_sum, fast_nag_write, rms_norm, why_no_triton

# =================================================================================== part 1: a GPT

@dataclass
class GPTConfig:
    """The settings of a model. flag(default, help, lowest, highest) is a field, and a flag of
    train.py, too."""
    residual: str = flag("pre", "the rule, such as nag; options follow it: hyper:n=2")
    n_layer: int = flag(12, "blocks; a block is two sublayers, attention and MLP", 1, 4096)
    n_head: int = flag(4, "attention heads", 1, 1024)
    n_embd: int = flag(128, "width of the stream", 2, 65536)
    block_size: int = flag(128, "longest context, in tokens", 1, 2 ** 20)
    vocab_size: int = flag(320, "tokens; train.py takes it from the data, rounded up", 1, 2 ** 24)
    activation: Literal["gelu", "relu2", "swiglu"] = flag("gelu", "of the MLP")
    mlp_ratio: float = flag(4.0, "width of the MLP's hidden layer / n_embd", 0.01, 1024)
    norm: Literal["rms", "layer", "single", "dyt", "none"] = flag(
        "rms", "of the stream; single: with one weight, dyt: a tanh in its place")
    init: Literal["width", "gpt2", "embedding"] = flag(
        "width", "std of first weights; width: by fan-in; gpt2: 0.02; embedding: 0.02, but wte 3")
    seed: int = flag(1337, "of the first weights and of the data order", 0, 2 ** 31 - 1)
    # Variants, which are off with these values
    kernels: Literal["auto", "on", "off"] = flag("auto", "Triton kernels; auto: on CUDA")
    taper: Literal["none", "linear", "cosine"] = flag(
        "none", "how MLPs change in width, from taper_start to taper_end", group="depth and width")
    taper_start: float = flag(1.5, "relative width of the first block", 0.01, 100)
    taper_end: float = flag(0.5, "relative width of the last block", 0.01, 100)
    repeat: str = flag("", "2:3 runs the second block three times; 2-3:2 runs blocks 2 3 2 3")
    deep_supervision: bool = flag(False, "training: mean loss after each block")
    mod: str = flag("all", "which tokens run a sublayer: all, router:rate=0.25, coins:rate=0.25; "
                    "for nag also gain:rate=0.25 or gain:below=0.05", group="skipping")
    gain_cost: float = flag(0.0, "for nag: adds this x mean |gain|, how much sublayers change a "
                            "token, to the loss, from 30 % of a training on", 0, 1000)

    def problems(self):   # -> a sentence for each thing that is wrong: end of part 4
        return config_problems(self)

EPS = 1e-6   # keeps a norm from dividing by 0

def unit(x, eps=EPS):   # x / rms(x): the direction of x, with rms 1
    return rms_norm(x, eps)   # F.rms_norm(x, x.shape[-1:], eps=eps), but faster on a CPU

def centred(x):
    return x - x.mean(-1, keepdim=True)

class Norm(nn.Module):
    """What --norm names, (..., C) -> (..., C): RMSNorm or LayerNorm; single: with one weight for
    all channels (arXiv:2506.19697); dyt: a tanh in place of a norm (arXiv:2503.10622)"""
    def __init__(self, config):
        super().__init__()
        self.kind = config.norm
        if self.kind != "none":
            self.weight = nn.Parameter(torch.ones([] if self.kind == "single" else config.n_embd))
        if self.kind == "dyt":
            self.slope = nn.Parameter(torch.tensor(0.5))
            self.bias = nn.Parameter(torch.zeros(config.n_embd))

    def forward(self, x):
        if self.kind == "none":
            return x
        if self.kind == "dyt":
            return torch.tanh(self.slope * x) * self.weight + self.bias
        if self.kind == "layer":
            x = centred(x)
        return unit(x) * self.weight

class CastLinear(nn.Linear):
    """nn.Linear without a bias, which casts its input and its weight to dtype. None: to that of the
    input. In a training on a GPU it is bfloat16 (GPT.compute_in), which is much faster. Weights and
    the stream stay float32: in bfloat16, the rounding errors of 2L additions would add up."""
    dtype = None

    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out, bias=False)

    def times(self, x, weight):   # -> x @ weight.T. weight: self.weight, or what is made of it
        dtype = self.dtype or x.dtype
        return F.linear(x.to(dtype), weight.to(dtype))

    def forward(self, x):
        return self.times(x, self.weight)

def rotation_table(config):
    """RoPE turns pair p of a head's channels by the angle position * 10000^(-2p / head_size).
    -> cosine and sine of each angle, (block_size, 1, head_size / 2, 2)"""
    head_size = config.n_embd // config.n_head
    speed = 1e4 ** -(torch.arange(0, head_size, 2) / head_size)
    angle = torch.outer(torch.arange(config.block_size), speed)
    return torch.stack((angle.cos(), angle.sin()), dim=-1)[:, None]

def rotate(x, rotation):
    """Turns x (..., n_head, head_size): channels 2p and 2p + 1 are read as a complex number, and
    multiplied by cos + i sin, of rotation. At least in float32: bfloat16 has no complex numbers."""
    dtype = torch.promote_types(rotation.dtype, torch.float32)
    points = torch.view_as_complex(x.to(dtype).unflatten(-1, (-1, 2)))
    turned = points * torch.view_as_complex(rotation.to(dtype))
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)

# A score is q @ k times a scale. Our queries and keys have rms 1, so q @ k is at most head_size.
# With the usual scale, 1 / sqrt(head_size), a score would be at most sqrt(head_size): 5.7 for heads
# of 32, too flat to pick one token of many. With SHARPNESS / head_size, it can reach 11.3 for every
# head size, as the usual scale does for heads of 128.
SHARPNESS = 128 ** 0.5

def attend(q, k, v, mask=None):
    """q (B, Q, n_head, head_size); k, v (B, S, n_head, head_size) -> for each query a mean of the
    values, shaped like q. mask: bools (B or 1, Q, S), True where a query sees a key; None: Q = S,
    and each query sees the keys up to its own"""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))   # now (B, n_head, ...)
    if mask is not None:
        mask = mask[:, None]   # the same for all heads
    scale = SHARPNESS / q.shape[-1]
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale)
    return out.transpose(1, 2)

class Attention(nn.Module):
    """Causal multi-head attention, with RoPE, and with normalised queries and keys"""
    def __init__(self, config):
        super().__init__()
        self.head_size = config.n_embd // config.n_head
        # C rows for q, then C for k, and C for v. (If you change this, for grouped queries, say,
        # change attention_of_some and keys_of_all, in part 3, too.)
        self.c_attn = CastLinear(config.n_embd, 3 * config.n_embd)
        self.c_proj = CastLinear(config.n_embd, config.n_embd)

    def heads(self, x):   # (..., C) -> (..., n_head, head_size)
        return x.unflatten(-1, (-1, self.head_size))

    def turned(self, x, rotation):
        """Products (..., C) of c_attn -> queries, or keys, normalised and rotated, (..., n_head,
        head_size). rotation: the rows of the table for the positions of these tokens"""
        return rotate(unit(self.heads(x)), rotation)

    def forward(self, x, rotation, store=None):
        """x (B, T, C) -> (B, T, C). store: that of a KVCache, if x are only the newest tokens"""
        q, k, v = self.c_attn(x).chunk(3, dim=-1)
        q, k, v = self.turned(q, rotation), self.turned(k, rotation), self.heads(v)
        mask = None
        if store is not None:   # It keeps them, and returns those of all tokens so far.
            k, v, mask = store(k, v)
        return self.c_proj(attend(q, k, v, mask).flatten(-2)).to(x.dtype)

class AttentionOfPass:
    """An attention as a residual sees it, a function of x: for tokens at certain positions, and, in
    sampling, with what stores their keys and values"""
    def __init__(self, attn, rotation, store):
        self.attn, self.rotation, self.store = attn, rotation, store

    def __call__(self, x):
        return self.attn(x, self.rotation, self.store)

class MLP(nn.Module):
    def __init__(self, config, hidden):
        super().__init__()
        self.activation = config.activation
        # swiglu multiplies two halves, so it needs twice the rows.
        rows = 2 * hidden if config.activation == "swiglu" else hidden
        self.c_fc = CastLinear(config.n_embd, rows)
        self.c_proj = CastLinear(hidden, config.n_embd)

    def forward(self, x):   # (..., C) -> (..., C)
        hidden = self.c_fc(x)
        if self.activation == "gelu":
            hidden = F.gelu(hidden)
        elif self.activation == "relu2":
            hidden = F.relu(hidden).square()
        else:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * value
        return self.c_proj(hidden).to(x.dtype)

class Residual(nn.Module):
    """PreNorm, the rule of GPT-2 and of most models since. All other rules are derived from it. A
    model makes one for each sublayer l = 1 .. 2L, and one more, `ends`, with l = 2L + 1."""
    def __init__(self, config, l):
        super().__init__()
        self.config, self.l = config, l
        self.block = (l + 1) // 2   # 1 .. L: residuals 1 and 2 belong to block 1, and so on
        self.has_sublayer = l <= 2 * config.n_layer   # False: it is `ends`.
        self.norm = Norm(config) if self.has_norm else nn.Identity()

    def forward(self, stream, f):
        """A stream, and a sublayer f as a function -> the next stream. A rule calls f once, and
        treats each token by itself, so that some can skip (part 3). f may look at other tokens."""
        return stream + f(self.norm(stream))

    def start(self, embedding):   # of `ends`: (B, T, C) -> the first stream
        return embedding

    def finish(self, stream):   # of `ends`: -> what the head reads. Its norm is ln_f in GPT-2.
        return self.norm(self.as_tensor(stream))

    def as_tensor(self, stream):
        """-> one vector per token, (B, T, C). PreNorm's stream is that already. If the stream of
        another rule has several parts, it is the first one."""
        if torch.is_tensor(stream):
            return stream
        return next(iter(stream.values() if isinstance(stream, dict) else stream))

    def head_weight(self, weight):   # of `ends`: the head's weight (V, C) -> the one that is used
        return weight

    def init_sublayer(self, sublayer):
        """May rescale the first weights of an attention or MLP, once they are drawn. As in GPT-2:
        2L updates are added up, so each starts with a variance that is 2L times smaller."""
        sublayer.c_proj.weight.mul_((2 * self.config.n_layer) ** -0.5)

    # What parts 2 to 4 and train.py ask for. To read part 1, you can do without.
    allowed = {}           # the choices or the range of each option: dict(n=(1, 64)), say
    own_lr = ()            # names of parameters that train with AdamW at --gate_lr, not at --lr
    has_norm = True        # False: a rule without a self.norm
    can_skip = True        # Can a token pass by a sublayer, with its stream as it is?
    knows_gain = False     # Is there a gain(stream), and a forward(stream, f, gain=None)?
    stream_grows = False   # Has the stream more and more tensors with depth?

    def flops(self):   # per token, which is multiplied with each matrix once
        return sum(2 * p.numel() for p in self.parameters() if p.dim() == 2)

    def flops_before_f(self):   # those of them that make what f gets
        return 0

    def running_sum(self, stream):   # for figures: the sum to which updates are added
        return self.as_tensor(stream)

class Block(nn.Module):
    """Two sublayers and their residuals"""
    def __init__(self, config, number):   # 0 .. L - 1
        super().__init__()
        self.attn = Attention(config)
        self.attn_residual = make_residual(config, 2 * number + 1)   # a Residual, by --residual
        self.mlp = MLP(config, hidden_units(config, number))         # mlp_ratio * n_embd, usually
        self.mlp_residual = make_residual(config, 2 * number + 2)

    def forward(self, stream, rotation, store=None, trip=None):
        """The stream before the block -> that after it. trip: None in a plain pass"""
        attention = AttentionOfPass(self.attn, rotation, store)
        for residual, f in (self.attn_residual, attention), (self.mlp_residual, self.mlp):
            if trip is None:
                stream = residual(stream, f)
            else:
                stream = trip.run(residual, stream, f)   # the same, for the tokens that run
        return stream

EMBEDDING_STD, LOGIT_STD = 3.0, 0.8

def first_std(config, name, columns):
    """The standard deviation of first weights. name: that of a module, such as wte, lm_head or
    blocks.0.mlp.c_fc; columns: of its weight"""
    if name == "wte" and config.init != "gpt2":
        return EMBEDDING_STD   # At first, an embedding is longer than the updates added to it.
    if config.init != "width":
        return 0.02
    if name == "lm_head":
        return LOGIT_STD * columns ** -0.5   # The first loss is 0.8^2 / 2 = 0.3 above ln(V).
    return columns ** -0.5   # A residual may rescale it: init_sublayer.

def seeded(config, name):
    """A random generator for the weights of this name. With the same seed and the same name, two
    models draw the same numbers, whatever else they have. So comparisons are fair."""
    return torch.Generator().manual_seed(zlib.crc32(f"{config.seed} {name}".encode()))

@torch.no_grad()
def init_weights(model):
    for name, module in model.named_modules():
        if isinstance(module, (CastLinear, nn.Embedding)):   # What else there is draws for itself.
            std = first_std(model.config, name, module.weight.shape[1])
            module.weight.normal_(std=std, generator=seeded(model.config, name))
    for block in model.blocks:
        block.attn_residual.init_sublayer(block.attn)
        block.mlp_residual.init_sublayer(block.mlp)

class GPT(nn.Module):
    """Decoder-only Transformer. ValueError if the config has problems: a sentence for each"""
    def __init__(self, config: GPTConfig):
        super().__init__()
        if problems := config.problems():
            raise ValueError("\n".join(problems))
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList([Block(config, number) for number in range(config.n_layer)])
        self.ends = make_residual(config, 2 * config.n_layer + 1)
        self.lm_head = CastLinear(config.n_embd, config.vocab_size)
        self.register_buffer("rotation", rotation_table(config), persistent=False)
        self.order = block_order(config)      # the blocks 0 .. L - 1, unless --repeat changes it
        self.decider = make_decider(config)   # who skips sublayers: nobody, or what --mod says
        self.n_vocab = config.vocab_size      # ids that sampling may draw; open_run may say fewer
        init_weights(self)

    def forward(self, idx, targets=None, cache=None, trip=None):
        """idx (B, T) of token ids -> logits (B, T, V), and None. With targets (B, T): logits (in
        training, None), and the loss, which is the mean cross entropy in nats, and in training what
        some flags add to it. cache: a KVCache, if idx are only the newest tokens; trip: a Trip, if
        you want to say who skips, or to know afterwards who has. ValueError if idx is too long"""
        past = 0 if cache is None else cache.length
        length = past + idx.shape[1]
        if length > self.config.block_size:
            raise ValueError(f"{length} tokens do not fit block_size {self.config.block_size}")
        if cache is not None:
            cache.length = length   # `store` counts back from here.
        stream = self.ends.start(self.wte(idx))
        trip = trip or needed_trip(self)   # None in a plain pass: all tokens run all sublayers.
        if trip is not None:
            trip.begin(idx.shape, stream)
        for slot, number in enumerate(self.order):   # In a cache, each attention has a slot.
            store = None if cache is None else partial(cache.store, slot)
            stream = self.blocks[number](stream, self.rotation[past:length], store, trip)
        logits = self.head(stream)
        if targets is None:
            return logits, None
        loss = cross_entropy(logits, targets)
        if not self.training:
            return logits, loss
        if trip is not None:   # Flags such as --gain_cost add something.
            loss = trip.loss(loss, targets)
        return None, loss   # Nobody reads these logits. They would be the largest tensor of all.

    def head(self, stream):   # -> logits (B, T, V)
        x = self.ends.finish(stream)
        weight = self.ends.head_weight(self.lm_head.weight)   # In PreNorm it stays as it is.
        return self.lm_head.times(x, weight).to(x.dtype)

    def walk(self, idx, trip=None):
        """idx (B, T) -> a list of streams: the first one, and the one after each sublayer"""
        trip = trip or Trip(self)
        trip.keeps_streams = True
        self(idx, trip=trip)
        return trip.streams

    def generate(self, idx, max_new_tokens, **options):
        """idx (B, T), texts of equal lengths -> (B, T + max_new_tokens). It goes on after an
        end-of-text. options: those of new_tokens"""
        tokens = [token for token, _ in new_tokens(self, idx, max_new_tokens, **options)]
        return torch.cat([idx, *tokens], dim=1)

    def compute_in(self, dtype):   # From now on, sublayers and head multiply in this dtype.
        for module in self.modules():
            if isinstance(module, CastLinear):
                module.dtype = dtype

    def residuals(self):   # all 2L + 1 of them
        pairs = [(block.attn_residual, block.mlp_residual) for block in self.blocks]
        return [*itertools.chain(*pairs), self.ends]

    @property
    def device(self):
        return self.rotation.device

def cross_entropy(logits, targets):   # (B, T, V), (B, T) -> the mean over all tokens, in nats
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

def causal_mask(has_key, n):
    """has_key (B or 1, S): bools, which of S tokens have a key -> bools (B or 1, n, S): which of
    them each of the n newest tokens sees, those up to its own"""
    return has_key[:, None].expand(-1, n, -1).tril(has_key.shape[1] - n)

class KVCache:
    """Keeps keys and values of earlier tokens, so that sampling computes only the newest one."""
    def __init__(self, size):   # how many tokens it has room for
        self.size = size
        self.length = 0   # how many tokens have come, with those that run through the model now
        self.slots = {}   # number of a slot: keys, values, and which tokens have a key

    def store(self, slot, k, v, has_key=True):
        """k, v (B, n, n_head, head_size) of the n newest tokens -> those of all S tokens so far,
        and a mask (B, n, S) as in attend. slot: the number of the attention; has_key: bools (B, n),
        if some of the newest have none (part 3)"""
        n, room = k.shape[1], (len(k), self.size)
        if slot not in self.slots:
            empty = k.new_zeros(*room, *k.shape[2:])
            self.slots[slot] = empty, empty.clone(), k.new_zeros(room, dtype=torch.bool)
        for old, new in zip(self.slots[slot], (k, v, has_key)):
            old[:, self.length - n:self.length] = new
        keys, values, have_key = (each[:, :self.length] for each in self.slots[slot])
        return keys, values, causal_mask(have_key, n)

@torch.no_grad()
def new_tokens(model, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None,
               make_trip=None):
    """Continues idx (B, T), after model.eval(). Yields each new token (B, 1), and the Trip of the
    pass that predicted it, or None. make_trip: a function that returns a new Trip for each pass, if
    you want to say who skips, or to know afterwards who has. ValueError if idx has no token"""
    if idx.shape[1] == 0:
        raise ValueError("idx has no token to go on from; give it an end-of-text, with which each "
                         "document begins")
    size = min(model.config.block_size, idx.shape[1] + max_new_tokens)
    cache = KVCache(size)
    missing = idx[:, -size:]   # what the cache doesn't have yet: at first the text, or its end
    for _ in range(max_new_tokens):
        trip = make_trip() if make_trip else needed_trip(model)
        logits, _ = model(missing, cache=cache, trip=trip)
        # Of the next token. (train.py rounds the number of the head's rows up.)
        logits = logits[:, -1, :model.n_vocab]
        if top_k:
            best = logits.topk(min(top_k, logits.shape[-1]))
            logits = torch.full_like(logits, -math.inf).scatter(1, best.indices, best.values)
        if temperature < 1e-6:
            token = logits.argmax(-1, keepdim=True)
        else:
            probabilities = (logits / temperature).softmax(-1)
            token = torch.multinomial(probabilities, 1, generator=generator)
        idx = torch.cat((idx, token), dim=1)
        yield token, trip
        if cache.length < size:
            missing = token
        else:   # It is full: a new one starts with the newer half.
            cache = KVCache(size)
            missing = idx[:, -max(1, size // 2):]

# ================================================================================ part 2: residuals

# Read those that you care about. All of them have the norms, the attention and the first weights of
# part 1, whatever their papers had. Each class says what else differs from its paper.

class Template(Residual):
    """Copy me: PreNorm, but each sublayer has a learned number b that multiplies its updates.

    Rename the class, change the equation, and give it a key in RESIDUALS (end of part 2). A keyword
    argument of __init__ becomes an option: --residual template:first=0.5. With own_lr = ("b",), b
    trains at --gate_lr. An init_sublayer that does nothing lets c_proj start as large as other
    matrices. If a stream has several parts, write start, and, if x isn't the first, as_tensor."""
    def __init__(self, config, l, first=1.0):   # first: b before training
        super().__init__(config, l)
        if self.has_sublayer:   # model.ends only starts and finishes, so it needs no b.
            self.b = nn.Parameter(torch.tensor(float(first)))

    def forward(self, x, f):
        return x + self.b * f(self.norm(x))

# ------------------------------------------------------------------------------ where the norms are

class Post(Residual):
    """PostNorm, the Transformer of 2017 (arXiv:1706.03762): the last norm is the final one, too.
    Differs from the paper: only in what part 1 has."""
    def __init__(self, config, l):
        super().__init__(config, l)
        if not self.has_sublayer:
            self.norm = nn.Identity()

    def forward(self, x, f):
        return self.norm(x + f(x))

class Peri(Residual):
    """Peri-LN (arXiv:2502.02732), as in Gemma 2 and 3: the update is normalised, too.
    Differs from the paper: the embedding isn't normalised."""
    def __init__(self, config, l):
        super().__init__(config, l)
        if self.has_sublayer:
            self.norm_update = Norm(config)

    def forward(self, x, f):
        return x + self.norm_update(f(self.norm(x)))

class Reordered(Residual):
    """OLMo 2 (arXiv:2501.00656): only the update is normalised.
    Differs from the paper: only in what part 1 has."""
    def forward(self, x, f):
        return x + self.norm(f(x))

class DeepNorm(Post):
    """DeepNorm (arXiv:2203.00555): PostNorm with a larger stream. Updates stay bounded if c_proj,
    and what makes values and hidden units, starts small.
    Differs from the paper: --init draws what is made small here, and not Xavier's rule."""
    def forward(self, x, f):
        larger = (2 * self.config.n_layer) ** 0.25
        return self.norm(larger * x + f(x))

    def init_sublayer(self, sublayer):
        small = (8 * self.config.n_layer) ** -0.25
        sublayer.c_proj.weight.mul_(small)
        if isinstance(sublayer, Attention):
            sublayer.c_attn.weight[2 * self.config.n_embd:].mul_(small)   # the rows of the values
        else:
            sublayer.c_fc.weight.mul_(small)

class MixLN(Residual):
    """Mix-LN (arXiv:2412.13795): a share alpha of the blocks, the first ones, are PostNorm.
    Differs from the paper: only in what part 1 has."""
    allowed = dict(alpha=(0, 1))

    def __init__(self, config, l, alpha=0.25):
        super().__init__(config, l)
        self.is_post = self.block <= int(alpha * config.n_layer + 1e-9)
        if not self.has_sublayer and alpha == 1:   # The last block has a norm at its end already.
            self.norm = nn.Identity()

    def forward(self, x, f):
        return self.norm(x + f(x)) if self.is_post else x + f(self.norm(x))

class LayerNormScaling(Residual):
    """LayerNorm Scaling (arXiv:2502.05795): 1 / sqrt(block), in place of a small c_proj.
    Differs from the paper: in an attention it reaches the values only, as our queries and keys are
    normalised."""
    def forward(self, x, f):
        return x + f(self.block ** -0.5 * self.norm(x))

    def init_sublayer(self, sublayer):
        pass

class Siamese(Residual):
    """SiameseNorm (arXiv:2602.08064, as in the released code). Two streams: y grows as in PreNorm,
    and x is kept small by a norm, as in PostNorm. Sublayers read their sum. In block i = 1 .. L,
    only 1 / sqrt(2 i) of an update is added to x.
    Differs from the paper: only in what part 1 has."""
    can_skip = False   # A token that skips would miss the norm of x.

    def __init__(self, config, l):
        super().__init__(config, l)
        self.norm_x, self.norm_y = Norm(config), Norm(config)

    def start(self, x):
        return x, x.clone()   # The same tensor twice would be a special case for torch.compile.

    def as_tensor(self, stream):
        y, x = stream
        return self.norm_x(x) + self.norm_y(y)

    def running_sum(self, stream):
        return torch.stack(stream, dim=-2)

    def forward(self, stream, f):
        y, x = stream
        x = self.norm_x(x)
        update = f(self.norm(x + self.norm_y(y)))
        return y + update, x + (2 * self.block) ** -0.5 * update

# ----------------------------------------------------------------- which earlier sublayers are read

class AttnRes(Residual):
    """Attention Residuals (Kimi Team 2026, arXiv:2603.15031, eqs. 2-4), as in Kimi K3. Nothing is
    added up: the embedding, and each update, stays by itself, as a source. A sublayer, and finally
    the head, reads a weighted mean of all n sources so far. This is attention over the depth, with
    a learned query for each read:

        score_i = query . (key_weight * unit(source_i))
        read = norm(n * sum_i softmax(score)_i source_i)        the softmax is over the sources

    Queries start at zero. Then all weights are 1 / n, and a read is exactly that of PreNorm. With
    group=3, a source is the sum of three updates (Block AttnRes, section 3.2).

    The stream is a pair: query * key_weight of all reads (2L, C), and a dict from the number of a
    group (0: the embedding) to its source, and what that scores in each read. When a source is
    made, one matrix product finds its scores in all reads that will come.
    Differs from the paper: the factor n, which the norm takes out again."""
    own_lr = "query", "key_weight"   # At the matrices' rate, all weights soon go to one source.
    allowed = dict(group=(1, 10000))
    can_skip = False
    stream_grows = True

    def __init__(self, config, l, group=1):   # group=1 is Full AttnRes.
        super().__init__(config, l)
        self.group = (l - 1) // group + 1   # that of its own update
        if not self.has_sublayer:   # Read 1 has one source. Reads 2 .. 2L + 1 have a query each.
            self.query = nn.Parameter(torch.zeros(2 * config.n_layer, config.n_embd))
            self.key_weight = nn.Parameter(torch.ones(2 * config.n_layer, config.n_embd))

    def start(self, embedding):
        queries = self.query * self.key_weight
        return queries, {0: self.with_scores(embedding, queries)}

    def with_scores(self, source, queries):   # -> it, and its scores in 2L reads, each (B, T)
        return source, F.linear(unit(source), queries).unbind(-1)

    def read(self, stream):
        _, groups = stream
        sources = [source for source, _ in groups.values()]
        if len(sources) == 1:   # Its weight is 1.
            return self.norm(sources[0])
        scores = torch.stack([of_reads[self.l - 2] for _, of_reads in groups.values()])
        weights = scores.softmax(0)[..., None]   # (n, B, T, 1)
        # depth_sum(weights, sources) is the sum of weights[i] * sources[i].
        return self.norm(depth_sum(len(sources) * weights, sources, self.config.kernels))

    finish = read

    def forward(self, stream, f):
        queries, groups = stream
        source = f(self.read(stream))
        if self.group in groups:   # This group has begun, so its sum grows.
            source = groups[self.group][0] + source
        return queries, groups | {self.group: self.with_scores(source, queries)}

    def as_tensor(self, stream):
        _, groups = stream
        return sum(source for source, _ in groups.values())   # PreNorm's stream

    def running_sum(self, stream):
        _, groups = stream
        newest, _ = groups[max(groups)]
        return newest

    def flops(self):   # one source times 2L queries
        return 4 * self.config.n_layer * self.config.n_embd

class DenseFormer(Residual):
    """PreNorm, and after each block a weighted sum of the embedding and of all blocks' outputs so
    far (Pagliardini et al. 2024, arXiv:2402.02622). The stream is x, and a dict from the number of
    a block (0: the embedding) to its output. Blocks that are removed have no output.
    Differs from the paper: only in what part 1 has."""
    can_skip = False
    stream_grows = True

    def __init__(self, config, l):
        super().__init__(config, l)
        self.is_after_mlp = l % 2 == 0   # A block is over.
        if self.is_after_mlp:   # At first its own output has the weight 1, and all others 0.
            self.weights = nn.Parameter(torch.eye(self.block + 1)[-1].clone())

    def start(self, x):
        return x, {0: x}

    def forward(self, stream, f):
        x, outputs = stream
        x = x + f(self.norm(x))
        if self.is_after_mlp:
            outputs = outputs | {self.block: x}
            weights = self.weights[list(outputs)].view(-1, 1, 1, 1)   # each for all tokens
            x = depth_sum(weights, list(outputs.values()), self.config.kernels)
        return x, outputs

# ----------------------------------------------------------------------------- a gate on the update

class Review(Residual):
    """PreNorm whose update u passes a gate, a number per channel that depends on the stream h and
    on u (Review Residuals, Kramer 2026, arXiv:2606.31859):

        h <- h + gate u,    gate = sigmoid(W_h unit(h) + W_u unit(u) + bias)

    review    this equation
    highway   a baseline there: the gate sees h only
    convex    h <- (1 - gate) h + gate u. At first a sublayer keeps only a half of the stream, so
              with depth the embedding fades away, and training fails. bias=-3 helps.

    W starts at zero, so gates start at sigmoid(bias).
    Differs from the paper: its script gives highway's gate h as it is, and a random W."""
    allowed = dict(inputs=("hu", "h", "u"))

    def __init__(self, config, l, inputs="hu", convex=False, bias=0.0):
        super().__init__(config, l)   # inputs: what the gate sees; bias: its first value
        self.convex = convex
        if self.has_sublayer:
            zeros = torch.zeros(config.n_embd, config.n_embd)
            self.W = nn.ParameterDict({name: nn.Parameter(zeros.clone()) for name in inputs})
            self.bias = nn.Parameter(torch.full((config.n_embd,), bias))

    def forward(self, h, f):
        u = f(self.norm(h))
        seen = {"h": h, "u": u}
        products = [F.linear(unit(seen[name], eps=1e-5), W) for name, W in self.W.items()]
        gate = (sum(products) + self.bias).sigmoid()
        return (1 - gate) * h + gate * u if self.convex else h + gate * u

# --------------------------------------------------------------------- several copies of the stream

class Copies(Residual):
    """What the next two rules share: n vectors a token, (B, T, n, C), at first all the embedding"""
    def start(self, x):
        return x[..., None, :].repeat_interleave(self.n, dim=-2)

    def as_tensor(self, copies):
        return copies.mean(-2)

class Gated(Copies):
    """Gated Residual, of Qwen3.8-Next (arXiv:2608.30320, sections 2.2 and 3.3). A sublayer reads a
    gated mean of all copies R_1 .. R_n, and what it writes to each of them depends on the token:

        r_i = unit(R_i) * norm_weight_i,                r: all of them in a row, n C numbers
        gate = sigmoid(up silu(down r / n)),            n C numbers, through a rank of C / 8
        read = the mean over i of gate_i * r_i          in place of the norm; also for the head
        R_i <- R_i + s_i f(read),                       s = 2 sigmoid(to_write r / n), n numbers

    Nothing mixes the copies, so a token can skip: it keeps all of them.
    Differs from the paper: only in what part 1 has."""
    own_lr = "down", "up", "to_write"   # AdamW trains them, not Muon, as in the paper.
    allowed = dict(n=(1, 64))
    has_norm = False

    def __init__(self, config, l, n=4):
        super().__init__(config, l)
        self.n, width, rank = n, n * config.n_embd, max(1, config.n_embd // 8)

        def matrix(name, rows, columns):
            drawn = torch.randn(rows, columns, generator=seeded(config, f"{name} {l}"))
            return nn.Parameter(drawn * columns ** -0.5)

        self.norm_weight = nn.Parameter(torch.ones(width))
        self.down, self.up = matrix("down", rank, width), matrix("up", width, rank)
        if self.has_sublayer:
            self.to_write = matrix("to_write", n, width)

    def read_and_row(self, R):   # -> what is read, (..., C), and r / n in a row, (..., n C)
        r = unit(R) * self.norm_weight.view(self.n, -1)
        row = r.flatten(-2) / self.n
        gate = F.linear(F.silu(F.linear(row, self.down)), self.up).sigmoid()
        return (gate.view_as(r) * r).mean(-2), row

    def forward(self, R, f):
        x, row = self.read_and_row(R)
        update = f(x)
        s = 2 * F.linear(row, self.to_write).sigmoid()   # (..., n)
        return R + s[..., None] * update[..., None, :]

    def finish(self, R):
        return self.read_and_row(R)[0]

    def flops_before_f(self):
        return 2 * self.down.numel() + 2 * self.up.numel()

class Hyper(Copies):
    """Hyper-connections (arXiv:2409.19606). A sublayer reads the n copies x by n weights `pre`,
    writes to each of them by n weights `post`, and a matrix `res` (n, n) mixes them:

        x <- res x + post f(norm(pre x))

    All weights depend on the token. At first every copy is nearly PreNorm's stream. Kinds of res:

        identity   no mixing, so a token can skip
        lite       a mixture of the n! permutations (mHC-lite, arXiv:2601.05732)
        mhc        rows and columns sum to 1, by 20 Sinkhorn steps (mHC, arXiv:2512.24880), as in
                   DeepSeek-V4

    Differs from the papers: first weights are ours. mhc ends with a step that makes sums exact."""
    allowed = dict(kind=("identity", "lite", "mhc"), n=(1, 64))

    def __init__(self, config, l, kind="identity", n=4):
        super().__init__(config, l)
        if kind == "lite" and n > 5:   # 6! permutations are too many.
            raise ValueError(f"--residual: option n={n} must be from 1 to 5 with kind=lite")
        self.kind, self.n = kind, n
        self.can_skip = kind == "identity"   # With another res, a token that skips would miss it.
        # The logits of pre: at first a sublayer reads one copy, sigmoid(4) = 0.98 of it, and its
        # successor the next one. Those of post: each copy gets 2 sigmoid(0) = 1 times the update.
        static = [8 * torch.eye(n)[(l - 1) % n] - 4, torch.zeros(n)]
        if kind == "lite":   # a logit for each permutation, of which the first changes nothing
            matrices = [torch.eye(n)[list(order)] for order in itertools.permutations(range(n))]
            self.register_buffer("permutations", torch.stack(matrices).flatten(1), persistent=False)
            static.append(8 * torch.eye(len(matrices))[0] - 8)
        if kind == "mhc":   # a logit for each entry
            static.append(8 * torch.eye(n).flatten() - 8)
        self.sizes = [len(logits) for logits in static]
        if self.has_sublayer:
            self.static = nn.Parameter(torch.cat(static))
            self.dynamic = nn.Parameter(torch.zeros(sum(self.sizes), n * config.n_embd))
            self.scale = nn.Parameter(torch.full((len(static),), 0.01))   # of what is dynamic

    def logits(self, x):   # -> those of pre, of post, and, unless kind=identity, of res
        static = self.static.split(self.sizes)
        dynamic = F.linear(unit(x.flatten(-2)), self.dynamic).split(self.sizes, dim=-1)
        return [static[i] + self.scale[i] * dynamic[i] for i in range(len(self.sizes))]

    def forward(self, x, f):
        pre, post, *res = self.logits(x)
        mixture = (pre.sigmoid()[..., None, :] @ x).squeeze(-2)   # n weights times n copies
        update = f(self.norm(mixture))
        if self.kind == "lite":
            matrix = res[0].softmax(-1) @ self.permutations   # Shares of permutations sum to 1.
            x = matrix.unflatten(-1, (self.n, self.n)) @ x
        if self.kind == "mhc":
            x = doubly_stochastic(res[0].unflatten(-1, (self.n, self.n))) @ x
        return x + 2 * post.sigmoid()[..., None] * update[..., None, :]

    def flops_before_f(self):   # the logits, and pre times the copies
        return 2 * self.dynamic.numel() + 2 * self.n * self.config.n_embd

    def flops(self):
        if not self.has_sublayer:
            return 0
        make_res = 2 * self.permutations.numel() if self.kind == "lite" else 0
        mix = 0 if self.kind == "identity" else 2 * self.n ** 2 * self.config.n_embd
        return self.flops_before_f() + make_res + mix

def doubly_stochastic(logits, steps=20):
    """(..., n, n) -> matrices >= 0 whose rows and columns sum to 1, but for rounding"""
    for _ in range(steps):   # Sinkhorn's: columns and rows in turn, in logarithms
        logits = logits - logits.logsumexp(-2, keepdim=True)
        logits = logits - logits.logsumexp(-1, keepdim=True)
    matrix = logits.exp()
    # Rows sum to 1 now, columns only nearly: after a training, some were off by 0.99. So columns
    # above 1 shrink. Then row i lacks r_i, column j lacks c_j, and (i, j) gets r_i c_j / sum(c)
    # (Altschuler et al. 2017, arXiv:1705.09634, algorithm 2).
    matrix = matrix / matrix.sum(-2, keepdim=True).clamp_min(1)
    r, c = 1 - matrix.sum(-1, keepdim=True), 1 - matrix.sum(-2, keepdim=True)
    return matrix + r * c / c.sum(-1, keepdim=True).clamp_min(EPS)

# ----------------------------------------------------------------------------- directions and gains

class NAG(Residual):
    """Norm-AGnostic residual (Figliolia and Millidge 2026, arXiv:2606.16112, eqs. 3-24).

    In PreNorm the stream gets longer with depth, so later updates change it less and less. NAG
    keeps its length apart. The stream is a pair: a direction (B, T, C), which has rms 1, and the
    log of the length (rms) that goes with it, (B, T, 1). A sublayer turns the direction by the
    angle atan(gain), towards the part of its update that is orthogonal to it:

        direction <- (direction + gain side / rms(side)) / sqrt(1 + gain^2)     side: that part
        log_length <- log_length + 1/2 log(1 + gain^2)

    The gain depends on the direction alone, so it is known *before* the sublayer runs. A token that
    would hardly turn may as well skip it: this is Mixture-of-Depths without a router (part 3).
    Differs from the paper: log_scale starts at another value. (See ByGain for who skips.)"""
    own_lr = "alpha", "beta", "preferred", "bias", "votes", "log_scale"
    allowed = dict(directions=(1, 10000), power=(-8, 8))
    has_norm = False
    knows_gain = True

    def __init__(self, config, l, directions=32, power=0.5):   # directions: how many preferred ones
        super().__init__(config, l)
        if not self.has_sublayer:   # The embedding is multiplied by exp(log_scale), g in eq. 18.
            self.log_scale = nn.Parameter(torch.tensor(first_log_scale(config, power)))
            return
        preferred = torch.randn(directions, config.n_embd, generator=seeded(config, f"w {l}"))
        self.preferred = nn.Parameter(preferred * config.n_embd ** -0.5)   # w in the paper
        self.bias = nn.Parameter(torch.zeros(directions))                  # b
        self.votes = nn.Parameter(torch.zeros(directions))                 # p, before its softmax
        self.alpha = nn.Parameter(torch.tensor(l ** -power))               # as in eqs. 23, 24
        self.beta = nn.Parameter(torch.tensor(math.log(math.e - 1)))       # softplus(beta) is 1

    def start(self, x):
        x = centred(x)   # Updates are centred, too, so a mean would stay for ever.
        length = x.square().mean(-1, keepdim=True).clamp_min(TINY).sqrt()
        return x / length, length.log() + self.log_scale

    def gain(self, stream):
        """alpha m, (..., 1) (eq. 13). m in (0, 1] says how near the direction is to preferred ones:
        m = (sum_i softmax(votes)_i sigmoid(preferred_i . direction + bias_i)) ^ softplus(beta)"""
        direction, _ = stream
        near = F.linear(direction, self.preferred, self.bias).sigmoid()   # (..., directions)
        mean = (near @ self.votes.softmax(0))[..., None]
        m = mean.clamp_min(EPS) ** F.softplus(self.beta)   # At 0 its slope could be infinite.
        return self.alpha * m

    def forward(self, stream, f, gain=None):
        direction, log_length = stream
        if gain is None:   # Else somebody has computed it already.
            gain = self.gain(stream)
        update = f(direction)
        # kernels.py has this class's write by hand, too. (A class of yours may have another one.)
        by_hand = fast_nag_write(direction, self.config.kernels) if type(self) is NAG else None
        write = by_hand or self.write
        return write(direction, log_length, update, gain)

    def side(self, update, direction):   # the part that is orthogonal to it: eqs. 10, 11
        update = centred(update)
        along = (update * direction).mean(-1, keepdim=True)
        return update - direction * along

    def write(self, direction, log_length, update, gain):   # -> the next stream
        side = self.side(update, direction)
        size = gain * (side.square().mean(-1, keepdim=True) + TINY).rsqrt()   # eq. 12: gain / rms
        direction = torch.addcmul(direction, side, size)                      # eq. 14: + size side
        direction = direction * (1 + gain.square()).rsqrt()                   # eq. 16: rms 1 again
        log_length = log_length + 0.5 * torch.log1p(gain.square())            # eqs. 15, 17
        return direction, log_length

    def flops_before_f(self):   # of the gain, if nobody has asked for it before
        return self.flops()

    def as_tensor(self, stream):
        direction, log_length = stream
        return direction * log_length.exp()

    def finish(self, stream):
        # A logit is length x cosine, and the cosine of two vectors of rms 1 is their product / C.
        direction, log_length = stream
        return direction * (log_length.exp() / self.config.n_embd)

    def head_weight(self, weight):
        return unit(centred(weight), eps=EPS ** 2)   # rms 1, also where a row is small

    def init_sublayer(self, sublayer):
        pass   # Only the direction of an update counts.

def first_log_scale(config, power):
    """NAG's first log_scale: one with which the first logits have the standard deviation LOGIT_STD.
    At 0 they would be nearly equal: a logit is length x cosine, and the cosine of random vectors
    has the std C ** -0.5."""
    last_length = LOGIT_STD / config.n_embd ** -0.5
    first_length = first_std(config, "wte", config.n_embd)
    growth = 0.0   # Together, all sublayers multiply the length by exp(growth).
    for number in block_order(config):
        for l in 2 * number + 1, 2 * number + 2:
            gain = 0.5 * l ** -power   # alpha m, and m starts at about 1/2
            growth += 0.5 * math.log1p(gain ** 2)
    return math.log(last_length / first_length) - growth

# --------------------------------------------------------------------------------------- --residual

# What --residual can be: a class, or a partial of one, with some options. Yours goes here, too:
# RESIDUALS["mine"] = Mine
RESIDUALS = {
    "pre": Residual, "template": Template, "nag": NAG, "attnres": AttnRes, "review": Review,
    "convex": partial(Review, convex=True), "highway": partial(Review, inputs="h"),
    "gated": Gated, "hyper": Hyper, "peri": Peri, "reordered": Reordered, "post": Post,
    "deepnorm": DeepNorm, "mixln": MixLN, "lns": LayerNormScaling, "siamese": Siamese,
    "denseformer": DenseFormer}

def make(flag_name, registry, text, *arguments):
    """("--residual", RESIDUALS, "hyper:n=2", config, l) -> Hyper(config, l, n=2). ValueError, with
    a sentence, if there is no such thing"""
    name, _, options = text.partition(":")
    if name not in registry:
        raise ValueError(f"{flag_name} {name}: unknown; choose from {', '.join(registry)}")
    entry = registry[name]
    kind = entry.func if isinstance(entry, partial) else entry   # the class
    try:
        given = read_options(options, option_defaults(entry), kind.allowed)
    except ValueError as error:
        raise ValueError(f"{flag_name} {text}: {name}: {error}") from None
    return entry(*arguments, **given)

def make_residual(config, l):
    return make("--residual", RESIDUALS, config.residual, config, l)

# ================================================================================= part 3: skipping

# Mixture-of-Depths: not every token needs every sublayer. Three things work together:
#
#     a decider   says before each sublayer which tokens run it. It is part of the model (--mod).
#     a Trip      is one pass in which tokens may skip. It asks the decider, and notes the answers.
#     run_some    runs a sublayer for the tokens that run it, and computes nothing for the others.
#
# A token that skips passes by, with its stream as it is. An answer is bools (B, T), True where a
# token runs; or True: all run; or False: the sublayer is removed. This is more than bools that are
# all False: there, tokens that skip an attention still make their keys, for later tokens, unless
# the decider says skippers_make_keys = False. A sublayer that is removed makes none.

class Decider(nn.Module):
    """--mod all: nobody skips. Other deciders replace some of these methods. Class Trip says what a
    trip has. Options are keyword arguments of __init__, as those of a residual."""
    allowed = {}                # the choices or the range of each option
    needs_skipping = False      # Must tokens of the residual be able to skip?
    needs_gain = False          # Must it know gains?
    needs_tensor = False        # Must its stream be one tensor (B, T, C)?
    skippers_make_keys = True   # Does a token that skips an attention make its key all the same?

    def __init__(self, config=None):
        super().__init__()

    def forward(self, trip):   # -> who runs the next sublayer: bools (B, T), True or False
        return True

    def after(self, trip, stream):   # after each sublayer -> the stream that goes on
        return stream

    def loss(self, trip):   # after a pass in training -> what is added to the loss
        return 0.0

    def after_iteration(self, trips, mean_of_all):
        """train.py calls it, with the trips of an iteration. mean_of_all(number): the mean over all
        processes"""

class ByFunction(Decider):
    """A decider that is one function: Trip(model, lambda trip: trip.place != 3) makes one."""
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, trip):
        return self.function(trip)

def call_residual(residual, stream, f, gain=None):
    """gain: residual.gain(stream), if somebody has asked for it, so that it is computed once"""
    return residual(stream, f) if gain is None else residual(stream, f, gain)

def ramp(progress, begin, end):   # 0 until begin, 1 from end on, and a straight line between
    return min(1.0, max(0.0, (progress - begin) / (end - begin)))

class Trip:
    """One pass through the depth in which tokens may skip, or into which you want to look:
    model(idx, trip=Trip(model)). A decider finds here, of the sublayer that comes next:

        place      1, 2, 3, ... in the order of running; odd: attention, even: MLP. It is the l of
                   the residual, until --repeat runs a block again: then its l come again.
        residual   its residual
        stream     the stream before it, and shape, its (B, T)
        gain()     how much it will change each token, (B, T, 1), if the residual can tell
        progress   how much of the training is over, 0 to 1
        notes      a dict for what a decider wants to remember until the pass is over

    And the model. What a decider computes, it adds to decider_flops, per token."""
    def __init__(self, model, decider=None, without=(), progress=1.0, keeps_streams=False,
                 call=call_residual):
        """decider: in place of model.decider, a Decider or a function; without: the places of
        sublayers to remove; keeps_streams: the list `streams` gets the first one, and then the one
        after each place; call: in place of call_residual. Mistake if no token can skip"""
        self.decider = decider or model.decider
        if not isinstance(self.decider, Decider):
            self.decider = ByFunction(decider)
        if self.decider.needs_skipping and not model.ends.can_skip:
            raise Mistake(f"--residual {model.config.residual}: no token can skip; use pre or nag")
        self.model, self.without, self.progress, self.call = model, without, progress, call
        self.pays = model.training and model.config.gain_cost > 0
        self.supervises = model.training and model.config.deep_supervision
        self.keeps_streams = keeps_streams or self.supervises
        self.place, self.decider_flops, self.notes = 0, 0.0, {}
        self.streams, self.answers = [], []   # an answer of the decider for each place
        self.gains = []                       # those of all tokens, or None if nobody has asked
        self.cross_entropy = None             # of a pass in training, for train.py to report

    def begin(self, shape, stream):   # shape: (B, T); stream: the first one
        if self.place > 0:
            raise Mistake("a Trip is for one pass; make a new one")
        self.shape = shape
        if self.keeps_streams:
            self.streams.append(stream)

    def run(self, residual, stream, f):
        """-> the stream after the sublayer f, which those tokens run that the decider says"""
        self.place += 1
        self.residual, self.stream, self.known_gain = residual, stream, None
        answer = False if self.place in self.without else self.checked(self.decider(self))
        if self.pays:   # All tokens pay, whether they run or skip.
            self.gain()
        self.answers.append(answer)
        self.gains.append(self.known_gain)
        if answer is True:
            stream = self.call(residual, stream, f, self.known_gain)
        elif answer is not False:
            stream = run_some(self, f, answer)
        stream = self.decider.after(self, stream)
        if self.keeps_streams:
            self.streams.append(stream)
        self.stream = self.known_gain = None   # Whoever keeps the Trip need not keep them.
        return stream

    def checked(self, answer):   # A mistake in a decider of yours is told here, not deep inside.
        if answer is True or answer is False:
            return answer
        who, shape = type(self.decider).__name__, tuple(self.shape)
        if not torch.is_tensor(answer) or answer.dtype != torch.bool or answer.shape != shape:
            found = f"{answer.dtype} {tuple(answer.shape)}" if torch.is_tensor(answer) else answer
            hint = "; is a return missing?" if answer is None else ""
            raise Mistake(f"{who} returned {found}, and not True, False or bools {shape}{hint}")
        if not self.residual.can_skip:
            raise Mistake(f"{who} lets tokens skip, which {type(self.residual).__name__} can't")
        return answer

    def gain(self):
        if not self.residual.knows_gain:
            raise Mistake(f"{type(self.residual).__name__} knows no gain; use --residual nag, or "
                          f"set knows_gain = True if it has a gain(stream)")
        if self.known_gain is None:   # It is computed once a sublayer.
            self.known_gain = self.residual.gain(self.stream)
        return self.known_gain

    def loss(self, loss, targets):
        """In training: the mean cross entropy -> what is to become small. --gain_cost (it is ours)
        is 0 in the first 30 % of a training, and grows until 90 %: before anything is learned,
        turning is no use, so whole sublayers would come below the threshold. A token that skips a
        sublayer teaches its gain nothing, so many of them would not come back."""
        self.cross_entropy = loss.detach()
        if self.supervises:   # The head reads the stream after each block, not just after the last.
            after_blocks = self.streams[2:-1:2]   # streams[0] is the embedding's.
            losses = [cross_entropy(self.model.head(stream), targets) for stream in after_blocks]
            loss = sum([*losses, loss]) / (len(losses) + 1)
        if self.pays:
            cost = self.model.config.gain_cost * ramp(self.progress, 0.3, 0.9)
            loss = loss + cost * self.mean_gain()
        return loss + self.decider.loss(self)

    # What a pass has noted, when it is over

    def mean_gain(self):   # mean |gain| of all tokens and places; None if nobody has asked for any
        known = [gain.abs().mean() for gain in self.gains if gain is not None]
        return sum(known) / len(known) if known else None

    def who_ran(self):   # -> bools (places, B, T)
        everyone = torch.ones(self.shape, dtype=torch.bool, device=self.model.device)
        return torch.stack([everyone & answer for answer in self.answers])

    def skipped(self, last=False):   # -> the share of all runs. last: of each last token only
        if all(answer is True for answer in self.answers):   # Below, item would wait for a GPU.
            return 0.0
        who = self.who_ran()[:, :, -1:] if last else self.who_ran()
        return 1 - who.double().mean().item()

def needed_trip(model, progress=1.0):
    """-> a Trip if a pass of this model needs one, because tokens may skip, or a flag has a cost;
    else None"""
    has_cost = model.config.gain_cost > 0 or model.config.deep_supervision
    needs_one = type(model.decider) is not Decider or model.training and has_cost
    return Trip(model, progress=progress) if needs_one else None

def places_of(model, block):
    """The places, from 1, of the sublayers of a block, numbered from 0: attention, MLP; and again
    those two for each further run, if --repeat runs it several times"""
    runs = [run for run, number in enumerate(model.order) if number == block]
    return [place for run in runs for place in (2 * run + 1, 2 * run + 2)]

class ByGain(Decider):
    """A token skips a sublayer if its |gain| is below a threshold. NAG's gain is the tangent of an
    angle: 0.05 is 3 degrees.

        gain:rate=0.25    the share of all runs to skip. In training, one threshold for all
                          sublayers follows this quantile of all gains. It is stored with the
                          weights, so in sampling each token is judged by itself. The share grows
                          from 0, at 10 % of a training, to this, at 30 %. (From the start, whole
                          sublayers would be skipped before they have learned anything.)
        gain:below=0.05   this threshold. With a --gain_cost, gains learn to come below it.

    Differs from the paper: of its way to a threshold we know summaries only. gain:below is ours."""
    allowed = dict(rate=(0, 0.95), below=(0, 100))
    needs_skipping = needs_gain = True

    def __init__(self, config, rate=0.0, below=0.0):
        super().__init__(config)
        if (rate > 0) == (below > 0):
            raise ValueError("--mod gain: needs a rate, or below, such as gain:rate=0.25")
        self.rate = rate   # At first the threshold is 0, and nobody skips.
        self.register_buffer("threshold", torch.tensor(below), persistent=rate > 0)

    def forward(self, trip):
        # A comparison has no gradient: gains learn from the tokens that run, and from their cost.
        return trip.gain().abs().squeeze(-1) >= self.threshold

    @torch.no_grad()
    def after_iteration(self, trips, mean_of_all):
        if self.rate == 0:
            return
        # One for each part of a batch. Their mean is the same, whichever process has which part.
        quantiles = []
        for trip in trips:
            gains = torch.cat([gain for gain in trip.gains if gain is not None]).abs().flatten()
            rate = self.rate * ramp(trip.progress, 0.1, 0.3)
            k = max(1, round(rate * len(gains)))
            quantiles.append(gains.kthvalue(k).values.item())
        quantile = mean_of_all(sum(quantiles) / len(quantiles))
        step = 0.2 if self.threshold > 0 else 1.0   # a running mean over about five iterations
        self.threshold += step * (quantile - self.threshold)

class Coins(Decider):
    """coins:rate=0.25: a coin for each token and each sublayer, in training and after it. This is a
    control: a decider that looks at tokens must do better."""
    allowed = dict(rate=(0, 0.95))
    needs_skipping = True

    def __init__(self, config, rate=0.25):
        super().__init__(config)
        self.rate = rate

    def forward(self, trip):
        return torch.rand(trip.shape, device=trip.model.device) >= self.rate

class Router(Decider):
    """router:rate=0.25 (Raposo et al. 2024, arXiv:2404.02258). Blocks 2, 4, 6, .. have a router, a
    linear map. It gives each token a weight, and the tokens of a sequence with the largest weights
    run the block. What the block changes is multiplied by the weight: in this way a router learns.

    Which weights are the largest depends on later tokens, and in sampling there are none yet. So
    outside of training, tokens with a weight above 0 run the block. A loss of its own teaches the
    router to give just the chosen tokens a weight above 0.
    Differs from the paper: a router reads unit(x), because x has another size in each block."""
    allowed = dict(rate=(0.001, 0.45))
    needs_skipping = needs_tensor = True
    skippers_make_keys = False   # as in the paper

    def __init__(self, config, rate=0.25):   # of all runs, so twice that in blocks with a router
        super().__init__(config)
        order = block_order(config)   # --repeat runs some blocks several times.
        n_routed = sum(number % 2 for number in order)
        if n_routed <= rate * len(order):
            raise ValueError(f"--mod {config.mod}: only {n_routed} of {len(order)} blocks have a "
                             f"router, too few for this rate; give a lower one, or more blocks")
        self.share_that_runs = 1 - rate * len(order) / n_routed
        self.routers = nn.ModuleList(
            [nn.Linear(config.n_embd, 1, bias=False) for _ in range(config.n_layer // 2)])
        for i, router in enumerate(self.routers):
            std, name = first_std(config, "router", config.n_embd), f"decider.routers.{i}"
            nn.init.normal_(router.weight, std=std, generator=seeded(config, name))

    def forward(self, trip):
        block, x, notes = trip.residual.block, trip.stream, trip.notes
        if block % 2 == 1:
            return True
        if "runs" not in notes:   # at its attention, or, if that is removed, at its MLP
            weight = self.routers[block // 2 - 1](unit(x))   # (B, T, 1)
            trip.decider_flops += 2 * x.shape[-1]
            runs = weight > 0
            if trip.model.training:
                best = weight.topk(max(1, round(self.share_that_runs * x.shape[1])), dim=1).indices
                runs = torch.zeros_like(runs).scatter(1, best, True)
            loss = F.binary_cross_entropy_with_logits(weight, runs.to(weight.dtype))
            notes.setdefault("losses", []).append(loss)
            notes.update(runs=runs.squeeze(-1), before=x, weight=weight)
        return notes["runs"]

    def after(self, trip, stream):
        notes, is_mlp = trip.notes, trip.place % 2 == 0
        if is_mlp and "runs" in notes:   # A block with a router is over.
            del notes["runs"]
            # Where a token has skipped, its stream is still that of before.
            stream = notes["before"] + notes["weight"] * (stream - notes["before"])
        return stream

    def loss(self, trip):
        losses = trip.notes.get("losses", [0.0])
        return 0.01 * sum(losses) / len(losses)

# What --mod can be. Yours goes here, too: a class with a forward(trip).
DECIDERS = {"all": Decider, "gain": ByGain, "router": Router, "coins": Coins}

def make_decider(config):
    return make("--mod", DECIDERS, config.mod, config)

def run_some(trip, f, runs):
    """-> the stream after a sublayer f that only some tokens run. runs: bools (B, T)"""
    residual, stream, gain, call = trip.residual, trip.stream, trip.known_gain, trip.call
    count = int(runs.sum())
    if count == runs.numel():
        return call(residual, stream, f, gain)
    is_attention, kv_of_all = isinstance(f, AttentionOfPass), None
    if is_attention and trip.decider.skippers_make_keys:   # In a cache, they are kept.
        kv_of_all = keys_of_all(f, input_of_f(residual, stream, gain))
    if count == 0:
        return stream
    some = SomeTokens(runs)
    if is_attention:   # An MLP treats each token by itself, and never knows that there were others.
        f = partial(attention_of_some, f, some, kv_of_all)
        call = call_residual   # Its shapes vary too much to be compiled.
    if gain is not None:
        gain = some.gather(gain)
    return some.put(stream, call(residual, some.gather(stream), f, gain))

class Stop(Exception):
    pass

def input_of_f(residual, stream, gain=None):
    """-> what f would get of all tokens, (B, T, C): the rule runs until it calls f."""
    def stop(x):
        raise Stop(x)
    try:
        call_residual(residual, stream, stop, gain)
    except Stop as stopped:
        return stopped.args[0]

def map_stream(function, *streams):
    """Applies a function to each tensor of a stream, or of several streams of one form: a tensor,
    or a tuple, list or dict of such"""
    first = streams[0]
    if torch.is_tensor(first):
        return function(*streams)
    if isinstance(first, dict):
        return {key: map_stream(function, *(each[key] for each in streams)) for key in first}
    parts = [map_stream(function, *each) for each in zip(*streams)]
    return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)   # NamedTuple

class SomeTokens:
    """Where the N tokens that run a sublayer are in a batch. An example:

        runs [[1, 0, 1, 1],    sequence  0 0 0 1
              [0, 1, 0, 0]]    position  0 2 3 1   in their sequences
                               index     0 2 3 5   among all B T tokens
                               column    0 1 2 0   among those of their sequences that run"""
    def __init__(self, runs):
        self.runs = runs
        self.sequence, self.position = runs.nonzero().unbind(1)
        self.index = self.sequence * runs.shape[1] + self.position
        self.column = runs.cumsum(1).flatten()[self.index] - 1

    # index_select and index_copy are faster in the backward pass than x[index], which adds up.

    def gather(self, stream):   # tensors (B, T, ...) -> (N, ...)
        return map_stream(lambda x: x.flatten(0, 1).index_select(0, self.index), stream)

    def put(self, stream, new):   # tensors (B, T, ...) -> the same, but new (N, ...) where one runs
        def put_one(x, new_x):
            return x.flatten(0, 1).index_copy(0, self.index, new_x).view_as(x)
        return map_stream(put_one, stream, new)

    def spread(self, x):   # (N, ...) -> (B, T, ...), zero at the tokens that skip
        return self.put(x.new_zeros(*self.runs.shape, *x.shape[1:]), x)

    def in_rows(self, x, fill):   # (N, ...) -> (B, n, ...), filled up to the n of the fullest row
        size = len(self.runs), int(self.runs.sum(1).max()), *x.shape[1:]
        return x.new_full(size, fill).index_put((self.sequence, self.column), x)

def attention_of_some(f, some, kv_of_all, x):
    """x (N, C): what an AttentionOfPass f gets of the tokens that run it -> their updates (N, C).
    kv_of_all: what keys_of_all returns; None: those that skip have no keys, and nobody sees them"""
    attn, rotation = f.attn, f.rotation[some.position]
    if kv_of_all is None:
        q, k, v = attn.c_attn(x).chunk(3, dim=-1)
        k, v = some.spread(attn.turned(k, rotation)), some.spread(attn.heads(v))
        k, v, mask = with_older(f, k, v, some.runs)
    else:
        q = attn.c_attn.times(x, attn.c_attn.weight[:x.shape[-1]])
        k, v, mask = kv_of_all
    sees = mask.expand(len(some.runs), -1, -1)[some.sequence, some.position]   # (N, S)
    # What fills a row up sees all keys, since a query without keys is computed otherwise on other
    # devices. Nobody uses what it gets.
    q = some.in_rows(attn.turned(q, rotation), fill=0)
    out = attend(q, k, v, some.in_rows(sees, fill=True))[some.sequence, some.column]
    return attn.c_proj(out.flatten(-2)).to(x.dtype)

def keys_of_all(f, x):
    """x (B, T, C): what f would get of all tokens -> see with_older"""
    attn = f.attn
    k, v = attn.c_attn.times(x, attn.c_attn.weight[x.shape[-1]:]).chunk(2, dim=-1)
    return with_older(f, attn.turned(k, f.rotation), attn.heads(v))

def with_older(f, k, v, has_key=True):
    """k, v (B, T, n_head, head_size) of the newest tokens; has_key: which of them have any, bools
    (B, T), or True -> k, v of all S tokens so far, and a mask (B or 1, T, S) as in attend"""
    if f.store is not None:
        return f.store(k, v, has_key)
    if has_key is True:
        has_key = torch.ones(1, k.shape[1], dtype=torch.bool, device=k.device)
    return k, v, causal_mask(has_key, k.shape[1])

# ==================================================================================== part 4: tools

def hidden_units(config, number):
    """Those of the MLP in block 0 .. L - 1. With --taper, they go from taper_start to taper_end,
    and their mean stays (but for rounding). cosine: arXiv:2606.23670. linear: after CascadeFormer
    (arXiv:2606.26538), whose own widths are unknown."""
    share = 2 / 3 if config.activation == "swiglu" else 1   # It has three matrices, and not two.
    hidden = max(1, round(config.mlp_ratio * config.n_embd * share))
    if config.taper == "none":
        return hidden
    depth = number / (config.n_layer - 1) if config.n_layer > 1 else 0.5   # 0 .. 1
    if config.taper == "cosine":
        depth = (1 - math.cos(math.pi * depth)) / 2
    width = config.taper_start + (config.taper_end - config.taper_start) * depth
    mean = (config.taper_start + config.taper_end) / 2
    return 8 * max(1, round(width / mean * hidden / 8))   # Multiples of 8 are fast.

def block_order(config):
    """The blocks, numbered from 0, in the order in which they run. See --repeat."""
    numbers = list(range(config.n_layer))
    if not config.repeat:
        return numbers
    found = re.fullmatch("([0-9]{1,6})(?:-([0-9]{1,6}))?:([0-9]{1,3})", config.repeat)
    if found:
        # Here blocks have the numbers 1 .. L, as in all flags.
        first, last, count = int(found[1]), int(found[2] or found[1]), int(found[3])
        is_possible = 1 <= first <= last <= config.n_layer
        if is_possible and 1 <= count * (last + 1 - first) <= 512:
            return numbers[:first - 1] + numbers[first - 1:last] * count + numbers[last:]
    raise ValueError(f"--repeat {config.repeat}: say blocks from 1 to {config.n_layer}, and how "
                     f"often, such as 1:2 or 1-{config.n_layer}:2 (512 runs at most)")

def num_params(model):
    return sum(p.numel() for p in model.parameters())

def flops_per_token(model, trip=None, T=None):
    """FLOPs of matrix products in a forward pass, per token. A training step has three times as
    many. Scores of later tokens count, too. trip: one that is over, which knows what ran; None: all
    tokens run all sublayers; T: the context length, if it isn't that of the trip, or block_size"""
    T = T or (trip.shape[1] if trip else model.config.block_size)
    n_predictions = len(model.order) if model.training and model.config.deep_supervision else 1
    total = model.ends.flops() + n_predictions * 2 * model.lm_head.weight.numel()
    total += trip.decider_flops if trip else 0.0
    for run, number in enumerate(model.order):
        block, i = model.blocks[number], 2 * run   # Lists count from 0.
        for i, residual, sublayer in ((i, block.attn_residual, block.attn),
                                      (i + 1, block.mlp_residual, block.mlp)):
            answer, gain = (trip.answers[i], trip.gains[i]) if trip else (True, None)
            makes_keys = trip is None or trip.decider.skippers_make_keys
            total += sublayer_flops(residual, sublayer, T, answer, gain, makes_keys)
    return total

def sublayer_flops(residual, sublayer, T, answer=True, gain=None, skippers_make_keys=True):
    """The same of one sublayer and its residual. answer: who ran; gain: None, or known of all"""
    matrices = sum(2 * p.numel() for p in sublayer.parameters() if p.dim() == 2)
    ran = float(answer is True)   # the share of the tokens
    if torch.is_tensor(answer):
        ran = answer.float().mean().item()
    total = residual.flops() * (ran if gain is None else 1.0)
    if isinstance(sublayer, MLP):
        return total + ran * matrices
    keys = queries = ran
    if torch.is_tensor(answer):
        queries = answer.float().mean(1).max().item()   # as many in all sequences: see in_rows
        if skippers_make_keys and ran < 1:   # input_of_f computes what f gets, of all tokens.
            keys = 1.0
            total += residual.flops_before_f() if gain is None else 0.0
    # Half of an attention's matrices make queries and updates, and half keys and values. Then come
    # scores, and sums of values.
    return total + (ran + keys) / 2 * matrices + queries * 4 * T * residual.config.n_embd

def for_training(model, wrapped=None, compiles=False, checkpoints=False, **options):
    """-> what is called in place of a model in a training: (idx, targets, trip=None) -> None, loss.
    The model itself stays as it is, for evaluation and sampling, where shapes change all the time.

    wrapped: the model, or its DistributedDataParallel; checkpoints: saves memory, as sublayers run
    again in the backward pass; options: those of torch.compile"""
    wrapped = wrapped or model
    torch._dynamo.config.recompile_limit = 64 + 4 * len(model.order)   # 8 would be too few.
    if compiles and not checkpoints and type(model.decider) is Decider:
        return torch.compile(wrapped, **options)   # A pass is one graph (with DDP, a few).
    if not compiles and not checkpoints:
        return wrapped
    call = call_residual
    if compiles:   # All sublayers share a graph, unless a number in their rules differs.
        call = torch.compile(call, **options)
    if checkpoints:
        call = partial(checkpoint, call, use_reentrant=False)

    def run_pass(idx, targets, trip=None):
        trip = trip or Trip(model)
        trip.call = call
        return wrapped(idx, targets, trip=trip)

    return run_pass

def config_problems(config):
    """-> sentences about what is wrong with a config. One wrong field may hide other problems."""
    if problems := field_problems(config):   # What follows needs values that are in their ranges.
        return problems
    try:
        order = block_order(config)
        decider = make_decider(config)
        ends = make_residual(config, 2 * config.n_layer + 1)
        stream = ends.start(torch.ones(1, 1, config.n_embd))
    except ValueError as error:
        return [str(error)]
    misfit = None
    if decider.needs_tensor and not (torch.is_tensor(stream) and stream.dim() == 3):
        misfit = "its stream isn't one tensor; use pre"
    if decider.needs_skipping and not ends.can_skip:
        misfit = "its tokens can't skip; use pre or nag"
    if decider.needs_gain and not ends.knows_gain:
        misfit = "it knows no gain; use nag"
    n_embd, n_head, name, no_triton = config.n_embd, config.n_head, config.residual, why_no_triton()
    rules = [   # (is it wrong?, a sentence)
        (n_embd % (2 * n_head),
         f"--n_embd {n_embd}: must be an even multiple of --n_head {n_head}"),
        (config.norm != "rms" and not ends.has_norm,
         f"--norm {config.norm}: --residual {name} has no norm for --norm to choose; use pre"),
        (config.kernels == "on" and no_triton, f"--kernels on: {no_triton}"),
        (len(order) > config.n_layer and ends.stream_grows,
         f"--repeat: the stream of --residual {name} is made for 2L updates; use pre"),
        (misfit, f"--mod {config.mod}: not with --residual {name}: {misfit}"),
        (config.gain_cost and not ends.knows_gain,
         f"--gain_cost {config.gain_cost}: --residual {name} knows no gain to pay for; use nag")]
    return [sentence for is_wrong, sentence in rules if is_wrong]
