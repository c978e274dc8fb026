"""A run laid over a mesh: where its arrays live, and what each process reads."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from relpos_jax.training import sharding
from relpos_jax.training.placement import Placement
from relpos_jax.training.state import TrainState

B = TypeVar("B")


@dataclasses.dataclass(frozen=True)
class Sharded(Placement):
    """Parameters, optimiser state, memory and batches cut by the tables of `sharding`.

    Batch sizes and lengths are those of all processes together, whatever the mesh: the
    same run on another mesh gives the same numbers up to rounding.

    Attributes:
      mesh: with the axes of `mesh.AXES`, over the devices of all processes.
    """

    mesh: Mesh

    @property
    def writes(self) -> bool:
        """Whether this process is the first."""
        return jax.process_index() == 0

    def context(self) -> contextlib.AbstractContextManager:
        return jax.set_mesh(self.mesh)

    def share(self, batches: B) -> B:
        """Returns this process's part of every batch.

        Processes whose devices hold the same rows (they differ in tensor or sequence
        alone) read the same.

        Raises:
          ValueError: the rows of this process's devices are no block of the batch.
        """
        if jax.process_count() == 1:
            return batches
        rows = self._rows(batches.batch_size)
        size = rows.stop - rows.start
        if batches.batch_size % size or rows.start % size:
            raise ValueError(
                f"process {jax.process_index()} holds rows {rows.start} to {rows.stop} "
                f"of a batch of {batches.batch_size}, which is no whole share: give "
                "each process as many rows (mesh.data, mesh.fsdp, training.batch)"
            )
        return batches.sharded(rows.start // size, batches.batch_size // size)

    def _rows(self, count: int) -> slice:
        """Returns which of `count` rows the devices of this process hold."""
        spec = jax.P(sharding.RULES["batch"])
        places = NamedSharding(self.mesh, spec).addressable_devices_indices_map(
            (count,)
        )
        held = sorted({index[0].indices(count)[:2] for index in places.values()})
        starts, stops = zip(*held, strict=True)
        if stops[:-1] != starts[1:]:
            raise ValueError(
                f"process {jax.process_index()} holds the rows {held} of a batch, "
                "which don't lie together; order the mesh so that they do"
            )
        return slice(starts[0], stops[-1])

    def shardings(self, state: TrainState) -> TrainState:
        """Returns the sharding of each array of a state, or of its shapes."""
        params = sharding.shardings(state.params, self.mesh)
        whole = NamedSharding(self.mesh, jax.P())
        return TrainState(
            step=whole,
            params=params,
            opt_state=sharding.optimiser_shardings(
                state.opt_state, state.params, params, self.mesh
            ),
            memory=sharding.shardings(state.memory, self.mesh, sharding.MEMORY),
            recent=jax.tree.map(lambda _: self._stacks(), state.recent),
            average=None if state.average is None else params,
            skipped=None if state.skipped is None else whole,
        )

    def _stacks(self) -> NamedSharding:
        """Returns where batches `[s b t]` lie."""
        axes = (sharding.RULES[axis] for axis in ("batch", "length"))
        return NamedSharding(self.mesh, jax.P(None, *axes))

    def state(self, make: Callable[[], TrainState]) -> TrainState:
        """Returns the state, made in its parts: no device ever holds all of it."""
        places = self.shardings(jax.eval_shape(make))
        return jax.jit(make, out_shardings=places)()

    def batch(self, stack: B) -> B:
        place = self._stacks()

        def put(mine: np.ndarray) -> jax.Array:
            if jax.process_count() == 1:
                return jax.device_put(mine, place)
            steps, rows, length = mine.shape
            total = self._total(rows)
            first = self._rows(total).start

            def part(index):
                start, stop, _ = index[1].indices(total)
                return mine[index[0], start - first : stop - first, index[2]]

            shape = (steps, total, length)
            return jax.make_array_from_callback(shape, place, part)

        return jax.tree.map(put, stack)

    def _total(self, rows: int) -> int:
        """Returns the rows of a whole batch of which this process has `rows`."""
        devices = int(np.prod([self.mesh.shape[x] for x in sharding.RULES["batch"]]))
        mine = self._rows(devices)
        return rows * devices // (mine.stop - mine.start)

    def constrain(self, state: TrainState) -> TrainState:
        return jax.lax.with_sharding_constraint(state, self.shardings(state))

    def any(self, flag: bool) -> bool:
        if jax.process_count() == 1:
            return flag
        return bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def placement_of(run: Any) -> Placement:
    """Returns where a run lives: on the mesh that `run.mesh` makes of all devices.

    Args:
      run: a `RunConfig`.

    Raises:
      ValueError: a mesh that the devices don't make up.
      UnevenSharding: a size of the run that the mesh doesn't divide.
    """
    if all(size == 1 for size in run.mesh.sizes(jax.device_count()).values()):
        return Placement()
    mesh, training = run.mesh.make(), run.training
    sizes = sharding.sizes_of(run.model, training.batch, training.length)
    sharding.check(sizes, mesh)
    return Sharded(mesh)
