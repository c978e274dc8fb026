"""The relative shift: scores by distance to scores by key and back, without arithmetic.

Heads come first: `[*h q n]` by distance, `[*h q k]` by key.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def shift(x: Float[Array, "*h q n"], more: int = 0) -> Float[Array, "*h q k"]:
    """Skews scores by distance into scores by key: the relative shift.

    `x[..., i, r]` belongs to query `i` and to the `r`-th distance in descending order;
    the result's `[..., i, j]` is `x[..., i, q - 1 - i + j]`, with `k = n - q + 1` keys,
    less `more` columns at the end that nothing reads. No element is computed again:
    reading the same memory with rows of `n - 1` moves row `i` left by `q - 1 - i`.
    """
    return _shift(more, x)


def spread(row: Float[Array, "*h n"], queries: int) -> Float[Array, "*h q k"]:
    """Returns `shift` of the same row for every query: `[..., i, j]` is `row[q-1-i+j]`.

    Made of slices in two levels, since that is what compilers turn into plain copies
    (on CPU five times as fast as broadcasting and reading with another row length).
    """
    return _spread(queries, row)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(queries, row):
    step, groups, spare = _two_levels(queries)
    # Fill up to whole groups with distances that no query has.
    row = jnp.pad(row, [(0, 0)] * (row.ndim - 1) + [(spare, 0)])
    keys = row.shape[-1] - groups * step + 1
    wide = row.shape[-1] - step + 1
    few = jnp.stack([row[..., step - 1 - i :][..., :wide] for i in range(step)], -2)
    starts = [step * (groups - 1 - group) for group in range(groups)]
    rows = [few[..., start : start + keys] for start in starts]
    return jnp.concatenate(rows, axis=-2)[..., :queries, :]


def unshift(x: Float[Array, "*h q k"], more: int = 0) -> Float[Array, "*h q n"]:
    """Puts scores by key back by distance, zero elsewhere: the transpose of `shift`."""
    return _unshift(more, x)


def _diagonal_sums(x):
    """Returns `[*h n]`, `unshift` summed over queries: the transpose of `spread`.

    Groups of rows are added up at their places first, so that few rows are spread out.
    """
    *heads, queries, keys = x.shape
    step, groups, spare = _two_levels(queries)
    x = jnp.pad(x, [*[(0, 0)] * len(heads), (0, spare), (0, 0)])
    x = x.reshape(*heads, groups, step, keys)
    few = jnp.zeros((*heads, step, keys + step * (groups - 1)), x.dtype)
    for group in range(groups):
        start = step * (groups - 1 - group)
        here = few[..., start : start + keys] + x[..., group, :, :]
        few = jax.lax.dynamic_update_slice_in_dim(few, here, start, few.ndim - 1)
    return jnp.sum(_unshift(0, few), axis=-2)[..., spare:]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _shift(more, x):
    *heads, queries, rows = x.shape
    keys = rows - queries + 1 - more
    if queries == 1:
        return x[..., :keys]
    flat = x.reshape(*heads, queries * rows)[..., queries - 1 : queries * rows - 1]
    return flat.reshape(*heads, queries, rows - 1)[..., :keys]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unshift(more, x):
    return jax.lax.platform_dependent(
        x,
        cpu=functools.partial(_unshift_by_row, more),
        default=functools.partial(_unshift_by_group, more),
    )


def _unshift_by_row(more, x):
    # A row after the other: on CPU twice as fast, elsewhere many times as slow.
    *heads, queries, keys = x.shape
    out = jnp.zeros((*heads, queries, queries - 1 + keys + more), x.dtype)

    def put(i, out):
        row = jax.lax.dynamic_slice_in_dim(x, i, 1, x.ndim - 2)
        places = (*[0] * len(heads), i, queries - 1 - i)
        return jax.lax.dynamic_update_slice(out, row, places)

    return jax.lax.fori_loop(0, queries, put, out)


def _unshift_by_group(more, x):
    # Zeros before and behind row i move it right by q - 1 - i: first by 0 to step - 1
    # within groups of rows, then by whole steps. Padding each row takes long to
    # compile; padding once and reading with another row length runs slower.
    *heads, queries, keys = x.shape
    step, groups, spare = _two_levels(queries)
    none = [(0, 0)] * len(heads)
    x = jnp.pad(x, [*none, (0, spare), (0, 0)])
    x = x.reshape(*heads, groups, step, keys)
    few = [
        jnp.pad(x[..., i, :], [*none, (0, 0), (step - 1 - i, i)]) for i in range(step)
    ]
    x = jnp.stack(few, axis=-2)
    rows = [
        jnp.pad(
            x[..., i, :, :],
            [*none, (0, 0), (step * (groups - 1 - i), step * i + more)],
        )
        for i in range(groups)
    ]
    x = jnp.concatenate(rows, axis=-2)
    return x[..., :queries, spare:]


def _two_levels(queries: int) -> tuple[int, int, int]:
    """Returns the size and number of groups of rows, and how many rows they spare."""
    step = 2 ** ((queries - 1).bit_length() // 2)
    groups = -(-queries // step)
    return step, groups, groups * step - queries


# Transposes of each other. What JAX derives is right too, but slower.
_spread.defvjp(
    lambda queries, row: (_spread(queries, row), None),
    lambda queries, _, d_out: (_diagonal_sums(d_out),),
)
_shift.defvjp(
    lambda more, x: (_shift(more, x), None),
    lambda more, _, d_out: (_unshift(more, d_out),),
)
_unshift.defvjp(
    lambda more, x: (_unshift(more, x), None),
    lambda more, _, d_out: (_shift(more, d_out),),
)
