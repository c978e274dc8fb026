"""Corpora as bytes: one part to train on, one held out, and what identifies both.

`load` knows three kinds of source: `stdlib`, text that every Python carries;
`file:PATH`, any file; `tfds:NAME`, a set of TensorFlow Datasets.
"""

import dataclasses
import functools
import hashlib
import math
import platform
import sysconfig
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from relpos_jax.data import tfds_text

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
    """A text as bytes.

    Attributes:
      name: short name, without folders.
      train: `[n]`, the bytes to train on.
      held_out: `[m]`, the bytes to evaluate on.
      description: what the text is, and which version of it.
    """

    name: str
    train: UInt8[np.ndarray, " n"]
    held_out: UInt8[np.ndarray, " m"]
    description: str

    @property
    def size(self) -> int:
        """Number of bytes of both parts together."""
        return self.train.size + self.held_out.size

    @functools.cached_property
    def sha256(self) -> str:
        """SHA-256 of all bytes, `train` followed by `held_out`, in hexadecimal."""
        digest = hashlib.sha256()
        digest.update(np.ascontiguousarray(self.train))
        digest.update(np.ascontiguousarray(self.held_out))
        return digest.hexdigest()


def load(
    source: str,
    *,
    held_out_fraction: float = 0.1,
    max_bytes: int | None = None,
    data_dir: str | Path | None = None,
) -> Corpus:
    """Loads a corpus; the same arguments give the same bytes.

    `stdlib` and `file:PATH` are split by position: the last `held_out_fraction` of the
    bytes is held out. A set of TFDS is split as its authors split it (see
    `tfds_text.load`), and by position where it has one split only.

    Args:
      source: `stdlib`, the sources and the reference text of this Python's standard
        library; `file:PATH`, the bytes of any file; `tfds:NAME` or `tfds:NAME/CONFIG`,
        the text of a set of TensorFlow Datasets, stored as array_record.
      held_out_fraction: fraction of the bytes to hold out, in [0, 1); at 0 nothing is.
      max_bytes: at most as many bytes are kept, the first of each part as it is without
        this: a share of `held_out_fraction` of them from the held-out part, the rest
        from the train part.
      data_dir: where TFDS keeps its sets; None takes its own default.

    Raises:
      ValueError: an unknown source, an unusable argument, or an empty text or part.
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
    if source == "stdlib":
        name, (data, description) = source, _standard_library()
        parts = _split(data, held_out_fraction)
    elif kind == "file" and rest:
        data, description = _file(Path(rest).expanduser())
        name = Path(rest).name
        parts = _split(data, held_out_fraction)
    elif kind == "tfds" and rest:
        name = source
        texts, description = tfds_text.load(
            rest, data_dir=data_dir, max_bytes=max_bytes
        )
        parts = [np.frombuffer(text, np.uint8) for text in texts]
        if len(parts) == 1:
            parts = _split(parts[0], held_out_fraction)
    else:
        hint = f"; for a file say 'file:{source}'" if Path(source).is_file() else ""
        raise ValueError(f"unknown source {source!r}: must be {SOURCES}{hint}")

    train, held_out = parts
    if max_bytes is not None and max_bytes < train.size + held_out.size:
        share = int(max_bytes * held_out_fraction)
        train, held_out = train[: max_bytes - share], held_out[:share]
        description += (
            f"; the first {train.size} and {held_out.size} bytes of the parts"
        )
    if not train.size or (held_out_fraction and not held_out.size):
        needed = math.ceil(1 / held_out_fraction) if held_out_fraction else 1
        raise ValueError(
            f"{source!r} leaves {train.size} bytes to train on and {held_out.size} "
            f"held out: at held_out_fraction={held_out_fraction} and max_bytes="
            f"{max_bytes} at least {needed} bytes are needed"
        )
    return Corpus(name, train, held_out, description)


def _split(data: np.ndarray, held_out_fraction: float) -> list[np.ndarray]:
    """Splits bytes by position; the last fraction is the second part."""
    border = data.size - int(data.size * held_out_fraction)
    return [data[:border], data[border:]]


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
