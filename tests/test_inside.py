"""The steps text inside a model: lines and answers in windows, a probe on streams in which we know what
stands, its controls, the patch, and the figures by steps against loops over single digits."""
import json, re, shutil, subprocess
from types import SimpleNamespace

import numpy as np
import pytest, torch
import torch.nn.functional as F

import analyze, prepare, sample, train
from analyze import Inside, find_lines, lines_after, solve
from conftest import ids, make, refused, some
from model import Decider, Runner, Without

CELLS, MOST, L = 4, 3, 3

@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, splits = tmp_path_factory.mktemp("steps") / "data", prepare.SPLITS
    prepare.SPLITS = {name: (200, seed) for name, (_, seed) in splits.items()}
    puzzle, prepare.PUZZLE = prepare.PUZZLE, prepare.PUZZLE | dict(cells=CELLS, most=MOST)
    prepare.main(["steps", "--out", str(folder)])
    prepare.SPLITS, prepare.PUZZLE = splits, puzzle
    return folder

@pytest.fixture(scope="module")
def text(data):
    return prepare.load_meta(data)["steps"]

@pytest.fixture(scope="module")
def windows(data):
    return prepare.windows_of(data, "val", 32, 600)

# ------------------------------------------------------------------------ lines and their answers

def answers_in(row):
    """Yields of each answer in a window of T + 1 tokens, whose line before is there, too: the column of its
    letter, the letter and the digits of the line before, and as many of its own digits as are there"""
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
    assert [each.tolist() for each in analyze.find_answers(torch.tensor([[*b"z3141\nz2718\na"]]), 4)] == [
        [0, 0], [6, 12], [25, 25]]
    assert analyze.spelled(torch.tensor([0, 9, 10, -1])) == "09??"
    assert analyze.some_digits(dict(table=range(10), cells=18)) == "314159265358979331"
    assert {*analyze.some_digits(dict(table=range(2), cells=100))} == {"0", "1"}
    assert [analyze.in_words(n) for n in (0, 1, 2, 30)] == ["no steps", "one step", "two steps", "30 steps"]

def test_find_lines(text, windows):
    """What is found in the windows is what a regular expression finds. (The text is right, too.)"""
    rows, found = rows_of(*windows), []
    for i, row in enumerate(rows):
        for column, letter, digits, answer in answers_in(row):
            assert answer == solve(letter + digits, text)[-1][:len(answer)]
            found.append((i, column, "abcd".index(letter), digits, len(answer)))
    mine = zip(*(each.tolist() for each in analyze.find_answers(windows[0], CELLS)))
    assert [*mine] == [(i, column, asked) for i, column, asked, _, _ in found if column < 32]
    for k in range(MOST + 1):
        with torch.device("meta"):   # What is made stands where the windows are.
            window, column, digits = find_lines(windows[0], k, CELLS)
        right = [(i, at, line) for i, at, asked, line, n in found if asked == k and n == CELLS]
        lines = map(analyze.spelled, digits)
        assert [*zip(window.tolist(), column.tolist(), lines)] == right and len(right) > 50

# ------------------------------------------------------------------------------------- the probes

class Known:
    """A model that does a step in each block, where the answer is predicted. Half of its stream is
    about the token, and half of it about the answer."""
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
    probes = analyze.Probes(vectors, digits, 10)
    x = torch.cat((vectors, torch.ones(500, 1)), 1)
    read = probes.read(vectors)
    for steps, weights in enumerate(probes.weights.split(10, dim=1)):
        slope = x.T @ (x @ weights - F.one_hot(digits[:, steps], 10)) + weights
        assert slope.abs().max() < 1e-9
        assert torch.equal(read[:, steps], (x @ weights).argmax(1))

def test_lines_inside_a_model_that_we_know(text, windows, monkeypatch):
    found = Inside(Known(text), text, windows[0], 3)
    for block in range(L + 1):
        assert found.share["answer", block][block] == 1.0
        assert found.furthest(block) == (block, "answer")
        assert found.share["line", block][0] == 1.0 and 0.3 < found.share["line", block][1] < 0.75
    example, lines = found.example("d3141"), solve("d3141", text)
    assert example["answer"] == example["true"] == lines[3]
    assert [(row["digits"], row["true"], row["steps"]) for row in example["blocks"]] == [
        (line, line, steps) for steps, line in enumerate(lines)]
    found.share["answer", 0][0] = 0.89   # Now the line alone can be read.
    assert found.furthest(0) == (0, "line")
    monkeypatch.setattr(analyze, "KNOWN", 2.0)   # No share is so large, so nothing can be read.
    assert found.furthest(3) is None and found.example("d3141")["blocks"] == [None] * 4
    with pytest.raises(analyze.NotHere, match="block_size"):
        Inside(Known(text), text, windows[0][:, :2 * CELLS + 1], 3)
    with pytest.raises(analyze.NotHere, match="too few lines that ask for three steps: fewer than 200"):
        Inside(Known(text), text, windows[0][:20], 3)

def test_probes_read_what_the_model_has_written(text, windows):
    """... and no question marks, as which we show what is no digit."""
    model, read = Known(text), []
    found = Inside(model, text, windows[0], 1)
    model.generate = lambda idx, n, temperature: torch.cat((idx, torch.tensor([[49, 256, 10, 50]])), 1)
    model.walk = lambda idx: read.append(idx.tolist()) or Known.walk(model, idx)
    assert found.example("b3141")["answer"] == "1??2" and read == [[[*b"b3141\na1", 256, 10]]]

class Noise(Known):
    """It has more channels than the text has lines, so a probe could learn each line by heart."""
    order = range(1)
    def walk(self, idx):
        return 3 * [some(*idx.shape, 400, seed=idx.sum().item())]

def test_controls(text, windows, monkeypatch):
    """In an untrained model a probe reads what the token itself says, and no more. In noise, and where the
    digits are shuffled between lines, it reads by chance alone."""
    model = make("pre", n_layer=L, n_embd=32, vocab_size=320, block_size=32, dtype=torch.float32, noise=0)
    found = Inside(model, text, windows[0], 3)
    line, answer = found.share_by_block("line"), found.share_by_block("answer")
    assert line[0][0] == 1.0 and line[0][1] < 0.75
    assert max(row[steps] for row in answer for steps in (1, 2, 3)) < 0.45
    assert max(row[steps] for row in line for steps in (2, 3)) < 0.5
    noise = Inside(Noise(text), text, windows[0][:100], 1)
    def shuffled(*args):
        window, column, digits = find_lines(*args)
        return window, column, digits[torch.randperm(len(window))]
    monkeypatch.setattr(analyze, "find_lines", shuffled)
    torch.manual_seed(0)
    for found in noise, Inside(Known(text), text, windows[0], 3):
        assert max(map(max, found.share.values())) < 0.2

# -------------------------------------------------------------------------------------- the patch

def says_digits(model):
    model.lm_head.weight[:ord("0")] = model.lm_head.weight[ord("9") + 1:] = 0   # Some digit is likelier.
    return model

def patch(model, text):
    return analyze.patched(SimpleNamespace(model=model, puzzle=text, k=2))

def test_random_windows(text):
    for window, right in zip(*(each.tolist() for each in analyze.random_windows(text, 2, 40))):
        line, begun = bytes(window).decode().split("\n")
        assert line[0] == "c" and solve(line, text)[-1] == bytes(right).decode()
        assert begun == "a" + bytes(right[:-1]).decode()

class Fetches(SimpleNamespace):
    """Until block 3, it looks for the line where that stands. It says the right half of its answer."""
    order, device, training, decider = range(4), "cpu", False, None
    ends, config = SimpleNamespace(stream_grows=False), SimpleNamespace(block_size=32)
    knows = True

    def __call__(self, idx, runner):
        assert runner.columns in (slice(0, CELLS + 2), slice(CELLS + 2, None))
        is_at_line = runner.columns.start == 0
        whose = idx.roll(1, 0) if is_at_line == (runner.block < 3) else idx
        right = [solve(bytes(row[:CELLS + 1]).decode(), self.text)[-1] for row in whose.tolist()]
        said = torch.tensor([[*b"??", *(line[2:] if self.knows else "??").encode()] for line in right])
        return F.pad(F.one_hot(said, 257), (0, 0, CELLS + 2, 0)), None

def test_which_block_fetches_the_line(text):
    panels, sentence = patch(Fetches(text=text), text)
    assert sentence.startswith("Block 3 fetches the line.")
    (own, other), (own_there, other_there) = (panel.values() for panel in panels.values())
    assert own == other_there and max(own[:2]) < 0.3 and own[2:] == [1, 1]
    assert other == own_there and max(other[2:]) < 0.3 and other[:2] == [1, 1]
    assert patch(Fetches(text=text, knows=False), text)[1].startswith("It doesn't know these answers")

@torch.no_grad()
@pytest.mark.parametrize("residual", ["nag", "siamese"])   # The stream of both is a tuple.
def test_patch(text, residual):
    """After block 2, all of the stream is that of the window before."""
    model, idx = make(residual, n_layer=L, vocab_size=320), ids(4, 10)
    patched = model.walk(idx, analyze.PatchingRunner(model, 2, slice(None)))
    for place, streams in enumerate(zip(model.walk(idx), patched)):
        own, other = map(model.ends.as_tensor, streams)
        torch.testing.assert_close(other, own.roll(1, 0) if place > 4 else own)

def test_what_has_no_patch(text):
    for model, why in (make("attnres"), "no one state"), (make("pre", block_size=2 * CELLS + 1), "block_size"):
        with pytest.raises(analyze.NotHere, match=why):
            patch(model, text)

# ---------------------------------------------------------------------------------- the statistics

@pytest.fixture
@torch.no_grad()
def run(text, windows, data):
    """48 windows, and a model that was trained to skip. Its last block is silent."""
    model = says_digits(make("nag", n_layer=L, vocab_size=320, block_size=32, mod="gain:below=0.3"))
    for _, sublayer in model.blocks[2].pairs():
        sublayer.c_proj.weight.zero_()
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

def right_by_hand(run, decider=None):
    return means(run, lambda x, y: run.model(x, runner=Runner(run.model, decider))[0].argmax(-1) == y)

@torch.no_grad()
def test_what_is_right_by_steps(run, monkeypatch):
    """It has learned no step."""
    as_it_skips, all_run = right_by_hand(run), right_by_hand(run, Decider(None))
    learned = analyze.steps_learned(all_run.expected, 0.1)
    found, sentence = analyze.right_digits(run)
    assert [*found["share of right digits"].values()] == [as_it_skips, [0.1] * 4] != [all_run, [0.1] * 4]
    assert sentence == f"{analyze.steps_learned(run.right, 0.1):.1f} steps learned."
    panels, sentence = analyze.removal_by_steps(run)
    intact, *without = panels["share of right digits"]
    assert intact == without[2] == as_it_skips and len(without) == L
    assert without[0] == right_by_hand(run, Without({1, 2}, run.model.decider))
    assert sentence == "It knows no step, so nothing can be missed."
    with monkeypatch.context() as known:
        known.setattr(analyze, "KNOWN", 0.0)   # Now it knows all, as if its digits were right.
        sentence = analyze.removal_by_steps(run)[1]
    last = [row[MOST] for row in without]
    words = f"Block {last.index(min(last)) + 1} is missed most. Without it, {min(last):.0%} of the"
    assert sentence.startswith(words)
    assert analyze.skip_curve(run)[0]["steps learned"]["by gain"][0] == pytest.approx([0, learned])
    run.batches = [(idx[:1], targets[:1]) for idx, targets in run.batches[:1]]   # too few windows
    with pytest.raises(analyze.NotHere, match="--windows"):
        analyze.removal_by_steps(run)

@torch.no_grad()
def test_who_turns_by_steps(run, monkeypatch):
    runner, x = Runner(run.model), torch.cat([idx for idx, _ in run.batches])
    befores = run.model.walk(x, runner)[:-1]
    panels, sentence = analyze.gain_by_steps(run)
    [rows] = panels.values()
    for row, residual, before in zip(rows[:4], run.model.residuals(), befores):   # The last two turn nothing.
        gain = residual.gain(before).abs()[..., 0]
        assert row == means(run, lambda *_: torch.where(gain >= 0.3, gain.atan().rad2deg(), 0))
    more = [row[MOST] - row[0] for row in rows]
    assert sentence == "It knows no step, so no sublayer works for one."
    with monkeypatch.context() as known:
        known.setattr(analyze, "KNOWN", 0.0)   # Now it knows all.
        sentence = analyze.gain_by_steps(run)[1]
    assert sentence == (f"Sublayer {more.index(max(more)) + 1} turns digits after three steps by "
                        f"{max(more):.0f} degrees more than copies.")
    panels, sentence = analyze.who_skips(run)
    n_run, right = panels.values()
    by_hand = means(run, lambda *_: 2 * L * torch.stack(runner.answers).double().mean(0))
    assert n_run == {"as it skips": by_hand} and 0 < min(by_hand.expected) < 2 * L
    copied, one_step, *_ = by_hand.expected
    assert sentence == f"A copied digit runs {copied:.1f} sublayers, and one after one step {one_step:.1f}."
    assert right == {"as it skips": right_by_hand(run), "if all run": right_by_hand(run, Decider(None))}

@pytest.mark.parametrize("right, most", [
    ([1.0, 0.95, 0.9, 0.2, 0.95], 2), ([1.0, 0.95], 1), ([1.0, 0.1], 0), ([0.1], 0)])
def test_the_most_steps_that_are_known(right, most):
    assert analyze.Run.most_known.fget(SimpleNamespace(right=right)) == most

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
    assert lines[5].startswith("  after block 1 ") and lines[6].startswith("  after block 2 ")
    assert max(map(len, lines)) <= 80
    assert re.search(r"the answer +([\d?][ !]){4} +([1-4] of 4 digits are wrong|right, all 4)", piped)
    row = dict(steps=0, where="line", share=0.95, digits="3142", true="3141")
    sample.print_example(dict(line="b3141", answer="1085", true="1085", blocks=[None, row]), 1)
    assert "3 1 4 2! no steps" in capsys.readouterr().out   # It is compared with its own line.
    assert "\033" not in piped and told("--prompt", "b3141\n") == piped
    moved = shutil.copytree(trained / "data", trained / "moved", dirs_exist_ok=True)
    assert told("--prompt", "b3141", "--data", str(moved)) == piped
    assert told("--prompt", "b3141", "--remove", "2") != piped
    for line, is_between in ("a3141", False), ("b3141", False), ("c3141", True):
        assert ("The text never shows what is between" in told("--prompt", line)) == is_between

def test_inside_needs_a_line_and_the_text(data, tmp_path):
    model, other = make(), shutil.copytree(data, tmp_path / "data")
    for line in "", "e3141", "d314", "d31415", "3141", "D3141", "d314²", "d3141\n":
        said = refused(sample.show_inside, model, other, line)
        assert said == "--inside: needs a --prompt of one line: a letter from a to d, and 4 digits from 0 to 9"
    assert "no data set there" in refused(sample.show_inside, model, "data/elsewhere", "b3141")
    (other / "meta.json").write_text('{"tokenizer": "bytes"}')
    assert "--inside: is for a run on the steps text" in refused(sample.show_inside, model, other, "b3141")

@pytest.fixture(scope="module")
def page(trained):
    analyze.main([f"{trained}/pre", f"{trained}/nag", "--out", f"{trained}/out", "--windows", "64"])
    return trained / "out"

def test_page_of_the_steps_text(page, data, text):
    numbers = json.loads((page / "numbers.json").read_text())["statistics"]
    here = {name for name, found in numbers.items() if "nag" in found}
    assert here >= {*list(analyze.STATS)[:12]} - {"depth_map"}   # One of your own may follow.
    assert {path.stem for path in page.glob("*.png")} == here - {"written"}
    found, table = numbers["lines_inside"]["nag"], numbers["written"]["nag"]
    assert found["asked"] == 1   # It has learned no step, so we look at the first one.
    assert np.shape(found["line"]) == np.shape(found["answer"]) == (2 + 1, 1 + 1)   # blocks, steps
    model, _ = train.open_run(page.parent / "nag")   # Probes need more windows than --windows 64.
    windows, _ = prepare.windows_of(data, "val", 32, analyze.WINDOWS)
    share = Inside(model, text, windows, 1).share_by_block("line")
    assert np.array(found["line"]) == pytest.approx(np.array(share), abs=4e-3)
    assert found["examples"][0]["line"] == "b3141" and len(found["examples"]) == 5
    assert "The model knows no step. After block 0, 1" in (page / "index.html").read_text()
    read = [str(block["steps"]) if block else "none" for block in found["examples"][0]["blocks"]]
    assert f"a probe reads up to step {', '.join(read)}, of 1." in (page / "index.html").read_text()
    assert table["lines"] == ["a3141", "b3141", "c3141", "d3141"] and len(table["answers"]) == MOST + 1
    assert table["true"] == [solve(line, text)[-1] for line in table["lines"]]

@pytest.mark.skipif(not shutil.which("chromium"), reason="there is no chromium here")
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_shows_it(page, width):
    """As if somebody chose the second line of the second run, in a window of this width"""
    script = """<script>
        const line = document.querySelectorAll("details[name='nag']")[1]
        line.querySelector("summary").click()
        const shown = line.open && line.querySelector("table").textContent
        document.title = [shown, document.documentElement.scrollWidth, innerWidth].join("|")
        </script></body>"""
    (page / "choose.html").write_text((page / "index.html").read_text().replace("</body>", script))
    frame = f"<iframe src=choose.html width={width} height=900 onload='this.after(contentDocument.title)'>"
    (page / "frame.html").write_text(frame)
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--allow-file-access-from-files",
             "--virtual-time-budget=5000", f"--user-data-dir={page}/chromium", f"file://{page}/frame.html"]
    dom = subprocess.run(words, capture_output=True, text=True, timeout=100).stdout
    numbers = json.loads((page / "numbers.json").read_text())["statistics"]
    example = numbers["lines_inside"]["nag"]["examples"][1]
    shown, wide, inner = re.search(r"</iframe>(.*?)<", dom)[1].split("|")
    assert "the answer" + example["answer"] in shown and "after block 2" in shown
    assert int(wide) <= int(inner) == width   # Nobody has to scroll the page sideways.
