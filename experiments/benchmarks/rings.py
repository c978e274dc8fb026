"""What a device holds in ring attention, from the compiled program."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from relpos_jax import positional
from relpos_jax.attention import attend
from relpos_jax.attention.ring import SEQUENCE
from relpos_jax.positional import Dims, merge
from relpos_jax.relative import Layout
from relpos_jax.where import Where


class Cost(NamedTuple):
    """Bytes of one device."""

    temporaries: int
    arguments: int


def cost(name: str, size: int, length: int, memory: int) -> Cost:
    """Returns the cost of values and gradients with the sequence over `size` devices.

    Args:
      name: the encoding's.
      size: devices in the ring.
      length: queries.
      memory: keys before them.
    """
    encoding, dims = positional.make(name), Dims(heads=4, head_dim=64, width=256)
    mesh = Mesh(np.array(jax.devices()[:size]), (SEQUENCE,), (AxisType.Auto,))
    cut = jax.NamedSharding(mesh, jax.P(None, SEQUENCE))
    whole = jax.NamedSharding(mesh, jax.P())

    def parameters(key):
        return merge(encoding.init(key, dims), encoding.init_shared(key, dims))

    def loss(params, q, k, v, q_at, k_at):
        options = dict(layout=Layout(memory), implementation="blockwise")
        if size > 1:
            options["implementation"] = "ring"
        return jnp.sum(attend(encoding, params, q, k, v, q_at, k_at, **options) ** 2)

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=cut)

    def places(count):
        return Where(array(1, count, dtype=jnp.int32), array(1, count, dtype=jnp.int32))

    keys = length + memory
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
        jax.eval_shape(parameters, jax.random.key(0)),
    )
    heads = dims.heads, dims.head_dim
    with jax.set_mesh(mesh):
        gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))
        compiled = gradients.lower(
            params,
            array(1, length, *heads),
            array(1, keys, *heads),
            array(1, keys, *heads),
            places(length),
            places(keys),
        ).compile()
    found = compiled.memory_analysis()
    return Cost(found.temp_size_in_bytes, found.argument_size_in_bytes)
