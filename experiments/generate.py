r"""Continues prompts with a trained model, and prints the text as it comes.

    python -m experiments.generate --workdir=runs/quick --prompt="def main(" \
        --max_new_tokens=200 --temperature=0.8 --top_k=40 --stop="\n\n"

`--prompt` and `--stop` may be given several times; in stops, `\n` and the like are
escapes. Of several prompts, all are printed at the end.
"""

import functools

from absl import app, flags

from relpos_jax.data import Bytes
from relpos_jax.evaluation import generation, texts
from relpos_jax.evaluation.sampling import SamplingConfig
from relpos_jax.interop.runs import load_run
from relpos_jax.training import runtime

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
PROMPT = flags.DEFINE_multi_string("prompt", None, "Text to continue.", required=True)
NEW = flags.DEFINE_integer("max_new_tokens", 256, "Most tokens to add.")
LEAST = flags.DEFINE_integer("min_new_tokens", 0, "Stops before so many don't count.")
TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "0: the likeliest token (greedy).")
TOP_K = flags.DEFINE_integer("top_k", 0, "Keep the k likeliest tokens; 0: all.")
TOP_P = flags.DEFINE_float("top_p", 1.0, "Keep the likeliest up to this probability.")
STOPS = flags.DEFINE_multi_string("stop", [], "Text that ends the continuation.")
SEED = flags.DEFINE_integer("seed", 0, "Of the first prompt; the next has one more.")
MEMORY = flags.DEFINE_enum("memory", "auto", generation.KINDS, "Kind of memory.")
LENGTH = flags.DEFINE_integer("length", None, "Tokens that the memory holds.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"what is {argv[1]!r}? Options look like --name=value.")
    runtime.prepare()
    write = functools.partial(print, end="", flush=True)
    single = len(PROMPT.value) == 1
    stream = texts.Printer(write, PROMPT.value[0]) if single else None
    try:
        knobs = (TEMPERATURE.value, TOP_K.value, TOP_P.value, LEAST.value)
        sampling = SamplingConfig(*knobs, stop=texts.stops(STOPS.value))
        config, _, params = load_run(WORKDIR.value)
        prompts = [Bytes().encode(prompt) for prompt in PROMPT.value]
        length = max(map(len, prompts)) + NEW.value
        memory = dict(kind=MEMORY.value, length=LENGTH.value, tokens=length)
        decoder = generation.prepare(config, params, **memory)
        rows = generation.generate(
            decoder, prompts, NEW.value, sampling, seeds=SEED.value, on_chunk=stream
        )
    except (ValueError, OSError, FloatingPointError) as error:
        raise SystemExit(f"error: {error}") from error
    if stream:
        stream.close()
    for prompt, row in () if stream else zip(PROMPT.value, rows, strict=True):
        write(f"--- {len(row.tokens)} tokens\n{prompt}{texts.text_of(row.tokens)}\n")


if __name__ == "__main__":
    app.run(main)
