"""The comparison table of all registered encodings, for docs/encodings/index.md."""

import statistics
from collections.abc import Mapping, Sequence

import jax

from relpos_jax.attention.core import overrides
from relpos_jax.positional import ENCODINGS, Dims, PositionEncoding
from relpos_jax.report.tables import Row

DIMS = Dims(heads=8, head_dim=64, width=512)
BEGIN = "<!-- table: written by experiments/encoding_table.py -->"
END = "<!-- end of table -->"
COLUMNS = (
    "encoding",
    "where position enters",
    "parameters",
    "cost",
    "memory",
    "cache",
    "past the training length",
    "extrapolation as measured here",
)

# The page of a name is the longest page name that it is, or begins with before a "_";
# these have theirs under other names.
PAGES = {
    "self_extend": "rerope",
    "rope_partial": "rope",
    "rope_interleaved": "rope",
    "rope_linear": "rope_scaling",
    "rope_ntk": "rope_scaling",
    "rope_ntk_by_parts": "rope_scaling",
    "rope_dynamic_ntk": "rope_scaling",
    "rope_yarn": "rope_scaling",
    "rope_longrope": "rope_scaling",
    "rope_llama3": "rope_scaling",
}


# What hooks can't tell: an encoding around another passes all of them on.
WORDS = {
    "Dape": {
        "enters": "scores, a small network over content and bias",
        "cost": "a small network a pair",
    },
}


def page_of(name: str, pages: Sequence[str]) -> str | None:
    """Returns the name of the page that describes an encoding; None if none does.

    Args:
      name: a registered encoding.
      pages: the names of all pages, without ".md".
    """
    if name in PAGES:
        return PAGES[name] if PAGES[name] in pages else None
    fitting = [page for page in pages if name == page or name.startswith(f"{page}_")]
    return max(fitting, key=len, default=None)


def enters(encoding: PositionEncoding) -> str:
    """Says where position enters, from the hooks that the encoding has."""
    words = WORDS.get(type(encoding).__name__)
    if words:
        return words["enters"]
    rows = _rows(encoding)
    places = []
    if overrides(encoding, "embed"):
        places.append("token embeddings")
    if overrides(encoding, "query") or overrides(encoding, "key"):
        places.append("queries and keys")
    if _features(encoding):
        places.append("scores, by gates from the layer's input")
    elif encoding.whole_rows:
        places.append("scores, by content and order of the keys")
    elif overrides(encoding, "score"):
        kinds = {
            "bias": "scores, a bias by distance",
            "vectors": "scores, vectors by distance",
        }
        places.append(kinds.get(rows, "scores"))
    if overrides(encoding, "value"):
        places.append("values")
    return ", ".join(places) or "nowhere: the causal mask alone"


def parameters(encoding: PositionEncoding) -> str:
    """Returns the number of its parameters at 8 heads of 64."""

    def count(init):
        shapes = jax.eval_shape(lambda: init(jax.random.key(0), DIMS))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    layer, shared = count(encoding.init), count(encoding.init_shared)
    parts = [f"{layer:,} a layer"] if layer else []
    parts += [f"{shared:,} for all layers"] if shared else []
    return ", ".join(parts) or "0"


def cost(encoding: PositionEncoding) -> str:
    """Says what is computed beyond NoPE; n tokens, d features a head."""
    words = WORDS.get(type(encoding).__name__)
    if words:
        return words["cost"]
    if encoding.whole_rows:
        return "sums along all keys and two reads of a table a pair"
    if overrides(encoding, "score"):
        kinds = {
            "bias": "an addition a pair; n values by distance",
            "vectors": "d products a pair; n vectors by distance",
        }
        found = kinds.get(_rows(encoding), "a function of each pair")
        if _features(encoding):
            found = "an addition a pair; sums along n gates"
        return found + (
            ", and again for values" if overrides(encoding, "value") else ""
        )
    if overrides(encoding, "query") or overrides(encoding, "key"):
        return "a rotation a token: n d"
    if overrides(encoding, "embed"):
        return "an addition a token, once a model"
    return "none"


def memory(encoding: PositionEncoding) -> str:
    """Says how temporaries grow in the blockwise path."""
    return "n times a query block" if encoding.whole_rows else "n"


def cache(encoding: PositionEncoding) -> str:
    """Says what decoding from a cache of unrotated keys asks for."""
    found = "yes"
    if encoding.length_dependent:
        found += "; keys turned again as the text grows"
    if _features(encoding):
        found += "; one number a token and head beside the key"
    if encoding.absolute:
        found += "; no segment memory"
    return found


def measured(name: str, rows: Sequence[Row]) -> str:
    """Returns bits per byte at the training length and at the longest one.

    Of the protocol `same_targets`, or `sliding` where there is none; means over seeds.
    """
    own = [row for row in rows if row.encoding == name]
    for protocol in ("same_targets", "sliding", "non_overlapping"):
        found = [row for row in own if row.protocol == protocol]
        if found:
            lengths = sorted({row.length for row in found})
            means = {
                length: statistics.fmean(
                    row.bits_per_byte for row in found if row.length == length
                )
                for length in lengths
            }
            at = min(lengths, key=lambda x: abs(x - found[0].train_length))
            last = lengths[-1]
            return f"{means[at]:.3f} at {at}, {means[last]:.3f} at {last} ({protocol})"
    return ""


def table(
    pages: Sequence[str],
    rows: Sequence[Row] = (),
    encodings: Mapping[str, PositionEncoding] = ENCODINGS,
) -> str:
    """Returns the table in Markdown, a line an encoding.

    Args:
      pages: names of the pages that there are.
      rows: measurements, of `tables.read_csv`.
      encodings: what to list.
    """
    lines = [_line(COLUMNS), _line(["---"] * len(COLUMNS))]
    for name, encoding in encodings.items():
        page = page_of(name, pages)
        lines.append(
            _line(
                [
                    f"[{name}]({page}.md)" if page else name,
                    enters(encoding),
                    parameters(encoding),
                    cost(encoding),
                    memory(encoding),
                    cache(encoding),
                    encoding.past_training(),
                    measured(name, rows),
                ]
            )
        )
    return "\n".join(lines)


def between_markers(document: str, new: str) -> str:
    """Returns the document with the text between the markers replaced.

    Raises:
      ValueError: the markers are not there, once each and in order.
    """
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r} once each")
    head, rest = document.split(BEGIN)
    if END not in rest:
        raise ValueError(f"{END!r} stands before {BEGIN!r}: exchange them")
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n\n{new}\n\n{END}{tail}"


def _rows(encoding: PositionEncoding) -> str:
    """Returns what its table holds: "bias", "vectors" or "" for nothing."""

    def rows():
        params = {
            **encoding.constants(DIMS.heads, DIMS.head_dim),
            **encoding.init(jax.random.key(0), DIMS),
            **encoding.init_shared(jax.random.key(0), DIMS),
        }
        return encoding.table(params, jax.numpy.arange(5))

    ranks = {len(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(rows))}
    return "vectors" if 3 in ranks else "bias" if 2 in ranks else ""


def _features(encoding: PositionEncoding) -> bool:
    """Returns whether it keeps numbers of each token beside the keys."""

    def features():
        params = encoding.init(jax.random.key(0), DIMS)
        return encoding.features(params, jax.numpy.zeros((1, 1, DIMS.width)))

    return jax.eval_shape(features) is not None


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
