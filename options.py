"""
Options: --residual hyper:kind=mhc,n=2 names a class, and gives keyword arguments of its __init__.
model.py finds the class by its name, hyper, and calls

    read_options("kind=mhc,n=2", defaults=dict(kind="lite", n=4),
                 allowed=dict(kind=("lite", "mhc"), n=(1, 64)))

Its result, dict(kind="mhc", n=2), goes to __init__. The defaults are those of __init__: each is a
number, a bool or a word. What is allowed is an attribute of the class.
"""
import inspect

from flags import TYPE_NAMES, why_not_allowed

def option_defaults(function):
    """The keyword arguments of a function or class, with their defaults: these are its options."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}

def as_text(options):
    """dict(kind="lite", n=4) -> kind=lite,n=4"""
    return ",".join(f"{key}={value}" for key, value in options.items())

def list_options(registry):
    """For --help: all names in a registry such as RESIDUALS, each with its options"""
    lines = []
    for name, function in registry.items():
        options = as_text(option_defaults(function))
        lines.append(f"  {name}:{options}" if options else f"  {name}")
    return "\n".join(lines)

def read_options(text, defaults, allowed):
    """See above. A value gets the type of its default. allowed: the choices or the range of each.
    ValueError, with a sentence, if there is no such option, or if it can't have this value"""
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
    """("n", "2", 4) -> 2, a whole number as the default 4. ValueError if the word is none"""
    wanted = type(default)
    try:
        return TRUTH[word.lower()] if wanted is bool else wanted(word)
    except (KeyError, ValueError):
        raise ValueError(f"option {key} must be {TYPE_NAMES[wanted]}, such as {default}") from None
