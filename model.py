"""GPT with interchangeable residual connections.

A Transformer of L blocks is a chain of 2L sublayers: attention, MLP, attention, MLP, ... A residual
connection decides what a sublayer f reads from the residual stream, and how f's output changes the
stream:

    stream = residual(stream, f)      # PreNorm: x + f(norm(x))

--residual selects one. Part 1 is a complete GPT with PreNorm; part 2 has the other residuals, part
3 Mixture-of-Depths (tokens that skip sublayers), part 4 FLOPs, tapered widths, repeated blocks.

B: batch, T: tokens, C: n_embd, V: vocabulary. layer_idx counts sublayers from 0 (even: attention,
odd: MLP), block_idx = layer_idx // 2. A paper's layer l is layer_idx + 1.

Names follow nanoGPT (https://github.com/karpathy/nanoGPT). Differences from it: rotary embeddings,
RMSNorm, QK norm, no biases, no dropout, lm_head doesn't share wte's weights, initial weights with
std 1 / sqrt(number of inputs), a KV cache.
"""

import math
import re
import zlib
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

from flags import UserError, flag, make, read_options
from kernels import depth_sum, nag_write, use_triton, why_no_triton

# =============================================================================================
# Part 1: GPT
# =============================================================================================

@dataclass
class GPTConfig:
    # flag(default, help, min, max): each field is also a command-line flag of train.py
    residual: str = flag("pre", "residual connection, with options: hyper:kind=mhc,n=2")
    n_layer: int = flag(12, "number of blocks, each an attention and an MLP", 1, 4096)
    n_head: int = flag(4, "number of attention heads", 1, 1024)
    n_embd: int = flag(128, "width of the residual stream", 2, 65536)
    block_size: int = flag(128, "context length", 1, 2 ** 20)
    vocab_size: int = flag(320, "train.py takes that of the data set", 1, 2 ** 24)
    activation: Literal["gelu", "relu2", "swiglu"] = flag("gelu", "activation of the MLP")
    mlp_ratio: float = flag(4.0, "hidden size of the MLP / n_embd", 0.01, 1024)
    norm: Literal["rms", "layer", "dyt"] = flag("rms", "RMSNorm, LayerNorm or Dynamic Tanh")
    init: Literal["width", "gpt2"] = flag("width", "std of initial weights: by fan-in, or 0.02")
    seed: int = flag(1337, "seed of the initial weights and of the data order", 0, 2 ** 31 - 1)
    kernels: Literal["auto", "on", "off"] = flag("auto", "Triton kernels; auto: on CUDA")
    # parts 3 and 4
    mod: str = flag("none", "which tokens skip: gate:rate=0.25, or router, random, drop")
    gate_loss: float = flag(0.0, "nag: coefficient of an auxiliary loss, the mean |gate|", 0, 1000)
    taper: Literal["none", "linear", "cosine"] = flag("none", "MLPs get narrower with depth")
    taper_start: float = flag(1.5, "relative MLP width of the first block", 0.01, 100)
    taper_end: float = flag(0.5, "relative MLP width of the last block", 0.01, 100)
    repeat: str = flag("", "1:3 runs block 1 three times, 1-2:2 runs 1 2 1 2")
    deep_supervision: bool = flag(False, "train the head on the stream after every block")

def mean_product(x, y):   # (x * y).mean(-1, keepdim=True), faster on CPUs, mostly backward
    return torch.linalg.vecdot(x, y)[..., None] / x.shape[-1]

def rms_norm(x, eps=1e-6):
    return x * torch.rsqrt(mean_product(x, x) + eps)

class Norm(nn.Module):
    """RMSNorm, LayerNorm or Dynamic Tanh (arXiv:2503.10622), without a bias."""

    def __init__(self, config):
        super().__init__()
        self.kind = config.norm
        self.weight = nn.Parameter(torch.ones(config.n_embd))
        if self.kind == "dyt":
            self.alpha = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        if self.kind == "rms":
            return rms_norm(x) * self.weight
        if self.kind == "layer":
            return F.layer_norm(x, x.shape[-1:], self.weight, eps=1e-6)
        return torch.tanh(self.alpha * x) * self.weight

class Linear(nn.Linear):
    """nn.Linear, no bias. It casts its input and weight to `dtype` (bfloat16 on GPUs), and its
    output has that dtype. The residual stream stays float32: bfloat16 would round small updates of
    a large stream away."""
    dtype = None   # None: that of the weight; GPT.compute_in sets it

    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x, rows=slice(None)):
        dtype = self.dtype or self.weight.dtype
        return F.linear(x.to(dtype), self.weight[rows].to(dtype))

def rotary_table(config):
    """cos and sin of position * 10000^(-2i / head_size), (block_size, 1, head_size / 2, 2)"""
    head_size = config.n_embd // config.n_head
    inv_freq = 1e4 ** -(torch.arange(0, head_size, 2) / head_size)
    angle = torch.outer(torch.arange(config.block_size), inv_freq)
    return torch.stack((angle.cos(), angle.sin()), dim=-1)[:, None]

def apply_rotary(x, rotary):
    """x (B, T, n_head, head_size), rotary (T, 1, head_size / 2, 2): rotates channels 2i and 2i + 1
    by an angle, as a product of complex numbers (in float32: bfloat16 has no complex numbers)."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    pairs = torch.view_as_complex(x.to(dtype).unflatten(-1, (-1, 2)))
    pairs = pairs * torch.view_as_complex(rotary.to(dtype))
    return torch.view_as_real(pairs).flatten(-2).to(x.dtype)

# Queries and keys have rms 1, so q @ k is at most head_size. It is scaled so that the largest score
# is sqrt(128) = 11.3 for any head size. The usual 1 / sqrt(head_size) gives at most 5.7 for heads
# of 32, and the softmax is then too flat to select one token of many.
ATTN_SCALE = 128 ** 0.5

class Attention(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)   # query, key, value for all heads
        self.c_proj = Linear(config.n_embd, config.n_embd)

    def heads(self, x):
        return x.unflatten(-1, (self.n_head, -1))   # (B, T, C) -> (B, T, n_head, head_size)

    def forward(self, x, rotary, cache=None, run_mask=None):
        """x (B, T, C) -> (B, T, C). cache: a LayerCache, in sampling. run_mask: see forward_some"""
        if run_mask is not None:
            return self.forward_some(x, rotary, cache, run_mask)
        q, k, v = self.c_attn(x).chunk(3, dim=-1)
        q, k, v = self.prepare(q, k, v, rotary, cache)
        return self.c_proj(attention(q, k, v)).to(x.dtype)

    def prepare(self, q, k, v, rotary, cache):
        """Splits heads, normalizes and rotates q and k, and adds k and v of earlier tokens."""
        q = apply_rotary(rms_norm(self.heads(q)), rotary)
        k = apply_rotary(rms_norm(self.heads(k)), rotary)
        v = self.heads(v)
        if cache is not None:
            k, v = cache.update(k, v)
        return q, k, v

    def forward_some(self, x, rotary, cache, run_mask):
        """For part 3. run_mask (B, T): True for tokens that run this sublayer. Of the others, only
        keys and values are computed, and their output is 0."""
        C = x.shape[-1]
        q = scatter(self.c_attn(x[run_mask], rows=slice(0, C)), run_mask)
        k, v = self.c_attn(x, rows=slice(C, 3 * C)).chunk(2, dim=-1)
        q, k, v = self.prepare(q, k, v, rotary, cache)
        if not run_mask.any():
            return torch.zeros_like(x)
        return scatter(self.c_proj(attention(q, k, v)[run_mask]), run_mask).to(x.dtype)

def attention(q, k, v):
    """q (B, T, n_head, head_size) of the newest T of S tokens; k, v (B, S, n_head, head_size)
    -> (B, T, C)"""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    T, S = q.shape[2], k.shape[2]
    causal = None if T == S else torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    y = F.scaled_dot_product_attention(q, k, v, causal, is_causal=causal is None,
                                       scale=ATTN_SCALE / q.shape[-1])
    return y.transpose(1, 2).flatten(2)

def scatter(x, mask):   # (N, C), a row per True in mask (B, T) -> (B, T, C), zeros elsewhere
    return x.new_zeros(*mask.shape, x.shape[-1]).index_put((mask,), x)

class MLP(nn.Module):

    def __init__(self, config, hidden_size):
        super().__init__()
        self.activation = config.activation
        self.c_fc = Linear(config.n_embd, hidden_size * (2 if self.activation == "swiglu" else 1))
        self.c_proj = Linear(hidden_size, config.n_embd)

    def forward(self, x):
        h = self.c_fc(x)
        if self.activation == "gelu":
            h = F.gelu(h)
        elif self.activation == "relu2":
            h = F.relu(h).square()
        else:
            gate, value = h.chunk(2, dim=-1)
            h = F.silu(gate) * value
        return self.c_proj(h).to(x.dtype)

class Residual(nn.Module):
    """PreNorm (GPT-2, Llama). The base class of all residual connections.

    A model has one per sublayer, layer_idx = 0 .. 2L - 1. One more, model.final with layer_idx =
    2L, has no sublayer: its expand() turns the embedding into the stream, and its reduce() turns
    the stream into the input of the head."""
    own_params = ()     # names of parameters that AdamW trains at --residual_lr
    can_skip = True     # may a token keep its stream and skip the sublayer?
    options = {}        # choices or range of each option: {"n": (1, 64)}

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.block_idx = layer_idx // 2
        self.is_final = layer_idx == 2 * config.n_layer
        self.norm = Norm(config)

    def forward(self, stream, f):
        """-> the new stream. f: the sublayer, (B, T, C) -> (B, T, C)"""
        return stream + f(self.norm(stream))

    def expand(self, x):          # (B, T, C) embedding -> stream
        return x

    def reduce(self, stream):     # stream -> (B, T, C), what lm_head reads; ln_f in GPT-2
        return self.norm(stream)

    def head(self, x, lm_head):   # -> logits
        return lm_head(x).to(x.dtype)

    def flops(self):   # per token, of the residual's own matrix products
        return matrix_flops(self)

    def init_sublayer_(self, sublayer):
        # as in GPT-2: 2L updates are added up, so each starts 1 / sqrt(2L) times as large
        sublayer.c_proj.weight.mul_((2 * self.config.n_layer) ** -0.5)

class Block(nn.Module):

    def __init__(self, config, block_idx):
        super().__init__()
        self.attn = Attention(config)
        self.attn_residual = make_residual(config, 2 * block_idx)
        self.mlp = MLP(config, hidden_size(config, block_idx))
        self.mlp_residual = make_residual(config, 2 * block_idx + 1)

    def forward(self, stream, rotary, cache=None, trace=None):
        attn = partial(self.attn, rotary=rotary, cache=cache)
        for residual, f in ((self.attn_residual, attn), (self.mlp_residual, self.mlp)):
            if trace is None:
                stream = residual(stream, f)
            else:
                stream = trace.run(residual, stream, f)   # the same, but tokens may skip (part 3)
        return stream

EMBEDDING_STD, LOGIT_STD = 3.0, 0.8

def init_std(config, name, n_in):
    if config.init == "gpt2":
        return 0.02
    if name == "wte":
        return EMBEDDING_STD                  # the embedding starts larger than the updates
    if name == "lm_head":
        return LOGIT_STD * n_in ** -0.5       # so the first loss is log(V) + 0.8^2 / 2
    return n_in ** -0.5

def generator(config, name):
    """A random generator for the parameter of this name: two models with the same seed draw the
    same weights, whatever else they contain, so two variants start from the same shared weights."""
    return torch.Generator().manual_seed(zlib.crc32(f"{config.seed} {name}".encode()))

class GPT(nn.Module):

    def __init__(self, config: GPTConfig):
        super().__init__()
        check_config(config)
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList([Block(config, i) for i in range(config.n_layer)])
        self.final = make_residual(config, 2 * config.n_layer)
        self.lm_head = Linear(config.n_embd, config.vocab_size)
        self.policy = make_policy(config)        # which tokens skip (part 3); None: no token
        self.block_order = block_order(config)   # 0 .. L - 1, unless --repeat
        self.register_buffer("rotary", rotary_table(config), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        for name, module in self.named_modules():
            if isinstance(module, (Linear, nn.Embedding)):
                std = init_std(self.config, name, module.weight.shape[1])
                module.weight.normal_(std=std, generator=generator(self.config, name))
        for block in self.blocks:
            block.attn_residual.init_sublayer_(block.attn)
            block.mlp_residual.init_sublayer_(block.mlp)

    def forward(self, idx, targets=None, cache=None, trace=None):
        """idx (B, T) token ids, targets (B, T) -> logits (B, T, V), loss

        loss: the mean cross entropy in nats, None without targets. In training, logits are None,
        which saves memory. cache: a KVCache of the earlier tokens; idx has the new ones only.
        trace: a Trace, which records this pass (part 3)."""
        start = 0 if cache is None else cache.length
        end = start + idx.shape[1]
        if end > self.config.block_size:
            raise UserError(f"{end} tokens do not fit into block_size {self.config.block_size}")
        if trace is None and needs_trace(self):
            trace = Trace(self)

        stream = self.final.expand(self.wte(idx))
        if trace is not None:
            trace.begin(idx, stream)
        for i, block_idx in enumerate(self.block_order):
            layer_cache = None if cache is None else cache.layer(i)
            stream = self.blocks[block_idx](stream, self.rotary[start:end], layer_cache, trace)
        logits = self.logits(stream)

        if cache is not None:
            cache.length = end
        if targets is None:
            return logits, None
        loss = cross_entropy(logits, targets)
        if not self.training:
            return logits, loss
        if trace is not None:
            trace.cross_entropy = loss.detach()
        if self.config.deep_supervision:   # the head also reads the stream after each earlier block
            after_blocks = trace.streams[2:-1:2]
            earlier = [cross_entropy(self.logits(stream), targets) for stream in after_blocks]
            loss = torch.stack([*earlier, loss]).mean()
        if trace is not None:
            loss = loss + trace.auxiliary_loss()
        return None, loss

    def logits(self, stream):
        return self.final.head(self.final.reduce(stream), self.lm_head)

    def compute_in(self, dtype):
        for module in self.modules():
            if isinstance(module, Linear):
                module.dtype = dtype

    def residuals(self):
        pairs = [(block.attn_residual, block.mlp_residual) for block in self.blocks]
        return [residual for pair in pairs for residual in pair]

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None,
                 n_vocab=None, make_trace=None):
        """idx (B, T) -> (B, T + max_new_tokens). Call model.eval() first.

        temperature 0: always the likeliest token. n_vocab: the tokenizer's, if lm_head is padded. A
        full cache is computed anew from the last block_size / 2 tokens. make_trace: a function that
        returns a new Trace for each forward pass (part 3)."""
        cache, new = KVCache(), idx[:, -self.config.block_size:]
        for _ in range(max_new_tokens):
            if cache.length + new.shape[1] > self.config.block_size:
                cache, new = KVCache(), idx[:, -max(1, self.config.block_size // 2):]
            trace = None if make_trace is None else make_trace()
            logits = self(new, cache=cache, trace=trace)[0][:, -1, :n_vocab]
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                logits = logits / temperature
                if top_k is not None:
                    kth = logits.topk(min(top_k, logits.shape[-1])).values[:, [-1]]
                    logits = logits.masked_fill(logits < kth, -math.inf)
                new = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            idx = torch.cat((idx, new), dim=1)
        return idx

def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

class KVCache:
    """Keys and values of earlier tokens, one pair per attention."""

    def __init__(self):
        self.length = 0
        self.layers = {}

    def layer(self, i):
        return self.layers.setdefault(i, LayerCache())

class LayerCache:
    k = v = None

    def update(self, k, v):
        """k, v (B, T, n_head, head_size) of the new tokens -> those of all tokens so far"""
        if self.k is not None:
            k, v = torch.cat((self.k, k), dim=1), torch.cat((self.v, v), dim=1)
        self.k, self.v = k, v
        return k, v

# =============================================================================================
# Part 2: residual connections
# =============================================================================================
#
# x is the residual stream and u = f(norm(x)) the update, unless a paper has other letters. All
# residuals share the norms, attention, MLP and initialization of part 1; "Differs from the paper"
# lists further differences.
#
# Value residuals (arXiv:2410.17897) are not here: they connect attentions, not streams.
#
# Mistakes of published implementations, and the test that catches each here. (M mixes the streams
# of hyper-connections; a source is what AttnRes averages.)
#
#   mistake                             implementation               tests/test_model.py, test_...
#   mHC: M is computed, not applied     tokenbender/mHC, lucidrains  hyper_mixing_is_applied
#   mHC: M is transposed                Megatron-LM, transformers    hyper_mixing_is_not_transposed
#   mHC: M never leaves its start       tokenbender/mHC              hyper_mixing_leaves_its_start
#   AttnRes: queries start at 0.02      torchtitan                   attnres_starts_as_prenorm
#   AttnRes: embedding counted twice    the paper's listing          attnres_sources
#   DeepNorm: beta = (8L)^(1/4)         pixeli99/MixLN               deepnorm_factors
#   NAG: infinite slope of m^beta at 0  nag-nanochat                 nag_gradients_are_finite
#   router: the update is added twice   mixture-of-depths            router_equals_its_definition

class Template(Residual):
    """Copy this class: PreNorm in which each update is multiplied by a learned number b.

    Then add it to RESIDUALS. A keyword argument of __init__ becomes an option: --residual
    template:start=0.5. If its stream is a tuple, it also needs expand and reduce, as in X0."""
    own_params = ("b",)

    def __init__(self, config, layer_idx, start=1.0):
        super().__init__(config, layer_idx)
        if not self.is_final:   # the last residual only expands and reduces
            self.b = nn.Parameter(torch.tensor(start))

    def forward(self, x, f):
        return x + self.b * f(self.norm(x))

class PostNorm(Residual):
    """PostNorm (Vaswani et al. 2017, arXiv:1706.03762)."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        if self.is_final:   # the last sublayer has normalized the stream
            del self.norm

    def forward(self, x, f):
        return self.norm(x + f(x))

    def reduce(self, x):
        return x

class PeriNorm(Residual):
    """Peri-LN (arXiv:2502.02732; Gemma 2 and 3): norms before and after the sublayer.
    Differs from the paper: the embedding is not normalized."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        if not self.is_final:
            self.norm_out = Norm(config)

    def forward(self, x, f):
        return x + self.norm_out(f(self.norm(x)))

class ReorderedNorm(Residual):
    """Norm after the sublayer, before the addition (OLMo 2, arXiv:2501.00656)."""

    def forward(self, x, f):
        return x + self.norm(f(x))

class DeepNorm(PostNorm):
    """PostNorm in which the stream is multiplied by alpha > 1 and the initial weights by beta < 1
    (Wang et al. 2022, arXiv:2203.00555).
    Differs from the paper: --init, not Xavier's rule, draws the weights that are scaled by beta."""

    def forward(self, x, f):
        alpha = (2 * self.config.n_layer) ** 0.25
        return self.norm(alpha * x + f(x))

    def init_sublayer_(self, sublayer):
        beta = (8 * self.config.n_layer) ** -0.25
        sublayer.c_proj.weight.mul_(beta)
        if isinstance(sublayer, Attention):
            sublayer.c_attn.weight[2 * self.config.n_embd:].mul_(beta)   # the rows of the values
        else:
            sublayer.c_fc.weight.mul_(beta)

class MixLN(Residual):
    """PostNorm in the first alpha L blocks, PreNorm in the others (arXiv:2412.13795)."""
    options = {"alpha": (0, 1)}

    def __init__(self, config, layer_idx, alpha=0.25):
        super().__init__(config, layer_idx)
        self.is_post = self.block_idx < int(alpha * config.n_layer + 1e-9)
        if self.is_final and alpha == 1:
            del self.norm

    def forward(self, x, f):
        return self.norm(x + f(x)) if self.is_post else x + f(self.norm(x))

    def reduce(self, x):
        return self.norm(x) if hasattr(self, "norm") else x

class LayerNormScaling(Residual):
    """What a sublayer reads is divided by sqrt(block_idx + 1) (arXiv:2502.05795). This replaces
    part 1's scaling of c_proj. Differs from the paper: queries and keys are normalized, so the
    factor cancels in them, and in an attention it scales the values only."""

    def forward(self, x, f):
        return x + f(self.norm(x) * (self.block_idx + 1) ** -0.5)

    def init_sublayer_(self, sublayer):
        pass

class SiameseNorm(Residual):
    """Two streams (arXiv:2602.08064, as in the released code): y grows as in PreNorm, x is
    normalized as in PostNorm. A sublayer reads their sum, and adds its update to y and, divided by
    sqrt(2i) in block i = 1 .. L, to x."""
    can_skip = False   # a token that skips would miss the norm of x

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.norm_x, self.norm_y = Norm(config), Norm(config)

    def expand(self, x):
        return x, x

    def forward(self, stream, f):
        y, x = stream
        x = self.norm_x(x)
        u = f(self.norm(x + self.norm_y(y)))
        return y + u, x + u * (2 * (self.block_idx + 1)) ** -0.5

    def reduce(self, stream):
        y, x = stream
        return self.norm(self.norm_x(x) + self.norm_y(y))

class X0(Residual):
    """Shortcut from the embedding to every sublayer (nanochat, modded-nanogpt): x <- a x + b x0
    before each sublayer. Differs from nanochat, which does it once per block, normalizes x0, and
    starts with a = 1.15 to 1.05 and b = 0.2 to 0.05."""
    own_params = ("a", "b")

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        if not self.is_final:
            self.a = nn.Parameter(torch.tensor(1.0))
            self.b = nn.Parameter(torch.tensor(0.0))

    def expand(self, x):
        return x, x   # the stream and the embedding

    def forward(self, stream, f):
        x, x0 = stream
        x = self.a * x + self.b * x0
        return x + f(self.norm(x)), x0

    def reduce(self, stream):
        return self.norm(stream[0])

class UNet(Residual):
    """U-net skip connections (modded-nanogpt): block i of the second half adds s times the output
    of its mirror image, block L - 1 - i. s is learned and starts at 1."""
    own_params = ("s",)
    can_skip = False   # skipped blocks would leave no output for their mirror images

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.is_encoder = self.block_idx < config.n_layer // 2
        self.is_decoder = self.block_idx >= (config.n_layer + 1) // 2
        self.is_attention = layer_idx % 2 == 0
        if self.is_decoder and self.is_attention and not self.is_final:
            self.s = nn.Parameter(torch.tensor(1.0))

    def expand(self, x):
        return x, ()   # the stream, and outputs of the first half that are still to be added

    def forward(self, stream, f):
        x, skips = stream
        if self.is_decoder and self.is_attention:
            *skips, skip = skips
            x = x + self.s * skip
        x = x + f(self.norm(x))
        if self.is_encoder and not self.is_attention:
            skips = (*skips, x)
        return x, tuple(skips)

    def reduce(self, stream):
        return self.norm(stream[0])

class AttnRes(Residual):
    """Attention Residuals (Kimi Team 2026, arXiv:2603.15031, eqs. 2 to 4; Kimi K3).

    Sublayer outputs are not summed: each is kept as a source, and each sublayer reads a
    weighted mean of all sources so far. The weights are a softmax over depth, with one learned
    query per sublayer (not per token):

        weight_i = softmax_i(query . (key_weight * rms_norm(source_i)))
        read     = norm(sum_i weight_i source_i)

    Queries start at 0, so a read starts as the mean of all sources. RMSNorm and LayerNorm ignore
    its factor 1 / n, so the model starts as PreNorm. Block AttnRes, group=4, saves memory: it sums
    every 4 consecutive outputs into one source.

    The stream is (sources, keys): two tuples of (B, T, C), as a source's key is computed once."""
    own_params = ("query", "key_weight")   # at --lr, it soon selects a single source
    options = {"group": (1, 10000)}
    can_skip = False                       # a token that skips would have fewer sources

    def __init__(self, config, layer_idx, group=1):
        super().__init__(config, layer_idx)
        self.group = group
        if layer_idx > 0:   # the first sublayer has one source, the embedding
            self.query = nn.Parameter(torch.zeros(config.n_embd))
            self.key_weight = nn.Parameter(torch.ones(config.n_embd))

    def expand(self, x):
        return (x,), (rms_norm(x),)

    def weights(self, keys):   # -> (n_sources, B, T)
        query = self.query * self.key_weight
        return torch.stack([key @ query for key in keys]).softmax(0)

    def reduce(self, stream):
        sources, keys = stream
        if len(sources) == 1:
            return self.norm(sources[0])
        return self.norm(depth_sum(self.weights(keys), sources, self.config.kernels))

    def forward(self, stream, f):
        sources, keys = stream
        output = f(self.reduce(stream))
        if self.layer_idx % self.group > 0:   # a group that is not full yet
            output = output + sources[-1]
            sources, keys = sources[:-1], keys[:-1]
        return (*sources, output), (*keys, rms_norm(output))

    def flops(self):   # scores of the sources that it reads
        n_sources = 0 if self.layer_idx == 0 else 1 + math.ceil(self.layer_idx / self.group)
        return 2 * n_sources * self.config.n_embd

class DenseFormer(Residual):
    """After each block, the stream is a weighted sum of the embedding and of the outputs of all
    blocks so far (Pagliardini et al. 2024, arXiv:2402.02622). The weights are learned; they start
    at 1 for the newest output and at 0 for the others."""
    can_skip = False   # a skipped block would have no output

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        if layer_idx % 2 == 1:   # after the MLP
            self.weights = nn.Parameter(torch.eye(self.block_idx + 2)[-1].clone())

    def expand(self, x):
        return x, (x,)

    def forward(self, stream, f):
        x, outputs = stream
        x = x + f(self.norm(x))
        if self.layer_idx % 2 == 1:
            outputs = (*outputs, x)
            x = sum(weight * output for weight, output in zip(self.weights, outputs))
        return x, outputs

    def reduce(self, stream):
        return self.norm(stream[0])

class Review(Residual):
    """Review Residuals (Kramer 2026, arXiv:2606.31859): the update u passes a gate that sees it and
    the stream h.

        gate = sigmoid(W_h rms_norm(h) + W_u rms_norm(u) + bias)       (B, T, C)
        review   h <- h + gate u
        convex   h <- (1 - gate) h + gate u    each sublayer halves h at first, so in deep models
                                               the embedding vanishes; bias=-3 helps
        highway  h <- h + gate u               the paper's baseline: the gate sees h only (real
                                               Highway Networks, arXiv:1505.00387, are
                                               convex:inputs=h)

    Differs from the paper: W starts at 0 and not at random; highway's gate sees rms_norm(h)."""
    options = {"inputs": ("hu", "h", "u")}

    def __init__(self, config, layer_idx, inputs="hu", convex=False, bias=0.0):
        super().__init__(config, layer_idx)
        self.convex = convex
        if not self.is_final:
            C = config.n_embd
            self.W = nn.ParameterDict({name: nn.Parameter(torch.zeros(C, C)) for name in inputs})
            self.bias = nn.Parameter(torch.full((C,), bias))

    def forward(self, h, f):
        u = f(self.norm(h))
        inputs = {"h": h, "u": u}
        logits = sum(F.linear(rms_norm(inputs[name], eps=1e-5), W) for name, W in self.W.items())
        gate = torch.sigmoid(logits + self.bias)
        return (1 - gate) * h + gate * u if self.convex else h + gate * u

class HyperConnections(Residual):
    """Hyper-connections: n streams X (B, T, n, C). Each sublayer reads a mixture of them, and
    writes to each of them. The weights depend on the token:

        X <- M X + outer(write, f(norm(read @ X)))    read, write: (n,), M: (n, n)

      hc         as published (arXiv:2409.19606, eqs. 2, 10 to 13): tanh, M unconstrained
      mhc        M doubly stochastic, by Sinkhorn's algorithm (arXiv:2512.24880; DeepSeek-V4)
      identity   M = I, so tokens can skip

    At first, a sublayer reads stream layer_idx mod n and writes to all. Differs from the papers: in
    hc, read and M have a scale each, not one in common; in mhc and identity, read starts at 0.98 of
    one stream, and the head reads the mean of the streams; sinkhorn() makes sums exact."""
    options = {"kind": ("hc", "mhc", "identity"), "n": (1, 64)}

    def __init__(self, config, layer_idx, kind="hc", n=4):
        super().__init__(config, layer_idx)
        self.kind, self.n = kind, n
        self.can_skip = kind == "identity"
        if self.is_final:
            return
        one_stream = torch.eye(n)[layer_idx % n]
        if kind == "hc":   # initial read, write and M
            parts = [one_stream, torch.ones(n), torch.eye(n).flatten()]
        else:   # their logits: read = sigmoid(+-4), write = 2 sigmoid(0) = 1, M near I
            parts = [8 * one_stream - 4, torch.zeros(n), 8 * torch.eye(n).flatten() - 8]
        if kind == "identity":
            parts = parts[:2]
        self.sizes = [part.numel() for part in parts]
        self.static = nn.Parameter(torch.cat(parts))
        self.scale = nn.Parameter(torch.full((len(parts),), 0.01))
        if kind == "hc":   # each stream makes its own weights
            self.dynamic = nn.Parameter(torch.zeros(2 + n, config.n_embd))
        else:              # all n streams together make all weights
            self.dynamic = nn.Parameter(torch.zeros(sum(self.sizes), n * config.n_embd))

    def weights(self, X):
        """-> read (..., n), write (..., n), M (..., n, n); M is None for identity"""
        return self.hc_weights(X) if self.kind == "hc" else self.mhc_weights(X)

    def hc_weights(self, X):
        dynamic = torch.tanh(F.linear(rms_norm(X), self.dynamic))                # (..., n, 2 + n)
        static_read, static_write, static_M = self.static.split(self.sizes)
        read = static_read + self.scale[0] * dynamic[..., 0]
        write = static_write + self.scale[1] * dynamic[..., 1]
        M = static_M.view(self.n, self.n) + self.scale[2] * dynamic[..., 2:]
        return read, write, M.mT   # eq. 2 has the transpose

    def mhc_weights(self, X):
        dynamic = F.linear(rms_norm(X.flatten(-2)), self.dynamic).split(self.sizes, dim=-1)
        static = self.static.split(self.sizes)
        logits = [s + a * d for s, a, d in zip(static, self.scale, dynamic)]
        read, write = torch.sigmoid(logits[0]), 2 * torch.sigmoid(logits[1])
        if self.kind == "identity":
            return read, write, None
        return read, write, sinkhorn(logits[2].unflatten(-1, (self.n, self.n)))

    def forward(self, X, f):
        read, write, M = self.weights(X)
        u = f(self.norm((read[..., None, :] @ X).squeeze(-2)))
        mixed = X if M is None else M @ X
        return mixed + write[..., None] * u[..., None, :]

    def expand(self, x):
        return x[..., None, :].repeat_interleave(self.n, dim=-2)

    def reduce(self, X):
        return self.norm(X.sum(-2) if self.kind == "hc" else X.mean(-2))

    def flops(self):
        if self.is_final:
            return 0
        n, C = self.n, self.config.n_embd
        weights = 2 * self.dynamic.numel() * (n if self.kind == "hc" else 1)
        mixing = 0 if self.kind == "identity" else 2 * n * n * C
        return weights + 2 * n * C + mixing

def sinkhorn(logits, n_steps=20):
    """(..., n, n) -> doubly stochastic matrices: rows and columns sum to 1"""
    for _ in range(n_steps):   # normalizes columns, then rows, in logarithms
        logits = logits - logits.logsumexp(-2, keepdim=True)
        logits = logits - logits.logsumexp(-1, keepdim=True)
    matrix = logits.exp()
    # Rows sum to 1 now, but columns only nearly: after training, some sums were off by 0.99. This
    # makes both exact (Altschuler et al. 2017, arXiv:1705.09634, algorithm 2).
    matrix = matrix / matrix.sum(-2, keepdim=True).clamp_min(1)
    r, c = 1 - matrix.sum(-1, keepdim=True), 1 - matrix.sum(-2, keepdim=True)
    return matrix + r * c / c.sum(-1, keepdim=True).clamp_min(1e-6)

class GatedResidual(Residual):
    """Gated Residual (Qwen3.8-Next, arXiv:2608.30320, sections 2.2 and 3.3): n streams R (B, T, n,
    C). A sublayer reads a gated mean of them, and writes to each with its own strength s. Both
    depend on the token:

        r    = rms_norm(R) * norm_weight
        gate = sigmoid(up @ silu(down @ r / n))                 down: n C -> C / 8, up: back
        R   <- R + s * f(mean over streams of gate * r)         s = 2 sigmoid(to_write @ r / n)

    Streams are not mixed, so tokens can skip."""
    own_params = ("down", "up", "to_write")   # AdamW, as in the paper
    options = {"n": (1, 64)}

    def __init__(self, config, layer_idx, n=4):
        super().__init__(config, layer_idx)
        del self.norm   # norm_weight and the gate are in its place
        self.n, width, rank = n, n * config.n_embd, max(1, config.n_embd // 8)

        def matrix(name, n_out, n_in):
            rng = generator(config, f"{name} {layer_idx + 1}")
            return nn.Parameter(torch.randn(n_out, n_in, generator=rng) * n_in ** -0.5)

        self.norm_weight = nn.Parameter(torch.ones(width))
        self.down, self.up = matrix("down", rank, width), matrix("up", width, rank)
        if not self.is_final:
            self.to_write = matrix("to_write", n, width)

    def expand(self, x):
        return x[..., None, :].repeat_interleave(self.n, dim=-2)

    def normalized(self, R):
        return rms_norm(R) * self.norm_weight.view(self.n, -1)

    def read_gate(self, r):       # -> (..., n, C)
        hidden = F.silu(F.linear(r.flatten(-2) / self.n, self.down))
        return torch.sigmoid(F.linear(hidden, self.up)).view_as(r)

    def write_weights(self, r):   # -> (..., n)
        return 2 * torch.sigmoid(F.linear(r.flatten(-2) / self.n, self.to_write))

    def forward(self, R, f):
        r = self.normalized(R)
        u = f((self.read_gate(r) * r).mean(-2))
        return R + self.write_weights(r)[..., None] * u[..., None, :]

    def reduce(self, R):
        r = self.normalized(R)
        return (self.read_gate(r) * r).mean(-2)

class NAG(Residual):
    """Norm-AGnostic residual (Figliolia and Millidge 2026, arXiv:2606.16112; equation numbers
    below).

    The stream is a pair: a direction x (B, T, C) of rms 1, and the logarithm of its length, (B, T,
    1). A sublayer rotates x by the angle atan(gate) towards v, the part of its update u = f(x) that
    is orthogonal to x. The length grows as if gate * v had been added.

    gate = alpha m, where m in (0, 1] says how similar x is to learned directions w. It depends on x
    only, so it is known before the sublayer runs: a token whose gate is near 0 can skip (part 3).

    Differs from the paper: log_scale is initialized so that the first logits have std LOGIT_STD."""
    own_params = ("alpha", "beta", "w", "b", "p", "log_scale")
    options = {"directions": (1, 10000), "power": (-8, 8)}

    def __init__(self, config, layer_idx, directions=32, power=0.5):
        super().__init__(config, layer_idx)
        del self.norm   # the direction is normalized already
        if self.is_final:
            self.log_scale = nn.Parameter(torch.tensor(initial_log_scale(config, power)))   # eq. 18
            return
        rng = generator(config, f"w {layer_idx + 1}")
        w = torch.randn(directions, config.n_embd, generator=rng) * config.n_embd ** -0.5
        self.w = nn.Parameter(w)
        self.b = nn.Parameter(torch.zeros(directions))
        self.p = nn.Parameter(torch.zeros(directions))   # logits of the directions' weights
        self.alpha = nn.Parameter(torch.tensor((layer_idx + 1) ** -power))      # eqs. 23, 24
        self.beta = nn.Parameter(torch.tensor(math.log(math.e - 1)))            # softplus(beta) = 1

    def expand(self, x):
        x = x - x.mean(-1, keepdim=True)   # v has mean 0, so x keeps mean 0
        length = x.square().mean(-1, keepdim=True).clamp_min(1e-30).sqrt()
        return x / length, length.log() + self.log_scale

    def gate(self, stream):
        """(B, T, 1): the tangent of the angle by which the sublayer will rotate x"""
        x, _ = stream
        similarity = torch.sigmoid(F.linear(x, self.w, self.b))                 # (B, T, directions)
        m = (similarity @ self.p.softmax(0)).clamp_min(1e-6) ** F.softplus(self.beta)
        return self.alpha * m[..., None]                                        # eq. 13

    def forward(self, stream, f, gate=None):
        x, log_length = stream
        if gate is None:
            gate = self.gate(stream)
        u = f(x)
        if use_triton(x, self.config.kernels):
            x = nag_write(x, u, gate, self.config.kernels)   # the same four lines
        else:
            v = u - u.mean(-1, keepdim=True)                           # eq. 10: centered
            v = v - x * mean_product(v, x)                             # eq. 11: orthogonal to x
            v = rms_norm(v, eps=1e-10)                                 # eq. 12
            x = (x + gate * v) * torch.rsqrt(1 + gate.square())        # eqs. 14, 16
        return x, log_length + 0.5 * torch.log1p(gate.square())        # eqs. 15, 17

    def reduce(self, stream):
        # x and the rows of the head have rms 1, so x @ row / C is their cosine similarity
        x, log_length = stream
        return x * log_length.exp() / self.config.n_embd

    def head(self, x, lm_head):   # rows of the head: centered, rms 1
        weight = lm_head.weight - lm_head.weight.mean(-1, keepdim=True)
        weight, dtype = rms_norm(weight, eps=1e-12), lm_head.dtype or weight.dtype
        return F.linear(x.to(dtype), weight.to(dtype)).to(x.dtype)

    def init_sublayer_(self, sublayer):
        pass   # only the direction of an update counts

RESIDUALS = {
    "pre": Residual, "template": Template, "nag": NAG, "attnres": AttnRes,
    "hyper": HyperConnections, "gated": GatedResidual, "review": Review,
    "convex": partial(Review, convex=True), "highway": partial(Review, inputs="h"),
    "x0": X0, "unet": UNet, "denseformer": DenseFormer, "siamese": SiameseNorm,
    "post": PostNorm, "peri": PeriNorm, "reordered": ReorderedNorm, "deepnorm": DeepNorm,
    "mixln": MixLN, "lns": LayerNormScaling,
}

def make_residual(config, layer_idx):
    """"hyper:kind=mhc,n=2" -> HyperConnections(config, layer_idx, kind="mhc", n=2)"""
    name, _, options = config.residual.partition(":")
    if name not in RESIDUALS:
        raise UserError(f"--residual {name}: unknown; choose from {', '.join(RESIDUALS)}")
    return RESIDUALS[name](config, layer_idx, **read_options(options, RESIDUALS[name]))

# =============================================================================================
# Part 3: Mixture-of-Depths
# =============================================================================================
#
# A token that skips a sublayer keeps its stream. Skipped tokens still compute keys and values in an
# attention, so later tokens can attend to them. Before each sublayer, a policy decides which tokens
# run. It is a function or module, policy(trace), that returns one of
#
#     None            all tokens run
#     mask (B, T)     True for tokens that run
#     mask, weight    and their updates are multiplied by weight (B, T); scales_updates = True
#
# A module may add to trace.losses, and may have update(traces, all_reduce_mean), which train.py
# calls after each iteration. Your own, by which line breaks skip everything:
#
#     model(idx, trace=Trace(model, policy=lambda trace: trace.idx != ord("\n")))

class Trace:
    """A record of one forward pass: model(idx, trace=Trace(model)). A policy may read

        model, idx         idx (B, T): the tokens
        layer_idx          how many sublayers ran before (with --repeat, it can exceed 2L)
        residual, stream   its residual, and the stream before it
        gate()             (B, T, 1), for nag: how far the sublayer will rotate each token
        progress           of the training, 0 to 1; 1 outside of training

    After the pass it has an entry per sublayer of

        masks     (B, T); None: all tokens ran, False: removed
        gates     (B, T, 1); None: not computed
        streams   with keep_streams: the embedding's, and the one after each sublayer"""

    def __init__(self, model, policy=None, removed=(), progress=1.0, keep_streams=False):
        """policy: None for model.policy. removed: layer_idx of sublayers that don't run at all: the
        stream stays as it is or, where tokens can't skip, the update is 0."""
        self.model, self.policy = model, policy or model.policy
        self.removed, self.progress = removed, progress
        self.keep_streams = keep_streams
        self.layer_idx, self.idx = -1, None
        self.masks, self.gates, self.streams, self.losses = [], [], [], []

    def begin(self, idx, stream):
        if self.idx is not None:
            raise UserError("a Trace records one forward pass: make a new one")
        self.idx = idx
        self.keep_streams |= self.model.training and self.model.config.deep_supervision
        if self.keep_streams:
            self.streams.append(stream)

    def gate(self):
        if self.gates[-1] is None:
            self.gates[-1] = self.residual.gate(self.stream)
        return self.gates[-1]

    def run(self, residual, stream, f):
        """-> the stream after sublayer f"""
        self.layer_idx += 1
        self.residual, self.stream = residual, stream
        self.gates.append(None)
        mask, weight = None, None
        if self.layer_idx in self.removed:
            mask = False
        elif self.policy is not None:
            mask = self.policy(self)
            mask, weight = mask if isinstance(mask, tuple) else (mask, None)
        if self.model.training and self.model.config.gate_loss > 0:
            self.gate()   # of all tokens, including skipped ones
        self.masks.append(mask)
        if mask is False:
            if not residual.can_skip:
                stream = residual(stream, torch.zeros_like)
        else:
            new = run_some(residual, stream, f, mask, self.gates[-1])
            stream = new if weight is None else stream + expand_mask(weight, new) * (new - stream)
        if self.keep_streams:
            self.streams.append(stream)
        return stream

    def auxiliary_loss(self):
        """To be added to the loss: the policy's losses, and gate_loss times the mean |gate|."""
        config, loss = self.model.config, sum(self.losses)
        if config.gate_loss > 0:
            # 0 in the first 30 % of the training, full after 90 %: sublayers learn before their
            # gates shrink
            coefficient = config.gate_loss * min(max((self.progress - 0.3) / 0.6, 0), 1)
            loss = loss + coefficient * torch.stack(self.gates).abs().mean()
        return loss

    def run_rate(self, i):   # the share of tokens that ran sublayer i
        mask = self.masks[i]
        return 1.0 if mask is None else 0.0 if mask is False else mask.float().mean().item()

    def skip_rate(self):
        """The share of (token, sublayer) pairs that were skipped."""
        return 1 - sum(map(self.run_rate, range(len(self.masks)))) / len(self.masks)

def run_some(residual, stream, f, mask, gate=None):
    """-> the stream after sublayer f, which the tokens of mask (B, T) run"""
    args = () if gate is None else (gate,)
    if mask is None or mask.all():
        return residual(stream, f, *args)
    if not residual.can_skip:
        raise UserError(f"tokens can't skip with --residual {residual.config.residual}; use pre")
    if isinstance(f, MLP):   # a function of single tokens: run the whole residual on those that run
        index = mask.flatten().nonzero().squeeze(1)
        if len(index) == 0:
            return stream
        take = lambda x: x.flatten(0, 1).index_select(0, index)
        put = lambda x, new: x.flatten(0, 1).index_copy(0, index, new).view_as(x)
        new = residual(map_stream(take, stream), f, *map(take, args))
        return map_stream(put, stream, new)
    # an attention needs keys and values of all tokens; only the streams of those that run change
    new = residual(stream, partial(f, run_mask=mask), *args)
    return map_stream(lambda x, new: torch.where(expand_mask(mask, x), new, x), stream, new)

def map_stream(function, *streams):
    """Applies a function to each tensor of a stream (a tensor, or a tuple of streams)."""
    if torch.is_tensor(streams[0]):
        return function(*streams)
    return tuple(map_stream(function, *parts) for parts in zip(*streams, strict=True))

def expand_mask(mask, x):   # (B, T) -> (B, T, 1, ..., 1)
    return mask.view(*mask.shape, *[1] * (x.dim() - 2))

class GatePolicy(nn.Module):
    """--mod gate:rate=0.25 or gate:below=0.05. A token skips a sublayer if its |gate| is below a
    threshold.

    rate: the share of (token, sublayer) pairs to skip. After each iteration, the one threshold of
    all sublayers moves a fifth of the way to this quantile of all |gates|. The rate is 0 until 10 %
    of the training and full from 30 % on: earlier, gates don't show which sublayers matter. The
    threshold is saved with the weights, so in sampling each token is decided on its own.

    below: a fixed threshold. A gate of 0.05 rotates by 3 degrees. See --gate_loss.

    Differs from the paper: it doesn't specify how the threshold is found; this way is ours."""
    options = {"rate": (0, 0.95), "below": (0, 100)}

    def __init__(self, config, rate=0.0, below=0.0):
        super().__init__()
        if (rate > 0) == (below > 0):
            raise UserError("--mod gate: give either rate or below, such as gate:rate=0.25")
        self.rate = rate
        self.register_buffer("threshold", torch.tensor(below), persistent=rate > 0)

    def forward(self, trace):
        return trace.gate().abs().squeeze(-1) >= self.threshold

    @torch.no_grad()
    def update(self, traces, all_reduce_mean):
        """After an iteration: moves the threshold to the quantile of its micro-batches' gates."""
        rate = self.rate * min(max((traces[0].progress - 0.1) / 0.2, 0), 1)
        if rate == 0:
            return
        quantiles = []   # one per micro-batch, so any number of processes gives the same mean
        for trace in traces:
            gates = torch.stack(trace.gates).abs().flatten()
            k = max(1, round(rate * gates.numel()))
            quantiles.append(gates.kthvalue(k).values)
        quantile = all_reduce_mean(torch.stack(quantiles).mean())
        self.threshold.lerp_(quantile.to(self.threshold), 0.2 if self.threshold > 0 else 1.0)

class RandomPolicy(nn.Module):
    """--mod random:rate=0.25. A control: a policy that looks at tokens must do better."""
    options = {"rate": (0, 0.95)}

    def __init__(self, config, rate=0.25):
        super().__init__()
        self.rate = rate

    def forward(self, trace):
        return torch.rand(trace.idx.shape, device=trace.idx.device) >= self.rate

class Router(nn.Module):
    """--mod router:rate=0.25. Expert-choice routing (Raposo et al. 2024, arXiv:2404.02258) in every
    second block: a linear map gives each token a weight; in training, the top-k tokens of a
    sequence run the sublayer, and its update is multiplied by the weight. Top-k looks at later
    tokens, so outside of training a token runs if its weight is above 0; an auxiliary loss (binary
    cross entropy) trains the router to agree with top-k.

    rate: the share of all (token, sublayer) pairs that skip. Differs from the paper: a router per
    sublayer and not per block, which reads rms_norm(x); skipped tokens keep their keys and
    values."""
    scales_updates = True
    options = {"rate": (0.001, 0.45)}

    def __init__(self, config, rate=0.25):
        super().__init__()
        order = block_order(config)
        n_routed = sum(block_idx % 2 for block_idx in order)   # only blocks 1, 3, 5, ... skip
        if rate * len(order) >= n_routed:
            raise UserError(f"--mod {config.mod}: too few blocks have a router for this rate")
        self.capacity = 1 - rate * len(order) / n_routed       # share of tokens that run those
        self.n_runs = 2 * n_routed
        n_routers = 2 * (config.n_layer // 2)
        routers = [nn.Linear(config.n_embd, 1, bias=False) for _ in range(n_routers)]
        self.routers = nn.ModuleList(routers)
        for i, router in enumerate(self.routers):
            rng = generator(config, f"router {i}")
            nn.init.normal_(router.weight, std=config.n_embd ** -0.5, generator=rng)

    def forward(self, trace):
        block_idx = trace.residual.block_idx
        if block_idx % 2 == 0:
            return None
        router = self.routers[block_idx - 1 + trace.residual.layer_idx % 2]
        weight = router(rms_norm(trace.stream)).squeeze(-1)   # (B, T)
        mask = weight > 0
        if trace.model.training:
            k = max(1, round(self.capacity * weight.shape[1]))
            mask = torch.zeros_like(mask).scatter(1, weight.topk(k, dim=1).indices, True)
        loss = F.binary_cross_entropy_with_logits(weight, mask.to(weight.dtype))
        trace.losses.append(0.01 * loss / self.n_runs)
        return mask, weight

class DropBlocks(nn.Module):
    """--mod drop:rate=0.2. Stochastic depth (arXiv:1603.09382), as in arXiv:2609.05275: in
    training, a sequence skips a block with probability 4 rate depth (1 - progress), where depth =
    (block_idx + 1) / (L + 1): rate on average over blocks and training. Updates are divided by the
    probability that the block runs. Outside of training, all tokens run."""
    options = {"rate": (0, 0.24)}
    scales_updates = True

    def __init__(self, config, rate=0.2):
        super().__init__()
        self.rate, self.n_layer = rate, config.n_layer

    def forward(self, trace):
        if not trace.model.training:
            return None
        B, T = trace.idx.shape
        if trace.layer_idx % 2 == 0:   # drawn before the attention, for the whole block
            depth = (trace.residual.block_idx + 1) / (self.n_layer + 1)
            self.keep_rate = 1 - 4 * self.rate * depth * (1 - trace.progress)
            self.runs = torch.rand(B, 1, device=trace.idx.device) < self.keep_rate
        mask = self.runs.expand(B, T)
        return mask, mask / self.keep_rate

POLICIES = {"gate": GatePolicy, "random": RandomPolicy, "router": Router, "drop": DropBlocks}

def make_policy(config):
    """"gate:rate=0.25" -> GatePolicy(config, rate=0.25). None: no token skips"""
    name, _, options = config.mod.partition(":")
    if name == "none":
        return None
    if name not in POLICIES:
        raise UserError(f"--mod {name}: unknown; choose from none, {', '.join(POLICIES)}")
    return POLICIES[name](config, **read_options(options, POLICIES[name]))

def needs_trace(model):   # must GPT.forward make a Trace by itself?
    config = model.config
    has_extra_loss = config.gate_loss > 0 or config.deep_supervision
    return model.policy is not None or model.training and has_extra_loss

# =============================================================================================
# Part 4: FLOPs, tapered widths, repeated blocks
# =============================================================================================

def hidden_size(config, block_idx):
    """Hidden size of a block's MLP. --taper changes it with depth from taper_start to taper_end,
    at a constant mean (linear: after CascadeFormer, arXiv:2606.26538; cosine: arXiv:2606.23670)."""
    hidden = config.mlp_ratio * config.n_embd * (2 / 3 if config.activation == "swiglu" else 1)
    if config.taper == "none":
        return max(1, round(hidden))
    depth = block_idx / (config.n_layer - 1) if config.n_layer > 1 else 0.5
    if config.taper == "cosine":
        depth = (1 - math.cos(math.pi * depth)) / 2
    width = config.taper_start + (config.taper_end - config.taper_start) * depth
    return 8 * max(1, round(width / ((config.taper_start + config.taper_end) / 2) * hidden / 8))

def block_order(config):
    """The blocks in the order in which they run: --repeat 1-2:2 gives 0 1 2 1 2 3 ..."""
    if not config.repeat:
        return list(range(config.n_layer))
    match = re.fullmatch(r"(\d+)(?:-(\d+))?:(\d+)", config.repeat)
    first, last, times = (int(g or match[1]) for g in match.groups()) if match else (0, -1, 0)
    if not (0 <= first <= last < config.n_layer and 1 <= times <= 512):
        raise UserError(f"--repeat {config.repeat}: give blocks of 0 to {config.n_layer - 1} and "
                        f"how often they run, such as 1-2:2")
    return [*range(first), *[*range(first, last + 1)] * times, *range(last + 1, config.n_layer)]

def num_params(module):
    return sum(p.numel() for p in module.parameters())

def matrix_flops(module):   # of each token's vector times each matrix
    return 2 * sum(p.numel() for p in module.parameters() if p.dim() == 2)

def flops_per_token(model, trace=None):
    """FLOPs of matrix products and attention in a forward pass, per token. A training iteration has
    three times as many. trace: that of a pass in which tokens skipped."""
    T, C = model.config.block_size if trace is None else trace.idx.shape[1], model.config.n_embd
    n_losses = len(model.block_order) if model.training and model.config.deep_supervision else 1
    total = model.final.flops() + n_losses * matrix_flops(model.lm_head)
    if isinstance(model.policy, nn.Module):
        total += matrix_flops(model.policy)
    for i, block_idx in enumerate(model.block_order):
        block = model.blocks[block_idx]
        attn, mlp = (1, 1) if trace is None else (trace.run_rate(2 * i), trace.run_rate(2 * i + 1))
        if trace is None or trace.masks[2 * i] is not False:
            # keys and values of all tokens; queries and c_proj of those that run
            total += block.attn_residual.flops() + (1 + attn) / 2 * matrix_flops(block.attn)
            total += 4 * T * C if attn > 0 else 0
        total += mlp * matrix_flops(block.mlp)
        has_gates = trace is not None and trace.gates[2 * i + 1] is not None   # of all tokens
        total += (1 if has_gates else mlp) * block.mlp_residual.flops()
    return total

def check_config(config):
    """Raises UserError if a setting has a wrong value, or if settings contradict each other."""
    make(type(config), vars(config))
    final, policy = make_residual(config, 2 * config.n_layer), make_policy(config)
    stream = final.expand(torch.ones(1, 1, config.n_embd))
    knows_gate = hasattr(final, "gate")
    def fail(flag, why):
        raise UserError(f"--{flag} {getattr(config, flag)}: {why}")

    if config.kernels == "on" and why_no_triton():
        fail("kernels", why_no_triton())
    if config.n_embd % (2 * config.n_head):
        fail("n_embd", f"must be an even multiple of --n_head {config.n_head}")
    if policy is not None and not final.can_skip:
        fail("mod", f"tokens can't skip with --residual {config.residual}; use pre or nag")
    if isinstance(policy, GatePolicy) and not knows_gate:
        fail("mod", f"--residual {config.residual} has no gate; use nag")
    if getattr(policy, "scales_updates", False):
        if not torch.is_tensor(stream) or stream.dim() != 3:
            fail("mod", f"the stream of --residual {config.residual} isn't (B, T, C); use pre")
        if isinstance(final, (PostNorm, MixLN)):
            fail("mod", f"--residual {config.residual} normalizes sums, which it would scale")
    has_norm = any(isinstance(module, Norm) for module in make_residual(config, 0).modules())
    if config.norm != "rms" and not has_norm:
        fail("norm", f"--residual {config.residual} has its own")
    if config.gate_loss and not knows_gate:
        fail("gate_loss", f"--residual {config.residual} has no gate; use nag")
    if config.repeat and config.residual.split(":")[0] in ("attnres", "denseformer", "unet"):
        fail("repeat", f"the stream of --residual {config.residual} has a part per sublayer")

def initial_log_scale(config, power):
    """NAG's initial log_scale, chosen so that the first logits have std LOGIT_STD: a logit is
    length * cosine similarity, which has std C^-0.5 for random vectors. Each sublayer multiplies
    the length by sqrt(1 + gate^2), where gate starts at about alpha / 2."""
    gates = [0.5 * (2 * b + i + 1) ** -power for b in block_order(config) for i in (0, 1)]
    growth = sum(0.5 * math.log1p(gate ** 2) for gate in gates)
    last_length = LOGIT_STD * config.n_embd ** 0.5
    return math.log(last_length / init_std(config, "wte", config.n_embd)) - growth
