"""One compiled call: many segments, one optimiser update a segment."""

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
from relpos_jax.training.gradient import Rows, make_gradient
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
      skipped: how many updates in a row, this one the last, were skipped since
        something wasn't finite; 0 for an update that was made.
      auxiliary: name to sum and count of a further loss, unweighted.
    """

    loss: Float[Array, "*s"]
    count: Float[Array, "*s"]
    grad_norm: Float[Array, "*s"]
    learning_rate: Float[Array, "*s"]
    skipped: Int[Array, "*s"]
    auxiliary: dict[str, Sums]


TrainCall = Callable[..., tuple[TrainState, StepReport]]


def make_train_call(
    graphdef: nnx.GraphDef,
    training: TrainingConfig,
    objective: Objective = NextToken(),
    placement: Placement = Placement(),
    *,
    together: bool = False,
) -> TrainCall:
    """Returns the jitted `call(state, batches, count, key) -> (state, report)`.

    `batches` holds `[s b t]` segments, of which the first `count` are trained on. `key`
    is the run's dropout key, of which each step takes the part that belongs to its own
    number; None for no dropout. `positions`, a last argument, is the key of the
    position sampler; None leaves positions as they are. The state is donated: it must
    not be read again. The gradient is taken inside the scan's body; of the memory, as
    `training.gradient_depth` says (0: none flows into it, Dai et al. 2019, section
    3.2).

    `count` is traced, and segments past it are skipped. So a run has one compiled
    program however its calls are cut, by checkpoints or by a kill, and its numbers
    can't depend on the cuts; two scan lengths would be two programs, which XLA may
    round differently. Runs that differ only in their seed share the program too.

    Args:
      graphdef: the model without its parameters (`nnx.split`).
      training: the optimiser's settings.
      objective: what is minimised.
      placement: says where the new state stays.
      together: every argument but `count`, and every result, has one more axis in
        front, for models that are trained at once (`vmap`).
    """
    program = training.program()
    return _train_call(graphdef, program, objective, placement, together)


@functools.lru_cache(maxsize=16)
def _train_call(
    graphdef: nnx.GraphDef,
    training: TrainingConfig,
    objective: Objective,
    placement: Placement,
    together: bool,
) -> TrainCall:
    optimizer, schedule = optimiser.build(training), optimiser.schedule(training)
    gradient = make_gradient(graphdef, training, objective)
    sampler = training.sampler

    def update(state: TrainState, batch: Any, key: jax.Array | None, positions):
        if positions is not None:
            # What draws a whole sequence anew draws in every step; an offset must be
            # the same in all segments of a document.
            if sampler.whole:
                positions = jax.random.fold_in(positions, state.step)
            batch = batch._replace(at=sampler(positions, batch.at))
        if training.loss == "half":
            length = batch.weight.shape[1]
            later = jnp.arange(length) >= length // 2
            batch = batch._replace(weight=batch.weight * later[None])

        rows = Rows(batch, state.memory, state.recent)
        grads, found = gradient(state.params, rows, key, state.step)
        norm, rate = optax.tree.norm(grads), schedule(state.step)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        updates = jax.tree.map(lambda x: rate.astype(x.dtype) * x, updates)
        params = optax.apply_updates(state.params, updates)
        recent, average, skipped = state.recent, state.average, state.skipped
        if recent is not None:
            recent = jax.tree.map(
                lambda old, new: jnp.concatenate([old[1:], new[None]]), recent, batch
            )
        if average is not None:
            average = optax.incremental_update(params, average, 1 - training.ema)
        memory = jax.lax.stop_gradient(found.memory)
        new = TrainState(
            state.step + 1, params, opt_state, memory, recent, average, skipped
        )
        if skipped is not None:
            sums = [found.sums, *(x.sums for x in found.auxiliary.values())]
            new = _unless_finite(state, new, jnp.stack([norm, *(x.loss for x in sums)]))
        report = StepReport(
            *found.sums,
            norm,
            rate,
            jnp.int32(0) if new.skipped is None else new.skipped,
            {name: x.sums for name, x in found.auxiliary.items()},
        )
        return placement.constrain(new), report

    def skip(state: TrainState, batch: Any, key: jax.Array | None, positions):
        shapes = jax.eval_shape(update, state, batch, key, positions)[1]
        return state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

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

    if together:
        call = jax.vmap(call, in_axes=(0, 0, None, 0, 0))
    return jax.jit(call, donate_argnums=0)


def _unless_finite(old: TrainState, new: TrainState, values: jax.Array) -> TrainState:
    """Returns `new`, or, where a value isn't finite, `old` one step on.

    The data move on. The memory does too if it is finite; otherwise it is emptied,
    since it would spread what is wrong with it, and one from before this batch would
    not stand before the next.
    """
    good = jnp.all(jnp.isfinite(values))
    kept = ("params", "opt_state", "average")
    chosen = {
        name: jax.tree.map(
            lambda x, y: jnp.where(good, x, y), getattr(new, name), getattr(old, name)
        )
        for name in kept
    }
    floats = [
        x for x in jax.tree.leaves(new.memory) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    sound = functools.reduce(
        jnp.logical_and, [jnp.all(jnp.isfinite(x)) for x in floats], jnp.bool_(True)
    )
    memory = jax.tree.map(lambda x: jnp.where(sound, x, jnp.zeros_like(x)), new.memory)
    skipped = jnp.where(good, 0, old.skipped + 1)
    return new._replace(memory=memory, skipped=skipped, **chosen)
