"""
Every experiment is a row of a table. Its runs, its numbers, its verdict and its figure come from here.

    python results/run.py tokens            # train what is missing, two runs at a time; after Ctrl-C, again
    python results/run.py tokens --dry      # only print the commands that are missing, and estimated minutes
    python results/run.py all --draw        # only judge and draw what the JSON files hold

What is finished is kept in results/NAME.json, a line per run: settings, bits per byte on 1,024 validation
windows and on 32 groups of them, seconds. Run folders lie below runs/results, and are only a cache. So an
experiment that was begun on one machine goes on on another one, if its data are the same.
"""
import concurrent.futures, csv, functools, json, math, multiprocessing
import os, re, shlex, statistics, subprocess, sys, zlib
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]
import judge
import prepare
from flags import parse, refuse, say, start
from model import GPT, GPTConfig, flops_per_token, num_params
from runs import fingerprint, open_run, read_metrics, reading, write_file
from train import TrainConfig, train_batch

# ----------------------------------------------------------------------------- experiments

@dataclass(eq=False)
class Scale:
    """The size of all runs. steps: what a stage's number of steps becomes; rates: where a sweep begins;
    flops_per_second: of one run"""
    shape: str
    data: str
    vocab_size: int
    steps: dict
    rates: tuple
    flops_per_second: float
    folder: Path

SCALES = {
    # Compiled, runs are a fifth faster, and the same but for rounding. It takes a C++ compiler.
    "cpu": Scale("--n_layer 6 --n_head 4 --n_embd 64 --block_size 64 --batch_size 16 --device cpu --compile",
                 "data/stdlib", 320, {}, (6e-3, 1.2e-2), 4.7e10, HERE),
    # 12 x 512 has 89M parameters: 2,000 steps are 524M tokens, 6 per parameter.
    "gpu": Scale("--n_layer 12 --n_head 8 --n_embd 512 --block_size 512 --batch_size 512 --grad_accum 4 "
                 "--device cuda", "data/fineweb", 50304, {300: 250, 1200: 1000, 4800: 2000, 19200: 8000},
                 (1.5e-3, 3e-3), 1.5e14, HERE / "gpu"),
}

@dataclass
class Stage:
    """Variants that are trained equally long. A variant is what follows --residual on the command line.

    Seed 1 sweeps the learning rate, the other seeds have the best one, or two that are close. A sweep
    begins with the two best rates of the stage before, or the scale's, and goes on until the best is inside.
    rates: only so many of those."""
    steps: int
    variants: list
    seeds: tuple = (1, 2, 3)
    rates: int = 0

@dataclass
class Claim:
    """of is better (lower) than each of the controls `against`, by `least` or more. An entry is a variant, or
    "variant | curve | number of a point, mean or max" for a curve that was measured on it, or a number."""
    text: str
    of: str
    against: tuple
    least: float = 0.03

@dataclass
class Experiment:
    """x, y: what the figure has on its axes. line: a claim can't be tested before its control is so far below
    the table of 4-grams (order, bits). budget: all runs have as many FLOPs as this variant."""
    question: str
    stages: list
    claims: list
    x: str = "training tokens"
    y: str = "bits per byte"
    measure: str = "loss"
    line: tuple = (4, 0.0)
    budget: str = ""
    curves: tuple = ()   # of those measured on a run, which ones a figure shows; without them all

FIVE = (1, 2, 3, 4, 5)
PRE_12, NAG_12 = "pre --n_layer 12", "nag --n_layer 12"
EXPERIMENTS = {}

STARTS = ["pre", "nag", "skipinit", "nag:head=linear"]
SIZED = "pre --mlp_ratio 4.5"   # as many parameters and FLOPs as nag, whose gates have 7 %
QUICKER = "nag --gate_lr 3e-3"   # Its step sizes still grow at the end of long runs.
OTHERS = ["attnres:group=3", "review", "highway", "ngpt"]
EXPERIMENTS["tokens"] = Experiment(
    "Does a lead at the start last?",
    [Stage(300, STARTS), Stage(1200, STARTS[:2], FIVE), Stage(4800, STARTS[:2], FIVE),
     Stage(4800, [SIZED], rates=1), Stage(19200, STARTS[:2], rates=1),
     Stage(4800, [QUICKER], rates=1), Stage(19200, [QUICKER], rates=1),
     *(Stage(4800, [name], rates=1) for name in OTHERS),
     Stage(1200, STARTS[2:]), Stage(4800, STARTS[2:], rates=2), Stage(19200, STARTS[2:], (1, 2), 1),
     Stage(1200, OTHERS), Stage(300, OTHERS)],
    [Claim("NAG beats PreNorm with equal draws of first weights", "nag", ("pre",)),
     Claim("NAG with quicker gates (tried after plain NAG) beats PreNorm", QUICKER, ("pre",)),
     Claim("NAG with quicker gates beats a PreNorm of its size and FLOPs", QUICKER, (SIZED,)),
     Claim("Block Attention Residuals beat PreNorm", "attnres:group=3", ("pre",)),
     Claim("nGPT beats PreNorm", "ngpt", ("pre",)),
     Claim("Review's gate beats PreNorm", "review", ("pre",)),
     Claim("Review's gate beats Highway's", "review", ("highway",))],
    line=(4, 0.2))

FROM_PRE_TO_NAG = ["pre", "pre --init gpt2", "nag:head=linear --gate_lr 0", "nag:head=linear", "nag"]
EXPERIMENTS["waterfall"] = Experiment(
    "Where does an early lead come from: first weights, the write, its gates, or the head?",
    [Stage(300, FROM_PRE_TO_NAG), Stage(1200, FROM_PRE_TO_NAG), Stage(4800, FROM_PRE_TO_NAG[:2]),
     Stage(4800, FROM_PRE_TO_NAG[2:], rates=2)],
    [Claim("First weights that fit the width help PreNorm", "pre", ("pre --init gpt2",))])

EXPERIMENTS["depth"] = Experiment(
    "Does a lead grow with depth?",
    [Stage(1200, [f"{name} --n_layer {n}" for name in names.split()], rates=2)
     for n, names in ((24, "pre nag skipinit"), (6, "pre nag skipinit"), (12, "pre nag skipinit"),
                      (24, "completep"), (48, "pre nag skipinit"))],
    [Claim(f"At {n} blocks, NAG beats PreNorm and SkipInit", f"nag --n_layer {n}",
           (f"pre --n_layer {n}", f"skipinit --n_layer {n}")) for n in (24, 48)],
    x="blocks", line=(3, 0.0))

DENSE = [f"nag --n_layer {n}" for n in (6, 4, 12, 9)]
DENSE_PRE = [f"pre --n_layer {n}" for n in (6, 12, 4)]
QUARTER, HALF = f"{NAG_12} --mod_rate 0.25", f"{NAG_12} --mod_rate 0.5"
ROUTER = f"{PRE_12} --mod router --mod_rate 0.25"
EXPERIMENTS["mod"] = Experiment(
    "Is a deep model that skips better than a shallower one, at equal training FLOPs?",
    [Stage(1200, [*DENSE[:3], HALF], rates=2),
     Stage(1200, [DENSE[3], QUARTER, f"{NAG_12} --mod_rate 0.125"], rates=1),
     Stage(1200, [*DENSE_PRE, ROUTER, f"{PRE_12} --layer_drop 0.25"], rates=1)],
    [Claim("NAG that skips a quarter beats every dense depth", QUARTER, tuple(DENSE)),
     Claim("NAG that skips half beats every dense depth", HALF, tuple(DENSE)),
     Claim("A router on PreNorm beats every dense depth", ROUTER, tuple(DENSE_PRE))],
    x="FLOPs per token", budget=NAG_12)

EXPERIMENTS["skip"] = Experiment(
    "What does skipping cost a model that was trained without it?",
    [Stage(steps, ["nag", "pre"], rates=1) for steps in (1200, 4800)],
    [Claim("Skipping a quarter of runs by gain beats random tokens", "nag | by gain | 1",
           ("nag | random tokens | 1",)),
     Claim("Skipping a quarter of runs by gain beats removing as many", "nag | by gain | 1",
           ("nag | greedy sublayers | 1", "nag | least-gain sublayers | 1"))],
    x="share of forward FLOPs saved", y="bits per byte lost", measure="skip")

FALLING = f"{PRE_12} --taper cosine --taper_on both"
RISING = f"{FALLING} --taper_start 0.5 --taper_end 1.5"
EXPERIMENTS["widths"] = Experiment(
    "Does it pay to have wide blocks first, at equal size and FLOPs?",
    [Stage(1200, [PRE_12, FALLING, RISING]), Stage(4800, [PRE_12, FALLING, RISING], rates=2)],
    [Claim("A falling taper beats a uniform and a rising one", FALLING, (PRE_12, RISING), 0.01)])

ORDERS = ("CascadeFlow this order", "influence this order", "last first this order", "CascadeFlow at random")
EXPERIMENTS["prune"] = Experiment(
    "Which order of removing blocks costs least?",
    [Stage(4800, [PRE_12, NAG_12], rates=1)],
    [Claim("For three blocks, CascadeFlow's order beats simpler ones", f"{PRE_12} | {ORDERS[0]} | 3",
           tuple(f"{PRE_12} | {order} | 3" for order in ORDERS[1:]))],
    x="blocks removed", y="nats per token", measure="inside", curves=ORDERS)

EXPERIMENTS["fan_in"] = Experiment(
    "Is the gradient of a block a line in the number of paths that reach it?",
    [Stage(4800, [PRE_12, f"{PRE_12} --equalize_grads", f"{PRE_12} --init gpt2"], rates=1),
     Stage(4800, [f"{PRE_12} --deep_supervision", f"{PRE_12} --repeat 9-12:2"], rates=1)],
    [Claim("Without the first block, a rising line leaves under a fifth of the variance",
           f"{PRE_12} | 1 - R2 | 1", ("0.2",), 0.0)],
    x="block", y="share of the summed gradient norms", measure="inside", curves=("measured",))

SINGLE_NORM = f"{PRE_12} --norm single"
EXPERIMENTS["sinks"] = Experiment(
    "Does a residual without growing norms have smaller sinks and outliers?",
    [Stage(4800, [PRE_12, NAG_12, SINGLE_NORM], rates=1)],
    [Claim("NAG attends less to the first token", f"{NAG_12} | to the first token | mean",
           (f"{PRE_12} | to the first token | mean",), 0.01),
     Claim("NAG has less kurtosis (claimed after two seeds)", f"{NAG_12} | stream | max",
           (f"{PRE_12} | stream | max",), 0.5),
     Claim("One scale for all channels has less kurtosis", f"{SINGLE_NORM} | stream | max",
           (f"{PRE_12} | stream | max",), 0.5)],
    x="block", y="mean attention", measure="inside", curves=("to the first token",))

GATES = ["review", "convex:bias=-3", "convex"]
HIGHWAYS = ["highway", "convex:inputs=h,bias=-3"]   # additive, as in the paper of Review; the one of 2015
EXPERIMENTS["gates"] = Experiment(
    "Does a convex gate fail with depth, or with its first bias?",
    [Stage(1200, [f"{gate} --n_layer {n}" for gate in gates], rates=rates)
     for n, gates, rates in ((16, GATES, 0), (4, GATES, 0), (32, GATES, 2), (16, HIGHWAYS, 0))],
    [Claim("At 16 blocks, an additive gate beats a convex, half-open one", "review --n_layer 16",
           ("convex --n_layer 16",)),
     Claim("It also beats a convex one that starts closed", "review --n_layer 16",
           ("convex:bias=-3 --n_layer 16",))],
    x="blocks", line=(1, -math.inf))   # That its control learns nothing is what is claimed.

# ----------------------------------------------------------------------------- what to run next

CLOSE = 0.01   # bits per byte; a sweep with one seed can't tell such rates apart

Job = namedtuple("Job", "variant steps lr seed")   # a run that is wanted, or known

def ranked(losses, variant, steps):
    """-> the rates that a variant has had with seed 1, the best first; the best one, and the next if it is
    close. Of these the mean over the seeds that both have had decides. losses: {Job: bits per byte}"""
    found = {}   # {rate: {seed: bits}}
    for job, bits in losses.items():
        if (job.variant, job.steps) == (variant, steps):
            found.setdefault(job.lr, {})[job.seed] = bits
    order = sorted((lr for lr in found if 1 in found[lr]), key=lambda lr: (found[lr][1], lr))
    close = [lr for lr in order[:2] if found[lr][1] <= found[order[0]][1] + CLOSE]
    common = set.intersection(*({*found[lr]} for lr in close)) if close else ()
    best = sorted(close, key=lambda lr: sum(found[lr][seed] for seed in common))
    return best + order[len(close):], best

def sweeps(stages, losses, begin):
    """-> of each stage {variant: (the rates that seed 1 tries; those that all seeds have, the best first, as
    soon as they are known)}. begin: two rates"""
    found, before = [], {}   # before: {variant: rates of its last stage, the best first; none if it is open}
    for stage in stages:
        found.append({})
        for variant in stage.variants:
            here, close = ranked(losses, variant, stage.steps)
            first = before.get(variant, begin)
            if variant not in before and 0 < stage.rates <= len(here):   # Another experiment has them.
                first = here
            tried = first[:stage.rates or 2]
            if tried and not stage.rates and {*tried} <= {*here}:
                tried = sorted({*tried, here[0] / 2, here[0] * 2})
                tried = [lr for lr in tried if 1 / 64 <= lr / begin[0] <= 64]   # It may always diverge.
            done = tried and {*tried} <= {*here}
            before[variant] = here if done else []
            found[-1][variant] = tried, close[:stage.rates or None] if done else []
    return found

def plan(stages, losses, measured, begin):
    """-> the jobs that are missing, in their order, as far as the losses known so far tell. measured: those
    of which the experiment has all it wants"""
    jobs = []
    for stage, rates in zip(stages, sweeps(stages, losses, begin)):
        first = [Job(name, stage.steps, lr, 1) for name, (tried, _) in rates.items() for lr in tried]
        seeds = [Job(name, stage.steps, lr, seed) for name, (_, close) in rates.items()
                 for lr in close for seed in stage.seeds]
        jobs += [job for job in first if job not in losses] + [job for job in seeds if job not in measured]
    return [*dict.fromkeys(jobs)]

# ----------------------------------------------------------------------------- a run, and what is measured

def flags(experiment, scale, job):
    end = f"--max_iters {scale.steps.get(job.steps, job.steps)}"
    if experiment.budget:
        end = f"--max_flops {flops_of(scale, experiment.budget, job.steps):.6g}"
    return shlex.split(f"{scale.shape} --residual {job.variant} {end} --lr {job.lr:.6g} --seed {job.seed}")

@functools.cache
def flops_of(scale, variant, steps):
    """Training FLOPs of a run, if no token skips"""
    gpt, config = parse((GPTConfig, TrainConfig), shlex.split(f"{scale.shape} --residual {variant}"))
    gpt.vocab_size = scale.vocab_size
    with torch.device("meta"):   # takes no memory, and no time
        per_token = 3 * flops_per_token(GPT(gpt))
    return per_token * config.batch_size * gpt.block_size * scale.steps.get(steps, steps)

def work(name, scale, job):
    """Trains one run and measures it -> what the JSON keeps of it. Runs in a process of its own."""
    torch.set_num_threads(1)
    wanted = flags(EXPERIMENTS[name], scale, job)
    title = re.sub(r"[^\w.]+", "-", f"{job.variant} {job.steps} {job.lr:.6g} {job.seed}")
    out = ROOT / "runs" / "results" / f"{title}-{zlib.crc32(' '.join(wanted).encode()):08x}"
    begin = ["--resume"] if (out / "ckpt.pt").exists() else [*wanted, "--data", scale.data, "--overwrite"]
    command = [sys.executable, str(ROOT / "train.py"), "--out", str(out), *begin, "--eval_interval", "1000",
               "--eval_windows", "64", "--log_interval", "20"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | dict(OMP_NUM_THREADS="1"), text=True,
                          capture_output=True)
    record = job._asdict() | dict(bits=None)
    if re.search(r"^step \d+: (validation )?loss", done.stderr, re.M):   # It has diverged: a result, too.
        return record
    if done.returncode:
        refuse(f"{shlex.join(command)}: exit status {done.returncode}, {done.stderr.strip()[-300:]}")
    model, config = open_run(out, "cuda" if "cuda" in scale.shape else "cpu")
    history = [entry for entry in read_metrics(out).values() if "tok_s" in entry]
    seconds = history[-1]["tokens"] / statistics.median(entry["tok_s"] for entry in history)
    bits, groups, _ = judge.score(model, config)
    record |= dict(bits=round(bits, 5), groups=judge.rounded(groups), seconds=round(seconds),
                   params=num_params(model), tokens=history[-1]["tokens"], flops=history[-1]["flops"])
    if EXPERIMENTS[name].measure != "loss":
        record["curves"] = judge.MEASURES[EXPERIMENTS[name].measure](model, config, bits, groups)
    return record

# ----------------------------------------------------------------------------- what is kept

def load(name, scale):
    """-> what NAME.json holds: data (their mark), lines {steps: bits per byte of n-grams}, runs"""
    path, empty = scale.folder / f"{name}.json", dict(data="", lines={}, runs=[])
    if not path.exists():
        return empty
    with reading(path):
        kept = json.loads(path.read_text())
        for run in kept["runs"]:   # What is none of ours raises.
            job_of(run)
            if run["bits"] is not None:
                sum(run["groups"], run["bits"])
        return {key: type(value)(kept[key]) for key, value in empty.items()}

def save(name, scale, kept):
    rows = ",\n".join(json.dumps(run) for run in kept["runs"])
    text = f'{{"data": "{kept["data"]}",\n"lines": {json.dumps(kept["lines"])},\n"runs": [\n{rows}]}}\n'
    scale.folder.mkdir(exist_ok=True)
    write_file(scale.folder / f"{name}.json", lambda f: f.write(text.encode()))

def job_of(run):
    return Job(*(run[field] for field in Job._fields))

def known(name, scale):
    """-> losses {Job: bits per byte} of all experiments with the same budget, and the runs {Job: run} that
    were measured as this one wants"""
    losses, measured, marks, own = {}, {}, {}, EXPERIMENTS[name]
    alike = [other for other in EXPERIMENTS if EXPERIMENTS[other].budget == own.budget]
    for other in [*alike, name]:   # Its own come last and count.
        kept = load(other, scale)
        if kept["runs"]:
            marks[kept["data"]] = other
        if len(marks) > 1:
            refuse(f"{scale.folder}: the runs of {' and '.join(marks.values())} had different data; move one "
                   "of these JSON files away")
        for run in kept["runs"]:
            losses[job_of(run)] = math.inf if run["bits"] is None else run["bits"]
            if own.measure in ("loss", EXPERIMENTS[other].measure):
                measured[job_of(run)] = run
    return losses, measured

def final(name, scale):
    """The runs at their best rate, as soon as that is known: {(variant, steps): {seed: run}}"""
    losses, measured = known(name, scale)
    stages, found = EXPERIMENTS[name].stages, {}
    for stage, rates in zip(stages, sweeps(stages, losses, scale.rates)):
        for variant, (_, close) in rates.items():
            jobs = [Job(variant, stage.steps, lr, seed) for lr in close[:1] for seed in stage.seeds]
            runs = {job.seed: measured[job] for job in jobs if job in measured and losses[job] < math.inf}
            if runs:
                found[variant, stage.steps] = runs
    return found

def n_gram_lines(scale, steps):
    """Bits per byte of 1- to 5-grams, counted on the windows that seed 1 sees. A token counts once."""
    gpt, config = parse((GPTConfig, TrainConfig), shlex.split(scale.shape))
    meta, shards = prepare.load_meta(scale.data), prepare.open_split(scale.data, "train", gpt.block_size)
    tokens, ends = np.concatenate(shards), np.cumsum([len(shard) for shard in shards])
    places = np.split(np.arange(len(tokens)), ends[:-1])   # Batches of these tell where their tokens lie.
    seen = np.zeros(len(tokens), bool)
    for step in range(scale.steps.get(steps, steps)):
        for part in train_batch(places, gpt.block_size, 1, step, config.batch_size):
            seen[part] = True
    grams = judge.WittenBell(tokens, seen, meta["vocab_size"])
    x, y = prepare.val_windows(scale.data, gpt.block_size, judge.WINDOWS)
    rows = torch.cat((x, y[:, -1:]), dim=1).numpy()
    n_bytes = prepare.token_bytes(meta, scale.vocab_size)[y].sum().item()
    return judge.rounded(grams.bits(rows, n) / n_bytes for n in range(1, 1 + len(grams.tables)))

def count_lines(name, scale, kept, finals):
    """Adds the lines of new lengths to `kept` and to NAME.json, if the data are those of its runs."""
    new = {str(steps) for _, steps in finals} - kept["lines"].keys()
    if new and Path(scale.data).is_dir() and kept["data"] in ("", mark_of(scale)):
        kept["lines"] |= {steps: n_gram_lines(scale, int(steps)) for steps in sorted(new, key=int)}
        save(name, scale, kept)

def mark_of(scale):
    return fingerprint(scale.data, prepare.load_meta(scale.data))[:16]

def train_missing(name, scale, workers):
    """Trains what is missing, in the plan's order, and keeps each result as it comes."""
    mark, pending = mark_of(scale), {}
    if load(name, scale)["data"] not in ("", mark):
        refuse(f"{scale.folder / name}.json: its runs had other data than {scale.data} has here; prepare it "
               f"as it was (stdlib: with the same Python), or move that file away to begin anew")
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        while True:
            missing = plan(EXPERIMENTS[name].stages, *known(name, scale), scale.rates)
            new = [job for job in missing if job not in pending.values()]
            for job in new[:workers - len(pending)]:
                pending[pool.submit(work, name, scale, job)] = job
            if not pending:
                break
            for future in concurrent.futures.wait(pending, return_when="FIRST_COMPLETED").done:
                job, kept = pending.pop(future), load(name, scale)
                kept["runs"].append(future.result())
                save(name, scale, kept | dict(data=mark))
                say(f"{name}: {job.variant}, {job.steps} steps, rate {job.lr:.6g}, seed {job.seed}: "
                    f"{kept['runs'][-1]['bits']} bits per byte")

def estimate(name, scale):
    """-> [(command, minutes), ...] of what is missing. Where a rate hangs on a sweep, it takes the first."""
    (losses, measured), found = known(name, scale), []
    while jobs := plan(EXPERIMENTS[name].stages, losses, measured, scale.rates):
        for job in jobs:
            command = ["python", "train.py", "--data", scale.data, *flags(EXPERIMENTS[name], scale, job)]
            flops = flops_of(scale, EXPERIMENTS[name].budget or job.variant, job.steps)
            found.append((shlex.join(command), flops / scale.flops_per_second / 60))
            losses.setdefault(job, 99.0 + abs(math.log2(job.lr / scale.rates[0])))   # worse than known ones
            measured[job] = None
    return found

# ----------------------------------------------------------------------------- main

def report(scale, names):
    """Draws figures; writes all losses to losses.csv, and verdicts and minutes into README.md, each behind
    its mark."""
    rows = [["experiment", "variant", "steps", "rate", "bits per byte, by seed", "gap to the first"]]
    verdicts = ["claim | verdict | gap | measured by", "--- | --- | --- | ---"]
    minutes = ["experiment | runs kept | minutes | runs missing | minutes", "--- |--- |--- |--- | ---"]
    for name, experiment in EXPERIMENTS.items():
        kept, finals, left = load(name, scale), final(name, scale), estimate(name, scale)
        count_lines(name, scale, kept, finals)
        anchor = re.sub(r"[^\w -]", "", experiment.question.lower()).replace(" ", "-")
        for claim in experiment.claims:
            if found := judge.judge(experiment, claim, finals, kept["lines"]):
                verdict, gap, where = found
                verdicts.append(f"{claim.text} | {verdict} | {gap} | [{name}](#{anchor}), {where}")
        done = sum(run.get("seconds", 0) for run in kept["runs"]) / 60
        missing = sum(more for _, more in left)
        minutes.append(f"`{name}` | {len(kept['runs'])} | {done:.0f} | {len(left)} | {missing:.0f}")
        rows += [[name, *row] for row in judge.table(experiment, finals)]
        if name in names and finals:
            judge.draw(scale.folder / f"{name}.png", experiment, finals, kept["lines"])
    scale.folder.mkdir(exist_ok=True)
    with open(scale.folder / "losses.csv", "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    page = scale.folder / "README.md"
    for mark, lines in dict(scoreboard=verdicts, minutes=minutes).items():
        table = "".join(f"| {line} |\n" for line in lines)
        print(table)
        if page.exists():
            place = f"(?s)(?<=<!-- {mark} -->\n).*?\n(?=\n)"
            text = re.sub(place, lambda _: table, page.read_text())
            write_file(page, lambda f: f.write(text.encode()))

@dataclass
class ResultsConfig:
    names: list                     # experiments, or all
    dry: bool = False               # only print the commands that are missing, and estimated minutes
    draw: bool = False              # only judge and draw what the JSON files hold
    scale: Literal["cpu", "gpu"] = "cpu"  # gpu: 12 x 512 on FineWeb, below results/gpu
    workers: int = 2                # [1, 64] runs side by side, of one thread each; 1 on a GPU

def main(argv=None):
    args, = parse((ResultsConfig,), argv, __doc__, positional=("names",))
    names = list(EXPERIMENTS) if args.names == ["all"] else args.names
    for name in {*names} - {*EXPERIMENTS}:
        refuse(f"{name}: no such experiment; choose from {', '.join(EXPERIMENTS)}, or all")
    scale = SCALES[args.scale]
    os.chdir(ROOT)
    if args.draw and not args.dry:
        report(scale, names)
        return
    for name in names:
        if args.dry:
            left = estimate(name, scale)
            for command, minutes in left:
                print(f"{command}   # {minutes:.1f} minutes")
            total = sum(minutes for _, minutes in left)
            print(f"{name}: {total:.0f} minutes of one idle thread (or GPU) are missing")
        else:
            train_missing(name, scale, args.workers if args.scale == "cpu" else 1)
            report(scale, [name])

if __name__ == "__main__":
    start(main)
