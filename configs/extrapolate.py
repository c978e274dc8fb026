"""Train at 64 bytes, test at up to 32 times as many, with one encoding after another.

    python -m experiments.extrapolate --config=configs/extrapolate.py:quick \
        --workdir=runs/quick

Variants: `quick` (one seed), `full` (three paired seeds, more encodings, longer) and
`smoke` (seconds, proves nothing). Any key can be overridden:

    --config.training.steps=600
    --config.data.source=file:PATH
    --config.study.encodings="('rope', 'alibi')"
    --config.study.positions.t5.knobs.max_distance=64

Expected of `quick`, bits per byte at 1,024 over those at 64 (non-overlapping): about
1.8 for RoPE, 1.6 for sinusoids, 1.2 for T5, 1.0 for Shaw, 0.99 for ALiBi, 0.97 for
Transformer-XL (docs/results.md). It takes about 6 minutes on two CPU cores. `full` was
never run in full; by its number of steps and models, expect hours there.
"""

import ml_collections

from relpos_jax import config as configs
from relpos_jax.config import DataConfig
from relpos_jax.evaluation.config import EvaluationConfig
from relpos_jax.evaluation.extrapolation import StudyConfig
from relpos_jax.models.config import ModelConfig
from relpos_jax.training.config import TrainingConfig

QUICK = (
    "none",
    "sinusoidal",
    "learned",
    "rope",
    "alibi",
    "t5",
    "shaw",
    "transformer_xl",
)
FULL = (*QUICK, "sinusoidal_interleaved", "rope_interleaved", "rope_partial")
VARIANTS = ("quick", "full", "smoke")


def get_config(variant: str = "quick") -> ml_collections.ConfigDict:
    """Returns the study's config; see `relpos_jax.evaluation.extrapolation`.

    Raises:
      ValueError: an unknown variant.
    """
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}: take one of {VARIANTS}")
    config = ml_collections.ConfigDict()
    config.data = configs.section(DataConfig, source="stdlib")
    config.model = configs.section(
        ModelConfig, layers=4, width=128, heads=4, head_dim=32, feedforward=512
    )
    config.training = configs.section(
        TrainingConfig, length=64, batch=16, steps=450, learning_rate=3e-3, warmup=45
    )
    config.evaluation = configs.section(
        EvaluationConfig,
        non_overlapping_tokens=8192,
        same_targets_tokens=256,
        sliding_tokens=3072,
        memory_tokens=4096,
        group_fraction=2,
        stride_fraction=4,
    )
    config.study = configs.section(StudyConfig, encodings=QUICK)
    if variant == "full":
        config.study.encodings = FULL
        config.study.seeds = (0, 1, 2)
        config.training.steps = 3000
        config.training.warmup = 200
        config.evaluation.non_overlapping_tokens = 131072
        config.evaluation.same_targets_tokens = 2048
        config.evaluation.sliding_tokens = 16384
        config.evaluation.memory_tokens = 32768
    if variant == "smoke":
        config.study.encodings = ("none", "learned", "transformer_xl")
        config.data.max_bytes = 20000
        config.model = configs.section(
            ModelConfig, layers=1, width=16, heads=2, head_dim=8, feedforward=16
        )
        config.training = configs.section(
            TrainingConfig,
            length=8,
            batch=4,
            steps=6,
            warmup=2,
            steps_per_call=2,
            checkpoint_every=2,
            log_every=1,
        )
        config.evaluation = configs.section(
            EvaluationConfig,
            multiples=(1, 1.5, 4),
            non_overlapping_tokens=200,
            same_targets_tokens=40,
            sliding_tokens=100,
            memory_tokens=200,
            memory_lanes=3,
            tokens_per_batch=256,
        )
    config.study.positions = {
        name: configs.position(name) for name in config.study.encodings
    }
    if "t5" in config.study.encodings:
        # As in KERPLE's comparison: without it, so few steps barely move the bias.
        config.study.positions.t5.knobs.gain = config.model.head_dim**0.5
    # A table of the training length, whose last row stands for whatever lies past it:
    # more rows would have stayed as they were initialised.
    learned = config.study.positions.learned.knobs
    learned.rows = config.training.get_ref("length")
    learned.beyond = "last"
    return config
