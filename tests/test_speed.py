"""results/speed.py with tiny models: every ratio that a CPU can measure, and somebody's nanoGPT."""
import re, sys

import pytest
from conftest import ROOT, refused

sys.path.append(str(ROOT / "results"))
import speed, train

A_NANOGPT = '''
from dataclasses import dataclass
import torch, torch.nn as nn
@dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool
class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size)
    def configure_optimizers(self, weight_decay, lr, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr, betas, weight_decay=weight_decay)
    def forward(self, x, y):
        logits = self.head(self.wte(x))
        return logits, nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1))
'''

@pytest.fixture
def main(data, tmp_path, monkeypatch, capsys):
    """speed.main(words) with tiny models -> what it prints"""
    nano = tmp_path / "nano.py"
    nano.write_text(A_NANOGPT)
    for name in speed.SIZES:
        monkeypatch.setitem(speed.SIZES, name, speed.size(2, 2, 16, block_size=32))
    monkeypatch.setattr(speed, "SEQUENCES", 4)
    monkeypatch.setattr(speed, "PARTS", dict(cpu=2))
    def run(*words):
        speed.main(["--data", str(data), "--nanogpt", str(nano), "--rounds", "3", *words])
        return capsys.readouterr().out
    return run

RATIO = r"\d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\)"

def test_training(main):
    """As its older checkout, this one will do: both have modules of their own."""
    said = main("--only", "12x128", "--old", str(ROOT))
    assert speed.train is train is sys.modules["train"]
    rows = re.findall(rf"\| ([\w:=]+) \| ({RATIO}|) \| ({RATIO}|) \| ({RATIO}|) \|\n", said)
    assert [row[0] for row in rows] == [*speed.PROGRAMS, "nanoGPT"]
    for name, pre, old, nano in rows:
        assert bool(pre) == (name != "pre") and bool(old) == bool(nano) == (name != "nanoGPT")

def test_flags_reach_our_programs(main, monkeypatch):
    seen = []
    monkeypatch.setattr(train, "make_ready", lambda model, config, device: (
        seen.append((config.dtype, config.compile, model.config.residual, model.config.gain_cost)) or (model, model)))
    main("--only", "6x64", "--programs", "nag", "pre", "--dtype", "bfloat16", "--compile")
    assert seen == [("bfloat16", True, "nag", 0.1), ("bfloat16", True, "pre", 0.0)]

def test_a_ratio():
    found = dict(a=[2.0, 3.0, 4.0, 8.0], b=[1.0, 1.0, 1.0, 2.0])
    assert speed.times_as_fast(found, "b", "a") == "3.50 (2.25 to 4.00)"
    assert speed.times_as_fast(found, "b", "b") == speed.times_as_fast(found, "b", "c") == ""

def test_skipping(main):
    found = re.findall(rf"(.+): (\d+)% skipped, (\d+)% of FLOPs saved: {RATIO}", main("--only", "skipping"))
    assert [what for what, _, _ in found] == ["the puzzle, training", *2 * ["12 x 256, prefill", "12 x 256, decoding"]]
    assert all(int(skipped) > 0 < int(saved) for _, skipped, saved in found)

def test_taper(main):
    found = re.findall(rf"^taper, (.+): {RATIO} times as fast$", main("--only", "taper"), re.M)
    assert found == ["training", "prefill of one sequence", "decoding"]

def test_bits_at_equal_seconds(main, monkeypatch):
    monkeypatch.setattr(speed, "RATES", dict(cpu=dict(ours=[0.0, 2e-2], nanoGPT=[1e-3])))
    said = main("--seconds", "0.2")
    assert len(re.findall(r"seed [123]: ", said)) == 9
    found = {words: float(bits) for words, bits in re.findall(r"(\w+, rate \S+): ([0-9.]+) bits", said)}
    assert list(found) == ["ours, rate 0", "ours, rate 0.02", "nanoGPT, rate 0.001"]
    assert found["ours, rate 0.02"] < found["ours, rate 0"] - 0.1   # It has learned.

def test_bad_input_is_one_sentence():
    for words in ["--nanogpt", "nope.py"], ["--old", "nope"], ["--only", "kernels"]:
        assert " ".join(words) in refused(speed.main, words)
