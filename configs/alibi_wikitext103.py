"""The 247 M model on WikiText-103 that ALiBi was shown on (Press et al. 2022).

    python -m experiments.prepare_data --dataset=wikitext103
    python -m experiments.train --config=configs/alibi_wikitext103.py:alibi \
        --workdir=runs/alibi

The argument is the encoding's name: `alibi`, `sinusoidal`, `rope` or `t5`, the paper's
four. Published, validation perplexity at 512, trained at 512, non-overlapping windows
(table 2): ALiBi 19.73, T5 19.65, sinusoidal 20.05, RoPE 20.07; the whole tables are in
`relpos_jax.report.published`. Two runs that differ in their seed are up to 0.9 apart
(Haviv et al. 2022, footnote 2).

The model is Baevski and Auli's (2019): 16 layers, pre-norm, adaptive embedding and
softmax. The clusters here (20,000 and 60,000 as cutoffs, everything tied) and 267,744
ids, special tokens among them, are not in the paper but give its count. Biases of the
attention, which ours does not have, would be 65,536 parameters: 246.9 M either way.

The data's vocabulary has 267,735 words (docs/data.md), so the model trained here has 9
ids fewer. Ours, not the paper's: dropout, batch and everything of the optimiser.

Hardware: table 1 has 15 to 19 GB a GPU for training at 512 to 1024, in half precision.
"""

import ml_collections

from configs import wikitext103
from relpos_jax import config as configs
from relpos_jax.config import DataConfig
from relpos_jax.models import AdaptiveConfig, ModelConfig
from relpos_jax.report.parameters import Published
from relpos_jax.training.config import TrainingConfig

VOCABULARY = 267_744
_TABLE = "validation perplexity at 512, Press et al. 2022, table 2"
PUBLISHED = {
    "alibi": Published(VOCABULARY, "247 M", f"19.73 {_TABLE}"),
    "sinusoidal": Published(VOCABULARY, "247 M", f"20.05 {_TABLE}"),
    "rope": Published(VOCABULARY, "247 M", f"20.07 {_TABLE}"),
    "t5": Published(VOCABULARY, "247 M", f"19.65 {_TABLE}"),
}


def get_config(position: str = "alibi") -> ml_collections.ConfigDict:
    """Returns the config; `position` is the encoding's name."""
    config = ml_collections.ConfigDict()
    config.data = configs.section(
        DataConfig,
        source="tfds:wikitext103",
        vocabulary="words",
        vocabulary_size=wikitext103.VOCABULARY,
    )
    config.model = configs.section(
        ModelConfig,
        position=configs.position(position),
        layers=16,
        width=1024,
        heads=8,
        head_dim=128,
        feedforward=4096,
        final_norm=False,
        activation="relu",
        dropout=0.1,
        adaptive=configs.section(AdaptiveConfig, cutoffs=(20_000, 60_000), div_val=4),
    )
    config.training = configs.section(
        TrainingConfig,
        length=512,
        batch=32,
        steps=200_000,
        learning_rate=5e-4,
        warmup=8000,
        clip=0.25,
        weight_decay=0.0,
        checkpoint_every=4000,
        log_every=200,
    )
    config.mesh = configs.section(configs.MeshConfig)
    return config
