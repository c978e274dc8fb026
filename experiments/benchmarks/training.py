"""Times training steps: Transformer-XL and RoPE here and in other libraries, in turn.

    python -m experiments.benchmarks.training --official=PATH --json=training.json

What is not installed is left out, and the output says so (docs/performance.md).
"""

import dataclasses

from absl import app, flags

from experiments.benchmarks import rounds
from experiments.benchmarks.workloads import WORKLOADS

NAMES = flags.DEFINE_list("workloads", ["W1", "W2"], "Sizes; see workloads.py.")
PEERS = flags.DEFINE_list(
    "peers",
    ["ours:transformer_xl", "ours:transformer_xl+accumulate=2"]
    + ["official", "hf", "naive"]
    + ["ours:rope", "xt:rope", "xt:rope+fused"],
    "What to time; ratios are to the first.",
)
COUNT = flags.DEFINE_integer("count", 4, "Updates in a round.")
OFFICIAL = flags.DEFINE_string("official", None, "A clone of the authors' code.")
DTYPE = flags.DEFINE_string("dtype", "float32", "Of our computation (bfloat16 on GPU).")


def measure(name: str) -> dict:
    """Returns one workload's rows, with tokens and operations a second."""
    sizes = dataclasses.replace(WORKLOADS[name], dtype=DTYPE.value)
    arguments = {"workload": dataclasses.asdict(sizes)}
    others = {"official": {"official": OFFICIAL.value}}
    rows, left_out = rounds.compare(
        "training", PEERS.value, arguments, count=COUNT.value, others=others
    )
    for row in rows:
        row["tokens_per_second"] = sizes.tokens / row["seconds"]
        row["flops_per_second"] = sizes.operations / row["seconds"]
    return {"name": name, **arguments, "rows": rows, "left_out": left_out}


def main(_):
    rounds.write("training", [measure(name) for name in NAMES.value])


if __name__ == "__main__":
    app.run(main)
