"""
From runs.csv, blocks.csv and claims.csv to the tables and figures of results/README.md.

    python results/summarize.py                  # writes results/tables.md and results/*.png
    python results/summarize.py --runs mine      # mine/tables.md, of those of run.py --out mine

rules.md says when a claim is seen, not seen, or open.
"""
import csv
import functools
import math
import statistics
import sys
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from analyze import COLORS, rank_correlation
from flags import flag, parse, refuse, start
from run import read_runs
from train import say

# ------------------------------------------------------------------------------------- statistics

@functools.cache
def t_quantile(p, n):
    """Student's t with n degrees of freedom: |t| is larger than this with the probability p.

    With t = sqrt(n) tan(angle) the density becomes cos(angle)^(n - 1), which is easy to sum up."""
    angles = np.linspace(0, math.pi / 2, 200_001)
    heights = np.cos(angles).clip(0) ** (n - 1)
    areas = np.cumsum((heights[1:] + heights[:-1]) / 2)
    beyond = 1 - np.append(0, areas) / areas[-1]
    return math.sqrt(n) * math.tan(np.interp(p, beyond[::-1], angles[::-1]))

class Gap:
    """The mean of paired differences, a list, and what can be said of the true one"""
    def __init__(self, differences):
        self.differences, self.n = differences, len(differences)
        self.mean = statistics.mean(differences)
        self.error = statistics.stdev(differences) / math.sqrt(self.n)

    def half(self, p):
        """Half of the interval that holds all but p"""
        return t_quantile(p, self.n - 1) * self.error

    def could_find(self):
        """The smallest true gap that such runs find four times of five"""
        return self.half(0.05) + self.half(0.4)

def verdict(gap, says, margin):
    """says: of the mean, that it is < > = <= >= 0, or, of each seed's difference, all < or all >"""
    if says.startswith("all"):
        held = [number < 0 if says == "all <" else number > 0 for number in gap.differences]
        return "seen" if all(held) else "open" if any(held) else "not seen"
    less, more = gap.mean + gap.half(0.05) < 0, gap.mean - gap.half(0.05) > 0
    equal = abs(gap.mean) + gap.half(0.1) <= margin
    is_so, is_not = {"<": (less, more or equal), ">": (more, less or equal),
                     "<=": (less or equal, more), ">=": (more or equal, less),
                     "=": (equal, less or more)}[says]
    return "seen" if is_so else "not seen" if is_not else "open"

# ----------------------------------------------------------------------------------- runs, claims

def slope(numbers):
    """Of log number on log block, by least squares"""
    return np.polyfit(np.log(np.arange(1, len(numbers) + 1)), np.log(numbers), 1)[0]

def first_third(numbers):
    return numbers[:len(numbers) // 3]

def last_third(numbers):
    return first_third(numbers[::-1])

# What is told of the numbers of a model's blocks, or sublayers: "gradient, first / mean"
STATISTICS = {
    "mean": statistics.mean, "first / mean": lambda x: x[0] / statistics.mean(x),
    "first": itemgetter(0), "to 4 bits": itemgetter(2), "to 3 bits": itemgetter(3),
    "without 1": itemgetter(1), "without 2": itemgetter(2), "without 3": itemgetter(3),
    "last two / first two": lambda x: sum(x[-2:]) / sum(x[:2]),
    "largest / smallest": lambda x: max(x) / min(x),
    "slope": slope, "Spearman with depth": lambda x: rank_correlation(range(len(x)), x),
    "late / early": lambda x: statistics.median(last_third(x)) / statistics.median(first_third(x)),
    "share of the first third": lambda x: sum(first_third(x)) / sum(x),
    "share of the last third": lambda x: sum(last_third(x)) / sum(x)}

def read_blocks(path):
    """blocks.csv -> rows like those of runs.csv, but with lists of numbers. First weights are a
    variant of their own."""
    if not path.is_file():   # Most experiments measure no blocks.
        return []
    found = {}
    with open(path, newline="", encoding="utf-8") as f:
        for line in csv.DictReader(f):
            variant = line["variant"] + (", first weights" if line["when"] != "trained" else "")
            row = found.setdefault((variant, line["seed"]), dict(variant=variant, seed=line["seed"]))
            row[line["measure"]] = [float(number) for number in line["values"].split()]
    trained = [row for row in found.values() if "gradient" in row]
    for row in trained:
        row["gradient with worth"] = rank_correlation(row["gradient"], row["worth"])
        others = [other["gradient"] for other in trained
                  if other["variant"] == row["variant"] and other is not row]
        if others:
            row["gradient with other seeds"] = statistics.mean(
                rank_correlation(row["gradient"], other) for other in others)
        if "pruning at random" in row:
            for other in "at random", "by cosine":
                row[f"pruning by CascadeFlow - {other}"] = [
                    ours - theirs for ours, theirs
                    in zip(row["pruning by CascadeFlow"], row[f"pruning {other}"])]
    return [*found.values()]

UNITS = dict(steps=" steps", bits=" bits per byte", skipped=" of the sublayer runs")

def read_claims(path):
    """claims.csv -> a list of objects"""
    with open(path, newline="", encoding="utf-8") as f:
        return [SimpleNamespace(**line) for line in csv.DictReader(f)]

def values(rows, variant, measure):
    """-> {seed: value}. Of "A minus B": the differences, of seeds that both have. measure: a
    column, or, if it has a list of numbers, "column, statistic" """
    if " minus " in variant:
        ours, theirs = (values(rows, name, measure) for name in variant.split(" minus "))
        return {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}
    column, _, statistic = measure.partition(", ")
    value_of = STATISTICS[statistic] if statistic else float
    return {row["seed"]: value_of(row[column]) for row in rows
            if row["variant"] == variant and row.get(column, "") != ""}

def judge(rows, claims):
    """-> those claims that have two seeds at least, with their gap and word. B may be a number."""
    judged = []
    for claim in claims:
        ours = values(rows, claim.a, claim.measure)
        theirs = values(rows, claim.b, claim.measure)
        if not any(letter.isalpha() for letter in claim.b):
            theirs = dict.fromkeys(ours, float(claim.b))
        differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
        if len(differences) > 1:
            claim.gap = Gap(differences)
            claim.word = verdict(claim.gap, claim.says, float(claim.margin or 0))
            judged.append(claim)
    return judged

# ----------------------------------------------------------------------------------------- tables

def table(title, columns, rows):
    """-> lines of markdown"""
    rows = [columns, ["---"] * len(columns), *rows]
    return [f"## {title}", "", *("| " + " | ".join(map(str, row)) + " |" for row in rows), ""]

def claims_table(judged):
    rows = []
    for claim in judged:
        gap, half = claim.gap, claim.gap.half(0.05)
        rows.append([claim.row, claim.claim, claim.a, claim.says, claim.b, claim.equal,
                     f"{gap.mean:+.3f}{UNITS.get(claim.measure, f' ({claim.measure})')}",
                     f"{gap.mean - half:+.3f} to {gap.mean + half:+.3f}", f"{gap.could_find():.3f}",
                     f"{claim.word}, {gap.n} seeds" + ", later" * (claim.rule == "later")])
    before = [claim.word for claim in judged if claim.rule == "before"]
    return [f"{len(before)} claims had a rule before the seeds that decide. {before.count('seen')} "
            f"are seen, and {before.count('not seen')} are not. (Of claims of a sign that is not "
            "there, one of forty would be seen by chance.)", "",
            *table("Claims by row of the scoreboard",
                   ["row", "claim", "A", "", "B", "at equal", "A - B", "95 % interval",
                    "could have found", "verdict"], rows)]

def blocks_table(rows, claims):
    """Means over seeds, and the lowest and the highest, of what claims ask for, and of two more"""
    asked = [claim.measure for claim in claims if claim.measure not in UNITS]
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        for measure in dict.fromkeys([*asked, "worth, first", "neighbours alike, mean"]):
            found = [*values(rows, variant, measure).values()]
            if found:
                lines.append([variant, measure, f"{statistics.mean(found):.3g}",
                              f"{min(found):.3g} to {max(found):.3g}, {len(found)} seeds"])
    return table("Blocks", ["variant", "measure", "mean", "of the seeds"], lines)

def means_table(rows):
    forms = dict(steps=".2f", bits=".4f", skipped=".3f", seconds=".0f", flops=".2g")
    found = {}
    for row in rows:
        found.setdefault((row["experiment"], row["variant"]), []).append(row)
    lines = []
    for (experiment, variant), mine in found.items():
        known = [values(mine, variant, measure).values() for measure in forms]
        means = [f"{statistics.mean(numbers):{form}}" if numbers else ""
                 for numbers, form in zip(known, forms.values())]
        lines.append([experiment, variant, mine[0]["lr"], len(mine), *means])
    return table("Means of the seeds that decide",
                 ["experiment", "variant", "rate", "seeds", "steps", "bits per byte", "skipped",
                  "seconds", "FLOPs"], lines)

def rates_table(rows):
    tried = {}
    for row in rows:
        tried.setdefault(row["variant"], {})[float(row["lr"])] = row["steps"] or row["bits"]
    return table("Rates that seed 1 has tried", ["variant", "steps or bits by rate"],
                 [[name, ", ".join(f"{lr:g}: {by_rate[lr]}" for lr in sorted(by_rate))]
                  for name, by_rate in tried.items()])

# ---------------------------------------------------------------------------------------- figures

STYLE = {"axes.grid": True, "grid.alpha": 0.3, "legend.fontsize": 8, "savefig.dpi": 110,
         "figure.constrained_layout.use": True}

def save(figure, name):
    figure.savefig(HERE / f"{name}.png")
    plt.close(figure)

def draw_steps(rows):
    """Share of right digits by steps asked: a line through the means, a dot a seed"""
    names = "6 blocks", "2 blocks, twice as long", "4 blocks", "2 blocks", "1 block"
    figure, axes = plt.subplots(figsize=(7, 4))
    for number, (color, name) in enumerate(zip(COLORS, names)):
        right = np.array([[float(share) for share in row["right"].split()] for row in rows
                          if row["variant"] == name])   # (seeds, steps asked)
        steps = np.arange(right.shape[1])
        style = "--" if "as long" in name else "-"   # Another length of training is dashed.
        axes.plot(steps, right.mean(0), style, color=color, label=name)
        beside = 0.05 * (number - 2)   # Dots don't hide each other.
        axes.plot(steps + beside, right.T, ".", color=color, alpha=0.5)
    axes.axhline(0.1, color="0.5", linestyle=":", label="guessing")   # There are ten symbols.
    axes.set(xlabel="steps asked for (lines: means; dots: seeds)", ylabel="share of right digits",
             title="How many steps do 1 to 6 blocks (PreNorm) learn?", xticks=range(10),
             ylim=(0, 1.03))
    axes.legend()
    save(figure, "staircase")

def draw_cost(rows):
    """Left: steps by share skipped, a dot a seed. Right: who skips, a line a seed"""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    def of_seeds(what, measure):
        return [*values(rows, f"NAG that pays late, {what}", measure).values()]

    by_angle = ["all run", "below 0.02", "below 0.05", "below 0.1", "below 0.2"]
    for color, label, ways in [
            (COLORS[2], "tokens skip turns below 0, 1, 3, 6 and 11°", by_angle),
            (COLORS[3], "a fixed set of sublayers", ["a fixed set for 0.05", "a fixed set for 0.1"]),
            (COLORS[7], "at random, as often in each sublayer", ["coins for 0.05", "coins for 0.1"])]:
        skipped = np.array([of_seeds(way, "skipped") for way in ways]) * 100   # (ways, seeds)
        steps = np.array([of_seeds(way, "steps") for way in ways])
        left.plot(skipped, steps, ".", color=color, alpha=0.25)
        left.plot(skipped.mean(1), steps.mean(1), "o-", color=color, label=label)
    plain = statistics.mean(values(rows, "late: plain NAG", "steps").values())
    left.axhline(plain, color=COLORS[1], linestyle="--", label="NAG without a cost, all run")
    left.set(xlabel="share of all sublayer runs skipped (%)", ylabel="steps learned",
             ylim=(0, None), title="NAG with a late cost: what skipping costs")
    left.legend(loc="lower left")

    asked = "copies", "one step", *(f"{number} steps" for number in "two three four five six".split())
    ran = 100 - 100 * np.array([of_seeds(f"below 0.05, {each}", "skipped") for each in asked])
    right.plot(ran, "o-", color=COLORS[2], alpha=0.6)
    right.set(xlabel="steps asked for (a line a seed)", ylim=(50, 100),
              ylabel="share of the sublayers that run (%)",
              title="and who runs how much, if turns below 3° are skipped")
    save(figure, "cost")

def draw_gaps(judged, name, title):
    """The claims that claims.csv has for this figure, each with its interval"""
    figure, axes = plt.subplots(figsize=(8, 4.5))
    colors = {"seen": COLORS[2], "not seen": COLORS[1], "open": "0.6"}
    shown = sorted((claim for claim in judged if claim.figure == name), key=lambda c: c.gap.mean)
    for claim in shown:
        axes.errorbar(claim.gap.mean, claim.label, xerr=claim.gap.half(0.05), fmt="o", capsize=3,
                      color=colors[claim.word])
    for word in dict.fromkeys(claim.word for claim in shown):
        axes.plot([], [], "o", color=colors[word], label=word)
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.set(xlabel="bits per byte: left of 0 is better than PreNorm (95 % intervals)", title=title)
    axes.invert_yaxis()
    axes.legend()
    save(figure, name)

def draw_magnitudes(rows):
    """Rms of what each sublayer reads, a line a seed"""
    figure, axes = plt.subplots(figsize=(7, 4))
    for color, name in zip(COLORS, ("PreNorm", "Block Attention Residuals", "NAG")):
        for row in rows:
            if row["variant"] == f"field: {name}":
                lines = axes.plot(range(1, len(row["read"]) + 1), row["read"], color=color, alpha=0.7)
                lines[0].set_label(name if row["seed"] == "2" else "")
    axes.set(xlabel="sublayer (a line a seed)", ylabel="rms of what it reads", ylim=(0, None),
             title="Does what sublayers read grow with depth?")
    axes.legend()
    save(figure, "magnitudes")

# ------------------------------------------------------------------------------------------- main

@dataclass
class SummaryConfig:
    runs: str = flag("", "a folder with runs.csv, and perhaps blocks.csv; without it, ours")

def main(argv=None):
    [args] = parse([SummaryConfig], argv, __doc__)
    folder = Path(args.runs or HERE)
    rows = read_runs(folder / "runs.csv")
    if not rows:
        refuse(f"{folder}: has no runs.csv with runs; run.py makes one")
    decide = [row for row in rows if row["seed"] != "1"]
    blocks, claims = read_blocks(folder / "blocks.csv"), read_claims(HERE / "claims.csv")
    judged = judge(decide + blocks, claims)
    tables = ["# Tables, made by summarize.py", "", *claims_table(judged),
              *blocks_table(blocks, claims), *means_table(decide),
              *rates_table([row for row in rows if row["seed"] == "1"])]
    (folder / "tables.md").write_text("\n".join(tables))
    say(f"{folder / 'tables.md'} is written")
    if args.runs:   # The figures show many experiments.
        return
    plt.rcParams.update(STYLE)
    draw_steps(decide)
    draw_cost(decide)
    draw_gaps(judged, "lead", "NAG minus PreNorm on code, equal tokens")
    draw_gaps(judged, "field", "Residuals of 2026 minus PreNorm on code, equal tokens")
    draw_magnitudes(blocks)
    for claim in claims:
        if claim not in judged:
            say(f"waits for runs of {claim.a}: {claim.claim}")

if __name__ == "__main__":
    start(main)
