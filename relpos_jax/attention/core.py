"""What dense and blockwise attention share: inputs, views of a block, empty rows."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax import pairwise
from relpos_jax.masks import distances
from relpos_jax.positional.chain import Chain
from relpos_jax.positional.protocol import Block, PositionEncoding
from relpos_jax.relative import Diagonals, Joined, Pairs, Uniform

NEVER = -1e30  # a logit that weighs nothing; finite, so that its gradient is 0, not NaN


class Operands(NamedTuple):
    """The differentiable inputs, heads first (in `attend_blockwise`: time first).

    `turned_q` and `turned_k` are the outcome of the `query` and `key` hooks, or None
    where a hook is the identity; `rows` is the table by descending distance, or None;
    `q_data` and `k_data` are what the `prepare` hook returned, `[b h q f]` and
    `[b h k f]`; `laid` is what `laid_out` returned for the rows, or None.
    """

    q: jax.Array  # [b h q d]
    k: jax.Array  # [b h k d]
    v: jax.Array  # [b h k d]
    turned_q: jax.Array | None
    turned_k: jax.Array | None
    rows: Any
    params: Any
    q_data: Any = None
    k_data: Any = None
    laid: list[jax.Array] | None = None


def biases(rows: Any) -> list[jax.Array]:
    """Returns the tables `[h n]` among a block's rows: the others are of vectors."""
    return [x for x in jax.tree.leaves(rows) if x.ndim == 2]


def laid_out(rows: Any, queries: int, keys: int) -> list[jax.Array]:
    """Returns each of the `biases` as `[1 h q k]`."""
    return [Diagonals(queries, keys).bias(x) for x in biases(rows)]


def overrides(encoding: PositionEncoding, hook: str) -> bool:
    """Returns whether the encoding, or a part of a chain, has a hook of its own."""
    if isinstance(encoding, Chain):
        return any(overrides(part, hook) for part in encoding.parts)
    return getattr(type(encoding), hook) is not getattr(PositionEncoding, hook)


def heads_first(table: Any, axes: int) -> Any:
    """Moves heads before the `axes` distance axes (and behind a batch axis if 3)."""
    where = 1 if axes == 3 else 0
    return jax.tree.map(lambda x: jnp.moveaxis(x, axes, where), table)


def with_heads_first(operands: Operands) -> Operands:
    """Turns `[b t h d]` into `[b h t d]`."""
    names = ("q", "k", "v", "turned_q", "turned_k", "q_data", "k_data")
    old = {name: getattr(operands, name) for name in names}
    return operands._replace(**jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), old))


def content(operands: Operands, scale: float) -> jax.Array:
    """Returns the scaled products `[b h q k]`, added up in float32."""
    q = operands.q if operands.turned_q is None else operands.turned_q
    k = operands.k if operands.turned_k is None else operands.turned_k
    # Scale the smaller operand; in float32, so that no rounding is added.
    q = (q.astype(jnp.float32) * scale).astype(q.dtype) if q.dtype == jnp.float32 else q
    logits = pairwise.scores(q, k)
    return logits if q.dtype == jnp.float32 else logits * scale


def view(encoding, operands, logits, q_at, k_at, scale, visible, free=0) -> Block:
    """Returns the block as an encoding sees it: by diagonals if it has rows.

    Rows of the first `free` keys are by pair: see `Joined`.
    """
    queries, keys = q_at.position.shape[1], k_at.position.shape[1]
    if operands.rows is not None:
        table = operands.rows
        uniform = all(x.shape[1] == 1 for x in jax.tree.leaves(table))
        if uniform:
            rel = Uniform(queries, keys)
        else:
            laid = operands.laid or []
            rel = Diagonals(queries, keys, tuple(zip(biases(table), laid)))
        if free:
            rel = Joined(q_at.position.shape[0], queries, free, keys - free)
    else:
        rel = Pairs()
        table = encoding.table(operands.params, distances(q_at, k_at))
        table = heads_first(table, 3)
    return Block(
        operands.q,
        operands.k,
        logits,
        table,
        rel,
        q_at,
        k_at,
        scale,
        visible,
        operands.q_data,
        operands.k_data,
    )


def logits_of(
    encoding, operands: Operands, q_at, k_at, scale, visible, free=0
) -> jax.Array:
    """Returns the encoding's logits of a block, `[b h q k]` float32, unmasked."""
    logits = content(operands, scale)
    if not overrides(encoding, "score"):
        return logits
    block = view(encoding, operands, logits, q_at, k_at, scale, visible, free)
    return encoding.score(operands.params, block)


def values_of(
    encoding, operands, weights, q_at, k_at, scale, visible, free=0
) -> jax.Array:
    """Returns the weighted values `[b h q d]` float32; linear in the weights."""
    v = operands.v
    out = pairwise.sums(weights.astype(v.dtype), v)
    if not overrides(encoding, "value"):
        return out
    block = view(encoding, operands, None, q_at, k_at, scale, visible, free)
    added = encoding.value(operands.params, weights, block)
    return out if added is None else out + added
