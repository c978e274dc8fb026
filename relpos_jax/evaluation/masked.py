"""How well an encoder fills in masked tokens: sums and counts over a text."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Integer, PyTree

from relpos_jax.data.batches import Lanes
from relpos_jax.data.masking import Masked, Masking


class MaskedScore(NamedTuple):
    """Results on the chosen tokens of a text.

    Attributes:
      nll: sum of the negative log-likelihood, nats.
      right: how many of them the most likely token is right for.
      tokens: how many were chosen.
      seen: how many of them the encoder saw, replaced or as they were.
    """

    nll: float
    right: int
    tokens: int
    seen: int

    @property
    def bits(self) -> float:
        """Mean negative log-likelihood of a chosen token, bits."""
        return self.nll / max(self.tokens, 1) / float(np.log(2))

    @property
    def accuracy(self) -> float:
        """Part of the chosen tokens that are most likely."""
        return self.right / max(self.tokens, 1)


def evaluate(
    graphdef: nnx.GraphDef,
    params: PyTree,
    text: Integer[np.ndarray, " n"],
    length: int,
    masking: Masking,
    *,
    batch: int = 32,
    steps: int | None = None,
    seed: int = 0,
) -> MaskedScore:
    """Scores an encoder on contiguous pieces of a text, each token read once.

    What is masked depends on `seed` alone, so that models are compared on the same
    tokens. Fewer than `batch * length` tokens at the end are left out.

    Args:
      graphdef, params: the encoder, as `nnx.split` gives it.
      text: `[n]`, ids.
      length: tokens in a piece.
      masking: how tokens are hidden.
      batch: pieces in a call.
      steps: calls; None for all of the text.
      seed: of the masks.

    Raises:
      ValueError: a text shorter than one call.
    """
    batches = Masked(Lanes(text, batch, length), masking, seed)

    @jax.jit
    def sums(params, batch):
        logits = nnx.merge(graphdef, params)(batch.inputs, batch.at)
        chosen = batch.weight > 0
        picked = jnp.take_along_axis(logits, batch.targets[..., None], axis=-1)
        nll = jax.nn.logsumexp(logits, axis=-1) - picked[..., 0]
        right = jnp.argmax(logits, axis=-1) == batch.targets
        seen = chosen & (batch.inputs != masking.mask_id)
        counts = [jnp.sum(x & chosen, dtype=jnp.int32) for x in (right, chosen, seen)]
        return jnp.sum(jnp.where(chosen, nll, 0)), *counts

    total = np.zeros(4)
    for step in range(batches.steps_per_epoch if steps is None else steps):
        total += np.asarray(jax.device_get(sums(params, batches.batch(step))))
    return MaskedScore(float(total[0]), *(int(x) for x in total[1:]))
