"""Encoders, and their head for masked tokens (Devlin et al. 2019, section 3.1)."""

from typing import ClassVar

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Num

from relpos_jax.memory import Memory
from relpos_jax.models.basics import named, norm, normal
from relpos_jax.models.config import ModelConfig
from relpos_jax.models.decoder import TransformerXL
from relpos_jax.models.layers import ACTIVATIONS
from relpos_jax.where import Where


class Encoder(TransformerXL):
    """Every token sees its whole document: the decoder's layers, without its mask.

    It has no memory. `config.bidirectional` says that a configuration is an encoder's,
    `config.output_transform` that its head is BERT's; embedding, softmax and their
    settings are the decoder's.

    Raises:
      ValueError: the configuration is a decoder's.
    """

    bidirectional: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, *, key: jax.Array):
        super().__init__(config, key=key)
        has_head = config.output_transform
        self.transform = self._transform(key) if has_head else None
        self.transform_norm = norm(config) if has_head else None

    def _transform(self, key: jax.Array) -> nnx.Linear:
        width = self.config.width
        return nnx.Linear(
            width,
            width,
            kernel_init=normal(self.config, width),
            dtype=self.config.dtype,
            rngs=nnx.Rngs(named(key, "transform")),
        )

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        at: Where,
        *,
        key: jax.Array | None = None,
        spacing: str = "unit",
    ) -> Float[Array, "b t v"]:
        """Returns logits of the token at each place, float32.

        With `config.adaptive` they are log-probabilities.

        Args:
          tokens: `[b t]`, ids; what segment 0 covers is not read.
          at: their positions and documents, from lengths or packed: see
            `relpos_jax.where`.
          key: for dropout; None for none.
          spacing: what is known of positions in advance, as of a decoder's call.

        Raises:
          ValueError: float ids, an unknown spacing.
        """
        return self.logits(self.encode(tokens, at, key=key, spacing=spacing))

    def encode(
        self,
        tokens: Int[Array, "b t"],
        at: Where,
        *,
        key: jax.Array | None = None,
        spacing: str = "unit",
    ) -> Float[Array, "b t w"]:
        """Returns the last layer's states; arguments and errors are those of a call."""
        memory = self.init_memory(tokens.shape[0])
        return self.hidden(tokens, at, memory, key=key, spacing=spacing)[0]

    def transformed(self, hidden: Float[Array, "b t w"]) -> Float[Array, "b t w"]:
        if self.transform is None:
            return hidden
        activate = ACTIVATIONS[self.config.activation]
        return self.transform_norm(activate(self.transform(hidden)))

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
        """Returns -log p(target) of each token, nats, float32, and the memory as it is.

        Args:
          tokens: `[b t]`, what is read, with masked tokens.
          targets: `[b t]`, what stood there before: of the same place, not the next.
          memory: of length 0, so that training sees one interface.
          weight: where it is 0 nothing is read; 1 for the tokens that were masked. An
            encoder sees all others, so it must be told.

        Raises:
          ValueError: no weight, and the errors of a call.
        """
        if weight is None:
            raise ValueError(
                "an encoder sees the tokens themselves, so that to predict them all "
                "means nothing: give a weight that is 1 where tokens were masked"
            )
        return super().losses(
            tokens, targets, at, memory, weight=weight, key=key, spacing=spacing
        )


def build(config: ModelConfig, *, key: jax.Array) -> TransformerXL:
    """Returns the model of a configuration: an encoder where it is bidirectional."""
    kind = Encoder if config.bidirectional else TransformerXL
    return kind(config, key=key)
