"""Counts the parameters of every published model beside what its paper prints.

    python -m experiments.parameters

Counts come from shapes alone, nothing is allocated. Exits with 1 where a count differs
in the printed digits and nobody knows why; with --strict, where it differs at all.
"""

from absl import app, flags

from configs import (
    alibi_wikitext103,
    enwik8,
    one_billion_word,
    ptb,
    text8,
    wikitext103,
)
from relpos_jax.report import parameters

FILES = (enwik8, text8, wikitext103, one_billion_word, ptb, alibi_wikitext103)
STRICT = flags.DEFINE_bool("strict", False, "Fail where a difference is explained too.")


def counts() -> list[parameters.Count]:
    """Returns the counts of all variants of all files."""
    return [
        parameters.compare(
            f"{file.__name__.replace('.', '/')}.py:{variant}",
            file.get_config(variant),
            published,
        )
        for file in FILES
        for variant, published in file.PUBLISHED.items()
    ]


def show(rows: list[parameters.Count], strict: bool) -> bool:
    """Prints a table; returns whether every count is as it should be."""
    print("| config | count | ours | published | verdict | result |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        said = row.published
        cells = (row.printed, said.parameters, row.verdict, said.figure)
        print(f"| {row.name} | {row.count:,} | {' | '.join(cells)} |")
    for row in rows:
        if row.published.note and not row.equal:
            print(f"{row.name}: {row.published.note}")
    return all(row.equal or (row.published.note and not strict) for row in rows)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"what is {argv[1]!r}? Options look like --name=value.")
    if not show(counts(), STRICT.value):
        raise SystemExit(1)


if __name__ == "__main__":
    app.run(main)
