"""
Where the settings of a training come from. For each flag, the first of these that names it counts:

    what is typed
    --resume              the run in --out, with all that was changed since it began
    --config runs/pre     how that run began; or a file such as configs/gpt2.json
    --init_from runs/pre  the model of that run
    defaults              those of GPTConfig and TrainConfig

--resume goes with neither --init_from nor --config. `typed`, `settings` and `defaults` are dicts:
names of flags, and their values. `refuse` ends the program with a sentence.
"""
import sys
from dataclasses import asdict

from flags import option_defaults
from model import GPTConfig, RESIDUALS
from runs import read_settings, read_settings_file
from sentences import refuse, say

# Where this start of a run goes, and what it replaces, says nothing about the run. And config.json
# has the tokenizer, which is no flag.
NOT_OF_THE_RUN = "out", "config", "resume", "overwrite", "tokenizer"

def of_the_run(settings):
    """The flags among them that belong to the run"""
    return {name: value for name, value in settings.items() if name not in NOT_OF_THE_RUN}

# The usual learning rates, good ones for small models
RATES = dict(muon=2e-2, adamw=6e-3, sgd=0.1)

def gather_settings(typed, defaults):
    """-> a value for each flag, a dict"""
    if typed.get("resume"):
        settings = settings_to_resume(typed, defaults) | typed
    else:
        from_config = settings_of_config(typed["config"]) if "config" in typed else {}
        source = (from_config | typed).get("init_from")
        from_model = settings_of_model(source) if source else {}
        settings = defaults | from_model | from_config | typed   # What stands later counts.
        # The rate of --config is good for its optimizer, and for no other.
        another = settings["optimizer"] != (defaults | from_config)["optimizer"]
        if another and "lr" not in typed:
            settings["lr"] = 0.0
    if settings["lr"] == 0:
        settings["lr"] = RATES.get(settings["optimizer"], 0.0)   # A misspelt one is refused later.
    return settings

def settings_to_resume(typed, defaults):
    """-> all settings of the run in --out. Some flags beside --resume are refused. (Those of the
    model are refused later, when train.py reads the checkpoint.)"""
    if "out" not in typed or "config" in typed or "init_from" in typed:
        refuse("--resume: continues the run in --out with its own settings; give --out, and "
               "neither --config nor --init_from")
    settings = defaults | of_the_run(read_settings(typed["out"]))
    # They would change the batches, the moments, and which losses can be compared.
    for name in "batch_size", "optimizer", "eval_windows":
        if name in typed and typed[name] != settings[name]:
            refuse(f"--{name} {typed[name]}: a run can't change it, and this one has "
                   f"{settings[name]}; leave that, or start a new run")
    return settings

def settings_of_config(path):
    """How the run `path` began, or what that file says. Later changes are printed, not taken."""
    settings = read_settings_file(path)
    changes = settings.pop("changes", None)
    if changes:
        say(f"--config {path}: begins as that run did; it changed later, at iteration: {changes}",
            file=sys.stderr)
    return of_the_run(settings)

def settings_of_model(source):
    """The settings of the model in the run `source`"""
    names = asdict(GPTConfig())
    return {name: value for name, value in read_settings(source).items() if name in names}

# Settings that may differ from those of the run in --init_from, whose weights fit all the same
FREE = "seed", "kernels", "block_size", "deep_supervision", "mod", "gain_cost"

def refuse_other_tokens(source, data, tokenizer):
    """source: the run in --init_from; tokenizer: that of the data"""
    learned = read_settings(source).get("tokenizer")
    if learned != tokenizer:
        refuse(f"--init_from {source}: its tokens are those of {learned}, and --data {data} has "
               f"{tokenizer}; prepare that with --tokenizer {learned}")

def residual_list():
    """For --help: all residuals with their options"""
    lines = ["residuals, with their options:"]
    for name in RESIDUALS:
        defaults = option_defaults(RESIDUALS[name]).items()
        options = ",".join(f"{key}={default}" for key, default in defaults)
        lines.append(f"  {name}:{options}".rstrip(":"))
    return "\n".join(lines)
