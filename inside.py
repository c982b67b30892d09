"""
The lines that nobody wrote. A line of the steps text, such as c314159265358, asks for the line two
steps later, which is its answer. The text never has the line between. Is it inside of the model?

A probe looks for it, in a model that is trained. It is a linear map from the stream of one token
(the vector that each block reads and changes) to a digit. After which block can it read the digits
after one step? sample.py --inside and analyze.py show it. (And patch.py asks whether the answer
needs what is there.)

Cell 0 of c314159265358 is a 3 after no step, a 5 after one, which nobody wrote, and a 1 after two.
We look for all three at two places: where the line's 3 stands, and where the answer's 1 is
predicted. If lines had four digits only, these would be the columns (see the end of steps.py):

    column      0  1  2  3  4  5  6  7  8  9 10
    token       c  3  1  4  1  ↵  a  1  0  8  5
    "line"         0  1  2  3                      cells, where the line's digits stand
    "answer"                      0  1  2  3       cells, where the answer's are predicted

A token predicts the next one: so the answer's cell 0 is where its letter is. The words, in all that
follows:

    k        how many steps a line asks for; `steps` counts from 0 to k
    column   a token's place in its window; that of a line is the one of its letter
    cell     a digit's place in its line; `cells` is how many a line has
    where    "line" or "answer": in which columns we look
    block    after which block we look; 0: at the embedding. Each run of a block counts (--repeat).
    vector   what a probe reads: the stream of one token, divided by its rms
    share    which part of some digits is right, from 0 to 1
    true     the right digits, by the table (in `example`, `answer` is what the model says)
    puzzle   what meta.json says of the steps text: its table, its cells, and the most steps
"""
import torch
import torch.nn.functional as F

import dataset
from model import unit
from sentences import refuse
from steps import (answers, find_lines, in_words, line_length, lines_after, solve, spelled,
                   tokens_of, why_no_line)

WINDOWS = 1024   # of validation text: half of them to fit probes, half to see what these read
KNOWN = 0.9      # From this share on, a probe can read digits. (In analyze.py: a model knows them.)

class NotHere(Exception):
    """One sentence: why a run can't have what was asked for"""

# ------------------------------------------------------------------------------------------ a probe

def with_one(vectors):
    """(N, C) -> (N, C + 1). The 1 is for the constant of the map."""
    return F.pad(vectors.double(), (0, 1), value=1.0)

class Probe:
    """A linear map from a vector to a score for each symbol. It reads the one with the highest."""
    def __init__(self, vectors, digits, symbols, ridge=1.0):
        """Fits the map. vectors (N, C); digits (N,): those that it should read there, from 0 to
        symbols - 1"""
        inputs = with_one(vectors)
        wanted = F.one_hot(digits, symbols).double()   # the scores (N, symbols): one 1, else 0
        # Ridge regression: |inputs @ weights - wanted|² + ridge * |weights|² shall be as small as
        # can be. There its gradient is 0, and that is a linear system for the weights.
        system = inputs.T @ inputs + ridge * torch.eye(inputs.shape[1])
        self.weights = torch.linalg.solve(system, inputs.T @ wanted)   # (C + 1, symbols)

    def read(self, vectors):
        """vectors (N, C) -> digits (N,)"""
        return (with_one(vectors) @ self.weights).argmax(-1)

    def how_often_right(self, vectors, digits):
        """-> the share of these digits that it reads right in these vectors"""
        return (self.read(vectors) == digits).double().mean().item()

# --------------------------------------------------------------------------- what probes are fed on

def after_blocks(model, idx):
    """Yields L + 1 streams: that of the embedding, and that after each block. (A walk yields those
    after 0, 1, 2, .. sublayers, and a block is two of them.)"""
    for n_sublayers, stream in model.walk(idx):
        if n_sublayers % 2 == 0:
            yield stream

@torch.no_grad()
def vectors_of(model, idx, window, column, cells):
    """The vectors of all cells of some lines: {(where, block): (lines * cells, C)}. idx: windows
    (n, T). The i-th line's letter is idx[window[i], column[i]]. All are on the CPU, wherever the
    model is."""
    cell = torch.arange(cells)
    columns = {"line": column[:, None] + 1 + cell,                      # (lines, cells)
               "answer": column[:, None] + line_length(cells) + cell}
    vectors = {}
    for block, stream in enumerate(after_blocks(model, idx.to(model.device))):
        # A stream may be several tensors: as_tensor makes one of them, (n, T, C).
        of_tokens = unit(model.ends.as_tensor(stream)).cpu()
        for where in columns:
            vectors[where, block] = of_tokens[window[:, None], columns[where]].flatten(0, 1)
    return vectors

def vectors_and_digits(model, puzzle, x, y, k):
    """Of all N cells of the lines that ask for k steps, in windows x, y (n, T). Returns two things:

    vectors   {(where, block): (N, C)}
    digits    (k + 1, N): those of these cells after 0, 1, .. k steps"""
    parts_of_vectors, parts_of_digits = [], []   # 64 windows at a time
    for idx, targets in zip(x.split(64), y.split(64)):
        window, column, written = find_lines(idx, targets, k, puzzle)   # written: the lines' digits
        parts_of_vectors.append(vectors_of(model, idx, window, column, puzzle["cells"]))
        lines = lines_after(written, k, puzzle["table"])   # (k + 1, lines, cells)
        parts_of_digits.append(lines.flatten(1))
    digits = torch.cat(parts_of_digits, 1)
    if digits.shape[1] < 200:
        raise NotHere(f"its validation text has too few lines that ask for {in_words(k)}: fewer "
                      f"than 200 digits")
    vectors = {key: torch.cat([part[key] for part in parts_of_vectors])
               for key in parts_of_vectors[0]}   # Each is (where, block).
    return vectors, digits

# -------------------------------------------------------------------------- all probes of one model

class Inside:
    """Probes for lines that ask for k steps: one for each where, block and number of steps

    probes[where, block][steps]   fitted to one half of the windows
    share[where, block][steps]    of the digits in the other half, as that probe reads them"""
    def __init__(self, model, puzzle, windows, k):
        """windows: x, y (n, T) of validation text. NotHere if they have too few such lines"""
        self.model, self.puzzle, self.k = model, puzzle, k
        self.n_runs = len(model.order)   # of blocks: more than there are, with --repeat
        self.probes, self.share = {}, {}
        x, y = windows
        half, symbols = len(x) // 2, len(puzzle["table"])
        vectors, digits = vectors_and_digits(model, puzzle, x[:half], y[:half], k)
        other_vectors, other_digits = vectors_and_digits(model, puzzle, x[half:], y[half:], k)
        for key in vectors:   # Each is (where, block).
            self.probes[key], self.share[key] = [], []
            for steps in range(k + 1):
                probe = Probe(vectors[key], digits[steps], symbols)
                share = probe.how_often_right(other_vectors[key], other_digits[steps])
                self.probes[key].append(probe)
                self.share[key].append(share)

    def share_by_block(self, where):
        """-> for each block, from 0 on, the list of the shares after 0, 1, .. k steps"""
        return [self.share[where, block] for block in range(self.n_runs + 1)]

    def furthest(self, block):
        """-> (steps, where) of the furthest digits that can be read after a block, or None"""
        for steps in range(self.k, -1, -1):
            for where in "answer", "line":   # If both have them: in the answer they are of use.
                if self.share[where, block][steps] >= KNOWN:
                    return steps, where
        return None

    def example(self, line):
        """What can be read while the model answers a line that asks for k steps. Returns a dict,
        such as

            dict(line="c3141", answer="1085", true="1085", blocks=[row, row, ..])

        blocks: for each block, from 0 on, what row_of returns"""
        [answer] = answers(self.model, [line], self.puzzle)
        # One window, and the line is at its beginning. The answer's last digit predicts no cell.
        idx = torch.tensor([tokens_of(f"{line}\na{answer[:-1]}")])
        window, column = torch.tensor([0]), torch.tensor([0])
        vectors = vectors_of(self.model, idx, window, column, self.puzzle["cells"])
        lines = solve(line, self.puzzle)   # the digits after 0, 1, .. k steps
        rows = [self.row_of(block, vectors, lines) for block in range(self.n_runs + 1)]
        return dict(line=line, answer=answer, true=lines[-1], blocks=rows)

    def row_of(self, block, vectors, lines):
        """The furthest digits that can be read after a block, in these vectors of one line. Returns
        None, or a dict, such as

            dict(steps=1, where="line", share=0.99, digits="5877", true="5877")

        share: how often this probe is right, on other lines; digits: what it reads here"""
        furthest = self.furthest(block)
        if furthest is None:
            return None
        steps, where = furthest
        digits = self.probes[where, block][steps].read(vectors[where, block])
        return dict(steps=steps, where=where, share=self.share[where, block][steps],
                    digits=spelled(digits), true=lines[steps])

# ------------------------------------------------------------------------------- sample.py --inside

def show_inside(model, data, line):
    """Prints what a probe reads in the stream, block by block, and then the answer. data: the
    folder of the steps text; line: such as f314159265358. SystemExit if that can't be"""
    puzzle = dataset.load_meta(data).get("steps")
    if not puzzle:
        refuse("--inside: is for a run on the steps text, which prepare.py steps makes")
    what_a_line_is = why_no_line(line, puzzle)
    if what_a_line_is:
        refuse(f"--inside: needs a --prompt of one line: {what_a_line_is}")
    k = ord(line[0]) - ord("a")
    windows = dataset.windows_of(data, "val", model.config.block_size, WINDOWS)
    try:
        example = Inside(model, puzzle, windows, k).example(line)
    except NotHere as why:
        refuse(f"--inside: {why}")
    print_example(example, k)

def print_example(example, k):
    """example: as Inside.example returns it"""
    line, answer, true = example["line"], example["answer"], example["true"]
    print(f"\n{line}")
    # Where no step or one is asked for, nothing is between.
    between = " The text never shows what is between." if k > 1 else ""
    print(f"{line[0]} asks for the line after {in_words(k)}.{between}")
    print("A probe reads in the stream (%: how often it is right, on other lines):\n")
    for block, row in enumerate(example["blocks"][1:], 1):   # without the embedding
        if row:
            digits = marked(row["digits"], row["true"])
            says = f"{in_words(row['steps']):<12}{row['share']:>5.0%}  in the {row['where']}"
        else:
            digits, says = ". " * len(true), "nothing to be read yet"
        print(f"  after block {block:<3} {digits} {says}")
    n_wrong = sum(digit != wanted for digit, wanted in zip(answer, true))
    verdict = f"right, all {len(true)} digits"
    if n_wrong:
        verdict = f"{n_wrong} of {len(true)} digits are wrong"
    print(f"\n  the answer      {marked(answer, true)} {verdict}\n")

def marked(digits, true):
    """314 -> "3 1 4 ". A wrong digit has a ! behind it."""
    return "".join(digit + (" " if digit == wanted else "!") for digit, wanted in zip(digits, true))
