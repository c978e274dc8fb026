"""A study that nobody ran, with curves as the literature has them."""

import numpy as np

from relpos_jax.evaluation.config import PROTOCOLS
from relpos_jax.evaluation.perplexity import Score
from relpos_jax.evaluation.results import ModelResult, Study

LENGTHS = (64, 80, 96, 128, 256, 512, 1024, 2048)
# Bits per byte at 64 L, and its rise with each doubling past the training length.
CURVES = {
    "none": (2.62, 0.25),
    "sinusoidal": (2.55, 0.9),
    "learned": (2.55, 0.7),
    "rope": (2.36, 0.4),
    "alibi": (2.38, -0.01),
    "t5": (2.35, 0.08),
    "shaw": (2.37, 0.02),
    "transformer_xl": (2.34, 0.0),
}


def score(protocol, length, start, rise, seed):
    tokens = 256 if protocol == "same_targets" else 8192
    bits = start + rise * np.log2(length / 64) ** 1.3 + 0.01 * seed
    each = np.full(length, tokens // length + 1)
    place = np.arange(1, length + 1)
    curve = 3 / place + start + np.maximum(0, rise * np.log2(place / 64))
    return Score(
        protocol, length, bits * np.log(2) * tokens, tokens, curve * 0.69 * each, each
    )


def study(seeds=(0,), encodings=tuple(CURVES), protocols=PROTOCOLS, lengths=LENGTHS):
    results = []
    for encoding in encodings:
        for seed in seeds:
            absolute = encoding in ("sinusoidal", "learned")
            results.append(
                ModelResult(
                    encoding=encoding,
                    seed=seed,
                    train_length=64,
                    step=350,
                    parameters=812345,
                    past_training=f"What {encoding} does <past> | it.",
                    scores=tuple(
                        score(protocol, length, *CURVES[encoding], seed)
                        for protocol in protocols
                        if not (protocol == "memory" and absolute)
                        for length in lengths
                    ),
                    skipped={"memory": "absolute positions"} if absolute else {},
                )
            )
    config = {
        "model": {
            "layers": 4,
            "width": 128,
            "heads": 4,
            "head_dim": 32,
            "feedforward": 512,
            "dropout": 0.0,
            "memory_length": 0,
        },
        "training": {
            "steps": 350,
            "batch": 32,
            "length": 64,
            "learning_rate": 0.002,
            "warmup": 35,
            "weight_decay": 0.1,
            "clip": 1.0,
        },
        "study": {
            "encodings": list(encodings),
            "seeds": list(seeds),
            "positions": {name: {"name": name, "knob": 7} for name in encodings},
        },
        "evaluation": {
            "group_fraction": 2,
            "stride_fraction": 4,
            "tokens_per_batch": 8192,
        },
        "corpus": {
            "name": "made-up",
            "description": "no text at all",
            "size": 1000000,
            "train_bytes": 900000,
            "held_out_bytes": 100000,
            "sha256": "ab" * 32,
        },
    }
    facts = {
        "command": "python -m experiments.extrapolate --workdir=out",
        "python": "3.x",
        "jax": "0.x",
        "jaxlib": "0.x",
        "flax": "0.x",
        "optax": "0.x",
        "system": "Abacus",
        "cores": 2,
        "processor": "beads",
        "device": "1 x cpu (wood)",
        "commit": "unknown",
        "models": {
            f"{encodings[0]}-seed0": {
                "train_seconds": 41.3,
                "evaluate_seconds": 9.8,
                "resumed": True,
            }
        },
    }
    return Study(config, tuple(results), facts)
