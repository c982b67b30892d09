"""results/: the statistics against known values, commands that parse, tables and pages that say what the files say."""
import re, shlex, shutil, subprocess, sys, threading
from types import SimpleNamespace

import pytest
import analyze, prepare, train
from conftest import ROOT, refused
from flags import parse
from model import GPTConfig
from train import TrainConfig

sys.path.append(str(ROOT / "results"))
import run, summarize

RUNS = run.read_runs(ROOT / "results/runs.csv")
CLAIMS = summarize.read_claims(ROOT / "results/claims.csv")

# --------------------------------------------------------------------------------------------------- statistics

@pytest.mark.parametrize("p, n, t", [(0.05, 2, 4.302653), (0.05, 9, 2.262157), (0.1, 3, 2.353363), (0.4, 4, 0.940965)])
def test_students_t(p, n, t):
    assert summarize.t_quantile(p, n) == pytest.approx(t, abs=1e-4)

def test_a_gap_by_hand():
    gap = summarize.Gap([1.0, 2.0, 4.0])
    assert gap.n == 3 and gap.mean == pytest.approx(7 / 3)            # s = 1.527525, s / sqrt(3) = 0.881917
    assert gap.half(0.05) == pytest.approx(3.79458, rel=1e-4)
    assert gap.could_find() == pytest.approx((4.302653 + 1.060660) * 0.881917, rel=1e-4)

LESS, A_BIT_LESS, EQUAL, OPEN = (-0.1, -0.11, -0.1), (-0.011, -0.01, -0.011), (0.001, -0.001, 0.002), (0.1, -0.1, 0.05)

@pytest.mark.parametrize("says, gaps, word", [
    ("<", LESS, "seen"), ("<", A_BIT_LESS, "seen"), ("<", EQUAL, "not seen"), ("<", OPEN, "open"),
    (">", LESS, "not seen"), (">", A_BIT_LESS, "not seen"), (">", EQUAL, "not seen"), (">", OPEN, "open"),
    ("=", LESS, "not seen"), ("=", A_BIT_LESS, "seen"), ("=", EQUAL, "seen"), ("=", OPEN, "open"),
    ("<=", LESS, "seen"), ("<=", A_BIT_LESS, "seen"), ("<=", EQUAL, "seen"), ("<=", OPEN, "open"),
    (">=", LESS, "not seen"), (">=", A_BIT_LESS, "seen"), (">=", EQUAL, "seen"), (">=", OPEN, "open"),
    ("all <", LESS, "seen"), ("all <", OPEN, "open"), ("all >", LESS, "not seen"), ("all >", (1, 2, 0.1), "seen")])
def test_verdicts(says, gaps, word):
    assert summarize.verdict(summarize.Gap(gaps), says, 0.02) == word

def test_statistics_of_blocks():
    def told(name, *numbers):
        return summarize.STATISTICS[name](numbers)
    assert told("slope", *(2 * block ** 0.5 for block in range(1, 25))) == pytest.approx(0.5)
    assert told("Spearman with depth", 1, 2, 4, 8, 16) == pytest.approx(1)
    assert told("Spearman with depth", 1, 2, 2) == pytest.approx(0.75 ** 0.5)   # of ranks 1, 2.5, 2.5
    assert told("late / early", 100.0, 4, 4, 9, 9, 9, 2, 1, 2) == 0.5   # medians: one odd block does not count
    assert told("share of the last third", 1, 1, 1, 1, 2, 4) == 0.6 and told("share of the first third", 3, 1, 1, 1, 1, 1) == 0.5
    assert told("last two / first two", 1, 3, 9, 5, 7) == 3 and told("first / mean", 3, 1, 2) == 1.5
    assert told("to 3 bits", 8, 6, 4, 3) == 3 and told("without 3", 0, 1, 2, 3) == 3

def test_steps_learned():
    assert analyze.steps_learned([1.0, 1.0, 1.0, 0.25, 0.2], 0.25) == pytest.approx(2)
    assert analyze.steps_learned([1.0, 0.625, 0.25], 0.25) == pytest.approx(0.5)

def test_values():
    """Of a column, of a gap of gaps on the seeds that both have, and of numbers by block"""
    found = {"A": (5, 7, 9), "B": (1, 2, 3), "C": (1, 1)}
    rows = [dict(variant=name, seed=str(seed), bits=str(bits)) for name, all_bits in found.items()
            for seed, bits in enumerate(all_bits)]
    assert summarize.values(rows, "A minus B", "bits") == {"0": 4, "1": 5, "2": 6}
    assert summarize.values(rows, "A minus C", "bits") == {"0": 4, "1": 6}
    rows = [dict(variant="A", seed="2", worth=[2.0, 1.0, 3.0]), dict(variant="A", seed="3", steps="")]
    assert summarize.values(rows, "A", "worth, mean") == {"2": 2} and summarize.values(rows, "A", "steps") == {}

def test_blocks_with_worth_and_with_other_seeds(tmp_path):
    lines = ["A,2,trained,gradient,1 2 3", "A,2,trained,worth,3 2 1", "A,3,trained,gradient,1 3 2",
             "A,3,trained,worth,1 3 2", "A,3,first weights,stream,4"]
    (tmp_path / "blocks.csv").write_text("\n".join([",".join(run.BLOCKS_COLUMNS), *(f"{line},," for line in lines)]))
    second, third, first_weights = summarize.read_blocks(tmp_path / "blocks.csv")
    assert first_weights == dict(variant="A, first weights", seed="3", stream=[4])
    assert second["gradient with worth"] == pytest.approx(-1) and third["gradient with worth"] == pytest.approx(1)
    assert second["gradient with other seeds"] == third["gradient with other seeds"] == pytest.approx(0.5)

# -------------------------------------------------------------------------------------------------------- files

def test_commands_parse_and_have_folders_of_their_own(tmp_path):
    runs = run.missing_runs({each["experiment"] for each in run.all_runs()}, tmp_path / "nothing.csv")
    assert len({run.folder_of(each) for each in runs}) == len(runs) > 300
    kinds = {}   # One command of each will do: it differs from the others in seed and rate alone.
    for each in runs:
        assert f"--seed {each['seed']}" in each["command"] and f"--lr {each['lr']}" in each["command"]
        kinds[re.sub(r"--(seed|lr) \S+", "", each["command"])] = each
    for each in kinds.values():
        gpt, config = parse([GPTConfig, TrainConfig], shlex.split(each["command"]))
        assert (str(gpt.seed), f"{config.lr:g}") == (each["seed"], each["lr"]) and config.out == ""

def test_what_is_missing(tmp_path, monkeypatch):
    """Repeating begins with all commands of runs.csv, seed by seed; what a file has is not repeated."""
    runs = run.missing_runs(["staircase"], tmp_path / "mine.csv")
    assert len(runs) == 23 and [each["seed"] for each in runs] == sorted(each["seed"] for each in runs)
    run.append(tmp_path / "mine.csv", run.COLUMNS, [runs[3]])
    assert run.missing_runs(["staircase"], tmp_path / "mine.csv") == runs[:3] + runs[4:]
    assert run.missing_runs(["staircase"], ROOT / "results/runs.csv") == []
    monkeypatch.setitem(run.PLANS, "mine", [run.Plan("wide", "--n_embd 96", [0.01, 0.02], [1, 2])])
    planned = run.missing_runs(["mine"], tmp_path / "mine.csv")
    assert [each["command"] for each in planned] == [
        f"--n_embd 96 --lr {lr} --seed {seed}" for seed in (1, 2) for lr in (0.01, 0.02)]
    assert run.folder_of(planned[0]).name == "mine-wide-0.01-1"

def test_every_claim_has_its_runs():
    known = {row["variant"] for row in [*RUNS, *run.all_runs(), *summarize.read_blocks(ROOT / "results/blocks.csv")]}
    for claim in CLAIMS:
        assert claim.claim and claim.rule in ("before", "later") and claim.row in ("", *map(str, range(1, 15)))
        names = [*claim.a.split(" minus "), *claim.b.split(" minus ")]
        assert {name for name in names if re.search("[a-z]", name)} <= known
        assert claim.says.startswith("all ") or claim.measure not in summarize.UNITS or float(claim.margin) > 0
        column, _, statistic = claim.measure.partition(", ")
        assert statistic in summarize.STATISTICS or column in (*summarize.UNITS, "gradient with worth", "gradient with other seeds")
        assert (claim.figure in ("lead", "field") and claim.label) or (claim.figure, claim.label) == ("", "")

@pytest.fixture
def few_steps(tmp_path, monkeypatch):
    """A short steps text in data/steps, and at the place of data/stdlib, too"""
    monkeypatch.setattr(prepare, "SPLITS", dict(train=(40, 5), val=(20, 3)))
    for name in "steps", "stdlib":
        prepare.main(["steps", "--out", str(tmp_path / "data" / name)])
    return tmp_path / "data/steps"

def test_a_run_is_measured_and_kept(tmp_path, monkeypatch, few_steps, capsys):
    """A tiny experiment from its command to its line, with a Ctrl-C in between."""
    monkeypatch.setattr(run, "ROOT", tmp_path)
    start, inspect, measure, trained = subprocess.run, run.inspect, run.measure, []
    one_at_a_time = threading.Lock()   # In one process, both draw from torch's only generator.
    def measure_alone(*args):
        with one_at_a_time:
            measure(*args)
    def train_here(words, cwd=None, **options):   # A process of its own would take seconds to begin.
        if words[:3] != [sys.executable, "train.py", "--out"]:
            return start(words, cwd=cwd, **options)
        trained.append(words[3:])
        if len(trained) == 2:
            raise KeyboardInterrupt
        with one_at_a_time:
            return SimpleNamespace(returncode=train.main(words[2:]))
    monkeypatch.setattr(subprocess, "run", train_here)
    monkeypatch.setattr(run, "measure", measure_alone)
    monkeypatch.setattr(run, "inspect", lambda folder, n_windows=0: inspect(folder, 16))   # faster, too
    flags = ("--data data/steps --device cpu --n_embd 16 --n_head 2 --n_layer 4 --max_iters 45 --block_size 64 "
             "--batch_size 1 --eval_windows 16 --residual")
    monkeypatch.setattr(run, "PLANS", {
        "mine": [run.Plan("one, two", f"{flags} nag --gain_cost 0.1 --mod gain:below=0.05", [2e-2], [1, 2])],
        "field": [run.Plan("three", f"{flags} pre", [3e-2], [2])]})
    monkeypatch.chdir(tmp_path)
    words = ["mine", "field", "--out", "mine", "--workers", "1"]
    pytest.raises(KeyboardInterrupt, run.main, words)
    assert len(run.read_runs(tmp_path / "mine/runs.csv")) < 2
    run.main(words)
    lines = run.read_runs(tmp_path / "mine/runs.csv")
    assert sorted((line["variant"], line["seed"], line["lr"]) for line in lines) == [
        ("one, two", "1", "0.02"), ("one, two", "2", "0.02"), ("three", "2", "0.03")]
    for line in lines:
        assert line["tokens"] == "2880" and float(line["bits"]) > 1 and 0 <= float(line["skipped"]) < 1
        assert len(line["right"].split()) == 10 and 0 <= float(line["steps"]) < 1
    [row] = summarize.read_blocks(tmp_path / "mine/blocks.csv")   # of the experiment field
    lengths = {measure: len(row[measure]) for measure in [*run.MEASURES, "worth", "read of the last", "read of the one before"]}
    assert lengths == {"read": 8, "update of attention": 4, "update of MLP": 4, "sink": 4, "largest channel": 8, "kurtosis": 8,
                       "rounding": 4, "gradient": 4, "pruning by CascadeFlow": 4, "pruning by cosine": 4,
                       "pruning at random": 4, "worth": 4, "read of the last": 8, "read of the one before": 7}
    assert row["pruning at random"][0] == 0 and row["gradient with worth"] <= 1 and max(row["neighbours alike"]) <= 1

    files = [path.read_text() for path in sorted((tmp_path / "mine").iterdir())]
    run.main(words)   # The second time there is nothing to do.
    assert files == [path.read_text() for path in sorted((tmp_path / "mine").iterdir())]

def test_claims_about_runs_of_ones_own(tmp_path):
    """Repeated runs are judged like ours, each claim that two seeds of them can tell of."""
    run.append(tmp_path / "runs.csv", run.COLUMNS, [row for row in RUNS if row["experiment"] == "field"])
    summarize.main(["--runs", str(tmp_path)])
    theirs, ours = ((folder / "tables.md").read_text().splitlines() for folder in (tmp_path, ROOT / "results"))
    found = [line for line in theirs if line.startswith("| 9 |")]
    assert len(found) >= 6 and {*found} <= {*ours} and [path.name for path in tmp_path.iterdir()] == ["runs.csv", "tables.md"]

def test_bad_input_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("my notes\n")
    (tmp_path / "half.csv").write_text(",".join(run.COLUMNS) + "\nstaircase,6 bl")
    (tmp_path / "empty.csv").touch()
    run.append(tmp_path / "empty.csv", run.COLUMNS, [dict.fromkeys(run.COLUMNS, "")])
    assert len(run.read_runs(tmp_path / "empty.csv")) == 1   # It has got its first line, too.
    for name in "notes.txt", "half.csv":
        shutil.copy(tmp_path / name, tmp_path / "runs.csv")
        said = refused(run.main, ["staircase", "--dry", "--out", str(tmp_path)])
        assert "runs.csv: is no file of runs, or has a broken line" in said
    monkeypatch.setattr(run, "train", lambda *args: pytest.fail("too late"))
    (tmp_path / "taken/runs.csv").mkdir(parents=True)
    for name in "notes.txt", "taken":
        assert str(tmp_path) in refused(run.main, ["staircase", "--out", str(tmp_path / name)])
    assert "--nope" in refused(summarize.main, ["--nope"])
    assert "nope: has no runs.csv" in refused(summarize.main, ["--runs", "nope"])
    assert refused(run.main, ["nope", "--dry"]).startswith("nope: no such experiment; choose from staircase, ")

def test_tables_and_page_say_what_the_files_say(tmp_path, monkeypatch):
    """Tables are those of the files. Each interval of the pages is one of them, or its mirror image."""
    for name in "draw_steps", "draw_cost", "draw_gaps", "draw_magnitudes":
        monkeypatch.setattr(summarize, name, lambda *args: None)
    monkeypatch.setattr(summarize, "HERE", tmp_path)
    for name in "runs.csv", "claims.csv", "blocks.csv":
        shutil.copy(ROOT / "results" / name, tmp_path)
    summarize.main([])
    tables = (tmp_path / "tables.md").read_text()
    assert tables == (ROOT / "results/tables.md").read_text()
    pages = "".join((ROOT / "results" / name).read_text() for name in ("README.md", "rows.md"))
    intervals = re.findall(r"([+-]\d\.\d{3})\s+to\s+([+-]\d\.\d{3})", pages)
    assert len(intervals) > 60
    for low, high in intervals:
        mirrored = f"{-float(high):+.3f} to {-float(low):+.3f}"
        assert f"{low} to {high}" in tables or mirrored in tables, (low, high)
