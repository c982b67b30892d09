"""train.py and runs.py on tiny runs: what they leave, exact resume, several processes, refusals."""
import fcntl, json, math, multiprocessing, os, re, resource, runpy, shlex, shutil, signal, socket
import subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
import numpy as np
import model as model_file, prepare, processes, pytest, runs, sample, sentences, torch, train
from conftest import ROOT, TINY
from model import GPT, GPTConfig, RESIDUALS, ByFunction, EVERYONE, REMOVED, flops_per_token

# On CPUs, because what these tests compare has to be equal to the last bit.
SIZE = ("--device cpu --n_layer 2 --n_embd 32 --n_head 2 --block_size 32 --batch_size 4 "
        "--eval_windows 8 --seed 5 --optimizer adamw --lr 6e-3").split()
LONG = "--max_iters", "99999", "--eval_interval", "99999"
HALF = ".unfinished-*"

@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    lines = "".join(f"line {i}: {i * i} = {i} * {i}\n" for i in range(3000))
    (folder / "text.txt").write_text(lines)
    prepare.main(["text", "--input", str(folder / "text.txt"), "--out", str(folder / "data")])
    return folder / "data"

@pytest.fixture(scope="session")
def finished(data, tmp_path_factory):
    """A run of 8 steps. Tests that change it take a copy."""
    out = tmp_path_factory.mktemp("runs") / "run"
    assert go(data, out, "--max_iters", 8, "--eval_interval", 4) == 0
    return out

@pytest.fixture
def copy(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "copy"))

def go(data, out, *flags):
    return train.main([str(word) for word in ("--data", data, *SIZE, "--out", out, *flags)])

def resume(out, *flags):
    return train.main([str(word) for word in ("--out", out, "--resume", *flags)])

def refused(*words, call=train.main):
    """What sentences.start would print: a sentence"""
    with pytest.raises((SystemExit, OSError)) as refusal:
        call([str(word) for word in words])
    sentence = str(refusal.value)
    assert len(sentence.splitlines()) == 1 and len(sentence) > 20, sentence
    return sentence

def metrics(run):
    """What must be equal in two runs: all but the speed"""
    return {step: {key: value for key, value in entry.items() if key != "tok_s"}
            for step, entry in sorted(runs.read_metrics(run).items())}

def losses(run):
    return [entry for entry in metrics(run).values() if "loss" in entry]

def load(run):
    return torch.load(run / "ckpt.pt", weights_only=True)

def same_weights(a, b):
    return all(torch.equal(weight, b["model"][name]) for name, weight in a["model"].items())

def same_run(a, b):
    assert metrics(a) == metrics(b)
    x, y = load(a), load(b)
    assert all(x[key] == y[key] for key in ("step", "flops")) and same_weights(x, y)

def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}

def child(words, log, stdout, env):
    os.environ.update(env)
    for number, path in (1, stdout or f"{log}.out"), (2, f"{log}.err"):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout = open(1, "w", encoding="ascii", closefd=False)   # a terminal that knows no more
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    sys.argv = ["train.py", *map(str, words)]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")

def start(log, *words, stdout=None, **env):
    """`python train.py WORDS`, without importing torch again, if there is no GPU: where there is one, gradients have
    been computed in threads, and such a process can't be forked. log: a path without an ending"""
    way = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    process = way.Process(target=child, args=(words, log, stdout, env))
    process.start()
    return process

def start_two(tmp_path, *words):
    with socket.create_server(("localhost", 0)) as s:
        port = str(s.getsockname()[1])
    return [start(tmp_path / f"process{rank}", *words, RANK=str(rank), LOCAL_RANK=str(rank),
                  WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port) for rank in range(2)]

def wait(*processes):
    for process in processes:
        process.join(60)
        process.kill()
    return [process.exitcode for process in processes]

def wait_for(path, process):
    while not path.exists():
        assert process.is_alive()
        time.sleep(0.01)

# ------------------------------------------------------------------------------------ what a run is

def test_a_run_in_default_folders_and_its_replay(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "main", lambda argv: shutil.copytree(data, argv[-1]))
    flags = "--residual hyper:n=2 --max_iters 50 --log_interval 10 --eval_interval 30".split()
    assert train.main([*SIZE, *flags]) == 0
    run = Path("runs/hyper-n2")
    entries = metrics(run)
    assert list(entries) == [0, 10, 20, 30, 40, 50]
    assert [step for step in entries if "val_loss" in entries[step]] == [0, 30, 50]
    last = entries[50]
    assert last["loss"] < entries[10]["loss"] - 0.3 and last["tokens"] == 50 * 4 * 32
    assert last["val_bpb"] == pytest.approx(last["val_loss"] / math.log(2), rel=0.02)   # bytes
    assert last.keys() >= {"lr", "grad_norm", "flops", "skip_rate", "val_skip_rate"}
    assert runs.read_metrics(run)[50]["tok_s"] > 0
    assert {*content(run)} == {"config.json", "metrics.jsonl", "ckpt.pt", "lock"}
    said = capsys.readouterr().out.splitlines()
    assert "sample.py" in said[-1] and f"validation loss {last['val_loss']:.4f}" in said[-3]
    config = json.loads((run / "config.json").read_text())
    assert config["tokenizer"] == "bytes" and config["vocab_size"] == 320   # a multiple of 64
    assert not {"resume", "overwrite", "config"} & config.keys()
    # Other data may have fewer tokens.
    assert train.main(["--config", str(run), "--out", str(tmp_path / "replay")]) == 0
    same_run(run, tmp_path / "replay")
    model, found = runs.open_run(run)
    assert found.items() <= config.items() and "tokenizer" in found and not model.training
    nats = train.evaluate(model, *prepare.windows_of(data, "val", 32, 8), torch.ones(320), 4)[0]
    assert nats == pytest.approx(last["val_loss"], rel=1e-6)
    only_ends = train.evaluate(model, *prepare.windows_of(data, "val", 32, 8), torch.zeros(320), 4)
    assert math.isfinite(only_ends[1])   # bits per byte, of no bytes
    before = content(run)
    assert resume(run) == 0 and max(metrics(run)) == 50   # Nothing is left to do.
    assert (run / "config.json").read_bytes() == before["config.json"]

def test_batches_depend_on_seed_and_step_only():
    shards = [np.arange(100, 200, dtype=np.uint16), np.arange(220, 250, dtype=np.uint16)]
    data = SimpleNamespace(shards=shards)
    def batches(n_parts=1, step=3, seed=1):
        gpt = GPTConfig(**TINY | dict(block_size=8, seed=seed, vocab_size=320))
        return [train.get_batch(data, gpt, 12, step, part, n_parts) for part in range(n_parts)]
    (x, y), = batches()
    parts = [x for x, _ in batches(4)]
    assert torch.equal(torch.cat(parts), x) and torch.equal(y[:, :-1], x[:, 1:])
    assert x.shape == (12, 8)
    assert (x.diff(dim=1) == 1).all() and (y - x == 1).all()   # No window is in two shards.
    assert not torch.equal(x, batches(step=4)[0][0]) and not torch.equal(x, batches(seed=2)[0][0])

def test_evaluate():
    model, rng = GPT(GPTConfig(**TINY)), torch.Generator().manual_seed(0)
    x, y = torch.randint(64, (2, 5, 16), generator=rng)
    sizes = torch.arange(64)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    nats, bpb, skipped = train.evaluate(model, x, y, sizes, 2)   # 2 + 2 + 1 windows
    wanted = model(x, y)[1].item()
    assert nats == pytest.approx(wanted, rel=1e-6) and skipped == 0 and model.training
    assert bpb == pytest.approx(wanted * 80 / math.log(2) / sizes[y].sum().item(), rel=1e-6)
    assert torch.equal(torch.get_rng_state(), before)
    quarter = (torch.arange(16) < 4).expand(5, 16)
    def decide(runner):   # Sublayer 1 is removed; a quarter of the tokens run the third.
        return {1: REMOVED, 3: quarter[:len(runner.stream)]}.get(runner.place, EVERYONE)
    found = train.evaluate(model, x, y, sizes, 2, ByFunction(decide))[2]
    assert found == pytest.approx((1 + 0.75) / 6)

def test_main_leaves_a_process_as_it_found_it(data, tmp_path):
    """... a notebook: Ctrl-C, random numbers, threads; also if it is refused. (In a process of its
    own: one that has used two threads can't be forked any more, and other tests do that.)"""
    words = ["--data", str(data), *SIZE, "--out", str(tmp_path / "run"), "--mod", "coins"]
    code = f"""
import signal, sys, torch
sys.path.insert(0, {str(ROOT)!r})
import train
def state():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    return handlers, torch.get_rng_state().tolist(), torch.get_num_threads()
torch.set_num_threads(2)
before = state()
assert train.main({[*words, "--max_iters", "2"]!r}) == 0
assert state() == before
try:
    train.main({words!r})
except SystemExit:
    assert state() == before
    print("as it was")
"""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True)
    assert done.stdout.endswith("as it was\n"), done.stderr

def test_the_reported_loss_has_no_price_in_it(data, tmp_path):
    """The first loss is that of the first weights, whatever turning costs."""
    losses = []
    for cost in 0, 5:
        run = tmp_path / str(cost)
        assert go(data, run, "--residual", "nag", "--gain_cost", cost, "--max_iters", 1,
                  "--log_interval", 1, "--grad_accum", 2) == 0
        losses.append(metrics(run)[1]["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert "mean_gain" in metrics(run)[1] and "mean_gain" not in metrics(tmp_path / "0")[1]

def test_steps_by_hand(data, tmp_path):
    """Weights - lr x clipped gradients, and nothing else. Norms of blocks are logged, unclipped."""
    flags = ("--optimizer sgd --beta1 0 --weight_decay 0 --lr 0.5 --warmup 0.5 --min_lr 1 "
             "--grad_clip 0.25")
    go(data, tmp_path, *flags.split(), "--grad_accum", 2, "--max_iters", 6, "--log_interval", 1)
    ckpt = load(tmp_path)
    model = GPT(GPTConfig(**ckpt["model_config"]))
    text = SimpleNamespace(shards=prepare.open_split(data, "train", 32))
    for step in range(6):
        model.zero_grad()
        model(*train.get_batch(text, model.config, 4, step))[1].backward()
        norms = [torch.nn.utils.get_total_norm(p.grad for p in block.parameters()).item()
                 for block in model.blocks]
        assert metrics(tmp_path)[step + 1]["grad_norms"] == pytest.approx(norms, rel=1e-4)
        norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.5 * min(1, (step + 1) / 3) * p.grad * min(1, 0.25 / norm)
    for name, weight in ckpt["model"].items():
        assert torch.allclose(weight, model.state_dict()[name], atol=1e-5), name

def test_muon_is_torchs(monkeypatch):
    """but for the precision of its products"""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)   # for torch's products
    def trained(optimizer):
        rng = torch.Generator().manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(shape, generator=rng))
                   for shape in ((6, 4), (4, 6), (5, 5))]
        optimizer = optimizer(weights)
        for step in range(4):
            for weight in weights:
                # In the first step it is 0, as for the matrices of --residual rezero.
                weight.grad = torch.randn(weight.shape, generator=rng) * (step > 0)
            optimizer.step()
        return weights
    ours = trained(lambda weights: train.Muon([dict(params=weights, weight_decay=0.1)], 0.02))
    torchs = trained(lambda weights: torch.optim.Muon(weights, 0.02, weight_decay=0.1,
                                                      adjust_lr_fn="match_rms_adamw"))
    for a, b in zip(ours, torchs):
        assert torch.allclose(a, b, atol=1e-5)

def test_each_log_has_a_speed(data, tmp_path):
    """also that of the first step, and of a step right after a resume"""
    go(data, tmp_path, "--max_iters", 2, "--log_interval", 1)
    resume(tmp_path, "--max_iters", 3)
    speeds = [entry["tok_s"] for entry in runs.read_metrics(tmp_path).values() if "tok_s" in entry]
    assert len(speeds) == 3 and min(speeds) > 0

def test_infinite_gradients_are_not_saved(data, tmp_path, monkeypatch):
    """Clipping makes them zeros, so the weights stay finite."""
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args: torch.tensor(math.inf))
    run = tmp_path / "run"
    flags = "--data", data, *SIZE, "--out", run, "--max_iters", 4, "--log_interval", 1
    assert "not finite" in refused(*flags)
    assert load(run)["step"] == 0

def test_equalized_gradients(data, tmp_path):
    grads = [[torch.randn(3, 2), torch.randn(4)], [torch.randn(5) * 100], [torch.zeros(2)]]
    norms = torch.stack([torch.nn.utils.get_total_norm(each) for each in grads])
    train.equalize(grads, norms)
    after = torch.stack([torch.nn.utils.get_total_norm(each) for each in grads])
    assert torch.allclose(after[:2], norms.square().mean().sqrt().expand(2)) and after[2] == 0
    for name, flag in ("plain", []), ("equal", ["--equalize_grads"]):   # The flag does it.
        more = "--max_iters 3 --log_interval 1 --optimizer sgd --lr 1".split()
        go(data, tmp_path / name, *more, *flag)
    plain, equal = losses(tmp_path / "plain"), losses(tmp_path / "equal")
    assert plain[0]["loss"] == equal[0]["loss"] and plain[2]["loss"] != equal[2]["loss"]

@pytest.mark.parametrize("mod", ["router:rate=0.25", "layerdrop:rate=0.4", "coins:rate=0.4"])
def test_executed_flops_end_a_run(data, tmp_path, monkeypatch, mod):
    seeds, manual_seed = [], torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(seed) or manual_seed(seed))
    flags = "--max_flops", 3e8, "--log_interval", 1, "--grad_accum", 2
    go(data, tmp_path, "--mod", mod, *flags)
    entries, model = losses(tmp_path), runs.open_run(tmp_path)[0]
    coins = [seed for seed in seeds if seed]   # others in each step, and in each part of a batch
    assert len({*coins}) == len(coins) == 2 * len(entries) > 4
    spent, dense = [0, *(entry["flops"] for entry in entries)], 3 * 128 * flops_per_token(model)
    assert spent[-2] < 3e8 <= spent[-1] == load(tmp_path)["flops"]
    for entry, before in zip(entries, spent):   # Where tokens skip, a step costs less.
        assert (entry["flops"] - before < 0.97 * dense) == (entry["skip_rate"] > 0.1)
    assert entries[-1]["skip_rate"] > 0.1
    assert entries[0]["lr"] > 0.5 * 6e-3   # The run is so short that its warmup ends in the first step.
    assert entries[-1]["lr"] < 1.3 * 0.1 * 6e-3   # The schedule ends, too.
    assert resume(tmp_path) == 0 and losses(tmp_path) == entries   # Nothing is left to do.

def test_coins_are_the_same_each_time(data, tmp_path, capsys):
    """... in evaluate and sample.py, whatever was drawn before"""
    run = tmp_path / "run"
    go(data, run, "--residual", "nag", "--mod", "coins:rate=0.4", "--max_iters", 2)
    found = []
    for seed in 1, 2:
        model, _ = runs.open_run(run)
        x = torch.arange(8 * 32).view(8, 32) % 200
        torch.manual_seed(seed)
        found.append(train.evaluate(model, x, x, torch.ones(len(model.wte.weight)), 4))
        capsys.readouterr()
        torch.manual_seed(seed)
        sample.main([str(run), "--max_new_tokens", "30", "--device", "cpu"])
        share = r"[\d.]+% of the sublayer runs skipped"
        found.append(re.search(share, capsys.readouterr().err)[0])
    assert found[:2] == found[2:] and found[0][2] > 0.2

# --------------------------------------------------------------------------------- settings

def parsed(*given):
    return train.read_configs(given)

def test_configs():
    """Typed, then --config, then defaults. A file may say some settings only."""
    gpt, config = parsed("--config", str(ROOT / "configs/gpt2.json"), "--n_layer", "6")
    assert [gpt.n_layer, gpt.n_embd, config.batch_size, config.lr] == [6, 768, 512, 1e-3]
    assert config.min_lr == train.TrainConfig.min_lr and config.compile
    gpt, config = parsed("--n_layer", "6")
    assert [gpt.n_layer, gpt.n_embd, config.optimizer, config.lr] == [6, 128, "muon", 0.02]

@pytest.mark.parametrize("text, words", [
    ('{"n_layers": 6}', "--n_layers: unknown flag, did you mean --n_layer?"),
    ('{"lr": "1e-3"}', "--lr '1e-3': must be a number"), ("{", "mine.json: can't be read"),
    ("[1]", "mine.json: can't be read"),
    ('{"lr": true}', "--lr True: must be a number"),
    ('{"batch_size": 2.5}', "--batch_size 2.5: must be a whole number"),
    ('{"compile": "no"}', "--compile 'no': must be true or false"),
    ('{"optimizer": "adam"}', "--optimizer 'adam': unknown; choose from adamw"),
    ('{"mod_rate": 0.25, "layer_drop": 0}', "git checkout 7cf98d5 reads it")])
def test_mistakes_in_a_file_of_settings(tmp_path, text, words):
    path = tmp_path / "mine.json"
    path.write_text(text)
    assert words in refused("--config", path, call=lambda given: parsed(*given))

def test_another_optimizer_needs_another_rate(copy):
    """A rate stands where the optimizer stands."""
    assert "add --lr 0.006" in refused("--optimizer", "adamw", call=lambda words: parsed(*words))
    assert parsed("--optimizer", "muon")[1].lr == 0.02
    assert parsed("--optimizer", "adamw", "--lr", "0.5")[1].lr == 0.5
    assert parsed("--config", str(copy), "--optimizer", "adamw")[1].lr == 0.006   # It has adamw.
    assert "add --lr 0.1" in refused("--config", copy, "--optimizer", "sgd")
    # Moments are of one optimizer, so a run that is resumed keeps it.
    words = "--out", copy, "--resume"
    assert "--optimizer sgd" in refused(*words, "--optimizer", "sgd", "--lr", 1)
    assert "--eval_windows 9" in refused(*words, "--eval_windows", 9)

def test_changed_settings_are_recorded(copy, tmp_path, capsys):
    """config.json says what a run began with, and what was changed when. --config repeats the
    beginning, and says so."""
    before = json.loads((copy / "config.json").read_text())
    assert resume(copy, "--max_iters", 12, "--lr", 0.003) == 0
    assert "from iteration 8 on: max_iters 12, lr 0.003\n" in capsys.readouterr().out
    assert resume(copy, "--weight_decay", 0.2) == 0   # and with what was changed
    assert metrics(copy)[12]["val_loss"] and load(copy)["step"] == 12
    assert resume(copy, "--max_iters", 14, "--data", before["data"]) == 0
    changes = {"8": dict(max_iters=12, lr=0.003), "12": dict(weight_decay=0.2, max_iters=14)}
    assert json.loads((copy / "config.json").read_text()) == before | dict(changes=changes)
    capsys.readouterr()
    assert train.main(["--config", str(copy), "--out", str(tmp_path / "new")]) == 0
    said = capsys.readouterr().err
    assert "'8': {'max_iters': 12, 'lr': 0.003}" in said and said.count("\n") == 1
    assert max(metrics(tmp_path / "new")) == 8
    assert metrics(tmp_path / "new")[4] == metrics(copy)[4]

def test_init_from(data, copy, tmp_path):
    """Another run's model and weights, and all else new: step, moments, data, schedule"""
    other = Path(shutil.copytree(data, tmp_path / "other"))
    meta = json.loads((other / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps(meta | dict(name="other")))
    def begin(out, *more):
        words = "--init_from", copy, "--data", other, "--out", out, "--device", "cpu", *more
        return train.main([str(word) for word in words])
    out = tmp_path / "new"
    assert begin(out, "--lr", 0, "--gate_lr", 0, "--max_iters", 2, "--seed", 9) == 0
    assert same_weights(load(out), load(copy)) and load(out)["step"] == 2
    config = json.loads((out / "config.json").read_text())
    assert (config["init_from"], config["n_embd"]) == (str(copy), 32)
    assert config["optimizer"] == "muon" and config["seed"] == 9   # These are no part of a model.
    assert config["data"] == str(other)
    assert resume(out, "--max_iters", 3) == 0
    with pytest.raises(SystemExit, match="n_layer 2 there, 4 here"):
        begin(tmp_path / "x", "--n_layer", 4)
    with pytest.raises(SystemExit, match="n_layer 2 there, 12 here"):   # --config goes first.
        begin(tmp_path / "x", "--config", ROOT / "configs/gpt2.json", "--device", "cpu")
    with pytest.raises(SystemExit, match="Missing key.*router"):   # which it has not learned
        begin(tmp_path / "x", "--mod", "router")
    assert begin(tmp_path / "y", "--mod", "coins", "--seed", 9, "--max_iters", 2) == 0
    assert train.main(["--config", str(tmp_path / "y"), "--out", str(tmp_path / "replay")]) == 0
    same_run(tmp_path / "y", tmp_path / "replay")
    go(data, tmp_path / "nag", "--residual", "nag", "--max_iters", 1)
    new = "--mod gain --gain_cost 0.1 --block_size 16 --deep_supervision --max_iters 1".split()
    assert begin(tmp_path / "z", "--init_from", tmp_path / "nag", *new) == 0
    edited(lambda config: config.update(tokenizer="gpt2"))(copy / "config.json")
    with pytest.raises(SystemExit, match="its tokens are those of gpt2.*--tokenizer gpt2"):
        begin(tmp_path / "x")

def test_data_that_are_elsewhere(copy, tmp_path, monkeypatch):
    """A path in config.json begins where the training began."""
    edited(lambda config: config.update(data="data/mine"))(copy / "config.json")
    monkeypatch.chdir(tmp_path)
    sentence = refused("--out", copy, "--resume")
    assert "config.json names data/mine" in sentence and "training began" in sentence

# ------------------------------------------------------------------------ schedule and optimizers

@pytest.mark.parametrize("schedule, shares", [   # at which part of the run
    ("cosine", {0.05: 0.5, 0.1: 1, 0.325: 0.868, 0.55: 0.55, 0.9: 0.127, 1: 0.1, 1.01: 0.1}),
    ("wsd", {0.05: 0.5, 0.1: 1, 0.325: 1, 0.55: 1, 0.8: 1, 0.9: 0.55, 1: 0.1, 1.01: 0.1})])
def test_schedule(schedule, shares):
    config = train.TrainConfig(schedule=schedule, warmup=0.1, min_lr=0.1)
    assert {at: train.lr_factor(config, at) for at in shares} == pytest.approx(shares, abs=1e-3)
    for warmup in 0, 1:
        config = train.TrainConfig(schedule=schedule, warmup=warmup)
        assert all(0 < train.lr_factor(config, progress) <= 1 for progress in (0.01, 1.0))

def test_no_clipping(data, tmp_path):
    for clip in 0, 1e9:
        go(data, tmp_path / f"{clip:g}", "--max_iters", 3, "--grad_clip", clip)
    same_run(tmp_path / "0", tmp_path / "1e+09")

@pytest.mark.parametrize("residual", RESIDUALS)
def test_optimizer_groups(residual):
    model = GPT(GPTConfig(**TINY, residual=residual, tie=residual in ("pre", "nag")))
    # A residual of one's own may have a parameter of three dimensions.
    model.blocks[0].register_parameter("own", torch.nn.Parameter(torch.randn(2, 3, 4)))
    names = {p: name for name, p in model.named_parameters()}
    own = {id(getattr(r, name)) for r in model.residuals() for name in r.own_lr if hasattr(r, name)}
    assert bool(own) == (residual in ("nag", "attnres"))   # Others do best at the common rate.
    for optimizer in "adamw", "sgd", "muon":
        config = train.TrainConfig(optimizer=optimizer, gate_lr=5e-4, gate_beta1=0.5, beta1=0.7)
        made = train.make_optimizers(model, config)
        groups = [group for each in made for group in each.param_groups]
        for group in groups:
            for p in group["params"]:
                decays = p.dim() >= 2 and id(p) not in own
                assert group["weight_decay"] == (0.1 if decays else 0), names[p]
                assert group["peak_lr"] == (5e-4 if id(p) in own else 2e-2)
                if optimizer == "adamw":
                    assert group["betas"] == (0.5 if id(p) in own else 0.7, 0.95)
    taken = {names[p] for p in made[1].param_groups[0]["params"] if p.dim() == 2}   # by Muon
    assert len(taken) == len(made[1].param_groups[0]["params"])
    assert taken >= {name for name in names.values() if re.search("c_(attn|fc|proj).weight$", name)}
    assert all(name.startswith("blocks.") for name in taken)

STUDENTS = dict(
    adafactor=torch.optim.Adafactor, nadam=torch.optim.NAdam, rmsprop=torch.optim.RMSprop,
    adagrad=torch.optim.Adagrad, radam=torch.optim.RAdam, rprop=torch.optim.Rprop,
    amsgrad=lambda groups, lr: torch.optim.AdamW(groups, lr, amsgrad=True))

@pytest.mark.parametrize("name", STUDENTS)
def test_any_optimizer_resumes(data, tmp_path, monkeypatch, name):
    """Moments have names and any shape: they may be fewer than the parameters, or numbers."""
    make = train.make_optimizers
    def students(model, config):
        groups = [group for each in make(model, config) for group in each.param_groups]
        groups = [dict(params=group["params"], peak_lr=group["peak_lr"]) for group in groups]
        return [STUDENTS[name]([group for group in groups if group["params"]], lr=config.lr)]
    monkeypatch.setattr(train, "make_optimizers", students)
    flags = "--max_iters 8 --lr 1e-3 --log_interval 1 --schedule wsd --min_lr 1 --warmup 0".split()
    go(data, tmp_path / "whole", *flags)
    go(data, tmp_path / "parts", *flags, "--max_iters", 4)
    assert resume(tmp_path / "parts", "--max_iters", 8) == 0
    whole, parts = load(tmp_path / "whole"), load(tmp_path / "parts")
    assert same_weights(whole, parts)
    of_whole, of_parts = (losses(tmp_path / name) for name in ("whole", "parts"))
    assert [entry["loss"] for entry in of_whole] == [entry["loss"] for entry in of_parts]

def test_a_mistake_in_somebodys_optimizer_has_its_traceback(copy, monkeypatch):
    class Mine(torch.optim.SGD):
        def load_state_dict(self, state):
            raise KeyError("momentun")
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, lr, *args, **more: Mine(groups, lr))
    with pytest.raises(KeyError, match="momentun"):
        resume(copy, "--max_iters", 10)

@pytest.mark.parametrize("flags", ["--checkpoint_blocks", pytest.param(
    "--compile --checkpoint_blocks", marks=[pytest.mark.slow, pytest.mark.skipif(
        not shutil.which("g++"), reason="torch.compile needs a C++ compiler here")])])
def test_checkpointed_and_compiled_runs(data, tmp_path, monkeypatch, flags):
    calls = []
    for name in "checkpoint_blocks", "compile_blocks":
        switch = getattr(train, name)
        monkeypatch.setattr(train, name, lambda model, switch=switch: (
            calls.append(model) or switch(model)))
    for name, more in ("plain", []), ("switched", flags.split()):
        usual = "--mod layerdrop:rate=0.3 --max_iters 4 --log_interval 1".split()
        go(data, tmp_path / name, *usual, *more)
    plain, switched = ([entry["loss"] for entry in losses(tmp_path / name)]
                       for name in ("plain", "switched"))
    assert switched == pytest.approx(plain, rel=1e-4) and len(calls) == len(flags.split())

# -------------------------------------------------------------------------------- resume

@pytest.fixture
def at_step(monkeypatch):
    """at_step(13, action): action(model) during the thirteenth step of what is trained next"""
    constrain = train.constrain_weights
    def at_step(number, action):
        calls = []
        def constrained(model):
            calls.append(number)
            if len(calls) == number:
                action(model)
            constrain(model)
        monkeypatch.setattr(train, "constrain_weights", constrained)
    return at_step

@pytest.mark.parametrize("number, flags", [
    (signal.SIGHUP, "--residual nag --gain_cost 0.1 --mod gain:below=0.3 --grad_accum 2"),
    (signal.SIGINT, "--residual ngpt --optimizer muon --lr 0.02 --schedule wsd"),
    (signal.SIGTERM, "--residual layerscale --mod layerdrop:rate=0.3"),
    (signal.SIGTERM, "--residual nag --mod coins:rate=0.3"),
    (signal.SIGINT, "--residual hyper --optimizer sgd --lr 0.1"),
    (signal.SIGTERM, "--residual skipinit --mod router:rate=0.25")])
def test_resume_after_a_signal_is_bit_identical(data, tmp_path, at_step, capsys, number, flags):
    flags = [*flags.split(), "--max_iters", 24, "--log_interval", 3, "--eval_interval", 10]
    assert go(data, tmp_path / "whole", *flags) == 0
    at_step(12, lambda model: signal.raise_signal(number))
    assert go(data, tmp_path / "parts", *flags) == 128 + number
    assert load(tmp_path / "parts")["step"] == 12
    assert "--resume" in capsys.readouterr().out.splitlines()[-1]
    assert resume(tmp_path / "parts") == 0
    same_run(tmp_path / "whole", tmp_path / "parts")
    assert "--mod" not in flags or losses(tmp_path / "parts")[-1]["skip_rate"] > 0.1

@pytest.mark.skipif(torch.cuda.is_available(), reason="forks; see start")
def test_kill_9(data, tmp_path):
    """... while the n-th file is written: config.json, metrics.jsonl, ckpt.pt of steps 0, 10, 20"""
    flags = "--residual nag --max_iters 20 --log_interval 5 --eval_interval 10".split()
    go(data, tmp_path / "whole", *flags)
    for n, begin_again in enumerate(["", "--overwrite", "--overwrite", "--resume", "--resume"], 1):
        run = tmp_path / f"killed{n}"
        pid = os.fork()
        if pid == 0:
            left = list(range(n))
            os.fsync = lambda file: left.pop() or os.kill(os.getpid(), signal.SIGKILL)
            try:
                go(data, run, *flags)
            finally:
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL and any(run.glob(HALF))
        assert go(data, run, *flags, *begin_again.split()) == 0 and not any(run.glob(HALF))
        same_run(tmp_path / "whole", run)

def test_a_finished_run_that_is_extended(data, tmp_path, monkeypatch):
    """Its end was no multiple of eval_interval."""
    go(data, tmp_path, "--max_iters", 25, "--eval_interval", 10)
    before = load(tmp_path)
    assert before["step"] == 25
    resume(tmp_path, "--max_iters", 34, "--lr", 0, "--gate_lr", 0)
    assert load(tmp_path)["step"] == 34 and same_weights(load(tmp_path), before)

def test_a_checkpoint_of_a_machine_with_kernels(copy):
    assert resume(copy, "--max_iters", 9, "--kernels", "off") == 0
    model, settings = runs.open_run(copy)
    assert model.config.kernels == settings["kernels"] == "auto"

@pytest.mark.parametrize("end", [
    b'{"step": 9, "loss": 1.0}\n{"step": 11, "val_loss": 0.1}\n',   # of a timeline that has died
    b'{"step": 9, "loss": 0.0\0\0', b'{"step": 8, "loss": 1.0}'])   # torn; only its newline torn
def test_what_is_behind_the_checkpoint(copy, end):
    """A crash may leave it. What is appended must not land on the same line."""
    path = copy / "metrics.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + end)
    assert resume(copy, "--max_iters", 12, "--log_interval", 4) == 0
    assert path.read_bytes().startswith(before)
    lines = [json.loads(line) for line in path.read_text().splitlines()]   # All are whole.
    assert {line["step"] for line in lines} == {0, 4, 8, 12}
    assert metrics(copy)[12].keys() >= {"loss", "val_loss"}

def test_nothing_that_is_not_finite_is_saved(data, tmp_path, at_step):
    """A weight gets infinite in step 8: a status line finds it in step 9, a checkpoint at once."""
    def poison(model):
        model.blocks[1].mlp.c_proj.weight.data[0, 0] = math.inf
    for run, log, pause, step in ("log", 3, 100, 9), ("pause", 100, 4, 8):
        at_step(8, poison)
        with pytest.raises(SystemExit, match=f"iteration {step}: .*not finite.*ckpt.pt.*--lr"):
            intervals = "--log_interval", log, "--eval_interval", pause
            go(data, tmp_path / run, "--max_iters", 12, *intervals)
    run = tmp_path / "pause"
    assert load(run)["step"] == 4 and resume(run) == 0 and metrics(run)[12]["val_loss"] > 0

# --------------------------------------------------------------------------------- run folders

def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A full disk and Ctrl-C keep the old file."""
    folder = runs.RunFolder(tmp_path, dict(n_layer=2))
    folder.begin(0)
    path, order, fsync, replace = tmp_path / "file", [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda f: order.append(os.stat(f).st_size) or fsync(f))
    monkeypatch.setattr(os, "replace", lambda *paths: order.append("replace") or replace(*paths))
    runs.write_file(path, lambda f: f.write(b"old"))
    assert order == [3, "replace"] and path.stat().st_mode & 0o777 == 0o666 & ~0o22
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        for write in lambda f: f.write(bytes(9999)), lambda f: torch.save(torch.zeros(9999), f):
            with pytest.raises(SystemExit, match="file: can't be written"):
                runs.write_file(path, write)
        with pytest.raises(SystemExit, match="metrics.jsonl: can't be written .*File too large"):
            folder.log(step=0, grad_norms=[0.5] * 999)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        folder.close()
    with pytest.raises(KeyboardInterrupt):
        runs.write_file(path, lambda f: f.write(b"half") and signal.raise_signal(signal.SIGINT))
    assert {*content(tmp_path)} == {"file", "lock", "config.json", "metrics.jsonl"}
    assert path.read_bytes() == b"old"

@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "config.json", "ckpt.pt"])
def test_links_in_a_run_folder(copy, tmp_path, name, link):
    """What they lead to stays as it is: another run that was copied by links, or any file at all."""
    mine = tmp_path / "mine"
    (copy / name).rename(mine)
    link(mine, copy / name)
    before = mine.read_bytes() or b"mine"   # A lock is empty.
    mine.write_bytes(before)
    assert resume(copy, "--max_iters", 12) == 0 and max(metrics(copy)) == 12
    assert mine.read_bytes() == before

def test_two_runs_in_one_folder(data, copy, monkeypatch):
    with open(copy / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)   # A lock that others share would not be noticed.
        before = content(copy)
        for flags in ["--resume"], ["--overwrite"]:
            assert "another process" in refused("--data", data, *SIZE, "--out", copy, *flags)
        assert content(copy) == before
    assert resume(copy) == 0
    assert go(data, copy, "--overwrite", "--max_iters", 3) == 0   # The lock is free again.
    assert list(metrics(copy)) == [0, 3] and load(copy)["step"] == 3
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError("a file system without locks")))
    assert resume(copy) == 0

def test_overwrite_leaves_nothing_of_the_old_run(data, copy, monkeypatch):
    """... not even if the new one is stopped before its first checkpoint"""
    monkeypatch.setattr(train.RunFolder, "save", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        go(data, copy, "--overwrite")
    assert {*content(copy)} == {"config.json", "metrics.jsonl", "lock"} and not metrics(copy)

def test_what_a_new_run_may_find(data, tmp_path):
    """A folder that holds a run is refused, and one of another program. A log is no obstacle. --overwrite replaces
    a run, and nothing else."""
    run, flags = tmp_path / "run", ["--max_iters", 2, "--eval_interval", 1]
    go(data, run, *flags)
    whole = content(run)
    alien = json.dumps(dict(model_type="llama", hidden_size=4096)).encode()
    for held, what in ((whole, "holds a run already"), ({"ckpt.pt": b"weights"}, "no lock"),
                       ({"config.json": alien, "ckpt.pt": b"weights"}, "no lock")):
        shutil.rmtree(run)
        run.mkdir()
        for name, raw in held.items():
            (run / name).write_bytes(raw)
        for more in [], ["--overwrite"] if what == "no lock" else []:
            assert what in refused("--data", data, *SIZE, "--out", run, *flags, *more)
            assert content(run) == held
    (run / "lock").touch()   # Now it is ours: a run makes it before all others.
    (run / "notes").write_text("mine")
    assert go(data, run, *flags, "--overwrite") == 0 and (run / "notes").exists()
    shutil.rmtree(run)
    run.mkdir()
    (run / "log").write_bytes(b"mine")
    assert go(data, run, *flags) == 0 and (run / "log").exists()

def test_other_data(data, copy, tmp_path):
    other = Path(shutil.copytree(data, tmp_path / "other"))
    assert resume(copy, "--data", other, "--max_iters", 9) == 0   # The same data elsewhere.
    header = np.array([prepare.MAGIC, prepare.VERSION, 900] + 253 * [0], "<i4").tobytes()
    before, whole = content(copy), content(other)
    for name, raw in (("meta.json", b'{"name": "other", "tokenizer": "bytes"}'),
                      ("train_000000.bin", header + np.full(900, 7, "<u2").tobytes())):
        (other / "meta.json").write_bytes(whole["meta.json"])
        (other / name).write_bytes(raw)
        assert "other data" in refused("--out", copy, "--resume", "--data", other)
        assert content(copy) == before
    (other / name).write_bytes(header + np.full(900, 320, "<u2").tobytes())
    new = "--data", other, *SIZE, "--out", tmp_path / "new", "--max_iters", 2
    assert "beyond its tokenizer" in refused(*new)

def test_a_dead_stdout_ends_no_run(data, tmp_path):
    run = tmp_path / "Läufe"   # which its terminal can't write
    words = ["--data", data, *SIZE, "--out", run, "--max_iters", 6]
    process = start(tmp_path / "log", *words, stdout="/dev/full")
    assert wait(process) == [0] and max(metrics(run)) == 6
    assert (tmp_path / "log.err").read_text() == ""

def test_signals():
    """The first one is noted, the second one does what it always does, and nohup is heard."""
    with pytest.raises(SystemExit, match="^130$"):
        sentences.start(lambda: signal.raise_signal(signal.SIGINT))
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)   # nohup
    with processes.noted_signals() as signals:
        for number in signal.SIGHUP, signal.SIGTERM, signal.SIGINT:
            signal.raise_signal(number)
        assert signals == [signal.SIGTERM, signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before

@pytest.mark.parametrize("settings, words, says", [
    (dict(optimizer="adamw"), "", "add --lr 0.006"), (dict(optimizer="adamw"), "--lr 0.01", None),
    (dict(optimizer="adamw", lr=1e-3), "", None), (dict(optimizer="adamw", lr=1e-3), "--optimizer muon", "add --lr 0.02"),
    (dict(lr=3e-2), "", None), (dict(lr=3e-2), "--optimizer sgd", "add --lr 0.1")])
def test_a_rate_is_good_for_one_optimizer(tmp_path, settings, words, says):
    (tmp_path / "mine.json").write_text(json.dumps(settings))
    words = ["--config", str(tmp_path / "mine.json"), *words.split()]
    if says:
        assert says in refused(*words, call=train.read_configs)
    else:
        train.read_configs(words)

# ---------------------------------------------------------------------------- several processes

@pytest.mark.parametrize("flags, tolerance", [
    ("--residual nag --gain_cost 0.1 --mod gain:below=0.3", 2e-3),   # A gain may be on either side.
    ("--mod layerdrop:rate=0.4", 1e-4),
    ("--mod router:rate=0.25", 1e-5),
    ("--optimizer muon --lr 0.02 --residual attnres", 2e-2)])
def test_two_processes_train_as_one(data, tmp_path, flags, tolerance):
    """Four parts of a batch, in one process or in two: the same coins and losses"""
    flags = f"{flags} --batch_size 8 --max_iters 15 --log_interval 1 --eval_interval 7".split()
    words = "--data", data, *SIZE, "--out", tmp_path / "two", *flags, "--grad_accum", 2
    two = start_two(tmp_path, *words)
    assert go(data, tmp_path / "one", *flags, "--grad_accum", 4) == 0
    assert wait(*two) == [0, 0], (tmp_path / "process0.err").read_text()
    assert "iter" not in (tmp_path / "process1.out").read_text()   # The first one speaks.
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert one.keys() == two.keys() and (one[15]["skip_rate"] > 0.1) == ("--mod" in flags)
    for step in one:
        for key in one[step]:
            wanted = pytest.approx(two[step][key], rel=tolerance, abs=tolerance)
            assert one[step][key] == wanted, (step, key)
    assert resume(tmp_path / "two", "--max_iters", 16, "--grad_accum", 4) == 0   # goes on as one

def test_processes_stop_together(data, tmp_path):
    """A signal to one of them: both leave after the same step, all is saved, one speaks."""
    run = tmp_path / "run"
    def say():
        return [(tmp_path / f"process{rank}.err").read_text() for rank in range(2)]
    two = start_two(tmp_path, "--data", data, *SIZE, "--out", run, *LONG)
    wait_for(run / "ckpt.pt", two[0])
    time.sleep(0.2)
    os.kill(two[1].pid, signal.SIGTERM)
    assert wait(*two) == [128 + signal.SIGTERM] * 2
    assert "--resume" in (tmp_path / "process0.out").read_text()
    begun = load(run)["step"]
    assert resume(run, "--max_iters", begun + 2) == 0 and max(metrics(run)) == begun + 2
    # So do they if one is refused, or killed, or if the loss isn't finite.
    with open(run / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert wait(*start_two(tmp_path, "--out", run, "--resume")) == [1, 1]
    first, second = say()
    assert re.fullmatch(".*another process is training there.*\n", first)
    assert re.fullmatch(".*another process of this run has ended.*\n", second)
    two = start_two(tmp_path, "--data", data, *SIZE, "--out", tmp_path / "killed", *LONG)
    wait_for(tmp_path / "killed/ckpt.pt", two[0])
    two[1].kill()
    assert wait(*two) == [1, -signal.SIGKILL]
    assert "another process of this run has ended" in say()[0] and "Traceback" not in say()[0]
    flags = "--lr 1e3 --gate_lr 1e3 --weight_decay 1e3 --grad_clip 0 --warmup 0 --log_interval 1"
    two = start_two(tmp_path, "--out", run, "--resume", "--max_iters", begun + 50, *flags.split())
    assert wait(*two) == [1, 1] and load(run)["step"] == begun + 2
    first, second = say()
    assert "lower --lr" in first.splitlines()[-1] and second.count("\n") == 1

@pytest.mark.slow
def test_torchrun(data, tmp_path):
    """The real thing: a run, a signal, and two processes that resume it"""
    run = tmp_path / "run"
    torchrun = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node 2".split(),
                "train.py", "--out", run]
    process = subprocess.Popen([*torchrun, "--data", data, *SIZE, *LONG], cwd=ROOT)
    while not (run / "ckpt.pt").exists():
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    end = load(run)["step"] + 3
    subprocess.run([*torchrun, "--resume", "--max_iters", str(end)], cwd=ROOT, timeout=100)
    assert max(metrics(run)) == end

REFUSED = [   # a command line, perhaps after a variable, and the words that its sentence must have
    ("--n_head 2 --n_lay=3", "--n_lay: unknown flag, did you mean --n_layer?"),
    ("--min_lr 6e-5", "share of --lr"), ("--mod_rate 0.25", "--mod_rate: unknown flag"),
    ("--max_iters 0", "train nothing"),
    ("--out ''", "--out: is empty"), ("--config ''", "--config: is empty"),
    ("--out file", "'file'"), ("--out {long}", "too long"), ("--resume", "--out"),
    ("--resume --config x.json --out x", "--config"), ("--config nothing", "nothing: no such file"),
    ("--resume --init_from {run} --out {run}", "--init_from"),
    ("--resume --overwrite --out {run}", "contradict"), ("--repeat 1:999999999999", "--repeat"),
    ("--resume --out {run} --n_embd 64", "n_embd 32 there"),
    ("--resume --out {run} --batch_size 8", "--batch_size 8"), ("--residual x", "choose from"),
    ("WORLD_SIZE=2 --grad_accum 2 --batch_size 6", "multiple of grad_accum x processes = 4"),
    ("--n_layer 1000000000", "--n_layer"), ("--repeat 1-2:999", "--repeat 1-2:999")]

@pytest.mark.parametrize("line, words", REFUSED, ids=[line for line, _ in REFUSED])
def test_refusals(data, finished, tmp_path, monkeypatch, line, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    given, before = shlex.split(line.format(run=finished, long="x" * 300)), content(finished)
    while given and "=" in given[0]:
        monkeypatch.setenv(*given.pop(0).split("="))
    base = [] if "--resume" in given else ["--data", data, *SIZE]
    assert words in refused(*base, *given)
    assert content(finished) == before and [path.name for path in tmp_path.iterdir()] == ["file"]

def test_other_refusals():
    with pytest.raises(SystemExit, match="--n_layer.*\n.*--lr.*\n.*--warmup"):
        train.main(["--lr", "-1", "--warmup", "2", "--n_layer", "0"])
    if not torch.cuda.is_available():
        assert "--device cpu" in refused("--device", "cuda")
    # What was misspelt is told before what is missing.
    assert "did you mean --skip_below?" in refused("--skip_belo", 1, call=sample.main)
    assert "required: run" in refused("--skip_below", 1, call=sample.main)
    assert "did you mean --table?" in refused("--tabel", 3, call=prepare.main)

def edited(change):
    """A function of a path, which changes what torch or json reads there."""
    def edit(path):
        is_json = path.suffix == ".json"
        values = json.loads(path.read_text()) if is_json else torch.load(path, weights_only=True)
        change(values)
        path.write_text(json.dumps(values)) if is_json else torch.save(values, path)
    return edit

def flip_a_bit(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)

class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)

BROKEN = {   # a file and what is wrong with it -> how that comes about
    "config.json gone": Path.unlink,
    "config.json half": lambda path: os.truncate(path, 100),
    "ckpt.pt gone": Path.unlink,
    "ckpt.pt half": lambda path: os.truncate(path, 1000),
    "ckpt.pt a bit": flip_a_bit,
    "ckpt.pt code": edited(lambda c: c.update(evil=Evil())),
    "ckpt.pt a weight gone": edited(lambda c: c["model"].pop("wte.weight")),
    "ckpt.pt shape": edited(lambda c: c["model"].update({"wte.weight": torch.zeros(2, 2)}))}

@pytest.mark.parametrize("what", BROKEN)
def test_broken_run_folders(copy, monkeypatch, what):
    """One sentence, nothing overwritten, no code run"""
    monkeypatch.chdir(copy.parent)
    name = what.split()[0]
    BROKEN[what](copy / name)
    before = content(copy)
    assert name in refused("--out", copy, "--resume", "--max_iters", 20)
    assert name in refused(call=lambda words: runs.open_run(copy))
    assert content(copy) == before and not Path("evil").exists()

@pytest.mark.parametrize("flag, name, words", [
    ("--residual", "mine:power=1", "no option 'power'"), ("--residual", "mine", "choose from pre"),
    ("--mod", "mine", "choose from all")])
def test_a_class_that_has_gone(data, tmp_path, monkeypatch, flag, name, words):
    """... or has other options than when somebody's run was trained"""
    run, registry = tmp_path / "run", model_file.RESIDUALS
    if flag == "--mod":
        registry = model_file.DECIDERS
    with monkeypatch.context() as patch:
        patch.setitem(registry, "mine", registry["coins" if flag == "--mod" else "nag"])
        go(data, run, flag, name, "--max_iters", 1)
    if ":" in name:
        monkeypatch.setitem(registry, "mine", registry["pre"])
    for call in (lambda words: runs.open_run(run), lambda words: resume(run),
                 lambda words: train.main(["--config", str(run)])):
        sentence = refused(call=call)
        assert f"{flag} mine" in sentence and words in sentence

def test_a_run_of_the_third_edition(copy):
    """A sentence says what reads it."""
    shutil.copytree(copy, copy.parent / "third")
    edited(lambda c: c.update(mod_rate=0.0))(copy.parent / "third/config.json")
    edited(lambda c: c["model_config"].update(mod_rate=0.0))(copy.parent / "third/ckpt.pt")
    assert "git checkout 7cf98d5" in refused("--out", copy.parent / "third", "--resume")
    assert "git checkout 7cf98d5" in refused(call=lambda words: runs.open_run(copy.parent / "third"))
    # This edition has had more in its checkpoints, and fewer flags.
    edited(lambda c: c["model_config"].pop("gain_cost"))(copy / "ckpt.pt")
    edited(lambda c: c.update(best_loss=1.0))(copy / "ckpt.pt")
    assert resume(copy, "--max_iters", 9) == 0 and load(copy)["step"] == 9

def test_help(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    text = capsys.readouterr().out
    for config in GPTConfig, train.TrainConfig:
        for name, field in config.__dataclass_fields__.items():   # Every number has a range.
            is_number = field.type in (int, float)
            assert re.search(rf"--{name} \S+\s+\[" if is_number else f"--{name}", text), name
    assert "(default )" not in text and "(default None)" not in text and "(default 0.02)" in text
    titles = "skipping", "run", "optimizer", "machine", "residuals, with their options"
    places = [text.index(f"\n{title}:") for title in titles]
    assert places == sorted(places) and text.index("  --residual") < text.index("  --n_head")
    assert all(f"\n  {name}" in text for name in RESIDUALS) and "\n  hyper:kind=lite,n=4" in text
