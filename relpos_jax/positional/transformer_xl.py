"""Transformer-XL's relative attention (Dai et al. 2019, section 3.3)."""

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
from relpos_jax.positional.sinusoidal import sinusoid
from relpos_jax.where import Where


@dataclasses.dataclass(frozen=True)
class TransformerXLRelative(PositionEncoding):
    """The four terms (a) to (d): content and position, each with a global bias.

    `((q_i + u) . k_j + (q_i + v) . W_R R_(i-j)) / sqrt(d)`, with `R` the sinusoid of
    the distance (sines before cosines), `W_R` a layer's own projection, and `u`, `v`
    the global content and position biases.

    Attributes:
      base: of the sinusoid.
      untie: `u` and `v` are a layer's own instead of shared by all layers (the released
        TensorFlow code's `untie_r`; its PyTorch code always shares them).
      clamp: distances past it use its row (`clamp_len`), None for no clamp.
    """

    turns_once: ClassVar[bool] = True

    base: float = 10000.0
    untie: bool = False
    clamp: int | None = None

    def __post_init__(self):
        if self.clamp is not None and self.clamp < 1:
            raise ValueError(f"clamp must be positive or None, got {self.clamp}")

    def _biases(self, key: jax.Array, dims: Dims) -> Params:
        content, position = jax.random.split(key)
        shape = (dims.heads, dims.head_dim)
        return {
            "content_bias": 0.02 * jax.random.normal(content, shape),
            "position_bias": 0.02 * jax.random.normal(position, shape),
        }

    def init(self, key: jax.Array, dims: Dims) -> Params:
        projection, biases = jax.random.split(key)
        shape = (dims.width, dims.heads, dims.head_dim)
        kernel = dims.width**-0.5 * jax.random.normal(projection, shape)
        own = self._biases(biases, dims) if self.untie else {}
        return {"projection": kernel, **own}

    def init_shared(self, key: jax.Array, dims: Dims) -> Params:
        return {} if self.untie else self._biases(key, dims)

    def query(
        self, params: Params, q: Float[Array, "b t h d"], at: Where
    ) -> Float[Array, "b t h d"]:
        return q + leading(params["content_bias"].astype(q.dtype), q.ndim)

    def table(
        self, params: Params, distance: Num[Array, "*n"]
    ) -> Float[Array, "*n h d"]:
        if self.clamp is not None:
            distance = jnp.minimum(distance, self.clamp)
        kernel = params["projection"].astype(jnp.float32)
        waves = sinusoid(distance, kernel.shape[0], base=self.base)
        return jnp.einsum("...w,whd->...hd", waves, kernel)

    def score(self, params: Params, block: Block) -> Float[Array, "b h q k"]:
        bias = params["position_bias"].astype(block.q.dtype)[None, :, None, :]
        q = block.q + bias
        return block.logits + block.scaled(block.rel.query_dot, q, block.table)

    def past_training(self) -> str:
        clamp = "" if self.clamp is None else f" Distances stop at {self.clamp}."
        return f"Defined at every distance through its sinusoid.{clamp}"
