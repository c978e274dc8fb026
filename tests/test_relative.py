"""The relative shift, its transpose, the four products, and the layout's check."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import skew, where
from relpos_jax.relative import (
    Diagonals,
    Layout,
    Pairs,
    descending,
    holds,
)
from relpos_jax.skew import shift, unshift
from relpos_jax.where import Where


def by_index(x):
    """The shift by explicit indexing: `out[i, j] = x[i, j + q - 1 - i]`."""
    *heads, queries, rows = x.shape
    keys = rows - queries + 1
    out = np.zeros((*heads, queries, keys), x.dtype)
    for i in range(queries):
        for j in range(keys):
            out[..., i, j] = x[..., i, j + queries - 1 - i]
    return out


def test_shift_of_a_worked_example():
    # 3 queries, 2 slots of memory: column c of a row means distance 4 - c. Distances
    # below 0, which the causal mask hides, have columns of their own.
    queries, keys = 3, 5
    columns = np.arange(queries + keys - 1)
    x = (10 * np.arange(queries)[:, None] + columns[None, :]).astype(np.float32)
    out = np.asarray(shift(jnp.asarray(x)))
    assert out[0, :3].tolist() == [2, 3, 4]
    assert out[1, :4].tolist() == [11, 12, 13, 14]
    assert out[2].tolist() == [20, 21, 22, 23, 24]
    distance = np.arange(queries)[:, None] + keys - queries - np.arange(keys)[None, :]
    column = keys - 1 - distance
    assert (out == x[np.arange(queries)[:, None], column]).all()


@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 6), (4, 4), (3, 5), (6, 2)])
def test_shift_is_a_gather(queries, keys):
    shape = (2, 3, queries, queries + keys - 1)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    np.testing.assert_array_equal(shift(jnp.asarray(x)), by_index(x))


@pytest.mark.parametrize("queries, keys", [(1, 6), (4, 4), (3, 5), (6, 2)])
def test_unshift_is_the_transpose(queries, keys):
    first, second = jax.random.split(jax.random.key(0))
    x = jax.random.normal(first, (2, queries, queries + keys - 1))
    y = jax.random.normal(second, (2, queries, keys))
    left, right = jnp.vdot(shift(x), y), jnp.vdot(x, unshift(y))
    np.testing.assert_allclose(left, right, rtol=1e-5)
    (gradient,) = jax.vjp(shift, x)[1](y)
    np.testing.assert_array_equal(gradient, unshift(y))
    np.testing.assert_array_equal(shift(unshift(y)), y)


@pytest.mark.parametrize("queries, keys", [(1, 6), (4, 4), (3, 5), (17, 2)])
def test_unshift_is_the_same_on_every_platform(queries, keys):
    x = jax.random.normal(jax.random.key(0), (2, queries, keys))
    rows, groups = skew._unshift_by_row(1, x), skew._unshift_by_group(1, x)
    np.testing.assert_array_equal(rows, groups)
    assert (np.asarray(rows[..., -1]) == 0).all()


@pytest.mark.parametrize("queries, keys", [(1, 5), (4, 4), (3, 7), (5, 2)])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("product", ["bias", "query_dot", "key_dot", "weighted"])
def test_pairs_and_diagonals_agree(product, heads, queries, keys):
    features = () if product == "bias" else (4,)
    parts = jax.random.split(jax.random.key(1), 4)
    rows = jax.random.normal(parts[0], (heads, queries + keys - 1, *features))
    operand = {
        "bias": None,
        "query_dot": jax.random.normal(parts[1], (2, 3, queries, 4)),
        "key_dot": jax.random.normal(parts[2], (2, 3, keys, 4)),
        "weighted": jax.random.normal(parts[3], (2, 3, queries, keys)),
    }[product]
    # Row r of the table belongs to distance keys - 1 - r where the last query is the
    # last key's token; pair (i, j) has distance i + keys - queries - j.
    row = np.asarray(
        [[queries - 1 - i + j for j in range(keys)] for i in range(queries)]
    )
    pairs = rows[:, row][None]

    def run(rel, table, x):
        return getattr(rel, product)(*([table] if x is None else [x, table]))

    one = run(Pairs(), pairs, operand)
    other = run(Diagonals(queries, keys), rows, operand)
    np.testing.assert_allclose(one, other, atol=1e-5)
    # The naive sum, in loops, for one element.
    b, h, i, j = 1 if operand is not None else 0, heads - 1, queries - 1, keys - 1
    t = np.asarray(rows[0 if heads == 1 else h])[row]
    naive = {
        "bias": lambda: t[i, j],
        "query_dot": lambda: np.dot(operand[b, h, i], t[i, j]),
        "key_dot": lambda: np.dot(operand[b, h, j], t[i, j]),
        "weighted": lambda: sum(operand[b, h, i, c] * t[i, c] for c in range(keys)),
    }[product]()
    found = other[b, h, i] if product == "weighted" else other[b, h, i, j]
    np.testing.assert_allclose(found, naive, atol=1e-5)


def test_products_take_the_operand_type_and_add_in_float32():
    q = jnp.ones((1, 1, 2, 4), jnp.bfloat16)
    rows = jnp.ones((1, 3, 4))
    assert Diagonals(2, 2).query_dot(q, rows).dtype == jnp.float32


def test_descending():
    assert descending(3, 5).tolist() == [3, 2, 1, 0, -1]


def places(position, segment=None):
    position = jnp.asarray([position], jnp.int32)
    segment = jnp.ones_like(position) if segment is None else jnp.asarray([segment])
    return Where(position, segment)


@pytest.mark.parametrize(
    "position, segment, unit, expected",
    [
        ([0, 1, 2, 3], [1, 1, 1, 1], True, True),
        ([5, 6, 7, 8], [1, 1, 1, 1], True, True),
        ([0, 1, 3, 4], [1, 1, 1, 1], True, False),  # a gap
        ([0, 1, 3, 4], [1, 1, 1, 1], False, True),
        ([0, 2, 1, 3], [1, 1, 1, 1], False, False),  # falls
        ([0, 0, 1, 2], [1, 1, 1, 1], False, False),  # stands still
        ([0, 1, 0, 1], [1, 1, 2, 2], True, True),  # packed
        ([0, 1, 0, 1], [2, 2, 1, 1], True, False),  # documents out of order
        ([9, 9, 0, 1], [0, 0, 1, 1], True, True),  # empty slots first
        ([0, 1, 9, 9], [1, 1, 0, 0], True, True),  # padding last
        ([0, 9, 9, 3], [1, 0, 0, 1], True, True),  # empty slots as wide as the gap
        ([0, 9, 9, 1], [1, 0, 0, 1], True, False),  # a gap that positions deny
        ([9, 9, 9, 9], [0, 0, 0, 0], True, True),
    ],
)
def test_holds(position, segment, unit, expected):
    at = places(position, segment)
    assert holds(Layout(0, unit), at, at).tolist() == [expected]


def test_holds_looks_at_each_row_and_at_the_offset():
    keys = where.contiguous(2, 5, start=jnp.asarray([0, 3]))
    queries = where.contiguous(2, 2, start=jnp.asarray([3, 3]))
    assert holds(Layout(3), queries, keys).tolist() == [True, False]
    assert holds(Layout(0), queries, keys).tolist() == [False, True]
    with pytest.raises(ValueError, match="past 5 keys"):
        holds(Layout(4), queries, keys)
