"""
Sample from a run: its text goes to stdout as it comes, everything about it to stderr.

    python sample.py runs/nag --prompt "def " --temperature 0.8 --top_k 50
    python sample.py runs/nag --skip 0.25 --depth    # colours: the share of sublayers that ran for a token
    python sample.py runs/pre --exit 0.9             # a token stops at the block whose prediction is sure
    python sample.py runs/pre --remove 9,10          # without these two blocks
"""
import codecs
import math
import sys
import time
from dataclasses import dataclass
from typing import Literal

import torch
import prepare
from model import LEAST_SKIPPED, all_run, by_threshold, ran_shares, without
from runs import parse, pick_device, start
from train import open_run, share_run

@dataclass
class SampleConfig:
    run: str = ""                # run folder, made by train.py
    prompt: str = ""             # text to continue; without it, the start of a document
    max_new_tokens: int = 300    # [1, 1e9] tokens per sample
    num_samples: int = 1         # [1, 1e9] samples, one after the other
    temperature: float = 0.8     # [0, 1e6] 0: always the likeliest token
    top_k: int = 0               # [0, 1e9] draw from the k likeliest tokens only; 0: from all
    seed: int = 1337             # [0, 9e18] of the draws
    # depth
    skip: float = -1.0           # [-1, 0.99] share of the sublayer runs to skip; 0: none; below: as trained
    exit: float = 1.0            # [0, 1] a token stops when its prediction has this probability; 1: never
    remove: str = ""             # blocks to remove, from 1, as analyze.py numbers them: 9,10,11
    depth: bool = False          # colour each token by the share of the sublayers that ran for it
    # machine
    which: Literal["ckpt.pt", "best.pt"] = "ckpt.pt"    # the last checkpoint, or the best one
    device: Literal["auto", "cpu", "cuda"] = "auto"     # auto: cuda where there is one

    def problems(self):
        if self.skip >= 0 and self.exit < 1:
            yield "--skip and --exit: each decides by itself who runs; give one of them"
        if any("\ud800" <= letter <= "\udfff" for letter in self.prompt):
            yield "--prompt: is not UTF-8 text; convert it first"

# ----------------------------------------------------------------------------- early exit, and who decides

class EarlyExit:
    """A `decide`: before each block but the first, a token exits if the head is sure of its successor. It
    runs no further sublayer, but still makes keys and values there, because later tokens may go deeper and
    look for them. This is why an exit is an answer of `decide`, and not an end of the walk."""
    def __init__(self, model, confidence):
        self.model, self.confidence = model, confidence   # the head's probability from which on a token exits
        self.l = math.inf   # the sublayer that was asked about last
        self.looks = 0      # how often the head has looked at a stream, which costs FLOPs

    def __call__(self, l, residual, stream):
        if l <= self.l:   # A new pass begins.
            shape = self.model.ends.as_tensor(stream).shape[:2]
            self.inside = torch.ones(shape, dtype=torch.bool, device=self.model.device)
        elif l % 2 == 1 and self.inside.any():
            probability = self.model.head(stream).softmax(-1).amax(-1)          # (B, T)
            self.inside = self.inside & (probability < self.confidence)
            self.looks += 1
        self.l = l
        return self.inside, None

@torch.no_grad()
def calibrate(model, batches, rate, whole=()):
    """Thresholds (2L,) with which a model in eval mode skips the share `rate` of its sublayer runs on batches
    (a list of idx (B, T)): one for all sublayers, by bisection, as what is skipped changes what comes next.
    But attentions that few tokens would skip run whole (-1), as in training. whole: their numbers, from 0"""
    n = 2 * len(model.order)
    low, high = 0.0, 4.0
    for _ in range(16):
        middle, kept = (low + high) / 2, []
        tau = [-1.0 if l in whole else middle for l in range(n)]
        for idx in batches:
            model(idx, decide=by_threshold(tau), kept=kept)
        ran = ran_shares(kept)
        low, high = (middle, high) if 1 - share_run(ran) < rate else (low, middle)
    few = {l for l in range(0, n, 2) if 1 - share_run(ran[l::n]) < LEAST_SKIPPED}
    return torch.tensor(tau) if whole or not few else calibrate(model, batches, rate, few)

def pick_decide(model, config, settings):
    """-> the `decide` that the flags ask for. SystemExit where the model can't do that."""
    for what, asked in dict(skip=config.skip >= 0, exit=config.exit < 1).items():
        if asked and model.why_not(what):
            raise SystemExit(f"--{what}: {model.why_not(what)}")
    if config.exit < 1:
        return EarlyExit(model, config.exit)
    if config.skip <= 0:
        return all_run if config.skip == 0 else model.decide   # model.decide: as trained
    if prepare.load_meta(settings["data"])["tokenizer"] != settings["tokenizer"]:
        raise SystemExit(f"--skip: {settings['data']} has other tokens than the run; prepare it as it was")
    x, _ = prepare.val_windows(settings["data"], model.config.block_size, 32)
    return by_threshold(calibrate(model, x.to(model.device).split(8), config.skip))

def sublayers_of(blocks, n_blocks):
    """"9,10" -> {17, 18, 19, 20}: both sublayers of each block, as they run"""
    numbers = {str(block): block for block in range(1, n_blocks + 1)}
    named = {*blocks.split(",")} if blocks else set()
    if not named < numbers.keys():
        raise SystemExit(f"--remove {blocks}: name some of the {n_blocks} blocks, counted from 1, as 9,10,11")
    return {l for block in named for l in (2 * numbers[block] - 1, 2 * numbers[block])}

# ----------------------------------------------------------------------------- show

# Of a terminal's 256 colours: name, background, text. From few sublayers to all, in fifths.
PALETTE = [("navy", 17, 231), ("blue", 26, 231), ("teal", 37, 16), ("green", 113, 16), ("yellow", 227, 16)]

def show(text, share=None, style="plain"):
    """Prints text at once. share: of the sublayers that ran for it. style: plain, colours or numbers"""
    if style == "numbers":
        text = f"{'' if share is None else f'{share:.0%}':>4} {text!r}\n"
    elif style == "colours" and share is not None and text.strip():
        text = painted(text, share)
    print(text, end="", flush=True)

def painted(text, share):
    _, background, foreground = PALETTE[min(4, int(5 * share))]
    return f"\033[38;5;{foreground};48;5;{background}m{text}\033[0m"

def legend():
    fifths = [painted(f" {name}: from {20 * i}% ", i / 5) for i, (name, _, _) in enumerate(PALETTE)]
    return "share of the sublayers that ran for a token: " + "".join(fifths)

# ----------------------------------------------------------------------------- sampling

def sample(model, tokenizer, config, decide, generator, style="plain"):
    """Shows one sample as it comes. Yields which sublayers ran for each token, as ran_shares says it."""
    prompt = tokenizer.encode_ordinary(config.prompt) or [tokenizer.eot_token]
    idx = torch.tensor([prompt], device=model.device)
    tokens = model.stream_tokens(idx, config.max_new_tokens, config.temperature, config.top_k or None,
                                 generator, decide, tokenizer.n_vocab)
    # A character may be several tokens: the decoder holds back bytes that don't make a whole one yet.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    show(config.prompt, style=style)
    try:
        for token, kept in tokens:
            ran = ran_shares([keep[:, -1] if torch.is_tensor(keep) else keep for keep in kept])
            yield ran
            if token.item() == tokenizer.eot_token:
                break
            show(decoder.decode(tokenizer.decode_single_token_bytes(token.item())), share_run(ran), style)
    finally:   # also after Ctrl-C
        show(decoder.decode(b"", final=True) + "\n", style=style)

def main(argv=None):
    [config] = parse([SampleConfig], argv, __doc__, positional=("run",))
    model, settings = open_run(config.run, pick_device(config.device), config.which)
    tokenizer = prepare.get_tokenizer(settings["tokenizer"])
    removed = sublayers_of(config.remove, len(model.order))
    decide = pick_decide(model, config, settings)
    generator = torch.Generator(model.device).manual_seed(config.seed)
    style = "plain" if not config.depth else "colours" if sys.stdout.isatty() else "numbers"
    if style == "colours":
        print(legend(), file=sys.stderr)
    passes, begin = [], time.perf_counter()
    for _ in range(config.num_samples):
        passes += sample(model, tokenizer, config, without(removed, decide), generator, style)
    speed = len(passes) / (time.perf_counter() - begin)
    ran = [False if each[0] is False else sum(each) / len(each) for each in zip(*passes)]
    looks = getattr(decide, "looks", 0) / len(passes) * 2 * model.lm_head.weight.numel()
    saved = 1 - (model.flops_per_token(ran=ran) + looks) / model.flops_per_token()
    print(f"{speed:,.0f} tokens/s; {1 - sum(ran) / len(ran):.1%} of the sublayer runs skipped, "
          f"{saved:.1%} of the FLOPs saved", file=sys.stderr)

if __name__ == "__main__":
    start(main)
