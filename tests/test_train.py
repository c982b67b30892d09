"""The training loop on real runs: resume, kill -9, signals, two processes, compile, depth 96, bad input."""
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from programs import ROOT, start
from test_sample import cli, refused

import prepare
import train
from model import GPT, GPTConfig, RESIDUALS

SIZE = "--n_layer 2 --n_embd 32 --n_head 2 --block_size 32 --batch_size 4 --eval_windows 8 --seed 5".split()
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("".join(f"line {i}: {i * i} = {i} * {i}\n" for i in range(5000)))
    cli("prepare.py", "text", "--input", folder / "text.txt", "--out", folder / "data")
    return folder / "data"


def command(data, out, *flags):
    return ["train.py", "--data", data, *SIZE, "--out", out, *flags]


def metrics(run):
    """The logged losses: what must be equal between two runs. The speed is not."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tok_s"} for line in lines]


def weights(run):
    return torch.load(run / "ckpt.pt", weights_only=True)["model"]


def same_run(a, b):
    assert metrics(a) == metrics(b)
    assert all(torch.equal(x, y) for x, y in zip(weights(a).values(), weights(b).values(), strict=True))


def test_a_run(data, tmp_path):
    done = cli(*command(data, tmp_path / "run", "--max_iters", 60, "--log_interval", 10,
                        "--eval_interval", 30))
    lines = metrics(tmp_path / "run")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 0.5 and lines[-1]["step"] == 60
    evals = [line for line in lines if "val_loss" in line]
    assert [line["step"] for line in evals] == [0, 30, 60]
    # bytes, end-of-text aside
    assert evals[-1]["val_bpb"] == pytest.approx(evals[-1]["val_loss"] / np.log(2), rel=0.01)
    assert "sample.py" in done.stdout.splitlines()[-1]
    written = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.json", "metrics.jsonl", "ckpt.pt", "best.pt"} == written
    replay = cli("train.py", "--config", tmp_path / "run" / "config.json", "--out", tmp_path / "replay")
    assert replay.returncode == 0
    same_run(tmp_path / "run", tmp_path / "replay")


@pytest.mark.parametrize("residual, number, flags", [
    ("pre", signal.SIGTERM, []), ("nag", signal.SIGINT, ["--grad_accum", 2])])
def test_resume_is_bit_identical(data, tmp_path, residual, number, flags):
    flags = ["--residual", residual, "--max_iters", 400, "--log_interval", 7, "--eval_interval", 90, *flags]
    cli(*command(data, tmp_path / "whole", *flags))
    process = start(*command(data, tmp_path / "parts", *flags))
    while not (tmp_path / "parts" / "metrics.jsonl").exists() or len(metrics(tmp_path / "parts")) < 5:
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == 128 + number and "--resume" in out and "Traceback" not in err
    assert 0 < torch.load(tmp_path / "parts" / "ckpt.pt", weights_only=True)["step"] < 400
    cli("train.py", "--out", tmp_path / "parts", "--resume")
    same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_kill_9_at_any_moment(data, tmp_path, kills):
    """Every other kill waits until a checkpoint is half written."""
    flags = ["--max_iters", 60 * kills, "--eval_interval", 1, "--log_interval", 5, "--eval_windows", 1]
    rng, run, inside = random.Random(kills), tmp_path / "killed", 0
    process = start(*command(data, run, *flags))
    while not (run / "ckpt.pt").exists():
        time.sleep(0.01)
    for i in range(kills):
        time.sleep(rng.uniform(0.0, 0.3))
        if i % 2:
            for _ in range(200000):
                if (run / "ckpt.pt.tmp").exists() or process.poll() is not None:
                    break
        process.kill()
        process.wait()
        inside += (run / "ckpt.pt.tmp").exists()
        process = start("train.py", "--out", run, "--resume")
        begun = torch.load(run / "ckpt.pt", weights_only=True)["step"]
        while process.poll() is None and torch.load(run / "ckpt.pt", weights_only=True)["step"] <= begun:
            time.sleep(0.05)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert inside > 0
    cli(*command(data, tmp_path / "whole", *flags))
    same_run(tmp_path / "whole", run)


def test_full_disk_keeps_the_old_file(tmp_path):
    code = ("import resource, torch, train; train.write_file('f', lambda f: f.write(b'old')); "
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); "
            "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
            "train.write_file('f', lambda f: torch.save(torch.zeros(9999), f))")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path,
                          env=dict(os.environ, PYTHONPATH=str(ROOT)), capture_output=True, text=True)
    assert done.returncode == 1 and "f: can't be written" in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "f").read_bytes() == b"old"


def test_non_finite_loss_stops(data, tmp_path):
    run = tmp_path / "run"
    cli(*command(data, run, "--max_iters", 4, "--eval_interval", 2))
    ckpt = torch.load(run / "ckpt.pt", weights_only=True)
    ckpt["model"]["blocks.0.mlp.c_proj.weight"][0, 0] = float("nan")
    torch.save(ckpt, run / "ckpt.pt")
    poisoned = (run / "ckpt.pt").read_bytes()
    message = refused("train.py", "--out", run, "--resume", "--max_iters", 8, "--eval_interval", 100)
    assert "step 4" in message and "learning rate" in message and "ckpt.pt" in message
    assert (run / "ckpt.pt").read_bytes() == poisoned   # a state that has gone wrong is never saved


@pytest.mark.parametrize("flags", [[], ["--grad_accum", 2]])
def test_two_processes_follow_one(data, tmp_path, flags):
    flags = ["--residual", "nag", "--max_iters", 12, "--log_interval", 1, "--eval_interval", 6, *flags]
    cli(*command(data, tmp_path / "one", *flags))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]
    cli(*torchrun, *command(data, tmp_path / "two", *flags))
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert a.keys() == b.keys()
        for key in a:   # lists of numbers among them
            assert a[key] == pytest.approx(b[key], rel=1e-5), key
    # and a run of two goes on as one
    cli(*torchrun, *command(data, tmp_path / "mixed", *flags, "--max_iters", 12, "--schedule", "wsd",
                            "--decay", 0))
    cli("train.py", "--out", tmp_path / "mixed", "--resume", "--max_iters", 15)
    assert metrics(tmp_path / "mixed")[-1]["step"] == 15


def test_data_order_is_a_pure_function():
    shards = [np.arange(100, 400, dtype=np.uint16), np.arange(1000, 1050, dtype=np.uint16)]
    x, y = train.train_batch(shards, 8, seed=1, step=3, batch_size=12)
    parts = [train.train_batch(shards, 8, 1, 3, 12, part, 4)[0] for part in range(4)]
    assert torch.equal(torch.cat(parts), x) and torch.equal(y[:, :-1], x[:, 1:])
    # so no window crosses from one shard to the next
    assert (x.diff(dim=1) == 1).all() and (y - x == 1).all()
    assert not torch.equal(x, train.train_batch(shards, 8, 1, 4, 12)[0])
    assert not torch.equal(x, train.train_batch(shards, 8, 2, 3, 12)[0])
    last = train.read_windows(shards, [0, 291, 292, 333], 8)[1][:, -1].tolist()
    assert last == [108, 399, 1008, 1049]   # first and last window of either shard


def test_another_end_is_said_and_another_batch_refused(data, tmp_path):
    run = tmp_path / "run"
    cli(*command(data, run, "--max_iters", 4, "--eval_interval", 2))
    assert "--batch_size 8" in refused("train.py", "--out", run, "--resume", "--batch_size", 8)
    done = cli("train.py", "--out", run, "--resume", "--max_iters", 8)
    assert "was 100.0% done and is 50.0% done" in done.stdout
    assert "done and is" not in cli("train.py", "--out", run, "--resume").stdout


def test_status_line():
    assert [train.minutes(s) for s in (0.4, 59.6, 119.7, 3600)] == ["0:00", "1:00", "2:00", "60:00"]
    names = {"NVIDIA H200": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 80GB HBM3": 989e12,
             "NVIDIA L4": 121e12, "NVIDIA L40S": 362e12, "NVIDIA GeForce RTX 4090": 165e12,
             "Tesla V100-SXM2-16GB": 125e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA GH200 480GB": 989e12,
             "NVIDIA L40": None, "NVIDIA GB200": None, "NVIDIA T400": None, "CPU": None}
    assert {name: train.peak_flops(name) for name in names} == names


def test_lengths_of_runs(data, tmp_path):
    for i, (flags, steps) in enumerate([(["--max_tokens", 1000], 8), (["--max_flops", 1e8], None)]):
        cli(*command(data, tmp_path / str(i), *flags))
        if steps is None:
            model = train.load_run(tmp_path / str(i))[0]
            steps = -(-1e8 // (3 * model.flops_per_token() * 128))
        assert metrics(tmp_path / str(i))[-1]["step"] == steps
    assert "--max_tokens" in refused(*command(data, tmp_path / "x", "--max_tokens", 10, "--max_iters", 5))
    # FLOPs end within the last step; then there is nothing to resume, and nothing wrong
    step = 3 * model.flops_per_token() * 128
    cli(*command(data, tmp_path / "part", "--max_flops", 1.2 * step))
    again = cli("train.py", "--out", tmp_path / "part", "--resume")
    assert metrics(tmp_path / "part")[-1]["step"] == 2 and again.returncode == 0
    assert "--max_flops 0" in refused(*command(data, tmp_path / "x", "--max_flops", 0))


def test_defaults_on_a_gpu(monkeypatch):
    monkeypatch.setattr(train, "pick_device", lambda values: "cuda")
    size = lambda *flags: [getattr(part, name) for part, name in zip(
        train.resolve(flags)[:2] * 2, ("n_embd", "batch_size", "block_size", "grad_accum"))]
    assert size() == [768, 512, 1024, 8] and size("--batch_size", "64") == [768, 64, 1024, 8]
    assert size("--n_layer", "6") == [128, 16, 128, 1]   # another model: the small defaults


def test_schedule():
    for schedule in ("cosine", "wsd"):
        config = train.TrainConfig(schedule=schedule, warmup=0.1, min_lr=0.1, decay=0.2)
        shares = [train.lr_share(config, step / 100, 1 / 100) for step in range(101)]
        assert all(a < b for a, b in zip(shares[:10], shares[1:11])) and max(shares) == pytest.approx(1)
        assert shares[100] == pytest.approx(0.1)
        assert all(a >= b - 1e-12 for a, b in zip(shares[10:], shares[11:]))
    assert shares[79] == pytest.approx(1)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_optimizer_groups(residual):
    model = GPT(GPTConfig(residual=residual, n_layer=2, n_embd=16, n_head=2))
    groups = train.make_optimizers(model, train.TrainConfig())["optimizer"].param_groups
    names = {p: name for name, p in model.named_parameters()}
    assert sorted(names[p] for g in groups for p in g["params"]) == sorted(names.values())
    for group in groups:
        for p in group["params"]:
            gate = "residual" in names[p] and residual == "nag" or names[p] == "ends.g"
            vector = names[p] in ("ends.query", "ends.key_gain") or names[p].endswith("static")
            assert group["weight_decay"] == (0.1 if p.dim() >= 2 and not gate and not vector else 0)
            assert group["peak"] == (1e-3 if gate else 3e-3)


def test_help_lists_every_flag():
    text = cli("train.py", "--help").stdout
    for config in (GPTConfig, train.TrainConfig):
        assert all(f"--{name} " in text or f"--{name}," in text for name in config.__dataclass_fields__)
    assert "arXiv" not in text and "how sublayers read and write the stream" in " ".join(text.split())


@pytest.mark.parametrize("residual", ["pre", "nag",
                                      *[pytest.param(r, marks=pytest.mark.slow) for r in RESIDUALS]])
def test_96_layers(data, tmp_path, residual):
    cli("train.py", "--data", data, "--out", tmp_path / "run", "--residual", residual, "--n_layer", 96,
        "--n_embd", 64, "--n_head", 2, "--block_size", 16, "--batch_size", 2, "--max_iters", 20,
        "--eval_windows", 2, "--lr", 1e-3)
    assert all(np.isfinite(line.get("loss", 0)) for line in metrics(tmp_path / "run"))
    done = cli("sample.py", tmp_path / "run", "--max_new_tokens", 5, "--prompt", "line")
    assert done.stdout.startswith("line")


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler here")
def test_compiled_blocks_share_one_graph(data, tmp_path):
    """Training with --compile (inductor) makes as many graphs for 5 blocks as for 2."""
    code = ("import sys, train, torch; train.main(sys.argv[1:]); "
            "print('graphs', torch._dynamo.utils.counters['stats']['unique_graphs'])")
    counts = []
    for n_layer in (2, 5):
        args = [*command(data, tmp_path / str(n_layer), "--residual", "nag", "--max_iters", 3,
                         "--compile")[1:], "--n_layer", n_layer, "--eval_windows", 4]
        done = cli("-c", code, *args, env=dict(os.environ, PYTHONPATH=str(ROOT)))
        counts.append(done.stdout.split("graphs ")[1])
    assert counts[0] == counts[1] and int(counts[0]) <= 2   # one with gradients, one for the evaluation


def test_typing_errors(data, tmp_path):
    out = tmp_path / "run"
    assert "nag" in refused(*command(data, out, "--residual", "nga"))
    assert "--residual" in refused(*command(data, out, "--residul", "nag"))
    assert "--beta1 1" in refused(*command(data, out, "--beta1", 1))
    assert "--min_lr 6e-05: is a share" in refused(*command(data, out, "--min_lr", "6e-5"))
    assert "--n_head 5 --n_embd 64" in refused(*command(data, out, "--n_head", 5, "--n_embd", 64))
    assert "--lr" in refused(*command(data, out, "--lr", "fast"))
    assert "prepare.py" in refused(*command(tmp_path / "none", out))
    assert "--out" in refused("train.py", "--resume")
    config = tmp_path / "config.json"
    config.write_text('{"schedule": "linear", "optimizer": "adam"}')
    message = cli("train.py", "--config", config, check=False).stderr
    assert "--schedule linear: unknown" in message and "--optimizer adam: unknown" in message
    config.write_text("{}")
    assert "contradict" in refused("train.py", "--config", config, "--resume", "--out", out)
    assert "config.json" in refused("train.py", "--resume", "--out", tmp_path / "none")
    several = cli(*command(data, out, "--n_embd", 33, "--warmup", 2, "--batch_size", 0), check=False)
    assert several.returncode == 1 and len(several.stderr.splitlines()) == 3
    assert "Traceback" not in several.stderr
    assert not out.exists()


def test_broken_data(data, tmp_path):
    def copy(name, change):
        folder = tmp_path / name
        folder.mkdir()
        for path in data.iterdir():
            change_it = change if path.name.startswith("train") else lambda content: content
            (folder / path.name).write_bytes(change_it(path.read_bytes()))
        return refused(*command(folder, tmp_path / "run"))
    assert "train_000000.bin" in copy("truncated", lambda b: b[:-100])
    assert "train_000000.bin" in copy("lying", lambda b: b[:8] + (10 ** 6).to_bytes(4, "little") + b[12:])
    assert "train_000000.bin" in copy("empty", lambda b: b"")
    assert "token" in copy("foreign", lambda b: b[:1024] + b"\xff\xff" * ((len(b) - 1024) // 2))


def test_existing_runs_are_safe(data, tmp_path):
    run = tmp_path / "run"
    cli(*command(data, run, "--max_iters", 2))
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    assert "--overwrite" in refused(*command(data, run))
    assert "n_embd" in refused("train.py", "--out", run, "--resume", "--n_embd", 64)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    config = json.loads((run / "config.json").read_text())
    for change, words in ((dict(n_embd=64), "n_embd"), (dict(n_legs=4), "n_legs")):
        (run / "config.json").write_text(json.dumps(config | change))
        assert words in refused("train.py", "--out", run, "--resume")
        assert words in refused("sample.py", run)
    (run / "config.json").write_text("{")
    assert "config.json" in refused("train.py", "--out", run, "--resume")
    (run / "config.json").write_text(json.dumps(config))
    (run / "ckpt.pt").write_bytes(before["ckpt.pt"][:1000])
    assert "ckpt.pt" in refused("train.py", "--out", run, "--resume")
    assert prepare.read_shard(data / "train_000000.bin").size > 1000
