"""Subwords, from a file that the user brings: SentencePiece's or `tokenizers`'.

Neither library is needed for anything else: each is imported where its file is read.
Text is encoded line by line, the line's end with it, so that the ids of a text do not
depend on how it was cut into pieces. Whatever the file's own normalisation drops (most
SentencePiece models drop line ends and repeated spaces) does not come back.
"""

import base64
import dataclasses
import functools
import importlib
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int32, Integer

# Kind to the package that reads its files.
PACKAGES = {"sentencepiece": "sentencepiece", "tokenizers": "tokenizers"}


@dataclasses.dataclass(frozen=True)
class Subwords:
    """A token is a piece of a subword model.

    Attributes:
      kind: "sentencepiece" (a `.model`) or "tokenizers" (a `tokenizer.json`).
      model: the file's bytes, which are saved with the run.

    Raises:
      ImportError: the package that reads such files is not installed.
      ValueError: another kind, or bytes that are no such file.
    """

    kind: str
    model: bytes = dataclasses.field(repr=False)

    def __post_init__(self):
        if self.kind not in PACKAGES:
            raise ValueError(
                f"unknown kind of subwords {self.kind!r}: must be one of "
                f"{', '.join(PACKAGES)}"
            )
        self._processor  # raises for an unusable file

    @classmethod
    def of(cls, kind: str, path: str) -> "Subwords":
        """Returns the subwords of a file.

        Raises:
          FileNotFoundError: no such file.
        """
        return cls(kind, pathlib.Path(path).expanduser().read_bytes())

    @property
    def name(self) -> str:
        return self.kind

    @property
    def unit(self) -> str:
        return "subword"

    @functools.cached_property
    def _processor(self) -> Any:
        package = PACKAGES[self.kind]
        try:
            library = importlib.import_module(package)
        except ImportError as error:
            raise ImportError(
                f"vocabulary {self.kind!r} needs the package {package}: "
                f"pip install {package}"
            ) from error
        try:
            if self.kind == "sentencepiece":
                return library.SentencePieceProcessor(model_proto=self.model)
            return library.Tokenizer.from_str(self.model.decode("utf-8"))
        except Exception as error:  # each library raises its own
            raise ValueError(
                f"no model of {self.kind} in these {len(self.model)} bytes: {error}"
            ) from error

    @functools.cached_property
    def size(self) -> int:
        """Number of ids."""
        if self.kind == "sentencepiece":
            return int(self._processor.get_piece_size())
        # Ids may have gaps, and added tokens may lie behind the model's own.
        return max(self._processor.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str | bytes) -> Int32[np.ndarray, " t"]:
        """Returns the ids `[t]` of a text, encoded line by line.

        Raises:
          ValueError: the text is no UTF-8.
        """
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        lines = _lines(text)
        if self.kind == "sentencepiece":
            found = self._processor.encode(lines, out_type=int)
        else:
            found = [
                encoding.ids
                for encoding in self._processor.encode_batch(
                    lines, add_special_tokens=False
                )
            ]
        return np.array([index for line in found for index in line], np.int32)

    def decode(self, ids: Integer[np.ndarray, " t"]) -> bytes:
        """Returns the text of ids `[t]`, as the model's own decoder gives it.

        Raises:
          ValueError: an id is no subword's.
        """
        ids = np.asarray(ids)
        wrong = np.flatnonzero((ids < 0) | (ids >= self.size))
        if wrong.size:
            raise ValueError(
                f"id {ids[wrong[0]]} at index {wrong[0]} is no subword: ids go from 0 "
                f"to {self.size - 1}"
            )
        ids = ids.tolist()
        if self.kind == "sentencepiece":
            return self._processor.decode(ids).encode("utf-8")
        return self._processor.decode(ids, skip_special_tokens=False).encode("utf-8")

    def state(self) -> dict[str, Any]:
        """Returns what `from_state` makes it of."""
        return {
            "kind": self.kind,
            "model": base64.b64encode(self.model).decode("ascii"),
        }


def from_state(state: Mapping[str, Any]) -> Subwords:
    """Returns the subwords of `Subwords.state`."""
    return Subwords(state["kind"], base64.b64decode(state["model"], validate=True))


def _lines(text: str) -> list[str]:
    """Splits at line ends and nowhere else, each line with its end."""
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + [line for line in lines[-1:] if line]
