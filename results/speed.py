"""
How fast it is: ratios of two programs that run in turn.

    python results/speed.py                               # 20 minutes on two idle cores
    python results/speed.py --nanogpt nanoGPT/model.py    # also against a copy of nanoGPT's model

Protocol. The programs of a comparison run in turn, round after round, so what else the machine does
hits all of them. Two rounds do not count. A number is the median over rounds of the ratio of two
times of one round. Beside it stands its middle half: if that is wide, the machine was not idle.
"training" is whole steps. Models are new, but the one whose skipping is measured has trained for 60
steps on data/stdlib (python prepare.py stdlib). The angle below which half is skipped is found by
bisection. A predicted saving is that of the FLOPs that run.
"""
import functools
import os
import runpy
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import dataset
from flags import flag, parse
from model import ByGain, GPT, GPTConfig, Runner, flops_per_token
from sentences import refuse, say, start

B, T, V = 16, 128, 320   # sequences, tokens, vocabulary

@dataclass
class SpeedConfig:
    nanogpt: str = flag("", "model.py of a copy of nanoGPT; without it that comparison is left out")
    only: Literal["all", "training", "skipping", "decoding"] = flag("all", "one of the comparisons")
    rounds: int = flag(12, "rounds that count", 3, 1000)

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

def report(what, found, slow, fast):
    """Says how many times as fast `fast` is, and returns it: the median over rounds"""
    ratios = [a / b for a, b in zip(found[slow], found[fast])]
    low, middle, high = statistics.quantiles(ratios, n=4)
    say(f"{what}: {middle:.3f} times as fast ({low:.3f} to {high:.3f})")
    return middle

def make(residual, n_layer, n_embd, **options):
    return GPT(GPTConfig(residual, n_layer, n_embd=n_embd, block_size=T, vocab_size=V, **options))

def trainer(model):
    """-> step(x, y), a whole step of training"""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), fused=True)
    def step(x, y):
        model(x, y)[1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step

@torch.no_grad()
def half_skips(model, x):
    """-> the ByGain with which a model skips half of its sublayer runs on x, and their Runner"""
    low, high = 0.0, 4.0
    for _ in range(16):
        decider = ByGain(model.config, (low + high) / 2)
        runner = Runner(model, decider)
        model(x, runner=runner)
        if runner.skipped() < 0.5:
            low = decider.below
        else:
            high = decider.below
    return decider, runner

# -------------------------------------------------------------------------------- the comparisons

def training(args):
    x, y = torch.randint(V, (2, B, T), generator=torch.Generator().manual_seed(0))
    for n_embd in 128, 256:
        models = {name: make(name, 12, n_embd)
                  for name in ("pre", "nag", "attnres", "attnres:group=3")}
        models["nag that pays"] = make("nag", 12, n_embd, gain_cost=0.1)
        if args.nanogpt:
            theirs = SimpleNamespace(**runpy.run_path(args.nanogpt))
            models["nanoGPT"] = theirs.GPT(theirs.GPTConfig(
                T, V, n_layer=12, n_head=4, n_embd=n_embd, dropout=0.0, bias=False))
        found = times({name: functools.partial(trainer(model), x, y)
                       for name, model in models.items()}, args.rounds)
        pairs = [("nag", "pre"), ("nag that pays", "nag"), ("attnres", "pre"),
                 ("attnres:group=3", "pre"), ("pre", "nanoGPT")]
        for ours, other in pairs:
            if other in models:
                report(f"training 12 x {n_embd}: {ours} against {other}", found, other, ours)

def skipping(args):
    """A nag of 12 x 256 that pays for gain, where half is skipped: how much of the saving that
    FLOPs predict can be measured"""
    model = make("nag", 12, 256, gain_cost=0.1)
    train_step = trainer(model)
    windows = dataset.windows_of(ROOT / "data/stdlib", "train", T, 60 * B)
    for x, y in zip(*(tokens.split(B) for tokens in windows)):
        train_step(x, y)
    decider, runner = half_skips(model.eval(), x)
    predicted = 1 - flops_per_token(model, runner=runner) / flops_per_token(model)

    @torch.no_grad()
    def prefill(decider):
        model(x, runner=Runner(model, decider))

    def forward_and_backward(decider):
        model(x, y, runner=Runner(model, decider))[1].backward()
        model.zero_grad(set_to_none=True)

    for program in prefill, forward_and_backward:
        found = times({"dense": lambda: program(None), "skips": lambda: program(decider)},
                      args.rounds)
        faster = report(f"skipping half, {program.__name__}", found, "dense", "skips")
        share = (1 - 1 / faster) / predicted
        say(f"    {share:.2f} of what FLOPs predict: {predicted:.3f} of them are saved")

def decoding(args):
    """48 tokens, half skipped or dense"""
    model = make("nag", 24, 384, n_head=6).eval()
    x = torch.randint(256, (8, T), generator=torch.Generator().manual_seed(0))
    decider, _ = half_skips(model, x)
    prompt = x[:1, :8]
    found = times({"dense": lambda: model.generate(prompt, 48),
                   "skips": lambda: model.generate(prompt, 48, decider=decider)}, args.rounds)
    report("decoding 24 x 384, half skipped against dense", found, "dense", "skips")

def main(argv=None):
    args, = parse((SpeedConfig,), argv, __doc__)
    if args.nanogpt and not Path(args.nanogpt).is_file():   # now, not after minutes
        refuse(f"--nanogpt {args.nanogpt}: no such file; name model.py of a copy of nanoGPT")
    say(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]}, {args.rounds} rounds")
    for compare in skipping, training, decoding:
        if args.only in ("all", compare.__name__):
            compare(args)

if __name__ == "__main__":
    start(main)
