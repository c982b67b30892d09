"""results/: every number of the page from runs.csv and table.csv, by code that shares nothing with
compare.py; compare.py from a command to its table; speed.py."""

import csv
import json
import math
import re
import signal
import sys
from contextlib import redirect_stdout
from functools import cache
from statistics import mean, median, stdev

import numpy as np
import pytest
from conftest import ROOT, refused

sys.path.append(str(ROOT / "results"))
import compare
import speed
import train
from flags import UserError

PAGE = " ".join((ROOT / "results/README.md").read_text().split())
COMPARED = re.sub(r"<!-- (\w+) -->.*?<!-- end of \1 -->", "", PAGE.split("## What others")[0])

def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))

RUNS = [row for row in read(ROOT / "results/runs.csv") if row["seed"] != "1"]

@cache
def t95(n):
    """The 97.5 % quantile of Student's t of n values, by adding up its density"""
    freedom = n - 1
    t = np.linspace(0, 40, 400_001)
    log_factor = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    density = (1 + t ** 2 / freedom) ** (-(freedom + 1) / 2) / math.sqrt(freedom * math.pi)
    return t[np.searchsorted(np.cumsum(density) * math.exp(log_factor) * 1e-4, 0.475)]

def half_interval(values):
    return t95(len(values)) * stdev(values) / len(values) ** 0.5

def of_seeds(variant, column="bits"):
    """-> {seed: value}"""
    return {row["seed"]: float(row[column])
            for row in RUNS if row["variant"] == variant and row[column]}

def gaps_of(a, b):
    a, b = of_seeds(a), of_seeds(b)
    return [a[seed] - b[seed] for seed in a if seed in b]

def gap_in_words(a, b):
    gaps = gaps_of(a, b)
    return f"{mean(gaps):+.3f} ± {half_interval(gaps):.3f}"

# -----------------------------------------------------------------------------
# the page

RECIPES = ["adamw, gpt2", "adamw, width", "muon, gpt2", "muon, width"]
GAPS = [("text: NAG", "text: PreNorm"),
        ("text: Block Attention Residuals", "text: PreNorm"),
        ("text: Review Residuals", "text: PreNorm"),
        ("field: Gated Residual", "field: PreNorm"),
        ("field: mHC", "field: PreNorm"),
        ("field: linear taper", "field: PreNorm"),
        ("quarter: 24 blocks that skip", "quarter: 24 blocks"),
        ("quarter: 24 blocks that skip", "quarter: 18 blocks"),
        ("FLOPs: Block Attention Residuals", "FLOPs: PreNorm, 1.06 times as long"),
        ("cliff: convex, 24 blocks", "cliff: review, 24 blocks"),
        ("768 wide: NAG", "768 wide: PreNorm"),
        ("768 wide, our init: NAG", "768 wide, our init: PreNorm"),
        *[(f"{recipe}: NAG", f"{recipe}: PreNorm") for recipe in RECIPES],
        *[(f"{recipe}: PreNorm", f"{RECIPES[0]}: PreNorm") for recipe in RECIPES[1:]]]

def test_gaps_of_the_page():
    """All are there, and no others but those marked †, which are not in runs.csv"""
    found = re.findall(r"[+-]\d\.\d{3} ± \d\.\d{3}(?! nats †)", COMPARED)
    assert {*found} == {gap_in_words(a, b) for a, b in GAPS}

def test_verdicts_of_the_page():
    """A gap whose interval contains 0 is inconclusive, and no other is."""
    claims = re.findall(r"([+-]\d\.\d{3}) ± (\d\.\d{3})[^|]*\| (\*\*[^|]*)\|", COMPARED)
    assert len(claims) == 12
    for gap, half, verdict in claims:
        assert (abs(float(gap)) < float(half)) == ("inconclusive" in verdict)

def test_what_seeds_can_find():
    stds = []
    for variant in {row["variant"] for row in RUNS if row["experiment"] in ("text", "field")}:
        if "PreNorm" not in variant and "convex" not in variant:
            stds.append(stdev(gaps_of(variant, variant.split(":")[0] + ": PreNorm")))
    std = round(median(stds), 3)
    assert len(stds) >= 12 and std == compare.TYPICAL_STD
    assert f"from seed to seed by {std} bits" in PAGE
    three, five, ten = (t95(n) * std / n ** 0.5 for n in (3, 5, 10))
    assert (f"± {three:.3f} with three seeds, ± {five:.3f} with five and ± {ten:.3f} with ten"
            in PAGE)
    assert compare.T95[2:] == pytest.approx([12.706, *map(t95, range(3, 21))], abs=2e-3)

def test_steps_by_share_skipped():
    numbers = []
    for way in "all run", "below 0.05", "below 0.2":
        for column, factor in ("skipped", 100), ("steps", 1):
            numbers.append(factor * mean(of_seeds(f"NAG that pays late, {way}", column).values()))
    words = "steps learned: {1:.2f}; with {2:.0f} % skipped {3:.2f}; with {4:.0f} % {5:.2f}"
    assert numbers[0] == 0 and words.format(*numbers) in PAGE

@pytest.mark.parametrize("name", ["table", "adamw"])
def test_the_table(name):
    """Means and intervals of NAME.csv from NAME_runs.csv, and the page's lines from both"""
    page = (ROOT / "results/README.md").read_text()
    part = re.search(rf"(?s)<!-- {name} -->\n(.*?)<!-- end of {name} -->", page)[1].strip()
    if not (ROOT / f"results/{name}.csv").exists():
        assert part == "Not measured yet."
        return
    runs = read(ROOT / f"results/{name}_runs.csv")
    rows = read(ROOT / f"results/{name}.csv")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.split("\n")[2:]]
    assert [line[0].strip("`") for line in lines] == [row["rule"] for row in rows]

    def bits(row):
        rates = row["rule"], row["lr"], row["residual_lr"]
        return {run["seed"]: float(run["bpb"]) for run in runs if run["seed"] != "1"
                and (run["rule"], run["lr"], run["residual_lr"]) == rates}

    baseline = bits(rows[-1])
    for row, line in zip(rows, lines):
        mine = bits(row)
        assert len(mine) == int(row["seeds"])
        assert line[1] == ", ".join(filter(None, [row["lr"], row["residual_lr"]]))
        assert line[2] in (f"{mean(mine.values()):.3f}", "diverged")
        tried = [run for run in runs if run["seed"] == "1" and run["rule"] == row["rule"]]
        if tried:   # seed 1 has chosen the learning rates
            best = min(tried, key=lambda run: float(run["bpb"]))
            assert (best["lr"], best["residual_lr"]) == (row["lr"], row["residual_lr"])
        if line[3]:
            gaps = [mine[seed] - baseline[seed] for seed in mine if seed in baseline]
            gap, half = mean(gaps), half_interval(gaps)
            found = [float(number) for number in line[3].strip("*").split("±")]
            assert found == pytest.approx([gap, half], abs=6e-4)
            assert line[3].startswith("**") == (abs(gap) > half)

# -----------------------------------------------------------------------------
# compare.py

TINY = ("--n_layer 1 --n_embd 16 --n_head 2 --block_size 16 --batch_size 2 --max_iters 6 "
        "--log_interval 2 --eval_windows 8 --device cpu --jobs 9").split()

class InProcess:
    """In place of subprocess.Popen: runs train.py here, which saves starting Python."""

    def __init__(self, command, stdout, **options):
        self.returncode = 0
        with redirect_stdout(stdout):
            try:
                train.main(command[2:])
            except UserError as error:
                print(error)
                self.returncode = 1

    def poll(self):
        return self.returncode

@pytest.fixture
def out(tmp_path, monkeypatch):
    monkeypatch.setattr(compare.subprocess, "Popen", InProcess)
    return tmp_path / "out"

@pytest.fixture
def tiny(out, data):
    """Flags of tiny runs in an empty folder"""
    return [*TINY, "--data", str(data), "--out", str(out)]

def test_from_a_command_to_the_table(tiny, out, capsys):
    command = ["x0", "pre --mod random:rate=0.25", "pre", "--seeds", "2,3",
               "--residual_lr", "0.001,0.3", *tiny]
    compare.main(command)
    runs, rows = read(out / "runs.csv"), read(out / "table.csv")
    assert len(runs) == 2 + 3 * 2   # x0 has own_params, pre hasn't
    tried = {run["residual_lr"]: float(run["bpb"]) for run in runs if run["seed"] == "1"}
    assert min(tried, key=tried.get) == rows[0]["residual_lr"]
    bits = {rule: [float(run["bpb"]) for run in sorted(runs, key=lambda run: run["seed"])
                   if run["rule"] == rule and run["seed"] != "1"] for rule in ("x0", "pre")}
    gaps = [x0 - pre for x0, pre in zip(bits["x0"], bits["pre"])]
    assert float(rows[0]["gap"]) == pytest.approx(mean(gaps), abs=1e-4)
    half = 12.706 * stdev(gaps) / 2 ** 0.5
    assert float(rows[0]["half_interval"]) == pytest.approx(half, abs=1e-4)
    assert float(rows[1]["skip_rate"]) > 0.1 and float(rows[2]["skip_rate"]) == 0
    assert not list(out.glob("runs/*/ckpt.pt")) and (out / "gaps.png").stat().st_size > 5000
    printed = capsys.readouterr().out
    assert "8 runs to train, 9 at a time" in printed
    assert (out / "table.md").read_text() in printed
    compare.main(command)   # nothing is missing
    assert "0 runs to train" in capsys.readouterr().out

def test_equal_flops_and_a_training_that_diverges(tiny, out):
    diverges = "pre --lr 1000 --optimizer sgd --grad_clip 0 --init gpt2"
    compare.main(["gated", diverges, "pre", "--seeds", "2", "--equal", "flops", *tiny,
                  "--max_iters", "20"])
    gated, diverged, _ = read(out / "table.csv")
    flops = {run["rule"]: float(run["flops"]) for run in read(out / "runs.csv")}
    iters = {run["rule"]: int(run["iters"]) for run in read(out / "runs.csv")}
    assert flops["gated"] == pytest.approx(flops["pre"], rel=0.06)
    assert iters["gated"] < iters["pre"] == 20
    assert diverged["mean"] == "inf" and "| diverged |  |" in (out / "table.md").read_text()
    assert math.isfinite(float(gated["gap"])) and gated["half_interval"] == "nan"

def test_the_puzzle_is_compared_by_steps_learned(tiny, out, steps_data):
    compare.main(["post", "pre", *tiny, "--data", str(steps_data), "--seeds", "2,3"])
    assert {row["measure"] for row in read(out / "table.csv")} == {"steps learned"}
    assert "| steps learned |" in (out / "table.md").read_text()

@pytest.mark.parametrize("words, message", [
    ("pre", "two different rules"), ("nope pre", "nope"), ("x0 pre --nope 3", "nope"),
    ("x0 pre --lr 0.01,0.02 --seeds 1,2", "seed 1"), ("x0 pre --seed 3", "--seed")])
def test_mistakes(words, message, tiny, out):
    rules, dashes, flags = words.partition(" --")
    argv = [*rules.split(), *tiny, *(dashes + flags).split()]
    assert message in refused(compare.main, argv) and not out.exists()

def test_ctrl_c_and_the_same_command(tiny, out, monkeypatch):
    """All trainings that run get the signal (they save), and the same command continues there."""
    command, signals = ["x0", "pre", "--seeds", "2", *tiny], []

    class Running(InProcess):
        def poll(self):   # Ctrl-C comes meanwhile
            raise KeyboardInterrupt

        def send_signal(self, number):
            signals.append(number)

        def wait(self):
            pass

    with monkeypatch.context() as patch:
        patch.setattr(compare.subprocess, "Popen", Running)
        with pytest.raises(KeyboardInterrupt):
            compare.main(command)
    assert signals == 2 * [signal.SIGINT] and not list(out.glob("runs/*/result.json"))
    compare.main(command)
    assert len(list(out.glob("runs/*/result.json"))) == 2
    for path in out.glob("runs/*/metrics.jsonl"):   # trained once
        lines = [json.loads(line) for line in open(path)]
        assert [line["step"] for line in lines if "val_bpb" in line] == [0, 6]

# -----------------------------------------------------------------------------
# speed.py

A_NANOGPT = """
from types import SimpleNamespace as GPTConfig
import torch, torch.nn as nn
class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size)
    def configure_optimizers(self, weight_decay, lr, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr, betas, weight_decay=weight_decay)
    def forward(self, x, y):
        logits = self.head(self.wte(x))
        return logits, nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1))
"""
RATIO = r"\d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\)"

@pytest.fixture
def measure(data, tmp_path, capsys):
    """speed.main(words) with tiny models -> what it prints"""
    (tmp_path / "nano.py").write_text(A_NANOGPT)
    def run(*words):
        speed.main([
            "--data", str(data), "--nanogpt", str(tmp_path / "nano.py"), "--rounds", "2",
            "--n_layer", "1", "--n_head", "2", "--n_embd", "16", "--block_size", "64",
            "--batch_size", "2", *words])
        return capsys.readouterr().out
    return run

def test_speed_of_rules(measure):
    printed = measure("--only", "rules", "--grad_accum", "2")
    rows = re.findall(rf"\| ([\w:=]+) \| [\d,]+ \| ({RATIO}) \| ({RATIO}) \|\n", printed)
    assert [name for name, _, _ in rows] == [*speed.RULES, "nanoGPT"]
    assert rows[0][1] == rows[-1][2] == "1.00 (1.00 to 1.00)"

def test_speed_of_skipping(measure):
    assert len(re.findall(rf": {RATIO} times as fast", measure("--only", "skipping"))) == 6

def test_a_ratio():
    assert speed.ratio([2.0, 2, 2, 2], [4.0, 6, 10, 8]) == "3.50 (2.25 to 4.75)"

def test_bits_at_equal_seconds(measure):
    printed = measure("--seconds", "0.05", "--eval_windows", "8")
    means = dict(re.findall(r"^(ours|nanoGPT, lr \S+): (\d\.\d{3}) \(", printed, re.M))
    assert len(means) == 4 and all(1 < float(bits) < 9 for bits in means.values())
