"""Vocabularies as files: a run keeps its own beside its config."""

import hashlib
import json
import os
import pathlib
import uuid
from collections.abc import Mapping
from typing import Any

from relpos_jax.data.vocabulary import (
    Bytes,
    Characters,
    Vocabulary,
    Words,
    as_text,
)

FILE = "vocabulary.json"  # in a run's folder


def from_state(state: Mapping[str, Any]) -> Vocabulary:
    """Returns the vocabulary that `state` describes.

    Raises:
      ValueError: it describes none.
    """
    fields = dict(state)
    kind = fields.pop("kind", None)
    try:
        if kind == "bytes":
            return Bytes(**fields)
        if kind == "characters":
            return Characters(**fields)
        if kind == "words":
            return Words(tuple(fields.pop("words")), **fields)
        if kind in ("sentencepiece", "tokenizers"):
            from relpos_jax.data import subwords

            return subwords.from_state({"kind": kind, **fields})
    except (TypeError, KeyError) as error:
        raise ValueError(f"not a vocabulary of {kind}: {error}") from error
    raise ValueError(f"unknown kind of vocabulary {kind!r}")


def fingerprint(vocabulary: Vocabulary) -> str:
    """Returns the SHA-256 of a vocabulary, in hexadecimal."""
    return hashlib.sha256(_json(vocabulary).encode("utf-8")).hexdigest()


def save(vocabulary: Vocabulary, path: str | os.PathLike) -> None:
    """Writes a vocabulary as JSON, whole or not at all."""
    path = pathlib.Path(path)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    draft.write_text(_json(vocabulary) + "\n", encoding="utf-8")
    os.replace(draft, path)


def read(path: str | os.PathLike) -> Vocabulary:
    """Returns the vocabulary that `save` wrote.

    Raises:
      FileNotFoundError: no such file.
      ValueError: it holds no vocabulary.
    """
    path = pathlib.Path(path)
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(state, dict):
            raise ValueError(f"it holds {type(state).__name__}, not an object")
        return from_state(state)
    except ValueError as error:
        raise ValueError(f"{path} holds no vocabulary: {error}") from error


def read_words(path: str | os.PathLike, *, eos: str, unk: str | None) -> Words:
    """Returns the vocabulary of a text file with a word at the start of each line.

    One Billion Word's released vocabulary is such a file (`1b_word_vocab.txt`), with
    `<S>` and `<UNK>`.

    Raises:
      FileNotFoundError: no such file.
      ValueError: an empty line, a word twice, or `eos` or `unk` missing; says where.
    """
    words = []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            found = as_text(line).split()
            if not found:
                raise ValueError(f"{path}, line {number}: no word")
            words.append(found[0])
    try:
        return Words(tuple(words), eos=eos, unk=unk)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def check_size(vocabulary: Vocabulary, size: int) -> None:
    """Raises if a model isn't made for a vocabulary.

    Args:
      vocabulary: of the data.
      size: the model's number of ids.

    Raises:
      ValueError: the two sizes differ.
    """
    if vocabulary.size != size:
        raise ValueError(
            f"the data's vocabulary, {describe(vocabulary)}, does not fit the model, "
            f"which has {size} ids: set data.vocabulary_size={vocabulary.size} (and "
            "model.adaptive.cutoffs below it), or take the data that the config is for"
        )


def claim(
    workdir: str | os.PathLike, vocabulary: Vocabulary, *, resuming: bool
) -> None:
    """Writes a run's vocabulary, or raises if the run has another.

    Args:
      workdir: the run's folder, existing.
      vocabulary: of its data.
      resuming: there are checkpoints already.

    Raises:
      ValueError: the run was started with another vocabulary.
    """
    path = pathlib.Path(workdir) / FILE
    if resuming and path.exists():
        there = read(path)
        if fingerprint(there) != fingerprint(vocabulary):
            raise ValueError(
                f"{workdir} holds a run whose vocabulary is {describe(there)}, and the "
                f"data's is {describe(vocabulary)}: take the data it was started with, "
                "or another workdir"
            )
        return
    save(vocabulary, path)


def of_run(workdir: str | os.PathLike, size: int) -> Vocabulary | None:
    """Returns the vocabulary of a run; None if it isn't known.

    Args:
      workdir: the run's folder.
      size: the model's number of ids; 256 without a file means bytes.

    Raises:
      ValueError: the file holds no vocabulary, or one of another size.
    """
    path = pathlib.Path(workdir) / FILE
    if not path.exists():
        return Bytes() if size == Bytes().size else None
    vocabulary = read(path)
    if vocabulary.size != size:
        raise ValueError(
            f"{path} is {describe(vocabulary)}, and the model beside it has {size} "
            "ids: it is another model's"
        )
    return vocabulary


def describe(vocabulary: Vocabulary) -> str:
    """Says what a vocabulary is, for messages."""
    short = fingerprint(vocabulary)[:12]
    return f"{vocabulary.name} with {vocabulary.size} ids (sha256 {short})"


def _json(vocabulary: Vocabulary) -> str:
    return json.dumps(vocabulary.state(), ensure_ascii=False, sort_keys=True)
