"""Tokens on disk, so that a corpus need not fit into memory.

A folder holds a corpus as one vocabulary cuts it up: for each part `PART.tokens` (ids,
nothing else) and `PART.documents` (where documents begin, int64), `info.json`, which
says how to read them (number and type of the ids, their SHA-256, the bytes of text, the
vocabulary's SHA-256), and `vocabulary.json`, for whoever reads them without this code.
Ids take as few bytes as the vocabulary's size needs.
"""

import dataclasses
import hashlib
import json
import mmap
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer

from relpos_jax.data import saved
from relpos_jax.data.text_files import Record
from relpos_jax.data.vocabulary import Vocabulary

FORMAT = 1
_BLOCK = 1 << 24


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A part of a corpus as tokens.

    Attributes:
      tokens: `[n]`, ids, mapped and not read.
      documents: `[d]`, the tokens with which documents begin, rising.
      bytes: of the text.
      sha256: of the ids as they are stored.
    """

    tokens: Integer[np.ndarray, " n"]
    documents: Int64[np.ndarray, " d"]
    bytes: int
    sha256: str


def dtype_for(size: int) -> np.dtype:
    """Returns the smallest unsigned type for ids below `size`, little-endian."""
    return np.dtype(np.min_scalar_type(max(size - 1, 0))).newbyteorder("<")


def folder_for(root: Path, name: str, key: Mapping[str, Any]) -> Path:
    """Returns the folder of what `key` describes, below `root`."""
    text = json.dumps(key, sort_keys=True).encode("utf-8")
    short = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    return root / f"{short}-{hashlib.sha256(text).hexdigest()[:12]}"


def write(
    folder: Path,
    parts: Mapping[str, Callable[[], Iterator[Record]]],
    vocabulary: Vocabulary,
    key: Mapping[str, Any],
) -> None:
    """Encodes parts and writes them, whole or not at all.

    Several processes may write the same folder at once: the first one's stays.

    Args:
      folder: is made.
      parts: name to its records.
      vocabulary: encodes them, record by record.
      key: what the folder holds, for whoever reads `info.json`.

    Raises:
      ValueError: a text that the vocabulary can't encode; names the part.
    """
    draft = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    draft.mkdir(parents=True)
    try:
        info = {
            "format": FORMAT,
            "key": dict(key),
            "vocabulary": saved.fingerprint(vocabulary),
            "parts": {
                name: _write_part(draft, name, records(), vocabulary)
                for name, records in parts.items()
            },
        }
        saved.save(vocabulary, draft / "vocabulary.json")
        (draft / "info.json").write_text(json.dumps(info, indent=2) + "\n")
        try:
            os.rename(draft, folder)
        except OSError:
            if not (folder / "info.json").exists():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_part(folder: Path, name: str, records, vocabulary: Vocabulary) -> dict:
    dtype = dtype_for(vocabulary.size)
    digest, count, size, starts = hashlib.sha256(), 0, 0, []
    text = b""
    with open(folder / f"{name}.tokens", "wb") as file:

        def add(text: bytes) -> None:
            nonlocal count, size
            try:
                ids = vocabulary.encode(text)
            except ValueError as error:
                raise ValueError(f"part {name!r}, after {size:,} bytes: {error}") from (
                    error
                )
            data = np.ascontiguousarray(ids.astype(dtype))
            file.write(data)
            digest.update(data)
            count += ids.size
            size += len(text)

        for text, begins in records:
            if begins:
                starts.append(count)
            add(text)
        if vocabulary.unit == "word" and text and not text.endswith(b"\n"):
            add(b"\n")  # the last line ends too
            size -= 1
    np.array(starts, "<i8").tofile(folder / f"{name}.documents")
    return {
        "tokens": count,
        "dtype": dtype.str,
        "sha256": digest.hexdigest(),
        "bytes": size,
        "documents": len(starts),
    }


def read(folder: Path, vocabulary: Vocabulary) -> dict[str, Part]:
    """Returns the parts of a folder.

    Raises:
      ValueError: a file is absent, cut off or of another vocabulary; names it.
    """
    try:
        info = json.loads((folder / "info.json").read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{folder} holds no tokens: it has no info.json") from error
    if info.get("format") != FORMAT:
        raise ValueError(
            f"{folder / 'info.json'} has format {info.get('format')}, this version "
            f"reads {FORMAT}: delete the folder, and it is written anew"
        )
    if info["vocabulary"] != saved.fingerprint(vocabulary):
        raise ValueError(
            f"{folder} holds tokens of another vocabulary than "
            f"{saved.describe(vocabulary)}"
        )
    parts = {}
    for name, facts in info["parts"].items():
        dtype = np.dtype(facts["dtype"])
        if dtype != dtype_for(vocabulary.size):
            raise ValueError(
                f"{folder / name}.tokens has ids of type {dtype}, its vocabulary of "
                f"{vocabulary.size} needs {dtype_for(vocabulary.size)}"
            )
        tokens = _map(folder / f"{name}.tokens", dtype, facts["tokens"])
        starts = _map(folder / f"{name}.documents", np.dtype("<i8"), facts["documents"])
        parts[name] = Part(
            tokens, np.asarray(starts, np.int64), facts["bytes"], facts["sha256"]
        )
    return parts


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """Maps a file of `count` numbers, or says what is wrong with it."""
    size = path.stat().st_size if path.exists() else -1
    if size != count * dtype.itemsize:
        found = "is absent" if size < 0 else f"has {size} bytes"
        raise ValueError(
            f"{path} {found}: expected the {count * dtype.itemsize} of {count} numbers "
            f"of type {dtype}; delete its folder, and it is written anew"
        )
    if not count:  # which cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r")


def sha256(*arrays: Integer[np.ndarray, " _"]) -> str:
    """Returns the SHA-256 of arrays' bytes, one after the other, in hexadecimal.

    Mapped arrays are read block by block, and let go again.
    """
    digest = hashlib.sha256()
    for array in arrays:
        step = max(1, _BLOCK // array.itemsize)
        for start in range(0, array.size, step):
            digest.update(np.ascontiguousarray(array[start : start + step]))
            release(array)
    return digest.hexdigest()


def release(array: np.ndarray) -> None:
    """Tells the system that the pages read of a mapped array aren't needed now."""
    mapped = getattr(array, "_mmap", None)
    if mapped is not None and sys.platform != "win32":
        mapped.madvise(mmap.MADV_DONTNEED)
