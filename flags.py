"""
From a dataclass to a command line, and sentences for the user. This file knows no model.

A field of a config is a flag. `flag` says its default, its help, and which values are allowed:

    @dataclass
    class Config:
        size: int = flag(12, "how large it is", 1, 4096)
        kind: Literal["a", "b"] = flag("a", "what it is")
        plain: float = 0.5          # a flag, too, without help

    config, = parse([Config])       # --size 7 --kind b

A value may have options of its own, such as hyper:kind=mhc,n=2: see read_options.
"""
import argparse
import dataclasses
import difflib
import inspect
import os
import re
import sys
from typing import Literal, get_args, get_origin

# ------------------------------------------------------------------------------ fields of a config

def flag(default, help="", low=None, high=None, group=None):
    """A field of a config. low, high: the range of a number; group: with this flag, --help begins a
    section of this name"""
    about = dict(help=help, low=low, high=high, group=group)
    return dataclasses.field(default=default, metadata=about)

def field_problems(config):
    """A sentence for each field that is none of its choices, or not in its range. (A value may come
    from a file that somebody has written, so it may be of any type.)"""
    bad = []
    for field in dataclasses.fields(config):
        value, kind = getattr(config, field.name), field.type
        choices = (True, False) if kind is bool else get_args(kind)
        low, high = field.metadata.get("low"), field.metadata.get("high")
        if choices and value not in choices:
            known = ", ".join(map(str, choices))
            bad.append(f"--{field.name} {value}: unknown; choose from {known}")
        elif kind is str and type(value) is not str:
            bad.append(f"--{field.name} {value!r}: must be a word")
        elif low is not None and type(value) not in (kind, int):
            bad.append(f"--{field.name} {value!r}: must be of type {kind.__name__}")
        elif low is not None and not low <= value <= high:   # This also finds nan.
            bad.append(f"--{field.name} {value}: must be from {low:g} to {high:g}")
    return bad

def all_problems(config):
    """field_problems, or, if there are none, what the config's own method `problems` finds"""
    bad = field_problems(config)
    if not bad and hasattr(config, "problems"):
        bad = config.problems()
    return bad

# ------------------------------------------------------------------------------------------- flags

class Parser(argparse.ArgumentParser):
    def error(self, message):
        refuse(f"{self.prog}: {message}; {self.prog} --help lists the flags")

def parse(configs, argv=None, doc=None, positional=(), defaults=None, epilog=None, retired={}):
    """Command line -> an instance of each config class. SystemExit, with a sentence for each
    problem, if a config can't be used: see all_problems.

    positional: names of fields that are no flags but words; defaults: a function from the flags
    that are typed to values that count where none is; doc, epilog: for --help; retired: flags that
    are gone, and what to use instead"""
    parser = Parser(description=doc, usage=argparse.SUPPRESS, allow_abbrev=False, epilog=epilog,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser
    for config in configs:
        for field in dataclasses.fields(config):
            if title := field.metadata.get("group"):
                group = parser.add_argument_group(title)
            add_flag(group, field, field.name in positional)
    argv = sys.argv[1:] if argv is None else argv
    refuse_unknown(parser, argv, retired)
    given = vars(parser.parse_args(argv))   # only what is typed
    for name in "out", "config", "init_from":
        if given.get(name) == "":   # a variable of the shell that has no value, perhaps
            parser.error(f"--{name}: is empty; name one, or leave it out")
    values = defaults(given) if defaults else {}
    for name in values:   # They may be from a file that somebody has written.
        if f"--{name}" not in parser._option_string_actions or name.startswith("no-"):
            tell_unknown(parser, f"--{name}", retired)
    values |= given
    made, bad = [], []
    for config in configs:
        names = {field.name for field in dataclasses.fields(config)}
        made.append(config(**{name: values[name] for name in names & values.keys()}))
        bad += all_problems(made[-1])
    if bad:
        refuse(*(f"{parser.prog}: {sentence}" for sentence in bad))
    return made

def add_flag(group, field, is_positional):
    text, low = field.metadata.get("help", ""), field.metadata.get("low")
    if low is not None:
        text = f"[{low:g}, {field.metadata['high']:g}] {text}"
    if field.default is not False and field.default not in ("", None):
        text += f" (default {field.default})"
    if get_origin(field.type) is Literal:
        how = dict(choices=get_args(field.type))
    elif field.type is bool:
        how = dict(action=argparse.BooleanOptionalAction)
    elif field.type is list:
        how = dict(nargs="+", action="extend")
    else:
        how = dict(type=field.type)
    how["help"] = text.replace("%", "%%")
    if is_positional:
        group.add_argument(field.name, **how)
    else:
        group.add_argument(f"--{field.name}", default=argparse.SUPPRESS, **how)

def refuse_unknown(parser, words, retired):
    """This comes before argparse, which would first complain of a word that is missing."""
    known = parser._option_string_actions
    for word in words:
        name = word.split("=")[0]
        if re.fullmatch(r"--\w[\w-]*", name) and name not in known:
            tell_unknown(parser, name, retired)

def tell_unknown(parser, name, retired):
    if name[2:] in retired:
        parser.error(f"{name}: is gone; {retired[name[2:]]}")
    near = difflib.get_close_matches(name, parser._option_string_actions, 1)
    parser.error(f"{name}: unknown flag" + (f", did you mean {near[0]}?" if near else ""))

# ---------------------------------------------------------------------- options: name:key=value,...

def option_defaults(function):
    """The keyword arguments of a function or class, with their defaults: these are its options."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}

def read_options(text, defaults, allowed):
    """"kind=mhc,n=2" -> dict(kind="mhc", n=2). ValueError, with a sentence, if that can't be.

    defaults: option -> its default, whose type the value gets; allowed: option -> its lowest and
    its highest value, or its choices if these are words"""
    found = {}
    for option in filter(None, text.split(",")):
        key, _, word = option.partition("=")
        if key not in defaults:
            known = ", ".join(f"{name}={default}" for name, default in defaults.items())
            raise ValueError(f"no option {key!r}; its options are {known or 'none'}")
        found[key] = value = convert(key, word, defaults[key])
        limits = allowed.get(key)
        if limits and isinstance(value, str) and value not in limits:
            raise ValueError(f"option {key}={value} must be one of {', '.join(limits)}")
        if limits and not isinstance(value, str) and not limits[0] <= value <= limits[1]:
            raise ValueError(f"option {key}={value} must be from {limits[0]} to {limits[1]}")
    return found

KINDS = {int: "a whole number", float: "a number", bool: "0 or 1", str: "a word"}

def convert(key, word, default):
    """A word -> a value of the default's type"""
    kind = type(default)
    try:
        if kind is bool:
            return {"0": False, "false": False, "1": True, "true": True}[word.lower()]
        return kind(word)
    except (KeyError, ValueError):
        raise ValueError(f"{key} must be {KINDS[kind]}, such as {default}") from None

# ------------------------------------------------------------------------- sentences for the user

def say(text, file=None):
    """Prints, in the first of several processes. A stdout that is closed or full ends no run."""
    if environment("RANK", 0) == 0:
        try:
            print(text, file=file, flush=True)
        except OSError:
            mute_stdout()

def refuse(*sentences):
    """Ends the program with a sentence for the user, or several, a line each. See `start`."""
    raise SystemExit("\n".join(sentences))

def printable(text):
    """No character that could do something to a terminal"""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)

def environment(name, default):
    """A number that torchrun puts into the environment"""
    return int(os.environ.get(name, default))

def mute_stdout():
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

def start(main):
    """Runs a script: main() -> exit status, or None. What a user can mend is told in a sentence. A
    mistake in the code has its traceback."""
    if sys.stdout:   # None if it is closed
        sys.stdout.reconfigure(errors="backslashreplace")   # for a terminal that knows ASCII only
    try:
        status = main() or 0
    except KeyboardInterrupt:
        status = 130
    except SystemExit as end:
        status = end.code or 0
    except BrokenPipeError:   # A reader of stdout, such as head, has had enough.
        mute_stdout()
        status = 0
    except (OSError, MemoryError, RuntimeError) as error:
        status = f"{os.path.basename(sys.argv[0])}: {sentence_about(error)}"
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
        return "out of memory; make the model, the batch, the context or the text smaller"
    if "c++ compiler" in text or "c compiler" in text:   # what torch says, and what triton says
        return "torch can't compile here; install a C compiler, or add --no-compile"
    if text.startswith("dist") or "gloo" in text or "nccl" in text:   # DistBackendError and others
        why = str(error).partition("\n")[0]
        return (f"another process of this run has ended, or can't be reached ({why}); see what it "
                f"says, or give torchrun another --master_port")
    raise error
