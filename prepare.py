"""
Data sets to token shards, one command each. First comes what the other scripts read, then how it is made.

    python prepare.py steps                             # lines whose depth is known; seconds, no network
    python prepare.py stdlib                            # the Python standard library's own source; no network
    python prepare.py shakespeare                       # tiny-shakespeare, 1 MB
    python prepare.py fineweb --shards 10               # GPT-2 tokens of web text, 100M (200 MB) per shard
    python prepare.py text --input FILE_OR_FOLDER...    # your own; each file has to fit into memory
"""
import fcntl, hashlib, http.client, json, os, re, shutil, socket, sys, sysconfig, tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tiktoken
import torch

from flags import flag, parse, refuse, say, start
from runs import VOCABULARIES, read_json

# A shard is what llm.c reads: a header of 256 int32 (magic, version, number of tokens), then uint16 tokens.
MAGIC, VERSION, HEADER = 20240520, 1, 256 * 4
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
FINEWEB_URL = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/"
OUR_FILE = re.compile(r"(fineweb_)?(train|val)_\d{6}\.bin|meta\.json|input\.txt")

# ------------------------------------------------------------------ what train, sample and analyze read

def read_windows(shards, starts, T):
    """Windows of T + 1 tokens at the given global positions -> x, y (n, T) int64. None crosses two shards."""
    first = np.cumsum([0] + [len(shard) - T for shard in shards])  # place of each shard's first window
    which = np.searchsorted(first, starts, side="right") - 1
    rows = [shards[i][start - first[i]:start - first[i] + T + 1] for i, start in zip(which, starts)]
    rows = torch.from_numpy(np.stack(rows).astype(np.int64))
    return rows[:, :-1], rows[:, 1:]

def val_windows(data, T, n):
    """n validation windows, evenly spread -> x, y (n, T). SystemExit if a token is not in the vocabulary."""
    vocab_size, shards = load_meta(data)["vocab_size"], open_split(data, "val", T)
    starts = np.linspace(0, sum(len(shard) - T for shard in shards) - 1, n).astype(int)
    x, y = read_windows(shards, starts, T)
    if (largest := max(x.max(), y.max())) >= vocab_size:
        refuse(f"--data {data}: token {largest} is not below {vocab_size}; remove and remake it")
    return x, y

def open_split(data, split, T=0):
    """The shards of a split ("train" or "val") in order, as read_shard has them, if longer than T."""
    paths = sorted(Path(data).glob(f"*{split}*.bin"))
    shards = [shard for shard in map(read_shard, paths) if len(shard) > T]
    if not shards:
        refuse(f"--data {data}: no {split} shard is longer than --block_size {T}; lower that")
    return shards

def read_shard(path):
    """A shard's tokens, (n,) uint16, as a np.memmap: nothing is read until it is indexed. Or SystemExit."""
    n = (os.path.getsize(path) - HEADER) / 2 if os.path.isfile(path) else 0   # A pipe would make us wait.
    header = np.fromfile(path, "<i4", 256) if n > 0 else np.zeros(3)
    if n < 1 or header[:3].tolist() != [MAGIC, VERSION, n]:
        refuse(f"{path}: is not a whole token shard; delete it and run prepare.py again")
    return np.memmap(path, "<u2", mode="r", offset=HEADER, shape=(int(n),))

def load_meta(data):
    """What meta.json says about a folder of shards: name, tokenizer and vocab_size. Or SystemExit."""
    path = Path(data) / "meta.json"
    if not path.exists() and any(path.parent.glob("fineweb_*.bin")):  # modded-nanogpt's, or not complete yet
        return dict(name="fineweb", tokenizer="gpt2", vocab_size=50257)
    try:
        meta = read_json(path) if path.is_file() else None
        known = meta["vocab_size"] == VOCABULARIES[meta["tokenizer"]]
        if known and ("steps" not in meta or is_steps(**meta["steps"])):
            return meta
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    refuse(f"--data {data}: no good meta.json there; name a folder that prepare.py has made")

def is_steps(table, cells, most):
    """Is this what a steps text says about itself in meta.json?"""
    n = len(table)
    right = all(sorted(row) == [*range(n)] for row in table) and type(cells) is type(most) is int
    return right and 2 <= n <= 10 and cells in range(2, 101) and most in range(1, 26)

def fingerprint(data, meta):
    """A hash of meta.json, and of names and sizes of the shards. A run that is resumed wants the
    same."""
    shards = sorted((path.name, path.stat().st_size) for path in Path(data).glob("*.bin"))
    return hashlib.sha256(json.dumps([meta, shards], sort_keys=True).encode()).hexdigest()

def token_bytes(meta, vocab_size):
    """How many bytes of text each token stands for: (vocab_size,) int64; end-of-text and padding 0."""
    tokenizer = get_tokenizer(meta["tokenizer"])
    sizes = torch.zeros(vocab_size, dtype=torch.long)
    for token in set(range(tokenizer.n_vocab)) - {tokenizer.eot_token}:
        sizes[token] = len(tokenizer.decode_single_token_bytes(token))
    return sizes

def get_tokenizer(name):
    """The tiktoken.Encoding "bytes" (the 256 bytes and <|endoftext|> = 256) or "gpt2" (50257 tokens)."""
    if name == "bytes":  # id == byte value and nothing merges; the pattern only sets how much goes at a time
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,64}", explicit_n_vocab=257,
                                 mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={"<|endoftext|>": 256})
    try:
        return tiktoken.get_encoding(name)
    except Exception as e:  # whatever requests, ssl or tiktoken's own hash check raise
        refuse(f"--tokenizer {name}: no table of it ({type(e).__name__}); go online once, or set "
                         "TIKTOKEN_CACHE_DIR to a folder that has it, or use --tokenizer bytes")

# ------------------------------------------------------------------ the steps text: depth that is known

def next_line(cells, table):
    """One step of the steps text: cells (..., n) of numbers -> (..., n). Each cell becomes
    table[its left neighbour][itself], all at once. Left of the first cell is a 0."""
    cells = np.asarray(cells)
    left = np.concatenate((np.zeros_like(cells[..., :1]), cells[..., :-1]), axis=-1)
    return np.asarray(table)[left, cells]

def steps_asked(tokens, n_cells):
    """How deep each target of the steps text is. tokens (n, T + 1), a window with its last target ->

    steps (n, T): how many steps lead to this cell, as the letter of the line before says; -1 where nobody can
    know, because it is no cell, or the line before it is not in the window
    cell (n, T): its place in the line, 0 is the leftmost; only of use where steps is known"""
    place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    is_letter = (tokens >= ord("a")) & (tokens <= ord("z"))
    letter = torch.where(is_letter, place, -1).cummax(dim=1).values   # where the own line begins
    cell = place - letter - 1
    before = letter - (n_cells + 2)                                   # where the line before it begins
    # Between two documents stands an end-of-text, and no newline.
    follows = (before >= 0) & (tokens.gather(1, (letter - 1).clamp_min(0)) == ord("\n"))
    asked = tokens.gather(1, before.clamp_min(0)) - ord("a")
    known = follows & (cell >= 0) & (cell < n_cells)
    return torch.where(known, asked, -1)[:, 1:], cell[:, 1:]

# ------------------------------------------------------------------ text -> tokens -> shards

def tokenize(path, share, split, tokenizer):
    """Yields lists of tokens of a UTF-8 file, then end-of-text. The last `share` of it is for validation."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        refuse(f"{path}: is not UTF-8 text; convert it (iconv -t UTF-8) or leave it out")
    cut = int(len(text) * (1 - share))
    if 0 < share < 1:  # after a newline, if one is near
        cut = text.rfind("\n", cut - len(text) // 100, cut) + 1 or cut
    text = text[:cut] if split == "train" else text[cut:]
    # No GPT-2 token goes on from a letter to a space. Cut there, the tokens are those of the whole text.
    for piece in re.finditer(r"(?s).{1,200000}((?<=\S)(?=\s)|\Z)|.{1,200000}", text):
        # Not encode: a literal "<|endoftext|>" in somebody's text is text, not the special token.
        yield tokenizer.encode_ordinary(piece[0])
    if text:
        yield [tokenizer.eot_token]

def write_text(config, new, files):
    """{path: share for validation} -> shards, see write_shards."""
    tokenizer = get_tokenizer(config.tokenizer)
    def pieces(split):
        for path, share in files.items():
            yield from tokenize(path, share, split, tokenizer)
    write_shards(config, new, pieces)

def write_shards(config, new, pieces):
    """pieces(split) yields lists of tokens -> shards in the folder `new`, which then takes the place of --out."""
    for split in ("train", "val"):
        with open(new / f"{split}_000000.bin", "wb") as shard:
            shard.write(bytes(HEADER))
            for tokens in pieces(split):
                shard.write(np.array(tokens, "<u2").tobytes())
            n = (shard.tell() - HEADER) // 2
            if n == 0:
                refuse(f"--input: has too little text for a {split} split; name more files")
            shard.seek(0)  # the number is known only now
            shard.write(np.array([MAGIC, VERSION, n] + 253 * [0], "<i4").tobytes())
            shard.flush()
            os.fsync(shard.fileno())
    if config.out.exists():
        config.out.rename(new.parent / "old")
    new.rename(config.out)

# ------------------------------------------------------------------ the five data sets

LINES = 16   # of a document of the steps text
DOCUMENTS = dict(train=24_000, val=1_200)

def steps(config, new):
    """Lines such as c2031133021: a letter (a: 0, b: 1, c: 2 ...) and cells. The next line has the same cells,
    so many steps later; see next_line. So the depth that a cell needs is known."""
    table = make_table(config.symbols, config.rows, np.random.default_rng(config.table))
    meta = json.loads((new / "meta.json").read_text())
    meta["steps"] = dict(table=table.tolist(), cells=config.cells, most=config.most)
    (new / "meta.json").write_text(json.dumps(meta))

    def pieces(split):
        rng, n = np.random.default_rng((config.table, len(split))), DOCUMENTS[split]
        share = 0.85 ** np.arange(config.most + 1)   # Few steps are asked for more often: they teach the many.
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
    """-> table (symbols, symbols): what a cell becomes, by its left neighbour and itself. Of the left neighbour
    only the class counts, left % rows: with two rows, whether it is even or odd.

    Each row holds each symbol once, so nothing is lost in a step. Two rows send a symbol to two classes: so
    nobody who does not know the left neighbour knows the class after a step."""
    size = symbols // rows
    in_row_0 = rng.permutation(np.repeat(np.arange(rows), size))   # the class to which row 0 sends each symbol
    table = np.zeros((rows, symbols), int)
    for row in range(rows):
        for to in range(rows):
            table[row, (in_row_0 + row) % rows == to] = to + rows * rng.permutation(size)
    return table[np.arange(symbols) % rows]

def stdlib(config, new):
    """The standard library of the Python that runs this: code of one style, on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.py") if path.stat().st_size]
    names = sorted(name for name in names if skip.isdisjoint(name.split("/")))
    # 5 % of the files are for validation. By hash, so that a file stays there when others come or go.
    rank = {name: int(hashlib.sha256(os.fsencode(name)).hexdigest()[:16], 16) / 2**64 for name in names}
    write_text(config, new, {root / name: float(rank[name] < 0.05) for name in names})

def shakespeare(config, new):
    """Tiny-shakespeare; the last tenth is held out, as in nanoGPT."""
    download(SHAKESPEARE_URL, new / "input.txt", SHAKESPEARE_SHA256)
    write_text(config, new, {new / "input.txt": 0.1})

def text(config, new):
    """Your own UTF-8 files, and all in your folders. Each is one document; its last 5 % are held out."""
    seen = {str(config.out)}  # our own output is not input
    write_text(config, new, {file: 0.05 for path in config.input for file in files_in(path, seen)})

def files_in(path, seen):
    """The files at or below a path, no hidden ones, no caches. Links are followed; nothing comes twice."""
    if os.path.realpath(path) in seen:
        return []
    seen.add(os.path.realpath(path))
    if path.is_file():
        return [path]
    visible = [child for child in path.iterdir() if child.name[0] != "." and child.name != "__pycache__"]
    return [file for child in sorted(visible) for file in files_in(child, seen)]

def fineweb(config, new):
    """Ready GPT-2 shards, on which modded-nanogpt trains: one of validation, the first N of training."""
    config.out.mkdir(exist_ok=True)
    for name in ["val_000000"] + [f"train_{i + 1:06d}" for i in range(config.shards)]:
        shard = config.out / f"fineweb_{name}.bin"
        if not shard.exists():  # what an earlier run has downloaded stays
            download(FINEWEB_URL + shard.name, new / shard.name)
            read_shard(new / shard.name)
            os.replace(new / shard.name, shard)
    os.replace(new / "meta.json", config.out / "meta.json")
    say("NOT CHECKED: the sha256 of these shards, as none is pinned. Header and length of each are right.")

def download(url, path, sha256=None):
    """SystemExit, and nothing at path, if the network or the disk fails or the sha256 is wrong."""
    socket.setdefaulttimeout(60)
    try:
        torch.hub.download_url_to_file(url, str(path), sha256, progress=sys.stderr.isatty())
    except (OSError, http.client.HTTPException, RuntimeError) as e:
        refuse(f"cannot download {url} ({e}); check network and disk, then type the command again")

DATA_SETS = dict(steps=steps, stdlib=stdlib, shakespeare=shakespeare, fineweb=fineweb, text=text)

# ------------------------------------------------------------------ main

OWN_FLAGS = dict(text="input", fineweb="shards", steps="symbols rows cells most table")   # what is only for one

@dataclass
class PrepareConfig:
    name: Literal["steps", "stdlib", "shakespeare", "fineweb", "text"] = flag("", "which data set")
    out: str = flag("", "folder of the shards; without it data/NAME")
    tokenizer: Literal["bytes", "gpt2"] = flag("bytes", "steps has bytes only, fineweb has gpt2 only")
    input: list = flag(None, "of text: UTF-8 files, and folders of them")
    shards: int = flag(1, "of fineweb: how many of them, 100M tokens each", 1, 103)
    symbols: int = flag(10, "different digits", 2, 10, group="the steps text")
    rows: int = flag(2, "different rows of the table; has to divide symbols", 2, 10)
    cells: int = flag(12, "digits in a line", 2, 100)
    most: int = flag(9, "the most steps that a line asks for", 1, 25)
    table: int = flag(0, "seed of the table", 0, 1e9)

    def problems(self):
        wrong_tokens = {"steps": "gpt2", "fineweb": "bytes"}.get(self.name) == self.tokenizer
        missing = [path for path in self.input or [] if not os.path.exists(path)]
        foreign = [(getattr(self, name) != getattr(PrepareConfig, name), f"--{name}: is for {owner} only; leave it out")
                   for owner, names in OWN_FLAGS.items() if owner != self.name for name in names.split()]
        rules = foreign + [
            (self.symbols % self.rows, f"--rows {self.rows}: must divide --symbols {self.symbols}; "
                                       f"use --rows {self.symbols}"),
            (wrong_tokens, f"--tokenizer {self.tokenizer}: {self.name} comes with other tokens; leave this flag out"),
            (Path.cwd().is_relative_to(os.path.realpath(self.out or "data")),
             f"--out {self.out}: is where you are; name a folder of its own"),
            (self.name == "text" and not self.input, "text: needs files or folders; name them with --input"),
            (missing, f"--input {missing}: no such file or folder; name those that are there")]
        return [sentence for wrong, sentence in rules if wrong]

def main(argv=None):
    config, = parse((PrepareConfig,), argv, __doc__, positional=("name",),
                    defaults=lambda given: dict(tokenizer="gpt2") if given["name"] == "fineweb" else {})
    out = config.out or f"data/{config.name}"
    config.out = Path(os.path.realpath(out))   # A link stands for the folder that it names.
    config.input = [Path(path) for path in config.input or []]
    meta = dict(name=config.name, tokenizer=config.tokenizer, vocab_size=VOCABULARIES[config.tokenizer])
    try:
        refuse_if_taken(config.out, out, meta)
        make(config, meta)
    except BlockingIOError:
        refuse(f"--out {out}: another prepare.py is writing there; wait for it, or name another folder")
    except (KeyboardInterrupt, OSError, OverflowError, RecursionError) as error:
        refuse(f"--out {out}: not written ({str(error) or 'interrupted'}); mend that, then type it again")
    train, val = (sum(map(len, open_split(out, split))) for split in ("train", "val"))
    say(f"{train:,} train and {val:,} val tokens ({config.tokenizer}); next: python train.py --data {out}")

def refuse_if_taken(folder, out, meta):
    """SystemExit if the folder holds anything else than this data set. out: its name, as typed"""
    for name in os.listdir(folder) if folder.exists() else []:
        if not OUR_FILE.fullmatch(name) or not meta.items() <= load_meta(folder).items():
            refuse(f"--out {out}: its {name!r} is of another data set; choose another folder")

def make(config, meta):
    """Makes the data set in a temporary folder beside --out. Its lock ends with this process, however that ends."""
    temporary = config.out.parent / f".{config.out.name}.tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    fcntl.flock(os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW), fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        new = Path(tempfile.mkdtemp(dir=temporary), "new")
        new.mkdir()
        (new / "meta.json").write_text(json.dumps(meta))
        DATA_SETS[config.name](config, new)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)   # also what killed runs have left there

if __name__ == "__main__":
    start(main)
