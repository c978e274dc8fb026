"""Writes the comparison table of docs/encodings/index.md anew.

    python -m experiments.encoding_table --page=docs/encodings/index.md \
        --results=runs/all/results.csv

Everything but the last column comes from the registry; the last is filled from the
results of `experiments.extrapolate`, if given. What stands outside the markers stays.
"""

import pathlib

from absl import app, flags

from relpos_jax.report import encoding_table, tables

PAGE = flags.DEFINE_string("page", "docs/encodings/index.md", "the page to write")
RESULTS = flags.DEFINE_string("results", None, "a results.csv of the study")


def main(_) -> None:
    page = pathlib.Path(PAGE.value)
    pages = [path.stem for path in page.parent.glob("*.md")]
    rows = tables.read_csv(RESULTS.value) if RESULTS.value else ()
    document = page.read_text(encoding="utf-8")
    new = encoding_table.between_markers(document, encoding_table.table(pages, rows))
    page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
