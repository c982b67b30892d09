"""The depth statistics against what they must be for models that we can see through, and the command line."""
import json
import math

import pytest
import torch
from matplotlib import image
from test_sample import cli, refused, tiny

import analyze


def batches(n=2):
    rng = torch.Generator().manual_seed(3)
    return [(torch.randint(40, (2, 24), generator=rng), torch.randint(40, (2, 24), generator=rng)) for _ in range(n)]


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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analyze")
    (folder / "text.txt").write_text("".join(f"line {i}: {i * i}\n" for i in range(4000)))
    cli("prepare.py", "text", "--input", folder / "text.txt", "--out", folder / "data")
    for residual in ("pre", "nag"):
        cli("train.py", "--data", folder / "data", "--out", folder / residual, "--residual", residual, "--n_layer", 2,
            "--n_embd", 32, "--n_head", 2, "--block_size", 32, "--batch_size", 8, "--max_iters", 20, "--eval_windows", 4)
    return folder


def test_command_line(runs, tmp_path):
    cli("analyze.py", runs / "pre", runs / "nag", "--out", tmp_path / "figures", "--windows", 6, "--batch_size", 4)
    for name in (*analyze.STATS, "loss_curve"):
        height, width, _ = image.imread(tmp_path / "figures" / f"{name}.png").shape
        assert width > 600 and height > 400
    report = json.loads((tmp_path / "figures" / "depth.json").read_text())
    assert set(report["runs"]) == {"pre", "nag"}
    for run in report["runs"].values():
        for name in analyze.STATS:
            values = next(iter(run[name].values()))
            assert len(values) == 4 + (name == "stream_norm") and all(map(math.isfinite, values))
    again = cli("analyze.py", runs / "nag", runs / "nag" / ".." / "pre", "--out", tmp_path / "two", "--only", "cosine")
    assert "cosine.png" in again.stdout and not (tmp_path / "two" / "removal.png").exists()


def test_bad_input(runs, tmp_path):
    assert "no run folder" in refused("analyze.py", runs / "pre", tmp_path)
    assert "removal" in refused("analyze.py", runs / "pre", "--only", "remuval")
    assert "--windows" in refused("analyze.py", runs / "pre", "--windows", 0)
    (tmp_path / "file").write_text("precious")
    assert "is a file" in refused("analyze.py", runs / "pre", "--out", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"
    assert "--windows" in refused("analyze.py", runs / "pre", "--window", 3)
