"""Table of what prune.sh has measured: loss after removing blocks, rank correlations, rank stability."""
import json
import os
import statistics
from pathlib import Path

# where common.sh has its runs and results at this SCALE
RUNS, OUT = Path(os.environ.get("RUNS", "runs")), Path(os.environ.get("OUT", "results"))
runs = json.loads((RUNS / "prune/figures/depth.json").read_text())["runs"]
curves, fans, drops = ([run[name] for run in runs.values()]
                       for name in ("prune_curve", "fan_in", "drop_curve"))
mean = lambda values: None if None in values else statistics.mean(values)   # None: a score that is constant
table = {}
for method in curves[0]["loss"]:
    losses = [curve["loss"][method] for curve in curves]
    rhos = {name: mean([curve[name].get(method) for curve in curves])
            for name in ("rank_correlation", "stability")}
    table[method] = dict(loss=[mean(at_k) for at_k in zip(*losses)], seeds=losses, **rhos)
for part in ("attention", "mlp"):   # LLM-Drop: of this many blocks, only that sublayer
    losses = [drop[part] for drop in drops]
    table[f"{part} only"] = dict(loss=[mean(at_k) for at_k in zip(*losses)], seeds=losses,
                                 rank_correlation=None,
                                 stability=mean([curve["stability"].get(part) for curve in curves]))
print("| method | rank correlation | stability | 0 | 1 | 2 | 4 | 6 | 8 |\n|" + " --- |" * 9)
for method, row in sorted(table.items(), key=lambda item: item[1]["loss"][4]):
    rhos = ("" if row[name] is None else f"{row[name]:+.2f}" for name in ("rank_correlation", "stability"))
    losses = (f"{row['loss'][k]:.3f}" for k in (0, 1, 2, 4, 6, 8))
    print(" | ".join((f"| `{method}`", *rhos, *losses)) + " |")
stability = {f"{step / fans[0]['stability_steps'][-1]:.0%}": [fan["stability"][i] for fan in fans]
             for i, step in enumerate(fans[0]["stability_steps"])}
print("stability of cfp's ranking, Spearman with the final one: " + ", ".join(
    f"{share} {mean(rho):.2f}" for share, rho in stability.items()))
print("fan-in line: R^2 " + ", ".join(f"{fan['r_squared']:.2f}" for fan in fans))
(OUT / "prune.json").write_text(json.dumps(dict(
    methods=table, stability=stability, r_squared=[fan["r_squared"] for fan in fans]), indent=1) + "\n")
