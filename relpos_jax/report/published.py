"""Published figures to compare with; never mixed with figures measured here."""

from typing import NamedTuple

from relpos_jax.report.document import Table


class Published(NamedTuple):
    """A table of a paper: perplexity by evaluation length.

    Attributes:
      source: paper and number of the table.
      setup: what was trained and evaluated, and how.
      train_length: tokens in a training window.
      encodings: names of the columns.
      perplexity: evaluation length to one value a column; None: out of memory there.
    """

    source: str
    setup: str
    train_length: int
    encodings: tuple[str, ...]
    perplexity: dict[int, tuple[float | None, ...]]

    def table(self) -> Table:
        """Returns it with a row an encoding and a column a length."""
        header = ("encoding", *(str(length) for length in self.perplexity))
        rows = []
        for i, encoding in enumerate(self.encodings):
            values = [row[i] for row in self.perplexity.values()]
            cells = ("–" if value is None else f"{value:.2f}" for value in values)
            rows.append((encoding, *cells))
        return Table(header, tuple(rows))


_ENCODINGS = ("sinusoidal", "rope", "t5", "alibi")
_SETUP = (
    "16 layers, width 1024, 8 heads, 247 M parameters, WikiText-103 validation, "
    "word-level perplexity, non-overlapping windows"
)

ALIBI_512 = Published(
    source="Press et al. 2022 (ALiBi), table 2",
    setup=_SETUP,
    train_length=512,
    encodings=_ENCODINGS,
    perplexity={
        512: (20.05, 20.07, 19.65, 19.73),
        532: (19.91, 19.98, 19.53, 19.61),
        612: (20.59, 19.81, 19.27, 19.38),
        712: (24.86, 19.79, 19.10, 19.14),
        1012: (43.54, 21.37, 18.79, 18.73),
        1512: (76.23, 25.99, 18.91, 18.52),
        2512: (132.41, 31.58, 20.41, 18.41),
        3512: (178.97, 35.54, 22.91, 18.40),
        5512: (240.44, 43.14, 29.54, 18.36),
        10512: (341.53, 60.77, 52.95, 18.32),
        12512: (373.17, 69.70, 64.94, 18.31),
        15512: (406.01, 79.25, None, 18.31),
    },
)

ALIBI_1024 = Published(
    source="Press et al. 2022 (ALiBi), table 3",
    setup=_SETUP,
    train_length=1024,
    encodings=_ENCODINGS,
    perplexity={
        1024: (19.34, 19.33, 18.80, 18.66),
        1124: (19.26, 19.18, 18.62, 18.46),
        2024: (51.09, 31.17, 18.34, 18.05),
        3024: (96.46, 35.67, 18.62, 17.92),
        5024: (182.31, 48.31, 20.47, 17.92),
        8024: (284.88, 64.91, 25.79, 17.96),
        12024: (375.95, 87.51, 33.35, 18.01),
        16024: (453.32, 106.99, None, 17.98),
    },
)
