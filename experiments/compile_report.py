"""Compiles a config's training call and prints times and memory, without training.

    python -m experiments.compile_report --config=configs/enwik8.py:base

With `--steps=2`, real steps follow, on the standard library's text and at a batch that
this machine holds (`--batch`):

    python -m experiments.compile_report --config=configs/enwik8.py:base \
        --steps=2 --batch=1

Run time: some minutes for the sizes that were published. Sizes are those of this
machine's backend: a CPU's temporaries are not a GPU's.
"""

import dataclasses
import tempfile

import jax
from absl import app, flags
from ml_collections import config_flags

from relpos_jax import config
from relpos_jax.training import loop, program, runtime, writers

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file.")
_STEPS = flags.DEFINE_integer("steps", 0, "Real steps to run.", lower_bound=0)
_BATCH = flags.DEFINE_integer("batch", 1, "Rows of the real steps.", lower_bound=1)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"what is {argv[1]!r}? Options look like --name=value.")
    runtime.prepare(compilation_cache=False)
    try:
        run = config.build(_CONFIG.value)
    except (ValueError, TypeError) as error:
        raise SystemExit(f"error: {error}") from error
    size = f"batch {run.training.batch}, length {run.training.length}"
    print(f"{size}, on {jax.devices()[0].device_kind}: {program.program_report(run)}")
    if not _STEPS.value:
        return
    steps = {"steps": _STEPS.value, "steps_per_call": _STEPS.value, "log_every": 1}
    training = dataclasses.replace(
        run.training, batch=_BATCH.value, checkpoint_every=_STEPS.value, **steps
    )
    source = dataclasses.replace(run.data, source="stdlib")
    run = dataclasses.replace(run, training=training, data=source)
    with tempfile.TemporaryDirectory() as folder:
        loop.train(run, folder, progress=False)
        for line in writers.read(f"{folder}/metrics.jsonl"):
            print(f"batch {_BATCH.value}, step {line['step']}: loss {line['loss']:.4f}")


if __name__ == "__main__":
    flags.mark_flags_as_required(["config"])
    app.run(main)
