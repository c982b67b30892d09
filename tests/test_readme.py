"""README.md and the workshop: what they name exists, and what they show runs."""

import ast
import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, refused

import model
import prepare
import sample
import train
from analyze import STATISTICS, AnalyzeConfig
from model import RESIDUALS, GPTConfig, make_policy, make_residual
from prepare import PrepareConfig
from sample import SampleConfig
from train import TrainConfig

PAGES = [ROOT / "README.md", ROOT / "workshop/README.md", ROOT / "results/README.md"]
FLAGS = {"train.py": (GPTConfig, TrainConfig), "sample.py": (SampleConfig,),
         "analyze.py": (AnalyzeConfig,), "prepare.py": (PrepareConfig,)}
COMPARE = {"seeds", "lr", "residual_lr", "equal", "out", "jobs", "insert"}

def commands(page):
    """The command lines of python scripts on a page, each a list of words"""
    text = page.read_text().replace("\\\n", " ")
    return [[script, *rest.split("#")[0].split("`")[0].split()]
            for script, rest in re.findall(r"((?:results/|workshop/)?\w+\.py)( [^\n]*)", text)
            if "--" in rest or "runs/" in rest]

def python_blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)

@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_links_exist(page):
    text = page.read_text()
    links = re.findall(r"\]\((?!http)([^)#\s]+)", text) + re.findall(r'src="([^"]+)"', text)
    for link in links:
        assert (page.parent / link).exists(), link
    for script in set(re.findall(r"(?:python|--config) ((?:results/|workshop/|configs/)?\w+\.\w+)",
                                 text)):
        assert script == "results/run.py" or (ROOT / script).exists(), script
    for anchor in re.findall(r"workshop/README\.md#([\w-]+)", text):
        headings = re.findall(r"^#+ (.*)", PAGES[1].read_text(), re.MULTILINE)
        assert anchor in [h.lower().replace(" ", "-") for h in headings], anchor

@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_rules_and_statistics_exist(page):
    of_train = {field.name for config in FLAGS["train.py"] for field in dataclasses.fields(config)}
    found = commands(page)
    for script, *words in found:
        known = {field.name for config in FLAGS.get(script, ()) for field in dataclasses.fields(config)}
        if script == "results/compare.py":
            known = of_train | COMPARE
        flags = [word for word in words if re.fullmatch(r"--[a-z_]+", word)]
        if known:
            assert {flag[2:] for flag in flags} <= known, (script, words)
        options = dict(zip(words, words[1:]))
        for name in options.get("--only", "").split(","):
            assert not name or name in STATISTICS, name
    assert page == PAGES[2] or len(found) > 8   # the pattern still finds them
    text = page.read_text()
    own = set(re.findall(r'RESIDUALS\["(\w+)"\]', text))
    for rule in re.findall(r"--residual ([a-z][\w:=,.-]*)", text):
        if rule.split(":")[0] not in own:
            make_residual(GPTConfig(residual=rule), 0)
    for mod in re.findall(r"--mod ([a-z][\w:=,.]*)", text):
        make_policy(GPTConfig(mod=mod))

def test_table_has_every_rule():
    table = (ROOT / "README.md").read_text().split("<!-- table -->")[1].split("<!-- /table -->")[0]
    rules = re.findall(r"^\| `([\w:=,]+)` \|", table, re.MULTILINE)
    assert {rule.split(":")[0] for rule in rules} == set(RESIDUALS)
    for rule in rules:
        make_residual(GPTConfig(residual=rule), 0)

# -----------------------------------------------------------------------------
# what is shown runs

TINY = ["--block_size", "32", "--n_layer", "2", "--n_embd", "16", "--max_iters", "2",
        "--eval_windows", "8"]

def own_classes(page):
    return [block for block in python_blocks(page) if "RESIDUALS[" in block]

@pytest.fixture
def own_rules():
    """The classes that a page puts at the end of model.py are there."""
    before = dict(RESIDUALS)

    def add(page):
        names = dict(vars(model))
        for block in own_classes(page):
            exec(block, names)
    yield add
    RESIDUALS.clear()
    RESIDUALS.update(before)

def train_own(steps_data, out, name):
    train.main(["--data", str(steps_data), "--out", str(out), "--residual", name, *TINY])

@pytest.mark.parametrize("page, name", [(PAGES[0], "anchor"), (PAGES[1], "cheat:far=14"),
                                        (PAGES[1], "broken"), (PAGES[1], "steady:start=0.3")])
def test_own_rules_train_and_sample(own_rules, steps_data, tmp_path, page, name):
    own_rules(page)
    train_own(steps_data, tmp_path / "run", name)
    sample.main([str(tmp_path / "run"), "--max_new_tokens", "4"])

def test_cheat_is_refused(own_rules, steps_data, tmp_path):
    own_rules(PAGES[1])
    sentence = refused(train_own, steps_data, tmp_path / "run", "cheat")
    assert sentence.startswith("Cheat: looks at later tokens")

def test_promise_of_a_rule(own_rules, steps_data, tmp_path, capsys, monkeypatch):
    """workshop/check.py: NAG's and Steady's promises hold, Broken's does not."""
    own_rules(PAGES[1])
    monkeypatch.syspath_prepend(str(ROOT / "workshop"))
    import check
    rows = {}
    for name in "nag", "broken", "steady:start=0.3":
        train_own(steps_data, tmp_path / name[:3], name)
        capsys.readouterr()
        check.main([str(tmp_path / name[:3])])
        lines = capsys.readouterr().out.splitlines()[1:]
        rows[name[:3]] = [list(map(float, line.split()[1:])) for line in lines]
    assert all(len(table) == 4 for table in rows.values())
    assert all(abs(promise - tangent) < 1e-5 for promise, tangent, _ in rows["nag"])
    assert all(abs(promise - change) < 1e-5 for promise, _, change in rows["ste"])
    assert any(abs(promise - tangent) > 1e-3 for promise, tangent, _ in rows["bro"])

NOTEBOOK = ROOT / "workshop/workshop.ipynb"

def notebook_cells():
    return ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"]
            if cell["cell_type"] == "code"]

def test_notebook_is_valid_and_stores_no_output():
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            ast.parse("".join(cell["source"]))
    assert own_classes(PAGES[0])[0].strip() in "\n".join(notebook_cells())   # the same example

@pytest.mark.slow
def test_notebook_runs(tmp_path, monkeypatch, capsys):
    """Its cells, with few iterations and small data sets, in this process"""
    shown = []
    display = SimpleNamespace(SVG=lambda filename: Path(filename).read_text(), display=shown.append)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(version_info=(9, 0)))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "model.py").write_text("")   # a clone is recognized by it
    monkeypatch.chdir(tmp_path)
    small = lambda config: [prepare.puzzle_documents(n, seed) for n, seed in ((300, 5), (300, 3))]
    monkeypatch.setitem(prepare.SOURCES, "steps", small)
    monkeypatch.setitem(prepare.SOURCES, "stdlib", lambda config: (["x = 1\n" * 400], ["y\n" * 400]))
    before, here, names = dict(RESIDUALS), os.getcwd(), {}
    try:
        for cell in notebook_cells():
            exec(compile(cell.replace("ITERATIONS = 800", "ITERATIONS = 8"), "cell", "exec"), names)
    finally:
        RESIDUALS.clear()
        RESIDUALS.update(before)
        os.chdir(here)
    assert len(shown) == 1 + 2 + 2 + 2 + 1 + 2
    assert all(figure.count("<svg") == 1 for figure in shown)
    assert "looks at later tokens" in capsys.readouterr().out
