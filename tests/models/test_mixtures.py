"""Encodings by layer: a pattern repeated, shared parameters once an encoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relpos_jax import where
from relpos_jax.models import ModelConfig, TransformerXL
from relpos_jax.models.decoder import count_parameters
from relpos_jax.positional import make, make_layers

SIZES = dict(vocabulary=13, layers=3, width=16, heads=2, head_dim=8, feedforward=24)
PATTERNS = [
    ("rope", "none"),
    ("t5", "rope", "alibi"),
    ("forgetting", "none"),
    ("cope", "forgetting"),
    ("transformer_xl", "transformer_xl", "t5"),
]


def pattern_of(*names):
    return make_layers({"pattern": [{"name": name} for name in names]})


def build(position, **changes):
    config = ModelConfig(**SIZES, position=position, **changes)
    model = TransformerXL(config, key=jax.random.key(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    assert not jax.tree.leaves(rest)
    # So that parameters which start at zero act as well.
    params = jax.tree.map(
        lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), params
    )

    @jax.jit
    def forward(params, tokens, at, memory):
        return nnx.merge(graphdef, params, rest)(tokens, at, memory)

    return model, params, forward


def test_pattern_repeats_and_is_cut():
    rope, none = make("rope"), make("none")
    config = ModelConfig(**SIZES, position=(rope, none))
    assert config.positions == (rope, none, rope)
    assert config.encodings == (rope, none)
    assert hash(config) == hash(ModelConfig(**SIZES, position=(rope, none)))
    # Encodings of layers that there are not have no parameters.
    config = ModelConfig(**SIZES, position=(rope, none, none, make("t5")))
    assert config.encodings == (rope, none)


def test_pattern_of_one_is_the_encoding():
    single = ModelConfig(**SIZES, position=make("t5"))
    assert ModelConfig(**SIZES, position=pattern_of("t5", "t5")) == single
    assert ModelConfig(**SIZES, position=pattern_of("t5")) == single


@pytest.mark.parametrize("names", PATTERNS)
def test_segments_and_cache_agree_with_the_whole(names):
    model, params, forward = build(pattern_of(*names))
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 13)
    at = where.contiguous(2, 9)
    full, _ = forward(params, tokens, at, model.init_memory(2))
    memory, cache = model.init_memory(2, 9), model.init_cache(2, 9)
    segments, decoded = [], []
    for start in range(0, 9, 3):
        cut = slice(start, start + 3)
        here = jax.tree.map(lambda x: x[:, cut], at)
        out, memory = forward(params, tokens[:, cut], here, memory)
        segments.append(out)
        out, cache = forward(params, tokens[:, cut], here, cache)
        decoded.append(out)
    for parts in (segments, decoded):
        np.testing.assert_allclose(jnp.concatenate(parts, 1), full, atol=2e-5)
    count = sum(x.size for x in jax.tree.leaves(params))
    assert count_parameters(model.config) == count


def test_layers_act_as_their_own_encoding():
    # Layer by layer: the pattern's model is two single ones, cut and joined.
    model, params, forward = build(pattern_of("t5", "none"))
    assert set(model.position) == {"0"}
    tokens, at = jnp.arange(6)[None, :], where.contiguous(1, 6)
    mixed, _ = forward(params, tokens, at, model.init_memory(1))
    other, none_params, none_forward = build(make("none"))
    silent, _ = none_forward(none_params, tokens, at, other.init_memory(1))
    assert jnp.abs(mixed - silent).max() > 1e-3

    def without_bias(path, x):
        return jnp.zeros_like(x) if path[0].key == "position" else x

    # With a table of zeros T5 differs from nothing in its scale alone.
    flat = jax.tree_util.tree_map_with_path(without_bias, params)
    a, _ = forward(flat, tokens, at, model.init_memory(1))
    swapped, _ = build(pattern_of("none", "t5"))[2](
        flat, tokens, at, model.init_memory(1)
    )
    assert jnp.abs(a - swapped).max() > 1e-4


def test_absolute_encodings_act_once_and_exclude_memory():
    with pytest.raises(ValueError, match="absolute"):
        ModelConfig(**SIZES, position=pattern_of("rope", "sinusoidal"), memory_length=4)
    model, params, forward = build(pattern_of("sinusoidal", "none"))
    with pytest.raises(ValueError, match="absolute"):
        model.init_memory(2, 4)
    alone, alone_params, alone_forward = build(make("sinusoidal"))
    tokens, at = jnp.arange(6)[None, :], where.contiguous(1, 6)
    mixed, _ = forward(params, tokens, at, model.init_memory(1))
    expected, _ = alone_forward(alone_params, tokens, at, alone.init_memory(1))
    np.testing.assert_array_equal(mixed, expected)


def test_says_what_happens_past_training():
    config = ModelConfig(**SIZES, position=pattern_of("alibi", "none"))
    for name in ("alibi", "none"):
        assert make(name).past_training() in config.past_training()


@pytest.mark.parametrize(
    "spec",
    [{}, {"pattern": []}, {"pattern": [{"name": "rope"}], "name": "rope"}],
)
def test_refuses_what_is_no_pattern(spec):
    with pytest.raises(ValueError, match="pattern"):
        make_layers(spec)
    with pytest.raises(ValueError, match="empty"):
        ModelConfig(**SIZES, position=())
    with pytest.raises(ValueError, match="rope"):
        make_layers({"pattern": [{"name": "ropee"}]})
