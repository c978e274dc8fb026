"""Kinds of memory by encoding: bits per byte by the length of attention.

    python -m experiments.memory_grid --config=configs/memory_grid.py:quick \
        --workdir=runs/memory_grid

Small byte-level models on the standard library's text, trained on segments of 64 bytes
with 64 slots of memory, of whatever kind, and tested with queries that see at most 64,
128, 256 and 512 keys. Variants: `quick`, and `smoke` (seconds, proves nothing).
"""

import ml_collections

from relpos_jax import config as configs
from relpos_jax.config import DataConfig
from relpos_jax.evaluation.memories import KINDS, MemoryConfig
from relpos_jax.evaluation.memory_grid import GridConfig
from relpos_jax.models.config import ModelConfig
from relpos_jax.training.config import TrainingConfig

VARIANTS = ("quick", "smoke")


def get_config(variant: str = "quick") -> ml_collections.ConfigDict:
    """Returns the grid's config; see `relpos_jax.evaluation.memory_grid`.

    Raises:
      ValueError: an unknown variant.
    """
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}: take one of {VARIANTS}")
    config = ml_collections.ConfigDict()
    config.data = configs.section(DataConfig, source="stdlib", order="lanes")
    config.model = configs.section(
        ModelConfig, layers=2, width=96, heads=4, head_dim=24, feedforward=384
    )
    config.training = configs.section(
        TrainingConfig, length=64, batch=16, steps=400, learning_rate=3e-3, warmup=40
    )
    config.memory = configs.section(MemoryConfig)
    config.grid = configs.section(
        GridConfig,
        encodings=("rope", "alibi", "transformer_xl"),
        kinds=tuple(KINDS),
    )
    if variant == "smoke":
        config.data.max_bytes = 20000
        config.model = configs.section(
            ModelConfig, layers=1, width=16, heads=2, head_dim=8, feedforward=16
        )
        config.training = configs.section(
            TrainingConfig, length=8, batch=4, steps=4, warmup=2, steps_per_call=2
        )
        config.memory = configs.section(MemoryConfig, slots=8, compressed=4, rate=2)
        config.grid.encodings = ("alibi",)
        config.grid.multiples = (1, 4)
        config.grid.tokens = 100
    return config
