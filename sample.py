"""
Writes text with a trained run: to stdout, token by token. At the end it says, on stderr, how many
of the sublayer runs were skipped. Tokens skip as in training, or as a flag asks for:

    python sample.py runs/code --prompt "def " --temperature 0.6 --top_k 50
    python sample.py runs/nag --skip_below 0.1     # a token skips what would turn it by < 6 degrees
    python sample.py runs/pre --exit 0.9           # it stops at the block where the head is sure
    python sample.py runs/pre --remove 9,10        # all do without the blocks 9 and 10
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
from documents import text_or_file
from flags import flag, parse
from inside import WINDOWS, Inside, NotHere
from model import ByGain, EarlyExit, Without, new_tokens, sublayers_of, who_ran, why_not
from processes import pick_device, set_threads
from runs import data_of, open_run
from sentences import printable, refuse, start
from steps import in_words

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
                             "degrees); 0: none skips; if not given: as trained", -1, 100,
                             group="depth")
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
        if any("\ud800" <= letter <= "\udfff" for letter in self.prompt):
            yield "--prompt: is not UTF-8 text; convert it first"

def main(argv=None):
    [config] = parse([SampleConfig], argv, __doc__, positional=("run",))
    config.prompt = text_or_file(config.prompt)
    device = pick_device(config.device)
    model, settings = open_run(config.run, device)
    if not all(p.isfinite().all() for p in model.parameters()):
        refuse(f"{config.run}: some of its weights are no numbers, so it can't write; train it "
               f"with a lower --lr")
    set_threads(model.config.n_embd, device)
    model.decider = pick_decider(model, config)
    if config.inside:
        show_inside(model, data_of(config.run, settings), config.prompt.strip())
        return
    tokenizer = prepare.get_tokenizer(settings["tokenizer"])
    generator = torch.Generator(model.device).manual_seed(config.seed)
    torch.manual_seed(config.seed)   # --mod coins draws from torch's own generator.
    skipped, begin = [], time.perf_counter()
    for _ in range(config.num_samples):
        skipped += sample(model, tokenizer, config, generator)
    speed = len(skipped) / (time.perf_counter() - begin)
    print(f"{speed:,.0f} tokens/s; {sum(skipped) / len(skipped):.1%} of the sublayer runs skipped",
          file=sys.stderr)

def pick_decider(model, config):
    """-> who runs what: as the flags ask for it. SystemExit if the model can't do so."""
    asked, decider = None, model.decider   # as trained
    if config.exit < 1:
        asked, decider = "--exit", EarlyExit(config.exit)
    elif config.skip_below >= 0:
        asked, decider = "--skip_below", ByGain(model.config, config.skip_below)
    if asked and (why := why_not(decider, model.config)):
        refuse(f"{asked}: {why}")
    if asked and model.decider.needs_tensor:
        refuse(f"{asked}: the run's own --mod {model.config.mod} decides who skips; use another "
               f"run")
    return Without(places_to_remove(model, config.remove), decider)

def places_to_remove(model, blocks):
    """"9,10", which are blocks -> {17, 18, 19, 20}, the places of their sublayers"""
    numbers = {str(number + 1): number for number in range(len(model.blocks))}
    named = {*blocks.split(",")} if blocks else set()
    if not named < numbers.keys():
        refuse(f"--remove {blocks}: name some, not all, of the blocks 1 to {len(numbers)}, such as "
               f"1,2")
    return {place for name in named for place in sublayers_of(model, numbers[name])}

# ----------------------------------------------------------------------------------------- sampling

def sample(model, tokenizer, config, generator):
    """Prints a sample -> the share of the sublayers that was skipped for each of its tokens"""
    prompt = tokenizer.encode_ordinary(config.prompt)
    idx = torch.tensor([prompt or [tokenizer.eot_token]], device=model.device)
    tokens = new_tokens(model, idx, config.max_new_tokens, config.temperature, config.top_k or None,
                        generator, n_vocab=tokenizer.n_vocab)
    # A character may be several tokens: the decoder holds back bytes that don't make a whole one.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    def text_of(token):
        return decoder.decode(tokenizer.decode_single_token_bytes(token))

    skipped = []
    if not config.depth:
        show(config.prompt)
    try:
        for token, runner in tokens:
            if config.depth and not skipped:   # The first walk has read the prompt.
                show_prompt([text_of(each) for each in prompt], runner)
            skipped.append(runner.skipped(last=True))   # for the last token it has read
            token = token.item()
            if token == tokenizer.eot_token:
                break
            show(text_of(token), ran=1 - skipped[-1] if config.depth else None)
    finally:   # also after Ctrl-C
        show(decoder.decode(b"", final=True) + "\n")
    return skipped

def show_prompt(texts, runner):
    """Shows a prompt in colours. texts: those of its tokens; runner: that of the walk that has read
    them. (A long prompt is cut to its end, so of the first ones the depth is not known.)"""
    ran = who_ran(runner).float().mean(0)[0].tolist()   # the share of the sublayers, by token
    # A token gets the depth of the one before it, which predicts it.
    first = len(texts) - len(ran) + 1   # the first one whose depth is known
    show("".join(texts[:first]))
    for text, share in zip(texts[first:], ran):
        show(text, share)

# --------------------------------------------------------------------------------- the lines inside

def show_inside(model, data, line):
    """Shows what a probe reads in the stream, block by block, and then the answer: see inside.py.
    data: the folder of the steps text; line: such as f314159265358"""
    puzzle = prepare.load_meta(data).get("steps")
    if not puzzle:
        refuse("--inside: is for a run on the steps text, which prepare.py steps makes")
    k, cells = steps_that_line_asks(line, puzzle), puzzle["cells"]
    windows = prepare.windows_of(data, "val", model.config.block_size, WINDOWS)
    try:
        found = Inside(model, puzzle, windows, k).example(line)
    except NotHere as why:
        refuse(f"--inside: {why}")
    print(f"\n{line}")
    print(f"{line[0]} asks for the line after {in_words(k)}. The text never shows the lines "
          f"between.")
    print("A probe reads them in the stream (%: how often it is right, on other lines):\n")
    for block, read in enumerate(found["blocks"][1:], 1):   # without the embedding
        if read:
            digits = marked(read["digits"], read["true"])
            says = f"{in_words(read['steps']):<12}{read['share']:>5.0%}  in the {read['where']}"
        else:
            digits, says = ". " * cells, "nothing to be read yet"
        print(f"  after block {block:<3} {digits} {says}")
    wrong = sum(digit != right for digit, right in zip(found["answer"], found["true"]))
    verdict = f"{wrong} of {cells} digits are wrong" if wrong else f"right, all {cells} digits"
    print(f"\n  the answer      {marked(found['answer'], found['true'])} {verdict}\n")

def steps_that_line_asks(line, puzzle):
    """f314159265358 -> 5. SystemExit if this is no line of the text"""
    last_letter, last_digit = chr(ord("a") + puzzle["most"]), len(puzzle["table"]) - 1
    if not re.fullmatch(f"[a-{last_letter}][0-{last_digit}]{{{puzzle['cells']}}}", line):
        refuse(f"--inside: needs a --prompt of one line: a letter from a to {last_letter}, and "
               f"{puzzle['cells']} digits from 0 to {last_digit}")
    return ord(line[0]) - ord("a")

def marked(digits, true):
    """314 -> "3 1 4 ". A wrong digit has a ! behind it."""
    return "".join(digit + (" " if digit == right else "!") for digit, right in zip(digits, true))

# --------------------------------------------------------------------------------------- a terminal

# Of a terminal's 256 colours: background and text, from pale to dark
SHADES = [(231, 16), (153, 16), (111, 16), (69, 16), (27, 231), (20, 231), (17, 231)]

def show(text, ran=None):
    """Prints text at once. ran: a share, for a colour; None: without. A terminal gets no characters
    that could do something to it, whatever a model says."""
    if sys.stdout.isatty():
        text = "".join(c if c == "\t" else printable(c) for c in text)
    if ran is not None and text.strip():
        text = painted(text, ran)
    print(text, end="", flush=True)

def painted(text, ran):
    """ran: the share of the sublayers, pale up to a half, and dark if it is 1"""
    shade = round((2 * ran - 1) * (len(SHADES) - 1))
    background, foreground = SHADES[max(0, shade)]
    return f"\033[38;5;{foreground};48;5;{background}m{text}\033[0m"

if __name__ == "__main__":
    start(main)
