"""Who runs a sublayer: thresholds, rates, routers, coins, removal, deciders of one's own. Float64. The reference:
every token runs every sublayer, and the result is thrown away for those that skip."""
from collections import namedtuple
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

def gains(model, decider=None):
    """|gain| of all tokens and sublayers (places, B, T, 1); decider: if not all run"""
    def asks(trip):
        trip.gain()
        return decider(trip) if decider else True
    trip = M.Trip(model, asks)
    model(IDX, trip=trip)
    return torch.stack(trip.gains).abs()

def at_rate(model, rate):
    """A threshold above a share `rate` of the dense model's gains, between two of them"""
    with torch.no_grad():
        return M.ByGain(model.config, below=gains(model).quantile(rate).item()).double()

class EarlyExit(M.Decider):
    """README's example: before each block but the first, a token exits if the head is sure of its successor."""
    needs_skipping = True

    def __init__(self, confidence):
        super().__init__(None)
        self.confidence = confidence

    def forward(self, trip):
        inside = trip.notes.get("inside", torch.ones(trip.shape, dtype=torch.bool))
        if trip.place > 1 and trip.place % 2 == 1:
            sure = trip.model.head(trip.stream).softmax(-1).amax(-1) >= self.confidence
            trip.decider_flops += 2 * trip.model.lm_head.weight.numel()
            inside = inside & ~sure
        trip.notes["inside"] = inside
        return inside

def forward(model, idx=IDX, *given, **named):
    """given, named: of a Trip -> logits, the decisions (2L, B, T)"""
    trip = M.Trip(model, *given, **named)
    out = logits(model, idx, trip=trip)
    return out, trip.who_ran()

def loss(model, *given, **named):
    return model(IDX, TARGETS, trip=M.Trip(model, *given, **named))[1]

def choose(keep, new, old):
    return M.map_stream(lambda a, b: torch.where(keep.view(keep.shape + (1,) * (a.dim() - 2)), a, b), new, old)

def masked(model, decider, **named):
    """The reference of `forward`, with gradients: the decisions are the same, and all is computed."""
    _, decisions = forward(model, IDX, decider, **named)
    place = iter(decisions)
    def call(residual, stream, f, gain=None):
        return choose(next(place), residual(stream, f), stream)
    out, _ = model(IDX, trip=M.Trip(model, M.Decider(None), call=call))
    return out, decisions

def same_as_masking(model, decider):
    """Logits, decisions, loss and the gradients of all parameters -> the decisions"""
    right, decisions = masked(model, decider)
    same(forward(model, IDX, decider), (right.detach(), decisions))
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

@pytest.mark.parametrize("residual", [name for name in M.RESIDUALS if make(name, n_layer=1).ends.can_skip])
def test_whoever_skips_keeps_its_stream_whatever_the_residual(residual):
    """Logits and gradients are those of the rule for all tokens, and a choice after it. So keys are made of what f
    gets, and what is computed for some tokens only is what is computed for all."""
    runs = torch.rand(6, 3, 16, generator=torch.Generator().manual_seed(0)) > 0.5
    runs[3], runs[4] = False, True
    model = make(residual)
    assert torch.equal(same_as_masking(model, lambda trip: runs[trip.place - 1]), runs)

def routed(rate=0.25, **config):
    return make("pre", **(dict(mod=f"router:rate={rate}", n_layer=4) | config))

def own_function(model, rate):
    return lambda trip: model.ends.as_tensor(trip.stream)[..., trip.place] > rate - 0.5

def of_model(model, rate):
    return model.decider

@pytest.mark.parametrize("make_model, make_decider, without", [
    (nag, at_rate, ()), (partial(nag, repeat="2:3"), at_rate, ()), (nag, at_rate, {2, 3, 7}),
    (partial(make, n_layer=4), lambda model, rate: EarlyExit(rate / 8), ()),   # A token's best is about 0.08.
    *((partial(make, name, n_layer=4), own_function, ()) for name in ("gated", "hyper", "review", "reordered")),
    (routed, of_model, ()), (partial(routed, repeat="2:3"), of_model, ()), (routed, of_model, {3, 8})])
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

@pytest.mark.parametrize("residual, mod, other", [
    ("nag", "gain:below={0}", None), ("nag", "gain:below={0}", "removed"), ("nag", "coins:rate={1}", None),
    ("pre", "router:rate={2}", None), ("pre", "router:rate={2}", "repeated"), ("nag", "all", "exit"),
    ("review", "coins:rate={1}", None), ("review", "all", "exit"), ("gated", "coins:rate={1}", None),
    ("hyper", "coins:rate={1}", None)])
def test_executed_flops(residual, mod, other):
    """By torch's counter: what deciders compute, the gains that they ask for, and the keys and values that
    skippers make in attentions (none with a router)"""
    for rate in (0.2, 0.5, 1.0):
        config = dict(mod=mod.format(rate, 0.9 * rate, rate / 3), repeat="2:3" * (other == "repeated"))
        model = nag(**config) if residual == "nag" else make(residual, n_layer=4, **config)
        given = dict(decider=EarlyExit(rate / 8)) if other == "exit" else {}
        given |= dict(without={2, 3, 8}) if other == "removed" else {}
        model.train(other != "exit")
        trip = M.Trip(model, **given)
        torch.manual_seed(0)
        counted = count_flops(lambda: logits(model, IDX, trip=trip))
        assert counted == pytest.approx(48 * M.flops_per_token(model, trip), rel=1e-6)
        torch.manual_seed(0)
        assert count_flops(lambda: loss(model, **given).backward()) <= 3 * counted
        torch.manual_seed(0)
        assert trip.skipped() == pytest.approx(1 - forward(model, IDX, **given)[1].double().mean().item())

# ----------------------------------------------------------------------------- a rate

def trained(steps, parts=1, mod="gain:rate=0.3"):
    """-> a NAG after some iterations, and the share that each of them has skipped"""
    model, shares = make("nag", noise=0, n_layer=4, mod=mod).train(), []
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(steps):
        trips = []
        for part in range(parts):
            trips.append(M.needed_trip(model, step / steps))
            idx = ids(9, 16, seed=step)[part::parts]
            model(idx, idx.roll(-1, 1), trip=trips[-1])[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        model.decider.after_iteration(trips, lambda number: number)
        shares.append(sum(trip.skipped() for trip in trips) / parts)
    return model.eval(), shares

@pytest.mark.parametrize("rate", [0.2, 0.5])
def test_a_training_skips_the_share_that_it_is_told_and_so_does_a_text_afterwards(rate):
    model, shares = trained(120, mod=f"gain:rate={rate}")
    assert shares[0] == 0   # Nobody knows a threshold yet.
    assert abs(sum(shares[-40:]) / 40 - rate) < 0.02
    _, ran = forward(model, ids(32, 16, seed=999))
    assert abs(1 - ran.double().mean() - rate) < 0.02
    again = make("nag", noise=0, n_layer=4, mod=f"gain:rate={rate}")
    again.load_state_dict(model.state_dict())   # The threshold is one of the weights.
    same(decode(again, IDX, [1, 5, 10]), logits(model, IDX))

def test_the_threshold_is_one_whichever_process_has_which_part():
    """Two processes have a part each, and the mean of what they find: as one process that takes two parts."""
    model, parts = nag(mod="gain:rate=0.3"), []
    for idx in IDX[:2], ids(2, 16, seed=5):
        parts.append(M.Trip(model))
        model(idx, trip=parts[-1])
    def moved(trips, others=()):
        decider = make("nag", mod="gain:rate=0.3").decider
        mine = []
        for each in (trips, others):
            if each:
                decider.after_iteration(each, lambda number: mine.append(number) or number)
        decider = make("nag", mod="gain:rate=0.3").decider
        decider.after_iteration(trips, lambda number: sum(mine) / len(mine))
        return decider.threshold
    assert torch.equal(moved(parts), moved(parts[:1], parts[1:])) and moved(parts) > 0

def test_a_mistake_of_a_decider_is_told():
    model, used = nag(), M.Trip(nag())
    model(IDX, trip=used)
    for words, make_trip in (
            ("one pass", lambda: used), ("return missing", lambda: M.Trip(model, lambda trip: None)),
            (r"float64 \(3, 16\)", lambda: M.Trip(model, lambda trip: trip.stream[0][..., 0])),
            (r"bool \(3, 1\)", lambda: M.Trip(model, lambda trip: torch.ones(3, 1, dtype=torch.bool)))):
        with pytest.raises(M.Mistake, match=words):
            model(IDX, trip=make_trip())
    attnres, pre = make("attnres"), make()
    with pytest.raises(M.Mistake, match="no token can skip"):
        M.Trip(attnres, M.Coins(attnres.config))   # It says so before anything runs.
    with pytest.raises(M.Mistake, match="AttnRes can't"):
        attnres(IDX, trip=M.Trip(attnres, lambda trip: torch.ones(trip.shape, dtype=torch.bool)))
    with pytest.raises(M.Mistake, match="knows no gain"):
        pre(IDX, trip=M.Trip(pre, lambda trip: trip.gain() > 0))

Pair = namedtuple("Pair", "x v")

@pytest.mark.parametrize("form", [lambda x, v: (x, v), lambda x, v: [x, v], Pair, lambda x, v: {"x": x, "v": v},
                                  lambda x, v: (x, {"deep": [v]})], ids=["tuple", "list", "named", "dict", "nested"])
def test_streams_of_all_forms_can_skip(form, monkeypatch):
    class Formed(M.Residual):
        def start(self, x):
            return form(x, torch.zeros_like(x))
        def forward(self, stream, f):
            parts = []
            M.map_stream(parts.append, stream)
            v = 0.5 * parts[1] + f(self.norm(2 * parts[0] + parts[1]))   # not the norm of the first part
            return form(parts[0] + v, v)
    monkeypatch.setitem(M.RESIDUALS, "formed", Formed)
    model = make("formed")
    same_as_masking(model, own_function(model, 0.5))
    same(decode(model, IDX, [5, 1, 10], lambda: M.Trip(model, own_function(model, 0.5))),
         forward(model, IDX, own_function(model, 0.5))[0])

# ----------------------------------------------------------------------------- paying for gain

@pytest.mark.parametrize("mod", ["all", "gain:below=0.5", "coins:rate=0.4"])
@pytest.mark.parametrize("repeat", ["", "2:3"])
def test_a_gain_is_paid_for_in_training_only(mod, repeat):
    model, found = nag(gain_cost=2.0, mod=mod, repeat=repeat).train(), []
    def free():
        return M.cross_entropy(model(IDX)[0], TARGETS)
    for part in (lambda: loss(model), free, lambda: gains(model, model.decider).mean()):
        torch.manual_seed(0)   # All toss the same coins.
        found.append(part())
    same(found[0], found[1] + 2 * found[2])
    mine, rest, his = [gradients(model, each) for each in found]
    same_gradients(mine, {name: rest[name] + 2 * his[name] for name in rest})
    for name in "alpha", "beta", "votes", "preferred", "bias":   # The cost moves all that make a gain.
        assert his[f"blocks.0.mlp_residual.{name}"].abs().max() > 1e-6
    if mod == "all":   # Who looks at a trained model hears of no cost, and nobody asks for gains.
        trip = M.Trip(model.eval())
        assert model(IDX, TARGETS, trip=trip)[1] == free() and trip.mean_gain() is None

@pytest.mark.parametrize("progress, share", [(0.2, 0.0), (0.6, 0.5), (0.95, 1.0)])
def test_a_gain_costs_nothing_early_in_a_training(progress, share):
    model = nag(gain_cost=2.0).train()
    trip = M.Trip(model, progress=progress)
    same(model(IDX, TARGETS, trip=trip)[1], trip.cross_entropy + 2 * share * trip.mean_gain())

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
    out, ran = forward(model, idx)
    same((out, ran), (right.detach(), decisions.repeat_interleave(2, dim=0)))
    reference = F.cross_entropy(right.flatten(0, 1), targets.flatten())
    if training:
        reference = reference + 0.01 * sum(losses) / len(losses)
    mine = model(idx, targets)[1]
    same(mine, reference, 1e-12)
    his = gradients(model, reference)
    same_gradients(gradients(model, mine), his)
    assert his["decider.routers.0.weight"].any() or not training
    nobody_asks = M.Trip(model, M.Decider(None))
    same(logits(model, idx, trip=nobody_asks), logits(make(n_layer=4, repeat=repeat), idx), 1e-14)

@pytest.mark.parametrize("residual", ["pre", "nag", "gated"])
def test_coins_are_their_reference(residual):
    """One for each token and sublayer. No rescaling."""
    model, found = make(residual, mod="coins:rate=0.3").train(), []
    torch.manual_seed(0)
    _, ran = forward(model)
    decider = lambda trip: ran[trip.place - 1]
    same_as_masking(model, decider)
    right = gradients(model, loss(model, decider))
    net = M.for_training(model, checkpoints=True)   # The backward pass runs sublayers again, but asks nobody.
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

@pytest.mark.parametrize("residual", ["pre", "nag", "attnres", "attnres:group=4", "hyper:kind=lite", "siamese"])
def test_removed_sublayers_do_not_run(residual):
    model, ran = make(residual, n_layer=5), []
    without = {3, 8}
    for i, block in enumerate(model.blocks):
        block.attn.register_forward_hook(lambda *_, l=2 * i + 1: ran.append(l))
        block.mlp.register_forward_hook(lambda *_, l=2 * i + 2: ran.append(l))
    out, decisions = forward(model, without=without)
    assert ran == [1, 2, 4, 5, 6, 7, 9, 10] == [l for l in range(1, 11) if decisions[l - 1].any()]
    same(decode(model, IDX, [5, 1, 10], lambda: M.Trip(model, without=without)), out)
    if not model.ends.stream_grows:   # Of a stream that grows, removed sublayers become no source.
        same(out, masked(model, None, without=without)[0].detach(), 1e-13)

def test_a_removed_block_is_no_source_of_denseformer():
    """As if it added nothing, and nobody read it"""
    model, other = make("denseformer"), make("denseformer")
    with torch.no_grad():
        other.blocks[1].attn.c_proj.weight.zero_()
        other.blocks[1].mlp.c_proj.weight.zero_()
        other.blocks[1].mlp_residual.weights.copy_(torch.tensor([0.0, 0.0, 1.0]))
        other.blocks[2].mlp_residual.weights[2] = 0.0
    same(logits(model, trip=M.Trip(model, without={3, 4})), logits(other))

@pytest.mark.parametrize("residual", ["pre", "nag"])
def test_early_exit(residual):
    """A token leaves before the first block at which the head is sure, and keeps the stream it has there."""
    model, depth = make(residual, n_layer=5), []
    for confidence in (0.0, 0.05, 0.1, 0.3, 1.1):
        out, inside = forward(model, IDX, EarlyExit(confidence))
        def as_decided(trip):
            return inside[trip.place - 1]
        assert torch.equal(inside[::2], inside[1::2]) and inside[0].all()
        same(out, masked(model, as_decided)[0].detach())
        before_blocks = model.walk(IDX, M.Trip(model, as_decided))[2:-1:2]
        best = torch.stack([model.head(stream).softmax(-1).amax(-1) for stream in before_blocks])
        assert torch.equal(inside[2::2], ~(best >= confidence).cumsum(0).bool())   # Nobody comes back.
        depth.append(inside.double().mean().item())
    assert depth[0] == 0.2 and depth[-1] == 1 and depth == sorted(depth) and depth[1] < depth[3]
