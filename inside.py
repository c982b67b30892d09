"""
The lines that nobody wrote. A line of the steps text, such as f314159265358, asks for its line five
steps later. The text never has the lines between. Are they inside of the model?

A probe, a linear map from the stream to a digit, reads them there, block by block (`Inside`). And
a patch shows that the model uses them, and which block fetches them (`patch`). sample.py --inside
and analyze.py show both.
"""
import torch
import torch.nn.functional as F

import prepare
from model import Runner, Without, unit

WINDOWS = 1024     # of validation text: half of them to fit a probe, half to see what it reads
READABLE = 0.9     # A line can be read if the probe is right for so many of its digits.

class NotHere(Exception):
    """One sentence: why a run can't have what was asked for"""

# ------------------------------------------------------------------------- lines and their answers

def lines_after(line, text):
    """f314159265358 -> digits (6, cells), after 0, 1, .. 5 steps. text: what meta.json says"""
    return all_lines(torch.tensor([*map(int, line[1:])]), ord(line[0]) - ord("a"), text)

def all_lines(digits, k, text):
    """digits (..., cells) -> (k + 1, ..., cells), after 0, 1, .. k steps"""
    lines = [digits]
    for _ in range(k):
        lines.append(torch.from_numpy(prepare.next_line(lines[-1], text["table"])))
    return torch.stack(lines)

def answers(model, lines, text):
    """What the model writes after each line, digit by digit the likeliest. (The letter before the
    answer could be any one, so it is given.)"""
    idx = torch.tensor([[*f"{line}\na".encode()] for line in lines], device=model.device)
    new = model.generate(idx, text["cells"], temperature=0)[:, idx.shape[1]:]
    return [spelled(row - ord("0")) for row in new]

def spelled(digits):
    return "".join(str(digit) if 0 <= digit <= 9 else "?" for digit in digits.tolist())

def some_digits(text):
    """Those of pi, if the text has all ten digits"""
    if len(text["table"]) == 10:
        return ("3141592653589793" * 7)[:text["cells"]]
    return "".join(str(i % len(text["table"])) for i in range(text["cells"]))

def in_words(n):
    """2 -> two steps"""
    words = "no one two three four five six seven eight nine ten".split()
    return f"{words[n] if n < len(words) else n} step{'s' * (n != 1)}"

# --------------------------------------------------------------------------------------- the probe

def probe(features, digits, symbols, ridge=1.0):
    """Ridge regression, solved at once: the linear map that best tells digits from features.

    features (n, C); digits (k, n), of k lines -> a map for each line, (k, C + 1, symbols)"""
    x = with_one(features)
    wanted = F.one_hot(digits, symbols).double()   # (k, n, symbols)
    return torch.linalg.solve(x.T @ x + ridge * torch.eye(x.shape[1]), x.T @ wanted)

def read(weights, features):
    """-> the likeliest digits by each of the k maps, (k, n)"""
    return (with_one(features) @ weights).argmax(-1)

def with_one(features):
    return F.pad(features.double(), (0, 1), value=1.0)   # 1: for the constant of the map

def questions(idx, targets, text, k):
    """All lines in windows that ask for k steps, and whose answer is in the window, too -> window
    (N,); letter (N,): where the answer begins; lines (k + 1, N, cells): after 0, 1, .. k steps"""
    cells = text["cells"]
    asked, cell = prepare.steps_asked(torch.cat((idx[:, :1], targets), 1), cells)
    begins = (asked == k) & (cell == 0)
    window, letter = begins[:, :idx.shape[1] - cells + 1].nonzero().T
    place = letter[:, None] - cells - 1 + torch.arange(cells)   # of the line before
    return window, letter, all_lines(idx[window[:, None], place] - ord("0"), k, text)

def ends_of_blocks(model, idx):
    """Yields L + 1 streams: that of the embedding, and that after each block"""
    for place, before, after in model.walk(idx):
        if place == 1:
            yield before
        if place % 2 == 0:
            yield after

class Inside:
    """Probes of the lines inside, for lines that ask for k steps. There is one for each block (0:
    for the embedding), for the line after 0, 1, .. k steps, and for two places: at "answer", the
    stream of a token predicts the digit in question; at "line", its token is the digit that stands
    in this cell in the line before. share[place][block][steps]: how many digits it reads"""
    def __init__(self, model, text, windows, k):
        """windows: x, y (n, T)"""
        self.model, self.text, self.k, self.probes, self.share = model, text, k, {}, {}
        half = len(windows[0]) // 2
        features, digits = self.collect(*(part[:half] for part in windows))
        new_features, new_digits = self.collect(*(part[half:] for part in windows))
        for place in features:
            self.probes[place] = [probe(x, digits, len(text["table"])) for x in features[place]]
            reads = [read(*pair) for pair in zip(self.probes[place], new_features[place])]
            self.share[place] = [(said == new_digits).double().mean(-1).tolist() for said in reads]

    def collect(self, x, y):
        """-> {place: features (L + 1, n, C)} and digits (k + 1, n) of all lines that ask for k"""
        features, digits = {"line": [], "answer": []}, []
        for idx, targets in zip(x.split(64), y.split(64)):
            window, letter, lines = questions(idx, targets, self.text, self.k)
            digits.append(lines.flatten(1))
            for place, found in self.features(idx, window, letter).items():
                features[place].append(found)
        digits = torch.cat(digits, 1)
        if digits.shape[1] < 200:
            raise NotHere(f"its validation text has too few lines that ask for {in_words(self.k)}")
        return {place: torch.cat(parts, 1) for place, parts in features.items()}, digits

    @torch.no_grad()
    def features(self, idx, window, letter):
        """unit(stream) after each block, at all cells of these lines: {place: (L + 1, n, C)}.
        window (N,): the row of idx; letter (N,): where the answer begins, with its letter"""
        cells = torch.arange(self.text["cells"])
        line = letter[:, None] - len(cells) - 1 + cells
        where, found = {"line": line, "answer": letter[:, None] + cells}, {"line": [], "answer": []}
        for stream in ends_of_blocks(self.model, idx.to(self.model.device)):
            x = unit(self.model.ends.as_tensor(stream)).cpu()
            for place in found:
                found[place].append(x[window[:, None], where[place]].flatten(0, 1))
        return {place: torch.stack(parts) for place, parts in found.items()}

    def newest(self, block):
        """-> steps and place of the newest line that can be read after a block, or None"""
        found = [(steps, place == "answer") for place, rows in self.share.items()
                 for steps, share in enumerate(rows[block]) if share >= READABLE]
        if not found:
            return None
        steps, is_answer = max(found)
        return steps, "answer" if is_answer else "line"

    def example(self, line):
        """What can be read while the model answers a line such as f314159265358, block by block"""
        answer, = answers(self.model, [line], self.text)
        idx = torch.tensor([[*f"{line}\na{answer}".encode()]])
        features = self.features(idx, torch.tensor([0]), torch.tensor([len(line) + 1]))
        true, blocks = lines_after(line, self.text), []
        for block in range(len(self.share["line"])):
            newest = self.newest(block)
            if newest is None:
                blocks.append(None)
                continue
            steps, place = newest
            digits = read(self.probes[place][block], features[place][block])[steps]
            blocks.append(dict(steps=steps, place=place, share=self.share[place][block][steps],
                               digits=spelled(digits), true=spelled(true[steps])))
        return dict(line=line, answer=answer, true=spelled(true[-1]), blocks=blocks)

def inside_of(model, data, text, k):
    """-> Inside, from the validation windows in the folder `data`. SystemExit if there are none"""
    windows = prepare.val_windows(data, model.config.block_size, WINDOWS)
    return Inside(model, text, windows, k)

# --------------------------------------------------------------------------------------- the patch

class Patched(Without):
    """After one block, some tokens of each sequence get the stream of the sequence before it."""
    def __init__(self, block, tokens, decider):
        super().__init__((), decider)
        self.block, self.tokens = block, tokens

    def after(self, runner, stream):
        stream = super().after(runner, stream)
        return self.patch(stream) if runner.place == 2 * self.block else stream

    def patch(self, stream):
        if isinstance(stream, tuple):
            return tuple(self.patch(x) for x in stream)
        stream = stream.clone()
        stream[:, self.tokens] = stream.roll(1, dims=0)[:, self.tokens]
        return stream

@torch.no_grad()
def patch(model, text, k, n=400):
    """The stream of another line takes the place of this line's. Whose answer comes out?

    n lines of random digits that ask for k steps, each alone in its window, and their right answers
    -> {patched place: {whose answer: share of digits of the right half, after block 1, 2, ..}}"""
    if model.ends.stream_grows:
        raise NotHere("its stream has a part for each block, so there is no one state to patch")
    cells, generator = text["cells"], torch.Generator().manual_seed(0)
    digits = torch.randint(len(text["table"]), (n, cells), generator=generator)
    answer = all_lines(digits, k, text)[-1] + ord("0")
    first, newline, letter = (torch.full((n, 1), ord(c)) for c in (chr(ord("a") + k), "\n", "a"))
    idx = torch.cat((first, digits + ord("0"), newline, letter, answer[:, :-1]), 1).to(model.device)
    answer = answer.to(model.device)
    places = {"where the line stands": slice(1, cells + 1),
              "where the answer is predicted": slice(cells + 2, None)}
    found = {place: {"its own answer": [], "the other line's answer": []} for place in places}
    for place, tokens in places.items():
        for block in range(1, len(model.order) + 1):
            runner = Runner(model, Patched(block, tokens, model.decider))
            said = model(idx, runner=runner)[0][:, -cells:].argmax(-1)
            for whose, wanted in zip(found[place], (answer, answer.roll(1, dims=0))):
                right = (said == wanted)[:, cells // 2:]
                found[place][whose].append(right.float().mean().item())
    return found
