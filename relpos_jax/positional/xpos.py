"""xPos: rotary embeddings whose planes fade with distance (Sun et al. 2022)."""

import dataclasses
import functools
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
        # Loops of no steps leave the logits where they are; a condition copies them.
        count = jnp.where(near, 0, away.shape[1])
        places = block.q_at.position, block.k_at.position
        return _one_by_one(
            (self, block.scale), count, block.logits, block.q, block.k, places
        )

    def _alone(self, scale: float, q, k, q_position, k_position):
        """Returns one query's logits `[b h k]`, the query as its own centre."""
        offset = k_position - q_position[:, None]
        k = jnp.swapaxes(k, 1, 2).astype(jnp.float32)
        turned = self._turn(k, offset, jnp.maximum(-offset, 0))
        return scale * jnp.einsum("bhd,bkhd->bhk", q.astype(jnp.float32), turned)

    def past_training(self) -> str:
        return "Far keys fade out, the fastest planes first, so little there is new."


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _one_by_one(how, count, logits, q, k, places):
    """Puts the logits of the first `count` queries, each its own centre, into place.

    `logits` are `[b h q k]`, `q` and `k` `[b h q d]` and `[b h k d]` before they are
    turned, `places` their positions `[b q]` and `[b k]`.
    """
    (encoding, scale), (q_position, k_position) = how, places

    def put(i, logits):
        row = encoding._alone(scale, q[:, :, i], k, q_position[:, i], k_position)
        return logits.at[:, :, i].set(row)

    return jax.lax.fori_loop(0, count, put, logits)


def _one_by_one_forward(how, count, logits, q, k, places):
    return _one_by_one(how, count, logits, q, k, places), (count, q, k, places)


def _one_by_one_backward(how, saved, d_out):
    (encoding, scale), (count, q, k, (q_position, k_position)) = how, saved

    def pull(i, found):
        d_q, d_k = found

        def row(q, k):
            return encoding._alone(scale, q, k, q_position[:, i], k_position)

        more_q, more_k = jax.vjp(row, q[:, :, i], k)[1](d_out[:, :, i])
        return d_q.at[:, :, i].set(more_q), d_k + more_k

    zero = jnp.zeros_like(q), jnp.zeros_like(k)
    d_q, d_k = jax.lax.fori_loop(0, count, pull, zero)
    return None, jnp.where(count > 0, 0.0, d_out), d_q, d_k, None


_one_by_one.defvjp(_one_by_one_forward, _one_by_one_backward)
