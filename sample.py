"""
Writes text with a trained run: to stdout, token by token. Each token runs the sublayers of the
model, two a block, or skips some. At the end it says, on stderr, which share of all these runs was
skipped. A token skips as it did in training, or as a flag asks for:

    python sample.py runs/code --prompt "def " --temperature 0.6 --top_k 50
    python sample.py runs/nag --skip_below 0.1     # skips what would turn its stream by < 6 degrees
    python sample.py runs/pre --exit 0.9           # stops at the block where the head is sure
    python sample.py runs/pre --remove 9,10        # all tokens skip the blocks 9 and 10
    python sample.py runs/nag --prompt "def " --depth   # colours: which share of the sublayers ran

With --inside it samples nothing. On the steps text, it shows what a probe reads after each block:

    python sample.py runs/steps-pre --prompt f314159265358 --inside
"""
import codecs
import sys
import time
from dataclasses import dataclass
from typing import Literal

import torch

import dataset
from documents import text_or_file
from flags import flag, parse
from inside import show_inside
from model import ByGain, EarlyExit, Without, new_tokens, places_of, why_not
from processes import pick_device, set_threads
from runs import open_run
from sentences import printable, refuse, start

@dataclass
class SampleConfig:
    run: str = flag("", "run folder, made by train.py")
    prompt: str = flag("", "text to continue, or a file with one; without it, the start of a "
                       "document")
    max_new_tokens: int = flag(300, "tokens per sample", 1, 1e9)
    num_samples: int = flag(1, "samples, one after the other", 1, 1e9)
    temperature: float = flag(0.8, "0: always the likeliest token", 0, 1e6)
    top_k: int = flag(0, "draw from the k likeliest tokens only; 0: from all", 0, 1e9)
    seed: int = flag(1337, "of the draws", 0, 9e18)

    skip_below: float = flag(-1.0, "a token skips what would turn it by less (a gain; 0.05 are 3 "
                             "degrees); 0: none skips; below 0: as trained", -1, 100, group="depth")
    exit: float = flag(1.0, "a token stops when its prediction has this probability; 1: never",
                       0, 1)
    remove: str = flag("", "blocks to do without, from 1: 9,10; block 1 is sublayers 1 and 2 of "
                       "analyze.py's figures, and block 9 is 17 and 18")
    depth: bool = flag(False, "colour each token: pale if half of the sublayers ran for it, or "
                       "fewer, and dark if all did")
    inside: bool = flag(False, "on the steps text: what a probe reads in the stream, block by "
                        "block, before the model answers")

    device: Literal["auto", "cpu", "cuda"] = flag("auto", "auto: cuda where there is one",
                                                  group="machine")

    def problems(self):
        if self.skip_below >= 0 and self.exit < 1:
            yield "--skip_below and --exit: each decides by itself who runs; give one of them"

def main(argv=None):
    [config] = parse([SampleConfig], argv, __doc__, positional=("run",))
    config.prompt = text_or_file(config.prompt)
    device = pick_device(config.device)
    model, settings = open_run(config.run, device)
    set_threads(model.config.n_embd, device)
    model.decider = pick_decider(model, config)
    if config.inside:
        show_inside(model, settings["data"], config.prompt.strip())
    else:
        print_samples(model, dataset.get_tokenizer(settings["tokenizer"]), config)

def pick_decider(model, config):
    """-> the decider, which says which tokens run the next sublayer: as trained, or as a flag asks
    for it, and without the blocks of --remove. SystemExit if the model can't do so"""
    decider = model.decider
    if config.skip_below >= 0:
        decider = ByGain(model.config, config.skip_below)
        refuse_if_unfit("--skip_below", decider, model)
    if config.exit < 1:
        decider = EarlyExit(config.exit)
        refuse_if_unfit("--exit", decider, model)
    if config.remove:
        decider = Without(places_to_remove(model, config.remove), decider)
    return decider

def refuse_if_unfit(asked, decider, model):
    """SystemExit if the model can't have this decider in place of its own. asked: the flag that
    asks for it"""
    if model.decider.changes_stream():   # The blocks of a router need the weights that it gives.
        refuse(f"{asked}: the run's own --mod {model.config.mod} decides who skips; use another "
               f"run")
    why = why_not(decider, model.config)
    if why:
        refuse(f"{asked}: {why}")

def places_to_remove(model, blocks):
    """"9,10", which are blocks -> {17, 18, 19, 20}, the places of their sublayers"""
    n_blocks = len(model.blocks)
    known = [str(number) for number in range(1, n_blocks + 1)]
    words = blocks.split(",")
    if not all(word in known for word in words) or len({*words}) == n_blocks:
        refuse(f"--remove {blocks}: name some, not all, of the blocks 1 to {n_blocks}, such as 1,2")
    return {place for word in words for place in places_of(model, int(word) - 1)}

# ----------------------------------------------------------------------------------------- sampling

def print_samples(model, tokenizer, config):
    """One after the other; and at the end, how fast it was, and how much was skipped"""
    torch.manual_seed(config.seed)   # All draws follow: of tokens, and of --mod coins.
    skipped, begin = [], time.perf_counter()
    for _ in range(config.num_samples):
        skipped += sample(model, tokenizer, config)
    speed = len(skipped) / (time.perf_counter() - begin)
    print(f"{speed:,.0f} tokens/s; {sum(skipped) / len(skipped):.1%} of the sublayer runs skipped",
          file=sys.stderr)

def sample(model, tokenizer, config):
    """Prints a sample -> for each new token, the share of the sublayers that was skipped"""
    prompt = tokenizer.encode_ordinary(config.prompt)
    idx = torch.tensor([prompt or [tokenizer.eot_token]], device=model.device)
    tokens = new_tokens(model, idx, config.max_new_tokens, config.temperature, config.top_k or None,
                        n_vocab=tokenizer.n_vocab)
    printer, skipped = Printer(tokenizer, config.depth), []
    try:
        # Each token comes with the runner of the walk that predicted it, which knows who skipped.
        for number, (token, runner) in enumerate(tokens):
            if number == 0:   # The first walk has read the prompt.
                printer.show_prompt(prompt, runner)
            skipped.append(runner.skipped(last=True))   # for the last token it has read
            if token.item() == tokenizer.eot_token:
                break
            printer.show_token(token.item(), share=1 - skipped[-1])
    finally:   # also after Ctrl-C
        printer.end()
    return skipped

class Printer:
    """Prints tokens. With --depth, each has the colour of its depth. This is the share of the
    sublayers that ran for the token before it, because there it was predicted."""
    def __init__(self, tokenizer, in_colours):
        self.tokenizer, self.in_colours = tokenizer, in_colours
        # A character may be several tokens. Bytes that make no whole one wait for the next token.
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def show_token(self, token, share=None):
        """share: for its colour; None: it isn't known"""
        text = self.decoder.decode(self.tokenizer.decode_single_token_bytes(token))
        show(text, share if self.in_colours else None)

    def show_prompt(self, prompt, runner):
        """prompt: tokens; runner: that of the walk that has read them. If they are too many for the
        context, it has read the last ones only.

        An example: of a, b, c, the walk has read b and c. Then c has the share of b, where it was
        predicted. That of c is for the next token. And a and b stay plain: nobody has predicted
        them."""
        shares = runner.who_ran().float().mean(0)[0].tolist()   # of each token it has read
        n_plain = len(prompt) - len(shares) + 1
        for token in prompt[:n_plain]:
            self.show_token(token)
        for token, share in zip(prompt[n_plain:], shares):
            self.show_token(token, share)

    def end(self):
        show(self.decoder.decode(b"", final=True) + "\n")

# --------------------------------------------------------------------------------------- a terminal

# Of a terminal's 256 colours: background and text, from pale to dark
SHADES = [(231, 16), (153, 16), (111, 16), (69, 16), (27, 231), (20, 231), (17, 231)]

def show(text, share=None):
    """Prints text at once. share: for a colour; None: without. A terminal gets no characters that
    could do something to it, whatever a model says."""
    if sys.stdout.isatty():
        text = "".join(c if c == "\t" else printable(c) for c in text)
    if share is not None and text.strip():
        text = painted(text, share)
    print(text, end="", flush=True)

def painted(text, share):
    """share: of the sublayers that ran, pale up to a half, and dark if it is 1"""
    shade = round((2 * share - 1) * (len(SHADES) - 1))
    background, foreground = SHADES[max(0, shade)]
    return f"\033[38;5;{foreground};48;5;{background}m{text}\033[0m"

if __name__ == "__main__":
    start(main)
