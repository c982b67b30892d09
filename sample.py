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
import re
import sys
import time
from dataclasses import dataclass
from typing import Literal

import torch

import prepare
from flags import flag, parse, refuse, start
from model import ByGain, EarlyExit, Without, new_tokens, places_of, why_not
from train import open_run

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
    config.prompt = prepare.text_or_file(config.prompt)
    model, settings = open_run(config.run, config.device)
    model.decider = pick_decider(model, config)
    if config.inside:
        show_inside(model, settings["data"], config.prompt.strip())
        return
    tokenizer = prepare.get_tokenizer(settings["tokenizer"])
    torch.manual_seed(config.seed)   # All draws follow: of tokens, and of --mod coins.
    skipped, begin = [], time.perf_counter()
    for _ in range(config.num_samples):
        skipped += sample(model, tokenizer, config)
    speed = len(skipped) / (time.perf_counter() - begin)
    print(f"{speed:,.0f} tokens/s; {sum(skipped) / len(skipped):.1%} of the sublayer runs skipped",
          file=sys.stderr)

# ----------------------------------------------------------------------------------- who runs what

def pick_decider(model, config):
    """-> the decider, which says which tokens run the next sublayer: as trained, or as a flag asks
    for it, and without the blocks of --remove. SystemExit if the model can't do so"""
    decider, asked = model.decider, None
    if config.skip_below >= 0:
        decider, asked = ByGain(model.config, config.skip_below), "--skip_below"
    if config.exit < 1:
        decider, asked = EarlyExit(config.exit), "--exit"
    if asked:
        if model.decider.changes_stream():   # A router's blocks need its weights.
            refuse(f"{asked}: the run's own --mod {model.config.mod} decides who skips; use "
                   f"another run")
        why = why_not(decider, model.config)
        if why:
            refuse(f"{asked}: {why}")
    if config.remove:
        words, n_blocks = config.remove.split(","), len(model.blocks)
        known = [str(number) for number in range(1, n_blocks + 1)]
        if not all(word in known for word in words) or len({*words}) == n_blocks:
            refuse(f"--remove {config.remove}: name some, not all, of the blocks 1 to {n_blocks}, "
                   f"such as 1,2")
        places = {place for word in words for place in places_of(model, int(word) - 1)}
        decider = Without(places, decider)
    return decider

# ---------------------------------------------------------------------------------------- sampling

def sample(model, tokenizer, config):
    """Prints a sample -> for each new token, the share of the sublayers that was skipped"""
    prompt = tokenizer.encode_ordinary(config.prompt)
    idx = torch.tensor([prompt or [tokenizer.eot_token]], device=model.device)
    tokens = new_tokens(model, idx, config.max_new_tokens, config.temperature, config.top_k or None,
                        n_vocab=tokenizer.n_vocab)
    # A character may be several tokens. Bytes that make no whole one wait for the next token.
    decoder, skipped = codecs.getincrementaldecoder("utf-8")(errors="replace"), []
    def show_token(token, share=None):
        text = decoder.decode(tokenizer.decode_single_token_bytes(token))
        show(text, share if config.depth else None)
    try:
        # Each token comes with the runner of the walk that predicted it, which knows who skipped.
        for number, (token, runner) in enumerate(tokens):
            if number == 0:   # The first walk has read the prompt.
                for each, share in zip(prompt, shares_of(prompt, runner)):
                    show_token(each, share)
            skipped.append(runner.skipped(last=True))   # for the last token it has read
            if token.item() == tokenizer.eot_token:
                break
            show_token(token.item(), 1 - skipped[-1])
    finally:   # also after Ctrl-C
        show(decoder.decode(b"", final=True) + "\n")
    return skipped

def shares_of(prompt, runner):
    """-> for each token of the prompt, which share of the sublayers has run to predict it, or None.
    runner: that of the walk that has read the prompt, or its end. If this is b and c of a, b, c,
    then c has the share of b, where it was predicted. Nobody has predicted a and b."""
    shares = runner.who_ran().float().mean(0)[0].tolist()   # of each token it has read
    return [None] * (len(prompt) - len(shares) + 1) + shares[:-1]

# Of a terminal's 256 colours: background and text, from pale (half of the sublayers) to dark (all)
SHADES = [(231, 16), (153, 16), (111, 16), (69, 16), (27, 231), (20, 231), (17, 231)]

def show(text, share=None):
    """Prints text at once. share: of the sublayers that ran, for a colour; None: without. A
    terminal gets no characters that could do something to it, whatever a model says."""
    if sys.stdout.isatty():
        text = "".join(c if c == "\t" else printable(c) for c in text)
    if share is not None and text.strip():
        shade = round((2 * share - 1) * (len(SHADES) - 1))
        background, foreground = SHADES[max(0, shade)]
        text = f"\033[38;5;{foreground};48;5;{background}m{text}\033[0m"
    print(text, end="", flush=True)

# ---------------------------------------------------------------------------------------- --inside

def show_inside(model, data, line):
    """Prints what a probe reads in the stream, block by block, and then the answer. line: such as
    f314159265358. SystemExit if that can't be"""
    # Here, because it loads matplotlib, and who only samples needs none
    from analyze import WINDOWS, NotHere, in_words, look_inside
    puzzle = prepare.load_meta(data).get("steps")
    if not puzzle:
        refuse("--inside: is for a run on the steps text, which prepare.py steps makes")
    letter, digit, cells = chr(ord("a") + puzzle["most"]), len(puzzle["table"]) - 1, puzzle["cells"]
    if not re.fullmatch(f"[a-{letter}][0-{digit}]{{{cells}}}", line):
        refuse(f"--inside: needs a --prompt of one line: a letter from a to {letter}, and {cells} "
               f"digits from 0 to {digit}")
    k = ord(line[0]) - ord("a")   # how many steps it asks for
    windows = prepare.windows_of(data, "val", model.config.block_size, WINDOWS)
    try:
        [example] = look_inside(model, puzzle, windows, k, [line])["examples"]
    except NotHere as why:
        refuse(f"--inside: {why}")
    # Where no step or one is asked for, nothing is between.
    between = " The text never shows what is between." if k > 1 else ""
    print(f"\n{line}\n{line[0]} asks for the line after {in_words(k)}.{between}")
    print("A probe reads in the stream (%: how often it is right, on other lines):\n")
    answer, true = example["answer"], example["true"]
    for block, row in enumerate(example["blocks"][1:], 1):   # without the embedding
        digits, says = ". " * cells, "nothing to be read yet"
        if row:
            digits = marked(row["digits"], row["true"])
            says = f"{in_words(row['steps']):<12}{row['share']:>5.0%}  in the {row['where']}"
        print(f"  after block {block:<3} {digits} {says}")
    n_wrong = sum(digit != wanted for digit, wanted in zip(answer, true))
    verdict = f"{n_wrong} of {cells} digits are wrong" if n_wrong else f"right, all {cells} digits"
    print(f"\n  the answer      {marked(answer, true)} {verdict}\n")

def printable(text):
    """A model may write characters that do something to a terminal. Each of them becomes a question
    mark. Only the ends of lines stay."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)

def marked(digits, true):
    """314 -> "3 1 4 ". A wrong digit has a ! behind it."""
    return "".join(digit + (" " if digit == wanted else "!") for digit, wanted in zip(digits, true))

if __name__ == "__main__":
    start(main)
