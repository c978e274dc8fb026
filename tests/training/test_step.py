"""The compiled call: cuts change nothing, gradients and keys are each step's own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from relpos_jax import positional
from relpos_jax.data import Lanes
from relpos_jax.models.config import ModelConfig
from relpos_jax.models.decoder import TransformerXL
from relpos_jax.training import losses, optimiser
from relpos_jax.training.config import TrainingConfig
from relpos_jax.training.objectives import Auxiliary, NextToken
from relpos_jax.training.state import initial, key_for
from relpos_jax.training.step import make_train_call

TRAINING = TrainingConfig(
    steps=8, batch=2, length=6, warmup=2, learning_rate=0.01, clip=0.5, epsilon=1e-3
)
MODEL = ModelConfig(
    vocabulary=16,
    layers=2,
    width=8,
    heads=2,
    head_dim=4,
    feedforward=16,
    position=positional.make("transformer_xl"),
    memory_length=6,
    dropout=0.2,
)
OPTIMIZER = optimiser.build(TRAINING)
SCHEDULE = optimiser.schedule(TRAINING)
TOKENS = np.random.default_rng(0).integers(0, 16, 200).astype(np.uint8)
LANES = Lanes(TOKENS, TRAINING.batch, TRAINING.length)


def start(training=TRAINING):
    model = TransformerXL(MODEL, key=key_for(0, "parameters"))
    graphdef, params = nnx.split(model)
    memory = model.init_memory(TRAINING.batch)
    return graphdef, initial(nnx.as_pure(params), training, memory)


@pytest.fixture(scope="module")
def call():
    compiled = make_train_call(start()[0], TRAINING)
    return functools.partial(compiled, key=key_for(0, "dropout"))


def trained(call, cuts):
    state, reports, step = start()[1], [], 0
    for count in cuts:
        state, report = call(state, LANES.stack(step, 4), count)
        reports.append(jax.tree.map(lambda x, n=count: np.asarray(x)[:n], report))
        step += count
    return state, jax.tree.map(lambda *x: np.concatenate(x), *reports)


def test_cuts_change_no_bit_and_compile_nothing(call):
    whole = trained(call, [4, 4])
    size = call.func._cache_size
    before = size()
    for cuts in ([1, 3, 4], [2, 1, 1, 1, 1, 2], [1] * 8):
        jax.tree.map(np.testing.assert_array_equal, whole, trained(call, cuts))
    assert size() == before
    state, report = whole
    assert int(state.step) == 8
    counts = optax.tree.get_all_with_path(state.opt_state, "count")
    assert [int(count) for _, count in counts] == [8]  # of Adam's moments
    np.testing.assert_array_equal(report.count, 12.0)
    rates = [SCHEDULE(step) for step in range(8)]
    np.testing.assert_allclose(report.learning_rate, rates, rtol=1e-6)


def test_segments_past_the_count_are_zero(call):
    report = call(start()[1], LANES.stack(0, 4), 1)[1]
    assert all(not np.any(leaf[1:]) for leaf in jax.tree.leaves(report))


def test_one_update_a_segment_by_hand(call):
    graphdef, state = start()
    expected = state.params, state.opt_state, state.memory
    norms, sums = [], []
    for step in range(3):
        batch = LANES.batch(step)
        params, opt_state, memory = expected

        def loss(params, batch=batch, memory=memory, step=step):
            key = jax.random.fold_in(key_for(0, "dropout"), step)
            model = nnx.merge(graphdef, params)
            tokens = jnp.asarray(batch.inputs)
            at = jax.tree.map(jnp.asarray, batch.at)
            logits, memory = model(tokens, at, memory, key=key)
            targets, weight = jnp.asarray(batch.targets), jnp.asarray(batch.weight)
            found = losses.next_token(logits, targets, weight)
            return found.loss / found.count, (found.loss, memory)

        grads, (total, memory) = jax.jit(jax.grad(loss, has_aux=True))(params)
        norms.append(optax.tree.norm(grads))
        sums.append(total)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        updates = jax.tree.map(lambda x, n=step: SCHEDULE(n) * x, updates)
        expected = optax.apply_updates(params, updates), opt_state, memory
    state, report = trained(call, [3])
    np.testing.assert_allclose(report.loss, sums, rtol=1e-5)
    np.testing.assert_allclose(report.grad_norm, norms, rtol=1e-4)
    assert report.grad_norm.max() > TRAINING.clip  # logged before clipping
    for found, wanted in zip(
        jax.tree.leaves(state[1:4]), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)


def test_memory_goes_on_from_segment_to_segment(call):
    state, _ = trained(call, [3])
    np.testing.assert_array_equal(state.memory.at.position, LANES.batch(2).at.position)
    assert np.all(np.asarray(state.memory.at.segment) == 1)
    assert np.any(np.asarray(state.memory.hidden))


def test_memory_of_the_epoch_before_is_not_attended(call):
    epoch = LANES.steps_per_epoch
    again = call(start()[1], LANES.stack(epoch, 4), 1)[1]
    state, _ = trained(call, [4])
    used = start()[1]._replace(memory=state.memory)
    used = call(used, LANES.stack(epoch, 4), 1)[1]
    np.testing.assert_allclose(used.loss, again.loss, rtol=1e-6)
    assert np.isfinite(used.grad_norm).all()


def test_dropout_is_another_one_each_step(call):
    batches = jax.tree.map(lambda x: np.stack([x] * 4), LANES.batch(0))
    report = [
        call(start()[1]._replace(step=jnp.int32(step)), batches, 1)[1].loss[0]
        for step in (0, 1, 0)
    ]
    assert report[0] == report[2] != report[1]


def test_runs_that_differ_in_their_seed_share_a_program():
    other = dataclasses.replace(TRAINING, seed=5, checkpoint_every=7, log_every=3)
    first = make_train_call(start()[0], TRAINING)
    assert make_train_call(start()[0], other) is first
    warmer = dataclasses.replace(TRAINING, learning_rate=0.02)
    assert make_train_call(start()[0], warmer) is not first


def test_without_a_key_nothing_is_dropped():
    graphdef, state = start()
    call = make_train_call(graphdef, TRAINING)
    batch = jax.tree.map(jnp.asarray, LANES.batch(0))
    model = nnx.merge(graphdef, state.params)
    logits, _ = model(batch.inputs, batch.at, state.memory)
    expected = losses.next_token(logits, batch.targets, batch.weight).loss
    report = call(state, LANES.stack(0, 4), 1)[1]
    np.testing.assert_allclose(report.loss[0], expected, rtol=1e-5)


def test_a_batch_without_targets_is_harmless():
    graphdef, state = start()
    call = make_train_call(graphdef, dataclasses.replace(TRAINING, weight_decay=0.0))
    before = jax.device_get(state.params)
    batches = LANES.stack(0, 4)
    batches = batches._replace(weight=0 * batches.weight)
    state, report = call(state, batches, 4)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))
    assert not np.any(report.count) and not np.any(report.loss)


@dataclasses.dataclass(frozen=True)
class Shrinking:
    """The next token, and the squares of the embedding with a weight."""

    weight: float

    def __call__(self, model, batch, memory, **more):
        found = NextToken()(model, batch, memory, **more)
        squares = losses.Sums(jnp.sum(model.embedding[...] ** 2), jnp.float32(4))
        return found._replace(auxiliary={"squares": Auxiliary(squares, self.weight)})


def test_an_objective_adds_a_further_loss_by_its_mean(call):
    graphdef, state = start()
    table = jax.device_get(state.params["embedding"])
    report = call(state, LANES.stack(0, 4), 1)[1]
    shrinking = make_train_call(graphdef, TRAINING, Shrinking(3.0))
    key = key_for(0, "dropout")
    found = shrinking(start()[1], LANES.stack(0, 4), 1, key)[1]
    sums = found.auxiliary["squares"]
    np.testing.assert_allclose(sums.loss, [(table**2).sum(), 0, 0, 0], rtol=1e-5)
    np.testing.assert_array_equal(sums.count, [4, 0, 0, 0])
    np.testing.assert_allclose(found.loss, report.loss, rtol=1e-6)
    more = np.linalg.norm(3 * 2 * table / 4)
    gap = abs(found.grad_norm[0] - report.grad_norm[0])
    assert 0.1 < gap <= more * 1.001


def test_a_step_that_is_not_finite_is_skipped_and_the_average_follows():
    training = dataclasses.replace(TRAINING, nonfinite="skip", ema=0.75, loss="half")
    graphdef, state = start(training)
    call = make_train_call(graphdef, training)
    stack = LANES.stack(0, 4)
    stack.inputs[1:3, 0, 2] = 99  # outside the vocabulary: NaN
    states, reports = [jax.device_get(state)], []
    for step in range(4):
        item = jax.tree.map(lambda x, n=step: np.stack([x[n]] * 4), stack)
        state, report = call(state, item, 1)
        states.append(jax.device_get(state))
        reports.append(jax.device_get(report))
    assert [int(report.skipped[0]) for report in reports] == [0, 1, 2, 0]
    assert not np.isfinite(reports[1].loss[0]) and np.isfinite(reports[3].loss[0])
    assert {float(report.count[0]) for report in reports} == {6.0}  # of 12 targets
    for one, two in ((1, 2), (2, 3)):
        for name in ("params", "opt_state", "average"):
            old, new = getattr(states[one], name), getattr(states[two], name)
            jax.tree.map(np.testing.assert_array_equal, old, new)
    assert not np.any(states[2].memory.at.segment)  # emptied
    assert np.all(states[4].memory.at.segment == 1) and int(state.step) == 4
    moved = [
        not np.array_equal(x.params["embedding"], y.params["embedding"])
        for x, y in zip(states[:-1], states[1:], strict=True)
    ]
    assert moved == [True, False, False, True]
    wanted = jax.tree.map(
        lambda a, b, c: 0.75 * (0.75 * a + 0.25 * b) + 0.25 * c,
        *(states[step].params for step in (0, 1, 4)),
    )
    assert state.evaluated is state.average
    for found, value in zip(
        jax.tree.leaves(state.average), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-7)
