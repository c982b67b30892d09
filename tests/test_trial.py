"""A mistake in a residual or a decider of one's own is told before a training (train.look_for_mistakes). What is right
passes, whatever form it has."""
import random, re
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest, torch
import torch.nn as nn
import torch.nn.functional as F

import model as M, train
from conftest import refused

SMALL = dict(n_layer=2, n_head=2, n_embd=16)

class Good(M.Residual):
    def __init__(self, config, l):
        super().__init__(config, l)
        if self.has_sublayer:
            self.b = nn.Parameter(torch.tensor(1.0))

    def forward(self, x, f):
        return x + self.b * f(self.norm(x))

def like(base, name, **methods):
    """A class of this name that is derived from base, and has these methods"""
    return type(name, (base,), methods)

def told(monkeypatch, registry, kind, **config):
    """What train.py says of a class before it begins; None: all is right"""
    monkeypatch.setitem(registry, "mine", kind)
    name = "residual" if registry is M.RESIDUALS else "mod"
    try:
        model_config, _, _ = train.gather_settings(SMALL | {name: "mine", "out": "x"} | config)
        train.look_for_mistakes(model_config)
    except M.Mistake as mistake:
        return str(mistake)

# --------------------------------------------------------------------------------- residuals

class NoSuper(M.Residual):
    def __init__(self, config, l):
        self.b = nn.Parameter(torch.ones(config.n_embd))

class ZeroGate(Good):
    def __init__(self, config, l, set_weight=nn.init.zeros_):
        super().__init__(config, l)
        if self.has_sublayer:
            self.gate = nn.Linear(config.n_embd, config.n_embd)
            set_weight(self.gate.weight)

    def forward(self, x, f):
        return x + self.b * self.gate(x).sigmoid() * f(self.norm(x))

class OfEnds(M.Residual):
    def __init__(self, config, l):
        super().__init__(config, l)
        self.b = nn.Parameter(torch.ones(config.n_embd))

    def forward(self, x, f):
        return x + self.b * f(self.norm(x))

class Table(Good):   # It has two dimensions, and is no matrix.
    def __init__(self, config, l):
        super().__init__(config, l)
        if self.has_sublayer:
            self.table = nn.Parameter(torch.ones(3, config.n_embd))

    def forward(self, x, f):
        return x + self.b * self.table.mean(0) * f(self.norm(x))

def in_place(self, x, f):
    x += f(self.norm(x))
    return x

def twice(self, x, f):
    half = x + 0.5 * self.b * f(self.norm(x))
    return x + f(self.norm(half))

def unpacks(self, x, f):
    B, T, C = x.shape
    return Good.forward(self, x, f)

@pytest.mark.parametrize("kind, says", [
    (like(M.Residual, "NoForward"), "NoForward changes nothing of Residual; write its forward"),
    (like(M.Residual, "Misspelt", foward=Good.forward), "did you mean forward?"),
    (like(Good, "Alowed", alowed=dict(b=(0, 1))), "did you mean allowed?"),
    (type("NotDerived", (nn.Module,), {}), "must be a class that is derived from Residual"),
    (NoSuper, "NoSuper fails, in line"), (NoSuper, "cannot assign parameters before Module.__init__"),
    (like(Good, "Forgets", forward=lambda self, x, f: None if f(self.norm(x)) is None else None), "Is a return missing?"),
    (like(Good, "InPlace", forward=in_place), "InPlace changes its stream in place"),
    (like(Good, "Never", forward=lambda self, x, f: x * self.b), "Never calls f 0 times"),
    (like(Good, "Twice", forward=twice), "Twice calls f 2 times"),
    (like(Good, "Breaks", forward=lambda self, x, f: x + self.beta * f(self.norm(x))), "'return x"[:3]),
    (like(Good, "Mixes", forward=lambda self, x, f: Good.forward(self, x, f) - 0.1 * x.mean(0, keepdim=True)),
     "Mixes looks at other sequences"),
    (like(Good, "Ahead", forward=lambda self, x, f: Good.forward(self, x, f) + 1e-3 * x.roll(-1, dims=1)),
     "Ahead looks at later tokens"),
    (like(Good, "Earlier", can_skip=False,
          forward=lambda self, x, f: Good.forward(self, x, f) + 1e-2 * F.pad(x, (0, 0, 1, -1))),
     "Earlier looks at earlier tokens"),
    (like(Good, "NoStart", forward=lambda self, x, f: (x, f(x))), "needs a method start, too"),
    (like(Good, "Pair", start=lambda self, x: (x, x.mean(-1, keepdim=True)),
          forward=lambda self, stream, f: (Good.forward(self, stream[0], f), sum(stream))),
     "Pair.forward got a stream of the shapes [(2, 4, 16), (2, 4, 1)] and returned [(2, 4, 16), (2, 4, 16)]"),
    (like(Good, "Unpacks", forward=unpacks), "Unpacks fails where some tokens skip (can_skip = False"),
    (like(Good, "WrongGate", own_lr=("gaet",)), "own_lr names 'gaet', and its parameters are b, norm.weight"),
    (like(Good, "TextGate", own_lr="b"), "TextGate.own_lr must be a tuple"),
    (like(Good, "Item", forward=lambda self, x, f: x + self.b.item() * f(self.norm(x))), "Item: b gets no gradient"),
    (like(Good, "Swapped", start=lambda self, x: (torch.zeros_like(x), x), forward=lambda self, stream, f: (
        stream[0], Good.forward(self, stream[1], f))), "as_tensor of the first stream is all zeros"),
    (like(Good, "Counts", start=lambda self, x: (x, 0), forward=lambda self, stream, f: (
        Good.forward(self, stream[0], f), stream[1] + 1)), "Counts fails where some tokens skip"),
    (like(Good, "Infinite", forward=lambda self, x, f: x / 0 * f(self.norm(x))), "numbers that are not finite"),
    (OfEnds, "OfEnds: b of model.ends, which has no sublayer"),
    (ZeroGate, "ZeroGate sets gate.weight"), (partial(ZeroGate, set_weight=partial(nn.init.normal_, std=0.01)), "sets gate"),
    (Table, "Table: "), (Table, "FLOPs per token ran"),
    (like(Good, "Numpy", forward=lambda self, x, f: Good.forward(self, x, f) * np.random.normal()), "that --seed doesn't reach"),
    (like(Good, "Generator", forward=lambda self, x, f: Good.forward(self, x, f) * np.random.default_rng().normal()),
     "that --seed doesn't reach"),
    (like(M.NAG, "NoGain", forward=lambda self, stream, f: M.NAG.forward(self, stream, f)), "forward(self, stream, f, gain=None)"),
    (like(M.NAG, "FlatGain", gain=lambda self, stream: M.NAG.gain(self, stream).squeeze(-1)), "FlatGain"),
], ids=lambda value: getattr(value, "__name__", None))
def test_a_mistake_in_a_residual_is_told(monkeypatch, kind, says):
    assert says in told(monkeypatch, M.RESIDUALS, kind)

def momentum(x, v, update):
    v = 0.5 * v + update
    return x + v, v

class DictStream(M.Residual):
    def start(self, x):
        return {"x": x, "v": torch.zeros_like(x)}

    def forward(self, stream, f):
        x, v = momentum(stream["x"], stream["v"], f(self.norm(self.as_tensor(stream))))
        return {"x": x, "v": v}

class ListStream(M.Residual):
    def start(self, x):
        return [x, torch.zeros_like(x)]

    def forward(self, stream, f):
        return [*momentum(*stream, f(self.norm(self.as_tensor(stream))))]

class Two(NamedTuple):
    x: torch.Tensor
    v: torch.Tensor

class NamedStream(ListStream):
    def start(self, x):
        return Two(x, torch.zeros_like(x))

    def forward(self, stream, f):
        return Two(*momentum(*stream, f(self.norm(stream.x))))

class Rates(M.Residual):
    can_skip = False

    def __init__(self, config, l, rate=0.2):
        super().__init__(config, l)
        self.rate = torch.linspace(0, rate, 2 * config.n_layer + 1)[l - 1].item()

    def forward(self, x, f):   # It leaves whole sublayers out.
        if self.training and torch.rand(()) < self.rate:
            return x
        return x + f(self.norm(x))

class OnlyItsNorm(M.Residual):
    def __init__(self, config, l):
        super().__init__(config, l)
        self.norm = nn.LayerNorm(config.n_embd)

class Noise(Good):   # is of each token alone, though no two passes agree
    def forward(self, x, f):
        return x + self.b * f(F.dropout(self.norm(x), 0.2)) + self.forward2(x)

    def forward2(self, x):   # This name is no misspelling.
        return 0.1 * torch.randn_like(x)

def test_a_right_residual_passes(monkeypatch):
    unpacks_only = like(Good, "CantSkip", forward=unpacks, can_skip=False)
    first_weights = like(M.Residual, "FirstWeights", init_sublayer=lambda self, sublayer: None)
    wide = like(Good, "Wide", forward=lambda self, x, f: Good.forward(self, x.unflatten(-1, (4, 4)).flatten(-2), f))
    counted = like(Table, "Counted", flops=lambda self: 0)
    gate = partial(ZeroGate, set_weight=lambda weight: None)
    for kind in (Good, DictStream, ListStream, NamedStream, Rates, OnlyItsNorm, Noise, unpacks_only, first_weights,
                 wide, counted, gate):
        assert told(monkeypatch, M.RESIDUALS, kind) is None, kind

def test_ours_pass():
    def passes(**config):
        train.look_for_mistakes(M.GPTConfig(**SMALL | config))
    for residual in (*M.RESIDUALS, "attnres:group=2", "hyper:kind=mhc", "hyper:kind=lite,n=3", "mixln:alpha=1"):
        for n_layer in 1, 4:
            passes(residual=residual, n_layer=n_layer)
    for mod in "gain:rate=0.25", "gain:below=0.4", "coins":
        passes(residual="nag", mod=mod, gain_cost=0.1, deep_supervision=True)
    for residual in "pre", "hyper", "gated":
        passes(residual=residual, mod="coins", repeat="2:2", norm="rms")
    passes(mod="router", norm="dyt", activation="swiglu", taper="linear")

# --------------------------------------------------------------------------------- deciders

class Learned(M.Decider):
    """A threshold that is learned, but for the comparison"""
    needs_skipping = True

    def __init__(self, config):
        super().__init__(config)
        self.w = nn.Parameter(torch.zeros(config.n_embd))

    def forward(self, trip):
        return trip.stream @ self.w > -1

class Multiplies(Learned):
    """... which `after` mends. Its product is counted."""
    def forward(self, trip):
        trip.decider_flops += 2 * len(self.w)
        trip.notes["weight"] = (trip.stream @ self.w).sigmoid()
        return trip.notes["weight"] > 0.1

    def after(self, trip, stream):
        return stream * trip.notes["weight"][..., None]

def bools(test):
    return lambda self, trip: test(trip.stream)

@pytest.mark.parametrize("kind, says", [
    (like(M.Decider, "Decides", decide=bools(lambda x: x[..., 0] > 0)), "Decides changes nothing of Decider; write its forward"),
    (like(M.Decider, "Typo", skipers_make_keys=False, forward=lambda self, trip: True), "did you mean skippers_make_keys?"),
    (like(M.Decider, "Wrong", forward=bools(lambda x: x)), "returned torch.float32"),
    (like(M.Decider, "OneMoreAxis", forward=bools(lambda x: x[..., :1] > 0)), "returned torch.bool (2, 4, 1)"),
    (like(M.Decider, "NoReturn", forward=lambda self, trip: None), "is a return missing?"),
    (like(M.Decider, "BelowTheLast", forward=bools(lambda x: x[..., 0] < x[:, -1:, 0])), "BelowTheLast looks at later tokens"),
    (like(M.Decider, "Python", forward=lambda self, trip: random.random() > 0.3), "draw them by torch.rand"),
    (Learned, "Learned: w gets no gradient"),
    (like(Multiplies, "Uncounted", forward=lambda self, trip: trip.notes.update(
        weight=trip.stream @ self.w.diag() @ self.w) or True), "decider adds its own"),
    (like(M.ByGain, "Moves", after_iteration=lambda self, trips: None), "Moves fails"),
    (like(M.Decider, "Zero", __init__=lambda self, config: (M.Decider.__init__(self, config), setattr(
        self, "g", nn.Linear(config.n_embd, 1)), nn.init.zeros_(self.g.weight)) and None, forward=lambda self, trip: True),
     "Zero sets g.weight")], ids=lambda value: getattr(value, "__name__", None))
def test_a_mistake_in_a_decider_is_told(monkeypatch, kind, says):
    residual = "nag" if kind.needs_gain else "pre"
    assert says in told(monkeypatch, M.DECIDERS, kind, residual=residual, **dict(mod="mine:rate=0.2") if kind.needs_gain else {})

def test_a_decider_that_a_residual_can_not_have(monkeypatch):
    half = like(M.Decider, "Half", forward=lambda self, trip: torch.arange(trip.shape[1]).expand(trip.shape) % 2 > 0)
    assert "Half lets tokens skip, which AttnRes can't" in told(monkeypatch, M.DECIDERS, half, residual="attnres")
    assert "Takes fails, in line" in told(monkeypatch, M.DECIDERS, like(
        M.Decider, "Takes", forward=bools(lambda x: x[..., 0] > -2)), residual="nag")

def test_a_right_decider_passes(monkeypatch):
    fifth = like(M.Decider, "Fifth", forward=lambda self, trip: bool(trip.model.blocks[4]))   # It needs its depth.
    drops = like(M.Decider, "Drops", forward=lambda self, trip: not self.training or torch.rand(()).item() > 0.3)
    for kind in Multiplies, drops, partial(M.Coins, rate=0.5):
        assert told(monkeypatch, M.DECIDERS, kind) is None, kind
    assert told(monkeypatch, M.DECIDERS, fifth, n_layer=5) is None

def test_nothing_is_written_before(data, tmp_path, monkeypatch):
    monkeypatch.setitem(M.RESIDUALS, "mine", like(Good, "InPlace", forward=in_place))
    with pytest.raises(M.Mistake):
        train.main(["--data", str(data), "--out", str(tmp_path / "x"), "--residual", "mine"])
    assert not (tmp_path / "x").exists()
