"""
Run folders: how they are locked, written, read, and opened as a model.

    config.json      the settings that the run began with: the flags of train.py, and the tokenizer;
                     and, by step, what --resume has changed: "changes": {"200": {"lr": 0.01}}
    metrics.jsonl    a JSON object a line; if a step has several, later values replace earlier ones
    ckpt.pt          the last checkpoint: model (weights), model_config, optimizers (moments), step,
                     flops, best_loss, grad_norms, data (fingerprint)
    lock             held by the process that trains here; the system frees it when that ends

People pass such folders on. So no code in one is run, and no link is followed. What is wrong gets
one sentence: `refuse` in flags.py raises SystemExit with it.
"""
import contextlib
import fcntl
import json
import math
import os
import secrets
import zipfile
from dataclasses import asdict
from pathlib import Path

import torch

from flags import refuse
from model import DECIDERS, GPT, GPTConfig, RESIDUALS

VOCABULARIES = {"bytes": 257, "gpt2": 50257}   # tokenizers, and how many tokens each one has

# ------------------------------------------------------------------------------------------- files

UNFINISHED = ".unfinished-"   # what the names of temporary files begin with

@contextlib.contextmanager
def explain_write_errors(path):
    """Whatever can't be written in the with-block below: one sentence about `path`"""
    try:
        yield
    except (OSError, RuntimeError) as error:   # torch.save says RuntimeError when the disk is full.
        refuse(f"{path}: can't be written ({error}); make room, or take another --out")

@contextlib.contextmanager
def explain_read_errors(path):
    """Whatever is wrong inside a file: one sentence"""
    try:
        yield
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        refuse(f"{path}: can't be read as a part of a run ({what}); restore it, or train anew")

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

def read_json(path):
    """A file with an object -> a dict. ValueError for anything else"""
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("it holds no object")
    return found

# ---------------------------------------------------------------------------------------- settings

def read_settings(path, defaults, strict=True, with_changes=True):
    """The config.json at path, or in the folder of this path -> a dict. A missing setting gets its
    default, so old runs can still be read when the code has new flags. An unknown one is refused
    (`strict`) or left out. with_changes: as --resume has changed them. SystemExit, too, if the file
    is missing or broken, or a value is of another type."""
    path = settings_path(path)
    if not path.is_file():
        refuse(f"{path}: no such file; name a run that train.py has made, or a file of settings")
    with explain_read_errors(path):
        found = without_retired(read_json(path))
        changes = found.pop("changes", {})
        for change in changes.values() if with_changes else ():
            found |= change
        values = fill_in(found, defaults, strict)
    refuse_missing_classes(path, values)
    return values

def read_changes(path):
    """What --resume has changed in a run: {"200": {"lr": 0.01}}. path: as for read_settings"""
    return read_json(settings_path(path)).get("changes", {})

def settings_path(path):
    return Path(path, "config.json") if Path(path).is_dir() else Path(path)

def fill_in(found, defaults, strict=True):
    """found, plus defaults for what is missing. ValueError for an unknown key or a wrong type"""
    found = without_retired(found)
    unknown = found.keys() - defaults.keys()
    if unknown and strict:
        raise ValueError(f"this code has no flag {', '.join(sorted(unknown))}")
    values = defaults | {key: found[key] for key in found.keys() & defaults.keys()}
    for key, value in values.items():
        kind = type(defaults[key])
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"{key} is a {type(value).__name__}")
    return values

def without_retired(found):
    """Settings of a run of the third edition -> those of this one"""
    found = dict(found)
    if found.get("mod_rate") or found.get("layer_drop") or "warmup" in found.get("residual", ""):
        raise ValueError("trained with --mod_rate, --layer_drop or nag:warmup, which are gone; git "
                         "checkout 7cf98d5 reads it")
    if "mod_rate" in found:   # Without it, mod had no meaning there.
        del found["mod"], found["mod_rate"], found["layer_drop"]
    if found.pop("taper_on", "mlp") != "mlp":
        raise ValueError("trained with --taper_on both, which is gone; git checkout 7cf98d5 reads "
                         "it")
    if tokens := found.pop("max_tokens", 0):
        found["max_iters"] = math.ceil(tokens / (found["batch_size"] * found["block_size"]))
    if "compile" in found:   # It could be None, that is on a GPU only.
        found["compile"] = bool(found["compile"])
    return found

def refuse_missing_classes(path, settings):
    """A class may have been somebody's own, in a model.py that has changed since."""
    for kind, known, name in (("residual", RESIDUALS, settings.get("residual", "pre")),
                              ("decider", DECIDERS, settings.get("mod", "all"))):
        if name.partition(":")[0] not in known:
            refuse(f"{path}: {kind} `{name}` is missing from model.py; put it back there")

# ----------------------------------------------------------------------------------------- metrics

def metric_lines(run):
    """Yields each whole line of metrics.jsonl, and what it says. A crash may have cut one short."""
    path = Path(run) / "metrics.jsonl"
    for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else []:
        with contextlib.suppress(ValueError):
            values = json.loads(line)
            if line.endswith(b"\n") and isinstance(values, dict) and "step" in values:
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

    Only the first of several processes writes: is_first. settings: those of this start, a dict.
    SystemExit if another process holds the lock, if the files there are not ours, or if they are a
    run and neither resume nor overwrite is set"""
    def __init__(self, out, settings, resume=False, overwrite=False, is_first=True):
        self.out, self.settings = Path(out), settings
        self.resume, self.overwrite, self.is_first = resume, overwrite, is_first
        self.lock_file = self.metrics_file = None
        if is_first:
            self.refuse_if_taken()   # A folder that is refused gets no lock file.
            self.take_lock()
            self.refuse_if_taken()   # Another run may have begun there meanwhile.

    def refuse_if_taken(self):
        with explain_write_errors(self.out):
            names = os.listdir(self.out) if self.out.is_dir() else []
        names = {name for name in names if name != "lock" and not name.startswith(UNFINISHED)}
        if self.resume or not names:
            return
        # Other programs have a config.json, too.
        if not {"residual", "n_layer", "n_embd", "tokenizer"} <= self.saved_settings().keys():
            refuse(f"--out {self.out}: holds files, and is no run folder of this program; take "
                   f"another --out")
        # A run that was killed before its first step has nothing to lose.
        is_early = names <= {"config.json", "metrics.jsonl"} and not any(read_metrics(self.out))
        if not self.overwrite and not is_early:
            refuse(f"--out {self.out}: holds a run already; --resume continues it, --overwrite "
                   f"replaces it, another --out keeps it")

    def saved_settings(self):
        """config.json as a dict, or {} if it is missing or broken"""
        try:
            return read_json(self.out / "config.json")
        except (OSError, ValueError):
            return {}

    def take_lock(self):
        with explain_write_errors(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
            # O_NOFOLLOW: a link in a folder from elsewhere could lead to any file of the user.
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
            self.lock_file = open(os.open(self.out / "lock", flags, 0o644), "wb")
        try:
            fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refuse(f"--out {self.out}: another process is training there; wait for it, or take "
                   f"another --out")
        except OSError:
            pass   # a file system without locks

    def begin(self, step):
        """Once, just before the first step, when all checks have passed: with overwrite it deletes
        the old run. step: 0, or that of the checkpoint -> what this start has changed, a dict"""
        if not self.is_first:
            return {}
        with explain_write_errors(self.out):
            old = ["ckpt.pt", "best.pt", "metrics.jsonl"] if self.overwrite else []
            for path in [*self.out.glob(UNFINISHED + "*"), *(self.out / name for name in old)]:
                path.unlink(missing_ok=True)
        changes = self.write_settings(step)
        # Lines after the checkpoint go: the run takes those steps again.
        kept = [line for line, values in metric_lines(self.out) if values["step"] <= step]
        write_file(self.out / "metrics.jsonl", lambda f: f.writelines(kept))
        with explain_write_errors(self.out):
            self.metrics_file = open(self.out / "metrics.jsonl", "ab", buffering=0)
        return changes

    def write_settings(self, step):
        """config.json. That of a run that is resumed stays as it is, but for its `changes`."""
        settings, changes = self.settings, {}
        if self.resume:
            before = read_settings(self.out, self.settings, strict=False)
            changes = {name: self.settings[name] for name in before
                       if self.settings[name] != before[name]}
            settings = self.saved_settings()
            if changes:
                settings.setdefault("changes", {}).setdefault(str(step), {}).update(changes)
        if changes or not self.resume:
            text = json.dumps(settings, indent=2) + "\n"
            write_file(self.out / "config.json", lambda f: f.write(text.encode()))
        return changes

    def log(self, **values):
        if self.is_first:
            line = json.dumps(values).encode() + b"\n"
            with explain_write_errors(self.out / "metrics.jsonl"):
                if self.metrics_file.write(line) < len(line):
                    raise OSError("no room is left")

    def save(self, state):
        if self.is_first:
            write_file(self.out / "ckpt.pt", lambda f: torch.save(state, f))

    def close(self):
        for file in self.metrics_file, self.lock_file:
            if file:
                file.close()

# ----------------------------------------------------------------------------- reading a run folder

def read_checkpoint(path, wanted=None, may_differ=("kernels",)):
    """-> the checkpoint, a dict, and its model. SystemExit if it is missing or broken. wanted: the
    config of the model; SystemExit if the checkpoint's differs in more than may_differ"""
    path = Path(path)
    if not path.is_file():
        refuse(f"{path}: no checkpoint there; train that run first")
    with explain_read_errors(path):
        if zipfile.ZipFile(path).testzip():   # It compares checksums.
            raise ValueError("it is damaged")
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        found = fill_in(ckpt["model_config"], asdict(GPTConfig()))
    refuse_missing_classes(path, found)
    if wanted is None:   # A checkpoint that was made with Triton has to open without it.
        wanted = GPTConfig(**found | dict(kernels="auto"))
    differ = [f"{name} {value} there, {getattr(wanted, name)} here" for name, value in found.items()
              if value != getattr(wanted, name) and name not in may_differ]
    if differ:
        refuse(f"{path}: is of another model ({'; '.join(differ)}); use the settings it has")
    for problem in wanted.problems():   # A class may have other options by now.
        refuse(f"{path}: {problem}")
    model = GPT(wanted)   # A mistake in model.py is to show where it is.
    with explain_read_errors(path):
        model.load_state_dict(ckpt["model"])
    return ckpt, model

def open_run(run, device="cpu"):
    """Run folder -> its model in eval mode, and its settings as a dict. Only reads. SystemExit with
    one sentence, whatever is wrong inside"""
    # What sample.py and analyze.py need besides the model's config
    about_data = dict(data="", tokenizer="bytes", eval_windows=128, batch_size=16)
    settings = read_settings(run, about_data, strict=False)
    _, model = read_checkpoint(Path(run) / "ckpt.pt")
    return model.to(device).eval(), settings | asdict(model.config)

def data_of(run, settings):
    """The data folder of a run, as its config.json names it. SystemExit if it isn't there"""
    data = settings["data"]
    if not Path(data).is_dir():
        refuse(f"{run}: config.json names {data} as its data, and that isn't here; such a path "
               f"begins in the folder where the training began, so go there")
    return data

# ---------------------------------------------------------------------------------------- resuming

def optimizer_state(model, optimizers):
    """A list: for each optimizer, {name of a parameter: its moments}"""
    names = {p: name for name, p in model.named_parameters()}
    return [{names[p]: dict(moments) for p, moments in optimizer.state.items()}
            for optimizer in optimizers]

def restore_optimizers(model, optimizers, saved):
    """Gives optimizers the moments that optimizer_state has saved, whatever they are. Parameters
    that never had a gradient have none. Rates and decay stay as the flags say."""
    names = {p: name for name, p in model.named_parameters()}
    for optimizer, moments in zip(optimizers, saved, strict=True):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        # torch knows parameters by their places in the groups.
        state = {i: moments[names[p]] for i, p in enumerate(params) if names[p] in moments}
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(dict(state=state, param_groups=groups))
