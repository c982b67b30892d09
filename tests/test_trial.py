"""A mistake in a residual or a decider of one's own is told before a training (train.look_for_mistakes). What is right
passes, whatever form it has."""
import random
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest, torch
import torch.nn as nn
import torch.nn.functional as F

import model as M, train

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
    def __init__(self, config, l):
        super().__init__(config, l)
        if self.has_sublayer:
            self.gate = nn.Linear(config.n_embd, config.n_embd)
            nn.init.zeros_(self.gate.weight)

    def forward(self, x, f):
        return x + self.b * self.gate(x).sigmoid() * f(self.norm(x))

class OfEnds(Good):
    def __init__(self, config, l):
        super().__init__(config, l)
        self.b = nn.Parameter(torch.ones(config.n_embd))

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

def good(name, forward=None, **methods):
    """A class like Good, but for these methods. forward(x, update): of the stream, and of Good's next one"""
    if forward:
        methods["forward"] = lambda self, x, f: forward(x, Good.forward(self, x, f))
    return like(Good, name, **methods)

@pytest.mark.parametrize("kind, says", [
    (like(M.Residual, "NoForward"), "NoForward changes nothing of Residual; write its forward"),
    (like(M.Residual, "Misspelt", foward=Good.forward), "did you mean forward?"),
    (good("Alowed", alowed=dict(b=(0, 1))), "did you mean allowed?"),
    (type("NotDerived", (nn.Module,), {}), "must be a class that is derived from Residual"),
    (NoSuper, "NoSuper fails in line"), (NoSuper, "cannot assign parameters before Module.__init__"),
    (good("Forgets", lambda x, new: None), "Forgets got a stream of the shapes [(2, 4, 16)] and returned []. Is a return"),
    (like(Good, "InPlace", forward=in_place), "InPlace changes its stream in place"),
    (like(Good, "Never", forward=lambda self, x, f: x * self.b), "Never: norm.weight gets no gradient"),
    (like(M.Residual, "Flat", has_norm=False, forward=lambda self, x, f: 2 * x), "Flat calls f 0 times"),
    (like(Good, "Twice", forward=twice), "Twice calls f 2 times"),
    (good("Breaks", lambda x, new: x.beta), "Breaks fails in line"),
    (good("Mixes", lambda x, new: new - 0.1 * x.mean(0, keepdim=True)), "Mixes looks at other sequences"),
    (good("Ahead", lambda x, new: new + 1e-3 * x.roll(-1, dims=1)), "Ahead looks at later tokens"),
    (good("Earlier", lambda x, new: new + 1e-2 * F.pad(x, (0, 0, 1, -1)), can_skip=False), "looks at earlier tokens"),
    (good("NoStart", lambda x, new: (x, new)), "needs a method start, too"),
    (like(Good, "Pair", start=lambda self, x: (x, x.mean(-1, keepdim=True)),
          forward=lambda self, stream, f: (Good.forward(self, stream[0], f), sum(stream))),
     "Pair got a stream of the shapes [(2, 4, 16), (2, 4, 1)] and returned [(2, 4, 16), (2, 4, 16)]"),
    (like(Good, "Unpacks", forward=unpacks), "Unpacks, where some tokens skip (can_skip = False says no), fails"),
    (good("WrongGate", own_lr=("gaet",)), "WrongGate.own_lr is ('gaet',); write a tuple"),
    (good("TextGate", own_lr="norm.weight"), "own_lr is 'norm.weight'; write a tuple"),
    (like(Good, "Item", forward=lambda self, x, f: x + self.b.item() * f(self.norm(x))), "Item: b gets no gradient"),
    (like(Good, "Swapped", start=lambda self, x: (torch.zeros_like(x), x), forward=lambda self, stream, f: (
        stream[0], Good.forward(self, stream[1], f))), "as_tensor of the first stream is all zeros"),
    (like(Good, "Counts", start=lambda self, x: (x, 0), forward=lambda self, stream, f: (
        Good.forward(self, stream[0], f), stream[1] + 1)), "Counts, where some tokens skip"),
    (good("Infinite", lambda x, new: x / 0 + new), "numbers that are not finite"),
    (OfEnds, "OfEnds: b gets no gradient"), (OfEnds, "model.ends has no sublayer"),
    (Table, "FLOPs per token ran"), (good("Numpy", lambda x, new: new * np.random.normal()), "that --seed doesn't reach"),
    (good("Generator", lambda x, new: new * np.random.default_rng().normal()), "that --seed doesn't reach"),
    (like(M.NAG, "NoGain", forward=lambda self, stream, f: M.NAG.forward(self, stream, f)), "3 positional arguments but 4"),
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

class Two(NamedTuple):
    x: torch.Tensor
    v: torch.Tensor

class NamedStream(M.Residual):
    def start(self, x):
        return Two(x, torch.zeros_like(x))

    def forward(self, stream, f):
        return Two(*momentum(*stream, f(self.norm(stream.x))))

ListStream = like(NamedStream, "ListStream", start=lambda self, x: [x, torch.zeros_like(x)],
                  forward=lambda self, stream, f: [*momentum(*stream, f(self.norm(stream[0])))])

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
    for kind in (Good, DictStream, ListStream, NamedStream, Rates, OnlyItsNorm, Noise, unpacks_only, first_weights,
                 wide, counted, ZeroGate):
        assert told(monkeypatch, M.RESIDUALS, kind) is None, kind

def test_what_a_class_sets_stays(monkeypatch):
    monkeypatch.setitem(M.RESIDUALS, "mine", ZeroGate)
    model = train.make_model(M.GPTConfig(**SMALL | dict(residual="mine")))
    assert all(residual.gate.weight.eq(0).all() for residual in model.residuals()[:-1])

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
    (like(M.Decider, "Python", forward=lambda self, trip: torch.tensor([[random.random() > 0.3 for _ in range(4)] for _ in range(2)])),
     "use torch.rand"),
    (Learned, "Learned: w gets no gradient"),
    (like(Multiplies, "Uncounted", forward=lambda self, trip: trip.notes.update(
        weight=trip.stream @ self.w.diag() @ self.w) or True), "decider adds its own"),
    (like(M.ByGain, "Moves", after_iteration=lambda self, trips: None), "Moves fails")], ids=lambda value: getattr(value, "__name__", None))
def test_a_mistake_in_a_decider_is_told(monkeypatch, kind, says):
    residual = "nag" if kind.needs_gain else "pre"
    assert says in told(monkeypatch, M.DECIDERS, kind, residual=residual, **dict(mod="mine:rate=0.2") if kind.needs_gain else {})

def test_a_decider_that_a_residual_can_not_have(monkeypatch):
    half = like(M.Decider, "Half", forward=lambda self, trip: torch.arange(trip.shape[1]).expand(trip.shape) % 2 > 0)
    assert "Half lets tokens skip, which AttnRes can't" in told(monkeypatch, M.DECIDERS, half, residual="attnres")
    assert "Takes fails in line" in told(monkeypatch, M.DECIDERS, like(
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
