"""What a user can mend is told in a sentence; older runs and changed classes go on; machines differ."""
import json
import socket
import subprocess
import sys

import pytest
import torch

import processes
import runs
import sample
import sentences
import train
from conftest import ROOT
from model import GPT, GPTConfig
from test_train import SIZE, copy, data, edited, finished, resume, start, wait

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
    changes = json.loads((copy / "config.json").read_text())["changes"]   # What it lacked is noted.
    assert changes.keys() == {"8"} and changes["8"].keys() == {name, "max_iters"}

# ------------------------------------------------------------------------------- sentences.start

def raises(error):
    def main():
        raise error
    return main

@pytest.mark.parametrize("error, words", [
    (MemoryError(), "out of memory; make the model"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), "out of memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory"),
    (RuntimeError("InvalidCxxCompiler: No working C++ compiler found"), "--no-compile"),
    (RuntimeError("Failed to find C compiler. Please specify"), "--no-compile"),
    (type("DistNetworkError", (RuntimeError,), {})("EADDRINUSE\nand a trace"), "another --master_port (Dist"),
    (OSError(28, "No space left on device"), "No space left")])
def test_what_a_user_can_mend_is_one_sentence(error, words):
    with pytest.raises(SystemExit) as end:
        sentences.start(raises(error))
    assert words in end.value.code and "\n" not in end.value.code

# The text may have a path such as dist-packages in it, or the name of torch's compiler.
@pytest.mark.parametrize("text", ["shapes do not fit", "in /usr/lib/python3/dist-packages/torch/nn.py",
                                  "BackendCompilerFailed"])
def test_a_mistake_in_the_code_has_its_traceback(text):
    with pytest.raises(RuntimeError, match=text):
        sentences.start(raises(RuntimeError(text)))

def test_a_reader_that_has_had_enough_is_no_failure():
    """python sample.py runs/nag | head"""
    code = ("import sentences, sys\ndef main():\n    for _ in range(9999):\n        print('text', flush=True)\n"
            "sentences.start(main)")
    words = f"{sys.executable} -c \"$CODE\" | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", words], cwd=ROOT, env=dict(CODE=code, PATH="/usr/bin:/bin"),
                          capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("text\n0\n", "")

# ------------------------------------------------------------------------------- processes

def test_a_port_in_use_is_one_sentence(data, tmp_path):
    with socket.create_server(("localhost", 0)) as taken:
        port = str(taken.getsockname()[1])
        one = start(tmp_path / "one", "--data", data, *SIZE, "--out", tmp_path / "x", RANK="0",
                    LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
        assert wait(one) == [1]
    said = (tmp_path / "one.err").read_text()
    assert "another --master_port" in said and "Traceback" not in said

def test_threads(monkeypatch):
    """One for a small model, unless the user says otherwise; more for a large one."""
    before = torch.get_num_threads()
    try:
        for n_embd, variable, n_threads in (768, None, 4), (128, None, 1), (128, "4", 4):
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            if variable:
                monkeypatch.setenv("OMP_NUM_THREADS", variable)
            torch.set_num_threads(4)
            processes.set_threads(n_embd, "cpu")
            assert torch.get_num_threads() == n_threads
    finally:
        torch.set_num_threads(before)
