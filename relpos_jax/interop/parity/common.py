"""What adapters of attention layers share."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.masks import Mask
from relpos_jax.positional import Params, PositionEncoding
from relpos_jax.where import Where


def split_heads(x: Float[Array, "b t w"], heads: int) -> Float[Array, "b t h d"]:
    """Returns features as heads, the outer half of the split."""
    return x.reshape(*x.shape[:2], heads, -1)


def join_heads(x: Float[Array, "b t h d"]) -> Float[Array, "b t w"]:
    """Undoes `split_heads`."""
    return x.reshape(*x.shape[:2], -1)


def places(keep: Bool[Array, "b k"]) -> tuple[Where, Where]:
    """Returns where queries and keys stand: all queries ask, kept keys answer.

    The sources mask keys only, so that a query in the padding attends all the same.
    """
    at = where.contiguous(*keep.shape)
    return at, at._replace(segment=keep.astype(jnp.int32))


def probabilities(
    encoding: PositionEncoding,
    params: Params,
    q: Float[Array, "b q h d"],
    k: Float[Array, "b k h d"],
    q_at: Where,
    k_at: Where,
    mask: Mask,
) -> Float[Array, "b h q k"]:
    """Returns the weights of `attend`: what it makes of one-hot values."""
    batch, keys, heads = k.shape[:3]
    one_hot = jnp.broadcast_to(jnp.eye(keys)[None, :, None], (batch, keys, heads, keys))
    weights = attend(encoding, params, q, k, one_hot, q_at, k_at, mask=mask)
    return jnp.swapaxes(weights, 1, 2)


def bias(
    encoding: PositionEncoding, params: Params, q_at: Where, k_at: Where
) -> Float[Array, "h q k"]:
    """Returns a bias encoding's table on the distances of the first row."""
    distance = q_at.position[0][:, None] - k_at.position[0][None, :]
    return jnp.moveaxis(encoding.table(params, distance), -1, 0)


def constants(encoding: PositionEncoding, heads: int, head_dim: int = 8) -> Params:
    """Returns the parameters of an encoding that has constants only."""
    return jax.tree.map(jnp.asarray, encoding.constants(heads, head_dim))
