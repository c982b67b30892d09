"""The steps text inside a model: lines and answers in windows, a probe on streams in which we know
what stands, its controls, the patch, and the figures by steps against loops over single digits."""
import re, shutil
from types import SimpleNamespace

import numpy as np
import pytest, torch
import torch.nn.functional as F

import analyze, prepare, sample, train
from analyze import Inside, lines_after, solve
from conftest import ids, joined, make, refused, some
from model import Decider, Trip

pytestmark = pytest.mark.usefixtures("no_grad")
CELLS, MOST, L = 4, 3, 3   # digits in a line and most steps of steps_data; blocks

@pytest.fixture(scope="module")
def text(steps_data):
    return prepare.load_meta(steps_data)["steps"]

@pytest.fixture(scope="module")
def windows(steps_data):
    return prepare.windows_of(steps_data, "val", 32, 600)

# ------------------------------------------------------------------------ lines and their answers

def answers_in(row):
    """Yields of each answer in a window of T + 1 tokens whose line before is there, too: the column
    of its letter, the letter and digits of the line before, and as many of its own digits as fit"""
    window = bytes(min(token, 255) for token in row).decode("latin1")
    for found in re.finditer(r"(?=([a-z])(\d{4})\n[a-z](\d*))", window):
        yield found.start(3) - 1, found[1], found[2], found[3]

def rows_of(x, y):
    return [[*idx, targets[-1]] for idx, targets in zip(x.tolist(), y.tolist())]

def test_lines_by_hand():
    puzzle = dict(table=[[3, 1, 2, 0], [2, 0, 3, 1], [1, 2, 0, 3], [0, 3, 1, 2]], cells=5)
    by_hand = [[3, 0, 2, 0, 1], [0, 0, 2, 1, 1], [3, 3, 2, 2, 0]]
    lines = lines_after(torch.tensor([by_hand[0], by_hand[0]]), 2, puzzle["table"])
    assert lines[:, 0].tolist() == lines[:, 1].tolist() == by_hand
    assert solve("c30201", puzzle) == ["30201", "00211", "33220"] and solve("a3", puzzle) == ["3"]
    found = analyze.find_answers(torch.tensor([[*b"z3141\nz2718\na"]]), 4)
    assert [each.tolist() for each in found] == [[0, 0], [6, 12], [25, 25]]
    assert analyze.spelled(torch.tensor([0, 9, 10, -1])) == "09??"
    assert analyze.example_line(1, dict(table=range(10), cells=18)) == "b314159265358979331"
    assert {*analyze.example_line(0, dict(table=range(2), cells=100))} == {"a", "0", "1"}
    assert [analyze.in_words(n) for n in (0, 1, 30)] == ["no steps", "one step", "30 steps"]

def test_answers_in_windows(text, windows):
    """What is found in the windows is what a regular expression finds. (The text is right, too.)"""
    right = []
    for i, row in enumerate(rows_of(*windows)):
        for column, letter, digits, answer in answers_in(row):
            assert answer == solve(letter + digits, text)[-1][:len(answer)]
            if column < 32:
                right.append([i, column, "abcd".index(letter)])
    found = torch.stack(analyze.find_answers(windows[0], CELLS), 1).tolist()
    assert found == right and len(found) > 500

# ------------------------------------------------------------------------------------- the probes

def right_answers(idx, text):
    """To the lines with which windows begin"""
    return [solve(bytes(row[:CELLS + 1]).decode(), text)[-1] for row in idx.tolist()]

class Known:
    """A model that does a step in each block, where the answer is predicted. Half of its stream is
    about the token, and half of it about the answer."""
    device, order = "cpu", range(L)
    ends = SimpleNamespace(as_tensor=lambda stream: stream)

    def __init__(self, text):
        self.text, self.digit = text, some(10, 12).float()

    def walk(self, idx):
        token = self.digit[(idx - ord("0")).clamp(0, 9)]
        streams = [torch.cat((token, torch.zeros_like(token)), -1) for _ in range(L + 1)]
        for i, row in enumerate(idx.tolist()):
            for column, _, digits, answer in answers_in(row + [ord("0")]):   # The last is a target.
                if len(answer) == CELLS:
                    digits = torch.tensor([*map(int, digits)])
                    for stream, after in zip(streams, lines_after(digits, L, self.text["table"])):
                        stream[i, column:column + CELLS, 12:] = self.digit[after]
        return [streams[place // 2] for place in range(2 * L + 1)]

    def generate(self, idx, n, temperature):
        answers = [[*answer.encode()] for answer in right_answers(idx, self.text)]
        return torch.cat((idx, torch.tensor(answers)), 1)

class Noise(Known):
    """It has more channels than the text has lines, so a probe could learn each line by heart."""
    order = range(1)
    def walk(self, idx):
        return 3 * [some(*idx.shape, 400, seed=idx.sum().item())]

def test_probes_are_ridge_regressions():
    """At the least squared error, with the ridge, the slope is 0. Each step has its own weights."""
    vectors, digits = some(500, 24), ids(500, 3, V=10)
    x = torch.cat((vectors, torch.ones(500, 1)), 1)
    inputs = torch.cat((x, torch.eye(25).double()))   # The ridge is 25 more examples.
    read = analyze.fit_probe(vectors, digits, 10)(vectors)
    for steps in range(3):
        wanted = F.one_hot(digits[:, steps], 10).double()
        weights = torch.linalg.lstsq(inputs, F.pad(wanted, (0, 0, 0, 25))).solution
        assert torch.equal(read[:, steps], (x @ weights).argmax(1))

def test_lines_inside_a_model_that_we_know(text, windows, monkeypatch):
    found = Inside(Known(text), text, windows[0], 3)
    for block in range(L + 1):
        assert found.share["answer", block][block] == 1.0
        assert found.furthest(block) == (block, "answer")
        assert found.share["line", block][0] == 1.0 and 0.3 < found.share["line", block][1] < 0.75
    example, lines = found.example("d3141"), solve("d3141", text)
    assert example["answer"] == example["true"] == lines[3]
    for steps, row in enumerate(example["blocks"]):
        assert row["digits"] == row["true"] == lines[steps] and row["steps"] == steps
    found.share["answer", 0][0] = 0.89   # Now the line alone can be read.
    assert found.furthest(0) == (0, "line")
    monkeypatch.setattr(analyze, "KNOWN", 2.0)   # No share is so large, so nothing can be read.
    assert found.furthest(3) is None and found.example("d3141")["blocks"] == [None] * 4
    for few in windows[0][:, :2 * CELLS + 1], windows[0][:20]:   # too short, too few
        with pytest.raises(analyze.NotHere, match="fewer than 200 digits"):
            Inside(Known(text), text, few, 3)

def test_controls(text, windows):
    """In an untrained model a probe reads what the token itself says, and no more. In noise, it
    reads by chance alone."""
    model = make(n_layer=L, n_embd=32, vocab_size=320, block_size=32, noise=0)
    share = Inside(model, text, windows[0], 3).share
    assert share["line", 0][0] == 1.0   # the token itself
    for (where, _), by_steps in share.items():
        assert max(by_steps[1:]) < (0.75 if where == "line" else 0.45)
    noise = Inside(Noise(text), text, windows[0][:120], 1)
    assert max(map(max, noise.share.values())) < 0.2

# -------------------------------------------------------------------------------------- the patch

class Fetches(SimpleNamespace):
    """Until block 3, it looks for the line where that stands. It says half of the answer."""
    order, device, training = range(4), "cpu", False
    config = SimpleNamespace(gain_cost=0, deep_supervision=False)
    ends, decider = SimpleNamespace(stream_grows=False, can_skip=True), Decider()

    def __call__(self, idx, trip):
        assert trip.decider.columns == slice(0, CELLS + 2)   # up to the answer's letter
        answers = right_answers(idx, self.text)
        begun = [bytes(row[CELLS + 3:]).decode() for row in idx.tolist()]
        assert begun == [answer[:-1] for answer in answers] and (idx[:, 0] == ord("c")).all()
        if trip.decider.block < 3:
            answers = answers[-1:] + answers[:-1]   # to the line of the window before
        said = [f"??{answer[2:]}" if self.knows else "????" for answer in answers]
        said = torch.tensor([[*digits.encode()] for digits in said])
        return F.pad(F.one_hot(said, 257), (0, 0, CELLS + 2, 0)), None

def test_which_block_fetches_the_line(text):
    def patch(model):
        return analyze.patched(SimpleNamespace(model=model, puzzle=text, k=2))
    panels, sentence = patch(Fetches(text=text, knows=True))
    assert sentence.startswith("Block 3 fetches the line.")
    own, other = panels[""].values()
    assert max(own[:2] + other[2:]) < 0.3 and own[2:] == other[:2] == [1, 1]
    assert patch(Fetches(text=text, knows=False))[1].startswith("It doesn't know these answers")
    with pytest.raises(analyze.NotHere, match="no one state"):
        patch(make("attnres"))

@pytest.mark.parametrize("residual", ["pre", "nag", "gated"])   # The stream of nag is a tuple.
def test_patch(residual):
    """After block 2, all of the stream is that of the window before."""
    model, idx = make(residual), ids(4, 10)
    patched = model.walk(idx, Trip(model, analyze.Patch(2, slice(None))))
    for place, streams in enumerate(zip(model.walk(idx), patched)):
        own, other = map(model.ends.as_tensor, streams)
        torch.testing.assert_close(other, own.roll(1, 0) if place >= 4 else own)

# ---------------------------------------------------------------------------------- the statistics

@pytest.fixture
def run(text, windows, steps_data):
    """48 windows, and a model that skips. Some digit is always likelier than what is none."""
    model = make("nag", n_layer=L, vocab_size=320, block_size=32, mod="gain:below=0.3")
    model.lm_head.weight[:ord("0")] = model.lm_head.weight[ord("9") + 1:] = 0
    settings = dict(tokenizer="bytes", data=str(steps_data))
    return analyze.Run(model, settings, [part[:48] for part in windows], text)

def by_steps(run, values):
    """By steps: the means of values (n, T) over digits of right halves, in a loop over targets"""
    found = [[] for _ in range(MOST + 1)]
    for i, row in enumerate(rows_of(*joined(run.batches))):
        for column, letter, _, answer in answers_in(row):
            for cell in range(CELLS // 2, len(answer)):
                found["abcd".index(letter)].append(float(values[i, column + cell]))
    return pytest.approx([sum(each) / len(each) for each in found])

def test_what_is_right_by_steps(run, text):
    """It has learned no step."""
    idx, targets = joined(run.batches)
    as_it_skips, all_run = (
        by_steps(run, run.model(idx, trip=Trip(run.model, decider))[0].argmax(-1) == targets)
        for decider in (None, Decider()))
    found, sentence = analyze.right_digits(run)
    assert [*found[""].values()] == [as_it_skips, [0.1] * 4] != [all_run, [0.1] * 4]
    assert sentence.startswith(f"{analyze.steps_learned(run.right, 0.1):.1f} steps learned.")
    for line, (_, right) in found["table"][1:]:
        assert right == solve(line, text)[-1]
    learned = analyze.steps_learned(all_run.expected, 0.1)
    fixed = analyze.skip_curve(run)[0]["steps learned"]["a fixed set"]
    assert fixed[0] == [0, pytest.approx(learned)]
    run.batches = [(idx[:1], targets[:1])]
    with pytest.raises(analyze.NotHere, match="--windows"):
        analyze.gain_by_steps(run)

@pytest.mark.parametrize("right, k", [
    ([1.0, 0.95, 0.9, 0.2, 0.95], 2), ([1.0, 0.95], 1), ([1.0, 0.1], 1), ([0.1], 1)])
def test_how_many_steps_it_knows(right, k):
    assert analyze.Run.k.fget(SimpleNamespace(right=right)) == k

def test_who_turns_by_steps(run):
    befores = run.model.walk(joined(run.batches)[0])[:-1]
    pairs = zip(run.model.residuals(), befores)
    gains = torch.stack([residual.gain(before).abs()[..., 0] for residual, before in pairs])
    panels, sentence = analyze.gain_by_steps(run)
    for row, gain in zip(panels[""], gains):
        assert row == by_steps(run, torch.where(gain >= 0.3, gain.atan().rad2deg(), 0))
    more = [abs(row[1] - row[0]) for row in panels[""]]
    assert sentence.startswith(f"Sublayer {1 + np.argmax(more)} differs most")
    skipped = analyze.skips_by_steps(run)[0][""]["measured"]
    assert pytest.approx(skipped) == by_steps(run, (gains < 0.3).double().mean(0)).expected

def test_lines_inside(run, text, steps_data):
    """It has learned no step, so one is asked for. Probes get more windows than the run has."""
    found, _ = analyze.lines_inside(run)
    windows, _ = prepare.windows_of(steps_data, "val", 32, analyze.WINDOWS)
    inside = Inside(run.model, text, windows, 1)
    assert found["where the line stands"] == [inside.share["line", block] for block in range(L + 1)]
    (_, line, _), *rows, (_, (_, right), _) = found["table"]
    assert line == "b3141" and right == solve(line, text)[-1] and len(rows) == L + 1

# ------------------------------------------------------------------------------- sample.py --inside

@pytest.fixture(scope="module")
def trained(steps_data, tmp_path_factory):
    """A run that learns to copy a line, in seconds"""
    out = tmp_path_factory.mktemp("inside") / "nag"
    flags = ("--residual nag --n_layer 2 --n_embd 32 --n_head 2 --block_size 32 --batch_size 8 "
             "--max_iters 30 --eval_windows 16 --device cpu").split()
    with torch.enable_grad():
        train.main(["--data", str(steps_data), "--out", str(out), *flags])
    return out

def test_inside_on_a_terminal(trained, steps_data, tmp_path, capsys):
    def told(*flags):
        capsys.readouterr()
        sample.main([str(trained), "--inside", "--prompt", *flags])
        return capsys.readouterr().out
    piped = told("b3141")
    lines = piped.splitlines()
    assert lines[1] == "b3141" and "after one step" in lines[2] and max(map(len, lines)) <= 80
    assert lines[6].startswith("  after block 2 ")
    ends = r"the answer +([\d?][ !]){4} +([1-4] of 4 digits are wrong|right, all 4)"
    assert re.search(ends, piped) and "\033" not in piped
    moved = shutil.copytree(steps_data, tmp_path / "moved")
    assert told("b3141\n", "--data", str(moved)) == piped
    for line, is_between in ("a3141", False), ("b3141", False), ("c3141", True):
        assert ("The text never shows what is between" in told(line)) == is_between

@pytest.mark.parametrize("line", ["e3141", "d314", "d31415", "3141", "D3141", "d314²"])
def test_inside_needs_a_line(trained, line):
    assert refused(sample.main, [str(trained), "--inside", "--prompt", line]) == (
        "--inside: needs a --prompt of one line: a letter from a to d, and 4 digits from 0 to 9")

def test_inside_needs_the_text(trained, tmp_path):
    words = [str(trained), "--inside", "--prompt", "b3141", "--data", str(tmp_path / "elsewhere")]
    assert "elsewhere" in refused(sample.main, words)
