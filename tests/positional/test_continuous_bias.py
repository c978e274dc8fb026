"""Continuous position bias (Liu et al. 2022)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax.positional import Dims, make
from relpos_jax.positional.continuous_bias import ContinuousBias, log_spaced

DIMS = Dims(3, 8, 24)


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("bound", [None, 16.0])
def test_equation(log, bound):
    encoding = ContinuousBias(hidden=4, log=log, bound=bound)
    params = encoding.init(jax.random.key(0), DIMS)
    ours = encoding.table(params, jnp.arange(5)[:, None] - jnp.arange(5)[None, :])
    w = {name: np.asarray(x, np.float64) for name, x in params.items()}
    for i in range(5):
        for j in range(5):
            x = (i - j) / 7
            if log:
                x = np.sign(i - j) * math.log2(1 + abs(i - j)) / math.log2(8)
            hidden = np.maximum(w["inner"] * x + w["inner_bias"], 0)
            expected = hidden @ w["outer"] + w["outer_bias"]
            if bound is not None:
                expected = bound / (1 + np.exp(-expected))
            np.testing.assert_allclose(ours[i, j], expected, atol=1e-5)


def test_log_spaced_is_odd():
    distance = jnp.asarray([-9, -1, 0, 1, 9])
    x = log_spaced(distance)
    np.testing.assert_array_equal(x, -x[::-1])
    assert x[2] == 0 and x[4] == pytest.approx(math.log(10))


def test_finite_with_finite_gradients():
    encoding = make("continuous_bias")
    params = encoding.init(jax.random.key(0), DIMS)
    far = jnp.asarray([-1_000_000, -1, 0, 1, 1_000_000])
    grads = jax.grad(lambda params: encoding.table(params, far).sum())(params)
    for x in [encoding.table(params, far), *jax.tree.leaves(grads)]:
        assert bool(jnp.isfinite(x).all())


def test_parameters():
    encoding = make("continuous_bias")
    params = encoding.init(jax.random.key(0), DIMS)
    assert sum(x.size for x in params.values()) == 32 + 32 + 32 * 3 + 3
    shared = make("continuous_bias", share=True, hidden=5)
    params = shared.init_shared(jax.random.key(0), DIMS)
    assert sum(x.size for x in params.values()) == 5 + 5 + 5 * 3 + 3
    assert not shared.init(jax.random.key(0), DIMS)


def test_errors():
    with pytest.raises(ValueError, match="must be positive"):
        ContinuousBias(bound=-1.0)
