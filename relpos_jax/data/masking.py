"""What encoders learn from: masked tokens (BERT), and corrupted spans (T5).

Draws are pure functions of integers: the same seed, step and row give the same tokens
masked, on any machine and however rows are dealt to processes.
"""

import dataclasses

import jax
import numpy as np
from jaxtyping import Bool, Float32, Int32, Integer

from relpos_jax.data.batches import Batch, Lanes, Windows


@dataclasses.dataclass(frozen=True)
class Masking:
    """How tokens are hidden from an encoder (Devlin et al. 2019, section 3.1).

    Attributes:
      mask_id: the id that stands for a hidden token; ids below it are the others.
      fraction: of the tokens, each drawn for itself, that have to be predicted.
      hidden: part of those that become `mask_id`.
      replaced: part of those that become any id; the rest stays as it is.

    Raises:
      ValueError: no id below the mask, or fractions outside [0, 1].
    """

    mask_id: int
    fraction: float = 0.15
    hidden: float = 0.8
    replaced: float = 0.1

    def __post_init__(self):
        if self.mask_id < 1:
            raise ValueError(f"mask_id must be above 0, got {self.mask_id}")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1], got {self.fraction}")
        if min(self.hidden, self.replaced, 1 - self.hidden - self.replaced) < -1e-9:
            raise ValueError(
                f"hidden and replaced must be parts of the chosen tokens, got "
                f"{self.hidden} and {self.replaced}"
            )


def mask_tokens(
    masking: Masking,
    generator: np.random.Generator,
    tokens: Integer[np.ndarray, "*b t"],
    real: Bool[np.ndarray, "*b t"],
) -> tuple[Int32[np.ndarray, "*b t"], Float32[np.ndarray, "*b t"]]:
    """Returns what the encoder reads, and 1 where it has to predict, else 0.

    Args:
      masking: which part of the tokens, and what becomes of them.
      generator: where the draws come from.
      tokens: ids below `mask_id`.
      real: False for padding, which is never chosen.
    """
    chosen = (generator.random(tokens.shape) < masking.fraction) & real
    fate = generator.random(tokens.shape)
    other = generator.integers(masking.mask_id, size=tokens.shape)
    inputs = np.where(chosen & (fate < masking.hidden), masking.mask_id, tokens)
    replaced = (fate >= masking.hidden) & (fate < masking.hidden + masking.replaced)
    inputs = np.where(chosen & replaced, other, inputs)
    return inputs.astype(np.int32), chosen.astype(np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Masked:
    """The batches of an encoder: those of a text, some of their tokens hidden.

    Targets are the tokens themselves, of the same place; the weight is 1 where one was
    chosen. Every epoch hides others.

    Attributes:
      batches: of the text.
      masking: how tokens are hidden.
      seed: of the draws; not negative.
    """

    batches: Lanes | Windows
    masking: Masking
    seed: int

    @property
    def batch_size(self) -> int:
        """Rows of a batch, of all processes together."""
        return self.batches.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which the text is read once."""
        return self.batches.steps_per_epoch

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens read in a step, of all processes together."""
        return self.batches.tokens_per_step

    def sharded(self, process_index: int, process_count: int) -> "Masked":
        """Returns the same batches for one process of several: see `Lanes.sharded`."""
        own = self.batches.sharded(process_index, process_count)
        return dataclasses.replace(self, batches=own)

    def batch(self, step: int) -> Batch:
        """Returns the batch `[b t]` of a step, counted from 0 through all epochs.

        Raises:
          ValueError: the step is negative.
        """
        batch = self.batches.batch(step)
        first = self.batches.process_index * len(batch.inputs)
        inputs, weight = [], []
        for row, (tokens, counts) in enumerate(
            zip(batch.inputs, batch.at.segment != 0, strict=True), start=first
        ):
            generator = np.random.default_rng([self.seed, step, row])
            read, chosen = mask_tokens(self.masking, generator, tokens, counts)
            inputs.append(read)
            weight.append(chosen)
        return Batch(np.stack(inputs), batch.inputs, batch.at, np.stack(weight))

    def stack(self, first_step: int, count: int) -> Batch:
        """Returns the batches of `count` steps from `first_step` on, `[s b t]`.

        Raises:
          ValueError: `first_step` is negative or `count` is not positive.
        """
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        batches = [self.batch(first_step + step) for step in range(count)]
        return jax.tree.map(lambda *parts: np.stack(parts), *batches)


def corrupt_spans(
    generator: np.random.Generator,
    tokens: Integer[np.ndarray, " t"],
    *,
    sentinel: int,
    fraction: float = 0.15,
    mean_span: float = 3.0,
) -> tuple[Int32[np.ndarray, " i"], Int32[np.ndarray, " o"]]:
    """Returns a text with holes, and what was in them (Raffel et al. 2020, 3.1.4).

    Each hole is one sentinel, `sentinel`, `sentinel - 1`, ... in order; the targets are
    each sentinel followed by its span. The lengths of both depend on the text's length
    alone, so rows of one length stack.

    Args:
      generator: where the draws come from.
      tokens: `[t]`, ids below all sentinels.
      sentinel: the first sentinel's id, the highest.
      fraction: of the tokens that are taken out.
      mean_span: mean length of a hole.

    Raises:
      ValueError: a text too short for one hole and something around it.
    """
    length = len(tokens)
    taken = min(max(round(length * fraction), 1), length - 1)
    spans = max(round(taken / mean_span), 1)
    if length < 2 or length - taken < spans:
        raise ValueError(
            f"{length} tokens have no room for {spans} spans of {taken} tokens in all"
        )

    def parts(total):
        """Lengths of `spans` parts, none of them empty, all ways alike."""
        cuts = generator.permutation(total - 1)[: spans - 1] + 1
        return np.diff([0, *sorted(cuts), total])

    kept, gone = parts(length - taken), parts(taken)
    inputs, targets, start = [], [], 0
    for number, (before, hole) in enumerate(zip(kept, gone, strict=True)):
        mark = [sentinel - number]
        inputs += [tokens[start : start + before], mark]
        targets += [mark, tokens[start + before : start + before + hole]]
        start += before + hole
    return tuple(np.concatenate(x).astype(np.int32) for x in (inputs, targets))
