"""
The runs behind results/README.md: each is a command of train.py, and a line of runs.csv.

    python results/run.py field --out mine           # repeats an experiment: mine/runs.csv
    python results/run.py field --out mine --dry     # only prints the commands

Two runs go on at a time. After Ctrl-C, the same command goes on. A run is measured on 512
validation windows, and in some experiments each of its blocks is, too: that is for blocks.csv. Then
its folder, below runs/results, can be deleted. Seed 1 chooses learning rates, and the others
decide: see rules.md. On a GPU, give --workers 1.

An experiment of your own is a key in PLANS. Once all of it has run, its plan can go: runs.csv has
the commands, each with the commit that ran it. Where one begins with "older code: ", only that
commit can repeat it. claims.csv says what is compared.
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

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import analyze
import prepare
from flags import flag, parse, refuse, start
from model import num_params
from train import data_of_run, open_run, read_checkpoint, read_metrics, read_settings, say

# -------------------------------------------------------------------------------------- the plans

# A variant: its name in the tables, its flags, and rates and seeds: each rate runs with each seed.
Plan = collections.namedtuple("Plan", "variant flags rates seeds")

# Experiment -> its plans. (Those of runs.csv need none: it has their commands.) An example:
#
#     "mine": [Plan("mine: NAG", "--data data/stdlib --residual nag", [0.01, 0.02], [2, 3, 4])]
PLANS = {}

def can_run(row):
    """A line of runs.csv. Is it a run of train.py, as it is now, on this machine?"""
    command = row["command"]
    if "--device cuda" in command and not torch.cuda.is_available():
        return False
    return command.startswith("--")

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

# ------------------------------------------------------------------------------------ run folders

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

# --------------------------------------------------------------------------- what is measured of it

def inspect(folder, n_windows=512):
    """Run folder -> what the statistics of analyze.py take, with so many validation windows"""
    model, config = open_run(folder, read_settings(folder)["device"])
    _, warning = data_of_run(folder, config)
    if warning:   # It is to be measured on the data of its training.
        refuse(warning)
    windows = prepare.windows_of(config["data"], "val", config["block_size"], n_windows)
    puzzle = prepare.load_meta(config["data"]).get("steps")
    return analyze.Run(model, config, windows, puzzle, folder=folder)

def columns_of(folder):
    """Run folder -> the columns of runs.csv that are not in its plan"""
    run, ckpt = inspect(folder), read_checkpoint(folder)
    tokens = ckpt["step"] * run.config["batch_size"] * run.config["block_size"]
    speeds = [entry["tok_s"] for entry in read_metrics(folder).values() if "tok_s" in entry]
    seconds = tokens / statistics.median(speeds[1:] or speeds)   # without the evaluations
    ran = 1.0
    if run.model.config.mod != "all":
        ran = run.share_that_ran(run.model.decider).mean().item()
    found = dict(tokens=tokens, parameters=num_params(run.model), seconds=f"{seconds:.0f}",
                 flops=f"{ckpt['flops']:.4g}", bits=f"{run.bits:.5f}", skipped=f"{1 - ran:.3f}",
                 steps="", right="")
    if run.puzzle:
        found["steps"] = f"{analyze.steps_learned(run.right, run.guess):.3f}"
        found["right"] = " ".join(f"{share:.3f}" for share in run.right)
    return found

# Experiments whose blocks are measured, on 64 windows
BY_BLOCK = "field", "field adamw", "equal", "ill", "fanin"

# A measure of blocks.csv: a statistic of analyze.py, and which of its panels and lines
MEASURES = {"read": ("magnitudes", "what is read (rms)", "both"),
            "update of attention": ("magnitudes", "update (rms)", "attention"),
            "update of MLP": ("magnitudes", "update (rms)", "MLP"),
            "sink": ("sinks", "attention to the first token", "measured"),
            "largest channel": ("sinks", "largest channel / rms", "measured"),
            "kurtosis": ("sinks", "kurtosis", "measured"),
            "rounding": ("rounding", "", "rounded"),   # to 8, 6, 4 and 3 bits
            "gradient": ("fan_in", "", "measured"),
            "pruning by CascadeFlow": ("pruning", "", "CascadeFlow"),   # 0, 1, 2, .. blocks removed
            "pruning by cosine": ("pruning", "", "usual score"),
            "pruning at random": ("pruning", "", "any")}

def measure_blocks(run):
    """Yields (measure, numbers): one for each block, or sublayer, from the first on"""
    names = "magnitudes", "sinks", "rounding", "fan_in", "pruning", "reads"
    panels = {name: analyze.STATS[name].measure(run)[0] for name in names}
    for measure, (statistic, panel, line) in MEASURES.items():
        points = panels[statistic][panel][line]
        yield measure, [np.ravel(point)[-1] for point in points]   # of a pair [x, y]: y
    yield "worth", run.worth
    # Who reads whom: a row a reader, a column a writer, of which the first one is the embedding
    effect = np.array(panels["reads"][""])
    yield "read of the last", np.diag(effect)[1:]
    yield "read of the one before", np.diag(effect, -1)[1:]
    pairs = [(effect[i, :i + 1], effect[i + 1, :i + 1]) for i in range(1, len(effect) - 2)]
    yield "neighbours alike", [np.minimum(a / a.sum(), b / b.sum()).sum() for a, b in pairs]

@torch.no_grad()
def measure(run, folder, out):
    """Adds a run to the files of the folder `out`. All is measured before runs.csv gets a line: so
    a run is there whole, or it counts as missing."""
    row = run | columns_of(folder)
    if run["seed"] != "1" and run["experiment"] in BY_BLOCK:
        append(out / "blocks.csv", BLOCKS_COLUMNS, [
            dict(variant=run["variant"], seed=run["seed"], when="trained", measure=name,
                 values=" ".join(f"{number:.4g}" for number in numbers),
                 command=f"results/run.py {run['experiment']}")
            for name, numbers in measure_blocks(inspect(folder, 64))])
    append(out / "runs.csv", COLUMNS, [row])
    say(f"{row['experiment']}: {row['variant']}, seed {row['seed']}, rate {row['lr']}: "
        f"{row['bits']} bits, {row['steps'] or 'no'} steps, {row['seconds']} s")

# -------------------------------------------------------------------------------------- CSV files

COLUMNS = ["experiment", "variant", "seed", "lr", "tokens", "parameters", "seconds", "flops",
           "bits", "steps", "right", "skipped", "commit", "command"]
BLOCKS_COLUMNS = ["variant", "seed", "when", "measure", "values", "commit", "command"]

def read_runs(path):
    """runs.csv -> a list of dicts, all strings"""
    if not Path(path).is_file():
        return []
    with open(path, newline="", encoding="utf-8", errors="replace") as f:
        header, *lines = list(csv.reader(f)) or [COLUMNS]
    if header != COLUMNS or any(len(line) != len(COLUMNS) for line in lines):
        refuse(f"{path}: is no file of runs, or has a broken line; restore it, or name another")
    return [dict(zip(COLUMNS, line)) for line in lines]

def append(path, columns, rows):
    """Adds lines to a CSV file, with the commit that has made them."""
    commit = subprocess.getoutput(f"git -C {ROOT} rev-parse --short HEAD")
    with open(path, "a", newline="") as f:
        writer = csv.DictWriter(f, columns, lineterminator="\n")
        if f.tell() == 0:   # It is new.
            writer.writeheader()
        writer.writerows(row | dict(commit=commit) for row in rows)

# ------------------------------------------------------------------------------------ the command

@dataclass
class ResultsConfig:
    names: list = flag(None, "experiments")
    dry: bool = flag(False, "only print the commands that are missing")
    workers: int = flag(2, "runs side by side", 1, 64)
    out: str = flag("results", "folder of runs.csv and blocks.csv; what it has is not repeated")

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
                run = job.result()
                measure(run, folder_of(run), out)
        finally:
            pool.shutdown(cancel_futures=True)

if __name__ == "__main__":
    torch.set_num_threads(1)
    start(main)
