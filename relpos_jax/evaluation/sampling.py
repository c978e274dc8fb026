"""Choosing the next token: greedy, temperature, top-k and top-p."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

NEVER = -jnp.inf


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How tokens are chosen, and where a text ends.

    Attributes:
      temperature: divides the logits; 0 takes the likeliest token (greedy).
      top_k: keeps the `k` likeliest tokens (Fan et al. 2018, section 5.2); 0: all.
      top_p: keeps the smallest set of likeliest tokens whose probability reaches `p`
        (nucleus sampling, Holtzman et al. 2020, section 3.1); 1: all. Acts on what
        temperature and top-k leave.
      min_new_tokens: a stop that would end the text before so many tokens does not.
      stop: sequences of token ids; the first to appear ends the text, and is not part
        of it.

    Raises:
      ValueError: a value that makes no sense; the message names it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_new_tokens: int = 0
    stop: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self):
        def require(name: str, allowed: bool, rule: str):
            if not allowed:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")

        require("temperature", 0 <= self.temperature < float("inf"), "0 or more")
        require("top_k", self.top_k >= 0, "0 (all tokens) or more")
        require("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        require("min_new_tokens", self.min_new_tokens >= 0, "0 or more")
        require("stop", all(self.stop), "sequences of at least one token")

    def knobs(self) -> "Knobs":
        """Returns what the compiled program reads, as data."""
        return Knobs(
            jnp.float32(self.temperature),
            jnp.int32(self.top_k),
            jnp.float32(self.top_p),
        )


class Knobs(NamedTuple):
    """Temperature, top-k and top-p as scalars: data, so that none compiles anew."""

    temperature: Float[Array, ""]
    top_k: Int[Array, ""]
    top_p: Float[Array, ""]


def kept(logits: Float[Array, "b v"], knobs: Knobs) -> Float[Array, "b v"]:
    """Returns the logits, minus infinity where top-k or top-p leave a token out.

    Tokens as likely as the last one kept are kept too, and the likeliest always is.
    """
    size = logits.shape[-1]
    ordered = jnp.sort(logits, axis=-1, descending=True)
    count = jnp.where(knobs.top_k == 0, size, jnp.minimum(knobs.top_k, size))
    rank = jnp.arange(size)[None, :]
    ordered = jnp.where(rank < count, ordered, NEVER)
    probability = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # Rounding may leave the sum of all below 1: then nothing may be cut.
    inside = (before < knobs.top_p) | (knobs.top_p >= 1)
    inside = (rank == 0) | (inside & (rank < count))
    least = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= least, logits, NEVER)


def sample(
    keys: Key[Array, " b"], logits: Float[Array, "b v"], knobs: Knobs
) -> Int[Array, " b"]:
    """Returns a token a row, with a key a row.

    Args:
      keys: `[b]`; a row's token depends on its own key and logits alone.
      logits: `[b v]`.
      knobs: see `SamplingConfig`.
    """
    greedy = jnp.argmax(logits, axis=-1)
    hot = logits / jnp.where(knobs.temperature > 0, knobs.temperature, 1.0)
    filtering = (knobs.top_k > 0) | (knobs.top_p < 1)
    hot = jax.lax.cond(filtering, kept, lambda logits, _: logits, hot, knobs)
    drawn = jax.vmap(jax.random.categorical)(keys, hot)
    return jnp.where(knobs.temperature > 0, drawn, greedy).astype(jnp.int32)
