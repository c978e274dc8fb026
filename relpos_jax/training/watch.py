"""What stands around a run: its progress bar, and the signal that ends it."""

import signal
import threading
import time
from typing import Any

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
        self._bar.set_postfix({"loss": f"{line['loss']:.3f}", "tokens/s": speed})


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
