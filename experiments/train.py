"""Trains one model.

    python -m experiments.train --config=configs/quick.py --workdir=runs/quick

The config file takes the position encoding's name after a colon
(`configs/quick.py:alibi`), and any field by flag (`--config.training.steps=100`).
Started again with the same workdir, it goes on where it stopped. docs/running.md says
how it is started on several devices, hosts and clusters.
"""

from absl import app, flags
from ml_collections import config_flags

from relpos_jax import config
from relpos_jax.training import loop, processes, runtime
from relpos_jax.training.sharded import placement_of

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file.", lock_config=True
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the run; resumed if it exists."
)
_CACHE = flags.DEFINE_bool("compilation_cache", True, "Keep compiled programs on disk.")
_PROGRESS = flags.DEFINE_bool("progress", True, "Show a progress bar.")
_CLUSTER = flags.DEFINE_bool("distributed", False, "Join the cluster that JAX finds.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0.")
_PROCESSES = flags.DEFINE_integer("processes", None, "Number of processes.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "This one's number, from 0.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"what is {argv[1]!r}? Options look like --name=value.")
    runtime.prepare(compilation_cache=_CACHE.value)
    try:
        run = config.build(_CONFIG.value)
        processes.join(
            cluster=_CLUSTER.value,
            coordinator=_COORDINATOR.value,
            processes=_PROCESSES.value,
            process_id=_PROCESS_ID.value,
        )
        placement = placement_of(run)
    except (ValueError, TypeError, RuntimeError) as error:
        raise SystemExit(f"error: {error}") from error
    shown = {"progress": _PROGRESS.value, "placement": placement}
    result = loop.train(run, _WORKDIR.value, **shown)
    if placement.writes:
        place = _WORKDIR.value
        print(f"{result.step} steps done; metrics and checkpoints are in {place}")


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main)
