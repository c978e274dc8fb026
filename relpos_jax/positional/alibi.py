"""ALiBi: attention with linear biases (Press et al. 2022, section 3)."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from relpos_jax.positional.protocol import Block, Params, PositionEncoding, leading


def slopes(heads: int) -> Float[np.ndarray, " h"]:
    """Returns each head's slope, float32, by the rule of the authors' released code.

    For a power of two, `2^(-8 (i + 1) / heads)`. Otherwise the slopes of the largest
    power of two below, followed by every other slope of the doubled set; the paper's
    text does not say this.

    Raises:
      ValueError: `heads` is not positive.
    """
    if heads < 1:
        raise ValueError(f"heads must be positive, got {heads}")
    power = 2 ** int(np.log2(heads))
    exact = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-4.0 * np.arange(1, 2 * power + 1) / power)[0::2]
    return np.concatenate([exact, between[: heads - power]]).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Alibi(PositionEncoding):
    """Adds `-slope_h * distance` to the logits; the bias is not scaled by 1/sqrt(d).

    Attributes:
      symmetric: use `|distance|`, for bidirectional attention. Otherwise keys after the
        query get no bias.
    """

    turns_once: ClassVar[bool] = True

    symmetric: bool = False

    def constants(self, heads: int, head_dim: int) -> Params:
        return {"slopes": jnp.asarray(slopes(heads))}

    def table(
        self, params: Params, distance: Num[Array, "*n"]
    ) -> Float[Array, "*n h"] | None:
        far = jnp.abs(distance) if self.symmetric else jnp.maximum(distance, 0)
        far = far.astype(jnp.float32)[..., None]
        return -far * leading(params["slopes"], far.ndim)

    def score(self, params: Params, block: Block) -> Float[Array, "b h q k"]:
        return block.logits + block.rel.bias(block.table)

    def past_training(self) -> str:
        return "Far keys fade: the penalty keeps growing with the distance."
