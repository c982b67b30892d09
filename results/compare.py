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
import shutil
import signal
import statistics
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import prepare
from flags import UserError, make, parse, run
from model import GPT, GPTConfig, flops_per_token, num_params
from train import DEFAULT_LR, TrainConfig, load_settings

CHOOSING_SEED = 1
# An evaluation at the start and one at the end, of more windows than train.py's usual ones
EVALUATION = ["--eval_windows", "512", "--eval_interval", "1000000000"]
# The gap of a rule to PreNorm differs from seed to seed: median standard deviation in runs.csv
TYPICAL_STD = 0.016
# Half of a 95 % interval of a mean is T95[n - 1] * standard deviation / sqrt(n)
T95 = [math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201,
       2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093]

# -----------------------------------------------------------------------------
# rules and runs

@dataclass
class Rule:
    name: str             # as typed, such as "nag --mod gate:rate=0.25"
    flags: list           # of train.py: all but learning rates, seed and folder
    rates: list           # pairs (lr, residual_lr) to choose from; residual_lr None: has no use
    n_params: int
    tokens_per_iter: int
    flops: float          # of the whole training, if no token skips
    on_cpu: bool
    seconds: float = 0.0  # expected for a run
    best: tuple = None    # the chosen one of rates

class Run:

    def __init__(self, rule, rates, seed, out):
        self.rule, self.rates, self.seed = rule, rates, seed
        lr, residual_lr = rates
        self.flags = [*rule.flags, "--seed", str(seed), "--lr", f"{lr:g}"]
        if residual_lr is not None:
            self.flags += ["--residual_lr", f"{residual_lr:g}"]
        # other flags, other folder: a result is never taken for that of another command
        command = shlex.join(self.flags)
        name = re.sub(r"[^\w.]+", "-", f"{rule.name} {lr:g} {residual_lr or ''} {seed}")
        self.folder = out / "runs" / f"{name}-{zlib.crc32(command.encode()):08x}"
        self.process = None

    def result(self):
        """-> None before the run has finished"""
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def metrics(self):
        """-> the lines of metrics.jsonl"""
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.open()] if path.exists() else []

    def start(self):
        resume = (self.folder / "ckpt.pt").exists()
        if not resume:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
        command = [sys.executable, str(ROOT / "train.py"), *self.flags, "--out", str(self.folder)]
        threads = dict(OMP_NUM_THREADS="1") if self.rule.on_cpu else {}
        with open(self.folder / "log.txt", "a") as log:
            self.process = subprocess.Popen(   # a new session: Ctrl-C comes to this process only
                command + ["--resume"] * resume, env=os.environ | threads,
                stdout=log, stderr=log, start_new_session=True)
        self.began = time.time()

    def is_running(self):
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if pid == 0:
            return True
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.memory = usage.ru_maxrss / (2 ** 10 if sys.platform == "linux" else 2 ** 20)   # MiB
        return False

    def finish(self):
        """Writes result.json, and deletes the checkpoint. A training that diverged has a loss of
        inf; any other error ends the comparison."""
        metrics, log = self.metrics(), (self.folder / "log.txt").read_text()
        evaluations = [line for line in metrics if "val_bpb" in line]
        error = log.strip().split("\n")[-1]
        if self.process.returncode and (not metrics or "loss" not in error):
            raise UserError(f"{self.rule.name}: {error} (all of it: {self.folder}/log.txt)")
        last = evaluations[-1]
        if self.process.returncode or not math.isfinite(last["val_bpb"]):
            last = dict(metrics[-1], val_bpb=math.inf, val_loss=math.inf)
        result = dict(bpb=last["val_bpb"], steps_learned=last.get("val_steps"), iters=last["step"],
                      flops=last["flops"], seconds=last["seconds"], memory=round(self.memory),
                      skip_rate=last.get("val_skip_rate", 0.0), wall=time.time() - self.began)
        (self.folder / "result.json").write_text(json.dumps(result))
        (self.folder / "ckpt.pt").unlink(missing_ok=True)

def make_rule(name, args, shared):
    flags = [*EVALUATION, *shared, "--residual", *shlex.split(name)]
    typed = parse([GPTConfig, TrainConfig], flags)
    settings = (load_settings(typed["config"]) if "config" in typed else {}) | typed
    model_config, config = make(GPTConfig, settings), make(TrainConfig, settings)
    vocab_size = prepare.load_meta(config.data)["vocab_size"]
    model_config.vocab_size = 64 * math.ceil(vocab_size / 64)
    model = GPT(model_config)
    tokens_per_iter = config.batch_size * model_config.block_size
    flops = config.max_flops or 3 * flops_per_token(model) * tokens_per_iter * config.max_iters

    has_own_params = any(residual.own_params for residual in [*model.residuals(), model.final])
    default_lr = config.lr or DEFAULT_LR[config.optimizer]
    lrs = [config.lr] if "--lr" in name else args.lr or [default_lr]
    residual_lrs = [None]
    if has_own_params:
        one = "--residual_lr" in name or not args.residual_lr
        residual_lrs = [config.residual_lr] if one else args.residual_lr
    rates = [(lr, residual_lr) for lr in lrs for residual_lr in residual_lrs]
    rule = Rule(name, flags, rates, num_params(model), tokens_per_iter, flops,
                on_cpu(config))
    rule.seconds = expected_seconds(model, model_config, config)
    return rule

def expected_seconds(model, model_config, config):
    """Of a run, from the time of a forward and backward pass"""
    model.to("cpu" if on_cpu(config) else "cuda")
    shape = 2, config.batch_size // config.grad_accum, model_config.block_size
    x, y = torch.randint(model_config.vocab_size, shape, device=model.rotary.device)
    for _ in range(2):   # the first pass is slower
        begin = time.perf_counter()
        model(x, y)[1].backward()
        x[0, 0].item()   # waits for a GPU
        seconds = (time.perf_counter() - begin) * config.grad_accum
    evaluations = 2 * config.eval_windows / config.batch_size / 3   # a forward pass is a third
    return seconds * (1.15 * config.max_iters + evaluations)   # the optimizer takes some 15 %

def on_cpu(config):
    return config.device == "cpu" or not torch.cuda.is_available()

# -----------------------------------------------------------------------------
# training

def train_all(runs, jobs, after_each):
    """Trains those of runs that have no result, `jobs` at a time. after_each(running) is called
    with those that train now: again and again, and when one has finished."""
    waiting, running = [run for run in runs if run.result() is None], []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(waiting.pop(0))
                running[-1].start()
            for run in [run for run in running if not run.is_running()]:
                running.remove(run)
                run.finish()
                after_each(running, run)
            after_each(running)
            time.sleep(0.3)
    finally:   # Ctrl-C, or an error: the others save their checkpoints
        for run in running:
            run.process.send_signal(signal.SIGINT)
        for run in running:
            run.process.wait()

def show_progress(planned, jobs, running, finished=None):
    results = [(run, run.result()) for run in planned]
    done = [(run, result) for run, result in results if result]
    pace = sum(result["wall"] for _, result in done) / sum(run.rule.seconds for run, _ in done) \
        if done else 1.0
    left = sum(run.rule.seconds for run, result in results if not result) * pace / jobs
    percent = []
    for run in running:
        logged = run.metrics()
        share = logged[-1]["flops"] / run.rule.flops if logged else 0.0
        left -= share * run.rule.seconds * pace / jobs
        percent.append(f"{run.rule.name} {share:.0%}")
    line = f"{len(done)} of {len(planned)} runs, {in_words(left)} left"
    if finished is not None:
        print(f"\r\033[K{line}; {finished.rule.name}, seed {finished.seed}, lr "
              f"{finished.rates[0]:g}: {finished.result()['bpb']:.4f} bits per byte", flush=True)
    elif sys.stdout.isatty():
        print(f"\r\033[K{line}: {', '.join(percent)}"[:100], end="", flush=True)

def in_words(seconds):
    minutes = max(0, seconds) / 60
    return f"{minutes:.0f} minutes" if minutes < 100 else f"{minutes / 60:.1f} hours"

# -----------------------------------------------------------------------------
# table

def half_interval(values):
    """Half of the 95 % interval of their mean"""
    if len(values) < 2:
        return math.inf
    return T95[min(len(values), 20) - 1] * statistics.stdev(values) / math.sqrt(len(values))

def summarize(rules, deciding):
    """-> a dict per rule. Gaps are paired by seed: the same initial weights and batches."""
    found = {rule.name: {run.seed: run.result() for run in deciding
                         if run.rule is rule and run.result()} for rule in rules}
    on_puzzle = all(result["steps_learned"] is not None
                    for results in found.values() for result in results.values())
    measure = "steps_learned" if on_puzzle else "bpb"
    baseline, rows = found[rules[-1].name], []
    for rule in rules:
        results = found[rule.name]
        if not results:
            continue
        mean = lambda key: statistics.mean(result[key] for result in results.values())
        row = dict(rule=rule.name, lr=f"{rule.best[0]:g}",
                   residual_lr="" if rule.best[1] is None else f"{rule.best[1]:g}",
                   seeds=len(results), bpb=f"{mean('bpb'):.4f}",
                   steps_learned=f"{mean('steps_learned'):.2f}" if on_puzzle else "",
                   gap="", low="", high="", could_find="", params=rule.n_params,
                   skip_rate=f"{mean('skip_rate'):.3f}",
                   tokens_per_s=round(statistics.median(
                       result["iters"] * rule.tokens_per_iter / max(1e-9, result["seconds"])
                       for result in results.values())),
                   memory=round(mean("memory")), minutes=f"{mean('seconds') / 60:.1f}")
        gaps = [results[seed][measure] - baseline[seed][measure]
                for seed in results if seed in baseline]
        if rule is not rules[-1] and gaps and all(map(math.isfinite, gaps)):
            gap, half = statistics.mean(gaps), half_interval(gaps)
            row |= dict(gap=f"{gap:.4f}", low=f"{gap - half:.4f}", high=f"{gap + half:.4f}",
                        could_find=f"{half:.4f}")
        rows.append(row)
    return rows

def table_md(rows):
    """Table of markdown. Bold: the interval does not contain 0."""
    on_puzzle = bool(rows and rows[0]["steps_learned"])
    value = "steps learned" if on_puzzle else "bits per byte"
    head = ["`--residual`", "lr, residual_lr", value, f"minus `{rows[-1]['rule']}`",
            "seeds can find", "weights", "tokens/s", "MiB", "minutes"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        gap = ""
        if row["gap"]:
            mean, low, high = (float(row[name]) for name in ("gap", "low", "high"))
            gap = f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"
            if low > 0 or high < 0:
                gap = f"**{gap}**"
        number = row["steps_learned"] if on_puzzle else f"{float(row['bpb']):.3f}"
        lines.append([
            f"`{row['rule']}`", ", ".join(filter(None, [row["lr"], row["residual_lr"]])),
            "diverged" if number == "inf" else number, gap,
            f"{float(row['could_find']):.3f}" if row["could_find"] else "",
            f"{row['params'] / 1e6:.2f}M", f"{row['tokens_per_s']:,}", f"{row['memory']:,}",
            row["minutes"]])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)

def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)

def write_tables(rules, runs, deciding, out):
    done = [(run, run.result()) for run in runs if run.result()]
    if done:
        write_csv(out / "runs.csv", [
            dict(rule=run.rule.name, seed=run.seed, lr=run.rates[0], residual_lr=run.rates[1] or "")
            | result | dict(flags=shlex.join(run.flags)) for run, result in done])
    rows = summarize(rules, deciding)
    if rows:
        write_csv(out / "table.csv", rows)
        (out / "table.md").write_text(table_md(rows))
    return rows

def draw_gaps(rows, baseline, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    shown = [row for row in rows if row["gap"]]
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.3 * len(shown)), layout="constrained")
    for row in sorted(shown, key=lambda row: -float(row["gap"])):
        half = float(row["could_find"])
        is_sure = float(row["low"]) > 0 or float(row["high"]) < 0
        axes.errorbar(float(row["gap"]), row["rule"], xerr=half if math.isfinite(half) else None,
                      fmt="o", capsize=3, color="C0" if is_sure else "0.6")
    axes.axvline(0, color="0.3", linewidth=0.8)
    value = "steps learned" if rows[0]["steps_learned"] else "bits per byte"
    axes.set(xlabel=f"{value} minus those of {baseline}; 95 % intervals, gray if they contain 0")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)

def insert_table(name, table):
    """Puts a table into results/README.md, between <!-- NAME --> and <!-- end of NAME -->."""
    page = ROOT / "results/README.md"
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    head, found, rest = page.read_text().partition(begin)
    if not found or end not in rest:
        raise UserError(f"--insert {name}: results/README.md lacks {begin.strip()} or {end}")
    page.write_text(head + begin + table + end + rest.partition(end)[2])

# -----------------------------------------------------------------------------
# main

def choose_rates(rules, choosing):
    """Sets rule.best, where all its learning rates have been tried."""
    for rule in rules:
        tried = {run.rates: run.result() for run in choosing if run.rule is rule}
        if len(rule.rates) == 1:
            rule.best = rule.rates[0]
        elif all(tried.values()):
            rule.best = min(tried, key=lambda rates: tried[rates]["bpb"])

def numbers(kind):
    return lambda text: [kind(word) for word in text.split(",")]

def read_command(argv):
    """-> names of rules, our own flags, the list of train.py's"""
    argv = sys.argv[1:] if argv is None else argv
    n_rules = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    parser = argparse.ArgumentParser(
        usage="compare.py RULE... BASELINE [flags] [flags of train.py]", description=__doc__,
        allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seeds", type=numbers(int), default=[2, 3, 4], help="seeds that decide (default: 2,3,4)")
    add("--lr", type=numbers(float), help="learning rates to choose from, such as 0.01,0.02")
    add("--residual_lr", type=numbers(float), help="the same for own_params")
    add("--equal", choices=["tokens", "flops"], default="tokens",
        help="flops: every rule trains for the baseline's FLOPs, not for max_iters")
    add("--out", default="runs/compare", help="folder of tables and runs (default: runs/compare)")
    add("--jobs", type=int, default=0, help="runs at a time (default: one per core, or per GPU)")
    add("--insert", default="", help="a marker in results/README.md, where the table goes")

    def error(message):
        raise UserError(f"{message}; --help lists all flags")
    parser.error = error
    args, shared = parser.parse_known_args(argv[n_rules:])
    names = argv[:n_rules]
    if len(set(names)) < max(2, len(names)):
        parser.error("name two different rules at least; the last one is the baseline")
    for name in {"residual", "seed", "resume"} & parse([GPTConfig, TrainConfig], shared).keys():
        parser.error(f"--{name}: compare.py sets it")
    return names, args, shared

def main(argv=None):
    names, args, shared = read_command(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)   # a kill is like Ctrl-C
    torch.set_num_threads(1)
    rules = [make_rule(name, args, shared) for name in names]
    baseline = rules[-1]
    if args.equal == "flops":
        budget = baseline.flops
        for rule in rules:
            rule.seconds *= budget / rule.flops
            rule.flops = budget * (1 - 1e-9)   # rounding: no iteration more
            rule.flags += ["--max_flops", repr(rule.flops)]
    if CHOOSING_SEED in args.seeds and any(len(rule.rates) > 1 for rule in rules):
        raise UserError(f"--seeds: seed {CHOOSING_SEED} chooses learning rates; others must decide")
    out, n = Path(args.out), len(args.seeds)
    out.mkdir(parents=True, exist_ok=True)
    jobs = args.jobs or (len(os.sched_getaffinity(0)) if baseline.on_cpu else 1)

    choosing = [Run(rule, rates, CHOOSING_SEED, out)
                for rule in rules if len(rule.rates) > 1 for rates in rule.rates]

    def deciding():   # a seed of all rules before the next seed: the table grows evenly
        return [Run(rule, rule.best or rule.rates[0], seed, out)
                for seed in args.seeds for rule in rules]

    def after_each(running, finished=None):
        if finished is not None:
            known = [run for run in deciding() if run.rule.best]
            write_tables(rules, choosing + deciding(), known, out)
        show_progress(choosing + deciding(), jobs, running, finished)

    choose_rates(rules, choosing)   # of an earlier call
    missing = [run for run in choosing + deciding() if run.result() is None]
    seconds = sum(run.rule.seconds for run in missing) / jobs
    print(f"{len(missing)} runs to train, {jobs} at a time: about {in_words(seconds)}")
    if n > 1:
        can_find = {k: T95[k - 1] * TYPICAL_STD / math.sqrt(k) for k in (min(n, 20), 5, 10)}
        halves = [f"{half:.3f} with {k} seeds" for k, half in sorted(can_find.items())]
        print(f"What {n} seeds can find: gaps usually differ by {TYPICAL_STD} bits per byte from "
              f"seed to seed.\nThe 95 % interval is then +- {', '.join(halves)}.")
    else:
        print("One seed decides: no intervals.")

    train_all(choosing, jobs, after_each)
    choose_rates(rules, choosing)
    train_all(deciding(), jobs, after_each)

    rows = write_tables(rules, choosing + deciding(), deciding(), out)
    draw_gaps(rows, baseline.name, out / "gaps.png")
    table = table_md(rows)
    if args.insert:
        insert_table(args.insert, table)
    print(f"\n{table}\nBold: the 95 % interval (paired by seed) does not contain 0. By chance, one "
          f"of twenty\nequal rules is bold. All of it: {out}/table.csv, runs.csv and gaps.png")

if __name__ == "__main__":
    run(main)
