"""Trains encoder-decoders on short sequences and tests them on longer ones.

    python -m experiments.length_generalisation --workdir=runs/copy \
        --config=configs/length_generalisation.py:copy

Prints a table of exact matches by length and encoding; `results.json` in the workdir
has the counts, and the configuration that gave them.
"""

import json
import pathlib

from absl import app, flags
from ml_collections import config_flags
from tqdm import tqdm

from relpos_jax import config as configs
from relpos_jax.evaluation import length_generalisation as lengths
from relpos_jax.training import runtime
from relpos_jax.training.config import TrainingConfig

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results.")
_PROGRESS = flags.DEFINE_bool("progress", True, "Show a progress bar.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"what is {argv[1]!r}? Options look like --name=value.")
    runtime.prepare(compilation_cache=True)
    config = _CONFIG.value
    try:
        study = configs.take(config.study, lengths.LengthStudy, "study")
        training = configs.take(config.training, TrainingConfig, "training")
    except (ValueError, TypeError) as error:
        raise SystemExit(f"error: {error}") from error
    runs = len(study.encodings) * len(study.seeds)
    size = training.steps_per_call
    with tqdm(total=runs * training.steps, disable=not _PROGRESS.value) as bar:

        def progress(name, seed, step, loss):
            bar.set_postfix_str(f"{name} {seed}: loss {loss:.3f}")
            bar.update((step - 1) % size + 1)

        results = list(lengths.run(study, training, progress))
    workdir = pathlib.Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    found = {"study": configs.resolved(study), "training": configs.resolved(training)}
    found["results"] = [result._asdict() for result in results]
    (workdir / "results.json").write_text(json.dumps(found, indent=2) + "\n")
    print(lengths.table(study, results))


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main)
