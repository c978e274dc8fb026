"""Times decoding: tokens a second by context, and cached against computed again.

    python -m experiments.benchmarks.decoding --encodings=transformer_xl,rope

A ring or memory must make a long context cost as much as a short one, and a cache must
beat a whole pass a token (a vanilla model: Dai et al. 2019, section 4.5).
"""

from absl import app, flags

from experiments.benchmarks import decoder, rounds
from experiments.benchmarks.peers import naive_decoding
from relpos_jax.training import runtime

NAMES = flags.DEFINE_list("encodings", ["transformer_xl", "rope"], "Registered ones.")
CONTEXTS = flags.DEFINE_list("contexts", ["1024", "4096"], "Against a naive cache.")
KINDS = flags.DEFINE_list("kinds", ["ring", "segment"], "Memories to time by context.")
WINDOW = flags.DEFINE_integer("window", 512, "Tokens that such a memory holds.")
SHORT = flags.DEFINE_integer("short", 512, "Tokens before those that are timed.")
LONG = flags.DEFINE_integer("long", 4096, "The same, of the long context.")
AGAIN = flags.DEFINE_integer("again", 1024, "Length of the pass computed again.")


def measure(name: str):
    """Yields rows of one encoding: two ways to add a token, and their speeds' ratio."""
    config, graphdef, params = decoder.model(name)
    for kind in KINDS.value:
        pair = {
            f"{kind} of {WINDOW.value} at {context}": decoder.cached(
                config, params, kind, WINDOW.value, context
            )
            for context in (LONG.value, SHORT.value)
        }
        yield row(name, pair)
    for context in map(int, CONTEXTS.value):
        if name in naive_decoding.ENCODINGS:
            slots = context + decoder.TOKENS.value
            pair = {
                f"cache at {context}": decoder.cached(
                    config, params, "cache", slots, context
                ),
                f"naive JAX cache at {context}": decoder.naive(name, context),
            }
            yield row(name, pair)
    end, slots = AGAIN.value - decoder.TOKENS.value, AGAIN.value
    pair = {
        f"cache at {end}": decoder.cached(config, params, "cache", slots, end),
        f"pass of {slots}": decoder.again(config, graphdef, params, slots),
    }
    yield row(name, pair)


def row(name: str, pair: dict) -> dict:
    (one, fast), (other, slow) = decoder.seconds(pair).items()
    speeds = {"tokens/s": 1 / fast, "against tokens/s": 1 / slow, "ratio": slow / fast}
    return {"encoding": name, "what": one, "against": other} | speeds


def main(_):
    runtime.prepare(compilation_cache=False)
    rows = [row for name in NAMES.value for row in measure(name)]
    rounds.write("decoding", [{"rows": rows, "left_out": {}}])


if __name__ == "__main__":
    app.run(main)
