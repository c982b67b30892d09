"""
What a program says to its user: lines of text, and sentences about what the user can mend.
"""
import os
import sys

def refuse(*sentences):
    """Ends the program: Python prints these sentences to stderr, a line each, and exits with 1."""
    raise SystemExit("\n".join(sentences))

def from_torchrun(name, default):
    """A number that torchrun puts into the environment of a process. RANK is 0 in the first one."""
    return int(os.environ.get(name, default))

def say(text, file=None):
    """Prints, in the first of several processes. file: without it stdout"""
    if from_torchrun("RANK", 0) == 0:
        try:
            print(text, file=file, flush=True)
        except OSError:   # It is closed or full. That is no reason to end a training.
            mute(file or sys.stdout)

def mute(file):
    """From now on, what is printed there goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())

def printable(text):
    """A model may write characters that do something to a terminal. They become question marks."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)

def script():
    """The name of the file that is run, such as train.py"""
    return os.path.basename(sys.argv[0])

def start(main):
    """Runs a script: main() -> exit status, or None. What a user can mend is told in a sentence (by
    all processes that have found it). A mistake in the code shows its traceback."""
    if sys.stdout:   # None if it is closed
        sys.stdout.reconfigure(errors="backslashreplace")   # for a terminal that knows ASCII only
    try:
        status = main()
    except KeyboardInterrupt:
        status = 130   # what shells expect of Ctrl-C
    except BrokenPipeError:   # A reader of stdout, such as head, has had enough.
        mute(sys.stdout)
        status = 0
    except (OSError, MemoryError, RuntimeError) as error:
        remedy = remedy_of(error)
        if not remedy:
            raise
        status = f"{script()}: {remedy}"
    sys.exit(status)   # If that is a sentence, Python prints it and exits with 1.

# torch has few types for what a user can mend. So these are words in what it says, and a remedy.
REMEDIES = [
    (["MemoryError", "out of memory", "allocate memory"],
     "out of memory; make the model, the batch (or, with --grad_accum, its parts), the context or "
     "the text smaller"),
    (["C++ compiler", "C compiler"],
     "torch can't compile here; install a C compiler, or add --no-compile"),
    (["gloo", "DistBackendError", "DistNetworkError", "DistStoreError"],
     "another process of this run has ended, or can't be reached; see what it says, or give "
     "torchrun another --master_port")]

def remedy_of(error):
    """What a user can do about an error; None if it may be a mistake in the code"""
    if isinstance(error, OSError):
        return str(error)
    text = f"{type(error).__name__}: {error}"
    for words, remedy in REMEDIES:
        if any(each in text for each in words):
            return f"{remedy} ({text.splitlines()[0]})"
    return None
