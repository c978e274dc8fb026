"""Learned absolute embeddings, and what happens past their table."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relpos_jax import where
from relpos_jax.models import ModelConfig, TransformerXL
from relpos_jax.positional import Dims, make

DIMS = Dims(3, 8, 24)


def embedded(at, **knobs):
    """Returns what an encoding with a table of 6 rows adds, and the table."""
    learned = make("learned", rows=6, **knobs)
    params = learned.init_shared(jax.random.key(0), DIMS)
    zeros = jnp.zeros((*at.position.shape, DIMS.width))
    return np.asarray(learned.embed(params, zeros, at)), np.asarray(params["table"])


def test_adds_the_row_of_each_position():
    at = where.packed((2, 3), 6)
    ours, table = embedded(at)
    rows = [0, 1, 0, 1, 2]
    for t, row in enumerate(rows):
        np.testing.assert_array_equal(ours[0, t], table[row])
    np.testing.assert_array_equal(ours[0, 5], 0)  # padding


@pytest.mark.parametrize(
    "beyond, rows", [("last", [4, 5, 5, 5]), ("wrap", [4, 5, 0, 1])]
)
def test_past_the_table_by_choice(beyond, rows):
    ours, table = embedded(where.contiguous(1, 4, start=4), beyond=beyond)
    np.testing.assert_array_equal(ours[0], table[rows])


def test_past_the_table_is_refused():
    with pytest.raises(ValueError, match="7 tokens are longer than the learned table"):
        embedded(where.contiguous(1, 7))
    ours, table = embedded(where.contiguous(1, 4, start=4))
    np.testing.assert_array_equal(ours[0, :2], table[4:])
    assert np.isnan(ours[0, 2:]).all()
    ours, _ = embedded(where.contiguous(1, 2, start=-1))
    assert np.isnan(ours[0, 0]).all() and not np.isnan(ours[0, 1]).any()


def test_positions_must_be_integers():
    at = where.contiguous(1, 3)
    with pytest.raises(ValueError, match="must be integers"):
        embedded(at._replace(position=at.position.astype(jnp.float32)))


def test_parameters():
    learned = make("learned")
    assert learned.init_shared(jax.random.key(0), DIMS)["table"].shape == (512, 24)
    assert not learned.init(jax.random.key(0), DIMS)


def test_errors():
    with pytest.raises(ValueError, match="rows must be positive"):
        make("learned", rows=0)
    with pytest.raises(ValueError, match="beyond must be"):
        make("learned", beyond="guess")


def test_by_layer_each_layer_adds_its_own_table_to_its_input():
    config = ModelConfig(
        vocabulary=7,
        layers=2,
        width=8,
        heads=2,
        head_dim=4,
        feedforward=8,
        position=make("learned", rows=6, by_layer=True),
    )
    model = TransformerXL(config, key=jax.random.key(0))
    tables = [
        np.asarray(layer.attention.position["table"][...]) for layer in model.layers
    ]
    assert not np.allclose(*tables) and not jax.tree.leaves(nnx.state(model.position))
    tokens, at = jnp.array([[1, 2, 3, 4]]), where.contiguous(1, 4, start=1)
    logits, _ = jax.jit(lambda: model(tokens, at, model.init_memory(1)))()

    # By hand: the layers of a model without positions, with a sum in front of each.
    plain = TransformerXL(
        dataclasses.replace(config, position=make("none")), key=jax.random.key(0)
    )

    @jax.jit
    def by_hand():
        x = plain.embedding[...][tokens] * 8**0.5
        memory = plain.init_memory(1)
        for table, layer in zip(tables, plain.layers, strict=True):
            x = x + table[1:5][None]
            x, _ = layer(x, at, memory, 0, {}, memory.layout(True), None)
        return plain.logits(plain.norm(x))

    np.testing.assert_allclose(logits, by_hand(), rtol=1e-4, atol=1e-5)

    @jax.jit
    def step(token, here, cache):
        return model(token, here, cache, spacing="any")

    cache = model.init_cache(1, 6)
    for i in range(4):
        here = jax.tree.map(lambda x, i=i: x[:, i : i + 1], at)
        one, cache = step(tokens[:, i : i + 1], here, cache)
        np.testing.assert_allclose(one[:, 0], logits[:, i], rtol=1e-4, atol=1e-5)
