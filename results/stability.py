"""Figure of the runs that stability.sh has made: final loss against depth, and the data's unigram entropy."""
import json
import os
import sys
from pathlib import Path

import matplotlib
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import prepare  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend has to be chosen first)

# where common.sh has its runs and results at this SCALE
RUNS, OUT = Path(os.environ.get("RUNS", "runs")), Path(os.environ.get("OUT", "results"))
path = OUT / "stability.json"
table = json.loads(path.read_text())   # depth-label -> row of compare.py
table.pop("unigram", None)
DEPTHS = sorted({int(label.split("-")[0]) for label in table})
run = next(RUNS.glob("stability/*-lr*-seed1"))   # they differ in depth and gates
config = json.loads((run / "config.json").read_text())
tokens = np.concatenate([np.asarray(shard) for shard in prepare.open_split(config["data"], "val")])
share = np.bincount(tokens) / len(tokens)
# a model that knows how often each token occurs, and nothing else
unigram = -(share[share > 0] * np.log2(share[share > 0])).sum()
if config["tokenizer"] != "bytes":   # whose tokens are bytes, but for end-of-text
    encoding = prepare.get_tokenizer(config["tokenizer"])
    unigram /= sum(p * len(encoding.decode_single_token_bytes(i)) for i, p in enumerate(share) if p)
row = dict(lr="", bits_per_byte={}, mean=unigram, sd=None, sweep={})
path.write_text(json.dumps(table | dict(unigram=row), indent=1) + "\n")

figure, axes = plt.subplots(figsize=(6, 4), dpi=130)
for label in dict.fromkeys(name.split("-", 1)[1] for name in table):
    rows = {depth: table[f"{depth}-{label}"] for depth in DEPTHS if f"{depth}-{label}" in table}
    mean, sd = [row["mean"] for row in rows.values()], [row["sd"] or 0 for row in rows.values()]
    axes.errorbar(list(rows), mean, sd, fmt="o-", capsize=4, label=label.replace(
        "-bias-3", ", bias -3").replace("half", "constant gate 0.5"))
axes.axhline(unigram, ls="--", color="0.5", lw=1)
axes.annotate("unigram entropy", (DEPTHS[0], unigram), (0, 3), textcoords="offset points", fontsize=8,
              color="0.4")
n_tokens = config["max_iters"] * config["batch_size"] * config["block_size"]
axes.set(xscale="log", xlabel=f"blocks (width {config['n_embd']}, {n_tokens:,} tokens)",
         ylabel="validation bits per byte")
axes.set_xticks(DEPTHS, DEPTHS)
axes.minorticks_off()
axes.set_title("Gates against depth, each at the better of two learning rates", loc="left", fontweight="bold",
               fontsize=10)
axes.spines[["top", "right"]].set_visible(False)
axes.grid(alpha=0.25)
axes.legend(frameon=False, fontsize=8)
figure.text(0.02, 0.015,
            "At the dashed line a model has learned how often tokens occur and nothing else. Mean "
            "and sd of three seeds.", fontsize=7, color="0.3")
figure.tight_layout(rect=(0, 0.05, 1, 1))
figure.savefig(OUT / "stability.png")
