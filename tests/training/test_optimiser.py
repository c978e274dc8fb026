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
    rate = float(optimiser.schedule(config)(0))
    np.testing.assert_allclose(updates["bias"], [[-rate]], rtol=1e-5)
    np.testing.assert_allclose(updates["kernel"], [[-rate * (1 + 0.5 * 2)]], rtol=1e-5)
