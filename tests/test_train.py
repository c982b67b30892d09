"""train.py on tiny runs"""

import json
import math
import multiprocessing
import os
import runpy
import shlex
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import flags
import prepare
import train
from conftest import ROOT, TINY, refused
from model import GPT, GPTConfig, POLICIES, flops_per_token

# On CPUs, because what these tests compare has to be equal to the last bit.
SIZE = ("--device cpu --n_layer 2 --n_embd 32 --n_head 2 --block_size 32 --batch_size 4 "
        "--eval_windows 8 --seed 5 --optimizer adamw --lr 6e-3")

@pytest.fixture(scope="session")
def finished(data, tmp_path_factory):
    """A run of 8 iterations. Tests that change it take a copy."""
    out = tmp_path_factory.mktemp("runs") / "run"
    go(data, out, "--max_iters 8 --eval_interval 4")
    return out

@pytest.fixture
def copy(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "copy"))

def main(line):
    return train.main(shlex.split(line))

def go(data, out, flags=""):
    return main(f"--data {data} {SIZE} --out {out} {flags}")

def resume(out, flags=""):
    return main(f"--out {out} --resume {flags}")

def metrics(run):
    """The lines of metrics.jsonl without their times"""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]

def losses(run):
    return [line["loss"] for line in metrics(run) if "loss" in line]

def load(run):
    return torch.load(run / "ckpt.pt", weights_only=True)

def same_run(a, b):
    assert metrics(a) == metrics(b)
    a, b = load(a), load(b)
    assert a["step"] == b["step"] and a["flops"] == b["flops"]
    assert a["model"].keys() == b["model"].keys()
    assert all(torch.equal(weight, b["model"][name]) for name, weight in a["model"].items())

def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}

# ----------------------------------------------------------------------------- data, evaluation

def test_batches_depend_on_seed_and_step_only():
    shards = [np.arange(100, 200, dtype=np.uint16), np.arange(220, 250, dtype=np.uint16)]

    def batches(grad_accum=1, step=3, seed=1):
        gpt = GPTConfig(**TINY | dict(block_size=8, seed=seed))
        config = train.TrainConfig(batch_size=12, grad_accum=grad_accum)
        return [train.get_batch(shards, gpt, config, step, i, "cpu") for i in range(grad_accum)]

    (x, y), = batches()
    assert torch.equal(torch.cat([x for x, _ in batches(4)]), x) and x.shape == (12, 8)
    assert (x.diff(dim=1) == 1).all() and (y - x == 1).all()   # no window is in two shards
    assert not torch.equal(x, batches(step=4)[0][0])
    assert not torch.equal(x, batches(seed=2)[0][0])

def test_evaluate():
    model = GPT(GPTConfig(**TINY))
    x, y = torch.randint(64, (2, 11, 16), generator=torch.Generator().manual_seed(0))
    n_bytes = torch.arange(64)
    found = train.evaluate(model, x, y, n_bytes)   # 8 + 3 windows
    loss = model.eval()(x, y)[1].item()
    assert found["val_loss"] == pytest.approx(loss, rel=1e-6) and found["val_skip_rate"] == 0
    bytes_in_all = n_bytes[y].sum().item()
    assert found["val_bpb"] == pytest.approx(loss * 176 / math.log(2) / bytes_in_all, rel=1e-6)
    assert math.isfinite(train.evaluate(model, x, y, 0 * n_bytes)["val_bpb"])

def test_evaluation_leaves_the_random_state(data, tmp_path):
    go(data, tmp_path / "run", "--mod random:rate=0.4 --max_iters 1")
    model, settings = train.open_run(tmp_path / "run")
    val = prepare.windows_of(data, "val", 32, 8)
    before = torch.get_rng_state()
    found = train.evaluate(model, *val, torch.ones(257))
    assert torch.equal(torch.get_rng_state(), before) and found["val_skip_rate"] > 0.2
    assert found["val_loss"] == metrics(tmp_path / "run")[-1]["val_loss"]

def test_steps_learned():
    """Lines of four digits: which ask for two steps, one step, none."""
    text = "c1234\nb5678\na9012\na9012\n"
    x = torch.tensor([list(text.encode())])
    asked = train.steps_asked(x, cells=4)[0].tolist()
    # at a digit of the first half stands the letter or the first digit, which predict it
    assert asked == [-1] * 8 + [2, 2] + [-1] * 4 + [1, 1] + [-1] * 4 + [0, 0] + [-1] * 2
    puzzle, right = dict(cells=4, most=3), torch.ones_like(x, dtype=torch.bool)
    assert train.steps_learned(right, x, puzzle) == pytest.approx(2)
    right[0, 8] = False
    assert train.steps_learned(right, x, puzzle) == pytest.approx(1 + (0.5 - 0.1) / 0.9)
    assert train.steps_learned(~right & False, x, puzzle) == 0

def test_the_puzzle_prints_steps(steps_data, tmp_path, capsys):
    go(steps_data, tmp_path / "run", "--max_iters 1")
    assert "/3\n" in capsys.readouterr().out
    assert 0 <= metrics(tmp_path / "run")[-1]["val_steps"] <= 3

# ----------------------------------------------------------------------------- schedule, optimizers

@pytest.mark.parametrize("schedule, factors", [
    ("cosine", {0.05: 0.5, 0.1: 1, 0.325: 0.868, 0.55: 0.55, 0.9: 0.127, 1: 0.1}),
    ("wsd", {0.05: 0.5, 0.1: 1, 0.325: 1, 0.55: 1, 0.8: 1, 0.9: 0.55, 1: 0.1})])
def test_schedule(schedule, factors):
    config = train.TrainConfig(schedule=schedule, warmup=0.1, min_lr=0.1)
    assert {at: train.lr_schedule(config, at) for at in factors} == pytest.approx(factors, abs=1e-3)
    for warmup in 0, 1:
        config = train.TrainConfig(schedule=schedule, warmup=warmup)
        assert all(0 < train.lr_schedule(config, progress) <= 1 for progress in (0.01, 1.0))

@pytest.mark.parametrize("residual", ["pre", "nag", "attnres"])
def test_optimizer_groups(residual):
    model = GPT(GPTConfig(**TINY, residual=residual))
    own = {p for r in [*model.residuals(), model.final] for name, p in r.named_parameters()
           if name in r.own_params}
    assert bool(own) == (residual != "pre")
    for optimizer in "adamw", "sgd", "muon":
        config = train.TrainConfig(optimizer=optimizer, lr=0.02, residual_lr=5e-4)
        optimizers = train.make_optimizers(model, config)
        group_of = {p: group for each in optimizers for group in each.param_groups
                    for p in group["params"]}
        for name, p in model.named_parameters():
            assert group_of[p]["weight_decay"] == (0.1 if p.dim() >= 2 and p not in own else 0)
            assert group_of[p]["peak_lr"] == (5e-4 if p in own else 0.02)
    by_muon = {name for name, p in model.named_parameters() if "betas" not in group_of[p]}
    assert by_muon == {name for name, p in model.named_parameters()
                       if name.startswith("blocks.") and p.dim() == 2 and p not in own}

def test_muon_is_torchs(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)   # torch's products

    def trained(optimizer):
        rng = torch.Generator().manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(shape, generator=rng))
                   for shape in ((6, 4), (4, 6), (5, 5))]
        optimizer = optimizer(weights)
        for step in range(4):   # first gradients of 0, as for a sublayer behind a gate of 0
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=rng) * (step > 0)
            optimizer.step()
        return weights

    ours = trained(lambda weights: train.Muon([dict(params=weights, weight_decay=0.1)], 0.02))
    torchs = trained(lambda weights: torch.optim.Muon(weights, 0.02, weight_decay=0.1,
                                                      adjust_lr_fn="match_rms_adamw"))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, torchs))

@pytest.mark.parametrize("shape", [(256, 64), (64, 256), (64, 64)])
def test_newton_schulz(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = x.double() / x.double().norm()
    for _ in range(5):
        gram = expected @ expected.T
        expected = 3.4445 * expected + (-4.7750 * gram + 2.0315 * gram @ gram) @ expected
    assert (train.orthogonalize(x[None])[0] - expected).norm() < 5e-4 * expected.norm()

def test_equalize_grads(data, tmp_path):
    model = GPT(GPTConfig(**TINY))
    for block, size in zip(model.blocks, (1, 100, 0)):
        for p in block.parameters():
            p.grad = torch.randn_like(p) * size
    norms = train.grad_norms_of_blocks(model, True)
    after = train.grad_norms_of_blocks(model, False)
    assert torch.allclose(after[:2], norms.square().mean().sqrt().expand(2)) and after[2] == 0
    sgd = "--max_iters 3 --log_interval 1 --optimizer sgd --lr 1 --grad_clip 0"
    go(data, tmp_path / "plain", sgd)
    go(data, tmp_path / "equal", f"{sgd} --equalize_grads")
    plain, equal = losses(tmp_path / "plain"), losses(tmp_path / "equal")
    assert plain[0] == equal[0] and plain[2] != equal[2]

def test_iterations_by_hand(data, tmp_path):
    """Weights - lr x clipped gradients, and nothing else. Norms of blocks are logged, unclipped."""
    go(data, tmp_path / "run", "--optimizer sgd --beta1 0 --weight_decay 0 --lr 0.5 --warmup 0.5 "
                               "--min_lr 1 --grad_clip 0.25 --grad_accum 2 --max_iters 6 "
                               "--log_interval 1")
    trained, settings = train.open_run(tmp_path / "run")
    model = GPT(trained.config).train()
    config = train.TrainConfig(batch_size=4)
    shards = prepare.open_split(data, "train", 32)
    logged = [line for line in metrics(tmp_path / "run") if "loss" in line]
    for step in range(6):
        model.zero_grad()
        model(*train.get_batch(shards, model.config, config, step, 0, "cpu"))[1].backward()
        norms = train.grad_norms_of_blocks(model, False).tolist()
        assert logged[step]["grad_norms"] == pytest.approx(norms, rel=1e-4)
        norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.5 * min(1, (step + 1) / 3) * p.grad * min(1, 0.25 / norm)
    for name, weight in model.state_dict().items():
        assert torch.allclose(weight, trained.state_dict()[name], atol=1e-5), name

# ----------------------------------------------------------------------------- a run

@pytest.mark.parametrize("options", [
    "--deep_supervision", "--taper linear --repeat 1:2", "--dtype bfloat16",
    "--residual nag --gate_loss 0.2 --mod gate:below=0.05", "--mod drop:rate=0.2",
    "--mod router:rate=0.25", "--init gpt2 --optimizer muon"])
def test_kinds_of_training_learn(data, tmp_path, options):
    go(data, tmp_path / "run", f"{options} --max_iters 30 --log_interval 1")
    found = losses(tmp_path / "run")
    assert sum(found[-3:]) < 0.9 * sum(found[:3])
    weights = load(tmp_path / "run")["model"].values()
    assert all(weight.dtype != torch.bfloat16 for weight in weights)

def test_float64(data, tmp_path):
    torch.set_default_dtype(torch.float64)
    try:
        model = go(data, tmp_path / "run", "--residual nag --max_iters 2")
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float64}

def test_flops_end_a_run(data, tmp_path):
    model = go(data, tmp_path / "a", "--max_iters 3 --eval_interval 2 --log_interval 1")
    per_iteration = 3 * 4 * 32 * flops_per_token(model)
    for line in metrics(tmp_path / "a"):   # an evaluation's line has its own
        assert line["flops"] == pytest.approx(line["step"] * per_iteration)
    go(data, tmp_path / "b", f"--max_flops {4.5 * per_iteration} --log_interval 5")
    assert load(tmp_path / "b")["step"] == 5
    assert metrics(tmp_path / "b")[-2]["lr"] == pytest.approx(0.1 * 6e-3)   # not beyond the last

class Notes(torch.nn.Module):
    """A policy that notes what train.py tells it; no token skips."""
    options, noted = {}, []

    def __init__(self, config):
        super().__init__()

    def forward(self, trace):
        if self.training and trace.layer_idx == 0:
            self.noted.append(trace.progress)
        return torch.ones(trace.stream.shape[:2], dtype=torch.bool)

    def update(self, traces, mean):
        self.noted.append(f"{len(traces)} traces")

def test_a_policy_gets_progress_and_updates(data, tmp_path, monkeypatch):
    monkeypatch.setitem(POLICIES, "notes", Notes)
    monkeypatch.setattr(train, "sanity_check", lambda config: None)
    model = go(data, tmp_path / "run", "--mod notes --max_iters 2 --grad_accum 2")
    assert Notes.noted == [0, 0, "2 traces", 0.5, 0.5, "2 traces"]
    assert model.config.vocab_size == 320   # 257, rounded up

def test_the_logged_loss_is_without_the_auxiliary_one(data, tmp_path):
    for gate_loss in 0, 100:
        go(data, tmp_path / str(gate_loss), f"--residual nag --max_iters 2 --log_interval 1 "
                                            f"--gate_loss {gate_loss} --mod gate:below=0.01")
    # of the second iteration: it is 0 in the first third
    assert losses(tmp_path / "0") == losses(tmp_path / "100")

def test_random_state_threads_and_signals_stay(data, tmp_path):
    torch.manual_seed(1)
    before = torch.get_rng_state(), torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    go(data, tmp_path / "run", "--max_iters 1 --mod random:rate=0.25")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_num_threads(), signal.getsignal(signal.SIGTERM)) == before[1:]

@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.slow
def test_compile(data, tmp_path):
    go(data, tmp_path / "a", "--max_iters 3 --log_interval 1")
    go(data, tmp_path / "b", "--max_iters 3 --log_interval 1 --compile")
    assert losses(tmp_path / "a") == pytest.approx(losses(tmp_path / "b"), rel=1e-4)

def test_config(data, finished, tmp_path):
    main(f"--config {finished} --out {tmp_path / 'again'}")
    same_run(finished, tmp_path / "again")
    assert "out" not in train.load_settings(finished)
    main(f"--config {finished} --out {tmp_path / 'other'} --seed 6")
    assert losses(finished) != losses(tmp_path / "other") or metrics(finished) != metrics(
        tmp_path / "other")
    main(f"--config {finished} --out {tmp_path / 'adamw'} --optimizer adamw --max_iters 1")
    assert load(tmp_path / "adamw")["settings"]["lr"] == 0.006   # its own default
    go(data, tmp_path / "default", "--optimizer sgd --lr 0 --max_iters 1")
    assert load(tmp_path / "default")["settings"]["lr"] == 0.1
    settings = json.loads((ROOT / "configs/gpt2.json").read_text())
    known = vars(GPTConfig()) | vars(train.TrainConfig())
    assert settings.keys() <= known.keys()

def test_init_from_and_remove(data, finished, tmp_path):
    old = load(finished)["model"]
    still = "--max_iters 1 --lr 1e-30 --weight_decay 0"
    begin = f"--data {data} --device cpu --init_from {finished}"
    main(f"{begin} --out {tmp_path / 'a'} {still} --eval_windows 8")
    assert metrics(tmp_path / "a")[0]["val_loss"] == metrics(finished)[-1]["val_loss"]
    main(f"{begin} --remove 0 --out {tmp_path / 'b'} {still}")
    new = load(tmp_path / "b")["model"]
    for name, weight in new.items():
        assert torch.allclose(weight, old[name.replace("blocks.0.", "blocks.1.")], atol=1e-6), name
    main(f"--config {tmp_path / 'b'} --out {tmp_path / 'c'}")
    same_run(tmp_path / "b", tmp_path / "c")
    main(f"{begin} --out {tmp_path / 'd'} {still} --mod router:rate=0.25")   # a policy may be new

# ----------------------------------------------------------------------------- resume

def at_iteration(n, action, monkeypatch):
    """action() after the n-th iteration of the next training"""
    left, step = iter(range(n, -999, -1)), torch.optim.AdamW.step

    def watched(self, *args):
        step(self, *args)
        if next(left) == 1:
            action()
    monkeypatch.setattr(torch.optim.AdamW, "step", watched)

@pytest.mark.parametrize("number, options", [
    (signal.SIGINT, "--residual attnres --optimizer muon --lr 0.02 --schedule wsd"),
    (signal.SIGTERM, "--residual nag --mod gate:rate=0.3 --optimizer muon"),
    (signal.SIGUSR1, "--residual gated --mod random:rate=0.3 --grad_accum 2")])
def test_resume_after_a_signal_is_exact(data, tmp_path, monkeypatch, number, options):
    options += " --max_iters 24 --log_interval 3 --eval_interval 10"
    go(data, tmp_path / "whole", options)
    at_iteration(12, lambda: signal.raise_signal(number), monkeypatch)
    with pytest.raises(KeyboardInterrupt) as stopped:
        go(data, tmp_path / "parts", options)
    assert stopped.value.args == (number,) and load(tmp_path / "parts")["step"] == 12
    resume(tmp_path / "parts")
    same_run(tmp_path / "whole", tmp_path / "parts")
    resume(tmp_path / "parts")   # nothing is left to do
    same_run(tmp_path / "whole", tmp_path / "parts")

def test_a_second_signal_acts_as_usual():
    with train.caught_signals() as signals:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signals == [signal.SIGINT]

class Killed(BaseException):
    pass

def kill_and_resume(data, tmp_path, monkeypatch, n, options):
    """A training ends without a word at its n-th line of the log or save, and goes on."""
    options += " --max_iters 20 --log_interval 5 --eval_interval 10"
    if not (tmp_path / "whole").exists():
        go(data, tmp_path / "whole", options)
    left = list(range(n))

    def killed(function):
        def wrapped(*args, **kwargs):
            if not left:
                raise Killed
            left.pop()
            return function(*args, **kwargs)
        return wrapped

    out = tmp_path / f"killed-{n}"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(train, "log", killed(train.log))
        patch.setattr(os, "fsync", killed(os.fsync))
        go(data, out, options)
    main(f"--data {data} {SIZE} --out {out} {options} --resume")
    same_run(tmp_path / "whole", out)

@pytest.mark.parametrize("n", [0, 1, 3, 5])
def test_resume_after_a_kill_is_exact(data, tmp_path, monkeypatch, n):
    kill_and_resume(data, tmp_path, monkeypatch, n, "--residual nag")

@pytest.mark.slow
@pytest.mark.parametrize("options", [
    "--residual nag --mod gate:rate=0.3", "--residual attnres --optimizer muon", "--residual hyper",
    "--mod router:rate=0.25", "--deep_supervision", "--grad_accum 2 --optimizer sgd"])
def test_every_kill(data, tmp_path, monkeypatch, options):
    for n in range(9):
        kill_and_resume(data, tmp_path, monkeypatch, n, options)

def test_a_failing_save_leaves_the_older_checkpoint(copy, monkeypatch):
    before = (copy / "ckpt.pt").read_bytes()

    def full(state, file):
        file.write(b"half of it")
        raise OSError("No space left on device")
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError):
        resume(copy, "--max_iters 12")
    assert (copy / "ckpt.pt").read_bytes() == before
    monkeypatch.undo()
    (copy / "metrics.jsonl").unlink()   # a lost log begins anew
    resume(copy, "--max_iters 12")
    assert load(copy)["step"] == 12 and metrics(copy)[-1]["step"] == 12

def test_divergence_is_an_error_and_is_not_saved(data, copy, tmp_path):
    wild = "--max_iters 60 --lr 1e3 --weight_decay 1e3 --grad_clip 0 --warmup 0"
    sentence = refused(resume, copy, f"{wild} --log_interval 1 --eval_interval 99")
    assert "lower --lr" in sentence and not sentence.startswith("step 60")
    assert load(copy)["step"] == 8
    assert "lower --lr" in refused(resume, copy, f"{wild} --log_interval 99 --eval_interval 1")
    assert all(weight.isfinite().all() for weight in load(copy)["model"].values())

def test_resume_of_an_empty_folder_begins(data, finished, tmp_path):
    (tmp_path / "new").mkdir()
    go(data, tmp_path / "new", "--resume --max_iters 8 --eval_interval 4")
    same_run(finished, tmp_path / "new")

def test_resume_needs_the_same_data(data, steps_data, copy, tmp_path):
    before = content(copy)
    assert "not the data" in refused(resume, copy, f"--data {steps_data} --max_iters 9")
    assert content(copy) == before
    shutil.copytree(data, tmp_path / "moved")   # the same data may have moved
    resume(copy, f"--data {tmp_path / 'moved'} --max_iters 9")

def test_a_run_is_not_overwritten(data, finished, tmp_path):
    for name in "ckpt.pt", "metrics.jsonl":   # either of them is a run
        out = tmp_path / name
        out.mkdir()
        shutil.copy(finished / name, out)
        before = content(out)
        assert "holds a run" in refused(go, data, out)
        assert content(out) == before
    assert "ckpt.pt" in refused(go, data, out, "--resume")
    assert content(out) == before

# ----------------------------------------------------------------------------- processes

def child(line, log, env):
    os.environ.update(env)
    for number, name in (1, "out"), (2, "err"):
        os.dup2(os.open(f"{log}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = (open(i, "w", buffering=1, closefd=False) for i in (1, 2))
    sys.argv = ["train.py", *shlex.split(line)]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")

def start(log, line, **env):
    """python train.py LINE, in a fork of this process"""
    process = multiprocessing.get_context("fork").Process(target=child, args=(line, log, env))
    process.start()
    return process

def start_two(tmp_path, *lines):
    with socket.create_server(("localhost", 0)) as s:
        port = str(s.getsockname()[1])
    return [start(tmp_path / f"process{rank}", line, RANK=str(rank), LOCAL_RANK=str(rank),
                  WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
            for rank, line in enumerate(lines)]

def wait(*processes):
    for process in processes:
        process.join(60)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]

forks = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA can't be used after a fork")

@forks
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_script_as_itself(data, tmp_path, number):
    out = tmp_path / "run"
    process = start(tmp_path / "log", f"--data {data} {SIZE} --out {out} --max_iters 99999")
    while not (out / "ckpt.pt").exists():
        assert process.is_alive()
        time.sleep(0.05)
    os.kill(process.pid, number)
    assert wait(process) == [-number]
    assert "--resume" in (tmp_path / "log.out").read_text() and load(out)["step"] > 0

@forks
def test_a_mistake_is_one_line_and_exit_code_1(data, tmp_path):
    process = start(tmp_path / "log", f"--data {data} --n_layer 0 --out {tmp_path / 'run'}")
    assert wait(process) == [1] and not (tmp_path / "run").exists()
    sentence = (tmp_path / "log.err").read_text()
    assert sentence.startswith("train.py: --n_layer 0") and sentence.count("\n") == 1

@forks
@pytest.mark.parametrize("options", ["--residual nag --mod gate:rate=0.3", "--mod random:rate=0.4"])
def test_two_processes_train_as_two_micro_batches(data, tmp_path, options):
    options += " --max_iters 10 --log_interval 1 --eval_interval 5"
    line = f"--data {data} {SIZE} --out {tmp_path}/two {options}"
    two = start_two(tmp_path, line, line)
    go(data, tmp_path / "one", f"{options} --grad_accum 2")
    assert wait(*two) == [0, 0], (tmp_path / "process0.err").read_text()
    assert (tmp_path / "process1.out").read_text() == ""   # the first process prints
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=1e-4)

@forks
def test_processes_stop_together_and_must_agree(data, tmp_path):
    out = tmp_path / "run"
    line = f"--data {data} {SIZE} --max_iters 99999 --eval_interval 99999"
    two = start_two(tmp_path, f"{line} --out {out}", f"{line} --out {out}")
    while not (out / "ckpt.pt").exists():
        assert two[0].is_alive()
        time.sleep(0.05)
    os.kill(two[1].pid, signal.SIGTERM)   # rank 1 has it, both stop after the same iteration
    codes = wait(*two)
    assert codes[1] == -signal.SIGTERM and codes[0] != 0
    assert "--resume" in (tmp_path / "process0.out").read_text()
    line += " --resume --out"   # the second process finds no run
    two = start_two(tmp_path, f"{line} {out}", f"{line} {tmp_path / 'b'}")
    assert wait(*two) == [1, 1]
    assert "different checkpoints" in (tmp_path / "process0.err").read_text()

# ----------------------------------------------------------------------------- the command line

@pytest.mark.parametrize("line, words", [
    ("--n_lay 3", "unrecognized arguments"), ("--residual x", "choose from"),
    ("--residual nag:x=1", "unknown"), ("--mod x", "choose from"),
    ("--mod gate:rate=0.2", "no gate"), ("--max_iters 0", "must be from 1"),
    ("--max_iters x", "invalid int"), ("--lr nan", "--lr nan"),
    ("--n_embd 30 --n_head 4", "multiple"), ("--repeat 1-2:999", "--repeat"),
    ("--grad_accum 3 --batch_size 4", "multiple"), ("--data nowhere", "no data set"),
    ("--config nowhere", "no settings"), ("--config {file}", "no settings"),
    ("--config {other}", "unknown settings"), ("--init_from nowhere", "no such file"),
    ("--init_from {broken}", "not a checkpoint"), ("--init_from {foreign}", "not a checkpoint"),
    ("--init_from {code}", "not a checkpoint"), ("--remove 1", "--init_from"),
    ("--init_from {run} --remove 2", "blocks 0 to 1"), ("--init_from {run} --remove x", "blocks 0"),
    ("--init_from {run} --remove 0,1", "blocks 0 to 1"),
    ("--init_from {run} --n_embd 64", "don't fit"), ("--init_from {run} --n_layer 3", "don't fit"),
    ("--resume", "--out"), ("--resume --out {broken}", "not a checkpoint"),
    ("--resume --out {run} --n_embd 64", "began with 32"),
    ("--resume --out {run} --optimizer sgd", "began with adamw")])
def test_mistakes_are_one_sentence(data, finished, tmp_path, monkeypatch, line, words):
    class Code:   # a pickle that runs code
        __reduce__ = lambda self: (os.mkdir, ("made",))

    file, other = tmp_path / "file", tmp_path / "other.json"
    file.write_text("no settings")
    other.write_text('{"learning_rate": 1}')
    broken, foreign, code = (tmp_path / name for name in ("broken", "foreign", "code"))
    for folder in broken, foreign, code:
        folder.mkdir()
    (broken / "ckpt.pt").write_text("no checkpoint")
    torch.save(dict(model={}), foreign / "ckpt.pt")
    torch.save(Code(), code / "ckpt.pt")
    monkeypatch.chdir(tmp_path)
    before, there = content(finished), sorted(tmp_path.rglob("*"))
    line = line.format(run=finished, broken=broken, foreign=foreign, code=code, file=file,
                       other=other)
    begin = "" if "--resume" in line or "--data" in line else f"--data {data} "
    assert words in refused(main, begin + line)
    assert content(finished) == before and sorted(tmp_path.rglob("*")) == there
