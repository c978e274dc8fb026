"""Two real processes on this machine train, evaluate and save one run together.

    python -m tests.training.processes_on_cpu

Each has two simulated devices. Prints and checks that their loss curve is one process's
(to 1e-5), that the rows they read are the whole batch with none shared, that one of
them writes, and that one process restores what they saved and goes on from it.
"""

import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile

import numpy as np

STEPS, BATCH, LENGTH = 10, 8, 16
CONFIG = (
    "--config=configs/quick.py:transformer_xl",
    "--config.data.order=lanes",
    "--config.model.layers=2",
    "--config.model.width=32",
    "--config.model.head_dim=8",
    "--config.model.feedforward=64",
    "--config.model.dropout=0.1",
    f"--config.model.memory_length={LENGTH}",
    f"--config.training.steps={STEPS}",
    f"--config.training.batch={BATCH}",
    f"--config.training.length={LENGTH}",
    "--config.training.steps_per_call=5",
    "--config.training.checkpoint_every=5",
    "--config.training.log_every=1",
    "--config.training.eval_every=5",
    "--config.training.eval_tokens=512",
)


def start(module: str, *arguments: str, devices: int = 1) -> subprocess.Popen:
    """Starts a module in a process with so many simulated devices."""
    simulated = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | {"XLA_FLAGS": simulated, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(running: list[subprocess.Popen]) -> list[str]:
    """Waits for processes; returns what they printed. All must succeed."""
    printed = [process.communicate(timeout=1800)[0] for process in running]
    for process, text in zip(running, printed, strict=True):
        assert process.returncode == 0, text
    return printed


def addresses() -> list[tuple[str, ...]]:
    """Returns the flags by which two processes find each other."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return [
        (f"--coordinator=localhost:{port}", "--processes=2", f"--process_id={i}")
        for i in range(2)
    ]


def train(text: pathlib.Path, workdir: pathlib.Path, *more: str) -> tuple[str, ...]:
    """Returns the command line of the training run."""
    source = f"--config.data.source=file:{text}"
    return (*CONFIG, source, f"--workdir={workdir}", "--noprogress", *more)


def losses(workdir: pathlib.Path) -> np.ndarray:
    """Returns the run's loss at every step, and the held-out text's behind them."""
    from relpos_jax.training import writers

    lines = writers.read(workdir / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    held_out = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    assert len(held_out) == 2
    return np.array([line["loss"] for line in lines] + held_out)


def close(found: np.ndarray, wanted: np.ndarray, what: str) -> None:
    """Prints and checks the largest relative difference."""
    difference = np.max(np.abs(found - wanted) / wanted)
    print(f"{what}: largest relative difference of losses {difference:.1e}")
    assert difference < 1e-5


def check_rows(text: pathlib.Path, folder: pathlib.Path) -> None:
    """The rows that the two read are the whole, without overlap."""
    from relpos_jax import data

    here = [str(text), str(folder)]
    module = "tests.training.rows_of_a_process"
    finish([start(module, *here, *flags, devices=2) for flags in addresses()])
    whole = data.Lanes(data.load(f"file:{text}").train, BATCH, LENGTH).stack(0, 3)
    parts = [np.load(folder / f"{i}.npy") for i in range(2)]
    assert all(part.shape == (3, BATCH // 2, LENGTH) for part in parts)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole.inputs)
    print(
        f"rows read: {parts[0].shape[1]} and {parts[1].shape[1]} of {BATCH}, none twice"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        text = folder / "text.txt"
        words = np.random.default_rng(0).choice(["dog ", "cat ", "house ", "of "], 3000)
        text.write_text("".join(words))
        one, two = folder / "one", folder / "two"
        module = "experiments.train"
        finish([start(module, *train(text, one))])
        mesh = ("--config.mesh.fsdp=2",)
        commands = [train(text, two, *mesh, *flags) for flags in addresses()]
        printed = finish([start(module, *command, devices=2) for command in commands])
        assert "steps done" in printed[0] and "steps done" not in printed[1]
        assert len(list((two / "tensorboard").glob("events*"))) <= 1
        close(losses(two), losses(one), "two processes, data 2 x fsdp 2")
        check_rows(text, folder)

        shutil.rmtree(two / "checkpoints" / str(STEPS))
        finish([start(module, *train(text, two))])
        close(losses(two), losses(one), "restored by one process at step 5")
        source = f"--source=file:{text}"
        for workdir in (one, two):
            command = (f"--workdir={workdir}", source, "--length=16", "--tokens=512")
            print(*finish([start("experiments.evaluate", *command)]))


if __name__ == "__main__":
    main()
