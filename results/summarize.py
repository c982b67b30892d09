"""
From runs.csv, comparisons.csv and ill.csv to the tables and figures of results/README.md.

    python results/summarize.py             # writes results/tables.md and results/*.png

The rule. Seed 1 has chosen learning rates and is left out. A gap is A - B with the same seed. A is
*better* or *worse* than B if 0 is outside the gap's 95 % interval, also after Holm's correction for
all comparisons of its family, whose rules were committed together; *equal* if the 90 % interval
lies within the margin; *open* otherwise. "A minus B" is a gap, too, and has gaps. Beside it stands
the smallest true gap that so many runs of such a spread would have found four times of five. A
star marks what would be sure even if all comparisons with a rule were one family.

The family `later` was looked at when all of it had run. It has intervals, but no rule: so it gets
no verdict, and the other families and the star are as they would be without it.

And the rule of `cliff`: the convex gate fails at a depth if, in all three seeds, it ends no more
than 0.05 nats (0.072 bits per byte) below 4.427 bits, what the tokens' frequencies alone reach. It
trains if, in all three, it is further below.
"""
import csv
import functools
import math
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import rules
from analyze import COLORS
from flags import parse, refuse, start
from rules import ASKED, BELOW, CONTROLLED
from run import read_runs
from train import say

UNITS = dict(steps="steps", bits="bits per byte", skipped="of the sublayer runs")
# What a sure gap is called, if A has more, and if A has less
WORDS = dict(steps=("better", "worse"), bits=("worse", "better"), skipped=("more", "less"))

LATER = "later"   # the family without a rule

# ------------------------------------------------------------------------------------- statistics

@functools.cache   # There are few n, and hundreds of gaps.
def students_t(n):
    """Student's t with n degrees of freedom -> many t, and how likely each |t| or more is by chance

    With t = sqrt(n) tan(angle) the density becomes cos(angle)^(n - 1), which is easy to sum up."""
    angles = np.linspace(0, math.pi / 2, 200_001)
    heights = np.cos(angles).clip(0) ** (n - 1)
    areas = np.cumsum((heights[1:] + heights[:-1]) / 2)
    return math.sqrt(n) * np.tan(angles), 1 - np.append(0, areas) / areas[-1]

def two_sided_p(t, n):
    """How likely a |t| of this size or more is by chance"""
    return np.interp(abs(t), *students_t(n))

def t_quantile(p, n):
    """The t whose two_sided_p is p"""
    ts, ps = students_t(n)
    return np.interp(p, ps[::-1], ts[::-1])

class Gap:
    """The mean of paired differences, a list, and what can be said of the true one"""
    def __init__(self, differences):
        self.n = len(differences)
        self.mean = statistics.mean(differences)
        self.error = max(statistics.stdev(differences) / math.sqrt(self.n), 1e-9)
        self.p = two_sided_p(self.mean / self.error, self.n - 1)

    def half(self, p):
        """Half of the interval that holds all but p"""
        return t_quantile(p, self.n - 1) * self.error

    def could_find(self):
        return self.half(0.05) + self.half(0.4)

def holm(ps):
    """p values -> those that are below 5 % in spite of all the others"""
    sure = []
    for p in sorted(ps):
        if p > 0.05 / (len(ps) - len(sure)):
            break
        sure.append(p)
    return sure

def verdict(gap, is_sure, margin, measure):
    if is_sure:
        return WORDS[measure][gap.mean < 0]
    if abs(gap.mean) + gap.half(0.1) <= margin:
        return f"equal within {margin:g}"
    return "open"

# ------------------------------------------------------------------------------------ comparisons

def read_comparisons(path):
    """comparisons.csv -> a list of objects"""
    with open(path, newline="", encoding="utf-8") as f:
        found = [SimpleNamespace(**line) for line in csv.DictReader(f)]
    for each in found:
        if each.measure not in UNITS:
            refuse(f"{path}: {each.measure} is no measure; choose from {', '.join(UNITS)}")
    return found

def values(rows, variant, measure):
    """-> {seed: value}. Of "A minus B": the differences, of seeds that both have"""
    if " minus " in variant:
        ours, theirs = (values(rows, name, measure) for name in variant.split(" minus "))
        return minus(ours, theirs)
    return {row["seed"]: float(row[measure]) for row in rows
            if row["variant"] == variant and row[measure]}

def minus(ours, theirs):
    return {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}

def compare(rows, comparisons):
    """-> those comparisons that have two seeds at least. Each gets its gap, a word (the verdict),
    and a star if it would be sure in one family of all"""
    found = []
    for each in comparisons:
        gaps = minus(*(values(rows, name, each.measure) for name in (each.a, each.b)))
        if len(gaps) > 1:
            each.gap = Gap(list(gaps.values()))
            found.append(each)
    have_a_rule = [each for each in found if each.family != LATER]
    sure_of_all = holm([each.gap.p for each in have_a_rule])
    for each in found:
        each.word, each.star = "without a rule", ""
    for each in have_a_rule:
        sure = holm([other.gap.p for other in found if other.family == each.family])
        each.word = verdict(each.gap, each.gap.p in sure, float(each.margin), each.measure)
        each.star = "*" if each.gap.p in sure_of_all else ""
    return found

# ----------------------------------------------------------------------------------------- tables

def table(title, columns, rows):
    """-> lines of markdown"""
    rows = [columns, ["---"] * len(columns), *rows]
    return [f"## {title}", "", *("| " + " | ".join(map(str, row)) + " |" for row in rows), ""]

def comparisons_table(found):
    rows = []
    for each in found:
        gap, half = each.gap, each.gap.half(0.05)
        rows.append([each.family, each.a, each.b, each.equal,
                     f"{gap.mean:+.3f} {UNITS[each.measure]}",
                     f"{gap.mean - half:+.3f} to {gap.mean + half:+.3f}", f"{gap.could_find():.3f}",
                     f"{each.word}{each.star}, {gap.n} seeds"])
    return table("Comparisons", ["family", "A", "B", "at equal", "A - B", "95 % interval",
                                 "could have found", "A is"], rows)

ILL = {   # what is told of a measure of ill.csv: a name, and a function of a number a block
    "stream": {"slope": rules.slope, "Spearman": rules.spearman,
               "largest / smallest": lambda numbers: max(numbers) / min(numbers)},
    "change": {"late / early": rules.late_by_early},
    "gradient": {"largest / median": lambda numbers: max(numbers) / statistics.median(numbers),
                 "Spearman": rules.spearman},
    "worth": {"first block": lambda numbers: numbers[0],
              "share of the last third": rules.late_share,
              "share of the first third": lambda numbers: rules.late_share(numbers[::-1]),
              "median of the others": lambda numbers: statistics.median(numbers[1:])}}

def of_seeds(numbers):
    """-> two cells: their mean; the lowest and the highest"""
    return (f"{statistics.mean(numbers):.3g}",
            f"{min(numbers):.3g} to {max(numbers):.3g}, {len(numbers)} seeds")

def ill_table(measured):
    """Means over seeds, and the lowest and the highest"""
    rows = []
    for (variant, when, measure), by_seed in measured.items():
        for name, function in ILL[measure].items():
            found = [function(numbers) for numbers in by_seed.values()]
            rows.append([variant, when, f"{measure}, {name}", *of_seeds(found)])
    for variant in dict.fromkeys(variant for variant, _, _ in measured):
        gradients, worths = (measured[variant, "trained", name] for name in ("gradient", "worth"))
        found = [rules.rank_correlation(gradients[seed], worths[seed]) for seed in gradients]
        rows.append([variant, "trained", "gradient with worth, Spearman", *of_seeds(found)])
    columns = ["variant", "when", "measure", "mean", "of the seeds"]
    return table("Is PreNorm diluted?", columns, rows)

def variants_table(rows):
    found = {}   # experiment -> variant -> its rows
    for row in rows:
        of_experiment = found.setdefault(row["experiment"], {})
        of_experiment.setdefault(row["variant"], []).append(row)
    forms = dict(steps=".2f", bits=".4f", skipped=".3f", seconds=".0f", flops=".2g")
    lines = []
    for experiment, variants in found.items():
        for variant, mine in variants.items():
            known = [values(mine, variant, measure).values() for measure in forms]
            means = [f"{statistics.mean(numbers):{form}}" if numbers else ""
                     for numbers, form in zip(known, forms.values())]
            lines.append([experiment, variant, mine[0]["lr"], len(mine), *means])
    return table("Means of the seeds that decide",
                 ["experiment", "variant", "rate", "seeds", "steps", "bits per byte", "skipped",
                  "seconds", "FLOPs"], lines)

def sweeps_table(rows):
    tried = {}
    for row in rows:
        tried.setdefault(row["variant"], {})[float(row["lr"])] = row["steps"] or row["bits"]
    return table("Rates that seed 1 has tried", ["variant", "steps or bits by rate"],
                 [[name, ", ".join(f"{lr:g}: {by_rate[lr]}" for lr in sorted(by_rate))]
                  for name, by_rate in tried.items() if len(by_rate) > 1])

# ---------------------------------------------------------------------------------------- figures

STYLE = {"axes.grid": True, "grid.alpha": 0.3, "legend.fontsize": 8, "savefig.dpi": 110,
         "figure.constrained_layout.use": True}

def save(figure, name):
    figure.savefig(HERE / f"{name}.png")
    plt.close(figure)

def draw_steps(rows):
    """Share of right digits by steps asked: a line through the means, a dot a seed"""
    names = "1 block", "2 blocks", "4 blocks", "6 blocks", "2 blocks, twice as long"
    right = {name: np.array([[float(share) for share in row["right"].split()] for row in rows
                             if row["variant"] == name]) for name in names}   # (seeds, steps asked)
    figure, axes = plt.subplots(figsize=(7, 4))
    best_first = sorted(names, key=lambda name: -right[name].mean())
    for color, name in zip(COLORS, best_first):
        steps = np.arange(right[name].shape[1])
        style = "--" if "as long" in name else "-"   # Another length of training is dashed.
        axes.plot(steps, right[name].mean(0), style, color=color, label=name)
        beside = 0.05 * (best_first.index(name) - len(names) / 2)   # Dots don't hide each other.
        axes.plot(steps + beside, right[name].T, ".", color=color, alpha=0.5)
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
        return list(values(rows, f"NAG that pays late, {what}", measure).values())

    by_gain = ["all run", *(f"below {below}" for below in BELOW)]
    fixed = [f"a fixed set for {below}" for below in CONTROLLED]
    coins = [f"coins for {below}" for below in CONTROLLED]
    for color, label, ways in [(COLORS[2], "tokens skip by angle", by_gain),
                               (COLORS[3], "a fixed set of sublayers", fixed),
                               (COLORS[7], "at random, as often in each sublayer", coins)]:
        skipped = np.array([of_seeds(way, "skipped") for way in ways]) * 100   # (ways, seeds)
        steps = np.array([of_seeds(way, "steps") for way in ways])
        left.plot(skipped, steps, ".", color=color, alpha=0.25)
        left.plot(skipped.mean(1), steps.mean(1), "o-", color=color, label=label)
        if ways is by_gain:
            angles = [f"{math.degrees(math.atan(below)):.0f}°" for below in BELOW]
            for x, y, angle in zip(skipped.mean(1), steps.mean(1), ["none", *angles]):
                left.annotate(angle, (x, y), (0, 7), textcoords="offset points", ha="center",
                              fontsize=8)
    plain = statistics.mean(values(rows, "late: plain NAG", "steps").values())
    left.axhline(plain, color=COLORS[1], linestyle="--", label="NAG that pays nothing, all run")
    left.set(xlabel="share of all sublayer runs skipped (%)", ylabel="steps learned",
             ylim=(0, None), title="NAG that pays late: what skipping costs")
    left.legend(loc="lower left")

    ran = 100 - 100 * np.array([of_seeds(f"below 0.05, {asked}", "skipped") for asked in ASKED])
    right.plot(ran, "o-", color=COLORS[2], alpha=0.6)
    right.set(xlabel="steps asked for (a line a seed)", ylim=(0, 100),
              ylabel="share of the sublayers that run (%)",
              title="and who runs how much, if turns below 3° are skipped")
    save(figure, "cost")

def draw_ill(measured):
    """A panel a measure, a line a seed, by block"""
    figure, grid = plt.subplots(1, 4, figsize=(11, 3.2))
    titles = {"stream": "rms of the stream\n(of the source so far)", "change": "change / stream",
              "gradient": "norm of the gradient",
              "worth": "rise of the loss\nwithout the block (nats)"}
    colors = {"PreNorm": COLORS[0], "NAG": COLORS[1], "Block Attention Residuals": COLORS[2]}
    for axes, (measure, title) in zip(grid, titles.items()):
        for variant in dict.fromkeys(variant for variant, _, _ in measured):
            regime, residual = variant.split(": ")
            if regime not in ("AdamW", "Muon"):
                continue   # Of width 768, tables.md has the numbers.
            numbers = np.array([*measured[variant, "trained", measure].values()]).T
            lines = axes.plot(range(1, len(numbers) + 1), numbers.clip(1e-4), alpha=0.7,
                              linestyle="-" if regime == "AdamW" else ":", color=colors[residual])
            lines[0].set_label(variant)
        axes.set(xlabel="block", title=title, yscale="log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    save(figure, "ill")

def by_mean(comparison):
    return comparison.gap.mean

def draw_gaps(found, title, name):
    """Those comparisons that comparisons.csv has for this figure, each with its interval"""
    figure, axes = plt.subplots(figsize=(8, 4.5))
    colors = {"better": COLORS[2], "worse": COLORS[1], "open": "0.6"}
    shown = [each for each in found if each.figure == name]
    # Two groups, one below the other: GPT-2's init, then ours; or equal tokens, then equal FLOPs.
    second = [each for each in shown if "our init" in each.label or "equal FLOPs" in each.label]
    first = [each for each in shown if each not in second]
    for each in sorted(first, key=by_mean) + sorted(second, key=by_mean):
        color = colors.get(each.word, COLORS[0])
        # Hollow: its interval leaves out 0, but Holm's correction undoes that.
        undone = each.word == "open" and each.gap.p < 0.05
        axes.errorbar(each.gap.mean, each.label, xerr=each.gap.half(0.05), fmt="o", capsize=3,
                      color=color, markerfacecolor="white" if undone else color)
    for word, color in colors.items():
        if word in {each.word for each in shown}:
            axes.plot([], [], "o", color=color, label=word)
    axes.plot([], [], "o", color=colors["open"], markerfacecolor="white",
              label="open after Holm's correction")
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.axhline(len(first) - 0.5, color="0.3", linestyle=":", linewidth=0.8)
    axes.set(xlabel="bits per byte: left of 0 is better than PreNorm (95 % intervals)", title=title)
    axes.invert_yaxis()
    axes.legend()
    save(figure, name)

def draw_all(rows, found, measured):
    plt.rcParams.update(STYLE)
    draw_steps(rows)
    draw_cost(rows)
    draw_ill(measured)
    draw_gaps(found, "NAG minus PreNorm on code, equal tokens", "lead")
    draw_gaps(found, "Others minus PreNorm on code: 12 blocks, Muon, our init", "rivals")

# ------------------------------------------------------------------------------------------- main

def main(argv=None):
    parse([], argv, __doc__)   # It knows --help only.
    rows = read_runs(HERE / "runs.csv")
    decide = [row for row in rows if row["seed"] != "1"]
    chooses_rates = [row for row in rows if row["seed"] == "1"]
    comparisons = read_comparisons(HERE / "comparisons.csv")
    found = compare(decide, comparisons)
    measured = rules.read_ill(HERE / "ill.csv")
    tables = ["# Tables, made by summarize.py", "", *comparisons_table(found), *ill_table(measured),
              *variants_table(decide), *sweeps_table(chooses_rates)]
    (HERE / "tables.md").write_text("\n".join(tables))
    draw_all(decide, found, measured)
    say("results/tables.md and the figures are written")
    for each in comparisons:
        if each not in found:
            say(f"{each.a} against {each.b}: waits for runs")

if __name__ == "__main__":
    start(main)
