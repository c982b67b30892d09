"""train.py and runs.py on real, tiny runs: what they leave, exact resume, several processes, refusals."""
import fcntl, json, math, multiprocessing, os, re, resource, runpy, shlex, shutil, signal, socket, subprocess
import sys, time
from pathlib import Path
from unittest.mock import Mock
import numpy as np
import analyze, flags, prepare, processes, pytest, runs, sample, torch, train
from conftest import ROOT, TINY
from model import GPT, GPTConfig, RESIDUALS, ByFunction, REMOVED, flops_per_token

# On CPUs, because a process that has used CUDA can't be forked.
SIZE = ("--device cpu --n_layer 2 --n_embd 32 --n_head 2 --block_size 32 --batch_size 4 --eval_windows 8 "
        "--seed 5 --optimizer adamw --lr 6e-3").split()
LONG = "--max_iters", "99999", "--eval_interval", "99999"
HALF = runs.UNFINISHED + "*"

@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text("".join(f"line {i}: {i * i} = {i} * {i}\n" for i in range(3000)))
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
    with pytest.raises(SystemExit) as refusal:
        call([str(word) for word in words])
    sentence = str(refusal.value)
    assert len(sentence.splitlines()) == 1 and len(sentence) > 20 and "\x1b" not in sentence, sentence
    return sentence

def metrics(run):
    """What must be equal in two runs: all but the speed"""
    return {step: {key: value for key, value in entry.items() if key != "tok_s"}
            for step, entry in sorted(runs.read_metrics(run).items())}

def losses(run):
    return [entry for entry in metrics(run).values() if "loss" in entry]

def load(run, which="ckpt.pt"):
    return torch.load(run / which, weights_only=True)

def same_run(a, b):
    assert metrics(a) == metrics(b)
    for which in "ckpt.pt", "best.pt":
        x, y = load(a, which), load(b, which)
        assert x["step"] == y["step"] and x["flops"] == y["flops"]
        for name in x["model"]:
            assert torch.equal(x["model"][name], y["model"][name]), (which, name)

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
    """`python train.py WORDS`, without importing torch again. log: a path without an ending"""
    process = multiprocessing.get_context("fork").Process(target=child, args=(words, log, stdout, env))
    process.start()
    return process

def start_two(tmp_path, *words):
    with socket.create_server(("localhost", 0)) as s:
        port = s.getsockname()[1]
    return [start(tmp_path / f"process{rank}", *words, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
                  MASTER_ADDR="localhost", MASTER_PORT=str(port)) for rank in range(2)]

def wait(*processes):
    for process in processes:
        process.join(60)
        process.kill()
    return [process.exitcode for process in processes]

def test_a_run_in_default_folders_and_its_replay(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "main", lambda argv: shutil.copytree(data, argv[-1]))
    flags = "--residual hyper:n=2 --max_tokens 6399 --log_interval 10 --eval_interval 30 --vocab_size 1"
    assert train.main([*SIZE, *flags.split()]) == 0
    run = Path("runs/hyper-n2")
    entries = metrics(run)
    assert list(entries) == [0, 10, 20, 30, 40, 50]
    assert [step for step in entries if "val_loss" in entries[step]] == [0, 30, 50]
    assert entries[50]["loss"] < entries[10]["loss"] - 0.3 and entries[50]["tokens"] == 50 * 4 * 32
    assert entries[50]["val_bpb"] == pytest.approx(entries[50]["val_loss"] / math.log(2), rel=0.02)   # bytes
    assert entries[50].keys() >= {"lr", "grad_norm", "flops", "skip_rate", "val_skip_rate"}
    assert runs.read_metrics(run)[50]["tok_s"] > 0
    assert {*content(run)} == {"config.json", "metrics.jsonl", "ckpt.pt", "best.pt", "lock"}
    assert "sample.py" in capsys.readouterr().out.splitlines()[-1]
    config = json.loads((run / "config.json").read_text())
    assert config["tokenizer"] == "bytes" and config["vocab_size"] == 320   # a multiple of 64
    assert not {"resume", "overwrite", "config"} & config.keys()
    assert "out" not in train.defaults_for(dict(config=run / "config.json"))
    # Other data may have fewer tokens.
    assert "vocab_size" not in train.defaults_for(dict(config=run / "config.json", data="data/other"))
    assert train.main(["--config", str(run / "config.json"), "--out", str(tmp_path / "replay")]) == 0
    same_run(run, tmp_path / "replay")
    model, found = runs.open_run(run, which="best.pt")
    assert found.items() <= config.items() and "tokenizer" in found and not model.training
    best = min(entry["val_loss"] for entry in entries.values() if "val_loss" in entry)
    nats = train.evaluate(model, *prepare.val_windows(data, 32, 8), torch.ones(320), 4)[0]
    assert nats == pytest.approx(best, rel=1e-6)
    before = content(run)
    assert "beyond the end" in refused("--out", run, "--resume", "--max_iters", 4) and content(run) == before
    assert resume(run) == 0 and max(metrics(run)) == 50   # Nothing is left to do.

def test_batches_depend_on_seed_and_step_only(data):
    meta = prepare.load_meta(data)
    def batches(n_parts=1, step=3, seed=1):
        config = train.TrainConfig(data=str(data), batch_size=12, eval_windows=2)
        made = train.Data(meta, GPTConfig(**TINY | dict(block_size=8, vocab_size=320, seed=seed)), config, n_parts)
        made.shards = [np.arange(100, 200, dtype=np.uint16), np.arange(220, 250, dtype=np.uint16)]
        return [made.batch(step, part) for part in range(n_parts)]
    (x, y), = batches()
    parts = [x for x, _ in batches(4)]
    assert torch.equal(torch.cat(parts), x) and torch.equal(y[:, :-1], x[:, 1:]) and x.shape == (12, 8)
    assert (x.diff(dim=1) == 1).all() and (y - x == 1).all()   # No window crosses from a shard to the next.
    assert not torch.equal(x, batches(step=4)[0][0]) and not torch.equal(x, batches(seed=2)[0][0])

def test_evaluate():
    model, rng = GPT(GPTConfig(**TINY)), torch.Generator().manual_seed(0)
    x, y = torch.randint(64, (2, 5, 16), generator=rng)
    sizes = torch.arange(64)
    nats, bpb, skipped = train.evaluate(model, x, y, sizes, 2)   # 2 + 2 + 1 windows
    wanted = model(x, y)[1].item()
    assert nats == pytest.approx(wanted, rel=1e-6) and skipped == 0 and model.training
    assert bpb == pytest.approx(wanted * 80 / math.log(2) / sizes[y].sum().item(), rel=1e-6)
    quarter = (torch.arange(16) < 4).expand(5, 16)
    def decide(l, residual, stream):   # Sublayer 1 is removed; a quarter of the tokens run the third.
        return {1: REMOVED, 3: quarter[:len(stream)]}.get(l), None
    assert train.evaluate(model, x, y, sizes, 2, ByFunction(decide))[2] == pytest.approx(0.75 / 5)

def test_steps_by_hand(data, tmp_path):
    """Weights - lr x clipped gradients, and nothing else. The blocks' norms are summed, before clipping."""
    flags = "--optimizer sgd --beta1 0 --weight_decay 0 --lr 0.5 --warmup 0.5 --min_lr 1 --grad_clip 0.25"
    go(data, tmp_path, *flags.split(), "--grad_accum", 2, "--max_iters", 6)
    ckpt, sums = load(tmp_path), torch.zeros(2)
    model = GPT(GPTConfig(**ckpt["model_config"]))
    batches = train.Data(prepare.load_meta(data), model.config, train.TrainConfig(data=str(data), batch_size=4), 1)
    for step in range(6):
        model.zero_grad()
        model(*batches.batch(step, part=0))[1].backward()
        sums += torch.tensor([torch.nn.utils.get_total_norm(p.grad for p in block.parameters())
                              for block in model.blocks])
        norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.5 * min(1, (step + 1) / 3) * p.grad * min(1, 0.25 / norm)
    for name, weight in ckpt["model"].items():
        assert torch.allclose(weight, model.state_dict()[name], atol=1e-5), name
    assert torch.allclose(ckpt["grad_norms"].float(), sums, rtol=1e-4)
    assert ckpt["grad_norms"].tolist() == metrics(tmp_path)[6]["grad_norms"]

def test_muon_is_torchs(monkeypatch):
    """but for the precision of its products"""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)   # torch's products, in float32
    def trained(optimizer):
        rng = torch.Generator().manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(shape, generator=rng)) for shape in ((6, 4), (4, 6), (5, 5))]
        optimizer = optimizer(weights)
        for step in range(4):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=rng)
            optimizer.step()
        return weights
    ours = trained(lambda weights: train.Muon([dict(params=weights, weight_decay=0.1)], 0.02))
    torchs = trained(lambda weights: torch.optim.Muon(weights, 0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    for a, b in zip(ours, torchs):
        assert torch.allclose(a, b, atol=1e-5)

def test_each_log_has_a_speed(data, tmp_path):
    """also that of the first step, and of a step right after a resume"""
    go(data, tmp_path, "--max_iters", 2, "--log_interval", 1)
    resume(tmp_path, "--max_iters", 3)
    speeds = [entry["tok_s"] for entry in runs.read_metrics(tmp_path).values() if "tok_s" in entry]
    assert len(speeds) == 3 and min(speeds) > 0

def test_infinite_gradients_are_not_saved(data, tmp_path, monkeypatch):
    """Clipping makes them zeros, so the weights stay finite, but --resume would refuse such a checkpoint."""
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda grads: torch.tensor(math.inf))
    assert "not finite" in refused("--data", data, *SIZE, "--out", tmp_path / "run", "--max_iters", 4)
    assert load(tmp_path / "run")["step"] == 0

def test_equalized_gradients(data, tmp_path):
    grads = [[torch.randn(3, 2), torch.randn(4)], [torch.randn(5) * 100], [torch.zeros(2)]]
    norms = torch.stack([torch.nn.utils.get_total_norm(each) for each in grads])
    train.equalize(grads, norms)
    after = torch.stack([torch.nn.utils.get_total_norm(each) for each in grads])
    assert torch.allclose(after[:2], norms.square().mean().sqrt().expand(2)) and after[2] == 0
    for name, flag in ("plain", []), ("equal", ["--equalize_grads"]):   # The flag does it.
        go(data, tmp_path / name, "--max_iters", 3, "--log_interval", 1, "--optimizer", "sgd", "--lr", 1, *flag)
    plain, equal = losses(tmp_path / "plain"), losses(tmp_path / "equal")
    assert plain[0]["loss"] == equal[0]["loss"] and plain[2]["loss"] != equal[2]["loss"]

@pytest.mark.parametrize("flags", ["--mod router --mod_rate 0.25", "--layer_drop 0.4", "--mod random --mod_rate 0.4"])
def test_executed_flops_end_a_run(data, tmp_path, monkeypatch, flags):
    seeds, manual_seed = [], torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(seed) or manual_seed(seed))
    go(data, tmp_path, *flags.split(), "--max_flops", 3e8, "--log_interval", 1, "--grad_accum", 2)
    entries, model = losses(tmp_path), runs.open_run(tmp_path)[0]
    coins = seeds[-2 * len(entries):]   # other ones in each step and in each part of a batch
    assert len({*coins}) == len(coins) > 4
    spent, dense = [0, *(entry["flops"] for entry in entries)], 3 * 128 * flops_per_token(model)
    assert spent[-2] < 3e8 <= spent[-1] == load(tmp_path)["flops"]
    for entry, before in zip(entries, spent):   # Where tokens skip, a step costs less.
        assert (entry["flops"] - before < 0.97 * dense) == (entry["skip_rate"] > 0.1)
    assert entries[-1]["skip_rate"] > 0.1 and entries[-1]["lr"] < 1.3 * 0.1 * 6e-3   # The schedule ends, too.
    assert resume(tmp_path) == 0 and losses(tmp_path) == entries   # Nothing is left to do.

def test_coins_are_the_same_each_time(data, tmp_path, capsys):
    """... in evaluate, sample.py and analyze.py, whatever was drawn before"""
    go(data, tmp_path / "run", "--residual", "nag", "--mod", "random", "--mod_rate", 0.4, "--max_iters", 2)
    found = []
    for seed, only in (1, "skip_share"), (2, "update,skip_share"):
        model, _ = runs.open_run(tmp_path / "run")
        x = torch.arange(8 * 32).view(8, 32) % 200
        torch.manual_seed(seed)
        found.append(train.evaluate(model, x, x, torch.ones(len(model.wte.weight)), 4))
        capsys.readouterr()
        torch.manual_seed(seed)
        sample.main([str(tmp_path / "run"), "--max_new_tokens", "30", "--device", "cpu"])
        found.append(re.search(r"[\d.]+% of the sublayer runs skipped", capsys.readouterr().err)[0])
        analyze.main([str(tmp_path / "run"), "--only", only, "--out", str(tmp_path / "out")])
        found.append(json.loads((tmp_path / "out/numbers.json").read_text())["statistics"]["skip_share"])
    assert found[:3] == found[3:] and found[0][2] > 0.2

def test_defaults_on_a_gpu(monkeypatch):
    monkeypatch.setattr(train, "pick_device", lambda name: "cuda")
    def size(*given):
        gpt, config = flags.parse((GPTConfig, train.TrainConfig), given, defaults=train.defaults_for)
        return [gpt.n_embd, config.batch_size, gpt.block_size, config.grad_accum, config.max_iters]
    assert size() == [768, 512, 1024, 8, 2000] and size("--batch_size", "64") == [768, 64, 1024, 8, 2000]
    assert size("--n_layer", "6") == [128, 16, 128, 1, 420]   # another model: the small defaults
    assert size("--max_tokens", "1e6")[-1] == 0

def test_an_optimizer_brings_its_rate():
    def rate(*given):
        return flags.parse((train.TrainConfig,), given, defaults=train.defaults_for)[0].lr
    assert [rate("--optimizer", name) for name in ("muon", "adamw", "sgd")] == [0.02, 0.006, 0.1]
    assert rate() == 0.02 and rate("--optimizer", "adamw", "--lr", "0.5") == 0.5

def test_an_optimizer_typed_again_changes_nothing(copy):
    assert train.defaults_for(dict(resume=True, out=str(copy), optimizer="adamw"))["lr"] == 0.006
    edited(lambda config: config.update(lr=0.5))(copy / "config.json")
    for given in dict(resume=True, out=str(copy)), dict(config=str(copy / "config.json")):
        assert train.defaults_for(given | dict(optimizer="adamw"))["lr"] == 0.5
    assert train.defaults_for(given | dict(optimizer="sgd"))["lr"] == 0.1
    # Moments are of one optimizer, so a run that is resumed keeps it.
    assert "--optimizer sgd" in refused("--out", copy, "--resume", "--optimizer", "sgd")
    assert "--eval_windows 9" in refused("--out", copy, "--resume", "--eval_windows", 9)

@pytest.mark.parametrize("schedule, shares", [   # at which part of the run
    ("cosine", {0.05: 0.5, 0.1: 1, 0.325: 0.868, 0.55: 0.55, 0.9: 0.127, 1: 0.1, 1.01: 0.1}),
    ("wsd", {0.05: 0.5, 0.1: 1, 0.325: 1, 0.55: 1, 0.8: 1, 0.9: 0.55, 1: 0.1, 1.01: 0.055})])
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
    names = {p: name for name, p in model.named_parameters()}
    own = {id(getattr(r, name)) for r in model.residuals() for name in r.own_lr if hasattr(r, name)}
    assert bool(own) == (residual in ("nag", "attnres"))   # Others do best at the rate of everything else.
    for optimizer in "adamw", "sgd", "muon":
        made = train.make_optimizers(model, train.TrainConfig(optimizer=optimizer, gate_lr=5e-4))
        groups = [group for each in made for group in each.param_groups]
        for group in groups:
            for p in group["params"]:
                decays = p.dim() >= 2 and id(p) not in own
                assert group["weight_decay"] == (0.1 if decays else 0), names[p]
                assert group["peak_lr"] == (5e-4 if id(p) in own else 2e-2)
    taken = {names[p] for p in made[1].param_groups[0]["params"]}   # by Muon
    assert taken >= {name for name in names.values() if re.search("c_(attn|fc|proj).weight$", name)}
    assert all(name.startswith("blocks.") for name in taken)

@pytest.mark.parametrize("flags", ["--checkpoint_blocks", pytest.param(
    "--compile --checkpoint_blocks", marks=[pytest.mark.slow, pytest.mark.skipif(
        not shutil.which("g++"), reason="torch.compile needs a C++ compiler here")])])
def test_checkpointed_and_compiled_runs(data, tmp_path, monkeypatch, flags):
    calls = []
    for name in "checkpoint_blocks", "compile_blocks":
        switch = getattr(train, name)
        monkeypatch.setattr(train, name, lambda model, switch=switch: calls.append(model) or switch(model))
    for name, more in ("plain", []), ("switched", flags.split()):
        go(data, tmp_path / name, "--layer_drop", 0.3, "--max_iters", 4, "--log_interval", 1, *more)
    plain, switched = ([entry["loss"] for entry in losses(tmp_path / name)] for name in ("plain", "switched"))
    assert switched == pytest.approx(plain, rel=1e-4) and len(calls) == len(flags.split())

@pytest.mark.parametrize("number, flags", [
    (signal.SIGHUP, "--residual nag:warmup=0.1 --mod_rate 0.6 --grad_accum 2"),
    (signal.SIGINT, "--residual ngpt --optimizer muon --schedule wsd"),
    (signal.SIGTERM, "--residual layerscale --layer_drop 0.3"),
    (signal.SIGTERM, "--residual nag --mod random --mod_rate 0.3"),
    (signal.SIGINT, "--residual hyper --optimizer sgd --lr 0.1"),
    (signal.SIGTERM, "--residual skipinit --mod router --mod_rate 0.25")])
def test_resume_after_a_signal_is_bit_identical(data, tmp_path, monkeypatch, capsys, number, flags):
    flags = [*flags.split(), "--max_iters", 24, "--log_interval", 3, "--eval_interval", 10]
    assert go(data, tmp_path / "whole", *flags) == 0
    before_step, calls = GPT.before_step, []
    def interrupted(self, progress):   # at the thirteenth step
        calls.append(progress)
        if len(calls) == 13:
            signal.raise_signal(number)
        before_step(self, progress)
    monkeypatch.setattr(GPT, "before_step", interrupted)
    assert go(data, tmp_path / "parts", *flags) == 128 + number
    assert load(tmp_path / "parts")["step"] == 12 and "--resume" in capsys.readouterr().out.splitlines()[-1]
    assert calls == [pytest.approx((step + 1) / 24) for step in range(13)]
    assert resume(tmp_path / "parts") == 0
    same_run(tmp_path / "whole", tmp_path / "parts")
    assert "--mod_rate" not in flags or losses(tmp_path / "parts")[-1]["skip_rate"] > 0.1

def test_kill_9(data, tmp_path):
    """... while the n-th file is written: config.json, metrics.jsonl, ckpt.pt and best.pt of steps 0, 10 and 20"""
    flags = "--residual nag:warmup=0.9 --max_iters 20 --log_interval 5 --eval_interval 10".split()
    go(data, tmp_path / "whole", *flags)
    for n in range(2, 9):   # Before the first one is there, nothing says that the folder is a run's.
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
        assert go(data, run, *flags, *["--resume"] * (n > 3)) == 0 and not any(run.glob(HALF))
        same_run(tmp_path / "whole", run)

def test_a_finished_run_that_is_extended(data, tmp_path, monkeypatch):
    """Its end was no multiple of eval_interval. Who had the lowest validation loss stays the best."""
    nats = iter([5, 3, 4, 3.5, 3.2, 3.2, 2])   # at steps 0, 10, 20, 25; 30; 30, 34
    monkeypatch.setattr(train, "evaluate", lambda *args: (next(nats), 1.0, 0.0))
    go(data, tmp_path, "--max_iters", 25, "--eval_interval", 10)
    assert load(tmp_path, "best.pt")["step"] == 10 and load(tmp_path)["step"] == 25
    resume(tmp_path, "--max_iters", 30)
    assert load(tmp_path, "best.pt")["step"] == 10
    before = load(tmp_path)["model"]
    resume(tmp_path, "--max_iters", 34, "--lr", 0, "--gate_lr", 0)
    assert load(tmp_path, "best.pt")["step"] == 34
    assert all(torch.equal(weight, before[name]) for name, weight in load(tmp_path)["model"].items())

def test_resume_on_another_machine_after_a_crash(copy):
    """... without kernels. A torn line is cut. Moments of one number, expanded, would crash fused code."""
    lie = edited(lambda c: moments(c).update(exp_avg=torch.zeros(1).expand(moments(c)["exp_avg"].shape)))
    lie(copy / "ckpt.pt")
    path = copy / "metrics.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + b'{"step": 9, "loss": 0.0\0\0')
    assert resume(copy, "--max_iters", 12, "--log_interval", 1, "--kernels", "off") == 0
    assert runs.open_run(copy)[0].config.kernels == "auto"
    assert path.read_bytes().startswith(before + b'{"step": 8, "val_loss": ')
    assert metrics(copy)[9]["loss"] > 0.1
    lines = ['{"step": 1, "loss": 5}', "not ours", "[1]", '{"loss": 2}', '{"step": 2, "loss": "x"}',
             "[" * 99999, '{"step": 1, "loss": 4}', '{"step": 1, "val_loss": 3, "grad_norms": [1, 2]}',
             '{"step": 3, "lo']
    path.write_text("\n".join(lines))
    assert runs.read_metrics(copy) == {1: dict(step=1, loss=4, val_loss=3, grad_norms=[1, 2])}

def test_nothing_that_is_not_finite_is_saved(data, tmp_path, monkeypatch):
    """A weight gets infinite in step 8: a status line finds it in the ninth, a checkpoint at once."""
    after_step, calls = GPT.after_step, []
    def poisons(self, ran):
        calls.append(ran)
        after_step(self, ran)
        if len(calls) == 8:
            self.blocks[1].mlp.c_proj.weight.data[0, 0] = math.inf
    monkeypatch.setattr(GPT, "after_step", poisons)
    for run, log, pause, step in (tmp_path / "log", 3, 100, 9), (tmp_path / "pause", 100, 4, 8):
        calls.clear()
        with pytest.raises(SystemExit, match=f"iteration {step}: loss.*ckpt.pt.*--lr"):
            go(data, run, "--max_iters", 12, "--log_interval", log, "--eval_interval", pause)
    assert load(run)["step"] == 4 and resume(run) == 0 and metrics(run)[12]["val_loss"] > 0
    monkeypatch.setattr(train, "evaluate", lambda *args: (math.nan, 1.0, 0.0))
    with pytest.raises(SystemExit, match="iteration 12: validation loss nan.*best.pt"):
        resume(run, "--max_iters", 16)

def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A full disk and Ctrl-C keep the old file."""
    folder = runs.RunFolder(tmp_path, dict(n_layer=2))
    folder.begin(0)
    path, order, fsync, replace = tmp_path / "file", [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: order.append(os.stat(file).st_size) or fsync(file))
    monkeypatch.setattr(os, "replace", lambda *paths: order.append("replace") or replace(*paths))
    runs.write_file(path, lambda f: f.write(b"old"))
    assert order == [3, "replace"] and path.stat().st_mode & 0o777 == 0o666 & ~0o22
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        for write in (lambda f: f.write(bytes(9999))), (lambda f: torch.save(torch.zeros(9999), f)):
            with pytest.raises(SystemExit, match="file: can't be written"):
                runs.write_file(path, write)
        with pytest.raises(SystemExit, match="metrics.jsonl: can't be written"):
            folder.log(step=0, grad_norms=[0.5] * 999)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        folder.close()
    with pytest.raises(KeyboardInterrupt):
        runs.write_file(path, lambda f: f.write(b"half") and signal.raise_signal(signal.SIGINT))
    assert {*content(tmp_path)} == {"file", "lock", "config.json", "metrics.jsonl"}
    assert path.read_bytes() == b"old"

@pytest.mark.parametrize("name", ["lock", "metrics.jsonl"])
def test_links_in_a_run_folder_are_not_followed(copy, tmp_path, name):
    """A run folder that was downloaded could have them, to any file of the user."""
    mine = tmp_path / "bashrc"
    mine.write_text("mine")
    for link in copy / name, copy / "best.pt":
        link.unlink()
        link.symlink_to(mine)
    if name == "lock":   # The others are replaced, as files that were not there.
        assert "can't be written" in refused("--out", copy, "--resume", "--max_iters", 12)
        (copy / name).unlink()
    assert resume(copy, "--max_iters", 12) == 0 and not (copy / "best.pt").is_symlink()
    assert not (copy / name).is_symlink()
    assert mine.read_text() == "mine"

def test_two_runs_in_one_folder(data, copy, monkeypatch):
    with open(copy / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)   # A lock that others share would not be noticed.
        before = content(copy)
        for flags in ["--resume"], ["--overwrite"]:
            assert "another process" in refused("--data", data, *SIZE, "--out", copy, *flags)
        assert content(copy) == before
    assert resume(copy) == 0
    assert go(data, copy, "--overwrite", "--max_iters", 3) == 0   # The lock is free again after each.
    assert list(metrics(copy)) == [0, 3] and load(copy)["step"] == load(copy, "best.pt")["step"] == 3
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError("a file system without locks")))
    assert resume(copy) == 0

def test_overwrite_leaves_no_best_of_the_old_run(data, copy, monkeypatch):
    """Not even if the new one is stopped before its first evaluation."""
    monkeypatch.setattr(GPT, "before_step", lambda self, progress: signal.raise_signal(signal.SIGTERM))
    assert go(data, copy, "--overwrite", "--max_iters", 3) == 128 + signal.SIGTERM
    assert load(copy)["step"] == 0 and not (copy / "best.pt").exists()

def test_a_line_without_its_end_is_none(copy):
    """A crash cut it just before its newline: what is appended must not land on the same line."""
    path = copy / "metrics.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + b'{"step": 8, "loss": 1.0}')
    assert "loss" not in metrics(copy)[8]
    assert resume(copy, "--max_iters", 9) == 0
    assert path.read_bytes().startswith(before + b'{"step": 8, "val_loss": ')

def test_what_a_new_run_may_find(data, tmp_path):
    """A folder that holds anything is refused, unless by a run that ended before its first checkpoint."""
    run, flags = tmp_path / "run", ["--max_iters", 2, "--eval_interval", 1]
    go(data, run, *flags)
    whole = content(run)
    early = {"config.json": whole["config.json"], "lock": b"", HALF[:-1]: b"half",
             "metrics.jsonl": whole["metrics.jsonl"].splitlines(keepends=True)[0]}
    other = whole["config.json"].replace(b'"lr": 0.006', b'"lr": 0.1')
    def put(files):
        shutil.rmtree(run)
        run.mkdir()
        for name, raw in files.items():
            (run / name).write_bytes(raw)
    for held in (whole, {"notes": b"mine"}, early | {"config.json": b"{}"}, early | {"config.json": other},
                 early | {"best.pt": b""}, early | {"metrics.jsonl": whole["metrics.jsonl"]}):
        put(held)
        sentence = refused("--data", data, *SIZE, "--out", run, *flags)
        what = "holds a run already" if held is whole else "holds files, and is no run folder"
        what = what if held is whole or b"tokenizer" not in held.get("config.json", b"") else "without a checkpoint"
        assert what in sentence and content(run) == held
    for free in early, {}, {"lock": b""}:
        put(free)
        assert go(data, run, *flags) == 0 and not any(run.glob(HALF))
    (run / "notes").write_text("mine")
    assert go(data, run, *flags, "--overwrite") == 0 and (run / "notes").exists()

def test_other_data(data, copy, tmp_path):
    other = Path(shutil.copytree(data, tmp_path / "other"))
    assert resume(copy, "--data", other, "--max_iters", 9) == 0   # The same data elsewhere is the same.
    header = np.array([prepare.MAGIC, prepare.VERSION, 900] + 253 * [0], "<i4").tobytes()
    (other / "train_000000.bin").write_bytes(header + np.full(900, 257, "<u2").tobytes())
    before = content(copy)
    assert "other data" in refused("--out", copy, "--resume", "--data", other, "--max_iters", 12)
    assert content(copy) == before
    for flags in ["--out", tmp_path / "new"], ["--out", copy, "--overwrite"]:
        assert "beyond the 257" in refused("--data", other, *SIZE, *flags, "--max_iters", 2)
    assert content(copy) == before   # A run is not replaced by one that can't begin.

def test_a_dead_stdout_ends_no_run(data, tmp_path):
    run = tmp_path / "Läufe"   # which its terminal can't write
    words = ["--data", data, *SIZE, "--out", run, "--max_iters", 6]
    process = start(tmp_path / "log", *words, stdout="/dev/full")
    assert wait(process) == [0] and max(metrics(run)) == 6 and (tmp_path / "log.err").read_text() == ""

def test_a_second_signal_ends_a_run_at_once_and_nohup_is_heard():
    with pytest.raises(SystemExit, match="^130$"):   # as does the first, before the training
        flags.start(lambda: signal.raise_signal(signal.SIGINT))
    signals = processes.note_signals()
    signal.raise_signal(signal.SIGHUP)
    assert signals == [signal.SIGHUP]
    with pytest.raises(SystemExit, match="^143$"):
        signal.raise_signal(signal.SIGTERM)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)   # nohup
    processes.note_signals()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

@pytest.mark.parametrize("flags, tolerance", [
    ("--residual nag --mod_rate 0.5", 2e-3),   # A gain may fall on either side of the threshold.
    ("--layer_drop 0.4", 1e-4),
    ("--mod router --mod_rate 0.25", 1e-5),   # Equal weights are ordered by position.
    ("--optimizer muon --residual attnres", 2e-2)])
def test_two_processes_train_as_one(data, tmp_path, flags, tolerance):
    """Four parts of a batch, in one process or in two: the same coins and thresholds, the same losses"""
    flags = [*flags.split(), "--batch_size", 8, "--max_iters", 15, "--log_interval", 1, "--eval_interval", 7]
    two = start_two(tmp_path, "--data", data, *SIZE, "--out", tmp_path / "two", *flags, "--grad_accum", 2)
    assert go(data, tmp_path / "one", *flags, "--grad_accum", 4) == 0
    assert wait(*two) == [0, 0], (tmp_path / "process0.err").read_text()
    assert (tmp_path / "process1.out").read_text() == ""   # The first one speaks.
    assert (tmp_path / "two/lock").read_bytes() == b""   # and writes
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert one.keys() == two.keys() and (one[15]["skip_rate"] > 0.1) == ("muon" not in flags)
    for step in one:
        for key in one[step]:
            assert one[step][key] == pytest.approx(two[step][key], rel=tolerance, abs=tolerance), (step, key)
    assert resume(tmp_path / "two", "--max_iters", 16, "--grad_accum", 4) == 0   # goes on as one

def test_processes_stop_together(data, tmp_path):
    """A signal to one of them: both leave after the same step, all is saved, the sentence is said once."""
    run = tmp_path / "run"
    two = start_two(tmp_path, "--data", data, *SIZE, "--out", run, *LONG)
    while not (run / "best.pt").exists():
        assert two[0].is_alive()
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(two[1].pid, signal.SIGTERM)
    assert wait(*two) == [128 + signal.SIGTERM] * 2
    assert "--resume" in (tmp_path / "process0.out").read_text()
    begun = load(run)["step"]
    assert resume(run, "--max_iters", begun + 2) == 0 and max(metrics(run)) == begun + 2
    # So do they if one is refused, or if the loss isn't finite; the first one says why.
    with open(run / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert wait(*start_two(tmp_path, "--out", run, "--resume")) == [1, 1]
    says = [(tmp_path / f"process{rank}.err").read_text() for rank in range(2)]
    assert re.fullmatch(".*another process is training there.*\n", says[0])
    assert re.fullmatch("process 1: another process of this run has ended.*\n", says[1])
    flags = "--lr 1e3 --gate_lr 1e3 --weight_decay 1e3 --grad_clip 0 --warmup 0 --log_interval 1"
    two = start_two(tmp_path, "--out", run, "--resume", "--max_iters", begun + 50, *flags.split())
    assert wait(*two) == [1, 1] and load(run)["step"] == begun + 2
    says = [(tmp_path / f"process{rank}.err").read_text() for rank in range(2)]
    assert "lower --lr" in says[0].splitlines()[-1] and says[1].startswith("process 1: ")

@pytest.mark.slow
def test_torchrun(data, tmp_path):
    """The real thing: a run, a signal, and two processes that resume it"""
    run = tmp_path / "run"
    torchrun = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node 2".split(),
                "train.py", "--out", run]
    process = subprocess.Popen([*torchrun, "--data", data, *SIZE, *LONG], cwd=ROOT)
    while not (run / "best.pt").exists():
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    end = load(run)["step"] + 3
    subprocess.run([*torchrun, "--resume", "--max_iters", str(end)], cwd=ROOT, timeout=100)
    assert max(metrics(run)) == end

REFUSED = [   # a command line, perhaps after a variable, and the words that its sentence must have
    ("--n_lay 3", "--n_lay: unknown flag, did you mean --n_layer?"), ("--min_lr 6e-5", "share of --lr"),
    ("--n_layer 4096 --n_embd 65536 --n_head 64", "GB of memory"), ("--batch_size 1000000", "GB of memory"),
    ("--max_iters 5 --max_tokens 10", "--max_iters and --max_tokens"), ("--max_flops 0", "train nothing"),
    ("--out ''", "--out: is empty"), ("--out file", "file: can't"), ("--out {long}", "can't be written"),
    ("--resume", "--out"), ("--resume --config x.json --out x", "--config"), ("RANK=abc", "RANK=abc"),
    ("--resume --overwrite --out {run}", "contradict"), ("--repeat 1:999999999999", "--repeat"),
    ("--resume --out {run} --n_embd 64", "n_embd 32 there"), ("WORLD_SIZE=2", "torchrun"),
    ("WORLD_SIZE=2 RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=abc", "MASTER_PORT=abc"), ("--config ''", "is empty"),
    ("--resume --out {run} --batch_size 8", "--batch_size 8"), ("--residual x\x1b[31m", "x?[31m"),
    ("WORLD_SIZE=2 --grad_accum 2 --batch_size 6", "multiple of grad_accum x processes = 4")]

@pytest.mark.parametrize("line, words", REFUSED, ids=[line for line, _ in REFUSED])
def test_refusals(data, finished, tmp_path, monkeypatch, line, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
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
    assert len(refused("x" * 9999)) < 500
    if not torch.cuda.is_available():
        assert "--device cpu" in refused("--device", "cuda")

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

def moments(ckpt):
    return ckpt["optimizers"][0]["wte.weight"]

BROKEN = {   # a file and what is wrong with it -> how that comes about
    "config.json gone": Path.unlink,
    "config.json deep": lambda path: path.write_text("[" * 99999),
    "config.json unknown, to resume": edited(lambda c: c.update(n_legs=4)),
    "config.json type": edited(lambda c: c.update(batch_size=2.5)),
    "ckpt.pt gone": Path.unlink,
    "ckpt.pt cut": lambda path: os.truncate(path, 1000),
    "ckpt.pt a bit": flip_a_bit,
    "ckpt.pt code": edited(lambda c: c.update(evil=Evil())),
    "ckpt.pt large": edited(lambda c: c["model_config"].update(n_embd=65536)),
    "ckpt.pt deep": edited(lambda c: c["model_config"].update(n_layer=4096)),
    "ckpt.pt shape": edited(lambda c: c["model"].update({"wte.weight": torch.zeros(2, 2)})),
    "ckpt.pt nan": edited(lambda c: c["model"].update({"wte.weight": torch.full((320, 32), math.nan)})),
    "config.json range": edited(lambda c: c.update(eval_windows=-2)),
    "ckpt.pt moments, to resume": edited(lambda c: moments(c).update(exp_avg=torch.zeros(3))),
    "ckpt.pt inf, to resume": edited(lambda c: moments(c)["exp_avg"].fill_(math.inf)),
    "ckpt.pt many, to resume": edited(lambda c: c["optimizers"][0].update({"wte": moments(c)})),
    "ckpt.pt optimizer, to resume": edited(lambda c: c.update(optimizers=[])),
    "ckpt.pt step, to resume": edited(lambda c: c.update(step=-1)),
    "ckpt.pt a step in words, to resume": edited(lambda c: c.update(step="4")),
    "ckpt.pt huge norms, to resume": edited(lambda c: c["grad_norms"].fill_(1e308)),
    "ckpt.pt complex norms, to resume": edited(lambda c: c.update(grad_norms=c["grad_norms"] * 1j)),
    "ckpt.pt norms, to resume": edited(lambda c: c.update(grad_norms=torch.zeros(7)))}

@pytest.mark.parametrize("what", BROKEN)
def test_broken_run_folders(copy, monkeypatch, what):
    """One sentence, nothing overwritten, no code run, no model built that is larger than its file"""
    monkeypatch.chdir(copy.parent)
    BROKEN[what](copy / what.split()[0])
    before = content(copy)
    name = "eval_windows" if "range" in what else what.split()[0]
    assert name in refused("--out", copy, "--resume", "--max_iters", 20)
    if "to resume" not in what:   # Only then is it read.
        sentence = refused(call=lambda words: runs.open_run(copy))
        assert name in sentence
        assert ("larger model" in sentence) == (what in ("ckpt.pt large", "ckpt.pt deep"))
    assert content(copy) == before and not Path("evil").exists()

def test_help(capsys):
    parser, field = flags.Parser(), train.TrainConfig.__dataclass_fields__["lr"]
    flags.add_flag(parser, field, False)
    assert "(default 0.02)" in parser.format_help()
    with pytest.raises(SystemExit):
        flags.parse((train.TrainConfig,), ["--help"])
    assert "residuals, with their options" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        train.main(["--help"])
    text = capsys.readouterr().out
    for config in GPTConfig, train.TrainConfig:
        for name, field in config.__dataclass_fields__.items():   # Every number has a range.
            assert re.search(rf"--{name} \S+\s+\[" if field.type in (int, float) else f"--{name}", text), name
    assert "(default )" not in text and "(default None)" not in text and "(default 0.02)" in text
    titles = "what everyone uses", "optimizer", "machine", "residuals, with their options"
    places = [text.index(f"\n{title}:") for title in titles]
    assert places == sorted(places) and text.index("  --residual") < text.index("  --n_head")
    assert all(f"\n  {name}" in text for name in RESIDUALS) and "\n  hyper:kind=lite,n=4" in text
