#!/usr/bin/env bash
# torch 2.13.0, Python 3.10 to 3.14, CPU. Our guess: torch.manual_seed takes 64 bits, remembers them (initial_seed
# says so), and two seeds give two streams.
# Seen: the CPU's generator uses the lower 32 bits only. 5 and 5 + 2**32 give the same numbers, though initial_seed
# tells them apart, and so does -1 with 2**32 - 1. Who makes seeds as run * 2**32 + worker, or hashes a name to 64
# bits and shifts it, gets repeated weights and repeated orders of data, without a word.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.3.5 2>/dev/null
"$folder/env/bin/python" - <<'PYTHON'
import torch

print("torch", torch.__version__)
def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(3, generator=generator), torch.randperm(6, generator=generator)
    print(f"seed {seed}, initial_seed {generator.initial_seed()}: {numbers[0].tolist()} {numbers[1].tolist()}")
    return numbers

def equal(one, two):
    return all(torch.equal(a, b) for a, b in zip(drawn(one), drawn(two)))

found = [equal(5, 5 + 2**32), equal(5, 5 + 7 * 2**40), equal(-1, 2**32 - 1), equal(5, 6)]
assert found == [True, True, True, False], "this has changed"
PYTHON
