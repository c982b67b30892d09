"""Compares residual connections: trains what is missing, and writes a table with intervals.

    python results/compare.py anchor pre --seeds 2,3,4 --lr 0.01,0.02 --residual_lr 0.001,0.01
    python results/compare.py "nag --mod gate:rate=0.25" nag pre --equal flops --max_iters 800

Rules are names of --residual; a rule in quotes has flags of its own. The last rule is the baseline.
All other flags are train.py's, and hold for all rules. If several learning rates are given, seed 1
chooses each rule's best ones, and the other seeds decide. (--residual_lr is tried only for rules
that have own_params.) After Ctrl-C, the same command continues.

Writes table.md, table.csv (a line per rule), runs.csv (a line per run) and gaps.png into --out.
"""

import argparse
import csv
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from statistics import mean, stdev

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import prepare
from flags import UserError, make, parse, run
from model import GPT, GPTConfig, flops_per_token, num_params
from train import DEFAULT_LR, TrainConfig, load_settings, sanity_check

CHOOSING_SEED = 1
# One evaluation before training and one at its end, on more windows than train.py's usual ones
EVALUATION = ["--eval_windows", "512", "--eval_interval", "1000000000"]
# The gap of a rule to PreNorm differs from seed to seed: median standard deviation in runs.csv
TYPICAL_STD = 0.016
# Student's t: a 95 % interval of the mean of n values is +- T95[n] * standard deviation / sqrt(n)
T95 = [math.nan, math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
       2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093]

# -----------------------------------------------------------------------------
# rules and runs

class Rule:

    def __init__(self, text, args, shared):
        self.text = text   # as typed, such as "nag --mod gate:rate=0.25"
        self.flags = [*EVALUATION, *shared, "--residual", *shlex.split(text)]
        typed = parse([GPTConfig, TrainConfig], self.flags)
        settings = (load_settings(typed["config"]) if "config" in typed else {}) | typed
        model_config, config = make(GPTConfig, settings), make(TrainConfig, settings)
        vocab_size = prepare.load_meta(config.data)["vocab_size"]
        model_config.vocab_size = 64 * math.ceil(vocab_size / 64)
        sanity_check(model_config)

        model = GPT(model_config)
        self.n_params = num_params(model)
        self.on_cpu = config.device == "cpu" or not torch.cuda.is_available()
        self.tokens_per_iter = config.batch_size * model_config.block_size
        flops_per_iter = 3 * flops_per_token(model) * self.tokens_per_iter   # if no token skips
        self.flops = config.max_flops or flops_per_iter * config.max_iters
        n_iters = self.flops / flops_per_iter
        self.seconds = 10 + n_iters * seconds_per_iter(model, config, self.on_cpu)

        has_own_params = any(r.own_params for r in [*model.residuals(), model.final])
        lrs, residual_lrs = [config.lr or DEFAULT_LR[config.optimizer]], [None]
        if args.lr and "--lr" not in text:
            lrs = args.lr
        if has_own_params:
            residual_lrs = [config.residual_lr]
        if has_own_params and args.residual_lr and "--residual_lr" not in text:
            residual_lrs = args.residual_lr
        self.rates = [(lr, residual_lr) for lr in lrs for residual_lr in residual_lrs]
        self.best = self.rates[0]   # if there are several, seed 1 chooses

def seconds_per_iter(model, config, on_cpu):
    """An estimate, from a forward and backward pass"""
    model.to("cpu" if on_cpu else "cuda")
    shape = 2, config.batch_size // config.grad_accum, model.config.block_size
    x, y = torch.randint(model.config.vocab_size, shape, device=model.rotary.device)
    for _ in range(2):   # the first pass is slower
        begin = time.perf_counter()
        model(x, y)[1].backward()
        x[0, 0].item()   # waits for a GPU
    seconds = time.perf_counter() - begin
    return 1.2 * config.grad_accum * seconds   # optimizer and evaluation add some 20 %

class Run:

    def __init__(self, rule, rates, seed, out):
        self.rule, self.rates, self.seed = rule, rates, seed
        lr, residual_lr = rates
        own = ["--seed", str(seed), "--lr", f"{lr:g}"]
        if residual_lr is not None:
            own += ["--residual_lr", f"{residual_lr:g}"]
        self.label = " ".join([rule.text, *own])
        self.flags = [*rule.flags, *own]
        # other flags, other folder: a result is never taken for that of another command
        command = shlex.join(self.flags)
        name = re.sub(r"[^\w.]+", "-", f"{rule.text} {lr:g} {residual_lr or ''} {seed}")
        self.folder = out / "runs" / f"{name}-{zlib.crc32(command.encode()):08x}"

    def result(self):
        """-> None before the run has finished"""
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def start(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(ROOT / "train.py"), *self.flags]
        threads = dict(OMP_NUM_THREADS="1") if self.rule.on_cpu else {}
        with open(self.folder / "log.txt", "a") as log:
            self.process = subprocess.Popen(   # a new session: Ctrl-C comes to compare.py only
                [*command, "--out", str(self.folder), "--resume"], env=os.environ | threads,
                stdout=log, stderr=log, start_new_session=True)

    def finish(self):
        """Writes result.json, and deletes the checkpoint. A training that diverged has a loss of
        inf; any other error ends the comparison."""
        log = (self.folder / "log.txt").read_text().strip()
        error = log.split("\n")[-1] if self.process.returncode else ""
        if error and ": loss" not in error:
            raise UserError(f"{self.label}: {error} (see {self.folder}/log.txt)")
        last = json.loads((self.folder / "metrics.jsonl").read_text().strip().split("\n")[-1])
        result = dict(bpb=math.inf if error else last["val_bpb"], iters=last["step"],
                      steps_learned=last.get("val_steps"), flops=last["flops"],
                      seconds=last["seconds"], skip_rate=last.get("val_skip_rate", 0.0))
        (self.folder / "result.json").write_text(json.dumps(result))
        (self.folder / "ckpt.pt").unlink()

def train_all(runs, jobs):
    """Trains those that have no result, `jobs` at a time."""
    waiting, running = [run for run in runs if run.result() is None], []
    begin, n_done = time.time(), 0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(waiting.pop(0))
                running[-1].start()
            time.sleep(0.3)
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                run.finish()
                n_done, n_left = n_done + 1, len(waiting) + len(running)
                minutes = (time.time() - begin) / 60 / n_done * n_left
                print(f"{run.label}: {run.result()['bpb']:.4f} bits per byte; left: {n_left} runs, "
                      f"{minutes:.0f} minutes", flush=True)
    except KeyboardInterrupt:
        print("stopping; the same command continues", flush=True)
        raise
    finally:   # those that still run save their checkpoints
        for run in running:
            run.process.send_signal(signal.SIGINT)
        for run in running:
            run.process.wait()

# -----------------------------------------------------------------------------
# tables

def summarize(rules, runs):
    """-> a dict per rule. Gaps are paired by seed: the same initial weights and batches."""
    by_rule = {rule: {run.seed: run.result() for run in runs if run.rule is rule and run.result()}
               for rule in rules}
    on_puzzle = all(result["steps_learned"] is not None
                    for results in by_rule.values() for result in results.values())
    measure = "steps_learned" if on_puzzle else "bpb"
    rows, baseline = [], by_rule[rules[-1]]
    if not baseline:
        return []
    for rule, results in by_rule.items():
        if not results:
            continue
        gaps = [results[seed][measure] - baseline[seed][measure]
                for seed in results if seed in baseline]
        gap, half_interval = mean_and_half_interval(gaps)
        seconds = sum(result["seconds"] for result in results.values())
        tokens = rule.tokens_per_iter * sum(result["iters"] for result in results.values())
        rows.append(dict(
            rule=rule.text, lr=rule.best[0], residual_lr=rule.best[1], seeds=len(results),
            measure="steps learned" if on_puzzle else "bits per byte",
            mean=round(mean(result[measure] for result in results.values()), 4),
            gap=round(gap, 4), half_interval=round(half_interval, 4), params=rule.n_params,
            skip_rate=round(mean(result["skip_rate"] for result in results.values()), 3),
            tokens_per_s=round(tokens / seconds), minutes=round(seconds / len(results) / 60, 1)))
    return rows

def mean_and_half_interval(values):
    """Of 95 %. nan: too few values"""
    n = len(values)
    average = mean(values) if n > 0 else math.nan
    if n < 2 or not math.isfinite(average):
        return average, math.nan
    return average, T95[min(n, 20)] * stdev(values) / math.sqrt(n)

def is_clear(row):
    """Whether the interval of the gap does not contain 0"""
    return abs(row["gap"]) > row["half_interval"]

def table_md(rows):
    lines = [["`--residual`", "lr, residual_lr", rows[0]["measure"], f"minus `{rows[-1]['rule']}`",
              "weights", "tokens/s", "minutes"], ["---"] * 7]
    for row in rows:
        rates = [f"{rate:g}" for rate in (row["lr"], row["residual_lr"]) if rate is not None]
        gap = ""
        if row is not rows[-1] and math.isfinite(row["gap"]):
            gap = f"{row['gap']:+.3f} ± {row['half_interval']:.3f}".replace(" ± nan", "")
        if is_clear(row):
            gap = f"**{gap}**"
        lines.append([
            f"`{row['rule']}`", ", ".join(rates), f"{row['mean']:.3f}".replace("inf", "diverged"),
            gap, f"{row['params'] / 1e6:.2f}M", f"{row['tokens_per_s']:,}", str(row["minutes"])])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)

def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)

def draw_gaps(rows, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.3 * len(rows)), layout="constrained")
    for row in sorted(rows[:-1], key=lambda row: -row["gap"]):
        axes.errorbar(row["gap"], row["rule"], xerr=row["half_interval"], fmt="o", capsize=3,
                      color="C0" if is_clear(row) else "0.6")
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.set(xlabel=f"{rows[0]['measure']} minus those of {rows[-1]['rule']}; "
                    f"95 % intervals, gray if they contain 0")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)

# -----------------------------------------------------------------------------
# main

def numbers(text):
    return [float(word) for word in text.split(",")]

def integers(text):
    return [int(word) for word in text.split(",")]

def read_command(argv):
    """-> our own flags, the list of train.py's"""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("rules", nargs="+", help="values of --residual; the last one is the baseline")
    add("--seeds", type=integers, default=[2, 3, 4], help="seeds that decide (default: 2,3,4)")
    add("--lr", type=numbers, help="learning rates to choose from, such as 0.01,0.02")
    add("--residual_lr", type=numbers, help="the same for own_params")
    add("--equal", choices=["tokens", "flops"], default="tokens",
        help="flops: every rule trains for the baseline's FLOPs, not for max_iters")
    add("--out", default="runs/compare", help="folder of tables and runs (default: runs/compare)")
    add("--jobs", type=int, default=0, help="runs at a time (default: 1 per core, 4 at most)")

    def error(message):
        raise UserError(f"{message}; --help lists all flags")
    parser.error = error
    args, shared = parser.parse_known_args(argv)
    if len(set(args.rules)) < max(2, len(args.rules)):
        error("name two different rules at least; the last one is the baseline")
    if args.jobs < 0:
        error(f"--jobs {args.jobs}: must not be negative")
    for name in {"residual", "seed", "resume"} & parse([GPTConfig, TrainConfig], shared).keys():
        error(f"--{name}: compare.py sets it")
    if CHOOSING_SEED in args.seeds and max(len(args.lr or ""), len(args.residual_lr or "")) > 1:
        error(f"--seeds: seed {CHOOSING_SEED} chooses learning rates; other seeds must decide")
    return args, shared

def main(argv=None):
    args, shared = read_command(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)   # a kill is like Ctrl-C
    torch.set_num_threads(1)
    rules = [Rule(text, args, shared) for text in args.rules]
    if args.equal == "flops":
        budget = rules[-1].flops * (1 - 1e-9)   # rounding: no iteration more
        for rule in rules:
            rule.flags += ["--max_flops", repr(budget)]
            rule.seconds *= budget / rule.flops
    jobs = args.jobs or (min(4, os.cpu_count()) if rules[-1].on_cpu else 1)
    out = Path(args.out)

    choosing = [Run(rule, rates, CHOOSING_SEED, out)
                for rule in rules if len(rule.rates) > 1 for rates in rule.rates]

    def deciding():   # a seed of all rules, the baseline first, before the next seed
        return [Run(rule, rule.best, seed, out) for seed in args.seeds for rule in rules[::-1]]

    missing = [run for run in choosing + deciding() if run.result() is None]
    minutes = sum(run.rule.seconds for run in missing) / jobs / 60
    print(f"{len(missing)} runs to train, {jobs} at a time: about {math.ceil(minutes)} minutes")
    halves = [f"± {T95[min(n, 20)] * TYPICAL_STD / math.sqrt(n):.3f} with {n} seeds"
              for n in (len(args.seeds), 10) if n > 1]
    print(f"A gap usually differs from seed to seed by {TYPICAL_STD} bits per byte. Its 95 % "
          f"interval is then\n{' and '.join(halves)}.", flush=True)

    train_all(choosing, jobs)
    for rule in rules:
        tried = [run for run in choosing if run.rule is rule]
        if tried:
            rule.best = min(tried, key=lambda run: run.result()["bpb"]).rates
    runs = deciding()
    try:
        train_all(runs, jobs)
    finally:   # after Ctrl-C: a table of the runs so far
        rows = summarize(rules, runs)
        if rows:
            write_csv(out / "table.csv", rows)
            write_csv(out / "runs.csv", [
                dict(rule=run.rule.text, seed=run.seed, lr=run.rates[0], residual_lr=run.rates[1])
                | run.result() | dict(flags=shlex.join(run.flags))
                for run in choosing + runs if run.result()])
            (out / "table.md").write_text(table_md(rows))
            draw_gaps(rows, out / "gaps.png")
            print(f"\n{table_md(rows)}\n± is the 95 % interval, paired by seed; bold: it does not "
                  f"contain 0. Of twenty equal\nrules, one is bold by chance. See {out}/table.csv, "
                  f"runs.csv, gaps.png")

if __name__ == "__main__":
    run(main)
