"""results/: the statistics against known values, commands that parse, and a page that says what the files say."""
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
from train import TrainConfig, read_configs

sys.path.append(str(ROOT / "results"))
import cost
import ill
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

def test_measures_of_a_sick_stream():
    assert ill.slope([2 * block ** 0.5 for block in range(1, 25)]) == pytest.approx(0.5)
    assert ill.spearman([1, 2, 4, 8, 16]) == pytest.approx(1) and ill.spearman([3, 2, 1]) == pytest.approx(-1)
    assert ill.late_by_early([100.0, 4, 4, 9, 9, 9, 2, 1, 2]) == 0.5   # medians: one odd block does not count

@torch.no_grad()
def test_a_block_that_does_nothing():
    model = make(n_layer=4, vocab_size=320, n_embd=64, n_head=8)
    for _, sublayer in model.blocks[2].pairs():
        torch.nn.init.zeros_(sublayer.c_proj.weight)
    found = {(when, name): numbers for when, name, numbers in ill.measure(
        model, [(ids(12, 12, V=256), ids(12, 12, V=256, seed=1))], {5: dict(grad_norms=[1.0, 2.0, 4.0, 8.0])})}
    change, stream = found["trained", "change"], found["trained", "stream"]
    assert change[2] == 0 < min(change[0], change[1], change[3]) and stream[2] == stream[1] != stream[3]
    assert found["trained", "worth"][2] == pytest.approx(0, abs=1e-6) != found["trained", "worth"][0]
    assert found["trained", "gradient"] == [0.2, 0.4, 0.8, 1.6] and found["first weights", "change"][2] > 0

@torch.no_grad()
def test_sources_begin_anew():
    """With Block Attention Residuals, a group's first block hands on its own updates alone."""
    model = make("attnres:group=4", n_layer=4)
    stream, _ = ill.stream_and_change(model, ids())
    last = [list(after[1].values())[-1][0] for place, _, after in model.walk(ids()) if place % 2 == 0]
    assert stream == pytest.approx([ill.rms(each).mean().item() for each in last])
    assert stream[2] < stream[1]

@torch.no_grad()
def test_controls_of_skipping():
    """A greedy set begins with the sublayer that is missed least, and a mix lies between two sets."""
    model = make("nag", n_layer=3)
    batches = [(ids(), ids(seed=1))]
    losses = {place: cost.mean_loss(model, batches, cost.Without({place}, cost.ALL_RUN)) for place in range(1, 7)}
    sets = cost.greedy_sets(model, batches, 3)
    assert sets[0] == {min(losses, key=losses.get)} < sets[1] < sets[2] and [*map(len, sets)] == [1, 2, 3]

@pytest.mark.parametrize("name", run.EXPERIMENTS)
def test_commands_parse_and_are_different(name):
    commands = run.commands(name)
    assert len({flags for *_, flags in commands}) == len(commands) >= 4
    for variant, seed, lr, flags in commands:
        if run.SKIPS in flags:   # of the third edition
            continue
        gpt, config = read_configs(shlex.split(flags))
        assert (gpt.seed, config.lr) == (seed, lr) and config.out == ""

def test_every_comparison_has_its_variants():
    with open(ROOT / "results/comparisons.csv", newline="") as f:
        comparisons = list(csv.DictReader(f))
    known = {variant.name for _, variants in run.EXPERIMENTS.values() for variant in variants}
    known |= {row["variant"] for row in run.read_runs(ROOT / "results/runs.csv")}   # and what other files measure
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
    import prepare, steps
    monkeypatch.setattr(steps, "DOCUMENTS", dict(train=40, val=20))
    (tmp_path / "data").unlink()
    for name in "steps", "stdlib":
        prepare.main(["steps", "--out", str(tmp_path / "data" / name)])
    flags = ("--data data/steps --device cpu --n_embd 16 --n_head 2 --n_layer 1 --max_iters 45 --block_size 64 "
             "--batch_size 1 --residual nag --gain_cost 0.1")
    monkeypatch.setitem(run.EXPERIMENTS, "tiny", ("?", [run.Variant("one, block", flags, 2e-2, (), (2,))]))
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        run.main(["tiny", "--out", str(tmp_path / "runs.csv")])
    row, = run.read_runs(tmp_path / "runs.csv")
    assert row["tokens"] == "2880" and row["variant"] == "one, block" and float(row["bits"]) > 1
    assert len(row["right"].split()) == 10 and 0 <= float(row["steps"]) < 1 and float(row["seconds"]) >= 0
    folder, = (tmp_path / "runs/results").iterdir()
    for _ in range(2):   # The second time there is nothing to do.
        cost.main([str(folder), "--out", str(tmp_path / "runs.csv")])
        ill.main([str(folder), "--out", str(tmp_path / "ill.csv")])
    lines = run.read_runs(tmp_path / "runs.csv")[1:]
    assert len({line["variant"] for line in lines}) == len(lines) == 1 + len(cost.BELOW) + 2 * (2 + len(cost.ASKED))
    assert all(0 <= float(line["skipped"]) <= 1 for line in lines)
    assert {len(by_seed["2"]) for by_seed in ill.read_lines(tmp_path / "ill.csv").values()} == {1}   # of one block
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
    monkeypatch.setattr(summarize, "draw_all", lambda *args: None)
    monkeypatch.setattr(summarize, "HERE", tmp_path)
    for name in "runs.csv", "comparisons.csv", "ill.csv":
        shutil.copy(ROOT / "results" / name, tmp_path)
    summarize.main([])
    tables = (tmp_path / "tables.md").read_text()
    assert tables == (ROOT / "results/tables.md").read_text()
    page = (ROOT / "results/README.md").read_text()
    gaps = re.findall(r"([+-]\d\.\d{3}) \(([+-]\d\.\d{3} to [+-]\d\.\d{3})\)", page)
    assert len(gaps) > 12 and page.count("\n") <= 135
    for mean, interval in gaps:
        assert re.search(re.escape(mean) + r" [a-z ]+ \| " + re.escape(interval), tables), (mean, interval)
    cells = re.findall(r"\*{0,2}(better|worse|open|equal)\*{0,2}(?: within 0.25)?, ([+-]\d\.\d{3}) (steps|bits)", page)
    for word, mean, unit in cells:   # of the table: a verdict and its number
        assert re.search(re.escape(f"{mean} {unit}") + rf".*\| {word}\b", tables), (word, mean)
    assert len(cells) > 12
