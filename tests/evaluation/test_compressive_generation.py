"""Generation with compressive memory: each row as if read in segments, alone."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relpos_jax import where
from relpos_jax.evaluation.generation import generate, prepare
from relpos_jax.evaluation.surgery import skeleton
from relpos_jax.memory import CompressiveConfig, CompressiveMemory
from tests.evaluation.test_generation import GREEDY, NEW, PREFILL, model_of


def in_segments(config, params, tokens, size):
    """Returns logits `[t v]` of a text read in segments of `size`, the last padded."""
    model = nnx.merge(skeleton(config)[0], params)
    memory, rows = model.init_memory(1), []
    for begin in range(0, len(tokens), size):
        here = tokens[begin : begin + size]
        padded = jnp.zeros((1, size), jnp.int32).at[0, : len(here)].set(jnp.array(here))
        at = where.from_lengths(jnp.array([len(here)]), size)
        at = at._replace(position=at.position + begin)
        logits, memory = model(padded, at, memory)
        rows.append(np.asarray(logits[0, : len(here)]))
    return np.concatenate(rows)


@pytest.mark.parametrize(
    "name, function",
    [
        pytest.param("transformer_xl", "convolution", marks=pytest.mark.slow),
        pytest.param("rope", "most_used", marks=pytest.mark.slow),
        ("alibi", "mean"),
    ],
)
def test_rows_are_what_reading_in_segments_chooses(name, function):
    compressive = CompressiveConfig(3, 2, function)
    config, params, _ = model_of(name, memory_length=4, compressive=compressive)
    decoder = prepare(config, params, prefill=PREFILL, chunk=4)
    assert decoder.kind == "compressive" and decoder.length == 7
    assert isinstance(decoder.memory(1), CompressiveMemory)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12, 1, 2], [5, 6, 7, 8]]
    rows = generate(decoder, prompts, NEW, GREEDY)
    for prompt, row in zip(prompts, rows, strict=True):
        text = prompt + row.tokens.tolist()
        logits = in_segments(config, params, text, PREFILL)
        chosen = logits[len(prompt) - 1 : -1].argmax(-1)
        assert row.tokens.tolist() == chosen.tolist()


def test_other_kinds_of_memory_may_be_chosen_too():
    compressive = CompressiveConfig(3, 2, "mean")
    changes = dict(memory_length=4, compressive=compressive)
    config, params, _ = model_of("alibi", **changes)
    segment = prepare(config, params, kind="segment", prefill=PREFILL)
    assert segment.length == 4 and segment.memory(1).slots == 0
    plain, params, _ = model_of("alibi", memory_length=4)
    with pytest.raises(ValueError, match="no compressed memory"):
        prepare(plain, params, kind="compressive")
