"""The decoder: a container of parameters, with memory and dropout as data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relpos_jax import where
from relpos_jax.memory import SegmentMemory
from relpos_jax.models import ModelConfig, TransformerXL
from relpos_jax.models.decoder import count_parameters
from relpos_jax.positional import make


def config_of(position="transformer_xl", **changes):
    sizes = dict(vocabulary=13, layers=2, width=16, heads=2, head_dim=8, feedforward=24)
    if isinstance(position, str):
        position = make(position)
    return ModelConfig(**{**sizes, "position": position, **changes})


def build(config, seed=0):
    model = TransformerXL(config, key=jax.random.key(seed))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    assert not jax.tree.leaves(rest), "a model holds parameters and nothing else"

    @jax.jit
    def forward(params, tokens, at, memory, key=None):
        return nnx.merge(graphdef, params, rest)(tokens, at, memory, key=key)

    return model, params, forward


def tokens_of(batch, length, seed=1):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, 13)


def parts(tokens, at, start, stop):
    return tokens[:, start:stop], jax.tree.map(lambda x: x[:, start:stop], at)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_variants_run_and_count_their_parameters(norm, tie_embeddings):
    config = config_of(
        norm=norm, tie_embeddings=tie_embeddings, output_bias=True, activation="relu"
    )
    model, params, forward = build(config)
    tokens, at = tokens_of(2, 6), where.contiguous(2, 6)
    logits, _ = forward(params, tokens, at, model.init_memory(2))
    assert logits.shape == (2, 6, 13) and logits.dtype == jnp.float32
    layer = 4 * 16 * 16 + 2 * 16 * 24 + 24 + 16 + 4 * 16 + 16 * 16
    shared = 13 * 16 * (1 if tie_embeddings else 2) + 13 + 2 * 16
    final = 2 * 16 if norm == "pre" else 0
    wanted = 2 * layer + shared + final
    assert count_parameters(config) == wanted
    assert sum(x.size for x in jax.tree.leaves(params)) == wanted


def test_memory_keeps_the_last_inputs_of_each_layer():
    memory = SegmentMemory.empty(1, 1, 5, 1)
    kept, count = [], 0
    for size in (3, 3, 1, 7):
        at = where.contiguous(1, size, start=count)
        states = (count + jnp.arange(size, dtype=jnp.float32))[None, :, None]
        memory = memory.write([states], at)
        real = np.asarray(memory.at.segment[0] != 0)
        kept.append(np.asarray(memory.hidden[0, 0, :, 0])[real].tolist())
        assert memory.at.position[0][real].tolist() == kept[-1]
        count += size
    wanted = [[0, 1, 2], [1, 2, 3, 4, 5], [2, 3, 4, 5, 6], [9, 10, 11, 12, 13]]
    assert kept == wanted


def test_layer_memory_is_the_layer_s_input():
    model, params, forward = build(config_of())
    tokens, at = tokens_of(1, 4), where.contiguous(1, 4)
    _, memory = forward(params, tokens, at, model.init_memory(1, 4))
    embedded = model.embedding[...][tokens] * 4.0
    np.testing.assert_allclose(memory.hidden[0], embedded, atol=1e-6)


def test_length_zero_is_no_memory_with_the_same_structure():
    model, params, forward = build(config_of())
    tokens, at = tokens_of(2, 6), where.contiguous(2, 6)
    none = model.init_memory(2, 0)
    plain, after = forward(params, tokens, at, none)
    assert after.hidden.shape == none.hidden.shape
    assert jax.tree.structure(after) == jax.tree.structure(model.init_memory(2, 4))
    with_empty, _ = forward(params, tokens, at, model.init_memory(2, 4))
    np.testing.assert_allclose(plain, with_empty, atol=1e-5)


def test_another_batch_size_starts_anew_and_never_broadcasts():
    model, params, forward = build(config_of())
    tokens, at = tokens_of(4, 6), where.contiguous(4, 6)
    _, memory = forward(params, tokens, at, model.init_memory(4, 3))
    before = jax.tree.map(np.asarray, memory)
    for batch in (2, 1, 3):
        forward(
            params,
            *parts(tokens[:batch], jax.tree.map(lambda x: x[:batch], at), 0, 6),
            model.init_memory(batch, 3),
        )
    jax.tree.map(np.testing.assert_array_equal, before, memory)
    with pytest.raises(ValueError, match="memory is for batch 4"):
        forward(params, tokens[:1], jax.tree.map(lambda x: x[:1], at), memory)


@pytest.mark.parametrize("prefill", [1, 3, 7])
def test_prefill_and_steps_are_the_full_forward(prefill):
    for position in ("transformer_xl", "rope", "sinusoidal"):
        model, params, forward = build(config_of(position))
        tokens, at = tokens_of(2, 8), where.contiguous(2, 8)
        wanted, _ = forward(params, tokens, at, model.init_memory(2, 0))
        cache = model.init_cache(2, 8)
        assert int(cache.cursor) == 0 and not np.any(cache.at.segment)
        logits, start = [], 0
        for stop in (prefill, *range(prefill + 1, 9)):
            here, cache = forward(params, *parts(tokens, at, start, stop), cache)
            logits.append(here)
            start = stop
            assert int(cache.cursor) == stop  # once a call, not once a layer
        np.testing.assert_allclose(jnp.concatenate(logits, 1), wanted, atol=1e-4)


def test_dropout_is_a_function_of_its_key():
    model, params, forward = build(config_of(dropout=0.5))
    tokens, at = tokens_of(2, 6), where.contiguous(2, 6)
    memory = model.init_memory(2)
    one, again, other = (
        np.asarray(forward(params, tokens, at, memory, jax.random.key(k))[0])
        for k in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 1e-3
    plain, _ = forward(params, tokens, at, memory)
    same, _ = build(config_of())[2](params, tokens, at, memory)
    np.testing.assert_array_equal(plain, same)


def test_models_with_different_encodings_start_from_the_same_shared_parameters():
    one = nnx.to_flat_state(nnx.state(build(config_of("rope"))[0]))
    other = nnx.to_flat_state(nnx.state(build(config_of("transformer_xl"))[0]))
    one, other = dict(one), dict(other)
    assert set(one) < set(other)
    for name, value in one.items():
        np.testing.assert_array_equal(value[...], other[name][...])
    assert all("position" in name for name in set(other) - set(one))


def test_absolute_embeddings_with_memory_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="section 3.3"):
        config_of("sinusoidal", memory_length=4)
    model, params, forward = build(config_of("learned"))
    with pytest.raises(ValueError, match="absolute position embeddings"):
        model.init_memory(2, 4)
    tokens, at = tokens_of(2, 6), where.contiguous(2, 6)
    smuggled = SegmentMemory.empty(2, 2, 4, 16)
    with pytest.raises(ValueError, match="absolute position embeddings"):
        forward(params, tokens, at, smuggled)


def test_learned_positions_past_the_table():
    tokens, at = tokens_of(1, 6), where.contiguous(1, 6)
    late = where.contiguous(1, 6, start=3)
    refuse = config_of(position=make("learned", rows=5))
    model, params, forward = build(refuse)
    with pytest.raises(ValueError, match="6 tokens are longer than the learned table"):
        forward(params, tokens, at, model.init_memory(1))
    short, here = parts(tokens, late, 0, 4)
    logits, _ = forward(params, short, here, model.init_memory(1))
    assert np.all(np.isnan(logits[0, 2:]))  # positions 5 and 6
    for beyond in ("last", "wrap"):
        model, params, forward = build(
            config_of(position=make("learned", rows=5, beyond=beyond))
        )
        logits, _ = forward(params, tokens, late, model.init_memory(1))
        assert np.all(np.isfinite(logits))


def test_ids_outside_the_vocabulary_are_not_taken_for_others():
    model, params, forward = build(config_of())
    at = where.contiguous(1, 4)
    memory = model.init_memory(1)
    for wrong in (13, -1):
        tokens = jnp.array([[1, 2, wrong, 3]])
        logits = np.asarray(forward(params, tokens, at, memory)[0])
        assert np.all(np.isnan(logits[0, 2:]))
    padded = at._replace(segment=jnp.array([[1, 1, 0, 0]]))
    logits, _ = forward(params, jnp.array([[1, 2, -1, 99]]), padded, memory)
    assert np.all(np.isfinite(logits))
    with pytest.raises(ValueError, match="must be integers"):
        model._check(jnp.ones((1, 4)), memory, "unit")


def test_rings_too_small_for_a_call_are_refused():
    model, params, forward = build(config_of(window=3))
    tokens, at = tokens_of(1, 4), where.contiguous(1, 4)
    forward(params, tokens, at, model.init_cache(1, 6, ring=True))
    with pytest.raises(ValueError, match="a ring of 5 slots cannot take 4 tokens"):
        forward(params, tokens, at, model.init_cache(1, 5, ring=True))
    model, params, forward = build(config_of())
    with pytest.raises(ValueError, match="one token a call"):
        forward(params, tokens, at, model.init_cache(1, 64, ring=True))


def test_configurations_name_what_is_wrong():
    for change, message in [
        (dict(heads=0), "heads must be positive"),
        (dict(norm="middle"), "norm must be one of"),
        (dict(dropout=1.0), "dropout must be in"),
        (dict(memory_length=-1), "memory_length is negative"),
    ]:
        with pytest.raises(ValueError, match=message):
            config_of(**change)
