"""Times sparse attention, forward and backward, at a length and at four times it.

    python -m experiments.benchmarks.sparse --json

Prints for each pattern the seconds and the temporary bytes at the longer length, and
how many times those at the shorter one they are: linear cost is 4, quadratic 16.
"""

import json

from absl import app, flags

from experiments.benchmarks import sublayer, timing
from relpos_jax.attention.patterns import (
    BigBird,
    Dilated,
    Fixed,
    Strided,
    WindowGlobal,
)
from relpos_jax.masks import Window

ENCODING = flags.DEFINE_string("encoding", "alibi", "A registered position encoding.")
LENGTH = flags.DEFINE_integer("length", 16384, "The longer one, four times the other.")
WIDTH = flags.DEFINE_integer("width", 256, "Keys of a window, own one included.")
ROUNDS = flags.DEFINE_integer("rounds", 3, "Timed pairs of calls.")
ONLY = flags.DEFINE_list("only", None, "Measure these alone, such as window.")
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of a table.")


def main(_):
    width = WIDTH.value
    patterns = {
        "window": Window(width),
        "dilated": Dilated(width, 4),
        "window_global": WindowGlobal(width, (0, 1, 2, 3)),
        "big_bird": BigBird(64),
        "strided": Strided(128),
        "fixed": Fixed(128, 4),
    }
    results = {}
    for name in ONLY.value or patterns:
        runs = []
        for length in (LENGTH.value // 4, LENGTH.value):
            function = sublayer.gradient(
                ENCODING.value, length, "blockwise", mask=patterns[name]
            )
            runs.append((function, sublayer.inputs(ENCODING.value, length)))
        results[name] = row = timing.against(*runs, rounds=ROUNDS.value)
        row["temp_ratio"] = row["temp_bytes"] / row.pop("base_temp_bytes")
        if not JSON.value:
            numbers = (f"{key} {value:.4g}" for key, value in row.items())
            print(f"{name}: {', '.join(numbers)}", flush=True)
    if JSON.value:
        print(json.dumps(results))


if __name__ == "__main__":
    app.run(main)
