"""
Makes a data set of text: a folder of shards, files of tokens. (train.py reads it by this file.)

    python prepare.py steps                    # a puzzle of many steps; seconds, no network
    python prepare.py stdlib                   # the source of Python's own library; no network
    python prepare.py shakespeare              # tiny-shakespeare, 1 MB
    python prepare.py fineweb --shards 10      # GPT-2 tokens of web text, 100M (200 MB) per shard
    python prepare.py text --input PATH...     # your own files and folders; they must fit in memory

Your own files have to be UTF-8 text. Each file is a document, or with --jsonl FIELD each line, a
JSON object with that field. About 5 % of them are for validation; of a long one, its last 5 %.
"""
# The file goes the way of a text: source (part 1), tokens (2), shards on the disk (3), windows of
# them that a model is trained on (4). Part 5 is a puzzle, one more source, and part 6 the command.
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

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F

from flags import Mistake, flag, make_configs, read_command_line, refuse, start

try:
    import fcntl   # locks a folder
except ImportError:   # Windows has none. There, don't write to one folder from two terminals.
    fcntl = None

# ================================================================== part 1: where texts come from

# A source is a function of the command's flags. It returns two lists of texts, for training and for
# validation. One of yours needs a name in SOURCES (part 6), and may be as short as this:
#     return hold_out(read_text(flags.input[0]).splitlines())   # A document is a line of a file.

def read_text(path, must_be_text=True):
    """The text of a file. If it is empty, or not UTF-8: SystemExit, or without must_be_text None"""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        text = ""
    if text and "\0" not in text:   # UTF-16 has NUL bytes, and so has what is no text at all.
        return text
    if must_be_text:
        refuse(f"{path}: is empty, or not UTF-8 text; unpack an archive, export a table as lines "
               f"of JSON, and for other text use iconv -f ENCODING -t UTF-8")

def text_or_file(value):
    """For flags of sample.py and analyze.py that are a text, or the name of a file with one"""
    return read_text(value) if os.path.isfile(value) else value

def check_texts(texts):
    """Mistake if this is no list of str. (Of a str alone, each letter would be a document.)"""
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise Mistake(f"{repr(texts)[:40]} is no list of texts; put a single text into brackets")

def place_of(text):
    """A number from 0 to 1, as good as random, and always the same. Up to 0.05: for validation."""
    # JSON can write half of a surrogate pair, for which there are no bytes without surrogatepass.
    return int(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), 16) / 2**256

def cut(text, share):
    """A text -> two. The second has about this share of it, and begins a line if it can."""
    place = int(len(text) * (1 - share))
    newline = text.rfind("\n", place - len(text) // 100, place)   # at most 1 % earlier, or -1
    place = place if newline < 0 else newline + 1
    return text[:place], text[place:]

def hold_out(documents):
    """Texts -> texts for training, texts for validation. Of a long one, with more than 1,000
    characters and more than 5 % of all, the last 5 % are held out. Of the others about one in 20
    is, as a whole, because its end may be what matters. A hash of the text says which: so it stays
    on its side when others come, copies are on one side, and kinds that come in turn on both."""
    check_texts(documents)
    limit = max(1000, sum(map(len, documents)) / 20)
    long = [cut(text, 0.05) for text in documents if len(text) > limit]
    places = {text: place_of(text) for text in documents if len(text) <= limit}
    first, last = min(places.values(), default=0), max(places.values(), default=0)
    train, val = [], []
    for text in documents:
        if text in places:   # One at least goes to each side.
            is_val = places[text] <= max(0.05, first) and places[text] != last
            (val if is_val else train).append(text)
    print(f"documents: {len(train):,} for training, {len(val):,} for validation, {len(long):,} cut "
          f"at 95 % for both; {len(documents) - len(set(documents)):,} are copies of others")
    return train + [head for head, tail in long], val + [tail for head, tail in long]

def read_stdlib(flags):
    """The library of the Python that runs this: code of one style, on every machine"""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    train, val = [], []
    for path in sorted(root.rglob("*.py"), key=str):
        name = path.relative_to(root)
        if skip.isdisjoint(name.parts) and path.stat().st_size:
            is_val = place_of(name.as_posix()) < 0.05   # in each version of Python
            (val if is_val else train).append(read_text(path))
    return train, val

def download(url, path, sha256=None):
    """SystemExit, and nothing is there, if the network or the disk fails or the sha256 is wrong"""
    try:
        torch.hub.download_url_to_file(url, str(path), sha256, progress=sys.stderr.isatty())
    except Exception as error:   # of the network, a server or the disk
        refuse(f"cannot download {url} ({error}); check network and disk, then type it again")

SHAKESPEARE_URL = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
                   "tinyshakespeare/input.txt")
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

def download_shakespeare(flags):
    """Tiny-shakespeare is one text. Its last tenth, from a new line on, is for validation."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "input.txt")
        download(SHAKESPEARE_URL, path, SHAKESPEARE_SHA256)
        train, val = cut(read_text(path), 0.1)
    return [train], [val]

def files_in(path, seen):
    """Yields the files at or below a path, by name. Hidden ones and caches are left out. seen: the
    real paths of what has come before: nothing comes twice, nor does a link lead in circles."""
    real_path = os.path.realpath(path)   # where it leads, if it is a link
    if real_path in seen:
        return
    seen.add(real_path)
    if path.is_file():
        yield path
    elif path.is_dir():
        for name in sorted(os.listdir(path)):
            if not name.startswith(".") and name != "__pycache__":
                yield from files_in(path / name, seen)

def json_lines(path, text, field):
    """Yields what lines of JSON objects have in that field. text: what the file holds"""
    for number, line in enumerate(text.split("\n"), 1):
        try:
            document = json.loads(line)[field] if line.strip() else ""
        except (ValueError, KeyError, TypeError, RecursionError):   # no JSON, field, or object
            document = None
        if not isinstance(document, str):
            refuse(f"{path}, line {number}: is no JSON object with text in a field {field!r}")
        if document:
            yield document

def read_own_files(flags):
    """Your own files and folders. A file is a document, or with --jsonl each line of it."""
    documents, passed_over = [], []
    seen = {os.path.realpath(flags.out)}   # The data set's own folder may be in one of yours.
    for path in map(Path, flags.input or []):
        if not path.is_file() and not path.is_dir():
            refuse(f"--input {shlex.quote(str(path))}: no such file or folder")
        for file in files_in(path, seen):
            # A file that is named must be text. In a folder may be pictures, too.
            text = read_text(file, must_be_text=file == path)
            if text is None:
                passed_over.append(file)
            elif flags.jsonl:
                documents += json_lines(file, text, flags.jsonl)
            elif file.suffix in (".jsonl", ".ndjson"):
                refuse(f"{file}: which field of its lines is the text? say --jsonl FIELD")
            else:
                documents.append(text)
    if passed_over:
        print(f"files passed over, no UTF-8 text: {len(passed_over):,}, such as {passed_over[0]}")
    return hold_out(documents)

# ===================================================================== part 2: from texts to tokens

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
    """A list of texts -> their tokens, an array of uint16. After each text comes an end-of-text."""
    tokenizer = get_tokenizer(tokenizer_name)
    tokens = array("H")
    for text in texts:
        # encode_ordinary: where somebody's text says "<|endoftext|>", that is text, not this token.
        tokens.extend(tokenizer.encode_ordinary(text))
        tokens.append(tokenizer.eot_token)
    return tokens

def token_bytes(tokenizer_name, n_tokens):
    """How many bytes of text each token stands for, (n_tokens,) int64, to divide losses by"""
    tokenizer = get_tokenizer(tokenizer_name)
    sizes = torch.zeros(n_tokens, dtype=torch.long)
    for token in range(tokenizer.n_vocab):
        sizes[token] = len(tokenizer.decode_single_token_bytes(token))
    sizes[tokenizer.eot_token] = 0   # as have those that a model knows beyond the tokenizer's
    return sizes

# ======================================================== part 3: a data set, a folder with shards

#     meta.json           {"name": "stdlib", "tokenizer": "bytes", "sha256": {.. of each shard}}
#     train_000000.bin    a shard for training: there may be more with a word `train` in the name
#     val_000000.bin      a shard for validation, too
#
# Such folders are also made by llm.c and modded-nanogpt, without meta.json. A shard is as llm.c has
# it: 256 int32 (magic, version, number of tokens, zeros), then the tokens as uint16.

MAGIC, VERSION, HEADER = 20240520, 1, 256 * 4   # HEADER: its bytes
MOST_TOKENS = 2**30   # in a shard of ours. (An int32 has no 2**31.)

def write_shard(path, tokens):
    header = np.array([MAGIC, VERSION, len(tokens)] + 253 * [0], "<i4")
    path.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())

def read_shard(path):
    """The tokens of a shard, (n,) uint16, which stay on the disk until they are indexed"""
    header = np.fromfile(path, "<i4", 3).tolist()
    if len(header) < 3 or header[:2] != [MAGIC, VERSION]:   # nanoGPT's .bin, or llm.c's of Llama 3
        refuse(f"{path}: is no shard of llm.c's version {VERSION}, as part 3 of prepare.py has it")
    n, n_here = header[2], max(0, os.path.getsize(path) - HEADER) // 2   # two bytes each
    if n_here < n:
        refuse(f"{path}: is cut short, {n_here:,} of {n:,} tokens; delete it and make it again")
    return np.memmap(path, "<u2", mode="r", offset=HEADER, shape=(n,))

def shard_paths(data):
    return sorted(Path(data).glob("*.bin"))

def load_meta(data):
    """-> what meta.json says of a data set, a dict, and vocab_size: how many tokens there may be"""
    path = Path(data, "meta.json")
    if not path.exists() and not shard_paths(data):
        refuse(f"--data {data}: no data set there, seen from {os.getcwd()}; make it by prepare.py")
    try:   # Other programs write no meta.json. Their shards hold GPT-2's tokens.
        meta = json.loads(path.read_bytes()) if path.exists() else dict(tokenizer="gpt2")
        return meta | dict(vocab_size=VOCABULARIES[meta["tokenizer"]])
    except (KeyError, TypeError, ValueError):   # It is no JSON, no dict, or names none of these.
        refuse(f"{path}: must name a tokenizer, one of {', '.join(VOCABULARIES)}; correct that")

def fingerprint(data):
    """A hash by which a run knows its data again: of meta.json, which has the sha256 of the shards
    that prepare.py makes, and of each shard's size and 512 evenly spread pieces of 64 kB. (Between
    these, if another program changes a shard of more than 32 MB, it isn't seen.)"""
    found = hashlib.sha256(json.dumps(load_meta(data), sort_keys=True).encode())
    for path in shard_paths(data):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        n_pieces = min(512, size // 2**16 + 1)
        for begin in np.linspace(0, max(0, size - 2**16), n_pieces).astype(int).tolist():
            found.update(np.fromfile(path, np.uint8, 2**16, offset=begin))
    return found.hexdigest()

UNFINISHED = ".unfinished-"   # So begin the names of folders with files that aren't whole yet.

@contextlib.contextmanager
def new_files(parent, old=()):
    """with new_files(parent) as folder: the block writes files to this new folder. When they are on
    the disk, `old` files leave `parent`, one by one, and the new ones come, by name. Until then a
    kill or a full disk leaves what is there as it was. SystemExit if they can't be written"""
    try:
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=parent) as folder:
            yield Path(folder)
            new = sorted(Path(folder).iterdir())
            for path in new:
                with open(path, "rb+") as file:
                    os.fsync(file.fileno())   # Some disks say only now that they are full.
            for path in old:   # From here on, only names change.
                os.replace(path, Path(folder, f"old {path.name}"))
            for path in new:
                os.replace(path, Path(parent, path.name))
    except (OSError, RuntimeError) as error:
        # torch.save meets an OSError, such as that of a full disk, and then says RuntimeError.
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        refuse(f"{parent}: can't be written ({reason}); make room, or take another --out")

@contextlib.contextmanager
def whole_file(path):
    """with whole_file(path) as file: it is open to write bytes, and then replaces an older one,
    which a kill or a full disk leaves as it was. (train.py saves so.)"""
    path = Path(path)
    with new_files(path.parent) as folder, open(folder / path.name, "wb") as file:
        yield file

@contextlib.contextmanager
def locked(folder):
    """with locked(folder): SystemExit if another process is in such a with-block for this folder.
    If the folder isn't there, it is made; if it stays empty, it goes again."""
    real = Path(os.path.realpath(folder))   # It may be a link.
    if real.is_file():
        refuse(f"--out {folder}: is a file; name a folder")
    made = [each for each in (real, *real.parents) if not each.exists()]
    real.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(real, os.O_RDONLY) if fcntl else None
    try:
        try:   # The system unlocks it when this process ends, however it ends.
            if fcntl:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for unfinished in real.glob(UNFINISHED + "*"):   # of a process that was killed
                    shutil.rmtree(unfinished, ignore_errors=True)
        except BlockingIOError:
            refuse(f"--out {folder}: another process is writing there; wait, or take another --out")
        except OSError:   # Some network disks have no locks. There, don't use two terminals.
            pass
        yield
    finally:
        if fcntl:
            os.close(descriptor)
        with contextlib.suppress(OSError):   # One isn't empty.
            for each in made:
                each.rmdir()

def refuse_if_taken(out, meta, overwrite):
    """SystemExit if what the folder `out` holds is not to be replaced by the data set of `meta`"""
    if (out / "ckpt.pt").exists():
        refuse(f"--out {out}: is a run of train.py; choose another folder")
    names = {path.name for path in shard_paths(out)}
    if not names and not (out / "meta.json").exists():
        return
    there = load_meta(out)
    is_same = there | meta == there   # so far as `meta` goes
    if meta["name"] == "fineweb":   # It adds shards to its own, and replaces none.
        if not is_same:
            refuse(f"--out {out}: holds another data set; choose another folder")
    elif not names <= {*there.get("sha256", [])}:
        refuse(f"--out {out}: holds shards that prepare.py has not made; choose another folder")
    elif not is_same and not overwrite:
        refuse(f"--out {out}: holds another data set; choose another folder, or say --overwrite")

def write_data_set(out, meta, train, val, overwrite):
    """Two sequences of tokens -> a data set in the folder `out`, a Path"""
    # When all is written, the old val shard goes first, and the new one comes last. A kill between
    # these leaves none, which open_split says to all who read. The same command makes it whole.
    with new_files(out, old=shard_paths(out)[::-1]) as folder:
        for split, tokens in dict(train=train, val=val).items():
            for number, begin in enumerate(range(0, len(tokens), MOST_TOKENS)):
                part = tokens[begin:begin + MOST_TOKENS]
                write_shard(folder / f"{split}_{number:06}.bin", part)
        hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()
                  for path in shard_paths(folder)}
        meta = meta | dict(sha256=hashes)
        refuse_if_taken(out, meta, overwrite)
        (folder / "meta.json").write_text(json.dumps(meta))

FINEWEB_URL = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/"

def download_fineweb(out, meta, n_shards):
    """It comes as shards, as modded-nanogpt takes them. What was downloaded before stays."""
    with whole_file(out / "meta.json") as file:
        file.write(json.dumps(meta).encode())
    for number in range(n_shards + 1):
        name = f"fineweb_train_{number:06d}.bin" if number else "fineweb_val_000000.bin"
        if not (out / name).exists():
            with new_files(out) as folder:
                download(FINEWEB_URL + name, folder / name)
                read_shard(folder / name)   # SystemExit if it is cut short; its sha256 is not known

# ==================================================================== part 4: windows of a data set

# A window is T + 1 tokens of one shard, in a row: a model reads the first T, and predicts the last
# T. A shard of n tokens has n - T windows. They are numbered, from 0, through all shards.

def open_split(data, split, T=0):
    """The shards of "train" or of "val", which is a word of their names: those with a window"""
    paths = []
    for path in shard_paths(data):
        words = re.split("[^A-Za-z]+", path.stem)
        if "train" in words and "val" in words:
            refuse(f"{path}: is it of train or of val? its name has both; rename it")
        if split in words:
            paths.append(path)
    if not paths:
        refuse(f"--data {data}: has no {split} shard, so it isn't whole; prepare it anew")
    shards = [shard for shard in map(read_shard, paths) if len(shard) > T]
    if not shards:
        refuse(f"--data {data}: no {split} shard is longer than --block_size {T}; lower that")
    return shards

def read_windows(shards, numbers, T):
    """The windows of these n numbers -> x, y (n, T) int64. y is x, one token later."""
    first_number = np.cumsum([0] + [len(shard) - T for shard in shards])   # of each shard's windows
    shard_of = np.searchsorted(first_number, numbers, side="right") - 1
    begins = numbers - first_number[shard_of]
    rows = [shards[i][begin:begin + T + 1] for i, begin in zip(shard_of, begins)]
    windows = torch.from_numpy(np.stack(rows).astype(np.int64))
    return windows[:, :-1], windows[:, 1:]

def windows_of(data, split, T, n):
    """n windows of "train" or "val", evenly spread, to measure with -> x, y (n, T)"""
    vocab_size = load_meta(data)["vocab_size"]
    shards = open_split(data, split, T)
    n_windows = sum(len(shard) - T for shard in shards)
    x, y = read_windows(shards, np.linspace(0, n_windows - 1, n).astype(int), T)
    largest = max(x.max(), y.max())
    if largest >= vocab_size:
        refuse(f"--data {data}: has token {largest}, beyond its tokenizer's {vocab_size}; fix that")
    return x, y

# ============================================================================== part 5: the puzzle

# In the steps text, each line follows from the one before, in none, one, two or more steps:
#
#     c314159265358     a letter, and digits. c: the next line is two steps after it (a: 0, b: 1)
#     d108515848740     asks for three steps
#     c954006051092
#
# In a step, all digits are replaced at once. By which? That depends on the digit and on its left
# neighbour. (Left of the first digit is a 0.) A digit's place is its cell, from the left, 0.

ROWS = [[0, 7, 4, 5, 6, 1, 3, 8, 9, 2],   # what 0, 1, .. 9 become after an even digit
        [9, 8, 1, 4, 7, 2, 6, 5, 0, 3]]   # ... and after an odd one

# So 314159265358 becomes 587723131420, and this 108515848740, the answer to the first line. We know
# how many steps lead to each digit, and so we see how many a model has learned. (Each row has each
# digit once, so none gets lost. Below an even one stands an odd one, so neighbours always matter.)

# table[left neighbour][digit]: what it becomes; most: the most steps that a line asks for
PUZZLE = dict(table=5 * ROWS, cells=12, most=9)
SPLITS = dict(train=(24_000, 5), val=(1_200, 3))   # how many documents, and a seed of their lines

def next_line(digits, table):
    """One step: digits, a tensor (..., cells) -> the digits after it"""
    left = F.pad(digits[..., :-1], (1, 0))   # of each digit; it begins with a 0
    return torch.as_tensor(table)[left, digits]

def make_documents(n, seed):
    """-> n texts of 16 lines. Random are their first digits, and for how many steps lines ask."""
    rng = np.random.default_rng((0, seed))
    table, most = PUZZLE["table"], PUZZLE["most"]
    weights = 0.85 ** np.arange(most + 1)   # Lines that ask for few steps are more frequent.
    n_steps = torch.from_numpy(rng.choice(most + 1, (n, 16), p=weights / weights.sum()))
    digits = torch.from_numpy(rng.integers(10, size=(n, PUZZLE["cells"])))
    newline = torch.full((n, 1), ord("\n"))
    parts = []   # from left to right, each of all n documents at once
    for steps in n_steps.split(1, dim=1):   # (n, 1), line by line
        parts += [ord("a") + steps, ord("0") + digits, newline]
        for done in range(most):
            # Where fewer steps are asked for, the digits are right already, and stay.
            digits = torch.where(done < steps, next_line(digits, table), digits)
    characters = torch.cat(parts, 1).to(torch.uint8).numpy()
    return [bytes(document).decode() for document in characters]

def make_steps(flags):
    return [make_documents(n, seed) for n, seed in SPLITS.values()]

# ============================================================================= part 6: the command

SOURCES = dict(steps=make_steps, stdlib=read_stdlib, shakespeare=download_shakespeare,
               text=read_own_files)
# The flags that a source uses, beside --out and --overwrite. (Yours may use all.)
FLAGS_OF = dict(steps=[], stdlib=["tokenizer"], shakespeare=["tokenizer"], fineweb=["shards"],
                text=["tokenizer", "input", "jsonl"])

@dataclass
class PrepareConfig:
    name: Literal[(*SOURCES, "fineweb")] = flag("", "which data set")
    out: str = flag("", "folder of the shards; without it data/NAME")
    overwrite: bool = flag(False, "replace the data set in --out, if prepare.py has made it")
    tokenizer: Literal["bytes", "gpt2"] = flag("bytes", "of text, stdlib and shakespeare")
    shards: int = flag(1, "of fineweb: how many, of 100M tokens each", low=1, high=103)
    input: list = flag(None, "of text: UTF-8 files, and folders of them")
    jsonl: str = flag("", "of text: lines are JSON objects, and this field of theirs is the text")

def texts_of(flags):
    """-> texts for training, texts for validation, as the source gives them"""
    train, val = SOURCES[flags.name](flags)   # two lists of texts
    check_texts(train)
    check_texts(val)
    if not train or not val:
        refuse(f"{flags.name}: has too little text; give several documents that differ, or one of "
               f"more than 1,000 characters (--input names them; the folder of --out isn't read)")
    in_both = {*train} & {*val}
    if in_both:
        print(f"texts that are on both sides, so that their loss says little: {len(in_both):,}")
    return train, val

def main(argv=None):
    typed = read_command_line([PrepareConfig], argv, __doc__, positional=("name",))
    [flags] = make_configs([PrepareConfig], typed)
    name = flags.name
    unused = typed.keys() - {"name", "out", "overwrite", *FLAGS_OF.get(name, typed)}
    if unused:
        refuse(f"--{min(unused)}: {name} has no use for it; leave it out")
    meta = dict(name=name, tokenizer="gpt2" if name == "fineweb" else flags.tokenizer)
    if name == "steps":
        meta["steps"] = PUZZLE   # analyze.py reads it there.
    flags.out = out = Path(flags.out or f"data/{name}")
    with locked(out):   # So no other prepare.py makes a data set there meanwhile.
        refuse_if_taken(out, meta, flags.overwrite)
        if name == "fineweb":
            download_fineweb(out, meta, flags.shards)
        else:
            train, val = (encode(texts, flags.tokenizer) for texts in texts_of(flags))
            write_data_set(out, meta, train, val, flags.overwrite)
    n_train, n_val = (sum(map(len, open_split(out, split))) for split in ("train", "val"))
    print(f"{n_train:,} train and {n_val:,} val tokens ({meta['tokenizer']}); next: "
          f"python train.py --data {shlex.quote(str(out))}")

if __name__ == "__main__":
    start(main)   # It makes sentences of errors that you can mend, such as a full disk.
