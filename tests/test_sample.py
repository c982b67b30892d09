"""sample.py: its command line on real runs, in process, and what it prints of what a model says"""
import re, subprocess, sys
from types import SimpleNamespace

import pytest, torch

import prepare, sample, train
from conftest import ROOT, make, refused
from model import ByGain, Decider

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

def percent_skipped(told):
    found = re.fullmatch(r"[\d,]+ tokens/s; ([-\d.]+)% of the sublayer runs skipped", told.splitlines()[-1])
    return float(found[1])

def test_text(main):
    a, b, c = (main("nag", "--prompt", "line 7: é", "--seed", seed) for seed in (1, 1, 2))
    assert a.out == b.out != c.out and a.out.startswith("line 7: é") and "tokens/s" in a.err
    assert percent_skipped(a.err) == 0 and torch.initial_seed() == 2   # Coins are drawn by it.
    greedy = main("nag", "--temperature", 0, "--num_samples", 2).out
    assert greedy[:len(greedy) // 2] == greedy[len(greedy) // 2:]   # Both begin alike and draw nothing.
    assert 2 * main("nag", "--top_k", 1).out == greedy

def test_skip_and_remove(main):
    assert percent_skipped(main("nag", "--skip_below", 0).err) == 0
    assert 10 < percent_skipped(main("nag", "--skip_below", 0.3, "--max_new_tokens", 200).err) < 90
    assert percent_skipped(main("nag", "--skip_below", 99).err) == 100
    assert percent_skipped(main("pre", "--remove", "1,3").err) == pytest.approx(200 / 3, abs=0.06)

def test_speed(main, monkeypatch):
    """As it skips, and beside it that of the dense model"""
    asked, usual = [], sample.new_tokens
    def spy(model, idx, n, *args, make_trip):
        asked.append((n, type(make_trip().decider), make_trip().without))
        return usual(model, idx, n, *args, make_trip=make_trip)
    monkeypatch.setattr(sample, "new_tokens", spy)
    said = main("nag", "--remove", 2, "--skip_below", 0.3, "--speed")
    assert said.out == "" and re.fullmatch(r"[\d,]+ tokens/s; [\d,]+ if all sublayers run\n", said.err)
    assert asked == [(40, ByGain, {3, 4})] * 2 + [(40, Decider, ())] * 2

def test_what_the_flags_ask_for():
    def trip(model, **flags):
        return sample.trip_maker(model, sample.SampleConfig(**flags))()
    repeated, nag = make("pre", n_layer=3, repeat="2:2"), make("nag", mod="gain:below=0.3")   # runs 1 2 2 3
    for blocks, places in ("", set()), ("2", {3, 4, 5, 6}), ("1,3", {1, 2, 7, 8}):
        asked = trip(repeated, remove=blocks)
        assert asked.without == places and asked.decider is repeated.decider   # as trained
    for model in nag, repeated:   # None skips, so no gain has to be known.
        assert type(trip(model, skip_below=0.0).decider) is Decider
    asked = trip(nag, skip_below=0.2, remove="2").decider
    assert isinstance(asked, ByGain) and asked.threshold == pytest.approx(0.2)
    said = refused(sample.trip_maker, make("pre", mod="router"), sample.SampleConfig(skip_below=0.9))
    assert said == "--skip_below: --mod router decides who skips; use another run"

def test_depth(main):
    """A letter has the colour of its depth, and without the colours it is the same text."""
    flags = "nag", "--skip_below", 0.3, "--prompt", "xyé"
    shown = main(*flags, "--depth").out
    found = re.findall(PAINT, shown)
    assert shown.startswith("x\033") and [text for _, text in found[:2]] == ["y", "é"]
    assert len({colour for colour, _ in found}) > 1
    assert re.sub(PAINT, r"\2", shown) == main(*flags).out
    long = "0123456789" * 5   # The context has 32 letters, whose depths are those of the last 31 and of the next.
    assert main("nag", "--skip_below", 0.3, "--depth", "--prompt", long).out.startswith(long[:19] + "\033")

@pytest.mark.parametrize("name, flags, message", [
    ("pre", "--skip_below 0.2", "nag"), ("nag", "--skip_below 101", "from -1 to 100"),
    ("nag", "--temperature nan", "must be from"), ("nag", "--data x", "only --inside"),
    *[("nag", f"--remove {blocks}", "blocks 1 to 3") for blocks in ("0", "4", "1,2,3", "1,x")]])
def test_bad_input(main, name, flags, message):
    assert message in refused(main, name, *flags.split())

def said(monkeypatch, capsys, tokens, **flags):
    """What sample.py prints if a model says these tokens, the shares that it returns, what the model was given, and
    the tokens that are left. For each, three quarters of the sublayers ran."""
    trip = SimpleNamespace(skipped=lambda last: 0.25 if last else None, who_ran=lambda: torch.ones(6, 1, 1))
    left, given = iter([(torch.tensor([[token]]), trip) for token in tokens]), []
    monkeypatch.setattr(sample, "new_tokens", lambda model, idx, *_, **__: given.append(idx.tolist()) or left)
    shares = sample.sample(SimpleNamespace(device="cpu"), None, prepare.get_tokenizer("bytes"), sample.SampleConfig(**flags))
    return capsys.readouterr().out, shares, given, [token.item() for token, _ in left]

PAINT = r"\033\[38;5;\d+;48;5;(\d+)m(.*?)\033\[0m"   # the number of a colour, and a text that has it

def test_stops_at_end_of_text(monkeypatch, capsys):
    """é comes in two tokens. A space needs no colour."""
    out, shares, asked, left = said(monkeypatch, capsys, [0xc3, 0xa9, ord("\n"), 0xc3, 256, 67], prompt="A",
                                    depth=True)
    assert re.fullmatch(f"A{PAINT}\n\ufffd\n", out)[2] == "é" and shares == [0.25] * 5
    assert asked == [[[ord("A")]]] and left == [67]   # It has not asked for this one.
    *_, asked, _ = said(monkeypatch, capsys, [])
    assert asked == [[[256]]]   # Without a prompt, it begins a document.

def test_colours(capsys):
    colours = []
    for share in 0.2, 0.5, 0.8, 0.9, 1.0:
        sample.show("x", share)
        colours.append(re.fullmatch(PAINT, capsys.readouterr().out)[1])
    assert colours[0] == colours[1] and len({*colours}) == 4   # From pale to dark, and pale up to a half

def test_a_terminal_gets_no_control_characters(monkeypatch, capsys):
    """Whoever has written the prompt, or the text that the model has learned. A file gets all of it."""
    bad = b"a\tb\n\x1b]0;x\x07\r\b" + "\x9b5né\u202e".encode() + b"z"
    assert said(monkeypatch, capsys, bad)[0] == bad.decode() + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    plain = said(monkeypatch, capsys, bad)[0]
    assert plain == "a\tb\n?]0;x????5né?z\n"
    assert re.sub(PAINT, r"\2", said(monkeypatch, capsys, bad, depth=True)[0]) == plain

def test_it_starts_without_analyze(runs):
    code = f"import sys, sample; sample.main(['{runs}/pre', '--max_new_tokens', '1']); assert 'analyze' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)

def test_a_reader_that_has_had_enough(runs):
    command = f"{sys.executable} {ROOT}/sample.py {runs}/nag --prompt é --max_new_tokens 400 | head -c 9"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("é") and done.stderr == ""

@pytest.mark.parametrize("flags", [("--remove", 1), ("--skip_below", 0)])
def test_inside_shows_the_model_as_it_was_trained(main, flags):
    with pytest.raises(SystemExit, match="leave out --remove and --skip_below"):
        main("pre", "--inside", *flags)
