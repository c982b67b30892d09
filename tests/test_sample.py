"""sample.py on real runs, in process"""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import prepare
import sample
import train
from conftest import ROOT, ids, logits, make, refused
from model import GatePolicy, RandomPolicy, Trace

SIZE = ("--n_layer 3 --n_embd 32 --n_head 2 --block_size 32 --batch_size 8 --max_iters 30 "
        "--eval_windows 4 --device cpu").split()

@pytest.fixture(scope="module")
def runs(data, steps_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    for name, flags in dict(pre="", nag="--residual nag", random="--mod random:rate=0.4").items():
        train.main(["--data", str(data), "--out", str(folder / name), *flags.split(), *SIZE])
    train.main(["--data", str(steps_data), "--out", str(folder / "steps"), *SIZE])
    return folder

@pytest.fixture
def main(runs, capsys):
    """sample.main on one of the runs -> what it prints"""
    def call(name, *flags):
        capsys.readouterr()
        sample.main([str(runs / name), "--max_new_tokens", "40", *map(str, flags)])
        return capsys.readouterr()
    return call

def skip_rate(printed):
    return float(re.fullmatch(r"[\d,]+ tokens/s, (\S+)% skipped", printed.err.splitlines()[-1])[1])

def test_text(main, tmp_path):
    state = torch.get_rng_state()
    a, b, c = (main("nag", "--prompt", "line 7: é", "--seed", seed).out for seed in (1, 1, 2))
    assert a == b != c and a.startswith("line 7: é") and len(a.encode()) >= 50
    assert torch.equal(torch.get_rng_state(), state)
    (tmp_path / "prompt.txt").write_text("line 7: é")
    assert main("nag", "--prompt", tmp_path / "prompt.txt", "--seed", 1).out == a
    greedy = main("nag", "--temperature", 0, "--num_samples", 2).out
    assert greedy[:len(greedy) // 2] == greedy[len(greedy) // 2:]
    assert 2 * main("nag", "--top_k", 1).out == greedy

def test_skip_rate(main):
    assert skip_rate(main("nag")) == 0
    assert skip_rate(main("nag", "--skip_below", 99)) == 100
    assert 10 < skip_rate(main("nag", "--skip_below", 0.3)) < 90
    assert skip_rate(main("pre", "--remove", "0,2")) == pytest.approx(200 / 3, abs=0.06)
    assert 30 < skip_rate(main("random")) < 50

def test_trace_maker():
    def make_trace(model, **flags):
        return sample.trace_maker(model, sample.SampleConfig(**flags))()

    repeated = make("pre", repeat="1:2", mod="random:rate=0.1")   # blocks 0 1 1 2
    for remove, expected in ("", []), ("1", [2, 3, 4, 5]), ("0,2", [0, 1, 6, 7]):
        trace = make_trace(repeated, remove=remove)
        assert trace.removed == expected and isinstance(trace.policy, RandomPolicy)
    policy = make_trace(make("nag", mod="gate:below=0.9"), skip_below=0.2).policy
    assert isinstance(policy, GatePolicy) and policy.threshold.item() == pytest.approx(0.2)

def test_run_shares():
    model = make("pre")
    half = torch.arange(12)[None] % 2 == 0
    trace = Trace(model, policy=lambda trace: half if trace.layer_idx == 0 else None, removed=(5,))
    logits(model, ids(B=1), trace=trace)
    assert sample.run_shares(trace) == pytest.approx([5 / 6, 4 / 6] * 6)

PAINT = r"\033\[38;5;\d+;48;5;(\d+)m(.*?)\033\[0m"   # number of the color, text

def test_depth(main):
    """A token's color tells what ran at the token before it, which predicted it."""
    flags = "random", "--prompt", "xyé"
    colored = main(*flags, "--depth").out
    assert colored.startswith("x\033")
    assert len({number for number, _ in re.findall(PAINT, colored)}) > 1
    assert re.sub(PAINT, r"\2", colored) == main(*flags).out
    long = main("nag", "--prompt", "0123456789" * 5, "--depth").out   # the model reads the last 32
    assert long.startswith(("0123456789" * 2)[:19] + "\033")

def test_colors_are_of_the_pass_that_predicts(monkeypatch, capsys):
    passes = [[0.5, 1.0], [0.5], [1.0]]   # of "ab", of "c", of "d"; the last predicts "e"
    monkeypatch.setattr(sample, "run_shares", lambda trace: trace)
    monkeypatch.setattr(sample, "generate", lambda *args: ([*b"abcde"], passes))
    monkeypatch.setattr(sample, "trace_maker", lambda *args: None)
    sample.print_samples(None, prepare.get_tokenizer("bytes"),
                         SimpleNamespace(depth=True, num_samples=1))
    pale, dark = "231", "17"
    printed = capsys.readouterr()
    assert re.findall(PAINT, printed.out) == [(pale, "b"), (dark, "c"), (pale, "d"), (dark, "e")]
    assert skip_rate(printed) == pytest.approx(100 * (1 - 2.5 / 3), abs=0.1)

def test_to_text():
    """é is two tokens. A document ends at the end of text, and a first one is an empty prompt."""
    tokenizer = prepare.get_tokenizer("bytes")
    text = sample.to_text([256, *"é".encode(), 0xc3, 256, 65], [None] * 6, tokenizer)
    assert text == "é\ufffd"
    colors = [re.fullmatch(PAINT, sample.color("x", share))[1] for share in (0.2, 0.5, 0.8, 1)]
    assert colors[0] == colors[1] and len({*colors}) == 3 and sample.color("\n", 1) == "\n"

def test_speed(main, monkeypatch):
    made, generate = [], sample.generate
    def spy(model, tokenizer, config, make_trace):
        made.append((make_trace(), config.max_new_tokens))
        return generate(model, tokenizer, config, make_trace)
    monkeypatch.setattr(sample, "generate", spy)
    printed = main("random", "--remove", 1, "--speed").out
    assert re.fullmatch(r"[\d,]+ tokens/s; [\d,]+ if all tokens run all sublayers\n", printed)
    assert [(trace.removed, n) for trace, n in made] == [([2, 3], 40)] * 2 + [((), 40)] * 2
    assert made[0][0].policy.rate == 0.4 and made[-1][0].policy(None) is None

def test_inside(main, monkeypatch):
    """d3141: one step gives 5877, two 1085. A wrong digit is marked."""
    rows = [(0, "", None), (1, "5877", 1), (2, "1086", 2)]
    monkeypatch.setitem(sys.modules, "analyze", SimpleNamespace(lines_inside=lambda *args: rows))
    lines = main("steps", "--prompt", "d3141", "--inside").out.splitlines()
    assert "d asks for the line after 3 steps" in lines[1]
    assert [line.split() for line in lines[3:6]] == [
        "block 0 -".split(), "block 1 5 8 7 7 after 1 step".split(),
        "block 2 1 0 8 6! after 2 steps".split()]
    assert re.match(r"  answer    ([\d?][ !]){4}  ", lines[6])

def test_it_needs_no_matplotlib(runs):
    code = f"import sys, sample; sample.main(['{runs}/pre', '--max_new_tokens', '1']); " \
           f"assert not {{'analyze', 'matplotlib'}} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)

@pytest.mark.parametrize("name, flags, words", [
    ("nowhere", "", "ckpt.pt: not there"), ("pre", "--skip_below 0.1", "pre has no gate"),
    ("nag", "--skip_below -1", "from 0 to 100"), ("nag", "--temperature nan", "must be from"),
    ("nag", "--top_k -1", "must be from"), ("nag", "--max_new_tokens 1.5", "invalid int"),
    ("nag", "--promt x", "unrecognized"), ("nag", "more", "unrecognized"),
    *[("pre", f"--remove {blocks}", "blocks 0 to 2") for blocks in ("3", "0,1,2", "1,x", "-1")],
    ("nag", "--inside --prompt a1", "isn't the puzzle"),
    ("steps", "--inside --data nowhere --prompt a1", "no data set there"),
    ("steps", "--inside --remove 1", "leave out"),
    ("steps", "--inside --skip_below 1", "leave out"),
    *[("steps", f"--inside --prompt {line}", "from a to d and 4 digits")
      for line in ("3141", "e3141", "d314", "d31415", "D3141")]])
def test_bad_input(main, name, flags, words):
    assert words in refused(main, name, *flags.split())
