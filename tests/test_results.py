"""results/README.md says what its JSON files say, and its scripts print commands that train.py accepts."""
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from model import GPTConfig
from train import Parser, TrainConfig, add_flags, from_dict

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "results"))
import table  # noqa: E402

README = (ROOT / "results/README.md").read_text()
SCRIPTS = sorted(f"results/{path.name}" for path in (ROOT / "results").glob("*.sh")
                 if "| run_all" in path.read_text())   # those that train


def test_readme_is_what_the_json_files_say():
    assert README == table.readme(), "run: python results/table.py"


def test_every_claim_has_a_row():
    assert {*re.findall(r"bash (results/\w+\.sh)", README)} - {"results/NAME.sh"} <= {*SCRIPTS}
    assert re.findall(r"^\| \((\w)\) \|", README, re.M) == list("abcdefghijkl")


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([\w/.]+)\)", README))))
def test_links_exist(path):
    assert (ROOT / "results" / path).exists()


@pytest.mark.parametrize("scale", ("cpu", "gpu"))
@pytest.mark.parametrize("script", SCRIPTS)
def test_commands_are_accepted(script, scale):
    """Each train.py command of a dry run has known flags, makes sense, and writes to a folder of its own."""
    assert subprocess.run(["bash", "-n", ROOT / script]).returncode == 0
    env = dict(os.environ, SCALE=scale, DRY="1", PYTHON=sys.executable)
    for name in ("RATES", "DEPTHS", "RUNS", "OUT"):
        env.pop(name, None)
    done = subprocess.run(["bash", ROOT / script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    parser, seen = Parser("train.py", allow_abbrev=False), {}
    add_flags(parser, GPTConfig, TrainConfig)
    commands = [line for line in done.stdout.splitlines() if line.startswith("python train.py")]
    for flags in [shlex.split(line)[2:] for line in commands]:
        given = vars(parser.parse(flags))
        config = from_dict(GPTConfig, given), from_dict(TrainConfig, given)
        assert not [problem for part in config for problem in part.problems()], flags
        seen[given["out"]] = flags
        assert given["out"].startswith("runs/gpu/" if scale == "gpu" else "runs/")
        assert ("data" in given) == (scale == "gpu")
    assert len(seen) == len(commands)
    seeds = {"seed1"} if "mod_speed" in script else {"seed1", "seed2", "seed3"}   # how fast, not how well
    assert {out[-5:] for out in seen} == seeds
