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
from model import GatePolicy, Trace

PUZZLE = prepare.PUZZLE | dict(cells=4, most=3)
MODELS = {"pre": {}, "nag": dict(mod="gate:rate=0.25"), "attnres:group=2": {}}
LINES = ["a0000", "c1234", "d9876"]
CASES = [dict(), dict(removed=[0, 1]), dict(removed=[2]), dict(removed=[3, 4]),
         dict(removed=range(6))]
THRESHOLDS = [dict(threshold=0.3), dict(threshold=0.5, removed=[1]), dict(threshold=100)]

def make_run(residual, **config):
    model = make(residual, dtype=torch.float32, vocab_size=128, block_size=32, **config)
    half = {name: tensor.half().float() for name, tensor in model.state_dict().items()}
    model.load_state_dict(half)   # the page has weights in float16
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
    document = f"const document = {{ getElementById: () => ({{ textContent: {json.dumps(data)} }}) }}"
    program = page.with_name("program.js")
    program.write_text(f"{document}\n{script}\nconsole.log(JSON.stringify({code}))")
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
def test_probes_read_what_they_read_in_python(runs, page):
    run = runs["pre"]
    lines, _ = analyze.answered_lines(PUZZLE, 2, 600)
    vectors, _ = analyze.vectors_and_digits(run.model, PUZZLE, lines, 2)
    weights, steps, _ = analyze.live_probes(run, 2)["line", 0]
    x = vectors["line", 0][:40]
    scores = torch.nn.functional.pad(x.double(), (0, 1), value=1.0) @ weights.T
    found = run_in_node(page, f"""(() => {{
        const model = new GPT(models[0])
        const read = x => argmax(linear([...x, 1], model.probe[2].line[0]))
        return [{json.dumps(x.tolist())}.map(read), model.probes["2 line 0"].steps]
    }})()""")
    assert found == [scores.argmax(-1).tolist(), steps]

@needs_node
def test_steps_of_the_puzzle(page):
    digits = torch.tensor([3, 1, 4, 1])
    wanted = analyze.lines_after(digits, 3, PUZZLE["table"]).tolist()
    found = run_in_node(page, '[0, 1, 2, 3].map(n => after_steps("3141", n))')
    assert found == ["".join(map(str, line)) for line in wanted]

def test_what_the_page_cannot_run_is_left_out(runs, tmp_path, capsys):
    others = {"peri": make_run("peri"), "routed": make_run("pre", mod="router:rate=0.25"),
              "relu2": make_run("pre", activation="relu2"),
              "prose": SimpleNamespace(model=runs["pre"].model, puzzle=None)}
    analyze.write_play_page(others, tmp_path)
    assert not (tmp_path / "play.html").exists()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"play.html: without {name}" for name in others]
    analyze.write_play_page({"mine": runs["pre"], "yours": runs["pre"]} | others, tmp_path)
    html = (tmp_path / "play.html").read_text()
    assert '"name": "mine"' in html and '"name": "yours"' in html and "peri" not in html

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

@pytest.mark.skipif(not CHROMIUM, reason="no chromium is installed")
def test_page_in_a_browser(runs, page, tmp_path):
    """After a few changes of the settings, the page shows the answer that torch gives."""
    changes = ["choose_model(MODELS[1])", "change({ steps: 2, threshold: 0.4 })",
               "switch_layers([2, 3])", "choose(3, true)", "by_id('digits').value = '97 53'",
               "by_id('digits').oninput()"]
    changed = tmp_path / "changed.html"
    script = f"<script>{'; '.join(changes)}</script></body>"
    changed.write_text(page.read_text().replace("</body>", script))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic",
             "--disable-background-networking", "--disable-component-update", "--disable-sync",
             f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *flags, changed.as_uri()], capture_output=True, text=True,
                          timeout=120)
    foot = done.stdout.partition('class="block foot"')[2].partition("</main>")[0]
    answer = re.findall(r'class="digit[^>]*>([^<]*)<', foot)

    model, tokens = runs["nag"].model, [*"c9753\na"]
    while len(tokens) < 11:
        logits, states = in_torch(model, tokens, [2, 3], 0.4)
        tokens.append(analyze.TOKENS[logits[-1].argmax()])
    assert answer == [token.replace("\n", "↵") for token in tokens[-4:]]
    share = sum(row.count("skip") for row in states) / sum(map(len, states))
    assert f"{100 * share + 1e-9:.0f} % skipped; off: a1 m1" in foot
