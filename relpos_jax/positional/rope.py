"""Rotary position embeddings (Su et al. 2021, RoFormer, equations 14-16 and 34)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from relpos_jax.positional.protocol import Params, PositionEncoding
from relpos_jax.positional.rope_frequencies import (
    document_lengths,
    inverse_frequencies,
)
from relpos_jax.positional.rope_scaling import RopeScaling, scaling_of
from relpos_jax.relative import Layout
from relpos_jax.where import Where

DIGIT = 2048  # positions are split at multiples of it, see `phases`

Frequencies = (
    Float[np.ndarray, " f"] | Float[Array, " f"] | Float[Array, "b t f"]
)  # constants, or data: one for all tokens or each its own


def phases(
    position: Num[Array, "b t"], frequency: Frequencies
) -> Float[Array, "b t 1 f"]:
    """Returns `position * frequency`, up to whole turns, float32.

    As one float32 product it is off by up to 1.2e-7 of itself, 0.1 radian at position
    1,000,000. Constant frequencies (numpy, float64) are therefore multiplied by two
    digits of the position, `(position mod 2048) theta + (position div 2048) ((2048
    theta) mod 2 pi)`: off by less than 1e-3 up to there, the plain product up to
    position 2047. Frequencies that are data are always multiplied plainly.
    """
    if not isinstance(frequency, np.ndarray):
        axes = frequency.shape[:-1] or (1, 1)
        frequency = frequency.reshape(*axes, 1, frequency.shape[-1])
        return position.astype(jnp.float32)[:, :, None, None] * frequency
    turn = np.fmod(DIGIT * frequency, 2 * np.pi)
    # Towards zero, so that small negative positions have small phases too.
    rest = jnp.fmod(position, DIGIT)
    parts = ((rest, frequency), ((position - rest) // DIGIT, turn))
    low, high = (
        digit.astype(jnp.float32)[:, :, None, None]
        * jnp.asarray(constant, jnp.float32)[None, None, None]
        for digit, constant in parts
    )
    return high + low


def rotate(
    x: Float[Array, "b t h d"],
    position: Num[Array, "b t"],
    frequency: Frequencies,
    *,
    layout: str = "halves",
    amplitude: float | Float[Array, "b t"] | Float[Array, "b t f"] = 1.0,
) -> Float[Array, "b t h d"]:
    """Turns pairs of features by `position * frequency`.

    Args:
      x: queries or keys; the first `2 f` features turn, the rest pass through.
      position: positions, integers or floats.
      frequency: radians a position, see `phases`.
      layout: which features make a pair: "halves" is `(i, i + f)` (GPT-NeoX, Llama in
        Hugging Face's form), "interleaved" is `(2i, 2i + 1)` (the paper, GPT-J).
      amplitude: multiplies cosine and sine alike, so scores grow by its square: one
        number, one a token, or one a token and plane. What passes through is as it was.

    Raises:
      ValueError: more features turn than there are, or an unknown layout.
    """
    turned = 2 * frequency.shape[-1]
    if turned > x.shape[-1]:
        raise ValueError(f"{turned} features are to turn, but there are {x.shape[-1]}")
    # In float32 whatever x is: bfloat16 holds no odd number past 256.
    phase = phases(position, frequency)
    if not isinstance(amplitude, float):
        amplitude = amplitude.reshape(*amplitude.shape[:2], 1, -1)
    cosine, sine = amplitude * jnp.cos(phase), amplitude * jnp.sin(phase)
    # Kept apart from the products: XLA would compute both again for every head.
    cosine, sine = jax.lax.optimization_barrier((cosine, sine))
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

    `q_i . k_j = Re sum_c (q_c k_c*) e^(i (m - n) theta_c)` over planes `c`, for a query
    at `m` and a key at `n` (Su et al. 2021, equation 16).

    Attributes:
      base: `theta` of the frequencies `base^(-2i/d)`.
      layout: "halves" or "interleaved", see `rotate`. Either is right for weights that
        were trained with it; weights of the other need their features permuted.
      fraction: part of each head's features that turns (partial rotary: GPT-NeoX 0.25,
        Phi-2 0.4). They have the whole range of frequencies among themselves.
      p: part of the frequencies that is kept, the highest; the rest is 0, so that their
        planes tell content only (p-RoPE, Barbero et al. 2024). Unlike
        `fraction`, the kept ones stay as they are and the lowest are gone.
      scaling: how frequencies are stretched past the training length, see
        `RopeScaling`; also a dict of its fields. None for not at all.

    Raises:
      ValueError: a base, fraction or p out of range, or a scaling that is none.
    """

    base: float = 10000.0
    layout: str = "halves"
    fraction: float = 1.0
    p: float = 1.0
    scaling: RopeScaling | Mapping[str, Any] | None = None

    def __post_init__(self):
        if not (self.base > 0 and 0 < self.fraction <= 1 and 0 < self.p <= 1):
            raise ValueError(
                f"base must be positive and fraction and p in (0, 1], "
                f"got {self.base}, {self.fraction} and {self.p}"
            )
        if self.scaling is not None and not isinstance(self.scaling, RopeScaling):
            object.__setattr__(self, "scaling", scaling_of(self.scaling))

    @property
    def length_dependent(self) -> bool:
        return self.scaling is not None and self.scaling.length_dependent

    @property
    def turns_once(self) -> bool:
        return not self.length_dependent

    @property
    def invariant(self) -> bool:
        free = self.scaling is None or not self.scaling.start_tokens
        return free and not self.length_dependent

    def frequencies(
        self, head_dim: int, length: Num[Array, "*n"] | None = None
    ) -> Float[np.ndarray, " f"] | Float[Array, "*n f"]:
        """Returns the frequencies of the features that turn, constants or by length.

        Args:
          head_dim: features of a head, of which `fraction` turn.
          length: of each token's document, for scalings that depend on it.
        """
        dim = int(head_dim * self.fraction)
        if self.scaling is None:
            frequency = inverse_frequencies(dim, self.base)
        else:
            frequency = self.scaling.frequencies(dim, self.base, length)
        kept = np.arange(dim // 2) < int(self.p * dim / 2)
        return frequency * kept.reshape((1,) * (frequency.ndim - 1) + (-1,))

    def prepare(
        self,
        params: Params,
        features: Float[Array, "b k h f"] | None,
        q_at: Where,
        k_at: Where,
        layout: Layout | None,
    ):
        if not self.length_dependent:
            return params, None, None
        # The length is data: keys in memory are not turned yet, so all of a document
        # turns by one table, however it came in.
        q_length, k_length = document_lengths(q_at, k_at)
        lengths = {"query_length": q_length, "key_length": k_length}
        return params | lengths, None, None

    def query(
        self, params: Params, q: Float[Array, "b t h d"], at: Where
    ) -> Float[Array, "b t h d"]:
        return self._turn(q, at, params.get("query_length"))

    def key(
        self, params: Params, k: Float[Array, "b t h d"], at: Where
    ) -> Float[Array, "b t h d"]:
        return self._turn(k, at, params.get("key_length"))

    def _turn(self, x, at: Where, length):
        if self.length_dependent and length is None:
            raise ValueError(
                f"rope scaling {self.scaling.kind!r} depends on lengths: give "
                "the hooks the params that `prepare` returns"
            )
        head_dim = x.shape[-1]
        frequency = self.frequencies(head_dim, length)
        if self.scaling is None:
            return rotate(x, at.position, frequency, layout=self.layout)
        if self.scaling.start_tokens:
            plain = dataclasses.replace(self, scaling=None).frequencies(head_dim)
            start = at.position[:, :, None] < self.scaling.start_tokens
            if frequency.ndim == 1:
                frequency = frequency[None, None]
            frequency = jnp.where(start, plain[None, None], frequency)
            frequency = frequency.astype(jnp.float32)
        amplitude = self.scaling.amplitude(length)
        return rotate(
            x, at.position, frequency, layout=self.layout, amplitude=amplitude
        )

    def past_training(self) -> str:
        if self.scaling is not None:
            return self.scaling.past_training()
        return "Defined at every distance, but slow phases past training are new."
