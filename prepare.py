"""
Text to tokens: makes a data set, and reads it. A data set is a folder of shards, files of tokens.

    python prepare.py steps                    # a puzzle of many steps; seconds, no network
    python prepare.py stdlib                   # the source of Python's own library; no network
    python prepare.py shakespeare              # tiny-shakespeare, 1 MB
    python prepare.py fineweb --shards 10      # GPT-2 tokens of web text, 100M (200 MB) per shard
    python prepare.py text --input PATH...     # your own files and folders; they must fit in memory

Your own files have to be UTF-8 text. Each is a document; or with --jsonl FIELD each of its lines, a
JSON object with that field. One in 20 documents is for validation; of a long one, the last 5 %.
"""
# The order of this file is the way of a text: documents, tokens, shards, the folder of a data set,
# and windows, which a model trains on. Last comes the command.
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

try:
    import fcntl   # locks files; only Windows doesn't have it
    import numpy as np
    import tiktoken
    import torch
except ModuleNotFoundError as error:
    remedy = f"type make .venv/installed, and then .venv/bin/python {shlex.join(sys.argv)}"
    if error.name == "fcntl":
        remedy = "on Windows, use WSL"
    raise SystemExit(f"This Python has no {error.name}; {remedy}")

from documents import cut, own_text, read_text
from flags import flag, parse
from sentences import refuse, say, start
from steps import make_puzzle, steps_text

# --------------------------------------------------------------------------------------- documents

def download(url, path, sha256=None):
    """SystemExit, and nothing at path, if the network or the disk fails or the sha256 is wrong."""
    try:
        torch.hub.download_url_to_file(url, str(path), sha256, progress=sys.stderr.isatty())
    except Exception as error:   # There are many ways in which a download can fail.
        refuse(f"cannot download {url} ({error}); check network and disk, then type it again")

SHAKESPEARE_URL = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
                   "tinyshakespeare/input.txt")
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

def shakespeare(config):
    """Tiny-shakespeare is one text. Its last tenth is for validation, as in nanoGPT."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "input.txt")
        download(SHAKESPEARE_URL, path, SHAKESPEARE_SHA256)
        train, val = cut(read_text(path), 0.1)
    return [train], [val]

def stdlib(config):
    """The library of the Python that runs this: code of one style, on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    train, val = [], []
    for path in sorted(root.rglob("*.py"), key=str):
        name = path.relative_to(root)
        if skip.isdisjoint(name.parts) and path.stat().st_size:
            # 5 % are for validation: by hash, so that a file stays there when others come or go.
            rank = int(hashlib.sha256(bytes(name)).hexdigest()[:16], 16) / 2**64
            split = val if rank < 0.05 else train
            split.append(read_text(path))
    return train, val

# Each function: config -> texts for training, texts for validation. For a data set of your own,
# write one, and name it here. (Only fineweb is none of them: it comes as shards.)
DATA_SETS = dict(steps=steps_text, stdlib=stdlib, shakespeare=shakespeare, text=own_text)

# ------------------------------------------------------------------------------------------ tokens

VOCABULARIES = {"bytes": 257, "gpt2": 50257}   # tokenizers, and how many tokens each one has

def get_tokenizer(name):
    """A tiktoken.Encoding: "bytes" (the 256 bytes, and <|endoftext|> = 256) or "gpt2"."""
    if name == "bytes":
        # A token is a byte, and nothing merges. The pattern only says how much goes at a time.
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,64}", explicit_n_vocab=257,
                                 mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={"<|endoftext|>": 256})
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:   # It is downloaded, too.
        refuse(f"--tokenizer {name}: no table of it ({type(error).__name__}); go online once, or "
               f"set TIKTOKEN_CACHE_DIR to a folder that has it, or use --tokenizer bytes")

# A long text goes in pieces. They end between a letter and a space, if they can. No token of GPT-2
# reaches over that, so the tokens are those of the whole text.
PIECE = re.compile(r"(?s).{1,200000}(?<=\S)(?=\s)|.{1,200000}")

def encode(texts, name):
    """Texts -> their tokens by the tokenizer of that name, an array of uint16. After each text
    comes an end-of-text."""
    tokenizer = get_tokenizer(name)
    tokens = array("H")
    for text in texts:
        for piece in PIECE.finditer(text):
            # Where somebody's text says "<|endoftext|>", that is text, not the special token.
            tokens.extend(tokenizer.encode_ordinary(piece[0]))
        tokens.append(tokenizer.eot_token)
    return tokens

def token_bytes(meta, vocab_size):
    """How many bytes of text each token stands for: (vocab_size,) int64. End-of-text, and numbers
    that are no tokens, have 0."""
    tokenizer = get_tokenizer(meta["tokenizer"])
    sizes = torch.zeros(vocab_size, dtype=torch.long)
    for token in set(range(tokenizer.n_vocab)) - {tokenizer.eot_token}:
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
    if header[:2] != [MAGIC, VERSION]:
        found = "no header, as nanoGPT's .bin"
        if header[:1] == [20240801]:
            found = "Llama 3's tokens (version 7, uint32)"
        refuse(f"{path}: has {found}; what is read here is llm.c's version 1: 256 int32 ({MAGIC}, "
               f"{VERSION}, number of tokens, zeros), then the tokens as uint16")
    n = header[2]
    n_here = max(0, os.path.getsize(path) - HEADER) // 2
    if n_here < n:
        refuse(f"{path}: is cut short, {n_here:,} of {n:,} tokens; delete it and make it again")
    return np.memmap(path, "<u2", mode="r", offset=HEADER, shape=(n,))

# -------------------------------------------------------- the folder of a data set, with meta.json

def load_meta(data):
    """What the meta.json of a data set says, a dict: name, tokenizer and vocab_size.

    llm.c and modded-nanogpt write shards without it. They hold GPT-2's tokens."""
    folder = Path(data)
    if not (folder / "meta.json").exists() and any(folder.glob("*.bin")):
        name = "fineweb" if any(folder.glob("fineweb_*.bin")) else "llm.c"
        return dict(name=name, tokenizer="gpt2", vocab_size=VOCABULARIES["gpt2"])
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except OSError as error:
        refuse(f"--data {data}: no data set there ({error.strerror}); prepare.py makes one")
    except ValueError:   # no JSON
        meta = {}
    if meta.get("tokenizer") not in VOCABULARIES:
        refuse(f"--data {data}: its meta.json must name a tokenizer, one of "
               f"{', '.join(VOCABULARIES)}; correct it, or make the data set anew")
    return meta | dict(vocab_size=VOCABULARIES[meta["tokenizer"]])

def fingerprint(data, meta):
    """A hash of meta.json, and of the shards' names and sizes. A resumed run wants the same."""
    shards = sorted((path.name, path.stat().st_size) for path in Path(data).glob("*.bin"))
    return hashlib.sha256(json.dumps([meta, shards], sort_keys=True).encode()).hexdigest()

def refuse_if_taken(out, meta):
    """SystemExit if the folder holds another data set than that of meta"""
    if (out / "meta.json").exists() or any(out.glob("*.bin")):
        there = load_meta(out)
        if any(there.get(key) != meta[key] for key in ("name", "tokenizer")):
            refuse(f"--out {out}: holds another data set, {there.get('name')} in "
                   f"{there['tokenizer']}; choose another folder")

@contextlib.contextmanager
def unfinished_folder(out):
    """A folder inside `out`, for the with-block. Files are made in it, and moved when they are
    whole. SystemExit if another prepare.py has one there"""
    os.makedirs(os.path.realpath(out), exist_ok=True)   # `out` may be a link to a new folder.
    with open(out / "lock", "a") as lock:   # The system unlocks it when this process ends.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refuse(f"--out {out}: another prepare.py is writing there; wait for it, or take "
                   f"another --out")
        except OSError:
            pass   # a file system without locks
        for left in out.glob(".unfinished-*"):   # by a prepare.py that was killed
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=out) as folder:
            yield Path(folder)

def write_data_set(out, meta, train, val):
    """Two lists of texts -> a data set. It takes the place of an older one."""
    train_tokens = encode(train, meta["tokenizer"])
    val_tokens = encode(val, meta["tokenizer"])
    with unfinished_folder(out) as unfinished:
        refuse_if_taken(out, meta)   # Another prepare.py may have been faster.
        (unfinished / "meta.json").write_text(json.dumps(meta))
        write_shard(unfinished / "train_000000.bin", train_tokens)
        write_shard(unfinished / "val_000000.bin", val_tokens)
        # open_split refuses a folder without a validation shard. So the old one is deleted first,
        # and the new one comes last: half of each is never taken for a whole.
        (out / "val_000000.bin").unlink(missing_ok=True)
        for name in "meta.json", "train_000000.bin", "val_000000.bin":
            os.replace(unfinished / name, out / name)

FINEWEB_URL = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/"

def fineweb(out, meta, n_shards):
    """Downloads a data set that is ready: one shard for validation, and the first n_shards for
    training, of GPT-2 tokens. modded-nanogpt has them, too."""
    names = ["fineweb_val_000000.bin"]
    names += [f"fineweb_train_{i:06d}.bin" for i in range(1, n_shards + 1)]
    with unfinished_folder(out) as unfinished:
        for name in names:
            if not (out / name).exists():   # What an earlier run has downloaded stays.
                download(FINEWEB_URL + name, unfinished / name)
                read_shard(unfinished / name)   # SystemExit if the download is cut short
                os.replace(unfinished / name, out / name)
        (out / "meta.json").write_text(json.dumps(meta))
    say("Their lengths are right. No sha256 of these shards is known, so it was not checked.")

# ----------------------------------------------------------------------------------------- windows

def open_split(data, split, T=0):
    """The shards of "train" or of "val", in order: those that are longer than T. See read_shard.
    The split is a word of a shard's name. So festival_train_000000.bin is of train only."""
    paths = []
    for path in sorted(Path(data).glob("*.bin")):
        words = re.split("[^A-Za-z]+", path.stem)
        if "train" in words and "val" in words:
            refuse(f"{path}: is it of train or of val? its name has both; rename it")
        if split in words:
            paths.append(path)
    if not paths:
        refuse(f"--data {data}: has no {split} shard, so it isn't whole; prepare it anew")
    shards = [shard for shard in map(read_shard, paths) if len(shard) > T]
    if not shards:
        refuse(f"--data {data}: no {split} shard is longer than --block_size {T}; lower that, or "
               f"prepare more text")
    return shards

def read_windows(shards, starts, T):
    """Windows of T + 1 tokens -> x, y (n, T) int64. y is x, one token later.

    starts: numbers of windows. A shard has len - T of them, and they are numbered through all
    shards. No window reaches into the next shard."""
    first = np.cumsum([0] + [len(shard) - T for shard in shards])   # of each shard
    which = np.searchsorted(first, starts, side="right") - 1
    rows = [shards[i][start - first[i]:start - first[i] + T + 1] for i, start in zip(which, starts)]
    rows = torch.from_numpy(np.stack(rows).astype(np.int64))
    return rows[:, :-1], rows[:, 1:]

def windows_of(data, split, T, n):
    """n windows of the split "train" or "val", evenly spread -> x, y (n, T). See read_windows."""
    vocab_size, shards = load_meta(data)["vocab_size"], open_split(data, split, T)
    starts = np.linspace(0, sum(len(shard) - T for shard in shards) - 1, n).astype(int)
    x, y = read_windows(shards, starts, T)
    if (largest := max(x.max(), y.max())) >= vocab_size:
        refuse(f"--data {data}: has token {largest}, beyond its tokenizer's {vocab_size}; prepare "
               f"it anew, or correct its meta.json")
    return x, y

# ------------------------------------------------------------------------------------- the command

ONE_TOKENIZER = dict(steps="bytes", fineweb="gpt2")   # These two come in one kind of tokens only.
ONLY_FOR = dict(input="text", jsonl="text", shards="fineweb", symbols="steps", rows="steps",
                cells="steps", most="steps", table="steps")   # flags, and for which data set

@dataclass
class PrepareConfig:
    name: Literal[(*DATA_SETS, "fineweb")] = flag("", "which data set")
    out: str = flag("", "folder of the shards; without it data/NAME")
    tokenizer: Literal["auto", "bytes", "gpt2"] = flag("auto", "auto: gpt2 for fineweb, else bytes")
    input: list = flag(None, "of text: UTF-8 files, and folders of them")
    jsonl: str = flag("", "of text: lines are JSON objects, and this field of theirs is the text")
    shards: int = flag(1, "of fineweb: how many of them, 100M tokens each", 1, 103)
    symbols: int = flag(10, "different digits", 2, 10, group="the steps text")
    rows: int = flag(2, "different rows of the table; has to divide symbols", 2, 10)
    cells: int = flag(12, "digits in a line", 2, 100)
    most: int = flag(9, "the most steps that a line asks for", 1, 25)
    table: int = flag(0, "seed of the table", 0, 1e9)

    def problems(self):
        for name, owner in ONLY_FOR.items():
            if owner != self.name and getattr(self, name) != getattr(PrepareConfig, name):
                yield f"--{name}: is for {owner} only; leave it out"
        if self.symbols % self.rows:
            yield f"--rows {self.rows}: must divide --symbols {self.symbols}; take {self.symbols}"
        if self.tokenizer not in ("auto", ONE_TOKENIZER.get(self.name, self.tokenizer)):
            yield f"--tokenizer {self.tokenizer}: {self.name} has other tokens; leave this flag out"
        if self.name == "text" and not self.input:
            yield "text: needs files or folders; name them with --input"
        for path in self.input or []:
            if not os.path.isfile(path) and not os.path.isdir(path):
                yield f"--input {shlex.quote(path)}: no such file or folder"
            elif path.endswith(".jsonl") and not self.jsonl:
                yield f"--input {path}: which field of its lines is the text? say --jsonl FIELD"

def main(argv=None):
    [config] = parse([PrepareConfig], argv, __doc__, positional=("name",))
    out = config.out = Path(config.out or f"data/{config.name}")
    tokenizer = config.tokenizer
    if tokenizer == "auto":
        tokenizer = ONE_TOKENIZER.get(config.name, "bytes")
    meta = dict(name=config.name, tokenizer=tokenizer, vocab_size=VOCABULARIES[tokenizer])
    if config.name == "steps":
        meta["steps"] = make_puzzle(config)
    refuse_if_taken(out, meta)   # before the work
    if config.name == "fineweb":
        fineweb(out, meta, config.shards)
    else:
        train, val = DATA_SETS[config.name](config)
        write_data_set(out, meta, train, val)
    n_train, n_val = (sum(map(len, open_split(out, split))) for split in ("train", "val"))
    say(f"{n_train:,} train and {n_val:,} val tokens ({tokenizer}); next: "
        f"python train.py --data {shlex.quote(str(out))}")

if __name__ == "__main__":
    start(main)
