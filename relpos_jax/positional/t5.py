"""T5's bucketed relative bias (Raffel et al. 2020, section 2.1 and released code)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from relpos_jax.positional.protocol import (
    Block,
    Dims,
    Params,
    PositionEncoding,
    leading,
)


def bucket_edges(buckets: int, max_distance: int) -> tuple[int, ...]:
    """Returns the first distance of each bucket after bucket 0, in integers.

    The first half of the buckets holds one distance each; the rest widen
    logarithmically up to `max_distance`, and the last holds all that is farther.
    Integer arithmetic gives the same edges on every device, where a float32 logarithm
    may fall on either side of one.

    Raises:
      ValueError: fewer than 2 buckets, or `max_distance` inside the exact half.
    """
    exact = buckets // 2
    if buckets < 2 or max_distance <= exact:
        raise ValueError(
            f"need at least 2 buckets and max_distance above half of them, "
            f"got {buckets} buckets and max_distance {max_distance}"
        )
    edges = list(range(1, exact + 1))
    spread = buckets - exact
    for step in range(1, spread):
        # The smallest n with exact * (max_distance / exact)^(step / spread) <= n.
        bound = max_distance**step * exact ** (spread - step)
        n = edges[-1]
        while n**spread < bound:
            n += 1
        edges.append(n)
    return tuple(edges)


def relative_position_bucket(
    distance: Num[Array, "*n"],
    *,
    buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = False,
) -> Int[Array, "*n"]:
    """Returns each distance's bucket in `0 .. buckets - 1`.

    Args:
      distance: query position minus key position (T5 itself counts the other way).
      buckets: number of rows in the bias table.
      max_distance: where the logarithmic widening nominally ends.
      bidirectional: keys after the query use the upper half of the buckets; otherwise
        they all fall into bucket 0.
    """
    distance = distance.astype(jnp.int32)
    if bidirectional:
        if buckets % 2:
            raise ValueError(f"both directions need an even count, got {buckets}")
        buckets //= 2
        upper = jnp.where(distance < 0, buckets, 0)
        far = jnp.abs(distance)
    else:
        upper, far = 0, jnp.maximum(distance, 0)
    edges = jnp.asarray(bucket_edges(buckets, max_distance), jnp.int32)
    passed = far[..., None] >= leading(edges, far.ndim + 1)
    return upper + jnp.sum(passed, axis=-1, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class T5(PositionEncoding):
    """Adds a learned bias per head and bucket of distance; logits are not scaled.

    One table serves all layers. The factor 1/sqrt(d) is folded into the query
    projection's initial values.

    Attributes:
      buckets, max_distance, bidirectional: see `relative_position_bucket`.
      gain: multiplies the learned bias. T5 has 1; the T5 baseline of KERPLE's code and
        x-transformers have sqrt(d), with which the bias learns faster.
    """

    turns_once: ClassVar[bool] = True

    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = False
    gain: float = 1.0

    def __post_init__(self):
        side = self.buckets // 2 if self.bidirectional else self.buckets
        bucket_edges(side, self.max_distance)

    def init_shared(self, key: jax.Array, dims: Dims) -> Params:
        shape = (self.buckets, dims.heads)
        return {"table": dims.width**-0.5 * jax.random.normal(key, shape)}

    def scale(self, head_dim: int) -> float:
        return 1.0

    def query_gain(self, head_dim: int) -> float:
        return head_dim**-0.5

    def table(
        self, params: Params, distance: Num[Array, "*n"]
    ) -> Float[Array, "*n h"] | None:
        bucket = relative_position_bucket(
            distance,
            buckets=self.buckets,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        return self.gain * params["table"].astype(jnp.float32)[bucket]

    def saturation(self) -> int | None:
        side = self.buckets // 2 if self.bidirectional else self.buckets
        return bucket_edges(side, self.max_distance)[-1]

    def score(self, params: Params, block: Block) -> Float[Array, "b h q k"]:
        return block.logits + block.rel.bias(block.table)

    def past_training(self) -> str:
        last = self.saturation()
        gain = "" if self.gain == 1 else f" The learned bias is times {self.gain:.3g}."
        return f"Distances from {last} on share a bucket: alike, not undefined.{gain}"
