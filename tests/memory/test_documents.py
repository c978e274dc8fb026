"""Memory and documents: what a document's tokens see starts with the document."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relpos_jax.models import ModelConfig, TransformerXL
from relpos_jax.positional import make
from relpos_jax.where import Where


@functools.cache
def build(position):
    config = ModelConfig(
        vocabulary=13,
        layers=2,
        width=16,
        heads=2,
        head_dim=8,
        feedforward=24,
        position=make(position),
        memory_length=6,
    )
    model = TransformerXL(config, key=jax.random.key(0))
    graphdef, params = nnx.split(model)
    forward = jax.jit(lambda *inputs: nnx.merge(graphdef, params)(*inputs))
    return model, forward


@pytest.mark.parametrize("position", ["transformer_xl", "rope", "t5"])
def test_memory_resets_row_by_row_where_a_document_begins(position):
    model, forward = build(position)
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 13)
    # Row 0 is one document; row 1's second begins with column 5, in mid-segment.
    at = Where(
        jnp.array([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 0, 1, 2]]),
        jnp.array([[1] * 8, [1] * 5 + [2] * 3]),
    )

    def read(tokens, at, memory):
        rows = []
        for begin in (0, 4):
            part = slice(begin, begin + 4)
            here = jax.tree.map(lambda x, part=part: x[:, part], at)
            logits, memory = forward(tokens[:, part], here, memory)
            rows.append(logits)
        return np.asarray(jnp.concatenate(rows, axis=1))

    found = read(tokens, at, model.init_memory(2))
    # Another first document changes what follows it in row 0, not the one in row 1.
    changed = tokens.at[:, :4].set((tokens[:, :4] + 1) % 13)
    other = read(changed, at, model.init_memory(2))
    np.testing.assert_array_equal(other[1, 5:], found[1, 5:])
    assert np.abs(other[0, 5:] - found[0, 5:]).max() > 1e-4
    assert np.abs(other[1, 4] - found[1, 4]).max() > 1e-4

    # Alone, behind a memory of nothing, the second document is the same.
    alone = Where(at.position[:, 4:], at.segment[:, 4:].at[1, 0].set(0))
    fresh = np.asarray(forward(tokens[:, 4:], alone, model.init_memory(2))[0])
    np.testing.assert_allclose(fresh[1, 1:], found[1, 5:], atol=2e-5)
