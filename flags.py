"""
A dataclass becomes a command line, and a wrong value one sentence. This file knows no model.

    @dataclass
    class Config:
        size: int = flag(12, "how large it is", 1, 4096)     # default, help, lowest, highest
        kind: Literal["a", "b"] = flag("a", "what it is")

    [config] = parse([Config])      # reads: --size 7 --kind b

If the class has a method `problems`, it yields sentences about what doesn't fit together.
"""
import argparse
import dataclasses
import inspect
import os
import sys
from typing import get_args

def flag(default, help="", low=None, high=None, group=None):
    """A field of a config. low, high: a number's range; group: a title in --help, before this"""
    limits = None if low is None else (low, high)
    return dataclasses.field(default=default, metadata=dict(help=help, limits=limits, group=group))

def parse(classes, argv=None, doc=None, positional=()):
    """Command line -> an instance of each class. argv: a list of words, without it what is typed;
    doc: the text of --help; positional: fields that are typed without --"""
    return make_configs(classes, read_command_line(classes, argv, doc, positional))

def read_command_line(classes, argv=None, doc=None, positional=(), epilog=None):
    """-> a dict of what is typed. What isn't typed is not in it. epilog: the end of --help"""
    parser = Parser(description=doc, usage=argparse.SUPPRESS, allow_abbrev=False, epilog=epilog,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    section = parser
    for field in [field for each in classes for field in dataclasses.fields(each)]:
        text, limits = field.metadata.get("help", ""), field.metadata.get("limits")
        if field.metadata.get("group"):
            section = parser.add_argument_group(field.metadata["group"])
        if limits:
            text = f"[{limits[0]:g}, {limits[1]:g}] {text}"
        if field.default not in ("", None):
            text = f"{text} (default {field.default})"
        name = field.name if field.name in positional else f"--{field.name}"
        how = dict(type=field.type)
        if get_args(field.type):
            how = dict(choices=get_args(field.type))
        elif field.type is bool:
            how = dict(action=argparse.BooleanOptionalAction)   # --compile and --no-compile
        elif field.type is list:
            how = dict(nargs="+", action="extend")
        # SUPPRESS: what is not typed is not among the results. %%: argparse takes % for a name.
        section.add_argument(name, default=argparse.SUPPRESS, help=text.replace("%", "%%"), **how)
    typed = vars(parser.parse_intermixed_args(argv))   # RUN --only x RUN
    for name, value in typed.items():
        if "" in (value if isinstance(value, list) else [value]):   # --out "$NO_SUCH"
            refuse(f"--{name} '': is empty; give it a value, or leave it out")
    return typed

class Parser(argparse.ArgumentParser):
    def error(self, message):
        """argparse calls it, with its own sentence. We add what helps, where we know it."""
        hint = "see --help"
        if message.startswith("unrecognized arguments: ") and ": --" not in message:
            hint = "flags begin with --, and names with spaces need quotes"
        if message.endswith("expected one argument"):   # as that of: --prompt "->"
            hint = "one that begins with - is typed as --FLAG=-VALUE"
        refuse(f"{message}; {hint}")

def make_configs(classes, values):
    """A dict -> an instance of each class. SystemExit, with a sentence for all that is wrong"""
    configs, problems, unknown = [], [], dict(values)
    for each in classes:
        names = [field.name for field in dataclasses.fields(each) if field.name in values]
        config = each(**{name: unknown.pop(name) for name in names})
        found = field_problems(config)
        if not found and hasattr(config, "problems"):   # It relies on values in their ranges.
            found = config.problems()
        problems += found
        configs.append(config)
    problems += [f"--{name}: unknown flag, in a file of settings; see --help" for name in unknown]
    if problems:
        refuse(*problems)
    return configs

def field_problems(config):
    """-> a sentence for each field whose value isn't allowed"""
    problems = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        why = why_not(value, field.type, get_args(field.type) or field.metadata.get("limits"))
        if why:
            problems.append(f"--{field.name} {value!r}: {why}")
    return problems

TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}

def why_not(value, kind, allowed=None):
    """A reason, or None if the value is right. kind: the type that it must have; allowed: ("a",
    "b") are choices, (1, 64) is a range, None allows all"""
    kinds = (float, int) if kind is float else (kind,)   # A file of settings may say 1 for 1.0.
    if kind in TYPE_NAMES and type(value) not in kinds:   # isinstance would take True for 1.
        return f"must be {TYPE_NAMES[kind]}"
    if not allowed:
        return None
    if isinstance(allowed[0], str):
        return None if value in allowed else f"unknown; choose from {', '.join(allowed)}"
    low, high = allowed
    return None if low <= value <= high else f"must be from {low:g} to {high:g}"   # nan isn't.

# ------------------------------------------------------------- options, as in --residual hyper:n=2

def option_defaults(function):
    """A class's keyword arguments, with their defaults: these are its options."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}

def read_options(text, defaults, allowed):
    """("n=2", dict(n=4, kind="lite"), dict(n=(1, 64))) -> dict(n=2). A value gets the type of its
    default. allowed: the choices or the range of each. ValueError, with a sentence, if not"""
    truth = {"0": False, "false": False, "1": True, "true": True}
    found = {}
    for option in text.split(",") if text else []:
        key, _, word = option.partition("=")
        if key not in defaults:
            raise ValueError(f"no option {key!r}; its options are {', '.join(defaults) or 'none'}")
        kind = type(defaults[key])
        try:
            found[key] = truth[word.lower()] if kind is bool else kind(word)
        except (KeyError, ValueError):
            found[key] = word   # It has not the right type, and why_not says so.
        why = why_not(found[key], kind, allowed.get(key))
        if why:
            raise ValueError(f"option {option}: {why}")
    return found

class Mistake(ValueError):
    """A mistake in a class that the user wrote. `start` prints its sentence, and no traceback."""

def refuse(*sentences):
    """Ends the program: Python prints the sentences to stderr, a line each, and exits with 1."""
    raise SystemExit("\n".join(sentences))

def mute():
    """Nobody reads stdout any more. From now on, what is printed there goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

def start(main):
    """Runs a script: main() -> exit status, or None. What a user can mend becomes a sentence: a
    Mistake, a file that isn't there, a full disk. Other errors show their traceback."""
    if hasattr(sys.stdout, "reconfigure"):   # It is None if it is closed; a notebook has its own.
        sys.stdout.reconfigure(errors="backslashreplace")   # for a terminal that knows ASCII only
    try:
        sys.exit(main())
    except BrokenPipeError:   # The reader, such as head, has closed the pipe.
        mute()
    except (Mistake, OSError) as error:
        refuse(f"{os.path.basename(sys.argv[0])}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)   # what shells expect of Ctrl-C
