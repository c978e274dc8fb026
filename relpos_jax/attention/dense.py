"""Attention with all scores at once: the plain formula, and the oracle."""

import jax
import jax.numpy as jnp

from relpos_jax.attention import core
from relpos_jax.attention.core import NEVER, Operands
from relpos_jax.attention.dropout import Dropped, kept
from relpos_jax.masks import Mask
from relpos_jax.positional.protocol import PositionEncoding
from relpos_jax.where import Where


def attend_dense(
    encoding: PositionEncoding,
    mask: Mask,
    scale: float,
    operands: Operands,
    q_at: Where,
    k_at: Where,
    drop: Dropped | None = None,
    free: int = 0,
) -> jax.Array:
    """Returns `[b h q d]` float32: softmax of the visible scores times the values.

    A row that may attend to nothing gives zeros and zero gradients. The rows of the
    first `free` keys are by pair, if there are rows.
    """
    visible = mask(q_at, k_at)[:, None]
    logits = core.logits_of(encoding, operands, q_at, k_at, scale, visible, free)
    logits = jnp.where(visible, logits, NEVER)
    highest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.where(visible, jnp.exp(logits - highest), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    if drop is not None:
        weights = weights * kept(drop, weights.shape)
    return core.values_of(encoding, operands, weights, q_at, k_at, scale, visible, free)
