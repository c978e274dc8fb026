"""Which axis of which array is cut over which axis of the mesh: the tables.

Arrays have logical axes ("width", "heads"), by their path in the parameters or in the
memory; one table says which mesh axes cut each logical axis. The optimiser's state
follows the parameters. A size that a mesh axis doesn't divide is refused with the
numbers, never replicated without a word.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from relpos_jax.training.optimiser import path_name

AnyMesh = Mesh | AbstractMesh
Axes = tuple[str | None, ...]

# Logical axes to mesh axes.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "length": ("sequence",),
    "slots": ("sequence",),  # of segment memory
    "state": ("tensor",),  # width of what segment memory holds
    "heads": ("tensor",),
    "units": ("tensor",),  # feed-forward
    "vocabulary": ("tensor",),
    "width": ("fsdp",),
    "whole width": ("fsdp", "tensor"),
}

_TABLE = (
    ("vocabulary", "width"),
    # Vocabularies are what they are: where one doesn't divide, widths are cut.
    (None, "whole width"),
    (None, "width"),
    ("vocabulary", None),
)
_WHOLE: tuple[Axes, ...] = ()  # every device holds all of it

# Parameters' logical axes: the first pattern found in a path counts, and of its
# alternatives the first that the mesh divides evenly.
PARAMETERS: tuple[tuple[str, tuple[Axes, ...]], ...] = (
    # Position encodings, in a layer or shared; chains and wrappers nest them deeper.
    # Shaw's tables have few rows, and one head where all share it.
    (
        r"(^|/)(cross_)?position/(.*/)?(projection|key|query|value)$",
        (("width", "heads", None), (None, "heads", None), (None, None, None)),
    ),
    (r"(^|/)(cross_)?position/(.*/)?embeddings$", ((None, "width"),)),
    (r"(^|/)(cross_)?position/", _WHOLE),  # biases, slopes, buckets, small networks
    (r"norm[^/]*/(scale|bias)$", _WHOLE),
    (r"attention[^/]*/(query|key|value)/kernel$", (("width", "heads", None),)),
    (r"attention[^/]*/(query|key|value)/bias$", (("heads", None),)),
    (r"attention[^/]*/output/kernel$", (("heads", None, "width"),)),
    (r"compression/(kernel|decoder)$", ((None, None, "width"),)),
    (r"compression/(decoder_)?bias$", _WHOLE),
    (r"^transform/kernel$", ((None, "width"),)),  # of an encoder's head
    (r"^transform/bias$", _WHOLE),
    (r"feedforward[^/]*/(inner|gate)/kernel$", (("width", "units"),)),
    (r"feedforward[^/]*/(inner|gate)/bias$", (("units",),)),
    (r"feedforward[^/]*/outer/kernel$", (("units", "width"),)),
    (r"/(output|outer)/bias$", _WHOLE),
    (r"^(embedding|softmax)/table/\d+$", _TABLE),
    (r"^(embedding|softmax)/projection/\d+$", (("width", None),)),
    (r"^softmax/bias/\d+$", (("vocabulary",), (None,))),
    (r"^softmax/cluster(_bias)?$", _WHOLE),  # one row a cluster
    (r"^(embedding|output)$", _TABLE),
    (r"^output_bias$", (("vocabulary",), (None,))),
)

# Memories and caches, by field.
MEMORY: tuple[tuple[str, tuple[Axes, ...]], ...] = (
    # Compressive memory has room for a number of states that needn't divide.
    (
        r"(^|/)(hidden|compressed)$",
        ((None, "batch", "slots", "state"), (None, "batch", None, "state")),
    ),
    (r"(^|/)at/(position|segment)$", (("batch", "slots"), ("batch", None))),
    (r"(^|/)(compressed_at/.*|usage)$", ((None, "batch", None),)),
    (r"(^|/)asked$", (("batch", None),)),
    (r"(^|/)fresh$", (("batch",),)),
    (r"(^|/)auxiliary$", _WHOLE),
    (r"(^|/)(keys|values)/\d+$", (("batch", "heads", None, None),)),
    (r"(^|/)features$", ((None, "batch", None, "heads", None),)),
    (r"(^|/)cursor$", _WHOLE),
)


class UnevenSharding(ValueError):
    """A size that the mesh doesn't divide."""


def shardings(tree: PyTree, mesh: AnyMesh, rules=PARAMETERS) -> PyTree:
    """Returns the sharding of each leaf of parameters or of a memory.

    Args:
      tree: arrays, or their shapes.
      mesh: with the axes of `RULES`.
      rules: `PARAMETERS` or `MEMORY`.

    Raises:
      KeyError: a path that no rule knows; names it.
      UnevenSharding: no alternative divides evenly; says the numbers.
    """

    def one(path, leaf):
        spec = spec_of(path_name(path), leaf.shape, mesh, rules)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(one, tree)


def spec_of(path: str, shape: tuple[int, ...], mesh: AnyMesh, rules) -> jax.P:
    """Returns over which mesh axes each axis of one array is cut.

    Raises:
      KeyError, UnevenSharding: as `shardings`.
    """
    for pattern, alternatives in rules:
        if re.search(pattern, path):
            break
    else:
        raise KeyError(
            f"no rule says how to cut {path} of shape {shape} over a mesh: add a line "
            "to the tables of relpos_jax.training.sharding"
        )
    if not alternatives:
        return jax.P()
    troubles = []
    for axes in alternatives:
        if len(axes) != len(shape):
            troubles.append(f"{axes} has {len(axes)} axes, the array {len(shape)}")
            continue
        trouble = [x for pair in zip(axes, shape) if (x := _uneven(*pair, mesh))]
        if not trouble:
            return jax.P(*(RULES[axis] if axis else None for axis in axes))
        troubles += trouble
    raise UnevenSharding(
        f"{path} of shape {shape} can't be cut evenly: " + "; ".join(troubles)
    )


def _uneven(axis: str | None, size: int, mesh: AnyMesh) -> str | None:
    if axis is None:
        return None
    names = RULES[axis]
    devices = math.prod(mesh.shape[name] for name in names)
    if size % devices == 0:
        return None
    over = " x ".join(f"mesh.{name}" for name in names)
    return f"{axis} {size} isn't a multiple of {over} ({devices})"


def optimiser_shardings(
    opt_state: PyTree, params: PyTree, placed: PyTree, mesh: AnyMesh
) -> PyTree:
    """Returns the shardings of an optimiser's state: those of the parameters.

    What has a parameter's shape is cut as the parameter is; what lacks some of its axes
    (Adafactor's rows and columns) is cut as those that are left are. Scalars, and
    arrays of one element, are on every device.

    Args:
      opt_state: what `optimizer.init(params)` returned, or its shapes.
      params: the parameters, or their shapes.
      placed: their shardings.
      mesh: the mesh.

    Raises:
      KeyError: an array that belongs to no parameter; names it.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    specs = [sharding.spec for sharding in jax.tree.leaves(placed)]
    known = {
        path_name(path): (leaf.shape, tuple(spec) + (None,) * (leaf.ndim - len(spec)))
        for (path, leaf), spec in zip(leaves, specs, strict=True)
    }

    def one(path, leaf):
        name = path_name(path)
        if math.prod(leaf.shape) <= 1:
            return NamedSharding(mesh, jax.P())
        steps = name.split("/")
        ends = ("/".join(steps[start:]) for start in range(len(steps)))
        owner = next((end for end in ends if end in known), None)  # the longest
        if owner is not None:
            shape, spec = known[owner]
            kept = _kept_axes(name, shape, leaf.shape)
            if kept is not None:
                return NamedSharding(mesh, jax.P(*(spec[axis] for axis in kept)))
        raise KeyError(
            f"the optimiser's {name} of shape {leaf.shape} follows no parameter, so "
            "nothing says how to cut it over a mesh"
        )

    return jax.tree_util.tree_map_with_path(one, opt_state)


def _kept_axes(name: str, shape: tuple, found: tuple) -> tuple[int, ...] | None:
    """Returns which axes of a parameter a part of the optimiser's state has."""
    axes = tuple(range(len(shape)))
    if found == shape:
        return axes
    # Adafactor averages over the largest axis for rows, over the next for columns.
    order = np.argsort(shape, kind="stable")
    dropped = int(order[-1] if "v_row" in name else order[-2]) if len(shape) > 1 else 0
    for drop in (dropped, *axes):
        kept = tuple(axis for axis in axes if axis != drop)
        if tuple(shape[axis] for axis in kept) == found:
            return kept
    return None


def check(sizes: Mapping[str, tuple[int, str]], mesh: AnyMesh) -> None:
    """Refuses sizes that the mesh doesn't divide, before anything is compiled.

    Args:
      sizes: config key to its size and logical axis, `{"model.heads": (6, "heads")}`.
      mesh: the mesh.

    Raises:
      UnevenSharding: names each key, its size, and the mesh axes with theirs.
    """
    lines = []
    for key, (size, axis) in sizes.items():
        names = RULES[axis]
        devices = math.prod(mesh.shape[name] for name in names)
        if size % devices:
            over = " x ".join(f"mesh.{name} ({mesh.shape[name]})" for name in names)
            lines.append(f"{key} ({size}) isn't a multiple of {over}")
    if lines:
        raise UnevenSharding(
            "these sizes can't be cut evenly over the mesh:\n  " + "\n  ".join(lines)
        )


def sizes_of(model: Any, batch: int, length: int) -> dict[str, tuple[int, str]]:
    """Returns the sizes of a run that the mesh must divide, for `check`.

    Args:
      model: its `ModelConfig`.
      batch, length: of a step, all processes together.
    """
    sizes = {
        "training.batch": (batch, "batch"),
        "training.length": (length, "length"),
        "model.heads": (model.heads, "heads"),
        "model.feedforward": (model.feedforward, "units"),
        "model.width": (model.width, "width"),
    }
    if model.memory_length:
        sizes["model.memory_length"] = (model.memory_length, "slots")
        sizes["model.width, of memory"] = (model.width, "state")
    return sizes


def bytes_per_device(tree: PyTree, placed: PyTree) -> int:
    """Returns the bytes of a tree's part on one device, of shapes and shardings."""

    def one(leaf, sharding):
        shape = sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(one, tree, placed)))
