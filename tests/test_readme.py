"""README.md and workshop/README.md: commands parse, code is the source's or runs, what they name exists."""
import inspect, itertools, json, operator, os, re, runpy, shlex, shutil, subprocess, textwrap
from dataclasses import asdict

import pytest, torch
import analyze, flags, model, prepare, sample, train
from conftest import ROOT

LIMITS = {"README.md": 265, "workshop/README.md": 225}   # lines
README, WORKSHOP = (ROOT.joinpath(name).read_text(encoding="utf-8") for name in LIMITS)

def blocks(kind, text=README + WORKSHOP):
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)

COMMANDS = [line.split("  #")[0].strip() for block in blocks("sh") for line in block.splitlines()]

@pytest.fixture
def own():
    """What README and workshop add to the residuals of model.py -> their names"""
    before = dict(model.RESIDUALS)
    for code in blocks("python"):
        if "RESIDUALS[" in code or "DECIDERS[" in code:
            exec(code, dict(vars(model)))
    yield [name for name in model.RESIDUALS if name not in before]
    model.RESIDUALS.clear()
    model.RESIDUALS.update(before)

def read_configs(words):
    return train.gather_settings(train.read_flags(words))[:2]

@pytest.mark.parametrize("line", dict.fromkeys(COMMANDS))
def test_command_parses(line, tmp_path, monkeypatch, own):
    monkeypatch.chdir(tmp_path)
    settings = asdict(model.GPTConfig())
    monkeypatch.setenv("WORLD_SIZE", "8" if "torchrun" in line else "1")
    for run in re.findall(r"runs/[\w-]+", line):   # The command may want it to be there.
        (tmp_path / run).mkdir(parents=True, exist_ok=True)
        residual = "nag" if "pay" in run or "nag" in run else "pre"
        (tmp_path / run / "config.json").write_text(json.dumps(settings | dict(residual=residual)))
    for name in "configs", "README.md", "workshop":   # It may read these.
        (tmp_path / name).symlink_to(ROOT / name)
    program, *argv = shlex.split(line.replace("torchrun --nproc_per_node 8 ", "python "))
    if program == ".":   # It activates an environment.
        assert argv == [".venv/bin/activate"]
    elif program == "make":
        assert all(re.search(f"^{target}:", (ROOT / "Makefile").read_text(), re.M) for target in argv)
    elif argv[0] == "train.py":
        read_configs(argv[1:])
    elif argv[0] == "sample.py":
        flags.parse([sample.SampleConfig], argv[1:], positional=("run",))
    elif argv == ["analyze.py", "--list"]:
        analyze.main(argv[1:])
    elif argv[0] == "analyze.py":
        config, = flags.parse([analyze.AnalyzeConfig], argv[1:], positional=("runs",))
        assert {*config.only.split(",")} <= {"", *analyze.STATS}
    elif argv[0] == "workshop/check.py":   # It runs below.
        assert len(argv) == 2
    else:   # No data set is made here. One is, below.
        assert argv[0] == "prepare.py"
        for source in prepare.SOURCES:
            monkeypatch.setitem(prepare.SOURCES, source, lambda flags: 1 / 0)
        monkeypatch.setattr(prepare, "download_fineweb", lambda *_: 1 / 0)
        pytest.raises(ZeroDivisionError, prepare.main, argv[1:])

def test_the_workshops_script(tmp_path):
    """Its ten commands, by a python that only prints them, and what --config repeats of them"""
    shutil.copytree(ROOT / "workshop", tmp_path / "workshop")
    (tmp_path / "any.py").touch()   # It copies the code.
    (tmp_path / "python").write_text("#!/bin/sh\necho \"$@\"\n")
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "runs/w-2").mkdir(parents=True)
    (tmp_path / "runs/w-2/ckpt.pt").touch()
    env = os.environ | dict(PATH=f"{tmp_path}:{os.environ['PATH']}", SEED="7")
    done = subprocess.run(["bash", "workshop/train.sh"], cwd=tmp_path, text=True, capture_output=True, env=env, check=True)
    lines = [line.split()[1:] for line in done.stdout.splitlines()]
    assert lines.pop(2) == ["--out", "runs/w-2", "--resume"]
    made = [read_configs(line) for line in lines]
    assert {gpt.seed for gpt, _ in made} == {7} and len({str(each) for each in made}) == 9
    trained_in_class = {"w-broken", "w-steady", "w-cheat"}
    named = {*re.findall(r"runs/(w-[\w-]+)", WORKSHOP)} - trained_in_class
    assert named == {config.out.removeprefix("runs/") for _, config in made} | {"w-2"}

def test_typed(tmp_path, monkeypatch):
    """Data and a run of one's own text, and what a notebook does"""
    shutil.copytree(ROOT / "workshop", tmp_path / "workshop")
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    text, run = (shlex.split(line)[2:] for line in COMMANDS if "data/mine" in line)
    prepare.main(text)
    tiny = "--n_layer 2 --n_embd 16 --n_head 2 --batch_size 2 --max_iters 2 --eval_windows 4 --device cpu"
    assert train.main(run + tiny.split()) == 0
    notebook, = [code for code in blocks("python", README) if "open_run" in code]
    assert "--n_layer 4 --n_embd 64 --max_iters 200" in notebook
    tiny = tiny.replace("--eval_windows 4", "--eval_windows 64")
    exec(notebook.replace("--n_layer 4 --n_embd 64 --max_iters 200", tiny), {})
    assert (tmp_path / "figures/note/right_digits.png").is_file()

def test_the_loop_is_that_of_the_model():
    loop, = [block for block in blocks("text", README) if "ends.start" in block]
    assert textwrap.indent(loop, "    ") in model.__doc__, "copy it anew"

def test_the_lines_of_the_steps_text_are_right():
    """In README and workshop, each line follows from the one before, by the table that stands below it."""
    for text in README, WORKSHOP:
        rows = re.findall(r"^left neighbour \w+ +((?:\d ){9}\d)$", text, re.M)
        assert [[int(digit) for digit in row.split()] for row in rows] == prepare.ROWS
        documents = [re.findall(r"^[a-j]\d{12}\b", block, re.M) for block in blocks("text", text)]
        assert {3} <= {len(lines) for lines in documents}
        for line, following in itertools.chain(*map(itertools.pairwise, documents)):
            assert analyze.solve(line, prepare.PUZZLE)[-1] == following[1:]

def test_own_classes(own):
    """A trial finds no mistake but the cheat's, as exercise 7 says. Tokens can skip."""
    says, = re.findall(r'says: "(.+?)"', " ".join(WORKSHOP.split()))
    with pytest.raises(ValueError, match=re.escape(says)):
        train.look_for_mistakes(model.GPTConfig("cheat"))
    residuals = [name.replace("cheat", "cheat:first=0") for name in own]   # So it gets past.
    idx = torch.arange(12).view(2, 6)
    for residual in residuals:
        config = model.GPTConfig(residual, n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=64)
        train.look_for_mistakes(config)
        gpt = model.GPT(config)
        trip = model.Trip(gpt, lambda trip: idx % 2 > 0)
        assert gpt(idx, trip=trip)[0].isfinite().all() and 0 < trip.skipped() < 1
    assert "cheat:first=0" in residuals   # Those of README may be in your model.py already.

def test_the_workshops_check_sees_what_keeps_its_promise(tmp_path, own):
    """NAG turns by its gain, and Broken does not; of Steady, |change| / |stream| is |b|."""
    check = runpy.run_path(str(ROOT / "workshop/check.py"))
    idx = torch.tensor([[*b"c314159265358\na"]])
    for name, keeps in ("nag", (True, True)), ("broken", (False,)), ("steady", (False, True)):
        torch.manual_seed(0)
        gpt = model.GPT(model.GPTConfig(name, n_layer=2, n_head=2, n_embd=16, block_size=16)).double()
        torch.nn.utils.vector_to_parameters(torch.randn(model.num_params(gpt)).double(), gpt.parameters())
        rows = check["measure"](gpt, idx)
        assert len(rows) == 4
        for promise, *found in rows:
            assert all((abs(each - promise) < 1e-6 * promise) == kept for each, kept in zip(found, keeps))

def test_what_is_named_exists():
    flags = {*re.findall(r"--(\w+)", README + WORKSHOP)} - {"nproc_per_node", "help", "max_restarts"}
    modules = model, train, sample, analyze, prepare
    source = "".join(map(inspect.getsource, modules)) + (ROOT / "results/speed.py").read_text()
    assert not [flag for flag in flags if not re.search(rf'^    {flag}: |"--{flag}"', source, re.M)]
    for name in re.findall(r"`([A-Z]\w+(?:\.\w+)?)`", README + WORKSHOP):   # classes and methods
        operator.attrgetter(name)(model)
    files = {*re.findall(r"(?:`|\]\()([\w/]+\.(?:py|md|html|png|txt))[`)]", README + WORKSHOP)}
    assert len(files) > 9 and all("figures/" in name or (ROOT / name).is_file() for name in files)

def test_table():
    table = README.split("## The rules")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^-].*?)` (?:\| [^|]*){5}\|$", table, re.M)
    lines = [line.strip() for line in train.residuals_in_words().splitlines()[1:]]
    assert {*rows} <= {*lines} and len({*rows}) >= 17   # One of your own may be there, too.
    assert f"{len(analyze.STATS)} statistics" in README

def test_weights_of_the_table():
    """How many each rule adds to 12 blocks of width 128, rounded as in the table"""
    plain = model.num_params(model.GPT(model.GPTConfig()))
    for text, said in re.findall(r"^\| `([^-].*?)` \| [^|]* \| [^|]* \| ([\d.]+) % \|", README, re.M):
        added = model.num_params(model.GPT(model.GPTConfig(text))) / plain - 1
        assert float(said) == round(100 * added, 1 if "." in said else 0), text

def test_intervals_are_those_of_the_tables():
    """Of each, or of its mirror image: what is behind by 0.1 in one order is ahead by 0.1 in the other."""
    tables = (ROOT / "results/tables.md").read_text()
    found = re.findall(r"([+-]?\d\.\d{3}) to ([+-]?\d\.\d{3})", README)
    for low, high in (map(float, each) for each in found):
        assert f"{low:+.3f} to {high:+.3f}" in tables or f"{-high:+.3f} to {-low:+.3f}" in tables, (low, high)
    assert len(found) >= 8

def test_steps_learned_with_a_cost_are_those_of_the_tables():
    tables = (ROOT / "results/tables.md").read_text()
    names = "late: plain NAG", *(f"NAG that pays late, {how}0.05" for how in ("below ", "a fixed set for ", "coins for "))
    means = [re.search(rf"^\| \w+ \| {name} \| \S+ \| 10 \| (\S+) ", tables, re.M)[1] for name in (*names, "late: NAG, 5 blocks")]
    assert re.findall(r"^\| [^|]* \| (\d\.\d\d) \|$", README, re.M) == means

@pytest.mark.parametrize("name", LIMITS)
def test_limits(name):
    data = (ROOT / name).read_bytes()
    assert data.count(b"\n") <= LIMITS[name]
    images = [image.stat().st_size for image in (ROOT / "images").iterdir()]
    assert len(images) <= 2 and max(images) < 150_000
