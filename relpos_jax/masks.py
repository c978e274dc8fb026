"""Masks: which pairs may attend, as functions of two `Where`s.

A mask is a small frozen dataclass, so that it can be a static argument of a compiled
function. It is asked in two ways: elementwise, on positions (`mask(q_at, k_at)`), and
over a range of distances when a program is compiled (`mask.keeps`), which is how
blockwise attention leaves out the blocks that nothing may attend to. Sparse patterns
are masks too: see `relpos_jax.attention.patterns`.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Num

from relpos_jax.where import Where


def distances(q_at: Where, k_at: Where) -> Num[Array, "b q k"]:
    """Returns query position minus key position; positive looks back."""
    return q_at.position[:, :, None] - k_at.position[:, None, :]


class Strip(NamedTuple):
    """A part of a mask, as blockwise attention takes it up.

    The parts of a mask are disjoint, and together they are the mask; what they see is
    put together by each row's log-sum-exp.

    Attributes:
      mask: which pairs are in this part.
      fold: every pair is this many positions apart, or a multiple of it: tokens are
        dealt to as many rows, and whole rows attend. Needs a layout of unit spacing.
      gather: "keys" or "queries", those for which `mask.picks` is true, are brought
        together, and all others left out. "" leaves all where they stand.
      search: find the blocks that hold a pair from the positions, when the program
        runs; without it they are known from distances when it is compiled.
      block: largest size of a block, where what is in this part is small; 0 for any.
    """

    mask: "Bidirectional"
    fold: int = 1
    gather: str = ""
    search: bool = False
    block: int = 0


@dataclasses.dataclass(frozen=True)
class Bidirectional:
    """Every query attends to every key of its document.

    Class attributes:
      causal: whether a query sees nothing behind it.
      sparse: whether it leaves out keys between those that attend.
    """

    causal = False  # not annotated: masks that have it as a field order it themselves
    sparse: ClassVar[bool] = False

    def allows(self, distance: Num[Array, "*shape"]) -> Bool[Array, "*shape"]:
        """Returns whether a pair at this distance may attend, elementwise."""
        return jnp.ones(distance.shape, bool)

    def keeps(self, low: int | float, high: int | float) -> bool:
        """Returns whether any distance in `low..high` (inclusive) may attend.

        May be true of more, never of less. Also for arrays, elementwise.
        """
        return True

    def pairs(
        self, q: Num[Array, "b q #k"], k: Num[Array, "b #q k"]
    ) -> Bool[Array, "b q k"]:
        """Returns which pairs of positions of one document attend."""
        return self.allows(q - k)

    def touches(self, q_low, q_high, k_low, k_high):
        """Returns whether any pair of positions in these ranges may attend.

        Of arrays, elementwise; ends are inclusive. May be true of more, never of less.
        """
        return self.keeps(q_low - k_high, q_high - k_low)

    def picks(self, position: Num[Array, "*shape"]) -> Bool[Array, "*shape"]:
        """Returns which positions a strip gathers."""
        return jnp.ones(position.shape, bool)

    def strips(self) -> tuple[Strip, ...]:
        """Returns the disjoint parts in which blockwise attention takes the mask up."""
        return (Strip(self),)

    @property
    def reach(self) -> int | None:
        """How many keys back the farthest one is, the query's own being 1; or None."""
        return None

    def __call__(self, q_at: Where, k_at: Where) -> Bool[Array, "b q k"]:
        """Returns which pairs attend: this mask's rule, within one document."""
        same = q_at.segment[:, :, None] == k_at.segment[:, None, :]
        real = (q_at.segment != 0)[:, :, None]
        pairs = self.pairs(q_at.position[:, :, None], k_at.position[:, None, :])
        return pairs & same & real


@dataclasses.dataclass(frozen=True)
class Causal(Bidirectional):
    """A query attends to itself and to what stands before it."""

    causal = True

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
        return (high >= lowest) & (low < self.width)

    @property
    def reach(self) -> int:
        return self.width


Mask = Bidirectional  # any mask: the others are subclasses
