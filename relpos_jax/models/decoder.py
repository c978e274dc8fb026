"""Transformer-XL as a language model (Dai et al. 2019)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Num

from relpos_jax import where
from relpos_jax.memory import KeyValueCache, Memory, SegmentMemory
from relpos_jax.models import adaptive
from relpos_jax.models.config import ABSOLUTE_WITH_MEMORY, ModelConfig
from relpos_jax.models.layers import (
    Layer,
    as_arrays,
    as_params,
    kept_features,
    layer_norm,
    named,
)
from relpos_jax.models.layers import dropout as drop
from relpos_jax.positional.protocol import leading
from relpos_jax.where import Where

SPACINGS = ("unit", "rising", "any")


class TransformerXL(nnx.Module):
    """A decoder whose memory is an argument and a result.

    Holds `nnx.Param`s and nothing else: split it once and use plain JAX transforms.
    With memory of length 0 it is a plain transformer.
    """

    def __init__(self, config: ModelConfig, *, key: jax.Array):
        self.config = config
        width = config.width
        std = width**-0.5 if config.init_std is None else config.init_std
        if config.adaptive is None:
            shape = (config.vocabulary, width)
            table = std * jax.random.normal(named(key, "embedding"), shape)
            self.embedding = nnx.Param(table)
        else:
            embedding, softmax = adaptive.init(
                config.adaptive,
                named(key, "adaptive"),
                config.vocabulary,
                width,
                tie_tables=config.tie_embeddings,
                bias=config.output_bias,
                std=config.init_std,
            )
            self.embedding, self.softmax = as_params(embedding), as_params(softmax)
        self.layers = nnx.List(
            Layer(config, key=named(key, f"layer {i}"), encoding=encoding)
            for i, encoding in enumerate(config.positions)
        )
        self.position = as_params(self._init_shared(named(key, "position")))
        self.norm = layer_norm(config) if config.has_final_norm else None
        # Assigned once each: NNX does not let None turn into a parameter.
        plain = config.adaptive is None
        own = plain and not config.tie_embeddings
        self.output = self._output(std, key) if own else None
        biased = plain and config.output_bias
        self.output_bias = nnx.Param(jnp.zeros(config.vocabulary)) if biased else None

    def _init_shared(self, key: jax.Array):
        """Returns the encodings' shared parameters: see `ModelConfig.shared_part`."""
        encodings, dims = self.config.encodings, self.config.dims
        if len(encodings) == 1:
            return encodings[0].init_shared(key, dims)
        parts = (
            encoding.init_shared(jax.random.fold_in(key, i), dims)
            for i, encoding in enumerate(encodings)
        )
        return {str(i): own for i, own in enumerate(parts) if own}

    def _output(self, std: float, key: jax.Array) -> nnx.Param:
        shape = (self.config.vocabulary, self.config.width)
        return nnx.Param(std * jax.random.normal(named(key, "output"), shape))

    def init_memory(self, batch: int, length: int | None = None) -> SegmentMemory:
        """Returns the segment memory that a document starts with.

        That is `length` (default: `config.memory_length`) empty slots, or, where
        `config.memory_start` is "zeros", zero vectors at the positions before 0 of
        document 1, so tokens should count from 0 there.

        Raises:
          ValueError: memory with an encoding that adds absolute embeddings.
        """
        config = self.config
        length = config.memory_length if length is None else length
        if config.absolute and length:
            raise ValueError(ABSOLUTE_WITH_MEMORY)
        memory = SegmentMemory.empty(
            config.layers, batch, length, config.width, config.dtype
        )
        if config.memory_start == "zeros":
            at = where.contiguous(batch, length, start=-length)
            memory = memory._replace(at=at)
        return memory

    def init_cache(
        self, batch: int, capacity: int, *, ring: bool = False
    ) -> KeyValueCache:
        """Returns an empty key/value cache.

        A ring forgets: with a `window` it needs `capacity >= window + tokens a call -
        1`; without one, feed it one token a call and it sees the last `capacity`.
        """
        config = self.config
        return KeyValueCache.empty(
            config.layers,
            batch,
            capacity,
            config.heads,
            config.head_dim,
            config.dtype,
            features=max(kept_features(e, config.dims) for e in config.encodings),
            ring=ring,
        )

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        at: Where,
        memory: Memory,
        *,
        key: jax.Array | None = None,
        spacing: str = "unit",
    ) -> tuple[Float[Array, "b t v"], Memory]:
        """Returns next-token logits, float32, and the memory after these tokens.

        With `config.adaptive` they are log-probabilities, which are their own logits.

        Args:
          tokens: token ids. An id outside the vocabulary gives NaN; ids in padding
            (segment 0) are ignored.
          at: where the tokens stand.
          memory: what they look back on, from `init_memory`, `init_cache` or a call.
          key: for dropout; None for none.
          spacing: what is known of positions in advance. "unit": they rise by one along
            each document, memory included (rows where they do not are NaN). "rising":
            they rise. "any": nothing.

        Raises:
          ValueError: float ids, a memory of another batch or model, a ring too small
            for this call, an unknown spacing.
        """
        hidden, after = self.hidden(tokens, at, memory, key=key, spacing=spacing)
        logits = self.logits(hidden)
        return _nan_unless_fits(memory, tokens, logits), after

    def losses(
        self,
        tokens: Int[Array, "b t"],
        targets: Int[Array, "b t"],
        at: Where,
        memory: Memory,
        *,
        weight: Num[Array, "b t"] | Bool[Array, "b t"] | None = None,
        key: jax.Array | None = None,
        spacing: str = "unit",
    ) -> tuple[Float[Array, "b t"], Memory]:
        """Returns -log p(target) of each token, nats, float32, and the memory after.

        With `config.adaptive` the vocabulary's logits are never all there at once: see
        `adaptive.losses`. The other arguments and errors are those of a call.

        Args:
          targets: `[b t]`, the token that follows each input; one outside the
            vocabulary gives NaN.
          weight: where it is 0 nothing is read, neither target nor state; the loss
            there has no meaning, and no gradient. None reads all.
        """
        hidden, after = self.hidden(tokens, at, memory, key=key, spacing=spacing)
        config, scored = self.config, None if weight is None else weight > 0
        if scored is not None:
            targets = jnp.where(scored, targets, 0)
        if config.adaptive is None:
            logits = self.logits(hidden)
            if scored is not None:
                logits = jnp.where(scored[..., None], logits, 0)
            losses = adaptive.token_losses(logits, targets)
        else:
            if scored is not None:
                hidden = jnp.where(scored[..., None], hidden, 0)
            parts = as_arrays(self.embedding), as_arrays(self.softmax)
            losses = adaptive.losses(config.adaptive, *parts, hidden, targets)
        return _nan_unless_fits(memory, tokens, losses), after

    def hidden(
        self,
        tokens: Int[Array, "b t"],
        at: Where,
        memory: Memory,
        *,
        key: jax.Array | None = None,
        spacing: str = "unit",
    ) -> tuple[Float[Array, "b t w"], Memory]:
        """Returns the states that the logits are made of, and the memory after them.

        Arguments and errors are those of a call of the model.
        """
        config = self.config
        self._check(tokens, memory, spacing)
        tokens = jnp.where(at.segment != 0, tokens, 0)
        # Negative ids would count from the end; they are out of the vocabulary too.
        tokens = jnp.where(tokens < 0, config.vocabulary, tokens)
        x = self._embed(tokens)
        x = (x * config.width**0.5).astype(config.dtype)
        shared = as_arrays(self.position)
        for encoding in config.encodings:
            x = encoding.embed(config.shared_part(shared, encoding), x, at)
        keys = [None] * (config.layers + 2)
        if key is not None:
            keys = list(jax.random.split(key, config.layers + 2))
        x = drop(keys[0], config.dropout, x)

        layout = None if spacing == "any" else memory.layout(spacing == "unit")
        entries = []
        for i, layer in enumerate(self.layers):
            x, entry = layer(x, at, memory, i, shared, layout, keys[i + 1])
            entries.append(entry)
        if self.norm is not None:
            x = self.norm(x)
        x = drop(keys[-1], config.dropout, x)
        return x, memory.write(entries, at)

    def _embed(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t w"]:
        config = self.config
        if config.adaptive is not None:
            table = as_arrays(self.embedding)
            return adaptive.embed(config.adaptive, table, tokens, config.dtype)
        return self.embedding[...].at[tokens].get(mode="fill", fill_value=jnp.nan)

    def logits(self, hidden: Float[Array, "b t w"]) -> Float[Array, "b t v"]:
        """Returns next-token logits, float32, of what `hidden` returned.

        With `config.adaptive` they are log-probabilities.
        """
        if self.config.adaptive is not None:
            parts = as_arrays(self.embedding), as_arrays(self.softmax)
            return adaptive.log_probabilities(self.config.adaptive, *parts, hidden)
        table = self.embedding if self.output is None else self.output
        logits = jnp.einsum(
            "btw,vw->btv",
            hidden,
            table[...].astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
        if self.output_bias is not None:
            logits = logits + leading(self.output_bias[...], 3)
        return logits

    def _check(self, tokens, memory, spacing):
        config = self.config
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"token ids must be integers, got {tokens.dtype}")
        if spacing not in SPACINGS:
            raise ValueError(f"spacing must be one of {SPACINGS}, got {spacing!r}")
        if isinstance(memory, KeyValueCache):
            count = tokens.shape[1]
            needed = count + (config.window or 1) - 1
            allowed = config.window is not None or count == 1
            if memory.ring and not (allowed and memory.capacity >= needed):
                raise ValueError(
                    f"a ring of {memory.capacity} slots cannot take {count} tokens a "
                    f"call with window {config.window}: it would write over keys that "
                    f"they still need; it needs window + tokens - 1 slots, and without "
                    f"a window one token a call"
                )
        elif config.absolute and memory.length:
            raise ValueError(ABSOLUTE_WITH_MEMORY)


def _nan_unless_fits(memory: Memory, tokens: jax.Array, values: jax.Array):
    if isinstance(memory, KeyValueCache):
        return jnp.where(memory.fits(tokens.shape[1]), values, jnp.nan)
    return values


def count_parameters(config: ModelConfig) -> int:
    """Returns the model's number of parameters, without allocating them."""
    shapes = nnx.eval_shape(lambda: TransformerXL(config, key=jax.random.key(0)))
    leaves = jax.tree.leaves(nnx.state(shapes, nnx.Param))
    return sum(leaf.size for leaf in leaves)
