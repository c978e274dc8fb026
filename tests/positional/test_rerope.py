"""ReRoPE and self-extend: rotary scores at the distances that they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.positional import make
from relpos_jax.positional.rerope import (
    ReRope,
    SelfExtend,
    grouped_distance,
    log_scale,
    rectified_distance,
)


def naive_attention(q, k, v, distance, gain=None, base=10000.0):
    """Softmax of RoPE's scores at given distances `[q k]`, float64, halves."""
    length, dim = q.shape
    half = dim // 2
    q, k = (x[:, :half] + 1j * x[:, half:] for x in (q, k))
    scores = np.full((length, length), -np.inf)
    for m in range(length):
        for n in range(m + 1):
            turn = np.exp(1j * distance[m, n] * base ** (-2 * np.arange(half) / dim))
            scores[m, n] = np.sum(q[m] * np.conj(k[n]) * turn).real / np.sqrt(dim)
            scores[m, n] *= 1 if gain is None else gain[m]
    weights = np.exp(scores)
    return weights / weights.sum(axis=1, keepdims=True) @ v


def check(encoding, distance, length, gain=None, start=0):
    q, k, v = np.random.default_rng(0).normal(size=(3, length, 8))
    at = where.contiguous(1, length, start=start)
    given = (jnp.asarray(x, jnp.float32)[None, :, None] for x in (q, k, v))
    found = attend(encoding, {}, *given, at, at)[0, :, 0]
    wanted = naive_attention(q, k, v, distance, gain)
    np.testing.assert_allclose(found, wanted, atol=3e-6)


def distances(length):
    return np.arange(length)[:, None] - np.arange(length)[None, :]


def test_rerope_stops_counting_at_the_window():
    check(ReRope(window=3), np.minimum(distances(9), 3), 9)
    # Moved together, nothing changes; within the window it is RoPE.
    check(ReRope(window=3), np.minimum(distances(9), 3), 9, start=20)
    check(ReRope(window=9), distances(9), 9)


def test_leaky_rerope_counts_on_slowly():
    far = distances(9)
    check(ReRope(window=3, leak=0.25), np.where(far < 3, far, 3 + (far - 3) / 4), 9)
    found = rectified_distance(jnp.asarray([0, 2, 3, 7]), 3, 0.25)
    np.testing.assert_allclose(found, [0, 2, 3, 4])


def test_queries_grow_with_the_logarithm_of_the_position():
    gain = np.maximum(np.log(np.arange(9) + 1) / np.log(4), 1)
    check(ReRope(window=3, training_length=4), np.minimum(distances(9), 3), 9, gain)
    np.testing.assert_allclose(log_scale(jnp.arange(9)[None], 4)[0], gain, rtol=1e-6)
    assert not make("rerope", training_length=4).invariant and ReRope().invariant


@pytest.mark.parametrize("window, group", [(4, 2), (5, 3), (3, 1)])
def test_self_extend_floors_positions(window, group):
    # Jin et al. 2024, spelled out.
    length = 13
    distance = np.zeros((length, length))
    for m in range(length):
        for n in range(length):
            distance[m, n] = m - n
            if m - n >= window:
                shift = window - window // group
                distance[m, n] = m // group - n // group + shift
    check(SelfExtend(window=window, group=group), distance, length)
    q, k = np.arange(length)[:, None], np.arange(length)[None]
    found = grouped_distance(
        *(jnp.broadcast_to(jnp.asarray(x), (length, length)) for x in (q, k)),
        window,
        group,
    )
    np.testing.assert_array_equal(found, distance)


def test_bfloat16_at_a_million_is_as_near_the_start():
    x = jax.random.normal(jax.random.key(0), (1, 8, 1, 16)).astype(jnp.bfloat16)
    encoding = ReRope(window=3)
    outputs = []
    for start in (0, 1_000_000):
        at = where.contiguous(1, 8, start=start)
        outputs.append(attend(encoding, {}, x, x, x, at, at).astype(jnp.float32))
    np.testing.assert_allclose(*outputs, atol=0.04)


@pytest.mark.parametrize(
    "cls, fields",
    [
        (ReRope, {"window": 0}),
        (ReRope, {"base": -1.0}),
        (ReRope, {"leak": 1.5}),
        (ReRope, {"training_length": 1}),
        (SelfExtend, {"group": 0}),
    ],
)
def test_what_makes_no_sense_is_refused(cls, fields):
    with pytest.raises(ValueError, match="must be"):
        cls(**fields)
