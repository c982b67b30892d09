"""A mistake in a residual or a decider of one's own is told before a training (train.look_for_mistakes)."""
import re

import pytest, torch
import torch.nn as nn
import torch.nn.functional as F

import model as M
from train import look_for_mistakes

class Good(M.Residual):
    def __init__(self, config, l):
        super().__init__(config, l)
        if not self.is_end:
            self.b = nn.Parameter(torch.tensor(1.0))

    def forward(self, x, f):
        return x + self.b * f(self.norm(x))

SMALL = dict(n_layer=2, n_head=1, n_embd=8)

def like(base, name, **methods):
    """A class of this name that is derived from base, and has these methods"""
    return type(name, (base,), methods)

@pytest.mark.parametrize("kind, says", [
    (like(M.Residual, "NoForward"), "NoForward changes nothing of Residual; write its forward"),
    (like(M.Residual, "Misspelt", foward=lambda self, x, f: x), "did you mean forward?"),
    (like(Good, "Forgets", forward=lambda self, x, f: None), "Is a return missing?"),
    (like(Good, "Mixes", forward=lambda self, x, f: Good.forward(self, x, f) - 0.1 * x.mean(0, keepdim=True)),
     "Mixes looks at other sequences"),
    (like(Good, "Ahead", forward=lambda self, x, f: Good.forward(self, x, f) + 1e-3 * x.roll(-1, dims=1)),
     "Ahead looks at later tokens"),
    (like(Good, "Earlier", forward=lambda self, x, f: Good.forward(self, x, f) + 1e-2 * F.pad(x, (0, 0, 1, -1))),
     "Earlier looks at earlier tokens"),
    (like(Good, "NoStart", forward=lambda self, x, f: (x, x)), "needs a method start, too"),
    (like(Good, "Pair", start=lambda self, x: (x, x.mean(-1, keepdim=True)),
          forward=lambda self, stream, f: (Good.forward(self, stream[0], f), sum(stream))),
     "Pair.forward got ((2, 3, 8), (2, 3, 1)) and returned ((2, 3, 8), (2, 3, 8))"),
    (like(Good, "WrongGate", own_lr=("gaet",)), "own_lr names 'gaet'")], ids=str)
def test_a_mistake_in_a_residual_of_ones_own_is_told(kind, says, monkeypatch):
    monkeypatch.setitem(M.RESIDUALS, "mine", kind)
    with pytest.raises(ValueError, match=re.escape(says)):
        look_for_mistakes(M.GPTConfig("mine", **SMALL))

@pytest.mark.parametrize("kind, says", [
    (like(M.Decider, "Typo", needs_skiping=True), "did you mean needs_skipping?"),
    (like(M.Decider, "Wrong", decide=lambda self, runner: runner.stream), "returned torch.float32"),
    (like(M.Decider, "OneMoreAxis", decide=lambda self, runner: runner.stream[..., :1] > 0),
     "returned torch.bool (2, 4, 1)"),
    (like(M.Decider, "NoReturn", decide=lambda self, runner: None), "decide returned None"),
    (like(M.Decider, "BelowTheLast",
          decide=lambda self, runner: runner.stream[..., 0] < runner.stream[:, -1:, 0]),
     "BelowTheLast looks at later tokens")], ids=str)
def test_a_mistake_in_a_decider_of_ones_own_is_told(kind, says, monkeypatch):
    monkeypatch.setitem(M.DECIDERS, "mine", kind)
    with pytest.raises(ValueError, match=re.escape(says)):
        look_for_mistakes(M.GPTConfig(mod="mine", **SMALL))

def test_a_decider_that_does_not_say_that_tokens_skip(monkeypatch):
    monkeypatch.setitem(M.DECIDERS, "mine", like(M.Decider, "Half", decide=lambda self, runner: torch.ones(
        runner.shape, dtype=torch.bool)))
    with pytest.raises(M.Mistake, match="Half lets tokens skip, which AttnRes can't; say needs_skipping = True"):
        look_for_mistakes(M.GPTConfig("attnres", mod="mine", **SMALL))

def test_a_class_that_needs_its_depth_and_width(monkeypatch):
    """The trial has those of the training."""
    monkeypatch.setitem(M.RESIDUALS, "wide", like(Good, "Wide", forward=lambda self, x, f: Good.forward(
        self, x.unflatten(-1, (4, 8)).flatten(-2), f)))
    monkeypatch.setitem(M.DECIDERS, "fifth", like(M.Decider, "Fifth", decide=lambda self, runner: (
        runner.model.blocks[4] and M.EVERYONE)))
    look_for_mistakes(M.GPTConfig("wide", mod="fifth", n_layer=5, n_head=2, n_embd=32))

class OnlyItsNorm(M.Residual):
    def __init__(self, config, l):
        super().__init__(config, l)
        self.norm = nn.LayerNorm(config.n_embd)

class Noise(Good):   # is of each token alone, though no two passes agree
    def forward(self, x, f):
        return x + self.b * f(F.dropout(self.norm(x), 0.2)) + self.forward2(x)

    def forward2(self, x):   # This name is no misspelling.
        return 0.1 * torch.randn_like(x)

def test_what_is_right_passes(monkeypatch):
    only_its_first_weights = like(M.Residual, "OnlyItsFirstWeights", init_sublayer=lambda self, sublayer: None)
    for kind in Good, only_its_first_weights, OnlyItsNorm, Noise:
        monkeypatch.setitem(M.RESIDUALS, kind.__name__, kind)
    for residual in (*M.RESIDUALS, "attnres:group=2"):
        look_for_mistakes(M.GPTConfig(residual, n_layer=4, n_embd=64))
    for mod in ("gain", "gain:below=0.4"):
        look_for_mistakes(M.GPTConfig("nag", mod=mod))
    for mod in ("router", "coins"):
        look_for_mistakes(M.GPTConfig(mod=mod))
