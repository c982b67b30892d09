"""
Where a program runs: its device, threads and memory, its processes, and the signals that stop it.
"""
import os
import signal
import sys

import torch
import torch.distributed as dist

from flags import environment, refuse
from model import fewest_weights

def pick_device(name):
    """auto | cpu | cuda -> cpu | cuda"""
    if name == "cuda" and not torch.cuda.is_available():
        refuse("--device cuda: torch sees no CUDA device; use --device cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"

def pick_threads(gpt, device, n_processes=1):
    """How many threads of the CPU this process uses from now on. Small models are faster with one,
    much so if other programs are busy. OMP_NUM_THREADS, if it is set, decides instead."""
    if "OMP_NUM_THREADS" not in os.environ and device == "cpu":
        small = gpt.n_embd < 512
        torch.set_num_threads(1 if small else max(1, torch.get_num_threads() // n_processes))
    return torch.get_num_threads()

def check_memory(model_config, config, processes):
    """Refuses what can't fit. It counts too little: weights with gradients and moments, the
    streams and logits of a micro-batch, and the validation windows."""
    sequences = config.batch_size // config.n_parts(processes.count)
    micro_tokens = sequences * model_config.block_size
    weights = 16 * fewest_weights(model_config)   # of four bytes, with gradient and two moments
    width = model_config.vocab_size + model_config.n_layer * model_config.n_embd
    need = weights + 4 * micro_tokens * width
    if processes.on_cuda:
        _, have = torch.cuda.mem_get_info()
    else:
        need += 16 * config.eval_windows * model_config.block_size
        have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > have:
        sizes = " ".join(f"--{name} {getattr(model_config, name)}"
                         for name in ("n_layer", "n_embd", "block_size"))
        refuse(f"{sizes} --batch_size {config.batch_size}: take {need / 1e9:,.0f} GB of memory or "
               f"more, and there are {have / 1e9:,.0f}; make one of them smaller")

# ------------------------------------------------------------------------------- several processes

class Processes:
    """All processes of this run, and which one this is. Where there is only one, they agree."""
    def __init__(self, device, rank, count):
        self.device, self.rank, self.count = device, rank, count
        self.on_cuda = device != "cpu"

    def wait(self):
        """until all are here"""
        if self.count > 1:
            dist.barrier()

    def highest(self, number):
        """of the numbers that the processes say: how they agree that one has to stop"""
        if self.count == 1:
            return number
        number = torch.tensor(number)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return number.item()

    def mean(self, x):
        if self.count > 1:
            dist.all_reduce(x)
            x /= self.count
        return x

def join_processes(config):
    """-> Processes. torchrun has started them, and says in the environment which one this is."""
    rank, count = environment("RANK", 0), environment("WORLD_SIZE", 1)
    device = pick_device(config.device)
    if device == "cuda":
        device = f"cuda:{environment('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    if rank >= count:
        refuse(f"RANK={rank}: must be below WORLD_SIZE={count}; start with torchrun")
    if count > 1:
        if not {"MASTER_ADDR", "MASTER_PORT", "RANK"} <= os.environ.keys():
            refuse(f"WORLD_SIZE={count}: the processes can't find each other; start them with "
                   f"torchrun")
        try:
            dist.init_process_group("cpu:gloo,cuda:nccl" if "cuda" in device else "gloo")
        except (ValueError, dist.DistNetworkError) as error:   # no port, or one that is in use
            what = " ".join(str(error).split())[:200]
            refuse(f"MASTER_PORT={os.environ['MASTER_PORT']}: {what}; start with torchrun, or name "
                   f"another port")
    return Processes(device, rank, count)

# ----------------------------------------------------------------------------------------- signals

def note_signals():
    """-> a list that gets the numbers of signals. One ends a run after its step, a second one ends
    it at once."""
    signals = []
    def note(number, frame):
        signals.append(number)
        if len(signals) > 1:
            sys.exit(128 + number)
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        if signal.getsignal(number) is not signal.SIG_IGN:   # as nohup wants it
            signal.signal(number, note)
    return signals
