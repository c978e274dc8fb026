"""Train short, test long: encodings, otherwise equal, evaluated at many lengths.

The models of a study differ in their position encoding alone: the parameters that they
share start from the same values, and one seed gives all of them the same batches in the
same order, so their differences are paired.
"""

import dataclasses
import json
import pathlib
import re
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Integer
from ml_collections import ConfigDict
from tqdm import tqdm

from relpos_jax import config as configs
from relpos_jax import data
from relpos_jax.config import RunConfig
from relpos_jax.evaluation import environment, perplexity, results
from relpos_jax.evaluation.config import EvaluationConfig
from relpos_jax.evaluation.perplexity import Evaluation, Language
from relpos_jax.evaluation.results import ModelResult, Study
from relpos_jax.models.config import ABSOLUTE_WITH_MEMORY, ModelConfig
from relpos_jax.positional import ENCODINGS
from relpos_jax.training import loop
from relpos_jax.training.loop import TrainResult
from relpos_jax.training.together import train_together

# What a restarted study may change: none of it changes a number.
_FREE = ("steps_per_call", "checkpoint_every", "keep", "log_every")


@dataclasses.dataclass(frozen=True)
class StudyConfig:
    """Which models a study trains.

    Attributes:
      encodings: names, in the order of the report: entries of `positions`, or of the
        registry where `positions` has none.
      seeds: training seeds; each encoding is trained with each.
      positions: name to a section `model.position`, i.e. `{"name", "knobs"}`.
      together: trains the seeds of an encoding at once (`train_together`), which an
        accelerator must have room for; the numbers differ in rounding.

    Raises:
      ValueError: no encoding or seed, one twice, or a name that can't be a folder's.
    """

    encodings: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    positions: Mapping = dataclasses.field(default_factory=dict)
    together: bool = False

    def __post_init__(self):
        for field in ("encodings", "seeds"):
            values = getattr(self, field)
            if not values or len(set(values)) < len(values):
                raise ValueError(
                    f"study.{field} is {values}: needs at least one, and none twice"
                )
        for name in self.encodings:
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
                raise ValueError(
                    f"study.encodings has {name!r}, which cannot name a folder: use "
                    "letters, digits, '_', '.' and '-'"
                )
            if name not in self.positions and name not in ENCODINGS:
                known = sorted({*self.positions, *ENCODINGS})
                raise ValueError(
                    f"study.encodings has {name!r}, which neither study.positions nor "
                    f"the registry knows: take some of {', '.join(known)}"
                )

    def position(self, name: str) -> Mapping:
        """Returns the section `model.position` of one of the encodings."""
        return self.positions.get(name, {"name": name, "knobs": {}})


@dataclasses.dataclass(frozen=True)
class Plan:
    """A study's config, as dataclasses.

    Attributes:
      study: which models.
      evaluation: how they are evaluated.
      runs: encoding to its run, with whatever seed the config has.
    """

    study: StudyConfig
    evaluation: EvaluationConfig
    runs: Mapping[str, RunConfig]

    @property
    def any_run(self) -> RunConfig:
        """One of the runs, for what they have in common."""
        return self.runs[self.study.encodings[0]]

    def run(self, encoding: str, seed: int) -> RunConfig:
        """Returns the run of one model."""
        run = self.runs[encoding]
        training = dataclasses.replace(run.training, seed=seed)
        return dataclasses.replace(run, training=training)


def plan_study(config: configs.Section) -> Plan:
    """Turns a config into what it describes.

    Args:
      config: sections `data`, `model` (without `position`), `training` (its seed is not
        used), `study` and `evaluation`.

    Raises:
      ValueError: a key that nobody reads, a value that makes no sense.
      TypeError: a value of the wrong type.
    """
    if isinstance(config, ConfigDict):
        config = config.to_dict()
    if "position" in config.get("model", {}):
        raise ValueError(
            "config.model.position is set by the study for each of study.encodings: "
            "change study.encodings or study.positions"
        )
    study = configs.take(config.get("study", {}), StudyConfig, "study")
    evaluation = configs.take(
        config.get("evaluation", {}), EvaluationConfig, "evaluation"
    )
    runs = {}
    for name in study.encodings:
        model = dict(config.get("model", {})) | {"position": study.position(name)}
        run = configs.build(
            dict(config) | {"model": model}, others=("study", "evaluation")
        )
        runs[name] = run
    return Plan(study, evaluation, runs)


def evaluate_lengths(
    trained: TrainResult,
    model: ModelConfig,
    text: Integer[np.ndarray, " n"],
    train_length: int,
    config: EvaluationConfig,
    *,
    progress: bool = True,
    label: str = "",
) -> Evaluation:
    """Evaluates a trained model at every length under every protocol.

    Args:
      trained: the model.
      model: its config; with absolute embeddings it has no `memory` protocol.
      text: `[n]`, the held-out tokens.
      train_length: tokens in a training window.
      config: what to evaluate.
      progress: shows a bar.
      label: stands before the bar.

    Raises:
      ValueError: the text is shorter than the longest window.
    """
    refusal = ABSOLUTE_WITH_MEMORY if model.absolute else None
    language = Language.of(trained.graphdef, trained.params, refusal, config.sampler)
    count = len(config.protocols)
    if language.refusal is not None and "memory" in config.protocols:
        count -= 1
    scores = []
    with tqdm(
        total=count * len(config.lengths(train_length)),
        desc=label or None,
        unit="score",
        disable=not progress,
        dynamic_ncols=True,
    ) as bar:
        began = time.perf_counter()
        for score in perplexity.each(language, text, train_length, config):
            scores.append(score)
            tokens = sum(score.tokens for score in scores)
            speed = tokens / max(time.perf_counter() - began, 1e-9)
            bar.set_postfix(
                {
                    "length": score.length,
                    "loss": f"{score.nll / score.tokens:.3f}",
                    "tokens/s": f"{speed:,.0f}",
                }
            )
            bar.update()
    return perplexity.ordered(scores, language, config)


def run_study(
    config: configs.Section,
    workdir: str | pathlib.Path,
    *,
    command: str = "",
    progress: bool = True,
) -> Study:
    """Trains and evaluates every model of a study, or goes on where it stopped.

    Writes `config.json`, `study.json` (command, versions, machine, wall times) and, for
    each model, its run and `result.json` under `models/ENCODING-seedK`. A model with a
    result is not touched again; one without goes on from its last checkpoint. However
    often a study is killed and started again, its results are those of an unbroken one,
    bit for bit, on the same machine.

    Args:
      config: see `plan_study`.
      workdir: the study's folder; is made where it doesn't exist.
      command: how the study was started, for the report.
      progress: shows bars.

    Raises:
      ValueError: a config that makes no sense; a text shorter than the longest window
        needs; or `workdir` holds a study with another config (names what differs).
    """
    workdir = pathlib.Path(workdir)
    plan = plan_study(config)
    run = plan.any_run
    corpus = run.data.load()
    if corpus.vocabulary.unit != "byte":
        raise ValueError(
            f"a study's report is in bits per byte, and data.vocabulary="
            f"{run.data.vocabulary!r} has {corpus.vocabulary.unit}s: set it to 'bytes'"
        )
    needed = plan.evaluation.needed(run.training.length)
    if corpus.held_out.size < needed:
        raise ValueError(
            f"{run.data.source!r} has {corpus.held_out.size} bytes held out, the "
            f"longest window needs {needed}: take a longer text, a larger "
            "data.held_out_fraction, or smaller evaluation.multiples"
        )
    described = describe(plan, corpus)
    claim(described, workdir)
    facts = _facts(workdir, command)

    models = [(e, seed) for seed in plan.study.seeds for e in plan.study.encodings]
    found = {}
    for number, (encoding, seed) in enumerate(models, start=1):
        place = f"encoding {number}/{len(models)}"
        name = f"{encoding}-seed{seed}"
        path = _folder(workdir, encoding, seed) / "result.json"
        if path.exists():
            if progress:
                tqdm.write(f"{place}: {name} is finished already")
        else:
            if progress:
                tqdm.write(f"{place}: {name}")
            result, times = _model(
                plan,
                encoding,
                seed,
                corpus,
                workdir,
                progress=progress,
                label=f"{number}/{len(models)} {encoding}",
            )
            # Times first: a result without them would never get them.
            facts["models"][name] = times
            results.write_json(facts, workdir / "study.json")
            results.save(result, path)
        found[encoding, seed] = results.load(path)
    results.write_json(facts, workdir / "study.json")
    ordered = [
        found[encoding, seed]
        for encoding in plan.study.encodings
        for seed in plan.study.seeds
    ]
    return Study(described, tuple(ordered), facts)


def describe(plan: Plan, corpus: data.Corpus) -> dict[str, Any]:
    """Returns everything that determines a study's results, as JSON values."""
    values = configs.resolved(plan.any_run)
    values["model"].pop("position")
    values["training"].pop("seed")
    values["study"] = {
        "encodings": list(plan.study.encodings),
        "seeds": list(plan.study.seeds),
        "positions": {
            name: configs.resolved(run.model.position)
            for name, run in plan.runs.items()
        },
    }
    if plan.study.together:  # another program; studies from before have no such key
        values["study"]["together"] = True
    values["evaluation"] = configs.resolved(plan.evaluation)
    values["corpus"] = {
        "name": corpus.name,
        "description": corpus.description,
        "size": corpus.size,
        "train_bytes": corpus.train.size,
        "held_out_bytes": corpus.held_out.size,
        "sha256": corpus.sha256,
    }
    return values


def claim(described: Mapping, workdir: pathlib.Path) -> None:
    """Makes `workdir` this study's, or raises if it is another's.

    Raises:
      ValueError: `workdir` holds a study with another config; names what differs.
    """
    path = workdir / "config.json"
    if path.exists():
        there = json.loads(path.read_text(encoding="utf-8"))
        free = {f"training.{name}" for name in _FREE} | {"corpus.description"}
        lines = [
            line
            for line in configs.differences(there, described)
            if line.split(":")[0] not in free
        ]
        if lines:
            raise ValueError(
                f"{workdir} holds a study with another config:\n  "
                + "\n  ".join(lines)
                + "\nUse the config it was started with, or another workdir."
            )
    workdir.mkdir(parents=True, exist_ok=True)
    results.write_json(described, path)


def _folder(workdir: pathlib.Path, encoding: str, seed: int) -> pathlib.Path:
    return workdir / "models" / f"{encoding}-seed{seed}"


def _trained(plan, encoding, seed, corpus, workdir, **shown) -> TrainResult:
    run, seeds = plan.run(encoding, seed), plan.study.seeds
    if not plan.study.together:
        folder = _folder(workdir, encoding, seed)
        return loop.train(run, folder, corpus=corpus, **shown)
    folders = [_folder(workdir, encoding, one) for one in seeds]
    found = train_together(run, seeds, folders, corpus=corpus, **shown)
    return found[seeds.index(seed)]


def _model(plan, encoding, seed, corpus, workdir, *, progress, label):
    """Trains and evaluates one model; returns its result and its wall times."""
    run, config = plan.run(encoding, seed), plan.evaluation
    resumed = (_folder(workdir, encoding, seed) / "checkpoints").exists()
    began = time.perf_counter()
    trained = _trained(
        plan, encoding, seed, corpus, workdir, progress=progress, label=label
    )
    jax.block_until_ready(trained.params)
    trained_at = time.perf_counter()
    evaluation = evaluate_lengths(
        trained,
        run.model,
        corpus.held_out,
        run.training.length,
        config,
        progress=progress,
        label=f"{label} evaluation",
    )
    times = {
        "train_seconds": round(trained_at - began, 1),
        "evaluate_seconds": round(time.perf_counter() - trained_at, 1),
        "resumed": resumed,
    }
    result = ModelResult(
        encoding=encoding,
        seed=run.training.seed,
        train_length=run.training.length,
        step=trained.step,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(trained.params)),
        past_training=run.model.past_training(),
        scores=evaluation.scores,
        skipped=evaluation.skipped,
    )
    return result, times


def _facts(workdir: pathlib.Path, command: str) -> dict[str, Any]:
    """Returns the study's facts, with the wall times of the models already there."""
    path = workdir / "study.json"
    times = {}
    if path.exists():
        times = json.loads(path.read_text(encoding="utf-8")).get("models", {})
    return {"command": command, **environment.describe(), "models": times}
