"""Rotary position embeddings (Su et al. 2021, RoFormer, equations 14-16 and 34)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from relpos_jax.positional.protocol import Params, PositionEncoding
from relpos_jax.where import Where


def inverse_frequencies(dim: int, base: float = 10000.0) -> Float[Array, " f"]:
    """Returns `base^(-2i/dim)` for `i` in `0 .. dim/2 - 1`, float32.

    Raises:
      ValueError: `dim` is odd or less than 2.
    """
    if dim < 2 or dim % 2:
        raise ValueError(f"rotation pairs features, so dim must be even, got {dim}")
    return jnp.float32(base) ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)


def rotate(
    x: Float[Array, "b t h d"],
    position: Num[Array, "b t"],
    frequency: Float[Array, " f"],
    *,
    layout: str = "halves",
    amplitude: float = 1.0,
) -> Float[Array, "b t h d"]:
    """Turns pairs of features by `position * frequency`.

    Args:
      x: queries or keys; the first `2 f` features turn, the rest pass through.
      position: positions, integers or floats.
      frequency: radians a position, float32.
      layout: which features make a pair: "halves" is `(i, i + f)` (GPT-NeoX, Llama in
        Hugging Face's form), "interleaved" is `(2i, 2i + 1)` (the paper, GPT-J).
      amplitude: multiplies cosine and sine alike, so scores grow by its square.

    Raises:
      ValueError: more features turn than there are, or an unknown layout.
    """
    turned = 2 * frequency.shape[-1]
    if turned > x.shape[-1]:
        raise ValueError(f"{turned} features are to turn, but there are {x.shape[-1]}")
    # Phases in float32 whatever x is: bfloat16 holds no odd number past 256.
    phase = position.astype(jnp.float32)[:, :, None, None] * frequency
    cosine, sine = amplitude * jnp.cos(phase), amplitude * jnp.sin(phase)
    rest = x[..., turned:]
    moving = x[..., :turned].astype(jnp.float32)
    if layout == "halves":
        first, second = jnp.split(moving, 2, axis=-1)
    elif layout == "interleaved":
        first, second = moving[..., 0::2], moving[..., 1::2]
    else:
        raise ValueError(f"layout must be 'halves' or 'interleaved', got {layout!r}")
    pair = [first * cosine - second * sine, second * cosine + first * sine]
    if layout == "halves":
        moved = jnp.concatenate(pair, axis=-1)
    else:
        moved = jnp.stack(pair, axis=-1).reshape(moving.shape)
    return jnp.concatenate([moved.astype(x.dtype), rest], axis=-1)


@dataclasses.dataclass(frozen=True)
class Rope(PositionEncoding):
    """Rotates queries and keys, so that their product depends on the distance.

    Attributes:
      base: `theta` of the frequencies `base^(-2i/d)`.
      layout: "halves" or "interleaved", see `rotate`.
      fraction: part of each head's features that turns (partial rotary: GPT-NeoX 0.25,
        Phi-2 0.4).
    """

    base: float = 10000.0
    layout: str = "halves"
    fraction: float = 1.0

    def __post_init__(self):
        if self.base <= 0 or not 0 < self.fraction <= 1:
            raise ValueError(
                f"base must be positive and fraction in (0, 1], "
                f"got {self.base} and {self.fraction}"
            )

    def frequencies(self, head_dim: int) -> Float[Array, " f"]:
        """Returns the frequencies of the features that turn."""
        return inverse_frequencies(int(head_dim * self.fraction), self.base)

    def query(
        self, params: Params, q: Float[Array, "b t h d"], at: Where
    ) -> Float[Array, "b t h d"]:
        frequency = self.frequencies(q.shape[-1])
        return rotate(q, at.position, frequency, layout=self.layout)

    key = query

    def past_training(self) -> str:
        return "Defined at every distance, but slow phases past training are new."
