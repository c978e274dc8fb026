"""FIRE (Li et al. 2024)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.masks import distances
from relpos_jax.positional import Dims, make
from relpos_jax.positional.fire import Fire, mlp, progress

DIMS = Dims(3, 8, 24)


def test_equation():
    fire = Fire(hidden=4, threshold=2.5)
    params = fire.init(jax.random.key(0), DIMS)
    params["multiplier"], params["c"] = jnp.float32(1.1), jnp.float32(0.7)
    at = where.contiguous(1, 5)
    ours = fire.bias(params, distances(at, at), at.position)[0]
    w = {name: np.asarray(x, np.float64) for name, x in params["mlp"].items()}
    for i in range(5):
        for j in range(5):
            end = math.log(1 + 0.7 * max(i, 2.75))
            x = math.log(1 + 0.7 * abs(i - j)) / end
            hidden = np.maximum(w["inner"] * x + w["inner_bias"], 0)
            expected = hidden @ w["outer"] + w["outer_bias"]
            np.testing.assert_allclose(ours[:, i, j], expected, atol=1e-5)


def test_progress_stays_within_one():
    position = jnp.asarray([[0, 1, 100, 10_000]])
    at = where.Where(position, jnp.ones_like(position))
    x = progress(
        distances(at, at), position[:, :, None], jnp.float32(0.1), jnp.float32(50.0)
    )
    causal = np.tril(np.asarray(x[0]))
    assert causal.min() >= 0 and causal.max() <= 1
    assert x[0, 3, 0] == pytest.approx(1, abs=1e-5)  # the whole way back


def test_before_the_threshold_only_the_distance_counts():
    def bias(start):
        fire = Fire(threshold=50.0)
        params = fire.init(jax.random.key(0), DIMS)
        at = where.contiguous(1, 6, start=start)
        return fire.bias(params, distances(at, at), at.position)

    np.testing.assert_allclose(bias(0), bias(40), atol=1e-6)
    assert float(jnp.abs(bias(0) - bias(100)).max()) > 1e-3
    assert not Fire.invariant


def test_a_cached_token_needs_its_position():
    fire = Fire(threshold=2.0)
    params = fire.init(jax.random.key(0), DIMS)
    parts = jax.random.split(jax.random.key(1), 3)
    q, k, v = (jax.random.normal(part, (1, 9, 3, 8)) for part in parts)
    at = where.contiguous(1, 9)
    whole = attend(fire, params, q, k, v, at, at)
    last = jax.tree.map(lambda x: x[:, 8:], at)
    one = attend(fire, params, q[:, 8:], k, v, last, at)
    np.testing.assert_allclose(one, whole[:, 8:], atol=1e-6)


@pytest.mark.parametrize("threshold, c", [(512.0, 0.1), (1e-6, 1e-6)])
def test_finite_with_finite_gradients(threshold, c):
    fire = Fire(threshold=threshold, c=c)
    params = fire.init(jax.random.key(0), DIMS)
    position = jnp.asarray([[0, 1, 2, 1_000_000]])
    at = where.Where(position, jnp.ones_like(position))

    def total(params):
        return fire.bias(params, distances(at, at), position).sum()

    assert bool(jnp.isfinite(total(params)))
    for x in jax.tree.leaves(jax.grad(total)(params)):
        assert bool(jnp.isfinite(x).all())


def test_threshold_is_learned():
    fire = Fire(threshold=3.0)
    params = fire.init(jax.random.key(0), DIMS)
    at = where.contiguous(1, 3)
    grads = jax.grad(lambda p: fire.bias(p, distances(at, at), at.position).sum())(
        params
    )
    assert abs(float(grads["multiplier"])) > 0 and abs(float(grads["c"])) > 0


def test_parameters():
    fire = make("fire")
    params = fire.init(jax.random.key(0), DIMS)
    count = sum(x.size for x in jax.tree.leaves(params))
    assert count == 32 + 32 + 32 * 3 + 3 + 2
    assert not fire.init_shared(jax.random.key(0), DIMS)
    shared = make("fire", share=True)
    assert not shared.init(jax.random.key(0), DIMS)
    assert mlp(params["mlp"], jnp.zeros((2, 5))).shape == (2, 5, 3)


def test_errors():
    with pytest.raises(ValueError, match="must be positive"):
        Fire(threshold=0.0)
