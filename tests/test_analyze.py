"""The statistics against what they must be for models that we can see through, the page, the command line."""
import json, re, shutil, subprocess
from types import SimpleNamespace

import pytest, torch
import torch.nn.functional as F
import analyze, prepare, runs, train
from conftest import attention_by_hand, ids, make, mlp_by_hand, streams, sublayers_by_hand, unit
from model import ByFunction, EVERYONE, Threshold, Without, flops_per_token

L = 4   # blocks

def run_of(residual="pre", history=None, text="", mod_rate=0.0, windows=None, **config):
    """Twelve windows: `some` and `others` are three batches of one."""
    model = make(residual, mod_rate=mod_rate, n_layer=L, vocab_size=320, **config)
    settings = dict(batch_size=4, block_size=16, mod_rate=mod_rate, tokenizer="bytes", residual=residual)
    windows = windows or (ids(12, 12, V=256), ids(12, 12, V=256, seed=1))
    return analyze.Run(model, settings, history or {}, SimpleNamespace(text=text, skip=0.4), windows)

def loss_of(run, decider=None):
    """On every fourth window, the mean per token"""
    idx, targets = (torch.cat(part)[::4] for part in zip(*run.batches))
    return run.model(idx, targets, decider=decider)[1]

@torch.no_grad()
def increase(run, numbers):
    """By how much the loss rises without the sublayers of these numbers"""
    return (loss_of(run, Without(numbers)) - loss_of(run)).item()

def silent(block, **options):
    run = run_of(**options)
    for _, sublayer in run.model.blocks[block].pairs():
        torch.nn.init.zeros_(sublayer.c_proj.weight)
    return run

def idx_of(run):
    return torch.cat([idx for idx, _ in run.batches])

def flat(result):
    """{"attention": ..., "MLP": ...} -> a value per sublayer"""
    return [value for pair in zip(result["attention"], result["MLP"]) for value in pair]

def test_a_silent_block_changes_nothing():
    run = silent(2)
    change, worth, score = analyze.update(run), analyze.removal(run), analyze.causal_score(run)[""]
    assert flat(change["|change| / |stream|"])[4:6] == [0, 0] == flat(change["angle (degrees)"])[4:6]
    assert flat(worth["one sublayer"])[4:6] == pytest.approx([0, 0], abs=1e-12)
    assert score[2] == [None, None, None, 0] and score[0][1] > 1e-4

def test_values_of_the_stream_by_hand():
    run = run_of()
    x = torch.stack(streams(run.model, idx_of(run)))
    size = x.square().mean(-1).sqrt()
    norms = [part.mean((1, 2)).tolist() for part in (size, size[:, :, 1:])]
    assert [*analyze.stream_norm(run)[""].values()] == [pytest.approx(line) for line in norms]
    relative = (x.diff(dim=0).norm(dim=-1) / x[:-1].norm(dim=-1)).mean((1, 2))
    degrees = F.cosine_similarity(x[1:], x[:-1], dim=-1).acos().rad2deg().mean((1, 2))
    found = analyze.update(run)
    assert flat(found["|change| / |stream|"]) == pytest.approx(relative.tolist())
    assert flat(found["angle (degrees)"]) == pytest.approx(degrees.tolist())
    assert found["angles summed (degrees)"]["both"] == pytest.approx(degrees.cumsum(0)[1::2].tolist())
    tiny = analyze.angles(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1e-10]))
    assert tiny.item() == pytest.approx(1e-10)   # Its cosine is 1 in floating point.
    z = x[2, ::4] - x[2, ::4].mean(-1, keepdim=True)
    kurtosis = (z ** 4).mean(-1) / (z ** 2).mean(-1) ** 2 - 3
    assert analyze.outliers(run)[""]["stream"][1] == pytest.approx(kurtosis.mean().item())

def test_gradient_norm():
    run = run_of("nag")
    found, block = flat(analyze.gradient_norm(run)[""]), run.model.blocks[1]
    assert len(found) == 2 * L and all(p.grad is None for p in run.model.parameters())
    loss_of(run).backward()
    own = [*block.mlp.parameters(), *block.mlp_residual.parameters()]
    assert found[3] == pytest.approx(sum(p.grad.square().sum().item() for p in own) ** 0.5)

@pytest.mark.parametrize("residual", ["pre", "post", "nag", "attnres", "hyper", "denseformer", "siamese"])
def test_there_is_one_loss(residual):
    run = run_of(residual)
    lens, removed = analyze.logit_lens(run), analyze.removal(run)
    distance = lens["distance"]["after each block"]
    assert lens["loss"]["after each block"][-1] == pytest.approx(run.loss, rel=1e-5)
    assert distance[-1] == pytest.approx(0, abs=1e-9) and 0 < min(distance[:-1]) and len(distance) == L + 1
    assert all(curve["this order"][0] == run.loss for curve in analyze.prune_curve(run).values())
    assert removed["one sublayer"]["MLP"][1] == pytest.approx(increase(run, {4}), abs=1e-9)
    assert removed["one block"]["block"][2] == pytest.approx(increase(run, {5, 6}), abs=1e-9)

def history_of(norms):
    return {0: dict(grad_norms=[0.0] * L), 5: dict(grad_norms=[1.0, 2.0, 3.0, 4.0]), 9: dict(loss=4.0),
            10: dict(grad_norms=norms, val_loss=3.0)}

def test_prune_curve_removes_what_a_method_scores_lowest():
    run = silent(2, history=history_of([3.0, 4.0, 0.5, 5.0]))
    assert analyze.loss_curve(run)[""] == {"validation": [[640, 3.0]], "training": [[576, 4.0]]}
    curves = analyze.prune_curve(run)
    assert {*curves} == {"CascadeFlow", "magnitude", "influence", "worth", "last first", "attention", "MLP"}
    for name in "CascadeFlow", "magnitude", "influence", "attention", "MLP":   # The silent block goes first.
        assert curves[name]["this order"][1] == pytest.approx(run.loss, abs=1e-12)
        assert len(curves[name]["this order"]) == L // 2 + 1 == len(curves[name]["at random"])
    assert curves["last first"]["this order"][1] == pytest.approx(run.loss + increase(run, {7, 8}))
    assert curves["CascadeFlow"]["this order"][2] == pytest.approx(run.loss + increase(run, {5, 6, 1, 2}))

def test_cascade_flow_counts_gradients_per_weight_and_a_repeated_block_everywhere():
    run = run_of(taper="linear", n_embd=64, n_head=8)
    sizes = [sum(p.numel() for p in block.parameters()) for block in run.model.blocks]
    norms = [size ** 0.5 * scale for size, scale in zip(sizes, (1, 1.2, 1.3, 1.1))]
    run.history = history_of(norms)   # The last one has the least, but the first one for its size.
    curve = analyze.prune_curve(run)["CascadeFlow"]["this order"]
    assert norms[3] == min(norms) and curve[1] == pytest.approx(run.loss + increase(run, {1, 2}))
    run = run_of(repeat="2-3:2")   # blocks 1, 2, 3, 2, 3, 4
    assert analyze.removal(run)["one block"]["block"][1] == pytest.approx(increase(run, {3, 4, 7, 8}))

def test_fan_in_fits_its_own_law():
    for norms, config in (([11.0, 9.0, 7.0, 5.0], {}), ([10.0, 6.0, 3.0, 1.0], dict(deep_supervision=True))):
        found = analyze.fan_in(run_of(history=history_of(norms), **config))[""]
        assert found["measured"] == pytest.approx([norm / sum(norms) for norm in norms])
        assert found["best a + b F"] == pytest.approx(found["measured"])

@torch.no_grad()
def test_nag_by_hand():
    run = run_of("nag")
    run.model.blocks[1].mlp_residual.alpha.fill_(-0.6)
    targets, gains, sums = torch.cat([y for _, y in run.batches]), [], []
    r, s = run.model.ends.start(run.model.wte(idx_of(run)))
    for _, residual, f in sublayers_by_hand(run.model):
        near = torch.sigmoid(r @ residual.preferred.T + residual.bias)
        m = (residual.votes.softmax(0) * near).sum(-1, keepdim=True)
        gains.append(residual.alpha * m ** F.softplus(residual.beta))
        sums.append((gains[-1].abs() * r).sum((0, 1)))
        r, s = residual((r, s), f, gains[-1])
    found = analyze.gain(run)[""]
    assert flat(found) == pytest.approx([g.abs().mean().item() for g in gains], rel=1e-6)
    assert found["step size, MLP"][1] == pytest.approx(0.6)
    degrees = [g.abs().atan().rad2deg().mean().item() for g in gains]
    assert flat(analyze.update(run)["angle (degrees)"]) == pytest.approx(degrees, rel=1e-5)
    cosine = F.cosine_similarity(sums[1], sums[4], dim=0)
    assert analyze.direction_similarity(run)[""][1][4] == pytest.approx(cosine.item(), abs=1e-6)
    loss = F.cross_entropy(run.model.head((r, s)).flatten(0, 1), targets.flatten(), reduction="none")
    loss = loss[s.flatten().argsort()]   # of 144 tokens: four groups of 15, then six of 14
    ends = [loss[:15].mean().item(), loss[-14:].mean().item()]
    assert analyze.norm_confidence(run)[""]["loss"][::9] == pytest.approx(ends)

@pytest.mark.parametrize("group", [1, 2])
def test_depth_attention(group):
    run, l = run_of(f"attnres:group={group}"), 5
    ends, rows = run.model.ends, analyze.depth_attention(run)[""]
    sources = [v for v, _ in list(run.model.walk(idx_of(run)))[l - 1][1][1].values()]
    scores = torch.stack([unit(v) for v in sources]) @ (ends.query[l - 2] * ends.key_weight[l - 2])
    assert rows[l - 2][:4 // group + 1] == pytest.approx(scores.softmax(0).mean((1, 2)).tolist())
    assert len(rows) == 2 * L and all(w != w for w in rows[l - 2][len(sources):])   # nan

@pytest.mark.parametrize("residual", ["review", "convex", "highway"])
def test_gates(residual):
    run = run_of(residual)
    block, h = run.model.blocks[1].attn_residual, streams(run.model, idx_of(run))[2]
    seen = {"h": h, "u": attention_by_hand(run.model.blocks[1].attn, block.norm(h))}
    r = (sum(unit(seen[name], 1e-5) @ W.T for name, W in block.W.items()) + block.bias).sigmoid()
    assert analyze.gate(run)[""][2] == pytest.approx((torch.histc(r, 20, 0, 1) / r.numel()).tolist())

@torch.no_grad()
def test_sink():
    run = run_of(n_head=1)
    block, idx = run.model.blocks[1], idx_of(run)[:1]
    x = block.attn_residual.read(streams(run.model, idx)[2])
    out = analyze.attention_weights(run, idx)[1] @ x @ block.attn.c_attn.weight[-16:].T
    torch.testing.assert_close(out @ block.attn.c_proj.weight.T, attention_by_hand(block.attn, x))
    means = torch.stack([analyze.attention_weights(run, each[None])[3] for each in idx_of(run)]).mean(0)[1:]
    found = [line[3] for line in analyze.sink(run)[""].values()]
    assert found == pytest.approx([means[:, 0].mean().item(), means[:, :4].sum(1).mean().item()])

@torch.no_grad()
def test_depth_map():
    text = "a\té$x$\n" + 50 * "x"
    run, idx, keeps = run_of("nag", text=text), torch.tensor([[*text.encode()][:16]]), []
    found = analyze.depth_map(run)
    assert found["tokens"][:8] == ["a", "\t", "", "é", "$", "x", "$", "\n"] and len(found["tokens"]) == 16
    gains = [residual.gain(before).abs() for residual, _, before, *_ in run.visits(idx, run.decider)]
    assert found["size"] == torch.stack(gains)[:, 0, :, 0].tolist()
    run.model(idx, decider=run.decider, keeps=keeps)
    assert found["ran"] == [[True] * 16 if keep is EVERYONE else keep[0].tolist() for keep in keeps]
    assert not all(map(all, found["ran"]))
    run = run_of(text=text)   # has no gain
    x = torch.stack(streams(run.model, idx))[:, 0]
    found = torch.tensor(analyze.depth_map(run)["size"])
    torch.testing.assert_close(found, (x.diff(dim=0).norm(dim=-1) / x[:-1].norm(dim=-1)).float())

def test_skipping():
    windows = ids(64, 12, V=256), ids(64, 12, V=256, seed=1)
    run, keeps, ran = run_of("nag", windows=windows), [], []
    run.model(torch.cat([idx for idx, _ in run.some]), decider=run.decider, keeps=keeps)
    shares = [0.0 if keep is EVERYONE else 1 - keep.double().mean().item() for keep in keeps]
    assert flat(analyze.skip_share(run)[""]) == pytest.approx(shares, abs=1e-6) and sum(shares) > 0.8
    usual = run.loss_with
    run.loss_with = lambda decider: ran.append(analyze.shares_ran(run, decider)) or usual(decider)
    curve = analyze.skip_curve(run)[""]
    flops = [flops for flops, _ in curve["by gain"]]
    assert curve["by gain"][0] == pytest.approx([flops_per_token(run.model), run.loss])
    assert flops == sorted(flops, reverse=True) == [flops for flops, _ in curve["random tokens"]]
    for by_gain, random, removed, rate in zip(ran[-18::3], ran[-17::3], ran[-16::3], (1, 2, 3, 4, 5, 6)):
        assert random == pytest.approx(by_gain, abs=0.15)   # As many tokens skip each sublayer.
        assert sum(removed) == 2 * L - round(2 * L * rate / 10) and {*removed} <= {0, 1}
    idx, targets = (part[2::16] for part in windows)
    alone = [run.model(idx, targets, decider=Without({l}))[1].item() for l in range(1, 2 * L + 1)]
    assert ran[-16].index(0) == alone.index(min(alone))

@torch.no_grad()
def test_the_share_that_is_asked_for_is_skipped_all_over_a_text():
    """Its first eighth has digits, which are 0 .. 99 here, and then comes prose. Digits have large gains."""
    x = torch.cat((ids(16, 12, V=100), 100 + ids(112, 12, V=156)))
    run, ran = run_of("nag", windows=(x, x)), []
    way = torch.ones(16, dtype=torch.double).cumsum(0) - 8.5
    run.model.wte.weight[:100] += way
    for residual in run.model.residuals()[:-1]:
        residual.preferred += 0.03 * way
    def skipped(decider):
        return analyze.evaluate(run.model, x, x, torch.ones(320), 8, decider)[2]
    assert skipped(analyze.calibrate(run.model, [run.others[0][0]], 0.4)) > 0.45   # by its first quarter
    assert skipped(run.decider) == pytest.approx(0.4, abs=0.02)                     # as --skip says
    usual = run.loss_with
    run.loss_with = lambda decider: ran.append(skipped(decider)) or usual(decider)
    analyze.skip_curve(run)
    assert ran[-18::3] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], abs=0.02)

def test_windows_are_from_all_over_the_text():
    """Of 128 windows, window n has the tokens 2 n and 2 n + 1."""
    x = 2 * torch.arange(128)[:, None] + ids(128, 12, V=2)
    run = run_of(windows=(x, x))
    parts = [torch.cat([idx for idx, _ in part]) for part in (run.some, run.others, run.few, run.few_others)]
    for numbers in ((part[:, 0] // 2).tolist() for part in parts):
        assert numbers == [*range(numbers[0], 128, 128 // len(numbers))] and len(numbers) >= 8
        assert numbers[0] < 16 and numbers[-1] >= 112
    assert not {*parts[0][:, 0].tolist()} & {*parts[1][:, 0].tolist()}

    def seen(measure, run, by=object):
        """The numbers of the windows that a statistic looks at, of each pass with such a decider"""
        walk, found = run.model.walk, []
        def noted(idx, cache=None, decider=None):
            if isinstance(decider, by):
                found.append((idx[:, 0] // 2).tolist())
            return walk(idx, cache, decider)
        run.loss_of_some   # not seen
        run.model.walk = noted
        measure(run)
        return found
    assert {*map(tuple, seen(analyze.causal_score, run))} == {(0, 64)}
    assert seen(analyze.layer_parallel, run_of(windows=(x, x)))[0][-1] >= 112
    removed = seen(analyze.skip_curve, run_of("nag", windows=(x, x)), Without)[:2 * L]
    assert all(numbers[0] < 16 and numbers[-1] >= 112 for numbers in removed)

@torch.no_grad()
def test_could_skip():
    run, a = run_of(), 0.4
    x = torch.stack(streams(run.model, torch.cat([idx for idx, _ in run.some]))[::2])
    growth = x.norm(dim=-1).diff(dim=0)
    needed = torch.ones(L, *growth.shape[1:], dtype=torch.bool)
    for i in range(1, L):
        needed[i] = growth[i] >= a * (growth[:i].amax(0) - growth[:i].amin(0))
    loss = loss_of(run, ByFunction(lambda place, *_: (needed[(place - 1) // 2], None))) - loss_of(run)
    points = analyze.could_skip(run)[""]["by growth"]
    right = [1 - needed.double().mean().item(), run.loss + loss.item()]
    assert points[0] == [0, run.loss] and points[4] == pytest.approx(right) and 0.1 < right[0] < 0.7

def test_a_model_trained_to_skip_skips_in_every_statistic():
    run = run_of("nag", mod_rate=0.3)
    run.model.decider.threshold.fill_(99.0)
    assert flat(analyze.skip_share(run)[""]) == [1] * 2 * L
    assert flat(analyze.update(run)["angle (degrees)"]) == [0] * 2 * L
    curve, dense = analyze.skip_curve(run)[""], loss_of(run, Threshold(-1.0))
    gained = curve["by gain"][0][1] - curve["as trained"][0][1]   # by a run of all
    assert gained == pytest.approx((dense - loss_of(run)).item())

@torch.no_grad()
def test_the_last_blocks_at_once():
    run = run_of()
    idx, targets = run.some[0]
    x = end = streams(run.model, idx)[2 * L - 4]   # before the last two blocks, which both get this
    for block in run.model.blocks[-2:]:
        middle = x + attention_by_hand(block.attn, block.attn_residual.read(x))
        end = end + middle + mlp_by_hand(block.mlp, block.mlp_residual.read(middle)) - x
    loss = F.cross_entropy(run.model.head(end).flatten(0, 1), targets.flatten()).item()
    error = loss - run.model(idx, targets)[1].item()
    assert analyze.layer_parallel(run)[""]["last 2"] == pytest.approx([error])

@pytest.mark.parametrize("residual, lacks", [
    ("pre", "gain direction_similarity norm_confidence depth_attention gate skip_share skip_curve fan_in"),
    ("nag", "depth_attention gate layer_parallel prune_curve"),
    ("hyper", "gain skip_curve could_skip layer_parallel")])
def test_what_a_run_cannot_have_is_one_sentence(residual, lacks):
    run = run_of(residual, repeat="2-3:2", history={0: dict(grad_norms=[0.0] * L)})
    for name in lacks.split():
        with pytest.raises(analyze.NotHere, match="^[^\n]{20,110}$"):
            analyze.STATS[name].measure(run)

def test_too_few_windows_for_some_steps():
    text = dict(table=[[0, 1], [1, 0]], cells=2, most=9)
    about, windows = dict(batch_size=4, tokenizer="bytes"), ids(2, 12, 250).split(6, 1)
    run = analyze.Run(make("pre", n_layer=L, vocab_size=320), about, {}, None, windows, text)
    with pytest.raises(analyze.NotHere, match="--windows"):
        analyze.steps(run)

def test_norms_of_another_number_of_blocks():
    run = run_of("pre", history={0: dict(grad_norms=[1.0] * (L + 1))})
    with pytest.raises(analyze.NotHere, match="no gradient norms"):
        analyze.fan_in(run)

@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analyze")
    (folder / "text.txt").write_text("".join(f"line {i}: {i * i}\n" for i in range(2000)))
    prepare.main(["text", "--input", str(folder / "text.txt"), "--out", str(folder / "data")])
    for name, residual in (("a$x^$b", "nag"), ("_<b>", "review")):
        flags = "--n_layer 2 --n_embd 16 --n_head 2 --block_size 32 --batch_size 4 --max_iters 6"
        train.main(f"--data {folder}/data --out {folder}/{name} --residual {residual} {flags}".split())
    analyze.main(f"{folder}/a$x^$b {folder}/_<b> --out {folder}/out --text </script>&amp;é".split())
    return folder

def test_page(made):
    page, numbers = (made / "out/index.html").read_text(), json.loads((made / "out/numbers.json").read_text())
    assert not re.search("https?://", page) and page.count("</script>") == 2
    report = re.search(r'id="report">(.*?)</script>', page, re.S)[1]
    assert "<" not in report   # No text ends a script.
    report = json.loads(report)
    first = [name for name, stat in report["statistics"].items() if stat["options"].get("first")]
    on_steps = [name for name, stat in report["statistics"].items() if stat["section"] == analyze.STEPS]
    assert len(on_steps) == len(first) == 5 and [*report["statistics"]][:10] == on_steps + first
    assert report["runs"]["a$x^$b"]["color"] != report["runs"]["_<b>"]["color"]
    run, logged = numbers["runs"]["a$x^$b"], runs.read_metrics(made / "a$x^$b")[6]
    assert [run["loss"], run["bits"]] == pytest.approx([logged["val_loss"], logged["val_bpb"]], abs=1e-6)
    for name, stat in report["statistics"].items():
        assert stat["caption"] and stat["title"] and stat["results"] == numbers["statistics"][name]
        assert bool(stat["image"]) == (made / f"out/{name}.png").exists() == (
            name != "depth_attention" and name not in on_steps), name
    assert "only nag" in numbers["statistics"]["gain"]["_<b>"]

def test_a_page_of_others_stays(made, tmp_path):
    (tmp_path / "index.html").write_text("mine")
    with pytest.raises(SystemExit, match="that is none of ours"):
        analyze.main(f"{made}/a$x^$b --only update --out {tmp_path}".split())
    assert (tmp_path / "index.html").read_text() == "mine"

@pytest.mark.skipif(not shutil.which("chromium"), reason="there is no chromium here")
def test_a_browser_shows_it(made):
    # As if somebody went to the first map's only cell on Tab's way, and pressed an arrow.
    keys = """<script>
        const cell = document.querySelector(".map td[tabindex='0']")
        cell.focus()
        cell.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowUp", bubbles: true }))
        document.title = document.querySelector(".says").textContent
        </script></body>"""
    page = (made / "out/index.html").read_text().replace("</body>", keys)
    (made / "keys.html").write_text(page)
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
             f"--user-data-dir={made}/chromium", f"file://{made}/keys.html"]
    dom = subprocess.run(words, capture_output=True, text=True, timeout=100).stdout
    assert re.search("<title>token .*, block 1 MLP: size of the write [0-9.e-]+, ran</title>", dom)
    found = max(dom.split("</script>"), key=lambda part: part.count("<figure "))
    assert found.count("<figure ") == len(analyze.STATS) == found.count("<img ") + 7   # A map is a table, and this
    # is no steps text.
    assert "Start here" in found and "_&lt;b&gt;" in found and "<b>:" not in found
    assert re.search('title="token &quot;/&quot;, block 2 MLP: size of the write [0-9.e-]+, ran"', found)

def test_whatever_metrics_hold_is_one_entry_less(made, tmp_path):
    """Norms that are no numbers, and lines that are none of ours"""
    out, words = tmp_path / "out", ["--only", "loss_curve,prune_curve,fan_in"]
    run = shutil.copytree(made / "a$x^$b", tmp_path / "run")
    lines = {"step": 7, "grad_norms": "x"}, {"step": 7, "grad_norms": 5}, {"step": 7, "grad_norms": [[1]]}
    lines += {"step": 7, "grad_norms": ["x", "y"]}, {"step": "x"}, {"loss": 1.0}, [7], {"step": 7, "loss": "x"}
    kept = (run / "metrics.jsonl").read_text()
    found = []
    for more in "", "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 8, "loss": NaN}\n{"step":':
        (run / "metrics.jsonl").write_text(kept + more)
        analyze.main([str(run), "--out", str(out), *words])
        found.append(json.loads((out / "numbers.json").read_text())["statistics"])
    assert found[0] == found[1] and len(found[0]["fan_in"]["run"][""]["measured"]) == 2

def test_names_do_nothing_to_a_terminal(made, tmp_path, capsys):
    run = shutil.copytree(made / "_<b>", tmp_path / "a\x1b]0;x\x07\r\x9b5n")
    capsys.readouterr()
    for words in ([run], [run, tmp_path / ".." / tmp_path.name / run.name]):   # names, and whole paths
        analyze.main([*map(str, words), "--only", "update", "--out", str(tmp_path / "o\x1b[2Jut")])
        told = capsys.readouterr()
        assert "index.html shows " in told.out and told.err.count("measuring 1 statistics") == len(words)
        assert all(c.isprintable() or c == "\n" for c in told.out + told.err)
    assert (tmp_path / "o\x1b[2Jut" / "index.html").exists()

def test_list_and_bad_input(made, tmp_path, capsys):
    analyze.main(["--list"])
    assert capsys.readouterr().out.count(".\n") == len(analyze.STATS)
    run, text = str(made / "a$x^$b"), tmp_path / "text"
    text.write_text("precious $text$")
    for words in ([run, "--only", "remuval"], [run, "--skip", "1"], [run, "--windows", "-1"], [str(tmp_path)],
                  [run, "--out", str(text)], [run, str(tmp_path / "nowhere")]):
        out = [] if "--out" in words else ["--out", str(tmp_path / "a/figures")]
        with pytest.raises(SystemExit, match=f"^[^\n]*{re.escape(words[-1])}[^\n]*$"):
            analyze.main(words + out)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]   # What is refused leaves nothing behind.
    analyze.main([run, "--only", "depth_map", "--text", str(text), "--out", str(tmp_path / "new")])
    found = json.loads((tmp_path / "new/numbers.json").read_text())["statistics"]["depth_map"]["a$x^$b"]
    assert "".join(found["tokens"]) == text.read_text() == "precious $text$"

@torch.no_grad()
def test_steps_text_by_hand(tmp_path, monkeypatch):
    """Against loops over single targets. A silent block costs nothing, and a model that skips says so."""
    monkeypatch.setattr(prepare, "DOCUMENTS", dict(train=40, val=40))
    prepare.main(["steps", "--out", str(tmp_path / "data"), "--cells", "4", "--most", "3"])
    about = prepare.load_meta(tmp_path / "data")["steps"]
    x, y = prepare.val_windows(tmp_path / "data", 16, 12)
    run = run_of("nag", windows=(x, y))
    with pytest.raises(analyze.NotHere):
        analyze.steps(run)
    run.steps = about
    steps, cell = prepare.steps_asked(torch.cat((x[:, :1], y), 1), 4)
    def shares(logits):
        right = [[] for _ in range(4)]
        for row, t in (steps >= 0).nonzero().tolist():
            if cell[row, t] >= 2:
                right[steps[row, t]].append((logits[row, t].argmax() == y[row, t]).item())
        return [sum(each) / len(each) for each in right]
    for block in run.model.blocks[2].pairs():
        torch.nn.init.zeros_(block[1].c_proj.weight)
    found = analyze.steps(run)["share of right digits"]
    assert found["measured"] == pytest.approx(shares(run.model(x)[0])) and found["guessing"] == [0.1] * 4
    lens, without = analyze.lens_by_steps(run)[""], analyze.removal_by_steps(run)[""]
    assert len(lens) == L + 1 and len(without) == L and lens[-1] == pytest.approx(found["measured"])
    assert without[2] == pytest.approx(found["measured"])
    assert without[0] == pytest.approx(shares(run.model(x, decider=Without({1, 2}))[0]))
    run.decider = Threshold(0.3)
    ran = analyze.depth_by_steps(run)
    assert ran["share of right digits"]["measured"] == pytest.approx(shares(run.model(x, decider=run.decider)[0]))
    loss, parts = run.model(x, y)[1].item(), analyze.known_loss(run)[""]
    share = (steps >= 0).double().mean().item()
    assert share * parts["can be known"][-1] + (1 - share) * parts["the rest"][-1] == pytest.approx(loss, rel=1e-5)
