"""Optax's optimisers with warm-up, cosine decay, clipping and what decays."""

import re
from collections.abc import Callable

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
    """Returns clipping, then the optimiser at a learning rate of 1.

    Its updates have still to be multiplied by `schedule(config)` at the train state's
    step. So the rate follows that step alone, and no second count can drift from it.

    All decay the same parameters (`decays`) by learning rate times `weight_decay`:

    * "adamw": Loshchilov & Hutter 2019. "adam": the same without decay.
    * "lamb": You et al. 2020; Adam's step, scaled per parameter by its norm.
    * "adafactor": Shazeer & Stern 2018, without momentum, with relative step sizes (the
      rate is times a parameter's root mean square); moments of matrices with both sides
      128 or more are factored. `b1`, `b2` and `epsilon` say nothing.
    * "muon": orthogonalised momentum (0.95) for the matrices inside of the network,
      which are those that decay, without the output projection; its steps have
      AdamW's size (0.2 root mean square, Liu et al. 2025), so AdamW's rates suit. The
      rest is left to Adam with Nesterov momentum, as Optax does, and doesn't decay.
    """
    decay, moments = config.weight_decay, {"b1": config.b1, "b2": config.b2}
    if config.optimiser in ("adamw", "adam"):
        built = optax.adamw(
            1.0, **moments, eps=config.epsilon, weight_decay=decay, mask=decay_mask
        )
    elif config.optimiser == "lamb":
        built = optax.lamb(
            1.0, **moments, eps=config.epsilon, weight_decay=decay, mask=decay_mask
        )
    elif config.optimiser == "adafactor":
        built = optax.adafactor(
            1.0, weight_decay_rate=decay or None, weight_decay_mask=decay_mask
        )
    else:
        built = optax.contrib.muon(
            1.0,
            weight_decay=decay,
            weight_decay_mask=decay_mask,
            adam_b1=config.b1,
            adam_b2=config.b2,
            eps=config.epsilon,
            muon_weight_dimension_numbers=matrices,
            consistent_rms=0.2,
        )
    if config.clip is None:
        return built
    return optax.chain(optax.clip_by_global_norm(config.clip), built)


def matrices(params: PyTree) -> PyTree:
    """Returns which axes are a matrix's inputs and outputs, None for what is none.

    Kernels that split or join heads are one matrix over all heads.
    """

    def axes(path, leaf):
        name, ndim = path_name(path), jnp.ndim(leaf)
        if not decays(name, ndim) or ndim not in (2, 3) or name == "output":
            return None
        if ndim == 2:
            return optax.contrib.MuonDimensionNumbers(0, 1)
        if name.endswith("output/kernel"):  # [h d w]
            return optax.contrib.MuonDimensionNumbers((0, 1), 2)
        return optax.contrib.MuonDimensionNumbers(0, (1, 2))

    return jax.tree_util.tree_map_with_path(axes, params)
