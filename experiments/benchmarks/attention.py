"""Times one attention sub-layer, forward and backward, here and in other libraries.

    python -m experiments.benchmarks.attention --encodings=alibi --lengths=8192

`--peers=` without a value times this project's paths alone. Batch 1, causal.
"""

from absl import app, flags

from experiments.benchmarks import rounds

# Who has which encoding.
PEERS = {
    "none": ("sdpa:none", "xt:none+fused", "naive:none"),
    "rope": ("sdpa:rope", "xt:rope+fused", "naive:rope"),
    "alibi": ("sdpa:alibi", "xt:alibi+fused", "naive:alibi"),
    "t5": ("sdpa:t5", "xt:t5+fused", "hf:t5", "naive:t5"),
    "shaw": ("official:shaw", "naive:shaw"),
    "transformer_xl": ("official:transformer_xl", "hf:transformer_xl")
    + ("naive:transformer_xl",),
    "deberta": ("hf:deberta", "naive:deberta"),
}
ENCODINGS = flags.DEFINE_list("encodings", list(PEERS), "Registered encodings.")
LENGTHS = flags.DEFINE_list("lengths", ["4096", "8192"], "Queries and keys.")
ONLY = flags.DEFINE_list("peers", None, "Modules of the peers to time; default all.")
PATHS = flags.DEFINE_list(
    "paths", ["auto", "fused"], "Ours: auto, blockwise, dense, fused, pairs."
)
SIZES = {
    "heads": flags.DEFINE_integer("heads", 4, "Heads."),
    "head_dim": flags.DEFINE_integer("head_dim", 64, "Features a head."),
    "dtype": flags.DEFINE_string("dtype", "float32", "Of queries, keys and values."),
}
OFFICIAL = flags.DEFINE_string("official", None, "A clone of the authors' code.")


def measure(name: str, length: int) -> dict:
    """Returns the rows of one encoding and length."""
    ours = [f"ours:{name}" + f"+{path}" * (path != "auto") for path in PATHS.value]
    wanted = PEERS.get(name, ())
    if ONLY.value is not None:
        wanted = [peer for peer in wanted if peer.partition(":")[0] in ONLY.value]
    arguments = {"length": length} | {k: flag.value for k, flag in SIZES.items()}
    others = {"official": {"official": OFFICIAL.value}}
    rows, left_out = rounds.compare(
        "attention", [*ours, *wanted], arguments, others=others
    )
    return {"name": name, **arguments, "rows": rows, "left_out": left_out}


def main(_):
    pairs = [(name, int(n)) for n in LENGTHS.value for name in ENCODINGS.value]
    rounds.write("attention", [measure(*pair) for pair in pairs])


if __name__ == "__main__":
    app.run(main)
