"""Every encoding over compressed slots, segment memory and tokens, by a plain oracle.

The oracle is dense attention with a table row for every pair, to the concatenated keys,
told nothing of where they stand but their positions and documents.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relpos_jax import where
from relpos_jax.memory import CompressiveConfig
from relpos_jax.models import ModelConfig
from relpos_jax.models.config import ABSOLUTE_WITH_MEMORY
from relpos_jax.relative import Layout
from relpos_jax.where import Where
from tests import conformance as suite
from tests.conformance import NAMES, cut, encoding_of, model_of, tokens_of

# One of each way to look at keys: by turning them, by bias, by vectors, by values, by
# keys' vectors, by position, by counting, by what is between. The others are slow.
FEW = (
    "rope",
    "alibi",
    "transformer_xl",
    "shaw",
    "deberta",
    "fire",
    "cope",
    "forgetting",
)

# Pairs that make no sense, and why; everything else is compared below.
REFUSED = {
    name: "its layers' inputs carry positions, and a slot would carry several"
    for name in NAMES
    if encoding_of(name).absolute
}
# Defined, but counted in keys instead of tokens: a slot is one key, however many tokens
# it stands for.
BY_KEY = ("cope", "forgetting", "data_dependent_alibi")

SLOTS, MEMORY, TOKENS = 3, 5, 7


def marked(few=FEW):
    return [
        name if name in few else pytest.param(name, marks=pytest.mark.slow)
        for name in NAMES
        if name not in REFUSED
    ]


def places():
    """Row 0: full memories; row 1: two documents, the first in a slot, and padding."""
    slots = [[2, 5, 8], [3, 0, 1]]
    of_slots = [[1, 1, 1], [1, 0, 2]]
    rest = [list(range(9, 21)), [0, 0, *range(2, 12)]]
    of_rest = [[1] * 12, [0, 0, *[2] * 9, 0]]
    return Where(
        jnp.array([a + b for a, b in zip(slots, rest, strict=True)]),
        jnp.array([a + b for a, b in zip(of_slots, of_rest, strict=True)]),
    )


@pytest.mark.parametrize("path", ["dense", "blockwise", "rising"])
@pytest.mark.parametrize("name", marked())
def test_attention_over_slots_gives_the_oracle_s_values_and_gradients(name, path):
    if path != "dense" and name != "shaw":
        pytest.skip("the same code for every encoding: tests/test_conformance.py")
    encoding, k_at = encoding_of(name), places()
    inputs = suite.inputs_of(encoding, TOKENS, SLOTS + MEMORY + TOKENS)
    q_at = cut(k_at, SLOTS + MEMORY, SLOTS + MEMORY + TOKENS)
    implementation = "dense" if path == "rising" else path
    options = {"implementation": implementation}
    options["layout"] = Layout(SLOTS + MEMORY, unit=path != "rising", free=SLOTS)
    wanted = suite.output_and_gradients(
        encoding, inputs, q_at, k_at, (("implementation", "pairs"),)
    )
    found = suite.output_and_gradients(
        encoding, inputs, q_at, k_at, tuple(options.items())
    )
    assert np.all(np.isfinite(wanted[0])) and np.all(np.asarray(wanted[0][1, -1]) == 0)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=3e-5, rtol=3e-5),
        found,
        wanted,
    )


@functools.cache
def compressive_model(name, attention):
    compressive = CompressiveConfig(SLOTS, 2)
    changes = dict(memory_length=4, compressive=compressive, attention=attention)
    return model_of(name, **changes)


@pytest.mark.parametrize("name", marked(("transformer_xl",)))
def test_a_model_s_segments_give_the_oracle_s_values_and_gradients(name):
    tokens, at = tokens_of(2, 16), where.contiguous(2, 16)

    def run(attention, spacing):
        _, forward, params, model = compressive_model(name, attention)

        def loss(params):
            memory, rows = model.init_memory(2), []
            for begin in range(0, 16, 4):
                here = tokens[:, begin : begin + 4]
                place = cut(at, begin, begin + 4)
                logits, memory = forward(params, here, place, memory, spacing=spacing)
                rows.append(logits)
            rows = jnp.concatenate(rows, axis=1)
            waves = jnp.cos(jnp.arange(rows.size, dtype=jnp.float32))
            return jnp.sum(rows * waves.reshape(rows.shape)), rows

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    found, wanted = run("dense", "unit"), run("pairs", "any")
    np.testing.assert_allclose(found[0][1], wanted[0][1], atol=1e-4, rtol=1e-4)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=5e-4, rtol=5e-4),
        nnx.as_pure(found[1]),
        nnx.as_pure(wanted[1]),
    )


@pytest.mark.parametrize("name", marked(()))
def test_token_by_token_is_segment_by_segment(name):
    if encoding_of(name).length_dependent:
        pytest.skip("layers above the first remember states of shorter lengths")
    _, forward, params, model = compressive_model(name, "dense")
    tokens, at = tokens_of(2, 16), where.contiguous(2, 16)

    def read(memory, step, spacing):
        rows = []
        for begin in range(0, 16, step):
            part = tokens[:, begin : begin + step]
            place = cut(at, begin, begin + step)
            logits, memory = forward(params, part, place, memory, spacing=spacing)
            rows.append(logits)
        return np.asarray(jnp.concatenate(rows, axis=1))

    wanted = read(model.init_memory(2), 4, "unit")
    found = read(model.init_memory(2, every=4), 1, "unit")
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_pairs_that_make_no_sense_are_refused(name):
    sizes = dict(vocabulary=5, layers=1, width=8, heads=1, head_dim=8, feedforward=8)
    with pytest.raises(ValueError) as error:
        slots = CompressiveConfig(3)
        ModelConfig(position=encoding_of(name), compressive=slots, **sizes)
    assert str(error.value) == ABSOLUTE_WITH_MEMORY


def test_encodings_that_count_keys_are_known():
    assert set(BY_KEY) <= set(NAMES)
    assert {n for n in suite.ENCODINGS if encoding_of(n).ordinal} <= {*BY_KEY, "none"}
