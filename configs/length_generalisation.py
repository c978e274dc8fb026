"""Small encoder-decoders that copy, reverse or add, tested on longer sequences.

    python -m experiments.length_generalisation --workdir=runs/copy \
        --config=configs/length_generalisation.py:copy

Tasks: copy, reverse, addition. Training lengths are 1 to 10; the table gives the
percentage of sequences of each length that are right to the last token, for each
encoding (`--config.study.encodings=...`, `--config.study.seeds=...`).
"""

import ml_collections

from relpos_jax import config as configs
from relpos_jax.evaluation.length_generalisation import LengthStudy
from relpos_jax.training.config import TrainingConfig


def get_config(task: str = "copy") -> ml_collections.ConfigDict:
    """Returns the config; `task` is a name of `relpos_jax.data.transduction.TASKS`."""
    config = ml_collections.ConfigDict()
    config.study = configs.section(LengthStudy, task=task)
    config.training = configs.section(
        TrainingConfig,
        steps=1500,
        batch=64,
        length=10,
        learning_rate=2e-3,
        warmup=100,
        weight_decay=0.01,
        steps_per_call=50,
    )
    return config
