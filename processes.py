"""
Where a program runs: its device and threads, its processes, and the signals that stop it.
"""
import atexit
import contextlib
import os
import signal
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sentences import refuse

# ------------------------------------------------------------------------------ device and threads

def pick_device(name):
    """auto | cpu | cuda -> cpu | cuda"""
    if name == "cuda" and not torch.cuda.is_available():
        refuse("--device cuda: torch sees no CUDA device; use --device cpu")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name

def set_threads(n_embd, device):
    """Small models are faster with one thread of the CPU, much so if other programs are busy.
    OMP_NUM_THREADS, if it is set, decides instead. (torchrun sets it.)"""
    if "OMP_NUM_THREADS" not in os.environ and device == "cpu" and n_embd < 512:
        torch.set_num_threads(1)

@contextlib.contextmanager
def torch_as_it_was(device):
    """After the with-block, torch has the threads and random numbers of before it: whoever calls
    train.main in a notebook does other work there, too. device: as Processes has it"""
    threads = torch.get_num_threads()
    gpus = [] if device == "cpu" else [device]
    try:
        with torch.random.fork_rng(gpus):   # It gives the random numbers back.
            yield
    finally:
        torch.set_num_threads(threads)

# ------------------------------------------------------------------------------- several processes

def from_torchrun(name, default):
    """torchrun starts the processes, and puts some numbers into the environment of each."""
    return int(os.environ.get(name, default))

def join_processes(device):
    """-> Processes. device: auto, cpu or cuda"""
    rank, count = from_torchrun("RANK", 0), from_torchrun("WORLD_SIZE", 1)
    device = pick_device(device)
    if device == "cuda":
        device = f"cuda:{from_torchrun('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    if count > 1:   # gloo is for numbers on the CPU (see `mean`), nccl for gradients on GPUs.
        dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
        atexit.register(dist.destroy_process_group)   # No thread of torch may outlive Python.
    return Processes(device, rank, count)

@dataclass
class Processes:
    """All processes of this run. Each calls the same methods at the same time."""
    device: str   # of this process: cpu, cuda:0, ..
    rank: int     # its number; 0 is the first
    count: int    # of all

    def wait(self):
        """Until all processes are here: the first one may still be writing the data, say."""
        if self.count > 1:
            dist.barrier()

    def mean(self, number):
        """Each process gives a number, such as a loss -> their mean"""
        if self.count == 1:
            return number
        total = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item() / self.count

# ----------------------------------------------------------------------------------------- signals

@contextlib.contextmanager
def noted_signals():
    """with noted_signals() as signals: Ctrl-C or a kill only adds its number to this list, so that
    a training can save and stop. The same one again acts as usual."""
    signals, usual = [], {}

    def note(number, frame):
        signals.append(number)
        signal.signal(number, usual[number])

    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        if signal.getsignal(number) is not signal.SIG_IGN:   # nohup has SIGHUP ignored.
            usual[number] = signal.signal(number, note)   # signal.signal returns what was before.
    try:
        yield signals
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
