"""The statistics of the depth report and the pruning methods: identities of the specs, values, real runs."""
import json
import math

import pytest
import torch
import torch.nn.functional as F

import analyze
import sample
from test_residuals import build, ids, perturb
from test_sample import cli, refused

SIZE = dict(n_layer=4, n_head=2, n_embd=32)
BATCHES = [(ids(2, 12, seed=seed), ids(2, 12, seed=seed + 5)) for seed in (0, 1)]


def model_of(**flags):
    return perturb(build(**{**SIZE, **flags}), 0.1).eval()


def zeroed(block=1, **flags):
    model = model_of(**flags)
    with torch.no_grad():
        model.blocks[block].attn.c_proj.weight.zero_()
        model.blocks[block].mlp.c_proj.weight.zero_()
    return model


def test_a_zeroed_block_contributes_nothing():
    model = zeroed()
    contribution = analyze.contribution(model, BATCHES)
    assert contribution["block"][1] == contribution["attention"][1] == contribution["mlp"][1] == 0
    assert min(contribution["block"][::2]) > 1e-3
    assert abs(analyze.block_removal(model, BATCHES)["loss_increase"][1]) < 1e-12
    score = analyze.causal_score(model, BATCHES)
    for key in ("matrix", "future"):
        assert score[key][1][2:] == [0, 0] and score[key][0][2] > 1e-4
        assert all(score[key][s][l] is None for s in range(4) for l in range(s + 1))
    assert analyze.angular_distance(model, BATCHES)["matrix"][1][2] < 1e-7
    assert analyze.jacobian(model, BATCHES)["distance"][1] < 1e-9
    assert sample.stays(model, BATCHES, 2)[1] < 1e-12


def test_a_repeated_block_is_removed_at_one_place_or_at_all():
    model = model_of(repeat="2-3:2")   # blocks 1, 2, 3, 2, 3, 4
    found, full = analyze.block_removal(model, BATCHES), analyze.loss_without(model, BATCHES)
    without = lambda *places: analyze.loss_without(model, BATCHES,
                                                   {l for i in places for l in (2 * i - 1, 2 * i)})
    assert found["all_uses"] == [without(*places) - full for places in ((1,), (2, 4), (3, 5), (6,))]
    assert found["loss_increase"] == [without(i) - full for i in range(1, 7)]
    assert "all_uses" not in analyze.block_removal(model_of(), BATCHES)


@pytest.mark.parametrize("residual", ["pre", "nag", "siamese"])
def test_causal_scores(residual):
    """By hand: without block 0, and with it left out for the first six of twelve tokens."""
    model, (idx, _) = model_of(residual=residual), BATCHES[0]
    after = lambda **how: analyze.vectors(model, analyze.boundaries(model, idx, **how)).diff(dim=0)
    full, without = after(), after(skip=0)
    with torch.no_grad():
        walk = {l: before for l, before, _ in model.walk(idx, without={1, 2})}
    ours = analyze.vectors(model, [walk[1], walk[3], walk[5], walk[7], walk[9]]).diff(dim=0)
    assert torch.allclose(without, ours, atol=1e-12)
    expected = ((without - full)[3].norm(dim=-1) / full[3].norm(dim=-1)).mean().item()
    result = analyze.causal_score(model, BATCHES)
    assert result["matrix"][0][3] == pytest.approx(expected)
    half = after(skip=0, tokens=torch.arange(12) < 6)
    assert half[0, :, :6].abs().max() < 1e-12 and torch.allclose(half[0, :, 6:], full[0, :, 6:])
    expected = ((half - full)[3, :, 6:].norm(dim=-1) / full[3, :, 6:].norm(dim=-1)).mean().item()
    assert result["future"][0][3] == pytest.approx(expected)
    assert result["future"][0][3] < result["matrix"][0][3]


@pytest.mark.parametrize("residual", ["pre", "post", "nag", "attnres", "hyper", "denseformer"])
def test_logit_lens_ends_at_the_models_loss(residual):
    model = model_of(residual=residual)
    lens = analyze.logit_lens(model, BATCHES)
    loss = sum(model(*batch)[1].item() for batch in BATCHES) / 2
    assert lens["loss"][-1] == pytest.approx(loss, rel=1e-9)
    assert lens["kl_from_final"][-1] == pytest.approx(0, abs=1e-12) and lens["top5_overlap"][-1] == 1
    assert min(lens["kl_from_final"][:-1]) > 0 and len(lens["loss"]) == 5
    assert all(0 <= x <= 1 for x in lens["calibration_error"])


def test_angles_and_swaps():
    model = model_of()
    matrix = torch.tensor(analyze.angular_distance(model, BATCHES)["matrix"])
    assert torch.equal(matrix, matrix.T) and not matrix.diagonal().any() and matrix.max() <= 1
    swaps = analyze.permutation_score(model, BATCHES)["matrix"]
    assert all(swaps[i][i] == 0 and swaps[i][0] == swaps[0][i] for i in range(4))
    other = model_of()
    other.blocks[1], other.blocks[3] = other.blocks[3], other.blocks[1]
    loss, swapped = (m(*BATCHES[0])[1].item() for m in (model, other))
    assert swaps[1][3] == pytest.approx(abs(swapped - loss) / loss)
    twins = model_of()
    twins.blocks[2].load_state_dict(twins.blocks[1].state_dict())
    assert analyze.permutation_score(twins, BATCHES)["matrix"][1][2] < 1e-14


def test_kurtosis():
    one_hot = torch.zeros(768, dtype=torch.float64)
    one_hot[5] = 1
    assert analyze.excess_kurtosis(one_hot).item() == pytest.approx(763, abs=1)
    gaussian = torch.randn(10 ** 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert analyze.excess_kurtosis(gaussian).item() == pytest.approx(0, abs=0.02)


def test_ranks():
    rng = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(50, 8, generator=rng, dtype=torch.float64))[0]
    assert analyze.ranks_of(q) == pytest.approx((8, 8))
    assert analyze.ranks_of(q[:, :1] @ q[:1, :8]) == pytest.approx((1, 1))
    assert analyze.spearman([1, 2, 3, 4], [10, 20, 30, 25]) == pytest.approx(0.8)
    assert analyze.ranks([3, 1, 3]).tolist() == [1.5, 0, 1.5]


@pytest.mark.parametrize("alpha", [2.5, 3.5])
def test_power_law_of_pareto_data(alpha):
    u = torch.rand(5000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, error, n = analyze.power_law((1 - u) ** (-1 / (alpha - 1)))
    assert found == pytest.approx(alpha, rel=0.02) and error == pytest.approx((found - 1) / n ** 0.5)


def test_a_gaussian_matrix_has_no_tail():
    model = build(n_layer=2, n_embd=128, n_head=2)
    assert analyze.heavy_tail(model, BATCHES)["alpha"] == [None] * 4
    with torch.no_grad():
        W = model.blocks[1].mlp.c_fc.weight
        W += 0.5 * W.std() * torch.linspace(0, 1, 128)[None, :] ** 20 * 40
    assert [a is None for a in analyze.heavy_tail(model, BATCHES)["alpha"]] == [True, True, True, False]


def test_rounding():
    model = model_of()
    before = [p.clone() for p in model.parameters()]
    result = analyze.quantisation(model, BATCHES)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert result["bits"] == [8, 6, 4, 3]
    assert abs(result["loss_increase"][0]) < abs(result["loss_increase"][3])
    W = torch.randn(7, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert (analyze.rounded(W, 24) - W).abs().max() < 1e-6
    assert len(analyze.rounded(W, 3)[0].unique()) <= 7
    assert torch.allclose(analyze.rounded(W, 3).abs().amax(1), W.abs().amax(1))


def seen_by(model, idx, l):
    """What the queries of block l attend to, mean of sequences and heads, one softmax at a time: (T, T)"""
    (B, T), walk = idx.shape, list(model.walk(idx))
    q, k, _ = model.blocks[l].attn.qkv(model.blocks[l].attn_residual.read(walk[2 * l][1]), model.rope(0, T))
    seen = torch.zeros(T, T, dtype=q.dtype)
    for b in range(B):
        for h in range(q.shape[2]):
            for t in range(T):
                seen[t, :t + 1] += (q[b, t, h] @ k[b, :t + 1, h].T / q.shape[3] ** 0.5).softmax(-1)
    return seen.detach() / (B * q.shape[2])


def test_attention_sink():
    model = model_of()
    seen = [seen_by(model, idx, 2)[1:] for idx, _ in BATCHES]
    for right, batches in (seen[0], BATCHES[:1]), (sum(seen) / 2, BATCHES):
        found = analyze.attention_sink(model, batches)
        assert found["share"][2] == pytest.approx(right[:, 0].mean().item())
        assert found["first_four"][2] == pytest.approx(right[:, :4].sum(1).mean().item())
        assert found["own"][2] == pytest.approx(right.diagonal(1).mean().item())


def test_attention_map():
    model = model_of()
    right = sum(seen_by(model, idx, l) for idx, _ in BATCHES for l in range(4)) / 8
    matrix = analyze.attention_map(model, BATCHES)["matrix"]
    assert len(matrix) == 12 and matrix[0][0] == 1
    for t, row in enumerate(matrix):
        assert row[:t + 1] == pytest.approx(right[t, :t + 1].tolist(), rel=0.01)
        assert row[t + 1:] == [None] * (11 - t)
    long = torch.randint(64, (1, 80), generator=torch.Generator().manual_seed(0))
    assert len(analyze.attention_map(model_of(block_size=80), [(long, long)])["matrix"]) == 64   # positions


def test_weight_outliers():
    model = model_of(residual="nag")
    with torch.no_grad():
        model.blocks[1].mlp.c_fc.weight.normal_().add_(0.5)
        model.blocks[1].mlp.c_fc.weight[3, 4] = 30
    found = analyze.weight_outliers(model, BATCHES)
    W = model.blocks[1].mlp.c_fc.weight.detach()
    at = found["matrix"].index("1.mlp.c_fc.weight")
    assert len(found["matrix"]) == 16 and at == 6
    assert found["largest"][at] == pytest.approx((30 / W.square().mean() ** 0.5).item())
    assert found["off_centre"][at] == pytest.approx((W.mean() / W.std()).item(), rel=1e-3)
    assert found["excess_kurtosis"][at] > 10 > 1 > max(map(abs, found["excess_kurtosis"][:6]))


def test_norm_growth_of_a_fresh_model():
    result = analyze.norm_growth(model_of(n_layer=12), BATCHES)
    assert result["initial"][0] == 1 and len(result["initial"]) == 13
    assert result["lower"][12] == 7 and result["upper"][12] == 19
    assert sum(result["share"]) == pytest.approx(1) and 1 <= result["effective_sublayers"] <= 24
    even = analyze.norm_growth(model_of(residual="post"), BATCHES)["initial"]
    assert max(even[1:]) == pytest.approx(min(even[1:]))


def test_fan_in_fits_its_own_law():
    L = 4
    norms = torch.cat((torch.zeros(2 * L), 3 + 2.0 * torch.arange(L, 0, -1))).double()
    history = [dict(step=5), dict(step=9, grad_norms=norms.tolist())]
    result = analyze.fan_in(model_of(), BATCHES, norms, history)
    assert result["r_squared"] == pytest.approx(1) and result["rank_correlation"] == pytest.approx(1)
    assert result["share"] == pytest.approx(result["fit"]) and result["stability"] == pytest.approx([1])
    count = torch.tensor([10.0, 6, 3, 1])
    deep = torch.cat((torch.zeros(2 * L), count)).double()
    assert analyze.fan_in(model_of(deep_supervision=True), BATCHES, deep)["r_squared"] == pytest.approx(1)
    with pytest.raises(ValueError, match="warm-up"):
        analyze.fan_in(model_of(), BATCHES)


# ----------------------------------------------------------------------------- pruning

def test_scores():
    model = model_of()
    norms = torch.arange(12).double()
    assert sample.BLOCK_SCORES["cfp"](model, BATCHES, norms).tolist() == [8, 9, 10, 11]
    magnitude = sample.BLOCK_SCORES["magnitude"](model, BATCHES, None)
    right = sum(p.abs().sum().item() for p in model.blocks[2].parameters())
    assert magnitude[2].item() == pytest.approx(right)
    taylor = sample.BLOCK_SCORES["taylor"](model, BATCHES, None)
    model.zero_grad()
    sum(model(*batch)[1] for batch in BATCHES).backward()
    right = sum((p * p.grad).abs().sum().item() for p in model.blocks[2].parameters())
    assert taylor[2].item() == pytest.approx(right)
    z = [before for _, before, _ in model.walk(BATCHES[0][0])]
    cos = F.cosine_similarity(z[4], z[6], dim=-1).mean().item()
    assert sample.stays(model, BATCHES[:1], 2)[2].item() == pytest.approx(1 - cos)
    angle = F.cosine_similarity(z[2][:, -1], z[6][:, -1], dim=-1).arccos().mean().item() / math.pi
    assert sample.span_distance(model, BATCHES[:1], 2)[1].item() == pytest.approx(angle)
    truth = sample.BLOCK_SCORES["loss"](model, BATCHES, None)
    assert truth[1].item() == pytest.approx(sample.loss_without(model, BATCHES, {3, 4}))


@pytest.mark.parametrize("method", sample.PRUNE_METHODS)
def test_methods_choose_what_a_zeroed_block_leaves(method):
    model, norms = zeroed(2), torch.tensor([1.0] * 8 + [3, 4, 0, 5]).double()
    gone = sample.to_remove(method, 1, model, BATCHES, norms)
    expected = dict(attention={5}, mlp={6}, sublayer={5}, reverse={7, 8}).get(method, {5, 6})
    if method not in ("random",):
        assert gone == expected
    assert len(sample.to_remove(method, 2, model, BATCHES, norms)) == (2 if method in sample.SUBLAYERS else 4)


def test_prune_curve():
    model = zeroed(2)
    result = analyze.prune_curve(model, BATCHES, torch.tensor([1.0] * 8 + [3, 4, 0, 5]).double())
    measured = [tuple(torch.cat(part)[1::2] for part in zip(*BATCHES))]
    full = sample.loss_without(model, measured)
    for name, losses in result["loss"].items():
        assert losses[0] == pytest.approx(full) and len(losses) == 4, name
        if name in ("cfp", "influence", "loss", "span"):
            assert losses[1] == pytest.approx(full, abs=1e-12)
    assert result["rank_correlation"]["loss"] > 0 and set(result["loss"]) == {*sample.BLOCK_SCORES, "span"}
    # a ranking of the data's is as stable as the halves agree; one that sees no data has nothing to be stable
    assert set(result["stability"]) == {"taylor", "influence", "loss", "span", *sample.SUBLAYERS}
    # the true loss, on either half: a rank correlation and a stability in one
    assert result["stability"]["loss"] == result["rank_correlation"]["loss"]
    scores = [[3, 1, 4, 2], [1, 2, 4, 3]]   # by hand: 1 - 6 (2^2 + 1 + 0 + 1) / (4 (4^2 - 1)) = 0.4
    assert analyze.spearman(*scores) == pytest.approx(0.4)


def test_blocks_removed_before_are_not_chosen_again():
    """They have the lowest of scores: nothing changes in them, and no loss pulls on them."""
    model, norms = model_of(), torch.arange(12).double()
    model.remove({3, 4})
    for method in sample.PRUNE_METHODS:
        if method != "span":
            assert not sample.to_remove(method, 2, model, BATCHES, norms) & {3, 4}, method
    for name, losses in analyze.prune_curve(model, BATCHES, norms)["loss"].items():
        assert len(losses) == 3 and (name == "span" or losses[0] != losses[1]), name


def test_cfp_of_blocks_of_unequal_size():
    """The gradient per weight counts: blocks that are pulled alike rank alike, be they wide or narrow."""
    model = model_of(taper="linear", taper_on="both", n_head=8, n_embd=64)
    sizes = torch.tensor([sum(p.numel() for p in block.parameters()) for block in model.blocks])
    norms = torch.cat((torch.zeros(8), sizes.sqrt())).double()
    scores = sample.BLOCK_SCORES["cfp"](model, BATCHES, norms)
    assert sizes[0] > 1.5 * sizes[-1] and scores.max().item() == pytest.approx(scores.min().item())


def test_a_block_with_x0_is_measured_from_what_its_attention_finds():
    model = model_of(x0=True)
    result, (idx, _) = analyze.contribution(model, BATCHES[:1]), BATCHES[0]
    walk = list(model.walk(idx))
    (_, before, _), (_, _, after) = walk[2:4]   # block 2
    assert result["block"][1] == pytest.approx(analyze.relative(before, after).mean().item())
    assert not torch.equal(walk[1][2], before)   # the shortcut lies between


def test_stability_compares_disjoint_halves(monkeypatch):
    """Scores that depend on the windows in a known way have a known Spearman's."""
    model, both = model_of(), analyze.halves(BATCHES)
    assert [len(half) for half in both] == [1, 1]
    x = torch.cat([idx for idx, _ in BATCHES])
    assert torch.equal(both[0][0][0], x[::2]) and torch.equal(both[1][0][0], x[1::2])
    assert len(analyze.halves([(x[:1], x[:1])] * 3)[1]) == 1         # the odd window is left out
    first = lambda batches: torch.equal(batches[0][0], x[::2])
    score = lambda model, batches, norms: torch.tensor([3.0, 1, 4, 2] if first(batches) else [1.0, 2, 4, 3])
    monkeypatch.setitem(sample.BLOCK_SCORES, "influence", score)
    stability = analyze.prune_curve(model, BATCHES)["stability"]
    assert stability["influence"] == pytest.approx(0.4)
    # both halves alike
    same = [(torch.cat([idx[:1]] * 2), torch.cat([y[:1]] * 2)) for idx, y in BATCHES[:1]]
    assert all(rho == pytest.approx(1) for rho in analyze.prune_curve(model, same)["stability"].values())
    with pytest.raises(ValueError, match="two --windows"):
        analyze.prune_curve(model, [(x[:1], x[:1])])


# ----------------------------------------------------------------------------- LLM-Drop

@pytest.mark.parametrize("residual", ["pre", "nag", "post", "attnres", "hyper"])
def test_drop_curve_is_the_loss_of_a_pruned_model(residual):
    result = analyze.drop_curve(model_of(residual=residual), BATCHES)
    chosen, measured = analyze.halves(BATCHES)
    for name, method in (("attention", "attention"), ("mlp", "mlp"), ("block", "influence")):
        curve = result[name]
        # nothing removed: the loss itself, bit for bit
        assert len(curve) == 3 and curve[0] == sample.loss_without(model_of(residual=residual), measured)
        for k in (1, 2):
            pruned = model_of(residual=residual)
            gone = sample.to_remove(method, k, pruned, chosen, None)
            pruned.remove(gone)
            assert len(gone) == (2 * k if name == "block" else k)
            assert {l % 2 for l in gone} == dict(attention={1}, mlp={0}, block={0, 1})[name]
            assert curve[k] == pytest.approx(sum(pruned(*b)[1].item() for b in measured), rel=1e-12)


def test_dropping_what_is_zero_costs_nothing():
    model = zeroed(2)
    result = analyze.drop_curve(model, BATCHES)
    for name in ("attention", "mlp", "block"):
        scores = result["scores"][name]
        assert scores[2] < 1e-12 and scores.index(min(scores)) == 2
        assert result[name][1] == result[name][0] != result[name][2]


def test_a_dropped_sublayer_does_not_run():
    """No mask: its weights may be anything, and it is not called."""
    model, calls = model_of(), []
    measured = analyze.halves(BATCHES)[1]
    full, curve = sample.loss_without(model, measured), analyze.drop_curve(model, BATCHES)["attention"]
    gone = sample.to_remove("attention", 2, model, analyze.halves(BATCHES)[0], None)
    with torch.no_grad():
        for l, (_, sublayer) in enumerate(model.sublayers(), start=1):
            if l in gone:
                for p in sublayer.parameters():
                    p.fill_(math.nan)
    assert math.isnan(sample.loss_without(model, measured))
    assert sample.loss_without(model, measured, gone) == curve[2] != full
    model = model_of()
    for _, sublayer in model.sublayers():
        sublayer.register_forward_hook(lambda *_: calls.append(1))
    analyze.drop_curve(model, BATCHES)
    # three scores, then k = 0, 1, 2 without k attentions, k MLPs, k blocks of two
    assert len(calls) == 3 * 8 + (8 + 7 + 6) + (8 + 7 + 6) + (8 + 6 + 4)


def test_calibration_error_counts_all_windows_at_once():
    """A bin's hits and misses may lie in different windows: by hand, token for token."""
    model = model_of()
    for depth in (0, 4):
        gaps = [0.0] * 15
        for idx, targets in BATCHES:
            with torch.no_grad():
                stream = analyze.boundaries(model, idx)[depth]
                p = model.head(model.ends.finish(stream)).double().softmax(-1).flatten(0, 1)
            for row, target in zip(p, targets.flatten().tolist()):
                top = row.max().item()
                gaps[min(14, int(top * 15))] += (row.argmax().item() == target) - top
        right = sum(map(abs, gaps)) / 48
        for batches in (BATCHES, [tuple(torch.cat(part) for part in zip(*BATCHES))]):
            assert analyze.logit_lens(model, batches)["calibration_error"][depth] == pytest.approx(right)


# ----------------------------------------------------------------------------- real runs

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained run, with gradient norms."""
    folder = tmp_path_factory.mktemp("report")
    cli("prepare.py", "text", "--input", "train.py", "model.py", "--out", folder / "data")
    cli("train.py", "--data", folder / "data", "--out", folder / "run", "--n_layer", 3, "--n_embd", 32,
        "--n_head", 2, "--block_size", 32, "--max_iters", 12, "--eval_interval", 4, "--batch_size", 4,
        "--eval_windows", 4)
    return folder / "run"


def test_gradient_norms_of_a_run(run):
    rows = [json.loads(line) for line in open(run / "metrics.jsonl")]
    sums = [row["grad_norms"] for row in rows if "grad_norms" in row]
    assert len(sums) == 4 and all(len(row) == 9 for row in sums) and not any(sums[0])
    assert all(b > a for a, b in zip(sums[1], sums[2]))
    stored = torch.load(run / "ckpt.pt", weights_only=True)["grad_norms"]
    assert stored[0].tolist() == pytest.approx(sums[-1])
    # a block's gradient is both of its sublayers': sum of squares
    assert torch.allclose(stored[1, 6:], stored[1, :6].view(3, 2).sum(1))


def test_sampling_from_a_pruned_run(run):
    whole = cli("sample.py", run, "--max_new_tokens", 20, "--temperature", 0).stdout
    same = cli("sample.py", run, "--max_new_tokens", 20, "--temperature", 0, "--prune", "cfp:0").stdout
    assert same == whole
    done = cli("sample.py", run, "--max_new_tokens", 20, "--prune", "influence:1")
    assert "removed sublayers" in done.stderr
    assert "--prune" in refused("sample.py", run, "--prune", "cfp")
    for wrong in ("cfp:3", "nothing:1", "cfp:-1", "cfp:x"):
        with pytest.raises(SystemExit, match="--prune"):
            sample.main([str(run), "--prune", wrong])


def test_the_whole_report(run, tmp_path):
    out = cli("analyze.py", run, "--out", tmp_path, "--windows", 4, "--prune", "magnitude:1").stdout
    report = json.loads((tmp_path / "depth.json").read_text())["runs"]["run"]
    assert len(report["removed"]) == 2 and "report-run.png" in out
    removed = report["removal"]["loss_increase"]
    assert all(abs(removed[l - 1]) < 1e-9 for l in report["removed"])     # they are gone already
    assert (tmp_path / "report-run.png").stat().st_size > 100_000
    assert {"logit_lens", "prune_curve", "causal_score", "norm_growth", "quantisation"} <= report.keys()
