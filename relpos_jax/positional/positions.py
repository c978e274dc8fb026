"""Positions other than 0, 1, 2, ...: transformations of `Where`, for any encoding.

Randomized positions (Ruoss et al. 2023), their continuous relative (Shimizu et al.
2026), random starts and interpolation (Chen et al. 2023) change the numbers and nothing
else, so that no encoding has a copy of itself for them.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, Num

from relpos_jax.positional import nearest
from relpos_jax.where import Where


def _per_row(key: Key[Array, ""], batch: int) -> Key[Array, " b"]:
    """Returns a key for each row that doesn't depend on how many rows there are."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(batch))


def _in_order(values: Num[Array, "b t"], at: Where) -> Num[Array, "b t"]:
    """Deals values out to tokens, rising with position within each document.

    Every document takes as many of the values as it has tokens, in the order in which
    the values stand; which of its tokens gets which is then decided by size.
    """

    def row(values, position, segment):
        order = jnp.lexsort((position, segment))
        dealt = values[jnp.lexsort((values, segment[order]))]
        return jnp.zeros_like(values).at[order].set(dealt)

    return jax.vmap(row)(values, at.position, at.segment)


def _with(at: Where, position: Num[Array, "b t"]) -> Where:
    empty = jnp.zeros((), position.dtype)
    return Where(jnp.where(at.segment != 0, position, empty), at.segment)


def randomized(key: Key[Array, ""], at: Where, simulated_length: int) -> Where:
    """Returns sorted positions drawn from `0 .. N - 1` without replacement.

    Ruoss et al. 2023, section 3: with `N` longer than any text to be met, every
    position is seen in training, and only the order of positions tells anything. Each
    document of each row has a draw of its own size, uniform over all of them; documents
    of one row never share a position, and a row's draw depends on its number but not on
    how many rows there are. The same key gives the same positions: the paper draws in
    evaluation too, so hand a key over there as well, and draw once for a text that is
    then decoded token by token.

    Not here: the released code draws once a batch, and for relative encodings draws the
    distances themselves instead of the positions.

    Args:
      key: for this draw.
      at: `[b t]`; only the order of its positions within a document matters.
      simulated_length: `N` of the paper.

    Raises:
      ValueError: a row is longer than `N`: its positions could not all differ.
    """
    batch, length = at.position.shape
    _check_room(length, simulated_length)

    def draw(key):
        return jax.random.permutation(key, simulated_length)[:length]

    values = jax.vmap(draw)(_per_row(key, batch)).astype(jnp.int32)
    return _with(at, _in_order(values, at))


def randomized_float(key: Key[Array, ""], at: Where, simulated_length: int) -> Where:
    """Returns sorted positions drawn uniformly from the interval `0 .. N`, float32.

    Random float sampling (Shimizu et al. 2026): as `randomized`, with real numbers, for
    encodings that take them (sinusoidal, rotary, ALiBi; not learned tables). So that
    they rise strictly in float32 as well, neighbours are at least `N / 2^21` apart:
    the draw is from an interval shorter by that, spread out afterwards.

    Raises:
      ValueError: a row is longer than `N`, or longer than 2^20 tokens.
    """
    batch, length = at.position.shape
    _check_room(length, simulated_length)
    if length > 2**20:
        raise ValueError(f"float32 has no room for {length} tokens that all differ")
    least = simulated_length / 2**21
    room = simulated_length - least * length

    def draw(key):
        return jax.random.uniform(key, (length,), maxval=room)

    values = _in_order(jax.vmap(draw)(_per_row(key, batch)), at)
    return _with(at, values + least * _rank(at).astype(jnp.float32))


def offset(key: Key[Array, ""], at: Where, maximum: int) -> Where:
    """Returns positions that start somewhere in `0 .. maximum` more, by document.

    One whole number a row and document, which depends on the row's number and the
    document's id alone: segments of one document get the same with the same key, so
    memory stays in step. Shows absolute encodings positions past a training window;
    what depends on distances alone does not change.

    Raises:
      ValueError: `maximum` is negative.
    """
    if maximum < 0:
        raise ValueError(f"maximum is the highest offset, 0 or more, got {maximum}")

    def draw(key, segment):
        return jax.random.randint(jax.random.fold_in(key, segment), (), 0, maximum + 1)

    by_document = jax.vmap(jax.vmap(draw, (None, 0)))
    batch = at.position.shape[0]
    more = by_document(_per_row(key, batch), at.segment)
    return _with(at, at.position + more.astype(at.position.dtype))


def interpolated(at: Where, factor: float | int) -> Where:
    """Returns positions divided by `factor`, float32 (Chen et al. 2023, equation 4).

    Position Interpolation without touching the encoding: with `factor = longer /
    trained`, longer texts stay among the positions that training has seen.

    Raises:
      ValueError: `factor` is not positive.
    """
    if not factor > 0:
        raise ValueError(f"factor divides positions, so it must be > 0, got {factor}")
    return _with(at, at.position.astype(jnp.float32) / factor)


def _check_room(length: int, simulated_length: int) -> None:
    if length > simulated_length:
        raise ValueError(
            f"{length} tokens need as many different positions, but the simulated "
            f"length is {simulated_length}; raise it to the longest text to be met"
        )


def _rank(at: Where) -> Int[Array, "b t"]:
    """Returns each token's place in its row by document and position, from 0."""
    order = jnp.lexsort((at.position, at.segment), axis=1)
    return jnp.argsort(order, axis=1)


@dataclasses.dataclass(frozen=True)
class PositionSampler:
    """Leaves positions as they are, and is the base of what changes them.

    `sampler(key, at)` returns the new `Where`. What is true of the result:

    Class attributes:
      spacing: what a model may be told of it, its `spacing` argument: "unit" (by one a
        token), "rising" or "any".
      whole: a sequence must be given as a whole, since every call draws anew: refuse it
        together with memory.
    """

    spacing: ClassVar[str] = "unit"
    whole: ClassVar[bool] = False

    def __call__(self, key: Key[Array, ""], at: Where) -> Where:
        """Returns where the tokens shall be taken to stand."""
        return at


@dataclasses.dataclass(frozen=True)
class Randomized(PositionSampler):
    """See `randomized`, and `randomized_float` for `real=True`."""

    simulated_length: int = 2048
    real: bool = False

    spacing: ClassVar[str] = "rising"
    whole: ClassVar[bool] = True

    def __post_init__(self):
        _check_room(1, self.simulated_length)

    def __call__(self, key: Key[Array, ""], at: Where) -> Where:
        draw = randomized_float if self.real else randomized
        return draw(key, at, self.simulated_length)


@dataclasses.dataclass(frozen=True)
class Offset(PositionSampler):
    """See `offset`."""

    maximum: int = 0

    def __post_init__(self):
        if self.maximum < 0:
            raise ValueError(f"maximum must be 0 or more, got {self.maximum}")

    def __call__(self, key: Key[Array, ""], at: Where) -> Where:
        return offset(key, at, self.maximum)


@dataclasses.dataclass(frozen=True)
class Interpolated(PositionSampler):
    """See `interpolated`."""

    factor: float = 1.0

    spacing: ClassVar[str] = "rising"

    def __post_init__(self):
        if not self.factor > 0:
            raise ValueError(f"factor must be > 0, got {self.factor}")

    def __call__(self, key: Key[Array, ""], at: Where) -> Where:
        return interpolated(at, self.factor)


SAMPLERS: dict[str, PositionSampler] = {
    "given": PositionSampler(),
    "randomized": Randomized(),
    "randomized_float": Randomized(real=True),
    "offset": Offset(maximum=1024),
    "interpolated": Interpolated(),
}


def make_sampler(name: str, **knobs: Any) -> PositionSampler:
    """Returns the sampler of a name, with some fields changed.

    Raises:
      ValueError: an unknown name or field, naming the nearest known one.
    """
    if name not in SAMPLERS:
        raise ValueError(f"unknown positions {name!r}; {nearest(name, SAMPLERS)}")
    fields = [field.name for field in dataclasses.fields(SAMPLERS[name])]
    for knob in knobs:
        if knob not in fields:
            hint = nearest(knob, fields) if fields else "it has no fields"
            raise ValueError(f"positions {name!r} have no field {knob!r}; {hint}")
    return dataclasses.replace(SAMPLERS[name], **knobs)


def limited_sampler(name: str, limit: int) -> PositionSampler:
    """Returns the sampler of a name, with its one number set where it has one.

    Args:
      name: a name of `SAMPLERS`, but not one that is set by a factor.
      limit: simulated length of randomized positions, or the highest offset.

    Raises:
      ValueError: an unknown name, naming the nearest known one.
    """
    sampler = make_sampler(name)
    for field in ("simulated_length", "maximum"):
        if hasattr(sampler, field):
            return make_sampler(name, **{field: limit})
    return sampler
