"""BigBird: near, global and random blocks (Zaheer et al. 2020)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Num

from relpos_jax.attention.picked import Part, Picking, among, positive
from relpos_jax.masks import Strip


@dataclasses.dataclass(frozen=True)
class BigBird(Picking):
    """Blocks: near ones, global ones, and random ones (Zaheer et al. 2020, section 2).

    Blocks are counted from position 0 of the document. Costs O(n), for a fixed number
    of global blocks.

    The random key blocks of a query block are drawn from its number and the seed alone,
    so that they do not change while a text grows: one from each of `random` equal
    parts of the blocks that there are, which are those before it if causal. Where one
    is near or global besides, nothing is drawn in its place. The paper draws from the
    blocks that are neither.

    Attributes:
      block: positions a block.
      window: near blocks, the query's own in the middle; odd. If causal, those of them
        that are not behind it.
      random: random key blocks for each query block.
      global_blocks: numbers of the blocks that see and are seen by all.
      seed: of the random blocks; give layers different ones by a pattern each.
      causal: without what stands behind the query.
      blocks: blocks of the longest text, of which random ones are drawn if not causal.
      table: the random key blocks of every query block, instead of drawing them; query
        blocks past its end have none.
    """

    block: int
    window: int = 3
    random: int = 3
    global_blocks: tuple[int, ...] = (0, 1)
    seed: int = 0
    causal: bool = True
    blocks: int | None = None
    table: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self):
        positive(block=self.block, window=self.window)
        object.__setattr__(self, "global_blocks", tuple(self.global_blocks))
        if self.window % 2 == 0:
            raise ValueError(f"window must be odd, got {self.window} blocks")
        if self.random < 0:
            raise ValueError(f"random must not be negative, got {self.random}")
        if self.table is not None:
            rows = tuple(tuple(row) for row in self.table)
            object.__setattr__(self, "table", rows)
            if any(len(row) != self.random for row in rows):
                raise ValueError(
                    f"every row of table must hold random = {self.random} blocks"
                )
        elif self.random and not self.causal and self.blocks is None:
            raise ValueError(
                "random blocks that may stand behind the query need to know how many "
                "blocks the longest text has: set blocks"
            )

    def near(self, q, k):
        return abs(q // self.block - k // self.block) <= self.window // 2

    def keeps_near(self, low, high):
        end = (self.window // 2 + 1) * self.block
        return (high > -end) & (low < end)

    def picks(self, position: Num[Array, "*shape"]) -> Bool[Array, "*shape"]:
        return among(position // self.block, self.global_blocks)

    def random_block(self, x: Num[Array, "*n"], number: int) -> Int[Array, "*n"]:
        """Returns a random key block of each query block `x`; -1 where there is none.

        Args:
          x: numbers of query blocks.
          number: which of the `random` ones.
        """
        x = x.astype(jnp.int32)
        if self.table is not None:
            column = jnp.asarray([row[number] for row in self.table], jnp.int32)
            known = (x >= 0) & (x < len(column))
            return jnp.where(known, column[jnp.clip(x, 0, len(column) - 1)], -1)
        there = jnp.maximum(x, 0) if self.causal else jnp.full_like(x, self.blocks)
        share, rest = there // self.random, there % self.random
        # Parts of equal size, the first `rest` of them one larger.
        first = number * share + jnp.minimum(number, rest)
        size = share + (number < rest)
        bits = _mix(x, self.seed, number)
        chosen = (bits % jnp.maximum(size, 1).astype(jnp.uint32)).astype(jnp.int32)
        return jnp.where(size > 0, first + chosen, -1)

    def drawn(self, q, k):
        q, k = q // self.block, k // self.block
        found = jnp.zeros(jnp.broadcast_shapes(q.shape, k.shape), bool)
        for number in range(self.random):
            found |= self.random_block(q, number) == k
        return found

    def touches_drawn(self, q_low, q_high, k_low, k_high):
        """Returns whether a range of queries has a random block in one of keys."""
        first, last, low, high = (
            x // self.block for x in (q_low, q_high, k_low, k_high)
        )
        found = last - first >= 4  # too many to look at each
        for step in range(4):
            for number in range(self.random):
                key = self.random_block(first + step, number)
                found |= (first + step <= last) & (low <= key) & (key <= high)
        return found

    def strips(self) -> tuple[Strip, ...]:
        strips = super().strips()
        if self.random:
            part = Part(self, "random")
            strips += (Strip(part, search=True, block=self.block),)
        return strips


def _mix(x: Int[Array, "*n"], *numbers: int):
    """Returns 32 bits that look random, of whole numbers (MurmurHash3's last step)."""
    bits = x.astype(jnp.uint32)
    for number in numbers:
        bits = bits * jnp.uint32(0x9E3779B1) + jnp.uint32(number % 2**32)
        bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
        bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
        bits = bits ^ (bits >> 16)
    return bits
