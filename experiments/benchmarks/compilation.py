"""Times compilation of a training call at two depths.

    python -m experiments.benchmarks.compilation --json=compilation.json

By default the two released enwik8 models, 12 and 24 layers, at batch 1 and one update a
call; nothing is allocated or run.
"""

import time

import jax
import numpy as np
from absl import app, flags
from flax import nnx

from configs import enwik8
from experiments.benchmarks import rounds
from relpos_jax import config as configs
from relpos_jax import data
from relpos_jax.models import TransformerXL
from relpos_jax.training.state import initial
from relpos_jax.training.step import make_train_call

VARIANTS = flags.DEFINE_list("variants", ["base", "large"], "Of configs/enwik8.py.")


def measure(variant: str) -> dict:
    """Returns the seconds that tracing and compiling take."""
    config = enwik8.get_config(variant)
    config.training.batch = config.training.steps_per_call = 1
    run = configs.build(config)

    def make():
        model = TransformerXL(run.model, key=jax.random.key(0))
        params = nnx.as_pure(nnx.state(model))
        memory = model.init_memory(run.training.batch)
        return initial(params, run.training, memory)

    graphdef = nnx.graphdef(
        nnx.eval_shape(lambda: TransformerXL(run.model, key=jax.random.key(0)))
    )
    text = np.zeros(run.training.length + 1, np.int32)
    tokens = data.Lanes(text, 1, run.training.length).stack(0, 1)
    state = jax.eval_shape(make)
    began, cpu = time.perf_counter(), time.process_time()
    call = make_train_call(graphdef, run.training)
    lowered = call.lower(state, tokens, 1, None)
    traced = time.perf_counter()
    lowered.compile()
    return {
        "layers": run.model.layers,
        "trace_seconds": traced - began,
        "compile_seconds": time.perf_counter() - traced,
        "cpu_seconds": time.process_time() - cpu,
    }


def main(_):
    rows = [{"variant": variant, **measure(variant)} for variant in VARIANTS.value]
    rounds.write("compilation", [{"rows": rows, "left_out": {}}])


if __name__ == "__main__":
    app.run(main)
