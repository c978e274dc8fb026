"""Times a curve over lengths, and counts the programs that it compiles.

    python -m experiments.benchmarks.evaluation --encoding=rope --json=evaluation.json

The curve read off the longest windows (`Score.first`), against those windows; each
length with windows of its own, as `non_overlapping` asks; all protocols.
"""

import dataclasses
import time

import jax
from absl import app, flags
from flax import nnx

from configs import extrapolate
from experiments.benchmarks import rounds
from relpos_jax.evaluation.config import PROTOCOLS
from relpos_jax.evaluation.extrapolation import plan_study
from relpos_jax.evaluation.perplexity import Language, evaluate
from relpos_jax.models import TransformerXL
from relpos_jax.training import runtime

ENCODING = flags.DEFINE_string("encoding", "rope", "A registered position encoding.")
VARIANT = flags.DEFINE_string("variant", "quick", "Of configs/extrapolate.py.")


def main(_):
    runtime.prepare(compilation_cache=False)
    section = extrapolate.get_config(VARIANT.value)
    section.study.encodings = (ENCODING.value,)
    plan = plan_study(section)
    run = plan.any_run
    text, train_length = run.data.load().held_out, run.training.length
    model = TransformerXL(run.model, key=jax.random.key(0))
    language = Language.of(*nnx.split(model))
    lengths = plan.evaluation.lengths(train_length)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **__: compiled.append(1) if "backend_compile" in name else None
    )
    rows = []

    def measure(what: str, shapes: int, multiples: tuple, protocols: tuple, read):
        compiled.clear()
        began = time.perf_counter()
        config = dataclasses.replace(
            plan.evaluation, multiples=multiples, protocols=protocols
        )
        found = read(evaluate(language, text, train_length, config).scores)
        first, count = time.perf_counter() - began, len(compiled)
        rows.append(
            {"what": what, "lengths": found, "seconds": first, "compiled": count}
            | {"shapes": shapes}
        )

    longest, some = plan.evaluation.multiples[-1:], ("non_overlapping",)
    measure("the longest windows", 1, longest, some, len)

    def curve(scores):
        return len([scores[0].first(length) for length in lengths])

    measure("curve read off them", 1, longest, some, curve)
    every = plan.evaluation.multiples
    measure("windows of each length", len(lengths), every, some, len)
    measure("all protocols", 2 * len(lengths), every, PROTOCOLS, len)
    rounds.write("evaluation", [{"rows": rows, "left_out": {}}])


if __name__ == "__main__":
    app.run(main)
