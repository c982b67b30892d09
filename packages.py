"""
Each script imports this first. If a package is missing, it says what to type.
"""
import shlex
import sys

try:
    import fcntl   # It comes with Python, but not on Windows. It locks files.
    import numpy
    import tiktoken
    import torch
except ModuleNotFoundError as error:
    remedy = f"type make .venv/installed, and then .venv/bin/python {shlex.join(sys.argv)}"
    if error.name == "fcntl":
        remedy = "on Windows, use WSL"
    raise SystemExit(f"This Python has no {error.name}; {remedy}")
