"""
Run folders: how they are locked, written, read, and opened as a model.

    config.json      the settings: the flags of train.py, and the tokenizer
    metrics.jsonl    a JSON object a line; if a step has several, later values replace earlier ones
    ckpt.pt          the last checkpoint: model (weights), model_config, optimizers (moments), step,
                     flops, grad_norms, data (fingerprint); best.pt: with the lowest validation loss
    lock             held by the process that trains here; the system frees it when that ends

People pass such folders on, so nothing in one is trusted. And only our own files are ever
overwritten. What is wrong gets one sentence: `refuse` in flags.py raises SystemExit with it.
"""
import contextlib
import fcntl
import json
import math
import os
import secrets
import warnings
import zipfile
from dataclasses import asdict
from pathlib import Path

import torch

from flags import is_about_memory, refuse
from model import GPT, GPTConfig, fewest_weights

VOCABULARIES = {"bytes": 257, "gpt2": 50257}   # tokenizers, and how many tokens each one has

# ------------------------------------------------------------------------------------------- files

UNFINISHED = ".unfinished-"   # what the names of temporary files begin with

@contextlib.contextmanager
def explain_write_errors(path):
    """Whatever can't be written in the with-block below: one sentence about `path`"""
    try:
        yield
    except (OSError, RuntimeError) as error:   # torch.save says RuntimeError when the disk is full.
        if is_about_memory(error):   # Every program has a sentence for that: see flags.start.
            raise
        refuse(f"{path}: can't be written ({error}); make room, or take another --out")

@contextlib.contextmanager
def explain_read_errors(path):
    """Whatever is wrong inside a file: one sentence. (SystemExit, and so `refuse`, is no Exception:
    it passes.)"""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")   # torch warns of strange tensors in many lines.
            yield
    except Exception as error:
        if is_about_memory(error):   # That is not the file's fault.
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        refuse(f"{path}: can't be read as a part of a run ({what}); restore it, or train anew")

def open_to_append(path):
    """O_NOFOLLOW: a link in a folder from elsewhere could lead to any file of the user. O_RDWR:
    opening a pipe must not hang."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    return open(descriptor, "ab", buffering=0)

def write_file(path, write):
    """write(file) writes to a new file, which is flushed to the disk and renamed to path. So there
    is never half a file of that name, and no link is followed."""
    with explain_write_errors(path):
        temporary = Path(path).parent / (UNFINISHED + secrets.token_hex(8))
        try:
            with open(temporary, "xb") as f:   # x: it is new
                write(f)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

# ---------------------------------------------------------------------------------------- settings

def read_settings(path, defaults, strict=True):
    """config.json -> a dict. A missing setting gets its default, so old runs can still be read when
    the code has new flags. An unknown one is refused (`strict`) or left out. SystemExit, too, if
    the file is missing or broken, or a value is of another type."""
    if not Path(path).is_file():
        refuse(f"{path or repr(path)}: no such file; name a run folder that train.py has made")
    with explain_read_errors(path):
        return fill_in(read_json(path), defaults, strict)

def read_json(path):
    """A small file with an object -> a dict. ValueError for anything else"""
    if os.path.getsize(path) > 1e6:
        raise ValueError("it is too large")
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("it holds no object")
    return found

def fill_in(found, defaults, strict=True):
    """found, plus defaults for what is missing. ValueError for an unknown key or a wrong type"""
    if "mod_rate" in found:
        found = without_retired(found)
    unknown = found.keys() - defaults.keys()
    if unknown and strict:
        raise ValueError(f"this code has no flag {', '.join(sorted(unknown))}")
    values = defaults | {key: found[key] for key in found.keys() & defaults.keys()}
    for key, value in values.items():
        if not has_type_of(value, defaults[key]):
            raise ValueError(f"{key} is a {type(value).__name__}")
    return values

def without_retired(found):
    """Settings of a run of the third edition, without those that are gone"""
    if found["mod_rate"] or found["layer_drop"] or "warmup" in found["residual"]:
        raise ValueError("trained with --mod_rate, --layer_drop or nag:warmup, which are gone; git "
                         "checkout 7cf98d5 reads it")
    gone = "mod", "mod_rate", "layer_drop"
    return {key: value for key, value in found.items() if key not in gone}

# ----------------------------------------------------------------------------------------- metrics

def metric_lines(run):
    """Yields each line of metrics.jsonl that is one of ours, and what it says. A crash may have cut
    one short; others may hold anything."""
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        return
    with open(path, "rb") as f:
        for line in iter(lambda: f.readline(1_000_000), b""):   # A longer one is none of ours.
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if line.endswith(b"\n") and are_metrics(values):
                yield line, values

def read_metrics(run):
    """{step: what metrics.jsonl says about it}"""
    metrics = {}
    for _, values in metric_lines(run):
        metrics.setdefault(values["step"], {}).update(values)
    return metrics

# ----------------------------------------------------------------------------- writing a run folder

class RunFolder:
    """The folder that a run writes to. Its life: RunFolder(...) checks and locks it; then the model
    is made or loaded; then begin(step); then log(...) and save(...) many times; then close().

    Only the first of several processes writes: is_first. settings: what config.json will hold.
    SystemExit if another process holds the lock, if the files there are not ours, or if they are a
    run and neither resume nor overwrite is set"""
    def __init__(self, out, settings, resume=False, overwrite=False, is_first=True):
        self.out, self.settings = Path(out), settings
        self.overwrite, self.is_first = overwrite, is_first
        self.metrics_file = self.lock_file = self.has_made_folder = None
        if is_first:
            self.refuse_if_taken(resume, overwrite)   # A folder that is refused gets no lock file.
            self.take_lock()
            self.refuse_if_taken(resume, overwrite)   # Another run may have begun there meanwhile.

    def file_names(self):
        """The names of all that is there, but for our lock and temporary files"""
        with explain_write_errors(self.out):
            names = os.listdir(self.out) if self.out.is_dir() else []
        return {name for name in names if name != "lock" and not name.startswith(UNFINISHED)}

    def saved_settings(self):
        """config.json as a dict, or {} if it is missing or broken"""
        path = self.out / "config.json"
        try:
            return read_json(path) if path.is_file() else {}
        except (OSError, ValueError, RecursionError):
            return {}

    def nothing_is_lost(self, names):
        """Has this very run ended here before its first step, with two files at most?"""
        return (names <= {"config.json", "metrics.jsonl"} and self.saved_settings() == self.settings
                and all(step == 0 for step in read_metrics(self.out)))

    def is_ours(self):
        """Has train.py made this folder? (Other programs have a config.json, too.)"""
        return {"residual", "n_layer", "n_embd", "tokenizer"} <= self.saved_settings().keys()

    def refuse_if_taken(self, resume, overwrite):
        names = self.file_names()
        for name in names & {"config.json", "ckpt.pt", "best.pt", "metrics.jsonl"}:
            if (self.out / name).is_dir():   # `begin` would fail, with half of the run replaced.
                refuse(f"--out {self.out}: its {name} is a folder; take another --out")
        if resume or not names or self.nothing_is_lost(names):
            return
        if not self.is_ours():
            refuse(f"--out {self.out}: holds files, and is no run folder of this program; take "
                   f"another --out")
        if not overwrite and "ckpt.pt" in names:
            refuse(f"--out {self.out}: holds a run already; --resume continues it, --overwrite "
                   f"replaces it, another --out keeps it")
        if not overwrite:
            refuse(f"--out {self.out}: holds a run without a checkpoint; --overwrite replaces it, "
                   f"another --out keeps it")

    def take_lock(self):
        with explain_write_errors(self.out):
            self.has_made_folder = not self.out.exists()
            self.out.mkdir(parents=True, exist_ok=True)
            self.lock_file = open_to_append(self.out / "lock")
        try:
            fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refuse(f"--out {self.out}: another process is training there; wait for it, or take "
                   f"another --out")
        except OSError:
            pass   # a file system without locks

    def begin(self, step):
        """Once, just before the first step, when all checks have passed: with overwrite it deletes
        the old run. step: 0, or that of the checkpoint"""
        if not self.is_first:
            return
        with explain_write_errors(self.out):
            old = ["ckpt.pt", "best.pt", "metrics.jsonl"] if self.overwrite else []
            for path in [*self.out.glob(UNFINISHED + "*"), *(self.out / name for name in old)]:
                path.unlink(missing_ok=True)
        text = json.dumps(self.settings, indent=2) + "\n"
        write_file(self.out / "config.json", lambda f: f.write(text.encode()))
        # Lines after the checkpoint go: the run takes those steps again.
        kept = [line for line, values in metric_lines(self.out) if values["step"] <= step]
        write_file(self.out / "metrics.jsonl", lambda f: f.writelines(kept))
        with explain_write_errors(self.out):
            self.metrics_file = open_to_append(self.out / "metrics.jsonl")

    def log(self, **values):
        if not are_metrics(values):   # Readers would pass over such a line.
            raise ValueError(f"metrics are finite numbers with a step, not {values}")
        if self.is_first:
            line = json.dumps(values).encode() + b"\n"
            with explain_write_errors(self.out / "metrics.jsonl"):
                if self.metrics_file.write(line) < len(line):
                    raise OSError("no room is left")

    def save(self, name, state):
        if self.is_first:
            write_file(self.out / name, lambda f: torch.save(state, f))

    def close(self):
        has_begun = self.metrics_file is not None
        if self.has_made_folder and not has_begun:   # It was refused: no empty folder is left.
            with contextlib.suppress(OSError):
                (self.out / "lock").unlink()
                self.out.rmdir()
        for file in self.metrics_file, self.lock_file:
            if file:
                file.close()

# ----------------------------------------------------------------------------- reading a run folder

def read_checkpoint(path, wanted=None):
    """-> the checkpoint, and its model. SystemExit if it is missing or broken, or of another model
    than `wanted`. A small file can't make us take much memory: see check_archive for what it holds,
    and check_model_config for the model."""
    if not path.is_file():
        refuse(f"{path}: no checkpoint there; train that run first")
    with explain_read_errors(path):
        check_archive(path)
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(ckpt, dict):
            raise ValueError("it is no dict")
        found = GPTConfig(**fill_in(ckpt["model_config"], asdict(GPTConfig())))
        # Kernels are not compared: a checkpoint made with Triton has to open without it.
        found.kernels = wanted.kernels if wanted else "auto"
        check_model_config(path, found, wanted)
    model = GPT(found)   # outside: a mistake in model.py is to show where it is
    with explain_read_errors(path):
        load_weights(model, ckpt["model"])
    return ckpt, model

def open_run(run, device="cpu", which="ckpt.pt"):
    """Run folder -> its model in eval mode, and its settings as a dict. Only reads. SystemExit with
    one sentence, whatever is wrong inside"""
    path = Path(run) / "config.json"
    # What sample.py and analyze.py need besides the model's config
    about_data = dict(data="", tokenizer="bytes", eval_windows=128, batch_size=16)
    settings = read_settings(path, about_data, strict=False)
    _, model = read_checkpoint(Path(run) / which)
    with explain_read_errors(path):
        if settings["tokenizer"] not in VOCABULARIES:
            raise ValueError(f"tokenizer {settings['tokenizer']}: known are bytes and gpt2")
        if VOCABULARIES[settings["tokenizer"]] > model.config.vocab_size:
            raise ValueError("its tokenizer has more tokens than its model")
        for name in "eval_windows", "batch_size":
            if not 1 <= settings[name] <= 1e6:
                raise ValueError(f"{name} is {settings[name]}")
    return model.to(device).eval(), settings | asdict(model.config)

# ---------------------------------------------------------------------------------------- resuming

def optimizer_state(model, optimizers):
    """A list: for each optimizer, {name of a parameter: its moments}"""
    names = {p: name for name, p in model.named_parameters()}
    return [{names[p]: dict(moments) for p, moments in optimizer.state.items()}
            for optimizer in optimizers]

def restore_optimizers(model, optimizers, saved, may_lack_moments):
    """Gives optimizers the moments that optimizer_state has saved. ValueError if they don't fit.
    may_lack_moments: parameters may, as those that never had a gradient. Rates and decay stay as
    the flags say."""
    names = {p: name for name, p in model.named_parameters()}
    for optimizer, moments in zip(optimizers, saved, strict=True):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        mine = {names[p] for p in params}
        foreign, missing = moments.keys() - mine, mine - moments.keys()
        if foreign or (missing and not may_lack_moments):
            raise ValueError("moments of other parameters, or of another --optimizer or --beta1")
        # torch knows parameters by their places in the groups.
        state = {i: checked_moments(moments[names[p]], p, optimizer)
                 for i, p in enumerate(params) if names[p] in moments}
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(dict(state=state, param_groups=groups))

# ------------------------------------------------------------------------- files that may be broken

# Skip this on a first reading. Others may have made a run folder, or a disk may have damaged it.

def has_type_of(value, default):
    if default is None:   # only --compile: None means "decide by the device"
        return value is None or type(value) is bool
    if type(default) is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is type(default)

def are_metrics(values):
    """Are they an object of numbers with a step? grad_norms may be a list of numbers."""
    if not isinstance(values, dict) or type(values.get("step")) is not int:
        return False
    norms = values.get("grad_norms", [])
    if not isinstance(norms, list):
        return False
    numbers = [*norms, *(value for key, value in values.items() if key != "grad_norms")]
    return all(type(number) in (int, float) and abs(number) < 1e300 for number in numbers)

def check_model_config(path, found, wanted):
    """SystemExit if it is not the one that is wanted; ValueError if it can't be right"""
    if wanted and found != wanted:
        differ = [f"{key} {value} there, {getattr(wanted, key)} here"
                  for key, value in asdict(found).items() if value != getattr(wanted, key)]
        refuse(f"{path}: is of another model ({'; '.join(differ)}); use the settings it has")
    if problems := found.problems():
        raise ValueError(problems[0])
    if 4 * fewest_weights(found) > path.stat().st_size:   # four bytes each
        raise ValueError("its settings are of a larger model")
    if found.block_size * found.n_embd // found.n_head > 2 ** 28:   # numbers in the rotation table
        raise ValueError("its settings are of a longer context than can be")

def check_archive(path):
    """ValueError if a checkpoint is damaged, or would take more memory than its size says"""
    with zipfile.ZipFile(path) as archive:
        if sum(item.file_size for item in archive.infolist()) > path.stat().st_size:
            raise ValueError("it is compressed, which torch.save never does")
        if archive.testzip():
            raise ValueError("it is damaged")
        for name in archive.namelist():   # A bytearray of any size takes a few bytes here.
            if name.endswith("data.pkl") and b"bytearray" in archive.read(name):
                raise ValueError("it has a bytearray, which train.py never saves")

def load_weights(model, weights):
    own = model.state_dict()
    for name, weight in weights.items():
        if name in own and weight.dtype != own[name].dtype:   # torch would convert it in silence.
            raise ValueError(f"{name} is {weight.dtype}")
    model.load_state_dict(weights)
    if not all_finite(model):
        raise ValueError("its weights are not finite, or beyond 1e6")

def all_finite(model):
    """A weight beyond 1e6 counts as infinite: what it makes soon is."""
    return all((w.float().abs() < 1e6).all().item() for w in model.state_dict().values())

def checked_progress(ckpt, shape):
    """-> the step, FLOPs and sums of gradient norms of a checkpoint. shape: that of the norms"""
    step, flops, norms = ckpt["step"], ckpt["flops"], ckpt["grad_norms"]
    if type(step) is not int or type(flops) is not float:
        raise ValueError("a step or FLOPs that are no numbers")
    if not 0 <= step <= 1e9 or not 0 <= flops <= 1e27:
        raise ValueError("a step or FLOPs that can't be")
    if norms.shape != shape or norms.dtype != torch.float64 or not (norms.abs() < 1e300).all():
        raise ValueError("gradient norms that are no finite numbers, or of another model")
    return step, flops, norms

def checked_moments(moments, p, optimizer):
    """The moments of parameter p. Wrong ones would crash the optimizer's fused code."""
    needed = set()
    if isinstance(optimizer, torch.optim.AdamW):
        needed = {"step", "exp_avg", "exp_avg_sq"}
    elif "momentum" in optimizer.defaults:   # SGD and Muon
        needed = {"momentum_buffer"}
    if not needed <= moments.keys():
        raise ValueError("moments of another --optimizer")
    for name, value in moments.items():
        if value.shape != (() if name == "step" else p.shape):
            raise ValueError("moments of other shapes")
        if value.dtype != torch.float32 or not (value.abs() < 1e15).all():
            raise ValueError("moments that are too large, or not finite")
        if name in ("step", "exp_avg_sq") and (value < 0).any():
            raise ValueError("moments below 0 where none can be")
    return {name: value.contiguous() for name, value in moments.items()}   # as fused code needs it
