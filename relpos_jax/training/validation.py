"""Held-out loss while training, and the parameters that had the lowest.

A quick look, for choosing: `experiments.evaluate` has the protocols.
"""

import functools
import json
import math
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from relpos_jax import config as configs
from relpos_jax.config import RunConfig
from relpos_jax.data import Bytes, Vocabulary, saved
from relpos_jax.data.vocabulary import metric
from relpos_jax.training import writers
from relpos_jax.training.checkpoints import Checkpoints
from relpos_jax.training.losses import Sums
from relpos_jax.training.objectives import Objective
from relpos_jax.training.placement import Placement
from relpos_jax.training.state import key_for

LOSS = "held_out_loss"
_CALL = 16  # batches of a compiled call


class Validation:
    """The objective on the same held-out batches each time, without dropout.

    The batches are made like the training's, of the same size: lanes through the text
    from an empty memory, or windows. Whole batches are taken until `eval_tokens`
    targets are reached, or the text ends.

    Args:
      batches: of the held-out text, `data.Lanes` or `data.Windows`.
      graphdef: the model without its parameters.
      tokens: targets to score, at most.
      objective: what is minimised in training.
      placement: where arrays live.
      vocabulary: names the loss in its unit as well.
    """

    def __init__(
        self,
        batches: Any,
        graphdef: nnx.GraphDef,
        tokens: int,
        objective: Objective,
        placement: Placement = Placement(),
        vocabulary: Vocabulary = Bytes(),
    ):
        self._batches, self._placement = placement.share(batches), placement
        self._vocabulary = vocabulary
        wanted = -(-tokens // batches.tokens_per_step)
        self._steps = min(wanted, batches.steps_per_epoch)
        self._call, self._memory = _calls(graphdef, objective, batches.batch_size)
        self._key = None
        if getattr(objective, "draws", False):
            self._key = key_for(0, "validation")

    def __call__(self, params: PyTree) -> dict[str, float]:
        """Returns the mean loss of all targets together, in nats and in its unit."""
        memory, size = self._memory(params), min(_CALL, self._steps)
        loss = count = 0.0
        for step in range(0, self._steps, size):
            stack = self._placement.batch(self._batches.stack(step, size))
            left = self._steps - step
            memory, sums = self._call(params, memory, stack, left, self._key)
            sums = jax.device_get(sums)
            loss += float(np.sum(sums.loss, dtype=np.float64))
            count += float(np.sum(sums.count, dtype=np.float64))
        mean = loss / max(count, 1.0)
        named = metric(self._vocabulary, mean)
        return {LOSS: mean} | {f"held_out_{name}": x for name, x in named.items()}


@functools.lru_cache(maxsize=16)
def _calls(graphdef: nnx.GraphDef, objective: Objective, batch: int):
    @jax.jit
    def call(params, memory, batches, count, key):
        def score(memory, batch):
            model = nnx.merge(graphdef, params)
            found = objective(model, batch, memory, key=key, spacing="unit")
            return found.memory, found.sums

        def skip(memory, batch):
            return memory, Sums(jnp.float32(0), jnp.float32(0))

        def body(memory, item):
            index, batch = item
            return jax.lax.cond(index < count, score, skip, memory, batch)

        indices = jnp.arange(batches.inputs.shape[0])
        return jax.lax.scan(body, memory, (indices, batches))

    @jax.jit
    def memory(params):
        return nnx.merge(graphdef, params).init_memory(batch)

    return call, memory


class Best:
    """The parameters of the lowest held-out loss so far, in `workdir/best`.

    That folder is like one of imported parameters, so it is a `--workdir` for
    evaluation, generation and transplants. What was lowest is read from the metrics,
    which end where the run resumes; so a resumed run keeps what an unbroken one does.

    Args:
      run: what is trained.
      workdir: the run's folder.
      step: the step at which the run starts or resumes.
      placement: decides for all processes.
      vocabulary: saved beside the parameters.
    """

    def __init__(
        self,
        run: RunConfig,
        workdir: pathlib.Path,
        step: int,
        placement: Placement,
        vocabulary: Vocabulary,
    ):
        self._run, self._folder = run, workdir / "best"
        self._placement, self._vocabulary = placement, vocabulary
        path = workdir / "metrics.jsonl"
        lines = writers.read(path) if path.exists() else []
        found = [x[LOSS] for x in lines if LOSS in x and x["step"] <= step]
        self._lowest = min((x for x in found if math.isfinite(x)), default=math.inf)

    def offer(self, step: int, loss: float, params: PyTree) -> None:
        """Keeps the parameters if the loss is the lowest so far."""
        if not self._placement.any(loss < self._lowest):
            return
        self._lowest = loss
        with Checkpoints(self._folder / "checkpoints", keep=1) as checkpoints:
            # A run that was killed behind it and resumed before it has it already.
            if step not in checkpoints.steps():
                checkpoints.save(step, {"params": params})
        if self._placement.writes:
            of = {"best_of": str(self._folder.parent), "step": step, LOSS: loss}
            text = {"model": configs.resolved(self._run.model), "imported": of}
            draft = self._folder / "config.json.tmp"
            draft.write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")
            os.replace(draft, self._folder / "config.json")
            saved.claim(self._folder, self._vocabulary, resuming=False)
