"""
Pretrain a GPT with any residual, on a CPU, one GPU or several.

    python train.py                                     # PreNorm on Python code: minutes on a CPU
    python train.py --residual nag --out runs/nag       # each setting is a flag
    python train.py --out runs/nag --resume             # go on from its checkpoint
    python train.py --config runs/nag --out runs/nag1 --seed 1    # the same, with another seed
    torchrun --nproc_per_node 8 train.py --config configs/gpt2.json    # GPT-2 small on 8 GPUs
"""
# Read this as nanoGPT's train.py: settings, data, evaluation, learning rate, model and optimizers,
# and the loop, `train`. Its words, of which the first four are explained in model.py:
#
#     residual    the rule by which a sublayer, attention or MLP, changes the stream
#     decider     says which tokens skip which sublayers
#     gain        how much a sublayer will change a token; some residuals know it beforehand
#     Runner      runs one forward pass, and notes who skipped, the loss, and the gains
#     gate        a parameter with a learning rate of its own, --gate_lr. Residuals list theirs in
#                 own_lr.
#     processes   processes.mean(x) is the mean of the x of all processes, and .wait() waits until
#                 all are here; .device and .rank are those of this one, .count is that of all
#     part        1 of the grad_accum x processes parts of a batch
#     say         prints in the first process
#     refuse      ends the program with a sentence

import contextlib
import math
import re
import shlex
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import packages   # first: it says if one is missing

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import dataset
import prepare
from flags import flag, make_configs, read_command_line
from model import (GPT, GPTConfig, RESIDUALS, Runner, checkpoint_blocks, compile_blocks,
                   constrain_weights, flops_per_token, num_params)
from muon import Muon
from options import list_options
from processes import join_processes, noted_signals, set_threads, torch_as_it_was
from runs import RunFolder, read_model, settings_now
from sentences import refuse, say, start
from settings import gather_settings, of_the_run
from trial import look_for_mistakes

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
    overwrite: bool = flag(False, "replace the run in --out")

    max_iters: int = flag(420, "steps of the optimizer", 1, 1e9, group="length of the run")
    max_flops: float = flag(0.0, "end after so many FLOPs of matmuls, not after max_iters", 0, 1e27)
    eval_interval: int = flag(100, "iterations between evaluations, which also save", 1, 1e9)
    eval_windows: int = flag(128, "fixed validation windows of block_size tokens", 1, 1e5)
    log_interval: int = flag(20, "iterations between status lines", 1, 1e9)

    batch_size: int = flag(16, "sequences per step, of all processes together", 1, 1e6,
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
    compile: bool = flag(False, "torch.compile the sublayers; good on a GPU")
    checkpoint_blocks: bool = flag(False, "save memory: the backward pass runs sublayers again")

    def problems(self):
        """Yields a sentence for each reason why this can't be run. make_configs refuses with it."""
        if self.resume and self.overwrite:
            yield "--resume and --overwrite: contradict each other; give one"
        if 0 < self.min_lr < 1e-3:   # So small, it is surely meant as a rate.
            yield f"--min_lr {self.min_lr}: is a share of --lr; 0.1 is a tenth of it"

# The usual learning rates, good ones for small models
RATES = dict(muon=2e-2, adamw=6e-3, sgd=0.1)

def read_configs(argv=None):
    """The command line -> model_config, config. What isn't typed may come from an earlier run, and
    else from the defaults: see settings.py."""
    classes = GPTConfig, TrainConfig
    epilog = "residuals, with their options:\n" + list_options(RESIDUALS)
    typed = read_command_line(classes, argv, __doc__, epilog=epilog)
    if "vocab_size" in typed:   # `main` sets it.
        refuse("--vocab_size: the data say it; leave it out")
    defaults = asdict(GPTConfig()) | asdict(TrainConfig())
    model_config, config = make_configs(classes, gather_settings(typed, defaults))
    config.lr = config.lr or RATES[config.optimizer]
    return model_config, config

# --------------------------------------------------------------------------------------------- data

@dataclass
class Data:
    """What a run reads"""
    tokenizer: str
    vocab_size: int
    token_bytes: torch.Tensor   # how many bytes of text each token stands for, (vocab_size,)
    shards: list                # the training tokens, an array a shard
    val: tuple                  # windows for validation: x, y, (eval_windows, block_size) each
    fingerprint: str            # --resume refuses if meta.json, a shard's name or size is another

def open_data(config, block_size, processes):
    """-> Data. (The default data set is made if it is not there.)"""
    folder = config.data
    if processes.rank == 0 and folder == TrainConfig.data and not Path(folder).exists():
        say(f"{folder} is not there yet: making it from the Python standard library")
        prepare.main(["stdlib", "--out", folder])
    processes.wait()   # The first one may still be writing.
    meta = dataset.load_meta(folder)
    tokenizer, vocab_size = meta["tokenizer"], meta["vocab_size"]
    # This reads windows from all over the training text, and refuses tokens of another tokenizer.
    dataset.windows_of(folder, "train", block_size, config.eval_windows)
    return Data(tokenizer, vocab_size, dataset.token_bytes(tokenizer, vocab_size),
                shards=dataset.open_split(folder, "train", block_size),
                val=dataset.windows_of(folder, "val", block_size, config.eval_windows),
                fingerprint=dataset.fingerprint(folder, meta))

def count_parts(config, processes):
    """-> of how many parts a batch is: each process takes --grad_accum of them. SystemExit if they
    would not be equal"""
    n_parts = config.grad_accum * processes.count
    if config.batch_size % n_parts:
        refuse(f"--batch_size {config.batch_size}: must be a multiple of grad_accum x processes = "
               f"{n_parts}")
    return n_parts

def seed_draws(seed, step, part):
    """Seeds torch's random numbers. So if the decider draws who skips, that depends on nothing but
    seed, step and part."""
    state = np.random.SeedSequence((seed, step, part)).generate_state(1)
    torch.manual_seed(int(state[0]))

def get_batch(data, model_config, batch_size, step, part=0, n_parts=1, device="cpu"):
    """One of the n_parts of a batch: x, y (batch_size / n_parts, T). The batch depends on seed,
    step and batch_size only, so there is no random state to save: any number of processes, and a
    run that is resumed, see the same batches. device: its name"""
    T = model_config.block_size
    n_windows = sum(len(shard) - T for shard in data.shards)   # numbered through all shards
    starts = np.random.default_rng((model_config.seed, step)).integers(0, n_windows, batch_size)
    x, y = dataset.read_windows(data.shards, starts.reshape(n_parts, -1)[part], T)
    if device != "cpu":   # Copying from pinned memory doesn't wait for the GPU.
        x, y = (tokens.pin_memory().to(device, non_blocking=True) for tokens in (x, y))
    return x, y

# --------------------------------------------------------------------------------------- evaluation

@torch.no_grad()
def evaluate(model, x, y, token_bytes, batch_size):
    """x, y (n, T) -> nats per token, bits per byte of text, and the share of the sublayer runs that
    was skipped. token_bytes (V,): how many bytes each token stands for. batch_size: windows at a
    time"""
    nats, skipped, was_training = 0.0, 0.0, model.training
    model.eval()
    with torch_as_it_was(str(model.device)):   # This gives the random numbers back.
        torch.manual_seed(0)   # If the decider draws who skips, it draws the same each time.
        for xi, yi in zip(x.split(batch_size), y.split(batch_size)):
            runner = Runner(model)
            model(xi.to(model.device), yi.to(model.device), runner=runner)
            share = len(xi) / len(x)
            nats += runner.cross_entropy.item() * share   # the loss, without what flags add
            skipped += runner.skipped() * share
    model.train(was_training)
    n_bytes = max(1, token_bytes[y].sum().item())   # 0 if all windows were ends of texts
    bytes_per_token = n_bytes / y.numel()
    return nats, nats / math.log(2) / bytes_per_token, skipped

def evaluate_and_report(model, part_size, data, step, folder):
    loss, bits, skipped = evaluate(model, *data.val, data.token_bytes, part_size)
    refuse_if_not_finite("validation loss", loss, step, folder)
    folder.log(step=step, val_loss=loss, val_bpb=bits, val_skip_rate=skipped)
    say(f"iter {step:5d} | validation loss {loss:.4f} | {bits:.4f} bits/byte | "
        f"{skipped:.1%} skipped")

def refuse_if_not_finite(what, number, step, folder):
    """Ends the run before weights are saved that are good for nothing."""
    if math.isfinite(number):
        return
    if step == 0:
        refuse(f"iteration 0: the {what} is not finite, before any step; look at the model")
    refuse(f"iteration {step}: the {what} is not finite; {folder.out}/ckpt.pt, if it is there, is "
           f"from before: go on from there with --resume and a lower --lr")

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

# ---------------------------------------------------------------------------- model and optimizers

# Settings that may differ from those of the run in --init_from: its weights fit all the same.
MAY_DIFFER = "seed", "kernels", "block_size", "deep_supervision", "mod", "gain_cost"

def refuse_other_tokens(source, data, tokenizer):
    """source: the run in --init_from; tokenizer: that of the data"""
    its_tokenizer = settings_now(source).get("tokenizer")
    if its_tokenizer != tokenizer:
        refuse(f"--init_from {source}: its tokens are those of {its_tokenizer}, and --data {data} "
               f"has {tokenizer}; prepare the text with --tokenizer {its_tokenizer}")

def begin_or_resume(model_config, config, data, out):
    """-> the checkpoint to go on from, or None if this is a new run; and the model"""
    if config.resume:
        path = out / "ckpt.pt"
        # Kernels change how a model is computed, and not what.
        ckpt, model = read_model(path, model_config, may_differ=["kernels"])
        if ckpt["data"] != data.fingerprint:
            refuse(f"{path}: is of other data than --data has now; put that back, or start a new "
                   f"run")
        return ckpt, model
    if config.init_from:
        refuse_other_tokens(config.init_from, config.data, data.tokenizer)
        path = Path(config.init_from) / "ckpt.pt"
        _, model = read_model(path, model_config, may_differ=MAY_DIFFER)
        return None, model
    return None, GPT(model_config)

def make_ready(model, config, processes):
    """Brings the model to its device, sets the type of its products, and compiles it, if need be ->
    what is called in training: the model itself, or its DDP wrapper if there are several processes
    """
    model.to(processes.device)
    if processes.device != "cpu" and torch.cuda.get_device_capability()[0] >= 8:   # since Ampere
        # The model computes its products in this type, as autocast would. Weights stay float32.
        model.dtype = torch.bfloat16
    if config.compile:
        compile_blocks(model)
    if config.checkpoint_blocks:
        checkpoint_blocks(model)
    if processes.count == 1:
        return model
    # Where tokens skip, it may be that a sublayer is run by no token of this process.
    return DistributedDataParallel(model, find_unused_parameters=model.decider.needs_skipping)

def sort_parameters(model, with_muon):
    """-> four lists: gates, vectors, matrices, and the matrices of blocks if Muon trains these.
    Gates are what residuals list in own_lr."""
    in_own_lr = set()
    for residual in model.residuals():
        for name, p in residual.named_parameters():
            if name in residual.own_lr:
                in_own_lr.add(p)
    in_blocks = set(model.blocks.parameters())
    gates, vectors, matrices, for_muon = [], [], [], []
    for p in model.parameters():
        if p in in_own_lr:
            gates.append(p)
        elif p.dim() < 2:
            vectors.append(p)
        elif with_muon and p in in_blocks and p.dim() == 2:
            for_muon.append(p)
        else:
            matrices.append(p)
    return gates, vectors, matrices, for_muon

def make_optimizers(model, config):
    """-> a list of optimizers: AdamW or SGD; with --optimizer muon AdamW, and Muon for the matrices
    of blocks. Only matrices have weight decay. One --lr is for all: with muon, AdamW has 0.02, too.

    One of your own needs a name in --optimizer, a rate in RATES, and lines here. A resumed run gets
    back what it has in self.state[p]."""
    gates, vectors, matrices, for_muon = sort_parameters(model, config.optimizer == "muon")
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

# ----------------------------------------------------------------------------------------- the loop

class Clock:
    """Starts when it is made, at this step."""
    def __init__(self, step):
        self.step, self.time = step, time.perf_counter()

    def steps_per_second(self, step):
        return (step - self.step) / (time.perf_counter() - self.time)

def record(runner):
    """What is reported of a forward pass, a dict. The loss is the cross entropy, without what flags
    of GPTConfig (--mod, --gain_cost, --deep_supervision) make of it."""
    found = dict(loss=runner.cross_entropy, skip_rate=runner.skipped())
    gain = runner.mean_gain()
    if gain is not None:   # It is None if neither --mod nor --gain_cost needs gains.
        found["mean_gain"] = gain.detach()
    return found

def forward_and_backward(model, wrapped, config, data, step, processes):
    """Each process takes --grad_accum parts of the batch in turn. Their gradients are added up in
    the parameters -> the means of what `record` finds, and the FLOPs per token of the forward pass,
    fewer where tokens skip. wrapped: see make_ready"""
    records, token_flops = [], 0.0
    n_parts = count_parts(config, processes)
    parts = range(processes.rank, n_parts, processes.count)   # those of this process
    for part in parts:
        x, y = get_batch(data, model.config, config.batch_size, step, part, n_parts,
                         processes.device)
        seed_draws(model.config.seed, step, part)
        if processes.count > 1:   # They exchange gradients once a step, in the last part.
            wrapped.require_backward_grad_sync = part == parts[-1]
        runner = Runner(model)
        _, loss = wrapped(x, y, runner=runner)
        (loss / config.grad_accum).backward()
        records.append(record(runner))
        token_flops += flops_per_token(model, runner=runner) / config.grad_accum
    means = {name: sum(each[name] for each in records) / len(records) for name in records[0]}
    return means, token_flops

def say_report(step, report):
    about_gain = f"mean gain {report['mean_gain']:.3f} | " if "mean_gain" in report else ""
    say(f"iter {step:5d} | loss {report['loss']:.4f} | lr {report['lr']:.2e} | gradient "
        f"{report['grad_norm']:.2f} | {about_gain}{report['skip_rate']:.1%} skipped | "
        f"{report['tok_s']:,.0f} tokens/s")

def train(model_config, config, data, folder, processes, signals):
    """A whole run -> exit status: 0, or 1 if a signal has stopped it.

    model_config, config: the settings of the model and of its training; data: a Data;
    folder: a RunFolder; signals: a list, empty until Ctrl-C or a kill comes"""
    ckpt, model = begin_or_resume(model_config, config, data, folder.out)
    wrapped = make_ready(model, config, processes)
    optimizers = make_optimizers(model, config)
    step, flops = 0, 0.0
    if ckpt:
        step, flops = ckpt["step"], ckpt["flops"]
        for optimizer, moments in zip(optimizers, ckpt["optimizers"], strict=True):
            # Rates and decay stay as the flags say.
            optimizer.load_state_dict(optimizer.state_dict() | dict(state=moments))
    tokens_per_step = config.batch_size * model_config.block_size
    part_size = config.batch_size // count_parts(config, processes)   # sequences at a time
    goal = f"{config.max_flops:g} FLOPs" if config.max_flops else config.max_iters
    say(f"{model_config.residual}: {model_config.n_layer} blocks x {model_config.n_embd}, "
        f"{num_params(model) / 1e6:.2f}M parameters; iterations {step} to {goal} of "
        f"{tokens_per_step:,} tokens on {processes.count} x {model.device.type}")
    folder.begin(step)   # The first files are written. A run that is replaced is deleted only now.
    clock = Clock(step)

    while True:
        # If any process has got a signal, all of them stop at this step.
        is_stopped = processes.mean(len(signals)) > 0
        is_last = is_stopped or progress_of(config, step, flops) >= 1

        # --- Evaluate and save. Evaluation is short, so each process does all of it.
        if is_last or step % config.eval_interval == 0:
            if not is_stopped:
                evaluate_and_report(model, part_size, data, step, folder)
            weight_norm = torch.nn.utils.get_total_norm(model.parameters()).item()
            refuse_if_not_finite("norm of the weights", weight_norm, step, folder)
            # This is all that a run needs to go on. Batches, draws and rates follow from it.
            moments = [optimizer.state_dict()["state"] for optimizer in optimizers]
            folder.save(dict(model=model.state_dict(), model_config=asdict(model_config),
                             optimizers=moments, step=step, flops=flops, data=data.fingerprint))
            clock = Clock(step)   # Speed is measured without these pauses.
        if is_last:
            break

        # --- From a batch to gradients
        means, token_flops = forward_and_backward(model, wrapped, config, data, step, processes)
        step += 1   # A warmup begins at a rate of 0, so the first step counts already.
        is_logged = step % config.log_interval == 0
        if is_logged or config.equalize_grads:
            grads, block_norms = block_gradients(model)
        if config.equalize_grads:
            equalize(grads, block_norms)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)

        # --- From gradients to weights
        # The backward pass costs as much as two forward passes.
        flops += 3 * tokens_per_step * processes.mean(token_flops)
        factor = lr_factor(config, progress_of(config, step, flops))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        constrain_weights(model)   # nGPT normalises its weights.

        # --- Report
        if is_logged:
            refuse_if_not_finite("norm of the gradients", norm.item(), step, folder)
            report = {name: processes.mean(float(mean)) for name, mean in means.items()}
            report |= dict(lr=config.lr * factor, grad_norm=norm.item(), flops=flops,
                           tok_s=clock.steps_per_second(step) * tokens_per_step,
                           tokens=step * tokens_per_step, grad_norms=block_norms.tolist())
            folder.log(step=step, **report)
            say_report(step, report)
            clock = Clock(step)

    processes.wait()   # Nobody leaves while another one is still writing.
    out = shlex.quote(str(folder.out))
    if is_stopped:
        say(f"stopped at iteration {step}, all is saved; go on with: "
            f"python train.py --out {out} --resume")
        return 1
    say(f"done: {out} holds the run\n"
        f"next: python sample.py {out}   or: python analyze.py {out}")
    return 0

# --------------------------------------------------------------------------------------------- main

def default_out(residual):
    """attnres:group=4 -> runs/attnres-group4"""
    return "runs/" + re.sub(r"[^\w.-]+", "-", residual.replace("=", ""))

def main(argv=None):
    """The command line, then `train` -> its exit status"""
    model_config, config = read_configs(argv)
    look_for_mistakes(model_config)   # A mistake in a class of yours is told now, not later.
    processes = join_processes(config.device)
    count_parts(config, processes)   # It refuses a batch that can't be divided.
    with torch_as_it_was(processes.device):   # so a notebook that calls this can go on
        set_threads(model_config.n_embd, processes.device)
        data = open_data(config, model_config.block_size, processes)
        # The rows of embedding and head: multiples of 64 are fast.
        model_config.vocab_size = math.ceil(data.vocab_size / 64) * 64
        settings = of_the_run(asdict(model_config) | asdict(config))
        settings |= dict(tokenizer=data.tokenizer)   # It is no flag.
        folder = RunFolder(config.out or default_out(model_config.residual), settings,
                           config.resume, config.overwrite, is_first=processes.rank == 0)
        with contextlib.closing(folder), noted_signals() as signals:
            return train(model_config, config, data, folder, processes, signals)

if __name__ == "__main__":
    start(main)   # It makes sentences of errors that you can mend, such as a full disk.
