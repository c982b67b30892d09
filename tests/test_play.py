"""The live page: what its JavaScript computes equals what torch computes, in node and in a browser
(each of them is skipped where it is not installed)."""

import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from conftest import make

import analyze
import prepare
from model import GatePolicy, Trace, rms_norm

PUZZLE = prepare.PUZZLE | dict(cells=4, most=3)
MODELS = {"pre": {}, "nag": dict(mod="gate:rate=0.25"), "attnres:group=2": {}}
LINES = ["a0000", "c1234", "d9876"]
CASES = [dict(), dict(removed=[0, 1]), dict(removed=[2]), dict(removed=[3, 4]),
         dict(removed=range(6))]
THRESHOLDS = [dict(threshold=0.3), dict(threshold=0.5, removed=[1]), dict(threshold=100)]

def make_run(residual, block_size=32, **config):
    model = make(residual, dtype=torch.float32, vocab_size=128, block_size=block_size, **config)
    half = {name: tensor.half().float() for name, tensor in model.state_dict().items()}
    model.load_state_dict(half)   # the page has weights in float16
    if config.get("mod") == "gate:rate=0.25":
        model.policy.threshold.fill_(0.25)   # as if trained
    return SimpleNamespace(model=model.eval(), puzzle=PUZZLE)

@pytest.fixture(scope="module")
def runs():
    return {residual: make_run(residual, **config) for residual, config in MODELS.items()}

@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("play")
    analyze.write_play_page(runs, folder)
    return folder / "play.html"

def run_in_node(page, code):
    """-> the value of `code` after the page's script up to what needs a document"""
    html = page.read_text()
    data = re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1]
    script = re.search(r"<script>\n(.*)// The page\.", html, re.DOTALL)[1]
    program = page.with_name("program.js")
    program.write_text(f"""
        const document = {{ getElementById: () => ({{ textContent: {json.dumps(data)} }}) }}
        {script}
        console.log(JSON.stringify({code}))""")
    done = subprocess.run(["node", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)

@torch.no_grad()
def in_torch(model, tokens, removed, threshold):
    """-> logits (T, V) of the page's tokens, and the state of each token in each sublayer"""
    policy = GatePolicy(model.config, below=threshold) if threshold > 0 else lambda trace: None
    trace = Trace(model, policy, removed)
    logits, _ = model(torch.tensor([[ord(token) for token in tokens]]), trace=trace)
    states = [["off" if mask is False else "run" if mask is None or mask[0, t] else "skip"
               for mask in trace.masks] for t in range(len(tokens))]
    return logits[0][:, [ord(token) for token in analyze.TOKENS]], states

def answer_in_torch(model, line, removed=(), threshold=0):
    """-> all tokens of a line such as c9753 and its answer"""
    tokens = [*line, "\n", "a"]
    while len(tokens) < 2 * len(line) + 1:
        logits, _ = in_torch(model, tokens, removed, threshold)
        tokens.append(analyze.TOKENS[logits[-1].argmax()])
    return tokens

needs_node = pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")

@needs_node
@pytest.mark.parametrize("residual", MODELS)
def test_logits_equal_torch(residual, runs, page):
    model = runs[residual].model
    cases = [dict(removed=[], threshold=0) | case | dict(line=line) for line in LINES
             for case in CASES + (THRESHOLDS if residual == "nag" else [])]
    cases = [case | dict(removed=list(case["removed"])) for case in cases]
    found = run_in_node(page, f"""(() => {{
        const model = new GPT(models[{list(MODELS).index(residual)}])
        return {json.dumps(cases)}.map(({{ line, removed, threshold }}) => {{
            const {{ tokens, traces }} = model.answer(line, new Set(removed), threshold)
            return [tokens, traces.map(trace => trace.logits), traces.map(trace => trace.states)]
        }})
    }})()""")
    skipped = 0
    for case, (tokens, logits, states) in zip(cases, found):
        read, written = tokens[:10], tokens[7:]   # the last digit is written only
        wanted, wanted_states = in_torch(model, read, case["removed"], case["threshold"])
        assert states == wanted_states, case
        torch.testing.assert_close(torch.tensor(logits), wanted, atol=1e-3, rtol=0)
        assert written == [analyze.TOKENS[i] for i in wanted[6:].argmax(-1)]
        skipped += sum(row.count("skip") for row in states)
    assert (skipped > 20) == (residual == "nag")

@needs_node
def test_the_page_gets_the_probe_of_the_furthest_line(runs, tmp_path, monkeypatch):
    """Here digits can be read after one step, at the line, after block 0, and nowhere else."""
    def fit_probes(model, puzzle, n_steps):
        weights = {(where, 0): torch.randn(17, n_steps + 1, 10).half().double()
                   for where in ("line", "answer")}
        fitted[n_steps] = weights["line", 0]
        shares = {("line", 0): [1.0, 0.95, 0.5, 0.5], ("answer", 0): [0.5, 0.5, 0.5, 0.5]}
        return weights, shares

    fitted = {}
    monkeypatch.setattr(analyze, "fit_probes", fit_probes)
    analyze.write_play_page({"pre": runs["pre"]}, tmp_path)
    found = run_in_node(tmp_path / "play.html", "[models[0].probes, new GPT(models[0]).probe]")
    assert found[0] == {"0 line 0": dict(steps=0, share=1.0)} | {
        f"{n} line 0": dict(steps=1, share=0.95) for n in (1, 2, 3)}
    for n_steps, weights in fitted.items():
        probe = torch.tensor(found[1][str(n_steps)]["line"]["0"]).double()
        assert torch.equal(probe, weights[:, min(1, n_steps)].T)

@needs_node
def test_tokens_skip_as_in_training(page):
    assert run_in_node(page, "models.map(model => model.threshold)") == [0, 0.25, 0]

@needs_node
def test_steps_of_the_puzzle(page):
    digits = torch.tensor([3, 1, 4, 1])
    wanted = analyze.lines_after(digits, 3, PUZZLE["table"]).tolist()
    found = run_in_node(page, '[0, 1, 2, 3].map(n => after_steps("3141", n))')
    assert found == ["".join(map(str, line)) for line in wanted]

def test_what_the_page_cannot_run_is_left_out(runs, tmp_path, capsys):
    others = {"peri": make_run("peri"), "routed": make_run("pre", mod="router:rate=0.25"),
              "relu2": make_run("pre", activation="relu2"),
              "short": make_run("pre", block_size=8),
              "prose": SimpleNamespace(model=runs["pre"].model, puzzle=None)}
    analyze.write_play_page(others, tmp_path)
    assert not (tmp_path / "play.html").exists()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(others)
    for line, name in zip(lines, others):
        assert line.startswith(f"play.html: without {name}, ")
    analyze.write_play_page({"mine": runs["pre"], "yours": runs["pre"]} | others, tmp_path)
    html = (tmp_path / "play.html").read_text()
    assert '"name": "mine"' in html and '"name": "yours"' in html and "peri" not in html

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

EVENTS = """
const press = key => document.dispatchEvent(new KeyboardEvent("keydown", { key }))
const type = (id, value) => {
  by_id(id).value = value
  by_id(id).dispatchEvent(new Event("input"))
}
press("m")                       // the second model, nag
by_id("letter2").click()
by_id("a1 attention").click()
press("2")                       // block 2
type("threshold", 22)            // degrees
type("digits", "97 53")
type("digits", "12a4")           // refused
press("ArrowRight")
"""

needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no chromium is installed")

def open_in_browser(page, events, tmp_path):
    """-> the page's HTML after these events, and after what it counts in the background"""
    changed = tmp_path / "changed.html"
    html = page.read_text().replace("</body>", f"<script>{events}</script></body>")
    changed.write_text(html)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic",
             "--disable-background-networking", "--disable-component-update", "--disable-sync",
             f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *flags, changed.as_uri()], capture_output=True, text=True,
                          timeout=120)
    return done.stdout

@needs_chromium
def test_page_in_a_browser(runs, page, tmp_path):
    """After these events, the page shows what torch computes."""
    dom = open_in_browser(page, EVENTS, tmp_path)
    grid = re.search(r'<main id="grid">(.*)</main>', dom, re.DOTALL)[1]
    top, *blocks, foot = grid.split('<div class="block')[1:]
    digits_in = lambda html: re.findall(r'class="digit[^>]*>([^<]*)<', html)

    run, removed, threshold = runs["nag"], [2, 4, 5], 0.4040262
    tokens = answer_in_torch(run.model, "c9753", removed, threshold)
    _, states = in_torch(run.model, tokens[:-1], removed, threshold)
    assert digits_in(foot) == [token.replace("\n", "↵") for token in tokens[-4:]]
    skipped = sum(row.count("skip") for row in states) / sum(map(len, states))
    assert f"{100 * skipped + 1e-9:.0f} % skipped; off: a1 a2 m2" in foot
    assert "25 random lines" in foot
    assert re.findall(r'token chosen[^>]*>([^<]*)<', top) == ["a"]

    # block 0: the digits of the line itself can be read
    probes, shares = analyze.fit_probes(run.model, PUZZLE, 2)
    assert shares["line", 0][0] >= analyze.KNOWN > shares["line", 0][1] and "0 steps" in blocks[0]
    policy = GatePolicy(run.model.config, below=threshold)
    trace = Trace(run.model, policy, keep_streams=True)
    with torch.no_grad():
        run.model(torch.tensor([[ord(token) for token in tokens[:5]]]), trace=trace)
    x = rms_norm(analyze.as_tensor(trace.streams[2]))[0, 1:]
    read = analyze.read_probe(probes["line", 0], x)[:, 0]
    assert digits_in(blocks[0])[:4] == [str(digit) for digit in read.tolist()]

@needs_chromium
def test_shares_without_each_block(runs, page, tmp_path):
    """Beside each block: the share of right digits on random lines without it. After a reset: all
    sublayers run, although this model was trained to skip."""
    events = EVENTS + """
        by_id("letter1").click()
        reset()
        change({ steps: 1 })
        document.title = JSON.stringify(RANDOM_LINES)"""
    dom = open_in_browser(page, events, tmp_path)
    lines = json.loads(re.search("<title>(.*)</title>", dom)[1])
    assert "too hard: <button id=\"letter0\"" in dom   # this model was never trained
    assert re.search(r'id="degrees">([^<]*)<', dom)[1] == "0.0°" and "; off: " not in dom

    def share(removed):
        n_right = 0
        for line in lines:
            tokens = answer_in_torch(runs["nag"].model, f"b{line}", removed)
            truth = analyze.lines_after(torch.tensor([*map(int, line)]), 1, PUZZLE["table"])[1]
            n_right += sum(a == str(b) for a, b in zip(tokens[7:], truth.tolist()))
        return 100 * n_right / len(lines) / 4

    found = [int(each) for each in re.findall(r">if off: (\d+) %<", dom)]
    assert found == pytest.approx([share([2 * i, 2 * i + 1]) for i in range(3)], abs=1)
    assert len(set(found)) > 1
    assert f"<b>{share([]):.0f} %</b> of digits right" in dom

@needs_chromium
def test_starts_with_a_line_that_is_answered_right(runs, tmp_path, monkeypatch):
    """Of the lines that it tries, the one with the fewest wrong digits; a wrong one is a
    question."""
    analyze.write_play_page({"pre": runs["pre"]}, tmp_path)
    dom = open_in_browser(tmp_path / "play.html", """document.title = JSON.stringify([
        CONSTANTS, START.digits, QUESTIONS.at(-1).show[0].digits, QUESTIONS.length])""", tmp_path)
    constants, start, failed, n_questions = json.loads(re.search("<title>(.*)</title>", dom)[1])
    n_wrong = {}
    for line in constants:
        tokens = answer_in_torch(runs["pre"].model, f"a{line}")
        n_wrong[line] = sum(a != b for a, b in zip(tokens[7:], line))
    assert n_wrong[start] == min(n_wrong.values()) < max(n_wrong.values())
    assert n_wrong[failed] > 0 and n_questions == 3   # no NAG
