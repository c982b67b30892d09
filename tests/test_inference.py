"""Other ways through a trained model's depth: early exit, LAC, Identity Newton. Float64, then real runs."""
import pytest
import torch

import model as M
import sample
from test_residuals import build, ids, logits, perturb, same
from test_sample import cli, refused

SIZE = dict(n_layer=5, n_head=2, n_embd=32)


def model_of(residual="pre"):
    return perturb(build(residual, **SIZE), 0.2).eval()


@torch.no_grad()
def decode(forward, model, idx, pieces=(5, 1, 1, 1, 1, 1, 1, 1)):
    """-> logits after each piece (B, number, V), the cache"""
    cache = M.KVCache(model, len(idx))
    return torch.stack([forward(piece, cache) for piece in idx.split(pieces, dim=1)], dim=1), cache


def full(model, idx):
    return logits(model, idx)[:, 4:]


@pytest.mark.parametrize("residual", ["pre", "nag", "siamese", "hyper"])
def test_an_exit_that_never_comes_is_full_depth(residual):
    model, idx, used = model_of(residual), ids(1, 12), []
    same(decode(sample.early_exit(model, 1.0, used), model, idx)[0], full(model, idx), 1e-11)
    assert used == [5] * 8


def test_early_exit():
    """At 0, every token but the prompt's leaves after block 1; the other blocks get its keys and values."""
    model, idx, used = model_of(), ids(1, 12), []
    out, cache = decode(sample.early_exit(model, 0.0, used), model, idx)
    assert used == [5] + [1] * 7
    same(out[:, 0], full(model, idx)[:, 0], 1e-11)
    with torch.no_grad():
        x = model.blocks[0](model.wte(idx), model.rope(0, 12))[0]        # exact: block 1 runs for all tokens
        same(out[:, 1:], model.head(model.ends.finish(x))[:, 5:], 1e-11)
        k, v, _ = model.blocks[3].attn.keys_values(model.blocks[3].attn_residual.read(x), model.rope(0, 12))
    same(cache.layers[3].keys[:, 5:12], k[:, 5:], 1e-11)
    same(cache.layers[3].values[:, 5:12], v[:, 5:], 1e-11)
    assert all(layer.length == 12 for layer in cache.layers)
    counts = []
    for sure in (0.0, 0.02, 0.03, 0.2, 1.0):
        used.clear()
        decode(sample.early_exit(model, sure, used), model, idx)
        counts.append(sum(used))
    assert counts == sorted(counts) and counts[0] < counts[3] < counts[-1]


def test_keys_after_an_exit_are_those_of_a_full_pass():
    model, x = model_of("ngpt"), model_of("ngpt").wte(ids(1, 12)).detach()
    attn, rope = model.blocks[1].attn, model.rope(0, 12)
    assert attn.scale is not None
    for ours, right in zip(attn.keys_values(x, rope), attn.qkv(x, rope)[1:]):
        same(ours, right, 1e-12)


def test_lac():
    model, idx = model_of(), ids(1, 12)
    with torch.no_grad():
        streams = [model.wte(idx)]
        for block in model.blocks:
            streams.append(block(streams[-1], model.rope(0, 12))[0])
    growth = torch.stack([b.norm(dim=-1) - a.norm(dim=-1) for a, b in zip(streams, streams[1:])])
    for alpha in (0.0, 0.8, 3.0):
        last = torch.zeros(1, 12, dtype=torch.long)
        active = torch.ones(1, 1, 12, dtype=torch.bool)
        for l in range(1, 5):
            now = growth[l] >= alpha * (growth[:l].max(0).values - growth[:l].min(0).values)
            last, active = torch.where(now, l, last), torch.cat((active, now[None]))
        state = torch.stack(streams[1:]).gather(0, last[None, ..., None].expand(1, 1, 12, 32))[0]
        used = []
        out, _ = decode(sample.lac(model, "exit", alpha, used), model, idx)
        same(out, model.head(model.ends.finish(state)).detach()[:, 4:], 1e-11)
        assert used == pytest.approx(active.sum(0)[0, 4:].tolist())
    # nothing is inactive below any difference of norms, and then both forms are the model
    for form in ("skip", "exit"):
        same(decode(sample.lac(model, form, -1e9, []), model, idx)[0], full(model, idx), 1e-11)
    used = []
    # block 2 has a range of 0 before it, and needs to grow only; after it nothing is large enough
    out, _ = decode(sample.lac(model, "skip", 1e9, used), model, idx)
    assert used == [2] * 8 and (growth[1] >= 0).all()
    same(out, model.head(model.ends.finish(streams[2])).detach()[:, 4:], 1e-11)


@pytest.mark.parametrize("n", [3, 5])
def test_identity_newton_is_exact_after_n_iterations_and_not_before(n):
    model, idx = model_of(), ids(2, 12)
    with torch.no_grad():
        errors = [(sample.newton(model, idx, n, k) - logits(model, idx)).abs().max().item()
                  for k in range(1, n + 1)]
    assert errors[-1] < 1e-12 and min(errors[:-1]) > 1e-6
    used = []
    out, _ = decode(sample.layer_parallel(model, n, n, used), model, ids(1, 12))
    same(out, full(model, ids(1, 12)), 1e-11)
    assert used == [5] * 8


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ways")
    cli("prepare.py", "text", "--input", "train.py", "--out", folder / "data")
    for residual in ("pre", "nag", "attnres"):
        cli("train.py", "--data", folder / "data", "--out", folder / residual, "--residual", residual,
            "--n_layer", 3, "--n_embd", 32, "--n_head", 2, "--block_size", 32, "--max_iters", 6,
            "--batch_size", 4)
    return folder


def test_command_line(runs, capsys):
    def run_main(name, *flags):   # as the command line does, without the seconds that torch takes to start
        sample.main([str(runs / name), "--max_new_tokens", "40", "--temperature", "0", *flags])
        return capsys.readouterr()

    plain = run_main("pre").out                                          # longer than the context: a restart
    for flags in (["--exit", "1"], ["--newton", "2:2"]):
        told = run_main("pre", *flags)
        assert told.out == plain and "mean depth 3.0 of 3 blocks" in told.err
    told = run_main("nag", "--exit", "0").err
    assert "mean depth 1.0" in told or "mean depth 1.1" in told
    assert "tokens/s at full depth" in run_main("pre", "--lac", "skip").err
    assert "--exit" in refused("sample.py", runs / "attnres", "--exit", 0.5)
    for run, flags, words in (
            ("nag", ["--lac", "skip"], "--lac"), ("pre", ["--newton", "4:1"], "--newton"),
            ("pre", ["--newton", "2:3"], "--newton"), ("pre", ["--exit", -1], "--exit"),
            ("pre", ["--exit", 0.5, "--lac", "exit"], "one of"), ("nag", ["--newton", "2:1"], "--newton"),
            ("pre", ["--exit", 0.5, "--depth"], "one of")):
        with pytest.raises(SystemExit, match=words):
            run_main(run, *map(str, flags))
