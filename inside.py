"""
The lines that nobody wrote. A line of the steps text, such as f314159265358, asks for its line five
steps later. The text never has the lines between. Are they inside of the model?

A probe, a linear map from the stream to a digit, reads them there, block by block (`Inside`). A
patch shows at which block the answer stops needing the place where the line stands (`patch`).
sample.py --inside shows the first, analyze.py shows both.
"""
import torch
import torch.nn.functional as F

import prepare
from model import EVERYONE, Runner, Without, unit
from steps import next_line, steps_asked

WINDOWS = 1024     # of validation text: half of them to fit a probe, half to see what it reads
KNOWN = 0.9        # A probe can read a line, and a model knows a step, if so many digits are right.

class NotHere(Exception):
    """One sentence: why a run can't have what was asked for"""

# ------------------------------------------------------------------------- lines and their answers

def lines_after(line, puzzle):
    """f314159265358 -> digits (6, cells), after 0, 1, .. 5 steps. puzzle: what meta.json says of
    the steps text: its table, cells and most steps"""
    return all_lines(torch.tensor([*map(int, line[1:])]), ord(line[0]) - ord("a"), puzzle)

def all_lines(digits, k, puzzle):
    """digits (..., cells) -> (k + 1, ..., cells), after 0, 1, .. k steps"""
    lines = [digits]
    for _ in range(k):
        lines.append(torch.from_numpy(next_line(lines[-1], puzzle["table"])))
    return torch.stack(lines)

def answers(model, lines, puzzle):
    """What the model writes after each line, digit by digit the likeliest. (We write the answer's
    letter, because the text draws it at random.)"""
    idx = torch.tensor([[*f"{line}\na".encode()] for line in lines], device=model.device)
    new = model.generate(idx, puzzle["cells"], temperature=0)[:, idx.shape[1]:]
    return [spelled(row - ord("0")) for row in new]

def spelled(digits):
    return "".join(str(digit) if 0 <= digit <= 9 else "?" for digit in digits.tolist())

def some_digits(puzzle):
    """The first sixteen of pi, again and again; without all ten digits, 0, 1, .. again and again"""
    if len(puzzle["table"]) == 10:
        return ("3141592653589793" * 7)[:puzzle["cells"]]
    return "".join(str(i % len(puzzle["table"])) for i in range(puzzle["cells"]))

def in_words(n):
    """2 -> two steps"""
    words = "no one two three four five six seven eight nine ten".split()
    return f"{words[n] if n < len(words) else n} step{'s' * (n != 1)}"

# --------------------------------------------------------------------------------------- the probe

def probe(features, digits, symbols, ridge=1.0):
    """Ridge regression, one linear system: a linear map that tells digits from features.

    features (n, C); digits (k + 1, n), of k + 1 lines -> a map for each, (k + 1, C + 1, symbols)"""
    x = with_one(features)
    wanted = F.one_hot(digits, symbols).double()   # (k + 1, n, symbols)
    return torch.linalg.solve(x.T @ x + ridge * torch.eye(x.shape[1]), x.T @ wanted)

def read(weights, features):
    """-> the likeliest digits by each of the k + 1 maps, (k + 1, n)"""
    return (with_one(features) @ weights).argmax(-1)

def with_one(features):
    return F.pad(features.double(), (0, 1), value=1.0)   # 1: for the constant of the map

def columns(column, cells):
    """column (N,): of the answer's letter -> columns (N, cells) of the streams that we read

        f 3 1 4 \\n a 9 5 4
          line        answer: a token predicts its right neighbour, so it begins at the letter"""
    cell = torch.arange(cells)
    return {"line": column[:, None] - cells - 1 + cell, "answer": column[:, None] + cell}

def questions(idx, targets, puzzle, k):
    """All lines in windows that ask for k steps, and whose answer is in the window, too -> window
    (N,); column (N,) of the answer's letter; lines (k + 1, N, cells): after 0, 1, .. k steps"""
    cells = puzzle["cells"]
    asked, cell = steps_asked(torch.cat((idx[:, :1], targets), 1), cells)
    begins = (asked == k) & (cell == 0)
    window, column = begins[:, :idx.shape[1] - cells + 1].nonzero().T
    line = idx[window[:, None], columns(column, cells)["line"]]
    return window, column, all_lines(line - ord("0"), k, puzzle)

def ends_of_blocks(model, idx):
    """Yields L + 1 streams: that of the embedding, and that after each block"""
    for place, before, after in model.walk(idx):
        if place == 1:
            yield before
        if place % 2 == 0:
            yield after

class Inside:
    """Probes of the lines inside, for lines that ask for k steps. There is one for each block (0:
    for the embedding), for the line after 0, 1, .. k steps, and for two places. "answer": the
    stream that predicts the digit in question; "line": the stream of the digit above it.

    share[where, block][steps]: how many digits it reads, in windows that it was not fitted to"""
    def __init__(self, model, puzzle, windows, k):
        """windows: x, y (n, T). NotHere if they have too few such lines"""
        self.model, self.puzzle, self.k = model, puzzle, k
        half = len(windows[0]) // 2
        features, digits = self.collect(*(part[:half] for part in windows))
        self.probes = {key: probe(x, digits, len(puzzle["table"])) for key, x in features.items()}
        features, digits = self.collect(*(part[half:] for part in windows))
        self.share = {key: (read(self.probes[key], x) == digits).double().mean(-1).tolist()
                      for key, x in features.items()}

    def collect(self, x, y):
        """-> of all lines that ask for k steps: {(where, block): features (n, C)}, and their digits
        (k + 1, n) after 0, 1, .. k steps"""
        features, digits = [], []
        for idx, targets in zip(x.split(64), y.split(64)):
            window, column, lines = questions(idx, targets, self.puzzle, self.k)
            features.append(self.features(idx, window, column))
            digits.append(lines.flatten(1))
        digits = torch.cat(digits, 1)
        if digits.shape[1] < 200:
            raise NotHere(f"its validation text has too few lines that ask for {in_words(self.k)}: "
                          f"fewer than 200 digits")
        return {key: torch.cat([part[key] for part in features]) for key in features[0]}, digits

    @torch.no_grad()
    def features(self, idx, window, column):
        """unit(stream) at all cells of some lines: {(where, block): (n, C)}. window (N,): the row
        of idx; column (N,): of the answer's letter"""
        found = {}
        for block, stream in enumerate(ends_of_blocks(self.model, idx.to(self.model.device))):
            x = unit(self.model.ends.as_tensor(stream)).cpu()
            for where, read_at in columns(column, self.puzzle["cells"]).items():
                found[where, block] = x[window[:, None], read_at].flatten(0, 1)
        return found

    def shares(self, where):
        """A row for each block, from the embedding on: the share read after 0, 1, .. k steps"""
        return [shares for (place, _), shares in self.share.items() if place == where]

    def furthest(self, block):
        """-> (steps, where) of the furthest line that can be read after a block, or None"""
        for steps in range(self.k, -1, -1):
            for where in "answer", "line":
                if self.share[where, block][steps] >= KNOWN:
                    return steps, where
        return None

    def example(self, line):
        """What can be read while the model answers a line such as f314159265358, block by block"""
        answer, = answers(self.model, [line], self.puzzle)
        # The last digit predicts what follows, so it isn't read.
        idx = torch.tensor([[*f"{line}\na{answer[:-1]}".encode()]])
        features = self.features(idx, torch.tensor([0]), torch.tensor([len(line) + 1]))
        true, blocks = lines_after(line, self.puzzle), []
        for block in range(len(self.shares("line"))):
            row = None
            if furthest := self.furthest(block):
                steps, where = furthest
                digits = read(self.probes[where, block], features[where, block])[steps]
                row = dict(steps=steps, where=where, share=self.share[where, block][steps],
                           digits=spelled(digits), true=spelled(true[steps]))
            blocks.append(row)
        return dict(line=line, answer=answer, true=spelled(true[-1]), blocks=blocks)

def inside_of(model, data, puzzle, k):
    """-> Inside, from the validation windows in the folder `data`. SystemExit if there are none;
    NotHere if they have too few lines that ask for k steps"""
    windows = prepare.windows_of(data, "val", model.config.block_size, WINDOWS)
    return Inside(model, puzzle, windows, k)

# --------------------------------------------------------------------------------------- the patch

class Patched(Without):
    """After one block, some columns of each sequence get the stream of the sequence before it."""
    def __init__(self, block, where, decider):
        super().__init__((), decider)   # It removes nothing.
        self.block, self.where = block, where

    def after(self, runner, stream):
        stream = super().after(runner, stream)
        return self.patch(stream) if runner.place == 2 * self.block else stream

    def patch(self, stream):
        if isinstance(stream, tuple):
            return tuple(self.patch(x) for x in stream)
        stream = stream.clone()
        stream[:, self.where] = stream.roll(1, dims=0)[:, self.where]
        return stream

@torch.no_grad()
def patch(model, puzzle, k, n=400):
    """The stream of another line takes the place of this line's. Whose answer comes out?

    n lines of random digits ask for k steps, each alone in its window. The model gets the right
    answer's digits, and says each next one -> {where: {whose answer: share of its digits that the
    model says, in the right half, if it is patched after block 1, 2, ..}}"""
    if model.ends.stream_grows:
        raise NotHere("its stream has a part for each block, so there is no one state to patch")
    cells, generator = puzzle["cells"], torch.Generator().manual_seed(0)
    if 2 * cells + 2 > model.config.block_size:
        raise NotHere("a line and its answer don't fit into its --block_size")
    digits = torch.randint(len(puzzle["table"]), (n, cells), generator=generator)
    answer = all_lines(digits, k, puzzle)[-1] + ord("0")
    first, newline, letter = (torch.full((n, 1), ord(c)) for c in (chr(ord("a") + k), "\n", "a"))
    idx = torch.cat((first, digits + ord("0"), newline, letter, answer[:, :-1]), 1).to(model.device)
    answer = answer.to(model.device)
    found = {}
    for name, where in (("where the line stands", slice(1, cells + 2)),   # with its newline
                        ("where the answer is predicted", slice(cells + 2, None))):
        own, other = [], []
        for block in range(1, len(model.order) + 1):
            runner = Runner(model, Patched(block, where, model.decider))
            said = model(idx, runner=runner)[0][:, -cells:].argmax(-1)
            for shares, wanted in ((own, answer), (other, answer.roll(1, dims=0))):
                shares.append((said == wanted)[:, cells // 2:].float().mean().item())
        found[name] = {"its own answer": own, "the other line's answer": other}
    return found

# ----------------------------------------------------------------------------------- who runs what

def sublayers_of(model, block):
    """The places, from 1, of the sublayers of a block, numbered from 0: those of all its runs, if
    --repeat runs it several times"""
    return {place for i, number in enumerate(model.order) if number == block
            for place in (2 * i + 1, 2 * i + 2)}

def who_ran(runner):
    """After a walk -> bools (2L, B, T), True where a token ran a sublayer"""
    device = runner.model.device
    return torch.stack([keep if torch.is_tensor(keep)
                        else torch.full(tuple(runner.shape), keep is EVERYONE, device=device)
                        for keep in runner.keeps])
