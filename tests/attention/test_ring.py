"""Ring attention, on eight simulated devices in processes of their own."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import positional, where
from relpos_jax.attention import attend
from relpos_jax.attention.ring import steps_needed
from relpos_jax.masks import Bidirectional, Causal, Window
from relpos_jax.relative import Layout
from tests.conftest import ROOT


def run(*command: str) -> str:
    """Runs a module in a process of its own; returns what it printed."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    environment["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".jax_cache")
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    found = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


# One whose rows are vectors and whose parameters have gradients, one whose data
# travels with the keys, one that needs all keys of a query.
def test_is_the_oracle_with_memory_and_packed_documents():
    run("tests.attention.ring_on_devices", "transformer_xl", "cope", "forgetting")


@pytest.mark.slow
def test_is_the_oracle_for_every_encoding():
    print(run("tests.attention.ring_on_devices"))


@pytest.mark.slow
def test_memory_of_a_device_falls_as_the_ring_grows():
    sizes = ["--devices=8", "--length=4096", "--memory=1024"]
    printed = run("experiments.benchmarks.ring", *sizes)
    rows = [line.split("|") for line in printed.splitlines()[2:]]
    found = [float(row[2].split()[0]) for row in rows]
    assert len(found) == 4
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0] / 2


def test_a_window_needs_the_pieces_that_it_reaches():
    pieces = (8, 8)
    assert steps_needed(Window(4), Layout(), pieces, 8) == 2
    assert steps_needed(Window(10), Layout(), pieces, 8) == 3
    assert steps_needed(Causal(), Layout(), pieces, 8) == 8
    assert steps_needed(Window(4), None, pieces, 8) == 8
    # A query's own piece of keys lies on another device where there is memory.
    assert steps_needed(Window(1), Layout(24), (8, 14), 4) > 1


@pytest.mark.parametrize("mask", [Causal(), Window(3), Window(9), Bidirectional()])
@pytest.mark.parametrize("offset", [0, 5, 24])
def test_no_piece_that_a_query_sees_is_left_out(mask, offset):
    size, queries, keys = 4, 4, 10
    steps = steps_needed(mask, Layout(offset), (queries, keys), size)
    distance = np.arange(16)[:, None] + offset - np.arange(40)[None, :]
    visible = np.asarray(mask.allows(jnp.asarray(distance)))
    for i, j in zip(*np.nonzero(visible), strict=True):
        assert (i // queries - j // keys) % size < steps


def test_needs_a_mesh():
    at = where.contiguous(1, 4)
    x = jnp.zeros((1, 4, 1, 2))
    with pytest.raises(ValueError, match="sequence"):
        attend(positional.make("rope"), {}, x, x, x, at, at, implementation="ring")
    assert jax.sharding.get_abstract_mesh().empty
