"""Corpora: one part to train on, one held out, and what identifies both.

`load` knows three kinds of source: `stdlib`, text that every Python carries;
`file:PATH`, any file; `tfds:NAME`, a set of TensorFlow Datasets or of `text_sets`. A
vocabulary makes tokens of the text: bytes, unless another is asked for.
"""

import dataclasses
import functools
import math
import platform
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int64, Integer

from relpos_jax.data import store, text_sets, tfds_text, tokens
from relpos_jax.data.text_files import Record
from relpos_jax.data.vocabulary import Bytes, Vocabulary

SOURCES = "'stdlib', 'file:PATH', 'tfds:NAME' or 'tfds:NAME/CONFIG'"

# Installed packages, and what some distributions of Python leave out.
_LEFT_OUT = {
    "__pycache__",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
}
# How and where this Python was built or set up: different bytes on each machine.
_OF_THE_MACHINE = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """A text as tokens.

    Attributes:
      name: short name, without folders.
      train: `[n]`, the tokens to train on; may be mapped from a file.
      held_out: `[m]`, the tokens to evaluate on.
      description: what the text is, and which version of it.
      vocabulary: what the tokens are.
      train_documents: `[d]`, the tokens of `train` with which documents begin.
      text_bytes: bytes of the text of `train` and of `held_out`; None where they are
        the tokens.
      folder: where the tokens are stored; None where they are a file's bytes.
    """

    name: str
    train: Integer[np.ndarray, " n"]
    held_out: Integer[np.ndarray, " m"]
    description: str
    vocabulary: Vocabulary = Bytes()
    train_documents: Int64[np.ndarray, " d"] | None = None
    text_bytes: tuple[int, int] | None = None
    folder: Path | None = None

    @property
    def size(self) -> int:
        """Number of tokens of both parts together."""
        return self.train.size + self.held_out.size

    @property
    def held_out_bytes(self) -> int:
        """Number of bytes of the held-out text."""
        return self.held_out.size if self.text_bytes is None else self.text_bytes[1]

    @functools.cached_property
    def sha256(self) -> str:
        """SHA-256 of all tokens, `train` followed by `held_out`, in hexadecimal."""
        return store.sha256(self.train, self.held_out)


def load(
    source: str,
    *,
    held_out_fraction: float = 0.1,
    max_bytes: int | None = None,
    data_dir: str | Path | None = None,
    vocabulary: str | Vocabulary = "bytes",
    held_out_split: str | None = None,
) -> Corpus:
    """Loads a corpus; the same arguments give the same tokens.

    `stdlib` and `file:PATH` are split by position: the last `held_out_fraction` of the
    bytes is held out, from the beginning of a character or word on where the vocabulary
    has those. A set of TFDS is split as its authors split it, and by position where it
    has one split only.

    Bytes of files are mapped; other tokens are made once, stored under `data_dir`, and
    mapped: see `relpos_jax.data.store`.

    Args:
      source: `stdlib`, the sources and the reference text of this Python's standard
        library; `file:PATH`, any file; `tfds:NAME` or `tfds:NAME/CONFIG`, the text of
        a set of TensorFlow Datasets, stored as array_record, or of `text_sets.SETS`.
      held_out_fraction: fraction of the bytes to hold out, in [0, 1); at 0 nothing is.
      max_bytes: at most as many bytes are kept, the first of each part as it is without
        this: a share of `held_out_fraction` of them from the held-out part, the rest
        from the train part.
      data_dir: where TFDS keeps its sets; None takes its own default.
      vocabulary: one of `tokens.VOCABULARIES`, or a vocabulary.
      held_out_split: the split of a set of TFDS to hold out; None takes the first of
        `tfds_text.HELD_OUT_SPLITS`.

    Raises:
      ValueError: an unknown source or vocabulary, an unusable argument, an empty text
        or part, or a text that the vocabulary can't encode.
      FileNotFoundError, IsADirectoryError: what `file:PATH` names is no file.
      RuntimeError: a set of TFDS is not prepared and cannot be prepared here.
    """
    if not 0 <= held_out_fraction < 1:
        raise ValueError(
            f"held_out_fraction must be in [0, 1), got {held_out_fraction}"
        )
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1 or None, got {max_bytes}")
    kind, _, rest = source.partition(":")
    if held_out_split is not None and kind != "tfds":
        raise ValueError(
            f"{source!r} has no split {held_out_split!r}: only sets of TFDS have splits"
        )
    limits = (held_out_fraction, max_bytes)
    if source == "stdlib":
        given = (source, *_standard_library())
        corpus = _of_bytes(*given, *limits, data_dir, vocabulary)
    elif kind == "file" and rest:
        path = Path(rest).expanduser()
        corpus = _of_bytes(path.name, *_file(path), *limits, data_dir, vocabulary)
    elif kind == "tfds" and rest:
        corpus = _of_set(rest, *limits, data_dir, vocabulary, held_out_split)
    else:
        hint = f"; for a file say 'file:{source}'" if Path(source).is_file() else ""
        raise ValueError(f"unknown source {source!r}: must be {SOURCES}{hint}")

    if not corpus.train.size or (held_out_fraction and not corpus.held_out.size):
        needed = math.ceil(1 / held_out_fraction) if held_out_fraction else 1
        unit = corpus.vocabulary.unit
        raise ValueError(
            f"{source!r} leaves {corpus.train.size} {unit}s to train on and "
            f"{corpus.held_out.size} held out: at held_out_fraction="
            f"{held_out_fraction} and max_bytes={max_bytes} at least {needed} bytes "
            "are needed"
        )
    return corpus


def _of_bytes(
    name, data, description, held_out_fraction, max_bytes, data_dir, vocabulary
) -> Corpus:
    """Splits bytes by position, and makes tokens of them."""
    unit = _unit(vocabulary)
    border = data.size - int(data.size * held_out_fraction)
    border = tokens.border(data, border, unit)
    parts = [data[:border], data[border:]]
    if max_bytes is not None and max_bytes < data.size:
        share = int(max_bytes * held_out_fraction)
        sizes = (max_bytes - share, share)
        parts = [
            part[: tokens.border(part, min(size, part.size), unit)]
            for part, size in zip(parts, sizes, strict=True)
        ]
        description += (
            f"; the first {parts[0].size} and {parts[1].size} bytes of the parts"
        )
    if unit == "byte" or not parts[0].size:
        return Corpus(name, *parts, description)
    names = ("train", "held_out") if parts[1].size else ("train",)
    sizes = [part.size for part in parts]
    text = tokens.Text(
        name,
        {"bytes": store.sha256(*parts), "sizes": sizes},
        {
            part: functools.partial(tokens.pieces, bytes_, unit)
            for part, bytes_ in zip(names, parts, strict=False)
        },
    )
    return _tokenised(text, vocabulary, data_dir, "held_out", description)


def _of_set(
    rest, held_out_fraction, max_bytes, data_dir, vocabulary, held_out_split
) -> Corpus:
    """Makes tokens of a set of TFDS, split as it is or by position."""
    opened = tfds_text.open_set(rest, data_dir=data_dir)
    held_out = tfds_text.held_out_split(opened, rest, held_out_split)
    own = text_sets.SETS.get(rest)
    parts: dict[str, Callable[[], Iterator[Record]]]
    parts = {split: functools.partial(opened.records, split) for split in opened.splits}
    description = (
        f"{opened.description} of splits {', '.join(filter(None, ['train', held_out]))}"
    )
    identity = dict(opened.identity)
    unit = _unit(vocabulary)

    def cut(keep, split, index):
        """Returns what makes the part of a split before or after a byte."""
        whole = parts[split]
        return lambda: keep(whole(), index, unit)

    if held_out is None:
        total = tokens.size(parts["train"]())
        index = total - int(total * held_out_fraction)
        after, before = (
            cut(keep, "train", index) for keep in (tokens.after, tokens.before)
        )
        held_out, parts = "held_out", {"train": before, "held_out": after}
        identity["border"] = index
    if max_bytes is not None:
        share = int(max_bytes * held_out_fraction)
        wanted = {"train": max_bytes - share, held_out: share}
        if max_bytes < sum(tokens.size(parts[name](), max_bytes) for name in wanted):
            parts = {
                split: cut(tokens.before, split, size) for split, size in wanted.items()
            }
            identity["max_bytes"] = wanted
            description += f"; of them the first {max_bytes} bytes"
    text = tokens.Text(
        f"tfds:{rest}", identity, parts, own.counted if own else ("train",)
    )
    return _tokenised(text, vocabulary, data_dir, held_out, description)


def _tokenised(text, vocabulary, data_dir, held_out: str, description: str) -> Corpus:
    root = _tokens_folder(data_dir)
    vocabulary = tokens.vocabulary_of(text, vocabulary, root)
    folder, parts = tokens.tokenised(text, vocabulary, root)
    empty = store.Part(np.zeros(0, np.uint8), np.zeros(0, np.int64), 0, "")
    train, rest = parts["train"], parts.get(held_out, empty)
    return Corpus(
        text.name,
        train.tokens,
        rest.tokens,
        description,
        vocabulary,
        train.documents,
        (train.bytes, rest.bytes),
        folder,
    )


def _unit(vocabulary: str | Vocabulary) -> str:
    """The unit of a vocabulary, known or not."""
    known = tokens.known(vocabulary)
    if known is not None:
        return known.unit
    return "word" if vocabulary == "words" else "character"


def _tokens_folder(data_dir: str | Path | None) -> Path:
    if data_dir is None:
        import tensorflow_datasets as tfds

        data_dir = tfds.core.constants.DATA_DIR
    return Path(data_dir).expanduser() / "relpos_jax_tokens"


def _file(path: Path) -> tuple[np.ndarray, str]:
    if not path.exists():
        raise FileNotFoundError(
            f"no file {path} (from {Path.cwd()}): 'file:PATH' needs an existing file"
        )
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: 'file:PATH' needs one file")
    if not path.is_file():
        raise ValueError(f"{path} is no regular file: 'file:PATH' needs one")
    size = path.stat().st_size
    if not size:  # which memmap would refuse with a message about mmap
        raise ValueError(f"{path} is empty: found 0 bytes, and at least 1 is needed")
    # Mapped and not read, so that a corpus may be larger than memory.
    return np.memmap(path, np.uint8, "r"), f"{path.name}, {size} bytes"


def _standard_library() -> tuple[np.ndarray, str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    topics = _topics()
    sources = _sources(root, with_topics=not topics)
    if not sources:
        raise ValueError(
            f"no sources of the standard library under {root}: this Python carries "
            f"none as text; use 'file:PATH'"
        )
    text = b"".join([path.read_bytes() for path in sources] + topics)
    return np.frombuffer(text, np.uint8), (
        f"Python {platform.python_version()} standard library: {len(sources)} source "
        f"files and {len(topics)} topics of the reference text"
    )


def _sources(root: Path, *, with_topics: bool) -> list[Path]:
    """Source files in the order of their paths, the same on every system."""
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if _LEFT_OUT.intersection(parts) or parts[0].startswith(_OF_THE_MACHINE):
            continue
        # As source it would be in the corpus twice, and the second time held out.
        if parts == ("pydoc_data", "topics.py") and not with_topics:
            continue
        if path.is_file():
            found.append((parts, path))
    return [path for _, path in sorted(found)]


def _topics() -> list[bytes]:
    """The language reference as `help` shows it, where this Python has it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    return [(topics[name].rstrip() + "\n\n").encode() for name in sorted(topics)]
