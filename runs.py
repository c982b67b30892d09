"""
What the scripts share: sentences for the user, dataclasses as flags, and run folders.

A run folder holds config.json, metrics.jsonl (an object a line, the last one of a step counts), ckpt.pt,
best.pt (the lowest validation loss) and lock. Nothing in it is trusted, because people pass them on.
"""
import argparse
import contextlib
import difflib
import fcntl
import hashlib
import inspect
import json
import os
import re
import sys
import tempfile
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Literal, get_args, get_origin

import torch
import torch.distributed as dist

from model import GPT, GPTConfig, RESIDUALS, block_widths, field_problems, options_of, problems

# ----------------------------------------------------------------------------- sentences

def say(text):
    """Prints, in the first process. A stdout that is closed or full ends no run: metrics.jsonl has it all."""
    if environment("RANK", 0) == 0:
        try:
            print(text, flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

def refuse(sentence):
    """Ends the program with a sentence, which only the first of several processes says."""
    printable = "".join(c if c.isprintable() or c == "\n" else "?" for c in
                        re.sub(r"\S{300,}", lambda word: word[0][:60] + "...", sentence))
    other = re.fullmatch("[1-9][0-9]*", os.environ.get("RANK", "0"))   # It leaves with 1 and says nothing.
    raise SystemExit(1 if other else printable)

def start(main):
    """Runs a script: main() -> exit status, or None. Ctrl-C gives no traceback, nor does a stdout that is
    full or whose reader, such as head, has had enough."""
    sys.stdout = sys.stdout or open(os.devnull, "w")    # None: it is closed
    sys.stdout.reconfigure(errors="backslashreplace")   # for a terminal that knows ASCII only
    try:
        status = main() or 0
    except KeyboardInterrupt:
        status = 130
    except SystemExit as end:   # Any sentence is made printable, and said once.
        if isinstance(end.code, str):
            refuse(end.code)
        raise
    except (MemoryError, RuntimeError) as error:
        if "allocate memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        refuse(f"{sys.argv[0]}: out of memory; make the model, the batch or the context smaller")
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0 if isinstance(error, BrokenPipeError) else f"{sys.argv[0]}: {error}"
    if "RANK" in os.environ and isinstance(status, int):   # A tidy exit may abort in a thread of torch,
        os._exit(status)                                   # though all is saved.
    sys.exit(status)

# ----------------------------------------------------------------------------- processes

def environment(name, default):
    value = os.environ.get(name, str(default))
    if not re.fullmatch("[0-9]{1,6}", value) or name == "WORLD_SIZE" and int(value) == 0:
        refuse(f"{name}={value}: must be a number, as torchrun sets it")
    return int(value)

def highest(number):
    """The highest of the numbers that the processes say: how they agree that one has to stop."""
    number = torch.tensor(int(number))
    if dist.is_initialized():
        dist.all_reduce(number, dist.ReduceOp.MAX)
    return number.item()

def pick_device(name):
    """auto | cpu | cuda -> cpu | cuda"""
    if name == "cuda" and not torch.cuda.is_available():
        refuse("--device cuda: torch sees no CUDA device; use --device cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"

# ----------------------------------------------------------------------------- flags

FIRST = "residual", "n_layer", "data", "out", "resume"

class Parser(argparse.ArgumentParser):
    def error(self, message):
        refuse(f"{self.prog}: {message[:300]}; {self.prog} --help lists the flags")

def parse(configs, argv=None, doc=None, positional=(), under=None):
    """Command line -> an instance of each config class. Every field is a flag. Its comment is the help, and a
    range such as [0, 1] at the beginning a check; a comment on a line of its own begins a group of flags.
    under(flags given) -> values that count where there is no flag."""
    parser = Parser(description=doc, usage=argparse.SUPPRESS, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter,
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
    if getattr(given, "out", None) == "":
        refuse("--out: is empty; name a folder, or leave it out")
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

# ----------------------------------------------------------------------------- files

UNFINISHED = ".unfinished-"   # what the names of temporary files begin with

def open_own(path):
    """To append to. A link is not followed, as it could lead out of the folder to any file of the user."""
    if path.exists() and not path.is_file():   # A pipe would make us wait for ever.
        raise OSError("is not a plain file")
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
        what = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        refuse(f"{path}: can't be read as a part of a run ({what}); restore it, or train anew")

# ----------------------------------------------------------------------------- writing a run folder

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
        text = json.dumps(self.settings, indent=2) + "\n"
        write_file(self.out / "config.json", lambda f: f.write(text.encode()))
        with writing(self.out):
            self.metrics = open_own(self.out / "metrics.jsonl")
            # A crash may have cut the last line short.
            self.metrics.truncate((self.out / "metrics.jsonl").read_bytes().rfind(b"\n") + 1)

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

# ----------------------------------------------------------------------------- reading a run folder

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

def all_finite(model):
    return all(w.isfinite().all().item() for w in model.state_dict().values())

def n_weights(gpt):
    """A lower bound"""
    units = sum(units for _, units in block_widths(gpt))
    return (gpt.vocab_size + units) * gpt.n_embd + gpt.n_layer * gpt.n_embd ** 2

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
        if ckpt["step"] < 0:
            raise ValueError("a step below 0")
        return int(ckpt["step"]), float(ckpt["flops"])

def checked(moments, p, optimizer):
    """The moments of parameter p. Wrong ones would crash the optimizer's fused code."""
    shapes = dict(momentum_buffer=p.shape)
    if isinstance(optimizer, torch.optim.AdamW):
        shapes = dict(step=(), exp_avg=p.shape, exp_avg_sq=p.shape)
    if moments and {name: value.shape for name, value in moments.items()} != shapes:
        raise ValueError("moments of other shapes, or of another --optimizer")
    if not all(value.isfinite().all() for value in moments.values()):
        raise ValueError("moments that are not finite")
    return {name: value.contiguous() for name, value in moments.items()}

def read_metrics(run):
    """{step: what metrics.jsonl says about it}. The last entry of a step counts: a run that was resumed has
    some twice. A line that is none of ours, say cut short by a crash, is left out."""
    metrics, path = {}, Path(run) / "metrics.jsonl"
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError, RecursionError, TypeError, AttributeError, KeyError):
            values = json.loads(line)
            numbers = [value for key, value in values.items() if key != "grad_norms"]
            if all(-1e300 < number < 1e300 for number in numbers):   # so no text, and no nan
                metrics.setdefault(values["step"], {}).update(values)
    return metrics

def fingerprint(data, meta):
    """Tells whether a run that is resumed has the data that it had."""
    shards = sorted((path.name, path.stat().st_size) for path in Path(data).glob("*.bin"))
    return hashlib.sha256(json.dumps([meta, shards], sort_keys=True).encode()).hexdigest()
