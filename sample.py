"""
Sample from a run, with a KV cache and, if wanted, with Mixture-of-Depths: tokens skip sublayers.

    python sample.py runs/nag --prompt "def " --temperature 0.8 --top_k 50
    python sample.py runs/nag --skip 0.25 --depth          # colours: the share of sublayers each token used
    python sample.py runs/nag --prompt_file story.txt --max_new_tokens 500 --seed 7
    python sample.py runs/pre --prune cfp:3                # without the three blocks that mattered least

The text goes to stdout as it comes, everything about it to stderr.
"""
import argparse
import codecs
import contextlib
import math
import os
import sys
import time
from typing import get_args

import torch
import torch.nn.functional as F

import prepare
from model import GPTConfig
from train import Parser, load_run, pick_device, skip_threshold, val_windows


# ----------------------------------------------------------------------------- pruning
# Which blocks, or sublayers, to remove from a trained model, with no training after. A method is a function
# of (model, batches of (idx, targets), gradient norms of the training (3L,)) -> a score per candidate; the
# lowest go first. Sources and formulas: specs, 8.1 and 8.3. `reverse` is the confound that a score must beat,
# `loss` the true effect of removing one, which no cheap score can know.

def each_gradient(model, batches):
    """[(parameter, gradient of the loss summed over the batches)] of each block."""
    model.zero_grad(set_to_none=True)
    for idx, targets in batches:
        model(idx, targets)[1].backward()
    grads = [[(p.detach(), p.grad) for p in block.parameters() if p.grad is not None]
             for block in model.blocks]
    model.zero_grad(set_to_none=True)
    return grads


@torch.no_grad()
def stays(model, batches, step):
    """Mean over tokens of 1 - cos(stream before, stream after), per sublayer or, with step 2, per block."""
    total = 0.0
    for idx, _ in batches:
        walk = [model.ends.as_tensor(before).double() for _, before, _ in model.walk(idx)]
        walk = walk[::step]
        cos = [F.cosine_similarity(a, b, dim=-1).mean() for a, b in zip(walk, walk[1:])]
        total = total + 1 - torch.stack(cos)
    return total / len(batches)


@torch.no_grad()
def span_distance(model, batches, k):
    """Gromov et al.: angle / pi between the streams before and after k blocks, by the first of the blocks; at
    each window's last token."""
    total = 0.0
    for idx, _ in batches:
        walk = [model.ends.as_tensor(before)[:, -1].double() for _, before, _ in model.walk(idx)][::2]
        cos = [F.cosine_similarity(a, b, dim=-1) for a, b in zip(walk, walk[k:])]
        total = total + torch.stack([c.clamp(-1, 1).arccos().mean() / math.pi for c in cos])
    return total / len(batches)


@torch.no_grad()
def loss_without(model, batches, removed=()):
    """Mean loss in nats per token without some sublayers, numbered from 1."""
    total = 0.0
    for idx, targets in batches:
        *_, (_, _, logits) = model.walk(idx, removed)
        total += F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten()).item() / len(batches)
    return total


BLOCK_SCORES = {
    "cfp": lambda model, batches, norms: norms[2 * len(norms) // 3:],     # CascadeFlow Pruning: needs no data
    "magnitude": lambda model, batches, norms: torch.stack([
        sum(p.detach().double().abs().sum().cpu() for p in block.parameters()) for block in model.blocks]),
    "taylor": lambda model, batches, norms: torch.stack([
        sum(((p * g).double().abs().sum().cpu() for p, g in block), torch.zeros((), dtype=torch.float64))
        for block in each_gradient(model, batches)]),
    "influence": lambda model, batches, norms: stays(model, batches, 2),  # ShortGPT's, LLM-Drop's of blocks
    "loss": lambda model, batches, norms: torch.tensor([
        loss_without(model, batches, {2 * i + 1, 2 * i + 2}) for i in range(len(model.blocks))]),
    "reverse": lambda model, batches, norms: -torch.arange(len(model.blocks)).double(),
    "random": lambda model, batches, norms: torch.rand(
        len(model.blocks), generator=torch.Generator().manual_seed(0), dtype=torch.float64),
}
SUBLAYERS = {"attention": (0, 2), "mlp": (1, 2), "sublayer": (0, 1)}   # LLM-Drop: the first, every how many
PRUNE_METHODS = [*BLOCK_SCORES, "span", *SUBLAYERS]


def lowest(scores, k):
    return scores.argsort(stable=True)[:k].tolist()


def to_remove(method, k, model, batches, norms):
    """The sublayers, numbered from 1, that a method removes: k blocks, or k attentions, MLPs or sublayers."""
    if method in SUBLAYERS:
        first, every = SUBLAYERS[method]
        return {first + every * i + 1 for i in lowest(stays(model, batches, 1)[first::every], k)}
    if method == "span":
        first = span_distance(model, batches, k).argmin().item()
        blocks = range(first, first + k)
    else:
        blocks = lowest(BLOCK_SCORES[method](model, batches, norms), k)
    return {l for i in blocks for l in (2 * i + 1, 2 * i + 2)}


def prune(model, run, config, wanted, which="ckpt.pt"):
    """Remove what `METHOD:K` says. SystemExit if it can't be done. -> the removed sublayers"""
    method, _, k = wanted.partition(":")
    most = len(model.blocks) * (2 if method == "sublayer" else 1)
    if method not in PRUNE_METHODS or not k.isdigit() or not 0 <= int(k) < most:
        raise SystemExit(f"--prune {wanted}: say METHOD:K, K below {most}, METHOD one of "
                         f"{', '.join(PRUNE_METHODS)}")
    if model.config.mod == "router" or model.config.repeat:
        raise SystemExit(f"--prune {wanted}: {run} has routed or repeated blocks, which don't stand alone; "
                         f"use another run")
    norms = torch.load(f"{run}/{which}", map_location="cpu", weights_only=True).get("grad_norms")
    if method == "cfp" and (norms is None or not norms.any()):
        raise SystemExit(f"--prune {wanted}: {run}/{which} holds no gradient norms, which training collects "
                         f"after its warm-up; train on, or use another method")
    if not int(k):
        return set()
    x, y = (t.to(model.turn.device).split(8) for t in val_windows(config["data"], config["block_size"], 32))
    gone = to_remove(method, int(k), model, list(zip(x, y)), None if norms is None else norms[0])
    model.remove(gone)
    return gone


# ----------------------------------------------------------------------------- sampling

def parse(argv):
    parser = Parser("sample.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    allow_abbrev=False)
    parser.add_argument("run", help="run folder")
    parser.add_argument("--prompt", help="text to continue; default: the start of a document")
    parser.add_argument("--prompt_file", help="UTF-8 file with the text to continue")
    parser.add_argument("--max_new_tokens", type=int, default=300, help="tokens per sample (default 300)")
    parser.add_argument("--num_samples", type=int, default=1, help="samples, one after the other (default 1)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token (default 0.8)")
    parser.add_argument("--top_k", type=int, help="draw from the k likeliest tokens only")
    parser.add_argument("--top_p", type=float, help="draw from the fewest tokens with this probability only")
    parser.add_argument("--seed", type=int, default=1337, help="of the sampling (default 1337)")
    parser.add_argument("--skip", type=float,
                        help="share of the sublayer runs to skip; 0: none (default: as trained)")
    parser.add_argument("--prune", metavar="METHOD:K", help="run without K blocks (or sublayers), those that "
                        f"a method chooses: {', '.join(PRUNE_METHODS)}")
    parser.add_argument("--depth", action="store_true",
                        help="colour each token by the share of sublayers it used")
    for name, what in (("mod_on", "what is compared with the threshold"),
                       ("mod_scope", "what shares a threshold"),
                       ("mod_kv", "whose keys and values attention projects")):
        choices = get_args(GPTConfig.__annotations__[name])
        parser.add_argument(f"--{name}", choices=choices, help=f"{what} (default: as trained)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")
    parser.add_argument("--best", action="store_true", help="the best checkpoint instead of the last one")
    args = parser.parse(argv)
    if args.prompt is not None and args.prompt_file is not None:
        parser.error("--prompt and --prompt_file: give one of them")
    if not 0 <= args.temperature < float("inf"):
        parser.error(f"--temperature {args.temperature}: must be 0 (greedy) or more")
    for name in ("max_new_tokens", "num_samples", "top_k"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be 1 or more")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        parser.error(f"--top_p {args.top_p}: is a probability, above 0 and at most 1")
    if args.skip is not None and not 0 <= args.skip < 1:
        parser.error(f"--skip {args.skip}: is a share; use a value from 0 to below 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; use --device cpu")
    if args.prompt_file is not None:
        try:
            with open(args.prompt_file, encoding="utf-8") as f:
                args.prompt = f.read()
        except UnicodeDecodeError:
            parser.error(f"--prompt_file {args.prompt_file}: is not UTF-8 text; convert it first")
        except OSError as error:
            parser.error(f"--prompt_file {args.prompt_file}: {error.strerror}; check the path")
    return args


def sample(model, encoding, prompt, args, generator, tau=None, show=print, kept=None):
    """
    Stream one sample to show(text, depth), depth the share of sublayers that the token used. -> (tokens
    generated, seconds they took, the prompt's own pass not counted).
    """
    # A character may be several tokens: the decoder holds back bytes that don't make a whole one yet.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    idx, kept = torch.tensor([prompt], device=model.turn.device), [] if kept is None else kept
    count, begin = 0, time.perf_counter()
    try:
        for token in model.stream_tokens(idx, args.max_new_tokens, args.temperature, args.top_k, args.top_p,
                                         generator, encoding.n_vocab, tau, kept):
            token = token.item()
            count += 1
            if count == 1:
                begin = time.perf_counter()
            if token == encoding.eot_token:
                break
            text = decoder.decode(encoding.decode_single_token_bytes(token))
            show(text, depth(kept[-1]) if args.depth else 1.0)
    finally:   # also after Ctrl-C
        show(decoder.decode(b"", final=True) + "\n", 1.0)
    return count - 1, time.perf_counter() - begin


def depth(kept):
    """The share of the sublayers that the last token of a pass ran; kept: 2L of (1, T) or None."""
    return sum(1 if keep is None else keep[0, -1].item() for keep in kept) / len(kept)


def plain(text, depth):
    print(text, end="", flush=True)


def coloured(text, depth):
    """On a background from blue (few sublayers) to red (all); terminals have a 6 x 6 x 6 colour cube."""
    red, blue = round(5 * max(0.0, 2 * depth - 1)), round(5 * max(0.0, 1 - 2 * depth))
    code = f"\033[38;5;231;48;5;{16 + 36 * red + 6 + blue}m"
    print(f"{code}{text}\033[0m" if text.strip() else text, end="", flush=True)


def main(argv=None):
    args = parse(argv)
    device = pick_device(vars(args))
    model, config = load_run(args.run, device, "best.pt" if args.best else "ckpt.pt")
    encoding = prepare.get_tokenizer(config["tokenizer"])
    prompt = encoding.encode_ordinary(args.prompt or "") or [encoding.eot_token]
    if len(prompt) > config["block_size"]:
        print(f"sample.py: the prompt has {len(prompt)} tokens, the model sees the last "
              f"{config['block_size']}", file=sys.stderr)
    for name in ("mod_on", "mod_scope", "mod_kv"):
        if getattr(args, name) is not None:
            setattr(model.config, name, getattr(args, name))
    if args.prune is not None:
        gone = prune(model, args.run, config, args.prune, "best.pt" if args.best else "ckpt.pt")
        print(f"sample.py: removed sublayers: {', '.join(map(str, sorted(gone))) or 'none'}", file=sys.stderr)
    tau = None if args.skip is None else -1.0
    if args.skip:
        tau = skip_threshold(args.run, model, config, args.skip, "best.pt" if args.best else "ckpt.pt")
    show = coloured if args.depth and sys.stdout.isatty() else plain
    bf16 = device == "cuda" and torch.cuda.get_device_capability()[0] >= 8
    with torch.autocast("cuda", torch.bfloat16) if bf16 else contextlib.nullcontext():
        def rate(tau, show, kept):   # tokens per second over all samples
            generator, total, seconds = torch.Generator(device).manual_seed(args.seed), 0, 0.0
            for _ in range(args.num_samples):
                show(args.prompt or "", 1.0)
                count, took = sample(model, encoding, prompt, args, generator, tau, show, kept)
                total, seconds = total + count, seconds + took
            return total / max(seconds, 1e-9)

        kept = []
        skipping, dense = rate(tau, show, kept), None
        used = [depth(each) for each in kept]
        told = f"{len(used)} tokens, {skipping:,.0f} tokens/s after the prompt"
        if min(used) < 1:
            told += (f"; mean depth {sum(used) / len(used) * len(kept[0]):.1f} of {len(kept[0])} sublayers, "
                     f"{1 - sum(used) / len(used):.1%} skipped")
            if model.config.mod != "router":   # a routed model has no dense form
                dense = rate(-1.0, lambda text, depth: None, None)
                told += f"; {dense:,.0f} tokens/s without skipping"
    print(told, file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:   # the reader, such as head, has had enough; keep Python from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
