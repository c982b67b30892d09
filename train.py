"""
Pretrain a GPT with any residual, on a CPU, one GPU or several.

    python train.py                                     # PreNorm on Python code: minutes on a CPU
    python train.py --residual nag --out runs/nag       # each setting is a flag
    python train.py --out runs/nag --resume             # go on from its checkpoint
    python train.py --config runs/nag --out runs/nag1 --seed 1    # the same, with another seed
    torchrun --nproc_per_node 8 train.py --config configs/gpt2.json    # GPT-2 small on 8 GPUs
"""
# Read this as nanoGPT's train.py. First comes the training: settings, data, evaluation, rates,
# optimizers, the loop (`train`), and `main`, where a run begins. Behind it stands what you can take
# for granted at first: the status line, where settings come from, the run's folder, device and
# signals, and a trial of classes of your own. Our words:
#
#     residual    the rule by which a sublayer, attention or MLP, changes the stream (model.py)
#     decider     says which tokens skip which sublayers (model.py, part 3)
#     Trip        one pass in which tokens may skip. It notes what happened: who skipped, the loss,
#                 the gains (how much sublayers change a token; some residuals know it)
#     gate        a parameter that trains with --gate_lr. Residuals list theirs in own_lr.
#     part        a batch has grad_accum x processes parts. Each process takes its own in turn.
#                 (A part is what nanoGPT calls its batch: its batch_size is that of a part.)

import atexit
import contextlib
import datetime
import difflib
import json
import math
import os
import re
import shlex
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import prepare
from flags import (Mistake, flag, make_configs, mute, option_defaults, read_command_line, refuse,
                   start)
from model import (DECIDERS, GPT, Decider, GPTConfig, KVCache, RESIDUALS, Residual, Trip,
                   call_residual, flops_per_token, for_training, make_decider, make_residual,
                   needed_trip, num_params)
from prepare import locked, whole_file

# torchrun starts several processes, and numbers them. The first one, 0, speaks and writes files.
RANK = int(os.environ.get("RANK", 0))
N_PROCESSES = int(os.environ.get("WORLD_SIZE", 1))

def say(text):
    if RANK == 0:
        try:
            print(text, flush=True)
        except OSError:   # Its terminal is closed. The training goes on.
            mute()

def wait_for_all():
    """Until all processes are here. All call it, and `mean_of_all`, at the same time."""
    if N_PROCESSES > 1:
        dist.barrier()

def mean_of_all(number):
    """Each process gives a number, such as a loss -> their mean"""
    if N_PROCESSES == 1:
        return number
    total = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / N_PROCESSES

# ----------------------------------------------------------------------------------------- settings

@dataclass
class TrainConfig:
    """Each field is a flag: flag(default, help, lowest, highest). With a `group`, --help begins a
    new section. The model's size and the seed are in GPTConfig, in model.py."""
    data: str = flag("data/stdlib", "folder of token shards, made by prepare.py", group="run")
    out: str = flag("", "run folder; without it runs/RESIDUAL")
    config: str = flag("", "a run, or a file such as configs/gpt2.json, whose settings to take")
    init_from: str = flag("", "an earlier run, whose model and weights to begin with")
    resume: bool = flag(False, "continue the run in --out from its last checkpoint")
    or_resume: bool = flag(False, "begin, or go on if --out has a checkpoint; for torchrun's "
                                 "--max_restarts")
    overwrite: bool = flag(False, "replace the run in --out")

    max_iters: int = flag(420, "iterations of the optimizer", 1, 1e9, group="length of the run")
    max_flops: float = flag(0.0, "end after so many FLOPs of matmuls, not after max_iters", 0, 1e27)
    eval_interval: int = flag(100, "iterations between evaluations, which also save", 1, 1e9)
    eval_windows: int = flag(128, "fixed validation windows of block_size tokens", 1, 1e5)
    log_interval: int = flag(20, "iterations between status lines", 1, 1e9)

    batch_size: int = flag(16, "sequences per iteration, of all processes together", 1, 1e6,
                           group="optimizer")
    grad_accum: int = flag(1, "parts of a batch that each process takes in turn", 1, 1e6)
    optimizer: Literal["adamw", "sgd", "muon"] = flag(
        "muon", "muon: for the matrices of blocks, and adamw for the rest; sgd has momentum beta1")
    lr: float = flag(0.0, "peak learning rate; 0: 0.02 for muon, 0.006 for adamw, 0.1 for sgd",
                     0, 1e3)
    gate_lr: float = flag(1e-3, "that of gates: parameters that a residual lists in own_lr", 0, 1e3)
    min_lr: float = flag(0.1, "final learning rate / peak", 0, 1)
    warmup: float = flag(0.05, "share of the run with a rising learning rate", 0, 1)
    schedule: Literal["cosine", "wsd"] = flag("cosine", "wsd: constant, linear in the last fifth")
    weight_decay: float = flag(0.1, "of matrices only", 0, 1e3)
    beta1: float = flag(0.9, "of adamw: decay of its mean gradient; of sgd: momentum", 0, 0.9999)
    beta2: float = flag(0.95, "of adamw: decay of its mean squared gradient", 0, 0.9999)
    gate_beta1: float = flag(0.8, "beta1 of what trains with gate_lr; not of sgd", 0, 0.9999)
    grad_clip: float = flag(1.0, "largest global gradient norm; 0: no clipping", 0, 1e9)
    equalize_grads: bool = flag(False, "give the gradients of all blocks the same norm")

    device: Literal["auto", "cpu", "cuda"] = flag("auto", "auto: cuda where there is one",
                                                  group="machine")
    compile: bool = flag(False, "torch.compile; good on a GPU, after a minute or so")
    checkpoint_blocks: bool = flag(False, "save memory: the backward pass runs sublayers again")

    def problems(self):
        """Yields a sentence for each reason why this can't be run. make_configs refuses with it."""
        if self.overwrite and (self.resume or self.or_resume):
            yield "--overwrite: contradicts --resume and --or_resume; give one of them"
        if 0 < self.min_lr < 1e-3:   # So small, it is surely meant as a rate.
            yield f"--min_lr {self.min_lr}: is a share of --lr; 0.1 is a tenth of it"
        if self.batch_size % (self.grad_accum * N_PROCESSES):
            yield (f"--batch_size {self.batch_size}: must be a multiple of grad_accum x processes, "
                   f"{self.grad_accum} x {N_PROCESSES}")

# The usual learning rates, good ones for small models
RATES = dict(muon=2e-2, adamw=6e-3, sgd=0.1)

# --------------------------------------------------------------------------------------------- data

class Data:
    """What a run reads. (The default data set is made if it is not there.)"""
    def __init__(self, config, block_size):
        folder = config.data
        if RANK == 0 and folder == TrainConfig.data and not prepare.shard_paths(folder):
            say(f"{folder} is not there yet: making it from the Python standard library")
            prepare.main(["stdlib", "--out", folder])
        wait_for_all()   # The first process may still be writing.
        meta = prepare.load_meta(folder)
        self.tokenizer, self.vocab_size = meta["tokenizer"], meta["vocab_size"]
        self.token_bytes = prepare.token_bytes(self.tokenizer, self.vocab_size)   # of each token
        # This reads windows from all over the text, and refuses tokens of another tokenizer.
        prepare.windows_of(folder, "train", block_size, config.eval_windows)
        self.shards = prepare.open_split(folder, "train", block_size)
        self.val = prepare.windows_of(folder, "val", block_size, config.eval_windows)   # x, y
        self.fingerprint = prepare.fingerprint(folder)   # --resume wants the same data.

def get_batch(data, model_config, batch_size, step, part=0, n_parts=1, device="cpu"):
    """One of the n_parts of a batch: x, y (batch_size / n_parts, T). The batch depends on seed,
    step and batch_size only, so there is no random state to save: any number of processes, and a
    run that is resumed, see the same batches."""
    T = model_config.block_size
    n_windows = sum(len(shard) - T for shard in data.shards)   # numbered through all shards
    starts = np.random.default_rng((model_config.seed, step)).integers(0, n_windows, batch_size)
    x, y = prepare.read_windows(data.shards, starts.reshape(n_parts, -1)[part], T)
    if str(device) != "cpu":   # Copying from pinned memory doesn't wait for the GPU.
        x, y = (tokens.pin_memory().to(device, non_blocking=True) for tokens in (x, y))
    return x, y

# --------------------------------------------------------------------------------------- evaluation

@torch.no_grad()
def evaluate(model, x, y, token_bytes, batch_size):
    """x, y (n, T) -> nats per token, bits per byte of text, share of the sublayer runs that was
    skipped. token_bytes (V,): how many bytes each token is. batch_size: windows at a time"""
    nats, skipped, was_training = 0.0, 0.0, model.training
    model.eval()
    torch.manual_seed(0)   # If the decider draws who skips, it draws the same each time.
    for xi, yi in zip(x.split(batch_size), y.split(batch_size)):
        trip = needed_trip(model)
        _, loss = model(xi.to(model.device), yi.to(model.device), trip=trip)
        share = len(xi) / len(x)
        nats += loss.item() * share
        skipped += trip.skipped() * share if trip else 0.0
    model.train(was_training)
    bytes_per_token = max(1, token_bytes[y].sum().item()) / y.numel()   # 1: if all are ends of text
    return nats, nats / math.log(2) / bytes_per_token, skipped

def evaluate_and_report(model, data, batch_size, step, out):
    loss, bits, skipped = evaluate(model, *data.val, data.token_bytes, batch_size)
    refuse_if_not_finite("validation loss", loss, step, out)
    write_log(out, step=step, val_loss=loss, val_bpb=bits, val_skip_rate=skipped)
    say(f"iter {step:5d} | validation loss {loss:.4f} | {bits:.4f} bits/byte | {skipped:.1%} "
        f"skipped")

def say_if_it_was_better(out, last):
    """last: the last iteration, with whose weights the run ends"""
    losses = {step: entry["val_loss"] for step, entry in read_metrics(out).items()
              if "val_loss" in entry}
    best = min(losses, key=losses.get, default=last)
    if best != last and losses[best] < losses.get(last, -math.inf):
        say(f"the validation loss was lower at iteration {best}: {losses[best]:.4f}; only the last "
            f"weights are kept")

def refuse_if_not_finite(what, number, step, out):
    """Ends the run before it saves weights that are good for nothing."""
    if math.isfinite(number):
        return
    if step == 0:
        refuse(f"iteration 0: the {what} is not finite, before any training; look at the model")
    refuse(f"iteration {step}: the {what} is not finite; {out}/ckpt.pt, if it is there, is from "
           f"before: go on from there with --resume and a lower --lr")

# ----------------------------------------------------------------------- learning rate, gradients

def progress_of(config, step, flops):
    """How much of the run is done: 0 to 1, or, with --max_flops, a little more"""
    return flops / config.max_flops if config.max_flops else step / config.max_iters

def lr_factor(config, progress):
    """Learning rate / its peak: it rises to 1, then falls to min_lr, as a cosine or at the end only
    (wsd). progress: see progress_of"""
    progress = min(1.0, progress)
    if progress < config.warmup:
        return progress / config.warmup
    if config.schedule == "cosine":
        after_warmup = (progress - config.warmup) / max(1e-9, 1 - config.warmup)
        fallen = 0.5 - 0.5 * math.cos(math.pi * after_warmup)   # from 0 to 1
    else:
        fallen = max(0.0, (progress - 0.8) / 0.2)   # from 0 to 1, in the last fifth
    return 1 - (1 - config.min_lr) * fallen

def block_gradients(model):
    """-> for each block a list of its gradients, and the norms of these lists, (L,)"""
    grads = [[p.grad for p in block.parameters() if p.grad is not None] for block in model.blocks]
    zero = torch.zeros((), device=model.device)   # for a block that all tokens skip
    norms = [torch.nn.utils.get_total_norm(each) if each else zero for each in grads]
    return grads, torch.stack(norms)

def equalize(grads, norms):
    """Scales the gradients of each block to the root mean square of all blocks' norms (L,)."""
    wanted = norms.square().mean().sqrt()
    for block_grads, norm in zip(grads, norms):
        for grad in block_grads:
            grad.mul_(wanted / norm.clamp_min(1e-30))

# --------------------------------------------------------------------------------------- optimizers

class Muon(torch.optim.Optimizer):
    """For matrices (Jordan et al. 2024): the momentum of the gradient is made orthogonal, so that a
    step is equally large in every direction, not just where gradients are large. (torch.optim.Muon
    does the same, but always in bfloat16, which is very slow on many CPUs.)"""
    def __init__(self, groups, lr, momentum=0.95):
        super().__init__(groups, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            momentum, together = group["momentum"], {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in self.state:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                mean = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - momentum)
                ahead = p.grad.lerp(mean, momentum)   # one iteration ahead: Nesterov's way
                # A GPU takes all matrices of a shape at once, because one is too small for it. A
                # CPU takes one by one, because one fits into its cache.
                key = p.shape if p.is_cuda else p
                together.setdefault(key, []).append((p, ahead))
            for pairs in together.values():
                updates = orthogonal(torch.stack([ahead for _, ahead in pairs]))
                for (p, _), update in zip(pairs, updates):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    # Its entries have the rms 1 / sqrt(longer side). Those of AdamW's are near 0.2.
                    p.sub_(update, alpha=0.2 * max(p.shape) ** 0.5 * group["lr"])

def orthogonal(x):
    """Matrices x (n, rows, columns) -> such with the same directions, whose singular values are
    about 1 (0.7 to 1.2, or less if they were far below the others). Five steps of a polynomial
    bring them there (Newton-Schulz). It is fast, and need not be exact."""
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x   # x @ x.mT is then the smaller one of two products.
    if x.is_cuda:
        x = x.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if is_tall else x

def make_optimizers(model, config):
    """-> a list of optimizers: AdamW or SGD; with --optimizer muon AdamW, and Muon for the matrices
    of blocks. Only matrices have weight decay. One --lr is for all: with muon, AdamW has 0.02, too.
    One of your own needs a name in --optimizer, a rate in RATES, and lines here. A resumed run gets
    back what it has in self.state[p]."""
    in_own_lr = {p for residual in model.residuals() for name, p in residual.named_parameters()
                 if name in residual.own_lr}
    in_blocks = set(model.blocks.parameters())
    gates, vectors, matrices, for_muon = [], [], [], []
    for p in model.parameters():
        if p in in_own_lr:
            gates.append(p)
        elif p.dim() < 2:
            vectors.append(p)
        elif config.optimizer == "muon" and p in in_blocks and p.dim() == 2:
            for_muon.append(p)
        else:
            matrices.append(p)
    betas, gate_betas = (config.beta1, config.beta2), (config.gate_beta1, config.beta2)
    # peak_lr is a key of ours: before each step, `train` sets lr = peak_lr * lr_factor.
    groups = [dict(params=matrices, peak_lr=config.lr, weight_decay=config.weight_decay),
              dict(params=vectors, peak_lr=config.lr, weight_decay=0.0),
              dict(params=gates, peak_lr=config.gate_lr, weight_decay=0.0, betas=gate_betas)]
    if config.optimizer == "sgd":   # It has one momentum for all, and no use for betas.
        return [torch.optim.SGD(groups, config.lr, momentum=config.beta1)]
    optimizers = [torch.optim.AdamW(groups, config.lr, betas, fused=True)]
    if for_muon:
        groups = [dict(params=for_muon, peak_lr=config.lr, weight_decay=config.weight_decay)]
        optimizers.append(Muon(groups, config.lr))
    return optimizers

def load_moments(optimizers, ckpt):
    for optimizer, moments in zip(optimizers, ckpt["optimizers"], strict=True):
        # Rates and decay stay as the flags say.
        optimizer.load_state_dict(optimizer.state_dict() | dict(state=moments))

# ----------------------------------------------------------------------------------------- the loop

def make_ready(model, config, device):
    """Brings the model to its device -> the model, or its DDP wrapper if there are several
    processes, and what is called in training: that, or what compiles it"""
    model.to(device)
    if device != "cpu" and torch.cuda.get_device_capability()[0] >= 8:   # since Ampere
        # The model computes its products in this type, as autocast would. Weights stay float32.
        model.compute_in(torch.bfloat16)
    wrapped = model
    if N_PROCESSES > 1:
        # Where tokens skip, it may be that a sublayer is run by no token of this process.
        may_skip = "skipping" in model.decider.needs
        wrapped = DistributedDataParallel(model, find_unused_parameters=may_skip)
    return wrapped, for_training(model, wrapped, config.compile, config.checkpoint_blocks)

def forward_and_backward(model, wrapped, call, config, data, step, progress):
    """Each process takes --grad_accum parts of the batch in turn. Their gradients are added up in
    the parameters -> means over the parts, a dict of what is reported, and the FLOPs per token of
    the forward pass, fewer where tokens skip. wrapped, call: see make_ready"""
    records, trips, token_flops = [], [], 0.0
    n_parts = config.grad_accum * N_PROCESSES
    parts = range(RANK, n_parts, N_PROCESSES)   # those of this process
    for part in parts:
        x, y = get_batch(data, model.config, config.batch_size, step, part, n_parts, model.device)
        # If the decider draws who skips, that depends on nothing but seed, step and part.
        [seed] = np.random.SeedSequence((model.config.seed, step, part)).generate_state(1)
        torch.manual_seed(int(seed))
        if N_PROCESSES > 1:   # They exchange gradients once a step, in the last part.
            wrapped.require_backward_grad_sync = part == parts[-1]
        trip = needed_trip(model, progress)   # None, unless tokens skip, or a flag has a cost
        _, loss = call(x, y, trip=trip)
        (loss / config.grad_accum).backward()
        # What is reported is the cross entropy, without what --gain_cost, say, adds to it.
        record = dict(loss=trip.cross_entropy if trip else loss.detach(), skip_rate=0.0)
        if trip is not None:
            trips.append(trip)
            record["skip_rate"] = trip.skipped()
            if (gain := trip.mean_gain()) is not None:   # Somebody has asked for gains.
                record["mean_gain"] = gain.detach()
        records.append(record)
        token_flops += flops_per_token(model, trip) / config.grad_accum
    model.decider.after_iteration(trips, mean_of_all)   # --mod gain:rate moves its threshold.
    means = {name: sum(each[name] for each in records) / len(records) for name in records[0]}
    return means, token_flops

def train(model_config, config, ckpt, data, device, signals):
    """A whole run -> exit status: 0, or 1 if a signal has stopped it. ckpt: the checkpoint to begin
    with, or None; signals: a list, empty until Ctrl-C or a kill comes"""
    out, model, step, flops = Path(config.out), GPT(model_config), 0, 0.0
    if ckpt:
        load_weights(model, ckpt, config.out if config.resume else config.init_from)
    wrapped, call = make_ready(model, config, device)
    optimizers = make_optimizers(model, config)
    settings = of_the_run(asdict(model_config) | asdict(config))
    settings |= dict(tokenizer=data.tokenizer, vocab_size=model_config.vocab_size)
    if config.resume:
        step, flops = ckpt["step"], ckpt["flops"]
        load_moments(optimizers, ckpt)
        continue_run(out, settings, ckpt)
    else:
        begin_run(out, settings)   # Only now, after all checks, a run that it replaces is deleted.
    tokens_per_step = config.batch_size * model_config.block_size
    part_size = config.batch_size // (config.grad_accum * N_PROCESSES)   # sequences at a time
    goal = f"{config.max_flops:g} FLOPs" if config.max_flops else config.max_iters
    say(f"{model_config.residual}: {model_config.n_layer} blocks x {model_config.n_embd}, "
        f"{num_params(model) / 1e6:.2f}M parameters; iterations {step} to {goal} of "
        f"{tokens_per_step:,} tokens on {N_PROCESSES} x {model.device.type}")
    since = moment(config, step, flops)

    while True:
        # If any process has got a signal, all of them stop at this step.
        is_stopped = mean_of_all(len(signals)) > 0
        is_last = is_stopped or progress_of(config, step, flops) >= 1

        # --- Evaluate and save. Evaluation is short, so each process does all of it.
        if is_last or step % config.eval_interval == 0:
            if not is_stopped:
                evaluate_and_report(model, data, part_size, step, out)
            weight_norm = torch.nn.utils.get_total_norm(model.parameters()).item()
            refuse_if_not_finite("norm of the weights", weight_norm, step, out)
            # This is all that a run needs to go on. Batches, draws and rates follow from it.
            moments = [optimizer.state_dict()["state"] for optimizer in optimizers]
            state = dict(model=model.state_dict(), model_config=asdict(model_config),
                         settings=settings, optimizers=moments, step=step, flops=flops,
                         data=data.fingerprint)
            save_checkpoint(out, state)
            since = moment(config, step, flops)   # Speed is measured without these pauses.
        if is_last:
            break

        # --- From a batch to gradients
        progress = progress_of(config, step, flops)   # --gain_cost comes late.
        means, token_flops = forward_and_backward(model, wrapped, call, config, data, step,
                                                  progress)
        step += 1   # A warmup begins at a rate of 0, so the first step counts already.
        is_logged = step % config.log_interval == 0
        if is_logged or config.equalize_grads:
            grads, block_norms = block_gradients(model)
        if config.equalize_grads:
            equalize(grads, block_norms)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)

        # --- From gradients to weights
        # The backward pass costs as much as two forward passes.
        flops += 3 * tokens_per_step * mean_of_all(token_flops)
        factor = lr_factor(config, progress_of(config, step, flops))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        # --- Report
        if is_logged:
            refuse_if_not_finite("norm of the gradients", norm.item(), step, out)
            now = moment(config, step, flops)
            tok_s, pace = pace_between(since, now, tokens_per_step, model.device)
            report(out, step, pace, lr=config.lr * factor, grad_norm=norm.item(), flops=flops,
                   tok_s=tok_s, tokens=step * tokens_per_step, grad_norms=block_norms.tolist(),
                   **{name: mean_of_all(float(value)) for name, value in means.items()})
            since = now

    wait_for_all()   # Nobody leaves while another one is still writing.
    folder = shlex.quote(config.out)
    if is_stopped:
        say(f"stopped at iteration {step}, all is saved; go on with: "
            f"python train.py --out {folder} --resume")
        return 1
    say_if_it_was_better(out, step)
    say(f"done: {folder} holds the run\n"
        f"next: python sample.py {folder}   or: python analyze.py {folder}")
    return 0

# --------------------------------------------------------------------------------------------- main

def main(argv=None):
    """The command line, then a run -> its exit status. argv: a list of words, in a notebook, say"""
    typed = read_flags(argv)
    with only_here(typed["out"]):   # Nobody else changes a run that is there, from here on.
        if typed.get("or_resume") and Path(typed["out"], "ckpt.pt").exists():
            typed["resume"] = True
        model_config, config, ckpt = gather_settings(typed)
        if not config.resume:
            refuse_if_taken(Path(config.out), config)
        return check_and_train(model_config, config, ckpt)

def read_flags(argv=None):
    """The command line -> what is typed, a dict. `out` is always in it."""
    typed = read_command_line([GPTConfig, TrainConfig], argv, __doc__, epilog=residuals_in_words())
    if "vocab_size" in typed:   # `check_and_train` sets it.
        refuse("--vocab_size: the data say it; leave it out")
    for name in "resume", "or_resume":
        if typed.get(name) and "out" not in typed:
            refuse(f"--{name}: continues the run in --out; give --out, too")
    if typed.get("resume") and ("config" in typed or "init_from" in typed):
        refuse("--resume: continues a run with its own settings; leave out --config and "
               "--init_from")
    if "out" not in typed:
        typed["out"] = usual_folder(typed)
    return typed

def residuals_in_words():
    """For --help"""
    lines = []
    for name, kind in RESIDUALS.items():
        options = ",".join(f"{key}={value}" for key, value in option_defaults(kind).items())
        lines.append(f"  {name}:{options}" if options else f"  {name}")
    return "residuals, with their options:\n" + "\n".join(lines)

def only_here(out):
    """with only_here(out): no other run, and no prepare.py, writes to that folder."""
    return locked(out) if RANK == 0 else contextlib.nullcontext()

def check_and_train(model_config, config, ckpt):
    """What is needed before `train`: a trial of the model, the device, the processes, the data"""
    look_for_mistakes(model_config)
    device = set_up_device(config.device, model_config.n_embd)
    if N_PROCESSES > 1:
        join_processes(device)
    data = Data(config, model_config.block_size)
    if config.resume and prepare.fingerprint(config.data) != ckpt["data"]:
        refuse(f"{config.out}: is of other data than --data has now; put that back, or start a new "
               f"run")
    if ckpt and ckpt["settings"]["tokenizer"] != data.tokenizer:
        refuse(f"--init_from {config.init_from}: its tokens are those of "
               f"{ckpt['settings']['tokenizer']}, and {config.data} has {data.tokenizer}")
    # The rows of embedding and head: multiples of 64 are fast.
    model_config.vocab_size = math.ceil(data.vocab_size / 64) * 64
    with noted_signals() as signals:
        return train(model_config, config, ckpt, data, device, signals)

# ------------------------------------------------------------------------------ the status line

def report(out, step, pace, **found):
    """A line of metrics.jsonl, and a line for people"""
    write_log(out, step=step, **found)
    about_gain = f"mean gain {found['mean_gain']:.3f} | " if "mean_gain" in found else ""
    say(f"iter {step:5d} | loss {found['loss']:.4f} | lr {found['lr']:.2e} | gradient "
        f"{found['grad_norm']:.2f} | {about_gain}{found['skip_rate']:.1%} skipped | {pace}")

def moment(config, step, flops):
    return dict(step=step, flops=flops, progress=progress_of(config, step, flops),
                time=time.perf_counter())

# FLOP/s of a GPU in dense bfloat16 products, as its maker says
PEAKS = dict(A100=312e12, H100=989e12, H200=989e12)

def pace_between(since, now, tokens_per_step, device):
    """Two moments -> tokens per second, and words: these, the FLOPs per second of what ran, on a
    GPU the share of its peak, and how long the rest of the run will take"""
    seconds, iterations, flops, progress = (now[key] - since[key]
                                            for key in ("time", "step", "flops", "progress"))
    tok_s, flop_s = iterations * tokens_per_step / seconds, flops / seconds
    pace = f"{tok_s:,.0f} tokens/s, {flop_s / 1e9:,.0f} GFLOP/s"
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for name, peak in PEAKS.items():
        if name in gpu:
            pace += f" ({flop_s / peak / N_PROCESSES:.0%} of the peak)"
    left = max(0.0, 1 - now["progress"]) / progress * seconds
    return tok_s, f"{pace} | {datetime.timedelta(seconds=round(left))} left"

# -------------------------------------------------------------------- where settings come from

# Of each flag, what is typed counts. What isn't typed comes from the first of these that has it:
#
#     --resume, --or_resume   the run in --out, as its checkpoint says
#     --config RUN or FILE    the settings with which that run began, or those of a file
#     --init_from RUN         the model of that run
#     the defaults

DEFAULTS = asdict(GPTConfig()) | asdict(TrainConfig())

# What an earlier run can't change, and why. (Kernels change how a model is computed, and not what.)
FIXED = {name: "its weights are of that model" for name in asdict(GPTConfig()) if name != "kernels"}
FIXED |= dict(seed="the order of its data depends on it",
              batch_size="the order of its data depends on it",
              optimizer="the moments that are saved are of that optimizer",
              eval_windows="losses on other windows can't be compared")

# Of these, --init_from is free: its weights fit all the same.
FREE = "seed", "kernels", "block_size", "deep_supervision", "mod", "gain_cost"

def gather_settings(typed):
    """typed: a dict of flags and their values -> model_config, config, and the checkpoint to begin
    with, or None. SystemExit, with a sentence, if a value is impossible"""
    settings, ckpt = resumed_settings(typed) if typed.get("resume") else new_settings(typed)
    model_config, config = make_configs([GPTConfig, TrainConfig], settings)
    config.lr = config.lr or RATES[config.optimizer]
    return model_config, config, ckpt

def resumed_settings(typed):
    ckpt = read_checkpoint(typed["out"])
    earlier = DEFAULTS | of_the_run(ckpt["settings"])
    # With --or_resume, --init_from may be typed. It says how the run began, and that is over.
    settings = earlier | typed | dict(init_from=earlier["init_from"])
    refuse_changes(settings, earlier, FIXED, typed["out"])
    if settings["max_iters"] < ckpt["step"] and not settings["max_flops"]:
        refuse(f"--max_iters {settings['max_iters']}: {typed['out']} has {ckpt['step']} already")
    return settings, ckpt

def new_settings(typed):
    from_config, from_model, ckpt = {}, {}, None
    if "config" in typed:
        from_config = of_the_run(read_settings(typed["config"]))
    # --config repeats a run, and so the --init_from that it began with.
    source = typed.get("init_from", from_config.get("init_from"))
    if source:
        ckpt = read_checkpoint(source)
        from_model = of_the_run(ckpt["model_config"])
    settings = DEFAULTS | from_model | from_config   # What stands further right counts.
    if typed.get("optimizer", settings["optimizer"]) != settings["optimizer"]:
        settings["lr"] = 0.0   # That of --config was for another optimizer. 0: the usual one.
    settings |= typed
    fixed = [name for name in from_model if name not in FREE]
    refuse_changes(settings, from_model, fixed, source)
    return settings, ckpt

def usual_folder(typed):
    """Where a run goes without --out: that of attnres:group=4 is runs/attnres-group4."""
    settings, _ = new_settings(typed)
    return "runs/" + re.sub(r"[^\w.-]+", "-", str(settings["residual"]).replace("=", ""))

def refuse_changes(settings, earlier, names, run):
    for name in names:
        if settings[name] != earlier[name]:
            refuse(f"--{name} {settings[name]}: {run} has {earlier[name]}, and can't change it: "
                   f"{FIXED[name]}; leave it out, or start a new run")

def of_the_run(settings):
    """Without what says where a run goes and how it is started, and without what the data say"""
    others = "out", "config", "resume", "or_resume", "overwrite", "tokenizer", "vocab_size"
    return {name: value for name, value in settings.items() if name not in others}

# --------------------------------------------------------------------------------------- run folder

# A run is a folder:
#
#     config.json      the settings it began with: the flags, and the tokenizer
#     metrics.jsonl    a JSON object a line. What --resume has changed is here, too, with its flag:
#                      {"step": 200, "--lr": 0.01}
#     ckpt.pt          the last checkpoint: model (weights), model_config, settings (those in force
#                      now), optimizers (moments), step, flops, data (a fingerprint)
#
# People pass such folders on, so no code in one is run.

def read_settings(path):
    """A run folder, or a file such as configs/gpt2.json -> the settings it begins with, a dict"""
    file = Path(path, "config.json") if Path(path).is_dir() else Path(path)
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        return without_old_flags(dict(settings), file)
    except (OSError, TypeError, ValueError) as error:
        refuse(f"{file}: no settings there ({error}); name a run of train.py, or a JSON file")

def without_old_flags(settings, path):
    """--tie was a flag of the fourth edition."""
    if settings.pop("tie", False):
        refuse(f"{path}: has the flag --tie, which is gone; git checkout e690699 reads it")
    return settings

def read_metrics(run):
    """-> {step: all that metrics.jsonl says about it}"""
    path, metrics = Path(run) / "metrics.jsonl", {}
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, KeyError):   # A crash may have cut a line short.
            entry = json.loads(line)
            metrics.setdefault(entry["step"], {}).update(entry)
    return metrics

def read_checkpoint(run):
    """-> what a run's ckpt.pt holds, a dict"""
    path = Path(run) / "ckpt.pt"
    if Path(run).is_file():
        refuse(f"{run}: is a file; name the folder of a run")
    if not path.exists():
        refuse(f"{path}: no checkpoint there, seen from {os.getcwd()}; name a run of train.py")
    try:
        # weights_only: no code in the file is run.
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        GPTConfig(**without_old_flags(ckpt["model_config"], path))   # that it can be made
    except Exception as error:   # There are many ways in which a file can be broken.
        what = " ".join(str(error).split())[:200]   # torch writes many lines.
        refuse(f"{path}: is broken, or no checkpoint of this train.py ({what})")
    if "settings" not in ckpt:   # It is of the fourth edition, whose log has what --resume changed.
        ckpt["settings"] = read_settings(run)
        for entry in read_metrics(run).values():
            ckpt["settings"] |= {name.removeprefix("--"): value for name, value in entry.items()
                                 if name.startswith("--")}
    return ckpt

def load_weights(model, ckpt, run):
    try:
        model.load_state_dict(ckpt["model"])
    except RuntimeError as error:
        what = " ".join(str(error).split())[:300]
        refuse(f"{run}: its weights do not fit; use the settings and the model.py with which it "
               f"was trained ({what})")

def open_run(run, device="auto"):
    """For sample.py and analyze.py, and for you. Run folder -> its model in eval mode, and its
    settings, a dict: the flags, the tokenizer, and the fingerprint of its data. Nothing is written.
    device: auto, cpu or cuda"""
    ckpt = read_checkpoint(run)
    # --kernels on was right for the machine that trained. Without Triton, it would be refused.
    config = GPTConfig(**ckpt["model_config"] | dict(kernels="auto"))
    for problem in config.problems():
        refuse(f"{run}: {problem}. (Is a class of yours gone from model.py? Older runs can be read "
               f"by git checkout e690699.)")
    tokenizer = ckpt["settings"].get("tokenizer", "none")
    if prepare.VOCABULARIES.get(tokenizer, math.inf) > config.vocab_size:
        refuse(f"{run}: its settings name the tokenizer {tokenizer}, which is not that of its "
               f"weights")
    model = GPT(config)
    model.n_vocab = prepare.VOCABULARIES[tokenizer]
    load_weights(model, ckpt, run)
    model.to(set_up_device(device, config.n_embd)).eval()
    return model, ckpt["settings"] | asdict(config) | dict(fingerprint=ckpt["data"])

def data_of_run(run, settings, data=""):
    """-> the folder of the data on which a run was trained, and a sentence if they have changed
    since, else "". settings: as open_run returns them; data: where they are now, if they moved"""
    folder = data or settings["data"]
    if not Path(folder).exists():
        refuse(f"{run}: was trained on {settings['data']}, and {folder} is not here; say where "
               f"these data are, with --data")
    tokenizer = prepare.load_meta(folder)["tokenizer"]
    if tokenizer != settings["tokenizer"]:
        refuse(f"{run}: its tokens are those of {settings['tokenizer']}, and {folder} has "
               f"{tokenizer}")
    if prepare.fingerprint(folder) != settings["fingerprint"]:
        return folder, (f"{folder} is not, or no longer, what {run} was trained on: losses may "
                        f"differ")
    return folder, ""

def is_run(folder):
    """Other programs have a config.json or a ckpt.pt, too. The config of a run has a residual."""
    try:
        return "residual" in json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False

def refuse_if_taken(out, config):
    """A new run would replace these files of the folder. All others stay."""
    if (out / "meta.json").exists():
        refuse(f"--out {out}: is a data set; take another --out")
    found = [name for name in ("config.json", "metrics.jsonl", "ckpt.pt") if (out / name).exists()]
    if found and not is_run(out):
        refuse(f"--out {out}: holds {found[0]}, and is no run; take another --out")
    has_checkpoint = "ckpt.pt" in found
    # Without one, and with no iteration in its log, it was killed when it had just begun.
    is_empty = not has_checkpoint and not any(read_metrics(out))
    if found and not (config.overwrite or config.or_resume and is_empty):
        how = "--resume continues it, " if has_checkpoint else "its ckpt.pt is gone, "
        refuse(f"--out {out}: holds a run already; {how}--overwrite replaces it, another --out "
               f"keeps it")

def write_log(out, **values):
    """Adds a line to metrics.jsonl."""
    if RANK == 0:
        with open(out / "metrics.jsonl", "a") as file:
            file.write(json.dumps(values) + "\n")

def save_checkpoint(out, state):
    """state: what ckpt.pt is to hold, a dict"""
    if RANK == 0:
        with whole_file(out / "ckpt.pt") as file:
            torch.save(state, file)

def begin_run(out, settings):
    """The first files of a new run"""
    if RANK == 0:
        for name in "ckpt.pt", "metrics.jsonl":   # of the run that this one replaces
            (out / name).unlink(missing_ok=True)
        with whole_file(out / "config.json") as file:
            file.write(json.dumps(settings, indent=2).encode())

def continue_run(out, settings, ckpt):
    """What was logged after the checkpoint goes: the run takes those steps again. What this start
    changes is logged."""
    if RANK == 0:
        kept = [entry for step, entry in read_metrics(out).items() if step <= ckpt["step"]]
        with whole_file(out / "metrics.jsonl") as file:
            file.writelines(json.dumps(entry).encode() + b"\n" for entry in kept)
    changed = {f"--{name}": value for name, value in settings.items()
               if value != ckpt["settings"].get(name, DEFAULTS.get(name))}
    if changed:
        words = " ".join(f"{flag} {value}" for flag, value in changed.items())
        before, now = (f"{rate_of(each, ckpt):.2e}" for each in (ckpt["settings"], settings))
        if before != now:   # A longer run lets it rise again, say.
            words += f"; so the learning rate goes from {before} to {now}"
        say(f"from iteration {ckpt['step']} on: {words}")
        save_checkpoint(out, ckpt | dict(settings=settings))   # A kill must not undo the change.
        write_log(out, step=ckpt["step"], **changed)

def rate_of(settings, ckpt):
    """The learning rate that these settings, a dict, have at the iteration of a checkpoint"""
    config = SimpleNamespace(**DEFAULTS | settings)
    return config.lr * lr_factor(config, progress_of(config, ckpt["step"], ckpt["flops"]))

# ------------------------------------------------------------------------------ device and signals

def set_up_device(name, n_embd):
    """auto | cpu | cuda -> the device of this process: cpu, cuda:0, cuda:1, .."""
    if name == "cuda" and not torch.cuda.is_available():
        refuse("--device cuda: torch sees no CUDA device; use --device cpu")
    if name != "cpu" and torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"   # torchrun sets it.
        torch.cuda.set_device(device)
        return device
    # Small models are faster with one thread of the CPU, much so if other programs are busy.
    # OMP_NUM_THREADS, if it is set, decides instead. (torchrun sets it.)
    if "OMP_NUM_THREADS" not in os.environ and n_embd < 512:
        torch.set_num_threads(1)
    return "cpu"

def join_processes(device):
    """Each process calls it, once. From then on, they can exchange numbers and gradients."""
    store, rank, n_processes = next(dist.rendezvous("env://"))   # where they find each other
    # After --max_restarts, torchrun's store still has the addresses of the processes that are gone
    # (torch's issue 135712). On one machine, the number of the restart keeps them apart.
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore("restart " + os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    # gloo: for numbers on the CPU, as in mean_of_all; nccl: for gradients
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=n_processes)
    atexit.register(dist.destroy_process_group)   # No thread of torch may outlive Python.

@contextlib.contextmanager
def noted_signals():
    """with noted_signals() as signals: Ctrl-C or a kill only adds its number to this list, so that
    a training can save and stop. The same one again acts as usual."""
    signals, usual = [], {}

    def note(number, frame):
        signals.append(number)
        signal.signal(number, usual[number])

    if threading.current_thread() is threading.main_thread():   # No other one gets signals.
        for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
            if signal.getsignal(number) is not signal.SIG_IGN:   # nohup has SIGHUP ignored.
                usual[number] = signal.signal(number, note)   # It returns what was before.
    try:
        yield signals
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)

# ----------------------------------------------------------------- a trial of your own classes

# A mistake in a class of yours is to cost you seconds, and not an hour. So, first of all, train.py
# runs the residual and the decider of a config on a few tokens. (tests/test_model.py -k NAME takes
# longer, and finds more.)

@torch.no_grad()
def look_for_mistakes(config):
    """Mistake, with a sentence, if the class that --residual or --mod names has one of these: a
    misspelt or missing method, a forgotten return, a wrong shape, a look at other tokens"""
    kind = type(make_residual(config, 1))
    decider_kind = type(make_decider(config))
    look_at_names(kind, Residual, "forward")
    look_at_names(decider_kind, Decider, "forward")
    # The depth and the width are yours, and all else is small.
    model = GPT(GPTConfig(config.residual, config.n_layer, config.n_head, config.n_embd,
                          block_size=4, vocab_size=8, mlp_ratio=0.1, mod=config.mod)).eval()
    parameters = {name for residual in model.residuals() for name, _ in residual.named_parameters()}
    for name in kind.own_lr:
        if name not in parameters:
            raise Mistake(f"{kind.__name__}.own_lr names {name!r}, and its parameters are "
                          f"{', '.join(sorted(parameters)) or 'none'}")
    model(torch.zeros(2, 3, dtype=torch.long), trip=Trip(model, Decider(config), call=look_at_shapes))
    look_at_other_tokens(model, kind.__name__, Decider(config))   # All tokens run.
    look_at_other_tokens(model, decider_kind.__name__, model.decider)
    look_at_sampling(model, kind.__name__)

def look_at_names(kind, base, method):
    """kind: a class that is derived from base; method: what it has to replace, most of the time"""
    known = [name for name in dir(base) if not name.startswith("_")
             and getattr(base, name) is not getattr(torch.nn.Module, name, None)]
    for name in vars(kind):
        near = difflib.get_close_matches(name, known, 1, 0.85)
        if near and name not in known and not name.startswith(near[0]):
            raise Mistake(f"{kind.__name__} has a {name}; did you mean {near[0]}?")
    changed = [name for name in [*known, "__init__"] if getattr(kind, name) != getattr(base, name)]
    if not changed and kind is not base:
        raise Mistake(f"{kind.__name__} changes nothing of {base.__name__}; write its {method}")

def look_at_shapes(residual, stream, f, gain=None):
    """A stream keeps its form from sublayer to sublayer, unless it grows by design."""
    after = call_residual(residual, stream, f, gain)
    if shape_of(after) != shape_of(stream) and not residual.stream_grows:
        raise Mistake(f"{type(residual).__name__}.forward got {shape_of(stream)} and returned "
                      f"{shape_of(after)}. Is a return missing? (A stream of its own form needs a "
                      f"method start, too.)")
    return after

def shape_of(stream):
    """That of a stream's tensor, or of each, as text"""
    if isinstance(stream, tuple):
        return "(" + ", ".join(shape_of(part) for part in stream) + ")"
    return str(tuple(stream.shape)) if torch.is_tensor(stream) else type(stream).__name__

def look_at_other_tokens(model, name, decider):
    """Compares passes in which only a later token, or only another sequence, is another one."""
    def logits(idx):
        torch.manual_seed(0)   # All passes draw the same random numbers.
        return model(torch.tensor(idx), trip=Trip(model, decider))[0]
    usual = logits([[0, 1, 2, 3], [4, 5, 6, 7]])
    last = logits([[0, 1, 2, 7], [4, 5, 6, 7]])
    other = logits([[0, 1, 2, 3], [7, 6, 5, 4]])
    small = 1e-5 * max(1.0, usual.abs().max().item())
    if (usual - last)[0, :3].abs().max() > small:
        raise Mistake(f"{name} looks at later tokens; only f may look at other tokens")
    if (usual - other)[0].abs().max() > small:
        raise Mistake(f"{name} looks at other sequences; only f may look at other tokens")

def look_at_sampling(model, name):
    """There a residual gets the newest token alone. So it can't look at earlier ones."""
    def logits(idx, cache=None):
        return model(idx, cache=cache, trip=Trip(model, Decider(None)))[0][:, -1]
    idx, cache = torch.tensor([[0, 1, 2, 3]]), KVCache(4)
    usual, again = logits(idx), logits(idx)
    for token in idx.split(1, dim=1):
        newest = logits(token, cache)
    small = 1e-4 * max(1.0, usual.abs().max().item())
    # If it draws random numbers, the two usual ones differ, and nothing can be said.
    if (usual - again).abs().max() < small < (usual - newest).abs().max():
        raise Mistake(f"{name} looks at earlier tokens: one by one, as in sampling, they predict "
                      f"something else; only f may look at other tokens")

if __name__ == "__main__":
    start(main)   # It makes sentences of errors that you can mend, such as a full disk.
