"""Masks: which distances may attend, as functions of two `Where`s.

A mask is a small frozen dataclass, so that it can be a static argument of a compiled
function. It is asked in two ways: elementwise, on positions (`mask(q_at, k_at)`), and
over a range of distances when a program is compiled (`mask.keeps`), which is how
blockwise attention leaves out the blocks that nothing may attend to.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Num

from relpos_jax.where import Where


def distances(q_at: Where, k_at: Where) -> Num[Array, "b q k"]:
    """Returns query position minus key position; positive looks back."""
    return q_at.position[:, :, None] - k_at.position[:, None, :]


@dataclasses.dataclass(frozen=True)
class Bidirectional:
    """Every query attends to every key of its document."""

    def allows(self, distance: Num[Array, "*shape"]) -> Bool[Array, "*shape"]:
        """Returns whether a pair at this distance may attend, elementwise."""
        return jnp.ones(distance.shape, bool)

    def keeps(self, low: int | float, high: int | float) -> bool:
        """Returns whether any distance in `low..high` (inclusive) may attend."""
        return True

    def __call__(self, q_at: Where, k_at: Where) -> Bool[Array, "b q k"]:
        """Returns which pairs attend: this mask's rule, within one document."""
        same = q_at.segment[:, :, None] == k_at.segment[:, None, :]
        real = (q_at.segment != 0)[:, :, None]
        return self.allows(distances(q_at, k_at)) & same & real


@dataclasses.dataclass(frozen=True)
class Causal(Bidirectional):
    """A query attends to itself and to what stands before it."""

    def allows(self, distance: Num[Array, "*shape"]) -> Bool[Array, "*shape"]:
        return distance >= 0

    def keeps(self, low: int | float, high: int | float) -> bool:
        return high >= 0


@dataclasses.dataclass(frozen=True)
class Window(Bidirectional):
    """A sliding window: `width` keys, the query's own position among them.

    Causal: distances `0 .. width - 1`. Otherwise both sides: `|distance| < width`.
    """

    width: int
    causal: bool = True

    def __post_init__(self):
        if self.width < 1:
            raise ValueError(f"a window must be at least 1 wide, got {self.width}")

    def allows(self, distance: Num[Array, "*shape"]) -> Bool[Array, "*shape"]:
        near = distance < self.width
        return near & (distance >= 0 if self.causal else distance > -self.width)

    def keeps(self, low: int | float, high: int | float) -> bool:
        lowest = 0 if self.causal else 1 - self.width
        return high >= lowest and low < self.width


Mask = Bidirectional  # any mask: the others are subclasses
