"""prepare.py on real files. Downloads come through urllib from file:// addresses; kills are real ones."""
import fcntl, hashlib, json, os, resource, signal, subprocess, sys
import numpy as np
import prepare, pytest, tiktoken, tiktoken_ext.openai_public, torch
from conftest import ROOT

PROSE = "".join(f"{i}. It's a naïve  line — {'字' * (i % 7)}\tof text,\n\n   {i * i} <|endoftext|> 🙂\n"
                for i in range(600))

def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path

def shard(array):
    header = np.array([20240520, 1, len(array)] + 253 * [0], "<i4")
    return bytes(header) + bytes(np.asarray(array, "<u2"))

def run(*words):
    prepare.main(list(map(str, words)))

def refused(*words, call=run):
    with pytest.raises(SystemExit, match="^[^\n]{20,}$") as refusal:
        call(*words)
    return refusal.value.code

def tokens(out, split):
    return np.concatenate(prepare.open_split(out, split))

def contents(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

def test_shards_and_windows(tmp_path):
    good = shard([1, 2, 65535])
    a = prepare.read_shard(write(tmp_path / "good.bin", good))
    assert isinstance(a, np.memmap) and a.dtype == np.uint16 and a.tolist() == [1, 2, 65535]
    wrong = [b"", good[:100], good[:-2], good[:-1], good + b"00", shard([])]
    for place, value in (0, 1), (1, 9), (2, -1):   # magic, version, number of tokens
        wrong.append(good[:4 * place] + np.int32(value).tobytes() + good[4 * place + 4:])
    for content in wrong:
        assert "bad.bin" in refused(write(tmp_path / "bad.bin", content), call=prepare.read_shard)
    shards = [np.arange(10, dtype="<u2"), np.arange(100, 107, dtype="<u2")]
    x, y = prepare.read_windows(shards, np.arange(9), 4)   # six in the first shard, three in the second
    assert x.dtype == torch.int64 and x.shape == (9, 4) and torch.equal(y, x + 1)
    assert x[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 100, 101, 102]
    write(tmp_path / "fineweb_val_000000.bin", shard(range(50)))
    x, y = prepare.val_windows(tmp_path, 9, 5)
    assert x[:, 0].tolist() == [0, 10, 20, 30, 40] and torch.equal(y, x + 1)
    assert "--block_size 50" in refused(tmp_path, 50, 5, call=prepare.val_windows)
    write(tmp_path / "fineweb_val_000000.bin", shard([1, 2, 3, 50257]))   # a token that gpt2 doesn't have
    assert "50257" in refused(tmp_path, 3, 1, call=prepare.val_windows)

def test_meta(tmp_path):
    assert "meta.json" in refused(tmp_path / "nowhere", call=prepare.load_meta)
    for i in (2, 1):   # a folder from modded-nanogpt
        write(tmp_path / f"fineweb_train_{i:06d}.bin", shard([i]))
    assert prepare.load_meta(str(tmp_path)) == dict(name="fineweb", tokenizer="gpt2", vocab_size=50257)
    assert [s.tolist() for s in prepare.open_split(str(tmp_path), "train")] == [[1], [2]]
    assert "val" in refused(tmp_path, "val", call=prepare.open_split)
    for content in "{", "[]", "{}", "[" * 100_000, '{"tokenizer": "bytes", "vocab_size": 5}':
        write(tmp_path / "meta.json", content)
        assert "meta.json" in refused(tmp_path, call=prepare.load_meta)

def test_tokenizers(tmp_path, monkeypatch):
    tokenizer = prepare.get_tokenizer("bytes")
    assert tokenizer.encode_ordinary(PROSE) == list(PROSE.encode()) and tokenizer.n_vocab == 257
    assert prepare.token_bytes(dict(tokenizer="bytes"), 320).tolist() == [1] * 256 + [0] * 64
    whole = write(tmp_path / "whole", "a line\n" * 99 + "end")   # A file of one side is never cut.
    assert [*prepare.tokenize(whole, 0.0, "train", tokenizer)] == [list(whole.read_bytes()), [256]]
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    assert "TIKTOKEN_CACHE_DIR" in refused("gpt2", call=prepare.get_tokenizer)

def test_stdlib(tmp_path):
    """... on a terminal that knows ASCII only, into a link to another disk."""
    link, out = tmp_path / "é", tmp_path / "disk" / "data"
    link.symlink_to(out)
    done = subprocess.run([sys.executable, ROOT / "prepare.py", "stdlib", "--out", link], capture_output=True,
                          text=True, env=os.environ | dict(PYTHONIOENCODING="ascii"))
    assert done.returncode == 0 and done.stderr == "" and "next: python train.py --data" in done.stdout
    assert link.is_symlink() and sorted(os.listdir(tmp_path / "disk")) == ["data"]
    assert prepare.load_meta(out) == dict(name="stdlib", tokenizer="bytes", vocab_size=257)
    train, val = (tokens(out, split) for split in ("train", "val"))
    assert len(train) > 3_000_000 and 0.02 < (val == 256).sum() / (train == 256).sum() < 0.09
    train, val = (side[side < 256].astype("u1").tobytes() for side in (train, val))
    for path in sorted(prepare.Path(os.__file__).parent.glob("[a-m]*.py")):   # Sides go by hash.
        rank = int.from_bytes(hashlib.sha256(path.name.encode()).digest()[:8], "big")
        assert path.read_bytes() in (val if rank < 0.05 * 2**64 else train)

def merging():
    """Like GPT-2's tokenizer, which needs a network: its pattern, but its tokens are the pairs in PROSE."""
    raw = PROSE.encode()
    tokens = [bytes([i]) for i in range(256)] + sorted({raw[i:i + 2] for i in range(len(raw) - 1)})
    return tiktoken.Encoding("gpt2", pat_str=tiktoken_ext.openai_public.r50k_pat_str,
                             mergeable_ranks={token: i for i, token in enumerate(tokens)},
                             special_tokens={"<|endoftext|>": len(tokens)})

@pytest.mark.parametrize("tokenizer", [prepare.get_tokenizer("bytes"), merging()], ids=["bytes", "merging"])
def test_round_trip(tmp_path, monkeypatch, tokenizer):
    """Two texts longer than a piece. In the second there is no good place to cut."""
    monkeypatch.setattr(prepare, "get_tokenizer", lambda name: tokenizer)
    pieces = "four\n" + "line text\n" * 50_000 + PROSE   # A cut at 200,000 would part " text".
    for content, traceless in (pieces, True), (PROSE * 8 + "x" * 400_000 + " " * 300_000, False):
        run("text", "--input", write(tmp_path / "a.txt", content), "--out", tmp_path / "out")
        train, val = (tokens(tmp_path / "out", split).tolist() for split in ("train", "val"))
        assert train.pop() == val.pop() == tokenizer.eot_token not in train + val
        assert tokenizer.decode(train) + tokenizer.decode(val) == content
        assert 0.04 < len(tokenizer.decode(val)) / len(content) < 0.07
        head = tokenizer.decode(train)
        assert not traceless or head.endswith("\n") and train == tokenizer.encode_ordinary(head)

def test_folders_and_links(tmp_path):
    folder, out = tmp_path / "in", tmp_path / "in" / "data"
    for i in range(9):
        write(folder / f"sub{i % 3}" / f"{i}.md", f"this is document {i}\r\n" * 9)
    write(tmp_path / "elsewhere" / "9.md", "this is document 9\r\n" * 9)
    (folder / "link").symlink_to(tmp_path / "elsewhere")   # followed
    (folder / "sub0" / "circle").symlink_to(folder)        # not in circles
    for name in ".hidden", ".git/x", "sub0/__pycache__/x.pyc":
        write(folder / name, b"\xff")
    for _ in range(2):   # The second time there is its own output, which is no input.
        run("text", "--input", folder, folder / "sub0", "--out", out)
    sides = [bytes(tokens(out, split).astype("u1")).split(b"\0") for split in ("train", "val")]   # 256 -> 0
    whole = [head + tail for head, tail in zip(*sides)][:-1]
    assert sorted(whole) == [f"this is document {i}\r\n".encode() * 9 for i in range(10)]

def test_bad_input(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    for name, content in ("latin", b"\xe9" * 99), ("one", "a"), ("good", PROSE):
        write(tmp_path / name, content)
    for words, message in {
            "texts": "stdlib", "stdlib --shard 1": "--shard", "text --input fifo": "fifo",
            "text --input one": "too little", "text --input good latin": "latin",
            "text --input good --out good": "good", f"text --input good --out {'x' * 300}": "name too long",
            "fineweb --tokenizer bytes": "leave this flag out", "steps --input good": "text only", "text": "--input", "fineweb --shards 104": "--shards"}.items():
        with pytest.raises(SystemExit) as e:
            run(*words.split())
        said = capsys.readouterr().err or e.value.code
        assert e.value.code and message in said and said.strip().count("\n") == 0, words
    (tmp_path / "data").rmdir()
    assert sorted(os.listdir()) == ["fifo", "good", "latin", "one"]
    assert (tmp_path / "good").read_text() == PROSE

def test_a_name_does_nothing_to_a_terminal(tmp_path, capsys):
    run("text", "--input", write(tmp_path / "a.txt", PROSE), "--out", tmp_path / "o\x1b]0;x\x07\r\x9b5n")
    told = capsys.readouterr()
    assert told.out.endswith("/o?]0;x???5n\n") and told.out.count("\n") == 1 and told.err == ""
    assert len(tokens(tmp_path / "o\x1b]0;x\x07\r\x9b5n", "val")) > 100

def test_what_ends_a_run_leaves_the_old_data_set(tmp_path, monkeypatch):
    """A kill in either shard, whose leftovers are cleared up; another prepare.py; a full disk; Ctrl-C"""
    out = tmp_path / "out"
    text = ["text", "--input", write(tmp_path / "a.txt", PROSE), "--out", out]
    run(*text)
    before = contents(out)
    for command in (["stdlib", "--out", out], ["fineweb", "--out", out], [*text, "--tokenizer", "gpt2"]):
        assert "another data set" in refused(*command)
    write(tmp_path / "a.txt", PROSE[::-1])
    for kill_at in (1, 2):
        if os.fork() == 0:
            left = list(range(kill_at))
            os.fsync = lambda f: left.pop() or os.kill(os.getpid(), signal.SIGKILL)
            try:
                run(*text)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL
        assert contents(out) == before and list(tmp_path.glob(".out.tmp/*/new/*.bin"))
    other = os.open(tmp_path / ".out.tmp", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_SH)
    assert "another prepare.py" in refused(*text) and (tmp_path / ".out.tmp").exists()
    os.close(other)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    message = refused(*text)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "File too large" in message
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda f: signal.raise_signal(signal.SIGINT))
        assert "interrupted" in refused(*text)
    assert contents(out) == before and sorted(os.listdir(tmp_path)) == ["a.txt", "out"]
    (tmp_path / ".out.tmp").symlink_to(tmp_path / "out")   # is not followed
    assert "not written" in refused(*text)
    (tmp_path / ".out.tmp").unlink()
    run(*text)
    assert contents(out) != before and sorted(os.listdir(tmp_path)) == ["a.txt", "out"]
    write(out / "notes.txt", "mine")
    write(tmp_path / "theirs" / "train_000000.bin", shard([1, 2]))   # of which tokenizer?
    before = contents(tmp_path)
    assert "notes.txt" in refused(*text) and "meta.json" in refused(*text[:-1], tmp_path / "theirs")
    assert contents(tmp_path) == before

def test_shakespeare(tmp_path, monkeypatch):
    out, raw = tmp_path / "out", PROSE.encode() * 10
    source = write(tmp_path / "input.txt", raw)
    monkeypatch.setattr(prepare, "SHAKESPEARE_URL", source.as_uri())
    monkeypatch.setattr(prepare, "SHAKESPEARE_SHA256", hashlib.sha256(raw).hexdigest())
    run("shakespeare", "--out", out)
    head, tail = (bytes(tokens(out, split)[:-1].astype("u1")) for split in ("train", "val"))
    assert head + tail == raw and 0.09 < len(tail) / len(raw) < 0.12
    before = contents(out)
    write(source, "<html>please log in</html>")
    assert "hash" in refused("shakespeare", "--out", out)
    source.unlink()
    assert "network" in refused("shakespeare", "--out", out)
    assert contents(out) == before and sorted(os.listdir(tmp_path)) == ["out"]

def test_fineweb_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    web, out, second = tmp_path / "web", tmp_path / "out", shard(np.arange(30_002))
    for i, name in enumerate(["val_000000", "train_000001", "train_000002", "train_000003"]):
        write(web / f"fineweb_{name}.bin", shard(np.arange(30_000 + i)))
    monkeypatch.setattr(prepare, "FINEWEB_URL", web.as_uri() + "/")
    write(web / "fineweb_train_000002.bin", second[:-2])   # The connection breaks there.
    assert "fineweb_train_000002.bin" in refused("fineweb", "--shards", 2, "--out", out)
    assert len(tokens(out, "train")) == 30_001 and len(os.listdir(out)) == 2   # Training can begin.
    for name in os.listdir(out):
        (web / name).unlink()   # They are not asked for again.
    write(web / "fineweb_train_000002.bin", second)
    run("fineweb", "--shards", 2, "--out", out)
    run("fineweb", "--shards", 3, "--out", out)
    assert len(tokens(out, "train")) == 90_006 and sorted(os.listdir(tmp_path)) == ["out", "web"]
    assert "NOT CHECKED" in capsys.readouterr().out and "gpt2" in (out / "meta.json").read_text()

def simulated(text, about):
    """A text of steps -> (place, steps, cell, symbol) of each symbol that can be known, one after the other"""
    found, place, before = [], 0, None
    for line in text.split("\n"):
        if "|" in line:   # A document has ended: nothing is known of the next line.
            before, place, line = None, place + 1, line[1:]
        if before and len(before) == about["cells"] + 1:
            row = [int(c) for c in before[1:]]
            for step in range(ord(before[0]) - ord("a")):
                row = [about["table"][row[j - 1] if j else 0][row[j]] for j in range(len(row))]
            found += [(place + 1 + j, ord(before[0]) - ord("a"), j, row[j]) for j in range(len(line) - 1)]
        before, place = line if line[:1].isalpha() else None, place + len(line) + 1
    return found

@pytest.mark.parametrize("flags", [["--cells", 4], ["--symbols", 6, "--rows", 6, "--cells", 4, "--most", 2, "--table", 3]])
def test_steps(tmp_path, monkeypatch, flags):
    """Each symbol that can be known is what a plain simulation says, and steps_asked finds just those."""
    monkeypatch.setattr(prepare, "DOCUMENTS", dict(train=60, val=20))
    run("steps", "--out", tmp_path / "data", *flags)
    about = prepare.load_meta(tmp_path / "data")["steps"]
    table = np.array(about["table"])
    n, rows = len(table), len(np.unique(table, axis=0))
    assert rows == (6 if flags[1] == 6 else 2) and (np.sort(table, axis=1) == np.arange(n)).all()
    assert (table == table[np.arange(n) % rows]).all()                       # a row for even, and one for odd
    assert (np.sort(table[:rows] % rows, axis=0).T == np.arange(rows)).all()   # They lead to different classes.
    train, val = (tokens(tmp_path / "data", split) for split in ("train", "val"))
    assert len(train) == 60 * (16 * (about["cells"] + 2) + 1) and not np.array_equal(train[:2000], val[:2000])
    x, y = prepare.val_windows(tmp_path / "data", 80, 40)
    full = torch.cat((x[:, :1], y), dim=1)
    steps, cell = prepare.steps_asked(full, about["cells"])
    for row, row_steps, row_cell in zip(full.tolist(), steps.tolist(), cell.tolist()):
        text = "".join("|" if token == 256 else chr(token) for token in row)
        known = simulated(text, about)
        assert known == [(t + 1, row_steps[t], row_cell[t], int(text[t + 1]))
                         for t in range(80) if row_steps[t] >= 0]
    assert {*steps.flatten().tolist()} == {*range(-1, about["most"] + 1)}
    by_hand = prepare.next_line([[3, 0, 2, 0, 1]], [[3, 1, 2, 0], [2, 0, 3, 1], [1, 2, 0, 3], [0, 3, 1, 2]])
    assert by_hand.tolist() == [[0, 0, 2, 1, 1]]

def test_inputs_add_up_and_none_is_empty(tmp_path):
    for name in "one", "two":
        write(tmp_path / name, f"text {name} " * 200)
    for missing in "", str(tmp_path / "nothing"):
        assert f"--input ['{missing}']" in refused("text", "--out", tmp_path / "new" / "data", "--input", missing)
    assert not (tmp_path / "new").exists()
    run("text", "--out", tmp_path / "data", "--input", tmp_path / "one", "--input", tmp_path / "two")
    assert {b"one", b"two"} <= {*bytes(tokens(tmp_path / "data", "train").clip(0, 255).astype("u1")).split(b" ")}
    assert "\x1b" not in refused("steps", "--out", tmp_path / "x", "--\x1b[31m")

def test_flags_of_other_data_sets(tmp_path, monkeypatch):
    """... are refused, and so is the folder one is in."""
    for words in ("steps --shards 5", "stdlib --cells 5", "text --table 1 --input /", "fineweb --input /"):
        name, flag, *_ = words.split()
        assert f"{flag}: is for" in refused(*words.split(), "--out", tmp_path / "new")
    monkeypatch.chdir(tmp_path)
    assert "where you are" in refused("steps", "--out", ".") and "where you are" in refused("steps", "--out", "..")

def test_refused_steps(tmp_path):
    for flags in "--symbols 11", "--symbols 1", "--rows 3", "--most 26", "--cells 1", "--tokenizer gpt2":
        assert flags.split()[0] in refused("steps", "--out", tmp_path / "data", *flags.split())
    run("steps", "--out", tmp_path / "data")
    meta = json.loads((tmp_path / "data/meta.json").read_text())
    for wrong in 5, {}, meta["steps"] | dict(table=5), meta["steps"] | dict(table=[[9]]), meta["steps"] | dict(most="x"), \
            meta["steps"] | dict(cells=12.0):
        write(tmp_path / "data/meta.json", json.dumps(meta | dict(steps=wrong)))
        assert "meta.json" in refused(tmp_path / "data", call=prepare.load_meta)
