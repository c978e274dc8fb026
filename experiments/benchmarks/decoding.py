"""Times decoding: tokens a second by context, and cached against computed again.

    python -m experiments.benchmarks.decoding --encodings=transformer_xl,rope

A ring or memory must make a long context cost as much as a short one, and a cache must
beat a whole pass a token (a vanilla model: Dai et al. 2019, section 4.5).
"""

import json

from absl import app, flags

from experiments.benchmarks import decoder

NAMES = flags.DEFINE_list("encodings", ["transformer_xl", "rope"], "Registered ones.")
KINDS = flags.DEFINE_list("kinds", ["ring", "segment"], "Memories to time by context.")
WINDOW = flags.DEFINE_integer("window", 512, "Tokens that such a memory holds.")
SHORT = flags.DEFINE_integer("short", 512, "Tokens before those that are timed.")
LONG = flags.DEFINE_integer("long", 4096, "The same, of the long context.")
AGAIN = flags.DEFINE_integer("again", 1024, "Length of the pass computed again.")
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of a table.")


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
    rows = [row for name in NAMES.value for row in measure(name)]
    if JSON.value:
        return print(json.dumps(rows))
    print(f"| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
    for row in rows:
        cells = (f"{x:.2f}" if type(x) is float else x for x in row.values())
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    app.run(main)
