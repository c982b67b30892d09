"""Measures how fast rules train: whole iterations (forward, backward, optimizer) of programs that
run in turn, round after round, so whatever else the machine does affects all of them.

    python results/speed.py                                    # a CPU: rules, skipping, taper
    python results/speed.py --nanogpt ../nanoGPT/model.py      # beside nanoGPT
    python results/speed.py --only rules --n_embd 256 --dtype bfloat16 --compile
    python results/speed.py --device cuda --nanogpt model.py   # one GPU: GPT-2 small
    python results/speed.py --seconds 60 --nanogpt model.py    # bits per byte after 60 s

A ratio is the median over rounds, with the middle half of the rounds in parentheses; if that range
is wide, the machine was not idle. On a GPU, all programs use AdamW and bfloat16, and ours run eager
with the Triton kernels and compiled.
"""

import math
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
import prepare
from flags import UserError, flag, make, parse, run
from model import GPT, GPTConfig, Trace, flops_per_token, needs_trace
from train import TrainConfig, get_batch, lr_schedule, make_optimizers

RULES = "pre", "nag", "attnres:group=4", "hyper:kind=mhc", "gated"
CPU = dict(n_layer=12, n_head=4, n_embd=128, block_size=128, vocab_size=320, batch_size=16,
           grad_accum=1, optimizer="muon")
GPU = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304, batch_size=64,
           grad_accum=4, optimizer="adamw")   # GPT-2 small
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12}   # dense bfloat16
NANOGPT_LR = 5e-4, 1e-3, 2e-3   # for --seconds, nanoGPT may have the best of these

@dataclass
class SpeedConfig:
    only: Literal["all", "rules", "skipping", "taper"] = flag("all", "skipping and taper: CPU")
    rules: list = flag(None, f"residual connections, in place of {' '.join(RULES)}")
    nanogpt: str = flag("", "model.py of a copy of nanoGPT, to compare with")
    device: Literal["cpu", "cuda"] = flag("cpu", "cuda: GPT-2 small, eager and compiled")
    dtype: Literal["auto", "float32", "bfloat16"] = flag("auto", "of ours, on a CPU")
    compile: bool = flag(False, "on a CPU: ours compiled, too")
    rounds: int = flag(12, "rounds that count, after two that do not", 2, 1000)
    seconds: float = flag(0.0, "compare bits per byte after so many seconds of training", 0, 1e5)
    data: str = flag("data/stdlib", "what --seconds and skipping train on")
    n_layer: int = flag(0, "0: 12", 0, 4096)
    n_head: int = flag(0, "0: 4, or 12 on a GPU", 0, 1024)
    n_embd: int = flag(0, "0: 128, or 768", 0, 65536)
    block_size: int = flag(0, "0: 128, or 1024", 0, 2 ** 20)
    vocab_size: int = flag(0, "0: 320, or 50304", 0, 2 ** 24)
    batch_size: int = flag(0, "sequences per iteration, in all; 0: 16, or 64", 0, 1e6)
    grad_accum: int = flag(0, "micro-batches; 0: 1, or 4", 0, 1e6)

# -----------------------------------------------------------------------------
# programs: a model, loss(x, y) and optimizers

SHAPE = "n_layer", "n_head", "n_embd", "block_size", "vocab_size"

def our_program(args, size, residual="pre", compile=False, lr=2e-2, seed=1, **options):
    shape = {name: size[name] for name in SHAPE}
    model = GPT(GPTConfig(residual, **shape, seed=seed, **options)).to(args.device)
    if args.dtype == "bfloat16" or args.device == "cuda":
        model.compute_in(torch.bfloat16)
    call = torch.compile(model) if compile else model
    traces = []

    def loss(x, y):
        trace = Trace(model, progress=1.0) if needs_trace(model) else None
        if trace is not None:
            traces.append(trace)
        return call(x, y, trace=trace)[1]

    def after_iteration():   # as in train.py
        if traces:
            sum(flops_per_token(model, trace) for trace in traces)
            if hasattr(model.policy, "update"):
                model.policy.update(traces, lambda value: value)
            traces.clear()

    config = TrainConfig(optimizer=size["optimizer"], lr=lr)
    return SimpleNamespace(model=model, loss=loss, optimizers=make_optimizers(model, config),
                           after_iteration=after_iteration)

def nanogpt_program(args, size, lr=1e-3, seed=1):
    """As nanoGPT's train.py has it: compiled and with autocast on a GPU."""
    theirs = SimpleNamespace(**runpy.run_path(args.nanogpt))
    torch.manual_seed(seed)
    shape = {name: size[name] for name in SHAPE}
    model = theirs.GPT(theirs.GPTConfig(**shape, dropout=0.0, bias=False)).to(args.device)
    optimizer = model.configure_optimizers(0.1, lr, (0.9, 0.95), args.device)
    on_gpu = args.device == "cuda"
    call = torch.compile(model) if on_gpu else model

    def loss(x, y):
        with torch.autocast(args.device, torch.bfloat16, enabled=on_gpu):
            return call(x, y.contiguous())[1]

    for group in optimizer.param_groups:
        group["peak_lr"] = lr
    return SimpleNamespace(model=model, loss=loss, optimizers=[optimizer],
                           after_iteration=lambda: None)

def iteration(program, batch, factor=1.0):
    """batch: a list of micro-batches (x, y). factor: learning rate / peak"""
    for x, y in batch:
        (program.loss(x, y) / len(batch)).backward()
    program.after_iteration()
    torch.nn.utils.clip_grad_norm_(program.model.parameters(), 1.0)
    for optimizer in program.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

def random_batch(args, size):
    shape = size["grad_accum"], 2, size["batch_size"] // size["grad_accum"], size["block_size"]
    return [(x, y) for x, y in torch.randint(size["vocab_size"], shape, device=args.device)]

# -----------------------------------------------------------------------------
# times

def now():
    """Seconds. With one thread on a CPU, the time that this process has had of a core."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()

def measure(functions, rounds):
    """{name: function} -> {name: seconds of each round}, without the first two rounds"""
    seconds = {name: [] for name in functions}
    for _ in range(rounds + 2):
        for name, function in functions.items():
            begin = now()
            function()
            seconds[name].append(now() - begin)
    return {name: times[2:] for name, times in seconds.items()}

def ratio(seconds, name, other):
    """How many times as fast `name` is as `other`, in words"""
    if name == other or other not in seconds:
        return ""
    ratios = [slow / fast for slow, fast in zip(seconds[other], seconds[name])]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"

def compare_rules(args, size):
    """Prints tokens/s of each rule and how many times as fast as pre and as nanoGPT it is; on a GPU
    also peak memory, MFU (share of the card's peak FLOPs), and seconds until it is compiled."""
    on_gpu, makers = args.device == "cuda", {}
    for rule in args.rules or RULES:
        makers[rule] = partial(our_program, args, size, rule)
        if on_gpu or args.compile:
            makers[f"{rule}, compiled"] = partial(our_program, args, size, rule, compile=True)
    if args.nanogpt:
        makers["nanoGPT"] = partial(nanogpt_program, args, size)
    batch, functions, memory, ready, flops = random_batch(args, size), {}, {}, {}, {}
    for name, make_program in makers.items():
        begin, before = time.perf_counter(), torch.cuda.memory_allocated()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        try:   # one program out of memory must not cost the others their minutes on a card
            program = make_program()
            functions[name] = partial(iteration, program, batch)
            functions[name]()
            functions[name]()
        except RuntimeError as error:
            functions.pop(name, None)
            print(f"{name} fails: {str(error).splitlines()[0]}", flush=True)
            continue
        now()
        ready[name] = time.perf_counter() - begin
        memory[name] = (torch.cuda.max_memory_allocated() - before) / 2 ** 30
        flops[name] = 3 * flops_per_token(program.model) if hasattr(program.model, "blocks") else 0
        print(f"{name}: ready after {ready[name]:.0f} s", flush=True)
    seconds = measure(functions, args.rounds)
    first = next(iter(seconds))   # pre, if all goes well
    peak = next((value for card, value in PEAK_FLOPS.items()
                 if on_gpu and card in torch.cuda.get_device_name()), None)
    head = ["", "tokens/s", f"/ {first}", "/ nanoGPT", *["GiB", "MFU", "ready after"] * on_gpu]
    print("| " + " | ".join(head) + " |\n" + "| --- " * len(head) + "|")
    for name in seconds:
        tokens_s = sum(x.numel() for x, _ in batch) / statistics.median(seconds[name])
        row = [name, f"{tokens_s:,.0f}", *[ratio(seconds, name, other) for other in (first, "nanoGPT")]]
        if on_gpu:
            used = f"{flops[name] * tokens_s / peak:.0%}" if peak and flops[name] else ""
            row += [f"{memory[name]:.1f}", used, f"{ready[name]:.0f} s"]
        print("| " + " | ".join(row) + " |", flush=True)

# -----------------------------------------------------------------------------
# skipping and taper, on a CPU

def print_ratio(what, rounds, ours, theirs):
    print(f"{what}: {ratio(measure(dict(ours=ours, theirs=theirs), rounds), 'ours', 'theirs')} "
          f"times as fast", flush=True)

def compare_skipping(args, size):
    """nag that skips a quarter or a half of all sublayers, beside the same model that skips none.
    It has trained for 60 iterations: a new model would skip whole sublayers, which is easier."""
    shards = prepare.open_split(args.data, "train", size["block_size"])
    for rate in 0.25, 0.5:
        skips = our_program(args, size, "nag", mod=f"gate:rate={rate}")
        config = TrainConfig(batch_size=size["batch_size"])
        for step in range(60):
            x, y = get_batch(shards, skips.model.config, config, step, 0, args.device)
            iteration(skips, [(x, y)])
        dense = our_program(args, size, "nag")
        print_ratio(f"gate:rate={rate}, training", args.rounds,
                    lambda: iteration(skips, [(x, y)]), lambda: iteration(dense, [(x, y)]))
        model = skips.model.eval()
        all_run = partial(Trace, model, lambda trace: None)
        with torch.no_grad():
            print_ratio("  reading a prompt", args.rounds,
                        lambda: model(x), lambda: model(x, trace=all_run()))
            print_ratio("  sampling", args.rounds, lambda: model.generate(x[:1, :8], 48),
                        lambda: model.generate(x[:1, :8], 48, make_trace=all_run))

def compare_taper(args, size):
    """pre whose MLPs get narrower with depth, beside pre"""
    taper, even = (our_program(args, size, taper=kind) for kind in ("linear", "none"))
    batch = random_batch(args, size)
    print_ratio("taper, training", args.rounds,
                lambda: iteration(taper, batch), lambda: iteration(even, batch))
    ours, theirs, x = taper.model.eval(), even.model.eval(), batch[0][0][:1]
    with torch.no_grad():
        print_ratio("  reading a prompt", args.rounds, lambda: ours(x), lambda: theirs(x))
        print_ratio("  sampling", args.rounds, lambda: ours.generate(x[:, :8], 48),
                    lambda: theirs.generate(x[:, :8], 48))

# -----------------------------------------------------------------------------
# bits per byte at equal seconds

def compare_bits(args, size):
    """Three seeds, the same batches for all; ours at its default learning rate."""
    meta = prepare.load_meta(args.data)
    size = size | dict(vocab_size=64 * math.ceil(meta["vocab_size"] / 64))
    shards = prepare.open_split(args.data, "train", size["block_size"])
    x, y = prepare.windows_of(args.data, "val", size["block_size"], 128)
    token_bytes = prepare.token_bytes(meta["tokenizer"], meta["vocab_size"])
    bits_per_nat = y.numel() / token_bytes[y].sum().item() / math.log(2)
    on_gpu = args.device == "cuda"
    makers = {"ours": partial(our_program, args, size, compile=args.compile or on_gpu,
                              lr=1e-2 if on_gpu else 2e-2)}
    if args.nanogpt:
        makers |= {f"nanoGPT, lr {lr:g}": partial(nanogpt_program, args, size, lr=lr)
                   for lr in NANOGPT_LR}
    config = make(TrainConfig, size)
    for name, make_program in makers.items():
        found = []
        for seed in 1, 2, 3:
            program = make_program(seed=seed)

            def take_step(step, factor):
                iteration(program, [
                    get_batch(shards, SimpleNamespace(block_size=size["block_size"], seed=seed),
                              config, step, micro_step, args.device)
                    for micro_step in range(size["grad_accum"])], factor)

            take_step(0, 0.0)   # compiles; with a learning rate of 0 the weights stay as they are
            take_step(0, 0.0)
            begin, step, progress = now(), 0, 0.0
            while progress < 1:
                take_step(step, lr_schedule(config, progress))
                step += 1
                progress = (now() - begin) / args.seconds
            program.model.eval()
            with torch.no_grad():
                losses = [program.loss(xi.to(args.device), yi.to(args.device)).item() * len(xi)
                          for xi, yi in zip(x.split(8), y.split(8))]
            found.append(sum(losses) / len(x) * bits_per_nat)
            print(f"{name}, seed {seed}: {found[-1]:.3f} bits per byte, {step:,} iterations",
                  flush=True)
        print(f"{name}: {statistics.mean(found):.3f} ({min(found):.3f} to {max(found):.3f})")

def main(argv=None):
    args = make(SpeedConfig, parse([SpeedConfig], argv, __doc__))
    if args.nanogpt and not Path(args.nanogpt).is_file():   # now, not after minutes
        raise UserError(f"--nanogpt {args.nanogpt}: not there; name model.py of a copy of nanoGPT")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device")
    defaults = GPU if args.device == "cuda" else CPU
    size = {name: getattr(args, name, 0) or value for name, value in defaults.items()}
    if args.seconds:   # Muon is our default
        size["optimizer"] = "muon"
    machine = f"{torch.get_num_threads()} threads"
    if args.device == "cuda":
        machine = torch.cuda.get_device_name()
        torch.set_float32_matmul_precision("high")
    print(f"{machine}, torch {torch.__version__}, {args.rounds} rounds; "
          + ", ".join(f"{name} {value}" for name, value in size.items()))
    torch._dynamo.config.recompile_limit = 64   # all models share GPT.forward
    if args.seconds:
        compare_bits(args, size)
        return
    if args.only in ("all", "rules"):
        compare_rules(args, size)
    if args.device == "cpu" and args.only in ("all", "skipping"):
        compare_skipping(args, size)
    if args.device == "cpu" and args.only in ("all", "taper"):
        compare_taper(args, size)

if __name__ == "__main__":
    run(main)
