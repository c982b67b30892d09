"""train.py on tiny runs"""
import concurrent.futures, json, math, multiprocessing, os, re, resource, runpy, shlex, shutil, signal, socket
import subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
import numpy as np
import flags as command_line, prepare, pytest, sample, torch, train
import torch.nn.functional as F
from conftest import ROOT, TINY, refused
from model import DECIDERS, GPT, GPTConfig, RESIDUALS, ByFunction, Residual, flops_per_token

# On CPUs, because what these tests compare has to be equal to the last bit.
SIZE = ("--device cpu --n_layer 2 --n_embd 32 --n_head 2 --block_size 32 --batch_size 4 "
        "--eval_windows 8 --seed 5 --optimizer adamw --lr 6e-3")
LONG = "--max_iters 99999 --eval_interval 99999"
HALF = ".unfinished-*"

@pytest.fixture(scope="session")
def finished(data, tmp_path_factory):
    """A run of 8 steps. Tests that change it take a copy."""
    out = tmp_path_factory.mktemp("runs") / "run"
    assert go(data, out, "--max_iters 8 --eval_interval 4") == 0
    return out

@pytest.fixture
def copy(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "copy"))

def main(line):
    """`python train.py LINE`, in this process -> its exit status. The next two are short for it."""
    return train.main(shlex.split(line))

def go(data, out, flags=""):
    return main(f"--data {data} {SIZE} --out {out} {flags}")

def resume(out, flags=""):
    return main(f"--out {out} --resume {flags}")

def parsed(line):
    return train.gather_settings(train.read_flags(shlex.split(line)))[:2]

def settings(run):
    return json.loads((run / "config.json").read_text())

def metrics(run):
    """What must be equal in two runs: all but the speed"""
    return {step: {key: value for key, value in entry.items() if key not in ("tok_s", "seconds")}
            for step, entry in sorted(train.read_metrics(run).items())}

def reports(run):
    """What the status lines have said"""
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
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

def edited(change):
    """A function of a path, which changes what torch or json reads there."""
    def edit(path):
        is_json = path.suffix == ".json"
        values = json.loads(path.read_text()) if is_json else torch.load(path, weights_only=True)
        change(values)
        path.write_text(json.dumps(values)) if is_json else torch.save(values, path)
    return edit

def child(line, log, stdout, env):
    os.environ.update(env)
    for number, path in (1, stdout or f"{log}.out"), (2, f"{log}.err"):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout = open(1, "w", encoding="ascii", closefd=False)   # a terminal that knows no more
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    sys.argv = ["train.py", *shlex.split(line)]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")

def start(log, line, stdout=None, **env):
    """`python train.py LINE`, without importing torch again, if there is no GPU: where there is one,
    gradients have been computed in threads, and such a process can't be forked. log: a path without
    an ending"""
    way = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    process = way.Process(target=child, args=(line, log, stdout, env))
    process.start()
    return process

def start_two(tmp_path, line):
    with socket.create_server(("localhost", 0)) as s:
        port = str(s.getsockname()[1])
    return [start(tmp_path / f"process{rank}", line, RANK=str(rank), LOCAL_RANK=str(rank),
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
    Path("data/stdlib").mkdir(parents=True)   # A prepare.py that was killed leaves it empty.
    monkeypatch.setattr(prepare, "main", lambda argv: shutil.copytree(data, argv[-1], dirs_exist_ok=True))
    assert main(f"{SIZE} --residual hyper:n=2 --max_iters 50 --log_interval 10 --eval_interval 30") == 0
    out = Path("runs/hyper-n2")   # named by what is typed
    entries, said = metrics(out), capsys.readouterr().out.splitlines()
    assert list(entries) == [0, 10, 20, 30, 40, 50]
    assert [step for step in entries if "val_loss" in entries[step]] == [0, 30, 50]
    last = entries[50]
    assert last["loss"] < entries[10]["loss"] - 0.3 and last["tokens"] == 50 * 4 * 32
    assert last["val_bpb"] == pytest.approx(last["val_loss"] / math.log(2), rel=0.02)   # bytes
    assert last.keys() >= {"lr", "grad_norm", "flops", "skip_rate", "val_skip_rate"}
    assert {*content(out)} == {"config.json", "metrics.jsonl", "ckpt.pt"}
    assert "sample.py" in said[-1] and f"validation loss {last['val_loss']:.4f}" in said[-2]
    config = settings(out)
    assert config["tokenizer"] == "bytes" and config["vocab_size"] == 320   # a multiple of 64
    assert config["residual"] == "hyper:kind=identity,n=2" and config["lr"] == 6e-3   # all that was in force
    assert not {"resume", "overwrite", "config"} & config.keys()
    assert main(f"--config {out} --out replay") == 0
    same_run(out, Path("replay"))
    model, found = train.open_run(out)
    assert dict(found.items() - config.items()) == dict(
        fingerprint=prepare.fingerprint(data), step=50, flops=last["flops"], val_loss=last["val_loss"])
    assert model.n_vocab == 257 and not model.training
    nats = train.evaluate(model, *prepare.windows_of(data, "val", 32, 8), torch.ones(320))[0]
    assert nats == last["val_loss"]
    assert resume(out) == 0 and max(metrics(out)) == 50 and settings(out) == config   # Nothing is left to do.

def test_batches_depend_on_seed_and_step_only():
    shards = [np.arange(100, 200, dtype=np.uint16), np.arange(220, 250, dtype=np.uint16)]
    data = SimpleNamespace(shards=shards)
    def batches(n_parts=1, step=3, seed=1):
        gpt = GPTConfig(**TINY | dict(block_size=8, seed=seed, vocab_size=320))
        return [train.get_batch(data, gpt, 12, step, part, n_parts) for part in range(n_parts)]
    (x, y), = batches()
    parts = [x for x, _ in batches(4)]
    assert torch.equal(torch.cat(parts), x) and x.shape == (12, 8)
    assert (x.diff(dim=1) == 1).all() and (y - x == 1).all()   # No window is in two shards.
    assert not torch.equal(x, batches(step=4)[0][0]) and not torch.equal(x, batches(seed=2)[0][0])

def test_evaluate(data, tmp_path):
    model, rng = GPT(GPTConfig(**TINY)), torch.Generator().manual_seed(0)
    x, y = torch.randint(64, (2, 11, 16), generator=rng)
    sizes = torch.arange(64)
    nats, bpb, skipped = train.evaluate(model, x, y, sizes)   # 8 + 3 windows
    wanted = model(x, y)[1].item()
    assert nats == pytest.approx(wanted, rel=1e-6) and skipped == 0 and model.training
    assert bpb == pytest.approx(wanted * 176 / math.log(2) / sizes[y].sum().item(), rel=1e-6)
    only_ends = train.evaluate(model, x, y, torch.zeros(64))
    assert math.isfinite(only_ends[1])   # bits per byte, of no bytes
    quarter = (torch.arange(16) < 4).expand(11, 16)
    def answer(trip):   # Sublayer 1 is removed; a quarter of the tokens run the third.
        return {1: False, 3: quarter[:len(trip.stream)]}.get(trip.place, True)
    model.decider = ByFunction(answer)
    assert train.evaluate(model, x, y, sizes)[2] == pytest.approx((1 + 0.75) / 6)

def test_coins_have_one_loss(data, tmp_path):
    """... whoever evaluates a checkpoint, and with any batch size. What a notebook draws stays as it was."""
    run, losses = tmp_path / "run", []
    for flags in "--batch_size 4", "--batch_size 4 --grad_accum 2", "--batch_size 2":
        go(data, run, f"--mod coins:rate=0.4 --max_iters 1 --lr 1e-30 --gate_lr 0 --overwrite {flags} --residual nag")
        losses.append([entry["val_loss"] for entry in metrics(run).values()])
    model, found = train.open_run(run)
    x, y = prepare.windows_of(data, "val", 32, 8)
    before = torch.get_rng_state()
    nats, _, skipped = train.evaluate(model, x, y, torch.ones(320))
    assert torch.equal(torch.get_rng_state(), before) and skipped > 0.2
    assert {nats} == {loss for each in losses for loss in each}

def test_steps_by_hand(data, tmp_path):
    """Weights - lr x clipped gradients, and nothing else. Norms of blocks are logged, unclipped."""
    go(data, tmp_path, "--optimizer sgd --beta1 0 --weight_decay 0 --lr 0.5 --warmup 0.5 --min_lr 1 "
                       "--grad_clip 0.25 --grad_accum 2 --max_iters 6 --log_interval 1")
    ckpt = load(tmp_path)
    model = train.open_run(tmp_path)[0]
    model.load_state_dict(GPT(model.config).state_dict())   # its first weights
    model.train()
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
        weights = [torch.nn.Parameter(torch.randn(shape, generator=rng)) for shape in ((6, 4), (4, 6), (5, 5))]
        optimizer = optimizer(weights)
        for step in range(4):
            for weight in weights:   # In the first step it is 0, as for a sublayer behind a gate of 0.
                weight.grad = torch.randn(weight.shape, generator=rng) * (step > 0)
            optimizer.step()
        return weights
    ours = trained(lambda weights: train.Muon([dict(params=weights, weight_decay=0.1)], 0.02))
    torchs = trained(lambda weights: torch.optim.Muon(weights, 0.02, weight_decay=0.1,
                                                      adjust_lr_fn="match_rms_adamw"))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, torchs))
    still = torch.nn.Parameter(torch.ones(2, 2))   # It has no gradient, if all skip its sublayer.
    train.Muon([dict(params=[still], weight_decay=0.1)], 0.02).step()
    assert (still == 1).all()

@pytest.mark.parametrize("shape", [(256, 64), (64, 256), (96, 64), (64, 64)])
def test_muons_polynomial(shape):
    """It is the same one, by a small matrix or not; and of a gradient with few directions, no other becomes large."""
    rng = torch.Generator().manual_seed(0)
    full = torch.randn(shape, generator=rng)
    wanted = full.double() / full.double().norm()
    for _ in range(5):
        square = wanted @ wanted.T
        wanted = 3.4445 * wanted + (-4.7750 * square + 2.0315 * square @ square) @ wanted
    assert (train.orthogonal(full[None])[0] - wanted).norm() < 5e-4 * wanted.norm()
    few = torch.randn(shape[0], 3, generator=rng) @ torch.randn(3, shape[1], generator=rng)
    update = train.orthogonal(few[None])[0].double()
    for x, wide in (few, update), (few.T, update.T):   # its rows, and its columns
        own = torch.linalg.qr(x.double().T)[0][:, :3]
        assert (wide - wide @ own @ own.T).square().sum() < 1e-5 * wide.square().sum()

def test_equalized_gradients(data, tmp_path):
    model = GPT(GPTConfig(**TINY))
    for block, size in zip(model.blocks, (1, 100, 0)):
        for p in block.parameters():
            p.grad = torch.randn_like(p) * size
    norms, after = train.norms_of_blocks(model, True), train.norms_of_blocks(model, False)
    assert torch.allclose(after[:2], norms.square().mean().sqrt().expand(2)) and after[2] == 0
    flags = "--max_iters 3 --optimizer sgd --lr 1 --grad_clip 0"   # 0: no clipping
    for name, flag in ("plain", ""), ("equal", "--equalize_grads"), ("rarely", "--equalize_grads"):
        go(data, tmp_path / name, f"{flags} {flag} --log_interval {3 if name == 'rarely' else 1}")
    plain, equal, rarely = (reports(tmp_path / name) for name in ("plain", "equal", "rarely"))
    assert plain[0]["loss"] == equal[0]["loss"] and plain[2]["loss"] != equal[2]["loss"] == rarely[0]["loss"]
    assert "--equalize_grads: adamw hardly sees" in refused(go, data, tmp_path / "x", "--equalize_grads")

@pytest.mark.parametrize("mod", ["router:rate=0.25", "coins:rate=0.4"])
def test_executed_flops_end_a_run(data, tmp_path, monkeypatch, mod):
    seeds, manual_seed = [], torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(seed) or manual_seed(seed))
    go(data, tmp_path, f"--mod {mod} --max_flops 3e8 --log_interval 1 --grad_accum 2")
    entries, model = reports(tmp_path), train.open_run(tmp_path)[0]
    coins = [seed for seed in seeds if seed > 999]   # others in each step, and in each part of a batch
    assert len({*coins}) == len(coins) == 2 * len(entries) > 4
    spent, dense = [0, *(entry["flops"] for entry in entries)], 3 * 128 * flops_per_token(model)
    assert spent[-2] < 3e8 <= spent[-1] == load(tmp_path)["flops"]
    for entry, before in zip(entries, spent):   # Where tokens skip, a step costs less.
        assert (entry["flops"] - before < 0.97 * dense) == (entry["skip_rate"] > 0.1)
    assert entries[-1]["skip_rate"] > 0.1
    assert entries[0]["lr"] > 0.5 * 6e-3   # The run is so short that its warmup ends in the first step.
    assert entries[-1]["lr"] < 1.3 * 0.1 * 6e-3   # The schedule ends, too.
    assert resume(tmp_path) == 0 and reports(tmp_path) == entries   # Nothing is left to do.

def test_speed_is_measured_without_pauses(data, tmp_path, monkeypatch, capsys):
    """A step takes one second here, and an evaluation 100."""
    now, get_batch = [0], train.get_batch
    def pass_time(seconds):
        now[0] += seconds
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(train, "get_batch", lambda *args: pass_time(1) or get_batch(*args))
    monkeypatch.setattr(train, "evaluate", lambda *args: pass_time(100) or (1.0, 1.0, 0.0))
    go(data, tmp_path, "--max_iters 240 --log_interval 60 --eval_interval 90")
    found = train.read_metrics(tmp_path)
    assert {entry["tok_s"] for entry in found.values() if "tok_s" in entry} == {4 * 32}
    assert all(entry["seconds"] == step for step, entry in found.items())
    assert "128 tokens/s | 2.0 minutes left" in capsys.readouterr().out
    now[0] += 1e6   # The run waits for its second part.
    resume(tmp_path, "--max_iters 300")
    assert train.read_metrics(tmp_path)[300]["seconds"] == 300 and train.read_metrics(tmp_path)[300]["tok_s"] == 4 * 32

# --------------------------------------------------------------------------------- settings

def test_configs():
    """Typed, then --config, then defaults. A file may say some settings only."""
    gpt, config = parsed(f"--config {ROOT}/configs/gpt2.json --n_layer 6 --no-compile")
    assert [gpt.n_layer, gpt.n_embd, config.batch_size, config.compile] == [6, 768, 512, False]
    assert config.min_lr == train.TrainConfig.min_lr and config.lr == 1e-2

@pytest.mark.parametrize("text, flags, rate", [
    ('{"optimizer": "adamw", "lr": 1e-3}', "--optimizer adamw", 1e-3), ('{"lr": 3e-2}', "", 3e-2),
    ("{}", "--optimizer adamw --lr 0.5", 0.5), ("{}", "--optimizer adamw", 0.006),
    ('{"optimizer": "adamw", "lr": 1e-3}', "--optimizer muon", 0.02), ('{"lr": 3e-2}', "--optimizer sgd", 0.1)])
def test_a_rate_is_taken_where_the_optimizer_is(tmp_path, text, flags, rate):
    (tmp_path / "mine.json").write_text(text)
    assert parsed(f"--config {tmp_path}/mine.json {flags}")[1].lr == rate

@pytest.mark.parametrize("text, flags, words", [
    ('{"n_layers": 6}', "", "--n_layers: unknown flag"), ('{"overwrite": true}', "", "type --overwrite"),
    ("{", "", "mine.json: no settings there"), ("[1]", "", "mine.json: no settings there"),
    ('{"lr": "x"}', "", "--lr 'x': must be a number"), ('{"lr": true}', "", "--lr True: must be"),
    ('{"batch_size": 2.5}', "", "--batch_size 2.5: must be a whole number"),
    ('{"compile": "no"}', "", "--compile 'no': must be true or false"),
    ('{"optimizer": "adam"}', "--lr 1", "--optimizer 'adam': unknown; choose from adamw")])
def test_mistakes_in_a_file_of_settings(tmp_path, text, flags, words):
    (tmp_path / "mine.json").write_text(text)
    assert words in refused(parsed, f"--config {tmp_path}/mine.json {flags}")

def changes(run):
    found = {step: {key.removeprefix("--"): value for key, value in entry.items() if key.startswith("--")}
             for step, entry in metrics(run).items()}
    return {step: entry for step, entry in found.items() if entry}

def test_changed_settings_are_recorded(copy, tmp_path, monkeypatch, capsys):
    """config.json says what a run began with, ckpt.pt what is in force, metrics.jsonl what was changed when.
    --config repeats the beginning."""
    before = content(copy)["config.json"]
    assert resume(copy, "--max_iters 12 --lr 0.003") == 0
    assert "from iteration 8 on: {'--max_iters': 12, '--lr': 0.003}\n" in capsys.readouterr().out
    assert resume(copy, "--weight_decay 0.2") == 0   # and with what was changed
    assert metrics(copy)[12]["val_loss"] and load(copy)["step"] == 12
    assert resume(copy, f"--max_iters 14 --data {settings(copy)['data']}") == 0
    assert content(copy)["config.json"] == before
    assert changes(copy) == {8: dict(max_iters=12, lr=0.003), 12: dict(weight_decay=0.2, max_iters=14)}
    assert train.open_run(copy)[1]["lr"] == 0.003
    assert main(f"--config {copy} --out {tmp_path}/new") == 0
    assert max(metrics(tmp_path / "new")) == 8 and metrics(tmp_path / "new")[4] == metrics(copy)[4]
    # A change stays, also if the run is stopped before it saves.
    monkeypatch.setattr(train, "get_batch", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        resume(copy, "--max_iters 15 --lr 0.002")
    assert parsed(f"--out {copy} --resume")[1].lr == 0.002

@pytest.mark.parametrize("name", ["activation", "gate_lr", "eval_windows"])
def test_a_run_from_before_a_flag_opens(copy, tmp_path, name):
    """A hacker adds a field with a default. Runs that lack it go on as if they had it."""
    edited(lambda config: config.pop(name))(copy / "config.json")
    edited(lambda ckpt: [ckpt["settings"].pop(name), ckpt["settings"].update(kernels="on")])(copy / "ckpt.pt")
    model, found = train.open_run(copy)   # ... also one from a machine with Triton
    assert model.config.activation == "gelu" and model.config.kernels == found["kernels"] == "auto"
    sample.main([str(copy), "--max_new_tokens", "2", "--device", "cpu"])
    assert main(f"--config {copy}/config.json --out {tmp_path}/new --max_iters 1") == 0
    assert resume(copy, "--max_iters 10 --kernels off") == 0
    assert load(copy)["settings"].keys() == settings(copy).keys() | {name}

def test_init_from(data, copy, tmp_path):
    """Another run's model and weights, and all else new: step, moments, data, schedule"""
    other = Path(shutil.copytree(data, tmp_path / "other"))
    edited(lambda meta: meta.update(name="other"))(other / "meta.json")
    def begin(out, flags, source=copy):
        return main(f"--init_from {source} --data {other} --out {tmp_path / out} --device cpu --max_iters 2 {flags}")
    assert begin("new", "--lr 1e-30 --seed 9") == 0
    new, config = load(tmp_path / "new"), settings(tmp_path / "new")
    assert same_weights(new, load(copy)) and new["step"] == 2
    assert (config["init_from"], config["data"], config["n_embd"]) == (str(copy), str(other), 32)
    assert config["optimizer"] == "muon" and config["seed"] == 9   # These are no part of a model.
    assert resume(tmp_path / "new", "--max_iters 3") == 0
    assert "has 2, and can't change it" in refused(begin, "x", "--n_layer 4")
    assert "has 32, and" in refused(parsed, f"--config {ROOT}/configs/gpt2.json --init_from {copy}")   # --config goes first.
    (tmp_path / "mine.json").write_text(json.dumps(dict(init_from=str(copy))))
    assert parsed(f"--config {tmp_path}/mine.json")[0].n_embd == 32
    assert begin("coins", "--mod coins --seed 9") == main(f"--config {tmp_path}/coins --out {tmp_path}/replay") == 0
    same_run(tmp_path / "coins", tmp_path / "replay")
    go(data, tmp_path / "nag", "--residual nag --max_iters 1")
    free = "--mod gain:rate=0.25 --gain_cost 1 --block_size 16 --repeat 1:2 --deep_supervision"
    assert begin("free", free, tmp_path / "nag") == 0
    assert begin("router", "--mod router") == 0   # What a decider learns begins anew.
    assert begin("dense", "--mod all", tmp_path / "router") == 0
    assert begin("same", "--lr 1e-30", tmp_path / "router") == 0   # It goes on with the same decider.
    assert same_weights(load(tmp_path / "same"), load(tmp_path / "router"))
    edited(lambda ckpt: ckpt["settings"].update(tokenizer="gpt2"))(copy / "ckpt.pt")
    assert "needs the tokenizer of the weights of --init_from, gpt2" in refused(begin, "x", "")

def test_a_model_trains_on_after_a_block_was_removed(data, tmp_path):
    go(data, tmp_path / "run", "--n_layer 3 --max_iters 2 --residual nag")
    flags = f"--init_from {tmp_path}/run --data {data} --lr 1e-30 --gate_lr 0 --max_iters 1"
    assert main(f"{flags} --remove 2 --out {tmp_path}/pruned") == 0
    whole, pruned = (train.open_run(tmp_path / name)[0] for name in ("run", "pruned"))
    idx = torch.arange(32)[None]
    wanted = whole(idx, trip=train.Trip(whole, without={3, 4}))[0]
    assert pruned.config.n_layer == 2 and torch.allclose(pruned(idx)[0], wanted, atol=1e-6)
    assert main(f"--config {tmp_path}/pruned --out {tmp_path}/replay") == 0
    same_run(tmp_path / "pruned", tmp_path / "replay")
    assert resume(tmp_path / "pruned", "--max_iters 2") == 0
    for line, words in ((f"{flags} --remove 4", "blocks 1 to 3"), (f"{flags} --remove 1 --n_layer 3", "has 2"),
                        ("--remove 1", "add --init_from"), ("--resume --out x --remove 1", "--remove")):
        assert words in refused(main, line)

class Scaled(Residual):
    def __init__(self, config, l, by=0.5):
        super().__init__(config, l)
        self.by = by
    def forward(self, x, f):
        return x + self.by * f(self.norm(x))

class Edited(Scaled):
    def __init__(self, config, l, by=2.0):
        super().__init__(config, l, by)

def test_defaults_of_a_class_may_change(data, tmp_path, monkeypatch, capsys):
    """A run is saved with the values of its options. Of other code, its loss tells."""
    run = tmp_path / "mine"
    monkeypatch.setitem(RESIDUALS, "mine", Scaled)
    go(data, run, "--residual mine --max_iters 4")
    monkeypatch.setitem(RESIDUALS, "mine", Edited)
    assert resume(run) == resume(run, "--residual mine:by=0.50") == 0
    assert "other code" not in capsys.readouterr().out
    assert "has mine:by=0.5," in refused(resume, run, "--residual mine")
    model, found = train.open_run(run)
    assert model.ends.by == 0.5 and train.data_of_run("mine", found, model=model) == (str(data), "")
    monkeypatch.setattr(Edited, "forward", lambda self, x, f: x - f(self.norm(x)))
    folder, says = train.data_of_run("mine", found, model=train.open_run(run)[0])
    assert folder == str(data) and re.match("mine: has the validation loss .*other code, or other data", says)
    assert resume(run) == 0 and "other code, or other data" in capsys.readouterr().out

class Drawn(Residual):
    def __init__(self, config, l):
        super().__init__(config, l)
        if self.has_sublayer:
            self.b = torch.nn.Parameter(torch.randn(config.n_embd))
    def forward(self, x, f):
        return x + self.b * F.dropout(f(self.norm(x)), 0.5, self.training)

def test_first_weights_depend_on_the_seed(data, tmp_path, monkeypatch):
    """... also where a class draws them as it likes."""
    monkeypatch.setitem(RESIDUALS, "drawn", Drawn)
    for name, seed in ("a", 1), ("b", 1), ("c", 2):
        torch.rand(5)
        go(data, tmp_path / name, f"--residual drawn --max_iters 1 --seed {seed}")
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b") != metrics(tmp_path / "c")

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

@pytest.mark.parametrize("residual", RESIDUALS)
def test_optimizer_groups(residual):
    model = GPT(GPTConfig(**TINY, residual=residual))
    # A residual of one's own may have a parameter of three dimensions.
    model.blocks[0].register_parameter("own", torch.nn.Parameter(torch.randn(2, 3, 4)))
    gates = {getattr(r, name) for r in model.residuals() for name in r.own_lr if hasattr(r, name)}
    assert gates or residual not in ("nag", "attnres")
    for optimizer in "adamw", "sgd", "muon":
        config = train.TrainConfig(optimizer=optimizer, lr=0.02, gate_lr=5e-4, gate_beta1=0.5, beta1=0.7)
        made = train.make_optimizers(model, config)
        groups = {p: group for each in made for group in each.param_groups for p in group["params"]}
        for name, p in model.named_parameters():
            assert groups[p]["weight_decay"] == (0.1 if p.dim() >= 2 and p not in gates else 0), name
            assert groups[p]["peak_lr"] == (5e-4 if p in gates else 2e-2)
            if optimizer == "adamw":
                assert groups[p]["betas"] == (0.5 if p in gates else 0.7, 0.95)
    by_muon = {name for name, p in model.named_parameters() if groups[p] is made[1].param_groups[0]}
    assert all(re.match(r"blocks\.", name) and groups for name in by_muon) and "blocks.0.own" not in by_muon
    assert by_muon >= {name for name, _ in model.named_parameters() if re.search("c_(attn|fc|proj).weight$", name)}

needs_a_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler here")

@pytest.mark.parametrize("flags", ["--checkpoint_blocks", pytest.param(
    "--compile --checkpoint_blocks", marks=[pytest.mark.slow, needs_a_compiler])])
def test_checkpointed_and_compiled_runs(data, tmp_path, monkeypatch, flags):
    """Gradients are the same, also of a residual that draws numbers."""
    monkeypatch.setitem(RESIDUALS, "drawn", Drawn)
    monkeypatch.setattr(train, "for_training", Mock(wraps=train.for_training))
    residuals = ["pre"] if "--compile" in flags else ["pre", "drawn"]
    for residual in residuals:
        for name, more in ("plain", ""), ("switched", flags):
            go(data, tmp_path / name, f"--residual {residual} --mod coins:rate=0.3 --max_iters 4 --log_interval 1 "
                                      f"--overwrite {more}")
        plain, switched = ([[entry["loss"], entry["grad_norm"]] for entry in reports(tmp_path / name)]
                           for name in ("plain", "switched"))
        assert np.array(switched) == pytest.approx(np.array(plain), rel=1e-4)
    (*_, compiles, checkpoints), _ = train.for_training.call_args
    assert checkpoints and compiles == ("--compile" in flags)

def test_no_compiler(data, tmp_path, monkeypatch):
    """One sentence, before anything is written"""
    monkeypatch.setattr(torch, "compile", Mock(side_effect=RuntimeError("No working C++ compiler\nfound")))
    assert "install a C++ compiler" in refused(go, data, tmp_path / "x", "--compile")
    assert not (tmp_path / "x").exists()

def test_bfloat16_is_for_products_only(data, tmp_path):
    """Weights, norms and the stream stay float32, and so do draws. On a CPU, auto is float32."""
    flags = "--residual nag --mod coins:rate=0.3 --max_iters 6 --log_interval 1"
    for dtype in "auto", "float32", "bfloat16":
        go(data, tmp_path / dtype, f"{flags} --dtype {dtype}")
    auto, float32, bfloat16 = (reports(tmp_path / dtype) for dtype in ("auto", "float32", "bfloat16"))
    assert auto == float32 != bfloat16
    for one, other in zip(float32, bfloat16):
        assert one["skip_rate"] == other["skip_rate"] and one["loss"] == pytest.approx(other["loss"], rel=0.02)
    assert {weight.dtype for weight in load(tmp_path / "bfloat16")["model"].values()} == {torch.float32}
    assert resume(tmp_path / "bfloat16", "--max_iters 7") == 0

# -------------------------------------------------------------------------------- resume

def at_step(number, action, monkeypatch):
    """action(model) after this step of what is trained next, counted from 1"""
    models, left, usual = [], iter(range(number, -999, -1)), torch.optim.AdamW.step
    def make_model(config):
        models.append(make(config))
        return models[-1]
    def step(self, *args):
        usual(self, *args)
        if next(left) == 1:
            action(models[-1])
    make = train.make_model
    monkeypatch.setattr(train, "make_model", make_model)
    monkeypatch.setattr(torch.optim.AdamW, "step", step)

@pytest.mark.parametrize("number, flags", [
    (signal.SIGHUP, "--residual nag --gain_cost 0.1 --mod gain:below=0.3 --grad_accum 2"),
    (signal.SIGINT, "--residual attnres --optimizer muon --lr 0.02 --schedule wsd"),
    (signal.SIGTERM, "--residual nag --mod gain:rate=0.3 --optimizer muon"),
    (signal.SIGTERM, "--residual gated --mod coins:rate=0.3"),
    (signal.SIGTERM, "--mod router:rate=0.25")])
def test_resume_after_a_signal_is_bit_identical(data, tmp_path, monkeypatch, capsys, number, flags):
    flags = f"{flags} --max_iters 24 --log_interval 3 --eval_interval 10"
    assert go(data, tmp_path / "whole", flags) == 0
    at_step(12, lambda model: signal.raise_signal(number), monkeypatch)
    assert go(data, tmp_path / "parts", flags) == 1
    assert load(tmp_path / "parts")["step"] == 12
    assert "--resume" in capsys.readouterr().out.splitlines()[-1]
    assert resume(tmp_path / "parts") == 0
    same_run(tmp_path / "whole", tmp_path / "parts")
    assert "--mod" not in flags or reports(tmp_path / "parts")[-1]["skip_rate"] > 0.1

def test_trips_of_a_training_know_its_progress(data, tmp_path, monkeypatch):
    seen = []   # An evaluation adds nothing.
    monkeypatch.setattr(train, "needed_trip", lambda model, *progress: seen.extend(progress))
    go(data, tmp_path, "--max_iters 2 --grad_accum 2")
    resume(tmp_path, "--max_iters 3")
    assert seen == [0, 0, 1/2, 1/2, 2/3, 2/3]

@pytest.mark.skipif(torch.cuda.is_available(), reason="forks; see start")
@pytest.mark.parametrize("n", range(1, 6))
def test_kill_9(data, finished, tmp_path, n):
    """... while the n-th file is written: ckpt.pt, config.json and metrics.jsonl of step 0, ckpt.pt of 10, of 20.
    The folder is new, or it holds a run that is to be replaced, which is kept, whole."""
    flags = "--residual nag --max_iters 20 --log_interval 5 --eval_interval 10"
    go(data, tmp_path / "whole", flags)
    for name, how in ("new", ""), ("replaced", "--overwrite"):
        killed = tmp_path / name
        if how:
            shutil.copytree(finished, killed)
        pid = os.fork()
        if pid == 0:
            left = list(range(n))
            os.fsync = lambda file: left.pop() or os.kill(os.getpid(), signal.SIGKILL)
            try:
                go(data, killed, f"{flags} {how}")
            finally:
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL and any(killed.glob(HALF))
        if how:
            assert content(killed / "replaced-1") == content(finished)
        assert go(data, killed, f"{flags} --or_resume") == 0
        assert not any(killed.glob(HALF)) and settings(killed) == settings(tmp_path / "whole")
        same_run(tmp_path / "whole", killed)

def test_or_resume_of_a_run_that_is_there(data, finished, copy):
    """How it began is over, and it is done. (test_kill_9 has runs that aren't.) What may be precious stays."""
    flags = f"--or_resume --max_iters 8 --config {finished} --init_from {finished}"
    assert go(data, copy, flags) == 0 and changes(copy) == {}
    same_run(finished, copy)
    (copy / "ckpt.pt").unlink()
    before = content(copy)
    assert "its ckpt.pt is gone" in refused(go, data, copy, flags)
    assert content(copy) == before

@pytest.mark.parametrize("end", [
    b'{"step": 9, "loss": 1.0}\n{"step": 11, "val_loss": 0.1}\n',   # of a timeline that has died
    b'{"step": 9, "loss": 0.0\0\0', b'{"step": 8, "loss": 1.0}'])   # torn; only its newline torn
def test_what_is_behind_the_checkpoint(copy, end):
    """A crash may leave it. What is appended must not land on the same line."""
    path = copy / "metrics.jsonl"
    before = metrics(copy)
    path.write_bytes(path.read_bytes() + end)
    assert resume(copy, "--max_iters 12 --log_interval 4") == 0
    assert all(before[step].items() <= metrics(copy)[step].items() for step in before)
    lines = [json.loads(line) for line in path.read_text().splitlines()]   # All are whole.
    assert {line["step"] for line in lines} == {0, 4, 8, 12}
    assert metrics(copy)[12].keys() >= {"loss", "val_loss"}

def test_nothing_that_is_not_finite_is_saved(data, tmp_path, monkeypatch):
    """A weight gets infinite in step 8, and no checkpoint has it, also if a signal comes. And a gradient does:
    clipping makes it a zero, so the weights don't show it, and a status line finds it."""
    def poison(model):
        model.blocks[1].mlp.c_proj.weight.data[0, 0] = math.inf
    def stops(name, step, saved, flags):
        sentence = refused(go, data, tmp_path / name, f"--max_iters 12 {flags}")
        assert re.search(f"iteration {step}: .*not finite.*lower --lr.*ckpt.pt", sentence)
        assert load(tmp_path / name)["step"] == saved
    at_step(8, poison, monkeypatch)
    stops("pause", 8, 4, "--log_interval 100 --eval_interval 4")
    assert resume(tmp_path / "pause") == 0 and metrics(tmp_path / "pause")[12]["val_loss"] > 0
    at_step(8, lambda model: (poison(model), signal.raise_signal(signal.SIGTERM)), monkeypatch)
    stops("stopped", 8, 0, "--log_interval 100 --eval_interval 100")
    monkeypatch.setattr(train, "clip_grad_norm_", lambda *args: torch.tensor(math.inf))
    stops("gradient", 1, 0, "--log_interval 1")
    monkeypatch.setattr(train, "evaluate", lambda *args: (math.nan, math.nan, 0.0))
    assert "iteration 0: the validation loss, or a weight, is not finite" in refused(go, data, tmp_path / "new")
    assert not (tmp_path / "new").exists()

# --------------------------------------------------------------------------------- run folders

def test_a_full_disk(copy, data):
    """One sentence, and the old checkpoint stays."""
    before = content(copy)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limit[1]))
    try:
        assert ": can't be written" in refused(resume, copy, "--max_iters 9 --log_interval 99")
        (copy / "metrics.jsonl").write_bytes(b" " * 9000)
        with pytest.raises(OSError, match="File too large"):
            train.write_log(copy, step=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    after = content(copy)
    assert after["ckpt.pt"] == before["ckpt.pt"] and after.keys() == before.keys()

@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_links_in_a_run_folder(copy, tmp_path, link):
    """What they lead to stays as it is: another run that was copied by links, or any file at all."""
    before = content(copy)
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in before:
        link(copy / name, linked / name)
    assert resume(linked, "--max_iters 12") == 0 and max(metrics(linked)) == 12
    assert content(copy) == before

def test_two_runs_in_one_folder(data, copy):
    with prepare.locked(copy):
        before = content(copy)
        assert "another process" in refused(resume, copy)
        assert "another process" in refused(go, data, copy, "--overwrite")
        assert content(copy) == before
    assert resume(copy) == 0
    assert go(data, copy, "--overwrite --max_iters 3") == 0   # The folder is free again.
    assert list(metrics(copy)) == [0, 3] and load(copy)["step"] == 3

def test_what_a_new_run_may_find(data, finished, tmp_path):
    """A folder that holds a run is refused, and one of another program. Notes are no obstacle.
    --overwrite replaces a run, and nothing else."""
    out, whole = tmp_path / "run", content(finished)
    def fill(held):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        for name, raw in held.items():
            (out / name).write_bytes(raw)
    for held in whole, {"meta.json": b"{}"}, {"ckpt.pt": b"weights"}, {"config.json": b'{"model_type": "llama"}'}:
        fill(held)
        for flags in ("",) if held is whole else ("", "--overwrite"):
            says = "holds a run; --resume continues it" if held is whole else "of another program"
            says = "holds a ckpt.pt alone" if [*held] == ["ckpt.pt"] else says
            assert says in refused(go, data, out, flags) and content(out) == held
    for held, flags in (whole | {"notes": b"mine"}, "--overwrite"), ({"notes": b"mine"}, ""):
        fill(held)
        assert go(data, out, f"{flags} --max_iters 2") == 0 and (out / "notes").read_bytes() == b"mine"

def test_other_data(data, copy, tmp_path, monkeypatch):
    other = Path(shutil.copytree(data, tmp_path / "other"))
    assert resume(copy, f"--data {other} --max_iters 9") == 0   # The same data elsewhere.
    header = np.array([prepare.MAGIC, prepare.VERSION, 900] + 253 * [0], "<i4").tobytes()
    before, whole = content(copy), content(other)
    for name, raw in (("meta.json", b'{"name": "other", "tokenizer": "bytes"}'),
                      ("train_000000.bin", header + np.full(900, 7, "<u2").tobytes())):
        (other / "meta.json").write_bytes(whole["meta.json"])
        (other / name).write_bytes(raw)
        assert "other data" in refused(resume, copy)
        assert content(copy) == before
    (other / name).write_bytes(header + np.full(900, 320, "<u2").tobytes())
    assert "beyond its tokenizer" in refused(go, other, tmp_path / "new", "--max_iters 2")

class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)

BROKEN = {   # a file and what is wrong with it -> how that comes about
    "ckpt.pt gone": Path.unlink,
    "ckpt.pt half": lambda path: os.truncate(path, 1000),
    "ckpt.pt weights": edited(lambda c: [c.pop(key) for key in [*c]] and None),   # of another program
    "ckpt.pt code": edited(lambda c: c.update(evil=Evil()))}

@pytest.mark.parametrize("what", BROKEN)
def test_broken_run_folders(copy, monkeypatch, what):
    """One sentence, nothing overwritten, no code run"""
    monkeypatch.chdir(copy.parent)
    name = what.split()[0]
    BROKEN[what](copy / name)
    before = content(copy)
    assert name in refused(resume, copy, "--max_iters 20")
    assert name in refused(train.open_run, copy)
    assert content(copy) == before and not Path("evil").exists()

def test_a_class_that_has_gone(data, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(DECIDERS, "mine", DECIDERS["coins"])
        go(data, tmp_path, "--mod mine --max_iters 1")
    for sentence in (refused(train.open_run, tmp_path), refused(resume, tmp_path),
                     refused(main, f"--config {tmp_path} --out {tmp_path}/x")):
        assert "--mod mine" in sentence and "choose from all" in sentence

# ------------------------------------------------------------------- signals, threads, and errors

def test_a_dead_stdout_ends_no_run(data, tmp_path):
    out = tmp_path / "Läufe"   # which its terminal can't write
    process = start(tmp_path / "log", f"--data {data} {SIZE} --out {out} --max_iters 6", stdout="/dev/full")
    assert wait(process) == [0] and max(metrics(out)) == 6
    assert (tmp_path / "log.err").read_text() == ""

def test_signals():
    """The first one is noted, the second one does what it always does, and nohup is heard."""
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)   # nohup
    with train.noted_signals() as signals:
        for number in signal.SIGHUP, signal.SIGTERM, signal.SIGINT:
            signal.raise_signal(number)
        assert signals == [signal.SIGTERM, signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before

def test_main_in_another_thread(data, tmp_path):
    """as in some notebooks: signals reach the main thread alone."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert pool.submit(go, data, tmp_path, "--max_iters 1").result() == 0

@pytest.mark.parametrize("error, words", [
    (OSError(28, "No space left on device"), "No space left"), (KeyboardInterrupt(), "130"),
    (command_line.Mistake("Mine forgets"), "Mine forgets"),
    (RuntimeError("in /usr/lib/python3/dist-packages/torch/nn.py"), None)])
def test_what_a_user_can_mend_is_one_sentence(error, words):
    with pytest.raises(SystemExit if words else RuntimeError) as end:
        command_line.start(Mock(side_effect=error))
    assert end.value is error or words in str(end.value) and "\n" not in str(end.value)

# ---------------------------------------------------------------------------- several processes

@pytest.mark.parametrize("flags, tolerance", [
    ("--residual nag --gain_cost 0.1 --mod gain:below=0.3", 2e-3),   # A gain may be on either side.
    ("--residual nag --mod gain:rate=0.3", 2e-3),   # It has one threshold.
    ("--mod coins:rate=0.4", 1e-4),
    ("--mod router:rate=0.25", 1e-5),
    ("--optimizer muon --lr 0.02 --residual attnres", 2e-2)])
def test_two_processes_train_as_one(data, tmp_path, flags, tolerance):
    """Four parts of a batch, in one process or in two: the same coins and losses"""
    flags = f"{flags} --batch_size 8 --max_iters 15 --log_interval 1 --eval_interval 7"
    two = start_two(tmp_path, f"--data {data} {SIZE} --out {tmp_path}/two {flags} --grad_accum 2")
    assert go(data, tmp_path / "one", f"{flags} --grad_accum 4") == 0
    assert wait(*two) == [0, 0], (tmp_path / "process0.err").read_text()
    assert "iter" not in (tmp_path / "process1.out").read_text()   # The first one speaks.
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert one.keys() == two.keys() and (one[15]["skip_rate"] > 0.1) == ("--mod" in flags)
    assert ("mean_gain" in one[15]) == ("gain" in flags)
    for step in one:
        for key in one[step]:
            wanted = pytest.approx(two[step][key], rel=tolerance, abs=tolerance)
            assert one[step][key] == wanted, (step, key)
    assert resume(tmp_path / "two", "--max_iters 16 --grad_accum 4") == 0   # goes on as one

def test_processes_stop_together(data, tmp_path):
    """A signal to one of them: both leave after the same step, all is saved, one speaks."""
    out = tmp_path / "run"
    def said():
        return [(tmp_path / f"process{rank}.err").read_text() for rank in range(2)]
    two = start_two(tmp_path, f"--data {data} {SIZE} --out {out} {LONG}")
    wait_for(out / "ckpt.pt", two[0])
    time.sleep(0.2)
    os.kill(two[1].pid, signal.SIGTERM)
    assert wait(*two) == [1, 1]
    assert "--resume" in (tmp_path / "process0.out").read_text()
    begun = load(out)["step"]
    assert resume(out, f"--max_iters {begun + 2}") == 0 and max(metrics(out)) == begun + 2
    # So do they if one is refused, or if the loss isn't finite.
    with prepare.locked(out):
        two = start_two(tmp_path, f"--out {out} --resume")
        two[0].join(60)
        two[1].kill()   # as torchrun does
    assert two[0].exitcode == 1 and re.fullmatch(".*another process is writing there.*\n", said()[0])
    wild = "--lr 1e3 --weight_decay 1e3 --grad_clip 0 --warmup 0 --log_interval 1"
    two = start_two(tmp_path, f"--out {out} --resume --max_iters {begun + 50} {wild}")
    assert wait(*two) == [1, 1] and load(out)["step"] == begun + 2
    assert "lower --lr" in said()[0].splitlines()[-1]

@pytest.mark.slow
def test_torchrun(data, tmp_path):
    """The real thing: a signal, then one of two processes is killed, and the run goes on all the same."""
    def torchrun(name):
        line = (f"-m torch.distributed.run --standalone --nproc_per_node 2 --max_restarts 1 train.py --data {data} "
                f"{SIZE} --max_iters 60 --eval_interval 20 --log_interval 5 --or_resume --out {tmp_path / name}")
        return subprocess.Popen([sys.executable, *line.split()], cwd=ROOT)
    def at(step, process):
        while max(metrics(tmp_path / "run"), default=0) < step:
            assert process.poll() is None
            time.sleep(0.01)
    assert torchrun("whole").wait(300) == 0
    first = torchrun("run")
    at(10, first)
    first.send_signal(signal.SIGINT)
    first.wait(60)
    second = torchrun("run")
    at(30, second)
    workers = subprocess.check_output(["pgrep", "-P", str(second.pid)], text=True).split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    assert second.wait(300) == 0
    same_run(tmp_path / "whole", tmp_path / "run")

# ---------------------------------------------------------------------------- the command line

REFUSED = [   # a command line, perhaps after a variable, and the words that its sentence must have
    ("--n_head 2 --n_lay=3", "unrecognized arguments: --n_lay=3"), ("--residual x", "choose from"),
    ("--no-lr", "unrecognized arguments: --no-lr"), ("--min_lr 6e-5", "share of --lr"),
    ("--max_iters 0", "--max_iters 0: must be from 1"),
    ("--repeat 1-2:999", "--repeat 1-2:999"), ("--config nothing", "nothing: no settings there"),
    ("--out ''", "--out '': is empty"), ("--out file", "is a file"), ("--out {long}", "too long"),
    ("--grad_accum 4 --batch_size 6", "multiple of 4, its parts"),
    ("config=x.py", "flags begin with --"), ("--gate_lr 1 --residual pre", "nothing in --residual pre trains with it"),
    ("--lr", "=-VALUE"), ("--or_resume", "give --out"), ("--or_resume --overwrite --out {run}", "contradict"),
    ("--resume", "--out"), ("--resume --config x.json --out x", "--config"),
    ("--resume --init_from {run} --out {run}", "--init_from"),
    ("--resume --overwrite --out {run}", "contradict"),
    ("--resume --out {run} --n_embd 64", "has 32, and can't change it"),
    ("--resume --out {run} --repeat 1:2", "has none, and can't change it"),
    ("--resume --out nowhere", "no checkpoint there"), ("--init_from file", "name the folder of a run"),
    ("--resume --out {run} --max_iters 7", "has 8 already"), ("--data nowhere", "no data set there"),
    ("--resume --out {run} --batch_size 8", "--batch_size 8"),
    # Moments are of one optimizer, so a run that is resumed keeps it.
    ("--resume --out {run} --optimizer sgd --lr 1", "--optimizer sgd"),
    ("--resume --out {run} --eval_windows 9", "--eval_windows 9")]
if not torch.cuda.is_available():
    REFUSED.append(("--device cuda", "--device cpu"))

@pytest.mark.parametrize("line, words", REFUSED, ids=[line for line, _ in REFUSED])
def test_refusals(data, finished, tmp_path, monkeypatch, line, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    given, before = line.format(run=finished, long="x" * 300), content(finished)
    base = "" if "--resume" in given else f"--data {data} {SIZE}"
    assert words in refused(main, f"{base} {given}")
    assert content(finished) == before and {path.name for path in tmp_path.rglob("*")} <= {"file", "runs"}

def test_all_mistakes_are_told_at_once():
    with pytest.raises(SystemExit, match="--n_layer.*\n.*--lr.*\n.*--warmup"):
        main("--lr -1 --warmup 2 --n_layer 0")

def test_help(capsys):
    with pytest.raises(SystemExit):
        main("--help")
    text = capsys.readouterr().out
    for config in GPTConfig, train.TrainConfig:
        for name, field in config.__dataclass_fields__.items():   # Every number has a range.
            assert re.search(rf"--{name} \S+\s+\[" if field.type in (int, float) else f"--{name}", text), name
    assert "(default )" not in text and "(default None)" not in text and "(default 1337)" in text
    assert all(f"{rate:g} for {each}" in " ".join(text.split()) for each, rate in train.RATES.items())
    titles = "skipping", "run", "optimizer", "machine", "residuals, with their options"
    assert all(f"\n{title}:" in text for title in titles)
    assert all(f"\n  {name}" in text for name in RESIDUALS) and "\n  hyper:kind=identity,n=4" in text
