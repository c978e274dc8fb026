"""What a device holds of a model: parameters and optimiser state, from shapes alone."""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import NamedTuple

import jax
from flax import nnx

from relpos_jax import config as configs
from relpos_jax.models import ModelConfig, build
from relpos_jax.report.parameters import model_of
from relpos_jax.training import optimiser, sharding
from relpos_jax.training.config import TrainingConfig
from relpos_jax.training.mesh import MeshConfig

_SECTIONS = ("data", "model", "training", "mesh")


class Share(NamedTuple):
    """One device's part of a model.

    Attributes:
      name: of the configuration.
      count: parameters of the whole model.
      mesh: size of each axis.
      parameters, optimiser: bytes on each device.
      whole: bytes of parameters and optimiser state together, uncut.
    """

    name: str
    count: int
    mesh: Mapping[str, int]
    parameters: int
    optimiser: int
    whole: int

    @property
    def rows(self) -> int:
        """What the batch must be a multiple of."""
        return self.mesh["data"] * self.mesh["fsdp"]


def models(package: ModuleType) -> Iterator[tuple[str, ModelConfig, TrainingConfig]]:
    """Yields name, model and training of every configuration of a package.

    A file with `PUBLISHED` has a model for each of its variants, with the vocabulary
    that was published; others are taken at their default.
    """
    for found in pkgutil.iter_modules(package.__path__):
        file = importlib.import_module(f"{package.__name__}.{found.name}")
        if not hasattr(file, "get_config"):
            continue
        path = file.__name__.replace(".", "/") + ".py"
        for variant, published in getattr(file, "PUBLISHED", {}).items():
            config = file.get_config(variant)
            training = configs.take(config.training, TrainingConfig, "training")
            model = model_of(config, published.vocabulary)
            yield f"{path}:{variant}", model, training
        if not hasattr(file, "PUBLISHED"):
            config = file.get_config()
            others = tuple(key for key in config if key not in _SECTIONS)
            run = configs.build(config, others=others)
            yield path, run.model, run.training


def share(
    name: str, model: ModelConfig, training: TrainingConfig, devices: int
) -> Share:
    """Returns a device's part on the mesh of data, fsdp and tensor that leaves least.

    Args:
      name: for the result.
      model, training: the run; its batch isn't looked at.
      devices: their number; none of them need be there.
    """
    shapes = nnx.eval_shape(lambda: build(model, key=jax.random.key(0)))
    params = nnx.as_pure(nnx.state(shapes, nnx.Param))
    state = jax.eval_shape(optimiser.build(training).init, params)
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, state)))
    count = sum(x.size for x in jax.tree.leaves(params))
    found = []
    for config in _meshes(model, devices):
        mesh = config.abstract(devices)
        try:
            placed = sharding.shardings(params, mesh)
        except sharding.UnevenSharding:
            continue
        own = sharding.optimiser_shardings(state, params, placed, mesh)
        parts = (
            sharding.bytes_per_device(params, placed),
            sharding.bytes_per_device(state, own),
        )
        found.append(Share(name, count, dict(mesh.shape), *parts, whole))
    return min(found, key=lambda x: (x.parameters + x.optimiser, x.mesh["tensor"]))


def _meshes(model: ModelConfig, devices: int) -> Iterator[MeshConfig]:
    """Yields the meshes that divide the model's own sizes; one always does."""
    for fsdp in _divisors(devices):
        for tensor in _divisors(devices // fsdp):
            cut = (model.heads % tensor, model.feedforward % tensor, model.width % fsdp)
            if not any(cut):
                yield MeshConfig(fsdp=fsdp, tensor=tensor)


def _divisors(n: int) -> list[int]:
    return [divisor for divisor in range(1, n + 1) if n % divisor == 0]


def table(shares: list[Share]) -> str:
    """Returns the shares as a Markdown table."""
    lines = [
        "| config | parameters | mesh | parameters a device | optimiser a device | "
        "of all | rows |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in shares:
        mesh = " x ".join(f"{axis} {n}" for axis, n in row.mesh.items() if n > 1)
        part = (row.parameters + row.optimiser) / row.whole
        cells = (
            row.name,
            f"{row.count:,}",
            mesh,
            _bytes(row.parameters),
            _bytes(row.optimiser),
            f"1/{1 / part:.0f}",
            str(row.rows),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _bytes(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"
