"""
Your own files to documents, for prepare.py text. A document is a text that is read as one whole: a
file, or with --jsonl FIELD a line of a file. Some are held out, to validate with.
"""
import json
import os
from pathlib import Path

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
    """For flags of sample.py and analyze.py that are a text, or the name of a file with one"""
    return read_text(value) if os.path.isfile(value) else value

# --------------------------------------------------------------------------------------- documents

def own_text(config):
    """Your own documents -> texts for training, texts for validation. config: PrepareConfig"""
    documents, passed_over = [], []
    seen = {os.path.realpath(config.out)}   # The data set's own folder may be in one of yours.
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

def files_in(path, seen):
    """Yields the files at or below a path, by name. Hidden ones and caches are left out, and links
    are followed.

    seen: the real paths of what has come before. It grows, so that nothing comes twice, and a link
    to a folder above leads nowhere."""
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

def hold_out(documents):
    """Texts -> texts for training, texts for validation. SystemExit if nothing is left for training

    A text is long if it has more than 1,000 characters, and more than 5 % of all. Of a long one the
    last 5 % are held out; of the short ones every 20th, as a whole: the end of a short one may be
    what matters."""
    limit = max(1000, sum(map(len, documents)) / 20)
    short = [text for text in documents if len(text) <= limit]
    long = [text for text in documents if len(text) > limit]
    val = short[::20]
    train = [text for number, text in enumerate(short) if number % 20 != 0]
    n_train, n_val = len(train), len(val)   # of those that stay whole
    for text in long:
        head, tail = cut(text, 0.05)
        train.append(head)
        val.append(tail)
    if not train:
        refuse("--input: has too little text (the folder of --out isn't read); name several "
               "documents, or one of more than 1,000 characters")
    say(f"documents: {n_train:,} for training, {n_val:,} for validation, {len(long):,} cut at 95 % "
        f"for both")
    return train, val

def cut(text, share):
    """A text -> two. The second has about this share of it, and begins a line if it can."""
    place = int(len(text) * (1 - share))
    newline = text.rfind("\n", place - len(text) // 100, place)   # at most 1 % earlier
    if newline >= 0:
        place = newline + 1
    return text[:place], text[place:]
