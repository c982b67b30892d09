"""Measures how fast rules train: whole iterations (forward, backward, optimizer) of programs that
run in turn, round after round, so whatever else the machine does affects all of them.

    python results/speed.py                                    # a CPU: rules and skipping
    python results/speed.py --nanogpt ../nanoGPT/model.py      # beside nanoGPT
    python results/speed.py --rules pre nag --n_embd 256 --compile
    python results/speed.py --device cuda --nanogpt model.py   # one GPU: GPT-2 small
    python results/speed.py --seconds 60 --nanogpt model.py    # bits per byte after 60 s

All other flags are train.py's. A ratio is the median over rounds, with the middle half of the
rounds in parentheses; if that range is wide, the machine was not idle. On a GPU, all programs use
AdamW and bfloat16, and ours run twice: eager with the Triton kernels, and compiled.
"""

import math
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
import prepare
from flags import UserError, flag, make, parse, run
from model import GPT, GPTConfig, Trace, flops_per_token, needs_trace
from train import DEFAULT_LR, TrainConfig, get_batch, lr_schedule, make_optimizers

RULES = ["pre", "nag", "attnres:group=4", "hyper:kind=mhc", "gated"]
GPT2_SMALL = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304,
                  batch_size=64, grad_accum=4, optimizer="adamw", lr=1e-2, dtype="bfloat16")
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12}   # dense bfloat16
NANOGPT_LR = 5e-4, 1e-3, 2e-3   # for --seconds, nanoGPT may have the best of these

@dataclass
class SpeedConfig:
    rules: list = flag(None, f"residual connections, in place of {' '.join(RULES)}")
    only: Literal["all", "rules", "skipping"] = flag("all", "skipping: on a CPU")
    nanogpt: str = flag("", "model.py of a copy of nanoGPT, to compare with")
    rounds: int = flag(12, "rounds that count, after two that do not", 2, 1000)
    seconds: float = flag(0.0, "compare bits per byte after so many seconds of training", 0, 1e5)

# -----------------------------------------------------------------------------
# programs: a model, loss(x, y) and optimizers

def our_program(model_config, config, compile=False):
    model = GPT(model_config).to(config.device)
    if config.dtype == "bfloat16":
        model.compute_in(torch.bfloat16)
    forward, traces = torch.compile(model) if compile else model, []

    def loss(x, y):
        trace = Trace(model) if needs_trace(model) else None
        if trace is not None:
            traces.append(trace)
        return forward(x, y, trace=trace)[1]

    def after_iteration():   # as in train.py
        for trace in traces or [None]:
            flops_per_token(model, trace)
        if hasattr(model.policy, "update"):
            model.policy.update(traces, lambda value: value)
        traces.clear()

    return SimpleNamespace(model=model, loss=loss, optimizers=make_optimizers(model, config),
                           after_iteration=after_iteration)

def nanogpt_program(path, model_config, config, lr=1e-3):
    """As nanoGPT's train.py has it: compiled and with autocast on a GPU."""
    theirs, on_gpu = SimpleNamespace(**runpy.run_path(path)), config.device == "cuda"
    torch.manual_seed(model_config.seed)
    shape = {name: getattr(model_config, name)
             for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
    model = theirs.GPT(theirs.GPTConfig(**shape, dropout=0.0, bias=False)).to(config.device)
    optimizer = model.configure_optimizers(0.1, lr, (0.9, 0.95), config.device)
    for group in optimizer.param_groups:
        group["peak_lr"] = lr
    forward = torch.compile(model) if on_gpu else model

    def loss(x, y):
        with torch.autocast(config.device, torch.bfloat16, enabled=on_gpu):
            return forward(x, y.contiguous())[1]

    return SimpleNamespace(model=model, loss=loss, optimizers=[optimizer],
                           after_iteration=lambda: None)

def iteration(program, micro_batches, factor=1.0):
    """factor: learning rate / peak"""
    for x, y in micro_batches:
        (program.loss(x, y) / len(micro_batches)).backward()
    program.after_iteration()
    torch.nn.utils.clip_grad_norm_(program.model.parameters(), 1.0)
    for optimizer in program.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

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

def ratio(fast, slow):
    """Seconds of rounds -> how many times as fast, in words"""
    low, middle, high = statistics.quantiles([b / a for a, b in zip(fast, slow)], n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"

def compare_rules(args, model_config, config):
    """Prints tokens/s of each rule, and how many times as fast as the first one and as nanoGPT it
    is; on a GPU also peak memory, MFU (share of the card's peak FLOPs) and seconds to compile."""
    on_gpu, makers = config.device == "cuda", {}
    for rule in args.rules or RULES:
        rule_config = replace(model_config, residual=rule)
        makers[rule] = partial(our_program, rule_config, config)
        if on_gpu or config.compile:
            makers[f"{rule}, compiled"] = partial(our_program, rule_config, config, compile=True)
    if args.nanogpt:
        makers["nanoGPT"] = partial(nanogpt_program, args.nanogpt, model_config, config)
    shape = config.grad_accum, 2, config.batch_size // config.grad_accum, model_config.block_size
    tokens = torch.randint(model_config.vocab_size, shape, device=config.device)
    functions, columns = {}, {}
    for name, make_program in makers.items():
        begin, before = time.perf_counter(), torch.cuda.memory_allocated()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        try:   # one program out of memory must not cost the others their minutes on a card
            program = make_program()
            step = partial(iteration, program, list(tokens))
            step()
            step()
        except RuntimeError as error:
            print(f"{name} fails: {str(error).splitlines()[0]}", flush=True)
            continue
        functions[name] = step
        now()
        flops = 3 * flops_per_token(program.model) if name != "nanoGPT" else math.nan
        memory = (torch.cuda.max_memory_allocated() - before) / 2 ** 30
        columns[name] = memory, flops, time.perf_counter() - begin
    seconds = measure(functions, args.rounds)
    first = next(iter(seconds))
    peak = next((flops for card, flops in PEAK_FLOPS.items()
                 if on_gpu and card in torch.cuda.get_device_name()), math.nan)
    head = ["", "tokens/s", f"/ {first}", "/ nanoGPT", *["GiB", "MFU", "compiles in"] * on_gpu]
    print("| " + " | ".join(head) + " |\n" + "| --- " * len(head) + "|")
    for name in seconds:
        tokens_per_s = tokens[:, 0].numel() / statistics.median(seconds[name])
        row = [name, f"{tokens_per_s:,.0f}"]
        row += [ratio(seconds[name], seconds[other]) if other in seconds else ""
                for other in (first, "nanoGPT")]
        if on_gpu:
            memory, flops, ready = columns[name]
            row += [f"{memory:.1f}", f"{flops * tokens_per_s / peak:.0%}", f"{ready:.0f} s"]
        print("| " + " | ".join(row) + " |", flush=True)

def compare_skipping(args, model_config, config):
    """nag that skips a quarter or a half of all sublayers, beside the same model that skips none.
    It has trained for 60 iterations: a new model would skip whole sublayers, which is easier."""
    shards = prepare.open_split(config.data, "train", model_config.block_size)
    dense = our_program(replace(model_config, residual="nag"), config)
    for rate in 0.25, 0.5:
        mod = f"gate:rate={rate}"
        skips = our_program(replace(model_config, residual="nag", mod=mod), config)
        for step in range(60):
            batch = [get_batch(shards, model_config, config, step, 0, config.device)]
            iteration(skips, batch)
        model, x = skips.model, batch[0][0]

        def compare(what, ours, theirs):
            seconds = measure(dict(ours=ours, theirs=theirs), args.rounds)
            print(f"nag --mod {mod}, {what}: {ratio(seconds['ours'], seconds['theirs'])} times as "
                  f"fast as nag", flush=True)

        compare("training", partial(iteration, skips, batch), partial(iteration, dense, batch))
        model.eval()
        all_run = partial(Trace, model, lambda trace: None)
        with torch.no_grad():
            compare("prefill", lambda: model(x), lambda: model(x, trace=all_run()))
            compare("decoding", lambda: model.generate(x[:1, :8], 48),
                    lambda: model.generate(x[:1, :8], 48, make_trace=all_run))

# -----------------------------------------------------------------------------
# bits per byte at equal seconds

def compare_bits(args, model_config, config):
    """Three seeds, the same batches for all; ours at its default learning rate."""
    shards = prepare.open_split(config.data, "train", model_config.block_size)
    makers = {"ours": partial(our_program, compile=config.compile or config.device == "cuda")}
    if args.nanogpt:
        makers |= {f"nanoGPT, lr {lr:g}": partial(nanogpt_program, args.nanogpt, lr=lr)
                   for lr in NANOGPT_LR}
    for name, make_program in makers.items():
        found = []
        for seed in 1, 2, 3:
            seed_config = replace(model_config, seed=seed)
            program = make_program(seed_config, config)

            def take_step(step, factor):
                iteration(program, [get_batch(shards, seed_config, config, step, i, config.device)
                                    for i in range(config.grad_accum)], factor)

            take_step(0, 0.0)   # compiles; with a learning rate of 0 the weights stay as they are
            take_step(0, 0.0)
            begin, step, progress = now(), 0, 0.0
            while progress < 1:
                take_step(step, lr_schedule(config, progress))
                step += 1
                progress = (now() - begin) / args.seconds
            found.append(bits_per_byte(program, model_config, config))
            print(f"{name}, seed {seed}: {found[-1]:.3f} bits per byte, {step:,} iterations",
                  flush=True)
        print(f"{name}: {statistics.mean(found):.3f} ({min(found):.3f} to {max(found):.3f})")

@torch.no_grad()
def bits_per_byte(program, model_config, config):
    meta = prepare.load_meta(config.data)
    x, y = prepare.windows_of(config.data, "val", model_config.block_size, config.eval_windows)
    token_bytes = prepare.token_bytes(meta["tokenizer"], meta["vocab_size"])
    program.model.eval()
    nats = sum(program.loss(xi.to(config.device), yi.to(config.device)).item() * yi.numel()
               for xi, yi in zip(x.split(8), y.split(8)))
    return nats / token_bytes[y].sum().item() / math.log(2)

def main(argv=None):
    typed = parse([SpeedConfig, GPTConfig, TrainConfig], argv, __doc__)
    on_gpu = typed.get("device") == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device")
    settings = (GPT2_SMALL if on_gpu else dict(device="cpu")) | typed
    args, config = make(SpeedConfig, settings), make(TrainConfig, settings)
    model_config = make(GPTConfig, settings)
    if args.nanogpt and not Path(args.nanogpt).is_file():   # now, not after minutes
        raise UserError(f"--nanogpt {args.nanogpt}: not there; name model.py of a copy of nanoGPT")
    if args.seconds:
        config.optimizer = typed.get("optimizer", "muon")   # our default, also on a GPU
        vocab_size = prepare.load_meta(config.data)["vocab_size"]
        model_config.vocab_size = 64 * math.ceil(vocab_size / 64)
    config.lr = config.lr or DEFAULT_LR[config.optimizer]
    machine = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} threads"
    print(f"{machine}, torch {torch.__version__}: {model_config.n_layer} blocks of width "
          f"{model_config.n_embd}, {config.batch_size} x {model_config.block_size} tokens, "
          f"{config.optimizer}")
    torch.set_float32_matmul_precision("high" if on_gpu else "highest")
    torch._dynamo.config.recompile_limit = 64   # all models share GPT.forward
    if args.seconds:
        compare_bits(args, model_config, config)
        return
    if args.only != "skipping":
        compare_rules(args, model_config, config)
    if args.only != "rules" and not on_gpu:
        compare_skipping(args, model_config, config)

if __name__ == "__main__":
    run(main)
