"""Transformer-XL on Penn Treebank, 10,000 words: ours, since none was released.

    python -m experiments.prepare_data --dataset=ptb
    python -m experiments.train --config=configs/ptb.py --workdir=runs/ptb

Published: 24 M parameters, test perplexity 54.52 (Dai et al. 2019, table 5), with
variational dropout and weight averaging. Neither sizes nor regularisation were ever
released ("mainly a regularization game": kimiyoung/transformer-xl, issue 16). These are
sizes of ours with the published count and plain dropout. Nobody has trained them here;
do not expect the published figure.

Where the data are from: docs/data.md.

Hardware: one GPU, hours (an estimate).
"""

import ml_collections

from configs import released
from relpos_jax.report.parameters import Published

PUBLISHED = {
    "ours": Published(
        10_000, "24 M", "54.52 test perplexity, Dai et al. 2019, table 5"
    ),
}


def get_config(variant: str = "ours") -> ml_collections.ConfigDict:
    """Returns the config.

    Raises:
      ValueError: an unknown variant.
    """
    sizes = dict(layers=12, width=400, heads=10, head_dim=40, feedforward=1100)
    variants = {"ours": (sizes | dict(dropout=0.4),)}
    training = dict(length=70, batch=20, steps=40_000, weight_decay=1e-5)
    data = dict(source="tfds:ptb", vocabulary="words", vocabulary_size=10_000)
    return released.build(data, *released.choose(variants, variant), training)
