"""Text as bytes: corpora, vocabularies, and batches that are functions of the step."""

from relpos_jax.data.batches import Batch, Lanes, Windows
from relpos_jax.data.corpora import Corpus, load
from relpos_jax.data.vocabulary import Bytes

__all__ = ["Batch", "Bytes", "Corpus", "Lanes", "Windows", "load"]
