"""
The runs behind results/README.md: a table of commands, and one line of runs.csv for each.

    python results/run.py staircase             # trains what runs.csv lacks, two runs at a time
    python results/run.py all                   # hours; after Ctrl-C, the same command goes on

A run is a command of train.py with a seed, measured on 512 validation windows. Its folder, below
runs/results, can be deleted: what counts is in runs.csv. Seed 1 has chosen the learning rates; the
others decide, see summarize.py. On a GPU, change SMALL and TEXT to the sizes you want, give
--workers 1, and write to another file with --out.
"""
import collections, concurrent.futures, csv, math, os, shlex, statistics, subprocess, sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import analyze
import prepare
from flags import flag, parse, refuse, say, start
from model import num_params
from runs import open_run, read_checkpoint, read_metrics
from train import evaluate

# ------------------------------------------------------------------------------- the experiments

SMALL = ("--data data/steps --device cpu --n_embd 64 --mlp_ratio 2 --schedule wsd --optimizer muon "
         "--eval_interval 500")
TEXT = "--data data/stdlib --device cpu --optimizer muon --eval_interval 420 --n_embd 64"
FALLING = "--taper cosine"
SKIPS = "--mod_rate 0.25"   # the third edition's controller; git checkout 7cf98d5 repeats these runs
RANDOM, ROUTER = f"--mod random {SKIPS}", f"--mod router {SKIPS}"
SWEEP = (1e-2, 2e-2, 4e-2)   # learning rates that seed 1 tries
# Seeds that decide. EIGHT and NEW are new ones, for comparisons that came later.
FOUR, FIVE, EIGHT = (2, 3, 4, 5), (2, 3, 4, 5, 6), (7, 8, 9, 10, 11, 12, 13, 14)
NEW = EIGHT[:5]

# A line of an experiment: a name for people, the flags, the rate that seed 1 has chosen, the rates
# that it has tried, and the seeds that decide
Variant = collections.namedtuple("Variant", "name flags lr sweep seeds")

def on_steps(name, residual, lr=2e-2, sweep=(), seeds=FOUR, n_layer=6, iters=1000, more="", base=SMALL):
    if residual.startswith(("nag", "attnres")) and "gate_lr" not in more:
        more = f"--gate_lr 3e-3 {more}"   # good for their gains and queries
    flags = f"{base} --residual {residual} --n_layer {n_layer} --max_iters {iters} {more}"
    return Variant(name, flags.strip(), lr, sweep, seeds)

def on_text(name, residual, lr, sweep=(), seeds=FIVE, n_layer=12, iters=420, more=""):
    return on_steps(name, residual, lr, sweep, seeds, n_layer, iters, more, TEXT)

def on_cost(name, n_layer, more=""):
    """The steps text as `make` has it. All have the FLOPs of 1,500 iterations of NAG."""
    flags = (f"{SMALL} --residual nag --n_layer {n_layer} --max_flops 6.26629e12 --gate_lr 3e-3 "
             f"{more}")
    return Variant(name, flags.strip(), 2e-2, (), NEW)

def on_ill(name, residual, lr, sweep=(), more=""):
    return on_steps(name, residual, lr, sweep, (2, 3, 4), 24, 400, more,
                    "--data data/stdlib --device cpu --n_embd 64 --schedule wsd --eval_interval 400")

def on_cliff(name, residual, n_layer, more, lr=2e-3, sweep=()):
    return on_steps(f"cliff: {name}, {n_layer} blocks", residual, lr, sweep, (2, 3, 4), n_layer, 300,
                    more, "--data data/stdlib --device cpu --n_embd 64 --eval_interval 300")

PAYS = "--gain_cost 0.1 --mod gain:below=0.05"
PAPERS = "--optimizer adamw --init gpt2"   # the papers' regime
ADAMW = (2e-3, 6e-3)                       # learning rates that seed 1 tries there
OURS = "--optimizer muon"

EXPERIMENTS = {   # name -> (question, variants). comparisons.csv says what is compared.
    "staircase": ("How many steps do 1 to 6 blocks (PreNorm) learn?", [
        on_steps("1 block", "pre", n_layer=1),
        on_steps("2 blocks", "pre", n_layer=2),
        on_steps("4 blocks", "pre", n_layer=4),
        on_steps("6 blocks", "pre", 2e-2, SWEEP),
        on_steps("2 blocks, twice as long", "pre", n_layer=2, iters=2000)]),
    "residuals": ("Which residual learns more steps?", [
        on_steps("NAG", "nag", 1e-2, (5e-3, *SWEEP)),
        on_steps("6 blocks, gpt2", "pre", more="--init gpt2"),
        on_steps("NAG, gpt2, 6 blocks", "nag", 1e-2, more="--init gpt2"),
        on_steps("6 blocks, 1.1 times as long", "pre", iters=1100)]),
    "others": ("And which of the other residuals?", [
        on_steps("6 blocks, 1.3 times as long", "pre", iters=1300),
        on_steps("Block Attention Residuals", "attnres:group=3", 4e-2, (*SWEEP, 8e-2)),
        *(on_steps(f"Block Attention Residuals, {speed} queries", "attnres:group=3", 2e-2, (2e-2,), (),
                   more=f"--gate_lr {rate}") for speed, rate in (("faster", "1e-2"), ("slower", "1e-3"))),
        on_steps("Attention Residuals", "attnres", 4e-2, (*SWEEP, 8e-2)),
        on_steps("Review Residuals", "review", 2e-2, SWEEP),
        on_steps("nGPT", "ngpt", 1e-2, (2e-3, 5e-3, *SWEEP), ())]),
    "again": ("Does a block that runs again step further?", [
        on_steps("2 blocks, each run three times", "pre", 2e-2, SWEEP, n_layer=2, more="--repeat 1-2:3")]),
    "tapers": ("Where should the width be?", [on_steps("6 blocks, falling width", "pre", more=FALLING)]),
    "skipping": ("What does skipping a quarter cost?", [
        on_steps("NAG that skips a quarter", "nag", 1e-2, more=SKIPS),
        on_steps("NAG that skips at random", "nag", 1e-2, more=RANDOM),
        on_steps("NAG, 5 blocks", "nag", 1e-2, n_layer=5),
        on_steps("a router that skips a quarter", "pre", 2e-2, SWEEP, more=ROUTER),
        on_steps("5 blocks", "pre", n_layer=5)]),
    "start": ("The residual or the first weights? (text)", [
        Variant(f"{name}, {init}", f"{TEXT} --max_iters 147 --residual {residual}{more}", 2e-2, (), FOUR)
        for name, residual in (("PreNorm", "pre"), ("NAG", "nag"))
        for init, more in (("width", ""), ("gpt2", " --init gpt2"))]),
    "text": ("And on text?", [
        on_text("text: PreNorm", "pre", 4e-2, (*SWEEP, 8e-2)),
        on_text("text: PreNorm, 1.3 times as long", "pre", 4e-2, iters=546),
        on_text("text: NAG", "nag", 8e-2, (*SWEEP, 8e-2, 0.16)),
        on_text("text: NAG, slower gates", "nag", 2e-2, (2e-2,), (), more="--gate_lr 1e-3"),
        on_text("text: NAG that skips a quarter", "nag", 8e-2, more=SKIPS),
        on_text("text: NAG that skips at random", "nag", 8e-2, more=RANDOM),
        on_text("text: NAG, 9 blocks", "nag", 8e-2, n_layer=9),
        on_text("text: Block Attention Residuals", "attnres:group=3", 4e-2, (*SWEEP, 8e-2)),
        on_text("text: Review Residuals", "review", 2e-2, SWEEP),
        on_text("text: falling width", "pre", 4e-2, more=FALLING)]),
    "flops": ("And on text, if PreNorm gets the FLOPs of its rivals?", [
        on_text("FLOPs: PreNorm, 1.06 times as long", "pre", 4e-2, (), EIGHT, iters=445),
        on_text("FLOPs: PreNorm, 1.24 times as long", "pre", 4e-2, (), EIGHT, iters=522),
        on_text("FLOPs: NAG", "nag", 8e-2, (), EIGHT),
        on_text("FLOPs: Block Attention Residuals", "attnres:group=3", 4e-2, (), EIGHT),
        on_text("FLOPs: Review Residuals", "review", 2e-2, (), EIGHT)]),
    "more": ("And which of these, on text?", [
        on_text("text: Hyper-Connections", "hyper", 2e-2, SWEEP),
        on_text("text: the convex gate", "convex", 2e-2, SWEEP),
        on_text("text: SiameseNorm", "siamese", 2e-2, SWEEP),
        on_text("text: Peri-LN", "peri", 4e-2, (*SWEEP, 8e-2)),
        on_text("text: LayerNorm Scaling", "lns", 4e-2, (*SWEEP, 8e-2))]),
    "deep": ("Does NAG gain with depth? (text)", [
        on_text("24 blocks: PreNorm", "pre", 2e-2, (*SWEEP, 8e-2), n_layer=24, iters=600),
        on_text("24 blocks: PreNorm, 1.06 times as long", "pre", 2e-2, n_layer=24, iters=637),
        on_text("24 blocks: NAG", "nag", 2e-2, (*SWEEP, 8e-2, 0.16), n_layer=24, iters=600),
        on_text("6 blocks on text: PreNorm", "pre", 2e-2, (*SWEEP, 8e-2), n_layer=6, iters=600),
        on_text("6 blocks on text: NAG", "nag", 4e-2, (*SWEEP, 8e-2, 0.16), n_layer=6, iters=600)]),
    "mod": ("Mixture-of-Depths at the FLOPs of 24 blocks (text)", [
        on_text("24 blocks: skips a quarter", "nag", 2e-2, n_layer=24, iters=758, more=SKIPS),
        on_text("24 blocks: skips at random", "nag", 2e-2, n_layer=24, iters=767, more=RANDOM),
        on_text("18 blocks: NAG", "nag", 2e-2, n_layer=18, iters=797)]),
    "cost": ("Does a cost for turning make skipping free and knowing?", [   # then cost.py
        on_cost("plain NAG", 6),
        on_cost("NAG that pays", 6, PAYS),
        on_cost("plain NAG, 5 blocks", 5)]),
    "ill": ("Is PreNorm diluted here? (text, 24 blocks)", [                 # then ill.py
        on_ill("AdamW: PreNorm", "pre", 2e-3, (1e-3, *ADAMW), PAPERS),
        on_ill("AdamW: NAG", "nag", 2e-3, ADAMW, PAPERS),
        on_ill("AdamW: Block Attention Residuals", "attnres:group=6", 2e-3, (), PAPERS),
        on_ill("Muon: PreNorm", "pre", 2e-2, (), OURS),
        on_ill("Muon: NAG", "nag", 2e-2, (), OURS)]),
    # The convex gate fails at a depth if, in all three seeds, it ends no more than 0.05 nats (0.072
    # bits per byte) below 4.427 bits, what the tokens' frequencies alone reach. It trains if, in
    # all three, it is further below.
    "cliff": ("Does the convex gate fail at depth? (text, 300 iterations)", [
        on_cliff("convex", "convex", 24, PAPERS, 2e-3, (5e-4, *ADAMW)),
        on_cliff("convex, bias -3", "convex:bias=-3", 24, PAPERS),
        on_cliff("review", "review", 24, PAPERS),
        on_cliff("convex", "convex", 6, PAPERS),
        on_cliff("review", "review", 6, PAPERS),
        on_cliff("Muon, convex", "convex", 24, OURS, 2e-2)]),
    "answer": ("NAG on text once more: at other rates, with PreNorm's FLOPs", [
        on_text("FLOPs: NAG, rate 0.02", "nag", 2e-2, (), EIGHT),
        on_text("FLOPs: NAG, rate 0.04", "nag", 4e-2, (), EIGHT)]),
}

def commands(name, only_sweeps=False):
    """-> [(variant, seed, rate, flags)] of an experiment, first those of seed 1, which sweep rates"""
    _, variants = EXPERIMENTS[name]
    wanted = [(variant, 1, lr) for variant in variants for lr in variant.sweep]
    if not only_sweeps:
        wanted += [(variant, seed, variant.lr) for seed in FIVE + EIGHT for variant in variants
                   if seed in variant.seeds]
    return [(variant.name, seed, lr, f"{variant.flags} --lr {lr:g} --seed {seed}")
            for variant, seed, lr in wanted]

COLUMNS = ["experiment", "variant", "seed", "lr", "tokens", "parameters", "seconds", "flops", "bits",
           "steps", "right", "skipped", "commit", "command"]

def train(name, variant, seed, lr, flags):
    """Trains, or goes on with, one run -> its folder"""
    folder = f"{name}-{variant}-{lr:g}-{seed}".replace(" ", "-")
    out = ROOT / "runs/results" / folder.replace(",", "")
    begin = ["--resume"] if (out / "ckpt.pt").exists() else shlex.split(flags)
    words = [sys.executable, "train.py", "--out", str(out), *begin]
    done = subprocess.run(words, cwd=ROOT, text=True, capture_output=True)
    if done.returncode:
        refuse(f"{shlex.join(words)}: ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return out

def measure(out):
    """Run folder -> what runs.csv says of it, but for its name"""
    model, config = open_run(out)
    x, y = prepare.windows_of(config["data"], "val", config["block_size"], 512)
    _, bits, skipped = evaluate(model, x, y, prepare.token_bytes(config, len(model.wte.weight)), 64)
    found = dict(bits=f"{bits:.5f}", skipped=f"{skipped:.3f}", steps="", right="")
    text = prepare.load_meta(config["data"]).get("steps")
    if text:
        run = analyze.Run(model, config, (x, y), text)
        right = analyze.right_digits(run)["share of right digits"]["measured"]
        found |= dict(right=" ".join(f"{share:.3f}" for share in right),
                      steps=f"{analyze.steps_learned(right, 1 / len(text['table'])):.3f}")
    ckpt, _ = read_checkpoint(out / "ckpt.pt")   # The last log may be from some steps before.
    tokens = ckpt["step"] * config["batch_size"] * config["block_size"]
    speeds = [entry["tok_s"] for entry in read_metrics(out).values() if "tok_s" in entry]
    seconds = tokens / statistics.median(speeds[1:] or speeds)   # without the evaluations
    return found | dict(tokens=tokens, flops=f"{ckpt['flops']:.4g}", seconds=f"{seconds:.0f}",
                        parameters=num_params(model))

# ---------------------------------------------------------------------------------------- the runs

@dataclass
class ResultsConfig:
    names: list = flag(None, "experiments, or all")
    sweep: bool = flag(False, "only the runs of seed 1, which choose the rates")
    dry: bool = flag(False, "only print the commands that are missing")
    workers: int = flag(2, "runs side by side, of one thread each", 1, 64)
    out: str = flag("results/runs.csv", "file of the lines")

def read_runs(path):
    """runs.csv -> a list of dicts"""
    if not Path(path).is_file():
        return []
    try:
        with open(path, newline="", encoding="utf-8") as f:
            header, *lines = [*csv.reader(f)] or [COLUMNS]
        rows = [dict(zip(COLUMNS, line, strict=True)) for line in lines]
        numbers = [float(word) for line in lines for word in " ".join(line[2:12]).split()]
        lengths = {len(row["right"].split()) for row in rows} - {0}
        if header != COLUMNS or len(lengths) > 1 or not all(map(math.isfinite, numbers)):
            raise ValueError("its first line, or a number")
    except (ValueError, csv.Error) as error:
        refuse(f"{path}: is none of ours ({error}); restore it from git, or name another")
    return rows

def main(argv=None):
    args, = parse((ResultsConfig,), argv, __doc__, positional=("names",))
    names = [*EXPERIMENTS] if "all" in args.names else list(dict.fromkeys(args.names))
    for name in {*names} - {*EXPERIMENTS}:
        refuse(f"{name}: no such experiment; choose from {', '.join(EXPERIMENTS)}, or all")
    os.chdir(ROOT)
    out = Path(args.out)
    if out.exists() and not out.is_file() or not out.parent.is_dir():   # now, not after a training
        refuse(f"--out {out}: is no file, and can't become one; name another")
    done = {(row["experiment"], row["command"]) for row in read_runs(args.out)}
    missing = [(name, *each) for name in names for each in commands(name, args.sweep)
               if (name, each[-1]) not in done]
    if any(SKIPS in flags for *_, flags in missing):
        refuse(f"{SKIPS} is gone; git checkout 7cf98d5 repeats the runs that have it")
    if args.dry:
        for *_, flags in missing:
            say(f"python train.py {flags}")
        return
    for data in ("steps", "stdlib"):
        if not (ROOT / "data" / data / "meta.json").exists():
            prepare.main([data, "--out", f"data/{data}"])

    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        waiting = {pool.submit(lambda job: measure(train(*job)), job): job for job in missing}
        try:
            for future in concurrent.futures.as_completed(waiting):
                name, variant, seed, lr, flags = waiting[future]
                row = dict(experiment=name, variant=variant, seed=seed, lr=f"{lr:g}", command=flags)
                row |= future.result()
                append(args.out, row)
                say(f"{name}: {variant}, seed {seed}, rate {lr:g}: {row['bits']} bits, "
                    f"{row['steps'] or 'no'} steps, {row['seconds']} s")
        finally:
            pool.shutdown(cancel_futures=True)

def append(path, row, columns=COLUMNS):
    """Adds a line to a CSV file, with the commit that has made it."""
    row = row | dict(commit=subprocess.getoutput(f"git -C {ROOT} rev-parse --short HEAD"))
    with open(path, "a", newline="") as f:
        writer = csv.DictWriter(f, columns, lineterminator="\n")
        if f.tell() == 0:   # It is new.
            writer.writeheader()
        writer.writerow(row)

if __name__ == "__main__":
    torch.set_num_threads(1)
    start(main)
