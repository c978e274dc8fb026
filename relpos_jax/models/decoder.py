"""Transformer-XL as a language model (Dai et al. 2019)."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Num

from relpos_jax.memory import Memory
from relpos_jax.models import adaptive
from relpos_jax.models.basics import as_arrays, as_params, named
from relpos_jax.models.config import ModelConfig
from relpos_jax.models.stack import (
    SPACINGS,
    Stack,
    embed,
    known_ids,
    nan_unless_fits,
    output_logits,
)
from relpos_jax.where import Where

__all__ = ["SPACINGS", "TransformerXL", "count_parameters"]


class TransformerXL(Stack):
    """A decoder whose memory is an argument and a result.

    Holds `nnx.Param`s and nothing else: split it once and use plain JAX transforms.
    With memory of length 0 it is a plain transformer.

    Raises:
      ValueError: the configuration is an encoder's.
    """

    bidirectional: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, *, key: jax.Array):
        if config.bidirectional != self.bidirectional:
            raise ValueError(
                f"{type(self).__name__} needs bidirectional={self.bidirectional}: "
                "an Encoder sees every token, a TransformerXL those before it"
            )
        super().__init__(config, key=key)
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
        # Assigned once each: NNX does not let None turn into a parameter.
        plain = config.adaptive is None
        own = plain and not config.tie_embeddings
        self.output = self._output(std, key) if own else None
        biased = plain and config.output_bias
        self.output_bias = nnx.Param(jnp.zeros(config.vocabulary)) if biased else None

    def _output(self, std: float, key: jax.Array) -> nnx.Param:
        shape = (self.config.vocabulary, self.config.width)
        return nnx.Param(std * jax.random.normal(named(key, "output"), shape))

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
        return nan_unless_fits(memory, tokens.shape[1], logits), after

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
        auxiliary: bool = False,
    ) -> tuple[Float[Array, "b t"], Memory]:
        """Returns -log p(target) of each token, nats, float32, and the memory after.

        With `config.adaptive` the vocabulary's logits are never all there at once: see
        `adaptive.losses`. The other arguments and errors are those of a call.

        Args:
          targets: `[b t]`, the token that follows each input; one outside the
            vocabulary gives NaN.
          weight: where it is 0 nothing is read, neither target nor state; the loss
            there has no meaning, and no gradient. None reads all.
          auxiliary: see `hidden`.
        """
        hidden, after = self.hidden(
            tokens, at, memory, key=key, spacing=spacing, auxiliary=auxiliary
        )
        config, scored = self.config, None if weight is None else weight > 0
        if scored is not None:
            targets = jnp.where(scored, targets, 0)
        if config.adaptive is None:
            logits = self.logits(hidden)
            if scored is not None:
                logits = jnp.where(scored[..., None], logits, 0)
            losses = adaptive.token_losses(logits, targets)
        else:
            hidden = self.transformed(hidden)
            if scored is not None:
                hidden = jnp.where(scored[..., None], hidden, 0)
            parts = as_arrays(self.embedding), as_arrays(self.softmax)
            losses = adaptive.losses(config.adaptive, *parts, hidden, targets)
        return nan_unless_fits(memory, tokens.shape[1], losses), after

    def hidden(
        self,
        tokens: Int[Array, "b t"],
        at: Where,
        memory: Memory,
        *,
        key: jax.Array | None = None,
        spacing: str = "unit",
        auxiliary: bool = False,
    ) -> tuple[Float[Array, "b t w"], Memory]:
        """Returns the states that the logits are made of, and the memory after them.

        Arguments and errors are those of a call of the model. With `auxiliary` a
        compressive memory comes back with its loss, `memory.auxiliary`.
        """
        config = self.config
        self._check(tokens, memory, spacing)
        x = self._embed(known_ids(tokens, at, config.vocabulary))
        x = (x * config.width**0.5).astype(config.dtype)
        return self.run(x, at, memory, key=key, spacing=spacing, auxiliary=auxiliary)

    def _embed(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t w"]:
        config = self.config
        if config.adaptive is not None:
            table = as_arrays(self.embedding)
            return adaptive.embed(config.adaptive, table, tokens, config.dtype)
        return embed(self.embedding[...], tokens)

    def transformed(self, hidden: Float[Array, "b t w"]) -> Float[Array, "b t w"]:
        """Returns what meets the vocabulary's vectors; an encoder may have a head."""
        return hidden

    def logits(self, hidden: Float[Array, "b t w"]) -> Float[Array, "b t v"]:
        """Returns next-token logits, float32, of what `hidden` returned.

        With `config.adaptive` they are log-probabilities.
        """
        hidden = self.transformed(hidden)
        if self.config.adaptive is not None:
            parts = as_arrays(self.embedding), as_arrays(self.softmax)
            return adaptive.log_probabilities(self.config.adaptive, *parts, hidden)
        table = self.embedding if self.output is None else self.output
        bias = None if self.output_bias is None else self.output_bias[...]
        return output_logits(hidden, table[...], bias)


def count_parameters(config: ModelConfig, kind: type = TransformerXL) -> int:
    """Returns the number of parameters of a model of a class, allocating none."""
    shapes = nnx.eval_shape(lambda: kind(config, key=jax.random.key(0)))
    leaves = jax.tree.leaves(nnx.state(shapes, nnx.Param))
    return sum(leaf.size for leaf in leaves)
