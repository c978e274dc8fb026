"""Sinusoidal absolute embeddings (Vaswani et al. 2017)."""

import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.positional import make
from relpos_jax.positional.sinusoidal import sinusoid


@pytest.mark.parametrize("name", ["sinusoidal", "sinusoidal_interleaved"])
@pytest.mark.parametrize("last", ["paper", "inclusive"])
def test_equation(name, last):
    width, start = 8, 3
    encoding = make(name, last_frequency=last)
    x = jnp.ones((1, 5, width))
    ours = encoding.embed({}, x, where.contiguous(1, 5, start=start))[0]
    for t in range(5):
        for i in range(width // 2):
            step = 2 * i / width if last == "paper" else i / (width // 2 - 1)
            phase = (start + t) * 10000.0**-step
            places = (i, width // 2 + i)
            if name == "sinusoidal_interleaved":
                places = (2 * i, 2 * i + 1)
            assert ours[t, places[0]] == pytest.approx(1 + np.sin(phase), abs=1e-5)
            assert ours[t, places[1]] == pytest.approx(1 + np.cos(phase), abs=1e-5)


def test_inner_products_depend_on_the_distance_alone():
    waves = sinusoid(jnp.arange(40), 16)
    products = np.asarray(waves @ waves.T)
    np.testing.assert_allclose(products[5, 12], products[25, 32], atol=1e-4)


def test_far_phases_are_as_right_as_float32_allows():
    position = np.asarray([1_000, 100_000, 1_000_000])
    frequency = 10000.0 ** (-np.arange(0, 64, 2) / 64)
    phase = position[:, None] * frequency
    exact = np.concatenate([np.sin(phase), np.cos(phase)], axis=1)
    error = np.abs(sinusoid(jnp.asarray(position), 64) - exact).max(axis=1)
    assert (error < 1.2e-7 * position + 1e-6).all()


@pytest.mark.parametrize(
    "width, knobs, match",
    [
        (7, {}, "even width"),
        (8, {"layout": "both"}, "layout must be"),
        (8, {"last_frequency": "none"}, "last_frequency must be"),
    ],
)
def test_errors(width, knobs, match):
    with pytest.raises(ValueError, match=match):
        sinusoid(jnp.arange(3), width, **knobs)
