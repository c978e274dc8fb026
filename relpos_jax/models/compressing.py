"""What a layer does for compressive memory: compresses, and measures what is lost."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from relpos_jax.memory import CompressiveConfig, CompressiveMemory, compression
from relpos_jax.memory.compressive import Entry
from relpos_jax.positional.protocol import Params
from relpos_jax.where import Where


def compressed(
    config: CompressiveConfig,
    params: Params,
    entry: Entry,
    at: Where,
    memory: CompressiveMemory,
    layer: int,
    modules: tuple | None,
) -> Entry:
    """Returns a memory entry with the slots of what leaves segment memory.

    Args:
      config: says how to compress.
      params: the layer's parameters for it.
      entry: the layer's inputs at the new tokens, and what was seen of them.
      at: where these stand.
      memory: what is left behind.
      layer: the layer's number in it.
      modules: the layer's query, key, value and norm, if the auxiliary loss is wanted.
    """
    config = dataclasses.replace(config, rate=memory.rate)
    leaving = memory.leaving(layer, entry, at)

    def compress(params):
        return compression.compress(config, params, leaving)

    def nothing(params):
        shapes = jax.eval_shape(compress, params)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    if memory.every > 1:
        some = jnp.any(leaving.count > 0)
        slots = jax.lax.cond(some, compress, nothing, params)
    else:
        slots = compress(params)
    lost = None
    if modules is not None and config.loss == "attention":
        # The compression learns of the model, and the model nothing of it.
        query, key, value, norm = map(frozen, modules)

        def pair(states):
            states = norm(states)
            return key(states), value(states)

        q = query(norm(jax.lax.stop_gradient(entry.states)))
        places = at, compression.members_at(leaving, slots), slots.at
        old, new = pair(leaving.states), pair(slots.states)
        lost = compression.attention_loss(q, old, new, *places)
    elif modules is not None and config.loss is not None:
        lost = compression.autoencoding_loss(params, leaving, slots)
    return entry._replace(slots=slots.states, at=slots.at, auxiliary=lost)


def frozen(module):
    """Returns a module through whose parameters no gradient flows."""
    if not isinstance(module, nnx.Module):
        return module
    graphdef, params = nnx.split(module)
    return nnx.merge(graphdef, jax.lax.stop_gradient(params))


def attention_received(
    attention, q: Float[Array, "b q h d"], k: Float[Array, "b k h d"], v: jax.Array
) -> Float[Array, "b k"]:
    """Returns the weight that each key gets, summed over queries and heads.

    The output is linear in the values: its gradient by a value is that value's weight.
    So any implementation of attention tells the sums, and none has to show its weights.
    It costs one more forward and backward pass.
    """
    q, k, v = jax.lax.stop_gradient((q, k, v))
    v = v.astype(jnp.float32)
    out, pull = jax.vjp(lambda v: attention(q, k, v), v)
    (weights,) = pull(jnp.zeros_like(out).at[..., 0].set(1))
    return jnp.sum(weights[..., 0], axis=2)
