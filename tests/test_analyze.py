"""The statistics against what they must be for models that we can see through, the page, the
command line. Tests of the probe are in test_inside.py."""
import inspect, json, os, re, shutil, subprocess, sys
from types import SimpleNamespace

import pytest, torch
import torch.nn.functional as F

import analyze, draw, prepare, runs, train
from conftest import ROOT, ids, make, streams
from model import ByGain, Runner, Without

L = 4   # blocks

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
    x = torch.stack(streams(run.model, torch.cat([idx for idx, _ in run.batches])))
    size = x.square().mean(-1).sqrt().mean((1, 2))
    found, sentence = analyze.turning(run)
    degrees = flat(found["turned by (degrees)"])
    assert degrees == pytest.approx(degrees_between(x[1:], x[:-1]).mean((1, 2)).tolist(), abs=1e-6)
    places, lengths = zip(*found["length of the stream"]["stream"])
    assert places == (0, 1, 2, 3, 4) and lengths == pytest.approx(size[::2].tolist())
    assert f"is {lengths[-1] / lengths[0]:.1f} times as long" in sentence
    assert degrees[4:6] == [0, 0]
    assert flat(analyze.removal(run)[0]["without one sublayer"])[4:6] == pytest.approx([0, 0], abs=1e-12)
    tiny = analyze.angles(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1e-10]))
    assert tiny.item() == pytest.approx(1e-10)   # Its cosine is 1 in floating point.

@pytest.mark.parametrize("residual", ["pre", "post", "nag", "attnres", "hyper", "denseformer", "siamese"])
def test_there_is_one_loss(residual):
    run = run_of(residual)
    lens, = analyze.logit_lens(run)[0]["loss (nats per token)"].values()
    removed, _ = analyze.removal(run)
    assert lens[-1].item() == pytest.approx(run.loss, rel=1e-5) and len(lens) == L + 1
    assert removed["without one sublayer"]["MLP"][1] == pytest.approx(increase(run, {4}), abs=1e-9)
    assert removed["without the block"]["block"][2] == pytest.approx(increase(run, {5, 6}), abs=1e-9)

def test_a_repeated_block_is_removed_wherever_it_runs():
    run = run_of(repeat="2-3:2")   # blocks 1, 2, 3, 2, 3, 4
    removed = analyze.removal(run)[0]["without the block"]["block"]
    assert removed[1] == pytest.approx(increase(run, {3, 4, 7, 8}))

# ---------------------------------------------------------------------------------- who skips

@torch.no_grad()
def test_depth_map():
    text = "a\té$x$\n" + 50 * "x"
    run, idx = run_of("nag", text=text), torch.tensor([[*text.encode()][:16]])
    found = analyze.depth_map(run)
    assert found["tokens"][:8] == ["a", "\t", "", "é", "$", "x", "$", "\n"]
    assert len(found["tokens"]) == 16
    walk = list(run.model.walk(idx, runner=Runner(run.model, analyze.skipping(run))))
    gains = []
    for residual, (_, before) in zip(run.model.residuals(), walk[:-1]):
        gains.append(residual.gain(before).abs()[0, :, 0])
    gains = torch.stack(gains)
    angles = torch.where(gains >= 0.3, gains.atan().rad2deg(), torch.nan)
    torch.testing.assert_close(found["degrees"], angles, equal_nan=True)
    assert 0 < angles.isnan().double().mean() < 1
    run = run_of(text=text)   # has no gain
    x = torch.stack(streams(run.model, idx))[:, 0]
    torch.testing.assert_close(analyze.depth_map(run)["degrees"], degrees_between(x[1:], x[:-1]))
    assert "".join(analyze.depth_map(run_of())["tokens"]) == analyze.A_TEXT[:16]

@torch.no_grad()
def test_what_skipping_costs():
    """The fixed set is of those that turn least in other windows. Here angles are said to rise with depth."""
    run, asked = run_of("nag", windows=(ids(64, 12, V=256), ids(64, 12, V=256, seed=1))), []
    def mean(measure, windows=None):
        asked.append(measure)
        return analyze.Run.mean(run, measure, windows) if windows is run.quarter else torch.arange(2.0 * L)
    run.mean = mean
    lines, = analyze.skip_curve(run)[0].values()
    idx = run.other_quarter[0][0]
    befores = [stream for _, stream in run.model.walk(idx)][:-1]
    gains = [residual.gain(x) for residual, x in zip(run.model.residuals(), befores)]
    turned = [gain.abs().atan().rad2deg().mean().item() for gain in gains]
    assert asked[0](idx).tolist() == pytest.approx(turned, rel=1e-3)
    assert lines["by gain"][0] == pytest.approx([0, 0])
    skipped = [x for x, _ in lines["by gain"]]
    assert skipped == sorted(skipped) and skipped[-1] > 0.5
    fixed = iter(lines["a fixed set"])
    for (share, _), below in zip(lines["by gain"], analyze.BELOW, strict=True):
        runner = Runner(run.model, ByGain(None, below))
        run.model(torch.cat([idx for idx, _ in run.quarter]), runner=runner)
        assert share == pytest.approx(runner.skipped(), abs=1e-6)
        if n := round(share * 2 * L):   # Else no set of whole sublayers skips as much, and there is nothing to compare.
            assert next(fixed) == pytest.approx([n / (2 * L), increase(run, {*range(1, n + 1)})])
    assert 0 < len(lines["a fixed set"]) < len(analyze.BELOW) and not list(fixed)
    assert [x for x, _ in lines["coins"]] == skipped and lines["coins"][0] == lines["by gain"][0]
    assert all(rise != pytest.approx(0) for _, rise in lines["coins"][2:])
    below = loss_of(run, ByGain(None, 0.2)) - loss_of(run, ByGain(None, 0))
    assert lines["by gain"][4][1] == pytest.approx(below.item())
    run.model.blocks[1].mlp_residual.alpha.fill_(-0.6)   # Then these gains are negative.
    assert (asked[0](idx) > 0).all()

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
    with pytest.raises(analyze.NotHere, match="without routers"):
        analyze.who_skips(run)

def test_windows_are_from_all_over_the_text():
    """Of 128 windows, window n has the tokens 2 n and 2 n + 1."""
    x = 2 * torch.arange(128)[:, None] + ids(128, 12, V=2)
    run = run_of(windows=(x, x))
    parts = [torch.cat([idx for idx, _ in part]) for part in (run.quarter, run.other_quarter)]
    for numbers in ((part[:, 0] // 2).tolist() for part in parts):
        assert numbers == [*range(numbers[0], 128, 4)]
    assert not {*parts[0][:, 0].tolist()} & {*parts[1][:, 0].tolist()}

def test_what_the_page_says(monkeypatch):
    """Of measurements that are made up. It numbers blocks from 1."""
    run = run_of("nag")
    run.puzzle, run.right = dict(most=2, table=10 * [[]], cells=2), [1.0, 0.91, 0.1]   # one step of two
    def says(words, statistic, **made_up):
        vars(run).update(made_up)
        _, sentence = statistic(run)
        assert words in sentence
    says("0.9 steps learned.", analyze.right_digits)
    for own, words in ([0.2, 0.5, 0.96, 1.0], "Block 3 fetches the line."), ([0.2, 0.5], "It doesn't know these answers"):
        monkeypatch.setattr(analyze, "patch", lambda *_: dict(line={"its own answer": own}, answer={}))
        says(words, analyze.patched)
    monkeypatch.setattr(prepare, "windows_of", lambda *_: None)
    example = dict(blocks=[None, dict(steps=0), dict(steps=2)])
    inside = SimpleNamespace(share_by_block=str, example=lambda line: example)
    monkeypatch.setattr(analyze, "Inside", lambda *_: inside)
    says("After block 0, 1, .. a probe reads up to step none, 0, 2, of 1.", analyze.lines_inside)
    without = iter([[1.0, 0.8, 0.1], [1.0, 0.2, 0.9], [1.0, 0.8, 0.0], [1.0, 0.9, 0.1]])
    says("Block 2 is missed most. Without it, 20% of the digits after one step are right.",
         analyze.removal_by_steps, right_by_steps=lambda decider: next(without))
    says("Sublayer 2 turns digits after one step by 7 degrees", analyze.gain_by_steps,
         by_steps=lambda measure: [[30.0, 31, 90], [2.0, 9, 1]])
    says("A copied digit runs 1.6 sublayers, and one after one step 3.2.", analyze.who_skips,
         by_steps=lambda measure: ([0.2, 0.4, 1.0], run.right), right_by_steps=lambda decider: run.right)
    monkeypatch.setattr(analyze, "ways_to_skip", lambda *_: {"by gain": [(x / 10, 6 - x) for x in range(6)],
                                                             "coins": [(x / 10, 2 - x / 10) for x in range(6)]})
    says("Below 0.1 (6 degrees), 30% of the sublayer runs are skipped. Steps learned: 3.00; with coins 1.70; if all "
         "run 6.00.", analyze.skip_curve, steps_with=lambda decider: decider)
    surer = [F.one_hot(run.batches[0][1], 320) * scale for scale in (0.0, 1.0, 12.0, 14.0, 16.0)]
    monkeypatch.setattr(analyze, "after_blocks", lambda *_: surer)
    vars(run.model)["head"] = lambda stream: stream
    says("After block 2, the head", analyze.logit_lens, batches=run.batches[:1])
    says("Block 2 is worth most, 2.50 nats.", analyze.removal,
         loss_rise=lambda decider: 2.5 if decider.places == {3, 4} else 0.1)

@pytest.mark.parametrize("right, most", [([1.0, 0.95, 0.9, 0.2, 0.95], 2), ([1.0, 0.95], 1), ([1.0, 0.1], 1), ([0.1], 1)])
def test_the_most_steps_that_are_known(right, most):
    assert analyze.Run.most_known.fget(SimpleNamespace(right=right)) == most

@pytest.mark.parametrize("residual, lacks", [
    ("pre", "skip_curve right_digits lines_inside patched written removal_by_steps gain_by_steps who_skips"),
    ("hyper", "skip_curve")])
def test_what_a_run_cannot_have_is_one_sentence(residual, lacks):
    run = run_of(residual, repeat="2-3:2")
    for name in lacks.split():
        with pytest.raises(analyze.NotHere, match="^[^\n]{20,110}$"):
            analyze.measured(analyze.STATS[name], run)

# ---------------------------------------------------------------------------------- the page

@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analyze")
    (folder / "text.txt").write_text("".join(f"line {i}: {i * i}\n" for i in range(2000)))
    prepare.main(["text", "--input", str(folder / "text.txt"), "--out", str(folder / "data")])
    flags = "--n_layer 2 --n_embd 16 --n_head 2 --block_size 32 --batch_size 4 --max_iters 6".split()
    for name, residual in (("a$x^$b", "nag"), ("_<b>", "review")):
        train.main(["--data", f"{folder}/data", "--out", f"{folder}/{name}", "--residual", residual, *flags])
    analyze.main([f"{folder}/a$x^$b", f"{folder}/_<b>", "--out", f"{folder}/out", "--text", "</script>&amp;é"])
    return folder

def test_page(made):
    page, numbers = (made / "out/index.html").read_text(), json.loads((made / "out/numbers.json").read_text())
    assert not re.search("https?://", page) and page.count("</script>") == 2
    report = re.search(r'id="report">(.*?)</script>', page, re.S)[1]
    assert "<" not in report   # No text ends a script.
    report = json.loads(report)
    assert list(report["statistics"]) == list(analyze.STATS)
    assert report["runs"]["a$x^$b"]["color"] != report["runs"]["_<b>"]["color"]
    run, logged = numbers["runs"]["a$x^$b"], runs.read_metrics(made / "a$x^$b")[6]
    rounding = 0.05 if torch.cuda.is_available() else 1e-6   # A GPU trains in bfloat16.
    assert [run["loss"], run["bits"]] == pytest.approx([logged["val_loss"], logged["val_bpb"]], abs=rounding)
    for name, stat in report["statistics"].items():
        assert stat["caption"] and stat["title"] and stat["results"] == numbers["statistics"][name]
        assert len(stat["results"]) + len(stat["missing"]) == 2
        assert {*stat["sentences"]} == ({*stat["results"]} if name != "depth_map" else set())
        assert ("image" in stat) == (made / f"out/{name}.png").exists() == bool(stat["results"]), name
    assert "knows no gain" in numbers["missing"]["skip_curve"]["_<b>"]
    assert sum(1 for stat in report["statistics"].values() if "image" in stat) == 5

def test_a_statistic_of_your_own(made, monkeypatch, tmp_path):
    """It needs no docstring, and may return tensors. If it can't be drawn, that shows a traceback."""
    monkeypatch.setattr(analyze, "STATS", {})
    def measure(draw, returned, doc=None):
        def mine(run):
            return returned(run.mean(lambda idx: run.degrees(idx).mean((1, 2))))
        mine.__doc__ = doc
        analyze.stat("My own", draw)(mine)
        analyze.main([f"{made}/a$x^$b", "--out", str(tmp_path)])
        return json.loads((tmp_path / "numbers.json").read_text())["statistics"]["mine"]["a$x^$b"]

    found = measure("lines", lambda turned: {"a panel": {"turned": turned, "lacks": [torch.nan, 1]}})
    assert len(found["a panel"]["turned"]) == 4 and found["a panel"]["lacks"] == [None, 1]
    assert analyze.STATS["mine"].caption == "My own"
    found = measure("heat", lambda turned: turned[None], "One\n    paragraph")
    assert len(found[0]) == 4 and analyze.STATS["mine"].caption == "One\nparagraph"
    example = inspect.getsource(analyze).split("This is a whole one:\n#\n")[1].split("\n#\n# The page")[0]
    exec(re.sub("^# ?(    )?", "", example, flags=re.M), vars(analyze) | dict(__name__="example"))
    analyze.main([f"{made}/a$x^$b", "--out", str(tmp_path), "--only", "turned"])
    numbers = json.loads((tmp_path / "numbers.json").read_text())["statistics"]
    assert numbers["turned"]["a$x^$b"]["degrees"] == {"all tokens": found[0]}
    assert f"At most by {max(found[0]):.0f} degrees." in (tmp_path / "index.html").read_text()
    with pytest.raises(AttributeError, match="items"):
        measure("lines", lambda turned: {"a panel": turned})

def test_a_page_of_others_stays(made, tmp_path):
    (tmp_path / "index.html").write_text("mine")
    with pytest.raises(SystemExit, match="no page of ours"):
        analyze.main([f"{made}/a$x^$b", "--only", "turning", "--out", str(tmp_path)])
    assert (tmp_path / "index.html").read_text() == "mine"

def test_a_notebook_keeps_its_figures():
    code = """import os, sys, analyze
assert "matplotlib" not in sys.modules
import draw, matplotlib
assert "matplotlib.pyplot" not in sys.modules
assert matplotlib.get_backend() == os.environ["MPLBACKEND"] == "svg"
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | dict(MPLBACKEND="svg"), check=True)

def test_list_and_bad_input(made, tmp_path, capsys):
    analyze.main(["--list"])
    assert capsys.readouterr().out.count("\n") == len(analyze.STATS)
    run, text = str(made / "a$x^$b"), tmp_path / "text"
    text.write_text("precious $text$")
    for words in ([run, "--only", "remuval"], [run, "--skip_below", "-1"], [run, "--windows", "-1"],
                  [str(tmp_path)], [run, "--out", str(text)], [run, str(tmp_path / "nowhere")]):
        out = [] if "--out" in words else ["--out", str(tmp_path / "a/figures")]
        with pytest.raises(SystemExit, match=f"^[^\n]*{re.escape(words[-1])}[^\n]*$"):
            analyze.main(words + out)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]   # What is refused leaves nothing.
    analyze.main([run, "--only", "depth_map,skip_curve", "--text", str(text), "--out", str(tmp_path / "new")])
    new, old = (json.loads((folder / "numbers.json").read_text())["statistics"]
                for folder in (tmp_path / "new", made / "out"))
    tokens = new["depth_map"]["a$x^$b"]["tokens"]
    assert "".join(tokens) == text.read_text() == "precious $text$"
    assert new["skip_curve"]["a$x^$b"] == old["skip_curve"]["a$x^$b"]   # It tosses the same coins.
    shutil.copytree(run, tmp_path / "nan")
    ckpt = torch.load(tmp_path / "nan/ckpt.pt")
    ckpt["model"]["lm_head.weight"][0, 0] = torch.nan
    torch.save(ckpt, tmp_path / "nan/ckpt.pt")
    with pytest.raises(SystemExit, match="^[^\n]*nan: its loss is nan[^\n]*$"):
        analyze.main([str(tmp_path / "nan"), "--out", str(tmp_path / "new")])
