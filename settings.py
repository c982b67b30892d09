"""
Where the settings of a training come from. For each flag, the first of these that names it counts:

    what is typed
    --resume              the run in --out, with all that was changed since it began
    --config runs/pre     how that run began, as its config.json says; or a file of settings, such
                          as configs/gpt2.json
    --init_from runs/pre  the model of that run
    defaults              those of GPTConfig and TrainConfig

--resume goes with neither --init_from nor --config. `typed`, `settings` and `defaults` are dicts:
names of flags, and their values. Of runs.py, read_settings says how a run began, read_changes what
--resume has changed since, and settings_now both in one. `refuse` ends the program with a sentence.
"""
import sys
from dataclasses import fields

from model import GPTConfig
from runs import read_changes, read_settings, settings_now
from sentences import refuse, say

# Where this start of a run goes, and what it replaces, says nothing about the run. The tokenizer is
# in config.json, but it is no flag.
NOT_OF_THE_RUN = "out", "config", "resume", "overwrite", "tokenizer"

def of_the_run(settings):
    """The flags among them that belong to the run"""
    return {name: value for name, value in settings.items() if name not in NOT_OF_THE_RUN}

def gather_settings(typed, defaults):
    """-> a value for each flag, a dict"""
    if typed.get("resume"):
        return settings_to_resume(typed, defaults) | typed
    from_config = settings_of_config(typed["config"]) if "config" in typed else {}
    # --config repeats a run, and so the --init_from that it began with.
    source = typed.get("init_from", from_config.get("init_from"))
    from_model = settings_of_model(source) if source else {}
    settings = defaults | from_model | from_config   # What stands further right counts.
    if typed.get("optimizer", settings["optimizer"]) != settings["optimizer"]:
        # The rate of --config was that of its optimizer. 0 is the usual rate of the other one.
        settings["lr"] = 0.0
    return settings | typed

# Why a run can't change these
FIXED = dict(batch_size="the order of its data depends on it",
             optimizer="the moments that are saved are of one optimizer",
             eval_windows="losses of other windows can't be compared")

def settings_to_resume(typed, defaults):
    """-> all settings of the run in --out. (Flags of the model that differ are refused later, when
    train.py reads the checkpoint.)"""
    if "out" not in typed or "config" in typed or "init_from" in typed:
        refuse("--resume: continues the run in --out with its own settings; give --out, and "
               "neither --config nor --init_from")
    settings = defaults | of_the_run(settings_now(typed["out"]))
    for name, reason in FIXED.items():
        if name in typed and typed[name] != settings[name]:
            refuse(f"--{name} {typed[name]}: this run has {settings[name]}, and can't change it: "
                   f"{reason}; leave the flag out, or start a new run")
    return settings

def settings_of_config(path):
    """How the run `path` began, or what that file says. Later changes are printed, not taken."""
    changes = read_changes(path)   # of a file, none
    if changes:
        say(f"--config {path}: begins as that run did; it changed later, at iteration: {changes}",
            file=sys.stderr)
    return of_the_run(read_settings(path))

def settings_of_model(source):
    """The settings of the model in the run `source`"""
    names = [field.name for field in fields(GPTConfig)]
    return {name: value for name, value in settings_now(source).items() if name in names}
