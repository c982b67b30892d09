"""
Sample from a run, with a KV cache.

    python sample.py runs/nag --prompt "def " --temperature 0.8 --top_k 50
    python sample.py runs/nag --prompt_file story.txt --max_new_tokens 500 --seed 7

The text goes to stdout as it comes, everything about it to stderr.
"""
import argparse
import codecs
import contextlib
import os
import sys
import time

import torch

import prepare
from train import Parser, load_run, pick_device


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


def sample(model, encoding, prompt, args, generator, tau=None):
    """Stream one sample to stdout. -> (tokens generated, seconds they took, the prompt's own pass not
    counted)."""
    # A character may be several tokens: the decoder holds back bytes that don't make a whole one yet.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    print(args.prompt or "", end="", flush=True)
    idx = torch.tensor([prompt], device=model.turn.device)
    count, begin = 0, time.perf_counter()
    try:
        for token in model.stream_tokens(idx, args.max_new_tokens, args.temperature, args.top_k, args.top_p,
                                         generator, encoding.n_vocab, tau):
            token = token.item()
            count += 1
            if count == 1:
                begin = time.perf_counter()
            if token == encoding.eot_token:
                break
            print(decoder.decode(encoding.decode_single_token_bytes(token)), end="", flush=True)
    finally:   # also after Ctrl-C
        print(decoder.decode(b"", final=True), flush=True)
    return count - 1, time.perf_counter() - begin


def main(argv=None):
    args = parse(argv)
    device = pick_device(vars(args))
    model, config = load_run(args.run, device, "best.pt" if args.best else "ckpt.pt")
    encoding = prepare.get_tokenizer(config["tokenizer"])
    prompt = encoding.encode_ordinary(args.prompt or "") or [encoding.eot_token]
    if len(prompt) > config["block_size"]:
        print(f"sample.py: the prompt has {len(prompt)} tokens, the model sees the last "
              f"{config['block_size']}", file=sys.stderr)
    generator = torch.Generator(device).manual_seed(args.seed)
    bf16 = device == "cuda" and torch.cuda.get_device_capability()[0] >= 8
    total, seconds = 0, 0.0
    with torch.autocast("cuda", torch.bfloat16) if bf16 else contextlib.nullcontext():
        for _ in range(args.num_samples):
            count, took = sample(model, encoding, prompt, args, generator)
            total, seconds = total + count, seconds + took
    print(f"{total + args.num_samples} tokens, {total / max(seconds, 1e-9):,.0f} tokens/s after the prompt",
          file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:   # the reader, such as head, has had enough; keep Python from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
