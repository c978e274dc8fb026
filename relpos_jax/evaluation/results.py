"""The results of a study, and their files: written whole or not at all."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from relpos_jax.evaluation.perplexity import Score

# Where every position of a window is scored: the others are zeros, mostly.
_BY_POSITION = ("non_overlapping", "memory")


@dataclasses.dataclass(frozen=True, eq=False)
class ModelResult:
    """What one trained model scored.

    Attributes:
      encoding: the study's name for it.
      seed: the training seed.
      train_length: tokens in a training window.
      step: updates of the model evaluated.
      parameters: number of its parameters.
      past_training: what the encoding does past the training length, a sentence.
      scores: one a protocol and length. By position they are kept for the protocols
        that score every position of a window, and empty for the others.
      skipped: protocols left out, and why.
    """

    encoding: str
    seed: int
    train_length: int
    step: int
    parameters: int
    past_training: str
    scores: tuple[Score, ...]
    skipped: Mapping[str, str]


@dataclasses.dataclass(frozen=True, eq=False)
class Study:
    """A finished study.

    Attributes:
      config: everything that determines the results, as JSON values.
      results: one a model, encodings in the study's order, then seeds.
      facts: what does not: command, versions, machine, wall times.
    """

    config: Mapping[str, Any]
    results: tuple[ModelResult, ...]
    facts: Mapping[str, Any]


def save(result: ModelResult, path: str | os.PathLike) -> None:
    """Writes a result as JSON; floats come back bit for bit."""
    scores = []
    for score in result.scores:
        entry = score._asdict()
        for name in ("position_nll", "position_tokens"):
            entry[name] = entry[name].tolist() if score.protocol in _BY_POSITION else []
        scores.append(entry)
    values = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
    write_json(values | {"scores": scores, "skipped": dict(result.skipped)}, path)


def load(path: str | os.PathLike) -> ModelResult:
    """Reads what `save` has written.

    Raises:
      ValueError: the file is no such result.
    """
    try:
        values = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        scores = []
        for entry in values.pop("scores"):
            entry["position_nll"] = np.asarray(entry["position_nll"], np.float64)
            entry["position_tokens"] = np.asarray(entry["position_tokens"], np.int64)
            scores.append(Score(**entry))
        return ModelResult(scores=tuple(scores), **values)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is not the result of an evaluation ({error}): delete it to have "
            "the model evaluated again"
        ) from error


def write_json(values: Any, path: str | os.PathLike) -> None:
    """Writes JSON so that a kill leaves the old file or the new one, never half."""
    write_text(json.dumps(values, indent=1) + "\n", path)


def write_text(text: str, path: str | os.PathLike) -> None:
    """Writes text so that a kill leaves the old file or the new one, never half."""
    write_bytes(text.encode(), path)


def write_bytes(data: bytes, path: str | os.PathLike) -> None:
    """Writes bytes so that a kill leaves the old file or the new one, never half."""
    path = pathlib.Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
