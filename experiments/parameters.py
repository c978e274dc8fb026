"""Counts the parameters of every published model beside what its paper prints.

    python -m experiments.parameters [--devices=256]

Counts come from shapes alone, nothing is allocated. Exits with 1 where a count differs
in the printed digits; with --nostrict, only where nobody knows why.
With --devices it prints what each of so many devices would hold of every configuration
instead, on the mesh that leaves least on each; the batch must be a multiple of `rows`.
"""

import importlib

from absl import app, flags

import configs
from relpos_jax.report import devices, parameters

_NAMES = "enwik8 text8 wikitext103 one_billion_word ptb alibi_wikitext103"
FILES = tuple(importlib.import_module(f"configs.{name}") for name in _NAMES.split())
STRICT = flags.DEFINE_bool("strict", True, "Fail where a difference is explained too.")
DEVICES = flags.DEFINE_integer("devices", 0, "Devices to divide the models among.")


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
    print(parameters.table(rows))
    for row in rows:
        if row.published.note and not row.equal:
            print(f"{row.name}: {row.published.note}")
    return all(row.equal or (row.published.note and not strict) for row in rows)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"what is {argv[1]!r}? Options look like --name=value.")
    if DEVICES.value > 0:
        found = devices.models(configs)
        print(devices.table([devices.share(*run, DEVICES.value) for run in found]))
    elif not show(counts(), STRICT.value):
        raise SystemExit(1)


if __name__ == "__main__":
    app.run(main)
