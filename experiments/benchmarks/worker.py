"""One peer in a process of its own: says that it is ready, then runs when it is told.

Started by `rounds`; speaks one line of JSON at a time on standard input and output.
"""

import ctypes
import gc
import importlib
import json
import os
import resource
import sys
import time

from experiments.benchmarks.peers import Missing, Peer


def main(task: str, peer: str, arguments: str) -> None:
    # What libraries print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values):
        print(json.dumps(values), file=answers, flush=True)

    module, _, variant = peer.partition(":")
    began = time.perf_counter()
    try:
        found = importlib.import_module(f"experiments.benchmarks.peers.{module}")
        made: Peer = getattr(found, task)(variant, **json.loads(arguments))
        made.run(1)
        peak = peak_bytes(made)
    except (Missing, MemoryError) as error:
        return answer(missing=str(error) or type(error).__name__)
    answer(
        parameters=made.parameters,
        temp_bytes=made.temporaries,
        peak_bytes=peak,
        start_seconds=time.perf_counter() - began,
    )
    for line in sys.stdin:
        start, cpu = time.perf_counter(), cpu_seconds()
        made.run(int(line))
        answer(seconds=time.perf_counter() - start, cpu_seconds=cpu_seconds() - cpu)


def peak_bytes(made: Peer) -> int | None:
    """Returns by how much a run's peak of resident memory passes what is held before.

    None where the system cannot say it (it can on Linux).
    """
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the highest size so far is forgotten
        before = _status("VmRSS")
        made.run(1)
        return _status("VmHWM") - before
    except (OSError, AttributeError):
        return None


def cpu_seconds() -> float:
    """Returns the processor time of all threads so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
