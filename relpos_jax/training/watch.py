"""What stands around a run: its bar, its profiler, and the signal that ends it."""

import pathlib
import signal
import threading
import time
from typing import Any

import jax
from tqdm import tqdm

from relpos_jax.training.config import TrainingConfig


class Bar:
    """A progress bar, and the clock of the calls."""

    def __init__(self, training: TrainingConfig, step: int, label: str, shown: bool):
        self._bar = tqdm(
            total=training.steps,
            initial=step,
            desc=label or None,
            unit="step",
            disable=not shown,
            dynamic_ncols=True,
        )

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()

    def start(self) -> None:
        """Starts the clock of a call."""
        self._began = time.perf_counter()

    def stop(self, steps: int) -> float:
        """Moves on by a call's steps; returns its seconds."""
        self._bar.update(steps)
        return max(time.perf_counter() - self._began, 1e-9)

    def show(self, line: dict) -> None:
        """Shows a step's metrics."""
        speed = f"{line['tokens_per_second']:,.0f}"
        loss = f"{line['loss']:.3f}" if "loss" in line else "skipped"
        self._bar.set_postfix({"loss": loss, "tokens/s": speed})


class Terminated:
    """Remembers that SIGTERM came, instead of dying of it, while it is entered."""

    def __init__(self):
        self.now = False
        self._before: Any = None

    def __enter__(self) -> "Terminated":
        # Handlers can be set from the main thread only; elsewhere SIGTERM just kills.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, *_) -> None:
        self.now = True


class Profile:
    """JAX's profiler, on between two steps.

    Args:
      folder: where the trace goes, for TensorBoard or Perfetto.
      steps: numbers of steps done at which it starts and stops; None for never.
    """

    def __init__(self, folder: pathlib.Path, steps: tuple[int, int] | None):
        self._folder, self._steps, self._on = folder, steps, False

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_) -> None:
        if self._on:
            jax.profiler.stop_trace()

    def at(self, step: int) -> None:
        """Starts or stops, with `step` steps done and nothing running."""
        if self._steps is None:
            return
        start, stop = self._steps
        if not self._on and start <= step < stop:
            jax.profiler.start_trace(str(self._folder))
            self._on = True
        elif self._on and step >= stop:
            jax.profiler.stop_trace()
            self._on = False
