"""
The steps text: each line follows from the one before, in none, one, two or more steps. README.md
does some by hand, under "The puzzle".

    c314159265358     a letter, and digits. c: the next line is two steps after it (a: 0, b: 1)
    d108515848740     asks for three steps
    c954006051092

In a step, each digit becomes another one, all at once: table[its left neighbour][itself]. We know
how many steps lead to each digit, and so we see how many steps a model has learned. The place of a
digit in its line is called its cell. The leftmost one is cell 0. A token is one character, and its
number is that of the byte; 256 comes after each document.
"""
from dataclasses import dataclass

import numpy as np
import torch

from flags import flag

LINES = 16   # of a document
DOCUMENTS = dict(train=24_000, val=1_200)
SEEDS = dict(train=5, val=3)   # so that each split has other lines

# ----------------------------------------------------------------------------------- what a step is

def next_line(digits, table):
    """One step: digits (..., cells) -> (..., cells). Left of the first digit is a 0."""
    digits = np.asarray(digits)
    left = np.concatenate((np.zeros_like(digits[..., :1]), digits[..., :-1]), axis=-1)
    return np.asarray(table)[left, digits]

def lines_after(digits, steps, table):
    """digits (..., cells) -> a tensor (steps + 1, ..., cells): the digits after 0, 1, .. steps"""
    lines = [np.asarray(digits)]
    for _ in range(steps):
        lines.append(next_line(lines[-1], table))
    return torch.from_numpy(np.stack(lines))

def make_table(symbols, rows, rng):
    """-> table (symbols, symbols): what a digit becomes, by its left neighbour and itself. Of the
    neighbour only the class counts, left % rows. With two rows: whether it is even or odd. Here are
    these two rows, as README.md has them:

        0 1 2 3 4 5 6 7 8 9    this digit becomes
        0 7 4 5 6 1 3 8 9 2    after an even one
        9 8 1 4 7 2 6 5 0 3    after an odd one

    A row holds each digit once, so nothing is lost in a step. And each digit has successors of all
    classes: 3 becomes 5 or 4. So who does not know the neighbour can't even tell odd from even."""
    # To which class does each symbol go in the first row? With two rows, five become even.
    class_of_next = rng.permutation(np.repeat(np.arange(rows), symbols // rows))
    by_class = np.zeros((rows, symbols), int)
    for row in range(rows):
        for each_class in range(rows):
            members = np.arange(each_class, symbols, rows)   # such as 0 2 4 6 8
            by_class[row, class_of_next == each_class] = rng.permutation(members)
        class_of_next = (class_of_next + 1) % rows   # In the next row, each goes to the next class.
    return by_class[np.arange(symbols) % rows]

# ----------------------------------------------------------------------------------------- the text

def make_puzzle(config):
    """What meta.json says about the steps text. config: the flags of prepare.py steps. Of these,
    `table` is the table's seed, and `most` the most steps that a line asks for."""
    table = make_table(config.symbols, config.rows, np.random.default_rng(config.table))
    return dict(table=table.tolist(), cells=config.cells, most=config.most)

def steps_text(config):
    """-> documents for training, and for validation: two lists of texts"""
    return make_documents(config, "train"), make_documents(config, "val")

def make_documents(config, split):
    """-> the texts of "train" or of "val". Drawn at random are the digits of their first lines, and
    how many steps each line asks for."""
    n, table = DOCUMENTS[split], make_puzzle(config)["table"]
    rng = np.random.default_rng((config.table, SEEDS[split]))
    weights = 0.85 ** np.arange(config.most + 1)   # Lines that ask for few steps are more frequent.
    asked = rng.choice(config.most + 1, (n, LINES), p=weights / weights.sum())
    digits = rng.integers(config.symbols, size=(n, config.cells))   # of the first lines
    newline = np.full((n, 1), ord("\n"))
    parts = []   # from left to right, each of all n documents at once
    for line in range(LINES):
        steps = asked[:, line:line + 1]   # (n, 1)
        parts += [ord("a") + steps, ord("0") + digits, newline]
        for done in range(config.most):
            # Where fewer steps are asked for, the digits are right already, and stay.
            digits = np.where(done < steps, next_line(digits, table), digits)
    documents = np.concatenate(parts, axis=1).astype("u1")
    return [bytes(document).decode() for document in documents]

# ------------------------------------------------------------------------- lines in windows of text

# A window is a row of tokens, and a token's place in it is its column. If lines had four digits
# only, c3141 and its answer would stand like this:
#
#     column     0  1  2  3  4  5  6  7  8  9 10
#     token      c  3  1  4  1 \n  a  1  0  8  5
#     "line"        0  1  2  3                      cells, where the line's digits stand
#     "answer"                     0  1  2  3       cells, where the answer's are predicted
#
# A token predicts the next one, so the answer's digits are predicted from its letter on.

def line_length(cells):
    """How many columns a line takes: its letter, its digits, its newline"""
    return 1 + cells + 1

def columns_of_cells(begin, cells):
    """begin (N,): the columns where N lines begin, with their letters -> dict(line=, answer=), two
    rows of the picture: the columns of each line's cells, and of its answer's, each (N, cells)"""
    cell = torch.arange(cells, device=begin.device)
    answer_begin = begin + line_length(cells)
    return dict(line=begin[:, None] + 1 + cell, answer=answer_begin[:, None] + cell)

def steps_of_targets(idx, targets, cells):
    """How many steps lead to each target? idx, targets: windows (n, T). Returns two tensors (n, T):

    steps    as the letter of the line before asks for; -1 where nobody can know: the target is
             no digit, or the line before it is not in the window
    cell     that of the digit; only of use where the steps are known"""
    tokens = torch.cat((idx[:, :1], targets), 1)   # the whole window, (n, T + 1)
    column = torch.arange(tokens.shape[1], device=idx.device).expand_as(tokens)
    is_letter = (tokens >= ord("a")) & (tokens <= ord("z"))
    # Where does the line of each token begin? At the last letter so far; -1: the window has none.
    begin = torch.where(is_letter, column, -1).cummax(dim=1).values
    begin_before = begin - line_length(cells)   # There begins the line before.
    cell = column - begin - 1
    # The first line of a document follows none: in front of it stands a 256, and no newline.
    follows = tokens.gather(1, (begin - 1).clamp_min(0)) == ord("\n")
    known = follows & (begin_before >= 0) & (cell >= 0) & (cell < cells)
    asked = tokens.gather(1, begin_before.clamp_min(0)) - ord("a")
    steps = torch.where(known, asked, -1)
    return steps[:, 1:], cell[:, 1:]   # Targets are all tokens but the first.

def find_lines(idx, targets, k, puzzle):
    """Finds all N lines that ask for k steps, and whose whole answer is in the same window. idx,
    targets: windows (n, T); puzzle: what meta.json says of the steps text. Returns

    window, begin (N,)   the i-th line begins in idx[window[i]], with its letter, at begin[i]
    digits (N, cells)    what stands in these lines"""
    cells = puzzle["cells"]
    steps, cell = steps_of_targets(idx, targets, cells)
    # At the letter of an answer, the target is the answer's first digit.
    is_answer = (steps == k) & (cell == 0)
    last = idx.shape[1] - cells   # Of an answer that begins further right, some digits are missing.
    window, answer_begin = is_answer[:, :last + 1].nonzero().T
    begin = answer_begin - line_length(cells)
    columns = columns_of_cells(begin, cells)["line"]
    return window, begin, idx[window[:, None], columns] - ord("0")

# --------------------------------------------------------------------------- lines to type and read

def some_digits(puzzle):
    """The first sixteen of pi, again and again; without all ten digits, 0, 1, .. again and again"""
    if len(puzzle["table"]) == 10:
        return ("3141592653589793" * 7)[:puzzle["cells"]]
    return "".join(str(i % len(puzzle["table"])) for i in range(puzzle["cells"]))

def solve(line, puzzle):
    """b314159265358 -> its digits after no step and after one: 314159265358 and 587723131420. The
    last is the right answer."""
    steps, digits = ord(line[0]) - ord("a"), [int(digit) for digit in line[1:]]
    return [spelled(each) for each in lines_after(digits, steps, puzzle["table"])]

def why_no_line(line, puzzle):
    """None if the text can have this line, or else a sentence: what its lines are"""
    letters = [chr(ord("a") + steps) for steps in range(puzzle["most"] + 1)]
    digits = [str(digit) for digit in range(len(puzzle["table"]))]
    cells = puzzle["cells"]
    if len(line) == 1 + cells and line[0] in letters and all(each in digits for each in line[1:]):
        return None
    return f"a letter from a to {letters[-1]}, and {cells} digits from 0 to {digits[-1]}"

def answers(model, lines, puzzle):
    """What a model answers to each line, digit by digit the likeliest. (We write the answer's
    letter, because the text draws it at random.)"""
    idx = torch.tensor([[*f"{line}\na".encode()] for line in lines], device=model.device)
    tokens = model.generate(idx, puzzle["cells"], temperature=0)[:, idx.shape[1]:]
    return [spelled(answer - ord("0")) for answer in tokens]

def spelled(digits):
    """A tensor of digits -> a text. What is no digit becomes a question mark."""
    return "".join(str(digit) if 0 <= digit <= 9 else "?" for digit in digits.tolist())

def in_words(n):
    """2 -> two steps"""
    words = "no one two three four five six seven eight nine ten".split()
    return f"{words[n] if n < len(words) else n} step{'s' * (n != 1)}"

# ---------------------------------------------------------------------------------------- the flags

@dataclass
class StepsConfig:
    """The flags of prepare.py steps"""
    symbols: int = flag(10, "different digits", low=2, high=10, group="the steps text")
    rows: int = flag(2, "different rows of the table; has to divide symbols", low=2, high=10)
    cells: int = flag(12, "digits in a line", low=2, high=100)
    most: int = flag(9, "the most steps that a line asks for", low=1, high=25)
    table: int = flag(0, "seed of the table", low=0, high=1e9)

    def problems(self):
        """parse, which reads the command line, refuses with these sentences."""
        if self.symbols % self.rows:
            yield f"--rows {self.rows}: must divide --symbols {self.symbols}; take {self.symbols}"
