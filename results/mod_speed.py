"""
Does a skipped sublayer run save the time that its FLOPs say? Times NAG with Mixture-of-Depths against itself
without skipping, and prints a table of predicted and measured savings.

    python results/mod_speed.py --runs runs/nag                    # a trained model
    python results/mod_speed.py --shapes 12x256x256 24x384x256     # blocks x width x context, random weights
    bash results/mod_speed.sh                                      # trains two models, then times all that

A trained model goes by one threshold, as it would in use: some sublayers run nearly always, others hardly
ever. Random weights get a threshold per sublayer, so that each skips the same share of its tokens: the worst
case, as every sublayer pays for gathering and scattering. Predicted is what the formula of executed FLOPs
says. Each rate has a process of its own, as in use: buffers of other sizes, freed before, would slow a step
down; and no process that trains is timed in inference. They take turns, one repeat each, since the machine's
speed drifts within seconds. All that several times over, since memory lies differently in each process.

Measured is the median over the turns of what a repeat saves against the dense one of its turn, with the
standard error over the processes. On a machine that others use, too, that is mostly their noise. So there is
a second figure, `undisturbed`: a repeat is cut into pieces, forward and backward of each block and what comes
before and after, and of each piece counts the fastest of a process's repeats, as Python's timeit has it.
"""
import itertools
import json
import math
import multiprocessing
import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch  # noqa: E402

from model import GPT, GPTConfig, KVCache  # noqa: E402
from train import (Parser, TrainConfig, calibrate, keep_freed_memory, load_run, make_optimizers,  # noqa: E402
                   shares, val_windows, write_file)

RATES = (0.125, 0.25, 0.375, 0.5)
WARM_UP = 2   # repeats that are not timed, the first of them dense, as --mod_rate begins


def seconds_now(idx):
    if idx.is_cuda:
        torch.cuda.synchronize()   # a GPU may still be busy with what came before
    return time.perf_counter()


def training_step(model, optimizer, idx, tau, kept, begin):
    model.train()
    begin()
    model.config.mod_rate = 0.0 if tau is None else 0.25   # any rate adds train.py's exploration and floor
    model(idx, idx, tau=tau, kept=kept)[1].backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def prefill(model, optimizer, idx, tau, kept, begin):
    model.eval()
    begin()
    model(idx, cache=KVCache(model, len(idx)), tau=tau, kept=kept)


@torch.no_grad()
def decode(model, optimizer, idx, tau, kept, begin, n=32):
    """The last n tokens of idx, one at a time; the others are in the cache already, and not timed."""
    model.eval()
    cache = KVCache(model, len(idx))
    model(idx[:, :-n], cache=cache, tau=tau)
    begin()
    for t in range(idx.shape[1] - n, idx.shape[1]):
        model(idx[:, t:t + 1], cache=cache, tau=tau, kept=kept)


# name: (what, sequences, share of the repeats)
PHASES = {"training step": (training_step, TrainConfig.batch_size, 1), "prefill": (prefill, 16, 1),
          "decode 1": (decode, 1, 1 / 2), "decode 16": (decode, 16, 1 / 4)}
INFERENCE = [phase for phase in PHASES if phase != "training step"]


def untrained(shape, device):
    """-> a model, and a function of a number n: idx (n, T)"""
    if not re.fullmatch("[1-9][0-9]*x[1-9][0-9]*x[1-9][0-9]*", shape) or int(shape.split("x")[1]) % 64:
        raise SystemExit(f"--shapes {shape}: say blocks x width x context, such as 12x256x256, the width a "
                         f"multiple of 64")
    n_layer, n_embd, T = map(int, shape.split("x"))
    model = GPT(GPTConfig(residual="nag", n_layer=n_layer, n_head=n_embd // 64, n_embd=n_embd, block_size=T,
                          mod_scope="layer")).to(device)
    rng = torch.Generator().manual_seed(0)
    return model, lambda n: torch.randint(320, (n, T), generator=rng).to(device)


def trained(run, device):
    """The same of a run; idx is validation text."""
    model, config = load_run(run, device)
    if not model.can_skip:
        raise SystemExit(f"{run}: its tokens can't skip sublayers; train one with --residual nag")
    x, _ = val_windows(config["data"], model.config.block_size, 64)
    rng = torch.Generator().manual_seed(0)
    return model, lambda n: x[torch.randperm(len(x), generator=rng)[:n]].to(device)


def worker(pipe, load, name, device, tau):
    """A process: times what the pipe asks for, (phase, dense or not) -> what a Repeat is made of"""
    keep_freed_memory()
    model, draw = load(name, device)
    # weights stay put
    optimizer = make_optimizers(model, TrainConfig(lr=0.0, gate_lr=0.0, weight_decay=0.0))["optimizer"]
    # as train.py and sample.py have it
    autocast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    text, times = draw(16), []

    def begin():
        times[:] = [seconds_now(text)]

    def mark(*_):
        times.append(seconds_now(text))

    def after_block(block, args, out):
        (direction, _), _ = out
        mark()
        if direction.requires_grad:
            direction.register_hook(mark)   # its gradient is there: backward enters the block

    for block in model.blocks if device == "cpu" else ():   # a GPU would have to stop at each mark
        block.register_forward_hook(after_block)
    for phase, dense in iter(pipe.recv, None):
        (run, batch, _), kept = PHASES[phase], []
        with autocast:
            run(model, optimizer, text[:batch], None if dense else tau, kept, begin)
        mark()
        pipe.send(([end - start for start, end in itertools.pairwise(times)], shares(kept)))


class Repeat(NamedTuple):
    pieces: list      # seconds of each
    kept: list        # per sublayer, the share of the tokens that ran it

    @property
    def seconds(self):
        return sum(self.pieces)


def take_turns(load, name, device, taus, turns):
    """
    A process per rate of taus, and a dense one, rate 0; turns: {phase: how many}
    -> {phase: {rate: [Repeat, one per turn]}}
    """
    context, pipes, processes = multiprocessing.get_context("forkserver"), {}, []
    context.set_forkserver_preload(["torch._dynamo"])   # optimizers import it, 1.5 s a process
    for rate, tau in {0: None, **taus}.items():
        pipes[rate], other = context.Pipe()
        processes.append(context.Process(target=worker, args=(other, load, name, device, tau), daemon=True))
        processes[-1].start()
        other.close()
    found = {phase: {rate: [] for rate in pipes} for phase in turns}
    for phase, n in turns.items():
        for turn in range(-WARM_UP, n):
            for rate in list(pipes)[::1 if turn % 2 else -1]:
                # a heap that has not held a dense step would have to grow for many steps, as sizes vary
                pipes[rate].send((phase, turn < -WARM_UP // 2))
                one = Repeat(*pipes[rate].recv())
                if turn >= 0:
                    found[phase][rate].append(one)
    for pipe in pipes.values():
        pipe.send(None)
    for process in processes:   # the next ones need their memory
        process.join()
    return found


def undisturbed(repeats):
    """[Repeat] -> seconds"""
    return sum(min(same) for same in zip(*(repeat.pieces for repeat in repeats), strict=True))


def savings(sets):
    """(repeats, dense ones) of each set of processes -> shares of the time saved, with standard errors"""
    ratios = [[a.seconds / b.seconds for a, b in zip(*each)] for each in sets]
    error = lambda values: statistics.stdev(values) / len(values) ** 0.5
    calm = [1 - undisturbed(repeats) / undisturbed(dense) for repeats, dense in sets]
    return dict(measured=1 - statistics.median(itertools.chain(*ratios)),
                standard_error=error([statistics.median(each) for each in ratios]),
                undisturbed=statistics.mean(calm), undisturbed_error=error(calm))


def main():
    parser = Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--runs", nargs="+", default=[], help="run folders")
    parser.add_argument("--shapes", nargs="+", default=[], help="blocks x width x context: 12x256x256")
    parser.add_argument("--repeats", type=int, default=24,
                        help="of a training step and of prefill; a third with random weights")
    parser.add_argument("--processes", type=int, default=3, help="of each rate, that share the repeats")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", help="JSON to write")
    args = parser.parse()
    if not args.runs + args.shapes:
        parser.error("say --runs, --shapes or both")
    for name, least in ("repeats", 1), ("processes", 2):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: must be {least} or more")
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    loads = {name: trained if name in args.runs else untrained for name in args.runs + args.shapes}
    models = {name: load(name, args.device) for name, load in loads.items()}   # first: an error comes at once
    on_gpu, table = args.device == "cuda", {}
    device = (f"{torch.cuda.get_device_name()}, bf16" if on_gpu else
              f"CPU, fp32, {torch.get_num_threads()} threads")
    memory = [f"{name}={value}" for name, value in os.environ.items() if name == "GLIBC_TUNABLES"]
    report = dict(command=" ".join([*memory, "python", *sys.argv]), device=device, torch=torch.__version__,
                  table=table)
    heads = " | ".join(f"{rate:.1%} predicted, measured, undisturbed" for rate in RATES)
    print(f"| blocks x width x context | what | {heads} |")
    for name, (model, draw) in models.items():
        c = model.config
        shape = f"{c.n_layer}x{c.n_embd}x{c.block_size}" + (" trained" if name in args.runs else "")
        text = draw(16)
        taus = {rate: calibrate(model.eval(), text.split(8), rate, least=c.mod_least)[0].tolist()
                for rate in RATES}
        turns = {phase: math.ceil(args.repeats * part / (1 if name in args.runs else 3) / args.processes)
                 for phase, (_, _, part) in PHASES.items()}
        found = {phase: {rate: [] for rate in RATES} for phase in PHASES}   # per set: repeats, dense ones
        # on a CPU all rates at once; a GPU may not have the memory
        rates_at_once = [[rate] for rate in RATES] if on_gpu else [RATES]
        together = itertools.product([["training step"], INFERENCE] * args.processes, rates_at_once)
        for phases, rates in together:
            some = take_turns(loads[name], name, args.device, {rate: taus[rate] for rate in rates},
                              {phase: turns[phase] for phase in phases})
            for phase, rate in itertools.product(phases, rates):
                found[phase][rate].append((some[phase][rate], some[phase][0]))
        for phase, by_rate in found.items():
            cells = []
            for rate, sets in by_rate.items():
                ran = torch.tensor([repeat.kept for repeats, _ in sets for repeat in repeats])
                ran = ran.view(-1, 2 * c.n_layer).mean(0).tolist()
                cells.append(dict(rate=rate, realised=1 - sum(ran) / len(ran),
                                  predicted=1 - model.flops_per_token(share=ran) / model.flops_per_token(),
                                  **savings(sets)))
            dense = [repeat.seconds for _, repeats in by_rate[RATES[0]] for repeat in repeats]
            table.setdefault(shape, {})[phase] = dict(
                repeats=len(dense), dense_seconds=statistics.median(dense), cells=cells)
            told = [f"{c['predicted']:.1%}, {c['measured']:.1%} ± {c['standard_error']:.1%} "
                    f"({1 / (1 - c['measured']):.2f}x), {c['undisturbed']:.1%} ± "
                    f"{c['undisturbed_error']:.1%}" for c in cells]
            print(f"| {shape} | {phase} | {' | '.join(told)} |", flush=True)
        if args.out:   # after each shape, as it takes minutes
            write_file(args.out, lambda f: f.write(json.dumps(report, indent=1).encode() + b"\n"))


if __name__ == "__main__":
    main()
