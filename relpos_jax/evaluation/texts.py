"""Texts to tokens and back, around `generation`, for the terminal."""

import codecs
import functools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Integer

from relpos_jax.data import Bytes, Vocabulary

# Writes to the terminal, at once and no more than it is given.
terminal = functools.partial(print, end="", flush=True)


def stops(
    texts: Sequence[str], vocabulary: Vocabulary = Bytes()
) -> tuple[tuple[int, ...], ...]:
    r"""Returns the tokens of stops as typed: `\n`, `\t`, `\\`, `\x00` escaped.

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
        found.append(tuple(vocabulary.encode(data).tolist()))
    return tuple(found)


def text_of(tokens: Integer[np.ndarray, " t"], vocabulary: Vocabulary = Bytes()) -> str:
    """Returns a text's tokens as text; bytes that are none are shown as such (U+FFFD).

    Raises:
      ValueError: an id is outside the vocabulary.
    """
    return vocabulary.decode(tokens).decode("utf-8", errors="replace")


def continued(
    prompt: str,
    ids: Integer[np.ndarray, " p"],
    tokens: Integer[np.ndarray, " t"],
    vocabulary: Vocabulary,
) -> str:
    """Returns a prompt, of tokens `ids`, with the text that further tokens add to it.

    Raises:
      ValueError: an id is outside the vocabulary.
    """
    whole = vocabulary.decode(np.concatenate([ids, tokens]))
    more = whole[len(vocabulary.decode(ids)) :]
    return prompt + more.decode("utf-8", errors="replace")


class Printer:
    """Writes a prompt and then the chunks of its row, in whole characters.

    Args:
      write: takes text.
      prompt: is written before the first chunk, and not at all if none comes.
      vocabulary: what the tokens are.
    """

    def __init__(
        self,
        write: Callable[[str], object],
        prompt: str = "",
        vocabulary: Vocabulary = Bytes(),
    ):
        self._write = write
        self._prompt = prompt
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # A token's text may depend on those before it: words have spaces between them.
        self._ids = vocabulary.encode(prompt)
        self._done = len(vocabulary.decode(self._ids))

    def __call__(self, row: int, tokens: Integer[np.ndarray, " t"]) -> None:
        """Takes a row's next tokens, as `generate` hands them over."""
        self._ids = np.concatenate([self._ids, tokens])
        data = self._vocabulary.decode(self._ids)
        if self._vocabulary.unit == "subword":  # half a character, perhaps
            data = data.decode("utf-8").rstrip("\ufffd").encode("utf-8")
        text = self._decoder.decode(data[self._done :])
        self._done = max(self._done, len(data))
        self._write(self._prompt + text)
        self._prompt = ""

    def close(self) -> None:
        """Writes what was held back, and ends the line."""
        rest = self._vocabulary.decode(self._ids)[self._done :]
        self._write(self._prompt + self._decoder.decode(rest, final=True) + "\n")
