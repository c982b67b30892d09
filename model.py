"""
A GPT in which the residual connection is a part that you can swap.

A Transformer is a chain of sublayers: attention, MLP, attention, MLP, and so on. Each reads one
vector per token and adds something to it. This running sum is called the stream. The rule by which
a sublayer reads the stream and writes to it is the residual connection. Here each rule is one small
class, and everything else is shared, so that you can read them side by side and compare them
fairly.

The whole model is this loop:

    stream = ends.start(embedding)
    for residual, f in sublayers:
        stream = residual(stream, f)     # PreNorm, the usual rule: stream + f(norm(stream))
    logits = head(ends.finish(stream))

There are B sequences of T tokens. A token has C = n_embd numbers in the stream, and there are
V = vocab_size different tokens. Our words, in all files:

    stream     what flows through the depth. Its form is up to the residual: one tensor (B, T, C) in
               PreNorm, and a tuple of several things in some others
    sublayer   an attention or an MLP; a residual sees it as a function f: (..., C) -> (..., C)
    update     what f returns
    block      an attention and the MLP after it. A model has L = n_layer blocks, 2L sublayers.
               Blocks have the numbers 0 .. L - 1 in the code, and 1 .. L in flags and figures.
               (block_size is unrelated: as in nanoGPT, it is the longest context.)
    residual   the rule that makes the next stream from the stream and f
    runner     calls the residuals of one pass. Unless tokens skip sublayers (part 3),
               runner.run(stream, residual, f) is residual(stream, f).
    l          the number of a residual, 1 .. 2L: 1 and 2 are those of the first block, 3 and 4 of
               the next one. Odd ones go with an attention, even ones with an MLP.
    ends       one more residual, l = 2L + 1. It has no sublayer: it starts and finishes the stream.

The file has four parts:

    1  a GPT       config, attention, MLP, PreNorm, blocks, first weights, the model, sampling
    2  residuals   all the other rules; which one runs is the flag --residual
    3  skipping    tokens that skip sublayers: who decides, and how only the rest is computed
    4  tools       widths, order, rare norms, compiling, FLOPs, checks of a config

Part 1 is a whole GPT, in which the rule is PreNorm. Read it from top to bottom, and the other parts
when you need them. If you know nanoGPT, these are new: RoPE in place of wpe, RMSNorm, normalised
queries and keys with another scale, a head that is not tied to the embedding, other first weights,
no biases, no dropout, and a cache in sampling. To try a rule of your own, copy class Template, and
add it to RESIDUALS (end of part 2).
"""
import math
import zlib
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

from flags import flag

# Only parts 2 to 4 use these.
import itertools
import re
from typing import Callable, NamedTuple

from torch.utils.checkpoint import checkpoint

from flags import Mistake, field_problems, option_defaults, read_options
from kernels import TINY, depth_sum, nag_write, use_triton, why_no_triton

# =================================================================================== part 1: a GPT

@dataclass
class GPTConfig:
    """The settings of a model. flag(default, help, lowest, highest) makes a field that is a flag of
    train.py, too. (group: --help begins a section there.)"""
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
    init: Literal["width", "gpt2", "embedding"] = flag("width",
        "first weights: by fan-in; all with std 0.02; or so, but the embedding's with std 3")
    seed: int = flag(1337, "of the first weights and of the data order", 0, 2 ** 31 - 1)
    # With these values, the others change nothing.
    kernels: Literal["auto", "on", "off"] = flag("auto", "Triton kernels; auto: on CUDA")
    taper: Literal["none", "linear", "cosine"] = flag(
        "none", "how MLPs change in width, from taper_start to taper_end", group="depth and width")
    taper_start: float = flag(1.5, "relative width of the first block", 0.01, 100)
    taper_end: float = flag(0.5, "relative width of the last block", 0.01, 100)
    repeat: str = flag("", "2:3 runs the second block three times; 2-3:2 runs blocks 2 3 2 3")
    deep_supervision: bool = flag(False, "training: mean loss after each block")
    mod: str = flag("all", "which tokens run a sublayer: all, gain, router or coins; options "
                    "follow it: gain:below=0.05", group="skipping")
    gain_cost: float = flag(0.0, "for nag: adds this x mean |gain| to the loss, from 30 % of a "
                            "training on, and in full from 90 % on; a gain is how much a sublayer "
                            "changes a token", 0, 1000)

    def problems(self):
        """A sentence for each thing that is wrong with these values: end of part 4"""
        return config_problems(self)

# ------------------------------------------------------------------------------------------- norms

EPS = 1e-6   # keeps a norm from dividing by 0. (torch's own, by dtype, is 8e-3 in bfloat16.)

def unit(x, eps=EPS):
    """x / rms(x): the direction of x, with rms 1"""
    return F.rms_norm(x, x.shape[-1:], eps=eps)

def make_norm(config):
    """The norm that --norm names, a module: (..., C) -> (..., C)"""
    if config.norm == "rms":
        return nn.RMSNorm(config.n_embd, EPS)
    if config.norm == "layer":
        return nn.LayerNorm(config.n_embd, EPS, bias=False)
    if config.norm == "none":
        return nn.Identity()
    return SingleNorm() if config.norm == "single" else DynamicTanh(config)   # part 4

# --------------------------------------------------------------------------------------- attention

class CastLinear(nn.Linear):
    """nn.Linear without a bias, which casts its input and its weight to dtype. None: to that of the
    input. In a training on a GPU, it is bfloat16 (GPT.compute_in), which is much faster. Weights
    and the stream stay float32: in bfloat16, the rounding errors of 2L additions would add up."""
    dtype = None

    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out, bias=False)

    def times(self, x, weight):
        """x @ weight.T. weight: self.weight, or something that is made of it"""
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
    multiplied by cos + i sin, of rotation (..., 1, head_size / 2, 2). In float32: bfloat16 has no
    complex numbers."""
    points = torch.view_as_complex(x.to(rotation.dtype).unflatten(-1, (-1, 2)))
    turned = points * torch.view_as_complex(rotation)
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
    """Causal multi-head attention with RoPE and normalised queries and keys"""
    def __init__(self, config):
        super().__init__()
        self.n_head, self.head_size = config.n_head, config.n_embd // config.n_head
        # C rows for q, then C for k, and C for v. (If you change this, for grouped queries, say,
        # change attention_of_some and keys_of_all, in part 3, and flops_per_token, in part 4, too.)
        self.c_attn = CastLinear(config.n_embd, 3 * config.n_embd)
        self.c_proj = CastLinear(config.n_embd, config.n_embd)

    def heads(self, x):
        """(..., C) -> (..., n_head, head_size)"""
        return x.unflatten(-1, (self.n_head, self.head_size))

    def queries(self, q, rotation):
        """q (..., C) of c_attn -> (..., n_head, head_size), normalised and rotated. rotation: the
        rows of rotation_table for the positions of these tokens"""
        return rotate(unit(self.heads(q)), rotation)

    def keys(self, k, rotation):
        """The same. (nGPT, in part 2, has one factor for queries and another one for keys.)"""
        return rotate(unit(self.heads(k)), rotation)

    def forward(self, x, rotation, store=None):
        """x (B, T, C) -> (B, T, C). store: None, or that of a KVCache, if x are the newest tokens
        only"""
        q, k, v = self.c_attn(x).chunk(3, dim=-1)
        q, k, v = self.queries(q, rotation), self.keys(k, rotation), self.heads(v)
        mask = None
        if store is not None:   # Keeps them, and returns those of all tokens so far.
            k, v, mask = store(k, v)
        return self.c_proj(attend(q, k, v, mask).flatten(-2)).to(x.dtype)

class AttentionInPass:
    """An attention as a residual sees it, a function of x alone: for tokens at certain positions,
    and, in sampling, with what stores its keys and values"""
    def __init__(self, attn, rotation, store):
        self.attn, self.rotation, self.store = attn, rotation, store

    def __call__(self, x):
        return self.attn(x, self.rotation, self.store)

# --------------------------------------------------------------------------------------------- MLP

class MLP(nn.Module):
    def __init__(self, config, hidden):
        super().__init__()
        self.activation = config.activation
        # swiglu multiplies two halves, so it needs twice the rows.
        rows = 2 * hidden if config.activation == "swiglu" else hidden
        self.c_fc = CastLinear(config.n_embd, rows)
        self.c_proj = CastLinear(hidden, config.n_embd)

    def activate(self, x):   # In nGPT, in part 2, it scales x first.
        if self.activation == "gelu":
            return F.gelu(x)
        if self.activation == "relu2":
            return F.relu(x).square()
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value

    def forward(self, x):
        """x (..., C) -> (..., C)"""
        return self.c_proj(self.activate(self.c_fc(x))).to(x.dtype)

# ------------------------------------------------------------------------------------ the residual

class Residual(nn.Module):
    """PreNorm, the rule of GPT-2 and of most models since. All other rules are derived from it. A
    model makes one for each sublayer l = 1 .. 2L, and one more, `ends`, with l = 2L + 1."""
    attention, mlp = Attention, MLP   # the classes of the sublayers; nGPT has its own
    has_norm = True                   # False: a rule without a self.norm

    def __init__(self, config, l):
        super().__init__()
        self.config, self.l = config, l
        self.is_end = l == 2 * config.n_layer + 1   # It is `ends`, and has no sublayer.
        self.norm = make_norm(config) if self.has_norm else nn.Identity()

    def forward(self, stream, f):
        """A stream, and a sublayer f as a function -> the next stream. A rule treats each token by
        itself, so that some tokens can skip (part 3). f may look at others."""
        return stream + f(self.norm(stream))

    # --- Of `ends`: its norm is ln_f in GPT-2.

    def start(self, embedding):
        """The embedding (B, T, C) -> the first stream"""
        return embedding

    def finish(self, stream):
        """The last stream -> what the head reads, (B, T, C)"""
        return self.norm(self.as_tensor(stream))

    def as_tensor(self, stream):
        """-> one vector per token, (B, T, C). PreNorm's stream is that already. If the stream of
        another rule is a tuple, it is the first thing in it."""
        return stream[0] if isinstance(stream, tuple) else stream

    def head_weight(self, weight):
        """The weight of the head (V, C) -> the matrix that makes the logits. (NAG normalises its
        rows.)"""
        return weight

    # --- Hooks for weights. Both are called under no_grad.

    def init_sublayer(self, sublayer):
        """Once, after the weights of an attention or MLP are drawn: may rescale them, because how
        large an update should be at first is up to the rule."""
        # As in GPT-2: the updates of 2L sublayers are added up, so each starts with a variance that
        # is 2L times smaller.
        sublayer.c_proj.weight.mul_((2 * self.config.n_layer) ** -0.5)

    def constrain(self, model):
        """Of `ends`, after the weights are drawn, and after each iteration of a training: may
        change weights. (nGPT brings all lengths back to 1.)"""

    # --- What parts 2 to 4 and train.py ask for. To read part 1, you can do without.

    allowed = {}           # range of each option; in Template: {"first": (0, 2)}, say
    own_lr = ()            # names of parameters that train with --gate_lr, not with --lr
    can_skip = True        # Can a token pass by a sublayer, with its stream as it is?
    knows_gain = False     # Is there a gain(stream), and forward(stream, f, gain=None)?
    stream_grows = False   # Has the stream more and more tensors with depth?

    def read(self, stream):
        """What f would read. If a token skips an attention, its key and value are made of this."""
        return input_of_f(self, stream)

    def flops(self):
        """Per token. Here: each 2-D parameter is a matrix that a token is multiplied with once."""
        return sum(2 * p.numel() for p in self.parameters() if p.dim() == 2)

# ----------------------------------------------------------------------------------------- blocks

class Block(nn.Module):
    """Two sublayers and their residuals. It has no forward: that of GPT runs the sublayers."""
    def __init__(self, config, number):
        super().__init__()
        kind = residual_kind(config)            # the class that --residual names: Residual
        hidden = hidden_units(config)[number]   # mlp_ratio * n_embd, or what --taper says
        self.attn = kind.attention(config)
        self.attn_residual = make_residual(config, 2 * number + 1)
        self.mlp = kind.mlp(config, hidden)
        self.mlp_residual = make_residual(config, 2 * number + 2)

    def pairs(self):
        return (self.attn_residual, self.attn), (self.mlp_residual, self.mlp)

# ---------------------------------------------------------------------------------- first weights

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
        if isinstance(module, (nn.Linear, nn.Embedding)):
            std = first_std(model.config, name, module.weight.shape[1])
            module.weight.normal_(std=std, generator=seeded(model.config, name))
    for block in model.blocks:
        for residual, sublayer in block.pairs():
            residual.init_sublayer(sublayer)
    constrain_weights(model)

@torch.no_grad()
def constrain_weights(model):
    """Again after each iteration: train.py calls it."""
    model.ends.constrain(model)

# -------------------------------------------------------------------------------------- the model

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
        self.order = block_order(config)      # the blocks 0 .. L - 1, or what --repeat says
        self.decider = make_decider(config)   # who skips sublayers: nobody, or what --mod says
        self.n_vocab = config.vocab_size      # tokens that it may say; train.open_run knows better
        init_weights(self)

    def forward(self, idx, targets=None, cache=None, runner=None):
        """idx (B, T) of token ids -> logits (B, T, V), and None. With targets (B, T): logits, and
        the loss in nats, which is the mean cross entropy, and in training what some flags add to
        it. cache: a KVCache, if idx are only the newest tokens; runner: a Runner, if you want to
        ask it afterwards what has happened"""
        runner = runner or Runner(self)
        stream = self.last_stream(idx, runner, cache)
        if targets is None:
            return self.head(stream), None
        logits, loss = self.logits_and_loss(stream, targets)
        if self.training:   # Flags such as --gain_cost add something: part 3.
            loss = runner.loss(loss, targets)
        return logits, loss

    def last_stream(self, idx, runner, cache=None):
        """The way through the depth: idx (B, T) -> the stream after the last sublayer"""
        past = 0 if cache is None else cache.length
        end = past + idx.shape[1]
        if end > self.config.block_size:
            raise ValueError(f"{end} tokens do not fit block_size {self.config.block_size}")
        if cache is not None:
            cache.length = end   # `store` counts back from here.
        stream = self.ends.start(self.wte(idx))
        runner.begin(idx.shape, stream)   # A pass begins. A Runner keeps its streams, if asked to.
        # runner.run(stream, residual, f) is residual(stream, f), unless tokens skip: part 3.
        for slot, number in enumerate(self.order):   # In a cache, each attention has a slot.
            block = self.blocks[number]
            store = None if cache is None else partial(cache.store, slot)
            attention = AttentionInPass(block.attn, self.rotation[past:end], store)
            stream = runner.run(stream, block.attn_residual, attention)
            stream = runner.run(stream, block.mlp_residual, block.mlp)
        return stream

    def head(self, stream):
        """A stream -> logits (B, T, V)"""
        x = self.ends.finish(stream)
        weight = self.ends.head_weight(self.lm_head.weight)   # In PreNorm it stays as it is.
        return self.lm_head.times(x, weight).to(x.dtype)

    def logits_and_loss(self, stream, targets):
        """A stream, and targets (B, T) -> logits (B, T, V), and their mean cross entropy"""
        logits = self.head(stream)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def walk(self, idx, runner=None):
        """idx (B, T) -> the streams of one pass, a list: that of the embedding, then the one after
        each sublayer. runner: a Runner, if you want to ask it afterwards, or to change who skips"""
        runner = runner or Runner(self)
        runner.keeps_streams = True
        self.last_stream(idx, runner)
        return runner.streams

    def generate(self, idx, max_new_tokens, **options):
        """idx (B, T) -> (B, T + max_new_tokens). The B texts have equal lengths, as there
        is no padding. It goes on after an end-of-text. options: those of new_tokens, below"""
        tokens = [token for token, _ in new_tokens(self, idx, max_new_tokens, **options)]
        return torch.cat([idx, *tokens], dim=1)

    def compute_in(self, dtype):
        """From now on, sublayers and head compute their products in this dtype."""
        for module in self.modules():
            if isinstance(module, CastLinear):
                module.dtype = dtype

    def residuals(self):
        """All 2L + 1 of them"""
        return [residual for block in self.blocks for residual, _ in block.pairs()] + [self.ends]

    @property
    def device(self):
        return self.rotation.device

# --------------------------------------------------------------------------------------- sampling

def causal_mask(has_key, n):
    """has_key (B or 1, S): bools, which of S tokens have a key -> bools (B or 1, n, S): which keys
    each of the n newest tokens sees, those up to its own"""
    all_keys = has_key[:, None].expand(-1, n, -1)
    return all_keys.tril(has_key.shape[1] - n)   # without those of later tokens

class KVCache:
    """Sampling makes one token after the other. What attentions have made of the earlier ones, keys
    and values, is kept here, so that only the newest token is computed."""
    def __init__(self, size):
        """size: how many tokens it has room for"""
        self.size = size
        self.length = 0   # how many tokens have come, with those that run through the model now
        self.slots = {}   # number of a slot: keys, values, and which tokens have a key

    def store(self, slot, k, v, has_key=True):
        """k, v (B, n, n_head, head_size): what an attention has made of the n newest tokens -> k, v
        of all S tokens so far, and a mask (B, n, S) as in attend. slot: 0, 1, .. for the attentions
        in the order of running; has_key: bools (B, n), if tokens skip it (part 3)"""
        n, room = k.shape[1], (len(k), self.size)
        if slot not in self.slots:
            self.slots[slot] = (k.new_zeros(*room, *k.shape[2:]), v.new_zeros(*room, *v.shape[2:]),
                                k.new_zeros(room, dtype=torch.bool))
        for old, new in zip(self.slots[slot], (k, v, has_key)):
            old[:, self.length - n:self.length] = new
        keys, values, have_key = (each[:, :self.length] for each in self.slots[slot])
        return keys, values, causal_mask(have_key, n)

def pick(logits, temperature=1.0, top_k=None, generator=None):
    """Draws a token id (B, 1) from logits (B, V)"""
    if temperature < 1e-6:
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature
    if top_k:
        best = logits.topk(min(top_k, logits.shape[-1]))
        logits = torch.full_like(logits, -math.inf).scatter(1, best.indices, best.values)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)

@torch.no_grad()
def new_tokens(model, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None,
               decider=None):
    """Continues idx (B, T). Call model.eval() first: some deciders decide otherwise in training.
    Yields each new token (B, 1), and the Runner of the pass that predicted it, which knows who has
    skipped. decider: says who skips; None: model.decider does. ValueError if idx has no token"""
    if idx.shape[1] == 0:
        raise ValueError("generate: idx has no token to go on from; give it an end-of-text, with "
                         "which each document begins")
    size = min(model.config.block_size, idx.shape[1] + max_new_tokens)
    cache = KVCache(size)
    missing = idx[:, -size:]   # what the cache doesn't have yet: at first the text, or its end
    for _ in range(max_new_tokens):
        runner = Runner(model, decider)
        logits, _ = model(missing, cache=cache, runner=runner)
        # Of the next token. The head may have more rows than there are tokens: train.py rounds up.
        logits = logits[:, -1, :model.n_vocab]
        token = pick(logits, temperature, top_k, generator)
        idx = torch.cat((idx, token), dim=1)
        yield token, runner
        if cache.length < size:
            missing = token
        else:   # It is full: a new one starts with the newer half.
            cache = KVCache(size)
            missing = idx[:, -max(1, size // 2):]

# ================================================================================ part 2: residuals

# All are derived from Residual, which is PreNorm. Each class stands alone (but DeepNorm is a Post).
# Read those that you care about. Whatever its paper says of first weights, a class without an
# init_sublayer has that of PreNorm, which divides c_proj by sqrt(2L).

class Template(Residual):
    """Copy me: PreNorm, but each sublayer has a learned number b that multiplies its updates.

    Rename the class, change the equation, and give it a key in RESIDUALS (end of part 2). A keyword
    argument of __init__ becomes an option: --residual template:first=0.5. With own_lr = ("b",), b
    trains at the learning rate --gate_lr. An init_sublayer that does nothing lets c_proj start as
    large as all other matrices. Use nn.Parameter for what you add: the weights of an nn.Linear are
    drawn anew after __init__. A constant that depends on l must be a tensor (LayerNormScaling shows
    how), because torch.compile makes a graph for each number. With first=0 this is SkipInit
    (arXiv:2002.10444), with a norm."""
    def __init__(self, config, l, first=1.0):
        """first: the value of b before training"""
        super().__init__(config, l)
        if not self.is_end:   # model.ends only starts and finishes, so it needs no b.
            self.b = nn.Parameter(torch.tensor(float(first)))

    def forward(self, x, f):
        return x + self.b * f(self.norm(x))

def centred(x):
    return x - x.mean(-1, keepdim=True)

class NAG(Residual):
    """Norm-AGnostic residual (Figliolia and Millidge 2026, arXiv:2606.16112, eqs. 3-24).

    In PreNorm the stream gets longer with depth, so later updates change it less and less. NAG
    keeps its length apart. The stream is a pair: a direction (B, T, C), which has rms 1, and the
    log of the length (rms) that goes with it, (B, T, 1). A sublayer turns the direction by the
    angle atan(gain), towards the part of its update that is orthogonal to the direction:

        direction <- (direction + gain side / rms(side)) / sqrt(1 + gain^2)     side: that part
        log_length <- log_length + 1/2 log(1 + gain^2)

    The gain depends on the direction alone, so it is known *before* the sublayer runs. A token that
    would hardly turn may as well skip it: this is Mixture-of-Depths without a router. (Of how the
    paper decides who skips we know summaries only. Our rule is ByGain, in part 3.)"""
    has_norm = False
    knows_gain = True
    own_lr = "alpha", "beta", "preferred", "bias", "votes", "log_scale"
    allowed = dict(directions=(1, 10000), power=(-8, 8))

    def __init__(self, config, l, directions=32, power=0.5):
        """directions: how many are preferred; power: alpha of sublayer l starts at l ** -power"""
        super().__init__(config, l)
        if self.is_end:   # The embedding is multiplied by exp(log_scale), g in eq. 18.
            self.log_scale = nn.Parameter(torch.tensor(first_log_scale(config, power)))
            return
        preferred = torch.randn(directions, config.n_embd, generator=seeded(config, f"w {l}"))
        self.preferred = nn.Parameter(preferred * config.n_embd ** -0.5)   # w in the paper
        self.bias = nn.Parameter(torch.zeros(directions))                  # b
        self.votes = nn.Parameter(torch.zeros(directions))                 # p, before its softmax
        self.alpha = nn.Parameter(torch.tensor(l ** -power))               # eqs. 23, 24
        self.beta = nn.Parameter(torch.tensor(math.log(math.e - 1)))       # softplus(beta) is 1

    def start(self, x):
        x = centred(x)   # Updates are centred, too, so a mean would stay for ever.
        length = x.square().mean(-1, keepdim=True).clamp_min(TINY).sqrt()
        return x / length, length.log() + self.log_scale

    def gain(self, stream):
        """alpha m (eq. 13). m in (0, 1] says how near the direction is to preferred ones, of which
        each has a weight, its vote:

            m = (sum_i softmax(votes)_i sigmoid(preferred_i . direction + bias_i)) ^ softplus(beta)
        """
        near = F.linear(stream[0], self.preferred, self.bias).sigmoid()   # (..., directions)
        mean = (near @ self.votes.softmax(0))[..., None]
        m = mean.clamp_min(EPS) ** F.softplus(self.beta)   # At 0 its slope could be infinite.
        return self.alpha * m

    def forward(self, stream, f, gain=None):
        direction, log_length = stream
        if gain is None:
            gain = self.gain(stream)
        # The kernel is this class's write, on a GPU. (A class of yours may have another one.)
        has_kernel = type(self) is NAG and use_triton(direction, self.config.kernels)
        write = nag_write if has_kernel else self.write
        return write(direction, log_length, f(direction), gain)

    def write(self, direction, log_length, update, gain):
        """-> the next stream"""
        side = self.side(update, direction)
        size = gain * (side.square().mean(-1, keepdim=True) + TINY).rsqrt()   # eq. 12: gain / rms
        direction = torch.addcmul(direction, side, size)                      # eq. 14: + size side
        direction = direction * (1 + gain.square()).rsqrt()                   # eq. 16: rms 1 again
        log_length = log_length + 0.5 * torch.log1p(gain.square())            # eqs. 15, 17
        return direction, log_length

    def side(self, update, direction):
        """The part of an update that is orthogonal to the direction (eqs. 10, 11)"""
        update = centred(update)
        along = (update * direction).mean(-1, keepdim=True)
        return update - direction * along

    def read(self, stream):
        return stream[0]

    def as_tensor(self, stream):
        direction, log_length = stream
        return direction * log_length.exp()

    # A logit is length x cosine. The cosine is that between the direction and a row of the head. If
    # both have rms 1, it is their product / C, so `finish` divides by C.

    def finish(self, stream):
        direction, log_length = stream
        return direction * (log_length.exp() / self.config.n_embd)

    def head_weight(self, weight):
        return unit(centred(weight), eps=EPS ** 2)   # rms 1, also where a row is small

    def init_sublayer(self, sublayer):
        pass   # Only the direction of an update counts.

def first_log_scale(config, power):
    """NAG's first log_scale: one with which the first logits have the standard deviation LOGIT_STD.
    At 0 they would be nearly equal."""
    # A logit is length x cosine. The cosine of random vectors has the std C ** -0.5, so the last
    # stream needs this length:
    last_length = LOGIT_STD / config.n_embd ** -0.5
    # An embedding begins with this one, and all sublayers together multiply it by exp(growth).
    first_length = first_std(config, "wte", config.n_embd)
    growth = 0.0
    for number in block_order(config):
        for l in 2 * number + 1, 2 * number + 2:
            gain = 0.5 * l ** -power   # alpha m, and m starts at about 1/2
            growth += 0.5 * math.log1p(gain ** 2)
    return math.log(last_length / first_length) - growth

# ------------------------------------------------------------------------ PreNorm and its relatives

class Post(Residual):
    """PostNorm, the Transformer of 2017. The norm of the last sublayer is the final norm."""
    def __init__(self, config, l):
        super().__init__(config, l)
        if self.is_end:
            self.norm = nn.Identity()

    def forward(self, x, f):
        return self.norm(x + f(x))

class Peri(Residual):
    """Peri-LN (arXiv:2502.02732): the update is normalised, too."""
    def __init__(self, config, l, embed=False):
        """embed: normalise the embedding, too, as the paper does"""
        super().__init__(config, l)
        if self.is_end:
            self.norm_embedding = make_norm(config) if embed else nn.Identity()
        else:
            self.norm_update = make_norm(config)

    def start(self, x):
        return self.norm_embedding(x)

    def forward(self, x, f):
        return x + self.norm_update(f(self.norm(x)))

class Reordered(Residual):
    """OLMo 2 (arXiv:2501.00656): only the update is normalised."""
    def forward(self, x, f):
        return x + self.norm(f(x))

class LayerNormScaling(Residual):
    """LayerNorm Scaling (arXiv:2502.05795): 1 / sqrt(block), in place of a small c_proj. In an
    attention it reaches the values alone, because queries and keys are normalised anyway."""
    def __init__(self, config, l):
        super().__init__(config, l)
        # A tensor: with a number, torch.compile would make a graph for each l.
        self.register_buffer("scale", torch.tensor(block_of(l) ** -0.5), persistent=False)

    def forward(self, x, f):
        return x + f(self.scale * self.norm(x))

    def init_sublayer(self, sublayer):
        pass

def block_of(l):
    """Sublayers 1 and 2 are block 1, sublayers 3 and 4 block 2, ..."""
    return (l + 1) // 2

class DeepNorm(Post):
    """DeepNorm (arXiv:2203.00555): PostNorm with a larger stream. Updates stay bounded if c_proj,
    and what makes values and hidden units, starts small."""
    def __init__(self, config, l):
        super().__init__(config, l)
        self.scale = (2 * config.n_layer) ** 0.25

    def forward(self, x, f):
        return self.norm(self.scale * x + f(x))

    def init_sublayer(self, sublayer):
        small = (8 * self.config.n_layer) ** -0.25
        sublayer.c_proj.weight.mul_(small)
        if isinstance(sublayer, Attention):
            sublayer.c_attn.weight[2 * self.config.n_embd:].mul_(small)   # the rows of the values
        else:
            sublayer.c_fc.weight.mul_(small)

class MixLN(Residual):
    """Mix-LN (arXiv:2412.13795): the first blocks are PostNorm, the others PreNorm."""
    allowed = dict(alpha=(0, 1))

    def __init__(self, config, l, alpha=0.25):
        """alpha: share of the blocks that are PostNorm, rounded down"""
        super().__init__(config, l)
        self.is_post = block_of(l) <= int(alpha * config.n_layer + 1e-9)
        if self.is_end and alpha == 1:   # The last block has a norm at its end already.
            self.norm = nn.Identity()

    def forward(self, x, f):
        return self.norm(x + f(x)) if self.is_post else x + f(self.norm(x))

class ReZero(Residual):
    """ReZero (arXiv:2003.04887): no norm, and a learned number b that starts at 0. (Here each
    sublayer has its own. In the paper, both of a block share one. Ours divides the last stream by
    the std of the first embedding, 3, which no norm takes out.)"""
    has_norm = False

    def __init__(self, config, l):
        super().__init__(config, l)
        if not self.is_end:
            self.b = nn.Parameter(torch.tensor(0.0))

    def forward(self, x, f):
        return x + self.b * f(x)

    def finish(self, x):
        return x / first_std(self.config, "wte", self.config.n_embd)

class LayerScale(Residual):
    """LayerScale (arXiv:2103.17239): a learned number per channel"""
    def __init__(self, config, l, init=0.1):
        """init: its first value"""
        super().__init__(config, l)
        if not self.is_end:
            self.b = nn.Parameter(torch.full((config.n_embd,), init))

    def forward(self, x, f):
        return x + self.b * f(self.norm(x))

class CompleteP(Residual):
    """CompleteP (arXiv:2505.01618), but for its rule for AdamW's eps: a learning rate that is tuned
    at 6 blocks fits all depths."""
    def __init__(self, config, l):
        super().__init__(config, l)
        self.scale = 6 / config.n_layer

    def forward(self, x, f):
        return x + self.scale * f(self.norm(x))

    def init_sublayer(self, sublayer):
        sublayer.c_proj.weight.mul_(12 ** -0.5)   # PreNorm's factor at 6 blocks

# ------------------------------------------------------------------------ reading earlier sublayers

class Source(NamedTuple):
    value: torch.Tensor   # (B, T, C)
    scores: tuple         # what it scores in each of the 2L reads that have a query, (B, T)

class AttnRes(Residual):
    """Attention Residuals (Kimi Team 2026, arXiv:2603.15031, eqs. 2-4). Nothing is added up. The
    stream keeps the embedding, and each update, as a source. Each sublayer, and finally the head,
    reads a weighted mean of all sources so far. Its learned query asks which of them count: like
    attention, but over the depth, not over tokens.

    A score needs a query and a source, and nothing else. So when a source is made, one matrix
    product finds its scores in all 2L reads that will come:

        scores = unit(value) @ (query * key_weight).T         # (B, T, 2L)

    A read takes its column of the scores of all n sources, stacks them, and makes weights of them:

        weights = stacked.softmax(0)                          # (n, B, T)
        read = norm(n * (weights[..., None] * values).sum(0)) # (B, T, C)

    Queries start at zero. Then all weights are 1 / n, and a read is exactly that of PreNorm. (For
    this there is the factor n, which the paper lacks. The norm takes it out again.)

    The stream is a pair: query * key_weight (2L, C), and a dict from the number of a group (0: the
    embedding) to its Source. A group is one update, or, with group > 1 (Block AttnRes, section
    3.2), the sum of so many: after six sublayers there are seven sources, and with group=2 four."""
    can_skip = False
    stream_grows = True
    own_lr = "query", "key_weight"   # At the matrices' rate, all weights soon go to one source.
    allowed = dict(group=(1, 10000))

    def __init__(self, config, l, group=1):
        """group: how many updates make a source; 1 is Full AttnRes"""
        super().__init__(config, l)
        self.group = (l - 1) // group + 1
        # Reads 2 .. 2L + 1 have the columns 0 .. 2L - 1. Read 1 has one source, so its weight is 1
        # whatever the query. It uses column 0, too.
        self.column = max(0, l - 2)
        if self.is_end:
            self.query = nn.Parameter(torch.zeros(2 * config.n_layer, config.n_embd))
            self.key_weight = nn.Parameter(torch.ones(2 * config.n_layer, config.n_embd))

    def start(self, x):
        queries = self.query * self.key_weight
        return queries, {0: self.source(x, queries)}

    def source(self, value, queries):
        return Source(value, (unit(value) @ queries.mT).unbind(-1))

    def read(self, stream):
        _, sources = stream
        values = [source.value for source in sources.values()]
        scores = torch.stack([source.scores[self.column] for source in sources.values()])
        weights = len(values) * scores.softmax(0)[..., None]   # (n, B, T, 1)
        return self.norm(depth_sum(weights, values, self.config.kernels))   # (weights * v).sum(0)

    finish = read

    def forward(self, stream, f):
        queries, sources = stream
        value = f(self.read(stream))
        if self.group in sources:   # This group has begun, so its sum grows.
            value = sources[self.group].value + value
        return queries, sources | {self.group: self.source(value, queries)}

    def as_tensor(self, stream):
        return sum(source.value for source in stream[1].values())   # as in PreNorm

    def flops(self):
        return 4 * self.config.n_layer * self.config.n_embd   # one source times 2L queries

class DenseFormer(Residual):
    """PreNorm, and after each block a weighted sum of the embedding and of all blocks' outputs so
    far (Pagliardini et al. 2024, arXiv:2402.02622). The stream is x, and a dict from the number of
    a block (0: the embedding) to its output. Blocks that are removed have no output."""
    can_skip = False
    stream_grows = True

    def __init__(self, config, l):
        super().__init__(config, l)
        self.block = l // 2 if l % 2 == 0 else None   # the block that ends with this sublayer
        if self.block:   # At first its own output has the weight 1, and all others 0.
            weights = torch.zeros(self.block + 1)
            weights[-1] = 1
            self.weights = nn.Parameter(weights)

    def start(self, x):
        return x, {0: x}

    def forward(self, stream, f):
        x, outputs = stream
        x = x + f(self.norm(x))
        if self.block:
            outputs = outputs | {self.block: x}
            numbers = list(outputs)   # of the blocks that have an output
            weights = self.weights[numbers].view(-1, 1, 1, 1)   # each for all tokens
            x = depth_sum(weights, list(outputs.values()), self.config.kernels)
        return x, outputs

class X0(Residual):
    """PreNorm, and before each block x becomes a learned mixture of x and the embedding, as in
    modded-nanoGPT. The stream is x, and the embedding. (A token that skips an attention misses the
    mixing there, too. It may: x needs none to stay what it is.)"""
    def __init__(self, config, l):
        super().__init__(config, l)
        self.begins_block = l % 2 == 1 and not self.is_end
        if self.begins_block:
            self.weights = nn.Parameter(torch.tensor([1.0, 0.0]))   # of x, and of the embedding

    def start(self, x):
        return x, x.clone()   # The same tensor twice would cost torch.compile one more graph.

    def forward(self, stream, f):
        x, embedding = stream
        if self.begins_block:
            x = self.weights[0] * x + self.weights[1] * embedding
        return x + f(self.norm(x)), embedding

# -------------------------------------------------------------------------------------------- gates

class Gated(Residual):
    """PreNorm whose update u passes a gate, a number per channel that depends on the stream h and
    on u:

        h <- h + gate u,    gate = sigmoid(W_h unit(h) + W_u unit(u) + bias)

    review    this equation (Kramer 2026, arXiv:2606.31859)
    highway   a baseline there: the gate sees h only. (The paper's script gives it h as it is, and a
              random W.)
    convex    h <- (1 - gate) h + gate u. At first a sublayer keeps only a half of the stream, so
              with depth the embedding fades away, and training fails. A bias below 0 helps:
              convex:inputs=h,bias=-3 is the Highway layer of 2015, with PreNorm and a normalised
              input.

    W starts at zero, so gates start at sigmoid(bias)."""
    allowed = dict(inputs=("hu", "h", "u"))

    def __init__(self, config, l, inputs="hu", convex=False, bias=0.0):
        """inputs: what the gate sees, h, u or both; convex: (1 - gate) h in place of h; bias: its
        first value"""
        super().__init__(config, l)
        self.convex = convex
        if not self.is_end:
            square = config.n_embd, config.n_embd
            self.W = nn.ParameterDict()   # one for each letter of inputs
            for name in inputs:
                self.W[name] = nn.Parameter(torch.zeros(square))
            self.bias = nn.Parameter(torch.full((config.n_embd,), bias))

    def forward(self, h, f):
        u = f(self.norm(h))
        inputs = {"h": h, "u": u}
        products = [F.linear(unit(inputs[name], eps=1e-5), W) for name, W in self.W.items()]
        gate = (sum(products) + self.bias).sigmoid()
        return (1 - gate) * h + gate * u if self.convex else h + gate * u

    def read(self, h):   # what Residual.read finds, but without computing the gate
        return self.norm(h)

# -------------------------------------------------------------------------- several streams at once

class Hyper(Residual):
    """Hyper-connections: n parallel streams, x (B, T, n, C). A sublayer reads them by n weights
    `pre`, writes to each of them by n weights `post`, and a matrix `res` (n, n) mixes them:

        x <- res x + post f(norm(pre x))

    All weights depend on the token. res is doubly stochastic, so mixing keeps the streams' sum. It
    is a mixture of the n! permutations for kind=lite (arXiv:2601.05732), and made by 20 Sinkhorn
    steps for kind=mhc (arXiv:2512.24880). At first every stream is nearly that of PreNorm."""
    can_skip = False   # A token that skips would miss the mixing by res.
    allowed = dict(kind=("lite", "mhc"), n=(1, 64))

    def __init__(self, config, l, kind="lite", n=4):
        """kind: lite or mhc; n: number of streams, at most 5 for lite"""
        super().__init__(config, l)
        if kind == "lite" and n > 5:   # 6! permutations are too many.
            raise ValueError(f"--residual: option n={n} must be from 1 to 5 with kind=lite")
        self.kind, self.n = kind, n
        if self.is_end:
            return
        # `static` are logits that are the same for all tokens. What depends on the token is added.
        # pre: a sublayer starts by reading one stream, and its successor the next one:
        # sigmoid(4) = 0.98 of it, and sigmoid(-4) = 0.02 of the others.
        pre = torch.full((n,), -4.0)
        pre[(l - 1) % n] = 4.0
        post = torch.zeros(n)   # 2 sigmoid(0) = 1: each stream gets the update.
        # res starts near the matrix that changes nothing.
        if kind == "lite":   # a logit for each permutation, of which the first changes nothing
            matrices = [torch.eye(n)[list(order)] for order in itertools.permutations(range(n))]
            self.register_buffer("permutations", torch.stack(matrices).flatten(1), persistent=False)
            res = torch.full((len(matrices),), -8.0)
            res[0] = 0.0
        else:                # a logit for each entry
            res = 8 * torch.eye(n).flatten() - 8
        self.sizes = len(pre), len(post), len(res)
        self.static = nn.Parameter(torch.cat((pre, post, res)))
        self.dynamic = nn.Parameter(torch.zeros(sum(self.sizes), n * config.n_embd))
        self.scale = nn.Parameter(torch.full((3,), 0.01))   # of the dynamic parts of the three

    def start(self, x):
        return x[..., None, :].repeat_interleave(self.n, dim=-2)

    def forward(self, x, f):
        pre, post, res = self.weights(x)
        mixture = (pre[..., None, :] @ x).squeeze(-2)   # n weights times n streams: (B, T, C)
        update = f(self.norm(mixture))
        return res @ x + post[..., None] * update[..., None, :]

    def weights(self, x):
        """-> pre, post (..., n) and res (..., n, n) of each token"""
        # Their logits: a part that is the same for all tokens, and one made of the token's streams
        static = self.static.split(self.sizes)
        dynamic = F.linear(unit(x.flatten(-2)), self.dynamic).split(self.sizes, dim=-1)
        pre, post, res = (static[i] + self.scale[i] * dynamic[i] for i in range(3))
        square = self.n, self.n
        if self.kind == "lite":
            res = (res.softmax(-1) @ self.permutations).unflatten(-1, square)
        else:
            res = sinkhorn(res.unflatten(-1, square))
        return pre.sigmoid(), 2 * post.sigmoid(), res

    def as_tensor(self, x):
        return x.mean(-2)

    def flops(self):
        if self.is_end:
            return 0
        make_res = 2 * self.permutations.numel() if self.kind == "lite" else 0
        mix_streams = 2 * self.n * self.config.n_embd * (1 + self.n)
        return 2 * self.dynamic.numel() + make_res + mix_streams

def sinkhorn(logits, steps=20):
    """(..., n, n) -> positive matrices whose rows and (nearly) columns sum to 1: columns and rows
    are normalised in turn, in logarithms, which don't overflow."""
    for _ in range(steps):
        logits = logits - logits.logsumexp(-2, keepdim=True)
        logits = logits - logits.logsumexp(-1, keepdim=True)
    return logits.exp()

class Siamese(Residual):
    """SiameseNorm (arXiv:2602.08064, as in the released code). Two streams: y grows as in PreNorm,
    and x is kept small by a norm, as in PostNorm. Sublayers read their sum. In block i = 1 .. L,
    only 1 / sqrt(2 i) of an update is added to x."""
    can_skip = False   # A token that skips would miss the norm of x.

    def __init__(self, config, l):
        super().__init__(config, l)
        self.norm_x, self.norm_y = make_norm(config), make_norm(config)
        scale = (2 * block_of(l)) ** -0.5
        self.register_buffer("scale", torch.tensor(scale), persistent=False)

    def start(self, x):
        return x, x.clone()

    def forward(self, stream, f):
        y, x = stream
        x = self.norm_x(x)
        update = f(self.norm(x + self.norm_y(y)))
        return y + update, x + self.scale * update

    def finish(self, stream):
        y, x = stream
        return self.norm(self.norm_x(x) + self.norm_y(y))

# --------------------------------------------------------------------------------------------- nGPT

class LearnedScale(nn.Module):
    """Factors that start at 1. Their parameters start at 1 / sqrt(n_embd), which is the size of all
    weights in nGPT, so one learning rate fits all."""
    def __init__(self, n, n_embd):
        super().__init__()
        self.root = n_embd ** 0.5
        self.weight = nn.Parameter(torch.full((n,), 1 / self.root))

    def factor(self):
        return self.weight * self.root

class ScaledAttention(Attention):
    def __init__(self, config):
        super().__init__(config)
        self.scale_q = LearnedScale(config.n_embd, config.n_embd)
        self.scale_k = LearnedScale(config.n_embd, config.n_embd)

    def queries(self, q, rotation):
        return self.scaled(super().queries(q, rotation), self.scale_q)

    def keys(self, k, rotation):
        return self.scaled(super().keys(k, rotation), self.scale_k)

    def scaled(self, x, scale):
        return (x * self.heads(scale.factor())).to(x.dtype)

class ScaledMLP(MLP):
    def __init__(self, config, hidden):
        super().__init__(config, hidden)
        self.scale = LearnedScale(self.c_fc.out_features, config.n_embd)

    def activate(self, x):
        return super().activate(x * self.scale.factor())

class NGPT(Residual):
    """nGPT (Loshchilov et al. 2024, arXiv:2410.01131). The stream stays on a sphere, and moves
    towards the normalised update by a learned step per channel:

        x <- unit(x + |alpha| (unit(f(x)) - x))

    After each step of the optimizer, weights are normalised along the stream's axis. Normalised
    weights can't learn a length, so queries, keys, hidden units and logits get learned factors.
    `unit` gives the norm sqrt(C) where the paper has 1, so the MLP needs no factor sqrt(C). (Scores
    start as cosines times SHARPNESS, as in all our models, in the paper times sqrt(head_size).)"""
    has_norm = False
    attention, mlp = ScaledAttention, ScaledMLP

    def __init__(self, config, l):
        super().__init__(config, l)
        if self.is_end:
            self.logit_scale = LearnedScale(config.vocab_size, config.n_embd)
        else:
            self.alpha = LearnedScale(config.n_embd, config.n_embd)

    def start(self, x):
        return unit(x)

    def forward(self, x, f):
        step = 0.05 * self.alpha.factor().abs()
        return unit(torch.addcmul(x, step, unit(f(x)) - x))

    def finish(self, x):
        return x

    def head_weight(self, weight):
        # A stream of norm sqrt(C) times a row of norm 1 has a std of 1. The paper's is a cosine.
        std = LOGIT_STD if self.config.init == "width" else self.config.n_embd ** -0.5
        return weight * (std * self.logit_scale.factor())[:, None]

    def init_sublayer(self, sublayer):
        pass   # `constrain` makes all lengths 1.

    def constrain(self, model):
        # Along the stream: the columns of c_proj, which writes to it, and the rows of all others
        for part in model.wte, model.blocks, model.lm_head:
            for name, p in part.named_parameters():
                if p.dim() == 2:
                    p.div_(p.norm(dim=0 if "c_proj" in name else 1, keepdim=True))

# -------------------------------------------------------------------------------------- --residual

# What --residual can be: a class, or a partial of one, with some options. Yours goes here, too:
# RESIDUALS["mine"] = Mine
RESIDUALS = {
    "pre": Residual, "template": Template, "nag": NAG,
    # PreNorm and its relatives
    "post": Post, "peri": Peri, "reordered": Reordered, "lns": LayerNormScaling,
    "deepnorm": DeepNorm, "mixln": MixLN, "rezero": ReZero,
    "skipinit": partial(Template, first=0.0), "layerscale": LayerScale, "completep": CompleteP,
    # reading earlier sublayers
    "attnres": AttnRes, "denseformer": DenseFormer, "x0": X0,
    # gates
    "review": Gated, "convex": partial(Gated, convex=True), "highway": partial(Gated, inputs="h"),
    # several streams, and a sphere
    "hyper": Hyper, "siamese": Siamese, "ngpt": NGPT}

def choose(flag_name, registry, text):
    """("--residual", RESIDUALS, "hyper:kind=mhc,n=2") -> Hyper, dict(kind="mhc", n=2). ValueError,
    with a sentence, if there is no such thing"""
    name, _, options = text.partition(":")
    if name not in registry:
        raise ValueError(f"{flag_name} {name}: unknown; choose from {', '.join(registry)}")
    entry = partial(registry[name])   # .func is the class, also where a partial is registered.
    try:
        given = read_options(options, option_defaults(entry), entry.func.allowed)
    except ValueError as error:
        raise ValueError(f"{flag_name} {text}: {name}: {error}") from None
    return entry.func, entry.keywords | given

def residual_kind(config):
    """The class that --residual names"""
    kind, _ = choose("--residual", RESIDUALS, config.residual)
    return kind

def make_residual(config, l):
    """The rule that --residual names, for sublayer l"""
    kind, options = choose("--residual", RESIDUALS, config.residual)
    return kind(config, l, **options)

# ================================================================================= part 3: skipping

# Mixture-of-Depths: not every token needs every sublayer. Three things work together:
#
#     a Decider   says who runs the next sublayer. It is part of the model (--mod), and may learn.
#     a Runner    runs the sublayers of one pass. Before each it asks the decider, and it notes the
#                 answers. A token that skips passes by, with its stream as it is.
#     run_some    computes a sublayer for the tokens that run it, and for no others.
#
# An answer is EVERYONE, REMOVED, or bools (B, T): True where a token runs the sublayer. Can a token
# skip at all? Is it known beforehand how much a sublayer will change it, which is called its gain?
# That is up to the residual: can_skip and knows_gain, in class Residual.
EVERYONE = "everyone"
REMOVED = "removed"   # Nobody runs it, as if there were no such sublayer: class Without says so.

class Decider(nn.Module):
    """The default, --mod all: all tokens run all sublayers. Other deciders replace some of these
    methods. They get the Runner of this pass, whose docstring says what they find there. Options
    are keyword arguments of __init__, as those of a residual."""
    allowed = {}            # the range of each option
    needs_gain = False      # Must the residual know gains?
    needs_skipping = False  # Must its tokens be able to skip?
    needs_tensor = False    # Must its stream be one tensor?
    # Does a token that skips an attention still make its key and value, for later tokens that run
    # it? False: nobody sees it there.
    skippers_make_keys = True

    def __init__(self, config):
        """config: a GPTConfig. (Here it may be None.)"""
        super().__init__()

    def begin(self, runner):
        """A new pass through the depth begins."""

    def decide(self, runner):
        """-> who runs the next sublayer: EVERYONE, REMOVED or bools (B, T)"""
        return EVERYONE

    def after(self, runner, stream):
        """After each sublayer -> the stream that goes on. (Routers change it. It is called after a
        sublayer that is removed, too, about which nobody has asked the decider.)"""
        return stream

    def changes_stream(self):
        """If so, the model was trained for what `after` does, and can't do without it."""
        return type(self).after is not Decider.after

    def loss(self, runner):
        """After a pass in training -> what is added to the loss"""
        return 0.0

class Functions(NamedTuple):
    """What a Runner calls where time is spent. In a training, they may be compiled: ForTraining, in
    part 4, says so."""
    call_residual: Callable   # residual, stream, f, gain -> the next stream
    call_gain: Callable       # residual, stream -> its gain
    head_loss: Callable       # model, stream, targets -> the mean cross entropy of head(stream)

def call_residual(residual, stream, f, gain=None):
    """gain: residual.gain(stream), if somebody has asked for it, so that it is computed once"""
    return residual(stream, f) if gain is None else residual(stream, f, gain)

def call_gain(residual, stream):
    return residual.gain(stream)

def head_loss(model, stream, targets):
    _, loss = model.logits_and_loss(stream, targets)
    return loss

AS_WRITTEN = Functions(call_residual, call_gain, head_loss)

class Notes:
    """An empty thing, for attributes. (torch.compile can't look into a SimpleNamespace.)"""

class Runner:
    """Runs the sublayers of one pass, and notes who ran them. Each pass needs a new one, so two
    passes never disturb each other. A decider finds here, of the sublayer that comes next:

        place      1, 2, 3, ... in the order of running; odd: attention, even: MLP. It is the l of
                   the residual, until --repeat runs a block again: then its l come again.
        residual   its residual
        stream     the stream before it, and shape, its (B, T)
        gain()     how much it will change each token, (B, T, 1), if the residual can tell
        progress   how much of the training is over, 0 to 1
        notes      room for what a decider wants to remember until the pass is over

    And the model. What a decider computes, it adds to decider_flops."""
    def __init__(self, model, decider=None, keeps_streams=False, progress=1.0):
        """decider: in place of model.decider; keeps_streams: the list `streams` gets the first one,
        and then the one after each place"""
        self.model, self.decider = model, decider or model.decider
        self.functions = AS_WRITTEN
        self.progress = progress
        self.gain_has_cost = model.training and model.config.gain_cost > 0
        self.supervises_blocks = model.training and model.config.deep_supervision
        self.keeps_streams = keeps_streams or self.supervises_blocks
        self.streams = []
        self.place, self.shape = 0, None
        self.residual = self.stream = self.known_gain = None
        self.notes = Notes()
        self.answers = []           # of the decider, one for each place
        self.gains = []             # the gains of all tokens, or None where nobody asked
        self.decider_flops = 0.0    # what deciders have computed, per token
        self.cross_entropy = None   # of a training pass, for train.py to report

    def begin(self, shape, stream):
        """Before the first sublayer. shape: (B, T) of the tokens; stream: the first one"""
        if self.place > 0:
            raise Mistake("a Runner is for one pass; make a new one")
        self.shape = shape
        if self.keeps_streams:
            self.streams.append(stream)
        self.decider.begin(self)

    def run(self, stream, residual, f):
        """-> the stream after the sublayer f, which those tokens run that the decider says"""
        self.place += 1
        self.stream, self.residual, self.known_gain = stream, residual, None
        answer = self.decider.decide(self)
        if self.gain_has_cost:   # All tokens pay, whether they run or skip: it is noted below.
            self.gain()
        self.answers.append(answer)
        self.gains.append(self.known_gain)
        if answer is EVERYONE:
            stream = self.functions.call_residual(residual, stream, f, self.known_gain)
        elif answer is not REMOVED:
            check_answer(self, answer)
            stream = run_some(self, f, answer)
        stream = self.decider.after(self, stream)
        if self.keeps_streams:
            self.streams.append(stream)
        self.stream = self.known_gain = None   # A compiled pass would have to return them.
        return stream

    def gain(self):
        """-> residual.gain(stream), which is computed once a sublayer"""
        if not self.residual.knows_gain:
            raise Mistake(f"{type(self.residual).__name__} knows no gain; use --residual nag, or "
                          f"set knows_gain = True if it has a gain(stream)")
        if self.known_gain is None:
            self.known_gain = self.functions.call_gain(self.residual, self.stream)
        return self.known_gain

    def loss(self, loss, targets):
        """In training: the mean cross entropy -> what is to become small. With --deep_supervision,
        the head reads the stream after each block, and not only at the end. The decider may add
        something. --gain_cost times the mean |gain| is added late: see cost_factor. (This is ours,
        not the paper's.)"""
        self.cross_entropy = loss.detach()
        if self.supervises_blocks:
            after_blocks = self.streams[2::2]   # The first one is the embedding's.
            losses = [self.functions.head_loss(self.model, stream, targets)
                      for stream in after_blocks[:-1]]
            loss = sum([*losses, loss]) / len(after_blocks)
        loss = loss + self.decider.loss(self)
        if self.gain_has_cost:
            cost = self.model.config.gain_cost * cost_factor(self.progress)
            loss = loss + cost * self.mean_gain()
        return loss

    # --- What a pass has noted. It is asked for when the pass is over.

    def mean_gain(self):
        """Mean |gain| of all tokens and sublayers, a tensor; None if nobody has asked for gains"""
        known = [gain.abs().mean() for gain in self.gains if gain is not None]
        return sum(known) / len(known) if known else None

    def who_ran(self):
        """-> bools (places, B, T), True where a token ran the sublayer"""
        everyone = torch.ones(self.shape, dtype=torch.bool, device=self.model.device)
        masks = {EVERYONE: everyone, REMOVED: ~everyone}
        return torch.stack([masks[answer] if isinstance(answer, str) else answer
                            for answer in self.answers])

    def all_ran(self):
        return all(answer is EVERYONE for answer in self.answers)

    def skipped(self, last=False):
        """-> the share of all sublayer runs that were skipped, or removed. last: only those of the
        last token of each sequence"""
        if self.all_ran():   # Below, item would wait for a GPU.
            return 0.0
        who = self.who_ran()[:, :, -1:] if last else self.who_ran()
        return 1 - who.double().mean().item()

def cost_factor(progress):
    """What part of --gain_cost counts at this point of a training: 0 at first, and 1 at the end.
    From the start, a cost changes what is learned, for better or worse: before anything is learned,
    turning is no use, so whole sublayers come below the angle of --mod gain. A token that skips a
    sublayer teaches its gain nothing, so many of them don't come back."""
    return min(1.0, max(0.0, (progress - 0.3) / 0.6))

def check_answer(runner, answer):
    """A mistake in a decider of your own is told here, and not deep inside."""
    shape, name = tuple(runner.shape), type(runner.decider).__name__
    if not torch.is_tensor(answer) or answer.dtype != torch.bool or answer.shape != shape:
        found = repr(answer)
        if torch.is_tensor(answer):
            found = f"{answer.dtype} {tuple(answer.shape)}"
        hint = "; is a return missing?" if answer is None else ""
        raise Mistake(f"{name}.decide returned {found}, not EVERYONE, REMOVED or bools {shape}"
                      f"{hint}")
    if not runner.residual.can_skip:
        raise Mistake(f"{name} lets tokens skip, which {type(runner.residual).__name__} can't; say "
                      f"needs_skipping = True, and use --residual pre or nag")

# ---------------------------------------------------------------------------------------- deciders

class ByGain(Decider):
    """--mod gain:below=0.05: a token whose |gain| is below 0.05 skips the sublayer, in training and
    after it. NAG's gain is the tangent of an angle: 0.05 is 3 degrees. Without a --gain_cost, few
    gains are so small. (This rule and the cost are ours: see NAG.)"""
    allowed = dict(below=(0, 100))
    needs_gain = needs_skipping = True

    def __init__(self, config, below=0.05):
        super().__init__(config)
        self.below = below

    def decide(self, runner):
        # A comparison has no gradient: gains learn from the tokens that run, and from their cost.
        return runner.gain().abs().squeeze(-1) >= self.below

class Coins(Decider):
    """--mod coins:rate=0.25: a coin for each token and each sublayer, in training and after it.
    This is a control: a decider that looks at tokens must do better."""
    allowed = dict(rate=(0, 0.95))
    needs_skipping = True

    def __init__(self, config, rate=0.25):
        super().__init__(config)
        self.rate = rate

    def decide(self, runner):
        return torch.rand(runner.shape, device=runner.model.device) >= self.rate

class Routers(Decider):
    """--mod router:rate=0.25 (Raposo et al. 2024, arXiv:2404.02258). Blocks 2, 4, 6, .. have a
    router, a linear map. It gives each token a weight, and the tokens of a sequence with the
    largest weights run the block. What the block changes is multiplied by the weight: in this way a
    router learns. (Ours reads unit(x), because the stream has another size in each block.)

    Which weights are the largest depends on later tokens, and in sampling there are none yet. So
    outside of training, tokens with a weight above 0 run the block. A loss of its own teaches the
    router to give just the chosen tokens a weight above 0."""
    allowed = dict(rate=(0.001, 0.45))
    needs_skipping = needs_tensor = True
    skippers_make_keys = False   # as in the paper
    loss_weight = 0.01

    def __init__(self, config, rate=0.25):
        """rate: share of all sublayer runs to skip. Only every second block has a router. With 12
        blocks there are six, and at rate=0.25 half of the tokens skip at each of them."""
        super().__init__(config)
        n_routers = config.n_layer // 2
        if n_routers == 0:
            raise ValueError(f"--mod {config.mod}: needs two blocks or more; use --n_layer 2")
        order = block_order(config)   # --repeat runs some blocks several times.
        n_routed = sum(number % 2 for number in order)
        # rate x len(order) is what all routed runs together are to skip.
        self.share_that_runs = 1 - rate * len(order) / n_routed
        if self.share_that_runs <= 0:
            raise ValueError(f"--mod {config.mod}: {n_routers} of {config.n_layer} blocks have a "
                             f"router, too few for this rate; give a smaller one")
        routers = [nn.Linear(config.n_embd, 1, bias=False) for _ in range(n_routers)]
        self.routers = nn.ModuleList(routers)

    def begin(self, runner):
        runner.notes.losses = []
        runner.notes.runs = None   # who runs this block; None: its router was not asked

    def decide(self, runner):
        block = block_of(runner.residual.l)   # 1, 2, 3, ..
        if block % 2 == 1:
            return EVERYONE
        if runner.notes.runs is None:   # at its attention, or, if that is removed, its MLP
            self.ask(self.routers[block // 2 - 1], runner)
        return runner.notes.runs

    def ask(self, router, runner):
        x, notes = runner.stream, runner.notes
        weight = router(unit(x)).squeeze(-1)   # (B, T)
        runner.decider_flops += 2 * x.shape[-1]
        runs = weight > 0
        if runner.model.training:
            count = max(1, round(self.share_that_runs * x.shape[1]))
            runs = largest(weight.detach(), count)
        notes.losses.append(F.binary_cross_entropy_with_logits(weight, runs.to(weight.dtype)))
        notes.runs, notes.before, notes.weight = runs, x, weight[..., None]

    def after(self, runner, stream):
        notes = runner.notes
        is_mlp = runner.place % 2 == 0
        if is_mlp and notes.runs is not None:   # A block ends that has a router.
            notes.runs = None
            # Where a token has skipped, its stream is still that of before.
            stream = notes.before + notes.weight * (stream - notes.before)
        return stream

    def loss(self, runner):
        losses = runner.notes.losses
        return self.loss_weight * sum(losses) / len(losses) if losses else 0.0

def largest(weight, count):
    """weight (B, T) -> bools (B, T), True where it is one of the `count` largest of its sequence"""
    # stable: of equal weights, that of the earlier token counts as larger.
    best = weight.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(weight, dtype=torch.bool).scatter(1, best, True)

# What --mod can be. Yours goes here: a class, with decide(runner).
DECIDERS = {"all": Decider, "gain": ByGain, "router": Routers, "coins": Coins}

def make_decider(config):
    """The decider that --mod asks for"""
    kind, options = choose("--mod", DECIDERS, config.mod)
    return kind(config, **options)

# The next three need no config. They are for trained models: a Runner gets them in place of the
# model's own decider.

class ByFunction(Decider):
    """A decider that is one function: ByFunction(lambda runner: EVERYONE)"""
    def __init__(self, decide):
        super().__init__(config=None)
        self.decide = decide

class Without(Decider):
    """The sublayers at these places are removed. Of the others, another decider decides."""
    def __init__(self, places, decider):
        super().__init__(config=None)
        self.places, self.decider = places, decider
        self.skippers_make_keys = decider.skippers_make_keys

    def begin(self, runner):
        self.decider.begin(runner)

    def decide(self, runner):
        return REMOVED if runner.place in self.places else self.decider.decide(runner)

    def after(self, runner, stream):
        return self.decider.after(runner, stream)

    def changes_stream(self):
        return self.decider.changes_stream()

    def loss(self, runner):
        return self.decider.loss(runner)

def places_of(model, block):
    """The places, from 1, of the sublayers of a block, numbered from 0: attention, MLP; and again
    those two for each further run, if --repeat runs it several times"""
    attentions = [2 * row + 1 for row, number in enumerate(model.order) if number == block]
    return [place for attention in attentions for place in (attention, attention + 1)]

class EarlyExit(Decider):
    """Before each block but the first, a token exits if the head is sure of its successor. It runs
    no further sublayer, but still makes keys and values there, because later tokens may go deeper
    and look for them. So an exit is an answer of a decider, and not an end of the pass."""
    needs_skipping = True

    def __init__(self, confidence):
        """confidence: the probability from which on a prediction is sure"""
        super().__init__(config=None)
        self.confidence = confidence

    def begin(self, runner):
        runner.notes.inside = torch.ones(runner.shape, dtype=torch.bool, device=runner.model.device)

    def decide(self, runner):
        notes, model = runner.notes, runner.model
        block_begins = runner.place > 1 and runner.place % 2 == 1
        if block_begins and notes.inside.any():
            probability = model.head(runner.stream).softmax(-1).amax(-1)   # (B, T)
            notes.inside = notes.inside & (probability < self.confidence)
            runner.decider_flops += 2 * model.lm_head.weight.numel()
        return notes.inside

# --------------------------------------------------------------------------- how only some are run

def run_some(runner, f, runs):
    """-> the stream after a sublayer f that only some tokens run. runs: bools (B, T)"""
    residual, stream, gain = runner.residual, runner.stream, runner.known_gain
    call, count = runner.functions.call_residual, int(runs.sum())
    if count == runs.numel():
        return call(residual, stream, f, gain)
    is_attention, kv_of_all = isinstance(f, AttentionInPass), None
    if is_attention and runner.decider.skippers_make_keys:   # In a cache, they are kept.
        kv_of_all = keys_of_all(f, residual.read(stream))
    if count == 0:
        return stream
    some = SomeTokens(runs)
    if is_attention:   # An MLP treats each token by itself, and never knows that there were others.
        f = partial(attention_of_some, f, some, kv_of_all)
        call = call_residual   # Its shapes vary too much to be compiled.
    if gain is not None:
        gain = some.gather(gain)
    return some.put(stream, call(residual, some.gather(stream), f, gain))

def input_of_f(residual, stream):
    """The rule runs with a stand-in for f, which notes what it gets."""
    notes = []
    def stand_in(x):
        notes.append(x)
        return torch.zeros_like(x)
    residual(stream, stand_in)
    return notes[0]

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

    def gather(self, stream):
        """Tensors (B, T, ...) -> (N, ...)"""
        if isinstance(stream, tuple):
            return tuple(self.gather(x) for x in stream)
        return stream.flatten(0, 1).index_select(0, self.index)

    def put(self, stream, new):
        """Tensors (B, T, ...) -> the same, but new (N, ...) at the tokens that run"""
        if isinstance(stream, tuple):
            return tuple(self.put(x, new_x) for x, new_x in zip(stream, new))
        return stream.flatten(0, 1).index_copy(0, self.index, new).view_as(stream)

    def spread(self, x):
        """(N, ...) -> (B, T, ...), zero at the tokens that skip"""
        return self.put(x.new_zeros(*self.runs.shape, *x.shape[1:]), x)

    def in_rows(self, x, fill):
        """(N, ...) -> (B, n, ...): a row per sequence, of its tokens that run. Rows are filled up
        to the n of the fullest one."""
        size = len(self.runs), int(self.runs.sum(1).max()), *x.shape[1:]
        return x.new_full(size, fill).index_put((self.sequence, self.column), x)

def attention_of_some(f, some, kv_of_all, x):
    """x (N, C): what an attention f reads of the tokens that run it -> their updates (N, C).
    kv_of_all: what keys_of_all returns; None: those that skip have no keys, and nobody sees them"""
    attn, rotation = f.attn, f.rotation[some.position]
    if kv_of_all is None:
        q, k, v = attn.c_attn(x).chunk(3, dim=-1)
        k, v = some.spread(attn.keys(k, rotation)), some.spread(attn.heads(v))
        k, v, mask = with_older(f, k, v, some.runs)
    else:
        q = attn.c_attn.times(x, attn.c_attn.weight[:x.shape[-1]])
        k, v, mask = kv_of_all
    sees = mask.expand(len(some.runs), -1, -1)[some.sequence, some.position]   # (N, S)
    # What fills a row up sees all keys: with none, a softmax is nan. Nobody uses what it gets.
    q, sees = some.in_rows(attn.queries(q, rotation), fill=0), some.in_rows(sees, fill=True)
    out = attend(q, k, v, sees)[some.sequence, some.column]
    return attn.c_proj(out.flatten(-2)).to(x.dtype)

def keys_of_all(f, x):
    """x (B, T, C): what an attention f would read of all tokens -> see with_older"""
    attn = f.attn
    kv = attn.c_attn.times(x, attn.c_attn.weight[x.shape[-1]:])   # Its first C rows are for q.
    k, v = kv.chunk(2, dim=-1)
    return with_older(f, attn.keys(k, f.rotation), attn.heads(v))

def with_older(f, k, v, has_key=True):
    """k, v (B, T, n_head, head_size) of the newest tokens; has_key: which of them have any, True or
    bools (B, T) -> k, v of all S tokens so far, and a mask (B or 1, T, S) as in attend"""
    if f.store is not None:
        return f.store(k, v, has_key)
    if has_key is True:
        has_key = torch.ones(1, k.shape[1], dtype=torch.bool, device=k.device)
    return k, v, causal_mask(has_key, k.shape[1])

# ==================================================================================== part 4: tools

# -------------------------------------------------------------------------------- widths and order

def hidden_units(config):
    """The hidden units of each block's MLP, a list. With --taper, they go from taper_start to
    taper_end, and their mean stays (but for rounding). cosine: arXiv:2606.23670. linear: after
    CascadeFormer (arXiv:2606.26538), whose own widths are unknown."""
    n_layer, hidden = config.n_layer, config.mlp_ratio * config.n_embd
    if config.activation == "swiglu":   # It has three matrices where gelu has two.
        hidden = hidden * 2 / 3
    hidden = max(1, round(hidden))
    if config.taper == "none":
        return [hidden] * n_layer
    depth = [number / max(1, n_layer - 1) for number in range(n_layer)]   # 0 .. 1
    if config.taper == "cosine":
        depth = [(1 - math.cos(math.pi * at)) / 2 for at in depth]
    widths = [config.taper_start + (config.taper_end - config.taper_start) * at for at in depth]
    widths = [width * n_layer / sum(widths) for width in widths]   # Their mean is 1 now.
    return [8 * max(1, round(width * hidden / 8)) for width in widths]   # Multiples of 8 are fast.

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

# --------------------------------------------------------------------------------------- rare norms

class SingleNorm(nn.Module):
    """--norm single: one weight for all channels, against outliers (arXiv:2506.19697)"""
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return unit(x) * self.weight

class DynamicTanh(nn.Module):
    """--norm dyt: no norm, but a tanh in its place (arXiv:2503.10622)"""
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.n_embd))
        self.slope = nn.Parameter(torch.tensor(0.5))
        self.bias = nn.Parameter(torch.zeros(config.n_embd))

    def forward(self, x):
        return torch.tanh(self.slope * x) * self.weight + self.bias

# --------------------------------------------------------------------- compiling, and less memory

class ForTraining(nn.Module):
    """What is called in place of a model in a training with --compile or --checkpoint_blocks:
    (idx, targets, runner) -> None, loss. Nobody reads logits there, and they would be the largest
    tensor of all. The model itself stays as it is, for evaluation and sampling, where shapes change
    all the time: torch.compile would make a graph for each."""
    def __init__(self, model, compiles=False, checkpoints=False, **options):
        """options: those of torch.compile"""
        super().__init__()
        self.model, self.functions, self.run_pass = model, AS_WRITTEN, loss_of_pass
        # Either three functions are compiled one by one, and all blocks share their graphs (unless
        # widths differ). Or, where a stream grows and so each sublayer would need graphs of its
        # own, the whole pass becomes one graph, which takes longer to compile.
        is_one_graph = model.ends.stream_grows and not model.decider.needs_skipping
        if compiles:
            torch._dynamo.config.recompile_limit = 64   # 8 is too low for skipping and tapers.
            if is_one_graph:
                self.run_pass = torch.compile(loss_of_pass, **options)
            else:
                compiled = [torch.compile(function, **options) for function in AS_WRITTEN]
                self.functions = Functions(*compiled)
        if checkpoints:
            # Memory is saved: in the backward pass, sublayers run again (but for attentions that
            # some tokens skip). They draw no random numbers, so there are none to keep.
            run_twice = partial(checkpoint, self.functions.call_residual, use_reentrant=False,
                                preserve_rng_state=False)
            self.functions = self.functions._replace(call_residual=run_twice)

    def forward(self, idx, targets, runner=None):
        runner = runner or Runner(self.model)
        runner.functions = self.functions
        return None, self.run_pass(self.model, idx, targets, runner)

def loss_of_pass(model, idx, targets, runner):
    stream = model.last_stream(idx, runner)
    return runner.loss(runner.functions.head_loss(model, stream, targets), targets)

# ---------------------------------------------------------------------------------------- counting

def num_params(model):
    return sum(p.numel() for p in model.parameters())

class Shares(NamedTuple):
    """Which shares of the tokens do what in a sublayer"""
    ran: float = 1.0       # run it
    queries: float = 1.0   # have a query: all sequences as many as the fullest one, see in_rows
    keys: float = 1.0      # have a key
    residual: float = 1.0  # need the residual's own products: all if their gains were asked for

def flops_per_token(model, T=None, runner=None):
    """FLOPs of matrix products in a forward pass, per token, at context length T. A training step
    has three times as many. The scores of later tokens count, too. runner: a Runner after its
    pass, which knows what ran; None: all tokens run all sublayers"""
    config, T = model.config, T or model.config.block_size
    predictions = len(model.order) if model.training and config.deep_supervision else 1
    total = model.ends.flops() + predictions * 2 * config.vocab_size * config.n_embd
    pairs = [pair for number in model.order for pair in model.blocks[number].pairs()]
    shares = [Shares()] * len(pairs)
    if runner and not runner.all_ran():
        shares = shares_of_tokens(runner)
    for (residual, sublayer), share in zip(pairs, shares):
        total += share.residual * residual.flops()
        matrices = sum(2 * p.numel() for p in sublayer.parameters() if p.dim() == 2)
        if isinstance(sublayer, Attention):
            # c_attn and c_proj: half of them makes queries and updates, half keys and values.
            total += (share.ran + share.keys) / 2 * matrices
            total += share.queries * 4 * T * config.n_embd   # scores, and sums of values
        else:
            total += share.ran * matrices
    return total + (runner.decider_flops if runner else 0.0)

def shares_of_tokens(runner):
    """-> the Shares of each sublayer in a pass"""
    who = runner.who_ran().float()   # (places, B, T)
    means, fullest = who.mean((1, 2)).tolist(), who.mean(2).amax(1).tolist()
    found = []
    for ran, queries, answer, gain in zip(means, fullest, runner.answers, runner.gains):
        all_have_keys = runner.decider.skippers_make_keys and answer is not REMOVED
        found.append(Shares(ran, queries, keys=1.0 if all_have_keys else ran,
                            residual=ran if gain is None else 1.0))
    return found

# ------------------------------------------------------------------------------------------ checks

def config_problems(config):
    """-> sentences about what is wrong with a config. One wrong field may hide other problems."""
    problems = field_problems(config)
    try:
        kind = residual_kind(config)
    except ValueError as error:
        problems.append(str(error))
    if problems:   # What follows needs values that are in their ranges.
        return problems
    try:
        order = block_order(config)
        with torch.device("meta"):   # shapes without numbers, so without memory
            make_residual(config, 1)   # Hyper refuses some options.
            misfit = why_not(make_decider(config), config)
    except ValueError as error:
        return [str(error)]
    name, no_triton = config.residual, why_no_triton()
    rules = [   # (is it wrong?, a sentence)
        (config.n_embd % (2 * config.n_head),
         f"--n_embd {config.n_embd}: must be an even multiple of --n_head {config.n_head}"),
        (config.norm != "rms" and not kind.has_norm,
         f"--norm {config.norm}: --residual {name} has no norm for --norm to choose; use pre"),
        (config.kernels == "on" and no_triton, f"--kernels on: {no_triton}"),
        (len(order) > config.n_layer and kind.stream_grows,
         f"--repeat: the stream of --residual {name} is made for 2L updates; use pre"),
        (misfit, f"--mod {config.mod}: {misfit}"),
        (config.gain_cost and not kind.knows_gain,
         f"--gain_cost {config.gain_cost}: --residual {name} knows no gain to pay for; use nag"),
    ]
    return [sentence for is_wrong, sentence in rules if is_wrong]

def why_not(decider, config):
    """-> None, or a sentence why a model of this config can't have this decider"""
    kind = residual_kind(config)
    if decider.needs_gain and not kind.knows_gain:
        return f"--residual {config.residual} knows no gain; use nag"
    if decider.needs_skipping and not kind.can_skip:
        return f"tokens can't skip with --residual {config.residual}; use pre or nag"
    if decider.needs_tensor and not has_one_tensor(config):
        return f"the stream of --residual {config.residual} isn't one tensor; use pre"
    return None

def has_one_tensor(config):
    with torch.device("meta"):   # shapes without numbers
        ends = make_residual(config, 2 * config.n_layer + 1)
        stream = ends.start(torch.empty(1, 1, config.n_embd))
    return torch.is_tensor(stream) and stream.dim() == 3
