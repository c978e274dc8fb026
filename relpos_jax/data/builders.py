"""Builders of TensorFlow Datasets for the sets of `text_sets`.

Importing this module registers them, so that `tfds.builder("wikitext103",
file_format="array_record")` works too. The records of a split, joined by nothing, are
its text: in order, with whether a document begins with each. Sizes, counts and SHA-256
of the text are kept in the set's metadata.

Counts are checked while a set is prepared; where they were published stands with each
set in `text_sets.SETS`.
"""

import os
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds

from relpos_jax.data import text_files, text_sets

BEGINS = "begins"


class _TextBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """What the sets share; `text_sets.SETS[self.name]` says the rest."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "The text as its authors publish it, in order."}
    MANUAL_DOWNLOAD_INSTRUCTIONS = "Give the folder of the unpacked files."

    # The folder of the files where the user gave one, instead of a download.
    given: str | os.PathLike | None = None
    # Counts other than the published ones are an error, unless this is True.
    accept_other_counts: bool = False

    def _info(self) -> tfds.core.DatasetInfo:
        found = text_sets.SETS[self.name]
        features = {
            "text": tfds.features.Text(),
            BEGINS: tfds.features.Scalar(np.int32),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description=f"{self.name}; counts: {found.source}.",
            features=tfds.features.FeaturesDict(features),
            homepage=found.url,
            metadata=tfds.core.MetadataDict(),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        found = text_sets.SETS[self.name]
        folder = self.given
        if folder is None:
            folder = text_files.unpack(
                os.fspath(dl_manager.download(found.url)), found.url
            )
        paths = text_files.find(Path(os.fspath(folder)), found)
        return {
            split: self._generate_examples(paths.get(split) or paths["whole"], split)
            for split in found.counts
        }

    def _generate_examples(self, path: Path, split: str):
        found = text_sets.SETS[self.name]
        checker = text_files.Checker(found, split)
        for number, record in enumerate(text_files.records(path, found, split)):
            checker.add(record)
            yield number, {"text": record.text, BEGINS: int(record.begins)}
        problem = checker.problem()
        if problem and not self.accept_other_counts:
            raise text_files.UnusableFile(f"{path}: {problem}")
        facts = checker.facts._asdict() | {"problem": problem}
        self.info.metadata[split] = facts


class Enwik8(_TextBuilder):
    """The first 10^8 bytes of a dump of the English Wikipedia; one document."""


class Text8(_TextBuilder):
    """Wikipedia's text as the letters a to z and the space; one document."""


class Wikitext103(_TextBuilder):
    """Wikipedia's good and featured articles, by words; an article a document."""


class Wikitext2(_TextBuilder):
    """A fiftieth of WikiText-103, with the same validation and test text."""


class Ptb(_TextBuilder):
    """Penn Treebank as Mikolov et al. (2010) prepared it, by words."""


class PtbCharacters(_TextBuilder):
    """Penn Treebank by characters; spaces are spaces again here."""


BUILDERS = {
    cls.name: cls for cls in (Enwik8, Text8, Wikitext103, Wikitext2, Ptb, PtbCharacters)
}
