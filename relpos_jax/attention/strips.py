"""Blockwise attention for masks that are made of parts: sparse patterns.

Each part (`masks.Strip`) arranges tokens so that what it lets attend stands close
together, runs block by block, and gives an output and a log-sum-exp for every query;
the outputs are put together as one softmax over all that any part sees.
"""

import jax
import jax.numpy as jnp

from relpos_jax.attention import core
from relpos_jax.attention.blockwise import attend_blockwise
from relpos_jax.attention.core import Operands
from relpos_jax.attention.dropout import Dropped
from relpos_jax.attention.plan import Plan, rows_needed
from relpos_jax.masks import Mask, Strip
from relpos_jax.positional.protocol import Params, PositionEncoding
from relpos_jax.relative import Layout, descending
from relpos_jax.where import Where

OF_QUERIES = ("q", "turned_q", "q_data")
OF_KEYS = ("k", "v", "turned_k", "k_data")

# Largest blocks of gathered tokens, few and of any distances; and where the encoding
# has a vector for each pair.
GATHERED, GATHERED_VECTORS = 128, 32


def attend_strips(
    encoding: PositionEncoding,
    mask: Mask,
    scale: float,
    layout: Layout | None,
    operands: Operands,
    q_at: Where,
    k_at: Where,
    blocks: tuple[int, int] | None,
    drop: Dropped | None = None,
) -> jax.Array:
    """Returns `[b q h d]` float32, as `attend_dense`, for operands with time first.

    Raises:
      ValueError: dropout with tokens that don't keep their places.
    """
    outs, totals = [], []
    if drop is not None and any(s.fold > 1 or s.gather for s in mask.strips()):
        raise ValueError(
            f"{mask} has no dropout on attention weights by blocks, which move its "
            "tokens: set attention_dropout to 0, or use implementation='dense'"
        )
    for strip in mask.strips():
        if strip.fold > 1 and (layout is None or not layout.unit):
            strip = strip._replace(fold=1)
        out, total = _attend(
            encoding, strip, scale, layout, operands, q_at, k_at, blocks, drop
        )
        outs.append(out)
        totals.append(total)
    if len(outs) == 1:
        return outs[0]
    return merge(outs, totals)


def merge(outs: list[jax.Array], totals: list[jax.Array]) -> jax.Array:
    """Returns attention to the union of disjoint sets of keys.

    Args:
      outs: attention to each set, `[b q h d]`.
      totals: log-sum-exp of each set's logits, `[b q h]`.
    """
    highest = jax.lax.stop_gradient(jnp.max(jnp.stack(totals), axis=0))
    shares = [jnp.exp(total - highest) for total in totals]
    whole = sum(shares)
    parts = zip(outs, shares, strict=True)
    return sum(out * (share / whole)[..., None] for out, share in parts)


def _attend(encoding, strip: Strip, scale, layout, operands, q_at, k_at, blocks, drop):
    """Returns one strip's output and log-sum-exp, queries where they stood."""
    if strip.gather:
        return _gathered(encoding, strip, scale, operands, q_at, k_at, blocks)
    queries, fold = operands.q.shape[1], strip.fold
    if fold > 1:
        before = layout.offset % fold
        operands = _of(operands, OF_QUERIES, lambda x: _fold(x, fold, before))
        operands = _of(operands, OF_KEYS, lambda x: _fold(x, fold, 0))
        q_at = Where(*(_fold(x, fold, before) for x in q_at))
        k_at = Where(*(_fold(x, fold, 0) for x in k_at))
        layout = Layout(layout.offset // fold)
    found = _run(encoding, strip, scale, layout, operands, q_at, k_at, blocks, drop)
    if fold > 1:
        found = tuple(_unfold(x, fold)[:, before : before + queries] for x in found)
    return found


def _gathered(encoding, strip: Strip, scale, operands, q_at, k_at, blocks):
    """Attends with the picked keys, or queries, brought to the front."""
    names, at = {
        "keys": (OF_KEYS, k_at),
        "queries": (OF_QUERIES, q_at),
    }[strip.gather]
    picked = strip.mask.picks(at.position) & (at.segment != 0)
    order = jnp.argsort(~picked, axis=1, stable=True)

    def take(x, order=order):
        index = order.reshape(*order.shape, *([1] * (x.ndim - 2)))
        return jnp.take_along_axis(x, index, axis=1)

    at = Where(take(at.position), take(jnp.where(picked, at.segment, 0)))
    operands = _of(operands, names, take)
    if strip.gather == "keys":
        return _run(encoding, strip, scale, None, operands, q_at, at, blocks)
    found = _run(encoding, strip, scale, None, operands, at, k_at, blocks)
    back = jnp.argsort(order, axis=1)
    return tuple(take(x, back) for x in found)


def _run(
    encoding, strip: Strip, scale, layout, operands, q_at, k_at, blocks, drop=None
):
    queries, keys = operands.q.shape[1], operands.k.shape[1]
    if blocks is None:
        blocks = _blocks(encoding, strip, layout, operands)
    if encoding.whole_rows:
        blocks = (blocks[0], keys)
    search = strip.search or bool(strip.gather)
    plan = Plan(
        encoding,
        strip.mask,
        scale,
        layout,
        *blocks,
        spacing=strip.fold,
        search=search,
        rows=default_rows(operands.q.shape[0], blocks),
    )
    operands, q_at, k_at = _pad(plan, operands, q_at, k_at)
    if layout is not None and layout.unit:
        count = rows_needed(plan, operands)
        operands = with_rows(encoding, operands, layout, strip.fold, count)
    out, total = attend_blockwise(plan, operands, q_at, k_at, drop)
    return out[:, :queries], total[:, :queries]


def _blocks(encoding, strip: Strip, layout, operands) -> tuple[int, int]:
    queries, keys = operands.q.shape[1], operands.k.shape[1]
    q_block, k_block = default_blocks(queries, keys, encoding, operands.params)
    if strip.gather:
        vectors = has_vectors(encoding, operands.params)
        most = GATHERED_VECTORS if vectors else GATHERED
        return min(q_block, most), min(k_block, most)
    if strip.block:
        return min(q_block, strip.block), min(k_block, strip.block)
    return q_block, k_block


def default_blocks(
    queries: int, keys: int, encoding: PositionEncoding, params: Params
) -> tuple[int, int]:
    """Returns the block sizes to use for these lengths.

    Large ones keep both cores of a small machine busy. A block needs `queries + keys -
    1` rows of a table, so where those are vectors fewer queries do less for nothing,
    and with vectors that are one and the same away from the diagonal fewer keys do
    (measured by experiments.benchmarks).
    """
    most = (512, 256)
    if has_vectors(encoding, params):
        most = (256, 256) if encoding.saturation() is not None else (256, 512)
    return min(most[0], _up(queries, 8)), min(most[1], _up(keys, 8))


def default_rows(batch: int, blocks: tuple[int, int]) -> int | None:
    """Returns how many rows of the batch a block has, which divide it; None for all.

    On CPU as few as keep a block from being small, one as a rule: its caches then hold
    what is between two products. All elsewhere, and where the compiler cuts the batch
    over a mesh's devices.
    """
    if jax.default_backend() != "cpu" or jax.sharding.get_abstract_mesh().axis_names:
        return None
    most = 512 * 256 // (blocks[0] * blocks[1])
    return max(r for r in range(1, batch + 1) if batch % r == 0 and r <= max(most, 1))


def has_vectors(encoding: PositionEncoding, params: Params) -> bool:
    """Returns whether the encoding's table has a vector for each distance."""
    return any(row.ndim == 3 for row in _rows(encoding, params))


def _rows(encoding: PositionEncoding, params: Params) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of a table of one distance."""
    distance = jax.ShapeDtypeStruct((1,), jnp.int32)
    return jax.tree.leaves(jax.eval_shape(encoding.table, params, distance))


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def with_rows(
    encoding: PositionEncoding,
    operands: Operands,
    layout: Layout,
    spacing: int = 1,
    count: int | None = None,
) -> Operands:
    """Evaluates the table once a distance, from the highest down.

    Operands have time first; neighbouring columns are `spacing` apart. `count` is the
    number of distances, None for all that there are.
    """
    queries, keys = operands.q.shape[1], operands.k.shape[1]
    count = queries + keys - 1 if count is None else count
    distance = descending(queries - 1 + layout.offset, count)
    table = encoding.table(operands.params, distance * spacing)
    return operands._replace(rows=core.heads_first(table, 1))


def _of(operands: Operands, names, change) -> Operands:
    """Returns the operands with some of them changed."""
    old = {name: getattr(operands, name) for name in names}
    return operands._replace(**jax.tree.map(change, old))


def _fold(x: jax.Array, fold: int, before: int) -> jax.Array:
    """Deals each row of `[b t ...]` to `fold` rows, after `before` zeros."""
    short = -(before + x.shape[1]) % fold
    x = jnp.pad(x, [(0, 0), (before, short)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(x.shape[0], -1, fold, *x.shape[2:])
    x = jnp.swapaxes(x, 1, 2)
    return x.reshape(-1, *x.shape[2:])


def _unfold(x: jax.Array, fold: int) -> jax.Array:
    """Undoes `_fold`, but for what it filled in."""
    x = jnp.swapaxes(x.reshape(-1, fold, *x.shape[1:]), 1, 2)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _pad(plan: Plan, operands: Operands, q_at: Where, k_at: Where):
    """Fills up to whole blocks with empty slots."""

    def fill(x, size):
        short = -x.shape[1] % size
        widths = [(0, 0), (0, short)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, widths) if short else x

    operands = _of(operands, OF_QUERIES, lambda x: fill(x, plan.q_block))
    operands = _of(operands, OF_KEYS, lambda x: fill(x, plan.k_block))
    q_at = Where(*(fill(x, plan.q_block) for x in q_at))
    k_at = Where(*(fill(x, plan.k_block) for x in k_at))
    return operands, q_at, k_at
