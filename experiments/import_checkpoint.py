"""Turns a checkpoint of another project into a run's folder.

    python -m experiments.import_checkpoint --source=transfo-xl-wt103 \
        --workdir=runs/wt103

`--source` is a Hugging Face TransfoXL folder, or, with `--settings`, the state
dictionary of the authors' PyTorch code (`.safetensors`, or a PyTorch file where torch
is installed). `experiments.evaluate` takes the folder that this writes.
"""

import json
import pathlib

from absl import app, flags

from relpos_jax.interop import official_transformer_xl, runs, transfo_xl
from relpos_jax.models.decoder import count_parameters
from relpos_jax.training import runtime

_SOURCE = flags.DEFINE_string("source", None, "Folder, or file of weights.")
_SETTINGS = flags.DEFINE_string(
    "settings", None, "JSON file of MemTransformerLM's arguments, for a file."
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder to write.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"what is {argv[1]!r}? Options look like --name=value.")
    runtime.prepare()
    source = pathlib.Path(_SOURCE.value).expanduser()
    try:
        if source.is_dir():
            kind, (config, _, params) = "transfo-xl", transfo_xl.load(source)
        elif _SETTINGS.value is None:
            raise ValueError(f"{source} is no folder; for a file, give --settings")
        else:
            settings = json.loads(pathlib.Path(_SETTINGS.value).read_text())
            kind = "MemTransformerLM"
            config, _, params = official_transformer_xl.load(source, settings)
        runs.save_run(_WORKDIR.value, config, params, kind=kind, name=source.name)
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{count_parameters(config):,} parameters; the run is in {_WORKDIR.value}")


if __name__ == "__main__":
    flags.mark_flags_as_required(["source", "workdir"])
    app.run(main)
