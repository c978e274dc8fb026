"""A training step's time in the whole loop, against the compiled call's alone.

    python -m experiments.benchmarks.host_overhead --config=configs/quick.py

The loop's time is that of `loop.train` from one call to another, with batches, metrics,
progress and checkpoints; the call's is measured with its batches ready on the device.
Both in turn, some rounds. Run time: 3 minutes on two cores.
"""

import dataclasses
import tempfile
import time

import jax
from absl import app, flags
from flax import nnx
from ml_collections import config_flags

from relpos_jax import config
from relpos_jax.training import loop, runtime
from relpos_jax.training.placement import Placement
from relpos_jax.training.step import make_train_call

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file.")
_CALLS = flags.DEFINE_integer("calls", 11, "Calls of a round.", lower_bound=3)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds.", lower_bound=1)
_TIMES = []


@dataclasses.dataclass(frozen=True)
class Timed(Placement):
    """Notes when the loop makes a call's batches."""

    def batch(self, stack):
        _TIMES.append((time.perf_counter(), time.process_time()))
        return super().batch(stack)


def main(argv: list[str]) -> None:
    del argv
    runtime.prepare()
    run = config.build(_CONFIG.value)
    steps, calls = run.training.steps_per_call, _CALLS.value
    training = dataclasses.replace(run.training, steps=steps * (calls + 2))
    run = dataclasses.replace(run, training=training)
    corpus = loop.load_corpus(run)
    graphdef = nnx.split(nnx.eval_shape(lambda: loop.make_model(run)))[0]
    call = make_train_call(graphdef, training)
    keys = loop.step_keys(run.model, training)
    stack = jax.device_put(loop.make_batches(run, corpus).stack(0, steps))
    totals = {"loop": [0.0, 0.0], "call": [0.0, 0.0]}
    for number in range(_ROUNDS.value + 1):  # the first one compiles
        _TIMES.clear()
        with tempfile.TemporaryDirectory() as folder:
            loop.train(run, folder, corpus=corpus, progress=False, placement=Timed())
        measured = {"loop": _TIMES[1 : calls + 2]}  # before the last call and its save
        state, times = loop.initial_state(run), []
        for _ in range(calls + 2):
            state, report = call(state, stack, steps, *keys)
            jax.block_until_ready((state, report))
            times.append((time.perf_counter(), time.process_time()))
        measured["call"] = times[1:]
        for name, found in measured.items():
            for kind in (0, 1) if number else ():
                span = found[-1][kind] - found[0][kind]
                totals[name][kind] += span / (len(found) - 1) / steps / _ROUNDS.value
    for kind, word in enumerate(("wall", "CPU")):
        loop_, alone = totals["loop"][kind], totals["call"][kind]
        print(f"{word}: a step takes {1e3 * loop_:.2f} ms in the loop, ", end="")
        print(f"{1e3 * alone:.2f} ms in the call alone: {loop_ / alone:.3f} times")


if __name__ == "__main__":
    flags.mark_flags_as_required(["config"])
    app.run(main)
