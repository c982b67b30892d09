"""The steps text against a plain simulation, and a puzzle done by hand"""
import numpy as np
import pytest, torch
import dataset, prepare, steps

def simulated(text, puzzle):
    """A text -> (place, steps, cell, symbol) of each symbol that can be known, one after the other"""
    found, place, before = [], 0, None
    for line in text.split("\n"):
        if "|" in line:   # A document has ended: nothing is known of the next line.
            before, place, line = None, place + 1, line[1:]
        if before and len(before) == puzzle["cells"] + 1:
            row, asked = [int(c) for c in before[1:]], ord(before[0]) - ord("a")
            for _ in range(asked):
                row = [puzzle["table"][row[j - 1] if j else 0][row[j]] for j in range(len(row))]
            found += [(place + 1 + j, asked, j, row[j]) for j in range(len(line) - 1)]
        before, place = line if line[:1].isalpha() else None, place + len(line) + 1
    return found

@pytest.mark.parametrize("symbols, rows, cells, most, table", [(10, 2, 4, 9, 0), (6, 6, 4, 2, 3)])
def test_what_can_be_known(tmp_path, monkeypatch, symbols, rows, cells, most, table):
    """... is what the simulation says, and steps_of_targets finds just that."""
    monkeypatch.setattr(steps, "DOCUMENTS", dict(train=60, val=20))
    flags = f"--symbols {symbols} --rows {rows} --cells {cells} --most {most} --table_seed {table}"
    prepare.main(["steps", "--out", str(tmp_path), *flags.split()])
    train, val = (dataset.open_split(tmp_path, split)[0] for split in ("train", "val"))
    assert len(train) == 60 * (16 * (cells + 2) + 1) and not np.array_equal(train[:2000], val[:2000])
    share = 0.85 ** np.arange(most + 1)   # Few steps come more often.
    letters = np.bincount(train[(train >= ord("a")) & (train < 256)] - ord("a")) / (60 * 16)
    assert letters == pytest.approx(share / share.sum(), abs=0.04)
    x, y = dataset.windows_of(tmp_path, "val", 80, 40)
    window = torch.cat((x[:, :1], y), dim=1)
    asked, cell = steps.steps_of_targets(x, y, cells)
    for i, row in enumerate(window.tolist()):
        text = "".join("|" if token == 256 else chr(token) for token in row)
        places = (asked[i] >= 0).nonzero()[:, 0].tolist()
        assert simulated(text, dataset.load_meta(tmp_path)["steps"]) == [
            (t + 1, int(asked[i, t]), int(cell[i, t]), int(text[t + 1])) for t in places]
    assert {*asked.flatten().tolist()} == {*range(-1, most + 1)}

@pytest.mark.parametrize("symbols, rows", [(10, 2), (6, 6), (9, 3)])
def test_table(symbols, rows):
    """The neighbour counts by its class only. Nothing is lost, and rows lead to different classes."""
    table = steps.make_table(symbols, rows, np.random.default_rng(5))
    assert len(np.unique(table, axis=0)) == rows
    assert (table == table[np.arange(symbols) % rows]).all()
    assert (np.sort(table, axis=1) == np.arange(symbols)).all()
    assert (np.sort(table[:rows] % rows, axis=0).T == np.arange(rows)).all()

def test_lines_by_hand():
    puzzle = dict(table=[[3, 1, 2, 0], [2, 0, 3, 1], [1, 2, 0, 3], [0, 3, 1, 2]], cells=5)
    by_hand = [[3, 0, 2, 0, 1], [0, 0, 2, 1, 1], [3, 3, 2, 2, 0]]
    lines = steps.lines_after(torch.tensor([by_hand[0], by_hand[0]]), 2, puzzle["table"])
    assert lines.shape == (3, 2, 5) and lines[:, 0].tolist() == lines[:, 1].tolist() == by_hand
    assert steps.solve("c30201", puzzle) == ["30201", "00211", "33220"] and steps.solve("a3", puzzle) == ["3"]
    window = torch.tensor([[*b"z3141\nz2718\na"]])
    assert steps.find_answers(window[:, :-1], window[:, 1:], 4)[3].tolist() == [25, 25]
    assert steps.spelled(torch.tensor([0, 9, 10, -1])) == "09??"
    assert [len(steps.some_digits(dict(table=range(n), cells=100))) for n in (6, 10)] == [100, 100]
    assert [steps.in_words(n) for n in (0, 1, 2, 30)] == ["no steps", "one step", "two steps", "30 steps"]

def test_what_is_a_line():
    puzzle = dict(cells=3, most=2, table=range(4))   # The text has lines from a000 to c333.
    for line in "a000", "c333":
        assert steps.why_no_line(line, puzzle) is None
    for line in "d000", "a004", "a00", "a0000", "", "0000", "a00\n", "A000", "a00²":
        assert steps.why_no_line(line, puzzle) == "a letter from a to c, and 3 digits from 0 to 3"
