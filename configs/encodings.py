"""The study of `configs/extrapolate.py` with every registered encoding.

    python -m experiments.extrapolate --config=configs/encodings.py --workdir=runs/all

The variants are that study's (`configs/encodings.py:smoke`). The names come from the
registry, so an encoding appears here as soon as it has its line there. It takes as long
as `quick` for each of them; its results.csv fills a column of docs/encodings/index.md.
"""

import ml_collections

from configs import extrapolate
from relpos_jax import config as configs
from relpos_jax.positional import ENCODINGS


def get_config(variant: str = "quick") -> ml_collections.ConfigDict:
    """Returns the study's config.

    Raises:
      ValueError: an unknown variant.
    """
    config = extrapolate.get_config(variant)
    chosen = config.study.positions  # what that study sets stays as it is there
    config.study.encodings = tuple(ENCODINGS)
    for name in ENCODINGS:
        if name not in chosen:
            chosen[name] = configs.position(name)
    return config
