"""Scores a text with a trained or imported model.

    python -m experiments.evaluate --workdir=runs/quick --source=file:text.txt

Every token but the first is scored once, in one stream: segments of `--length` tokens
with the model's memory, or chunks of it where the model has none. `--memory`,
`--window` and `--clamp` change a Transformer-XL for evaluation (0 for none).
"""

import json
import pathlib

from absl import app, flags

from relpos_jax.evaluation import perplexity
from relpos_jax.interop import runs
from relpos_jax.training import runtime

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_SOURCE = flags.DEFINE_string("source", None, "file:PATH, ids:PATH.npy, stdlib, tfds:…")
_LENGTH = flags.DEFINE_integer("length", 128, "Tokens in a segment.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 0, "Targets scored; 0: all.", lower_bound=0)
_JSON = flags.DEFINE_string("json", None, "File to write the numbers to.")
_AS, _OF = ("memory", "window", "clamp"), ("split", "data_dir", "vocabulary")
for _name in _AS:
    flags.DEFINE_integer(_name, None, "Instead of as trained.", lower_bound=0)
flags.DEFINE_string("split", None, "Of a set of TFDS: train, validation, test.")
flags.DEFINE_string("data_dir", None, "Where sets of TFDS are.")
flags.DEFINE_string("vocabulary", None, "For a run that has none.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"what is {argv[1]!r}? Options look like --name=value.")
    runtime.prepare()
    changes, given = ({n: flags.FLAGS[n].value for n in names} for names in (_AS, _OF))
    try:
        config, _, params = runs.load_run(_WORKDIR.value)
        config, graphdef = runs.evaluated(config, **changes)
        text = runs.read_text(_SOURCE.value, _WORKDIR.value, config.vocabulary, **given)
        language = perplexity.Language.of(graphdef, params)
        settings = (_LENGTH.value, config.memory_slots)
        score = runs.score(language, text.tokens, *settings, tokens=_TOKENS.value)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        raise SystemExit(f"error: {error}") from error
    found = runs.measures(score, text)
    print(runs.summary(found))
    if _JSON.value:
        found |= {"length": _LENGTH.value, "memory": config.memory_slots}
        pathlib.Path(_JSON.value).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    flags.mark_flags_as_required(["workdir", "source"])
    app.run(main)
