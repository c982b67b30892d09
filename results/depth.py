"""Table and figure of the runs that depth.sh has made: each residual against `pre` at each depth."""
import json
import os
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend has to be chosen first)

# where common.sh has its runs and results at this SCALE
RUNS, OUT = Path(os.environ.get("RUNS", "runs")), Path(os.environ.get("OUT", "results"))
table = json.loads((OUT / "depth.json").read_text())   # depth-residual -> row of compare.py
DEPTHS = sorted({int(label.split("-")[0]) for label in table})

figure, axes = plt.subplots(figsize=(6, 4), dpi=130)
for name in dict.fromkeys(label.split("-", 1)[1] for label in table if not label.endswith("-pre")):
    depths = [depth for depth in DEPTHS if "gap" in table.get(f"{depth}-{name}", {})]
    gaps = [table[f"{depth}-{name}"]["gap"] for depth in depths]
    axes.errorbar(depths, [gap["mean"] for gap in gaps], [gap["standard_error"] for gap in gaps], fmt="o-",
                  capsize=4, label=name)
axes.axhline(0, color="0.6", lw=0.8)
axes.set_xscale("log", base=2)
axes.set_xticks(DEPTHS, DEPTHS)
axes.minorticks_off()
run = next(folder for folder in (RUNS / "depth").iterdir() if (folder / "config.json").exists())
config = json.loads((run / "config.json").read_text())   # they differ in depth, residual and rate only
tokens = config["max_iters"] * config["batch_size"] * config["block_size"]
axes.set_xlabel(f"blocks (width {config['n_embd']}, {tokens:,} tokens)")
axes.set_ylabel("bits per byte, minus pre's")
axes.set_title("Gap against depth, each at its best learning rate", loc="left", fontweight="bold",
               fontsize=10)
axes.spines[["top", "right"]].set_visible(False)
axes.grid(alpha=0.25)
axes.legend(frameon=False, fontsize=8)
figure.text(0.02, 0.015, "Below 0: better than pre. Mean of paired seeds and its standard error.", fontsize=8,
            color="0.3")
figure.tight_layout(rect=(0, 0.05, 1, 1))
figure.savefig(OUT / "depth.png")
