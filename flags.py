"""
Sentences for the user, and command lines that are made from dataclasses. This file knows no model.

A field of a dataclass is a flag. `flag` says its default, its help, and which values are allowed:

    @dataclass
    class Config:
        size: int = flag(12, "how large it is", 1, 4096)
        kind: Literal["a", "b"] = flag("a", "what it is")
        plain: float = 0.5          # a flag, too, without help

    [config] = parse([Config])      # reads --size 7 --kind b

A value may have options of its own, as in --residual hyper:kind=mhc,n=2: see read_options.
"""
import argparse
import dataclasses
import difflib
import inspect
import os
import re
import sys
from typing import get_args

# ------------------------------------------------------------------------- sentences for the user

def refuse(*sentences):
    """Ends the program with sentences for the user, a line each. `start` prints them."""
    raise SystemExit("\n".join(sentences))

def environment(name, default):
    """A number that torchrun puts into the environment. RANK is 0 in the first process."""
    return int(os.environ.get(name, default))

def say(text, file=None):
    """Prints, in the first of several processes."""
    if environment("RANK", 0) == 0:
        try:
            print(text, file=file, flush=True)
        except OSError:   # stdout is closed or full. That is no reason to end a training.
            mute_stdout()

def mute_stdout():
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

def printable(text):
    """No character that could do something to a terminal"""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)

def start(main):
    """Runs a script: main() -> exit status, or None. What a user can mend is told in a sentence. A
    mistake in the code shows its traceback."""
    if sys.stdout:   # None if it is closed
        sys.stdout.reconfigure(errors="backslashreplace")   # for a terminal that knows ASCII only
    try:
        status = main() or 0
    except KeyboardInterrupt:
        status = 130   # what shells expect of Ctrl-C
    except SystemExit as end:
        status = end.code or 0   # a number, or the sentences of `refuse`
    except BrokenPipeError:   # A reader of stdout, such as head, has had enough.
        mute_stdout()
        status = 0
    except (OSError, MemoryError, RuntimeError) as error:
        status = f"{script()}: {sentence_about(error)}"
    if isinstance(status, str):
        print(status, file=sys.stderr, flush=True)
        status = 1
    if "RANK" in os.environ:   # A tidy exit may abort in a thread of torch, though all is saved.
        os._exit(status)
    sys.exit(status)

def sentence_about(error):
    """What a user can do about an error that is no mistake in the code. All others are raised."""
    text = f"{type(error).__name__} {error}".lower()
    if isinstance(error, OSError):
        return str(error)
    if isinstance(error, MemoryError) or "allocate" in text or "out of memory" in text:
        return ("out of memory; make the model, the batch (or, with --grad_accum, its parts), the "
                "context or the text smaller")
    if "c++ compiler" in text or "c compiler" in text:   # what torch says, and what triton says
        return "torch can't compile here; install a C compiler, or add --no-compile"
    if text.startswith("dist") or "gloo" in text or "nccl" in text:   # DistBackendError and others
        why = str(error).partition("\n")[0]
        return (f"another process of this run has ended, or can't be reached ({why}); see what it "
                f"says, or give torchrun another --master_port")
    raise error

# ---------------------------------------------------------------------------- fields of a dataclass

def flag(default, help="", low=None, high=None, group=None):
    """A field of a config. low, high: the range of a number; group: with this flag, --help begins a
    section of this name"""
    about = dict(help=help, low=low, high=high, group=group)
    return dataclasses.field(default=default, metadata=about)

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}

def field_problems(config):
    """-> a sentence for each field that can't have the value it has"""
    bad = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        problem = problem_of(field, value)
        if problem:
            bad.append(f"--{field.name} {value!r}: {problem}")
    return bad

def problem_of(field, value):
    """Why a field can't have this value, or None if it can. A value from a file of settings may be
    of any type."""
    choices = get_args(field.type)   # of a Literal; other types have none
    low, high = field.metadata.get("low"), field.metadata.get("high")
    if choices:
        return None if value in choices else f"unknown; choose from {', '.join(choices)}"
    types = (float, int) if field.type is float else (field.type,)   # A file may say 1 for 1.0.
    if field.type in KINDS and type(value) not in types:
        return f"must be {KINDS[field.type]}"
    if low is not None and not low <= value <= high:   # This also finds nan.
        return f"must be from {low:g} to {high:g}"

# ------------------------------------------------------------------------------------ command line

def parse(classes, argv=None, doc=None, positional=()):
    """Command line -> an instance of each config class. SystemExit, with a sentence for each
    problem. positional: names of fields that are no flags but words; doc: for --help"""
    return make_configs(classes, read_command_line(classes, argv, doc, positional))

def read_command_line(classes, argv=None, doc=None, positional=(), epilog=None):
    """-> what is typed, a dict; what isn't typed is not in it"""
    words = sys.argv[1:] if argv is None else argv
    parser = make_parser(classes, doc, positional, epilog)
    # Misspelt flags come first: argparse would complain of the words that they leave over.
    refuse_unknown(names_among(words), names_of(classes) | {"help"})
    return vars(parser.parse_args(words))

def make_configs(classes, values):
    """A dict, of which a part may come from a file -> an instance of each class. SystemExit if that
    can't be: field_problems says why, or the config's own method `problems`."""
    refuse_unknown(values, names_of(classes))
    made, bad = [], []
    for config_class in classes:
        own = {field.name for field in dataclasses.fields(config_class)}
        config = config_class(**{name: values[name] for name in own & values.keys()})
        problems = field_problems(config)
        if not problems and hasattr(config, "problems"):   # It relies on values in their ranges.
            problems = config.problems()
        bad += problems
        made.append(config)
    if bad:
        refuse(*(f"{script()}: {sentence}" for sentence in bad))
    return made

def names_of(classes):
    return {field.name for each in classes for field in dataclasses.fields(each)}

def script():
    """The name of the file that is run, such as train.py"""
    return os.path.basename(sys.argv[0])

class Parser(argparse.ArgumentParser):
    def error(self, message):
        refuse_command_line(message)

def refuse_command_line(message):
    refuse(f"{script()}: {message}; {script()} --help lists the flags")

def make_parser(classes, doc, positional, epilog):
    parser = Parser(description=doc, usage=argparse.SUPPRESS, allow_abbrev=False, epilog=epilog,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser
    for each in classes:
        for field in dataclasses.fields(each):
            if title := field.metadata.get("group"):
                group = parser.add_argument_group(title)
            name = field.name if field.name in positional else f"--{field.name}"
            # SUPPRESS: what is not typed is not among the results.
            group.add_argument(name, default=argparse.SUPPRESS, help=help_text(field),
                               **how_to_read(field.type))
    return parser

def help_text(field):
    text, low = field.metadata.get("help", ""), field.metadata.get("low")
    if low is not None:
        text = f"[{low:g}, {field.metadata['high']:g}] {text}"
    if field.default is not False and field.default not in ("", None):
        text += f" (default {field.default})"
    return text.replace("%", "%%")   # argparse takes % for the beginning of a name.

def how_to_read(kind):
    """What argparse has to know about a flag of this type"""
    if choices := get_args(kind):
        return dict(choices=choices)
    if kind is bool:
        return dict(action=argparse.BooleanOptionalAction)   # --compile and --no-compile
    if kind is list:
        return dict(nargs="+", action="extend")
    return dict(type=not_empty if kind is str else kind)

def not_empty(word):
    """`--out "$RUN"` gives an empty word if the shell has no variable RUN."""
    if not word:
        raise argparse.ArgumentTypeError("is empty; give it a value, or leave it out")
    return word

def names_among(words):
    """["runs/a", "--n_layer", "6", "--lr=1", "--no-compile"] -> ["n_layer", "lr", "compile"]"""
    found = [re.match(r"--(?:no-)?(\w[\w-]*)(=|$)", word) for word in words]
    return [match[1] for match in found if match]

def refuse_unknown(given, known):
    """SystemExit if a name that is given is not among the known ones"""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(f"--{name}", [f"--{each}" for each in known], 1)
            hint = f", did you mean {near[0]}?" if near else ""
            refuse_command_line(f"--{name}: unknown flag{hint}")

# ---------------------------------------------------------------------- options: key=value,...

def option_defaults(function):
    """The keyword arguments of a function or class, with their defaults: these are its options."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}

def read_options(text, defaults, allowed):
    """"kind=mhc,n=2" -> dict(kind="mhc", n=2). ValueError, with a sentence, if that can't be.

    defaults: option -> its default, whose type the value gets; allowed: option -> its lowest and
    its highest value, or its choices if these are words"""
    found = {}
    for option in text.split(",") if text else []:
        key, _, word = option.partition("=")
        if key not in defaults:
            known = ", ".join(f"{name}={default}" for name, default in defaults.items())
            raise ValueError(f"no option {key!r}; its options are {known or 'none'}")
        found[key] = option_value(key, word, defaults[key], allowed.get(key))
    return found

def option_value(key, word, default, limits):
    """The value that a word stands for. limits: that of `allowed`, or None"""
    kind = type(default)
    try:
        if kind is bool:
            value = {"0": False, "false": False, "1": True, "true": True}[word.lower()]
        else:
            value = kind(word)
    except (KeyError, ValueError):
        raise ValueError(f"option {key} must be {KINDS[kind]}, such as {default}") from None
    if limits and kind is str and value not in limits:
        raise ValueError(f"option {key}={value} must be one of {', '.join(limits)}")
    if limits and kind is not str and not limits[0] <= value <= limits[1]:
        raise ValueError(f"option {key}={value} must be from {limits[0]} to {limits[1]}")
    return value
