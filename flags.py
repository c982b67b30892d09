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
from typing import get_args

from sentences import refuse, script

# ---------------------------------------------------------------------------- fields of a dataclass

def flag(default, help="", low=None, high=None, group=None):
    """A field of a config. low, high: the range of a number, both or neither; group: the title of a
    section of --help, which begins with this flag"""
    limits = None if low is None else (low, high)
    return dataclasses.field(default=default, metadata=dict(help=help, limits=limits, group=group))

TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}

def field_problems(config):
    """-> a sentence for each field that can't have the value it has"""
    problems = []
    for field in dataclasses.fields(config):
        value, choices = getattr(config, field.name), get_args(field.type)
        why = why_wrong_type(value, field.type)
        why = why or why_not_allowed(value, choices or field.metadata.get("limits"))
        if why:
            problems.append(f"--{field.name} {value!r}: {why}")
    return problems

def why_wrong_type(value, wanted):
    """A reason, or None. A value that was typed has the type of its flag. One that stands in a file
    such as configs/gpt2.json may have another."""
    types = (float, int) if wanted is float else (wanted,)   # A file may say 1 for 1.0.
    if wanted in TYPE_NAMES and type(value) not in types:   # isinstance would take True for an int.
        return f"must be {TYPE_NAMES[wanted]}"
    return None

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

# ------------------------------------------------------------------------------------ command line

def parse(classes, argv=None, doc=None, positional=()):
    """Command line -> an instance of each config class. Impossible values end the program.
    (train.py calls the two functions itself: in between, it adds settings of an earlier run.)

    argv: a list of words; None: those that are typed; doc: for --help; positional: names of fields
    that are given without --"""
    return make_configs(classes, read_command_line(classes, argv, doc, positional))

def make_configs(classes, values):
    """A dict, of which a part may come from a file -> an instance of each class. Impossible values
    end the program, with all sentences of field_problems and of a config's own `problems`."""
    for name in values:
        if name not in names_of(classes):   # A file may have such a name.
            refuse_unknown(f"--{name}", classes)
    configs, problems = [], []
    for config_class in classes:
        own = {name: values[name] for name in names_of([config_class]) if name in values}
        config = config_class(**own)
        found = field_problems(config)
        if not found and hasattr(config, "problems"):   # It relies on values in their ranges.
            found = config.problems()
        problems += found
        configs.append(config)
    if problems:
        refuse(*(f"{script()}: {problem}" for problem in problems))
    return configs

class Parser(argparse.ArgumentParser):
    def error(self, message):
        refuse(f"{script()}: {message}; see --help")

def read_command_line(classes, argv=None, doc=None, positional=(), epilog=None):
    """-> what is typed, a dict; what isn't typed is not in it. epilog: a text, the end of --help"""
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
    typed, not_known = parser.parse_known_args(argv)
    if not_known:
        refuse_unknown(not_known[0].split("=")[0], classes)
    return vars(typed)

def names_of(classes):
    return [field.name for each in classes for field in dataclasses.fields(each)]

def refuse_unknown(flag_name, classes):
    """Ends the program: there is no such flag."""
    known = ["--help", *(f"--{name}" for name in names_of(classes))]
    near = difflib.get_close_matches(flag_name, known, 1)
    hint = f", did you mean {near[0]}?" if near else "; see --help"
    refuse(f"{script()}: {flag_name}: unknown flag{hint}")

def help_text(field):
    text, limits = field.metadata.get("help", ""), field.metadata.get("limits")
    if limits:
        low, high = limits
        text = f"[{low:g}, {high:g}] {text}"
    if field.default not in ("", None):
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

# -------------------------------------------------------------------------- options: name:key=value

# A flag's value may be a name, and then values for what has this name. Take --residual
# hyper:kind=mhc,n=2. Who finds a class by the name hyper calls
#
#     read_options("kind=mhc,n=2", defaults=dict(kind="lite", n=4),
#                  allowed=dict(kind=("lite", "mhc"), n=(1, 64)))
#
# Its result, dict(kind="mhc", n=2), goes to the __init__ of the class. The defaults are those of
# __init__. Each is a number, a bool or a word.

def option_defaults(function):
    """The keyword arguments of a function or class, with their defaults: these are its options."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}

def as_text(options):
    """dict(kind="lite", n=4) -> kind=lite,n=4"""
    return ",".join(f"{key}={value}" for key, value in options.items())

def list_options(registry):
    """For --help: all names in RESIDUALS, say, each with its options"""
    lines = []
    for name, function in registry.items():
        options = as_text(option_defaults(function))
        lines.append(f"  {name}:{options}" if options else f"  {name}")
    return "\n".join(lines)

def read_options(text, defaults, allowed):
    """See above. A value gets the type of its default. ValueError, with a sentence, if there is no
    such option, or if it can't have this value"""
    found = {}
    if not text:
        return found
    for option in text.split(","):
        key, _, word = option.partition("=")
        if key not in defaults:
            raise ValueError(f"no option {key!r}; its options are {as_text(defaults) or 'none'}")
        found[key] = option_value(key, word, defaults[key])
        why = why_not_allowed(found[key], allowed.get(key))
        if why:
            raise ValueError(f"option {option}: {why}")
    return found

TRUTH = {"0": False, "false": False, "1": True, "true": True}

def option_value(key, word, default):
    """("n", "2", 4) -> 2, a whole number as 4 is. ValueError if the word stands for none"""
    wanted = type(default)
    try:
        return TRUTH[word.lower()] if wanted is bool else wanted(word)
    except (KeyError, ValueError):
        raise ValueError(f"option {key} must be {TYPE_NAMES[wanted]}, such as {default}") from None
