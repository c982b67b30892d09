"""
Sample from a run: its text goes to stdout as it comes, everything about it to stderr.

    python sample.py runs/nag --prompt "def " --temperature 0.8 --top_k 50
    python sample.py runs/nag --skip 0.25 --depth    # colours: the share of sublayers that ran
    python sample.py runs/pre --exit 0.9             # a token stops at the block that is sure
    python sample.py runs/pre --remove 9,10          # without these two blocks
"""
import codecs
import sys
import time
from dataclasses import dataclass
from typing import Literal

import torch

import prepare
from flags import flag, parse, printable, start
from model import (EarlyExit, REMOVED, Without, all_run, calibrate, flops_per_token, mean_share,
                   ran_shares, why_not)
from processes import pick_device, pick_threads
from runs import open_run

@dataclass
class SampleConfig:
    run: str = flag("", "run folder, made by train.py")
    prompt: str = flag("", "text to continue; without it, the start of a document")
    max_new_tokens: int = flag(300, "tokens per sample", 1, 1e9)
    num_samples: int = flag(1, "samples, one after the other", 1, 1e9)
    temperature: float = flag(0.8, "0: always the likeliest token", 0, 1e6)
    top_k: int = flag(0, "draw from the k likeliest tokens only; 0: from all", 0, 1e9)
    seed: int = flag(1337, "of the draws", 0, 9e18)

    skip: float = flag(-1.0, "share of the sublayer runs to skip; 0: none; below: as trained", -1,
                       0.99, group="depth")
    exit: float = flag(1.0, "a token stops when its prediction has this probability; 1: never", 0, 1)
    remove: str = flag("", "blocks to remove, from 1, as analyze.py numbers them: 9,10,11")
    depth: bool = flag(False, "colour each token by the share of the sublayers that ran for it")

    which: Literal["ckpt.pt", "best.pt"] = flag("ckpt.pt", "the last checkpoint, or the best one",
                                                group="machine")
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "auto: cuda where there is one")

    def problems(self):
        if self.skip >= 0 and self.exit < 1:
            yield "--skip and --exit: each decides by itself who runs; give one of them"
        if any("\ud800" <= letter <= "\udfff" for letter in self.prompt):
            yield "--prompt: is not UTF-8 text; convert it first"

# -------------------------------------------------------------------------------------- who decides

def pick_decider(model, config, settings):
    """-> the decider that the flags ask for. SystemExit if the model can't do that."""
    for what, asked in dict(skip=config.skip >= 0, exit=config.exit < 1).items():
        if asked and why_not(model, what):
            raise SystemExit(f"--{what}: {why_not(model, what)}")
    if config.exit < 1:
        return EarlyExit(model, config.exit)
    if config.skip < 0:
        return model.decider   # as trained
    if config.skip == 0:
        return all_run
    if prepare.load_meta(settings["data"])["tokenizer"] != settings["tokenizer"]:
        raise SystemExit(f"--skip: {settings['data']} has other tokens than the run; prepare it as it "
                         f"was")
    x, _ = prepare.val_windows(settings["data"], model.config.block_size, 32)
    return calibrate(model, x.to(model.device).split(8), config.skip)

def places_of(blocks, n_blocks):
    """"9,10" -> {17, 18, 19, 20}: both sublayers of each block, as they run"""
    numbers = {str(block): block for block in range(1, n_blocks + 1)}
    named = {*blocks.split(",")} if blocks else set()
    if not named < numbers.keys():
        raise SystemExit(f"--remove {blocks}: name some, not all, of the blocks 1 to {n_blocks}, such as 1,2")
    return {place for block in named for place in (2 * numbers[block] - 1, 2 * numbers[block])}

# --------------------------------------------------------------------------------------------- show

# Of a terminal's 256 colours: name, background, text. From few sublayers to all, in fifths.
PALETTE = [("navy", 17, 231), ("blue", 26, 231), ("teal", 37, 16), ("green", 113, 16), ("yellow", 227, 16)]

def show(text, share=None, style="plain"):
    """Prints text at once. share: of the sublayers that ran for it. style: plain, colours or
    numbers. A terminal gets no characters that could do something to it, whatever a model says."""
    if sys.stdout.isatty():
        text = "".join(c if c == "\t" else printable(c) for c in text)
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

# ----------------------------------------------------------------------------------------- sampling

def sample(model, tokenizer, config, decider, generator, style="plain"):
    """Shows one sample as it comes. Yields which sublayers ran for each token, as ran_shares says it."""
    prompt = tokenizer.encode_ordinary(config.prompt) or [tokenizer.eot_token]
    idx = torch.tensor([prompt], device=model.device)
    tokens = model.new_tokens(idx, config.max_new_tokens, config.temperature, config.top_k or None,
                                 generator, decider, tokenizer.n_vocab)
    # A character may be several tokens: the decoder holds back bytes that don't make a whole one yet.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    show(config.prompt, style=style)
    try:
        for token, keeps in tokens:
            ran = ran_shares([keep[:, -1] if torch.is_tensor(keep) else keep for keep in keeps])
            yield ran
            if token.item() == tokenizer.eot_token:
                break
            show(decoder.decode(tokenizer.decode_single_token_bytes(token.item())), mean_share(ran), style)
    finally:   # also after Ctrl-C
        show(decoder.decode(b"", final=True) + "\n", style=style)

def main(argv=None):
    [config] = parse([SampleConfig], argv, __doc__, positional=("run",))
    device = pick_device(config.device)
    model, settings = open_run(config.run, device, config.which)
    pick_threads(model.config, device)
    tokenizer = prepare.get_tokenizer(settings["tokenizer"])
    removed = places_of(config.remove, len(model.order))
    decider = pick_decider(model, config, settings)
    generator = torch.Generator(model.device).manual_seed(config.seed)
    torch.manual_seed(config.seed)   # --mod random draws coins from torch's own generator.
    style = "plain" if not config.depth else "colours" if sys.stdout.isatty() else "numbers"
    if style == "colours":
        print(legend(), file=sys.stderr)
    passes, begin = [], time.perf_counter()
    for _ in range(config.num_samples):
        passes += sample(model, tokenizer, config, Without(removed, decider), generator, style)
    speed = len(passes) / (time.perf_counter() - begin)
    ran = [REMOVED if each[0] is REMOVED else sum(each) / len(each) for each in zip(*passes)]
    looks = getattr(decider, "looks", 0) / len(passes) * 2 * model.lm_head.weight.numel()
    saved = 1 - (flops_per_token(model, ran=ran) + looks) / flops_per_token(model)
    gone = f"{len(removed)} sublayers removed, " if removed else ""
    print(f"{speed:,.0f} tokens/s; {gone}{1 - mean_share(ran):.1%} of the sublayer runs skipped, "
          f"{saved:.1%} of the FLOPs saved", file=sys.stderr)

if __name__ == "__main__":
    start(main)
