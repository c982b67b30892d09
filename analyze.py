"""
What each layer of one or several runs does, as JSON and figures.

    python analyze.py runs/pre runs/nag --out figures
    python analyze.py runs/nag --only removal gradient_norm

Writes OUT/depth.json and one OUT/STATISTIC.png per statistic, all runs in each. Sublayers are numbered l = 1
.. 2L: odd ones are attention, even ones MLP. The statistics are measured on fixed validation windows.
"""
import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Callable, NamedTuple

import matplotlib
import torch
import torch.nn.functional as F

from train import Parser, load_run, pick_device, read_metrics, val_windows, write_file

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend has to be chosen first)


# ----------------------------------------------------------------------------- statistics
# Each takes (model, batches), a list of (idx, targets) of equal shape, and returns {name: [number per
# sublayer]}. The first name is the one that is drawn.

@torch.no_grad()
def stream_norm(model, batches):
    """
    |x_l| / sqrt(C), the root mean square of the stream before sublayer l and, as number 2L + 1, at the end.
    Mean and median over tokens, and the mean without each window's first token, which in trained models can
    be an outlier that dominates the mean. NAG: exp(s). Source: NAG paper, figure 3 (specs: norm per
    sublayer).
    """
    rms = lambda model, stream: model.ends.as_tensor(stream).double().square().mean(-1).sqrt()     # (B, T)
    norms = [torch.stack([rms(model, before) for _, before, _ in model.walk(idx)]) for idx, _ in batches]
    norms = torch.cat(norms, dim=1)  # (2L + 1, all windows, T)
    return {"mean": norms.mean((1, 2)).tolist(), "median": norms.flatten(1).median(1).values.tolist(),
            "mean_without_first_token": norms[:, :, 1:].mean((1, 2)).tolist()}


def over_writes(model, batches, measure):
    """Mean over tokens of measure(stream before, stream after), per sublayer."""
    rows = []
    for idx, _ in batches:
        writes = [(model.ends.as_tensor(before).double(), model.ends.as_tensor(after).double())
                  for l, before, after in model.walk(idx) if l <= 2 * model.config.n_layer]
        rows.append(torch.stack([measure(before, after).mean() for before, after in writes]))
    return {"mean": torch.stack(rows).mean(0).tolist()}


@torch.no_grad()
def relative_update(model, batches):
    """Mean over tokens of |x_after - x_before| / |x_before|. Source: Csordas et al. 2025,
    arXiv:2505.13898."""
    return over_writes(model, batches, lambda x, y: (y - x).norm(dim=-1) / x.norm(dim=-1).clamp_min(1e-30))


@torch.no_grad()
def cosine(model, batches):
    """Mean over tokens of cos(x_before, x_after). NAG: 1 / sqrt(1 + gain^2), eq. 15. Source:
    arXiv:2505.13898."""
    return over_writes(model, batches, lambda x, y: F.cosine_similarity(x, y, dim=-1))


def gradient_norm(model, batches):
    """Euclidean norm of d(mean loss) / d(parameters of sublayer l and of its residual), over all batches at
    once."""
    model.zero_grad(set_to_none=True)
    for idx, targets in batches:
        (model(idx, targets)[1] / len(batches)).backward()
    norms = []
    for residual, sublayer in model.sublayers():
        grads = [p.grad for p in (*residual.parameters(), *sublayer.parameters()) if p.grad is not None]
        norms.append(sum(grad.double().square().sum().item() for grad in grads) ** 0.5)
    model.zero_grad(set_to_none=True)
    return {"norm": norms}


@torch.no_grad()
def removal(model, batches):
    """
    Loss without sublayer l minus the loss with all of them, in nats per token. A removed sublayer does not
    run and the stream passes it unchanged, an outer norm (post, deepnorm, keel) included. Source: LLM-Drop,
    arXiv:2406.15786.
    """
    def loss(without=()):
        total = 0.0
        for idx, targets in batches:
            *_, (_, _, logits) = model.walk(idx, without)
            total += F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten()).item() / len(batches)
        return total

    full, losses, begin = loss(), [], time.perf_counter()
    n = 2 * model.config.n_layer
    for l in range(1, n + 1):
        losses.append(loss({l}) - full)
        left = (time.perf_counter() - begin) / l * (n - l)
        if left > 5:   # a short wait needs no report
            print(f"  removal: {l} of {n} sublayers, {left:.0f} s to go", file=sys.stderr)
    return {"loss_increase": losses, "full_loss": full}


class Stat(NamedTuple):
    measure: Callable
    title: str
    ylabel: str
    caption: str
    log: bool = False


STATS = {
    "stream_norm": Stat(
        stream_norm, "Norm of the stream", "root mean square before sublayer l",
        "A stream that grows makes every later update a smaller part of it (PreNorm dilution). The last "
        "point is the stream that the head reads.", log=True),
    "relative_update": Stat(
        relative_update, "Relative update", "|change| / |stream|",
        "How much of the stream each sublayer rewrites: near 0 it hardly does anything, at 1 the change is "
        "as large as what was there.", log=True),
    "cosine": Stat(
        cosine, "Rotation", "cosine of stream before and after",
        "1: the sublayer leaves the direction of the stream, all that a norm lets later layers see, as it "
        "was. Lower: it turns it."),
    "gradient_norm": Stat(
        gradient_norm, "Gradient per sublayer", "norm of the loss gradient",
        "How strongly the loss pulls on each sublayer's weights. An even line: all depths learn.", log=True),
    "removal": Stat(
        removal, "What a sublayer is worth", "loss increase when removed (nats/token)",
        "Each point is the model with that one sublayer taken out, not retrained. Near 0: delete it.",
        log=True),
}
LOSS_CURVE = Stat(
    None, "Loss curves", "loss (nats/token)",
    "Thin lines: training loss, averaged since the last point. Dots: loss on the fixed validation windows. "
    "Compare runs on the same data only.")


# ----------------------------------------------------------------------------- figures

def save_figure(path, stat, draw):
    """One statistic: draw(axes), then axis names, a legend and a caption that says how to read it."""
    figure, axes = plt.subplots(figsize=(7, 4.6), dpi=130)
    draw(axes)
    axes.set_title(stat.title, loc="left", fontweight="bold")
    axes.set_ylabel(stat.ylabel)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.text(0.02, 0.015, stat.caption, fontsize=8, color="0.3", wrap=True, va="bottom")
    figure.tight_layout(rect=(0, 0.075, 1, 1))
    write_file(path, lambda f: figure.savefig(f, format="png"))
    plt.close(figure)


def draw_stat(axes, name, results):
    """One line per run over the sublayers; attention and MLP differ in their markers."""
    stat = STATS[name]
    for i, (label, result) in enumerate(results.items()):
        values = next(iter(result[name].values()))
        color = f"C{i % 10}"
        axes.plot(range(1, len(values) + 1), values, color=color, lw=1.2, label=label)
        for first, marker in ((0, "o"), (1, "s")):   # attention, MLP
            axes.plot(range(1 + first, len(values) + 1, 2), values[first::2], marker, color=color, ms=4,
                      mfc=color if first else "white")
    everything = [v for result in results.values() for v in next(iter(result[name].values()))]
    if stat.log and min(everything) > 0:
        axes.set_yscale("log")
    elif stat.log:   # a sublayer whose removal helps is below zero
        axes.set_yscale("symlog", linthresh=max(1e-4, max(map(abs, everything)) / 1e3))
        axes.axhline(0, color="0.6", lw=0.8)
    axes.set_xlabel("sublayer l, from embedding to head (circles: attention, squares: MLP)")
    axes.xaxis.get_major_locator().set_params(integer=True)


def draw_loss(axes, runs):
    for i, (label, run) in enumerate(runs.items()):
        lines = read_metrics(run)
        train, val = [x for x in lines if "loss" in x], [x for x in lines if "val_loss" in x]
        axes.plot([x["tokens"] for x in train], [x["loss"] for x in train], color=f"C{i % 10}", lw=0.8)
        axes.plot([x["tokens"] for x in val], [x["val_loss"] for x in val], "o-", color=f"C{i % 10}", ms=4,
                  lw=1.4, label=label)
    axes.set_xlabel("training tokens")


# ----------------------------------------------------------------------------- main

def parse(argv):
    parser = Parser("analyze.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    allow_abbrev=False)
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument("--out", default="figures", help="folder of the results (default figures)")
    parser.add_argument("--windows", type=int, default=16, help="validation windows (default 16)")
    parser.add_argument("--batch_size", type=int, default=8, help="windows per forward pass (default 8)")
    names = ", ".join((*STATS, "loss_curve"))
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"some of: {names}")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")
    parser.add_argument("--best", action="store_true", help="the best checkpoints instead of the last ones")
    args = parser.parse(argv)
    for name in args.only:
        if name not in STATS and name != "loss_curve":
            parser.error(f"--only {name}: no such statistic; choose from {names}")
    for name in ("windows", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be 1 or more")
    if Path(args.out).exists() and not Path(args.out).is_dir():
        parser.error(f"--out {args.out}: is a file; name a folder")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; use --device cpu")
    return args


def name_runs(runs):
    """{label: folder}: the folder's name, or its whole path where two runs share a name."""
    names = [Path(run).resolve().name for run in runs]
    return {name if names.count(name) == 1 else str(run): run for name, run in zip(names, runs)}


def main(argv=None):
    args = parse(argv)
    runs, out = name_runs(args.runs), Path(args.out)
    loaded = {label: load_run(run, pick_device(vars(args)), "best.pt" if args.best else "ckpt.pt")
              # all of them before the first is measured: an error comes at once
              for label, run in runs.items()}
    if len({config["data"] for _, config in loaded.values()}) > 1:
        print("analyze.py: these runs have different --data, their losses can't be compared", file=sys.stderr)
    wanted = args.only or [*STATS, "loss_curve"]
    results = {}
    for label, (model, config) in loaded.items():
        windows = val_windows(config["data"], config["block_size"], args.windows)
        x, y = (t.to(model.turn.device) for t in windows)
        # batches of one size, so that their means can be averaged
        size = math.gcd(args.windows, args.batch_size)
        batches = list(zip(x.split(size), y.split(size)))
        shown = ("residual", "n_layer", "n_head", "n_embd", "data")
        results[label] = {"config": {key: config[key] for key in shown}}
        for name in wanted:
            if name in STATS:
                results[label][name] = STATS[name].measure(model, batches)
    out.mkdir(parents=True, exist_ok=True)
    report = dict(windows=args.windows, runs=results)
    write_file(out / "depth.json", lambda f: f.write(json.dumps(report, indent=1).encode() + b"\n"))
    for name in wanted:
        if name in STATS:
            save_figure(out / f"{name}.png", STATS[name], lambda axes: draw_stat(axes, name, results))
        else:
            save_figure(out / f"{name}.png", LOSS_CURVE, lambda axes: draw_loss(axes, runs))
    print(f"{out}: depth.json, " + ", ".join(f"{name}.png" for name in wanted))


if __name__ == "__main__":
    main()
