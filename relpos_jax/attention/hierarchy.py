"""Two levels of attention: within segments, and across summaries of segments.

A segment is `size` positions of a document, counted from position 0. Its summary is the
mean of its tokens' keys and values, before any rotation, at the segment's number. A
query sees the summaries of segments before its own only, none of which holds a token
that comes after it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from relpos_jax.masks import Bidirectional, Strip
from relpos_jax.where import Where


@dataclasses.dataclass(frozen=True)
class Within(Bidirectional):
    """The keys of the query's own segment, up to itself.

    Attributes:
      size: positions a segment.
    """

    size: int

    causal = True

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"a segment needs at least 1 position, got {self.size}")

    def pairs(
        self, q: Num[Array, "b q #k"], k: Num[Array, "b #q k"]
    ) -> Bool[Array, "b q k"]:
        return (q // self.size == k // self.size) & (q >= k)

    def keeps(self, low, high):
        return (high >= 0) & (low < self.size)

    @property
    def reach(self) -> int:
        return self.size


@dataclasses.dataclass(frozen=True)
class Earlier(Bidirectional):
    """The summaries of earlier segments; positions are numbers of segments."""

    causal = True

    def allows(self, distance: Num[Array, "*shape"]) -> Bool[Array, "*shape"]:
        return distance >= 1

    def keeps(self, low, high):
        return high >= 1

    def strips(self) -> tuple[Strip, ...]:
        # There are as many slots as tokens, and few hold a summary.
        return (Strip(self, search=True, block=64),)


def segments_of(at: Where, size: int) -> Where:
    """Returns where tokens stand among segments: each at its segment's number."""
    return at._replace(position=at.position // size)


def summarise(
    k: Float[Array, "b k h d"], v: Float[Array, "b k h d"], k_at: Where, size: int
) -> tuple[Float[Array, "b k h d"], Float[Array, "b k h d"], Where]:
    """Returns the mean key and value of every segment, and where they stand.

    Of the tokens that are there: a memory that has forgotten a part of a segment
    summarises the rest. As many slots as tokens, the first of them used; tokens may
    stand in any order.

    Args:
      k, v: keys, not rotated, and values.
      k_at: where they stand.
      size: positions a segment.
    """
    at = segments_of(k_at, size)
    real = at.segment != 0
    # Empty slots last, so that summaries take up the first ones.
    order = jnp.lexsort((at.position, at.segment, ~real), axis=1)

    def take(x, index):
        return jnp.take_along_axis(x, index, axis=1)

    def changes(x):
        x = take(x, order)
        return x != jnp.concatenate([x[:, :1], x[:, :-1]], axis=1)

    run = jnp.cumsum(changes(at.position) | changes(at.segment), axis=1)
    slot = take(run, jnp.argsort(order, axis=1))
    slot = jnp.where(real, slot, slot.shape[1])  # what is empty goes nowhere

    def put(x, way):
        def one(x, slot):
            return getattr(jnp.zeros_like(x).at[slot], way)(x, mode="drop")

        return jax.vmap(one)(x, slot)

    count = jnp.maximum(put(real.astype(jnp.float32), "add"), 1)[:, :, None, None]
    k, v = ((put(x.astype(jnp.float32), "add") / count).astype(x.dtype) for x in (k, v))
    return k, v, Where(put(at.position, "set"), put(at.segment, "set"))
