"""What was found wrong once, by reading and by attack, and has to stay right: one test for each."""
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile

import pytest
import torch

import analyze
import flags
import processes
import runs
import sample
import train
from conftest import ROOT
from model import GPT, GPTConfig
from test_train import (SIZE, copy, data, edited, finished, go, load, metrics, moments, refused, resume,
                        start, start_two, wait)

# ------------------------------------------------------------------------------------ wrong numbers

def test_an_interrupted_warm_up_is_saved(data, tmp_path):
    """A run that ends inside NAG's warm-up, opened again, has the loss that was logged."""
    flags = "--residual nag:warmup=0.9 --max_iters 8 --eval_interval 4 --lr 1e-2 --optimizer adamw".split()
    go(data, tmp_path / "run", *flags)
    before_step = GPT.before_step
    def interrupted(self, progress):   # at step 4 of 8, just before the evaluation
        before_step(self, progress)
        if progress > 0.6:
            signal.raise_signal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPT, "before_step", interrupted)
        assert go(data, tmp_path / "half", *flags) == 128 + signal.SIGTERM
    assert load(tmp_path / "half")["step"] == 4
    model, settings = runs.open_run(tmp_path / "half")
    x, y = train.prepare.val_windows(data, 32, 8)
    nats = train.evaluate(model, x, y, torch.ones(320), 4)[0]
    assert nats == pytest.approx(metrics(tmp_path / "run")[4]["val_loss"], rel=1e-5)

def test_metrics_end_where_the_checkpoint_does(copy):
    """Lines of steps after the checkpoint are of a timeline that has died."""
    with open(copy / "metrics.jsonl", "a") as f:
        f.write('{"step": 9, "loss": 1.0}\n{"step": 11, "val_loss": 0.1}\n')
    assert resume(copy, "--max_iters", 12, "--log_interval", 4) == 0
    assert 9 not in metrics(copy) and "val_loss" not in metrics(copy).get(11, {}) and max(metrics(copy)) == 12

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
    assert [name for name, _ in other.named_parameters()] != [name for name, _ in gpt.named_parameters()]
    again = optimizers(other)
    runs.restore_optimizers(other, again, saved, may_lack_moments=False)
    of_other = runs.optimizer_state(other, again)[0]
    for name, moment in saved[0].items():
        assert torch.equal(of_other[name]["exp_avg"], moment["exp_avg"]), name

# --------------------------------------------------------------------------------- silent, in the way

@pytest.mark.parametrize("name", ["activation", "gate_lr", "eval_windows"])
def test_a_run_from_before_a_flag_opens(copy, tmp_path, name):
    """A hacker adds a field with a default. Runs that lack it go on as if they had it."""
    edited(lambda config: config.pop(name))(copy / "config.json")
    if name == "activation":
        edited(lambda ckpt: ckpt["model_config"].pop(name))(copy / "ckpt.pt")
    model, settings = runs.open_run(copy)
    assert model.config.activation == "gelu"
    sample.main([str(copy), "--max_new_tokens", "2", "--device", "cpu"])
    analyze.main([str(copy), "--out", str(tmp_path / "figures"), "--only", "update"])
    assert train.main(["--config", str(copy / "config.json"), "--out", str(tmp_path / "new"), "--max_iters", "1"]) == 0
    assert resume(copy, "--max_iters", 10) == 0
    assert json.loads((copy / "config.json").read_text())[name] == getattr(
        GPTConfig() if name == "activation" else train.TrainConfig(), name)

def test_every_process_speaks(data, tmp_path):
    """RANK=1 alone is refused aloud; so is what goes wrong in the second of two processes only."""
    lonely = start(tmp_path / "lonely", "--data", data, *SIZE, "--out", tmp_path / "x", RANK="1")
    assert wait(lonely) == [1]
    assert "process 1: RANK=1: must be below WORLD_SIZE=1" in (tmp_path / "lonely.err").read_text()

def test_a_process_that_is_killed_is_told_by_the_other(data, tmp_path):
    two = start_two(tmp_path, "--data", data, *SIZE, "--out", tmp_path / "run", "--max_iters", 99999)
    while not (tmp_path / "run/best.pt").exists():
        assert two[0].is_alive()
        time.sleep(0.01)
    two[1].kill()
    assert wait(*two) == [1, -signal.SIGKILL]
    said = (tmp_path / "process0.err").read_text()
    assert "another process of this run has ended" in said and "Traceback" not in said

@pytest.mark.parametrize("error", [
    MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:113] . DefaultCPUAllocator: can't allocate memory")])
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

@pytest.mark.parametrize("error, status, words", [("BrokenPipeError", 0, b""), ("OSError('x')", 1, b"-c: x")])
def test_a_reader_that_has_had_enough_is_no_failure(error, status, words):
    """python sample.py runs/nag | head"""
    code = f"import flags\ndef main():\n    raise {error}\nflags.start(main)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr.strip()) == (status, words)

@pytest.mark.parametrize("line, words", [
    ("--n_layer 99999999999999999999", "--n_layer"), ("--n_layer 1000000000", "--n_layer"),
    ("--residual mixln:alpha=7", "alpha"), ("--residual nag --norm layer", "--norm layer"),
    ("--repeat 1-2:999", "--repeat 1-2:999")])
def test_ranges_come_before_memory(data, tmp_path, line, words):
    assert words in refused("--data", data, *SIZE, "--out", tmp_path / "x", *line.split())

# ----------------------------------------------------------------------------------- ways in, and hangs

def test_only_our_own_folders_are_replaced(data, tmp_path):
    """A checkpoint of another program has a config.json, too."""
    files = {"config.json": json.dumps(dict(model_type="llama", hidden_size=4096)), "ckpt.pt": "weights"}
    (tmp_path / "llama").mkdir()
    for name, text in files.items():
        (tmp_path / "llama" / name).write_text(text)
    sentence = refused("--data", data, *SIZE, "--out", tmp_path / "llama", "--overwrite")
    assert "no run folder of this program" in sentence
    assert {path.name: path.read_text() for path in (tmp_path / "llama").iterdir()} == files

def test_what_was_looked_at_may_have_changed(data, tmp_path, monkeypatch):
    """Another run ends between our look at the folder and our lock: its files stay."""
    out, flock = tmp_path / "out", runs.fcntl.flock
    def late(*args):
        (out / "ckpt.pt").write_text("theirs")
        flock(*args)
    monkeypatch.setattr(runs.fcntl, "flock", late)
    assert "holds files" in refused("--data", data, *SIZE, "--out", out)
    assert (out / "ckpt.pt").read_text() == "theirs"

@pytest.mark.parametrize("name", ["config.json", "ckpt.pt", "metrics.jsonl"])
def test_pipes_do_not_hang(copy, name):
    """A read of a pipe waits for ever."""
    (copy / name).unlink()
    os.mkfifo(copy / name)
    signal.alarm(20)
    if name == "metrics.jsonl":   # It only is a plot less.
        assert resume(copy, "--max_iters", 9) == 0
    else:
        assert name in refused("--out", copy, "--resume")
    assert "--out" in refused(*SIZE, "--out", copy)
    signal.alarm(0)

def test_a_hard_link_is_not_appended_to(copy, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text('{"step": 0, "loss": 1.0}\n')
    (copy / "metrics.jsonl").unlink()
    os.link(mine, copy / "metrics.jsonl")
    assert resume(copy, "--max_iters", 10) == 0
    assert mine.read_text() == '{"step": 0, "loss": 1.0}\n' and len(metrics(copy)) > 1

def test_what_says_and_refusals_print_is_harmless(capsys):
    flags.say("a\x1b]0;x\x07\r\x9bb\nc")
    assert capsys.readouterr().out == "a?]0;x???b\nc\n"
    with pytest.raises(SystemExit, match=r"^a\?b$"):
        flags.refuse("a\x1bb")

CRAFTED = {
    "step of 1e18": lambda c: c.update(step=10 ** 18), "flops": lambda c: c.update(flops=math.nan),
    "norms": lambda c: c["grad_norms"].fill_(math.nan), "no moments": lambda c: c["optimizers"][0].clear(),
    "whole moments": lambda c: moments(c).update(exp_avg=moments(c)["exp_avg"].long()),
    "complex weights": lambda c: c["model"].update({"wte.weight": c["model"]["wte.weight"] * 1j}),
    "layers": lambda c: c["model_config"].update(n_layer=10 ** 9),
    "a size of another type": lambda c: c["model_config"].update(block_size=32.0),
    "repeat": lambda c: c["model_config"].update(repeat="1-2:999")}

@pytest.mark.parametrize("what", CRAFTED)
def test_crafted_checkpoints(copy, what):
    edited(CRAFTED[what])(copy / "ckpt.pt")
    before = (copy / "metrics.jsonl").read_bytes()
    assert "ckpt.pt" in refused("--out", copy, "--resume", "--max_iters", 20)
    assert (copy / "metrics.jsonl").read_bytes() == before

def test_a_zip_bomb_takes_no_memory(copy):
    bomb = copy / "bomb"
    with zipfile.ZipFile(copy / "ckpt.pt") as old, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            new.writestr(item.filename, old.read(item))
        new.writestr("archive/data/99", bytes(30_000_000))
    bomb.replace(copy / "ckpt.pt")
    assert "compressed" in refused("--out", copy, "--resume")

# ---------------------------------------------------------------------------------------- and more

def test_betas_of_gates_are_flags():
    gpt = GPT(GPTConfig("nag", n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=8))
    config = train.TrainConfig(optimizer="adamw", gate_beta1=0.5, beta1=0.7, beta2=0.6)
    groups = train.make_optimizers(gpt, config)[0].param_groups
    assert [group["betas"] for group in groups] == [(0.7, 0.6), (0.7, 0.6), (0.5, 0.6)] and groups[2]["params"]

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

# ---------------------------------------------------------------------------- files of no good will

def test_a_sentence_is_a_line(capsys):
    """... whatever was typed: a line break, or far too much"""
    for typed in "a\nb", "a " * 5000:
        with pytest.raises(SystemExit) as end:
            train.main(["--residual", typed])
        assert "\n" not in end.value.code and len(end.value.code) <= 1000

def test_large_files_are_not_read(copy, data, tmp_path):
    """A config.json of gigabytes, and a metrics.jsonl with a line of gigabytes, take no memory."""
    before = runs.read_metrics(copy)
    with open(copy / "metrics.jsonl", "ab") as f:
        f.truncate(f.tell() + 3_000_000)
    assert runs.read_metrics(copy) == before
    with open(copy / "config.json", "ab") as f:
        f.truncate(2_000_000_000)
    with pytest.raises(SystemExit, match="config.json: can't be read.*too large"):
        runs.open_run(copy)

def test_a_nest_of_lists_is_not_written_out(copy):
    """A setting that would be exponentially long, if a sentence said it"""
    nest = []
    for _ in range(40):
        nest = [nest, nest]
    with pytest.raises(ValueError, match="residual is a list"):
        runs.fill_in(dict(residual=nest), dict(residual="pre"))

def test_bad_data_make_no_folder(data, tmp_path):
    broken = tmp_path / "data"
    broken.mkdir()
    for path in os.scandir(data):
        shard = bytearray(open(path, "rb").read())
        if "train" in path.name:
            shard[1024:] = b"\xff" * (len(shard) - 1024)
        (broken / path.name).write_bytes(shard)
    assert "has a token beyond" in refused("--data", broken, *SIZE, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()

def test_one_block_is_a_model(data, tmp_path):
    """All statistics of a run that has but one block: those that need two say so on the page."""
    go(data, tmp_path / "run", "--n_layer", "1", "--max_iters", "2")
    analyze.main([str(tmp_path / "run"), "--out", str(tmp_path / "figures")])
    numbers = json.loads((tmp_path / "figures/numbers.json").read_text())
    assert "two or more blocks" in numbers["statistics"]["layer_parallel"]["run"]

@pytest.mark.parametrize("where", ["/usr/lib/python3/dist-packages/torch/nn.py", "BackendCompilerFailed"])
def test_an_error_of_another_kind_keeps_its_traceback(where):
    """Its text may have a path such as dist-packages in it, or the name of torch's compiler."""
    def main():
        raise RuntimeError(f"wrong shape in {where}")
    with pytest.raises(RuntimeError, match="wrong shape"):
        flags.start(main)

def test_a_refused_run_leaves_nothing(data, tmp_path, monkeypatch):
    """A model that can't be made, say: no folder, no lock"""
    def too_large(config):
        raise MemoryError
    monkeypatch.setattr(train, "GPT", too_large)
    with pytest.raises(MemoryError):
        go(data, tmp_path / "run")
    assert not (tmp_path / "run").exists()

@pytest.mark.parametrize("name", ["config.json", "ckpt.pt", "best.pt", "metrics.jsonl"])
def test_a_folder_with_the_name_of_a_file_costs_nothing(copy, data, name):
    (copy / name).unlink()
    (copy / name).mkdir()
    before = {path.name: path.is_dir() or path.read_bytes() for path in copy.iterdir()}
    for flag in "--resume", "--overwrite":
        assert str(copy) in refused("--data", data, *SIZE, "--out", copy, flag)
    assert {path.name: path.is_dir() or path.read_bytes() for path in copy.iterdir()} == before

@pytest.mark.parametrize("what, change", {
    "bytearray": lambda c: c.update(more=bytearray(8)),
    "beyond 1e6": lambda c: c["model"]["wte.weight"].fill_(1e9),
    "than can be": lambda c: c["model_config"].update(block_size=2 ** 20, n_head=1, n_embd=32 * 2 ** 10),
    "below 0": lambda c: moments(c)["exp_avg_sq"].fill_(-1.0),
    "too large, or": lambda c: moments(c)["exp_avg"].fill_(1e30)}.items())
def test_more_crafted_checkpoints(copy, what, change, monkeypatch):
    edited(change)(copy / "ckpt.pt")
    if what == "than can be":   # as if all its weights were there
        monkeypatch.setattr(runs, "fewest_weights", lambda config: 0)
        ckpt = load(copy)
        with pytest.raises(ValueError, match=what):
            runs.check_model_config(copy / "ckpt.pt", GPTConfig(**ckpt["model_config"]), None)
    else:
        assert what in refused("--out", copy, "--resume", "--max_iters", 20)

def test_config_may_be_a_folder(copy, data, tmp_path):
    assert train.main(["--config", str(copy), "--out", str(tmp_path / "new"), "--max_iters", "1"]) == 0
    assert "--config: is empty" in refused("--config", "")

@pytest.mark.parametrize("error, words", [("InvalidCxxCompiler: No working C++ compiler found", "--no-compile"),
                                          ("Failed to find C compiler. Please specify", "--no-compile")])
def test_no_compiler_is_one_sentence(error, words, capsys):
    def main():
        raise RuntimeError(error)
    with pytest.raises(SystemExit, match="^1$"):
        flags.start(main)
    assert words in capsys.readouterr().err

def test_a_port_in_use_is_one_sentence(data, tmp_path):
    with socket.create_server(("localhost", 0)) as taken:
        port = str(taken.getsockname()[1])
        one = start(tmp_path / "one", "--data", data, *SIZE, "--out", tmp_path / "x", RANK="0", LOCAL_RANK="0",
                    WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
        assert wait(one) == [1]
    said = (tmp_path / "one.err").read_text()
    assert f"MASTER_PORT={port}" in said and "Traceback" not in said and "another port" in said

def test_analyze_replaces_only_its_own(copy, tmp_path, monkeypatch):
    """A picture, or numbers, of somebody else; a folder where nobody may write; a backend that is none"""
    figures = tmp_path / "figures"
    words = [copy, "--out", figures, "--only", "update"]
    figures.mkdir()
    for name in "update.png", "numbers.json":
        (figures / name).write_text('{"mine": 1}')
        assert f"{name} that is none of ours" in refused(*words, call=analyze.main)
        assert (figures / name).read_text() == '{"mine": 1}'
        (figures / name).unlink()
    for _ in range(2):   # the second time over its own
        analyze.main([str(word) for word in words])
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "may not write" in refused(*words, call=analyze.main)
    code = "import analyze, sys; sys.exit(analyze.matplotlib.get_backend() != 'agg')"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | dict(MPLBACKEND="nosuch")).returncode == 0

def test_a_model_without_a_loss_has_no_page(copy, tmp_path, monkeypatch):
    monkeypatch.setattr(analyze, "evaluate", lambda *args: (math.nan, math.nan, 0.0))
    assert "its loss is nan" in refused(copy, "--out", tmp_path / "figures", call=analyze.main)
