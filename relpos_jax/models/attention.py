"""Multi-head attention over memory and tokens, as a module."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from relpos_jax.attention import attend
from relpos_jax.masks import Mask
from relpos_jax.memory import (
    CompressiveMemory,
    Context,
    KeyValueCache,
    Memory,
    compression,
)
from relpos_jax.models.basics import as_arrays, as_params, named, normal
from relpos_jax.models.compressing import attention_received, compressed
from relpos_jax.models.config import ModelConfig
from relpos_jax.models.products import product
from relpos_jax.positional import merge
from relpos_jax.positional.protocol import Dims, Params, PositionEncoding
from relpos_jax.relative import Layout
from relpos_jax.where import Where


class Attention(nnx.Module):
    """Multi-head attention over memory and the tokens themselves, or over a `Context`.

    `encoding` and `mask` are the layer's own where the configuration has several.

    Class attributes:
      alone: layers share none of the encoding's parameters.
      turns_once: keys are met at their own places, so that caches may keep them turned
        where the encoding allows it.
    """

    alone: ClassVar[bool] = False
    turns_once: ClassVar[bool] = True

    def __init__(
        self,
        config: ModelConfig,
        *,
        key: jax.Array,
        encoding: PositionEncoding | None = None,
        mask: Mask | None = None,
    ):
        width, heads, head_dim = config.width, config.heads, config.head_dim
        self.config = config
        self.encoding = config.positions[0] if encoding is None else encoding
        self.mask = config.masks[0] if mask is None else mask

        def project(name, gain=1.0):
            return nnx.LinearGeneral(
                width,
                (heads, head_dim),
                use_bias=config.attention_bias,
                kernel_init=normal(config, width, gain),
                dtype=config.dtype,
                dot_general=product,
                rngs=nnx.Rngs(named(key, name)),
            )

        self.query = project("query", self.encoding.query_gain(head_dim))
        self.key = project("key")
        self.value = project("value")
        self.output = nnx.LinearGeneral(
            (heads, head_dim),
            width,
            axis=(-2, -1),
            use_bias=config.attention_bias,
            kernel_init=normal(
                config, heads * head_dim, 1 / math.sqrt(2 * config.layers)
            ),
            dtype=config.dtype,
            dot_general=product,
            rngs=nnx.Rngs(named(key, "output")),
        )
        own = self.encoding.init(named(key, "position"), config.dims)
        if self.alone or not config.shares(self.encoding):
            alone = self.encoding.init_shared(named(key, "shared"), config.dims)
            own = merge(alone, own)
        self.position = as_params(own)
        if config.compressive is not None:
            self.compression = as_params(compression.init(config.compressive, width))

    def parameters(self, shared: Params) -> Params:
        """Returns the encoding's parameters, given what all layers share."""
        own = as_arrays(self.position)
        if self.alone:
            return own
        return merge(own, self.config.shared_part(shared, self.encoding))

    def project(self, states: Float[Array, "b k w"], params: Params):
        """Returns keys and values `[b k h d]` and what the encoding keeps of them."""
        features = self.encoding.features(params, states)
        return self.key(states), self.value(states), features

    def __call__(
        self,
        x: Float[Array, "b t w"],
        at: Where,
        memory: Memory | Context,
        layer: int,
        shared: Params,
        normalise,
        layout: Layout | None,
        key: jax.Array | None = None,
        auxiliary: bool = False,
    ):
        """Returns the sub-layer's output `[b t w]` and this layer's memory entry.

        `normalise` acts on queries' and keys' inputs alike, memory's among them. `key`
        is for dropout on attention weights. With `auxiliary` the entry has the loss of
        what compressive memory compresses.
        """
        config, encoding = self.config, self.encoding
        params = self.parameters(shared)
        # Turning all of a cache at every token would cost more than attending to it.
        once = self.turns_once and encoding.turns_once
        turned = once and isinstance(memory, KeyValueCache)

        def project(states):
            k, v, features = self.project(normalise(states), params)
            if turned:
                k = encoding.key(params, k, at)
            return k, v, _widen(features, k, memory)

        (k, v, features), k_at, entry = memory.read(layer, x, at, project)
        features = _narrow(features, encoding, config.dims, memory)
        q = self.query(normalise(x))
        out = self.look(params, q, k, v, features, at, k_at, layout, key, turned)
        if isinstance(memory, CompressiveMemory) and memory.slots:
            if memory.usage is not None:

                def look(q, k, v):
                    return self.look(params, q, k, v, features, at, k_at, layout)

                received = attention_received(look, q, k, v)[:, memory.slots :]
                visible = memory.visible(at, self.mask)
                entry = entry._replace(received=received, visible=visible)
            modules = (self.query, self.key, self.value, normalise)
            entry = compressed(
                config.compressive,
                as_arrays(self.compression),
                entry,
                at,
                memory,
                layer,
                modules if auxiliary else None,
            )
        return self.output(out), entry

    def look(
        self,
        params,
        q,
        k,
        v,
        features,
        at: Where,
        k_at: Where,
        layout,
        key=None,
        turned=False,
    ):
        """Returns what queries see of the keys, `[b t h d]`.

        `turned`: the keys have been through the encoding's `key` hook.
        """
        return attend(
            self.encoding,
            params,
            q,
            k,
            v,
            at,
            k_at,
            mask=self.mask,
            features=features,
            turned=turned,
            layout=layout,
            implementation=self.config.attention,
            dropout=self.config.attention_dropout,
            key=key,
        )


def kept_features(encoding: PositionEncoding, dims: Dims) -> int:
    """Returns how many numbers a token and head an encoding keeps beside its key."""

    def features():
        key = jax.random.key(0)
        params = merge(encoding.init(key, dims), encoding.init_shared(key, dims))
        return encoding.features(params, jnp.zeros((1, 1, dims.width)))

    found = jax.eval_shape(features)
    return 0 if found is None else found.shape[-1]


def _widen(features, k, memory: Memory | Context):
    """Fills features up to what a cache keeps for the encoding that has the most."""
    slots = getattr(memory, "features", None)
    if slots is None:
        return features
    if features is None:
        features = jnp.zeros((*k.shape[:3], 0), jnp.float32)
    short = slots.shape[-1] - features.shape[-1]
    return jnp.pad(features, ((0, 0), (0, 0), (0, 0), (0, short)))


def _narrow(features, encoding: PositionEncoding, dims: Dims, memory):
    """Takes back what `_widen` filled in."""
    if getattr(memory, "features", None) is None:
        return features
    own = kept_features(encoding, dims)
    return features[..., :own] if own else None
