"""Peak resident memory of training on a large corpus, less that of a small one.

    python -m experiments.benchmarks.resident_memory --gigabytes=1 --vocabulary=words

Writes made-up words into a file, trains the quick model on it for a few steps by
`experiments.train`, in a process of its own, and prints the peaks of both runs. Tokens
that are not bytes are made within the run that is measured, and read from disk.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from absl import app, flags

SIZE = flags.DEFINE_float("gigabytes", 1.0, "Size of the corpus, 10^9 bytes.")
VOCABULARY = flags.DEFINE_string("vocabulary", "bytes", "What a token is.")
ORDER = flags.DEFINE_string("order", "windows", "windows or lanes.")
WHERE = flags.DEFINE_string("where", None, "Folder with room; None: the system's.")


def write_words(path: Path, size: int) -> None:
    """Writes 4,000 made-up words, the first ones most often: a block, repeated."""
    words = np.array([f"w{number:x}" for number in range(4_000)], object)
    drawn = (len(words) * np.random.default_rng(0).random(100_000) ** 4).astype(int)
    lines = np.concatenate([words, words[drawn]]).reshape(-1, 20)
    text = "".join(" ".join(line) + "\n" for line in lines).encode()
    with open(path, "wb") as file:
        while file.tell() < size:
            file.write(text[: size - file.tell()])


def peak(size: int, folder: Path) -> int:
    """Returns the peak resident memory, in bytes, of training on `size` bytes."""
    path = folder / f"words{size}"
    write_words(path, size)
    data = dict(source=f"file:{path}", vocabulary=VOCABULARY.value, order=ORDER.value)
    options = [f"--config.data.{key}={value}" for key, value in data.items()]
    options += [f"--config.data.data_dir={folder}", f"--workdir={folder}/run{size}"]
    options += ["--config.training.steps=20", "--noprogress"]
    options += ["--nocompilation_cache"]  # so that both runs compile
    command = [sys.executable, "-m", "experiments.train", "--config=configs/quick.py"]
    process = subprocess.Popen(command + options)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"error: training ended with status {status}")
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main(argv: list[str]) -> None:
    with tempfile.TemporaryDirectory(dir=WHERE.value) as folder:
        sizes = (1_000_000, round(SIZE.value * 1e9))
        small, large = (peak(size, Path(folder)) for size in sizes)
    print(f"corpus of {sizes[0]:,} bytes: peak {small / 1e6:,.0f} MB resident")
    print(f"corpus of {sizes[1]:,} bytes: peak {large / 1e6:,.0f} MB resident")
    print(f"above the small one: {(large - small) / 1e6:,.0f} MB")


if __name__ == "__main__":
    app.run(main)
