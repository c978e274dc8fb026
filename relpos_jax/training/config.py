"""What a training run is told: a frozen dataclass, checked when it is made."""

import dataclasses

from relpos_jax.positional.positions import PositionSampler, limited_sampler


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Length, optimiser, records and seed of one run.

    Attributes:
      steps: optimiser updates; one update sees `batch` rows of `length` tokens.
      batch: rows of a batch.
      length: tokens of a row (the segment length where there is memory).
      learning_rate: the highest learning rate, reached after `warmup` steps.
      warmup: steps over which the rate rises linearly from 0; with more of them than
        `steps`, the run ends on the way up.
      final_learning_rate_fraction: the last step's rate, as a part of the highest;
        between them the rate follows half a cosine. 1 keeps it constant.
      weight_decay: decoupled (AdamW); see `optimiser.decays` for what it spares.
      b1, b2, epsilon: Adam's moments and its denominator's floor.
      clip: largest global norm of a gradient; None leaves gradients as they are.
      steps_per_call: updates in one compiled call, for speed. Another number is another
        compiled program, whose last digits may differ.
      checkpoint_every: steps between checkpoints; the last step always has one.
      keep: how many checkpoints stay on disk.
      log_every: steps between lines of metrics.jsonl; the last step always has one.
      positions: what becomes of the data's positions in training, a name of
        `positional.positions.SAMPLERS`: "given", "randomized", "randomized_float",
        "offset".
      positions_limit: the simulated length of randomized positions, or the highest
        offset.
      seed: initial parameters, order of the data and dropout all follow from it.

    Raises:
      ValueError: a value makes no sense; the message names the field.
    """

    steps: int = 1000
    batch: int = 32
    length: int = 64
    learning_rate: float = 1e-3
    warmup: int = 50
    final_learning_rate_fraction: float = 0.1
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.98
    epsilon: float = 1e-8
    clip: float | None = 1.0
    steps_per_call: int = 10
    checkpoint_every: int = 100
    keep: int = 2
    log_every: int = 10
    positions: str = "given"
    positions_limit: int = 2048
    seed: int = 0

    @property
    def sampler(self) -> PositionSampler:
        """What `positions` and `positions_limit` say."""
        return limited_sampler(self.positions, self.positions_limit)

    def __post_init__(self):
        sampler = self.sampler  # raises for an unknown name

        def require(name: str, allowed: bool, rule: str):
            if not allowed:
                value = getattr(self, name)
                raise ValueError(f"training.{name} must be {rule}, got {value!r}")

        for name in ("steps", "batch", "length", "steps_per_call"):
            require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("checkpoint_every", "keep", "log_every"):
            require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("warmup", "weight_decay", "seed"):
            require(name, getattr(self, name) >= 0, "0 or more")
        for name in ("b1", "b2"):
            require(name, 0 <= getattr(self, name) < 1, "in [0, 1)")
        fraction = self.final_learning_rate_fraction
        require("final_learning_rate_fraction", 0 <= fraction <= 1, "in [0, 1]")
        require("learning_rate", self.learning_rate > 0, "above 0")
        require("epsilon", self.epsilon > 0, "above 0")
        require("clip", self.clip is None or self.clip > 0, "above 0, or None")
        room = self.positions_limit >= self.length or not sampler.whole
        require("positions_limit", room, f"at least training.length ({self.length})")
