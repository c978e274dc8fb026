"""How old states become fewer, and what is lost by it (Rae et al. 2020).

Functions of one layer: `c` states in a row become one slot, and two auxiliary losses
say how much of them the slot still tells. `CompressiveMemory` says which states leave,
and keeps the slots.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.masks import Bidirectional
from relpos_jax.positional.protocol import Params, PositionEncoding, leading
from relpos_jax.where import Where

LEARNED = ("convolution", "dilated_convolution")


@dataclasses.dataclass(frozen=True)
class CompressiveConfig:
    """A compressed memory behind the segment memory.

    Attributes:
      length: slots of compressed memory; 0 is segment memory alone.
      rate: `c`, states that become one slot.
      function: "mean" and "max" of the states; "convolution", kernel and stride `c`;
        "dilated_convolution", the same with `dilation` states from tap to tap, so that
        it looks back on states before its own; "most_used" keeps every c-th of them,
        those that got most attention.
      loss: what trains a convolution, and only it. "attention": attention to the states
        against attention to their slots. "autoencoding": the states against what a
        transposed convolution makes of their slots. None: nothing is measured.
      loss_weight: the auxiliary loss is times this in training.
      dilation: of "dilated_convolution".
    """

    length: int
    rate: int = 4
    function: str = "convolution"
    loss: str | None = "attention"
    loss_weight: float = 1.0
    dilation: int = 2

    def __post_init__(self):
        for name, least in (("length", 0), ("rate", 1), ("dilation", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"compressive.{name} must be at least {least}, got "
                    f"{getattr(self, name)}"
                )
        known = ("mean", "max", *LEARNED, "most_used")
        if self.function not in known:
            raise ValueError(
                f"compressive.function must be one of {known}, got {self.function!r}"
            )
        if self.loss not in (None, "attention", "autoencoding"):
            raise ValueError(
                f"compressive.loss must be 'attention', 'autoencoding' or None, got "
                f"{self.loss!r}"
            )
        if self.loss_weight < 0:
            raise ValueError(
                f"compressive.loss_weight must not be negative, got {self.loss_weight}"
            )
        if self.function in LEARNED and not (self.loss and self.loss_weight):
            raise ValueError(
                f"compressive.function={self.function!r} is trained by the auxiliary "
                f"loss alone, but loss={self.loss!r} and loss_weight="
                f"{self.loss_weight}: set a loss, or take 'mean'"
            )
        if self.function == "most_used" and self.loss == "autoencoding":
            raise ValueError(
                "compressive.loss='autoencoding' rebuilds the states of a group from "
                "its slot, and 'most_used' keeps states, not groups: take 'attention' "
                "or None"
            )

    def share(
        self, trained: int, length: int | None, slots: int | None
    ) -> tuple[int, int]:
        """Returns the slots of segment and of compressed memory.

        Args:
          trained: slots of segment memory in training.
          length: slots of both, which are shared out as in training, or of segment
            memory alone if `slots` is given; None for as trained.
          slots: slots of compressed memory; None for what `length` leaves to it.
        """
        if slots is not None:
            return trained if length is None else length, slots
        if length is None:
            return trained, self.length
        slots = length * self.length // max(trained + self.length, 1)
        return length - slots, slots


class Leaving(NamedTuple):
    """States of one layer that leave segment memory, oldest first.

    Attributes:
      states: `[b n w]`, `n` a whole number of groups of `rate`.
      at: `[b n]`, where they stand; segment 0 past those that really leave.
      count: `[b]`, how many groups really leave.
      usage: `[b n]`, mean attention that each got since it was written; None unless
        the function asks.
    """

    states: Float[Array, "b n w"]
    at: Where
    count: Int[Array, " b"]
    usage: Float[Array, "b n"] | None = None


class Slots(NamedTuple):
    """What became of them.

    Attributes:
      states: `[b g w]`, zeros in slots that hold nothing.
      at: `[b g]`; segment 0 in slots that hold nothing.
      members: `[b n]`, which states the slots stand for.
    """

    states: Float[Array, "b g w"]
    at: Where
    members: Bool[Array, "b n"]


def init(config: CompressiveConfig, width: int) -> Params:
    """Returns a layer's parameters: convolutions start as the mean of their states."""
    one = jnp.broadcast_to(jnp.eye(width)[None], (config.rate, width, width))
    params = {}
    if config.function in LEARNED:
        params |= {"kernel": one / config.rate, "bias": jnp.zeros(width)}
    if config.loss == "autoencoding":
        params |= {"decoder": one + 0.0, "decoder_bias": jnp.zeros(width)}
    return params


def compress(config: CompressiveConfig, params: Params, leaving: Leaving) -> Slots:
    """Returns the slots of what leaves: one for each group of `rate` states.

    A slot stands where the newest of its states stood. States of a group that are of
    another document than its newest are left out: documents follow one another along a
    row, so nothing that is yet to come could attend to them.

    Raises:
      ValueError: a convolution's kernel is of another rate.
    """
    if config.function == "most_used":
        return _most_used(config, leaving)
    rate = config.rate
    batch, count, width = leaving.states.shape
    groups = count // rate
    position, segment = (x.reshape(batch, groups, rate) for x in leaving.at)
    last = jnp.max(jnp.where(segment != 0, jnp.arange(rate)[None, None], -1), axis=2)

    def newest(x):
        return jnp.take_along_axis(x, jnp.maximum(last, 0)[..., None], axis=2)[..., 0]

    at = Where(newest(position), newest(segment))
    members = (segment == at.segment[..., None]) & (segment != 0)
    if config.function in LEARNED:
        kernel = params["kernel"]
        if kernel.shape[0] != rate:
            raise ValueError(
                f"the convolution compresses at the rate {kernel.shape[0]} that it was "
                f"trained at, not at {rate}; 'mean', 'max' and 'most_used' take any"
            )
        states = _convolution(config, kernel, params["bias"], leaving, at)
    else:
        states = leaving.states.reshape(batch, groups, rate, width)
        if config.function == "mean":
            total = jnp.sum(jnp.where(members[..., None], states, 0), axis=2)
            states = total / jnp.maximum(members.sum(2), 1)[..., None]
        else:
            low = jnp.finfo(states.dtype).min
            states = jnp.max(jnp.where(members[..., None], states, low), axis=2)
    states = jnp.where((at.segment != 0)[..., None], states, 0)
    states = states.astype(leaving.states.dtype)
    return Slots(states, at, members.reshape(batch, count))


def _convolution(config, kernel, bias, leaving: Leaving, at: Where):
    """Strided convolution; each tap sees states of the slot's document, or zeros."""
    rate, groups = config.rate, at.position.shape[1]
    dilation = config.dilation if config.function == "dilated_convolution" else 1
    ends = rate * jnp.arange(groups)[:, None] + rate - 1
    index = ends - dilation * (rate - 1 - jnp.arange(rate)[None])
    safe = jnp.maximum(index, 0)
    same = leaving.at.segment[:, safe] == at.segment[..., None]
    seen = same & (index >= 0)[None] & (at.segment != 0)[..., None]
    taps = jnp.where(seen[..., None], leaving.states[:, safe], 0)
    out = jnp.einsum(
        "bgcw,cwv->bgv",
        taps,
        kernel.astype(taps.dtype),
        preferred_element_type=jnp.float32,
    )
    return out + leading(bias, 3)


def _most_used(config, leaving: Leaving) -> Slots:
    """Keeps the states with the highest usage, in their order."""
    count = leaving.states.shape[1]
    groups = count // config.rate
    real = leaving.at.segment != 0
    score = jnp.where(real, leaving.usage, -jnp.inf)
    # Sorting is stable: of equally used states the oldest stays.
    best = jnp.argsort(-score, axis=1)[:, :groups]
    kept = jnp.arange(groups)[None] < leaving.count[:, None]
    best = jnp.sort(jnp.where(kept, best, count), axis=1)
    kept, best = best < count, jnp.minimum(best, count - 1)
    at = jax.tree.map(lambda x: jnp.take_along_axis(x, best, axis=1), leaving.at)
    at = at._replace(segment=jnp.where(kept, at.segment, 0))
    states = jnp.take_along_axis(leaving.states, best[..., None], axis=1)
    return Slots(jnp.where((at.segment != 0)[..., None], states, 0), at, real)


def attention_loss(
    q: Float[Array, "b q h d"],
    old: tuple[Float[Array, "b n h d"], Float[Array, "b n h d"]],
    new: tuple[Float[Array, "b g h d"], Float[Array, "b g h d"]],
    q_at: Where,
    old_at: Where,
    new_at: Where,
) -> Float[Array, " two"]:
    """Attention reconstruction: Rae et al. 2020, algorithm 2.

    Queries attend by content alone, without positions, once to the old states and once
    to their slots, within their document. The caller stops the gradients.

    Args:
      q: queries of the current segment.
      old, new: keys and values of the states, and of the slots.
      q_at, old_at, new_at: where they stand; segment 0 leaves out.

    Returns:
      The squared differences, summed over queries and averaged over features; and the
      number of queries that see any old state.
    """
    none, mask = PositionEncoding(), Bidirectional()
    before = attend(none, {}, q, *old, q_at, old_at, mask=mask)
    after = attend(none, {}, q, *new, q_at, new_at, mask=mask)
    difference = before.astype(jnp.float32) - after.astype(jnp.float32)
    same = q_at.segment[:, :, None] == old_at.segment[:, None, :]
    asks = jnp.any(same, axis=2) & (q_at.segment != 0)
    errors = jnp.where(asks, jnp.mean(difference**2, axis=(2, 3)), 0.0)
    return jnp.stack([jnp.sum(errors), jnp.sum(asks.astype(jnp.float32))])


def autoencoding_loss(
    params: Params, leaving: Leaving, slots: Slots
) -> Float[Array, " two"]:
    """The states against what a transposed convolution makes of their slots.

    Returns:
      The squared differences, summed over the states that the slots stand for and
      averaged over features; and the number of those states.
    """
    decoder = params["decoder"].astype(slots.states.dtype)
    states = jnp.einsum(
        "bgv,cvw->bgcw", slots.states, decoder, preferred_element_type=jnp.float32
    )
    states = states + leading(params["decoder_bias"], 4)
    wanted = leaving.states.astype(jnp.float32)
    errors = jnp.mean((states.reshape(wanted.shape) - wanted) ** 2, axis=2)
    errors = jnp.where(slots.members, errors, 0.0)
    return jnp.stack([jnp.sum(errors), jnp.sum(slots.members.astype(jnp.float32))])


def members_at(leaving: Leaving, slots: Slots) -> Where:
    """Returns where those states stand that the slots stand for; others are empty."""
    segment = jnp.where(slots.members, leaving.at.segment, 0)
    return where.Where(leaving.at.position, segment)
