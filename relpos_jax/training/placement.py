"""Where a run's arrays live: a seam between the loop and devices.

The loop asks a `Placement` for everything that depends on devices or processes. The
default is JAX's default device and one process; a mesh is another frozen dataclass with
the same methods.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax

from relpos_jax.training.state import TrainState

B = TypeVar("B")


@dataclasses.dataclass(frozen=True)
class Placement:
    """One process, one device. Hashable: equal placements share a program."""

    @property
    def writes(self) -> bool:
        """Whether this process writes the metrics, the config and the bar."""
        return True

    def context(self) -> contextlib.AbstractContextManager:
        """Returns what the run is inside of (a mesh)."""
        return contextlib.nullcontext()

    def share(self, batches: B) -> B:
        """Returns the part of `data.Lanes` or `data.Windows` this process reads."""
        return batches

    def state(self, make: Callable[[], TrainState]) -> TrainState:
        """Returns the state that `make` makes, placed; also the restore's target."""
        return make()

    def batch(self, stack: B) -> B:
        """Returns a stack `[s b t]` of this process's rows, on the devices.

        It may return before the copy is done.
        """
        return jax.device_put(stack)

    def constrain(self, state: TrainState) -> TrainState:
        """Says inside the compiled step where the new state stays."""
        return state

    def any(self, flag: bool) -> bool:
        """Returns whether `flag` is set on any process; all get the same answer."""
        return flag
