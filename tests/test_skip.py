"""Who runs a sublayer: thresholds, rates, routers, coins, removal, in float64. The reference: every
token runs every sublayer, and where it skips, the result is thrown away."""
from functools import partial

import pytest, torch
import torch.nn.functional as F

import model as M
from conftest import (attention_by_hand, count_flops, decode, gradients, ids, logits, make,
                      mlp_by_hand, same, same_gradients)

pytestmark = pytest.mark.usefixtures("own_residual")
IDX, TARGETS = ids(3, 16), ids(3, 16, seed=1)
RATES = [0.3, 0.5, 0.7, 0.95]   # Shut sublayers are less than 0.3 of all.

def nag(**config):
    """Gains differ a lot between tokens and sublayers. Sublayer 4 is shut, 5 turns back."""
    model = make("nag", **dict(n_layer=4) | config)
    with torch.no_grad():
        for l, residual in enumerate(model.residuals()[:-1], start=1):
            residual.preferred.mul_(3)
            residual.alpha.fill_({4: 0.0, 5: -0.7}.get(l, 0.8 + 0.05 * l))
    return model

def routed(rate=0.25, **config):
    return make("pre", **dict(mod=f"router:rate={rate}", n_layer=4) | config)

def gains(model, decider=M.Decider()):
    """|gain| of all tokens and sublayers (places, B, T, 1)"""
    def asks(trip):
        trip.gain()
        return decider(trip)
    trip = M.Trip(model, asks)
    model(IDX, trip=trip)
    return torch.stack(trip.gains).abs()

def at_rate(model, rate):
    """A threshold above a share `rate` of the dense model's gains"""
    with torch.no_grad():
        return M.ByGain(model.config, below=gains(model).quantile(rate).item()).double()

def own_function(model, rate):
    """It looks at a channel of the stream, another one in each sublayer."""
    return lambda trip: model.ends.as_tensor(trip.stream)[..., trip.place] > rate - 0.5

def of_model(model, rate):
    return model.decider

def forward(model, idx=IDX, *given, **named):
    """given, named: of a Trip -> logits, the decisions (2L, B, T)"""
    trip = M.Trip(model, *given, **named)
    return logits(model, idx, trip=trip), trip.who_ran()

def loss(model, *given, **named):
    return model(IDX, TARGETS, trip=M.Trip(model, *given, **named))[1]

def masked(model, decider=None, **named):
    """The reference of `forward`, with gradients: the same decisions, but all is computed."""
    _, decisions = forward(model, IDX, decider, **named)
    remaining = iter(decisions)

    def call(residual, stream, f, gain=None):
        ran = next(remaining)
        def choose(new, old):   # (B, T, ...)
            return torch.where(ran.view(*ran.shape, *[1] * (new.dim() - 2)), new, old)
        return M.map_stream(choose, residual(stream, f), stream)

    out, _ = model(IDX, trip=M.Trip(model, M.Decider(), call=call))
    return out, decisions

def same_as_masking(model, decider):
    """Logits, decisions, loss and the gradients of all parameters -> the decisions"""
    right, decisions = masked(model, decider)
    same(forward(model, IDX, decider), (right.detach(), decisions))
    his = gradients(model, M.cross_entropy(right, TARGETS))
    same_gradients(gradients(model, loss(model, decider)), his)
    return decisions

# ----------------------------------------------------------------------------- skipping is masking

@pytest.mark.parametrize("residual", [
    *(name for name in M.RESIDUALS if make(name, n_layer=1).ends.can_skip),
    *(f"own:form={form}" for form in ("tuple", "list", "dict", "named", "nested"))])
def test_whoever_skips_keeps_its_stream_whatever_the_residual(residual):
    """So keys are made of what f gets, and what is computed for some tokens is what is computed for
    all. Sequences have uneven numbers, and some none; nobody runs sublayer 4, and all run 5."""
    runs = torch.rand(6, 3, 16, generator=torch.Generator().manual_seed(0)) > 0.5
    runs[0, 0], runs[1, 1], runs[3], runs[4] = False, False, False, True
    found = same_as_masking(make(residual), lambda trip: runs[trip.place - 1])
    assert torch.equal(found, runs)

@pytest.mark.parametrize("config", [{}, dict(repeat="2-3:2")], ids=str)
def test_whose_gain_is_small_skips(config):
    model = nag(**config)
    for rate in RATES:
        decider = at_rate(model, rate)
        ran = same_as_masking(model, decider)
        assert torch.equal(ran, gains(model, decider)[..., 0] >= decider.threshold)

@pytest.mark.parametrize("make_model, make_decider, without", [
    (nag, at_rate, ()), (partial(nag, repeat="2:3"), at_rate, ()), (nag, at_rate, {2, 3, 7}),
    *((partial(make, name, n_layer=4), own_function, ())
      for name in ("gated", "hyper", "review", "reordered", "own:form=dict")),
    (routed, of_model, ()), (partial(routed, repeat="2:3"), of_model, ()),
    (routed, of_model, {3, 8})])
def test_cached_decoding_is_the_full_forward(make_model, make_decider, without):
    """So no decision depends on a later token."""
    for rate in RATES:
        model = make_model()
        make_trip = partial(M.Trip, model, make_decider(model, rate), without)
        full, ran = forward(model, IDX, make_decider(model, rate), without)
        same(decode(model, IDX, [1, 5, 1, 1, 4, 1, 3], make_trip), full)
        assert not ran.all() and (ran.any() or rate > 0.9)
        if without:   # Others decide still. (An MLP, if its attention can't.)
            assert not ran[3].all()

@pytest.mark.parametrize("residual, config, given", [
    ("nag", dict(mod="gain:below=0.5"), {}), ("nag", dict(mod="gain:below=1"), {}),
    ("nag", dict(mod="gain:below=0.5"), dict(without={2, 3, 8})),
    ("nag", dict(mod="coins:rate=0.4"), {}), ("review", dict(mod="coins:rate=0.4"), {}),
    ("gated", dict(mod="coins:rate=0.4"), {}), ("hyper", dict(mod="coins:rate=0.9"), {}),
    ("pre", dict(mod="router:rate=0.1"), {}), ("pre", dict(mod="router", repeat="2:3"), {}),
    ("own", dict(mod="coins:rate=0.4"), {})])
def test_executed_flops(residual, config, given):
    """By torch's counter: what deciders compute, the gains that they ask for, and the keys and
    values that skippers make in attentions (none with a router)"""
    model = nag(**config) if residual == "nag" else make(residual, n_layer=4, **config)
    trip = M.Trip(model.train(), **given)
    torch.manual_seed(0)
    counted = count_flops(lambda: logits(model, IDX, trip=trip))
    assert counted == pytest.approx(48 * M.flops_per_token(model, trip), rel=1e-6)
    torch.manual_seed(0)
    assert count_flops(lambda: loss(model, **given).backward()) <= 3 * counted
    assert 0 < trip.skipped() == pytest.approx(1 - trip.who_ran().double().mean().item())

# ----------------------------------------------------------------------------- a rate

def test_a_training_skips_the_share_that_it_is_told_and_so_does_a_text_afterwards():
    model, again = (make("nag", noise=0, n_layer=4, mod="gain:rate=0.4") for _ in range(2))
    optimizer, shares = torch.optim.AdamW(model.train().parameters(), 3e-3), []
    for step in range(120):
        trip, idx = M.Trip(model, progress=step / 120), ids(9, 16, seed=step)
        model(idx, idx.roll(-1, 1), trip=trip)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        model.decider.after_iteration([trip], lambda number: number)
        shares.append(trip.skipped())
    assert shares[0] == 0   # Nobody knows a threshold yet.
    assert abs(sum(shares[-40:]) / 40 - 0.4) < 0.02
    _, ran = forward(model.eval(), ids(32, 16, seed=999))
    assert abs(1 - ran.double().mean() - 0.4) < 0.02
    again.load_state_dict(model.state_dict())   # The threshold is one of the weights.
    same(decode(again, IDX, [1, 5, 10]), logits(model, IDX))

def test_the_threshold_is_one_whichever_process_has_which_part():
    """It is the mean over processes of the mean over the parts of a batch that each has."""
    model, trips = nag(mod="gain:rate=0.3"), []
    for idx in IDX[:2], ids(2, 16, seed=5):
        trips.append(M.Trip(model))
        model(idx, trip=trips[-1])

    def moved(trips, mean_of_all=lambda number: number):
        decider = make("nag", mod="gain:rate=0.3").decider
        decider.after_iteration(trips, mean_of_all)
        return decider.threshold.item()

    first, second = moved(trips[:1]), moved(trips[1:])
    assert first != second and moved(trips) == pytest.approx((first + second) / 2)
    assert moved(trips[:1], lambda number: number + 1) == pytest.approx(first + 1)

def test_a_mistake_of_a_decider_is_told():
    """Others of its answers: in test_trial.py"""
    attnres, pre, used = make("attnres"), make(), M.Trip(make())
    logits(pre, trip=used)
    with pytest.raises(M.Mistake, match="one pass"):
        pre(IDX, trip=used)
    with pytest.raises(M.Mistake, match=r"bool \(3, 1\)"):
        pre(IDX, trip=M.Trip(pre, lambda trip: torch.ones(3, 1, dtype=torch.bool)))
    with pytest.raises(M.Mistake, match="no token can skip"):
        M.Trip(attnres, M.Coins(attnres.config))   # It says so before anything runs.
    with pytest.raises(M.Mistake, match="AttnRes can't"):
        attnres(IDX, trip=M.Trip(attnres, lambda trip: torch.ones(3, 16, dtype=torch.bool)))
    with pytest.raises(M.Mistake, match="knows no gain"):
        pre(IDX, trip=M.Trip(pre, lambda trip: trip.gain() > 0))

# ----------------------------------------------------------------------------- paying for gain

@pytest.mark.parametrize("mod", ["all", "gain:below=0.5", "coins:rate=0.4"])
@pytest.mark.parametrize("progress, share", [(0.2, 0), (0.6, 0.5), (0.95, 1)])
def test_a_gain_is_paid_for_in_training_only(mod, progress, share):
    """All tokens pay, whether they run or skip, and all parameters that make a gain learn from it.
    Early in a training it costs nothing."""
    model, found = nag(gain_cost=2.0, mod=mod, repeat="2:3").train(), []
    for part in (lambda: loss(model, progress=progress), lambda: gains(model, model.decider).mean(),
                 lambda: M.cross_entropy(model(IDX)[0], TARGETS)):
        torch.manual_seed(0)   # All toss the same coins.
        found.append(part())
    paid, gain, free = found
    same(paid, free + 2 * share * gain)
    paid, gain, free = (gradients(model, each) for each in found)
    same_gradients(paid, {name: free[name] + 2 * share * gain[name] for name in free})
    for name in "alpha", "beta", "votes", "preferred", "bias":
        assert gain[f"blocks.0.mlp_residual.{name}"].abs().max() > 1e-6
    trip = M.Trip(model.eval(), M.Decider())
    model(IDX, TARGETS, trip=trip)
    assert trip.mean_gain() is None   # Nobody asks for gains, and so nobody pays.

# ----------------------------------------------------------------------------- routers, coins

def routed_by_hand(model, idx):
    """-> logits, the losses of the routers, and who runs each run of a block. Odd blocks, from 0,
    have a router. In training it picks the largest weights: as many as leave a share `rate` of all
    runs of blocks to skip."""
    x, losses, decisions = model.wte(idx), [], []
    part = sum(number % 2 for number in model.order) / len(model.order)   # that have a router
    for number in model.order:
        block, before = model.blocks[number], x
        keep, weight = torch.ones(idx.shape, dtype=torch.bool), torch.ones(idx.shape).double()
        if number % 2 == 1:
            weight = M.unit(x) @ model.decider.routers[number // 2].weight[0]
            keep = weight > 0
            if model.training:
                rate = float(model.config.mod.split("=")[1])
                count = max(1, round((1 - rate / part) * idx.shape[1]))
                keep = weight >= weight.sort(1, descending=True).values[:, count - 1:count]
            right = torch.where(keep, weight.sigmoid(), (-weight).sigmoid())
            losses.append(-right.log().mean())
        decisions.append(keep)
        x = x + attention_by_hand(block.attn, block.attn_residual.norm(x), keep)
        x = x + mlp_by_hand(block.mlp, block.mlp_residual.norm(x))
        x = torch.where(keep[..., None], before + weight[..., None] * (x - before), before)
    return model.head(x), losses, torch.stack(decisions)

@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rate, T, repeat", [(0.25, 16, ""), (0.45, 7, ""), (0.45, 1, ""),
                                             (0.25, 16, "2:3")])
def test_a_router_is_its_reference(rate, T, repeat, training):
    """Attention is among the kept tokens, and the block's change is multiplied by the weight. In
    training, the loss of the routers' own judgement is added."""
    model = routed(rate, repeat=repeat).train(training)
    idx, targets = IDX[:, :T], TARGETS[:, :T]
    right, losses, decisions = routed_by_hand(model, idx)
    same(forward(model, idx), (right.detach(), decisions.repeat_interleave(2, dim=0)))
    reference = M.cross_entropy(right, targets)
    if training:
        reference = reference + 0.01 * sum(losses) / len(losses)
    mine = model(idx, targets)[1]
    same(mine, reference, 1e-12)
    same_gradients(gradients(model, mine), gradients(model, reference))

def test_coins_are_fair_and_independent():
    """One for each token and sublayer, in training and after it"""
    torch.manual_seed(0)
    _, ran = forward(make(mod="coins:rate=0.3", n_layer=2, n_embd=4), ids(2000, 2))   # (4, B, 2)
    tokens = torch.cat(list(ran.double().unbind(2)))     # first ones, then second ones: (8, B)
    assert (tokens.mean(1) - 0.7).abs().max() < 0.04
    assert (torch.corrcoef(tokens) - torch.eye(8)).abs().max() < 0.09

# ----------------------------------------------------------------------------- removal

@pytest.mark.parametrize("residual", ["pre", "nag", "attnres", "attnres:group=4",
                                      "hyper:kind=lite", "siamese"])
def test_removed_sublayers_do_not_run(residual):
    model, ran = make(residual, n_layer=5), []
    for i, block in enumerate(model.blocks):
        block.attn.register_forward_hook(lambda *_, l=2 * i + 1: ran.append(l))
        block.mlp.register_forward_hook(lambda *_, l=2 * i + 2: ran.append(l))
    out, decisions = forward(model, without={3, 8})
    assert ran == [1, 2, 4, 5, 6, 7, 9, 10] == [l for l in range(1, 11) if decisions[l - 1].any()]
    same(decode(model, IDX, [5, 1, 10], partial(M.Trip, model, without={3, 8})), out)
    if not model.ends.stream_grows:   # Of a stream that grows, removed sublayers become no source.
        same(out, masked(model, without={3, 8})[0].detach(), 1e-13)

def test_a_removed_block_is_no_source_of_denseformer():
    """As if it added nothing, and nobody read it"""
    model, other = make("denseformer"), make("denseformer")
    with torch.no_grad():
        other.blocks[1].attn.c_proj.weight.zero_()
        other.blocks[1].mlp.c_proj.weight.zero_()
        other.blocks[1].mlp_residual.weights.copy_(torch.tensor([0.0, 0.0, 1.0]))
        other.blocks[2].mlp_residual.weights[2] = 0.0
    same(logits(model, trip=M.Trip(model, without={3, 4})), logits(other))
