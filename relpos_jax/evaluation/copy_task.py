"""A copy task beyond segment memory: kinds of memory of equal size, over seeds."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from relpos_jax import config as configs
from relpos_jax.data.synthetic import DelayedCopy
from relpos_jax.evaluation.memories import KINDS, MemoryConfig
from relpos_jax.models import ModelConfig, TransformerXL
from relpos_jax.positional import make
from relpos_jax.training.config import TrainingConfig
from relpos_jax.training.state import initial, key_for
from relpos_jax.training.step import make_train_call


@dataclasses.dataclass(frozen=True)
class CopyConfig:
    """The task, and which memories are compared.

    Attributes:
      kinds: names of `memories.KINDS`.
      seeds: of parameters and of symbols; each kind is trained with each.
      symbols, stride, distance, segments: see `DelayedCopy`.
      held_out: documents a row that are scored.
    """

    kinds: tuple[str, ...] = ("segment", "compressive")
    seeds: tuple[int, ...] = (0, 1, 2)
    symbols: int = 8
    stride: int = 4
    distance: int = 48
    segments: int = 50
    held_out: int = 2

    def __post_init__(self):
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds or not self.seeds:
            raise ValueError(
                f"task.kinds is {self.kinds} and task.seeds {self.seeds}: take at "
                f"least one seed, and some of {list(KINDS)}"
            )
        if self.held_out < 1:
            raise ValueError(f"task.held_out must be at least 1, got {self.held_out}")


class CopyResult(NamedTuple):
    """How one model did on sequences that were not trained on.

    Attributes:
      kind: of memory.
      seed: of the run.
      accuracy: part of the targets that were the likeliest symbol.
      loss: mean, nats.
      targets: number of them.
      slots: states that the memory keeps.
      reach: tokens behind its segment that they stand for.
    """

    kind: str
    seed: int
    accuracy: float
    loss: float
    targets: int
    slots: int
    reach: int


def run_copy_task(config: configs.Section) -> Iterator[CopyResult]:
    """Trains and tests each kind of memory with each seed, one after the other.

    Args:
      config: sections `task` (`CopyConfig`), `memory` (`MemoryConfig`), `training` and
        `model`, whose `position` is a name.

    Raises:
      ValueError, TypeError: keys that nobody reads, values that make no sense.
    """
    if isinstance(config, ConfigDict):
        config = config.to_dict()
    task = configs.take(config["task"], CopyConfig, "task")
    memory = configs.take(config["memory"], MemoryConfig, "memory")
    training = configs.take(config["training"], TrainingConfig, "training")
    model = dict(config["model"])
    position = make(model.pop("position"))
    given = {"vocabulary": task.symbols + 1, "position": position}
    base = configs.take(model, ModelConfig, "model", **given)
    for kind in task.kinds:
        changes = KINDS[kind].changes(memory, training.length, position)
        for seed in task.seeds:
            yield _model(
                kind,
                dataclasses.replace(base, **changes),
                dataclasses.replace(training, seed=seed),
                task,
            )


def _model(
    kind: str, config: ModelConfig, training: TrainingConfig, task: CopyConfig
) -> CopyResult:
    sizes = (task.symbols, task.stride, task.distance, task.segments)
    data = DelayedCopy(*sizes, training.length, training.batch, training.seed)
    model = TransformerXL(config, key=key_for(training.seed, "parameters"))
    graphdef, params = nnx.split(model)
    memory = model.init_memory(training.batch)
    state = initial(nnx.as_pure(params), training, memory)
    call = make_train_call(graphdef, training)
    for step in range(0, training.steps, training.steps_per_call):
        count = min(training.steps_per_call, training.steps - step)
        stack = data.stack(step, training.steps_per_call)
        state, _ = call(state, stack, jnp.int32(count))

    tests = dataclasses.replace(data, held_out=True)
    stack = tests.stack(0, task.held_out * task.segments)
    sums = np.asarray(_tested(graphdef, state.params, stack), np.float64)
    slots, compressive = config.memory_slots, config.compressive
    more = 0 if compressive is None else compressive.length * (compressive.rate - 1)
    right, loss, targets = sums
    return CopyResult(
        kind,
        training.seed,
        float(right / targets),
        float(loss / targets),
        int(targets),
        slots,
        slots + more,
    )


def _tested(graphdef, params, stack):
    """Returns the number of right answers, the loss and the number of targets."""

    @jax.jit
    def score(params, stack):
        def read(memory, batch):
            model = nnx.merge(graphdef, params)
            logits, memory = model(batch.inputs, batch.at, memory)
            right = jnp.argmax(logits, axis=-1) == batch.targets
            chosen = jax.nn.log_softmax(logits)
            loss = -jnp.take_along_axis(chosen, batch.targets[..., None], axis=-1)
            parts = (right, loss[..., 0], jnp.ones(loss.shape[:2]))
            return memory, jnp.stack([jnp.sum(x * batch.weight) for x in parts])

        memory = nnx.merge(graphdef, params).init_memory(stack.inputs.shape[1])
        return jnp.sum(jax.lax.scan(read, memory, stack)[1], axis=0)

    return score(params, stack)
