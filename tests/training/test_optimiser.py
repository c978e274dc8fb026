"""The optimiser: its schedule, what decays, and where clipping happens."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from relpos_jax import positional
from relpos_jax.models.config import ModelConfig
from relpos_jax.models.decoder import TransformerXL
from relpos_jax.training import optimiser
from relpos_jax.training.config import TrainingConfig

CONFIG = TrainingConfig(
    steps=10, warmup=4, learning_rate=1.0, final_learning_rate_fraction=0.1
)


def test_schedule_rises_then_follows_half_a_cosine():
    rates = [float(optimiser.schedule(CONFIG)(step)) for step in range(10)]
    np.testing.assert_allclose(rates[:4], [0.25, 0.5, 0.75, 1.0])
    for step in range(4, 10):
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 3) / 6))
        assert rates[step] == pytest.approx(0.1 + 0.9 * cosine, rel=1e-6)
    assert rates[-1] == pytest.approx(0.1)


def test_schedule_without_warmup_or_decay():
    constant = dataclasses.replace(CONFIG, warmup=0, final_learning_rate_fraction=1.0)
    rates = [float(optimiser.schedule(constant)(step)) for step in range(10)]
    np.testing.assert_allclose(rates, 1.0)


def test_only_matrices_of_the_network_decay():
    kept = set()
    for name in ("transformer_xl", "shaw", "t5", "learned"):
        config = ModelConfig(
            vocabulary=8,
            layers=1,
            width=8,
            heads=2,
            head_dim=4,
            feedforward=8,
            position=positional.make(name),
            output_bias=True,
            tie_embeddings=False,
        )
        params = nnx.state(TransformerXL(config, key=jax.random.key(0)))
        mask = optimiser.decay_mask(nnx.as_pure(params))
        for path, decays in jax.tree_util.tree_leaves_with_path(mask):
            if decays:
                kept.add(optimiser.path_name(path))
    attention = [f"attention/{part}/kernel" for part in ("query", "key", "value")]
    inside = [*attention, "attention/output/kernel"]
    inside += ["feedforward/inner/kernel", "feedforward/outer/kernel"]
    assert kept == {f"layers/0/{path}" for path in inside} | {"output"}


def test_gradients_are_clipped_by_their_global_norm_before_adam():
    # Adam hides a constant factor, so the moments show what it was given.
    params = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
    config = dataclasses.replace(CONFIG, clip=1.0, b1=0.0)
    build = optimiser.build(config)
    _, state = build.update(grads, build.init(params), params)
    moment = optax.tree.get(state, "mu")
    np.testing.assert_allclose(moment["a"], [0.6, 0.0], rtol=1e-6)
    np.testing.assert_allclose(moment["b"], [0.8], rtol=1e-6)
    build = optimiser.build(dataclasses.replace(config, clip=None))
    _, state = build.update(grads, build.init(params), params)
    np.testing.assert_allclose(optax.tree.get(state, "mu")["b"], [4.0])


def test_update_is_adamw():
    config = dataclasses.replace(CONFIG, clip=None, weight_decay=0.5, warmup=0)
    build = optimiser.build(config)
    params = {"kernel": jnp.full((1, 1), 2.0), "bias": jnp.full((1, 1), 2.0)}
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = build.update(grads, build.init(params), params)
    np.testing.assert_allclose(updates["bias"], [[-1]], rtol=1e-5)
    np.testing.assert_allclose(updates["kernel"], [[-(1 + 0.5 * 2)]], rtol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "lamb", "adafactor", "muon"])
def test_all_optimisers_decay_the_same_parameters(name):
    key = jax.random.key(0)
    params = {
        "layers": {"query": {"kernel": jax.random.normal(key, (8, 2, 4))}},
        "embedding": jax.random.normal(key, (16, 8)),
        "norm": {"scale": jnp.ones(8)},
    }
    grads = jax.tree.map(lambda x: jax.random.normal(key, x.shape), params)
    found = []
    for decay in (0.0, 0.5):
        config = dataclasses.replace(CONFIG, optimiser=name, weight_decay=decay)
        build = optimiser.build(config)
        found.append(build.update(grads, build.init(params), params)[0])
    plain, decayed = found
    for path in ("embedding", "norm"):
        jax.tree.map(np.testing.assert_array_equal, plain[path], decayed[path])
    kernel = [tree["layers"]["query"]["kernel"] for tree in found]
    assert np.all(np.isfinite(kernel[1])) and not np.allclose(*kernel)
    if name != "lamb":  # whose step's length depends on the decay
        gap = -0.5 * params["layers"]["query"]["kernel"]
        np.testing.assert_allclose(kernel[1] - kernel[0], gap, rtol=1e-4, atol=1e-5)


def test_muon_takes_all_heads_as_one_matrix():
    kernel = jax.random.normal(jax.random.key(0), (8, 2, 4))
    params = {"query": {"kernel": kernel}, "output": {"kernel": kernel.T}}
    config = dataclasses.replace(CONFIG, optimiser="muon", weight_decay=0.0, clip=None)
    build = optimiser.build(config)
    updates, _ = build.update(params, build.init(params), params)
    for name, matrix in (
        ("query", updates["query"]["kernel"].reshape(8, 8)),
        ("output", updates["output"]["kernel"].reshape(8, 8)),
    ):
        values = np.linalg.svd(matrix, compute_uv=False) / (0.2 * np.sqrt(8))
        assert np.all((0.5 < values) & (values < 1.3)), (name, values)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optimiser", "sgd"),
        ("accumulate", 3),
        ("gradient_depth", -1),
        ("ema", 1.0),
        ("nonfinite", "ignore"),
        ("loss", "last"),
        ("eval_every", 0),
        ("profile", "10"),
        ("profile", "12:10"),
    ],
)
def test_a_wrong_value_names_its_field(field, value):
    with pytest.raises(ValueError, match=rf"training\.{field} must be"):
        TrainingConfig(**{field: value})
    with pytest.raises(ValueError, match=r"weight_decay must be 0 for .*'adam'"):
        TrainingConfig(optimiser="adam")
