"""Encoding surgery: what is shared stays, bit for bit; the rest is new or named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relpos_jax import where
from relpos_jax.config import DataConfig, RunConfig
from relpos_jax.data import Corpus
from relpos_jax.evaluation import surgery
from relpos_jax.models import ModelConfig, TransformerXL
from relpos_jax.positional import make
from relpos_jax.positional.tabulated import Tabulated
from relpos_jax.training.config import TrainingConfig


def build(position, **changes):
    config = ModelConfig(
        vocabulary=13,
        layers=2,
        width=16,
        heads=2,
        head_dim=8,
        feedforward=24,
        position=position,
        **changes,
    )
    model = TransformerXL(config, key=jax.random.key(0))
    return config, nnx.split(model)[1]


def logits(graphdef, params, length=9):
    model = nnx.merge(graphdef, params)
    tokens = jnp.arange(length)[None] % 13
    at = where.contiguous(1, length)
    return np.asarray(model(tokens, at, model.init_memory(1, 0))[0])


def test_another_encoding_keeps_what_is_shared_and_names_the_rest():
    config, params = build(make("transformer_xl"))
    swapped = surgery.transplant(config, params, make("t5"), jax.random.key(1))
    old, new = surgery.by_name(params), surgery.by_name(swapped.params)
    assert swapped.config.position == make("t5")
    assert set(swapped.kept) == {name for name in old if "position" not in name}
    for name in swapped.kept:
        assert new[name] is old[name]
    assert set(swapped.dropped) == {name for name in old if "position" in name}
    assert set(swapped.new) == set(new) - set(swapped.kept)
    assert all("position" in name for name in swapped.new)
    # First values depend on the key and the name, not on the model around.
    again = surgery.transplant(config, params, make("t5"), jax.random.key(1))
    fresh = TransformerXL(swapped.config, key=jax.random.key(1))
    fresh = surgery.by_name(nnx.split(fresh)[1])
    for name in swapped.new:
        np.testing.assert_array_equal(new[name], fresh[name])
        np.testing.assert_array_equal(new[name], surgery.by_name(again.params)[name])
    assert np.isfinite(logits(swapped.graphdef, swapped.params)).all()


def test_scaling_rope_changes_the_configuration_alone():
    config, params = build(make("rope"))
    swapped = surgery.transplant(config, params, make("rope_ntk"), jax.random.key(1))
    assert not swapped.new and not swapped.dropped
    before = logits(surgery.skeleton(config)[0], params)
    assert np.abs(logits(swapped.graphdef, swapped.params) - before).max() > 1e-4
    back = surgery.transplant(
        swapped.config, swapped.params, make("rope"), jax.random.key(2)
    )
    np.testing.assert_array_equal(logits(back.graphdef, back.params), before)


def test_the_same_encoding_keeps_its_parameters_where_they_fit():
    config, params = build(make("transformer_xl"))
    clamped = make("transformer_xl", clamp=4)
    swapped = surgery.transplant(config, params, clamped, jax.random.key(1))
    assert not swapped.new and not swapped.dropped
    config, params = build(make("shaw", clip=3))
    swapped = surgery.transplant(config, params, make("shaw"), jax.random.key(1))
    assert {name.rpartition("/")[2] for name in swapped.new} == {"key", "value"}
    assert swapped.new == swapped.dropped
    # Two encodings may call different things by the same name.
    config, params = build(make("kerple_log"))
    power = make("kerple_power")
    swapped = surgery.transplant(config, params, power, jax.random.key(1))
    names = surgery.by_name(params)
    assert set(swapped.dropped) == {name for name in names if "position" in name}


def test_a_pattern_keeps_the_layers_that_stay():
    config, params = build((make("rope"), make("t5")))
    pattern = (make("alibi"), make("t5"))
    swapped = surgery.transplant(config, params, pattern, jax.random.key(1))
    assert [type(e).__name__ for e in swapped.config.positions] == ["Alibi", "T5"]
    assert any("layers/1/" in n and "position" in n for n in swapped.kept) == any(
        "layers/1/" in n and "position" in n for n in surgery.by_name(params)
    )


def test_what_cannot_be_is_refused():
    config, params = build(make("rope"), memory_length=4)
    with pytest.raises(ValueError, match="absolute position embeddings"):
        surgery.transplant(config, params, make("sinusoidal"), jax.random.key(0))
    other, _ = build(make("t5"))
    with pytest.raises(ValueError, match="not those of the configuration, such as"):
        surgery.transplant(other, params, make("rope"), jax.random.key(0))


@pytest.mark.parametrize("name", ["transformer_xl", "shaw", "deberta_v2", "alibi"])
def test_tabulated_is_the_encoding_up_to_its_reach(name):
    config, params = build(make(name))
    wanted = logits(surgery.skeleton(config)[0], params)
    for reach, good in ((9, True), (5, False)):
        told, filled = surgery.tabulate(config, params, reach)
        assert told.position == Tabulated(make(name), reach)
        found = logits(surgery.skeleton(told)[0], filled)
        if good:
            np.testing.assert_allclose(found, wanted, atol=1e-5)
        else:  # farther than it reaches: NaN rather than another distance's row
            assert np.isnan(found[:, reach:]).all()
    saturating, _ = surgery.tabulate(*build(make("shaw", clip=2)), 9)
    assert saturating.position.rows == 3
    plain, same = surgery.tabulate(*build(make("rope")), 9)
    assert plain.position == make("rope")
    with pytest.raises(ValueError, match="reach must be positive"):
        Tabulated(make("alibi"), 0)


def test_tabulated_refuses_fractional_positions():
    told, filled = surgery.tabulate(*build(make("alibi")), 9)
    model = nnx.merge(surgery.skeleton(told)[0], filled)
    at = where.contiguous(1, 4)
    at = at._replace(position=at.position.astype(jnp.float32) / 2)
    with pytest.raises(TypeError, match="positions are float32"):
        model(jnp.zeros((1, 4), jnp.int32), at, model.init_memory(1, 0), spacing="any")


def test_further_steps_train_all_of_it_and_zero_steps_nothing():
    config, params = build(make("rope"))
    swapped = surgery.transplant(config, params, make("t5"), jax.random.key(1))
    training = TrainingConfig(batch=2, length=8, steps=4, warmup=1, steps_per_call=3)
    run = RunConfig(DataConfig(), swapped.config, training)
    text = np.arange(400, dtype=np.uint8) % 13
    corpus = Corpus("counting", text, text, "0 to 12 again and again")
    before = {n: np.asarray(x) for n, x in surgery.by_name(swapped.params).items()}
    trained, losses = surgery.adapt(swapped, run, corpus)
    assert len(losses) == 4 and losses[-1] < losses[0]
    after = surgery.by_name(trained.params)
    assert {n for n in after if np.array_equal(after[n], before[n])} == set()
    for name, value in surgery.by_name(swapped.params).items():
        np.testing.assert_array_equal(value, before[name])
