"""What a report consists of; `markdown` and `html` write it down."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Heading:
    """A title: level 1 for the document's, 2 for a section's."""

    text: str
    level: int = 2


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """Running text."""

    text: str


@dataclasses.dataclass(frozen=True)
class Code:
    """Text to be shown as it is."""

    text: str


@dataclasses.dataclass(frozen=True)
class Items:
    """An unordered list."""

    items: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """A table; the first column names the row, the others are aligned right.

    Raises:
      ValueError: a row that is shorter or longer than the header.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self):
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(
                    f"a row of {len(row)} cells under a header of {len(self.header)}: "
                    f"{row}"
                )


@dataclasses.dataclass(frozen=True)
class Image:
    """A picture that lies beside the report: its file name and what it shows."""

    name: str
    description: str


Part = Heading | Paragraph | Code | Items | Table | Image
