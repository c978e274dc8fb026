"""A report as Markdown."""

from collections.abc import Sequence

from relpos_jax.report.document import (
    Code,
    Heading,
    Image,
    Items,
    Paragraph,
    Part,
    Table,
)


def render(parts: Sequence[Part]) -> str:
    """Returns a document as Markdown; pictures are referred to by their names.

    Raises:
      TypeError: a part of another kind.
    """
    return "\n\n".join(_part(part) for part in parts) + "\n"


def _part(part: Part) -> str:
    match part:
        case Heading(text, level):
            return "#" * level + " " + text
        case Paragraph(text):
            return text
        case Code(text):
            return "\n".join(["```", *text.splitlines(), "```"])
        case Items(items):
            return "\n".join(f"- {item}" for item in items)
        case Image(name, description):
            return f"![{description}]({name})"
        case Table():
            return table(part)
    raise TypeError(f"a document has no part of type {type(part).__name__}")


def table(part: Table) -> str:
    """Returns a table whose columns line up in the source as well."""
    cells = [[_cell(cell) for cell in row] for row in (part.header, *part.rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(part.header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [_line(cells[0], widths), f"| {' | '.join(rule)} |"]
    return "\n".join(lines + [_line(row, widths) for row in cells[1:]])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _line(cells: list[str], widths: list[int]) -> str:
    first = cells[0].ljust(widths[0])
    rest = [cell.rjust(w) for cell, w in zip(cells[1:], widths[1:], strict=True)]
    return f"| {' | '.join([first, *rest])} |"
