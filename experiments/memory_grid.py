"""Trains encodings with kinds of memory, and prints loss by attention length.

    python -m experiments.memory_grid --config=configs/memory_grid.py:quick \
        --workdir=runs/memory_grid

Killed, it goes on where it stopped when it is started again.
"""

import pathlib

from absl import app, flags
from ml_collections import config_flags

from relpos_jax.evaluation.memory_grid import run_grid
from relpos_jax.report import markdown
from relpos_jax.report.memory_grid import grid_table
from relpos_jax.training import runtime

_CONFIG = config_flags.DEFINE_config_file(
    "config", "configs/memory_grid.py:quick", "The grid.", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the results.", required=True)
_PROGRESS = flags.DEFINE_bool("progress", True, "Whether to show progress bars.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"what is {argv[1]!r}? Options look like --name=value.")
    runtime.prepare()
    workdir = pathlib.Path(_WORKDIR.value).expanduser()
    try:
        results = run_grid(_CONFIG.value, workdir, progress=_PROGRESS.value)
    except (ValueError, TypeError) as error:
        raise SystemExit(f"error: {error}") from error
    text = markdown.table(grid_table(results))
    (workdir / "table.md").write_text(text + "\n", encoding="utf-8")
    print(f"Bits per byte by attention length (most keys a query sees):\n\n{text}")


if __name__ == "__main__":
    app.run(main)
