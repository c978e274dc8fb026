"""Which blocks of scores blockwise attention computes, and in which order."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from relpos_jax.attention.core import Operands
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
    rows: int | None = None  # of the batch a block, which divides it; None for all


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


def places(plan: Plan, pairs, batch: int):
    """Returns `[p 3]`: each pair for each group of `plan.rows` of the batch.

    A group's number, then the pair's. Groups of a pair follow each other.
    """
    groups = batch // (plan.rows or batch)
    xp = np if isinstance(pairs, np.ndarray) else jnp
    group = xp.tile(xp.arange(groups, dtype=xp.int32), len(pairs))
    return xp.concatenate([group[:, None], xp.repeat(pairs, groups, axis=0)], axis=1)


def first_row(plan: Plan, operands: Operands, a, b):
    """Returns which of the table's rows is the first of a pair of blocks."""
    # Tables descend from the highest distance of all, which is in row 0.
    return operands.q.shape[1] - (a + 1) * plan.q_block + b * plan.k_block


def rows_needed(plan: Plan, operands: Operands) -> int:
    """Returns how many rows of the table, from its first, any block reads."""
    needed = [1]
    sizes = plan.q_block + plan.k_block - 1, 1
    pairs = block_pairs(plan, operands.q.shape[1], operands.k.shape[1])
    for (a, b), size in zip((x.T for x in pairs), sizes, strict=True):
        needed += [size + int(x) for x in first_row(plan, operands, a, b)]
    return max(needed)
