"""The same run on several meshes of simulated devices; a process of its own.

    python -m tests.training.curves_on_devices [--steps N]

Trains a small Transformer-XL in float32 with dropout and memory on one device and on
meshes of eight, and prints each loss curve's largest relative difference from the one
device's. Then restores each run's checkpoint on each of the others. Fails where a
difference is above 1e-5, or a restored array isn't bit for bit what was saved and where
the mesh says.
"""

import argparse
import os
import pathlib
import tempfile

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np

from relpos_jax import positional
from relpos_jax.config import DataConfig, RunConfig
from relpos_jax.models.config import ModelConfig
from relpos_jax.training import loop, runtime, writers
from relpos_jax.training.checkpoints import Checkpoints
from relpos_jax.training.config import TrainingConfig
from relpos_jax.training.mesh import MeshConfig
from relpos_jax.training.placement import Placement
from relpos_jax.training.sharded import placement_of

MESHES = {
    "8 x 1 x 1 x 1": MeshConfig(data=8),
    "2 x 2 x 2 x 1": MeshConfig(data=2, fsdp=2, tensor=2),
    "1 x 1 x 2 x 4": MeshConfig(data=1, tensor=2, sequence=4),
    "1 x 2 x 1 x 4": MeshConfig(data=1, fsdp=2, sequence=4),
}


def make_run(text: pathlib.Path, steps: int, mesh: MeshConfig) -> RunConfig:
    """Returns the run, whatever the mesh."""
    model = ModelConfig(
        vocabulary=256,
        layers=2,
        width=32,
        heads=4,
        head_dim=8,
        feedforward=64,
        position=positional.make("transformer_xl"),
        memory_length=16,
        dropout=0.1,
    )
    training = TrainingConfig(
        steps=steps,
        batch=8,
        length=16,
        steps_per_call=5,
        checkpoint_every=max(steps // 2, 1),
        log_every=1,
        learning_rate=3e-3,
        warmup=5,
    )
    data = DataConfig(source=f"file:{text}", order="lanes")
    return RunConfig(data, model, training, mesh)


def losses(workdir: pathlib.Path) -> np.ndarray:
    """Returns a run's loss at every step."""
    return np.array([x["loss"] for x in writers.read(workdir / "metrics.jsonl")])


def target(run: RunConfig, placement: Placement):
    """Returns a placed state, to restore into."""
    with placement.context():
        return placement.state(lambda: loop.initial_state(run))


def restores(folders: dict, runs: dict, placements: dict, steps: int) -> None:
    """Restores every run's checkpoint on every mesh; raises where it differs."""
    targets = {name: target(runs[name], placements[name]) for name in runs}
    saved = {}
    for name, folder in folders.items():
        for other, wanted in targets.items():
            with Checkpoints(folder / "checkpoints") as checkpoints:
                found = checkpoints.restore(steps, wanted)
            saved.setdefault(name, jax.device_get(found))
            jax.tree.map(
                np.testing.assert_array_equal, jax.device_get(found), saved[name]
            )
            same = jax.tree.map(lambda x, y: x.sharding == y.sharding, found, wanted)
            assert all(jax.tree.leaves(same)), (name, other)
        print(f"{name}: its checkpoint restores on all of {', '.join(targets)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    runtime.prepare(compilation_cache=False)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        text = folder / "text.txt"
        words = np.random.default_rng(0).choice(["dog ", "cat ", "house ", "of "], 3000)
        text.write_text("".join(words))
        runs = {"1 device": make_run(text, steps, MeshConfig(data=8))}
        placements = {"1 device": Placement()}
        for name, mesh in MESHES.items():
            runs[name] = make_run(text, steps, mesh)
            placements[name] = placement_of(runs[name])
        folders = {name: folder / name.replace(" ", "") for name in runs}
        wanted = None
        for name, run in runs.items():
            placement = placements[name]
            loop.train(run, folders[name], progress=False, placement=placement)
            found = losses(folders[name])
            assert found.shape == (steps,)
            if wanted is None:
                wanted = found
                print(f"1 device: first loss {found[0]:.6f}, last {found[-1]:.6f}")
                continue
            difference = np.max(np.abs(found - wanted) / np.abs(wanted))
            print(f"{name}: largest relative difference {difference:.1e}", flush=True)
            assert difference <= 1e-5, name
        restores(folders, runs, placements, steps)


if __name__ == "__main__":
    main()
