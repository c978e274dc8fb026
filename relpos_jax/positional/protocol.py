"""What a position encoding is: a frozen dataclass of pure hooks.

Hyper-parameters are its fields (hashable, so that equal configurations share one
compilation); parameters are a plain dict of arrays that the caller holds. Every hook is
the identity by default, so an encoding states only what its paper adds.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from relpos_jax.masks import distances
from relpos_jax.relative import Diagonals, Layout, Pairs, Uniform
from relpos_jax.where import Where

Params = dict[str, Any]


class Dims(NamedTuple):
    """The sizes that parameters depend on."""

    heads: int
    head_dim: int
    width: int


class Block(NamedTuple):
    """A block of scores, with all that an encoding may look at.

    Attributes:
      q: `[b h q d]`, queries before the `query` hook.
      k: `[b h k d]`, keys before the `key` hook.
      logits: `[b h q k]` float32, scaled products after the `query` and `key` hooks.
      table: rows of `PositionEncoding.table`, heads first, to be given to `rel`.
      rel: the four products of a table with queries, keys and weights.
      q_at, k_at: where the queries and the keys stand.
      scale: the factor that `logits` already carry.
      visible: `[b 1 q k]`, which pairs attend. The mask is applied behind `score`; only
        encodings that add up over keys need to look.
      q_data, k_data: what `prepare` returned for these tokens, heads before time.
    """

    q: Float[Array, "b h q d"]
    k: Float[Array, "b h k d"]
    logits: Float[Array, "b h q k"]
    table: Any
    rel: Pairs | Diagonals | Uniform
    q_at: Where
    k_at: Where
    scale: float
    visible: Bool[Array, "b 1 q k"]
    q_data: Any = None
    k_data: Any = None

    @property
    def distance(self) -> Num[Array, "b q k"]:
        """Query position minus key position of every pair."""
        return distances(self.q_at, self.k_at)

    def scaled(
        self, dot: Callable, x: Float[Array, "b h t d"], table: Any
    ) -> Float[Array, "b h q k"]:
        """Returns `dot(x, table)`, a product of `rel`, times the scale.

        The smaller operand is scaled, where its type rounds no further by that.
        """
        if x.dtype == jnp.float32:
            return dot(x * self.scale, table)
        return self.scale * dot(x, table)


@dataclasses.dataclass(frozen=True)
class PositionEncoding:
    """No position information, and the base of every encoding.

    Class attributes:
      absolute: adds to the token embeddings; refused together with memory, where a
        token's position would change between segments (Dai et al. 2019, section 3.3).
      invariant: scores do not change when all positions move together.
      causal_only: is defined for distances >= 0 only.
      ordinal: looks at the order of positions only, not at how far apart they are.
      whole_rows: `score` needs all keys of a query at once, so blocks span every key.
      length_dependent: scores change with the length of the document as a whole.
      turns_once: the `key` hook looks at a key and its position alone, and `score`
        never at `Block.k`, so that a cache may keep what the hook returned.
    """

    absolute: ClassVar[bool] = False
    invariant: ClassVar[bool] = True
    causal_only: ClassVar[bool] = False
    ordinal: ClassVar[bool] = False
    whole_rows: ClassVar[bool] = False
    length_dependent: ClassVar[bool] = False
    turns_once: ClassVar[bool] = False

    def init(self, key: jax.Array, dims: Dims) -> Params:
        """Returns the parameters that each layer has for itself."""
        return {}

    def init_shared(self, key: jax.Array, dims: Dims) -> Params:
        """Returns the parameters that all layers share."""
        return {}

    def constants(self, heads: int, head_dim: int) -> Params:
        """Returns arrays that the hooks find among `params` but nobody trains.

        `attend` adds them; a caller that splits heads over devices by hand passes its
        part of the whole instead, so that no device counts from its own heads.
        """
        return {}

    def scale(self, head_dim: int) -> float:
        """Returns the factor of the query-key products."""
        return head_dim**-0.5

    def query_gain(self, head_dim: int) -> float:
        """Returns the factor of the query projection's initial values."""
        return 1.0

    def embed(
        self, params: Params, x: Float[Array, "b t w"], at: Where
    ) -> Float[Array, "b t w"]:
        """Acts once, after the token embedding."""
        return x

    def enter(
        self, params: Params, x: Float[Array, "b t w"], at: Where
    ) -> Float[Array, "b t w"]:
        """Acts on the input of each layer, with the layer's own parameters."""
        return x

    def features(
        self, params: Params, x: Float[Array, "b t w"]
    ) -> Float[Array, "b t h f"] | None:
        """Returns numbers that `prepare` needs of each key, from the layer's input.

        They are kept beside the keys in memories and caches. None: nothing.
        """
        return None

    def prepare(
        self,
        params: Params,
        features: Float[Array, "b k h f"] | None,
        q_at: Where,
        k_at: Where,
        layout: Layout | None,
    ) -> tuple[Params, Any, Any]:
        """Looks at a call's tokens as a whole, before any other hook.

        Returns parameters for the `query` and `key` hooks (with what depends on the
        whole sequence added, such as its length), and two pytrees of `[b q h f]` and
        `[b k h f]` that each block's `score` finds as `q_data` and `k_data`.
        """
        return params, None, None

    def query(
        self, params: Params, q: Float[Array, "b t h d"], at: Where
    ) -> Float[Array, "b t h d"]:
        """Acts on each query."""
        return q

    def key(
        self, params: Params, k: Float[Array, "b t h d"], at: Where
    ) -> Float[Array, "b t h d"]:
        """Acts on each key."""
        return k

    def table(self, params: Params, distance: Num[Array, "*n"]) -> Any:
        """Returns what depends on the distance alone: a pytree of rows, or None.

        Rows are `[*n h]` (scalars) or `[*n h d]` (vectors), with `h` 1 where heads
        share them, for `distance` of any shape. Every distance must give finite rows,
        masked ones too: the gradient of a masked NaN is NaN.
        """
        return None

    def saturation(self) -> int | None:
        """Returns a distance from which on, and below whose negative, rows are equal.

        They must be the same row of parameters, not only of equal value: blocks beyond
        are computed, and their gradients summed, with one row for all. None: never.
        """
        return None

    def score(self, params: Params, block: Block) -> Float[Array, "b h q k"]:
        """Returns the block's logits."""
        return block.logits

    def value(
        self, params: Params, weights: Float[Array, "b h q k"], block: Block
    ) -> Float[Array, "b h q d"] | None:
        """Returns what is added to the output; linear in the weights. None: nothing."""
        return None

    def past_training(self) -> str:
        """Says in a sentence what happens past the training length."""
        return "Defined at every distance."


def leading(x: jax.Array, ndim: int) -> jax.Array:
    """Returns `x` behind axes of 1 up to `ndim` axes, to broadcast in plain sight."""
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def merge(first: Params, second: Params) -> Params:
    """Joins two dicts of parameters, deeply; where both have one, the second's."""
    joined = dict(first)
    for name, value in second.items():
        if isinstance(value, dict) and isinstance(joined.get(name), dict):
            value = merge(joined[name], value)
        joined[name] = value
    return joined
