"""Times one attention sub-layer, forward and backward, block by block and plainly.

python -m experiments.benchmarks.attention --encoding=alibi --length=8192 --json
"""

import functools
import json

import jax
import jax.numpy as jnp
from absl import app, flags

from experiments.benchmarks import timing
from relpos_jax import positional, where
from relpos_jax.attention import attend
from relpos_jax.masks import Causal
from relpos_jax.positional import Dims, merge
from relpos_jax.relative import Layout

ENCODING = flags.DEFINE_string("encoding", "alibi", "A registered position encoding.")
LENGTH = flags.DEFINE_integer("length", 8192, "Queries and keys.")
BATCH = flags.DEFINE_integer("batch", 1, "Sequences.")
HEADS = flags.DEFINE_integer("heads", 4, "Heads.")
HEAD_DIM = flags.DEFINE_integer("head_dim", 64, "Features a head.")
DTYPE = flags.DEFINE_string("dtype", "float32", "Type of queries, keys and values.")
ROUNDS = flags.DEFINE_integer("rounds", 3, "Timed calls of each, in turn.")
BLOCKS = flags.DEFINE_list("blocks", None, "Queries,keys a block; default: chosen.")
ONLY = flags.DEFINE_list("only", None, "Measure these alone, such as blockwise.")
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of a table.")


def candidates():
    """Returns what is to be measured: a gradient function by name, and its inputs."""
    shape = (BATCH.value, LENGTH.value, HEADS.value, HEAD_DIM.value)
    q, k, v, weight = (
        jax.random.normal(key, shape, DTYPE.value)
        for key in jax.random.split(jax.random.key(0), 4)
    )
    encoding = positional.make(ENCODING.value)
    dims = Dims(HEADS.value, HEAD_DIM.value, HEADS.value * HEAD_DIM.value)
    params = merge(
        encoding.init(jax.random.key(1), dims),
        encoding.init_shared(jax.random.key(2), dims),
    )
    at = where.contiguous(BATCH.value, LENGTH.value)
    blocks = BLOCKS.value and tuple(int(size) for size in BLOCKS.value)

    def ours(implementation, params, q, k, v):
        return attend(
            encoding,
            params,
            q,
            k,
            v,
            at,
            at,
            mask=Causal(),
            layout=Layout(),
            implementation=implementation,
            blocks=blocks,
        )

    def library(params, q, k, v):
        # Adds no position at all: what JAX's own function costs.
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    functions = {
        "blockwise": functools.partial(ours, "blockwise"),
        "dense": functools.partial(ours, "dense"),
        "jax_dot_product_attention": library,
    }

    def gradient(function):
        def loss(params, q, k, v):
            return jnp.sum(function(params, q, k, v).astype(jnp.float32) * weight)

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))

    chosen = ONLY.value or list(functions)
    return {name: gradient(functions[name]) for name in chosen}, (params, q, k, v)


def main(_):
    functions, inputs = candidates()
    results = timing.compare(functions, inputs, rounds=ROUNDS.value)
    if JSON.value:
        print(json.dumps(results))
    else:
        print(timing.table(results))


if __name__ == "__main__":
    app.run(main)
