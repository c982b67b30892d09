"""
The steps text: lines whose depth is known. README.md explains it by hand, under "The puzzle".

    c314159265358     a letter, and cells. c: the next line is two steps after this one (a: 0, b: 1)
    d108515848740     asks for three steps
    c954006051092

It is known how many steps lead to each cell. So it can be seen how many a model has learned.
"""
import numpy as np
import torch

LINES = 16   # of a document
DOCUMENTS = dict(train=24_000, val=1_200)

def make_table(symbols, rows, rng):
    """-> table (symbols, symbols): what a cell becomes, by its left neighbour and itself. Of the
    neighbour only the class counts, left % rows. With two rows: whether it is even or odd.

    Each row holds each symbol once, so nothing is lost in a step. Two rows send a symbol to two
    classes. So who does not know the neighbour does not know the class after a step."""
    size = symbols // rows
    in_row_0 = rng.permutation(np.repeat(np.arange(rows), size))   # the class that each goes to
    table = np.zeros((rows, symbols), int)
    for row in range(rows):
        for to in range(rows):
            table[row, (in_row_0 + row) % rows == to] = to + rows * rng.permutation(size)
    return table[np.arange(symbols) % rows]

def next_line(cells, table):
    """One step: cells (..., n) of numbers -> (..., n). Each cell becomes table[its left
    neighbour][itself], all at once. Left of the first cell is a 0."""
    cells = np.asarray(cells)
    left = np.concatenate((np.zeros_like(cells[..., :1]), cells[..., :-1]), axis=-1)
    return np.asarray(table)[left, cells]

def puzzle(config):
    """What meta.json says about the steps text. config: the flags of prepare.py steps"""
    table = make_table(config.symbols, config.rows, np.random.default_rng(config.table))
    return dict(table=table.tolist(), cells=config.cells, most=config.most)

def steps_text(config):
    """-> documents for training, and for validation: two lists of texts"""
    return make_documents(config, "train"), make_documents(config, "val")

def make_documents(config, split):
    n, table = DOCUMENTS[split], puzzle(config)["table"]
    rng = np.random.default_rng((config.table, len(split)))   # other lines in each split
    share = 0.85 ** np.arange(config.most + 1)   # Few steps come more often. They teach many.
    asked = rng.choice(config.most + 1, (n, LINES), p=share / share.sum())
    cells = rng.integers(config.symbols, size=(n, config.cells))
    newline = np.full((n, 1), ord("\n"))
    columns = []   # of all documents at once
    for line in range(LINES):
        asked_here = asked[:, line:line + 1]
        columns += [ord("a") + asked_here, ord("0") + cells, newline]
        for step in range(config.most):
            cells = np.where(step < asked_here, next_line(cells, table), cells)
    return [bytes(row).decode() for row in np.concatenate(columns, axis=1).astype("u1")]

def steps_asked(tokens, n_cells):
    """How deep each target is. tokens (n, T + 1): a window of bytes, and its last target ->

    steps (n, T): how many steps lead to this cell, as the letter of the line before says. -1 where
    nobody can know: it is no cell, or the line before it is not in the window
    cell (n, T): its place in the line, 0 is the leftmost; only of use where steps is known"""
    place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    is_letter = (tokens >= ord("a")) & (tokens <= ord("z"))
    letter = torch.where(is_letter, place, -1).cummax(dim=1).values   # where this line begins
    cell = place - letter - 1
    before = letter - (n_cells + 2)                                   # where the one before begins
    # Between two documents stands an end-of-text, and no newline.
    follows = (before >= 0) & (tokens.gather(1, (letter - 1).clamp_min(0)) == ord("\n"))
    asked = tokens.gather(1, before.clamp_min(0)) - ord("a")
    known = follows & (cell >= 0) & (cell < n_cells)
    return torch.where(known, asked, -1)[:, 1:], cell[:, 1:]
