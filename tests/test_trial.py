"""A mistake in a residual or a decider of one's own is told before a training (trial.py)."""
import re

import pytest, torch
import torch.nn as nn

import model as M
from trial import look_for_mistakes

class Good(M.Residual):
    def __init__(self, config, l):
        super().__init__(config, l)
        if not self.is_end:
            self.b = nn.Parameter(torch.tensor(1.0))

    def forward(self, x, f):
        return x + self.b * f(self.norm(x))

class NoForward(M.Residual):
    pass

class OnlyItsFirstWeights(M.Residual):
    def init_sublayer(self, module):
        pass

class OnlyItsNorm(M.Residual):
    def __init__(self, config, l):
        super().__init__(config, l)
        self.norm = nn.LayerNorm(config.n_embd)

class Noise(Good):   # is of each token alone, though no two passes agree
    def forward(self, x, f):
        return x + self.b * f(torch.nn.functional.dropout(self.norm(x), 0.2)) + self.forward2(x)

    def forward2(self, x):   # This name is no misspelling.
        return 0.1 * torch.randn_like(x)

class Misspelt(M.Residual):
    def foward(self, x, f):
        return x

class Forgets(Good):
    def forward(self, x, f):
        x + self.b * f(self.norm(x))

class StartForgets(Good):
    def start(self, x):
        2 * x

class FinishForgets(Good):
    def finish(self, x):
        self.norm(x)

class Ahead(Good):   # 1e-3 of a later token
    def forward(self, x, f):
        return super().forward(x, f) + 1e-3 * x.roll(-1, dims=1)

class Mixes(Good):
    def forward(self, x, f):
        return super().forward(x, f) - 0.1 * x.mean(0, keepdim=True)

class NoSuper(Good):
    def __init__(self, config, l):
        self.keep = 0.5

class AtTheEnd(Good):
    def __init__(self, config, l):
        super().__init__(config, l)
        self.b = nn.Parameter(torch.tensor(1.0))

class Pair(Good):
    def start(self, x):
        return x, x.mean(-1, keepdim=True)

    def forward(self, stream, f):
        x, mean = stream
        return super().forward(x, f), mean + x   # (2, 3, 8) from the first sublayer on

class WrongGate(Good):
    own_lr = ("gaet",)

class RangeOfNothing(Good):
    allowed = dict(first=(0, 1))

@pytest.mark.parametrize("kind, says", [
    (NoForward, "NoForward changes nothing of Residual; write its forward"),
    (Misspelt, "Misspelt has a foward; did you mean forward?"),
    (Forgets, "Forgets.forward returned NoneType, expected (2, 3, 8)"),
    (StartForgets, "StartForgets.start returned a NoneType"),
    (FinishForgets, "FinishForgets.finish returned NoneType, expected (2, 3, 8)"),
    (Mixes, "Mixes looks at other sequences of the batch"), (Ahead, "Ahead looks at later tokens"),
    (NoSuper, "NoSuper.__init__ must begin with super().__init__"),
    (Pair, "Pair.forward returned ((2, 3, 8), (2, 3, 8)), expected ((2, 3, 8), (2, 3, 1))"),
    (AtTheEnd, "the parameter ends.b gets no gradient"), (WrongGate, "own_lr names 'gaet'"),
    (RangeOfNothing, "allowed names 'first'")])
def test_a_mistake_in_a_residual_of_ones_own_is_told(kind, says, monkeypatch):
    monkeypatch.setitem(M.RESIDUALS, "mine", kind)
    with pytest.raises(ValueError, match=re.escape(says)):
        look_for_mistakes(M.GPTConfig("mine"))

class Typo(M.Decider):
    needs_skiping = True

    def decide(self, runner):
        return M.EVERYONE

class Wrong(M.Decider):
    def decide(self, runner):
        return runner.stream

class NoReturn(M.Decider):
    def decide(self, runner):
        runner.stream > 0

class BelowTheLast(M.Decider):
    def decide(self, runner):
        size = runner.stream[..., 0]
        return size < size[:, -1:]

class Threshold(M.Decider):
    def __init__(self, config):
        super().__init__(config)
        self.below = nn.Parameter(torch.tensor(0.1))

    def decide(self, runner):
        return runner.stream[..., 0] > self.below

@pytest.mark.parametrize("kind, says", [
    (Typo, "Typo has a needs_skiping; did you mean needs_skipping?"),
    (Wrong, "Wrong.decide returned torch.float32 (2, 4, 8), not EVERYONE, REMOVED or bools (2, 4)"),
    (NoReturn, "NoReturn.decide returned None, not EVERYONE"),
    (BelowTheLast, "BelowTheLast looks at later tokens"),
    (Threshold, "Threshold: the parameter decider.below gets no gradient")])
def test_a_mistake_in_a_decider_of_ones_own_is_told(kind, says, monkeypatch):
    monkeypatch.setitem(M.DECIDERS, "mine", kind)
    with pytest.raises(ValueError, match=re.escape(says)):
        look_for_mistakes(M.GPTConfig(mod="mine"))

def test_what_is_right_passes_and_the_random_numbers_stay(monkeypatch):
    for kind in Good, OnlyItsFirstWeights, OnlyItsNorm, Noise:
        monkeypatch.setitem(M.RESIDUALS, kind.__name__, kind)
    state = torch.get_rng_state()
    for residual in (*M.RESIDUALS, "nag:temp=1e4", "nag:temp=1e4,head=linear", "attnres:group=2"):
        look_for_mistakes(M.GPTConfig(residual))
    for mod in ("gain", "gain:below=0.4"):
        look_for_mistakes(M.GPTConfig("nag", mod=mod))
    with torch.no_grad():   # in a notebook, perhaps
        for mod in ("router", "coins", "layerdrop:rate=0.9"):
            look_for_mistakes(M.GPTConfig(mod=mod))
    assert torch.equal(torch.get_rng_state(), state)
