"""
Pretrain a GPT with any residual, on a CPU, one GPU or several.

    python train.py                                     # on a CPU minutes; on a GPU, GPT-2 small
    python train.py --residual nag --out runs/nag       # every field of both configs is a flag
    python train.py --out runs/nag --resume             # go on from its checkpoint
    python train.py --config runs/nag/config.json --out runs/nag1 --seed 1    # another seed
    torchrun --nproc_per_node 8 train.py                # batch_size counts all processes
"""
# How to read this file: it is nanoGPT's train.py as functions and one class. Begin with the class,
# Training: its `run` is the loop, and calls take_step, forward_and_backward, update. Then read
# data, evaluation and optimizers, above it. Saving, resuming and settings can wait. model.py has
# the GPT, prepare.py data, flags.py the command line, runs.py run folders, processes.py devices.
#
# What nanoGPT doesn't have: a block is two sublayers, attention and MLP, and some tokens may skip
# some of them. A Runner (model.py) runs them, and afterwards knows who has skipped what.

import contextlib
import math
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import prepare
from flags import environment, flag, parse, refuse, say, start
from model import (GPT, GPTConfig, RESIDUALS, Runner, checkpoint_blocks, compile_blocks,
                   constrain_weights, flops_per_token, num_params, option_defaults)
from processes import check_memory, join_processes, note_signals, pick_device, pick_threads
from runs import (RunFolder, all_finite, checked_progress, explain_read_errors, optimizer_state,
                  read_checkpoint, read_metrics, read_settings, restore_optimizers)

# ----------------------------------------------------------------------------------------- settings

LENGTHS = "max_iters", "max_tokens", "max_flops"   # Each can end a run; a typed one alone counts.

# Good for small models: the learning rate, if --optimizer is typed, changes it, and --lr is not.
RATES = dict(muon=2e-2, adamw=6e-3, sgd=0.1)

# On a GPU the default is GPT-2 small, with 0.5M tokens a step. These values fit together. So if one
# of SIZES is typed, the model is another one, and none of them counts.
CUDA_DEFAULTS = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=512,
                     grad_accum=8, optimizer="adamw", lr=1e-3, max_iters=2000, eval_interval=250)
SIZES = {"n_layer", "n_head", "n_embd", "block_size"}

@dataclass
class TrainConfig:
    """Each field is a flag: flag(default, help, lowest, highest). With a `group`, --help begins a
    new section. The defaults are for a CPU. The model's size and the seed are in GPTConfig, in
    model.py."""
    data: str = flag("data/stdlib", "folder of token shards, made by prepare.py",
                     group="data and run folder")
    out: str = flag("", "run folder; without it runs/RESIDUAL")
    config: str = flag("", "config.json of an earlier run to repeat; flags beside it win")
    resume: bool = flag(False, "continue the run in --out from its last checkpoint")
    overwrite: bool = flag(False, "replace the run in --out")

    max_iters: int = flag(420, "iterations, that is steps of the optimizer; or give max_tokens or "
                          "max_flops instead", 0, 1e9, group="length of the run")
    max_tokens: float = flag(0.0, "end after this many training tokens", 0, 1e15)
    max_flops: float = flag(0.0, "end after this many matmul FLOPs; what is skipped is not counted",
                            0, 1e27)
    eval_interval: int = flag(100, "iterations between evaluations, which also save", 1, 1e9)
    eval_windows: int = flag(128, "fixed validation windows of block_size tokens", 1, 1e5)
    log_interval: int = flag(20, "iterations between status lines", 1, 1e9)

    batch_size: int = flag(16, "sequences per optimizer step, of all processes together", 1, 1e6,
                           group="optimizer")
    grad_accum: int = flag(1, "micro-batches per optimizer step, in each process", 1, 1e6)
    optimizer: Literal["adamw", "sgd", "muon"] = flag(
        "muon", "muon: for the matrices of blocks, and adamw for the rest; sgd has momentum beta1")
    lr: float = flag(RATES["muon"], "peak learning rate; with --optimizer adamw 0.006, with sgd "
                     "0.1", 0, 1e3)
    gate_lr: float = flag(1e-3, "peak learning rate of gates: what a residual lists in own_lr "
                          "(model.py)", 0, 1e3)
    min_lr: float = flag(0.1, "final learning rate / peak", 0, 1)
    warmup: float = flag(0.05, "share of the run with a rising learning rate", 0, 1)
    schedule: Literal["cosine", "wsd"] = flag("cosine", "wsd: constant, linear in the last fifth")
    weight_decay: float = flag(0.1, "of matrices only", 0, 1e3)
    beta1: float = flag(0.9, "decay of AdamW's mean of gradients; sgd: momentum; muon has 0.95", 0,
                        0.9999)
    beta2: float = flag(0.95, "decay of AdamW's mean of squared gradients", 0, 0.9999)
    gate_beta1: float = flag(0.8, "AdamW's beta1 of what trains with gate_lr", 0, 0.9999)
    grad_clip: float = flag(1.0, "largest global gradient norm; 0: no clipping", 0, 1e9)
    equalize_grads: bool = flag(False, "give the gradients of all blocks the same norm")

    device: Literal["auto", "cpu", "cuda"] = flag("auto", "auto: cuda where there is one",
                                                  group="machine")
    # None: neither --compile nor --no-compile is typed.
    compile: bool = flag(None, "torch.compile what no token skips; if not given: on CUDA")
    checkpoint_blocks: bool = flag(False, "save memory: the backward pass runs sublayers again")

    def problems(self):
        """Every reason why this config can't be run, a sentence each. `parse` asks for them."""
        parts = self.n_parts(environment("WORLD_SIZE", 1))   # as torchrun says it
        lengths = [name for name in LENGTHS if getattr(self, name)]
        rules = [
            (len(lengths) > 1,
             f"--{' and --'.join(lengths)}: each ends the run; give one of them"),
            (not lengths, "--max_iters, --max_tokens and --max_flops: are 0, so this would train "
                          "nothing; give one of them"),
            (self.resume and self.overwrite,
             "--resume and --overwrite: contradict each other; give one"),
            (0 < self.min_lr < 1e-3,   # So small, it is surely meant as a rate.
             f"--min_lr {self.min_lr}: is a share of --lr; 0.1 is a tenth of it"),
            (self.schedule == "wsd" and self.warmup > 0.8,
             f"--warmup {self.warmup}: with --schedule wsd at most 0.8; the rate falls after that"),
            (self.batch_size % parts,
             f"--batch_size {self.batch_size}: must be a multiple of grad_accum x processes = "
             f"{parts}")]
        return [sentence for wrong, sentence in rules if wrong]

    def n_parts(self, n_processes):
        """How many parts a batch is cut into: grad_accum in each process"""
        return self.grad_accum * n_processes

# --------------------------------------------------------------------------------------------- data

def find_data(config, processes):
    """-> what meta.json says of the data. Makes the default data if they are missing."""
    if processes.rank == 0 and config.data == TrainConfig.data:
        if not any(Path(config.data).glob("*.bin")):
            say(f"{config.data} is not there yet: making it from the Python standard library")
            prepare.main(["stdlib", "--out", config.data])
    processes.wait()   # The first process may still be writing the data.
    return prepare.load_meta(config.data)

class Data:
    """The text of a run: shards of training tokens, and fixed windows of validation tokens"""
    def __init__(self, meta, model_config, config, n_parts):
        self.folder, self.n_parts, self.batch_size = config.data, n_parts, config.batch_size
        self.micro_batch_size = config.batch_size // n_parts
        self.T, self.seed = model_config.block_size, model_config.seed
        self.tokenizer, self.n_vocab = meta["tokenizer"], meta["vocab_size"]
        self.shards = prepare.open_split(self.folder, "train", self.T)
        self.val = prepare.val_windows(self.folder, self.T, config.eval_windows)   # x, y
        # (V,): how many bytes of text a token stands for
        self.token_bytes = prepare.token_bytes(meta, model_config.vocab_size)
        # If meta.json or the shards are others now, in name or size, --resume notices it by this.
        self.fingerprint = prepare.fingerprint(self.folder, meta)

    def batch(self, step, part):
        """The micro-batch number `part` of the n_parts of a step: x, y (micro_batch_size, T). It
        depends on seed, step and part only, so there is no random state to save: any number of
        processes, and a run that is resumed, see the same batches. SystemExit if a token isn't one
        of the tokenizer's."""
        n_windows = sum(len(shard) - self.T for shard in self.shards)
        # Windows are numbered through all shards.
        starts = np.random.default_rng((self.seed, step)).integers(0, n_windows, self.batch_size)
        x, y = prepare.read_windows(self.shards, starts.reshape(self.n_parts, -1)[part], self.T)
        if max(x.max(), y.max()) >= self.n_vocab:
            refuse(f"--data {self.folder}: has a token beyond the {self.n_vocab} of its "
                   f"tokenizer; prepare it anew")
        return x, y

# --------------------------------------------------------------------------------------- evaluation

@torch.no_grad()
def evaluate(model, x, y, token_bytes, batch_size, decider=None):
    """x, y (n, T) -> nats per token, bits per byte of text, share of the sublayer runs that were
    skipped. token_bytes (V,): see Data. decider: says who skips, in place of model.decider"""
    nats, skipped, was_training = 0.0, 0.0, model.training
    model.eval()
    torch.manual_seed(0)   # so that --mod random draws the same coins each time
    for xi, yi in zip(x.split(batch_size), y.split(batch_size)):
        runner = Runner(model, decider)
        _, loss = model(xi.to(model.device), yi.to(model.device), runner=runner)
        nats += loss.item() * len(xi) / len(x)
        skipped += runner.skipped() * len(xi) / len(x)
    model.train(was_training)
    n_bytes = max(1, token_bytes[y].sum().item())   # 0 if all windows were ends of texts
    bytes_per_token = n_bytes / y.numel()
    return nats, nats / math.log(2) / bytes_per_token, skipped

# -------------------------------------------------------------------------- optimizers and schedule

def sort_parameters(model, uses_muon):
    """-> four lists: gates, which are what residuals name in `own_lr`; vectors; matrices for Muon;
    and all other matrices"""
    # Residuals name their gates. (model.ends, which begins and ends the stream, may lack them.)
    gate_set = {getattr(residual, name, None)
                for residual in model.residuals() for name in residual.own_lr}
    in_blocks = {*model.blocks.parameters()}
    gates, vectors, for_muon, matrices = [], [], [], []
    for p in model.parameters():
        if p in gate_set:
            gates.append(p)
        elif p.dim() < 2:
            vectors.append(p)
        elif uses_muon and p in in_blocks:
            for_muon.append(p)
        else:
            matrices.append(p)
    return gates, vectors, for_muon, matrices

def make_optimizers(model, config):
    """-> a list of optimizers, one or two. Matrices have weight decay, and vectors have none. Gates
    have the learning rate gate_lr. Muon is a second optimizer, for the matrices of blocks."""
    gates, vectors, for_muon, matrices = sort_parameters(model, config.optimizer == "muon")
    betas, gate_betas = (config.beta1, config.beta2), (config.gate_beta1, config.beta2)
    # peak_lr is a key of ours: before each step, Training.update sets lr = peak_lr * lr_factor.
    groups = [dict(params=matrices, peak_lr=config.lr, weight_decay=config.weight_decay),
              dict(params=vectors, peak_lr=config.lr, weight_decay=0.0),
              dict(params=gates, peak_lr=config.gate_lr, weight_decay=0.0, betas=gate_betas)]
    if config.optimizer == "sgd":
        optimizers = [torch.optim.SGD(groups, config.lr, momentum=config.beta1)]   # ignores betas
    else:
        optimizers = [torch.optim.AdamW(groups, config.lr, betas, fused=True)]
    if for_muon:
        groups = [dict(params=for_muon, peak_lr=config.lr, weight_decay=config.weight_decay)]
        optimizers.append(Muon(groups, config.lr))
    return optimizers

class Muon(torch.optim.Optimizer):
    """For matrices (Jordan et al. 2024). The momentum of the gradient is made orthogonal, so that a
    step has the same size in all directions, and not only in those where gradients are large. Its
    entries have about the rms of AdamW's (arXiv:2502.16982). Still, a higher --lr is best: 0.02
    here, where AdamW wants 0.006.

    torch.optim.Muon can do the same, but always in bfloat16, which is very slow on many CPUs."""
    def __init__(self, groups, lr, momentum=0.95):   # (--beta1 is not used here.)
        super().__init__(groups, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            momentum = group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in self.state:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                mean = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - momentum)
                update = orthogonal(p.grad.lerp(mean, momentum))   # one step ahead: Nesterov's way
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(update, alpha=0.2 * max(p.shape) ** 0.5 * group["lr"])

def orthogonal(x):
    """A matrix with the directions of x, whose singular values are roughly 1: about 0.7 to 1.2, but
    less if they were below a hundredth of the norm. Five steps of a polynomial bring them there
    (Newton-Schulz). It is fast, and need not be exact."""
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x   # x @ x.T is then the smaller one of two products.
    if x.is_cuda:
        x = x.bfloat16()
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if is_tall else x

def lr_factor(config, progress):
    """Learning rate / its peak: it rises to 1, then falls to min_lr, as a cosine or at the end only
    (wsd)."""
    if progress < config.warmup:
        return progress / config.warmup
    if config.schedule == "cosine":
        done = (progress - config.warmup) / max(1e-9, 1 - config.warmup)
        fallen = 0.5 - 0.5 * math.cos(math.pi * min(1.0, done))   # from 0 to 1
    else:
        fallen = max(0.0, (progress - 0.8) / 0.2)   # from 0 to 1, in the last fifth
    return 1 - (1 - config.min_lr) * fallen

def equalize(grads, norms):
    """Scales the gradients of each block to the root mean square of all blocks' norms (L,)."""
    wanted = norms.square().mean().sqrt()
    for block_grads, norm in zip(grads, norms):
        for grad in block_grads:
            grad.mul_(wanted / norm.clamp_min(1e-30))

# ----------------------------------------------------------------------------------------- the loop

class Training:
    """A run: its model, its optimizers, and how far it is. `run` has the loop."""
    def __init__(self, model_config, config, data, folder, processes):
        self.config, self.data, self.folder, self.processes = config, data, folder, processes
        self.tokens_per_step = config.batch_size * model_config.block_size
        # The model, new or from the checkpoint
        self.ckpt_path = folder.out / "ckpt.pt"
        if config.resume:
            ckpt, self.model = read_checkpoint(self.ckpt_path, model_config)
        else:
            self.model = GPT(model_config)
        self.model.to(processes.device)
        if processes.on_cuda and torch.cuda.get_device_capability()[0] >= 8:   # since Ampere, 2020
            # The model computes its products in this type, as autocast would. Weights stay float32.
            self.model.dtype = torch.bfloat16
        self.optimizers = make_optimizers(self.model, config)
        # How far it is. The checkpoint has these, too, but for best_loss: metrics.jsonl tells it.
        self.step, self.flops, self.best_loss = 0, 0.0, math.inf
        # The norm of each block's gradient, summed over the steps: analyze.py ranks blocks by it.
        self.block_norm_sums = torch.zeros(model_config.n_layer, dtype=torch.float64,
                                           device=processes.device)
        self.n_steps = self.count_steps()   # in the whole run; with --max_flops a guess
        if config.resume:
            self.restore(ckpt)
        self.first_step = self.step
        # take_step sets these. They are read before the first step, too.
        self.loss, self.grad_norm = torch.zeros(()), torch.zeros(())
        self.forward_model = self.compile_and_wrap()   # the model, or DDP around it

    def run(self):
        """The whole run -> exit status"""
        self.announce()
        # Writes config.json. Metrics of later steps go, and with --overwrite the old run.
        self.folder.begin(self.step)
        signals = note_signals()   # an empty list, until Ctrl-C or a kill comes
        self.start_clock()
        while True:
            # The share of the run that will be done after the coming step. The learning rate
            # follows it. So does what a model turns on little by little, in before_step: now,
            # because what is saved and evaluated is the model of the coming step.
            progress = min(1.0, self.share_done() + 1 / self.n_steps)
            # If any process got a signal, all of them stop at this step. (0: none got one.)
            signal = self.processes.highest(signals[0] if signals else 0)
            ends = bool(signal) or self.share_done() >= 1   # There is no further step.
            if ends or self.is_due(self.config.eval_interval):
                # The checkpoint comes first: an evaluation that fails must not cost the run.
                state = self.save()
                if not signal:
                    self.evaluate_and_report(state)
            if ends:
                break
            self.take_step(progress)
            if self.is_due(self.config.log_interval):
                self.log()
            elif self.step == self.first_step + 1:
                self.start_clock()   # The first step may compile: it is not counted.
        self.processes.wait()   # Nobody leaves while another one is still writing.
        return self.finish(signal)

    def share_done(self):
        """How much of the run is over: 0 to 1, or, with --max_flops, a little more"""
        if self.config.max_flops:
            return self.flops / self.config.max_flops
        return self.step / self.n_steps

    def is_due(self, interval):
        return self.step % interval == 0

    def start_clock(self):
        """From here to the next log or evaluation, tokens per second are counted."""
        if self.processes.on_cuda:   # A GPU runs behind: it has to catch up first.
            torch.cuda.synchronize()
        self.clock, self.clock_step = time.perf_counter(), self.step

    def take_step(self, progress):
        """One step of training. It also notes its loss, the norm of the whole gradient, the
        learning rate, the mean gain, and the share of the sublayer runs that were skipped."""
        self.loss, self.mean_gain, self.skipped, flops = self.forward_and_backward()
        self.grad_norm, self.lr = self.update(progress)
        constrain_weights(self.model)   # nGPT normalises its weights.
        self.step += 1
        self.flops += 3 * self.tokens_per_step * flops   # The backward pass costs two forward ones.

    def forward_and_backward(self):
        """Puts the gradient of a batch into .grad -> its cross entropy, and the mean gain (0 if
        nobody asked for it), tensors; the share of the sublayer runs that were skipped, and FLOPs
        per token. All are means over micro-batches and processes. (With --deep_supervision the
        cross entropy is a mean over blocks. What --mod or --gain_cost adds to it is left out.)"""
        config, processes, model = self.config, self.processes, self.model
        loss, mean_gain = torch.zeros(2, device=model.device)
        counts = torch.zeros(2, dtype=torch.float64)
        for micro in range(config.grad_accum):
            part = micro * processes.count + processes.rank
            x, y = self.to_device(*self.data.batch(self.step, part))
            # What LayerDrop and coins draw depends on seed, step and part only, as the batch does.
            seed = np.random.SeedSequence((model.config.seed, self.step, part))
            torch.manual_seed(int(seed.generate_state(1)[0]))
            if processes.count > 1:   # Processes exchange gradients once a step.
                self.forward_model.require_backward_grad_sync = micro == config.grad_accum - 1
            runner = Runner(model)
            _, micro_loss = self.forward_model(x, y, runner=runner)
            micro_loss = micro_loss / config.grad_accum
            micro_loss.backward()
            loss += (micro_loss - runner.extra_loss() / config.grad_accum).detach()
            if runner.mean_gain() is not None:
                mean_gain += runner.mean_gain().detach() / config.grad_accum
            found = [runner.skipped(), flops_per_token(model, runner=runner)]
            counts += torch.tensor(found, dtype=torch.float64) / config.grad_accum
        return processes.mean(loss), processes.mean(mean_gain), *processes.mean(counts).tolist()

    def to_device(self, *tensors):
        if self.processes.on_cuda:   # Copying from pinned memory doesn't wait for the GPU.
            tensors = [tensor.pin_memory() for tensor in tensors]
        return [tensor.to(self.processes.device, non_blocking=True) for tensor in tensors]

    def update(self, progress):
        """Lets the optimizers take a step -> the norm of the whole gradient, not clipped, and the
        learning rate"""
        config = self.config
        grads, block_norms = self.block_gradients()
        self.block_norm_sums += block_norms   # for analyze.py
        if config.equalize_grads:
            equalize(grads, block_norms)
        clip = config.grad_clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        factor = lr_factor(config, progress)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm, config.lr * factor

    def block_gradients(self):
        """-> a list of gradients for each block, and their norms (L,)"""
        grads = [[p.grad for p in block.parameters() if p.grad is not None]
                 for block in self.model.blocks]
        # A block that all tokens skip has no gradients. The norm of nothing is a zero on the CPU.
        norms = [torch.nn.utils.get_total_norm(each).to(self.model.device) for each in grads]
        return grads, torch.stack(norms)

    # ------------------------------------------------------------------------- saving and reporting

    def save(self):
        """Writes the checkpoint (in the first process), and returns it. To resume is exact, because
        all else follows from settings, step and FLOPs: batches, what LayerDrop draws, rates."""
        self.refuse_if_not_finite()   # Nothing that has gone wrong is saved.
        state = dict(model=self.model.state_dict(), model_config=asdict(self.model.config),
                     optimizers=optimizer_state(self.model, self.optimizers), step=self.step,
                     flops=self.flops, grad_norms=self.block_norm_sums, data=self.data.fingerprint)
        self.folder.save("ckpt.pt", state)
        return state

    def refuse_if_not_finite(self):
        """SystemExit, if the loss, a gradient or a weight is not finite any more"""
        loss, sums = self.loss.item(), self.block_norm_sums
        finite = math.isfinite(loss) and self.grad_norm.isfinite() and sums.isfinite().all()
        if not finite or not all_finite(self.model):
            refuse(f"iteration {self.step}: loss {loss}, or gradients or weights that are not "
                   f"finite; {self.ckpt_path}, if it is there, is from before: go on from there "
                   f"with --resume and a lower --lr")

    def evaluate_and_report(self, state):
        """Evaluates the model, and saves `state`, its checkpoint, as best.pt, too, if no loss was
        lower so far. Each process evaluates all windows: it is short, and needs no exchange."""
        nats, bits, skipped = evaluate(self.model, *self.data.val, self.data.token_bytes,
                                       self.data.micro_batch_size)
        say(f"iter {self.step:5d} | validation loss {nats:.4f} | {bits:.4f} bits/byte | "
            f"{skipped:.1%} skipped")
        if not math.isfinite(nats):
            refuse(f"iteration {self.step}: validation loss {nats}; best.pt, if it is there, has "
                   f"better weights; start a new run with a lower --lr")
        if nats < self.best_loss:
            self.folder.save("best.pt", state)
        # After best.pt, because a run that is resumed finds the best loss here.
        self.folder.log(step=self.step, val_loss=nats, val_bpb=bits, val_skip_rate=skipped,
                        grad_norms=self.block_norm_sums.tolist())
        self.best_loss = min(nats, self.best_loss)
        self.start_clock()

    def log(self):
        """A line of metrics.jsonl, and one for people, about the last step"""
        self.refuse_if_not_finite()   # (This also waits for a GPU, so the clock is right.)
        n_tokens = (self.step - self.clock_step) * self.tokens_per_step
        tok_s = n_tokens / (time.perf_counter() - self.clock)
        loss, norm, mean_gain = (x.item() for x in (self.loss, self.grad_norm, self.mean_gain))
        self.folder.log(step=self.step, loss=loss, lr=self.lr, grad_norm=norm, tok_s=tok_s,
                        tokens=self.step * self.tokens_per_step, flops=self.flops,
                        skip_rate=self.skipped, mean_gain=mean_gain)
        gain = f"mean gain {mean_gain:.3f} | " if mean_gain else ""
        say(f"iter {self.step:5d} | loss {loss:.4f} | lr {self.lr:.2e} | gradient {norm:.2f} | "
            f"{gain}{self.skipped:.1%} skipped | {tok_s:,.0f} tokens/s")
        self.start_clock()

    def announce(self):
        model_config = self.model.config
        if self.processes.on_cuda:
            where = torch.cuda.get_device_name()
        else:
            threads = torch.get_num_threads()
            where = f"CPU, {threads} thread{'s' * (threads > 1)}"
        say(f"{model_config.residual}: {model_config.n_layer} blocks x {model_config.n_embd}, "
            f"{num_params(self.model) / 1e6:.2f}M parameters; iterations {self.step} to "
            f"{self.n_steps} of {self.tokens_per_step:,} tokens on {self.processes.count} x "
            f"{where}")

    def finish(self, signal):
        """Says how the run has ended -> exit status. signal: its number, or 0"""
        out = self.folder.out
        if signal:
            how = "python" if self.processes.count == 1 else "torchrun ..."
            say(f"stopped at iteration {self.step}, all is saved; go on with: {how} train.py "
                f"--out {out} --resume")
            return 128 + signal
        say(f"done: {out} holds the run; best validation loss {self.best_loss:.4f}\n"
            f"next: python sample.py {out}   or: python analyze.py {out}")
        return 0

    # ---------------------------------------------------------------------------- length of the run

    def count_steps(self):
        """Steps in the whole run. For --max_flops it is a guess: skipping makes steps cheaper."""
        config = self.config
        if config.max_flops:
            return math.ceil(config.max_flops / self.step_flops())
        return config.max_iters or math.ceil(config.max_tokens / self.tokens_per_step)

    def step_flops(self):
        """FLOPs of a step in which nobody skips"""
        return 3 * self.tokens_per_step * flops_per_token(self.model)

    def is_beyond_end(self):
        """Is the checkpoint later than the last step that a run of this length would take?"""
        if self.config.max_flops:   # A run may end beyond it, by less than a step.
            return self.flops - self.step_flops() >= self.config.max_flops
        return self.step > self.n_steps

    # ------------------------------------------------------------------------ starting and resuming

    def compile_and_wrap(self):
        """Compiles the model, if need be -> what training calls: the model, or, for several
        processes, its DDP wrapper"""
        compiles = self.config.compile
        if compiles is None:
            compiles = self.processes.on_cuda
        if compiles:
            compile_blocks(self.model)
        if self.config.checkpoint_blocks:
            checkpoint_blocks(self.model)
        if self.processes.count == 1:
            return self.model
        # It may be that no token of this process runs some sublayer.
        return DistributedDataParallel(self.model, find_unused_parameters=self.some_tokens_skip())

    def some_tokens_skip(self):
        return self.model.decider.needs_skipping

    def restore(self, ckpt):
        """Goes on where the checkpoint is. SystemExit if it doesn't fit."""
        no_momentum = self.config.optimizer == "sgd" and self.config.beta1 == 0
        with explain_read_errors(self.ckpt_path):
            # A parameter has no moments before its first gradient, and none with SGD's beta1 of 0.
            # (Rates are those of the flags, not of the checkpoint.)
            may_lack_moments = self.some_tokens_skip() or no_momentum or ckpt["step"] == 0
            if ckpt["data"] != self.data.fingerprint:
                refuse(f"{self.ckpt_path}: is of other data than --data has now; put that back, "
                       f"or start a new run")
            restore_optimizers(self.model, self.optimizers, ckpt["optimizers"], may_lack_moments)
            self.step, self.flops, norms = checked_progress(ckpt, self.block_norm_sums.shape)
            self.block_norm_sums.copy_(norms)
        if self.is_beyond_end():
            refuse(f"--resume: {self.ckpt_path} is at iteration {self.step}, beyond the end that "
                   f"the flags set (about {self.n_steps} iterations); give a later end, or none")
        self.best_loss = self.best_loss_so_far()

    def best_loss_so_far(self):
        """The lowest validation loss up to this step, as the metrics say"""
        metrics = read_metrics(self.folder.out).items()
        return min((entry["val_loss"] for step, entry in metrics
                    if step <= self.step and "val_loss" in entry), default=math.inf)

# ------------------------------------------------------------------------ where settings come from

NOT_SAVED = "out", "config", "resume", "overwrite"   # These belong to one start, not to the run.

def defaults_for(given):
    """Values for flags that were not typed. `parse` calls this. given: the typed flags, a dict

    First comes what is typed; then what this returns, values of the run to resume, or of --config,
    or of CUDA_DEFAULTS; then the defaults of the two configs."""
    values = {}
    if given.get("resume"):
        values = settings_to_resume(given)
    elif "config" in given:
        values = read_config(given["config"])
        if "data" in given:   # Other data may have another tokenizer.
            values.pop("vocab_size")
    elif pick_device(given.get("device", "auto")) == "cuda" and SIZES.isdisjoint(given):
        values = dict(CUDA_DEFAULTS)
    optimizer = given.get("optimizer")
    if optimizer and optimizer != values.get("optimizer", TrainConfig.optimizer):
        values["lr"] = RATES[optimizer]
    if any(name in given for name in LENGTHS):   # The typed one wins over these zeros.
        values.update(dict.fromkeys(LENGTHS, 0))
    return values

def settings_to_resume(given):
    """The settings of the run in --out. SystemExit if a flag beside --resume can't be changed.
    (read_checkpoint refuses changed flags of the model.)"""
    if "config" in given or "out" not in given:
        refuse("--resume: continues the run in --out with its own settings; give --out, and no "
               "--config")
    values = read_config(Path(given["out"]) / "config.json")
    # Another one would change batches or moments, or make losses that can't be compared.
    for name in "batch_size", "optimizer", "eval_windows":
        if given.get(name, values[name]) != values[name]:
            refuse(f"--{name} {given[name]}: a run can't change it, and this one has "
                   f"{values[name]}; leave that, or start a new run")
    return values

def read_config(path):
    """The settings of a run, a dict. path: its config.json, or its folder. A missing setting has
    its default. SystemExit if one is unknown. NOT_SAVED are left out: where a run goes, and what it
    may replace, has to be typed anew."""
    if Path(path).is_dir():
        path = Path(path) / "config.json"
    # config.json also says the tokenizer, for sample.py. It is no flag, so `parse` ignores it.
    defaults = asdict(GPTConfig()) | asdict(TrainConfig()) | dict(tokenizer="")
    values = read_settings(path, defaults)
    return {name: value for name, value in values.items() if name not in NOT_SAVED}

# --------------------------------------------------------------------------------------------- main

RETIRED = dict(mod_rate="what is skipped is measured now, not set: --gain_cost 0.1 --mod gain:below=0.05",
               layer_drop="use --mod layerdrop:rate=0.1")

def residual_list():
    """For --help: all residuals with their options"""
    lines = ["residuals, with their options:"]
    for name in RESIDUALS:
        options = ",".join(f"{key}={default}" for key, default in option_defaults(RESIDUALS[name]).items())
        lines.append(f"  {name}:{options}".rstrip(":"))
    return "\n".join(lines)

def settings_to_save(model_config, config, data):
    settings = asdict(model_config) | asdict(config) | dict(tokenizer=data.tokenizer)
    return {name: value for name, value in settings.items() if name not in NOT_SAVED}

def default_folder(residual):
    """attnres:group=4 -> runs/attnres-group4"""
    return "runs/" + re.sub(r"[^\w.-]+", "-", residual.replace("=", ""))

def main(argv=None):
    """A whole run -> exit status: 0, or 128 + the number of the signal that stopped it"""
    model_config, config = parse((GPTConfig, TrainConfig), argv, __doc__, defaults=defaults_for,
                                 epilog=residual_list(), retired=RETIRED)
    processes = join_processes(config)
    pick_threads(model_config, processes.device, processes.count)
    meta = find_data(config, processes)
    rows = math.ceil(meta["vocab_size"] / 64) * 64   # of the head: multiples of 64 are fast
    model_config.vocab_size = max(model_config.vocab_size, rows)
    check_memory(model_config, config, processes)
    data = Data(meta, model_config, config, n_parts=config.n_parts(processes.count))
    if not config.resume:
        data.batch(step=0, part=processes.rank)   # Refuses most bad data, before there is a folder.
    out = config.out or default_folder(model_config.residual)
    settings = settings_to_save(model_config, config, data)
    folder = RunFolder(out, settings, resume=config.resume, overwrite=config.overwrite,
                       is_first=processes.rank == 0)
    with contextlib.closing(folder):
        return Training(model_config, config, data, folder, processes).run()

if __name__ == "__main__":
    start(main)
