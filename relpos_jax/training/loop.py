"""The training loop: resumes by itself, and gives the numbers of an unbroken run."""

import os
import pathlib
import signal
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from flax import nnx
from jaxtyping import PyTree

from relpos_jax import data
from relpos_jax.config import RunConfig
from relpos_jax.data import saved
from relpos_jax.data.masking import Masked, Masking
from relpos_jax.models import TransformerXL, build
from relpos_jax.positional.positions import PositionSampler
from relpos_jax.training import folder, optimiser
from relpos_jax.training.checkpoints import Checkpoints
from relpos_jax.training.config import TrainingConfig
from relpos_jax.training.objectives import NextToken, Objective
from relpos_jax.training.placement import Placement
from relpos_jax.training.sharded import placement_of
from relpos_jax.training.state import TrainState, initial, key_for
from relpos_jax.training.step import make_train_call
from relpos_jax.training.watch import Bar, Terminated
from relpos_jax.training.writers import Writer


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
    objective: Objective = NextToken(),
    placement: Placement | None = None,
) -> TrainResult:
    """Trains a model, or goes on training it where `workdir` says that it stopped.

    Writes `config.json`, `vocabulary.json`, `metrics.jsonl`, `tensorboard/` and
    `checkpoints/` into `workdir`. However often and wherever a run is killed and
    started again, its parameters are those of an unbroken run, bit for bit, on the same
    machine. SIGTERM saves a checkpoint and leaves with status 143.

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
      objective: what a step minimises.
      placement: where arrays live, and what this process reads and writes; None for
        what `run.mesh` says.

    Returns:
      The model after the last step.

    Raises:
      ValueError: `workdir` holds a run with another config (names the keys) or another
        vocabulary; or the vocabulary's size isn't the model's.
      FloatingPointError: the loss or the gradient isn't finite; names the step. The
        last checkpoint is from before it.
    """
    if placement is None:
        placement = placement_of(run)
    with placement.context():
        return _train(
            run,
            pathlib.Path(workdir),
            load_corpus(run) if corpus is None else corpus,
            placement,
            objective,
            bar={"label": label, "shown": progress and placement.writes},
            stop_after=stop_after,
            on_eval=on_eval,
        )


def _train(run, workdir, corpus, placement, objective, *, bar, stop_after, on_eval):
    training, vocabulary = run.training, corpus.vocabulary
    saved.check_size(vocabulary, run.model.vocabulary - run.model.bidirectional)
    batches = placement.share(make_batches(run, corpus))
    last = training.steps if stop_after is None else min(stop_after, training.steps)
    workdir.mkdir(parents=True, exist_ok=True)

    with Checkpoints(workdir / "checkpoints", keep=training.keep) as checkpoints:
        if placement.writes:
            facts = {"name": corpus.name, "size": corpus.size, "sha256": corpus.sha256}
            resuming = bool(checkpoints.steps())
            folder.claim(run, workdir, facts, resuming=resuming)
            saved.claim(workdir, vocabulary, resuming=resuming)
        shapes = nnx.eval_shape(lambda: _model(run))
        graphdef = nnx.split(shapes)[0]
        state = placement.state(lambda: initial_state(run))
        restored = checkpoints.restore_newest(state)
        step = 0
        if restored is not None:
            step, state = restored
        call = make_train_call(graphdef, training, objective, placement)
        keys = step_keys(run, objective)
        with (
            Writer(workdir, step, writes=placement.writes) as writer,
            Bar(training, step, **bar) as shown,
            Terminated() as terminated,
        ):
            while step < last:
                after = next_stop(step, training, last)
                stack = placement.batch(batches.stack(step, training.steps_per_call))
                shown.start()
                state, report = call(state, stack, after - step, *keys)
                report = jax.device_get(report)
                seconds = shown.stop(after - step)
                lines = folder.lines_of(
                    report, step, after, seconds, checkpoints.steps(), vocabulary
                )
                shown.show(lines[-1])
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
                leaves = placement.any(terminated.now)  # once: it may come any moment
                if saves or leaves:
                    writer.flush()
                    checkpoints.save(step, state)
                if leaves:
                    raise SystemExit(128 + signal.SIGTERM)
    return TrainResult(graphdef, state.params, step)


def load_corpus(run: RunConfig) -> data.Corpus:
    """Returns the text that `run.data` says."""
    return run.data.load()


def _model(run: RunConfig) -> TransformerXL:
    return build(run.model, key=key_for(run.training.seed, "parameters"))


def initial_state(run: RunConfig) -> TrainState:
    """Returns the state before the first update, a pure function of the run."""
    model = _model(run)
    params = nnx.as_pure(nnx.split(model)[1])  # arrays without nnx.Param around each
    memory = model.init_memory(run.training.batch)
    return initial(params, optimiser.build(run.training), memory)


def step_keys(
    run: RunConfig, objective: Objective = NextToken()
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the keys of dropout and of positions; None for what isn't drawn."""
    training, key, positions = run.training, None, None
    if run.model.dropout or getattr(objective, "draws", False):
        key = key_for(training.seed, "dropout")
    if training.sampler != PositionSampler():
        positions = key_for(training.seed, "positions")
    return key, positions


def make_batches(
    run: RunConfig, corpus: data.Corpus
) -> data.Lanes | data.Windows | Masked:
    """Returns the batches of the training part, as `run.data` says.

    Those of an encoder have hidden tokens, for which the last id stands.
    """
    training = run.training
    sizes = (corpus.train, training.batch, training.length)
    documents = corpus.train_documents if run.data.documents else None
    if run.data.order == "lanes":
        batches = data.Lanes(*sizes, documents=documents)
    else:
        batches = data.Windows(*sizes, seed=training.seed, documents=documents)
    if run.model.bidirectional:
        masking = Masking(run.model.vocabulary - 1, run.data.masked_fraction)
        return Masked(batches, masking, training.seed)
    return batches


def next_stop(step: int, training: TrainingConfig, last: int) -> int:
    """Returns the step at which the call that starts at `step` ends.

    At the next multiple of `steps_per_call` or of `checkpoint_every`, whichever comes
    first, or at `last`.
    """
    sizes = (training.steps_per_call, training.checkpoint_every)
    return min(last, *((step // size + 1) * size for size in sizes))
