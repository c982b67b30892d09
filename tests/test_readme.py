"""Every command of the README runs as printed, in a copy of the repository, with flags behind it that make it
short."""
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from programs import ROOT, program

from model import PRESETS, RESIDUALS

README = (ROOT / "README.md").read_text()

# What is typed behind each command so that the whole README takes a minute, and the commands that can't run
# here.
SHORT = {"kernels.py": "--rows",
         "train.py": "--n_layer 2 --max_tokens 0 --max_iters 4 --eval_windows 4 --batch_size 8",
         "sample.py": "--max_new_tokens 20", "analyze.py": "--windows 2",
         "mod_speed.py": "--shapes 2x64x64 --repeats 1 --processes 2"}
NETWORK = ("prepare.py fineweb", "prepare.py shakespeare")
# make: see below; results: an hour; pytest: these tests
ELSEWHERE = ("make", "bash results/", "python -m pytest")


def commands():
    for block in re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S):
        for line in block.splitlines():
            line = line.split("  #")[0].strip()
            if line and not line.startswith(("#", *ELSEWHERE)):
                yield line


def test_commands(tmp_path):
    made = shutil.ignore_patterns(".git", ".venv", ".*cache", "data", "runs", "figures*")
    shutil.copytree(ROOT, tmp_path, ignore=made, dirs_exist_ok=True)
    seen = set()
    for line in commands():
        if any(words in line for words in NETWORK):
            sub = line.split()[2]
            done = program("prepare.py", sub, "--help", cwd=tmp_path)
            assert done.returncode == 0, line
            assert all(w in done.stdout for w in line.split() if w.startswith("--")), line
            continue
        script = next(name for name in ("prepare.py", *SHORT) if name in line)
        seen.add(script)
        short = SHORT.get(script, "")
        if "--resume" in line:   # the size is the run's own
            short = "--max_tokens 0 --max_iters 6"
        line = re.sub(r"--prune (\w+):\d+", r"--prune \1:1",
                      line.replace("--nproc_per_node 8", "--nproc_per_node 2"))
        words = shlex.split(line) + short.split()
        start = ["-m", "torch.distributed.run", "--standalone"] if words[0] == "torchrun" else []
        done = program(*start, *words[1:], cwd=tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert seen == {"prepare.py", *SHORT}
    for code in re.findall(r"^```python\n(import.*?)^```", README, re.M | re.S):
        done = program("-c", code, cwd=tmp_path)
        assert done.returncode == 0 and done.stdout.startswith("def "), done.stderr


@pytest.mark.parametrize("diff", re.findall(r"^```diff\n(.*?)^```", README, re.M | re.S))
def test_solutions_apply(tmp_path, diff):
    """What the workshop's solutions change is there to be changed, and then trains."""
    text = (ROOT / "model.py").read_text()
    for pair in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", diff, re.M):
        old, new = (re.sub("^.", "", part, flags=re.M) for part in pair)
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "model.py").write_text(text)
    code = """if True:
        import torch
        from model import GPT, GPTConfig
        idx = torch.arange(12).view(1, 12)
        for name in ("nag", "template"):
            model = GPT(GPTConfig(residual=name, n_layer=2, n_embd=16, n_head=2, block_size=16,
                                  vocab_size=64))
            for p in model.parameters():
                torch.nn.init.normal_(p, std=0.1)
            model(idx, idx)[1].backward()
            assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
                          env=dict(os.environ, PYTHONPATH=f"{tmp_path}:{ROOT}"))
    assert done.returncode == 0, done.stderr


def test_makefile_targets_exist():
    for block in re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S):
        for target in re.findall(r"^make ?([\w-]*)", block, re.M):
            done = subprocess.run(["make", "--dry-run", *([target] if target else [])], cwd=ROOT,
                                  capture_output=True)
            assert done.returncode == 0, target


def test_table_names_every_residual():
    rows = re.findall(r"^\| `(\w+)` \|.*\| `(\w+)`", README, re.M)
    assert {name for name, _ in rows} == set(RESIDUALS)
    assert all((cls == "Additive") == (name in PRESETS) for name, cls in rows)


@pytest.mark.parametrize("page", ["README.md", "results/README.md", "results/tables.md"])
def test_links_exist(page):
    for path in re.findall(r"\]\(((?!http)[^)#]+)\)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / path).exists(), path


def test_readme_is_finished():
    assert not re.search(r"\b[A-Z]+_(TIME|BPB|TABLE|TEXT)\b", README)
