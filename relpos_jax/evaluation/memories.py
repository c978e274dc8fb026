"""Kinds of memory as changes of a model's config, with equal numbers of keys.

A kind says how a model is trained, and how it is changed so that a query sees at most
`length` keys at evaluation.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from relpos_jax.memory import CompressiveConfig
from relpos_jax.models import ModelConfig
from relpos_jax.models.config import Hierarchy


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """What the kinds of memory of a comparison have in common, and where they differ.

    Attributes:
      slots: states that a model keeps from earlier segments, of whatever kind.
      compressed: how many of them compressive memory has compressed.
      rate, function, loss: of its compression, see `CompressiveConfig`.
      parts: segments of hierarchical attention in a training row, each a summary.
    """

    slots: int = 64
    compressed: int = 32
    rate: int = 4
    function: str = "convolution"
    loss: str | None = "attention"
    parts: int = 4

    def __post_init__(self):
        if not 0 <= self.compressed <= self.slots:
            raise ValueError(
                f"memory.compressed is {self.compressed}: must be 0 to the "
                f"{self.slots} slots there are"
            )

    @property
    def compressive(self) -> CompressiveConfig:
        """The slots of compressed memory."""
        return CompressiveConfig(self.compressed, self.rate, self.function, self.loss)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of memory.

    Attributes:
      changes: `(memory, segment, position) -> changes` of a `ModelConfig`; `segment` is
        the length of a training row, in tokens, and `position` the model's encoding.
      at_length: `(model, length, segment) -> model`, whose queries see at most `length`
        keys.
      streams: the text is read in segments, with memory between them; otherwise in
        separate windows of `length` tokens.
    """

    changes: Callable[[MemoryConfig, int, Any], Mapping[str, Any]]
    at_length: Callable[[ModelConfig, int, int], ModelConfig]
    streams: bool = True


def _same(model: ModelConfig, length: int, segment: int) -> ModelConfig:
    return model


def _shared(model: ModelConfig, length: int, segment: int) -> ModelConfig:
    """Shares out the keys that are not the segment's own, as in training."""
    keys = max(length - segment, 0)
    if model.compressive is None:
        return dataclasses.replace(model, memory_length=keys)
    memory, slots = model.compressive.share(model.memory_length, keys, None)
    compressive = dataclasses.replace(model.compressive, length=slots)
    return dataclasses.replace(model, memory_length=memory, compressive=compressive)


def _windowed(model: ModelConfig, length: int, segment: int) -> ModelConfig:
    """Lets every query see `length` keys, those of earlier segments among them."""
    return dataclasses.replace(model, memory_length=length - 1, window=length)


KINDS: dict[str, Kind] = {
    "none": Kind(lambda memory, segment, position: {}, _same, streams=False),
    "segment": Kind(
        lambda memory, segment, position: {"memory_length": memory.slots},
        _shared,
    ),
    "compressive": Kind(
        lambda memory, segment, position: {
            "memory_length": memory.slots - memory.compressed,
            "compressive": memory.compressive,
        },
        _shared,
    ),
    "window": Kind(
        lambda memory, segment, position: {
            "memory_length": memory.slots,
            "window": memory.slots + 1,
        },
        _windowed,
    ),
    "hierarchical": Kind(
        lambda memory, segment, position: {
            "hierarchy": Hierarchy(max(segment // memory.parts, 1), position)
        },
        _same,
        streams=False,
    ),
}
