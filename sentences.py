"""
What a program says to its user: lines of text, and sentences about what the user can mend.
"""
import os
import sys

def refuse(*sentences):
    """Ends the program with sentences for the user, a line each. `start` prints them."""
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
    """Runs a script: main() -> exit status, or None. What a user can mend is told in a sentence, by
    each process that has found it. A mistake in the code shows its traceback."""
    if sys.stdout:   # None if it is closed
        sys.stdout.reconfigure(errors="backslashreplace")   # for a terminal that knows ASCII only
    sentence = None
    try:
        status = main() or 0
    except KeyboardInterrupt:
        status = 130   # what shells expect of Ctrl-C
    except BrokenPipeError:   # A reader of stdout, such as head, has had enough.
        mute(sys.stdout)
        status = 0
    except SystemExit as end:
        status = end.code or 0
        if isinstance(status, str):   # the sentences of `refuse`
            sentence, status = status, 1
    except (OSError, MemoryError, RuntimeError) as error:
        remedy = remedy_of(error)
        if not remedy:
            raise
        sentence, status = f"{script()}: {remedy}", 1
    if sentence:
        print(sentence, file=sys.stderr, flush=True)
    if "RANK" in os.environ:   # A tidy exit may abort in a thread of torch, though all is saved.
        os._exit(status)
    sys.exit(status)

def remedy_of(error):
    """What a user can do about an error; None if it may be a mistake in the code. torch has no
    types for most of them, so this looks for words in what it says."""
    text = f"{type(error).__name__} {error}".lower()
    if isinstance(error, OSError):
        return str(error)
    if isinstance(error, MemoryError) or "allocate" in text or "out of memory" in text:
        return ("out of memory; make the model, the batch (or, with --grad_accum, its parts), the "
                "context or the text smaller")
    if "c++ compiler" in text or "c compiler" in text:   # what torch says, and what triton says
        return "torch can't compile here; install a C compiler, or add --no-compile"
    if text.startswith("dist") or "gloo" in text or "nccl" in text:   # DistBackendError and others
        why = str(error).partition("\n")[0]
        return (f"another process of this run has ended, or can't be reached ({why}); see what it "
                f"says, or give torchrun another --master_port")
    return None
