"""Stand-in language models whose loss is known by hand."""

import jax
import jax.numpy as jnp

from relpos_jax.evaluation.perplexity import Language
from relpos_jax.where import Where

FAR = 10**6


def no_memory(params, batch, length):
    """A memory that only knows its size: token ids and their `Where`."""
    empty = jnp.zeros((batch, length), jnp.int32)
    return empty, Where(empty, empty)


def remember(memory, tokens, at):
    """Appends a segment and keeps the last tokens, as many as there were slots."""
    old, old_at = memory
    slots = old.shape[1]

    def join(a, b):
        joined = jnp.concatenate([a, b], axis=1)
        return joined[:, joined.shape[1] - slots :]

    kept = Where(join(old_at.position, at.position), join(old_at.segment, at.segment))
    return join(old, tokens), kept


def uniform(vocabulary: int) -> Language:
    """Equal logits: perplexity is the vocabulary."""

    def apply(params, tokens, at, memory):
        return jnp.zeros((*tokens.shape, vocabulary)), remember(memory, tokens, at)

    return Language({}, apply, no_memory)


def unigram(losses) -> Language:
    """The target v costs `losses[v]` nats, in whatever context."""

    def apply(params, tokens, at, memory):
        # A spare entry takes what is left of the probability.
        kept = -params
        spare = jnp.log1p(-jnp.exp(kept).sum())
        logits = jnp.concatenate([kept, spare[None]])
        logits = jnp.broadcast_to(logits, (*tokens.shape, len(logits)))
        return logits, remember(memory, tokens, at)

    return Language(jnp.asarray(losses, jnp.float32), apply, no_memory)


def context_counter(size: int) -> Language:
    """For the text 0, 1, 2, ...: costs target `params` its context, the others none.

    The context is the number of tokens that are visible when the target is predicted,
    the memory's included. The traces are counted in `traces`.
    """
    traces = []

    def apply(params, tokens, at, memory):
        traces.append(tokens.shape)
        old, old_at = memory
        seen = jnp.concatenate([old, tokens], axis=1)
        real = jnp.concatenate([old_at.segment, at.segment], axis=1) > 0
        seen = jnp.where(real, seen, FAR)
        # No token may be seen twice, nor any be missing in between.
        earliest = seen.min(axis=1, keepdims=True)
        present = (seen[:, None, :] <= tokens[:, :, None]).sum(axis=-1)
        context = tokens - earliest + 1
        context = jnp.where(context == present, context, -FAR).astype(jnp.float32)
        marked = tokens + 1 == params
        cost = jnp.where(marked, context, 0.0)
        target = jax.nn.one_hot(tokens + 1, size + 1)
        logits = jnp.where(target > 0, 0.0, -1e9)
        # loss = log(1 + exp(spare)): the spare entry makes it `cost`.
        spare = jnp.where(cost > 0, jnp.log(jnp.expm1(cost)), -1e9)
        logits = logits.at[..., -1].set(spare)
        return logits, remember(memory, tokens, at)

    language = Language(jnp.int32(0), apply, no_memory)
    return language, traces
