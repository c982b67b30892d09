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
from model import GatePolicy, Trace

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

def test_what_to_skip():
    repeated = make("pre", repeat="1:2", mod="random:rate=0.1")   # blocks 0 1 1 2
    for remove, expected in ("", []), ("1", [2, 3, 4, 5]), ("0,2", [0, 1, 6, 7]):
        policy, removed = sample.what_to_skip(repeated, sample.SampleConfig(remove=remove))
        assert removed == expected and policy is repeated.policy
    policy, _ = sample.what_to_skip(make("nag", mod="gate:below=0.9"),
                                  sample.SampleConfig(skip_below=0.2))
    assert isinstance(policy, GatePolicy) and policy.threshold.item() == pytest.approx(0.2)

def test_run_share():
    model = make("pre")
    for last, expected in (True, 5 / 6), (False, 4 / 6):   # runs sublayer 0 or not
        mask = torch.tensor([[*[True] * 11, last]])
        policy = lambda trace: mask if trace.layer_idx == 0 else None
        trace = Trace(model, policy, removed=(5,))
        logits(model, ids(B=1), trace=trace)
        assert sample.run_share(trace) == pytest.approx(expected)

PAINT = r"\033\[38;5;\d+;48;5;(\d+)m(.*?)\033\[0m"   # number of the color, text

def test_depth(main):
    flags = "random", "--prompt", "xyé"
    colored = main(*flags, "--depth").out
    assert colored.startswith("xyé\033")
    assert len({number for number, _ in re.findall(PAINT, colored)}) > 1
    assert re.sub(PAINT, r"\2", colored) == main(*flags).out
    long = "0123456789" * 5   # the model reads the last 32
    assert main("nag", "--prompt", long, "--depth").out.startswith(long + "\033")

def test_colors_are_of_the_pass_that_predicts(monkeypatch, capsys):
    prompts = []
    def generate(idx, *args, make_trace, **options):
        prompts.append(idx.tolist())
        for token in b"cde":
            make_trace()
            idx = torch.cat((idx, torch.tensor([[token]])), dim=1)
        return idx

    model, shares = make("pre", vocab_size=257), iter([0.5, 1, 0.5] + [1] * 6)
    monkeypatch.setattr(model, "generate", generate)
    monkeypatch.setattr(sample, "run_share", lambda trace: next(shares))
    config = sample.SampleConfig(prompt="ab", depth=True, num_samples=2)
    sample.print_samples(model, prepare.get_tokenizer("bytes"), config)
    pale, dark = "231", "17"
    printed = capsys.readouterr()
    assert re.findall(PAINT, printed.out) == [(pale, "c"), (dark, "d"), (pale, "e"),
                                              (dark, "c"), (dark, "d"), (dark, "e")]
    assert "33.3% skipped" in printed.err.splitlines()[0] and skip_rate(printed) == 0
    sample.print_samples(model, prepare.get_tokenizer("bytes"), sample.SampleConfig())
    assert capsys.readouterr().out == "cde\n"
    assert prompts == 2 * [[[*b"ab"]]] + [[[256]]]   # no prompt: a document begins

def test_to_text():
    """é is two tokens. A document ends at the end of text."""
    tokenizer = prepare.get_tokenizer("bytes")
    assert sample.to_text([*"é".encode(), 0xc3, 256, 65], None, tokenizer) == "é\ufffd"
    colors = [re.fullmatch(PAINT, sample.color("x", share))[1] for share in (0.2, 0.5, 0.8, 1)]
    assert colors[0] == colors[1] and len({*colors}) == 3 and sample.color("\n", 1) == "\n"

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
    ("nowhere", "", "ckpt.pt: no such file"), ("pre", "--skip_below 0.1", "pre has no gate"),
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
