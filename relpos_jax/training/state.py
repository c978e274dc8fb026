"""The state of a run: everything that a checkpoint has to hold.

Dropout and data aren't in it: both are pure functions of the seed and the step.
"""

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree


class TrainState(NamedTuple):
    """What one update turns into the next.

    Attributes:
      step: int32 scalar, the number of updates done.
      params: the parameters, arrays in the structure that `nnx.split` gave them.
      opt_state: the optimiser's state.
      memory: the model's memory after the last segment; of length 0 where there is
        none, so that the structure never changes.
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: PyTree
    memory: Any


def initial(
    params: PyTree, optimizer: optax.GradientTransformation, memory: Any
) -> TrainState:
    """Returns the state before the first update.

    Args:
      params: initial parameters.
      optimizer: what makes `opt_state`.
      memory: an empty memory of the training batch's size.
    """
    # Donation needs each array once, and an empty memory may share its zeros.
    memory = jax.tree.map(jnp.copy, memory)
    return TrainState(jnp.int32(0), params, optimizer.init(params), memory)


def key_for(seed: int, use: str) -> jax.Array:
    """Returns the seed's typed key for one named use ("parameters", "dropout")."""
    return jax.random.fold_in(jax.random.key(seed), zlib.crc32(use.encode()))
