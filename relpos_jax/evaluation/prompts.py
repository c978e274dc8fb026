"""Prompts of several lengths as columns that are read in calls of one size."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from relpos_jax.where import Where


def lay_out(
    prompts: Sequence[np.ndarray], size: int, *, at_ends: bool = False
) -> tuple[Int[np.ndarray, "b n"], Where]:
    """Returns tokens and their places, each row's last token in the last column.

    Args:
      prompts: `[t]` each, token ids; lengths may differ.
      size: columns of a call, of which there is a whole number.
      at_ends: puts the padding in front of a row's last call instead of its first, so
        that each row's other calls end where its segments of `size` tokens do.
    """
    total = -(-max(map(len, prompts)) // size) * size
    tokens = np.zeros((len(prompts), total), np.int32)
    position, real = np.zeros_like(tokens), np.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        columns = np.arange(total - len(prompt), total)
        if at_ends:
            whole = (len(prompt) - 1) // size * size
            columns[:whole] = np.arange(total - size - whole, total - size)
        tokens[row, columns], real[row, columns] = prompt, 1
        position[row, columns] = np.arange(len(prompt))
    return tokens, Where(jnp.asarray(position), jnp.asarray(real))
