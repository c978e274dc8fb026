"""Checkpoints through Orbax: complete, checked, and exact or refused.

One small module, so that a later Orbax (its V1 interface) replaces this file alone.
Saves are synchronous: when `save` returns, the checkpoint is on disk.
"""

import logging
import os
import pathlib
import shutil
import zlib
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from relpos_jax.training.optimiser import path_name

T = TypeVar("T")
_log = logging.getLogger(__name__)


class CheckpointMismatch(ValueError):
    """A checkpoint is sound but holds another tree than the one asked for."""


class Checkpoints:
    """The checkpoints of one run, in one folder.

    Each holds the leaves of a pytree, and beside them their paths, shapes, dtypes and
    CRC-32 sums. The sums are there because Orbax reads a flipped bit without a word.

    A step's folder gets its name when all of it is written, so a kill leaves at most a
    folder `*.orbax-checkpoint-tmp`, which is never taken for a checkpoint.

    Args:
      folder: is made where it doesn't exist.
      keep: how many of the newest checkpoints stay.
    """

    def __init__(self, folder: str | os.PathLike, *, keep: int = 2):
        self.folder = pathlib.Path(folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._keep = keep
        self._open()

    def _open(self) -> None:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Waits for whatever is being written."""
        self._manager.close()

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, tree: Any) -> None:
        """Writes a checkpoint.

        Args:
          step: its number; above every step saved before.
          tree: a pytree of arrays.

        Raises:
          FileExistsError: this step or a later one has a checkpoint already.
        """
        leaves = _flatten(tree)
        # Orbax can't write arrays without elements; `facts` has all there is of them.
        arrays = {path: leaf for path, leaf in leaves.items() if leaf.size}
        facts = {path: _facts(leaf) for path, leaf in leaves.items()}
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(arrays),
            meta=ocp.args.JsonSave({"leaves": facts}),
        )
        if not self._manager.save(step, args=args):
            raise FileExistsError(
                f"no checkpoint of step {step} was written to {self.folder}: it has "
                f"steps {self.steps()}, and only a later step can be added"
            )

    def restore(self, step: int, target: T) -> T:
        """Returns the tree of one checkpoint.

        Args:
          step: which.
          target: a tree of arrays (or `jax.ShapeDtypeStruct` with shardings) that says
            the structure, and where the arrays go.

        Raises:
          CheckpointMismatch: paths are missing or unexpected, or shapes or dtypes
            differ; the message lists all of them.
          OSError: the checkpoint is damaged.
        """
        wanted = _flatten(target)
        try:
            args = ocp.args.Composite(meta=ocp.args.JsonRestore())
            stored = self._manager.restore(step, args=args).meta["leaves"]
        except Exception as error:  # Orbax raises many kinds for a damaged file
            raise OSError(f"its leaves can't be listed ({_short(error)})") from error
        _compare(stored, wanted, self.folder / str(step))
        abstract = {
            path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for path, x in wanted.items()
            if x.size
        }
        try:
            args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
            found = dict(self._manager.restore(step, args=args).state)
        except Exception as error:
            raise OSError(f"its arrays can't be read ({_short(error)})") from error
        for path, leaf in wanted.items():
            if not leaf.size:
                empty = np.zeros(leaf.shape, leaf.dtype)
                found[path] = jax.device_put(empty, leaf.sharding)
            if stored[path]["crc32"] != _crc32(found[path]):
                raise OSError(f"the values of {path} aren't those that were written")
        return jax.tree.unflatten(
            jax.tree.structure(target), [found[path] for path in wanted]
        )

    def restore_newest(self, target: T) -> tuple[int, T] | None:
        """Returns the newest sound checkpoint as (step, tree), None if there is none.

        A damaged one is named in a warning and moved to the folder `*.damaged` beside
        this one, so that its step can be saved again.

        Raises:
          CheckpointMismatch: the newest sound checkpoint holds another tree.
        """
        for step in reversed(self.steps()):
            found = self.restore_sound(step, target)
            if found is not None:
                return step, found
        return None

    def restore_sound(self, step: int, target: T) -> T | None:
        """Returns the tree of one checkpoint, None if it is damaged and set aside.

        Raises:
          CheckpointMismatch: it is sound but holds another tree.
        """
        try:
            return self.restore(step, target)
        except CheckpointMismatch:
            raise
        except OSError as error:
            place = self._set_aside(step)
            _log.warning(
                "checkpoint %d is damaged: %s; moved to %s; taking the one before",
                step,
                error,
                place,
            )
            return None

    def _set_aside(self, step: int) -> pathlib.Path:
        self._manager.close()
        aside = self.folder.with_name(self.folder.name + ".damaged")
        place = aside / str(step)
        if jax.process_index() == 0:
            aside.mkdir(exist_ok=True)
            if place.exists():  # an earlier one of the same step: the newest is enough
                shutil.rmtree(place)
            (self.folder / str(step)).rename(place)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"checkpoint {step} set aside")
        self._open()
        return place


def _flatten(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): leaf for path, leaf in leaves}


def _crc32(leaf: jax.Array) -> int:
    """Returns the sum of an array's bytes, wherever its parts are.

    Where other processes hold some, each gathers the array, one at a time: the sum must
    not depend on how many processes there are, or a checkpoint couldn't move.
    """
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        whole = jax.device_get(leaf)
    else:
        whole = multihost_utils.process_allgather(leaf, tiled=True)
    return zlib.crc32(np.ascontiguousarray(whole).view(np.uint8).data)


def _facts(leaf: jax.Array) -> dict[str, Any]:
    return {
        "shape": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "crc32": _crc32(leaf),
    }


def _compare(stored: dict[str, Any], wanted: dict[str, Any], place) -> None:
    lines = [f"missing: {path}" for path in wanted if path not in stored]
    lines += [f"unexpected: {path}" for path in stored if path not in wanted]
    for path in wanted:
        if path not in stored:
            continue
        there, here = stored[path], wanted[path]
        if tuple(there["shape"]) != tuple(here.shape):
            shape = tuple(there["shape"])
            lines.append(f"shape differs: {path}: {shape} stored, {here.shape} wanted")
        elif there["dtype"] != str(here.dtype):
            dtype = there["dtype"]
            lines.append(f"dtype differs: {path}: {dtype} stored, {here.dtype} wanted")
    if lines:
        raise CheckpointMismatch(
            f"checkpoint {place} holds another tree:\n  " + "\n  ".join(lines)
        )


def _short(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
