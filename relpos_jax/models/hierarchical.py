"""Hierarchical attention: a second level, across summaries of segments."""

from typing import ClassVar

import jax

from relpos_jax.attention import attend
from relpos_jax.attention.hierarchy import Earlier, segments_of, summarise
from relpos_jax.models.attention import Attention, kept_features
from relpos_jax.models.config import ModelConfig

# Above this many scores a head and row of the batch, blocks that hold no summary are
# looked for and left out.
DENSE_BELOW = 128 * 128


class Across(Attention):
    """Attention to summaries of the segments before a token's own.

    Has projections, and an encoding, of its own: `config.hierarchy.position`, whose
    positions are numbers of segments. What layers would share of the encoding's
    parameters each has for itself here.

    Raises:
      ValueError: an encoding that keeps features of each token, or adds to embeddings.
    """

    alone: ClassVar[bool] = True
    turns_once: ClassVar[bool] = False  # summaries have places of their own

    def __init__(self, config: ModelConfig, *, key: jax.Array):
        encoding = config.hierarchy.position
        if encoding.absolute:
            raise ValueError(f"{encoding} adds to embeddings, and summaries have none")
        if kept_features(encoding, config.dims):
            raise ValueError(
                f"{encoding} adds up what tokens say between query and key, where a "
                "summary of the query's own segment would tell of tokens behind it"
            )
        super().__init__(config, key=key, encoding=encoding, mask=Earlier())

    def look(self, params, q, k, v, features, at, k_at, layout, key=None, turned=False):
        config = self.config
        size, implementation = config.hierarchy.segment, config.attention
        k, v, k_at = summarise(k, v, k_at, size)
        small = q.shape[1] * k.shape[1] <= DENSE_BELOW
        if implementation == "auto":
            implementation = "dense" if small else "blockwise"
        return attend(
            self.encoding,
            params,
            q,
            k,
            v,
            segments_of(at, size),
            k_at,
            mask=self.mask,
            implementation=implementation,
            dropout=config.attention_dropout,
            key=key,
        )
