"""
Your own files to documents, for prepare.py text. A document is a text that is read as one whole: a
file, or with --jsonl FIELD a line of a file. Some are held out, to validate with.
"""
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from flags import flag
from sentences import refuse, say

# ------------------------------------------------------------------------------------ what text is

def text_of(path):
    """The text of a file: it is UTF-8, a byte order mark at its start is dropped, and all else
    stays, line ends too. None if it is no text, or empty"""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    # UTF-16 has NUL bytes, and so has what is no text at all.
    return text if text and "\0" not in text else None

def read_text(path):
    """The text of a file, as text_of. SystemExit if there is none"""
    text = text_of(path)
    if text is None:
        refuse(f"{path}: is empty, or not UTF-8 text; convert it, as by iconv -f ENCODING -t "
               f"UTF-8, or name another")
    return text

def text_or_file(value):
    """--prompt and --text may be a text, or name a file: then this is the text of the file."""
    return read_text(value) if os.path.isfile(value) else value

# --------------------------------------------------------------------------------------- documents

def files_in(path, seen):
    """The files at or below a path. Hidden ones and caches are left out, links are followed.

    seen: the real paths of what has come before. It grows, so nothing comes twice."""
    if os.path.realpath(path) in seen:
        return []
    seen.add(os.path.realpath(path))
    if not path.is_dir():
        return [path] if path.is_file() else []
    names = sorted(name for name in os.listdir(path) if name[0] != "." and name != "__pycache__")
    return [file for name in names for file in files_in(path / name, seen)]

def json_lines(path, text, field):
    """The text of a file whose lines are JSON objects. Yields what each one has in that field."""
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

def cut(text, share):
    """A text -> two. The second has about this share of it, and begins a line if it can."""
    place = int(len(text) * (1 - share))
    newline = text.rfind("\n", place - len(text) // 100, place)   # at most 1 % earlier
    if newline >= 0:
        place = newline + 1
    return text[:place], text[place:]

def hold_out(documents):
    """Texts -> texts for training, texts for validation.

    Of a text of more than 1,000 characters, and more than a twentieth of all, the last 5 % are for
    validation. Of the others every 20th is, as a whole: the end of a short one may be what matters.
    SystemExit if nothing is left for training"""
    limit = max(1000, sum(map(len, documents)) / 20)
    short = [text for text in documents if len(text) <= limit]
    long = [text for text in documents if len(text) > limit]
    if len(documents) < 2 and not long:
        refuse("--input: has too little text outside of --out; name several documents, or one of "
               "more than 1,000 characters")
    train = [text for number, text in enumerate(short) if number % 20 != 0]
    val = [text for number, text in enumerate(short) if number % 20 == 0]
    say(f"documents: {len(train):,} for training, {len(val):,} for validation, {len(long):,} cut "
        f"at 95 % for both")
    for text in long:
        head, tail = cut(text, 0.05)
        train.append(head)
        val.append(tail)
    return train, val

def own_text(config):
    """Your own documents -> texts for training, texts for validation.

    config: the flags of TextConfig; and out, the data set's folder"""
    if not config.input:
        refuse("prepare.py: text: needs files or folders; name them with --input")
    documents, passed_over = [], []
    seen = {os.path.realpath(config.out)}   # --out itself is not read.
    for named in map(Path, config.input):
        for file in files_in(named, seen):
            # A file that is named must be text. In a folder there may be pictures, too.
            text = read_text(file) if file == named else text_of(file)
            if text is None:
                passed_over.append(file)
            elif config.jsonl:
                documents.extend(json_lines(file, text, config.jsonl))
            else:
                documents.append(text)
    if passed_over:
        say(f"files passed over: {len(passed_over):,}, empty or not UTF-8 text, such as "
            f"{passed_over[0]}")
    return hold_out(documents)

# ---------------------------------------------------------------------------------------- the flags

@dataclass
class TextConfig:
    input: list = flag(None, "UTF-8 files, and folders of them", group="your own text")
    jsonl: str = flag("", "lines are JSON objects, and this field of theirs is the text")

    def problems(self):
        """parse, which reads the command line, refuses with these sentences."""
        for path in self.input or []:
            if not os.path.isfile(path) and not os.path.isdir(path):
                yield f"--input {shlex.quote(path)}: no such file or folder"
            elif path.endswith(".jsonl") and not self.jsonl:
                yield f"--input {path}: which field of its lines is the text? say --jsonl FIELD"
