"""Patterns of a near part and picked positions: Longformer's, and the fixed one."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Num

from relpos_jax.masks import Bidirectional, Causal, Strip, Window


@dataclasses.dataclass(frozen=True)
class Pattern(Bidirectional):
    """A mask that leaves keys out between those that attend."""

    sparse: ClassVar[bool] = True


def positive(**sizes: int) -> None:
    """Raises ValueError for a size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


@dataclasses.dataclass(frozen=True)
class Part(Bidirectional):
    """One of the disjoint parts of a pattern with a near part and picked tokens.

    Parts: "near"; "columns", picked keys that are not near; "rows", what picked
    queries see beyond both; "random", what is left of a `BigBird`.
    """

    whole: "Picking"
    part: str

    @property
    def causal(self) -> bool:
        return self.whole.causal

    def pairs(self, q: Num[Array, "b q #k"], k: Num[Array, "b #q k"]):
        whole = self.whole
        near = whole.near(q, k)
        if self.part == "near":
            return near & whole.order(q, k)
        column, row = whole.picks(k), whole.picks(q) & whole.rows
        if self.part == "columns":
            return column & ~near & whole.order(q, k)
        if self.part == "rows":
            return row & ~column & ~near & whole.order(q, k)
        return whole.drawn(q, k) & ~(near | column | row) & whole.order(q, k)

    def keeps(self, low, high):
        seen = high >= 0 if self.whole.causal else True
        if self.part == "near":
            return seen & self.whole.keeps_near(low, high)
        return seen

    def touches(self, q_low, q_high, k_low, k_high):
        found = self.keeps(q_low - k_high, q_high - k_low)
        if self.part == "random":
            found &= self.whole.touches_drawn(q_low, q_high, k_low, k_high)
        return found

    def picks(self, position: Num[Array, "*shape"]) -> Bool[Array, "*shape"]:
        return self.whole.picks(position)


@dataclasses.dataclass(frozen=True)
class Picking(Pattern):
    """A near part, and picked positions that everything sees.

    Class attributes:
      rows: the picked positions see everything, too.
    """

    rows: ClassVar[bool] = True

    def order(self, q, k) -> Bool[Array, "b q k"]:
        """Returns which pairs the pattern's direction allows."""
        return (Causal() if self.causal else Bidirectional()).allows(q - k)

    def near(self, q, k) -> Bool[Array, "b q k"]:
        """Returns which pairs attend since they stand close together."""
        raise NotImplementedError

    def keeps_near(self, low, high):
        """Returns whether any distance in the range may be near."""
        raise NotImplementedError

    def drawn(self, q, k) -> Bool[Array, "b q k"]:
        """Returns which pairs attend by chance."""
        return jnp.zeros(jnp.broadcast_shapes(q.shape, k.shape), bool)

    def pairs(self, q: Num[Array, "b q #k"], k: Num[Array, "b #q k"]):
        seen = self.near(q, k) | self.picks(k) | self.drawn(q, k)
        if self.rows:
            seen |= self.picks(q)
        return seen & self.order(q, k)

    def keeps(self, low, high):
        return high >= 0 if self.causal else True

    def strips(self) -> tuple[Strip, ...]:
        strips = (
            Strip(Part(self, "near")),
            Strip(Part(self, "columns"), gather="keys"),
        )
        if self.rows:
            strips += (Strip(Part(self, "rows"), gather="queries"),)
        return strips


@dataclasses.dataclass(frozen=True)
class WindowGlobal(Picking):
    """A sliding window, and global positions that see and are seen by all (Longformer).

    Global tokens use the projections of all others here; for Longformer's own ones, and
    for global tokens that differ from text to text, see `attention.longformer`. Costs
    O(n (width + positions)) (Beltagy et al. 2020, section 3.1).

    Attributes:
      width: keys on a side, the query's own position among them, as of a `Window`.
      positions: the global positions of every document.
      causal: without what stands behind the query, globals included.
    """

    width: int
    positions: tuple[int, ...]
    causal: bool = True

    def __post_init__(self):
        positive(width=self.width)
        object.__setattr__(self, "positions", tuple(self.positions))

    def near(self, q, k):
        return Window(self.width, causal=False).allows(q - k)

    def keeps_near(self, low, high):
        return Window(self.width, causal=False).keeps(low, high)

    def picks(self, position: Num[Array, "*shape"]) -> Bool[Array, "*shape"]:
        return among(position, self.positions)


@dataclasses.dataclass(frozen=True)
class Fixed(Picking):
    """The keys of the query's own block, and the last `summary` ones of every block.

    Both heads of the fixed pattern of Child et al. 2019 (section 4) in one; causal.
    With `block` near the root of the length it costs O(n sqrt n). Blocks are counted
    from position 0 of the document.

    Attributes:
      block: the paper's `l`, positions a block.
      summary: the paper's `c`, positions a block that later blocks see.
    """

    block: int
    summary: int

    causal = True
    rows: ClassVar[bool] = False

    def __post_init__(self):
        positive(block=self.block, summary=self.summary)
        if self.summary > self.block:
            raise ValueError(
                f"a block of {self.block} positions has no {self.summary} last ones"
            )

    def near(self, q, k):
        return q // self.block == k // self.block

    def keeps_near(self, low, high):
        return (high > -self.block) & (low < self.block)

    def picks(self, position: Num[Array, "*shape"]) -> Bool[Array, "*shape"]:
        return position % self.block >= self.block - self.summary


def among(x: Num[Array, "*n"], values: tuple[int, ...]) -> Bool[Array, "*n"]:
    """Returns which elements are one of the values."""
    if not values:
        return jnp.zeros(x.shape, bool)
    return jnp.isin(x, jnp.asarray(values, x.dtype))
