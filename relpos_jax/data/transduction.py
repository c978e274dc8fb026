"""Tasks that turn one sequence into another, for studies of lengths not trained on.

Copying, reversing and adding are among the tasks of Kazemnejad et al. 2023. Draws are
pure functions of (seed, step, row), so that all models see the same sequences.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float32, Int32

from relpos_jax.where import Where

START, STOP, FIRST = 0, 1, 2
SYMBOLS = 10
PLUS = SYMBOLS
VOCABULARY = FIRST + SYMBOLS + 1


class Pairs(NamedTuple):
    """Sources, and targets as a decoder reads and predicts them, padded on the right.

    Attributes:
      source: `[b s]`, ids.
      source_at: where they stand.
      inputs: `[b t]`, `START` and the target.
      targets: `[b t]`, the target and `STOP`.
      at: where the inputs stand.
      weight: `[b t]`, 1 where there is a target.
    """

    source: Int32[np.ndarray, "*n b s"]
    source_at: Where
    inputs: Int32[np.ndarray, "*n b t"]
    targets: Int32[np.ndarray, "*n b t"]
    at: Where
    weight: Float32[np.ndarray, "*n b t"]


class Task(NamedTuple):
    """A task over the symbols `0 .. SYMBOLS - 1` (and `PLUS`).

    Attributes:
      draw: a generator and a length to a source and its target.
      source_size, target_size: their lengths, of the task's length.
    """

    draw: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
    source_size: Callable[[int], int]
    target_size: Callable[[int], int]


def _copy(generator, length):
    symbols = generator.integers(SYMBOLS, size=length)
    return symbols, symbols


def _reverse(generator, length):
    symbols = generator.integers(SYMBOLS, size=length)
    return symbols, symbols[::-1]


def _addition(generator, length):
    one, other = generator.integers(SYMBOLS, size=(2, length))
    total, carry = [], 0
    for a, b in zip(one, other, strict=True):
        carry, digit = divmod(int(a + b) + carry, 10)
        total.append(digit)
    return np.concatenate([one, [PLUS], other]), np.array([*total, carry])


# Numbers of `length` digits, and their sum, are written from the lowest digit up, so
# that each digit of the sum needs those before it only.
TASKS = {
    "copy": Task(_copy, lambda n: n, lambda n: n),
    "reverse": Task(_reverse, lambda n: n, lambda n: n),
    "addition": Task(_addition, lambda n: 2 * n + 1, lambda n: n + 1),
}


@dataclasses.dataclass(frozen=True)
class Transductions:
    """Batches of a task.

    Attributes:
      task: a name of `TASKS`.
      batch_size: rows of a batch.
      shortest, longest: lengths are drawn uniformly from `shortest .. longest`; all
        rows are padded to the longest.
      seed: of the draws; not negative.

    Raises:
      ValueError: an unknown task, or lengths that make no sense.
    """

    task: str
    batch_size: int
    shortest: int
    longest: int
    seed: int

    def __post_init__(self):
        if self.task not in TASKS:
            raise ValueError(f"task must be one of {[*TASKS]}, got {self.task!r}")
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(
                f"lengths must satisfy 1 <= shortest <= longest, got {self.shortest} "
                f"and {self.longest}"
            )

    def batch(self, step: int) -> Pairs:
        """Returns the batch of a step, arrays of one shape for all steps."""
        task, rows = TASKS[self.task], range(self.batch_size)
        shape = (self.batch_size, task.source_size(self.longest))
        source, source_real = np.zeros(shape, np.int32), np.zeros(shape, bool)
        shape = (self.batch_size, task.target_size(self.longest) + 1)
        inputs, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        real = np.zeros(shape, bool)
        for row in rows:
            generator = np.random.default_rng([self.seed, step, row])
            length = int(generator.integers(self.shortest, self.longest + 1))
            given, wanted = task.draw(generator, length)
            source[row, : len(given)] = FIRST + given
            source_real[row, : len(given)] = True
            inputs[row, 1 : len(wanted) + 1] = FIRST + wanted
            inputs[row, 0] = START
            targets[row, : len(wanted)] = FIRST + wanted
            targets[row, len(wanted)] = STOP
            real[row, : len(wanted) + 1] = True
        return Pairs(
            source,
            _from_left(source_real),
            inputs,
            targets,
            _from_left(real),
            real.astype(np.float32),
        )

    def stack(self, first_step: int, count: int) -> Pairs:
        """Returns the batches of `count` steps, with one more axis in front."""
        batches = [self.batch(first_step + step) for step in range(count)]
        return jax.tree.map(lambda *parts: np.stack(parts), *batches)


def _from_left(real: np.ndarray) -> Where:
    position = np.broadcast_to(np.arange(real.shape[1], dtype=np.int32), real.shape)
    return Where(np.where(real, position, 0), real.astype(np.int32))
