"""Kills a run again and again, and compares it with one that nobody killed."""

import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from relpos_jax.config import RunConfig
from relpos_jax.training import loop, runtime, writers
from relpos_jax.training.checkpoints import Checkpoints
from relpos_jax.training.state import TrainState

_UNFINISHED = "*.orbax-checkpoint-tmp*"


class Kill(NamedTuple):
    """One kill.

    Attributes:
      step: the newest whole checkpoint that it left, 0 for none.
      in_save: whether it left a half-written one.
    """

    step: int
    in_save: bool


def kill_and_resume(
    run: RunConfig,
    workdir: str | os.PathLike,
    kills: int,
    *,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> list[str]:
    """Trains a run unbroken, and killed with SIGKILL many times; compares the ends.

    Every second kill waits for a save to begin and falls within it; the others fall
    anywhere, while the process starts, compiles or trains. Where a run ends before all
    kills have come, it begins again with the rest.

    Args:
      run: what to train; short, with many checkpoints.
      workdir: a folder that doesn't exist; gets `unbroken` and `killed`.
      kills: how many.
      seed: of the moments.
      say: is told about each kill.

    Returns:
      What differs, empty if nothing does: names of arrays of the last checkpoint
      (parameters, optimiser state, memory) that aren't equal bit for bit, and
      "metrics.jsonl" if a line of it differs in anything but the speed.

    Raises:
      FileExistsError: `workdir` exists.
      RuntimeError: a process ended otherwise than by its kill.
    """
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["relpos_jax.training.endurance"])
    random_ = random.Random(seed)

    whole = _start(context, run, workdir / "unbroken")
    whole.join()
    if whole.exitcode:
        raise RuntimeError(f"the unbroken run ended with status {whole.exitcode}")
    done, in_save = 0, 0
    while done < kills:
        old = _unfinished(workdir / "killed")
        process = _start(context, run, workdir / "killed")
        inside = done % 2 == 1
        if _wait(process, workdir / "killed", old, random_, within_save=inside):
            kill = _kill(process, workdir / "killed", old)
            done, in_save = done + 1, in_save + kill.in_save
            inside = ", within a save" if kill.in_save else ""
            say(f"kill {done} of {kills}: newest checkpoint {kill.step}{inside}")
        elif process.exitcode:
            raise RuntimeError(f"a resumed run ended with status {process.exitcode}")
        else:
            found = _differences(run, workdir)
            if found:
                return found
            say("the run has ended, and equals the unbroken one; it begins again")
            shutil.rmtree(workdir / "killed")
    last = _start(context, run, workdir / "killed")
    last.join()
    if last.exitcode:
        raise RuntimeError(f"the last run ended with status {last.exitcode}")
    say(f"{kills} kills, {in_save} of them within a save")
    return _differences(run, workdir)


def _start(context: Any, run: RunConfig, folder: pathlib.Path):
    process = context.Process(target=_train, args=(run, folder), daemon=True)
    process.start()
    return process


def _train(run: RunConfig, folder: pathlib.Path) -> None:
    runtime.prepare()
    loop.train(run, folder, progress=False)


def _wait(process, folder: pathlib.Path, old, random_, *, within_save: bool) -> bool:
    """Returns True when the moment to kill has come, False if the process ended."""
    checkpoints = folder / "checkpoints"
    before = _steps(checkpoints)
    # The first of the new saves, or a later one.
    ahead = random_.randrange(1, 4)
    delay = random_.uniform(0, 0.1) if within_save else random_.uniform(0, 2)
    while process.is_alive():
        new = len(_steps(checkpoints) - before)
        if within_save:
            if new >= ahead - 1 and _unfinished(folder) - old:
                time.sleep(delay * random_.random())
                return process.is_alive()
        elif new >= ahead - 2:
            time.sleep(delay)
            return process.is_alive()
        time.sleep(0.0005)
    return False


def _kill(process, folder: pathlib.Path, old: set) -> Kill:
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    newest = max(_steps(folder / "checkpoints"), default=0)
    return Kill(newest, bool(_unfinished(folder) - old))


def _unfinished(folder: pathlib.Path) -> set[tuple[str, int]]:
    """Returns the half-written checkpoints that are there, each its own."""
    found = (folder / "checkpoints").glob(_UNFINISHED)
    return {(path.name, path.stat().st_ino) for path in found}


def _steps(checkpoints: pathlib.Path) -> set[int]:
    if not checkpoints.exists():
        return set()
    return {int(path.name) for path in checkpoints.iterdir() if path.name.isdigit()}


def _differences(run: RunConfig, workdir: pathlib.Path) -> list[str]:
    states, lines = [], []
    for name in ("unbroken", "killed"):
        with Checkpoints(workdir / name / "checkpoints") as checkpoints:
            target = loop.initial_state(run)
            states.append(checkpoints.restore(run.training.steps, target))
        found = writers.read(workdir / name / "metrics.jsonl")
        lines.append(
            [{k: v for k, v in x.items() if k != "tokens_per_second"} for x in found]
        )
    different = []
    for name in TrainState._fields:
        one, two = (jax.tree.leaves(getattr(state, name)) for state in states)
        same = [np.array_equal(x, y, equal_nan=True) for x, y in zip(one, two)]
        if not all(same):
            different.append(f"{name} ({same.count(False)} of {len(same)} arrays)")
    if lines[0] != lines[1]:
        different.append("metrics.jsonl")
    return different
