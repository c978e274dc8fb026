"""Transformer-XL on text8, 26 letters and the space (Dai et al. 2019, table 3).

    python -m experiments.prepare_data --dataset=text8
    python -m experiments.train --config=configs/text8.py:large --workdir=runs/text8

| variant | layers | parameters | published, bits per character |
|---|---|---|---|
| base | 12 | 41 M | none: the released script has it, the paper does not |
| large | 24 | 277 M | 1.08 (table 3) |

Sizes, lengths and training are those of `configs/enwik8.py`, as in the released
scripts. Where the data are from: docs/data.md.

Hardware: as for enwik8.
"""

import ml_collections

from configs import enwik8, released
from relpos_jax.report.parameters import Published

PUBLISHED = {
    "base": Published(27, "41 M", "no figure (count: enwik8's, table 2)"),
    "large": Published(
        27, "277 M", "1.08 bits per character, Dai et al. 2019, table 3"
    ),
}


def get_config(variant: str = "large") -> ml_collections.ConfigDict:
    """Returns the config.

    Raises:
      ValueError: an unknown variant.
    """
    sizes = {name: enwik8.VARIANTS[name] for name in PUBLISHED}
    data = dict(source="tfds:text8", vocabulary="text8")
    return released.build(data, *released.choose(sizes, variant))
