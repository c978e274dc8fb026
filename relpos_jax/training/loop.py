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
from relpos_jax.models import ModelConfig, TransformerXL, build
from relpos_jax.positional.positions import PositionSampler
from relpos_jax.training import folder
from relpos_jax.training.checkpoints import Checkpoints
from relpos_jax.training.config import TrainingConfig
from relpos_jax.training.objectives import NextToken, Objective
from relpos_jax.training.placement import Placement
from relpos_jax.training.sharded import placement_of
from relpos_jax.training.state import TrainState, initial, key_for
from relpos_jax.training.step import make_train_call
from relpos_jax.training.validation import LOSS, Best, Validation
from relpos_jax.training.watch import Bar, Profile, Terminated
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
    `checkpoints/` into `workdir`, and with `training.eval_every` the best parameters
    into `best/`. However often and wherever a run is killed and started again, its
    parameters are those of an unbroken run, bit for bit, on the same machine. SIGTERM
    saves a checkpoint and leaves with status 143, once the compiled call that is
    running has ended: `training.steps_per_call` steps, at most, and a save.

    Args:
      run: what to train. A resumed run may change how often it logs, saves and
        evaluates, and what it profiles, and nothing else: not `steps`, on which every
        step's learning rate depends, nor `steps_per_call`, with which it would be
        another compiled program.
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
        shapes = nnx.eval_shape(lambda: make_model(run))
        graphdef = nnx.split(shapes)[0]
        validation, skips = None, None
        if training.nonfinite == "skip":
            skips = training.max_skipped
        if training.eval_every is not None:
            held_out = make_batches(run, corpus, held_out=True)
            settings = (training.eval_tokens, objective, placement, vocabulary)
            validation = Validation(held_out, graphdef, *settings)
        state = placement.state(lambda: initial_state(run))
        restored = checkpoints.restore_newest(state)
        step = 0
        if restored is not None:
            step, state = restored
        call = make_train_call(graphdef, training, objective, placement)
        keys = step_keys(run.model, training, objective)
        profiled = training.profiled if placement.writes else None
        with (
            Writer(workdir, step, writes=placement.writes) as writer,
            Bar(training, step, **bar) as shown,
            Profile(workdir / "profile", profiled) as profile,
            Terminated() as terminated,
        ):

            def next_stack(step):
                stack = batches.stack(step, training.steps_per_call)
                return placement.batch(stack)

            best = Best(run, workdir, step, placement, vocabulary)
            stack = next_stack(step) if step < last else None
            while step < last:
                after = next_stop(step, training, last)
                profile.at(step)
                shown.start()
                state, report = call(state, stack, after - step, *keys)
                # The device is at work; the host makes the next call's batches.
                stack = next_stack(after) if after < last else None
                report = jax.device_get(report)
                seconds = shown.stop(after - step)
                profile.at(after)
                lines = folder.lines_of(
                    report,
                    step,
                    after,
                    seconds,
                    checkpoints.steps(),
                    vocabulary,
                    skips=skips,
                )
                shown.show(lines[-1])
                saves = after == last or after % training.checkpoint_every == 0
                found = {}
                if validation is not None and evaluates(after, training):
                    found = validation(state.evaluated)
                    if training.keep_best:
                        best.offer(after, found[LOSS], state.evaluated)
                if saves and on_eval is not None:
                    trained = TrainResult(graphdef, state.evaluated, after)
                    found |= on_eval(trained) or {}
                lines[-1] |= found
                write_lines(writer, lines, training, always=bool(found))
                step = after
                leaves = placement.any(terminated.now)  # once: it may come any moment
                if saves or leaves:
                    writer.flush()
                    checkpoints.save(step, state)
                if leaves:
                    raise SystemExit(128 + signal.SIGTERM)
    return TrainResult(graphdef, state.evaluated, step)


def write_lines(
    writer: Writer, lines: list[dict], training: TrainingConfig, always: bool = False
) -> None:
    """Writes the lines of a call that `log_every` chooses, and those of skipped steps.

    Args:
      writer: where to.
      lines: of `folder.lines_of`.
      training: says which.
      always: writes the last line in any case.
    """
    for line in lines:
        number = line["step"]
        whole = number % training.log_every == 0 or number == training.steps
        if whole or "skipped" in line or (always and line is lines[-1]):
            writer.write(number, {k: v for k, v in line.items() if k != "step"})


def evaluates(step: int, training: TrainingConfig) -> bool:
    """Returns whether the held-out text is scored once `step` steps are done."""
    every = training.eval_every
    return every is not None and (step % every == 0 or step == training.steps)


def load_corpus(run: RunConfig) -> data.Corpus:
    """Returns the text that `run.data` says."""
    return run.data.load()


def make_model(run: RunConfig) -> TransformerXL:
    return build(run.model, key=key_for(run.training.seed, "parameters"))


def initial_state(run: RunConfig) -> TrainState:
    """Returns the state before the first update, a pure function of the run."""
    model = make_model(run)
    params = nnx.as_pure(nnx.split(model)[1])  # arrays without nnx.Param around each
    memory = model.init_memory(run.training.batch)
    return initial(params, run.training, memory)


def step_keys(
    model: ModelConfig, training: TrainingConfig, objective: Objective = NextToken()
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the keys of dropout and of positions; None for what isn't drawn."""
    key = positions = None
    drops = model.dropout or model.attention_dropout
    if drops or getattr(objective, "draws", False):
        key = key_for(training.seed, "dropout")
    if training.sampler != PositionSampler():
        positions = key_for(training.seed, "positions")
    return key, positions


def make_batches(
    run: RunConfig, corpus: data.Corpus, *, held_out: bool = False
) -> data.Lanes | data.Windows | Masked:
    """Returns the batches of a part of the text, as `run.data` says.

    Those of an encoder have hidden tokens, for which the last id stands.

    Args:
      run: sizes and order.
      corpus: the text.
      held_out: of the part held out, not of that to train on; the same for all seeds.

    Raises:
      ValueError: the part is too short for a batch.
    """
    training = run.training
    part = corpus.held_out if held_out else corpus.train
    seed = 0 if held_out else training.seed
    sizes = (part, training.batch, training.length)
    documents = None
    if run.data.documents and not held_out:
        documents = corpus.train_documents
    try:
        if run.data.order == "lanes":
            batches = data.Lanes(*sizes, documents=documents)
        else:
            batches = data.Windows(*sizes, seed=seed, documents=documents)
    except ValueError as error:
        if not held_out:
            raise
        raise ValueError(
            f"the held-out text, for training.eval_every: {error}"
        ) from error
    if run.model.bidirectional:
        masking = Masking(run.model.vocabulary - 1, run.data.masked_fraction)
        return Masked(batches, masking, seed)
    return batches


def next_stop(step: int, training: TrainingConfig, last: int) -> int:
    """Returns the step at which the call that starts at `step` ends.

    At the next multiple of `steps_per_call`, `checkpoint_every` or `eval_every`, or
    where the profiler starts or stops, whichever comes first, or at `last`.
    """
    sizes = [training.steps_per_call, training.checkpoint_every]
    if training.eval_every is not None:
        sizes.append(training.eval_every)
    stops = [(step // size + 1) * size for size in sizes]
    stops += [border for border in training.profiled or () if border > step]
    return min(last, *stops)
