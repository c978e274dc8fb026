"""Vocabularies: text to token ids and back.

A vocabulary is a frozen dataclass with a `name`, a `size`, the `unit` that a token is
("byte", "character", "word", "subword"), `encode`, `decode`, and `state`, the JSON
values that make it again. What a loss is reported as follows from the unit: `metric`.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32, Integer


@runtime_checkable
class Vocabulary(Protocol):
    """What every vocabulary has."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def unit(self) -> str: ...

    def encode(self, text: str | bytes) -> Int32[np.ndarray, " t"]: ...

    def decode(self, ids: Integer[np.ndarray, " t"]) -> bytes: ...

    def state(self) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True)
class Bytes:
    """A token is a byte; a token's id is the byte's value.

    Text is taken as UTF-8, so a character outside ASCII is several tokens, and losses
    are per byte, not per character. Nothing is normalised and nothing added: `decode`
    returns the very bytes that `encode` got.
    """

    @property
    def name(self) -> str:
        return "bytes"

    @property
    def unit(self) -> str:
        return "byte"

    @property
    def size(self) -> int:
        """Number of ids."""
        return 256

    def encode(self, text: str | bytes) -> Int32[np.ndarray, " t"]:
        """Returns the ids `[t]` of a text, one a byte."""
        data = text.encode("utf-8") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def decode(self, ids: Integer[np.ndarray, " t"]) -> bytes:
        """Returns the bytes of ids `[t]`.

        Bytes and not text, since a model's samples need not be valid UTF-8; to show
        them, `decode(ids).decode("utf-8", errors="replace")`.

        Raises:
          ValueError: an id is no byte.
        """
        return _checked(ids, self.size, "byte").astype(np.uint8).tobytes()

    def state(self) -> dict[str, Any]:
        """Returns what `from_state` makes it of."""
        return {"kind": "bytes"}


@dataclasses.dataclass(frozen=True)
class Characters:
    """A token is a character (a Unicode code point) of a fixed alphabet.

    Attributes:
      alphabet: its characters; a character's id is its place.

    Raises:
      ValueError: no character, or one twice.
    """

    alphabet: str

    def __post_init__(self):
        if not self.alphabet or len(set(self.alphabet)) < len(self.alphabet):
            raise ValueError(
                f"an alphabet needs at least one character and none twice, got "
                f"{self.alphabet!r}"
            )

    @classmethod
    def of(cls, texts: Iterable[bytes]) -> "Characters":
        """Returns the alphabet of texts in UTF-8, in the order of code points."""
        found = set()
        for text in texts:
            found.update(as_text(text))
        return cls("".join(sorted(found)))

    @property
    def name(self) -> str:
        return "characters"

    @property
    def unit(self) -> str:
        return "character"

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self.alphabet)

    @functools.cached_property
    def _ids(self) -> Int32[np.ndarray, " n"]:
        """By code point; -1 where the alphabet has none."""
        ids = np.full(max(map(ord, self.alphabet)) + 2, -1, np.int32)
        ids[[ord(character) for character in self.alphabet]] = np.arange(self.size)
        return ids

    def encode(self, text: str | bytes) -> Int32[np.ndarray, " t"]:
        """Returns the ids `[t]` of a text, one a character.

        Raises:
          ValueError: the text is no UTF-8, or has a character that isn't in the
            alphabet.
        """
        points = np.frombuffer(as_text(text).encode("utf-32-le"), np.uint32)
        ids = self._ids[np.minimum(points, len(self._ids) - 1)]
        wrong = np.flatnonzero(ids < 0)
        if wrong.size:
            raise ValueError(
                f"character {chr(points[wrong[0]])!r} at index {wrong[0]} is not in "
                f"the alphabet of {self.size} characters ({wrong.size} of {ids.size} "
                "are not)"
            )
        return ids

    def decode(self, ids: Integer[np.ndarray, " t"]) -> bytes:
        """Returns the text of ids `[t]`, UTF-8.

        Raises:
          ValueError: an id is no character's.
        """
        ids = _checked(ids, self.size, "character").tolist()
        return "".join([self.alphabet[index] for index in ids]).encode("utf-8")

    def state(self) -> dict[str, Any]:
        """Returns what `from_state` makes it of."""
        return {"kind": "characters", "alphabet": self.alphabet}


TEXT8 = Characters(" abcdefghijklmnopqrstuvwxyz")


@dataclasses.dataclass(frozen=True)
class Words:
    """A token is a word, that is, what stands between white space.

    The end of a line is a token of its own, `eos`: "a b\\nc" is `a b <eos> c`. Words
    that the vocabulary doesn't have become `unk`. Decoding joins words by one space, so
    it returns the words of a text and not its spacing.

    Attributes:
      words: a word's id is its place; for adaptive softmax, the most frequent first.
      eos: the word that stands for the end of a line.
      unk: the word that stands for unknown ones; None where there is none, and then
        unknown words are refused.
      lower: text is lower-cased before.

    Raises:
      ValueError: a word twice, or `eos` or `unk` not among them.
    """

    words: tuple[str, ...]
    eos: str = "<eos>"
    unk: str | None = "<unk>"
    lower: bool = False

    def __post_init__(self):
        if len(self._ids) < len(self.words):
            twice = collections.Counter(self.words).most_common(1)[0][0]
            raise ValueError(f"the vocabulary has the word {twice!r} more than once")
        for name in ("eos", "unk"):
            word = getattr(self, name)
            if word is not None and word not in self._ids:
                raise ValueError(
                    f"the vocabulary of {self.size} words has no {word!r}, which is "
                    f"its {name}"
                )

    @classmethod
    def of(
        cls,
        counts: Mapping[str, int],
        *,
        least: int = 1,
        size: int | None = None,
        **knobs: Any,
    ) -> "Words":
        """Returns the vocabulary of counted words, the most frequent first.

        As in Transformer-XL's released code: `eos` has id 0, and words of equal count
        stand in the order of the mapping, that is, of their first occurrence. `unk` has
        id 1 where the text itself doesn't have it.

        Args:
          counts: word to number of occurrences.
          least: words that occur less often are left out.
          size: most ids; the rarest words are left out.
          **knobs: `eos`, `unk`, `lower`.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        eos, unk = (knobs.get(name, defaults[name]) for name in ("eos", "unk"))
        special = [eos]
        if unk is not None and not counts.get(unk):
            special.append(unk)
        # Sorting is stable, in reverse too.
        ranked = sorted(counts.items(), key=lambda item: item[1], reverse=True)
        words = [w for w, n in ranked if (n >= least or w == unk) and w not in special]
        kept = words[: max(0, size - len(special))] if size is not None else words
        if unk in words and unk not in kept:
            kept[-1:] = [unk]  # rarer than what it stands for, and needed all the same
        return cls((*special, *kept), **knobs)

    @property
    def name(self) -> str:
        return "words"

    @property
    def unit(self) -> str:
        return "word"

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self.words)

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words)}

    def split(self, text: str | bytes) -> list[str]:
        """Returns the words of a text, `eos` for each end of a line.

        Raises:
          ValueError: the text is no UTF-8, or has `eos` as a word.
        """
        return split_words(text, self.eos, self.lower)

    def encode(self, text: str | bytes) -> Int32[np.ndarray, " t"]:
        """Returns the ids `[t]` of a text.

        Raises:
          ValueError: the text is no UTF-8, or has `eos` as a word, or an unknown word
            where there is no `unk`.
        """
        words, ids = self.split(text), self._ids
        if self.unk is not None:
            unknown = ids[self.unk]
            return np.array([ids.get(word, unknown) for word in words], np.int32)
        try:
            return np.array([ids[word] for word in words], np.int32)
        except KeyError as error:
            raise ValueError(
                f"the word {error.args[0]!r} is not in the vocabulary of {self.size} "
                "words, which has none for unknown words"
            ) from None

    def decode(self, ids: Integer[np.ndarray, " t"]) -> bytes:
        """Returns the words of ids `[t]`, joined by spaces, lines ended, as UTF-8.

        Raises:
          ValueError: an id is no word's.
        """
        end = self._ids[self.eos]
        pieces = []
        for index in _checked(ids, self.size, "word").tolist():
            if index == end:
                pieces.append("\n")
                continue
            if pieces and pieces[-1] != "\n":
                pieces.append(" ")
            pieces.append(self.words[index])
        return "".join(pieces).encode("utf-8")

    def state(self) -> dict[str, Any]:
        """Returns what `from_state` makes it of."""
        knobs = {"eos": self.eos, "unk": self.unk, "lower": self.lower}
        return {"kind": "words", **knobs, "words": list(self.words)}


def split_words(text: str | bytes, eos: str, lower: bool = False) -> list[str]:
    """Returns the words of a text, `eos` for each end of a line.

    Raises:
      ValueError: the text is no UTF-8, or has `eos` as a word.
    """
    text = as_text(text)
    if eos in text and eos in text.split():
        raise ValueError(
            f"the text has the word {eos!r}, which stands for the end of a line here"
        )
    text = text.lower() if lower else text
    return text.replace("\n", f" {eos} ").split()


def frequency_cutoffs(
    counts: Sequence[int], shares: Sequence[float] = (0.8, 0.9, 0.98)
) -> tuple[int, ...]:
    """Returns cutoffs for adaptive softmax (Grave et al. 2017) from frequencies.

    Args:
      counts: occurrences by id, falling.
      shares: parts of the text, rising, that the clusters up to each cutoff cover.

    Returns:
      Cutoffs, rising, each at least 1 and below the number of ids; fewer than `shares`
      where several fall on the same id.

    Raises:
      ValueError: counts that rise, so that ids are not in the order of frequency; or
        shares that are not between 0 and 1.
    """
    counts = np.asarray(counts, np.int64)
    rising = np.flatnonzero(np.diff(counts) > 0)
    if rising.size:
        raise ValueError(
            f"id {rising[0] + 1} is more frequent than id {rising[0]}: ids must be in "
            "the order of frequency"
        )
    if not all(0 < share < 1 for share in shares):
        raise ValueError(f"shares must be between 0 and 1, got {tuple(shares)}")
    covered = np.cumsum(counts) / max(1, counts.sum())
    found = {int(np.searchsorted(covered, share)) + 1 for share in shares}
    return tuple(sorted(cutoff for cutoff in found if cutoff < len(counts)))


def metric(vocabulary: Vocabulary, loss: float) -> dict[str, float]:
    """Returns a mean loss in nats a token under the name that its unit gives it.

    `bits_per_byte` and `bits_per_character`, or `perplexity` (per word or subword).
    """
    if vocabulary.unit in ("byte", "character"):
        return {f"bits_per_{vocabulary.unit}": loss / math.log(2)}
    return {"perplexity": math.exp(loss) if loss < 709 else math.inf}


def as_text(text: str | bytes) -> str:
    """Returns a text as characters.

    Raises:
      ValueError: bytes that are not UTF-8.
    """
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the text is not UTF-8: byte 0x{text[error.start]:02x} at offset "
            f"{error.start} ({error.reason}); vocabulary 'bytes' takes any bytes"
        ) from error


def _checked(ids: Integer[np.ndarray, " t"], size: int, unit: str) -> np.ndarray:
    ids = np.asarray(ids)
    wrong = np.flatnonzero((ids < 0) | (ids >= size))
    if wrong.size:
        first = int(wrong[0])
        raise ValueError(
            f"id {ids[first]} at index {first} is no {unit}: ids go from 0 to "
            f"{size - 1} ({wrong.size} of {ids.size} ids are outside)"
        )
    return ids
