"""
Table of the runs FOLDER/LABEL-lrRATE-seedN that a script of this folder has made: each label at the learning
rate that is best for seed 1, the gap to the first label of the table paired by seed (of labels as 96-nag, to
the first at 96). Adds it to OUT, a JSON file, too.

    python results/compare.py runs/compare --out results/compare.json pre nag lns
    python results/compare.py runs/compare --best pre nag lns       prints label and rate of each instead
    python results/compare.py runs/compare --edge pre nag lns       ... and the next rate to try, where the
                                                                    best is the first or last of its sweep
"""
import argparse
import json
import statistics
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", type=Path)
parser.add_argument("labels", nargs="+")
parser.add_argument("--out", default="")
parser.add_argument("--best", action="store_true")
parser.add_argument("--edge", action="store_true")
parser.add_argument("--sort", action="store_true", help="by bits per byte")
args = parser.parse_args()


def final(run):
    """Lowest validation bits per byte of a run."""
    lines = [json.loads(line) for line in open(run / "metrics.jsonl")]
    return min(line["val_bpb"] for line in lines if "val_bpb" in line)


def rate(lr):
    """0.024 -> 2.4e-2, as the names of the runs have it"""
    digits, exponent = f"{lr:.2e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


table = {}
for label in args.labels:
    runs = {}   # learning rate -> seed -> bits per byte
    for folder in sorted(args.folder.glob(f"{label}-lr*-seed*")):
        if (folder / "done").exists():
            lr, seed = folder.name.removeprefix(f"{label}-lr").split("-seed")
            runs.setdefault(lr, {})[seed] = final(folder)
    if not runs:
        continue
    sweep = {lr: runs[lr]["1"] for lr in sorted(runs, key=float) if "1" in runs[lr]}
    best = min(sweep, key=sweep.get)   # chosen by seed 1, the seed of the sweep
    if args.edge:
        rates = list(sweep)
        if len(rates) > 1 and best in (rates[0], rates[-1]):
            print(label, rate(float(best) * (2 if best == rates[-1] else 0.5)))
        continue
    if args.best:
        if len(runs[best]) < 3:
            print(label, best)
        continue
    bpb = list(runs[best].values())
    table[label] = dict(lr=best, bits_per_byte=runs[best], mean=statistics.mean(bpb), sweep=sweep,
                        sd=statistics.stdev(bpb) if len(bpb) > 1 else None)

if args.out and Path(args.out).exists():   # labels and rates that were not run this time stay as they are
    old = json.loads(Path(args.out).read_text())
    for label in table.keys() & old.keys():
        sweep = old[label]["sweep"] | table[label]["sweep"]
        table[label]["sweep"] = {lr: sweep[lr] for lr in sorted(sweep, key=float)}
    table = old | table
bases = {}   # depth, if labels have one -> its first row
for label, row in table.items():
    # the same seed means the same data order and the same shared weights: compare in pairs
    first = bases.setdefault(label.split("-")[0] if label[0].isdigit() else "", row)["bits_per_byte"]
    gaps = [bpb - first[seed] for seed, bpb in row["bits_per_byte"].items() if seed in first]
    if len(gaps) > 1:
        error = statistics.stdev(gaps) / len(gaps) ** 0.5
        row["gap"] = dict(mean=statistics.mean(gaps), standard_error=error)
for label, row in sorted(table.items(), key=lambda item: item[1]["mean"]) if args.sort else table.items():
    sweep = ", ".join(f"{lr}: {bpb:.3f}" for lr, bpb in row["sweep"].items())
    gap = row.get("gap", dict(mean=0.0))
    gap = f"{gap['mean']:+.3f} ± {gap['standard_error']:.3f}" if gap["mean"] else ""
    spread = f" ± {row['sd']:.3f}" if row["sd"] is not None else ""
    seeds = len(row["bits_per_byte"])
    print(f"| `{label}` | {row['mean']:.3f}{spread} | {seeds} | {gap} | {row['lr']} | {sweep} |")
if args.out and table:
    Path(args.out).write_text(json.dumps(table, indent=1) + "\n")
