"""Trains encodings at one length, tests them at many, and writes the report.

    python -m experiments.extrapolate --config=configs/extrapolate.py:quick \
        --workdir=runs/quick

Killed, it goes on where it stopped when it is started again.
"""

import pathlib
import shlex
import sys

from absl import app, flags
from ml_collections import config_flags

from relpos_jax.evaluation import extrapolation
from relpos_jax.report import extrapolation as report
from relpos_jax.training import runtime

_CONFIG = config_flags.DEFINE_config_file(
    "config", "configs/extrapolate.py:quick", "The study.", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the results.", required=True)
_PROGRESS = flags.DEFINE_bool("progress", True, "Whether to show progress bars.")


def main(arguments):
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(arguments[1:])}")
    runtime.prepare()
    workdir = pathlib.Path(_WORKDIR.value).expanduser()
    study = extrapolation.run_study(
        _CONFIG.value,
        workdir,
        command=shlex.join(["python", "-m", "experiments.extrapolate", *sys.argv[1:]]),
        progress=_PROGRESS.value,
    )
    for path in report.write(study, workdir):
        print(path)


if __name__ == "__main__":
    app.run(main)
