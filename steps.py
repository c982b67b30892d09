"""
The steps text: each line follows from the one before, in none, one, two or more steps.

    c314159265358     a letter, and digits. c: the next line is two steps after it (a: 0, b: 1)
    d108515848740     asks for three steps
    c954006051092

In a step, all digits are replaced at once. By which? That depends on the digit and on its left
neighbour. (Left of the first digit is a 0.)

    this digit                0 1 2 3 4 5 6 7 8 9
    after an even one         0 7 4 5 6 1 3 8 9 2
    after an odd one          9 8 1 4 7 2 6 5 0 3

So 314159265358 becomes 587723131420, and this becomes 108515848740, the second line: it is the
answer to the first. We know how many steps lead to each digit, and so we see how many steps a model
has learned.

The place of a digit in its line is called its cell. The leftmost one is cell 0. A token is one
character, and its number is that of the byte; 256 comes after each document.
"""
import numpy as np
import torch
import torch.nn.functional as F

LINES = 16   # of a document
DOCUMENTS = dict(train=24_000, val=1_200)
SEEDS = dict(train=5, val=3)   # so that each split has other lines

# ------------------------------------------------------------------- the puzzle, and what a step is

def make_puzzle(symbols, rows, cells, most, table_seed):
    """-> the puzzle, a dict: table=, cells=, most=. (prepare.py keeps it in the data set's
    meta.json.) The flags of prepare.py steps:

    symbols      how many different digits there are
    rows         how many different rows the table has; symbols can be divided by it
    cells        how many digits a line has
    most         the most steps that a line asks for
    table_seed   of the table's random numbers"""
    table = make_table(symbols, rows, np.random.default_rng(table_seed))
    return dict(table=table.tolist(), cells=cells, most=most)

def make_table(symbols, rows, rng):
    """-> table[left neighbour][digit], an array (symbols, symbols): what the digit becomes. Of the
    neighbour only the class counts, left % rows. With two rows: whether it is even or odd.

    A row holds each digit once, so nothing is lost in a step. And no two rows send a digit to the
    same class: 3 becomes 5, which is odd, or 4, which is even. So who doesn't know the neighbour
    can't even tell odd from even."""
    # To which class does each digit go in the first row? With two rows, half of them become even.
    class_in_first_row = rng.permutation(np.repeat(np.arange(rows), symbols // rows))
    different_rows = np.zeros((rows, symbols), int)
    for row in range(rows):
        class_of_next = (class_in_first_row + row) % rows
        for each_class in range(rows):
            members = np.arange(each_class, symbols, rows)   # such as 0 2 4 6 8
            different_rows[row, class_of_next == each_class] = rng.permutation(members)
    return different_rows[np.arange(symbols) % rows]   # a row for each left neighbour

def next_line(digits, table):
    """One step: digits, a tensor (..., cells) -> the digits after it"""
    left = F.pad(digits[..., :-1], (1, 0))   # of each digit; it begins with a 0
    return torch.as_tensor(table)[left, digits]

def lines_after(digits, steps, table):
    """digits (..., cells) -> a tensor (steps + 1, ..., cells): the digits after 0, 1, .. steps"""
    lines = [torch.as_tensor(digits)]
    for _ in range(steps):
        lines.append(next_line(lines[-1], table))
    return torch.stack(lines)

# ------------------------------------------------------------------- the text: for prepare.py steps

def make_documents(puzzle, seed, split):
    """-> the texts of "train" or of "val". At random are the digits of their first lines, and how
    many steps each line asks for. seed: the table's, so another table has other documents"""
    n, table, most = DOCUMENTS[split], puzzle["table"], puzzle["most"]
    rng = np.random.default_rng((seed, SEEDS[split]))
    weights = 0.85 ** np.arange(most + 1)   # Lines that ask for few steps are more frequent.
    asked = torch.from_numpy(rng.choice(most + 1, (n, LINES), p=weights / weights.sum()))
    digits = torch.from_numpy(rng.integers(len(table), size=(n, puzzle["cells"])))
    newline = torch.full((n, 1), ord("\n"))
    parts = []   # from left to right, each of all n documents at once
    for number in range(LINES):
        steps = asked[:, number, None]   # (n, 1)
        parts += [ord("a") + steps, ord("0") + digits, newline]
        for done in range(most):
            # Where fewer steps are asked for, the digits are right already, and stay.
            digits = torch.where(done < steps, next_line(digits, table), digits)
    tokens = torch.cat(parts, 1).to(torch.uint8).numpy()
    return [bytes(document).decode() for document in tokens]

# ------------------------------------- a line to type and its answer: for sample.py and analyze.py

def some_digits(puzzle):
    """The first sixteen of pi, again and again; without all ten digits, 0, 1, .. again and again"""
    if len(puzzle["table"]) == 10:
        return ("3141592653589793" * 7)[:puzzle["cells"]]
    return "".join(str(i % len(puzzle["table"])) for i in range(puzzle["cells"]))

def solve(line, puzzle):
    """b314159265358 -> ["314159265358", "587723131420"], its digits after no step and after one. As
    many as it asks for: so the last of them is the right answer."""
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
    idx = torch.tensor([tokens_of(f"{line}\na") for line in lines], device=model.device)
    tokens = model.generate(idx, puzzle["cells"], temperature=0)[:, idx.shape[1]:]
    return [spelled(answer - ord("0")) for answer in tokens]

def tokens_of(text):
    """A token is a byte. "a0" -> [97, 48]"""
    return list(text.encode())

def spelled(digits):
    """A tensor of digits -> a text. What is no digit becomes a question mark."""
    return "".join(str(digit) if 0 <= digit <= 9 else "?" for digit in digits.tolist())

def in_words(n):
    """2 -> two steps"""
    words = "no one two three four five six seven eight nine ten".split()
    return f"{words[n] if n < len(words) else n} step{'s' * (n != 1)}"

# ------------------- lines and answers in windows of text: for inside.py, patch.py and analyze.py

# A window is a row of T + 1 tokens, and a token's place in it is its column. A model reads idx, all
# but the last, and predicts targets, all but the first. If lines had four digits only, c3141 and
# its answer would stand like this:
#
#     column     0  1  2  3  4  5  6  7  8  9 10
#     token      c  3  1  4  1  ↵  a  1  0  8  5
#     cell          0  1  2  3        0  1  2  3

def line_length(cells):
    """How many columns a line takes: its letter, its digits, its newline"""
    return 1 + cells + 1

def find_answers(idx, targets, cells):
    """Finds all N lines that are an answer: the line before is in the same window. idx, targets:
    windows (n, T). Returns four things:

    tokens                 the windows (n, T + 1)
    window, column (N,)    the answer's letter is tokens[window, column]
    asked (N,)             how many steps lead to it, as the letter of the line before says"""
    tokens = torch.cat((idx[:, :1], targets), 1)
    is_letter = (tokens >= ord("a")) & (tokens <= ord("z"))
    # The first line of a document is no answer. In front of it stands a 256, and no newline.
    after_newline = tokens.roll(1, dims=1) == ord("\n")   # Each column gets the token left of it.
    is_answer = is_letter & after_newline
    # There the line before is not all in the window. (And column 0 got the window's last token.)
    is_answer[:, :line_length(cells)] = False
    window, column = is_answer.nonzero().T
    asked = tokens[window, column - line_length(cells)] - ord("a")
    return tokens, window, column, asked

def steps_of_targets(idx, targets, cells):
    """How many steps lead to each target? idx, targets: windows (n, T). Returns two tensors (n, T):

    steps    -1 where nobody can know: the target is no digit, or the line before it is not in the
             window
    cell     that of the digit; only of use where the steps are known"""
    tokens, window, column, asked = find_answers(idx, targets, cells)
    # The last answer may go on beyond the window, so we make room for its cells there.
    n, width = tokens.shape
    steps = tokens.new_full((n, width + cells), -1)
    cell_of = torch.zeros_like(steps)
    for cell in range(cells):
        steps[window, column + 1 + cell] = asked
        cell_of[window, column + 1 + cell] = cell
    return steps[:, 1:width], cell_of[:, 1:width]   # Targets are all tokens but the first.

def find_lines(idx, targets, k, puzzle):
    """Finds all N lines that ask for k steps, and whose whole answer is in the same window. (Its
    last digit may be the last target.) idx, targets: windows (n, T); puzzle: what meta.json says of
    the steps text. Returns three things:

    window, column (N,)   the line's letter is idx[window, column]
    digits (N, cells)     those of the line"""
    cells = puzzle["cells"]
    tokens, window, answer_column, asked = find_answers(idx, targets, cells)
    is_whole = answer_column + cells < tokens.shape[1]
    chosen = (asked == k) & is_whole
    window, column = window[chosen], answer_column[chosen] - line_length(cells)
    columns = column[:, None] + 1 + torch.arange(cells, device=idx.device)   # of the digits
    return window, column, tokens[window[:, None], columns] - ord("0")
