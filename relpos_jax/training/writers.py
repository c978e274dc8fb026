"""Metrics on disk: one line of JSON a logged step, and TensorBoard if installed."""

import json
import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any

try:
    import tensorboardX
except ImportError:  # an extra
    tensorboardX = None

_log = logging.getLogger(__name__)


class Writer:
    """Appends metrics to `metrics.jsonl` and to TensorBoard's event files.

    The file continues where the run continues: lines past the step that a run starts
    at, and a line that a kill has torn, are cut off first. So no step stands in it
    twice, and none is missing as long as `flush` comes before each checkpoint.

    TensorBoard gets every metric under its own name; a failure there is reported once
    and doesn't stop a run.

    Args:
      workdir: an existing folder.
      step: the step at which the run starts or resumes.
      writes: False writes nothing: the processes of a run but one.
    """

    def __init__(self, workdir: str | os.PathLike, step: int, *, writes: bool = True):
        self._file = self._board = None
        if not writes:
            return
        path = pathlib.Path(workdir) / "metrics.jsonl"
        truncate(path, step)
        self._file = path.open("a", encoding="utf-8")
        if tensorboardX is not None:
            try:
                # Events past the step it resumes at are hidden by TensorBoard itself.
                self._board = tensorboardX.SummaryWriter(
                    str(pathlib.Path(workdir) / "tensorboard"), purge_step=step + 1
                )
            except Exception as error:
                self._without_board(error)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one step's metrics, floats or integers of the host."""
        if self._file is None:
            return
        line = json.dumps({"step": step, **metrics})
        self._file.write(line + "\n")
        if self._board is not None:
            try:
                for name, value in metrics.items():
                    self._board.add_scalar(name, value, step)
            except Exception as error:
                self._without_board(error)

    def flush(self) -> None:
        """Returns when all lines so far are on disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flushes and closes both."""
        if self._file is None or self._file.closed:
            return
        self.flush()
        self._file.close()
        if self._board is not None:
            try:
                self._board.close()
            except Exception as error:
                self._without_board(error)

    def _without_board(self, error: Exception) -> None:
        _log.warning("no TensorBoard from here on: %s", error)
        self._board = None


def truncate(path: str | os.PathLike, step: int) -> None:
    """Cuts a metrics file at its first line that is torn or past `step`.

    Args:
      path: the file; nothing happens if it doesn't exist.
      step: the last step whose line stays.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return
    end = 0
    with path.open("rb+") as file:
        for line in file:
            try:
                stays = line.endswith(b"\n") and json.loads(line)["step"] <= step
            except (ValueError, KeyError, TypeError):
                stays = False
            if not stays:
                break
            end += len(line)
        file.truncate(end)


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Returns the lines of a metrics file, in order."""
    text = pathlib.Path(path).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
