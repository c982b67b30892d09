"""Table and figure of the runs that mod.sh has made."""
import json
import os
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend has to be chosen first)

# where common.sh has its runs and results at this SCALE
RUNS, OUT = Path(os.environ.get("RUNS", "runs")), Path(os.environ.get("OUT", "results"))


def read(folder):
    """Last line of training, of the steps long after the ramp, and last validation of a run."""
    lines = [json.loads(line) for line in open(folder / "metrics.jsonl")]
    return [line for line in lines if "loss" in line][-1], [line for line in lines if "val_loss" in line][-1]


swept = json.loads((RUNS / "mod/swept.json").read_text())   # rows of compare.py
path = OUT / "mod.json"   # rates that were not run this time stay as they are
table = json.loads(path.read_text()) if path.exists() else {}
mean = statistics.mean
for label in {folder.name.split("-lr")[0] for folder in RUNS.glob("mod/*-seed3")}:
    lr = swept[label if label in swept else "nag-0"]["lr"]
    folders = [RUNS / f"mod/{label}-lr{lr}-seed{seed}" for seed in (1, 2, 3)]
    if not all((folder / "done").exists() for folder in folders):
        continue
    train, val = zip(*map(read, folders))
    bpb = [line["val_bpb"] for line in val]
    sweep = table.get(label, {}).get("sweep", {}) | swept.get(label, {}).get("sweep", {})
    table[label] = dict(lr=lr, sweep=sweep, bits_per_byte=bpb, mean=mean(bpb), sd=statistics.stdev(bpb),
                        train_skip_rate=mean(line.get("skip_rate", 0.0) for line in train),
                        val_skip_rate=mean(line.get("val_skip_rate", 0.0) for line in val),
                        tokens=mean(line["tokens"] for line in train),
                        flops=mean(line["flops"] for line in train))
for label, row in table.items():   # the same seed, the same data order: compare in pairs
    dense = table["nag-0" if label.startswith("nag") else "pre-0"]
    gaps = [ours - theirs for ours, theirs in zip(row["bits_per_byte"], dense["bits_per_byte"])]
    row |= dict(gap=mean(gaps), gap_standard_error=statistics.stdev(gaps) / len(gaps) ** 0.5)

by_rate = lambda label: (label.split("-")[0], float(label.split("-")[1]))
table = {label: table[label] for label in sorted(table, key=by_rate)}
for label, row in table.items():
    gap = "" if label.endswith("-0") else f"{row['gap']:+.3f} ± {row['gap_standard_error']:.3f}"
    print(f"| {label.replace('-', ' ')} | {row['lr']} | {row['train_skip_rate']:.1%} "
          f"| {row['val_skip_rate']:.1%} | {row['tokens']:,.0f} | {row['flops']:.3e} "
          f"| {row['mean']:.3f} ± {row['sd']:.3f} | {gap} |")
path.write_text(json.dumps(table, indent=1) + "\n")
nag = [row for label, row in table.items() if label.startswith("nag")]
figure, axes = plt.subplots(figsize=(6, 4), dpi=130)
axes.errorbar([100 * row["train_skip_rate"] for row in nag], [row["gap"] for row in nag],
              [row["gap_standard_error"] for row in nag], fmt="o-", capsize=4,
              label="nag, geometric, against nag")
if "router-0.25" in table:
    row = table["router-0.25"]
    axes.errorbar([100 * row["train_skip_rate"]], [row["gap"]], [row["gap_standard_error"]], fmt="s",
                  capsize=4, label="pre, router, against pre")
axes.axhline(0, color="0.6", lw=0.8)
axes.set_xlabel("sublayer runs skipped in training, after the ramp (%)")
axes.set_ylabel("bits per byte, minus the dense run's")
axes.set_title("Mixture-of-Depths at equal executed FLOPs", loc="left", fontweight="bold", fontsize=10)
axes.spines[["top", "right"]].set_visible(False)
axes.grid(alpha=0.25)
axes.legend(frameon=False, fontsize=8)
figure.text(0.02, 0.015, "Below 0: skipping pays. Mean of paired seeds and its standard error.", fontsize=8,
            color="0.3")
figure.tight_layout(rect=(0, 0.05, 1, 1))
figure.savefig(OUT / "mod.png")
