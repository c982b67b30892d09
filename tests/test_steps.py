"""The steps text against a plain simulation, its tables, and the page that explains it"""
import numpy as np
import prepare, pytest, torch
from prepare import make_table, next_line

@pytest.mark.parametrize("symbols, rows, cells, most, seed", [(10, 2, 4, 9, 0), (6, 6, 4, 2, 3)])
def test_each_line_follows(tmp_path, monkeypatch, symbols, rows, cells, most, seed):
    """... from the one before, in as many steps as that asks for, by the table in meta.json."""
    monkeypatch.setattr(prepare, "SPLITS", dict(train=(60, 5), val=(20, 3)))
    flags = f"--symbols {symbols} --rows {rows} --cells {cells} --most {most} --table_seed {seed}"
    prepare.main(["steps", "--out", str(tmp_path), *flags.split()])
    table, firsts = prepare.load_meta(tmp_path)["steps"]["table"], []
    for split, n in ("val", 20), ("train", 60):
        [tokens] = prepare.open_split(tmp_path, split)
        documents = tokens.reshape(n, 16 * (cells + 2) + 1)
        assert (documents[:, -1] == 256).all()   # end-of-text
        letters = []
        for document in documents[:, :-1].astype("u1"):
            lines = bytes(document).decode().splitlines()
            for line, answer in zip(lines, lines[1:]):
                row = [int(digit) for digit in line[1:]]
                for _ in range(ord(line[0]) - ord("a")):
                    row = [table[row[j - 1] if j else 0][row[j]] for j in range(cells)]
                assert [int(digit) for digit in answer[1:]] == row
            letters += [ord(line[0]) - ord("a") for line in lines]
        firsts.append(documents[:20, 1:1 + cells])
    assert (firsts[0] != firsts[1]).any(1).all()   # The two splits begin otherwise.
    share = 0.85 ** np.arange(most + 1)   # Few steps come more often.
    found = np.bincount(letters, minlength=most + 1) / len(letters)
    assert found == pytest.approx(share / share.sum(), abs=0.04) and len(letters) == 60 * 16

@pytest.mark.parametrize("symbols, rows", [(10, 2), (6, 6), (9, 3)])
def test_table(symbols, rows):
    """The neighbour counts by its class only. Nothing is lost; rows lead to different classes."""
    table = make_table(symbols, rows, np.random.default_rng(5))
    assert len(np.unique(table, axis=0)) == rows
    assert (table == table[np.arange(symbols) % rows]).all()
    assert (np.sort(table, axis=1) == np.arange(symbols)).all()
    assert (np.sort(table[:rows] % rows, axis=0).T == np.arange(rows)).all()

def test_the_page_of_the_puzzle():
    """Its table is that of the text, and its first line leads to its second as it says."""
    page = prepare.Path(prepare.__file__).read_text()
    table = make_table(10, 2, np.random.default_rng(0))
    for row, name in zip(table, ("even", "odd")):
        assert f"#     after an {name} one".ljust(32) + " ".join(map(str, row)) + "\n" in page
    digits = torch.tensor([[int(digit) for digit in "314159265358"]])
    for after in "587723131420", "108515848740":
        digits = next_line(digits, table)
        assert "".join(map(str, digits[0].tolist())) == after and after in page
