"""
Pretrain a GPT with any residual, on a CPU, one GPU or many.

    python train.py                                          # a small default, two minutes on a laptop
    python train.py --residual nag --out runs/nag            # every field of both configs is a flag
    python train.py --out runs/nag --resume                  # continue a run, bit for bit
    torchrun --nproc_per_node 8 train.py --batch_size 512    # batch_size counts all processes
    torchrun --nproc_per_node 8 train.py --fsdp --checkpoint_blocks   # a model beyond one card
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 train.py

A run folder holds config.json, metrics.jsonl (one object a line), ckpt.pt and best.pt (lowest validation
loss). With several nodes, on each of them: the same command, --data and --out on a disk that all see. Any
number of processes writes the same ckpt.pt, and any number can --resume it.
"""
import argparse
import contextlib
import ctypes
import dataclasses
import difflib
import inspect
import json
import math
import os
import re
import signal
import sys
import time
import types
import typing
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

import prepare
from kernels import on_triton
from model import GPT, GPTConfig, unknown_choices

ENDS = ("max_iters", "max_tokens", "max_flops")   # a run ends by one of these


@dataclass
class TrainConfig:
    data: str = "data/stdlib"      # folder of token shards, made by prepare.py
    out: str = ""                  # run folder; default runs/RESIDUAL
    config: str = ""               # config.json of an earlier run to replay; flags given beside it win
    resume: bool = False           # continue the run in --out from its last checkpoint
    overwrite: bool = False        # replace the run in --out
    batch_size: int = 16           # sequences per optimizer step, over all processes and accumulation steps
    grad_accum: int = 1            # forward and backward passes per optimizer step
    max_iters: int = 0             # end after this many optimizer steps; with none of the three, 420
    max_tokens: float = 0          # end after this many training tokens
    max_flops: float = 0           # end after this many matmul FLOPs, those that skipping saved not counted
    lr: float = 3e-3               # peak learning rate
    gate_lr: float = 1e-3          # peak learning rate of the residual's gates (nag: alpha, beta, w, b, p, g)
    min_lr: float = 0.1            # final learning rate / peak
    warmup: float = 0.05           # share of the run with a rising learning rate
    alpha_warmup: float | None = None  # nag: share of the run in which step sizes rise; beyond 12 blocks 0.3
    mod_ramp: float = 0.1          # share of the run in which mod_rate rises from 0, after the warm-ups
    schedule: Literal["cosine", "wsd"] = "cosine"  # wsd: constant, then linear decay
    decay: float = 0.2             # wsd: share of the run with a falling learning rate
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"  # sgd: with momentum beta1; muon: blocks' matrices
    weight_decay: float = 0.1      # of matrices only
    equalize_grads: bool = False   # give the gradients of all blocks the same norm before the optimizer
    beta1: float = 0.9             # AdamW's first momentum
    beta2: float = 0.95            # AdamW's second momentum
    grad_clip: float = 1.0         # largest global gradient norm; 0 switches clipping off
    eval_interval: int = 100       # steps between checkpoint and evaluation
    eval_windows: int = 128        # fixed validation windows of block_size tokens
    log_interval: int = 20         # steps between status lines
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    compile: bool | None = None    # torch.compile each block; default: on CUDA only
    checkpoint_blocks: bool = False  # save memory: backward runs each block again (not counted as FLOPs)
    fsdp: bool = False             # split the weights over the processes; best with checkpoint_blocks

    def problems(self, world_size=1, gpt=GPTConfig()) -> list[str]:
        """Every reason why this config can't be run, one sentence each, naming the flags and a remedy."""
        bad = unknown_choices(self)
        for name in ("batch_size", "grad_accum", "eval_interval", "eval_windows", "log_interval"):
            if getattr(self, name) < 1:
                bad.append(f"--{name} {getattr(self, name)}: must be 1 or more")
        for name in (*ENDS, "lr", "gate_lr", "weight_decay", "grad_clip"):
            if not 0 <= getattr(self, name) < math.inf:
                bad.append(f"--{name} {getattr(self, name)}: must be a finite number, 0 or more")
        for name in ("min_lr", "warmup", "alpha_warmup", "mod_ramp", "decay", "beta1", "beta2"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) <= 1:
                bad.append(f"--{name} {getattr(self, name)}: must be from 0 to 1")
        for name in ("beta1", "beta2"):
            if getattr(self, name) == 1:
                bad.append(f"--{name} 1: would never forget the first gradient; use a value below 1")
        if 0 < self.min_lr < 1e-3:
            bad.append(f"--min_lr {self.min_lr}: is a share of --lr, not a rate; use 0.1 for a tenth of it")
        ends = [f"--{name}" for name in ENDS if getattr(self, name)]
        if len(ends) > 1:
            bad.append(f"{' and '.join(ends)}: each ends the run; give one of them")
        parts = max(1, self.grad_accum) * world_size
        if self.batch_size % parts:
            bad.append(f"--batch_size {self.batch_size}: not a multiple of grad_accum x processes = {parts}")
        for name in ("overwrite", "config"):   # a config beside the run's own would change what it is
            if self.resume and getattr(self, name):
                bad.append(f"--resume and --{name}: contradict each other; give one of them")
        rules = [   # (flags, whether they are wrong together, why and what to do)
            ("--fsdp with --share_every or --repeat", self.fsdp and (gpt.share_every or gpt.repeat),
             "it splits block by block, so each needs weights of its own; leave --fsdp out"),
            ("--fsdp with --mod_rate or --layer_drop", self.fsdp and (gpt.mod_rate or gpt.layer_drop),
             "a process that skips a sublayer would have no gradient to exchange; leave --fsdp out"),
            ("--fsdp with --value_residual", self.fsdp and gpt.value_residual,
             "it can't see values that pass from block to block beside the stream; leave --fsdp out"),
            ("--norm batch with several processes or --fsdp",
             (self.fsdp or world_size > 1) and gpt.norm == "batch",
             "each process would keep statistics of its own; use one process"),
            ("--equalize_grads with --share_every or --repeat",
             self.equalize_grads and (gpt.share_every or gpt.repeat),
             "blocks that share weights share gradients, too; leave --equalize_grads out"),
            ("--checkpoint_blocks with --norm batch", self.checkpoint_blocks and gpt.norm == "batch",
             "running a block twice counts its statistics twice; leave --checkpoint_blocks out"),
            ("--transfer with --optimizer sgd", gpt.transfer != "none" and self.optimizer == "sgd",
             "its rules are those of an optimizer that normalises gradients; use adamw or muon"),
        ]
        return bad + [f"{flags}: {why}" for flags, wrong, why in rules if wrong]


# On a GPU the small default would measure launch overhead only. GPT-2 small, 0.5M tokens a step; flags that
# say another size switch this off as a whole.
CUDA_DEFAULTS = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=512, grad_accum=8,
                     lr=1e-3, max_iters=2000, eval_interval=250)

# dense bf16, from the vendors' data sheets; the first name that is a word of the device's name counts
PEAK_FLOPS = {
    "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12,
    "A10G": 70e12, "L40S": 362e12, "L4": 121e12, "V100": 125e12, "T4": 65e12, "4090": 165e12, "3090": 71e12,
    "5090": 209e12}


def peak_flops(device_name):
    """-> FLOP/s, or None for a device that the table lacks"""
    return next((flops for name, flops in PEAK_FLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


def minutes(seconds):
    """119.7 -> 2:00"""
    return "{}:{:02}".format(*divmod(round(seconds), 60))


# ----------------------------------------------------------------------------- flags

class Parser(argparse.ArgumentParser):
    """argparse that answers a mistake with one sentence."""
    def error(self, message):
        raise SystemExit(f"{self.prog}: {message}; {self.prog} --help lists the flags")

    def parse(self, argv=None):
        known, unknown = self.parse_known_args(argv)
        if unknown:
            flag = next((u for u in unknown if u.startswith("--")), unknown[0]).split("=")[0]
            near = difflib.get_close_matches(flag, self._option_string_actions, 1)
            self.error(f"{flag}: unknown flag" + (f", did you mean {near[0]}?" if near else ""))
        return known

    def read(self, flag, path):
        """The UTF-8 text of the file that a flag names."""
        try:
            return Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            self.error(f"{flag} {path}: is not UTF-8 text; convert it first")
        except OSError as error:
            self.error(f"{flag} {path}: {error.strerror}; check the path")


def add_flags(parser, *configs):
    """One --flag per dataclass field. The field's comment is its help; fields not given stay absent from the
    result."""
    for config in configs:
        comments = dict(re.findall(r"^    (\w+):.*?  # (.+)$", inspect.getsource(config), re.M))
        for field in dataclasses.fields(config):
            kind = kinds(field)[0]
            how = dict(type=kind)
            if typing.get_origin(kind) is Literal:
                how = dict(choices=typing.get_args(kind))
            elif kind is bool:
                how = dict(action=argparse.BooleanOptionalAction)
            parser.add_argument(f"--{field.name}", default=argparse.SUPPRESS, **how,
                                help=f"{comments[field.name]} (default {field.default})".replace("%", "%%"))


def resolve(argv):
    """Command line -> (GPTConfig, TrainConfig, dict of all settings given). Reports every problem before it
    exits."""
    parser = Parser("train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    allow_abbrev=False)
    add_flags(parser, GPTConfig, TrainConfig)
    given = vars(parser.parse(argv))
    source = given.get("config")
    if given.get("resume") and not source:
        if not given.get("out"):
            parser.error("--resume: name the run folder with --out")
        source = Path(given["out"]) / "config.json"
    sized = given.keys() & {"n_layer", "n_head", "n_embd", "block_size"}
    defaults = CUDA_DEFAULTS if pick_device(given) == "cuda" and not sized else {}
    values = load_config(source) if source else defaults
    stored = values if given.get("resume") else {}
    # a replay is a new run and a resumed run is not a replay: these four are said anew each time
    anew = ("out", "config", "resume", "overwrite", "tokenizer")
    values = {key: value for key, value in values.items() if key not in anew} | given
    # a typed end replaces a stored one
    ends = {end: given[end] for end in ENDS if end in given}
    if ends:
        values |= dict.fromkeys(ENDS, 0) | ends
    gpt, train = from_dict(GPTConfig, values), from_dict(TrainConfig, values)
    train.out = train.out or f"runs/{gpt.residual}"
    bad = gpt.problems() + train.problems(int(os.environ.get("WORLD_SIZE", 1)), gpt)
    bad += [f"--{end} 0: would train nothing; give 1 or more, or leave it out"
            for end in ends if not any(ends.values())]
    if stored and train.batch_size != stored.get("batch_size", train.batch_size):
        bad.append(f"--batch_size {train.batch_size}: the run to resume has {stored['batch_size']}, by which "
                   f"its tokens are counted; leave it at that, or start a new run")
    if train.device == "cuda" and not torch.cuda.is_available():
        bad.append("--device cuda: torch sees no CUDA device; use --device cpu")
    if bad:
        raise SystemExit("\n".join(f"train.py: {sentence}" for sentence in bad))
    return gpt, train, values


def kinds(field):
    """Types that a field of a config may have; with None, the run decides."""
    return typing.get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)


def from_dict(config, values):
    """An instance of a config class from those of the values that are fields of it."""
    return config(**{f.name: values[f.name] for f in dataclasses.fields(config) if f.name in values})


def load_config(path):
    """config.json of a run -> dict. SystemExit where it is missing, broken or holds unknown settings."""
    try:
        values = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise SystemExit(f"{path}: no such file; name a run folder that train.py has written")
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: can't be read as JSON ({error}); restore it or start a new run")
    fields = (*dataclasses.fields(GPTConfig), *dataclasses.fields(TrainConfig))
    known = {field.name for field in fields} | {"tokenizer"}
    if not isinstance(values, dict):
        raise SystemExit(f"{path}: holds no settings; restore it or start a new run")
    unknown = [key for key in values if key not in known]
    for field in fields:
        value, kind = values.get(field.name, field.default), kinds(field)[0]
        fine = kinds(field) + (int,) * (kind is float)
        if kind in (int, float, str, bool) and type(value) not in fine:
            raise SystemExit(f"{path}: {field.name} is {value!r}, not of type {kind.__name__}; mend it there")
    if unknown:
        raise SystemExit(f"{path}: unknown setting {', '.join(unknown)}, of another version; remove it there")
    return values


def pick_device(values):
    device = values.get("device", "auto")
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


# ----------------------------------------------------------------------------- data

def read_windows(shards, starts, T):
    """Windows of T + 1 tokens at the given global positions -> x, y (n, T) int64. No window crosses two
    shards."""
    # global number of each shard's first window
    first = np.cumsum([0] + [len(shard) - T for shard in shards])
    which = np.searchsorted(first, starts, side="right") - 1
    rows = np.stack([shards[i][s - first[i]:s - first[i] + T + 1] for i, s in zip(which, starts)])
    rows = torch.from_numpy(rows.astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def open_data(data, split, T):
    """Memory-mapped shards of a split, those too short for one window of T + 1 tokens left out."""
    shards = [shard for shard in prepare.open_split(data, split) if len(shard) > T]
    if not shards:
        raise SystemExit(f"--data {data}: no {split} shard is longer than --block_size {T}; prepare more "
                         f"text or use a smaller --block_size")
    return shards


def train_batch(shards, T, seed, step, batch_size, part=0, n_parts=1):
    """Part `part` of n_parts of the batch of a step. A pure function: any number of processes sees the same
    batch."""
    n_windows = sum(len(shard) - T for shard in shards)
    starts = np.random.default_rng((seed, step)).integers(0, n_windows, batch_size)
    return read_windows(shards, starts.reshape(n_parts, -1)[part], T)


def val_windows(data, T, n):
    """n fixed validation windows, evenly spread: x, y (n, T)."""
    shards = open_data(data, "val", T)
    return read_windows(shards, np.linspace(0, sum(len(s) - T for s in shards) - 1, n).astype(int), T)


@torch.no_grad()
def evaluate(model, x, y, token_bytes, batch_size, autocast, rank=0, world_size=1):
    """
    Over windows x, y (n, T): mean loss in nats per token, bits per byte of text, share of the sublayer runs
    that were skipped. token_bytes (V,).
    """
    total = torch.zeros(4, dtype=torch.float64)
    for i in range(rank * batch_size, len(x) + rank * batch_size, world_size * batch_size):
        # all processes make equally many passes, since those of FSDP exchange weights: the rest of them idly
        xi, yi = (t[i if i < len(x) else 0:][:batch_size].to(model.turn.device) for t in (x, y))
        kept = []
        with autocast():
            loss = model(xi, yi, kept=kept)[1].item()
        if i >= len(x):
            continue
        ran = shares(kept) or [1.0]   # FSDP gives the model a copy of our list; nothing is skipped there
        skipped = yi.numel() * (1 - sum(ran) / len(ran))
        total += torch.tensor([loss * yi.numel(), token_bytes[yi.cpu()].sum().item(), skipped, yi.numel()])
    if world_size > 1:
        total = total.to(model.turn.device)
        dist.all_reduce(total)
    nats, n_bytes, skipped, n = total.tolist()
    return nats / n, nats / math.log(2) / max(1, n_bytes), skipped / n


# ----------------------------------------------------------------------------- skipping

def shares(kept):
    """The masks that GPT.forward puts into `kept` -> shares of the tokens that ran, 2L floats."""
    return [1.0 if keep is None else keep.float().mean().item() for keep in kept]


LOOK = 10   # steps of training after which all attentions are tried again


def groups(config):
    """The sublayers that share one threshold, as slices of the 2L."""
    n = 2 * config.n_layer
    return {"global": [slice(n)], "kind": [slice(0, n, 2), slice(1, n, 2)],
            "layer": [slice(l, l + 1) for l in range(n)]}[config.mod_scope]


@torch.no_grad()
def calibrate(model, batches, rate, least=0.0):
    """
    Thresholds (2L,) with which the model skips the share `rate` of its sublayer runs on the batches, a list
    of idx (B, T), and the share that it really skips. They are quantiles of the dense model's scores; since
    skipping changes what later sublayers see, which quantile is found by bisection. least: an attention that
    a smaller share of the tokens would skip gets -1, skips none. It is for one threshold for all sublayers
    (elsewhere each group has to reach the rate), and is dropped where the others can't reach the rate.
    """
    def forward(tau):   # -> scores (2L, tokens), realised rate
        scores, ran = [], []
        for idx in batches:
            walk = zip(model.walk(idx, tau=tau), model.sublayers())
            scores.append(torch.stack([r.score(r.gain(before)).flatten() for (_, before, _), (r, _) in walk]))
            limit = torch.as_tensor(tau).expand(len(scores[-1])).to(scores[-1])
            ran.append((scores[-1] > limit[:, None])[there].double())
        return torch.cat(scores, 1), 1 - torch.cat(ran, 1).mean().item()

    def quantiles(share):
        tau = torch.zeros(2 * model.config.n_layer)
        for group in groups(model.config):
            # torch.quantile has a limit of 2 ** 24 numbers
            ordered = dense[group][there[group]].flatten().sort().values
            if len(ordered):
                tau[group] = ordered[min(len(ordered) - 1, int(share * len(ordered)))].item()
        return tau

    there = torch.tensor(model.present())   # sublayers that were removed neither run nor skip
    low, high, training = 0.0, 1.0, model.training
    model.eval()   # training would add its exploration
    dense, realised = forward(-1.0)
    best = torch.full((len(dense),), -1.0), realised
    skipped = (dense <= quantiles(rate).to(dense)[:, None]).double().mean(1).cpu()
    whole = attentions(model).cpu() & (skipped < least) & (model.config.mod_scope == "global")
    for _ in range(20 if rate else 0):
        tau = quantiles((low + high) / 2)
        tau[whole] = -1.0
        _, realised = forward(tau)
        if abs(realised - rate) <= abs(best[1] - rate):
            best = tau, realised
        if abs(realised - rate) <= 0.0025:
            break
        low, high = ((low + high) / 2, high) if realised < rate else (low, (low + high) / 2)
    model.train(training)
    return best if best[1] > rate - 0.01 or not whole.any() else calibrate(model, batches, rate)


def attentions(model):
    """Which of the sublayers are: bool (2L,)"""
    mixes = [sublayer.mixes_tokens for _, sublayer in model.sublayers()]
    return torch.tensor(mixes, device=model.turn.device)


def steer(model, ran, target, looked):
    """
    An integral controller on log tau: raise it where a group of sublayers skips less than the target. looked:
    all sublayers had a threshold in this step. Attentions that too few tokens skipped get -1, run whole.
    """
    skipped = 1 - torch.tensor(ran, device=model.tau.device)
    # small groups react more strongly, and would overshoot
    speed = 0.5 if model.config.mod_scope == "global" else 0.1
    for group in groups(model.config):
        model.tau[group] *= torch.exp(speed * (target - skipped[group].mean()))
    if looked:
        model.tau[attentions(model) & (skipped < model.config.mod_least)] = -1.0


def look(model, step):
    """
    Every few steps, let attentions that run whole go by the threshold, to see how many tokens would skip them
    -> whether it did. Only where there is one threshold for all: elsewhere each group has to reach the rate.
    """
    if step % LOOK or model.config.mod_scope != "global":
        return False
    model.tau.fill_(model.tau.max())
    return True


@torch.no_grad()
def gate_health(model, idx):
    """Mean gain in each quarter of the depth, number of sublayers that are as good as shut (below 5 %)."""
    walk = zip(model.walk(idx, tau=-1), model.sublayers())
    gains = torch.stack([residual.gain(before).abs().mean() for (_, before, _), (residual, _) in walk])
    return dict(gain_by_depth=[part.mean().item() for part in gains.tensor_split(min(4, len(gains)))],
                dead_sublayers=(gains < 0.05).sum().item())


# ----------------------------------------------------------------------------- checkpoints

def write_file(path, write):
    """Write to a temporary name, flush to the disk, rename: at no moment is there half a file under
    `path`."""
    tmp = f"{path}.tmp"
    try:
        with open(tmp, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except (OSError, RuntimeError) as error:   # torch.save says RuntimeError when the disk is full
        Path(tmp).unlink(missing_ok=True)
        raise SystemExit(f"{path}: can't be written ({error}); make room, or see to the folder, and go on: a "
                         f"file of that name is still the previous one")


def load_checkpoint(path, config):
    """-> the checkpoint dict. SystemExit if it is missing, unreadable, or of a model other than config."""
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        found = ckpt["model_config"]
    except FileNotFoundError:
        raise SystemExit(f"{path}: no checkpoint there; train that run first, without --resume")
    except Exception as error:   # torch.load raises half a dozen kinds, none of which a user can act on
        raise SystemExit(f"{path}: no readable checkpoint ({type(error).__name__}); restore it or train anew")
    # settings that did not exist yet when it was written have their default
    wanted, found = dataclasses.asdict(config), dataclasses.asdict(GPTConfig()) | found
    differ = [f"{key} {found.get(key)} there, {wanted.get(key)} here"
              for key in found if found[key] != wanted.get(key) and key != "kernels"]
    if differ:
        raise SystemExit(f"{path}: is of another model ({'; '.join(differ)}); use the settings it has")
    return ckpt


def read_metrics(run):
    """The objects of RUN/metrics.jsonl. A line that a crash has cut short is left out."""
    objects = []
    with contextlib.suppress(FileNotFoundError):
        for line in (Path(run) / "metrics.jsonl").read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                objects.append(json.loads(line))
    return objects


def load_run(run, device="cpu", which="ckpt.pt"):
    """Run folder -> (model in eval mode, config as a flat dict). SystemExit with one sentence if it is no
    run."""
    if not (Path(run) / "config.json").is_file():
        raise SystemExit(f"{run}: no run folder, lacks config.json; make one: python train.py --out {run}")
    values = load_config(Path(run) / "config.json")
    config = from_dict(GPTConfig, values | {"kernels": "auto"})   # this machine may have another device
    ckpt = load_checkpoint(Path(run) / which, config)
    model = GPT(config)
    model.load_state_dict(ckpt["model"])
    norms = ckpt.get("grad_norms")   # see GradNorms; of shared weights only the first block has them
    usable = norms is not None and norms.any() and not config.share_every
    model.grad_norms = norms[0] if usable else None   # (3L,)
    return model.to(device).eval(), values


def skip_threshold(run, model, config, rate, which="ckpt.pt"):
    """
    Thresholds (2L,) at which a run's model skips the share `rate` of its sublayer runs, on held-out tokens.
    They are kept in RUN/skip.json, for this checkpoint and way of skipping. SystemExit if the model can't.
    """
    if not model.can_skip:
        raise SystemExit(f"{run}: --skip needs a run of a residual that knows its gain beforehand, such as "
                         f"nag, without --mod router, --value_residual and --repeat")
    path, stat, c = Path(run) / "skip.json", (Path(run) / which).stat(), model.config
    there = "".join("01"[run] for run in model.present())
    key = (f"{which} {stat.st_size} {stat.st_mtime_ns} {c.mod_on} {c.mod_scope} {c.mod_kv} {c.mod_least} "
           f"{there}")
    table = {}
    with contextlib.suppress(OSError, ValueError):   # a table that can't be read is made anew
        table = json.loads(path.read_text())
    # of another checkpoint of that name: outdated
    table = {k: v for k, v in table.items() if k.split()[0] != which or k.split()[:3] == key.split()[:3]}
    found = table.setdefault(key, {})
    if f"{rate}" not in found:
        x, _ = val_windows(config["data"], c.block_size, 32)
        tau, realised = calibrate(model, list(x.to(model.turn.device).split(8)), rate, least=c.mod_least)
        found[f"{rate}"] = dict(tau=tau.tolist(), realised=realised)
        try:
            write_file(path, lambda f: f.write(json.dumps(table, indent=1).encode() + b"\n"))
        except SystemExit as error:   # the next run will have to find it again
            print(error, file=sys.stderr)
    one = found[f"{rate}"]
    if abs(one["realised"] - rate) > 0.01:
        print(f"{run}: thresholds skip {one['realised']:.1%} of validation text, the nearest to {rate:.1%}",
              file=sys.stderr)
    return torch.tensor(one["tau"], dtype=torch.float64)


# ----------------------------------------------------------------------------- training

def make_optimizers(model, config):
    """
    AdamW or SGD in three groups: matrices (decayed), vectors, the residuals' gates (own learning rate), the
    first two once more for the blocks if --transfer treats these differently. muon: a second optimizer takes
    the blocks' matrices (torch.optim.Muon; updates as large as AdamW's, arXiv:2502.16982, so that one --lr
    fits both). -> dict, by the optimizers' names in the checkpoint.
    """
    named = lambda which: {getattr(module, name, None) for module in model.modules()
                           for name in getattr(module, which, ())}
    gates, vectors, by_paper = named("gates"), named("vectors") | {model.x0}, named("decayed")
    inner, (eps_scale, lr_scale) = {*model.blocks.parameters()}, model.config.depth_scales

    def kind(p):
        if p in gates:
            return "gate"
        if p not in by_paper and (p.dim() < 2 or p in vectors):
            return "vector"
        # a router's one row is no matrix
        muon = config.optimizer == "muon" and p in inner and p.dim() == 2 and min(p.shape) > 1
        return "muon" if muon else "matrix"

    of = {name: [p for p in model.parameters() if kind(p) == name]
          for name in ("matrix", "vector", "gate", "muon")}
    groups = [dict(params=of["matrix"], weight_decay=config.weight_decay), dict(params=of["vector"]),
              dict(params=of["gate"], lr=config.gate_lr, betas=(0.8, 0.95))]
    if model.config.transfer != "none":
        deep = dict(lr=config.lr * lr_scale, eps=1e-8 * eps_scale)
        groups = [dict(group, **more, params=[p for p in group["params"] if (p in inner) == bool(more)])
                  for more in ({}, deep) for group in groups]
    groups = [dict(group, peak=group.get("lr", config.lr)) for group in groups if group["params"]]
    if config.optimizer == "sgd":
        return dict(optimizer=torch.optim.SGD(groups, config.lr, momentum=config.beta1))
    found = dict(optimizer=torch.optim.AdamW(groups, config.lr, (config.beta1, config.beta2),
                                             weight_decay=0.0, fused=True))
    if of["muon"]:
        found["muon"] = torch.optim.Muon([dict(params=of["muon"], peak=config.lr * lr_scale)], config.lr,
                                         config.weight_decay, adjust_lr_fn="match_rms_adamw")
    return found


def restore(optimizer, saved):
    """
    Give an optimizer the moments of a saved state, in pieces where its parameters are; learning rates and
    decay stay as the flags say. ValueError where the state is of other parameters.
    """
    settings = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    def split(p, x):
        if not (is_split(p) and x.shape == p.shape):
            return x
        from torch.distributed.tensor import distribute_tensor   # here: see is_split
        return distribute_tensor(x.to(p.device), p.device_mesh, p.placements, src_data_rank=None)

    if [["betas" in group, len(group["params"])] for group in saved["param_groups"]] != [
            ["betas" in group, len(group["params"])] for group in optimizer.param_groups]:
        raise ValueError("another optimizer")
    state = {i: {key: split(params[i], x) for key, x in values.items()}
             for i, values in saved["state"].items()}
    optimizer.load_state_dict(dict(saved, state=state))
    for group, now in zip(optimizer.param_groups, settings):
        group.update(now)


# ----------------------------------------------------------------------------- several processes

def is_split(x):
    """Whether x is a DTensor. Told by a method: to import the class and FSDP takes half as long as torch."""
    return hasattr(x, "full_tensor")


def shard(model, device, world_size):
    """
    Split the weights of a model on the CPU over the processes, block by block (FSDP2), so that no device
    ever holds more than its part, a block or two, the embedding and the head (each process's CPU does hold
    the whole model at the start). FSDP2 can't split numbers of no dimension: each process has them all.
    -> the list of these.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard   # here: see is_split
    # about changing what a block returns in place, which no stream does
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    mesh = init_device_mesh(device.split(":")[0], (world_size,))
    numbers = [p for p in model.parameters() if p.dim() == 0]
    for p in numbers:
        p.data = p.data.to(device)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, ignored_params={*numbers})
    return numbers


def mean_grads(params, world_size):
    """Average the gradients of parameters without dimensions over the processes, all in one message."""
    if params:
        grads = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in params])
        dist.all_reduce(grads)
        for p, grad in zip(params, (grads / world_size).unbind()):
            p.grad = grad


def whole(state, rank):
    """A state dict with its split tensors put together: on the CPU of process 0, None elsewhere."""
    def gather(x):
        if is_split(x):
            x = x.full_tensor()   # all processes must take part
            return x.cpu() if rank == 0 else None
        return x
    return tree_map(gather, state)


class GradNorms:
    """
    Gradient norms per sublayer and per block, from one pass over the gradients (which clipping takes anyway).
    `sums` (2, 2L + L) accumulates the norms, and their squares, of the 2L sublayers and then of the L blocks:
    the statistic of CascadeFlow Pruning and of Gradient Fan-in Asymmetry (arXiv:2606.26538).
    A residual's parameters count to its sublayer, those of a shared or repeated block to its first place.
    """
    def __init__(self, model, device):
        self.params = [p for p in model.parameters() if p.requires_grad]
        # FSDP: of a split parameter each process has a part of the square, of the others the whole of it
        split = [is_split(p) for p in self.params]
        self.part = None
        if any(split):
            self.part = torch.tensor([1.0 if s else 1 / dist.get_world_size() for s in split],
                                     device=device, dtype=torch.float64)
        n, owner = 2 * len(model.blocks), {}
        for l, (residual, sublayer) in enumerate(model.sublayers()):
            for p in (*residual.parameters(), *sublayer.parameters()):
                owner.setdefault(p, l)
        self.owner = torch.tensor([owner.get(p, n) for p in self.params], device=device)   # n: no sublayer's
        self.sums = torch.zeros(2, n + n // 2, dtype=torch.float64, device=device)

    def measure(self, accumulate, equalize=False):
        """-> the norm of all gradients. accumulate: add this step to the sums; equalize: see TrainConfig."""
        grads = [torch.zeros((), device=self.owner.device) if p.grad is None else p.grad for p in self.params]
        grads = [grad.to_local() if is_split(grad) else grad for grad in grads]
        squares = torch.stack(torch._foreach_norm(grads)).double().square()
        if self.part is not None:
            squares *= self.part
            dist.all_reduce(squares)
        n = len(self.sums[0]) // 3 * 2
        sublayers = squares.new_zeros(n + 1).index_add_(0, self.owner, squares)[:n]
        blocks = sublayers.unflatten(0, (-1, 2)).sum(1)
        if accumulate:
            both = torch.cat((sublayers, blocks))
            self.sums += torch.stack((both.sqrt(), both))
        if equalize:   # to their root mean square, so that the norm of all of them stays what it is
            scale = (blocks.mean() / blocks.clamp_min(1e-30)).sqrt()
            scale = torch.cat((scale.repeat_interleave(2), scale.new_ones(1)))[self.owner].float()
            torch._foreach_mul_(grads, list(scale.unbind()))
        return squares.sum().sqrt().float()


def lr_share(config, progress, one_step):
    """
    Learning rate as a share of its peak: linear warm-up, then cosine or wsd down to min_lr. Both arguments
    are shares of the run: what is done, and what one step does.
    """
    if progress < config.warmup:
        return (progress + one_step) / (config.warmup + one_step)
    if config.schedule == "cosine":
        fall = 0.5 - 0.5 * math.cos(math.pi * (progress - config.warmup) / max(one_step, 1 - config.warmup))
    else:
        fall = max(0.0, 1 - (1 - progress) / max(one_step, config.decay))
    return 1 - (1 - config.min_lr) * fall


def keep_freed_memory():
    """
    Tell glibc to keep what a step frees for the next step. Giving it back to the kernel and touching every
    page anew costs a few percent of a step on a CPU. Other C libraries lack the call and go on as they are.
    """
    mallopt = os.name == "posix" and getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        for option, n_bytes in ((-1, 2 ** 31 - 1), (-3, 2 ** 25)):   # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            mallopt(option, n_bytes)


def stopping(stop, asking):
    """
    Whether a signal has come, to any process: all of them must leave the loop at the same step. asking: a
    group of the processes that talks without their GPUs, which need not wait for the answer.
    """
    if asking:
        told = torch.tensor(stop[0] if stop else 0)
        dist.all_reduce(told, dist.ReduceOp.MAX, asking)
        if told.item() and not stop:
            stop.append(told.item())
    return bool(stop)


def main(argv=None):
    gpt, config, values = resolve(argv)

    # processes: torchrun says in the environment who we are
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = pick_device(vars(config))
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    asking = None
    if world_size > 1:
        dist.init_process_group("nccl" if "cuda" in device else "gloo")
        asking = dist.new_group(backend="gloo")
    say = print if rank == 0 else lambda *args, **kwargs: None
    if config.fsdp and world_size == 1:
        say("--fsdp: one process has nothing to split; torchrun --nproc_per_node N starts several")
    # compute capability, since is_bf16_supported() also answers yes where bf16 is emulated
    bf16 = "cuda" in device and torch.cuda.get_device_capability()[0] >= 8
    split = config.fsdp and world_size > 1
    # a cache of bf16 weights would keep all blocks on each device, which FSDP is there to avoid
    autocast = (lambda: torch.autocast("cuda", torch.bfloat16, cache_enabled=not split)) if bf16 else (
        contextlib.nullcontext)

    # data
    if config.data == TrainConfig.data and not any(Path(config.data).glob("*.bin")):
        say(f"{config.data} is not there yet: preparing it from the Python standard library")
        if rank == 0:
            prepare.main(["stdlib", "--out", config.data])
    if world_size > 1:
        dist.barrier()
    meta = prepare.load_meta(config.data)
    if "vocab_size" not in values:
        # a multiple of 64 makes for faster matrix products
        gpt.vocab_size = -(-meta["vocab_size"] // 64) * 64
    if gpt.vocab_size < meta["vocab_size"]:
        raise SystemExit(f"--vocab_size {gpt.vocab_size}: too few for --data {config.data}; "
                         f"it needs {meta['vocab_size']} or more")
    T = gpt.block_size
    shards, val = open_data(config.data, "train", T), val_windows(config.data, T, config.eval_windows)

    def check_tokens(x, y):
        if max(x.max(), y.max()) >= meta["vocab_size"]:
            raise SystemExit(f"--data {config.data}: holds a token id beyond the {meta['vocab_size']} of "
                             f"tokenizer {meta['tokenizer']}; prepare it anew")

    check_tokens(*val)
    encoding = prepare.get_tokenizer(meta["tokenizer"])
    # end-of-text and padding stand for no byte of text
    token_bytes = torch.zeros(gpt.vocab_size, dtype=torch.long)
    for i in range(meta["vocab_size"]):
        if i != encoding.eot_token:
            token_bytes[i] = len(encoding.decode_single_token_bytes(i))

    # model and optimizer
    out = Path(config.out)
    if (out / "ckpt.pt").exists() and not config.resume and not config.overwrite:
        raise SystemExit(f"--out {out}: holds a run already; --resume continues it, --overwrite replaces it, "
                         f"another --out keeps it")
    ckpt = load_checkpoint(out / "ckpt.pt", gpt) if config.resume else None
    alpha_warmup = config.alpha_warmup
    if alpha_warmup is None:   # untrained updates at full size keep a deep model at token frequencies
        alpha_warmup = 0.3 if gpt.n_layer > 12 else 0.0
    model = GPT(gpt)
    model.checkpoint_blocks = config.checkpoint_blocks
    if ckpt:
        model.load_state_dict(ckpt["model"])
    elif alpha_warmup and hasattr(model.ends, "growth"):   # the first logits are to have nag_temp even so
        model.ends.g.data += model.ends.growth()
    numbers = shard(model, device, world_size) if split else []
    if not split:
        model.to(device)
    optimizers = make_optimizers(model, config)
    step, best_val, spent, pull = 0, math.inf, 0.0, GradNorms(model, device)   # spent: FLOPs
    # after the last status line: sum of losses, number of steps, sums of the shares that ran each sublayer
    since = torch.zeros(2 + 2 * len(model.blocks), dtype=torch.float64)
    if ckpt:
        try:
            for name, optimizer in optimizers.items():
                restore(optimizer, ckpt[name])
        except (KeyError, ValueError):
            raise SystemExit(f"--optimizer {config.optimizer}: {out}/ckpt.pt is of another optimizer; resume "
                             f"with the --optimizer it has, or train anew")
        torch.set_rng_state(ckpt["rng"])
        step, best_val, since, spent = ckpt["step"], ckpt["best_val"], ckpt["since"], ckpt["flops"]
        pull.sums.copy_(ckpt["grad_norms"])
    since = since.to(device)
    if config.compile or config.compile is None and "cuda" in device:
        model.compile_blocks()
    skipping = gpt.mod_rate > 0 or gpt.layer_drop > 0
    # skipping may leave a process without any token for a sublayer
    ddp = model
    if world_size > 1 and not split:
        ddp = DistributedDataParallel(model, find_unused_parameters=skipping)

    # length of the run
    parts = config.grad_accum * world_size   # of a batch
    # a training step: per token
    tokens_per_step, dense_flops = config.batch_size * T, 3 * model.flops_per_token()
    # with max_flops a guess: skipping makes steps cheaper
    n_steps = (config.max_iters or math.ceil(config.max_tokens / tokens_per_step)
               or math.ceil(config.max_flops / tokens_per_step / dense_flops) or 420)
    done = lambda: spent / config.max_flops if config.max_flops else step / n_steps
    # FLOPs end within a step, the last one
    if done() > 1 + (config.max_flops and tokens_per_step * dense_flops / config.max_flops):
        raise SystemExit(f"--out {out}: is at step {step} already, beyond the end at {n_steps}; "
                         f"give a later one, such as --max_iters {2 * step}")
    device_name = torch.cuda.get_device_name() if "cuda" in device else "CPU"
    peak = peak_flops(device_name)
    before = ckpt["done"] if ckpt else 0.0
    if abs(before - done()) > 1e-9:
        say(f"--resume: the run was {before:.1%} done and is {done():.1%} done with its new end: learning "
            f"rate and warm-ups go on from there")
    say(f"{gpt.residual}: {len(model.blocks)} blocks x {gpt.n_embd}, {model.num_params() / 1e6:.2f}M "
        f"parameters; {n_steps} steps of {tokens_per_step:,} tokens on {world_size} x {device_name}")
    if "cuda" in device and not peak:
        say(f"the peak FLOP/s of {device_name} is not in PEAK_FLOPS, so no MFU is shown")

    which = "Triton" if on_triton(model.wte.weight, gpt.kernels) else "torch"
    say(f"--kernels {gpt.kernels}: the residuals' own operations run in {which} on {device}")

    # run folder
    if rank == 0:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SystemExit(f"--out {out}: can't make that folder ({error.strerror}); name another one")
        for name in ("ckpt.pt", "best.pt") if config.overwrite else ():
            (out / name).unlink(missing_ok=True)   # else an early end would leave another run's weights here
        lines = []
        if ckpt:   # what an interrupted run logged after its last checkpoint will be logged again
            lines = [json.dumps(values) + "\n" for values in read_metrics(out)
                     # a training line is about the step before, a validation line comes after the checkpoint
                     if values["step"] < step + ("loss" in values)]
        write_file(out / "metrics.jsonl", lambda f: f.write("".join(lines).encode()))
        settings = dataclasses.asdict(gpt) | dataclasses.asdict(config) | {"tokenizer": meta["tokenizer"]}
        write_file(out / "config.json", lambda f: f.write(json.dumps(settings, indent=2).encode() + b"\n"))
        metrics = open(out / "metrics.jsonl", "a", buffering=1)

    def save():
        states = {name: part.state_dict() for name, part in (dict(model=model) | optimizers).items()}
        if split:
            states = whole(states, rank)
        if rank == 0:
            state = dict(states, step=step, done=done(), best_val=best_val, since=since, flops=spent,
                         rng=torch.get_rng_state(), grad_norms=pull.sums,
                         model_config=dataclasses.asdict(gpt))
            write_file(out / "ckpt.pt", lambda f: torch.save(state, f))

    def log(**values):
        if rank == 0:
            try:
                metrics.write(json.dumps(values) + "\n")
            except OSError as error:
                raise SystemExit(f"{out}/metrics.jsonl: can't be written ({error}); make room, then go on "
                                 f"with --resume")

    stop = []   # signals that have asked us to end; a second one doesn't wait for the step
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: sys.exit(128 + number) if stop else stop.append(number))

    def check(loss, norm):
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise SystemExit(f"step {step}: loss {loss}, gradient norm {norm} at learning rate {lr:.2e}; "
                             f"{out}/ckpt.pt holds step {saved}: resume it with a lower --lr")

    timed, clock, first, saved = 0, time.perf_counter(), step, step   # timed: steps since the clock started
    warms = [residual.warm for residual in model.residuals() if hasattr(residual, "warm")]
    ramp_start = max(config.warmup, alpha_warmup if warms else 0.0)
    while True:
        for warm in warms:   # a function of the step: an evaluation after --resume must come out the same
            warm.fill_(min(1.0, (done() + 1 / n_steps) / (alpha_warmup + 1 / n_steps)))
        # checkpoint first: an evaluation that runs out of memory must not cost the run
        ending = stopping(stop, asking)
        if step % config.eval_interval == 0 or done() >= 1 or ending:
            if step > first:
                check(loss.item(), norm.item())
            paused = time.perf_counter()
            save()
            saved = step
            if ending:
                break
            model.eval()
            at_once = config.batch_size // parts   # as many windows as training has in memory
            val_loss, bpb, skipped = evaluate(model, *val, token_bytes, at_once, autocast, rank, world_size)
            health = {}
            # it walks the blocks by hand, past routers and FSDP's gathering
            if model.ends.knows_gain and gpt.mod != "router" and not split:
                health = gate_health(model, val[0][:4].to(device))
            model.train()
            say(f"step {step:5d} | validation loss {val_loss:.4f} | {bpb:.4f} bits per byte"
                + (f" | {skipped:.1%} skipped" if gpt.mod_rate else ""), flush=True)
            log(step=step, tokens=step * tokens_per_step, flops=spent, val_loss=val_loss, val_bpb=bpb,
                val_skip_rate=skipped, grad_norms=pull.sums[0].tolist(), **health)
            if not math.isfinite(val_loss):
                raise SystemExit(f"step {step}: validation loss {val_loss}; {out}/best.pt holds the best "
                                 f"weights so far; train again with a lower --lr")
            if val_loss < best_val:
                best_val = val_loss
                if rank == 0:
                    write_file(out / "best.pt", lambda f: f.write((out / "ckpt.pt").read_bytes()))
            clock += time.perf_counter() - paused
        if done() >= 1:
            break

        # one step
        progress = done()
        share = lr_share(config, progress, 1 / n_steps)
        ramp = (progress - ramp_start) / max(1 / n_steps, config.mod_ramp)
        # a router skips from the first step on
        target = gpt.mod_rate * (1.0 if gpt.mod == "router" else min(1.0, max(0.0, ramp)))
        if model.tau is not None and not target:   # a run that is resumed to a later end begins anew
            model.tau.fill_(-1.0)
        ran = torch.zeros(2 * len(model.blocks))   # sum over the micro-batches of the shares that ran
        for group in (group for optimizer in optimizers.values() for group in optimizer.param_groups):
            group["lr"] = group["peak"] * share
        lr, loss = config.lr * share, torch.zeros((), device=device)
        for micro in range(config.grad_accum):
            x, y = train_batch(shards, T, gpt.seed, step, config.batch_size, micro * world_size + rank, parts)
            check_tokens(x, y)
            if "cuda" in device:   # so that copying doesn't wait for the GPU
                x, y = x.pin_memory(), y.pin_memory()
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            kept, last = [], micro == config.grad_accum - 1
            if target and model.tau is not None:
                if model.tau.max() < 0:   # the ramp begins, in all processes from the same thresholds
                    tokens = x.clone()
                    if world_size > 1:
                        dist.broadcast(tokens, 0)
                    model.tau.copy_(calibrate(model, [tokens], target)[0])
                looked = look(model, step)
            generator = None
            if skipping:   # a pure function of seed, step and part of the batch, as the data is
                number = np.random.SeedSequence((gpt.seed, step, micro * world_size + rank)).generate_state(1)
                generator = torch.Generator(device).manual_seed(int(number[0]))
            # processes exchange gradients once a step; FSDP, for whose gradients nobody has room, each time
            with contextlib.nullcontext() if last or ddp is model else ddp.no_sync():
                with autocast():
                    part = ddp(x, y, generator=generator, kept=kept)[1] / config.grad_accum
                part.backward()
            loss += part.detach()
            ran += torch.tensor(shares(kept)) / config.grad_accum if skipping else 1 / config.grad_accum
        mean_grads(numbers, world_size)
        norm = pull.measure(progress >= config.warmup, config.equalize_grads)
        if config.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(pull.params, config.grad_clip, norm)
        if world_size > 1:
            dist.all_reduce(loss)
            loss /= world_size
            if skipping:
                ran = ran.to(device)
                dist.all_reduce(ran)
                ran = ran.cpu() / world_size
        if device == "cpu":   # on a GPU, looking at every loss would stall it: see the status line
            check(loss.item(), norm.item())
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        model.constrain()
        if target and model.tau is not None:
            steer(model, ran.tolist(), target, looked)
        step, timed = step + 1, timed + 1
        spent += 3 * tokens_per_step * model.flops_per_token(share=ran.tolist())
        since += torch.cat((torch.stack((loss, torch.ones_like(loss))), ran.to(device)))

        # status line
        if step % config.log_interval == 0 or done() >= 1:
            mean, _, *ran = (since / since[1]).tolist()   # waits for the GPU
            skip_rate = 1 - sum(ran) / len(ran)
            check(mean, norm.item())
            seconds, since = time.perf_counter() - clock, torch.zeros_like(since)
            tok_s = timed * tokens_per_step / seconds
            tokens = step * tokens_per_step
            log(step=step, tokens=tokens, flops=spent, loss=mean, lr=lr, grad_norm=norm.item(), tok_s=tok_s,
                mod_rate=target, skip_rate=skip_rate, **(dict(ran=ran) if skipping else {}))
            mfu = f" | {tok_s * spent / tokens / peak / world_size:.1%} MFU" if peak else ""
            skipped = f" | {skip_rate:.1%} skipped" if skipping else ""
            eta = max(0.0, step * (1 - done()) / done()) * tokens_per_step / tok_s
            say(f"step {step:5d} | loss {mean:.4f} | lr {lr:.2e} | gradient {norm.item():.2f}{skipped} | "
                f"{tok_s:,.0f} tokens/s{mfu} | {minutes(eta)} to go", flush=True)
            timed, clock = 0, time.perf_counter()
        elif step == first + 1:   # the first step warms up and compiles: not timed
            timed, clock = 0, time.perf_counter()

    if world_size > 1:
        dist.barrier()   # nobody leaves while another is still writing
        dist.destroy_process_group()
    if ending:
        say(f"stopped at step {step}, all is saved; continue with: python train.py --out {out} --resume")
        return 128 + stop[0]
    say(f"done: {out} holds the run; best validation loss {best_val:.4f}\n"
        f"next: python sample.py {out} --prompt \"def \"   or: python analyze.py {out}")


if __name__ == "__main__":
    try:
        code = main() or 0
    except KeyboardInterrupt:   # before the loop, which handles it: there is nothing to save
        sys.exit(130)
    except RuntimeError as error:
        # gloo says a plain RuntimeError, nccl a DistBackendError; anything else is a bug to be seen whole
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        text = " ".join(str(error).split())[:200]
        print(f"train.py: process {os.environ.get('RANK', 0)} has lost another one of this run ({text}); "
              f"the last checkpoint is whole: continue with --resume", file=sys.stderr, flush=True)
        os._exit(1)   # a tidy exit would wait for the one that has gone
    if "RANK" in os.environ:   # under torchrun: all is saved, and a thread of torch that asks for the
        sys.stdout.flush()     # interpreter while it shuts down would abort a process that has succeeded
        os._exit(code)
    sys.exit(code)
