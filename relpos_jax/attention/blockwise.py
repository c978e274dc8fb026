"""Attention block by block: exact, with memory that grows linearly in length.

One `lax.scan` runs over the static list of (query block, key block) pairs that the mask
leaves, with the online softmax of Milakov and Gimelshein (2018). The forward pass keeps
the output and each row's log-sum-exp; the backward pass computes a block's scores again
(Dao et al. 2022) and pulls their gradient back through `jax.vjp` of the encoding's own
`score`, so that a new encoding has an exact gradient without a line of its own.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from relpos_jax.attention import core
from relpos_jax.attention.core import NEVER, Operands
from relpos_jax.attention.dropout import Dropped, kept
from relpos_jax.attention.plan import Plan, block_pairs, first_row, places, search
from relpos_jax.where import Where


class Span(NamedTuple):
    """Which part of `[b t h d]` a block has, along `b` and `t`."""

    row: jax.Array | int  # of the batch
    start: jax.Array  # of the time
    rows: int | None  # how many of the batch, all for None
    size: int  # how many of the time

    def slice(self, x):
        """Returns the block, time before heads."""
        x = jax.lax.dynamic_slice_in_dim(x, self.start, self.size, 1)
        if self.rows is None:
            return x
        return jax.lax.dynamic_slice_in_dim(x, self.row, self.rows, 0)

    def cut(self, x):
        """Returns the block of `[b t h d]`, or of `[b t h]`, heads before time."""
        return jnp.swapaxes(self.slice(x), 1, 2)

    def put(self, x, block):
        """Puts a block with heads first back into `[b t h d]`."""
        block = jnp.swapaxes(block, 1, 2)
        starts = (self.row, self.start, *[0] * (x.ndim - 2))
        return jax.lax.dynamic_update_slice(x, block, starts)

    def add(self, total, part):
        """Adds a block with heads first to `[b t h d]`."""
        return self.put(total, self.cut(total) + part.astype(total.dtype))


def _spans(plan: Plan, place) -> tuple[Span, Span]:
    """Returns the block's spans of queries and of keys."""
    group, a, b = place
    row = 0 if plan.rows is None else group * plan.rows
    return (
        Span(row, a * plan.q_block, plan.rows, plan.q_block),
        Span(row, b * plan.k_block, plan.rows, plan.k_block),
    )


def _add_rows(total, part, start):
    """Adds a block's rows to the table's, `[h n d]`."""
    here = jax.lax.dynamic_slice_in_dim(total, start, part.shape[1], 1)
    new = here + part.astype(total.dtype)
    return jax.lax.dynamic_update_slice_in_dim(total, new, start, 1)


def _kept(drop: Dropped, weights, queries: Span, keys: Span):
    return kept(drop, weights.shape, queries.start, keys.start, queries.row)


def _pairs(plan: Plan, q_at: Where, k_at: Where) -> tuple[np.ndarray, np.ndarray]:
    return block_pairs(plan, q_at.position.shape[1], k_at.position.shape[1])


def _scan(step, carry, plan: Plan, near, far, q_at: Where, k_at: Where):
    """Runs `step(carry, place, far)` over the near and then over the far blocks."""
    batch = q_at.position.shape[0]
    for pairs, is_far in ((near, False), (far, True)):
        if not len(pairs):
            continue
        body = functools.partial(step, far=is_far)
        if plan.search:
            pairs, count = search(plan, pairs, q_at, k_at)
            found = places(plan, pairs, batch)
            count = count * (len(found) // len(pairs))
            carry = jax.lax.fori_loop(
                0, count, lambda i, c, f=body, p=found: f(c, p[i]), carry
            )
        else:
            found = places(plan, pairs, batch)
            carry = jax.lax.scan(lambda c, p, f=body: (f(c, p), None), carry, found)[0]
    return carry


def _scan_distances(step, total: Operands, plan: Plan, operands: Operands, pairs):
    """Runs `step(total, place, laid) -> (total, d_laid)` over blocks, by distance.

    Blocks that stand equally far from the diagonal have the same biases: those are laid
    out, and their gradient is summed along diagonals, once for all such blocks.
    """
    found = places(plan, pairs, operands.q.shape[0])
    starts = first_row(plan, operands, found[:, 1], found[:, 2])
    order = np.argsort(starts, kind="stable")
    found, starts = found[order], starts[order]
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
        place, start, first, last = item
        laid = jax.lax.cond(first, lambda: lay_from(start)[0], lambda: laid)
        total, more = step(total, place, laid)
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
        body, (total, none, none, d_tables), (found, starts, firsts, lasts)
    )[0]
    leaves, tree = jax.tree.flatten(total.rows)
    added = iter(d_tables)
    leaves = [x + next(added) if x.ndim == 2 else x for x in leaves]
    return total._replace(rows=jax.tree.unflatten(tree, leaves))


def _block(plan: Plan, operands: Operands, q_at, k_at, place, far: bool):
    """Cuts one block's operands and places out of the whole."""
    queries, keys = _spans(plan, place)
    start = first_row(plan, operands, place[1], place[2])
    count = 1 if far else plan.q_block + plan.k_block - 1

    def cut(span, name):
        return jax.tree.map(span.cut, getattr(operands, name))

    def rows(x):
        return jax.lax.dynamic_slice_in_dim(x, start, count, 1)

    part = Operands(
        q=cut(queries, "q"),
        k=cut(keys, "k"),
        v=cut(keys, "v"),
        turned_q=cut(queries, "turned_q"),
        turned_k=cut(keys, "turned_k"),
        rows=jax.tree.map(rows, operands.rows),
        params=operands.params,
        q_data=cut(queries, "q_data"),
        k_data=cut(keys, "k_data"),
    )
    q_at = Where(*(queries.slice(x) for x in q_at))
    k_at = Where(*(keys.slice(x) for x in k_at))
    return part, q_at, k_at, queries, keys, start


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

    def step(carry, place, far):
        part, q_here, k_here, queries, keys, _ = _block(
            plan, operands, q_at, k_at, place, far
        )
        old_out, old_high, old_total = (queries.cut(x) for x in carry)
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
            weights = weights * _kept(drop, weights, queries, keys)
        added = core.values_of(
            plan.encoding, part, weights, q_here, k_here, plan.scale, visible
        )
        new_out = fade[..., None] * old_out + added
        new = (new_out, high, new_total)
        return tuple(queries.put(x, y) for x, y in zip(carry, new, strict=True))

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

    def step(total, place, far, laid=None):
        part, q_here, k_here, queries, keys, start = _block(
            plan, operands, q_at, k_at, place, far
        )
        part = part._replace(laid=laid)
        d_here = queries.cut(d_out)
        visible = plan.mask(q_here, k_here)[:, None]

        def scores(part):
            return core.logits_of(
                plan.encoding, part, q_here, k_here, plan.scale, visible
            )

        def values(part, weights):
            if drop is not None:
                weights = weights * _kept(drop, weights, queries, keys)
            return core.values_of(
                plan.encoding, part, weights, q_here, k_here, plan.scale, visible
            )

        logits, pull_scores = jax.vjp(scores, part)
        weights = jnp.where(
            visible,
            jnp.exp(logits - queries.cut(log_total)[..., None]),
            0.0,
        )
        _, pull_values = jax.vjp(values, part, weights)
        d_part, d_weights = pull_values(d_here)
        row_here = queries.cut(row)[..., None]
        d_logits = jnp.where(visible, weights * (d_weights - row_here), 0.0)
        (d_more,) = pull_scores(d_logits)
        d_part = jax.tree.map(lambda x, y: x + y, d_part, d_more)

        def add(span, name):
            return jax.tree.map(span.add, getattr(total, name), getattr(d_part, name))

        total = Operands(
            q=add(queries, "q"),
            k=add(keys, "k"),
            v=add(keys, "v"),
            turned_q=add(queries, "turned_q"),
            turned_k=add(keys, "turned_k"),
            rows=jax.tree.map(
                lambda x, y: _add_rows(x, y, start), total.rows, d_part.rows
            ),
            params=jax.tree.map(lambda x, y: x + y, total.params, d_part.params),
            q_data=add(queries, "q_data"),
            k_data=add(keys, "k_data"),
        )
        return total, d_part.laid

    def plain(total, place, far):
        return step(total, place, far)[0]

    near, far = _pairs(plan, q_at, k_at)
    if core.biases(operands.rows) and len(near) and not plan.search:
        near_step = functools.partial(step, far=False)
        zero = _scan_distances(
            lambda total, place, laid: near_step(total, place, laid=laid),
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
