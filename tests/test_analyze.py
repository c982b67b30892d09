"""The statistics against what they must be for models that we can see through, the page, the command line. Tests of
the steps text are in test_inside.py."""
import itertools, json, os, re, shutil, subprocess, sys
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest, torch
import torch.nn.functional as F

import analyze, train
import model as M
from analyze import ALL_RUN, Pass
from conftest import ROOT, ids, make, refused, same
from model import ByGain, Trip

L = 4   # blocks

def run_of(residual="pre", windows=None, text="", **config):
    """Of twelve windows"""
    model = make(residual, n_layer=L, vocab_size=320, **config)
    settings = dict(batch_size=4, block_size=16, tokenizer="bytes", residual=residual, data="data", warmup=0.5)
    return analyze.Run(model, settings, windows or (ids(12, 12, V=256), ids(12, 12, V=256, seed=1)), text=text)

def quarter_loss(run, first=0, **trip):
    """On every fourth window, the mean per token"""
    idx, targets = (torch.cat(part)[first::4] for part in zip(*run.batches))
    return run.model(idx, targets, trip=Trip(run.model, **trip))[1].item()

def increase(run, places):   # by how much the loss rises without them
    return pytest.approx(quarter_loss(run, without=places) - quarter_loss(run), abs=1e-9)

def rms(x):
    return x.square().mean(-1).sqrt()

def degrees_between(x, y):
    return F.cosine_similarity(x, y, dim=-1).clamp(max=1).acos().rad2deg()

# ---------------------------------------------------------------------------------- who reads whom

class Chain(M.Residual):
    """Each reads what the one before has written, alone."""
    def forward(self, x, f):
        return f(self.norm(x))

class SecondLast(M.Residual):
    """Each reads the writer before the last. Its stream is a tuple; in those below, a list or a dict."""
    pack, unpack = staticmethod(lambda new, old: (new, old)), staticmethod(tuple)
    def start(self, x):
        return self.pack(x, x.clone())
    def forward(self, stream, f):
        new, old = self.unpack(stream)
        return self.pack(f(self.norm(old)), new)

class Listed(SecondLast):
    pack = staticmethod(lambda *parts: [*parts])

class InADict(SecondLast):
    pack = staticmethod(lambda new, old: dict(new=new, old=old))
    unpack = staticmethod(lambda stream: stream.values())

OWN = dict(chain=Chain, tuple=SecondLast, list=Listed, dict=InADict)

@pytest.fixture(autouse=True)
def own_classes(monkeypatch):
    for name, residual in OWN.items():
        monkeypatch.setitem(M.RESIDUALS, name, residual)
    with torch.no_grad():
        yield

def effects_of(residual, idx=None, **config):
    found = Pass(make(residual, **config), ids() if idx is None else idx)
    return found, found.effects()

def test_reads_of_rules_that_we_can_see_through():
    _, effects = effects_of("chain")
    assert torch.equal(effects.isnan(), torch.ones(7, 7).triu(1).bool())   # Nobody reads what comes later.
    same(effects.tril().nan_to_num(0), torch.eye(7).double())
    assert "the next reader loses 100% of what it reads in the first half" in analyze.reads(run_of("chain"))[1]
    for form in "tuple", "list", "dict":
        _, effects = effects_of(form)
        wanted = torch.zeros(7, 7).double()
        for reader, writer in enumerate([0, 0, 1, 2, 3, 4, 6]):   # The head reads the newest one.
            wanted[reader, writer] = 1
        same(effects.nan_to_num(0), wanted)

def test_without_a_norm_it_is_the_length_of_the_update():
    found, effects = effects_of("pre", norm="none", repeat="2:2")
    assert "alike to 100%." in analyze.reads(run_of("pre", norm="none"))[1]
    written = [found.embedding, *found.updates]
    for reader, writer in itertools.product(range(9), range(9)):
        if writer <= reader:
            share = written[writer].norm(dim=-1) / found.reads[reader].norm(dim=-1)
            same(effects[reader, writer].item(), share.mean().item())
    found = Pass(found.model, ids(), without={3})   # Nobody reads what nobody has written.
    assert found.effects()[3:, 3].max() == 0 and torch.equal(found.streams[2], found.streams[3])

def test_what_attention_residuals_read_is_the_weighted_mean():
    model = make("attnres:group=2")
    found = Pass(model, ids())
    sources = [found.embedding]
    for place, raw in enumerate(found.raws, 1):
        if place > 1:
            units = torch.stack([F.rms_norm(source, [16], eps=1e-6) for source in sources])
            weights = (units * model.ends.key_weight[place - 2] @ model.ends.query[place - 2]).softmax(0)
            same(raw, (weights[..., None] * torch.stack(sources)).sum(0), 1e-8)
        if place < 7:
            grows = place % 2 == 0   # Two updates make a source.
            sources[-grows or len(sources):] = [found.updates[place - 1] + (sources[-1] if grows else 0)]
            same(model.ends.running_sum(found.streams[place]), sources[-1])

RULES = [*M.RESIDUALS, "attnres:group=2", "mixln:alpha=0.5", "hyper:kind=mhc", "hyper:kind=lite"]
SKIPPING = [("pre", "coins:rate=0.4"), ("gated", "coins:rate=0.4"), ("nag", "gain:below=0.3"),
            ("pre", "router:rate=0.3"), ("dict", "coins:rate=0.4"), ("tuple", "coins:rate=0.4")]

@pytest.mark.parametrize("residual, mod", [*zip(RULES, itertools.repeat("all")), *SKIPPING])
def test_a_pass_notes_what_happens(residual, mod):
    """The rules, run again with the updates that it has noted, come to the same streams. What is noted of the head
    gives the logits."""
    model = make(residual, n_layer=4, mod=mod)
    torch.manual_seed(0)
    found = Pass(model, ids())
    torch.manual_seed(0)
    logits, _ = model(ids())
    same(model.lm_head.times(found.reads[-1], model.ends.head_weight(model.lm_head.weight)), logits)
    assert found.ran.all() == (mod == "all") and found.ran.any()
    assert all((update[~ran] == 0).all() for update, ran in zip(found.updates, found.ran))
    if "router" in mod:   # It changes the stream, too.
        return
    for place, (before, after) in enumerate(zip(found.streams, found.streams[1:])):
        _, _, new = analyze.run_rule(found.residuals[place], before, found.updates[place])
        M.map_stream(same, analyze.where_ran(found.ran[place], new, before), after)
    assert found.effects().tril().nan_to_num(9).max() < 9   # All can be compared.

def test_angles():
    model = make("nag", mod="gain:below=0.3")
    found = Pass(model, ids())
    gains = torch.stack([r.gain(stream)[..., 0] for r, stream in zip(found.residuals[:-1], found.streams)])
    same(found.degrees(), gains.abs().atan().rad2deg() * found.ran, 1e-6)
    found = Pass(make(), ids())
    x = torch.stack(found.streams)
    same(found.degrees(), degrees_between(x[1:], x[:-1]), 1e-6)
    tiny = analyze.angles(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1e-10]))
    same(tiny.item(), np.rad2deg(1e-10))   # Its cosine is 1 in floating point.

# ---------------------------------------------------------------------------------- any text

def test_magnitudes_by_hand():
    run = run_of("attnres:group=4")
    found = Pass(run.model, torch.cat([idx for idx, _ in run.quarter]))
    panels, sentence = analyze.magnitudes(run)
    assert panels["what is read (rms)"]["both"] == pytest.approx([rms(x).mean().item() for x in found.raws[:-1]])
    sizes = [rms(x).mean().item() for x in found.updates]
    assert [size for _, size in panels["update (rms)"]["MLP"]] == pytest.approx(sizes[1::2])
    sums = [sum(found.updates[place // 4 * 4:place + 1]) for place in range(8)]   # a saw-tooth
    assert panels["sum of updates (rms)"]["both"] == pytest.approx([rms(x).mean().item() for x in sums])
    assert sentence.endswith("The sum of updates falls 1 times by more than a fifth.") and len(panels) == 4

def test_sinks_against_attention():
    run = run_of()
    idx = torch.cat([idx for idx, _ in run.quarter])
    attn, x = run.model.blocks[0].attn, Pass(run.model, idx).reads[0]
    q, k, _ = attn.c_attn(x).chunk(3, dim=-1)
    q, k = attn.turned(q, run.model.rotation[:12]), attn.turned(k, run.model.rotation[:12])
    scores = torch.einsum("bqhc,bkhc->bhqk", q, k) * 128 ** 0.5 / 8   # heads of 8
    weights = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf).softmax(-1)
    panels, _ = analyze.sinks(run)
    [_, share], *_ = panels["attention to the first token"]["measured"]
    assert share == pytest.approx(weights[:, :, 6:, 0].mean().item())
    raw = run.model.wte(idx)
    largest = (raw.abs().amax(-1) / rms(raw)).mean().item()
    assert panels["largest channel / rms"]["measured"][0] == pytest.approx(largest)

def test_rounding_and_back():
    run = run_of()
    before = {name: p.clone() for name, p in run.model.named_parameters()}
    rises = dict(analyze.rounding(run)[0][""]["rounded"])
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())
    for name, p in run.model.named_parameters():
        if p.dim() == 2:   # three bits: seven values
            p.copy_(torch.stack([(row / row.abs().max() * 3).round() / 3 * row.abs().max() for row in p]))
    assert rises[3] == pytest.approx(quarter_loss(run) - run.quarter_loss, abs=1e-9) != 0

def test_curves_by_hand(tmp_path):
    logged = [dict(step=2, flops=20.0, seconds=1.0), dict(step=4, flops=60.0, seconds=3.0),
              dict(step=0, val_loss=9.0), dict(step=3, val_loss=2.0), dict(step=4, val_loss=1.5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, logged)))
    run = run_of()
    with pytest.raises(analyze.NotHere, match="no evaluation"):
        analyze.curves(run)
    run.log = dict(sorted(train.read_metrics(tmp_path).items()))
    panels, sentence = analyze.curves(run)
    assert [panel["validation"] for panel in panels.values()] == [
        [(3, 2.0), (4, 1.5)], [(40, 2.0), (60, 1.5)], [(2, 2.0), (3, 1.5)]]
    assert sentence == "1.500 nats after 4 iterations and 3 seconds."

@pytest.mark.parametrize("residual", ["pre", "nag", "attnres", "hyper", "dict"])
def test_there_is_one_loss(residual):
    run = run_of(residual)
    lens, = analyze.logit_lens(run)[0][""].values()
    removed, sentence = analyze.removal(run)
    of_blocks = removed["without the block"]["block"]
    assert lens[-1] == pytest.approx(run.loss, rel=1e-5) and len(lens) == L + 1
    assert removed["without one sublayer"]["MLP"][1] == increase(run, {4})
    assert of_blocks[2] == increase(run, {5, 6})
    assert sentence.startswith(f"Block {np.argmax(of_blocks) + 1} is worth most, {max(of_blocks):.2f} nats, and block")
    run = run_of(repeat="2-3:2")   # blocks 1, 2, 3, 2, 3, 4: a block is removed wherever it runs.
    assert run.worth[1] == increase(run, {3, 4, 7, 8})
    assert analyze.removal(run)[0]["without one sublayer"]["MLP"][1] == increase(run, {4, 8})

def log_gradients(run, *norms):
    """At the iterations 2, 4, 6, ..; half of them are the warmup."""
    run.log = {2 * n: dict(grad_norms=each) for n, each in enumerate(norms, 1)}

@pytest.mark.parametrize("flags, ways", [
    (dict(), [4, 3, 2, 1]), (dict(repeat="2:2"), [5, 4 + 3, 2, 1]), (dict(deep_supervision=True), [10, 6, 3, 1]),
    (dict(deep_supervision=True, repeat="2:2"), [15, 10 + 6, 3, 1])])
def test_fan_in_is_linear_or_quadratic(flags, ways):
    run = run_of(**flags)
    with pytest.raises(analyze.NotHere, match="no gradient norms"):
        analyze.fan_in(run)
    log_gradients(run, [9, 9, 9, 9.0], [4, 1, 1, 5.0], [4, 1, 3, 1.0])   # The first one is of the warmup.
    panels, _ = analyze.fan_in(run)
    assert panels[""]["as the fan-in"] == pytest.approx(np.array(ways) / np.mean(ways))
    assert panels[""]["measured"] == pytest.approx(np.array([4, 1, 2, 3]) / 2.5)   # The blocks are alike.

def test_gradients_and_ranks():
    assert analyze.rank_correlation([4, 1, 2, 3], [4, 3, 2, 1]) == pytest.approx(1 - 6 * 8 / 60)   # by Spearman
    assert analyze.rank_correlation([1, 1, 2, 3], [9, 9, 4, 0]) == pytest.approx(-1)   # Equal ones share a rank.
    assert analyze.rank_correlation([1, 1, 1], [1, 2, 3]) == 0
    run = run_of(taper="linear")
    log_gradients(run, [sum(p.numel() for p in block.parameters()) ** 0.5 for block in run.model.blocks])
    assert analyze.gradients_of(run) == pytest.approx(1)   # Of wide blocks, gradients are larger.
    del run.model.blocks[1:]
    with pytest.raises(analyze.NotHere, match="several blocks"):
        analyze.fan_in(run)

def test_which_blocks_go_first():
    run = run_of(repeat="2:2")   # blocks 1, 2, 2, 3, 4
    log_gradients(run, [1, 2, 3, 4.0], [4, 1, 1, 4.0], [4, 1, 3, 2.0])
    lines, sentence = analyze.pruning(run)
    places = [{1, 2}, {3, 4, 5, 6}, {7, 8}, {9, 10}]
    x = Pass(run.model, torch.cat([idx for idx, _ in run.other_quarter])).raws[::2]
    moved = [1 - F.cosine_similarity(*pair, dim=-1).mean().item() for pair in zip(x, x[1:])]
    moved = [moved[0], moved[1] + moved[2], *moved[3:]]
    orders = {"CascadeFlow": [1, 2, 3, 0], "usual score": np.argsort(moved), "least worth": np.argsort(run.worth),
              "last first": [3, 2, 1, 0]}
    for name, order in orders.items():
        for n, rise in enumerate(lines[""][name]):
            assert rise == increase(run, set().union(*(places[block] for block in order[:n])))
    # The halves of the log, behind its warmup: 4 1 1 4 and 4 1 3 2
    assert sentence.endswith(f"stable to {analyze.rank_correlation([4, 1, 1, 4], [4, 1, 3, 2]):.2f}.")

# ---------------------------------------------------------------------------------- who skips

def test_coins_fall_the_same_whatever_else_is_measured():
    alone, after_others = run_of(mod="coins:rate=0.5"), run_of(mod="coins:rate=0.5")
    assert after_others.worth and analyze.reads(after_others)
    assert analyze.removal(alone) == analyze.removal(after_others)
    run = run_of("nag", windows=(ids(64, 12, V=256), ids(64, 12, V=256, seed=1)))
    ran = torch.linspace(0, 1, 2 * L)
    torch.testing.assert_close(run.share_that_ran(analyze.coins(ran)).float(), ran, atol=0.1, rtol=0)

@pytest.mark.parametrize("residual", ["nag", "pre"])
def test_depth_map(residual):
    """The angle of each token in each sublayer, and nan if it skips. (With pre, nobody does.)"""
    run, idx = run_of(residual, text="a\té$x$\n" + 50 * "x"), torch.tensor([[*b"a\t\xc3\xa9$x$\n" + 8 * b"x"]])
    found, _ = analyze.depth_map(run)
    assert found["columns"] == ["a", r"\t", "�", "�", "$", "x", "$", "↵"] + 8 * ["x"]   # é has two bytes.
    passed = Pass(run.model, idx, ByGain(run.model.config, below=0.05) if residual == "nag" else ALL_RUN)
    torch.testing.assert_close(found[""], passed.degrees()[:, 0].where(passed.ran[:, 0], torch.nan), equal_nan=True)
    run.text = ""
    assert len(analyze.depth_map(run)[0]["columns"]) == 12   # a validation window

@pytest.mark.parametrize("residual", ["nag", "pre", "attnres"])
def test_no_nested_set_is_better_than_the_fixed_one(residual):
    """Of each size, by the loss on the windows where it is chosen"""
    run = run_of(residual)
    run.model.lm_head.weight.mul_(5)   # It is surer, so a loss changes more.
    places, sets = range(1, 2 * L + 1), analyze.fixed_sets(run, 2 * L - 1)
    @lru_cache
    def loss(removed):
        return quarter_loss(run, first=2, decider=ALL_RUN, without=removed)
    turned = Pass(run.model, torch.cat([idx for idx, _ in run.other_quarter])).degrees().mean((1, 2)).tolist()
    alone = [loss(frozenset([place])) for place in places]
    orders = [sorted(places, key=lambda place: score[place - 1]) for score in (turned, alone)]
    greedy = frozenset()
    for n, found in enumerate(sets, 1):
        greedy = min((greedy | {place} for place in places if place not in greedy), key=loss)
        nested = [greedy] + [frozenset(order[:n]) for order in orders]
        assert len(found) == n and loss(found) <= min(map(loss, nested)) + 1e-12

def test_what_skipping_costs():
    run = run_of("nag", windows=(ids(64, 12, V=256), ids(64, 12, V=256, seed=1)))
    run.model.blocks[1].mlp_residual.alpha.fill_(-0.6)   # These gains are negative. Their size counts.
    run.model.blocks[2].attn_residual.alpha.fill_(0.16)   # These are about 0.1.
    panels, sentence = analyze.skip_curve(run)
    by_gain, fixed, coins = panels["rise of the loss"].values()
    found = Pass(run.model, run.other_quarter[0][0])
    gains = torch.stack([r.gain(stream).abs() for r, stream in zip(found.residuals[:-1], found.streams)])
    for share, point in zip((0.1, 0.25, 0.4, 0.5), by_gain[1:]):
        trip = Trip(run.model, ByGain(run.model.config, below=gains.quantile(share).item()))
        run.model(torch.cat([idx for idx, _ in run.quarter]), trip=trip)
        rise = quarter_loss(run, decider=trip.decider) - quarter_loss(run, decider=ALL_RUN)
        assert point == pytest.approx([100 * trip.skipped(), rise], abs=1e-5)
    assert [x for x, _ in fixed] == [100 * n / (2 * L) for n in range(len(fixed))] and fixed[-1][0] >= by_gain[-1][0] > 40
    assert fixed[3][1] == increase(run, analyze.fixed_sets(run, 3)[2])
    assert [share for share, _ in coins] == [share for share, _ in by_gain] and coins[3] != by_gain[3]
    assert by_gain[0] == coins[0] == fixed[0] == [0.0, pytest.approx(0)]
    assert f"if 25 % of the sublayer runs are skipped: {np.interp(25, *zip(*by_gain)):.2f} (by gain), " in sentence

def test_a_model_trained_to_skip_skips_in_every_statistic():
    run = run_of("nag", mod="gain:below=99")
    assert analyze.magnitudes(run)[0]["what is read turns by (degrees)"]["both"] == pytest.approx([0] * 2 * L)
    assert analyze.depth_map(run)[0][""].isnan().all() and (analyze.who_skips(run)[0][""]["measured"] == 1).all()
    lines, = analyze.skip_curve(run)[0].values()
    assert lines["as trained"] == [pytest.approx([100, 0])]

# ---------------------------------------------------------------------------------- all of them, and yours

def shown(run, *names):
    """-> {name: what the page shows of it}"""
    run.warning = ""
    about = analyze.about_runs({"a": run})
    return {name: analyze.show(name, {"a": run}, about) for name in names or analyze.STATS}

PUZZLES = "right_digits lines_inside patched gain_by_steps skips_by_steps".split()
WITHOUT_SKIPPING = ["who_skips", *PUZZLES]
@pytest.mark.parametrize("residual, flags, lacks", [
    ("pre", {}, WITHOUT_SKIPPING), ("nag", dict(mod="gain:rate=0.25"), PUZZLES), ("gated", {}, WITHOUT_SKIPPING),
    ("attnres:group=3", dict(deep_supervision=True), WITHOUT_SKIPPING),
    ("siamese", dict(taper="cosine"), WITHOUT_SKIPPING),
    ("pre", dict(mod="router:rate=0.25"), ["reads", "sinks", "skip_curve", *PUZZLES]),
    ("hyper", dict(mod="coins:rate=0.3"), PUZZLES), ("pre", dict(repeat="2-3:2", norm="none"), WITHOUT_SKIPPING),
    *[(form, dict(mod="coins:rate=0.3"), PUZZLES) for form in ("tuple", "list", "dict")]])
def test_every_statistic_runs_or_refuses_in_a_sentence(residual, flags, lacks, monkeypatch):
    """Drawn is that of nag alone, because drawing takes long."""
    if residual != "nag":
        monkeypatch.setattr(analyze, "as_picture", lambda *_: {})
    run = run_of(residual, **flags)
    log_gradients(run, [1, 2, 3, 4.0], [4, 1, 1, 4.0])
    run.log[4] |= dict(val_loss=1.0, flops=2.0)
    for name, found in shown(run).items():
        if name in lacks:
            assert re.fullmatch("[^\n]{20,120}", found["missing"]["a"]) and not found["results"]
            assert "ended with" not in found["missing"]["a"]
        else:
            assert not found["missing"] and len(found["pictures"]) == 2, (name, found["missing"])
            assert re.fullmatch(r"[A-Z0-9+-][^\n]{15,400}\.", found["sentences"]["a"]), found["sentences"]

def test_mistakes_in_a_statistic_of_your_own(monkeypatch):
    """Each is told, and the others have their figure."""
    monkeypatch.setattr(analyze, "STATS", {})
    def add(name, function, **options):
        def measure(run):
            return function(run)
        measure.__name__ = name
        analyze.stat(f"The {name}", **options)(measure)

    heat = dict(draw="heat")
    right = {"x": ({}, lambda run: {"a panel": {"lacks": torch.tensor([torch.nan, 1]), "empty": []}}),
             "numpy": ({}, lambda run: ({"loss": {"x": np.array(run.worth)}}, f"{np.mean(run.worth):.2f}")),
             "heat": (heat, lambda run: {"a": [[1, 2]], "b": [[3, None]]})}
    wrong = {"divides": ({}, lambda run: {"": {"x": [each / 0 for each in run.worth]}}, "ended with ZeroDivisionError"),
             "forgets": ({}, lambda run: None, "can't be drawn"),
             "x_and_y": ({}, lambda run: (list(range(4)), run.worth), "lines are {panel: {name: line}}"),
             "no_matrix": (heat, lambda run: {"": [[1, 2], [3]]}, "can't be drawn"),
             "a_set": ({}, lambda run: {"a panel": {"line": {1, 2}}}, "'set' object"),
             "leaves": ({}, lambda run: sys.exit("bye"), "SystemExit")}
    for name, (options, function, *_) in (right | wrong).items():
        add(name, function, **options)
    found = shown(run_of())
    for name in right:
        assert len(found[name]["pictures"]) == 2 and found[name]["caption"] == f"The {name}"
    assert found["x"]["results"]["a"]["a panel"] == dict(lacks=[None, 1], empty=[])
    for name, (_, _, sentence) in wrong.items():
        assert sentence in found[name]["missing"]["a"], name
        assert not found[name]["pictures"] and not found[name]["results"] and "\n" not in found[name]["missing"]["a"]

# ---------------------------------------------------------------------------------- the page

@pytest.fixture(scope="module")
def made(data, tmp_path_factory):
    """Two runs, their data, and their page. (The odd names are no formulas, and no tags.)"""
    folder = tmp_path_factory.mktemp("analyze")
    shutil.copytree(data, folder / "data")
    flags = ("--n_layer 2 --n_embd 16 --n_head 2 --block_size 32 --batch_size 4 --max_iters 6 --log_interval 2 "
             "--device cpu").split()
    for name, residual in (("a$x^$b", "nag"), ("_<b>", "review")):
        train.main(["--data", f"{folder}/data", "--out", f"{folder}/{name}", "--residual", residual, *flags])
    analyze.main([f"{folder}/a$x^$b", f"{folder}/_<b>", "--out", f"{folder}/out", "--text", "</script>&amp;é"])
    return folder

def report_of(folder):
    """What its page shows, and its numbers.json"""
    page = (folder / "index.html").read_text()
    assert not re.search("https?://", page) and page.count("</script>") == 2
    report = re.search(r'id="report">(.*?)</script>', page, re.S)[1]
    assert "<" not in report   # No text ends a script.
    return json.loads(report), json.loads((folder / "numbers.json").read_text())

def test_page(made):
    report, numbers = report_of(made / "out")
    assert list(report["statistics"]) == list(analyze.STATS)
    run, logged = numbers["runs"]["a$x^$b"], train.read_metrics(made / "a$x^$b")[6]
    assert [run["loss"], run["bits"]] == pytest.approx([logged["val_loss"], logged["val_bpb"]], abs=1e-6)
    assert run["data"].endswith("/data") and run["iterations"] == 6 and run["warning"] == ""
    for name, found in report["statistics"].items():
        assert found["caption"] and found["title"] and found["results"] == numbers["statistics"][name]
        assert len(found["results"]) + len(found["missing"]) == 2 and {*found["sentences"]} == {*found["results"]}
        assert bool(found["pictures"]) == (made / f"out/{name}.png").exists() == bool(found["results"]), name
    assert "knows no gain" in numbers["missing"]["who_skips"]["_<b>"]

def test_what_others_have_made_stays(made, tmp_path):
    words = [f"{made}/a$x^$b", "--only", "logit_lens, logit_lens", "--out", str(tmp_path)]
    for name in "index.html", "logit_lens.png":
        (tmp_path / name).write_text("mine")
        assert "no page of ours" in refused(analyze.main, words)
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert "File exists" in refused(analyze.main, words[:-1] + [str(tmp_path / name)])
        (tmp_path / name).unlink()
    analyze.main(words)
    analyze.main(words)   # This page is ours.

def test_data_that_moved_or_changed(made, tmp_path, capsys):
    run, moved = str(made / "_<b>"), made / "moved"
    os.rename(made / "data", moved)
    words = [run, "--only", "logit_lens", "--out", str(tmp_path / "out")]
    try:
        assert f"{run}: was trained on {made}/data" in refused(analyze.main, words)
        analyze.main([*words, "--data", str(moved)])
        assert report_of(tmp_path / "out")[0]["runs"]["_<b>"]["warning"] == ""
        shard = next(moved.glob("val*.bin"))
        shutil.copy(shard, made / "shard")
        shard.write_bytes(shard.read_bytes()[:-2] + b"\0\0")   # another last token
        capsys.readouterr()
        analyze.main([*words, "--data", str(moved)])
        warning = report_of(tmp_path / "out")[0]["runs"]["_<b>"]["warning"]
        assert "moved" in warning and warning in capsys.readouterr().err
        shutil.copy(made / "shard", shard)
    finally:
        os.rename(moved, made / "data")

def test_runs_can_be_told_apart():
    shared = dict(model=run_of().model, log={}, loss=1.0, bits=1.0, warning="")
    runs = {str(i): SimpleNamespace(config=dict(data=os.path.abspath(f"x{i}/data")), **shared) for i in range(28)}
    about = analyze.about_runs(runs).values()
    assert len({each["color"] for each in about}) == 28 and [*about][1]["data"] == "x1/data"

def test_what_figures_show():
    """A number stands where its colour is, and points are where they should be."""
    axes, *_ = analyze.draw_heat({"run": {"": [[0, 1], [2, 3]]}}, {"run": "r"}, 2).axes
    places = [axes.transData.transform(text.get_position()) for text in axes.texts]
    seen = [axes.images[0].get_cursor_data(SimpleNamespace(x=x, y=y)) for x, y in places]
    assert seen == [float(text.get_text()) for text in axes.texts] == [0, 1, 2, 3]
    panel = {"line": [5, 6], "points": [[0, 7], [2, 8]]}
    axes, *_ = analyze.draw_lines({"run": {"a panel": panel}}, {"run": "r"}, 3).axes
    line, points = (np.transpose(each.get_data()).tolist() for each in axes.lines[:2])
    assert (line, points) == ([[1, 5], [2, 6]], [[0, 7], [2, 8]]) and axes.get_ylim()[0] == 0
    third = {"third": [3]}   # With a third line, each run has a panel.
    figure = analyze.draw_lines({"a": {"y": panel | third}, "b": {"y": {"line": [50, 60]}}}, dict(a="r", b="b"), 3)
    first, second = figure.axes
    assert first.get_ylim() == second.get_ylim() and second.lines[0].get_color() == "b"   # one scale
    assert first.get_ylim()[0] == 0 and first.get_ylim()[1] > 60

def test_a_notebook_and_its_matplotlibrc(tmp_path):
    """Its figures stay, and what it says of colours or TeX changes none of ours."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nfigure.facecolor: black\n")
    code = """import os, matplotlib, sys
import analyze
analyze.main(["--list"])
analyze.as_picture(analyze.STATS["logit_lens"], {"a$": {"": {"line": [1, 2]}}}, {"a$": "r"}, 1)
assert "matplotlib.pyplot" not in sys.modules
assert matplotlib.get_backend() == os.environ["MPLBACKEND"] == "svg" and matplotlib.rcParams["text.usetex"]
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True,
                          env=os.environ | dict(MPLBACKEND="svg", MATPLOTLIBRC=str(tmp_path)))
    assert done.stdout.count("\n") == len(analyze.STATS)

def test_bad_input(made, tmp_path):
    run, text = str(made / "a$x^$b"), tmp_path / "text"
    text.write_text("precious $text$")
    for words in ([run, "--only", "remuval"], [run, "--windows", "-1"], [str(tmp_path)], [run, "--out", str(text)],
                  [run, str(tmp_path / "nowhere")]):
        out = [] if "--out" in words else ["--out", str(tmp_path / "a/figures")]
        assert words[-1] in refused(analyze.main, words + out)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]   # What is refused leaves nothing.
    analyze.main([run, "--only", "depth_map,skip_curve", "--text", str(text), "--out", str(tmp_path / "new")])
    new, old = (report_of(folder)[1]["statistics"] for folder in (tmp_path / "new", made / "out"))
    assert "".join(new["depth_map"]["a$x^$b"]["columns"]) == text.read_text() == "precious $text$"
    assert new["skip_curve"]["a$x^$b"] == old["skip_curve"]["a$x^$b"]   # It tosses the same coins.
    both = [str(shutil.copytree(run, tmp_path / name / "run")) for name in ("a", "b")]
    opened = analyze.open_runs(analyze.AnalyzeConfig(both, windows=1))
    assert list(opened) == both   # Their folders have the same name.
    assert [sum(len(idx) for idx, _ in each.batches) for each in opened.values()] == [4, 4]
    ckpt = torch.load(f"{both[0]}/ckpt.pt")
    ckpt["model"]["lm_head.weight"][0, 0] = torch.nan
    torch.save(ckpt, f"{both[0]}/ckpt.pt")
    assert "its loss is nan" in refused(analyze.main, [both[0], "--out", str(tmp_path / "new")])
