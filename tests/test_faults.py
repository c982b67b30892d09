"""What was found wrong once, by reading and by attack, and has to stay right: a test for each."""
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
import torch

import flags
import processes
import runs
import sample
import train
from conftest import ROOT
from model import GPT, GPTConfig
from test_train import (SIZE, copy, data, edited, finished, go, load, metrics, refused, resume,
                        start, start_two, wait, wait_for)

# ------------------------------------------------------------------------------------ wrong numbers

def test_metrics_end_where_the_checkpoint_does(copy):
    """Lines of steps after the checkpoint are of a timeline that has died."""
    with open(copy / "metrics.jsonl", "a") as f:
        f.write('{"step": 9, "loss": 1.0}\n{"step": 11, "val_loss": 0.1}\n')
    assert resume(copy, "--max_iters", 12, "--log_interval", 4) == 0
    found = metrics(copy)
    assert 9 not in found and "val_loss" not in found.get(11, {}) and max(found) == 12

def test_moments_go_by_name():
    """A class that declares its parameters in another order gets its own moments back."""
    def optimizers(model):
        return train.make_optimizers(model, train.TrainConfig(optimizer="adamw"))
    gpt = GPT(GPTConfig("nag", n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=8))
    made = optimizers(gpt)
    for number, p in enumerate(gpt.parameters()):
        p.grad = torch.full_like(p, number + 1.0)
    made[0].step()
    saved = runs.optimizer_state(gpt, made)
    other = GPT(gpt.config)
    for residual in other.residuals():
        residual._parameters = dict(reversed(residual._parameters.items()))
    assert [*dict(other.named_parameters())] != [*dict(gpt.named_parameters())]
    again = optimizers(other)
    runs.restore_optimizers(other, again, saved)
    of_other = runs.optimizer_state(other, again)[0]
    for name, moment in saved[0].items():
        assert torch.equal(of_other[name]["exp_avg"], moment["exp_avg"]), name

# ----------------------------------------------------------------------------- silent, in the way

@pytest.mark.parametrize("name", ["activation", "gate_lr", "eval_windows"])
def test_a_run_from_before_a_flag_opens(copy, tmp_path, name):
    """A hacker adds a field with a default. Runs that lack it go on as if they had it."""
    edited(lambda config: config.pop(name))(copy / "config.json")
    if name == "activation":
        edited(lambda ckpt: ckpt["model_config"].pop(name))(copy / "ckpt.pt")
    model, settings = runs.open_run(copy)
    assert model.config.activation == "gelu"
    sample.main([str(copy), "--max_new_tokens", "2", "--device", "cpu"])
    words = "--config", copy / "config.json", "--out", tmp_path / "new", "--max_iters", 1
    assert train.main([str(word) for word in words]) == 0
    assert resume(copy, "--max_iters", 10) == 0

def test_a_process_that_is_killed_is_told_by_the_other(data, tmp_path):
    run = tmp_path / "run"
    two = start_two(tmp_path, "--data", data, *SIZE, "--out", run, "--max_iters", 99999)
    wait_for(run / "ckpt.pt", two[0])
    two[1].kill()
    assert wait(*two) == [1, -signal.SIGKILL]
    said = (tmp_path / "process0.err").read_text()
    assert "another process of this run has ended" in said and "Traceback" not in said

@pytest.mark.parametrize("error", [
    MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")])
def test_a_lack_of_memory_is_one_sentence(error, capsys):
    def main():
        raise error
    with pytest.raises(SystemExit, match="^1$"):
        flags.start(main)
    assert "out of memory; make the model" in capsys.readouterr().err

def test_a_mistake_of_ours_has_its_traceback():
    def main():
        raise RuntimeError("shapes do not fit")
    with pytest.raises(RuntimeError, match="shapes"):
        flags.start(main)

@pytest.mark.parametrize("error, status, words", [("BrokenPipeError", 0, b""),
                                                  ("OSError('x')", 1, b"-c: x")])
def test_a_reader_that_has_had_enough_is_no_failure(error, status, words):
    """python sample.py runs/nag | head"""
    code = f"import flags\ndef main():\n    raise {error}\nflags.start(main)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr.strip()) == (status, words)

# ------------------------------------------------------------------------------- ways in

def test_what_was_looked_at_may_have_changed(data, tmp_path, monkeypatch):
    """Another run ends between our look at the folder and our lock: its files stay."""
    out, flock = tmp_path / "out", runs.fcntl.flock
    def late(*args):
        (out / "ckpt.pt").write_text("theirs")
        flock(*args)
    monkeypatch.setattr(runs.fcntl, "flock", late)
    assert "holds files" in refused("--data", data, *SIZE, "--out", out)
    assert (out / "ckpt.pt").read_text() == "theirs"

def test_a_hard_link_is_not_appended_to(copy, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text('{"step": 0, "loss": 1.0}\n')
    (copy / "metrics.jsonl").unlink()
    os.link(mine, copy / "metrics.jsonl")
    assert resume(copy, "--max_iters", 10) == 0
    assert mine.read_text() == '{"step": 0, "loss": 1.0}\n' and len(metrics(copy)) > 1

# ---------------------------------------------------------------------------------------- and more

def test_betas_of_gates_are_flags():
    gpt = GPT(GPTConfig("nag", n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=8))
    config = train.TrainConfig(optimizer="adamw", gate_beta1=0.5, beta1=0.7, beta2=0.6)
    groups = train.make_optimizers(gpt, config)[0].param_groups
    assert [group["betas"] for group in groups] == [(0.7, 0.6), (0.7, 0.6), (0.5, 0.6)]
    assert groups[2]["params"]

def test_threads(monkeypatch):
    """One for a small model, unless the user says otherwise; more for a large one."""
    before = torch.get_num_threads()
    try:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        torch.set_num_threads(4)
        assert processes.pick_threads(GPTConfig(n_embd=768), "cpu", n_processes=2) == 2
        assert processes.pick_threads(GPTConfig(n_embd=128), "cpu") == 1
        torch.set_num_threads(3)
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert processes.pick_threads(GPTConfig(n_embd=128), "cpu") == 3
    finally:
        torch.set_num_threads(before)

@pytest.mark.parametrize("where", ["/usr/lib/python3/dist-packages/torch/nn.py",
                                   "BackendCompilerFailed"])
def test_an_error_of_another_kind_keeps_its_traceback(where):
    """Its text may have a path such as dist-packages in it, or the name of torch's compiler."""
    def main():
        raise RuntimeError(f"wrong shape in {where}")
    with pytest.raises(RuntimeError, match="wrong shape"):
        flags.start(main)

@pytest.mark.parametrize("error", ["InvalidCxxCompiler: No working C++ compiler found",
                                   "Failed to find C compiler. Please specify"])
def test_no_compiler_is_one_sentence(error, capsys):
    def main():
        raise RuntimeError(error)
    with pytest.raises(SystemExit, match="^1$"):
        flags.start(main)
    assert "--no-compile" in capsys.readouterr().err

def test_a_port_in_use_is_one_sentence(data, tmp_path):
    with socket.create_server(("localhost", 0)) as taken:
        port = str(taken.getsockname()[1])
        one = start(tmp_path / "one", "--data", data, *SIZE, "--out", tmp_path / "x", RANK="0",
                    LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
        assert wait(one) == [1]
    said = (tmp_path / "one.err").read_text()
    assert "torchrun" in said and "Traceback" not in said and "another --master_port" in said
