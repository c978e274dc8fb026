"""What a training run is told: a frozen dataclass, checked when it is made."""

import dataclasses
import re

from relpos_jax.positional.positions import PositionSampler, limited_sampler

_CHOICES = {
    "optimiser": ("adamw", "adam", "lamb", "adafactor", "muon"),
    "loss": ("full", "half"),
    "nonfinite": ("raise", "skip"),
}


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
      optimiser: "adamw", "adam", "lamb", "adafactor" or "muon"; see `optimiser.build`.
      weight_decay: decoupled, times the learning rate; see `optimiser.decays` for what
        it spares. Adam has none: 0.
      b1, b2, epsilon: Adam's moments and its denominator's floor (LAMB's too, and those
        of what Muon leaves to Adam).
      clip: largest global norm of a gradient; None leaves gradients as they are.
      loss: which targets count: "full", all; "half", those in the second half of each
        row, which have more context (the ablation of Dai et al. 2019, table 6).
      accumulate: micro-batches that an update is cut into, for memory; `batch` is all
        of them together. Their sums are divided by the whole batch's count of targets,
        so only rounding and dropout's masks differ from 1.
      gradient_depth: segments before this one that its loss' gradient goes through,
        by way of the memory; 0: none (Dai et al. 2019, section 3.2). Each costs a
        forward and a backward pass more.
      ema: decay of a moving average of the parameters, which starts at their first
        values and is evaluated and exported instead of them; None for none.
      nonfinite: what a loss or a gradient that isn't finite does: "raise", ends the
        run; "skip", leaves parameters and optimiser as they were and goes on with the
        next batch.
      max_skipped: updates in a row that may be skipped; one more ends the run.
      steps_per_call: updates in one compiled call, for speed. Another number is another
        compiled program, whose last digits may differ.
      checkpoint_every: steps between checkpoints; the last step always has one.
      keep: how many checkpoints stay on disk.
      log_every: steps between lines of metrics.jsonl; the last step always has one.
      eval_every: steps between evaluations on held-out text (see `Validation`), whose
        loss joins the step's line; None for none.
      eval_tokens: held-out targets of an evaluation, at most; whole batches are taken.
      keep_best: keeps the parameters with the lowest held-out loss in `best/`.
      profile: `start:stop`, steps whose calls are traced by JAX's profiler into
        `profile/`: from the end of step `start` to that of `stop`; None for none.
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
    optimiser: str = "adamw"
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.98
    epsilon: float = 1e-8
    clip: float | None = 1.0
    loss: str = "full"
    accumulate: int = 1
    gradient_depth: int = 0
    ema: float | None = None
    nonfinite: str = "raise"
    max_skipped: int = 5
    steps_per_call: int = 10
    checkpoint_every: int = 100
    keep: int = 2
    log_every: int = 10
    eval_every: int | None = None
    eval_tokens: int = 65536
    keep_best: bool = True
    profile: str | None = None
    positions: str = "given"
    positions_limit: int = 2048
    seed: int = 0

    @property
    def sampler(self) -> PositionSampler:
        """What `positions` and `positions_limit` say."""
        return limited_sampler(self.positions, self.positions_limit)

    @property
    def profiled(self) -> tuple[int, int] | None:
        """What `profile` says, as two numbers of steps done."""
        if self.profile is None:
            return None
        start, stop = self.profile.split(":")
        return int(start), int(stop)

    def program(self) -> "TrainingConfig":
        """Returns the same without what the compiled step doesn't depend on.

        Equal programs are compiled once.
        """
        free = {"seed": 0, "checkpoint_every": 1, "keep": 1, "log_every": 1}
        free |= {"eval_every": None, "eval_tokens": 1, "keep_best": True}
        return dataclasses.replace(self, **free, profile=None, max_skipped=0)

    def __post_init__(self):
        sampler = self.sampler  # raises for an unknown name

        def require(name: str, allowed: bool, rule: str):
            if not allowed:
                value = getattr(self, name)
                raise ValueError(f"training.{name} must be {rule}, got {value!r}")

        for name in ("steps", "batch", "length", "steps_per_call", "accumulate"):
            require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("checkpoint_every", "keep", "log_every", "eval_tokens"):
            require(name, getattr(self, name) >= 1, "at least 1")
        for name, known in _CHOICES.items():
            require(name, getattr(self, name) in known, f"one of {known}")
        for name in ("warmup", "weight_decay", "seed", "gradient_depth", "max_skipped"):
            require(name, getattr(self, name) >= 0, "0 or more")
        for name in ("b1", "b2"):
            require(name, 0 <= getattr(self, name) < 1, "in [0, 1)")
        fraction = self.final_learning_rate_fraction
        require("final_learning_rate_fraction", 0 <= fraction <= 1, "in [0, 1]")
        require("learning_rate", self.learning_rate > 0, "above 0")
        require("epsilon", self.epsilon > 0, "above 0")
        require("clip", self.clip is None or self.clip > 0, "above 0, or None")
        require("ema", self.ema is None or 0 <= self.ema < 1, "in [0, 1), or None")
        every = self.eval_every
        require("eval_every", every is None or every >= 1, "at least 1, or None")
        cut = self.batch % self.accumulate == 0
        require("accumulate", cut, f"a divisor of training.batch ({self.batch})")
        decay = self.optimiser != "adam" or not self.weight_decay
        rule = "0 for optimiser 'adam', which has none (take 'adamw')"
        require("weight_decay", decay, rule)
        steps = self.profile is None or re.fullmatch(r"\d+:\d+", self.profile)
        require("profile", bool(steps), "two numbers of steps, '20:30', or None")
        if self.profiled is not None:
            start, stop = self.profiled
            require("profile", start < stop, "'start:stop' with start below stop")
        room = self.positions_limit >= self.length or not sampler.whole
        require("positions_limit", room, f"at least training.length ({self.length})")
