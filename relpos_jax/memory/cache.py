"""Key/value cache for decoding: preallocated slots, each with its own position."""

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

    Keys are kept after the encoding's `key` hook where it `turns_once`, else as they
    come from the projection: a rotation that depends on the sequence's length is never
    baked in. Each layer has keys and values of its own, so that a loop can write to
    them where they are.

    Attributes:
      keys, values: `[b h c d]` for each layer; heads first, as attention reads them, or
        every step would copy the whole cache to turn it round.
      features: `[l b c h f]`, what the encoding keeps of each token, or None.
      at: `[b c]`, where the slots' tokens stand; segment 0 for unused slots.
      cursor: number of tokens written so far, counted once a call; below 0 while tokens
        are left out, see `skipping`.
      ring: write over the oldest slot when full. Otherwise a token past the capacity is
        not written and its logits are NaN.
    """

    keys: tuple[Float[Array, "b h c d"], ...]
    values: tuple[Float[Array, "b h c d"], ...]
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

        def slots():
            shape = (batch, heads, capacity, head_dim)
            return tuple(jnp.zeros(shape, dtype) for _ in range(layers))

        shape = (layers, batch, capacity, heads, features)
        return cls(
            slots(),
            slots(),
            jnp.zeros(shape, jnp.float32) if features else None,
            where.empty(batch, capacity),
            jnp.zeros((), jnp.int32),
            ring,
        )

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self.keys[0].shape[2]

    def skipping(self, count: Int[Array, ""] | int) -> "KeyValueCache":
        """Returns an empty cache that will not keep the next `count` tokens.

        For padding in front of the first prompt: it takes no slots, and so no room.
        """
        return dataclasses.replace(self, cursor=jnp.asarray(-count, jnp.int32))

    def layout(self, unit: bool) -> None:
        """Slots may stand in any order, so nothing is known in advance."""
        return None

    def _slots(self, count: int) -> Int[Array, " t"]:
        """Returns where to write, `capacity` (out of bounds) for what is not kept."""
        slots = self.cursor + jnp.arange(count, dtype=jnp.int32)
        kept = slots % self.capacity if self.ring else slots
        return jnp.where(slots < 0, self.capacity, kept)

    def _put(self, old, new, axis=1):
        new, slots = new.astype(old.dtype), self._slots(new.shape[axis])
        if len(slots) > 1 or old.ndim == 2:
            return old.at[(slice(None),) * axis + (slots,)].set(new, mode="drop")

        def write():
            return jax.lax.dynamic_update_slice_in_dim(old, new, slots[0], axis)

        # XLA makes several copies of the cache of other forms (in a loop, on CPU). But
        # places are written as above: it finds out that all layers write the same, and
        # what an encoding computes of them is computed once for all layers.
        return jax.lax.cond(slots[0] < self.capacity, write, lambda: old)

    def _put_at(self, at: Where) -> Where:
        return jax.tree.map(self._put, self.at, at)

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
        batch = self.at.position.shape[0]
        if batch != x.shape[0]:
            raise ValueError(
                f"the cache is for batch {batch}, but tokens have batch "
                f"{x.shape[0]}; start from model.init_cache(batch, capacity)"
            )
        k, v, features = project(x)
        k = self._put(self.keys[layer], jnp.swapaxes(k, 1, 2), 2)
        v = self._put(self.values[layer], jnp.swapaxes(v, 1, 2), 2)
        if self.features is not None:
            features = self._put(self.features[layer], features)
        entry = (k, v, features)
        k, v = (jnp.swapaxes(y, 1, 2).astype(x.dtype) for y in (k, v))
        projected = (k, v, features)
        return projected, self._put_at(at), entry

    def write(self, entries: Sequence[tuple], at: Where):
        """Returns the cache after these tokens."""
        keys, values, features = zip(*entries, strict=True)
        return dataclasses.replace(
            self,
            keys=keys,
            values=values,
            features=None if self.features is None else jnp.stack(features),
            at=self._put_at(at),
            cursor=self.cursor + at.position.shape[1],
        )
