"""One causal attention sub-layer for each encoding, every pair's score an array.

Each formula is that of the paper: biases and tables are gathered for all pairs of a
query and a key, and there is one softmax over whole rows.
"""

import math

import jax
import jax.numpy as jnp

from experiments.benchmarks.peers import Missing, Peer

CLIP = 16  # Shaw et al. 2018
SPAN = 512  # DeBERTa
MOST_BYTES = 9 * 2**30


def attention(variant: str, length: int, heads: int, head_dim: int, dtype: str) -> Peer:
    """Returns a forward and a backward pass with the encoding `variant`.

    Raises:
      Missing: the compiled program asks for more than 9 GiB.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (1, length, heads, head_dim)
    q, k, v = (jax.random.normal(key, shape, dtype) for key in keys[:3])
    rows = {"t5": (32, heads), "shaw": (2, 2 * CLIP + 1, head_dim)}
    rows["deberta"] = (2, 2 * SPAN, heads, head_dim)
    rows["transformer_xl"] = (heads * head_dim + 2, heads, head_dim)
    table = 0.02 * jax.random.normal(keys[3], rows.get(variant, (1,)), dtype)
    weights = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(shape)

    def loss(q, k, v, table):
        out = ENCODINGS[variant](q, k, v, table)
        return jnp.sum(out.astype(jnp.float32) * weights)

    inputs = q, k, v, table
    try:
        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
        step = step.lower(*inputs).compile()
    except jax.errors.JaxRuntimeError as error:
        raise Missing(str(error).splitlines()[0]) from error
    size = step.memory_analysis().temp_size_in_bytes
    if size > MOST_BYTES:
        raise Missing(f"asks for {size / 2**30:.0f} GiB")

    def run(count):
        for _ in range(count):
            jax.block_until_ready(step(*inputs))

    return Peer(run, temporaries=size)


def distance(length: int):
    """Returns query position minus key position, `[q k]`."""
    return jnp.arange(length)[:, None] - jnp.arange(length)[None]


def softmax(scores, v):
    """Returns the weights `[b h q k]` of the causal scores, and the weighted values."""
    visible = distance(scores.shape[-1])[None, None] >= 0
    scores = jnp.where(visible, scores.astype(jnp.float32), -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return weights, jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def content(q, k, scale: float | None = None):
    """Returns the scaled products `[b h q k]`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale


def none(q, k, v, table):
    return softmax(content(q, k), v)[1]


def rope(q, k, v, table):
    length, half = q.shape[1], q.shape[-1] // 2
    rate = 10000.0 ** (-jnp.arange(half) / half)
    angle = (jnp.arange(length)[:, None] * rate[None])[None, :, None]
    cos, sin = jnp.cos(angle).astype(q.dtype), jnp.sin(angle).astype(q.dtype)

    def turn(x):
        one, two = x[..., :half], x[..., half:]
        return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)

    return softmax(content(turn(q), turn(k)), v)[1]


def alibi(q, k, v, table):
    heads = q.shape[2]
    slopes = 2.0 ** (-8 * jnp.arange(1, heads + 1) / heads)
    bias = -slopes[:, None, None] * distance(q.shape[1])[None]
    return softmax(content(q, k) + bias[None].astype(q.dtype), v)[1]


def t5(q, k, v, table):
    far = jnp.maximum(distance(q.shape[1]), 0)
    large = jnp.log(jnp.maximum(far, 1) / 16) / math.log(128 / 16) * 16
    bucket = jnp.where(far < 16, far, jnp.minimum(16 + large.astype(int), 31))
    bias = jnp.moveaxis(table[bucket], -1, 0)
    return softmax(content(q, k, 1.0) + bias[None], v)[1]


def shaw(q, k, v, table):
    pairs = table[:, jnp.clip(distance(q.shape[1]), -CLIP, CLIP) + CLIP]
    scores = jnp.einsum("bqhd,qkd->bhqk", q, pairs[0]) * q.shape[-1] ** -0.5
    weights, out = softmax(content(q, k) + scores, v)
    return out + jnp.einsum("bhqk,qkd->bqhd", weights, pairs[1])


def transformer_xl(q, k, v, table):
    from experiments.benchmarks.peers import naive

    length = q.shape[1]
    waves = naive.sinusoid(jnp.arange(length - 1, -1, -1), table.shape[0] - 2)
    r = jnp.einsum("nw,whd->nhd", waves.astype(q.dtype), table[2:])
    visible = distance(length) >= 0
    return naive.transformer_xl(q, k, v, r, table[0], table[1], visible)


def deberta(q, k, v, table):
    scale = (3 * q.shape[-1]) ** -0.5
    row = jnp.clip(distance(q.shape[1]) + SPAN, 0, 2 * SPAN - 1)[None, None]
    c2p = jnp.einsum("bqhd,nhd->bhqn", q, table[0])
    c2p = jnp.take_along_axis(c2p, row, axis=-1)
    p2c = jnp.einsum("bkhd,nhd->bhkn", k, table[1])
    # Row by key here, and distances of a key seen from a query: the transposed index.
    p2c = jnp.take_along_axis(p2c, row.mT, axis=-1).mT
    return softmax(content(q, k, scale) + (c2p + p2c) * scale, v)[1]


ENCODINGS = {
    "none": none,
    "rope": rope,
    "alibi": alibi,
    "t5": t5,
    "shaw": shaw,
    "transformer_xl": transformer_xl,
    "deberta": deberta,
}
