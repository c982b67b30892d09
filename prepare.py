"""
Makes a data set of text: a folder of shards, files of tokens. (dataset.py reads it.)

    python prepare.py steps                    # a puzzle of many steps; seconds, no network
    python prepare.py stdlib                   # the source of Python's own library; no network
    python prepare.py shakespeare              # tiny-shakespeare, 1 MB
    python prepare.py fineweb --shards 10      # GPT-2 tokens of web text, 100M (200 MB) per shard
    python prepare.py text --input PATH...     # your own files and folders; they must fit in memory

Your own files have to be UTF-8 text. Each file is a document. (With --jsonl FIELD, each line is
one: a JSON object with that field.) One in 20 documents is for validation; of a long one, the last
5 %.
"""
# The order of this file: where a text comes from, its way into the folder, the flags, the command.
import packages   # first: it says if one is missing

import hashlib
import json
import os
import shlex
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from dataset import encode, load_meta, open_split, read_shard, write_shard
from documents import cut, own_text, read_text
from files import unfinished_folder
from flags import flag, parse
from sentences import refuse, say, start
from steps import make_documents, make_puzzle

# ---------------------------------------------------------------------------- where texts come from

# A source is a function. It gets config, the flags (PrepareConfig, at the end of this file), and
# returns two lists of texts, for training and for validation. documents.py has one more, own_text.
# (fineweb, below, is none: it comes as shards.) For one of your own, write such a function, and
# name it in SOURCES.

def steps_text(config):
    """Documents of a puzzle: see steps.py."""
    puzzle, seed = config.puzzle, config.table_seed
    return make_documents(puzzle, seed, "train"), make_documents(puzzle, seed, "val")

def stdlib(config):
    """The library of the Python that runs this: code of one style, on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    train, val = [], []
    for path in sorted(root.rglob("*.py"), key=str):
        below_root = path.relative_to(root)
        if skip.isdisjoint(below_root.parts) and path.stat().st_size:
            # 5 % are for validation. The hash of its name, a number below 2**256, decides: so a
            # file stays on its side when others come or go.
            name_hash = int(hashlib.sha256(bytes(below_root)).hexdigest(), 16)
            texts = val if name_hash < 0.05 * 2**256 else train
            texts.append(read_text(path))
    return train, val

def download(url, path, sha256=None):
    """Downloads a file to path. SystemExit, and nothing is there, if the network or the disk fails
    or the sha256 is wrong"""
    try:
        torch.hub.download_url_to_file(url, str(path), sha256, progress=sys.stderr.isatty())
    except Exception as error:   # of the network, a server or the disk
        refuse(f"cannot download {url} ({error}); check network and disk, then type it again")

SHAKESPEARE_URL = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
                   "tinyshakespeare/input.txt")
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

def shakespeare(config):
    """Tiny-shakespeare is one text. Its last tenth, from a new line on, is for validation."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "input.txt")
        download(SHAKESPEARE_URL, path, SHAKESPEARE_SHA256)
        train, val = cut(read_text(path), 0.1)
    return [train], [val]

# --------------------------------------------------------------------------- the data set's folder

def refuse_other_data_set(out, meta):
    """SystemExit if the folder holds another data set than that of meta. (The same one may come
    anew, and your own text, too, after you have edited it.)"""
    if (out / "meta.json").exists() or any(out.glob("*.bin")):
        there = load_meta(out)
        differ = [key for key in meta if there.get(key) != meta[key]]
        if differ:
            refuse(f"--out {out}: holds another data set, which differs in {' and '.join(differ)}; "
                   f"choose another folder")

def write_data_set(out, meta, train, val):
    """Two lists of texts -> a data set. It takes the place of an older one."""
    train_tokens = encode(train, meta["tokenizer"])
    val_tokens = encode(val, meta["tokenizer"])
    with unfinished_folder(out) as unfinished:
        (unfinished / "meta.json").write_text(json.dumps(meta))
        write_shard(unfinished / "train_000000.bin", train_tokens)
        write_shard(unfinished / "val_000000.bin", val_tokens)
        # The old validation shard goes first, and the new one comes last. In between, the folder
        # may be half old and half new. Without that shard, open_split refuses it.
        (out / "val_000000.bin").unlink(missing_ok=True)
        for file in "meta.json", "train_000000.bin", "val_000000.bin":
            os.replace(unfinished / file, out / file)

FINEWEB_URL = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/"

def fineweb(out, meta, n_shards):
    """Downloads a data set that is ready, as modded-nanogpt does: one shard for validation, and the
    first n_shards for training, of GPT-2 tokens."""
    files = ["fineweb_val_000000.bin"]
    files += [f"fineweb_train_{i:06d}.bin" for i in range(1, n_shards + 1)]
    with unfinished_folder(out) as unfinished:
        for file in files:
            if not (out / file).exists():   # What an earlier run has downloaded stays.
                download(FINEWEB_URL + file, unfinished / file)
                read_shard(unfinished / file)   # SystemExit if the download is cut short
                os.replace(unfinished / file, out / file)
        (unfinished / "meta.json").write_text(json.dumps(meta))
        os.replace(unfinished / "meta.json", out / "meta.json")
    say("The lengths of the shards are right. Their sha256 is not known, so it was not checked.")

# ------------------------------------------------------------------------------- flags, and command

SOURCES = dict(steps=steps_text, stdlib=stdlib, shakespeare=shakespeare, text=own_text)
TOKENIZERS = dict(steps="bytes", fineweb="gpt2")   # All others can have any.
OWN_FLAGS = dict(text=["input", "jsonl"], fineweb=["shards"],
                 steps=["symbols", "rows", "cells", "most", "table_seed"])

@dataclass
class PrepareConfig:
    name: str = flag("", f"which data set: {', '.join(SOURCES)} or fineweb")
    out: str = flag("", "folder of the shards; without it data/NAME")
    tokenizer: Literal["auto", "bytes", "gpt2"] = flag("auto", "auto: gpt2 for fineweb, else bytes")

    # A group of --help lasts until the next one.
    input: list = flag(None, "UTF-8 files, and folders of them", group="text only")
    jsonl: str = flag("", "lines are JSON objects, and this field of theirs is the text")

    shards: int = flag(1, "how many, of 100M tokens each", low=1, high=103, group="fineweb only")

    symbols: int = flag(10, "different digits", low=2, high=10, group="steps only")
    rows: int = flag(2, "different rows of the table; has to divide symbols", low=2, high=10)
    cells: int = flag(12, "digits in a line", low=2, high=100)
    most: int = flag(9, "the most steps that a line asks for", low=1, high=25)
    table_seed: int = flag(0, "of the table's random numbers", low=0, high=1e9)

    @property
    def puzzle(self):
        """What meta.json says of the steps text"""
        return make_puzzle(self.symbols, self.rows, self.cells, self.most, self.table_seed)

    def problems(self):
        """parse, which reads the command line, refuses with these sentences."""
        if self.name not in (*SOURCES, "fineweb"):
            yield f"{self.name}: unknown; choose from {', '.join(SOURCES)}, fineweb"
        only_tokenizer = TOKENIZERS.get(self.name)
        if only_tokenizer and self.tokenizer not in ("auto", only_tokenizer):
            yield f"--tokenizer {self.tokenizer}: {self.name} has other tokens; leave this flag out"
        defaults = PrepareConfig()
        for owner, names in OWN_FLAGS.items():
            for name in names:
                is_set = getattr(self, name) != getattr(defaults, name)
                if is_set and owner != self.name:
                    yield f"--{name}: is for {owner} only; leave it out"
        if self.name == "text":
            yield from self.problems_of_input()
        if self.name == "steps" and self.symbols % self.rows:
            yield f"--rows {self.rows}: must divide --symbols {self.symbols}; take {self.symbols}"

    def problems_of_input(self):
        if not self.input:
            yield "text: needs files or folders; name them with --input"
            return
        for path in self.input:
            if not os.path.isfile(path) and not os.path.isdir(path):
                yield f"--input {shlex.quote(path)}: no such file or folder"
            elif path.endswith(".jsonl") and not self.jsonl:
                yield f"--input {path}: which field of its lines is the text? say --jsonl FIELD"

def main(argv=None):
    # positional: the name is typed without a --name before it.
    [config] = parse([PrepareConfig], argv, __doc__, positional=("name",))
    config.out = config.out or f"data/{config.name}"
    out = Path(config.out)
    tokenizer = "bytes" if config.tokenizer == "auto" else config.tokenizer
    meta = dict(name=config.name, tokenizer=TOKENIZERS.get(config.name, tokenizer))
    if config.name == "steps":
        meta["steps"] = config.puzzle
    refuse_other_data_set(out, meta)
    if config.name == "fineweb":   # It comes as shards.
        fineweb(out, meta, config.shards)
    else:
        train, val = SOURCES[config.name](config)
        write_data_set(out, meta, train, val)
    n_train = sum(map(len, open_split(out, "train")))
    n_val = sum(map(len, open_split(out, "val")))
    say(f"{n_train:,} train and {n_val:,} val tokens ({meta['tokenizer']}); next: "
        f"python train.py --data {shlex.quote(str(out))}")

if __name__ == "__main__":
    start(main)   # It makes sentences of errors that you can mend, such as a full disk.
