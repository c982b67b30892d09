"""States that a run folder, its data or its flags can get into, and the one sentence that each must give."""
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from programs import program

import prepare

TINY = "--n_layer 2 --n_embd 32 --n_head 2 --block_size 32 --batch_size 4 --eval_windows 8".split()


def cli(*args, timeout=25):
    return program(*args, timeout=timeout)


def refused(*args):
    done = cli("train.py", *args)
    assert done.returncode > 0 and "Traceback" not in done.stderr, done.stderr[-300:]
    assert len(done.stderr.splitlines()) == 1, done.stderr[-300:]
    return done.stderr


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("corpus") / "data"
    assert cli("prepare.py", "text", "--input", "train.py", "model.py", "--out", out).returncode == 0
    return out


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    done = cli("train.py", *TINY, "--data", data, "--out", out, "--max_iters", 8, "--eval_interval", 4)
    assert done.returncode == 0
    return out


@pytest.fixture
def copy(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def weights(out):
    return torch.load(out / "ckpt.pt", weights_only=True)["model"]


def same(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


def test_resume_to_an_earlier_end_does_not_run_forever(copy):
    before = weights(copy)
    cli("train.py", "--out", copy, "--resume", "--max_iters", 5, timeout=15)   # TimeoutExpired: it runs on
    assert same(before, weights(copy))


def test_resume_takes_new_learning_rates(copy):
    before = weights(copy)
    done = cli("train.py", "--out", copy, "--resume", "--max_iters", 12, "--lr", 0, "--gate_lr", 0)
    assert done.returncode == 0
    assert same(before, weights(copy))


@pytest.mark.parametrize("content", ["[]", "3", '{"n_layer": "two"}', '{"n_layer": null}',
                                     '{"n_layer": 2.5}', '{"alpha_warmup": "slow"}'])
def test_config_json_of_wrong_types(copy, content):
    (copy / "config.json").write_text(content)
    refused("--out", copy, "--resume")


@pytest.mark.parametrize("content", [{}, [1]])
def test_foreign_checkpoint(copy, content):
    torch.save(content, copy / "ckpt.pt")
    assert "ckpt.pt" in refused("--out", copy, "--resume")


@pytest.mark.parametrize("rest", [None, "\0\0\0\n"])
def test_metrics_gone_or_broken(copy, rest):
    path = copy / "metrics.jsonl"
    path.unlink() if rest is None else path.write_text(path.read_text() + rest)
    assert "Traceback" not in cli("train.py", "--out", copy, "--resume").stderr


@pytest.mark.parametrize("seed", [-1, 10 ** 23])
def test_seed(data, tmp_path, seed):
    assert "--seed" in refused(*TINY, "--data", data, "--out", tmp_path / "run", "--seed", seed,
                               "--max_iters", 1)


@pytest.mark.parametrize("rest", ["", "run"])
def test_out_is_a_file(data, tmp_path, rest):
    (tmp_path / "file").write_text("mine")
    refused(*TINY, "--data", data, "--out", tmp_path / "file" / rest, "--max_iters", 1)


@pytest.mark.parametrize("token", [257, 60000])
def test_val_tokens_beyond_the_tokenizer(data, copy, tmp_path, token):
    bad = Path(shutil.copytree(data, tmp_path / "bad"))
    header = np.array([prepare.MAGIC, prepare.VERSION, 2000] + 253 * [0], "<i4").tobytes()
    (bad / "val_000000.bin").write_bytes(header + np.full(2000, token, "<u2").tobytes())
    assert "257" in refused("--out", copy, "--resume", "--data", bad, "--max_iters", 12)


