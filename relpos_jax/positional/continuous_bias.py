"""Continuous position bias: an MLP of the (log) distance (Swin V2, Liu et al. 2022)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from relpos_jax.positional.fire import init_mlp, mlp
from relpos_jax.positional.protocol import Block, Dims, Params, PositionEncoding


def log_spaced(distance: Num[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns `sign(distance) log(1 + |distance|)` (natural logarithm)."""
    distance = distance.astype(jnp.float32)
    return jnp.sign(distance) * jnp.log1p(jnp.abs(distance))


@dataclasses.dataclass(frozen=True)
class ContinuousBias(PositionEncoding):
    """Adds `MLP(log_spaced(i - j))`, a value per head, to the logits (log-CPB).

    The paper's distances are those of pixels along two axes; tokens have one. The
    released code (Swin V2) divides the logarithm by log 8 and bounds the bias to
    `16 sigmoid(.)`; neither is in the paper's equations. Not here: the paper's scaled
    cosine attention.

    Attributes:
      hidden: units of the MLP (released code: 512).
      log: the MLP sees the logarithm; otherwise the distance itself, divided by
        `unit` (the paper's linear-spaced variant).
      unit: a distance that counts as 1 before the MLP; the logarithm is divided by
        `log(1 + unit)`.
      bound: the bias is `bound sigmoid(MLP)`; None for the MLP itself (the paper).
      share: one MLP for all layers.
    """

    turns_once: ClassVar[bool] = True

    hidden: int = 32
    log: bool = True
    unit: float = 7.0
    bound: float | None = None
    share: bool = False

    def __post_init__(self):
        if self.hidden < 1 or self.unit <= 0 or (self.bound or 1.0) <= 0:
            raise ValueError(
                f"hidden, unit and bound must be positive, "
                f"got {self.hidden}, {self.unit}, {self.bound}"
            )

    def init(self, key: jax.Array, dims: Dims) -> Params:
        return {} if self.share else init_mlp(key, self.hidden, dims.heads)

    def init_shared(self, key: jax.Array, dims: Dims) -> Params:
        return init_mlp(key, self.hidden, dims.heads) if self.share else {}

    def table(
        self, params: Params, distance: Num[Array, "*n"]
    ) -> Float[Array, "*n h"] | None:
        if self.log:
            x = log_spaced(distance) / jnp.log1p(jnp.float32(self.unit))
        else:
            x = distance.astype(jnp.float32) / self.unit
        bias = mlp(jax.tree.map(lambda x: x.astype(jnp.float32), params), x)
        return bias if self.bound is None else self.bound * jax.nn.sigmoid(bias)

    def score(self, params: Params, block: Block) -> Float[Array, "b h q k"]:
        return block.logits + block.rel.bias(block.table)

    def past_training(self) -> str:
        growth = "the logarithm of the distance" if self.log else "the distance"
        return f"The MLP goes on as a straight line in {growth}."
