"""prepare.py on real files. Downloads come from file:// URLs."""

import hashlib
import json
import os
import shlex
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch

import prepare
from conftest import refused
from prepare import load_meta, open_split, split_documents

PROSE = "".join(f"{i}. It's a naïve  line — {'字' * (i % 7)}\tof text,\n\n   {i * i} "
                "<|endoftext|> 🙂\n" for i in range(600))

def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path

def shard(tokens, magic=20240520, version=1, dtype="<u2"):
    """llm.c's format, written out by hand"""
    header = np.array([magic, version, len(tokens)] + 253 * [0], "<i4")
    return header.tobytes() + np.asarray(tokens, dtype).tobytes()

def run(line):
    prepare.main(shlex.split(line))

def tokens(folder, split):
    return np.concatenate(open_split(folder, split))

def documents(folder, split):
    """The documents of a data set of bytes"""
    found = tokens(folder, split)
    assert found[-1] == 256
    pieces = np.split(found, np.flatnonzero(found == 256) + 1)[:-1]
    return [bytes(piece[:-1].astype("u1")) for piece in pieces]

def contents(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

# -----------------------------------------------------------------------------
# sources

@pytest.mark.parametrize("content, expected", [
    ("naïve 字 🙂\r\n", "naïve 字 🙂\r\n"), (b"\xef\xbb\xbfmarked\n", "marked\n"), (" ", " "),
    ("é".encode("latin1"), None), ("text".encode("utf-16"), None), ("a\0b", None), ("", None),
    (b"\xef\xbb\xbf", None)])
def test_what_text_is(tmp_path, content, expected):
    path = write(tmp_path / "name.txt", content)
    if expected is None:
        assert f"{path}: empty, or not UTF-8 text" in refused(prepare.read_text, path)
    else:
        assert prepare.read_text(path) == expected

LINE, BOOK = "one line\n", "a line of a book\n" * 400

@pytest.mark.parametrize("texts, n_long", [
    ([LINE] * 60, 0), ([LINE] * 2, 0), ([BOOK], 1), ([BOOK] * 5, 5), ([BOOK] * 100, 0),
    (["x" * 998] * 2, 0), ([BOOK + "x" * 9000], 1), ([LINE] * 3 + [BOOK], 1)])
def test_only_long_documents_are_cut(texts, n_long):
    texts = [f"{i} {text}" for i, text in enumerate(texts)]
    train, val = split_documents(texts)
    heads, tails = (side[len(side) - n_long:] for side in (train, val))
    short = train[:len(train) - n_long] + val[:len(val) - n_long]
    assert sorted(short + [a + b for a, b in zip(heads, tails)]) == sorted(texts)
    assert len(texts) == n_long or 1 <= len(val) - n_long <= 1 + 0.08 * len(texts)
    assert all(0.04 < len(b) / len(a + b) < 0.07 for a, b in zip(heads, tails))
    assert all(head.endswith("\n") or "x" in head for head in heads)

def test_the_text_alone_decides_its_split():
    """Kinds that come in turn are on both sides, copies on one; new documents move no old one."""
    texts = [f"{'ABCDEFGHIJKLMNOPQRST'[i % 20]}: this is {i}" for i in range(400)]
    train, val = split_documents(texts + texts[:50])
    assert len({text[0] for text in train}) == 20 and len({text[0] for text in val}) > 8
    assert not {*train} & {*val} and {*train} | {*val} == {*texts}
    low = [text for text in map(str, range(200)) if prepare.hash_to_unit(text) < 0.05][:2]
    assert [len(side) for side in split_documents(low)] == [1, 1]   # not both for validation
    more = split_documents([f"something else, {i}" for i in range(99)] + texts)
    assert {*train} <= {*more[0]} and {*val} <= {*more[1]}

def test_documents_in_files_or_as_json_lines(tmp_path):
    """They give the same data set. JSON may hold half of a surrogate pair, which is no letter."""
    lines = [f"Q{i}: what is {i} plus {i}?\u2028" for i in range(58)]
    lines += ["a pair: 👍", "half of one: \ufffd"]
    objects = [json.dumps(dict(id=i, body=line), ensure_ascii=i % 2)
               for i, line in enumerate(lines)]
    objects[-1] = r'{"body": "half of one: \ud83d"}'
    objects[3:3] = ["", '{"body": ""}']   # no documents
    write(tmp_path / "lines.jsonl", "\ufeff" + "\r\n".join(objects))
    for i, line in enumerate(lines):
        write(tmp_path / "files" / f"{i:02}.txt", line)
    for out, flags in ("a", "files"), ("b", "lines.jsonl --jsonl body"):
        run(f"text --out {tmp_path}/{out} --input {tmp_path}/{flags}")
        found = documents(tmp_path / out, "train") + documents(tmp_path / out, "val")
        assert sorted(found) == sorted(line.encode() for line in lines)

def test_a_folder(tmp_path, capsys):
    folder, out = tmp_path / "in", tmp_path / "it's é"
    for i in range(10):
        write(folder / f"sub{i % 3}" / f"{i}.md", f"this is document {i}\r\n" * 9)
    for name in ".hidden", ".git/x", "sub0/__pycache__/x.txt":
        write(folder / name, "no document")
    for name, content in dict(picture=b"\x89PNG", empty="", utf16="a".encode("utf-16")).items():
        write(folder / "sub0" / name, content)
    run(f"text --input {folder} --out {shlex.quote(str(out))}/")
    found = documents(out, "train") + documents(out, "val")
    assert sorted(found) == [f"this is document {i}\r\n".encode() * 9 for i in range(10)]
    printed = capsys.readouterr().out
    assert [line.split("/")[-1] for line in printed.splitlines() if "ignored" in line] == [
        "empty", "picture", "utf16"]
    assert printed.endswith(f"next: python train.py --data {out}\n")
    assert {path.name for path in tmp_path.iterdir()} == {"in", out.name}

def test_stdlib(tmp_path):
    out = tmp_path / "data"
    run(f"stdlib --out {out}")
    assert load_meta(out).items() >= dict(name="stdlib", tokenizer="bytes", vocab_size=257).items()
    train, val = documents(out, "train"), documents(out, "val")
    assert sum(map(len, train)) > 3_000_000 and 0.02 < len(val) / len(train) < 0.09
    for path in Path(sysconfig.get_path("stdlib")).glob("[a-m]*.py"):   # by a hash of the name
        rank = int.from_bytes(hashlib.sha256(path.name.encode()).digest()[:8], "big")
        assert path.read_bytes() in (val if rank < 0.05 * 2 ** 64 else train)

def test_shakespeare(tmp_path, monkeypatch):
    raw = PROSE.encode() * 10
    source = write(tmp_path / "input.txt", raw)
    monkeypatch.setattr(prepare, "SHAKESPEARE_URL", source.as_uri())
    run(f"shakespeare --out {tmp_path}/out")
    head, tail = (bytes(tokens(tmp_path / "out", split)[:-1].astype("u1"))
                  for split in ("train", "val"))
    assert head + tail == raw and 0.09 < len(tail) / len(raw) < 0.12
    source.unlink()
    pytest.raises(OSError, run, f"shakespeare --out {tmp_path}/new")
    assert os.listdir(tmp_path) == ["out"]

def test_fineweb_continues(tmp_path, monkeypatch):
    web, out = tmp_path / "web", tmp_path / "out"
    for i, name in enumerate(["val_000000", "train_000001"]):
        write(web / f"fineweb_{name}.bin", shard(range(30_000 + i)))
    monkeypatch.setattr(prepare, "FINEWEB_URL", web.as_uri() + "/")
    pytest.raises(OSError, run, f"fineweb --shards 2 --out {out}")   # the connection breaks
    assert not out.exists()
    for name in "val_000000", "train_000001":
        (web / f"fineweb_{name}.bin").unlink()   # not downloaded again
    write(tmp_path / "out.tmp" / "fineweb_train_000002.bin.part", shard(range(9)))
    write(web / "fineweb_train_000002.bin", shard(range(30_002)))
    run(f"fineweb --shards 2 --out {out}")
    assert len(tokens(out, "train")) == 60_003 and len(tokens(out, "val")) == 30_000
    assert load_meta(out).items() >= dict(name="fineweb", tokenizer="gpt2").items()
    assert sorted(os.listdir(tmp_path)) == ["out", "web"] and len(os.listdir(out)) == 4

def test_the_puzzle(steps_data):
    """Each line follows from the one before by the steps its letter asks for: 3141 is 5877 after
    one step, and 1085 after two."""
    puzzle = load_meta(steps_data)["steps"]
    assert load_meta(steps_data)["tokenizer"] == "bytes" and puzzle["cells"] == 4
    digits = torch.tensor([3, 1, 4, 1])
    for expected in [5, 8, 7, 7], [1, 0, 8, 5]:
        digits = prepare.next_line(digits, puzzle["table"])
        assert digits.tolist() == expected
    texts = documents(steps_data, "train")
    assert len(texts) == 200 and {text.count(b"\n") for text in texts} == {16}
    for text in texts:
        lines = text.decode().split()
        for line, answer in zip(lines, lines[1:]):
            row = [*map(int, line[1:])]
            for _ in range(ord(line[0]) - ord("a")):
                row = [puzzle["table"][left][digit] for left, digit in zip([0, *row], row)]
            assert row == [*map(int, answer[1:])]

# -----------------------------------------------------------------------------
# tokens, shards, windows

def test_tokenizers(tmp_path, monkeypatch):
    tokenizer = prepare.get_tokenizer("bytes")
    assert tokenizer.encode_ordinary(PROSE) == [*PROSE.encode()] and tokenizer.n_vocab == 257
    assert prepare.token_bytes("bytes", 320).tolist() == [1] * 256 + [0] * 64
    encoded = prepare.encode(["a<|endoftext|>", ""], "bytes").tolist()
    assert encoded == [*b"a<|endoftext|>", 256, 256]
    with monkeypatch.context() as patch:   # offline
        patch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
        patch.setenv("https_proxy", "http://127.0.0.1:9")
        patch.setattr(tiktoken.registry, "ENCODINGS", {})
        assert "TIKTOKEN_CACHE_DIR" in refused(prepare.get_tokenizer, "gpt2")
    ranks = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257}
    longer = tiktoken.Encoding("longer", pat_str=".+", mergeable_ranks=ranks,
                               special_tokens={"<|endoftext|>": 258})
    monkeypatch.setattr(prepare, "get_tokenizer", lambda name: longer)
    assert prepare.token_bytes("longer", 260)[254:].tolist() == [1, 1, 2, 3, 0, 0]

def test_shards_and_windows(tmp_path):
    prepare.write_shard(tmp_path / "x_val_0.bin", np.array([1, 2, 65535]))
    assert (tmp_path / "x_val_0.bin").read_bytes() == shard([1, 2, 65535])
    assert prepare.read_shard(tmp_path / "x_val_0.bin").tolist() == [1, 2, 65535]
    shards = [np.arange(10, dtype="<u2"), np.arange(100, 107, dtype="<u2")]
    x, y = prepare.read_windows(shards, np.arange(9), 4)   # six in the first shard, then three
    assert x.dtype == torch.int64 and x.shape == (9, 4) and torch.equal(y, x + 1)
    assert x[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 100, 101, 102]
    write(tmp_path / "x_val_0.bin", shard(range(50)))
    x, y = prepare.windows_of(tmp_path, "val", 9, 5)
    assert x[:, 0].tolist() == [0, 10, 20, 30, 40] and torch.equal(y, x + 1)
    assert "more than 50 tokens" in refused(prepare.windows_of, tmp_path, "val", 50, 5)

@pytest.mark.parametrize("content, found", [
    (shard([1, 2, 3])[:-1], "cut short; delete it"), (shard([1, 2])[:100], "cut short"),
    (shard([1, 2, 3], 20240801, 7, "<u4"), "version 1"),          # llm.c's of Llama 3
    (shard([1, 2, 3], version=2), "version 1"), (b"", "version 1"),
    (bytes(range(1, 200)) * 20, "version 1")])                    # nanoGPT's
def test_other_shards(tmp_path, content, found):
    sentence = refused(prepare.read_shard, write(tmp_path / "its.bin", content))
    assert "its.bin: " in sentence and found in sentence

def test_data_sets_of_other_programs(tmp_path):
    """Without meta.json, tokens are GPT-2's. A word of the name is the split."""
    assert "no data set there" in refused(load_meta, tmp_path / "nowhere")
    for i, name in enumerate(["festival_train_000000", "train7", "arrival_val_000000",
                              "tiny_shakespeare_val", "strain_validity_0"]):
        write(tmp_path / f"{name}.bin", shard([i]))
    assert load_meta(str(tmp_path)) == dict(tokenizer="gpt2", vocab_size=50257)
    assert sorted(tokens(tmp_path, "train")) == [0, 1]
    assert sorted(tokens(tmp_path, "val")) == [2, 3]
    write(tmp_path / "meta.json", '{"tokenizer": "llama"}')
    assert "meta.json: its tokenizer must be bytes or gpt2" in refused(load_meta, tmp_path)

# -----------------------------------------------------------------------------
# the command line

def test_whole_or_not_there(tmp_path, monkeypatch):
    line = f"text --input {write(tmp_path / 'a.txt', PROSE)} --out {tmp_path}/out"
    with monkeypatch.context() as patch:
        def full(*args):
            raise OSError(28, "No space left on device")
        patch.setattr(Path, "write_text", full)   # of meta.json, the last file
        pytest.raises(OSError, run, line)
    assert not (tmp_path / "out").exists()
    write(tmp_path / "out.tmp" / "train_000009.bin", shard([1, 2]))   # no shard of this data set
    run(line)
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "out"]
    names = ["train_000000.bin", "val_000000.bin"]
    assert sorted(os.listdir(tmp_path / "out")) == ["meta.json", *names]
    assert load_meta(tmp_path / "out")["sha256"] == {
        name: hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() for name in names}

REFUSED = {   # command line -> words of its sentence
    "texts": "--name texts", "text good": "unrecognized", "--shards 1": "required: name",
    "stdlib --shard 1": "--shard", "stdlib --shards 2": "stdlib doesn't use it",
    "steps --tokenizer gpt2": "steps doesn't use it", "steps --jsonl text": "doesn't use it",
    "fineweb --shards 104": "from 1 to 103", "fineweb --tokenizer bytes": "doesn't use it",
    "text": "too little", "text --input one": "too little", "text --input empty": "too little",
    "text --input good no": "no: no such",
    "text --input latin": "latin: empty, or not", "text --input good latin": "latin: empty",
    "text --input x.gz": "unpack", "text --input bad1 --jsonl body": "bad1, line 7",
    "text --input bad2 --jsonl body": "line 7", "text --input bad3 --jsonl body": "line 7",
    "steps --out good": "good: exists",
    "text --input good --out mine": "mine: exists", "steps --out .": "exists",
    "text --input good --tokenizer llama": "invalid choice"}

@pytest.mark.parametrize("line, words", REFUSED.items())
def test_bad_input(tmp_path, monkeypatch, line, words):
    """One sentence, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    files = {"latin": b"\xe9" * 99, "one": "a", "good": PROSE, "x.gz": b"\x1f\x8b",
             "mine/ckpt.pt": "a run"}
    for i, wrong in enumerate(["{", '{"text": "x"}', '{"body": 5}'], 1):
        files[f"bad{i}"] = '{"body": "x"}\n\n' * 3 + wrong + "\n"
    for name, content in files.items():
        write(tmp_path / name, content)
    (tmp_path / "empty").mkdir()
    before, names = contents(tmp_path), sorted(tmp_path.rglob("*"))
    assert words in refused(run, line)
    assert contents(tmp_path) == before and sorted(tmp_path.rglob("*")) == names
