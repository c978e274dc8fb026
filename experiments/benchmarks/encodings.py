"""Times every encoding's attention sub-layer against NoPE's, in the same path.

    python -m experiments.benchmarks.encodings --lengths=2048,8192 --json

Past `--dense_up_to` the dense path is left out: at 8,192 it takes gigabytes.
"""

import functools
import json

from absl import app, flags

from experiments.benchmarks import sublayer, timing
from relpos_jax.positional import ENCODINGS

NAMES = flags.DEFINE_list("encodings", list(ENCODINGS), "Registered encodings.")
LENGTHS = flags.DEFINE_list("lengths", ["2048", "8192"], "Queries and keys.")
PATHS = flags.DEFINE_list("paths", ["blockwise", "dense"], "Implementations.")
DENSE_UP_TO = flags.DEFINE_integer("dense_up_to", 2048, "Longest of the dense path.")
ROUNDS = flags.DEFINE_integer("rounds", 3, "Timed pairs of calls; 2 past 4096.")
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of a table.")


@functools.cache
def base(length: int, path: str) -> tuple:
    """Returns NoPE's compiled function and its inputs."""
    inputs = sublayer.inputs("none", length)
    return timing.ready(sublayer.gradient("none", length, path), inputs), inputs


def measure(name: str, length: int, path: str) -> dict:
    """Returns one encoding's seconds, ratio to NoPE and temporaries."""
    rounds = ROUNDS.value if length <= 4096 else min(ROUNDS.value, 2)
    own = (sublayer.gradient(name, length, path), sublayer.inputs(name, length))
    pair = timing.against(base(length, path), own, rounds=rounds)
    return {"encoding": name, "length": length, "path": path, **pair}


def main(_):
    rows = []
    if not JSON.value:
        print("| encoding | path | length | seconds | to NoPE | temporaries, MiB |")
        print("|---|---|---|---|---|---|")
    for path in PATHS.value:
        for length in map(int, LENGTHS.value):
            if path == "dense" and length > DENSE_UP_TO.value:
                continue
            for name in NAMES.value:
                row = measure(name, length, path)
                rows.append(row)
                if not JSON.value:
                    size = row["temp_bytes"] / 2**20
                    cells = f"{row['seconds']:.3f} | {row['ratio']:.2f} | {size:.1f}"
                    print(f"| {name} | {path} | {length} | {cells} |", flush=True)
    if JSON.value:
        print(json.dumps(rows))


if __name__ == "__main__":
    app.run(main)
