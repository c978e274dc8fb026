"""A decoder with any encoding, to be timed step by step.

Sizes, unless flags say otherwise: 6 layers of width 256 with 4 heads, float32, batch 1.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from experiments.benchmarks import rounds
from experiments.benchmarks.peers import naive_decoding
from experiments.benchmarks.workloads import Workload
from relpos_jax import positional, where
from relpos_jax.evaluation import generation
from relpos_jax.evaluation.sampling import SamplingConfig
from relpos_jax.models import ModelConfig, TransformerXL

LAYERS = flags.DEFINE_integer("layers", 6, "Layers.")
WIDTH = flags.DEFINE_integer(
    "width", 256, "Width; feed-forward layers have 4 times it."
)
HEADS = flags.DEFINE_integer("heads", 4, "Heads.")
TOKENS = flags.DEFINE_integer("tokens", 64, "Tokens a round.")


def model(name: str):
    """Returns `(config, graphdef, params)` of an untrained model."""
    config = ModelConfig(
        vocabulary=256,
        layers=LAYERS.value,
        width=WIDTH.value,
        heads=HEADS.value,
        head_dim=WIDTH.value // HEADS.value,
        feedforward=4 * WIDTH.value,
        position=positional.make(name),
    )
    return config, *nnx.split(TransformerXL(config, key=jax.random.key(0)))


def cached(config, params, kind: str, length: int, context: int):
    """Returns a function that adds tokens behind `context` of them, from a memory."""
    tokens = TOKENS.value
    decoder = generation.prepare(
        config, params, kind=kind, length=length, prefill=64, chunk=tokens
    )
    read, extend = generation.programs(decoder.graphdef, tokens)
    prompt = np.arange(context, dtype=np.int32) % config.vocabulary
    state = generation.start(decoder, [prompt], read)
    keys, knobs = jax.random.split(jax.random.key(0), 1), SamplingConfig().knobs()

    def run():
        # A copy, since the call takes its memory over.
        mine = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        start = time.perf_counter()
        _, found, finite = extend(decoder.params, mine, keys, knobs, jnp.int32(tokens))
        jax.block_until_ready(found)
        seconds = time.perf_counter() - start
        assert bool(finite.all())
        return seconds / tokens

    return run


def naive(name: str, context: int):
    """Returns a function that does the same with a cache written plainly in JAX."""
    sizes = Workload(
        batch=1,
        length=1,
        memory=0,
        layers=LAYERS.value,
        width=WIDTH.value,
        heads=HEADS.value,
        feedforward=4 * WIDTH.value,
    )
    tokens = TOKENS.value
    params, empty, call = naive_decoding.decode(name, sizes, context + tokens, tokens)

    def run():
        mine = jax.block_until_ready(jnp.copy(empty))
        start = time.perf_counter()
        jax.block_until_ready(call(params, mine, jnp.int32(1), jnp.int32(context)))
        return (time.perf_counter() - start) / tokens

    return run


def again(config, graphdef, params, length: int):
    """Returns a function that computes a whole pass of `length` for one token."""
    tokens = jnp.arange(length)[None] % config.vocabulary
    at = where.contiguous(1, length)

    @jax.jit
    def forward(params, tokens):
        model = nnx.merge(graphdef, params)
        hidden, _ = model.hidden(tokens, at, model.init_memory(1, 0))
        return jnp.argmax(model.logits(hidden[:, -1:]), axis=-1)

    def run():
        start = time.perf_counter()
        jax.block_until_ready(forward(params, tokens))
        return time.perf_counter() - start

    return run


def seconds(runs: dict) -> dict[str, float]:
    """Returns each one's seconds a token: the median of rounds taken in turn."""
    for run in runs.values():
        run()
    found = {name: [] for name in runs}
    for _ in range(rounds.ROUNDS.value):
        for name, run in runs.items():
            found[name].append(run())
    return {name: statistics.median(times) for name, times in found.items()}
