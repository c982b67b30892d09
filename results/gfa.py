"""Table of what gfa.sh has measured: gradient line, what late blocks are worth, loss."""
import json
import os
import statistics
import sys
from pathlib import Path

# where common.sh has its runs and results at this SCALE
RUNS, OUT = Path(os.environ.get("RUNS", "runs")), Path(os.environ.get("OUT", "results"))
runs, path = json.loads((RUNS / "gfa/figures/depth.json").read_text())["runs"], OUT / "gfa.json"
table = json.loads(path.read_text()) if path.exists() else {}   # rows not run this time stay as they are
spread = lambda values: f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"
half = lambda worth: [sum(max(0.0, w) for w in part) for part in (worth, worth[len(worth) // 2:])]
print("| run | loss | R² of the line | first / last gradient | late half worth, nats | share "
      "| repeated blocks: all uses, nats | share |\n|" + " --- |" * 8)
for label in sys.argv[1:]:
    found = [runs[f"{label}-seed{seed}"] for seed in (1, 2, 3)]
    worth = [half(run["block_removal"]["loss_increase"]) for run in found]
    whole = [half(run["block_removal"]["all_uses"]) for run in found if "all_uses" in run["block_removal"]]
    share = [[x for x in run["fan_in"]["share"] if x] for run in found]   # a repeated block counts once
    row = dict(loss=[run["block_removal"]["full_loss"] for run in found],
               r_squared=[run["fan_in"]["r_squared"] for run in found],
               asymmetry=[pull[0] / pull[-1] for pull in share],
               late=[late for _, late in worth], late_share=[late / total for total, late in worth],
               late_all_uses=[late for _, late in whole],
               late_share_all_uses=[late / total for total, late in whole])
    table[label] = row
    print(f"| `{label}` | " + " | ".join(spread(values) if values else "" for values in row.values()) + " |")
path.write_text(json.dumps(table, indent=1) + "\n")
