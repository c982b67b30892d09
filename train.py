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
# for granted at first: where settings come from, the run's folder, processes and signals, and a
# trial of classes of your own. Our words:
#
#     residual    the rule by which a sublayer, attention or MLP, changes the stream (model.py)
#     decider     says which tokens skip which sublayers (model.py, part 3)
#     Trip        one pass in which tokens may skip. It notes who skipped, the loss, and the gains
#     gain        how much a sublayer changes a token; some residuals know it
#     gate        a parameter that trains with --gate_lr. Residuals list theirs in own_lr.
#     part        a batch has grad_accum x processes parts. Each process takes its own in turn.
#                 (A part is what nanoGPT calls its batch: its batch_size is that of a part.)

import atexit
import contextlib
import difflib
import itertools
import json
import math
import os
import re
import signal
import time
import traceback
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils.flop_counter import FlopCounterMode

import prepare
from flags import (TYPE_NAMES, Mistake, flag, make_configs, mute, option_defaults,
                   read_command_line, read_options, refuse, start)
from model import (DECIDERS, GPT, Coins, Decider, GPTConfig, KVCache, RESIDUALS, Residual, Trip,
                   call_residual, flops_per_token, for_training, needed_trip, num_params)

# torchrun starts several processes, and numbers them. The first one, 0, speaks and writes files.
RANK = int(os.environ.get("RANK", 0))
N_PROCESSES = int(os.environ.get("WORLD_SIZE", 1))

def say(text):
    if RANK == 0:
        try:
            print(text, flush=True)
        except OSError:   # Its terminal is closed. The training goes on.
            mute()

def mean_of_all(number):
    """Each process gives a number, such as a loss -> their mean. All wait here for each other."""
    total = torch.tensor(number, dtype=torch.float64)
    if N_PROCESSES > 1:
        dist.all_reduce(total)
    return total.item() / N_PROCESSES

# ----------------------------------------------------------------------------------------- settings

@dataclass
class TrainConfig:
    """flag(default, help, lowest, highest). The model's flags, and the seed, are in GPTConfig."""
    data: str = flag("data/stdlib", "folder of token shards, made by prepare.py", group="run")
    out: str = flag("", "run folder; without it runs/RESIDUAL")
    config: str = flag("", "a run, or a file such as configs/gpt2.json, whose settings to take")
    init_from: str = flag("", "an earlier run, whose model and weights to begin with")
    remove: str = flag("", "blocks of --init_from to do without, from 1: 2 or 9,10")
    resume: bool = flag(False, "continue the run in --out from its last checkpoint")
    or_resume: bool = flag(False, "go on if --out has a checkpoint, else begin (torchrun restarts)")
    overwrite: bool = flag(False, "begin anew; the run in --out moves to its folder replaced-1")

    max_iters: int = flag(420, "iterations of the optimizer", 1, 1e9, group="length of the run")
    max_flops: float = flag(0.0, "end after so many FLOPs of matmuls, not after max_iters", 0, 1e27)
    eval_interval: int = flag(100, "iterations between evaluations, which also save", 1, 1e9)
    eval_windows: int = flag(128, "fixed validation windows of block_size tokens", 1, 1e5)
    log_interval: int = flag(20, "iterations between status lines", 1, 1e9)

    batch_size: int = flag(16, "sequences per iteration, in all", 1, 1e6, group="optimizer")
    grad_accum: int = flag(1, "parts of a batch that each process takes in turn", 1, 1e6)
    optimizer: Literal["adamw", "sgd", "muon"] = flag(
        "muon", "muon: for the matrices of blocks, and adamw for the rest; sgd has momentum beta1")
    lr: float = flag(0.0, "its peak; 0: 0.02 for muon, 0.006 for adamw, 0.1 for sgd", 0, 1e3)
    gate_lr: float = flag(1e-3, "that of gates: parameters that a residual lists in own_lr", 0, 1e3)
    min_lr: float = flag(0.1, "final learning rate / peak", 0, 1)
    warmup: float = flag(0.05, "share of the run with a rising learning rate", 0, 1)
    schedule: Literal["cosine", "wsd"] = flag("cosine", "wsd: constant, linear in the last fifth")
    weight_decay: float = flag(0.1, "of matrices only", 0, 1e3)
    beta1: float = flag(0.9, "of adamw: decay of its mean gradient; of sgd: momentum", 0, 0.9999)
    beta2: float = flag(0.95, "of adamw: decay of its mean squared gradient", 0, 0.9999)
    gate_beta1: float = flag(0.8, "beta1 of what trains with gate_lr; not of sgd", 0, 0.9999)
    grad_clip: float = flag(1.0, "largest global gradient norm; 0: no clipping", 0, 1e9)
    equalize_grads: bool = flag(False, "for sgd: give the gradients of all blocks the same norm")

    device: Literal["auto", "cpu", "cuda"] = flag("auto", "cuda where it is", group="machine")
    dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "auto", "of matrix products; auto: bfloat16 on GPUs since Ampere. All else is float32")
    compile: bool = flag(False, "torch.compile; good on a GPU, after a minute or so")
    checkpoint_blocks: bool = flag(False, "save memory: the backward pass runs sublayers again")

    def problems(self):   # make_configs refuses with these sentences.
        n_parts = self.grad_accum * N_PROCESSES
        if self.overwrite and (self.resume or self.or_resume):
            yield "--overwrite: contradicts --resume and --or_resume; give one of them"
        if self.remove and not self.init_from:
            yield "--remove: is for the blocks of an earlier run; add --init_from RUN"
        if 0 < self.min_lr < 1e-3:   # So small, it is surely meant as a rate.
            yield f"--min_lr {self.min_lr}: is a share of --lr; 0.1 is a tenth of it"
        if self.batch_size % n_parts:
            yield f"--batch_size {self.batch_size}: must be a multiple of {n_parts}, its parts"
        if self.equalize_grads and self.optimizer != "sgd":
            yield f"--equalize_grads: {self.optimizer} hardly sees a gradient's size; use sgd"

CONFIGS = [GPTConfig, TrainConfig]
RATES = dict(muon=2e-2, adamw=6e-3, sgd=0.1)   # the usual --lr, good ones for small models

# --------------------------------------------------------------------------------------------- data

class Data:
    """What a run reads. (The default data set is made if it is not there.)"""
    def __init__(self, config, block_size):
        folder = config.data
        if RANK == 0 and folder == TrainConfig.data and not prepare.shard_paths(folder):
            prepare.main(["stdlib", "--out", folder])
        mean_of_all(0)   # The first process may still be writing.
        meta = prepare.load_meta(folder)
        self.tokenizer, self.vocab_size = meta["tokenizer"], meta["vocab_size"]
        self.token_bytes = prepare.token_bytes(self.tokenizer, self.vocab_size)   # of each token
        # This reads windows from all over the text, and refuses tokens of another tokenizer.
        prepare.windows_of(folder, "train", block_size, config.eval_windows)
        self.shards = prepare.open_split(folder, "train", block_size)
        self.val = prepare.windows_of(folder, "val", block_size, config.eval_windows)   # x, y
        self.fingerprint = prepare.fingerprint(folder)   # --resume wants the same data.

def get_batch(data, model_config, batch_size, step, part=0, n_parts=1, device="cpu"):
    """One of the n_parts of a batch: x, y (batch_size / n_parts, T). It depends on seed, step and
    batch_size only, so any number of processes, and a run that is resumed, see the same batches."""
    T = model_config.block_size
    n_windows = sum(len(shard) - T for shard in data.shards)   # numbered through all shards
    starts = np.random.default_rng((model_config.seed, step)).integers(0, n_windows, batch_size)
    x, y = prepare.read_windows(data.shards, starts.reshape(n_parts, -1)[part], T)
    if str(device) != "cpu":   # Copying from pinned memory doesn't wait for the GPU.
        x, y = (tokens.pin_memory().to(device, non_blocking=True) for tokens in (x, y))
    return x, y

# --------------------------------------------------------------------------------------- evaluation

@torch.no_grad()
def evaluate(model, x, y, token_bytes):
    """x, y (n, T) -> nats per token, bits per byte of text, share of the sublayer runs that was
    skipped. token_bytes (V,): how many bytes each token is. A checkpoint has one loss, whoever
    evaluates it: eight windows at a time, and their own draws."""
    nats, skipped, was_training = 0.0, 0.0, model.training
    model.eval()
    with torch.random.fork_rng(devices=[]):   # In a notebook, its own draws go on as before.
        for seed, (xi, yi) in enumerate(zip(x.split(8), y.split(8))):
            torch.manual_seed(8 * seed)   # --mod coins draws who skips.
            trip = needed_trip(model)
            _, loss = model(xi.to(model.device), yi.to(model.device), trip=trip)
            share = len(xi) / len(x)
            nats += loss.item() * share
            skipped += trip.skipped() * share if trip else 0.0
    model.train(was_training)
    bytes_per_token = max(1, token_bytes[y].sum().item()) / y.numel()   # 1: if all are ends of text
    return nats, nats / math.log(2) / bytes_per_token, skipped

def other_loss(run, loss, before):
    """-> a sentence if a checkpoint's loss isn't what it was when it was saved, before, else "" """
    # A run that was stopped had no time for an evaluation. bfloat16 makes less of a difference.
    if before is None or abs(loss - before) <= 0.01 * before:
        return ""
    return (f"{run}: has the validation loss {loss:.4f} now, and had {before:.4f} when it was "
            f"saved: this is other code, or other data, than in the training")

def refuse_if_not_finite(what, step, out, *numbers):
    """Ends the run before it saves weights that are good for nothing."""
    if not all(map(math.isfinite, numbers)):
        refuse(f"iteration {step}: the {what} is not finite; with a lower --lr, --resume can go on "
               f"from {out}/ckpt.pt, if there is one")

# ----------------------------------------------------------------------- learning rate, gradients

def progress_of(config, step, flops):
    """How much of the run is done: 0 to 1, or, with --max_flops, a little more"""
    return flops / config.max_flops if config.max_flops else step / config.max_iters

def lr_factor(config, progress):
    """Learning rate / its peak: it rises to 1, then falls to min_lr. progress: see progress_of"""
    progress = min(1.0, progress)
    if progress < config.warmup:
        return progress / config.warmup
    if config.schedule == "cosine":
        after_warmup = (progress - config.warmup) / max(1e-9, 1 - config.warmup)
        fallen = 0.5 - 0.5 * math.cos(math.pi * after_warmup)   # from 0 to 1
    else:
        fallen = max(0.0, (progress - 0.8) / 0.2)   # from 0 to 1, in the last fifth
    return 1 - (1 - config.min_lr) * fallen

def norms_of_blocks(model, equalizes):
    """-> the norm of each block's gradients, (L,). equalizes: scales them to their mean square"""
    grads = [[p.grad for p in block.parameters() if p.grad is not None] for block in model.blocks]
    norms = torch.stack([get_total_norm(each).to(model.device) for each in grads])   # 0 of none
    if equalizes:
        wanted = norms.square().mean().sqrt()
        for block_grads, norm in zip(grads, norms):
            for grad in block_grads:
                grad.mul_(wanted / norm.clamp_min(1e-30))
    return norms

# --------------------------------------------------------------------------------------- optimizers

class Muon(torch.optim.Optimizer):
    """For matrices (Jordan et al. 2024): the momentum of the gradient is made orthogonal, so that a
    step is equally large in every direction, not just where gradients are large."""
    def __init__(self, groups, lr, momentum=0.95):
        super().__init__(groups, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            momentum, together = group["momentum"], {}
            for p in [p for p in group["params"] if p.grad is not None]:
                if p not in self.state:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                mean = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - momentum)
                ahead = p.grad.lerp(mean, momentum)   # one iteration ahead: Nesterov's way
                # A GPU takes all of a shape at once; a CPU takes one, which fits into its cache.
                together.setdefault(p.shape if p.is_cuda else p, []).append((p, ahead))
            for pairs in together.values():
                updates = orthogonal(torch.stack([ahead for _, ahead in pairs]))
                for (p, _), update in zip(pairs, updates):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    # Its entries have the rms 1 / sqrt(longer side). Those of AdamW's are near 0.2.
                    p.sub_(update, alpha=0.2 * max(p.shape) ** 0.5 * group["lr"])

def orthogonal(x):
    """Matrices x (n, rows, columns) -> such with the same directions, whose singular values are
    about 1 (0.7 to 1.2, or less if they were far below the others). Five steps bring them there,
    each x <- x P with P = a + b x'x + c x'x x'x (Newton-Schulz). All is in float32: in bfloat16, a
    gradient of few directions, as where nearly all tokens skip, would become rounding noise."""
    if x.shape[1] < x.shape[2]:   # x'x is then the smaller one of two products.
        return orthogonal(x.mT).mT
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    if x.shape[1] == x.shape[2]:
        for _ in range(5):
            gram = x.mT @ x
            x = a * x + x @ torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        return x
    # A long x is multiplied only twice, at the beginning and at the end. In between, its small
    # x'x is enough: a step makes P x'x P of it, and all five P are multiplied with one another.
    gram, product = x.mT @ x, None
    for step in range(5):
        P = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        P.diagonal(dim1=1, dim2=2).add_(a)
        product = P if product is None else P @ product
        if step < 4:
            gram = P @ (P @ gram)
    return x @ product

def make_optimizers(model, config):
    """-> a list of optimizers: AdamW or SGD; with --optimizer muon AdamW, and Muon for the matrices
    of blocks. Only matrices have weight decay. One --lr is for all: with muon, AdamW has 0.02, too.
    One of your own needs a name in --optimizer, a rate in RATES, and lines here."""
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
    # peak_lr is a key of ours: before each step, `train` sets lr = peak_lr * lr_factor.
    usual = dict(peak_lr=config.lr, weight_decay=config.weight_decay)
    groups = [dict(params=matrices) | usual,
              dict(params=vectors, peak_lr=config.lr, weight_decay=0.0),
              dict(params=gates, peak_lr=config.gate_lr, weight_decay=0.0,
                   betas=(config.gate_beta1, config.beta2))]   # SGD has no use for betas.
    if config.optimizer == "sgd":
        return [torch.optim.SGD(groups, config.lr, momentum=config.beta1)]
    optimizers = [torch.optim.AdamW(groups, config.lr, (config.beta1, config.beta2), fused=True)]
    if for_muon:
        optimizers.append(Muon([dict(params=for_muon) | usual], config.lr))
    return optimizers

# ----------------------------------------------------------------------------------------- the loop

def make_model(config):
    """A GPT with its first weights. (A class of yours may draw some by torch.randn. So we seed.)"""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return GPT(config)

def make_ready(model, config, device):
    """Brings the model to its device -> the model, or its DDP wrapper if there are several
    processes, and what is called in training: that, or what compiles it"""
    model.to(device)
    has_bfloat16 = device != "cpu" and torch.cuda.get_device_capability()[0] >= 8   # since Ampere
    if config.dtype == "bfloat16" or config.dtype == "auto" and has_bfloat16:
        model.compute_in(torch.bfloat16)   # its products, as with autocast
    if config.compile:
        try:   # Without a C++ compiler, torch would say so in a hundred lines, and late.
            torch.compile(lambda x: x + 1)(torch.ones(2, device=device))
        except Exception as error:
            refuse(f"--compile: doesn't work here; install a C++ compiler, or leave it out "
                   f"({' '.join(str(error).split())[:200]})")
    wrapped = model
    if N_PROCESSES > 1:
        # Where tokens skip, it may be that a sublayer is run by no token of this process.
        may_skip = type(model.decider) is not Decider
        wrapped = DistributedDataParallel(model, find_unused_parameters=may_skip)
    return wrapped, for_training(model, wrapped, config.compile, config.checkpoint_blocks)

def train(model_config, config, ckpt, data, device, signals):
    """A whole run -> exit status: 0, or 1 if a signal has stopped it. ckpt: the checkpoint to begin
    with, or None; signals: a list, empty until Ctrl-C or a kill comes"""
    out, model = Path(config.out), make_model(model_config)
    step, flops, seconds = 0, 0.0, 0.0   # seconds: of training, without evaluations
    if ckpt:
        load_weights(model, ckpt, config.out if config.resume else config.init_from)
    wrapped, call = make_ready(model, config, device)
    optimizers = make_optimizers(model, config)
    settings = without(asdict(model_config) | asdict(config), HOW_IT_STARTS)
    settings["tokenizer"] = data.tokenizer
    if config.resume:
        step, flops, seconds = ckpt["step"], ckpt["flops"], ckpt["seconds"]
        for optimizer, moments in zip(optimizers, ckpt["optimizers"], strict=True):
            # Rates and decay stay as the flags say.
            optimizer.load_state_dict(optimizer.state_dict() | dict(state=moments))
    if step > 0:
        continue_run(out, settings, ckpt)
    n_parts = config.grad_accum * N_PROCESSES
    tokens_per_step = config.batch_size * model_config.block_size
    say(f"{model_config.residual}: {num_params(model) / 1e6:.2f}M parameters; iterations of "
        f"{tokens_per_step:,} tokens, from {step} on, on {N_PROCESSES} x {model.device.type}")
    began = time.perf_counter() - seconds
    last_step, last_seconds = step, seconds   # when the last status line came

    while True:
        # If any process has got a signal, all of them stop at this step.
        is_stopped = mean_of_all(len(signals)) > 0
        progress = progress_of(config, step, flops)
        is_last = is_stopped or progress >= 1
        if is_stopped and step == 0:   # An older run, which --overwrite would replace, stays.
            say("stopped before the first iteration; nothing is changed")
            return 1

        # --- Evaluate and save
        if is_last or step % config.eval_interval == 0:
            seconds = time.perf_counter() - began
            found = {}   # Whoever stops it may not wait, so then it only saves.
            if not is_stopped:   # An evaluation is short, so each process does all of it.
                loss, bits, skipped = evaluate(model, *data.val, data.token_bytes)
                found = dict(val_loss=loss, val_bpb=bits, val_skip_rate=skipped)
                say(f"iter {step:5d} | validation loss {loss:.4f} | {bits:.4f} bits/byte | "
                    f"{skipped:.1%} skipped")
                if config.resume and step == ckpt["step"]:
                    if warning := other_loss(out, loss, ckpt["val_loss"]):
                        say(warning)
            refuse_if_not_finite("validation loss, or a weight,", step, out,
                                 get_total_norm(model.parameters()).item(), *found.values())
            if config.overwrite and step == 0:
                put_aside(out)
            # This is all that a run needs to go on. Batches, draws and rates follow from it.
            moments = [optimizer.state_dict()["state"] for optimizer in optimizers]
            save_checkpoint(out, dict(model=model.state_dict(), settings=settings, step=step,
                                      flops=flops, seconds=seconds, optimizers=moments,
                                      val_loss=found.get("val_loss"), data=data.fingerprint))
            if step == 0:
                write_whole(out / "config.json", json.dumps(settings, indent=2))
                write_whole(out / "metrics.jsonl", "")
            if found:
                write_log(out, step=step, seconds=seconds, **found)
            began = time.perf_counter() - seconds   # Meanwhile, the clock stood still.
        if is_last:
            break

        # --- From a batch to gradients
        parts = range(RANK, n_parts, N_PROCESSES)   # those of this process
        records, trips = [], []
        for part in parts:
            x, y = get_batch(data, model_config, config.batch_size, step, part, n_parts, device)
            # If the decider draws who skips, that depends on nothing but seed, step and part.
            [seed] = np.random.SeedSequence((model_config.seed, step, part)).generate_state(1)
            torch.manual_seed(int(seed))
            # Processes exchange gradients once a step, in their last part. (DDP reads this.)
            wrapped.require_backward_grad_sync = part == parts[-1]
            trip = needed_trip(model, progress)   # None, unless tokens skip, or a flag has a cost
            _, loss = call(x, y, trip=trip)
            (loss / config.grad_accum).backward()   # Gradients are added up in the parameters.
            records.append(record_of(model, loss.detach(), trip))
            if trip is not None:
                trips.append(trip)
        model.decider.after_iteration(trips, mean_of_all)   # --mod gain:rate moves its threshold.
        means = {name: sum(record[name] for record in records) / len(records)
                 for name in records[0]}
        # The backward pass costs as much as two forward passes.
        flops += 3 * tokens_per_step * mean_of_all(means.pop("token_flops"))
        step += 1   # A warmup begins at a rate of 0, so the first step counts already.
        is_logged = step % config.log_interval == 0

        # --- From gradients to weights
        if is_logged or config.equalize_grads:
            block_norms = norms_of_blocks(model, config.equalize_grads)
        norm = clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        progress = progress_of(config, step, flops)
        factor = lr_factor(config, progress)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        # --- Report
        if is_logged:
            refuse_if_not_finite("norm of the gradients", step, out, norm.item())
            means = {name: mean_of_all(float(mean)) for name, mean in means.items()}
            seconds = time.perf_counter() - began
            tok_s = (step - last_step) * tokens_per_step / (seconds - last_seconds)
            last_step, last_seconds = step, seconds
            write_log(out, step=step, flops=flops, seconds=seconds, lr=config.lr * factor,
                      grad_norm=norm.item(), grad_norms=block_norms.tolist(),
                      tokens=step * tokens_per_step, tok_s=tok_s, **means)
            gain = f"mean gain {means['mean_gain']:.3f} | " if "mean_gain" in means else ""
            minutes_left = max(0.0, 1 - progress) / progress * seconds / 60
            say(f"iter {step:5d} | loss {means['loss']:.4f} | lr {config.lr * factor:.2e} | "
                f"gradient {norm:.2f} | {gain}{means['skip_rate']:.1%} skipped | "
                f"{tok_s:,.0f} tokens/s | {minutes_left:.1f} minutes left")

    if N_PROCESSES > 1:   # Nobody leaves while another one is still writing. (After an all_reduce
        dist.barrier()    # in place of a barrier, gloo aborted at the end of some runs.)
    if is_stopped:
        say(f"stopped at iteration {step}, all is saved; go on with --out {out} --resume")
        return 1
    say(f"done; next: python sample.py {out}   or: python analyze.py {out}")
    return 0

def record_of(model, loss, trip):
    """What is reported of one pass, a dict of numbers. trip: as needed_trip has made it"""
    record = dict(loss=loss, skip_rate=0.0, token_flops=flops_per_token(model, trip))
    if trip is not None:
        # The cross entropy, without what --gain_cost, say, adds to it
        record |= dict(loss=trip.cross_entropy, skip_rate=trip.skipped())
        if (gain := trip.mean_gain()) is not None:   # Somebody has asked for gains.
            record["mean_gain"] = gain.detach()
        trip.streams.clear()   # What is large goes. The decider wants to see the rest.
        trip.notes.clear()
    return record

# --------------------------------------------------------------------------------------------- main

def main(argv=None):
    """The command line, then a run -> its exit status. argv: a list of words, in a notebook, say"""
    typed = read_flags(argv)
    # Nobody else, nor prepare.py, writes to that folder from here on.
    with prepare.locked(typed["out"]) if RANK == 0 else contextlib.nullcontext():
        if typed.get("or_resume") and Path(typed["out"], "ckpt.pt").exists():
            typed["resume"] = True
        model_config, config, ckpt = gather_settings(typed)
        if not config.resume:
            refuse_if_taken(Path(config.out), config.overwrite)
            if RANK == 0:
                look_for_mistakes(model_config)
        device = set_up_device(config.device, model_config.n_embd)
        join_processes(device)
        data = Data(config, model_config.block_size)
        if config.resume and data.fingerprint != ckpt["data"]:
            refuse(f"{config.out}: is of other data than --data has now; put those back")
        if ckpt and ckpt["settings"]["tokenizer"] != data.tokenizer:
            refuse(f"--data {config.data}: needs the tokenizer of the weights of --init_from, "
                   f"{ckpt['settings']['tokenizer']}, and has {data.tokenizer}")
        # The rows of embedding and head: multiples of 64 are fast.
        model_config.vocab_size = math.ceil(data.vocab_size / 64) * 64
        with noted_signals() as signals, torch.random.fork_rng(devices=[]):
            return train(model_config, config, ckpt, data, device, signals)

def read_flags(argv=None):
    """The command line -> what is typed, a dict. `out` is always in it."""
    typed = read_command_line(CONFIGS, argv, __doc__, epilog=residuals_in_words())
    if "vocab_size" in typed:
        refuse("--vocab_size: the data say it; leave it out")
    for name in "config", "init_from", "remove":
        if typed.get("resume") and name in typed:
            refuse(f"--{name}: is for new runs, and --resume continues one; leave it out")
    if "out" not in typed:   # That of attnres:group=4 is runs/attnres-group4.
        if typed.get("resume") or typed.get("or_resume"):
            refuse("--resume, --or_resume: continue the run in --out; give --out, too")
        residual = typed.get("residual") or gather_settings(typed)[0].residual
        typed["out"] = "runs/" + re.sub(r"[^\w.-]+", "-", residual.replace("=", ""))
    return typed

def residuals_in_words():   # for --help
    names = [with_options(name, RESIDUALS) for name in RESIDUALS]
    return "residuals, with their options:\n  " + "\n  ".join(names)

# ------------------------------------------------------------------------ where settings come from

# What is typed counts. A flag that isn't typed gets its value from the first of these that has it:
#
#                            what it gives                                  what it fixes
#     --resume, --or_resume  all settings, as the checkpoint has them       FIXED_IN_A_RUN
#     --config RUN or FILE   all with which that run began, or of a file    nothing
#     --init_from RUN        its model                                      FIXED_BY_WEIGHTS
#     the defaults           all the others                                 nothing

DEFAULTS = asdict(GPTConfig()) | asdict(TrainConfig())
HOW_IT_STARTS = {"out", "config", "resume", "or_resume", "overwrite"}   # is typed, and never saved
MODEL = {*asdict(GPTConfig())} - {"vocab_size", "kernels"}   # Kernels only say how it is computed.
FIXED_BY_WEIGHTS = MODEL - {"seed", "block_size", "repeat", "deep_supervision", "mod", "gain_cost"}
# Also what its moments, the order of its data, and the comparison of its losses depend on
FIXED_IN_A_RUN = MODEL | {"optimizer", "batch_size", "eval_windows"}

def gather_settings(typed):
    """What is typed, a dict -> model_config, config, and the checkpoint to begin with, or None.
    SystemExit or Mistake, with a sentence, if a value is impossible"""
    earlier, fixed, ckpt = {}, set(), None
    if typed.get("resume"):
        source = typed["out"]
        ckpt = read_checkpoint(source)
        earlier, fixed = ckpt["settings"], FIXED_IN_A_RUN
        # With --or_resume, they may be typed. They say how the run began, and that is over.
        typed = without(typed, {"config", "init_from", "remove"})
    elif "config" in typed:
        earlier = read_settings(typed["config"])
        if typed.get("optimizer", earlier.get("optimizer")) != earlier.get("optimizer"):
            earlier.pop("lr", None)   # It was for another optimizer.
    asked = earlier | typed
    if ckpt is None and asked.get("init_from"):
        source = str(asked["init_from"])
        ckpt = read_checkpoint(source)
        remove_blocks(ckpt, asked.get("remove"))
        asked = {name: ckpt["settings"][name] for name in MODEL} | asked
        fixed = FIXED_BY_WEIGHTS
    settings = without(DEFAULTS | asked, {"tokenizer"})   # The data say that.
    rule = class_named(settings["residual"], RESIDUALS, Residual)
    decider = class_named(settings["mod"], DECIDERS, Decider)
    who = rule.__name__ if decider is Decider else f"{rule.__name__} or {decider.__name__}"
    with errors_named(who):   # A config makes one of each, to see what they can do.
        model_config, config = make_configs(CONFIGS, settings)
    if "gate_lr" in typed and not rule.own_lr:
        refuse(f"--gate_lr: nothing in --residual {model_config.residual} trains with it")
    model_config.residual = with_options(model_config.residual, RESIDUALS)
    model_config.mod = with_options(model_config.mod, DECIDERS)
    config.lr = config.lr or RATES[config.optimizer]
    settings = asdict(model_config) | asdict(config)
    for name in sorted(fixed):
        before = ckpt["settings"][name]
        if settings[name] != before:
            refuse(f"--{name} {settings[name]}: {source} has {before or 'none'}, and can't change "
                   f"it; leave it out, or start a new run")
    if config.resume and config.max_iters < ckpt["step"] and not config.max_flops:
        refuse(f"--max_iters {config.max_iters}: {source} has {ckpt['step']} already")
    return model_config, config, ckpt

def without(settings, names):
    return {name: value for name, value in settings.items() if name not in names}

def with_options(text, registry):
    """("nag", RESIDUALS) -> "nag:directions=32,power=0.5". Runs are saved so: who edits a default
    in model.py later doesn't change them."""
    name, _, typed = text.partition(":")
    options = option_defaults(registry[name])
    options |= read_options(typed, options, allowed={})
    words = ",".join(f"{key}={value}" for key, value in options.items()
                     if type(value) in TYPE_NAMES)   # These can be typed.
    return f"{name}:{words}" if words else name

def read_settings(path):
    """A run folder, or a file such as configs/gpt2.json -> the settings it begins with, a dict"""
    file = Path(path, "config.json") if Path(path).is_dir() else Path(path)
    try:
        settings = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        refuse(f"{file}: no settings there ({error}); name a run of train.py, or a JSON file")
    for name in HOW_IT_STARTS & settings.keys():
        refuse(f"{file}: {name!r} says how a run is started; take it out, and type --{name}")
    return settings

def read_blocks(text, n_blocks):
    """Of --remove: "9,10" -> [8, 9], as blocks are numbered in the code; "" or None -> []"""
    words = str(text).split(",") if text else []
    known = [str(number) for number in range(1, n_blocks + 1)]
    if not {*words} < {*known}:
        refuse(f"--remove {text}: name some, not all, of the blocks 1 to {n_blocks}, as in 1,2")
    return sorted({int(word) - 1 for word in words})

def remove_blocks(ckpt, text):
    """Takes blocks out of a checkpoint, as --remove says. Those behind them get lower numbers."""
    settings, weights = ckpt["settings"], ckpt["model"]
    removed = read_blocks(text, settings["n_layer"])
    if removed and settings["repeat"]:
        refuse(f"--remove: would change what --repeat {settings['repeat']} of that run means")
    kept = [number for number in range(settings["n_layer"]) if number not in removed]
    ckpt["model"] = {name: w for name, w in weights.items() if not name.startswith("blocks.")}
    for new, old in enumerate(kept):
        for name, weight in weights.items():
            if name.startswith(f"blocks.{old}."):
                ckpt["model"][name.replace(f".{old}.", f".{new}.", 1)] = weight
    settings["n_layer"] = len(kept)

# --------------------------------------------------------------------------------------- run folder

# A run is a folder. People pass them on, so no code in one is run.
#
#     config.json      the settings it began with: the flags, and the tokenizer
#     metrics.jsonl    a JSON object a line. What --resume has changed is here, too, with its flag:
#                      {"step": 200, "--lr": 0.01}
#     ckpt.pt          the last checkpoint, which is enough by itself: model (weights), settings
#                      (those in force now), optimizers (moments), step, flops, seconds, val_loss,
#                      data (a fingerprint)
#     replaced-1, ..   folders with runs that --overwrite has replaced. Delete them as you like.

FILES = "ckpt.pt", "config.json", "metrics.jsonl"

def read_metrics(run):
    """-> {step: all that metrics.jsonl says about it}"""
    path, metrics = Path(run) / "metrics.jsonl", {}
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError):   # A crash may have cut it.
            entry = json.loads(line)
            metrics.setdefault(int(entry["step"]), {}).update(entry)
    return metrics

def read_checkpoint(run):
    """-> what a run's ckpt.pt holds, a dict. A flag that is younger than it has its default."""
    path = Path(run) / "ckpt.pt"
    if not path.exists():
        refuse(f"{path}: no checkpoint there, seen from {os.getcwd()}; name the folder of a run")
    try:
        # weights_only: no code in the file is run.
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        ckpt["settings"] = without(DEFAULTS, HOW_IT_STARTS) | ckpt["settings"]
        return {name: ckpt[name] for name in ("model", "settings", "optimizers", "step", "flops",
                                              "seconds", "val_loss", "data")}
    except Exception as error:   # There are many ways in which a file can be broken.
        what = " ".join(f"{type(error).__name__}: {error}".split())   # torch writes many lines.
        refuse(f"{path}: is broken, or no checkpoint of this train.py ({what[:200]})")

def load_weights(model, ckpt, run):
    weights = ckpt["model"]
    if ckpt["settings"]["mod"] != model.config.mod:   # Another decider has all to learn.
        weights = {name: w for name, w in weights.items() if not name.startswith("decider.")}
        weights |= {f"decider.{name}": w for name, w in model.decider.state_dict().items()}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        what = " ".join(str(error).split())[:300]
        refuse(f"{run}: its weights do not fit; use the model.py of its training ({what})")

def open_run(run, device="auto"):
    """For sample.py and analyze.py, and for you. Run folder -> its model in eval mode, and its
    settings, a dict: the flags, tokenizer, step, flops, val_loss, and fingerprint of the data.
    device: as that flag. Nothing is written."""
    ckpt = read_checkpoint(run)
    # --kernels on was right for the machine that trained. Without Triton, it would be refused.
    settings = ckpt["settings"] | dict(kernels="auto")
    [config] = make_configs([GPTConfig], {name: settings[name] for name in asdict(GPTConfig())})
    model = make_model(config)
    model.n_vocab = prepare.VOCABULARIES[settings["tokenizer"]]
    load_weights(model, ckpt, run)
    model.to(set_up_device(device, config.n_embd)).eval()
    return model, settings | dict(step=ckpt["step"], flops=ckpt["flops"],
                                  val_loss=ckpt["val_loss"], fingerprint=ckpt["data"])

def data_of_run(run, settings, data="", model=None):
    """-> the folder of a run's data, or `data` if they have moved; and a sentence if they have
    changed, or, with its model, if its loss has, else "". settings: as open_run returns them"""
    folder = data or settings["data"]
    if not Path(folder).exists():
        refuse(f"{run}: was trained on {folder}, which isn't here; say where it is, with --data")
    tokenizer = prepare.load_meta(folder)["tokenizer"]
    if tokenizer != settings["tokenizer"]:
        refuse(f"{run}: its tokens are those of {settings['tokenizer']}; {folder} has {tokenizer}")
    if prepare.fingerprint(folder) != settings["fingerprint"]:
        return folder, f"{folder} is not, or no longer, what {run} was trained on"
    if model is None:
        return folder, ""
    x, y = prepare.windows_of(folder, "val", settings["block_size"], settings["eval_windows"])
    loss, _, _ = evaluate(model, x, y, prepare.token_bytes(tokenizer, settings["vocab_size"]))
    return folder, other_loss(run, loss, settings["val_loss"])

def refuse_if_taken(out, overwrite):
    """A new run would replace these files of the folder. All others stay."""
    config = out / "config.json"
    found = [name for name in FILES if (out / name).exists()]
    # Other programs have a config.json or a ckpt.pt, too. That of a run has a residual.
    is_run = config.exists() and '"residual"' in config.read_text(errors="replace")
    if found == ["ckpt.pt"]:
        refuse(f"--out {out}: holds a ckpt.pt alone; if it is a run that was killed as it began, "
               f"--resume continues it; else take another --out")
    if (out / "meta.json").exists() or found and not is_run:
        refuse(f"--out {out}: holds a data set, or files of another program; take another --out")
    if found and not overwrite:
        how = "--resume continues it" if "ckpt.pt" in found else "its ckpt.pt is gone"
        refuse(f"--out {out}: holds a run; {how}, --overwrite replaces it, another --out keeps it")

def put_aside(out):
    """For --overwrite: the run in the folder moves to a new folder in it, so nothing is lost."""
    found = [name for name in FILES if (out / name).exists()]
    if RANK == 0 and found:
        names = (f"replaced-{number}" for number in itertools.count(1))
        folder = next(out / name for name in names if not (out / name).exists())
        folder.mkdir()
        for name in found:
            os.replace(out / name, folder / name)
        say(f"the run that was in {out} is in {folder} now")

def write_log(out, **values):   # a line of metrics.jsonl
    if RANK == 0:
        with open(out / "metrics.jsonl", "a") as file:
            file.write(json.dumps(values) + "\n")

def save_checkpoint(out, state):
    """state: what ckpt.pt is to hold, a dict. A kill, or a full disk, leaves the older one."""
    if RANK == 0:
        with prepare.whole_file(out / "ckpt.pt") as file:
            torch.save(state, file)

def write_whole(path, text):
    if RANK == 0:
        with prepare.whole_file(path) as file:
            file.write(text.encode())

def continue_run(out, settings, ckpt):
    """What was logged after the checkpoint goes: the run takes those steps again. What this start
    changes is logged, and then saved, so that a kill can't undo it."""
    entries = [entry for step, entry in read_metrics(out).items() if step <= ckpt["step"]]
    before = ckpt["settings"]
    changed = {f"--{name}": value for name, value in settings.items() if value != before[name]}
    if changed:
        entries.append(dict(step=ckpt["step"]) | changed)
        say(f"from iteration {ckpt['step']} on: {changed}")
    write_whole(out / "metrics.jsonl", "".join(json.dumps(entry) + "\n" for entry in entries))
    if changed:
        save_checkpoint(out, ckpt | dict(settings=settings))

# ----------------------------------------------------------------------- device, processes, signals

def set_up_device(name, n_embd):
    """auto | cpu | cuda -> the device of this process: cpu, cuda:0, cuda:1, .."""
    if name == "cuda" and not torch.cuda.is_available():
        refuse("--device cuda: torch sees no CUDA device; use --device cpu")
    if name != "cpu" and torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"   # torchrun sets it.
        torch.cuda.set_device(device)
        return device
    # Small models are faster with one thread, much so if other programs are busy.
    if "OMP_NUM_THREADS" not in os.environ and n_embd < 512:
        torch.set_num_threads(1)
    return "cpu"

def join_processes(device):
    """If there are several, they can exchange numbers and gradients from then on."""
    if N_PROCESSES == 1:
        return
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

    with contextlib.suppress(ValueError):   # from a thread that isn't the main one, and gets none
        for name in "SIGINT", "SIGTERM", "SIGHUP":
            number = getattr(signal, name, None)   # Windows has no SIGHUP.
            if number and signal.getsignal(number) is not signal.SIG_IGN:   # nohup ignores SIGHUP.
                usual[number] = signal.signal(number, note)   # It returns what was before.
    try:
        yield signals
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)

# ------------------------------------------------------------------- a trial of your own classes

# A mistake in a class of yours is to cost you seconds, and not an hour. So, first of all, train.py
# lets a few tokens pass the residual and the decider of a config, forward and backward, as in a
# training. A Mistake says what was seen, and what to do. (pytest tests/test_model.py -k NAME takes
# longer, and finds more.)

def look_for_mistakes(config):
    """Mistake, with a sentence, if the class that --residual or --mod names has one"""
    rule = class_named(config.residual, RESIDUALS, Residual)
    decider = class_named(config.mod, DECIDERS, Decider)
    # The depth and the width are yours, and all else is small.
    small = replace(config, block_size=4, vocab_size=8, mlp_ratio=0.1, kernels="off")
    with errors_named(rule.__name__):
        model = make_model(small)
        look_at_parts(rule.__name__, model)
        try_training(rule.__name__, model, Decider(), model.residuals())   # All tokens run.
        try_reading(rule.__name__, model, Decider())
    if model.ends.can_skip:
        with errors_named(f"{rule.__name__}, where some tokens skip (can_skip = False says no),"):
            try_training(rule.__name__, model, Coins(small, rate=0.5))
    if decider is not Decider:
        with errors_named(decider.__name__):
            try_training(decider.__name__, model, model.decider, [model.decider])
            try_reading(decider.__name__, model, model.decider)
            model.decider.after_iteration([one_pass(model, model.decider)[2]], mean_of_all=float)

def class_named(text, registry, base):
    """("nag:power=1", RESIDUALS, Residual) -> NAG. Mistake if it has a misspelt method, say"""
    name = str(text).partition(":")[0]
    if name not in registry:
        return base   # A config's `problems` will say so.
    entry = registry[name]
    kind = entry.func if isinstance(entry, partial) else entry   # the class
    if not isinstance(kind, type) or not issubclass(kind, base):
        raise Mistake(f"{name} must be a class that is derived from {base.__name__}")
    parent = kind.__mro__[1]
    known = {*dir(parent)} - {*dir(torch.nn.Module)} | {"forward"}   # what it may replace
    for written in vars(kind):
        near = difflib.get_close_matches(written, known, 1, 0.85)
        if near and written not in known and not written.startswith(near[0]):
            raise Mistake(f"{kind.__name__} has a {written}; did you mean {near[0]}?")
    useful = known if base is Decider else {*known, "__init__"}   # It may choose another norm.
    if kind is not base and not useful & vars(kind).keys():
        raise Mistake(f"{kind.__name__} changes nothing of {base.__name__}; write its forward")
    return kind

@contextlib.contextmanager
def errors_named(who):
    """An error in a residual or a decider becomes a Mistake, a sentence, with its line of code."""
    try:
        yield
    except Mistake:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        of_torch = str(Path(torch.__file__).parent)
        last = [frame for frame in frames if not frame.filename.startswith(of_torch)][-1]
        what = " ".join(str(error).split())[:200]
        raise Mistake(f"{who} fails in line {last.lineno} of {last.filename}, {last.line!r}: "
                      f"{what}") from error

def look_at_parts(name, model):
    known = {key for residual in model.residuals() for key, _ in residual.named_parameters()}
    if not {*model.ends.own_lr} <= known:
        raise Mistake(f"{name}.own_lr is {model.ends.own_lr!r}; write a tuple of some of {known}")
    if not model.ends.as_tensor(model.ends.start(model.wte(IDX))).any():
        raise Mistake(f"{name}.as_tensor of the first stream is all zeros; write one that takes "
                      f"what the head is to read")

def watched(residual, stream, f, gain=None):
    """residual(stream, f, gain), and a look at what it does"""
    name, before, inputs = type(residual).__name__, [x.clone() for x in tensors(stream)], []

    def noted(x):
        inputs.append(x)
        return f(x)

    after = call_residual(residual, stream, noted, gain)
    now = tensors(stream)
    if not all(x.isfinite().all() for x in tensors(after)):
        raise Mistake(f"{name} returns numbers that are not finite, before any training")
    if len(now) != len(before) or not all(map(torch.equal, now, before)):
        raise Mistake(f"{name} changes its stream in place; write x = x + u, not x += u")
    # If it draws whether it calls f at all, it may do so in training.
    if len(inputs) > 1 or not inputs and not residual.training:
        raise Mistake(f"{name} calls f {len(inputs)} times; sampling and FLOPs rely on one call")
    got, made = ([tuple(x.shape) for x in each] for each in (now, tensors(after)))
    if got != made and not residual.stream_grows:
        raise Mistake(f"{name} got a stream of the shapes {got} and returned {made}. Is a return "
                      f"missing? (A stream of its own form needs a method start, too.)")
    return after

def tensors(stream):   # a list of all that are in it
    if isinstance(stream, dict):
        stream = [*stream.values()]
    if isinstance(stream, (list, tuple)):
        return [x for part in stream for x in tensors(part)]
    return [stream] if torch.is_tensor(stream) else []

IDX = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])

def one_pass(model, decider, idx=IDX, seed=0, cache=None, call=watched):
    """-> logits, loss, and the trip. In training, gains are asked for, if there are any."""
    torch.manual_seed(seed)
    trip = Trip(model, decider, call=call)
    trip.pays = model.training and model.ends.knows_gain
    return *model(idx, idx if model.training else None, cache, trip), trip

def try_training(name, model, decider, modules=()):
    """modules: those whose parameters must all get a gradient"""
    model.train()
    for seed in range(10):   # A class may draw which of them are used.
        loss, *again = [one_pass(model, decider, seed=seed)[1] for _ in range(4)]
        if not all(torch.allclose(loss, other, rtol=1e-5) for other in again):
            raise Mistake(f"{name} draws numbers that --seed doesn't reach; use torch.rand")
        loss.backward()
        missing = [key for module in modules for key, p in module.named_parameters()
                   if p.requires_grad and p.grad is None]
        if not missing:
            return
    raise Mistake(f"{name}: {missing[0]} gets no gradient, so it never learns. Is it used? "
                  f".item() and comparisons pass none on, and model.ends has no sublayer")

@torch.no_grad()
def try_reading(name, model, decider):
    """Three tokens keep their logits if a later one changes, or another sequence, or if they come
    one by one, as in sampling. (A class that draws numbers draws others then.)"""
    def logits(idx=IDX, **options):
        return one_pass(model, decider, idx, **options)[0]

    model.eval()
    usual, later, other = logits(), IDX.clone(), IDX.clone()
    later[0, 3], other[1] = 7, IDX[1].flip(0)
    found = {"later tokens": logits(later), "other sequences": logits(other)}
    if torch.equal(usual, logits(seed=1)):
        cache = KVCache(4)
        one_by_one = [logits(idx, cache=cache) for idx in IDX.split(1, dim=1)]
        found["earlier tokens, so sampling differs"] = torch.cat(one_by_one, dim=1)
    for what, those in found.items():
        if (usual - those)[0, :3].abs().max() > 3e-5 * usual.abs().max().clamp_min(1):
            raise Mistake(f"{name} looks at {what}; only f may look at other tokens")
    # torch's counter overlooks products with a vector, and the usual attention of CPUs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        _, _, trip = one_pass(model, decider, call=call_residual)
    said, ran = flops_per_token(model, trip), counter.get_total_flops() / IDX.numel()
    if ran > 1.01 * said or ran < 0.99 * said and type(decider) is Decider:
        raise Mistake(f"{name}: {ran:,.0f} FLOPs per token ran, and its flops() makes {said:,.0f} "
                      f"of them; write a flops. (A decider adds its own to trip.decider_flops.)")

if __name__ == "__main__":
    start(main)   # It makes sentences of errors that you can mend, such as a full disk.
