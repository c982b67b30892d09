"""Training runs that skip: mod_rate, router and layer_drop, through train.main."""
import json
import math
import signal

import pytest
import torch
from test_sample import cli
from test_train import command, data, metrics, same_run, weights  # noqa: F401, data is a fixture

import train

MOD = ["--residual", "nag", "--mod_rate", 0.25]
KINDS = dict(mod=MOD, kept=[*MOD, "--mod_kv", "kept", "--mod_scope", "kind"],
             accumulated=[*MOD, "--grad_accum", 2], router=["--mod", "router", "--mod_rate", 0.25],
             layer_drop=["--layer_drop", 0.3])


@pytest.fixture(autouse=True)
def signals():
    """train.main replaces them."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def go(data, out, *flags):
    """A run in this process -> its exit code."""
    return train.main([str(arg) for arg in command(data, out, *flags)[1:]])


def losses(run):
    return [line for line in metrics(run) if "loss" in line]


@pytest.mark.parametrize("scope", ["global", "kind", "layer"])
def test_a_run_settles_at_its_rate(data, tmp_path, scope):
    go(data, tmp_path, *MOD, "--mod_scope", scope, "--max_iters", 60, "--log_interval", 1,
       "--eval_interval", 30, "--batch_size", 16)
    lines, tau = losses(tmp_path), weights(tmp_path)["tau"]
    assert all(line["skip_rate"] == line["mod_rate"] == 0 for line in lines[:3])     # the warm-up is dense
    assert sum(line["skip_rate"] for line in lines[-20:]) / 20 == pytest.approx(0.25, abs=0.03)
    assert all(line["mod_rate"] == 0.25 for line in lines[-20:])
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert all(1 - sum(line["ran"]) / 4 == pytest.approx(line["skip_rate"], abs=1e-6) for line in lines)
    whole = tau < 0     # attentions that fewer than a quarter of the tokens would skip
    assert not whole[1::2].any() and (scope == "global" or not whole.any())
    assert len(tau[~whole].unique()) == {"global": 1, "kind": 2, "layer": 4}[scope]
    evals = [line for line in metrics(tmp_path) if "val_loss" in line]
    assert evals[0]["val_skip_rate"] == 0
    # one threshold settles; those of several groups swing by more from step to step
    assert evals[-1]["val_skip_rate"] == pytest.approx(0.25, abs=0.05 if scope == "global" else 0.2)
    model, _ = train.load_run(tmp_path)                                # and sampling skips as training did
    kept = []
    with torch.no_grad():
        model(train.val_windows(data, 32, 8)[0], kept=kept)
    assert 1 - sum(train.shares(kept)) / 4 == pytest.approx(evals[-1]["val_skip_rate"], abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_bit_identical(data, tmp_path, monkeypatch, kind):
    flags = [*KINDS[kind], "--max_iters", 40, "--log_interval", 3, "--eval_interval", 15]
    assert go(data, tmp_path / "whole", *flags) is None
    for at in (3, 20):   # before and after the ramp
        calls, parts = [], tmp_path / str(at)
        with monkeypatch.context() as patch:
            stops = lambda stop, *_: calls.append(0) or len(calls) > at and not stop.append(signal.SIGTERM)
            patch.setattr(train, "stopping", stops)
            assert go(data, parts, *flags) == 128 + signal.SIGTERM
        assert torch.load(parts / "ckpt.pt", weights_only=True)["step"] == at
        assert train.main(["--out", str(parts), "--resume"]) is None
        same_run(tmp_path / "whole", parts)
    skipped = [line["skip_rate"] for line in losses(parts)]
    assert 0.1 < sum(skipped[-5:]) / 5 < 0.4


def test_resume_where_an_evaluation_was(data, tmp_path, monkeypatch):
    """A run that ended after its checkpoint evaluates again: with the same step sizes of NAG."""
    flags = ["--residual", "nag", "--alpha_warmup", 0.8, "--max_iters", 20, "--eval_interval", 10]
    go(data, tmp_path / "whole", *flags)
    evaluate, calls = train.evaluate, []

    def ends(*args):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("the machine went down")
        return evaluate(*args)

    monkeypatch.setattr(train, "evaluate", ends)
    with pytest.raises(RuntimeError, match="went down"):
        go(data, tmp_path / "parts", *flags)
    assert torch.load(tmp_path / "parts" / "ckpt.pt", weights_only=True)["step"] == 10
    go(data, tmp_path / "parts", *flags, "--resume")
    same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("n_layer, share", [(12, 0), (13, 0.3)])
def test_step_sizes_rise_in_deep_models(data, tmp_path, n_layer, share):
    flags = ["--residual", "nag", "--n_layer", n_layer, "--n_embd", 16, "--max_iters", 4]
    flags += ["--eval_interval", 2]
    go(data, tmp_path / "default", *flags)
    go(data, tmp_path / "said", *flags, "--alpha_warmup", share)
    same_run(tmp_path / "default", tmp_path / "said")
    gains = [line["gain_by_depth"][0] for line in metrics(tmp_path / "said") if "val_loss" in line]
    assert (gains[0] < gains[2] / 2) == bool(share)


@pytest.mark.parametrize("share", [0, 0.3])
@pytest.mark.parametrize("head", ["cos", "linear"])
def test_first_logits_have_their_temperature_while_step_sizes_rise(data, tmp_path, head, share):
    go(data, tmp_path, "--residual", "nag", "--n_layer", 24, "--nag_head", head, "--alpha_warmup", share,
       "--lr", 1e-12, "--gate_lr", 0, "--max_iters", 1)
    model = train.load_run(tmp_path)[0]
    for residual, _ in model.sublayers() if share else ():
        residual.warm.fill_(1 / (1 + share * 420))   # as at the first of 420 steps
    idx = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
    assert model(idx)[0].std(-1).mean().item() == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("kind", ["mod", "router", "layer_drop"])
def test_max_flops_counts_what_ran(data, tmp_path, kind):
    n, at, dense = 4e8, tmp_path / "mod", tmp_path / "dense"
    go(data, at, *KINDS[kind], "--max_flops", n, "--log_interval", 1)
    go(data, dense, *KINDS[kind][:2] if kind == "mod" else [], "--max_flops", n, "--log_interval", 1)
    for run in (at, dense):
        spent = [line["flops"] for line in losses(run)]
        assert spent[-2] < n <= spent[-1] and spent[-1] - n < spent[-1] - spent[-2]
        assert torch.load(run / "ckpt.pt", weights_only=True)["flops"] == spent[-1]
    model, lines = train.load_run(at)[0].train(), losses(at)
    for before, line in zip([dict(flops=0, tokens=0), *lines], lines):
        step = 3 * model.flops_per_token(share=line["ran"]) * (line["tokens"] - before["tokens"])
        assert line["flops"] - before["flops"] == pytest.approx(step, rel=1e-5)
    more = losses(at)[-1]["tokens"] / losses(dense)[-1]["tokens"]
    assert 1.03 < more < 1.5
    assert json.loads((at / "config.json").read_text())["max_flops"] == n
    assert losses(at)[-1]["lr"] < 1.2 * 0.1 * 3e-3              # the schedule ends where the budget does




def test_skipping_begins_after_the_warm_ups(data, tmp_path):
    go(data, tmp_path, *MOD, "--warmup", 0.1, "--alpha_warmup", 0.5, "--max_iters", 20, "--log_interval", 1,
       "--eval_interval", 10)
    assert [line["mod_rate"] > 0 for line in losses(tmp_path)] == [False] * 11 + [True] * 9
    evals = [line for line in metrics(tmp_path) if "val_loss" in line]
    assert [line["dead_sublayers"] for line in evals] == [4, 0, 0]   # all gains start near zero


def test_a_later_end_begins_dense_again(data, tmp_path):
    flags = [*MOD, "--warmup", 0.5, "--log_interval", 1]
    go(data, tmp_path, *flags, "--max_iters", 20)
    go(data, tmp_path, *flags, "--max_iters", 60, "--resume")
    lines = losses(tmp_path)
    assert lines[19]["skip_rate"] > 0.1 and lines[-1]["skip_rate"] > 0.1
    assert all(line["skip_rate"] == line["mod_rate"] == 0 for line in lines[20:30])   # half of the new run


@pytest.mark.parametrize("flags", [["--value_residual"], ["--n_layer", 1]], ids=str)
def test_nag_trains_with_other_flags(data, tmp_path, flags):
    go(data, tmp_path, "--residual", "nag", *flags, "--max_iters", 3)
    assert all(math.isfinite(gain) for line in metrics(tmp_path) for gain in line.get("gain_by_depth", []))
    done = cli("sample.py", tmp_path, "--skip", 0, "--max_new_tokens", 4)
    assert "4 tokens" in done.stderr


def test_two_processes_skip_what_one_does(data, tmp_path):
    """Four parts of a batch, in one process or in two: the same exploration, the same thresholds."""
    flags = ["--batch_size", 8, "--max_iters", 14, "--log_interval", 1, "--eval_interval", 7, "--mod_ramp",
             0.3]
    go(data, tmp_path / "one", *MOD, *flags, "--grad_accum", 4)
    cli("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2,
        *command(data, tmp_path / "two", *MOD, *flags, "--grad_accum", 2))
    one, two = (losses(tmp_path / name) for name in ("one", "two"))
    assert one[-1]["skip_rate"] > 0.1 and len(one[-1]["ran"]) == 4
    for a, b in zip(one, two, strict=True):   # a score within rounding of the threshold may go either way
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
        assert a["ran"] == pytest.approx(b["ran"], abs=0.01)
    taus = [weights(tmp_path / name)["tau"] for name in ("one", "two")]
    torch.testing.assert_close(*taus, rtol=0.01, atol=0)


@pytest.mark.parametrize("flags", [
    MOD, ["--layer_drop", 0.5], ["--residual", "nag", "--layer_drop", 0.3],
    [*MOD, "--mod_rate", 0.9, "--mod_floor", 0, "--mod_explore", 0]], ids=str)
def test_two_processes(data, tmp_path, flags):
    cli("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2,
        *command(data, tmp_path, *flags, "--max_iters", 20, "--log_interval", 5, "--grad_accum", 2))
    lines = losses(tmp_path)
    assert lines[-1]["step"] == 20 and all(math.isfinite(line["loss"]) for line in lines)
    assert 0.15 < lines[-1]["skip_rate"] < 0.95
    assert all(w.isfinite().all() for w in weights(tmp_path).values())
