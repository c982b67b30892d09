"""
Do pruning methods find the block that matters least? Takes trained runs of run.py, removes the block that
each method gives the lowest score, trains nothing after it, and counts the steps that are left.

    python results/pruning.py runs/results/staircase-6-blocks-*  runs/results/residuals-NAG-*
    python results/pruning.py runs/results/residuals-6-blocks-gpt2-*

Appends to runs.csv, as experiment "pruning". Scores are of other windows than the steps.
"""
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "results"), str(ROOT)]
import analyze
import prepare
import run
from flags import flag, parse, refuse, say, start
from model import Runner, Without
from runs import open_run, read_metrics, read_settings

METHODS = "CascadeFlow", "influence", "worth", "magnitude"   # see prune_curve in analyze.py
NAMES = {("pre", "width"): "6 blocks", ("nag", "width"): "NAG",   # residual, init -> the variant in run.py
         ("pre", "gpt2"): "6 blocks, gpt2", ("nag", "gpt2"): "NAG, gpt2, 6 blocks"}

@dataclass
class PruningConfig:
    runs: list = flag(None, "run folders of the steps text")
    out: str = flag("results/runs.csv", "file of the lines")

def steps_without(inspected, text):
    """-> for each block the steps that are left without it"""
    found = []
    for number in range(len(inspected.model.blocks)):
        gone = Without(analyze.sublayers_of(inspected.model, number), inspected.model.decider)
        right, = analyze.by_steps(inspected, lambda idx, targets: (
            inspected.model(idx, runner=Runner(inspected.model, gone))[0].argmax(-1) == targets)[None])
        found.append(analyze.steps_learned(right, 1 / len(text["table"])))
    return found

@torch.no_grad()
def main(argv=None):
    args, = parse((PruningConfig,), argv, __doc__, positional=("runs",))
    known = {(row["variant"], row["seed"]) for row in run.read_runs(args.out)}
    for folder in args.runs:
        model, config = open_run(folder)
        lr = read_settings(Path(folder) / "config.json", dict(lr=0.0), strict=False)["lr"]
        text = prepare.load_meta(config["data"]).get("steps")
        name = NAMES.get((config["residual"], config["init"]))
        if not text or not name:
            refuse(f"{folder}: is no run of pre or nag on the steps text; name one")
        windows = prepare.val_windows(config["data"], config["block_size"], 512)
        inspected = analyze.Run(model, config, read_metrics(folder), None, windows, text)
        try:
            left, scores = steps_without(inspected, text), analyze.block_scores(inspected)
        except analyze.NotHere as why:
            refuse(f"{folder}: {why}")
        if not scores.keys() >= {*METHODS}:
            refuse(f"{folder}: its metrics.jsonl has no gradient norms; name another run")
        chosen = {f"without {method}'s block": left[torch.as_tensor(scores[method]).argmin()]
                  for method in METHODS}
        chosen |= {"without one block, mean": statistics.mean(left), "without one block, best": max(left)}
        for what, steps in chosen.items():
            variant, seed = f"{name}, {what}", str(config["seed"])
            if (variant, seed) not in known:
                run.append(args.out, dict.fromkeys(run.COLUMNS, "") | dict(
                    experiment="pruning", variant=variant, seed=seed, lr=f"{lr:g}",
                    steps=f"{steps:.3f}", command=f"results/pruning.py {Path(folder).name}"))
                say(f"{variant}, seed {seed}: {steps:.2f} steps")

if __name__ == "__main__":
    torch.set_num_threads(1)
    os.chdir(ROOT)
    start(main)
