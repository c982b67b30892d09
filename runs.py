"""
Run folders: how they are written, opened as a model, and gone on with.

    config.json      the settings that the run began with: the flags of train.py, and the tokenizer;
                     and, by step, what --resume has changed: "changes": {"200": {"lr": 0.01}}
    metrics.jsonl    a JSON object a line; if a step has several, later values replace earlier ones
    ckpt.pt          the last checkpoint: model (weights), model_config, optimizers (moments), step,
                     flops, data (a hash of meta.json and of the shards' sizes)
    lock             held by the process that trains here; the system frees it when that ends

People pass such folders on. So no code in one is run, and through a link no other file is changed.
What is wrong gets one sentence: `refuse` in flags.py raises SystemExit with it.
"""
import contextlib
import fcntl
import json
import os
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import torch

from flags import refuse, say
from model import GPT, GPTConfig

# ------------------------------------------------------------------------------------------- files

def write_file(path, write):
    """write(file) writes to a new file. Only when that is whole and on the disk, it gets the name
    `path`. So a kill or a full disk leaves the old file; and if that was a link, what it leads to
    stays as it is. SystemExit, with a sentence, if it can't be written"""
    path = Path(path)
    unfinished = path.with_name(".unfinished-" + path.name)
    with explain_write_errors(path):
        unfinished.unlink(missing_ok=True)   # of a run that was killed
        try:
            with open(unfinished, "xb") as f:
                write(f)
                f.flush()
                os.fsync(f.fileno())
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)

def write_text(path, text):
    write_file(path, lambda f: f.write(text.encode()))

def write_json(path, values):
    write_text(path, json.dumps(values, indent=2) + "\n")

@contextlib.contextmanager
def explain_write_errors(path):
    """with explain_write_errors(path): what fails to be written there ends with a sentence."""
    try:
        yield
    except (OSError, RuntimeError) as error:   # torch.save says RuntimeError when the disk is full.
        refuse(f"{path}: can't be written ({error}); make room, or take another --out")

@contextlib.contextmanager
def explain_read_errors(path):
    """with explain_read_errors(path): what is wrong inside of that file is told in a sentence."""
    try:
        yield
    except Exception as error:   # There are many ways in which a file can be broken.
        what = " ".join(f"{type(error).__name__}: {error}".split())   # torch writes many lines.
        refuse(f"{path}: can't be read ({what[:200]}); correct or restore it, or train anew")

# ----------------------------------------------------------------------------- reading a run folder

def read_settings_file(path):
    """A run folder's config.json, or a file such as configs/gpt2.json -> the settings there, a
    dict. If it has `changes`, they are left as they are. SystemExit if it is missing or broken"""
    path = Path(path, "config.json") if Path(path).is_dir() else Path(path)
    if not path.is_file():
        refuse(f"{path}: no such file; name a run that train.py has made, or a file of settings")
    with explain_read_errors(path):
        return of_this_edition(dict(json.loads(path.read_text(encoding="utf-8"))))

def of_this_edition(settings):
    """The same settings. ValueError if they are of the third edition, which had other ones"""
    if "mod_rate" in settings:
        raise ValueError("it is of the third edition; git checkout 7cf98d5 reads it")
    return settings

def read_settings(path):
    """The same, as --resume has changed them: without `changes`"""
    settings = read_settings_file(path)
    for changed in settings.pop("changes", {}).values():
        settings |= changed
    return settings

def data_of(run, settings):
    """The data folder of a run, as its settings name it. SystemExit if it isn't there"""
    data = settings["data"]
    if not Path(data).is_dir():
        refuse(f"{run}: config.json names {data} as its data, and that isn't here; such a path "
               f"begins in the folder where the training began, so go there")
    return data

def load_checkpoint(path):
    """-> the checkpoint, a dict, and the config of its model. SystemExit if missing or broken"""
    if not Path(path).is_file():
        refuse(f"{path}: no checkpoint there; train that run first")
    with explain_read_errors(path):
        if zipfile.ZipFile(path).testzip():   # It compares checksums. torch.load doesn't.
            raise ValueError("it is damaged")
        # weights_only: no code in the file is run.
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        return ckpt, GPTConfig(**of_this_edition(ckpt["model_config"]))

def read_checkpoint(path, wanted=None, may_differ=("kernels",)):
    """-> the checkpoint, a dict, and its model. wanted: the config that this model is to have;
    may_differ: settings that may be others in the checkpoint. SystemExit if any other differs, or
    if the checkpoint is missing or broken"""
    ckpt, config = load_checkpoint(path)
    if wanted is None:   # kernels on: it was trained with Triton, but has to open without it.
        wanted = replace(config, kernels="auto")
    differ = [f"{name} {value} there, {getattr(wanted, name)} here"
              for name, value in asdict(config).items()
              if value != getattr(wanted, name) and name not in may_differ]
    if differ:
        refuse(f"{path}: is of another model ({'; '.join(differ)}); use the settings it has")
    problems = wanted.problems()   # A residual of your own may be gone, or have other options.
    if problems:
        refuse(f"{path}: {problems[0]}")
    model = GPT(wanted)
    with explain_read_errors(path):
        model.load_state_dict(ckpt["model"])
    return ckpt, model

def refuse_if_it_can_not_go_on(path, ckpt, fingerprint):
    missing = {"optimizers", "step", "flops", "data"} - ckpt.keys()
    if missing:
        refuse(f"{path}: has no {', '.join(sorted(missing))}, so a training can't go on from it; "
               f"--init_from begins a new one with its weights")
    if ckpt["data"] != fingerprint:
        refuse(f"{path}: is of other data than --data has now; put that back, or start a new run")

def open_run(run, device="cpu"):
    """Run folder -> its model in eval mode, and its settings as a dict. Only reads. SystemExit with
    one sentence, whatever is wrong inside"""
    _, model = read_checkpoint(Path(run) / "ckpt.pt")
    return model.to(device).eval(), read_settings(run) | asdict(model.config)

def read_lines(run):
    """metrics.jsonl -> a list of dicts, one a line"""
    path, lines = Path(run) / "metrics.jsonl", []
    if path.is_file():
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):   # A crash may have cut a line short.
                lines.append(json.loads(line))
    return lines

def read_metrics(run):
    """{step: what metrics.jsonl says about it}"""
    metrics = {}
    for line in read_lines(run):
        metrics.setdefault(line["step"], {}).update(line)
    return metrics

# ----------------------------------------------------------------------------- writing a run folder

class RunFolder:
    """The folder that a run writes to. RunFolder(...) takes hold of it, as open() does of a file:
    it checks that no files would be lost, and locks the folder until close(). begin(step) then
    writes the first files, and log(...) and save(...) the others, many times.

    settings: those of this start, a dict; before: those of the run that is resumed, or None;
    is_first: of several processes, only the first one locks and writes. SystemExit if another run
    holds the lock, if the files there are not ours, or if they are a run that is neither resumed
    nor overwritten"""
    def __init__(self, out, settings, resume=False, overwrite=False, is_first=True):
        self.out, self.settings, self.resume = Path(out), settings, resume
        self.is_first, self.lock_file = is_first, None
        if is_first:
            if not resume:
                self.refuse_if_taken(overwrite)
            self.take_lock()

    def refuse_if_taken(self, overwrite):
        ours = "config.json", "ckpt.pt", "metrics.jsonl"
        if not any((self.out / name).exists() for name in ours):   # Other files don't matter.
            return
        config = self.out / "config.json"   # Other programs have one, too.
        if not config.is_file() or '"residual"' not in config.read_text(errors="replace"):
            refuse(f"--out {self.out}: holds files, and is no run folder of this program; take "
                   f"another --out")
        # A run that was killed before its first evaluation has nothing to lose.
        has_begun = (self.out / "ckpt.pt").exists() or read_lines(self.out)
        if has_begun and not overwrite:
            refuse(f"--out {self.out}: holds a run already; --resume continues it, --overwrite "
                   f"replaces it, another --out keeps it")

    def take_lock(self):
        self.out.mkdir(parents=True, exist_ok=True)
        self.lock_file = open(self.out / "lock", "ab")   # "ab" changes nothing, even behind a link.
        try:
            fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refuse(f"--out {self.out}: another process is training there; wait for it, or take "
                   f"another --out")
        except OSError:
            pass   # Some file systems have no locks.

    def note_changes(self, step):
        """Says what this start has changed, and adds it to config.json."""
        before = read_settings(self.out)
        changes = {name: value for name, value in self.settings.items()
                   if value != before.get(name)}
        if changes:
            settings = read_settings_file(self.out)
            settings.setdefault("changes", {}).setdefault(str(step), {}).update(changes)
            write_json(self.out / "config.json", settings)
            what = ", ".join(f"{name} {value}" for name, value in changes.items())
            say(f"from iteration {step} on: {what}")

    def begin(self, step):
        """Once, just before the first step, when all checks have passed. A new run deletes the old
        one here. step: 0, or that of the checkpoint"""
        if not self.is_first:
            return
        if not self.resume:
            for name in "ckpt.pt", "metrics.jsonl":
                (self.out / name).unlink(missing_ok=True)
            write_json(self.out / "config.json", self.settings)
        else:
            self.note_changes(step)
        # Lines after the checkpoint go: the run takes those steps again.
        kept = [line for line in read_lines(self.out) if line["step"] <= step]
        write_text(self.out / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))

    def log(self, **values):
        """Adds a line to metrics.jsonl."""
        if self.is_first:
            path = self.out / "metrics.jsonl"
            with explain_write_errors(path), open(path, "a") as f:
                f.write(json.dumps(values) + "\n")

    def save(self, state):
        """state: what ckpt.pt is to hold, a dict"""
        if self.is_first:
            write_file(self.out / "ckpt.pt", lambda f: torch.save(state, f))

    def close(self):
        if self.lock_file:
            self.lock_file.close()

# -------------------------------------------------------------------------- moments of optimizers

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
        state = optimizer.state_dict()   # In it, torch knows parameters by their places in params.
        state["state"] = {i: moments[names[p]] for i, p in enumerate(params) if names[p] in moments}
        optimizer.load_state_dict(state)
