"""Prepares a text set and says what was found: `python -m experiments.prepare_data`."""

import os
from pathlib import Path

from relpos_jax.data import corpora, text_sets, tfds_text


def prepare(
    name: str,
    *,
    manual_dir: str | os.PathLike | None = None,
    data_dir: str | os.PathLike | None = None,
    accept_other_counts: bool = False,
    vocabulary: str | None = None,
) -> str:
    """Prepares a set, checks it, makes its tokens, and returns a report.

    Args:
      name: one of `text_sets.SETS`, or a set of TFDS.
      manual_dir: the folder of the set's files; None downloads them. Only for
        `text_sets.SETS`.
      data_dir: where TFDS keeps its sets; None takes its own default.
      accept_other_counts: takes text whose counts are not the published ones, and says
        so in the report.
      vocabulary: what the tokens are; None takes the set's usual ones.

    Raises:
      UnusableFile: a file is not what it should be; says what was expected.
      ValueError: no such set, or `manual_dir` for a set that takes none.
      RuntimeError: it can't be downloaded or prepared.
    """
    own = text_sets.SETS.get(name)
    if own is None and manual_dir is not None:
        raise ValueError(
            f"{name} takes no manual_dir; these sets do: {', '.join(text_sets.SETS)}"
        )
    if own is not None:
        builder = tfds_text.find(name, data_dir)
        if not builder.is_prepared():
            builder.given = manual_dir
            builder.accept_other_counts = accept_other_counts
            tfds_text.prepare(name, builder)
        elif manual_dir is not None:
            raise ValueError(
                f"{name} is prepared already under {builder.data_path}: delete that "
                "folder to prepare it anew"
            )
    vocabulary = vocabulary or (own.vocabulary if own else "bytes")
    source = tfds_text.open_set(name, data_dir=data_dir)
    corpus = corpora.load(f"tfds:{name}", data_dir=data_dir, vocabulary=vocabulary)
    lines = [source.description]
    facts = source.identity["facts"]
    for split in source.splits:
        lines.append(split)
        lines += _of_split(split, facts.get(split), own)
    found = corpus.vocabulary
    lines += [
        f"vocabulary: {found.name}, {found.size} ids",
        f"tokens: {corpus.train.size:,} of train, {corpus.held_out.size:,} held out, "
        f"stored as {corpus.train.dtype} under {Path(corpus.folder or '.')}",
        f"to train: --config.data.source=tfds:{name} "
        f"--config.data.vocabulary={vocabulary} "
        f"--config.data.vocabulary_size={found.size}",
    ]
    return "\n".join(lines)


def _of_split(
    split: str, facts: dict | None, own: text_sets.TextSet | None
) -> list[str]:
    """Lines about a split of one of the sets of `text_sets`."""
    if facts is None or own is None:
        return []
    unit = "characters" if own.unit == "spaced character" else f"{own.unit}s"
    ends = "" if own.unit == "byte" else " and ends of lines"
    thousand = " thousand" if own.thousands else ""
    counted = f"  {facts['count']:,} {unit}{ends}"
    if facts["problem"]:
        counted += f", NOT the {own.expected(split):,}{thousand} of {own.source}"
    else:
        counted += f", as published: {own.source}"
    return [
        counted,
        f"  {facts['bytes']:,} bytes, {facts['documents']:,} documents",
        f"  sha256 {facts['sha256']}",
    ]
