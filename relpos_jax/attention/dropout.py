"""Dropout on attention weights, whatever blocks they are computed in.

Which weights are dropped is a function of the key and of a weight's place (row of the
batch, head, query row, key column), by the counter-based generator Threefry (Salmon et
al. 2011). So dense and blockwise attention drop the same ones, a backward pass finds
them again, and no mask is kept.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float, UInt


class Dropped(NamedTuple):
    """Which weights to drop.

    Attributes:
      seed: two words, from a key.
      rate: the part that is dropped, float32 scalar.
    """

    seed: UInt[Array, " 2"]
    rate: Float[Array, ""]


def dropped(key: jax.Array | None, rate: float) -> Dropped | None:
    """Returns what is dropped; None, for nothing, without a key or a rate.

    Raises:
      ValueError: the rate isn't in [0, 1).
    """
    if not 0 <= rate < 1:
        raise ValueError(f"the rate of dropout must be in [0, 1), got {rate}")
    if key is None or rate == 0:
        return None
    return Dropped(jax.random.bits(key, (2,), jnp.uint32), jnp.float32(rate))


def kept(
    what: Dropped,
    shape: tuple[int, int, int, int],
    q_start=0,
    k_start=0,
    row_start=0,
) -> Float[Array, "b h q k"]:
    """Returns what a block's weights are multiplied by: 0, or 1 / (1 - rate).

    Args:
      what: from `dropped`.
      shape: of the block, `b h q k`.
      q_start, k_start: row and column of its first query and key.
      row_start: number of its first row of the batch.
    """

    def index(axis, start, shape=shape):
        places = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        return places + jnp.asarray(start, jnp.uint32)

    def words(axes, seeds, *counters):
        return threefry2x32_p.bind(
            *(jnp.broadcast_to(x, axes) for x in (*seeds, *counters))
        )

    # Each row of the batch and head has words of its own, and counts its weights.
    few = (*shape[:2], 1, 1)
    rows, heads = index(0, row_start, few), index(1, 0, few)
    seeds = [x.reshape(1, 1, 1, 1) for x in what.seed]
    own = words(few, seeds, rows, heads)
    bits, _ = words(shape, own, index(2, q_start), index(3, k_start))
    # The highest 24 bits are a float32 in [0, 1), exactly.
    drawn = (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)
    return jnp.where(drawn >= what.rate, 1 / (1 - what.rate), 0.0)
