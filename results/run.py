"""
The runs behind results/README.md: each is a command of train.py, and a line of runs.csv.

    python results/run.py staircase --out mine.csv         # repeats an experiment of runs.csv
    python results/run.py staircase --out mine.csv --dry   # only prints the commands

Two runs go on at a time. After Ctrl-C, the same command goes on. A run is measured on 512
validation windows; then its folder, below runs/results, can be deleted. Seed 1 chooses learning
rates; the others decide, see summarize.py. On a GPU, give --workers 1.

An experiment of your own is a key in PLANS. Once all of it has run, its plan can go: runs.csv has
the commands. (Some are of the third edition, and have --mod_rate. git checkout 7cf98d5 repeats
them.)
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
sys.path.insert(0, str(ROOT))
import analyze
import prepare
from flags import flag, parse
from model import num_params
from processes import pick_device
from runs import open_run, read_checkpoint, read_metrics
from sentences import refuse, say, start

# -------------------------------------------------------------------------------------- the plans

# A variant: its name in the tables, its flags, and rates and seeds: each rate runs with each seed.
Plan = collections.namedtuple("Plan", "variant flags rates seeds")

# Experiment -> its variants. comparisons.csv says what is compared. For example:
#
#     "mine": [Plan("my NAG", "--data data/stdlib --residual nag --max_iters 300",
#                   rates=[1e-2, 2e-2], seeds=[1])]
PLANS = {}

def all_runs():
    """-> what has run and can run again, and what is planned: dicts with columns of runs.csv"""
    runs = [row for row in read_runs(ROOT / "results/runs.csv") if row["command"].startswith("--")]
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
    """Trains it, or goes on with it"""
    folder = folder_of(run)
    flags = ["--resume"] if (folder / "ckpt.pt").exists() else shlex.split(run["command"])
    words = [sys.executable, "train.py", "--out", str(folder), *flags]
    done = subprocess.run(words, cwd=ROOT, text=True, capture_output=True)
    if done.returncode:
        refuse(f"{shlex.join(words)}: ended with {done.returncode}: {done.stderr.strip()[-300:]}")

def inspect(folder, n_windows=512):
    """Run folder -> what the statistics of analyze.py take, with so many validation windows"""
    model, config = open_run(folder)
    model.to(pick_device(config["device"]))
    windows = prepare.windows_of(config["data"], "val", config["block_size"], n_windows)
    puzzle = prepare.load_meta(config["data"]).get("steps")   # None: it is another text.
    return analyze.Run(model, config, windows, puzzle)

def learned(right, inspected):
    """Shares of right digits by steps asked -> two columns of runs.csv"""
    return dict(right=" ".join(f"{share:.3f}" for share in right),
                steps=f"{analyze.steps_learned(right, inspected.guess):.3f}")

@torch.no_grad()
def measure(folder):
    """Run folder -> the other columns of runs.csv, but for the commit"""
    inspected = inspect(folder)
    model, config = inspected.model, inspected.config
    ran = inspected.mean(lambda idx: inspected.forward(idx)[1].float().mean()).item()
    ckpt, _ = read_checkpoint(folder / "ckpt.pt")   # The last log may be from some steps before.
    tokens = ckpt["step"] * config["batch_size"] * config["block_size"]
    speeds = [entry["tok_s"] for entry in read_metrics(folder).values() if "tok_s" in entry]
    seconds = tokens / statistics.median(speeds[1:] or speeds)   # without the evaluations
    found = dict(tokens=tokens, parameters=num_params(model), seconds=f"{seconds:.0f}",
                 flops=f"{ckpt['flops']:.4g}", bits=f"{inspected.bits:.5f}",
                 skipped=f"{1 - ran:.3f}", steps="", right="")
    if inspected.puzzle:
        found |= learned(inspected.right, inspected)
    return found

def train_and_measure(run):
    train(run)
    return run | measure(folder_of(run))

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

def append(path, row, columns=COLUMNS):
    """Adds a line to a CSV file, with the commit that has made it."""
    row = row | dict(commit=subprocess.getoutput(f"git -C {ROOT} rev-parse --short HEAD"))
    with open(path, "a", newline="") as f:
        writer = csv.DictWriter(f, columns, lineterminator="\n", extrasaction="ignore")
        if f.tell() == 0:   # It is new.
            writer.writeheader()
        writer.writerow(row)

def measure_trained(experiments, runs, out, columns, measure):
    """For cost.py and ill.py: appends what measure(folder, row) yields, dicts, to the file `out`.
    It is called for those runs in the file `runs` whose seed decides, whose folder is still there,
    and that `out` lacks."""
    trained = [row for row in read_runs(runs) if row["experiment"] in experiments
               and row["seed"] != "1" and (folder_of(row) / "ckpt.pt").exists()]
    if not trained:
        refuse(f"runs/results: has no run of {experiments[0]}; python results/run.py "
               f"{experiments[0]} trains them")
    known = set()
    if Path(out).exists():
        with open(out, newline="", encoding="utf-8") as f:
            known = {line["command"] for line in csv.DictReader(f)}
    for row in trained:
        command = f"results/{experiments[0]}.py {folder_of(row).name}"
        if command not in known:
            # All of it is measured before the first line is written: so it is there whole, or not.
            lines = list(measure(folder_of(row), row))
            for line in lines:
                same = {name: row[name] for name in ("experiment", "variant", "seed", "lr")}
                append(out, same | line | dict(command=command), columns)
            say(f"{row['variant']}, seed {row['seed']}: measured")

# ------------------------------------------------------------------------------------ the command

@dataclass
class ResultsConfig:
    names: list = flag(None, "experiments")
    dry: bool = flag(False, "only print the commands that are missing")
    workers: int = flag(2, "runs side by side", 1, 64)
    out: str = flag("results/runs.csv", "file of the lines; runs that it has are not repeated")

def main(argv=None):
    args, = parse((ResultsConfig,), argv, __doc__, positional=("names",))
    os.chdir(ROOT)
    known = list(dict.fromkeys(run["experiment"] for run in all_runs()))
    for name in {*args.names} - {*known}:
        refuse(f"{name}: no such experiment; choose from {', '.join(known)}")
    missing = missing_runs(args.names, args.out)
    left_out = [run for run in missing if "--mod_rate" in run["command"]
                or "--device cuda" in run["command"] and not torch.cuda.is_available()]
    if left_out:
        say(f"{len(left_out)} runs are left out: those with --mod_rate (git checkout 7cf98d5 "
            f"repeats them), and those of a GPU where there is none")
    missing = [run for run in missing if run not in left_out]
    if args.dry:
        for run in missing:
            say(f"python train.py {run['command']}")
        return
    open(args.out, "a").close()   # What can't be written is found now, not after a training.
    for data in "steps", "stdlib":
        if not Path("data", data, "meta.json").exists():
            prepare.main([data, "--out", f"data/{data}"])

    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        jobs = [pool.submit(train_and_measure, run) for run in missing]
        try:
            for job in concurrent.futures.as_completed(jobs):
                row = job.result()
                append(args.out, row)
                say(f"{row['experiment']}: {row['variant']}, seed {row['seed']}, rate {row['lr']}: "
                    f"{row['bits']} bits, {row['steps'] or 'no'} steps, {row['seconds']} s")
        finally:
            pool.shutdown(cancel_futures=True)

if __name__ == "__main__":
    torch.set_num_threads(1)
    start(main)
