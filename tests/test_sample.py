"""sample.py: its command line on real runs, in process, and what it prints of what a model says"""
import re, subprocess, sys
from types import SimpleNamespace

import pytest, torch

import prepare, sample, train
from conftest import ROOT, make, refused
from model import ByGain, Decider, EarlyExit

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
    for model in nag, make("pre"):   # None skips, so no gain has to be known.
        assert type(sample.pick_decider(model, sample.SampleConfig(skip_below=0.0))) is Decider
    picked = sample.pick_decider(nag, sample.SampleConfig(skip_below=0.2, remove="2"))
    assert isinstance(picked.decider, ByGain) and picked.decider.below == 0.2
    said = refused(sample.pick_decider, make("pre", mod="router"), sample.SampleConfig(exit=0.9))
    assert said.startswith("--exit: the run's own --mod router decides who skips")

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
    read = SimpleNamespace(who_ran=lambda: torch.tensor([[[True, True, False]], [[True, False, False]]]))
    assert sample.shares_of_prompt("abcd", read) == [None, None, 1, 0.5]   # It has read b, c and d.

@pytest.mark.parametrize("name, flags, message", [
    ("nag", "--skip_below 0.2 --exit 0.5", "give one"), ("pre", "--skip_below 0.2", "nag"),
    ("nag", "--skip_below 101", "from -1 to 100"), ("attnres", "--exit 0.5", "--exit"),
    ("nag", "--temperature nan", "must be from"), ("nag", "--data x", "only --inside"),
    *[("nag", f"--remove {blocks}", "blocks 1 to 3") for blocks in ("0", "4", "1,2,3", "1,x")]])
def test_bad_input(main, name, flags, message):
    assert message in refused(main, name, *flags.split())

def said(monkeypatch, capsys, tokens, **flags):
    """What sample.py prints if a model says these tokens, and the shares that it returns. For each token, three
    quarters of the sublayers ran."""
    runner = SimpleNamespace(skipped=lambda last: 0.25 if last else None, who_ran=lambda: torch.ones(6, 1, 1))
    left = iter([(torch.tensor([[token]]), runner) for token in tokens])
    asked = []
    def new_tokens(model, idx, *_):
        asked.append(idx.tolist())
        return left
    monkeypatch.setattr(sample, "new_tokens", new_tokens)
    tokenizer = prepare.get_tokenizer("bytes")
    shares = sample.sample(SimpleNamespace(device="cpu"), tokenizer, sample.SampleConfig(**flags))
    return capsys.readouterr().out, shares, asked, [token.item() for token, _ in left]

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

def test_a_reader_that_has_had_enough(runs):
    command = f"{sys.executable} {ROOT}/sample.py {runs}/nag --prompt é --max_new_tokens 400 | head -c 9"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("é") and done.stderr == ""
