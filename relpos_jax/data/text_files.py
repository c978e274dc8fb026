"""Files of the sets of `text_sets`: found, checked, and read as records.

A file that is not what it should be is refused with what was expected and what was
found: absent, empty, an archive, a web page, another encoding, other line ends, too
few or too many tokens.
"""

import codecs
import collections
import hashlib
import os
import re
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from relpos_jax.data.text_sets import TextSet

BLOCK = 1 << 20  # bytes of a record where the set has no documents of its own

_KINDS = {
    b"PK\x03\x04": "a zip archive: unpack it",
    b"\x1f\x8b": "a gzip archive: unpack it",
    b"BZh": "a bzip2 archive: unpack it",
    b"\xfd7zXZ": "an xz archive: unpack it",
    b"PAR1": "a parquet file, not text",
    b"version https://git-lfs": "a pointer of Git LFS, not the file: git lfs pull",
    codecs.BOM_UTF8: "text with a byte order mark in front: save it as UTF-8 without",
    codecs.BOM_UTF16_LE: "text in UTF-16: save it as UTF-8",
    codecs.BOM_UTF16_BE: "text in UTF-16: save it as UTF-8",
}
_WEB_PAGE = re.compile(rb"\s*<(!doctype html|html|head|body)\b", re.IGNORECASE)
_HEADING = re.compile(rb" = (?!= ).*[^=] = ?\n")

# What unpacking raises for a file that is no archive, or not all of one.
_BROKEN = (shutil.ReadError, tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error)


class UnusableFile(ValueError):
    """A file is not the one that a set is made of."""


class Facts(NamedTuple):
    """What was found in a split.

    Attributes:
      bytes: of its text.
      count: units, as the set counts them.
      documents: documents that begin in it.
      sha256: of its text.
    """

    bytes: int
    count: int
    documents: int
    sha256: str


class Record(NamedTuple):
    """A piece of a split's text, and whether a document begins with it."""

    text: bytes
    begins: bool


def unpack(archive: str | Path, url: str) -> Path:
    """Unpacks a download beside itself, once; returns the folder.

    TFDS's own way needs TensorFlow.

    Args:
      archive: the downloaded file.
      url: where it is from; its end says what kind of archive it should be.

    Raises:
      UnusableFile: it is no such archive.
    """
    archive = Path(archive)
    folder = archive.with_name(f"{archive.name}.unpacked")
    if folder.is_dir():
        return folder
    kind = "zip" if url.endswith(".zip") else "gztar"
    # Python before 3.11.4 has no filters of what an archive may do.
    careful = kind == "gztar" and hasattr(tarfile, "data_filter")
    options = {"filter": "data"} if careful else {}
    with tempfile.TemporaryDirectory(dir=archive.parent) as draft:
        try:
            shutil.unpack_archive(archive, f"{draft}/all", kind, **options)
        except _BROKEN as error:
            with open(archive, "rb") as file:
                head = file.read(60)
            archive.unlink()  # or it would be taken for the download the next time
            raise UnusableFile(
                f"{url} gave no whole archive of kind {kind}, but {head!r}... ({error})"
            ) from error
        os.rename(f"{draft}/all", folder)
    return folder


def find(folder: str | Path, found: TextSet) -> dict[str, Path]:
    """Returns the files of a set in a folder or below it, by split, checked by sight.

    Raises:
      UnusableFile: the folder or a file is absent, or a file is evidently none of the
        set's; says which were looked for and what is there.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UnusableFile(f"{folder} is no folder: {found.name} needs one with files")
    paths = {}
    for split, names in found.files.items():
        path = next((p for p in map(folder.joinpath, names) if p.is_file()), None)
        for name in names[:1] if path is None else ():
            path = next(
                iter(sorted(p for p in folder.rglob(name) if p.is_file())), None
            )
        if path is None:
            there = sorted(p.name for p in folder.iterdir())[:12]
            raise UnusableFile(
                f"{found.name} needs the file {' or '.join(names)} for its split "
                f"{split!r} in {folder}, which has {', '.join(there) or 'no files'}"
            )
        _look(path, found)
        paths[split] = path
    return paths


def _look(path: Path, found: TextSet) -> None:
    """Refuses what the first bytes show to be something else."""
    size = path.stat().st_size
    if not size:
        raise UnusableFile(f"{path} is empty: expected the text of {found.name}")
    with open(path, "rb") as file:
        head = file.read(4096)
    for start, what in _KINDS.items():
        if head.startswith(start):
            raise UnusableFile(f"{path} is {what}; expected plain text in UTF-8")
    if _WEB_PAGE.match(head):
        raise UnusableFile(
            f"{path} is a web page, probably of an error, and not {found.name}: it "
            f"begins with {head[:60]!r}"
        )
    if b"\0" in head:
        raise UnusableFile(
            f"{path} has zero bytes, as UTF-16 and binary files have: expected plain "
            "text in UTF-8"
        )
    whole = sum(found.counts.values())
    if "whole" in found.files and size != whole:
        reason = "; its line ends are CRLF: expected LF" if b"\r\n" in head else ""
        raise UnusableFile(
            f"{path} has {size:,} bytes: expected the {whole:,} of {found.name}{reason}"
        )


def records(path: Path, found: TextSet, split: str) -> Iterator[Record]:
    """Yields a split's text, in order and whole.

    Raises:
      UnusableFile: not UTF-8, or CRLF, or a byte that the set doesn't have; says where.
    """
    if "whole" in found.files:
        yield from _cut(path, found, split)
    elif found.articles:
        yield from _articles(path)
    else:
        spaced = found.unit == "spaced character"
        for number, text in enumerate(_blocks(path)):
            yield Record(_unspaced(text) if spaced else text, begins=not number)


def count(text: bytes, unit: str) -> int:
    """Returns the units of a text of whole lines."""
    if unit == "byte":
        return len(text)
    if unit == "word":
        return len(text.decode("utf-8").split()) + text.count(b"\n")
    return len(text.decode("utf-8"))


class Checker:
    """Adds up a split's records and compares the sum with what was published."""

    def __init__(self, found: TextSet, split: str):
        self._set, self._split = found, split
        self._tally = collections.Counter()
        self._digest = hashlib.sha256()

    def add(self, record: Record) -> None:
        self._digest.update(record.text)
        self._tally["bytes"] += len(record.text)
        self._tally["count"] += count(record.text, self._set.unit)
        self._tally["documents"] += record.begins

    @property
    def facts(self) -> Facts:
        """What was found so far."""
        names = ("bytes", "count", "documents")
        tally = (self._tally[name] for name in names)
        return Facts(*tally, self._digest.hexdigest())

    def problem(self) -> str | None:
        """Says how the count differs from the published one; None if it doesn't."""
        found, split = self._set, self._split
        seen, wanted = self._tally["count"], found.expected(split)
        if (seen // 1000 if found.thousands else seen) == wanted:
            return None
        unit = "character" if found.unit == "spaced character" else found.unit
        units = f"{unit}s" if unit == "byte" else f"{unit}s and ends of lines"
        thousand = " thousand" if found.thousands else ""
        less = "fewer" if seen < wanted * (1000 if found.thousands else 1) else "more"
        return (
            f"the split {split!r} of {found.name} has {seen:,} {units}: expected "
            f"{wanted:,}{thousand} ({found.source}), so there are {less} than there "
            "should be: a file cut off, or of another version of the set"
        )


def _cut(path: Path, found: TextSet, split: str) -> Iterator[Record]:
    """Yields a part of the file `whole`, by bytes, checked as a whole file is."""
    start = 0
    for name, size in found.counts.items():
        if name == split:
            break
        start += size
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as file:
        file.seek(start)
        left = size
        while left:
            text = file.read(min(BLOCK, left))
            if not text:
                break
            at = start + size - left
            if found.alphabet and text.translate(None, found.alphabet):
                wrong = text.translate(None, found.alphabet)[:1]
                raise UnusableFile(
                    f"{path} has the byte {wrong!r} at offset {at + text.find(wrong)}: "
                    f"expected {found.name}'s {found.alphabet.decode()!r} only"
                )
            if not found.alphabet:
                # A part may begin and end within a character.
                first = text.lstrip(bytes(range(0x80, 0xC0))) if left == size else text
                _decode(decoder, first, path, at + len(text) - len(first))
            yield Record(text, begins=left == size)
            left -= len(text)


def _blocks(path: Path) -> Iterator[bytes]:
    """Yields blocks of whole lines; the last line gets an end if it has none."""
    text, size = [], 0
    for line in _lines(path):
        text.append(line)
        size += len(line)
        if size >= BLOCK:
            yield b"".join(text)
            text, size = [], 0
    if text:
        yield b"".join(text)


def _articles(path: Path) -> Iterator[Record]:
    """Yields an article a record; headings stand between two blank lines."""
    text: list[bytes] = []
    before = [b"\n", b"\n"]  # the last two lines
    for line in _lines(path):
        blank = not line.strip()
        if blank and _HEADING.fullmatch(before[1]) and not before[0].strip():
            # The heading is the last line of `text`, and what stands before it ends
            # the article before; the file's first blank line is the first article's.
            heading = text.pop()
            if b"".join(text).strip():
                yield Record(b"".join(text), begins=True)
                text = []
            text.append(heading)
        text.append(line)
        before = [before[1], line]
    if text:
        yield Record(b"".join(text), begins=True)


def _lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        offset = 0
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\r\n"):
                raise UnusableFile(
                    f"{path} has the line end CRLF in line {number}: expected LF, as "
                    "the set's authors have it"
                )
            _decode(codecs.getincrementaldecoder("utf-8")(), line, path, offset, True)
            offset += len(line)
            yield line if line.endswith(b"\n") else line + b"\n"


def _decode(decoder, text: bytes, path: Path, offset: int, final: bool = False) -> None:
    try:
        decoder.decode(text, final)
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise UnusableFile(
            f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset "
            f"{at} ({error.reason}); expected UTF-8, found perhaps Latin-1"
        ) from error


def _unspaced(text: bytes) -> bytes:
    """Turns `a _ b` into `a b`: a character and a space in turn, `_` for the space."""
    lines = []
    for line in text.split(b"\n"):
        symbols = line.split()
        if any(len(symbol.decode("utf-8")) > 1 for symbol in symbols):
            longest = max(symbols, key=len)
            raise UnusableFile(
                f"found {longest[:40]!r} where characters stand alone, with spaces "
                "between them: expected the file of characters, not that of words"
            )
        lines.append(b"".join(symbols).replace(b"_", b" "))
    return b"\n".join(lines)
