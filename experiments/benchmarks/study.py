"""Times a study here and with x-transformers: the same models, trained and evaluated.

    python -m experiments.benchmarks.study --models=rope,alibi --json=study.json

Same text, batches, steps, sizes, lengths and targets; the protocols without memory.
Ours starts without compiled programs unless `--warm`.
"""

import os
import subprocess
import sys
import tempfile
import time

from absl import app, flags

from experiments.benchmarks import rounds

MODELS = flags.DEFINE_list("models", ["rope", "alibi"], "Of none, rope, alibi, t5.")
STUDY = flags.DEFINE_string("study", "configs/extrapolate.py:quick", "The study.")
WARM = flags.DEFINE_bool("warm", False, "Keep our compiled programs between runs.")
_PROTOCOLS = ("non_overlapping", "same_targets", "sliding")


def seconds(module: str, workdir: str) -> float:
    """Runs one side to its end; returns its wall seconds, start included."""
    env = dict(os.environ)
    if not WARM.value:
        env["RELPOS_JAX_COMPILATION_CACHE"] = "off"
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", module, f"--config={STUDY.value}"]
        + [f"--workdir={workdir}", "--noprogress"]
        + [f"--config.study.encodings={tuple(MODELS.value)!r}"]
        + [f"--config.evaluation.protocols={_PROTOCOLS!r}"],
        env=env,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - began


def main(_):
    modules = {"ours": "experiments.extrapolate"}
    modules["xt"] = "experiments.benchmarks.peers.xt_study"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for who, module in modules.items():
            found = seconds(module, f"{folder}/{who}")
            rows.append({"peer": who, "models": MODELS.value, "seconds": found})
    rounds.write("study", [{"rows": rows, "left_out": {}}])


if __name__ == "__main__":
    app.run(main)
