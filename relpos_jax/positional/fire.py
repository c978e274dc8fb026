"""FIRE: functional interpolation of relative positions (Li et al. 2024, section 3)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from relpos_jax.positional.protocol import (
    Block,
    Dims,
    Params,
    PositionEncoding,
    leading,
)


def progress(
    distance: Num[Array, "*n"],
    position: Num[Array, "*#n"],
    c: Float[Array, ""],
    threshold: Float[Array, ""],
    eps: float = 1e-6,
) -> Float[Array, "*n"]:
    """Returns `psi(|i - j|) / psi(max(i, L))`, with `psi(x) = log(1 + |c| x)`.

    In 0..1 for causal pairs whose positions count from 0: how far back the key is, as
    a part of the way to the start (interpolated), bent so that near keys have more
    room; before the threshold `L` it is a function of the distance alone.

    Args:
      distance, position: `i - j` and `i`, of shapes that broadcast (axes written out).
      c: how far the near keys are spread.
      threshold: `L`; its absolute value is taken.
      eps: added to the denominator (released code); not in the paper.
    """
    far = jnp.abs(distance).astype(jnp.float32)
    end = jnp.maximum(jnp.abs(position).astype(jnp.float32), jnp.abs(threshold))
    return jnp.log1p(jnp.abs(c) * far) / (jnp.log1p(jnp.abs(c) * end) + eps)


def mlp(params: Params, x: Float[Array, "*n"]) -> Float[Array, "*n h"]:
    """Returns `W_2 relu(w_1 x + b_1) + b_2` for each number `x`: a value per head.

    `params` holds `inner [f]`, `inner_bias [f]`, `outer [f h]`, `outer_bias [h]`.
    """
    x = x[..., None]
    inner, offset = (leading(params[n], x.ndim) for n in ("inner", "inner_bias"))
    hidden = jax.nn.relu(x * inner + offset)
    out = jnp.einsum("...f,fh->...h", hidden, params["outer"])
    return out + leading(params["outer_bias"], out.ndim)


def init_mlp(key: jax.Array, hidden: int, heads: int) -> Params:
    """Returns initial parameters of `mlp`; biases of the inner layer are spread out."""
    inner, offset, outer = jax.random.split(key, 3)
    return {
        "inner": jax.random.uniform(inner, (hidden,), minval=-1.0),
        "inner_bias": jax.random.uniform(offset, (hidden,), minval=-1.0),
        "outer": hidden**-0.5 * jax.random.normal(outer, (hidden, heads)),
        "outer_bias": jnp.zeros(heads),
    }


@dataclasses.dataclass(frozen=True)
class Fire(PositionEncoding):
    """Adds `mlp(progress(i - j, i))`: a learned function of the interpolated distance.

    Depends on the query's position as well as on the distance, so it is not invariant
    under a shift of all positions, a table of distances is not enough, and decoding
    must know where a token stands. The MLP's hidden layer is evaluated for every pair.

    Attributes:
      hidden: units of the MLP.
      c: initial value of `c`.
      threshold: initial value of `L`, which is learned as a multiple of it.
      share: one set of parameters for all layers (the paper's FIRE-S).
    """

    hidden: int = 32
    c: float = 0.1
    threshold: float = 512.0
    share: bool = False

    invariant: ClassVar[bool] = False

    def __post_init__(self):
        if self.hidden < 1 or self.c <= 0 or self.threshold <= 0:
            raise ValueError(
                f"hidden, c and threshold must be positive, "
                f"got {self.hidden}, {self.c}, {self.threshold}"
            )

    def _init(self, key: jax.Array, dims: Dims) -> Params:
        numbers = {"c": jnp.float32(self.c), "multiplier": jnp.float32(1.0)}
        return {"mlp": init_mlp(key, self.hidden, dims.heads), **numbers}

    def init(self, key: jax.Array, dims: Dims) -> Params:
        return {} if self.share else self._init(key, dims)

    def init_shared(self, key: jax.Array, dims: Dims) -> Params:
        return self._init(key, dims) if self.share else {}

    def bias(
        self,
        params: Params,
        distance: Num[Array, "b q k"],
        position: Num[Array, "b q"],
    ) -> Float[Array, "b h q k"]:
        """Returns the bias of pairs at these distances and query positions."""
        params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        threshold = params["multiplier"] * self.threshold
        x = progress(distance, position[:, :, None], params["c"], threshold)
        return jnp.moveaxis(mlp(params["mlp"], x), -1, 1)

    def score(self, params: Params, block: Block) -> Float[Array, "b h q k"]:
        return block.logits + self.bias(params, block.distance, block.q_at.position)

    def past_training(self) -> str:
        return "The MLP's input stays within 0..1: distances are interpolated."
