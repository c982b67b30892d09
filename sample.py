"""
Samples from a trained run.

    python sample.py runs/code --prompt "def " --temperature 0.6 --top_k 50
    python sample.py runs/nag --skip_below 0.1     # tokens skip sublayers with smaller gates
    python sample.py runs/pre --remove 4,5         # without blocks 4 and 5
    python sample.py runs/nag --depth              # colors: the share of sublayers that ran
    python sample.py runs/steps-pre --prompt f314159265358 --inside   # the puzzle, block by block

Tokens skip as in training (--mod) unless --skip_below says otherwise. Blocks count from 0.
"""

import codecs
import os
import re
import sys
import time
from dataclasses import dataclass
from typing import Literal

import torch

import prepare
from flags import UserError, flag, make, parse, run
from model import GatePolicy, Trace
from train import fork_rng, load_checkpoint, open_run, set_up_device

@dataclass
class SampleConfig:
    run: str = flag("", "run folder, made by train.py")
    prompt: str = flag("", "text to continue, or a file with it; default: start of a document")
    max_new_tokens: int = flag(300, "tokens per sample", 1, 1e9)
    num_samples: int = flag(1, "number of samples", 1, 1e9)
    temperature: float = flag(0.8, "0: always the likeliest token", 0, 1e6)
    top_k: int = flag(0, "sample from the k likeliest tokens; 0: from all", 0, 1e9)
    seed: int = flag(1337, "of the samples", 0, 2 ** 31 - 1)
    skip_below: float = flag(0.0, "nag: skip sublayers with a smaller |gate|; 0: as in training",
                             0, 100)
    remove: str = flag("", "blocks to leave out, such as 4,5")
    depth: bool = flag(False, "color new tokens by the share of sublayers that ran to predict them")
    inside: bool = flag(False, "the puzzle: print what a probe reads after each block")
    data: str = flag("", "for --inside: data set of the run, if it has moved")
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "auto: cuda if there is one")

def main(argv=None):
    config = make(SampleConfig, parse([SampleConfig], argv, __doc__, positional="run"))
    if os.path.isfile(config.prompt):
        config.prompt = prepare.read_text(config.prompt)
    if config.inside and (config.skip_below or config.remove):
        raise UserError("--inside: leave out --skip_below and --remove")
    device = set_up_device(config)
    with fork_rng(device):
        model, settings = open_run(config.run, device)
        tokenizer = prepare.get_tokenizer(load_checkpoint(config.run)["meta"]["tokenizer"])
        torch.manual_seed(config.seed)
        if config.inside:
            print_inside(model, config.data or settings["data"], config.prompt.strip())
        else:
            print_samples(model, tokenizer, config)

# -----------------------------------------------------------------------------
# samples

def what_to_skip(model, config):
    """-> the policy that decides which tokens skip, and the layer_idx of removed sublayers"""
    policy = model.policy
    if config.skip_below > 0:
        if not hasattr(model.final, "gate"):
            raise UserError(f"--skip_below: {model.config.residual} has no gate; use nag")
        policy = GatePolicy(model.config, below=config.skip_below).to(model.rotary.device)
    names = [str(i) for i in range(model.config.n_layer)]
    blocks = set(config.remove.split(",")) if config.remove else set()
    if not blocks < set(names):
        raise UserError(f"--remove {config.remove}: give some of the blocks 0 to {names[-1]}, "
                        f"such as 4,5")
    removed = [layer_idx for i, block_idx in enumerate(model.block_order)
               for layer_idx in (2 * i, 2 * i + 1) if str(block_idx) in blocks]
    return policy, removed

def print_samples(model, tokenizer, config):
    policy, removed = what_to_skip(model, config)
    prompt = tokenizer.encode_ordinary(config.prompt) or [tokenizer.eot_token]
    idx = torch.tensor([prompt], device=model.rotary.device)
    for _ in range(config.num_samples):
        traces = []   # one for each new token: of the forward pass that predicted it

        def make_trace():
            traces.append(Trace(model, policy, removed))
            return traces[-1]

        start = time.perf_counter()
        text = model.generate(idx, config.max_new_tokens, config.temperature, config.top_k or None,
                              n_vocab=tokenizer.n_vocab, make_trace=make_trace)
        tokens = text[0, len(prompt):].tolist()
        seconds = time.perf_counter() - start
        shares = [run_share(trace) for trace in traces]
        print(config.prompt + to_text(tokens, shares if config.depth else None, tokenizer))
        print(f"{len(tokens) / seconds:,.0f} tokens/s, {1 - sum(shares) / len(shares):.1%} skipped",
              file=sys.stderr)

def run_share(trace):
    """The share of the sublayers that ran for the last token of a forward pass"""
    # None: all tokens ran. False: the sublayer is removed.
    ran = [mask is None or (mask is not False and mask[0, -1].item()) for mask in trace.masks]
    return sum(ran) / len(ran)

def to_text(tokens, shares, tokenizer):
    """The tokens before the end of the document -> text, in color if there are shares"""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")   # a character may be several tokens
    text = ""
    for i, token in enumerate(tokens):
        if token == tokenizer.eot_token:
            break
        piece = decoder.decode(tokenizer.decode_single_token_bytes(token))
        text += color(piece, shares[i]) if shares else piece
    return text + decoder.decode(b"", final=True)

# 256-color terminals: background and text color, from half of the sublayers or fewer to all
SHADES = [(231, 16), (153, 16), (111, 16), (69, 16), (27, 231), (20, 231), (17, 231)]

def color(text, share):
    if not text.strip():
        return text
    background, foreground = SHADES[max(0, round((2 * share - 1) * (len(SHADES) - 1)))]
    return f"\033[38;5;{foreground};48;5;{background}m{text}\033[0m"

# -----------------------------------------------------------------------------
# the puzzle (see prepare.py), block by block

def print_inside(model, data, line):
    puzzle = prepare.load_meta(data).get("steps")
    if puzzle is None:
        raise UserError(f"--inside: {data} isn't the puzzle, which prepare.py steps makes")
    n_digits, last_letter = puzzle["cells"], chr(ord("a") + puzzle["most"])
    if not re.fullmatch(f"[a-{last_letter}][0-9]{{{n_digits}}}", line):
        raise UserError(f"--inside: --prompt must be a letter from a to {last_letter} and "
                        f"{n_digits} digits")
    after = [torch.tensor([int(digit) for digit in line[1:]])]   # after[i]: digits after i steps
    for _ in range(puzzle["most"]):
        after.append(prepare.next_line(after[-1], puzzle["table"]))
    asked = ord(line[0]) - ord("a")

    from analyze import lines_inside   # here, because sampling needs no matplotlib
    print(f"\n{line}: {line[0]} asks for the line after {count_steps(asked)}. A linear probe reads "
          f"in the stream:\n")
    for block_idx, digits, steps in lines_inside(model, data, line):
        read = "-" if steps is None else f"{mark(digits, after[steps])}  after {count_steps(steps)}"
        print(f"  block {block_idx:<4}{read}")
    # The next line starts with any letter; its digits are the answer.
    idx = torch.tensor([[*f"{line}\na".encode()]], device=model.rotary.device)
    idx = model.generate(idx, n_digits, temperature=0, n_vocab=256)
    answer = re.sub("[^0-9]", "?", bytes(idx[0, -n_digits:].tolist()).decode("latin1"))
    print(f"  answer    {mark(answer, after[asked])}  (!: a wrong digit)\n")

def count_steps(n):
    return f"{n} step" if n == 1 else f"{n} steps"

def mark(digits, right):   # "31", [3, 4] -> "3 1!": wrong digits get a !
    return "".join(digit + (" " if digit == str(wanted) else "!")
                   for digit, wanted in zip(digits, right.tolist()))

if __name__ == "__main__":
    run(main)
