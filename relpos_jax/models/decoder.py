"""Transformer-XL as a language model (Dai et al. 2019)."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from relpos_jax.memory import KeyValueCache, Memory, SegmentMemory
from relpos_jax.models.config import ABSOLUTE_WITH_MEMORY, ModelConfig
from relpos_jax.models.layers import Layer, as_arrays, as_params, layer_norm, named
from relpos_jax.models.layers import dropout as drop
from relpos_jax.positional import merge
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
        table = std * jax.random.normal(
            named(key, "embedding"), (config.vocabulary, width)
        )
        self.embedding = nnx.Param(table)
        self.layers = nnx.List(
            Layer(config, key=named(key, f"layer {i}")) for i in range(config.layers)
        )
        shared = config.position.init_shared(named(key, "position"), config.dims)
        self.position = as_params(shared)
        self.norm = layer_norm(config) if config.has_final_norm else None
        self.output = None
        if not config.tie_embeddings:
            shape = (config.vocabulary, width)
            self.output = nnx.Param(
                std * jax.random.normal(named(key, "output"), shape)
            )
        self.output_bias = None
        if config.output_bias:
            self.output_bias = nnx.Param(jnp.zeros(config.vocabulary))

    def init_memory(self, batch: int, length: int | None = None) -> SegmentMemory:
        """Returns empty segment memory of `length` slots (default: as configured).

        Raises:
          ValueError: memory with an encoding that adds absolute embeddings.
        """
        config = self.config
        length = config.memory_length if length is None else length
        if config.position.absolute and length:
            raise ValueError(ABSOLUTE_WITH_MEMORY)
        return SegmentMemory.empty(
            config.layers, batch, length, config.width, config.dtype
        )

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
            features=self._features(),
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
        config = self.config
        self._check(tokens, memory, spacing)
        tokens = jnp.where(at.segment != 0, tokens, 0)
        # Negative ids would count from the end; they are out of the vocabulary too.
        tokens = jnp.where(tokens < 0, config.vocabulary, tokens)
        table = self.embedding[...]
        x = table.at[tokens].get(mode="fill", fill_value=jnp.nan)
        x = (x * config.width**0.5).astype(config.dtype)
        shared = as_arrays(self.position)
        x = config.position.embed(shared, x, at)
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

        output = table if self.output is None else self.output[...]
        logits = jnp.einsum(
            "btw,vw->btv",
            x,
            output.astype(x.dtype),
            preferred_element_type=jnp.float32,
        )
        if self.output_bias is not None:
            logits = logits + self.output_bias[...]
        if isinstance(memory, KeyValueCache):
            logits = jnp.where(memory.fits(tokens.shape[1]), logits, jnp.nan)
        return logits, memory.write(entries, at)

    def _features(self) -> int:
        """Returns how many numbers a token and head the encoding keeps."""
        position, dims = self.config.position, self.config.dims

        def features():
            key = jax.random.key(0)
            params = merge(position.init(key, dims), position.init_shared(key, dims))
            return position.features(params, jnp.zeros((1, 1, dims.width)))

        found = jax.eval_shape(features)
        return 0 if found is None else found.shape[-1]

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
        elif config.position.absolute and memory.length:
            raise ValueError(ABSOLUTE_WITH_MEMORY)


def count_parameters(config: ModelConfig) -> int:
    """Returns the model's number of parameters, without allocating them."""
    shapes = nnx.eval_shape(lambda: TransformerXL(config, key=jax.random.key(0)))
    leaves = jax.tree.leaves(nnx.state(shapes, nnx.Param))
    return sum(leaf.size for leaf in leaves)


def evaluation_config(config: ModelConfig, **changes) -> ModelConfig:
    """Returns the configuration for evaluation: no dropout, and other changes."""
    return dataclasses.replace(config, dropout=0.0, **changes)
