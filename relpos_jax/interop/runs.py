"""Runs as folders: `config.json` and checkpoints, whether trained here or imported."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Integer, PyTree

from relpos_jax import config as configs
from relpos_jax import data
from relpos_jax.data import tokens
from relpos_jax.evaluation import perplexity, windows
from relpos_jax.evaluation.config import EvaluationConfig
from relpos_jax.models import ModelConfig, TransformerXL
from relpos_jax.positional import PositionEncoding
from relpos_jax.training.checkpoints import Checkpoints
from relpos_jax.training.config import TrainingConfig
from relpos_jax.training.state import initial

IMPORTED = "imported"


def save_run(
    workdir: str | os.PathLike,
    config: ModelConfig,
    params: PyTree,
    **source: Any,
) -> None:
    """Writes a run's folder from parameters that were not trained in one.

    It holds `config.json` (the model, and what is said of the source) and an Orbax
    checkpoint of step 0 with the parameters alone.

    Args:
      workdir: is made where it does not exist.
      config: the model's.
      params: its parameters, as `nnx.split` gives them.
      **source: JSON values that say where they are from.

    Raises:
      FileExistsError: the folder holds a run already.
    """
    workdir = pathlib.Path(workdir)
    if (workdir / "config.json").exists() or (workdir / "checkpoints").exists():
        raise FileExistsError(f"{workdir} holds a run already: take another folder")
    workdir.mkdir(parents=True, exist_ok=True)
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        checkpoints.save(0, {"params": params})
    resolved = {"model": configs.resolved(config), IMPORTED: source}
    text = json.dumps(resolved, indent=2) + "\n"
    (workdir / "config.json").write_text(text, encoding="utf-8")


def load_run(
    workdir: str | os.PathLike,
    kind: type[TransformerXL] = TransformerXL,
) -> tuple[ModelConfig, nnx.GraphDef, PyTree]:
    """Returns the model of a run, trained or imported, at its newest checkpoint.

    A run with `training.ema` gives the average of its parameters.

    Not for a run that is being trained at the time: opening its checkpoints removes a
    half-written one.

    Args:
      workdir: the folder that `experiments.train` or `import_checkpoint` wrote.
      kind: the model's class: a decoder, or `Encoder`.

    Returns:
      The configuration, and graph and parameters for `nnx.merge`.

    Raises:
      FileNotFoundError: no such run, or no checkpoint in it.
      ValueError: a config.json that describes no model, or one of another class.
      CheckpointMismatch: the checkpoint is another model's; lists how.
    """
    workdir = pathlib.Path(workdir)
    path, folder = workdir / "config.json", workdir / "checkpoints"
    for needed in (path, folder):
        if not needed.exists():
            raise FileNotFoundError(f"{workdir} holds no run: it has no {needed.name}")
    run = json.loads(path.read_text(encoding="utf-8"))
    for section in ("model", *(() if IMPORTED in run else ("training",))):
        if not isinstance(run.get(section), Mapping):
            raise ValueError(f"{path} has no section {section!r}")
    config = model_config(run["model"])
    model = nnx.eval_shape(lambda: kind(config, key=jax.random.key(0)))
    graphdef, params = nnx.split(model)
    params = nnx.as_pure(params)
    if IMPORTED in run:
        target = {"params": params}
    else:
        training = configs.take(run["training"], TrainingConfig, "training")
        target = jax.eval_shape(
            lambda params: initial(
                params, training, model.init_memory(training.batch)
            )._asdict(),
            params,
        )
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), target
    )
    with Checkpoints(folder) as checkpoints:
        found = checkpoints.restore_newest(target)
    if found is None:
        raise FileNotFoundError(f"{folder} holds no checkpoint")
    tree = found[1]
    average = tree.get("average")
    return config, graphdef, tree["params"] if average is None else average


def model_config(values: Mapping[str, Any]) -> ModelConfig:
    """Returns the model that the section `model` of a run's `config.json` describes.

    Raises:
      ValueError, TypeError: unknown keys, or values that make no model; says where.
    """
    values = dict(values)
    if "position" not in values:
        raise ValueError("config.model.position has no value and no default: set it")
    position = _encodings(values.pop("position"), "model.position")
    given = {
        "position": position,
        "pattern": configs.take_pattern(values.pop("pattern", None)),
        "hierarchy": configs.take_hierarchy(
            values.pop("hierarchy", None),
            lambda part: _encodings(part, "model.hierarchy.position"),
        ),
    }
    return configs.take(values, ModelConfig, "model", **given)


def evaluated(
    config: ModelConfig,
    *,
    memory: int | None = None,
    window: int | None = None,
    clamp: int | None = None,
) -> tuple[ModelConfig, nnx.GraphDef]:
    """Returns a model with other settings at evaluation, for the same parameters.

    Args:
      config: the trained model's.
      memory: slots of memory; None for as trained.
      window: keys that each query sees (`same_length`), 0 for all; None for as trained.
      clamp: distance at which Transformer-XL's encoding stops (`clamp_len`), 0 for
        none; None for as trained.

    Raises:
      ValueError: another memory for a model trained with `same_length`, and no window;
        a clamp for an encoding that has none.
    """
    changes: dict[str, Any] = {"dropout": 0.0}
    if memory is not None:
        same = config.memory_length and config.window == config.memory_length
        if same and memory != config.memory_length and window is None:
            raise ValueError(
                f"each query sees memory_length = {config.window} keys (same_length), "
                f"and memory becomes {memory}: say which window, {memory} for "
                "same_length at this memory"
            )
        changes["memory_length"] = memory
    if window is not None:
        changes["window"] = window or None
    if clamp is not None:
        if not hasattr(config.position, "clamp"):
            raise ValueError(f"clamp is Transformer-XL's, not of {config.position}")
        changes["position"] = dataclasses.replace(config.position, clamp=clamp or None)
    config = dataclasses.replace(config, **changes)
    model = nnx.eval_shape(lambda: TransformerXL(config, key=jax.random.key(0)))
    return config, nnx.split(model)[0]


class ScoredText(NamedTuple):
    """A text to evaluate on.

    Attributes:
      tokens: `[n]`, ids.
      unit: what a token is ("byte", "word", ...), "token" where it isn't known.
      bytes: of the text behind the first token, which nothing predicts; None where
        they aren't known.
    """

    tokens: Integer[np.ndarray, " n"]
    unit: str
    bytes: int | None


def read_text(
    source: str,
    workdir: str | os.PathLike,
    size: int,
    *,
    vocabulary: str | None = None,
    data_dir: str | None = None,
    split: str | None = None,
) -> ScoredText:
    """Returns all tokens of a text to evaluate on.

    Args:
      source: `ids:PATH.npy`, an array of token ids; `file:PATH`, a whole file; or
        another source of `data.load`, of which this is the held-out part.
      workdir: the run's folder, which has its vocabulary.
      size: the model's number of ids.
      vocabulary: instead of the run's; see `tokens.of_run`. Ids need none.
      data_dir: where sets of TFDS are; None takes TFDS's own default.
      split: of a set of TFDS ("test"); None takes `data.load`'s choice.

    Raises:
      ValueError: the array is no row of integers, an id is outside the vocabulary, or
        the text
        can't be read with the vocabulary.
      FileNotFoundError: no such file.
    """
    kind, _, path = source.partition(":")
    if kind == "ids":
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"{path} holds {ids.dtype} {ids.shape}: needs integers [n]"
            )
        text = ScoredText(ids, "token", None)
    else:
        found = tokens.of_run(workdir, size, vocabulary)
        whole = kind == "file"
        corpus = data.load(
            source,
            vocabulary=found,
            data_dir=data_dir,
            held_out_split=split,
            **({"held_out_fraction": 0.0} if whole else {}),
        )
        ids = corpus.train if whole else corpus.held_out
        nbytes = ids.size
        if corpus.text_bytes is not None:
            nbytes = corpus.text_bytes[0 if whole else 1]
        nbytes -= len(found.decode(np.asarray(ids[:1])))
        text = ScoredText(ids, found.unit, nbytes)
    low, high = int(text.tokens.min(initial=0)), int(text.tokens.max(initial=0))
    if low < 0 or high >= size:
        raise ValueError(
            f"{source} has ids {low} to {high}, not below {size}: "
            "it is another model's text"
        )
    return text


def measures(score: perplexity.Score, text: ScoredText) -> dict[str, Any]:
    """Returns what a score says, by name, JSON values.

    `perplexity` and `bits_per_token` are per token, whatever `unit` that is;
    `bits_per_byte` shares the same sum among the bytes of the text, which makes models
    with different vocabularies comparable; it needs the whole text to be scored.
    """
    found = {
        "unit": text.unit,
        "tokens": score.tokens,
        "nll": score.nll,
        "bits_per_token": score.bits_per_byte,
        "perplexity": score.perplexity,
    }
    if text.bytes and score.tokens == len(text.tokens) - 1:
        found["bytes"] = text.bytes
        found["bits_per_byte"] = perplexity.bits_per_byte(score.nll, text.bytes)
    return found


def summary(measures: Mapping[str, Any]) -> str:
    """Returns lines for the terminal that say `measures`."""
    unit = measures["unit"]
    lines = [
        f"{measures['tokens']} {unit}s scored: {measures['bits_per_token']:.4f} bits "
        f"per {unit}",
        f"perplexity per {unit}: {measures['perplexity']:.4f}",
    ]
    if unit != "byte" and "bits_per_byte" in measures:
        lines.append(f"bits per byte of the text: {measures['bits_per_byte']:.4f}")
    return "\n".join(lines)


def score(
    language: perplexity.Language,
    text: Integer[np.ndarray, " n"],
    length: int,
    memory: int = 0,
    *,
    tokens: int = 0,
    lanes: int = 1,
) -> perplexity.Score:
    """Scores every token of a text but the first, once.

    With memory the text is one stream of segments; without, chunks of `length`.

    Args:
      language: the model.
      text: `[n]`, the tokens.
      length: tokens in a segment or chunk.
      memory: slots of memory.
      tokens: targets scored, from the beginning; 0 for all.
      lanes: stretches of the text that are read side by side with memory; those after
        the first fill theirs with what stands before them.

    Raises:
      ValueError: fewer than two tokens, or a length or number of lanes below 1.
    """
    text = text[: tokens + 1] if tokens else text
    if not memory:
        length = min(length, max(1, len(text) - 1))
        settings = EvaluationConfig(
            multiples=(1,), protocols=("non_overlapping",), non_overlapping_tokens=0
        )
        return perplexity.evaluate(language, text, length, settings).scores[0]
    block, count = windows.lanes(text, length, language.reach * memory, lanes)
    block = windows.Block(
        *(x.reshape(len(x), count, length).swapaxes(0, 1) for x in block)
    )
    scorer = perplexity.memory_scorer(language)
    sums, counts = scorer(language.params, block, memory_length=memory)
    nll = np.asarray(sums, np.float64).sum(axis=0)
    seen = np.asarray(counts, np.int64).sum(axis=0)
    total = float(nll.sum()), int(seen.sum())
    return perplexity.Score("memory", length + memory, *total, nll, seen)


def _classes() -> dict[str, type]:
    found, waiting = {}, [PositionEncoding]
    while waiting:
        cls = waiting.pop()
        found[cls.__name__] = cls
        waiting += cls.__subclasses__()
    return found


def _encodings(value: Any, path: str) -> Any:
    """Turns every dict with an encoding's class as its `name` into that encoding."""
    if isinstance(value, (list, tuple)):
        return tuple(_encodings(v, f"{path}[{i}]") for i, v in enumerate(value))
    if not isinstance(value, Mapping) or "name" not in value:
        return value
    classes, fields = _classes(), dict(value)
    name = fields.pop("name")
    if name not in classes:
        raise ValueError(f"config.{path}.name: no encoding is called {name!r}")
    fields = {k: _encodings(v, f"{path}.{k}") for k, v in fields.items()}
    return configs.take(fields, classes[name], path)
