"""
How fast it is: ratios of programs that run in turn.

    python results/speed.py                                     # 20 minutes on two idle cores
    python results/speed.py --nanogpt nanoGPT/model.py          # also a copy of nanoGPT's model
    python results/speed.py --device cuda --nanogpt ...         # GPT-2 small on a GPU, 4 minutes
    python results/speed.py --device cuda --only kernels        # the ops of kernels.py
    python results/speed.py --device cuda --seconds 45 --data data/stdlib-gpt2 --nanogpt ...
                                          # losses after so many seconds; three rates, three seeds

Protocol. The programs of a comparison run in turn, round after round, so what else the machine does
hits all of them. Two rounds do not count. A number is the median over rounds of the ratio of two
times of one round. Beside it stands its middle half: if that is wide, the machine was not idle.
"training" is whole iterations. Models are new, but the one whose skipping is measured has trained
for 60 iterations on data/stdlib (python prepare.py stdlib). The angle below which half is skipped
is found by bisection. A predicted saving is that of the FLOPs that run.
"""
import math
import os
import runpy
import statistics
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import kernels
import prepare
from flags import flag, parse, refuse, start
from model import ByGain, GPT, GPTConfig, Trip, flops_per_token
from train import TrainConfig, get_batch, lr_factor, make_optimizers, make_ready, say

@dataclass
class SpeedConfig:
    nanogpt: str = flag("", "model.py of a copy of nanoGPT; without it that comparison is left out")
    device: Literal["cpu", "cuda"] = flag("cpu", "where it runs")
    only: Literal["all", "training", "skipping", "decoding", "kernels"] = flag(
        "all", "one of the comparisons; on a GPU there are training and kernels")
    rounds: int = flag(12, "rounds that count", 3, 1000)
    seconds: float = flag(0.0, "compare losses after so many seconds of training", 0, 1e5)
    data: str = flag("data/stdlib", "what --seconds trains on")

@dataclass
class Size:
    """A batch is n_parts times n_sequences of T tokens."""
    n_layer: int = 12
    n_head: int = 4
    n_embd: int = 128
    T: int = 128
    vocab_size: int = 320
    n_sequences: int = 16
    n_parts: int = 1

GPT2_SMALL = Size(12, 12, 768, 1024, 50304, 16, 4)
TINY = Size(2, 2, 16, 32, 320, 4, 2)   # On a CPU, only to see that this file works.

# ------------------------------------------------------------------------ programs, and their times

# A program is a model in training: loss(x, y) -> the loss, what it trains with, and its module.

def ours(residual, size, device="cpu", optimizer="adamw", lr=1e-3, seed=1, **options):
    """As train.py has it, with --compile on a GPU"""
    model = GPT(GPTConfig(residual, size.n_layer, size.n_head, size.n_embd, size.T,
                          size.vocab_size, seed=seed, **options))
    config = TrainConfig(optimizer=optimizer, lr=lr, compile=device == "cuda")
    _, call = make_ready(model, config, device)
    return SimpleNamespace(module=model, loss=lambda x, y: call(x, y)[1],
                           optimizers=make_optimizers(model, config))

def nanogpt(path, size, device="cpu", lr=1e-3, seed=1):
    """As nanoGPT's train.py has it: compiled and with autocast on a GPU"""
    theirs = SimpleNamespace(**runpy.run_path(path))
    torch.manual_seed(seed)
    model = theirs.GPT(theirs.GPTConfig(size.T, size.vocab_size, size.n_layer, size.n_head,
                                        size.n_embd, dropout=0.0, bias=False)).to(device)
    call = torch.compile(model) if device == "cuda" else model
    def loss(x, y):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return call(x, y)[1]
    optimizer = torch.optim.AdamW(model.parameters(), lr, (0.9, 0.95), weight_decay=0.1, fused=True)
    for group in optimizer.param_groups:
        group["peak_lr"] = lr   # as in train.py
    return SimpleNamespace(module=model, loss=loss, optimizers=[optimizer])

def iteration(program, batch, factor=1.0):
    """A whole one. batch: a list of its parts, (x, y); factor: learning rate / its peak"""
    for x, y in batch:
        (program.loss(x, y) / len(batch)).backward()
    torch.nn.utils.clip_grad_norm_(program.module.parameters(), 1.0)
    for optimizer in program.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

def now():
    if torch.cuda.is_available():
        torch.cuda.synchronize()   # A GPU works on after a call has returned.
    return time.perf_counter()

def times(functions, rounds):
    """{name: function} -> {name: seconds in each round}"""
    found = {name: [] for name in functions}
    for i in range(rounds + 2):
        for name, function in functions.items():
            begin = now()
            function()
            if i >= 2:
                found[name].append(now() - begin)
    return found

def ratio(found, slow, fast):
    """-> how many times as fast `fast` is: the lower quartile over rounds, the median, the upper"""
    return statistics.quantiles([a / b for a, b in zip(found[slow], found[fast])], n=4)

def report(what, dense, skips, rounds):
    """Prints, and returns, how many times as fast the function is that skips half"""
    low, middle, high = ratio(times(dict(dense=dense, skips=skips), rounds), "dense", "skips")
    say(f"{what}, half skipped: {middle:.3f} times as fast ({low:.3f} to {high:.3f})")
    return middle

# --------------------------------------------------------------------------------- whole iterations

PROGRAMS = dict(cpu=["pre", "nag", "nag that pays", "attnres", "attnres:group=3"],
                cuda=["pre", "nag", "attnres:group=3", "review", "hyper"])

def training(args):
    sizes = [GPT2_SMALL] if args.device == "cuda" else [Size(), Size(n_embd=256)]
    for size in sizes:
        say(f"training {size.n_layer} x {size.n_embd}:")
        compare_programs(args, size)

def compare_programs(args, size):
    """Prints a table: tokens a second, and times as fast as another program; peak memory on a GPU;
    seconds until a program's second iteration is done, so with compiling"""
    tokens = torch.randint(size.vocab_size, (size.n_parts, 2, size.n_sequences, size.T))
    batch = [(x, y) for x, y in tokens.to(args.device)]
    makers = {name: partial(ours, name, size, args.device) for name in PROGRAMS[args.device]}
    if "nag that pays" in makers:
        makers["nag that pays"] = partial(ours, "nag", size, args.device, gain_cost=0.1)
    if args.nanogpt:
        makers["nanoGPT"] = partial(nanogpt, args.nanogpt, size, args.device)
    iterations, memory, ready = {}, {}, {}
    for name, make in makers.items():
        begin, before = now(), torch.cuda.memory_allocated()   # by the programs before it
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        iterations[name] = partial(iteration, make(), batch)
        iterations[name]()
        iterations[name]()
        ready[name] = now() - begin
        memory[name] = torch.cuda.max_memory_allocated() - before
    found = times(iterations, args.rounds)
    say("| program | tokens/s | times as fast (middle half) | peak memory | seconds until ready |")
    say("| --- | --- | --- | --- | --- |")
    for name, seconds in found.items():
        other = {"pre": "nanoGPT", "nag that pays": "nag"}.get(name, "pre")
        low, middle, high = ratio(found, other, name) if other in found else (1.0, 1.0, 1.0)
        speed = tokens[:, 0].numel() / statistics.median(seconds)
        peak = f"{memory[name] / 2 ** 30:.1f} GiB" if args.device == "cuda" else "not measured"
        say(f"| {name} | {speed:,.0f} | {middle:.3f} of {other} ({low:.3f} to {high:.3f}) | "
            f"{peak} | {ready[name]:.0f} |")

# ------------------------------------------------------------------------------ skipping, on a CPU

@torch.no_grad()
def half_skips(model, x):
    """-> the ByGain with which a model skips half of its sublayer runs on x, and their Trip"""
    low, high = 0.0, 4.0
    for _ in range(16):
        below = (low + high) / 2
        decider = ByGain(model.config, below=below)
        trip = Trip(model, decider)
        model(x, trip=trip)
        if trip.skipped() < 0.5:
            low = below
        else:
            high = below
    return decider, trip

def skipping(args):
    """A nag of 12 x 256 that pays for gain, where half is skipped: how much of the saving that
    FLOPs predict can be measured"""
    size = Size(n_embd=256)
    program = ours("nag", size, gain_cost=0.1)
    windows = prepare.windows_of(ROOT / "data/stdlib", "train", size.T, 60 * size.n_sequences)
    for x, y in zip(*(tokens.split(size.n_sequences) for tokens in windows)):
        iteration(program, [(x, y)])
    model = program.module.eval()
    decider, trip = half_skips(model, x)
    predicted = 1 - flops_per_token(model, trip) / flops_per_token(model)

    @torch.no_grad()
    def prefill(decider):
        model(x, trip=Trip(model, decider))

    def forward_and_backward(decider):
        model(x, y, trip=Trip(model, decider))[1].backward()
        model.zero_grad(set_to_none=True)

    for function in prefill, forward_and_backward:
        faster = report(function.__name__, partial(function, None), partial(function, decider),
                        args.rounds)
        share = (1 - 1 / faster) / predicted
        say(f"    {share:.2f} of what FLOPs predict: {predicted:.3f} of them are saved")

def decoding(args):
    """48 tokens of a nag of 24 x 384, which hasn't trained"""
    model = ours("nag", Size(24, 6, 384)).module.eval()
    x = torch.randint(256, (8, 128), generator=torch.Generator().manual_seed(0))
    decider, _ = half_skips(model, x)
    report("decoding 24 x 384", lambda: model.generate(x[:1, :8], 48),
           lambda: model.generate(x[:1, :8], 48, decider=decider), args.rounds)

# --------------------------------------------------------------------------------- ops, on a GPU

def ops(args, N=16384, C=1024, n=9):
    """Prints milliseconds of both ops, forward + backward, and which share of the speed of a plain
    copy the kernels reach. The timer replays what the GPU was told: Python's time isn't in it."""
    from triton.testing import do_bench_cudagraph as milliseconds
    nag = GPT(GPTConfig("nag", 1, kernels="off")).blocks[0].attn_residual
    def nag_definition(direction, log_length, update, gain):
        return nag((direction, log_length), lambda direction: update, gain)
    def depth_sum_definition(weights, *sources):
        return (kernels.depth_sum_definition(weights, sources),)
    def depth_sum(weights, *sources):
        return (kernels.depth_sum(weights, sources),)
    large = torch.empty(N * C * 16, device=args.device)
    copied = 2 * large.nbytes / milliseconds(large.clone)   # bytes a millisecond
    for dtype in torch.float32, torch.bfloat16:
        rows = torch.randn(n, N, C, dtype=dtype, device=args.device)
        scalars = torch.rand(n, N, 1, device=args.device)
        # How many rows a kernel moves for each of the N, forward and backward: see kernels.py.
        for op, definition, inputs, moved in [
                (kernels.nag_write, nag_definition, (rows[0], scalars[0], rows[1], scalars[1]),
                 (3, 5)),
                (depth_sum, depth_sum_definition, (scalars, *rows), (n + 1, 2 * n + 1))]:
            inputs = [x.clone().requires_grad_() for x in inputs]
            for way, function in ("eager", definition), ("compiled", torch.compile(definition)), (
                    "kernel", op):
                def both():
                    outputs = function(*inputs)
                    torch.autograd.grad(outputs, inputs, outputs)   # Any gradient of them will do.
                forward = milliseconds(lambda: function(*inputs))
                backward = milliseconds(both) - forward
                say(f"{op.__name__:9} {str(dtype):14} {way:8} {forward:.3f} + {backward:.3f} ms")
            shares = [number * rows[0].nbytes / copied / ms
                      for number, ms in zip(moved, (forward, backward))]
            say(f"of a copy's speed: {shares[0]:.0%} and {shares[1]:.0%}")

# ----------------------------------------------------------------------- losses at equal seconds

RATES = dict(adamw=[5e-4, 1e-3, 2e-3], muon=[2.5e-3, 5e-3, 1e-2])

def losses(args, size):
    """For each optimizer and rate, the loss (nats a token, on 96 validation windows) after
    --seconds of training, for three seeds. The clock starts when all is compiled."""
    vocab_size = math.ceil(prepare.load_meta(args.data)["vocab_size"] / 64) * 64
    size = replace(size, vocab_size=vocab_size)
    makers = {(f"pre, {optimizer}", rate): partial(ours, "pre", size, args.device, optimizer, rate)
              for optimizer, rates in RATES.items() for rate in rates}
    if args.nanogpt:
        for rate in RATES["adamw"]:
            makers["nanoGPT", rate] = partial(nanogpt, args.nanogpt, size, args.device, lr=rate)
    data = SimpleNamespace(shards=prepare.open_split(args.data, "train", size.T),
                           val=prepare.windows_of(args.data, "val", size.T, 96))
    for (name, rate), make in makers.items():
        found = [loss_after(args, size, make(seed=seed), data, seed) for seed in (1, 2, 3)]
        nats, counts = zip(*found)
        say(f"{name}, rate {rate:g}: {statistics.mean(nats):.3f} nats ({min(nats):.3f} to "
            f"{max(nats):.3f}), {statistics.mean(counts) / 1e6:.1f}M tokens")

def loss_after(args, size, program, data, seed):
    """Trains a program -> its loss, and how many tokens it has seen"""
    config = SimpleNamespace(block_size=size.T, seed=seed)   # what get_batch asks of a model
    n_sequences = size.n_parts * size.n_sequences
    def take_step(step, factor):
        iteration(program, [get_batch(data, config, n_sequences, step, part, size.n_parts,
                                      args.device) for part in range(size.n_parts)], factor)

    take_step(0, 0.0)   # At a rate of 0 weights stay as they are.
    take_step(0, 0.0)
    begin, step, progress = now(), 0, 0.0
    while progress < 1:
        take_step(step, lr_factor(TrainConfig(), progress))
        step += 1
        progress = (now() - begin) / args.seconds
    program.module.eval()
    with torch.no_grad():
        parts = [tokens.to(args.device).split(size.n_sequences) for tokens in data.val]
        found = [program.loss(x, y).item() * len(x) for x, y in zip(*parts)]
    return sum(found) / len(data.val[0]), step * n_sequences * size.T

# ------------------------------------------------------------------------------------- the command

def main(argv=None):
    [args] = parse([SpeedConfig], argv, __doc__)
    if args.nanogpt and not Path(args.nanogpt).is_file():   # now, not after minutes
        refuse(f"--nanogpt {args.nanogpt}: no such file; name model.py of a copy of nanoGPT")
    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        refuse("--device cuda: torch sees no CUDA device; use --device cpu")
    comparisons = dict(skipping=skipping, training=training, decoding=decoding)
    if on_gpu:
        comparisons = dict(training=training, kernels=ops)
    if args.only not in ("all", *comparisons):
        refuse(f"--only {args.only}: is not for --device {args.device}; choose from "
               f"{', '.join(comparisons)}")
    say(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]}, {args.rounds} rounds")
    if args.seconds:
        comparisons = dict(losses=partial(losses, size=GPT2_SMALL if on_gpu else TINY))
    for name, compare in comparisons.items():
        if args.seconds or args.only in ("all", name):
            compare(args)

if __name__ == "__main__":
    start(main)
