"""What is evaluated: lengths, protocols, and how much text each of them scores."""

import dataclasses

from relpos_jax.evaluation import windows
from relpos_jax.positional.positions import PositionSampler, limited_sampler

PROTOCOLS = ("non_overlapping", "same_targets", "sliding", "memory")


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """What is evaluated, and on how many tokens.

    Attributes:
      multiples: lengths, as multiples of the training length.
      protocols: some of `PROTOCOLS`.
      non_overlapping_tokens: targets scored, from the text's beginning; 0: all.
      same_targets_tokens: targets scored, spread over the text.
      sliding_tokens: targets scored, from the text's beginning; 0: all.
      memory_tokens: targets scored, from the text's beginning; 0: all.
      group_fraction: `same_targets` scores the last `training length / group_fraction`
        tokens of a window.
      stride_fraction: `sliding` moves by `length / stride_fraction`.
      memory_lanes: stretches of text that `memory` reads side by side; those after the
        first fill their memory with what stands before them, so one lane reads least.
      tokens_per_batch: tokens in a call; the batch is this over the length.
      positions, positions_limit: what becomes of the positions of each window, as in
        `TrainingConfig`. Models trained with randomized positions are tested with them
        too (Ruoss et al. 2023); the draws are the same in every evaluation.
    """

    multiples: tuple[int | float, ...] = (1, 1.25, 1.5, 2, 4, 8, 16, 32)
    protocols: tuple[str, ...] = PROTOCOLS
    non_overlapping_tokens: int = 65536
    same_targets_tokens: int = 2048
    sliding_tokens: int = 16384
    memory_tokens: int = 32768
    group_fraction: int = 4
    stride_fraction: int = 8
    memory_lanes: int = 1
    tokens_per_batch: int = 8192
    positions: str = "given"
    positions_limit: int = 2048

    @property
    def sampler(self) -> PositionSampler:
        """What `positions` and `positions_limit` say."""
        return limited_sampler(self.positions, self.positions_limit)

    def __post_init__(self):
        self.sampler  # raises for an unknown name
        unknown = [name for name in self.protocols if name not in PROTOCOLS]
        if unknown or not self.protocols:
            raise ValueError(
                f"evaluation.protocols has {unknown}: take some of {PROTOCOLS}"
            )
        if not self.multiples or min(self.multiples) <= 0:
            raise ValueError(
                f"evaluation.multiples is {self.multiples}: needs positive numbers"
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name.endswith("_tokens") else 1
            if field.name == "same_targets_tokens":
                least = 1
            if isinstance(value, int) and value < least:
                raise ValueError(
                    f"evaluation.{field.name} is {value}: must be at least {least}"
                )

    def lengths(self, train_length: int) -> tuple[int, ...]:
        """Returns the lengths in tokens, ascending, without repetition."""
        return tuple(sorted({max(1, round(m * train_length)) for m in self.multiples}))

    def needed(self, train_length: int) -> int:
        """Returns how many tokens the text needs for the longest window."""
        return self.lengths(train_length)[-1] + 1


def plan_windows(
    protocol: str, size: int, length: int, train_length: int, config: EvaluationConfig
) -> windows.Plan:
    """Returns what a protocol without memory scores at one length.

    Args:
      protocol: one of `PROTOCOLS`, but "memory".
      size: tokens in the text.
      length: tokens in a window.
      train_length: tokens in a training window.
      config: what is evaluated.
    """
    if protocol == "non_overlapping":
        size = limited(size, config.non_overlapping_tokens)
        return windows.non_overlapping(size, length)
    if protocol == "sliding":
        stride = max(1, length // config.stride_fraction)
        return windows.sliding(limited(size, config.sliding_tokens), length, stride)
    lengths = config.lengths(train_length)
    group = min(max(1, train_length // config.group_fraction), lengths[0])
    count = max(1, config.same_targets_tokens // group)
    return windows.same_targets(size, length, lengths[-1], group, count)


def limited(size: int, targets: int) -> int:
    """Returns the tokens to read for so many targets; 0 targets are all."""
    return min(size, targets + 1) if targets else size
