"""The search for LongRoPE's factors: constraints, a known optimum, a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.evaluation.longrope_search import (
    initial_factors,
    model_objective,
    search,
)
from relpos_jax.models import ModelConfig, TransformerXL
from relpos_jax.positional import make

TARGET = (1.0, 1.3, 2.2, 4.1)


def distance_to_target(factors, start_tokens):
    gap = np.abs(np.log(np.asarray(factors) / TARGET)).sum()
    return float(gap + 0.1 * abs(start_tokens - 8) / 8)


def test_initial_candidates_are_the_known_scalings():
    linear, yarn, ntk = initial_factors(4, 4.0, 2048)
    assert linear == (4.0,) * 4
    np.testing.assert_allclose(ntk, 4.0 ** (np.arange(4) / 3))
    assert yarn[0] == pytest.approx(1.0) and yarn[-1] == pytest.approx(4.0)


def test_a_known_optimum_is_found_and_repeats():
    asked = []

    def objective(factors, start_tokens):
        asked.append(factors)
        return distance_to_target(factors, start_tokens)

    initial = initial_factors(4, 4.0, 2048)
    found = search(objective, factor=4.0, initial=initial, generations=60, seed=3)
    assert found.loss < 0.1 < min(distance_to_target(x, 0) for x in initial)
    assert found.start_tokens == 8
    np.testing.assert_allclose(found.factors, TARGET, rtol=0.06)
    assert list(found.history) == sorted(found.history, reverse=True)
    # Never the same twice, all within the published space.
    assert found.evaluations == len(asked)
    hundredths = np.asarray(asked) * 100
    np.testing.assert_allclose(hundredths, np.round(hundredths), atol=1e-6)
    assert np.min(asked) >= 1 and np.max(asked) <= 5 and np.all(np.diff(asked) >= 0)
    again = search(
        distance_to_target, factor=4.0, initial=initial, generations=60, seed=3
    )
    assert again == found
    scaling = found.scaling(4.0, 2048)
    assert scaling.long_factor == found.factors and scaling.start_tokens == 8


def test_candidates_out_of_the_space_are_refused():
    for row in ((2.0, 1.0), (1.0, 9.0), (0.5, 1.0)):
        with pytest.raises(ValueError, match="must rise within 1"):
            search(distance_to_target, factor=4.0, initial=[row])
    with pytest.raises(ValueError, match="at least one candidate"):
        search(distance_to_target, factor=4.0, initial=[])


def tiny(position):
    config = ModelConfig(
        vocabulary=7,
        layers=1,
        width=8,
        heads=1,
        head_dim=8,
        feedforward=8,
        position=position,
    )
    return TransformerXL(config, key=jax.random.key(0))


@pytest.mark.slow
def test_a_model_is_searched_with_one_compiled_program():
    model = tiny(make("rope"))
    tokens = jax.random.randint(jax.random.key(1), (2, 24), 0, 7)
    at = where.contiguous(2, 24)
    objective = model_objective(model, tokens, at)
    initial = initial_factors(4, 2.0, 12)
    found = search(
        objective,
        factor=2.0,
        initial=initial,
        start_tokens=(0, 4),
        population=6,
        mutations=2,
        crossovers=2,
        generations=2,
    )
    assert found.loss <= min(objective(row, 0) for row in initial)
    # The found numbers mean the same in the encoding that a checkpoint would carry.
    scaling = {
        "kind": "longrope",
        "factor": 2.0,
        "original_length": 12,
        "long_factor": found.factors,
        "start_tokens": found.start_tokens,
        "attention_factor": 1.0,
    }
    scaled = tiny(make("rope", scaling=scaling))
    logits, _ = scaled(tokens, at, scaled.init_memory(2, 0))
    scores = jax.nn.log_softmax(logits[:, :-1])
    chosen = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)
    assert float(-jnp.mean(chosen)) == pytest.approx(found.loss, abs=1e-5)


def test_other_encodings_are_refused():
    with pytest.raises(ValueError, match="unscaled Rope"):
        tokens = jnp.zeros((1, 4), jnp.int32)
        model_objective(tiny(make("alibi")), tokens, where.contiguous(1, 4))
