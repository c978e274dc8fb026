"""A report as one HTML file that needs no other."""

import base64
import html
from collections.abc import Mapping, Sequence

from relpos_jax.report.document import (
    Code,
    Heading,
    Image,
    Items,
    Paragraph,
    Part,
    Table,
)

_STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff;
       max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; margin: 2rem 0 .75rem; }
p, li { max-width: 48rem; }
div.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #ddd; text-align: right;
         white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 2px solid #888; }
pre { background: #f5f5f5; padding: .75rem 1rem; overflow-x: auto; }
img { max-width: 100%; height: auto; }
"""


def render(parts: Sequence[Part], images: Mapping[str, bytes]) -> str:
    """Returns a document as HTML with its style and its pictures inside.

    Args:
      parts: the document.
      images: PNG data of every picture, by the name that the document uses.

    Raises:
      KeyError: a picture is missing in `images`.
      TypeError: a part of another kind.
    """
    titles = [part.text for part in parts if isinstance(part, Heading)]
    title = html.escape(titles[0] if titles else "Report")
    body = "\n".join(_part(part, images) for part in parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n"
        f"{body}\n</body>\n</html>\n"
    )


def _part(part: Part, images: Mapping[str, bytes]) -> str:
    match part:
        case Heading(text, level):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{html.escape(text)}</p>"
        case Code(text):
            return f"<pre>{html.escape(text)}</pre>"
        case Items(items):
            lines = "\n".join(f"<li>{html.escape(item)}</li>" for item in items)
            return f"<ul>\n{lines}\n</ul>"
        case Image(name, description):
            data = base64.b64encode(images[name]).decode("ascii")
            alt = html.escape(description)
            return f'<p><img src="data:image/png;base64,{data}" alt="{alt}"></p>'
        case Table(header, rows):
            head = _row("th", header)
            body = "\n".join(_row("td", row) for row in rows)
            return (
                f'<div class="table"><table>\n<thead>{head}</thead>\n'
                f"<tbody>\n{body}\n</tbody>\n</table></div>"
            )
    raise TypeError(f"a document has no part of type {type(part).__name__}")


def _row(tag: str, cells: Sequence[str]) -> str:
    inside = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
    return f"<tr>{inside}</tr>"
