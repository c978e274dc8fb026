"""Layers: attention and feed-forward, each with its norm and residual."""

import functools
import math
import zlib
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
from relpos_jax.models.compressing import attention_received, compressed
from relpos_jax.models.config import ModelConfig
from relpos_jax.models.products import product
from relpos_jax.positional import merge
from relpos_jax.positional.protocol import Dims, Params, PositionEncoding
from relpos_jax.relative import Layout
from relpos_jax.where import Where


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


GATES = {"geglu": jax.nn.gelu, "swiglu": jax.nn.silu}
ACTIVATIONS = {
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    **GATES,
}


class FeedForward(nnx.Module):
    """Two projections with an activation between them, or three where it is gated."""

    def __init__(self, config: ModelConfig, *, key: jax.Array):
        self.config = config

        def linear(name, inputs, outputs, gain=1.0):
            return nnx.Linear(
                inputs,
                outputs,
                use_bias=config.feedforward_bias,
                kernel_init=normal(config, inputs, gain),
                dtype=config.dtype,
                dot_general=product,
                rngs=nnx.Rngs(named(key, name)),
            )

        sizes = (config.width, config.feedforward)
        self.inner = linear("inner", *sizes)
        self.gate = linear("gate", *sizes) if config.activation in GATES else None
        self.outer = linear("outer", *sizes[::-1], 1 / math.sqrt(2 * config.layers))

    def __call__(self, x: Float[Array, "b t w"], key: jax.Array | None):
        activate = ACTIVATIONS[self.config.activation]
        if self.gate is None:
            x = activate(self.inner(x))
        else:
            x = activate(self.gate(x)) * self.inner(x)
        return self.outer(dropout(key, self.config.dropout, x))


class Layer(nnx.Module):
    """Attention and feed-forward, each added to what came in.

    With `cross`, its settings, attention to a context comes between the two; with
    `across`, its class, attention to summaries: see `models.hierarchical`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        key: jax.Array,
        encoding: PositionEncoding | None = None,
        mask: Mask | None = None,
        cross: ModelConfig | None = None,
        across: type[Attention] | None = None,
    ):
        self.config = config
        self.attention = Attention(
            config, key=named(key, "attention"), encoding=encoding, mask=mask
        )
        self.feedforward = FeedForward(config, key=named(key, "feedforward"))
        self.attention_norm = norm(config)
        self.feedforward_norm = norm(config)
        alone = cross is None
        own = None if alone else Attention(cross, key=named(key, "cross"))
        self.cross_attention = own
        self.cross_norm = None if alone else norm(config)
        alone = across is None
        own = None if alone else across(config, key=named(key, "across"))
        self.across_attention = own
        self.across_norm = None if alone else norm(config)

    def __call__(
        self,
        x: Float[Array, "b t w"],
        at: Where,
        memory: Memory,
        layer: int,
        shared: Params,
        layout: Layout | None,
        key: jax.Array | None,
        context: Context | None = None,
        auxiliary: bool = False,
    ):
        """Returns the layer's output `[b t w]` and its memory entries, in order.

        `layer` is the number of the first of them in the memory; `context` is what
        cross-attention looks at, in a layer that has it.
        """
        rate, pre = self.config.dropout, self.config.norm == "pre"
        keys = [None] * 3 if key is None else jax.random.split(key, 3)

        def weights(name):
            return None if key is None else named(key, name)

        def identity(x):
            return x

        def around(norm):
            return (norm, identity) if pre else (identity, norm)

        params = self.attention.parameters(shared)
        x = self.attention.encoding.enter(params, x, at)
        before, after = around(self.attention_norm)
        out, entry = self.attention(
            x,
            at,
            memory,
            layer,
            shared,
            before,
            layout,
            weights("weights"),
            auxiliary,
        )
        x = after(x + dropout(keys[0], rate, out))
        entries = [entry]

        if self.across_attention is not None:
            before, after = around(self.across_norm)
            out, entry = self.across_attention(
                x,
                at,
                memory,
                layer + 1,
                shared,
                before,
                layout,
                weights("across weights"),
            )
            entries.append(entry)
            x = after(x + dropout(weights("across"), rate, out))

        if self.cross_attention is not None:
            before, after = around(self.cross_norm)
            # Keys come from the context as it is, so nothing is normalised inside.
            out, _ = self.cross_attention(
                before(x),
                at,
                context,
                layer // self.config.sublayers,
                context.shared,
                identity,
                None,
                weights("cross weights"),
            )
            x = after(x + dropout(weights("cross"), rate, out))

        before, after = around(self.feedforward_norm)
        out = self.feedforward(before(x), keys[1])
        return after(x + dropout(keys[2], rate, out)), entries


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
