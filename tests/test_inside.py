"""The puzzle inside a model: lines and answers in windows, a probe on streams whose content is
known, patching on a model whose block is known, and shares by steps against loops over digits.
Then sample.py --inside, which prints what the probe reads."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import analyze
import prepare
import sample
import train
from analyze import Record, lines_after
from conftest import ids, logits, make, randn, refused, same
from model import Trace

CELLS, MOST, L = 4, 3, 3   # digits of a line and most steps of steps_data; blocks

@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield

@pytest.fixture(scope="module")
def puzzle(steps_data):
    return prepare.load_meta(steps_data)["steps"]

@pytest.fixture(scope="module")
def windows(steps_data):
    return prepare.windows_of(steps_data, "val", 32, 600)

def solve(line, puzzle):
    """"c3020" -> ["3020", the line after one step, after two], digit by digit"""
    lines = [line[1:]]
    for _ in range(ord(line[0]) - ord("a")):
        pairs = zip("0" + lines[-1], lines[-1])   # left of a line is a 0
        lines.append("".join(str(puzzle["table"][int(left)][int(digit)]) for left, digit in pairs))
    return lines

def answers_in(row):
    """Yields of each answer in a window, whose line before is there, too: the column of its letter,
    letter and digits of the line before, and as many of its own digits as fit"""
    text = bytes(min(token, 255) for token in row).decode("latin1")
    for found in re.finditer(r"(?=([a-z])(\d{4})\n[a-z](\d*))", text):
        yield found.start(3) - 1, found[1], found[2], found[3]

def rows_of(x, y):   # windows with the last target
    return [[*idx, targets[-1]] for idx, targets in zip(x.tolist(), y.tolist())]

# -----------------------------------------------------------------------------
# lines and their answers

def test_lines_by_hand():
    table = [[3, 1, 2, 0], [2, 0, 3, 1], [1, 2, 0, 3], [0, 3, 1, 2]]
    by_hand = [[3, 0, 2, 0, 1], [0, 0, 2, 1, 1], [3, 3, 2, 2, 0]]
    assert lines_after(torch.tensor(by_hand[0]), 2, table).tolist() == by_hand
    assert solve("c30201", dict(table=table)) == ["30201", "00211", "33220"]

def test_answered_lines(puzzle):
    """... are as in the data set, and all different"""
    idx, lines = analyze.answered_lines(puzzle, 2, 50)
    assert idx.shape == (50, 2 * CELLS + 2) and lines.shape == (3, 50, CELLS)
    for row, after in zip(idx.tolist(), lines.transpose(0, 1).tolist()):
        line, answer = bytes(row).decode().split("\n")
        right = solve(line, puzzle)
        assert line[0] == "c" and answer == "a" + right[2][:-1]
        assert ["".join(map(str, digits)) for digits in after] == right
    assert len({*map(tuple, idx.tolist())}) > 45

# -----------------------------------------------------------------------------
# probes

class Known:
    """A model that does a step in each block, where the answer is predicted. Half of its stream is
    about the token, and half of it about the answer."""
    policy, training, block_order = None, False, range(L)
    config = SimpleNamespace(block_size=32)

    def __init__(self, puzzle):
        self.puzzle = puzzle
        self.digit = torch.linalg.qr(randn(12, 12))[0][:10].float()   # a direction for each digit

    def __call__(self, idx, trace):
        token = self.digit[(idx - ord("0")).clamp(0, 9)]
        lines = lines_after(idx[:, 1:CELLS + 1] - ord("0"), L, self.puzzle["table"])
        after = [torch.cat((token, F.pad(self.digit[line], (0, 0, CELLS + 2, 0))), -1)
                 for line in lines]
        trace.streams = [after[(i + 1) // 2] for i in range(2 * L + 1)]

    def generate(self, idx, n, temperature, n_vocab):
        line = bytes(idx[0, :CELLS + 1].tolist()).decode()
        assert temperature == 0 and n == CELLS and bytes(idx[0, CELLS + 1:].tolist()) == b"\na"
        return torch.cat((idx, torch.tensor([[*solve(line, self.puzzle)[-1].encode()]])), 1)

def test_probes_are_ridge_regressions():
    """The penalty of 1 is as many more examples as there are channels. Each step has its own
    weights."""
    vectors, digits = randn(500, 24), ids(500, 3, V=10)
    x = torch.cat((vectors, torch.ones(500, 1)), 1)
    inputs = torch.cat((x, torch.eye(25).double()))
    probe = analyze.fit_probe(vectors, digits)
    for steps in range(3):
        wanted = F.one_hot(digits[:, steps], 10).double()
        weights = torch.linalg.lstsq(inputs, F.pad(wanted, (0, 0, 0, 25))).solution
        same(probe[:, steps], weights, 1e-8)
        assert torch.equal(analyze.read_probe(probe, vectors)[:, steps], (x @ weights).argmax(1))

def test_lines_inside_a_known_model(puzzle, steps_data):
    """Block 0 does the first step, block 1 the second, and so on."""
    model = Known(puzzle)
    probes, shares = analyze.fit_probes(model, puzzle, 3)
    assert {*probes} == {*shares}
    for block_idx in range(L):
        assert shares["answer", block_idx][block_idx + 1] == 1.0
        assert max(shares["answer", block_idx][block_idx + 2:], default=0) < 0.9
        assert shares["line", block_idx][0] == 1.0 and 0.3 < shares["line", block_idx][1] < 0.75
        assert analyze.furthest(shares, block_idx) == (block_idx + 1, "answer")
    lines = solve("d3141", puzzle)
    right = [(b, lines[b + 1], b + 1) for b in range(L)]
    assert analyze.read_inside(model, puzzle, "d3141", probes, shares) == (right, lines[3])
    assert analyze.lines_inside(model, steps_data, "d3141") == right
    shares["answer", 0][1] = 0.89   # now the line can be read, not yet the first step
    shares["answer", 1] = shares["line", 1] = [0.89] * 4
    rows, _ = analyze.read_inside(model, puzzle, "d3141", probes, shares)
    assert rows == [(0, lines[0], 0), (1, "", None), right[2]]

def test_controls(puzzle, monkeypatch):
    """In an untrained model a probe reads what the token itself says, and no more. Where the stream
    is noise, it reads by chance alone: shares are those of other lines."""
    model = make(n_layer=2, n_embd=32, vocab_size=320, block_size=32, noise=0, dtype=torch.float32)
    _, shares = analyze.fit_probes(model, puzzle, 3)
    assert shares["line", 0][0] == 1.0   # the token itself
    for (where, _), by_steps in shares.items():
        assert max(by_steps[1:]) < (0.75 if where == "line" else 0.45)
    monkeypatch.setattr(analyze, "as_tensor", lambda stream: randn(*stream.shape[:2], 600))
    _, shares = analyze.fit_probes(model, puzzle, 1)   # 600 channels can learn lines by heart
    assert max(map(max, shares.values())) < 0.2

# -----------------------------------------------------------------------------
# patching

class Fetches:
    """A stream of two parts: the token, and the digits of the answer. Block 2 looks for the line
    where it stands, and puts the answer to where it is predicted."""
    policy, block_order, rotary = None, range(4), torch.zeros(32)
    config = SimpleNamespace(block_size=32)

    def __init__(self, puzzle, knows=True):
        self.puzzle, self.knows = puzzle, knows
        self.final = SimpleNamespace(expand=lambda x: (x, torch.zeros_like(x)))
        self.blocks = [lambda stream, rotary, b=b: self.fetch(*stream) if b == 2 else stream
                       for b in range(4)]

    def wte(self, idx):
        assert (idx[:, 0] == ord("c")).all() and idx[0, 5:7].tolist() == [*b"\na"]
        return F.one_hot(idx, 257).double()

    def fetch(self, token, answer):
        digits = token[:, 1:CELLS + 1].argmax(-1) - ord("0")
        after = lines_after(digits, 2 if self.knows else 1, self.puzzle["table"])[-1]
        answer = F.pad(F.one_hot(after + ord("0"), 257).double(), (0, 0, CELLS + 2, 0))
        assert answer.shape == token.shape
        return token, answer

    def logits(self, stream):
        return stream[1]

def test_which_block_fetches_the_line(puzzle):
    def patching(model):
        run = SimpleNamespace(model=model, puzzle=puzzle, asked=2, need_puzzle=int)
        panels, sentence = analyze.patching(run)
        return [*panels[""].values()], sentence

    (own, other), sentence = patching(Fetches(puzzle))
    assert max(own[:2] + other[2:]) < 0.3 and own[2:] == other[:2] == [1, 1]
    assert re.search(r"\b2\b", sentence)
    (own, other), no_knowledge = patching(Fetches(puzzle, knows=False))
    assert max(own + other) < 0.5 and not re.search(r"\b2\b", no_knowledge)

@pytest.mark.parametrize("residual", ["pre", "attnres:group=3", "hyper", "unet", "nag"])
def test_patched_logits(residual):
    """After a block, columns of the stream are those of the window before."""
    model, idx = make(residual), ids(4, 10)
    usual = logits(model, idx)
    for block_idx in range(3):
        same(analyze.patched_logits(model, idx, block_idx, slice(None)), usual.roll(1, 0))
    patched = analyze.patched_logits(model, idx, 2, slice(2, 6))
    same(patched[:, 2:6], usual.roll(1, 0)[:, 2:6])
    same(patched[:, [0, 1, 6, 7, 8, 9]], usual[:, [0, 1, 6, 7, 8, 9]])
    early = analyze.patched_logits(model, idx, 0, slice(2, 6))   # later tokens see it
    assert (early[:, 6:] - usual[:, 6:]).abs().amax(-1).min() > 1e-6

# -----------------------------------------------------------------------------
# by steps

@pytest.fixture
def run(windows, steps_data):
    """48 windows, and a model that skips. It writes digits only, so some are right."""
    model = make("nag", n_layer=L, vocab_size=320, block_size=32, mod="gate:below=0.3")
    model.lm_head.weight[:ord("0")] = model.lm_head.weight[ord("9") + 1:] = 0
    settings, meta = dict(data=steps_data), prepare.load_meta(steps_data)
    return analyze.Run(model, settings, [part[:48] for part in windows], meta)

def by_steps(run, values):
    """By steps, the means of values (n, T) over digits of right halves, in a loop over targets"""
    found, windows = [[] for _ in range(MOST + 1)], [torch.cat(part) for part in zip(*run.batches)]
    for i, row in enumerate(rows_of(*windows)):
        for column, letter, _, answer in answers_in(row):
            for cell in range(CELLS // 2, len(answer)):
                found["abcd".index(letter)].append(float(values[i, column + cell]))
    return pytest.approx([sum(each) / len(each) for each in found])

def test_right_digits_by_steps(run):
    idx, targets = [torch.cat(part) for part in zip(*run.batches)]
    is_right = {policy: logits(run.model, idx, trace=Trace(run.model, policy)).argmax(-1) == targets
                for policy in (None, analyze.dense)}
    right = by_steps(run, is_right[None])
    assert analyze.steps(run)[0][""]["right"] == run.right == right
    assert run.right_by_steps(analyze.dense) == by_steps(run, is_right[analyze.dense]) != right
    assert run.value() == analyze.steps_of(run.right)
    assert run.metrics["val_steps"] == pytest.approx(analyze.steps_of(run.right), abs=1e-6)

def test_steps_learned():
    assert analyze.steps_of([0.0, 1.0, 0.55, 0.05]) == pytest.approx(1.5)   # copies don't count
    for right, asked in ([1.0, 0.95, 0.9, 0.2, 0.95], 2), ([1.0, 0.95], 1), ([1.0, 0.1], 1):
        assert analyze.Run.asked.func(SimpleNamespace(right=right)) == asked

def test_skips_by_steps(run):
    rec = Record(run.model, torch.cat([idx for idx, _ in run.batches]))
    gates = torch.stack([residual.gate(stream)[..., 0].abs()
                         for residual, stream in zip(rec.residuals, rec.streams)])
    skipped = (gates < 0.3).double().mean(0)
    assert analyze.skips_by_steps(run)[0][""]["skipped"] == by_steps(run, skipped)
    assert 0 < skipped.mean() < 1

def test_probe(run, puzzle):
    """It has learned no step, so one is asked for."""
    found, _ = analyze.probe(run)
    probes, shares = analyze.fit_probes(run.model, puzzle, 1)
    for where in "line", "answer":
        assert found[f"at the {where}"] == [shares[where, block_idx] for block_idx in range(L)]
    assert found["columns"] == [0, 1] and found["rows"] == [0, 1, 2]
    (_, line, right, _), *blocks, (_, answer, right_answer, _) = found["digits"]
    rows, its_answer = analyze.read_inside(run.model, puzzle, line, probes, shares)
    assert line == right == "b3141"
    assert answer == its_answer and right_answer == solve(line, puzzle)[1]
    for (_, read, after, _), (_, digits, steps) in zip(blocks, rows, strict=True):
        assert read == digits and after == ("" if steps is None else solve(line, puzzle)[steps])
    assert any(read for _, read, _, _ in blocks)

# -----------------------------------------------------------------------------
# sample.py --inside

def test_sample_inside(steps_data, puzzle, tmp_path, capsys):
    """It prints what the probe reads, and marks what is wrong."""
    out = str(tmp_path / "run")
    flags = ("--residual nag --n_layer 2 --n_embd 32 --n_head 2 --block_size 32 --batch_size 8 "
             "--max_iters 20 --eval_windows 16 --device cpu").split()
    with torch.enable_grad():
        train.main(["--data", str(steps_data), "--out", out, *flags])
    capsys.readouterr()
    sample.main([out, "--inside", "--prompt", "c3141"])
    printed = capsys.readouterr().out
    model, _ = train.open_run(out)
    lines, rows = solve("c3141", puzzle), analyze.lines_inside(model, steps_data, "c3141")
    shown = re.findall(r"block (\d) +(?:-|((?:\d[ !]){4}) +after (\d))", printed)
    assert len(rows) == len(shown) == 2
    for (block_idx, digits, steps), row in zip(rows, shown):
        marked = "" if steps is None else "".join(
            digit + " !"[digit != right] for digit, right in zip(digits, lines[steps]))
        assert row == (str(block_idx), marked, "" if steps is None else str(steps))
    assert shown[0][1]   # a line is read
    assert re.search(r"answer +([\d?][ !]){4}", printed)
    assert "from a to d" in refused(sample.main, [out, "--inside", "--prompt", "e3141"])
