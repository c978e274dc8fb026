"""Pictures of encodings: what each adds to a score, by distance."""

import io
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from relpos_jax.attention import core
from relpos_jax.masks import Bidirectional, Causal
from relpos_jax.positional import Dims, Params, PositionEncoding, merge
from relpos_jax.where import Where

DIMS = Dims(heads=4, head_dim=64, width=256)
SAMPLES = 16
# Shades of one colour would read as an order; Okabe and Ito's tell heads apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


class Curves(NamedTuple):
    """What an encoding adds to a score, at every distance.

    Attributes:
      distance: `[n]`, rising; negative where keys stand behind the query.
      added: `[s h n]`, for each of `s` queries; or `[1 1 n]`, the cosine of the two
        places' embeddings, where `what` says so.
      what: the meaning, for the axis.
      noisy: whether parameters that start without any effect were filled with noise.
    """

    distance: Int[np.ndarray, " n"]
    added: Float[np.ndarray, "s h n"]
    what: str
    noisy: bool


def logits(
    encoding: PositionEncoding,
    params: Params,
    q: Float[Array, "b q h d"],
    k: Float[Array, "b k h d"],
    q_at: Where,
    k_at: Where,
    features: Float[Array, "b k h f"] | None,
    *,
    causal: bool,
) -> Float[Array, "b h q k"]:
    """Returns the scores that `attend` would take the softmax of, before the mask."""
    params = merge(encoding.constants(q.shape[2], q.shape[3]), params)
    prepared, q_data, k_data = encoding.prepare(params, features, q_at, k_at, None)
    sequences = (
        q,
        k,
        encoding.query(prepared, q, q_at),
        encoding.key(prepared, k, k_at),
        q_data,
        k_data,
    )
    q, k, turned_q, turned_k, q_data, k_data = jax.tree.map(
        lambda x: jnp.swapaxes(x, 1, 2), sequences
    )
    operands = core.Operands(
        q, k, k, turned_q, turned_k, None, prepared, q_data, k_data
    )
    mask = Causal() if causal else Bidirectional()
    visible = mask(q_at, k_at)[:, None]
    scale = encoding.scale(q.shape[3])
    return core.logits_of(encoding, operands, q_at, k_at, scale, visible)


def curves(encoding: PositionEncoding, *, far: int = 4096, ahead: int = 32) -> Curves:
    """Returns what an encoding adds to the score of a key that equals its query.

    Queries are random, of length sqrt(d), and every key is a copy of the query, so that
    the content's part, `|q|^2 scale`, is the same at every distance and is taken away.
    Parameters are as initialised; where they add nothing, they are filled with noise.

    Args:
      encoding: the encoding.
      far: the largest distance, less for tables of positions with fewer rows.
      ahead: how far keys stand behind the query, unless only a past is defined.
    """
    far = min(far, getattr(encoding, "rows", far + ahead + 1) - ahead - 1)
    ahead = 0 if encoding.causal_only else ahead
    position = np.arange(far + ahead + 1)
    k_at = Where(
        jnp.asarray(position, jnp.int32)[None, :], jnp.ones((1, position.size), int)
    )
    params = merge(
        encoding.init(jax.random.key(0), DIMS),
        encoding.init_shared(jax.random.key(1), DIMS),
    )
    if encoding.absolute:
        x = jnp.zeros((1, position.size, DIMS.width))
        places = np.asarray(encoding.embed(params, x, k_at)[0], np.float64)
        places /= np.linalg.norm(places, axis=1, keepdims=True)
        added = (places @ places[far])[::-1][None, None]
        what = "cosine of the two places' embeddings"
        return Curves(far - position[::-1], added, what, False)
    added = _added(encoding, params, k_at, far)
    noisy = bool(params) and np.ptp(added) < 1e-4  # rounding is no effect
    if noisy:
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(2), len(leaves))
        leaves = [
            x + x.shape[-1] ** -0.5 * jax.random.normal(key, x.shape)
            for x, key in zip(leaves, keys, strict=True)
        ]
        added = _added(encoding, jax.tree.unflatten(tree, leaves), k_at, far)
    what = "added to the score"
    return Curves(far - position[::-1], added[:, :, ::-1], what, noisy)


def _added(encoding, params, k_at: Where, far: int):
    """Returns the scores of `SAMPLES` queries at `far`, less their content's part."""

    @jax.jit
    def one(key):
        content, inputs = jax.random.split(key)
        count = k_at.position.shape[1]
        q = jax.random.normal(content, (1, 1, DIMS.heads, DIMS.head_dim))
        q = q * math.sqrt(DIMS.head_dim) / jnp.linalg.norm(q, axis=-1, keepdims=True)
        k = jnp.broadcast_to(q, (1, count, DIMS.heads, DIMS.head_dim))
        x = jax.random.normal(inputs, (1, count, DIMS.width))
        q_at = jax.tree.map(lambda x: x[:, far : far + 1], k_at)
        found = logits(
            encoding,
            params,
            q,
            k,
            q_at,
            k_at,
            encoding.features(params, x),
            causal=encoding.causal_only,
        )
        # The same product as in `found`, so that what adds nothing leaves nothing.
        plain = core.Operands(q.swapaxes(1, 2), k.swapaxes(1, 2), *[None] * 5)
        return (found - core.content(plain, encoding.scale(DIMS.head_dim)))[0, :, 0]

    keys = jax.random.split(jax.random.key(3), SAMPLES)
    return np.stack([np.asarray(one(key), np.float64) for key in keys])


def picture(name: str, encoding: PositionEncoding) -> Figure:
    """Draws an encoding: near distances evenly spaced, all of them logarithmically.

    A line for each of four heads, of one query; where other queries give other lines,
    the grey band holds the mean of all, one standard deviation to each side.
    """
    found = curves(encoding)
    figure = Figure(figsize=(6.4, 2.6), dpi=100, layout="constrained")
    near, far = figure.subplots(1, 2)
    low = max(int(found.distance[0]), -32)
    _draw(near, found, (found.distance >= low) & (found.distance <= 64))
    last = int(found.distance[-1])
    logarithmic = np.unique(np.geomspace(1, last, 240).round().astype(int))
    _draw(far, found, np.isin(found.distance, logarithmic))
    # A score that is lower by 40 weighs nothing; what is under that hides the rest.
    if far.get_ylim()[0] < -40:
        highest = found.added[:, :, found.distance >= 1].max()
        far.set_ylim(-40.0, max(highest, 0.0) + 2.0)
    far.set_xscale("log", base=2)
    far.set_xticks([2**i for i in range(0, 13, 3) if 2**i <= last])
    far.xaxis.set_major_formatter(lambda x, _: f"{x:.0f}")
    near.set_ylabel(found.what, fontsize=8)
    near.set_xlabel("distance i - j", fontsize=8)
    far.set_xlabel("distance i - j, logarithmic", fontsize=8)
    note = " (random parameters)" if found.noisy else ""
    figure.suptitle(f"{name}{note}", fontsize=9)
    return figure


def to_png(figure: Figure) -> bytes:
    """Returns the figure as a small PNG file, the same bytes each time."""
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    # 48 colours are enough for lines, and a third of the size.
    Image.open(drawn).convert("RGB").quantize(48).save(small, "png", optimize=True)
    return small.getvalue()


def _draw(axes: Axes, found: Curves, shown) -> None:
    x, added = found.distance[shown], found.added[:, :, shown]
    spread = added.std(axis=0).max()
    if spread > 1e-3:
        mean, std = added.mean(axis=(0, 1)), added.std(axis=(0, 1))
        axes.fill_between(x, mean - std, mean + std, color="#BBBBBB", lw=0, alpha=0.6)
    lines = added[0]
    if np.ptp(lines, axis=0).max() < 1e-6:
        lines = lines[:1]  # all heads alike: one line
    for head, (line, colour) in enumerate(zip(lines, _COLOURS, strict=False)):
        axes.plot(x, line, color=colour, lw=1.1, label=f"head {head}")
    axes.grid(alpha=0.3, lw=0.5)
    axes.tick_params(labelsize=7)
    axes.margins(x=0.01)
