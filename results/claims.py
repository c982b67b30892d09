"""
Tables and figure of the runs that claims.sh has made and analyze.py has measured: mean ± standard deviation
of the seeds, and the difference to the first residual (pre), paired by seed, ± its standard error.
"""
import json
import math
import os
import statistics
import sys
from pathlib import Path

import matplotlib
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from train import load_run, val_windows  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend has to be chosen first)

# where common.sh has its runs and results at this SCALE
RUNS, OUT = Path(os.environ.get("RUNS", "runs")), Path(os.environ.get("OUT", "results"))


@torch.no_grad()
def more(folder):
    """
    What analyze.py does not measure. magnitude: root mean square, before each sublayer and at the end, of
    what figure 5 of the AttnRes paper shows: the stream, and of AttnRes, which has none, the source that is
    being written, a depth block's sum so far.
    """
    model, config = load_run(folder, "cuda" if torch.cuda.is_available() else "cpu")
    idx = val_windows(config["data"], config["block_size"], 16)[0].to(model.turn.device)
    carried = (lambda stream: stream.sources[-1]) if config["residual"] == "attnres" else model.ends.as_tensor
    rms = lambda x: x.double().square().mean(-1).sqrt().mean().item()
    return dict(magnitude=[rms(carried(stream)) for _, stream, _ in model.walk(idx)])


def uneven(values):
    """Largest / median: 1 is even."""
    return max(values) / statistics.median(values)


def exponent(values):
    """Slope of log value on log l, over the middle 80 % of the depth: 0.5 is the square root of depth."""
    middle = range(len(values) // 10, len(values) - len(values) // 10)
    l, logs = [math.log(i + 1) for i in middle], [math.log(values[i]) for i in middle]
    return statistics.linear_regression(l, logs).slope


def pairs(values):
    """Of sublayers -> of blocks, Euclidean: attention and MLP of a block together."""
    return [(a * a + b * b) ** 0.5 for a, b in zip(values[::2], values[1::2])]


block = lambda r: r["contribution"]["block"]
gradient = lambda r: pairs(r["gradient_norm"]["norm"])
sink = lambda r: r["attention_sink"]["share"]
# name: (meaning, from the results of a run)
MEASURES = {
    "growth": ("norm, end / start", lambda r: r["magnitude"][-1] / r["magnitude"][0]),
    "exponent": ("norm, growth exponent", lambda r: exponent(r["magnitude"])),
    "contribution_uneven": ("contribution of a block, largest / median", lambda r: uneven(block(r))),
    "contribution_late": ("contribution of a block, mean of the later half",
                          lambda r: statistics.mean(block(r)[len(block(r)) // 2:])),
    "effective_sublayers": ("effective number of sublayers",
                            lambda r: r["norm_growth"]["effective_sublayers"]),
    "initial_growth": ("mean square before training, end / start", lambda r: r["norm_growth"]["initial"][-1]),
    "gradient_uneven": ("gradient of a block, largest / median", lambda r: uneven(gradient(r))),
    "gradient_first_last": ("gradient of a block, first / last", lambda r: gradient(r)[0] / gradient(r)[-1]),
    "sink": ("attention to the first token, mean", lambda r: statistics.mean(sink(r))),
    "sink_largest": ("attention to the first token, largest of a block", lambda r: max(sink(r))),
    "kurtosis": ("median excess kurtosis, at the end", lambda r: r["kurtosis"]["median"][-1]),
    "kurtosis_largest": ("median excess kurtosis, largest", lambda r: max(r["kurtosis"]["median"])),
    "outlier": ("largest |entry| / root mean square", lambda r: max(r["kurtosis"]["largest"])),
    "weight_kurtosis": ("excess kurtosis of the matrices, mean",
                        lambda r: statistics.mean(r["weight_outliers"]["excess_kurtosis"])),
    "rounded_4": ("loss increase at 4 bits", lambda r: r["quantisation"]["loss_increase"][2]),
    "rounded_3": ("loss increase at 3 bits", lambda r: r["quantisation"]["loss_increase"][3]),
}
CURVES = {"magnitude": lambda r: r["magnitude"], "contribution": block, "gradient": gradient, "sink": sink}
short = lambda x: float(f"{x:.5g}")   # small files, and five digits are more than the seeds agree on


def summary(values, first=None):
    """Per seed -> values, mean, sd; with those of pre also the paired difference and its standard error."""
    row = dict(values=[short(v) for v in values], mean=short(statistics.mean(values)),
               sd=short(statistics.stdev(values)))
    if first is not None:
        gaps = [ours - theirs for ours, theirs in zip(values, first)]
        row |= dict(gap=short(statistics.mean(gaps)),
                    standard_error=short(statistics.stdev(gaps) / len(gaps) ** 0.5))
    return row


compared = json.loads((RUNS / "claims/compare.json").read_text())
measured = json.loads((RUNS / "claims/figures/depth.json").read_text())["runs"]
runs = {}   # label -> results of the seeds
for label, row in compared.items():
    names = [f"{label}-lr{row['lr']}-seed{seed}" for seed in (1, 2, 3)]
    runs[label] = [measured[name] | more(RUNS / "claims" / name) for name in names]

first = next(iter(runs))
table = {}
for label, found in runs.items():
    loss = {name: list(compared[name]["bits_per_byte"].values()) for name in (label, first)}
    table[label] = dict(lr=compared[label]["lr"], sweep=compared[label]["sweep"],
                        bits_per_byte=summary(loss[label], loss[first]))
    for name, (_, measure) in MEASURES.items():
        table[label][name] = summary([measure(run) for run in found], [measure(run) for run in runs[first]])
    table[label]["curves"] = {name: [short(statistics.mean(each)) for each in zip(*map(curve, found))]
                              for name, curve in CURVES.items()}
    if all("skip_curve" in run for run in found):   # by the rate asked for; the realised one is close to it
        table[label]["skip"] = {
            str(rate): dict(skipped=short(statistics.mean(run["skip_curve"]["realised"][i] for run in found)),
                            loss_increase=summary([run["skip_curve"]["loss"][i] - run["skip_curve"]["loss"][0]
                                                   for run in found]))
            for i, rate in enumerate(found[0]["skip_curve"]["wanted"])}
blocks = len(table[first]["curves"]["gradient"])
bounds = [1 + blocks / 2, 1 + 3 * blocks / 2]   # of Xiong et al., for initial_growth
config = json.loads((RUNS / "claims" / names[0] / "config.json").read_text())
T = config["block_size"]
even = sum(1 / t for t in range(2, T + 1)) / (T - 1)   # a sink takes more than its share: of queries 2 .. T
report = dict(blocks=blocks, bounds=bounds, even_attention=short(even), runs=table)
# the other pair that is claimed: AttnRes against hyper-connections
if {"attnres", "hyper-lite"} <= compared.keys():
    for label in ("attnres", "attnres-block3"):
        report[f"{label} minus hyper-lite"] = summary(*(list(compared[name]["bits_per_byte"].values())
                                                        for name in (label, "hyper-lite")))
path = OUT / "claims.json"
if path.exists():   # labels and rates that were not run this time stay as they are
    old = json.loads(path.read_text())
    for label in table.keys() & old["runs"].keys():
        sweep = old["runs"][label]["sweep"] | table[label]["sweep"]
        table[label]["sweep"] = {lr: sweep[lr] for lr in sorted(sweep, key=float)}
    table = old["runs"] | table
    report = old | report | dict(runs=table)
path.write_text(json.dumps(report, indent=1) + "\n")

print("| | " + " | ".join(f"`{label}`" for label in table) + " |\n|" + " --- |" * (len(table) + 1))
for name, (meaning, _) in {"bits_per_byte": ("bits per byte", None), **MEASURES}.items():
    cells = [f"{row[name]['mean']:.4g} ± {row[name]['sd']:.2g} ({row[name]['gap']:+.3g} ± "
             f"{row[name]['standard_error']:.2g})" for row in table.values()]
    print(f"| {meaning} | {' | '.join(cells)} |")
for rate, row in table.get("nag", {}).get("skip", {}).items():
    change = row["loss_increase"]
    print(f"nag, skipping {rate}: {change['mean']:+.4f} ± {change['sd']:.4f} nats")

figure, axes = plt.subplots(2, 3, figsize=(13, 8), dpi=110)
PANELS = {   # curve: (title, x label, first x)
    "magnitude": ("(b, f) norm of what is carried", "before sublayer (attnres: the sum being written)"),
    "contribution": ("(b, l) contribution of a block, |update| / |stream|", "block"),
    "gradient": ("(f) gradient of a block / median", "block"),
    "sink": ("(e) attention to the first token", "block")}
for panel, (curve, (title, xlabel)) in zip(axes.flat, PANELS.items()):
    for i, (label, row) in enumerate(table.items()):
        y, unit = row["curves"][curve], 1.0
        if curve == "gradient":
            unit = statistics.median(y)
        panel.plot(range(1, 1 + len(y)), [each / unit for each in y], marker="o", ms=3, color=f"C{i}",
                   label=f"{label}, {row['bits_per_byte']['mean']:.3f} bits per byte")
    panel.set(title=title, xlabel=xlabel, yscale="linear" if curve == "sink" else "log")
axes[1, 0].axhline(even, ls="--", color="0.5", lw=1)
axes[1, 0].annotate("spread evenly", (1, even), (0, 3), textcoords="offset points", fontsize=8, color="0.4")
axes[1, 0].set_ylim(0, 1.2 * even)
axes[0, 2].set_yticks((0.5, 1, 2, 5, 10), ("0.5", "1", "2", "5", "10"))
axes[0, 2].minorticks_off()
rounded, skipped = axes.flat[4:]
for i, (label, row) in enumerate(table.items()):
    for x, name in enumerate(("rounded_4", "rounded_3")):
        place = x + (i - len(table) / 2) * 0.11
        rounded.bar(place, row[name]["mean"], 0.1, yerr=row[name]["sd"], color=f"C{i}")
    if "skip" in row:
        rates = list(row["skip"].values())
        skipped.errorbar([100 * rate["skipped"] for rate in rates],
                         [rate["loss_increase"]["mean"] for rate in rates],
                         [rate["loss_increase"]["sd"] for rate in rates], fmt="o-", capsize=3, color=f"C{i}")
rounded.set(title="(e) matrices rounded, loss increase (nats)")
rounded.set_xticks((0, 1), ("4 bits", "3 bits"))
skipped.set(title="(c) nag trained dense, loss increase (nats)", xlabel="sublayer runs skipped (%)")
for panel in axes.flat:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.25)
figure.text(0.02, 0.005, "Means of three seeds, each at its best learning rate; bars: standard deviation.",
            fontsize=8, color="0.3")
figure.legend(*axes[0, 0].get_legend_handles_labels(), ncols=4, loc="lower center", frameon=False,
              bbox_to_anchor=(0.5, 0.015))
figure.tight_layout(rect=(0, 0.08, 1, 1))
figure.savefig(OUT / "claims.png")
