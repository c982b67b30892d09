"""Sampling: the KV cache of every residual, the filters, and the command line on a real run."""
import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from programs import ROOT, program

import prepare
import sample
import train
from model import GPT, GPTConfig, KVCache, RESIDUALS, pick


def cli(*args, check=True, **options):
    done = program(*args, **options)
    assert not check or done.returncode == 0, done.stderr
    return done


def refused(*args):
    """The one line on stderr with which a command has refused its arguments."""
    done = cli(*args, check=False)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    return done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    (folder / "text.txt").write_text("".join(f"line {i}: the café says {i * i}\n" for i in range(3000)))
    cli("prepare.py", "text", "--input", folder / "text.txt", "--out", folder / "data")
    cli("train.py", "--data", folder / "data", "--out", folder / "run", "--residual", "nag", "--n_layer", 2,
        "--n_embd", 32, "--n_head", 2, "--block_size", 32, "--batch_size", 8, "--max_iters", 60,
        "--eval_windows", 4)
    return folder / "run"


def tiny(residual, **options):
    """A float64 model with every parameter moved off its initial value: a gate of zero would hide a
    mistake."""
    config = dict(residual=residual, n_layer=3, n_head=2, n_embd=32, block_size=24, vocab_size=40) | options
    model, rng = GPT(GPTConfig(**config)).double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=rng))
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("chunks", [[1] * 24, [10] + [1] * 14, [5, 7, 1, 11], [24]])
def test_cache_equals_full_forward(residual, chunks):
    model = tiny(residual)
    idx = torch.randint(40, (2, 24), generator=torch.Generator().manual_seed(1))
    cache = KVCache(model, 2)
    pieces = [model(part, cache=cache)[0] for part in idx.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(idx)[0], rtol=0, atol=1e-10)


def test_skip_calibrates_once_and_lets_sublayers_run_whole(run):
    cli("sample.py", run, "--skip", 0.25, "--max_new_tokens", 8)
    path = run / "skip.json"
    (rates,), written = json.loads(path.read_text()).values(), path.stat().st_mtime_ns
    model, config = train.load_run(run)
    batches = train.val_windows(config["data"], 32, 32)[0].split(8)
    tau, realised = train.calibrate(model, batches, 0.25, least=config["mod_least"])
    assert rates["0.25"] == dict(tau=tau.tolist(), realised=realised)
    assert realised == pytest.approx(0.25, abs=0.01)
    assert (tau == -1).any() and (train.calibrate(model, batches, 0.25)[0] > 0).all()
    cli("sample.py", run, "--skip", 0.25, "--max_new_tokens", 8)
    assert path.stat().st_mtime_ns == written
    os.utime(run / "ckpt.pt")   # another training could have written it
    told = cli("sample.py", run, "--skip", 0.25, "--mod_least", 0, "--max_new_tokens", 8).stderr
    assert "0 of 2 attentions run for all tokens" in told
    assert len(json.loads(path.read_text())) == 1 and path.stat().st_mtime_ns != written


def test_colours_on_a_terminal_only(run, capsys):
    words = [sys.executable, "sample.py", run, "--skip", 0.4, "--depth", "--max_new_tokens", 20]
    main, terminal = os.openpty()
    done = subprocess.run(list(map(str, words)), cwd=ROOT, stdout=terminal, stderr=subprocess.PIPE, text=True)
    os.close(terminal)
    assert b"\033[38;5;231;48;5;" in os.read(main, 100_000) and "\033" not in done.stderr
    piped = cli(*words[1:])
    assert piped.stdout and "\033" not in piped.stdout
    depth, = re.findall("mean depth ([0-9.]+) of 4 sublayers, .*% skipped; .* tokens/s at full depth",
                        piped.stderr)
    assert 0.4 < float(depth) < 3.6
    assert "mean depth 4.0 of 4 sublayers, 0.0% skipped\n" in cli(
        "sample.py", run, "--depth", "--max_new_tokens", 5).stderr
    for share, colour in (0.0, 16 + 6 + 5), (0.5, 16 + 6), (1.0, 16 + 36 * 5 + 6):   # blue, between, red
        sample.coloured("a", share)
        assert f"48;5;{colour}ma" in capsys.readouterr().out


def test_thresholds_of_a_pruned_model_are_its_own(run):
    tables = []
    for flags in ([], ["--prune", "loss:1"]):
        assert "mean depth" in cli("sample.py", run, "--skip", 0.4, "--max_new_tokens", 30, *flags).stderr
        tables.append(json.loads((run / "skip.json").read_text()))
    assert "skipped" not in cli("sample.py", run, "--prune", "loss:1", "--max_new_tokens", 5).stderr
    assert len(tables[1]) == len(tables[0]) + 1 and tables[0].items() <= tables[1].items()


def test_a_run_folder_that_cannot_be_written_is_sampled(run, monkeypatch, capsys):
    def full(path, write):
        raise SystemExit(f"{path}: can't be written (Read-only file system)")

    monkeypatch.setattr(train, "write_file", full)
    model, config = train.load_run(run)
    assert len(train.skip_threshold(run, model, config, 0.33)) == 4
    assert "skip.json: can't be written" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [dict(residual="pre", mod="router", mod_rate=0.25), dict(residual="pre"),
                                   dict(residual="nag", mod_kv="kept"), dict(residual="nag")], ids=str)
def test_caches_under_autocast(flags):
    model, idx = tiny(**flags).float(), torch.arange(20).view(2, 10)
    tau = 0.2 if flags["residual"] == "nag" else None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = KVCache(model, 2)
        assert cache.layers[0].keys.dtype == torch.bfloat16
        pieces = [model(piece, cache=cache, tau=tau)[0] for piece in (idx[:, :7], idx[:, 7:8], idx[:, 8:])]
        assert all(torch.isfinite(piece).all() for piece in pieces)
    if tau is None and "mod" not in flags:
        with torch.no_grad():
            torch.testing.assert_close(torch.cat(pieces, 1).float(), model(idx)[0], rtol=0.1, atol=0.05)


def test_too_many_tokens_are_refused():
    with pytest.raises(ValueError, match="block_size 24"):
        tiny("pre")(torch.zeros(1, 25, dtype=torch.long))


def test_generate_is_the_argmax_of_the_full_forward_and_goes_past_block_size():
    model = tiny("pre")
    idx = torch.tensor([[1, 2, 3]])
    out = model.generate(idx, 40, temperature=0)
    assert out.shape == (1, 43)
    for t in range(3, 24):   # while the whole text fits
        assert out[0, t] == model(out[:, :t])[0][0, -1].argmax()


def test_filters():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(4000, 1)
    draw = lambda **options: set(pick(logits, generator=torch.Generator().manual_seed(0),
                                      **options).flatten().tolist())
    assert draw() == {0, 1, 2, 3}
    assert draw(top_k=1) == {0} and draw(top_k=3) == {0, 1, 2} and draw(top_k=99) == {0, 1, 2, 3}
    assert draw(top_p=0.4) == {0} and draw(top_p=0.6) == {0, 1}
    assert draw(top_p=0.9) == {0, 1, 2} and draw(top_p=1.0) == {0, 1, 2, 3}
    assert draw(temperature=0) == {0} == draw(temperature=1e-40) and draw(top_k=3, top_p=0.6) == {0, 1}
    share = (pick(logits, generator=torch.Generator().manual_seed(1), top_k=2) == 0).float().mean()
    assert abs(share - 0.5 / 0.8) < 0.03


def test_padded_ids_are_never_drawn():
    tokens = tiny("pre").generate(torch.tensor([[1]]), 200, temperature=5.0, n_vocab=7,
                                  generator=torch.Generator().manual_seed(0))
    assert tokens.max() < 7


def test_command_line(run, tmp_path):
    a, b, c = (cli("sample.py", run, "--prompt", "line 7: é", "--max_new_tokens", 50, "--seed", seed)
               for seed in (1, 1, 2))
    assert a.stdout == b.stdout != c.stdout and a.stdout.startswith("line 7: é")
    assert "tokens/s" in a.stderr
    (tmp_path / "prompt.txt").write_text("line 7: é")
    from_file = cli("sample.py", run, "--prompt_file", tmp_path / "prompt.txt", "--max_new_tokens", 50,
                    "--seed", 1)
    assert from_file.stdout == a.stdout
    long = cli("sample.py", run, "--prompt", "x" * 100, "--max_new_tokens", 3)
    assert "100 tokens" in long.stderr and "32" in long.stderr
    assert cli("sample.py", run, "--max_new_tokens", 5, "--best", "--temperature", 0, "--top_p", 0.9).stdout


def test_stops_at_end_of_text(run, tmp_path):
    encoding, seen = prepare.get_tokenizer("bytes"), []

    class Fake:   # a model whose third token is end-of-text
        turn = torch.zeros(1)

        def stream_tokens(self, *args):
            for token in (65, 66, encoding.eot_token, 67):
                seen.append(token)
                yield torch.tensor([[token]])
    args = sample.parse([str(run)])
    sample.sample(Fake(), encoding, [1], args, None)
    assert seen == [65, 66, encoding.eot_token]


def test_pipe_closed_early(run):
    done = subprocess.run(f"{sys.executable} sample.py {run} --max_new_tokens 400 | head -c 20", shell=True,
                          cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.parametrize("flags, words", [
    (["--temperature", "-1"], "--temperature"), (["--top_k", "0"], "--top_k"),
    (["--top_p", "1.5"], "--top_p"), (["--max_new_tokens", "0"], "--max_new_tokens"),
    (["--prompt", "a", "--prompt_file", "b"], "--prompt_file"),
    (["--prompt_file", "nowhere.txt"], "nowhere.txt"), (["--mod_on", "m"], "--skip"),
    (["--mod_least", "0.5"], "--skip"), (["--skip", "0.2", "--mod_least", "2"], "--mod_least 2"),
    (["--mod_scope", "kind"], "--skip"), (["--seed", "-1"], "--seed"), (["--prompt", "\udcff"], "UTF-8"),
    (["--temprature", "1"], "--temperature")])
def test_bad_flags(run, flags, words):
    assert words in refused("sample.py", run, *flags)


def test_bad_folders_and_files(run, tmp_path):
    assert str(tmp_path) in refused("sample.py", tmp_path)
    assert "nowhere" in refused("sample.py", "nowhere")
    (tmp_path / "latin1.txt").write_bytes("é".encode("latin-1"))
    assert "UTF-8" in refused("sample.py", run, "--prompt_file", tmp_path / "latin1.txt")


@pytest.mark.slow
def test_cache_is_at_least_5_times_as_fast():
    """256 tokens at context 512, against a full forward pass per token; both ways in turn, best of three."""
    model = GPT(GPTConfig(n_layer=12, n_embd=128, block_size=512)).eval()
    prompt = torch.randint(256, (1, 256), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def recompute():
        idx = prompt
        for _ in range(256):
            idx = torch.cat((idx, pick(model.head(model.hidden(idx)[0][:, -1]), temperature=0)), 1)
        return idx

    times = []
    for _ in range(3):
        begin = time.perf_counter()
        slow = recompute()
        middle = time.perf_counter()
        fast = model.generate(prompt, 256, temperature=0)
        times.append((middle - begin, time.perf_counter() - middle))
        assert torch.equal(slow, fast)
    ratio = min(t[0] for t in times) / min(t[1] for t in times)
    print(f"\n256 tokens at context 512: {ratio:.1f} times as fast with the cache")
    assert ratio >= 5
