"""Transformer-XL's relative attention (Dai et al. 2019)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.masks import Bidirectional
from relpos_jax.positional import Dims, make, merge
from relpos_jax.positional.transformer_xl import TransformerXLRelative

DIMS = Dims(2, 4, 6)
T = 5


def params_of(xl):
    own = xl.init(jax.random.key(0), DIMS)
    params = merge(own, xl.init_shared(jax.random.key(1), DIMS))
    return jax.tree.map(lambda x: x + 0.3, params)


def waves(distance):
    frequency = 10000.0 ** (-np.arange(0, DIMS.width, 2) / DIMS.width)
    return np.concatenate([np.sin(distance * frequency), np.cos(distance * frequency)])


@pytest.mark.parametrize("clamp", [None, 2])
def test_four_terms(clamp):
    xl = TransformerXLRelative(clamp=clamp)
    params = params_of(xl)
    parts = jax.random.split(jax.random.key(2), 2)
    q, k = (jax.random.normal(part, (1, T, 2, 4)) for part in parts)
    v = jnp.broadcast_to(jnp.eye(T)[None, :, None], (1, T, 2, T))
    at = where.contiguous(1, T)
    ours = attend(xl, params, q, k, v, at, at, mask=Bidirectional())[0]
    u, bias, w = (
        np.asarray(params[name], np.float64)
        for name in ("content_bias", "position_bias", "projection")
    )
    q, k = np.asarray(q[0], np.float64), np.asarray(k[0], np.float64)
    for h in range(2):
        for i in range(T):
            e = np.zeros(T)
            for j in range(T):
                distance = i - j if clamp is None else min(i - j, clamp)
                r = waves(distance) @ w[:, h]
                a, b = q[i, h] @ k[j, h], q[i, h] @ r
                c, d = u[h] @ k[j, h], bias[h] @ r
                e[j] = (a + b + c + d) / 2.0
            weights = np.exp(e) / np.exp(e).sum()
            np.testing.assert_allclose(ours[i, h], weights, atol=1e-5)


def test_without_biases_and_projection_it_is_plain():
    xl = TransformerXLRelative()
    params = jax.tree.map(jnp.zeros_like, params_of(xl))
    parts = jax.random.split(jax.random.key(2), 3)
    q, k, v = (jax.random.normal(part, (1, T, 2, 4)) for part in parts)
    at = where.contiguous(1, T)
    ours = attend(xl, params, q, k, v, at, at)
    np.testing.assert_allclose(
        ours, attend(make("none"), {}, q, k, v, at, at), atol=1e-6
    )


@pytest.mark.parametrize("untie, own", [(False, 24 * 24), (True, 24 * 24 + 2 * 24)])
def test_parameters(untie, own):
    xl, dims = make("transformer_xl", untie=untie), Dims(3, 8, 24)
    count = sum(x.size for x in xl.init(jax.random.key(0), dims).values())
    shared = sum(x.size for x in xl.init_shared(jax.random.key(0), dims).values())
    assert (count, shared) == (own, 0 if untie else 2 * 24)


def test_clamp_must_be_positive():
    with pytest.raises(ValueError, match="clamp must be positive"):
        TransformerXLRelative(clamp=0)
