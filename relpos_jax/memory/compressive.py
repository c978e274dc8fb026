"""Compressive memory: slots of compressed states behind segment memory.

Rae et al. 2020, section 3: what overflows segment memory is compressed instead of
forgotten. Both memories are data, each with its own `Where`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from relpos_jax import where
from relpos_jax.masks import Mask
from relpos_jax.memory.compression import Leaving
from relpos_jax.relative import Layout
from relpos_jax.where import Where


class Entry(NamedTuple):
    """What one layer gives to `CompressiveMemory.write`.

    Attributes:
      states: `[b t w]`, the layer's inputs at the new tokens.
      slots: `[b g w]`, what became of the states that leave; None without slots.
      at: `[b g]`, where the slots stand.
      received: `[b n+t]`, attention that each state got in this call, summed over
        queries and heads; None where nobody asks.
      visible: `[b n+t]`, number of queries of this call that saw it, likewise.
      auxiliary: `[2]`, sum and count of the layer's auxiliary loss.
    """

    states: Float[Array, "b t w"]
    slots: Float[Array, "b g w"] | None = None
    at: Where | None = None
    received: Float[Array, "b n"] | None = None
    visible: Float[Array, "b n"] | None = None
    auxiliary: Float[Array, " two"] | None = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "hidden",
        "at",
        "compressed",
        "compressed_at",
        "usage",
        "asked",
        "fresh",
        "auxiliary",
    ],
    meta_fields=["length", "rate", "every", "ragged"],
)
@dataclasses.dataclass(frozen=True)
class CompressiveMemory:
    """Segment memory of `length` states, and compressed memory of the states before.

    A state that is pushed out of the last `length` waits until its group of `rate` is
    complete, and is attended to as it is for so long: segment memory holds up to
    `rate - 1` states more. Groups are counted from each row's first token, so empty
    slots are in no group, and it doesn't matter how a text is cut into calls. Segments
    of a whole number of groups leave nothing waiting.

    With `every` above 1 states are compressed at the ends of segments of `every` tokens
    and not before, however many tokens a call has. So the tokens of a text, one a call,
    see what they see when it is read in segments of `every`; no call may cross such an
    end.

    Attributes:
      hidden: `[l b n w]`, layer inputs, waiting ones first; `n` is `length` and room
        for those that wait.
      at: `[b n]`, where they stand; empty slots have segment 0.
      compressed: `[l b k w]`, compressed states.
      compressed_at: `[l b k]`, where they stand: where the newest state that a slot is
        made of stood. They differ by layer for "most_used" only.
      usage: `[l b n]`, attention that each state got so far; None where nobody asks.
      asked: `[b n]`, number of queries that it was visible to.
      fresh: `[b]`, tokens since the last compression, where `every` is above 1.
      auxiliary: `[2]`, sum and count of the auxiliary loss of the last call; zeros
        where the call was not asked for it.
      length: states of segment memory.
      rate: states that become one slot.
      every: tokens between compressions.
      ragged: padding takes no slot, so rows may pad differently. Otherwise it does, as
        in segment memory.
    """

    hidden: Float[Array, "l b n w"]
    at: Where
    compressed: Float[Array, "l b k w"]
    compressed_at: Where
    usage: Float[Array, "l b n"] | None
    asked: Float[Array, "b n"] | None
    fresh: Int[Array, " b"]
    auxiliary: Float[Array, " two"]
    length: int
    rate: int
    every: int = 1
    ragged: bool = False

    @classmethod
    def empty(
        cls,
        layers: int,
        batch: int,
        length: int,
        slots: int,
        width: int,
        dtype=jnp.float32,
        *,
        rate: int,
        used: bool = False,
        every: int = 1,
        ragged: bool = False,
    ):
        """Returns a memory of empty slots; `used` keeps account of attention."""
        for name, value, least in (
            ("length", length, 0),
            ("slots", slots, 0),
            ("rate", rate, 1),
            ("every", every, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        size = length + (rate - 1 + every - 1 if slots else 0)
        used = used and slots > 0
        at = where.empty(batch, slots)
        return cls(
            jnp.zeros((layers, batch, size, width), dtype),
            where.empty(batch, size),
            jnp.zeros((layers, batch, slots, width), dtype),
            jax.tree.map(lambda x: jnp.repeat(x[None], layers, axis=0), at),
            jnp.zeros((layers, batch, size), jnp.float32) if used else None,
            jnp.zeros((batch, size), jnp.float32) if used else None,
            jnp.zeros(batch, jnp.int32),
            jnp.zeros(2, jnp.float32),
            length,
            rate,
            every,
            ragged,
        )

    @property
    def slots(self) -> int:
        """Number of compressed slots."""
        return self.compressed.shape[2]

    @property
    def size(self) -> int:
        """Number of states that are not compressed, those that wait among them."""
        return self.hidden.shape[2]

    def layout(self, unit: bool) -> Layout:
        """Returns where new tokens stand among the keys: behind all slots."""
        return Layout(offset=self.slots + self.size, unit=unit, free=self.slots)

    def read(
        self,
        layer: int,
        x: Float[Array, "b t w"],
        at: Where,
        project: Callable[[Float[Array, "b k w"]], tuple],
    ):
        """Returns `project` of all states, their places, and an entry to complete.

        Keys are the compressed slots, the states that are not compressed, and the
        tokens themselves. No gradient enters memory.
        """
        self.check(x.shape[0], x.shape[2])
        old = jnp.concatenate([self.compressed[layer], self.hidden[layer]], axis=1)
        old = jax.lax.stop_gradient(old).astype(x.dtype)
        places = jax.tree.map(lambda x: x[layer], self.compressed_at)
        places = where.concatenate(where.concatenate(places, self.at), at)
        return project(jnp.concatenate([old, x], axis=1)), places, Entry(x)

    def visible(self, at: Where, mask: Mask) -> Float[Array, "b n"]:
        """Returns how many of the new queries see each state, old and new."""
        sees = mask(at, where.concatenate(self.at, at))
        return jnp.sum(sees.astype(jnp.float32), axis=1)

    def leaving(
        self,
        layer: int,
        entry: Entry,
        at: Where,
    ) -> Leaving:
        """Returns the states of a layer that this call pushes into compressed memory.

        Args:
          layer: the layer.
          entry: its inputs at the new tokens, and what was seen of them.
          at: where these stand.
        """
        plan, x = self._plan(at), entry.states
        states = jnp.concatenate([self.hidden[layer].astype(x.dtype), x], axis=1)
        usage = None
        if self.usage is not None:
            asked = self._grown(self.asked, entry.visible)
            usage = self._grown(self.usage[layer], entry.received)
            usage = usage / jnp.maximum(asked, 1)
            usage = jnp.take_along_axis(plan.ordered(usage, 1), plan.index, axis=1)
        states = jnp.take_along_axis(
            plan.ordered(jax.lax.stop_gradient(states), 1),
            plan.index[..., None],
            axis=1,
        )
        places = jax.tree.map(
            lambda x: jnp.take_along_axis(x, plan.index, axis=1), plan.line
        )
        inside = (
            jnp.arange(plan.index.shape[1])[None] < (plan.count * self.rate)[:, None]
        )
        places = places._replace(segment=jnp.where(inside, places.segment, 0))
        return Leaving(states, places, plan.count, usage)

    def write(
        self,
        entries: Sequence[Entry],
        at: Where,
    ) -> "CompressiveMemory":
        """Returns the memory after these tokens."""
        new = jnp.stack([entry.states for entry in entries]).astype(self.hidden.dtype)
        plan, start = self._plan(at), at.position.shape[1]
        hidden = plan.ordered(jnp.concatenate([self.hidden, new], axis=2), 2)
        hidden = jax.lax.stop_gradient(hidden[:, :, start:])
        place = jax.tree.map(lambda x: x[:, start:], plan.line)
        memory = dataclasses.replace(self, hidden=hidden, at=place)
        if not self.slots:
            return memory
        # What was compressed is no longer there for itself.
        gone = (plan.start + plan.count * self.rate)[:, None]
        left = jnp.arange(start, start + self.size)[None] < gone
        place = place._replace(segment=jnp.where(left, 0, place.segment))
        index = plan.count[:, None] + jnp.arange(self.slots)[None]

        def shifted(old, entries):
            both = jnp.concatenate([old, jnp.stack(entries).astype(old.dtype)], axis=2)
            places = index[None] if both.ndim == 3 else index[None, :, :, None]
            return jnp.take_along_axis(both, places, axis=2)

        compressed = shifted(self.compressed, [entry.slots for entry in entries])
        compressed_at = Where(
            *(
                shifted(old, [entry.at[i] for entry in entries])
                for i, old in enumerate(self.compressed_at)
            )
        )
        changes = {}
        if self.usage is not None:
            usage = [
                self._grown(old, entry.received)
                for old, entry in zip(self.usage, entries, strict=True)
            ]
            asked = self._grown(self.asked, entries[0].visible)
            changes = dict(
                usage=plan.ordered(jnp.stack(usage), 2)[:, :, start:],
                asked=plan.ordered(asked, 1)[:, start:],
            )
        found = [entry.auxiliary for entry in entries if entry.auxiliary is not None]
        return dataclasses.replace(
            memory,
            at=place,
            compressed=jax.lax.stop_gradient(compressed),
            compressed_at=compressed_at,
            fresh=plan.fresh,
            auxiliary=sum(found) if found else jnp.zeros(2, jnp.float32),
            **changes,
        )

    def _grown(self, old, more):
        """Adds what a call brought to the old states' numbers, and to none of new."""
        new = jnp.zeros((old.shape[0], more.shape[1] - old.shape[1]), old.dtype)
        return jnp.concatenate([old, new], axis=1) + jax.lax.stop_gradient(more)

    def _plan(self, at: Where) -> "_Plan":
        """Says which columns of old and new states together are compressed."""
        line = where.concatenate(self.at, at)
        order = None
        if self.ragged:
            # Sorting is stable: empty slots come to the front, tokens keep their order.
            order = jnp.argsort(line.segment != 0, axis=1)
            line = jax.tree.map(lambda x: jnp.take_along_axis(x, order, axis=1), line)
        batch, columns = line.segment.shape
        over = columns - self.length
        groups = over // self.rate if self.slots else 0
        real = line.segment[:, :over] != 0
        column = jnp.arange(over)[None]
        start = jnp.min(jnp.where(real, column, over), axis=1, initial=over)
        count = (over - start) // self.rate
        fresh = self.fresh
        if self.every > 1:
            fresh = fresh + jnp.sum((at.segment != 0).astype(jnp.int32), axis=1)
            ends = fresh >= self.every
            count = jnp.where(ends, count, 0)
            fresh = jnp.where(ends, 0, fresh)
        index = start[:, None] + jnp.arange(groups * self.rate)[None]
        index = jnp.minimum(index, columns - 1)
        return _Plan(line, order, start, count, index, fresh)

    def check(self, batch: int, width: int) -> None:
        """Raises ValueError if the memory is another batch's or another model's."""
        if self.hidden.shape[1] != batch or self.hidden.shape[3] != width:
            raise ValueError(
                f"memory is for batch {self.hidden.shape[1]} and width "
                f"{self.hidden.shape[3]}, but tokens have batch {batch} and width "
                f"{width}; start from model.init_memory(batch)"
            )


class _Plan(NamedTuple):
    """What a call does to the line of old and new states, `n + t` columns.

    Attributes:
      line: where they stand, in their new order.
      order: `[b n+t]`, their old columns; None where nothing moves.
      start: `[b]`, the first column that holds a token, among those that overflow.
      count: `[b]`, groups that are compressed, from there on.
      index: `[b g*c]`, their columns, and others past them.
      fresh: `[b]`, the memory's new `fresh`.
    """

    line: Where
    order: Int[Array, "b n"] | None
    start: Int[Array, " b"]
    count: Int[Array, " b"]
    index: Int[Array, "b m"]
    fresh: Int[Array, " b"]

    def ordered(self, x: jax.Array, axis: int) -> jax.Array:
        """Puts the columns of `x`, its `axis` behind the batch's, in their order."""
        if self.order is None:
            return x
        shape = [1] * x.ndim
        shape[axis - 1 : axis + 1] = self.order.shape
        return jnp.take_along_axis(x, self.order.reshape(shape), axis=axis)
