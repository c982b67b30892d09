"""
What a residual costs: time of a training step (forward and backward), its peak memory, and time per token of
cached decoding, each as a ratio to the first one listed. Times are medians over rounds in which all take
turns; memory is how far a process of its own grows beyond the model.

    python results/speed.py "pre" "attnres --attnres_blocks 8" "attnres" --n_layer 24 --n_embd 256
"""
import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from model import GPT, GPTConfig, KVCache  # noqa: E402
from train import add_flags, from_dict, keep_freed_memory  # noqa: E402


def build(flags, args):
    """`NAME --flag value ...` -> GPT"""
    parser = argparse.ArgumentParser()
    parser.add_argument("residual")
    given = argparse.ArgumentParser()
    add_flags(given, GPTConfig)
    name, *rest = shlex.split(flags)
    size = dict(n_layer=args.n_layer, n_embd=args.n_embd, block_size=args.block_size)
    return GPT(from_dict(GPTConfig, size | vars(given.parse_args(rest)) | {"residual": name}))


def train_step(model, idx):
    begin = time.perf_counter()
    model(idx, idx)[1].backward()
    seconds = time.perf_counter() - begin
    model.zero_grad(set_to_none=False)
    return seconds


@torch.no_grad()
def decode(model, idx, n=32):
    cache = KVCache(model, 1)
    model(idx[:1, :-n], cache=cache)
    begin = time.perf_counter()
    for i in range(n, 0, -1):
        model(idx[:1, idx.shape[1] - i:idx.shape[1] - i + 1], cache=cache)
    return (time.perf_counter() - begin) / n


def memory_mb(key):
    """VmRSS (now) or VmHWM (the most so far) of this process."""
    return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def peak_mb(flags, args):
    """Growth of a fresh process over two training steps, in MB."""
    command = [sys.executable, __file__, flags, "--peak", "--n_layer", args.n_layer, "--n_embd", args.n_embd,
               "--block_size", args.block_size, "--batch_size", args.batch_size]
    return float(subprocess.run(map(str, command), check=True, capture_output=True, text=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("residuals", nargs="+")
    for name, value in dict(n_layer=24, n_embd=256, block_size=256, batch_size=8, rounds=10).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", default="")
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    keep_freed_memory()
    idx = torch.randint(320, (args.batch_size, args.block_size), generator=torch.Generator().manual_seed(0))
    if args.peak:
        model = build(args.residuals[0], args)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        before = memory_mb("VmRSS")
        for _ in range(2):
            train_step(model, idx)
        print(memory_mb("VmHWM") - before)
        return
    models = {flags: build(flags, args) for flags in args.residuals}
    steps, tokens = ({flags: [] for flags in models} for _ in range(2))
    for i in range(args.rounds + 1):
        for flags, model in models.items():
            first = train_step(model, idx), decode(model, idx)
            if i:   # the first round warms up
                steps[flags].append(first[0])
                tokens[flags].append(first[1])
    median = lambda values: sorted(values)[len(values) // 2]
    rows = {flags: dict(step_ms=1e3 * median(steps[flags]), decode_ms=1e3 * median(tokens[flags]),
                        peak_mb=peak_mb(flags, args), parameters=models[flags].num_params())
            for flags in models}
    base = rows[args.residuals[0]]
    print("| residual | parameters | training step | peak memory | decoding, per token |")
    print("|" + " --- |" * 5)
    for flags, row in rows.items():
        ratios = (f"{row[key] / base[key]:.2f}x" for key in ("step_ms", "peak_mb", "decode_ms"))
        print(f"| `{flags}` | {row['parameters']:,} | {' | '.join(ratios)} |")
    if args.out:
        settings = {key: value for key, value in vars(args).items() if key not in ("peak", "out")}
        device = dict(torch=torch.__version__, threads=torch.get_num_threads())
        Path(args.out).write_text(json.dumps(dict(settings=settings, **device, rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
