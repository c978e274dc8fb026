"""One causal attention sub-layer with any encoding, as a function to be timed.

Sizes, unless flags say otherwise: batch 1, 4 heads of 64, float32.
"""

import jax
import jax.numpy as jnp
from absl import flags

from relpos_jax import positional, where
from relpos_jax.attention import attend
from relpos_jax.masks import Causal, Mask
from relpos_jax.positional import Dims, merge
from relpos_jax.relative import Layout

BATCH = flags.DEFINE_integer("batch", 1, "Sequences.")
HEADS = flags.DEFINE_integer("heads", 4, "Heads.")
HEAD_DIM = flags.DEFINE_integer("head_dim", 64, "Features a head.")
DTYPE = flags.DEFINE_string("dtype", "float32", "Type of queries, keys and values.")


def inputs(name: str, length: int) -> tuple:
    """Returns the encoding's parameters, then q, k, v `[b t h d]` and x `[b t w]`."""
    encoding = positional.make(name)
    shape = (BATCH.value, length, HEADS.value, HEAD_DIM.value)
    dims = Dims(HEADS.value, HEAD_DIM.value, HEADS.value * HEAD_DIM.value)
    params = merge(
        encoding.init(jax.random.key(1), dims),
        encoding.init_shared(jax.random.key(2), dims),
    )
    keys = jax.random.split(jax.random.key(0), 4)
    qkv = [jax.random.normal(key, shape, DTYPE.value) for key in keys[:3]]
    x = jax.random.normal(keys[3], (BATCH.value, length, dims.width), DTYPE.value)
    return (params, *qkv, x)


def gradient(
    name: str,
    length: int,
    implementation: str,
    *,
    blocks=None,
    mask: Mask = Causal(),
):
    """Returns a function of `inputs`: forward pass, and gradients by all of them."""
    encoding = positional.make(name)
    at = where.contiguous(BATCH.value, length)

    def attention(params, q, k, v, x):
        return attend(
            encoding,
            params,
            q,
            k,
            v,
            at,
            at,
            mask=mask,
            features=encoding.features(params, x),
            layout=Layout(),
            implementation=implementation,
            blocks=blocks,
        )

    return _gradient(attention)


def library():
    """Returns the same for `jax.nn.dot_product_attention`, which adds no positions."""

    def attention(params, q, k, v, x):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    return _gradient(attention)


def _gradient(attention):
    def loss(*inputs):
        out = attention(*inputs).astype(jnp.float32)
        # Another weight for each element, so that nothing cancels or is shared.
        return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape))

    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4))
