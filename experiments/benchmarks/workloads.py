"""Sizes of the training steps that are compared: a byte language model and Adam."""

import dataclasses

import numpy as np

LEARNING_RATE = 1e-4
ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A training step, with segment memory."""

    batch: int
    length: int
    memory: int
    layers: int = 4
    width: int = 256
    heads: int = 4
    feedforward: int = 1024
    vocabulary: int = 256
    dtype: str = "float32"

    @property
    def tokens(self) -> int:
        """Targets of one step."""
        return self.batch * self.length

    @property
    def operations(self) -> float:
        """Floating-point operations of the products that Transformer-XL needs.

        Pairs that a causal mask leaves, forward and (twice as many) backward, without
        the gradients of memory, which get none.
        """
        new, old, width = self.tokens, self.batch * self.memory, self.width
        pairs = self.batch * self.length * (self.memory + (self.length + 1) / 2)
        layer = 2 * new * width * (4 * width + 2 * self.feedforward)  # q k v o, ff
        # Memory's keys and values, forward and for their weights' gradient.
        layer += (2 / 3) * 2 * old * width * 2 * width
        layer += 2 * (self.length + self.memory) * width * width  # W_R
        layer += 3 * 2 * pairs * width  # content, position, values
        return 3 * (self.layers * layer + 2 * new * width * self.vocabulary)

    def bytes(self, steps: int) -> np.ndarray:
        """Returns `[steps, batch, length + 1]` made-up bytes."""
        shape = (steps, self.batch, self.length + 1)
        return np.random.default_rng(0).integers(0, self.vocabulary, shape)


WORKLOADS = {
    "W1": Workload(batch=16, length=128, memory=128),
    "W2": Workload(batch=4, length=512, memory=512),
    "tiny": Workload(2, 16, 16, layers=2, width=32, heads=2, feedforward=64),
}
