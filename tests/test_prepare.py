"""prepare.py with real files, real sockets on 127.0.0.1 and real processes; nothing of it is replaced."""
import hashlib, http.server, json, os, re, resource, signal, subprocess, sys, threading, time, tracemalloc
import numpy as np
import pytest
import tiktoken
from programs import ROOT, start

import prepare

PROSE = "".join(f"{i}. It's a naïve  line — {'字' * (i % 7)}\tof text,\n\n   {i * i} <|endoftext|> 🙂\n"
                for i in range(600))

def run(*args, before="", **kwargs):
    """The command line in a process of its own; `before` runs between its import and its main."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import prepare; {before}; prepare.main()"
    words = ["-c", code] if before else [str(ROOT / "prepare.py")]
    return subprocess.run([sys.executable, *words, *map(str, args)], capture_output=True, text=True, **kwargs)

def refused(done, *words):
    """One clear sentence: one line, no traceback, a non-zero exit, and the words that name what to do."""
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for word in words:
        assert str(word) in done.stderr, done.stderr

def refusal(function, *args):
    with pytest.raises(SystemExit) as e:
        function(*args)
    assert "\n" not in e.value.code
    return e.value.code

def tokens(out, split):
    return np.concatenate(prepare.open_split(out, split))

def contents(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}

def shard(array):
    header = np.array([20240520, 1, len(array)] + 253 * [0], "<i4")
    return header.tobytes() + np.asarray(array, "<u2").tobytes()

def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path

def tokenizer(name):
    try:
        return prepare.get_tokenizer(name)
    except SystemExit as e:
        pytest.skip(f"no network and no table: {e}")

# ---------------------------------------------------------------- tokenizers

def test_bytes_tokenizer():
    enc = prepare.get_tokenizer("bytes")
    assert isinstance(enc, tiktoken.Encoding) and enc.n_vocab == 257 and enc.eot_token == 256
    assert enc.encode_ordinary(PROSE) == list(PROSE.encode())
    assert enc.decode_bytes(list(range(256))) == bytes(range(256))
    assert enc.encode("a<|endoftext|>", allowed_special="all") == [97, 256]
    begin = time.time()
    assert len(enc.encode_ordinary("x" * 1_000_000)) == 1_000_000
    assert time.time() - begin < 2

def test_unknown_tokenizer():
    assert "--tokenizer" in refusal(prepare.get_tokenizer, "cl100k_base")

def test_gpt2_table_out_of_reach(tmp_path):
    env = {**os.environ, "TIKTOKEN_CACHE_DIR": str(tmp_path / "empty"), "no_proxy": "", "NO_PROXY": "",
           "https_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    refused(run("stdlib", "--tokenizer", "gpt2", "--out", tmp_path / "out", env=env), "TIKTOKEN_CACHE_DIR")
    assert not (tmp_path / "out").exists()

def test_vocabulary_too_large(tmp_path):
    ranks = {bytes([i]): i for i in range(256)}
    ranks |= {b"%06d" % i: 256 + i for i in range(70000)}
    enc = tiktoken.Encoding("large", pat_str=r"\S+|\s+", mergeable_ranks=ranks,
                            special_tokens={"<|endoftext|>": 70256})
    file = write(tmp_path / "a.txt", PROSE)
    documents = prepare.hold_out_tails([file], 0.1)
    assert "65536" in refusal(prepare.write_text, tmp_path / "out", "x", enc, documents, "a")
    assert not (tmp_path / "out").exists()

# ---------------------------------------------------------------- stdlib

def test_stdlib(tmp_path, capsys):
    a, b = tmp_path / "a", tmp_path / "b"
    done = run("stdlib", "--out", a)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.strip().endswith(f"python train.py --data {a}")
    prepare.main(["stdlib", "--out", str(b)])
    assert contents(a) == contents(b)
    assert sorted(contents(a)) == ["meta.json", "train_000000.bin", "val_000000.bin"]
    train, val, meta = tokens(a, "train"), tokens(a, "val"), prepare.load_meta(a)
    assert (meta["train_tokens"], meta["val_tokens"]) == (len(train), len(val))
    assert (meta["name"], meta["tokenizer"], meta["vocab_size"]) == ("stdlib", "bytes", 257)
    assert len(train) > 3_000_000 and train.max() == 256 and train[-1] == 256
    files = int((train == 256).sum()), int((val == 256).sum())
    assert 0.02 < files[1] / sum(files) < 0.09
    assert "def " in bytes(train[:100_000][train[:100_000] < 256].astype("u1")).decode("utf-8", "ignore")

def test_held_out_files_are_disjoint_stable_and_about_five_percent(tmp_path):
    files = {f"d/{i}.py": write(tmp_path / f"{i}.py", f"{i}") for i in range(1000)}
    train, val = ({path for path, _, _ in docs} for docs in prepare.hold_out_files(files))
    assert not train & val and len(train | val) == 1000 and 30 <= len(val) <= 70
    fewer = {name: path for name, path in files.items() if not name.endswith("7.py")}
    assert {p for p, _, _ in prepare.hold_out_files(fewer)[1]} == val & set(fewer.values())
    for n in (20, 21, 22, 25, 30):  # never an empty side
        assert all(prepare.hold_out_files(dict(list(files.items())[:n])))

# ---------------------------------------------------------------- text

@pytest.mark.parametrize("name", ["bytes", "gpt2"])
@pytest.mark.parametrize("chunk", [16, 1000, 1 << 18])
def test_round_trip_one_file(tmp_path, monkeypatch, name, chunk):
    enc = tokenizer(name)
    monkeypatch.setattr(prepare, "CHUNK", chunk)
    file, out = write(tmp_path / "a.txt", PROSE), tmp_path / "out"
    prepare.main(["text", "--input", str(file), "--tokenizer", name, "--out", str(out)])
    train, val = tokens(out, "train"), tokens(out, "val")
    assert train[-1] == val[-1] == enc.eot_token and (train == enc.eot_token).sum() == 1
    head, tail = enc.decode(train[:-1].tolist()), enc.decode(val[:-1].tolist())
    assert head + tail == PROSE
    assert 0.04 < len(tail) / len(PROSE) < 0.07
    if chunk >= 1000:  # then the chunks leave no trace: the tokens are the whole text's
        assert train[:-1].tolist() == enc.encode_ordinary(head) and head.endswith("\n")

@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_runs_without_a_place_to_cut(tmp_path, monkeypatch, name):
    enc = tokenizer(name)
    monkeypatch.setattr(prepare, "CHUNK", 1000)
    for i, content in enumerate(["x" * 9999, " " * 9999, "\n" * 9999, "字" * 3333, "a " + "b" * 9999]):
        out = tmp_path / str(i)
        file = write(tmp_path / f"{i}.txt", content)
        prepare.main(["text", "--input", str(file), "--tokenizer", name, "--out", str(out)])
        assert "".join(enc.decode(tokens(out, s)[:-1].tolist()) for s in ("train", "val")) == content

def test_folder(tmp_path):
    folder, out = tmp_path / "in", tmp_path / "in" / "data"
    for i in range(40):
        write(folder / f"sub{i % 3}" / f"{i}.md", f"document {i}\r\n")
    write(folder / ".hidden", b"\xff")
    write(folder / ".git" / "x", b"\xff")
    write(folder / "sub0" / "__pycache__" / "x.pyc", b"\xff")
    write(folder / "empty.txt", "")
    command = ["text", "--input", str(folder), str(folder / "sub0"), "--out", str(out)]
    prepare.main(command)
    first = contents(out)
    prepare.main(command)  # its own output, which lies in that folder, is not input
    assert contents(out) == first
    both = np.concatenate([tokens(out, "train"), tokens(out, "val")])
    ends = np.flatnonzero(both == 256) + 1
    documents = [bytes(d[:-1].astype("u1")).decode() for d in np.split(both, ends)[:-1]]
    assert sorted(documents) == sorted(f"document {i}\r\n" for i in range(40))
    assert prepare.load_meta(out)["val_tokens"] == len(tokens(out, "val")) > 0

def test_shards_and_stale_shards(tmp_path, monkeypatch):
    file, out = write(tmp_path / "a.txt", "abcdefghi\n" * 1000), tmp_path / "out"
    command = ["text", "--input", str(file), "--out", str(out)]
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 1000)
    prepare.main(command)
    shards = prepare.open_split(out, "train")
    assert len(shards) == 10 and {len(s) for s in shards[:-1]} == {1000}
    many = tokens(out, "train").tolist()
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 10**8)
    prepare.main(command)
    assert sorted(contents(out)) == ["meta.json", "train_000000.bin", "val_000000.bin"]
    assert tokens(out, "train").tolist() == many
    assert sorted(os.listdir(out)) == sorted(contents(out))  # no temporary folder either

def test_memory_stays_bounded(tmp_path):
    file = write(tmp_path / "large.txt", b"The quick brown fox jumps over it.\n" * 1_800_000)
    tracemalloc.start()
    prepare.main(["text", "--input", str(file), "--out", str(tmp_path / "out")])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert file.stat().st_size > 60e6 and peak < 8e6

# ---------------------------------------------------------------- bad input, one sentence

def test_bad_input(tmp_path):
    out = tmp_path / "out"
    latin, empty = write(tmp_path / "latin.txt", "é".encode("latin-1")), write(tmp_path / "empty.txt", "")
    cut, good = write(tmp_path / "cut.txt", "字".encode()[:2]), write(tmp_path / "good.txt", PROSE)
    for args, words in [(["text", "--input", tmp_path / "no.txt"], ["no.txt", "--input"]),
                        (["text", "--input", empty], ["empty.txt", "--input"]),
                        (["text", "--input", write(tmp_path / "one.txt", "a")], ["one.txt", "too little"]),
                        (["text", "--input", latin], ["latin.txt", "UTF-8"]),
                        (["text", "--input", good, cut], ["cut.txt", "UTF-8"]),
                        (["text", "--input", good, "--tokenizer", "nope"], ["--tokenizer", "nope"]),
                        (["text"], ["--input"]), (["texts"], ["text"]), ([], ["--help"]),
                        (["fineweb", "--tokenizer", "bytes"], ["--tokenizer gpt2"]),
                        (["fineweb", "--shards", "104"], ["--shards"])]:
        refused(run(*args, *(["--out", out] if args else [])), *words)
        assert not list(tmp_path.rglob("*.bin"))
    refused(run("text", "--input", good, "--out", good), "good.txt")
    assert good.read_text(encoding="utf-8") == PROSE

def test_text_in_a_folder_named_as_another_data_set(tmp_path):
    """It is text all the same: made anew by the same command, and not replaced by that data set's."""
    good, out = write(tmp_path / "good.txt", PROSE), tmp_path / "stdlib"
    for _ in range(2):
        prepare.main(["text", "--input", str(good), "--out", str(out)])
    refused(run("stdlib", "--out", out), "--out", "already holds text")

def test_other_tokenizer_and_other_data_are_kept(tmp_path):
    tokenizer("gpt2")
    good, out = write(tmp_path / "good.txt", PROSE), tmp_path / "out"
    prepare.main(["text", "--input", str(good), "--out", str(out)])
    before = contents(out)
    refused(run("text", "--input", good, "--tokenizer", "gpt2", "--out", out), "--out", "bytes")
    refused(run("fineweb", "--out", out), "--out", "train_000000.bin")
    refused(run("stdlib", "--out", out), "--out", "already holds text")
    assert contents(out) == before
    theirs = write(tmp_path / "web" / "fineweb_train_000001.bin", shard([1, 2])).parent
    refused(run("text", "--input", good, "--tokenizer", "gpt2", "--out", theirs), "--out")
    assert list(contents(theirs)) == ["fineweb_train_000001.bin"]

def limit_file_size():
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

def test_full_disk(tmp_path):
    good, out = write(tmp_path / "good.txt", PROSE), tmp_path / "out"
    prepare.main(["text", "--input", str(good), "--out", str(out)])
    before = contents(out)
    refused(run("text", "--input", good, "--out", out, preexec_fn=limit_file_size), "no room", "--out")
    assert contents(out) == before and sorted(os.listdir(out)) == sorted(before)  # no leftovers
    refused(run("text", "--input", good, "--out", tmp_path / "new", preexec_fn=limit_file_size), "no room")
    assert not os.listdir(tmp_path / "new")

def test_interrupt(tmp_path):
    tokenizer("gpt2")
    good, out = write(tmp_path / "good.txt", PROSE * 3000), tmp_path / "out"   # seconds of work
    process = start("prepare.py", "text", "--tokenizer", "gpt2", "--input", good, "--out", out)
    while not list(out.glob(".tmp-*/*.bin")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode != 0 and err.startswith("prepare.py: interrupted") and err.count("\n") == 1
    assert not os.listdir(out)

# ---------------------------------------------------------------- shards and meta.json

def test_read_shard(tmp_path):
    good = shard([1, 2, 65535])
    a = prepare.read_shard(write(tmp_path / "good.bin", good))
    assert isinstance(a, np.memmap) and a.dtype == np.uint16 and a.tolist() == [1, 2, 65535]
    magic = np.frombuffer(good, "<i4", 256).copy()
    magic[0] = 1
    version, negative = magic.copy(), magic.copy()
    version[:2], negative[0], negative[2] = (20240520, 9), 20240520, -1
    for name, content in {"empty": b"", "short": good[:100], "truncated": good[:-2], "odd": good[:-1],
                          "longer": good + b"\0\0", "magic": magic.tobytes() + good[1024:],
                          "version": version.tobytes() + good[1024:], "negative": negative.tobytes(),
                          "none": shard([])}.items():
        message = refusal(prepare.read_shard, write(tmp_path / f"{name}.bin", content))
        assert f"{name}.bin" in message and "delete" in message
    assert "no.bin" in refusal(prepare.read_shard, tmp_path / "no.bin")

def test_load_meta_and_open_split(tmp_path):
    message = refusal(prepare.load_meta, tmp_path / "data" / "shakespeare")
    assert "--data" in message and "python prepare.py shakespeare" in message
    (tmp_path / "mine").mkdir()
    assert "python prepare.py text --input" in refusal(prepare.load_meta, tmp_path / "mine")
    assert "--data" in refusal(prepare.open_split, tmp_path / "mine", "train")
    write(tmp_path / "ours" / "train_000000.bin", shard([1]))  # of which tokenizer?
    assert "meta.json is missing" in refusal(prepare.load_meta, tmp_path / "ours")
    for i in (2, 1):  # a folder from modded-nanogpt, without a meta.json
        write(tmp_path / "mine" / f"fineweb_train_{i:06d}.bin", shard([i]))
    meta = prepare.load_meta(str(tmp_path / "mine"))
    assert (meta["tokenizer"], meta["vocab_size"]) == ("gpt2", 50257)
    assert [s.tolist() for s in prepare.open_split(str(tmp_path / "mine"), "train")] == [[1], [2]]
    assert "val" in refusal(prepare.open_split, tmp_path / "mine", "val")
    for content in (b"{", b"[]", b"{}", b"\xff", b'{"tokenizer": "x", "vocab_size": 5}'):
        write(tmp_path / "mine" / "meta.json", content)
        assert "meta.json" in refusal(prepare.load_meta, tmp_path / "mine")

# ---------------------------------------------------------------- downloads, from a real server

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        content = server.files.get(self.path)
        asked = re.match(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))
        first = int(asked[1]) if server.resumes else 0
        server.log.append((self.path, first))
        if content is None or first >= len(content):
            return self.send_error(404 if content is None else 416)
        self.send_response(206 if server.resumes else 200)
        self.send_header("Content-Length", len(content) - first)
        self.end_headers()
        self.wfile.write(content[first:len(content) if server.drop is None else server.drop])

    def log_message(self, *args):
        pass

@pytest.fixture
def server(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.log, server.resumes, server.drop = {}, [], True, None
    server.url = f"http://127.0.0.1:{server.server_address[1]}/"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("no_proxy", "*")
    raw = PROSE.encode() * 10
    server.files["/input.txt"] = raw
    monkeypatch.setattr(prepare, "SHAKESPEARE_URL", server.url + "input.txt")
    monkeypatch.setattr(prepare, "SHAKESPEARE_SIZE", len(raw))
    monkeypatch.setattr(prepare, "SHAKESPEARE_SHA256", hashlib.sha256(raw).hexdigest())
    monkeypatch.setattr(prepare, "FINEWEB_URL", server.url)
    yield server
    server.shutdown()
    server.server_close()

def test_shakespeare(server, tmp_path):
    out = tmp_path / "out"
    prepare.main(["shakespeare", "--out", str(out)])
    head, tail = (bytes(tokens(out, s)[:-1].astype("u1")) for s in ("train", "val"))
    assert head + tail == server.files["/input.txt"] and 0.09 < len(tail) / len(head + tail) < 0.12
    prepare.main(["shakespeare", "--out", str(out)])
    assert len(server.log) == 1  # the second time from the copy
    write(out / "input.txt", b"damaged")
    prepare.main(["shakespeare", "--out", str(out)])
    assert len(server.log) == 2

@pytest.mark.parametrize("resumes", [True, False])
def test_resume(server, tmp_path, resumes):
    out, raw = tmp_path / "out", server.files["/input.txt"]
    server.drop = 100_000  # the connection breaks here
    message = refusal(prepare.main, ["shakespeare", "--out", str(out)])
    assert "input.txt" in message and "again" in message
    assert os.listdir(out) == ["input.txt.tmp"] and (out / "input.txt.tmp").read_bytes() == raw[:100_000]
    server.drop, server.resumes = None, resumes
    prepare.main(["shakespeare", "--out", str(out)])
    assert server.log[-1] == ("/input.txt", 100_000 if resumes else 0)
    assert (out / "input.txt").read_bytes() == raw and not (out / "input.txt.tmp").exists()

def test_resume_of_a_whole_file(server, tmp_path):
    write(tmp_path / "input.txt.tmp", server.files["/input.txt"])  # stopped before the rename
    prepare.main(["shakespeare", "--out", str(tmp_path)])
    assert (tmp_path / "input.txt").exists() and prepare.load_meta(tmp_path)["name"] == "shakespeare"

def test_wrong_download(server, tmp_path):
    server.files["/input.txt"] = server.files["/input.txt"][:-1] + b"?"
    server.files["/fineweb_val_000000.bin"] = b"<html>please log in</html>" * 99
    assert "sha256" in refusal(prepare.main, ["shakespeare", "--out", str(tmp_path)])
    assert "fineweb_val" in refusal(prepare.main, ["fineweb", "--out", str(tmp_path)])
    assert not os.listdir(tmp_path)  # what is wrong is not kept to be continued
    del server.files["/fineweb_val_000000.bin"]
    message = refusal(prepare.main, ["fineweb", "--out", str(tmp_path)])
    assert "fineweb_val_000000.bin" in message and "Not Found" in message

def test_no_network(tmp_path):
    for name in ("shakespeare", "fineweb"):
        before = "prepare.SHAKESPEARE_URL = prepare.FINEWEB_URL = 'http://127.0.0.1:9/'"
        env = {**os.environ, "no_proxy": "*"}
        refused(run(name, "--out", tmp_path, before=before, env=env), "127.0.0.1:9", "network")
    assert not list(tmp_path.rglob("*.bin"))

def test_full_disk_while_downloading(server, tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    (tmp_path / "input.txt.tmp").symlink_to("/dev/full")  # every write to it fails with ENOSPC
    assert "no room" in refusal(prepare.main, ["shakespeare", "--out", str(tmp_path)])
    assert not (tmp_path / "input.txt").exists()

def test_fineweb(server, tmp_path, capsys):
    rng = np.random.default_rng(0)
    for i, name in enumerate(["val_000000", "train_000001", "train_000002", "train_000003"]):
        server.files[f"/fineweb_{name}.bin"] = shard(rng.integers(0, 50257, 300_000 + i))
    server.drop = 400_000
    refusal(prepare.main, ["fineweb", "--shards", "2", "--out", str(tmp_path)])
    assert os.listdir(tmp_path) == ["fineweb_val_000000.bin.tmp"]
    server.drop = None
    prepare.main(["fineweb", "--shards", "2", "--out", str(tmp_path)])
    assert server.log[1] == ("/fineweb_val_000000.bin", 400_000)
    assert sorted(os.listdir(tmp_path)) == ["fineweb_train_000001.bin", "fineweb_train_000002.bin",
                                            "fineweb_val_000000.bin", "meta.json"]
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert (meta["train_tokens"], meta["val_tokens"], meta["vocab_size"]) == (600_003, 300_000, 50257)
    requests = len(server.log)
    prepare.main(["fineweb", "--shards", "3", "--out", str(tmp_path)])
    assert len(server.log) == requests + 1  # only the new one
    assert "python train.py" in capsys.readouterr().out
    with open(tmp_path / "fineweb_train_000002.bin", "r+b") as f:
        f.truncate(5000)
    message = refusal(prepare.main, ["fineweb", "--shards", "3", "--out", str(tmp_path)])
    assert "fineweb_train_000002.bin" in message
