"""Plots of a study. Each returns a figure; `to_png` makes the file."""

import io
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Real
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from relpos_jax.evaluation.results import ModelResult
from relpos_jax.report import tables
from relpos_jax.report.tables import Row

TITLES = {
    "non_overlapping": "Non-overlapping windows",
    "same_targets": "Same targets at every length",
    "sliding": "Sliding window",
    "memory": "Segments with memory",
}
# Okabe and Ito's colours, which colour-blind readers tell apart (yellow and black have
# given way to ones that show on white); the markers tell the curves apart without them.
_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#7A4FBF",
    "#8C6D31",
    "#4D4D4D",
    "#B22222",
    "#66A61E",
    "#1B3A5B",
)
_MARKERS = "osD^vP*X<>hp"
# Curves that leave this range (bits per byte above the best) leave the picture.
_HEADROOM = 2.5


def style(encodings: Sequence[str]) -> dict[str, dict]:
    """Returns colour and marker of each encoding, the same in every plot."""
    return {
        name: {
            "color": _COLOURS[i % len(_COLOURS)],
            "marker": _MARKERS[i % len(_MARKERS)],
        }
        for i, name in enumerate(encodings)
    }


def extrapolation(rows: Sequence[Row]) -> Figure:
    """Plots bits per byte against length, a panel a protocol.

    With several seeds the curve is their mean and the band one standard deviation.
    A curve may leave the panel at the top; its values are in the tables.

    Raises:
      ValueError: no rows.
    """
    if not rows:
        raise ValueError("no results to plot")
    protocols = list(dict.fromkeys(row.protocol for row in rows))
    protocols.sort(key=lambda name: (list(TITLES) + [name]).index(name))
    looks = style(tables.encodings(rows))
    columns = min(2, len(protocols))
    lines = math.ceil(len(protocols) / columns)
    figure = Figure(figsize=(6.2 * columns, 4.3 * lines), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).ravel())
    bottom, top = _limits([row.bits_per_byte for row in rows])
    for panel, protocol in zip(axes, protocols, strict=False):
        cells = tables.summary(rows, protocol)
        for name, look in looks.items():
            lengths = sorted(length for encoding, length in cells if encoding == name)
            found = [cells[name, length] for length in lengths]
            if not found:
                continue
            mean = np.array([cell.mean for cell in found])
            panel.plot(lengths, mean, label=name, markersize=5, linewidth=1.6, **look)
            deviation = np.array([cell.deviation or 0.0 for cell in found])
            if deviation.any():
                low, high = mean - deviation, mean + deviation
                panel.fill_between(
                    lengths, low, high, color=look["color"], alpha=0.15, linewidth=0
                )
        panel.set_title(TITLES.get(protocol, protocol))
        panel.set_xlabel(
            "segment + memory (bytes)" if protocol == "memory" else "length (bytes)"
        )
        panel.set_ylabel("bits per byte")
        panel.set_ylim(bottom, top)
        _length_axis(panel, [row.length for row in rows], rows[0].train_length)
    for panel in axes[len(protocols) :]:
        panel.remove()
    _legend(figure, axes[: len(protocols)])
    return figure


def loss_by_position(results: Iterable[ModelResult]) -> Figure:
    """Plots bits per byte by position in a non-overlapping window.

    Windows of all lengths are taken together: a target with c tokens of context sees
    the same in each. Positions are gathered in bins that grow with the position (four
    a doubling), so that a point stands for more targets where they are more alike.

    Raises:
      ValueError: no result has losses by position.
    """
    results = list(results)
    curves: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for result in results:
        scores = [x for x in result.scores if x.protocol == "non_overlapping"]
        longest = max((len(score.position_nll) for score in scores), default=0)
        if longest:
            nll, tokens = np.zeros(longest), np.zeros(longest)
            for score in scores:
                nll[: len(score.position_nll)] += score.position_nll
                tokens[: len(score.position_nll)] += score.position_tokens
            curves.setdefault(result.encoding, []).append(binned(nll, tokens))
    if not curves:
        raise ValueError("no non-overlapping scores, so no losses by position")
    looks = style(list(dict.fromkeys(result.encoding for result in results)))
    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    panel = figure.subplots()
    values = []
    for name, found in curves.items():
        place = found[0][0]
        mean = np.mean([loss for _, loss in found], axis=0)
        values.extend(mean)
        panel.plot(place, mean, label=name, markersize=4, linewidth=1.4, **looks[name])
    panel.set_title("Loss by position in the window")
    panel.set_xlabel("bytes of context")
    panel.set_ylabel("bits per byte")
    # The first bytes have next to no context: their loss says nothing of encodings.
    settled = [y for x, y in zip(*_joined(curves), strict=True) if x >= 4]
    panel.set_ylim(*_limits(settled or values))
    last = max(found[0][0][-1] for found in curves.values())
    powers = [2**i for i in range(int(math.log2(last)) + 2)]
    _length_axis(panel, powers, results[0].train_length)
    _legend(figure, [panel])
    return figure


def binned(
    nll: Float[np.ndarray, " t"], tokens: Real[np.ndarray, " t"]
) -> tuple[np.ndarray, np.ndarray]:
    """Gathers losses by position in bins of growing size.

    Args:
      nll: `[t]`, sums by position, nats.
      tokens: `[t]`, numbers of targets by position.

    Returns:
      For each bin that holds a target, its mean context (position + 1, tokens) and its
      mean loss (bits).
    """
    context = np.arange(1, len(nll) + 1)
    number = np.floor(4 * np.log2(context)).astype(int)
    # A power of two would open a bin of its own: a handful of targets, all noise.
    number[-1] = number[max(len(number) - 2, 0)]
    count = np.bincount(number, tokens)
    filled = count > 0
    place = np.bincount(number, tokens * context)[filled] / count[filled]
    loss = np.bincount(number, nll)[filled] / count[filled] / math.log(2)
    return place, loss


def to_png(figure: Figure) -> bytes:
    """Returns the figure as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130, facecolor="white")
    return file.getvalue()


def _joined(curves: Mapping) -> tuple[np.ndarray, np.ndarray]:
    pairs = [pair for found in curves.values() for pair in found]
    places, losses = zip(*pairs, strict=True)
    return np.concatenate(places), np.concatenate(losses)


def _limits(values: Iterable[float]) -> tuple[float, float]:
    """Returns a range that shows the best curves well and lets the worst leave."""
    finite = [value for value in values if math.isfinite(value)]
    low = min(finite, default=0.0)
    high = min(max(finite, default=1.0), low + _HEADROOM)
    margin = 0.05 * max(high - low, 0.1)
    return low - margin, high + margin


def _length_axis(panel: Axes, lengths: Sequence[int], train_length: int) -> None:
    lengths = sorted(set(lengths))
    # Labels of 64, 80, 96 would run into one another: only doublings get one.
    labelled = [lengths[0]]
    for length in lengths[1:]:
        if length >= 1.9 * labelled[-1]:
            labelled.append(length)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_locator(FixedLocator(labelled))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xticklabels([str(length) for length in labelled])
    panel.axvline(train_length, color="#888888", linestyle="--", linewidth=1)
    panel.annotate(
        f"trained at {train_length}",
        (train_length, 1),
        xycoords=("data", "axes fraction"),
        xytext=(4, -4),
        textcoords="offset points",
        va="top",
        fontsize=8,
        color="#666666",
    )
    panel.grid(True, color="#e5e5e5", linewidth=0.7)
    panel.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    found = {}
    for panel in axes:
        handles, labels = panel.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure.legend(
        found.values(), found.keys(), loc="outside right upper", frameon=False
    )
