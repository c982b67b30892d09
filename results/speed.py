"""
How fast it is: ratios of programs that run in turn.

    python results/speed.py --old ../old --nanogpt ../nanoGPT/model.py     # 12 minutes on a CPU
    python results/speed.py --only 12x256 --programs pre nag --dtype bfloat16 --compile
    python results/speed.py --only taper                   # latency and tokens/s of --taper linear
    python results/speed.py --seconds 60 --nanogpt ..      # 12 minutes: bits per byte after 60 s
    python results/speed.py --device cuda --nanogpt ..     # 4 minutes: GPT-2 small, and kernels
    python results/speed.py --device cuda --seconds 45 --data data/stdlib-gpt2 --nanogpt ..

A program is a model in training. Its number is the time of a whole iteration: forward, backward,
optimizer. Programs of a table run in turn, round after round, so what else the machine does hits
all of them. "Times as fast as B" is the time of B / the time of the program in one round: the
median over rounds, and the middle half of them in brackets. If that is wide, the machine was not
idle. Ours train with muon, and nag pays for its gains; nanoGPT has AdamW.
"""
import importlib
import math
import os
import runpy
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import kernels
import prepare
import train
from flags import flag, parse, start
from model import GPT, Decider, GPTConfig, Trip, flops_per_token
from train import say

def size(n_layer, n_head, n_embd, block_size=128, vocab_size=320):   # what all GPTs ask for
    return dict(n_layer=n_layer, n_head=n_head, n_embd=n_embd, block_size=block_size,
                vocab_size=vocab_size)

SIZES = {"6x64": size(6, 4, 64),   # the puzzle
         "12x128": size(12, 4, 128), "12x256": size(12, 4, 256),
         "12x768": size(12, 12, 768, 1024, 50304)}   # GPT-2 small
SEQUENCES, PARTS = 16, dict(cpu=1, cuda=4)   # of a part of a batch, and parts of a batch
ONLY = dict(cpu=["6x64", "12x128", "12x256", "skipping", "taper"], cuda=["12x768", "kernels"])
PROGRAMS = ["pre", "nag", "attnres:group=3", "gated", "hyper", "review"]

# Peak learning rates for --seconds. Ours is the usual one; nanoGPT may have the best of its three.
RATES = dict(cpu=dict(ours=[2e-2], nanoGPT=[5e-4, 1e-3, 2e-3]),
             cuda=dict(ours=[1e-2], nanoGPT=[5e-4, 1e-3, 2e-3]))

@dataclass
class SpeedConfig:
    old: str = flag("", "folder of an older checkout, to compare with")
    nanogpt: str = flag("", "model.py of a copy of nanoGPT, to compare with")
    device: Literal["cpu", "cuda"] = flag("cpu", "where it runs; on a GPU all is compiled")
    only: list = flag(None, f"some of {' '.join(ONLY['cpu'])}; on a GPU: 12x768 kernels")
    programs: list = flag(None, f"some residuals, in place of {' '.join(PROGRAMS)}")
    dtype: Literal["auto", "float32", "bfloat16"] = flag("auto", "of ours: --dtype of train.py")
    compile: bool = flag(False, "of ours: --compile of train.py")
    rounds: int = flag(12, "rounds that count, after two that don't", 3, 1000)
    seconds: float = flag(0.0, "compare bits per byte after so many seconds of training", 0, 1e5)
    data: str = flag("data/stdlib", "what is trained on, where it matters")

    def problems(self):
        for name in self.only or []:
            if name not in ONLY[self.device]:
                yield (f"--only {name}: is not for --device {self.device}; choose from "
                       f"{', '.join(ONLY[self.device])}")
        if self.nanogpt and not Path(self.nanogpt).is_file():   # now, not after minutes
            yield f"--nanogpt {self.nanogpt}: no such file; name model.py of a copy of nanoGPT"
        if self.old and not Path(self.old, "train.py").is_file():
            yield f"--old {self.old}: has no train.py; name the folder of an older checkout"

# ---------------------------------------------------------------------------------------- programs

def our_program(args, size, residual, code=train, lr=2e-2, seed=1, **options):
    """As train.py has it. code: the module train, ours or an older one (in float32, uncompiled)"""
    config = code.TrainConfig(optimizer="muon", lr=lr)
    if code is train:
        config.dtype, config.compile = args.dtype, args.compile or args.device == "cuda"
    if residual == "nag":
        options.setdefault("gain_cost", 0.1)
    model = code.GPT(code.GPTConfig(residual, **size, seed=seed, **options))
    ready = code.make_ready(model, config, args.device)
    call = ready[1] if isinstance(ready, tuple) else ready   # It was one thing before.

    def loss(x, y):
        trip = code.needed_trip(model) if code is train else None
        if trip is None:
            return call(x, y)[1]
        _, found = call(x, y, trip=trip)
        # Whatever else train.py does with a trip
        trip.skipped(), trip.mean_gain(), flops_per_token(model, trip)
        model.decider.after_iteration([trip], float)
        return found

    return SimpleNamespace(model=model, loss=loss, optimizers=code.make_optimizers(model, config))

def old_train(folder):
    """The module train of an older checkout. Its modules have the names of ours, so ours step aside
    while Python imports them."""
    names = "flags", "kernels", "model", "prepare", "train"
    ours = {name: sys.modules.pop(name) for name in names}
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("train")
    finally:
        sys.path.remove(folder)
        sys.modules.update(ours)

def nanogpt_program(args, size, lr=1e-3, seed=1):
    """As nanoGPT's train.py has it: compiled and with autocast on a GPU"""
    theirs = SimpleNamespace(**runpy.run_path(args.nanogpt))
    torch.manual_seed(seed)
    model = theirs.GPT(theirs.GPTConfig(**size, dropout=0.0, bias=False)).to(args.device)
    optimizer = model.configure_optimizers(0.1, lr, (0.9, 0.95), args.device)
    on_gpu = args.device == "cuda"
    call = torch.compile(model) if on_gpu else model

    def loss(x, y):
        with torch.autocast(args.device, torch.bfloat16, enabled=on_gpu):
            return call(x, y.contiguous())[1]   # It can't read windows that overlap.

    for group in optimizer.param_groups:
        group["peak_lr"] = lr   # as in our train.py
    return SimpleNamespace(model=model, loss=loss, optimizers=[optimizer])

def random_batch(args, size):
    """-> its parts, (x, y)"""
    shape = PARTS[args.device], 2, SEQUENCES, size["block_size"]
    return [(x, y) for x, y in torch.randint(size["vocab_size"], shape).to(args.device)]

def iteration(program, batch, factor=1.0):
    """A whole one. factor: learning rate / its peak"""
    for x, y in batch:
        (program.loss(x, y) / len(batch)).backward()
    torch.nn.utils.clip_grad_norm_(program.model.parameters(), 1.0)
    for optimizer in program.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

# ------------------------------------------------------------------------------------------- times

def now():
    """Seconds. With one thread on a CPU, those that this process has had of a core: so programs
    beside it disturb less."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()   # A GPU works on after a call has returned.
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()

def times(functions, rounds):
    """{name: function} -> {name: seconds in each round}, without the first two"""
    found = {name: [] for name in functions}
    for _ in range(rounds + 2):
        for name, function in functions.items():
            begin = now()
            function()
            found[name].append(now() - begin)
    return {name: seconds[2:] for name, seconds in found.items()}

def times_as_fast(found, name, other):
    """-> in words: the median over rounds, and the middle half"""
    if name == other or other not in found:
        return ""
    ratios = [slow / fast for slow, fast in zip(found[other], found[name])]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"

def compare_training(args, size):
    """Prints a table: how many times as fast a residual is as our pre, as itself in the older
    checkout, and as nanoGPT; on a GPU also tokens a second, peak memory in GiB, and seconds until
    the second iteration is done, so with compiling"""
    on_gpu, makers = args.device == "cuda", {}
    for residual in args.programs or PROGRAMS:
        makers[residual] = partial(our_program, args, size, residual)
        if args.old and residual.partition(":")[0] in args.old.RESIDUALS:
            makers[f"old {residual}"] = partial(our_program, args, size, residual, args.old)
    if args.nanogpt:
        makers["nanoGPT"] = partial(nanogpt_program, args, size)
    batch = random_batch(args, size)
    functions, memory, ready = {}, {}, {}
    for name, make in makers.items():
        begin, before = now(), torch.cuda.memory_allocated()   # by the programs before it
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        functions[name] = partial(iteration, make(), batch)
        functions[name]()
        functions[name]()
        ready[name] = now() - begin
        memory[name] = (torch.cuda.max_memory_allocated() - before) / 2 ** 30
    found = times(functions, args.rounds)
    say(f"| times as fast as | our pre | the older one | nanoGPT |"
        f"{' tokens/s | GiB | ready after |' if on_gpu else ''}")
    say("| --- " * (7 if on_gpu else 4) + "|")
    for name in [name for name in found if not name.startswith("old ")]:
        row = [times_as_fast(found, name, other) for other in ("pre", f"old {name}", "nanoGPT")]
        if on_gpu:
            tokens_s = len(batch) * batch[0][0].numel() / statistics.median(found[name])
            row += [f"{tokens_s:,.0f}", f"{memory[name]:.1f}", f"{ready[name]:.0f} s"]
        say(f"| {name} | {' | '.join(row)} |")

# -------------------------------------------------------------------- on a CPU: skipping, and taper

def say_ratio(what, rounds, ours, theirs):
    found = times(dict(ours=ours, theirs=theirs), rounds)
    say(f"{what}: {times_as_fast(found, 'ours', 'theirs')} times as fast")

def compare_skipping(args):
    """Says how many times as fast NAG is where tokens skip, beside the same where all run. The
    models have trained a little: a new one would skip whole sublayers, which is easier."""
    def saved(model, x):   # in words
        trip = Trip(model)
        with torch.no_grad():
            model(x, trip=trip)
        share = 1 - flops_per_token(model, trip) / flops_per_token(model)
        return f"{trip.skipped():.0%} skipped, {share:.0%} of FLOPs saved"

    small, large = SIZES["6x64"], SIZES["12x256"]
    as_puzzle = dict(mlp_ratio=2.0, gain_cost=0.0)
    skips = our_program(args, small, "nag", mod="gain:rate=0.25", **as_puzzle)
    dense = our_program(args, small, "nag", **as_puzzle)
    x, y = train_a_little(args, skips, small)
    say_ratio(f"the puzzle, training: {saved(skips.model, x)}", args.rounds,
              lambda: iteration(skips, [(x, y)]), lambda: iteration(dense, [(x, y)]))

    for rate in 0.25, 0.5:
        program = our_program(args, large, "nag", mod=f"gain:rate={rate}", gain_cost=0.0)
        x, y = train_a_little(args, program, large)
        model = program.model.eval()
        all_run = partial(Trip, model, Decider())
        with torch.no_grad():
            say_ratio(f"12 x 256, prefill: {saved(model, x)}", args.rounds,
                      lambda: model(x), lambda: model(x, trip=all_run()))
            say_ratio(f"12 x 256, decoding: {saved(model, x)}", args.rounds,
                      lambda: model.generate(x[:1, :8], 48),
                      lambda: model.generate(x[:1, :8], 48, make_trip=all_run))

def train_a_little(args, program, size, steps=60):
    """-> the last batch"""
    tokens = prepare.windows_of(args.data, "train", size["block_size"], steps * SEQUENCES)
    for batch in zip(*(each.split(SEQUENCES) for each in tokens)):
        iteration(program, [batch])
    return batch

def compare_taper(args):
    """Says how many times as fast PreNorm is if its MLPs become narrower with depth"""
    size = SIZES["12x256"]
    taper, even = (our_program(args, size, "pre", taper=kind) for kind in ("linear", "none"))
    batch = random_batch(args, size)
    say_ratio("taper, training", args.rounds,
              lambda: iteration(taper, batch), lambda: iteration(even, batch))
    ours, theirs, x = taper.model.eval(), even.model.eval(), batch[0][0]
    with torch.no_grad():
        say_ratio("taper, prefill of one sequence", args.rounds,
                  lambda: ours(x[:1]), lambda: theirs(x[:1]))
        say_ratio("taper, decoding", args.rounds,
                  lambda: ours.generate(x[:1, :8], 48), lambda: theirs.generate(x[:1, :8], 48))

# ------------------------------------------------------------------------------ kernels, on a GPU

def compare_kernels(args, N=16384, C=1024, n=9):
    """Says how many milliseconds both ops take, forward and backward, and which share of the speed
    of a plain copy they reach. The timer replays what the GPU was told, without Python's time."""
    from triton.testing import do_bench_cudagraph as milliseconds
    rows = [torch.randn(N, C, dtype=torch.bfloat16, device=args.device) for _ in range(n)]
    scalars = [torch.rand(N, 1, device=args.device) for _ in range(n)]
    move = milliseconds(torch.stack(rows).clone) / (2 * n)   # It reads n times N rows, and writes.

    def depth_sum(weights, *sources, op=kernels.depth_sum):
        return (op(weights, sources),)

    # An op, its definition, its inputs, and how often it moves N rows, forward and backward
    for op, definition, inputs, n_moves in [
            (kernels.nag_write, GPT(GPTConfig("nag", 1)).blocks[0].attn_residual.write,
             [rows[0], scalars[0], rows[1], scalars[1]], 3 + 5),
            (depth_sum, partial(depth_sum, op=kernels.depth_sum_definition),
             [torch.stack(scalars), *rows], n + 1 + 2 * n + 1)]:
        inputs = [each.clone().requires_grad_() for each in inputs]
        ways = dict(eager=definition, compiled=torch.compile(definition), kernel=op)
        for way, function in ways.items():
            def both():
                outputs = function(*inputs)
                torch.autograd.grad(outputs, inputs, outputs)   # Any gradient of them will do.
            ms = milliseconds(both)
            say(f"{op.__name__}, {way}: {ms:.3f} ms, {n_moves * move / ms:.0%} of a copy's speed")

# ------------------------------------------------------------------------- bits at equal seconds

def compare_bits(args, size):
    """Says which bits per byte of validation windows pre, with our defaults, and nanoGPT, with each
    of its rates, have after --seconds of training. Three seeds, and the same batches for all."""
    data = train.Data(SimpleNamespace(data=args.data, eval_windows=128), size["block_size"])
    size = size | dict(vocab_size=math.ceil(data.vocab_size / 64) * 64)
    makers = dict(ours=partial(our_program, args, size, "pre"))
    if args.nanogpt:
        makers["nanoGPT"] = partial(nanogpt_program, args, size)
    found = {}
    for seed in 1, 2, 3:
        for name, make in makers.items():
            for lr in RATES[args.device][name]:
                program = make(lr=lr, seed=seed)
                steps = train_for_seconds(args, SimpleNamespace(**size, seed=seed), program, data)
                bits = bits_per_byte(args, program.model.eval(), data)
                found.setdefault(f"{name}, rate {lr:g}", []).append(bits)
                say(f"{name}, rate {lr:g}, seed {seed}: {bits:.3f} after {steps:,} iterations")
    for name, bits in found.items():
        say(f"{name}: {statistics.mean(bits):.3f} bits per byte "
            f"({min(bits):.3f} to {max(bits):.3f})")

def train_for_seconds(args, model_config, program, data):
    """-> how many iterations. The clock starts when all is compiled; warmup and cosine follow it."""
    def take_step(step, factor):
        n_parts = PARTS[args.device]
        iteration(program, [train.get_batch(data, model_config, n_parts * SEQUENCES, step, part,
                                            n_parts, args.device) for part in range(n_parts)],
                  factor)

    take_step(0, 0.0)   # At a rate of 0 weights stay as they are.
    take_step(0, 0.0)
    begin, step, progress = now(), 0, 0.0
    while progress < 1:
        take_step(step, train.lr_factor(train.TrainConfig(), progress))
        step += 1
        progress = (now() - begin) / args.seconds
    return step

@torch.no_grad()
def bits_per_byte(args, model, data):
    x, y = (tokens.to(args.device) for tokens in data.val)
    losses = [model(xi, yi.contiguous())[1].item() * len(xi)
              for xi, yi in zip(x.split(8), y.split(8))]
    bytes_per_token = data.token_bytes[y.cpu()].sum().item() / y.numel()
    return sum(losses) / len(x) / math.log(2) / bytes_per_token

# ------------------------------------------------------------------------------------- the command

def main(argv=None):
    [args] = parse([SpeedConfig], argv, __doc__)
    train.set_up_device(args.device, 128)   # One thread, unless OMP_NUM_THREADS is set.
    machine = f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
    if args.device == "cuda":
        machine = torch.cuda.get_device_name()
    elif not torch.cpu._is_amx_tile_supported():
        machine += ", without AMX: so bfloat16 is slow"
    say(f"{machine}; torch {torch.__version__}; {args.rounds} rounds")
    torch._dynamo.config.recompile_limit = 64   # All models share GPT.forward; 8 is too low.
    if args.seconds:
        compare_bits(args, SIZES["12x128" if args.device == "cpu" else "12x768"])
        return
    args.old = args.old and old_train(args.old)
    others = dict(skipping=compare_skipping, taper=compare_taper, kernels=compare_kernels)
    for name in args.only or ONLY[args.device]:
        if name in others:
            others[name](args)
        else:
            say(f"{name}, training:")
            compare_training(args, SIZES[name])

if __name__ == "__main__":
    start(main)
