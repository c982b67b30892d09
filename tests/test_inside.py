"""The steps text inside a model: lines and answers in windows, a probe on streams in which we know what stands, its
controls, the patch, and the figures by steps against loops over single digits."""
import json, re, shutil, subprocess
from types import SimpleNamespace

import numpy as np
import pytest, torch
import torch.nn.functional as F

import analyze, prepare, sample, train
from analyze import Inside, lines_after, solve
from conftest import ids, make, refused, some
from model import Decider, Trip

CELLS, MOST, L = 4, 3, 3

@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, splits = tmp_path_factory.mktemp("steps") / "data", prepare.SPLITS
    prepare.SPLITS = {name: (200, seed) for name, (_, seed) in splits.items()}
    puzzle, prepare.PUZZLE = prepare.PUZZLE, prepare.PUZZLE | dict(cells=CELLS, most=MOST)
    prepare.main(["steps", "--out", str(folder)])
    prepare.SPLITS, prepare.PUZZLE = splits, puzzle
    return folder

@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield

@pytest.fixture(scope="module")
def text(data):
    return prepare.load_meta(data)["steps"]

@pytest.fixture(scope="module")
def windows(data):
    return prepare.windows_of(data, "val", 32, 600)

# ------------------------------------------------------------------------ lines and their answers

def answers_in(row):
    """Yields of each answer in a window of T + 1 tokens, whose line before is there, too: the column of its letter, the
    letter and the digits of the line before, and as many of its own digits as are there"""
    window = bytes(min(token, 255) for token in row).decode("latin1")
    for found in re.finditer(r"(?=([a-z])(\d{4})\n[a-z](\d*))", window):
        yield found.start(3) - 1, found[1], found[2], found[3]

def rows_of(x, y):
    return [[*idx, targets[-1]] for idx, targets in zip(x.tolist(), y.tolist())]

def test_lines_by_hand():
    puzzle = dict(table=[[3, 1, 2, 0], [2, 0, 3, 1], [1, 2, 0, 3], [0, 3, 1, 2]], cells=5)
    by_hand = [[3, 0, 2, 0, 1], [0, 0, 2, 1, 1], [3, 3, 2, 2, 0]]
    lines = lines_after(torch.tensor([by_hand[0], by_hand[0]]), 2, puzzle["table"])
    assert lines.shape == (3, 2, 5) and lines[:, 0].tolist() == lines[:, 1].tolist() == by_hand
    assert solve("c30201", puzzle) == ["30201", "00211", "33220"] and solve("a3", puzzle) == ["3"]
    found = analyze.find_answers(torch.tensor([[*b"z3141\nz2718\na"]]), 4)
    assert [each.tolist() for each in found] == [[0, 0], [6, 12], [25, 25]]
    assert analyze.spelled(torch.tensor([0, 9, 10, -1])) == "09??"
    assert analyze.example_line(1, dict(table=range(10), cells=18)) == "b314159265358979331"
    assert {*analyze.example_line(0, dict(table=range(2), cells=100))} == {"a", "0", "1"}
    assert [analyze.in_words(n) for n in (0, 1, 2, 30)] == ["no steps", "one step", "two steps", "30 steps"]

def test_answers_in_windows(text, windows):
    """What is found in the windows is what a regular expression finds. (The text is right, too.)"""
    found = []
    for i, row in enumerate(rows_of(*windows)):
        for column, letter, digits, answer in answers_in(row):
            assert answer == solve(letter + digits, text)[-1][:len(answer)]
            if column < 32:
                found.append((i, column, "abcd".index(letter)))
    assert [*zip(*(each.tolist() for each in analyze.find_answers(windows[0], CELLS)))] == found and len(found) > 500

# ------------------------------------------------------------------------------------- the probes

class Known:
    """A model that does a step in each block, where the answer is predicted. Half of its stream is about the token, and
    half of it about the answer."""
    device, order = "cpu", range(L)
    ends = SimpleNamespace(as_tensor=lambda stream: stream)

    def __init__(self, text):
        self.text, self.digit = text, torch.randn(10, 12, generator=torch.Generator().manual_seed(0))

    def walk(self, idx):
        token = self.digit[(idx - ord("0")).clamp(0, 9)]
        streams = [torch.cat((token, torch.zeros_like(token)), -1) for _ in range(L + 1)]
        for i, row in enumerate(idx.tolist()):
            for column, _, digits, answer in answers_in(row + [ord("0")]):   # The last digit is a target.
                if len(answer) < CELLS:
                    continue
                lines = lines_after(torch.tensor([*map(int, digits)]), L, self.text["table"])
                for stream, after in zip(streams, lines):
                    stream[i, column:column + CELLS, 12:] = self.digit[after]
        return [streams[place // 2] for place in range(2 * L + 1)]

    def generate(self, idx, n, temperature):
        answers = [solve(bytes(row[:CELLS + 1]).decode(), self.text)[-1] for row in idx.tolist()]
        return torch.cat((idx, torch.tensor([[*answer.encode()] for answer in answers])), 1)

def test_probes_are_ridge_regressions():
    """At the least squared error, with the ridge, the slope is 0. Each number of steps has its own."""
    vectors, digits = some(500, 24), ids(500, 3, V=10)
    x = torch.cat((vectors, torch.ones(500, 1)), 1)
    read = analyze.fit_probe(vectors, digits, 10)(vectors)
    for steps in range(3):
        wanted = F.one_hot(digits[:, steps], 10).double()
        stacked = torch.cat((x, torch.eye(25).double())), torch.cat((wanted, torch.zeros(25, 10).double()))
        assert torch.equal(read[:, steps], (x @ torch.linalg.lstsq(*stacked).solution).argmax(1))

def test_lines_inside_a_model_that_we_know(text, windows, monkeypatch):
    found = Inside(Known(text), text, windows[0], 3)
    for block in range(L + 1):
        assert found.share["answer", block][block] == 1.0 and found.furthest(block) == (block, "answer")
        assert found.share["line", block][0] == 1.0 and 0.3 < found.share["line", block][1] < 0.75
    example, lines = found.example("d3141"), solve("d3141", text)
    assert example["answer"] == example["true"] == lines[3]
    assert [(row["digits"], row["true"], row["steps"]) for row in example["blocks"]] == [
        (line, line, steps) for steps, line in enumerate(lines)]
    found.share["answer", 0][0] = 0.89   # Now the line alone can be read.
    assert found.furthest(0) == (0, "line")
    monkeypatch.setattr(analyze, "KNOWN", 2.0)   # No share is so large, so nothing can be read.
    assert found.furthest(3) is None and found.example("d3141")["blocks"] == [None] * 4
    for few in windows[0][:, :2 * CELLS + 1], windows[0][:20]:   # too short, too few
        with pytest.raises(analyze.NotHere, match="fewer than 200 digits of lines that ask for three steps"):
            Inside(Known(text), text, few, 3)

class Noise(Known):
    """It has more channels than the text has lines, so a probe could learn each line by heart."""
    order = range(1)
    def walk(self, idx):
        return 3 * [some(*idx.shape, 400, seed=idx.sum().item())]

def test_controls(text, windows, monkeypatch):
    """In an untrained model a probe reads what the token itself says, and no more. In noise, and where the digits are
    shuffled between lines, it reads by chance alone."""
    model = make("pre", n_layer=L, n_embd=32, vocab_size=320, block_size=32, dtype=torch.float32, noise=0)
    found = Inside(model, text, windows[0], 3)
    line, answer = ([found.share[where, block] for block in found.blocks] for where in ("line", "answer"))
    assert line[0][0] == 1.0 and line[0][1] < 0.75
    assert max(row[steps] for row in answer for steps in (1, 2, 3)) < 0.45
    assert max(row[steps] for row in line for steps in (2, 3)) < 0.5
    noise = Inside(Noise(text), text, windows[0][:100], 1)
    def shuffled(digits, *args):
        return lines_after(digits[torch.randperm(len(digits))], *args)
    monkeypatch.setattr(analyze, "lines_after", shuffled)
    torch.manual_seed(0)
    for found in noise, Inside(Known(text), text, windows[0], 3):
        assert max(map(max, found.share.values())) < 0.2

# -------------------------------------------------------------------------------------- the patch

class Fetches(SimpleNamespace):
    """Until block 3, it looks for the line where that stands. It says the right half of its answer."""
    order, device, training, knows = range(4), "cpu", False, True
    config = SimpleNamespace(gain_cost=0, deep_supervision=False)
    ends, decider = SimpleNamespace(stream_grows=False, can_skip=True), Decider()

    def __call__(self, idx, trip):
        for window, right in zip(idx, idx.roll(1, 0)):   # The text is right.
            line, begun = bytes(window.tolist()).decode().split("\n")
            assert line[0] == "c" and begun[1:] == solve(line, self.text)[-1][:-1]
        assert trip.decider.columns == slice(0, CELLS + 2)
        whose = idx.roll(1, 0) if trip.decider.block < 3 else idx
        right = [solve(bytes(row[:CELLS + 1]).decode(), self.text)[-1] for row in whose.tolist()]
        said = torch.tensor([[*b"??", *(line[2:] if self.knows else "??").encode()] for line in right])
        return F.pad(F.one_hot(said, 257), (0, 0, CELLS + 2, 0)), None

def test_which_block_fetches_the_line(text):
    def patch(model):
        return analyze.patched(SimpleNamespace(model=model, puzzle=text, k=2))
    panels, sentence = patch(Fetches(text=text))
    assert sentence.startswith("Block 3 fetches the line.")
    own, other = panels[""].values()
    assert max(own[:2] + other[2:]) < 0.3 and own[2:] == other[:2] == [1, 1]
    assert patch(Fetches(text=text, knows=False))[1].startswith("It doesn't know these answers")
    with pytest.raises(analyze.NotHere, match="no one state"):
        patch(make("attnres"))

@pytest.mark.parametrize("residual", ["pre", "nag", "siamese", "gated"])   # Some have tuples as streams.
def test_patch(text, residual):
    """After block 2, all of the stream is that of the window before."""
    model, idx = make(residual, n_layer=L, vocab_size=320), ids(4, 10)
    patched = model.walk(idx, Trip(model, analyze.Patch(2, slice(None))))
    for place, streams in enumerate(zip(model.walk(idx), patched)):
        own, other = map(model.ends.as_tensor, streams)
        torch.testing.assert_close(other, own.roll(1, 0) if place >= 4 else own)

# ---------------------------------------------------------------------------------- the statistics

@pytest.fixture
def run(text, windows, data):
    """48 windows, and a model that was trained to skip. Some digit is always likelier than what is none."""
    model = make("nag", n_layer=L, vocab_size=320, block_size=32, mod="gain:below=0.3")
    model.lm_head.weight[:ord("0")] = model.lm_head.weight[ord("9") + 1:] = 0
    x, y = (part[:48] for part in windows)
    return analyze.Run(model, dict(batch_size=4, tokenizer="bytes", data=str(data)), (x, y), text)

def means(run, measure):
    """By steps: the means of measure(x, y) over the digits of right halves, in a loop over single targets"""
    x, y = map(torch.cat, zip(*run.batches))
    values, found = measure(x, y), [[] for _ in range(MOST + 1)]
    for i, row in enumerate(rows_of(x, y)):
        for column, letter, _, answer in answers_in(row):
            for cell in range(CELLS // 2, len(answer)):
                found["abcd".index(letter)].append(float(values[i, column + cell]))
    return pytest.approx([sum(each) / len(each) for each in found])

def test_what_is_right_by_steps(run, text):
    """It has learned no step."""
    as_it_skips, all_run = (means(run, lambda x, y: run.model(x, trip=Trip(run.model, decider))[0].argmax(-1) == y)
                            for decider in (None, Decider(None)))
    found, sentence = analyze.right_digits(run)
    assert [*found[""].values()] == [as_it_skips, [0.1] * 4] != [all_run, [0.1] * 4]
    assert sentence.startswith(f"{analyze.steps_learned(run.right, 0.1):.1f} steps learned.")
    head, *rows = found["table"]
    assert [(line, right) for line, (_, right) in rows] == [
        (line, solve(line, text)[-1]) for line in ("a3141", "b3141", "c3141", "d3141")]
    assert analyze.skip_curve(run)[0]["steps learned"]["a fixed set"][0] == [0, pytest.approx(
        analyze.steps_learned(all_run.expected, 0.1))]
    run.batches = [(idx[:1], targets[:1]) for idx, targets in run.batches[:1]]   # too few windows
    with pytest.raises(analyze.NotHere, match="--windows"):
        analyze.gain_by_steps(run)

def test_how_many_steps_it_knows():
    for right, k in ([1.0, 0.95, 0.9, 0.2, 0.95], 2), ([1.0, 0.95], 1), ([1.0, 0.1], 1), ([0.1], 1):
        assert analyze.Run.k.fget(SimpleNamespace(right=right)) == k

def test_who_turns_by_steps(run):
    befores = run.model.walk(torch.cat([idx for idx, _ in run.batches]))[:-1]
    panels, sentence = analyze.gain_by_steps(run)
    for row, residual, before in zip(panels[""], run.model.residuals(), befores):
        gain = residual.gain(before).abs()[..., 0]
        assert row == means(run, lambda *_: torch.where(gain >= 0.3, gain.atan().rad2deg(), 0))
    skipped, _ = analyze.skips_by_steps(run)
    gains = [residual.gain(before).abs()[..., 0] for residual, before in zip(run.model.residuals(), befores)]
    share = torch.stack([(gain < 0.3).double() for gain in gains]).mean(0)
    assert skipped[""]["measured"] == pytest.approx(means(run, lambda *_: share))
    more = [row[1] - row[0] for row in panels[""]]
    assert sentence.startswith(f"Sublayer {1 + np.argmax(np.abs(more))} differs most")

# ---------------------------------------------------------------------------------- the command lines

@pytest.fixture(scope="module")
def trained(data):
    """It learns to copy a line, in seconds."""
    flags = ("--n_layer 2 --n_embd 32 --n_head 2 --block_size 32 --batch_size 8 --max_iters 30 --eval_windows 16 "
             "--device cpu").split()
    for residual in "nag", "pre":
        train.main(["--data", str(data), "--out", f"{data.parent}/{residual}", "--residual", residual, *flags])
    return data.parent

def test_inside_on_a_terminal(trained, capsys):
    def told(*flags):
        capsys.readouterr()
        sample.main([str(trained / "nag"), "--inside", *flags])
        return capsys.readouterr().out
    piped = told("--prompt", "b3141")
    lines = piped.splitlines()
    assert lines[1] == "b3141" and "after one step" in lines[2]
    assert lines[6].startswith("  after block 2 ") and max(map(len, lines)) <= 80
    assert re.search(r"the answer +([\d?][ !]){4} +([1-4] of 4 digits are wrong|right, all 4)", piped)
    assert "\033" not in piped and told("--prompt", "b3141\n") == piped
    moved = shutil.copytree(trained / "data", trained / "moved", dirs_exist_ok=True)
    assert told("--prompt", "b3141", "--data", str(moved)) == piped
    for line, is_between in ("a3141", False), ("b3141", False), ("c3141", True):
        assert ("The text never shows what is between" in told("--prompt", line)) == is_between

def test_inside_needs_a_line_and_the_text(trained, tmp_path):
    def said(line, folder=trained / "data"):
        return refused(sample.main, [str(trained / "pre"), "--inside", "--prompt", line, "--data", str(folder)])
    for line in "e3141", "d314", "d31415", "3141", "D3141", "d314²":
        assert said(line) == "--inside: needs a --prompt of one line: a letter from a to d, and 4 digits from 0 to 9"
    assert "elsewhere" in said("b3141", tmp_path / "elsewhere")

@pytest.fixture(scope="module")
def page(trained):
    analyze.main([f"{trained}/pre", f"{trained}/nag", "--out", f"{trained}/out", "--windows", "64"])
    return trained / "out"

def test_page_of_the_steps_text(page, data, text):
    numbers = json.loads((page / "numbers.json").read_text())["statistics"]
    assert [name for name in analyze.STATS if "nag" not in numbers[name]] == []
    found = numbers["lines_inside"]["nag"]
    assert np.shape(found["where the line stands"]) == (2 + 1, 1 + 1)   # blocks, steps: it has learned none
    model, _ = train.open_run(page.parent / "nag")   # Probes need more windows than --windows 64.
    windows, _ = prepare.windows_of(data, "val", 32, analyze.WINDOWS)
    inside = Inside(model, text, windows, 1)
    for block, shares in enumerate(found["where the line stands"]):
        assert shares == pytest.approx(inside.share["line", block], abs=4e-3)
    (_, line, _), *rows, (_, (_, right), _) = found["table"]
    assert line == "b3141" and right == solve(line, text)[-1] and len(rows) == 3

@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium here: the page was not seen in a browser")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it(page, width):
    """In a window of this width"""
    script = """<script>
        const shown = [...document.images].map(image => image.currentSrc.length ? 1 : 0)
        const rows = document.querySelectorAll("#lines_inside table")[1].textContent
        document.title = [shown.length, document.querySelectorAll("nav a").length, rows,
                          document.documentElement.scrollWidth, innerWidth].join("|")
        </script></body>"""
    (page / "choose.html").write_text((page / "index.html").read_text().replace("</body>", script))
    frame = f"<iframe src=choose.html width={width} height=900 onload='this.after(contentDocument.title)'>"
    (page / "frame.html").write_text(frame)
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--allow-file-access-from-files",
             "--virtual-time-budget=5000", f"--user-data-dir={page}/chromium", f"file://{page}/frame.html"]
    dom = subprocess.run(words, capture_output=True, text=True, timeout=100).stdout
    pictures, links, rows, wide, inner = re.search(r"</iframe>(.*?)<", dom, re.S)[1].split("|")
    assert int(pictures) == int(links) == len(analyze.STATS)
    table = json.loads((page / "numbers.json").read_text())["statistics"]["lines_inside"]["nag"]["table"]
    assert rows.endswith(table[-1][1][0] + table[-1][2]) and "after block 2" in rows
    assert int(wide) <= int(inner) == width   # Nobody has to scroll the page sideways.
