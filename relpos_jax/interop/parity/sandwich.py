"""Sandwich (NVIDIA NeMo), and the formula in float64 beside it."""

from relpos_jax import where
from relpos_jax.interop.parity.cases import Case, covers
from relpos_jax.interop.parity.common import bias, constants
from relpos_jax.positional.sandwich import Sandwich


@covers(source="Sandwich", arrays=("out.bias_*",), config=("dbar", "heads"))
def biases(case: Case):
    config = case.config
    at = where.contiguous(1, config["length"])
    wanted = {
        "out.bias_causal": (1, False),
        "out.bias_bidirectional": (1, True),
        "aux.float64": (1, True),
        "aux.float64_k0": (0, True),
    }
    for name, (first, symmetric) in wanted.items():
        if name in case:
            sandwich = Sandwich(dim=config["dbar"], first=first, symmetric=symmetric)
            params = constants(sandwich, config["heads"])
            yield name, bias(sandwich, params, at, at), case[name]
