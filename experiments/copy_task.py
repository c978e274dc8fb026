"""Trains kinds of memory on a copy task beyond segment memory, and prints a table.

python -m experiments.copy_task --config=configs/copy_task.py
"""

from absl import app
from ml_collections import config_flags

from relpos_jax.evaluation.copy_task import run_copy_task
from relpos_jax.report import markdown, memory_grid
from relpos_jax.training import runtime

_CONFIG = config_flags.DEFINE_config_file(
    "config", "configs/copy_task.py", "Task, memories and training.", lock_config=True
)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"what is {argv[1]!r}? Options look like --name=value.")
    runtime.prepare()
    results = []
    try:
        for result in run_copy_task(_CONFIG.value):
            results.append(result)
            print(
                f"{result.kind}, seed {result.seed}: accuracy {result.accuracy:.3f}, "
                f"loss {result.loss:.3f}",
                flush=True,
            )
    except (ValueError, TypeError) as error:
        raise SystemExit(f"error: {error}") from error
    table = memory_grid.copy_table(results)
    print(f"\nHeld-out sequences, mean ± spread of seeds:\n\n{markdown.table(table)}")


if __name__ == "__main__":
    app.run(main)
