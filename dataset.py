"""
A data set: a folder with files of tokens, the shards, and meta.json, which says what they are.
prepare.py makes it. Here it is read.

    meta.json           {"name": "stdlib", "tokenizer": "bytes"}
    train_000000.bin    a shard for training: there may be more with a word `train` in the name
    val_000000.bin      a shard for validation, too

Such folders are also made by llm.c and modded-nanogpt, without meta.json.
"""
import hashlib
import json
import os
import re
from array import array
from pathlib import Path

import numpy as np
import tiktoken
import torch

from sentences import refuse

# ------------------------------------------------------------------------------------------ tokens

VOCABULARIES = {"bytes": 257, "gpt2": 50257}   # tokenizers, and how many tokens each one has

def get_tokenizer(tokenizer_name):
    """A tiktoken.Encoding: "bytes" (the 256 bytes, and <|endoftext|> = 256) or "gpt2"."""
    if tokenizer_name == "bytes":
        # A token is a byte, and tokens don't merge. pat_str only says how much goes at a time.
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,64}", explicit_n_vocab=257,
                                 mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={"<|endoftext|>": 256})
    try:
        return tiktoken.get_encoding(tokenizer_name)
    except Exception as error:   # tiktoken downloads its table, once.
        refuse(f"--tokenizer {tokenizer_name}: no table of it ({type(error).__name__}); go online "
               f"once, or set TIKTOKEN_CACHE_DIR to a folder that has it, or use --tokenizer bytes")

def encode(texts, tokenizer_name):
    """Texts -> their tokens, an array of uint16. After each text comes an end-of-text."""
    tokenizer = get_tokenizer(tokenizer_name)
    tokens = array("H")
    for text in texts:
        # encode_ordinary: where somebody's text says "<|endoftext|>", that is text, not this token.
        tokens.extend(tokenizer.encode_ordinary(text))
        tokens.append(tokenizer.eot_token)
    return tokens

def token_bytes(tokenizer_name, n_tokens):
    """How many bytes of text each token stands for, (n_tokens,) int64. End-of-text has 0. train.py
    divides a loss by them: a tokenizer of longer tokens has larger losses, but not more bits per
    byte. n_tokens: how many a model knows. Those beyond the tokenizer's get 0."""
    tokenizer = get_tokenizer(tokenizer_name)
    sizes = torch.zeros(n_tokens, dtype=torch.long)
    for token in range(tokenizer.n_vocab):
        if token != tokenizer.eot_token:
            sizes[token] = len(tokenizer.decode_single_token_bytes(token))
    return sizes

# ------------------------------------------------------------------------------------------ shards

# A shard is as llm.c has it: 256 int32 (magic, version, number of tokens, zeros), uint16 tokens.
MAGIC, VERSION, HEADER = 20240520, 1, 256 * 4

def write_shard(path, tokens):
    """tokens: numbers below 2**16, less than 2**31 of them"""
    with open(path, "wb") as file:
        file.write(np.array([MAGIC, VERSION, len(tokens)] + 253 * [0], "<i4"))
        file.write(np.array(tokens, "<u2"))

def read_shard(path):
    """The tokens of a shard, (n,) uint16. They stay on the disk until they are indexed. SystemExit
    if it has another format, or is cut short"""
    header = np.fromfile(path, "<i4", 3).tolist()
    if header[:2] != [MAGIC, VERSION]:   # nanoGPT's .bin, say, or llm.c's of Llama 3
        refuse(f"{path}: is no shard of llm.c's version {VERSION}, which has 256 int32 ({MAGIC}, "
               f"{VERSION}, number of tokens, zeros), and then the tokens as uint16")
    n = header[2]
    n_here = max(0, os.path.getsize(path) - HEADER) // 2   # two bytes each
    if n_here < n:
        refuse(f"{path}: is cut short, {n_here:,} of {n:,} tokens; delete it and make it again")
    return np.memmap(path, "<u2", mode="r", offset=HEADER, shape=(n,))

# -------------------------------------------------------- the folder of a data set, with meta.json

def load_meta(data):
    """-> what meta.json says of a data set, and the size of its vocabulary: dict(name=, tokenizer=,
    vocab_size=). The steps text has steps=, too, the puzzle of steps.py. SystemExit if none is
    there

    llm.c and modded-nanogpt write shards without a meta.json. They hold GPT-2's tokens."""
    folder = Path(data)
    if not (folder / "meta.json").exists() and any(folder.glob("*.bin")):
        name = "fineweb" if any(folder.glob("fineweb_*.bin")) else "llm.c"
        return dict(name=name, tokenizer="gpt2", vocab_size=VOCABULARIES["gpt2"])
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except OSError as error:
        refuse(f"--data {data}: no data set there, seen from {os.getcwd()} ({error.strerror}); go "
               f"where the data are, or make them with prepare.py")
    except ValueError:
        meta = None
    if not isinstance(meta, dict) or meta.get("tokenizer") not in list(VOCABULARIES):
        refuse(f"{folder / 'meta.json'}: must name a tokenizer, one of {', '.join(VOCABULARIES)}; "
               f"correct it, or make the data set anew")
    return meta | dict(vocab_size=VOCABULARIES[meta["tokenizer"]])

def fingerprint(data, meta):
    """A hash of meta.json, and of the shards' names and sizes. A resumed run wants the same."""
    sizes = sorted((path.name, path.stat().st_size) for path in Path(data).glob("*.bin"))
    return hashlib.sha256(json.dumps([meta, sizes], sort_keys=True).encode()).hexdigest()

# ----------------------------------------------------------------------------------------- windows

# A window is T + 1 tokens of one shard, in a row: a model reads the first T, and predicts the last
# T. A shard of n tokens has n - T windows. They are numbered, from 0, through all shards.

def split_of(path):
    """-> "train", "val" or None, a word of a shard's name. (festival_train_000000.bin is of train.)
    SystemExit if it has both"""
    words = re.split("[^A-Za-z]+", path.stem)
    if "train" in words and "val" in words:
        refuse(f"{path}: is it of train or of val? its name has both; rename it")
    for split in "train", "val":
        if split in words:
            return split
    return None

def open_split(data, split, T=0):
    """The shards of "train" or of "val", in order: those with a window (if T is 0, with a token)"""
    paths = [path for path in sorted(Path(data).glob("*.bin")) if split_of(path) == split]
    if not paths:
        refuse(f"--data {data}: has no {split} shard, so it isn't whole; prepare it anew")
    shards = [shard for shard in map(read_shard, paths) if len(shard) > T]
    if not shards:
        refuse(f"--data {data}: no {split} shard is longer than --block_size {T}; lower that, or "
               f"prepare more text")
    return shards

def read_windows(shards, numbers, T):
    """The windows of these n numbers -> x, y (n, T) int64. y is x, one token later."""
    first_number = np.cumsum([0] + [len(shard) - T for shard in shards])   # of each shard's windows
    shard_of = np.searchsorted(first_number, numbers, side="right") - 1
    rows = []
    for i, number in zip(shard_of, numbers):
        begin = number - first_number[i]
        rows.append(shards[i][begin:begin + T + 1])
    windows = torch.from_numpy(np.stack(rows).astype(np.int64))
    return windows[:, :-1], windows[:, 1:]

def windows_of(data, split, T, n):
    """n windows of "train" or "val", evenly spread, to measure with -> x, y (n, T). (A training
    draws numbers instead, and calls read_windows itself.)"""
    vocab_size = load_meta(data)["vocab_size"]
    shards = open_split(data, split, T)
    n_windows = sum(len(shard) - T for shard in shards)
    x, y = read_windows(shards, np.linspace(0, n_windows - 1, n).astype(int), T)
    largest = max(x.max(), y.max())
    if largest >= vocab_size:
        refuse(f"--data {data}: has token {largest}, beyond its tokenizer's {vocab_size}; prepare "
               f"it anew, or correct its meta.json")
    return x, y
