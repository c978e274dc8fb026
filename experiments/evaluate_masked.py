"""Scores a trained encoder on masked tokens of its held-out text.

    python -m experiments.evaluate_masked --workdir=runs/masked

Prints the mean negative log-likelihood of the chosen tokens (80% hidden, 10% replaced,
10% as they are) and how many the encoder gets right, at several lengths.
"""

import json
import pathlib

from absl import app, flags

from relpos_jax import config as configs
from relpos_jax.data import tokens
from relpos_jax.data.masking import Masking
from relpos_jax.evaluation import masked
from relpos_jax.interop import runs
from relpos_jax.models import Encoder
from relpos_jax.training import runtime

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_LENGTHS = flags.DEFINE_multi_integer("length", [64, 128, 256, 512], "Piece lengths.")
_TOKENS = flags.DEFINE_integer("tokens", 131072, "Tokens read at each length.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"what is {argv[1]!r}? Options look like --name=value.")
    runtime.prepare(compilation_cache=True)
    try:
        model, *split = runs.load_run(_WORKDIR.value, Encoder)
        run = json.loads((pathlib.Path(_WORKDIR.value) / "config.json").read_text())
        settings = configs.take(run["data"], configs.DataConfig, "data")
        vocabulary = tokens.of_run(_WORKDIR.value, model.vocabulary - 1)
        text = settings.load(vocabulary).held_out
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        raise SystemExit(f"error: {error}") from error
    masking = Masking(model.vocabulary - 1, settings.masked_fraction)
    print(f"{'length':>6}  {'chosen':>7}  bits  accuracy")
    for length in _LENGTHS.value:
        batch = max(1, 8192 // length)
        steps = max(1, min(_TOKENS.value, len(text) - 1) // (batch * length))
        score = masked.evaluate(*split, text, length, masking, batch=batch, steps=steps)
        print(f"{length:>6}  {score.tokens:>7}  {score.bits:.2f}  {score.accuracy:.3f}")


if __name__ == "__main__":
    flags.mark_flags_as_required(["workdir"])
    app.run(main)
