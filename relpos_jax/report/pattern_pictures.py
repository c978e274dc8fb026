"""Pictures of sparse patterns: which queries see which keys."""

import numpy as np
from matplotlib.figure import Figure

from relpos_jax import where
from relpos_jax.attention.hierarchy import Earlier, Within, segments_of
from relpos_jax.attention.patterns import (
    BigBird,
    Dilated,
    Fixed,
    Strided,
    WindowGlobal,
)
from relpos_jax.masks import Mask, Window

LENGTH = 32

# Small enough to see each pair: 32 positions.
EXAMPLES: dict[str, tuple[Mask, ...]] = {
    "window": (Window(6), Window(6, causal=False)),
    "dilated": (Dilated(4, 3), Dilated(4, 3, causal=False)),
    "window_global": (
        WindowGlobal(4, (0, 13)),
        WindowGlobal(4, (0, 13), causal=False),
    ),
    "big_bird": (
        BigBird(2, 3, 2, (0,), seed=1),
        BigBird(2, 3, 2, (0, 15), seed=1, causal=False, blocks=16),
    ),
    "strided": (Strided(6), Strided(6, causal=False)),
    "fixed": (Fixed(6, 1),),
    "hierarchical": (Within(6),),
}


def seen(mask: Mask, length: int = LENGTH) -> np.ndarray:
    """Returns which pairs of one document attend, `[q k]`, 0 or 1."""
    at = where.contiguous(1, length)
    return np.asarray(mask(at, at))[0].astype(float)


def picture(name: str) -> Figure:
    """Returns the mask of an example: causal beside symmetric, where it has both."""
    masks = EXAMPLES[name]
    figure = Figure(figsize=(3.2 * len(masks), 3.5), dpi=100, layout="constrained")
    axes = figure.subplots(1, len(masks), squeeze=False)[0]
    for axis, mask in zip(axes, masks, strict=True):
        pairs = seen(mask)
        if isinstance(mask, Within):
            at = segments_of(where.contiguous(1, LENGTH), mask.size)
            # A summary's weight is spread over the tokens that it is the mean of.
            pairs = pairs + 0.4 * np.asarray(Earlier()(at, at))[0]
        axis.imshow(1 - pairs, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axis.set_xticks(range(0, LENGTH, 8))
        axis.set_yticks(range(0, LENGTH, 8))
        axis.set_xlabel("key")
        axis.set_ylabel("query")
        axis.set_title("causal" if mask.causal else "symmetric", fontsize=10)
    return figure
