"""What decoders and encoders have in common: layers, without embedding and logits."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from relpos_jax import where
from relpos_jax.axes import by_rows, whole_rows
from relpos_jax.memory import (
    CompressiveMemory,
    Context,
    KeyValueCache,
    Memory,
    SegmentMemory,
)
from relpos_jax.models.attention import kept_features
from relpos_jax.models.basics import as_arrays, as_params, named, norm
from relpos_jax.models.basics import dropout as drop
from relpos_jax.models.config import ABSOLUTE_WITH_MEMORY, ModelConfig
from relpos_jax.models.hierarchical import Across
from relpos_jax.models.layers import Layer
from relpos_jax.where import Where

SPACINGS = ("unit", "rising", "any")

# From so many equal layers on, they are compiled once and scanned over: compilation
# takes as long as for one. Below, a program with all layers written out runs faster
# (experiments.benchmarks.compilation).
SCAN_FROM = 16


class Stack(nnx.Module):
    """Layers, the position parameters that they share, and the norm behind them.

    Holds `nnx.Param`s and nothing else. `cross`, where given, are the settings of an
    attention to a `Context` in every layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        key: jax.Array,
        cross: ModelConfig | None = None,
    ):
        self.config = config
        self.layers = nnx.List(
            Layer(
                config,
                key=named(key, f"layer {i}"),
                encoding=encoding,
                mask=mask,
                cross=cross,
                across=None if config.hierarchy is None else Across,
            )
            for i, (encoding, mask) in enumerate(
                zip(config.positions, config.masks, strict=True)
            )
        )
        self.position = as_params(_init_shared(config, named(key, "position")))
        self.norm = norm(config) if config.has_final_norm else None
        self.embedding_norm = norm(config) if config.embedding_norm else None

    def init_memory(
        self,
        batch: int,
        length: int | None = None,
        *,
        slots: int | None = None,
        rate: int | None = None,
        every: int = 1,
        ragged: bool = False,
    ) -> SegmentMemory | CompressiveMemory:
        """Returns the memory that a document starts with.

        That is `length` (default: `config.memory_length`) empty slots, or, where
        `config.memory_start` is "zeros", zero vectors at the positions before 0 of
        document 1, so tokens should count from 0 there.

        With `config.compressive` it is a compressive memory. `length` then counts all
        of its slots, and they are shared out as in training, unless `slots` says how
        many more there are for compressed states.

        Args:
          batch: number of rows.
          length: slots, see above.
          slots: slots of compressed memory; `length` are then segment memory's.
          rate: states that become one slot; None for the trained rate.
          every, ragged: see `CompressiveMemory`.

        Raises:
          ValueError: memory with an encoding that adds absolute embeddings; the last
            four arguments without `config.compressive`.
        """
        config = self.config
        shape = config.attentions, batch
        if config.compressive is None:
            if slots or rate or every > 1 or ragged:
                raise ValueError(
                    "slots, rate, every and ragged are of compressive memory, which "
                    "this model has not: config.compressive is None"
                )
            length = config.memory_length if length is None else length
            if config.absolute and length:
                raise ValueError(ABSOLUTE_WITH_MEMORY)
            memory = SegmentMemory.empty(*shape, length, config.width, config.dtype)
            if config.memory_start == "zeros":
                at = where.contiguous(batch, length, start=-length)
                memory = memory._replace(at=at)
            return memory
        length, slots = config.compressive.share(config.memory_length, length, slots)
        if config.absolute and length + slots:
            raise ValueError(ABSOLUTE_WITH_MEMORY)
        return CompressiveMemory.empty(
            *shape,
            length,
            slots,
            config.width,
            config.dtype,
            rate=config.compressive.rate if rate is None else rate,
            used=config.compressive.function == "most_used",
            every=every,
            ragged=ragged,
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
            config.attentions,
            batch,
            capacity,
            config.heads,
            config.head_dim,
            config.dtype,
            features=max(kept_features(e, config.dims) for e in config.encodings),
            ring=ring,
        )

    def run(
        self,
        x: Float[Array, "b t w"],
        at: Where,
        memory: Memory,
        *,
        key: jax.Array | None = None,
        spacing: str = "unit",
        context: Context | None = None,
        auxiliary: bool = False,
    ) -> tuple[Float[Array, "b t w"], Memory]:
        """Returns the last layer's output, normalised, and the memory after it.

        Args:
          x: `[b t w]`, embedded tokens, before positions are added to them.
          at: their positions and documents.
          memory: see the model's call.
          key: for dropout; None for none.
          spacing: see the model's call.
          context: what cross-attention looks at, where layers have it.
          auxiliary: a compressive memory comes back with its loss.
        """
        config = self.config
        shared = as_arrays(self.position)
        for encoding in config.encodings:
            x = encoding.embed(config.shared_part(shared, encoding), x, at)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        keys = [None] * (config.layers + 2)
        if key is not None:
            keys = list(jax.random.split(key, config.layers + 2))
        x = by_rows(drop(keys[0], config.dropout, x))

        layout = None if spacing == "any" else memory.layout(spacing == "unit")
        given = shared, layout
        if context is None and self._scans(memory):
            x, entries = self._scan(x, at, memory, given, keys[1:-1])
        else:
            entries = []
            for i, layer in enumerate(self.layers):
                first = i * config.sublayers
                call = functools.partial(
                    layer, layer=first, layout=layout, auxiliary=auxiliary
                )
                if config.remat:
                    call = jax.checkpoint(call)
                x, found = call(
                    x, at, memory, shared=shared, key=keys[i + 1], context=context
                )
                x = by_rows(x)
                entries += found
        if self.norm is not None:
            x = self.norm(x)
        x = drop(keys[-1], config.dropout, x)
        return x, memory.write(entries, at)

    def _scans(self, memory: Memory) -> bool:
        """Returns whether the layers are many, equal, and have segment memory."""
        config = self.config
        equal = len(config.encodings) == 1 and len(set(config.masks)) == 1
        many = config.layers >= SCAN_FROM
        return equal and many and isinstance(memory, SegmentMemory)

    def _scan(self, x, at, memory, given, keys):
        """Returns what the loop over the layers returns, from one compiled layer."""
        graphdef = nnx.graphdef(self.layers[0])
        # A copy of the parameters, which weighs little beside the work of a call.
        params = [nnx.as_pure(nnx.state(layer)) for layer in self.layers]
        params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
        keys = None if keys[0] is None else jnp.stack(keys)

        def step(x, item):
            hidden, params, key = item
            layer, own = nnx.merge(graphdef, params), memory._replace(hidden=hidden)
            x, entries = layer(x, at, own, 0, *given, key)
            return by_rows(x), entries

        if self.config.remat:
            step = jax.checkpoint(step, prevent_cse=False)
        layers, each = self.config.layers, self.config.sublayers
        hidden = memory.hidden.reshape(layers, each, *memory.hidden.shape[1:])
        x, entries = jax.lax.scan(step, x, (hidden, params, keys))
        return x, [entry[i] for i in range(layers) for entry in entries]

    def _check(self, tokens: Array, memory: Memory, spacing: str):
        config = self.config
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"token ids must be integers, got {tokens.dtype}")
        if spacing not in SPACINGS:
            raise ValueError(f"spacing must be one of {SPACINGS}, got {spacing!r}")
        if isinstance(memory, KeyValueCache):
            count = tokens.shape[1]
            reach = config.reach
            needed = count + (reach or 1) - 1
            allowed = reach is not None or count == 1
            if memory.ring and not (allowed and memory.capacity >= needed):
                raise ValueError(
                    f"a ring of {memory.capacity} slots cannot take {count} tokens a "
                    f"call with window {reach}: it would write over keys that "
                    f"they still need; it needs window + tokens - 1 slots, and without "
                    f"a window one token a call"
                )
        elif config.absolute and memory.layout(True).offset:
            raise ValueError(ABSOLUTE_WITH_MEMORY)


def _init_shared(config: ModelConfig, key: jax.Array):
    """Returns the encodings' shared parameters: see `ModelConfig.shared_part`."""
    encodings, dims = config.encodings, config.dims

    def init(encoding, key):
        return encoding.init_shared(key, dims) if config.shares(encoding) else {}

    if len(encodings) == 1:
        return init(encodings[0], key)
    parts = (
        init(encoding, jax.random.fold_in(key, i))
        for i, encoding in enumerate(encodings)
    )
    return {str(i): own for i, own in enumerate(parts) if own}


def embed(
    table: Float[Array, "v w"], tokens: Int[Array, "b t"]
) -> Float[Array, "b t w"]:
    """Returns the tokens' rows; NaN for an id outside the vocabulary."""
    return whole_rows(table).at[tokens].get(mode="fill", fill_value=jnp.nan)


def known_ids(
    tokens: Int[Array, "b t"], at: Where, vocabulary: int
) -> Int[Array, "b t"]:
    """Returns the ids to look up: 0 in padding, and none that counts from the end."""
    tokens = jnp.where(at.segment != 0, tokens, 0)
    return jnp.where(tokens < 0, vocabulary, tokens)


def output_logits(
    hidden: Float[Array, "b t w"],
    table: Float[Array, "v w"],
    bias: Float[Array, " v"] | None,
) -> Float[Array, "b t v"]:
    """Returns logits, float32, of a table of the vocabulary's vectors."""
    logits = jnp.einsum(
        "btw,vw->btv",
        hidden,
        table.astype(hidden.dtype),
        preferred_element_type=jnp.float32,
    )
    return logits if bias is None else logits + bias.reshape(1, 1, -1)


def nan_unless_fits(memory: Memory, count: int, values: jax.Array) -> jax.Array:
    """Returns `values`, NaN where a cache has no slots for `count` more tokens."""
    if isinstance(memory, KeyValueCache):
        return jnp.where(memory.fits(count), values, jnp.nan)
    return values
