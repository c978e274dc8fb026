"""Learned absolute embeddings (Gehring et al. 2017; BERT, GPT-2)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from relpos_jax.positional.protocol import Dims, Params, PositionEncoding
from relpos_jax.where import Where


@dataclasses.dataclass(frozen=True)
class Learned(PositionEncoding):
    """Adds row `position` of a trained table to the token embeddings.

    A table has nothing to say past its last row, so what happens there is a choice:

    * "refuse" (the default): longer inputs are an error; a position past the table
      that is known only when the program runs gives NaN.
    * "last": the last row is used again.
    * "wrap": position modulo the number of rows.

    Attributes:
      rows: number of positions in the table.
      beyond: one of the three above.
      by_layer: each layer has a table of its own and adds it to its input (Al-Rfou et
        al. 2019; `attn_type` 3 of Dai et al.'s code), not the embedding alone.
    """

    rows: int = 512
    beyond: str = "refuse"
    by_layer: bool = False

    absolute: ClassVar[bool] = True
    invariant: ClassVar[bool] = False

    def __post_init__(self):
        if self.rows < 1:
            raise ValueError(f"rows must be positive, got {self.rows}")
        if self.beyond not in ("refuse", "last", "wrap"):
            raise ValueError(
                f"beyond must be 'refuse', 'last' or 'wrap', got {self.beyond!r}"
            )

    def init(self, key: jax.Array, dims: Dims) -> Params:
        return self._table(key, dims) if self.by_layer else {}

    def init_shared(self, key: jax.Array, dims: Dims) -> Params:
        return {} if self.by_layer else self._table(key, dims)

    def _table(self, key: jax.Array, dims: Dims) -> Params:
        return {"table": 0.02 * jax.random.normal(key, (self.rows, dims.width))}

    def embed(
        self, params: Params, x: Float[Array, "b t w"], at: Where
    ) -> Float[Array, "b t w"]:
        return x if self.by_layer else self._add(params, x, at)

    def enter(
        self, params: Params, x: Float[Array, "b t w"], at: Where
    ) -> Float[Array, "b t w"]:
        return self._add(params, x, at) if self.by_layer else x

    def _add(self, params: Params, x: jax.Array, at: Where) -> jax.Array:
        length, position = at.position.shape[1], at.position
        if not jnp.issubdtype(position.dtype, jnp.integer):
            raise ValueError(
                f"learned positions index a table, so they must be integers, "
                f"got {position.dtype}"
            )
        if self.beyond == "refuse" and length > self.rows:
            raise ValueError(
                f"{length} tokens are longer than the learned table of {self.rows} "
                f"rows; choose beyond='last' or 'wrap' to say what should happen there"
            )
        if self.beyond == "last":
            position = jnp.clip(position, 0, self.rows - 1)
        elif self.beyond == "wrap":
            position = position % self.rows
        # Negative indices would count from the end: they are out of the table as well.
        position = jnp.where(position < 0, self.rows, position)
        rows = params["table"].at[position].get(mode="fill", fill_value=jnp.nan)
        rows = jnp.where((at.segment != 0)[..., None], rows, 0.0)
        return x + rows.astype(x.dtype)

    def past_training(self) -> str:
        then = {
            "refuse": "an error",
            "last": "the last row is used again",
            "wrap": "positions wrap around (modulo)",
        }[self.beyond]
        return f"The table has {self.rows} rows; past them: {then}."
