"""FIRE (mcleish7/arithmetic)."""

import jax.numpy as jnp

from relpos_jax import where
from relpos_jax.interop.parity.cases import Case, covers
from relpos_jax.masks import distances
from relpos_jax.positional.fire import Fire


@covers(arrays=("w.mlp.0.weight", "w.c", "w.init_L", "w.L_multiplier", "out.bias"))
def bias(case: Case):
    fire = Fire(
        hidden=len(case.arrays["w.mlp.0.bias"]), threshold=float(case["w.init_L"])
    )
    params = {
        "c": case["w.c"].reshape(()),
        "multiplier": case["w.L_multiplier"].reshape(()),
        "mlp": {
            "inner": case["w.mlp.0.weight"][:, 0],
            "inner_bias": case["w.mlp.0.bias"],
            "outer": case["w.mlp.2.weight"].T,
            "outer_bias": case["w.mlp.2.bias"],
        },
    }
    at = where.contiguous(1, case.arrays["out.bias"].shape[1])
    ours = fire.bias(params, distances(at, at), jnp.asarray(at.position))[0]
    yield "out.bias", ours, case["out.bias"]
    if "aux.bias_float64" in case:
        yield "aux.bias_float64", ours, case["aux.bias_float64"]
