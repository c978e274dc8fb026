"""Transformations of positions: in range, rising, one draw a row and document."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.masks import Bidirectional
from relpos_jax.positional import ENCODINGS, Dims, merge
from relpos_jax.positional.positions import (
    SAMPLERS,
    Interpolated,
    Offset,
    PositionSampler,
    Randomized,
    interpolated,
    make_sampler,
    offset,
    randomized,
    randomized_float,
)
from relpos_jax.relative import Layout, holds
from relpos_jax.where import Where


@pytest.mark.parametrize("draw", [randomized, randomized_float])
@pytest.mark.parametrize("length", [1, 5, 16])
def test_rising_in_range_and_different_by_row(draw, length):
    at = where.contiguous(64, length)
    found = draw(jax.random.key(0), at, 16)
    position = np.asarray(found.position)
    assert position.min() >= 0 and position.max() < 16
    assert (np.diff(position, axis=1) > 0).all()
    np.testing.assert_array_equal(found.segment, at.segment)
    if length == 5:
        assert len(np.unique(position, axis=0)) > 50
    if length == 16 and draw is randomized:
        np.testing.assert_array_equal(position, at.position)


def test_the_key_decides_and_the_batch_does_not():
    at = where.contiguous(3, 5)
    first = randomized(jax.random.key(0), at, 16)
    again = jax.jit(randomized, static_argnums=2)(jax.random.key(0), at, 16)
    other = randomized(jax.random.key(1), at, 16)
    fewer = randomized(jax.random.key(0), where.contiguous(2, 5), 16)
    np.testing.assert_array_equal(first.position, again.position)
    np.testing.assert_array_equal(first.position[:2], fewer.position)
    assert (first.position != other.position).any()


def test_draws_are_uniform_without_replacement():
    at = where.contiguous(6000, 2)
    position = np.asarray(randomized(jax.random.key(0), at, 4).position)
    pairs, counts = np.unique(position, axis=0, return_counts=True)
    assert len(pairs) == 6
    np.testing.assert_allclose(counts, 1000, atol=150)  # five standard deviations


@pytest.mark.parametrize("draw", [randomized, randomized_float])
def test_more_tokens_than_places_is_an_error(draw):
    with pytest.raises(ValueError, match="simulated"):
        draw(jax.random.key(0), where.contiguous(1, 17), 16)


@pytest.mark.parametrize("draw", [randomized, randomized_float])
def test_documents_and_padding(draw):
    packed = where.packed((4, 3), 9)
    turn = jnp.asarray([3, 0, 8, 1, 2, 6, 4, 7, 5])
    at = jax.tree.map(lambda x: x[:, turn], packed)
    for given in (packed, at):
        found = draw(jax.random.key(0), given, 16)
        for document in (1, 2):
            own = given.segment[0] == document
            order = jnp.argsort(given.position[0][own])
            assert (np.diff(found.position[0][own][order]) > 0).all()
        np.testing.assert_array_equal(found.position[given.segment == 0], 0)


def test_many_floats_all_differ():
    found = randomized_float(jax.random.key(0), where.contiguous(1, 2**15), 2**15)
    assert (np.diff(np.asarray(found.position[0])) > 0).all()
    assert found.position.max() <= 2**15


def test_offset_is_one_number_a_document():
    at = where.packed((4, 3), 9)
    at = Where(*(jnp.tile(x, (40, 1)) for x in at))
    found = offset(jax.random.key(0), at, 100)
    more = np.asarray(found.position - at.position)
    for cut in (slice(0, 4), slice(4, 7)):
        assert (more[:, cut] == more[:, cut][:, :1]).all()
        assert more[:, cut].min() >= 0 and more[:, cut].max() <= 100
        assert len(np.unique(more[:, cut])) > 20
    assert (more[:, 0] != more[:, 4]).any()
    # A later segment of the same document has moved as far.
    later = offset(jax.random.key(0), Where(at.position + 50, at.segment), 100)
    np.testing.assert_array_equal(
        (later.position - found.position)[:, :7], jnp.full((40, 7), 50)
    )


def test_interpolated_divides():
    found = interpolated(where.contiguous(1, 5), 4)
    np.testing.assert_array_equal(found.position, [[0, 0.25, 0.5, 0.75, 1]])
    assert found.position.dtype == jnp.float32


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_keep_what_they_promise(name):
    sampler = SAMPLERS[name]
    at = where.packed((4, 3), 9)
    found = sampler(jax.random.key(0), at)
    assert hash(sampler) == hash(SAMPLERS[name])
    if sampler.spacing != "any":
        layout = Layout(unit=sampler.spacing == "unit")
        assert holds(layout, found, found).all()
    halves = [jax.tree.map(lambda x: x[:, cut], at) for cut in np.s_[:3, 3:]]
    parts = [sampler(jax.random.key(0), half) for half in halves]
    joined = where.concatenate(*parts)
    if not sampler.whole:
        np.testing.assert_array_equal(joined.position, found.position)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Randomized(0),
        lambda: Offset(-1),
        lambda: Interpolated(0.0),
        lambda: offset(jax.random.key(0), where.contiguous(1, 2), -1),
        lambda: interpolated(where.contiguous(1, 2), 0),
    ],
)
def test_refuses_nonsense(make):
    with pytest.raises(ValueError):
        make()
    assert PositionSampler() == SAMPLERS["given"]


def test_samplers_by_name():
    assert make_sampler("randomized", simulated_length=64) == Randomized(64)
    with pytest.raises(ValueError, match="did you mean 'offset'"):
        make_sampler("ofset")
    with pytest.raises(ValueError, match="did you mean 'maximum'"):
        make_sampler("offset", maximun=3)


@pytest.mark.parametrize("name", ["rope", "alibi", "t5", "shaw", "transformer_xl"])
@pytest.mark.parametrize("mask", [None, Bidirectional()])
def test_distances_stay_in_range_both_ways(name, mask):
    # Index ranges of relative tables are the encoding's own: nothing to clamp or fill
    # here, whatever the simulated length is.
    encoding = ENCODINGS[name]
    if mask is not None and encoding.causal_only:
        pytest.skip("is defined for distances from 0 on only")
    dims = Dims(2, 8, 16)
    params = merge(
        encoding.init(jax.random.key(0), dims),
        encoding.init_shared(jax.random.key(1), dims),
    )
    q, k, v = jax.random.normal(jax.random.key(2), (3, 1, 5, 2, 8))
    at = randomized(jax.random.key(3), where.contiguous(1, 5), 2048)
    options = {} if mask is None else {"mask": mask}
    out = attend(
        encoding, params, q, k, v, at, at, layout=Layout(unit=False), **options
    )
    pairs = attend(encoding, params, q, k, v, at, at, implementation="pairs", **options)
    np.testing.assert_allclose(out, pairs, atol=2e-6)
    assert bool(jnp.all(jnp.isfinite(out)))
