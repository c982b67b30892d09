#!/usr/bin/env bash
# tiktoken 0.12.0, Python 3.10 to 3.14. Our guess: text that pat_str doesn't match becomes tokens byte by byte, or an
# error, since all 256 bytes are in the table, so that decode(encode(text)) is the text.
# Seen: it is left out, without a word. pat_str doesn't say where to cut, but which pieces are kept: of "a b, c" the
# pattern \w+ keeps "abc". So a tokenizer of one's own whose pattern forgets a kind of sign loses these signs from the
# whole training text, and only a round trip shows it.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q tiktoken==0.12.0 2>/dev/null
"$folder/env/bin/python" - <<'PYTHON'
import importlib.metadata
import tiktoken

print("tiktoken", importlib.metadata.version("tiktoken"))
every_byte = {bytes([i]): i for i in range(256)}
def round_trip(pattern, text):
    encoding = tiktoken.Encoding("mine", pat_str=pattern, mergeable_ranks=every_byte, special_tokens={})
    decoded = encoding.decode(encoding.encode(text))
    print(f"{pattern:12} {text!r} -> {decoded!r}")
    return decoded

text = "a b, c\n"
assert round_trip(r"[\s\S]", text) == text, "this has changed"
assert round_trip(r"\w+", text) == "abc", "this has changed"
assert round_trip(r"\w+|[^\w\s]+", text) == "ab,c", "this has changed"
PYTHON
