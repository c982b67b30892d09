"""sample.py: its command line on real runs, in process, and what it prints of what a model says"""
import os, re, subprocess, sys
from types import SimpleNamespace

import pytest, torch

import dataset, sample, train
from conftest import ROOT, make, refused
from model import EVERYONE, REMOVED, ByGain, EarlyExit, Runner

@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    for residual in "nag", "pre", "attnres":
        train.main(["--data", str(data), "--out", str(folder / residual), "--residual", residual]
                   + "--n_layer 3 --n_embd 32 --n_head 2 --block_size 32 --batch_size 8 --max_iters 40 "
                     "--eval_windows 4 --device cpu".split())
    return folder

@pytest.fixture
def main(runs, capsys):
    """sample.main on one of the runs -> what it says on stdout, and on stderr."""
    def call(name, *flags):
        capsys.readouterr()
        sample.main([str(runs / name), "--max_new_tokens", "40", *map(str, flags)])
        return capsys.readouterr()
    return call

def numbers(told):
    """-> percent skipped"""
    found = re.fullmatch(r"[\d,]+ tokens/s; ([-\d.]+)% of the sublayer runs skipped", told.splitlines()[-1])
    return float(found[1])

def test_who_ran():
    """The tests of skipping rely on it."""
    keep = torch.tensor([[True, False]])
    runner = SimpleNamespace(model=SimpleNamespace(device="cpu"), shape=(1, 2), keeps=[EVERYONE, keep, REMOVED])
    assert Runner.who_ran(runner).tolist() == [[[True, True]], [[True, False]], [[False, False]]]
    runner = Runner(make("pre", n_layer=1))
    runner.begin((1, 2))
    runner.keeps += [EVERYONE, keep]
    assert [runner.skipped(), runner.skipped(last=True)] == [0.25, 0.5]

def test_text(main):
    a, b, c = (main("nag", "--prompt", "line 7: é", "--seed", seed) for seed in (1, 1, 2))
    assert a.out == b.out != c.out and a.out.startswith("line 7: é") and "tokens/s" in a.err
    assert numbers(a.err) == 0 and torch.initial_seed() == 2   # Coins are drawn by it.
    greedy = main("nag", "--temperature", 0, "--num_samples", 2).out
    assert greedy[:len(greedy) // 2] == greedy[len(greedy) // 2:]   # Both begin alike and draw nothing.
    assert 2 * main("nag", "--top_k", 1).out == greedy

def test_skip_exit_remove(main):
    assert numbers(main("nag", "--skip_below", 0).err) == 0
    assert 10 < numbers(main("nag", "--skip_below", 0.3, "--max_new_tokens", 200).err) < 90
    assert numbers(main("nag", "--skip_below", 99).err) == 100
    two_thirds = pytest.approx(200 / 3, abs=0.06)
    assert numbers(main("pre", "--remove", "1,3").err) == two_thirds
    assert numbers(main("pre", "--exit", 0).err) == two_thirds

def test_what_the_flags_ask_for():
    repeated = make("pre", n_layer=3, repeat="2:2")   # runs 1 2 2 3
    assert sample.pick_decider(repeated, sample.SampleConfig()) is repeated.decider   # as trained
    for blocks, places in ("2", {3, 4, 5, 6}), ("1,3", {1, 2, 7, 8}):
        picked = sample.pick_decider(repeated, sample.SampleConfig(remove=blocks))
        assert picked.places == places and picked.decider is repeated.decider
    picked = sample.pick_decider(repeated, sample.SampleConfig(exit=0.9))
    assert isinstance(picked, EarlyExit) and picked.confidence == 0.9
    nag = make("nag", mod="gain:below=0.3")
    assert sample.pick_decider(nag, sample.SampleConfig(skip_below=0.0)).below == 0   # None skips.
    picked = sample.pick_decider(nag, sample.SampleConfig(skip_below=0.2, remove="2"))
    assert isinstance(picked.decider, ByGain) and picked.decider.below == 0.2
    said = refused(sample.pick_decider, make("pre", mod="router"), sample.SampleConfig(exit=0.9))
    assert said.startswith("--exit: the run's own --mod router decides who skips")

def test_depth(main):
    """A letter has the colour of its depth, and without the colours it is the same text."""
    flags = "nag", "--skip_below", 0.3, "--prompt", "xyé"
    shown = main(*flags, "--depth")
    colour = r"\033\[38;5;\d+;48;5;(\d+)m"
    assert re.match(rf"x{colour}y\033\[0m{colour}é\033\[0m", shown.out)
    assert len({*re.findall(colour, shown.out)}) > 1
    assert re.sub(colour, "", shown.out).replace("\033[0m", "") == main(*flags).out
    long = "0123456789" * 5   # The context has 32 letters, whose depths are those of the last 31 and of the next.
    assert main("nag", "--skip_below", 0.3, "--depth", "--prompt", long).out.startswith(long[:19] + "\033")

def test_colours():
    assert sample.painted("x", 0.2) == sample.painted("x", 0.5) != sample.painted("x", 0.8)
    assert sample.painted("x", 1.0) != sample.painted("x", 0.9)

@pytest.mark.parametrize("name, flags, message", [
    ("nag", "--skip_below 0.2 --exit 0.5", "give one"), ("pre", "--skip_below 0.2", "nag"),
    ("nag", "--skip_below 101", "from -1 to 100"), ("attnres", "--exit 0.5", "--exit"),
    ("nag", "--temperature nan", "must be from"),
    *[("nag", f"--remove {blocks}", "blocks 1 to 3") for blocks in ("0", "4", "1,2,3", "1,x")]])
def test_bad_input(main, name, flags, message):
    assert message in refused(main, name, *flags.split())

def test_stops_at_end_of_text(monkeypatch, capsys):
    """é comes in two tokens. For each, three quarters of the sublayers ran."""
    asked, runner = [], SimpleNamespace(skipped=lambda last: 0.25 if last else None,
                                        who_ran=lambda: torch.ones(6, 1, 1))
    said = iter([(torch.tensor([[token]]), runner) for token in (0xc3, 0xa9, ord("\n"), 0xc3, 256, 67)])
    def new_tokens(model, idx, *_, n_vocab):
        asked.append((idx.tolist(), n_vocab))   # how many tokens may come
        return said
    monkeypatch.setattr(sample, "new_tokens", new_tokens)
    config, tokenizer = sample.SampleConfig(prompt="A", depth=True), dataset.get_tokenizer("bytes")
    assert sample.sample(SimpleNamespace(device="cpu"), tokenizer, config) == [0.25] * 5
    assert asked == [([[ord("A")]], 257)]
    assert capsys.readouterr().out == f"A{sample.painted('é', 0.75)}\n\ufffd\n"   # A space needs no colour.
    assert [token.item() for token, _ in said] == [67]   # It has not asked for this one.
    sample.sample(SimpleNamespace(device="cpu"), tokenizer, sample.SampleConfig())
    assert asked[1] == ([[256]], 257)   # Without a prompt, it begins a document.

def test_a_terminal_gets_no_control_characters(monkeypatch, capsys):
    """Whoever has written the prompt, or the text that the model has learned. A file gets all of it."""
    bad = b"a\tb\n\x1b]0;x\x07\r\b" + "\x9b5né\u202e".encode() + b"z"
    def printed(in_colours):
        printer = sample.Printer(dataset.get_tokenizer("bytes"), in_colours)
        for token in bad:
            printer.show_token(token, 0.75)
        printer.end()
        return capsys.readouterr().out
    assert printed(False) == bad.decode() + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert printed(False) == "a\tb\n?]0;x????5né?z\n"
    assert re.sub(r"\033\[([\d;]*)m", "", printed(True)) == printed(False)

def test_a_reader_that_has_had_enough_and_knows_ascii_only(runs):
    command = f"{sys.executable} {ROOT}/sample.py {runs}/nag --prompt é --max_new_tokens 400 | head -c 9"
    done = subprocess.run(command, shell=True, capture_output=True, text=True,
                          env=os.environ | dict(PYTHONIOENCODING="ascii"))
    assert done.stdout.startswith("\\xe9") and done.stderr == ""
