"""Tables evaluated once and read by distance: what decoding step by step needs.

A step of decoding has one query, and keys whose order only the running program knows.
Evaluating an encoding's table for each of its pairs costs Transformer-XL a projection
of as many rows as there are keys, in every layer and step, many times what all the
rest of the layer costs. The rows depend on parameters and distances alone, so they can
be had once.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from relpos_jax.positional.protocol import (
    Block,
    Dims,
    Params,
    PositionEncoding,
    merge,
)
from relpos_jax.positional.wrapper import Wrapper
from relpos_jax.relative import Pairs

TABLE = "tabulated"  # its name among the parameters


class ByDistance(NamedTuple):
    """The four products with tables of ascending distances 0, 1, ... and any positions.

    Heads first, as in `relpos_jax.relative`: tables are `[g n]` and `[g n d]`, with `g`
    1 where heads share them. Queries meet each row once, and scores, not vectors, are
    picked for the pairs.

    Attributes:
      row: `[b q k]`, each pair's row.
    """

    row: Int[Array, "b q k"]

    def bias(self, table: Float[Array, "g n"]) -> Float[Array, "b g q k"]:
        """Returns `t[i - j]`."""
        return jnp.moveaxis(table[:, self.row], 0, 1)

    def query_dot(
        self, q: Float[Array, "b h q d"], table: Float[Array, "g n d"]
    ) -> Float[Array, "b h q k"]:
        """Returns `q_i . t[i - j]`."""
        return self._pick(self._product("bhqd,hnd->bhqn", q, table), self.row)

    def key_dot(
        self, k: Float[Array, "b h k d"], table: Float[Array, "g n d"]
    ) -> Float[Array, "b h q k"]:
        """Returns `k_j . t[i - j]`."""
        if self.row.shape[1] == 1:
            return Pairs().key_dot(k, self._rows(table))
        scores = self._product("bhqd,hnd->bhqn", k, table)
        return self._pick(scores, self.row.mT).mT

    def weighted(
        self, weights: Float[Array, "b h q k"], table: Float[Array, "g n d"]
    ) -> Float[Array, "b h q d"]:
        """Returns `sum_j w_ij t[i - j]`."""
        return Pairs().weighted(weights, self._rows(table))

    def _rows(self, table):
        return jnp.moveaxis(table[:, self.row], 0, 1)

    def _pick(self, scores, row):
        row = jnp.broadcast_to(row[:, None], (*scores.shape[:3], row.shape[2]))
        return jnp.take_along_axis(scores, row, axis=-1)

    def _product(self, spec, x, table):
        if table.shape[0] == 1:  # heads share it
            spec, table = spec.replace("hnd", "nd"), table[0]
        table = table.astype(x.dtype)
        return jnp.einsum(spec, x, table, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class Tabulated(Wrapper):
    """An encoding whose table of distances 0 to `reach - 1` is among its parameters.

    Its scores are those of `inner`; a visible pair farther apart than the table reaches
    is NaN, and positions must be integers. For causal attention, without training.

    Parameters: those of `inner` and, under "tabulated", the leaves of its table, which
    `fill` evaluates.

    Attributes:
      inner: the encoding.
      reach: distances that the table holds; where `inner` saturates earlier, the rows
        up to there are kept and stand for all that follow.
    """

    causal_only: ClassVar[bool] = True

    reach: int = 1

    def __post_init__(self):
        if self.reach < 1:
            raise ValueError(f"reach must be positive, got {self.reach}")

    @classmethod
    def wrap(
        cls, encoding: PositionEncoding, reach: int, dims: Dims
    ) -> PositionEncoding:
        """Returns the encoding tabulated, or as it is where it has no table."""
        tabulated = cls(encoding, reach)
        return tabulated if tabulated._shapes(dims) else encoding

    @property
    def rows(self) -> int:
        """Rows of the table."""
        end = self.inner.saturation()
        return self.reach if end is None else min(self.reach, end + 1)

    def fill(self, params: Params, heads: int, head_dim: int) -> Params:
        """Returns the table's leaves by number, heads first: `[h n]` and `[h n d]`.

        Args:
          params: parameters of `inner`, a layer's own and the shared ones.
          heads, head_dim: the layer's.
        """
        params = merge(self.inner.constants(heads, head_dim), params)
        table = self.inner.table(params, jnp.arange(self.rows, dtype=jnp.int32))
        leaves = [jnp.moveaxis(leaf, 1, 0) for leaf in jax.tree.leaves(table)]
        return {str(i): leaf for i, leaf in enumerate(leaves)}

    def _shapes(self, dims: Dims) -> Params:
        def leaves(key):
            own = self.inner.init(key, dims)
            params = merge(own, self.inner.init_shared(key, dims))
            return self.fill(params, dims.heads, dims.head_dim)

        return jax.eval_shape(leaves, jax.eval_shape(lambda: jax.random.key(0)))

    def init(self, key: jax.Array, dims: Dims) -> Params:
        """Returns the parameters of `inner`, and a table of zeros to be filled."""
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._shapes(dims))
        return {**self.inner.init(key, dims), TABLE: zeros}

    def _view(self, params: Params, block: Block) -> Block:
        distance = block.distance
        if not jnp.issubdtype(distance.dtype, jnp.integer):
            raise TypeError(
                f"a table is read by whole distances, but positions are "
                f"{distance.dtype}: use the encoding itself"
            )
        one = jax.ShapeDtypeStruct((1,), jnp.int32)
        tree = jax.tree.structure(jax.eval_shape(self.inner.table, params, one))
        leaves = [params[TABLE][str(i)] for i in range(tree.num_leaves)]
        return block._replace(
            table=jax.tree.unflatten(tree, leaves),
            rel=ByDistance(jnp.clip(distance, 0, self.rows - 1)),
        )

    def score(self, params: Params, block: Block) -> Float[Array, "b h q k"]:
        logits = self.inner.score(params, self._view(params, block))
        end = self.inner.saturation()
        if end is not None and end < self.reach:
            return logits  # the last row stands for all distances past it
        past = block.visible & (block.distance >= self.rows)[:, None]
        return jnp.where(past, jnp.nan, logits)

    def value(
        self, params: Params, weights: Float[Array, "b h q k"], block: Block
    ) -> Float[Array, "b h q d"] | None:
        return self.inner.value(params, weights, self._view(params, block))
