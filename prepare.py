"""
Makes a data set of text: a folder of shards, files of tokens. (train.py reads it by this file.)

    python prepare.py steps                    # a puzzle of many steps; seconds, no network
    python prepare.py stdlib                   # the source of Python's own library; no network
    python prepare.py shakespeare              # tiny-shakespeare, 1 MB
    python prepare.py fineweb --shards 10      # GPT-2 tokens of web text, 100M (200 MB) per shard
    python prepare.py text --input PATH...     # your own files and folders; they must fit in memory

Your own files have to be UTF-8 text. Each file is a document, whatever separators it holds. (With
--jsonl FIELD, each line is one: a JSON object with that field.) One in 20 documents is for
validation; of a long one, the last 5 %.
"""
# Each part of this file, and each function, uses only what stands above it:
#
#     1  tokens     A text (a document, read as one whole) becomes numbers below 2**16.
#     2  shards     The tokens of all texts, one after the other, stand in files of a folder.
#     3  windows    T + 1 tokens from anywhere in the shards are what a model sees. train.py comes
#                   in here.
#     4  sources    say which texts there are, for training and for validation.
#     5  a puzzle   is one of them.
#     6  the command makes 2 out of 4.
import contextlib
import dataclasses
import fcntl
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

from flags import flag, make_configs, read_command_line, refuse, start

# ===================================================================== part 1: from texts to tokens

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

# ======================================================== part 2: a data set, a folder with shards

#     meta.json           {"name": "stdlib", "tokenizer": "bytes"}
#     train_000000.bin    a shard for training: there may be more with a word `train` in the name
#     val_000000.bin      a shard for validation, too
#
# Such folders are also made by llm.c and modded-nanogpt, without meta.json. A shard is as llm.c has
# it: 256 int32 (magic, version, number of tokens, zeros), then the tokens as uint16.

MAGIC, VERSION, HEADER = 20240520, 1, 256 * 4   # HEADER: its bytes
MOST_TOKENS = 2**30   # in a shard of ours; an int32 counts to nearly 2**31

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

def shard_paths(data):
    return sorted(Path(data).glob("*.bin"))

def load_meta(data):
    """-> what meta.json says of a data set, and the size of its vocabulary: dict(name=, tokenizer=,
    vocab_size=). The steps text has steps=, too, the puzzle. SystemExit if none is there"""
    path = Path(data, "meta.json")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if not shard_paths(data):
            refuse(f"--data {data}: no data set there, seen from {os.getcwd()}; go where the data "
                   f"are, or make them with prepare.py")
        # Other programs write no meta.json. These shards hold GPT-2's tokens.
        name = "fineweb" if any(Path(data).glob("fineweb_*.bin")) else "llm.c"
        meta = dict(name=name, tokenizer="gpt2")
    except ValueError:   # It is no JSON, or no text.
        meta = None
    if not isinstance(meta, dict) or meta.get("tokenizer") not in list(VOCABULARIES):
        refuse(f"{path}: must name a tokenizer, one of {', '.join(VOCABULARIES)}; correct it, or "
               f"make the data set anew, in another folder")
    return meta | dict(vocab_size=VOCABULARIES[meta["tokenizer"]])

def fingerprint(data, content=True):
    """A hash of meta.json, of the shards' names and sizes, and of some of their content. A resumed
    run wants the same. content=False: the fourth edition's, which looks at no content"""
    sizes = [(path.name, path.stat().st_size) for path in shard_paths(data)]
    found = hashlib.sha256(json.dumps([load_meta(data), sizes], sort_keys=True).encode())
    for name, size in sizes if content else []:
        for begin in 0, size // 2, max(0, size - 2**16):   # 64 kB each
            found.update(np.fromfile(Path(data, name), np.uint8, 2**16, offset=begin))
    return found.hexdigest()

# -------------------------------------------------- how files are written; train.py does so, too

UNFINISHED = ".unfinished-"   # So begin the names of folders with files that aren't whole yet.

@contextlib.contextmanager
def whole_file(path):
    """with whole_file(path) as file: a new file, open to write bytes. Only when all is written and
    on the disk, it takes the place of an older one. So a kill or a full disk leaves that as it was.
    SystemExit if it can't be written"""
    path = Path(path)
    try:
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=path.parent) as unfinished:
            new = Path(unfinished, path.name)
            with open(new, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
    except (OSError, RuntimeError) as error:
        # torch.save meets an OSError, such as that of a full disk, and then says RuntimeError.
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        refuse(f"{path}: can't be written ({reason}); make room, or take another --out")

@contextlib.contextmanager
def locked(folder):
    """with locked(folder): no other process is in such a with-block for the same folder. SystemExit
    if one is there now. If the folder isn't there, it is made; if it stays empty, it goes again."""
    real = Path(os.path.realpath(folder))   # It may be a link.
    if real.is_file():
        refuse(f"--out {folder}: is a file; name a folder")
    made = [each for each in (real, *real.parents) if not each.exists()]
    real.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(real, os.O_RDONLY)
    try:   # The system unlocks it when this process ends, however it ends.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        refuse(f"--out {folder}: another process is writing there; wait for it, or take another "
               f"--out")
    except OSError:   # Some network disks have no locks. There, don't use two terminals.
        pass
    try:
        for unfinished in real.glob(UNFINISHED + "*"):   # of a process that was killed
            shutil.rmtree(unfinished, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):   # One isn't empty.
            for each in made:
                each.rmdir()

def write_meta(folder, meta):
    with whole_file(Path(folder, "meta.json")) as file:
        file.write(json.dumps(meta).encode())

def write_shard(path, tokens):
    """tokens: a sequence of numbers below 2**16"""
    with whole_file(path) as file:
        file.write(np.array([MAGIC, VERSION, len(tokens)] + 253 * [0], "<i4"))
        file.write(np.asarray(tokens, "<u2"))

def write_data_set(out, meta, train, val):
    """Two sequences of tokens -> a data set in the folder `out`, in place of an older one"""
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=out) as unfinished:
        write_meta(unfinished, meta)
        for split, tokens in dict(train=train, val=val).items():
            for i, begin in enumerate(range(0, len(tokens), MOST_TOKENS)):
                path = Path(unfinished, f"{split}_{i:06}.bin")
                write_shard(path, tokens[begin:begin + MOST_TOKENS])
        # All is whole, so the old files can go. Who is stopped from here on, or reads meanwhile,
        # finds no validation shard, and open_split says so: the new one comes last.
        for old in [*out.glob("val_??????.bin"), *out.glob("train_??????.bin")]:
            old.unlink()
        for new in sorted(Path(unfinished).iterdir()):   # meta.json, train_000000.bin, ..
            os.replace(new, out / new.name)

# ==================================================================== part 3: windows of a data set

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

# ================================================================== part 4: where texts come from

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
# Add songs=Songs to SOURCES (part 6), and type: python prepare.py songs --songs FILE. (Each flag
# needs a name that no other source has for one of its own.) A source may also have problems(), as
# Text has, below.

class DataSource:
    """What every source has. (out, in its methods: the folder of the data set)"""
    # These are no flags: a dataclass's fields are those names that have a type behind them.
    tokenizers = "bytes", "gpt2"   # those it can have; the first one is the usual one
    about = {}                     # what meta.json says of it, besides its name and its tokenizer

    def write(self, out, meta):
        """Makes the data set. meta: what meta.json says, a dict"""
        train, val = (encode(texts, meta["tokenizer"]) for texts in self.texts(out))
        if not train or not val:
            refuse(f"{meta['name']}: needs a text to train on, and another one to validate with")
        write_data_set(out, meta, train, val)

# ------------------------------------------------------------------------------------- what text is

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
        refuse(f"{path}: is empty, or not UTF-8 text; convert it, as by iconv -f ENCODING -t "
               f"UTF-8, or name another")
    return None

def text_or_file(value):
    """For flags of sample.py and analyze.py that are a text, or the name of a file with one"""
    return read_text(value) if os.path.isfile(value) else value

def cut(text, share):
    """A text -> two. The second has about this share of it, and begins a line if it can."""
    place = int(len(text) * (1 - share))
    newline = text.rfind("\n", place - len(text) // 100, place)   # at most 1 % earlier
    if newline >= 0:
        place = newline + 1
    return text[:place], text[place:]

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
                # 5 % are for validation. The hash of its name, a number below 2**256, decides: so
                # a file stays on its side when others come or go.
                name_hash = int(hashlib.sha256(bytes(below_root)).hexdigest(), 16)
                texts = val if name_hash < 0.05 * 2**256 else train
                texts.append(read_text(path))
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

    def write(self, out, meta):
        numbered = [f"fineweb_train_{number:06d}.bin" for number in range(1, self.shards + 1)]
        for name in ["fineweb_val_000000.bin", *numbered]:
            if not (out / name).exists():   # What an earlier run has downloaded stays.
                with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=out) as unfinished:
                    path = Path(unfinished, name)
                    download(FINEWEB_URL + name, path)
                    read_shard(path)   # SystemExit if the download is cut short
                    os.replace(path, out / name)
        write_meta(out, meta)
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
        except (ValueError, KeyError, TypeError):   # no JSON, no such field, no object
            document = None
        if not isinstance(document, str):
            refuse(f"{path}, line {number}: is no JSON object with text in a field {field!r}")
        if document:
            yield document

def hold_out(documents):
    """Texts -> texts for training, texts for validation. A text is long if it has more than 1,000
    characters, and more than 5 % of all. Of a long one the last 5 % are held out; of the short ones
    every 20th, as a whole: the end of a short one may be what matters."""
    limit = max(1000, sum(map(len, documents)) / 20)
    short = [text for text in documents if len(text) <= limit]
    long = [cut(text, 0.05) for text in documents if len(text) > limit]
    val = short[::20]
    train = [text for number, text in enumerate(short) if number % 20 != 0]
    if not train and not long:
        refuse("--input: has too little text (the folder of --out isn't read); name several "
               "documents, or one of more than 1,000 characters")
    print(f"documents: {len(train):,} for training, {len(val):,} for validation, {len(long):,} cut "
          f"at 95 % for both")
    return train + [head for head, tail in long], val + [tail for head, tail in long]

@dataclass
class Text(DataSource):
    """Your own files and folders. A file is a document, or with --jsonl each line of it."""
    input: list = flag(None, "UTF-8 files, and folders of them", group="text only")
    jsonl: str = flag("", "lines are JSON objects, and this field of theirs is the text")

    def problems(self):
        """-> sentences with which the command line is refused"""
        if not self.input:
            yield "text: needs files or folders; name them with --input"
        for path in self.input or []:
            if not os.path.isfile(path) and not os.path.isdir(path):
                yield f"--input {shlex.quote(path)}: no such file or folder"
            elif path.endswith(".jsonl") and not self.jsonl:
                yield f"--input {path}: which field of its lines is the text? say --jsonl FIELD"

    def texts(self, out):
        documents, passed_over = [], []
        seen = {os.path.realpath(out)}   # The data set's own folder may be in one of yours.
        for named in map(Path, self.input):
            for file in files_in(named, seen):
                # A file that is named must be text. In a folder may be pictures, too.
                text = read_text(file, must_be_text=file == named)
                if text is None:
                    passed_over.append(file)
                elif self.jsonl:
                    documents.extend(json_lines(file, text, self.jsonl))
                else:
                    documents.append(text)
        if passed_over:
            print(f"files passed over: {len(passed_over):,}, empty or not UTF-8 text, such as "
                  f"{passed_over[0]}")
        return hold_out(documents)

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
#
#     this digit                0 1 2 3 4 5 6 7 8 9
#     after an even one         0 7 4 5 6 1 3 8 9 2
#     after an odd one          9 8 1 4 7 2 6 5 0 3
#
# So 314159265358 becomes 587723131420, and this becomes 108515848740, the second line: it is the
# answer to the first. We know how many steps lead to each digit, and so we see how many steps a
# model has learned.
#
# The place of a digit in its line is called its cell. The leftmost one is cell 0. A token is one
# character, and its number is that of the byte; 256 comes after each document.

def next_line(digits, table):
    """One step: digits, a tensor (..., cells) -> the digits after it"""
    left = F.pad(digits[..., :-1], (1, 0))   # of each digit; it begins with a 0
    return torch.as_tensor(table)[left, digits]

def make_table(symbols, rows, rng):
    """-> table[left neighbour][digit], an array (symbols, symbols): what the digit becomes. Of the
    neighbour only the class counts, left % rows. With two rows: whether it is even or odd.

    A row holds each digit once, so nothing is lost. No two rows send a digit to the same class: 3
    becomes 5 or 4. So who doesn't know the neighbour can't even tell odd from even."""
    # To which class does each digit go in the first row? With two rows, half of them become even.
    class_in_first_row = rng.permutation(np.repeat(np.arange(rows), symbols // rows))
    different_rows = np.zeros((rows, symbols), int)
    for row in range(rows):
        class_of_next = (class_in_first_row + row) % rows
        for each_class in range(rows):
            members = np.arange(each_class, symbols, rows)   # such as 0 2 4 6 8
            different_rows[row, class_of_next == each_class] = rng.permutation(members)
    return different_rows[np.arange(symbols) % rows]   # a row for each left neighbour

LINES = 16   # of a document

def make_documents(puzzle, n, rng):
    """-> n texts. At random are the digits of their first lines, and how many steps each line asks
    for. puzzle: dict(table=, cells=, most=), where most is the most steps that are asked for"""
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

SPLITS = dict(train=(24_000, 5), val=(1_200, 3))   # how many documents, and a seed of their lines

@dataclass
class Steps(DataSource):
    """The puzzle, whose meta.json has its table of a step, its cells, and the most steps"""
    symbols: int = flag(10, "different digits", low=2, high=10, group="steps only")
    rows: int = flag(2, "different rows of the table; has to divide symbols", low=2, high=10)
    cells: int = flag(12, "digits in a line", low=2, high=100)
    most: int = flag(9, "the most steps that a line asks for", low=1, high=25)
    table_seed: int = flag(0, "of the table's random numbers", low=0, high=1e9)
    tokenizers = ("bytes",)

    def problems(self):
        if self.symbols % self.rows:
            yield f"--rows {self.rows}: must divide --symbols {self.symbols}; take {self.symbols}"

    @property
    def about(self):
        table = make_table(self.symbols, self.rows, np.random.default_rng(self.table_seed))
        return dict(steps=dict(table=table.tolist(), cells=self.cells, most=self.most))

    def texts(self, out):
        found = []
        for n, seed in SPLITS.values():   # Another table has other documents, too.
            rng = np.random.default_rng((self.table_seed, seed))
            found.append(make_documents(self.about["steps"], n, rng))
        return found

# ============================================================================= part 6: the command

SOURCES = dict(steps=Steps, stdlib=Stdlib, shakespeare=Shakespeare, fineweb=Fineweb, text=Text)

@dataclass
class PrepareConfig:
    name: Literal[tuple(SOURCES)] = flag("", "which data set")
    out: str = flag("", "folder of the shards; without it data/NAME")
    tokenizer: Literal["auto", "bytes", "gpt2"] = flag("auto", "auto: gpt2 for fineweb, else bytes")

def read_configs(argv):
    """Command line -> PrepareConfig, and the source that it names, with its flags"""
    typed = read_command_line([PrepareConfig, *SOURCES.values()], argv, __doc__, ("name",))
    for owner, source in SOURCES.items():
        for field in dataclasses.fields(source):
            if field.name in typed and owner != typed["name"]:
                refuse(f"--{field.name}: is for {owner} only; leave it out")
    config, source = make_configs([PrepareConfig, SOURCES[typed["name"]]], typed)
    if config.tokenizer not in ("auto", *source.tokenizers):
        refuse(f"--tokenizer {config.tokenizer}: {config.name} has other tokens; leave it out")
    return config, source

def refuse_if_taken(out, meta):
    """SystemExit if the folder holds a run, or another data set than that of meta. (The same one
    may come anew, and your own text, too, after you have edited it.)"""
    if (out / "ckpt.pt").exists():
        refuse(f"--out {out}: is a run of train.py; choose another folder")
    if (out / "meta.json").exists() or shard_paths(out):
        there = load_meta(out)
        differ = [key for key in meta if there.get(key) != meta[key]]
        if differ:
            refuse(f"--out {out}: holds another data set, which differs in {' and '.join(differ)}; "
                   f"choose another folder")

def main(argv=None):
    config, source = read_configs(argv)
    tokenizer = source.tokenizers[0] if config.tokenizer == "auto" else config.tokenizer
    meta = dict(name=config.name, tokenizer=tokenizer) | source.about
    out = Path(config.out or f"data/{config.name}")
    with locked(out):   # So no other prepare.py makes a data set there meanwhile.
        refuse_if_taken(out, meta)
        source.write(out, meta)
    n_train, n_val = (sum(map(len, open_split(out, split))) for split in ("train", "val"))
    print(f"{n_train:,} train and {n_val:,} val tokens ({tokenizer}); next: "
          f"python train.py --data {shlex.quote(str(out))}")

if __name__ == "__main__":
    start(main)   # It makes sentences of errors that you can mend, such as a full disk.
