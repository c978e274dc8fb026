"""Sinusoidal absolute embeddings (Vaswani et al. 2017, section 3.5)."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from relpos_jax.positional.protocol import Params, PositionEncoding, leading
from relpos_jax.where import Where


def sinusoid(
    position: Num[Array, "*n"],
    width: int,
    *,
    base: float = 10000.0,
    layout: str = "concatenated",
    last_frequency: str = "paper",
) -> Float[Array, "*n w"]:
    """Returns `sin(position * f_i)` and `cos(position * f_i)`, float32.

    Args:
      position: positions or distances, any shape.
      width: number of features, even.
      base: the longest wavelength is about `2 pi base`.
      layout: "concatenated" puts all sines before all cosines (Transformer-XL,
        tensor2tensor); "interleaved" alternates them (the paper's equation).
      last_frequency: "paper" is `f_i = base^(-2i/w)`; "inclusive" is
        `base^(-i/(w/2 - 1))`, so that the last frequency is exactly `1/base`
        (tensor2tensor, fairseq).

    Raises:
      ValueError: an odd width or an unknown choice.
    """
    if width < 2 or width % 2:
        raise ValueError(f"a sinusoid needs an even width, got {width}")
    if layout not in ("concatenated", "interleaved"):
        raise ValueError(f"layout must be concatenated or interleaved, got {layout!r}")
    if last_frequency not in ("paper", "inclusive"):
        raise ValueError(
            f"last_frequency must be paper or inclusive, got {last_frequency!r}"
        )
    half = width // 2
    steps = half if last_frequency == "paper" else max(half - 1, 1)
    # Rounded to float32 once, so that far phases are as accurate as float32 allows.
    frequency = np.exp(-np.log(base) * np.arange(half) / steps).astype(np.float32)
    position = position.astype(jnp.float32)[..., None]
    phase = position * leading(jnp.asarray(frequency), position.ndim)
    waves = [jnp.sin(phase), jnp.cos(phase)]
    if layout == "concatenated":
        return jnp.concatenate(waves, axis=-1)
    return jnp.stack(waves, axis=-1).reshape(*position.shape[:-1], width)


@dataclasses.dataclass(frozen=True)
class Sinusoidal(PositionEncoding):
    """Adds `sinusoid(position)` to the token embeddings.

    Vaswani et al. 2017 interleave sines and cosines; their released code concatenates
    them and spaces the frequencies to include the last. The choices are fields.
    """

    base: float = 10000.0
    layout: str = "concatenated"
    last_frequency: str = "paper"

    absolute: ClassVar[bool] = True
    invariant: ClassVar[bool] = False

    def embed(
        self, params: Params, x: Float[Array, "b t w"], at: Where
    ) -> Float[Array, "b t w"]:
        waves = sinusoid(
            at.position,
            x.shape[-1],
            base=self.base,
            layout=self.layout,
            last_frequency=self.last_frequency,
        )
        return x + waves.astype(x.dtype)

    def past_training(self) -> str:
        return "Defined at every position, but phases past the training length are new."
