"""Ring attention against the oracle, on simulated devices; a process of its own.

    python -m tests.attention.ring_on_devices [ENCODING ...]

Every encoding under every mask, or those named under one mask each. Prints the largest
difference of values and gradients, by `|x - y| / (1 + |y|)`, and fails where one is
above 3e-5.
"""

import itertools
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp

from relpos_jax import where
from relpos_jax.masks import Bidirectional, Causal, Window
from relpos_jax.relative import Layout
from relpos_jax.training.mesh import MeshConfig
from relpos_jax.where import Where
from tests import conformance as suite

QUERIES, MEMORY = 13, 7
MASKS = (Causal(), Window(3), Bidirectional())
LAYOUTS = (Layout(MEMORY), None)


def difference(name: str, mask, layout, mesh) -> float:
    """Returns the largest difference between ring and oracle.

    Row 0 packs three documents behind memory, row 1 has empty slots in its memory, and
    neither queries nor keys are a multiple of the ring.
    """
    encoding = suite.encoding_of(name)
    inputs = suite.inputs_of(encoding, QUERIES, QUERIES + MEMORY)
    _, k_at = suite.memory_rows(2, MEMORY, QUERIES)
    packed = where.packed((9, 4, 5), QUERIES + MEMORY)
    k_at = Where(*(x.at[0].set(y[0]) for x, y in zip(k_at, packed, strict=True)))
    q_at = suite.cut(k_at, MEMORY, QUERIES + MEMORY)

    def run(**options):
        options = tuple(options.items())
        found = suite.output_and_gradients(encoding, inputs, q_at, k_at, options)
        return jax.tree.leaves(jax.device_get(found))

    wanted = run(mask=mask, implementation="pairs")
    with jax.set_mesh(mesh):
        ring = dict(implementation="ring", layout=layout, blocks=(4, 4))
        found = run(mask=mask, **ring)
    pairs = zip(found, wanted, strict=True)
    return max(float(jnp.max(jnp.abs(x - y) / (1 + jnp.abs(y)))) for x, y in pairs)


def main(names: list[str]) -> int:
    """Prints the differences; returns how many are too large."""
    jax.config.update("jax_disable_most_optimizations", True)
    mesh = MeshConfig(data=2, sequence=4).make()
    wrong = 0
    cases = list(itertools.product(suite.NAMES, MASKS, LAYOUTS))
    if names:
        cases = [(name, MASKS[i % 2], LAYOUTS[i % 2]) for i, name in enumerate(names)]
    for name, mask, layout in cases:
        if mask == Bidirectional() and suite.encoding_of(name).causal_only:
            continue
        found = difference(name, mask, layout, mesh)
        good = found < 3e-5  # false for NaN too
        wrong += not good
        print(f"{name}, {mask}, {layout}: {found:.1e}{'' if good else ' WRONG'}")
        sys.stdout.flush()
    return wrong


if __name__ == "__main__":
    raise SystemExit(bool(main(sys.argv[1:])))
