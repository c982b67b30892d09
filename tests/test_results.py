"""results/: every number of the page from runs.csv and table.csv, by code that shares nothing with
compare.py; compare.py from a command to its table; speed.py."""
import csv, json, math, re, signal, subprocess, sys, time
from collections import defaultdict
from functools import cache
from statistics import mean, median, stdev

import numpy as np
import pytest
from conftest import ROOT, refused

sys.path.append(str(ROOT / "results"))
import compare, speed

PAGE = (ROOT / "results/README.md").read_text()

def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))

RUNS = [row for row in read(ROOT / "results/runs.csv") if row["seed"] != "1"]

@cache
def t95(n):
    """The 97.5 % quantile of Student's t of n values, by adding up its density"""
    freedom = n - 1
    t = np.linspace(0, 400, 4_000_001)
    density = (1 + t ** 2 / freedom) ** (-(freedom + 1) / 2)
    factor = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    return t[np.searchsorted(np.cumsum(density) * factor * 1e-4, 0.475)]

def of_seeds(variant, column="bits"):
    return {row["seed"]: float(row[column]) for row in RUNS if row["variant"] == variant and row[column]}

def gap_in_words(a, b):
    a, b = of_seeds(a), of_seeds(b)
    gaps = [a[seed] - b[seed] for seed in a if seed in b]
    half = t95(len(gaps)) * stdev(gaps) / len(gaps) ** 0.5
    return f"{mean(gaps):+.3f} ({mean(gaps) - half:+.3f} to {mean(gaps) + half:+.3f})"

# -------------------------------------------------------------------------------------------------- the page

INIT = ["adamw, gpt2", "adamw, width", "muon, gpt2", "muon, width"]
GAPS = [("text: NAG", "text: PreNorm"), ("text: Block Attention Residuals", "text: PreNorm"),
        ("text: Review Residuals", "text: PreNorm"), ("field: Gated Residual", "field: PreNorm"),
        ("field: mHC", "field: PreNorm"), ("field: linear taper", "field: PreNorm"),
        ("quarter: 24 blocks that skip", "quarter: 24 blocks"), ("quarter: 24 blocks that skip", "quarter: 18 blocks"),
        ("FLOPs: Block Attention Residuals", "FLOPs: PreNorm, 1.06 times as long"),
        ("cliff: convex, 24 blocks", "cliff: review, 24 blocks"),
        ("768 wide: NAG", "768 wide: PreNorm"), ("768 wide, our init: NAG", "768 wide, our init: PreNorm"),
        *[(f"{each}: NAG", f"{each}: PreNorm") for each in INIT],
        *[(f"{each}: PreNorm", f"{INIT[0]}: PreNorm") for each in INIT[1:]]]

@pytest.mark.parametrize("a, b", GAPS)
def test_gaps_of_the_page(a, b):
    assert gap_in_words(a, b) in PAGE

def test_the_page_has_no_other_gaps():
    """but those marked as measured per block, whose rows say so"""
    ours = PAGE.partition("## What others measured")[0]
    ours = re.sub(r"(?s)<!-- (\w+) -->.*?<!-- end of \1 -->", "", ours)   # the table has its own test
    lines = [line for line in ours.split("\n") if not line.endswith("|") or "†" not in line]
    found = re.findall(r"[+-]\d\.\d{3} \([+-]\d\.\d{3} to [+-]\d\.\d{3}\)", "\n".join(lines))
    known = {gap_in_words(a, b) for a, b in GAPS}
    assert len(found) >= len(GAPS) and {*found} <= known

def test_what_seeds_can_find():
    by_variant = defaultdict(dict)
    for row in RUNS:
        if row["experiment"] in ("text", "field"):
            by_variant[row["variant"]][row["seed"]] = float(row["bits"])
    stds = [stdev(mine[seed] - by_variant[variant.split(":")[0] + ": PreNorm"][seed] for seed in mine)
            for variant, mine in by_variant.items() if "PreNorm" not in variant and "convex" not in variant]
    std = round(median(stds), 3)
    assert len(stds) >= 12 and std == compare.TYPICAL_STD
    words = " ".join(PAGE.split())
    assert f"from seed to seed by {std} bits" in words
    three, five, ten = (t95(n) * std / n ** 0.5 for n in (3, 5, 10))
    assert f"± {three:.3f} with three seeds, ± {five:.3f} with five and ± {ten:.3f} with ten" in words

def test_steps_of_claim_3():
    steps = {way: mean(of_seeds(f"NAG that pays late, {way}", "steps").values())
             for way in ("all run", "below 0.05", "below 0.2")}
    skipped = {way: mean(of_seeds(f"NAG that pays late, {way}", "skipped").values()) for way in steps}
    assert (f"{steps['all run']:.2f} with all sublayers, {steps['below 0.05']:.2f} with {skipped['below 0.05']:.0%} "
            f"skipped, {steps['below 0.2']:.2f} with {skipped['below 0.2']:.0%}").replace("%", " %") in PAGE

@pytest.mark.parametrize("name", ["table", "adamw"])
def test_the_table(name):
    """Means and intervals of NAME.csv from the single runs, and the page's lines from both"""
    table = ROOT / f"results/{name}.csv"
    if not table.exists():
        assert re.search(rf"<!-- {name} -->\nNot measured yet.*\n<!-- end", PAGE)
        return
    runs, rows = read(ROOT / f"results/{name}_runs.csv"), read(table)
    lines = re.search(rf"(?s)<!-- {name} -->\n(.*?)<!-- end", PAGE)[1].strip().split("\n")[2:]
    assert len(rows) == len(lines)

    def decided(row):
        return {run["seed"]: run for run in runs if run["seed"] != "1" and run["rule"] == row["rule"]
                and run["lr"] == row["lr"] and run["residual_lr"] == row["residual_lr"]}

    baseline = {seed: float(run["bpb"]) for seed, run in decided(rows[-1]).items()}
    for row, line in zip(rows, lines):
        mine = {seed: float(run["bpb"]) for seed, run in decided(row).items()}
        assert len(mine) == int(row["seeds"]) and abs(mean(mine.values()) - float(row["bpb"])) < 1e-4
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[0] == f"`{row['rule']}`" and cells[2] in (f"{mean(mine.values()):.3f}", "diverged")
        tried = [run for run in runs if run["seed"] == "1" and run["rule"] == row["rule"]]
        if tried:   # seed 1 has chosen the rates
            best = min(tried, key=lambda run: float(run["bpb"]))
            assert (best["lr"], best["residual_lr"]) == (row["lr"], row["residual_lr"])
        if row["gap"]:
            gaps = [mine[seed] - baseline[seed] for seed in mine if seed in baseline]
            half = t95(len(gaps)) * stdev(gaps) / len(gaps) ** 0.5
            assert abs(mean(gaps) - float(row["gap"])) < 1e-4 and abs(half - float(row["could_find"])) < 1e-4
            assert cells[3].strip("*").startswith(f"{float(row['gap']):+.3f} (")
            assert cells[3].startswith("**") == (abs(float(row["gap"])) > float(row["could_find"]))

# -------------------------------------------------------------------------------------------------- compare.py

TINY = ("--n_layer 1 --n_embd 16 --n_head 2 --block_size 16 --batch_size 2 --max_iters 6 --log_interval 2 "
        "--eval_windows 8 --device cpu --jobs 2").split()

@pytest.fixture
def here(tmp_path, data):
    """Flags of tiny runs in an empty folder"""
    return [*TINY, "--data", str(data), "--out", str(tmp_path / "out")], tmp_path / "out"

def test_from_a_command_to_the_table(here, capsys):
    flags, out = here
    command = ["x0", "pre --mod random:rate=0.25", "pre", "--seeds", "2,3",
               "--residual_lr", "0.001,0.3", *flags]
    compare.main(command)
    runs, rows = read(out / "runs.csv"), read(out / "table.csv")
    assert len(runs) == 2 + 3 * 2   # x0 has own_params, pre hasn't
    tried = {run["residual_lr"]: float(run["bpb"]) for run in runs if run["seed"] == "1"}
    assert min(tried, key=tried.get) == rows[0]["residual_lr"] and [row["seeds"] for row in rows] == ["2"] * 3
    by_seed = {row["rule"]: {run["seed"]: float(run["bpb"]) for run in runs if run["rule"] == row["rule"]
                             and run["seed"] != "1"} for row in rows}
    gaps = [by_seed["x0"][seed] - by_seed["pre"][seed] for seed in "23"]
    assert float(rows[0]["gap"]) == pytest.approx(mean(gaps), abs=1e-4)
    assert float(rows[0]["high"]) - float(rows[0]["gap"]) == pytest.approx(t95(2) * stdev(gaps) / 2 ** 0.5, abs=2e-3)
    assert float(rows[1]["skip_rate"]) > 0.1 and float(rows[2]["skip_rate"]) == 0
    assert not list(out.glob("runs/*/ckpt.pt")) and (out / "gaps.png").stat().st_size > 5000
    said = capsys.readouterr().out
    assert "8 runs to train, 2 at a time" in said and (out / "table.md").read_text() in said
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*")}
    compare.main(command)   # nothing is missing
    assert "0 runs to train" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*")}

def test_equal_flops_and_a_training_that_diverges(here):
    flags, out = here
    compare.main(["gated", "pre --lr 1000 --optimizer sgd --grad_clip 0 --init gpt2", "pre", "--seeds", "2", "--equal", "flops", *flags,
                  "--max_iters", "20"])
    gated, diverged, pre = read(out / "table.csv")
    flops = {run["rule"]: float(run["flops"]) for run in read(out / "runs.csv")}
    iters = {run["rule"]: int(run["iters"]) for run in read(out / "runs.csv")}
    assert flops["gated"] == pytest.approx(flops["pre"], rel=0.06) and iters["gated"] < iters["pre"] == 20
    assert diverged["bpb"] == "inf" and not diverged["gap"] and gated["gap"] and "diverged" in (out / "table.md").read_text()

@pytest.mark.parametrize("words, message", [
    ("pre", "two different rules"), ("pre pre", "two different rules"), ("nope pre", "nope"),
    ("x0 pre --lr 0.01,0.02 --seeds 1,2", "seed 1"), ("x0 pre --seed 3", "--seed"), ("x0 pre --nope 3", "nope"),
    ("x0 pre --n_head 3", "n_embd"), ("x0 pre --data nope", "nope")])
def test_mistakes(words, message, here):
    flags, out = here
    words = words.split()
    n = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    message_found = refused(compare.main, [*words[:n], *flags, *words[n:]])
    assert message in message_found and not list(out.glob("runs/*"))

def test_ctrl_c_and_the_same_command(here):
    """The process gets the signal, its trainings save, and the same command continues from there."""
    flags, out = here
    command = [sys.executable, str(ROOT / "results/compare.py"), "x0", "pre", "--seeds", "2", *flags, "--max_iters", "900"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.time() + 60
    while time.time() < deadline and not any(len(path.read_text().split("\n")) > 4 for path in out.glob("runs/*/metrics.jsonl")):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == -signal.SIGINT
    stopped = [folder for folder in out.glob("runs/*") if (folder / "ckpt.pt").exists()]
    assert stopped and not list(out.glob("runs/*/result.json"))
    assert subprocess.run(command, capture_output=True, text=True, timeout=120).returncode == 0
    for folder in stopped:
        lines = [json.loads(line) for line in open(folder / "metrics.jsonl")]
        assert [line["step"] for line in lines if "val_bpb" in line] == [0, 900]   # it didn't begin anew
        assert "--resume" in (folder / "log.txt").read_text()

# -------------------------------------------------------------------------------------------------- speed.py

A_NANOGPT = """
from dataclasses import dataclass
import torch, torch.nn as nn
@dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool
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

@pytest.fixture
def measure(data, tmp_path, capsys):
    """speed.main(words) with tiny models -> what it prints"""
    (tmp_path / "nano.py").write_text(A_NANOGPT)
    def run(*words):
        speed.main(["--data", str(data), "--nanogpt", str(tmp_path / "nano.py"), "--rounds", "3", "--n_layer", "2",
                    "--n_head", "2", "--n_embd", "16", "--block_size", "64", "--batch_size", "4", *words])
        return capsys.readouterr().out
    return run

RATIO = r"\d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\)"

def test_speed_of_rules(measure):
    said = measure("--only", "rules", "--grad_accum", "2")
    rows = re.findall(rf"\| ([\w:=]+) \| [\d,]+ \| ({RATIO}|) \| ({RATIO}|) \|\n", said)
    assert [row[0] for row in rows] == [*speed.RULES, "nanoGPT"]
    for name, to_pre, to_nanogpt in rows:
        assert bool(to_pre) == (name != "pre") and bool(to_nanogpt) == (name != "nanoGPT")

def test_a_program_that_fails_leaves_the_others(measure, monkeypatch):
    def fails(args, size, residual, **options):
        if residual == "nag":
            raise RuntimeError("out of memory")
        return our_program(args, size, residual, **options)
    our_program = speed.our_program
    monkeypatch.setattr(speed, "our_program", fails)
    said = measure("--only", "rules", "--rules", "pre", "nag")
    assert "nag fails: out of memory" in said and "| nanoGPT |" in said and "| nag |" not in said

def test_speed_of_skipping_and_taper(measure):
    assert len(re.findall(rf": {RATIO} times as fast", measure("--only", "skipping"))) == 6
    assert len(re.findall(rf": {RATIO} times as fast", measure("--only", "taper"))) == 3

def test_a_ratio():
    words = speed.ratio(dict(slow=[4.0, 6, 10, 8], fast=[2.0, 2, 2, 2]), "fast", "slow")
    assert words == "3.50 (2.25 to 4.75)"

def test_bits_at_equal_seconds(measure):
    said = measure("--seconds", "0.3")
    means = dict(re.findall(r"^(ours|nanoGPT, lr \S+): (\d\.\d{3}) \(", said, re.M))
    assert len(means) == 4 and all(1 < float(bits) < 8 for bits in means.values())

@pytest.mark.slow
def test_compiled(measure):
    said = measure("--only", "rules", "--rules", "pre", "nag", "--compile")
    assert len(re.findall(rf"\| (?:pre|nag), compiled \| [\d,]+ \| {RATIO}", said)) == 2

@pytest.mark.parametrize("words", [["--nanogpt", "nope.py"], ["--device", "cuda"], ["--only", "nope"]])
def test_mistakes_in_speed(words, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert words[-1] in refused(speed.main, words)
