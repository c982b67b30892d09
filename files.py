"""
How files are written: whole or not at all, and by one process at a time. Neither a full disk nor a
kill nor a second terminal leaves a file that is half written, or half one and half another.
"""
import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from sentences import refuse

@contextlib.contextmanager
def explain_write_errors(path):
    """with explain_write_errors(path): what fails to be written there ends with a sentence."""
    try:
        yield
    except (OSError, RuntimeError) as error:   # torch.save says RuntimeError when the disk is full.
        refuse(f"{path}: can't be written ({error}); make room, or take another --out")

def write_file(path, write):
    """write_file("ckpt.pt", lambda f: torch.save(state, f)) writes to a new file. Only when that is
    whole and on the disk, it gets the name ckpt.pt. So a kill or a full disk leaves the old one."""
    path = Path(path)
    unfinished = path.with_name(".unfinished-" + path.name)
    with explain_write_errors(path):
        unfinished.unlink(missing_ok=True)   # of a program that was killed
        try:
            with open(unfinished, "xb") as f:   # x: it is new, and no link to another file.
                write(f)
                f.flush()
                os.fsync(f.fileno())
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)

def write_text(path, text):
    write_file(path, lambda f: f.write(text.encode()))

def take_lock(path, taken):
    """Opens a file and locks it -> the file. The lock lasts until it is closed, or this process
    ends. SystemExit with the sentence `taken` if another process has the lock"""
    file = open(path, "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        refuse(taken)
    except OSError:   # Some network disks have no locks. There, don't use two terminals.
        pass
    return file

@contextlib.contextmanager
def unfinished_folder(out):
    """with unfinished_folder(out) as folder: a new folder inside `out`, for several files that
    belong together. (Both are a Path.) Make the files in it, and move them to `out` when all are
    whole; what remains in it is deleted. `out` is made if it isn't there.

    SystemExit if another process is in its with-block for the same `out`"""
    os.makedirs(os.path.realpath(out), exist_ok=True)   # realpath: it may be a link to a new folder
    with take_lock(out / "lock", f"--out {out}: another prepare.py is writing there; wait for it, "
                                 f"or take another --out"):
        for abandoned in out.glob(".unfinished-*"):   # by a prepare.py that was killed
            shutil.rmtree(abandoned, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=out) as folder:
            yield Path(folder)
