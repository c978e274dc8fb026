"""Every registered encoding and some chains, through every mode, by the same checks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.masks import Bidirectional, Causal, Window
from relpos_jax.relative import Layout
from relpos_jax.where import Where
from tests import conformance as suite
from tests.conformance import LENGTH, NAMES, cut, encoding_of, model_of, tokens_of


@pytest.fixture(
    scope="module",
    # Tests of one encoding run together: they share compiled functions.
    params=[pytest.param(n, marks=pytest.mark.xdist_group(n)) for n in NAMES],
)
def name(request):
    """An encoding's name."""
    return request.param


@pytest.fixture
def relative(name):
    """The name of an encoding that can be used with memory."""
    if encoding_of(name).absolute:
        pytest.skip("absolute embeddings are refused with memory")
    return name


def close(found, wanted, tolerance=3e-5):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance),
        found,
        wanted,
    )


MEMORY = 7
PATHS = {
    "diagonals": dict(implementation="dense", layout=Layout(MEMORY)),
    "blocks 8, 8": dict(
        implementation="blockwise", layout=Layout(MEMORY), blocks=(8, 8)
    ),
    "blocks 4, 16, only rising": dict(
        implementation="blockwise", layout=Layout(MEMORY, unit=False), blocks=(4, 16)
    ),
    "blocks 16, 8, nothing known": dict(implementation="blockwise", blocks=(16, 8)),
}


def check_paths(name, mask, paths):
    encoding = encoding_of(name)
    inputs = suite.inputs_of(encoding, 13, 13 + MEMORY)
    # Row 0 packs three documents behind memory; row 1 has empty slots in its memory.
    q_at, k_at = suite.memory_rows(2, MEMORY, 13)
    packed = where.packed((9, 4, 5), 20)
    k_at = Where(
        k_at.position.at[0].set(packed.position[0]),
        k_at.segment.at[0].set(packed.segment[0]),
    )
    q_at = cut(k_at, MEMORY, 20)
    options = dict(mask=mask, implementation="pairs")
    wanted = suite.output_and_gradients(
        encoding, inputs, q_at, k_at, tuple(options.items())
    )
    assert np.all(np.asarray(wanted[0][0, -2:]) == 0)  # padding gives zeros
    for path in paths:
        options = dict(mask=mask, **PATHS[path])
        found = suite.output_and_gradients(
            encoding, inputs, q_at, k_at, tuple(options.items())
        )
        try:
            close(found, wanted)
        except AssertionError as error:
            raise AssertionError(f"{path}, {mask}: {error}") from error


def test_every_path_gives_the_oracle_s_values_and_gradients(name):
    check_paths(name, Causal(), ["blocks 8, 8", "blocks 16, 8, nothing known"])


@pytest.mark.parametrize("mask", [Causal(), Bidirectional(), Window(5)], ids=repr)
def test_every_mask_and_path_gives_the_oracle_s_values_and_gradients(name, mask):
    if mask == Bidirectional() and encoding_of(name).causal_only:
        pytest.skip("defined for distances >= 0 only")
    check_paths(name, mask, PATHS)


def test_gradient_is_causal(name):
    encoding = encoding_of(name)
    inputs = suite.inputs_of(encoding, LENGTH, LENGTH)
    at = where.contiguous(2, LENGTH)

    @jax.jit
    def gradient(inputs, t):
        def loss(inputs):
            return jnp.sum(suite.run(encoding, inputs, at, at, layout=Layout())[:, t])

        return jax.grad(loss)(inputs)

    t = 5
    found = gradient(inputs, t)
    for part in (found.k, found.v, found.x):
        assert np.all(np.asarray(part[:, t + 1 :]) == 0)
    assert np.all(np.abs(np.asarray(found.v[:, : t + 1])).sum((2, 3)) > 0)
    assert np.all(np.asarray(found.q[:, t + 1 :]) == 0)


def test_positions_matter_by_distance_alone_where_the_encoding_says_so(name):
    encoding = encoding_of(name)
    _, forward, params, model = model_of(name)
    tokens = tokens_of(2, LENGTH)
    here = where.contiguous(2, LENGTH)
    moved = where.contiguous(2, LENGTH, start=9)
    empty = model.init_memory(2, 0)
    one, other = (forward(params, tokens, at, empty)[0] for at in (here, moved))
    if encoding.invariant:
        close(one, other, 2e-4)
    else:
        assert np.abs(np.asarray(one - other)).max() > 1e-4
    if name == "none":
        return
    # Other distances give other outputs.
    spread = here._replace(position=here.position * 3)
    other = forward(params, tokens, spread, empty, spacing="any")[0]
    if encoding.ordinal:
        close(one, other, 1e-5)
    else:
        assert np.abs(np.asarray(one - other)).max() > 1e-5


def test_low_precision_is_close_and_types_are_kept(name):
    encoding = encoding_of(name)
    inputs = suite.inputs_of(encoding, LENGTH, LENGTH)
    at = where.contiguous(2, LENGTH, start=100_000 if encoding.invariant else 0)
    low = inputs._replace(
        **{n: getattr(inputs, n).astype(jnp.bfloat16) for n in ("q", "k", "v", "x")}
    )
    exact = low._replace(
        **{n: getattr(low, n).astype(jnp.float32) for n in ("q", "k", "v", "x")}
    )
    found = suite.run(encoding, low, at, at, layout=Layout())
    wanted = suite.run(encoding, exact, at, at, layout=Layout())
    assert found.dtype == jnp.bfloat16 and wanted.dtype == jnp.float32
    found = np.asarray(found.astype(jnp.float32))
    np.testing.assert_allclose(found, wanted, atol=0.06, rtol=0.06)


def full_forward(name, tokens, at, **changes):
    """Returns logits of a full pass, each row of which may look at its past alone.

    An encoding that depends on the whole length is run on each prefix, since that is
    all that a token-by-token pass can know.
    """
    config, forward, params, model = model_of(name, **changes)
    batch, length = tokens.shape
    empty = model.init_memory(batch, 0)
    if not config.position.length_dependent:
        return forward(params, tokens, at, empty)[0]
    rows = []
    for t in range(length):
        known = jnp.arange(length)[None, :] <= t
        prefix = at._replace(segment=jnp.where(known, at.segment, 0))
        rows.append(forward(params, tokens, prefix, empty)[0][:, t])
    return jnp.stack(rows, axis=1)


def test_token_by_token_from_a_cache_is_the_full_forward(name):
    _, forward, params, model = model_of(name)
    tokens, at = tokens_of(2, LENGTH), where.contiguous(2, LENGTH)
    cache = model.init_cache(2, LENGTH)
    logits = []
    before = forward._cache_size()
    for t in range(LENGTH):
        here, cache = forward(
            params, tokens[:, t : t + 1], cut(at, t, t + 1), cache, spacing="any"
        )
        logits.append(here)
    assert forward._cache_size() <= before + 1  # one compiled step in all
    found = jnp.concatenate(logits, axis=1)
    close(found, full_forward(name, tokens, at), 1e-4)
    # One token more has no slot: NaN rather than a plausible number.
    here, after = forward(params, tokens[:, :1], cut(at, 0, 1), cache, spacing="any")
    assert np.all(np.isnan(here))
    close(after.keys, cache.keys, 0)


def test_a_ring_past_its_length_is_the_window(name):
    _, forward, params, model = model_of(name, window=5)
    tokens, at = tokens_of(2, LENGTH), where.contiguous(2, LENGTH)
    cache = model.init_cache(2, 5, ring=True)
    logits = []
    for t in range(LENGTH):
        here, cache = forward(
            params, tokens[:, t : t + 1], cut(at, t, t + 1), cache, spacing="any"
        )
        logits.append(here)
    if encoding_of(name).length_dependent:
        pytest.skip("depends on the whole length, which a ring forgets")
    close(
        jnp.concatenate(logits, axis=1), full_forward(name, tokens, at, window=5), 1e-4
    )


@pytest.mark.parametrize("segment", [3, 4, 6])
def test_segment_by_segment_with_memory_is_the_full_forward(relative, segment):
    name = relative
    _, forward, params, model = model_of(name)
    tokens, at = tokens_of(2, LENGTH), where.contiguous(2, LENGTH)

    @jax.jit
    def scan(params, tokens, at):
        def split(x):
            parts = x.reshape(2, LENGTH // segment, segment)
            return jnp.swapaxes(parts, 0, 1)

        def step(memory, inputs):
            logits, memory = forward(params, *inputs, memory)
            return memory, logits

        memory = model.init_memory(2, LENGTH)
        inputs = (split(tokens), jax.tree.map(split, at))
        _, logits = jax.lax.scan(step, memory, inputs)
        return jnp.swapaxes(logits, 0, 1).reshape(2, LENGTH, -1)

    if encoding_of(name).length_dependent:
        pytest.skip("layers above the first remember states of shorter lengths")
    found = scan(params, tokens, at)
    wanted = full_forward(name, tokens, at)
    close(found, wanted, 1e-4)


def test_packed_documents_are_each_alone_and_padding_is_ignored(name):
    _, forward, params, model = model_of(name)
    tokens = tokens_of(1, LENGTH)
    first, second = 5, 4
    at = where.packed((first, second), LENGTH)
    packed = forward(params, tokens, at, model.init_memory(1, 0))[0]

    def alone(start, length, side):
        # At the same padded length, on either side, to compile nothing new.
        real = tokens[:, start : start + length]
        gap = jnp.zeros((1, LENGTH - length), jnp.int32)
        parts = [real, gap] if side == "right" else [gap, real]
        at = where.from_lengths(jnp.array([length]), LENGTH, side=side)
        out = forward(params, jnp.concatenate(parts, 1), at, model.init_memory(1, 0))[0]
        return out[:, :length] if side == "right" else out[:, -length:]

    for side in ("right", "left"):
        close(packed[:, :first], alone(0, first, side), 2e-5)
        close(packed[:, first : first + second], alone(first, second, side), 2e-5)
    # Another first document leaves the second one exactly as it was.
    changed = tokens.at[:, :first].set((tokens[:, :first] + 1) % suite.VOCABULARY)
    again = forward(params, changed, at, model.init_memory(1, 0))[0]
    close(again[:, first : first + second], packed[:, first : first + second], 0)
    assert np.all(np.isfinite(packed))


def test_equal_configurations_share_one_compilation(name):
    _, forward, params, model = model_of(name)
    tokens, at = tokens_of(2, LENGTH), where.contiguous(2, LENGTH)
    forward(params, tokens, at, model.init_memory(2, 0))
    count = forward._cache_size()
    forward(params, tokens + 0, at, model.init_memory(2, 0))
    assert forward._cache_size() == count
    assert encoding_of(name) == encoding_of(name)
    assert hash(encoding_of(name)) == hash(encoding_of(name))
    encoding = encoding_of(name)
    assert dataclasses.replace(encoding) == encoding
    close(suite.position_params(encoding), suite.position_params(encoding), 0)


def test_no_gradient_enters_memory(relative):
    name = relative
    _, forward, params, model = model_of(name)
    tokens, at = tokens_of(2, 8), where.contiguous(2, 8)
    memory = forward(params, tokens[:, :4], cut(at, 0, 4), model.init_memory(2, 4))[1]

    def loss(hidden):
        old = memory._replace(hidden=hidden)
        return jnp.sum(forward(params, tokens[:, 4:], cut(at, 4, 8), old)[0] ** 2)

    assert np.all(np.asarray(jax.grad(loss)(memory.hidden)) == 0)
    # And yet memory matters.
    other = jnp.roll(memory.hidden, 1, axis=-1)
    assert not np.allclose(loss(memory.hidden), loss(other))
