"""results/: the statistics against known values, commands that parse, and a page that says what the files say."""
import collections
import csv
import math
import re
import shlex
import shutil
import sys

import pytest
import torch

import analyze
from conftest import ROOT, ids, make
from flags import parse
from model import GPTConfig
from train import TrainConfig, defaults_for

sys.path.append(str(ROOT / "results"))
import cost
import pruning
import run
import summarize

@pytest.mark.parametrize("p, n, t", [(0.05, 2, 4.302653), (0.05, 9, 2.262157), (0.1, 3, 2.353363), (0.4, 4, 0.940965)])
def test_students_t(p, n, t):
    assert summarize.t_quantile(p, n) == pytest.approx(t, abs=1e-4)
    assert summarize.two_sided_p(-t, n) == pytest.approx(p, rel=1e-4)

def test_a_gap_by_hand():
    gap = summarize.Gap({"2": 1.0, "3": 2.0, "4": 4.0, "5": 9.0}, {"2": 0.0, "3": 0.0, "4": 0.0})
    assert gap.n == 3 and gap.mean == pytest.approx(7 / 3)            # s = 1.527525, s / sqrt(3) = 0.881917
    assert gap.half(0.05) == pytest.approx(3.79458, rel=1e-4)
    assert gap.could_find() == pytest.approx((4.302653 + 1.060660) * 0.881917, rel=1e-4)
    with pytest.raises(SystemExit, match="fewer than two seeds"):
        summarize.Gap({"2": 1.0}, {"2": 0.0})

def test_verdicts():
    def word(*gaps, sure=False, measure="bits"):
        gap = summarize.Gap(dict(enumerate(gaps)), dict.fromkeys(range(len(gaps)), 0.0))
        return summarize.verdict(gap, sure, 0.02, measure)
    assert word(-0.1, -0.11, -0.1, sure=True) == "better" and word(0.1, 0.11, 0.1, sure=True) == "worse"
    assert word(0.1, 0.11, 0.1, sure=True, measure="steps") == "better"
    assert word(0.1, 0.11, 0.1, sure=True, measure="skipped") == "more"
    assert word(0.001, -0.001, 0.002) == "equal within 0.02" and word(0.1, -0.1, 0.05) == "open"

def test_holm():
    assert summarize.holm([0.04, 0.01, 0.012]) == [True, True, True]
    assert summarize.holm([0.04, 0.03, 0.01]) == [False, False, True]   # 0.03 > 0.05 / 2, and that ends it

def test_steps_learned():
    assert analyze.steps_learned([1.0, 1.0, 1.0, 0.25, 0.2], 0.25) == pytest.approx(2)
    assert analyze.steps_learned([1.0, 0.625, 0.25], 0.25) == pytest.approx(0.5)

@torch.no_grad()
def test_scores_of_blocks():
    """CascadeFlow's are gradient norms per root of a size, and a silent block has no influence."""
    model = make(n_layer=4, vocab_size=320, taper="linear", n_embd=64, n_head=8)
    for _, sublayer in model.blocks[2].pairs():
        torch.nn.init.zeros_(sublayer.c_proj.weight)
    windows = ids(12, 12, V=256), ids(12, 12, V=256, seed=1)
    inspected = analyze.Run(model, dict(batch_size=4, block_size=16, tokenizer="bytes"), {}, None, windows)
    sizes = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    norms = [size ** 0.5 * scale for size, scale in zip(sizes, (1, 1.2, 1.3, 1.1))]
    inspected.history = {5: dict(grad_norms=[1.0] * 4), 10: dict(grad_norms=norms), 11: dict(loss=1.0)}
    scores = pruning.block_scores(inspected)
    assert scores["CascadeFlow"] == pytest.approx([1, 1.2, 1.3, 1.1])
    assert torch.as_tensor(scores["influence"]).argmin() == 2
    inspected.history = {5: dict(grad_norms=[1.0] * 5)}   # of another number of blocks
    assert pruning.gradient_sums(inspected) == []

@pytest.mark.parametrize("name", run.EXPERIMENTS)
def test_commands_parse_and_are_different(name):
    commands = run.commands(name)
    assert len({flags for *_, flags in commands}) == len(commands) >= 4
    for variant, seed, lr, flags in commands:
        if run.SKIPS in flags:   # of the third edition
            continue
        gpt, config = parse((GPTConfig, TrainConfig), shlex.split(flags), defaults=defaults_for)
        assert (gpt.seed, config.lr) == (seed, lr) and config.out == ""

def test_every_comparison_has_its_variants():
    with open(ROOT / "results/comparisons.csv", newline="") as f:
        comparisons = list(csv.DictReader(f))
    known = {variant.name for _, variants in run.EXPERIMENTS.values() for variant in variants}
    known |= {f"{name}, without {block}" for name in pruning.NAMES.values()
              for block in ["one block, mean", *(f"{method}'s block" for method in pruning.METHODS)]}
    known |= {f"NAG that pays, {what}" for what in ("all run", *(f"below {each}" for each in cost.BELOW))}
    known |= {f"NAG that pays, {what}" for below in cost.CONTROLLED for what in (
        f"a fixed set for {below}", f"coins for {below}", *(f"below {below}, {asked}" for asked in cost.ASKED))}
    for each in comparisons:
        assert summarize.names_in(each) <= known and float(each["margin"]) > 0 and each["measure"] in summarize.UNITS

def test_a_gap_of_gaps():
    found = {"A": (5, 7, 9), "B": (1, 2, 3), "C": (1, 1)}
    rows = [dict(variant=name, seed=str(seed), bits=str(bits)) for name, all_bits in found.items()
            for seed, bits in enumerate(all_bits)]
    assert summarize.values(rows, "A minus B", "bits") == {"0": 4, "1": 5, "2": 6}
    assert summarize.values(rows, "A minus C", "bits") == {"0": 4, "1": 6}   # the seeds that both have
    assert summarize.names_in(dict(a="A minus B", b="C")) == {"A", "B", "C"}

def test_a_run_is_measured_and_kept(tmp_path, monkeypatch):
    """A tiny experiment from its command to its line; the second time there is nothing to do."""
    monkeypatch.setattr(run, "ROOT", tmp_path)
    for name in "train.py", "data":
        (tmp_path / name).symlink_to(ROOT / name, target_is_directory=name == "data")
    import prepare
    monkeypatch.setattr(prepare, "DOCUMENTS", dict(train=40, val=20))
    (tmp_path / "data").unlink()
    for name in "steps", "stdlib":
        prepare.main(["steps", "--out", str(tmp_path / "data" / name)])
    flags = "--data data/steps --device cpu --n_embd 16 --n_head 2 --n_layer 1 --max_iters 45 --block_size 32 --batch_size 2"
    monkeypatch.setitem(run.EXPERIMENTS, "tiny", ("?", [run.Variant("one, block", flags, 2e-2, (), (2,))]))
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        run.main(["tiny", "--out", str(tmp_path / "runs.csv")])
    row, = run.read_runs(tmp_path / "runs.csv")
    assert row["tokens"] == "2880" and row["variant"] == "one, block" and float(row["bits"]) > 1
    assert len(row["right"].split()) == 10 and 0 <= float(row["steps"]) < 1 and float(row["seconds"]) >= 0
    folder, = (tmp_path / "runs/results").iterdir()
    for _ in range(2):   # The second time there is nothing to do.
        pruning.main([str(folder), "--out", str(tmp_path / "runs.csv")])
    lines = run.read_runs(tmp_path / "runs.csv")[1:]
    assert {line["variant"].split(", ")[1] for line in lines} >= {"without one block", "without worth's block"}
    assert len(lines) == 2 + len(pruning.METHODS) and len({line["steps"] for line in lines}) == 1   # of one block
    (tmp_path / "runs.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match="runs.csv"):
        run.read_runs(tmp_path / "runs.csv")

def test_bad_input_is_one_sentence(tmp_path):
    (tmp_path / "notes.txt").write_text("my notes\n")
    (tmp_path / "binary").write_bytes(b"\xff\x00\xfe")
    (tmp_path / "word.csv").write_text(",".join(run.COLUMNS) + "\n" + "x," * (len(run.COLUMNS) - 1) + "x\n")
    (tmp_path / "empty.csv").touch()
    run.append(tmp_path / "empty.csv", dict.fromkeys(run.COLUMNS, ""))
    assert len(run.read_runs(tmp_path / "empty.csv")) == 1   # It has got its first line, too.
    for name, what in [("notes.txt", "none of ours"), ("binary", "none of ours"), ("word.csv", "could not convert"),
                       (".", "can't become one"), ("a/b", "can't become one")]:
        with pytest.raises(SystemExit, match=what):
            run.main(["staircase", "--dry", "--out", str(tmp_path / name)])
    (tmp_path / "comparisons.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match="none of ours"):
        summarize.read_comparisons(tmp_path / "comparisons.csv")
    with pytest.raises(SystemExit, match="--nope: unknown flag"):
        summarize.main(["--nope"])
    with pytest.raises(SystemExit, match="^nope: no such experiment; choose from staircase, "):
        run.main(["nope", "--dry"])

@pytest.mark.skipif(not (ROOT / "results/runs.csv").exists(), reason="nothing has been run")
def test_the_page_says_what_the_files_say(capsys, tmp_path, monkeypatch):
    """Tables are those of the files, and each gap of the page, such as +0.100 (+0.005 to +0.196), is one of them."""
    monkeypatch.setattr(summarize, "draw_steps", lambda *args: None)
    monkeypatch.setattr(summarize, "draw_bits", lambda *args: None)
    monkeypatch.setattr(summarize, "HERE", tmp_path)
    for name in "runs.csv", "comparisons.csv":
        shutil.copy(ROOT / "results" / name, tmp_path)
    summarize.main([])
    tables = (tmp_path / "tables.md").read_text()
    assert tables == (ROOT / "results/tables.md").read_text()
    page = (ROOT / "results/README.md").read_text()
    gaps = re.findall(r"([+-]\d\.\d{3}) \(([+-]\d\.\d{3} to [+-]\d\.\d{3})\)", page)
    assert len(gaps) > 12 and page.count("\n") <= 160
    minutes = collections.Counter()   # of each experiment
    for row in run.read_runs(ROOT / "results/runs.csv"):
        minutes[row["experiment"]] += float(row["seconds"] or 0) / 60
    told = page[page.rindex("Minutes of one core"):]
    for name, total in minutes.items():
        assert re.search(rf"\b{name}\s{total:.0f}\b", told) or not total, (name, total)
    for mean, interval in gaps:
        assert re.search(re.escape(mean) + r" [a-z ]+\| " + re.escape(interval), tables), (mean, interval)
