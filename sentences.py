"""
What a program says to its user: lines of text, and sentences about what the user can mend.
"""
import os
import sys

def refuse(*sentences):
    """Ends the program: Python prints these sentences to stderr, a line each, and exits with 1."""
    raise SystemExit("\n".join(sentences))

def say(text, file=None):
    """Prints; of several processes, only the first one does. A training goes on if what it prints
    goes nowhere, because its terminal is closed. file: without it stdout"""
    if os.environ.get("RANK", "0") == "0":   # torchrun numbers the processes.
        try:
            print(text, file=file, flush=True)
        except OSError:
            mute(file or sys.stdout)

def mute(file):
    """From now on, what is printed there goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())

def printable(text):
    """A model may write characters that do something to a terminal. Each of them becomes a question
    mark. Only the ends of lines stay."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)

def script():
    """The name of the file that is run, such as train.py"""
    return os.path.basename(sys.argv[0])

# Words in an error's name or text -> a remedy. (Words, because torch's errors are RuntimeErrors.)
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
    """A sentence about an error that a user can mend; None if it may be a mistake in the code"""
    if isinstance(error, OSError):
        return str(error)
    text = f"{type(error).__name__}: {error}"
    for words, remedy in REMEDIES:
        if any(each in text for each in words):
            return f"{remedy} ({text.splitlines()[0]})"
    return None

class Mistake(ValueError):
    """A mistake in a class that the user wrote. `start` prints it without a traceback."""

def start(main):
    """Runs a script: main() -> exit status, or None. An error that a user can mend, such as a file
    that isn't there, becomes a sentence. All others show their traceback."""
    if sys.stdout:   # None if it is closed
        sys.stdout.reconfigure(errors="backslashreplace")   # for a terminal that knows ASCII only
    try:
        sys.exit(main())
    except Mistake as error:
        refuse(f"{script()}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)   # what shells expect of Ctrl-C
    except BrokenPipeError:   # The reader, such as head, has closed the pipe.
        mute(sys.stdout)
    except (OSError, MemoryError, RuntimeError) as error:
        remedy = remedy_of(error)
        if not remedy:
            raise
        refuse(f"{script()}: {remedy}")
