"""
Sample from a run, with a KV cache and, if wanted, with Mixture-of-Depths: tokens skip sublayers.

    python sample.py runs/nag --prompt "def " --temperature 0.8 --top_k 50
    python sample.py runs/nag --skip 0.25 --depth          # colours: the share of sublayers each token used
    python sample.py runs/nag --prompt_file story.txt --max_new_tokens 500 --seed 7
    python sample.py runs/pre --prune cfp:3                # without the three blocks that mattered least
    python sample.py runs/pre --exit 0.9                   # stop at the block whose prediction is sure

The text goes to stdout as it comes, everything about it to stderr.
"""
import argparse
import codecs
import contextlib
import math
import os
import sys
import time
from functools import partial
from typing import get_args

import torch
import torch.nn.functional as F

import prepare
from model import GPTConfig
from train import Parser, load_run, pick_device, skip_threshold, val_windows


# ----------------------------------------------------------------------------- pruning
# Which blocks, or sublayers, to remove from a trained model, with no training after. A method is a function
# of (model, batches of (idx, targets), gradient norms of the training (3L,)) -> a score per candidate; the
# lowest go first. Sources: arXiv:2606.26538, 2402.02834, 2403.03853, 2403.17887, 2406.15786. `reverse` is the
# confound that a score must beat, `loss` the true effect of removing one, which no cheap score can know.

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
def over_writes(model, batches, measure, span=1):
    """Mean over tokens of measure(stream before, stream after), per sublayer or, with span 2, per block."""
    total = 0.0
    for idx, _ in batches:
        writes = [(model.ends.as_tensor(before).double(), model.ends.as_tensor(after).double())
                  for l, before, after in model.walk(idx) if l <= 2 * len(model.blocks)]
        total = total + torch.stack([measure(before, after).mean() for (before, _), (_, after)
                                     in zip(writes[::span], writes[span - 1::span])])
    return total / len(batches)


def stays(model, batches, span):
    """Mean over tokens of 1 - cos(stream before, stream after), per sublayer or, with span 2, per block."""
    return 1 - over_writes(model, batches, partial(F.cosine_similarity, dim=-1), span)


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


def cfp(model, norms):
    """What training has summed up, per block; / sqrt of its size, without which large ones always win."""
    size = torch.tensor([sum(p.numel() for p in block.parameters()) for block in model.blocks]).double()
    return norms[2 * len(norms) // 3:].cpu() / (size / size.mean()).sqrt()


BLOCK_SCORES = {
    "cfp": lambda model, batches, norms: cfp(model, norms),               # CascadeFlow Pruning: needs no data
    "magnitude": lambda model, batches, norms: torch.stack([
        sum(p.detach().double().abs().sum().cpu() for p in block.parameters()) for block in model.blocks]),
    "taylor": lambda model, batches, norms: torch.stack([
        sum(((p * g).double().abs().sum().cpu() for p, g in block), torch.zeros((), dtype=torch.float64))
        for block in each_gradient(model, batches)]),
    "influence": lambda model, batches, norms: stays(model, batches, 2),  # ShortGPT's, LLM-Drop's of blocks
    "loss": lambda model, batches, norms: torch.tensor([
        loss_without(model, batches, block) for block in candidates("loss", model)]),
    "reverse": lambda model, batches, norms: -torch.arange(len(model.blocks)).double(),
    "random": lambda model, batches, norms: torch.rand(
        len(model.blocks), generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    "span": lambda model, batches, norms: span_distance(model, batches, 1),   # of a block; it has no order
}
SUBLAYERS = {"attention": (0, 2), "mlp": (1, 2), "sublayer": (0, 1)}   # LLM-Drop: the first, every how many
PRUNE_METHODS = [*BLOCK_SCORES, *SUBLAYERS]


def candidates(method, model):
    """What a method chooses from: blocks or single sublayers, as sets of sublayers, numbered from 1."""
    if method in SUBLAYERS:
        first, every = SUBLAYERS[method]
        return [{l + 1} for l in range(first, 2 * len(model.blocks), every)]
    return [{2 * i + 1, 2 * i + 2} for i in range(len(model.blocks))]


def prune_score(method, model, batches, norms=None):
    """A score per candidate."""
    if method in SUBLAYERS:
        first, every = SUBLAYERS[method]
        return stays(model, batches, 1)[first::every]
    return BLOCK_SCORES[method](model, batches, norms)


def to_remove(method, k, model, batches, norms, scores=None):
    """
    The sublayers, numbered from 1, that a method removes: those k of its candidates that are there still and
    have the lowest scores; `span`: k blocks in a row. scores: the method's, if they are known already.
    """
    each, there = candidates(method, model), model.present()
    if method == "span":
        first = span_distance(model, batches, k).argmin().item()
        chosen = range(first, first + k)
    else:
        scores = prune_score(method, model, batches, norms) if scores is None else scores
        order = scores.argsort(stable=True).tolist()
        chosen = [i for i in order if any(there[l - 1] for l in each[i])][:k]
    return set().union(*(each[i] for i in chosen))


def prune(model, run, config, wanted):
    """Remove what `METHOD:K` says. SystemExit if it can't be done. -> the removed sublayers"""
    method, _, k = wanted.partition(":")
    most = len(model.blocks) * (2 if method == "sublayer" else 1)
    if method not in PRUNE_METHODS or not k.isdigit() or not 0 <= int(k) < most:
        raise SystemExit(f"--prune {wanted}: say METHOD:K, K below {most}, METHOD one of "
                         f"{', '.join(PRUNE_METHODS)}")
    if model.config.mod == "router" or model.config.repeat:
        raise SystemExit(f"--prune {wanted}: {run} has routed or repeated blocks, which don't stand alone; "
                         f"use another run")
    if method == "cfp" and model.grad_norms is None:
        raise SystemExit(f"--prune {wanted}: {run} holds no gradient norms of blocks with weights of their "
                         f"own, which training collects after its warm-up; train on, or use another method")
    if not int(k):
        return set()
    x, y = (t.to(model.turn.device).split(8) for t in val_windows(config["data"], config["block_size"], 32))
    gone = to_remove(method, int(k), model, list(zip(x, y)), model.grad_norms)
    model.remove(gone)
    return gone


# ----------------------------------------------------------------------------- other ways through the depth
# Each makes a function that stream_tokens calls instead of a model's own pass: new tokens (B, T), a cache ->
# logits of the last token (B, V). `used` gets the number of blocks that each pass used.

def early_exit(model, sure, used):
    """
    Stop after the block whose lens (final norm and head) gives a token a probability above `sure`; the blocks
    not run get the keys and values that the last stream has for them, and nothing else. A prompt runs in
    full. Source: arXiv:2207.07061.
    """
    def forward(idx, cache):
        rope, (stream, _), T = model.rope(cache.length, idx.shape[1]), model.start(idx), idx.shape[1]
        for i, (block, layer) in enumerate(zip(model.blocks, cache.layers)):
            stream, _ = block(stream, rope, layer)
            logits = model.head(model.ends.finish(stream)[:, -1])
            if T == 1 and i + 1 < len(model.blocks) and logits.softmax(-1).max(-1).values.min() > sure:
                for later, layer in zip(model.blocks[i + 1:], cache.layers[i + 1:]):
                    later.attn.keys_values(later.attn_residual.read(stream), rope, layer)
                break
        used.append(i + 1)
        cache.length += T
        return logits
    return forward


def lac(model, form, alpha, used):
    """
    The skip rule of Void / LAC: with d_l the growth of the stream's norm in block l, block l is active for a
    token if d_l >= alpha (max d_j - min d_j over j < l); the first one is. `exit`, as in the released code:
    all blocks run, the head reads the stream after the last active one. `skip`: an inactive block's update is
    dropped. Either way a block runs before its d_l is known: this shows what a model could skip, and saves no
    time. Source: arXiv:2505.14467.
    """
    def forward(idx, cache):
        rope, (stream, _) = model.rope(cache.length, idx.shape[1]), model.start(idx)
        norm = lambda stream: model.ends.as_tensor(stream).norm(dim=-1)                # (B, T)
        last, growth, count = stream, [], 0.0
        for block, layer in zip(model.blocks, cache.layers):
            after, _ = block(stream, rope, layer)
            now = norm(after) - norm(stream)                                           # (B, T)
            active = torch.ones_like(now, dtype=torch.bool)   # the first block
            if growth:
                past = torch.stack(growth)
                active = now >= alpha * (past.amax(0) - past.amin(0))
            growth.append(now)
            last = torch.where(active[..., None], after, last)
            stream = after if form == "exit" else last
            count += active[:, -1].float().mean().item()
        used.append(count)
        cache.length += idx.shape[1]
        return model.head(model.ends.finish(last)[:, -1])
    return forward


def newton(model, idx, n, iterations):
    """
    The last n blocks evaluated at once on a guess of all their inputs, which a prefix sum of their updates
    corrects, again and again: Identity Newton, exact after n iterations (arXiv:2605.17842). Here the
    blocks run one after the other all the same: what it shows is the error. -> logits (B, T, V)
    """
    rope, (stream, _), split = model.rope(0, idx.shape[1]), model.start(idx), len(model.blocks) - n
    for block in model.blocks[:split]:
        stream, _ = block(stream, rope)
    trace = [stream] * n
    for _ in range(iterations):
        updates = [block(x, rope)[0] - x for block, x in zip(model.blocks[split:], trace)]
        ends = [stream + total for total in torch.stack(updates).cumsum(0)]
        trace = [stream, *ends[:-1]]
    return model.head(model.ends.finish(ends[-1]))


def layer_parallel(model, n, iterations, used):
    """newton for sampling: the whole text anew for each token, since its keys and values are not final."""
    seen = []

    def forward(idx, cache):
        if cache.length == 0:
            seen.clear()
        seen.append(idx)
        cache.length += idx.shape[1]
        used.append(len(model.blocks) - n + iterations)   # blocks one after the other, if n ran at once
        return newton(model, torch.cat(seen, dim=1), n, iterations)[:, -1]
    return forward


def other_way(model, args, used):
    """What --exit, --lac or --newton ask for, or None. SystemExit where the model or the flags do not fit."""
    ways = [f"--{name} {getattr(args, name)}" for name in ("exit", "lac", "newton")
            if getattr(args, name) is not None]
    if not ways:
        return None
    c, others = model.config, [f"--{name}" for name in ("skip", "depth") if getattr(args, name)]
    if len(ways + others) > 1:
        raise SystemExit(f"{' and '.join(ways + others)}: each is a way of its own; give one of them")
    if c.mod == "router" or c.value_residual or c.x0 or model.tau is not None:
        raise SystemExit(f"{ways[0]}: needs blocks that are maps of the stream alone; use a run without "
                         f"routers, --mod_rate, --value_residual and --x0")
    bounded = "post", "mixln", "deepnorm", "keel", "convex", "ngpt"
    if args.exit is not None:
        if not model.ends.one_graph:
            raise SystemExit(f"{ways[0]}: --residual {c.residual} reads across depth; use a run such as nag")
        return early_exit(model, args.exit, used)
    if not model.ends.one_tensor or c.residual in bounded:
        raise SystemExit(f"{ways[0]}: needs a stream to which blocks add, and whose norm can grow; use a run "
                         f"such as --residual pre")
    if args.lac:
        return lac(model, args.lac, args.lac_alpha, used)
    n, _, iterations = args.newton.partition(":")
    if not (n.isdigit() and iterations.isdigit() and 1 <= int(iterations) <= int(n) <= len(model.blocks)):
        raise SystemExit(f"{ways[0]}: say N:K, K iterations on the last N of {len(model.blocks)} blocks, K at"
                         f" most N")
    return layer_parallel(model, int(n), int(iterations), used)


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
    parser.add_argument("--exit", type=float, metavar="P",
                        help="stop at the block whose lens gives a token a probability above P")
    parser.add_argument("--lac", choices=("skip", "exit"), help="drop blocks in which the norm hardly grows, "
                        "or read the stream after the last other one")
    parser.add_argument("--lac_alpha", type=float, default=0.8, help="of --lac (default 0.8)")
    parser.add_argument("--newton", metavar="N:K", help="the last N blocks in parallel, K iterations")
    parser.add_argument("--depth", action="store_true",
                        help="colour each token by the share of sublayers that predicting it took")
    for name, what in (("mod_on", "what is compared with the threshold"),
                       ("mod_scope", "what shares a threshold"),
                       ("mod_kv", "whose keys and values attention projects"),
                       ("mod_least", "an attention that fewer would skip runs for all tokens")):
        kind = GPTConfig.__annotations__[name]
        parser.add_argument(f"--{name}", type=float if kind is float else str, choices=get_args(kind) or None,
                            help=f"{what} (default: as trained)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")
    parser.add_argument("--best", action="store_true", help="the best checkpoint instead of the last one")
    args = parser.parse(argv)
    if args.prompt is not None and args.prompt_file is not None:
        parser.error("--prompt and --prompt_file: give one of them")
    if any("\ud800" <= letter <= "\udfff" for letter in args.prompt or ""):
        parser.error("--prompt: is not UTF-8 text; convert it first")
    if not 0 <= args.seed < 2 ** 63:
        parser.error(f"--seed {args.seed}: must be from 0 to {2 ** 63 - 1}")
    if not 0 <= args.temperature < float("inf"):
        parser.error(f"--temperature {args.temperature}: must be 0 (greedy) or more")
    for name in ("max_new_tokens", "num_samples", "top_k"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be 1 or more")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        parser.error(f"--top_p {args.top_p}: is a probability, above 0 and at most 1")
    for name in ("skip", "mod_least"):
        if getattr(args, name) is not None and not 0 <= getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: is a share; use a value from 0 to below 1")
    for name in ("exit", "lac_alpha"):
        if getattr(args, name) is not None and not 0 <= getattr(args, name) < float("inf"):
            parser.error(f"--{name} {getattr(args, name)}: must be 0 or more")
    for name in ("mod_on", "mod_scope", "mod_least"):
        if getattr(args, name) is not None and args.skip is None:
            parser.error(f"--{name} {getattr(args, name)}: needs thresholds of its own; give --skip, too")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; use --device cpu")
    if args.prompt_file is not None:
        args.prompt = parser.read("--prompt_file", args.prompt_file)
    return args


def sample(model, encoding, prompt, args, generator, tau=None, show=print, kept=None, forward=None):
    """
    Stream one sample to show(text, depth), depth the share of sublayers that predicting the token took.
    -> (tokens generated, seconds they took, without the prompt's own pass and without showing them).
    """
    # A character may be several tokens: the decoder holds back bytes that don't make a whole one yet.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    idx, kept = torch.tensor([prompt], device=model.turn.device), [] if kept is None else kept
    count, begin = 0, time.perf_counter()
    try:
        for token in model.stream_tokens(idx, args.max_new_tokens, args.temperature, args.top_k, args.top_p,
                                         generator, encoding.n_vocab, tau, kept, forward):
            token = token.item()
            count += 1
            if count == 1:
                begin = time.perf_counter()
            if token == encoding.eot_token:
                break
            text = decoder.decode(encoding.decode_single_token_bytes(token))
            shown = time.perf_counter()
            show(text, depth(kept[-1], model) / len(kept[-1]) if args.depth else 1.0)
            begin += time.perf_counter() - shown
    finally:   # also after Ctrl-C
        show(decoder.decode(b"", final=True) + "\n", 1.0)
    return count - 1, time.perf_counter() - begin


def depth(kept, model):
    """How many of the 2L sublayers the last token of a pass ran; kept: 2L of (1, T) or None."""
    ran = [True if keep is None else keep[0, -1].item() for keep in kept]
    return sum(run and there for run, there in zip(ran, model.present()))


def silent(text, depth):
    pass


def plain(text, depth):
    print(text, end="", flush=True)


def coloured(text, depth):
    """On a background from blue (few sublayers) to red (all); terminals have a 6 x 6 x 6 colour cube."""
    red, blue = round(5 * max(0.0, 2 * depth - 1)), round(5 * max(0.0, 1 - 2 * depth))
    code = f"\033[38;5;231;48;5;{16 + 36 * red + 6 + blue}m"
    print(f"{code}{text}\033[0m" if text.strip() else text, end="", flush=True)


def main(argv=None):
    args = parse(argv)
    device, which = pick_device(vars(args)), "best.pt" if args.best else "ckpt.pt"
    model, config = load_run(args.run, device, which)
    encoding = prepare.get_tokenizer(config["tokenizer"])
    prompt = encoding.encode_ordinary(args.prompt or "") or [encoding.eot_token]
    if len(prompt) > config["block_size"]:
        print(f"sample.py: the prompt has {len(prompt)} tokens, the model sees the last "
              f"{config['block_size']}", file=sys.stderr)
    for name in ("mod_on", "mod_scope", "mod_kv", "mod_least"):
        if getattr(args, name) is not None:
            setattr(model.config, name, getattr(args, name))
    if args.prune is not None:
        gone = prune(model, args.run, config, args.prune)
        print(f"sample.py: removed sublayers: {', '.join(map(str, sorted(gone))) or 'none'}", file=sys.stderr)
    if args.skip == 0 and model.config.mod == "router":
        raise SystemExit(f"{args.run}: --skip 0: a model with routers has no dense form; leave --skip out")
    tau = None if args.skip is None else -1.0
    if args.skip:
        tau = skip_threshold(args.run, model, config, args.skip, which)
        whole = tau[::2][torch.tensor(model.present()[::2])] < 0
        print(f"sample.py: {whole.sum()} of {len(whole)} attentions run for all tokens (--mod_least)",
              file=sys.stderr)
    show = coloured if args.depth and sys.stdout.isatty() else plain
    bf16 = device == "cuda" and torch.cuda.get_device_capability()[0] >= 8
    with torch.autocast("cuda", torch.bfloat16) if bf16 else contextlib.nullcontext():
        def rate(tau, show, kept=None, forward=None):   # tokens per second over all samples
            generator, total, seconds = torch.Generator(device).manual_seed(args.seed), 0, 0.0
            for _ in range(args.num_samples):
                if show is not silent:
                    plain(args.prompt or "", 1.0)
                count, took = sample(model, encoding, prompt, args, generator, tau, show, kept, forward)
                total, seconds = total + count, seconds + took
            return total / max(seconds, 1e-9)

        kept, blocks = [], []   # of each pass: what ran; with another way through the depth, how many blocks
        forward = other_way(model, args, blocks)
        told = f"{rate(tau, show, kept, forward):,.0f} tokens/s after the prompt"
        used, most, unit = [depth(each, model) for each in kept], sum(model.present()), "sublayers"
        if forward:
            used, most, unit = blocks, len(model.blocks), "blocks"
        mean, shallow = sum(used) / len(used), forward or min(used) < most
        if args.depth or shallow:
            told += f"; mean depth {mean:.1f} of {most} {unit}, {1 - mean / most:.1%} skipped"
        if shallow and model.config.mod != "router":   # a routed model has no dense form
            told += f"; {rate(-1.0, silent):,.0f} tokens/s at full depth"
    print(f"{len(used)} tokens, {told}", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:   # the reader, such as head, has had enough; keep Python from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
