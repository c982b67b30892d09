"""train.py on real, tiny runs: what a run leaves, exact resume, several processes, and what is refused."""
import fcntl, json, math, multiprocessing, os, random, re, resource, runpy, shutil, signal, socket, subprocess
import sys, time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

import prepare
import runs
import train
from model import GPT, GPTConfig, RESIDUALS

ROOT = Path(__file__).resolve().parents[1]
SIZE = "--n_layer 2 --n_embd 32 --n_head 2 --block_size 32 --batch_size 4 --eval_windows 8 --seed 5".split()
SMALL = dict(n_layer=2, n_embd=16, n_head=2, block_size=16, vocab_size=64)
LONG = "--max_iters", "99999", "--eval_interval", "99999"
HALF = runs.UNFINISHED + "*"
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP

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

@pytest.fixture(autouse=True)
def handlers():
    """As at a program's start. In the background, a shell has SIGINT ignored."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number in SIGNALS:
        signal.signal(number, before[number])

def go(data, out, *flags):
    """A run in this process -> its exit status"""
    return train.main([str(word) for word in ("--data", data, *SIZE, "--out", out, *flags)])

def resume(out, *flags):
    return train.main([str(word) for word in ("--out", out, "--resume", *flags)])

def refused(*argv):
    """What train.py says when it refuses a command line, in one line"""
    with pytest.raises(SystemExit) as refusal:
        train.main([str(word) for word in argv])
    sentence = str(refusal.value)
    assert len(sentence.splitlines()) == 1 and len(sentence) > 20, sentence
    return sentence

def metrics(run):
    """What must be equal in two runs: all but the speed"""
    entries = runs.read_metrics(run)
    return {step: {key: value for key, value in entries[step].items() if key != "tok_s"}
            for step in sorted(entries)}

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

# ----------------------------------------------------------------------------- programs of their own

server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(["torch", "torch._dynamo", "tiktoken", "triton", "pytest"])

def child(words, stdout, stderr, env):
    os.environ.update(env, OMP_NUM_THREADS="1")
    for number, path in (1, stdout), (2, stderr):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), number)
    sys.stdout = open(1, "w", encoding=env.get("PYTHONIOENCODING"), closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)   # which a shell ignores in the background
    sys.argv = ["train.py", *words]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")

def start(log, *words, stdout=None, **env):
    """`python train.py WORDS` from a server that has imported torch. log: a path without an ending"""
    process = server.Process(target=child, args=([str(word) for word in words], str(stdout or f"{log}.out"),
                                                 f"{log}.err", env))
    process.start()
    return process

def start_two(tmp_path, *words):
    """Two processes, as torchrun would start them"""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    return [start(tmp_path / f"process{rank}", *words, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
                  MASTER_ADDR="localhost", MASTER_PORT=str(port)) for rank in range(2)]

def wait(*processes):
    """-> exit statuses"""
    for process in processes:
        process.join(60)
        if process.is_alive():
            process.kill()
            raise TimeoutError("a process runs on")
    return [process.exitcode for process in processes]

def wait_for(path, process, seconds=60):
    end = time.time() + seconds
    while not path.exists():
        assert process.is_alive() and time.time() < end
        time.sleep(0.005)

# ----------------------------------------------------------------------------- what a run does

def test_a_run_and_its_replay(data, tmp_path, capsys):
    run = tmp_path / "run"
    assert go(data, run, "--residual", "hyper:n=2", "--max_iters", 50, "--log_interval", 10,
              "--eval_interval", 30) == 0
    entries = metrics(run)
    assert list(entries) == [0, 10, 20, 30, 40, 50]
    assert [step for step in entries if "val_loss" in entries[step]] == [0, 30, 50]
    assert entries[50]["loss"] < entries[10]["loss"] - 0.3 and entries[50]["tokens"] == 50 * 4 * 32
    assert entries[50]["val_bpb"] == pytest.approx(entries[50]["val_loss"] / math.log(2), rel=0.02)   # bytes
    assert entries[50].keys() >= {"lr", "grad_norm", "flops", "skip_rate", "val_skip_rate"} and len(
        entries[50]["grad_norms"]) == 2 and runs.read_metrics(run)[50]["tok_s"] > 0
    assert {*content(run)} == {"config.json", "metrics.jsonl", "ckpt.pt", "best.pt", "lock"}
    assert "sample.py" in capsys.readouterr().out.splitlines()[-1]
    config = json.loads((run / "config.json").read_text())
    assert config["residual"] == "hyper:n=2" and config["tokenizer"] == "bytes"
    assert config["vocab_size"] == 320   # 257, rounded up to a multiple of 64
    assert not {"resume", "overwrite", "config"} & config.keys()
    assert train.main(["--config", str(run / "config.json"), "--out", str(tmp_path / "replay")]) == 0
    same_run(run, tmp_path / "replay")
    model, found = train.open_run(run)
    assert found == config and not model.training and model.config.residual == "hyper:n=2"
    best = min(entry["val_loss"] for entry in entries.values() if "val_loss" in entry)
    x, y = prepare.val_windows(data, 32, 8)
    sizes = prepare.token_bytes(prepare.load_meta(data), 320)
    model = train.open_run(run, which="best.pt")[0]
    assert train.evaluate(model, x, y, sizes, 4)[0] == pytest.approx(best, rel=1e-6)

def test_the_default_data_and_folder(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "main", lambda argv: shutil.copytree(data, argv[-1]))
    assert train.main([*SIZE, "--residual", "attnres:block=4", "--max_iters", "1"]) == 0
    assert Path("runs/attnres-block4/ckpt.pt").exists() and Path("data/stdlib/meta.json").exists()

def test_data_order_is_a_pure_function():
    shards = [np.arange(100, 400, dtype=np.uint16), np.arange(1000, 1050, dtype=np.uint16)]
    x, y = train.train_batch(shards, 8, seed=1, step=3, batch_size=12)
    parts = [train.train_batch(shards, 8, 1, 3, 12, part, 4)[0] for part in range(4)]
    assert torch.equal(torch.cat(parts), x) and torch.equal(y[:, :-1], x[:, 1:]) and x.shape == (12, 8)
    assert (x.diff(dim=1) == 1).all() and (y - x == 1).all()   # No window crosses from a shard to the next.
    assert not torch.equal(x, train.train_batch(shards, 8, 1, 4, 12)[0])
    assert not torch.equal(x, train.train_batch(shards, 8, 2, 3, 12)[0])

def test_evaluate():
    model, rng = GPT(GPTConfig(**SMALL)), torch.Generator().manual_seed(0)
    x, y = torch.randint(64, (2, 5, 16), generator=rng)
    sizes = torch.arange(64)
    nats, bpb, skipped = train.evaluate(model, x, y, sizes, 2)   # 2 + 2 + 1 windows
    with torch.no_grad():
        wanted = model(x, y)[1].item()
    assert nats == pytest.approx(wanted, rel=1e-6) and skipped == 0 and model.training
    assert bpb == pytest.approx(wanted * 80 / math.log(2) / sizes[y].sum().item(), rel=1e-6)

    def decide(l, residual, stream):   # Sublayer 1 is removed; the third is run by a quarter of the tokens.
        keep = torch.zeros(x[:len(residual.read(stream))].shape, dtype=torch.bool)
        keep[:, :4] = True
        return {1: (False, None), 3: (keep, None)}.get(l, (None, None))

    assert train.evaluate(model, x, y, sizes, 2, decide)[2] == pytest.approx(0.75 / 3)

def test_grad_norms_are_sums_over_the_steps(data, tmp_path):
    """... of each block's gradient norm, before clipping"""
    go(data, tmp_path / "run", "--max_iters", 2, "--lr", 0, "--gate_lr", 0, "--grad_accum", 2,
       "--grad_clip", 0.1)
    model, wanted = train.open_run(tmp_path / "run")[0].train(), []
    shards = prepare.open_split(data, "train", 32)
    for step in range(2):
        model.zero_grad()
        model(*train.train_batch(shards, 32, 5, step, 4))[1].backward()
        grads = [torch.cat([p.grad.flatten() for p in block.parameters()]) for block in model.blocks]
        wanted.append([grad.norm().item() for grad in grads])
    assert metrics(tmp_path / "run")[2]["grad_norms"] == pytest.approx(np.sum(wanted, 0), rel=1e-4)
    assert load(tmp_path / "run")["grad_norms"].tolist() == metrics(tmp_path / "run")[2]["grad_norms"]

def test_equalized_gradients(data, tmp_path):
    grads = [[torch.randn(3, 2), torch.randn(4)], [torch.randn(5) * 100], [torch.zeros(2)]]
    norms = torch.stack([torch.nn.utils.get_total_norm(each) for each in grads])
    train.equalize(grads, norms)
    after = torch.stack([torch.nn.utils.get_total_norm(each) for each in grads])
    assert torch.allclose(after[:2], norms.square().mean().sqrt().expand(2)) and after[2] == 0
    for name, flag in ("plain", []), ("equal", ["--equalize_grads"]):   # The flag does it.
        go(data, tmp_path / name, "--max_iters", 3, "--log_interval", 1, "--optimizer", "sgd", *flag)
    plain, equal = losses(tmp_path / "plain"), losses(tmp_path / "equal")
    assert plain[0]["loss"] == equal[0]["loss"] and plain[2]["loss"] != equal[2]["loss"]

def test_lengths_of_runs(data, tmp_path):
    go(data, tmp_path / "tokens", "--max_tokens", 1000)
    assert max(metrics(tmp_path / "tokens")) == 8
    step = 3 * train.open_run(tmp_path / "tokens")[0].flops_per_token() * 128
    go(data, tmp_path / "flops", "--max_flops", 2.2 * step, "--log_interval", 1)
    assert max(metrics(tmp_path / "flops")) == 3 and metrics(tmp_path / "flops")[3]["flops"] == 3 * step
    assert train.read_config(tmp_path / "flops/config.json")["max_iters"] == 0   # A typed end replaces it.
    assert resume(tmp_path / "flops") == resume(tmp_path / "tokens", "--max_iters", 4) == 0   # Nothing to do.
    assert max(metrics(tmp_path / "flops")) == 3 and max(metrics(tmp_path / "tokens")) == 8

@pytest.mark.parametrize("flags", ["--mod router --mod_rate 0.25", "--layer_drop 0.4"])
def test_executed_flops_end_a_run(data, tmp_path, flags):
    go(data, tmp_path, *flags.split(), "--max_flops", 3e8, "--log_interval", 1)
    entries, model = losses(tmp_path), train.open_run(tmp_path)[0]
    spent = [0, *(entry["flops"] for entry in entries)]
    assert spent[-2] < 3e8 <= spent[-1] == load(tmp_path)["flops"]
    dense = 3 * 128 * model.flops_per_token()
    for entry, before in zip(entries, spent):   # Where tokens skip, a step costs less.
        assert (entry["flops"] - before < 0.97 * dense) == (entry["skip_rate"] > 0.1)
    assert entries[-1]["skip_rate"] > 0.1 and entries[-1]["lr"] < 1.3 * 0.1 * 6e-3   # The schedule ends, too.

def test_defaults_on_a_gpu(monkeypatch):
    monkeypatch.setattr(train, "pick_device", lambda name: "cuda")
    def size(*flags):
        gpt, config = runs.parse((GPTConfig, train.TrainConfig), flags, under=train.settings_below)
        return [gpt.n_embd, config.batch_size, gpt.block_size, config.grad_accum, config.max_iters]
    assert size() == [768, 512, 1024, 8, 2000] and size("--batch_size", "64") == [768, 64, 1024, 8, 2000]
    assert size("--n_layer", "6") == [128, 16, 128, 1, 420]   # another model: the small defaults
    assert size("--max_tokens", "1e6")[-1] == 0

def test_schedule():
    for schedule in "cosine", "wsd":
        config = train.TrainConfig(schedule=schedule, warmup=0.1, min_lr=0.1)
        shares = [train.lr_share(config, (step + 1) / 100) for step in range(100)]
        assert shares[0] == pytest.approx(0.1) and shares[9] == pytest.approx(1) == max(shares)
        assert all(a < b for a, b in zip(shares[:9], shares[1:10]))
        assert all(a >= b - 1e-12 for a, b in zip(shares[9:], shares[10:]))
        assert shares[99] == pytest.approx(0.1)
        assert shares[54] == pytest.approx(dict(cosine=0.55, wsd=1)[schedule])
        assert train.lr_share(config, 1.01) == pytest.approx(0.1, abs=0.06)
        for warmup in 0, 1:
            config = train.TrainConfig(schedule=schedule, warmup=warmup)
            assert all(0 < train.lr_share(config, progress) <= 1 for progress in (0.01, 1.0))

@pytest.mark.parametrize("residual", RESIDUALS)
def test_optimizer_groups(residual):
    model = GPT(GPTConfig(**SMALL, residual=residual, tie=residual in ("pre", "nag")))
    names = {p: name for name, p in model.named_parameters()}
    own = {id(getattr(r, name)) for r in model.residuals() for name in r.own_lr if hasattr(r, name)}
    stacked = {id(getattr(r, name)) for r in model.residuals() for name in r.not_matrices if hasattr(r, name)}
    for optimizer in "adamw", "sgd", "muon":
        made = train.make_optimizers(model, train.TrainConfig(optimizer=optimizer, gate_lr=5e-4))
        groups = [group for each in made for group in each.param_groups]
        assert sorted(names[p] for group in groups for p in group["params"]) == sorted(names.values())
        for group in groups:
            for p in group["params"]:
                decays = p.dim() >= 2 and id(p) not in own and id(p) not in stacked
                assert group["weight_decay"] == (0.1 if decays else 0), names[p]
                assert group["peak_lr"] == (5e-4 if id(p) in own else 6e-3)
        if optimizer == "muon":
            taken = {names[p] for p in made[1].param_groups[0]["params"]}
            assert taken >= {name for name in names.values() if re.search("c_(attn|fc|proj).weight$", name)}
            assert all(name.startswith("blocks.") for name in taken)

def test_sgd_is_plain(data, tmp_path):
    """Without momentum and decay: weights - lr x clipped gradients, and nothing else"""
    flags = "--optimizer sgd --beta1 0 --lr 0.5 --weight_decay 0 --warmup 0 --min_lr 1 --grad_clip 0.25"
    go(data, tmp_path / "run", *flags.split(), "--max_iters", 6)
    shards = prepare.open_split(data, "train", 32)
    model = GPT(GPTConfig(**load(tmp_path / "run")["model_config"]))
    for step in range(6):
        model.zero_grad()
        model(*train.train_batch(shards, 32, 5, step, 4))[1].backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.5 * p.grad * min(1, 0.25 / norm)
    for name, weight in load(tmp_path / "run")["model"].items():
        assert torch.allclose(weight, model.state_dict()[name], atol=1e-5), name

# ----------------------------------------------------------------------------- exact resume

KINDS = {
    "pre": (signal.SIGTERM, ""), "nag:warmup=0.1": (signal.SIGHUP, "--mod_rate 0.6 --grad_accum 2"),
    "ngpt": (signal.SIGINT, "--optimizer muon --schedule wsd"),
    "layerscale": (signal.SIGTERM, "--layer_drop 0.3"),
    "hyper": (signal.SIGINT, "--optimizer sgd --lr 0.1"),
    "skipinit": (signal.SIGTERM, "--mod router --mod_rate 0.25"),
}

@pytest.mark.parametrize("residual", KINDS)
def test_resume_after_a_signal_is_bit_identical(data, tmp_path, monkeypatch, capsys, residual):
    number, flags = KINDS[residual]
    flags = ["--residual", residual, *flags.split(), "--max_iters", 24, "--log_interval", 3]
    flags += ["--eval_interval", 10]
    assert go(data, tmp_path / "whole", *flags) == 0
    before_step, calls = GPT.before_step, []

    def interrupted(self, progress):   # at the thirteenth step
        calls.append(progress)
        if len(calls) == 13:
            signal.raise_signal(number)
        before_step(self, progress)

    with monkeypatch.context() as patch:
        patch.setattr(GPT, "before_step", interrupted)
        assert go(data, tmp_path / "parts", *flags) == 128 + number
    assert load(tmp_path / "parts")["step"] == 13 and "--resume" in capsys.readouterr().out.splitlines()[-1]
    assert calls == [pytest.approx((step + 1) / 24) for step in range(13)]
    assert resume(tmp_path / "parts") == 0
    same_run(tmp_path / "whole", tmp_path / "parts")
    if "mod" in str(flags):
        assert losses(tmp_path / "parts")[-1]["skip_rate"] > 0.1

def test_resume_after_a_crash_in_the_evaluation(data, tmp_path, monkeypatch):
    """The checkpoint was saved before. The evaluation that is made again comes out as it would have."""
    flags = ["--residual", "nag:warmup=0.9", "--max_iters", 20, "--eval_interval", 10]
    go(data, tmp_path / "whole", *flags)
    evaluate, calls = train.evaluate, []

    def breaks_down(*args):
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("at step 10")
        return evaluate(*args)

    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluate", breaks_down)
        with pytest.raises(MemoryError):
            go(data, tmp_path / "parts", *flags)
    assert load(tmp_path / "parts")["step"] == 10 and load(tmp_path / "parts", "best.pt")["step"] == 0
    resume(tmp_path / "parts")
    same_run(tmp_path / "whole", tmp_path / "parts")

@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_kill_9_at_any_moment(data, tmp_path, kills):
    """Every other kill comes while a file is being written."""
    flags = ["--max_iters", 15 * kills, "--eval_interval", 1, "--log_interval", 5, "--eval_windows", 1]
    rng, run, inside = random.Random(kills), tmp_path / "killed", 0
    process = start(tmp_path / "log", "--data", data, *SIZE, "--out", run, *flags)
    wait_for(run / "best.pt", process)
    for i in range(kills):
        time.sleep(rng.uniform(0.0, 0.3))
        end = time.time() + 5
        while i % 2 and process.is_alive() and time.time() < end and not any(run.glob(HALF)):
            pass
        process.kill()
        process.join()
        inside += any(run.glob(HALF))
        begun = load(run)["step"]   # a whole file, whenever the kill came
        process = start(tmp_path / "log", "--out", run, "--resume")
        while process.is_alive() and load(run)["step"] <= begun:
            time.sleep(0.02)
    assert wait(process) == [0], (tmp_path / "log.err").read_text()
    assert inside > 0 and not any(run.glob(HALF))   # Leftovers are gone.
    go(data, tmp_path / "whole", *flags)
    same_run(tmp_path / "whole", run)

def test_a_finished_run_that_is_extended(data, tmp_path):
    """Its end was no multiple of eval_interval. The last validation counts, for best.pt, too."""
    go(data, tmp_path, "--max_iters", 15, "--eval_interval", 10)
    val_loss = metrics(tmp_path)[15]["val_loss"]
    assert load(tmp_path, "best.pt")["step"] == 15
    resume(tmp_path, "--max_iters", 25, "--lr", 3)   # makes it worse
    assert metrics(tmp_path)[15]["val_loss"] == val_loss < metrics(tmp_path)[20]["val_loss"]
    assert load(tmp_path, "best.pt")["step"] == 15 and load(tmp_path)["step"] == 25

def test_resume_takes_new_learning_rates(copy):
    before = load(copy)["model"]
    assert resume(copy, "--max_iters", 12, "--lr", 0, "--gate_lr", 0) == 0 and load(copy)["step"] == 12
    assert all(torch.equal(weight, before[name]) for name, weight in load(copy)["model"].items())

def test_metrics_are_appended_and_a_torn_line_is_cut(copy):
    path = copy / "metrics.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + b'{"step": 9, "loss": 0.0\0\0')
    resume(copy, "--max_iters", 12, "--log_interval", 1)
    assert path.read_bytes().startswith(before + b'{"step": 8, "val_loss": ')
    assert metrics(copy)[9]["loss"] > 0.1
    lines = ['{"step": 1, "loss": 5}', "not ours", "[1]", '{"loss": 2}', '{"step": 2, "loss": "x"}',
             "[" * 9999, '{"step": 1, "loss": 4}', '{"step": 1, "val_loss": 3, "grad_norms": [1, 2]}',
             '{"step": 3, "lo']
    path.write_text("\n".join(lines))
    assert runs.read_metrics(copy) == {1: dict(step=1, loss=4, val_loss=3, grad_norms=[1, 2])}
    path.unlink()
    assert runs.read_metrics(copy) == {}

# ----------------------------------------------------------------------------- what must never be lost

def test_nothing_that_is_not_finite_is_saved(data, tmp_path, monkeypatch):
    after_step, calls = GPT.after_step, []

    def poisons(self, ran):
        calls.append(ran)
        after_step(self, ran)
        if len(calls) == 7:
            self.blocks[1].mlp.c_proj.weight.data[0, 0] = math.inf

    with monkeypatch.context() as patch:
        patch.setattr(GPT, "after_step", poisons)
        with pytest.raises(SystemExit, match="step 8: loss.*ckpt.pt.*--lr"):
            go(data, tmp_path, "--max_iters", 9, "--eval_interval", 4, "--log_interval", 100)
    assert load(tmp_path)["step"] == 4 and resume(tmp_path) == 0 and metrics(tmp_path)[9]["val_loss"] > 0
    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluate", lambda *args: (math.nan, 1.0, 0.0))
        with pytest.raises(SystemExit, match="step 12: validation loss nan.*best.pt"):
            resume(tmp_path, "--max_iters", 12)
    ckpt = load(tmp_path)
    ckpt["model"]["wte.weight"][3, 3] = math.nan
    torch.save(ckpt, tmp_path / "ckpt.pt")
    before = content(tmp_path)
    assert "not finite" in refused("--out", tmp_path, "--resume", "--max_iters", 20)
    with pytest.raises(SystemExit, match="ckpt.pt.*not finite"):
        train.open_run(tmp_path)
    assert content(tmp_path) == before

def test_write_file_keeps_the_old_one(tmp_path, monkeypatch):
    path, order = tmp_path / "file", []
    runs.write_file(path, lambda f: f.write(b"old"))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)   # a disk that is full
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        for write in (lambda f: f.write(bytes(9999))), (lambda f: torch.save(torch.zeros(9999), f)):
            with pytest.raises(SystemExit, match="file: can't be written"):
                runs.write_file(path, write)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    def interrupted(f):
        f.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.write_file(path, interrupted)
    assert content(tmp_path) == {"file": b"old"}   # and nothing beside it
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: order.append("fsync") or fsync(number))
    monkeypatch.setattr(os, "replace", lambda *paths: order.append("replace") or replace(*paths))
    runs.write_file(path, lambda f: f.write(b"new"))
    assert order == ["fsync", "replace"] and path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o644

def test_links_in_a_run_folder_are_not_followed(copy, tmp_path):
    """A run folder that was downloaded could have them, to any file of the user."""
    mine = tmp_path / "bashrc"
    mine.write_text("mine")
    for name in "config.json", "best.pt", "ckpt.pt":
        (copy / f"{name}.tmp").symlink_to(mine)
    (copy / "best.pt").unlink()
    (copy / "best.pt").symlink_to(mine)
    assert resume(copy, "--max_iters", 12) == 0 and not (copy / "best.pt").is_symlink()
    for name in "lock", "metrics.jsonl":
        (copy / name).unlink()
        (copy / name).symlink_to(mine)
        assert "can't be written" in refused("--out", copy, "--resume", "--max_iters", 16)
        (copy / name).unlink()
    assert mine.read_text() == "mine"

def test_two_runs_in_one_folder(data, copy, tmp_path):
    with open(copy / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = content(copy)
        for flags in ["--resume"], ["--overwrite"]:
            assert "another process" in refused("--data", data, *SIZE, "--out", copy, *flags)
        assert content(copy) == before
    assert resume(copy) == 0
    assert go(data, copy, "--overwrite", "--max_iters", 3) == 0   # The lock is free again after each.
    assert list(metrics(copy)) == [0, 3] and load(copy)["step"] == load(copy, "best.pt")["step"] == 3

def test_what_a_new_run_may_find(data, finished, tmp_path):
    """A folder that holds anything is refused, unless by a run that ended before its first checkpoint."""
    flags = ["--max_iters", 8, "--eval_interval", 4]
    def folder(name, *kept, **more):
        (tmp_path / name).mkdir()
        for each in kept:
            shutil.copy(finished / each, tmp_path / name)
        for each, text in more.items():
            (tmp_path / name / each.replace("_", ".")).write_text(text)
        return tmp_path / name
    settings = (finished / "config.json").read_text().replace(str(finished), str(tmp_path / "early"))
    entries = (finished / "metrics.jsonl").read_text().splitlines(keepends=True)
    early = folder("early", "lock", config_json=settings, metrics_jsonl=entries[0])
    (early / f"{runs.UNFINISHED}ckpt").write_text("half")
    other = settings.replace("early", "other").replace('"lr": 0.006', '"lr": 0.1')
    late = settings.replace("early", "late")
    for held in (folder("run", "ckpt.pt", "config.json"), folder("foreign", notes_txt="mine"),
                 folder("other", "lock", config_json=other), folder("alone", config_json="{}"),
                 folder("late", config_json=late, metrics_jsonl="".join(entries)), folder("best", "best.pt")):
        before = content(held)
        assert "--overwrite" in refused("--data", data, *SIZE, "--out", held, *flags), held
        assert content(held) == before
    for free in early, folder("empty"), folder("locked", "lock"):
        assert go(data, free, *flags) == 0
    assert not any(early.glob(HALF))
    assert go(data, tmp_path / "foreign", *flags, "--overwrite") == 0
    assert (tmp_path / "foreign/notes.txt").exists()

def test_other_data_is_noticed(data, copy, tmp_path):
    other = Path(shutil.copytree(data, tmp_path / "other"))
    assert resume(copy, "--data", other, "--max_iters", 9) == 0   # The same data elsewhere is the same.
    tokens = np.concatenate([np.array([prepare.MAGIC, prepare.VERSION, 900] + 253 * [0], "<i4").view("<u2"),
                             np.arange(900, dtype="<u2") % 256])
    tokens.tofile(other / "train_000000.bin")
    before = content(copy)
    assert "other data" in refused("--out", copy, "--resume", "--data", other, "--max_iters", 12)
    assert content(copy) == before

@pytest.mark.parametrize("what", ["/dev/full", "pipe"])
def test_a_dead_stdout_ends_no_run(data, tmp_path, what):
    if what == "pipe":   # as of `| head` that has gone
        what = tmp_path / "pipe"
        os.mkfifo(what)
        reader = os.open(what, os.O_RDONLY | os.O_NONBLOCK)
    words = ["--data", data, *SIZE, "--out", tmp_path / "run", "--max_iters", 6]
    process = start(tmp_path / "log", *words, stdout=what)
    if what != "/dev/full":
        wait_for(tmp_path / "run" / "lock", process)
        os.close(reader)
    assert wait(process) == [0] and max(metrics(tmp_path / "run")) == 6
    assert (tmp_path / "log.err").read_text() == ""

def test_a_second_signal_ends_a_run_at_once_and_nohup_is_heard():
    signals = train.note_signals()
    signal.raise_signal(signal.SIGHUP)
    assert signals == [signal.SIGHUP]
    with pytest.raises(SystemExit) as ending:
        signal.raise_signal(signal.SIGTERM)
    assert ending.value.code == 128 + signal.SIGTERM
    signal.signal(signal.SIGHUP, signal.SIG_IGN)   # nohup
    signals = train.note_signals()
    signal.raise_signal(signal.SIGHUP)
    assert signals == [] and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

# ----------------------------------------------------------------------------- several processes

def test_two_processes_train_as_one(data, tmp_path):
    """Four parts of a batch, in one process or in two: the same thresholds, the same losses"""
    flags = ["--data", data, *SIZE, "--residual", "nag", "--mod_rate", 0.5, "--batch_size", 8]
    flags += ["--max_iters", 18, "--log_interval", 1, "--eval_interval", 7]
    two = start_two(tmp_path, *flags, "--grad_accum", 2, "--out", tmp_path / "two")
    train.main([str(word) for word in (*flags, "--grad_accum", 4, "--out", tmp_path / "one")])
    assert wait(*two) == [0, 0], (tmp_path / "process0.err").read_text()
    assert (tmp_path / "process1.out").read_text() == ""   # The first one speaks.
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert one.keys() == two.keys() and one[18]["skip_rate"] > 0.1
    for step in one:   # A gain within rounding of the threshold may fall on either side of it.
        for key in one[step].keys() & {"loss", "val_loss", "grad_norm", "lr", "flops"}:
            assert one[step][key] == pytest.approx(two[step][key], rel=2e-3), (step, key)
    assert resume(tmp_path / "two", "--max_iters", 20, "--grad_accum", 4) == 0   # goes on as one

@pytest.mark.parametrize("flags", ["--layer_drop 0.4", "--optimizer muon --residual attnres"])
def test_two_processes_without_skipping_are_exact(data, tmp_path, flags):
    muon = "muon" in flags   # Its products are in bf16.
    flags = ["--data", data, *SIZE, *flags.split(), "--max_iters", 6, "--log_interval", 1]
    two = start_two(tmp_path, *flags, "--out", tmp_path / "two")
    train.main([str(word) for word in (*flags, "--grad_accum", 2, "--out", tmp_path / "one")])
    assert wait(*two) == [0, 0], (tmp_path / "process0.err").read_text()
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    for step in one:
        assert all(one[step][key] == pytest.approx(two[step][key], rel=2e-2 if muon else 1e-4)
                   for key in one[step]), step

def test_processes_stop_together(data, tmp_path):
    """A signal to one of them: both leave after the same step, all is saved, the sentence is said once."""
    run = tmp_path / "run"
    two = start_two(tmp_path, "--data", data, *SIZE, "--out", run, *LONG)
    wait_for(run / "best.pt", two[0])
    time.sleep(0.2)
    os.kill(two[1].pid, signal.SIGTERM)
    assert wait(*two) == [128 + signal.SIGTERM] * 2
    assert "--resume" in (tmp_path / "process0.out").read_text()
    assert (tmp_path / "process1.out").read_text() == ""
    begun = load(run)["step"]
    assert resume(run, "--max_iters", begun + 2) == 0 and max(metrics(run)) == begun + 2
    # So do they if one is refused, or if the loss isn't finite; the first one says why.
    with open(run / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert wait(*start_two(tmp_path, "--out", run, "--resume")) == [1, 1]
    says = [(tmp_path / f"process{rank}.err").read_text().splitlines() for rank in range(2)]
    assert len(says[0]) == 1 and "another process" in says[0][0] and says[1] == []
    flags = "--lr 1e3 --gate_lr 1e3 --weight_decay 1e3 --grad_clip 0 --warmup 0 --log_interval 1"
    two = start_two(tmp_path, "--out", run, "--resume", "--max_iters", begun + 50, *flags.split())
    assert wait(*two) == [1, 1] and load(run)["step"] == begun + 2
    says = [(tmp_path / f"process{rank}.err").read_text() for rank in range(2)]
    assert "lower --lr" in says[0].splitlines()[-1] and "lower" not in says[1]

@pytest.mark.slow
def test_torchrun(data, tmp_path):
    """The real thing: a run, a signal, and two processes that resume it"""
    torchrun = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node 2 train.py".split()]
    words = [str(word) for word in ("--data", data, *SIZE, "--out", tmp_path / "run")]
    process = subprocess.Popen([*torchrun, *words, *LONG], cwd=ROOT)
    while not (tmp_path / "run" / "best.pt").exists():
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    step = load(tmp_path / "run")["step"]
    assert step > 0
    words = ["--out", str(tmp_path / "run"), "--resume", "--max_iters", str(step + 3)]
    subprocess.run([*torchrun, *words], cwd=ROOT, check=True, timeout=100)
    assert max(metrics(tmp_path / "run")) == step + 3

@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler here")
def test_compiled_and_checkpointed_runs(data, tmp_path):
    for name, flags in ("plain", ""), ("compiled", "--compile"), ("both", "--compile --checkpoint_blocks"):
        go(data, tmp_path / name, "--max_iters", 4, "--log_interval", 1, *flags.split())
        assert [entry["loss"] for entry in losses(tmp_path / name)] == pytest.approx(
            [entry["loss"] for entry in losses(tmp_path / "plain")], rel=1e-4)

def test_checkpointed_blocks_change_nothing(data, tmp_path, monkeypatch):
    calls, switch = [], GPT.checkpoint_blocks
    monkeypatch.setattr(GPT, "checkpoint_blocks", lambda self: calls.append(self) or switch(self))
    for name, flags in ("plain", []), ("checkpointed", ["--checkpoint_blocks"]):
        go(data, tmp_path / name, "--layer_drop", 0.3, "--max_iters", 3, "--eval_interval", 3, *flags)
    same_run(tmp_path / "plain", tmp_path / "checkpointed")
    assert len(calls) == 1

# ----------------------------------------------------------------------------- what is refused

REFUSED = [   # a command line, and the words that its sentence must have
    ("--residul nag", "did you mean --residual"), ("--residual nga", "nag"),
    ("--residual nag:temp=hot", "temp"), ("--n_layer -3", "--n_layer -3: must be from 1"),
    ("--n_layer two", "--n_layer"), ("nonsense", "nonsense"), ("--n_embd 33", "--n_embd 33"),
    ("--n_embd 4000000", "--n_embd"), ("--block_size", "--block_size"),
    ("--n_layer 4096 --n_embd 65536 --n_head 64", "GB of memory"),
    ("--eval_windows 1000000", "--eval_windows"), ("--batch_size 4000000000", "--batch_size"),
    ("--batch_size 1000000", "GB of memory"), ("--batch_size 0", "--batch_size"),
    ("--batch_size 16 --grad_accum 3", "multiple of grad_accum"), ("--repeat 1:999999999999", "--repeat"),
    ("--repeat 5:2", "--repeat"), ("--beta1 1", "--beta1"), ("--lr nan", "--lr nan"),
    ("--lr inf", "--lr inf"), ("--lr -1", "--lr -1"), ("--lr fast", "--lr"),
    ("--min_lr 6e-5", "share of --lr"), ("--warmup 2", "--warmup 2"),
    ("--max_iters 5 --max_tokens 10", "--max_iters and --max_tokens"), ("--max_iters 0", "train nothing"),
    ("--max_flops 0", "train nothing"), ("--max_tokens inf", "--max_tokens"), ("--optimizer moun", "muon"),
    ("--schedule linear", "wsd"), ("--seed -1", "--seed"), ("--seed 99999999999999999999999", "--seed"),
    ("--device tpu", "cuda"), ("--mod_rate 0.3", "nag"),
    ("--layer_drop 0.2 --mod_rate 0.2 --residual nag", "--layer_drop"), ("--resume", "--out"),
    ("--resume --config x.json --out x", "--config"), ("--resume --overwrite --out {run}", "contradict"),
    ("--config nowhere.json", "nowhere.json"), ("--resume --out nowhere", "config.json"),
    ("--out {file}", "{file}"), ("--out {file}/run", "{file}"), ("--out {long}", "can't be written"),
    ("--data nowhere", "nowhere"), ("--block_size 100000", "--block_size"), ("--out {run}", "--overwrite"),
    ("--out {run} --resume --n_embd 64", "n_embd 32 there"),
    ("--out {run} --resume --batch_size 8", "--batch_size 8"),
    ("--out {run} --resume --optimizer sgd", "--optimizer"),
    ("--out {run} --resume --optimizer muon", "ckpt.pt"), ("--out {run} --resume --seed 6", "seed 5 there")]

@pytest.mark.parametrize("line, words", REFUSED, ids=[line for line, _ in REFUSED])
def test_refusals(data, finished, tmp_path, monkeypatch, line, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    names = dict(run=finished, file=tmp_path / "file", long="x" * 300)
    given, before = line.format(**names).split(), content(finished)
    base = [] if "--resume" in given or "--config" in given else ["--data", str(data), *SIZE]
    assert words.format(**names) in refused(*base, *given)
    assert content(finished) == before and [path.name for path in tmp_path.iterdir()] == ["file"]

def test_other_refusals(data, tmp_path, monkeypatch):
    assert "\x1b" not in refused("--residual", "x\x1b[31m")
    assert "--out: is empty" in refused("--data", data, "--out", "")
    with pytest.raises(SystemExit) as several:
        train.main(["--lr", "-1", "--warmup", "2", "--n_layer", "0"])
    assert len(str(several.value).splitlines()) == 3
    for name in "WORLD_SIZE", "RANK":
        with monkeypatch.context() as patch:
            patch.setenv(name, "abc")
            assert f"{name}=abc" in refused("--data", data, *SIZE, "--out", tmp_path / "run")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert "torchrun" in refused("--data", data, *SIZE, "--out", tmp_path / "run")
    assert "multiple" in refused("--data", data, *SIZE, "--out", tmp_path / "run", "--batch_size", 3)
    if not torch.cuda.is_available():
        assert "--device cpu" in refused("--device", "cuda")

@pytest.mark.parametrize("split", ["train", "val"])
def test_tokens_beyond_the_vocabulary(data, tmp_path, split):
    bad = Path(shutil.copytree(data, tmp_path / "bad"))
    path = bad / f"{split}_000000.bin"
    raw = bytearray(path.read_bytes())
    raw[1024:] = np.full((len(raw) - 1024) // 2, 257, "<u2").tobytes()
    path.write_bytes(raw)
    assert "257" in refused("--data", bad, *SIZE, "--out", tmp_path / "run", "--max_iters", 2)

def edited(change):
    """A file's content as torch or json reads it, changed, as bytes"""
    def edit(path):
        if path.suffix == ".json":
            values = json.loads(path.read_text())
            path.write_text(json.dumps(change(values) or values))
        else:
            values = torch.load(path, weights_only=True)
            torch.save(change(values) or values, path)
    return edit

def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)

class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)

def moments(ckpt):
    return ckpt["optimizers"][0]["state"][0]

BROKEN = {   # file and what is wrong -> how it comes about, and whether open_run sees it
    "config.json gone": (Path.unlink, True),
    "config.json cut": (lambda path: path.write_text('{"lr"'), True),
    "config.json list": (lambda path: path.write_text("[]"), True),
    "config.json deep": (lambda path: path.write_text("[" * 99999), True),
    "config.json bytes": (lambda path: path.write_bytes(b"\xff\xfe"), True),
    "config.json unknown": (edited(lambda c: c | {"n_legs\x1b[31m": 4}), True),
    "config.json type": (edited(lambda c: c | dict(n_layer="two")), True),
    "config.json null": (edited(lambda c: c | dict(n_layer=None)), True),
    "config.json float": (edited(lambda c: c | dict(n_layer=2.5)), True),
    "config.json range": (edited(lambda c: c | dict(n_layer=-2)), False),
    "config.json model": (edited(lambda c: c | dict(n_embd=64)), False),
    "ckpt.pt gone": (Path.unlink, True),
    "ckpt.pt cut": (lambda path: os.truncate(path, 1000), True),
    "ckpt.pt empty": (lambda path: os.truncate(path, 0), True),
    "ckpt.pt text": (lambda path: path.write_text("text"), True),
    "ckpt.pt a bit": (flip, True),
    "ckpt.pt list": (edited(lambda c: [1]), True),
    "ckpt.pt nothing": (edited(lambda c: {1: 2}), True),
    "ckpt.pt code": (edited(lambda c: c | dict(evil=Evil())), True),
    "ckpt.pt large": (edited(lambda c: c["model_config"].update(n_embd=65536)), True),
    "ckpt.pt deep": (edited(lambda c: c["model_config"].update(n_layer=4096)), True),
    "ckpt.pt words": (edited(lambda c: c["model_config"].update(n_layer="x")), True),
    "ckpt.pt setting": (edited(lambda c: c["model_config"].update(legs=1)), True),
    "ckpt.pt weight": (edited(lambda c: c["model"].pop("wte.weight") is None), True),
    "ckpt.pt shape": (edited(lambda c: c["model"].update({"wte.weight": torch.zeros(2, 2)})), True),
    "ckpt.pt nan": (edited(lambda c: c["model"]["wte.weight"].fill_(math.nan) is None), True),
    "ckpt.pt moments": (edited(lambda c: moments(c).update(exp_avg=torch.zeros(3))), False),
    "ckpt.pt huge": (edited(lambda c: moments(c).update(exp_avg=torch.zeros(1).expand(10 ** 12))), False),
    "ckpt.pt half": (edited(lambda c: moments(c).pop("exp_avg") is None), False),
    "ckpt.pt number": (edited(lambda c: moments(c).update(step=3)), False),
    "ckpt.pt many": (edited(lambda c: c["optimizers"][0]["state"].update({999: moments(c)})), False),
    "ckpt.pt optimizer": (edited(lambda c: c["optimizers"].pop() is None), False),
    "ckpt.pt step": (edited(lambda c: c | dict(step="x")), False),
    "ckpt.pt norms": (edited(lambda c: c | dict(grad_norms=torch.zeros(7))), False)}

@pytest.mark.parametrize("what", BROKEN)
def test_broken_run_folders(copy, tmp_path, monkeypatch, what):
    """One sentence, nothing overwritten, no code run"""
    monkeypatch.chdir(tmp_path)
    (how, open_run_sees_it), name = BROKEN[what], what.split()[0]
    how(copy / name)
    before = content(copy)
    sentence = refused("--out", copy, "--resume", "--max_iters", 20)
    assert name.split(".")[0] in sentence or what == "config.json range"
    if open_run_sees_it:
        with pytest.raises(SystemExit, match=re.escape(name)) as refusal:
            train.open_run(copy)
        if what in ("ckpt.pt large", "ckpt.pt deep"):
            assert "larger model" in str(refusal.value)   # It was not built.
        assert "\x1b" not in str(refusal.value) and len(str(refusal.value).splitlines()) == 1
    assert content(copy) == before and not Path("evil").exists()

def test_moments_that_lie_about_their_memory(copy):
    """A tensor of one number that says it has many would have the fused optimizer write beyond it."""
    lie = edited(lambda c: moments(c).update(exp_avg=torch.zeros(1).expand(moments(c)["exp_avg"].shape)))
    lie(copy / "ckpt.pt")
    assert resume(copy, "--max_iters", 12) == 0

def test_a_run_that_can_only_be_read(copy):
    before = content(copy)
    for path in (copy, *copy.iterdir()):
        path.chmod(path.stat().st_mode & 0o555)
    train.open_run(copy)
    runs.read_metrics(copy)
    copy.chmod(0o755)
    assert content(copy) == before   # opening writes nothing

# ----------------------------------------------------------------------------- flags

@dataclass
class Example:
    run: str = ""          # a folder
    files: list = ()       # some files
    # numbers of things
    share: float = 0.5     # [0, 1] share in %
    kind: Literal["a", "b"] = "a"  # a or b
    fast: bool = False     # or not

def test_flags_of_a_config(capsys):
    parse = lambda *argv: runs.parse((Example,), argv, "An example.", positional=("run",))[0]
    assert parse(*"x --share 1 --fast --files a b".split()) == Example("x", ["a", "b"], 1.0, "a", True)
    for line, words in (("x --share 1.5", "--share 1.5: must be from 0 to 1"), ("x --kind c", "kind"),
                        ("x --shore 1", "did you mean --share?"), ("", "run"), ("x --s 1", "--s")):
        with pytest.raises(SystemExit, match=re.escape(words)):
            parse(*line.split())
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "numbers of things: --share SHARE [0, 1] share in % (default 0.5)" in text
    assert "residuals" not in text

def test_help(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    text = capsys.readouterr().out
    for config in GPTConfig, train.TrainConfig:
        assert all(f"--{name}" in text for name in config.__dataclass_fields__)
    assert "(default )" not in text and "(default None)" not in text and "(default 0.006)" in text
    titles = "what everyone uses", "optimizer", "machine", "residuals, with their options"
    places = [text.index(f"\n{title}:") for title in titles]
    assert places == sorted(places) and text.index("  --residual") < text.index("  --n_head")
    assert all(f"\n  {name}" in text for name in RESIDUALS) and "\n  hyper:kind=lite,n=4" in text

def test_a_terminal_that_knows_ascii_only(data, tmp_path):
    done = wait(start(tmp_path / "log", "--data", data, *SIZE, "--out", tmp_path / "Läufe", "--max_iters", 1,
                      PYTHONIOENCODING="ascii"))
    assert done == [0] and "Traceback" not in (tmp_path / "log.err").read_text()
