"""Vocabularies: text to token ids and back."""

import dataclasses

import numpy as np
from jaxtyping import Int32, Integer


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
        ids = np.asarray(ids)
        wrong = np.flatnonzero((ids < 0) | (ids >= self.size))
        if wrong.size:
            first = int(wrong[0])
            raise ValueError(
                f"id {ids[first]} at index {first} is no byte: ids go from 0 to "
                f"{self.size - 1} ({wrong.size} of {ids.size} ids are outside)"
            )
        return ids.astype(np.uint8).tobytes()
