"""The statistics against what they must be for models that we can see through, the page, the command line."""
import json, re, shutil, subprocess
from types import SimpleNamespace

import pytest, torch
import torch.nn.functional as F
import analyze, prepare, runs, train
from conftest import attention_by_hand, ids, make, mlp_by_hand, streams, sublayers_by_hand, unit
from model import by_threshold, without

L = 4   # blocks

def run_of(residual="pre", history=None, text="", mod_rate=0.0, **config):
    """Twelve windows: `some` and `others` are three batches of one."""
    model = make(residual, mod_rate=mod_rate, n_layer=L, vocab_size=320, **config)
    settings = dict(batch_size=4, block_size=16, mod_rate=mod_rate, tokenizer="bytes", residual=residual)
    windows = ids(12, 12, V=256), ids(12, 12, V=256, seed=1)
    return analyze.Run(model, settings, history or {}, SimpleNamespace(text=text, skip=0.4), windows)

def loss_of(run, decide=None):
    """On every fourth window, the mean per token"""
    idx, targets = (torch.cat(part)[::4] for part in zip(*run.batches))
    return run.model(idx, targets, decide=decide)[1]

@torch.no_grad()
def increase(run, numbers):
    """By how much the loss rises without the sublayers of these numbers"""
    return (loss_of(run, without(numbers)) - loss_of(run)).item()

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
        m = (residual.p.softmax(0) * torch.sigmoid(r @ residual.w.T + residual.b)).sum(-1, keepdim=True)
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

@pytest.mark.parametrize("block", [1, 2])
def test_depth_attention(block):
    run, l = run_of(f"attnres:block={block}"), 5
    ends, rows = run.model.ends, analyze.depth_attention(run)[""]
    sources = [v for v, _ in list(run.model.walk(idx_of(run)))[l - 1][1][1].values()]
    scores = torch.stack([unit(v) for v in sources]) @ (ends.query[l - 2] * ends.key_weight[l - 2])
    assert rows[l - 2][:4 // block + 1] == pytest.approx(scores.softmax(0).mean((1, 2)).tolist())
    assert len(rows) == 2 * L and all(w != w for w in rows[l - 2][len(sources):])   # nan

@pytest.mark.parametrize("residual", ["review", "convex", "highway"])
def test_gates(residual):
    run = run_of(residual)
    block, h = run.model.blocks[1].attn_residual, streams(run.model, idx_of(run))[2]
    seen = {"h": h, "u": attention_by_hand(run.model.blocks[1].attn, block.norm(h))}
    r = (sum(unit(seen[name], 1e-5) @ W.T for name, W in block.W.items()) + block.b).sigmoid()
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
    run, idx, kept = run_of("nag", text=text), torch.tensor([[*text.encode()][:16]]), []
    found = analyze.depth_map(run)
    assert found["tokens"][:8] == ["a", "\t", "", "é", "$", "x", "$", "\n"] and len(found["tokens"]) == 16
    gains = [residual.gain(before).abs() for residual, _, before, *_ in run.visits(idx, run.decide)]
    assert found["size"] == torch.stack(gains)[:, 0, :, 0].tolist()
    run.model(idx, decide=run.decide, kept=kept)
    assert found["ran"] == [[True] * 16 if keep is None else keep[0].tolist() for keep in kept]
    run = run_of(text=text)   # has no gain
    x = torch.stack(streams(run.model, idx))[:, 0]
    found = torch.tensor(analyze.depth_map(run)["size"])
    torch.testing.assert_close(found, (x.diff(dim=0).norm(dim=-1) / x[:-1].norm(dim=-1)).float())

def test_skipping():
    run, kept, ran = run_of("nag"), [], []
    run.model(torch.cat([idx for idx, _ in run.some]), decide=run.decide, kept=kept)
    shares = [0.0 if keep is None else 1 - keep.double().mean().item() for keep in kept]
    assert flat(analyze.skip_share(run)[""]) == pytest.approx(shares, abs=1e-6) and sum(shares) > 0.8
    usual = run.loss_with
    run.loss_with = lambda decide: ran.append(analyze.shares_ran(run, decide)) or usual(decide)
    curve = analyze.skip_curve(run)[""]
    flops = [flops for flops, _ in curve["by gain"]]
    assert curve["by gain"][0] == pytest.approx([run.model.flops_per_token(), run.loss])
    assert flops == sorted(flops, reverse=True) == [flops for flops, _ in curve["random tokens"]]
    for by_gain, random, removed, rate in zip(ran[-18::3], ran[-17::3], ran[-16::3], (1, 2, 3, 4, 5, 6)):
        assert random == pytest.approx(by_gain, abs=0.25)   # As many tokens skip each sublayer.
        assert sum(removed) == 2 * L - round(2 * L * rate / 10) and {*removed} <= {0, 1}
    alone = [analyze.mean_loss(run.model, run.others[:1], analyze.without({l})) for l in range(1, 2 * L + 1)]
    assert ran[-16].index(0) == alone.index(min(alone))

@torch.no_grad()
def test_could_skip():
    run, a = run_of(), 0.4
    x = torch.stack(streams(run.model, torch.cat([idx for idx, _ in run.some]))[::2])
    growth = x.norm(dim=-1).diff(dim=0)
    needed = torch.ones(L, *growth.shape[1:], dtype=torch.bool)
    for i in range(1, L):
        needed[i] = growth[i] >= a * (growth[:i].amax(0) - growth[:i].amin(0))
    loss = loss_of(run, lambda l, *_: (needed[(l - 1) // 2], None)) - loss_of(run)
    points = analyze.could_skip(run)[""]["by growth"]
    right = [1 - needed.double().mean().item(), run.loss + loss.item()]
    assert points[0] == [0, run.loss] and points[4] == pytest.approx(right) and 0.1 < right[0] < 0.7

def test_a_model_trained_to_skip_skips_in_every_statistic():
    run = run_of("nag", mod_rate=0.3)
    run.model.tau.fill_(99.0)
    assert flat(analyze.skip_share(run)[""]) == [1] * 2 * L
    assert flat(analyze.update(run)["angle (degrees)"]) == [0] * 2 * L
    curve, dense = analyze.skip_curve(run)[""], loss_of(run, by_threshold([-1.0] * 2 * L))
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
    assert len(first) == 5 and first == [*report["statistics"]][:5]
    assert report["runs"]["a$x^$b"]["color"] != report["runs"]["_<b>"]["color"]
    run, logged = numbers["runs"]["a$x^$b"], runs.read_metrics(made / "a$x^$b")[6]
    assert [run["loss"], run["bits"]] == pytest.approx([logged["val_loss"], logged["val_bpb"]], abs=1e-6)
    for name, stat in report["statistics"].items():
        assert stat["caption"] and stat["title"] and stat["results"] == numbers["statistics"][name]
        assert bool(stat["image"]) == (made / f"out/{name}.png").exists() == (name != "depth_attention"), name
    assert "only nag" in numbers["statistics"]["gain"]["_<b>"]

@pytest.mark.skipif(not shutil.which("chromium"), reason="there is no chromium here")
def test_a_browser_shows_it(made):
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
             f"--user-data-dir={made}/chromium", f"file://{made}/out/index.html"]
    found = subprocess.run(words, capture_output=True, text=True, timeout=100).stdout.split("</script>")[-1]
    assert found.count("<figure ") == len(analyze.STATS) == found.count("<img ") + 2   # a map is a table
    assert "Start here" in found and "_&lt;b&gt;" in found and "<b>:" not in found
    assert re.search('title="token &quot;/&quot;, block 2 MLP: size of the write [0-9.e-]+, ran"', found)

def test_list_and_bad_input(made, tmp_path, capsys):
    analyze.main(["--list"])
    assert capsys.readouterr().out.count(".\n") == len(analyze.STATS)
    run, text = str(made / "a$x^$b"), tmp_path / "text"
    text.write_text("precious $text$")
    for words in ([run, "--only", "remuval"], [run, "--skip", "1"], [run, "--windows", "-1"], [str(tmp_path)],
                  [run, "--out", str(text)]):
        with pytest.raises(SystemExit, match=f"^[^\n]*{re.escape(words[-1])}[^\n]*$"):
            analyze.main(words)
    analyze.main([run, "--only", "depth_map", "--text", str(text), "--out", str(tmp_path / "new")])
    found = json.loads((tmp_path / "new/numbers.json").read_text())["statistics"]["depth_map"]["a$x^$b"]
    assert "".join(found["tokens"]) == text.read_text() == "precious $text$"
