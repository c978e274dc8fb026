"""One compiled call: many segments, one optimiser update a segment."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from relpos_jax.training import optimiser
from relpos_jax.training.config import TrainingConfig
from relpos_jax.training.losses import Sums
from relpos_jax.training.objectives import NextToken, Objective
from relpos_jax.training.placement import Placement
from relpos_jax.training.state import TrainState


class StepReport(NamedTuple):
    """What each update of a call says, `[s]`; entries past the count are 0.

    Attributes:
      loss: sum of the token losses, nats.
      count: number of targets; `loss / count` is the step's mean loss.
      grad_norm: global norm of the mean loss' gradient, before clipping.
      learning_rate: the rate of this update.
      auxiliary: name to sum and count of a further loss, unweighted.
    """

    loss: Float[Array, "*s"]
    count: Float[Array, "*s"]
    grad_norm: Float[Array, "*s"]
    learning_rate: Float[Array, "*s"]
    auxiliary: dict[str, Sums]


TrainCall = Callable[..., tuple[TrainState, StepReport]]


def make_train_call(
    graphdef: nnx.GraphDef,
    training: TrainingConfig,
    objective: Objective = NextToken(),
    placement: Placement = Placement(),
) -> TrainCall:
    """Returns the jitted `call(state, batches, count, key) -> (state, report)`.

    `batches` holds `[s b t]` segments, of which the first `count` are trained on. `key`
    is the run's dropout key, of which each step takes the part that belongs to its own
    number; None for no dropout. `positions`, a last argument, is the key of the
    position sampler; None leaves positions as they are. The state is donated: it must
    not be read again. The gradient is taken inside the scan's body, and none flows into
    the memory (Dai et al. 2019, section 3.2).

    `count` is traced, and segments past it are skipped. So a run has one compiled
    program however its calls are cut, by checkpoints or by a kill, and its numbers
    can't depend on the cuts; two scan lengths would be two programs, which XLA may
    round differently. Runs that differ only in their seed share the program too.

    Args:
      graphdef: the model without its parameters (`nnx.split`).
      training: the optimiser's settings.
      objective: what is minimised.
      placement: says where the new state stays.
    """
    # What the program doesn't depend on must not make another one of it.
    shared = {"seed": 0, "checkpoint_every": 1, "keep": 1, "log_every": 1}
    training = dataclasses.replace(training, **shared)
    return _train_call(graphdef, training, objective, placement)


@functools.lru_cache(maxsize=16)
def _train_call(
    graphdef: nnx.GraphDef,
    training: TrainingConfig,
    objective: Objective,
    placement: Placement,
) -> TrainCall:
    optimizer, schedule = optimiser.build(training), optimiser.schedule(training)
    sampler = training.sampler

    def update(state: TrainState, batch: Any, key: jax.Array | None, positions):
        if key is not None:
            key = jax.random.fold_in(key, state.step)
        if positions is not None:
            # What draws a whole sequence anew draws in every step; an offset must be
            # the same in all segments of a document.
            if sampler.whole:
                positions = jax.random.fold_in(positions, state.step)
            batch = batch._replace(at=sampler(positions, batch.at))

        def total(params):
            found = objective(
                nnx.merge(graphdef, params),
                batch,
                state.memory,
                key=key,
                spacing=sampler.spacing,
            )
            further = [x.weight * _mean(x.sums) for x in found.auxiliary.values()]
            return sum(further, _mean(found.sums)), found

        grads, found = jax.grad(total, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        memory = jax.lax.stop_gradient(found.memory)
        report = StepReport(
            *found.sums,
            optax.tree.norm(grads),
            schedule(state.step),
            {name: x.sums for name, x in found.auxiliary.items()},
        )
        state = TrainState(state.step + 1, params, opt_state, memory)
        return placement.constrain(state), report

    def skip(state: TrainState, batch: Any, key: jax.Array | None, positions):
        shapes = jax.eval_shape(update, state, batch, key, positions)[1]
        return state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    @functools.partial(jax.jit, donate_argnums=0)
    def call(
        state: TrainState,
        batches: Any,
        count: Int[Array, ""],
        key: jax.Array | None = None,
        positions: jax.Array | None = None,
    ):
        def body(state, item):
            index, batch = item
            return jax.lax.cond(
                index < count, update, skip, state, batch, key, positions
            )

        indices = jnp.arange(batches.inputs.shape[0])
        return jax.lax.scan(body, state, (indices, batches))

    return call


def _mean(sums: Sums) -> jax.Array:
    # A batch without targets is harmless: loss 0, gradient 0.
    return sums.loss / jnp.maximum(sums.count, 1)
