"""A small byte-level language model on the standard library's text.

    python -m experiments.train --config=configs/quick.py --workdir=runs/quick

Another encoding: `--config=configs/quick.py:alibi` (the names of
`relpos_jax.positional.ENCODINGS`).

Expected: the training loss falls to about 1.5 nats a byte (2.2 bits) at step 400; in
`metrics.jsonl`, each line is one batch of 2048 bytes, so it varies by a tenth.
Run time: 95 s of CPU time, compilation included (two cores, shared with other work).
"""

import ml_collections

from relpos_jax import config as configs
from relpos_jax.models.config import ModelConfig
from relpos_jax.training.config import TrainingConfig


def get_config(position: str = "rope") -> ml_collections.ConfigDict:
    """Returns the config; `position` is the encoding's name."""
    config = ml_collections.ConfigDict()
    config.data = configs.section(configs.DataConfig, source="stdlib")
    config.model = configs.section(
        ModelConfig,
        position=configs.position(position),
        layers=4,
        width=128,
        heads=4,
        head_dim=32,
        feedforward=512,
    )
    config.training = configs.section(
        TrainingConfig,
        steps=400,
        batch=32,
        length=64,
        learning_rate=2e-3,
        warmup=40,
        checkpoint_every=100,
    )
    config.mesh = configs.section(configs.MeshConfig)
    return config
