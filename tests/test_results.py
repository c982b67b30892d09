"""results/README.md says what its JSON files say, and its scripts print commands that train.py accepts."""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import program

from model import GPTConfig
from train import Parser, TrainConfig, add_flags, from_dict

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "results"))
import mod_speed  # noqa: E402
import table  # noqa: E402

README = (ROOT / "results/README.md").read_text()
SCRIPTS = sorted(f"results/{path.name}" for path in (ROOT / "results").glob("*.sh") if path.stem != "common"
                 and re.search(r"\| run_all|^three_seeds", path.read_text(), re.M))   # those that train


def test_readme_is_what_the_json_files_say():
    assert README == table.readme(), "run: python results/table.py"


def test_every_claim_has_a_row():
    assert {*re.findall(r"bash (results/\w+\.sh)", README)} - {"results/NAME.sh"} <= {*SCRIPTS}
    assert re.findall(r"^\| \((\w)\) \|", README, re.M) == list("abcdefghijkl")


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([\w/.]+)\)", README))))
def test_links_exist(path):
    assert (ROOT / "results" / path).exists()


def test_a_table_pairs_seeds_at_each_depth_and_keeps_what_was_not_run_again(tmp_path):
    def finished(label, lr, seed, bpb):
        run = tmp_path / "runs" / f"{label}-lr{lr}-seed{seed}"
        run.mkdir(parents=True)
        (run / "done").touch()
        lines = (json.dumps(dict(val_bpb=loss)) for loss in (bpb + 1, bpb))   # the lowest counts
        (run / "metrics.jsonl").write_text("\n".join(lines))

    def compare(*labels):
        done = subprocess.run([sys.executable, ROOT / "results/compare.py", tmp_path / "runs", *labels],
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    labels, out = ("6-pre", "6-nag", "12-pre", "12-nag"), ("--out", tmp_path / "table.json")
    for i, label in enumerate(labels):
        finished(label, "3e-3", 1, 3.0 + i)
        finished(label, "6e-3", 1, 3.5 + i)
    assert compare("--best", *labels).split() == [word for label in labels for word in (label, "3e-3")]
    assert compare("--edge", "6-pre").split() == ["6-pre", "1.5e-3"]
    for seed in 2, 3:
        for i, label in enumerate(labels):
            finished(label, "3e-3", seed, 3.0 + i * (1 + 0.1 * seed))
    assert compare("--best", *labels) == ""
    compare(*out, *labels)
    rows = json.loads((tmp_path / "table.json").read_text())
    assert rows["6-nag"]["gap"]["mean"] == pytest.approx((1 + 1.2 + 1.3) / 3)
    assert rows["12-nag"]["gap"]["mean"] == pytest.approx((1 + 1.2 + 1.3) / 3)   # to 12-pre, not to 6-pre
    for run in (tmp_path / "runs").iterdir():
        if run.name.startswith("6-") or "lr6e-3" in run.name:
            shutil.rmtree(run)
    compare(*out, "12-pre", "12-nag")
    again = json.loads((tmp_path / "table.json").read_text())
    assert again == rows and again["12-nag"]["sweep"] == {"3e-3": 6.0, "6e-3": 6.5}


@pytest.mark.parametrize("scale", ("cpu", "gpu"))
@pytest.mark.parametrize("script", SCRIPTS)
def test_commands_are_accepted(script, scale):
    """Each train.py command of a dry run has known flags, makes sense, and writes to a folder of its own."""
    assert subprocess.run(["bash", "-n", ROOT / script]).returncode == 0
    env = dict(os.environ, SCALE=scale, DRY="1", PYTHON=sys.executable)
    for name in ("RATES", "DEPTHS", "RUNS", "OUT", "SWEEP"):
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
        assert ("data" in given) == (scale == "gpu" and "kernels" not in script)
    assert len(seen) == len(commands)
    # how fast, not how well
    seeds = {"seed1"} if re.search("mod_speed|kernels", script) else {"seed1", "seed2", "seed3"}
    assert {out[-5:] for out in seen} == seeds


def test_savings_are_medians_of_turns_and_fastest_pieces():
    def repeats(*pieces):
        return [mod_speed.Repeat(each, [1.0]) for each in pieces]

    dense = repeats([4, 4], [4, 6], [8, 4])
    half = repeats([2, 6], [4, 2], [2, 4])          # of turns 1, 0.6, 0.5; of pieces 2 and 2, against 4 and 4
    quarter = repeats([3, 3], [3, 9], [9, 3])       # of turns 0.75, 1.2, 1; of pieces 3 and 3
    found = mod_speed.savings([(half, dense), (quarter, dense)])
    assert mod_speed.undisturbed(half) == 4 and mod_speed.undisturbed(dense) == 8
    assert found["undisturbed"] == pytest.approx((0.5 + 0.25) / 2)
    assert found["undisturbed_error"] == pytest.approx(0.125)   # half of what two values differ by
    assert found["measured"] == pytest.approx(1 - (0.75 + 1) / 2)   # of all six turns
    assert found["standard_error"] == pytest.approx((1 - 0.6) / 2)


@pytest.mark.slow
def test_mod_compile_times_four_ways(tmp_path):
    size = ["--n_layer", 2, "--n_embd", 64, "--block_size", 200, "--batch_size", 3]   # no multiple of a bucket
    done = program("results/mod_compile.py", *size, "--repeats", 2, "--out", tmp_path / "found.json")
    assert done.returncode == 0, done.stderr
    ways = json.loads((tmp_path / "found.json").read_text())["ways"]
    assert ways["eager"]["ratio_to_eager"] == 1 and len(ways) == len(done.stdout.splitlines()) == 4
