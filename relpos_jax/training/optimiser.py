"""AdamW with warm-up, cosine decay, clipping and a rule for what decays.

Loshchilov & Hutter 2019 (decoupled weight decay), through optax.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from relpos_jax.training.config import TrainingConfig

_SPARED = re.compile(r"norm|bias|embed|position|shared|scale|gain")


def path_name(path: tuple) -> str:
    """Returns a leaf's path as `a/b/0/c`, for messages and rules."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def decays(path: str, ndim: int) -> bool:
    """Returns whether weight decay applies to a parameter.

    The rule: matrices decay; everything else doesn't. A parameter is spared if it has
    fewer than two axes (norm gains, biases), or if any part of its path says that it
    is a norm, a bias, an embedding or part of a position encoding (words: norm, bias,
    embed, position, shared, scale, gain). A table of position biases or `u` and `v` of
    Transformer-XL has two axes and yet is no matrix: shrinking it pulls a model
    towards no position information, which is what is being studied.

    Args:
      path: as `path_name` writes it.
      ndim: number of axes.
    """
    return ndim >= 2 and not _SPARED.search(path.lower())


def decay_mask(params: PyTree) -> PyTree:
    """Returns a tree of booleans with `params`' structure: which leaves decay."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: decays(path_name(path), jnp.ndim(leaf)), params
    )


def schedule(
    config: TrainingConfig,
) -> Callable[[Int[Array, ""] | int], Float[Array, ""]]:
    """Returns the learning rate as a function of the step, counted from 0.

    Linear from `learning_rate / warmup` at step 0 (no step has rate 0) to
    `learning_rate` at step `warmup - 1`, then half a cosine down to
    `final_learning_rate_fraction * learning_rate` at the last step.
    """
    last = config.final_learning_rate_fraction

    def rate(step):
        done = jnp.asarray(step, jnp.float32) + 1
        warm = jnp.minimum(done / max(config.warmup, 1), 1.0)
        part = (done - config.warmup) / max(config.steps - config.warmup, 1)
        part = jnp.clip(part, 0.0, 1.0)
        cosine = last + (1 - last) * 0.5 * (1 + jnp.cos(jnp.pi * part))
        return config.learning_rate * warm * cosine

    return rate


def build(config: TrainingConfig) -> optax.GradientTransformation:
    """Returns clipping, then AdamW under `schedule(config)` and `decay_mask`.

    The state's count is the number of updates so far, so it equals the train state's
    step, also after a resume.
    """
    parts: list[Any] = []
    if config.clip is not None:
        parts.append(optax.clip_by_global_norm(config.clip))
    parts.append(
        optax.adamw(
            schedule(config),
            b1=config.b1,
            b2=config.b2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        )
    )
    return optax.chain(*parts)
