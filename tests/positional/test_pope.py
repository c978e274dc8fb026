"""PoPE against its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.positional import Dims
from relpos_jax.positional.pope import Pope, polar, polar_frequencies


def naive_attention(q, k, v, position, phase, base=10000.0):
    """The sum over features of magnitudes times cosines, in float64: `[q d]`."""
    length, dim = q.shape
    scores = np.full((length, length), -np.inf)
    for m in range(length):
        for n in range(m + 1):
            scores[m, n] = 0.0
            for c in range(dim):
                angle = (position[n] - position[m]) * base ** (-c / dim) + phase[c]
                product = np.log1p(np.exp(q[m, c])) * np.log1p(np.exp(k[n, c]))
                scores[m, n] += product * np.cos(angle)
    weights = np.exp(scores / np.sqrt(dim))
    return weights / weights.sum(axis=1, keepdims=True) @ v


@pytest.mark.parametrize("start, tolerance", [(0, 2e-6), (1_000_000, 1e-3)])
def test_the_paper_s_formula(start, tolerance):
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 5, 6))
    phase = rng.uniform(-2 * np.pi, 0, size=6)
    at = where.contiguous(1, 5, start=start)
    given = (jnp.asarray(x, jnp.float32)[None, :, None] for x in (q, k, v))
    params = {"phase": jnp.asarray(phase, jnp.float32)[None]}
    found = attend(Pope(), params, *given, at, at)[0, :, 0]
    wanted = naive_attention(q, k, v, start + np.arange(5), phase)
    np.testing.assert_allclose(found, wanted, atol=tolerance)


def test_content_sets_magnitudes_and_position_angles():
    x = jax.random.normal(jax.random.key(0), (1, 3, 2, 8))
    at = where.contiguous(1, 3, start=70)
    turned = polar(x, at.position, polar_frequencies(8))
    cosine, sine = np.asarray(turned[..., :8]), np.asarray(turned[..., 8:])
    magnitude = np.log1p(np.exp(np.asarray(x)))
    np.testing.assert_allclose(np.hypot(cosine, sine), magnitude, rtol=1e-5)
    angle = np.arange(70, 73)[:, None] * 10000.0 ** (-np.arange(8) / 8)
    found = np.exp(1j * np.arctan2(sine, cosine))
    wanted = np.broadcast_to(np.exp(1j * angle)[None, :, None], found.shape)
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_first_values_of_the_phase():
    dims = Dims(3, 8, 24)
    assert not np.any(Pope().init(jax.random.key(0), dims)["phase"])
    phase = Pope(phase="uniform").init(jax.random.key(0), dims)["phase"]
    assert phase.shape == (3, 8) and np.all((phase < 0) & (phase > -2 * np.pi))
    assert np.std(phase) > 1


def test_what_makes_no_sense_is_refused():
    for fields in ({"base": 0.0}, {"phase": "one"}):
        with pytest.raises(ValueError, match="must be positive and phase"):
            Pope(**fields)
