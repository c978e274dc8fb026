"""The report of a study: what was run, tables, plots, and what to keep in mind."""

import pathlib
from collections.abc import Sequence

from relpos_jax.evaluation.config import PROTOCOLS
from relpos_jax.evaluation.results import Study, write_bytes, write_text
from relpos_jax.report import html, markdown, plots, published, tables
from relpos_jax.report.document import (
    Code,
    Heading,
    Image,
    Items,
    Paragraph,
    Part,
    Table,
)

CURVES, POSITIONS = "extrapolation.png", "loss_by_position.png"


def write(study: Study, workdir: str | pathlib.Path) -> list[pathlib.Path]:
    """Writes the report's five files into a folder and returns their paths.

    `results.csv` depends on the results alone: no time, no machine, no path.
    """
    workdir = pathlib.Path(workdir)
    rows = tables.rows(study.results)
    images = {CURVES: plots.to_png(plots.extrapolation(rows))}
    if any(row.protocol == "non_overlapping" for row in rows):
        images[POSITIONS] = plots.to_png(plots.loss_by_position(study.results))
    parts = document(study, tuple(images))
    texts = {
        "report.md": markdown.render(parts),
        "report.html": html.render(parts, images),
        "results.csv": tables.to_csv(rows),
    }
    for name, text in texts.items():
        write_text(text, workdir / name)
    for name, image in images.items():
        write_bytes(image, workdir / name)
    return [workdir / name for name in (*texts, *images)]


def document(study: Study, images: Sequence[str] = (CURVES, POSITIONS)) -> list[Part]:
    """Returns the report's parts.

    Args:
      study: the results.
      images: names of the plots that lie beside the report.
    """
    rows = tables.rows(study.results)
    length = study.config["training"]["length"]
    longest = max(row.length for row in rows)
    parts: list[Part] = [
        Heading(f"Trained at {length} bytes, tested at up to {longest}", 1),
        Paragraph(
            "Models that differ in their position encoding alone, evaluated at lengths "
            "they have and have not been trained at. All figures are bits per byte; "
            "lower is better."
        ),
    ]
    if CURVES in images:
        parts.append(
            Image(CURVES, "Bits per byte against length, one curve an encoding")
        )
    parts += [Heading("What was run"), *_setup(study)]
    for protocol in PROTOCOLS:
        parts += _protocol(study, rows, protocol)
    parts += [Heading("Loss by position")] if POSITIONS in images else []
    if POSITIONS in images:
        parts += [
            Paragraph(
                "Bits per byte by position in a non-overlapping window, windows of all "
                "lengths taken together. Where a curve rises at the training length, "
                "the encoding fails beyond it; where it goes on falling, far context "
                "helps."
            ),
            Image(POSITIONS, "Bits per byte against the bytes of context"),
        ]
    parts += [Heading("Past the training length"), _past_training(study)]
    return [*parts, Heading("Notes"), Items(_notes(study)), *_published()]


_EXPLAINED = {
    "non_overlapping": (
        "Windows of the length laid end to end (Press et al. 2022, table 2); every "
        "byte but the first is scored once. A longer window also leaves fewer bytes "
        "with little context, so a falling curve doesn't mean that far context is used."
    ),
    "same_targets": (
        "The same bytes at every length: the last {group} of each window, so each is "
        "scored with between length - {gap} and length bytes of context. What differs "
        "between two columns is the use of context alone."
    ),
    "sliding": (
        "A window moved by 1/{stride} of its length; each step scores the bytes that "
        "the step before has not seen, so all but those of the first window have "
        "nearly the whole length as context. Scored on the beginning of the held-out "
        "text, since it costs {stride} times as much a byte."
    ),
    "memory": (
        "Segments of {length} bytes with the memory of the bytes before them: length "
        "counts both (Dai et al. 2019). Each stretch of text is preceded by bytes that "
        "fill its memory and aren't scored."
    ),
}


def _protocol(study: Study, rows: Sequence[tables.Row], protocol: str) -> list[Part]:
    if not any(row.protocol == protocol for row in rows):
        return []
    evaluation, length = study.config["evaluation"], study.config["training"]["length"]
    shortest = min(row.length for row in rows)
    group = min(max(1, length // evaluation["group_fraction"]), shortest)
    text = _EXPLAINED[protocol].format(
        group=group, gap=group - 1, stride=evaluation["stride_fraction"], length=length
    )
    return [
        Heading(plots.TITLES[protocol]),
        Paragraph(text),
        tables.by_length(rows, protocol),
    ]


def _setup(study: Study) -> list[Part]:
    config, facts = study.config, study.facts
    corpus, model, training = config["corpus"], config["model"], config["training"]
    seeds = config["study"]["seeds"]
    spread = (
        "one seed, so no spread is known"
        if len(seeds) == 1
        else f"mean ± standard deviation over {len(seeds)} paired seeds"
    )
    items = (
        f"Corpus: {corpus['name']} ({corpus['description']}); {corpus['size']:,} "
        f"bytes, {corpus['train_bytes']:,} to train on and the last "
        f"{corpus['held_out_bytes']:,} held out; SHA-256 {corpus['sha256']}",
        f"Model: {model['layers']} layers, width {model['width']}, {model['heads']} "
        f"heads of {model['head_dim']}, feed-forward {model['feedforward']}; dropout "
        f"{model['dropout']}; training memory {model['memory_length']}",
        f"Training: {training['steps']} steps of {training['batch']} rows of "
        f"{training['length']} bytes; AdamW, learning rate "
        f"{training['learning_rate']}, warm-up {training['warmup']}, cosine; weight "
        f"decay {training['weight_decay']}; gradient clipped at {training['clip']}",
        f"Seeds: {', '.join(map(str, seeds))} ({spread}); with one seed, all encodings "
        "start from the same values in what they share and see the same batches in the "
        "same order",
        f"Software: Python {facts['python']}, JAX {facts['jax']}, jaxlib "
        f"{facts['jaxlib']}, Flax {facts['flax']}, Optax {facts['optax']}; commit "
        f"{facts['commit']}",
        f"Machine: {facts['system']}, {facts['cores']} cores, {facts['processor']}; "
        f"device {facts['device']}",
    )
    parts: list[Part] = [Code(facts["command"])] if facts["command"] else []
    return [*parts, Items(items), _models(study)]


def _models(study: Study) -> Table:
    """One row a model: parameters, steps, wall times."""
    lines, resumed = [], False
    for result in study.results:
        times = study.facts["models"].get(f"{result.encoding}-seed{result.seed}", {})
        seconds = [
            f"{times[key]:.0f}" if key in times else "unknown"
            for key in ("train_seconds", "evaluate_seconds")
        ]
        if times.get("resumed"):
            # Only the last of its sessions was timed.
            seconds[0] += "*"
            resumed = True
        lines.append(
            (
                result.encoding,
                str(result.seed),
                f"{result.parameters:,}",
                f"{result.step:,}",
                *seconds,
            )
        )
    star = " (* since its last resumption)" if resumed else ""
    header = ("encoding", "seed", "parameters", "steps", f"training, s{star}")
    return Table((*header, "evaluation, s"), tuple(lines))


def _past_training(study: Study) -> Table:
    """One row an encoding: its settings, and what it does where it was not trained."""
    positions = study.config["study"]["positions"]
    lines = {}
    for result in study.results:
        knobs = {k: v for k, v in positions[result.encoding].items() if k != "name"}
        settings = ", ".join(f"{name} {value}" for name, value in knobs.items())
        lines[result.encoding] = (result.encoding, settings, result.past_training)
    return Table(("encoding", "settings", "behaviour"), tuple(lines.values()))


def _notes(study: Study) -> tuple[str, ...]:
    notes = [
        "The falling curve of ALiBi over non-overlapping windows is the early-token "
        "effect going away: in a longer window, fewer bytes have little context. Press "
        "et al. 2022 show it with sliding windows (tables 13-15), where the curve is "
        "flat. Read the same-targets and sliding tables for the use of context.",
    ]
    without: dict[str, list[str]] = {}
    for result in study.results:
        for protocol, reason in result.skipped.items():
            names = without.setdefault(f"{protocol} protocol: {reason}", [])
            if result.encoding not in names:
                names.append(result.encoding)
    for reason, names in without.items():
        notes.append(f"{', '.join(names)} without the {reason}.")
    evaluation = study.config["evaluation"]
    notes.append(
        "Subsets: non-overlapping, sliding and memory score the beginning of the "
        "held-out text, same-targets is spread over all of it; the rows 'tokens "
        "scored' say how many bytes each figure stands on. Protocols score different "
        "bytes, so compare within a table, not across; batches hold at most "
        f"{max(evaluation['tokens_per_batch'], 1):,} bytes."
    )
    return tuple(notes)


def _published() -> list[Part]:
    parts: list[Part] = [
        Heading(
            "Published for comparison (247 M parameters, WikiText-103; not comparable "
            "in absolute terms)"
        )
    ]
    for figures in (published.ALIBI_512, published.ALIBI_1024):
        parts += [
            Paragraph(
                f"{figures.source}: trained at {figures.train_length}; "
                f"{figures.setup}. A dash is out of memory in the paper."
            ),
            figures.table(),
        ]
    return parts
