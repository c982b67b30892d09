#!/usr/bin/env bash
# numpy 2.3.5, Python 3.11 to 3.14. Our guess: default_rng((5,)), default_rng((5, 0)) and default_rng((5, 1)) are
# three streams of random numbers, so (seed, step) is a key without repeats.
# Seen: zeros at the end change nothing, until there are more than four numbers, and 5 + 2**32 is the same as (5, 1):
# an int is cut into pieces of 32 bits, and up to four pieces are filled up with zeros. So step 0 of a run repeats
# what default_rng(seed) draws elsewhere in the program, and (seed, step, 0) repeats (seed, step). (What helps:
# number steps and parts from 1, or add a constant number that isn't 0 at the end of the key.)
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q numpy==2.3.5 2>/dev/null
"$folder/env/bin/python" - <<'PYTHON'
import numpy as np

print("numpy", np.__version__)
keys = [5, (5,), (5, 0), (5, 0, 0, 0), (5, 0, 0, 0, 0), (5, 1), 5 + 2**32, (5, 1, 0)]
drawn = {str(key): np.random.default_rng(key).integers(10**9) for key in keys}
for key, number in drawn.items():
    print(f"default_rng({key}): {number}")
same = {key for key, number in drawn.items() if number == drawn["5"]}
assert same == {"5", "(5,)", "(5, 0)", "(5, 0, 0, 0)"}, "this has changed"
assert drawn["(5, 1)"] == drawn[str(5 + 2**32)] == drawn["(5, 1, 0)"] != drawn["5"], "this has changed"
PYTHON
