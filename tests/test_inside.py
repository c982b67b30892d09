"""The lines inside: a probe on streams in which we know what stands, its controls, the patch, and
the figures of the steps text against loops over single digits."""
import json, re, shutil, subprocess
from types import SimpleNamespace

import pytest, torch
import torch.nn.functional as F

import analyze, inside, patch, prepare, sample, steps, train
from conftest import ids, make
from model import ByGain, Decider, Runner, Without
from steps import find_lines, lines_after, solve, spelled, steps_of_targets

CELLS, MOST, L = 4, 3, 3

@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, documents = tmp_path_factory.mktemp("steps") / "data", steps.DOCUMENTS
    steps.DOCUMENTS = dict(train=200, val=200)
    prepare.main(["steps", "--out", str(folder), "--cells", str(CELLS), "--most", str(MOST)])
    steps.DOCUMENTS = documents
    return folder

@pytest.fixture(scope="module")
def text(data):
    return prepare.load_meta(data)["steps"]

@pytest.fixture(scope="module")
def windows(data):
    return prepare.windows_of(data, "val", 32, 600)

def step(digits, text):
    return [text["table"][left][digit] for left, digit in zip([0, *digits], digits)]

def lines_of(row):
    """Yields of each line that follows another whole one in a window: where it begins, its digits, the
    letter of the line before, and its digits"""
    for found in re.finditer(r"(?=([a-z])(\d{4})\n[a-z](\d{4}))", bytes(min(c, 255) for c in row).decode("latin1")):
        yield found.start() + CELLS + 2, [*map(int, found[3])], found[1], [*map(int, found[2])]

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
            for begin, _, _, digits in lines_of(row + [ord("0")]):   # The last digit is a target.
                for stream in streams:
                    for cell, digit in enumerate(digits):
                        stream[i, begin + cell, 12:] = self.digit[digit]
                    digits = step(digits, self.text)
        for place in range(1, 2 * L + 1):
            yield place, streams[(place - 1) // 2], streams[place // 2]

    def generate(self, idx, n, temperature):
        answers = [solve(bytes(row[:CELLS + 1]).decode(), self.text)[-1] for row in idx.tolist()]
        return torch.cat((idx, torch.tensor([[*answer.encode()] for answer in answers])), 1)

def test_find_lines(text, windows):
    x, y = windows
    for k in range(MOST + 1):
        with torch.device("meta"):   # What is made stands where the windows are.
            window, column, digits = find_lines(x, y, k, text)
        right = [(i, begin - CELLS - 2, digits, answer) for i in range(len(x))
                 for begin, answer, asked, digits in lines_of([*x[i].tolist(), y[i, -1].item()])
                 if ord(asked) - ord("a") == k]
        assert [*zip(window.tolist(), column.tolist())] == [each[:2] for each in right]
        assert digits.tolist() == [digits for *_, digits, _ in right]
        answers = lines_after(digits, k, text["table"])[-1]
        assert answers.tolist() == [answer for *_, answer in right] and len(right) > 50

def test_a_probe_reads_what_is_there():
    digits = torch.randint(10, (2, 900), generator=torch.Generator().manual_seed(0))
    codes = torch.randn(2, 10, 24, generator=torch.Generator().manual_seed(1))
    vectors = codes[0][digits[0]] + codes[1][digits[1]] + 0.1 * torch.randn(900, 24)
    for each in digits:
        probe = inside.Probe(vectors[:500], each[:500], 10)
        assert probe.weights.shape == (25, 10)
        share = probe.how_often_right(vectors[500:], each[500:])
        assert share == (probe.read(vectors[500:]) == each[500:]).double().mean() > 0.99
        x, wanted = inside.with_one(vectors[:500]), torch.eye(10, dtype=torch.double)[each[:500]]
        slope = x.T @ (x @ probe.weights - wanted) + probe.weights   # of half the squared error and the ridge
        assert slope.abs().max() < 1e-9

def test_lines_inside_a_model_that_we_know(text, windows):
    found = inside.Inside(Known(text), text, windows, 3)
    for block in range(L + 1):
        assert found.share["answer", block][block] == 1.0
        assert found.furthest(block) == (block, "answer")
        assert found.share["line", block][0] == 1.0 and found.share["line", block][1] < 0.75
    example = found.example("d3141")
    lines = solve("d3141", text)
    assert example["answer"] == example["true"] == lines[3]
    assert [row["digits"] for row in example["blocks"]] == lines
    assert [row["steps"] for row in example["blocks"]] == [0, 1, 2, 3]
    with pytest.raises(inside.NotHere, match="too few lines that ask for three steps: fewer than 200"):
        inside.Inside(Known(text), text, [part[:20] for part in windows], 3)

def test_controls(text, windows, monkeypatch):
    """In an untrained model a probe reads what the token itself says, and no more; and digits that are
    shuffled between lines, it reads by chance alone."""
    model = make("pre", n_layer=L, n_embd=32, vocab_size=320, block_size=32, dtype=torch.float32, noise=0)
    found = inside.Inside(model, text, windows, 3)
    line, answer = found.share_by_block("line"), found.share_by_block("answer")
    assert line[0][0] == 1.0 and line[0][1] < 0.75
    assert max(row[steps] for row in answer for steps in (1, 2, 3)) < 0.45
    assert max(row[steps] for row in line for steps in (2, 3)) < 0.5
    def shuffled(*args):
        window, column, digits = find_lines(*args)
        return window, column, digits[torch.randperm(len(window))]
    monkeypatch.setattr(inside, "find_lines", shuffled)
    torch.manual_seed(0)
    share = inside.Inside(Known(text), text, windows, 3).share
    assert max(map(max, share.values())) < 0.2

def test_a_probe_is_scored_where_it_was_not_fitted(text, windows):
    """In noise with more channels than lines, it could learn each line by heart."""
    class Noise(Known):
        def walk(self, idx):
            generator = torch.Generator().manual_seed(idx.sum().item())
            x = torch.randn(*idx.shape, 400, generator=generator)
            yield from ((place, x, x) for place in (1, 2))
    found = inside.Inside(Noise(text), text, [part[:100] for part in windows], 1)
    assert max(map(max, found.share.values())) < 0.2

class Unchanged:
    """A residual that hands the stream on"""
    def as_tensor(self, stream):
        return stream

    def __call__(self, stream, f):
        return stream

class Answers(Known):
    """A model whose stream, where the answer is predicted, is the answer: right in the right half only"""
    ends, decider, training = SimpleNamespace(stream_grows=False), Decider(), False
    config = SimpleNamespace(block_size=2 * CELLS + 2)

    def __call__(self, idx, runner):
        assert runner.decider is self.decider
        columns = bytes(idx[0].tolist()).decode()[runner.columns]
        assert re.fullmatch(r"c\d{4}\n|a\d{3}", columns)   # the line, or what predicts the answer
        lines = lines_after(idx[:, 1:CELLS + 1] - ord("0"), 2, self.text["table"])[-1] + ord("0")
        lines[:, :CELLS // 2] = 0
        stream = torch.cat((idx[:, :-CELLS], lines), 1)
        for place in range(1, 2 * L + 1):
            stream = runner.run(place, stream, Unchanged(), None)
        return F.one_hot(stream, 128).float(), None

def test_whose_answer(text):
    """A patch brings the answer of the line before, with the model's own decider. The right half counts."""
    found = patch.patch(Answers(text), text, 2, n=40)
    at_line, at_answer = found["line"], found["answer"]
    assert at_line["its own answer"] == at_answer["the other line's answer"] == [1.0] * L
    assert max(at_answer["its own answer"]) < 0.4

@torch.no_grad()
def test_patch(text):
    """After the last block, the stream where the answer is predicted is all that the head reads. After the
    first, patching everything gives the other line's logits."""
    model, idx = make("nag", n_layer=L, vocab_size=320, mod="gain:below=0.1"), ids(4, 10)
    full = model(idx)[0]
    def patched(block, columns):
        return model(idx, runner=patch.PatchingRunner(model, block, columns))[0]
    walks = zip(model.walk(idx), model.walk(idx, runner=patch.PatchingRunner(model, 2, slice(None))))
    other = [place for (place, _, x), (_, _, y) in walks if not torch.equal(x[0], y[0])]
    assert other == [*range(4, 2 * L + 1)]   # from the end of block 2 on
    torch.testing.assert_close(patched(L, slice(6, None))[:, 6:], full.roll(1, 0)[:, 6:])
    torch.testing.assert_close(patched(L, slice(0, 6))[:, 6:], full[:, 6:])
    torch.testing.assert_close(patched(1, slice(None)), full.roll(1, 0))
    assert (patched(1, slice(0, 6))[:, 6:] - full[:, 6:]).abs().max() > 1e-3
    for model, message in (make("attnres"), "no one state"), (make("pre", block_size=2 * CELLS + 1), "block_size"):
        with pytest.raises(inside.NotHere, match=message):
            patch.patch(model, text, 2)

# ---------------------------------------------------------------------------------- the statistics

def run_of(text, windows, data, residual="nag", **config):
    model = make(residual, n_layer=L, vocab_size=320, block_size=32, **config)
    for _, sublayer in model.blocks[2].pairs():   # This block is silent.
        torch.nn.init.zeros_(sublayer.c_proj.weight)
    settings = dict(batch_size=4, block_size=32, tokenizer="bytes", residual=residual, data=str(data))
    return analyze.StepsRun(model, settings, [part[:48] for part in windows], text, skip_below=0.3)

@torch.no_grad()
def test_figures_by_steps_by_hand(text, windows, data):
    """Against loops over single targets"""
    run = run_of(text, windows, data)
    x, y = (part[:48] for part in windows)
    steps, cell = steps_of_targets(x, y, CELLS)
    def means(values):
        found = [[] for _ in range(MOST + 1)]
        for row, t in (steps >= 0).nonzero().tolist():
            if cell[row, t] >= CELLS // 2:
                found[steps[row, t]].append(float(values[row, t]))
        return [sum(each) / len(each) for each in found]
    def shares(decider=None):
        return means(run.model(x, runner=Runner(run.model, decider))[0].argmax(-1) == y)
    found = analyze.right_digits(run)["share of right digits"]
    assert found["measured"] == pytest.approx(shares()) and found["guessing"] == [0.1] * 4
    intact, *without = analyze.removal_by_steps(run)
    assert intact == pytest.approx(shares()) == without[2]
    assert without[0] == pytest.approx(shares(Without({1, 2}, run.model.decider)))
    assert len(without) == L
    residuals = run.model.residuals()
    gains = [residuals[place - 1].gain(before).abs()[..., 0] for place, before, _ in run.model.walk(x)]
    degrees = [gain.atan().rad2deg() for gain in gains[:4]]   # The silent block turns nothing.
    assert analyze.gain_by_steps(run)[:4] == [pytest.approx(means(each)) for each in degrees]
    runner = Runner(run.model, ByGain(None, 0.3))
    run.model(x, runner=runner)
    ran, right = analyze.who_skips(run).values()
    by_hand = means(torch.stack(runner.keeps).double().mean(0))
    assert ran["as it skips"] == pytest.approx([2 * L * share for share in by_hand]) and 0 < min(by_hand) < 1
    assert right == {"as it skips": pytest.approx(shares(ByGain(None, 0.3))), "if all run": pytest.approx(shares())}
    # One that was trained to skip so has the same figures: what they compare with is not skipped on top.
    skips, found = run_of(text, windows, data, mod="gain:below=0.3"), []
    assert analyze.who_skips(skips) == analyze.who_skips(run)
    for each in run, skips:
        torch.manual_seed(0)
        found.append(analyze.skip_curve(each)["steps learned"])
    assert analyze.steps_learned([0.0, 1.0, 0.55, 0.05], 0.1) == 1.5   # Nobody knows less than who guesses.
    assert found[0]["by gain"][0] == pytest.approx([0, analyze.steps_learned(shares(), 0.1)])
    [skipped, learned], = found[1].pop("as trained")
    assert learned == pytest.approx(analyze.steps_learned(shares(ByGain(None, 0.3)), 0.1))
    assert skipped == pytest.approx(runner.skipped()) and found[0] == found[1]

def test_statistics_of_the_lines_inside(text, windows, data):
    run = run_of(text, windows, data, dtype=torch.float32)
    for right, k in ([0, 0, 0, 0], 1), ([1, 1, 1, 0], 2):   # If it has learned nothing, we look at the first step.
        run.right = right
        found = analyze.lines_inside(run)
        assert found["asked"] == k and len(found["line"]) == len(found["answer"]) == L + 1
        assert {len(row) for row in found["line"] + found["answer"]} == {k + 1}
        assert found["examples"][0]["line"] == "abc"[k] + "3141" and len(found["examples"]) > 1
    table = analyze.written(run)
    assert table["lines"][2] == "c3141" and table["true"][0] == "3141"
    assert len(table["answers"]) == len(table["true"]) == MOST + 1

def test_too_few_windows_for_some_steps():
    text = dict(table=[[0, 1], [1, 0]], cells=2, most=9)
    about, windows = dict(batch_size=4, tokenizer="bytes", data=""), ids(2, 12, 250).split(6, 1)
    run = analyze.StepsRun(make("pre", vocab_size=320), about, windows, text)
    with pytest.raises(analyze.NotHere, match="--windows"):
        analyze.right_digits(run)

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
    assert inside.marked("12", "13") == "1 2!"
    assert "\033" not in piped and told("--prompt", "b3141\n") == piped
    assert told("--prompt", "b3141", "--remove", "2") != piped
    told("--prompt", "a3141")   # No steps are asked for.

@pytest.mark.parametrize("flags, message", [
    (["--prompt", "b314"], "a letter from a to d, and 4 digits from 0 to 9"), ([], "needs a --prompt"),
    (["--prompt", "e3141"], "from a to d"), (["--prompt", "b3141\nb3141"], "of one line")])
def test_inside_needs_a_line(trained, flags, message):
    with pytest.raises(SystemExit, match=f"^--inside: [^\n]*{message}[^\n]*$"):
        sample.main([str(trained / "nag"), "--inside", *flags])

def test_inside_needs_the_text(trained, tmp_path):
    run = shutil.copytree(trained / "nag", tmp_path / "run")
    other = shutil.copytree(trained / "data", tmp_path / "data")
    settings = json.loads((run / "config.json").read_text())
    meta = json.loads((other / "meta.json").read_text())
    def refused(message, data=str(other), main=sample.main, words=("--inside", "--prompt", "b3141")):
        (run / "config.json").write_text(json.dumps(settings | dict(data=data)))
        with pytest.raises(SystemExit, match=f"^[^\n]*{message}[^\n]*$"):
            main([str(run), *words])
    for shard in other.glob("val*"):
        shard.unlink()
    refused("no val shard")
    (other / "meta.json").write_text(json.dumps({key: value for key, value in meta.items() if key != "steps"}))
    refused("--inside: is for a run on the steps text")
    elsewhere = "config.json names data/elsewhere .* where the training began"
    refused(elsewhere, "data/elsewhere")
    refused(elsewhere, "data/elsewhere", analyze.main, ["--only", "written", "--out", str(run / "figures")])

@pytest.fixture(scope="module")
def page(trained):
    analyze.main([f"{trained}/pre", f"{trained}/nag", "--out", f"{trained}/out", "--windows", "64"])
    return trained / "out"

def test_page_of_the_steps_text(page):
    numbers = json.loads((page / "numbers.json").read_text())["statistics"]
    here = {name for name, found in numbers.items() if "nag" in found}
    assert here == {*analyze.STATS} - {"depth_map"} and len(analyze.STATS) <= 12
    assert {path.stem for path in page.glob("*.png")} == here - {"written"}

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
