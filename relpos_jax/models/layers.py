"""Layers: attention and feed-forward, each with its norm and residual."""

import functools
import math

import jax
from flax import nnx
from jaxtyping import Array, Float

from relpos_jax.masks import Mask
from relpos_jax.memory import Context, Memory
from relpos_jax.models.attention import Attention
from relpos_jax.models.basics import dropout, named, norm, normal
from relpos_jax.models.config import ModelConfig
from relpos_jax.models.products import product
from relpos_jax.positional.protocol import Params, PositionEncoding
from relpos_jax.relative import Layout
from relpos_jax.where import Where

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
