"""Which targets are scored, in which window, with which context.

A text of `size` tokens has the targets 1 ... size - 1: the first token has nothing
to be predicted from. Everything here is index arithmetic on the host; `perplexity`
runs the model on what these plans say.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Integer


class Plan(NamedTuple):
    """Windows of one length, and the positions in them that are scored.

    Position p of a window that starts at token s reads token s + p, sees the tokens
    s ... s + p, and predicts token s + p + 1.

    Attributes:
      length: tokens in a window.
      start: `[n]`, index in the text of each window's first token.
      first: `[n]`, first position scored.
      stop: `[n]`, one past the last position scored.
    """

    length: int
    start: Int[np.ndarray, " n"]
    first: Int[np.ndarray, " n"]
    stop: Int[np.ndarray, " n"]

    @property
    def tokens(self) -> int:
        """Number of targets scored."""
        return int((self.stop - self.first).sum())


class Block(NamedTuple):
    """Windows as arrays of one shape, ready for the model.

    Attributes:
      inputs: `[b t]`, tokens read; 0 where there is none.
      targets: `[b t]`, tokens to predict; 0 where there is none.
      weights: `[b t]`, whether the target is scored.
      segment: `[b t]`, 1 for a token, 0 for padding.
    """

    inputs: Int[np.ndarray, "b t"]
    targets: Int[np.ndarray, "b t"]
    weights: Bool[np.ndarray, "b t"]
    segment: Int[np.ndarray, "b t"]


def non_overlapping(size: int, length: int) -> Plan:
    """Cuts the text into chunks of `length` targets (Press et al. 2022, table 2).

    Every target is scored once; the context grows from 1 to `length` in each chunk.
    The last chunk may be shorter.

    Raises:
      ValueError: fewer than two tokens, or a length below 1.
    """
    return sliding(size, length, stride=length)


def sliding(size: int, length: int, stride: int) -> Plan:
    """Moves a window by `stride` and scores what the window before has not.

    Every target is scored once. Past the first window, the context is at least
    `length - stride + 1` tokens (Press et al. 2022, tables 13-15, have stride 1).

    Args:
      size: tokens in the text.
      length: tokens in a window.
      stride: targets scored in each window after the first, 1 ... `length`.

    Raises:
      ValueError: fewer than two tokens, a length below 1, or a stride outside
        1 ... `length`, which would leave targets out.
    """
    _check(size, length)
    if not 1 <= stride <= length:
        raise ValueError(
            f"stride is {stride}, window length {length}: a stride outside 1..{length} "
            "skips targets; take a smaller stride"
        )
    targets = size - 1
    count = 1 + max(0, -((length - targets) // stride))
    start = np.arange(count) * stride
    first = np.where(start == 0, 0, length - stride)
    return Plan(length, start, first, np.minimum(length, targets - start))


def same_targets(size: int, length: int, longest: int, group: int, count: int) -> Plan:
    """Scores the same targets whatever the length: the last `group` of each window.

    The groups are spread evenly over the part of the text where a window of `longest`
    fits, so their targets do not depend on `length`; the context of a target lies
    between `length - group + 1` and `length`. What remains between two lengths is the
    use of context, without the early-token effect.

    Args:
      size: tokens in the text.
      length: tokens in a window.
      longest: the longest length of the comparison.
      group: targets scored in a window.
      count: groups wanted; fewer where the text has no room for as many apart.

    Raises:
      ValueError: `group` or `count` below 1, `group` above `length`, `length` above
        `longest`, or a text of fewer than `longest + 1` tokens.
    """
    _check(size, length)
    if not 1 <= group <= length <= longest:
        raise ValueError(
            f"group {group}, length {length}, longest {longest}: "
            "must satisfy 1 <= group <= length <= longest"
        )
    if count < 1:
        raise ValueError(f"count is {count}: at least one group of targets is needed")
    if size < longest + 1:
        raise ValueError(
            f"the text has {size} tokens, a window of {longest} needs {longest + 1}: "
            "take a longer text or shorter lengths"
        )
    room = size - 1 - longest
    count = min(count, 1 + room // group)
    # Floor of an even spacing; neighbours stay at least `group` apart.
    ends = longest + (np.arange(count) * room) // max(1, count - 1)
    first = np.full(count, length - group)
    return Plan(length, ends - length, first, np.full(count, length))


def fill(text: Integer[np.ndarray, " n"], plan: Plan, rows: slice, batch: int) -> Block:
    """Returns the plan's windows `rows` as arrays, padded to `batch` rows.

    Args:
      text: `[n]`, the tokens.
      plan: made for a text of `n` tokens.
      rows: which windows.
      batch: rows of the result; those without a window have weight and segment 0.
    """
    start, first, stop = plan.start[rows], plan.first[rows], plan.stop[rows]
    rest = batch - len(start)
    start = np.concatenate([start, np.full(rest, len(text))])
    first, stop = (np.concatenate([x, np.zeros(rest, x.dtype)]) for x in (first, stop))
    step = np.arange(plan.length)
    block = gather(text, start[:, None] + step)
    scored = (step >= first[:, None]) & (step < stop[:, None])
    return block._replace(weights=block.weights & scored)


def lanes(
    text: Integer[np.ndarray, " n"], segment: int, warm_up: int, count: int
) -> tuple[Block, int]:
    """Cuts the text into lanes that are read side by side, segment after segment.

    Lane b scores its own stretch of the text; before that it reads the `warm_up`
    tokens that lead up to it (padding, before the text's beginning), so that the
    memory is as full as it would be in one stream. Every target is scored once.

    Args:
      text: `[n]`, the tokens.
      segment: tokens read in a step.
      warm_up: tokens of memory wanted before a lane's first target.
      count: lanes wanted; fewer where the text is short.

    Returns:
      A block whose arrays are `[b s*t]`: lane, then time; and the number of segments.

    Raises:
      ValueError: fewer than two tokens, or `segment` or `count` below 1, or a
        negative `warm_up`.
    """
    _check(len(text), segment)
    if count < 1 or warm_up < 0:
        raise ValueError(
            f"{count} lanes with a warm-up of {warm_up} tokens: "
            "take at least 1 lane and a warm-up of at least 0"
        )
    pieces = -(-(len(text) - 1) // segment)
    own = -(-pieces // count)
    count = -(-pieces // own)
    # Before the first lane there is no text, so one lane alone reads none.
    before = -(-warm_up // segment) if count > 1 else 0
    step = np.arange((before + own) * segment)
    index = (np.arange(count)[:, None] * own - before) * segment + step
    block = gather(text, index)
    scored = step >= before * segment
    return block._replace(weights=block.weights & scored), before + own


def gather(text: Integer[np.ndarray, " n"], index: Int[np.ndarray, "b t"]) -> Block:
    """Reads tokens and their successors; whatever has no successor is padding.

    Args:
      text: `[n]`, the tokens.
      index: `[b t]`, positions in the text, in any range.
    """
    real = (index >= 0) & (index < len(text) - 1)
    safe = np.where(real, index, 0)
    inputs = np.where(real, text[safe], 0).astype(np.int32)
    targets = np.where(real, text[safe + 1], 0).astype(np.int32)
    return Block(inputs, targets, real, real.astype(np.int32))


def _check(size: int, length: int) -> None:
    if size < 2:
        raise ValueError(f"the text has {size} tokens: scoring needs at least 2")
    if length < 1:
        raise ValueError(f"window length is {length}: must be at least 1")
