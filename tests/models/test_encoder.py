"""Encoders: both directions, padding, packed documents, and what is refused."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relpos_jax import where
from relpos_jax.models import Encoder, ModelConfig, TransformerXL, build
from relpos_jax.models.decoder import count_parameters
from relpos_jax.positional import ENCODINGS
from relpos_jax.where import Where
from tests import conformance as suite

ONE_SIDED = [name for name, encoding in ENCODINGS.items() if encoding.causal_only]
# Settings of a class that stands before with others differ in numbers, not in code.
SLOW = {*suite.VARIANTS, *list(suite.CHAINS)[1:]}
NAMES = [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
    for name in suite.NAMES
    if not suite.encoding_of(name).causal_only
]


def config_of(position="t5_bidirectional", **changes):
    sizes = dict(vocabulary=13, layers=2, width=16, heads=2, head_dim=8, feedforward=24)
    if isinstance(position, str):
        position = suite.encoding_of(position)
    changes = {"position": position, "bidirectional": True, **changes}
    return ModelConfig(**{**sizes, **changes})


def split(config, seed=0):
    graphdef, params, rest = nnx.split(
        build(config, key=jax.random.key(seed)), nnx.Param, ...
    )
    assert not jax.tree.leaves(rest), "a model holds parameters and nothing else"

    @jax.jit
    def forward(params, tokens, at):
        return nnx.merge(graphdef, params, rest)(tokens, at)

    return params, forward


def tokens_of(batch, length, seed=1):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, 13)


def close(found, wanted, tolerance=2e-5):
    np.testing.assert_allclose(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_padding_on_either_side_and_packing_change_nothing(name):
    params, forward = split(config_of(name, layers=1))
    length, first, second = 12, 5, 4
    one, two = tokens_of(1, first), tokens_of(1, second, seed=2)
    sizes = jnp.array([first, second])

    def padded(side):
        rows = [
            jnp.pad(x, ((0, 0), (0, gap) if side == "right" else (gap, 0)))
            for x, gap in ((one, length - first), (two, length - second))
        ]
        return jnp.concatenate(rows), where.from_lengths(sizes, length, side=side)

    together = jnp.pad(jnp.concatenate([one, two], 1), ((0, 0), (0, 3)))
    # All in one batch: each row is a document alone, or both, or one beside another.
    parts = [
        (together, where.packed((first, second), length)),
        (together.at[:, :first].set(12 - one), where.packed((first, second), length)),
        padded("right"),
        padded("left"),
    ]
    tokens = jnp.concatenate([tokens for tokens, _ in parts])
    at = Where(*(jnp.concatenate(x) for x in zip(*(at for _, at in parts))))
    packed, beside, *alone = forward(params, tokens, at)
    right, left = alone[:2], alone[2:]
    for row, start, size in ((0, 0, first), (1, first, second)):
        wanted = packed[start : start + size]
        close(right[row][:size], wanted)
        close(left[row][length - size :], wanted)
    close(beside[first : first + second], packed[first : first + second], 0)
    assert np.abs(np.asarray(beside - packed)[:first]).max() > 1e-3
    assert np.all(np.isfinite(packed))


def test_every_token_sees_its_whole_document():
    params, forward = split(config_of())
    tokens, at = tokens_of(1, 8), where.contiguous(1, 8)
    before = np.asarray(forward(params, tokens, at))
    for place in (0, 7):
        other = tokens.at[0, place].set((tokens[0, place] + 1) % 13)
        after = np.asarray(forward(params, other, at))
        assert np.all(np.abs(after - before).max(axis=-1) > 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rope", "deberta"])
def test_blockwise_is_dense(name):
    tokens, at = tokens_of(2, 20), where.from_lengths(jnp.array([20, 13]), 20)
    for window in (None, 4):
        found = []
        for attention in ("pairs", "blockwise"):
            params, forward = split(config_of(name, attention=attention, window=window))
            found.append(forward(params, tokens, at))
        close(*found, 5e-5)


def test_a_window_looks_both_ways():
    params, forward = split(config_of("none", layers=1, window=3))
    tokens, at = tokens_of(1, 9), where.contiguous(1, 9)
    before = np.asarray(forward(params, tokens, at))
    after = np.asarray(forward(params, tokens.at[0, 4].set(12 - tokens[0, 4]), at))
    changed = np.abs(after - before).max(axis=-1)[0] > 1e-7
    np.testing.assert_array_equal(np.flatnonzero(changed), [2, 3, 4, 5, 6])


@pytest.mark.parametrize("name", ONE_SIDED)
def test_encodings_of_one_direction_are_refused_with_the_reason(name):
    with pytest.raises(ValueError, match="keys at or before the query only"):
        config_of(name)
    config_of(name, bidirectional=False)


def test_the_page_lists_what_is_refused():
    page = pathlib.Path(__file__).parents[2] / "docs" / "encoders.md"
    (row,) = [x for x in page.read_text().splitlines() if "refused: defined" in x]
    assert set(re.findall(r"`(\w+)`", row)) == set(ONE_SIDED)


def test_what_makes_no_encoder_is_refused():
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="excludes memory"):
        config_of(memory_length=4)
    with pytest.raises(ValueError, match="belongs to an encoder"):
        config_of(bidirectional=False, output_transform=True)
    with pytest.raises(ValueError, match="Encoder needs bidirectional=True"):
        Encoder(config_of(bidirectional=False), key=key)
    with pytest.raises(ValueError, match="TransformerXL needs bidirectional=False"):
        TransformerXL(config_of(), key=key)
    assert type(build(config_of(bidirectional=False), key=key)) is TransformerXL
    model = build(config_of(), key=key)
    tokens, at = tokens_of(1, 4), where.contiguous(1, 4)
    with pytest.raises(ValueError, match="give a weight"):
        model.losses(tokens, tokens, at, model.init_memory(1))


def test_published_switches_count_their_parameters():
    config = config_of(
        "deberta",
        norm="post",
        activation="gelu_exact",
        attention_bias=True,
        embedding_norm=True,
        output_transform=True,
        output_bias=True,
    )
    w, f = 16, 24
    attention = 4 * (w * w + w) + 2 * w * w  # the encoding's two projections
    layer = attention + 2 * w * f + f + w + 2 * 2 * w
    head = w * w + w + 2 * w + 13
    embedding = 13 * w + 2 * w + 8 * w  # eight rows of distances
    assert count_parameters(config, Encoder) == 2 * layer + head + embedding
    config = config_of(
        norm_kind="rms",
        activation="geglu",
        feedforward_bias=False,
        tie_embeddings=False,
    )
    layer = 4 * w * w + 3 * w * f + 2 * w
    assert count_parameters(config, Encoder) == 2 * layer + 2 * 13 * w + w + 8 * 2
    alone = dataclasses.replace(config, share_position=False)
    assert count_parameters(alone, Encoder) == count_parameters(config, Encoder) + 16


def test_layers_with_tables_of_their_own():
    config = config_of(share_position=False)
    params, forward = split(config)
    tokens, at = tokens_of(1, 6), where.contiguous(1, 6)
    assert np.all(np.isfinite(forward(params, tokens, at)))
    tables = [
        layer["attention"]["position"]["table"] for layer in params["layers"].values()
    ]
    assert np.abs(np.asarray(tables[0][...] - tables[1][...])).max() > 1e-3
    # What is added to the embeddings has no layer of its own.
    split(config_of("learned", share_position=False))[1](
        split(config_of("learned", share_position=False))[0], tokens, at
    )


def test_norms_and_gates_are_the_plain_formulas():
    config = config_of("none", layers=1, norm_kind="rms", activation="swiglu")
    layer = build(config, key=jax.random.key(0)).layers[0]
    x = jax.random.normal(jax.random.key(1), (1, 3, 16))
    y = layer.feedforward_norm(x)
    close(y, x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-5))
    ff = layer.feedforward
    gate = y @ ff.gate.kernel[...]
    wanted = (gate * jax.nn.sigmoid(gate)) * (y @ ff.inner.kernel[...])
    close(ff(y, None), wanted @ ff.outer.kernel[...])


def test_losses_are_those_of_the_chosen_tokens():
    config = config_of(output_transform=True, output_bias=True)
    model = build(config, key=jax.random.key(0))
    tokens, at = tokens_of(2, 6), where.from_lengths(jnp.array([6, 4]), 6)
    targets = jnp.where(at.segment != 0, (tokens + 1) % 13, -5)
    weight = jnp.zeros((2, 6)).at[0, 2].set(1).at[1, 1].set(1)

    @jax.jit
    def both(tokens, targets):
        memory = model.init_memory(2)
        losses, _ = model.losses(tokens, targets, at, memory, weight=weight)
        return losses, jax.nn.log_softmax(model(tokens, at))

    losses, logits = both(tokens, targets)
    for row, place in ((0, 2), (1, 1)):
        close(losses[row, place], -logits[row, place, targets[row, place]])
