"""xPos: rotary embeddings whose planes fade with distance (Sun et al. 2022)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from relpos_jax.positional.protocol import Block, Params, PositionEncoding
from relpos_jax.positional.rope import rotate
from relpos_jax.positional.rope_frequencies import inverse_frequencies
from relpos_jax.relative import Layout
from relpos_jax.where import Where

# Factors of one token stay within exp(-50) .. exp(50), so that products fit in float32.
LARGEST = 50.0


def xpos_rates(dim: int, gamma: float = 0.4) -> Float[np.ndarray, " f"]:
    """Returns `zeta_i = (2i/d + gamma) / (1 + gamma)`, one a plane (algorithm 1).

    Raises:
      ValueError: `dim` is odd or less than 2, or gamma is not positive.
    """
    if dim < 2 or dim % 2 or gamma <= 0:
        raise ValueError(
            f"planes need an even dim and gamma must be positive, got {dim} and {gamma}"
        )
    return (np.arange(0, dim, 2) / dim + gamma) / (1 + gamma)


def xpos_scales(
    offset: Num[Array, "b t"],
    dim: int,
    scale_base: float = 512.0,
    gamma: float = 0.4,
) -> Float[Array, "b t f"]:
    """Returns `zeta_i^(offset / scale_base)`, at most exp(50), float32.

    Queries take their position minus a centre, keys the centre minus theirs: together
    `zeta_i^(distance / scale_base)`, whatever the centre.
    """
    rates = jnp.asarray(np.log(xpos_rates(dim, gamma)) / scale_base, jnp.float32)
    power = offset.astype(jnp.float32)[:, :, None] * rates[None, None, :]
    return jnp.exp(jnp.minimum(power, LARGEST))


@dataclasses.dataclass(frozen=True)
class Xpos(PositionEncoding):
    """Rotates queries and keys, and lets plane `i` fade as `zeta_i^(distance / B)`.

    `q_m . k_n = sum_i zeta_i^((m - n) / B) Re(q_i k_i* e^(i (m - n) theta_i))`, for
    causal attention: the factor grows without bound for keys ahead of the query.

    Not as in the paper: the exponents `m / B` and `-n / B` count from a centre, which
    the score does not depend on. The released codes put it in the middle of a call's
    tokens, so keys kept from a call of another length are wrong; keys here are kept
    unscaled. Our centre is the middle of a call's queries: keys far behind it fade to
    0, as they should, so memories may be of any length. Blocks with queries farther
    than `reach` from it (in a call over more than 40,000 positions at `B` 512) are
    scored query by query instead, exactly but slowly. float16 cannot hold the factors,
    so such inputs become float32.

    Attributes:
      scale_base: `B`, positions after which a plane has faded to `zeta_i`.
      gamma: how strongly the fastest plane fades, to `gamma / (1 + gamma)`.
      base, layout: of the rotation, see `Rope`; released codes interleave.

    Raises:
      ValueError: a scale base, gamma or base that is not positive.
    """

    causal_only: ClassVar[bool] = True

    scale_base: float = 512.0
    gamma: float = 0.4
    base: float = 10000.0
    layout: str = "interleaved"

    def __post_init__(self):
        if min(self.scale_base, self.gamma, self.base) <= 0:
            raise ValueError(
                f"scale_base, gamma and base must be positive, got {self.scale_base}, "
                f"{self.gamma} and {self.base}"
            )

    def reach(self, dim: int) -> float:
        """Returns how far from the centre factors stay within exp(-50) .. exp(50)."""
        fastest = np.log(xpos_rates(dim, self.gamma)).min()
        return float(LARGEST * self.scale_base / -fastest)

    def prepare(
        self,
        params: Params,
        features: Float[Array, "b k h f"] | None,
        q_at: Where,
        k_at: Where,
        layout: Layout | None,
    ):
        real = q_at.segment != 0
        some = jnp.any(real, axis=1, keepdims=True)
        # Padding stands at a real token, so that it cannot move the centre.
        first = jnp.argmax(real, axis=1)[:, None]
        one = jnp.take_along_axis(q_at.position, first, axis=1)
        position = jnp.where(real, q_at.position, one)
        low = jnp.min(position, axis=1, keepdims=True)
        high = jnp.max(position, axis=1, keepdims=True)
        centre = jnp.where(some, low + (high - low) // 2, 0)
        q_data = jnp.broadcast_to(centre, q_at.position.shape)[:, :, None, None]
        return params | {"centre": centre}, q_data.astype(jnp.float32), None

    def query(
        self, params: Params, q: Float[Array, "b t h d"], at: Where
    ) -> Float[Array, "b t h d"]:
        return self._turn(q, at.position, at.position - self._centre(params))

    def key(
        self, params: Params, k: Float[Array, "b t h d"], at: Where
    ) -> Float[Array, "b t h d"]:
        return self._turn(k, at.position, self._centre(params) - at.position)

    def _centre(self, params: Params):
        if "centre" not in params:
            raise ValueError("xPos' hooks need the params that `prepare` returns")
        return params["centre"]

    def _turn(self, x, position, offset):
        x = x.astype(jnp.float32) if x.dtype == jnp.float16 else x
        dim = x.shape[-1]
        scales = xpos_scales(offset, dim, self.scale_base, self.gamma)
        frequency = inverse_frequencies(dim, self.base)
        return rotate(x, position, frequency, layout=self.layout, amplitude=scales)

    def score(self, params: Params, block: Block) -> Float[Array, "b h q k"]:
        dim = block.q.shape[-1]
        centre = block.q_data[:, 0, :, 0]
        away = jnp.abs(block.q_at.position.astype(jnp.float32) - centre)
        near = jnp.all((away <= self.reach(dim)) | (block.q_at.segment == 0))
        return jax.lax.cond(near, lambda block: block.logits, self._one_by_one, block)

    def _one_by_one(self, block: Block) -> Float[Array, "b h q k"]:
        """Returns the logits with each query as its own centre."""
        k = jnp.swapaxes(block.k, 1, 2).astype(jnp.float32)

        @jax.checkpoint
        def one(q, position):
            offset = block.k_at.position - position[:, None]
            behind = jnp.maximum(-offset, 0)
            turned = self._turn(k, offset, behind)
            return block.scale * jnp.einsum("bhd,bkhd->bhk", q, turned)

        queries = jnp.moveaxis(block.q.astype(jnp.float32), 2, 0)
        rows = jax.lax.map(lambda x: one(*x), (queries, block.q_at.position.T))
        return jnp.moveaxis(rows, 0, 2)

    def past_training(self) -> str:
        return "Far keys fade out, the fastest planes first, so little there is new."
