"""The mesh of devices that a run is laid over."""

import dataclasses
import math

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

AXES = ("data", "fsdp", "tensor", "sequence")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices each axis of the mesh has.

    Attributes:
      data: copies of the model, each with its rows of the batch; -1 is the rest of the
        devices.
      fsdp: cuts parameters and optimiser state by width, and rows of the batch too.
      tensor: cuts heads, feed-forward units and vocabulary.
      sequence: cuts sequences; attention goes round a ring.

    Raises:
      ValueError: a size below 1 that isn't -1, or more than one -1.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1

    def __post_init__(self):
        sizes = dataclasses.asdict(self)
        for name, size in sizes.items():
            if size < 1 and size != -1:
                raise ValueError(f"mesh.{name} must be at least 1, or -1, got {size}")
        rest = [f"mesh.{name}" for name, size in sizes.items() if size == -1]
        if len(rest) > 1:
            raise ValueError(
                f"{' and '.join(rest)} are -1, but only one axis can be the rest"
            )

    def sizes(self, devices: int) -> dict[str, int]:
        """Returns the size of each axis on so many devices.

        Raises:
          ValueError: the sizes don't multiply up to the devices; says the numbers.
        """
        sizes = dataclasses.asdict(self)
        known = math.prod(size for size in sizes.values() if size != -1)
        said = " x ".join(f"{name} {size}" for name, size in sizes.items())
        if -1 not in sizes.values():
            if known != devices:
                raise ValueError(
                    f"the mesh {said} has {known} devices, but there are {devices}: "
                    "set one of its axes to -1 for the rest"
                )
            return sizes
        if devices % known:
            raise ValueError(
                f"{devices} devices can't be dealt to the mesh {said}: its known axes "
                f"have {known}, which doesn't divide them"
            )
        return {
            name: devices // known if size == -1 else size
            for name, size in sizes.items()
        }

    def make(self) -> Mesh:
        """Returns the mesh over all devices of all processes."""
        sizes = self.sizes(jax.device_count())
        types = (AxisType.Auto,) * len(AXES)
        return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=types)

    def abstract(self, devices: int) -> AbstractMesh:
        """Returns a mesh of devices that needn't exist, to reckon with."""
        sizes = self.sizes(devices)
        types = (AxisType.Auto,) * len(AXES)
        return AbstractMesh(tuple(sizes.values()), AXES, axis_types=types)
