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
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "results"), str(ROOT)]
import analyze
import prepare
import run
from flags import flag, parse, refuse, say, start
from inside import sublayers_of
from model import Runner, Without
from runs import open_run, read_metrics, read_settings

METHODS = "CascadeFlow", "influence", "worth", "magnitude"   # see block_scores
NAMES = {("pre", "width"): "6 blocks", ("nag", "width"): "NAG",   # residual, init -> the variant in run.py
         ("pre", "gpt2"): "6 blocks, gpt2", ("nag", "gpt2"): "NAG, gpt2, 6 blocks"}

@dataclass
class PruningConfig:
    runs: list = flag(None, "run folders of the steps text")
    out: str = flag("results/runs.csv", "file of the lines")

def decider_without(inspected, number):
    """-> the decider that removes block `number`, from 0, and leaves all else to the model's own"""
    model = inspected.model
    return Without(sublayers_of(model, number), model.decider)

def steps_without(inspected):
    """-> for each block the steps that are left without it"""
    found = []
    for number in range(len(inspected.model.blocks)):
        right, _ = analyze.right_by_steps(inspected, decider_without(inspected, number))
        found.append(analyze.steps_learned(right, inspected.guess))
    return found

def block_scores(inspected):
    """{method: a score for each block}. The lowest is to go first. CascadeFlow: the gradient norms of the
    training, per root of the block's size. influence: how far the block turns the stream, as 1 - cosine. worth:
    the loss without it. magnitude: of its weights."""
    blocks = inspected.model.blocks
    def influence(idx):
        x = inspected.streams(idx)[::2]
        return (1 - F.cosine_similarity(x[:-1], x[1:], dim=-1)).mean((1, 2))
    scores = {"magnitude": [sum(p.abs().sum() for p in block.parameters()) for block in blocks],
              "influence": inspected.mean(influence, inspected.others),
              "worth": [analyze.mean_loss(inspected.model, inspected.others, decider_without(inspected, number))
                        for number in range(len(blocks))]}
    if sums := gradient_sums(inspected):
        sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
        scores["CascadeFlow"] = [norm / size ** 0.5 for norm, size in zip(sums, sizes)]
    return scores

def gradient_sums(inspected):
    """Gradient norm of each block, summed over the training, as last noted. []: not known."""
    sums = [entry.get("grad_norms", []) for entry in inspected.history.values()]
    sums = [each for each in sums if len(each) == len(inspected.model.blocks) and any(each)]
    return sums[-1] if sums else []

@torch.no_grad()
def main(argv=None):
    args, = parse((PruningConfig,), argv, __doc__, positional=("runs",))
    known = {(row["variant"], row["seed"]) for row in run.read_runs(args.out)}
    for folder in args.runs:
        model, config = open_run(folder)
        lr = read_settings(folder)["lr"]
        puzzle = prepare.load_meta(config["data"]).get("steps")
        name = NAMES.get((config["residual"], config["init"]))
        if not puzzle or not name:
            refuse(f"{folder}: is no run of pre or nag on the steps text; name one")
        windows = prepare.val_windows(config["data"], config["block_size"], 512)
        inspected = analyze.Run(model, config, read_metrics(folder), None, windows, puzzle)
        try:
            left, scores = steps_without(inspected), block_scores(inspected)
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
