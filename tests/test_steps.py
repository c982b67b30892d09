"""The steps text against a plain simulation, its table, and the page that explains it"""
import itertools

import numpy as np
import prepare, pytest, torch
from prepare import PUZZLE, next_line

def test_each_line_follows(tmp_path, monkeypatch):
    """... from the one before, in as many steps as that asks for, by the table in meta.json."""
    monkeypatch.setattr(prepare, "SPLITS", dict(train=(60, 5), val=(20, 3)))
    prepare.main(["steps", "--out", str(tmp_path)])
    table, firsts = prepare.load_meta(tmp_path)["steps"]["table"], []
    for split, n in ("val", 20), ("train", 60):
        [tokens] = prepare.open_split(tmp_path, split)
        documents = tokens.reshape(n, 16 * (12 + 2) + 1)
        assert (documents[:, -1] == 256).all()   # end-of-text
        letters = []
        for document in documents[:, :-1].astype("u1"):
            lines = bytes(document).decode().splitlines()
            for line, answer in itertools.pairwise(lines):
                row = [int(digit) for digit in line[1:]]
                for _ in range(ord(line[0]) - ord("a")):
                    row = [table[row[j - 1] if j else 0][row[j]] for j in range(12)]
                assert [int(digit) for digit in answer[1:]] == row
            letters += [ord(line[0]) - ord("a") for line in lines]
        firsts.append(documents[:20, 1:13])
    assert (firsts[0] != firsts[1]).any(1).all()   # The two splits begin otherwise.
    share = 0.85 ** np.arange(10)   # Few steps come more often.
    found = np.bincount(letters, minlength=10) / len(letters)
    assert found == pytest.approx(share / share.sum(), abs=0.04) and len(letters) == 60 * 16

def test_table():
    """Of the neighbour only counts whether it is even. Nothing is lost; where one row leads to an even digit, the other
    leads to an odd one."""
    table = np.array(PUZZLE["table"])
    even, odd = prepare.ROWS
    assert (table[::2] == even).all() and (table[1::2] == odd).all() and table.shape == (10, 10)
    assert sorted(even) == sorted(odd) == list(range(10)) and all((a + b) % 2 for a, b in zip(even, odd))

def test_the_page_of_the_puzzle():
    """Its first line leads to its second as it says."""
    page = prepare.Path(prepare.__file__).read_text()
    digits = torch.tensor([[int(digit) for digit in "314159265358"]])
    for after in "587723131420", "108515848740":
        digits = next_line(digits, PUZZLE["table"])
        assert "".join(map(str, digits[0].tolist())) == after and after in page
