"""The state of a run: everything that a checkpoint has to hold.

Dropout and data aren't in it: both are pure functions of the seed and the step.
"""

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from relpos_jax.data.batches import Batch
from relpos_jax.training import optimiser
from relpos_jax.training.config import TrainingConfig
from relpos_jax.where import Where


class TrainState(NamedTuple):
    """What one update turns into the next.

    Attributes:
      step: int32 scalar, the number of updates done.
      params: the parameters, arrays in the structure that `nnx.split` gave them.
      opt_state: the optimiser's state.
      memory: the model's memory after the last segment, or, with gradient depth k,
        before the last k; of length 0 where there is none, so that the structure never
        changes.
      recent: the last k segments, `[k b t]`; None for k = 0.
      average: the parameters' moving average; None without one.
      skipped: int32 scalar, updates in a row that were skipped; None where an update
        that isn't finite ends the run.
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: PyTree
    memory: Any
    recent: Any = None
    average: PyTree = None
    skipped: Int[Array, ""] | None = None

    @property
    def evaluated(self) -> PyTree:
        """The parameters to evaluate and export: their average where there is one."""
        return self.params if self.average is None else self.average


def initial(params: PyTree, training: TrainingConfig, memory: Any) -> TrainState:
    """Returns the state before the first update.

    Args:
      params: initial parameters.
      training: says what the state holds beside them.
      memory: an empty memory of the training batch's size.
    """

    # Donation needs each array once, and an empty memory may share its zeros.
    def copy(tree):
        return jax.tree.map(jnp.copy, tree)

    recent = None
    if training.gradient_depth:
        shape = (training.gradient_depth, training.batch, training.length)
        tokens = [jnp.zeros(shape, jnp.int32) for _ in range(4)]
        weight = jnp.zeros(shape, jnp.float32)
        # Segment 0: nothing attends to what was there before the first batch.
        recent = Batch(tokens[0], tokens[1], Where(tokens[2], tokens[3]), weight)
    return TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=optimiser.build(training).init(params),
        memory=copy(memory),
        recent=recent,
        average=None if training.ema is None else copy(params),
        skipped=jnp.int32(0) if training.nonfinite == "skip" else None,
    )


def key_for(seed: int, use: str) -> jax.Array:
    """Returns the seed's typed key for one named use ("parameters", "dropout")."""
    return jax.random.fold_in(jax.random.key(seed), zlib.crc32(use.encode()))
