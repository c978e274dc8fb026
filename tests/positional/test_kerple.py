"""KERPLE (Chi et al. 2022)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax.positional import Dims, make
from relpos_jax.positional.alibi import Alibi
from relpos_jax.positional.kerple import (
    KerpleLog,
    KerplePower,
    limit,
    log_kernel,
    power_kernel,
)

P, A = jnp.asarray([0.5, 1.9]), jnp.asarray([0.3, 0.8])
DISTANCE = jnp.arange(5)[:, None] - jnp.arange(5)[None, :]


@pytest.mark.parametrize("symmetric", [False, True])
def test_equations(symmetric):
    log = KerpleLog(symmetric=symmetric).table({"p": P, "a": A}, DISTANCE)
    power = KerplePower(symmetric=symmetric)
    power = power.table({"bias_p": P, "bias_a": A}, DISTANCE)["bias"]
    for h in range(2):
        p, a = float(P[h]), float(A[h])
        for i in range(5):
            for j in range(5):
                far = abs(i - j) if symmetric else max(i - j, 0)
                expected = -p * math.log(1 + a * far)
                assert log[i, j, h] == pytest.approx(expected, abs=1e-6)
                assert power[i, j, h] == pytest.approx(-a * far**p, abs=1e-5)


def test_power_one_is_alibi():
    alibi = Alibi(symmetric=True)
    params = alibi.constants(2, 8)
    ours = power_kernel(DISTANCE, params["slopes"], jnp.ones(2))
    np.testing.assert_allclose(ours, alibi.table(params, DISTANCE), rtol=1e-6)


def test_exponent_one_is_the_paper():
    ours = log_kernel(DISTANCE, P, A, jnp.ones(2))
    np.testing.assert_allclose(ours, log_kernel(DISTANCE, P, A), rtol=1e-6)


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power"])
@pytest.mark.parametrize("knobs", [{}, {"positive": "smooth"}, {"symmetric": True}])
@pytest.mark.parametrize("value", [-1.0, 0.0, 1e-6, 0.5])
def test_finite_with_finite_gradients(name, knobs, value):
    kerple = make(name, **knobs)
    params = jax.tree.map(
        lambda x: jnp.full_like(x, value),
        kerple.init_shared(jax.random.key(0), Dims(3, 8, 24)),
    )
    far = jnp.asarray([-1_000_000, -1, 0, 1, 2, 1_000_000])

    def total(params):
        return sum(x.sum() for x in jax.tree.leaves(kerple.table(params, far)))

    assert bool(jnp.isfinite(total(params)))
    for x in jax.tree.leaves(jax.grad(total)(params)):
        assert bool(jnp.isfinite(x).all())


def test_limit_keeps_the_gradient():
    x = jnp.asarray([-3.0, 0.005, 0.5, 2.5])
    np.testing.assert_allclose(limit(x, 0.01), [0.01, 0.01, 0.5, 2.5], rtol=1e-6)
    np.testing.assert_allclose(limit(x, 0.01, 2.0), [0.01, 0.01, 0.5, 2], rtol=1e-6)
    slope = jax.grad(lambda x: limit(x, 0.01, 2.0).sum())(x)
    assert slope.tolist() == [1, 1, 1, 1]


def test_smooth_starts_where_clamp_does():
    key, dims = jax.random.key(0), Dims(3, 8, 24)
    for name in ("kerple_log", "kerple_power"):
        one, other = make(name), make(name, positive="smooth")
        first, second = one.init_shared(key, dims), other.init_shared(key, dims)
        for part in first:
            np.testing.assert_allclose(
                one.value_of(first, part), other.value_of(second, part), rtol=1e-3
            )


@pytest.mark.parametrize(
    "name, knobs, count",
    [
        ("kerple_log", {}, 6),
        ("kerple_power", {}, 6),
        ("kerple_power", {"bias": "a"}, 3),
        ("kerple_power", {"weight": "ap"}, 12),
    ],
)
def test_parameters(name, knobs, count):
    kerple, dims = make(name, **knobs), Dims(3, 8, 24)
    shared = kerple.init_shared(jax.random.key(0), dims)
    assert sum(x.size for x in shared.values()) == count
    assert not kerple.init(jax.random.key(0), dims)
    own = make(name, share=False, **knobs)
    assert own.init(jax.random.key(0), dims).keys() == shared.keys()


@pytest.mark.parametrize(
    "knobs, match",
    [
        ({"positive": "no"}, "positive must be one of"),
        ({"eps": 0.0}, "eps must be positive"),
        ({"bias": "pa"}, "bias must be"),
        ({"bias": ""}, "a bias or a weight"),
    ],
)
def test_errors(knobs, match):
    with pytest.raises(ValueError, match=match):
        KerplePower(**knobs)
