"""The gradient of one update: in micro-batches, and through segments before it.

Two choices of `TrainingConfig` meet here. `accumulate` cuts a batch into micro-batches
that are run one after another; their sums are divided by the whole batch's counts, so
a target weighs the same whichever micro-batch it is in. `gradient_depth` lets the loss
of a segment differentiate the memory that the last k segments wrote.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from relpos_jax.training.config import TrainingConfig
from relpos_jax.training.losses import Sums
from relpos_jax.training.objectives import Objective, Outcome


class Rows(NamedTuple):
    """Rows of a batch and what they look back on.

    Attributes:
      batch: `[b t]`, the segment whose loss is taken.
      memory: before `recent`, or before `batch` where there is none.
      recent: `[k b t]`, the segments between memory and batch; None for k = 0.
    """

    batch: Any
    memory: Any
    recent: Any


Gradient = Callable[..., tuple[PyTree, Outcome]]


def make_gradient(
    graphdef: nnx.GraphDef, training: TrainingConfig, objective: Objective
) -> Gradient:
    """Returns `gradient(params, rows, key, step) -> (gradient, outcome)`.

    The gradient is that of the mean loss plus the auxiliary means times their weights.
    The outcome's sums are the whole batch's, and its memory is what the next update's
    rows begin with: after `batch`, or after the oldest of `recent`.

    With depth k the last k segments are run again, with this step's parameters and
    each with the dropout of its own step, and kept only as the memory between them
    (`jax.checkpoint`): an update costs k more forward passes and k more backward
    passes, and the temporaries of one segment.
    """
    depth, spacing = training.gradient_depth, training.sampler.spacing

    def at_step(key, step):
        return None if key is None else jax.random.fold_in(key, step)

    def outcome(params, rows: Rows, key, step) -> Outcome:
        model = nnx.merge(graphdef, params)

        def run(batch, memory, step):
            return objective(
                model, batch, memory, key=at_step(key, step), spacing=spacing
            )

        if not depth:
            return run(rows.batch, rows.memory, step)

        def past(carry, item):
            memory, first = carry
            index, batch = item
            memory = run(batch, memory, step - depth + index).memory
            first = jax.tree.map(
                lambda new, old: jnp.where(index == 0, new, old), memory, first
            )
            return (memory, first), None

        memory = rows.memory.differentiable()
        (memory, first), _ = jax.lax.scan(
            jax.checkpoint(past, prevent_cse=False),
            (memory, memory),
            (jnp.arange(depth), rows.recent),
        )
        return run(rows.batch, memory, step)._replace(memory=first.detached())

    def total(params, rows: Rows, key, step, counts):
        found = outcome(params, rows, key, step)
        counts = _counts(found) if counts is None else counts
        parts = [
            weight * sums.loss / jnp.maximum(count, 1)
            for (weight, sums), count in zip(_parts(found), counts, strict=True)
        ]
        return sum(parts[1:], parts[0]), found

    gradient = jax.grad(total, has_aux=True)
    if training.accumulate == 1:
        return lambda params, rows, key, step: gradient(params, rows, key, step, None)

    pieces = training.accumulate

    def accumulated(params, rows: Rows, key, step):
        axes = _row_axes(graphdef, params, rows)
        # Of this first run only the counts are used, which depend on no parameter:
        # the compiler drops the model from it.
        counts = _counts(outcome(params, rows, key, step))

        def add(grads, item):
            index, part = item
            own = at_step(key, index)
            more, found = gradient(params, part, own, step, counts)
            return jax.tree.map(jnp.add, grads, more), found

        zero = jax.tree.map(jnp.zeros_like, params)
        parts = jax.tree.map(lambda x, axis: _split(x, axis, pieces), rows, axes)
        grads, found = jax.lax.scan(add, zero, (jnp.arange(pieces), parts))
        memory = jax.tree.map(_join, found.memory, axes.memory)
        sums, auxiliary = jax.tree.map(
            lambda x: jnp.sum(x, axis=0), (found.sums, found.auxiliary)
        )
        return grads, Outcome(sums, memory, auxiliary)

    return accumulated


def _parts(found: Outcome) -> list[tuple[Any, Sums]]:
    further = [(x.weight, x.sums) for x in found.auxiliary.values()]
    return [(1.0, found.sums), *further]


def _counts(found: Outcome) -> list[jax.Array]:
    return [sums.count for _, sums in _parts(found)]


def _row_axes(graphdef: nnx.GraphDef, params: PyTree, rows: Rows) -> Rows:
    """Returns which axis of each array counts the rows; -1 for none.

    A memory's is found by making two of different sizes, so that any kind will do.
    """

    def memories(params):
        model = nnx.merge(graphdef, params)
        return model.init_memory(1), model.init_memory(2)

    def axis(one, two):
        differ = [i for i, n in enumerate(one.shape) if n != two.shape[i]]
        return differ[0] if differ else -1

    return Rows(
        jax.tree.map(lambda x: 0, rows.batch),
        jax.tree.map(axis, *jax.eval_shape(memories, params)),
        jax.tree.map(lambda x: 1, rows.recent),
    )


def _split(x: jax.Array, axis: int, pieces: int) -> jax.Array:
    """Returns `[pieces ...]`; piece i has rows i, i + pieces, ....

    Neighbouring rows go to different pieces, so that a batch that is sharded by rows
    stays where it is.
    """
    if axis < 0:
        return jnp.broadcast_to(x, (pieces, *x.shape))
    shape = (*x.shape[:axis], x.shape[axis] // pieces, pieces, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis + 1, 0)


def _join(x: jax.Array, axis: int) -> jax.Array:
    """Undoes `_split`."""
    if axis < 0:
        return x[0]
    x = jnp.moveaxis(x, 0, axis + 1)
    return x.reshape((*x.shape[:axis], -1, *x.shape[axis + 2 :]))
