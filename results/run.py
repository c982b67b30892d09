"""
The runs behind results/README.md: each is a command of train.py, and a line of runs.csv.

    python results/run.py staircase --out mine         # repeats an experiment: mine/runs.csv
    python results/run.py staircase --out mine --dry   # only prints the commands

Two runs go on at a time. After Ctrl-C, the same command goes on. A run is measured on 512
validation windows; rules.py says what else is measured in some experiments. Then its folder, below
runs/results, can be deleted. Until then, if you delete its lines, it is measured anew. Seed 1
chooses learning rates; the others decide, see summarize.py. On a GPU, give --workers 1.

An experiment of your own is a key in PLANS. Once all of it has run, its plan can go: runs.csv has
the commands, each with the commit that ran it. Those up to cc39890 are of earlier editions. Four
kinds are left out: NAG that paid from the start, which git checkout e690699 repeats; those with
--mod_rate, which git checkout 7cf98d5 repeats; nGPT, which git checkout cc39890 repeats; and those
with --device cuda, which need a GPU.
"""
import collections
import concurrent.futures
import csv
import os
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "results"), str(ROOT)]
import analyze
import prepare
import rules
from flags import flag, parse, refuse, start
from model import num_params
from train import open_run, read_checkpoint, read_metrics, read_settings, say

# -------------------------------------------------------------------------------------- the plans

# A variant: its name in the tables, its flags, and rates and seeds: each rate runs with each seed.
Plan = collections.namedtuple("Plan", "variant flags rates seeds")

# Experiment -> its variants. comparisons.csv says what is compared. For example:
#
#     "mine": [Plan("my NAG", "--data data/stdlib --residual nag --max_iters 300",
#                   rates=[1e-2, 2e-2], seeds=[1])]
PLANS = {}

SKIP = "cost", "price", "late", "late price"   # In these, who skips is measured, too.

PAID_FROM_THE_START = "cost", "price", "paid depth", "from the start"

def can_run(row):
    """A line of runs.csv. Is it a run of train.py, as it is now, on this machine?"""
    command = row["command"]
    if "--device cuda" in command and not torch.cuda.is_available():
        return False
    if "--gain_cost" in command and row["experiment"] in PAID_FROM_THE_START:
        return False
    return command.startswith("--") and "--mod_rate" not in command and "ngpt" not in command

def all_runs():
    """-> what has run and can run again, and what is planned: dicts with columns of runs.csv"""
    runs = [row for row in read_runs(ROOT / "results/runs.csv") if can_run(row)]
    for experiment, plans in PLANS.items():
        for variant, flags, rates, seeds in plans:
            runs += [dict(experiment=experiment, variant=variant, seed=str(seed), lr=f"{rate:g}",
                          command=f"{flags} --lr {rate:g} --seed {seed}")
                     for seed in seeds for rate in rates]
    return runs

def missing_runs(experiments, path):
    """-> those that a file of runs lacks. All variants get a seed before the next seed comes."""
    done = {(row["experiment"], row["command"]) for row in read_runs(path)}
    wanted = {(run["experiment"], run["command"]): run for run in all_runs()
              if run["experiment"] in experiments}
    missing = [run for key, run in wanted.items() if key not in done]
    return sorted(missing, key=lambda run: int(run["seed"]))

# ---------------------------------------------------------------------------------------- one run

def folder_of(run):
    name = "-".join(run[column] for column in ("experiment", "variant", "lr", "seed"))
    return ROOT / "runs/results" / name.replace(" ", "-").replace(",", "")

def train(run):
    """Trains it, or goes on with it, and returns it"""
    folder = folder_of(run)
    flags = ["--resume"] if (folder / "ckpt.pt").exists() else shlex.split(run["command"])
    words = [sys.executable, "train.py", "--out", str(folder), *flags]
    done = subprocess.run(words, cwd=ROOT, text=True, capture_output=True)
    if done.returncode:
        refuse(f"{shlex.join(words)}: ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return run

def inspect(folder, n_windows=512):
    """Run folder -> what the statistics of analyze.py take, with so many validation windows"""
    model, config = open_run(folder, read_settings(folder)["device"])
    windows = prepare.windows_of(config["data"], "val", config["block_size"], n_windows)
    puzzle = prepare.load_meta(config["data"]).get("steps")
    return analyze.Run(model, config, windows, puzzle)

def columns_of(folder, inspected):
    """Run folder -> the columns of runs.csv that are not in its plan"""
    model, config = inspected.model, inspected.config
    ran = inspected.share_that_ran(model.decider).mean().item()
    ckpt = read_checkpoint(folder)   # The last log may be from some iterations before.
    tokens = ckpt["step"] * config["batch_size"] * config["block_size"]
    speeds = [entry["tok_s"] for entry in read_metrics(folder).values() if "tok_s" in entry]
    seconds = tokens / statistics.median(speeds[1:] or speeds)   # without the evaluations
    found = dict(tokens=tokens, parameters=num_params(model), seconds=f"{seconds:.0f}",
                 flops=f"{ckpt['flops']:.4g}", bits=f"{inspected.bits:.5f}",
                 skipped=f"{1 - ran:.3f}", steps="", right="")
    if inspected.puzzle:
        found |= rules.as_columns(inspected.right, inspected)
    return found

@torch.no_grad()
def measure(run, out):
    """Adds a trained run to the files of the folder `out`, and returns its line. All is measured
    before runs.csv gets a line: so a run is there whole, or it counts as missing."""
    folder = folder_of(run)
    inspected = inspect(folder)
    row = run | columns_of(folder, inspected)
    lines = [row]
    # What else is measured of it gets lines, too. Their command is ours: train.py can't make them.
    same = {name: run[name] for name in ("experiment", "variant", "seed", "lr")}
    same["command"] = f"results/run.py {run['experiment']}"
    decides = run["seed"] != "1"
    if decides and run["experiment"] in SKIP and inspected.model.config.gain_cost:
        for what, columns in rules.measure_skipping(inspected):
            lines.append(same | columns | dict(variant=f"{run['variant']}, {what}"))
    if decides and run["experiment"] in ("ill", "fanin"):
        found = rules.measure_blocks(inspect(folder, 64), read_metrics(folder))
        append(out / "ill.csv", [same | line for line in found], rules.ILL_COLUMNS)
    append(out / "runs.csv", lines)
    return row

# -------------------------------------------------------------------------------------- CSV files

COLUMNS = ["experiment", "variant", "seed", "lr", "tokens", "parameters", "seconds", "flops",
           "bits", "steps", "right", "skipped", "commit", "command"]

def read_runs(path):
    """runs.csv -> a list of dicts, all strings"""
    if not Path(path).is_file():
        return []
    with open(path, newline="", encoding="utf-8", errors="replace") as f:
        header, *lines = list(csv.reader(f)) or [COLUMNS]
    if header != COLUMNS or any(len(line) != len(COLUMNS) for line in lines):
        refuse(f"{path}: is no file of runs, or has a broken line; restore it, or name another")
    return [dict(zip(COLUMNS, line)) for line in lines]

def append(path, rows, columns=COLUMNS):
    """Adds lines to a CSV file, with the commit that has made them."""
    commit = subprocess.getoutput(f"git -C {ROOT} rev-parse --short HEAD")
    with open(path, "a", newline="") as f:
        writer = csv.DictWriter(f, columns, lineterminator="\n", extrasaction="ignore")
        if f.tell() == 0:   # It is new.
            writer.writeheader()
        writer.writerows(row | dict(commit=commit) for row in rows)

# ------------------------------------------------------------------------------------ the command

@dataclass
class ResultsConfig:
    names: list = flag(None, "experiments")
    dry: bool = flag(False, "only print the commands that are missing")
    workers: int = flag(2, "runs side by side", 1, 64)
    out: str = flag("results", "folder of runs.csv and ill.csv; what it has is not repeated")

def main(argv=None):
    [args] = parse([ResultsConfig], argv, __doc__, positional=["names"])
    os.chdir(ROOT)
    known = list(dict.fromkeys(run["experiment"] for run in all_runs()))
    for name in {*args.names} - {*known}:
        refuse(f"{name}: no such experiment; choose from {', '.join(known)}")
    out = Path(args.out)
    missing = missing_runs(args.names, out / "runs.csv")
    if not missing:
        say(f"{out / 'runs.csv'} has all of it; with another --out it runs again")
    if args.dry:
        for run in missing:
            say(f"python train.py {run['command']}")
        return
    out.mkdir(parents=True, exist_ok=True)
    open(out / "runs.csv", "a").close()   # If it can't be written, we hear it before a training.
    for data in "steps", "stdlib":
        if not Path("data", data, "meta.json").exists():
            prepare.main([data, "--out", f"data/{data}"])

    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        jobs = [pool.submit(train, run) for run in missing]
        try:
            for job in concurrent.futures.as_completed(jobs):
                row = measure(job.result(), out)
                say(f"{row['experiment']}: {row['variant']}, seed {row['seed']}, rate {row['lr']}: "
                    f"{row['bits']} bits, {row['steps'] or 'no'} steps, {row['seconds']} s")
        finally:
            pool.shutdown(cancel_futures=True)

if __name__ == "__main__":
    torch.set_num_threads(1)
    start(main)
