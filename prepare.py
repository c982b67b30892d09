"""
Makes a data set of text: a folder of shards, files of tokens. (train.py reads it by this file.)

    python prepare.py steps                    # a puzzle of many steps; seconds, no network
    python prepare.py stdlib                   # the source of Python's own library; no network
    python prepare.py shakespeare              # tiny-shakespeare, 1 MB
    python prepare.py fineweb --shards 10      # GPT-2 tokens of web text, 100M (200 MB) per shard
    python prepare.py text --input PATH...     # your own files and folders; they must fit in memory

Your own files have to be UTF-8 text. Each file is a document, whatever separators it holds. (With
--jsonl FIELD, each line is one: a JSON object with that field.) Of the documents about 5 % are for
validation, chosen by a hash of their text; of a long one, its last 5 %.
"""
# This file is the way of a text: sources say which texts there are, and these become tokens, shards
# (where train.py comes in), and windows, which a model sees. Then come a puzzle, which is one more
# source, and the command.
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
from dataclasses import dataclass, fields, is_dataclass
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

# A source is a dataclass. Its fields are flags of its own, and texts() returns two lists of texts,
# for training and for validation. Here is all of one whose documents are the lines of a file:
#
#     @dataclass
#     class Songs(DataSource):
#         songs: str = flag("songs.txt", "a file with a song in each line", group="songs only")
#
#         def texts(self, out):
#             lines = read_text(self.songs).splitlines()
#             return lines[20:], lines[:20]
#
# Put it before part 6, add songs=Songs to SOURCES there, and type: python prepare.py songs --songs
# FILE. (Each flag needs a name that no other source has.)

class DataSource:
    """What every source has. (out, in its methods: the folder of the data set, a Path)"""
    # These are no flags: a dataclass's fields are those names that have a type behind them.
    tokenizers = "bytes", "gpt2"   # those it can have; the first one is the usual one
    about = {}                     # what meta.json says of it, besides its name and its tokenizer

    def texts(self, out):
        """-> two lists of texts, for training and for validation"""

    def write(self, out, meta, overwrite):
        """Makes the data set. meta: what meta.json says, a dict; overwrite: may it replace one?"""
        found = self.texts(out)
        if not isinstance(found, (list, tuple)) or len(found) != 2:
            raise Mistake(f"{type(self).__name__}.texts must return two lists of texts, for "
                          f"training and for validation")
        train, val = (encode(texts, meta["tokenizer"]) for texts in found)
        if not train or not val:
            refuse(f"{meta['name']}: needs a text to train on, and another one to validate with")
        in_both = set(found[0]) & set(found[1])
        if in_both:
            print(f"texts for validation that are for training, too: {len(in_both):,}; their loss "
                  f"says little")
        write_data_set(out, meta, train, val, overwrite)

def read_text(path, must_be_text=True):
    """The text of a file: it is UTF-8, a byte order mark at its start is dropped, and all else
    stays, line ends too. SystemExit if it is empty, or no text; but None without must_be_text"""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        text = ""
    if text and "\0" not in text:   # UTF-16 has NUL bytes, and so has what is no text at all.
        return text
    if must_be_text:
        refuse(f"{path}: is empty, or not UTF-8 text; name another, or make it text: unpack an "
               f"archive, export a table as lines of JSON, or use iconv -f ENCODING -t UTF-8")
    return None

def check_texts(texts):
    """Mistake if this is no list of str. (Of a str alone, each letter would be a document.)"""
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise Mistake(f"{repr(texts)[:50]} is no list of texts; a single text goes into brackets, "
                      f"as in [text]")

def text_or_file(value):
    """For flags of sample.py and analyze.py that are a text, or the name of a file with one"""
    return read_text(value) if os.path.isfile(value) else value

def place_of(content):
    """bytes -> a number from 0 to 1, by their hash: as good as random, and always the same. Up to
    0.05 is for validation. So a text stays on its side when others come or go."""
    return int(hashlib.sha256(content).hexdigest(), 16) / 2**256

def cut(text, share):
    """A text -> two. The second has about this share of it, and begins a line if it can."""
    place = int(len(text) * (1 - share))
    newline = text.rfind("\n", place - len(text) // 100, place)   # at most 1 % earlier, or -1
    place = place if newline < 0 else newline + 1
    return text[:place], text[place:]

def hold_out(documents):
    """Texts -> texts for training, texts for validation. A text is long if it has more than 1,000
    characters, and more than 5 % of all. Of a long one the last 5 % are held out. Of the short ones
    about one in 20 is, as a whole: the end of a short one may be what matters. A hash of the text
    says which: so copies of a text are on one side, and kinds that come in turn are on both."""
    check_texts(documents)
    limit = max(1000, sum(map(len, documents)) / 20)
    short = [text for text in documents if len(text) <= limit]
    long = [cut(text, 0.05) for text in documents if len(text) > limit]
    # surrogatepass: JSON can write half of a surrogate pair, and this has bytes, too.
    places = [place_of(text.encode("utf-8", "surrogatepass")) for text in short]
    last, different = 0.05, sorted(set(places))
    if len(different) > 1:   # One at least is for each side.
        last = min(max(last, different[0]), different[-2])
    train = [text for text, place in zip(short, places) if place > last]
    val = [text for text, place in zip(short, places) if place <= last]
    if not long and not (train and val):
        refuse("--input: has too little text (the folder of --out isn't read); name several "
               "documents that differ, or one of more than 1,000 characters")
    print(f"documents: {len(train):,} for training, {len(val):,} for validation, {len(long):,} cut "
          f"at 95 % for both; {len(documents) - len(set(documents)):,} are copies of others")
    return train + [head for head, tail in long], val + [tail for head, tail in long]

# ------------------------------------------------------------- Python's library, and what is online

@dataclass
class Stdlib(DataSource):
    """The library of the Python that runs this: code of one style, on every machine"""
    def texts(self, out):
        root = Path(sysconfig.get_path("stdlib"))
        skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
        train, val = [], []
        for path in sorted(root.rglob("*.py"), key=str):
            below_root = path.relative_to(root)
            if skip.isdisjoint(below_root.parts) and path.stat().st_size:
                # Its name decides: so it stays on its side in other versions of Python.
                is_val = place_of(os.fsencode(below_root.as_posix())) < 0.05
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

@dataclass
class Shakespeare(DataSource):
    """Tiny-shakespeare is one text. Its last tenth, from a new line on, is for validation."""
    def texts(self, out):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "input.txt")
            download(SHAKESPEARE_URL, path, SHAKESPEARE_SHA256)
            train, val = cut(read_text(path), 0.1)
        return [train], [val]

FINEWEB_URL = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/"

@dataclass
class Fineweb(DataSource):
    """It comes as shards, as modded-nanogpt takes them, and so it has no texts()."""
    shards: int = flag(1, "how many, of 100M tokens each", low=1, high=103, group="fineweb only")
    tokenizers = ("gpt2",)

    def write(self, out, meta, overwrite):
        numbered = [f"fineweb_train_{number:06d}.bin" for number in range(1, self.shards + 1)]
        for name in ["fineweb_val_000000.bin", *numbered]:
            if not (out / name).exists():   # What an earlier run has downloaded stays.
                with unfinished_folder(out) as folder:
                    download(FINEWEB_URL + name, folder / name)
                    read_shard(folder / name)   # SystemExit if the download is cut short
                    with whole_file(out / "meta.json") as file:
                        file.write(json.dumps(meta).encode())
                    os.replace(folder / name, out / name)
        print("The lengths of the shards are right. Their sha256, not known, was not checked.")

# ------------------------------------------------------------------------------- your own documents

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
    """The text of a file whose lines are JSON objects -> yields what each has in that field"""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)[field]
        except (ValueError, KeyError, TypeError, RecursionError):   # no JSON, field, or object
            document = None
        if not isinstance(document, str):
            refuse(f"{path}, line {number}: is no JSON object with text in a field {field!r}")
        if document:
            yield document

@dataclass
class Text(DataSource):
    """Your own files and folders. A file is a document, or with --jsonl each line of it."""
    input: list = flag(None, "UTF-8 files, and folders of them", group="text only")
    jsonl: str = flag("", "lines are JSON objects, and this field of theirs is the text")

    def texts(self, out):
        if not self.input:
            refuse("text: needs --input, with files or folders of yours")
        documents, passed_over = [], []
        seen = {os.path.realpath(out)}   # The data set's own folder may be in one of yours.
        for path in self.input:
            if not os.path.isfile(path) and not os.path.isdir(path):
                refuse(f"--input {shlex.quote(path)}: no such file or folder")
            for file in files_in(Path(path), seen):
                # A file that is named must be text. In a folder may be pictures, too.
                text = read_text(file, must_be_text=os.path.isfile(path))
                if text is None:
                    passed_over.append(file)
                elif self.jsonl:
                    documents.extend(json_lines(file, text, self.jsonl))
                elif file.suffix in (".jsonl", ".ndjson"):
                    refuse(f"{file}: which field of its lines is the text? say --jsonl FIELD")
                else:
                    documents.append(text)
        if passed_over:
            print(f"files passed over: {len(passed_over):,}, empty or not UTF-8 text, such as "
                  f"{passed_over[0]}")
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
    check_texts(texts)
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

# ======================================================== part 3: a data set, a folder with shards

#     meta.json           {"name": "stdlib", "tokenizer": "bytes", "sha256": {.. of each shard}}
#     train_000000.bin    a shard for training: there may be more with a word `train` in the name
#     val_000000.bin      a shard for validation, too
#
# Such folders are also made by llm.c and modded-nanogpt, without meta.json. A shard is as llm.c has
# it: 256 int32 (magic, version, number of tokens, zeros), then the tokens as uint16.

MAGIC, VERSION, HEADER = 20240520, 1, 256 * 4   # HEADER: its bytes
MOST_TOKENS = 2**30   # in a shard of ours; an int32 counts to nearly 2**31

def shard_paths(data):
    return sorted(Path(data).glob("*.bin"))

# ----------------------------------------------- how files are written whole; train.py does so, too

UNFINISHED = ".unfinished-"   # So begin the names of folders with files that aren't whole yet.

@contextlib.contextmanager
def unfinished_folder(parent, name=""):
    """with unfinished_folder(parent) as folder: a new folder in `parent`, for files that will move
    up when they are whole. It goes in the end. SystemExit if they, or `name`, can't be written"""
    try:
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=parent) as folder:
            yield Path(folder)
    except (OSError, RuntimeError) as error:
        # torch.save meets an OSError, such as that of a full disk, and then says RuntimeError.
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        refuse(f"{Path(parent, name)}: can't be written ({reason}); make room, or take another "
               f"--out")

@contextlib.contextmanager
def whole_file(path):
    """with whole_file(path) as file: a new file, open to write bytes. Only when all is written and
    on the disk, it takes the place of an older one. So a kill or a full disk leaves that as it was.
    SystemExit if it can't be written"""
    path = Path(path)
    with unfinished_folder(path.parent, path.name) as folder:
        with open(folder / path.name, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(folder / path.name, path)

@contextlib.contextmanager
def locked(folder):
    """with locked(folder): no other process is in such a with-block for the same folder. SystemExit
    if one is there now. If the folder isn't there, it is made; if it stays empty, it goes again."""
    real = Path(os.path.realpath(folder))   # It may be a link.
    if real.is_file():
        refuse(f"--out {folder}: is a file; name a folder")
    made = [each for each in (real, *real.parents) if not each.exists()]
    real.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(real, os.O_RDONLY) if fcntl else None
    try:   # The system unlocks it when this process ends, however it ends.
        if fcntl:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for unfinished in real.glob(UNFINISHED + "*"):   # of a process that was killed
                shutil.rmtree(unfinished, ignore_errors=True)
    except BlockingIOError:
        refuse(f"--out {folder}: another process is writing there; wait for it, or take another "
               f"--out")
    except OSError:   # Some network disks have no locks. There, don't use two terminals.
        pass
    try:
        yield
    finally:
        if fcntl:
            os.close(descriptor)
        with contextlib.suppress(OSError):   # One isn't empty.
            for each in made:
                each.rmdir()

def shard_content(tokens):
    """Tokens, a sequence of numbers below 2**16 -> all that the file holds, an array of uint16"""
    header = np.array([MAGIC, VERSION, len(tokens)] + 253 * [0], "<i4")
    return np.concatenate([header.view("<u2"), np.asarray(tokens, "<u2")])

def write_data_set(out, meta, train, val, overwrite=False):
    """Two sequences of tokens -> a data set in the folder `out`, a Path. If one with other tokens
    is there, only `overwrite` replaces it: SystemExit without. A full disk leaves it as it was."""
    shards = {}
    for split, tokens in dict(train=train, val=val).items():
        for number, begin in enumerate(range(0, len(tokens), MOST_TOKENS)):
            shards[f"{split}_{number:06}.bin"] = shard_content(tokens[begin:begin + MOST_TOKENS])
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in shards.items()}
    is_other = hashes != {path.name: hashlib.sha256(path.read_bytes()).hexdigest()
                          for path in shard_paths(out)}
    if is_other and (out / "val_000000.bin").exists() and not overwrite:
        refuse(f"--out {out}: holds a data set of other tokens; --overwrite replaces it, another "
               f"--out keeps it")
    new = {"meta.json": json.dumps(meta | dict(sha256=hashes)).encode()} | shards
    with unfinished_folder(out) as folder:
        for name, content in new.items():
            with open(folder / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        # All is whole, so the old files can go. Who is stopped from here on, or reads meanwhile,
        # finds no validation shard, and open_split says so: the new one comes last.
        if is_other:
            for old in [*out.glob("val_??????.bin"), *out.glob("train_??????.bin")]:
                old.unlink()
        for name in new:   # meta.json, train_000000.bin, .., val_000000.bin
            os.replace(folder / name, out / name)

# ---------------------------------------------------------------------------------- how it is read

def read_shard(path):
    """The tokens of a shard, (n,) uint16. They stay on the disk until they are indexed. SystemExit
    if it has another format, or is cut short"""
    header = np.fromfile(path, "<i4", 3).tolist()
    if len(header) < 3 or header[:2] != [MAGIC, VERSION]:   # nanoGPT's .bin, or llm.c's of Llama 3
        refuse(f"{path}: is no shard of llm.c's version {VERSION}, which has 256 int32 ({MAGIC}, "
               f"{VERSION}, number of tokens, zeros), and then the tokens as uint16")
    n = header[2]
    n_here = max(0, os.path.getsize(path) - HEADER) // 2   # two bytes each
    if n_here < n:
        refuse(f"{path}: is cut short, {n_here:,} of {n:,} tokens; delete it and make it again")
    return np.memmap(path, "<u2", mode="r", offset=HEADER, shape=(n,))

def load_meta(data):
    """-> what meta.json says of a data set, and the size of its vocabulary: dict(name=, tokenizer=,
    vocab_size=). The steps text has steps=, too, the puzzle. SystemExit if none is there"""
    path = Path(data, "meta.json")
    if not path.exists() and not shard_paths(data):
        refuse(f"--data {data}: no data set there, seen from {os.getcwd()}; go where the data are, "
               f"or make them with prepare.py")
    try:   # Other programs write no meta.json. Their shards hold GPT-2's tokens.
        meta = json.loads(path.read_bytes()) if path.exists() else dict(tokenizer="gpt2")
        return meta | dict(vocab_size=VOCABULARIES[meta["tokenizer"]])
    except (KeyError, TypeError, ValueError):   # It is no JSON, no dict, or names none of these.
        refuse(f"{path}: must name a tokenizer, one of {', '.join(VOCABULARIES)}; correct it, or "
               f"make the data set anew, in another folder")

PIECE, MOST_PIECES = 2**16, 512   # bytes; in a shard

def fingerprint(data):
    """A hash by which a run knows its data again. It sees meta.json, where prepare.py has put the
    sha256 of each shard, so all that prepare.py changes; and of each shard the name, the size, and
    512 pieces of 64 kB, evenly spread. So shards of up to 32 MB are read as a whole. In a larger
    one, what another program changes between the pieces isn't seen."""
    found = hashlib.sha256(json.dumps(load_meta(data), sort_keys=True).encode())
    for path in shard_paths(data):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        n_pieces = min(MOST_PIECES, size // PIECE + 1)
        for begin in np.linspace(0, max(0, size - PIECE), n_pieces).astype(int).tolist():
            found.update(np.fromfile(path, np.uint8, PIECE, offset=begin))
    return found.hexdigest()

# ==================================================================== part 4: windows of a data set

# A window is T + 1 tokens of one shard, in a row: a model reads the first T, and predicts the last
# T. A shard of n tokens has n - T windows. They are numbered, from 0, through all shards.

def open_split(data, split, T=0):
    """The shards of "train" or of "val", in order: those with a window (if T is 0, with a token).
    The split is a word of a shard's name. (festival_train_000000.bin is of train.)"""
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

# ============================================================================== part 5: the puzzle

# `python prepare.py steps` makes a text in which each line follows from the one before, in none,
# one, two or more steps.
#
#     c314159265358     a letter, and digits. c: the next line is two steps after it (a: 0, b: 1)
#     d108515848740     asks for three steps
#     c954006051092
#
# In a step, all digits are replaced at once. By which? That depends on the digit and on its left
# neighbour. (Left of the first digit is a 0.)

ROWS = [[0, 7, 4, 5, 6, 1, 3, 8, 9, 2],   # what 0, 1, .. 9 become after an even digit
        [9, 8, 1, 4, 7, 2, 6, 5, 0, 3]]   # ... and after an odd one

# So 314159265358 becomes 587723131420, and this becomes 108515848740, the second line: it is the
# answer to the first. We know how many steps lead to each digit, and so we see how many steps a
# model has learned. (Each row has each digit once, so nothing is lost. Below one another stand an
# even digit and an odd one: who doesn't know the neighbour can't even tell which it will be.)
#
# The place of a digit in its line is called its cell; the leftmost one is cell 0. A token is a
# character, as its byte, and 256 comes after each document.

# table[left neighbour][digit]: what it becomes; most: the most steps that a line asks for
PUZZLE = dict(table=5 * ROWS, cells=12, most=9)
LINES = 16   # of a document
SPLITS = dict(train=(24_000, 5), val=(1_200, 3))   # how many documents, and a seed of their lines

def next_line(digits, table):
    """One step: digits, a tensor (..., cells) -> the digits after it"""
    left = F.pad(digits[..., :-1], (1, 0))   # of each digit; it begins with a 0
    return torch.as_tensor(table)[left, digits]

def make_documents(puzzle, n, seed):
    """-> n texts. At random are the digits of their first lines, and how many steps each line asks
    for. puzzle: as PUZZLE"""
    rng = np.random.default_rng((0, seed))
    table, most = puzzle["table"], puzzle["most"]
    weights = 0.85 ** np.arange(most + 1)   # Lines that ask for few steps are more frequent.
    asked = torch.from_numpy(rng.choice(most + 1, (n, LINES), p=weights / weights.sum()))
    digits = torch.from_numpy(rng.integers(len(table), size=(n, puzzle["cells"])))
    newline = torch.full((n, 1), ord("\n"))
    parts = []   # from left to right, each of all n documents at once
    for number in range(LINES):
        steps = asked[:, number, None]   # (n, 1)
        parts += [ord("a") + steps, ord("0") + digits, newline]
        for done in range(most):
            # Where fewer steps are asked for, the digits are right already, and stay.
            digits = torch.where(done < steps, next_line(digits, table), digits)
    tokens = torch.cat(parts, 1).to(torch.uint8).numpy()
    return [bytes(document).decode() for document in tokens]

@dataclass
class Steps(DataSource):
    """The puzzle, which meta.json has, too: analyze.py reads it there."""
    tokenizers = ("bytes",)
    about = dict(steps=PUZZLE)

    def texts(self, out):
        return [make_documents(self.about["steps"], n, seed) for n, seed in SPLITS.values()]

# ============================================================================= part 6: the command

SOURCES = dict(steps=Steps, stdlib=Stdlib, shakespeare=Shakespeare, fineweb=Fineweb, text=Text)

@dataclass
class PrepareConfig:
    name: Literal[tuple(SOURCES)] = flag("", "which data set")
    out: str = flag("", "folder of the shards; without it data/NAME")
    overwrite: bool = flag(False, "replace the data set in --out, if prepare.py has made it")
    tokenizer: Literal["auto", "bytes", "gpt2"] = flag("auto", "auto: gpt2 for fineweb, else bytes")

def read_configs(argv):
    """Command line -> PrepareConfig, and the source that it names, with its flags"""
    for source in SOURCES.values():
        if not (is_dataclass(source) and issubclass(source, DataSource)):
            raise Mistake(f"{source.__name__} must be a @dataclass, derived from DataSource")
    typed = read_command_line([PrepareConfig, *SOURCES.values()], argv, __doc__, ("name",))
    for owner, source in SOURCES.items():
        for field in fields(source):
            if field.name in typed and owner != typed["name"]:
                refuse(f"--{field.name}: is for {owner} only; leave it out")
    config, source = make_configs([PrepareConfig, SOURCES[typed["name"]]], typed)
    if config.tokenizer not in ("auto", *source.tokenizers):
        refuse(f"--tokenizer {config.tokenizer}: {config.name} has other tokens; leave it out")
    return config, source

def refuse_if_taken(out, meta, overwrite):
    """SystemExit if the folder holds a run, or a data set that differs from meta and has to stay.
    (write_data_set sees whether the tokens differ, too.)"""
    if (out / "ckpt.pt").exists():
        refuse(f"--out {out}: is a run of train.py; choose another folder")
    if (out / "meta.json").exists() or shard_paths(out):
        there = load_meta(out)
        differ = [key for key in meta if there.get(key) != meta[key]]
        made_here = [name for name in SOURCES if name != "fineweb"]   # That took long to download.
        may_go = meta["name"] in made_here and there.get("name") in made_here
        if differ and not (may_go and overwrite):
            refuse(f"--out {out}: holds another data set, which differs in {' and '.join(differ)}; "
                   f"choose another folder" + (", or say --overwrite" if may_go else ""))

def main(argv=None):
    config, source = read_configs(argv)
    tokenizer = source.tokenizers[0] if config.tokenizer == "auto" else config.tokenizer
    meta = dict(name=config.name, tokenizer=tokenizer) | source.about
    out = Path(config.out or f"data/{config.name}")
    with locked(out):   # So no other prepare.py makes a data set there meanwhile.
        refuse_if_taken(out, meta, config.overwrite)
        source.write(out, meta, config.overwrite)
    n_train, n_val = (sum(map(len, open_split(out, split))) for split in ("train", "val"))
    print(f"{n_train:,} train and {n_val:,} val tokens ({tokenizer}); next: "
          f"python train.py --data {shlex.quote(str(out))}")

if __name__ == "__main__":
    start(main)   # It makes sentences of errors that you can mend, such as a full disk.
