"""Encoder-decoders on sequences longer than those they were trained on.

Trains one small model for each encoding and seed, all on the same sequences, and counts
how many sequences of each length come out right to the last token.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from relpos_jax import positional
from relpos_jax.data.transduction import TASKS, VOCABULARY, Pairs, Transductions
from relpos_jax.models import EncoderDecoder, EncoderDecoderConfig, ModelConfig
from relpos_jax.training.config import TrainingConfig
from relpos_jax.training.objectives import Transduction
from relpos_jax.training.state import initial, key_for
from relpos_jax.training.step import make_train_call

# What an encoder has in place of an encoding that tells apart what is behind only.
BOTH_WAYS = {"alibi": "alibi_symmetric", "t5": "t5_bidirectional"}
_TEST_SEED = 2**20  # far from any training seed


@dataclasses.dataclass(frozen=True)
class LengthStudy:
    """What is compared, and on which lengths.

    Attributes:
      task: a name of `relpos_jax.data.transduction.TASKS`.
      encodings: names of `positional.ENCODINGS`, for encoder and decoder alike; see
        `BOTH_WAYS`. T5's bias is times sqrt(head_dim), as in the study of perplexity.
      train_length: training lengths are uniform in `1 .. train_length`.
      test_lengths: the lengths tested.
      test_rows: sequences tested of each length.
      seeds: of parameters and training sequences; the test's are always the same.
      layers, width, heads, head_dim, feedforward, dropout: of both halves.

    Raises:
      ValueError: an unknown task, or an encoding that an encoder cannot have.
    """

    task: str = "copy"
    encodings: tuple[str, ...] = ("none", "sinusoidal", "rope", "alibi", "t5", "shaw")
    train_length: int = 10
    test_lengths: tuple[int, ...] = (5, 10, 12, 15, 20)
    test_rows: int = 256
    seeds: tuple[int, ...] = (0,)
    layers: int = 2
    width: int = 64
    heads: int = 4
    head_dim: int = 16
    feedforward: int = 128
    dropout: float = 0.0

    def __post_init__(self):
        if self.task not in TASKS:
            raise ValueError(f"task must be one of {[*TASKS]}, got {self.task!r}")
        for name in self.encodings:
            self.model(name)

    def model(self, name: str) -> EncoderDecoderConfig:
        """Returns the model of an encoding."""

        def encoding(name):
            made = positional.make(name)
            if isinstance(made, type(positional.ENCODINGS["t5"])):
                made = dataclasses.replace(made, gain=self.head_dim**0.5)
            return made

        decoder = ModelConfig(
            vocabulary=VOCABULARY,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            head_dim=self.head_dim,
            feedforward=self.feedforward,
            dropout=self.dropout,
            position=encoding(name),
        )
        other = encoding(BOTH_WAYS.get(name, name))
        return EncoderDecoderConfig.of(decoder, encoder_position=other)


class Right(NamedTuple):
    """How much of a test came out right.

    Attributes:
      encoding, seed, length: of which model, on which length.
      sequences, exact: tested, and right to the last token under greedy decoding.
      tokens, right: targets, and those that are most likely after the right ones.
    """

    encoding: str
    seed: int
    length: int
    sequences: int
    exact: int
    tokens: int
    right: int


@functools.partial(jax.jit, static_argnums=0)
def count_right(graphdef: nnx.GraphDef, params: Any, pairs: Pairs) -> Int[Array, "2"]:
    """Returns how many sequences are right throughout, and how many tokens.

    Greedy decoding gives a whole target if, and only if, each of its tokens is the most
    likely after the right ones before it, so one pass tells both.
    """
    model = nnx.merge(graphdef, params)
    logits = model(pairs.source, pairs.source_at, pairs.inputs, pairs.at)
    counted = pairs.weight > 0
    right = (jnp.argmax(logits, axis=-1) == pairs.targets) & counted
    exact = jnp.all(right | ~counted, axis=1)
    return jnp.stack([jnp.sum(exact), jnp.sum(right)])


def train(
    study: LengthStudy,
    name: str,
    training: TrainingConfig,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[nnx.GraphDef, Any]:
    """Returns a trained model, as `nnx.split` gives it.

    Args:
      study: sizes and task.
      name: the encoding's.
      training: steps, batch, optimiser and seed; lengths are the study's.
      progress: is called with the step and the mean loss, now and then.

    Raises:
      FloatingPointError: the loss is not finite.
    """
    model = EncoderDecoder(study.model(name), key=key_for(training.seed, "parameters"))
    graphdef, params = nnx.split(model)
    memory = model.decoder.init_memory(training.batch)
    state = initial(nnx.as_pure(params), training, memory)
    call = make_train_call(graphdef, training, Transduction())
    key = key_for(training.seed, "dropout") if study.dropout else None
    batches = Transductions(
        study.task, training.batch, 1, study.train_length, training.seed
    )
    for step in range(0, training.steps, training.steps_per_call):
        count = min(training.steps_per_call, training.steps - step)
        stack = batches.stack(step, training.steps_per_call)
        state, report = call(state, stack, count, key, None)
        loss = float(report.loss.sum() / report.count.sum())
        if not np.isfinite(loss):
            raise FloatingPointError(f"{name}: the loss at step {step} is {loss}")
        progress(step + count, loss)
    return graphdef, state.params


def run(
    study: LengthStudy,
    training: TrainingConfig,
    progress: Callable[[str, int, int, float], None] = lambda *_: None,
) -> Iterator[Right]:
    """Trains and tests every encoding with every seed, and yields each length's counts.

    Args:
      study: what is compared.
      training: of each run; its seed is replaced by the study's.
      progress: is called with encoding, seed, step and loss, now and then.
    """
    for name in study.encodings:
        for seed in study.seeds:
            own = dataclasses.replace(training, seed=seed)
            model = train(study, name, own, functools.partial(progress, name, seed))
            for length in study.test_lengths:
                rows = (study.test_rows, length, length, _TEST_SEED)
                pairs = Transductions(study.task, *rows).batch(0)
                exact, right = (int(x) for x in count_right(*model, pairs))
                tokens = int(pairs.weight.sum())
                yield Right(name, seed, length, len(pairs.source), exact, tokens, right)


def table(study: LengthStudy, results: list[Right]) -> str:
    """Returns a Markdown table: exact match in percent, encodings by lengths.

    With several seeds, the mean over them and, behind ±, their standard deviation.
    """
    lengths = study.test_lengths
    lines = [
        f"| {study.task} | " + " | ".join(map(str, lengths)) + " |",
        "|---|" + "---|" * len(lengths),
    ]
    for name in study.encodings:
        cells = []
        for length in lengths:
            found = [r for r in results if (r.encoding, r.length) == (name, length)]
            share = np.array([100 * r.exact / r.sequences for r in found])
            spread = f" ± {share.std(ddof=1):.0f}" if len(share) > 1 else ""
            cells.append(f"{share.mean():.0f}{spread}" if len(share) else "-")
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)
