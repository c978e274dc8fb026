"""Forget gates beside plain loops; sums that stay exact far along a document."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.positional import Dims, make
from relpos_jax.positional.alibi import Alibi
from relpos_jax.positional.forgetting import (
    Forgetting,
    accumulate,
    decay,
    log_gates,
    prefix_sums,
)
from relpos_jax.relative import Layout

HEADS, DIM, WIDTH = 2, 4, 6


def operands(batch=1, length=5):
    keys = jax.random.split(jax.random.key(0), 5)
    shape = (batch, length, HEADS, DIM)
    q, k, v = (jax.random.normal(key, shape) for key in keys[:3])
    x = jax.random.normal(keys[3], (batch, length, WIDTH))
    params = Forgetting().init(keys[4], Dims(HEADS, DIM, WIDTH))
    return q, k, v, x, params


def run(encoding, params, q, k, v, x, at, **options):
    features = encoding.features(params, x)
    return attend(encoding, params, q, k, v, at, at, features=features, **options)


def test_agrees_with_loops():
    q, k, v, x, params = operands()
    at = where.contiguous(1, 5)
    for layout in (None, Layout()):
        out = run(Forgetting(), params, q, k, v, x, at, layout=layout)
        gate = 1 / (1 + np.exp(-np.asarray(x[0] @ params["weight"], np.float64)))
        for h in range(HEADS):
            for i in range(5):
                weights = []
                for j in range(i + 1):
                    kept = 1.0
                    for m in range(j + 1, i + 1):
                        kept *= gate[m, h]
                    logit = np.asarray(q[0, i, h]) @ np.asarray(k[0, j, h]) / 2
                    weights.append(kept * np.exp(logit))
                weights = np.asarray(weights) / sum(weights)
                expected = weights @ np.asarray(v[0, : i + 1, h])
                np.testing.assert_allclose(out[0, i, h], expected, atol=2e-6)


@pytest.mark.slow
def test_constant_gates_are_alibi():
    q, k, v, x, params = operands(length=7)
    at = where.contiguous(1, 7)
    slopes = jnp.asarray([0.5, 0.125])
    # log sigmoid(b) = -slope
    bias = -jnp.log(jnp.expm1(slopes))
    params = {"weight": jnp.zeros_like(params["weight"]), "bias": bias}
    out = run(Forgetting(), params, q, k, v, x, at)
    expected = attend(Alibi(), {"slopes": slopes}, q, k, v, at, at)
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_log_scale_is_a_power_of_the_gate():
    q, k, v, x, params = operands()
    at = where.contiguous(1, 5)
    gates = log_gates(x, params["weight"], params["bias"])
    out = run(Forgetting(log_scale=0.5), params, q, k, v, x, at)
    features = 0.5 * gates[..., None]
    expected = attend(Forgetting(), params, q, k, v, at, at, features=features)
    np.testing.assert_array_equal(out, expected)
    params = make("data_dependent_alibi").init(jax.random.key(0), Dims(2, 4, 6))
    np.testing.assert_array_equal(params["bias"], jnp.full((2,), 5.0))


@pytest.mark.slow
def test_packed_documents_are_as_alone():
    q, k, v, x, params = operands(length=9)
    at = where.packed((4, 3), 9)
    for layout in (None, Layout()):
        together = run(Forgetting(), params, q, k, v, x, at, layout=layout)
        for start, size in ((0, 4), (4, 3)):
            cut = slice(start, start + size)
            part = (y[:, cut] for y in (q, k, v, x))
            out = run(Forgetting(), params, *part, where.contiguous(1, size))
            np.testing.assert_allclose(together[:, cut], out, atol=1e-6)


@pytest.mark.slow
def test_empty_slots_within_a_document_do_not_forget():
    q, k, v, x, params = operands(length=6)
    real = jnp.asarray([0, 1, 3, 5])
    at = where.Where(
        jnp.asarray([[0, 1, 9, 2, 0, 3]]), jnp.asarray([[1, 1, 0, 1, 0, 1]])
    )
    gaps = run(Forgetting(), params, q, k, v, x, at)[:, real]
    part = (y[:, real] for y in (q, k, v, x))
    dense = run(Forgetting(), params, *part, where.contiguous(1, 4))
    np.testing.assert_allclose(gaps, dense, atol=1e-6)
    features = Forgetting().features(params, x)[..., 0]
    rising = Layout(unit=False)
    known, _ = accumulate(features, at, at, rising)
    unknown, _ = accumulate(features, at, at, None)
    np.testing.assert_allclose(known[:, real], unknown[:, real], atol=1e-6)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_keys_may_stand_in_any_order(implementation):
    q, k, v, x, params = operands(batch=2, length=10)
    at = where.contiguous(2, 10, start=jnp.asarray([0, 5]))
    turn = jnp.asarray([7, 8, 9, 0, 1, 2, 3, 4, 5, 6])
    encoding = Forgetting()

    def turned(params, q, k, v, x):
        out = attend(
            encoding,
            params,
            q,
            k[:, turn],
            v[:, turn],
            at,
            jax.tree.map(lambda y: y[:, turn], at),
            features=encoding.features(params, x[:, turn]),
            implementation=implementation,
            blocks=(8, 8),
        )
        return jnp.sum(jnp.sin(out)), out

    def plain(params, q, k, v, x):
        out = run(encoding, params, q, k, v, x, at, layout=Layout())
        return jnp.sum(jnp.sin(out)), out

    differentiate = dict(argnums=(0, 1, 2, 3, 4), has_aux=True)
    found = jax.jit(jax.grad(turned, **differentiate))(params, q, k, v, x)
    expected = jax.jit(jax.grad(plain, **differentiate))(params, q, k, v, x)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=3e-6), found, expected
    )


@pytest.mark.slow
@pytest.mark.parametrize("jit", [True, False])
def test_sums_stay_exact_far_along(jit):
    length = 16384
    gates = jax.random.uniform(jax.random.key(0), (1, length, 1), minval=-2, maxval=0)
    starts = jnp.zeros((1, length), bool).at[:, 0].set(True)
    sums = (jax.jit(prefix_sums) if jit else prefix_sums)(gates, starts)
    exact = np.cumsum(np.asarray(gates, np.float64)[0, :, 0])
    assert exact[-1] < -16000
    sums = jnp.swapaxes(sums, 1, 2)  # heads first
    last, near = sums[:, :, -1:], sums[:, :, -300:]
    found = np.asarray(decay(last, near))[0, 0, 0]
    expected = exact[-1] - exact[-300:]
    np.testing.assert_allclose(found, expected, rtol=2e-7, atol=1e-9)
    plain = jnp.cumsum(gates[0, :, 0])
    naive = np.asarray(plain[-1] - plain[-300:])
    # What the second float is for.
    lost, kept = (np.abs(x - expected)[-30:].max() for x in (naive, found))
    assert lost > 100 * kept


def test_gradient_of_sums():
    gates = jax.random.normal(jax.random.key(0), (2, 7, 3))
    starts = jnp.zeros((2, 7), bool).at[:, 0].set(True).at[1, 4].set(True)
    weights = jax.random.normal(jax.random.key(1), (2, 7, 3))

    def total(x):
        return jnp.sum(weights * prefix_sums(x, starts)[..., 0])

    found = jax.jit(jax.grad(total))(gates)
    expected = np.zeros((2, 7, 3))
    for b, t in np.ndindex(2, 7):
        end = 4 if b == 1 and t < 4 else 7
        expected[b, t] = np.asarray(weights)[b, t:end].sum(axis=0)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.slow
def test_saturated_gates_are_finite():
    q, k, v, x, params = operands()
    at = where.contiguous(1, 5)
    for bias in (-1e4, 1e4):
        own = dict(params, bias=jnp.full((HEADS,), bias))

        def loss(params, own=own):
            return jnp.sum(run(Forgetting(), own | params, q, k, v, x, at))

        leaves = jax.tree.leaves(jax.value_and_grad(loss)(own))
        assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in leaves)


def test_needs_features():
    q, k, v, _, params = operands()
    at = where.contiguous(1, 5)
    with pytest.raises(ValueError, match="features"):
        attend(Forgetting(), params, q, k, v, at, at)
