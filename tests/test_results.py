"""results/: the statistics against known values, commands that parse, and a page that says what the files say."""
import re, shlex, shutil, subprocess, sys
from types import SimpleNamespace

import pytest, torch
import analyze, prepare, train
from conftest import ROOT, ids, make, refused
from flags import parse
from model import GPTConfig
from train import TrainConfig

sys.path.append(str(ROOT / "results"))
import rules, run, summarize

@pytest.mark.parametrize("p, n, t", [(0.05, 2, 4.302653), (0.05, 9, 2.262157), (0.1, 3, 2.353363), (0.4, 4, 0.940965)])
def test_students_t(p, n, t):
    assert summarize.t_quantile(p, n) == pytest.approx(t, abs=1e-4)
    assert summarize.two_sided_p(-t, n) == pytest.approx(p, rel=1e-4)

def test_a_gap_by_hand():
    gap = summarize.Gap([1.0, 2.0, 4.0])
    assert gap.n == 3 and gap.mean == pytest.approx(7 / 3)            # s = 1.527525, s / sqrt(3) = 0.881917
    assert gap.half(0.05) == pytest.approx(3.79458, rel=1e-4)
    assert gap.could_find() == pytest.approx((4.302653 + 1.060660) * 0.881917, rel=1e-4)

def test_verdicts():
    def word(*gaps, sure=False, measure="bits"):
        return summarize.verdict(summarize.Gap(gaps), sure, 0.02, measure)
    assert word(-0.1, -0.11, -0.1, sure=True) == "better" and word(0.1, 0.11, 0.1, sure=True) == "worse"
    assert word(0.1, 0.11, 0.1, sure=True, measure="steps") == "better"
    assert word(0.1, 0.11, 0.1, sure=True, measure="skipped") == "more"
    assert word(0.001, -0.001, 0.002) == "equal within 0.02" and word(0.1, -0.1, 0.05) == "open"

def test_holm():
    assert summarize.holm([0.04, 0.01, 0.012]) == [0.01, 0.012, 0.04]
    assert summarize.holm([0.04, 0.03, 0.01]) == [0.01]   # 0.03 > 0.05 / 2, and that ends it

def test_steps_learned():
    assert analyze.steps_learned([1.0, 1.0, 1.0, 0.25, 0.2], 0.25) == pytest.approx(2)
    assert analyze.steps_learned([1.0, 0.625, 0.25], 0.25) == pytest.approx(0.5)

def test_measures_of_a_sick_stream():
    assert rules.slope([2 * block ** 0.5 for block in range(1, 25)]) == pytest.approx(0.5)
    assert rules.spearman([1, 2, 4, 8, 16]) == pytest.approx(1) and rules.spearman([3, 2, 1]) == pytest.approx(-1)
    assert rules.spearman([1, 2, 2]) == pytest.approx(0.75 ** 0.5)   # of ranks 1, 2.5, 2.5
    assert rules.late_by_early([100.0, 4, 4, 9, 9, 9, 2, 1, 2]) == 0.5   # medians: one odd block does not count

@torch.no_grad()
def test_a_block_that_does_nothing():
    model = make(n_layer=4, vocab_size=320, n_embd=64, n_head=8)
    for sublayer in model.blocks[2].attn, model.blocks[2].mlp:
        torch.nn.init.zeros_(sublayer.c_proj.weight)
    found = {(when, name): numbers for when, name, numbers in rules.numbers_by_block(
        model, [(ids(12, 12, V=256), ids(12, 12, V=256, seed=1))], {5: dict(grad_norms=[1.0, 2.0, 4.0, 8.0])})}
    change, stream = found["trained", "change"], found["trained", "stream"]
    assert change[2] == 0 < min(change[0], change[1], change[3]) and stream[2] == stream[1] != stream[3]
    assert found["trained", "worth"][2] == pytest.approx(0, abs=1e-6) != found["trained", "worth"][0]
    assert found["trained", "gradient"] == [1.0, 2.0, 4.0, 8.0] and found["first weights", "change"][2] > 0

@torch.no_grad()
def test_sources_begin_anew():
    """With Block Attention Residuals, a group's first block hands on its own updates alone."""
    model = make("attnres:group=4", n_layer=4)
    stream, _ = rules.stream_and_change(model, ids())
    last = [list(after[1].values())[-1][0] for after in model.walk(ids())[2::2]]
    assert stream == pytest.approx([rules.rms(each).mean().item() for each in last])
    assert stream[2] < stream[1]

@torch.no_grad()
def test_controls_of_skipping():
    """A greedy set begins with the sublayer that is missed least."""
    model = make("nag", n_layer=3)
    batches = [(ids(), ids(seed=1))]
    losses = {place: rules.mean_loss(model, batches, rules.ALL_RUN, {place}) for place in range(1, 7)}
    sets = rules.greedy_sets(model, batches, 3)
    assert sets[0] == {min(losses, key=losses.get)} < sets[1] < sets[2] and [*map(len, sets)] == [1, 2, 3]

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
    run.append(tmp_path / "mine.csv", [runs[3]])
    assert run.missing_runs(["staircase"], tmp_path / "mine.csv") == runs[:3] + runs[4:]
    assert run.missing_runs(["staircase"], ROOT / "results/runs.csv") == []
    monkeypatch.setitem(run.PLANS, "mine", [run.Plan("wide", "--n_embd 96", [0.01, 0.02], [1, 2])])
    planned = run.missing_runs(["mine"], tmp_path / "mine.csv")
    assert [each["command"] for each in planned] == [
        f"--n_embd 96 --lr {lr} --seed {seed}" for seed in (1, 2) for lr in (0.01, 0.02)]
    assert run.folder_of(planned[0]).name == "mine-wide-0.01-1"

def test_every_comparison_has_its_variants():
    known = {each["variant"] for each in run.all_runs()}
    known |= {row["variant"] for row in run.read_runs(ROOT / "results/runs.csv")}   # and what other files measure
    for each in summarize.read_comparisons(ROOT / "results/comparisons.csv"):
        assert {*each.a.split(" minus "), *each.b.split(" minus ")} <= known and float(each.margin) > 0
        assert (each.figure in ("lead", "rivals") and each.label) or (each.figure, each.label) == ("", "")

def test_a_gap_of_gaps():
    found = {"A": (5, 7, 9), "B": (1, 2, 3), "C": (1, 1)}
    rows = [dict(variant=name, seed=str(seed), bits=str(bits)) for name, all_bits in found.items()
            for seed, bits in enumerate(all_bits)]
    assert summarize.values(rows, "A minus B", "bits") == {"0": 4, "1": 5, "2": 6}
    assert summarize.values(rows, "A minus C", "bits") == {"0": 4, "1": 6}   # the seeds that both have

def test_families():
    """A gap that is sure alone is open in a larger family; what has fewer than two seeds is left out."""
    rows = [dict(variant=name, seed=str(seed), bits=str(bits)) for name, all_bits in
            {"A": (1, 1.2, 1.1), "B": (2, 2.1, 2.15), "C": (1.2, 1.3, 1.3), "D": (3,)}.items()
            for seed, bits in enumerate(all_bits)]
    def words(*families):
        comparisons = [summarize.SimpleNamespace(family=family, a=a, b=b, measure="bits", margin="0.02")
                       for family, a, b in families]
        return [each.word for each in summarize.compare(rows, comparisons)]
    assert words(("1", "A", "B"), ("1", "A", "D")) == ["better"]
    assert words(("1", "A", "B"), ("2", "A", "C")) == ["better", "better"]
    assert words(*[("1", "A", "B"), ("1", "A", "C")] * 4) == ["better", "open"] * 4
    later = [(summarize.LATER, "A", "C")] * 9   # what has no rule has no verdict, and changes none
    assert words(("1", "A", "B"), *later) == ["better"] + ["without a rule"] * 9

@pytest.fixture
def few_steps(tmp_path, monkeypatch):
    """A short steps text in data/steps, and at the place of data/stdlib, too"""
    monkeypatch.setattr(prepare, "SPLITS", dict(train=(40, 5), val=(20, 3)))
    for name in "steps", "stdlib":
        prepare.main(["steps", "--out", str(tmp_path / "data" / name)])
    return tmp_path / "data/steps"

def test_a_run_is_measured_and_kept(tmp_path, monkeypatch, few_steps):
    """A tiny experiment from its command to its line; the second time there is nothing to do."""
    monkeypatch.setattr(run, "ROOT", tmp_path)
    start, inspect = subprocess.run, run.inspect
    def train_here(words, cwd=None, **options):   # A process of its own would take seconds to begin.
        if words[:3] != [sys.executable, "train.py", "--out"]:
            return start(words, cwd=cwd, **options)
        assert cwd == tmp_path
        return SimpleNamespace(returncode=train.main(words[2:]))
    monkeypatch.setattr(subprocess, "run", train_here)
    monkeypatch.setattr(run, "inspect", lambda folder, n_windows=0: inspect(folder, 16))   # faster, too
    flags = ("--data data/steps --device cpu --n_embd 16 --n_head 2 --n_layer 1 --max_iters 45 --block_size 64 "
             "--batch_size 1 --eval_windows 16 --residual")
    monkeypatch.setattr(run, "PLANS", {
        "cost": [run.Plan("one, block", f"{flags} nag --gain_cost 0.1", [2e-2], [1, 2])],
        "ill": [run.Plan("one block", f"{flags} pre", [3e-2], [2])]})
    monkeypatch.chdir(tmp_path)
    run.main(["cost", "ill", "--out", "mine", "--workers", "1"])
    lines = run.read_runs(tmp_path / "mine/runs.csv")
    trained = [line for line in lines if line["command"].startswith("--")]
    assert sorted((line["variant"], line["seed"], line["lr"]) for line in trained) == [
        ("one block", "2", "0.03"), ("one, block", "1", "0.02"), ("one, block", "2", "0.02")]
    for line in trained:
        assert line["tokens"] == "2880" and float(line["bits"]) > 1 and float(line["seconds"]) >= 0
        assert len(line["right"].split()) == 10 and 0 <= float(line["steps"]) < 1
    skipping = [line for line in lines if line not in trained]   # of the model that pays, of the seed that decides
    assert len(skipping) == len({line["variant"] for line in skipping}) == 1 + len(rules.BELOW) + 2 * (2 + len(rules.ASKED))
    assert {(line["seed"], line["command"]) for line in skipping} == {("2", "results/run.py cost")}
    assert all(0 <= float(line["skipped"]) <= 1 for line in skipping)
    by_block = rules.read_ill(tmp_path / "mine/ill.csv").values()
    assert len(by_block) == 6 and {len(by_seed["2"]) for by_seed in by_block} == {1}   # of one block

    files = [path.read_text() for path in sorted((tmp_path / "mine").iterdir())]
    run.main(["cost", "ill", "--out", "mine"])   # The second time there is nothing to do.
    assert files == [path.read_text() for path in sorted((tmp_path / "mine").iterdir())]

def test_bad_input_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("my notes\n")
    (tmp_path / "half.csv").write_text(",".join(run.COLUMNS) + "\nstaircase,6 bl")
    (tmp_path / "empty.csv").touch()
    run.append(tmp_path / "empty.csv", [dict.fromkeys(run.COLUMNS, "")])
    assert len(run.read_runs(tmp_path / "empty.csv")) == 1   # It has got its first line, too.
    for name in "notes.txt", "half.csv":
        shutil.copy(tmp_path / name, tmp_path / "runs.csv")
        said = refused(run.main, ["staircase", "--dry", "--out", str(tmp_path)])
        assert "runs.csv: is no file of runs, or has a broken line" in said
    monkeypatch.setattr(run, "train", lambda *args: pytest.fail("too late"))
    (tmp_path / "taken/runs.csv").mkdir(parents=True)
    for name in "notes.txt", "taken":
        assert str(tmp_path) in refused(run.main, ["staircase", "--out", str(tmp_path / name)])
    (tmp_path / "comparisons.csv").write_text("a,b,measure\n1,2,stpes\n")
    said = refused(summarize.read_comparisons, tmp_path / "comparisons.csv")
    assert "stpes is no measure; choose from steps, bits, skipped" in said
    assert "--nope" in refused(summarize.main, ["--nope"])
    assert refused(run.main, ["nope", "--dry"]).startswith("nope: no such experiment; choose from staircase, ")

def test_the_page_says_what_the_files_say(capsys, tmp_path, monkeypatch):
    """Tables are those of the files. Each gap of the page, such as +0.100 steps (+0.005 to +0.196), is one of them,
    with its verdict, its unit, and a dagger if it has no rule."""
    monkeypatch.setattr(summarize, "draw_all", lambda *args: None)
    monkeypatch.setattr(summarize, "HERE", tmp_path)
    for name in "runs.csv", "comparisons.csv", "ill.csv":
        shutil.copy(ROOT / "results" / name, tmp_path)
    summarize.main([])
    tables = (tmp_path / "tables.md").read_text()
    assert tables == (ROOT / "results/tables.md").read_text()
    page = (ROOT / "results/README.md").read_text()
    assert page.count("\n") <= 174
    gap = (r"(?:(better|worse|open|equal)\*{0,2}, )?([+-]\d\.\d{3})(†?)(?: (steps|bits))? "
           r"\(([+-]\d\.\d{3} to [+-]\d\.\d{3})\)( of all)?")
    words = " ".join(page.split())
    gaps = re.findall(gap, words)
    assert len(gaps) > 75 and not re.search(r"[+-]\d\.\d{3}", re.sub(gap, "", words))   # None lacks its interval.
    for verdict, mean, dagger, unit, interval, of_all in gaps:
        verdict = "without a rule" if dagger else verdict or r"(?!without)"
        unit = "of the sublayer runs" if of_all else unit or "bits"
        row = rf"{re.escape(mean)} {unit}[a-z ]* \| {re.escape(interval)} \| [\d.]+ \| {verdict}"
        assert re.search(row, tables), (verdict, mean, unit, interval)
    sure = re.findall(r"\| (?:better|worse|more)(\*?), \d+ seeds", tables)
    with_rule = re.findall(r"^\| \d+ \|.*seeds \|$", tables, re.M)
    assert f"{len(sure)} of {len(with_rule)} are sure" in words and f"{sure.count('*')} if all were" in words
