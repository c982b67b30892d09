"""
What results/run.py measures on a run, and what it makes of that: a yardstick, intervals, verdicts, figures.

finals: {(variant, steps): {seed: run}}, the runs at the best rate of their variant.
lines: {steps: bits per byte of the tables of 1- to 5-grams}.
"""
import math, re, statistics
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

import analyze
import prepare
from model import ByFunction, EarlyExit, Threshold, Without, calibrate, flops_per_token, ran_shares, why_not
from runs import read_metrics
from train import train_batch

# ----------------------------------------------------------------------------- what is measured on a run

WINDOWS, GROUPS = 1024, 32   # validation windows of a final number, and groups of neighbours among them

def rounded(values):
    return [round(float(value), 4) for value in values]

@torch.no_grad()
def score(model, config, decider=None):
    """-> bits per byte of the validation windows, of each group; share of tokens that ran each sublayer"""
    windows = prepare.val_windows(config["data"], config["block_size"], WINDOWS)
    x, y = (part.to(model.device) for part in windows)
    sizes = prepare.token_bytes(config, config["vocab_size"]).to(model.device)
    bits, n_bytes, keeps = [], [], []
    for idx, targets in zip(x.chunk(GROUPS), y.chunk(GROUPS)):
        bits.append(model(idx, targets, decider=decider, keeps=keeps)[1].item() / math.log(2) * targets.numel())
        n_bytes.append(sizes[targets].sum().item())
    shares, n = ran_shares(keeps), 2 * len(model.order)   # n of each pass
    ran = [shares[l] is not False and statistics.mean(shares[l::n]) for l in range(n)]
    return sum(bits) / sum(n_bytes), [b / n for b, n in zip(bits, n_bytes)], ran

@torch.no_grad()
def skip(model, config, dense, groups):
    """{who skips: [[share of FLOPs saved, bits lost, those of groups], ...]}, with a sixth, a quarter, a
    third and half of the sublayer runs skipped. All choices are made on training windows."""
    shards = prepare.open_split(config["data"], "train", config["block_size"])
    x, y = train_batch(shards, config["block_size"], config["seed"], 10 ** 9, 64)   # No run has this step.
    x, y = x.to(model.device), y.to(model.device)
    n, rng, curves = 2 * len(model.order), torch.Generator().manual_seed(0), {}

    def add(name, decider):
        bits, parts, ran = score(model, config, decider)
        looks = 2 * model.lm_head.weight.numel() * getattr(decider, "looks", 0) / GROUPS
        saved = 1 - (flops_per_token(model, ran=ran) + looks) / flops_per_token(model)
        lost = [after - before for after, before in zip(parts, groups)]
        curves.setdefault(name, []).append([round(saved, 4), round(bits - dense, 5), rounded(lost)])
        return ran

    if why_not(model, "skip"):
        for confidence in (0.98, 0.95, 0.9, 0.8, 0.6):
            add("early exit", EarlyExit(model, confidence))
        return curves
    gains = [residual.gain(before).abs().mean().item() for (_, before, *_), (_, residual, _) in
             zip(model.walk(x), model.sublayers(x))]
    least, greedy = sorted(range(1, n + 1), key=lambda l: gains[l - 1]), set()
    for share in (1 / 6, 1 / 4, 1 / 3, 1 / 2):
        ran = add("by gain", calibrate(model, list(x.split(16)), share))
        add("random tokens", ByFunction(lambda l, residual, stream: (
            torch.rand(stream[0].shape[:2], generator=rng).to(stream[0].device) < ran[l - 1], None)))
        while len(greedy) < round(share * n):
            greedy.add(min({*range(1, n + 1)} - greedy, key=lambda l: model(
                x, y, decider=Without(greedy | {l}))[1].item()))
        add("greedy sublayers", Without(greedy))
        add("least-gain sublayers", Without({*least[:round(share * n)]}))
    return curves

def inside(model, config, *_):
    """Lines of analyze.py's figures, on 512 windows; 1 - R2 of fan_in with the first block, and without it"""
    windows, curves = prepare.val_windows(config["data"], config["block_size"], 512), {}
    run = analyze.Run(model, config, read_metrics(config["out"]), SimpleNamespace(skip=0.25), windows)
    stats = [analyze.fan_in, analyze.sink, analyze.outliers]
    if not model.config.repeat:   # Repeated blocks don't stand alone.
        stats.append(analyze.prune_curve)
    for stat in stats:
        for panel, lines in stat(run).items():
            for label, values in lines.items():
                curves[f"{panel} {label}".strip()] = [[i, round(value, 4)] for i, value in enumerate(values)]
    share, line = (np.array(values) for values in analyze.fan_in(run)[""].values())
    curves["1 - R2"] = [[i, round(left_by_fan_in(share[i:], line[i:]), 4)] for i in (0, 1)]
    return curves

def left_by_fan_in(share, line):
    """line: a + b F, with F largest in the first block -> the part of the variance of gradients that a line
    leaves which rises with F. It leaves all of it, if they fall with F."""
    F = line if line[0] > line[-1] else -line
    return 1 - max(0.0, np.corrcoef(F, share)[0, 1]) ** 2

MEASURES = dict(skip=skip, inside=inside)

# ----------------------------------------------------------------------------- the yardstick: counting

class WittenBell:
    """n-grams of order 1 to 5 (4 for GPT-2 tokens), smoothed by Witten and Bell. With c counts, and T(h) the
    number of different tokens after a history h, p(w | h) = (c(h w) + T(h) p(w | shorter h)) / (c(h) + T(h)).
    The last: 1 / V."""
    def __init__(self, tokens, seen, V):
        """tokens, seen (n,): an n-gram counts if all of its tokens have been seen"""
        self.V, self.tables = V, []
        for n in range(1, 6 if V ** 5 < 2 ** 63 else 5):   # A code is an int64.
            whole = sliding_window_view(seen, n).all(axis=1)
            code = self.encode(sliding_window_view(tokens, n)[whole])
            grams, counts = np.unique(code, return_counts=True)
            # The newest token is the lowest digit, so n-grams with the same history stand side by side.
            histories, first, types = np.unique(grams // V, return_index=True, return_counts=True)
            self.tables.append((grams, counts, histories, np.add.reduceat(counts, first), types))

    def encode(self, rows):
        """rows (N, n) of tokens -> each as one number, whose digits are the tokens, (N,)"""
        code = np.zeros(len(rows), np.int64)
        for column in rows.T:
            code = code * self.V + column
        return code

    def probability(self, rows):
        """rows (N, n) of tokens, n at most 5 -> p(last one | those before), (N,)"""
        n = rows.shape[1]
        lower = 1 / self.V if n == 1 else self.probability(rows[:, 1:])
        grams, counts, histories, totals, types = self.tables[n - 1]
        code = self.encode(rows)
        total = look_up(histories, totals, code // self.V)
        different = look_up(histories, types, code // self.V)
        share = (look_up(grams, counts, code) + different * lower) / np.maximum(1, total + different)
        return np.where(total > 0, share, lower)

    def bits(self, rows, n):
        """rows (N, T + 1) -> bits of the last T tokens of all rows, by at most n - 1 tokens before them"""
        parts = [rows[:, max(0, t + 1 - n):t + 1] for t in range(1, rows.shape[1])]
        return -sum(np.log2(self.probability(part)).sum() for part in parts)

def look_up(keys, values, wanted):
    place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)

# ----------------------------------------------------------------------------- intervals and verdicts

# The 97.5 % point of Student's t, by degrees of freedom: 2 to 10 seeds, and the groups of windows
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262,
       GROUPS - 1: 2.040}

def interval(values):
    """-> mean, half of its 95 % interval (inf for one value)"""
    if len(values) < 2:
        return sum(values), math.inf
    return statistics.mean(values), T95[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5

def values_of(what, steps, finals):
    """what: see run.Claim -> {seed: [value, values of the groups of windows]}, or {seed: [value]}"""
    variant, *curve = what.split(" | ")
    if re.fullmatch("[0-9.]+", variant):
        return {seed: [float(variant)] for seed in (1, 2, 3)}
    runs = finals.get((variant, steps), {})
    if not curve:
        return {seed: [run["bits"], run["groups"]] for seed, run in runs.items()}
    name, place = curve
    if place in ("mean", "max"):
        summary = dict(mean=statistics.mean, max=max)[place]
        return {seed: [summary(y for _, y in run["curves"][name])] for seed, run in runs.items()}
    return {seed: run["curves"][name][int(place)][1:] for seed, run in runs.items()}

def gap(of, against, steps, finals):
    """-> paired differences of the seeds, and of the groups of windows (means over seeds)"""
    ours, theirs = values_of(of, steps, finals), values_of(against, steps, finals)
    pairs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    groups = [np.subtract(a[1], b[1]) for a, b in pairs if len(a) == len(b) == 2]
    return [a[0] - b[0] for a, b in pairs], np.mean(groups, axis=0).tolist() if groups else []

def in_words(seeds, groups):
    mean, half = interval(seeds)
    text = f"{mean:+.3f}, one seed" if len(seeds) == 1 else f"{mean:+.3f} ± {half:.3f}, {len(seeds)} seeds"
    return text + (f", windows ± {interval(groups)[1]:.3f}" if groups else "")

def judge(experiment, claim, finals, lines):
    """The rule, one for all claims -> verdict, gap, by what; None without runs. It looks at the longest runs
    with three seeds (if there are none, at those with most seeds), and at one control there: one that
    contradicts, or else the one whose gap has the highest end of the interval."""
    def shortfall(each):   # A control that contradicts comes first, then the one that is least surely beaten.
        mean, half = interval(each[0])
        return mean - half > -claim.least and mean + half >= 0, mean + half

    lengths, found = sorted({stage.steps for stage in experiment.stages}), {}
    for steps in lengths:
        gaps = [(*gap(claim.of, control, steps, finals), control) for control in claim.against]
        if all(seeds for seeds, *_ in gaps):
            found[steps] = max(gaps, key=shortfall)
    if not found:
        return None
    last = max(found, key=lambda steps: (min(3, len(found[steps][0])), steps))
    seeds, groups, control = found[last]
    mean, half = interval(seeds)
    early = min(statistics.mean(found[steps][0]) for steps in found if steps <= last)   # not after it
    excluded = mean - half > -claim.least   # A lead of that size is outside the interval.
    sure = mean + half < 0 and (not groups or mean + interval(groups)[1] < 0)
    order, margin = experiment.line
    ours, theirs = (finals.get((what.split(" | ")[0], last), {}) for what in (claim.of, control))
    base = [theirs[seed]["bits"] for seed in ours.keys() & theirs.keys()]
    too_weak = base and statistics.mean(base) > lines.get(str(last), [0, 0, 0, 0])[order - 1] - margin
    if len(seeds) < 3 or too_weak:
        word = "cannot be tested here"
    elif sure and max(seeds) <= -claim.least:
        word = "holds against a control"
    elif abs(mean) < 0.02 and early <= -0.03 and excluded:
        word = "start-up effect"
    elif excluded and not sure:
        word = "contradicted"
    else:   # Without a lead, and with a wide interval, it says nothing.
        word = "direction only" if mean < 0 else "cannot be tested here"
    control = ", ".join(control.split(" | ")[:2])   # In a table of Markdown, a bar ends a column.
    return word, in_words(seeds, groups), f"{last} of {lengths[-1]} steps, against {control}"

# ----------------------------------------------------------------------------- figures and tables

def points(experiment, run):
    """What a figure shows of a run: (label, place, x, y), ... Runs are compared at equal places."""
    variant, bits = run["variant"], run["bits"]
    if experiment.measure != "loss":
        first = experiment.x == "block"   # Blocks are counted from 1.
        return [(f"{variant}: {curve}", i, x + first, y) for curve in experiment.curves or run["curves"]
                for i, (x, y, *_) in enumerate(run["curves"].get(curve, ()))]
    if experiment.x == "blocks":
        name, n = variant.split(" --n_layer ")
        return [(name, int(n), int(n), bits)]
    if experiment.x == "FLOPs per token":   # All have as many in all, so all are compared.
        return [(variant, 0, run["flops"] / run["tokens"] / 3, bits)]
    return [(variant, run["tokens"], run["tokens"], bits)]

def draw(path, experiment, finals, lines):
    """Left: a dot per run, a line through the means, n-grams dashed. Right: paired gaps to the first label,
    with 95 % intervals over seeds."""
    by_tokens, of_losses = experiment.x == "training tokens", experiment.measure == "loss"
    by_factors = by_tokens or experiment.x == "blocks"
    longest = max(steps for _, steps in finals)
    runs = [run for (_, steps), of_seed in finals.items() for run in of_seed.values()
            if by_tokens or steps == longest]
    found = {}   # {label: {place: {seed: (x, y)}}}
    for run in runs:
        for label, place, x, y in points(experiment, run):
            found.setdefault(label, {}).setdefault(place, {})[run["seed"]] = x, y
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    first, base = next(iter(found.items()))
    for i, (label, places) in enumerate(found.items()):
        color, dot, line = f"C{i % 10}", ".o" if i < 10 else "xx", []   # ten colours, then crosses
        shared = {*label.split(": ")} & {*first.split(": ")}   # the same model, or the same curve
        beside = 1.03 ** (i - len(found) / 2) if by_factors else 1   # so that none hides another
        for place, seeds in places.items():
            xs, ys = zip(*((x * beside, y) for x, y in seeds.values()))
            left.plot(xs, ys, dot[0], color=color)
            line.append((statistics.mean(xs), statistics.mean(ys)))
            gaps = [seeds[seed][1] - base[place][seed][1] for seed in seeds if seed in base.get(place, {})]
            if i and len(gaps) > 1 and (shared or of_losses):
                mean, half = interval(gaps)
                right.errorbar(line[-1][0], mean, half, fmt=dot[1], capsize=3, color=color)
        left.plot(*zip(*sorted(line)), "-" if i < 10 else ":", color=color, label=label)
    if of_losses:
        draw_lines(left, by_tokens, {str(run["steps"]): run["tokens"] for run in runs}, lines)
        bits = [run["bits"] for run in runs]
        left.set_ylim(min(bits) - 0.05, max(bits) + 0.3)   # n-grams out of reach stay out.
    left.set(xlabel=experiment.x, ylabel=experiment.y)
    right.set(xlabel=experiment.x, ylabel=f"gap to {first}")
    right.set_yscale("symlog", linthresh=0.1)   # Small gaps count, and large ones are to be there, too.
    ticks = [0.02, 0.05, 0.1, 0.3, 1]
    right.yaxis.set_major_locator(plt.FixedLocator([0, *ticks, *(-tick for tick in ticks)]))
    right.yaxis.set_major_formatter("{x:g}")
    right.axhline(0, color="0.3")
    for axis in left, right:
        axis.grid(alpha=0.3)
        if by_factors:
            xs = sorted({place for places in found.values() for place in places})
            axis.set(xscale="log", xlim=(xs[0] / 1.5, xs[-1] * 1.5))
            axis.set_xticks(xs, [f"{x / 1e6:.1f}M" if by_tokens else x for x in xs])
            axis.minorticks_off()
        elif experiment.x == "block":
            axis.xaxis.set_major_locator(plt.MaxNLocator(integer=True))
    left.legend(fontsize=8)
    figure.suptitle(experiment.question)
    figure.savefig(path, dpi=110)
    plt.close(figure)

def draw_lines(axis, by_tokens, tokens, lines):
    """tokens: {steps: training tokens}"""
    known = sorted((steps for steps in tokens if steps in lines), key=int)
    names = "unigrams", "bigrams", "trigrams", "4-grams", "5-grams"
    for name, ys in zip(names, zip(*(lines[steps] for steps in known))):
        if by_tokens and len(ys) > 1:
            axis.plot([tokens[steps] for steps in known], ys, "--", color="0.6")
        else:
            axis.axhline(ys[-1], linestyle="--", color="0.6")
        axis.annotate(name, (0.99, ys[-1]), xycoords=("axes fraction", "data"), color="0.4", ha="right",
                      va="bottom", annotation_clip=True)

def table(experiment, finals):
    """Rows: each variant at each length, its gap to the first variant (if x is blocks, of as many)"""
    rows, first = [], experiment.stages[0].variants[0]
    for (variant, steps), runs in sorted(finals.items(), key=lambda item: item[0][1]):
        if experiment.x == "blocks":
            first = f"{first.split()[0]} --n_layer {variant.split()[-1]}"
        bits = " ".join(f"{runs[seed]['bits']:.3f}" for seed in sorted(runs))
        seeds, groups = gap(variant, first, steps, finals)
        text = in_words(seeds, groups) if seeds and variant != first else ""
        rows.append([variant, steps, f"{next(iter(runs.values()))['lr']:.6g}", bits, text])
    return rows
