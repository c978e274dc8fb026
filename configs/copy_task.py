"""A copy task farther than segment and memory: compressive against segment memory.

    python -m experiments.copy_task --config=configs/copy_task.py

A stream in which every fourth token is one of 8 symbols; at each the model names the
symbol 48 tokens back. Segments have 16 tokens. Both memories keep 16 states: segment
memory the last 16, so that no query sees farther than 31 tokens; compressive memory the
last 4, and 12 slots of 4 states each. Three seeds each, on held-out sequences.
"""

import ml_collections

from relpos_jax import config as configs
from relpos_jax.evaluation.copy_task import CopyConfig
from relpos_jax.evaluation.memories import MemoryConfig
from relpos_jax.models.config import ModelConfig
from relpos_jax.training.config import TrainingConfig


def get_config(position: str = "transformer_xl") -> ml_collections.ConfigDict:
    """Returns the config; `position` is the encoding's name."""
    config = ml_collections.ConfigDict()
    config.task = configs.section(CopyConfig)
    config.memory = configs.section(MemoryConfig, slots=16, compressed=12, rate=4)
    config.model = configs.section(
        ModelConfig, layers=2, width=64, heads=4, head_dim=16, feedforward=128
    )
    config.model.position = position
    config.training = configs.section(
        TrainingConfig,
        steps=500,
        batch=32,
        length=16,
        learning_rate=3e-3,
        warmup=50,
        weight_decay=0.01,
        steps_per_call=50,
    )
    return config
