"""Relative position representations (Shaw et al. 2018, equations 3 and 4)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from relpos_jax.positional.protocol import Block, Dims, Params, PositionEncoding


@dataclasses.dataclass(frozen=True)
class Shaw(PositionEncoding):
    """Learned vectors by clipped distance, added to keys and to values.

    `e_ij = q_i . (k_j + a^K_(j-i)) / sqrt(d)` and `z_i = sum_j w_ij (v_j + a^V_(j-i))`,
    with `j - i` clipped to `-clip .. clip`. Tables are indexed by key minus query, as
    in the paper: row `clip` is distance 0.

    Attributes:
      clip: `k` of the paper; the tables have `2 clip + 1` rows.
      keys, values: which of the two tables there are (table 3 of the paper).
      key_query: add `k_j . a^K_(j-i) / sqrt(d)` as well (Huang et al. 2020, method 4;
        "relative_key_query" of Hugging Face's BERT). Not in Shaw et al.
      per_head: a table for each head instead of one that heads share.
    """

    clip: int = 16
    keys: bool = True
    values: bool = True
    key_query: bool = False
    per_head: bool = False

    def __post_init__(self):
        if self.key_query and not self.keys:
            raise ValueError("key_query multiplies keys with the key table: keys=True")
        if self.clip < 0 or not (self.keys or self.values):
            raise ValueError(
                f"clip must not be negative and one of keys and values must be on, "
                f"got clip={self.clip}, keys={self.keys}, values={self.values}"
            )

    @property
    def turns_once(self) -> bool:
        return not self.key_query

    def init(self, key: jax.Array, dims: Dims) -> Params:
        shape = (2 * self.clip + 1, dims.heads if self.per_head else 1, dims.head_dim)
        spread = (6.0 / (shape[0] + shape[2])) ** 0.5
        names = [name for name in ("key", "value") if getattr(self, name + "s")]
        return {
            name: jax.random.uniform(part, shape, minval=-spread, maxval=spread)
            for name, part in zip(names, jax.random.split(key, len(names)), strict=True)
        }

    def table(self, params: Params, distance: Num[Array, "*n"]) -> Params:
        row = jnp.clip(-distance, -self.clip, self.clip).astype(jnp.int32) + self.clip
        names = [name for name in ("key", "value") if getattr(self, name + "s")]
        return {name: params[name].astype(jnp.float32)[row] for name in names}

    def saturation(self) -> int | None:
        return self.clip

    def score(self, params: Params, block: Block) -> Float[Array, "b h q k"]:
        if not self.keys:
            return block.logits
        rel, table = block.rel, block.table["key"]
        logits = block.logits + block.scaled(rel.query_dot, block.q, table)
        if self.key_query:
            logits = logits + block.scaled(rel.key_dot, block.k, table)
        return logits

    def value(
        self, params: Params, weights: Float[Array, "b h q k"], block: Block
    ) -> Float[Array, "b h q d"] | None:
        if not self.values:
            return None
        return block.rel.weighted(weights, block.table["value"])

    def past_training(self) -> str:
        return f"Distances past {self.clip} share the last row: alike, not undefined."
