"""Encoder-decoders: decoding is the full forward, and padding is unseen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relpos_jax import where
from relpos_jax.models import ModelConfig
from relpos_jax.models.encoder_decoder import (
    EncoderDecoder,
    EncoderDecoderConfig,
    greedy,
)
from relpos_jax.positional import PositionEncoding, make
from relpos_jax.where import Where
from tests import conformance as suite

# The others in `make test-all`: each of them decodes in the conformance suite, and
# looks both ways in the encoder's tests.
QUICK = ("sinusoidal", "t5")
NAMES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in suite.NAMES
]
LENGTH, SOURCE = 6, 8


def config_of(position="t5", encoder="t5_bidirectional", cross=None, **changes):
    sizes = dict(vocabulary=13, layers=1, width=16, heads=2, head_dim=8, feedforward=24)
    sizes |= changes
    return EncoderDecoderConfig.of(
        ModelConfig(**sizes, position=suite.encoding_of(position)),
        encoder_position=suite.encoding_of(encoder),
        cross=PositionEncoding() if cross is None else make(cross),
    )


def split(config):
    model = EncoderDecoder(config, key=jax.random.key(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    assert not jax.tree.leaves(rest), "a model holds parameters and nothing else"
    return params, lambda params: nnx.merge(graphdef, params, rest)


def tokens_of(batch, length, seed=1):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, 13)


def close(found, wanted, tolerance=5e-5):
    np.testing.assert_allclose(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_decoding_from_a_cache_is_the_full_forward(name):
    if suite.encoding_of(name).length_dependent:
        pytest.skip("a token of the full forward knows the length of what follows it")
    # Those of one direction decode what an encoder without positions has read.
    one_sided = suite.encoding_of(name).causal_only
    config = config_of(name, "none" if one_sided else name)
    params, model = split(config)
    source, tokens = tokens_of(2, SOURCE, 2), tokens_of(2, LENGTH)
    source_at = where.from_lengths(jnp.array([SOURCE, 5]), SOURCE)
    at = where.contiguous(2, LENGTH)

    @jax.jit
    def step(params, tokens, at, cache, context):
        return model(params).decode(tokens, at, cache, context, spacing="any")

    @jax.jit
    def both(params, source):
        whole = model(params)(source, source_at, tokens, at)
        return whole, model(params).encode(source, source_at)

    wanted, context = both(params, source)
    cache, found = model(params).init_cache(2, LENGTH), []
    for t in range(LENGTH):
        here = jax.tree.map(lambda x: x[:, t : t + 1], at)
        logits, cache = step(params, tokens[:, t : t + 1], here, cache, context)
        found.append(logits)
    close(jnp.concatenate(found, axis=1), wanted, 1e-4)
    assert step._cache_size() == 1
    # The source matters, and its padding does not.
    close(both(params, source.at[1, 5:].set(0))[0], wanted, 0)
    other = both(params, source.at[:, 0].set((source[:, 0] + 1) % 13))[0]
    assert np.abs(np.asarray(other - wanted)).max(axis=(1, 2)).min() > 1e-6


def test_greedy_is_the_best_token_of_the_full_forward_again_and_again():
    params, model = split(config_of(layers=2))
    source, at = tokens_of(3, SOURCE), where.contiguous(3, SOURCE)
    # Larger outputs, so that tokens differ and some row may stop.
    params = jax.tree.map(lambda x: 3 * x, params)
    found = jax.jit(
        lambda params: greedy(model(params), source, at, LENGTH, start=0, stop=1)
    )(params)

    @jax.jit
    def best(tokens):
        here = where.contiguous(3, LENGTH)
        return jnp.argmax(model(params)(source, at, tokens, here), axis=-1)

    inputs = np.zeros((3, LENGTH), np.int32)
    ended = np.zeros(3, bool)
    for t in range(LENGTH):
        token = np.where(ended, 1, np.asarray(best(jnp.asarray(inputs)))[:, t])
        ended |= token == 1
        np.testing.assert_array_equal(found[:, t], token)
        if t + 1 < LENGTH:
            inputs[:, t + 1] = token
    assert len(np.unique(found)) > 1


def test_steps_read_nothing_of_the_encoder_again():
    params, model = split(config_of())
    source, at = tokens_of(1, SOURCE), where.contiguous(1, SOURCE)
    context = jax.jit(lambda params: model(params).encode(source, at))(params)
    ruined = nnx.to_pure_dict(params)
    ruined["encoder"] = jax.tree.map(lambda x: jnp.nan * x, ruined["encoder"])
    for name in ("key", "value"):
        kernel = ruined["decoder"]["layers"][0]["cross_attention"][name]
        kernel["kernel"] = jnp.nan * kernel["kernel"]
    broken = jax.tree.map(lambda x: x, params)
    nnx.replace_by_pure_dict(broken, ruined)
    tokens, here = tokens_of(1, 1), where.contiguous(1, 1)

    @jax.jit
    def step(params):
        cache = model(params).init_cache(1, 2)
        return model(params).decode(tokens, here, cache, context)[0]

    results = [step(p) for p in (params, broken)]
    assert np.all(np.isfinite(results[0]))
    np.testing.assert_array_equal(*results)


def test_pairs_that_are_packed_or_padded_are_each_alone():
    params, model = split(config_of("rope", "rope"))
    forward = jax.jit(lambda *inputs: model(params)(*inputs))
    source, tokens = tokens_of(2, 4), tokens_of(2, 3)
    wanted = forward(
        *(source, where.contiguous(2, 4)), *(tokens, where.contiguous(2, 3))
    )
    for side in ("left", "right"):
        before, after = (4, 0) if side == "left" else (0, 4)
        gap = ((0, 0), (before, after))
        s = jnp.pad(source, gap, constant_values=7)
        t = jnp.pad(tokens, gap, constant_values=7)
        lengths = (jnp.full(2, 4), jnp.full(2, 3))
        s_at, t_at = (
            where.from_lengths(n, x.shape[1], side=side)
            for n, x in zip(lengths, (s, t), strict=True)
        )
        found = forward(s, s_at, t, t_at)
        close(found[:, before : before + 3], wanted)
    row = forward(
        source.reshape(1, 8),
        where.packed((4, 4), 8),
        *(tokens.reshape(1, 6), where.packed((3, 3), 6)),
    )
    close(row.reshape(2, 3, -1), wanted)


def test_cross_attention_has_its_own_rule_for_positions():
    source, tokens = tokens_of(1, 5), tokens_of(1, 4)
    here, at = where.contiguous(1, 5), where.contiguous(1, 4)
    moved = Where(here.position + 3, here.segment)
    for cross, matters in ((None, False), ("rope", True), ("t5_bidirectional", True)):
        params, model = split(config_of(cross=cross))
        forward = jax.jit(lambda s, m=model(params): m(source, s, tokens, at))
        one, other = (forward(s) for s in (here, moved))
        assert (np.abs(np.asarray(one - other)).max() > 1e-4) == matters
    table = nnx.to_pure_dict(params)["cross_position"]["table"]
    assert table.shape == (32, 2)


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="adds to the embeddings"):
        config_of(cross="sinusoidal")
    with pytest.raises(ValueError, match="keys at or before the query only"):
        config_of(cross="xpos")
    with pytest.raises(ValueError, match="keys at or before the query only"):
        config_of(encoder="cope")
    config = config_of()
    with pytest.raises(ValueError, match="must be bidirectional"):
        EncoderDecoderConfig(config.decoder, config.decoder)
    wider = dataclasses.replace(config.decoder, width=24)
    with pytest.raises(ValueError, match="width is 16"):
        EncoderDecoderConfig(config.encoder, wider)
    params, model = split(config)
    source, at = tokens_of(2, 4), where.contiguous(2, 4)
    context = jax.jit(lambda: model(params).encode(source, at))()
    with pytest.raises(ValueError, match="context is of batch 2"):
        model(params).decode(
            tokens_of(1, 3),
            where.contiguous(1, 3),
            model(params).init_cache(1, 3),
            context,
        )
    assert context.repeated(2).at.position.shape == (4, 4)


@pytest.mark.slow
def test_losses_and_dropout_are_functions_of_what_they_are_given():
    params, model = split(config_of(dropout=0.5, norm_kind="rms"))
    source, tokens = tokens_of(2, 5), tokens_of(2, 4)
    s_at, at = where.contiguous(2, 5), where.from_lengths(jnp.array([4, 2]), 4)
    targets = jnp.where(at.segment != 0, tokens, -3)

    @jax.jit
    def both(key):
        loss = model(params).losses(
            source, s_at, tokens, targets, at, weight=at.segment, key=key
        )
        return loss, model(params)(source, s_at, tokens, at, key=key)

    losses, logits = both(jax.random.key(0))
    wanted = -jax.nn.log_softmax(logits)
    for row, place in ((0, 3), (1, 1)):
        close(losses[row, place], wanted[row, place, targets[row, place]])
    assert np.all(np.isfinite(losses))
    np.testing.assert_array_equal(both(jax.random.key(0))[1], logits)
    assert np.abs(np.asarray(both(jax.random.key(1))[1] - logits)).max() > 1e-3
