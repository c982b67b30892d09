"""
Writes text with a trained run, and says, on stderr, how fast that was, and which share of the
sublayer runs was skipped. Tokens skip as in training, or as a flag says:

    python sample.py runs/code --prompt "def " --temperature 0.6 --top_k 50
    python sample.py runs/nag --skip_below 0.1     # skips what would turn its stream by < 6 degrees
    python sample.py runs/pre --remove 9,10        # all tokens skip the blocks 9 and 10
    python sample.py runs/nag --prompt "def " --depth   # colours: which share of the sublayers ran
    python sample.py runs/nag --speed              # tokens/s as it skips, and with all sublayers
    python sample.py runs/steps-pre --prompt f314159265358 --inside   # what a probe reads inside
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
from model import ByGain, Decider, Trip, new_tokens, places_of
from train import data_of_run, open_run, read_blocks

@dataclass
class SampleConfig:
    run: str = flag("", "run folder, made by train.py")
    prompt: str = flag("", "text to continue, or a file; without it, the start of a document")
    max_new_tokens: int = flag(300, "tokens per sample", 1, 1e9)
    num_samples: int = flag(1, "samples, one after the other", 1, 1e9)
    temperature: float = flag(0.8, "0: always the likeliest token", 0, 1e6)
    top_k: int = flag(0, "draw from the k likeliest tokens only; 0: from all", 0, 1e9)
    seed: int = flag(1337, "of the draws", 0, 2**32 - 1)   # Of more, torch uses 32 bits only.

    skip_below: float = flag(-1.0, "a token skips what would turn it by less (a gain; 0.05 are 3 "
                             "degrees); 0: none skips; below 0: as trained", -1, 100, group="depth")
    remove: str = flag("", "blocks to do without, from 1: 9,10")
    speed: bool = flag(False, "in place of samples, measure tokens/s: as tokens skip, and if none "
                       "does")
    depth: bool = flag(False, "colour each token: pale if half of the sublayers ran for it, or "
                       "fewer, and dark if all did")
    inside: bool = flag(False, "on the steps text, in place of samples: what a probe reads in the "
                        "stream, block by block")
    data: str = flag("", "for --inside: the data set of the run, if it has moved")
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "cuda where it is", group="machine")

    def problems(self):
        if self.data and not self.inside:
            yield "--data: only --inside reads data; add that, or leave this out"
        if self.inside and (self.remove or self.skip_below >= 0):
            yield "--inside: shows the model as it was trained; leave out --remove and --skip_below"

def main(argv=None):
    [config] = parse([SampleConfig], argv, __doc__, positional=("run",))
    config.prompt = prepare.text_or_file(config.prompt)
    model, settings = open_run(config.run, config.device)
    make_trip = trip_maker(model, config)
    if config.inside:
        data, warning = data_of_run(config.run, settings, config.data)
        if warning:
            print(warning, file=sys.stderr)
        show_inside(model, data, config.prompt.strip())
    elif config.speed:
        show_speed(model, make_trip, config.max_new_tokens)
    else:
        show_samples(model, make_trip, prepare.get_tokenizer(settings["tokenizer"]), config)

def trip_maker(model, config):
    """-> a function that makes a Trip for each pass: tokens skip as trained, or as flags say."""
    decider, below = model.decider, config.skip_below
    if below >= 0:
        if type(decider).after is not Decider.after:   # A router's blocks need its weights.
            refuse(f"--skip_below: --mod {model.config.mod} decides who skips; use another run")
        if below > 0 and not model.ends.knows_gain:
            refuse(f"--skip_below: --residual {model.config.residual} knows no gain; use nag")
        decider = ByGain(model.config, below=below) if below > 0 else Decider()   # All run.
    blocks = read_blocks(config.remove, len(model.blocks))
    without = {place for block in blocks for place in places_of(model, block)}
    return lambda: Trip(model, decider, without)

# ---------------------------------------------------------------------------------------- sampling

def show_samples(model, make_trip, tokenizer, config):
    torch.manual_seed(config.seed)   # All draws follow: of tokens, and of --mod coins.
    skipped, begin = [], time.perf_counter()
    for _ in range(config.num_samples):
        skipped += sample(model, make_trip, tokenizer, config)
    speed = len(skipped) / (time.perf_counter() - begin)
    print(f"{speed:,.0f} tokens/s; {sum(skipped) / len(skipped):.1%} of the sublayer runs skipped",
          file=sys.stderr)

def show_speed(model, make_trip, n):
    as_asked = tokens_per_second(model, make_trip, n)
    dense = tokens_per_second(model, lambda: Trip(model, Decider()), n)
    print(f"{as_asked:,.0f} tokens/s; {dense:,.0f} if all sublayers run", file=sys.stderr)

def tokens_per_second(model, make_trip, n):
    """Of n new tokens, which are not printed: the better of two times"""
    idx, seconds = torch.zeros(1, 1, dtype=torch.long, device=model.device), []
    for _ in range(2):
        begin = time.perf_counter()
        for token, _ in new_tokens(model, idx, n, make_trip=make_trip):
            token.item()   # It waits for the GPU, as printing does.
        seconds.append(time.perf_counter() - begin)
    return n / min(seconds)

def sample(model, make_trip, tokenizer, config):
    """Prints a sample -> for each new token, the share of the sublayers that was skipped. With
    --depth, a token has the colour of the share that ran to predict it: where the token before it
    was read. So the first one, or what the model no longer sees, has none."""
    prompt = tokenizer.encode_ordinary(config.prompt)
    idx = torch.tensor([prompt or [tokenizer.eot_token]], device=model.device)
    tokens = new_tokens(model, idx, config.max_new_tokens, config.temperature, config.top_k or None,
                        make_trip=make_trip)
    # A character may be several tokens. Bytes that make no whole one wait for the next token.
    decoder, skipped = codecs.getincrementaldecoder("utf-8")(errors="replace"), []

    def show_token(token, share):
        text = decoder.decode(tokenizer.decode_single_token_bytes(token))
        show(text, share if config.depth else None)

    try:
        # Each token comes with the trip of the pass that predicted it, which knows who skipped.
        for n, (token, trip) in enumerate(tokens):
            if n == 0:   # The first pass has read the prompt, which is shown first.
                shares = trip.who_ran().float().mean(0)[0].tolist()[:-1]
                shares = [None] * (len(prompt) - len(shares)) + shares
                for each, share in zip(prompt, shares):
                    show_token(each, share)
            skipped.append(trip.skipped(last=True))   # of the last token that it has read
            if token.item() == tokenizer.eot_token:
                break
            show_token(token.item(), 1 - skipped[-1])
    finally:   # also after Ctrl-C
        show(decoder.decode(b"", final=True) + "\n")
    return skipped

# Of a terminal's 256 colours: background and text, from pale (half of the sublayers) to dark (all)
SHADES = [(231, 16), (153, 16), (111, 16), (69, 16), (27, 231), (20, 231), (17, 231)]

def show(text, share=None):
    """Prints text at once. share: of the sublayers that ran, for a colour; None: without"""
    if sys.stdout.isatty():
        # A model may write characters that do something to a terminal, so they become a ?.
        text = "".join(c if c.isprintable() or c in "\t\n" else "?" for c in text)
    if share is not None and text.strip():
        shade = round((2 * share - 1) * (len(SHADES) - 1))
        background, foreground = SHADES[max(0, shade)]
        text = f"\033[38;5;{foreground};48;5;{background}m{text}\033[0m"
    print(text, end="", flush=True)

# ---------------------------------------------------------------------------------------- --inside

def show_inside(model, data, line):
    """Prints what a probe reads in the stream, block by block, and then the answer. data: the
    folder of the steps text; line: such as f314159265358"""
    from analyze import WINDOWS, Inside, NotHere, in_words   # Sampling does without it.
    puzzle = prepare.load_meta(data).get("steps")
    if not puzzle:
        refuse("--inside: is for a run on the steps text, which prepare.py steps makes")
    letter, digit, cells = chr(ord("a") + puzzle["most"]), len(puzzle["table"]) - 1, puzzle["cells"]
    if not re.fullmatch(f"[a-{letter}][0-{digit}]{{{cells}}}", line):
        refuse(f"--inside: needs a --prompt of one line: a letter from a to {letter}, and {cells} "
               f"digits from 0 to {digit}")
    k = ord(line[0]) - ord("a")   # how many steps it asks for
    windows, _ = prepare.windows_of(data, "val", model.config.block_size, WINDOWS)
    try:
        example = Inside(model, puzzle, windows, k).example(line)
    except NotHere as why:
        refuse(f"--inside: {why}")
    answer, true = example["answer"], example["true"]
    between = " The text never shows what is between." if k > 1 else ""
    print(f"\n{line}\n{line[0]} asks for the line after {in_words(k)}.{between}")
    print("A probe reads in the stream (%: how often it is right, on other lines):\n")
    for block, row in enumerate(example["blocks"][1:], 1):   # without the embedding
        digits, says = ". " * len(true), "nothing to be read yet"
        if row:
            digits = marked(row["digits"], row["true"])
            says = f"{in_words(row['steps']):<12}{row['share']:>5.0%}  in the {row['where']}"
        print(f"  after block {block:<3} {digits} {says}")
    n, n_wrong = len(true), sum(digit != wanted for digit, wanted in zip(answer, true))
    verdict = f"{n_wrong} of {n} digits are wrong" if n_wrong else f"right, all {n} digits"
    print(f"\n  the answer      {marked(answer, true)} {verdict}\n")

def marked(digits, true):
    """314 -> "3 1 4 ". A wrong digit has a ! behind it."""
    return "".join(digit + (" " if digit == wanted else "!") for digit, wanted in zip(digits, true))

if __name__ == "__main__":
    start(main)
