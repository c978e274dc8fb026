"""Continuing prompts: one compiled loop for all lengths, with memory as data.

    decoder = generation.prepare(config, params)
    for row in generation.generate(decoder, prompts, 100, SamplingConfig(top_k=40)):
        row.tokens

Prompts are padded on the left to whole calls of `prefill` tokens, so there are two
compiled programs a batch size, one that reads prompts and one that samples, whatever
the prompts' lengths, the number of new tokens, or the way of sampling.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Integer, Key, PyTree

from relpos_jax.evaluation import surgery
from relpos_jax.evaluation.prompts import lay_out
from relpos_jax.evaluation.sampling import Knobs, SamplingConfig, sample
from relpos_jax.memory import CompressiveMemory, KeyValueCache, Memory
from relpos_jax.models import ModelConfig
from relpos_jax.where import Where

KINDS = ("auto", "cache", "ring", "segment", "compressive")
OnChunk = Callable[[int, np.ndarray], None]


class Continuation(NamedTuple):
    """One row's new tokens.

    Attributes:
      tokens: `[n]`, without the stop.
      stop: the sequence of `SamplingConfig.stop` that ended it; None: it has all the
        tokens that were asked for.
    """

    tokens: Int[np.ndarray, " n"]
    stop: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Decoder:
    """A model made ready to continue prompts; see `prepare`.

    Attributes:
      config: of the model as it decodes: its window, and its encoding tabulated.
      graphdef, params: that model.
      kind: "cache", "ring", "segment" or "compressive".
      length: slots of the cache, or of compressive memory; for the others, the keys
        that a token may look back on, itself not among them.
      prefill: tokens of a call that reads prompts.
      chunk: new tokens between two looks of the host at what came.
    """

    config: ModelConfig
    graphdef: nnx.GraphDef
    params: PyTree
    kind: str
    length: int
    prefill: int
    chunk: int

    def memory(self, batch: int) -> Memory:
        """Returns an empty memory."""
        model = nnx.merge(self.graphdef, self.params)
        if self.kind == "compressive":
            more = {"every": self.prefill, "ragged": True}
            return model.init_memory(batch, self.length, **more)
        if self.kind == "segment":
            # Padding in front of prompts must not push zeros out that they still see.
            spare = self.prefill if self.config.memory_start == "zeros" else 0
            none = {"slots": 0} if self.config.compressive else {}
            return model.init_memory(batch, self.length + spare, **none)
        if self.kind == "cache":
            return model.init_cache(batch, self.length)
        # A call's last query must still find the first key of its window.
        return model.init_cache(batch, self.length + self.prefill, ring=True)


class State(NamedTuple):
    """Where a batch of texts stands between two calls.

    Attributes:
      memory: what the next token looks back on.
      logits: `[b v]`, of the next token.
      position: `[b]`, its position.
      step: number of new tokens so far.
    """

    memory: Memory
    logits: Float[Array, "b v"]
    position: Int[Array, " b"]
    step: Int[Array, ""]


def prepare(
    config: ModelConfig,
    params: PyTree,
    *,
    kind: str = "auto",
    length: int | None = None,
    tokens: int = 1024,
    prefill: int = 64,
    chunk: int = 16,
) -> Decoder:
    """Returns a decoder: the model with its memory chosen and its tables evaluated.

    Kinds of memory:

    * "cache": keys and values of all tokens in `length` slots, for prompt and
      continuation together; longer ones are refused.
    * "ring": keys and values of the last `length` tokens, written in turn.
    * "segment": the layers' inputs at the last `length` tokens (Dai et al. 2019,
      section 3.2), from which keys and values are projected again at every step. The
      same numbers as "ring", slower by that projection.
    * "compressive": compressed memory behind the last states. Each row is what it is
      when its text is read in segments of `prefill` tokens.
    * "auto": compressive for a model that is so; a ring for one with memory, a window
      or a sparse pattern that looks back so far only; else a cache.

    With a ring or segment memory each token sees itself and the `length` tokens before
    it, however the text was cut into calls (`same_length`, as TensorFlow's code counts
    it), or fewer if the model has a narrower window. Before a text stands nothing, or,
    where `config.memory_start` is "zeros", the zero vectors that the model was trained
    with: in segment memory alone, which "auto" then is.

    Args:
      config: of the model.
      params: its parameters, as `nnx.split` or a checkpoint gave them.
      kind: see above.
      length: see above; by default `tokens` slots of a cache, rounded up, and otherwise
        what the model had in training (its memory, or its window without the token
        itself).
      tokens: of the longest text, prompt and continuation together.
      prefill, chunk: see `Decoder`.

    Raises:
      ValueError: an unknown kind, sizes that are not positive, no `length` where the
        model gives none, segment memory with an absolute encoding, a pattern that
        looks back farther than a ring or segment memory, compressive memory for a model
        without, or another memory for a model whose memory starts with zeros.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
    trained = config.memory_length or (config.reach or 1) - 1
    sparse = config.pattern is not None or config.hierarchy is not None
    if sparse:
        trained = (config.reach or 1) - 1
    slots = 0 if config.compressive is None else config.compressive.length
    zeros = config.memory_start == "zeros" and config.memory_length > 0
    if kind == "auto":
        kind = "segment" if zeros else "ring" if trained else "cache"
        kind = "compressive" if slots else kind
    if zeros and kind != "segment":
        raise ValueError(
            f"kind='{kind}' keeps keys and values of tokens, and the model's memory "
            "starts with zero vectors (memory_start='zeros'): take kind='segment', or "
            "replace memory_start by 'empty' for a start that it was not trained with"
        )
    if kind == "compressive":
        if not slots:
            raise ValueError("the model has no compressed memory: take another kind")
        trained = config.memory_slots
    if length is None:
        # Few lengths, few compiled programs.
        length = -(-tokens // 256) * 256 if kind == "cache" else trained
    for name, value in (("length", length), ("prefill", prefill), ("chunk", chunk)):
        if value < 1:
            raise ValueError(
                f"{name} must be positive, got {value}"
                + (
                    f": the model has neither memory nor window, so say how far a "
                    f"{kind} should look back, or take kind='cache'"
                    if name == "length"
                    else ""
                )
            )
    farthest = length if kind == "cache" else length + 1
    if kind == "compressive":  # whatever its share, and what waits to be compressed
        farthest = (length + 1) * config.compressive.rate + prefill
    window = min(farthest, config.reach or farthest)
    if sparse and kind in ("ring", "segment"):
        if config.reach is None or config.reach > farthest:
            raise ValueError(
                f"{config.pattern or config.hierarchy} looks back on more than the "
                f"{length} tokens of this {kind}: take kind='cache', or a length of "
                "its reach"
            )
    elif kind in ("ring", "segment"):
        config = dataclasses.replace(config, window=window)
    changes = dict(dropout=0.0, attention_dropout=0.0, attention="auto")
    config = dataclasses.replace(config, **changes)
    config, params = surgery.tabulate(config, params, window)
    graphdef, _ = surgery.skeleton(config)
    decoder = Decoder(config, graphdef, params, kind, length, prefill, chunk)
    jax.eval_shape(lambda: jax.tree.leaves(decoder.memory(1)))  # or refuses
    return decoder


def generate(
    decoder: Decoder,
    prompts: Sequence[Integer[np.ndarray, " t"] | Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingConfig = SamplingConfig(),
    *,
    seeds: int | Sequence[int] = 0,
    on_chunk: OnChunk | None = None,
) -> list[Continuation]:
    """Continues a batch of prompts, each as if it were alone.

    Args:
      decoder: see `prepare`.
      prompts: token ids, at least one a prompt; lengths may differ.
      max_new_tokens: most tokens to add.
      sampling: how to choose them, and where to stop.
      seeds: a seed for each row, or one from which the rows count up. A row's choices
        depend on its own seed and the number of tokens before, nothing else.
      on_chunk: is called with a row's number and its next tokens as they come; tokens
        that may turn out to begin a stop are held back.

    Raises:
      ValueError: no or an empty prompt, ids outside the vocabulary, seeds of another
        number, or more tokens than the cache has slots; nothing was run then.
      FloatingPointError: the model's logits are not finite; says at which token.
    """
    prompts = [np.asarray(prompt, np.int32) for prompt in prompts]
    _check(decoder, prompts, max_new_tokens)
    batch = len(prompts)
    seeds = range(seeds, seeds + batch) if isinstance(seeds, int) else seeds
    if len(seeds) != batch:
        raise ValueError(f"{len(seeds)} seeds for {batch} prompts: give one for each")
    keys = jax.vmap(jax.random.key)(jnp.asarray(list(seeds), jnp.uint32))
    read, extend = programs(decoder.graphdef, decoder.chunk)
    state = start(decoder, prompts, read)
    rows = [_Row(sampling) for _ in prompts]
    made = 0
    while made < max_new_tokens and not all(row.finished for row in rows):
        count = min(decoder.chunk, max_new_tokens - made)
        state, tokens, good = extend(
            decoder.params, state, keys, sampling.knobs(), jnp.int32(count)
        )
        tokens, good = jax.device_get((tokens, good))
        made += count
        for number, row in enumerate(rows):
            if row.finished:
                continue
            if not good[number, :count].all():
                raise FloatingPointError(_not_finite(decoder, prompts, number, made))
            ready = row.add(tokens[number, :count], made == max_new_tokens)
            if on_chunk is not None and len(ready):
                on_chunk(number, ready)
    return [Continuation(row.tokens, row.stop) for row in rows]


def start(decoder: Decoder, prompts: Sequence[np.ndarray], read: Callable) -> State:
    """Returns the state behind prompts, read in calls of `decoder.prefill` tokens."""
    lengths, size = [len(prompt) for prompt in prompts], decoder.prefill
    memory = decoder.memory(len(prompts))
    compressive = isinstance(memory, CompressiveMemory)
    tokens, at = lay_out(prompts, size, at_ends=compressive)
    total = tokens.shape[1]
    if isinstance(memory, KeyValueCache):
        memory = memory.skipping(total - max(lengths))
    for begin in range(0, total, size):
        part = slice(begin, begin + size)
        here = jax.tree.map(lambda x, part=part: x[:, part], at)
        logits, memory = read(decoder.params, memory, tokens[:, part], here)
    return State(memory, logits, jnp.asarray(lengths, jnp.int32), jnp.int32(0))


@functools.lru_cache(maxsize=16)
def programs(graphdef: nnx.GraphDef, chunk: int) -> tuple[Callable, Callable]:
    """Returns the two compiled programs, `read` and `extend`.

    `read(params, memory, tokens [b t], at) -> (logits [b v], memory)` takes the next
    columns of the prompts. `extend(params, state, keys [b], knobs, count) -> (state,
    tokens [b chunk], finite [b chunk])` adds `count` tokens, at most `chunk`. Both
    write to the memory where it is: what they are given must not be used again.

    Args:
      graphdef: the model without its parameters.
      chunk: most tokens of a call of `extend`.
    """

    def step(params, memory, tokens, at):
        model = nnx.merge(graphdef, params)
        spacing = "any" if isinstance(memory, KeyValueCache) else "unit"
        if model.config.memory_start == "zeros":
            spacing = "rising"  # padding may stand between zeros and the first token
        if isinstance(memory, CompressiveMemory):
            spacing = "rising"  # padding may stand within a row
        hidden, memory = model.hidden(tokens, at, memory, spacing=spacing)
        return model.logits(hidden[:, -1:])[:, 0], memory

    @functools.partial(jax.jit, donate_argnums=1)
    def read(params, memory, tokens, at):
        return step(params, memory, tokens, at)

    @functools.partial(jax.jit, donate_argnums=1)
    def extend(params, state: State, keys, knobs: Knobs, count):
        batch = state.logits.shape[0]
        tokens = jnp.zeros((batch, chunk), jnp.int32)
        finite = jnp.zeros((batch, chunk), bool)

        def body(carry):
            i, state, tokens, finite = carry
            mine = _fold(keys, state.step)
            token = sample(mine, state.logits, knobs)
            good = jnp.isfinite(state.logits).any(-1) & ~jnp.isnan(state.logits).any(-1)
            tokens = tokens.at[:, i].set(token)
            finite = finite.at[:, i].set(good)
            at = Where(state.position[:, None], jnp.ones((batch, 1), jnp.int32))
            logits, memory = step(params, state.memory, token[:, None], at)
            state = State(memory, logits, state.position + 1, state.step + 1)
            return i + 1, state, tokens, finite

        carry = (jnp.int32(0), state, tokens, finite)
        _, *result = jax.lax.while_loop(lambda carry: carry[0] < count, body, carry)
        return tuple(result)

    return read, extend


def _fold(keys: Key[Array, " b"], step: Int[Array, ""]) -> Key[Array, " b"]:
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, step)


class _Row:
    """One row's tokens on the host, where stops are looked for."""

    def __init__(self, sampling: SamplingConfig):
        self.tokens = np.zeros(0, np.int32)
        self.stop: tuple[int, ...] | None = None
        self.finished = False
        self._sampling = sampling
        self._shown = 0

    def add(self, new: Int[np.ndarray, " n"], last: bool) -> Int[np.ndarray, " m"]:
        """Takes new tokens; returns those that are certain to stay, each once."""
        before = len(self.tokens)
        self.tokens = np.concatenate([self.tokens, new])
        found = self._first_stop(before)
        if found is not None:
            begin, self.stop = found
            self.tokens = self.tokens[:begin]
        self.finished = last or found is not None
        longest = max(map(len, self._sampling.stop), default=1)
        held = 0 if self.finished else longest - 1
        end = max(len(self.tokens) - held, self._shown)
        ready, self._shown = self.tokens[self._shown : end], end
        return ready

    def _first_stop(self, before: int) -> tuple[int, tuple[int, ...]] | None:
        """Returns the stop that ends first (the longest of several) and its start."""
        for end in range(before + 1, len(self.tokens) + 1):
            for stop in sorted(self._sampling.stop, key=len, reverse=True):
                begin = end - len(stop)
                early = begin < self._sampling.min_new_tokens
                if not early and tuple(self.tokens[begin:end].tolist()) == stop:
                    return begin, stop
        return None


def _check(decoder: Decoder, prompts: list[np.ndarray], new: int) -> None:
    if new < 1:
        raise ValueError(f"max_new_tokens must be positive, got {new}")
    if not prompts:
        raise ValueError("there is no prompt: give at least one")
    for number, prompt in enumerate(prompts):
        if prompt.ndim != 1 or not len(prompt):
            raise ValueError(
                f"prompt {number} has shape {prompt.shape}: give at least one token"
            )
        size = decoder.config.vocabulary
        wrong = prompt[(prompt < 0) | (prompt >= size)]
        if len(wrong):
            raise ValueError(
                f"prompt {number} has id {wrong[0]}, outside the vocabulary of {size}"
            )
    longest = max(map(len, prompts))
    if decoder.kind == "cache" and longest + new > decoder.length:
        raise ValueError(
            f"the cache has {decoder.length} slots, but the longest prompt of "
            f"{longest} and {new} new tokens need {longest + new}: raise `length`, ask "
            "for fewer tokens, or take kind='ring', which forgets the oldest"
        )


def _not_finite(decoder: Decoder, prompts, number: int, made: int) -> str:
    return (
        f"the logits of row {number} are not finite within its first "
        f"{len(prompts[number]) + made} positions. {decoder.config.past_training()}"
    )
