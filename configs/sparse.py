"""The quick model with sparse or hierarchical attention.

    python -m experiments.train --config=configs/sparse.py:big_bird --workdir=runs/bird

Others: `window`, `dilated`, `window_global`, `strided`, `fixed`, `hierarchical`; and
with another encoding `configs/sparse.py:dilated,alibi`. Windows are 256 bytes long.

Expected: the training loss falls as with `configs/quick.py`; no figures are kept of it.
Run time: not measured; the quick model takes 95 s of CPU time for as many bytes.
"""

import ml_collections

from configs import quick
from relpos_jax import config as configs

# None looks at more than half of a window of 256 bytes.
PATTERNS = {
    "window": dict(width=64),
    "dilated": dict(width=32, dilation=4),
    "window_global": dict(width=48, positions=(0, 1, 2, 3)),
    "big_bird": dict(block=16, global_blocks=(0,)),
    "strided": dict(stride=16),
    "fixed": dict(block=16, summary=1),
}


def get_config(arg: str = "big_bird") -> ml_collections.ConfigDict:
    """Returns the config; `arg` is a pattern's name, or that and an encoding's."""
    name, _, position = arg.partition(",")
    position = position or "rope"
    config = quick.get_config(position)
    if name == "hierarchical":
        second = configs.position(position)
        config.model.hierarchy = configs.hierarchy(16, second)
    else:
        config.model.pattern = configs.pattern(name, **PATTERNS.get(name, {}))
    config.training.batch, config.training.length = 8, 256
    return config
