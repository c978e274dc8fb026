"""The memory grid and the copy task as tables."""

from collections.abc import Sequence

from relpos_jax.evaluation.copy_task import CopyResult
from relpos_jax.evaluation.results import ModelResult
from relpos_jax.report.document import Table
from relpos_jax.report.tables import Cell


def grid_table(results: Sequence[ModelResult]) -> Table:
    """Returns bits per byte: a row an encoding and kind, a column an attention length.

    The last row is the number of targets behind each figure.
    """
    lengths = sorted({score.length for result in results for score in result.scores})
    unit = results[0].train_length
    header = ("encoding + memory", *(f"{x} ({x // unit} L)" for x in lengths))
    rows, counts = [], {length: set() for length in lengths}
    for result in results:
        scores = {score.length: score for score in result.scores}
        cells = []
        for length in lengths:
            score = scores.get(length)
            cells.append("–" if score is None else f"{score.bits_per_byte:.3f}")
            if score is not None:
                counts[length].add(score.tokens)
        rows.append((result.encoding, *cells))
    tokens = ["–".join(f"{n:,}" for n in sorted(counts[x])) for x in lengths]
    return Table(header, (*rows, ("tokens scored", *tokens)))


def copy_table(results: Sequence[CopyResult]) -> Table:
    """Returns held-out accuracy and loss by kind of memory, mean ± spread of seeds."""
    rows = []
    for kind in dict.fromkeys(result.kind for result in results):
        mine = [result for result in results if result.kind == kind]
        accuracy = Cell.of([result.accuracy for result in mine]).text()
        loss = Cell.of([result.loss for result in mine]).text()
        parts = (kind, str(mine[0].slots), str(mine[0].reach), accuracy, loss)
        rows.append((*parts, str(len(mine)), f"{mine[0].targets:,}"))
    header = ("memory", "slots", "reach", "accuracy", "loss (nats)", "seeds", "targets")
    return Table(header, tuple(rows))
