"""Table of the runs that compare.sh has made. --best prints the best learning rate of each residual instead."""
import json
import statistics
import sys
from pathlib import Path


def final(folder):
    """Lowest validation loss of a run, as bits per byte."""
    lines = [json.loads(line) for line in open(folder / "metrics.jsonl")]
    return min(line["val_bpb"] for line in lines if "val_bpb" in line)


table = {}
for residual in [name for name in sys.argv[1:] if not name.startswith("-")]:
    runs = {}   # learning rate -> seed -> bits per byte
    for folder in sorted(Path("runs/compare").glob(f"{residual}-lr*-seed*")):
        if (folder / "done").exists():
            lr, seed = folder.name.removeprefix(f"{residual}-lr").split("-seed")
            runs.setdefault(lr, {})[seed] = final(folder)
    sweep = {lr: runs[lr]["1"] for lr in sorted(runs, key=float)}
    best = min(sweep, key=sweep.get)   # chosen by seed 1, the seed of the sweep
    if "--best" in sys.argv:
        print(residual, best)
        continue
    bpb = list(runs[best].values())
    table[residual] = dict(lr=best, bits_per_byte=runs[best], mean=statistics.mean(bpb), sweep=sweep,
                           sd=statistics.stdev(bpb) if len(bpb) > 1 else None)

for name, row in table.items():
    # the same seed means the same data order and the same shared weights: compare in pairs
    pairs = [(bpb, table[next(iter(table))]["bits_per_byte"].get(seed)) for seed, bpb in row["bits_per_byte"].items()]
    gaps = [ours - first for ours, first in pairs if first is not None]
    if len(gaps) > 1:
        row["gap"] = dict(mean=statistics.mean(gaps), standard_error=statistics.stdev(gaps) / len(gaps) ** 0.5)
    sweep = ", ".join(f"{lr}: {bpb:.3f}" for lr, bpb in row["sweep"].items())
    gap = f"{row['gap']['mean']:+.3f} ± {row['gap']['standard_error']:.3f}" if any(gaps) and "gap" in row else ""
    spread = f" ± {row['sd']:.3f}" if row["sd"] is not None else ""
    print(f"| `{name}` | {row['mean']:.3f}{spread} | {len(row['bits_per_byte'])} | {gap} | {row['lr']} | {sweep} |")
if table:
    Path("results/compare.json").write_text(json.dumps(table, indent=1) + "\n")
