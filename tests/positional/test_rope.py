"""Rotary embeddings against the paper's formula, in both layouts, near and far."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.positional import make
from relpos_jax.positional.rope import Rope, rotate
from relpos_jax.positional.rope_frequencies import inverse_frequencies
from relpos_jax.where import Where

LAYOUTS = ("halves", "interleaved")


def planes_of(layout, dim):
    """Returns the two feature indices of every plane."""
    first = np.arange(dim // 2)
    if layout == "halves":
        return first, first + dim // 2
    return 2 * first, 2 * first + 1


def naive(x, position, base, layout):
    """Su et al. 2021, equation 14, plane by plane, in float64."""
    x, out = np.asarray(x, np.float64), np.array(x, np.float64)
    dim = x.shape[-1]
    for i, (a, b) in enumerate(zip(*planes_of(layout, dim), strict=True)):
        angle = np.asarray(position, np.float64) * base ** (-2 * i / dim)
        cosine, sine = (f(angle)[:, :, None] for f in (np.cos, np.sin))
        out[..., a] = x[..., a] * cosine - x[..., b] * sine
        out[..., b] = x[..., a] * sine + x[..., b] * cosine
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_paper_s_formula(layout):
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8))
    at = where.contiguous(2, 5, start=jnp.asarray([0, 7]))
    encoding = Rope(base=100.0, layout=layout)
    wanted = naive(x, at.position, 100.0, layout)
    np.testing.assert_allclose(encoding.query({}, x, at), wanted, atol=2e-6)
    np.testing.assert_allclose(encoding.key({}, x, at), wanted, atol=2e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_plane_turns_alone_by_its_frequency(layout):
    # Fault B17: unit vectors at position 1.
    unit = jnp.eye(8)[None, :, None, :]
    position = jnp.ones((1, 8), jnp.int32)
    turned = np.asarray(rotate(unit, position, inverse_frequencies(8), layout=layout))
    turned = turned[0, :, 0]
    first, second = planes_of(layout, 8)
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        angle = 10000.0 ** (-2 * i / 8)
        wanted = np.zeros((2, 8))
        wanted[0, [a, b]] = np.cos(angle), np.sin(angle)
        wanted[1, [a, b]] = -np.sin(angle), np.cos(angle)
        np.testing.assert_allclose(turned[[a, b]], wanted, atol=1e-6)


def test_one_layout_is_the_other_with_features_permuted():
    q, k = jax.random.normal(jax.random.key(1), (2, 1, 6, 2, 8))
    at = where.contiguous(1, 6, start=100)
    order = np.stack(planes_of("halves", 8), axis=1).reshape(-1)

    def scores(layout, q, k):
        q, k = (Rope(layout=layout).query({}, x, at) for x in (q, k))
        return jnp.einsum("bqhd,bkhd->bhqk", q, k)

    halves = scores("halves", q, k)
    interleaved = scores("interleaved", q[..., order], k[..., order])
    np.testing.assert_allclose(halves, interleaved, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_are_kept_and_scores_depend_on_the_distance(layout):
    q, k = jax.random.normal(jax.random.key(2), (2, 1, 6, 1, 16))
    encoding = Rope(layout=layout)
    near, far = where.contiguous(1, 6), where.contiguous(1, 6, start=999)
    turned = encoding.query({}, q, far)
    norms = [np.linalg.norm(x, axis=-1) for x in (turned, q)]
    np.testing.assert_allclose(*norms, rtol=1e-6)
    scores = [
        jnp.einsum(
            "bqhd,bkhd->bhqk", encoding.query({}, q, at), encoding.key({}, k, at)
        )
        for at in (near, far)
    ]
    np.testing.assert_allclose(*scores, atol=1e-3)


def table(position, frequency):
    """Returns cosines beside sines `[t 2f]`, in float32."""
    planes = frequency.shape[0]
    shape = (1, len(position), 1, planes)
    unit = jnp.concatenate([jnp.ones(shape), jnp.zeros(shape)], axis=-1)
    return np.asarray(rotate(unit, jnp.asarray([position]), frequency)[0, :, 0])


def exact_table(position, dim, base=10000.0):
    angle = np.asarray(position, np.float64)[:, None] * base ** (
        -np.arange(0, dim, 2) / dim
    )
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=-1)


def test_tables_are_as_accurate_as_float32_allows():
    # Fault B12.
    position = [255, 256, 257, 4095, 131071, 1_000_000]
    found = table(position, inverse_frequencies(128))
    wanted = exact_table(position, 128)
    error = np.abs(found - wanted).max(axis=1)
    assert np.all(error[:4] < 3e-4) and error[4] < 2e-3
    assert error[5] < 1e-3  # of a position whose float32 phase has steps of 0.06
    # One rounding of the frequency and one of the angle, half a unit (6e-8) each, is
    # what frequencies that are data give.
    data = table(position, jnp.asarray(inverse_frequencies(128), jnp.float32))
    allowed = 1.2e-7 * np.asarray(position) + 2e-7
    assert np.all(np.abs(data - wanted).max(axis=1) <= allowed)
    assert np.abs(found[1] - found[2]).max() > 0.1
    # Frequencies in bfloat16 would be off by more than one.
    short = jnp.asarray(inverse_frequencies(128), jnp.bfloat16).astype(jnp.float32)
    assert np.abs(table(position[3:4], short) - wanted[3:4]).max() > 1


def test_bfloat16_vectors_turn_by_float32_angles():
    x = jax.random.normal(jax.random.key(3), (1, 4, 2, 64)).astype(jnp.bfloat16)
    position = np.asarray([[256, 257, 131071, 1_000_000]])
    at = Where(jnp.asarray(position), jnp.ones((1, 4), jnp.int32))
    found = Rope().query({}, x, at)
    assert found.dtype == jnp.bfloat16
    wanted = naive(x.astype(jnp.float32), position, 10000.0, "halves")
    error = np.abs(np.asarray(found, np.float64) - wanted).max(axis=(0, 2, 3))
    # bfloat16 keeps 8 bits of the result, and the angles are much better than that.
    largest = float(jnp.abs(wanted).max())
    assert np.all(error <= largest * 2**-8)


def test_nothing_is_remembered_between_calls():
    # Fault B15: the same length with another offset, base or traced offset.
    x = jax.random.normal(jax.random.key(4), (1, 4, 1, 8))
    for base in (10000.0, 500.0):
        for start in (0, 10):
            at = where.contiguous(1, 4, start=start)
            found = Rope(base=base).query({}, x, at)
            wanted = naive(x, at.position, base, "halves")
            np.testing.assert_allclose(found, wanted, atol=2e-6)

    @jax.jit
    def traced(start):
        return Rope().query({}, x, where.contiguous(1, 4, start=start))

    for start in (0, 10):
        at = where.contiguous(1, 4, start=start)
        wanted = naive(x, at.position, 10000.0, "halves")
        np.testing.assert_allclose(traced(start), wanted, atol=2e-6)


def test_partial_and_p_rope_leave_different_features_alone():
    x = jax.random.normal(jax.random.key(5), (1, 3, 1, 16))
    at = where.contiguous(1, 3, start=50)
    partial = Rope(fraction=0.25).query({}, x, at)
    np.testing.assert_array_equal(partial[..., 4:], x[..., 4:])
    wanted = naive(x[..., :4], at.position, 10000.0, "halves")
    np.testing.assert_allclose(partial[..., :4], wanted, atol=5e-6)
    # p-RoPE keeps the highest frequencies as they are; the slow planes stand still.
    frequency = make("p_rope").frequencies(16)
    np.testing.assert_array_equal(frequency[:6], inverse_frequencies(16)[:6])
    np.testing.assert_array_equal(frequency[6:], 0)
    turned = make("p_rope").query({}, x, at)
    for features in (slice(6, 8), slice(14, 16)):
        np.testing.assert_array_equal(turned[..., features], x[..., features])


def test_what_makes_no_sense_is_refused():
    x, at = jnp.zeros((1, 2, 1, 7)), where.contiguous(1, 2)
    with pytest.raises(ValueError, match="even"):
        Rope().query({}, x, at)
    with pytest.raises(ValueError, match="layout must be"):
        Rope(layout="pairs").query({}, jnp.zeros((1, 2, 1, 8)), at)
    for field in ("base", "fraction", "p"):
        with pytest.raises(ValueError, match="must be positive"):
            Rope(**{field: 0.0})
    with pytest.raises(ValueError, match="are to turn"):
        rotate(jnp.zeros((1, 2, 1, 4)), at.position, inverse_frequencies(8))


def test_positions_may_be_negative_or_fractions():
    position = [-5, -3000, 0.25, 5000.5, -1.5]
    found = table(position, inverse_frequencies(16))
    wanted = exact_table(position, 16)
    error = np.abs(found - wanted).max(axis=1)
    assert np.all(error <= 1.2e-7 * np.abs(np.minimum(position, 2048)) + 3e-7)
