"""Times a start: from the process's beginning to the end of the first training step.

    python -m experiments.benchmarks.first_step --json=first_step.json

Cold has an empty compilation cache, warm the one that the cold start filled.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from absl import app, flags

from experiments.benchmarks import rounds

CONFIG = flags.DEFINE_string("config", "configs/quick.py", "What is trained.")


def start(cache: str) -> dict:
    """Starts a process; returns seconds since then, by what was finished."""
    module = "experiments.benchmarks.first_step_process"
    env = os.environ | {"RELPOS_JAX_COMPILATION_CACHE": cache}
    began = time.time()
    with tempfile.TemporaryDirectory() as workdir:
        found = subprocess.run(
            [sys.executable, "-m", module, f"--config={CONFIG.value}"]
            + [f"--workdir={workdir}/run"],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    times = json.loads(found.stdout.splitlines()[-1])
    cpu = times.pop("cpu_seconds")
    return {k: v - began for k, v in times.items()} | {"cpu_seconds": cpu}


def main(_):
    found = {"cold": [], "warm": []}
    for _ in range(rounds.ROUNDS.value):
        with tempfile.TemporaryDirectory() as cache:
            for times in found.values():
                times.append(start(cache))
    rows = [
        {"start": kind}
        | {k: statistics.median(time[k] for time in times) for k in times[0]}
        for kind, times in found.items()
    ]
    rounds.write("first_step", [{"rows": rows, "left_out": {}}])


if __name__ == "__main__":
    app.run(main)
