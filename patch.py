"""
Does the answer need what is inside? A probe (inside.py) sees that digits are there, but not that
the model uses them. So we change what is there: after one block, the stream of another line takes
the place of this one's. Whose answer comes out? analyze.py shows it.

The words are those of inside.py, and there is a picture of a window.
"""
import torch

from inside import NotHere
from model import Runner
from steps import line_length, lines_after

class PatchingRunner(Runner):
    """Runs the sublayers of a walk. After one block, some columns of window i get the stream of
    window i - 1, and those of the first window that of the last."""
    def __init__(self, model, block, columns):
        super().__init__(model)
        self.block, self.columns = block, columns

    def run(self, place, stream, residual, f):
        """A walk calls it for each sublayer, at the places 1, 2, 3, .. -> the stream after it"""
        stream = super().run(place, stream, residual, f)
        block_ends_here = place == 2 * self.block   # A block is two sublayers.
        return self.patched(stream) if block_ends_here else stream

    def patched(self, stream):
        """stream: (n, T, ...), or a tuple of such tensors, as with --residual nag"""
        if isinstance(stream, tuple):
            return tuple(self.patched(part) for part in stream)
        stream = stream.clone()
        stream[:, self.columns] = stream.roll(1, dims=0)[:, self.columns]
        return stream

def random_windows(puzzle, k, n):
    """n windows: in each a line of random digits, and its right answer. Returns idx (n, T), without
    the answer's last digit, which nobody reads, and the answers (n, cells), as tokens. So a model
    says each digit after the right ones before it, as in training. (Only the stream is patched, not
    these tokens.)"""
    cells, generator = puzzle["cells"], torch.Generator().manual_seed(0)
    digits = torch.randint(len(puzzle["table"]), (n, cells), generator=generator)
    answer = lines_after(digits, k, puzzle["table"])[-1] + ord("0")
    parts = [torch.full((n, 1), ord("a") + k),   # the line's letter
             digits + ord("0"),
             torch.full((n, 1), ord("\n")),
             torch.full((n, 1), ord("a")),       # the answer's; the text draws it at random
             answer[:, :-1]]
    return torch.cat(parts, 1), answer

def share_in_right_half(said, answer):
    """said, answer (n, cells) -> the share that is equal, from the middle of the line on. (What
    replaces a digit depends on itself and on its left neighbour. So the first ones depend on few
    digits, and the model may have learned these cases by heart.)"""
    middle = said.shape[1] // 2
    return (said == answer)[:, middle:].float().mean().item()

@torch.no_grad()
def patch(model, puzzle, k, n=400):
    """In n windows, we patch either the line or the answer, after one block. Does the model then
    say the window's own answer, or that of the window from which the patch came? A dict of dicts:

    {where: {whose answer: [share of it that the model says, if patched after block 1, 2, ..]}}

    By chance a share is 1 / symbols.

    NotHere if this model's stream can't be patched, or its windows are too short"""
    if model.ends.stream_grows:   # as with --residual attnres
        raise NotHere("its stream has a part for each block, so there is no one state to patch")
    cells = puzzle["cells"]
    answer_begins = line_length(cells)   # after the line's letter, its cells, its newline
    if answer_begins + cells > model.config.block_size:
        raise NotHere("a line and its answer don't fit into its --block_size")
    idx, answer = random_windows(puzzle, k, n)
    idx, answer = idx.to(model.device), answer.to(model.device)
    other_answer = answer.roll(1, dims=0)
    columns = {"line": slice(0, answer_begins),        # from its letter to its newline
               "answer": slice(answer_begins, None)}   # from its letter on
    found = {}
    for where in columns:
        own, other = [], []
        for block in range(1, len(model.order) + 1):
            runner = PatchingRunner(model, block, columns[where])
            logits, _ = model(idx, runner=runner)   # (n, T, vocab)
            said = logits[:, -cells:].argmax(-1)    # The last columns predict the answer.
            own.append(share_in_right_half(said, answer))
            other.append(share_in_right_half(said, other_answer))
        found[where] = {"its own answer": own, "the other line's answer": other}
    return found
