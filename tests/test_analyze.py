"""The statistics against what they must be for models that we can see through, the page, the
command line. Tests of the probe are in test_inside.py."""
import inspect, json, os, re, shutil, subprocess, sys
from types import SimpleNamespace

import numpy as np
import pytest, torch
import torch.nn.functional as F

import analyze, train
from conftest import ROOT, ids, make, refused, same
from model import ByGain, Decider, Runner, Without

L = 4   # blocks
ALL_RUN = Decider(None)

def run_of(residual="pre", text="", windows=None, **config):
    """Of twelve windows"""
    model = make(residual, n_layer=L, vocab_size=320, **config)
    settings = dict(batch_size=4, block_size=16, tokenizer="bytes", residual=residual, data="")
    windows = windows or (ids(12, 12, V=256), ids(12, 12, V=256, seed=1))
    return analyze.Run(model, settings, windows, text=text, skip_below=0.3)

def loss_of(run, decider=None):
    """On every fourth window, the mean per token"""
    idx, targets = (torch.cat(part)[::4] for part in zip(*run.batches))
    return run.model(idx, targets, runner=Runner(run.model, decider))[1]

@torch.no_grad()
def increase(run, places):
    """By how much the loss rises without the sublayers at these places"""
    return (loss_of(run, Without(places, run.model.decider)) - loss_of(run)).item()

def degrees_between(x, y):
    return F.cosine_similarity(x, y, dim=-1).clamp(max=1).acos().rad2deg()

def flat(result):
    """{"attention": ..., "MLP": ...} -> a value per sublayer"""
    return [float(value) for pair in zip(result["attention"], result["MLP"]) for value in pair]

# ---------------------------------------------------------------------------------- any text

def test_the_stream_by_hand():
    run = run_of()
    for _, sublayer in run.model.blocks[2].pairs():   # This block is silent.
        torch.nn.init.zeros_(sublayer.c_proj.weight)
    x = torch.stack(run.model.walk(torch.cat([idx for idx, _ in run.batches])))
    size = x.square().mean(-1).sqrt().mean((1, 2))
    found, sentence = analyze.turning(run)
    degrees = flat(found["turned by (degrees)"])
    assert degrees == pytest.approx(degrees_between(x[1:], x[:-1]).mean((1, 2)).tolist(), abs=1e-6)
    places, lengths = zip(*found["length of the stream"]["stream"])
    assert places == (0, 1, 2, 3, 4) and lengths == pytest.approx(size[::2].tolist())
    assert f"is {lengths[-1] / lengths[0]:.1f} times as long" in sentence
    assert degrees[4:6] == [0, 0]
    assert flat(analyze.removal(run)[0]["without one sublayer"])[4:6] == pytest.approx([0, 0], abs=1e-12)
    # Of a stream that is two tensors: NAG keeps the length apart.
    nag = make("nag")
    for stream in nag.walk(ids()):
        same(nag.ends.as_tensor(stream).square().mean(-1, keepdim=True).sqrt(), stream[1].exp(), 1e-5)
    tiny = analyze.angles(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1e-10]))
    assert tiny.item() == pytest.approx(1e-10)   # Its cosine is 1 in floating point.

@pytest.mark.parametrize("residual", ["pre", "nag", "attnres", "hyper"])
def test_there_is_one_loss(residual):
    run = run_of(residual)
    lens, read = analyze.logit_lens(run)
    lens, = lens["loss (nats per token)"].values()
    removed, worth = analyze.removal(run)
    of_blocks = removed["without the block"]["block"]
    assert lens[-1].item() == pytest.approx(run.loss, rel=1e-5) and len(lens) == L + 1
    assert removed["without one sublayer"]["MLP"][1] == pytest.approx(increase(run, {4}), abs=1e-9)
    assert of_blocks[2] == pytest.approx(increase(run, {5, 6}), abs=1e-9)
    best = max(of_blocks)   # Sentences number blocks from 1, and the lens has 0, too.
    assert f"Block {of_blocks.index(best) + 1} is worth most, {best:.2f} nats." == worth
    assert f"After block {[loss < lens[-1] + 0.1 for loss in lens].index(True)}, the head" in read

def test_a_repeated_block_is_removed_wherever_it_runs():
    run = run_of(repeat="2-3:2")   # blocks 1, 2, 3, 2, 3, 4
    removed, _ = analyze.removal(run)
    assert removed["without the block"]["block"][1] == pytest.approx(increase(run, {3, 4, 7, 8}))
    assert removed["without one sublayer"]["MLP"][1] == pytest.approx(increase(run, {4, 8}))

def test_gradients_and_which_blocks_go_first(tmp_path):
    run = run_of(repeat="2:2")   # blocks 1, 2, 2, 3, 4
    with pytest.raises(analyze.NotHere, match="no gradient norms"):
        analyze.fan_in(run)
    logged = {2: [9, 9, 9, 9], 5: [4, 1, 1, 5], 10: [4, 1, 3, 1]}   # The first one is of the warmup.
    lines = [dict(step=5, val_loss=1.0), *(dict(step=step, grad_norms=norms) for step, norms in logged.items())]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run.folder = tmp_path
    run.config |= dict(warmup=0.5, max_iters=10)
    gradients = torch.tensor([4, 1, 2, 3]) / sum(p.numel() for p in run.model.blocks[0].parameters()) ** 0.5
    panels, sentence = analyze.fan_in(run)
    paths = torch.tensor([5, 4 + 3, 2, 1])
    assert panels["gradient"]["measured"].tolist() == pytest.approx(gradients.tolist())
    assert panels["gradient"]["as the fan-in"].tolist() == pytest.approx((paths / 15 * gradients.sum()).tolist())
    [worth] = panels["loss increase without it (nats)"].values()
    places = [{1, 2}, {3, 4, 5, 6}, {7, 8}, {9, 10}]
    assert worth == pytest.approx([increase(run, each) for each in places], abs=1e-9)
    # Ranks of the gradients are 3 0 1 2, of the paths 2 3 1 0: the squares of the differences make 14.
    assert "fan-in: -0.40; with" in sentence
    ranks = [sorted(worth).index(each) for each in worth]
    rho = 1 - 6 * sum((a - b) ** 2 for a, b in zip(ranks, [3, 0, 1, 2])) / 60
    assert sentence.endswith(f"are worth: {rho:.2f}.")

    lines, sentence = analyze.pruning(run)
    [lines] = lines.values()
    turned = [pair for kinds in zip(*analyze.turning(run)[0]["turned by (degrees)"].values()) for pair in kinds]
    angles = [sum(turned[place - 1] for place in each) for each in places]
    orders = {"CascadeFlow": [1, 2, 3, 0], "least worth": sorted(range(4), key=worth.__getitem__),
              "least angle": sorted(range(4), key=angles.__getitem__), "last first": [3, 2, 1, 0]}
    for name, order in orders.items():
        removed = [set().union(*(places[block] for block in order[:n])) for n in range(4)]
        assert lines[name] == pytest.approx([increase(run, each) for each in removed], abs=1e-9)
    assert f"Without 1 of 4 blocks, the loss rises by {worth[1]:.2f} (CascadeFlow), {min(worth):.2f} (" in sentence
    run.model.blocks[1].mlp.c_fc = torch.nn.Linear(16, 999)   # Its gradient counts for less.
    found = analyze.gradients_of(run)
    assert found.argmin() == 1 and found[0].item() == pytest.approx(gradients[0].item())
    run.config["max_iters"] = 12   # It was stopped after ten: half of the run begins at 6.
    assert analyze.gradients_of(run)[3] < found[3]
    run.config["max_iters"] = 30   # It was stopped in the warmup.
    with pytest.raises(analyze.NotHere, match="after the warmup"):
        analyze.fan_in(run)
    del run.model.blocks[1:]
    with pytest.raises(analyze.NotHere, match="one block"):
        analyze.pruning(run)

def test_equal_values_share_a_rank():
    assert analyze.ranks_of([5, 7, 5, 9.0]).tolist() == [2.5, 1, 2.5, 0]
    assert analyze.rank_correlation([1, 1, 2, 3], [9, 9, 4, 0]) == pytest.approx(-1)

# ---------------------------------------------------------------------------------- who skips

@torch.no_grad()
def test_coins_fall_the_same_whatever_else_is_measured():
    alone, after_others = run_of(mod="coins:rate=0.5"), run_of(mod="coins:rate=0.5")
    assert after_others.worth
    assert len({str(analyze.measure_all({"a": run}, ["removal"])) for run in (alone, after_others)}) == 1

@torch.no_grad()
@pytest.mark.parametrize("residual", ["nag", "pre"])
def test_depth_map(residual):
    """The angle of each token in each sublayer, and nan if it skips. (With pre, nobody does.)"""
    text = "a\té$x$\n" + 50 * "x"
    run, idx = run_of(residual, text=text), torch.tensor([[*text.encode()][:16]])
    found = analyze.depth_map(run)
    assert found["tokens"] == ["a", "\t", "", "é", "$", "x", "$", "\n"] + 8 * ["x"]
    runner = Runner(run.model, ByGain(None, 0.3) if residual == "nag" else ALL_RUN)
    x = torch.stack([run.model.ends.as_tensor(stream)[0] for stream in run.model.walk(idx, runner)])
    ran = runner.who_ran()[:, 0]
    angles = torch.where(ran, degrees_between(x[1:], x[:-1]), torch.nan)
    torch.testing.assert_close(found["degrees"], angles, equal_nan=True)
    assert ran.any() and ran.all() == (residual == "pre")
    run.text = ""
    assert "".join(analyze.depth_map(run)["tokens"]) == analyze.A_TEXT[:16]

@torch.no_grad()
def test_what_skipping_costs():
    """By gain, without those sublayers that turn least in other windows, and by coins"""
    x, y = ids(64, 12, V=256), ids(64, 12, V=256, seed=1)
    others = x[2::4].fill_(7)   # These windows turn otherwise.
    run = run_of("nag", windows=(x, y))
    run.model.blocks[1].mlp_residual.alpha.fill_(-0.6)   # These gains are negative. Their size counts.
    run.model.blocks[2].attn_residual.alpha.fill_(0.16)   # These are about 0.1.
    run.model.ends.log_scale.add_(3)   # The head is surer, so a loss changes more.
    turned = [residual.gain(x).abs().atan().mean()
              for residual, x in zip(run.model.residuals()[:-1], run.model.walk(others))]
    weakest = sorted(range(1, 2 * L + 1), key=lambda place: turned[place - 1])
    panels, sentence = analyze.skip_curve(run)
    by_gain, fixed, coins = panels["rise of the loss (nats)"].values()
    by_hand = []
    for below in analyze.BELOW:
        decider = ByGain(None, below)
        runner = Runner(run.model, decider)
        run.model(torch.cat([idx for idx, _ in run.quarter]), runner=runner)
        by_hand.append([runner.skipped(), (loss_of(run, decider) - loss_of(run, ALL_RUN)).item()])
    assert by_gain == [pytest.approx(each, abs=1e-6) for each in by_hand]
    assert by_gain[0] == pytest.approx([0, 0]) and by_gain[-1][0] > 0.5
    removed = [round(share * 2 * L) for share, _ in by_gain]
    assert 0 in removed   # No set of whole sublayers skips as little, so there is nothing to compare.
    assert fixed == [pytest.approx([n / (2 * L), increase(run, weakest[:n])]) for n in removed if n > 0]
    assert [share for share, _ in coins] == [share for share, _ in by_gain]
    assert coins[0] == by_gain[0] and coins[3] != by_gain[3]   # Coins fall on other tokens.
    assert all(rise != pytest.approx(0) for _, rise in coins[2:])
    assert sentence.startswith(f"Below 0.1 (6 degrees), {by_gain[3][0]:.0%} of the sublayer runs are skipped.")
    assert sentence.endswith(f"{by_gain[3][1]:.2f}; with coins {coins[3][1]:.2f}; if all run 0.00.")

@torch.no_grad()
def test_coins_skip_each_sublayer_as_often():
    run = run_of("nag", windows=(ids(64, 12, V=256), ids(64, 12, V=256, seed=1)))
    ran = torch.linspace(0, 1, 2 * L)
    torch.testing.assert_close(run.share_that_ran(analyze.coins(ran)).float(), ran, atol=0.1, rtol=0)

def test_a_model_trained_to_skip_skips_in_every_statistic():
    run = run_of("nag", mod="gain:below=99")
    assert flat(analyze.turning(run)[0]["turned by (degrees)"]) == [0] * 2 * L
    assert analyze.depth_map(run)["degrees"].isnan().all()
    lines, = analyze.skip_curve(run)[0].values()
    assert lines["as trained"] == [pytest.approx([1.0, 0])]
    assert lines["by gain"][0][1] == pytest.approx((loss_of(run, ByGain(None, 0)) - loss_of(run)).item())

def test_a_router_skips_on_the_map():
    run = run_of(mod="router:rate=0.25")
    assert 0 < analyze.depth_map(run)["degrees"].isnan().double().mean() < 0.5
    run.puzzle = dict(cells=2, most=1)
    with pytest.raises(analyze.NotHere, match="another model"):
        analyze.who_skips(run)

@pytest.mark.parametrize("residual, lacks", [
    ("pre", "skip_curve right_digits lines_inside patched written removal_by_steps gain_by_steps who_skips"),
    ("hyper", "skip_curve")])
def test_what_a_run_cannot_have_is_one_sentence(residual, lacks):
    run = run_of(residual, repeat="2-3:2")
    found = analyze.measure_all({"a": run}, lacks.split())
    assert {*found} == {*lacks.split()}
    for of_runs in found.values():
        assert re.fullmatch("[^\n]{20,110}", of_runs["missing"]["a"]) and not of_runs["results"]

# ---------------------------------------------------------------------------------- the page

@pytest.fixture(scope="module")
def made(data, tmp_path_factory):
    """Two runs, their data, and their page. (The odd names are no formulas, and no tags.)"""
    folder = tmp_path_factory.mktemp("analyze")
    shutil.copytree(data, folder / "data")
    flags = "--n_layer 2 --n_embd 16 --n_head 2 --block_size 32 --batch_size 4 --max_iters 6 --log_interval 2 --device cpu".split()
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
    assert report["runs"]["a$x^$b"]["color"] != report["runs"]["_<b>"]["color"]
    run, logged = numbers["runs"]["a$x^$b"], train.read_metrics(made / "a$x^$b")[6]
    assert [run["loss"], run["bits"]] == pytest.approx([logged["val_loss"], logged["val_bpb"]], abs=1e-6)
    for name, stat in report["statistics"].items():
        assert stat["caption"] and stat["title"] and stat["results"] == numbers["statistics"][name]
        assert len(stat["results"]) + len(stat["missing"]) == 2
        assert {*stat["sentences"]} == ({*stat["results"]} if name != "depth_map" else set())
        assert ("image" in stat) == (made / f"out/{name}.png").exists() == bool(stat["results"]), name
    assert "knows no gain" in numbers["missing"]["skip_curve"]["_<b>"]
    assert {*numbers["statistics"]["pruning"]} == {"a$x^$b", "_<b>"}

def test_a_statistic_of_your_own(made, monkeypatch, tmp_path):
    """That in the comments of analyze.py, some without a docstring, and some that can't be drawn"""
    monkeypatch.setattr(analyze, "STATS", {})
    example = inspect.getsource(analyze).split("This is a whole one:\n#\n")[1].split("\n#\n# The page")[0]
    exec(re.sub("^# ?(    )?", "", example, flags=re.M), vars(analyze) | dict(__name__="example"))

    def add(name, returned, **options):
        def measure(run):
            return returned
        measure.__name__ = name
        analyze.stat(f"The {name}", **options)(measure)

    add("line", {"a panel": {"lacks": torch.tensor([torch.nan, 1]), "empty": []}})
    add("heat", {"a": [[1, 2]], "b": [[3, None]]}, draw="heat")
    add("no_line", {"a panel": [1.0]})
    add("no_matrix", [[1, 2], [3]], draw="heat")
    add("a_set", {"a panel": {"line": {1, 2}}})
    add("pairs", {(1, 2): {"line": [1]}})
    analyze.main([f"{made}/a$x^$b", "--out", str(tmp_path)])   # Those are told, and the others are there.
    report, numbers = report_of(tmp_path)
    turned, line, heat, *_ = (found.get("a$x^$b") for found in numbers["statistics"].values())
    degrees = turned["degrees"]["all tokens"]
    assert len(degrees) == 4 and line["a panel"] == dict(lacks=[None, 1], empty=[])
    assert heat == {"a": [[1, 2]], "b": [[3, None]]}
    shown = report["statistics"]
    assert shown["turned"]["sentences"] == {"a$x^$b": f"At most by {max(degrees):.0f} degrees."}
    assert shown["turned"]["definition"].startswith("The angle between") and shown["line"]["caption"] == "The line"
    assert [name for name, stat in shown.items() if "image" in stat] == ["turned", "line", "heat"]
    for name in "no_line", "no_matrix":
        assert "lines are {panel: {name: line}}, and heat maps {panel: matrix}" in shown[name]["missing"]["a$x^$b"]
    for name in "a_set", "pairs":
        assert "has no form in numbers.json" in shown[name]["missing"]["a$x^$b"] and not shown[name]["results"]

def test_what_others_have_made_stays(made, tmp_path):
    words = [f"{made}/a$x^$b", "--only", "turning, turning", "--out", str(tmp_path)]
    for name in "index.html", "turning.png":
        (tmp_path / name).write_text("mine")
        assert "no page of ours" in refused(analyze.main, words)
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert "name a folder" in refused(analyze.main, words[:-1] + [str(tmp_path / name)])
        (tmp_path / name).unlink()
    analyze.main(words)
    analyze.main(words)   # This page is ours.

def test_data_that_moved_or_changed(made, tmp_path, capsys):
    run, moved = str(made / "_<b>"), made / "moved"
    os.rename(made / "data", moved)
    words = [run, "--only", "turning", "--out", str(tmp_path / "out")]
    try:
        assert f"{run}: was trained on {made}/data" in refused(analyze.main, words)
        analyze.main([*words, "--data", str(moved)])
        assert report_of(tmp_path / "out")[0]["runs"]["_<b>"]["warning"] == ""
        shard = moved / "val_000000.bin"
        shutil.copy(shard, made / "shard")
        shard.write_bytes(shard.read_bytes()[:-2] + b"\0\0")   # another last token
        capsys.readouterr()
        analyze.main([*words, "--data", str(moved)])
        warning = report_of(tmp_path / "out")[0]["runs"]["_<b>"]["warning"]
        assert "moved" in warning and warning in capsys.readouterr().err
        shutil.copy(made / "shard", shard)
    finally:
        os.rename(moved, made / "data")

def test_what_figures_show():
    """A number stands where its colour is, and points are where they should be."""
    axes, *_ = analyze.draw_heat({"run": {"": [[0, 1], [2, 3]]}}, {"run": "r"}).axes
    places = [axes.transData.transform(text.get_position()) for text in axes.texts]
    shown = [axes.images[0].get_cursor_data(SimpleNamespace(x=x, y=y)) for x, y in places]
    assert shown == [float(text.get_text()) for text in axes.texts] == [0, 1, 2, 3]
    assert [text.get_color() for text in axes.texts] == ["black", "black", "white", "white"]
    panel = {"line": [5, 6], "points": [[0, 7], [2, 8]]}
    axes, *_ = analyze.draw_lines({"run": {"a panel": panel}}, {"run": "r"}).axes
    line, points = (np.transpose(each.get_data()).tolist() for each in axes.lines[:2])
    assert (line, points) == ([[1, 5], [2, 6]], [[0, 7], [2, 8]])

def test_who_only_measures_loads_no_matplotlib():
    """... and a notebook keeps its figures."""
    code = """import os, sys
import analyze, sample
analyze.main(["--list"])
assert "matplotlib" not in sys.modules
analyze.draw_lines({"run": {"panel": {"line": [1]}}}, {"run": "r"})
import matplotlib
assert "matplotlib.pyplot" not in sys.modules
assert matplotlib.get_backend() == os.environ["MPLBACKEND"] == "svg"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | dict(MPLBACKEND="svg"), check=True,
                          capture_output=True, text=True)
    assert done.stdout.count("\n") == len(analyze.STATS)

def test_bad_input(made, tmp_path, monkeypatch):
    run, text = str(made / "a$x^$b"), tmp_path / "text"
    text.write_text("precious $text$")
    for words in ([run, "--only", "remuval"], [run, "--skip_below", "-1"], [run, "--windows", "-1"],
                  [str(tmp_path)], [run, "--out", str(text)], [run, str(tmp_path / "nowhere")]):
        out = [] if "--out" in words else ["--out", str(tmp_path / "a/figures")]
        assert words[-1] in refused(analyze.main, words + out)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]   # What is refused leaves nothing.
    analyze.main([run, "--only", "depth_map,skip_curve", "--text", str(text), "--out", str(tmp_path / "new")])
    new, old = (report_of(folder)[1]["statistics"] for folder in (tmp_path / "new", made / "out"))
    assert "".join(new["depth_map"]["a$x^$b"]["tokens"]) == text.read_text() == "precious $text$"
    assert new["skip_curve"]["a$x^$b"] == old["skip_curve"]["a$x^$b"]   # It tosses the same coins.
    both = [str(shutil.copytree(run, tmp_path / name / "run")) for name in ("a", "b")]
    opened = analyze.open_runs(analyze.AnalyzeConfig(both, windows=1))
    assert list(opened) == both   # Their folders have the same name.
    assert [sum(len(idx) for idx, _ in each.batches) for each in opened.values()] == [4, 4]
    ckpt = torch.load(f"{both[0]}/ckpt.pt")
    ckpt["model"]["lm_head.weight"][0, 0] = torch.nan
    torch.save(ckpt, f"{both[0]}/ckpt.pt")
    assert "run: its loss is nan" in refused(analyze.main, [both[0], "--out", str(tmp_path / "new")])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(analyze, "measure_all", None)
    with pytest.raises(ImportError):   # before anything is measured
        analyze.main([run, "--out", str(tmp_path / "new")])
