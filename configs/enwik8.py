"""Transformer-XL on enwik8, bytes (Dai et al. 2019, table 2).

    python -m experiments.prepare_data --dataset=enwik8
    python -m experiments.train --config=configs/enwik8.py:base --workdir=runs/enwik8

| variant | layers | parameters | published, bits per character |
|---|---|---|---|
| base | 12 | 41 M | 1.06 (table 2) |
| 18 | 18 | 88 M | 1.03 (table 2) |
| large | 24 | 277 M | 0.99 (table 2) |

`base` and `large` are the released scripts' sizes. The 18 layers' were never released
(kimiyoung/transformer-xl, issue 145): the feed-forward width here is ours, chosen for
the published count. The released vocabulary has 204 ids, the byte values that occur;
ours has all 256, 26,676 (base) or 53,300 (large) parameters more, which the printed
digits do not show.

The set has 10^8 bytes (docs/data.md), of which the last 10% are validation and test, 5%
each. Published evaluation: segments of 80 with a memory of
2100 and distances clamped at 820 (base); 128, 3800 and 1000 (large); same_length.

Hardware: a GPU of 16 GB for `base`. Its training call at batch 22 needs 13.4 GB for
temporaries beside 0.8 GB of state and data (`memory_analysis` of the program for CPU,
float32), and compiled in 160 s on two cores that thirty processes shared; two steps at
batch 1 gave losses of 8.48 and 6.78 nats on the standard library's text. Measured by

    python -m experiments.compile_report --config=configs/enwik8.py:base \
        --steps=2 --batch=1

`large` took the paper tens of TPU cores for 2 to 5 days.
"""

import ml_collections

from configs import released
from relpos_jax.report.parameters import Published

_BASE = dict(layers=12, width=512, heads=8, head_dim=64, feedforward=2048, dropout=0.1)
_SHORT = dict(length=512, batch=22, steps=400_000)
VARIANTS = {
    "base": (_BASE, _SHORT),
    "18": (_BASE | dict(layers=18, feedforward=3500), _SHORT),
    "large": (
        dict(layers=24, width=1024, heads=8, head_dim=128)
        | dict(feedforward=3072, dropout=0.15, attention_dropout=0.15),
        dict(length=768, batch=64, steps=400_000, warmup=4000),
    ),
}
_TABLE = "bits per character, Dai et al. 2019, table 2"
PUBLISHED = {
    "base": Published(204, "41 M", f"1.06 {_TABLE}"),
    "18": Published(204, "88 M", f"1.03 {_TABLE}"),
    "large": Published(204, "277 M", f"0.99 {_TABLE}"),
}


def get_config(variant: str = "base") -> ml_collections.ConfigDict:
    """Returns the config.

    Raises:
      ValueError: an unknown variant.
    """
    model, training = released.choose(VARIANTS, variant)
    return released.build(dict(source="tfds:enwik8"), model, training)
