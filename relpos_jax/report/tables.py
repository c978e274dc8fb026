"""Results as rows: `results.csv`, and tables of bits per byte by length."""

import csv
import io
import os
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from relpos_jax.evaluation.results import ModelResult
from relpos_jax.report.document import Table


class Row(NamedTuple):
    """One line of `results.csv`.

    Attributes:
      encoding: the study's name for it.
      seed: the training seed.
      protocol: how the text was cut.
      train_length: tokens in a training window.
      length: tokens in a window; for `memory`, segment and memory together.
      bits_per_byte: mean over all targets, bits.
      perplexity: of a token (a byte).
      tokens: number of targets scored.
    """

    encoding: str
    seed: int
    protocol: str
    train_length: int
    length: int
    bits_per_byte: float
    perplexity: float
    tokens: int


class Cell(NamedTuple):
    """Several seeds in one: mean and standard deviation (None for one seed)."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Cell":
        """Returns the mean and the sample standard deviation."""
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), deviation)

    def text(self, digits: int = 3) -> str:
        """Returns "1.234 ± 0.005", or "1.234" for one seed."""
        mean = f"{self.mean:.{digits}f}"
        if self.deviation is None:
            return mean
        return f"{mean} ± {self.deviation:.{digits}f}"


def rows(results: Iterable[ModelResult]) -> list[Row]:
    """Returns a row for each score, in the results' order."""
    return [
        Row(
            encoding=result.encoding,
            seed=result.seed,
            protocol=score.protocol,
            train_length=result.train_length,
            length=score.length,
            bits_per_byte=score.bits_per_byte,
            perplexity=score.perplexity,
            tokens=score.tokens,
        )
        for result in results
        for score in result.scores
    ]


def to_csv(rows: Iterable[Row]) -> str:
    """Returns the rows as CSV; floats are written so that they come back exactly."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows(_exact(row) for row in rows)
    return text.getvalue()


def _exact(row: Row) -> list:
    """Writes floats by `repr`, which is exact; NumPy's own would add its name."""
    return [repr(float(x)) if isinstance(x, float) else x for x in row]


def read_csv(path: str | os.PathLike) -> list[Row]:
    """Reads what `to_csv` has written.

    Raises:
      ValueError: other columns, or a value of the wrong type.
    """
    types = Row.__annotations__
    with pathlib.Path(path).open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        header = tuple(next(reader, ()))
        if header != Row._fields:
            raise ValueError(f"{path} has the columns {header}, wanted {Row._fields}")
        found = []
        for line in reader:
            pairs = zip(types.values(), line, strict=True)
            found.append(Row(*(kind(text) for kind, text in pairs)))
        return found


def encodings(rows: Iterable[Row]) -> list[str]:
    """Returns the encodings in the order of their first rows."""
    return list(dict.fromkeys(row.encoding for row in rows))


def summary(rows: Iterable[Row], protocol: str) -> dict[tuple[str, int], Cell]:
    """Returns bits per byte by (encoding, length) under a protocol, over the seeds."""
    values: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        if row.protocol == protocol:
            place = (row.encoding, row.length)
            values.setdefault(place, []).append(row.bits_per_byte)
    return {place: Cell.of(found) for place, found in values.items()}


def growth(rows: Iterable[Row], protocol: str, multiple: int) -> dict[str, Cell]:
    """Returns bits per byte at `multiple` training lengths over those at one.

    The ratio is taken seed by seed, so what seeds share cancels out. Encodings without
    both lengths are left out.
    """
    by_model: dict[tuple[str, int], dict[int, float]] = {}
    train_length = 0
    for row in rows:
        if row.protocol == protocol:
            train_length = row.train_length
            model = by_model.setdefault((row.encoding, row.seed), {})
            model[row.length] = row.bits_per_byte
    ratios: dict[str, list[float]] = {}
    for (encoding, _), model in by_model.items():
        near, far = model.get(train_length), model.get(multiple * train_length)
        if near and far:
            ratios.setdefault(encoding, []).append(far / near)
    return {encoding: Cell.of(found) for encoding, found in ratios.items()}


def by_length(rows: Sequence[Row], protocol: str) -> Table:
    """Returns bits per byte under a protocol: a row an encoding, a column a length.

    The last columns are the `growth` to 16 training lengths, where it was measured; the
    last row is the number of targets behind each figure, "fewest-most" where encodings
    differ.

    Raises:
      ValueError: no row has this protocol.
    """
    mine = [row for row in rows if row.protocol == protocol]
    if not mine:
        raise ValueError(f"no result under the protocol {protocol!r}")
    cells, ratios = summary(mine, protocol), growth(mine, protocol, 16)
    lengths = sorted({row.length for row in mine})
    unit = mine[0].train_length
    header = ["encoding", *(f"{x} ({x / unit:.4g} L)" for x in lengths)]
    if ratios:
        header.append("16 L / 1 L")
    lines = []
    for encoding in encodings(mine):
        found = [cells.get((encoding, length)) for length in lengths]
        line = [encoding, *("–" if cell is None else cell.text() for cell in found)]
        if ratios:
            line.append(ratios[encoding].text() if encoding in ratios else "–")
        lines.append(tuple(line))
    counts = ["tokens scored"]
    for length in lengths:
        tokens = sorted({row.tokens for row in mine if row.length == length})
        ends = tokens[:1] if len(tokens) == 1 else [tokens[0], tokens[-1]]
        counts.append("–".join(f"{count:,}" for count in ends))
    lines.append(tuple(counts + [""] * bool(ratios)))
    return Table(tuple(header), tuple(lines))
