"""
From runs.csv, comparisons.csv and ill.csv to the tables and figures of results/README.md.

    python results/summarize.py             # writes results/tables.md and results/*.png

The rule. Seed 1 has chosen learning rates and is left out. A gap is A - B with the same seed. A is
*better* or *worse* than B if 0 is outside the gap's 95 % interval, also after Holm's correction for
all comparisons of its family, whose rules were committed together; *equal* if the 90 % interval
lies within the margin; *open* otherwise. "A minus B" is a gap, too, and has gaps. Beside it stands
the smallest true gap that so many runs of such a spread would have found four times of five. A
star marks what would be sure even if all comparisons of the page were one family.
"""
import csv, math, statistics, sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import ill
from cost import ASKED, BELOW, CONTROLLED
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
    return {row["seed"]: float(row[measure]) for row in rows
            if row["variant"] == variant and row[measure]}

def names_in(comparison):
    return {*f"{comparison['a']} minus {comparison['b']}".split(" minus ")}

def compare(rows, comparisons):
    """-> those comparisons whose runs are there, each with its gap, its verdict (word), and whether
    it would be sure in one family of all (star)"""
    there = {row["variant"] for row in rows}
    known = [each for each in comparisons if names_in(each) <= there]
    gaps = [Gap(*(values(rows, each[side], each["measure"]) for side in "ab")) for each in known]
    sure, stars = [False] * len(known), holm([gap.p for gap in gaps])
    for family in {each["family"] for each in known}:
        mine = [i for i, each in enumerate(known) if each["family"] == family]
        for i, is_sure in zip(mine, holm([gaps[i].p for i in mine])):
            sure[i] = is_sure
    return [SimpleNamespace(**each, gap=gap, star="*" if star else "",
                            word=verdict(gap, is_sure, float(each["margin"]), each["measure"]))
            for each, gap, is_sure, star in zip(known, gaps, sure, stars)]

def comparisons_table(found):
    lines = ["| family | A | B | at equal | A - B | 95 % interval | could have found | A is |",
             "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for each in found:
        gap, half = each.gap, each.gap.half(0.05)
        lines.append(f"| {each.family} | {each.a} | {each.b} | {each.equal} | {gap.mean:+.3f} "
                     f"{UNITS[each.measure]} | {gap.mean - half:+.3f} to {gap.mean + half:+.3f} | "
                     f"{gap.could_find():.3f} | {each.word}{each.star}, {gap.n} seeds |")
    return lines

def variants_table(rows):
    lines = ["| experiment | variant | rate | seeds | steps | bits per byte | skipped | seconds | "
             "FLOPs |", "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    names = dict.fromkeys((row["experiment"], row["variant"]) for row in rows)
    order = [*EXPERIMENTS]   # then others, such as the third edition's pruning
    formats = dict(steps=".2f", bits=".4f", skipped=".3f", seconds=".0f", flops=".2g")
    for experiment, variant in sorted(names, key=lambda name: (*order, name[0]).index(name[0])):
        mine, cells = [row for row in rows if row["variant"] == variant], []
        for column, form in formats.items():
            known = [float(row[column]) for row in mine if row[column]]
            cells.append(f"{statistics.mean(known):{form}}" if known else "")
        lines.append(f"| {experiment} | {variant} | {mine[0]['lr']} | {len(mine)} | "
                     f"{' | '.join(cells)} |")
    return lines

def sweeps_table(rows):
    """What seed 1 has chosen the rates by"""
    lines = ["| variant | steps or bits by rate |", "| --- | --- |"]
    tried = {}
    for row in rows:
        tried.setdefault(row["variant"], {})[float(row["lr"])] = row["steps"] or row["bits"]
    return lines + [f"| {name} | {', '.join(f'{lr:g}: {by[lr]}' for lr in sorted(by))} |"
                    for name, by in tried.items() if len(by) > 1]

ILL = {   # what is told of a measure of ill.csv: a name, and a function of a number a block
    "stream": {"slope": ill.slope, "Spearman": ill.spearman,
               "largest / smallest": lambda values: max(values) / min(values)},
    "change": {"late / early": ill.late_by_early},
    "gradient": {"largest / median": lambda values: max(values) / statistics.median(values)},
    "worth": {"first block": lambda values: values[0],
              "median of the others": lambda values: statistics.median(values[1:])}}

def ill_table(measured):
    """Means over seeds, and the lowest and the highest"""
    lines = ["| variant | when | measure | mean | of the seeds |", "| --- | --- | --- | --- | --- |"]
    for (variant, when, measure), by_seed in measured.items():
        for name, function in ILL[measure].items():
            found = [function(numbers) for numbers in by_seed.values()]
            lines.append(f"| {variant} | {when} | {measure}, {name} | {statistics.mean(found):.3g} | "
                         f"{min(found):.3g} to {max(found):.3g}, {len(found)} seeds |")
    return lines

# ---------------------------------------------------------------------------------------- figures

def save(figure, path):
    figure.savefig(path, dpi=110)
    plt.close(figure)

def shares_right(rows, name):
    """-> the share of right digits, (seeds, steps asked)"""
    return np.array([[float(share) for share in row["right"].split()] for row in rows
                     if row["variant"] == name])

def draw_steps(rows, title, names, path):
    """Share of right digits by steps asked: a line through the means, a dot a seed"""
    right = {name: shares_right(rows, name) for name in names}
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
             title=title, xticks=range(10), ylim=(0, 1.03))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path)

def draw_cost(rows, path):
    """Left: steps by share skipped, a dot a seed. Right: who skips, a line a seed"""
    name = "NAG that pays"
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for color, label, whats in [
            (COLORS[2], "tokens skip by their gains", ["all run", *(f"below {b}" for b in BELOW)]),
            (COLORS[3], "a fixed set of sublayers", [f"a fixed set for {b}" for b in CONTROLLED]),
            (COLORS[7], "coins, as often in each sublayer", [f"coins for {b}" for b in CONTROLLED])]:
        points = [[values(rows, f"{name}, {what}", measure) for measure in ("skipped", "steps")]
                  for what in whats]
        for skipped, steps in points:
            left.plot([100 * skipped[seed] for seed in steps], steps.values(), ".", color=color,
                      alpha=0.5)
        left.plot([100 * statistics.mean(skipped.values()) for skipped, _ in points],
                  [statistics.mean(steps.values()) for _, steps in points], "o-", color=color,
                  label=label)
    plain = statistics.mean(values(rows, "plain NAG", "steps").values())
    left.axhline(plain, color=COLORS[1], linestyle="--", label="NAG that pays nothing, all run")
    left.set(xlabel="share of all sublayer runs skipped (%)", ylabel="steps learned", ylim=(0, None))
    left.set_title("NAG that pays for turning: what skipping costs")
    left.legend(fontsize=8, loc="lower left")
    shares = [values(rows, f"{name}, below 0.1, {asked}", "skipped") for asked in ASKED]
    for seed in shares[0]:
        right.plot([100 - 100 * by_seed[seed] for by_seed in shares], color=COLORS[2], alpha=0.4)
    right.plot([100 - 100 * statistics.mean(by_seed.values()) for by_seed in shares], "o-",
               color=COLORS[2], linewidth=2)
    right.set(xlabel="steps asked for (thick: mean; thin: seeds)", ylim=(0, 100),
              ylabel="share of the sublayers that run (%)", title="and who runs how deep")
    for axes in left, right:
        axes.grid(alpha=0.3)
    save(figure, path)

def draw_ill(measured, path):
    """A panel a measure, a line a seed, by block"""
    figure, grid = plt.subplots(1, 4, figsize=(11, 3.2), layout="constrained")
    variants = list(dict.fromkeys(variant for variant, _, _ in measured))
    for axes, (measure, title) in zip(grid, [
            ("stream", "rms of the stream\n(of the source so far)"),
            ("change", "change / stream"), ("gradient", "norm of the gradient"),
            ("worth", "rise of the loss\nwithout the block (nats)")]):
        for variant in variants:
            color = COLORS[["PreNorm", "NAG", "Block"].index(variant.split()[1])]
            style = "-" if variant.startswith("AdamW") else ":"
            for i, numbers in enumerate(measured[variant, "trained", measure].values()):
                axes.plot(range(1, len(numbers) + 1), np.clip(numbers, 1e-4, None), style,
                          color=color, alpha=0.7, label=variant if i == 0 else None)
        axes.set(xlabel="block", title=title, yscale="log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.grid(alpha=0.3)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", fontsize=8, ncols=5)
    save(figure, path)

def draw_gaps(found, wanted, title, path):
    """Gaps with their intervals. wanted: (what is written beside it, A, B)"""
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.34 * len(wanted)), layout="constrained")
    by_name = {(each.a, each.b): each for each in found}
    colors = {"better": COLORS[2], "worse": COLORS[1], "open": "0.6"}
    there = [line for line in wanted if line[1:] in by_name]
    for i, (_, a, b) in enumerate(there):
        each = by_name[a, b]
        color = colors.get(each.word, COLORS[0])
        axes.errorbar(each.gap.mean, i, xerr=each.gap.half(0.05), fmt="o", color=color, capsize=3)
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.set(yticks=range(len(there)), yticklabels=[line[0] for line in there], title=title,
             xlabel="bits per byte: left of 0 is better than PreNorm (95 % intervals)")
    for word, color in colors.items():
        axes.plot([], [], "o", color=color, label=word)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path)

LEADS = [
    ("AdamW, GPT-2's first weights, 24 blocks", "AdamW: NAG", "AdamW: PreNorm"),
    ("Muon, GPT-2's first weights, 12 blocks (short)", "NAG, gpt2", "PreNorm, gpt2"),
    ("Muon, our first weights, 12 blocks (short)", "NAG, width", "PreNorm, width"),
    ("Muon, our first weights, 24 blocks (wsd)", "Muon: NAG", "Muon: PreNorm"),
    ("Muon, our first weights, 24 blocks", "24 blocks: NAG", "24 blocks: PreNorm"),
    ("Muon, our first weights, 12 blocks", "text: NAG", "text: PreNorm"),
    ("Muon, our first weights, 6 blocks", "6 blocks on text: NAG", "6 blocks on text: PreNorm")]
LONGER, ITS_FLOPS = "text: PreNorm, 1.3 times as long", "FLOPs: PreNorm, 1.06 times as long"
RIVALS = [
    ("NAG, equal FLOPs", "FLOPs: NAG", ITS_FLOPS),
    ("NAG at half the rate, equal FLOPs", "FLOPs: NAG, rate 0.04", ITS_FLOPS),
    ("NAG at a quarter of the rate, equal FLOPs", "FLOPs: NAG, rate 0.02", ITS_FLOPS),
    ("Block Attention Residuals, equal FLOPs", "FLOPs: Block Attention Residuals", ITS_FLOPS),
    ("Review, equal FLOPs", "FLOPs: Review Residuals", "FLOPs: PreNorm, 1.24 times as long"),
    ("Hyper-Connections, equal FLOPs", "text: Hyper-Connections", LONGER),
    ("the convex gate, equal tokens", "text: the convex gate", "text: PreNorm"),
    ("SiameseNorm, equal tokens", "text: SiameseNorm", "text: PreNorm"),
    ("Peri-LN, equal tokens", "text: Peri-LN", "text: PreNorm"),
    ("LayerNorm Scaling, equal tokens", "text: LayerNorm Scaling", "text: PreNorm")]

def draw_all(rows, found, measured):
    def draw_experiment(name, *others):
        question, variants = EXPERIMENTS[name]
        draw_steps(rows, question, [*(each.name for each in variants), *others], HERE / f"{name}.png")
    draw_experiment("staircase")
    draw_experiment("again", "2 blocks", "6 blocks")
    draw_cost(rows, HERE / "cost.png")
    draw_ill(measured, HERE / "ill.png")
    draw_gaps(found, LEADS, "NAG minus PreNorm on text, equal tokens", HERE / "lead.png")
    draw_gaps(found, RIVALS, "Others minus PreNorm on text, 12 blocks, Muon", HERE / "rivals.png")

# ------------------------------------------------------------------------------------------- main

def read_comparisons(path):
    with open(path, newline="", encoding="utf-8", errors="replace") as f:
        found, wanted = [*csv.DictReader(f)], "family experiment a b measure equal margin claim".split()
    for each in found:
        if [*each] != wanted or each["measure"] not in UNITS or not each["margin"][:1].isdigit():
            refuse(f"{path}: has a line that is none of ours; restore it from git")
    return found

def main(argv=None):
    parse([], argv, __doc__)
    all_rows = read_runs(HERE / "runs.csv")
    rows = [row for row in all_rows if row["seed"] != CHOOSES_RATES]
    if not rows:
        refuse("results/runs.csv: holds no runs; python results/run.py makes them")
    found = compare(rows, read_comparisons(HERE / "comparisons.csv"))
    measured = ill.read_lines(HERE / "ill.csv")
    tables = ["# Tables, made by summarize.py", "", "## Comparisons", "", *comparisons_table(found),
              "", "## Is PreNorm diluted?", "", *ill_table(measured), "",
              "## Means of the seeds that decide", "", *variants_table(rows), "",
              "## Rates that seed 1 has tried", "",
              *sweeps_table([row for row in all_rows if row["seed"] == CHOOSES_RATES]), ""]
    (HERE / "tables.md").write_text("\n".join(tables))
    draw_all(rows, found, measured)
    say("results/tables.md and the figures are written")

if __name__ == "__main__":
    start(main)
