"""Sandwich (Chi et al. 2023)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax.positional import Dims, make
from relpos_jax.positional.sandwich import Sandwich, inner_product, ratios
from relpos_jax.positional.sinusoidal import sinusoid


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("symmetric", [False, True])
def test_equation(first, symmetric):
    heads, dim = 3, 8
    sandwich = Sandwich(dim=dim, first=first, symmetric=symmetric)
    params = sandwich.constants(heads, 8)
    ours = sandwich.table(params, jnp.arange(5)[:, None] - jnp.arange(5)[None, :])
    for h in range(heads):
        for i in range(5):
            for j in range(5):
                far = abs(i - j) if symmetric else max(i - j, 0)
                total = -dim / 2
                for k in range(first, first + dim // 2):
                    total += math.cos(far * 10000 ** (-2 * k / dim))
                expected = total / (8 * (h + 1) / heads)
                assert ours[i, j, h] == pytest.approx(expected, abs=1e-5)


def test_is_the_inner_product_of_two_sinusoids():
    first, second = sinusoid(jnp.asarray(3), 32), sinusoid(jnp.asarray(20), 32)
    ours = inner_product(jnp.asarray(17), 32)
    np.testing.assert_allclose(ours, first @ second - 16, atol=1e-4)


def test_far_distances_lose_nothing():
    distance = np.asarray([0, 1, 7, 1000, 65_537])
    frequency = (10000.0 ** (-np.arange(0, 64, 2) / 64)).astype(np.float32)
    exact = np.cos(distance[:, None] * frequency.astype(np.float64)).sum(axis=1) - 32
    ours = inner_product(jnp.asarray(distance), 64)
    # float32 phases are right to about 1e-7 of their size.
    np.testing.assert_allclose(ours[:4], exact[:4], atol=1e-3)
    np.testing.assert_allclose(ours[4], exact[4], atol=0.05)
    assert ours[0] == 0


def test_the_first_head_decays_most():
    np.testing.assert_allclose(ratios(8), 1 / np.arange(1, 9), rtol=1e-6)
    assert (np.diff(ratios(5)) < 0).all()
    with pytest.raises(ValueError, match="positive"):
        ratios(0)


def test_no_parameters():
    sandwich, dims = make("sandwich"), Dims(3, 8, 24)
    assert not sandwich.init(jax.random.key(0), dims)
    assert not sandwich.init_shared(jax.random.key(0), dims)


def test_errors():
    with pytest.raises(ValueError, match="dim must be even"):
        Sandwich(dim=5)
