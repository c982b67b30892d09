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
        value = getattr(config, field.name)
        allowed = get_args(field.type) or field.metadata.get("limits")   # choices, or a range
        why = why_wrong_type(value, field.type) or why_not_allowed(value, allowed)
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
    """A reason, or None if the value is allowed. allowed: ("a", "b") are choices, (1, 64) is a
    range, and None allows all"""
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
    """A dict -> an instance of each class. Impossible values end the program, with all sentences of
    field_problems and of a config's own `problems`. (Values that stand in a file, such as
    configs/gpt2.json, are checked like those that are typed.)"""
    for name in values:
        if name not in names_of(classes):
            refuse_unknown(f"--{name}", classes)
    configs, problems = [], []
    for config_class in classes:
        own = {name: values[name] for name in names_of([config_class]) if name in values}
        config = config_class(**own)
        found = field_problems(config)
        if not found and hasattr(config, "problems"):   # These rely on values in their ranges.
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
