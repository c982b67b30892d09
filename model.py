"""
A GPT in which the residual connection is a part that you can swap.

A Transformer with L blocks is 2L *sublayers* (attention, MLP, attention, MLP, ...) around a *stream*. A
residual says what a sublayer reads from the stream and how its update is written back. That is all that the
variants of this file differ in:

    stream = ends.start(embedding)
    for sublayer, residual in sublayers:
        stream = residual.write(stream, sublayer(residual.read(stream)))
    logits = head(ends.finish(stream))

What a stream is, is the residual's own business: a tensor (PreNorm), a direction and a log-norm (NAG), all
sublayers' outputs (Attention Residuals), several tensors in parallel (hyper-connections, SiameseNorm). Read
from top to bottom: config, norms, residuals, attention, MLP, block, GPT.
"""
import contextlib
import dataclasses
import itertools
import math
import re
import zlib
from dataclasses import dataclass, field
from functools import partial
from typing import Callable, Literal, NamedTuple, get_args, get_origin

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from kernels import (EPS, FLOOR, depth_read, depth_read_ahead, depth_source, gather_rows,
                     inverse_rms_reference, join, nag_gain, nag_grow, nag_turn, nag_write, nag_write_rows,
                     on_triton, part, part_normed, prefixes, rms_norm, rotate_normed, scatter_rows,
                     why_no_triton, widen)

# ----------------------------------------------------------------------------- config

NORM_KINDS = "rms", "layer", "crms", "single", "seednorm", "dyt", "bhyt", "none", "batch"


def unknown_choices(config):
    """A sentence per field of a config whose value is none of those that its Literal names."""
    choices = {f.name: get_args(f.type) for f in dataclasses.fields(config) if get_origin(f.type) is Literal}
    return [f"--{name} {getattr(config, name)}: unknown; choose from {', '.join(names)}"
            for name, names in choices.items() if getattr(config, name) not in names]


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
    norm: Literal[NORM_KINDS] = "rms"  # of the stream; see NORMS
    value_residual: bool = False  # attention's values are mixed with those of the first block
    x0: bool = False              # a learned share of the embedding is added before each block
    taper: Literal["none", "linear", "cosine", "step", "fanin", "ends"] = "none"  # widths over depth
    taper_start: float = 1.5      # taper: relative width of the first block, before matching
    taper_end: float = 0.5        # taper: width of the last block (ends: of the middle one)
    taper_on: Literal["mlp", "heads", "both"] = "mlp"  # taper: hidden units of the MLP, attention heads
    taper_match: Literal["params", "flops", "none"] = "params"  # taper: equal to the uniform model in this
    share_every: int = 0          # block i has the weights of block i - share_every, but residuals of its own
    share_rank: int = 0           # share_every: rank of what a block adds to the weights that it shares
    repeat: str = ""              # run blocks several times: 9:3 block 9 three times, 9-12:3 the loop of four
    deep_supervision: bool = False  # training: mean loss of the streams after all blocks, not of the last
    kernels: Literal["auto", "on", "off"] = "auto"  # Triton kernels; auto: on CUDA
    transfer: Literal["none", "completep", "depth-mup"] = "none"  # a learning rate that fits all depths
    base_depth: int = 6           # transfer: blocks of the model for which the learning rate was tuned
    seed: int = 1337              # of the initial weights and, in train.py, of the data order
    mixln_alpha: float = 0.25     # mixln: share of the blocks, from the first, that are post-norm
    layerscale_init: float = 0.1  # layerscale: initial value of the per-channel gain
    gate_input: Literal["auto", "hu", "h", "u", "none"] = "auto"  # gates: see the stream h and/or update u
    gate_bias: float = 0.0        # gates (review, convex, highway): initial bias
    gate_range: float = 1.0       # gates: this times a sigmoid
    gate_rank: str = "full"       # gates: of their matrices; full, diag, or a number
    attnres_block: int = 1        # attnres: sublayers whose sum is one source; 1: Full AttnRes
    attnres_blocks: int = 0       # attnres: number of such depth blocks, in place of attnres_block
    attnres_weights: Literal["softmax", "sigmoid", "static"] = "softmax"  # static: the same for all tokens
    attnres_key_norm: bool = True  # attnres: keys are normalised sources
    attnres_window: int = 0       # attnres: read the last so many sources and the embedding only; 0: all
    hyper_kind: Literal["hc", "mhc", "lite"] = "lite"  # hyper: what the streams' mixing matrices may be
    hyper_n: int = 4              # hyper: number of streams
    nag_directions: int = 32      # nag: preferred directions per sublayer (C)
    nag_power: float = 0.5        # nag: initial step size of sublayer l is l ** -nag_power
    nag_head: Literal["cos", "linear"] = "cos"  # nag: logits exp(s) x cosine, or exp(s) x linear
    nag_temp: float = 0.5         # nag: standard deviation of the logits at initialisation
    mod: Literal["geometric", "router"] = "geometric"  # who decides what a token skips: its gain, or a router
    mod_rate: float = 0.0         # Mixture-of-Depths in training: share of sublayer runs to skip; 0: dense
    mod_on: Literal["gain", "m"] = "gain"  # geometric: skip where |alpha| m, or m alone, is at most tau
    mod_scope: Literal["global", "kind", "layer"] = "global"  # geometric: what shares one tau
    mod_kv: Literal["all", "kept"] = "all"  # geometric: tokens whose keys and values attention projects
    # Where few tokens would skip an attention, gathering the others' queries takes longer than that saves.
    mod_least: float = 0.25       # geometric, one tau: an attention that fewer would skip runs for all tokens
    mod_explore: float = 0.01     # geometric: share of the skips that training runs all the same, at random
    mod_floor: float = 0.05       # geometric: least share of tokens that a sublayer runs in training
    layer_drop: float = 0.0       # training skips a sublayer for a whole sequence with this probability
    layer_drop_rule: Literal["constant", "linear"] = "constant"  # linear: rises over depth

    @property
    def width(self):
        """Entries of the stream that are stored. CRMSNorm leaves one out, since all of them sum to zero."""
        return self.n_embd - (self.norm == "crms")

    @property
    def depth_scales(self):
        """
        Factors by which --transfer changes a model at --base_depth: of all updates and of AdamW's eps for
        the blocks, and of the blocks' learning rate (CompleteP, arXiv:2505.01618, alpha = 1; depth-muP,
        arXiv:2310.02244, alpha = 1/2). Weight decay depends on width only there.
        """
        if self.transfer == "none":
            return 1.0, 1.0
        ratio, alpha = self.n_layer / self.base_depth, 1.0 if self.transfer == "completep" else 0.5
        return ratio ** -alpha, ratio ** (alpha - 1)

    def order(self) -> list[int]:
        """The blocks, from 0, in the order in which they run. ValueError where --repeat makes no sense."""
        blocks = list(range(self.n_layer))
        if not self.repeat:
            return blocks
        found = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?:([0-9]+)", self.repeat)
        first, last, times = (int(x or found[1]) for x in found.groups()) if found else (0, 0, 0)
        if not 1 <= first <= last <= self.n_layer or times < 1:
            raise ValueError("say blocks from 1 to --n_layer and how often, such as 9:3 or 9-12:3")
        return blocks[:first - 1] + blocks[first - 1:last] * times + blocks[last:]

    def problems(self) -> list[str]:
        """Every reason why this config can't be built, one sentence each, naming the flags and a remedy."""
        bad = unknown_choices(self)
        bad += [f"--{name} {value}: must be a finite number" for name, value in vars(self).items()
                if isinstance(value, float) and not math.isfinite(value)]
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "nag_directions"):
            if getattr(self, name) < 1:
                bad.append(f"--{name} {getattr(self, name)}: must be 1 or more")
        for name in ("mod_rate", "mod_least", "mod_explore", "mod_floor", "layer_drop"):
            if not 0 <= getattr(self, name) < 1:
                bad.append(f"--{name} {getattr(self, name)}: is a share; use a value from 0 to below 1")
        if self.n_head >= 1 and self.n_embd % (2 * self.n_head):  # RoPE rotates pairs of channels in a head
            fits = [h for h in range(1, self.n_embd // 2 + 1) if self.n_embd % (2 * h) == 0]
            near = sorted(sorted(fits, key=lambda h: abs(h - self.n_head))[:4])
            bad.append(f"--n_head {self.n_head} --n_embd {self.n_embd}: n_embd must be an even multiple of "
                       f"n_head; try --n_head {' or '.join(map(str, near)) or '1 with an even --n_embd'}")
        kind = RESIDUALS.get(self.residual, Residual)
        kind = getattr(kind, "func", kind)   # the class behind a row of PRESETS
        routed, shared = self.mod == "router", self.share_every or self.repeat
        repeat, miss = "", 0.0
        try:
            self.order()
        except ValueError as error:
            repeat = str(error)
        if not bad and self.taper != "none" and min(self.taper_start, self.taper_end) > 0:
            miss = taper_miss(self)
        default = {field.name: field.default for field in dataclasses.fields(self)}
        said = lambda *names: " ".join(f"--{name} {getattr(self, name)}" for name in names
                                       if len(names) < 3 or getattr(self, name) != default[name])
        rules = [   # (flags, whether they are wrong, why and what to do)
            (["seed"], not 0 <= self.seed < 2 ** 31, f"must be from 0 to {2 ** 31 - 1}"),
            (["residual"], self.residual not in RESIDUALS, f"unknown; choose from {', '.join(RESIDUALS)}"),
            (["kernels"], self.kernels == "on" and why_no_triton(), why_no_triton()),
            (["mlp_ratio"], not self.mlp_ratio * self.n_embd >= 1, "leaves no hidden unit; use a larger one"),
            (["mixln_alpha"], not 0 <= self.mixln_alpha <= 1, "is a share of blocks; use one from 0 to 1"),
            (["nag_temp"], not self.nag_temp > 0, "is a standard deviation; use one above 0, such as 0.5"),
            (["mod", "mod_rate"],
             routed and not 0 < self.mod_rate * self.n_layer <= 0.9001 * (self.n_layer // 2),
             "only every second block skips, at most 0.9 of its tokens; use two blocks or more and a rate of "
             f"0.05 to {0.9 * (self.n_layer // 2) / max(2, self.n_layer):.2f}"),
            (["mod", "residual"], routed and not kind.one_tensor,
             "the router scales a stream that is one tensor; use --mod geometric, or --residual pre"),
            (["mod_rate", "residual"], self.mod_rate and not routed and not kind.knows_gain,
             "no gain to decide by; use --residual nag, or --mod router"),
            (["mod_rate", "layer_drop"], self.mod_rate and self.layer_drop,
             "both decide what is skipped; leave one of them out"),
            (["layer_drop", "residual"], self.layer_drop and not kind.single,
             "a token can't pass by a sublayer of that stream; use a residual such as pre or nag"),
            (["mod_rate", "mod_floor", "mod_explore"],
             not routed and self.mod_rate > (1 - self.mod_floor) * (1 - self.mod_explore),
             "training runs more than that; lower --mod_rate, --mod_floor or --mod_explore"),
            (["value_residual", "taper", "taper_on"],
             self.value_residual and self.taper != "none" and self.taper_on != "mlp",
             "blocks with fewer heads can't mix in the first one's values; use --taper_on mlp"),
            (["value_residual", "mod_rate", "layer_drop"],
             self.value_residual and (self.mod_rate or self.layer_drop),
             "a token that skips the first attention has no first values; leave --value_residual out"),
            (["x0", "residual"], self.x0 and not kind.one_tensor,
             "adds to a stream that is one tensor; use --residual pre"),
            (["residual", "x0", "mod"], self.residual == "ngpt" and (self.x0 or routed),
             "would push the stream off its sphere; leave --x0 and --mod router out"),
            (["norm", "residual"], self.norm != "rms" and self.residual in ("nag", "ngpt", "rezero"),
             "that residual has no norm to replace; leave --norm out"),
            (["gate_range"], not self.gate_range > 0, "must be above 0, such as 1 or 2"),
            (["gate_rank"], not re.fullmatch("full|diag|[1-9][0-9]*", str(self.gate_rank)),
             "unknown; use full, diag, or a number such as 8"),
            (["attnres_block"], self.attnres_block < 1, "must be 1 or more"),
            (["attnres_blocks"], self.attnres_blocks < 0, "must be 1 or more, or 0 to go by --attnres_block"),
            (["attnres_block", "attnres_blocks"], self.attnres_block > 1 and self.attnres_blocks,
             "say the same thing in two ways; give one of them"),
            (["attnres_blocks", "n_layer"], self.attnres_blocks > 0 and self.n_layer > 0 and (
                -(-2 * self.n_layer // -(-2 * self.n_layer // self.attnres_blocks)) != self.attnres_blocks),
             "2 n_layer sublayers can't make that many depth blocks of one size; say --attnres_block"),
            (["attnres_window"], self.attnres_window < 0, "must be 0 or more"),
            (["attnres_window", "attnres_block", "attnres_blocks"],
             self.attnres_window and (self.attnres_block > 1 or self.attnres_blocks),
             "the window is one of Full AttnRes; leave the blocks out"),
            (["taper_start", "taper_end"], min(self.taper_start, self.taper_end) <= 0, "must be above 0"),
            (["taper", "taper_match"], abs(miss) > 0.01, f"rounded widths miss the uniform model's "
             f"{self.taper_match} by {miss:+.1%}; use a wider model, or --taper_match none"),
            (["repeat"], repeat, repeat),
            (["share_every"], not 0 <= self.share_every <= self.n_layer, "must be from 1 to --n_layer, or 0"),
            (["share_rank", "share_every"], self.share_rank < 0 or self.share_rank and not self.share_every,
             "is the rank of what blocks add to weights that they share; give --share_every, and 1 or more"),
            (["share_every", "repeat"], self.share_every and self.repeat, "give one of them"),
            (["share_every", "repeat", "taper"], shared and self.taper != "none",
             "blocks of different widths can't have the same weights; leave --taper out"),
            (["share_every", "repeat", "mod_rate", "residual", "value_residual", "x0"],
             shared and (self.mod_rate or self.value_residual or self.x0 or self.residual in (
                 "attnres", "denseformer", "ngpt")),
             "blocks that run more than once go with plain residuals only, such as pre, nag or review"),
            (["base_depth"], self.base_depth < 1, "is a number of blocks; use 1 or more, such as 6"),
            (["transfer", "residual"], self.transfer != "none" and self.residual not in TRANSFERS,
             f"its rules are for plain sums of updates; use --residual {' or '.join(TRANSFERS)}"),
            (["transfer", "share_every", "repeat"], self.transfer != "none" and shared,
             "its rules are for blocks with weights of their own; leave --transfer out"),
            (["hyper_n", "hyper_kind"], not 1 <= self.hyper_n <= (5 if self.hyper_kind == "lite" else 64),
             "must be from 1 to 64 streams, and to 5 for lite, which weighs all their permutations"),
        ]
        return bad + [f"{said(*flags)}: {why}" for flags, wrong, why in rules if wrong]


INIT_STD = 0.02     # of every weight matrix, before a residual rescales it
ROUTER_LOSS = 0.01  # weight of the loss that lets a router know at sampling what it chose in training


def full_precision(x):
    """A context without autocast, for matrix products that decide something."""
    on = torch.is_autocast_enabled(x.device.type)   # asking is cheaper than switching off
    return torch.autocast(x.device.type, enabled=False) if on else contextlib.nullcontext()


# ----------------------------------------------------------------------------- norms

def batch_norm(norm, x):
    """Divide by the root mean square over batch and time. In training a token thereby sees later ones."""
    square = norm.square
    if norm.training:
        square = widen(x).square().flatten(0, -2).mean(0)                            # (C,)
        norm.square.lerp_(square.detach().to(norm.square.dtype), 0.1)
    return (x * (square + EPS).rsqrt()).to(x.dtype) * norm.gain


# What --norm can be: (..., C) -> (..., C). `seednorm` lets the size of its input through (arXiv:2510.22777),
# `dyt` uses no statistics (arXiv:2503.10622), `bhyt` is the exact form of arXiv:2601.09719, `crms` the
# RMSNorm of a vector of which one entry, minus the sum of the others, is not stored (arXiv:2305.14858), and
# `batch` the negative control: what a batch-statistics norm does to a causal model.
NORMS = {
    "rms": lambda norm, x: rms_norm(x, norm.gain),
    "layer": lambda norm, x: rms_norm(x - x.mean(-1, keepdim=True), norm.gain),
    "crms": lambda norm, x: x * ((x.square().sum(-1, keepdim=True) + x.sum(-1, keepdim=True).square())
                                 / (x.shape[-1] + 1) + EPS).rsqrt() * norm.gain,
    "single": lambda norm, x: rms_norm(x) * norm.gain,
    "seednorm": lambda norm, x: rms_norm(x) * (torch.tanh(x @ norm.beta)[..., None] * norm.alpha + norm.gain),
    "dyt": lambda norm, x: torch.tanh(norm.a * x) * norm.gain + norm.bias,
    "bhyt": lambda norm, x: torch.tanh(norm.lam / 10 * rms_norm(x)) * norm.gain,
    "none": lambda norm, x: x,
    "batch": batch_norm,
}


class Norm(nn.Module):
    """One norm of the kind that --norm says, a row of NORMS, with its parameters."""
    decayed = "alpha", "beta"   # of seednorm, by its paper, though they are no matrices

    def __init__(self, config):
        super().__init__()
        self.kind, C = config.norm, config.width
        parameter = lambda value, *shape: nn.Parameter(torch.full(shape, value))
        if self.kind != "none":
            self.gain = parameter(1.0) if self.kind == "single" else parameter(1.0, C)
        if self.kind == "seednorm":
            self.alpha, self.beta = parameter(1.0, C), parameter(0.0, C)
        elif self.kind == "dyt":
            self.a, self.bias = parameter(0.5), parameter(0.0, C)
        elif self.kind == "bhyt":
            self.lam = parameter(2.0)
        elif self.kind == "batch":
            self.register_buffer("square", torch.ones(C))

    def forward(self, x):
        return NORMS[self.kind](self, x)


# ----------------------------------------------------------------------------- residuals

class Residual(nn.Module):
    """
    The protocol, with the answers that most residuals share. A model of L blocks makes 2L + 1 of these:
    number l = 1 .. 2L belongs to sublayer l (odd l: attention, even l: MLP), number 2L + 1 opens and closes
    the stream.

        start(embedding)             (B, T, C) -> stream
        gain(stream)                 -> what read and write both need; NAG: (B, T, 1), the size of the write
        read(stream, gain)           -> (B, T, C), the sublayer's input
        write(stream, update, gain)  -> the stream after the sublayer's output (B, T, C) has been written
        finish(stream)               -> (B, T, C), the input of the head
        score(gain)                  -> (B, T), a token skips the sublayer where this is at most tau
        as_tensor(stream)            -> (B, T, C), the stream as one vector per token, for measurements

    A skipped token is simply not written: its stream stays what it was. So `read` and `write` also get
    streams of kept tokens only, (N, C) in place of (B, T, C), and must not mix tokens.
    """
    gates = ()          # parameters that train.py gives their own learning rate and no weight decay
    vectors = ()        # parameters that are no matrices, though they have two dimensions: no weight decay
    single = True       # a token can skip a sublayer: its stream is tensors that then stay what they were
    one_tensor = True   # ... namely one tensor (B, T, C)
    knows_gain = False  # ... and gain (B, T, 1) says beforehand how much a write will change
    looks_ahead = False   # ... and Ahead knows how to ask for those of several sublayers at once
    one_graph = True    # all blocks can share one compiled graph

    def start(self, x):
        return x

    def gain(self, stream):
        return None

    def score(self, gain):
        return gain.abs().squeeze(-1)

    def read_rows(self, stream, rows):
        """-> what the sublayer reads for the kept tokens (N, C), and what write_rows wants to know"""
        kept, rest = take(stream, rows)
        return self.read(kept), (kept, rest)

    def write_rows(self, held, update, gain, rows):
        """update (N, C), of the kept tokens -> the stream of all, in which those are written"""
        kept, rest = held
        gain = None if gain is None else gather_rows(gain.flatten(0, 1), rows.index)
        return put(rest, rows, self.write(kept, update, gain))

    def as_tensor(self, stream):
        return stream

    def finish(self, stream):
        return self.read(stream)

    def head_weight(self, weight):
        return weight  # (V, C), for residuals whose head isn't an ordinary linear layer

    def init_sublayer(self, sublayer):
        """Rescale this residual's freshly drawn sublayer, in place. As in GPT-2, the sum of 2L updates starts
        with the variance of one."""
        c = self.config   # with --transfer, write itself scales the updates of deeper models
        sublayer.c_proj.weight.mul_((2 * (c.n_layer if c.transfer == "none" else c.base_depth)) ** -0.5)

    def constrain(self, module):
        """Bring a module's weights back to where they belong, in place, after an optimizer step."""

    def cost(self):
        """(parameters, forward matmul FLOPs per token) of this residual."""
        return sum(p.numel() for p in self.parameters()), 0


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
TRANSFERS = "pre", "peri", "skipinit", "layerscale"   # those that can scale their updates with depth


class Additive(Residual):
    """
    x <- N_out(a x + b N_post(F(s N_in(x)))), every N a Norm. The stream is the tensor
    x. Most residuals of the literature are a row of this one table (PRESETS): PreNorm, PostNorm, LayerNorm
    Scaling, ...
    """
    def __init__(self, preset, config, l):
        super().__init__()
        row, self.config = PRESETS[preset](config, l), config
        self.init, is_end = row.init, l > 2 * config.n_layer
        # the end needs one norm at most, the final one, and it sits where a sublayer's n_in would
        n_in, n_post, n_out = (row.n_final, False, False) if is_end else (row.n_in, row.n_post, row.n_out)
        norm = lambda wanted: Norm(config) if wanted else None
        self.n_in, self.n_post, self.n_out = norm(n_in), norm(n_post), norm(n_out)
        # constants that depend on depth are tensors: a Python float would make torch.compile start over per
        # layer
        constant = lambda value: None if value is None or is_end else torch.tensor(value)
        self.register_buffer("a", constant(row.a), persistent=False)
        self.register_buffer("s", constant(row.s), persistent=False)
        scale = None if config.transfer == "none" else config.depth_scales[0]
        self.register_buffer("scale", constant(scale), persistent=False)
        self.b = None
        if row.b is not None and not is_end:
            self.b = nn.Parameter(torch.full((config.width,) if row.b_vector else (), row.b))

    def read(self, x, gain=None):  # (B, T, C) -> (B, T, C)
        x = x if self.n_in is None else self.n_in(x)
        return x if self.s is None else x * self.s

    def read_rows(self, x, rows):
        if self.n_in is None or self.n_in.kind != "rms" or not on_triton(x, self.config.kernels):
            return super().read_rows(x, rows)
        kept, normed, rest = part_normed(x, rows.index, self.n_in.gain, self.config.kernels)
        return normed if self.s is None else normed * self.s, (kept, rest)

    def write(self, x, update, gain=None):
        if self.n_post is not None:
            update = self.n_post(update)
        if self.b is not None:
            update = update * self.b
        if self.scale is not None:
            update = update * self.scale
        x = (x if self.a is None else x * self.a) + update
        return x if self.n_out is None else self.n_out(x)

    def init_sublayer(self, sublayer):
        if self.init == "scaled":
            super().init_sublayer(sublayer)
        elif self.init == "deepnorm":  # Wang et al. 2022: gain (8N)^(-1/4) on everything but queries and keys
            sublayer.c_proj.weight.mul_((8 * self.config.n_layer) ** -0.25)
            sublayer.value_weight().mul_((8 * self.config.n_layer) ** -0.25)


class NAG(Residual):
    """
    Norm-AGnostic residual (Figliolia and Millidge 2026, arXiv:2606.16112, eqs. 3-24).
    The stream is a pair: a direction r (B, T, C), always of norm sqrt(C), and the log of the norm it stands
    for, s (B, T, 1). A write turns r by the angle atan(alpha m) towards the part of the update that is
    orthogonal to r; how far is known from r alone, *before* the sublayer runs. A token that would hardly turn
    may skip it: Mixture-of-Depths without a router.
    """
    gates = ("alpha", "beta", "w", "b", "p", "g")
    one_tensor = False
    knows_gain = looks_ahead = True

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
        # train.py lets the step size rise from 0: the write brings even an untrained update to full size
        self.register_buffer("warm", torch.ones(()), persistent=False)

    def initial_g(self):
        """The g that gives the first logits a standard deviation of nag_temp; with g = 0 they all but
        agree."""
        c, root = self.config, self.config.n_embd ** 0.5
        logit_std = 1 / root if c.nag_head == "cos" else INIT_STD * root          # at log-norm 0
        return math.log(c.nag_temp / logit_std) - self.growth() - math.log(INIT_STD)

    def growth(self):
        """By how much all sublayers raise the log-norm at initialisation. m is close to 1/2 there."""
        return sum(0.5 * math.log1p(0.25 * l ** (-2 * self.config.nag_power))
                   for l in range(1, 2 * self.config.n_layer + 1))

    def start(self, x):  # (B, T, C) -> (B, T, C), (B, T, 1)
        wide = widen(x)
        # else a mean stays that no (centred) update could ever change
        wide = wide - wide.mean(-1, keepdim=True)
        rho = wide.square().mean(-1, keepdim=True).clamp_min(EPS ** 2).sqrt()
        return (wide / rho).to(x.dtype), rho.log() + widen(self.g)  # the log-norm is never stored in bf16

    def read(self, stream, gain=None):
        return stream[0]

    def modulator(self, r, alpha=None):
        """alpha m(r) (..., 1), m in (0, 1], eq. 13; alpha: default 1."""
        with full_precision(r):   # the skip decision hangs on it: not in bf16
            beta, w, b, p = map(widen, (self.beta, self.w, self.b, self.p))
            near = F.linear(widen(r), w, b)                                          # (..., n)
            alpha = torch.ones_like(beta) if alpha is None else alpha
            return nag_gain(near, p.softmax(0), alpha, F.softplus(beta), self.config.kernels)

    def gain(self, stream):
        """alpha m(r), signed (..., 1): the relative size of the write that the stream is about to get."""
        return self.modulator(stream[0], widen(self.alpha) * self.warm)

    def score(self, gain, alpha=None):
        if self.config.mod_on == "m":
            alpha = self.alpha * self.warm if alpha is None else alpha
            gain = (gain / alpha).nan_to_num(math.inf)   # alpha 0: unknown, so not skipped
        return gain.abs().squeeze(-1)

    def write(self, stream, f, gain=None):
        r, s = stream
        a = self.gain(stream) if gain is None else gain
        return nag_write(r, s, f, a, kernels=self.config.kernels)

    def read_rows(self, stream, rows):
        if on_triton(stream[0], self.config.kernels):
            return gather_rows(stream[0].flatten(0, 1), rows.index), stream
        kept, rest = take(stream[0], rows)
        return kept, (kept, rest, stream[1])

    def write_rows(self, held, f, gain, rows):
        if on_triton(f, self.config.kernels):
            return nag_write_rows(*held, f, gain, rows.number())   # one pass over the stream
        kept, rest, s = held
        turned = nag_turn(kept, f, gather_rows(gain.flatten(0, 1), rows.index))
        return put(rest, rows, turned), nag_grow(s, gain * rows.keep[..., None])   # too small to gather

    def finish(self, stream):
        r, s = stream
        return (r * (s.exp() / self.config.n_embd if self.config.nag_head == "cos" else s.exp())).to(r.dtype)

    def head_weight(self, weight):
        if self.config.nag_head == "linear":
            return weight
        # rows of norm sqrt(C): <r, row> / C is a cosine
        return rms_norm(weight - weight.mean(-1, keepdim=True))

    def init_sublayer(self, sublayer):
        pass   # the write normalises the update: a scale of c_proj would be undone

    def as_tensor(self, stream):
        return stream[0] * stream[1].exp()

    def cost(self):
        C, n = self.config.n_embd, self.config.nag_directions
        return (1, 0) if self.is_end else (n * C + 2 * n + 2, 2 * n * C + 2 * n)


class Depth(NamedTuple):
    """The stream of Attention Residuals: what was written so far, in pieces that a read can weigh."""
    sources: tuple      # of (B, T, C): the embedding, then one per depth block, the sum of its updates
    block: tuple        # the number of each source's depth block; the embedding's is 0
    weights: tuple      # the parameters of all reads
    ahead: tuple = ()   # what depth_read_ahead gave: (first read, number of sources it saw, its results)


class AttnRes(Residual):
    """
    Attention Residuals (Kimi Team 2026, arXiv:2603.15031, eqs. 2-4; Block: section 3.2). Nothing is added up:
    each sublayer reads a softmax-weighted mean of the embedding and of all earlier updates, or of their sums
    over depth blocks of S sublayers (attnres_block), by a query of its own, a parameter. One more read is
    before the head. Queries start at zero: equal weights, which after the norm is PreNorm exactly.

    The ends own the parameters of all reads, row l - 2 those of read l = 2 .. 2L + 1 (read 1 has one source).
    """
    single = one_tensor = False
    one_graph = False   # the number of sources grows with depth
    vectors = "query", "key_gain", "logits"

    def __init__(self, config, l):
        super().__init__()
        self.config, self.l, self.norm = config, l, Norm(config)
        n = 2 * config.n_layer
        self.size = -(-n // config.attnres_blocks) if config.attnres_blocks else config.attnres_block
        self.shared = self.size if self.size > 1 else 8   # reads that share one pass over the sources before
        self.softmax = config.attnres_weights == "softmax" and config.attnres_key_norm
        if l == n + 1 and config.attnres_weights == "static":
            self.logits = nn.Parameter(torch.zeros(n, n + 1))           # (read, source)
        elif l == n + 1:
            self.query = nn.Parameter(torch.zeros(n, config.width))
            self.key_gain = nn.Parameter(torch.ones(n, config.width)) if config.attnres_key_norm else None

    def start(self, x):
        x = depth_source(x, self.config.kernels)
        if self.config.attnres_weights == "static":
            return Depth((x,), (0,), (self.logits,))
        weights = self.query if self.key_gain is None else self.query * self.key_gain
        return self.read_ahead(Depth((x,), (0,), weights.unbind()), 0)

    def read(self, stream, gain=None):
        with full_precision(stream.sources[0]):
            if self.l == 1:
                return self.norm(stream.sources[0])
            # a mean, times the number of sources: with equal weights that is the stream of PreNorm
            n = len(stream.sources)
            if not self.softmax:
                weights = self.weigh(stream)
                return self.norm(n * sum(p[..., None] * v for p, v in zip(weights, stream.sources)))
            query, ahead, sources = stream.weights[self.l - 2], None, stream.sources
            if stream.ahead and 0 <= self.l - stream.ahead[0] < len(stream.ahead[2]):
                first, seen, reads = stream.ahead
                ahead, sources = reads[self.l - first], sources[seen:]
            if self.norm.kind == "rms":   # in one go with the read, and whatever the scale
                return depth_read(query, sources, ahead, self.norm.gain, self.config.kernels)
            return self.norm(n * depth_read(query, sources, ahead, kernels=self.config.kernels))

    def weigh(self, stream):
        """-> the weights of the sources (n, B, T), for figures and for the variants of the ablation table"""
        c = self.config
        if self.l == 1:
            return torch.ones_like(stream.sources[0][None, ..., 0])
        if c.attnres_weights == "static":
            return stream.weights[0][self.l - 2, list(stream.block)].softmax(0)[:, None, None]
        size = inverse_rms_reference if c.attnres_key_norm else lambda v: 1.0
        scores = torch.stack([(v @ stream.weights[self.l - 2]) * size(v) for v in stream.sources])
        return scores.sigmoid() if c.attnres_weights == "sigmoid" else scores.softmax(0)

    def write(self, stream, update, gain=None):
        sources, block, number = stream.sources, stream.block, (self.l - 1) // self.size + 1
        if block[-1] == number:   # its depth block has begun
            sources = *sources[:-1], sources[-1] + update
        else:
            sources, block = (*sources, update.to(sources[0].dtype)), (*block, number)
        if self.l % self.size == 0:   # its depth block is complete, and nothing but reads will see it
            sources = *sources[:-1], depth_source(sources[-1], self.config.kernels)
        window = self.config.attnres_window
        if window and len(sources) > window + 1:
            sources, block = (sources[0], *sources[-window:]), (0, *block[-window:])
        stream = stream._replace(sources=sources, block=block)
        return self.read_ahead(stream, self.l) if self.l % self.shared == 0 else stream

    def read_ahead(self, stream, l):
        """What is there after sublayer l, read with the queries of the reads that follow, all at once."""
        if not self.softmax or self.config.attnres_window:
            return stream
        first, last = max(2, l + 1), l + self.shared
        queries = stream.weights[first - 2:last - 1]
        if not queries:
            return stream
        with full_precision(stream.sources[0]):
            reads = depth_read_ahead(torch.stack(queries), stream.sources, self.config.kernels)
        return stream._replace(ahead=(first, len(stream.sources), reads))

    def as_tensor(self, stream):
        return sum(stream.sources)   # what the residual stream of PreNorm would be

    def cost(self):
        """The matrix products are in the shared passes: a source is weighed and added for each read."""
        n, C = 2 * self.config.n_layer, self.config.width
        if self.l <= n or not self.softmax or self.config.attnres_window:
            return super().cost()
        pairs = sum((l // self.size + 1) * len(range(max(2, l + 1), min(l + self.shared, n + 1) + 1))
                    for l in range(0, n + 1, self.shared))
        return super().cost()[0], 4 * C * pairs


class DenseFormer(Residual):
    """
    PreNorm, and after each block a weighted sum of the embedding and of all blocks' outputs so far, with
    weights that are parameters (Pagliardini et al. 2024, arXiv:2402.02622). The stream: x, and those outputs
    by number, as a removed block has none.
    """
    single = one_tensor = one_graph = False

    def __init__(self, config, l):
        super().__init__()
        self.config, self.l, self.norm, self.a = config, l, Norm(config), None
        if l % 2 == 0:   # the end of block l / 2
            self.a = nn.Parameter(F.one_hot(torch.tensor(l // 2), l // 2 + 1).to(torch.get_default_dtype()))

    def start(self, x):
        return x, {0: x}

    def read(self, stream, gain=None):
        return self.norm(stream[0])

    def write(self, stream, update, gain=None):
        x, past = stream[0] + update, stream[1]
        if self.a is not None:
            past = past | {self.l // 2: x}
            x = sum(self.a[i] * v for i, v in past.items())
        return x, past

    def as_tensor(self, stream):
        return stream[0]


# What the gate sees, and whether the stream is scaled by one minus the gate. `review`: Kramer 2026,
# arXiv:2606.31859. `highway` is that paper's baseline; the Highway layer of 2015 is convex with
# --gate_input h --gate_bias -3.
GATES = {"review": ("hu", False), "convex": ("hu", True), "highway": ("h", False)}


class Gated(Residual):
    """
    PreNorm whose update passes a gate, per channel, that sees the stream h and the update u:
    h <- h + r u, r = sigmoid(W_h rms(h) + W_u rms(u) + b). The convex form, h <- (1 - r) h + r u, is the one
    that fails with depth unless b starts well below 0. Everything starts at zero, so r = 1/2.
    """
    def __init__(self, preset, config, l):
        super().__init__()
        C, n, (inputs, self.convex) = config.width, 2 * config.n_layer, GATES[preset]
        self.config, self.norm, rank = config, Norm(config), str(config.gate_rank)
        inputs = dict(auto=inputs, none="").get(config.gate_input, config.gate_input)
        bias, zeros = torch.full((C,), config.gate_bias), lambda *shape: nn.Parameter(torch.zeros(shape))
        self.register_parameter("b", nn.Parameter(bias) if inputs and l <= n else None)
        self.register_buffer("constant", None if inputs else bias, persistent=False)
        self.W, self.up = nn.ParameterDict(), None
        for name in inputs if l <= n else ():
            if rank.isdigit():   # W = up @ down; up starts at zero
                rng = torch.Generator().manual_seed(config.seed * 1000 + 2 * l + (name == "u"))
                self.W[name] = nn.Parameter(torch.randn(int(rank), C, generator=rng) * C ** -0.5)
            else:
                self.W[name] = zeros(C, C) if rank == "full" else zeros(C)
        if rank.isdigit() and self.W:
            self.up = zeros(C, int(rank))

    def read(self, h, gain=None):
        return self.norm(h)

    def gate(self, h, u):
        """-> r (..., C), in fp32 or wider"""
        seen = {name: rms_norm(widen(x), eps=1e-5) for name, x in (("h", h), ("u", u)) if name in self.W}
        with full_precision(h):
            if self.config.gate_rank == "diag":
                z = sum((W * seen[name] for name, W in self.W.items()), 0.0)
            else:
                z = sum((F.linear(seen[name], widen(W)) for name, W in self.W.items()), 0.0)
                z = z if self.up is None else F.linear(z, widen(self.up))
        return self.config.gate_range * torch.sigmoid(z + (self.constant if self.b is None else self.b))

    def write(self, h, u, gain=None):
        r = self.gate(h, u)
        return torch.addcmul((1 - r) * h if self.convex else h, r, u).to(h.dtype)

    def cost(self):
        products = [*self.W.values()] + ([] if self.up is None else [self.up])
        return super().cost()[0], sum(2 * W.numel() for W in products if W.dim() == 2)


class Hyper(Residual):
    """
    Hyper-connections: n streams in parallel (B, T, n, C). A sublayer reads a mixture of them, pre (n), its
    update is written to each with a weight, post (n), and the streams are mixed among themselves, res (n, n);
    all three depend on the token. --hyper_kind says what res may be: `hc` anything (arXiv:2409.19606), `mhc`
    doubly stochastic by 20 Sinkhorn steps (arXiv:2512.24880), `lite` a mixture of the n! permutations
    (arXiv:2601.05732), doubly stochastic as it stands. At the start all n streams are PreNorm's one.
    """
    single = one_tensor = False
    vectors = "static",

    def __init__(self, config, l):
        super().__init__()
        C, n, self.kind = config.width, config.hyper_n, config.hyper_kind
        self.config, self.norm, self.n = config, Norm(config), n
        if l > 2 * config.n_layer:
            return
        eye, reads = torch.eye(n), F.one_hot(torch.tensor((l - 1) % n), n).to(torch.get_default_dtype())
        if self.kind == "hc":   # per stream: what is read of it, where it goes, what is written to it
            self.sizes, self.scaled, inputs = (1, n, 1), (1 + n, 1), C
            static = torch.cat((reads[:, None], eye, torch.ones(n, 1)), dim=1)
        else:                   # logits
            mixing, inputs = -8 * (1 - eye.flatten()), n * C
            if self.kind == "lite":
                permutations = torch.stack([eye[list(p)].flatten() for p in itertools.permutations(range(n))])
                self.register_buffer("permutations", permutations, persistent=False)          # (n!, n n)
                mixing = torch.full((len(permutations),), -8.0)
                mixing[0] = 0.0   # the identity
            self.sizes = self.scaled = n, n, len(mixing)
            static = torch.cat((8 * reads - 4, torch.zeros(n), mixing))
        self.static, self.scale = nn.Parameter(static), nn.Parameter(torch.full((len(self.scaled),), 0.01))
        self.dynamic = nn.Parameter(torch.zeros(sum(self.sizes), inputs))

    def start(self, x):
        return x[..., None, :].expand(*x.shape[:-1], self.n, x.shape[-1])

    def gain(self, x):
        """x (..., n, C) -> pre (..., n), post (..., n), res (..., n, n): new stream i is res[i] @ streams"""
        with full_precision(x):
            seen = rms_norm(widen(x) if self.kind == "hc" else widen(x).flatten(-2))
            moving = F.linear(seen, widen(self.dynamic))
            moving = torch.tanh(moving) if self.kind == "hc" else moving
            scale = torch.cat([s.expand(size) for s, size in zip(self.scale, self.scaled)])
            parts = (self.static + scale * moving).split(self.sizes, dim=-1)
            if self.kind == "hc":
                pre, res, post = parts
                return pre.squeeze(-1), post.squeeze(-1), res.transpose(-1, -2)
            pre, post, res = parts
            pre, post = pre.sigmoid(), 2 * post.sigmoid()
            if self.kind == "lite":
                res = res.softmax(-1) @ widen(self.permutations)
            res = res.unflatten(-1, (self.n, self.n))
            return pre, post, sinkhorn(res) if self.kind == "mhc" else res

    def read(self, x, gain=None):
        pre, _, _ = self.gain(x) if gain is None else gain
        with full_precision(x):
            return self.norm((pre[..., None, :].to(x.dtype) @ x).squeeze(-2))

    def write(self, x, update, gain=None):
        _, post, res = self.gain(x) if gain is None else gain
        with full_precision(x):   # a stream that every write rounds to bf16 would drift
            return torch.addcmul(res.to(x.dtype) @ x, post[..., None], update[..., None, :]).to(x.dtype)

    def finish(self, x):
        return self.norm(x.mean(-2))

    def as_tensor(self, x):
        return x.mean(-2)

    def cost(self):
        n, C, params = self.n, self.config.width, super().cost()[0]
        if not hasattr(self, "dynamic"):
            return params, 0
        seen = 2 * self.dynamic.numel() * (n if self.kind == "hc" else 1)
        mixing = 2 * self.permutations.numel() if self.kind == "lite" else 0
        return params, seen + mixing + 2 * n * C + 2 * n * n * C


def sinkhorn(logits, steps=20):
    """(..., n, n) -> positive matrices whose rows and (up to the last step) columns sum to 1"""
    x = logits   # in logarithms, where nothing overflows
    for _ in range(steps):
        x = x - x.logsumexp(-2, keepdim=True)
        x = x - x.logsumexp(-1, keepdim=True)
    return x.exp()


class Siamese(Residual):
    """
    SiameseNorm (arXiv:2602.08064, in the form of the released code): two streams, x kept small by a norm as
    in PostNorm, y left to grow as in PreNorm, and sublayers that read their sum. In block i, x gets
    1 / sqrt(2 i) of an update.
    """
    single = one_tensor = False

    def __init__(self, config, l):
        super().__init__()
        self.config = config
        self.n_x, self.n_y, self.n_in = Norm(config), Norm(config), Norm(config)
        self.register_buffer("share", torch.tensor((l + l % 2) ** -0.5), persistent=False)   # 1 / sqrt(2 i)

    def start(self, x):
        return x, x

    def gain(self, stream):
        return self.n_x(stream[0])

    def read(self, stream, gain=None):
        return self.n_in((self.gain(stream) if gain is None else gain) + self.n_y(stream[1]))

    def write(self, stream, update, gain=None):
        x = self.gain(stream) if gain is None else gain
        return x + self.share * update, stream[1] + update

    def as_tensor(self, stream):
        return stream[1]


class NGPT(Residual):
    """
    nGPT (Loshchilov et al. 2024, arXiv:2410.01131): the stream stays on a sphere and moves towards the
    normalised update by a learned step per channel, h <- U(h + |alpha| (U(f) - h)). Weights are normalised
    along the stream's axis after each optimizer step. U is x / rms(x): norm sqrt(C) where the paper has 1,
    which its factors sqrt(C) before the MLP's activation and sqrt(hs) in attention then have inside already.
    """
    def __init__(self, config, l):
        super().__init__()
        self.config, self.l, root = config, l, config.width ** -0.5
        # parameters start at 1 / sqrt(C), of the size of the weights, so that one learning rate fits all
        if l <= 2 * config.n_layer:
            self.alpha = nn.Parameter(torch.full((config.width,), root))
        else:
            self.logit_scale = nn.Parameter(torch.full((config.vocab_size,), root))

    def start(self, x):
        return rms_norm(x)

    def read(self, h, gain=None):
        return h

    def write(self, h, update, gain=None):
        step = self.alpha.abs() * (0.05 * self.config.width ** 0.5)
        return rms_norm(torch.addcmul(h, step, rms_norm(widen(update)) - h)).to(h.dtype)

    def head_weight(self, weight):
        return weight * self.logit_scale[:, None]   # with unit rows, the first logits are cosines

    def n_scale(self):
        """Of the sublayer: queries and keys have a scale per channel, the MLP's hidden layer one per unit."""
        heads, _, fan_out = block_shapes(self.config)[(self.l - 1) // 2]
        return 2 * heads * self.config.n_embd // self.config.n_head if self.l % 2 else fan_out

    def init_sublayer(self, sublayer):
        sublayer.scale = nn.Parameter(torch.ones(self.n_scale()))

    def cost(self):
        params, flops = super().cost()
        return params + (self.n_scale() if self.l <= 2 * self.config.n_layer else 0), flops

    def constrain(self, module):
        for name, p in module.named_parameters():
            if p.dim() == 2:
                p.div_(p.norm(dim=0 if "c_proj" in name else 1, keepdim=True))


class Template(Residual):
    """
    Copy me. A residual in fifteen lines: PreNorm whose updates are each multiplied by one learned number,
    x <- x + b F(R(x)), b = 1 at first. Rename the class, give it a key of RESIDUALS, and change `read` and
    `write`: flags, figures, counts and generic tests follow. What else can be answered: see Residual.
    """
    def __init__(self, config, l):   # l = 1 .. 2L: a sublayer's; 2L + 1: both ends of the stream
        super().__init__()
        self.config, self.norm = config, Norm(config)   # the kind of norm that --norm says
        self.b = nn.Parameter(torch.ones(())) if l <= 2 * config.n_layer else None   # the ends write nothing

    def start(self, x):                        # what the embedding (B, T, C) becomes: here the stream is it
        return x

    def read(self, x, gain=None):              # what the sublayer gets to see (B, T, C)
        return self.norm(x)

    def write(self, x, update, gain=None):     # the stream once the sublayer's output (B, T, C) is in it
        return x + self.b * update

    def finish(self, x):                       # what the head gets to see (B, T, C)
        return self.norm(x)

    def as_tensor(self, x):                    # one vector per token, for the figures
        return x


RESIDUALS = {**{name: partial(Additive, name) for name in PRESETS}, "nag": NAG, "attnres": AttnRes,
             "denseformer": DenseFormer, **{name: partial(Gated, name) for name in GATES}, "hyper": Hyper,
             "siamese": Siamese, "ngpt": NGPT, "template": Template}


# ----------------------------------------------------------------------------- sublayers

class Attention(nn.Module):
    """Causal multi-head attention with RoPE and normalised queries and keys."""
    mixes_tokens = True

    def __init__(self, config, i):
        super().__init__()
        self.n_head, self.hs = block_shapes(config)[i][0], config.n_embd // config.n_head
        C = self.n_head * self.hs
        self.c_attn = nn.Linear(config.width, 3 * C, bias=False)
        self.c_proj = nn.Linear(C, config.width, bias=False)
        # value residual: the weights of the first block's values and of its own
        self.mix = nn.Parameter(torch.full((2,), 0.5)) if config.value_residual and i else None
        self.scale = None   # of queries and keys, per channel (2C,), if a residual wants one

    def value_weight(self):
        return self.c_attn.weight[2 * self.c_proj.in_features:]

    def heads(self, x):
        return x.unflatten(-1, (-1, self.n_head, self.hs))                           # (..., parts, nh, hs)

    def forward(self, x, rope, cache=None, rows=None, everything=None, first=None):
        """
        x (B, T, C) -> (B, T, C). With rows, x (N, C) are the kept tokens: -> (N, C). They attend to all
        tokens, everything (B, T, C), or to each other. first: a list with the first block's values, which
        that block puts there (ResFormer, arXiv:2410.17897).
        """
        if rows is not None:
            return self.c_proj(self.of_kept(x, rope, cache, rows, everything).flatten(-2))
        q, k, v = self.qkv(x, rope)                                                  # (B, T, nh, hs) each
        if first and self.mix is not None:
            v = self.mix[0] * first[0] + self.mix[1] * v
        elif first is not None and not first:
            first.append(v)
        keys, values, start = (k, v, 0) if cache is None else self.append(k, v, cache)
        T, S = q.shape[1], keys.shape[1]
        # one token sees all of the cache, a prompt what is behind it: only a later chunk needs a mask
        mask = causal_mask(torch.arange(start, S, device=x.device), S) if 1 < T < S else None
        return self.c_proj(attend(q, keys, values, mask, is_causal=mask is None and T > 1).flatten(-2))

    def of_kept(self, x, rope, cache, rows, everything):
        """x (N, C), kept tokens -> what each of their heads sees (N, nh, hs)"""
        turn = rope[:, :1][rows.place]                                               # (N, 1, hs)
        if everything is None:
            q, k, v = self.qkv(x, turn)
            if cache is None:   # kept tokens keep their order, padding comes last: nothing is left to mask
                return rows.unpad(attend(rows.pad(q), rows.pad(k), rows.pad(v), is_causal=True))
            keys, values, position = cache.append_rows(k, v, rows)
        else:
            w_q, w_kv = self.c_attn.weight.split((self.n_head * self.hs, 2 * self.n_head * self.hs))
            q, = rotate_normed(self.heads(F.linear(x, w_q)), turn, 1)                # (N, nh, hs)
            keys, values, start = self.keys_values(everything, rope, cache, w_kv)
            if everything.shape[1] == 1:   # one token each: they see all of the cache
                return rows.unpad(attend(rows.pad(q), keys, values))
            position = rows.place + start
            if x.device.type == "cpu" and not torch.compiler.is_compiling():
                return attend_one_by_one(q, keys, values, position, rows.count.tolist())
        mask = causal_mask(rows.pad(position), keys.shape[1])
        return rows.unpad(attend(rows.pad(q), keys, values, mask))

    def qkv(self, x, turn):
        """x (..., C) -> q, k, v (..., nh, hs), q and k normalised and rotated."""
        q, k, v = rotate_normed(self.heads(self.c_attn(x)), turn[:, :self.n_head], 2)
        if self.scale is not None:
            of_q, of_k = self.heads(self.scale)
            q, k = q * of_q, k * of_k
        return q, k, v

    def keys_values(self, x, rope, cache=None, w_kv=None):
        """x (B, T, C) -> keys and values (B, S, nh, hs), with the cached ones, and where the T start."""
        w_kv = self.c_attn.weight[self.n_head * self.hs:] if w_kv is None else w_kv
        k, v = rotate_normed(self.heads(F.linear(x, w_kv)), rope[:, :self.n_head], 1)
        if self.scale is not None:
            k = k * self.heads(self.scale)[1]
        return (k, v, 0) if cache is None else self.append(k, v, cache)

    def append(self, k, v, cache):
        """k, v (B, T, nh, hs) -> all keys and values (B, S, nh, hs), and where the T start."""
        if cache.waiting:   # tokens that skipped this sublayer: one product for all of them
            x, rope = zip(*cache.waiting)
            cache.waiting.clear()
            self.keys_values(torch.cat(x, dim=1), torch.cat(rope), cache)
        return cache.append(k, v)


def attend(q, k, v, mask=None, is_causal=False):
    """q (B, K, nh, hs), k, v (B, S, nh, hs) -> (B, K, nh, hs)"""
    if is_causal and q.shape[1] > 64 and q.device.type == "cpu" and not torch.compiler.is_compiling():
        if torch.backends.cuda.flash_sdp_enabled():   # despite its name, of all devices; off: sdpa_kernel
            return attend_in_pieces(q, k, v, torch.arange(q.shape[1]))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal).transpose(1, 2)


def attend_in_pieces(q, k, v, position, size=64):
    """
    attend, causally, for queries q (B, K, nh, hs) at positions (K,), ascending: some at a time, with the keys
    up to the last of them. torch's flash kernel for a CPU works through hidden keys, too, up to 512 of them.
    """
    pieces = position.split(size)
    ends = [*(int(at[-1]) + 1 for at in pieces[:-1]), k.shape[1]]
    each = zip(q.split(size, dim=1), prefixes(k, ends), prefixes(v, ends), map(causal_mask, pieces, ends))
    return torch.cat([attend(*one) for one in each], dim=1)


def attend_one_by_one(q, k, v, position, counts, size=256):
    """
    attend, for kept queries q (N, nh, hs) at any positions (N,), counts of them per sequence. In one call
    they would fill a rectangle as long as the sequence that keeps most: on a CPU, a call for each is faster,
    and pieces of a long one, which save more keys than further calls cost.
    """
    S = k.shape[1]
    hidden = q.new_full((S, S), -math.inf).triu_(1)
    each = zip(q[None].split(counts, dim=1), k.split(1), v.split(1), position.split(counts))
    return torch.cat([attend_in_pieces(*one, at, size) if len(at) > size else attend(*one, hidden[at])
                      for *one, at in each if len(at)], dim=1).squeeze(0)


def causal_mask(position, S):
    """position (T,) or (B, T) of the queries -> bool (T, S) or (B, 1, T, S), true where a key may be seen."""
    seen = torch.arange(S, device=position.device) <= position[..., None]
    return seen if position.dim() == 1 else seen[:, None]


class MLP(nn.Module):
    mixes_tokens = False

    def __init__(self, config, i):
        super().__init__()
        self.activation = config.activation
        _, hidden, fan_out = block_shapes(config)[i]
        self.c_fc = nn.Linear(config.width, fan_out, bias=False)
        self.c_proj = nn.Linear(hidden, config.width, bias=False)
        self.scale = None   # of what c_fc gives, per unit, if a residual wants one

    def value_weight(self):
        return self.c_fc.weight

    def forward(self, x, rope=None, cache=None, rows=None, everything=None, first=None):
        """x (..., C) -> (..., C)"""
        x = self.c_fc(x) if self.scale is None else self.c_fc(x) * self.scale
        if self.activation == "gelu":
            # in place where no backward needs x: a large buffer less to find and to fill
            x = F.gelu(x) if torch.is_grad_enabled() else torch.ops.aten.gelu_(x)
        elif self.activation == "relu2":
            x = F.relu(x).square()
        else:
            gate, x = x.chunk(2, dim=-1)
            x = F.silu(gate) * x
        return self.c_proj(x)


def block_shapes(config):
    """(heads, hidden units of the MLP, outputs of c_fc) of each block. swiglu has three matrices where gelu
    has two, so two thirds of the units."""
    glu, hidden = config.activation == "swiglu", config.mlp_ratio * config.n_embd
    hidden = max(1, round(hidden * 2 / 3)) if glu else int(hidden)
    widths = [(config.n_head, hidden)] * config.n_layer
    if config.taper != "none":
        widths = taper(config, hidden)
    return [(heads, hidden, hidden * (2 if glu else 1)) for heads, hidden in widths]


def taper_profile(config):
    """
    Relative widths of the blocks (L,): from taper_start to taper_end (CascadeFormer, arXiv:2606.26538; the
    cosine: Tapered Language Models, arXiv:2606.23670; a rising line: OpenELM, arXiv:2404.14619). step: in
    thirds; ends: wide at both ends; fanin: 2 (L - l) / (L + 1), in proportion to the number of gradient terms
    that reach block l, but at least 1/4.
    """
    L, s, e = config.n_layer, config.taper_start, config.taper_end
    shapes = dict(linear=lambda u: s + (e - s) * u, step=lambda u: s + (e - s) * min(2, int(3 * u)) / 2,
                  cosine=lambda u: e + (s - e) * (1 + math.cos(math.pi * u)) / 2,
                  ends=lambda u: e + (s - e) * abs(2 * u - 1),
                  fanin=lambda u: max(0.25, 2 * (L - u * (L - 1)) / (L + 1)))
    return [shapes[config.taper](l / (L - 1) if L > 1 else 0.5) for l in range(L)]


def block_cost(config, heads, hidden):
    """Parameters of a block's matrices, or, with --taper_match flops, FLOPs of a token at full context."""
    inner = heads * config.n_embd // config.n_head
    matrices = config.width * (4 * inner + hidden * (3 if config.activation == "swiglu" else 2))
    return 2 * matrices + 4 * config.block_size * inner if config.taper_match == "flops" else matrices


def taper(config, hidden):
    """(heads, hidden units) of each block, scaled so that the sum of the costs is the uniform model's."""
    profile, unit = taper_profile(config), 8 if hidden >= 64 else 1   # multiples of 8 make for fast products

    def widths(scale):
        wide = [scale * m for m in profile]
        heads, units = [config.n_head] * len(wide), [hidden] * len(wide)
        if config.taper_on != "mlp":
            heads = [max(1, round(w * config.n_head)) for w in wide]
        if config.taper_on != "heads":
            units = [max(1, round(w * hidden / unit)) * unit for w in wide]
        return list(zip(heads, units))

    if config.taper_match == "none":
        return widths(1.0)
    cost = lambda scale: sum(block_cost(config, *shape) for shape in widths(scale))
    target, low, high = config.n_layer * block_cost(config, config.n_head, hidden), 0.0, 2 / min(profile)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle) < target else (low, middle)
    return widths(min((low, high), key=lambda scale: abs(cost(scale) - target)))


def taper_miss(config):
    """Relative difference between the cost of the tapered and of the uniform model's blocks."""
    if config.taper_match == "none":
        return 0.0
    uniform, tapered = block_shapes(dataclasses.replace(config, taper="none")), block_shapes(config)
    cost = lambda shapes: sum(block_cost(config, heads, hidden) for heads, hidden, _ in shapes)
    return cost(tapered) / cost(uniform) - 1


class LowRank(nn.Module):
    """A shared linear layer plus a private change of low rank, at first 0 (arXiv:2410.20672)."""
    def __init__(self, linear, rank):
        super().__init__()
        self.linear = linear
        self.a = nn.Parameter(torch.zeros(rank, linear.in_features))     # drawn in GPT.init_weights
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    @property
    def weight(self):
        return self.linear.weight + self.b @ self.a

    def forward(self, x):
        return self.linear(x) + F.linear(F.linear(x, self.a), self.b)


# ----------------------------------------------------------------------------- skipping

class Rows:
    """The N kept tokens of a batch, keep (B, T), in their order."""
    def __init__(self, keep, n_kept=None):
        """n_kept: how many there are, if known, since finding out makes the CPU wait for a GPU"""
        self.keep = keep
        n_kept = int(keep.sum()) if n_kept is None else n_kept
        self.index = keep.flatten().nonzero_static(size=n_kept).squeeze(1)           # (N,), among the B T

    def arrange(self, compact=False, even=False):
        """
        For attention, in a rectangle of S sequences by K slots, K as many as the longest needs: kept tokens
        move to its left, the rest is zero. S is B, or if compact, the number of sequences with a kept token.
        even: it is known that each sequence keeps as many, so that nothing else needs finding out.
        """
        (B, T), N = self.keep.shape, len(self.index)
        self.sequence, self.place = self.index // T, self.index % T                  # (N,)
        self.count = self.keep.sum(1)                                                # (B,)
        slot = torch.arange(N, device=self.keep.device)
        self.slot = slot - (self.count.cumsum(0) - self.count)[self.sequence]        # (N,)
        row, S = self.sequence, B
        if compact and not even:
            full = self.count > 0
            row, S = (full.cumsum(0) - 1)[row], int(full.sum())
        self.shape = S, N // B if even else int(self.count.max())                    # S, K
        self.cell = row * self.shape[1] + self.slot                                  # (N,), among the S K

    def number(self):
        """(B, T): which of the kept tokens each one is, from 0; -1 if it isn't kept"""
        keep = self.keep.flatten()
        return torch.where(keep, keep.cumsum(0) - 1, -1).view_as(self.keep)

    def pad(self, x):
        """(N, ...) -> (S, K, ...)"""
        S, K = self.shape
        return (x if len(x) == S * K else scatter_rows(x, self.cell, S * K)).unflatten(0, self.shape)

    def unpad(self, x):
        """(S, K, ...) -> (N, ...)"""
        x = x.flatten(0, 1)
        return x if len(x) == len(self.cell) else gather_rows(x, self.cell)


def take(stream, rows):
    """A stream of tensors (B, T, ...) -> that of the kept tokens (N, ...), and the rest for put."""
    if isinstance(stream, tuple):
        return tuple(zip(*(take(x, rows) for x in stream)))
    return part(stream, rows.index)


def put(rest, rows, kept):
    """The stream that take has got, (B, T, ...), with the kept tokens replaced."""
    if isinstance(rest, tuple):
        return tuple(put(x, rows, k) for x, k in zip(rest, kept))
    return join(rest, rows.index, kept)


class Skip(NamedTuple):
    """What decides whether a token runs one sublayer."""
    keep: torch.Tensor | None = None    # (B, T), decided already; or
    tau: torch.Tensor | None = None     # (), skip where the residual's score is at most this, but
    force: torch.Tensor | None = None   # (B, T), tokens that run all the same (exploration in training), and
    floor: float = 0.0                  # at least this share of the tokens, those with the highest score
    kv: str = "kept"                    # attention projects keys and values of `all` tokens or of `kept` ones
    scale: torch.Tensor | None = None   # (), of the update (layer_drop); lost where a write normalises it
    ahead: Callable | None = None       # decides in place of all that, see Ahead

    def decide(self, residual, stream):
        """-> the residual's gain, the tokens that run (B, T), how many these are"""
        if self.ahead is not None:
            return self.ahead(stream)
        gain, keep = residual.gain(stream), self.keep
        if keep is None:
            score = residual.score(gain.detach())   # a hard decision; gates learn from the tokens that do run
            keep = score > self.tau
            if self.floor:
                at_least = math.ceil(self.floor * score.numel())
                keep = keep | (score >= score.flatten().topk(at_least).values[-1])
            if self.force is not None:
                keep = keep | self.force
        return gain, keep, int(keep.sum())


class Ahead:
    """
    Decides for several NAG sublayers at once, for decoding: tokens that skip keep their direction, so that
    one product gives the gains of all sublayers up to the one that runs. Those beyond it are computed anew,
    FLOPs that flops_per_token does not count.
    """
    def __init__(self, residuals, reach=4):
        self.score, self.reach, self.stream, self.first, self.gates = residuals[0].score, reach, None, 0, []
        for l in range(len(residuals)):
            at = residuals[l:l + reach]
            stack = lambda of: torch.stack([of(residual) for residual in at]).detach()
            w, b = (stack(lambda r: widen(getattr(r, name))).flatten(0, 1) for name in "wb")   # (reach n, C)
            p = torch.block_diag(*(widen(r.p).softmax(0) for r in at)).detach()      # (reach, reach n)
            alpha, beta = stack(lambda r: widen(r.alpha) * r.warm), stack(lambda r: F.softplus(widen(r.beta)))
            self.gates.append((w, b, p, alpha, beta))

    def decide(self, l, tau, stream):
        """Sublayer l, counted from 0; tau: of l and of those after it -> as Skip.decide"""
        if stream is not self.stream or l >= self.first + self.reach:
            w, b, p, alpha, beta = self.gates[l]
            with full_precision(stream[0]):
                base = F.linear(F.linear(widen(stream[0]), w, b).sigmoid(), p)
            self.gain = alpha * base.clamp_min(FLOOR) ** beta                        # (B, T, reach)
            limit = tau[:len(alpha)].to(self.gain.dtype)
            self.keep = self.score(self.gain[..., None], alpha[:, None]) > limit     # (B, T, reach)
            self.n_kept, self.stream, self.first = self.keep.sum((0, 1)).tolist(), stream, l
        i = l - self.first
        return self.gain[..., i:i + 1], self.keep[..., i], self.n_kept[i]


def step(stream, residual, sublayer, rope, cache=None, skip=None, first=None):
    """One sublayer -> (stream, keep). With skip, it runs on the kept tokens (B, T) only; None: on all."""
    gain, keep, n_kept = skip.decide(residual, stream) if skip else (residual.gain(stream), None, None)
    counted = cache is not None and skip is not None and skip.kv == "kept"   # a cache of kept tokens only
    scaled = lambda update: update if skip is None or skip.scale is None else update * skip.scale
    if keep is None or n_kept == keep.numel() and not counted:
        update = sublayer(residual.read(stream, gain), rope, cache, first=first)
        return residual.write(stream, scaled(update), gain), keep
    for_all = sublayer.mixes_tokens and skip.kv == "all"
    if n_kept == 0:
        if for_all and cache is not None:   # a later token will want its keys and values
            cache.waiting.append((residual.read(stream), rope))
        return stream, keep
    rows = Rows(keep, n_kept)
    if sublayer.mixes_tokens:
        rows.arrange(compact=skip.kv == "kept" and cache is None)
    everything = residual.read(stream) if for_all else None
    x, held = residual.read_rows(stream, rows)
    update = scaled(sublayer(x, rope, cache, rows, everything))                      # (N, C)
    return residual.write_rows(held, update, gain, rows), keep


# ----------------------------------------------------------------------------- block and model

class Block(nn.Module):
    """Two sublayers, each with its residual. i counts blocks from 0: the sublayers are 2i + 1 and 2i + 2."""
    def __init__(self, config, i):
        super().__init__()
        self.attn, self.attn_residual = Attention(config, i), RESIDUALS[config.residual](config, 2 * i + 1)
        self.mlp, self.mlp_residual = MLP(config, i), RESIDUALS[config.residual](config, 2 * i + 2)
        self.runs = [True, True]   # attention, MLP: GPT.remove takes them out

    def share(self, other, rank):
        """Use another block's weights; with rank > 0, plus a change of one's own."""
        if not rank:
            self.attn, self.mlp = other.attn, other.mlp
        for mine, shared in ((self.attn, other.attn), (self.mlp, other.mlp)) if rank else ():
            for name, linear in shared.named_children():
                setattr(mine, name, LowRank(linear, rank))

    def forward(self, stream, rope, cache=None, skips=(None, None), first=None):
        """-> (stream, (keep of the attention, keep of the MLP)), see step."""
        keep_attn = keep_mlp = None
        if self.runs[0]:
            stream, keep_attn = step(stream, self.attn_residual, self.attn, rope, cache, skips[0], first)
        if self.runs[1]:
            stream, keep_mlp = step(stream, self.mlp_residual, self.mlp, rope, None, skips[1])
        return stream, (keep_attn, keep_mlp)


class RoutedBlock(Block):
    """
    A block with the router of Raposo et al. 2024 (arXiv:2404.02258). A linear map gives every token a weight;
    the block is for the tokens with the largest weights of a sequence, and its change is multiplied by the
    weight, which teaches the router. The largest weights of a sequence depend on its future: outside of
    training, a token runs if its own weight is above 0, which an auxiliary loss teaches the router to agree
    with.
    """
    def __init__(self, config, i):
        super().__init__(config, i)
        self.router = nn.Linear(config.width, 1, bias=False)
        # only every second block is routed: these skip the others' share, too
        self.rate = config.mod_rate * config.n_layer / (config.n_layer // 2)

    def forward(self, x, rope, cache=None, skips=None, first=None):
        """-> (stream, (keep, keep), auxiliary loss)"""
        weight = self.router(rms_norm(x)).squeeze(-1)     # (B, T); of the norm, since streams grow with depth
        if self.training:
            at_least = max(1, round((1 - self.rate) * x.shape[1]))
            keep = torch.zeros_like(weight, dtype=torch.bool)
            keep = keep.scatter(1, weight.topk(at_least, dim=1).indices, True)
        else:
            keep = weight > 0
        auxiliary = F.binary_cross_entropy_with_logits(widen(weight), keep.to(widen(weight).dtype))
        # in training a GPU needn't wait to hear how many there are
        rows = Rows(keep, at_least * len(keep) if self.training else None)
        if len(rows.index):
            rows.arrange(compact=cache is None, even=self.training)
            weight = gather_rows(weight.flatten(), rows.index)[:, None]
            read, (before, rest) = self.attn_residual.read_rows(x, rows)             # (N, C)
            kept = self.attn_residual.write(before, self.attn(read, rope, cache, rows))
            kept = self.mlp_residual.write(kept, self.mlp(self.mlp_residual.read(kept), rope, cache, rows))
            x = put(rest, rows, before + weight * (kept - before))
        return x, (keep, keep), auxiliary


class GPT(nn.Module):
    """Decoder-only Transformer. Raises ValueError with one sentence per problem of the config."""
    def __init__(self, config: GPTConfig):
        super().__init__()
        if config.problems():
            raise ValueError("\n".join(config.problems()))
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.width)
        routed = lambda i: config.mod == "router" and i % 2 == 1
        blocks = [(RoutedBlock if routed(i) else Block)(config, i) for i in range(config.n_layer)]
        for i in range(config.share_every, config.n_layer) if config.share_every else ():
            blocks[i].share(blocks[i % config.share_every], config.share_rank)
        self.blocks = nn.ModuleList([blocks[i] for i in config.order()])   # one may be there several times
        self.ends = RESIDUALS[config.residual](config, 2 * config.n_layer + 1)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tie:
            self.lm_head.weight = self.wte.weight
        # what a block starts from: the stream and the embedding, each times a weight
        self.x0 = nn.Parameter(torch.tensor([[1.0, 0.0]] * config.n_layer)) if config.x0 else None
        # tanh of an embedding as small as ours would be all but linear
        self.embed_scale = nn.Parameter(torch.tensor(config.width ** 0.5)) if config.norm == "dyt" else None
        hs = config.n_embd // config.n_head
        angle = torch.outer(torch.arange(config.block_size), 1e4 ** -(torch.arange(0, hs, 2) / hs))
        # (block_size, nh, hs), the same for all heads: long rows are faster than short ones
        pairs = torch.stack((angle.cos(), angle.sin()), dim=-1).flatten(1)           # cos, sin, cos, sin, ...
        most = max(heads for heads, _, _ in block_shapes(config))
        self.register_buffer("turn", pairs[:, None].repeat(1, most, 1), persistent=False)
        # the thresholds of a model that is trained with skipping: train.py moves them, evaluation leaves them
        trained = config.mod == "geometric" and config.mod_rate > 0
        self.register_buffer("tau", torch.full((2 * config.n_layer,), -1.0) if trained else None)
        self.checkpoint_blocks = False   # training: blocks keep their input only, backward runs them again
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        # Every matrix is drawn from its own generator, seeded by its name: two variants with the same seed
        # start from the same values wherever they share a parameter, however many parameters either has
        # besides. A block keeps its number where others before it are repeated.
        order = self.config.order()
        for name, module in self.named_modules():
            name = re.sub(r"(?<=^blocks\.)\d+", lambda place: str(order[int(place[0])]), name)
            rng = torch.Generator().manual_seed(self.config.seed + (zlib.crc32(name.encode()) << 20))
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.weight.normal_(std=INIT_STD, generator=rng)
            elif isinstance(module, LowRank):
                module.a.normal_(std=len(module.a) ** -0.5, generator=rng)
        _, hidden, _ = block_shapes(dataclasses.replace(self.config, taper="none"))[0]
        done = set()
        for residual, sublayer in self.sublayers():
            if sublayer in done or isinstance(sublayer.c_proj, LowRank):
                continue   # shared weights: once, by the first block that has them
            done.add(sublayer)
            # a wide block must not write louder than a narrow one
            uniform = self.config.n_embd if sublayer.mixes_tokens else hidden
            sublayer.c_proj.weight.mul_((uniform / sublayer.c_proj.in_features) ** 0.5)
            residual.init_sublayer(sublayer)
        self.constrain()

    @torch.no_grad()
    def constrain(self):
        """After each optimizer step: weights that a residual keeps normalised are normalised again."""
        for residual, sublayer in self.sublayers():
            residual.constrain(sublayer)
        self.ends.constrain(self.wte)
        self.ends.constrain(self.lm_head)

    def remove(self, numbers):
        """
        Take out sublayers, numbered from 1: they don't run any more, and new caches leave them out.
        ValueError for --mod router, whose blocks run as a whole.
        """
        if self.config.mod == "router" and numbers:
            raise ValueError("a routed block runs as a whole: its sublayers can't be removed")
        for l in numbers:
            self.blocks[(l - 1) // 2].runs[(l - 1) % 2] = False

    def present(self):
        """Of each of the 2L sublayers, whether it is there: not removed"""
        return [run for block in self.blocks for run in block.runs]

    def compile_blocks(self, **options):
        """torch.compile in place. The blocks share one graph, so that the time it takes doesn't grow with
        depth; where the stream grows with depth, only the sublayers can share one. Tapered blocks can't."""
        config, widths = torch._dynamo.config, len(set(block_shapes(self.config)))
        # attention and MLP, run by all tokens, by some or by none, in training and evaluation
        config.recompile_limit = max(config.recompile_limit, 16 * widths)
        for block in self.blocks:
            for module in [block] if self.ends.one_graph else [block.attn, block.mlp]:
                module.compile(**options)

    def sublayers(self):
        """The 2L pairs (residual, sublayer) in the order in which they run (repeated blocks repeatedly)."""
        for block in self.blocks:
            yield block.attn_residual, block.attn
            yield block.mlp_residual, block.mlp

    @property
    def can_skip(self):
        """Whether thresholds can decide what a token skips. First values would be missing where it did."""
        c = self.config
        return self.ends.knows_gain and c.mod == "geometric" and not c.value_residual and not c.repeat

    def rope(self, start, T):
        return self.turn[start:start + T]

    def skips(self, B, T, tau=None, generator=None, cache=None):
        """A pair of Skips per block. tau: one threshold or 2L; default: those of the model's training."""
        c, n, device = self.config, 2 * len(self.blocks), self.turn.device
        draw = lambda *shape: torch.rand(n, *shape, generator=generator, device=device)
        tau, each = self.tau if tau is None else tau, [None] * n
        if tau is not None and self.ends.knows_gain:
            tau = torch.as_tensor(tau, dtype=torch.float64, device=device).expand(n)
            whole = (tau < 0).tolist()   # all tokens run these: there is nothing to decide
            if all(whole):
                pass
            elif c.value_residual:
                raise ValueError("value residual: a token that skips the first attention has no first values")
            elif cache is not None and T == 1 and not self.training and self.ends.looks_ahead:
                cache.ahead = cache.ahead or Ahead([residual for residual, _ in self.sublayers()])
                each = [Skip(kv=c.mod_kv, ahead=partial(cache.ahead.decide, l, tau[l:])) for l in range(n)]
            else:
                learning = self.training and c.mod_rate > 0
                force = draw(B, T) < c.mod_explore if learning else [None] * n
                floor = c.mod_floor if learning else 0.0
                decide = lambda l: Skip(tau=tau[l], force=force[l], floor=floor, kv=c.mod_kv)
                # a cache may expect rows even of these
                each = [None if whole[l] and cache is None else decide(l) for l in range(n)]
        elif self.training and c.layer_drop:
            drop = torch.full((n,), c.layer_drop, device=device)
            if c.layer_drop_rule == "linear":
                drop = drop * torch.arange(1, n + 1, device=device) / n
            keep = (draw(B) >= drop[:, None])[..., None].expand(n, B, T)
            each = [Skip(keep=keep[l], scale=1 / (1 - drop[l])) for l in range(n)]
        return list(zip(each[::2], each[1::2]))

    def hidden(self, idx, cache=None, tau=None, generator=None, kept=None, exits=None):
        """idx (B, T) -> what the head reads (B, T, C), the routers' auxiliary loss. exits: a list that gets
        what the head would read after each block but the last. The rest: see forward."""
        B, T, start = *idx.shape, 0 if cache is None else cache.length
        if start + T > self.config.block_size:
            raise ValueError(f"{start + T} tokens do not fit block_size {self.config.block_size}")
        rope, skips, auxiliary = self.rope(start, T), self.skips(B, T, tau, generator, cache), []
        stream, embedding = self.start(idx)
        first = [] if self.config.value_residual else None
        for i, (block, pair) in enumerate(zip(self.blocks, skips)):
            stream = self.shortcut(i, stream, embedding)
            # nothing random happens inside of a block (its skips are drawn above): a second run is the same,
            # except that --norm batch counts its statistics twice
            run = block
            if self.checkpoint_blocks and self.training:
                run = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
            stream, keeps, *loss = run(stream, rope, cache and cache.layers[i], pair, first)
            auxiliary += loss
            if kept is not None:
                kept += keeps
            if exits is not None and i < len(self.blocks) - 1:
                exits.append(self.ends.finish(stream))
        if cache is not None:
            cache.length += T
        return self.ends.finish(stream), sum(auxiliary) / max(1, len(auxiliary))

    def start(self, idx):
        """idx (B, T) -> the first stream, the embedding (B, T, C)"""
        x = self.wte(idx) if self.embed_scale is None else self.wte(idx) * self.embed_scale
        return self.ends.start(x), x

    def shortcut(self, i, stream, embedding):
        """What block i gets of the stream that the block before it has left."""
        return stream if self.x0 is None else self.x0[i, 0] * stream + self.x0[i, 1] * embedding

    def head(self, x):
        """(..., C) -> logits (..., V)."""
        return F.linear(x, self.ends.head_weight(self.lm_head.weight))

    def forward(self, idx, targets=None, cache=None, tau=None, generator=None, kept=None):
        """
        idx, targets (B, T) of token ids -> logits (B, T, V), mean cross entropy in nats (None if no targets;
        in training the mean over all exits with deep supervision, plus the routers' auxiliary loss). tau:
        skip thresholds, a number or 2L of them; default those of the training, -1 skips nothing. generator:
        of the random skips of training. kept: a list that gets, per sublayer, the tokens that ran, (B, T)
        bool, or None if it has nothing to decide by.
        """
        exits = [] if self.config.deep_supervision and self.training else None
        x, auxiliary = self.hidden(idx, cache, tau, generator, kept, exits)
        logits = self.head(x)
        if targets is None:
            return logits, None
        loss = F.cross_entropy(widen(logits).flatten(0, 1), targets.flatten())
        if exits is not None:
            # backward runs each head again: the logits of all at once could fill a GPU
            each = lambda x: F.cross_entropy(widen(self.head(x)).flatten(0, 1), targets.flatten())
            losses = [checkpoint(each, x, use_reentrant=False, preserve_rng_state=False) for x in exits]
            loss = (loss + sum(losses)) / (1 + len(losses))
        return logits, loss + ROUTER_LOSS * auxiliary if self.training else loss

    def walk(self, idx, without=(), tau=None):
        """
        The forward pass one sublayer at a time, for measurements. Yields (l, stream before, stream after) for
        l = 1 .. 2L, then (2L + 1, last stream, logits). The sublayers numbered in `without` are skipped: they
        do not run, and the stream passes them unchanged. A block with a router runs whole, or not at all:
        raises ValueError.
        """
        if self.config.mod == "router":
            raise ValueError("a block with a router has no sublayers to look at one by one")
        runs = self.present()
        rope, (stream, embedding) = self.rope(0, idx.shape[1]), self.start(idx)
        first = [] if self.config.value_residual else None
        skips = [skip for pair in self.skips(*idx.shape, tau) for skip in pair]
        for l, ((residual, sublayer), skip) in enumerate(zip(self.sublayers(), skips), start=1):
            before = stream = self.shortcut(l // 2, stream, embedding) if l % 2 else stream
            if l not in without and runs[l - 1]:
                stream, _ = step(stream, residual, sublayer, rope, skip=skip, first=first)
            yield l, before, stream
        yield l + 1, stream, self.head(self.ends.finish(stream))

    @torch.no_grad()
    def stream_tokens(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, generator=None,
                      n_vocab=None, tau=None, kept=None, forward=None):
        """
        Continue idx (B, T) with a KV cache; yields one (B, 1) of new tokens at a time. temperature 0: greedy.
        kept: a list that gets one list per token: what forward's kept gets in the pass that led to it.
        forward: in place of the model's own pass, new tokens (B, T), cache -> logits of the last one (B, V).
        """
        cache = KVCache(self, idx.shape[0])
        for _ in range(max_new_tokens):
            if cache.length == 0 or cache.length == self.config.block_size:
                # empty or full: (re)start from the newest tokens. Keeping half makes that rare enough to cost
                # little
                keep = self.config.block_size if cache.length == 0 else self.config.block_size // 2
                cache.clear()
                fresh = idx[:, -max(1, keep):]
            ran = None if kept is None else []
            logits = (forward(fresh, cache) if forward else
                      self.head(self.hidden(fresh, cache, tau, kept=ran)[0][:, -1]))[:, :n_vocab]
            if kept is not None:
                kept.append(ran)
            fresh = pick(widen(logits), temperature, top_k, top_p, generator)
            idx = torch.cat((idx, fresh), dim=1)
            yield fresh

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, **options):
        """idx (B, T) -> (B, T + max_new_tokens). Options: see stream_tokens."""
        fresh = self.stream_tokens(idx, max_new_tokens, temperature, top_k, **options)
        return torch.cat([idx, *fresh], dim=1)

    def num_params(self):
        """Number of parameters, by formula; a tied head counts once."""
        c, shapes = self.config, block_shapes(self.config)
        inner = [heads * c.n_embd // c.n_head for heads, _, _ in shapes]
        unique = c.share_every or c.n_layer
        blocks = sum(c.width * (4 * n + fan_out + hidden) for n, (_, hidden, fan_out)
                     in zip(inner[:unique], shapes))
        _, hidden, fan_out = shapes[0]   # what the others add to what they share: rank x (inputs + outputs)
        changes = (c.n_layer - unique) * c.share_rank * (4 * c.width + 4 * inner[0] + fan_out + hidden)
        tables = c.vocab_size * c.width * (1 if c.tie else 2)
        routers = c.n_layer // 2 * c.width if c.mod == "router" else 0
        extra = 2 * c.n_layer * c.x0 + 2 * (c.n_layer - 1) * c.value_residual + (c.norm == "dyt")
        residuals = {*self.residuals()}   # those of a repeated block once
        return blocks + changes + tables + routers + extra + sum(residual.cost()[0] for residual in residuals)

    def flops_per_token(self, T=None, share=None):
        """
        Matmul FLOPs of one token's forward pass at context length T (default block_size), by formula; a
        training step is three times that. Attention scores count in full, as torch.utils.flop_counter does,
        though half are masked, and on a CPU left out in part. share: of the tokens that ran each of the 2L
        sublayers; default: all of them. Not counted is what attention adds where sequences that keep
        different numbers of tokens share a call: on a GPU, in compiled blocks, and with mod_kv kept.
        """
        c, shapes = self.config, block_shapes(self.config)
        T, W, rank = c.block_size if T is None else T, c.width, c.share_rank
        there = self.present()
        ran = [run * of for run, of in zip(there, [1.0] * len(there) if share is None else share)]
        exits = len(self.blocks) if self.training and c.deep_supervision else 1   # what the head reads
        total = exits * 2 * c.vocab_size * W + self.ends.cost()[1]
        dropping = self.training and c.layer_drop > 0
        for block, i, attn, mlp in zip(self.blocks, c.order(), ran[::2], ran[1::2]):
            heads, hidden, fan_out = shapes[i]
            inner, routed = heads * c.n_embd // c.n_head, isinstance(block, RoutedBlock)
            for residual, run, at in ((block.attn_residual, block.runs[0], attn),
                                      (block.mlp_residual, block.runs[1], mlp)):
                # a gain is computed for all tokens, a gate for those that run
                total += residual.cost()[1] * (run if residual.knows_gain and not routed else at)
            # known: share of the tokens whose keys and values are projected; seen: share of its sequence that
            # a kept token looks at, all of it in layer_drop, which keeps or drops whole sequences
            known = attn if routed or c.mod_kv == "kept" or dropping else float(attn > 0)
            seen = 1.0 if dropping else known
            total += 4 * inner * W * (known + attn) + 4 * T * seen * inner * attn
            total += 2 * W * (fan_out + hidden) * mlp + (2 * W if routed else 0)
            if c.share_every and i >= c.share_every:
                total += 2 * rank * ((2 * W + 4 * inner) * attn + (2 * W + fan_out + hidden) * mlp)
        return total

    def residuals(self):
        return [residual for residual, _ in self.sublayers()] + [self.ends]


class KVCache:
    """
    Keys and values of the tokens so far, room for block_size of them, of each attention that runs. With
    --mod_kv kept, all passes that share one must skip, or none. For a model whose weights stay as they are.
    """
    def __init__(self, model, batch_size):
        weight, c, size = model.lm_head.weight, model.config, (batch_size, model.config.block_size)
        device = weight.device.type   # under autocast attention wants them in half precision
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        # where sequences store different numbers of tokens, the rest is masked, but has to be finite
        uneven = c.mod_kv == "kept" or c.mod == "router" or c.layer_drop
        make = partial(weight.new_zeros if uneven else weight.new_empty, dtype=dtype)
        self.layers = []
        for block in model.blocks:
            shape, count = (*size, block.attn.n_head, block.attn.hs), weight.new_zeros(batch_size).long()
            self.layers.append(LayerCache(make(shape), make(shape), count) if block.runs[0] else None)
        self.length = 0     # tokens seen
        self.ahead = None   # an Ahead, from the first single token on that may skip

    def clear(self):
        self.length = 0
        for layer in filter(None, self.layers):
            layer.length = 0
            layer.count.zero_()
            layer.waiting.clear()


@dataclass
class LayerCache:
    keys: torch.Tensor      # (B, block_size, nh, hs)
    values: torch.Tensor
    count: torch.Tensor     # (B,), tokens stored per sequence, where only the kept ones are
    length: int = 0         # tokens stored, where all of them are
    waiting: list = field(default_factory=list)   # inputs and rotations of tokens whose keys no one asked for

    def append(self, k, v):
        """k, v (B, T, nh, hs) -> all keys and values (B, S, nh, hs), and where the T start."""
        start, self.length = self.length, self.length + k.shape[1]
        self.keys[:, start:self.length], self.values[:, start:self.length] = k, v
        return self.keys[:, :self.length], self.values[:, :self.length], start

    def append_rows(self, k, v, rows):
        """k, v (N, nh, hs) of kept tokens -> keys, values (B, longest, nh, hs), the new places (N,)."""
        number = self.count[rows.sequence] + rows.slot
        here = rows.sequence, number
        self.keys[here], self.values[here] = k.to(self.keys.dtype), v.to(self.values.dtype)   # autocast
        self.count += rows.count
        longest = int(self.count.max())
        return self.keys[:, :longest], self.values[:, :longest], number


def pick(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """logits (B, V) -> one token id each (B, 1). top_k and top_p (the smallest set with that probability)
    combine."""
    if temperature < 1e-6:   # as good as 0, and logits over it might overflow
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p is not None:
        probs, order = logits.softmax(-1).sort(descending=True)
        # a token stays if the tokens likelier than it hold less than top_p: the first one always does
        gone = probs.cumsum(-1) - probs >= top_p
        logits = logits.masked_fill(gone.scatter(1, order, gone), -math.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
