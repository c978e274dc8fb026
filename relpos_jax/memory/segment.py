"""Segment memory: each layer's last input states (Dai et al. 2019, section 3.2)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from relpos_jax import where
from relpos_jax.relative import Layout
from relpos_jax.where import Where


class SegmentMemory(NamedTuple):
    """The inputs of every layer at the last `m` tokens, which new tokens look back on.

    Keys and values are projected from them again with the current weights. Length 0 is
    a plain transformer with the same pytree structure.

    Attributes:
      hidden: `[l b m w]`, layer inputs; layer `l`'s are what layer `l` saw.
      at: `[b m]`, where they stand; slots that hold nothing yet have segment 0.
    """

    hidden: Float[Array, "l b m w"]
    at: Where

    @classmethod
    def empty(cls, layers: int, batch: int, length: int, width: int, dtype=jnp.float32):
        """Returns a memory of `length` empty slots."""
        if length < 0:
            raise ValueError(f"memory length must not be negative, got {length}")
        hidden = jnp.zeros((layers, batch, length, width), dtype)
        return cls(hidden, where.empty(batch, length))

    @property
    def length(self) -> int:
        """Number of slots."""
        return self.hidden.shape[2]

    def layout(self, unit: bool) -> Layout:
        """Returns where new tokens stand among the keys: behind all slots."""
        return Layout(offset=self.length, unit=unit)

    def read(
        self,
        layer: int,
        x: Float[Array, "b t w"],
        at: Where,
        project: Callable[[Float[Array, "b k w"]], tuple],
    ):
        """Returns `project` of all states, their places, and an entry to `write`.

        `project` turns layer inputs into keys, values and features. No gradient enters
        memory, unless it is `differentiable`.
        """
        self.check(x.shape[0], x.shape[2])
        old = self._gate(self.hidden[layer]).astype(x.dtype)
        projected = project(jnp.concatenate([old, x], axis=1))
        return projected, where.concatenate(self.at, at), x

    def write(self, entries: Sequence[Float[Array, "b t w"]], at: Where):
        """Returns the memory after these tokens: the last `m` of old and new."""
        length = self.length
        if length == 0:
            return self
        start = at.position.shape[1]
        new = jnp.stack(entries).astype(self.hidden.dtype)
        hidden = jnp.concatenate([self.hidden, new], axis=2)[:, :, start:]
        place = jax.tree.map(lambda x: x[:, start:], where.concatenate(self.at, at))
        assert hidden.shape[2] == length
        return self._replace(hidden=self._gate(hidden), at=place)

    def differentiable(self) -> "DifferentiableMemory":
        """Returns the same memory, through which gradients flow from now on."""
        return DifferentiableMemory(*self)

    def detached(self) -> "SegmentMemory":
        """Returns the same memory, through which no gradient flows."""
        return SegmentMemory(jax.lax.stop_gradient(self.hidden), self.at)

    def _gate(self, hidden: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(hidden)

    def check(self, batch: int, width: int) -> None:
        """Raises ValueError if the memory is another batch's or another model's."""
        if self.hidden.shape[1] != batch or self.hidden.shape[3] != width:
            raise ValueError(
                f"memory is for batch {self.hidden.shape[1]} and width "
                f"{self.hidden.shape[3]}, but tokens have batch {batch} and width "
                f"{width}; start from model.init_memory(batch)"
            )


class DifferentiableMemory(SegmentMemory):
    """Segment memory through which gradients flow, into what wrote it.

    For losses over several segments in one graph, such as training with gradients
    through the last k. A type of its own, so that no gradient passes unless asked.
    """

    def _gate(self, hidden: jax.Array) -> jax.Array:
        return hidden
