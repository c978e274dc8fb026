"""What cross-attention looks at: another sequence's keys and values, computed once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from relpos_jax.where import Where


class Context(NamedTuple):
    """Keys and values of an encoded sequence for each layer of a decoder.

    Layers read it in place of a memory and never write to it, so however many tokens
    are decoded, the encoded sequence is projected once.

    Attributes:
      entries: for each layer keys `[b k h d]`, values `[b k h d]` and what the encoding
        keeps of each key (`[b k h f]` or None).
      at: `[b k]`, where the keys stand; queries attend to those of equal segment.
      shared: the position parameters that all layers' cross-attentions share.
    """

    entries: tuple[tuple[Float[Array, "b k h d"], Float[Array, "b k h d"], Any], ...]
    at: Where
    shared: dict[str, Any]

    def read(
        self,
        layer: int,
        x: Float[Array, "b t w"],
        at: Where,
        project: Callable[[Float[Array, "b t w"]], tuple],
    ):
        """Returns the layer's keys, values and features, their places, and no entry.

        Raises:
          ValueError: the context is another batch's.
        """
        batch = self.at.position.shape[0]
        if batch != x.shape[0]:
            raise ValueError(
                f"the context is of batch {batch}, but tokens have batch {x.shape[0]}; "
                f"encode as many sequences as are decoded"
            )
        return self.entries[layer], self.at, None

    def repeated(self, times: int) -> "Context":
        """Returns each row `times` times, for several continuations of each."""

        def repeat(x: jax.Array):
            return x.repeat(times, axis=0)

        entries, at = jax.tree.map(repeat, (self.entries, self.at))
        return self._replace(entries=entries, at=at)
