"""Who runs a sublayer: thresholds, routers, LayerDrop, removal, early exit. Float64. The reference: every
token runs every sublayer, and the result is thrown away for those that skip."""
import re
from functools import partial

import pytest, torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

import model as M
from conftest import (attention_by_hand, count_flops, decode, gradients, ids, logits, make, mlp_by_hand, same,
                      same_gradients)

RATES = [0.15, 0.5, 0.7, 0.95]
IDX, TARGETS = ids(3, 16), ids(3, 16, seed=1)

def nag(shut=0.0, **config):
    """Gains differ a lot between tokens and sublayers. Sublayer 4 is shut, sublayer 5 turns back."""
    model = make("nag", **(dict(n_layer=4) | config))
    with torch.no_grad():
        for l, residual in enumerate(model.residuals()[:-1], start=1):
            residual.preferred.mul_(3)
            residual.alpha.fill_({4: shut, 5: -0.7}.get(l, 0.8 + 0.05 * l))
    return model

def at_rate(model, rate):
    """A threshold above a share `rate` of the dense model's gains, and near none: rounding would decide."""
    with torch.no_grad():
        steps = zip(model.sublayers(IDX), model.walk(IDX))
        gains = torch.stack([residual.gain(x).abs() for (_, residual, _), (_, x, *_) in steps])
    gains = gains.flatten().sort().values
    cut = next(i for i in range(int(rate * len(gains)), len(gains)) if gains[i] - gains[i - 1] > 1e-6)
    return M.ByGain(model.config, (gains[cut - 1] + gains[cut]).item() / 2)

def mask(keep, idx):
    """An answer of a decider as (B, T)"""
    return keep if isinstance(keep, torch.Tensor) else torch.full(idx.shape, keep is None)

def by_places(decisions):
    """A decider that says decisions[place - 1]"""
    return M.ByFunction(lambda runner: decisions[runner.place - 1])

def forward(model, idx=IDX, decider=None):
    """-> logits, the decisions (2L, B, T)"""
    runner = M.Runner(model, decider)
    out = logits(model, idx, runner=runner)
    return out, torch.stack([mask(keep, idx) for keep in runner.keeps])

def loss(model, decider=None):
    return model(IDX, TARGETS, runner=M.Runner(model, decider))[1]

def choose(keep, new, old):
    if isinstance(new, tuple):
        return tuple(choose(keep, a, b) for a, b in zip(new, old))
    return torch.where(keep.view(keep.shape + (1,) * (new.dim() - 2)), new, old)

def masked(model, decider, idx=IDX):
    """The reference of `forward`, with gradients"""
    stream, decisions, runner = next(model.walk(idx))[1], [], M.Runner(model, decider)
    for place, residual, f in model.sublayers(idx):
        runner.place, runner.residual, runner.stream, runner.known_gain = place, residual, stream, None
        runner.shape = idx.shape
        decisions.append(mask(decider.decide(runner), idx))
        stream = choose(decisions[-1], residual(stream, f), stream)
    return model.head(stream), torch.stack(decisions)

def same_as_masking(model, decider):
    """Logits, decisions, loss and the gradients of all parameters -> the decisions"""
    right, decisions = masked(model, decider)
    same(forward(model, decider=decider), (right.detach(), decisions))
    his = gradients(model, F.cross_entropy(right.flatten(0, 1), TARGETS.flatten()))
    same_gradients(gradients(model, loss(model, decider)), his)
    return decisions

# ----------------------------------------------------------------------------- thresholds

@pytest.mark.parametrize("config", [{}, dict(activation="swiglu", tie=True), dict(repeat="2-3:2")], ids=str)
def test_a_skipping_step_is_its_reference(config):
    model, uneven, empty, partly = nag(**config), 0, 0, 0
    for rate in RATES:
        count = same_as_masking(model, at_rate(model, rate)).sum(-1)   # (2L, B)
        uneven += (count.amin(1) != count.amax(1)).sum()
        empty += (count.sum(1) == 0).sum()
        partly += ((count.amin(1) == 0) & (count.amax(1) > 0)).sum()
    assert uneven > 5 and empty > 5 and partly > 0   # All odd cases have occurred.

def test_extreme_angles():
    model = nag()
    out, ran = forward(model, decider=M.ByGain(model.config, 0.0))
    same(out, logits(model, IDX), 1e-14)
    assert ran.all()   # A gain of 0, that of a shut sublayer, is not below 0.
    assert not same_as_masking(model, M.ByGain(model.config, 99.0)).any()

@pytest.mark.parametrize("rate", RATES)
def test_decisions_are_causal_and_of_one_sequence(rate):
    model, t, later, others = nag(), 7, IDX.clone(), IDX.clone()
    later[:, t:] = (later[:, t:] + 1 + ids(3, 16 - t, 62, seed=2)) % 64
    others[1:] = ids(2, 16, seed=3)
    decider = at_rate(model, rate)
    (out, ran), (out2, ran2), (out3, ran3) = (forward(model, idx, decider) for idx in (IDX, later, others))
    assert torch.equal(ran[:, :, :t], ran2[:, :, :t]) and torch.equal(ran[:, 0], ran3[:, 0])
    same((out[:, :t], out[0]), (out2[:, :t], out3[0]))
    assert (out[:, t:] - out2[:, t:]).abs().amax(-1).min() > 1e-9

@pytest.mark.parametrize("what", ["nag", "repeat", "without", "exit", "router", "removed router",
                                  "repeated router"])
def test_cached_decoding_is_the_full_forward(what):
    models = {"repeat": lambda: nag(repeat="2:3"), "router": routed, "removed router": routed,
              "repeated router": lambda: routed(repeat="2:3"), "exit": lambda: make(n_layer=4)}
    model = models.get(what, nag)()
    for rate in RATES:
        if what == "exit":
            decider = M.EarlyExit(rate / 8)   # a token's best probability is about 0.08
        elif "router" in what:
            decider = M.Without({3, 8}, model.decider) if "removed" in what else None
        else:
            decider = at_rate(model, rate)
            decider = M.Without({2, 3, 7}, decider) if what == "without" else decider
        full, ran = forward(model, decider=decider)
        same(decode(model, IDX, [1, 5, 1, 1, 4, 1, 3], decider=decider), full)
        assert not ran.all() and (ran.any() or rate > 0.9)
        if what in ("without", "removed router"):   # Others decide still. (An MLP, if its attention can't.)
            assert not ran[3].all()

@pytest.mark.parametrize("residual, mod, decider", [
    ("nag", "gain", None), ("nag", "gain", "removed"), ("nag", "coins", None), ("nag", "layerdrop", None),
    ("pre", "layerdrop", None), ("pre", "router", None), ("pre", "repeated router", None),
    ("nag", "all", "exit"), ("pre", "all", "exit"), ("review", "coins", None), ("review", "all", "exit"),
    ("highway", "layerdrop", None), ("convex", "coins", None), ("x0", "coins", None)])
def test_executed_flops(residual, mod, decider):
    """By torch's counter: what deciders compute, the gains that they ask for, and the keys and values that
    skippers make in attentions (none with a router, or if whole sequences skip)"""
    for rate in (0.2, 0.5, 1.0):
        options = dict(gain=f"below={rate}", coins=f"rate={0.9 * rate}", layerdrop=f"rate={0.9 * rate}")
        name, options = mod.split()[-1], options.get(mod, f"rate={rate / 3:.3f}")
        config = dict(mod=name if name == "all" else f"{name}:{options}", n_layer=4)
        config |= dict(repeat="2:3") if "repeated" in mod else {}
        model = (nag if residual == "nag" else partial(make, residual))(**config)
        given = {"removed": M.Without({2, 3, 8}, model.decider), "exit": M.EarlyExit(rate / 8)}.get(decider)
        model.train(decider != "exit")
        runner = M.Runner(model, given)
        torch.manual_seed(0)
        counted = count_flops(lambda: logits(model, IDX, runner=runner))
        assert counted == pytest.approx(48 * M.flops_per_token(model, 16, runner), rel=1e-6)
        torch.manual_seed(0)
        assert count_flops(lambda: loss(model, given).backward()) <= 3 * counted
        torch.manual_seed(0)
        assert runner.skipped() == pytest.approx(1 - forward(model, decider=given)[1].double().mean().item())

def test_compiled_and_checkpointed_blocks_skip_alike():
    model, counter = nag().train(), CompileCounter()   # Only training is compiled.
    decider = M.ByGain(model.config, 0.4)
    right = gradients(model, loss(model, decider))
    torch._dynamo.reset()
    M.compile_blocks(model, backend=counter, fullgraph=True)
    M.checkpoint_blocks(model)
    same_gradients(gradients(model, loss(model, decider)), right)
    assert 0 < counter.frame_count <= 4   # what all tokens run, and MLPs on kept ones

def test_two_walks_in_turn_are_two_walks_one_after_the_other():
    """What a walk remembers is its Runner's, and no Runner serves twice."""
    other = (IDX + 5) % 64
    for model, decider in [(nag(), M.ByGain(nag().config, 0.3)), (routed(), None),
                           (make(n_layer=4), M.EarlyExit(0.06))]:
        alone = [[after for _, _, after in model.walk(idx, runner=M.Runner(model, decider))]
                 for idx in (IDX, other)]
        walks = [model.walk(idx, runner=M.Runner(model, decider)) for idx in (IDX, other)]
        for i, both in enumerate(zip(*walks)):
            same([model.ends.as_tensor(after) for _, _, after in both],
                 [model.ends.as_tensor(each[i]) for each in alone], 1e-14)
        runner = M.Runner(model, decider)
        model(IDX, runner=runner)
        with pytest.raises(ValueError, match="one walk"):
            model(IDX, runner=runner)

# ----------------------------------------------------------------------------- paying for gain

def paid(model):
    """-> what --gain_cost 1 adds to the loss of a training, from the definition: the mean |gain| of all
    tokens that there are"""
    keeps = forward(model)[1]
    total, stream = 0, next(model.walk(IDX))[1]
    for (place, residual, f), keep in zip(model.sublayers(IDX), keeps):
        total = total + residual.gain(stream).abs().mean() / len(keeps)
        stream = choose(keep, residual(stream, f), stream)
    return total

@pytest.mark.parametrize("mod", ["all", "gain:below=0.5", "coins:rate=0.4"])
@pytest.mark.parametrize("repeat", ["", "2:3"])
def test_a_gain_is_paid_for_in_training_only(mod, repeat):
    config = dict(mod=mod, repeat=repeat)
    model, free = nag(gain_cost=2.0, **config).train(), nag(**config).train()
    found = []
    for each in (model, free):
        torch.manual_seed(0)
        found.append(loss(each))
    torch.manual_seed(0)
    price = 2 * paid(model)
    same(found[0] - found[1], price)
    torch.manual_seed(0)
    rest = gradients(model, free_loss := F.cross_entropy(model(IDX)[0].flatten(0, 1), TARGETS.flatten()))
    same(free_loss, found[1], 1e-12)
    mine, his = gradients(model, found[0]), gradients(model, price)
    same_gradients(mine, {name: rest[name] + his[name] for name in rest})
    for name in "alpha", "beta", "votes", "preferred", "bias":   # The price moves all that make a gain.
        assert his[f"blocks.0.mlp_residual.{name}"].abs().max() > 1e-6
    if "coins" not in mod:   # Who looks at a trained model hears of no price.
        assert torch.equal(loss(model.eval()), loss(free.eval()))

def test_a_high_price_makes_gains_fall():
    gains = []
    for cost in 0.0, 3.0:
        model = make("nag", noise=0, dtype=torch.float32, gain_cost=cost).train()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for step in range(30):
            runner = M.Runner(model)
            model(IDX, TARGETS, runner=runner)[1].backward()
            optimizer.step()
            optimizer.zero_grad()
        model(IDX, runner=(runner := M.Runner(model, M.ByGain(model.config, 0.0))))
        gains.append(runner.mean_gain().item())
    assert gains[1] < 0.6 * gains[0]

def test_without_a_cost_nobody_asks_for_gains():
    model = nag(gain_cost=1.0).eval()   # Nobody pays outside of a training.
    model(IDX, TARGETS, runner=(runner := M.Runner(model)))
    assert runner.mean_gain() is None
    model = nag().train()
    _, loss = model(IDX, TARGETS, runner=(runner := M.Runner(model)))
    assert runner.mean_gain() is None and loss == runner.cross_entropy

# ----------------------------------------------------------------------------- routers, LayerDrop

def routed(rate=0.25, **config):
    return make("pre", **(dict(mod=f"router:rate={rate}", n_layer=4) | config))

def routed_by_hand(model, idx):
    """-> logits, the losses and the decisions of the routers, one for each run of a block that has one"""
    x, losses, decisions = model.wte(idx), [], []
    for number in model.order:
        block, before, keep = model.blocks[number], x, None
        if number % 2 == 1:
            weight = M.unit(x) @ model.decider.routers[number // 2].weight[0]
            keep = weight > 0
            if model.training:   # The largest weights of each sequence: rates of 25 and 12.5 % skip 50 and 25
                rate = float(model.config.mod.split("=")[1])
                number = max(1, round((1 - 2 * rate) * idx.shape[1]))
                keep = weight >= weight.sort(1, descending=True).values[:, number - 1:number]
            losses.append(-(keep * weight.sigmoid().log() + ~keep * (-weight).sigmoid().log()).mean())
            decisions.append(keep)
        x = x + attention_by_hand(block.attn, block.attn_residual.read(x), keep)
        x = x + mlp_by_hand(block.mlp, block.mlp_residual.read(x))
        if keep is not None:
            x = torch.where(keep[..., None], before + weight[..., None] * (x - before), before)
    return model.head(x), losses, decisions

@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rate, T, repeat", [(0.25, 16, ""), (0.125, 16, ""), (0.45, 7, ""), (0.45, 1, ""),
                                             (0.25, 16, "2:3")])
def test_a_router_is_its_reference(rate, T, repeat, training):
    """Attention is among the kept tokens, and the block's change is multiplied by the weight. In training,
    the loss of the routers' own judgement is added. It counts each run of a block that is repeated."""
    model, idx, targets = routed(rate, repeat=repeat).train(training), IDX[:, :T], TARGETS[:, :T]
    right, losses, decisions = routed_by_hand(model, idx)
    out, ran = forward(model, idx)
    same(out, right.detach())
    answers = iter(decisions)
    for number, both in zip(model.order, ran.split(2)):
        assert (both == (next(answers) if number % 2 == 1 else mask(None, idx))).all()
    assert len(losses) == len(decisions) == (4 if repeat else 2)
    mine, reference = model(idx, targets)[1], F.cross_entropy(right.flatten(0, 1), targets.flatten())
    if training:
        reference = reference + 0.01 * sum(losses) / len(losses)
        assert (ran[2::4].sum(-1) == max(1, round((1 - 2 * rate) * T))).all()
    same(mine, reference, 1e-12)
    his = gradients(model, reference)
    same_gradients(gradients(model, mine), his)
    assert (his["decider.routers.0.weight"].abs().max() > 1e-8) == (training or decisions[0].any().item())

def test_without_nothing_all_is_as_before():
    """sample.py wraps each decider so."""
    model = routed()
    same(forward(model, decider=M.Without((), model.decider))[0], logits(model, IDX), 1e-14)

def test_of_equal_weights_those_of_earlier_tokens_are_larger():
    """To a router in training. What else is in the batch makes no difference."""
    model = routed().train()
    for zero in (False, True):
        _, ran = forward(model)
        for i in range(3):
            assert torch.equal(forward(model, IDX[i:i + 1])[1], ran[:, i:i + 1])
        for router in model.decider.routers:
            torch.nn.init.zeros_(router.weight)
    assert (ran[2::4] == (torch.arange(16) < 8)).all()

def test_a_router_reaches_its_rate_and_sees_the_future_in_training_only():
    model, other = routed(), IDX.clone()
    other[:, -1] = (other[:, -1] + 1 + ids(3, 1, 62, seed=2)[:, 0]) % 64
    for training in (True, False):
        earlier = (logits(model.train(training), IDX) - logits(model, other)).abs()[:, :-1].max()
        assert earlier > 1e-3 if training else earlier < 1e-12
    nobody_asks = M.Runner(model, M.Decider(model.config))
    same(logits(model, runner=nobody_asks), logits(make(n_layer=4)), 1e-14)
    for n_layer in 2, 3, 5:   # The wanted share skips at any depth.
        model = make(mod="router:rate=0.25", n_layer=n_layer, block_size=96).train()
        _, ran = forward(model, ids(2, 96))
        assert 1 - ran.double().mean() == pytest.approx(0.25, abs=0.01)

@pytest.mark.parametrize("residual", ["pre", "nag", "x0"])
def test_coins_are_their_reference(residual):
    """A coin for each token and each sublayer, in training and after it, whatever the tokens are."""
    model = make(residual, mod="coins:rate=0.3")
    for training in True, False:
        model.train(training)
        torch.manual_seed(0)
        out, ran = forward(model, IDX)
        same(out, logits(model, IDX, runner=M.Runner(model, by_places(ran))))
        same_as_masking(model, by_places(ran))
        torch.manual_seed(0)
        assert torch.equal(forward(model, (IDX + 1) % 64)[1], ran)
        assert ran.double().mean() == pytest.approx(0.7, abs=0.06)
        assert ran.double().mean((1, 2)).std() < 0.15 and ran.double().mean((0, 1)).std() < 0.3

@pytest.mark.parametrize("residual", ["pre", "nag", "x0"])
def test_layer_drop_is_its_reference(residual):
    """Whole sequences, a coin for each of them and each sublayer, and no rescaling. In training only."""
    model, found = make(residual, mod="layerdrop:rate=0.5"), []
    assert torch.equal(logits(model), logits(make(residual)))
    torch.manual_seed(0)
    _, ran = forward(model.train())
    assert (ran == ran[:, :, :1]).all()
    same_as_masking(model, by_places(ran))
    right = gradients(model, loss(model, by_places(ran)))
    M.checkpoint_blocks(model)   # The backward pass runs blocks again, but nobody is asked again.
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(gradients(model, loss(model)))
    same_gradients(found[0], right)
    assert not torch.equal(found[1]["wte.weight"], found[0]["wte.weight"])

def test_layer_drop_coins_are_fair_and_independent():
    torch.manual_seed(0)
    _, ran = forward(make(mod="layerdrop:rate=0.3", n_layer=2, n_embd=4).train(), ids(4000, 1))
    coins = ran[..., 0].double()   # (2L, B)
    assert (coins.mean(1) - 0.7).abs().max() < 0.03
    assert (torch.corrcoef(coins) - torch.eye(4)).abs().max() < 0.06

# ----------------------------------------------------------------------------- removal and exit

@pytest.mark.parametrize("residual", ["pre", "nag", "attnres", "attnres:group=4", "hyper", "siamese"])
def test_removed_sublayers_do_not_run(residual):
    model, ran, decider = make(residual, n_layer=5), [], None
    decider = M.Without({3, 8}, model.decider)
    for i, block in enumerate(model.blocks):
        block.attn.register_forward_hook(lambda *_, l=2 * i + 1: ran.append(l))
        block.mlp.register_forward_hook(lambda *_, l=2 * i + 2: ran.append(l))
    out, decisions = forward(model, decider=decider)
    assert ran == [1, 2, 4, 5, 6, 7, 9, 10] == [l for l in range(1, 11) if decisions[l - 1].any()]
    same(decode(model, IDX, [5, 1, 10], decider=decider), out)
    if not model.ends.stream_grows:   # Of a stream that grows, removed sublayers become no source.
        same(out, masked(model, decider)[0].detach(), 1e-13)

def test_a_removed_block_is_no_source_of_denseformer():
    """As if it added nothing, and nobody read it"""
    model, other = make("denseformer"), make("denseformer")
    with torch.no_grad():
        other.blocks[1].attn.c_proj.weight.zero_()
        other.blocks[1].mlp.c_proj.weight.zero_()
        other.blocks[1].mlp_residual.weights.copy_(torch.tensor([0.0, 0.0, 1.0]))
        other.blocks[2].mlp_residual.weights[2] = 0.0
    without = M.Runner(model, M.Without({3, 4}, model.decider))
    same(logits(model, runner=without), logits(other))

@pytest.mark.parametrize("residual", ["pre", "nag"])
def test_early_exit(residual):
    """A token leaves before the first block at which the head is sure, and keeps the stream it has there."""
    model, depth = make(residual, n_layer=5), []
    for confidence in (0.0, 0.05, 0.1, 0.3, 1.1):
        out, inside = forward(model, decider=M.EarlyExit(confidence))
        assert torch.equal(inside[::2], inside[1::2]) and inside[0].all()
        same(out, masked(model, by_places(inside))[0].detach())
        walk = list(model.walk(IDX, runner=M.Runner(model, by_places(inside))))[2::2]
        best = torch.stack([model.head(before).softmax(-1).amax(-1) for _, before, _ in walk])
        assert torch.equal(inside[2::2], ~(best >= confidence).cumsum(0).bool())   # Nobody comes back.
        depth.append(inside.double().mean().item())
    assert depth[0] == 0.2 and depth[-1] == 1 and depth == sorted(depth) and depth[1] < depth[3]

# ----------------------------------------------------------------------------- what is asked for and can't be

@pytest.mark.parametrize("residual, can", [("pre", "exit coins router layerdrop"), ("hyper", ""),
                                           ("nag", "gain exit coins layerdrop"), ("x0", "exit coins layerdrop")])
def test_a_model_says_what_it_can_not(residual, can):
    config = make(residual).config
    deciders = [M.ByGain(config), M.EarlyExit(0.9), M.Coins(config), M.Routers(config), M.LayerDrop(config)]
    for name, decider in zip("gain exit coins router layerdrop".split(), deciders):
        sentence = M.why_not(decider, config)
        assert sentence is None if name in can.split() else residual in sentence and "use " in sentence

@pytest.mark.parametrize("mod, says", [
    ("gian", "choose from all, gain"), ("gain:blow=1", "no option 'blow'; its options are below=0.05"),
    ("gain:below=-1", "from 0 to 100"), ("router:rate=0.5", "from 0.001 to 0.45"),
    ("router:rate=0.4", "1 of 3 blocks have a router, too few for this rate; give a smaller one")])
def test_wrong_deciders_get_a_sentence(mod, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        make("pre" if "router" in mod else "nag", mod=mod)

def test_a_decider_of_ones_own(monkeypatch):
    """A class and a key, and nothing else; a wrong answer is told."""
    class EverySecond(M.Decider):
        needs_skipping = True
        def __init__(self, config, first=1):
            super().__init__(config)
            self.first = first

        def decide(self, runner):
            return (torch.arange(16) % 2 == self.first).expand(runner.shape)

    class Wrong(M.Decider):
        def decide(self, runner):
            return runner.stream

    monkeypatch.setitem(M.DECIDERS, "second", EverySecond)
    monkeypatch.setitem(M.DECIDERS, "wrong", Wrong)
    model = make(mod="second:first=0")
    assert (forward(model)[1] == (torch.arange(16) % 2 == 0)).all()
    same_as_masking(model, model.decider)
    with pytest.raises(ValueError, match="Wrong.decide returned .*, not EVERYONE, REMOVED or bools"):
        logits(make(mod="wrong"))
