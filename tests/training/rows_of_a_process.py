"""Writes the rows that this process of several reads; see `processes_on_cpu`."""

import sys

import numpy as np

from relpos_jax import data
from relpos_jax.training import processes
from relpos_jax.training.mesh import MeshConfig
from relpos_jax.training.sharded import Sharded
from tests.training.processes_on_cpu import BATCH, LENGTH


def main(text: str, folder: str, *flags: str) -> None:
    """Joins the others by `--name=value` flags and saves `FOLDER/PROCESS.npy`."""
    coordinator, count, number = (flag.split("=")[1] for flag in flags)
    processes.join(
        coordinator=coordinator, processes=int(count), process_id=int(number)
    )
    placement = Sharded(MeshConfig(fsdp=2).make())
    batches = data.Lanes(data.load(f"file:{text}").train, BATCH, LENGTH)
    mine = placement.share(batches).stack(0, 3)
    whole = placement.batch(mine)
    assert whole.inputs.shape == (3, BATCH, LENGTH)
    for part in whole.inputs.addressable_shards:  # each device has rows of the whole
        np.testing.assert_array_equal(part.data, batches.stack(0, 3).inputs[part.index])
    np.save(f"{folder}/{number}.npy", mine.inputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
