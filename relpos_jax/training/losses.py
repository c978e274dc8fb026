"""Losses as sums and counts: means are taken once, at the end."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Sums(NamedTuple):
    """A weighted sum of token losses, and the weight it sums over.

    Attributes:
      loss: float32 scalar, nats.
      count: float32 scalar, sum of the weights: the number of targets scored.
    """

    loss: Float[Array, ""]
    count: Float[Array, ""]


def token_losses(
    logits: Float[Array, "*b v"], targets: Int[Array, "*b"]
) -> Float[Array, "*b"]:
    """Returns -log softmax(logits)[target] of each token, in nats, float32.

    A target outside `0 .. v - 1` gives NaN rather than a plausible number: compiled
    code can't raise, and the training loop stops at a loss that isn't finite.

    Args:
      logits: of any float type; the softmax is taken in float32.
      targets: ids already shifted, i.e. the token that follows each input.
    """
    logits = logits.astype(jnp.float32)
    # Negative ids would count from the end; past the end they are filled with NaN.
    index = jnp.where(targets < 0, logits.shape[-1], targets)[..., None]
    picked = jnp.take_along_axis(
        logits, index, axis=-1, mode="fill", fill_value=jnp.nan
    )
    return jax.nn.logsumexp(logits, axis=-1) - picked[..., 0]


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
    losses = token_losses(logits, jnp.where(scored, targets, 0))
    weight = weight.astype(jnp.float32)
    return Sums(jnp.sum(losses * weight), jnp.sum(weight))
