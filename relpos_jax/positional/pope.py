"""PoPE: polar coordinate position embeddings (Gopalakrishnan et al. 2025)."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from relpos_jax.positional.protocol import Dims, Params, PositionEncoding
from relpos_jax.positional.rope import phases
from relpos_jax.where import Where


def polar_frequencies(dim: int, base: float = 10000.0) -> Float[np.ndarray, " d"]:
    """Returns `theta_c = base^(-c/d)`, one a feature, float64."""
    return float(base) ** (-np.arange(dim) / dim)


def polar(
    x: Float[Array, "b t h d"],
    position: Num[Array, "b t"],
    frequency: Float[np.ndarray, " d"] | Float[Array, " d"],
    phase: Float[Array, "h d"] | None = None,
) -> Float[Array, "b t h e"]:
    """Returns `mu cos(phi)` and `mu sin(phi)` side by side: `e = 2 d` features.

    Content only sets magnitudes, `mu = softplus(x)`; position only sets angles,
    `phi = position theta + phase`.
    """
    angle = phases(position, frequency)
    if phase is not None:
        angle = angle + phase.astype(jnp.float32)[None, None]
    magnitude = jax.nn.softplus(x.astype(jnp.float32))
    both = [magnitude * jnp.cos(angle), magnitude * jnp.sin(angle)]
    return jnp.concatenate(both, axis=-1).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Pope(PositionEncoding):
    """Content gives the magnitude of each feature, position and a bias its angle.

    `q_m . k_n = sum_c softplus(q_c) softplus(k_c) cos((n - m) theta_c + delta_c)`, with
    a learned `delta` a head and feature (RoPE's angle has the content's own in it).
    There are `d` frequencies, not `d/2`, and query-key products are twice as wide; keys
    are kept at their own width.

    Not settled by what we could read (the abstract, an independent implementation,
    lucidrains/PoPE-pytorch 2b91cde, and notes): whether `delta` is one a head in the
    paper's models (it is in that code, and here), and whether it is held in -2 pi .. 0
    (that code clamps it; here it is free, since angles are periodic, with the same
    scores inside that range). The scale is the usual 1/sqrt(d), `d` the width of a head
    before doubling.

    Attributes:
      base: of the frequencies `base^(-c/d)`.
      phase: first values of `delta`: "zero", or "uniform" in -2 pi .. 0.

    Raises:
      ValueError: a base that is not positive, or an unknown `phase`.
    """

    base: float = 10000.0
    phase: str = "zero"

    def __post_init__(self):
        if self.base <= 0 or self.phase not in ("zero", "uniform"):
            raise ValueError(
                f"base must be positive and phase 'zero' or 'uniform', "
                f"got {self.base} and {self.phase!r}"
            )

    def init(self, key: jax.Array, dims: Dims) -> Params:
        shape = (dims.heads, dims.head_dim)
        if self.phase == "zero":
            return {"phase": jnp.zeros(shape)}
        return {"phase": jax.random.uniform(key, shape, minval=-2 * math.pi, maxval=0)}

    def query(
        self, params: Params, q: Float[Array, "b t h d"], at: Where
    ) -> Float[Array, "b t h e"]:
        return polar(q, at.position, polar_frequencies(q.shape[-1], self.base))

    def key(
        self, params: Params, k: Float[Array, "b t h d"], at: Where
    ) -> Float[Array, "b t h e"]:
        frequency = polar_frequencies(k.shape[-1], self.base)
        return polar(k, at.position, frequency, params["phase"])

    def past_training(self) -> str:
        return "Defined at every distance, but slow phases past training are new."
