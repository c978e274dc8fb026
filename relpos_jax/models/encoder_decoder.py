"""Encoder-decoders (Vaswani et al. 2017, Shaw et al. 2018, Raffel et al. 2020)."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Num

from relpos_jax.memory import Context, KeyValueCache, Memory
from relpos_jax.models.adaptive import token_losses
from relpos_jax.models.basics import as_arrays, as_params, named
from relpos_jax.models.config import ModelConfig
from relpos_jax.models.stack import (
    Stack,
    embed,
    known_ids,
    nan_unless_fits,
    output_logits,
)
from relpos_jax.positional.protocol import PositionEncoding
from relpos_jax.where import Where


@dataclasses.dataclass(frozen=True)
class EncoderDecoderConfig:
    """An encoder, a decoder that looks at it, and how it does.

    Both read one vocabulary through one embedding matrix, which is the output
    projection too where the decoder's `tie_embeddings` says so.

    Attributes:
      encoder: bidirectional.
      decoder: causal, without memory; the same vocabulary, width and type.
      cross: encoding of the distance from a token of the decoder to one of the encoder.
        None of the published models has one, and neither has the default; T5's also
        leaves the factor 1/sqrt(d) out here, which is to say its query projections are
        smaller by that.

    Raises:
      ValueError: two models that do not fit together, or a cross encoding that is
        absolute or looks back only.
    """

    encoder: ModelConfig
    decoder: ModelConfig
    cross: PositionEncoding = PositionEncoding()

    def __post_init__(self):
        if not self.encoder.bidirectional or self.decoder.bidirectional:
            raise ValueError("the encoder must be bidirectional, and the decoder not")
        for name in ("vocabulary", "width", "dtype"):
            one, other = getattr(self.encoder, name), getattr(self.decoder, name)
            if one != other:
                raise ValueError(f"{name} is {one!r} of the encoder, but {other!r}")
        if self.decoder.memory_length:
            raise ValueError("the decoder has no segment memory: memory_length=0")
        for config in (self.encoder, self.decoder):
            if config.adaptive is not None or config.output_transform:
                raise ValueError("adaptive and output_transform are for other models")
        if self.cross.absolute:
            raise ValueError(
                f"{self.cross} adds to the embeddings, which both sequences have "
                "before they meet: give it to the encoder and the decoder"
            )
        self.cross_attention  # noqa: B018 (raises for encodings that look back only)

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        *,
        encoder_position: PositionEncoding | tuple[PositionEncoding, ...] | None = None,
        cross: PositionEncoding = PositionEncoding(),
    ) -> "EncoderDecoderConfig":
        """Returns an encoder-decoder whose halves have the same sizes.

        Args:
          model: the decoder. A pattern that looks back only is not the encoder's too:
            make the two apart.
          encoder_position: the encoder's encoding; None for the decoder's.
          cross: see the class.
        """
        position = model.position if encoder_position is None else encoder_position
        encoder = dataclasses.replace(model, bidirectional=True, position=position)
        return cls(encoder, model, cross)

    @property
    def cross_attention(self) -> ModelConfig:
        """The settings of the layers' attention to the encoder."""
        return dataclasses.replace(
            self.decoder,
            bidirectional=True,
            position=self.cross,
            window=None,
            pattern=None,
            hierarchy=None,
        )


class EncoderDecoder(nnx.Module):
    """A decoder that attends to an encoded sequence; parameters and nothing else.

    A row's target tokens see the source tokens of the same `segment`, so that packed
    pairs stay apart and padding on either side is never seen.
    """

    def __init__(self, config: EncoderDecoderConfig, *, key: jax.Array):
        self.config = config
        decoder, cross = config.decoder, config.cross
        self.encoder = Stack(config.encoder, key=named(key, "encoder"))
        self.decoder = Stack(
            decoder, key=named(key, "decoder"), cross=config.cross_attention
        )
        shared = cross.init_shared(named(key, "cross position"), decoder.dims)
        shares = config.cross_attention.shares(cross)
        self.cross_position = as_params(shared if shares else {})
        shape = (decoder.vocabulary, decoder.width)
        std = decoder.width**-0.5 if decoder.init_std is None else decoder.init_std

        def table(name):
            return nnx.Param(std * jax.random.normal(named(key, name), shape))

        self.embedding = table("embedding")
        self.output = None if decoder.tie_embeddings else table("output")
        bias = nnx.Param(jnp.zeros(decoder.vocabulary)) if decoder.output_bias else None
        self.output_bias = bias

    def init_cache(self, batch: int, capacity: int) -> KeyValueCache:
        """Returns an empty key/value cache of the decoder's own tokens."""
        return self.decoder.init_cache(batch, capacity)

    def encode(
        self,
        tokens: Int[Array, "b s"],
        at: Where,
        *,
        key: jax.Array | None = None,
        spacing: str = "unit",
    ) -> Context:
        """Returns what the decoder looks at: keys and values for each of its layers.

        Args:
          tokens: `[b s]`, the source; what segment 0 covers is not read.
          at: positions and documents, see `relpos_jax.where`.
          key: for dropout; None for none.
          spacing: what is known of positions in advance, as of a decoder's call.
        """
        memory = self.encoder.init_memory(tokens.shape[0])
        self.encoder._check(tokens, memory, spacing)
        x = self._embed(tokens, at)
        states, _ = self.encoder.run(x, at, memory, key=key, spacing=spacing)
        shared = as_arrays(self.cross_position)
        entries = []
        for layer in self.decoder.layers:
            attention = layer.cross_attention
            entries.append(attention.project(states, attention.parameters(shared)))
        return Context(tuple(entries), at, shared)

    def decode(
        self,
        tokens: Int[Array, "b t"],
        at: Where,
        memory: Memory,
        context: Context,
        *,
        key: jax.Array | None = None,
        spacing: str = "unit",
    ) -> tuple[Float[Array, "b t v"], Memory]:
        """Returns next-token logits, float32, and the memory after these tokens.

        Args:
          tokens: `[b t]`, the target so far, or its next tokens after a cache's.
          at: their positions; each sees the source of its own `segment`.
          memory: `init_cache`, or `decoder.init_memory(batch)` for a whole sequence.
          context: what `encode` returned.
          key, spacing: as in `encode`.
        """
        self.decoder._check(tokens, memory, spacing)
        x, after = self.decoder.run(
            self._embed(tokens, at),
            at,
            memory,
            key=key,
            spacing=spacing,
            context=context,
        )
        table = self.embedding if self.output is None else self.output
        bias = None if self.output_bias is None else self.output_bias[...]
        logits = output_logits(x, table[...], bias)
        return nan_unless_fits(memory, tokens.shape[1], logits), after

    def __call__(
        self,
        source: Int[Array, "b s"],
        source_at: Where,
        tokens: Int[Array, "b t"],
        at: Where,
        *,
        key: jax.Array | None = None,
        spacing: str = "unit",
    ) -> Float[Array, "b t v"]:
        """Returns next-token logits of whole sequences: `encode`, then `decode`."""
        keys = (None, None) if key is None else jax.random.split(key)
        context = self.encode(source, source_at, key=keys[0], spacing=spacing)
        memory = self.decoder.init_memory(tokens.shape[0])
        return self.decode(tokens, at, memory, context, key=keys[1], spacing=spacing)[0]

    def losses(
        self,
        source: Int[Array, "b s"],
        source_at: Where,
        tokens: Int[Array, "b t"],
        targets: Int[Array, "b t"],
        at: Where,
        *,
        weight: Num[Array, "b t"] | Bool[Array, "b t"],
        key: jax.Array | None = None,
        spacing: str = "unit",
    ) -> Float[Array, "b t"]:
        """Returns -log p(target) of each target token, nats, float32.

        Args:
          source, source_at: as in `encode`.
          tokens, at: as in `decode`, of whole sequences.
          targets: `[b t]`, the token that follows each.
          weight: where it is 0 nothing is read; the loss there has no meaning.
          key, spacing: as in `encode`.
        """
        logits = self(source, source_at, tokens, at, key=key, spacing=spacing)
        scored = weight > 0
        logits = jnp.where(scored[..., None], logits, 0)
        return token_losses(logits, jnp.where(scored, targets, 0))

    def _embed(self, tokens: Int[Array, "b t"], at: Where) -> Float[Array, "b t w"]:
        config = self.config.decoder
        tokens = known_ids(tokens, at, config.vocabulary)
        x = embed(self.embedding[...], tokens) * config.width**0.5
        return x.astype(config.dtype)


def greedy(
    model: EncoderDecoder,
    source: Int[Array, "b s"],
    source_at: Where,
    count: int,
    *,
    start: int,
    stop: int,
) -> Int[Array, "b n"]:
    """Returns the most likely next token, again and again, `[b count]`.

    The source is encoded and projected once; a step costs one token. To be compiled
    by the caller.

    Args:
      model: the model.
      source, source_at: one document a row.
      count: tokens to return.
      start: the id that every target begins with; it is not returned.
      stop: the id that ends a target; what follows it is `stop` again.
    """
    batch = source.shape[0]
    context = model.encode(source, source_at)
    segment = jnp.max(source_at.segment, axis=1, keepdims=True)

    def step(carry, position):
        tokens, ended, cache = carry
        at = Where(jnp.full((batch, 1), position, jnp.int32), segment)
        logits, cache = model.decode(tokens, at, cache, context, spacing="any")
        tokens = jnp.argmax(logits, axis=-1).astype(tokens.dtype)
        tokens = jnp.where(ended, stop, tokens)
        return (tokens, ended | (tokens == stop), cache), tokens[:, 0]

    first = jnp.full((batch, 1), start, jnp.int32)
    carry = (first, jnp.zeros((batch, 1), bool), model.init_cache(batch, count))
    _, found = jax.lax.scan(step, carry, jnp.arange(count, dtype=jnp.int32))
    return found.T
