"""ALiBi (Press et al. 2022)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.masks import Causal
from relpos_jax.positional import Dims, make
from relpos_jax.positional.alibi import Alibi, slopes

POWERS = {
    1: [-8],
    3: [-4, -8, -2],
    6: [-2, -4, -6, -8, -1, -3],
    8: [-1, -2, -3, -4, -5, -6, -7, -8],
    12: [-1, -2, -3, -4, -5, -6, -7, -8, -0.5, -1.5, -2.5, -3.5],
}


@pytest.mark.parametrize("heads", POWERS)
def test_slopes(heads):
    np.testing.assert_allclose(slopes(heads), 2.0 ** np.array(POWERS[heads]), rtol=1e-6)


def test_slopes_need_heads():
    with pytest.raises(ValueError, match="positive, got 0"):
        slopes(0)


@pytest.mark.parametrize("symmetric", [False, True])
def test_equation(symmetric):
    heads = 3
    alibi = Alibi(symmetric=symmetric)
    params = alibi.constants(heads, 8)
    ours = alibi.table(params, jnp.arange(5)[:, None] - jnp.arange(5)[None, :])
    for h in range(heads):
        for i in range(5):
            for j in range(5):
                far = abs(i - j) if symmetric else max(i - j, 0)
                assert ours[i, j, h] == pytest.approx(-slopes(heads)[h] * far)


def test_keeps_a_split_over_devices():
    # Half of the heads with their part of the slopes is half of the whole.
    parts = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(part, (1, 6, 4, 8)) for part in parts)
    at = where.contiguous(1, 6)
    whole = attend(Alibi(), {}, q, k, v, at, at, mask=Causal())
    for half in (slice(0, 2), slice(2, 4)):
        params = {"slopes": jnp.asarray(slopes(4))[half]}
        q_, k_, v_ = (x[:, :, half] for x in (q, k, v))
        part = attend(Alibi(), params, q_, k_, v_, at, at, mask=Causal())
        np.testing.assert_array_equal(part, whole[:, :, half])


def test_bias_is_not_scaled():
    # Only the bias acts where queries are 0; it is -slope * distance whatever d is.
    zero = jnp.zeros((1, 3, 1, 16))
    at = where.contiguous(1, 3)
    v = jnp.broadcast_to(jnp.eye(3)[None, :, None], (1, 3, 1, 3))
    weights = attend(Alibi(), {}, zero, zero, v, at, at)[0, 2, 0]
    expected = np.exp(-(2.0**-8) * np.array([2, 1, 0]))
    np.testing.assert_allclose(weights, expected / expected.sum(), rtol=1e-6)


def test_no_parameters():
    alibi, dims = make("alibi"), Dims(3, 8, 24)
    assert not alibi.init(jax.random.key(0), dims)
    assert not alibi.init_shared(jax.random.key(0), dims)
