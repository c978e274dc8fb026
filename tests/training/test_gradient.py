"""Gradients in micro-batches and through segments equal those of one graph."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relpos_jax import positional
from relpos_jax.data import Lanes
from relpos_jax.memory import SegmentMemory
from relpos_jax.models.config import ModelConfig
from relpos_jax.models.decoder import TransformerXL
from relpos_jax.training.config import TrainingConfig
from relpos_jax.training.gradient import Rows, make_gradient
from relpos_jax.training.losses import Sums
from relpos_jax.training.objectives import Auxiliary, NextToken
from relpos_jax.training.state import initial, key_for
from relpos_jax.training.step import make_train_call

TRAINING = TrainingConfig(batch=4, length=6, steps=8, weight_decay=0.0)
MODEL = ModelConfig(
    vocabulary=16,
    layers=2,
    width=8,
    heads=2,
    head_dim=4,
    feedforward=16,
    position=positional.make("transformer_xl"),
    memory_length=6,
)
TOKENS = np.random.default_rng(0).integers(0, 16, 300).astype(np.uint8)
LANES = Lanes(TOKENS, 4, 6)
KEY = key_for(0, "dropout")


def batch(step):
    return jax.tree.map(jnp.asarray, LANES.batch(step))


def parts(config):
    model = TransformerXL(config, key=jax.random.key(1))
    graphdef, params = nnx.split(model)
    return graphdef, nnx.as_pure(params), model.init_memory(4)


def ragged():
    """A batch whose rows have 6, 1, 0 and 3 targets, and a memory with states."""
    found = batch(1)
    counted = jnp.arange(6)[None] < jnp.array([6, 1, 0, 3])[:, None]
    memory = SegmentMemory(
        jax.random.normal(jax.random.key(2), (2, 4, 6, 8)), batch(0).at
    )
    return Rows(found._replace(weight=counted.astype(jnp.float32)), memory, None)


@dataclasses.dataclass(frozen=True)
class WithEven:
    """The next token, and an auxiliary loss with a count of its own."""

    def __call__(self, model, batch, memory, **more):
        found = NextToken()(model, batch, memory, **more)
        even = (batch.inputs % 2 == 0).astype(jnp.float32)[..., None]
        states = model.embedding[...][batch.inputs] ** 2
        sums = Sums(jnp.sum(states * even), jnp.sum(even))
        return found._replace(auxiliary={"even": Auxiliary(sums, 0.5)})


def compute(training, rows, config=MODEL, key=None, objective=WithEven(), step=5):
    graphdef, params, _ = parts(config)
    gradient = jax.jit(make_gradient(graphdef, training, objective))
    return gradient(params, rows, key, jnp.int32(step))


def close(found, wanted, **tolerance):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, **tolerance), found, wanted
    )


@pytest.fixture(scope="module")
def whole():
    return compute(TRAINING, ragged())


def test_micro_batches_weigh_targets_alike(whole):
    pieces = dataclasses.replace(TRAINING, accumulate=4)
    grads, found = compute(pieces, ragged())
    assert found.sums.count == 10  # and one of the four has no target at all
    close(grads, whole[0], rtol=1e-4, atol=1e-6)
    close(found.sums, whole[1].sums, rtol=1e-6)
    close(found.auxiliary["even"].sums, whole[1].auxiliary["even"].sums, rtol=1e-6)
    close(found.memory, whole[1].memory, rtol=1e-5, atol=1e-6)


def test_recomputed_layers_give_the_same_numbers(whole):
    grads, found = compute(TRAINING, ragged(), dataclasses.replace(MODEL, remat=True))
    close(grads, whole[0], rtol=1e-4, atol=1e-6)
    close(found.sums, whole[1].sums, rtol=1e-6)


def test_in_half_precision_what_is_kept_and_summed_is_float32(whole):
    half = dataclasses.replace(MODEL, dtype="bfloat16")
    grads, found = compute(TRAINING, ragged(), half)
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert found.sums.loss.dtype == jnp.float32
    np.testing.assert_allclose(found.sums.loss, whole[1].sums.loss, rtol=2e-2)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(whole[0])):
        gap = np.linalg.norm(one - other)
        assert gap <= 0.1 * np.linalg.norm(other) + 1e-3


def unrolled(graphdef, params, memory, batches, step):
    """The last batch's mean loss after the others, as one graph, by hand."""
    memory, model = memory.differentiable(), nnx.merge(graphdef, params)
    for ago, item in reversed(list(enumerate(reversed(batches)))):
        losses, memory = model.losses(
            item.inputs,
            item.targets,
            item.at,
            memory,
            key=jax.random.fold_in(KEY, step - ago),
        )
    return jnp.sum(losses * item.weight) / jnp.sum(item.weight)


def test_gradients_through_segments_are_those_of_one_graph():
    config = dataclasses.replace(MODEL, dropout=0.2)
    graphdef, params, empty = parts(config)
    batches = [batch(step) for step in range(3)]
    recent = jax.tree.map(lambda *x: jnp.stack(x), *batches[:2])
    deep = dataclasses.replace(TRAINING, gradient_depth=2)
    rows = Rows(batches[2], empty, recent)
    grads, found = compute(deep, rows, config, KEY, NextToken())

    oracle = jax.jit(
        jax.value_and_grad(lambda params: unrolled(graphdef, params, empty, batches, 5))
    )
    loss, wanted = oracle(params)
    np.testing.assert_allclose(found.sums.loss / found.sums.count, loss, rtol=1e-5)
    close(grads, wanted, rtol=1e-4, atol=1e-6)
    # The memory that goes on is that of the first segment, with nothing attached.
    np.testing.assert_array_equal(found.memory.at.position, batches[0].at.position)
    assert type(found.memory) is SegmentMemory


def test_gradients_do_go_through_segments():
    graphdef, params, empty = parts(MODEL)
    batches = [batch(step) for step in range(2)]

    def loss(hidden, memory):
        memory = memory._replace(hidden=hidden, at=batches[0].at)
        item = batches[1]
        model = nnx.merge(graphdef, params)
        return jnp.sum(model.losses(item.inputs, item.targets, item.at, memory)[0])

    hidden = jax.random.normal(jax.random.key(0), empty.hidden.shape)
    gradient = jax.jit(jax.grad(loss))
    assert np.any(gradient(hidden, empty.differentiable()))
    assert not np.any(gradient(hidden, empty))


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_depth_changes_gradients_and_not_what_a_step_sees(accumulate):
    # At a rate of almost 0 the parameters stay, so each step must see the very memory
    # that it sees without depth, also while there are fewer segments than the depth.
    config = dataclasses.replace(MODEL, dropout=0.1 if accumulate == 1 else 0.0)
    graphdef, _, empty = parts(config)
    reports = []
    for depth in (0, 2):
        training = dataclasses.replace(
            TRAINING,
            gradient_depth=depth,
            learning_rate=1e-30,
            accumulate=accumulate,
        )
        state = initial(parts(config)[1], training, empty)
        call = make_train_call(graphdef, training)
        key = KEY if config.dropout else None
        state, report = call(state, LANES.stack(0, 6), 6, key)
        reports.append(jax.device_get(report))
    np.testing.assert_allclose(reports[1].loss, reports[0].loss, rtol=1e-5)
    norms = [report.grad_norm for report in reports]
    np.testing.assert_allclose(norms[1][0], norms[0][0], rtol=1e-4)
    assert np.all(np.abs(norms[1][2:] / norms[0][2:] - 1) > 1e-3)
    np.testing.assert_array_equal(state.memory.at.position, LANES.batch(3).at.position)
