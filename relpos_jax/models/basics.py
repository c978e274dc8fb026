"""What all modules are made with: keys by name, initial values, dropout, norms."""

import zlib

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from relpos_jax.models.config import ModelConfig
from relpos_jax.positional.protocol import Params


def named(key: jax.Array, name: str) -> jax.Array:
    """Returns a key that depends on the name alone.

    A parameter's first values are thereby the same whatever else a model holds: models
    with different encodings start from the same shared parameters.
    """
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def dropout(key: jax.Array | None, rate: float, x: Float[Array, "*n"]):
    """Returns `x` with a fraction `rate` of it zeroed; all of `x` without a key."""
    if key is None or rate == 0:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0)


def as_params(tree: Params | jax.Array):
    """Turns a dict of arrays into an NNX dict of parameters."""
    if isinstance(tree, dict):
        return nnx.Dict({name: as_params(value) for name, value in tree.items()})
    return nnx.Param(tree)


def as_arrays(tree):
    """Turns an NNX dict of parameters back into a dict of arrays."""
    if isinstance(tree, nnx.Dict):
        return {name: as_arrays(value) for name, value in tree.items()}
    return tree[...]


def normal(config: ModelConfig, fan_in: int, gain: float = 1.0):
    """Returns an initialiser: `init_std` or 1/sqrt(fan in), times a gain."""
    std = fan_in**-0.5 if config.init_std is None else config.init_std
    return nnx.initializers.normal(gain * std)


def norm(config: ModelConfig) -> nnx.LayerNorm | nnx.RMSNorm:
    """Returns a norm with a scale (and a bias: layer norm); statistics in float32."""
    kinds = {"layer": nnx.LayerNorm, "rms": nnx.RMSNorm}
    return kinds[config.norm_kind](
        config.width,
        epsilon=config.norm_epsilon,
        dtype=config.dtype,
        use_fast_variance=False,
        rngs=nnx.Rngs(0),
    )
