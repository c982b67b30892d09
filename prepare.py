"""Data sets to token shards, one command each. A shard is what llm.c and modded-nanogpt read: a header of
256 int32 (magic, version, token count), then uint16 tokens. meta.json beside them names the tokenizer.

    python prepare.py stdlib                         # the Python standard library's own source; no network
    python prepare.py shakespeare                    # tiny-shakespeare, 1 MB
    python prepare.py fineweb --shards 10            # GPT-2 tokens of web text, 100M (200 MB) per shard
    python prepare.py text --input FILE_OR_FOLDER... # your own     [--tokenizer bytes|gpt2] [--out data/NAME]
"""
import argparse, codecs, errno, hashlib, http.client, json, os, re, sys, sysconfig, tempfile, time
import urllib.error, urllib.request
from pathlib import Path
import numpy as np
import tiktoken

MAGIC, VERSION, HEADER = 20240520, 1, 256 * 4  # the header is 256 int32, little-endian like the tokens
SHARD_TOKENS = 100_000_000                     # tokens per shard: 200 MB, as fineweb's have
CHUNK = 1 << 18                                # bytes of text handled at once, however large the corpus
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SIZE = 1115394
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
FINEWEB_URL = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

def fail(sentence):
    """Every expected failure ends here: one sentence on stderr, exit status 1, no traceback."""
    raise SystemExit(f"prepare.py: {sentence}")

# ------------------------------------------------------------------ what train, sample and analyze import

def get_tokenizer(name):
    """The tiktoken.Encoding for "bytes" (the 256 bytes and <|endoftext|> = 256) or "gpt2" (50257 tokens)."""
    if name == "bytes":  # id == byte value and nothing merges; the pattern only sets how much goes at a time
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,64}", explicit_n_vocab=257,
                                 mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={"<|endoftext|>": 256})
    if name != "gpt2":  # newer encodings have over 65536 tokens, more than a uint16 can name
        fail(f"unknown tokenizer {name!r}; give --tokenizer bytes or --tokenizer gpt2")
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as e:  # whatever requests, ssl or tiktoken's own hash check raise
        fail(f"cannot fetch the table of --tokenizer gpt2 ({type(e).__name__}); connect to the network once, "
             "or set TIKTOKEN_CACHE_DIR to a folder that holds it, or use --tokenizer bytes")

def read_shard(path):
    """A shard's tokens as a 1-D np.memmap of uint16: nothing is read until it is indexed."""
    if not os.path.isfile(path):
        fail(f"{path} is not there; run prepare.py again")
    header, size = np.fromfile(path, "<i4", 256), os.path.getsize(path)
    if len(header) < 256 or header[0] != MAGIC or header[1] != VERSION:
        fail(f"{path} has not the header of a token shard; delete that file and run prepare.py again")
    count = int(header[2])
    if count < 1 or size != HEADER + 2 * count:  # too short: it was cut off; too long: not this file's header
        fail(f"{path} says that it holds {count} tokens but holds {(size - HEADER) / 2:g}; "
             "delete that file and run prepare.py again")
    return np.memmap(path, "<u2", mode="r", offset=HEADER, shape=(count,))  # (count,)

NAMED = "stdlib", "shakespeare", "fineweb"  # the rest is a user's own text

def load_meta(data_dir):
    """What meta.json says about a folder of shards: name, tokenizer, vocab_size, train_tokens, val_tokens."""
    path = Path(data_dir) / "meta.json"
    if not path.is_file():
        shards = [shard.name for shard in path.parent.glob("*.bin")]
        if any(re.fullmatch(r"(train|val)_\d{6}\.bin", shard) for shard in shards):  # ours, of any tokens
            fail(f"{path} is missing, so nobody knows whose tokens the shards there are; copy it, too, or "
                 "run prepare.py again")
        if shards:  # from modded-nanogpt or llm.c, which know GPT-2's tokens only
            return {"name": path.parent.name, "tokenizer": "gpt2", "vocab_size": 50257}
        known = path.parent.name in NAMED
        command = path.parent.name if known else "text --input FILE_OR_FOLDER"
        fail(f"no data in --data {data_dir}; type: python prepare.py {command} --out {data_dir}")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        if (meta["tokenizer"], meta["vocab_size"]) in (("bytes", 257), ("gpt2", 50257)):
            return meta
    except (ValueError, KeyError, TypeError):
        pass
    fail(f"{path} does not name the tokenizer (bytes or gpt2) and vocab_size of its shards; "
         "delete that folder and run prepare.py again, or give another --data")

def open_split(data_dir, split):
    """All shards of a split ("train" or "val") in order: train_000000.bin, fineweb_train_000001.bin, ..."""
    paths = sorted(Path(data_dir).glob(f"*{split}*.bin"))
    return [read_shard(p) for p in paths] or fail(f"--data {data_dir} has no {split} shards; run prepare.py")

# ------------------------------------------------------------------ text files to tokens

def pieces(path, start, stop):
    """Bytes start..stop of a UTF-8 file as strings, with at most two chunks in memory."""
    decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""  # a chunk may end inside a character
    with open(path, "rb") as f:
        f.seek(start)
        while start < stop:
            block = f.read(min(CHUNK, stop - start))
            start += len(block) or fail(f"{path} shrank while it was read; type the same command again")
            text = rest + decoder.decode(block, final=start == stop)
            # Cut where non-space meets space. No GPT-2 token crosses that, so the tokens are those of the
            # whole text; only a run of CHUNK characters without such a place is cut by force.
            edge = re.match(r".*\S(?=\s)", text, re.S) if start < stop else None
            cut = edge.end() if edge else len(text)
            yield text[:cut]
            rest = text[cut:]

def is_utf8(path):
    """Asked of every file before the first is encoded: better now than after an hour's work."""
    try:
        for _ in pieces(path, 0, os.path.getsize(path)):
            pass
        return True
    except UnicodeDecodeError:
        return False

def tokenize(documents, enc, progress):
    """A stream of uint16 arrays for [(path, start, stop), ...]: each document, then one end-of-text token."""
    done = 0
    for path, start, stop in documents:
        for text in pieces(path, start, stop):
            raw = text.encode()
            # encode_ordinary: a literal "<|endoftext|>" in somebody's text is text, not the special token
            yield (np.frombuffer(raw, np.uint8).astype("<u2") if enc.name == "bytes"
                   else np.array(enc.encode_ordinary(text), "<u2"))
            progress(done := done + len(raw))
        if stop > start:
            yield np.array([enc.eot_token], "<u2")

def hold_out_files(files):
    """5 % of {relative name: path} for validation, by hash: a file keeps its side when others come or go."""
    rank = {name: hashlib.sha256(os.fsencode(name)).digest() for name in files}
    val = {name for name in files if int.from_bytes(rank[name][:8], "big") < 0.05 * 2**64}
    if not 0 < len(val) < len(files):  # chance may leave a side empty; then one file is enough
        val = {min(files, key=rank.get)}
    whole = {name: (path, 0, os.path.getsize(path)) for name, path in files.items()}
    return [whole[n] for n in files if n not in val], [whole[n] for n in files if n in val]

def hold_out_tails(paths, fraction):
    """The last `fraction` of every file for validation, cut after a newline if one is near."""
    train, val = [], []
    for path in paths:
        size = os.path.getsize(path)
        cut = int(size * (1 - fraction))
        with open(path, "rb") as f:
            f.seek(near := cut - min(size // 100, CHUNK))
            before, after = f.read(cut - near), f.read(4)
        if b"\n" in before:
            cut = near + before.rfind(b"\n") + 1
        else:  # at least not inside a character, whose second to last bytes are 0x80 to 0xBF
            cut += len(after) - len(after.lstrip(bytes(range(0x80, 0xC0))))
        train.append((path, 0, cut))
        val.append((path, cut, size))
    return train, val

# ------------------------------------------------------------------ tokens to shards

def meter(label, total, first=0):
    """A function that, told the bytes done, prints progress: often on a terminal, rarely in a log."""
    began = last = time.time()
    def update(done):
        nonlocal last
        now, tty = time.time(), sys.stdout.isatty()
        if now - last > (0.5 if tty else 30):
            last, rate = now, max(done - first, 1) / (now - began)
            print(f"{label}: {done / 1e6:.0f} of {total / 1e6:.0f} MB, {rate / 1e6:.1f} MB/s, "
                  f"{max(total - done, 0) / rate:.0f} s left".ljust(79), end="\n\r"[tty], flush=True)
    return update

def check_out(out, name, tokenizer, ours):
    """Refuse a folder where our shards would be mixed with others, or replace them."""
    foreign = [p.name for p in sorted(out.glob("*.bin")) if not re.fullmatch(ours, p.name)]
    if foreign:
        fail(f"{out} holds shards of another data set ({foreign[0]}); choose another folder with --out")
    if (out / "meta.json").exists():
        old = load_meta(out)
        kind = old.get("name") if old.get("name") in NAMED else "text"
        if (kind, old["tokenizer"]) != (name, tokenizer):
            fail(f"{out} already holds {kind} as {old['tokenizer']} tokens, not {name} as {tokenizer}; "
                 "choose another folder with --out")

def write_shards(folder, split, arrays):
    """Write a stream of token arrays as shards of SHARD_TOKENS; return the number of tokens."""
    sizes = []
    for array in arrays:
        while len(array):
            if not sizes or sizes[-1] == SHARD_TOKENS:
                sizes.append(0)
            part, array = np.split(array, [SHARD_TOKENS - sizes[-1]])
            with open(folder / f"{split}_{len(sizes) - 1:06d}.bin", "ab") as f:
                f.write(part.tobytes() if sizes[-1] else bytes(HEADER) + part.tobytes())
            sizes[-1] += len(part)
    for i, count in enumerate(sizes):  # the count is known only now, so the header comes last
        with open(folder / f"{split}_{i:06d}.bin", "r+b") as f:
            f.write(np.array([MAGIC, VERSION, count] + 253 * [0], "<i4").tobytes())
            f.flush()
            os.fsync(f.fileno())  # a full disk says so here, before anything has its final name
    return sum(sizes)

def write_meta(out, **meta):
    """Last of all, and by a rename: a folder with a new meta.json has all of its shards."""
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=out) as tmp:
        (Path(tmp) / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        os.replace(Path(tmp) / "meta.json", out / "meta.json")

def write_text(out, name, enc, documents, source):
    """Tokenize (train documents, val documents) into out, which stays as it was until all is written."""
    if enc.n_vocab > 65536:
        fail(f"{enc.name} has {enc.n_vocab} tokens, over the 65536 of uint16; use --tokenizer bytes or gpt2")
    out.mkdir(parents=True, exist_ok=True)
    counts = {}
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=out) as tmp:  # it goes away whatever happens
        for split, docs in zip(("train", "val"), documents):
            progress = meter(split, sum(stop - start for _, start, stop in docs))
            counts[split] = write_shards(Path(tmp), split, tokenize(docs, enc, progress))
            if not counts[split]:
                fail(f"{source} is too little text for a {split} split; name more text with --input")
        new = sorted(os.listdir(tmp))
        for shard in new:
            os.replace(Path(tmp) / shard, out / shard)
    for stale in set(out.glob("*.bin")) - {out / shard for shard in new}:
        stale.unlink()  # an earlier, larger run's: check_out made sure that they are ours
    write_meta(out, name=name, tokenizer=enc.name, vocab_size=enc.n_vocab,
               train_tokens=counts["train"], val_tokens=counts["val"], source=source)

# ------------------------------------------------------------------ the four data sets

def download(url, path, check):
    """Fetch url to path. What an earlier try left in path.tmp is kept, and only the rest is asked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = Path(f"{path}.tmp")
    have, total = tmp.stat().st_size if tmp.exists() else 0, 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            have = have if reply.status == 206 else 0  # 200: this server cannot resume and sends it all
            total = have + int(reply.headers.get("Content-Length", 0))
            progress = meter(path.name, total, have)
            with open(tmp, "ab" if have else "wb") as f:
                while block := reply.read(CHUNK):
                    f.write(block)
                    progress(have := have + len(block))
        if have < total:
            raise ConnectionError("the connection was closed")
    except (OSError, http.client.HTTPException) as e:
        if getattr(e, "errno", None) in DISK_FULL or isinstance(e, PermissionError):
            raise  # of our file, not of the network
        if getattr(e, "code", None) != 416 or not have:  # 416: all of it is here already
            fail(f"cannot download {url} ({getattr(e, 'reason', e)}; {have} bytes are here); "
                 "check the network and type the same command again, it continues there")
    try:
        check(tmp)
    except SystemExit:  # whole but wrong (a login page, say): no use to continue with it
        tmp.unlink()
        raise
    os.replace(tmp, path)

def check_shakespeare(path):
    """Fail unless the file is the one that everybody else trains on."""
    raw = path.read_bytes()
    if len(raw) != SHAKESPEARE_SIZE or hashlib.sha256(raw).hexdigest() != SHAKESPEARE_SHA256:
        fail(f"{path} has the wrong size or sha256 and was removed; type the same command again, "
             "or get the file elsewhere and use: python prepare.py text --input FILE")

def shakespeare(args):
    """Tiny-shakespeare; the last tenth is held out, as in nanoGPT."""
    path = args.out / "input.txt"
    try:
        check_shakespeare(path)  # an earlier run's copy will do
    except (SystemExit, FileNotFoundError):
        download(SHAKESPEARE_URL, path, check_shakespeare)
    documents = hold_out_tails([path], 0.1)
    write_text(args.out, "shakespeare", get_tokenizer(args.tokenizer), documents, SHAKESPEARE_URL)

def fineweb(args):
    """Ready GPT-2 shards, which modded-nanogpt trains on: one of validation and the first N of training."""
    for name in ["fineweb_val_000000.bin"] + [f"fineweb_train_{i + 1:06d}.bin" for i in range(args.shards)]:
        if not (args.out / name).exists():
            download(FINEWEB_URL + name, args.out / name, read_shard)
    # Shards beyond the N asked for that are there are counted, not deleted: they took long to download.
    train, val = (sum(map(len, open_split(args.out, split))) for split in ("train", "val"))
    write_meta(args.out, name="fineweb", tokenizer="gpt2", vocab_size=50257,
               train_tokens=train, val_tokens=val, source=FINEWEB_URL)

def stdlib(args):
    """The standard library of the Python that runs this: code of one style, on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    files = {n: root / n for n in names if skip.isdisjoint(n.split("/")) and (root / n).stat().st_size}
    documents = hold_out_files({n: p for n, p in files.items() if is_utf8(p)}) if len(files) >= 20 else fail(
        f"this Python has no source files in {root}; use: python prepare.py shakespeare")
    source = f"standard library of Python {sys.version.split()[0]}"
    write_text(args.out, "stdlib", get_tokenizer(args.tokenizer), documents, source)

def text(args):
    """Any UTF-8 files, and all that are not hidden (or caches) in any folders. Each file is one document."""
    files, seen = {}, set()
    for root in map(Path, args.input):
        found = [(root.name, root)]
        if root.is_dir():
            paths = (Path(folder, n) for folder, _, names in os.walk(root, onerror=fail) for n in names)
            found = sorted((p.relative_to(root).as_posix(), p) for p in paths)
            found = [(name, p) for name, p in found if not re.search(r"(^|/)(\.|__pycache__/)", name)]
        for name, path in found:
            real = path.resolve()  # a file named twice is read once, and our own output is not input
            if real not in seen and args.out.resolve() not in real.parents:
                if not path.is_file() or not is_utf8(path):
                    fail(f"--input {path} is not a file of UTF-8 text; check the name, convert the file "
                         "(iconv -t UTF-8) or leave it out")
                if path.stat().st_size:
                    files[name if name not in files else str(path)] = path
            seen.add(real)
    if not files:
        fail(f"--input {' '.join(args.input)} holds no text; name files that are not empty")
    # Few files are few topics: then the tail of each is a fairer sample than one whole file.
    documents = hold_out_files(files) if len(files) >= 20 else hold_out_tails(files.values(), 0.05)
    write_text(args.out, "text", get_tokenizer(args.tokenizer), documents, " ".join(args.input))

class Parser(argparse.ArgumentParser):
    def error(self, message):  # argparse would print its usage as well; one sentence is enough
        fail(f"{message}; see python prepare.py --help")

def main(argv=None):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="name", required=True)
    for run in (stdlib, shakespeare, fineweb, text):
        name, default = run.__name__, "gpt2" if run is fineweb else "bytes"
        command = commands.add_parser(name, help=run.__doc__)
        command.set_defaults(run=run)
        command.add_argument("--tokenizer", default=default, help=f"bytes or gpt2 (default {default})")
        command.add_argument("--out", type=Path, default=Path("data", name), help=f"default data/{name}")
        if run is fineweb:
            command.add_argument("--shards", type=int, default=1, help="1 to 103 training shards (default 1)")
        if run is text:
            command.add_argument("--input", nargs="+", required=True, help="UTF-8 files, or folders of them")
    args = parser.parse_args(argv)
    ours = r"(train|val)_\d{6}\.bin"
    if args.run is fineweb:
        ours = "fineweb_" + ours
        if args.tokenizer != "gpt2" or not 1 <= args.shards <= 103:
            fail("fineweb comes as gpt2 tokens in 103 shards; use --tokenizer gpt2 and --shards 1 to 103")
    else:
        get_tokenizer(args.tokenizer)  # a tokenizer that cannot be had stops us before any download
    try:
        check_out(args.out, args.name, args.tokenizer, ours)
        args.run(args)
        meta = load_meta(args.out)
    except KeyboardInterrupt:
        fail("interrupted; no shard was left half-written, type the same command again")
    except UnicodeDecodeError:
        fail("an input file changed while it was read; type the same command again")
    except OSError as e:
        if e.errno in DISK_FULL:
            fail(f"no room to write to {args.out} ({e.strerror}); free disk space or choose another --out")
        fail(f"{e.filename or args.out}: {e.strerror or e}; make that path usable or give another one")
    print(f"{meta['train_tokens']:,} train and {meta['val_tokens']:,} val tokens ({meta['tokenizer']}) in "
          f"{args.out}; next: python train.py --data {args.out}")

if __name__ == "__main__":
    main()
