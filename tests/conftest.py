"""What the tests share: tiny models whose parameters are all in use, sublayers written out by hand,
small data sets, and ways to compare."""

import math
import os
import sys
import zlib
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")   # before anything imports triton
os.environ.setdefault("OMP_NUM_THREADS", "1")        # for the programs that tests start
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

torch.set_num_threads(1)                             # more threads don't pay off in tiny models

ROOT = Path(__file__).absolute().parents[1]
sys.path.insert(0, str(ROOT))
import prepare
from flags import UserError
from model import GPT, RESIDUALS, GPTConfig, KVCache, Residual

TINY = dict(n_layer=3, n_head=2, n_embd=16, block_size=16, vocab_size=64)

def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than a few seconds; needs --slow")
    if not config.getoption("--slow") and not config.option.markexpr:
        config.option.markexpr = "not slow"   # as if -m "not slow" were typed

@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A data set of bytes"""
    folder = tmp_path_factory.mktemp("corpus")
    lines = "".join(f"line {i}: {i * i} = {i} * {i}\n" for i in range(3000))
    (folder / "text.txt").write_text(lines)
    prepare.main(["text", "--input", str(folder / "text.txt"), "--out", str(folder / "data")])
    return folder / "data"

@pytest.fixture(scope="session")
def steps_data(tmp_path_factory):
    """The puzzle, with lines of four digits and at most three steps"""
    folder = tmp_path_factory.mktemp("steps") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "PUZZLE", prepare.PUZZLE | dict(cells=4, most=3))
        small = lambda config: [prepare.puzzle_documents(200, seed) for seed in (1, 2)]
        patch.setitem(prepare.SOURCES, "steps", small)
        prepare.main(["steps", "--out", str(folder)])
    return folder

def refused(function, *args):
    """The one sentence of the UserError that function(*args) raises"""
    with pytest.raises(UserError) as error:
        function(*args)
    sentence = str(error.value)
    assert len(sentence.splitlines()) == 1 and len(sentence) > 20, sentence
    return sentence

@torch.no_grad()
def make(residual="pre", noise=0.2, dtype=torch.float64, **config):
    """A tiny GPT in evaluation mode. It is made while dtype is the default one, because constants
    such as 1 / sqrt(3) need its precision, too. noise moves every parameter away from its start, so
    a gate of zeros can't hide a mistake; it depends on the parameter's name only, so parameters
    that two models share stay equal."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = GPT(GPTConfig(residual=residual, **(TINY | config)))
    finally:
        torch.set_default_dtype(before)
    for name, p in model.named_parameters():
        p.add_(noise * randn(*p.shape, seed=zlib.crc32(name.encode())))
    return model.eval()

def ids(B=2, T=12, V=TINY["vocab_size"], seed=0):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))

def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)

@torch.no_grad()
def logits(model, idx=None, **options):
    return model(ids() if idx is None else idx, **options)[0]

def decode(model, idx, lengths, make_trace=lambda start: None):
    """The logits of all tokens, piece by piece through a KV cache. make_trace gets the position of
    a piece's first token."""
    cache, parts = KVCache(), []
    for piece in idx.split(lengths, dim=1):
        parts.append(logits(model, piece, cache=cache, trace=make_trace(cache.length)))
    return torch.cat(parts, dim=1)

def same(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)

def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()}

def same_gradients(mine, right, tolerance=1e-8):
    """Parameter by parameter, relative to the size of the gradient"""
    for name, g in mine.items():
        assert (g - right[name]).norm() <= tolerance * right[name].norm() + 1e-12, name

def count_flops(function):
    """torch's count of the matrix products in function()"""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()

def rms_norm_by_hand(x, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

def attention_by_hand(attn, x):
    """Causal attention with RoPE, normalized queries and keys. x (B, T, C) -> (B, T, C)"""
    (B, T, C), n_head = x.shape, attn.n_head
    hs = C // n_head
    q, k, v = ((x @ w.T).view(B, T, n_head, hs) for w in attn.c_attn.weight.chunk(3))
    inv_freq = 1e4 ** -(torch.arange(0, hs, 2, dtype=torch.float64) / hs)
    angle = torch.arange(T)[:, None, None] * inv_freq

    def rotated(y):
        even, odd = rms_norm_by_hand(y)[..., ::2], rms_norm_by_hand(y)[..., 1::2]
        pairs = even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()
        return torch.stack(pairs, -1).flatten(-2)

    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    scores = torch.einsum("bihc,bjhc->bhij", rotated(q), rotated(k)) * 128 ** 0.5 / hs
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    return torch.einsum("bhij,bjhc->bihc", weights, v).flatten(-2) @ attn.c_proj.weight.T

def mlp_by_hand(mlp, x):
    x = x @ mlp.c_fc.weight.T
    if mlp.activation == "gelu":
        x = x * 0.5 * (1 + torch.erf(x / 2 ** 0.5))
    elif mlp.activation == "relu2":
        x = F.relu(x) ** 2
    else:
        gate, value = x.chunk(2, dim=-1)
        x = gate / (1 + (-gate).exp()) * value
    return x @ mlp.c_proj.weight.T

def sublayers_by_hand(model):
    """Yields (layer_idx, residual, f) in the order in which they run."""
    for i in model.block_order:
        block = model.blocks[i]
        yield (2 * i, block.attn_residual,
               lambda x, attn=block.attn: attention_by_hand(attn, x))
        yield 2 * i + 1, block.mlp_residual, lambda x, mlp=block.mlp: mlp_by_hand(mlp, x)

class Momentum(Residual):
    """A user's own residual, with a stream of two tensors: x, and a decaying sum of its updates."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        if not self.is_final:
            self.keep = nn.Parameter(torch.tensor(0.5))

    def expand(self, x):
        return x, torch.zeros_like(x)

    def forward(self, stream, f):
        x, total = stream
        total = self.keep * total + f(self.norm(2 * x + total))
        return x + total, total

    def reduce(self, stream):
        return self.norm(stream[0])

@pytest.fixture(scope="module")
def own_residual():
    """--residual own"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RESIDUALS, "own", Momentum)
        yield
