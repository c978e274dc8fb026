"""Longformer: global tokens have projections of their own (Beltagy et al. 2020)."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from relpos_jax.attention.attend import attend
from relpos_jax.attention.picked import Pattern, WindowGlobal
from relpos_jax.masks import Strip
from relpos_jax.positional.protocol import Params, PositionEncoding
from relpos_jax.where import Where


class Projected(NamedTuple):
    """Queries `[b q h d]`, and keys and values `[b k h d]`, before any rotation."""

    q: Float[Array, "b q h d"]
    k: Float[Array, "b k h d"]
    v: Float[Array, "b k h e"]


@dataclasses.dataclass(frozen=True)
class LocalQueries(WindowGlobal):
    """A `WindowGlobal` of which the global queries' own rows are left out."""

    rows: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class GlobalQueries(Pattern):
    """The global queries of a `WindowGlobal` alone: they see all."""

    whole: WindowGlobal

    @property
    def causal(self) -> bool:
        return self.whole.causal

    def pairs(self, q, k):
        return self.whole.picks(q) & self.whole.order(q, k)

    def keeps(self, low, high):
        return self.whole.keeps(low, high)

    def picks(self, position):
        return self.whole.picks(position)

    def strips(self) -> tuple[Strip, ...]:
        return (Strip(self, gather="queries"),)


def attend_longformer(
    encoding: PositionEncoding,
    params: Params,
    local: Projected,
    wide: Projected,
    q_at: Where,
    k_at: Where,
    *,
    mask: WindowGlobal,
    **options,
) -> Float[Array, "b q h e"]:
    """Returns Longformer's attention (Beltagy et al. 2020, section 3.1).

    A token sees its window and the global tokens, all in one softmax, by the local
    projections. A global token's row is another one: it sees every token, by the wide
    projections of its query and of all keys and values.

    Args:
      encoding, params: as for `attend`, the same for both.
      local: the projections of every token.
      wide: the global projections of every token; of the queries, those of global
        tokens are read.
      q_at, k_at: where queries and keys stand.
      mask: the window, and the global positions.
      **options: further ones of `attend`.

    Raises:
      ValueError: see `attend`.
    """
    near = LocalQueries(mask.width, mask.positions, mask.causal)
    out = attend(encoding, params, *local, q_at, k_at, mask=near, **options)
    if not mask.positions:
        return out
    rows = GlobalQueries(mask)
    seen = attend(encoding, params, *wide, q_at, k_at, mask=rows, **options)
    picked = mask.picks(q_at.position)[:, :, None, None]
    return jnp.where(picked, seen, out)
