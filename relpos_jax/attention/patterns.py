"""Sparse patterns: masks whose blocks are few, so that attention costs less than n^2.

A pattern is a mask of positions *within a document*, so that packed documents,
padding, memory and caches need no case of their own, and decoding sees what the full
pass saw. Every pattern names its parts (`Mask.strips`); blockwise attention runs each
over the blocks that hold something, and `attend`'s dense path, which takes the mask
pair by pair, is the oracle. See docs/sparse_attention.md for pictures.
"""

import dataclasses

from jaxtyping import Array, Bool, Num

from relpos_jax.attention.big_bird import BigBird
from relpos_jax.attention.picked import Fixed, Pattern, WindowGlobal, positive
from relpos_jax.masks import Bidirectional, Mask, Strip, Window
from relpos_jax.positional.protocol import PositionEncoding


@dataclasses.dataclass(frozen=True)
class Dilated(Pattern):
    """A window with gaps: distances `0, dilation, 2 dilation, ...` (Longformer).

    Costs O(n width), whatever the dilation (Beltagy et al. 2020, section 3.1).

    Attributes:
      width: keys on a side, the query's own position among them.
      dilation: distance of neighbouring keys; 1 is `Window(width)`.
      causal: look back only; otherwise to both sides.
    """

    width: int
    dilation: int
    causal: bool = True

    def __post_init__(self):
        positive(width=self.width, dilation=self.dilation)

    def allows(self, distance: Num[Array, "*shape"]) -> Bool[Array, "*shape"]:
        return (distance % self.dilation == 0) & self._wide.allows(distance)

    def keeps(self, low, high):
        return self._wide.keeps(low, high)

    @property
    def _wide(self) -> Window:
        return Window(self.reach, self.causal)

    @property
    def reach(self) -> int:
        return (self.width - 1) * self.dilation + 1

    def strips(self) -> tuple[Strip, ...]:
        return (Strip(self, fold=self.dilation),)


@dataclasses.dataclass(frozen=True)
class Strided(Pattern):
    """The last `stride` keys, and every key a multiple of `stride` away.

    Both heads of the strided pattern of Child et al. 2019 (section 4) in one. With
    `stride` near the root of the length it costs O(n sqrt n).

    Attributes:
      stride: the paper's `l`.
      causal: look back only; otherwise to both sides.
    """

    stride: int
    causal: bool = True

    def __post_init__(self):
        positive(stride=self.stride)

    def allows(self, distance: Num[Array, "*shape"]) -> Bool[Array, "*shape"]:
        near, far = (strip.mask.allows(distance) for strip in self.strips())
        return near | far

    def keeps(self, low, high):
        return high >= 0 if self.causal else True

    def strips(self) -> tuple[Strip, ...]:
        far = _Multiples(self.stride, self.causal)
        return Strip(Window(self.stride, self.causal)), Strip(far, fold=self.stride)


@dataclasses.dataclass(frozen=True)
class _Multiples(Bidirectional):
    """Distances `stride, 2 stride, ...`, and their negatives."""

    stride: int
    causal: bool

    def allows(self, distance: Num[Array, "*shape"]) -> Bool[Array, "*shape"]:
        far = distance if self.causal else abs(distance)
        return (distance % self.stride == 0) & (far >= self.stride)

    def keeps(self, low, high):
        back = high >= self.stride
        return back if self.causal else back | (low <= -self.stride)


PATTERNS: dict[str, type[Mask]] = {
    "window": Window,
    "dilated": Dilated,
    "window_global": WindowGlobal,
    "big_bird": BigBird,
    "strided": Strided,
    "fixed": Fixed,
}

# Pairs of encoding and mask that make no sense, and why.
SENSELESS = (
    (
        lambda encoding, mask: encoding.whole_rows and mask.sparse,
        "it counts over all keys between query and key, of which the pattern leaves "
        "some out, and needs every key of a query at once, so nothing would be saved",
    ),
    (
        lambda encoding, mask: encoding.causal_only and not mask.causal,
        "it is defined for keys at or before the query only, and the mask lets later "
        "ones attend",
    ),
)


def check_sense(encoding: PositionEncoding, mask: Mask) -> None:
    """Raises ValueError, with the reason, if the two cannot be used together."""
    for senseless, reason in SENSELESS:
        if senseless(encoding, mask):
            raise ValueError(f"{encoding} cannot be used with {mask}: {reason}")
