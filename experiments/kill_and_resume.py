"""Kills a training run many times, and shows that it ends as if nobody had.

    python -m experiments.kill_and_resume --config=configs/quick.py:transformer_xl \
        --config.data.order=lanes --config.model.memory_length=32 \
        --config.model.layers=1 --config.model.width=32 --config.model.heads=2 \
        --config.model.head_dim=16 --config.model.feedforward=64 \
        --config.model.dropout=0.1 --config.training.batch=4 \
        --config.training.length=32 --config.training.steps=400 \
        --config.training.checkpoint_every=10 --workdir=runs/killed

Prints each kill, then what differs from an unbroken run: parameters, optimiser state,
memory, metrics. Exits with 1 if anything does.
"""

from absl import app, flags
from ml_collections import config_flags

from relpos_jax import config
from relpos_jax.training import endurance, runtime

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file.")
_WORKDIR = flags.DEFINE_string("workdir", None, "A folder that doesn't exist.")
_KILLS = flags.DEFINE_integer("kills", 20, "How often.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the moments.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"what is {argv[1]!r}? Options look like --name=value.")
    runtime.prepare()
    try:
        run = config.build(_CONFIG.value)
        different = endurance.kill_and_resume(
            run, _WORKDIR.value, _KILLS.value, seed=_SEED.value
        )
    except (ValueError, TypeError, FileExistsError) as error:
        raise SystemExit(f"error: {error}") from error
    if different:
        raise SystemExit("differs: " + ", ".join(different))
    print("equal bit for bit: parameters, optimiser state, memory, metrics")


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main)
