"""Positions are data: where each token stands, and in which document.

Every function of this package that needs positions takes a `Where`; none of them
invents one. Memories and caches carry their own, so that an empty memory, a ring
buffer, left padding and packed documents are ordinary inputs.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Num


class Where(NamedTuple):
    """Position and document of each token.

    Attributes:
      position: `[b t]`, any spacing: contiguous, randomized, interpolated, restarted.
        Integers, or float32 for encodings that take fractional positions.
      segment: `[b t]`, document id. 0 marks an empty slot or padding, which nothing
        attends to and which attends to nothing; only equal ids attend.
    """

    position: Num[Array, "b t"]
    segment: Int[Array, "b t"]


def contiguous(batch: int, length: int, start=0, segment=1) -> Where:
    """Returns positions `start, start + 1, ...` of one document in each row.

    Args:
      batch: number of rows.
      length: number of tokens in a row.
      start: first position, an integer (possibly traced) or an array `[b]`.
      segment: the document's id, an integer or an array `[b]`; 0 makes empty slots.
    """
    start = jnp.broadcast_to(jnp.asarray(start, jnp.int32), (batch,))[:, None]
    segment = jnp.broadcast_to(jnp.asarray(segment, jnp.int32), (batch,))[:, None]
    steps = jnp.arange(length, dtype=jnp.int32)[None, :]
    return Where(start + steps, jnp.broadcast_to(segment, (batch, length)))


def empty(batch: int, length: int) -> Where:
    """Returns `length` empty slots in each row: nothing attends to them."""
    return contiguous(batch, length, segment=0)


def from_lengths(
    lengths: Int[Array, " b"], length: int, *, side: str = "right"
) -> Where:
    """Returns the positions of padded rows; real tokens count from 0.

    Args:
      lengths: `[b]`, number of real tokens in each row.
      length: padded length.
      side: where the padding is, "left" or "right".

    Raises:
      ValueError: `side` is neither "left" nor "right".
    """
    if side not in ("left", "right"):
        raise ValueError(f"side must be 'left' or 'right', got {side!r}")
    index = jnp.arange(length, dtype=jnp.int32)[None, :]
    lengths = jnp.asarray(lengths, jnp.int32)[:, None]
    position = index if side == "right" else index - (length - lengths)
    real = (position >= 0) & (position < lengths)
    return Where(jnp.where(real, position, 0), real.astype(jnp.int32))


def packed(lengths: tuple[int, ...], length: int) -> Where:
    """Returns one row `[1 t]` of documents laid end to end, each counting from 0.

    Args:
      lengths: the documents' lengths, in order.
      length: length of the row; what is left over is padding.

    Raises:
      ValueError: the documents do not fit into the row.
    """
    if sum(lengths) > length:
        raise ValueError(f"documents of {sum(lengths)} tokens do not fit in {length}")
    position, segment = [], []
    for number, size in enumerate(lengths, start=1):
        position += range(size)
        segment += [number] * size
    rest = length - sum(lengths)
    return Where(
        jnp.asarray([position + [0] * rest], jnp.int32),
        jnp.asarray([segment + [0] * rest], jnp.int32),
    )


def concatenate(first: Where, second: Where) -> Where:
    """Joins two `Where`s along time."""
    return Where(
        jnp.concatenate([first.position, second.position], axis=1),
        jnp.concatenate([first.segment, second.segment], axis=1),
    )
