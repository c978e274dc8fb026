"""Checkpoints: exact, or refused with words; a damaged one is never taken."""

import gc
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax.training.checkpoints import CheckpointMismatch, Checkpoints

# Orbax leaves coroutines behind when a file that it reads is damaged.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def collected():
    """Lets what was left behind complain within the test that it belongs to."""
    yield
    gc.collect()


def tree(step: int) -> dict:
    return {
        "step": jnp.int32(16777217 + step),
        "params": {"w": jnp.arange(3000.0).reshape(30, 100) * 1.1 + step},
        "low": [jnp.full((4,), 1 / 3, jnp.bfloat16)],
        "memory": jnp.zeros((2, 0, 4)),
    }


def same(first, second) -> bool:
    pairs = jax.tree.map(
        lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), first, second
    )
    return all(jax.tree.leaves(pairs))


def test_round_trip_is_exact_and_keeps_the_newest(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.restore_newest(tree(0)) is None
        for step in (1, 2, 3):
            checkpoints.save(step, tree(step))
        assert checkpoints.steps() == [2, 3]
    with Checkpoints(tmp_path) as checkpoints:
        step, found = checkpoints.restore_newest(tree(0))
        assert step == 3 and same(found, tree(3))
        assert same(checkpoints.restore(2, tree(0)), tree(2))


def test_target_can_be_abstract(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree(1))
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            tree(0),
        )
        assert same(checkpoints.restore(1, abstract), tree(1))


@pytest.mark.parametrize("step", [2, 1])
def test_a_save_that_writes_nothing_is_an_error(tmp_path, step):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, tree(2))
        with pytest.raises(FileExistsError, match=rf"step {step} .*steps \[2\]"):
            checkpoints.save(step, tree(3))


def test_another_tree_is_refused_with_all_differences(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree(1))
        target = tree(0)
        target["params"] = {"w": jnp.zeros((30, 101)), "new": jnp.zeros(2)}
        target["step"] = jnp.float32(0)
        del target["low"]
        with pytest.raises(CheckpointMismatch) as caught:
            checkpoints.restore_newest(target)
        assert checkpoints.steps() == [1]  # sound, so it stays
    for line in (
        "missing: params/new",
        "unexpected: low/0",
        "shape differs: params/w: (30, 100) stored, (30, 101) wanted",
        "dtype differs: step: int32 stored, float32 wanted",
    ):
        assert line in str(caught.value)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def largest(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: truncate(largest(folder)),
        lambda folder: flip(largest(folder)),
        lambda folder: largest(folder).unlink(),
        lambda folder: truncate(folder / "state" / "manifest.ocdbt"),
        lambda folder: (folder / "state" / "manifest.ocdbt").unlink(),
        lambda folder: truncate(folder / "meta" / "metadata"),
        lambda folder: (folder / "meta" / "metadata").unlink(),
        lambda folder: truncate(folder / "state" / "_METADATA"),
    ],
)
def test_a_damaged_newest_falls_back_with_a_warning(tmp_path, caplog, damage):
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder, keep=3) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, tree(step))
    damage(folder / "2")
    with Checkpoints(folder, keep=3) as checkpoints:
        with caplog.at_level(logging.WARNING):
            step, found = checkpoints.restore_newest(tree(0))
        assert step == 1 and same(found, tree(1))
        assert "checkpoint 2 is damaged" in caplog.text
        assert (tmp_path / "checkpoints.damaged" / "2").is_dir()
        checkpoints.save(2, tree(2))  # its step can be written again
        step, found = checkpoints.restore_newest(tree(0))
        assert step == 2 and same(found, tree(2))


def test_unfinished_saves_are_ignored_and_written_over(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree(1))
    (tmp_path / "2.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1]
        assert checkpoints.restore_newest(tree(0))[0] == 1
        checkpoints.save(2, tree(2))
        assert checkpoints.restore_newest(tree(0))[0] == 2


def test_a_half_deleted_old_one_is_no_obstacle(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, tree(step))
    largest(tmp_path / "1").unlink()
    (tmp_path / "1" / "_CHECKPOINT_METADATA").unlink()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.restore_newest(tree(0))[0] == 2
        checkpoints.save(3, tree(3))
        checkpoints.save(4, tree(4))
        assert checkpoints.restore_newest(tree(0))[0] == 4


def test_when_all_are_damaged_there_is_none(tmp_path):
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, tree(1))
    flip(largest(folder / "1"))
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.restore_newest(tree(0)) is None
        assert checkpoints.steps() == []
