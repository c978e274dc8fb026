"""Other distances beyond a window, for models trained with rotary embeddings.

ReRoPE (Su 2023, kexue.fm/archives/9708 and the released code) and self-extend (Jin et
al. 2024) change no weight: pairs nearer than a window are scored as in training, all
others as if they stood at a distance that training has seen.
"""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from relpos_jax.positional.protocol import Block, Params, PositionEncoding
from relpos_jax.positional.rope import rotate
from relpos_jax.positional.rope_frequencies import inverse_frequencies
from relpos_jax.where import Where


def rectified_distance(
    distance: Num[Array, "*n"], window: int, leak: float = 0.0
) -> Num[Array, "*n"]:
    """Returns the distance up to `window`, past it `window + leak (distance - window)`.

    `leak` is `1/k` of Leaky ReRoPE; 0 is ReRoPE.
    """
    past = window + leak * (distance - window)
    return jnp.where(distance < window, distance, past)


def grouped_distance(
    q_position: Num[Array, "*n"],
    k_position: Num[Array, "*n"],
    window: int,
    group: int,
) -> Num[Array, "*n"]:
    """Returns the distance below `window`, else of groups, shifted to join it.

    `floor(m / G) - floor(n / G) + w - floor(w / G)` (Jin et al. 2024, section 3).
    """
    shift = window - window // group
    far = q_position // group - k_position // group + shift
    distance = q_position - k_position
    return jnp.where(distance < window, distance, far)


def log_scale(position: Num[Array, "b t"], length: int) -> Float[Array, "b t"]:
    """Returns `max(1, ln(position + 1) / ln(length))`, float32."""
    grown = jnp.log(jnp.maximum(position.astype(jnp.float32), 0.0) + 1.0)
    return jnp.maximum(grown / math.log(length), 1.0)


@dataclasses.dataclass(frozen=True)
class _TwoRanges(PositionEncoding):
    """Rotary scores within a window, and others, given by far positions, beyond it."""

    causal_only: ClassVar[bool] = True

    window: int = 512
    base: float = 10000.0
    layout: str = "halves"
    training_length: int | None = None

    def __post_init__(self):
        if self.window < 1 or self.base <= 0:
            raise ValueError(
                f"window and base must be positive, got {self.window} and {self.base}"
            )
        if self.training_length is not None and self.training_length < 2:
            raise ValueError(
                f"training_length must be at least 2, got {self.training_length}"
            )

    def far_positions(
        self, q_position: Num[Array, "b q"], k_position: Num[Array, "b k"]
    ) -> tuple[Num[Array, "b q"], Num[Array, "b k"]]:
        """Returns positions whose differences are the distances beyond the window."""
        raise NotImplementedError

    def query(
        self, params: Params, q: Float[Array, "b t h d"], at: Where
    ) -> Float[Array, "b t h d"]:
        return self._turn(q, at.position, self._gain(at))

    def key(
        self, params: Params, k: Float[Array, "b t h d"], at: Where
    ) -> Float[Array, "b t h d"]:
        return self._turn(k, at.position)

    def _gain(self, at: Where):
        if self.training_length is None:
            return 1.0
        return log_scale(at.position, self.training_length)

    def _turn(self, x, position, amplitude=1.0):
        frequency = inverse_frequencies(x.shape[-1], self.base)
        return rotate(x, position, frequency, layout=self.layout, amplitude=amplitude)

    def score(self, params: Params, block: Block) -> Float[Array, "b h q k"]:
        q, k = jnp.swapaxes(block.q, 1, 2), jnp.swapaxes(block.k, 1, 2)
        q_far, k_far = self.far_positions(block.q_at.position, block.k_at.position)
        far = jnp.einsum(
            "bqhd,bkhd->bhqk",
            self._turn(q, q_far, self._gain(block.q_at)),
            self._turn(k, k_far),
            preferred_element_type=jnp.float32,
        )
        near = (block.distance < self.window)[:, None]
        return jnp.where(near, block.logits, block.scale * far)


@dataclasses.dataclass(frozen=True)
class ReRope(_TwoRanges):
    """Scores pairs past the window as if they stood at its edge.

    `q_m R(min(m - n, w)) k_n`, causal. The released code forms both products for all
    pairs and selects, as we do: twice the query-key products of RoPE. It scales queries
    by `log_scale` with its training length as well, which is an option here, off by
    default as in the article's definition.

    Attributes:
      window: `w`; must be within the training length.
      base, layout: of the rotation, see `Rope`.
      training_length: scale queries by `max(1, ln(m + 1) / ln(training_length))`; None
        for not. Scores then depend on more than distances.
      leak: how much of the distance past the window counts: `1/k` of Leaky ReRoPE.

    Raises:
      ValueError: a field out of range.
    """

    leak: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.leak <= 1:
            raise ValueError(f"leak must be in [0, 1], got {self.leak}")

    @property
    def invariant(self) -> bool:
        return self.training_length is None

    def far_positions(
        self, q_position: Num[Array, "b q"], k_position: Num[Array, "b k"]
    ) -> tuple[Num[Array, "b q"], Num[Array, "b k"]]:
        shift = self.window * (1 - self.leak)
        q_position, k_position = (
            self.leak * x.astype(jnp.float32) for x in (q_position, k_position)
        )
        return q_position + shift, k_position

    def past_training(self) -> str:
        if self.leak:
            return f"Distances past {self.window} count {self.leak} each."
        return f"All distances from {self.window} on are scored as {self.window}."


@dataclasses.dataclass(frozen=True)
class SelfExtend(_TwoRanges):
    """Scores pairs past the window by the distance of their groups.

    `q_m R(floor(m/G) - floor(n/G) + w - floor(w/G)) k_n` from distance `w` on, causal
    (Jin et al. 2024, section 3). Groups start at multiples of `G`, so scores
    depend on more than distances. As in ReRoPE, both products are formed.

    Not as in the released code: it leaves out the shift while all queries stand before
    `w`, where no pair is that far, so nothing differs.

    Attributes:
      window: `w`, the neighbour window.
      base, layout: of the rotation, see `Rope`.
      training_length: scale queries as `ReRope` does (the code's `scale_base`); None
        for not, as in the paper.
      group: `G`, positions a group.

    Raises:
      ValueError: a field out of range.
    """

    invariant: ClassVar[bool] = False

    group: int = 8

    def __post_init__(self):
        super().__post_init__()
        if self.group < 1:
            raise ValueError(f"group must be at least 1, got {self.group}")

    def far_positions(
        self, q_position: Num[Array, "b q"], k_position: Num[Array, "b k"]
    ) -> tuple[Num[Array, "b q"], Num[Array, "b k"]]:
        shift = self.window - self.window // self.group
        return q_position // self.group + shift, k_position // self.group

    def past_training(self) -> str:
        return f"Distances past {self.window} are told apart in groups of {self.group}."
