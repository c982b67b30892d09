"""
A folder that one prepare.py at a time writes to. So two terminals don't mix their data sets. And a
file is made in a folder inside of it, and moved up when it is whole: so a full disk, Ctrl-C or a
kill leaves no half a file.
"""
import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from sentences import refuse

@contextlib.contextmanager
def unfinished_folder(out):
    """with unfinished_folder(out) as folder: a new folder inside `out`, a Path. Make files in it,
    and move them to `out` when they are whole; what remains in it is deleted. `out` is made if it
    isn't there.

    SystemExit if another prepare.py is in its with-block for the same `out`"""
    os.makedirs(os.path.realpath(out), exist_ok=True)   # realpath: it may be a link to a new folder
    with open(out / "lock", "a") as lock:
        lock_or_refuse(lock, out)
        for abandoned in out.glob(".unfinished-*"):   # by a prepare.py that was killed
            shutil.rmtree(abandoned, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=out) as folder:
            yield Path(folder)

def lock_or_refuse(lock, out):
    """Locks an open file. The lock ends when the file is closed, and so when a process is killed.
    SystemExit if another process has it"""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        refuse(f"--out {out}: another prepare.py is writing there; wait for it, or take another "
               f"--out")
    except OSError:   # Some network disks have no locks. There, don't use two terminals.
        pass
