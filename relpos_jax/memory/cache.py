"""Key/value cache for decoding: unrotated keys in preallocated slots."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from relpos_jax import where
from relpos_jax.where import Where


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "features", "at", "cursor"],
    meta_fields=["ring"],
)
@dataclasses.dataclass(frozen=True)
class KeyValueCache:
    """Keys and values of past tokens; each slot knows its own position.

    Keys are kept as they come from the projection, before the encoding's `key` hook, so
    a rotation that depends on the sequence's length is never baked in.

    Attributes:
      keys, values: `[l b c h d]`.
      features: `[l b c h f]`, what the encoding keeps of each token, or None.
      at: `[b c]`, where the slots' tokens stand; segment 0 for unused slots.
      cursor: number of tokens written so far, counted once a call.
      ring: write over the oldest slot when full. Otherwise a token past the capacity is
        not written and its logits are NaN.
    """

    keys: Float[Array, "l b c h d"]
    values: Float[Array, "l b c h d"]
    features: Float[Array, "l b c h f"] | None
    at: Where
    cursor: Int[Array, ""]
    ring: bool = False

    @classmethod
    def empty(
        cls,
        layers: int,
        batch: int,
        capacity: int,
        heads: int,
        head_dim: int,
        dtype,
        *,
        features: int = 0,
        ring: bool = False,
    ):
        """Returns a cache of unused slots, with `features` numbers a head."""
        if capacity < 1:
            raise ValueError(f"a cache needs at least one slot, got {capacity}")
        shape = (layers, batch, capacity, heads)
        return cls(
            jnp.zeros((*shape, head_dim), dtype),
            jnp.zeros((*shape, head_dim), dtype),
            jnp.zeros((*shape, features), jnp.float32) if features else None,
            where.empty(batch, capacity),
            jnp.zeros((), jnp.int32),
            ring,
        )

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self.keys.shape[2]

    def layout(self, unit: bool) -> None:
        """Slots may stand in any order, so nothing is known in advance."""
        return None

    def _slots(self, count: int) -> Int[Array, " t"]:
        slots = self.cursor + jnp.arange(count, dtype=jnp.int32)
        return slots % self.capacity if self.ring else slots

    def _put(self, old, new, axis_first):
        slots = self._slots(new.shape[axis_first])
        index = (slice(None),) * axis_first + (slots,)
        return old.at[index].set(new.astype(old.dtype), mode="drop")

    def _put_at(self, at: Where) -> Where:
        return Where(
            self._put(self.at.position, at.position, 1),
            self._put(self.at.segment, at.segment, 1),
        )

    def fits(self, count: int) -> Bool[Array, ""]:
        """Returns whether `count` more tokens have a slot."""
        if self.ring:
            return jnp.asarray(True)
        return self.cursor + count <= self.capacity

    def read(
        self,
        layer: int,
        x: Float[Array, "b t w"],
        at: Where,
        project: Callable[[Float[Array, "b t w"]], tuple],
    ):
        """Returns all that `project` gives, its places, and an entry to `write`."""
        if self.keys.shape[1] != x.shape[0]:
            raise ValueError(
                f"the cache is for batch {self.keys.shape[1]}, but tokens have batch "
                f"{x.shape[0]}; start from model.init_cache(batch, capacity)"
            )
        old = (self.keys, self.values, self.features)
        entry = jax.tree.map(
            lambda old, new: self._put(old[layer], new, 1), old, project(x)
        )
        k, v, features = entry
        projected = (k.astype(x.dtype), v.astype(x.dtype), features)
        return projected, self._put_at(at), entry

    def write(self, entries: Sequence[tuple], at: Where):
        """Returns the cache after these tokens."""
        keys, values, features = jax.tree.map(lambda *x: jnp.stack(x), *entries)
        return dataclasses.replace(
            self,
            keys=keys,
            values=values,
            features=features,
            at=self._put_at(at),
            cursor=self.cursor + at.position.shape[1],
        )
