"""What a training step minimises: a seam between models and the step.

A step knows an objective by its call alone. `NextToken` is the default; an encoder with
masked tokens, or anything else that scores tokens, is another frozen dataclass with the
same call, given to `loop.train`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from relpos_jax.training.losses import Sums, weighted


class Auxiliary(NamedTuple):
    """A further loss that is minimised with the main one.

    Attributes:
      sums: its sum, and the count that the sum is divided by.
      weight: what its mean is multiplied by in the total. With 0 it is only reported.
    """

    sums: Sums
    weight: float | jax.Array = 1.0


class Outcome(NamedTuple):
    """What one batch gives.

    The counts may depend on the batch and on the memory, not on the parameters.

    Attributes:
      sums: the main loss, nats, and the number of targets.
      memory: the memory after the batch.
      auxiliary: name to a further loss; the names become metrics.
    """

    sums: Sums
    memory: Any
    auxiliary: Mapping[str, Auxiliary]


@runtime_checkable
class Objective(Protocol):
    """A frozen dataclass or a function, hashable: equal ones share a program."""

    def __call__(
        self,
        model: Any,
        batch: Any,
        memory: Any,
        *,
        key: jax.Array | None,
        spacing: str,
    ) -> Outcome:
        """Returns the losses of a batch as sums.

        Args:
          model: the module with the step's parameters.
          batch: `[b t]`; its positions are those that the step trains on.
          memory: what the batch looks back on.
          key: this step's key for dropout and whatever else the objective draws; None
            where the model drops nothing and `draws` isn't set.
          spacing: what is known of the batch's positions; see `TransformerXL`.
        """


@dataclasses.dataclass(frozen=True)
class NextToken:
    """The cross-entropy of the next token, as `model.losses` gives it.

    `model.losses` returns token losses and memory, and, if it has further losses, a
    third value: a dict of `Auxiliary`. What compressive memory loses is "compression".
    """

    draws = False  # an objective with True gets a key whatever the model's dropout

    def __call__(self, model, batch, memory, *, key, spacing) -> Outcome:
        compressive = getattr(getattr(model, "config", None), "compressive", None)
        compresses = compressive is not None and compressive.loss is not None
        found = model.losses(
            batch.inputs,
            batch.targets,
            batch.at,
            memory,
            weight=batch.weight,
            key=key,
            spacing=spacing,
            **({"auxiliary": True} if compresses else {}),
        )
        losses, memory, *more = found
        further = dict(*more)
        if compresses:
            sums = Sums(*memory.auxiliary)
            further["compression"] = Auxiliary(sums, compressive.loss_weight)
        return Outcome(weighted(losses, batch.weight), memory, further)


@dataclasses.dataclass(frozen=True)
class Transduction:
    """The cross-entropy of an encoder-decoder's targets; batches are `Pairs`."""

    draws = False

    def __call__(self, model, batch, memory, *, key, spacing) -> Outcome:
        losses = model.losses(
            batch.source,
            batch.source_at,
            batch.inputs,
            batch.targets,
            batch.at,
            weight=batch.weight,
            key=key,
            spacing=spacing,
        )
        return Outcome(weighted(losses, batch.weight), memory, {})
