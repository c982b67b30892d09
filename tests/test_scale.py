"""train.py beyond one process and one optimizer: Muon, FSDP2, checkpointed blocks, learning rates over
depth."""
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten
from test_sample import cli
from test_train import command, data, metrics, same_run, start, weights   # noqa: F401 (data is a fixture)

import train
from model import GPT, GPTConfig, RESIDUALS

SMALL = dict(n_layer=3, n_embd=36, n_head=2, block_size=16, vocab_size=64)
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)


def torchrun(n):
    return ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", n]


@pytest.fixture
def main():
    """train.main in this process: a start of python less per run."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield lambda args: train.main([*map(str, args)][1:])
    for number, handler in before.items():
        signal.signal(number, handler)


def tokens(step, n=8, T=16):
    rows = torch.randint(64, (n, T + 1), generator=torch.Generator().manual_seed(step))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# ----------------------------------------------------------------------------- Muon

@pytest.mark.parametrize("flags", [*[dict(residual=name) for name in RESIDUALS], dict(tie=True, x0=True),
                                   dict(mod="router", mod_rate=0.25), dict(share_every=1, share_rank=2)],
                         ids=str)
def test_muon_takes_the_matrices_of_the_blocks(flags):
    model = GPT(GPTConfig(**SMALL | flags))
    names = {p: name for name, p in model.named_parameters()}
    optimizers = train.make_optimizers(model, train.TrainConfig(optimizer="muon"))
    mine = {kind: [names[p] for group in optimizer.param_groups for p in group["params"]]
            for kind, optimizer in optimizers.items()}
    assert sorted(mine["muon"] + mine["optimizer"]) == sorted(names.values())
    gates = {name for residual in model.residuals() for name in (*residual.gates, *residual.vectors)}
    for name in mine["muon"]:
        assert name.startswith("blocks.") and name.split(".")[-1] not in gates and "router" not in name
    assert all(name in mine["muon"] for name in names.values()
               if name.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight")))


def test_muon_resumes_bit_identically(data, tmp_path, main):   # noqa: F811
    flags = ["--optimizer", "muon", "--residual", "nag", "--schedule", "wsd", "--min_lr", 1, "--warmup", 0,
             "--eval_interval", 6, "--log_interval", 3]
    main(command(data, tmp_path / "whole", *flags, "--max_iters", 12))
    main(command(data, tmp_path / "parts", *flags, "--max_iters", 6))
    main(["train.py", "--out", tmp_path / "parts", "--resume", "--max_iters", 12])
    same_run(tmp_path / "whole", tmp_path / "parts")
    ckpt = torch.load(tmp_path / "parts" / "ckpt.pt", weights_only=True)
    assert all("momentum_buffer" in state for state in ckpt["muon"]["state"].values())
    for other in ("adamw", "sgd"):
        with pytest.raises(SystemExit, match="--optimizer"):
            main(["train.py", "--out", tmp_path / "parts", "--resume", "--max_iters", 15,
                  "--optimizer", other])
    losses = [line["loss"] for line in metrics(tmp_path / "whole") if "loss" in line]
    assert losses[-1] < losses[0] - 0.05


# ----------------------------------------------------------------------------- checkpointed blocks

@pytest.mark.parametrize("flags", [
    dict(), dict(residual="attnres"), dict(residual="siamese"), dict(value_residual=True),
    dict(layer_drop=0.3), dict(mod="router", mod_rate=0.25),
    dict(residual="nag", mod_rate=0.3, mod_explore=0.3),
    dict(residual="nag", mod_rate=0.3, mod_kv="kept", mod_explore=0.3), dict(repeat="2:2")], ids=str)
def test_checkpointed_blocks_change_nothing(flags):
    results = []
    for on in (False, True):
        model, kept = GPT(GPTConfig(**SMALL | flags)), []
        model.checkpoint_blocks = on
        if model.tau is not None:
            x, y = tokens(0)
            model.tau.copy_(train.calibrate(model, [x], 0.3)[0])
        for micro in range(2):
            x, y = tokens(micro)
            loss = model(x, y, generator=torch.Generator().manual_seed(micro), kept=kept)[1]
            loss.backward()
        grads = [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]
        results.append([loss.detach(), *grads, *[k for k in kept if k is not None]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_checkpointed_blocks_keep_less():
    sizes = []
    for on in (False, True):
        model, count = GPT(GPTConfig(**SMALL)), []
        model.checkpoint_blocks = on
        with torch.autograd.graph.saved_tensors_hooks(lambda x: count.append(x.numel()) or x, lambda x: x):
            model(*tokens(0))
        sizes.append(sum(count))
    assert sizes[1] < sizes[0] / 2


# ----------------------------------------------------------------------------- CompleteP

def test_transfer_at_the_base_depth_is_the_plain_model():
    plain = GPT(GPTConfig(**SMALL))
    for transfer in ("completep", "depth-mup"):
        model = GPT(GPTConfig(**SMALL, transfer=transfer, base_depth=3))
        assert torch.equal(model(*tokens(0))[1], plain(*tokens(0))[1])


def test_transfer_scales_the_groups():
    """CompleteP: eps of the blocks x 1 / ratio; depth-muP: eps and learning rate x ratio ** -0.5; no decay
    changes."""
    for transfer, lr, eps in (("completep", 1, 1 / 4), ("depth-mup", 1 / 2, 1 / 2)):
        model = GPT(GPTConfig(**SMALL | dict(n_layer=8), transfer=transfer, base_depth=2))
        inner = {*model.blocks.parameters()}
        groups = train.make_optimizers(model, train.TrainConfig())["optimizer"].param_groups
        assert sum(len(group["params"]) for group in groups) == len([*model.parameters()])
        for group in groups:
            deep = {p in inner for p in group["params"]}
            assert len(deep) == 1
            assert group["peak"] == pytest.approx(3e-3 * (lr if True in deep else 1))
            assert group["eps"] == pytest.approx(1e-8 * (eps if True in deep else 1))
            assert group["weight_decay"] == (0.1 if group["params"][0].dim() >= 2 else 0)


def change_of_the_stream(n_layer, transfer, steps=4):
    """Root mean square of what a few steps change in the last stream."""
    model = GPT(GPTConfig(**SMALL | dict(n_layer=n_layer), transfer=transfer, base_depth=4))
    optimizer, x = train.make_optimizers(model, train.TrainConfig())["optimizer"], tokens(99)[0]
    last = lambda: [before for _, before, _ in model.walk(x)][-1].detach()
    before = last()
    for step in range(steps):
        model(*tokens(step))[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return (last() - before).square().mean().sqrt().item()


def test_coordinate_check():
    """With CompleteP, 32 blocks move the stream as far as 4 do, within a factor of 1.6; without, over 3
    times."""
    ratio = {transfer: change_of_the_stream(32, transfer) / change_of_the_stream(4, transfer)
             for transfer in ("none", "completep")}
    assert 1 / 1.6 < ratio["completep"] < 1.6 and ratio["none"] > 3, ratio


# ----------------------------------------------------------------------------- several processes

def steps_of(split, optimizer, flags):
    """Losses and gradient norms of four steps: on whole weights and batches, or on this process's parts of
    both."""
    model, rank, n = GPT(GPTConfig(**SMALL | flags)), dist.get_rank(), dist.get_world_size()
    model.checkpoint_blocks = split
    numbers = train.shard(model, "cpu", n) if split else []
    optimizers = train.make_optimizers(model, train.TrainConfig(optimizer=optimizer))
    pull = train.GradNorms(model, "cpu")
    seen = []
    for step in range(4):
        x, y = (t.chunk(n)[rank] if split else t for t in tokens(step))
        loss = model(x, y)[1]
        loss.backward()
        loss = loss.detach().clone()
        if split:
            train.mean_grads(numbers, n)
            dist.all_reduce(loss)
            loss /= n
        norm = pull.measure(True, equalize=True)
        torch.nn.utils.clip_grads_with_norm_(pull.params, 0.5, norm)
        for each in optimizers.values():
            each.step()
            each.zero_grad()
        model.constrain()
        seen += [loss.item(), norm.item()]
    return torch.tensor([*seen, *pull.sums.flatten().tolist()], dtype=torch.float64)


def worker(cases):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for optimizer, flags in cases:
        mine, wanted = steps_of(True, optimizer, flags), steps_of(False, optimizer, flags)
        error = ((mine - wanted).abs() / wanted.abs().clamp_min(1e-6)).max().item()
        # Muon's five products are in bf16: sums in another order are off by as much with DDP
        assert error < (1e-2 if optimizer == "muon" else 1e-4), (optimizer, flags, error)
    dist.barrier()
    dist.destroy_process_group()


FEW = [("adamw", dict(residual="nag")), ("adamw", dict(residual="attnres", tie=True)),
       ("muon", dict(residual="ngpt")),
       ("adamw", dict(residual="peri", x0=True, transfer="completep", deep_supervision=True))]
ALL = [(optimizer, dict(residual=name)) for name in RESIDUALS for optimizer in ("adamw", "muon")] + [
    ("adamw", dict(norm="dyt")), ("adamw", dict(norm="crms", taper="linear", taper_match="none")),
    ("adamw", dict(residual="attnres", attnres_blocks=2)),
    ("adamw", dict(residual="hyper", hyper_kind="mhc"))]


@pytest.mark.parametrize("n, cases", [(2, "FEW"), slow(2, "ALL"), slow(4, "ALL")])
def test_split_weights_train_like_whole_ones(n, cases):
    code = ("import sys; sys.path[:0] = ['tests', '.']; import test_scale; "
            f"test_scale.worker(test_scale.{cases})")
    done = cli(*torchrun(n), "--no-python", sys.executable, "-c", code, check=False, timeout=1000)
    assert done.returncode == 0, done.stderr[-3000:]


def same_losses(a, b, rel):
    for x, y in zip(metrics(a), metrics(b), strict=True):
        for key in x.keys() & y.keys():
            assert x[key] == pytest.approx(y[key], rel=rel), key


def layout(run):
    leaves, tree = tree_flatten(torch.load(run / "ckpt.pt", weights_only=True))
    return str(tree), [(type(x), getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves]


@pytest.mark.parametrize("n, flags", [
    (2, ["--fsdp", "--checkpoint_blocks", "--grad_accum", 2]), slow(4, ["--fsdp"]), slow(4, []),
    slow(2, ["--fsdp", "--optimizer", "muon"]), slow(2, ["--fsdp", "--residual", "attnres"]),
    slow(2, ["--optimizer", "muon"]), slow(2, ["--fsdp", "--compile"])], ids=str)
def test_processes_follow_one_and_resume_as_any_number(data, tmp_path, main, n, flags):   # noqa: F811
    # 7 evaluation windows: processes have unequal shares of them
    flags = ["--residual", "nag", "--schedule", "wsd", "--min_lr", 1, "--warmup", 0, "--eval_interval", 4,
             "--log_interval", 1, "--eval_windows", 7, "--batch_size", 8, *flags]
    rel = 1e-2 if "muon" in flags else 1e-4
    alone = [flag for flag in flags if flag != "--fsdp"]
    main(command(data, tmp_path / "one", *alone, "--max_iters", 12))
    main(command(data, tmp_path / "many", *alone, "--max_iters", 4))
    resume = ["train.py", "--out", tmp_path / "many", "--resume", "--max_iters"]
    cli(*torchrun(n), *resume, 8, *(["--fsdp"] if "--fsdp" in flags else []))
    main([*resume, 12])   # though config.json says --fsdp, which is nothing to do for one process
    same_losses(tmp_path / "one", tmp_path / "many", rel)
    assert layout(tmp_path / "one") == layout(tmp_path / "many")


def workers(parent):
    """Process numbers of the children of a process (Linux)"""
    found = Path(f"/proc/{parent}/task").glob("*/children")   # of each of its threads
    return [int(pid) for path in found for pid in path.read_text().split()]


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the workers in /proc")
@pytest.mark.parametrize("n, flags", [(2, ["--fsdp"]), slow(2, []), slow(4, ["--fsdp"])], ids=str)
def test_a_killed_process_ends_the_run(data, tmp_path, main, n, flags):   # noqa: F811
    run = tmp_path / "run"
    process = start(*torchrun(n), *command(data, run, "--max_iters", 100000, "--eval_interval", 5, *flags))
    while not (run / "best.pt").exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(workers(process.pid)[-1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0 and "has lost another one" in err and "--resume" in err
    step = torch.load(run / "ckpt.pt", weights_only=True)["step"]
    main(["train.py", "--out", run, "--resume", "--max_iters", step + 2])
    assert metrics(run)[-1]["step"] == step + 2 and weights(run)


def test_a_signal_to_processes_saves_the_step(data, tmp_path):   # noqa: F811
    """Whatever --log_interval says: torchrun kills after 30 s."""
    run = tmp_path / "run"
    process = start(*torchrun(2), *command(data, run, "--max_iters", 100000, "--eval_interval", 100000,
                                           "--log_interval", 100000))
    while not (run / "best.pt").exists():   # of step 0
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(5)   # at least one step, also where both cores are busy
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0 and torch.load(run / "ckpt.pt", weights_only=True)["step"] > 0


# ----------------------------------------------------------------------------- bad input

@pytest.mark.parametrize("flags, words", [
    ("--fsdp --share_every 3", "--fsdp"), ("--fsdp --repeat 2:2", "--fsdp"),
    ("--fsdp --layer_drop 0.1", "--fsdp"), ("--fsdp --residual nag --mod_rate 0.2", "--fsdp"),
    ("--fsdp --value_residual", "--fsdp"), ("--fsdp --norm batch", "--fsdp"),
    ("--checkpoint_blocks --norm batch", "--checkpoint_blocks"),
    ("--equalize_grads --repeat 2:2", "--equalize_grads"), ("--equalize_grads --share_every 2", "gradients"),
    ("--transfer completep --residual nag", "--residual pre"),
    ("--transfer completep --base_depth 0", "--base_depth"),
    ("--transfer depth-mup --optimizer sgd", "adamw"), ("--transfer completep --repeat 2:2", "--transfer"),
    ("--optimizer moun", "muon")])
def test_refusals(flags, words, capsys):
    with pytest.raises(SystemExit) as refusal:
        train.resolve(flags.split())
    message = str(refusal.value)
    assert words in message and len(message.splitlines()) == 1
