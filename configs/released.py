"""What the released Transformer-XL scripts have in common (Dai et al. 2019).

Not a config of its own: `configs/enwik8.py`, `text8.py`, `wikitext103.py`,
`one_billion_word.py` and `ptb.py` fill it in. Post-norm, ReLU, no norm behind the last
layer, shared u and v, a bias a token id, Adam without weight decay, a cosine down to 0.

`dropatt` is `model.attention_dropout`. `same_length` and `clamp_len` are settings of
the evaluation there: `--config.model.window` and `--config.model.position.knobs.clamp`.
"""

import ml_collections

from relpos_jax import config as configs
from relpos_jax.config import DataConfig
from relpos_jax.models import ModelConfig
from relpos_jax.training.config import TrainingConfig


def build(
    data: dict, model: dict, training: dict, *, untie: bool = False
) -> ml_collections.ConfigDict:
    """Returns a config.

    Args:
      data: `source` and `vocabulary`, and what differs.
      model: sizes, and what differs; `memory_length` is the training segment's unless
        it is among them.
      training: length, batch, steps, and what differs.
      untie: u and v of each layer its own (TensorFlow's scripts for words).
    """
    config = ml_collections.ConfigDict()
    config.data = configs.section(DataConfig, **(dict(order="lanes") | data))
    defaults = dict(
        norm="post",
        final_norm=False,
        activation="relu",
        output_bias=True,
        memory_length=training["length"],
        init_std=0.02,
    )
    config.model = configs.section(
        ModelConfig,
        position=configs.position("transformer_xl", untie=untie),
        **(defaults | model),
    )
    defaults = dict(
        learning_rate=2.5e-4,
        warmup=0,
        final_learning_rate_fraction=0.0,
        weight_decay=0.0,
        b2=0.999,
        clip=0.25,
        checkpoint_every=4000,
        log_every=200,
    )
    config.training = configs.section(TrainingConfig, **(defaults | training))
    config.mesh = configs.section(configs.MeshConfig)
    return config


def choose(variants: dict, name: str):
    """Returns a variant.

    Raises:
      ValueError: there is none of that name.
    """
    if name not in variants:
        raise ValueError(f"unknown variant {name!r}: take one of {tuple(variants)}")
    return variants[name]
