"""Encodings with kinds of memory: one model a pair, evaluated by attention length.

The models of an encoding differ in their memory alone; all read the same segments in
the same order.
"""

import dataclasses
import pathlib

import jax
import numpy as np
from jaxtyping import Integer
from ml_collections import ConfigDict
from tqdm import tqdm

from relpos_jax import config as configs
from relpos_jax import data
from relpos_jax.config import RunConfig
from relpos_jax.evaluation import perplexity, results, windows
from relpos_jax.evaluation.extrapolation import claim
from relpos_jax.evaluation.memories import KINDS, Kind, MemoryConfig
from relpos_jax.evaluation.perplexity import EvaluationConfig, Language, Score
from relpos_jax.evaluation.results import ModelResult
from relpos_jax.evaluation.surgery import skeleton
from relpos_jax.training import loop

SECTIONS = ("memory", "grid")


@dataclasses.dataclass(frozen=True)
class GridConfig:
    """Which models a grid trains, and how long their attention is at evaluation.

    Attributes:
      encodings: names of the registry.
      kinds: names of `memories.KINDS`.
      multiples: most keys that a query sees, as multiples of the training length.
      tokens: targets scored, from the beginning of the held-out text.
      seed: of the training.
    """

    encodings: tuple[str, ...]
    kinds: tuple[str, ...]
    multiples: tuple[int, ...] = (1, 2, 4, 8)
    tokens: int = 8192
    seed: int = 0

    def __post_init__(self):
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown:
            raise ValueError(f"grid.kinds has {unknown}: take some of {list(KINDS)}")
        if not self.multiples or min(self.multiples) < 1:
            raise ValueError(f"grid.multiples is {self.multiples}: take 1 and more")
        if self.tokens < 1:
            raise ValueError(f"grid.tokens must be at least 1, got {self.tokens}")


def plan(
    config: configs.Section,
) -> tuple[GridConfig, dict[tuple[str, str], RunConfig]]:
    """Returns the grid and the run of each encoding and kind.

    Args:
      config: sections `data` (in lanes), `model` (without `position`), `training`,
        `memory` (`MemoryConfig`) and `grid`.

    Raises:
      ValueError, TypeError: as `config.build`.
    """
    if isinstance(config, ConfigDict):
        config = config.to_dict()
    grid = configs.take(config.get("grid", {}), GridConfig, "grid")
    memory = configs.take(config.get("memory", {}), MemoryConfig, "memory")
    runs = {}
    for encoding in grid.encodings:
        model = dict(config.get("model", {})) | {"position": {"name": encoding}}
        base = configs.build(dict(config) | {"model": model}, others=SECTIONS)
        training = dataclasses.replace(base.training, seed=grid.seed)
        for kind in grid.kinds:
            changes = KINDS[kind].changes(memory, training.length, base.model.position)
            model = dataclasses.replace(base.model, **changes)
            run = dataclasses.replace(base, model=model, training=training)
            runs[encoding, kind] = run
    return grid, runs


def run_grid(
    config: configs.Section, workdir: str | pathlib.Path, *, progress: bool = True
) -> list[ModelResult]:
    """Trains and evaluates every model of a grid, or goes on where it stopped.

    Each result's `encoding` is "ENCODING + KIND".

    Raises:
      ValueError: a config that makes no sense, or `workdir` holds another grid.
    """
    workdir = pathlib.Path(workdir)
    grid, runs = plan(config)
    any_run = next(iter(runs.values()))
    corpus = loop.load_corpus(any_run)
    longest = max(grid.multiples) * any_run.training.length
    if corpus.held_out.size <= longest:
        raise ValueError(
            f"{corpus.held_out.size} tokens are held out, and a window of {longest} "
            "needs more: take a longer text or smaller grid.multiples"
        )
    described = {
        f"{encoding}/{kind}": configs.resolved(run)
        for (encoding, kind), run in runs.items()
    }
    claim(described | {"grid": configs.resolved(grid)}, workdir)
    found = []
    for number, ((encoding, kind), run) in enumerate(runs.items(), start=1):
        folder = workdir / "models" / f"{encoding}-{kind}"
        path = folder / "result.json"
        label = f"{number}/{len(runs)} {encoding} + {kind}"
        if not path.exists():
            result = _model(run, KINDS[kind], grid, corpus, folder, label, progress)
            result = dataclasses.replace(result, encoding=f"{encoding} + {kind}")
            results.save(result, path)
        found.append(results.load(path))
        if progress:
            tqdm.write(f"{label}: done")
    return found


def _model(
    run: RunConfig,
    kind: Kind,
    grid: GridConfig,
    corpus: data.Corpus,
    folder: pathlib.Path,
    label: str,
    progress: bool,
) -> ModelResult:
    trained = loop.train(run, folder, corpus=corpus, progress=progress, label=label)
    segment = run.training.length
    scores = []
    for multiple in grid.multiples:
        length = multiple * segment
        model = kind.at_length(run.model, length, segment)
        language = Language.of(skeleton(model)[0], trained.params)
        text = corpus.held_out[: grid.tokens + 1]
        if kind.streams:
            scores.append(stream(language, text, segment, model.memory_slots, length))
        else:
            settings = EvaluationConfig(
                multiples=(multiple,),
                protocols=("non_overlapping",),
                non_overlapping_tokens=grid.tokens,
            )
            windowed = perplexity.evaluate(language, text, segment, settings)
            scores.append(windowed.scores[0])
    return ModelResult(
        encoding="",
        seed=grid.seed,
        train_length=segment,
        step=trained.step,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(trained.params)),
        past_training=run.model.past_training(),
        scores=tuple(scores),
        skipped={},
    )


def stream(
    language: Language,
    text: Integer[np.ndarray, " n"],
    segment: int,
    slots: int,
    length: int,
) -> Score:
    """Scores a text read once, segment by segment, with a memory of `slots`.

    Args:
      language: the model.
      text: `[n]`, the tokens.
      segment: tokens read at a time.
      slots: of the memory, all kinds of them together.
      length: what the score says of the length: most keys that a query sees.
    """
    block, count = windows.lanes(text, segment, 0, 1)
    block = windows.Block(
        *(x.reshape(len(x), count, segment).swapaxes(0, 1) for x in block)
    )
    scorer = perplexity.memory_scorer(language)
    sums, counts = scorer(language.params, block, memory_length=slots)
    nll = np.asarray(sums, np.float64).sum(axis=0)
    tokens = np.asarray(counts, np.int64).sum(axis=0)
    return Score("memory", length, float(nll.sum()), int(tokens.sum()), nll, tokens)
