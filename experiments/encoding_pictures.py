"""Draws every registered encoding's score by distance.

    python -m experiments.encoding_pictures --out=docs/encodings/figures

Writes NAME.png for each name, or for those of `--names`. The pictures are the same each
time; about three seconds an encoding.
"""

import pathlib

from absl import app, flags

from relpos_jax.positional import ENCODINGS
from relpos_jax.report import encoding_pictures

OUT = flags.DEFINE_string("out", None, "folder for the pictures", required=True)
NAMES = flags.DEFINE_list("names", [], "names to draw; all if empty")


def main(_) -> None:
    unknown = set(NAMES.value) - set(ENCODINGS)
    if unknown:
        raise app.UsageError(f"no such encodings: {', '.join(sorted(unknown))}")
    folder = pathlib.Path(OUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES.value or ENCODINGS:
        figure = encoding_pictures.picture(name, ENCODINGS[name])
        (folder / f"{name}.png").write_bytes(encoding_pictures.to_png(figure))
        print(folder / f"{name}.png")


if __name__ == "__main__":
    app.run(main)
