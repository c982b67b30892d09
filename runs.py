"""
Run folders: how they are written, opened as a model, and gone on with.

    config.json      the settings that the run began with: the flags of train.py, and the tokenizer
    metrics.jsonl    a JSON object a line; if a step has several, later values replace earlier ones.
                     What --resume has changed is here, with its flag: {"step": 200, "--lr": 0.01}
    ckpt.pt          the last checkpoint: model (weights), model_config, optimizers (moments), step,
                     flops, data (a hash, with which train.py sees that the data have changed)
    lock             made first of all, so it marks a run's folder (other programs have a
                     config.json, too); the process that trains here holds it, and the system frees
                     it when that ends

People pass such folders on, so no code in one is run. What is missing, broken or can't be written
ends the program with one sentence: `refuse`, in sentences.py.
"""
import contextlib
import json
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import torch

from files import explain_write_errors, take_lock, write_file, write_text
from model import GPT, GPTConfig
from sentences import refuse, say

# ----------------------------------------------------------------------------- reading a run folder

def read_metrics(run):
    """-> {step: all that metrics.jsonl says about it}"""
    path, metrics = Path(run) / "metrics.jsonl", {}
    if path.is_file():
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):   # A crash may have cut a line short.
                entry = json.loads(line)
                metrics.setdefault(entry["step"], {}).update(entry)
    return metrics

def read_settings(path):
    """A run folder, or a file such as configs/gpt2.json -> the settings it begins with, a dict"""
    file = Path(path, "config.json") if Path(path).is_dir() else Path(path)
    if not file.is_file():
        refuse(f"{file}: no such file; name a run that train.py has made, or a file of settings")
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("it must be a JSON object")
    except ValueError as error:
        refuse(f"{file}: can't be read ({error}); correct or restore it")
    if "mod_rate" in settings:   # a flag that is gone
        refuse(f"{file}: is of the third edition; git checkout 7cf98d5 reads it")
    return settings

def read_changes(run):
    """Run folder -> what --resume has changed since it began: {step: settings}"""
    changes = {}
    for step, entry in read_metrics(run).items():
        changed = {name.removeprefix("--"): value for name, value in entry.items()
                   if name.startswith("--")}
        if changed:
            changes[step] = changed
    return changes

def settings_now(run):
    """Run folder -> its settings after all changes, a dict"""
    settings = read_settings(run)
    for changed in read_changes(run).values():
        settings |= changed
    return settings

def read_checkpoint(path):
    """-> what a ckpt.pt holds, a dict, and the config of its model"""
    if not Path(path).is_file():
        refuse(f"{path}: no checkpoint there; train that run first")
    try:
        if zipfile.ZipFile(path).testzip():   # It compares checksums. torch.load doesn't.
            raise ValueError("it is damaged")
        # weights_only: no code in the file is run.
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:   # There are many ways in which a file can be broken.
        what = " ".join(str(error).split())   # torch writes many lines.
        refuse(f"{path}: can't be read ({what[:200]}); restore it, or train anew")
    if not isinstance(ckpt, dict) or "model_config" not in ckpt:
        refuse(f"{path}: is no checkpoint of this train.py")
    return ckpt, GPTConfig(**ckpt["model_config"])

def make_model(path, ckpt, config):
    """A model of this config, with the weights of a checkpoint. path: where that comes from"""
    problems = config.problems()   # model.py may have been edited: a residual may be gone.
    if problems:
        refuse(f"{path}: {problems[0]}. Is a class of yours gone from model.py?")
    model = GPT(config)
    differ = model.load_state_dict(ckpt["model"], strict=False)
    if differ.missing_keys or differ.unexpected_keys:
        names = differ.missing_keys + differ.unexpected_keys
        refuse(f"{path}: its weights are not those of this model; only one of the two has "
               f"{', '.join(names[:5])}. Use the settings, and the model.py, with which it was "
               f"trained")
    return model

def read_model(path, wanted, may_differ):
    """-> the checkpoint, a dict, and a model of the config `wanted` with its weights; train.py goes
    on from there. may_differ: names of settings, such as kernels, that may be others there"""
    ckpt, saved = read_checkpoint(path)
    there, here = asdict(saved), asdict(wanted)
    differ = [f"{name} {there[name]} there, {here[name]} here" for name in there
              if name not in may_differ and there[name] != here[name]]
    if differ:
        refuse(f"{path}: is of another model ({'; '.join(differ)}); use the settings it has")
    return ckpt, make_model(path, ckpt, wanted)

def open_run(run, device="cpu"):
    """Run folder -> its model in eval mode, and its settings, a dict. Nothing is written."""
    settings, path = settings_now(run), Path(run) / "ckpt.pt"
    ckpt, config = read_checkpoint(path)
    # --kernels on was right for the machine that trained. Without Triton, it would be refused.
    config = replace(config, kernels="auto")
    model = make_model(path, ckpt, config)
    # config.json of an older run may lack a new flag. The model's config has all of its own.
    return model.to(device).eval(), settings | asdict(config)

# ----------------------------------------------------------------------------- writing a run folder

class RunFolder:
    """The folder that a run writes to. RunFolder(...) only checks that no files would be lost, and
    locks it until close(). begin(step) writes the first files, log(...) and save(...) the others.

    settings: those of this start, a dict; resume: it goes on with the run that is there;
    overwrite: it replaces that; is_first: of several processes, only the first one writes"""
    def __init__(self, out, settings, resume=False, overwrite=False, is_first=True):
        self.out, self.settings, self.resume = Path(out), settings, resume
        self.is_first, self.lock_file = is_first, None
        if is_first:
            if not resume:
                self.refuse_if_taken(overwrite)
            self.out.mkdir(parents=True, exist_ok=True)
            self.lock_file = take_lock(self.out / "lock", f"--out {out}: another process is "
                                       f"training there; wait for it, or take another --out")

    def refuse_if_taken(self, overwrite):
        """A new run would replace these files. All others stay."""
        if (self.out / "meta.json").exists():
            refuse(f"--out {self.out}: is a data set; take another --out")
        names = "config.json", "ckpt.pt", "metrics.jsonl"
        found = [name for name in names if (self.out / name).exists()]
        if not found:
            return
        if not (self.out / "lock").exists():
            refuse(f"--out {self.out}: holds {found[0]}, but no lock as each run does, so it may "
                   f"be another program's; take another --out")
        if not overwrite:
            refuse(f"--out {self.out}: holds a run already; --resume continues it, --overwrite "
                   f"replaces it, another --out keeps it")

    def begin(self, step):
        """Once, just before the first step, when all checks have passed. step: 0, or that of the
        checkpoint"""
        if self.is_first and self.resume:
            self.begin_again(step)
        elif self.is_first:
            for name in "ckpt.pt", "metrics.jsonl":   # of the run that this one replaces
                (self.out / name).unlink(missing_ok=True)
            write_text(self.out / "config.json", json.dumps(self.settings, indent=2) + "\n")
            write_text(self.out / "metrics.jsonl", "")

    def begin_again(self, step):
        """What was logged after the checkpoint goes: the run takes those steps again. What this
        start has changed is logged."""
        kept = [entry for at, entry in read_metrics(self.out).items() if at <= step]
        write_text(self.out / "metrics.jsonl", "".join(json.dumps(each) + "\n" for each in kept))
        before = settings_now(self.out)   # It reads the file that we have just written.
        changed = {f"--{name}": value for name, value in self.settings.items()
                   if name not in before or value != before[name]}
        if changed:
            what = " ".join(f"{flag} {value}" for flag, value in changed.items())
            say(f"from iteration {step} on: {what}")
            self.log(step=step, **changed)

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
