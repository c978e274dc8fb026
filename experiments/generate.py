r"""Continues prompts with a trained model, and prints the text as it comes.

    python -m experiments.generate --workdir=runs/quick --prompt="def main(" \
        --max_new_tokens=200 --temperature=0.8 --top_k=40 --stop="\n\n"

`--prompt` and `--stop` may be given several times; in stops, `\n` is an escape. Of
several prompts, all are printed at the end.
"""

from absl import app, flags

from relpos_jax.data import tokens
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
KIND = flags.DEFINE_string("vocabulary", None, "For a run that has none.")
LENGTH = flags.DEFINE_integer("length", None, "Tokens that the memory holds.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"what is {argv[1]!r}? Options look like --name=value.")
    runtime.prepare()
    try:
        config, _, params = load_run(WORKDIR.value)
        vocabulary = tokens.of_run(WORKDIR.value, config.vocabulary, KIND.value)
        printer = texts.Printer(texts.terminal, PROMPT.value[0], vocabulary)
        stream = printer if len(PROMPT.value) == 1 else None
        knobs = (TEMPERATURE.value, TOP_K.value, TOP_P.value, LEAST.value)
        sampling = SamplingConfig(*knobs, texts.stops(STOPS.value, vocabulary))
        prompts = [vocabulary.encode(prompt) for prompt in PROMPT.value]
        room = max(map(len, prompts)) + NEW.value
        memory = dict(kind=MEMORY.value, length=LENGTH.value, tokens=room)
        decoder = generation.prepare(config, params, **memory)
        options = dict(seeds=SEED.value, on_chunk=stream)
        rows = generation.generate(decoder, prompts, NEW.value, sampling, **options)
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        raise SystemExit(f"error: {error}") from error
    if stream:
        stream.close()
    for prompt, ids, row in () if stream else zip(PROMPT.value, prompts, rows):
        text = texts.continued(prompt, ids, row.tokens, vocabulary)
        texts.terminal(f"--- {len(row.tokens)} tokens\n{text}\n")


if __name__ == "__main__":
    app.run(main)
