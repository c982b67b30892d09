"""The statistics against what they must be for models that we can see through, the page, the
command line. Statistics of the steps text are in test_inside.py."""
import itertools, json, os, re, shutil, subprocess, sys
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest, torch
import torch.nn.functional as F

import analyze, train
import model as M
from analyze import ALL_RUN, Pass
from conftest import ROOT, ids, joined, make, refused, same
from model import ByGain, Trip

pytestmark = pytest.mark.usefixtures("own_residual", "no_grad")
L = 4   # blocks

def run_of(residual="pre", n=12, text="", **config):
    """A Run of n windows"""
    model = make(residual, n_layer=L, vocab_size=320, **config)
    settings = dict(tokenizer="bytes", residual=residual, data="data", warmup=0.5)
    windows = ids(n, 12, V=256), ids(n, 12, V=256, seed=1)
    return analyze.Run(model, settings, windows, text=text)

def quarter_loss(run, first=0, **trip):
    """On every fourth window, the mean per token"""
    idx, targets = joined(run.batches)
    return run.model(idx[first::4], targets[first::4], trip=Trip(run.model, **trip))[1].item()

def increase(run, places):
    """By how much the loss rises without them"""
    return pytest.approx(quarter_loss(run, without=places) - quarter_loss(run), abs=1e-9)

def rms(x):
    return x.square().mean(-1).sqrt()

# ---------------------------------------------------------------------------------- who reads whom

class Chain(M.Residual):
    """Each reads what the one before has written, alone."""
    def forward(self, x, f):
        return f(self.norm(x))

class SecondLast(M.Residual):
    """Each reads the writer before the last."""
    def start(self, x):
        return x, x.clone()

    def forward(self, stream, f):
        new, old = stream
        return f(self.norm(old)), new

def test_reads_of_rules_that_we_can_see_through(monkeypatch):
    monkeypatch.setitem(M.RESIDUALS, "chain", Chain)
    monkeypatch.setitem(M.RESIDUALS, "second", SecondLast)
    effects = Pass(make("chain"), ids()).effects()
    assert torch.equal(effects.isnan(), torch.ones(7, 7).triu(1).bool())   # of what comes later
    same(effects.tril().nan_to_num(0), torch.eye(7).double())
    sentence = analyze.reads(run_of("chain"))[1]
    assert "the next reader loses 100% of what it reads in the first half" in sentence
    effects = Pass(make("second"), ids()).effects()
    writers = torch.tensor([0, 0, 1, 2, 3, 4, 6])   # The head reads the newest one.
    same(effects.nan_to_num(0), F.one_hot(writers, 7).double())

def test_without_a_norm_a_read_is_a_sum_of_updates():
    found = Pass(make("pre", norm="none", repeat="2:2"), ids())
    effects, written = found.effects(), [found.embedding, *found.updates]
    for reader, read in enumerate(found.reads):
        for writer in range(reader + 1):
            share = written[writer].norm(dim=-1) / read.norm(dim=-1)
            same(effects[reader, writer], share.mean())
    found = Pass(found.model, ids(), without={3})   # Nobody reads what nobody has written.
    assert found.effects()[3:, 3].max() == 0 and torch.equal(found.streams[2], found.streams[3])
    assert "alike to 100%." in analyze.reads(run_of("pre", norm="none"))[1]

def test_without_queries_attention_residuals_read_the_mean():
    found = Pass(make("attnres", noise=0), ids())
    sources = torch.stack([found.embedding, *found.updates])
    for place, raw in enumerate(found.raws, start=1):
        same(raw, sources[:place].mean(0))

@pytest.mark.parametrize("residual, mod", [
    *((name, "all") for name in (*M.RESIDUALS, "attnres:group=2", "hyper:kind=mhc")),
    ("nag", "gain:below=0.3"), ("pre", "router:rate=0.3"),
    *((name, "coins:rate=0.4") for name in ("pre", "gated", "own:form=dict", "own:form=nested"))])
def test_a_pass_notes_what_happens(residual, mod):
    """The rules, run again with the updates that it has noted, come to the same streams. What is
    noted of the head gives the logits."""
    model = make(residual, n_layer=4, mod=mod)
    torch.manual_seed(0)
    found = Pass(model, ids())
    torch.manual_seed(0)
    logits, _ = model(ids())
    weight = model.ends.head_weight(model.lm_head.weight)
    same(model.lm_head.times(found.reads[-1], weight), logits)
    assert found.ran.all() == (mod == "all") and found.ran.any()
    assert all((update[~ran] == 0).all() for update, ran in zip(found.updates, found.ran))
    if "router" in mod:   # It changes the stream, too.
        return
    for place, (before, after) in enumerate(itertools.pairwise(found.streams)):
        _, _, new = analyze.run_rule(found.residuals[place], before, found.updates[place])
        M.map_stream(same, analyze.where_ran(found.ran[place], new, before), after)
    assert found.effects().tril().nan_to_num(9).max() < 9   # All can be compared.

def test_the_statistic_that_a_comment_shows(monkeypatch):
    """... can be copied, and measures what it says."""
    [code] = re.findall(r"to copy to part 4:\n#\n((?:# .+\n)+)", (ROOT / "analyze.py").read_text())
    monkeypatch.setattr(analyze, "STATS", dict(analyze.STATS))
    exec(code.replace("#     ", ""), vars(analyze).copy())
    run = run_of()
    panels, sentence = analyze.STATS["lengths"].measure(run)
    streams = run.model.walk(joined(run.quarter)[0])[1:]
    assert torch.allclose(panels[""]["measured"], torch.stack([rms(stream).mean() for stream in streams]))
    assert re.fullmatch(r"It grows \d+\.\d-fold\.", sentence)

def test_angles():
    found = Pass(make("nag", mod="gain:below=0.3"), ids())
    pairs = zip(found.residuals[:-1], found.streams)
    gains = torch.stack([residual.gain(stream)[..., 0] for residual, stream in pairs])
    same(found.degrees(), gains.abs().atan().rad2deg() * found.ran, 1e-6)
    tiny = analyze.angles(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1e-10]))
    same(tiny.item(), np.rad2deg(1e-10))   # Its cosine is 1 in floating point.

# ---------------------------------------------------------------------------------- any text

def test_magnitudes_by_hand():
    run = run_of("attnres:group=4")
    found = Pass(run.model, joined(run.quarter)[0])
    panels, sentence = analyze.magnitudes(run)

    def sizes(tensors):
        return pytest.approx([rms(x).mean().item() for x in tensors])

    assert panels["what is read (rms)"]["both"] == sizes(found.raws[:-1])
    assert [size for _, size in panels["update (rms)"]["MLP"]] == sizes(found.updates[1::2])
    sums = [sum(found.updates[place // 4 * 4:place + 1]) for place in range(8)]
    assert panels["sum of updates (rms)"]["both"] == sizes(sums)   # a saw-tooth
    assert sentence.endswith("The sum of updates falls 1 times by more than a fifth.")

def test_sinks_against_attention():
    run = run_of()
    idx, _ = joined(run.quarter)
    attn, x = run.model.blocks[0].attn, Pass(run.model, idx).reads[0]
    q, k, _ = attn.c_attn(x).chunk(3, dim=-1)
    q, k = (attn.turned(each, run.model.rotation[:12]) for each in (q, k))
    scores = torch.einsum("bqhc,bkhc->bhqk", q, k) * 128 ** 0.5 / 8   # heads of 8
    weights = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf).softmax(-1)
    panels, _ = analyze.sinks(run)
    [_, share], *_ = panels["attention to the first token"]["measured"]
    assert share == pytest.approx(weights[:, :, 6:, 0].mean().item())
    x = run.model.wte(idx)
    largest, *_ = panels["largest channel / rms"]["measured"]
    assert largest == pytest.approx((x.abs().amax(-1) / rms(x)).mean().item())

def test_rounding_and_back():
    run = run_of()
    before = [p.clone() for p in run.model.parameters()]
    rises = dict(analyze.rounding(run)[0][""]["rounded"])
    assert all(map(torch.equal, run.model.parameters(), before))
    for p in run.model.parameters():
        if p.dim() == 2:   # three bits: seven values
            largest = p.abs().amax(1, keepdim=True)
            p.copy_((p / largest * 3).round() / 3 * largest)
    assert rises[3] == pytest.approx(quarter_loss(run) - run.quarter_loss, abs=1e-9) != 0

def test_curves_by_hand():
    run = run_of()
    with pytest.raises(analyze.NotHere, match="no evaluation"):
        analyze.curves(run)
    run.log = {0: dict(val_loss=9.0), 2: dict(flops=20.0, seconds=1.0), 3: dict(val_loss=2.0),
               4: dict(flops=60.0, seconds=3.0, val_loss=1.5)}
    panels, sentence = analyze.curves(run)
    assert [panel["validation"] for panel in panels.values()] == [
        [(3, 2.0), (4, 1.5)], [(40, 2.0), (60, 1.5)], [(2, 2.0), (3, 1.5)]]
    assert sentence == "1.500 nats after 4 iterations and 3 seconds."

@pytest.mark.parametrize("residual", ["pre", "nag", "attnres", "own:form=dict"])
def test_there_is_one_loss(residual):
    run = run_of(residual)
    [lens] = analyze.logit_lens(run)[0][""].values()
    panels, sentence = analyze.removal(run)
    assert lens[-1] == pytest.approx(run.loss, rel=1e-5) and len(lens) == L + 1
    assert panels["without one sublayer"]["MLP"][1] == increase(run, {4})
    of_blocks = panels["without the block"]["block"]
    assert of_blocks[2] == increase(run, {5, 6})
    assert sentence.startswith(f"Block {1 + np.argmax(of_blocks)} is worth most")

def test_a_repeated_block_is_removed_wherever_it_runs():
    run = run_of(repeat="2-3:2")   # blocks 1, 2, 3, 2, 3, 4
    assert run.worth[1] == increase(run, {3, 4, 7, 8})
    assert analyze.removal(run)[0]["without one sublayer"]["MLP"][1] == increase(run, {4, 8})

def log_gradients(run, *norms):
    """At the iterations 2, 4, 6, ..; half of them are the warmup."""
    run.log = {2 * n: dict(grad_norms=each) for n, each in enumerate(norms, 1)}

@pytest.mark.parametrize("flags, ways", [
    (dict(), [4, 3, 2, 1]), (dict(repeat="2:2"), [5, 4 + 3, 2, 1]),
    (dict(deep_supervision=True), [10, 6, 3, 1]),
    (dict(deep_supervision=True, repeat="2:2"), [15, 10 + 6, 3, 1])])
def test_fan_in_is_linear_or_quadratic(flags, ways):
    run = run_of(**flags)
    with pytest.raises(analyze.NotHere, match="no gradient norms"):
        analyze.fan_in(run)
    log_gradients(run, [9, 9, 9, 9.0], [4, 1, 1, 5.0], [4, 1, 3, 1.0])
    lines = analyze.fan_in(run)[0][""]
    assert lines["as the fan-in"] == pytest.approx(np.array(ways) / np.mean(ways))
    assert lines["measured"] == pytest.approx(np.array([4, 1, 2, 3]) / 2.5)   # without the warmup

def test_gradients_and_ranks():
    ranks = analyze.rank_correlation
    assert ranks([4, 1, 2, 3], [4, 3, 2, 1]) == pytest.approx(1 - 6 * 8 / 60)   # by Spearman
    assert ranks([1, 1, 2, 3], [9, 9, 4, 0]) == pytest.approx(-1)   # Equal ones share a rank.
    assert ranks([1, 1, 1], [1, 2, 3]) == 0
    run = run_of(taper="linear")
    log_gradients(run, [M.num_params(block) ** 0.5 for block in run.model.blocks])
    assert analyze.gradients_of(run) == pytest.approx(1)   # Of wide blocks, gradients are larger.
    del run.model.blocks[1:]
    with pytest.raises(analyze.NotHere, match="several blocks"):
        analyze.fan_in(run)

def test_which_blocks_go_first():
    run = run_of(repeat="2:2")   # blocks 1, 2, 2, 3, 4
    log_gradients(run, [1, 2, 3, 4.0], [4, 1, 1, 4.0], [4, 1, 3, 2.0])
    lines, sentence = analyze.pruning(run)
    x = Pass(run.model, joined(run.other_quarter)[0]).raws[::2]
    moved = [1 - F.cosine_similarity(*pair, dim=-1).mean().item() for pair in itertools.pairwise(x)]
    moved = [moved[0], moved[1] + moved[2], *moved[3:]]
    orders = {"CascadeFlow": [1, 2, 3, 0], "usual score": np.argsort(moved),
              "least worth": np.argsort(run.worth), "last first": [3, 2, 1, 0]}
    places = [{1, 2}, {3, 4, 5, 6}, {7, 8}, {9, 10}]
    for name, order in orders.items():
        for n, rise in enumerate(lines[""][name]):
            assert rise == increase(run, set().union(*(places[block] for block in order[:n])))
    stable = analyze.rank_correlation([4, 1, 1, 4], [4, 1, 3, 2])   # the log's halves
    assert sentence.endswith(f"stable to {stable:.2f}.")

# ---------------------------------------------------------------------------------- who skips

def test_coins_fall_the_same_whatever_else_is_measured():
    alone, after_others = run_of(mod="coins:rate=0.5"), run_of(mod="coins:rate=0.5")
    assert after_others.worth and analyze.reads(after_others)
    assert analyze.removal(alone) == analyze.removal(after_others)
    run, ran = run_of("nag", n=64), torch.linspace(0, 1, 2 * L)
    same(run.share_that_ran(analyze.coins(ran)).float(), ran, 0.1)

@pytest.mark.parametrize("residual", ["nag", "pre"])
def test_depth_map(residual):
    """The angle of each token in each sublayer, and nan if it skips. (With pre, nobody does.)"""
    run = run_of(residual, text="a\té$x$\n" + 50 * "x")
    found, _ = analyze.depth_map(run)
    wanted = ["a", r"\t", "�", "�", "$", "x", "$", "↵"] + 8 * ["x"]   # é has two bytes.
    assert found["columns"] == wanted
    decider = ByGain(run.model.config, below=0.05) if residual == "nag" else ALL_RUN
    passed = Pass(run.model, torch.tensor([[*run.text.encode()[:16]]]), decider)
    right = passed.degrees().where(passed.ran, torch.nan)[:, 0]
    torch.testing.assert_close(found[""], right, equal_nan=True)
    run.text = ""
    assert len(analyze.depth_map(run)[0]["columns"]) == 12   # a validation window

@pytest.mark.parametrize("residual", ["nag", "pre", "attnres"])
def test_no_nested_set_is_better_than_the_fixed_one(residual):
    """Of each size, by the loss on the windows where it is chosen"""
    run = run_of(residual)
    run.model.lm_head.weight.mul_(5)   # It is surer, so a loss changes more.
    @lru_cache
    def loss(removed):
        return quarter_loss(run, first=2, decider=ALL_RUN, without=removed)
    places = range(1, 2 * L + 1)
    turned = Pass(run.model, joined(run.other_quarter)[0]).degrees().mean((1, 2)).tolist()
    alone = [loss(frozenset([place])) for place in places]
    orders = [sorted(places, key=lambda place: score[place - 1]) for score in (turned, alone)]
    greedy = frozenset()
    for n, found in enumerate(analyze.fixed_sets(run, 2 * L - 1), 1):
        greedy = min((greedy | {place} for place in places if place not in greedy), key=loss)
        nested = [greedy, *(frozenset(order[:n]) for order in orders)]
        assert len(found) == n and loss(found) <= min(map(loss, nested)) + 1e-12

def test_what_skipping_costs():
    run = run_of("nag", n=64)
    run.model.blocks[1].mlp_residual.alpha.fill_(-0.6)   # Negative gains: their size counts.
    run.model.blocks[2].attn_residual.alpha.fill_(0.16)   # These are about 0.1.
    panels, sentence = analyze.skip_curve(run)
    by_gain, fixed, coins = panels["rise of the loss"].values()
    found = Pass(run.model, run.other_quarter[0][0])
    gains = torch.stack([residual.gain(stream).abs()
                         for residual, stream in zip(found.residuals[:-1], found.streams)])
    for share, point in zip((0.1, 0.25, 0.4, 0.5), by_gain[1:]):
        trip = Trip(run.model, ByGain(run.model.config, below=gains.quantile(share).item()))
        run.model(joined(run.quarter)[0], trip=trip)
        rise = quarter_loss(run, decider=trip.decider) - quarter_loss(run)
        assert point == pytest.approx([100 * trip.skipped(), rise], abs=1e-5)
    assert [x for x, _ in coins] == [x for x, _ in by_gain] and coins[3] != by_gain[3]
    assert [x for x, _ in fixed] == [100 * n / (2 * L) for n in range(len(fixed))]
    assert fixed[-1][0] >= by_gain[-1][0] > 40
    assert fixed[3][1] == increase(run, analyze.fixed_sets(run, 3)[2])
    assert by_gain[0] == coins[0] == fixed[0] == [0.0, pytest.approx(0)]
    assert f"are skipped: {np.interp(25, *zip(*by_gain)):.2f} (by gain), " in sentence

def test_a_model_trained_to_skip_skips_in_every_statistic():
    run = run_of("nag", mod="gain:below=99")
    turns = analyze.magnitudes(run)[0]["what is read turns by (degrees)"]["both"]
    assert turns == pytest.approx([0] * 2 * L)
    assert analyze.depth_map(run)[0][""].isnan().all()
    assert (analyze.who_skips(run)[0][""]["measured"] == 1).all()
    [lines] = analyze.skip_curve(run)[0].values()
    assert lines["as trained"] == [pytest.approx([100, 0])]

# ---------------------------------------------------------------------------------- all, and yours

def shown(run):
    """-> {name: what the page shows of it}"""
    run.warning = ""
    about = analyze.about_runs({"a": run})
    return {name: analyze.show(name, {"a": run}, about) for name in analyze.STATS}

PUZZLES = "right_digits lines_inside patched gain_by_steps skips_by_steps".split()

@pytest.mark.parametrize("residual, flags, lacks", [
    ("pre", {}, ["who_skips"]), ("gated", {}, ["who_skips"]),
    ("pre", dict(repeat="2-3:2", norm="none"), ["who_skips"]),
    ("attnres:group=3", dict(deep_supervision=True), ["who_skips"]),
    ("siamese", dict(taper="cosine"), ["who_skips"]), ("nag", dict(mod="gain:rate=0.25"), []),
    ("pre", dict(mod="router:rate=0.25"), ["reads", "sinks", "skip_curve"]),
    ("hyper", dict(mod="coins"), []), ("own:form=dict", dict(mod="coins"), [])])
def test_every_statistic_runs_or_refuses_in_a_sentence(residual, flags, lacks, monkeypatch):
    """Drawn is that of nag alone, because drawing takes long."""
    if residual != "nag":
        monkeypatch.setattr(analyze, "as_picture", lambda *_: {})
    run = run_of(residual, **flags)
    log_gradients(run, [1, 2, 3, 4.0], [4, 1, 1, 4.0])
    run.log[4] |= dict(val_loss=1.0, flops=2.0)
    for name, found in shown(run).items():
        if name in [*lacks, *PUZZLES]:
            assert re.fullmatch("[^\n]{20,120}", found["missing"]["a"]) and not found["results"]
            assert "ended with" not in found["missing"]["a"]
        else:
            assert not found["missing"] and len(found["pictures"]) == 2, (name, found["missing"])
            assert re.fullmatch(r"[A-Z0-9+-][^\n]{15,400}\.", found["sentences"]["a"])

HEAT = dict(draw="heat")

@pytest.mark.parametrize("options, measure, results", [
    ({}, lambda run: {"": {"x": torch.tensor([torch.nan, 1]), "empty": []}},
     {"": {"x": [None, 1], "empty": []}}),
    ({}, lambda run: ({"": {"x": np.array([1, 2])}}, "A sentence."), {"": {"x": [1, 2]}}),
    (HEAT, lambda run: {"a": [[1, 2]], "b": [[3, None]]}, {"a": [[1, 2]], "b": [[3, None]]}),
    ({}, lambda run: 1 / 0, "ended with ZeroDivisionError"),
    ({}, lambda run: sys.exit("bye"), "ended with SystemExit"),
    ({}, lambda run: {"": {"line": {1, 2}}}, "'set' object"),
    ({}, lambda run: None, "can't be drawn"),
    ({}, lambda run: ([0, 1], [2, 3]), "lines are {panel: {name: line}}"),
    (HEAT, lambda run: {"": [[1, 2], [3]]}, "can't be drawn")])
def test_a_statistic_of_your_own(monkeypatch, options, measure, results):
    """What is right is drawn, and what is wrong is told in a sentence."""
    monkeypatch.setattr(analyze, "STATS", {})
    def mine(run):
        return measure(run)
    analyze.stat("My own", **options)(mine)
    found = shown(run_of())["mine"]
    if isinstance(results, str):
        assert results in found["missing"]["a"] and "\n" not in found["missing"]["a"]
        assert not found["pictures"] and not found["results"]
    else:
        assert found["results"]["a"] == results and len(found["pictures"]) == 2

# ---------------------------------------------------------------------------------- the page

@pytest.fixture(scope="module")
def made(steps_data, tmp_path_factory):
    """Two runs, their data, and their page. (The odd names are no formulas, and no tags.)"""
    folder = tmp_path_factory.mktemp("analyze")
    shutil.copytree(steps_data, folder / "data")
    flags = ("--n_layer 2 --n_embd 16 --n_head 2 --block_size 32 --batch_size 4 --max_iters 6 "
             "--log_interval 2 --device cpu").split()
    runs = {f"{folder}/a$x^$b": "nag", f"{folder}/_<b>": "review"}
    for path, residual in runs.items():
        with torch.enable_grad():
            train.main(["--data", f"{folder}/data", "--out", path, "--residual", residual, *flags])
    analyze.main([*runs, "--out", f"{folder}/out", "--text", "</script>&amp;é"])
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
    of_log = [logged["val_loss"], logged["val_bpb"]]
    assert [run["loss"], run["bits"]] == pytest.approx(of_log, abs=1e-6)
    assert run["data"].endswith("/data") and run["iterations"] == 6 and run["warning"] == ""
    for name, found in report["statistics"].items():
        assert found["caption"] and found["results"] == numbers["statistics"][name]
        assert len(found["results"]) + len(found["missing"]) == 2
        assert {*found["sentences"]} == {*found["results"]}
        has_picture = (made / f"out/{name}.png").exists()
        assert bool(found["pictures"]) == has_picture == bool(found["results"]), name
    assert "knows no gain" in numbers["missing"]["who_skips"]["_<b>"]

@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium here to see the page in")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it(made, width):
    """In a window of this width, of which nobody has to scroll the page sideways"""
    page = made / "out"
    script = """<script>document.title = [document.images.length,
        document.querySelectorAll("#lines_inside table")[1].textContent,
        document.documentElement.scrollWidth].join("|")</script></body>"""
    shown = (page / "index.html").read_text().replace("</body>", script)
    (page / "shown.html").write_text(shown)
    (page / "frame.html").write_text(f"<iframe src=shown.html width={width} height=900 "
                                     "onload='this.after(contentDocument.title)'>")
    flags = ("--headless --no-sandbox --disable-gpu --dump-dom --allow-file-access-from-files "
             f"--virtual-time-budget=5000 --user-data-dir={page}/chromium file://{page}/frame.html")
    dom = subprocess.run(["chromium", *flags.split()], capture_output=True, text=True).stdout
    pictures, rows, wide = re.search(r"</iframe>(.*?)<", dom, re.S)[1].split("|")
    assert int(pictures) == len(analyze.STATS) and int(wide) <= width
    table = report_of(page)[1]["statistics"]["lines_inside"]["_<b>"]["table"]
    assert rows.endswith(table[-1][1][0] + table[-1][2]) and "after block 2" in rows

def test_what_others_have_made_stays(made, tmp_path):
    words = [f"{made}/a$x^$b", "--only", "logit_lens, logit_lens", "--out"]
    for name in "index.html", "logit_lens.png":
        (tmp_path / name).write_text("mine")
        assert "no page of ours" in refused(analyze.main, [*words, str(tmp_path)])
        assert "File exists" in refused(analyze.main, [*words, str(tmp_path / name)])
        assert [path.name for path in tmp_path.iterdir()] == [name]
        (tmp_path / name).unlink()
    for _ in range(2):   # The second time, the page is ours.
        analyze.main([*words, str(tmp_path)])

def test_data_that_changed(made, tmp_path, capsys):
    """The page says so. If they have moved, --data says where they are."""
    words = [f"{made}/_<b>", "--only", "logit_lens", "--out", f"{tmp_path}/out", "--data"]
    analyze.main([*words, str(shutil.copytree(made / "data", tmp_path / "moved"))])
    assert report_of(tmp_path / "out")[0]["runs"]["_<b>"]["warning"] == ""
    shard = next((tmp_path / "moved").glob("val*.bin"))
    shard.write_bytes(shard.read_bytes()[:-2] + b"\0\0")   # another last token
    capsys.readouterr()
    analyze.main([*words, f"{tmp_path}/moved"])
    warning = report_of(tmp_path / "out")[0]["runs"]["_<b>"]["warning"]
    assert "moved" in warning and warning in capsys.readouterr().err
    assert "nowhere" in refused(analyze.main, [*words, "nowhere"])

def test_a_run_that_still_trains(made, tmp_path, capsys):
    """The page says how far it is."""
    run = shutil.copytree(made / "_<b>", tmp_path / "run")
    ckpt = torch.load(run / "ckpt.pt", weights_only=True)
    for settings, share in (dict(max_iters=24), "25%"), (dict(max_flops=2 * ckpt["flops"]), "50%"):
        torch.save(ckpt | dict(settings=ckpt["settings"] | settings), run / "ckpt.pt")
        analyze.main([str(run), "--only", "logit_lens", "--out", f"{tmp_path}/out", "--data", f"{made}/data"])
        warning = report_of(tmp_path / "out")[0]["runs"]["run"]["warning"]
        assert f"has had {share} of its training" in warning and warning in capsys.readouterr().err

def test_what_figures_show():
    """A number stands where its colour is, and points are where they should be."""
    axes, *_ = analyze.draw_heat({"run": {"": [[0, 1], [2, 3]]}}, {"run": "r"}, 2).axes
    places = [axes.transData.transform(text.get_position()) for text in axes.texts]
    seen = [axes.images[0].get_cursor_data(SimpleNamespace(x=x, y=y)) for x, y in places]
    assert seen == [float(text.get_text()) for text in axes.texts] == [0, 1, 2, 3]
    panel = {"line": [5, 6], "points": [[0, 7], [2, 8]]}
    axes, *_ = analyze.draw_lines({"run": {"a panel": panel}}, {"run": "r"}, 3).axes
    line, points = (np.transpose(each.get_data()).tolist() for each in axes.lines[:2])
    assert line == [[1, 5], [2, 6]] and points == [[0, 7], [2, 8]] and axes.get_ylim()[0] == 0
    third = {"third": [3]}   # With a third line, each run has a panel, and these have one scale.
    results = {"a": {"y": panel | third}, "b": {"y": {"line": [50, 60]}}}
    first, second = analyze.draw_lines(results, dict(a="r", b="b"), 3).axes
    assert first.get_ylim() == second.get_ylim() and second.lines[0].get_color() == "b"
    assert first.get_ylim()[0] == 0 and first.get_ylim()[1] > 60

def test_a_notebook_and_its_matplotlibrc(tmp_path):
    """Its figures stay, and what it says of colours or TeX changes none of ours."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nfigure.facecolor: black\n")
    code = """import analyze, matplotlib, sys
results = {"a$": {"": {"line": [1, 2]}}}
analyze.as_picture(analyze.STATS["logit_lens"], results, {"a$": "r"}, 1)
assert "matplotlib.pyplot" not in sys.modules and matplotlib.get_backend() == "svg"
assert matplotlib.rcParams["text.usetex"]
"""
    env = os.environ | dict(MPLBACKEND="svg", MATPLOTLIBRC=str(tmp_path))
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True)

def test_list(capsys):
    analyze.main(["--list"])
    assert len(capsys.readouterr().out.splitlines()) == len(analyze.STATS)

@pytest.mark.parametrize("words", [
    "RUN --only remuval", "RUN --windows -1", "FOLDER", "RUN FOLDER/no"])
def test_bad_input(made, tmp_path, words):
    """What is refused leaves nothing."""
    words = words.replace("RUN", str(made / "a$x^$b")).replace("FOLDER", str(tmp_path)).split()
    assert words[-1] in refused(analyze.main, [*words, "--out", str(tmp_path / "a/figures")])
    assert not list(tmp_path.iterdir())

def test_runs_can_be_told_apart(made, tmp_path):
    """By the whole path, where their folders have the same name"""
    both = [str(shutil.copytree(made / "_<b>", tmp_path / name / "run")) for name in ("a", "b")]
    opened = analyze.open_runs(analyze.AnalyzeConfig(both, windows=1))
    assert list(opened) == both
    assert [sum(len(idx) for idx, _ in run.batches) for run in opened.values()] == [4, 4]

def test_a_run_that_has_diverged(made, tmp_path):
    run = shutil.copytree(made / "_<b>", tmp_path / "run")
    ckpt = torch.load(run / "ckpt.pt")
    ckpt["model"]["lm_head.weight"][0, 0] = torch.nan
    torch.save(ckpt, run / "ckpt.pt")
    assert "its loss is nan" in refused(analyze.main, [str(run), "--out", f"{tmp_path}/new"])
