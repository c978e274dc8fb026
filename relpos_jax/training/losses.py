"""Losses as sums and counts: means are taken once, at the end."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from relpos_jax.models.adaptive import token_losses

__all__ = ["Sums", "next_token", "token_losses", "weighted"]


class Sums(NamedTuple):
    """A weighted sum of token losses, and the weight it sums over.

    Attributes:
      loss: float32 scalar, nats.
      count: float32 scalar, sum of the weights: the number of targets scored.
    """

    loss: Float[Array, ""]
    count: Float[Array, ""]


def next_token(
    logits: Float[Array, "b t v"],
    targets: Int[Array, "b t"],
    weight: Float[Array, "b t"],
) -> Sums:
    """Returns the weighted cross-entropy's sum and the sum of the weights.

    Where the weight is 0 nothing is read: neither a padding id nor a logit that isn't
    finite reaches the sum or the gradient.

    Args:
      logits: `[b t v]`.
      targets: `[b t]`, the token that follows each input.
      weight: `[b t]`, 1 for a target that counts, 0 for padding.
    """
    scored = weight > 0
    logits = jnp.where(scored[..., None], logits, 0)
    return weighted(token_losses(logits, jnp.where(scored, targets, 0)), weight)


def weighted(losses: Float[Array, "b t"], weight: Float[Array, "b t"]) -> Sums:
    """Returns the weighted sum of token losses, and the sum of the weights.

    Args:
      losses: `[b t]`, finite also where the weight is 0: `TransformerXL.losses` with
        that weight.
      weight: `[b t]`, 1 for a target that counts, 0 for padding.
    """
    weight = weight.astype(jnp.float32)
    return Sums(jnp.sum(losses * weight), jnp.sum(weight))
