"""Who runs a sublayer: thresholds, routers, LayerDrop, removal, early exit. Float64. The reference: every
token runs every sublayer, and the result is thrown away for those that skip."""
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
        steps = zip(model.sublayers(IDX), model.walk(IDX, decider=M.all_run))
        gains = torch.stack([residual.gain(x).abs() for (_, residual, _), (_, x, *_) in steps])
    gains = gains.flatten().sort().values
    cut = next(i for i in range(int(rate * len(gains)), len(gains)) if gains[i] - gains[i - 1] > 1e-6)
    return M.Threshold((gains[cut - 1] + gains[cut]).item() / 2)

def mask(keep, idx):
    """An answer of a decider as (B, T)"""
    return keep if isinstance(keep, torch.Tensor) else torch.full(idx.shape, keep is None)

def by_places(decisions):
    """A decider that says decisions[place - 1]"""
    return M.ByFunction(lambda place, *_: (decisions[place - 1], None))

def forward(model, idx=IDX, decider=None):
    """-> logits, the decisions (2L, B, T)"""
    keeps = []
    out = logits(model, idx, decider=decider, keeps=keeps)
    return out, torch.stack([mask(keep, idx) for keep in keeps])

def choose(keep, new, old):
    if isinstance(new, tuple):
        return tuple(choose(keep, a, b) for a, b in zip(new, old))
    return torch.where(keep.view(keep.shape + (1,) * (new.dim() - 2)), new, old)

def masked(model, decider, idx=IDX):
    """The reference of `forward`, with gradients"""
    stream, decisions = next(model.walk(idx, decider=M.all_run))[1], []
    decider.begin()
    for place, residual, f in model.sublayers(idx):
        decisions.append(mask(decider.decide(place, residual, stream)[0], idx))
        stream = choose(decisions[-1], residual(stream, f), stream)
    return model.head(stream), torch.stack(decisions)

def same_as_masking(model, decider):
    """Logits, decisions, loss and the gradients of all parameters -> the decisions"""
    right, decisions = masked(model, decider)
    same(forward(model, decider=decider), (right.detach(), decisions))
    his = gradients(model, F.cross_entropy(right.flatten(0, 1), TARGETS.flatten()))
    same_gradients(gradients(model, model(IDX, TARGETS, decider=decider)[1]), his)
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

def test_extreme_thresholds():
    model, keeps = nag(), []
    assert torch.equal(logits(model, IDX, decider=M.Threshold(-1.0)), logits(model, IDX))
    assert not same_as_masking(model, M.Threshold(9e9)).any()
    model(IDX, decider=M.Threshold(9e9, whole=[1, 2, 3, 4, 5, 7, 8]), keeps=keeps)   # of sublayer 6 alone
    assert [keep is None for keep in keeps] == [True] * 5 + [False] + [True] * 2 and not keeps[5].any()

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
            decider = M.EarlyExit(model, rate / 8)   # a token's best probability is about 0.08
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

@pytest.mark.parametrize("what", ["nag", "removed", "router", "repeated router", "layer drop", "random"])
def test_executed_flops(what):
    """By torch's counter: a token that skips an attention costs its key and value there (a router's or
    LayerDrop's costs nothing), and one that skips an MLP nothing."""
    for rate in (0.5, 0.95, 1.0):
        model, decider, keeps = nag(), None, []
        if what in ("nag", "removed"):
            decider = at_rate(model, rate) if rate < 1 else M.Threshold(9e9)
            decider = M.Without({2, 3, 8}, decider) if what == "removed" else decider
        else:
            repeat = "2:3" if "repeated" in what else ""
            model = routed(rate / 3, repeat=repeat) if "router" in what else make(layer_drop=0.9 * rate)
            model = make("nag", mod="random", mod_rate=0.9 * rate) if what == "random" else model
            model.train()
        torch.manual_seed(0)
        counted = count_flops(lambda: logits(model, IDX, decider=decider, keeps=keeps))
        right = 48 * M.flops_per_token(model, 16, ran=M.ran_shares(keeps))
        assert counted == pytest.approx(right, rel=1e-6)
        torch.manual_seed(0)
        assert count_flops(lambda: model(IDX, IDX, decider=decider)[1].backward()) <= 3 * counted
    if what == "layer drop":   # What is left is the head.
        assert M.flops_per_token(model, 16, ran=[0.0] * 6) == 2 * 16 * 64

def test_compiled_and_checkpointed_blocks_skip_alike():
    model, counter = nag(), CompileCounter()
    right = gradients(model, model(IDX, TARGETS, decider=M.Threshold(0.4))[1])
    torch._dynamo.reset()
    M.compile_blocks(model, backend=counter, fullgraph=True)
    M.checkpoint_blocks(model)
    same_gradients(gradients(model, model(IDX, TARGETS, decider=M.Threshold(0.4))[1]), right)
    assert 0 < counter.frame_count <= 4   # what all tokens run, and MLPs on kept ones

# ----------------------------------------------------------------------------- routers, LayerDrop

def routed(rate=0.25, **config):
    return make("pre", mod="router", mod_rate=rate, n_layer=4, **config)

def routed_by_hand(model, idx):
    """-> logits, the losses and the decisions of the routers, one for each run of a block that has one"""
    x, losses, decisions = model.wte(idx), [], []
    for number in model.order:
        block, before, keep = model.blocks[number], x, None
        if number % 2 == 1:
            weight = M.unit(x) @ model.decider.routers[number // 2].weight[0]
            keep = weight > 0
            if model.training:   # The largest weights of each sequence: rates of 25 and 12.5 % skip 50 and 25
                number = max(1, round((1 - 2 * model.config.mod_rate) * idx.shape[1]))
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
    loss, reference = model(idx, targets)[1], F.cross_entropy(right.flatten(0, 1), targets.flatten())
    if training:
        reference = reference + 0.01 * sum(losses) / len(losses)
        assert (ran[2::4].sum(-1) == max(1, round((1 - 2 * rate) * T))).all()
    same(loss, reference, 1e-12)
    his = gradients(model, reference)
    same_gradients(gradients(model, loss), his)
    assert (his["decider.routers.0.weight"].abs().max() > 1e-8) == (training or decisions[0].any().item())

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
    same(logits(model, decider=M.all_run), logits(make(n_layer=4)), 1e-14)   # Nobody has asked the routers.
    for n_layer in 2, 3, 5:   # The wanted share skips at any depth.
        model = make(mod="router", mod_rate=0.25, n_layer=n_layer, block_size=96).train()
        _, ran = forward(model, ids(2, 96))
        assert 1 - ran.double().mean() == pytest.approx(0.25, abs=0.01)

@pytest.mark.parametrize("residual", ["pre", "nag", "x0"])
def test_random_skips_are_their_reference(residual):
    """A coin for each token and each sublayer, in training and after it, whatever the tokens are."""
    model = make(residual, mod="random", mod_rate=0.3)
    for training in True, False:
        model.train(training)
        torch.manual_seed(0)
        out, ran = forward(model, IDX)
        same(out, logits(model, IDX, decider=by_places(ran)))
        same_as_masking(model, by_places(ran))
        torch.manual_seed(0)
        assert torch.equal(forward(model, (IDX + 1) % 64)[1], ran)
        assert ran.double().mean() == pytest.approx(0.7, abs=0.06)
        assert ran.double().mean((1, 2)).std() < 0.15 and ran.double().mean((0, 1)).std() < 0.3

@pytest.mark.parametrize("residual", ["pre", "nag", "x0"])
def test_layer_drop_is_its_reference(residual):
    """Whole sequences, a coin for each of them and each sublayer, and no rescaling. In training only."""
    model, found = make(residual, layer_drop=0.5), []
    assert torch.equal(logits(model), logits(make(residual)))
    torch.manual_seed(0)
    _, ran = forward(model.train())
    assert (ran == ran[:, :, :1]).all()
    same_as_masking(model, by_places(ran))
    right = gradients(model, model(IDX, TARGETS, decider=by_places(ran))[1])
    M.checkpoint_blocks(model)   # The backward pass runs blocks again, but nobody is asked again.
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(gradients(model, model(IDX, TARGETS)[1]))
    same_gradients(found[0], right)
    assert not torch.equal(found[1]["wte.weight"], found[0]["wte.weight"])

def test_layer_drop_coins_are_fair_and_independent():
    torch.manual_seed(0)
    _, ran = forward(make(layer_drop=0.3, n_layer=2, n_embd=4).train(), ids(4000, 1))
    coins = ran[..., 0].double()   # (2L, B)
    assert (coins.mean(1) - 0.7).abs().max() < 0.03
    assert (torch.corrcoef(coins) - torch.eye(4)).abs().max() < 0.06

# ----------------------------------------------------------------------------- removal and exit

@pytest.mark.parametrize("residual", ["pre", "nag", "attnres", "attnres:group=4", "hyper", "siamese"])
def test_removed_sublayers_do_not_run(residual):
    model, ran, decider = make(residual, n_layer=5), [], M.Without({3, 8})
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
    same(logits(model, decider=M.Without({3, 4})), logits(other))

@pytest.mark.parametrize("residual", ["pre", "nag"])
def test_early_exit(residual):
    """A token leaves before the first block at which the head is sure, and keeps the stream it has there."""
    model, depth = make(residual, n_layer=5), []
    for confidence in (0.0, 0.05, 0.1, 0.3, 1.1):
        out, inside = forward(model, decider=M.EarlyExit(model, confidence))
        assert torch.equal(inside[::2], inside[1::2]) and inside[0].all()
        same(out, masked(model, by_places(inside))[0].detach())
        walk = list(model.walk(IDX, decider=by_places(inside)))[2::2]
        best = torch.stack([model.head(before).softmax(-1).amax(-1) for _, before, _, _ in walk])
        assert torch.equal(inside[2::2], ~(best >= confidence).cumsum(0).bool())   # Nobody comes back.
        depth.append(inside.double().mean().item())
    assert depth[0] == 0.2 and depth[-1] == 1 and depth == sorted(depth) and depth[1] < depth[3]

# ----------------------------------------------------------------------------- who sets the thresholds

def test_training_reaches_the_wanted_share():
    """By before_step and after_step alone. At first, and during a warm-up, nothing is skipped."""
    model = make("nag:warmup=0.2", noise=0, dtype=torch.float32, mod_rate=0.4).train()
    optimizer, skipped, steps = torch.optim.Adam(model.parameters(), 3e-3), [], 140
    for step in range(steps):
        model.before_step((step + 1) / steps)
        assert (model.decider.threshold > 0) == (step + 1 > 0.25 * steps)   # 5 % of the training + warm-up
        text, keeps = ids(2, 17, seed=step), []
        model(text[:, :-1], text[:, 1:], keeps=keeps)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        model.after_step(M.ran_shares(keeps))
        skipped.append(1 - sum(M.ran_shares(keeps)) / len(keeps))
    assert not any(skipped[:35]) and sum(skipped[-40:]) / 40 == pytest.approx(0.4, abs=0.04)
    fresh = make("nag:warmup=0.2", noise=0, dtype=torch.float32, mod_rate=0.4, seed=7)
    fresh.load_state_dict(model.state_dict())   # A resumed run and a sample skip alike.
    for training in (True, False):
        (out, ran), (out2, ran2) = forward(model.train(training)), forward(fresh.train(training))
        assert torch.equal(out, out2) and torch.equal(ran, ran2) and 0.2 < 1 - ran.double().mean() < 0.6
    assert torch.equal(fresh.decider.steps, model.decider.steps) and model.decider.steps == 105

def run_by_all(model):
    """Of each sublayer, whether nobody decided who runs it"""
    keeps = []
    model(IDX, keeps=keeps)
    return [keep is None for keep in keeps]

def test_attentions_that_few_tokens_would_skip_run_whole():
    model, tried = make("nag", mod_rate=0.3, n_layer=2), []
    model.before_step(0.5)
    model.after_step([0.9, 0.9, 0.6, 0.4])
    assert run_by_all(model) == run_by_all(model.train()) == [True, False, False, False]
    before = model.decider.threshold.item()
    model.after_step([1.0, 0.5, 0.3, 0.2])   # More skip than wanted.
    assert 0.5 * before < model.decider.threshold < before and run_by_all(model)[0]
    for step in range(3, 25):   # From time to time, training tries all of them again. Nobody else does.
        model.after_step([1.0, 0.9, 0.5, 0.4])
        assert run_by_all(model.eval()) == [True, False, False, False]
        if run_by_all(model.train()) == [False] * 4:
            tried.append(step)
    assert tried == [10, 20]

@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
def test_calibrate(rate):
    model, batches = nag(shut=0.9, block_size=32), list(ids(6, 32).split(3))
    decider = M.calibrate(model, batches, rate)
    ran = torch.cat([forward(model, idx, decider)[1] for idx in batches], dim=1)
    skipped = 1 - ran.double().mean((1, 2))
    assert decider.whole <= {1, 3, 5, 7} and skipped.mean() == pytest.approx(rate, abs=0.01)
    # An attention runs whole unless about a quarter of the tokens skip it.
    assert all(share == 0 or share > 0.2 for share in skipped[::2])

@pytest.mark.parametrize("residual, can", [("pre", "exit remove"), ("nag", "skip exit remove"),
                                           ("hyper", "remove"), ("router", "remove")])
def test_a_model_says_what_it_can_not(residual, can):
    model = routed() if residual == "router" else make(residual)
    for what in ("skip", "exit", "remove"):
        sentence = M.why_not(model, what)
        assert sentence is None if what in can else residual in sentence and "use a run" in sentence
