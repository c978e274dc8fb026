"""Batches of a token stream, each a pure function of the step.

No iterator and no state: `batch(step)` gives the same tokens whenever and wherever it
is asked, so a resumed run goes on exactly where it stopped by knowing its step alone,
and several processes each read their own rows of the same batch. The targets are
shifted here, once; a loss takes them as they are.
"""

import dataclasses
from typing import NamedTuple

import grain
import numpy as np
from jaxtyping import Float32, Int32, Integer

from relpos_jax.data import store
from relpos_jax.where import Where


class Batch(NamedTuple):
    """Tokens, what follows each of them, and where they stand.

    From `stack`, every array has one more axis in front, `[s b t]`.

    Attributes:
      inputs: `[b t]`, token ids.
      targets: `[b t]`, the token that follows each input.
      at: positions and segments of the inputs, `[b t]`.
      weight: `[b t]`, 1 where the target counts for the loss, else 0: where documents
        are told apart, a document's first token follows from nothing.
    """

    inputs: Int32[np.ndarray, "*s b t"]
    targets: Int32[np.ndarray, "*s b t"]
    at: Where
    weight: Float32[np.ndarray, "*s b t"]


_IDS = 2**31 - 2  # segment ids, 1 and more in int32


@dataclasses.dataclass(frozen=True, eq=False)
class _Batches:
    """What both kinds of batches share: sizes, the process's share, stacking."""

    tokens: np.ndarray
    batch_size: int
    length: int

    def __post_init__(self):
        if self.tokens.ndim != 1 or self.tokens.dtype.kind not in "iu":
            raise ValueError(
                f"tokens must be integers along one axis, got {self.tokens.dtype} of "
                f"shape {self.tokens.shape}"
            )
        for name in ("batch_size", "length"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )
        if not 0 <= self.process_index < self.process_count:
            raise ValueError(
                f"process_index must be in [0, process_count), got "
                f"{self.process_index} of {self.process_count} processes"
            )
        if self.batch_size % self.process_count:
            raise ValueError(
                f"a batch of {self.batch_size} rows cannot be dealt evenly to "
                f"{self.process_count} processes: make batch_size a multiple of them"
            )
        starts = self.documents
        if starts is not None and starts.size:
            within = 0 <= starts[0] and starts[-1] < self.tokens.size
            if not within or (np.diff(starts) < 0).any():
                raise ValueError(
                    f"documents must be places in the {self.tokens.size} tokens, "
                    f"rising, got {starts[0]} to {starts[-1]}"
                )
        if self.tokens.size < self.tokens_needed:
            raise ValueError(
                f"too few tokens: {type(self).__name__} with batch_size="
                f"{self.batch_size} and length={self.length} needs at least "
                f"{self.tokens_needed}, found {self.tokens.size}; take a longer text, "
                f"or a smaller batch or length"
            )

    @property
    def tokens_per_step(self) -> int:
        """Number of targets in a step, of all processes together."""
        return self.batch_size * self.length

    def sharded(self, process_index: int, process_count: int) -> "_Batches":
        """Returns the same batches for one process of several.

        Process p reads the p-th block of `batch_size / process_count` rows of every
        global batch: together all rows, none twice. `batch_size`, `tokens_per_step`
        and `steps_per_epoch` stay those of the global batch.

        Raises:
          ValueError: the rows cannot be dealt evenly, or there is no such process.
        """
        return dataclasses.replace(
            self, process_index=process_index, process_count=process_count
        )

    def stack(self, first_step: int, count: int) -> Batch:
        """Returns the batches of `count` steps from `first_step` on, `[s b t]`.

        Raises:
          ValueError: `first_step` is negative or `count` is not positive.
        """
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        batches = [self.batch(first_step + step) for step in range(count)]
        inputs, targets, at, weight = zip(*batches, strict=True)
        position, segment = zip(*at, strict=True)
        at = Where(np.stack(position), np.stack(segment))
        return Batch(np.stack(inputs), np.stack(targets), at, np.stack(weight))

    def _rows(self) -> range:
        """This process's rows of the global batch."""
        count = self.batch_size // self.process_count
        return range(self.process_index * count, (self.process_index + 1) * count)

    def _at(self, starts: list[int], position: int, segment: int) -> Batch:
        """Returns the batch whose rows begin at tokens `starts`."""
        # Slices, so that of a memory-mapped file only these pages are read.
        rows = [self.tokens[start : start + self.length + 1] for start in starts]
        rows = np.stack(rows).astype(np.int32)
        store.release(self.tokens)  # or they add up to the whole file
        shape = (len(starts), self.length)
        positions = position + np.arange(self.length, dtype=np.int32)
        segments, weight = np.full(shape, segment, np.int32), np.ones(shape, np.float32)
        if self.documents is not None:
            places = np.array(starts)[:, None] + np.arange(self.length + 1)
            document = np.searchsorted(self.documents, places, side="right")
            # Ids of an epoch lie behind those of the one before.
            first = (segment - 1) * (self.documents.size + 1)
            segments = ((first + document[:, :-1]) % _IDS + 1).astype(np.int32)
            weight[document[:, :-1] != document[:, 1:]] = 0
        return Batch(
            inputs=rows[:, :-1],
            targets=rows[:, 1:],
            at=Where(np.broadcast_to(positions, shape).copy(), segments),
            weight=weight,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Lanes(_Batches):
    """Contiguous lanes, for models with memory.

    The text is cut into `batch_size` lanes of equal length; row b of step t + 1 goes on
    where row b of step t stopped, so its memory is what stands before it in the text.
    Positions run on within a lane. An epoch begins at each lane's start again, with
    positions from 0 and the next segment id, so that what memory still holds of the
    epoch before is not attended: segment = 1 + epoch.

    A lane has a whole number of steps. The last tokens of the text, fewer than
    `batch_size * length`, are never trained on.

    Attributes:
      tokens: `[n]`, ids, integers of any width; a memory map stays one.
      batch_size: rows of a batch, of all processes together.
      length: tokens of a row.
      process_index: the process that reads; see `sharded`.
      process_count: number of processes.
      documents: `[d]`, the tokens with which documents begin, rising. With it, each
        document has a segment id of its own, so that none attends to another, in
        memory neither. Positions run on: what matters within a document is distance.
        None takes the text as one document.

    Raises:
      ValueError: fewer than `batch_size * length + 1` tokens, or unusable sizes.
    """

    process_index: int = 0
    process_count: int = 1
    documents: Integer[np.ndarray, " d"] | None = None

    @property
    def tokens_needed(self) -> int:
        """The fewest tokens that make a step."""
        return self.batch_size * self.length + 1

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which each lane is read once."""
        return (self.tokens.size - 1) // (self.batch_size * self.length)

    def batch(self, step: int) -> Batch:
        """Returns the batch `[b t]` of a step, counted from 0 through all epochs.

        Raises:
          ValueError: the step is negative.
        """
        epoch, step_in_epoch = divmod(_checked(step), self.steps_per_epoch)
        lane = self.steps_per_epoch * self.length
        offset = step_in_epoch * self.length
        starts = [row * lane + offset for row in self._rows()]
        return self._at(starts, position=offset, segment=1 + epoch)


@dataclasses.dataclass(frozen=True, eq=False)
class Windows(_Batches):
    """Shuffled windows that do not overlap, for models without memory.

    An epoch's windows lie end to end from a random offset in [0, length) on, so that
    their borders differ between epochs, and come in a random order. Offset and order
    are functions of (seed, epoch) alone. Windows are counted through all epochs and a
    batch takes the next `batch_size` of them, so that none is left out where an epoch
    ends within a batch. Every window has positions 0 to length - 1 and segment 1.

    Every epoch has the same number of windows, whatever its offset: it leaves out
    fewer than `2 * length` tokens, those before the offset and those at the end.

    Attributes:
      tokens: `[n]`, ids, integers of any width; a memory map stays one.
      batch_size: rows of a batch, of all processes together.
      length: tokens of a window.
      seed: of offsets and orders; not negative.
      process_index: the process that reads; see `sharded`.
      process_count: number of processes.
      documents: `[d]`, the tokens with which documents begin, rising. With it, each
        document has a segment id of its own, so that none attends to another, in
        memory neither. Positions run on: what matters within a document is distance.
        None takes the text as one document.

    Raises:
      ValueError: fewer than `length + 1` tokens, or unusable sizes or seed.
    """

    seed: int
    process_index: int = 0
    process_count: int = 1
    documents: Integer[np.ndarray, " d"] | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")

    @property
    def tokens_needed(self) -> int:
        """The fewest tokens that make a window."""
        return self.length + 1

    @property
    def windows_per_epoch(self) -> int:
        """Windows that fit at every offset; at least one."""
        return max(1, (self.tokens.size - self.length) // self.length)

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every window is read once, rounded up."""
        return -(-self.windows_per_epoch // self.batch_size)

    def batch(self, step: int) -> Batch:
        """Returns the batch `[b t]` of a step, counted from 0 through all epochs.

        Raises:
          ValueError: the step is negative.
        """
        first = _checked(step) * self.batch_size
        places = [divmod(first + row, self.windows_per_epoch) for row in self._rows()]
        epochs = {epoch: self._epoch(epoch) for epoch in {epoch for epoch, _ in places}}
        starts = []
        for epoch, index in places:
            offset, order = epochs[epoch]
            starts.append(offset + int(order[index]) * self.length)
        return self._at(starts, position=0, segment=1)

    def _epoch(self, epoch: int) -> tuple[int, grain.MapDataset]:
        """Returns an epoch's offset and the order of its windows."""
        # Seeds that differ by one must not share orders, as they would in seed + epoch.
        words = np.random.SeedSequence([self.seed, epoch]).generate_state(2)
        spare = self.tokens.size - 1 - self.windows_per_epoch * self.length
        offset = int(words[0]) % (min(spare, self.length - 1) + 1)
        # Grain permutes indices one at a time: no array of the epoch's length is made.
        order = grain.MapDataset.range(self.windows_per_epoch)
        return offset, order.shuffle(seed=int(words[1]))


def _checked(step: int) -> int:
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    return int(step)
