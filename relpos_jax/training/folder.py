"""A run's folder: whose it is, and the lines of its metrics."""

import json
import math
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

import jax

from relpos_jax import config as configs
from relpos_jax.config import RunConfig
from relpos_jax.data import Bytes, Vocabulary
from relpos_jax.data.vocabulary import metric

# What a resumed run may change: none of it changes a number, but for the mesh, which
# changes the order of sums and with it last digits.
FREE = ("checkpoint_every", "keep", "log_every", "eval_every", "keep_best", "profile")

_NAMES = {"grad_norm": "norm of the gradient"}


def claim(
    run: RunConfig, workdir: pathlib.Path, corpus: dict, resuming: bool, **more: Any
) -> None:
    """Writes config.json, or raises if the checkpoints are of another run.

    Args:
      run: the run.
      workdir: its folder.
      corpus: what identifies the text.
      resuming: whether there are checkpoints.
      **more: further JSON values that must be the same.

    Raises:
      ValueError: another config; names the keys.
    """
    path = workdir / "config.json"
    here = configs.resolved(run) | {"corpus": corpus} | more
    if resuming and path.exists():
        there = json.loads(path.read_text())
        there.pop("versions", None)
        free = {"data.data_dir", *(f"training.{name}" for name in FREE)}
        found = [
            line
            for line in configs.differences(there, here)
            if line.split(":")[0] not in free
            and line.split(":")[0].split(".")[0] != "mesh"
        ]
        if found:
            raise ValueError(
                f"{workdir} holds a run with another config:\n  "
                + "\n  ".join(found)
                + "\nUse the config it was started with, or another workdir."
            )
    versions = {"python": platform.python_version(), "jax": jax.__version__}
    configs.write_resolved(run, workdir, corpus=corpus, versions=versions, **more)


def lines_of(
    report: Any,
    before: int,
    after: int,
    seconds: float,
    saved: Sequence[int],
    vocabulary: Vocabulary = Bytes(),
    *,
    skips: int | None = None,
) -> list[dict]:
    """Returns a call's metrics, one dict a step.

    A step whose update was skipped has `skipped`, how many in a row that makes, and of
    loss and norm only what is finite.

    Args:
      report: a `StepReport` on the host.
      before, after: steps done before and after the call.
      seconds: wall time of the call.
      saved: steps that have a checkpoint, for the message.
      vocabulary: names the loss in its unit, as `bits_per_byte` or `perplexity`.
      skips: updates in a row that may be skipped; None where none is skipped.

    Raises:
      FloatingPointError: a loss or a gradient isn't finite, or too many in a row were
        not; names the step.
    """
    lines = []
    for index in range(after - before):
        step = before + index + 1
        count = float(report.count[index])
        loss = float(report.loss[index]) / max(count, 1.0)
        values = {"loss": loss, "grad_norm": float(report.grad_norm[index])}
        for name, sums in report.auxiliary.items():
            total = max(float(sums.count[index]), 1.0)
            values[name] = float(sums.loss[index]) / total
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        row = int(report.skipped[index])
        if bad and (skips is None or row > skips):
            times = f", the {row}th step in a row," if skips is not None else ""
            raise FloatingPointError(
                f"the {_NAMES.get(bad[0], bad[0])} of step {step} is "
                f"{values[bad[0]]}{times}; {_last(saved)}. A lower "
                "training.learning_rate or training.clip, or a longer "
                "training.warmup, may help."
            )
        if "loss" not in bad:
            values |= metric(vocabulary, loss)
        line = {"step": step}
        line |= {name: x for name, x in values.items() if name not in bad}
        line |= {
            "learning_rate": float(report.learning_rate[index]),
            "tokens": int(count),
            "tokens_per_second": count * (after - before) / seconds,
        }
        if row:
            line["skipped"] = row
        lines.append(line)
    return lines


def _last(saved: Sequence[int]) -> str:
    if not saved:
        return "there is no checkpoint from before it"
    return f"the checkpoint of step {saved[-1]}, from before it, is kept"
