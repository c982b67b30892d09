"""
Pretrain a GPT with any residual, on a CPU, one GPU or several.

    python train.py                                          # a small default, two minutes on a laptop
    python train.py --residual nag --out runs/nag            # every field of both configs is a flag
    python train.py --out runs/nag --resume                  # go on from the last checkpoint, bit for bit
    python train.py --config runs/nag/config.json --out runs/nag1 --seed 1    # the same run, another seed
    torchrun --nproc_per_node 8 train.py --batch_size 512    # batch_size counts all processes

A run folder holds config.json, metrics.jsonl (an object a line, the last one of a step counts), ckpt.pt,
best.pt (the lowest validation loss) and lock. Several machines need it on a disk that all of them see.
"""
import argparse, contextlib, dataclasses, difflib, fcntl, hashlib, inspect, json, math, os, re, signal, sys
import tempfile, time, zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import prepare
from model import GPT, GPTConfig, RESIDUALS, field_problems, options_of, problems, ran_shares

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
        ran = [share for share in ran_shares(kept) if share is not False]   # False: it is removed
        nats += loss * len(xi) / len(x)
        skipped += (1 - sum(ran) / max(1, len(ran))) * len(xi) / len(x)
    model.train(was_training)
    return nats, nats / math.log(2) * y.numel() / max(1, token_bytes[y].sum().item()), skipped

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
    T, parts = gpt.block_size, config.grad_accum * world_size    # parts: of a batch
    tokens_per_step, (meta, shards, val, token_bytes) = config.batch_size * T, data
    path, data_mark = folder.out / "ckpt.pt", fingerprint(config.data, meta)
    ckpt, model = read_checkpoint(path, gpt) if config.resume else (None, GPT(gpt))
    model.to(device)
    if "cuda" in device and torch.cuda.get_device_capability()[0] >= 8:
        model.half = torch.bfloat16
    optimizers, step, flops, best_loss = make_optimizers(model, config), 0, 0.0, math.inf
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
    clock, since, first, loss = time.perf_counter(), step, step, torch.zeros((), device=device)
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
            # Coins are a pure function, too.
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

def all_finite(model):
    return all(w.isfinite().all().item() for w in model.state_dict().values())

# ----------------------------------------------------------------------------- processes and signals

def start_processes(config):
    """-> device, rank of this process, number of processes. torchrun says in the environment who we are."""
    rank, world_size = environment("RANK", 0), environment("WORLD_SIZE", 1)
    device = pick_device(config.device)
    if device == "cuda":
        device = f"cuda:{environment('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    if world_size > 1:
        if "MASTER_ADDR" not in os.environ:
            refuse(f"WORLD_SIZE={world_size}: the processes can't find each other; start them with torchrun")
        dist.init_process_group("cpu:gloo,cuda:nccl" if "cuda" in device else "gloo")
    return device, rank, world_size

def environment(name, default):
    value = os.environ.get(name, str(default))
    if not re.fullmatch("[0-9]{1,6}", value):
        refuse(f"{name}={value}: must be a number, as torchrun sets it")
    return int(value)

def pick_device(name):
    """auto | cpu | cuda -> cpu | cuda"""
    if name == "cuda" and not torch.cuda.is_available():
        refuse("--device cuda: torch sees no CUDA device; use --device cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"

def highest(number):
    """The highest of the numbers that the processes say: how they agree that one has to stop."""
    number = torch.tensor(int(number))
    if dist.is_initialized():
        dist.all_reduce(number, dist.ReduceOp.MAX)
    return number.item()

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

def say(text):
    """Prints, in the first process. A stdout that is closed or full ends no run: metrics.jsonl has it all."""
    if environment("RANK", 0) == 0:
        try:
            print(text, flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

def refuse(sentence):
    """Ends the program with a sentence, which only the first of several processes says."""
    printable = "".join(c if c.isprintable() or c == "\n" else "?" for c in sentence)
    raise SystemExit(1 if re.fullmatch("[1-9][0-9]*", os.environ.get("RANK", "0")) else printable)

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

def n_weights(gpt):
    """A lower bound"""
    return gpt.vocab_size * gpt.n_embd + gpt.n_layer * gpt.n_embd ** 2

# ----------------------------------------------------------------------------- flags

FIRST = "residual", "n_layer", "data", "out", "resume"

class Parser(argparse.ArgumentParser):
    def error(self, message):
        refuse(f"{self.prog}: {message[:300]}; {self.prog} --help lists the flags")

def parse(configs, argv=None, doc=None, positional=(), under=None):
    """Command line -> an instance of each config class. Every field is a flag. Its comment is the help, and a
    range such as [0, 1] at the beginning a check; a comment on a line of its own begins a group of flags.
    under(flags given) -> values that count where there is no flag."""
    parser = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                    epilog=residual_list() if GPTConfig in configs else None)
    groups = {"first": parser.add_argument_group("what everyone uses")}
    for config in configs:
        title, source = config.__name__.removesuffix("Config"), inspect.getsource(config)
        for begins, name, text in re.findall(r"^    (?:# (.+)|(\w+):.*?  # (.+))$", source, re.M):
            title = begins or title
            group = "first" if name in FIRST else title
            if group not in groups:
                groups[group] = parser.add_argument_group(group)
            if name:
                add_flag(groups[group], config.__dataclass_fields__[name], text, name in positional)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = next((word for word in unknown if word.startswith("--")), unknown[0]).split("=")[0]
        near = difflib.get_close_matches(flag, parser._option_string_actions, 1)
        parser.error(f"{flag}: unknown flag" + (f", did you mean {near[0]}?" if near else ""))
    values = (under(vars(given)) if under else {}) | vars(given)
    made = [config(**{key: values[key] for key in config.__dataclass_fields__ if key in values})
            for config in configs]
    bad = []
    for config in made:
        if isinstance(config, GPTConfig):
            bad += problems(config)
        else:
            bad += field_problems(config) or getattr(config, "problems", list)()
    if bad:
        refuse("\n".join(f"{parser.prog}: {sentence}" for sentence in bad))
    return made

def add_flag(group, field, text, is_positional):
    how = dict(type=field.type)
    if get_origin(field.type) is Literal:
        how = dict(choices=get_args(field.type))
    elif field.type is bool:
        how = dict(action=argparse.BooleanOptionalAction)
    elif field.type is list:
        how = dict(nargs="+")
    if is_positional:
        group.add_argument(field.name, help=text.replace("%", "%%"), **how)
        return
    if field.default not in ("", None, False):
        text += f" (default {field.default})"
    group.add_argument(f"--{field.name}", help=text.replace("%", "%%"), default=argparse.SUPPRESS, **how)

def residual_list():
    lines = ["residuals, with their options:"]
    for name in RESIDUALS:
        options = ",".join(f"{key}={default}" for key, default in options_of(name).items())
        lines.append(f"  {name}:{options}".rstrip(":"))
    return "\n".join(lines)

def settings_below(given):
    """What counts where there is no flag: settings of the run to resume or to replay, or those for a GPU."""
    if given.get("out") == "":
        refuse("--out: is empty; name a folder, or leave it out")
    if given.get("resume") and ("config" in given or "out" not in given):
        refuse("--resume: continues the run in --out with its own settings; give --out, and no --config")
    values = {}
    if given.get("resume") or given.get("config"):
        values = read_config(given.get("config") or Path(given["out"]) / "config.json")
        values.pop("out", None)   # A replay is a run of its own.
    elif pick_device(given.get("device", "auto")) == "cuda" and not given.keys() & {*SIZES}:
        values = dict(CUDA_DEFAULTS)
    size = values.get("batch_size")
    if given.get("resume") and given.get("batch_size", size) != size:
        refuse(f"--batch_size {given['batch_size']}: the run counts its tokens by {size}; leave that, or "
               f"start a new run")
    if given.keys() & {*ENDS}:   # A typed end replaces another one.
        values |= dict.fromkeys(ENDS, 0)
    return values

# ----------------------------------------------------------------------------- run folder

UNFINISHED = ".unfinished-"   # what the names of temporary files begin with

class RunFolder:
    """A run folder as its run has it, which is refused if anything else is there. Of several processes, the
    first one writes and holds a lock, which the system frees when the process ends, however it does."""
    def __init__(self, gpt, config, meta, rank):
        self.settings = asdict(gpt) | asdict(config) | dict(tokenizer=meta["tokenizer"])
        for name in "config", "resume", "overwrite":   # They are about one start of the program.
            del self.settings[name]
        default = "runs/" + re.sub(r"[^\w.-]+", "-", gpt.residual.replace("=", ""))   # runs/attnres-block4
        self.out, self.overwrite, self.is_writer = Path(config.out or default), config.overwrite, rank == 0
        if not config.resume and not config.overwrite:
            self.refuse_others()
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
            self.lock = self.metrics = open_own(self.out / "lock")
        locked = False
        if self.is_writer:
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:   # Any other means a file system without locks.
                locked = isinstance(error, BlockingIOError)
        if highest(locked):
            refuse(f"--out {self.out}: another process is training there; wait for it, or take another --out")

    def refuse_others(self):
        """Only what a run leaves that ended before its first checkpoint may be there."""
        with writing(self.out):
            held = {path.name for path in self.out.iterdir()} if self.out.is_dir() else set()
        held = {name for name in held if name != "lock" and not name.startswith(UNFINISHED)}
        same = False
        with contextlib.suppress(OSError, ValueError, RecursionError):
            same = json.loads((self.out / "config.json").read_text()) == self.settings
        began = same and held <= {"config.json", "metrics.jsonl"} and {*read_metrics(self.out)} <= {0}
        if held and not began:
            what = "a run" if "ckpt.pt" in held else "other files"
            refuse(f"--out {self.out}: holds {what} already; --resume continues a run, --overwrite replaces "
                   f"it, another --out keeps it")

    def begin(self):
        """Is called when nothing can be refused any more."""
        if not self.is_writer:
            return
        with writing(self.out):
            old = ["ckpt.pt", "best.pt", "metrics.jsonl"] if self.overwrite else []
            for path in [*self.out.glob(UNFINISHED + "*"), *(self.out / name for name in old)]:
                path.unlink(missing_ok=True)
            self.metrics = open_own(self.out / "metrics.jsonl")
            # A crash may have cut the last line short.
            self.metrics.truncate((self.out / "metrics.jsonl").read_bytes().rfind(b"\n") + 1)
        text = json.dumps(self.settings, indent=2) + "\n"
        write_file(self.out / "config.json", lambda f: f.write(text.encode()))

    def log(self, **values):
        if self.is_writer:
            line = json.dumps(values).encode() + b"\n"
            with writing(self.out / "metrics.jsonl"):
                if self.metrics.write(line) < len(line):
                    raise OSError("no room is left")

    def save(self, name, state):
        if self.is_writer:
            write_file(self.out / name, lambda f: torch.save(state, f))

    def close(self):
        self.metrics.close()
        self.lock.close()

def open_own(path):
    """To append to. A link is not followed, as it could lead out of the folder to any file of the user."""
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    return open(number, "ab", buffering=0)

def write_file(path, write):
    """write(file) writes to a new file, which is flushed to the disk and renamed to path. So at no moment is
    there half a file of that name, and no link is followed."""
    with writing(path):
        number, temporary = tempfile.mkstemp(dir=Path(path).parent, prefix=UNFINISHED)
        try:
            with open(number, "wb") as f:
                write(f)
                f.flush()
                os.fsync(number)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

@contextlib.contextmanager
def writing(path):
    try:
        yield
    except (OSError, RuntimeError) as error:   # torch.save says RuntimeError when the disk is full.
        raise SystemExit(f"{path}: can't be written ({error}); make room, or take another --out; a file "
                         f"that was there is as it was") from None

@contextlib.contextmanager
def reading(path):
    """Turns whatever is wrong inside a file into one sentence."""
    try:
        yield
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        refuse(f"{path}: can't be read as a part of a run ({what}); restore it, or train anew")

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

def read_checkpoint(path, gpt=None):
    """-> the checkpoint, its model. SystemExit where it is missing, broken, or of another model than gpt."""
    if not path.is_file():
        refuse(f"{path}: no checkpoint there; train that run first, without --resume")
    with reading(path):
        if zipfile.ZipFile(path).testzip():
            raise ValueError("it is damaged")
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        found = ckpt["model_config"]
        gpt = gpt or GPTConfig(**found | dict(kernels="auto"))   # This machine may have another device.
        here = asdict(gpt)
        differ = [f"{key} {found.get(key)} there, {here.get(key)} here" for key in here | found
                  if found.get(key) != here.get(key) and key != "kernels"]
        if differ:
            refuse(f"{path}: is of another model ({'; '.join(differ)}); use the settings it has")
        if 4 * n_weights(gpt) > path.stat().st_size:
            raise ValueError("its settings are of a larger model")
        model = GPT(gpt)
        model.load_state_dict(ckpt["model"])
        if not all_finite(model):
            raise ValueError("its weights are not finite")
    return ckpt, model

def restore(path, ckpt, optimizers, grad_norms, data_mark):
    """Gives optimizers their moments, grad_norms its sums -> step, flops. SystemExit where they don't fit."""
    with reading(path):
        if ckpt["data"] != data_mark:
            refuse(f"{path}: is of other data than --data has now; put that back, or start a new run")
        for optimizer, saved in zip(optimizers, ckpt["optimizers"], strict=True):
            params = [p for group in optimizer.param_groups for p in group["params"]]
            state = {i: checked(moments, params[i], optimizer) for i, moments in saved["state"].items()}
            # Rates and decay stay as the flags say.
            optimizer.load_state_dict(dict(state=state, param_groups=optimizer.state_dict()["param_groups"]))
        grad_norms.copy_(ckpt["grad_norms"])
        return int(ckpt["step"]), float(ckpt["flops"])

def checked(moments, p, optimizer):
    """The moments of parameter p. Wrong ones would crash the optimizer's fused code."""
    shapes = dict(momentum_buffer=p.shape)
    if isinstance(optimizer, torch.optim.AdamW):
        shapes = dict(step=(), exp_avg=p.shape, exp_avg_sq=p.shape)
    if moments and {name: value.shape for name, value in moments.items()} != shapes:
        raise ValueError("moments of other shapes, or of another --optimizer")
    return {name: value.contiguous() for name, value in moments.items()}

def open_run(run, device="cpu", which="ckpt.pt"):
    """Run folder -> model in eval mode, its settings as a dict. Only reads. SystemExit with one sentence,
    whatever is wrong inside."""
    config = read_config(Path(run) / "config.json")
    _, model = read_checkpoint(Path(run) / which)
    return model.to(device).eval(), config

def read_metrics(run):
    """{step: what metrics.jsonl says about it}. The last entry of a step counts: a run that was resumed has
    some twice. A line that is none of ours, say cut short by a crash, is left out."""
    metrics, path = {}, Path(run) / "metrics.jsonl"
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError, RecursionError, TypeError, AttributeError, KeyError):
            values = json.loads(line)
            numbers = [value for key, value in values.items() if key != "grad_norms"]
            if all(isinstance(number, (int, float)) for number in numbers):
                metrics.setdefault(values["step"], {}).update(values)
    return metrics

def fingerprint(data, meta):
    """Tells whether a run that is resumed has the data that it had."""
    shards = sorted((path.name, path.stat().st_size) for path in Path(data).glob("*.bin"))
    return hashlib.sha256(json.dumps([meta, shards], sort_keys=True).encode()).hexdigest()

if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")   # for a terminal that knows ASCII only
    try:
        status = main()
    except KeyboardInterrupt:   # before the loop: there is nothing to save
        status = 130
    if "RANK" in os.environ:   # A tidy exit may abort in a thread of torch, though all is saved.
        os._exit(status)
    sys.exit(status)
