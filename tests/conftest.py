"""What the tests share: tiny models whose parameters are all in use, sublayers written out by hand,
and ways to compare."""
import math, os, signal, sys, zlib
from collections import namedtuple
from pathlib import Path

import pytest, torch
import torch.nn as nn
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")   # before anything imports triton

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

# Not resolved, so that a folder of links to these files tests the model beside them.
ROOT = Path(__file__).absolute().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
import prepare
from model import GPT, GPTConfig, KVCache, RESIDUALS, Residual, map_stream

os.environ.setdefault("OMP_NUM_THREADS", "1")   # for the programs that tests start
torch.set_num_threads(1)                        # The models are too small for threads to pay off.

TINY = dict(n_layer=3, n_head=2, n_embd=16, block_size=16, vocab_size=64)

def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than a few seconds; needs --slow")
    if not config.getoption("--slow") and not config.option.markexpr:
        config.option.markexpr = "not slow"   # as if -m "not slow" were typed

@pytest.fixture(autouse=True)
def usual_signals():
    """Those of a terminal, whatever a shell (nohup, &) or another test has set"""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield

@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A data set of bytes, for small runs"""
    folder = tmp_path_factory.mktemp("corpus")
    lines = "".join(f"line {i}: {i * i} = {i} * {i}\n" for i in range(3000))
    (folder / "text.txt").write_text(lines)
    prepare.main(["text", "--input", str(folder / "text.txt"), "--out", str(folder / "data")])
    return folder / "data"

@pytest.fixture(scope="session")
def steps_data(tmp_path_factory):
    """The steps text, with lines of four digits and with at most three steps"""
    folder = tmp_path_factory.mktemp("steps") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "PUZZLE", prepare.PUZZLE | dict(cells=4, most=3))
        patch.setattr(prepare, "SPLITS", dict(train=(200, 1), val=(200, 2)))
        prepare.main(["steps", "--out", str(folder)])
    return folder

def refused(function, *given):
    """The one sentence with which function(*given) ends the program"""
    with pytest.raises((SystemExit, OSError)) as refusal:
        function(*given)
    sentence = str(refusal.value)
    assert len(sentence.splitlines()) == 1 and len(sentence) > 20, sentence
    return sentence

# ----------------------------------------------------------------------------- models and inputs

@torch.no_grad()
def make(residual="pre", noise=0.2, dtype=torch.float64, **config):
    """A tiny GPT in evaluation mode. It is made while dtype is the default one, because constants
    such as 1 / sqrt(3) need its precision, too. noise moves every parameter away from where it
    starts, so that a gate of zeros can't hide a mistake, by draws that depend on its name alone:
    parameters that two models share stay equal."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = GPT(GPTConfig(residual=residual, **(TINY | config)))
    finally:
        torch.set_default_dtype(before)
    for name, p in model.named_parameters():
        p.add_(noise * some(*p.shape, seed=zlib.crc32(name.encode())))
    return model.eval()

def ids(B=2, T=12, V=TINY["vocab_size"], seed=0):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))

def some(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)

@torch.no_grad()
def logits(model, idx=None, **options):
    return model(ids() if idx is None else idx, **options)[0]

def decode(model, idx, pieces, make_trip=lambda: None):
    """The logits of all tokens, piece by piece through a KV cache"""
    cache = KVCache(model.config.block_size)
    return torch.cat([logits(model, piece, cache=cache, trip=make_trip())
                      for piece in idx.split(pieces, dim=1)], dim=1)

def joined(batches):
    return [torch.cat(part) for part in zip(*batches)]   # idx, targets

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
    """What torch counts of the matrix products in function(). Others go uncounted on CPUs."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()

# ----------------------------------------------------------------------------- sublayers by hand

def unit(x, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

def attention_by_hand(attn, x, keep=None):
    """Causal attention with RoPE, and with normalised queries and keys. x (B, T, C) -> (B, T, C).
    keep (B, T): the other tokens have no keys"""
    (B, T, C), hs = x.shape, attn.head_size
    q, k, v = ((x @ w.T).view(B, T, C // hs, hs) for w in attn.c_attn.weight.chunk(3))
    speed = 1e4 ** -(torch.arange(0, hs, 2, dtype=torch.float64) / hs)
    angle = torch.arange(T)[:, None, None] * speed

    def turned(y):
        even, odd = unit(y)[..., ::2], unit(y)[..., 1::2]
        pairs = even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()
        return torch.stack(pairs, -1).flatten(-2)

    seen = torch.ones(T, T, dtype=torch.bool).tril().expand(B, T, T)
    if keep is not None:   # A token sees itself, because a row without any key would be NaN.
        seen = seen & (keep[:, None] | torch.eye(T, dtype=torch.bool))
    scores = torch.einsum("bihc,bjhc->bhij", turned(q), turned(k))
    scores = scores * 128 ** 0.5 / hs   # the largest one is that which is usual in heads of 128
    weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
    return torch.einsum("bhij,bjhc->bihc", weights, v).flatten(-2) @ attn.c_proj.weight.T

def mlp_by_hand(mlp, x):
    x = x @ mlp.c_fc.weight.T
    if mlp.activation == "gelu":
        x = x * 0.5 * (1 + torch.erf(x / 2 ** 0.5))
    elif mlp.activation == "relu2":
        x = F.relu(x) ** 2
    else:
        gate, x = x.chunk(2, dim=-1)
        x = gate / (1 + (-gate).exp()) * x
    return x @ mlp.c_proj.weight.T

def sublayers_by_hand(model):
    """Yields (l, residual, f) in the order in which they run. l is the residual's own number."""
    for number in model.order:
        block = model.blocks[number]
        yield (2 * number + 1, block.attn_residual,
               lambda x, attn=block.attn: attention_by_hand(attn, x))
        yield 2 * number + 2, block.mlp_residual, lambda x, mlp=block.mlp: mlp_by_hand(mlp, x)

# ----------------------------------------------------------------------------- a rule of one's own

FORMS = dict(tuple=lambda x, added: (x, added), list=lambda x, added: [x, added],
             dict=lambda x, added: dict(x=x, added=added), named=namedtuple("Pair", "x added"),
             nested=lambda x, added: (x, {"deep": [added]}))

class Momentum(Residual):
    """As a reader might write it: a stream of x, and of a decaying sum of what was added to it"""
    allowed = dict(form=tuple(FORMS))

    def __init__(self, config, l, form="tuple"):
        super().__init__(config, l)
        self.pack = FORMS[form]
        if self.has_sublayer:
            self.keep = nn.Parameter(torch.tensor(0.5))

    def start(self, x):
        return self.pack(x, torch.zeros_like(x))

    def forward(self, stream, f):
        parts = []
        map_stream(parts.append, stream)
        x, added = parts
        added = self.keep * added + f(self.norm(2 * x + added))
        return self.pack(x + added, added)

@pytest.fixture(scope="module")
def own_residual():
    """--residual own, own:form=dict, .."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RESIDUALS, "own", Momentum)
        yield
