"""Two levels of attention: summaries, causality, memory, caches, configs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relpos_jax import config as configs
from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.attention.hierarchy import Earlier, Within, segments_of, summarise
from relpos_jax.interop.runs import model_config
from relpos_jax.models import ModelConfig, TransformerXL
from relpos_jax.models.config import Hierarchy
from relpos_jax.positional import PositionEncoding, make
from relpos_jax.where import Where
from tests.conformance import cut

LENGTH, SEGMENT = 14, 4
SIZES = dict(vocabulary=11, layers=2, width=24, heads=2, head_dim=8, feedforward=16)


@pytest.fixture(
    scope="module",
    params=["alibi", pytest.param("rope", marks=pytest.mark.slow)],
)
def made(request):
    """A model with ALiBi or RoPE across segments, and the other one within."""
    other = {"alibi": "rope", "rope": "alibi"}[request.param]
    config = ModelConfig(
        **SIZES,
        position=make(other),
        hierarchy=Hierarchy(SEGMENT, make(request.param)),
    )
    model = TransformerXL(config, key=jax.random.key(0))
    graphdef, params = nnx.split(model, nnx.Param)

    @jax.jit
    def forward(params, tokens, at, memory):
        return nnx.merge(graphdef, params)(tokens, at, memory, spacing="any")

    tokens = jax.random.randint(jax.random.key(1), (2, LENGTH), 0, 11)
    at = where.contiguous(2, LENGTH, start=jnp.array([0, 3]))
    full = forward(params, tokens, at, model.init_memory(2, 0))[0]
    return model, forward, params, tokens, at, full


def test_summaries_are_means_of_what_is_there():
    at = where.packed((7, 5), 14)
    # In no order, as in a ring.
    order = jax.random.permutation(jax.random.key(0), 14)
    at = Where(*(x[:, order] for x in at))
    k, v = jax.random.normal(jax.random.key(1), (2, 1, 14, 2, 3))
    found_k, found_v, place = summarise(k, v, at, 3)
    groups = {}
    for i in range(14):
        document = int(at.segment[0, i])
        if document:
            groups.setdefault((document, int(at.position[0, i]) // 3), []).append(i)
    real = np.flatnonzero(place.segment[0])
    assert real.tolist() == list(range(len(groups))) and len(groups) == 5
    for slot in real:
        key = int(place.segment[0, slot]), int(place.position[0, slot])
        members = np.array(groups.pop(key))
        np.testing.assert_allclose(found_k[0, slot], k[0, members].mean(0), atol=1e-6)
        np.testing.assert_allclose(found_v[0, slot], v[0, members].mean(0), atol=1e-6)
    assert not groups


def test_a_summary_of_one_token_each_is_attention_to_all_earlier_tokens():
    at = where.packed((7, 5), 14)
    q, k, v = jax.random.normal(jax.random.key(1), (3, 1, 14, 2, 4))
    k_sum, v_sum, k_at = summarise(k, v, at, 1)
    run = dict(mask=Earlier(), implementation="dense")
    found = attend(make("alibi"), {}, q, k_sum, v_sum, segments_of(at, 1), k_at, **run)
    wanted = attend(make("alibi"), {}, q, k, v, at, at, **run)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    found = attend(
        make("alibi"),
        {},
        q,
        k_sum,
        v_sum,
        segments_of(at, 1),
        k_at,
        mask=Earlier(),
        implementation="blockwise",
        blocks=(4, 4),
    )
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_within_is_its_own_segment():
    at = where.contiguous(1, 10)
    found = np.asarray(Within(4)(at, at))[0]
    i, j = np.indices((10, 10))
    assert (found == ((i // 4 == j // 4) & (i >= j))).all()


def test_no_token_sees_a_later_one(made):
    model, _, params, tokens, at, _ = made
    graphdef = nnx.split(model)[0]

    @jax.jit
    def gradient(t):
        def loss(x):
            out = nnx.merge(graphdef, params).run(x, at, model.init_memory(2, 0))[0]
            # A plain sum of what a norm returns never changes.
            return jnp.sum(jnp.sin(out[:, t]))

        return jax.grad(loss)(jax.random.normal(jax.random.key(2), (2, LENGTH, 24)))

    for t in (5, 8):
        found = np.abs(np.asarray(gradient(t))).sum(-1)
        assert (found[:, t + 1 :] == 0).all()
        assert (found[:, : t + 1] > 0).all()  # and every earlier one, by its summary


def test_token_by_token_from_a_cache_is_the_full_forward(made):
    model, forward, params, tokens, at, full = made
    cache, found = model.init_cache(2, LENGTH), []
    assert len(cache.keys) == 2 * SIZES["layers"]
    for t in range(LENGTH):
        here, cache = forward(params, tokens[:, t : t + 1], cut(at, t, t + 1), cache)
        found.append(here)
    np.testing.assert_allclose(jnp.concatenate(found, 1), full, atol=2e-5)


def test_segment_by_segment_with_memory_is_the_full_forward(made):
    model, forward, params, tokens, at, full = made
    memory, found = model.init_memory(2, LENGTH), []
    for t in range(0, LENGTH, 7):
        here, memory = forward(params, tokens[:, t : t + 7], cut(at, t, t + 7), memory)
        found.append(here)
    np.testing.assert_allclose(jnp.concatenate(found, 1), full, atol=2e-5)


def test_packed_documents_are_each_alone(made):
    model, forward, params, tokens, _, _ = made
    at = where.packed((9, 5), LENGTH)
    at = Where(*(jnp.broadcast_to(x, (2, LENGTH)) for x in at))
    empty = model.init_memory(2, 0)
    packed = forward(params, tokens, at, empty)[0]
    alone = at._replace(segment=jnp.where(at.segment == 2, 2, 0))
    found = forward(params, tokens, alone, empty)[0]
    np.testing.assert_allclose(found[:, 9:], packed[:, 9:], atol=2e-5)
    assert np.isfinite(packed).all()


def test_what_makes_no_sense_is_refused():
    hierarchy = Hierarchy(4, make("alibi"))
    config = ModelConfig(**SIZES, position=make("rope"), hierarchy=hierarchy)
    assert config.attentions == 4 and config.reach is None
    for changes, message in [
        (dict(window=3), "set one of them"),
        (dict(hierarchy=Hierarchy(0, make("rope"))), "at least 1 position"),
    ]:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(config, **changes)
    for name, message in [("forgetting", "adds up"), ("sinusoidal", "embeddings")]:
        wrong = dataclasses.replace(config, hierarchy=Hierarchy(4, make(name)))
        with pytest.raises(ValueError, match=message):
            TransformerXL(wrong, key=jax.random.key(0))


def test_it_comes_from_configs_and_returns_from_files():
    section = configs.section(
        ModelConfig,
        **{name: size for name, size in SIZES.items() if name != "vocabulary"},
        position=configs.position("rope"),
        hierarchy=configs.hierarchy(8, configs.position("alibi")),
    )
    built = configs.build({"model": section}).model
    assert built.hierarchy == Hierarchy(8, make("alibi"))
    assert model_config(configs.resolved(built)) == built
    assert isinstance(built.hierarchy.position, PositionEncoding)
