"""Text as tokens: corpora, vocabularies, and batches that are functions of the step."""

from relpos_jax.data.batches import Batch, Lanes, Windows
from relpos_jax.data.corpora import Corpus, load
from relpos_jax.data.vocabulary import Bytes, Characters, Vocabulary, Words

__all__ = [
    "Batch",
    "Bytes",
    "Characters",
    "Corpus",
    "Lanes",
    "Vocabulary",
    "Windows",
    "Words",
    "load",
]
