"""
Starts our programs for the tests. `program` is `python WORDS...` in a process of its own, forked from a
server that has imported torch already, which most programs of the tests would spend their time on.
"""
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(["torch", "torch._dynamo", "tiktoken", "matplotlib.figure", "pytest"])


def run(words, cwd, env, out, err):
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, path in (1, out), (2, err):
        os.dup2(os.open(path, os.O_WRONLY), number)
    sys.stdin = open(os.devnull)
    sys.argv, sys.path[0] = list(words), str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


def program(*words, cwd=ROOT, env=None, timeout=None):
    """-> subprocess.CompletedProcess, text. What is no file (-c, -m) gets an interpreter of its own."""
    words = [str(word) for word in words]
    if not words[0].endswith(".py"):
        return subprocess.run([sys.executable, *words], cwd=cwd, env=env, timeout=timeout, text=True,
                              capture_output=True)
    with contextlib.ExitStack() as files:
        out, err = (files.enter_context(tempfile.NamedTemporaryFile("r")) for _ in range(2))
        process = server.Process(target=run, args=(words, cwd, dict(env or os.environ), out.name, err.name))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(words, timeout)
        return subprocess.CompletedProcess(words, process.exitcode, out.read(), err.read())


def start(*words):
    """-> a running process, for signals. In the background, as make test is, a shell has SIGINT ignored."""
    return subprocess.Popen([sys.executable, *map(str, words)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
