"""Small text sets in the formats of the real ones, and their true counts."""

import dataclasses
from pathlib import Path

import numpy as np

from relpos_jax.data import text_sets

WIKI = ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")
PTB = ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt")
PTB_CHARACTERS = tuple(name.replace("ptb.", "ptb.char.") for name in PTB)


def article(title: str, *paragraphs: str) -> str:
    body = "".join(f" {paragraph} \n \n" for paragraph in paragraphs)
    return f" \n = {title} = \n \n{body} = = A section = = \n \n the end \n"


def wikitext(folder: Path, repeats: int = 20) -> Path:
    """Writes articles of WikiText's format; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    words = "the of a cat dog sat on mat ran far".split()
    for number, (name, count) in enumerate(zip(WIKI, (repeats, 3, 3), strict=True)):
        texts = []
        for index in range(count):
            drawn = " ".join(rng.choice(words, 30))
            texts.append(article(f"Title {number} {index}", drawn, "naïve – <unk> ,"))
        (folder / name).write_text("".join(texts), encoding="utf-8")
    return folder


def penn(folder: Path) -> Path:
    """Writes sentences as words and as characters; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for words, characters, count in zip(PTB, PTB_CHARACTERS, (60, 6, 6), strict=True):
        lines = [f"the <unk> cat no. {'N ' * (i % 3)}sat" for i in range(count)]
        (folder / words).write_text("".join(f" {line} \n" for line in lines))
        spaced = [" ".join(line.replace(" ", "_")) for line in lines]
        (folder / characters).write_text("".join(f"{line}\n" for line in spaced))
    return folder


def expect(monkeypatch, name: str, *counts: int, **changes) -> None:
    """Makes `counts` the published ones of a set."""
    found = text_sets.SETS[name]
    counts = dict(zip(found.counts, counts, strict=True))
    changed = dataclasses.replace(found, counts=counts, **changes)
    sets = {**text_sets.SETS, name: changed}
    monkeypatch.setattr(text_sets, "SETS", sets)
