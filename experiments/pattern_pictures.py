"""Draws the mask of every sparse pattern.

    python -m experiments.pattern_pictures --out=docs/figures

Writes pattern_NAME.png for each; a few seconds in all.
"""

import pathlib

from absl import app, flags

from relpos_jax.report import encoding_pictures, pattern_pictures

OUT = flags.DEFINE_string("out", None, "folder for the pictures", required=True)


def main(_) -> None:
    folder = pathlib.Path(OUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    for name in pattern_pictures.EXAMPLES:
        path = folder / f"pattern_{name}.png"
        path.write_bytes(encoding_pictures.to_png(pattern_pictures.picture(name)))
        print(path)


if __name__ == "__main__":
    app.run(main)
