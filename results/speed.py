"""
How fast it is: ratios of two programs that run in turn.

    python results/speed.py                                      # 20 minutes on two idle cores
    python results/speed.py --nanogpt nanoGPT/model.py           # also against a copy of nanoGPT's model

Protocol. The programs of a comparison run in turn, round after round, so what else the machine does hits all
of them. Two rounds do not count. A number is the median over rounds of the ratio of two times of one round.
Beside it stands its middle half: if that is wide, the machine was not idle. "training" is whole steps. Models
are new, but the one that skips has trained for 60 steps. What half skip is found by bisection. A predicted saving is that of the FLOPs that run.
"""
import json, os, runpy, statistics, sys, time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import prepare
from flags import flag, parse, refuse, say, start
from model import ByGain, GPT, GPTConfig, Runner, flops_per_token
from train import get_batch

@dataclass
class SpeedConfig:
    nanogpt: str = flag("", "model.py of a copy of nanoGPT; without it that comparison is left out")
    only: str = flag("", "some of training, skipping, decoding, tapers, separated by commas")
    rounds: int = flag(12, "rounds that count", 3, 1000)
    data: str = flag("data/stdlib", "folder of token shards, for the model that skips")

B, T, V = 16, 128, 320   # sequences, tokens, vocabulary

def times(programs, rounds):
    """{name: function} -> {name: seconds in each round}"""
    found = {name: [] for name in programs}
    for i in range(rounds + 2):
        for name, program in programs.items():
            begin = time.perf_counter()
            program()
            if i >= 2:
                found[name].append(time.perf_counter() - begin)
    return found

def ratio(found, slow, fast):
    """How many times as fast `fast` is: the median, and the middle half, over rounds"""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(found[slow], found[fast])], n=4)
    return dict(ratio=round(middle, 3), middle_half=[round(low, 3), round(high, 3)])

def make(residual, n_layer, n_embd, block_size=T, **options):
    return GPT(GPTConfig(residual, n_layer, n_embd=n_embd, block_size=block_size, vocab_size=V, **options))

def train_step(model, x, y):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), fused=True)
    def step():
        model(x, y)[1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step

@torch.no_grad()
def half_skips(model, x):
    """-> the ByGain with which a model skips half of its sublayer runs on x"""
    low, high = 0.0, 4.0
    for _ in range(16):
        decider = ByGain(model.config, (low + high) / 2)
        runner = Runner(model, decider)
        model(x, runner=runner)
        if runner.skipped() < 0.5:
            low = decider.below
        else:
            high = decider.below
    return decider

# ----------------------------------------------------------------------------- comparisons

def training(args):
    x, y = torch.randint(V, (2, B, T), generator=torch.Generator().manual_seed(0))
    for n_embd in (128, 256):
        others = "nag", "attnres", "attnres:group=3"
        programs = {residual: train_step(make(residual, 12, n_embd), x, y) for residual in ("pre", *others)}
        programs["nag that pays"] = train_step(make("nag", 12, n_embd, gain_cost=0.1), x, y)
        if args.nanogpt:
            nano = read_nanogpt(args.nanogpt)
            config = nano["GPTConfig"](T, V, n_layer=12, n_head=4, n_embd=n_embd, dropout=0.0, bias=False)
            programs["nanoGPT"] = train_step(nano["GPT"](config), x, y)
        found = times(programs, args.rounds)
        if args.nanogpt:
            yield f"training 12 x {n_embd}: pre against nanoGPT", ratio(found, "nanoGPT", "pre")
        for residual in others:
            yield f"training 12 x {n_embd}: {residual} against pre", ratio(found, "pre", residual)
        yield f"training 12 x {n_embd}: nag that pays against nag", ratio(found, "nag", "nag that pays")

def read_nanogpt(path):
    """-> what its model.py defines, by name"""
    try:
        found = runpy.run_path(path)
        found["GPT"], found["GPTConfig"]
    except Exception as error:
        refuse(f"--nanogpt {path}: can't be used ({error!r}); name model.py of a copy of nanoGPT")
    return found

def skipping(args):
    """A nag of 12 x 256 that pays for gain, where half is skipped: the measured share of the predicted saving"""
    model = make("nag", 12, 256, gain_cost=0.1)
    data = SimpleNamespace(shards=prepare.open_split(args.data, "train", T), meta=prepare.load_meta(args.data))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    for step in range(60):
        x, y = get_batch(data, model.config, B, step)
        model(x, y)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    prefill = torch.no_grad()(lambda decider: model(x, runner=Runner(model, decider)))
    decider = half_skips(model.eval(), x)
    runner = Runner(model, decider)
    model(x, runner=runner)
    predicted = 1 - flops_per_token(model, runner=runner) / flops_per_token(model)

    def both_ways(decider):
        model(x, y, runner=Runner(model, decider))[1].backward()
        model.zero_grad(set_to_none=True)
    for name, program in {"forward and backward": both_ways, "prefill": prefill}.items():
        found = times({"dense": lambda: program(None), "skips": lambda: program(decider)}, args.rounds)
        faster = ratio(found, "dense", "skips")
        saved = (1 - 1 / faster["ratio"]) / predicted
        yield f"skipping half, {name}", faster | dict(predicted=round(predicted, 3), share=round(saved, 3))

def decoding(args):
    """48 tokens, half skipped or dense"""
    nag = make("nag", 24, 384, n_head=6).eval()
    x = torch.randint(256, (8, T), generator=torch.Generator().manual_seed(0))
    decider = half_skips(nag, x)
    found = times({"dense": lambda: nag.generate(x[:1, :8], 48),
                   "skips": lambda: nag.generate(x[:1, :8], 48, decider=decider)}, args.rounds)
    yield "decoding 24 x 384, half skipped against dense", ratio(found, "dense", "skips")

@torch.no_grad()
def tapers(args):
    """Reading, where MLPs get narrower or wider with depth. All have the same FLOPs."""
    x = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))
    ends = dict(equal=(1, 1), falling=(1.5, 0.5), rising=(0.5, 1.5))
    for n_embd in (64, 256):
        models = [make("pre", 12, n_embd, taper="cosine", taper_start=a, taper_end=b) for a, b in ends.values()]
        found = times({name: lambda model=model: model(x) for name, model in zip(ends, models)}, args.rounds)
        for name in "falling", "rising":
            yield f"reading 12 x {n_embd}: {name} against equal width", ratio(found, "equal", name)

COMPARISONS = dict(skipping=skipping, training=training, decoding=decoding, tapers=tapers)   # first what reads data

def main(argv=None):
    args, = parse((SpeedConfig,), argv, __doc__)
    wanted = args.only.split(",") if args.only else [*COMPARISONS]
    for name in {*wanted} - {*COMPARISONS}:
        refuse(f"--only {name}: no such comparison; choose from {', '.join(COMPARISONS)}")
    if args.nanogpt:
        read_nanogpt(args.nanogpt)   # now, not after minutes
    say(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]}, {args.rounds} rounds")
    for name in wanted:
        for line, result in COMPARISONS[name](args):
            say(f"{line}: {json.dumps(result)}")

if __name__ == "__main__":
    start(main)
