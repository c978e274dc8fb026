"""Randomized and shifted positions in training: transformations of the data."""

import jax
import numpy as np
import pytest

from relpos_jax.config import DataConfig, RunConfig
from relpos_jax.data import Corpus
from relpos_jax.models import ModelConfig
from relpos_jax.positional import make
from relpos_jax.training import loop
from relpos_jax.training.config import TrainingConfig


def run_of(position="transformer_xl", memory=0, **training):
    model = ModelConfig(
        vocabulary=256,
        layers=1,
        width=16,
        heads=2,
        head_dim=8,
        feedforward=16,
        position=make(position),
        memory_length=memory,
    )
    settings = dict(steps=4, batch=2, length=8, steps_per_call=2, warmup=1, log_every=1)
    order = "lanes" if memory else "windows"
    return RunConfig(
        DataConfig(order=order), model, TrainingConfig(**{**settings, **training})
    )


CORPUS = Corpus(
    "text",
    np.random.default_rng(0).integers(0, 256, 400).astype(np.uint8),
    np.zeros(9, np.uint8),
    "random bytes",
)


def trained(run, folder, **options):
    result = loop.train(run, folder, corpus=CORPUS, progress=False, **options)
    return jax.tree.map(np.asarray, result.params)


def difference(one, other):
    gaps = jax.tree.map(lambda x, y: np.abs(x - y).max(), one, other)
    return max(jax.tree.leaves(gaps))


def test_an_offset_changes_absolute_encodings_alone(tmp_path):
    gaps = {}
    for position in ("transformer_xl", "sinusoidal"):
        given = trained(run_of(position), tmp_path / position)
        moved = run_of(position, positions="offset", positions_limit=100)
        moved = trained(moved, tmp_path / f"{position}-offset")
        gaps[position] = difference(given, moved)
    # Adam turns differences in the last digit into small steps, so not exactly 0.
    assert gaps["transformer_xl"] < 0.2 * gaps["sinusoidal"]


def test_offsets_fit_memory_from_segment_to_segment(tmp_path):
    given = trained(run_of(memory=8), tmp_path / "given")
    moved = run_of(memory=8, positions="offset", positions_limit=100)
    assert difference(given, trained(moved, tmp_path / "offset")) < 1e-3


@pytest.mark.parametrize("positions", ["randomized", "randomized_float"])
def test_randomized_positions_resume_exactly(positions, tmp_path):
    run = run_of(positions=positions, positions_limit=64, checkpoint_every=2)
    whole = trained(run, tmp_path / "whole")
    trained(run, tmp_path / "parts", stop_after=2)
    parts = trained(run, tmp_path / "parts")
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    assert difference(whole, trained(run_of(), tmp_path / "given")) > 1e-4


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="excludes memory"):
        run_of(memory=8, positions="randomized")
    with pytest.raises(ValueError, match="positions_limit must be at least"):
        run_of(positions="randomized", positions_limit=4)
    with pytest.raises(ValueError, match="did you mean 'randomized'"):
        run_of(positions="randomised")
