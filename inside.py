r"""
The lines that nobody wrote. A line of the steps text, such as c314159265358, asks for the line two
steps later, which is its answer. The text never has the line between. Is it inside of the model?

Two tools look for it, in a model that is trained:

    Inside   fits probes: linear maps from the stream of one token to a digit. After which block can
             they read the digits after one step? And after two?
    patch    asks whether the answer needs what is there: after a block, the stream of another line
             takes the place of this one's. Whose answer does the model say?

sample.py --inside shows the first, analyze.py shows both.

This is a line, as a window of the text holds it, if lines had four digits only:

    column     0  1  2  3  4  5  6  7  8  9 10
    token      c  3  1  4  1 \n  a  1  0  8  5
    "line"        0  1  2  3                      cells of the line, where they stand
    "answer"                     0  1  2  3       cells of the answer, where they are predicted

A token predicts the next one: that of column 6 predicts the answer's first digit. So we look for
cell 0 in columns 1 and 6. Its digit is 3 after no step, 5 after one (nobody wrote it), and 1 after
two. All lines below are made and found by steps.py; block 0 is the embedding.
"""
import torch
import torch.nn.functional as F

from model import Runner, unit
from steps import answers, in_words, lines_after, lines_that_ask, solve, spelled

WINDOWS = 1024     # of validation text, for Inside: half to fit probes, half to see what they read
KNOWN = 0.9        # A probe can read a line, and a model knows a step, if this share is right.

class NotHere(Exception):
    """One sentence: why a run can't have what was asked for"""

# ------------------------------------------------------------------------------------------ a probe

class Probe:
    """A linear map from the vector of a token to a score for each digit"""
    def __init__(self, vectors, digits, symbols, ridge=1.0):
        """Fits the map. vectors (N, C): of N tokens; digits (N,): what it should read there, from 0
        to symbols - 1"""
        x = with_one(vectors)
        wanted = F.one_hot(digits, symbols).double()   # (N, symbols): 1 for the digit, else 0
        # Ridge regression: of all weights, these have the least sum of squares of
        # x @ weights - wanted, plus ridge times that of the weights. They solve a linear system.
        system = x.T @ x + ridge * torch.eye(x.shape[1])
        self.weights = torch.linalg.solve(system, x.T @ wanted)   # (C + 1, symbols)

    def read(self, vectors):
        """-> the digits (N,) with the highest scores"""
        return (with_one(vectors) @ self.weights).argmax(-1)

    def share(self, vectors, digits):
        """-> the share of these digits that it reads right"""
        return (self.read(vectors) == digits).double().mean().item()

def with_one(vectors):
    """(N, C) -> (N, C + 1): its 1 is multiplied by the constant of the map."""
    return F.pad(vectors.double(), (0, 1), value=1.0)

# -------------------------------------------------------------------------- all probes of one model

class Inside:
    """Reads the lines that ask for k steps, with a probe of its own for each place (where: "line"
    or "answer"), after each block, and for the digits after each number of steps:

    probes[where, block][steps]   fitted to half of the windows
    share[where, block][steps]    of the digits in the other half that the probe reads right"""
    def __init__(self, model, puzzle, windows, k):
        """puzzle: what meta.json says of the steps text; windows: x, y (n, T). NotHere if they have
        too few lines that ask for k steps"""
        self.model, self.puzzle, self.k = model, puzzle, k
        (x, y), half = windows, len(windows[0]) // 2
        vectors, digits = self.collect(x[:half], y[:half])
        other_vectors, other_digits = self.collect(x[half:], y[half:])
        self.probes, self.share = {}, {}
        for key in vectors:
            self.probes[key] = [Probe(vectors[key], digits[steps], len(puzzle["table"]))
                                for steps in range(k + 1)]
            self.share[key] = [probe.share(other_vectors[key], other_digits[steps])
                               for steps, probe in enumerate(self.probes[key])]

    def collect(self, x, y):
        """All cells of all lines that ask for k steps, in windows x, y (n, T) ->

        vectors[where, block] (N, C): of the tokens from which a probe reads these N cells
        digits[steps] (N,): what is right there, after 0, 1, .. k steps"""
        vectors, digits = [], []
        for idx, targets in zip(x.split(64), y.split(64)):
            window, column, line = lines_that_ask(idx, targets, self.k, self.puzzle)
            vectors.append(self.vectors(idx, window, column))
            digits.append(lines_after(line, self.k, self.puzzle["table"]).flatten(1))
        digits = torch.cat(digits, 1)
        if digits.shape[1] < 200:
            raise NotHere(f"its validation text has too few lines that ask for {in_words(self.k)}: "
                          f"fewer than 200 digits")
        return {key: torch.cat([part[key] for part in vectors]) for key in vectors[0]}, digits

    @torch.no_grad()
    def vectors(self, idx, window, column):
        """window, column (N,): where N lines begin in idx (n, T) -> {(where, block): vectors (N *
        cells, C)}. These are unit(stream), because norms read the stream so, too."""
        cells = self.puzzle["cells"]
        begin, cell = column[:, None], torch.arange(cells)
        columns = {"line": begin + 1 + cell, "answer": begin + cells + 2 + cell}
        found = {}
        for block, stream in enumerate(ends_of_blocks(self.model, idx.to(self.model.device))):
            x = unit(self.model.ends.as_tensor(stream)).cpu()
            for where in columns:
                found[where, block] = x[window[:, None], columns[where]].flatten(0, 1)
        return found

    def share_by_block(self, where):
        """-> a list for each block, from the embedding on: the share read after 0, 1, .. k steps"""
        return [share for (place, _), share in self.share.items() if place == where]

    def furthest(self, block):
        """-> (steps, where) of the furthest digits that can be read after a block, or None"""
        for steps in range(self.k, -1, -1):
            for where in "answer", "line":
                if self.share[where, block][steps] >= KNOWN:
                    return steps, where
        return None

    def example(self, line):
        """What can be read while the model answers a line such as f314159265358, block by block"""
        [answer] = answers(self.model, [line], self.puzzle)
        # Its last digit is predicted, but predicts no cell.
        idx = torch.tensor([[*f"{line}\na{answer[:-1]}".encode()]])
        vectors = self.vectors(idx, window=torch.tensor([0]), column=torch.tensor([0]))
        right, blocks = solve(line, self.puzzle), []
        for block in range(len(self.share_by_block("line"))):
            furthest = self.furthest(block)
            if furthest is None:
                blocks.append(None)
                continue
            steps, where = furthest
            digits = self.probes[where, block][steps].read(vectors[where, block])
            blocks.append(dict(steps=steps, where=where, share=self.share[where, block][steps],
                               digits=spelled(digits), true=right[steps]))
        return dict(line=line, answer=answer, true=right[-1], blocks=blocks)

def ends_of_blocks(model, idx):
    """Yields L + 1 streams: that of the embedding, and that after each block"""
    for place, before, after in model.walk(idx):
        if place == 1:
            yield before
        if place % 2 == 0:
            yield after

# ------------------------------------------------------------------------------------------ a patch

@torch.no_grad()
def patch(model, puzzle, k, n=400):
    """Windows of one line each, of random digits, that asks for k steps. Each line has the right
    answer behind it, and the model says the answer's digits, each from those before it.

    After one block, some columns get the stream of the window before. The answer that comes out is
    then its own, or that of the line before: {where it is patched: {whose answer: its share of the
    digits that the model says, in the right half, if it is patched after block 1, 2, ..}}"""
    if model.ends.stream_grows:
        raise NotHere("its stream has a part for each block, so there is no one state to patch")
    cells = puzzle["cells"]
    if 2 * cells + 2 > model.config.block_size:
        raise NotHere("a line and its answer don't fit into its --block_size")
    generator = torch.Generator().manual_seed(0)
    digits = torch.randint(len(puzzle["table"]), (n, cells), generator=generator)
    answer = lines_after(digits, k, puzzle["table"])[-1] + ord("0")
    letter, newline = torch.full((n, 1), ord("a") + k), torch.full((n, 1), ord("\n"))
    any_letter = torch.full((n, 1), ord("a"))
    idx = torch.cat((letter, digits + ord("0"), newline, any_letter, answer[:, :-1]), 1)
    idx, answer = idx.to(model.device), answer.to(model.device)
    found = {}
    for name, columns in (("where the line stands", slice(1, cells + 2)),   # with its newline
                          ("where the answer is predicted", slice(cells + 2, None))):
        own, other = [], []
        for block in range(1, len(model.order) + 1):
            logits, _ = model(idx, runner=PatchingRunner(model, block, columns))
            said = logits[:, -cells:].argmax(-1)
            own.append(share_in_right_half(said, answer))
            other.append(share_in_right_half(said, answer.roll(1, dims=0)))
        found[name] = {"its own answer": own, "the other line's answer": other}
    return found

def share_in_right_half(said, answer):
    half = said.shape[1] // 2
    return (said == answer)[:, half:].float().mean().item()

class PatchingRunner(Runner):
    """Runs the sublayers of a walk, and after one block, some columns of each sequence get the
    stream of the sequence before it. (The first one gets that of the last.)"""
    def __init__(self, model, block, columns):
        super().__init__(model)
        self.block, self.columns = block, columns

    def run(self, place, stream, residual, f):
        stream = super().run(place, stream, residual, f)
        return self.patched(stream) if place == 2 * self.block else stream

    def patched(self, stream):
        if isinstance(stream, tuple):
            return tuple(self.patched(x) for x in stream)
        stream = stream.clone()
        stream[:, self.columns] = stream.roll(1, dims=0)[:, self.columns]
        return stream
