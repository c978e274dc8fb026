"""The loop: stopped, killed or resumed, it gives the numbers of an unbroken run."""

import dataclasses
import gc
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from flax import nnx

from relpos_jax import data, positional
from relpos_jax.config import DataConfig, RunConfig
from relpos_jax.interop.runs import load_run
from relpos_jax.models.config import ModelConfig
from relpos_jax.training import loop, writers
from relpos_jax.training.checkpoints import Checkpoints
from relpos_jax.training.config import TrainingConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]


def make_run(text: pathlib.Path, *, encoding="transformer_xl", memory=8, **training):
    model = ModelConfig(
        vocabulary=256,
        layers=1,
        width=16,
        heads=2,
        head_dim=8,
        feedforward=32,
        position=positional.make(encoding),
        memory_length=memory,
        dropout=0.1,
    )
    settings = {
        "steps": 12,
        "batch": 2,
        "length": 8,
        "steps_per_call": 4,
        "checkpoint_every": 5,
        "log_every": 2,
        "learning_rate": 1e-2,
        "warmup": 3,
    }
    order = "lanes" if memory else "windows"
    data = DataConfig(source=f"file:{text}", order=order)
    return RunConfig(data, model, TrainingConfig(**(settings | training)))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = np.random.default_rng(0).choice(["dog ", "cat ", "house ", "of "], 300)
    path.write_text("".join(words))
    return path


def quiet(run, workdir, **more):
    return loop.train(run, workdir, progress=False, **more)


def equal(first, second):
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)


def without_times(workdir):
    lines = writers.read(workdir / "metrics.jsonl")
    return [{k: v for k, v in x.items() if k != "tokens_per_second"} for x in lines]


@pytest.fixture(scope="module")
def unbroken(text, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("unbroken")
    return quiet(make_run(text), workdir), workdir


def test_writes_what_it_says(unbroken, text):
    result, workdir = unbroken
    assert result.step == 12
    lines = without_times(workdir)
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10, 12]
    for line in lines:
        assert line["bits_per_byte"] == line["loss"] / np.log(2)
        assert line["tokens"] == 16 and line["grad_norm"] > 0
    found = sorted(path.name for path in (workdir / "checkpoints").iterdir())
    assert found == ["10", "12"]
    config = json.loads((workdir / "config.json").read_text())
    assert config["training"]["steps"] == 12
    assert config["corpus"]["size"] == text.stat().st_size
    assert list((workdir / "tensorboard").iterdir())


@pytest.mark.parametrize("stops", [[1], [3, 4, 7, 11]])
def test_stopped_and_resumed_it_is_the_same_bit_for_bit(
    unbroken, text, tmp_path, stops
):
    run = make_run(text)
    for stop in stops:
        assert quiet(run, tmp_path, stop_after=stop).step == stop
    result = quiet(run, tmp_path)
    equal(result, unbroken[0])
    assert without_times(tmp_path) == without_times(unbroken[1])


def test_windows_resume_bit_for_bit_too(text, tmp_path):
    run = make_run(text, encoding="alibi", memory=0)
    whole = quiet(run, tmp_path / "whole")
    quiet(run, tmp_path / "parts", stop_after=6)
    equal(quiet(run, tmp_path / "parts"), whole)


def test_checkpoints_and_logs_can_be_cut_otherwise(unbroken, text, tmp_path):
    quiet(make_run(text, checkpoint_every=3, log_every=1), tmp_path, stop_after=7)
    result = quiet(make_run(text, checkpoint_every=100, keep=1), tmp_path)
    equal(result, unbroken[0])


def test_a_finished_run_is_not_repeated(unbroken, text):
    _, workdir = unbroken
    before = (workdir / "metrics.jsonl").read_bytes()
    equal(quiet(make_run(text), workdir), unbroken[0])
    assert (workdir / "metrics.jsonl").read_bytes() == before


# Orbax leaves coroutines behind when a file that it reads is damaged.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("left", [10, 0])
def test_damaged_newest_checkpoint_costs_steps_not_bits(
    unbroken, text, tmp_path, caplog, left
):
    run = make_run(text)
    quiet(run, tmp_path, stop_after=7)
    for file in (tmp_path / "checkpoints" / "7").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:left])
    result = quiet(run, tmp_path)
    gc.collect()
    assert "checkpoint 7 is damaged" in caplog.text
    assert "checkpoints.damaged/7; taking the one before" in caplog.text
    equal(result, unbroken[0])
    assert without_times(tmp_path) == without_times(unbroken[1])


def test_another_config_is_refused_naming_the_keys(text, tmp_path):
    quiet(make_run(text), tmp_path, stop_after=4)
    with pytest.raises(ValueError, match=r"training\.seed: 0 there, 1 here"):
        quiet(make_run(text, seed=1), tmp_path)
    with pytest.raises(ValueError, match=r"training\.steps: 12 there, 20 here"):
        quiet(make_run(text, steps=20), tmp_path)
    with pytest.raises(ValueError, match=r"model\.position\.name: 'Transf.*'T5' here"):
        quiet(make_run(text, encoding="t5"), tmp_path)
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().swapcase())
    run = make_run(text)
    with pytest.raises(ValueError, match=r"corpus\.sha256"):
        quiet(dataclasses.replace(run, data=make_run(other).data), tmp_path)


def test_a_loss_that_is_not_finite_stops_the_run(text, tmp_path):
    # Without clipping, a rate like this overflows within a few steps.
    run = make_run(text, learning_rate=1e30, checkpoint_every=1, clip=None, warmup=0)
    with pytest.raises(
        FloatingPointError, match=r"of step \d+ is .*(kept|from before)"
    ):
        quiet(run, tmp_path)
    lines = writers.read(tmp_path / "metrics.jsonl")
    assert all(np.isfinite(line["loss"]) for line in lines)
    # The folder holds a sound state: the run stops again at the same step.
    with pytest.raises(FloatingPointError):
        quiet(run, tmp_path)


def test_evaluation_joins_the_line_of_its_step(text, tmp_path):
    seen = []

    def on_eval(result):
        seen.append(result.step)
        assert result.model.config.layers == 1
        return {"held_out": float(result.step)}

    quiet(make_run(text), tmp_path, on_eval=on_eval)
    assert seen == [5, 10, 12]
    lines = {line["step"]: line for line in writers.read(tmp_path / "metrics.jsonl")}
    assert [step for step, line in lines.items() if "held_out" in line] == seen


def test_the_best_on_held_out_text_is_kept_and_chosen_steps_are_traced(text, tmp_path):
    settings = {"eval_every": 4, "eval_tokens": 40, "log_every": 100}
    run = make_run(text, **settings, profile="2:3")
    whole = quiet(run, tmp_path / "whole")
    lines = without_times(tmp_path / "whole")
    assert [line["step"] for line in lines] == [4, 8, 12]
    losses = [line["held_out_loss"] for line in lines]
    assert list((tmp_path / "whole" / "profile").rglob("*.xplane.pb"))

    best = lines[int(np.argmin(losses))]["step"]
    with Checkpoints(tmp_path / "whole" / "best" / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [best]
    config, _, kept = load_run(tmp_path / "whole" / "best")
    assert config == run.model
    if best == 12:
        jax.tree.map(np.testing.assert_array_equal, kept, whole.params)

    # By hand: three batches of 16 targets, from an empty memory.
    corpus = data.load(run.data.source)
    held_out = data.Lanes(corpus.held_out, 2, 8)
    memory, total = whole.model.init_memory(2), 0.0
    score = jax.jit(
        lambda params, batch, memory: nnx.merge(whole.graphdef, params).losses(
            batch.inputs, batch.targets, batch.at, memory
        )
    )
    for step in range(3):
        batch = jax.tree.map(np.asarray, held_out.batch(step))
        found, memory = score(whole.params, batch, memory)
        total += float(found.sum())
    assert losses[-1] == pytest.approx(total / 48, rel=1e-5)

    for stop in (3, 6, 9):
        quiet(make_run(text, **settings), tmp_path / "parts", stop_after=stop)
    equal(quiet(run, tmp_path / "parts"), whole)
    assert without_times(tmp_path / "parts") == lines
    with Checkpoints(tmp_path / "parts" / "best" / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [best]


def test_initial_parameters_follow_from_the_seed(text, tmp_path):
    first = quiet(make_run(text, memory=0), tmp_path / "a", stop_after=0)
    second = quiet(make_run(text, memory=0), tmp_path / "b", stop_after=0)
    other = quiet(make_run(text, memory=0, seed=1), tmp_path / "c", stop_after=0)
    equal(first, second)
    a, c = first.params["embedding"], other.params["embedding"]
    assert not np.array_equal(a, c)


def test_calls_end_at_every_border():
    training = TrainingConfig(steps=23, steps_per_call=10, checkpoint_every=7)
    stops, step = [], 0
    while step < 23:
        step = loop.next_stop(step, training, 23)
        stops.append(step)
    assert stops == [7, 10, 14, 20, 21, 23]
    assert loop.next_stop(3, training, 5) == 5
    seen = dataclasses.replace(training, eval_every=9, profile="11:12")
    stops = [loop.next_stop(step, seen, 23) for step in (7, 9, 10, 11, 12)]
    assert stops == [9, 10, 11, 12, 14]


def test_it_learns(text, tmp_path):
    run = make_run(text, steps=60, checkpoint_every=60, steps_per_call=20)
    quiet(run, tmp_path)
    lines = writers.read(tmp_path / "metrics.jsonl")
    assert lines[0]["loss"] > 4 > 2.9 > lines[-1]["loss"]


SCRIPT = """
import sys, pathlib
sys.path[:0] = {paths!r}
from relpos_jax.training import loop, runtime
from test_loop import make_run
runtime.prepare()
run = make_run(pathlib.Path({text!r}), steps=400, checkpoint_every=20, log_every=20)
loop.train(run, {workdir!r}, progress=False)
"""


def child(text, workdir):
    here = str(pathlib.Path(__file__).parent)
    code = SCRIPT.format(paths=[here, str(ROOT)], text=str(text), workdir=str(workdir))
    environment = {
        **os.environ,
        "RELPOS_JAX_COMPILATION_CACHE": str(ROOT / ".jax_cache"),
    }
    return subprocess.Popen([sys.executable, "-c", code], env=environment)


def wait_for_checkpoint(process, workdir, after=-1):
    """Returns the newest step once there is one past `after`."""
    folder = workdir / "checkpoints"
    for _ in range(6000):
        steps = [int(path.name) for path in folder.glob("*") if path.name.isdigit()]
        if max(steps, default=-1) > after:
            return max(steps)
        assert process.poll() is None, "ended without a checkpoint"
        time.sleep(0.01)
    raise AssertionError("no checkpoint within a minute")


@pytest.mark.slow
def test_sigterm_saves_and_leaves(text, tmp_path):
    process = child(text, tmp_path)
    wait_for_checkpoint(process, tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert wait_for_checkpoint(process, tmp_path) < 400


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_with_the_same_bits(text, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert child(text, whole).wait(120) == 0
    rng, step, kills = np.random.default_rng(), -1, 0
    while kills < 3:
        process = child(text, killed)
        step = wait_for_checkpoint(process, killed, step)
        time.sleep(float(rng.uniform(0, 0.1)))
        process.kill()
        kills += process.wait() == -signal.SIGKILL
        if (killed / "checkpoints" / "400").exists():
            break
    assert kills
    assert child(text, killed).wait(120) == 0
    run = make_run(text, steps=400, checkpoint_every=20, log_every=20)
    equal(quiet(run, killed), quiet(run, whole))
    assert without_times(killed) == without_times(whole)
