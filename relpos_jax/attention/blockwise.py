"""Attention block by block: exact, with memory that grows linearly in length.

One `lax.scan` runs over the static list of (query block, key block) pairs that the mask
leaves, with the online softmax of Milakov and Gimelshein (2018). The forward pass keeps
the output and each row's log-sum-exp; the backward pass computes a block's scores again
(Dao et al. 2022) and pulls their gradient back through `jax.vjp` of the encoding's own
`score`, so that a new encoding has an exact gradient without a line of its own.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from relpos_jax.attention import core
from relpos_jax.attention.core import NEVER, Operands
from relpos_jax.attention.dropout import Dropped, kept
from relpos_jax.masks import Mask
from relpos_jax.positional.protocol import PositionEncoding
from relpos_jax.relative import Layout
from relpos_jax.where import Where


class Plan(NamedTuple):
    """All that is static: what to compute and in which blocks."""

    encoding: PositionEncoding
    mask: Mask
    scale: float
    layout: Layout | None
    q_block: int
    k_block: int
    spacing: int = 1  # distance of neighbouring columns, where the layout is unit
    search: bool = False  # leave out blocks by what stands in them, see `search`


def block_pairs(plan: Plan, queries: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pairs of block numbers, `[p 2]`, that may hold a visible score.

    First those near the diagonal, then those so far from it that the encoding's table
    has one row for all of their distances. Query blocks in order, each with its key
    blocks in order.
    """
    near, far = [], []
    end = plan.encoding.saturation()
    known = plan.layout is not None and plan.layout.unit
    for a in range(queries // plan.q_block):
        for b in range(keys // plan.k_block):
            if plan.layout is not None:
                first = a * plan.q_block + plan.layout.offset - b * plan.k_block
                low, high = first - plan.k_block + 1, first + plan.q_block - 1
                if not plan.layout.unit:
                    # Only the sign of the distance is known, not how large it is.
                    low = -math.inf if low < 0 else 0
                    high = math.inf if high > 0 else min(high, 0) * 1e-9
                low, high = low * plan.spacing, high * plan.spacing
                if not plan.mask.keeps(low, high):
                    continue
            constant = known and end is not None and (low >= end or high <= -end)
            (far if constant else near).append((a, b))
    near, far = (np.asarray(x, np.int32).reshape(-1, 2) for x in (near, far))
    return near, far


def search(plan: Plan, pairs: np.ndarray, q_at: Where, k_at: Where):
    """Returns the same pairs, those that may hold a visible score first, and how many.

    A block is judged by the ranges of its positions and documents, in any row of the
    batch: too many may be found, but never too few.
    """

    def ranges(at: Where, size: int):
        def ends(x):
            x = x.reshape(x.shape[0], -1, size)
            real = (at.segment != 0).reshape(x.shape)
            # Blocks without a token have ends the wrong way round, and find nothing.
            kind = jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo
            least, most = kind(x.dtype).min, kind(x.dtype).max
            high = jnp.max(jnp.where(real, x, least), axis=2)
            return jnp.min(jnp.where(real, x, most), axis=2), high

        return [*ends(at.position), *ends(at.segment)]

    q_low, q_high, *q_segments = (x[:, pairs[:, 0]] for x in ranges(q_at, plan.q_block))
    k_low, k_high, *k_segments = (x[:, pairs[:, 1]] for x in ranges(k_at, plan.k_block))
    found = (q_segments[0] <= k_segments[1]) & (k_segments[0] <= q_segments[1])
    found &= plan.mask.touches(q_low, q_high, k_low, k_high)
    found = jnp.any(found, axis=0)
    order = jnp.argsort(~found, stable=True)
    return jnp.asarray(pairs)[order], jnp.sum(found)


def _cut(x, start, size):
    """Cuts a block out of `[b t h d]`, or `[b t h]`, and puts its heads first."""
    return jnp.swapaxes(jax.lax.dynamic_slice_in_dim(x, start, size, 1), 1, 2)


def _put(x, block, start):
    """Puts a block with heads first back into `[b t h d]`."""
    block = jnp.swapaxes(block, 1, 2)
    return jax.lax.dynamic_update_slice_in_dim(x, block, start, 1)


def _add(total, part, start):
    """Adds a block with heads first to `[b t h d]`."""
    here = _cut(total, start, part.shape[2])
    return _put(total, here + part.astype(total.dtype), start)


def _add_rows(total, part, start):
    """Adds a block's rows to the table's, `[h n d]`."""
    here = jax.lax.dynamic_slice_in_dim(total, start, part.shape[1], 1)
    new = here + part.astype(total.dtype)
    return jax.lax.dynamic_update_slice_in_dim(total, new, start, 1)


def _pairs(plan: Plan, q_at: Where, k_at: Where) -> tuple[np.ndarray, np.ndarray]:
    return block_pairs(plan, q_at.position.shape[1], k_at.position.shape[1])


def _scan(step, carry, plan: Plan, near, far, q_at: Where, k_at: Where):
    """Runs `step(carry, pair, far)` over the near and then over the far blocks."""
    for pairs, is_far in ((near, False), (far, True)):
        if not len(pairs):
            continue
        body = functools.partial(step, far=is_far)
        if plan.search:
            pairs, count = search(plan, pairs, q_at, k_at)
            carry = jax.lax.fori_loop(
                0, count, lambda i, c, f=body, p=pairs: f(c, p[i]), carry
            )
        else:
            carry = jax.lax.scan(lambda c, p, f=body: (f(c, p), None), carry, pairs)[0]
    return carry


def _first_row(plan: Plan, operands: Operands, a, b):
    """Returns which of the table's rows is the first of a pair of blocks."""
    # Tables descend from the highest distance of all, which is in row 0.
    return operands.q.shape[1] - (a + 1) * plan.q_block + b * plan.k_block


def rows_needed(plan: Plan, operands: Operands) -> int:
    """Returns how many rows of the table, from its first, any block reads."""
    needed = [1]
    sizes = plan.q_block + plan.k_block - 1, 1
    pairs = block_pairs(plan, operands.q.shape[1], operands.k.shape[1])
    for (a, b), size in zip((x.T for x in pairs), sizes, strict=True):
        needed += [size + int(x) for x in _first_row(plan, operands, a, b)]
    return max(needed)


def _scan_distances(step, total: Operands, plan: Plan, operands: Operands, pairs):
    """Runs `step(total, pair, laid) -> (total, d_laid)` over blocks, by distance.

    Blocks that stand equally far from the diagonal have the same biases: those are laid
    out, and their gradient is summed along diagonals, once for all such blocks.
    """
    starts = _first_row(plan, operands, pairs[:, 0], pairs[:, 1])
    order = np.argsort(starts, kind="stable")
    pairs, starts = pairs[order], starts[order]
    changes = starts[1:] != starts[:-1]
    firsts, lasts = np.append(True, changes), np.append(changes, True)
    tables, count = core.biases(operands.rows), plan.q_block + plan.k_block - 1

    def lay(tables):
        return core.laid_out(tables, plan.q_block, plan.k_block)

    def lay_from(start):
        cut = [jax.lax.dynamic_slice_in_dim(x, start, count, 1) for x in tables]
        return jax.vjp(lay, cut)

    def body(carry, item):
        total, laid, d_laid, d_tables = carry
        pair, start, first, last = item
        laid = jax.lax.cond(first, lambda: lay_from(start)[0], lambda: laid)
        total, more = step(total, pair, laid)
        d_laid = [jnp.where(first, 0, x) + y for x, y in zip(d_laid, more, strict=True)]

        def add():
            (found,) = lay_from(start)[1](d_laid)
            together = zip(d_tables, found, strict=True)
            return [_add_rows(x, y, start) for x, y in together]

        d_tables = jax.lax.cond(last, add, lambda: d_tables)
        return (total, laid, d_laid, d_tables), None

    shapes = jax.eval_shape(lambda: lay_from(0)[0])
    none = [jnp.zeros(x.shape, x.dtype) for x in shapes]
    d_tables = [jnp.zeros(x.shape, jnp.float32) for x in tables]
    total, _, _, d_tables = jax.lax.scan(
        body, (total, none, none, d_tables), (pairs, starts, firsts, lasts)
    )[0]
    leaves, tree = jax.tree.flatten(total.rows)
    found = iter(d_tables)
    leaves = [x + next(found) if x.ndim == 2 else x for x in leaves]
    return total._replace(rows=jax.tree.unflatten(tree, leaves))


def _block(plan: Plan, operands: Operands, q_at, k_at, pair, far: bool):
    """Cuts one pair of blocks out of the whole."""
    a, b = pair[0], pair[1]
    q0, k0 = a * plan.q_block, b * plan.k_block

    def cut_q(name):
        whole = getattr(operands, name)
        return jax.tree.map(lambda x: _cut(x, q0, plan.q_block), whole)

    def cut_k(name):
        whole = getattr(operands, name)
        return jax.tree.map(lambda x: _cut(x, k0, plan.k_block), whole)

    def cut(x, start, size):
        return jax.lax.dynamic_slice_in_dim(x, start, size, 1)

    start = _first_row(plan, operands, a, b)
    count = 1 if far else plan.q_block + plan.k_block - 1
    part = Operands(
        q=cut_q("q"),
        k=cut_k("k"),
        v=cut_k("v"),
        turned_q=cut_q("turned_q"),
        turned_k=cut_k("turned_k"),
        rows=jax.tree.map(lambda x: cut(x, start, count), operands.rows),
        params=operands.params,
        q_data=cut_q("q_data"),
        k_data=cut_k("k_data"),
    )
    q_at = Where(*(cut(x, q0, plan.q_block) for x in q_at))
    k_at = Where(*(cut(x, k0, plan.k_block) for x in k_at))
    return part, q_at, k_at, q0, k0, start


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_blockwise(
    plan: Plan,
    operands: Operands,
    q_at: Where,
    k_at: Where,
    drop: Dropped | None = None,
):
    """Returns what `attend_dense` does, and each row's log-sum-exp: see `forward`.

    The operands have time before heads, unlike everywhere else in attention: blocks are
    turned round as they are cut, and no whole copies are made. Lengths must be whole
    numbers of blocks.
    """
    return forward(plan, operands, q_at, k_at, drop)


def forward(
    plan: Plan,
    operands: Operands,
    q_at: Where,
    k_at: Where,
    drop: Dropped | None = None,
):
    """Returns the output `[b t h d]` and each row's log-sum-exp `[b t h]`, float32.

    The latter is `NEVER` where a row has seen nothing.
    """
    q, v = operands.q, operands.v
    rows = q.shape[:3]
    out = jnp.zeros((*rows, v.shape[3]), jnp.float32)
    highest = jnp.full(rows, NEVER, jnp.float32)
    total = jnp.zeros(rows, jnp.float32)

    def step(carry, pair, far):
        part, q_here, k_here, q0, k0, _ = _block(plan, operands, q_at, k_at, pair, far)
        old_out, old_high, old_total = (_cut(x, q0, plan.q_block) for x in carry)
        visible = plan.mask(q_here, k_here)[:, None]
        logits = core.logits_of(
            plan.encoding, part, q_here, k_here, plan.scale, visible
        )
        logits = jnp.where(visible, logits, NEVER)
        high = jnp.maximum(old_high, jnp.max(logits, axis=-1))
        # While a row has seen nothing, high is NEVER and every weight must be 0.
        weights = jnp.where(visible, jnp.exp(logits - high[..., None]), 0.0)
        fade = jnp.exp(old_high - high)
        new_total = fade * old_total + jnp.sum(weights, axis=-1)
        if drop is not None:
            weights = weights * kept(drop, weights.shape, q0, k0)
        added = core.values_of(
            plan.encoding, part, weights, q_here, k_here, plan.scale, visible
        )
        new_out = fade[..., None] * old_out + added
        new = (new_out, high, new_total)
        return tuple(_put(x, y, q0) for x, y in zip(carry, new, strict=True))

    pairs = _pairs(plan, q_at, k_at)
    carry = (out, highest, total)
    out, highest, total = _scan(step, carry, plan, *pairs, q_at, k_at)
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    out = out / total[..., None]
    return out, jnp.where(seen, highest + jnp.log(total), NEVER)


def backward(
    plan: Plan,
    operands: Operands,
    q_at: Where,
    k_at: Where,
    out,
    log_total,
    d_out,
    d_log_total=0.0,
    drop: Dropped | None = None,
) -> Operands:
    """Returns the operands' gradients, float32.

    `out` and `log_total` are those of all keys that the queries see, which may be more
    than these: then it is these keys' part of the gradient.
    """
    # Each row's sum of weight times gradient, known from the output alone.
    # The log-sum-exp's gradient by a logit is its weight.
    row = jnp.sum(d_out * out, axis=-1) - d_log_total
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), operands)

    def step(total, pair, far, laid=None):
        part, q_here, k_here, q0, k0, start = _block(
            plan, operands, q_at, k_at, pair, far
        )
        part = part._replace(laid=laid)
        d_here = _cut(d_out, q0, plan.q_block)
        visible = plan.mask(q_here, k_here)[:, None]

        def scores(part):
            return core.logits_of(
                plan.encoding, part, q_here, k_here, plan.scale, visible
            )

        def values(part, weights):
            if drop is not None:
                weights = weights * kept(drop, weights.shape, q0, k0)
            return core.values_of(
                plan.encoding, part, weights, q_here, k_here, plan.scale, visible
            )

        logits, pull_scores = jax.vjp(scores, part)
        weights = jnp.where(
            visible,
            jnp.exp(logits - _cut(log_total, q0, plan.q_block)[..., None]),
            0.0,
        )
        _, pull_values = jax.vjp(values, part, weights)
        d_part, d_weights = pull_values(d_here)
        row_here = _cut(row, q0, plan.q_block)[..., None]
        d_logits = jnp.where(visible, weights * (d_weights - row_here), 0.0)
        (d_more,) = pull_scores(d_logits)
        d_part = jax.tree.map(lambda x, y: x + y, d_part, d_more)

        def add(name, start):
            return jax.tree.map(
                lambda x, y: _add(x, y, start),
                getattr(total, name),
                getattr(d_part, name),
            )

        total = Operands(
            q=add("q", q0),
            k=add("k", k0),
            v=add("v", k0),
            turned_q=add("turned_q", q0),
            turned_k=add("turned_k", k0),
            rows=jax.tree.map(
                lambda x, y: _add_rows(x, y, start), total.rows, d_part.rows
            ),
            params=jax.tree.map(lambda x, y: x + y, total.params, d_part.params),
            q_data=add("q_data", q0),
            k_data=add("k_data", k0),
        )
        return total, d_part.laid

    def plain(total, pair, far):
        return step(total, pair, far)[0]

    near, far = _pairs(plan, q_at, k_at)
    if core.biases(operands.rows) and len(near) and not plan.search:
        near_step = functools.partial(step, far=False)
        zero = _scan_distances(
            lambda total, pair, laid: near_step(total, pair, laid=laid),
            zero,
            plan,
            operands,
            near,
        )
        near = near[:0]
    return _scan(plain, zero, plan, near, far, q_at, k_at)


def _forward(plan: Plan, operands: Operands, q_at: Where, k_at: Where, drop=None):
    out, log_total = forward(plan, operands, q_at, k_at, drop)
    return (out, log_total), ((operands, q_at, k_at, out, log_total), drop)


def _backward(plan: Plan, saved, gradients):
    known, drop = saved
    total = backward(plan, *known, *gradients, drop)
    d_operands = jax.tree.map(lambda x, y: x.astype(y.dtype), total, known[0])
    return d_operands, None, None, None


attend_blockwise.defvjp(_forward, _backward)
