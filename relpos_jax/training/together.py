"""Several seeds of one run trained at once: one program, by `vmap`.

Small models leave an accelerator idle; so many of them take hardly longer than one.
Each seed has the folder of an ordinary run, with its own metrics and checkpoints, and
the numbers of an ordinary run up to rounding (the products are batched otherwise). A
run that was trained together goes on together, bit for bit.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from relpos_jax import data
from relpos_jax.config import RunConfig
from relpos_jax.data import saved
from relpos_jax.training import folder, loop
from relpos_jax.training.checkpoints import Checkpoints
from relpos_jax.training.loop import TrainResult
from relpos_jax.training.objectives import NextToken, Objective
from relpos_jax.training.step import make_train_call
from relpos_jax.training.watch import Bar, Terminated
from relpos_jax.training.writers import Writer


def train_together(
    run: RunConfig,
    seeds: Sequence[int],
    workdirs: Sequence[str | os.PathLike],
    *,
    corpus: data.Corpus | None = None,
    progress: bool = True,
    label: str = "",
    stop_after: int | None = None,
    objective: Objective = NextToken(),
) -> list[TrainResult]:
    """Trains a run with each of the seeds, or goes on where all of them stopped.

    On JAX's default device alone, whatever `run.mesh` says; it must hold the states and
    temporaries of all seeds at once.

    Args:
      run: what to train; its own seed is not used.
      seeds: one for each model.
      workdirs: a folder for each, as `loop.train` writes it.
      corpus, progress, label, stop_after, objective: as of `loop.train`.

    Returns:
      The models, in the seeds' order.

    Raises:
      ValueError: no seed, one twice, another number of folders; evaluation or a
        profile, which only a run by itself has; or a folder holds a run with another
        config, or one that was trained with other seeds.
      FloatingPointError: as `loop.train`, for any of them.
    """
    training, paths = run.training, [pathlib.Path(path) for path in workdirs]
    if not seeds or len(set(seeds)) < len(seeds) or len(paths) != len(seeds):
        raise ValueError(
            f"{len(paths)} folders for seeds {list(seeds)}: give each a folder, and "
            "no seed twice"
        )
    for name in ("eval_every", "profile"):
        if getattr(training, name) is not None:
            raise ValueError(
                f"training.{name} must be None for seeds trained together, got "
                f"{getattr(training, name)!r}"
            )
    corpus = loop.load_corpus(run) if corpus is None else corpus
    runs = [
        dataclasses.replace(run, training=dataclasses.replace(training, seed=seed))
        for seed in seeds
    ]
    batches = [loop.make_batches(one, corpus) for one in runs]
    last = training.steps if stop_after is None else min(stop_after, training.steps)
    skips = training.max_skipped if training.nonfinite == "skip" else None
    facts = {"name": corpus.name, "size": corpus.size, "sha256": corpus.sha256}
    vocabulary = corpus.vocabulary
    saved.check_size(vocabulary, run.model.vocabulary - run.model.bidirectional)
    graphdef = nnx.split(nnx.eval_shape(lambda: loop.make_model(run)))[0]
    call = make_train_call(graphdef, training, objective, together=True)
    keys = [loop.step_keys(run.model, one.training, objective) for one in runs]
    keys = _stack(keys)

    with contextlib.ExitStack() as stack:
        for path in paths:
            path.mkdir(parents=True, exist_ok=True)
        kept = [
            stack.enter_context(Checkpoints(path / "checkpoints", keep=training.keep))
            for path in paths
        ]
        for one, path, checkpoints in zip(runs, paths, kept, strict=True):
            resuming = bool(checkpoints.steps())
            folder.claim(one, path, facts, resuming, together=list(seeds))
            saved.claim(path, vocabulary, resuming=resuming)
        step, states = _restore(kept, [loop.initial_state(one) for one in runs])
        state = _stack(states)
        writers = [stack.enter_context(Writer(path, step)) for path in paths]
        bar = stack.enter_context(Bar(training, step, label, progress))
        terminated = stack.enter_context(Terminated())
        while step < last:
            after = loop.next_stop(step, training, last)
            parts = [part.stack(step, training.steps_per_call) for part in batches]
            parts = jax.tree.map(lambda *x: np.stack(x), *parts)
            bar.start()
            state, report = call(state, parts, after - step, *keys)
            report = jax.device_get(report)
            seconds = bar.stop(after - step)
            for i, writer in enumerate(writers):
                own = jax.tree.map(lambda x, i=i: x[i], report)
                at = kept[i].steps()
                lines = folder.lines_of(
                    own, step, after, seconds, at, vocabulary, skips=skips
                )
                bar.show(lines[-1])
                loop.write_lines(writer, lines, training)
            step, leaves = after, terminated.now
            if leaves or after == last or after % training.checkpoint_every == 0:
                for i, (writer, checkpoints) in enumerate(
                    zip(writers, kept, strict=True)
                ):
                    writer.flush()
                    # After a kill between two of them, one is there already.
                    if step not in checkpoints.steps():
                        checkpoints.save(step, _part(state, i))
            if leaves:
                raise SystemExit(128 + signal.SIGTERM)
    return [
        TrainResult(graphdef, _part(state, i).evaluated, step)
        for i in range(len(seeds))
    ]


def _stack(trees: list):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def _part(state, i: int):
    return jax.tree.map(lambda x: x[i], state)


def _restore(kept: list[Checkpoints], states: list) -> tuple[int, list]:
    """Returns the newest step that all have, and their states there."""
    while True:
        common = set.intersection(*(set(checkpoints.steps()) for checkpoints in kept))
        if not common:
            return 0, states
        step = max(common)
        found = [
            checkpoints.restore_sound(step, state)
            for checkpoints, state in zip(kept, states, strict=True)
        ]
        if all(state is not None for state in found):
            return step, found
