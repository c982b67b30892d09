"""
Command lines that are made from dataclasses. This file knows no model.

A field of a dataclass is a flag. `flag` says its default, its help, and which values are allowed:

    @dataclass
    class Config:
        size: int = flag(12, "how large it is", 1, 4096)
        kind: Literal["a", "b"] = flag("a", "what it is")
        plain: float = 0.5          # a flag, too, without help
        files: list = flag(None, "to be read")

        def problems(self):         # if there are any: sentences about what doesn't fit together
            return ["--kind b: is for small sizes"] if self.kind == "b" and self.size > 9 else []

    # reads: notes.txt more.txt --size 7 --kind b
    [config] = parse([Config], positional=("files",))
"""
import argparse
import dataclasses
import difflib
import inspect
import re
import sys
from typing import get_args

from sentences import refuse, script

# ---------------------------------------------------------------------------- fields of a dataclass

def flag(default, help="", low=None, high=None, group=None):
    """A field of a config. low, high: the range of a number, both or neither; group: the title of a
    section of --help, which begins with this flag"""
    limits = None if low is None else (low, high)
    return dataclasses.field(default=default, metadata=dict(help=help, limits=limits, group=group))

def field_problems(config):
    """-> a sentence for each field that can't have the value it has"""
    bad = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        problem = problem_of(field, value)
        if problem:
            bad.append(f"--{field.name} {value!r}: {problem}")
    return bad

TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}

def problem_of(field, value):
    """Why a field can't have this value, or None if it can. The value may be of any type: perhaps
    it comes from a config.json that somebody has written."""
    types = (float, int) if field.type is float else (field.type,)   # A file may say 1 for 1.0.
    if field.type in TYPE_NAMES and type(value) not in types:
        return f"must be {TYPE_NAMES[field.type]}"
    return why_not_allowed(value, get_args(field.type) or field.metadata.get("limits"))

def why_not_allowed(value, allowed):
    """A reason, or None if the value is allowed. allowed: the choices of a word, or the
    lowest and the highest number; None: all are"""
    if not allowed:
        return None
    if isinstance(allowed[0], str):
        return None if value in allowed else f"unknown; choose from {', '.join(allowed)}"
    low, high = allowed
    if not low <= value <= high:   # This also finds nan.
        return f"must be from {low:g} to {high:g}"
    return None

def names_of(classes):
    return {field.name for each in classes for field in dataclasses.fields(each)}

# ------------------------------------------------------------------------------------ command line

def parse(classes, argv=None, doc=None, positional=()):
    """Command line -> an instance of each config class. What can't be is refused, with a sentence
    for each problem.

    argv: the words, without it those that are typed; doc: for --help; positional: names of fields
    that are given without --"""
    return make_configs(classes, read_command_line(classes, argv, doc, positional))

def read_command_line(classes, argv=None, doc=None, positional=(), epilog=None):
    """-> what is typed, a dict; what isn't typed is not in it. epilog: the end of --help. (train.py
    adds settings of an earlier run to this, before it calls make_configs.)"""
    words = sys.argv[1:] if argv is None else argv
    parser = make_parser(classes, doc, positional, epilog)
    # Misspelt flags come first: argparse would complain of the words that they leave over.
    refuse_unknown(names_among(words), names_of(classes) | {"help"})
    return vars(parser.parse_args(words))

def names_among(words):
    """["runs/a", "--n_layer", "6", "--lr=1", "--no-compile"] -> ["n_layer", "lr", "compile"]"""
    found = [re.match(r"--(?:no-)?(\w[\w-]*)(=|$)", word) for word in words]
    return [match[1] for match in found if match]

def refuse_unknown(given, known):
    """Refuses a name that is given and not known."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(f"--{name}", [f"--{each}" for each in known], 1)
            hint = f", did you mean {near[0]}?" if near else ""
            refuse_command_line(f"--{name}: unknown flag{hint}")

def refuse_command_line(message):
    refuse(f"{script()}: {message}; {script()} --help lists the flags")

class Parser(argparse.ArgumentParser):
    def error(self, message):
        refuse_command_line(message)

def make_parser(classes, doc, positional, epilog):
    parser = Parser(description=doc, usage=argparse.SUPPRESS, allow_abbrev=False, epilog=epilog,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    section = parser
    for each in classes:
        for field in dataclasses.fields(each):
            title = field.metadata.get("group")
            if title:
                section = parser.add_argument_group(title)
            name = field.name if field.name in positional else f"--{field.name}"
            # SUPPRESS: what is not typed is not among the results.
            section.add_argument(name, default=argparse.SUPPRESS, help=help_text(field),
                                 **how_to_read(field.type))
    return parser

def help_text(field):
    text, limits = field.metadata.get("help", ""), field.metadata.get("limits")
    if limits:
        low, high = limits
        text = f"[{low:g}, {high:g}] {text}"
    if field.default is not False and field.default not in ("", None):
        text += f" (default {field.default})"
    return text.replace("%", "%%")   # argparse takes % for the beginning of a name.

def how_to_read(field_type):
    """What argparse has to know about a flag of this type"""
    choices = get_args(field_type)
    if choices:
        return dict(choices=choices)
    if field_type is bool:
        return dict(action=argparse.BooleanOptionalAction)   # --compile and --no-compile
    if field_type is list:
        return dict(nargs="+", action="extend")
    return dict(type=not_empty if field_type is str else field_type)

def not_empty(word):
    """`--out "$RUN"` gives an empty word if the shell has no variable RUN."""
    if not word:
        raise argparse.ArgumentTypeError("is empty; give it a value, or leave it out")
    return word

def make_configs(classes, values):
    """A dict, of which a part may come from a file -> an instance of each class. What can't be is
    refused: field_problems says why, or the config's own method `problems`."""
    refuse_unknown(values, names_of(classes))
    made, bad = [], []
    for config_class in classes:
        own = names_of([config_class])
        config = config_class(**{name: value for name, value in values.items() if name in own})
        problems = field_problems(config)
        if not problems and hasattr(config, "problems"):   # It relies on values in their ranges.
            problems = config.problems()
        bad += problems
        made.append(config)
    if bad:
        refuse(*(f"{script()}: {sentence}" for sentence in bad))
    return made

# -------------------------------------------------------------------------- options: name:key=value

# A flag's value may be a name, and then values for what has this name. Of --residual
# hyper:kind=mhc,n=2, model.py finds the class by the name hyper, and calls
#
#     read_options("kind=mhc,n=2", defaults=dict(kind="lite", n=4),
#                  allowed=dict(kind=("lite", "mhc"), n=(1, 64)))
#
# Its result, dict(kind="mhc", n=2), goes to the __init__ of the class. There the defaults are, too.

def option_defaults(function):
    """The keyword arguments of a function or class, with their defaults: these are its options."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}

def read_options(text, defaults, allowed):
    """See above. A value gets the type of its default. ValueError, with a sentence, if there is no
    such option, or if it can't have this value"""
    found = {}
    if not text:
        return found
    for option in text.split(","):
        key, _, word = option.partition("=")
        if key not in defaults:
            known = ", ".join(f"{name}={default}" for name, default in defaults.items())
            raise ValueError(f"no option {key!r}; its options are {known or 'none'}")
        found[key] = option_value(key, word, defaults[key])
        problem = why_not_allowed(found[key], allowed.get(key))
        if problem:
            raise ValueError(f"option {option}: {problem}")
    return found

TRUTH = {"0": False, "false": False, "1": True, "true": True}

def option_value(key, word, default):
    """("n", "2", 4) -> 2, a whole number as 4 is. ValueError if the word stands for none"""
    wanted = type(default)
    try:
        return TRUTH[word.lower()] if wanted is bool else wanted(word)
    except (KeyError, ValueError):
        raise ValueError(f"option {key} must be {TYPE_NAMES[wanted]}, such as {default}") from None
