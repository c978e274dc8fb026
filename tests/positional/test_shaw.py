"""Shaw et al. 2018."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.masks import Bidirectional
from relpos_jax.positional import Dims, make
from relpos_jax.positional.shaw import Shaw

HEADS, D, T = 2, 4, 5


def inputs():
    parts = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(part, (1, T, HEADS, D)) for part in parts]


def by_loops(q, k, v, key, value, clip, key_query=False):
    """Equations 3 and 4, pair by pair; tables are [rows, heads, d]."""
    q, k, v, key, value = (np.asarray(x, np.float64) for x in (q, k, v, key, value))
    out = np.zeros((T, HEADS, D))
    for h in range(HEADS):
        own = 0 if key.shape[1] == 1 else h
        for i in range(T):
            row = [max(-clip, min(clip, j - i)) + clip for j in range(T)]
            e = np.zeros(T)
            for j in range(T):
                a = key[row[j], own]
                e[j] = q[0, i, h] @ (k[0, j, h] + a)
                if key_query:
                    e[j] += k[0, j, h] @ a
            weights = np.exp(e / D**0.5)
            weights /= weights.sum()
            for j in range(T):
                out[i, h] += weights[j] * (v[0, j, h] + value[row[j], own])
    return out


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("clip", [0, 2, 7])
def test_equations(clip, per_head):
    shaw = Shaw(clip=clip, per_head=per_head)
    params = shaw.init(jax.random.key(1), Dims(HEADS, D, HEADS * D))
    q, k, v = inputs()
    at = where.contiguous(1, T)
    ours = attend(shaw, params, q, k, v, at, at, mask=Bidirectional())[0]
    expected = by_loops(q, k, v, params["key"], params["value"], clip)
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_key_query_adds_the_keys_product():
    shaw = Shaw(clip=2, key_query=True)
    params = shaw.init(jax.random.key(1), Dims(HEADS, D, HEADS * D))
    q, k, v = inputs()
    at = where.contiguous(1, T)
    ours = attend(shaw, params, q, k, v, at, at, mask=Bidirectional())[0]
    expected = by_loops(q, k, v, params["key"], params["value"], 2, key_query=True)
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_rows_are_key_minus_query():
    shaw = Shaw(clip=2, values=False)
    params = {"key": jnp.arange(5.0)[:, None, None]}
    rows = shaw.table(params, jnp.asarray([-3, -2, -1, 0, 1, 2, 3]))["key"][:, 0, 0]
    # Distance is query minus key: keys after the query (negative) have the last rows.
    assert rows.tolist() == [4, 4, 3, 2, 1, 0, 0]


@pytest.mark.parametrize(
    "knobs, count",
    [({}, 2 * 33 * 8), ({"values": False}, 33 * 8), ({"per_head": True}, 2 * 33 * 24)],
)
def test_parameters(knobs, count):
    params = make("shaw", **knobs).init(jax.random.key(0), Dims(3, 8, 24))
    assert sum(x.size for x in params.values()) == count


def test_errors():
    with pytest.raises(ValueError, match="keys and values"):
        Shaw(keys=False, values=False)
    with pytest.raises(ValueError, match="keys=True"):
        Shaw(keys=False, key_query=True)
