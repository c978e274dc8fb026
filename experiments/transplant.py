r"""Gives a trained model another position encoding, with or without further steps.

    python -m experiments.transplant --workdir=runs/quick --position=rope_ntk \
        --out=runs/ntk --steps=50 --config=configs/quick.py

Text and training of the further steps are the config's (its model is not read). What
comes out is a run that `experiments.evaluate` and `experiments.generate` take.
"""

import dataclasses

import jax
from absl import app, flags
from ml_collections import config_flags

from relpos_jax import config as configs
from relpos_jax import positional
from relpos_jax.evaluation import surgery
from relpos_jax.interop.runs import load_run, save_run
from relpos_jax.training import runtime

CONFIG = config_flags.DEFINE_config_file("config", "configs/quick.py", "Further steps.")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
OUT = flags.DEFINE_string("out", None, "Folder of the new one.", required=True)
POSITION = flags.DEFINE_string("position", None, "Registered encoding.", required=True)
STEPS = flags.DEFINE_integer("steps", 0, "Further steps; 0: none.")
SEED = flags.DEFINE_integer("seed", 0, "Of parameters that are new.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"what is {argv[1]!r}? Options look like --name=value.")
    runtime.prepare()
    try:
        config, _, params = load_run(WORKDIR.value)
        encoding = positional.make(POSITION.value)
        key = jax.random.key(SEED.value)
        model = surgery.transplant(config, params, encoding, key)
        print(f"{len(model.kept)} parameters kept")
        for what, names in (("new", model.new), ("dropped", model.dropped)):
            print(f"{what}: {', '.join(names) or 'none'}")
        if STEPS.value:
            run = configs.build(CONFIG.value)
            training = dataclasses.replace(run.training, steps=STEPS.value)
            run = dataclasses.replace(run, model=model.config, training=training)
            corpus = run.data.load()
            model, losses = surgery.adapt(model, run, corpus)
            print(f"loss {losses[0]:.3f}, after {STEPS.value} steps {losses[-1]:.3f}")
        source = {"workdir": WORKDIR.value, "steps": STEPS.value, "seed": SEED.value}
        save_run(OUT.value, model.config, model.params, transplanted=source)
    except (ValueError, TypeError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    app.run(main)
