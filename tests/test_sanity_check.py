"""train.sanity_check: a mistake in a residual or policy of one's own is named before a training."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import model as M
import train
from conftest import refused

SMALL = dict(n_layer=2, n_head=2, n_embd=16)

class Good(M.Residual):

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        if not self.is_final:
            self.b = nn.Parameter(torch.tensor(1.0))

    def forward(self, x, f):
        return x + self.b * f(self.norm(x))

def like(base, name, **methods):
    """A class of this name that is derived from base, and has these methods"""
    return type(name, (base,), methods)

def good(name, change):
    """A class like Good. change(x, new): of the stream and of Good's next one"""
    return like(Good, name, forward=lambda self, x, f: change(x, Good.forward(self, x, f)))

def check(monkeypatch, registry, kind, **config):
    monkeypatch.setitem(registry, "mine", kind)
    flag = "residual" if registry is M.RESIDUALS else "mod"
    train.sanity_check(M.GPTConfig(**SMALL | {flag: "mine"} | config))

# ----------------------------------------------------------------------------- residuals

def with_attribute(name, value):
    """A class like Good that keeps value(config) in an attribute"""
    def __init__(self, config, layer_idx):
        Good.__init__(self, config, layer_idx)
        self.extra = value(config)
    return like(Good, name, __init__=__init__)

class Factors(Good):
    """A correction of low rank: two factors, which start at these numbers"""
    starts = (0.0, 0.0)

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        if not self.is_final:
            self.U = nn.Parameter(torch.full((4, config.n_embd), self.starts[0]))
            self.V = nn.Parameter(torch.full((config.n_embd, 4), self.starts[1]))

    def forward(self, x, f):
        h = self.norm(x)
        return x + self.b * f(h) + h @ self.U.T @ self.V.T

class OfFinal(Good):

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.b = nn.Parameter(torch.tensor(1.0))

class Float64(Good):

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        if not self.is_final:
            self.b = nn.Parameter(torch.ones(config.n_embd, dtype=torch.float64))

def in_place(self, x, f):
    x += self.b * f(self.norm(x))
    return x

def twice(self, x, f):
    half = x + 0.5 * self.b * f(self.norm(x))
    return x + f(self.norm(half))

def only_in_evaluation(self, x, f):
    return x * self.b if self.training else Good.forward(self, x, f)

def through_item(self, x, f):
    return x + self.b.item() * f(self.norm(x))

class Counts(Good):
    """looks at how many tokens came before in this call, so decoding differs from a full pass"""

    def forward(self, x, f):
        position = torch.arange(x.shape[1])[:, None]
        return Good.forward(self, x, f) + 0.1 * position

@pytest.mark.parametrize("kind, words", [
    (good("ReturnsNothing", lambda x, new: None), "forward returns None"),
    (like(Good, "InPlace", forward=in_place), "in place"),
    (like(Good, "Never", forward=lambda self, x, f: x * self.b), "calls f 0 times"),
    (like(Good, "NotInTraining", forward=only_in_evaluation), "calls f 0 times"),
    (like(Good, "Twice", forward=twice), "calls f 2 times"),
    (like(Good, "Item", forward=through_item), "b gets no gradient"),
    (OfFinal, "final.b gets no gradient"),
    (like(Factors, "BothZero"), "U gets no gradient"),
    (Float64, "changes the dtype"),
    (good("Infinite", lambda x, new: new / 0), "inf or nan"),
    (like(Good, "InfiniteEnd", reduce=lambda self, x: self.norm(x) / 0), "the loss is nan"),
    (good("MixesSequences", lambda x, new: new - 0.1 * x.mean(0, keepdim=True)), "other sequences"),
    (good("Ahead", lambda x, new: new + 1e-3 * x.roll(-1, dims=1)), "later tokens"),
    (Counts, "KV cache"),
    (good("Earlier", lambda x, new: new + 1e-2 * F.pad(x, (0, 0, 1, -1))), "KV cache"),
    (with_attribute("PlainTensor", lambda c: torch.ones(c.n_embd)), "extra hides a tensor"),
    (with_attribute("ListOfModules", lambda c: [M.Norm(c)]), "extra hides a tensor"),
    (with_attribute("DictOfTensors", lambda c: {"a": (torch.ones(1),)}), "extra hides a tensor"),
], ids=lambda value: getattr(value, "__name__", None))
def test_a_mistake_in_a_residual(monkeypatch, kind, words):
    sentence = refused(lambda: check(monkeypatch, M.RESIDUALS, kind))
    assert sentence.startswith(kind.__name__ + ": ") and words in sentence

class Momentum(M.Residual):
    """A stream of x and of a decaying sum of updates"""

    def expand(self, x):
        return x, torch.zeros_like(x)

    def forward(self, stream, f):
        x, sum = stream
        sum = 0.5 * sum + f(self.norm(x))
        return x + sum, sum

    def reduce(self, stream):
        return self.norm(stream[0])

def test_a_right_residual_passes(monkeypatch):
    dropout = like(Good, "Dropout", forward=lambda self, x, f: x + self.b * F.dropout(
        f(self.norm(x)), 0.2, self.training))
    noise = good("Noise", lambda x, new: new + 0.1 * torch.randn_like(x))
    helper = like(Good, "Helper", _forward=lambda self, x: x)   # no guessing at names
    one_zero = like(Factors, "OneZero", starts=(0.1, 0.0))
    buffer = like(Good, "Buffer", __init__=lambda self, config, layer_idx: (
        Good.__init__(self, config, layer_idx), self.register_buffer("n", torch.zeros(1)))[0])
    frozen = like(Good, "Frozen", __init__=lambda self, config, layer_idx: (
        Good.__init__(self, config, layer_idx), setattr(
            self, "order", nn.Parameter(torch.arange(3), requires_grad=False)))[0])
    for kind in Good, Momentum, dropout, noise, helper, one_zero, buffer, frozen:
        check(monkeypatch, M.RESIDUALS, kind)
    check(monkeypatch, M.RESIDUALS, Good, mod="random:rate=0.5")
    check(monkeypatch, M.RESIDUALS, Good, deep_supervision=True)

@pytest.mark.parametrize("residual", [
    *M.RESIDUALS, "attnres:group=2", "hyper:kind=mhc", "hyper:n=3"])
def test_our_residuals_pass(residual):
    for n_layer in 1, 4:
        train.sanity_check(M.GPTConfig(**SMALL | dict(residual=residual, n_layer=n_layer)))

@pytest.mark.parametrize("config", [
    dict(residual="nag", mod="gate:rate=0.25", gate_loss=0.1, deep_supervision=True),
    dict(residual="nag", mod="gate:below=0.4"), dict(mod="random"), dict(mod="drop"),
    dict(mod="router", norm="dyt", activation="swiglu", taper="linear", n_layer=4),
    dict(repeat="1:2", activation="relu2", norm="layer", init="gpt2")], ids=str)
def test_our_policies_pass(config):
    train.sanity_check(M.GPTConfig(**SMALL | config))

# ----------------------------------------------------------------------------- policies

class Learned(nn.Module):
    """A threshold that is learned through the weight of an update"""
    options = {}

    def __init__(self, config):
        super().__init__()
        self.w = nn.Parameter(torch.full((config.n_embd,), 0.1))

    def forward(self, trace):
        weight = (trace.stream @ self.w).sigmoid()
        return weight > 0.1, weight

def policy(name, mask):
    return like(Learned, name, forward=lambda self, trace: (mask(trace.stream), Learned.forward(
        self, trace)[1]))

@pytest.mark.parametrize("kind, words", [
    (like(Learned, "NoWeight", forward=lambda self, trace: trace.stream @ self.w > -1),
     "policy.w gets no gradient"),
    (policy("BelowTheLast", lambda x: x[..., 0] < x[:, -1:, 0]), "later tokens"),
    (policy("Batch", lambda x: x[..., 0] < x[..., 0].mean(0)), "other sequences"),
], ids=lambda value: getattr(value, "__name__", None))
def test_a_mistake_in_a_policy(monkeypatch, kind, words):
    sentence = refused(lambda: check(monkeypatch, M.POLICIES, kind))
    assert sentence.startswith(kind.__name__ + ": ") and words in sentence

def test_a_right_policy_passes(monkeypatch):
    fixed = lambda config: (lambda trace: trace.stream[..., 0] > 0)   # a function will do
    fixed.options = {}
    for kind in Learned, fixed:
        check(monkeypatch, M.POLICIES, kind)

def test_nothing_is_written_before(data, tmp_path, monkeypatch):
    monkeypatch.setitem(M.RESIDUALS, "mine", like(Good, "InPlace", forward=in_place))
    refused(train.main, ["--data", str(data), "--out", str(tmp_path / "x"), "--residual", "mine"])
    assert not (tmp_path / "x").exists()
