"""What the conformance suite runs over: every registered encoding, and some chains."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.models import ModelConfig, TransformerXL
from relpos_jax.positional import ENCODINGS, Dims, PositionEncoding, make, merge
from relpos_jax.where import Where

HEADS, HEAD_DIM, WIDTH, VOCABULARY, LENGTH = 3, 8, 24, 11, 12

# Settings that make an encoding's special cases happen at the lengths of these tests.
SMALL: dict[str, dict] = {
    "learned": {"rows": 64},
    "t5": {"buckets": 8, "max_distance": 10},
    "t5_bidirectional": {"buckets": 8, "max_distance": 10},
    "shaw": {"clip": 3},
    "deberta": {"span": 4},
    "deberta_v2": {"buckets": 4, "span": 8},
    "fire": {"threshold": 4.0},
    "rerope": {"window": 4},
    "self_extend": {"window": 4, "group": 2},
    "xpos": {"scale_base": 8.0},
    # Past their original length the whole sequence changes its table, and with it what
    # layers above the first have cached: see docs/encodings/rope_scaling.md.
    "rope_dynamic_ntk": {
        "scaling": {"kind": "dynamic_ntk", "factor": 2.0, "original_length": 14}
    },
    "rope_longrope": {
        "scaling": {"kind": "longrope", "factor": 4.0, "original_length": 14}
    },
}

CHAINS: dict[str, list[dict]] = {
    "rope + alibi": [{"name": "rope"}, {"name": "alibi"}],
    "rope + shaw + t5": [
        {"name": "rope"},
        {"name": "shaw", "clip": 3},
        {"name": "t5", "buckets": 8, "max_distance": 10},
    ],
    "sinusoidal + alibi": [{"name": "sinusoidal"}, {"name": "alibi"}],
    "transformer_xl + rope_partial": [
        {"name": "transformer_xl"},
        {"name": "rope_partial", "fraction": 0.5},
    ],
    "shaw + transformer_xl": [{"name": "shaw", "clip": 2}, {"name": "transformer_xl"}],
    "none + rope_interleaved": [{"name": "none"}, {"name": "rope_interleaved"}],
}

NAMES = [*ENCODINGS, *CHAINS]

# Registered settings of a class that is registered before with others: they differ in
# numbers, not in code, so `make test` runs these checks alone on them.
VARIANTS = {
    name
    for place, (name, encoding) in enumerate(ENCODINGS.items())
    if type(encoding) in {type(other) for other in list(ENCODINGS.values())[:place]}
}
BRIEF = (
    "test_every_path_gives_the_oracle_s_values_and_gradients",
    "test_token_by_token_from_a_cache_is_the_full_forward",
    "test_segment_by_segment_with_memory_is_the_full_forward",
)


def is_left_to_slow(test: str, name: str, callspec) -> bool:
    """Returns whether a check of an encoding runs in `make test-all` only."""
    if name in VARIANTS and test not in BRIEF:
        return True
    return callspec.params.get("segment", 3) != 3 or "every_mask" in test


def encoding_of(name: str) -> PositionEncoding:
    """Returns the encoding to test under a name."""
    if name in CHAINS:
        return make("chain", parts=CHAINS[name])
    return make(name, **SMALL.get(name, {}))


def position_params(encoding: PositionEncoding, seed: int = 0):
    """Returns all its parameters, none of them at a special value such as 0."""
    dims = Dims(HEADS, HEAD_DIM, WIDTH)
    params = merge(
        encoding.init(jax.random.key(seed), dims),
        encoding.init_shared(jax.random.key(seed + 1), dims),
    )
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 2), max(len(leaves), 1))
    noisy = [
        x + 0.1 * jax.random.normal(key, x.shape)
        for key, x in zip(keys, leaves, strict=False)
    ]
    return jax.tree.unflatten(tree, noisy)


class Inputs(NamedTuple):
    """What attention differentiates."""

    params: dict
    q: jax.Array
    k: jax.Array
    v: jax.Array
    x: jax.Array  # layer inputs, from which features come


def inputs_of(encoding, queries: int, keys: int, batch: int = 2) -> Inputs:
    """Returns random inputs for `queries` queries among `keys` keys."""
    parts = jax.random.split(jax.random.key(7), 4)
    q = jax.random.normal(parts[0], (batch, queries, HEADS, HEAD_DIM))
    k = jax.random.normal(parts[1], (batch, keys, HEADS, HEAD_DIM))
    v = jax.random.normal(parts[2], (batch, keys, HEADS, HEAD_DIM))
    x = jax.random.normal(parts[3], (batch, keys, WIDTH))
    return Inputs(position_params(encoding), q, k, v, x)


def run(encoding, inputs: Inputs, q_at: Where, k_at: Where, **options):
    """Returns attention's output `[b q h d]`."""
    features = encoding.features(inputs.params, inputs.x)
    return attend(
        encoding,
        inputs.params,
        inputs.q,
        inputs.k,
        inputs.v,
        q_at,
        k_at,
        features=features,
        **options,
    )


@functools.partial(jax.jit, static_argnums=(0, 4))
def output_and_gradients(encoding, inputs, q_at, k_at, options):
    """Returns the output and a generic gradient by every input."""

    def loss(inputs):
        out = run(encoding, inputs, q_at, k_at, **dict(options))
        waves = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return jnp.sum(out * waves), out

    (_, out), gradients = jax.value_and_grad(loss, has_aux=True)(inputs)
    return out, gradients


@functools.cache
def model_of(name: str, **changes):
    """Returns `(config, forward, params, model)`; forward is compiled once a shape."""
    config = ModelConfig(
        vocabulary=VOCABULARY,
        layers=2,
        width=WIDTH,
        heads=HEADS,
        head_dim=HEAD_DIM,
        feedforward=32,
        position=encoding_of(name),
        **changes,
    )
    model = TransformerXL(config, key=jax.random.key(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    @functools.partial(jax.jit, static_argnames="spacing")
    def forward(params, tokens, at, memory, spacing="unit"):
        model = nnx.merge(graphdef, params, rest)
        return model(tokens, at, memory, spacing=spacing)

    return config, forward, params, model


def tokens_of(batch: int, length: int) -> jax.Array:
    """Returns random token ids `[b t]`."""
    return jax.random.randint(jax.random.key(3), (batch, length), 0, VOCABULARY)


def cut(at: Where, start: int, stop: int) -> Where:
    """Returns some columns of a `Where`."""
    return jax.tree.map(lambda x: x[:, start:stop], at)


def memory_rows(batch: int, memory: int, tokens: int) -> tuple[Where, Where]:
    """Returns queries behind `memory` slots, the first of them empty in one row."""
    k_at = where.contiguous(batch, memory + tokens, start=jnp.arange(batch) * 5)
    segment = k_at.segment.at[-1, : memory // 2].set(0)
    k_at = k_at._replace(segment=segment)
    return cut(k_at, memory, memory + tokens), k_at
