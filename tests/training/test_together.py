"""Seeds trained at once: the numbers of runs by themselves, exact when resumed."""

import jax
import numpy as np
import pytest

from relpos_jax.training import writers
from relpos_jax.training.together import train_together
from tests.training.test_loop import equal, make_run, quiet, text, without_times  # noqa: F401

SEEDS = (3, 5)


def trained(run, folder, **more):
    paths = [folder / str(seed) for seed in SEEDS]
    return train_together(run, SEEDS, paths, progress=False, **more)


def test_seeds_at_once_are_runs_by_themselves_and_resume(text, tmp_path):  # noqa: F811
    run = make_run(text, memory=0, encoding="alibi")
    whole = trained(run, tmp_path / "whole")
    for seed, found in zip(SEEDS, whole, strict=True):
        alone = make_run(text, memory=0, encoding="alibi", seed=seed)
        wanted = quiet(alone, tmp_path / f"alone{seed}")
        for x, y in zip(
            jax.tree.leaves(found.params), jax.tree.leaves(wanted.params), strict=True
        ):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-5)
        lines = [
            [line["loss"] for line in writers.read(tmp_path / name / "metrics.jsonl")]
            for name in (f"whole/{seed}", f"alone{seed}")
        ]
        assert len(lines[0]) == 6
        np.testing.assert_allclose(*lines, rtol=1e-5)

    for stop in (3, 7):
        trained(run, tmp_path / "parts", stop_after=stop)
    # As if a kill had come between two saves.
    late = tmp_path / "parts" / "5" / "checkpoints" / "7"
    late.rename(tmp_path / "elsewhere")
    resumed = trained(run, tmp_path / "parts")
    for seed, one, two in zip(SEEDS, whole, resumed, strict=True):
        equal(one, two)
        parts = [without_times(tmp_path / x / str(seed)) for x in ("parts", "whole")]
        assert parts[0] == parts[1]

    with pytest.raises(ValueError, match=r"together: \[3, 5\] there, None here"):
        quiet(
            make_run(text, memory=0, encoding="alibi", seed=3), tmp_path / "whole" / "3"
        )


def test_what_only_a_run_by_itself_has_is_refused(text, tmp_path):  # noqa: F811
    with pytest.raises(ValueError, match="eval_every must be None"):
        trained(make_run(text, eval_every=3), tmp_path)
    with pytest.raises(ValueError, match="no seed twice"):
        train_together(make_run(text), (1, 1), [tmp_path, tmp_path], progress=False)
