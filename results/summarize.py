"""
From runs.csv and comparisons.csv to the tables and figures of results/README.md.

    python results/summarize.py             # writes results/tables.md and results/*.png

The rule. Seed 1 has chosen learning rates and is left out. A gap is A - B with the same seed. A is
*better* or *worse* than B if 0 is outside the gap's 95 % interval, also after Holm's correction for
all comparisons of its family, whose rules were committed together; *equal* if the 90 % interval
lies within the margin; *open* otherwise. "A minus B" is a gap, too, and has gaps. Beside it stands
the smallest true gap that so many runs of such a spread would have found four times of five.
"""
import csv, math, statistics, sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from draw import COLORS
from flags import parse, refuse, say, start
from run import EXPERIMENTS, read_runs

CHOOSES_RATES = "1"   # the seed that decides nothing
UNITS = dict(steps="steps", bits="bits per byte", skipped="of the sublayer runs")
# What a sure gap is called, if A has more, and if A has less
WORDS = dict(steps=("better", "worse"), bits=("worse", "better"), skipped=("more", "less"))

# ------------------------------------------------------------------------------------- statistics

def two_sided_p(t, n):
    """How likely a |t| of this size or more is by chance, Student's t with n degrees of freedom.

    With t = sqrt(n) tan(a) the density becomes cos(a)^(n - 1), which is easy to sum up."""
    def area(low):
        angles = np.linspace(low, math.pi / 2, 20_001)
        heights = np.cos(angles).clip(0) ** (n - 1)
        return ((heights[1:] + heights[:-1]) / 2 * np.diff(angles)).sum()
    return area(math.atan(abs(t) / math.sqrt(n))) / area(0.0)

def t_quantile(p, n):
    """The t whose two_sided_p is p"""
    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, n) > p else (low, middle)
    return low

class Gap:
    """The paired differences of two variants. ours, theirs: {seed: value}"""
    def __init__(self, ours, theirs):
        self.gaps = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
        self.n = len(self.gaps)
        if self.n < 2:
            refuse("a comparison has fewer than two seeds; run results/run.py to its end")
        self.mean = statistics.mean(self.gaps)
        self.error = max(statistics.stdev(self.gaps) / math.sqrt(self.n), 1e-9)
        self.p = two_sided_p(self.mean / self.error, self.n - 1)

    def half(self, p):
        """Half of the interval that holds all but p"""
        return t_quantile(p, self.n - 1) * self.error

    def could_find(self):
        return (t_quantile(0.05, self.n - 1) + t_quantile(0.4, self.n - 1)) * self.error

def holm(ps):
    """p values -> for each one whether it is below 5 % in spite of all the others"""
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    passed, alive = [False] * len(ps), True
    for rank, i in enumerate(order):
        alive = alive and ps[i] <= 0.05 / (len(ps) - rank)
        passed[i] = alive
    return passed

def verdict(gap, is_sure, margin, measure):
    if is_sure:
        return WORDS[measure][gap.mean < 0]
    if abs(gap.mean) + gap.half(0.1) <= margin:
        return f"equal within {margin:g}"
    return "open"

# ----------------------------------------------------------------------------------------- tables

def values(rows, variant, measure):
    """-> {seed: value}. Of "A minus B": the gaps"""
    if " minus " in variant:
        ours, theirs = (values(rows, name, measure) for name in variant.split(" minus "))
        return {seed: ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()}
    return {row["seed"]: float(row[measure]) for row in rows if row["variant"] == variant}

def names_in(comparison):
    return {*f"{comparison['a']} minus {comparison['b']}".split(" minus ")}

def variants_table(rows):
    lines = ["| experiment | variant | rate | seeds | steps | bits per byte | seconds | FLOPs |",
             "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    names = dict.fromkeys((row["experiment"], row["variant"]) for row in rows)
    order = [*EXPERIMENTS]   # then others, such as that of pruning.py
    for experiment, variant in sorted(names, key=lambda name: (*order, name[0]).index(name[0])):
        mine = [row for row in rows if row["variant"] == variant]
        def mean(column):
            known = [float(row[column]) for row in mine if row[column]]
            return statistics.mean(known) if known else None
        steps = "" if mean("steps") is None else f"{mean('steps'):.2f}"
        bits = "" if mean("bits") is None else f"{mean('bits'):.4f}"
        cost = f"{mean('seconds'):.0f} | {mean('flops'):.2g}" if mean("flops") else " | "
        lines.append(f"| {experiment} | {variant} | {mine[0]['lr']} | {len(mine)} | {steps} | "
                     f"{bits} | {cost} |")
    return lines

def comparisons_table(rows, comparisons):
    lines = ["| A | B | at equal | A - B | 95 % interval | could have found | A is |",
             "| --- | --- | --- | --- | --- | --- | --- |"]
    there = {row["variant"] for row in rows}
    known = [each for each in comparisons if names_in(each) <= there]
    gaps = [Gap(*(values(rows, each[side], each["measure"]) for side in "ab")) for each in known]
    sure = [False] * len(known)
    for family in {each["family"] for each in known}:
        mine = [i for i, each in enumerate(known) if each["family"] == family]
        for i, is_sure in zip(mine, holm([gaps[i].p for i in mine])):
            sure[i] = is_sure
    for each, gap, is_sure in zip(known, gaps, sure):
        measure, half = each["measure"], gap.half(0.05)
        word = verdict(gap, is_sure, float(each["margin"]), measure)
        lines.append(f"| {each['a']} | {each['b']} | {each['equal']} | {gap.mean:+.3f} {UNITS[measure]} | "
                     f"{gap.mean - half:+.3f} to {gap.mean + half:+.3f} | {gap.could_find():.3f} | "
                     f"{word}, {gap.n} seeds |")
    return lines

# ---------------------------------------------------------------------------------------- figures

def draw_steps(rows, experiment, names, path):
    """Share of right digits by steps asked: a line through the means, a dot a seed"""
    right = {}
    for name in names:
        mine = [row for row in rows if row["variant"] == name]
        right[name] = np.array([[float(share) for share in row["right"].split()] for row in mine])
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    best_first = sorted(names, key=lambda name: -right[name].mean())
    for i, name in enumerate(best_first):
        steps = np.arange(right[name].shape[1])
        style = "--" if "as long" in name else "-"   # Another length of training is dashed.
        axes.plot(steps, right[name].mean(0), style, color=COLORS[i], label=name)
        beside = 0.05 * (i - len(names) / 2)   # so that dots don't hide each other
        for shares in right[name]:
            axes.plot(steps + beside, shares, ".", color=COLORS[i], alpha=0.5)
    axes.axhline(0.1, color="0.5", linestyle=":", label="guessing")   # There are ten symbols.
    axes.set(xlabel="steps asked for (lines: means; dots: seeds)", ylabel="share of right digits",
             title=EXPERIMENTS[experiment][0], xticks=range(10), ylim=(0, 1.03))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)

def draw_bits(rows, experiment, names, path):
    """Bits per byte of text: a dot a seed, a line at their mean"""
    figure, axes = plt.subplots(figsize=(7, 1 + 0.35 * len(names)), layout="constrained")
    for i, name in enumerate(names):
        found = [*values(rows, name, "bits").values()]
        axes.plot(found, [i] * len(found), ".", color=COLORS[0])
        axes.plot([statistics.mean(found)] * 2, [i - 0.3, i + 0.3], color=COLORS[0])
    labels = [name.removeprefix("text: ").removeprefix("FLOPs: ") for name in names]
    axes.set(yticks=range(len(names)), yticklabels=labels, title=EXPERIMENTS[experiment][0],
             xlabel="bits per byte: less is better (lines: means; dots: seeds)")
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)

def read_comparisons(path):
    with open(path, newline="", encoding="utf-8", errors="replace") as f:
        found, wanted = [*csv.DictReader(f)], "family experiment a b measure equal margin claim".split()
    for each in found:
        if [*each] != wanted or each["measure"] not in UNITS or not each["margin"][:1].isdigit():
            refuse(f"{path}: has a line that is none of ours; restore it from git")
    return found

def main(argv=None):
    parse([], argv, __doc__)
    rows = [row for row in read_runs(HERE / "runs.csv") if row["seed"] != CHOOSES_RATES]
    if not rows:
        refuse("results/runs.csv: holds no runs; python results/run.py makes them")
    comparisons = read_comparisons(HERE / "comparisons.csv")
    tables = ["# Tables, made by summarize.py", "", "## Comparisons", "",
              *comparisons_table(rows, comparisons), "", "## Means of the seeds that decide", "",
              *variants_table(rows), ""]
    (HERE / "tables.md").write_text("\n".join(tables))
    say("results/tables.md and the figures are written")
    of_steps = {row["variant"] for row in rows if row["right"]}
    of_text = {row["variant"] for row in rows} - of_steps
    for experiment, (_, variants) in EXPERIMENTS.items():
        names = [variant.name for variant in variants]
        # What they are compared with belongs to another experiment, perhaps.
        others = [each["b"] for each in comparisons if each["experiment"] == experiment]
        for known, draw in (of_steps, draw_steps), (of_text, draw_bits):
            if known & {*names}:
                there = [name for name in dict.fromkeys(names + others) if name in known]
                draw(rows, experiment, there, HERE / f"{experiment}.png")

if __name__ == "__main__":
    start(main)
