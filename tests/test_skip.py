"""Who runs a sublayer: thresholds, routers, coins, removal, early exit. Float64. The reference: every
token runs every sublayer, and the result is thrown away for those that skip."""
from functools import partial

import pytest, torch
import torch.nn.functional as F

import model as M
from conftest import (attention_by_hand, count_flops, decode, gradients, ids, logits, make, mlp_by_hand, same,
                      same_gradients)

RATES = [0.3, 0.5, 0.7, 0.95]   # Shut sublayers are less than 0.3 of all.
IDX, TARGETS = ids(3, 16), ids(3, 16, seed=1)

def nag(**config):
    """Gains differ a lot between tokens and sublayers. Sublayer 4 is shut, sublayer 5 turns back."""
    model = make("nag", **(dict(n_layer=4) | config))
    with torch.no_grad():
        for l, residual in enumerate(model.residuals()[:-1], start=1):
            residual.preferred.mul_(3)
            residual.alpha.fill_({4: 0.0, 5: -0.7}.get(l, 0.8 + 0.05 * l))
    return model

def sublayers(model):
    """Yields (place, residual, f), as GPT.forward runs them"""
    for i, number in enumerate(model.order):
        block = model.blocks[number]
        yield 2 * i + 1, block.attn_residual, M.AttentionInPass(block.attn, model.rotation[:16], None)
        yield 2 * i + 2, block.mlp_residual, block.mlp

def gains(model, decider=None):
    """|gain| of all tokens and sublayers (places, B, T, 1)"""
    walk = model.walk(IDX, M.Runner(model, decider))
    return torch.stack([residual.gain(stream).abs() for (_, residual, _), stream in zip(sublayers(model), walk)])

def at_rate(model, rate):
    """A threshold above a share `rate` of the dense model's gains, between two of them"""
    with torch.no_grad():
        return M.ByGain(model.config, gains(model).quantile(rate).item())

def by_places(decisions):
    """A decider that says decisions[place - 1]"""
    return M.ByFunction(lambda runner: decisions[runner.place - 1])

def forward(model, idx=IDX, decider=None):
    """-> logits, the decisions (2L, B, T)"""
    runner = M.Runner(model, decider)
    out = logits(model, idx, runner=runner)
    return out, runner.who_ran()

def loss(model, decider=None):
    return model(IDX, TARGETS, runner=M.Runner(model, decider))[1]

def choose(keep, new, old):
    if isinstance(new, tuple):
        return tuple(choose(keep, a, b) for a, b in zip(new, old))
    return torch.where(keep.view(keep.shape + (1,) * (new.dim() - 2)), new, old)

def masked(model, decider):
    """The reference of `forward`, with gradients"""
    stream, runner = model.walk(IDX)[0], M.Runner(model, decider)
    runner.shape = IDX.shape
    for place, residual, f in sublayers(model):
        runner.place, runner.residual, runner.stream, runner.known_gain = place, residual, stream, None
        runner.answers.append(decider.decide(runner))
        stream = choose(runner.who_ran()[-1], residual(stream, f), stream)
    return model.head(stream), runner.who_ran()

def same_as_masking(model, decider):
    """Logits, decisions, loss and the gradients of all parameters -> the decisions"""
    right, decisions = masked(model, decider)
    same(forward(model, decider=decider), (right.detach(), decisions))
    his = gradients(model, F.cross_entropy(right.flatten(0, 1), TARGETS.flatten()))
    same_gradients(gradients(model, loss(model, decider)), his)
    return decisions

# ----------------------------------------------------------------------------- thresholds

@pytest.mark.parametrize("config", [{}, dict(activation="swiglu"), dict(repeat="2-3:2")], ids=str)
def test_a_skipping_step_is_its_reference(config):
    model, uneven, empty, partly = nag(**config), 0, 0, 0
    for rate in RATES:
        count = same_as_masking(model, at_rate(model, rate)).sum(-1)   # (2L, B)
        uneven += (count.amin(1) != count.amax(1)).sum()
        empty += (count.sum(1) == 0).sum()
        partly += ((count.amin(1) == 0) & (count.amax(1) > 0)).sum()
    assert uneven > 5 and empty > 5 and partly > 0   # All odd cases have occurred.
    assert same_as_masking(model, M.ByGain(model.config, 0.0)).all()   # 0 is not below 0.

def routed(rate=0.25, **config):
    return make("pre", **(dict(mod=f"router:rate={rate}", n_layer=4) | config))

@pytest.mark.parametrize("make_model, make_decider", [
    (nag, at_rate), (partial(nag, repeat="2:3"), at_rate),
    (nag, lambda model, rate: M.Without({2, 3, 7}, at_rate(model, rate))),
    # A token's best probability is about 0.08.
    (partial(make, n_layer=4), lambda model, rate: M.EarlyExit(rate / 8)),
    (routed, lambda model, rate: model.decider), (partial(routed, repeat="2:3"), lambda model, rate: None),
    (routed, lambda model, rate: M.Without({3, 8}, model.decider))],
    ids=["gain", "repeat", "gain without", "exit", "router", "repeated router", "router without"])
def test_cached_decoding_is_the_full_forward(make_model, make_decider):
    """So no decision depends on a later token."""
    for rate in RATES:
        model = make_model()
        decider = make_decider(model, rate)
        full, ran = forward(model, decider=decider)
        same(decode(model, IDX, [1, 5, 1, 1, 4, 1, 3], decider=decider), full)
        assert not ran.all() and (ran.any() or rate > 0.9)
        if isinstance(decider, M.Without):   # Others decide still. (An MLP, if its attention can't.)
            assert not ran[3].all()

@pytest.mark.parametrize("residual, mod, decider", [
    ("nag", "gain:below={0}", None), ("nag", "gain:below={0}", "removed"), ("nag", "coins:rate={1}", None),
    ("pre", "router:rate={2}", None), ("pre", "router:rate={2}", "repeated"), ("nag", "all", "exit"),
    ("review", "coins:rate={1}", None), ("review", "all", "exit"), ("x0", "coins:rate={1}", None)])
def test_executed_flops(residual, mod, decider):
    """By torch's counter: what deciders compute, the gains that they ask for, and the keys and values that
    skippers make in attentions (none with a router)"""
    for rate in (0.2, 0.5, 1.0):
        config = dict(mod=mod.format(rate, 0.9 * rate, rate / 3), repeat="2:3" * (decider == "repeated"))
        model = nag(**config) if residual == "nag" else make(residual, n_layer=4, **config)
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

def test_no_runner_serves_twice():
    runner, model = M.Runner(nag()), nag()
    model(IDX, runner=runner)
    with pytest.raises(ValueError, match="one pass"):
        model(IDX, runner=runner)

# ----------------------------------------------------------------------------- paying for gain

@pytest.mark.parametrize("mod", ["all", "gain:below=0.5", "coins:rate=0.4"])
@pytest.mark.parametrize("repeat", ["", "2:3"])
def test_a_gain_is_paid_for_in_training_only(mod, repeat):
    model, found = nag(gain_cost=2.0, mod=mod, repeat=repeat).train(), []
    def free():
        return F.cross_entropy(model(IDX)[0].flatten(0, 1), TARGETS.flatten())
    for part in (lambda: loss(model), free, lambda: gains(model).mean()):
        torch.manual_seed(0)   # All toss the same coins.
        found.append(part())
    same(found[0], found[1] + 2 * found[2])
    mine, rest, his = [gradients(model, each) for each in found]
    same_gradients(mine, {name: rest[name] + 2 * his[name] for name in rest})
    for name in "alpha", "beta", "votes", "preferred", "bias":   # The cost moves all that make a gain.
        assert his[f"blocks.0.mlp_residual.{name}"].abs().max() > 1e-6
    if mod == "all":   # Who looks at a trained model hears of no cost, and nobody asks for gains.
        runner = M.Runner(model.eval())
        assert model(IDX, TARGETS, runner=runner)[1] == free() and runner.mean_gain() is None

@pytest.mark.parametrize("progress, share", [(0.2, 0.0), (0.6, 0.5), (0.95, 1.0)])
def test_a_gain_costs_nothing_early_in_a_training(progress, share):
    model = nag(gain_cost=2.0).train()
    runner = M.Runner(model, progress=progress)
    same(model(IDX, TARGETS, runner=runner)[1], runner.cross_entropy + 2 * share * runner.mean_gain())

# ----------------------------------------------------------------------------- routers, coins

def routed_by_hand(model, idx):
    """-> logits, the losses of the routers, and who runs each run of a block. Odd blocks have a router. In
    training it picks the largest weights: as many as leave a share `rate` of all runs of blocks to skip."""
    x, losses, decisions = model.wte(idx), [], []
    part = sum(number % 2 for number in model.order) / len(model.order)   # that have a router
    for number in model.order:
        block, before = model.blocks[number], x
        keep, weight = torch.ones(idx.shape, dtype=torch.bool), torch.ones(idx.shape, dtype=x.dtype)
        if number % 2 == 1:
            weight = M.unit(x) @ model.decider.routers[number // 2].weight[0]
            keep = weight > 0
            if model.training:
                rate = float(model.config.mod.split("=")[1])
                count = max(1, round((1 - rate / part) * idx.shape[1]))
                keep = weight >= weight.sort(1, descending=True).values[:, count - 1:count]
            losses.append(-(keep * weight.sigmoid().log() + ~keep * (-weight).sigmoid().log()).mean())
        decisions.append(keep)
        x = x + attention_by_hand(block.attn, block.attn_residual.norm(x), keep)
        x = x + mlp_by_hand(block.mlp, block.mlp_residual.norm(x))
        x = torch.where(keep[..., None], before + weight[..., None] * (x - before), before)
    return model.head(x), losses, torch.stack(decisions)

@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rate, T, repeat", [(0.25, 16, ""), (0.125, 16, ""), (0.45, 7, ""), (0.45, 1, ""),
                                             (0.25, 16, "2:3")])
def test_a_router_is_its_reference(rate, T, repeat, training):
    """Attention is among the kept tokens, and the block's change is multiplied by the weight. In training,
    the loss of the routers' own judgement is added. It counts each run of a block that is repeated."""
    model, idx, targets = routed(rate, repeat=repeat).train(training), IDX[:, :T], TARGETS[:, :T]
    right, losses, decisions = routed_by_hand(model, idx)
    out, ran = forward(model, idx, M.Without((), model.decider))   # sample.py wraps each decider so.
    same((out, ran), (right.detach(), decisions.repeat_interleave(2, dim=0)))
    reference = F.cross_entropy(right.flatten(0, 1), targets.flatten())
    if training:
        reference = reference + 0.01 * sum(losses) / len(losses)
    mine = model(idx, targets)[1]
    same(mine, reference, 1e-12)
    same(model(idx, targets, runner=M.Runner(model, M.Without((), model.decider)))[1], reference, 1e-12)
    his = gradients(model, reference)
    same_gradients(gradients(model, mine), his)
    assert his["decider.routers.0.weight"].any() or not training
    nobody_asks = M.Runner(model, M.Decider(None))
    same(logits(model, idx, runner=nobody_asks), logits(make(n_layer=4, repeat=repeat), idx), 1e-14)

@pytest.mark.parametrize("residual", ["pre", "nag", "x0"])
def test_coins_are_their_reference(residual):
    """One for each token and sublayer. No rescaling."""
    model, found = make(residual, mod="coins:rate=0.3").train(), []
    torch.manual_seed(0)
    _, ran = forward(model)
    decider = by_places(ran)
    same_as_masking(model, decider)
    right = gradients(model, loss(model, decider))
    net = M.ForTraining(model, checkpoints=True)   # The backward pass runs blocks again, but asks nobody again.
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(gradients(model, net(IDX, TARGETS)[1]))
    same_gradients(found[0], right)
    assert not torch.equal(found[1]["wte.weight"], found[0]["wte.weight"])
    assert not forward(model.eval())[1].all()

def test_coins_are_fair_and_independent():
    torch.manual_seed(0)
    _, ran = forward(make(mod="coins:rate=0.3", n_layer=2, n_embd=4).train(), ids(2000, 2))   # (4, B, 2)
    tokens = torch.cat(list(ran.double().unbind(2)))     # first ones, then second ones: (8, B)
    assert (tokens.mean(1) - 0.7).abs().max() < 0.04
    assert (torch.corrcoef(tokens) - torch.eye(8)).abs().max() < 0.09

# ----------------------------------------------------------------------------- removal and exit

@pytest.mark.parametrize("residual", ["pre", "nag", "attnres", "attnres:group=4", "hyper", "siamese"])
def test_removed_sublayers_do_not_run(residual):
    model, ran = make(residual, n_layer=5), []
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
        before_blocks = model.walk(IDX, M.Runner(model, by_places(inside)))[2:-1:2]
        best = torch.stack([model.head(stream).softmax(-1).amax(-1) for stream in before_blocks])
        assert torch.equal(inside[2::2], ~(best >= confidence).cumsum(0).bool())   # Nobody comes back.
        depth.append(inside.double().mean().item())
    assert depth[0] == 0.2 and depth[-1] == 1 and depth == sorted(depth) and depth[1] < depth[3]
