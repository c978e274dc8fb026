"""CoPE beside plain loops, and what must hold for any gates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.masks import Causal, Window
from relpos_jax.positional.cope import (
    Cope,
    contextual_positions,
    gates,
    interpolate,
)
from relpos_jax.relative import Layout

HEADS, DIM = 2, 4


def operands(batch=1, length=5, rows=3, per_head=False):
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (batch, length, HEADS, DIM)
    q, k, v = (jax.random.normal(key, shape) for key in keys[:3])
    table = jax.random.normal(keys[3], (HEADS if per_head else 1, rows, DIM))
    return q, k, v, {"table": table}


def naive(q, k, v, table, visible, scaled=True):
    """The paper's definition, number by number, in float64."""
    q, k, v, table = (np.asarray(x, np.float64) for x in (q, k, v, table))
    batch, length = q.shape[:2]
    out = np.zeros(q.shape)
    for b, h, i in np.ndindex(batch, HEADS, length):
        own = table[h % len(table)]
        logits = {}
        for j in range(length):
            if not visible[b, i, j]:
                continue
            position = 0.0
            for m in range(j, length):
                if visible[b, i, m]:
                    gate = q[b, i, h] @ k[b, m, h] / (2.0 if scaled else 1.0)
                    position += 1 / (1 + np.exp(-gate))
            position = min(position, len(own) - 1)
            low = int(np.floor(position))
            high = int(np.ceil(position))
            w = position - low
            row = (1 - w) * own[low] + w * own[high]
            logits[j] = q[b, i, h] @ k[b, j, h] / 2.0 + q[b, i, h] @ row
        highest = max(logits.values())
        total = sum(np.exp(x - highest) for x in logits.values())
        for j, x in logits.items():
            out[b, i, h] += np.exp(x - highest) / total * v[b, j, h]
    return out


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("per_head", [True, False])
def test_agrees_with_loops(scaled, per_head):
    q, k, v, params = operands(per_head=per_head)
    at = where.contiguous(1, 5)
    encoding = Cope(max_position=3, scaled_gates=scaled, per_head=per_head)
    expected = naive(q, k, v, params["table"], Causal()(at, at), scaled)
    for layout in (None, Layout()):
        out = attend(encoding, params, q, k, v, at, at, layout=layout)
        np.testing.assert_allclose(out, expected, atol=2e-6)


def test_open_gates_count_the_distance():
    at = where.contiguous(1, 6)
    visible = Causal()(at, at)[:, None]
    position = contextual_positions(gates(jnp.full((1, 1, 6, 6), 50.0), visible))
    distance = at.position[:, None, :, None] - at.position[:, None, None, :]
    expected = jnp.where(visible, distance + 1, 0)
    # Right of the diagonal the sum is over no gate at all.
    np.testing.assert_array_equal(position, expected)


def test_shut_gates_are_no_position():
    q, k, v, params = operands()
    at = where.contiguous(1, 5)
    far = jnp.full((1, 1, 5, 5), -200.0)
    position = contextual_positions(gates(far, Causal()(at, at)[:, None]))
    np.testing.assert_array_equal(position, jnp.zeros_like(position))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_interpolates_between_rows_and_stops_at_the_last(rows):
    values = jnp.arange(rows, dtype=jnp.float32)[None, None, None, :] ** 2
    position = jnp.linspace(0.0, 7.0, 29)[None, None, None, :]
    expected = np.interp(position[0, 0, 0], np.arange(rows), values[0, 0, 0])
    np.testing.assert_allclose(
        interpolate(values, position)[0, 0, 0], expected, atol=1e-6
    )


@pytest.mark.slow
def test_packed_documents_are_as_alone():
    q, k, v, params = operands(length=9)
    encoding = Cope(max_position=4)
    at = where.packed((4, 3), 9)
    together = attend(encoding, params, q, k, v, at, at, layout=Layout())
    for start, size in ((0, 4), (4, 3)):
        cut = slice(start, start + size)
        alone = where.contiguous(1, size)
        out = attend(encoding, params, q[:, cut], k[:, cut], v[:, cut], alone, alone)
        np.testing.assert_allclose(together[:, cut], out, atol=1e-6)
    np.testing.assert_array_equal(together[:, 7:], jnp.zeros((1, 2, HEADS, DIM)))


@pytest.mark.parametrize("mask", [Causal(), Window(3)])
@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_keys_may_stand_in_any_order(mask, implementation):
    q, k, v, params = operands(batch=2, length=10)
    encoding = Cope(max_position=4)
    at = where.contiguous(2, 10, start=jnp.asarray([0, 2**24 + 1]))
    turn = jnp.asarray([7, 8, 9, 0, 1, 2, 3, 4, 5, 6])  # as a ring of ten would hold

    def turned(params, q, k, v):
        out = attend(
            encoding,
            params,
            q,
            k[:, turn],
            v[:, turn],
            at,
            jax.tree.map(lambda x: x[:, turn], at),
            mask=mask,
            implementation=implementation,
            blocks=(8, 8),
        )
        return jnp.sum(jnp.sin(out)), out

    def plain(params, q, k, v):
        out = attend(encoding, params, q, k, v, at, at, mask=mask, layout=Layout())
        return jnp.sum(jnp.sin(out)), out

    differentiate = dict(argnums=(0, 1, 2, 3), has_aux=True)
    found = jax.jit(jax.grad(turned, **differentiate))(params, q, k, v)
    expected = jax.jit(jax.grad(plain, **differentiate))(params, q, k, v)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=3e-6), found, expected
    )


def test_refuses_an_empty_table():
    with pytest.raises(ValueError, match="at least 1"):
        Cope(max_position=0)
