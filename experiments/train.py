"""Trains one model.

    python -m experiments.train --config=configs/quick.py --workdir=runs/quick

The config file takes the position encoding's name after a colon
(`configs/quick.py:alibi`), and any field by flag (`--config.training.steps=100`).
Started again with the same workdir, it goes on where it stopped.
"""

from absl import app, flags
from ml_collections import config_flags

from relpos_jax import config
from relpos_jax.training import loop, runtime

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file.", lock_config=True
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the run; resumed if it exists."
)
_CACHE = flags.DEFINE_bool("compilation_cache", True, "Keep compiled programs on disk.")
_PROGRESS = flags.DEFINE_bool("progress", True, "Show a progress bar.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"what is {argv[1]!r}? Options look like --name=value.")
    runtime.prepare(compilation_cache=_CACHE.value)
    try:
        run = config.build(_CONFIG.value)
    except (ValueError, TypeError) as error:
        raise SystemExit(f"error: {error}") from error
    result = loop.train(run, _WORKDIR.value, progress=_PROGRESS.value)
    print(f"{result.step} steps done; metrics and checkpoints are in {_WORKDIR.value}")


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main)
