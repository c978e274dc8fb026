"""One run in several processes: how they find each other."""

import logging

import jax

_log = logging.getLogger(__name__)


def join(
    *,
    cluster: bool = False,
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Joins the processes of a run; nothing happens where nothing is asked for.

    Call it before anything else of JAX. Each process runs the same program with the
    same config; afterwards `jax.devices()` are those of all of them.

    Args:
      cluster: asks JAX to find the others by itself: under Slurm, Open MPI, on Cloud
        TPU and on GKE.
      coordinator: `HOST:PORT` of the first process, where nothing can be found.
      processes: their number.
      process_id: this one's, from 0.

    Raises:
      ValueError: a part of an address; says what is missing.
      RuntimeError: there is no cluster, or the others don't come.
    """
    given = {
        "coordinator": coordinator,
        "processes": processes,
        "process_id": process_id,
    }
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if len(missing) == len(given) and not cluster:
        return
    if len(missing) < len(given):
        if missing:
            raise ValueError(
                f"{' and '.join(missing)} missing: processes that find each other by "
                "address need --coordinator, --processes and --process_id"
            )
        if not 0 <= process_id < processes:
            raise ValueError(
                f"--process_id must be in [0, {processes}), got {process_id}"
            )
        jax.distributed.initialize(coordinator, processes, process_id)
    else:
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise RuntimeError(
                "--distributed found no cluster that JAX knows (Slurm, Open MPI, Cloud "
                "TPU, GKE): give --coordinator, --processes and --process_id instead"
            ) from error
    _log.info(
        "process %d of %d, %d of %d devices",
        jax.process_index(),
        jax.process_count(),
        jax.local_device_count(),
        jax.device_count(),
    )
