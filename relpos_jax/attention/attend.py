"""One `attend` for every mode: memory, caches, windows, packed documents, padding."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from relpos_jax.attention import core
from relpos_jax.attention.core import Operands
from relpos_jax.attention.dense import attend_dense
from relpos_jax.attention.dropout import dropped
from relpos_jax.attention.fused import attend_fused, why_not
from relpos_jax.attention.patterns import check_sense
from relpos_jax.attention.plan import Plan
from relpos_jax.attention.ring import Ring, attend_ring, ring_size, steps_needed
from relpos_jax.attention.strips import (
    attend_strips,
    default_blocks,
    with_rows,
)
from relpos_jax.masks import Causal, Mask, distances
from relpos_jax.positional.protocol import Params, PositionEncoding, merge
from relpos_jax.relative import Layout, holds
from relpos_jax.where import Where

IMPLEMENTATIONS = ("auto", "blockwise", "dense", "fused", "pairs", "ring")

# Below this many scores a head and row of the batch, all at once is faster (measured
# by experiments.benchmarks.attention on two CPU cores).
DENSE_BELOW = 512 * 512


def attend(
    encoding: PositionEncoding,
    params: Params,
    q: Float[Array, "b q h d"],
    k: Float[Array, "b k h d"],
    v: Float[Array, "b k h e"],
    q_at: Where,
    k_at: Where,
    *,
    mask: Mask = Causal(),
    features: Float[Array, "b k h f"] | None = None,
    turned: bool = False,
    layout: Layout | None = None,
    implementation: str = "auto",
    blocks: tuple[int, int] | None = None,
    dropout: float = 0.0,
    key: jax.Array | None = None,
) -> Float[Array, "b q h e"]:
    """Returns attention with the encoding's scores and values, in `v`'s type.

    Scores, softmax and sums are float32 whatever the inputs' type. A query that may
    attend to nothing gives zeros, with zero gradients.

    Args:
      encoding: the position encoding.
      params: its parameters (a layer's own joined with the shared ones).
      q, k, v: queries, keys and values.
      q_at, k_at: where queries and keys stand.
      mask: which pairs attend, see `masks` and `attention.patterns`; documents and
        padding are always kept apart.
      features: what the encoding's `features` hook returned for the keys' tokens.
      turned: keys have been through the encoding's `key` hook, from a cache that keeps
        them so (`turns_once`). Otherwise they come from the projection, as queries do.
      layout: what is known about positions when the program is compiled (see `Layout`);
        None if nothing, which is right for any positions but evaluates tables for every
        pair and skips no block.
      implementation: "blockwise", "dense", "pairs" (dense, and tables on the matrix of
        distances: the oracle), "ring" (blockwise, with queries and keys cut over the
        axis "sequence" of the mesh in use, see `attention.ring`), "fused" (the
        platform's kernel, see `attention.fused`) or "auto": the ring where the mesh has
        such an axis and there are queries for each of its devices.
      blocks: queries and keys a block, for "blockwise".
      dropout: the part of the weights that is zeroed after the softmax, the others
        being raised to make up for it. Which ones depends on `key` and their places
        alone: "dense", "pairs" and "blockwise" give the same numbers.
      key: for dropout; None for none.

    Raises:
      ValueError: shapes that do not fit together, an unknown implementation, a ring
        without a mesh, a mask that makes no sense with the encoding (see
        `patterns.check_sense`), a rate outside [0, 1), dropout on a ring or on a
        pattern of several parts by blocks, "fused" where no fused kernel is exact, or
        (when not traced) positions that contradict the layout. When traced, rows that
        contradict it are NaN.
    """
    drop = dropped(key, dropout)
    _refuse(implementation, drop)
    _check(q, k, v, q_at, k_at, implementation)
    check_sense(encoding, mask)
    good = None
    if layout is not None:
        good = holds(layout, q_at, k_at)
        if not isinstance(good, jax.core.Tracer) and not bool(good.all()):
            raise ValueError(
                f"positions contradict {layout}: query row i must be the token of key "
                f"column i + {layout.offset}, and positions must rise along each "
                f"document{' by one a column' if layout.unit else ''}; "
                f"pass layout=None for other positions"
            )
    queries, heads, width = q.shape[1:]
    keys = k.shape[1]
    if implementation == "auto":
        implementation = "dense" if queries * keys <= DENSE_BELOW else "blockwise"
        if 1 < ring_size() <= queries:
            implementation = "ring"
    if layout is not None and layout.free and implementation in ("blockwise", "ring"):
        # Blocks have rows by distance for all of their keys or for none.
        layout = dataclasses.replace(layout, unit=False, free=0)
    scale = encoding.scale(width)
    params = merge(encoding.constants(heads, width), params)
    prepared, q_data, k_data = encoding.prepare(params, features, q_at, k_at, layout)
    turned_q = turned_k = None
    if core.overrides(encoding, "query"):
        turned_q = encoding.query(prepared, q, q_at)
    if turned:
        turned_k = k
    elif core.overrides(encoding, "key"):
        turned_k = encoding.key(prepared, k, k_at)
    if not any(core.overrides(encoding, hook) for hook in ("score", "value")):
        # Nothing reads what has not been turned: don't carry it along.
        q, turned_q = (q if turned_q is None else turned_q), None
        k, turned_k = (k if turned_k is None else turned_k), None
    _refuse(implementation, drop)
    unit = layout is not None and layout.unit
    operands = Operands(q, k, v, turned_q, turned_k, None, params, q_data, k_data)

    def by_blocks():
        return attend_strips(
            encoding, mask, scale, layout, operands, q_at, k_at, blocks, drop
        )

    if implementation == "blockwise":
        out = by_blocks()
    elif implementation == "fused":
        reason = why_not(encoding, mask, layout, queries, keys, drop)
        if reason is not None:
            raise ValueError(
                f"no fused kernel is exact here: {reason}; use implementation='auto'"
            )
        out = attend_fused(mask, scale, operands, q_at, k_at, by_blocks)
    elif implementation == "ring":
        pieces = ring_size()
        here = -(-queries // pieces), -(-keys // pieces)
        blocks = blocks or default_blocks(*here, encoding, params)
        if encoding.whole_rows:
            blocks = (blocks[0], keys)
        plan = Plan(encoding, mask, scale, layout, *blocks)
        operands, q_at, k_at = _pad(plan, operands, q_at, k_at, pieces)
        out = attend_ring(_ring(plan, operands, pieces), operands, q_at, k_at)
        out = out[:, :queries]
    else:
        free = 0
        if unit and implementation == "dense":
            free = layout.free
            operands = _joined_rows(encoding, operands, layout, q_at, k_at)
        operands = core.with_heads_first(operands)
        out = attend_dense(encoding, mask, scale, operands, q_at, k_at, drop, free)
        out = jnp.swapaxes(out, 1, 2)
    if good is not None:
        out = jnp.where(good[:, None, None, None], out, jnp.nan)
    return out.astype(v.dtype)


def _joined_rows(encoding, operands: Operands, layout: Layout, q_at, k_at):
    """Adds rows by distance, and before them by pair for the `layout.free` first keys.

    See `relative.Joined`.
    """
    free = layout.free
    rest = operands._replace(k=operands.k[:, free:])
    near = dataclasses.replace(layout, offset=layout.offset - free)
    rows = with_rows(encoding, rest, near).rows
    if free:
        first = Where(*(x[:, :free] for x in k_at))
        table = encoding.table(operands.params, distances(q_at, first).reshape(-1))
        far = core.heads_first(table, 1)
        rows = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), far, rows)
    return operands._replace(rows=rows)


def _ring(plan: Plan, operands: Operands, size: int) -> Ring:
    """Returns how the ring goes; encodings that need whole rows gather all keys."""
    whole = plan.encoding.whole_rows
    pieces = operands.q.shape[1] // size, operands.k.shape[1] // size
    steps = 1 if whole else steps_needed(plan.mask, plan.layout, pieces, size)
    return Ring(plan._replace(layout=None), plan.layout, size, steps, gathered=whole)


def _pad(plan: Plan, operands: Operands, q_at: Where, k_at: Where, pieces: int):
    """Fills up to whole blocks, as many in each piece, with empty slots."""
    whole = plan.encoding.whole_rows  # then all keys are one block everywhere
    q_size = plan.q_block * pieces
    k_size = plan.k_block * (1 if whole else pieces)

    def fill(x, size, axis):
        short = -x.shape[axis] % size
        widths = [(0, short if i == axis else 0) for i in range(x.ndim)]
        return jnp.pad(x, widths) if short else x

    def fill_all(names, size):
        old = {name: getattr(operands, name) for name in names}
        return jax.tree.map(lambda x: fill(x, size, 1), old)

    operands = operands._replace(
        **fill_all(("q", "turned_q", "q_data"), q_size),
        **fill_all(("k", "v", "turned_k", "k_data"), k_size),
    )
    q_at = Where(*(fill(x, q_size, 1) for x in q_at))
    k_at = Where(*(fill(x, k_size, 1) for x in k_at))
    return operands, q_at, k_at


def _refuse(implementation: str, drop):
    if implementation == "ring" and drop is not None:
        raise ValueError(
            "a ring has no dropout on attention weights: set attention_dropout to 0, "
            "or use a mesh without a sequence axis"
        )


def _check(q, k, v, q_at, k_at, implementation):
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}"
        )
    if implementation == "ring" and ring_size() == 1:
        raise ValueError(
            "ring attention needs a mesh whose axis 'sequence' is longer than 1: run "
            "it under jax.set_mesh, or use another implementation"
        )
    (batch, queries, heads, width), keys = q.shape, k.shape[1]
    wanted = {
        "k": (k.shape, (batch, keys, heads, width)),
        "v": (v.shape[:3], (batch, keys, heads)),
        "q_at": (q_at.position.shape, (batch, queries)),
        "k_at": (k_at.position.shape, (batch, keys)),
    }
    for name, (found, needed) in wanted.items():
        if found != needed:
            raise ValueError(
                f"{name} has shape {found}, but q of shape {q.shape} needs {needed}"
            )
