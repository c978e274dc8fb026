"""CoPE: contextual position encoding (Golovneva et al. 2024, section 4)."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from relpos_jax.positional.protocol import Block, Dims, Params, PositionEncoding
from relpos_jax.relative import Layout
from relpos_jax.where import Where


def gates(
    logits: Float[Array, "b h q k"], visible: Bool[Array, "b #h q k"]
) -> Float[Array, "b h q k"]:
    """Returns `sigmoid(logit_ij)` (equation 3), 0 where a pair may not attend."""
    return jnp.where(visible, jax.nn.sigmoid(logits), 0.0)


def contextual_positions(
    gate: Float[Array, "b h q k"], order: Int[Array, "b k"] | None = None
) -> Float[Array, "b h q k"]:
    """Returns `p_ij = sum of g_il over the keys l from j on` (equation 4).

    Gates of keys behind the query are 0, so the sum ends at the query's own key, which
    it includes: with every gate at 1, `p_ij = i - j + 1`.

    Args:
      gate: `g_ij`.
      order: `[b k]`, the key columns by rising position; None if they stand so already.
    """
    if order is None:
        return jax.lax.cumsum(gate, axis=3, reverse=True)
    arrange = jax.vmap(lambda x, columns: x[..., columns])
    back = jnp.argsort(order, axis=1)
    return arrange(jax.lax.cumsum(arrange(gate, order), axis=3, reverse=True), back)


def interpolate(
    at_integers: Float[Array, "b h q p"], position: Float[Array, "b h q k"]
) -> Float[Array, "b h q k"]:
    """Returns values at fractional positions, from those at `0, 1, ...` (equation 5).

    `(1 - w) at_integers[floor] + w at_integers[floor + 1]` with `w` the fraction;
    positions past the last integer are taken for it.
    """
    *rows, count = at_integers.shape
    position = jnp.minimum(position, count - 1)
    # At the last integer the fraction is 1 instead of 0 of one more row.
    below = jnp.clip(position.astype(jnp.int32), 0, max(count - 2, 0))
    fraction = position - below
    step = jnp.diff(at_integers, axis=-1, append=at_integers[..., -1:])
    # One flat index: the gradient of `take_along_axis` costs several times as much.
    first = count * jnp.arange(math.prod(rows), dtype=jnp.int32).reshape(*rows, 1)
    index = (first + below).reshape(-1)

    def take(values):
        found = values.reshape(-1).at[index].get(mode="promise_in_bounds")
        return found.reshape(position.shape)

    return take(at_integers) + fraction * take(step)


@dataclasses.dataclass(frozen=True)
class Cope(PositionEncoding):
    """Counts keys by content: a key's position is how many gates are open behind it.

    `g_ij = sigmoid(q_i . k_j / sqrt(d))`, `p_ij = min(g_ij + ... + g_ii, P - 1)`, and
    the logits gain `q_i . e[p_ij]`, interpolated between the rows of a table `e [P d]`
    that heads share and each layer has for itself. `q . e` is not divided by sqrt(d).

    The paper writes the gate without 1/sqrt(d); its listing, and the code that others
    took from it, gate the scaled logits. Not here: gates with keys of their own, from
    values, and shared between layers (section 5 of the paper).

    A gate sees the logits as earlier parts of a chain left them.

    Needs all keys of a query at once: memory is linear in length times a query block.
    Keys may stand in any order (a ring cache): they are counted by their positions.

    Attributes:
      max_position: `P`, rows of the table; the paper finds far fewer than the context
        length enough.
      scaled_gates: the listing's gate; False for the equation's `sigmoid(q_i . k_j)`.
      per_head: a table for each head.
    """

    max_position: int = 64
    scaled_gates: bool = True
    per_head: bool = False

    causal_only: ClassVar[bool] = True
    whole_rows: ClassVar[bool] = True
    ordinal: ClassVar[bool] = True  # of positions only the order matters

    def __post_init__(self):
        if self.max_position < 1:
            raise ValueError(
                f"max_position counts the table's rows, so it must be at least 1, "
                f"got {self.max_position}"
            )

    def init(self, key: jax.Array, dims: Dims) -> Params:
        # The paper starts from zeros, which is NoPE; so do its listing's copies.
        heads = dims.heads if self.per_head else 1
        return {"table": jnp.zeros((heads, self.max_position, dims.head_dim))}

    def prepare(
        self,
        params: Params,
        features: Float[Array, "b k h f"] | None,
        q_at: Where,
        k_at: Where,
        layout: Layout | None,
    ):
        if layout is not None:
            return params, None, None  # keys rise along the row: nothing to sort
        # Ranks and not positions: float32 tells them apart up to 2^24 keys.
        rank = jnp.argsort(jnp.argsort(k_at.position, axis=1), axis=1)
        return params, None, rank.astype(jnp.float32)[:, :, None, None]

    def score(self, params: Params, block: Block) -> Float[Array, "b h q k"]:
        logits = block.logits if self.scaled_gates else block.logits / block.scale
        order = None
        if block.k_data is not None:
            order = jnp.argsort(block.k_data[:, 0, :, 0], axis=1)
        position = contextual_positions(gates(logits, block.visible), order)
        table = params["table"].astype(block.q.dtype)
        table = jnp.broadcast_to(table, (block.q.shape[1], *table.shape[1:]))
        at_integers = jnp.einsum(
            "bhqd,hpd->bhqp", block.q, table, preferred_element_type=jnp.float32
        )
        return block.logits + interpolate(at_integers, position)

    def past_training(self) -> str:
        return (
            f"Positions count open gates and stop at {self.max_position - 1}; with "
            f"more keys, more of them share the last."
        )
