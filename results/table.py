"""
Writes results/README.md: the claims of the papers, what they report, what came out here, and the command. All
numbers in the columns CPU and GPU are read from the JSON files that the commands write: none can drift.

    python results/table.py
"""
import json
import statistics
from pathlib import Path

HERE = Path(__file__).resolve().parent


# ------------------------------------------------------------------ numbers

def pm(mean, error=None, digits=3, sign=False):
    """-0.0512, 0.013 -> −0.051 ± 0.013"""
    number = f"{mean:{'+' if sign else ''}.{digits}f}".replace("-", "−")
    return number if error is None else f"{number} ± {error:.{digits}f}"


def spread(values, digits=3):
    """Mean ± standard deviation of the seeds."""
    return pm(statistics.mean(values), statistics.stdev(values), digits)


def paired(ours, theirs, digits=3):
    """Mean difference of runs with the same seed ± its standard error."""
    gaps = [a - b for a, b in zip(ours, theirs)]
    return pm(statistics.mean(gaps), statistics.stdev(gaps) / len(gaps) ** 0.5, digits, sign=True)


def difference(ours, theirs):
    """paired, of two rows of results/compare.py"""
    common = sorted(ours["bits_per_byte"].keys() & theirs["bits_per_byte"].keys())
    return paired(*([row["bits_per_byte"][seed] for seed in common] for row in (ours, theirs)))


def listed(items, last="and"):
    items = list(items) or ["none"]
    return ", ".join(items[:-1]) + f" {last} " * (len(items) > 1) + items[-1]


# ------------------------------------------------------------------ claims
# Each takes load, which reads a JSON of this folder, or of gpu/ in it, and returns the lines of the cell.

def depths(table):
    """Of the labels of a JSON, as 96-nag."""
    return sorted({int(label.split("-")[0]) for label in table if label[0].isdigit()})


def nag_and_depth(load):
    table, lines = load("depth"), []
    for name in dict.fromkeys(label.split("-", 1)[1] for label in table if not label.endswith("-pre")):
        gaps = ((depth, table[f"{depth}-{name}"]["gap"]) for depth in depths(table)
                if f"{depth}-{name}" in table)
        lines.append(f"{'Block `attnres`' if name == 'attnres' else f'`{name}`'} " + listed(
            f"{pm(gap['mean'], gap['standard_error'], sign=True)} at {depth}" for depth, gap in gaps))
    return ["minus `pre`, bits per byte, by number of blocks:", *lines]


def norms(load):
    runs = load("claims")["runs"]
    pre, nag = runs["pre"], runs["nag"]
    both = lambda name, digits: (f"`pre` {pm(pre[name]['mean'], pre[name]['sd'], digits)}, "
                                 f"`nag` {pm(nag[name]['mean'], nag[name]['sd'], digits)}")
    ratio = pre["growth"]["mean"] / nag["growth"]["mean"]
    return [f"norm, end / start: {both('growth', 2)}: {ratio:.0f} times as much",
            f"its growth exponent over the middle of the depth: {both('exponent', 2)}",
            f"contribution of a block, largest / median: {both('contribution_uneven', 1)}"]


def skipping(load):
    rates = load("claims")["runs"]["nag"]["skip"]
    return ["more nats per token than without skipping: " + listed(
        f"{pm(row['loss_increase']['mean'], row['loss_increase']['sd'])} at {float(rate):.0%}"
        for rate, row in rates.items() if rate in ("0.1", "0.2", "0.25", "0.5"))]


def skipping_in_training(load):
    table = load("mod")
    rates = [row for name, row in table.items() if name.startswith("nag") and name != "nag-0"]
    gap = lambda row: pm(row["gap"], row["gap_standard_error"], sign=True)
    gaps = (f"{gap(row)} at {row['train_skip_rate']:.1%}" for row in rates)
    lines = [f"minus full depth, bits per byte: {listed(gaps)}"]
    if {"router-0.25", "nag-0.25"} <= table.keys():
        router, nag = table["router-0.25"], table["nag-0.25"]
        lines += [f"router on `pre`, 25 %, minus dense `pre`: {gap(router)}",
                  f"`nag` minus that: {paired(nag['bits_per_byte'], router['bits_per_byte'])}, with "
                  f"{nag['flops'] / router['flops'] - 1:.0%} more FLOPs (each has those of its dense run)"]
    return lines


def outliers(load):
    report, lines = load("claims"), []
    runs, even = report["runs"], report["even_attention"]
    for title, name, digits in (
            (f"attention to the first token, {even:.4f} if spread evenly", "sink", 4),
            ("excess kurtosis of the last stream", "kurtosis", 2),
            ("of the matrices", "weight_kurtosis", 2), ("nats more with 4-bit matrices", "rounded_4", 4),
            ("with 3-bit matrices", "rounded_3", 4)):
        pre, nag = runs["pre"][name], runs["nag"][name]
        lines.append(f"{title}: `pre` {pm(pre['mean'], pre['sd'], digits)}, `nag` minus `pre` "
                     f"{pm(nag['gap'], nag['standard_error'], digits, sign=True)}")
    return lines


def attnres(load):
    report = load("claims")
    runs = {name: report["runs"][name] for name in ("pre", "attnres", "attnres-block3", "hyper-lite")
            if name in report["runs"]}
    gap = lambda row: pm(row["gap"], row["standard_error"], sign=True)
    each = lambda name, digits: listed(f"`{label}` {pm(row[name]['mean'], row[name]['sd'], digits)}"
                                       for label, row in runs.items())
    losses = [f"`{label}` {gap(row['bits_per_byte'])}" for label, row in runs.items() if label != "pre"]
    direct = [f"`{label}` {gap(report[f'{label} minus hyper-lite'])}"
              for label in ("attnres", "attnres-block3") if f"{label} minus hyper-lite" in report]
    return [f"minus `pre`, bits per byte: {listed(losses)}",
            *(f"minus `hyper-lite`: {listed(direct)}" for _ in direct[:1]),
            f"growth exponent of what is carried: {each('exponent', 2)}",
            f"gradient of a block, largest / median: {each('gradient_uneven', 1)}"]


def convex(load):
    table, lines = load("stability"), []
    names = {"convex": "convex", "convex, bias −3": "convex-bias-3", "additive": "review", "`pre`": "pre"}
    for title, label in names.items():
        rows = [table.get(f"{depth}-{label}") for depth in depths(table)]
        lines.append(f"{title}: {', '.join(pm(row['mean'], row['sd'], 2) for row in rows if row)}")
    return [f"bits per byte at {listed(map(str, depths(table)))} blocks; of token frequencies alone "
            f"{table['unigram']['mean']:.2f}", *lines]


def review(load):
    table = load("residuals")
    rows = {"`review`": "review", "`highway`": "highway", "`highway` of the same size": "highway-mlp5",
            "a constant gate": "half", "`pre` of the same size": "pre-mlp6"}
    lines = ["minus `pre`, bits per byte: " + listed(
        f"{title} {pm(table[label]['gap']['mean'], table[label]['gap']['standard_error'], sign=True)}"
        for title, label in rows.items() if label in table)]
    if {"review", "highway-mlp5"} <= table.keys():
        lines.append("`review` minus `highway` of the same size: "
                     + difference(table["review"], table["highway-mlp5"]))
    return lines


def cascade(load):
    table, times = load("widths"), load("widths_speed")["rows"]
    gap = lambda name: pm(table[name]["gap"]["mean"], table[name]["gap"]["standard_error"], sign=True)
    narrow, uniform = next(row for flags, row in times.items() if "--taper_match none" in flags), times["pre"]
    less = lambda name: f"{1 - narrow[name] / uniform[name]:.1%}"
    return [f"minus uniform at equal training FLOPs, bits per byte: {gap('cascade')}",
            f"time of a decoded token {less('decode_ms')} less, of a training step {less('step_ms')} less",
            f"at equal size and tokens: narrower upwards {gap('taper')}, downwards {gap('reverse')}"]


def pruning(load):
    report, k = load("prune"), 4
    at = lambda name: [losses[k] for losses in report["methods"][name]["seeds"]]
    rivals = ("random", "loss", "taylor", "magnitude", "influence", "reverse")
    return [f"without {k} blocks, nats per token, `cfp` minus "
            + listed(f"`{name}` {paired(at('cfp'), at(name), 4)}" for name in rivals),
            f"rank correlation of `cfp` after a quarter of the training with the final one: "
            f"{statistics.mean(report['stability']['25%']):.2f}"]


def fan_in(load):
    table = load("gfa")
    share = lambda name: table[name]["late_share"]
    change = lambda name, base: paired(share(name), share(base))
    lines = [f"R² of the line: {spread(table['adamw']['r_squared'], 2)}, at 24 blocks "
             f"{spread(load('prune')['r_squared'], 2)}",
             f"later half's share of what the blocks are worth: AdamW {spread(share('adamw'))}, "
             f"SGD {spread(share('sgd'))}",
             f"change by equalised gradients: AdamW {change('adamw-equalized', 'adamw')}, "
             f"SGD {change('sgd-equalized', 'sgd')}",
             f"by repeating late blocks {change('repeat-late', 'adamw')}, early ones "
             f"{change('repeat-early', 'adamw')}, by 20 blocks {change('unrolled', 'adamw')}"]
    whole = table["repeat-late"].get("late_share_all_uses")   # a repeated block removed wherever it runs
    if whole:
        lines.append(f"by repeating late blocks, all uses removed: {paired(whole, share('adamw'))}")
    return lines


def dilution(load):
    report = load("claims")
    each = lambda measure, digits, *names: listed(
        f"`{name}` {pm(report['runs'][name][measure]['mean'], report['runs'][name][measure]['sd'], digits)}"
        for name in names if name in report["runs"])
    trained = "pre", "nag", "attnres", "attnres-block3", "lns", "peri"
    low, high = report["bounds"]
    return [f"mean square before training, end / start, bounds {low:g} and {high:g}: "
            f"{each('initial_growth', 1, 'pre', 'nag', 'lns')}",
            "trained, contribution of a block, mean of the later half: "
            f"{each('contribution_late', 3, *trained)}",
            f"effective number of the {2 * report['blocks']} updates: "
            f"{each('effective_sublayers', 1, *trained)}"]


# letter: (claim, paper's report, function, its JSON files, verdict, script and labels, figure)
CLAIMS = {
    "a": ("NAG beats PreNorm, and the gap grows with depth",
          "direction; losses were not to be had",
          nag_and_depth, "depth",
          "**reproduced**: PreNorm gets worse with depth, NAG does not, in runs twice as long, too "
          "([tables.md](tables.md)). Beyond 12 blocks NAG owes that to a warm-up of its step sizes, "
          "train.py's default: without it, in those longer runs, the gap does not grow, and at 96 it is gone",
          "depth", "depth"),
    "b": ("PreNorm's stream grows and NAG's does not; NAG's contributions are even",
          "PreNorm's norm grows up to 120 times as much",
          norms, "claims",
          "**partly**: the direction, not the factor. Of PreNorm's 28, 14 is the factor of its first block, "
          "which finds a tiny embedding; after it `pre` doubles, and NAG's stream grows by a third",
          "claims", "claims"),
    "c": ("A dense-trained NAG can skip at inference",
          "a knob for accuracy against compute; its curve was not to be had",
          skipping, "claims",
          "**reproduced** as a knob, since there is no number to compare with: a tenth is nearly free, a "
          "quarter is not",
          "claims", "claims"),
    "d": ("Skipping in pretraining costs nothing at equal FLOPs",
          "20 to 25 % matches full depth",
          skipping_in_training, "mod",
          "**reproduced**, and too easily: runs this short live on tokens, so that every rate wins, 50 % "
          "most. The router gains more over dense `pre` than NAG's rule over dense `nag`, but stays behind",
          "mod", "mod"),
    "e": ("NAG has less of an attention sink, of outliers, and of loss from rounding",
          "direction",
          outliers, "claims",
          "**not reproduced**, at 12 blocks of width 64: no model has a sink or outliers yet, and what "
          "rounding costs differs in the claimed direction by little more than its noise",
          "claims", "claims"),
    "f": ("AttnRes: bounded magnitudes, even gradients, lower loss; as good as mHC-lite",
          "nats at 436M: PreNorm 1.766, Block 1.746, Full 1.737, mHC-lite 1.747",
          attnres, "claims",
          "**partly**: magnitudes are bounded, Block's as the saw-tooth of the paper; losses are lower, "
          "Block's clearly; gradients are only a little more even, the first block still gets most",
          "claims", "claims"),
    "g": ("A convex gate fails beyond about 20 blocks, an additive one trains at every depth",
          "convex stalls near 6.0 nats, about what token frequencies give",
          convex, "stability",
          "**partly**: at these two rates a convex gate that starts at one half fails from 8 blocks on (at 6 "
          "a higher one saves it, deeper that is untried); with the bias −3 of 2015 it trains at every "
          "depth, better than the additive one; with more rates, at 6 blocks (residuals.json), they are "
          "level",
          "stability", "stability"),
    "h": ("Review has no advantage at small scale",
          "nats, standard minus Review: −0.009 at 60M, −0.003 at 150M, +0.016 at 1B",
          review, "residuals",
          "**partly**, at 6 blocks of width 64: `review` beats `pre` clearly, but a Highway gate, which does "
          "not see the update, wins more: what is Review's own is no advantage",
          "residuals pre review half highway highway-mlp5 pre-mlp6", ""),
    "i": ("CascadeFormer: equal loss, lower latency",
          "comparable perplexity, latency −8.6 %, throughput +9.4 %",
          cascade, "widths widths_speed",
          "**reproduced**: times at width 256, loss at width 64; that the loss is even lower is probably due "
          "to the tokens which its FLOPs buy, on which runs this short live",
          "widths", ""),
    "j": ("CFP finds blocks to remove better than heuristics do",
          "better perplexity and rank stability; its tables were not to be had",
          pruning, "prune",
          "**not reproduced**, at 24 blocks of width 64: far better than random orders, which may take the "
          "first block, but behind `taylor` and `magnitude`, which need no training history. Its ranking is "
          "stable early, as claimed",
          "prune", ""),
    "k": ("Gradients fall on a line over depth (GFA); late blocks are not revived by equal gradients, but by "
          "repetition",
          "line without an R²; interventions as figures that were not to be had",
          fan_in, "gfa prune",
          "**partly**, at 12 blocks of width 64: no line, most gradient goes to the first block; equal "
          "gradients raise what late blocks are worth, but to a twentieth of the whole only; repetition does "
          "not, be one place removed or all",
          "gfa", ""),
    "l": ("PreNorm dilution: bounded growth at the start, then late blocks contribute ever less",
          "Xiong et al.: mean square from 1 + L/2 to 1 + 3L/2",
          dilution, "claims",
          "**partly**: late blocks of `pre` contribute less than those of `nag`, `attnres` and `peri`, "
          "though not ever less: about as much from block 6 to 11; `lns`, made against dilution, less still. "
          "At the start `pre` is below the bounds, since GPT-2's init scales updates down; `lns`, without "
          "that, is at the lower one",
          "claims", "claims"),
}

# of each script, with these labels, on two cores, as measured: stability and residuals with the sweeps, which
# now only SWEEP=1 runs; some while the cores did other things, too
MINUTES = {
    "depth": "29 min",
    "claims": "15 min", "mod": "24 min", "stability": "30 min", "residuals": "14 min",
    "widths": "8 min", "prune": "4 min", "gfa": "25 min",
}

HEAD = """\
# What the papers claim, and what came out here

Written by `python results/table.py` from the JSON files of this folder; don't edit; more in
[tables.md](tables.md). ± is the standard deviation of three seeds; of a difference (it has a sign) the
standard error, paired by seed. Each method is at the best learning rate of a sweep, unless the script says
otherwise; `SWEEP=1` before a command sweeps anew, without it the rates are those of the last sweep. In
claims.json `peri` is best at the last rate of its sweep and could do better; claims and residuals train
NAG's gates with `--gate_lr 3e-3`, three times the default and not swept. Sources: NAG arXiv:2606.16112 (a
to e), Attention Residuals 2603.15031 (f, l), Review 2606.31859 (g, h), CascadeFormer 2606.26538 (i to k),
Xiong et al. 2002.04745 (l).

CPU: two cores, models of 0.3 to 5M parameters, 0.1 to 1.0M tokens of `data/stdlib` as bytes. That measures
how models start to learn and no more: a claim that fails here may hold at the scale of its paper, and one
that holds here may not.

GPU: `SCALE=gpu bash results/NAME.sh` runs the same with GPT-2 tokens of the Python sources on the machine,
context 1,024, 12 blocks of width 768 (depth and stability: width 256). `results/common.sh` says what changes,
results go to `results/gpu/`. **None has been run yet: GPU rows await a GPU**, and until then steps and times
are estimates. residuals, claims, depth and stability take labels behind the command, depth and stability
`DEPTHS=96`, mod `RATES="0.2 0.5"`: about three labels, or the larger depths one by one, fit into ten minutes.
The tokenizer needs the network once, or TIKTOKEN_CACHE_DIR, or `TOKENIZER=bytes`. `DRY=1` prints the commands
of either scale.

"""


def loader(folder):
    return lambda name: json.loads((folder / f"{name}.json").read_text())


def cell(measure, files, folder, nothing):
    """Lines with numbers and links to their files; `nothing` as long as these are missing."""
    # a GPU's runs may be of some labels only
    missing = (FileNotFoundError, KeyError) if folder else FileNotFoundError
    try:
        lines = measure(loader(HERE / folder))
    except missing:
        return nothing
    links = ", ".join(f"[{name}.json]({folder}{name}.json)" for name in files.split())
    return f"{'<br>'.join(lines)}<br>({links})"


def readme():
    rows = ["| | claim | paper | CPU | GPU | verdict | command | figure |", "|" + " --- |" * 8]
    for letter, (claim, paper, measure, files, verdict, command, figure) in CLAIMS.items():
        script, *labels = command.split()
        cpu, gpu = cell(measure, files, "", "not finished"), cell(measure, files, "gpu/", "awaits GPU")
        columns = (f"({letter})", claim, paper, cpu, gpu, verdict,
                   f"`bash {' '.join((f'results/{script}.sh', *labels))}`, {MINUTES[script]}",
                   f"[{figure}.png]({figure}.png)" if figure else "")
        rows.append("| " + " | ".join(columns) + " |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    (HERE / "README.md").write_text(readme())
