"""What encodings that wrap another one have in common: its hooks, passed on."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float

from relpos_jax.positional.protocol import Block, Dims, Params, PositionEncoding
from relpos_jax.relative import Layout
from relpos_jax.where import Where


@dataclasses.dataclass(frozen=True)
class Wrapper(PositionEncoding):
    """Another encoding, hook by hook, for subclasses to change some of them.

    `table`, `saturation` and `causal_only` are not passed on: what stands for them
    depends on what the wrapper makes of the scores.

    Attributes:
      inner: the encoding.
    """

    inner: PositionEncoding = PositionEncoding()

    def of_inner(self, params: Params) -> Params:
        """Returns the parameters of `inner` among the wrapper's."""
        return params

    @property
    def absolute(self) -> bool:
        return self.inner.absolute

    @property
    def invariant(self) -> bool:
        return self.inner.invariant

    @property
    def ordinal(self) -> bool:
        return self.inner.ordinal

    @property
    def whole_rows(self) -> bool:
        return self.inner.whole_rows

    @property
    def length_dependent(self) -> bool:
        return self.inner.length_dependent

    @property
    def turns_once(self) -> bool:
        return self.inner.turns_once

    def init(self, key: jax.Array, dims: Dims) -> Params:
        return self.inner.init(key, dims)

    def init_shared(self, key: jax.Array, dims: Dims) -> Params:
        return self.inner.init_shared(key, dims)

    def constants(self, heads: int, head_dim: int) -> Params:
        return self.inner.constants(heads, head_dim)

    def scale(self, head_dim: int) -> float:
        return self.inner.scale(head_dim)

    def query_gain(self, head_dim: int) -> float:
        return self.inner.query_gain(head_dim)

    def embed(
        self, params: Params, x: Float[Array, "b t w"], at: Where
    ) -> Float[Array, "b t w"]:
        return self.inner.embed(self.of_inner(params), x, at)

    def enter(
        self, params: Params, x: Float[Array, "b t w"], at: Where
    ) -> Float[Array, "b t w"]:
        return self.inner.enter(self.of_inner(params), x, at)

    def features(
        self, params: Params, x: Float[Array, "b t w"]
    ) -> Float[Array, "b t h f"] | None:
        return self.inner.features(self.of_inner(params), x)

    def prepare(
        self,
        params: Params,
        features: Float[Array, "b k h f"] | None,
        q_at: Where,
        k_at: Where,
        layout: Layout | None,
    ) -> tuple[Params, Any, Any]:
        return self.inner.prepare(self.of_inner(params), features, q_at, k_at, layout)

    def query(
        self, params: Params, q: Float[Array, "b t h d"], at: Where
    ) -> Float[Array, "b t h d"]:
        return self.inner.query(self.of_inner(params), q, at)

    def key(
        self, params: Params, k: Float[Array, "b t h d"], at: Where
    ) -> Float[Array, "b t h d"]:
        return self.inner.key(self.of_inner(params), k, at)

    def score(self, params: Params, block: Block) -> Float[Array, "b h q k"]:
        return self.inner.score(self.of_inner(params), block)

    def value(
        self, params: Params, weights: Float[Array, "b h q k"], block: Block
    ) -> Float[Array, "b h q d"] | None:
        return self.inner.value(self.of_inner(params), weights, block)

    def past_training(self) -> str:
        return self.inner.past_training()
