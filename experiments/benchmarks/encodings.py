"""Times every encoding's attention sub-layer against NoPE's, in the same path.

python -m experiments.benchmarks.encodings --lengths=2048,8192 --json
"""

import json

from absl import app, flags

from experiments.benchmarks import sublayer, timing
from relpos_jax.positional import ENCODINGS

NAMES = flags.DEFINE_list("encodings", list(ENCODINGS), "Registered encodings.")
LENGTHS = flags.DEFINE_list("lengths", ["2048", "8192"], "Queries and keys.")
PATHS = flags.DEFINE_list("paths", ["blockwise", "dense"], "Implementations.")
ROUNDS = flags.DEFINE_integer("rounds", 5, "Pairs of timed calls, in turn.")
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of a table.")


def measure(name: str, length: int, path: str) -> dict:
    """Returns one encoding's seconds, ratio to NoPE and temporaries."""
    pair = timing.against(
        (sublayer.gradient("none", length, path), sublayer.inputs("none", length)),
        (sublayer.gradient(name, length, path), sublayer.inputs(name, length)),
        rounds=ROUNDS.value,
    )
    return {"encoding": name, "length": length, "path": path, **pair}


def main(_):
    rows = []
    if not JSON.value:
        print("| encoding | path | length | seconds | to NoPE | temporaries, MiB |")
        print("|---|---|---|---|---|---|")
    for path in PATHS.value:
        for length in map(int, LENGTHS.value):
            for name in NAMES.value:
                row = measure(name, length, path)
                rows.append(row)
                if not JSON.value:
                    size = row["temp_bytes"] / 2**20
                    print(
                        f"| {name} | {path} | {length} | {row['seconds']:.3f} | "
                        f"{row['ratio']:.2f} | {size:.1f} |",
                        flush=True,
                    )
    if JSON.value:
        print(json.dumps(rows))


if __name__ == "__main__":
    app.run(main)
