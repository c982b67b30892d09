"""
How does skipping go with torch.compile? The number of kept tokens differs in every sublayer and step. Times a
training step of NAG at a quarter skipped, in four ways that take turns, and what their first steps take:

    eager         as train.py does on a CPU
    dynamic       whole blocks, where the number of rows is a symbol: what --compile does
    sublayers     attention and MLP alone; choosing, gathering and scattering stay outside
    buckets of N  whole blocks, a graph for each number of rows, which is rounded up to a multiple of N

    python results/mod_compile.py --out results/mod_compile.json
"""
import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"   # the first steps take what they take, each time
import torch  # noqa: E402

import model as nanodepth  # noqa: E402
from train import calibrate, keep_freed_memory, write_file  # noqa: E402

BUCKET = 512


@torch.compiler.disable
def decide_in_buckets(self, residual, stream, decide=nanodepth.Skip.decide):
    """Skip.decide, and some more tokens run."""
    gain, keep, n_kept = decide(self, residual, stream)
    short = min(-n_kept % BUCKET, keep.numel() - n_kept)
    more = (~keep).flatten().nonzero_static(size=short).squeeze(1)
    return gain, keep.flatten().index_fill(0, more, True).view_as(keep), n_kept + short


def compiled(model, way):
    if way == "dynamic":
        model.compile_blocks()
    elif way == "sublayers":
        for _, sublayer in model.sublayers():
            sublayer.compile()
    elif way != "eager":
        for block in model.blocks:
            block.compile(dynamic=False)


def step(model, idx, tau):
    begin = time.perf_counter()
    model(idx, idx, tau=tau)[1].backward()
    model.zero_grad(set_to_none=True)
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--n_layer", type=int, default=12)
    parser.add_argument("--n_embd", type=int, default=256)
    parser.add_argument("--block_size", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", help="JSON to write")
    args = parser.parse_args()
    keep_freed_memory()
    torch._dynamo.config.recompile_limit = 64   # buckets: a graph for each number of rows
    size = dict(n_layer=args.n_layer, n_embd=args.n_embd, n_head=max(1, args.n_embd // 64))
    config = nanodepth.GPTConfig(residual="nag", mod_rate=0.25, block_size=args.block_size, **size)
    idx = torch.randint(320, (args.batch_size, args.block_size), generator=torch.Generator().manual_seed(0))
    ways = {way: nanodepth.GPT(config) for way in ("eager", "dynamic", "sublayers", f"buckets of {BUCKET}")}
    texts = [idx, idx.flip(0, 1)]   # at three rates each: that many numbers of rows, as in training
    taus = [calibrate(ways["eager"], [idx], rate)[0].tolist() for rate in (0.2, 0.25, 0.3)]
    report, plain = {}, nanodepth.Skip.decide

    def run(way, i):
        nanodepth.Skip.decide = decide_in_buckets if "bucket" in way else plain
        return step(ways[way], texts[i % 2], taus[i % 3])

    for way, model in ways.items():
        compiled(model, way)
        report[way] = dict(first_steps_seconds=sum(run(way, i) for i in range(12)))
    seconds = [{way: run(way, i) for way in ways} for i in range(args.repeats)]
    for way, found in report.items():
        found["step_seconds"] = statistics.median(each[way] for each in seconds)
        found["ratio_to_eager"] = statistics.median(each[way] / each["eager"] for each in seconds)
        print(f"{way:15s} first 12 steps {found['first_steps_seconds']:6.1f} s, then "
              f"{found['step_seconds']:.3f} s a step, {found['ratio_to_eager']:.2f} of eager")
    if args.out:
        found = dict(command="python " + " ".join(sys.argv), torch=torch.__version__, ways=report)
        write_file(args.out, lambda f: f.write(json.dumps(found, indent=1).encode() + b"\n"))


if __name__ == "__main__":
    main()
