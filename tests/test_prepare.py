"""prepare.py on real files. Downloads come from file:// addresses; kills are real ones."""
import hashlib, json, os, re, resource, shlex, signal
from unittest.mock import Mock
import numpy as np
import prepare, pytest, tiktoken, torch
from conftest import refused
from flags import Mistake
from prepare import fingerprint, hold_out, load_meta, locked, open_split, whole_file

PROSE = "".join(f"{i}. It's a naïve  line — {'字' * (i % 7)}\tof text,\n\n   {i * i} "
                "<|endoftext|> 🙂\n" for i in range(600))

def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path

def shard(array, magic=20240520, version=1, kind="<u2"):
    header = np.array([magic, version, len(array)] + 253 * [0], "<i4")
    return bytes(header) + bytes(np.asarray(array, kind))

def run(line):
    prepare.main(shlex.split(line))

def tokens(out, split):
    return np.concatenate(open_split(out, split))

def side(out, split):
    """The documents of a split, as bytes"""
    found = tokens(out, split)
    assert found[-1] == 256
    pieces = np.split(found, np.flatnonzero(found == 256) + 1)[:-1]
    return [bytes(piece[:-1].astype("u1")) for piece in pieces]

def contents(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

# ------------------------------------------------------------------------------------- sources

@pytest.mark.parametrize("content, expected", [
    ("naïve 字 🙂\r\n", "naïve 字 🙂\r\n"), (b"\xef\xbb\xbfmarked\n", "marked\n"), (" ", " "), ("é".encode("latin1"), None),
    ("text".encode("utf-16"), None), ("text".encode("utf-16-le"), None), ("", None), (b"\xef\xbb\xbf", None)])
def test_one_rule_says_what_text_is(tmp_path, content, expected):
    path = write(tmp_path / "its name.txt", content)
    for read in prepare.read_text, lambda path: prepare.text_or_file(str(path)):
        if expected:
            assert read(path) == expected
        else:
            assert f"{path}: is empty, or not UTF-8 text" in refused(read, path)

def test_what_is_no_files_name_is_a_text(tmp_path):
    for text in "", str(tmp_path), "promt.txt", "a/" * 5000, "nul\0", "line\nline":
        assert prepare.text_or_file(text) == text

LINE, BOOK = "one line\n", "a line of a book\n" * 400
@pytest.mark.parametrize("documents, n_short, n_long", [
    ([LINE] * 60, 60, 0), ([LINE] * 1500, 1500, 0), ([LINE] * 2, 2, 0), ([BOOK], 0, 1), ([BOOK] * 5, 0, 5),
    (["x" * 998] * 2, 2, 0),   # with their numbers 1,000 characters, which is short
    ([BOOK + "x" * 9000], 0, 1), ([BOOK] * 100, 100, 0), ([LINE] * 3 + [BOOK], 3, 1), ([BOOK] + [LINE] * 50, 50, 1)])
def test_short_documents_stay_whole(documents, n_short, n_long):
    """Of a long one the last 5 % are for validation; of the short ones about 5 %, and at least one."""
    documents = [f"{i} {document}" for i, document in enumerate(documents)]
    trained, held_out = hold_out(documents)
    train, heads = trained[:len(trained) - n_long], trained[len(trained) - n_long:]
    val, tails = held_out[:len(held_out) - n_long], held_out[len(held_out) - n_long:]
    assert len(train) + len(val) == n_short and (n_short == 0 or train and 1 <= len(val) <= 1 + 0.08 * n_short)
    assert sorted([*train, *val, *map("".join, zip(heads, tails))]) == sorted(documents)
    assert all(0.04 < len(tail) / len(head + tail) < 0.07 for head, tail in zip(heads, tails))
    assert all(head.endswith("\n") or "x" in head for head in heads)

def test_a_text_says_itself_on_which_side_it_is(capsys):
    """So kinds that come in turn are on both sides, copies on one, and no text changes sides when others come."""
    documents = [f"{'ABCDEFGHIJKLMNOPQRST'[i % 20]}: this is {i}" for i in range(400)]
    train, val = hold_out(documents + documents[:50])
    assert len({text[0] for text in train}) == 20 and len({text[0] for text in val}) > 8
    assert not {*train} & {*val} and {*train} | {*val} == {*documents}
    assert "50 are copies" in capsys.readouterr().out
    again = hold_out([f"something else, {i}" for i in range(99)] + documents)
    assert {*train} <= {*again[0]} and {*val} <= {*again[1]}

def test_lines_in_files_or_in_one(tmp_path, capsys):
    """60 questions, each in a file of its own, or as lines of JSON in one, are trained on to their ends. (JSON can
    write half of a surrogate pair, which is no letter.)"""
    lines = [f"Q{i}: what is {i} plus {i}? A: {2 * i}\u2028" for i in range(58)] + ["a pair: 👍", "half of one: \ufffd"]
    objects = [json.dumps(dict(id=i, body=line), ensure_ascii=i % 2) for i, line in enumerate(lines)]
    objects[-1] = r'{"body": "half of one: \ud83d"}'
    objects[3:3] = ["", json.dumps(dict(body=""))]   # These are no documents.
    write(tmp_path / "lines.jsonl", "\ufeff" + "\r\n".join(objects))
    for i, line in enumerate(lines):
        write(tmp_path / "files" / f"{i:02}.txt", line)
    for flags in f"--input {tmp_path}/files", f"--input {tmp_path}/lines.jsonl --jsonl body --overwrite":
        run(f"text --out {tmp_path}/data {flags}")
        train, val = (side(tmp_path / "data", split) for split in ("train", "val"))
        assert sorted(train + val) == sorted(line.encode() for line in lines) and 1 <= len(val) <= 7
        said = f"documents: {len(train)} for training, {len(val)} for validation, 0 cut at 95 % for both; 0 are copies"
        assert said in capsys.readouterr().out

def test_what_is_wrong_in_a_line(tmp_path):
    for wrong in "{", "5", '{"text": "x"}', '{"body": 5}', '["body"]', "[" * 10**5:
        path = write(tmp_path / "wrong.jsonl", '{"body": "x"}\n' * 6 + wrong + "\n")
        said = refused(run, f"text --input {path} --jsonl body")
        assert "wrong.jsonl, line 7: " in said and "'body'" in said

def test_folders_and_links(tmp_path, capsys):
    """Three inputs, two of which are in the first. No document comes twice. What is no text is passed over."""
    folder, out = tmp_path / "in", tmp_path / "in" / "it's;  $HOME é*"
    for i in range(9):
        write(folder / f"sub{i % 3}" / f"{i}.md", f"this is document {i}\r\n" * 9)
    write(tmp_path / "elsewhere" / "9.md", "this is document 9\r\n" * 9)
    (folder / "link").symlink_to(tmp_path / "elsewhere")   # followed
    (folder / "sub0" / "circle").symlink_to(folder)        # not in circles
    (folder / "broken").symlink_to(tmp_path / "nowhere")
    for name in ".hidden", ".git/x", "sub0/__pycache__/x.pyc":
        write(folder / name, "no document")
    for name, content in dict(picture=b"\x89PNG", empty="", utf16="a".encode("utf-16")).items():
        write(folder / "sub" / name, content)
    for _ in range(2):   # The second time there is its own output, which is no input.
        run(f"text --input {folder} {folder}/sub0 --out {shlex.quote(str(out))} "
            f"--input {folder}/link")
    documents = side(out, "train") + side(out, "val")
    assert sorted(documents) == [f"this is document {i}\r\n".encode() * 9 for i in range(10)]
    printed = capsys.readouterr().out
    assert re.search("passed over.* 3, .*/empty\n", printed)
    assert shlex.split(printed.split("next: ")[-1]) == ["python", "train.py", "--data", str(out)]   # in a shell

def test_stdlib(tmp_path):
    """... into a link to a folder that isn't there yet"""
    link, out = tmp_path / "é", tmp_path / "disk" / "data"
    link.symlink_to(out)
    run(f"stdlib --out {link}")
    assert link.is_symlink() and sorted(os.listdir(tmp_path / "disk")) == ["data"]
    assert load_meta(out).items() >= dict(name="stdlib", tokenizer="bytes", vocab_size=257).items()
    train, val = (side(out, split) for split in ("train", "val"))
    assert sum(map(len, train)) > 3_000_000 and 0.02 < len(val) / len(train) < 0.09
    for path in sorted(prepare.Path(os.__file__).parent.glob("[a-m]*.py")):   # Sides go by a hash of the name.
        rank = int.from_bytes(hashlib.sha256(path.name.encode()).digest()[:8], "big")
        assert path.read_bytes() in (val if rank < 0.05 * 2**64 else train)

def test_shakespeare(tmp_path, monkeypatch):
    out, raw = tmp_path / "out", PROSE.encode() * 10
    source = write(tmp_path / "input.txt", raw)
    monkeypatch.setattr(prepare, "SHAKESPEARE_URL", source.as_uri())
    monkeypatch.setattr(prepare, "SHAKESPEARE_SHA256", hashlib.sha256(raw).hexdigest())
    run(f"shakespeare --out {out}")
    head, tail = (bytes(tokens(out, split)[:-1].astype("u1")) for split in ("train", "val"))
    assert head + tail == raw and 0.09 < len(tail) / len(raw) < 0.12
    before = contents(out)
    write(source, "<html>please log in</html>")
    assert "hash" in refused(run, f"shakespeare --out {out}")
    source.unlink()
    assert "network" in refused(run, f"shakespeare --out {out}")
    assert contents(out) == before and sorted(os.listdir(tmp_path)) == ["out"]

def test_fineweb_goes_on_where_it_stopped(tmp_path, monkeypatch):
    web, out, second = tmp_path / "web", tmp_path / "out", shard(np.arange(30_002))
    for i, name in enumerate(["val_000000", "train_000001", "train_000002", "train_000003"]):
        write(web / f"fineweb_{name}.bin", shard(np.arange(30_000 + i)))
    monkeypatch.setattr(prepare, "FINEWEB_URL", web.as_uri() + "/")
    write(web / "fineweb_train_000002.bin", second[:-2])   # The connection breaks there.
    assert "fineweb_train_000002.bin" in refused(run, f"fineweb --shards 2 --out {out}")
    assert len(tokens(out, "train")) == 30_001 and len(list(out.glob("*.bin"))) == 2   # to train on
    for shards in out.glob("*.bin"):
        (web / shards.name).unlink()   # They are not asked for again.
    write(web / "fineweb_train_000002.bin", second)
    run(f"fineweb --shards 2 --out {out}")
    run(f"fineweb --shards 3 --out {out}")
    assert len(tokens(out, "train")) == 90_006 and sorted(os.listdir(tmp_path)) == ["out", "web"]
    assert load_meta(out) == dict(name="fineweb", tokenizer="gpt2", vocab_size=50257)

def test_a_source_of_yours(tmp_path, monkeypatch, capsys):
    """It may use each flag. What must be wrong in it is said, and nothing is written."""
    def read_songs(flags):
        return hold_out(prepare.read_text(flags.input[0]).splitlines())
    out, line = tmp_path / "out", f"stdlib --input {tmp_path}/songs --out {tmp_path}/out"
    monkeypatch.setitem(prepare.SOURCES, "stdlib", read_songs)   # argparse knows its name.
    monkeypatch.delitem(prepare.FLAGS_OF, "stdlib")
    write(tmp_path / "songs", "\n".join(f"song {i}" for i in range(30)))
    run(line)
    assert {*side(out, "train"), *side(out, "val")} == {b"song %d" % i for i in range(30)}
    before = contents(tmp_path)
    for returned in ("a text", "another"), (["a", 5], ["b"]), (["a"], [b"b"]):
        monkeypatch.setitem(prepare.SOURCES, "stdlib", lambda flags: returned)
        with pytest.raises(Mistake, match="no list of texts"):   # and not one of its letters
            run(line)
    pytest.raises(Mistake, hold_out, "a text")
    assert contents(tmp_path) == before
    monkeypatch.setitem(prepare.SOURCES, "stdlib", lambda flags: (["a", "b", "c"], ["c", "d"]))
    run(f"{line} --overwrite")
    assert re.search("both sides.*: 1$", capsys.readouterr().out, re.M)

# ---------------------------------------------------------------------- tokens, shards and windows

def test_tokenizers(tmp_path, monkeypatch):
    tokenizer = prepare.get_tokenizer("bytes")
    assert tokenizer.encode_ordinary(PROSE) == list(PROSE.encode()) and tokenizer.n_vocab == 257
    assert prepare.token_bytes("bytes", 320).tolist() == [1] * 256 + [0] * 64
    with monkeypatch.context() as patch:   # without a network
        patch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
        patch.setenv("https_proxy", "http://127.0.0.1:9")
        patch.setattr(tiktoken.registry, "ENCODINGS", {})
        assert "TIKTOKEN_CACHE_DIR" in refused(prepare.get_tokenizer, "gpt2")
    ranks = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257}
    longer = tiktoken.Encoding("longer", pat_str=".+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 258})
    monkeypatch.setattr(prepare, "get_tokenizer", lambda name: longer)
    assert prepare.token_bytes("longer", 260)[254:].tolist() == [1, 1, 2, 3, 0, 0]

def test_shards_and_windows(tmp_path):
    a = prepare.read_shard(write(tmp_path / "good.bin", shard([1, 2, 65535])))
    assert isinstance(a, np.memmap) and a.dtype == np.uint16 and a.tolist() == [1, 2, 65535]
    shards = [np.arange(10, dtype="<u2"), np.arange(100, 107, dtype="<u2")]
    x, y = prepare.read_windows(shards, np.arange(9), 4)   # six in the first shard, three after it
    assert x.dtype == torch.int64 and x.shape == (9, 4) and torch.equal(y, x + 1)
    assert x[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 100, 101, 102]
    write(tmp_path / "fineweb_val_000000.bin", shard(range(50)))
    x, y = prepare.windows_of(tmp_path, "val", 9, 5)
    assert x[:, 0].tolist() == [0, 10, 20, 30, 40] and torch.equal(y, x + 1)
    assert "--block_size 50" in refused(prepare.windows_of, tmp_path, "val", 50, 5)
    write(tmp_path / "fineweb_val_000000.bin", shard([1, 2, 3, 50257]))   # gpt2 has no such token.
    assert "50257" in refused(prepare.windows_of, tmp_path, "val", 3, 1)

@pytest.mark.parametrize("content, found, deletes", [
    (shard([1, 2, 3])[:-1], "2 of 3 tokens", True),   # llm.c's, but a copy that broke off
    (shard([1, 2, 3])[:100], "0 of 3 tokens", True),
    (shard([1, 2, 3], 20240801, 7, "<u4"), "version 1, as", False),   # llm.c's of Llama 3
    (bytes(range(1, 200)) * 20, "version 1, as", False), (b"", "version 1, as", False)])   # nanoGPT's
def test_a_shard_of_others_is_named_and_kept(tmp_path, content, found, deletes):
    """Only one that is cut short can't be of any use any more."""
    said = refused(prepare.read_shard, write(tmp_path / "its.bin", content))
    assert "its.bin" in said and found in said and ("delete" in said) == deletes

def test_the_split_is_a_word_of_the_name(tmp_path):
    for i, name in enumerate(["festival_train_000000", "train7", "arrival_val_000000", "tiny_shakespeare_val",
                              "fineweb-val.3", "strain_validity_0"]):
        write(tmp_path / f"{name}.bin", shard([i]))
    assert sorted(tokens(tmp_path, "train")) == [0, 1] and sorted(tokens(tmp_path, "val")) == [2, 3, 4]
    write(tmp_path / "train_of_val.bin", shard([1, 2]))
    assert "rename" in refused(open_split, tmp_path, "val")

def test_meta_json(tmp_path):
    """Neither llm.c nor modded-nanogpt writes one. It names a tokenizer."""
    for folder in tmp_path / "nowhere", tmp_path:
        assert "no data set there" in refused(load_meta, folder)
    for i in 2, 1:
        write(tmp_path / f"fineweb_train_{i:06d}.bin", shard([i]))
    assert load_meta(str(tmp_path)) == dict(tokenizer="gpt2", vocab_size=50257)
    assert tokens(str(tmp_path), "train").tolist() == [1, 2]
    for content in "{", "{}", "[1]", "5", b"\xff", '{"tokenizer": "llama"}':
        write(tmp_path / "meta.json", content)
        assert "meta.json: must name a tokenizer" in refused(load_meta, tmp_path)

def test_a_text_of_more_tokens_than_a_shard_holds(tmp_path, monkeypatch):
    """More shards are written. If less text comes later, the old ones go. meta.json has the sha256 of each."""
    monkeypatch.setattr(prepare, "MOST_TOKENS", 4)
    for n, shards in (9, 3), (3, 1):
        prepare.write_data_set(tmp_path, dict(name="mine", tokenizer="bytes"), range(n), range(2), overwrite=True)
        assert tokens(tmp_path, "train").tolist() == [*range(n)]
        hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.glob("*.bin")}
        assert load_meta(tmp_path)["sha256"] == hashes and len(hashes) == shards + 1

def test_fingerprint(tmp_path):
    """It sees meta.json, every byte of a shard of up to 32 MB, and the ends of a larger one."""
    def found(n, *ones):
        array = np.zeros(n, "<u2")
        array[[*ones]] = 1
        write(tmp_path / "train_000000.bin", shard(array))
        return fingerprint(str(tmp_path))
    write(tmp_path / "meta.json", '{"tokenizer": "bytes"}')
    seen = [found(400_000), found(400_000, 5), found(400_000, 123_456), found(400_000, 399_999), found(400_001)]
    seen += [found(20_000_000), found(20_000_000, -1)]
    write(tmp_path / "meta.json", '{"tokenizer": "bytes", "sha256": {}}')
    assert len({*seen, found(400_000)}) == 8 and found(400_000) == found(400_000)

# ----------------------------------------------------------------- whole files, locks, other data

@pytest.mark.parametrize("error", [OSError(28, "No space left"), RuntimeError("CUDA error"), KeyboardInterrupt()])
def test_what_cant_be_written_leaves_the_old_file(tmp_path, monkeypatch, error):
    path = write(tmp_path / "file", "old")
    with monkeypatch.context() as patch, pytest.raises(BaseException) as end:
        patch.setattr(os, "fsync", Mock(side_effect=error))   # A network disk may say only then that it is full.
        with whole_file(path) as file:
            file.write(b"half")
    if isinstance(error, OSError):
        assert str(end.value).startswith(f"{tmp_path}: can't be written ({error}); make room")
    else:
        assert end.value is error
    assert contents(tmp_path) == {str(path): b"old"} and os.listdir(tmp_path) == ["file"]

def test_a_full_disk_leaves_the_old_files(tmp_path):
    """torch says RuntimeError of it."""
    def save(n):
        with whole_file(str(tmp_path / "file")) as file:
            torch.save(torch.zeros(n), file)
    line = f"text --input {write(tmp_path / 'a.txt', PROSE)} --out {tmp_path}/out"
    run(line)
    save(9)
    write(tmp_path / "a.txt", PROSE[::-1])
    before = contents(tmp_path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))   # of each file
    try:
        assert f"{tmp_path}: can't be written ([Errno 27] File too large)" in refused(save, 10**6)
        assert f"{tmp_path}/out: can't be written ([Errno 27] File too large)" in refused(run, f"{line} --overwrite")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert contents(tmp_path) == before and not [*tmp_path.rglob(".unfinished*")]

def test_locked(tmp_path, monkeypatch):
    """One process has it. What others left unfinished is deleted, and nothing else. Where there are no locks, as on
    Windows and some network disks, it may be another process's, and stays."""
    folder = tmp_path / "new" / "folder"
    line = f"text --input {write(tmp_path / 'a.txt', PROSE)} --out {folder}"
    with locked(folder):
        write(folder / ".unfinished-x" / "train_000000.bin", "half")
        write(folder / ".mine", "whole")
        assert "another process" in refused(run, line)
        for name, value in ("fcntl", None), ("fcntl.flock", Mock(side_effect=OSError("no locks here"))):
            with monkeypatch.context() as patch:
                patch.setattr(f"prepare.{name}", value)
                run(line)
        assert (folder / ".unfinished-x").exists() and tokens(folder, "val").any()
    with locked(str(folder)):
        assert sorted(os.listdir(folder)) == [".mine", "meta.json", "train_000000.bin", "val_000000.bin"]

def killed(line, function, at):
    """A prepare.py that gets kill -9 before its call number `at` of os.fsync or os.replace"""
    usual, left = getattr(os, function), list(range(at + 1))
    child = os.fork()
    if child == 0:
        setattr(os, function, lambda *given: usual(*given) if left.pop() else os.kill(os.getpid(), 9))
        try:
            run(line)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

@pytest.mark.parametrize("function, at", [*(("fsync", at) for at in range(3)), *(("replace", at) for at in range(5))])
def test_a_kill_leaves_a_whole_data_set_or_none(tmp_path, function, at):
    """Three files become whole, one by one. Then two old ones go, and all of them move to --out. What a kill leaves
    unfinished is cleared up by the next prepare.py."""
    out, line = tmp_path / "out", f"text --input {write(tmp_path / 'a.txt', PROSE)} --out {tmp_path}/out"
    killed(line, function, min(at, 2))   # No data set is there yet.
    refused(open_split, out, "val")
    run(line)
    before = contents(out)
    write(tmp_path / "a.txt", PROSE[::-1])
    killed(f"{line} --overwrite", function, at)
    if function == "fsync" or at == 0:   # The old one still is as it was.
        assert before.items() < contents(out).items()
        assert "--overwrite" in refused(run, line)
    else:   # It is in the unfinished folder.
        assert "isn't whole" in refused(open_split, out, "val")
        assert {*before.values()} - {before[f"{out}/meta.json"]} <= {*contents(out).values()}
    run(f"{line} --overwrite")
    assert contents(out) != before and contents(out).keys() == before.keys()
    assert sorted(os.listdir(out)) == ["meta.json", "train_000000.bin", "val_000000.bin"]

@pytest.mark.parametrize("more, said", [
    ("", "or say --overwrite"), ("--tokenizer gpt2", "or say --overwrite"), ("--out theirs --overwrite", "has not made"),
    ("--out both --overwrite", "has not made"), ("--out web --overwrite", "has not made"), ("--out run --overwrite", "is a run")])
def test_what_has_to_stay(tmp_path, monkeypatch, more, said):
    """Other data, unless the user says --overwrite; a run, shards of others, and fineweb in any case"""
    monkeypatch.chdir(tmp_path)
    line = f"text --input {write(tmp_path / 'a.txt', PROSE)} --out out"
    for again in line, line, f"{line} --out both":   # Nobody minds the same data.
        run(again)
    write(tmp_path / "a.txt", PROSE[::-1])
    write(tmp_path / "out" / "notes.txt", "mine")
    write(tmp_path / "both" / "train_000001.bin", shard([1, 2]))
    write(tmp_path / "theirs" / "train_000000.bin", shard([1, 2]))   # of which tokenizer?
    write(tmp_path / "web" / "meta.json", '{"name": "fineweb", "tokenizer": "gpt2"}')
    write(tmp_path / "web" / "fineweb_val_000000.bin", shard([1, 2]))
    write(tmp_path / "run" / "ckpt.pt", "weights")
    before = contents(tmp_path)
    sentence = refused(run, f"{line} {more}")
    assert said in sentence and ("--overwrite" in sentence) == ("--overwrite" not in more)
    for folder in "out", "both", "theirs":   # Nor does fineweb replace anything.
        assert "another data set; choose another folder" in refused(run, f"fineweb --overwrite --out {folder}")
    assert contents(tmp_path) == before
    run(f"{line} --overwrite")
    assert contents(tmp_path) != before and (tmp_path / "out" / "notes.txt").read_text() == "mine"

# ----------------------------------------------------------------------------- the command line

REFUSED = {   # a command line -> words of its sentence
    "texts": "'stdlib'", "stdlib --shard 1": "--shard", "text good": "flags begin with --", "--shards 1": "required: name",
    "text": "too little", "text --input one one.txt": "that differ", "text --input empty --out empty": "of --out",
    "text --input good no": "--input no: no such", "text --input fifo": "fifo", "text --input ''": "--input '': is empty",
    "text --input x.gz": "unpack", "text --input x.parquet": "lines of JSON", "text --input good latin": "latin: is empty",
    "text --input x.jsonl": "say --jsonl FIELD", "text --input lines": "say --jsonl FIELD",
    "fineweb --tokenizer bytes": "--tokenizer: fineweb has no use", "steps --jsonl text": "--jsonl: steps has no use",
    "fineweb --shards 104": "--shards 104: must be from 1 to 103", "steps --out ''": "--out", "steps --out good/x": "good/",
    "steps --out good": "is a file"}

@pytest.mark.parametrize("line, words", REFUSED.items())
def test_bad_input(tmp_path, monkeypatch, line, words):
    """One sentence; and no folder has been made."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    os.mkdir(tmp_path / "empty")
    files = {"latin": b"\xe9" * 99, "one": "a", "one.txt": "a", "good": PROSE, "x.gz": b"\x1f\x8b",
             "x.parquet": b"PAR1\0", "x.jsonl": PROSE, "lines/x.ndjson": PROSE}
    for name, content in files.items():
        write(tmp_path / name, content)
    before = sorted(os.listdir())
    assert words in refused(run, line)
    assert sorted(os.listdir()) == before and (tmp_path / "good").read_text() == PROSE
