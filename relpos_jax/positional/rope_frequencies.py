"""The formulas that stretch rotary embeddings to longer contexts.

Letters: `d` features turn, in planes `i = 0 .. d/2 - 1` with frequencies
`theta_i = base^(-2i/d)`; the model was trained on `L` positions (`original_length`) and
is to run on `s L` (`factor` is `s`); `l` is the length of the document at hand. What
does not depend on `l` is a constant: computed in float64 when a program is built.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from relpos_jax.where import Where


def inverse_frequencies(dim: int, base: float = 10000.0) -> Float[np.ndarray, " f"]:
    """Returns `theta_i = base^(-2i/d)`, float64 (Su et al. 2021, equation 15).

    Raises:
      ValueError: `dim` is odd or less than 2.
    """
    if dim < 2 or dim % 2:
        raise ValueError(f"rotation pairs features, so dim must be even, got {dim}")
    return float(base) ** (-np.arange(0, dim, 2) / dim)


def ntk_exponents(dim: int) -> Float[np.ndarray, " f"]:
    """Returns `2i/(d-2)`: NTK-aware scaling divides `theta_i` by `s^(2i/(d-2))`.

    The same as the changed base `base s^(d/(d-2))` (bloc97 2023; YaRN, equation 16):
    the fastest plane stays, the slowest is divided by `s`.

    Raises:
      ValueError: fewer than 4 features turn.
    """
    if dim < 4:
        raise ValueError(f"NTK scaling needs at least 4 features that turn, got {dim}")
    return np.arange(0, dim, 2) / (dim - 2)


def dynamic_ntk_stretch(
    length: Num[Array, "*n"], original_length: int, factor: float
) -> Float[Array, "*n"]:
    """Returns `max(1, s l/L - (s - 1))`, which takes `s`' place in NTK-aware scaling.

    emozilla (2023). The base becomes `base (s l/L - (s - 1))^(d/(d-2))`; up to the
    length `L` nothing changes.
    """
    past = jnp.maximum(length.astype(jnp.float32) - original_length, 0.0)
    return 1.0 + factor * past / original_length


def correction_range(
    dim: int,
    base: float,
    original_length: int,
    fast: float,
    slow: float,
    *,
    truncate: bool = True,
) -> tuple[float, float]:
    """Returns the plane indices where `fast` and `slow` turns fit into `L` positions.

    `i(r) = d ln(L / (2 pi r)) / (2 ln base)`, rounded outwards if `truncate`, and kept
    within `0 .. d - 1` (the released YaRN code; the last plane is `d/2 - 1`).
    """

    def index(turns):
        return dim * math.log(original_length / (turns * 2 * math.pi)) / (2 * log_base)

    log_base = math.log(base)
    low, high = index(fast), index(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return float(low), float(max(low, high))


def dimension_ramp(dim: int, low: float, high: float) -> Float[np.ndarray, " f"]:
    """Returns 1 up to plane `low`, 0 from plane `high`, linear in the index between."""
    high = high + 0.001 if high == low else high
    return 1.0 - np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)


def turns_ramp(
    frequency: Float[np.ndarray, " f"],
    original_length: int,
    fast: float = 32.0,
    slow: float = 1.0,
) -> Float[np.ndarray, " f"]:
    """Returns `gamma(r) = (r - slow) / (fast - slow)` within 0 .. 1.

    `r = L theta / (2 pi)` is the number of turns in the training length (Peng et al.
    2023, equations 17 and 18, with `alpha` = slow and `beta` = fast).
    """
    turns = original_length * frequency / (2 * math.pi)
    return np.clip((turns - slow) / (fast - slow), 0, 1)


def llama3_frequencies(
    frequency: Float[np.ndarray, " f"],
    factor: float,
    original_length: int,
    low: float = 1.0,
    high: float = 4.0,
) -> Float[np.ndarray, " f"]:
    """Returns `theta (gamma + (1 - gamma) / s)`, `gamma` the `turns_ramp` low .. high.

    Llama 3.1 (released code): planes that turn more than `high` times in the training
    length stay, those that turn less than `low` times are divided by `s`.
    """
    gamma = turns_ramp(frequency, original_length, high, low)
    return frequency * (gamma + (1 - gamma) / factor)


def yarn_attention_factor(factor, mscale: float = 1.0):
    """Returns `0.1 mscale ln s + 1`, 1 for `s <= 1` (Peng et al. 2023, equation 22).

    It multiplies cosine and sine alike, so that logits grow by its square.
    """
    if isinstance(factor, jax.Array):
        return 0.1 * mscale * jnp.log(jnp.maximum(factor, 1.0)) + 1.0
    return 0.1 * mscale * math.log(max(factor, 1.0)) + 1.0


def longrope_attention_factor(factor: float, original_length: int) -> float:
    """Returns `sqrt(1 + ln s / ln L)`, 1 for `s <= 1` (LongRoPE's released code)."""
    return math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original_length))


def document_lengths(
    q_at: Where, k_at: Where
) -> tuple[Num[Array, "b q"], Num[Array, "b k"]]:
    """Returns the length of each token's own document: 1 + the highest position in it.

    All tokens of the call count, queries and keys; padding (segment 0) makes a document
    of its own, which nobody reads. Sorts: O(n log n) time and O(n) memory.
    """
    queries = q_at.position.shape[1]
    both = [jnp.concatenate([x, y], axis=1) for x, y in zip(q_at, k_at, strict=True)]
    position, segment = both
    ordered, highest = jax.lax.sort((segment, position), dimension=1, num_keys=2)

    def last(ordered, segment):
        return jnp.searchsorted(ordered, segment, side="right") - 1

    at_last = jax.vmap(last)(ordered, segment)
    length = 1 + jnp.take_along_axis(highest, at_last, axis=1)
    return length[:, :queries], length[:, queries:]
