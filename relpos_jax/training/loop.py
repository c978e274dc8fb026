"""The training loop: resumes by itself, and gives the numbers of an unbroken run."""

import json
import math
import os
import pathlib
import platform
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx
from jaxtyping import PyTree
from tqdm import tqdm

from relpos_jax import config as configs
from relpos_jax import data
from relpos_jax.config import RunConfig
from relpos_jax.models.decoder import TransformerXL
from relpos_jax.positional.positions import PositionSampler
from relpos_jax.training import optimiser
from relpos_jax.training.checkpoints import Checkpoints
from relpos_jax.training.config import TrainingConfig
from relpos_jax.training.state import initial, key_for
from relpos_jax.training.step import make_train_call
from relpos_jax.training.writers import Writer

# What a resumed run may change: none of it changes a number.
_FREE = ("checkpoint_every", "keep", "log_every")


class TrainResult(NamedTuple):
    """A trained model.

    Attributes:
      graphdef: the model without its parameters.
      params: its parameters; `nnx.merge(graphdef, params)` is the model.
      step: the updates that they have seen.
    """

    graphdef: nnx.GraphDef
    params: PyTree
    step: int

    @property
    def model(self) -> TransformerXL:
        """The model with its parameters."""
        return nnx.merge(self.graphdef, self.params)


def train(
    run: RunConfig,
    workdir: str | os.PathLike,
    *,
    corpus: data.Corpus | None = None,
    progress: bool = True,
    label: str = "",
    stop_after: int | None = None,
    on_eval: Callable[[TrainResult], Mapping[str, float] | None] | None = None,
) -> TrainResult:
    """Trains a model, or goes on training it where `workdir` says that it stopped.

    Writes `config.json`, `metrics.jsonl`, `tensorboard/` and `checkpoints/` into
    `workdir`. However often and wherever a run is killed and started again, its
    parameters are those of an unbroken run, bit for bit, on the same machine. SIGTERM
    saves a checkpoint and leaves with status 143.

    Args:
      run: what to train. A resumed run may change how often it logs and saves, and
        nothing else: not `steps`, on which every step's learning rate depends, nor
        `steps_per_call`, with which it would be another compiled program.
      workdir: the run's folder; is made where it doesn't exist.
      corpus: the text, where the caller has loaded it; else `run.data` says it.
      progress: shows a bar with loss, tokens per second and the time left.
      label: stands before the bar.
      stop_after: stops, with a checkpoint, once this many steps are done.
      on_eval: is called at each checkpoint with the model so far, whose parameters it
        must not keep; the floats it returns join that step's line of `metrics.jsonl`.

    Returns:
      The model after the last step.

    Raises:
      ValueError: `workdir` holds a run with another config; names the keys.
      FloatingPointError: the loss or the gradient isn't finite; names the step. The
        last checkpoint is from before it.
    """
    workdir = pathlib.Path(workdir)
    if corpus is None:
        corpus = data.load(
            run.data.source,
            held_out_fraction=run.data.held_out_fraction,
            max_bytes=run.data.max_bytes,
        )
    batches = make_batches(run, corpus)
    training = run.training
    last = training.steps if stop_after is None else min(stop_after, training.steps)
    workdir.mkdir(parents=True, exist_ok=True)

    with Checkpoints(workdir / "checkpoints", keep=training.keep) as checkpoints:
        facts = {"name": corpus.name, "size": corpus.size, "sha256": corpus.sha256}
        _claim(run, workdir, facts, resuming=bool(checkpoints.steps()))
        model = TransformerXL(run.model, key=key_for(training.seed, "parameters"))
        graphdef, params = nnx.split(model)
        params = nnx.as_pure(params)  # arrays without nnx.Param around each
        memory = model.init_memory(training.batch)
        state = initial(params, optimiser.build(training), memory)
        restored = checkpoints.restore_newest(state)
        step = 0
        if restored is not None:
            step, state = restored
        call = make_train_call(graphdef, training)
        key = key_for(training.seed, "dropout") if run.model.dropout else None
        positions = None
        if training.sampler != PositionSampler():
            positions = key_for(training.seed, "positions")
        with (
            Writer(workdir, step) as writer,
            _Bar(training, step, label, progress) as bar,
            _Terminated() as terminated,
        ):
            while step < last:
                after = next_stop(step, training, last)
                stack = batches.stack(step, training.steps_per_call)
                bar.start()
                state, report = call(state, stack, after - step, key, positions)
                report = jax.device_get(report)
                lines = _lines(report, step, after, bar.stop(after - step), checkpoints)
                bar.show(lines)
                saves = after == last or after % training.checkpoint_every == 0
                if saves and on_eval is not None:
                    found = on_eval(TrainResult(graphdef, state.params, after))
                    lines[-1] |= found or {}
                for line in lines:
                    number = line.pop("step")
                    whole = number % training.log_every == 0 or number == training.steps
                    if whole or (number == after and saves and on_eval is not None):
                        writer.write(number, line)
                step = after
                leaves = terminated.now  # read once: it may come at any moment
                if saves or leaves:
                    writer.flush()
                    checkpoints.save(step, state)
                if leaves:
                    raise SystemExit(128 + signal.SIGTERM)
    return TrainResult(graphdef, state.params, step)


def make_batches(run: RunConfig, corpus: data.Corpus) -> data.Lanes | data.Windows:
    """Returns the batches of the training part, as `run.data.order` says."""
    training = run.training
    sizes = (corpus.train, training.batch, training.length)
    if run.data.order == "lanes":
        return data.Lanes(*sizes)
    return data.Windows(*sizes, seed=training.seed)


def next_stop(step: int, training: TrainingConfig, last: int) -> int:
    """Returns the step at which the call that starts at `step` ends.

    At the next multiple of `steps_per_call` or of `checkpoint_every`, whichever comes
    first, or at `last`.
    """
    sizes = (training.steps_per_call, training.checkpoint_every)
    return min(last, *((step // size + 1) * size for size in sizes))


def _claim(run: RunConfig, workdir: pathlib.Path, corpus: dict, resuming: bool) -> None:
    """Writes config.json, or raises if the checkpoints are of another run."""
    path = workdir / "config.json"
    here = configs.resolved(run) | {"corpus": corpus}
    if resuming and path.exists():
        there = json.loads(path.read_text())
        there.pop("versions", None)
        found = [
            line
            for line in configs.differences(there, here)
            if line.split(":")[0] not in {f"training.{name}" for name in _FREE}
        ]
        if found:
            raise ValueError(
                f"{workdir} holds a run with another config:\n  "
                + "\n  ".join(found)
                + "\nUse the config it was started with, or another workdir."
            )
    versions = {"python": platform.python_version(), "jax": jax.__version__}
    configs.write_resolved(run, workdir, corpus=corpus, versions=versions)


def _lines(report, before: int, after: int, seconds: float, checkpoints) -> list[dict]:
    """Returns a call's metrics, one dict a step, all checked to be finite."""
    lines = []
    for index in range(after - before):
        step = before + index + 1
        count = float(report.count[index])
        loss = float(report.loss[index]) / max(count, 1.0)
        norm = float(report.grad_norm[index])
        for what, value in (("loss", loss), ("norm of the gradient", norm)):
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"the {what} of step {step} is {value}; {_last(checkpoints)}. A "
                    "lower training.learning_rate or training.clip, or a longer "
                    "training.warmup, may help."
                )
        lines.append(
            {
                "step": step,
                "loss": loss,
                "bits_per_byte": loss / math.log(2),  # a token is a byte
                "learning_rate": float(report.learning_rate[index]),
                "grad_norm": norm,
                "tokens": int(count),
                "tokens_per_second": count * (after - before) / seconds,
            }
        )
    return lines


def _last(checkpoints: Checkpoints) -> str:
    steps = checkpoints.steps()
    if not steps:
        return "there is no checkpoint from before it"
    return f"the checkpoint of step {steps[-1]}, from before it, is kept"


class _Bar:
    """A progress bar, and the clock of the calls."""

    def __init__(self, training: TrainingConfig, step: int, label: str, shown: bool):
        self._bar = tqdm(
            total=training.steps,
            initial=step,
            desc=label or None,
            unit="step",
            disable=not shown,
            dynamic_ncols=True,
        )

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self, steps: int) -> float:
        self._bar.update(steps)
        return max(time.perf_counter() - self._began, 1e-9)

    def show(self, lines: list[dict]) -> None:
        speed = f"{lines[-1]['tokens_per_second']:,.0f}"
        self._bar.set_postfix({"loss": f"{lines[-1]['loss']:.3f}", "tokens/s": speed})


class _Terminated:
    """Remembers that SIGTERM came, instead of dying of it, while it is entered."""

    def __init__(self):
        self.now = False
        self._before: Any = None

    def __enter__(self) -> "_Terminated":
        # Handlers can be set from the main thread only; elsewhere SIGTERM just kills.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, *_) -> None:
        self.now = True
