"""The field's text sets: their files, their splits and their published counts."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal


@dataclasses.dataclass(frozen=True)
class TextSet:
    """A set of text.

    Attributes:
      name: its name after `tfds:`.
      url: where its authors' archive is.
      files: split to the names that its file goes by; the split `whole` is a file that
        is cut into the parts `counts` by bytes.
      unit: what `counts` counts. A word or the end of a line; a byte; or, for files
        with a character and a space in turn, a character or the end of a line.
      counts: split to the published number of units.
      thousands: `counts` were published in thousands, cut off.
      alphabet: bytes that may occur, where not all may.
      articles: documents are the articles under headings ` = Title = `.
      vocabulary: what models of the set are usually trained on.
      source: where the counts were published.
      counted: the splits whose words and characters make a vocabulary, as in
        Transformer-XL's released code.
    """

    name: str
    url: str
    files: Mapping[str, tuple[str, ...]]
    unit: Literal["byte", "word", "spaced character"]
    counts: Mapping[str, int]
    vocabulary: str
    source: str
    thousands: bool = False
    alphabet: bytes | None = None
    articles: bool = False
    counted: tuple[str, ...] = ("train", "validation", "test")

    def expected(self, split: str) -> int:
        """The published count of a split."""
        return self.counts[split]


_SPLITS = ("train", "validation", "test")


def _three(*files: str) -> Mapping[str, tuple[str, ...]]:
    return {s: (f, f"{g}.txt") for s, f, g in zip(_SPLITS, files, _GIVEN, strict=True)}


def _counts(*counts: int) -> Mapping[str, int]:
    return dict(zip(_SPLITS, counts, strict=True))


_GIVEN = ("train", "valid", "test")  # how the field's scripts rename the files
_WIKI = "https://s3.amazonaws.com/research.metamind.io/wikitext/"
_PTB = "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"
_TOKENS = ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")
_MILLIONS = _counts(90_000_000, 5_000_000, 5_000_000)

SETS: Mapping[str, TextSet] = MappingProxyType(
    {
        found.name: found
        for found in (
            TextSet(
                "enwik8",
                "http://mattmahoney.net/dc/enwik8.zip",
                {"whole": ("enwik8",)},
                "byte",
                _MILLIONS,
                "bytes",
                "10^8 bytes: mattmahoney.net/dc/textdata; cut at 90 and 95 million, as "
                "by the script that Transformer-XL's released code calls",
            ),
            TextSet(
                "text8",
                "http://mattmahoney.net/dc/text8.zip",
                {"whole": ("text8",)},
                "byte",
                _MILLIONS,
                "text8",
                "10^8 bytes of a to z and the space: mattmahoney.net/dc/textdata; "
                "90 M, 5 M and 5 M characters: Bai et al. 2018, 1803.01271",
                alphabet=b" abcdefghijklmnopqrstuvwxyz",
            ),
            TextSet(
                "wikitext103",
                _WIKI + "wikitext-103-v1.zip",
                _three(*_TOKENS),
                "word",
                _counts(103_227_021, 217_646, 245_569),
                "words",
                "Merity et al. 2017, table 1, 1609.07843",
                articles=True,
                counted=("train",),
            ),
            TextSet(
                "wikitext2",
                _WIKI + "wikitext-2-v1.zip",
                _three(*_TOKENS),
                "word",
                _counts(2_088_628, 217_646, 245_569),
                "words",
                "Merity et al. 2017, table 1, 1609.07843",
                articles=True,
            ),
            TextSet(
                "ptb",
                _PTB,
                _three("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
                "word",
                _counts(929_589, 73_760, 82_430),
                "words",
                "the documentation of the package `observations` (its function ptb)",
            ),
            TextSet(
                "ptb_characters",
                _PTB,
                _three("ptb.char.train.txt", "ptb.char.valid.txt", "ptb.char.test.txt"),
                "spaced character",
                _counts(5059, 396, 446),
                "characters",
                "Bai et al. 2018, 1803.01271, in thousands",
                thousands=True,
            ),
        )
    }
)
