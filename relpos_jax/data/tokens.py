"""From texts to stored tokens: which vocabulary, and which pieces of the text.

A text is a name and its parts, each an iterator of records, so that no text need be in
memory as a whole. `tokenised` gives the folder of `store` that has its tokens, and
makes it where there is none.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from relpos_jax.data import saved, store
from relpos_jax.data.text_files import BLOCK, Record
from relpos_jax.data.vocabulary import (
    TEXT8,
    Bytes,
    Characters,
    Vocabulary,
    Words,
    split_words,
)

VOCABULARIES = (
    "'bytes', 'text8', 'characters', 'words', 'words:PATH', 'saved:PATH', "
    "'sentencepiece:PATH' or 'tokenizers:PATH'"
)
_SPACE = b" \t\n\r\x0b\x0c"


@dataclasses.dataclass(frozen=True)
class Text:
    """A text on its way to tokens.

    Attributes:
      name: short name.
      identity: JSON values that tell it from every other text.
      parts: name to a function that yields its records anew.
      counted: the parts whose words and characters make a vocabulary.
    """

    name: str
    identity: Mapping[str, Any]
    parts: Mapping[str, Callable[[], Iterator[Record]]]
    counted: tuple[str, ...] = ("train",)


def known(spec: str | Vocabulary) -> Vocabulary | None:
    """Returns the vocabulary that a spec names; None if a text has to be read for it.

    Args:
      spec: a vocabulary, or one of `VOCABULARIES`.

    Raises:
      ValueError: an unknown spec, or a file that holds no vocabulary.
      FileNotFoundError: no such file.
      ImportError: its library is not installed.
    """
    if not isinstance(spec, str):
        return spec
    kind, _, path = spec.partition(":")
    if spec in ("characters", "words"):
        return None
    if spec == "bytes":
        return Bytes()
    if spec == "text8":
        return TEXT8
    if kind == "saved" and path:
        return saved.read(Path(path).expanduser())
    if kind == "words" and path:
        return _words_of(Path(path).expanduser())
    if kind in ("sentencepiece", "tokenizers") and path:
        from relpos_jax.data import subwords

        return subwords.Subwords.of(kind, path)
    raise ValueError(f"unknown vocabulary {spec!r}: must be {VOCABULARIES}")


def _words_of(path: Path) -> Words:
    """Reads a list of words, which says itself how it writes the special ones."""
    marks = [("<S>", "<UNK>"), ("<eos>", "<unk>")]
    with open(path, "rb") as file:
        first = {line.split()[0] for line in file if line.strip()}
    for eos, unk in marks:
        if eos.encode() in first and unk.encode() in first:
            return saved.read_words(path, eos=eos, unk=unk)
    raise ValueError(
        f"{path} is no list of words: expected one a line, among them the end of a "
        f"line and the unknown word, {' or '.join(' and '.join(m) for m in marks)}"
    )


def of_run(workdir: str | Path, size: int, spec: str | None = None) -> Vocabulary:
    """Returns the vocabulary of a run, to read text for it or write its tokens as text.

    Args:
      workdir: the run's folder.
      size: the model's number of ids.
      spec: one of `VOCABULARIES`, instead of the run's own; imported runs have none.

    Raises:
      ValueError: there is none, or one of another size; see also `known`.
    """
    found = known(spec) if spec else saved.of_run(workdir, size)
    if found is None:
        raise ValueError(
            f"{workdir} has no {saved.FILE}, so its {size} ids are no text: say "
            "--vocabulary=saved:PATH, words:PATH or the like"
            + (f" ({spec!r} needs a text to count)" if spec else "")
        )
    if found.size != size:
        raise ValueError(
            f"the model has {size} ids, and the vocabulary is {saved.describe(found)}"
        )
    return found


def vocabulary_of(text: Text, spec: str | Vocabulary, root: Path) -> Vocabulary:
    """Returns the vocabulary that a spec names; one that is counted is kept in `root`.

    Raises:
      ValueError: see `known`; or the text is no UTF-8.
    """
    found = known(spec)
    if found is not None:
        return found
    key = {"text": dict(text.identity), "spec": spec, "counted": list(text.counted)}
    path = store.folder_for(root, f"{text.name}-{spec}", key).with_suffix(".json")
    if not path.exists():
        root.mkdir(parents=True, exist_ok=True)
        saved.save(_counted(spec, text), path)
    return saved.read(path)


def _counted(spec: str, text: Text) -> Vocabulary:
    if spec == "characters":
        parts = (record.text for part in text.parts.values() for record in part())
        return Characters.of(parts)
    counts: collections.Counter[str] = collections.Counter()
    for part in text.counted:
        for record in text.parts[part]() if part in text.parts else ():
            counts.update(split_words(record.text, Words.eos))
    return Words.of(counts)


def tokenised(
    text: Text, vocabulary: Vocabulary, root: Path
) -> tuple[Path, dict[str, store.Part]]:
    """Returns a text's parts as tokens, and the folder below `root` that has them.

    Raises:
      ValueError: the vocabulary can't encode the text, or the stored files are damaged.
      OSError: the folder can't be written.
    """
    key = {
        "text": dict(text.identity),
        "parts": sorted(text.parts),
        "vocabulary": saved.fingerprint(vocabulary),
    }
    folder = store.folder_for(root, text.name, key)
    if not (folder / "info.json").exists():
        store.write(folder, text.parts, vocabulary, key)
    return folder, store.read(folder, vocabulary)


def border(data: np.ndarray, index: int, unit: str) -> int:
    """Moves a cut back until it doesn't cut a character, or a word.

    Args:
      data: the text's bytes.
      index: the wanted cut.
      unit: of the vocabulary; bytes may be cut anywhere.
    """
    if unit == "byte":
        return index
    if unit == "character":
        while 0 < index < data.size and 0x80 <= data[index] < 0xC0:
            index -= 1
        return index
    while 0 < index < data.size and data[index - 1] not in _SPACE:
        index -= 1
    return index


def pieces(data: np.ndarray, unit: str) -> Iterator[Record]:
    """Yields bytes as records of about `BLOCK`, cut at line ends where there are."""
    start = 0
    while start < data.size:
        stop = min(start + BLOCK, data.size)
        if stop < data.size and unit != "byte":
            block = data[start:stop].tobytes()
            line = block.rfind(b"\n") + 1
            found = start + line if line else border(data, stop, unit)
            if found <= start:  # a word longer than a block
                space = np.isin(data[stop:], list(_SPACE))
                found = stop + int(space.argmax()) + 1 if space.any() else data.size
            stop = found
        yield Record(data[start:stop].tobytes(), begins=not start)
        store.release(data)
        start = stop


def before(records: Iterator[Record], index: int, unit: str) -> Iterator[Record]:
    """Yields the text up to a byte; the last record is cut as `border` says."""
    left = index
    for record in records:
        if len(record.text) > left:
            text = record.text[: _cut(record.text, left, unit)]
            if text:
                yield record._replace(text=text)
            return
        yield record
        left -= len(record.text)


def after(records: Iterator[Record], index: int, unit: str) -> Iterator[Record]:
    """Yields the text that `before` leaves; its first record begins a document."""
    left, first = index, True
    for record in records:
        cut = 0
        if first:
            if len(record.text) <= left:
                left -= len(record.text)
                continue
            cut = _cut(record.text, left, unit)
        yield Record(record.text[cut:], record.begins or first)
        first = False


def _cut(text: bytes, index: int, unit: str) -> int:
    return border(np.frombuffer(text, np.uint8), index, unit)


def size(records: Iterator[Record], enough: int | None = None) -> int:
    """Returns the bytes of records; counts no further than `enough`."""
    found = 0
    for record in records:
        found += len(record.text)
        if enough is not None and found >= enough:
            break
    return found
