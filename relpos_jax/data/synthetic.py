"""Tasks that are made, not read: what a memory must hold is known exactly."""

import dataclasses

import numpy as np

from relpos_jax.data.batches import Batch
from relpos_jax.where import Where


@dataclasses.dataclass(frozen=True)
class DelayedCopy:
    """A stream of symbols, each to be named again `distance` tokens later.

    Every `stride`-th token is a random symbol `1 .. symbols`, the others are 0. At each
    symbol the target is the one that stood `distance` tokens before; nothing else is
    scored. A document has `segments` segments of `length` tokens, in every row another;
    positions count from 0 in each, and document ids rise.

    Attributes:
      symbols: number of symbols; chance is 1 in so many.
      stride: tokens from symbol to symbol.
      distance: tokens from a symbol to where it is asked for; a multiple of `stride`.
      segments: segments of a document.
      length: tokens of a segment.
      batch_size: rows.
      seed: of the symbols.
      held_out: draws from other random numbers than in training.

    Raises:
      ValueError: sizes below 1, a distance that is no multiple of the stride, or no
        shorter than a document.
    """

    symbols: int = 8
    stride: int = 4
    distance: int = 48
    segments: int = 50
    length: int = 16
    batch_size: int = 32
    seed: int = 0
    held_out: bool = False

    def __post_init__(self):
        for name in ("symbols", "stride", "distance", "segments", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1: {getattr(self, name)}")
        if self.distance % self.stride:
            raise ValueError(
                f"distance {self.distance} leads from a symbol to none: take a "
                f"multiple of the stride {self.stride}"
            )
        if self.distance >= self.segments * self.length:
            raise ValueError(
                f"a document has {self.segments * self.length} tokens, so nothing is "
                f"asked for at a distance of {self.distance}: take more segments"
            )

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.symbols + 1

    def stack(self, first_step: int, count: int) -> Batch:
        """Returns the segments of `count` steps from `first_step` on, `[s b t]`."""
        documents: dict[int, tuple] = {}
        parts = []
        for step in range(first_step, first_step + count):
            number, index = divmod(step, self.segments)
            if number not in documents:
                documents[number] = self._document(number)
            part = slice(index * self.length, (index + 1) * self.length)
            inputs, targets, weight = (x[:, part] for x in documents[number])
            position = np.broadcast_to(
                np.arange(part.start, part.stop, dtype=np.int32), inputs.shape
            )
            segment = np.full(inputs.shape, 1 + number, np.int32)
            parts.append((inputs, targets, position, segment, weight))
        inputs, targets, position, segment, weight = map(
            np.stack, zip(*parts, strict=True)
        )
        return Batch(inputs, targets, Where(position, segment), weight)

    def _document(self, number: int):
        """Returns inputs, targets and weights `[b s*t]`, the same at every call."""
        size = self.segments * self.length
        words = [self.seed, int(self.held_out), number]
        draw = np.random.default_rng(np.random.SeedSequence(words))
        inputs = np.zeros((self.batch_size, size), np.int32)
        places = inputs[:, :: self.stride]
        places[:] = draw.integers(1, self.symbols + 1, places.shape)
        targets = np.zeros_like(inputs)
        targets[:, self.distance :] = inputs[:, : -self.distance]
        weight = (targets > 0).astype(np.float32)
        return inputs, targets, weight
