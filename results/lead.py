"""Draws lead.png from runs.csv: NAG minus PreNorm in fifteen settings, with 95 % intervals.

    python results/lead.py
"""

import csv
from pathlib import Path

from matplotlib.figure import Figure

from compare import mean_and_half_interval

RESULTS = Path(__file__).parent
SETTINGS = [   # label, NAG's and PreNorm's name in runs.csv
    ("Muon, std 0.02, 12 blocks (147 iterations)", "NAG, gpt2", "PreNorm, gpt2"),
    ("Muon, by fan-in, 12 blocks (147 iterations)", "NAG, width", "PreNorm, width"),
    ("Muon, by fan-in, 12 blocks", "text: NAG", "text: PreNorm"),
    ("Muon, by fan-in, 24 blocks", "24 blocks: NAG", "24 blocks: PreNorm"),
    ("Muon, by fan-in, 6 blocks", "6 blocks on text: NAG", "6 blocks on text: PreNorm"),
    ("AdamW, std 0.02, 24 blocks", "AdamW: NAG", "AdamW: PreNorm"),
    ("Muon, by fan-in, 24 blocks (400 iterations)", "Muon: NAG", "Muon: PreNorm"),
    ("AdamW, std 0.02, 48 blocks (300 iterations)",
     "regime: NAG, 48 blocks", "regime: PreNorm, 48 blocks"),
    ("AdamW, by fan-in, 6 blocks (300 iterations)", "adamw, width: NAG", "adamw, width: PreNorm"),
    ("Muon, std 0.02, 6 blocks (300 iterations)", "muon, gpt2: NAG", "muon, gpt2: PreNorm"),
    ("Muon, by fan-in, 6 blocks (300 iterations)", "muon, width: NAG", "muon, width: PreNorm"),
    ("AdamW, std 0.02, 6 blocks (300 iterations)", "adamw, gpt2: NAG", "adamw, gpt2: PreNorm"),
    ("AdamW, std 0.02, 24 blocks of width 768", "768 wide: NAG", "768 wide: PreNorm"),
    ("AdamW, by fan-in, 24 blocks of width 768",
     "768 wide, our init: NAG", "768 wide, our init: PreNorm"),
    ("AdamW, std 0.02, 6 blocks (3,000 iterations)",
     "3000 iterations: NAG", "3000 iterations: PreNorm"),
]

def bits_of(runs, variant):   # seed 1 chose the learning rates
    return {run["seed"]: float(run["bits"]) for run in runs
            if run["variant"] == variant and run["seed"] != "1"}

def main():
    with open(RESULTS / "runs.csv") as file:
        runs = list(csv.DictReader(file))
    rows = []
    for label, nag, pre in SETTINGS:
        nag, pre = bits_of(runs, nag), bits_of(runs, pre)
        gaps = [nag[seed] - pre[seed] for seed in nag if seed in pre]
        rows.append((*mean_and_half_interval(gaps), label))

    figure = Figure((8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    names = {"C0": "NAG is better", "0.6": "the interval contains 0", "C1": "PreNorm is better"}
    for gap, half, label in sorted(rows):
        color = "C0" if gap + half < 0 else "C1" if gap - half > 0 else "0.6"
        axes.errorbar(gap, label, xerr=half, fmt="o", capsize=3, color=color,
                      label=names.pop(color, None))
        print(f"{gap:+.3f} ± {half:.3f}  {label}")
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    axes.set(title="NAG minus PreNorm on code, equal tokens",
             xlabel="bits per byte, with 95 % intervals; left of 0, NAG is better")
    figure.savefig(RESULTS / "lead.png", dpi=110)

if __name__ == "__main__":
    main()
