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
FREE = ("checkpoint_every", "keep", "log_every")


def claim(run: RunConfig, workdir: pathlib.Path, corpus: dict, resuming: bool) -> None:
    """Writes config.json, or raises if the checkpoints are of another run.

    Raises:
      ValueError: another config; names the keys.
    """
    path = workdir / "config.json"
    here = configs.resolved(run) | {"corpus": corpus}
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
    configs.write_resolved(run, workdir, corpus=corpus, versions=versions)


def lines_of(
    report: Any,
    before: int,
    after: int,
    seconds: float,
    saved: Sequence[int],
    vocabulary: Vocabulary = Bytes(),
) -> list[dict]:
    """Returns a call's metrics, one dict a step.

    Args:
      report: a `StepReport` on the host.
      before, after: steps done before and after the call.
      seconds: wall time of the call.
      saved: steps that have a checkpoint, for the message.
      vocabulary: names the loss in its unit, as `bits_per_byte` or `perplexity`.

    Raises:
      FloatingPointError: a loss or a gradient isn't finite; names the step.
    """
    lines = []
    for index in range(after - before):
        step = before + index + 1
        count = float(report.count[index])
        loss = float(report.loss[index]) / max(count, 1.0)
        norm = float(report.grad_norm[index])
        for what, value in (("loss", loss), ("norm of the gradient", norm)):
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"the {what} of step {step} is {value}; {_last(saved)}. A "
                    "lower training.learning_rate or training.clip, or a longer "
                    "training.warmup, may help."
                )
        line = {
            "step": step,
            "loss": loss,
            **metric(vocabulary, loss),
            "learning_rate": float(report.learning_rate[index]),
            "grad_norm": norm,
            "tokens": int(count),
            "tokens_per_second": count * (after - before) / seconds,
        }
        for name, sums in report.auxiliary.items():
            total = max(float(sums.count[index]), 1.0)
            line[name] = float(sums.loss[index]) / total
        lines.append(line)
    return lines


def _last(saved: Sequence[int]) -> str:
    if not saved:
        return "there is no checkpoint from before it"
    return f"the checkpoint of step {saved[-1]}, from before it, is kept"
