"""The depth statistics against what they must be for models that we can see through, and the command line."""
import json
import math
import signal
import time

import pytest
import torch
from matplotlib import image
from programs import start
from test_residuals import no_eps  # noqa: F401, a fixture
from test_sample import cli, refused, tiny

import analyze
import prepare
from train import calibrate


def batches(n=2):
    rng = torch.Generator().manual_seed(3)
    return [(torch.randint(40, (2, 24), generator=rng), torch.randint(40, (2, 24), generator=rng))
            for _ in range(n)]


def test_a_sublayer_that_writes_nothing():
    model = tiny("pre")
    with torch.no_grad():
        model.blocks[1].attn.c_proj.weight.zero_()   # sublayer 3
    assert analyze.removal(model, batches())["loss_increase"][2] == 0
    assert analyze.relative_update(model, batches())["mean"][2] == 0
    assert analyze.cosine(model, batches())["mean"][2] == pytest.approx(1, abs=1e-12)
    norms = analyze.stream_norm(model, batches())["mean"]
    assert len(norms) == 7 and norms[2] == norms[3] != norms[4]


def test_removal_is_the_loss_of_a_model_with_a_silenced_sublayer():
    model, data = tiny("pre"), batches()
    found = analyze.removal(model, data)
    loss = lambda: sum(model(x, y)[1].item() for x, y in data) / len(data)
    assert found["full_loss"] == pytest.approx(loss(), abs=1e-12)
    full = loss()
    with torch.no_grad():
        model.blocks[2].mlp.c_proj.weight.zero_()    # sublayer 6
    assert found["loss_increase"][5] == pytest.approx(loss() - full, abs=1e-12)


@torch.no_grad()
def test_nag_geometry(monkeypatch):
    model, data = tiny("nag"), batches(1)
    gains, norms = [], []
    stream = model.ends.start(model.wte(data[0][0]))
    for l, before, _ in model.walk(data[0][0]):
        norms.append(before[1].exp().mean().item())
        if l <= 6:
            gains.append(list(model.sublayers())[l - 1][0].gain(before).square())
    assert analyze.stream_norm(model, data)["mean"] == pytest.approx(norms, rel=1e-6)
    cosines = [(1 + g).rsqrt().mean().item() for g in gains]
    assert analyze.cosine(model, data)["mean"] == pytest.approx(cosines, abs=1e-6)
    assert len(stream) == 2


def test_gradient_norm():
    model, data = tiny("pre"), batches()
    found = analyze.gradient_norm(model, data)["norm"]
    loss = sum(model(x, y)[1] for x, y in data) / len(data)
    block = model.blocks[1]
    params = [*block.mlp.parameters(), *block.mlp_residual.parameters()]
    expected = math.sqrt(sum(g.square().sum().item() for g in torch.autograd.grad(loss, params)))
    assert found[3] == pytest.approx(expected, rel=1e-10) and len(found) == 6


def varied(residual="nag", **options):
    """A tiny model whose gains differ a lot between tokens and sublayers; that of sublayer 5 is negative."""
    model = tiny(residual, **options)
    with torch.no_grad():
        for l, (r, _) in enumerate(model.sublayers(), start=1):
            if residual == "nag":
                r.w.mul_(3)
                r.alpha.copy_(torch.tensor({5: -0.7}.get(l, 0.8 / l ** 0.5)))
    return model


@torch.no_grad()
def by_hand(model, idx, tau=-1.0):
    """
    NAG's forward pass from the equations of the specs, every sublayer run for every token. -> per sublayer
    (direction, m, alpha m, ran), the final log-norm, the logits
    """
    x, C, rows = model.wte(idx), model.config.n_embd, []
    x = x - x.mean(-1, keepdim=True)
    rho = x.square().mean(-1).sqrt()
    r, s, rope = x / rho[..., None], rho.log() + model.ends.g, model.rope(0, idx.shape[1])
    for residual, sublayer in model.sublayers():
        m = (residual.p.softmax(0) * torch.sigmoid(r @ residual.w.T + residual.b)).sum(-1)
        m = m ** torch.nn.functional.softplus(residual.beta)
        a = residual.alpha * m
        rows.append((r, m, a, ran := a.abs() > tau))
        f = sublayer(r, rope)
        f = f - f.mean(-1, keepdim=True)
        u = f - (f * r).sum(-1, keepdim=True) / C * r
        u = u / u.square().mean(-1, keepdim=True).sqrt()
        turned = (r + a[..., None] * u) / (1 + a[..., None] ** 2).sqrt()
        r, s = torch.where(ran[..., None], turned, r), torch.where(ran, s + 0.5 * (1 + a * a).log(), s)
    head = model.lm_head.weight - model.lm_head.weight.mean(1, keepdim=True)
    head = head / head.square().mean(1, keepdim=True).sqrt()
    return rows, s, s.exp()[..., None] * (r @ head.T) / C


def test_gain_and_rotation():
    model, data = varied(), batches()
    gains = [torch.stack([a for _, _, a, _ in by_hand(model, x)[0]]) for x, _ in data]
    gains = torch.cat(gains, 1).flatten(1)
    found = analyze.gain(model, data)
    assert found["mean_abs"] == pytest.approx(gains.abs().mean(1).tolist(), rel=1e-5)
    assert found["mean"] == pytest.approx(gains.mean(1).tolist(), rel=1e-5) and found["mean"][4] < 0
    assert found["alpha"] == pytest.approx([r.alpha.item() for r, _ in model.sublayers()])
    angle = torch.rad2deg(torch.atan(gains.abs())).mean(1)
    found = analyze.rotation(model, data)
    assert found["mean"] == pytest.approx(angle.tolist(), rel=1e-5)
    assert found["cumulative"] == pytest.approx(angle.cumsum(0).tolist(), rel=1e-5)


@torch.no_grad()
def test_rotation_of_a_tensor():
    model, data = tiny("pre"), batches(1)
    model.blocks[1].attn.c_proj.weight.zero_()   # sublayer 3
    found, total = analyze.rotation(model, data), 0.0
    for (_, x, y), mean, cumulative in zip(model.walk(data[0][0]), found["mean"], found["cumulative"]):
        total += torch.cosine_similarity(x, y, dim=-1).clamp(-1, 1).acos().mean().item() * 180 / math.pi
        assert cumulative == pytest.approx(total, abs=1e-4)
    assert found["mean"][2] == 0 and len(found["mean"]) == 6
    # an angle whose cosine is 1 in floating point
    monkey = [(1, torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[1.0, 1e-10]]])), (3, None, None)]
    model.walk, model.blocks = lambda idx: monkey, model.blocks[:1]
    assert analyze.rotation(model, data)["mean"] == pytest.approx([math.degrees(1e-10)], rel=1e-6)


def test_direction_similarity():
    model, data = varied(), batches()
    rows = [by_hand(model, x)[0] for x, _ in data]
    v = [sum((m[..., None] * r).sum((0, 1)) for r, m, *_ in rows) / sum(m.sum() for _, m, *_ in rows)
         for rows in zip(*rows)]
    plain = [sum(r.sum((0, 1)) for r, *_ in rows) for rows in zip(*rows)]
    cosine = lambda v: [[(a @ b / a.norm() / b.norm()).item() for b in v] for a in v]
    found, expected = analyze.direction_similarity(model, data), cosine(v)
    for row, wanted in zip(found["matrix"] + found["unweighted"], expected + cosine(plain), strict=True):
        assert row == pytest.approx(wanted, abs=1e-6)
    apart = lambda first: [1, (expected[first][first + 2] + expected[first + 2][first + 4]) / 2,
                           expected[first][first + 4]]
    assert found["attention_by_distance"] == pytest.approx(apart(0), abs=1e-6)
    assert found["mlp_by_distance"] == pytest.approx(apart(1), abs=1e-6)


def test_norm_confidence(no_eps):  # noqa: F811
    model, data, tokens = varied(), batches(), []
    for idx, targets in data:
        _, s, logits = by_hand(model, idx)
        p = logits.softmax(-1)
        for b in range(2):
            for t in range(24):
                q, target = p[b, t], targets[b, t].item()
                entropy = -sum(x * math.log(x) for x in q.tolist())
                right = float(q.argmax().item() == target)
                tokens.append((s[b, t].item(), -math.log(q[target]), entropy, right))
    s, loss, entropy, correct = map(list, zip(*tokens))
    correlation = lambda x, y: torch.corrcoef(torch.tensor([x, y], dtype=torch.float64))[0, 1].item()
    found = analyze.norm_confidence(model, data)
    assert found["loss"] == pytest.approx(sum(loss) / 96, rel=1e-5)
    assert found["correlation_with_loss"] == pytest.approx(correlation(s, loss), abs=1e-4)
    assert found["correlation_with_entropy"] == pytest.approx(correlation(s, entropy), abs=1e-4)
    assert 0 < sum(correct) < 96
    assert found["correlation_with_correct"] == pytest.approx(correlation(s, correct), abs=1e-4)

    def auroc(score):
        pairs = [(a, b) for a, x in zip(score, correct) for b, y in zip(score, correct) if x > y]
        return sum((a > b + 1e-9) + 0.5 * (abs(a - b) <= 1e-9) for a, b in pairs) / len(pairs)

    assert found["auroc"] == pytest.approx(auroc(s), abs=1e-3)
    assert found["auroc_of_entropy"] == pytest.approx(auroc([-h for h in entropy]), abs=1e-3)
    loss = [x for _, x in sorted(zip(s, loss), key=lambda pair: pair[0])]   # 6 groups of 10, then 4 of 9
    edges = [0, 10, 20, 30, 40, 50, 60, 69, 78, 87, 96]
    means = [sum(loss[a:b]) / (b - a) for a, b in zip(edges, edges[1:])]
    assert found["loss_by_decile"] == pytest.approx(means, rel=1e-4)


def test_auroc_and_correlation():
    score, correct = torch.tensor([3.0, 1.0, 2.0, 2.0, 0.0]).double(), torch.tensor([1, 0, 1, 0, 0]) == 1
    assert analyze.auroc(score, correct) == pytest.approx(5.5 / 6)
    assert analyze.auroc(score, correct | True) is None
    assert analyze.correlation(score, torch.ones(5).double()) is None


def test_skip_share_and_depth_map():
    model, data = varied(), batches()
    tau, realised = calibrate(model, [x for x, _ in data], 0.4)
    ran = torch.cat([torch.stack([ran for *_, ran in by_hand(model, x, tau.max())[0]]) for x, _ in data], 1)
    found = analyze.skip_share(model, data, tau=tau)
    assert found["skipped"] == pytest.approx((1 - ran.double().mean((1, 2))).tolist(), abs=0.02)
    assert found["mean"] == pytest.approx(realised, abs=1e-6) and found["tau"] == tau.tolist()
    assert found["mean"] == pytest.approx(0.4, abs=0.01)
    text = "a\tb $x$\n"
    encoding = prepare.get_tokenizer("bytes")
    with torch.no_grad():
        model.wte.weight = torch.nn.Parameter(model.wte.weight.repeat(8, 1))   # 320 tokens, as bytes need
    found = analyze.depth_map(model, data, tau=tau, text=text)
    idx = torch.tensor([encoding.encode_ordinary(text)])
    wanted = torch.stack([ran[0] for *_, ran in by_hand(model, idx, tau.max())[0]])
    assert found["ran"] == wanted.int().tolist() and found["text"] == text and found["tokens"] == list(text)
    assert len(analyze.depth_map(model, data, text="x" * 99)["tokens"]) == 24   # block_size
    assert analyze.depth_map(model, data)["text"] == encoding.decode(data[0][0][0].tolist())


def test_a_model_with_thresholds_of_its_own():
    model, data = varied(mod_rate=0.3), batches()
    model.tau.fill_(0.21)
    ran = torch.cat([torch.stack([ran for *_, ran in by_hand(model, x, 0.21)[0]]) for x, _ in data], 1)
    found = analyze.skip_share(model, data)
    assert found["skipped"] == pytest.approx((1 - ran.double().mean((1, 2))).tolist(), abs=1e-6)
    assert 0 < found["mean"] < 1 and found["tau"] is None
    model.tau.fill_(9)
    assert analyze.rotation(model, data)["cumulative"] == [0] * 6
    assert analyze.skip_share(model, data)["mean"] == 1


def test_skip_curve():
    model, data = varied(), batches(3)
    windows = [(x[i:i + 1], y[i:i + 1]) for x, y in data for i in range(2)]
    found = analyze.skip_curve(model, data)
    assert found["wanted"] == list(analyze.RATES) and {len(points) for points in found.values()} == {11}
    dense = sum(model(x, y)[1].item() for x, y in windows[1::2]) / 3
    assert found["loss"][0] == pytest.approx(dense, abs=1e-9) and found["realised"][0] == 0
    assert found["flops"][0] == model.flops_per_token()
    for i in (4, 9):
        tau, _ = calibrate(model, [x for x, _ in windows[::2]], found["wanted"][i])
        assert found["tau"][i] == tau.tolist()
        loss, ran = 0.0, []
        for x, y in windows[1::2]:
            rows, _, logits = by_hand(model, x, tau.max())
            loss += torch.nn.functional.cross_entropy(logits[0], y[0]).item() / 3
            ran.append(torch.stack([r[0] for *_, r in rows]))
        ran = torch.cat(ran, 1).double().mean(1)
        assert found["realised"][i] == pytest.approx(1 - ran.mean().item(), abs=0.01)
        assert found["loss"][i] == pytest.approx(loss, abs=0.01)
        assert found["flops"][i] == pytest.approx(model.flops_per_token(share=ran.tolist()), rel=0.01)
    with pytest.raises(ValueError, match="windows"):
        analyze.skip_curve(model, [(windows[0])])


def test_what_a_model_cannot_have():
    data, pre = batches(1), tiny("pre")
    for name in ("gain", "direction_similarity", "norm_confidence", "skip_share", "skip_curve", "depth_map"):
        with pytest.raises(ValueError, match="gain"):
            analyze.STATS[name].measure(pre, data)
    router, kept = tiny("pre", mod="router", mod_rate=0.25), []
    with pytest.raises(ValueError, match="router"):
        analyze.rotation(router, data)
    router(data[0][0], kept=kept)
    assert sum(keep is not None for keep in kept) == 2
    wanted = [0 if keep is None else 1 - keep.double().mean().item() for keep in kept]
    assert analyze.skip_share(router, data)["skipped"] == pytest.approx(wanted, abs=1e-6)
    ran = analyze.depth_map(router, data)["ran"]
    assert ran == [[1] * 24 if keep is None else keep[0].int().tolist() for keep in kept]
    for flags in (dict(value_residual=True), dict(repeat="1:2")):
        for name in ("skip_share", "skip_curve", "depth_map"):
            with pytest.raises(ValueError, match="--value_residual and --repeat"):
                analyze.STATS[name].measure(tiny("nag", **flags), batches(2))


def test_a_removed_sublayer_neither_runs_nor_skips():
    model, data = varied(), batches(2)
    tau, _ = calibrate(model, [x for x, _ in data], 0.3)
    model.remove([2])
    share, ran = analyze.skip_share(model, data, tau), analyze.depth_map(model, data, tau)["ran"]
    there = [skipped for l, skipped in enumerate(share["skipped"], start=1) if l != 2]
    assert share["mean"] == pytest.approx(sum(there) / len(there)) and sum(ran[1]) == 0 < sum(ran[0])
    curve = analyze.skip_curve(model, data)
    assert curve["realised"][0] == 0 and curve["realised"][-3] == pytest.approx(0.5, abs=0.05)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analyze")
    (folder / "text.txt").write_text("".join(f"line {i}: {i * i}\n" for i in range(4000)))
    cli("prepare.py", "text", "--input", folder / "text.txt", "--out", folder / "data")
    for residual in ("pre", "nag"):
        cli("train.py", "--data", folder / "data", "--out", folder / residual, "--residual", residual,
            "--n_layer", 2, "--n_embd", 32, "--n_head", 2, "--block_size", 32, "--batch_size", 8,
            "--max_iters", 20, "--eval_windows", 4)
    return folder


def test_command_line(runs, tmp_path, capsys):
    out = tmp_path / "figures"
    analyze.main([*map(str, (runs / "pre", runs / "nag", "--out", out, "--windows", 6, "--batch_size", 4))])
    told = capsys.readouterr()
    others = {"depth_attention", "gate", "stream_mixing"}   # are about other residuals
    for name in (*(analyze.STATS.keys() - others), "loss_curve", "report-pre", "report-nag", "comparison"):
        height, width, _ = image.imread(out / f"{name}.png").shape
        assert width > 500 and height > 350 and f"{name}.png" in told.out
    report = json.loads((out / "depth.json").read_text())["runs"]
    assert set(report) == {"pre", "nag"}
    gated = {"gain", "direction_similarity", "norm_confidence", "skip_share", "skip_curve", "flops_curve",
             "depth_map"}
    assert set(report["nag"]) == {"config", *analyze.STATS} - others - {"jacobian"}
    assert set(report["pre"]) == (set(report["nag"]) | {"jacobian"}) - gated
    lines = {name for name, stat in analyze.STATS.items() if stat.draw is analyze.draw_stat}
    for run in report.values():
        for name in run.keys() & lines:
            values = next(iter(run[name].values()))
            assert len(values) == 4 + (name == "stream_norm") and all(map(math.isfinite, values))
    nag = report["nag"]
    assert nag["skip_curve"] == nag["flops_curve"] and len(nag["skip_curve"]["loss"]) == 11
    assert len(nag["norm_confidence"]["loss_by_decile"]) == 10
    assert [len(row) for row in nag["direction_similarity"]["matrix"]] == [4] * 4
    assert [len(row) for row in nag["depth_map"]["ran"]] == [32] * 4 == [len(nag["depth_map"]["text"])] * 4
    *lines, other = told.err.splitlines()
    assert len(lines) == 2 and all(line.startswith("analyze.py: pre: left out of") for line in lines)
    assert all(name in " ".join(lines) for name in gated)
    assert other.startswith("analyze.py: nag: left out of jacobian")


def test_only_some(runs, tmp_path):
    two, text = tmp_path / "two", tmp_path / "text.txt"
    text.write_text("line $5: é\n")
    again = cli("analyze.py", runs / "nag", runs / "nag" / ".." / "pre", "--out", two, "--only", "cosine",
                "depth_map", "--text_file", text, "--skip", 0.5, "--windows", 4)
    assert "cosine.png" in again.stdout and not (two / "removal.png").exists()
    found = json.loads((two / "depth.json").read_text())["runs"]["nag"]["depth_map"]
    assert found["text"] == "line $5: é\n" and len(found["tokens"]) == 12
    assert found["tokens"][9:] == ["", "é", "\n"]   # two bytes
    # nobody has it: no figure
    none = cli("analyze.py", runs / "pre", "--out", tmp_path / "none", "--only", "gain")
    assert not (tmp_path / "none" / "gain.png").exists() and "gain" in none.stderr
    assert json.loads((tmp_path / "none" / "depth.json").read_text())["runs"]["pre"].keys() == {"config"}


def test_interrupt(runs, tmp_path):
    out = tmp_path / "figures"   # made before anything is measured
    process = start("analyze.py", runs / "nag", "--out", out)
    while not out.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == ("", "") and process.returncode == 130
    assert not list(out.iterdir())


def test_bad_input(runs, tmp_path):
    assert "no run folder" in refused("analyze.py", runs / "pre", tmp_path)
    assert "removal" in refused("analyze.py", runs / "pre", "--only", "remuval")
    assert "--windows" in refused("analyze.py", runs / "pre", "--windows", 0)
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    bad = {"--skip 1": ["--skip", "1"], "--skip nan": ["--skip", "nan"], "empty": ["--text", ""],
           "No such file": ["--text_file", str(tmp_path / "none")],
           "UTF-8": ["--text_file", str(tmp_path / "latin")],
           "one of them": ["--text", "a", "--text_file", str(tmp_path / "latin")]}
    for told, flags in bad.items():
        with pytest.raises(SystemExit, match=told) as error:
            analyze.main([str(runs / "nag"), *flags])
        assert "\n" not in str(error.value)
    (tmp_path / "file").write_text("precious")
    assert "is a file" in refused("analyze.py", runs / "pre", "--out", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"
    assert "--windows" in refused("analyze.py", runs / "pre", "--window", 3)


# ----------------------------------------------------------------------------- across depth, gates, streams

def random_model(**flags):
    from test_residuals import build, perturb
    return perturb(build(**flags)).eval()


def two_batches():
    from test_residuals import ids
    return [(ids(seed=seed), ids(seed=seed + 5)) for seed in (0, 1)]


@pytest.mark.parametrize("S", [1, 2])
def test_depth_attention(S):
    model = random_model(residual="attnres", attnres_block=S)
    result = analyze.depth_attention(model, two_batches())
    assert result["reads"] == [2, 3, 4, 5, 6, 7] and result["sources"] == list(range(6 // S + 1))
    for l, row in zip(result["reads"], result["matrix"]):
        seen = [x for x in row if x is not None]
        assert sum(seen) == pytest.approx(1) and len(seen) == -(-(l - 1) // S) + 1
        query = model.ends.query[l - 2] * model.ends.key_gain[l - 2]
        mean = 0.0
        for idx, _ in two_batches():
            stream = {number: stream for number, stream, _ in model.walk(idx)}[l]
            keys = torch.stack([v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt()
                                for v in stream.sources])
            mean = mean + (keys @ query).softmax(0).mean((1, 2)) / 2
        assert seen == pytest.approx(mean.tolist())
    assert result["received"][0] == pytest.approx(sum(row[0] for row in result["matrix"]))
    uniform = random_model(residual="attnres")
    with torch.no_grad():
        uniform.ends.query.zero_()
    assert analyze.depth_attention(uniform, two_batches())["entropy"] == pytest.approx([1] * 6)


def test_gate_statistics():
    model = random_model(residual="review")
    result = analyze.gate(model, two_batches())
    assert all(sum(row) == pytest.approx(1) for row in result["histogram"])
    (h, after), expected = [list(model.walk(two_batches()[0][0]))[2][i] for i in (1, 2)], []
    u = model.blocks[1].attn(model.blocks[1].attn_residual.read(h), model.rope(0, 12))
    r = model.blocks[1].attn_residual.gate(h, u)
    assert torch.allclose(h + r * u, after)
    for idx, _ in two_batches():
        h = list(model.walk(idx))[2][1]
        u = model.blocks[1].attn(model.blocks[1].attn_residual.read(h), model.rope(0, 12))
        expected.append(model.blocks[1].attn_residual.gate(h, u).mean().item())
    assert result["mean"][2] == pytest.approx(sum(expected) / 2)
    constant = analyze.gate(random_model(residual="review", gate_input="none"), two_batches())
    assert constant["mean"] == pytest.approx([0.5] * 6) and constant["histogram"][0][10] == 1
    assert not model.blocks[0].attn._forward_hooks
    shared = random_model(residual="review", share_every=1)
    own = random_model(residual="review")
    for mine, theirs in zip(own.blocks, shared.blocks):
        mine.load_state_dict(theirs.state_dict())
    for name in ("wte", "lm_head", "ends"):
        getattr(own, name).load_state_dict(getattr(shared, name).state_dict())
    assert analyze.gate(shared, two_batches())["mean"] == analyze.gate(own, two_batches())["mean"]
    shared.remove([1])
    with pytest.raises(ValueError, match="removed"):
        analyze.gate(shared, two_batches())
    assert not shared.blocks[0].attn._forward_hooks


def test_stream_mixing_statistics():
    model = random_model(residual="hyper", hyper_kind="hc")
    result = analyze.stream_mixing(model, two_batches())
    means = 0.0
    for idx, _ in two_batches():
        before = list(model.walk(idx))[3][1]
        means = means + model.blocks[1].mlp_residual.gain(before)[2].mean((0, 1)) / 2
    assert torch.allclose(torch.tensor(result["res"][3], dtype=torch.float64), means)
    product = torch.eye(4, dtype=torch.float64)
    for res in result["res"]:
        product = torch.tensor(res, dtype=torch.float64) @ product
    assert torch.allclose(torch.tensor(result["product"], dtype=torch.float64), product)
    assert result["spectral_norm"] == pytest.approx(torch.linalg.svdvals(product)[0].item())


@pytest.mark.parametrize("statistic", ["depth_attention", "gate", "stream_mixing"])
def test_statistics_of_other_residuals_say_why_not(statistic):
    with pytest.raises(ValueError, match="only|no gate"):
        getattr(analyze, statistic)(random_model(), two_batches())


@pytest.mark.parametrize("flags", [dict(residual="attnres"), dict(residual="attnres", attnres_block=2),
                                   dict(residual="review", gate_range=2.0), dict(residual="hyper"),
                                   dict(residual="siamese"), dict(residual="denseformer"),
                                   dict(norm="crms"), dict(value_residual=True), dict(x0=True)], ids=str)
def test_every_figure_of_a_residual(flags, tmp_path):
    model, drawn = random_model(**flags), 0
    for name, stat in analyze.STATS.items():
        try:
            result = stat.measure(model, two_batches())
        except ValueError:
            continue
        json.dumps(result, allow_nan=False)
        analyze.save_figure(tmp_path / f"{name}.png", stat, {"a": result, "b": result, "c": None})
        drawn += (tmp_path / f"{name}.png").stat().st_size > 10000
    assert drawn >= 6
