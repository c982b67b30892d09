"""Table of the runs that compare.sh has made. --best prints the best learning rate of each residual instead."""
import json
import statistics
import sys
from pathlib import Path


def final(folder):
    """-> (lowest validation loss, its bits per byte, mean tokens/s) of a run."""
    lines = [json.loads(line) for line in open(folder / "metrics.jsonl")]
    best = min((line for line in lines if "val_loss" in line), key=lambda line: line["val_loss"])
    return best["val_loss"], best["val_bpb"], statistics.mean(line["tok_s"] for line in lines if "tok_s" in line)


table = {}
for residual in [name for name in sys.argv[1:] if not name.startswith("-")]:
    runs = {}   # learning rate -> seed -> result
    for folder in sorted(Path("runs/compare").glob(f"{residual}-lr*-seed*")):
        lr, seed = folder.name.removeprefix(f"{residual}-lr").split("-seed")
        runs.setdefault(lr, {})[seed] = final(folder)
    best = min(runs, key=lambda lr: runs[lr]["1"][0])   # chosen by seed 1, the seed of the sweep
    if "--best" in sys.argv:
        print(residual, best)
        continue
    bpb = [result[1] for result in runs[best].values()]
    table[residual] = dict(lr=best, val_loss={s: r[0] for s, r in runs[best].items()}, val_bpb={s: r[1] for s, r in
                           runs[best].items()}, sweep={lr: runs[lr]["1"][1] for lr in sorted(runs, key=float)})
    sweep = "  ".join(f"{lr}: {runs[lr]['1'][1]:.3f}" for lr in sorted(runs, key=float))
    print(f"{residual:10s} {statistics.mean(bpb):.4f} +- {statistics.stdev(bpb) if len(bpb) > 1 else 0:.4f} bits per byte "
          f"({len(bpb)} seeds, lr {best}; sweep {sweep})")
if table:
    first = next(iter(table))
    for name in table:   # the same seed means the same data order and the same shared weights: compare in pairs
        seeds = table[first]["val_bpb"].keys() & table[name]["val_bpb"].keys()
        gaps = [table[name]["val_bpb"][s] - table[first]["val_bpb"][s] for s in sorted(seeds)]
        if name != first and len(gaps) > 1:
            table[name]["gap"] = dict(mean=statistics.mean(gaps), se=statistics.stdev(gaps) / len(gaps) ** 0.5)
            print(f"{name} - {first}: {table[name]['gap']['mean']:+.4f} +- {table[name]['gap']['se']:.4f} (standard error)")
    Path("results/compare.json").write_text(json.dumps(table, indent=1) + "\n")
