"""
Pretrain a GPT with any residual, on a CPU, one GPU or several.

    python train.py                                          # a small default, minutes on a CPU
    python train.py --residual nag --out runs/nag            # every field of both configs is a flag
    python train.py --out runs/nag --resume                  # go on from the last checkpoint, bit for bit
    python train.py --config runs/nag/config.json --out runs/nag1 --seed 1    # the same run, another seed
    torchrun --nproc_per_node 8 train.py --batch_size 512    # batch_size counts all processes

runs.py has flags and run folders. Several machines need it on a disk that all of them see.
"""
import contextlib
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import prepare
from model import GPT, GPTConfig, field_problems, ran_shares
from runs import (RunFolder, all_finite, environment, fingerprint, highest, n_weights, parse, pick_device,
                  read_checkpoint, read_metrics, reading, refuse, restore, say, start)

# ----------------------------------------------------------------------------- config

@dataclass
class TrainConfig:
    # data and run folder
    data: str = "data/stdlib"      # folder of token shards, made by prepare.py
    out: str = ""                  # run folder; without it runs/RESIDUAL
    config: str = ""               # config.json of an earlier run to replay; flags given beside it win
    resume: bool = False           # continue the run in --out from its last checkpoint
    overwrite: bool = False        # replace the run in --out
    # length of the run
    max_iters: int = 420           # [0, 1e9] end after this many optimizer steps, or by one of the next two
    max_tokens: float = 0.0        # [0, 1e15] end after this many training tokens
    max_flops: float = 0.0         # [0, 1e27] end after this many matmul FLOPs, so skipping buys tokens
    eval_interval: int = 100       # [1, 1e9] steps between checkpoint and evaluation
    eval_windows: int = 128        # [1, 1e5] fixed validation windows of block_size tokens
    log_interval: int = 20         # [1, 1e9] steps between status lines
    # optimizer
    batch_size: int = 16           # [1, 1e6] sequences per optimizer step, of all processes together
    grad_accum: int = 1            # [1, 1e6] micro-batches per optimizer step, in each process
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"  # sgd: momentum beta1; muon: for blocks' matrices
    lr: float = 6e-3               # [0, 1e3] peak learning rate
    gate_lr: float = 1e-3          # [0, 1e3] peak learning rate of what a residual names in own_lr
    min_lr: float = 0.1            # [0, 1] final learning rate / peak
    warmup: float = 0.05           # [0, 1] share of the run with a rising learning rate
    schedule: Literal["cosine", "wsd"] = "cosine"  # wsd: constant, then linear over the last fifth
    weight_decay: float = 0.1      # [0, 1e3] of matrices only
    beta1: float = 0.9             # [0, 0.9999] AdamW's first momentum
    beta2: float = 0.95            # [0, 0.9999] AdamW's second momentum
    grad_clip: float = 1.0         # [0, 1e9] largest global gradient norm; 0: no clipping
    equalize_grads: bool = False   # give the gradients of all blocks the same norm before the optimizer
    # machine
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    compile: bool = None           # torch.compile what all tokens run; without it, on CUDA only
    checkpoint_blocks: bool = False  # save memory: the backward pass runs each sublayer again

    def problems(self):
        """Every reason why this config can't be run, a sentence each."""
        parts, ends = self.grad_accum * environment("WORLD_SIZE", 1), [e for e in ENDS if getattr(self, e)]
        rules = [
            (len(ends) > 1, f"--{' and --'.join(ends)}: each ends the run; give one of them"),
            (not ends, "--max_iters 0: would train nothing; give 1 or more, or --max_tokens"),
            (self.resume and self.overwrite, "--resume and --overwrite: contradict each other; give one"),
            (0 < self.min_lr < 1e-3, f"--min_lr {self.min_lr}: is a share of --lr; 0.1 is a tenth of it"),
            (self.batch_size % parts, f"--batch_size {self.batch_size}: must be a multiple of grad_accum x "
                                      f"processes = {parts}")]
        return [sentence for wrong, sentence in rules if wrong]

ENDS = "max_iters", "max_tokens", "max_flops"
# The default on a GPU is GPT-2 small with 0.5M tokens a step, unless a flag says another size of the model.
SIZES = "n_layer", "n_head", "n_embd", "block_size"
CUDA_DEFAULTS = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=512, grad_accum=8,
                     lr=1e-3, max_iters=2000, eval_interval=250)

# ----------------------------------------------------------------------------- batch and evaluation

def train_batch(shards, T, seed, step, batch_size, part=0, n_parts=1):
    """Part `part` of n_parts of the batch of a step: x, y (batch_size / n_parts, T). A pure function: any
    number of processes, and a run that is resumed, see the same batch."""
    n_windows = sum(len(shard) - T for shard in shards)
    starts = np.random.default_rng((seed, step)).integers(0, n_windows, batch_size)
    return prepare.read_windows(shards, starts.reshape(n_parts, -1)[part], T)

@torch.no_grad()
def evaluate(model, x, y, token_bytes, batch_size, decide=None):
    """x, y (n, T) -> nats per token, bits per byte of text, share of the sublayer runs that were skipped.
    token_bytes (V,): the length of each token. decide: see GPT.walk."""
    nats, skipped, was_training = 0.0, 0.0, model.training
    model.eval()
    for xi, yi in zip(x.split(batch_size), y.split(batch_size)):
        kept = []
        loss = model(xi.to(model.device), yi.to(model.device), decide=decide, kept=kept)[1].item()
        nats += loss * len(xi) / len(x)
        skipped += (1 - share_run(ran_shares(kept))) * len(xi) / len(x)
    model.train(was_training)
    return nats, nats / math.log(2) * y.numel() / max(1, token_bytes[y].sum().item()), skipped

def share_run(ran):
    """ran: see ran_shares -> the mean over the sublayers that are there"""
    there = [share for share in ran if share is not False]
    return sum(there) / max(1, len(there))

# ----------------------------------------------------------------------------- optimizers and schedule

def make_optimizers(model, config):
    """A list of one or two. Matrices have weight decay, vectors don't. What a residual names in own_lr has
    the learning rate gate_lr. Muon is a second optimizer, for the blocks' matrices. Its updates are as large
    as AdamW's (arXiv:2502.16982), so one --lr fits both."""
    own_lr, not_matrices, in_blocks = set(), set(), {*model.blocks.parameters()}
    for residual in model.residuals():
        own_lr |= {getattr(residual, name, None) for name in residual.own_lr}
        not_matrices |= {getattr(residual, name, None) for name in residual.not_matrices}
    matrices, vectors, own, muon = [], [], [], []
    for p in model.parameters():
        if p in own_lr:
            own.append(p)
        elif p.dim() < 2 or p in not_matrices:
            vectors.append(p)
        elif config.optimizer == "muon" and p in in_blocks and p.dim() == 2 and min(p.shape) > 1:
            muon.append(p)
        else:
            matrices.append(p)
    groups = [dict(params=matrices, peak_lr=config.lr, weight_decay=config.weight_decay),
              dict(params=vectors, peak_lr=config.lr, weight_decay=0.0),
              dict(params=own, peak_lr=config.gate_lr, weight_decay=0.0, betas=(0.8, 0.95))]
    if config.optimizer == "sgd":
        optimizers = [torch.optim.SGD(groups, config.lr, momentum=config.beta1)]
    else:
        optimizers = [torch.optim.AdamW(groups, config.lr, (config.beta1, config.beta2), fused=True)]
    if muon:
        optimizers.append(torch.optim.Muon([dict(params=muon, peak_lr=config.lr)], config.lr,
                                           config.weight_decay, adjust_lr_fn="match_rms_adamw"))
    placed = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert len(placed) == len({*placed}) == len([*model.parameters()]), "a parameter is not in one group"
    return optimizers

def lr_share(config, progress):
    """Learning rate / its peak: linear warm-up, then cosine or wsd down to min_lr. progress: share of the run
    that is over after this step."""
    if progress < config.warmup:
        return progress / config.warmup
    if config.schedule == "cosine":
        rest = max(0.0, 1 - progress) / max(1e-9, 1 - config.warmup)
        fall = 0.5 + 0.5 * math.cos(math.pi * rest)
    else:
        fall = max(0.0, 1 - (1 - progress) / 0.2)
    return 1 - (1 - config.min_lr) * fall

def equalize(grads, norms):
    """Scales the gradients of each block to the root mean square of all blocks' norms (L,)."""
    for block_grads, norm in zip(grads, norms):
        for grad in block_grads:
            grad.mul_(norms.square().mean().sqrt() / norm.clamp_min(1e-30))

# ----------------------------------------------------------------------------- training

def main(argv=None):
    """A whole run -> exit status: 0, or 128 + the number of the signal that stopped it."""
    gpt, config = parse((GPTConfig, TrainConfig), argv, __doc__, under=settings_below)
    device, rank, world_size = start_processes(config)
    if config.data == TrainConfig.data and not any(Path(config.data).glob("*.bin")):
        if rank == 0:
            say(f"{config.data} is not there yet: preparing it from the Python standard library")
            prepare.main(["stdlib", "--out", config.data])
        highest(0)   # The others wait here.
    meta = prepare.load_meta(config.data)
    gpt.vocab_size = max(gpt.vocab_size, -(-meta["vocab_size"] // 64) * 64)   # Multiples of 64 are fast.
    check_memory(gpt, config, world_size)
    data = (meta, prepare.open_split(config.data, "train", gpt.block_size),
            prepare.val_windows(config.data, gpt.block_size, config.eval_windows),
            prepare.token_bytes(meta, gpt.vocab_size))
    with contextlib.closing(RunFolder(gpt, config, meta, rank)) as folder:
        return train(gpt, config, data, folder, device, rank, world_size)

def train(gpt, config, data, folder, device, rank, world_size):
    # setup: model, optimizers, and what a checkpoint says of them
    meta, shards, val, token_bytes = data
    T, parts = gpt.block_size, config.grad_accum * world_size    # parts: of a batch
    tokens_per_step = config.batch_size * T
    path, data_mark = folder.out / "ckpt.pt", fingerprint(config.data, meta)
    ckpt, model = read_checkpoint(path, gpt) if config.resume else (None, GPT(gpt))
    model.to(device)
    if "cuda" in device and torch.cuda.get_device_capability()[0] >= 8:
        model.half = torch.bfloat16
    optimizers = make_optimizers(model, config)
    step, flops, best_loss = 0, 0.0, math.inf
    grad_norms = torch.zeros(len(model.blocks), dtype=torch.float64, device=device)   # sums over the steps
    if ckpt:
        step, flops = restore(path, ckpt, optimizers, grad_norms, data_mark)
        past = [entry for at, entry in read_metrics(folder.out).items() if at <= step]
        best_loss = min([entry["val_loss"] for entry in past if "val_loss" in entry], default=math.inf)
    if config.compile or config.compile is None and "cuda" in device:
        model.compile_blocks()
    if config.checkpoint_blocks:
        model.checkpoint_blocks()
    ddp = model
    if world_size > 1:   # With skipping, it may be that no token of this process runs some sublayer.
        skipping = gpt.mod_rate > 0 or gpt.layer_drop > 0
        ddp = DistributedDataParallel(model, find_unused_parameters=skipping)

    # length of the run
    n_steps = config.max_iters or math.ceil(config.max_tokens / tokens_per_step)
    if config.max_flops:   # A guess, because skipping makes steps cheaper.
        n_steps = math.ceil(config.max_flops / (3 * tokens_per_step * model.flops_per_token()))
    name = torch.cuda.get_device_name() if "cuda" in device else "CPU"
    say(f"{gpt.residual}: {gpt.n_layer} blocks x {gpt.n_embd}, {model.num_params() / 1e6:.2f}M parameters; "
        f"steps {step} to {n_steps} of {tokens_per_step:,} tokens on {world_size} x {name}")
    folder.begin()
    clock, since, first = time.perf_counter(), step, step
    loss = torch.zeros((), device=device)
    signals = note_signals()
    while True:
        progress = flops / config.max_flops if config.max_flops else step / n_steps
        pause = step % config.eval_interval == 0 or progress >= 1
        stop = highest(signals[0] if signals else 0)   # for all processes, after the same step

        # checkpoint; it comes first, as an evaluation that runs out of memory must not cost the run
        if pause or stop:
            check_finite(model, loss, step, path)
            state = dict(model=model.state_dict(), optimizers=[each.state_dict() for each in optimizers],
                         step=step, flops=flops, grad_norms=grad_norms, data=data_mark,
                         model_config=asdict(gpt))
            folder.save("ckpt.pt", state)
        if stop:
            break
        model.before_step(min(1.0, progress + 1 / n_steps))

        # evaluation, by all processes, because the others would only wait
        if pause:
            nats, bpb, skipped = evaluate(model, *val, token_bytes, config.batch_size // parts)
            say(f"step {step:5d} | validation loss {nats:.4f} | {bpb:.4f} bits/byte | {skipped:.1%} skipped")
            if not math.isfinite(nats):
                refuse(f"step {step}: validation loss {nats}; best.pt has the best weights; use a lower --lr")
            if nats < best_loss:
                folder.save("best.pt", state)
            # After best.pt, because a run that is resumed finds the best loss here.
            folder.log(step=step, val_loss=nats, val_bpb=bpb, val_skip_rate=skipped,
                       grad_norms=grad_norms.tolist())
            best_loss, clock, since = min(nats, best_loss), time.perf_counter(), step
        if progress >= 1:
            break

        # forward and backward
        loss, ran = torch.zeros((), device=device), torch.zeros(2 * len(model.order))
        for micro in range(config.grad_accum):
            part = micro * world_size + rank
            x, y = train_batch(shards, T, gpt.seed, step, config.batch_size, part, parts)
            if max(x.max(), y.max()) >= meta["vocab_size"]:
                raise SystemExit(f"--data {config.data}: has a token beyond the {meta['vocab_size']} of its "
                                 f"tokenizer; prepare it anew")
            if "cuda" in device:   # Copying from pinned memory doesn't wait for the GPU.
                x, y = x.pin_memory(), y.pin_memory()
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            # LayerDrop's coins depend only on seed, step and part, as the batch does.
            torch.manual_seed(int(np.random.SeedSequence((gpt.seed, step, part)).generate_state(1)[0]))
            if world_size > 1:   # Processes exchange gradients once a step.
                ddp.require_backward_grad_sync = micro == config.grad_accum - 1
            kept = []
            micro_loss = ddp(x, y, kept=kept)[1] / config.grad_accum
            micro_loss.backward()
            loss += micro_loss.detach()
            ran += torch.tensor(ran_shares(kept)) / config.grad_accum
        for mean in (loss, ran) if world_size > 1 else ():
            dist.all_reduce(mean)
            mean /= world_size

        # update
        grads = [[p.grad for p in block.parameters() if p.grad is not None] for block in model.blocks]
        norms = torch.stack([torch.nn.utils.get_total_norm(each).to(device) for each in grads])
        grad_norms += norms
        if config.equalize_grads:
            equalize(grads, norms)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        share = lr_share(config, progress + 1 / n_steps)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        model.after_step(ran.tolist())
        step, flops = step + 1, flops + 3 * tokens_per_step * model.flops_per_token(ran=ran.tolist())

        # status line
        if step % config.log_interval == 0:
            check_finite(model, loss, step, path)
            tok_s = (step - since) * tokens_per_step / (time.perf_counter() - clock)
            skip_rate = 1 - ran.mean().item()
            folder.log(step=step, loss=loss.item(), lr=config.lr * share, grad_norm=norm.item(), tok_s=tok_s,
                       tokens=step * tokens_per_step, flops=flops, skip_rate=skip_rate)
            say(f"step {step:5d} | loss {loss.item():.4f} | lr {config.lr * share:.2e} | gradient "
                f"{norm.item():.2f} | {skip_rate:.1%} skipped | {tok_s:,.0f} tokens/s")
        if step % config.log_interval == 0 or step == first + 1:   # The first step warms up: it isn't timed.
            clock, since = time.perf_counter(), step

    if world_size > 1:
        dist.barrier()   # Nobody leaves while another one is still writing.
        dist.destroy_process_group()
    if stop:
        say(f"stopped at step {step}, all is saved; go on with: python train.py --out {folder.out} --resume")
        return 128 + stop
    say(f"done: {folder.out} holds the run; best validation loss {best_loss:.4f}\n"
        f"next: python sample.py {folder.out} --prompt \"def \"   or: python analyze.py {folder.out}")
    return 0

def check_finite(model, loss, step, path):
    """Nothing that has gone wrong is saved."""
    if not math.isfinite(loss.item()) or not all_finite(model):
        refuse(f"step {step}: loss {loss.item()}, or weights that are not finite; {path} is from before: "
               f"go on from there with --resume and a lower --lr")

# ----------------------------------------------------------------------------- processes and signals

def start_processes(config):
    """-> device, rank of this process, number of processes. torchrun says in the environment who we are."""
    rank, world_size = environment("RANK", 0), environment("WORLD_SIZE", 1)
    device = pick_device(config.device)
    if device == "cuda":
        device = f"cuda:{environment('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    if rank >= world_size:
        refuse(f"RANK={rank}: must be below WORLD_SIZE={world_size}; start with torchrun")
    if world_size > 1:
        if not {"MASTER_ADDR", "MASTER_PORT", "RANK"} <= os.environ.keys():
            refuse(f"WORLD_SIZE={world_size}: the processes can't find each other; start them with torchrun")
        dist.init_process_group("cpu:gloo,cuda:nccl" if "cuda" in device else "gloo")
    return device, rank, world_size

def note_signals():
    """-> a list that gets the numbers of signals. One ends a run after its step, a second one at once."""
    signals = []

    def note(number, frame):
        signals.append(number)
        if len(signals) > 1:
            sys.exit(128 + number)

    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        if signal.getsignal(number) is not signal.SIG_IGN:   # as nohup wants it
            signal.signal(number, note)
    return signals

def check_memory(gpt, config, world_size):
    """Refuses what can't fit: by a lower bound for weights, gradients, moments, and one micro-batch."""
    micro_tokens = config.batch_size // (config.grad_accum * world_size) * gpt.block_size
    need = (16 * n_weights(gpt) + 4 * micro_tokens * (gpt.vocab_size + gpt.n_layer * gpt.n_embd)
            + 16 * config.eval_windows * gpt.block_size)
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > have:
        refuse(f"--n_layer {gpt.n_layer} --n_embd {gpt.n_embd} --block_size {gpt.block_size} --batch_size "
               f"{config.batch_size}: take {need / 1e9:,.0f} GB of memory or more, and there are "
               f"{have / 1e9:,.0f}; make one of them smaller")

# ----------------------------------------------------------------------------- settings of a run

def settings_below(given):
    """What counts where there is no flag: settings of the run to resume or to replay, or those for a GPU."""
    if given.get("resume") and ("config" in given or "out" not in given):
        refuse("--resume: continues the run in --out with its own settings; give --out, and no --config")
    values = {}
    if given.get("resume") or given.get("config"):
        values = read_config(given.get("config") or Path(given["out"]) / "config.json")
        for name in "out", "config", "resume", "overwrite":   # A replay is a run of its own. What may
            values.pop(name, None)                             # replace files is typed, not read.
    elif pick_device(given.get("device", "auto")) == "cuda" and not given.keys() & {*SIZES}:
        values = dict(CUDA_DEFAULTS)
    size = values.get("batch_size")
    if given.get("resume") and given.get("batch_size", size) != size:
        refuse(f"--batch_size {given['batch_size']}: the run counts its tokens by {size}; leave that, or "
               f"start a new run")
    if given.keys() & {*ENDS}:   # A typed end replaces another one.
        values |= dict.fromkeys(ENDS, 0)
    return values

def read_config(path):
    """config.json -> dict. SystemExit where it is missing or broken, or has other settings than ours."""
    if not Path(path).is_file():
        refuse(f"{path}: no such file; name a run folder that train.py has made")
    defaults = asdict(GPTConfig()) | asdict(TrainConfig()) | dict(tokenizer="", compile=False)
    with reading(path):
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        for key, value in values.items():
            kinds = (int, float) if type(defaults[key]) is float else (type(defaults[key]),)
            if type(value) not in kinds and not (key == "compile" and value is None):
                raise ValueError(f"{key} is {value!r}")
    return values

def open_run(run, device="cpu", which="ckpt.pt"):
    """Run folder -> model in eval mode, its settings as a dict. Only reads. SystemExit with one sentence,
    whatever is wrong inside."""
    path = Path(run) / "config.json"
    config = read_config(path)
    _, model = read_checkpoint(Path(run) / which)
    with reading(path):
        if prepare.VOCABULARIES[config["tokenizer"]] > model.config.vocab_size:
            raise ValueError("its tokenizer has more tokens than its model")
        names = asdict(TrainConfig()).keys() - {"config", "resume", "overwrite"}
        for bad in field_problems(TrainConfig(**{name: config[name] for name in names})):
            raise ValueError(bad)
        config |= asdict(model.config)   # The checkpoint knows better.
    return model.to(device).eval(), config

if __name__ == "__main__":
    start(main)
