"""Perplexity by length, under four protocols that answer different questions.

- `non_overlapping`: chunks of the length (ALiBi, Press et al. 2022, table 2). A longer
  chunk also means fewer tokens with little context, so a falling curve need not mean
  that far context helps.
- `same_targets`: the same tokens at every length; only their context differs.
- `sliding`: a window moved by a stride; every target has nearly the whole context.
- `memory`: segments of the training length with a memory of the rest (Transformer-XL,
  Dai et al. 2019), scanned in one compiled call.

Sums of negative log-likelihood (nats) and numbers of tokens leave the compiled code;
they are added in float64, and every mean is taken at the end, from the totals.
"""

import concurrent.futures
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Integer

from relpos_jax.evaluation import windows
from relpos_jax.evaluation.config import EvaluationConfig, limited, plan_windows
from relpos_jax.positional.positions import PositionSampler
from relpos_jax.training.losses import token_losses
from relpos_jax.where import Where

RANDOMIZED_WITH_MEMORY = (
    "randomized positions are drawn for a sequence as a whole, and segments that were "
    "drawn apart do not fit together"
)
_WORKERS = 2


class Language(NamedTuple):
    """A language model as pure functions of its parameters.

    Attributes:
      params: pytree of arrays.
      apply: `(params, tokens [b t], at, memory) -> (logits [b t v], memory)`.
      init_memory: `(params, batch, length) -> memory`, empty; length 0 for none.
      refusal: why the model cannot be used with memory; None if it can.
      losses: `(params, tokens, targets, at, memory) -> (losses [b t], memory)`, where
        there is a way without all logits; None to take them from `apply`.
      reach: tokens that a slot of memory stands for, at most.
    """

    params: Any
    apply: Callable[[Any, Int[Array, "b t"], Where, Any], tuple[Array, Any]]
    init_memory: Callable[[Any, int, int], Any]
    refusal: str | None = None
    losses: Callable[..., tuple[Array, Any]] | None = None
    reach: int = 1

    @classmethod
    def of(
        cls,
        graphdef,
        params,
        refusal: str | None = None,
        sampler: PositionSampler = PositionSampler(),
    ) -> "Language":
        """Wraps an NNX module that was split into `graphdef` and `params`.

        `sampler` changes the positions of every call, always by the same draw.
        """
        if sampler.whole:
            refusal = refusal or RANDOMIZED_WITH_MEMORY

        def place(at):
            return sampler(jax.random.key(0), at)

        def apply(params, tokens, at, memory):
            model = nnx.merge(graphdef, params)
            return model(tokens, place(at), memory, spacing=sampler.spacing)

        def init_memory(params, batch, length):
            return nnx.merge(graphdef, params).init_memory(batch, length)

        def losses(params, tokens, targets, at, memory):
            model = nnx.merge(graphdef, params)
            return model.losses(
                tokens, targets, place(at), memory, spacing=sampler.spacing
            )

        # Config has no default: models of other kinds may be wrapped too.
        config = getattr(nnx.merge(graphdef, params), "config", None)
        compressive = getattr(config, "compressive", None)
        reach = 1 if compressive is None else compressive.rate
        return cls(params, apply, init_memory, refusal, losses, reach)

    def score(self, params, tokens, targets, at: Where, memory):
        """Returns -log p(target) of each token `[b t]`, nats, and the memory after."""
        if self.losses is not None:
            return self.losses(params, tokens, targets, at, memory)
        logits, memory = self.apply(params, tokens, at, memory)
        return token_losses(logits, targets), memory


class Score(NamedTuple):
    """Result of one protocol at one length.

    Attributes:
      protocol: one of `evaluation.config.PROTOCOLS`.
      length: tokens in a window; for `memory`, segment and memory together.
      nll: sum of the negative log-likelihood, nats.
      tokens: number of targets scored.
      position_nll: `[t]`, the sum by position in the window (in the segment, for
        `memory`), nats.
      position_tokens: `[t]`, number of targets scored by position.
    """

    protocol: str
    length: int
    nll: float
    tokens: int
    position_nll: Float[np.ndarray, " t"]
    position_tokens: Int[np.ndarray, " t"]

    def first(self, length: int) -> "Score":
        """Returns the score of the windows' first `length` positions alone.

        It is what windows of that length at the same places would give, for whatever
        looks back only and does not depend on how long a window is. So one pass over
        the longest windows has the loss at every shorter context: `non_overlapping` at
        a shorter length, in contrast, begins more windows.

        Raises:
          ValueError: a length outside `1 ... length`, or windows with memory.
        """
        if self.protocol == "memory" or not 1 <= length <= self.length:
            raise ValueError(
                f"no first {length} positions of {self.protocol!r} windows of "
                f"{self.length} tokens"
            )
        nll = self.position_nll[:length]
        tokens = self.position_tokens[:length]
        return _score(self.protocol, length, nll, tokens)

    @property
    def perplexity(self) -> float:
        return perplexity(self.nll, self.tokens)

    @property
    def bits_per_byte(self) -> float:
        return bits_per_byte(self.nll, self.tokens)


class Evaluation(NamedTuple):
    """Scores of one model, and the protocols left out, with the reason."""

    scores: tuple[Score, ...]
    skipped: Mapping[str, str]


def perplexity(nll: float, units: int) -> float:
    """Returns `exp(nll / units)`; infinite where that overflows.

    Args:
      nll: total negative log-likelihood, nats.
      units: what it is shared among: tokens, or the words of the original text.
    """
    mean = nll / units
    return math.exp(mean) if mean < 709 else math.inf


def bits_per_byte(nll: float, units: int) -> float:
    """Returns `nll / ln 2 / units`.

    Args:
      nll: total negative log-likelihood, nats.
      units: bytes of the text (for bits per character: its characters).
    """
    return nll / math.log(2) / units


def window_scorer(language: Language) -> Callable:
    """Returns the compiled scorer of windows: one compilation a shape.

    The three protocols without memory share it, since they differ in data alone.
    It maps `(params, block)` to sums `[t]` and counts `[t]` by position.
    """

    @jax.jit
    def score(params, block):
        batch, length = block.inputs.shape
        at = Where(_steps(batch, length), block.segment)
        memory = language.init_memory(params, batch, 0)
        losses, _ = language.score(params, block.inputs, block.targets, at, memory)
        return _totals(losses, block.weights)

    return score


def memory_scorer(language: Language) -> Callable:
    """Returns the compiled scorer of lanes: scans all segments in one call.

    It maps `(params, block, memory_length)`, the block's arrays being `[s b t]`, to
    sums `[s t]` and counts `[s t]` by segment and position.
    """

    @functools.partial(jax.jit, static_argnames="memory_length")
    def score(params, block, memory_length):
        segments, batch, length = block.inputs.shape

        def read(memory, step):
            number, block = step
            at = Where(number * length + _steps(batch, length), block.segment)
            losses, memory = language.score(
                params, block.inputs, block.targets, at, memory
            )
            return memory, _totals(losses, block.weights)

        memory = language.init_memory(params, batch, memory_length)
        _, totals = jax.lax.scan(read, memory, (jnp.arange(segments), block))
        return totals

    return score


def evaluate(
    language: Language,
    text: Integer[np.ndarray, " n"],
    train_length: int,
    config: EvaluationConfig,
) -> Evaluation:
    """Scores a text under every protocol at every length.

    Args:
      language: the model.
      text: `[n]`, the held-out tokens.
      train_length: tokens in a training window; the unit of `config.multiples`, and
        the segment of `memory`.
      config: what to evaluate.

    Returns:
      One score a protocol and length, in that order, and the protocols skipped.

    Raises:
      ValueError: the text is shorter than the longest window.
    """
    scores = list(each(language, text, train_length, config))
    return ordered(scores, language, config)


def ordered(
    scores: Sequence[Score], language: Language, config: EvaluationConfig
) -> Evaluation:
    """Puts the scores of `each` in the config's order and says what was left out."""
    skipped = {}
    if "memory" in config.protocols and language.refusal is not None:
        skipped["memory"] = language.refusal
    place = {protocol: i for i, protocol in enumerate(config.protocols)}
    scores = sorted(scores, key=lambda score: (place[score.protocol], score.length))
    return Evaluation(tuple(scores), skipped)


def each(
    language: Language,
    text: Integer[np.ndarray, " n"],
    train_length: int,
    config: EvaluationConfig,
) -> Iterator[Score]:
    """Yields the scores of `evaluate` as they come, for a progress bar."""
    needed = config.needed(train_length)
    if len(text) < needed:
        raise ValueError(
            f"the text to evaluate on has {len(text)} tokens, the longest window "
            f"needs {needed}: take a longer text, a larger held-out part, or smaller "
            "evaluation.multiples"
        )
    by_window, by_lane = window_scorer(language), memory_scorer(language)
    protocols = [name for name in config.protocols if name != "memory"]
    tasks = []
    # Longest first: they take longest, and nothing should be left to wait for at last.
    for length in reversed(config.lengths(train_length)):
        given = (language.params, text, train_length, length, config)
        if protocols:
            tasks.append(functools.partial(_by_window, by_window, protocols, *given))
        if "memory" in config.protocols and language.refusal is None:
            tasks.append(functools.partial(_by_lane, by_lane, language.reach, *given))
    # Compiling keeps one core busy: beside it, another length is compiled or runs.
    with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
        running = [pool.submit(task) for task in tasks]
        try:
            for task in concurrent.futures.as_completed(running):
                yield from task.result()
        finally:
            for task in running:
                task.cancel()


def _by_window(scorer, protocols, params, text, train_length, length, config):
    """Scores one length under the protocols without memory, which share a program."""
    batch = max(1, config.tokens_per_batch // length)
    scores = []
    for protocol in protocols:
        plan = plan_windows(protocol, len(text), length, train_length, config)
        # Dispatched before the first is read back, so that the device never waits.
        totals = [
            scorer(params, windows.fill(text, plan, slice(at, at + batch), batch))
            for at in range(0, len(plan.start), batch)
        ]
        nll = sum(np.asarray(sums, np.float64) for sums, _ in totals)
        tokens = sum(np.asarray(counts, np.int64) for _, counts in totals)
        scores.append(_score(protocol, length, nll, tokens))
    return scores


def _by_lane(scorer, reach, params, text, train_length, length, config):
    """Scores one length with memory."""
    segment = min(train_length, length)
    memory_length = length - segment
    text = text[: limited(len(text), config.memory_tokens)]
    block, count = windows.lanes(
        text, segment, reach * memory_length, config.memory_lanes
    )
    block = windows.Block(
        *(x.reshape(len(x), count, segment).swapaxes(0, 1) for x in block)
    )
    sums, counts = scorer(params, block, memory_length=memory_length)
    nll = np.asarray(sums, np.float64).sum(axis=0)
    tokens = np.asarray(counts, np.int64).sum(axis=0)
    return [_score("memory", length, nll, tokens)]


def _score(protocol, length, nll, tokens) -> Score:
    return Score(protocol, length, float(nll.sum()), int(tokens.sum()), nll, tokens)


def _steps(batch: int, length: int) -> Int[Array, "b t"]:
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))


def _totals(losses, weights) -> tuple[Float[Array, " t"], Int[Array, " t"]]:
    """Sums and counts by position of `[b t]` losses."""
    # `where`, not a product: padding may hold anything, and 0 times NaN is NaN.
    losses = jnp.where(weights, losses, 0.0)
    return losses.sum(axis=0), weights.astype(jnp.int32).sum(axis=0)
