"""Markdown tables of the benchmarks' JSON files.

python -m experiments.benchmarks.tables FOLDER
"""

import json
import pathlib
import sys


def markdown(document: dict) -> str:
    """Returns one file's tables, with its command, machine and versions."""
    facts = ", ".join(
        [f"{document['processor']}, {document['cores']} cores, {document['device']}"]
        + [f"Python {document['python']}"]
        + [f"{name} {version}" for name, version in document["versions"].items()]
        + [f"commit {document['commit']}"]
    )
    parts = [f"`{document['command']}`\n\n({facts})"]
    for result in document["results"]:
        parts.append(TABLES[document["kind"]](result))
        parts += [f"Left out: {k}: {v}" for k, v in result["left_out"].items()]
    return "\n\n".join(parts) + "\n"


def table(columns: dict, rows: list[dict]) -> str:
    """Returns rows under `columns`: heading to a function of a row."""
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append(f"| {' | '.join(str(show(row)) for show in columns.values())} |")
    return "\n".join(lines)


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.0f}"


def _training(result: dict) -> str:
    sizes = result["workload"]
    head = (
        f"**{result['name']}**: target {sizes['length']}, memory {sizes['memory']}, "
        f"batch {sizes['batch']}, {sizes['layers']} layers of width {sizes['width']}, "
        f"{sizes['heads']} heads"
    )
    columns = {
        "step": lambda row: row["peer"],
        "seconds": lambda row: f"{row['seconds']:.3f}",
        "to the first": lambda row: f"{row['ratio']:.2f}",
        "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
        "GFLOP/s": lambda row: f"{row['flops_per_second'] / 1e9:.0f}",
        "peak above the model, MiB": lambda row: _mib(row["peak_bytes"]),
        "parameters": lambda row: f"{row['parameters']:,}",
    }
    return head + "\n\n" + table(columns, result["rows"])


def _attention(result: dict) -> str:
    head = (
        f"**{result['name']}, L = {result['length']}**: {result['heads']} heads of "
        f"{result['head_dim']}, {result['dtype']}, forward and backward"
    )
    columns = {
        "sub-layer": lambda row: row["peer"],
        "seconds": lambda row: f"{row['seconds']:.3f}",
        "to the first": lambda row: f"{row['ratio']:.2f}",
        "peak above the inputs, MiB": lambda row: _mib(row["peak_bytes"]),
        "temporaries compiled, MiB": lambda row: _mib(row["temp_bytes"]),
    }
    return head + "\n\n" + table(columns, result["rows"])


def _compilation(result: dict) -> str:
    first = _both(result["rows"][0])
    columns = {
        "model": lambda row: f"{row['variant']}, {row['layers']} layers",
        "tracing, s": lambda row: f"{row['trace_seconds']:.1f}",
        "compiling, s": lambda row: f"{row['compile_seconds']:.1f}",
        "both, to the first": lambda row: f"{_both(row) / first:.2f}",
        "processor, s": lambda row: f"{row['cpu_seconds']:.1f}",
    }
    return table(columns, result["rows"])


def _both(row: dict) -> float:
    return row["trace_seconds"] + row["compile_seconds"]


def _decoding(result: dict) -> str:
    columns = {
        "encoding": lambda row: row["encoding"],
        "what": lambda row: row["what"],
        "tokens/s": lambda row: f"{row['tokens/s']:,.0f}",
        "against": lambda row: row["against"],
        "its tokens/s": lambda row: f"{row['against tokens/s']:,.0f}",
        "ratio": lambda row: f"{row['ratio']:.2f}",
    }
    return table(columns, result["rows"])


def _first_step(result: dict) -> str:
    columns = {
        "compilation cache": lambda row: row["start"],
        "imported, s": lambda row: f"{row['imported']:.2f}",
        "configured, s": lambda row: f"{row['configured']:.2f}",
        "first step done, s": lambda row: f"{row['stepped']:.2f}",
        "processor, s": lambda row: f"{row['cpu_seconds']:.2f}",
    }
    return table(columns, result["rows"])


def _study(result: dict) -> str:
    first = result["rows"][0]["seconds"]
    columns = {
        "study": lambda row: row["peer"],
        "models": lambda row: ", ".join(row["models"]),
        "seconds": lambda row: f"{row['seconds']:.0f}",
        "to the first": lambda row: f"{row['seconds'] / first:.2f}",
    }
    return table(columns, result["rows"])


def _evaluation(result: dict) -> str:
    first = result["rows"][0]["seconds"]
    columns = {
        "what": lambda row: row["what"],
        "scores": lambda row: row["lengths"],
        "seconds, compiling included": lambda row: f"{row['seconds']:.2f}",
        "to the first": lambda row: f"{row['seconds'] / first:.2f}",
        "programs compiled": lambda row: row["compiled"],
        "shapes": lambda row: row["shapes"],
    }
    return table(columns, result["rows"])


TABLES = {
    "evaluation": _evaluation,
    "study": _study,
    "first_step": _first_step,
    "decoding": _decoding,
    "compilation": _compilation,
    "training": _training,
    "attention": _attention,
}


def main(folder: str) -> None:
    files = sorted(pathlib.Path(folder).glob("*.json"))
    if not files:
        raise SystemExit(f"error: no JSON files in {folder}")
    for file in files:
        print(f"## {file.stem}\n\n{markdown(json.loads(file.read_text()))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
