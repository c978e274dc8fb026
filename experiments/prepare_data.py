"""Prepares a text set: downloads or takes its files, checks them, stores their tokens.

    python -m experiments.prepare_data --dataset=wikitext103
    python -m experiments.prepare_data --dataset=ptb --manual_dir=FOLDER

Prints what it found: counts beside the published ones, sizes, SHA-256, vocabulary. The
sets, and where their files are: docs/data.md.
"""

from absl import app, flags, logging

from relpos_jax.data import prepare

DATASET = flags.DEFINE_string(
    "dataset", None, "enwik8, wikitext103, ...", required=True
)
MANUAL_DIR = flags.DEFINE_string("manual_dir", None, "Folder of the unpacked files.")
DATA_DIR = flags.DEFINE_string("data_dir", None, "Where sets of TFDS are.")
VOCABULARY = flags.DEFINE_string("vocabulary", None, "Instead of the set's usual one.")
OTHER = flags.DEFINE_bool(
    "accept_other_counts", False, "Take text whose counts are not the published ones."
)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"what is {argv[1]!r}? Options look like --name=value.")
    logging.set_verbosity(logging.ERROR)  # TFDS tells of each file
    try:
        report = prepare.prepare(
            DATASET.value,
            manual_dir=MANUAL_DIR.value,
            data_dir=DATA_DIR.value,
            accept_other_counts=OTHER.value,
            vocabulary=VOCABULARY.value,
        )
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        raise SystemExit(f"error: {error}") from error
    print(report)


if __name__ == "__main__":
    app.run(main)
