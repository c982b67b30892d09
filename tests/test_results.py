"""results/run.py and judge.py: statistics by hand, verdicts on made-up runs, and every command parses."""
import json
import math
import shlex
import sys

import numpy as np
import pytest

from conftest import ROOT
from train import other_settings

sys.path.append(str(ROOT / "results"))
import judge
import run

def finals(**bits):
    """variant=[bits of seed 1, 2, 3] -> what judge gets. All groups of windows have the run's value."""
    return {(variant, 300): {seed: dict(bits=each, groups=[each] * 4) for seed, each in enumerate(values, 1)}
            for variant, values in bits.items()}

def verdict(pre, nag, line=9.0, early=None):
    experiment = run.Experiment("?", [run.Stage(100, []), run.Stage(300, [])], [])
    found = finals(pre=pre, nag=nag)
    if early is not None:
        for variant, bits in dict(pre=early, nag=0.0).items():
            found[variant, 100] = {1: dict(bits=bits, groups=[])}
    return judge.judge(experiment, run.Claim("", "nag", ("pre",)), found, {"300": [line] * 4})

def test_interval_of_t():
    mean, half = judge.interval([1.0, 2.0, 4.0])   # by hand: s = 1.527525, 4.302653 s / sqrt(3) = 3.794580
    assert mean == pytest.approx(7 / 3) and half == pytest.approx(3.79458, rel=2e-4)
    assert judge.interval([0.0, 1.0] * 16)[1] == pytest.approx(2.03951 * 0.508001 / 32 ** 0.5, rel=1e-3)
    assert judge.interval([1.0])[1] == math.inf

@pytest.mark.parametrize("history", [[], [3], [3, 4], [3, 4, 1], [6, 6, 6]])
def test_witten_bell_sums_to_one(history):
    tokens = np.random.default_rng(0).integers(0, 6, 500)   # 6 never comes
    grams = judge.WittenBell(tokens, np.ones(500, bool), 7)
    p = grams.probability(np.array([[*history, token] for token in range(7)]))
    assert p.sum() == pytest.approx(1) and (p > 0).all()

def test_witten_bell_by_hand():
    grams = judge.WittenBell(np.array([0, 1, 0, 1, 1]), np.array([True, True, True, False, True]), 3)
    one = (2 + 2 * (1 / 3)) / (4 + 2)   # seen: 0 1 0 . 1, so 1 comes twice, among four tokens of two kinds
    assert grams.probability(np.array([[1]])) == pytest.approx(one)
    assert grams.probability(np.array([[0, 1]])) == pytest.approx((1 + 1 * one) / (1 + 1))   # 0 1 once
    assert grams.probability(np.array([[2, 1]])) == pytest.approx(one)                       # 2 never came

@pytest.mark.parametrize("pre, nag, options, word", [
    ([2.0, 2.1, 2.2], [1.95, 2.05, 2.14], {}, "holds against a control"),
    ([2.0, 2.1, 2.2], [1.98, 2.09, 2.10], {}, "direction only"),
    ([2.0, 2.1, 2.2], [1.99, 2.09, 2.19], dict(early=0.3), "start-up effect"),
    ([2.0, 2.1, 2.2], [2.05, 2.15, 2.25], {}, "contradicted"),
    ([2.0, 2.1, 2.2], [2.3, 1.9, 2.2], {}, "cannot be tested here"),               # too wide an interval
    ([2.0, 2.1, 2.2], [1.9, 2.0, 2.1], dict(line=2.0), "cannot be tested here"),   # the control is too weak
    ([2.0, 2.1], [1.9, 2.0], {}, "cannot be tested here")])                        # too few seeds
def test_verdict_follows_the_rule(pre, nag, options, word):
    assert verdict(pre, nag, **options)[0] == word

def test_the_strongest_control_counts():
    claim = run.Claim("", "nag", ("pre", "lns"))
    found = finals(nag=[1.9] * 3, pre=[2.0] * 3, lns=[1.8] * 3)
    experiment = run.Experiment("?", [run.Stage(300, [])], [])
    word, gap, where = judge.judge(experiment, claim, found, {"300": [9.0] * 4})
    assert word == "contradicted" and gap.startswith("+0.100") and where.endswith("against lns")

def test_one_control_that_contradicts_is_enough():
    claim = run.Claim("", "nag", ("pre", "lns"))
    found = finals(nag=[1.9] * 3, pre=[1.9, 1.7, 2.1], lns=[1.9, 1.895, 1.895])
    word, _, where = judge.judge(run.EXPERIMENTS["mod"], claim, {(name, 1200): runs for (name, _), runs in
                                 found.items()}, {"1200": [9.0] * 4})
    assert word == "contradicted" and where.endswith("against lns")   # The interval of pre is the wider one.

def test_a_control_with_one_seed_lets_nothing_be_said():
    claim = run.Claim("", "nag", ("pre", "lns"))
    found = finals(nag=[1.9] * 3, pre=[2.0] * 3, lns=[2.4])
    experiment = run.Experiment("?", [run.Stage(300, [])], [])
    assert judge.judge(experiment, claim, found, {"300": [9.0] * 4})[0] == "cannot be tested here"

def test_gaps_over_depth_are_of_as_many_blocks():
    names = "pre --n_layer 24", "nag --n_layer 24", "pre --n_layer 6", "nag --n_layer 6"
    found = finals(**dict(zip(names, ([2.0], [1.9], [2.3], [2.4]))))
    for seeds in found.values():
        seeds[1]["lr"] = 0.006
    rows = judge.table(run.EXPERIMENTS["depth"], found)
    assert [row[-1].split()[:1] for row in rows] == [[], ["-0.100,"], [], ["+0.100,"]]

def test_a_lead_in_longer_runs_is_no_early_one():
    found = finals(pre=[2.0, 2.1, 2.2], nag=[1.99, 2.09, 2.19])
    for variant, bits in dict(pre=1.9, nag=1.8).items():
        found[variant, 1200] = {1: dict(bits=bits, groups=[])}
    experiment = run.Experiment("?", [run.Stage(300, []), run.Stage(1200, [])], [])
    word, _, where = judge.judge(experiment, run.Claim("", "nag", ("pre",)), found, {"300": [9.0] * 4})
    assert word == "direction only" and where.startswith("300 of 1200")

def test_bad_json_files_are_refused(tmp_path):
    scale = run.Scale(**vars(run.SCALES["cpu"]) | dict(folder=tmp_path))
    job = dict(variant="pre", steps=300, lr=0.006, seed=1, bits=2.0)
    (tmp_path / "tokens.json").write_text(json.dumps(dict(data="", lines={}, runs=[job])))
    with pytest.raises(SystemExit, match="tokens.json: can't be read"):   # It has no groups.
        run.load("tokens", scale)
    for name in "tokens", "waterfall":
        kept = dict(data=name, lines={}, runs=[job | dict(groups=[2.0])])
        (tmp_path / f"{name}.json").write_text(json.dumps(kept))
    with pytest.raises(SystemExit, match="tokens and waterfall had different data"):
        run.known("depth", scale)

def test_a_variant_that_always_diverges_ends():
    stages, tried = [run.Stage(300, ["pre"])], {}
    while (jobs := run.plan(stages, tried, tried, (1e-3, 2e-3))) and len(tried) < 40:
        tried |= {job: math.inf for job in jobs}
    assert not jobs

def test_n_grams_of_a_large_vocabulary_stop_before_their_codes_overflow():
    tokens = np.array([50256, 50255, 50256, 50255, 50254] * 4)
    grams = judge.WittenBell(tokens, np.ones(20, bool), 50257)
    assert len(grams.tables) == 4 and all((table[0] >= 0).all() for table in grams.tables)
    assert 0 < grams.probability(tokens[None, :4])[0] < 1

def test_gradients_that_fall_with_the_fan_in_are_not_explained_by_it():
    F = np.arange(6.0, 0, -1)
    noise = np.array([0.1, -0.1, 0.1, -0.1, 0.1, -0.1])
    assert judge.left_by_fan_in(2 * F + noise, 1 + F) < 0.01
    assert judge.left_by_fan_in(noise - F, 1 - F) == 1

def test_a_sweep_goes_on_until_the_best_rate_is_inside():
    stages, tried = [run.Stage(300, ["pre"])], {}
    while jobs := run.plan(stages, tried, tried, (1e-3, 2e-3)):
        tried |= {job: abs(math.log(job.lr / 8e-3)) for job in jobs[:1]}
    rates = {job.lr for job in tried if job.seed == 1}
    assert rates == {1e-3, 2e-3, 4e-3, 8e-3, 16e-3}
    assert {job.seed for job in tried if job.lr == 8e-3} == {1, 2, 3} and len(tried) == 7

def test_where_one_seed_cannot_tell_rates_apart_all_seeds_run_both():
    stages, tried = [run.Stage(300, ["pre"])], {}
    while jobs := run.plan(stages, tried, tried, (1e-3, 2e-3)):
        job = jobs[0]
        bits = {1e-3: 1.505, 2e-3: 1.5}.get(job.lr, 1.6)
        tried[job] = bits + (0.1 if job.seed > 1 and job.lr == 2e-3 else 0.0)
    assert {(job.lr, job.seed) for job in tried if job.seed > 1} == {(1e-3, 2), (1e-3, 3), (2e-3, 2), (2e-3, 3)}
    assert run.sweeps(stages, tried, (1e-3, 2e-3))[0]["pre"][1] == [1e-3, 2e-3]

def test_two_rates_are_two():
    tried = {}
    while jobs := run.plan([run.Stage(300, ["pre"], rates=2)], tried, tried, (1e-3, 2e-3)):
        tried[jobs[0]] = 1 / jobs[0].lr
    assert sorted((job.lr, job.seed) for job in tried) == [(1e-3, 1), (2e-3, 1), (2e-3, 2), (2e-3, 3)]

@pytest.mark.parametrize("name, scale", [(name, "cpu") for name in run.EXPERIMENTS] + [("mod", "gpu")])
def test_dry_prints_commands_that_parse(name, scale, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(run.SCALES[scale], "folder", tmp_path)   # Nothing has been trained there.
    run.main([name, "--dry", "--scale", scale])
    *commands, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"{name}: ") and len(commands) == len({*commands}) >= 2
    for command in commands[:3]:
        flags = shlex.split(command.replace("cuda", "cpu"), comments=True)[2:]
        gpt, config = run.parse((run.GPTConfig, run.TrainConfig), flags, defaults=other_settings)
        assert config.data == run.SCALES[scale].data and f"--seed {gpt.seed}" in command

def test_bad_input_is_one_sentence(tmp_path):
    with pytest.raises(SystemExit, match="^nope: no such experiment; choose from tokens, "):
        run.main(["nope", "--dry"])
    (tmp_path / "tokens.json").write_text(json.dumps(["not ours"]))
    with pytest.raises(SystemExit, match="tokens.json: can't be read"):
        run.load("tokens", run.Scale(**vars(run.SCALES["cpu"]) | dict(folder=tmp_path)))
