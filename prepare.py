"""
Text to tokens: makes a data set, and reads it. A data set is a folder of shards, files of tokens.

    python prepare.py steps                    # lines whose depth is known; seconds, no network
    python prepare.py stdlib                   # the source of Python's own library; no network
    python prepare.py shakespeare              # tiny-shakespeare, 1 MB
    python prepare.py fineweb --shards 10      # GPT-2 tokens of web text, 100M (200 MB) per shard
    python prepare.py text --input PATH...     # your own files and folders; they must fit in memory

Your own files have to be UTF-8 text. Each is a document; or with --jsonl FIELD each of its lines, a
JSON object with that field. Every 20th document is for validation. A long one is cut for both.

First comes what the other scripts read, then how it is made.
"""
import hashlib
import http.client
import json
import os
import re
import shlex
import shutil
import socket
import sys
import sysconfig
import tempfile
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

from flags import flag, parse, refuse, say, start
from runs import VOCABULARIES, read_json

# A shard is as llm.c has it: 256 int32 (magic, version, number of tokens, zeros), uint16 tokens.
MAGIC, VERSION, HEADER = 20240520, 1, 256 * 4
SHAKESPEARE_URL = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
                   "tinyshakespeare/input.txt")
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
FINEWEB_URL = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/"
OUR_FILE = re.compile(r"(fineweb_)?(train|val)_\d{6}\.bin|meta\.json|input\.txt")

# -------------------------------------------------------------- what train, sample and analyze read

def read_windows(shards, starts, T):
    """Windows of T + 1 tokens -> x, y (n, T) int64. y is x, one token later.

    starts: their places, counted through all shards. No window reaches into the next shard."""
    first = np.cumsum([0] + [len(shard) - T for shard in shards])   # where each shard begins
    which = np.searchsorted(first, starts, side="right") - 1
    rows = [shards[i][start - first[i]:start - first[i] + T + 1] for i, start in zip(which, starts)]
    rows = torch.from_numpy(np.stack(rows).astype(np.int64))
    return rows[:, :-1], rows[:, 1:]

def val_windows(data, T, n):
    """n windows of the validation split, evenly spread -> x, y (n, T). See read_windows."""
    vocab_size, shards = load_meta(data)["vocab_size"], open_split(data, "val", T)
    starts = np.linspace(0, sum(len(shard) - T for shard in shards) - 1, n).astype(int)
    x, y = read_windows(shards, starts, T)
    if (largest := max(x.max(), y.max())) >= vocab_size:
        refuse(f"--data {data}: token {largest} is not below {vocab_size}; correct its meta.json")
    return x, y

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
    shards = [shard for shard in map(read_shard, paths) if len(shard) > T]
    if not shards:
        refuse(f"--data {data}: no {split} shard is longer than --block_size {T}; lower that, or "
               f"prepare more text")
    return shards

def read_shard(path):
    """The tokens of a shard, (n,) uint16. They stay on the disk until they are indexed."""
    magic, version, n = (np.fromfile(path, "<i4", 256).tolist() + [0, 0, 0])[:3]
    if (magic, version) != (MAGIC, VERSION):
        found = "no header, as nanoGPT's .bin"
        if (magic, version) == (20240801, 7):
            found = "Llama 3's tokens (version 7, uint32)"
        elif magic == MAGIC:
            found = f"version {version}"
        refuse(f"{path}: has {found}; what is read here is llm.c's version 1: 256 int32 ({MAGIC}, "
               f"{VERSION}, number of tokens, zeros), then the tokens as uint16")
    n_here = max(0, os.path.getsize(path) - HEADER) // 2
    if n_here < n:
        refuse(f"{path}: is cut short, {n_here:,} of {n:,} tokens; delete it and make it again")
    if n_here > n or n == 0:
        refuse(f"{path}: has {n_here:,} tokens, but {n:,} by its header; correct that")
    return np.memmap(path, "<u2", mode="r", offset=HEADER, shape=(n,))

def load_meta(data):
    """What the meta.json of a data set says, a dict: name, tokenizer and vocab_size.

    llm.c and modded-nanogpt write shards without it. They hold GPT-2's tokens."""
    folder = Path(data)
    if not (folder / "meta.json").exists() and any(folder.glob("*.bin")):
        name = "fineweb" if any(folder.glob("fineweb_*.bin")) else "llm.c"
        return dict(name=name, tokenizer="gpt2", vocab_size=VOCABULARIES["gpt2"])
    try:
        meta = read_json(folder / "meta.json")
    except OSError as error:
        refuse(f"--data {data}: no data set there ({error.strerror}); prepare.py makes one")
    except ValueError:
        meta = {}
    tokenizer = meta.get("tokenizer")
    if tokenizer not in VOCABULARIES or meta.get("vocab_size") != VOCABULARIES[tokenizer]:
        refuse(f"--data {data}: its meta.json must name a tokenizer and its vocab_size, one of "
               f"{VOCABULARIES}; correct it, or make the data set anew")
    return meta

def fingerprint(data, meta):
    """A hash of meta.json, and of the shards' names and sizes. A resumed run wants the same."""
    shards = sorted((path.name, path.stat().st_size) for path in Path(data).glob("*.bin"))
    return hashlib.sha256(json.dumps([meta, shards], sort_keys=True).encode()).hexdigest()

def token_bytes(meta, vocab_size):
    """How many bytes of text each token stands for: (vocab_size,) int64. End-of-text, and numbers
    that are no tokens, have 0."""
    tokenizer = get_tokenizer(meta["tokenizer"])
    sizes = torch.zeros(vocab_size, dtype=torch.long)
    for token in set(range(tokenizer.n_vocab)) - {tokenizer.eot_token}:
        sizes[token] = len(tokenizer.decode_single_token_bytes(token))
    return sizes

def get_tokenizer(name):
    """A tiktoken.Encoding: "bytes" (the 256 bytes, and <|endoftext|> = 256) or "gpt2" (50257)."""
    if name == "bytes":
        # A token is a byte, and nothing merges. The pattern only says how much goes at a time.
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,64}", explicit_n_vocab=257,
                                 mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={"<|endoftext|>": 256})
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:   # There are many ways in which a download can fail.
        refuse(f"--tokenizer {name}: no table of it ({type(error).__name__}); go online once, or "
               f"set TIKTOKEN_CACHE_DIR to a folder that has it, or use --tokenizer bytes")

def text_or_file(value):
    """What --prompt and --text mean: the text of that file if there is one, else `value` itself."""
    return read_text(value) if os.path.isfile(value) else value

def read_text(path):
    """The text of a file, by one rule for all scripts: it is UTF-8, a byte order mark at its start
    is dropped, and all else stays, line ends too. SystemExit if it is no text, or empty."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        refuse(f"{path}: is not UTF-8 text; convert it, as by iconv -f ENCODING -t UTF-8")
    if "\0" in text:   # UTF-16 has them, and so has what is no text at all.
        refuse(f"{path}: is not UTF-8 text, but holds NUL bytes; convert it, or name another")
    if not text:
        refuse(f"{path}: is empty; name another")
    return text

# -------------------------------------------------------------- the steps text: depth that is known

def next_line(cells, table):
    """One step of the steps text: cells (..., n) of numbers -> (..., n). Each cell becomes
    table[its left neighbour][itself], all at once. Left of the first cell is a 0."""
    cells = np.asarray(cells)
    left = np.concatenate((np.zeros_like(cells[..., :1]), cells[..., :-1]), axis=-1)
    return np.asarray(table)[left, cells]

def steps_asked(tokens, n_cells):
    """How deep each target of the steps text is. tokens (n, T + 1), a window and its last target ->

    steps (n, T): how many steps lead to this cell, as the letter of the line before says. -1 where
    nobody can know: it is no cell, or the line before it is not in the window
    cell (n, T): its place in the line, 0 is the leftmost; only of use where steps is known"""
    place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    is_letter = (tokens >= ord("a")) & (tokens <= ord("z"))
    letter = torch.where(is_letter, place, -1).cummax(dim=1).values   # where this line begins
    cell = place - letter - 1
    before = letter - (n_cells + 2)                                   # where the one before begins
    # Between two documents stands an end-of-text, and no newline.
    follows = (before >= 0) & (tokens.gather(1, (letter - 1).clamp_min(0)) == ord("\n"))
    asked = tokens.gather(1, before.clamp_min(0)) - ord("a")
    known = follows & (cell >= 0) & (cell < n_cells)
    return torch.where(known, asked, -1)[:, 1:], cell[:, 1:]

# ------------------------------------------------------------------------- text -> tokens -> shards

def cut(text, share):
    """A text -> two. The second has about this share of it, and begins a line if it can."""
    place = int(len(text) * (1 - share))
    newline = text.rfind("\n", place - len(text) // 100, place)
    if newline >= 0:
        place = newline + 1
    return text[:place], text[place:]

def write_text(config, new, documents):
    """dict(train=[text, text ...], val=[...]) -> shards. After each text comes an end-of-text."""
    tokenizer = get_tokenizer(config.tokenizer)
    # A long text goes in pieces. They end between a letter and a space, if they can: no token of
    # GPT-2 reaches over that, so the tokens are those of the whole text.
    piece = re.compile(r"(?s).{1,200000}((?<=\S)(?=\s)|\Z)|.{1,200000}")

    def pieces(split):
        for text in filter(None, documents[split]):
            for found in piece.finditer(text):
                # Where somebody's text says "<|endoftext|>", that is text, not the special token.
                yield tokenizer.encode_ordinary(found[0])
            yield [tokenizer.eot_token]
    write_shards(config, new, pieces)

def write_shards(config, new, pieces):
    """pieces(split) yields lists of tokens. They become shards in `new`, which replaces --out."""
    for split in ("train", "val"):
        with open(new / f"{split}_000000.bin", "wb") as shard:
            shard.write(bytes(HEADER))
            for tokens in pieces(split):
                shard.write(np.array(tokens, "<u2").tobytes())
            n = (shard.tell() - HEADER) // 2
            if n == 0:
                refuse(f"--input: has too little text for a {split} split; name more files")
            shard.seek(0)   # Only now the number is known.
            shard.write(np.array([MAGIC, VERSION, n] + 253 * [0], "<i4").tobytes())
            shard.flush()
            os.fsync(shard.fileno())
    if config.out.exists():
        config.out.rename(new.parent / "old")
    new.rename(config.out)

# ------------------------------------------------------------------------------- the five data sets

LINES = 16   # of a document of the steps text
DOCUMENTS = dict(train=24_000, val=1_200)

def steps(config, new):
    """Lines such as c2031133021: a letter (a: 0, b: 1, c: 2 ...) and cells. The next line has the
    same cells, so many steps later: see next_line. So it is known how deep each cell is."""
    table = make_table(config.symbols, config.rows, np.random.default_rng(config.table))
    meta = json.loads((new / "meta.json").read_text())
    meta["steps"] = dict(table=table.tolist(), cells=config.cells, most=config.most)
    (new / "meta.json").write_text(json.dumps(meta))

    def pieces(split):
        rng, n = np.random.default_rng((config.table, len(split))), DOCUMENTS[split]
        share = 0.85 ** np.arange(config.most + 1)   # Few steps come more often. They teach many.
        asked = rng.choice(config.most + 1, (n, LINES), p=share / share.sum())
        cells, lines = rng.integers(config.symbols, size=(n, config.cells)), []
        for i in range(LINES):
            lines += [ord("a") + asked[:, i:i + 1], ord("0") + cells, np.full((n, 1), ord("\n"))]
            later = cells
            for step in range(config.most):
                later = next_line(later, table)
                cells = np.where(step < asked[:, i:i + 1], later, cells)
        end = np.full((n, 1), get_tokenizer("bytes").eot_token)
        yield np.concatenate([*lines, end], axis=1).flatten()
    write_shards(config, new, pieces)

def make_table(symbols, rows, rng):
    """-> table (symbols, symbols): what a cell becomes, by its left neighbour and itself. Of the
    neighbour only the class counts, left % rows. With two rows: whether it is even or odd.

    Each row holds each symbol once, so nothing is lost in a step. Two rows send a symbol to two
    classes. So who does not know the neighbour does not know the class after a step."""
    size = symbols // rows
    in_row_0 = rng.permutation(np.repeat(np.arange(rows), size))   # the class that each goes to
    table = np.zeros((rows, symbols), int)
    for row in range(rows):
        for to in range(rows):
            table[row, (in_row_0 + row) % rows == to] = to + rows * rng.permutation(size)
    return table[np.arange(symbols) % rows]

def stdlib(config, new):
    """The library of the Python that runs this: code of one style, on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = [path for path in root.rglob("*.py") if path.stat().st_size]
    names = sorted(path.relative_to(root).as_posix() for path in files)
    documents = dict(train=[], val=[])
    for name in names:
        if skip.isdisjoint(name.split("/")):
            # 5 % are for validation: by hash, so that a file stays there when others come or go.
            rank = int(hashlib.sha256(os.fsencode(name)).hexdigest()[:16], 16) / 2**64
            documents["val" if rank < 0.05 else "train"].append(read_text(root / name))
    write_text(config, new, documents)

def shakespeare(config, new):
    """Tiny-shakespeare. Its last tenth is for validation, as in nanoGPT."""
    download(SHAKESPEARE_URL, new / "input.txt", SHAKESPEARE_SHA256)
    train, val = cut(read_text(new / "input.txt"), 0.1)
    write_text(config, new, dict(train=[train], val=[val]))

def text(config, new):
    """Your own documents: each file is one, or with --jsonl each of its lines."""
    documents, passed_over = read_documents(config)
    train, val, long = hold_out(documents)
    parts = [cut(document, 0.05) for document in long]
    write_text(config, new, dict(train=train + [head for head, _ in parts],
                                 val=val + [tail for _, tail in parts]))
    say(f"documents: {len(train):,} for training, {len(val):,} for validation, {len(long):,} cut "
        f"at 95 % for both")
    if passed_over:
        say(f"files passed over: {len(passed_over):,}, empty or not UTF-8 text, such as "
            f"{passed_over[0]}")

def hold_out(documents):
    """Texts -> three lists: for training, for validation, and to be cut for both.

    A long text is cut. It has more than 1,000 characters, and more than a twentieth of all. Of the
    others each 20th is for validation. If that gives none, the last is. One text alone is cut."""
    limit = max(1000, sum(map(len, documents)) / 20) if len(documents) > 1 else 0
    long = [document for document in documents if len(document) > limit]
    short = [document for document in documents if len(document) <= limit]
    if len(short) < 20 and not long:
        return short[:-1], short[-1:], long
    train = [document for number, document in enumerate(short, 1) if number % 20]
    return train, short[19::20], long

def read_documents(config):
    """-> the texts of --input, and those files in its folders that hold no text"""
    documents, passed_over = [], []
    seen = {str(config.out)}   # Our own output is no input.
    for path in config.input:
        for file in files_in(path, seen):
            try:
                text = read_text(file)
            except SystemExit:
                if file == path:   # You named it. In a folder, there may be pictures, too.
                    raise
                passed_over.append(file)
                continue
            documents += json_lines(file, text, config.jsonl) if config.jsonl else [text]
    return documents, passed_over

def json_lines(path, text, field):
    """The text of a file whose lines are JSON objects. Yields what each one has in that field."""
    for number, line in enumerate(text.split("\n"), 1):
        try:
            document = json.loads(line)[field] if line.strip() else ""
        except (ValueError, KeyError, TypeError):   # no JSON, no such field, no object
            document = None
        if not isinstance(document, str):
            refuse(f"{path}, line {number}: is no JSON object with text in a field {field!r}")
        if document:
            yield document

def files_in(path, seen):
    """The files at or below a path. Hidden ones and caches are left out, links are followed, and
    nothing comes twice."""
    if os.path.realpath(path) in seen:
        return []
    seen.add(os.path.realpath(path))
    if not path.is_dir():
        return [path] if path.is_file() else []
    names = sorted(name for name in os.listdir(path) if name[0] != "." and name != "__pycache__")
    return [file for name in names for file in files_in(path / name, seen)]

def fineweb(config, new):
    """Ready shards of GPT-2 tokens, as modded-nanogpt has them: one for validation, and the first
    of those for training."""
    config.out.mkdir(exist_ok=True)
    for name in ["val_000000"] + [f"train_{i + 1:06d}" for i in range(config.shards)]:
        shard = config.out / f"fineweb_{name}.bin"
        if not shard.exists():   # What an earlier run has downloaded stays.
            download(FINEWEB_URL + shard.name, new / shard.name)
            read_shard(new / shard.name)
            os.replace(new / shard.name, shard)
    os.replace(new / "meta.json", config.out / "meta.json")
    say("NOT CHECKED: the sha256 of these shards, as none is known. Their lengths are right.")

def download(url, path, sha256=None):
    """SystemExit, and nothing at path, if the network or the disk fails or the sha256 is wrong."""
    socket.setdefaulttimeout(60)
    try:
        torch.hub.download_url_to_file(url, str(path), sha256, progress=sys.stderr.isatty())
    except (OSError, http.client.HTTPException, RuntimeError) as error:
        refuse(f"cannot download {url} ({error}); check network and disk, then type it again")

DATA_SETS = dict(steps=steps, stdlib=stdlib, shakespeare=shakespeare, fineweb=fineweb, text=text)

# --------------------------------------------------------------------------------------------- main

TOKENS = dict(steps="bytes", fineweb="gpt2")   # These two come in one kind of tokens only.
OWN_FLAGS = dict(text=["input", "jsonl"], fineweb=["shards"],
                 steps=["symbols", "rows", "cells", "most", "table"])

@dataclass
class PrepareConfig:
    name: Literal["steps", "stdlib", "shakespeare", "fineweb", "text"] = flag("", "which data set")
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
        for owner, names in OWN_FLAGS.items():
            for name in names:
                if owner != self.name and getattr(self, name) != getattr(PrepareConfig, name):
                    yield f"--{name}: is for {owner} only; leave it out"
        if self.symbols % self.rows:
            yield f"--rows {self.rows}: must divide --symbols {self.symbols}; take {self.symbols}"
        if self.tokenizer not in ("auto", TOKENS.get(self.name, self.tokenizer)):
            yield f"--tokenizer {self.tokenizer}: {self.name} has other tokens; leave this flag out"
        if Path.cwd().is_relative_to(os.path.realpath(self.out or "data")):
            yield f"--out {self.out}: is where you are; name a folder of its own"
        if self.name == "text" and not self.input:
            yield "text: needs files or folders; name them with --input"
        for path in self.input or []:
            if not os.path.isfile(path) and not os.path.isdir(path):
                yield f"--input {shlex.quote(path)}: no such file or folder"
            elif path.endswith(".jsonl") and not self.jsonl:
                yield f"--input {path}: which field of its lines is the text? say --jsonl FIELD"

def main(argv=None):
    [config] = parse([PrepareConfig], argv, __doc__, positional=("name",))
    if config.tokenizer == "auto":
        config.tokenizer = TOKENS.get(config.name, "bytes")
    out = config.out or f"data/{config.name}"
    config.out = Path(os.path.realpath(out))   # A link stands for the folder that it names.
    config.input = [Path(path) for path in config.input or []]
    meta = dict(name=config.name, tokenizer=config.tokenizer,
                vocab_size=VOCABULARIES[config.tokenizer])
    try:
        make(config, out, meta)
    except BlockingIOError:
        refuse(f"--out {out}: another prepare.py is writing there; wait for it, or take another")
    except (KeyboardInterrupt, OSError, OverflowError) as error:
        why = str(error) or "interrupted"
        refuse(f"--out {out}: not written ({why}); type it again when that is mended")
    train, val = (sum(map(len, open_split(out, split))) for split in ("train", "val"))
    say(f"{train:,} train and {val:,} val tokens ({config.tokenizer}); next: "
        f"python train.py --data {shlex.quote(out)}")

def refuse_if_taken(folder, out, meta):
    """SystemExit if the folder holds anything but this data set. out: its name, as typed"""
    for name in os.listdir(folder) if folder.exists() else []:
        if not OUR_FILE.fullmatch(name) or not meta.items() <= load_meta(folder).items():
            refuse(f"--out {out}: its {name!r} is of another data set; choose another folder")

def make(config, out, meta):
    """Makes the data set in a temporary folder beside --out, so that there is never half of one.
    (fineweb puts shard after shard into --out.) The lock on the temporary folder ends with this
    process, however that ends."""
    temporary = config.out.parent / f".{config.out.name}.tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    folder = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW)
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        refuse_if_taken(config.out, out, meta)   # now, when nobody else can write there
        new = Path(tempfile.mkdtemp(dir=temporary), "new")
        new.mkdir()
        (new / "meta.json").write_text(json.dumps(meta))
        DATA_SETS[config.name](config, new)
    finally:
        for old in temporary.glob("*/old"):
            if not config.out.exists():   # Ctrl-C came just when it was to be replaced.
                old.rename(config.out)
        shutil.rmtree(temporary, ignore_errors=True)   # also what killed runs have left there

if __name__ == "__main__":
    start(main)
