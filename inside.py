r"""
The lines that nobody wrote. A line of the steps text, such as c314159265358, asks for the line two
steps later, which is its answer. The text never has the line between. Is it inside of the model?

    Inside   reads it there, in a model that is trained. A probe is a linear map from the stream of
             one token to a digit. After which block can it read the digits after one step?
    patch    asks whether the answer needs what is there. After a block, the stream of another line
             takes the place of this one's. Whose answer comes out?

sample.py --inside shows the first, analyze.py shows both. Here is a line in a window of the text,
if lines had four digits only:

    column     0  1  2  3  4  5  6  7  8  9 10
    token      c  3  1  4  1 \n  a  1  0  8  5
    "line"        0  1  2  3                      cells, where the line's digits stand
    "answer"                     0  1  2  3       cells, where the answer's are predicted

A token predicts the next one, so the answer's digits are predicted from its letter on. In cell 0
is a 3 after no step, a 5 after one, which nobody wrote, and a 1 after two. We look for all three in
both columns of cell 0: 1 and 6. The words, in all that follows:

    k        how many steps a line asks for; `steps` counts from 0 to k
    column   a token's place in its window. A line begins at its letter.
    cell     a digit's place in its line; `cells` is how many a line has
    where    "line" or "answer": in which columns we look
    block    after which block we look; 0: at the embedding
    vector   what a probe reads: the stream of one token, divided by its rms
    share    which part of some digits is right, from 0 to 1
    puzzle   what meta.json says of the steps text: its table, its cells, and the most steps
"""
import torch
import torch.nn.functional as F

from model import Runner, unit
from steps import answers, in_words, lines_after, lines_that_ask, solve, spelled

WINDOWS = 1024   # of validation text: half of them to fit probes, half to see what these read
KNOWN = 0.9      # From this share on, we say that digits can be read, or that a model knows them.

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
        x = with_one(vectors)
        wanted = F.one_hot(digits, symbols).double()   # the scores (N, symbols): one 1, else 0
        # Ridge regression: |x @ weights - wanted|² + ridge * |weights|² shall be as small as can
        # be. There its gradient is 0, and that is a linear system for the weights.
        system = x.T @ x + ridge * torch.eye(x.shape[1])
        self.weights = torch.linalg.solve(system, x.T @ wanted)   # (C + 1, symbols)

    def read(self, vectors):
        """vectors (N, C) -> digits (N,)"""
        return (with_one(vectors) @ self.weights).argmax(-1)

    def share(self, vectors, digits):
        """-> the share of these digits that it reads right in these vectors"""
        return (self.read(vectors) == digits).double().mean().item()

# --------------------------------------------------------------------------- what probes are fed on

def ends_of_blocks(model, idx):
    """Yields L + 1 streams: that of the embedding, and that after each block. (A walk yields the
    stream before and after each sublayer. A block has two.)"""
    for place, before, after in model.walk(idx):
        if place == 1:
            yield before
        if place % 2 == 0:
            yield after

@torch.no_grad()
def vectors_of(model, idx, window, column, cells):
    """The vectors of all cells of some lines: {(where, block): (lines * cells, C)}. The i-th line
    begins at column[i] of idx[window[i]]; idx (n, T)."""
    begin, cell = column[:, None], torch.arange(cells)
    columns = {"line": begin + 1 + cell,             # each (lines, cells), as in the picture
               "answer": begin + cells + 2 + cell}
    vectors = {}
    for block, stream in enumerate(ends_of_blocks(model, idx.to(model.device))):
        # A stream may be several tensors: as_tensor makes one of them, (n, T, C).
        x = unit(model.ends.as_tensor(stream)).cpu()
        for where in columns:
            vectors[where, block] = x[window[:, None], columns[where]].flatten(0, 1)
    return vectors

def vectors_and_digits(model, puzzle, x, y, k):
    """Of all N cells of the lines that ask for k steps, in windows x, y (n, T) ->

    vectors   {(where, block): (N, C)}
    digits    (k + 1, N): those of these cells after 0, 1, .. k steps"""
    vectors, digits = [], []
    for idx, targets in zip(x.split(64), y.split(64)):
        window, column, lines = lines_that_ask(idx, targets, k, puzzle)
        vectors.append(vectors_of(model, idx, window, column, puzzle["cells"]))
        digits.append(lines_after(lines, k, puzzle["table"]).flatten(1))
    digits = torch.cat(digits, 1)
    if digits.shape[1] < 200:
        raise NotHere(f"its validation text has too few lines that ask for {in_words(k)}: fewer "
                      f"than 200 digits")
    return {key: torch.cat([part[key] for part in vectors]) for key in vectors[0]}, digits

# -------------------------------------------------------------------------- all probes of one model

class Inside:
    """Probes for lines that ask for k steps: one for each where, block and number of steps

    probes[where, block][steps]   fitted to one half of the windows
    share[where, block][steps]    of the digits in the other half, as that probe reads them"""
    def __init__(self, model, puzzle, windows, k):
        """windows: x, y (n, T) of validation text. NotHere if they have too few such lines"""
        self.model, self.puzzle, self.k = model, puzzle, k
        self.probes, self.share = {}, {}
        x, y = windows
        half, symbols = len(x) // 2, len(puzzle["table"])
        vectors, digits = vectors_and_digits(model, puzzle, x[:half], y[:half], k)
        other_vectors, other_digits = vectors_and_digits(model, puzzle, x[half:], y[half:], k)
        for key in vectors:   # Each is (where, block).
            self.probes[key], self.share[key] = [], []
            for steps in range(k + 1):
                probe = Probe(vectors[key], digits[steps], symbols)
                self.probes[key].append(probe)
                self.share[key].append(probe.share(other_vectors[key], other_digits[steps]))

    def share_by_block(self, where):
        """-> for each block, from 0 on, the list of the shares after 0, 1, .. k steps"""
        return [self.share[key] for key in self.share if key[0] == where]

    def furthest(self, block):
        """-> (steps, where) of the furthest digits that can be read after a block, or None"""
        for steps in range(self.k, -1, -1):
            for where in "answer", "line":
                if self.share[where, block][steps] >= KNOWN:
                    return steps, where
        return None

    def example(self, line):
        """What can be read while the model answers a line that asks for k steps, f314159265358,
        say: the furthest digits after each block, from 0 on; None where no digits can be read"""
        [answer] = answers(self.model, [line], self.puzzle)
        right = solve(line, self.puzzle)
        # One window. The answer's last digit is predicted, but predicts no cell.
        idx = torch.tensor([[*f"{line}\na{answer[:-1]}".encode()]])
        first = torch.tensor([0])
        vectors = vectors_of(self.model, idx, first, first, self.puzzle["cells"])
        blocks = []
        for block in range(len(self.share_by_block("line"))):
            found = None
            if furthest := self.furthest(block):
                steps, where = furthest
                digits = self.probes[where, block][steps].read(vectors[where, block])
                found = dict(steps=steps, where=where, share=self.share[where, block][steps],
                             digits=spelled(digits), true=right[steps])
            blocks.append(found)
        return dict(line=line, answer=answer, true=right[-1], blocks=blocks)

# ------------------------------------------------------------------------------------------ a patch

class PatchingRunner(Runner):
    """Runs the sublayers of a walk (see Runner in model.py). After one block, some columns of each
    window get the stream of the window before it, and those of the first get that of the last."""
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

def windows_that_ask(puzzle, k, n):
    """n windows as in the picture, of random digits, without their last column -> idx (n, T), and
    the right answers (n, cells), as tokens. The answers are in idx, too: so a model says each digit
    after the right ones before it."""
    cells, generator = puzzle["cells"], torch.Generator().manual_seed(0)
    digits = torch.randint(len(puzzle["table"]), (n, cells), generator=generator)
    answer = lines_after(digits, k, puzzle["table"])[-1] + ord("0")
    letter, newline = torch.full((n, 1), ord("a") + k), torch.full((n, 1), ord("\n"))
    any_letter = torch.full((n, 1), ord("a"))   # The text draws the answer's letter at random.
    idx = torch.cat((letter, digits + ord("0"), newline, any_letter, answer[:, :-1]), 1)
    return idx, answer

def share_in_right_half(said, answer):
    """said, answer (n, cells) -> the share that is equal, from the middle of the line on. (On the
    left, digits repeat soon, and can be guessed.)"""
    half = said.shape[1] // 2
    return (said == answer)[:, half:].float().mean().item()

@torch.no_grad()
def patch(model, puzzle, k, n=400):
    """In n windows, we patch either the line or the answer, after one block. Is what the model says
    its own answer, or that of the window from which the patch came?

    -> {place: {whose answer: [share of it that the model says, if patched after block 1, 2, ..]}}
    NotHere if this model's stream can't be patched, or its windows are too short"""
    if model.ends.stream_grows:
        raise NotHere("its stream has a part for each block, so there is no one state to patch")
    cells = puzzle["cells"]
    if 2 * cells + 2 > model.config.block_size:
        raise NotHere("a line and its answer don't fit into its --block_size")
    idx, answer = (tokens.to(model.device) for tokens in windows_that_ask(puzzle, k, n))
    other_answer = answer.roll(1, dims=0)
    n_blocks = len(model.order)   # those that run, which --repeat makes more
    found = {}
    for place, columns in (("where the line stands", slice(0, cells + 2)),   # with its newline
                           ("where the answer is predicted", slice(cells + 2, None))):
        own, other = [], []
        for block in range(1, n_blocks + 1):
            logits, _ = model(idx, runner=PatchingRunner(model, block, columns))
            said = logits[:, -cells:].argmax(-1)
            own.append(share_in_right_half(said, answer))
            other.append(share_in_right_half(said, other_answer))
        found[place] = {"its own answer": own, "the other line's answer": other}
    return found
