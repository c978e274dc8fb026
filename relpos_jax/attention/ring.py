"""Attention over a sequence that is cut over devices: keys go round a ring.

Each device holds a piece of the queries and a piece of the keys and values. In every
step it attends to the keys that it holds and passes them on to its neighbour (Liu et
al. 2023, "Ring Attention"); the partial results are joined by their log-sum-exp. The
backward pass goes round once more, and the gradients of keys and values travel with
them. Between two pieces it is blockwise attention, so every encoding's own `score` and
its exact gradient hold here too.

What a device knows of its place in the sequence is only where its tokens stand, which
`Where` says; keys bring theirs along. Where positions are known to rise by one a
column (`Layout.unit`), the distances between two pieces follow from the pieces'
numbers, and tables are evaluated once a distance: O(queries + keys) rows a device for
the whole round.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.attention import blockwise, core
from relpos_jax.attention.core import Operands
from relpos_jax.attention.plan import Plan
from relpos_jax.axes import SEQUENCE, mesh_sizes
from relpos_jax.masks import Mask
from relpos_jax.relative import Layout, descending
from relpos_jax.where import Where

_STILL = ("q", "turned_q", "q_data")
_MOVING = ("k", "v", "turned_k", "k_data")


class Ring(NamedTuple):
    """All that is static: what two pieces compute, and how often keys move.

    Attributes:
      plan: of blockwise attention between two pieces, without a layout.
      layout: what is known of the positions of the whole; None if nothing.
      size: devices in the ring.
      steps: how many pieces of keys a device sees.
      gathered: every device holds all keys, and none move.
    """

    plan: Plan
    layout: Layout | None
    size: int
    steps: int
    gathered: bool


def ring_size() -> int:
    """Returns over how many devices the mesh in use (`jax.set_mesh`) cuts sequences."""
    return mesh_sizes().get(SEQUENCE, 1)


def steps_needed(mask: Mask, layout: Layout | None, pieces: tuple, size: int) -> int:
    """Returns how many pieces of keys, its own first, a device may have to see.

    Args:
      mask: which distances attend.
      layout: what is known of positions.
      pieces: length of a piece of queries, and of keys.
      size: devices in the ring.
    """
    if layout is None or not layout.unit:
        return size
    queries, keys = pieces

    def needed(step: int) -> bool:
        for here in range(size):
            first = here * queries + layout.offset - (here - step) % size * keys
            if mask.keeps(first - keys + 1, first + queries - 1):
                return True
        return False

    return 1 + max((step for step in range(size) if needed(step)), default=0)


def attend_ring(ring: Ring, operands: Operands, q_at: Where, k_at: Where):
    """Returns `[b t h d]` float32: what `attend_blockwise` returns for the whole.

    Lengths must be whole numbers of blocks on each device of the ring. Axes of the mesh
    other than `SEQUENCE` are left to the compiler: it may cut the batch and the heads.
    """
    return _attend(ring, operands, q_at, k_at)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, operands: Operands, q_at: Where, k_at: Where):
    return _forward(ring, operands, q_at, k_at)[0]


def _forward(ring: Ring, operands: Operands, q_at: Where, k_at: Where):
    still, moving = _specs(ring)
    cut = jax.P(None, SEQUENCE)
    run = jax.shard_map(
        functools.partial(_forward_here, ring),
        in_specs=(jax.P(SEQUENCE), still, moving, jax.P(), cut),
        out_specs=(cut, cut),
        axis_names={SEQUENCE},
        check_vma=False,
    )
    parts = _part(operands, k_at)
    out, log_total = run(_numbers(ring), *parts, q_at)
    return out, (operands, q_at, k_at, out, log_total)


def _backward(ring: Ring, saved, d_out):
    operands, q_at, k_at, out, log_total = saved
    still, moving = _specs(ring)
    cut = jax.P(None, SEQUENCE)
    run = jax.shard_map(
        functools.partial(_backward_here, ring),
        in_specs=(jax.P(SEQUENCE), still, moving, jax.P(), cut, cut, cut, cut),
        out_specs=(still, moving, jax.P()),
        axis_names={SEQUENCE},
        check_vma=False,
    )
    parts = _part(operands, k_at)
    found = run(_numbers(ring), *parts, q_at, out, log_total, d_out)
    d_still, d_moving, d_params = found
    total = Operands(**d_still, **d_moving, rows=None, params=d_params)
    return jax.tree.map(lambda x, y: x.astype(y.dtype), total, operands), None, None


_attend.defvjp(_forward, _backward)


def _specs(ring: Ring):
    cut = jax.P(None, SEQUENCE)
    return cut, jax.P() if ring.gathered else cut


def _numbers(ring: Ring) -> jax.Array:
    # Each device's number, as data: `axis_index` can't be had beside automatic axes
    # on every platform.
    return jnp.arange(ring.size, dtype=jnp.int32)


def _part(operands: Operands, k_at: Where):
    """Returns what stays, what moves, and the parameters."""
    still = {name: getattr(operands, name) for name in _STILL}
    moving = {name: getattr(operands, name) for name in _MOVING}
    return still, (moving, k_at), operands.params


def _table(ring: Ring, params, number, step, queries: int, keys: int):
    """Returns the rows of the distances between two pieces, None if none are known."""
    if ring.layout is None or not ring.layout.unit:
        return None
    other = 0 if ring.gathered else (number - step) % ring.size
    first = number * queries + ring.layout.offset - other * keys
    distance = descending(first + queries - 1, queries + keys - 1)
    table = ring.plan.encoding.table(params, distance)
    return core.heads_first(table, 1)


def _pass_on(ring: Ring, tree, hops: int = 1):
    if ring.gathered:
        return tree
    to = [(i, (i + hops) % ring.size) for i in range(ring.size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, SEQUENCE, to), tree)


def _forward_here(ring: Ring, number, still, moving, params, q_at):
    def attend(moving, step):
        (moving, k_at), queries = moving, still["q"].shape[1]
        rows = _table(ring, params, number[0], step, queries, moving["k"].shape[1])
        operands = Operands(**still, **moving, rows=rows, params=params)
        return blockwise.forward(ring.plan, operands, q_at, k_at)

    def body(carry, step):
        moving, (out, log_total) = carry
        after = _pass_on(ring, moving)  # before they are used, so that both overlap
        more, log_more = attend(moving, step)
        high = jnp.maximum(log_total, log_more)
        old, new = jnp.exp(log_total - high), jnp.exp(log_more - high)
        out = (old[..., None] * out + new[..., None] * more) / (old + new)[..., None]
        return (after, (out, high + jnp.log(old + new))), None

    heads = moving[0]["v"].shape[2:]
    shape = (*still["q"].shape[:2], *heads)
    nothing = jnp.zeros(shape, jnp.float32), jnp.full(shape[:3], core.NEVER)
    carry = (moving, nothing)
    (_, (out, log_total)), _ = jax.lax.scan(body, carry, jnp.arange(ring.steps))
    return out, log_total


def _backward_here(ring: Ring, number, still, moving, params, q_at, *results):
    def pull(moving, step):
        (moving, k_at), queries = moving, still["q"].shape[1]

        def table(params):
            keys = moving["k"].shape[1]
            return _table(ring, params, number[0], step, queries, keys)

        rows, pull_table = jax.vjp(table, params)
        operands = Operands(**still, **moving, rows=rows, params=params)
        found = blockwise.backward(ring.plan, operands, q_at, k_at, *results)
        (more,) = pull_table(
            jax.tree.map(lambda x, y: x.astype(y.dtype), found.rows, rows)
        )
        d_params = jax.tree.map(jnp.add, found.params, more)
        d_still = {name: getattr(found, name) for name in _STILL}
        return d_still, {name: getattr(found, name) for name in _MOVING}, d_params

    def body(carry, step):
        moving, d_still, d_moving, d_params = carry
        after = _pass_on(ring, moving)
        found = pull(moving, step)
        sums = jax.tree.map(jnp.add, (d_still, d_moving, d_params), found)
        d_still, d_moving, d_params = sums
        return (after, d_still, _pass_on(ring, d_moving), d_params), None

    zero = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.float32), (still, moving[0], params)
    )
    carry = (moving, *zero)
    (_, d_still, d_moving, d_params), _ = jax.lax.scan(
        body, carry, jnp.arange(ring.steps)
    )
    d_params = jax.lax.psum(d_params, SEQUENCE)
    if ring.gathered:
        d_moving = jax.lax.psum(d_moving, SEQUENCE)
    elif ring.steps < ring.size:  # the rest of the way round, at once
        d_moving = _pass_on(ring, d_moving, ring.size - ring.steps)
    return d_still, d_moving, d_params
