"""Times one attention sub-layer, forward and backward, block by block and plainly.

python -m experiments.benchmarks.attention --encoding=alibi --length=8192 --json
"""

import functools
import json

from absl import app, flags

from experiments.benchmarks import sublayer, timing

ENCODING = flags.DEFINE_string("encoding", "alibi", "A registered position encoding.")
LENGTH = flags.DEFINE_integer("length", 8192, "Queries and keys.")
ROUNDS = flags.DEFINE_integer("rounds", 3, "Timed calls of each, in turn.")
BLOCKS = flags.DEFINE_list("blocks", None, "Queries,keys a block; default: chosen.")
ONLY = flags.DEFINE_list("only", None, "Measure these alone, such as blockwise.")
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of a table.")


def main(_):
    inputs = sublayer.inputs(ENCODING.value, LENGTH.value)
    blocks = BLOCKS.value and tuple(int(size) for size in BLOCKS.value)
    ours = functools.partial(sublayer.gradient, ENCODING.value, LENGTH.value)
    functions = {
        "blockwise": ours("blockwise", blocks=blocks),
        "dense": ours("dense"),
        "jax_dot_product_attention": sublayer.library(),
    }
    chosen = {name: functions[name] for name in ONLY.value or functions}
    results = timing.compare(chosen, inputs, rounds=ROUNDS.value)
    print(json.dumps(results) if JSON.value else timing.table(results))


if __name__ == "__main__":
    app.run(main)
