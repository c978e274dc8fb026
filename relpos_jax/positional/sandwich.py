"""Sandwich: sinusoids' inner product as a bias (Chi et al. 2023)."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from relpos_jax.positional.protocol import Block, Params, PositionEncoding, leading


def inner_product(
    distance: Num[Array, "*n"], dim: int, *, base: float = 10000.0, first: int = 0
) -> Float[Array, "*n"]:
    """Returns `sum_k cos(distance base^(-2k/dim)) - dim/2`, at most 0, and 0 at 0.

    Without the `dim/2`, this is the inner product of two sinusoidal embeddings of
    Vaswani et al. at this distance.

    Args:
      distance: distances of any shape.
      dim: features of the sinusoids, even; half as many frequencies.
      base: of the frequencies.
      first: the first `k`: 0 as in the sinusoid, 1 as in NVIDIA NeMo's code, which
        lacks the frequency 1 and has 1/base instead.

    Raises:
      ValueError: an odd `dim`, or `first` neither 0 nor 1.
    """
    _check(dim, first)
    steps = np.arange(first, first + dim // 2)
    frequency = jnp.asarray((base ** (-2.0 * steps / dim)).astype(np.float32))
    distance = distance.astype(jnp.float32)[..., None]
    phase = distance * leading(frequency, distance.ndim)
    # 1 - cos(x) = 2 sin(x / 2)^2 loses nothing where x is small.
    return -2.0 * jnp.sum(jnp.sin(phase / 2.0) ** 2, axis=-1)


def _check(dim: int, first: int) -> None:
    if dim < 2 or dim % 2 or first not in (0, 1):
        raise ValueError(
            f"dim must be even and first 0 or 1, got dim={dim}, first={first}"
        )


def ratios(heads: int) -> Float[np.ndarray, " h"]:
    """Returns each head's factor `heads / (8 h)`, `h` from 1: the first decays most.

    Raises:
      ValueError: `heads` is not positive.
    """
    if heads < 1:
        raise ValueError(f"heads must be positive, got {heads}")
    return (heads / (8.0 * np.arange(1, heads + 1))).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Sandwich(PositionEncoding):
    """Adds `ratios(h) inner_product(distance)` to the logits; nothing is learned.

    The authors published no code; the compression ratio by head and `first=1` are those
    of NVIDIA NeMo's class.

    Attributes:
      dim: features of the sinusoids (the paper's d-bar), not tied to the model's width.
      base, first: see `inner_product`.
      symmetric: use `|distance|`, for bidirectional attention. Otherwise keys after the
        query get no bias.
    """

    turns_once: ClassVar[bool] = True

    dim: int = 128
    base: float = 10000.0
    first: int = 0
    symmetric: bool = False

    def __post_init__(self):
        _check(self.dim, self.first)

    def constants(self, heads: int, head_dim: int) -> Params:
        return {"ratios": jnp.asarray(ratios(heads))}

    def table(
        self, params: Params, distance: Num[Array, "*n"]
    ) -> Float[Array, "*n h"] | None:
        far = jnp.abs(distance) if self.symmetric else jnp.maximum(distance, 0)
        bias = inner_product(far, self.dim, base=self.base, first=self.first)[..., None]
        return bias * leading(params["ratios"], bias.ndim)

    def score(self, params: Params, block: Block) -> Float[Array, "b h q k"]:
        return block.logits + block.rel.bias(block.table)

    def past_training(self) -> str:
        return "Far keys fade, not monotonically: about as the logarithm of distance."
