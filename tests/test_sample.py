"""sample.py: early exit, then the command line on a real run, in process."""
import json, os, re, shutil, subprocess, sys
from types import SimpleNamespace
import pytest
import torch
from conftest import ROOT
import prepare
import sample
import train
from model import GPT, GPTConfig, KVCache, without

@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    (folder / "text.txt").write_text("".join(f"line {i}: the café says {i * i}\n" for i in range(3000)))
    prepare.main(["text", "--input", str(folder / "text.txt"), "--out", str(folder / "data")])
    for residual in "nag", "pre", "attnres":
        train.main(["--data", str(folder / "data"), "--out", str(folder / residual), "--residual", residual]
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
    """Share of the sublayer runs skipped and of the FLOPs saved, in percent."""
    found = re.search(r"([-\d.]+)% of the sublayer runs skipped, ([-\d.]+)% of the FLOPs saved", told)
    return float(found[1]), float(found[2])

def build(residual, n_layer=5):
    """A float64 model with every parameter moved off its initial value."""
    model = GPT(GPTConfig(residual=residual, n_layer=n_layer, n_head=2, n_embd=32, block_size=24, vocab_size=40))
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=rng))
    return model.double().eval()

IDX = torch.randint(40, (1, 12), generator=torch.Generator().manual_seed(1))

@torch.no_grad()
@pytest.mark.parametrize("residual", ["pre", "nag", "siamese", "hyper"])
def test_early_exit(residual):
    """In pieces through a cache as at once; at confidence 0 after the first block that is there, never above 1."""
    model = build(residual)
    for confidence, removed in (0.0, ()), (0.05, ()), (0.1, {1, 2}), (1.1, ()):
        whole, kept = model(IDX, decide=without(removed, sample.EarlyExit(model, confidence)))[0], []
        cache, decide = KVCache(model, 1), sample.EarlyExit(model, confidence)
        pieces = [model(part, cache=cache, decide=without(removed, decide), kept=kept)[0]
                  for part in IDX.split([5, 1, 3, 1, 2], 1)]
        torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-10)
        inside = [keep if keep is False else bool(keep[0, -1]) for keep in kept[-10:]]
        if confidence > 1:
            torch.testing.assert_close(whole, model(IDX)[0], rtol=0, atol=1e-10)
            assert decide.looks == 4 * 5
        elif confidence == 0:   # One look per piece, then all of it is out.
            assert inside == [True, True] + [False] * 8 and decide.looks == 5
            first = [stream for _, _, stream, _ in model.walk(IDX)][1]
            torch.testing.assert_close(whole, model.head(first), rtol=0, atol=1e-10)
        elif removed:
            assert inside[0] is inside[1] is False and inside[2]

def test_more_confidence_is_more_depth():
    model, counts = build("pre"), []
    for confidence in (0.0, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 1.0):
        model(IDX, decide=sample.EarlyExit(model, confidence), kept=(kept := []))
        counts.append(sum(keep.sum().item() for keep in kept))
    assert counts == sorted(counts) and counts[0] == 24 and counts[-1] == 120 and len({*counts}) > 3

def test_text(main):
    a, b, c = (main("nag", "--prompt", "line 7: é", "--seed", seed) for seed in (1, 1, 2))
    assert a.out == b.out != c.out and a.out.startswith("line 7: é") and "tokens/s" in a.err
    assert numbers(a.err) == (0.0, 0.0)
    greedy = main("nag", "--temperature", 0, "--which", "best.pt", "--num_samples", 2).out
    assert greedy[:len(greedy) // 2] == greedy[len(greedy) // 2:]   # Both begin alike and draw nothing.
    assert main("nag", "--top_k", 1).out + main("nag", "--top_k", 1).out == greedy

def test_skip_exit_remove(main, runs):
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    whole = main("nag", "--temperature", 0).out
    assert main("nag", "--temperature", 0, "--skip", 0).out == whole
    skipped, saved = numbers(main("nag", "--skip", 0.4, "--max_new_tokens", 200).err)
    assert 20 < skipped < 60 and 10 < saved < skipped   # Who skips attention makes its key and value all the same.
    model, settings = train.open_run(runs / "nag")
    x, y = prepare.val_windows(settings["data"], 32, 32)
    decide = sample.pick_decide(model, sample.SampleConfig(skip=0.4), settings)
    bytes_of = prepare.token_bytes(settings, model.config.vocab_size)
    assert train.evaluate(model, x, y, bytes_of, 8, decide)[2] == pytest.approx(0.4, abs=0.02)
    # Blocks 1 and 3 of three are removed. The FLOPs that stay are those of one block, and of the head.
    skipped, saved = numbers(main("pre", "--remove", "1,3").err)
    model, _ = train.open_run(runs / "pre")
    left = model.flops_per_token(ran=[False, False, 1.0, 1.0, False, False]) / model.flops_per_token()
    assert skipped == 0 and saved == pytest.approx(100 * (1 - left), abs=0.06) and saved > 40
    model(x, decide=without(sample.sublayers_of("1,3", 3)), kept=(kept := []))
    assert kept == [False, False, None, None, False, False]
    # An exit after block 1 costs a look by the head, which is counted; one that never comes is the whole model.
    skipped, saved = numbers(main("pre", "--exit", 0).err)
    look = 2 * model.lm_head.weight.numel() / model.flops_per_token()
    left = model.flops_per_token(ran=[1.0, 1.0, 0.0, 0.0, 0.0, 0.0]) / model.flops_per_token()
    assert skipped == pytest.approx(200 / 3, abs=0.1) and saved == pytest.approx(100 * (1 - left - look), abs=0.3)
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before   # Nothing is written there.

def test_depth(main, monkeypatch):
    piped = main("nag", "--skip", 0.4, "--depth", "--prompt", "é")
    lines = piped.out.splitlines()
    assert lines[0] == "     'é'" and "\033" not in piped.out + piped.err and len(lines) > 10
    shares = {int(found[1]) for line in lines if (found := re.match(r" *(\d+)% ", line))}
    assert len(shares) > 1 and shares <= {0, 17, 33, 50, 67, 83, 100}
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    terminal = main("nag", "--skip", 0.4, "--depth", "--prompt", "é")
    assert terminal.out.startswith("é\033[38;5;") and all(name in terminal.err for name, _, _ in sample.PALETTE)
    assert "".join(re.split(r"\033\[[\d;]*m", terminal.out)) == main("nag", "--skip", 0.4, "--prompt", "é").out

def test_the_palette_has_contrast():
    def luminance(number):   # of one of xterm's 256 colours, as WCAG defines it
        levels = [0, 95, 135, 175, 215, 255]
        rgb = [levels[(number - 16) // 36], levels[(number - 16) // 6 % 6], levels[(number - 16) % 6]]
        linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    backgrounds = [luminance(background) for _, background, _ in sample.PALETTE]
    for ground, (_, _, text) in zip(backgrounds, sample.PALETTE):
        light, dark = max(ground, luminance(text)), min(ground, luminance(text))
        assert (light + 0.05) / (dark + 0.05) > 4.5
    assert all(b > 1.5 * a for a, b in zip(backgrounds, backgrounds[1:]))   # told apart without colours, too

@pytest.mark.parametrize("name, flags, message", [
    ("nag", "--temperature -1", "--temperature"), ("nag", "--temperature nan", "--temperature"),
    ("nag", "--top_k -1", "--top_k"), ("nag", "--max_new_tokens 0", "--max_new_tokens"),
    ("nag", "--seed -1", "--seed"), ("nag", "--prompt \udcff", "UTF-8"), ("nag", "--temprature 1", "--temperature"),
    ("nag", "--skip 1", "--skip"), ("nag", "--skip 0.2 --exit 0.5", "give one"), ("nag", "--exit 2", "--exit"),
    ("pre", "--skip 0.2", "nag"), ("attnres", "--exit 0.5", "--exit"), ("nag", "--remove 4", "3 blocks"),
    ("nag", "--remove 0", "3 blocks"), ("nag", "--remove 1,,2", "3 blocks"), ("nag", "--remove 1,2,3", "3 blocks"),
    ("nag", "--remove " + "9" * 5000, "3 blocks"), ("nowhere", "", "nowhere"), ("data", "", "data")])
def test_bad_input(main, capsys, name, flags, message):
    with pytest.raises(SystemExit) as e:
        main(name, *flags.split())
    said = capsys.readouterr().err + str(e.value.code)
    assert e.value.code and message in said and said.strip().count("\n") == 0

def test_other_data_and_other_tokens_than_the_run_had(main, runs, tmp_path):
    shutil.copytree(runs / "nag", tmp_path / "run")
    settings = json.loads((tmp_path / "run" / "config.json").read_text()) | dict(data=str(tmp_path))
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings))
    shutil.copy(runs / "data" / "val_000000.bin", tmp_path / "fineweb_val_000000.bin")   # known as gpt2 tokens
    with pytest.raises(SystemExit, match="other tokens"):
        main(tmp_path / "run", "--skip", 0.2)
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings | dict(tokenizer="gpt2")))
    with pytest.raises(SystemExit, match="more tokens"):
        main(tmp_path / "run")

def test_stops_at_end_of_text(capsys):
    ran = [None, False, torch.tensor([[True, False]])]   # by all tokens, removed, by the first of two
    tokens = iter([(torch.tensor([[token]]), ran) for token in (0xc3, 0xa9, 256, 67)])   # é in two tokens, the end
    model, config = SimpleNamespace(device="cpu", stream_tokens=lambda *args: tokens), sample.SampleConfig(prompt="A")
    assert [*sample.sample(model, prepare.get_tokenizer("bytes"), config, None, None)] == [[1.0, False, 0.0]] * 3
    assert next(tokens)[0] == 67 and capsys.readouterr().out == "Aé\n"

def test_a_reader_that_has_had_enough_and_knows_ascii_only(runs):
    command = f"{sys.executable} {ROOT}/sample.py {runs}/nag --prompt é --max_new_tokens 400 | head -c 9"
    done = subprocess.run(command, shell=True, capture_output=True, text=True,
                          env=os.environ | dict(PYTHONIOENCODING="ascii"))
    assert done.stdout.startswith("\\xe9") and done.stderr == ""
