"""What `first_step` starts: `experiments.train` up to the end of the first step.

Prints when what was finished, and leaves before the checkpoint is written.
"""

import json
import os
import time

from absl import app, flags

from experiments import train  # its imports are what is timed
from relpos_jax import config
from relpos_jax.training import loop, runtime

IMPORTED = time.time()


def main(_):
    runtime.prepare()
    section = flags.FLAGS.config
    # The same program as a whole run's, stopped after the first of its steps.
    section.training.checkpoint_every = 1
    run = config.build(section)
    built = time.time()

    def leave(result):
        times = {"imported": IMPORTED, "configured": built, "stepped": time.time()}
        print(json.dumps(times | {"cpu_seconds": time.process_time()}), flush=True)
        os._exit(0)

    loop.train(run, flags.FLAGS.workdir, progress=False, on_eval=leave)


if __name__ == "__main__":
    assert train
    app.run(main)
