"""Texts to tokens and back, around `generation`, for the terminal."""

import codecs
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Integer

from relpos_jax.data import Bytes


def stops(texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    r"""Returns the byte sequences of stops as typed: `\n`, `\t`, `\\`, `\x00` escaped.

    Raises:
      ValueError: an escape that isn't one; names the stop.
    """
    found = []
    for text in texts:
        try:
            data, _ = codecs.escape_decode(text.encode("utf-8"))
        except ValueError as error:
            raise ValueError(
                f"the stop {text!r} ends in the middle of an escape ({error}): write "
                r"a backslash as '\\'"
            ) from error
        found.append(tuple(data))
    return tuple(found)


def text_of(tokens: Integer[np.ndarray, " t"]) -> str:
    """Returns a text's tokens as text; bytes that are none are shown as such (U+FFFD).

    Raises:
      ValueError: an id is no byte.
    """
    return Bytes().decode(tokens).decode("utf-8", errors="replace")


class Printer:
    """Writes a prompt and then the chunks of its row, in whole characters.

    Args:
      write: takes text.
      prompt: is written before the first chunk, and not at all if none comes.
    """

    def __init__(self, write: Callable[[str], object], prompt: str = ""):
        self._write = write
        self._prompt = prompt
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, row: int, tokens: Integer[np.ndarray, " t"]) -> None:
        """Takes a row's next tokens, as `generate` hands them over."""
        text = self._decoder.decode(Bytes().decode(tokens))
        self._write(self._prompt + text)
        self._prompt = ""

    def close(self) -> None:
        """Writes what was held back, and ends the line."""
        self._write(self._prompt + self._decoder.decode(b"", final=True) + "\n")
