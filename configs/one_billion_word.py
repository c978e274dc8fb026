"""Transformer-XL on One Billion Word, 793,471 words (Dai et al. 2019, table 4).

    python -m experiments.train --config=configs/one_billion_word.py:base \
        --workdir=runs/one_billion_word

| variant | layers | parameters | published, test perplexity |
|---|---|---|---|
| base | 18 | 0.47 B (printed: 0.46 B) | 23.5 (table 4) |
| large | 24 | 0.8 B | 21.8 (table 4) |

The vocabulary is a file, `1b_word_vocab.txt`, looked for where the command is
started: docs/data.md says where it and the data are from.

The released scripts for PyTorch and TensorFlow differ (kimiyoung/transformer-xl, issue
102). No projection is tied in either. Whether the tables are follows from the printed
counts: base has 466.5 M parameters with tables of its own for the softmax and 357.8 M
without; large 977 M and 841 M. So `base` is untied and `large` tied here. 0.46 B is
466.5 M cut off instead of rounded.

Published evaluation: segments of 32 with a memory of 128, same_length. The learning
rate of large is 2.5e-4 in PyTorch's script and 1e-4 in TensorFlow's; ours is the first.

Hardware: up to 512 TPU cores for 2 to 5 days (the paper, of all its models).
"""

import ml_collections

from configs import released
from relpos_jax import config as configs
from relpos_jax.models import AdaptiveConfig
from relpos_jax.report.parameters import Published

VOCABULARY, CUTOFFS = 793_471, (60_000, 100_000, 640_000)
VARIANTS = {
    "base": (
        dict(layers=18, width=1024, heads=8, head_dim=128, feedforward=4096)
        | dict(tie_embeddings=False),
        dict(length=32, batch=224, steps=500_000, warmup=20_000),
    ),
    "large": (
        dict(layers=24, width=1280, heads=16, head_dim=80, feedforward=8192)
        | dict(dropout=0.05),
        dict(length=32, batch=512, steps=1_200_000, warmup=30_000),
    ),
}
_TABLE = "test perplexity, Dai et al. 2019, table 4"
PUBLISHED = {
    "base": Published(
        VOCABULARY, "0.46 B", f"23.5 {_TABLE}", "466.5 M, cut off instead of rounded"
    ),
    "large": Published(VOCABULARY, "0.8 B", f"21.8 {_TABLE}"),
}


def get_config(variant: str = "base") -> ml_collections.ConfigDict:
    """Returns the config.

    Raises:
      ValueError: an unknown variant.
    """
    model, training = released.choose(VARIANTS, variant)
    adaptive = configs.section(
        AdaptiveConfig, cutoffs=CUTOFFS, div_val=4, tie_projections=(False,) * 4
    )
    data = dict(
        source="tfds:lm1b",
        vocabulary="words:1b_word_vocab.txt",
        vocabulary_size=VOCABULARY,
    )
    return released.build(data, model | {"adaptive": adaptive}, training)
