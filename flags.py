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
import errno
import inspect
import os
import re
import sys
from typing import Literal, get_args, get_origin

# ------------------------------------------------------------------------- sentences for the user

def say(text):
    """Prints, in the first of several processes. A stdout that is closed or full ends no run."""
    if environment("RANK", 0) == 0:
        try:
            print(printable(text), flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

def refuse(*sentences):
    """Ends the program with a sentence for the user, or several. See `start`. Each gets one line,
    whatever was typed."""
    raise SystemExit("\n".join(printable(each).replace("\n", "?")[:1000] for each in sentences))

def printable(text):
    """No character that could do something to a terminal, and no word without an end"""
    text = re.sub(r"\S{300,}", lambda word: word[0][:60] + "...", text)
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)

def environment(name, default):
    """A number that torchrun puts into the environment"""
    value = os.environ.get(name, str(default))
    if not re.fullmatch("[0-9]{1,6}", value) or name == "WORLD_SIZE" and int(value) == 0:
        refuse(f"{name}={value}: must be a number, as torchrun sets it")
    return int(value)

def start(main):
    """Runs a script: main() -> exit status, or None. Whatever ends it, there is a sentence and no
    traceback, unless it is a mistake of ours. Of several processes each one speaks for itself."""
    sys.stdout = sys.stdout or open(os.devnull, "w")    # None: it is closed
    sys.stdout.reconfigure(errors="backslashreplace")   # for a terminal that knows ASCII only
    try:
        status = main() or 0
    except KeyboardInterrupt:
        status = 130
    except SystemExit as end:
        status = end.code or 0
    except (MemoryError, RuntimeError) as error:
        status = sentence_about(error)
    except OSError as error:   # A full stdout, or one whose reader, such as head, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        remedy = "; make that readable, or name another" if error.filename else ""
        remedy = "; make room" if error.errno == errno.ENOSPC else remedy
        status = 0 if isinstance(error, BrokenPipeError) else f"{sys.argv[0]}: {str(error)[:300]}{remedy}"
    if isinstance(status, str):
        rank = os.environ.get("RANK", "0")
        process = f"process {rank}: " if re.fullmatch("[1-9][0-9]*", rank) else ""
        print(process + printable(status), file=sys.stderr, flush=True)
        status = 1
    if "RANK" in os.environ:   # A tidy exit may abort in a thread of torch, though all is saved.
        os._exit(status)
    sys.exit(status)

def sentence_about(error):
    text = f"{type(error).__name__} {error}".lower()
    if is_about_memory(error):
        return (f"{sys.argv[0]}: out of memory; make the model, the batch, the context or the text "
                f"smaller")
    if "c++ compiler" in text or "c compiler" in text:   # what torch says, and what triton says
        return "--compile: torch can't compile here; install a C compiler, or add --no-compile"
    if text.startswith("dist") or "gloo" in text or "nccl" in text:   # DistBackendError and the like
        return "another process of this run has ended, so this one can't go on; look at what that says"
    raise error

def is_about_memory(error):
    """Is it that there is too little? torch has a RuntimeError for this."""
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    return isinstance(error, MemoryError) or "allocate" in text or "out of memory" in text

# ------------------------------------------------------------------------------ fields of a config

def flag(default, help="", low=None, high=None, group=None):
    """A field of a config. low, high: the range of a number; group: its flag opens a group of
    this name in --help"""
    about = dict(help=help, low=low, high=high, group=group)
    return dataclasses.field(default=default, metadata=about)

def field_problems(config):
    """A sentence for each field that is none of its choices, or not in its range."""
    bad = []
    for field in dataclasses.fields(config):
        value, choices = getattr(config, field.name), get_args(field.type)
        low, high = field.metadata.get("low"), field.metadata.get("high")
        if choices and value not in choices:
            known = ", ".join(map(str, choices))
            bad.append(f"--{field.name} {value}: unknown; choose from {known}")
        elif low is not None and not low <= value <= high:   # This also finds nan.
            bad.append(f"--{field.name} {value}: must be from {low:g} to {high:g}")
    return bad

# ------------------------------------------------------------------------------------------- flags

FIRST = "residual", "n_layer", "data", "out", "resume"   # These come first in --help.

class Parser(argparse.ArgumentParser):
    def error(self, message):
        refuse(f"{self.prog}: {message[:300]}; {self.prog} --help lists the flags")

def parse(configs, argv=None, doc=None, positional=(), defaults=None, epilog=None, retired={}):
    """Command line -> an instance of each config class. SystemExit, with a sentence for each
    problem, if a config can't be used: see field_problems, and a config's own method `problems`.

    positional: names of fields that are no flags but words; defaults: a function from the flags
    that are given to values that count where there is no flag; doc, epilog: for --help; retired:
    flags that are gone, and what to use instead"""
    parser = Parser(description=doc, usage=argparse.SUPPRESS, allow_abbrev=False, epilog=epilog,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = {"": parser.add_argument_group("what everyone uses")}
    for config in configs:
        title = config.__name__.removesuffix("Config").lower()
        for field in dataclasses.fields(config):
            title = field.metadata.get("group") or title
            name = "" if field.name in FIRST else title
            if name not in groups:
                groups[name] = parser.add_argument_group(name)
            add_flag(groups[name], field, field.name in positional)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        word = next((word for word in unknown if word.startswith("--")), unknown[0]).split("=")[0]
        if word.removeprefix("--") in retired:
            parser.error(f"{word}: is gone; {retired[word.removeprefix('--')]}")
        near = difflib.get_close_matches(word, parser._option_string_actions, 1)
        parser.error(f"{word}: unknown flag" + (f", did you mean {near[0]}?" if near else ""))
    given = vars(given)
    for name in "out", "config":
        if given.get(name) == "":
            refuse(f"--{name}: is empty; name one, or leave it out")
    values = (defaults(given) if defaults else {}) | given
    made, bad = [], []
    for config in configs:
        names = {field.name for field in dataclasses.fields(config)}
        made.append(config(**{name: values[name] for name in names & values.keys()}))
        own = getattr(made[-1], "problems", list)
        bad += field_problems(made[-1]) or own()
    if bad:
        refuse(*(f"{parser.prog}: {sentence}" for sentence in bad))
    return made

def add_flag(group, field, is_positional):
    text, low = field.metadata.get("help", ""), field.metadata.get("low")
    if low is not None:
        text = f"[{low:g}, {field.metadata['high']:g}] {text}"
    how = dict(type=field.type)
    if get_origin(field.type) is Literal:
        how = dict(choices=get_args(field.type))
    elif field.type is bool:
        how = dict(action=argparse.BooleanOptionalAction)
    elif field.type is list:
        how = dict(nargs="+", action="extend")
    if not is_positional and field.default not in ("", None, False):
        text += f" (default {field.default})"
    how["help"] = text.replace("%", "%%")
    if is_positional:
        group.add_argument(field.name, **how)
    else:
        group.add_argument(f"--{field.name}", default=argparse.SUPPRESS, **how)

# ---------------------------------------------------------------------- options: name:key=value,...

def option_defaults(function):
    """The keyword arguments of a function or class, with their defaults: these are its options."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}

KINDS = {int: "a whole number", float: "a number", bool: "0 or 1", str: "a word"}

def read_options(text, defaults, allowed):
    """"kind=mhc,n=2" -> dict(kind="mhc", n=2). ValueError, with a sentence, if that can't be.

    defaults: option -> its default, whose type the value gets; allowed: option -> its lowest and
    its highest value, or its choices if these are words"""
    found = {}
    for option in filter(None, text.split(",")):
        key, _, value = option.partition("=")
        if key not in defaults:
            known = ", ".join(f"{name}={default}" for name, default in defaults.items())
            raise ValueError(f"no option {key!r}; its options are {known or 'none'}")
        kind = type(defaults[key])
        try:
            found[key] = convert(value, kind)
        except ValueError:
            raise ValueError(f"{key} must be {KINDS[kind]}, such as {defaults[key]}") from None
        check_option(key, found[key], allowed.get(key))
    return found

def convert(text, kind):
    if kind is bool:
        return ("0", "false", "1", "true").index(text.lower()) >= 2
    value = kind(text)
    if kind in (int, float) and not abs(value) <= 1e4:   # too large, or nan
        raise ValueError
    return value

def check_option(key, value, allowed):
    if allowed is None:
        return
    if isinstance(value, str):
        right, wanted = value in allowed, f"one of {', '.join(allowed)}"
    else:
        right, wanted = allowed[0] <= value <= allowed[1], f"from {allowed[0]} to {allowed[1]}"
    if not right:
        raise ValueError(f"option {key}={value} must be {wanted}")
