"""
Where a program runs: its device and threads, its processes, and the signals that stop it.
"""
import contextlib
import os
import signal

import torch
import torch.distributed as dist

from flags import environment, refuse

def pick_device(name):
    """auto | cpu | cuda -> cpu | cuda"""
    if name == "cuda" and not torch.cuda.is_available():
        refuse("--device cuda: torch sees no CUDA device; use --device cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"

def pick_threads(config, device):
    """Small models are faster with one thread of the CPU, much so if other programs are busy.
    OMP_NUM_THREADS, if it is set, decides instead. (torchrun sets it.)"""
    if "OMP_NUM_THREADS" not in os.environ and device == "cpu" and config.n_embd < 512:
        torch.set_num_threads(1)

# ------------------------------------------------------------------------------- several processes

def join_processes(config):
    """-> Processes. torchrun has started them, and says in the environment which one this is."""
    rank, count = environment("RANK", 0), environment("WORLD_SIZE", 1)
    device = pick_device(config.device)
    if device == "cuda":
        device = f"cuda:{environment('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    if count > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if "cuda" in device else "gloo")
    return Processes(device, rank, count)

class Processes:
    """All processes of this run, and which one this is: its device, its rank (0 is the first), and
    their count. What they agree on is simple if there is only one."""
    def __init__(self, device, rank, count):
        self.device, self.rank, self.count = device, rank, count
        self.on_cuda = device != "cpu"

    def wait(self):
        """Until all processes are here"""
        if self.count > 1:
            dist.barrier()

    def highest(self, number):
        """Each process says a number -> the highest. So they agree that one of them has to stop."""
        if self.count == 1:
            return number
        number = torch.tensor(number)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return number.item()

    def mean(self, number):
        """Each process says a number -> their mean"""
        if self.count == 1:
            return number
        number = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(number)
        return number.item() / self.count

# --------------------------------------------------------------------- what a process is left with

@contextlib.contextmanager
def torch_as_it_was(device):
    """After the with-block, torch has the threads and random numbers of before it. (For notebooks,
    in which other work goes on.)"""
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng([] if str(device) == "cpu" else [device]):
            yield
    finally:
        torch.set_num_threads(threads)

@contextlib.contextmanager
def noted_signals():
    """with noted_signals() as signals: Ctrl-C or a kill ends nothing at first. Its number gets into
    this list, so that the run can save and stop. The second time, it does what it always does."""
    signals, before = [], {}
    def note(number, frame):
        signals.append(number)
        signal.signal(number, before[number])
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        if signal.getsignal(number) is not signal.SIG_IGN:   # nohup has SIGHUP ignored.
            before[number] = signal.signal(number, note)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
