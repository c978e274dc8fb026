"""The mesh axes that activations are cut over, where a mesh is in use.

Models don't know of meshes: they only say here that rows of the batch and tokens stay
where they are from layer to layer. Without that the compiler may follow the parameters,
and cut activations by width instead.
"""

import math

import jax
from jaxtyping import Array, Float

BATCH = ("data", "fsdp")
SEQUENCE = "sequence"


def mesh_sizes() -> dict[str, int]:
    """Returns the size of each axis of the mesh in use (`jax.set_mesh`), if any."""
    return dict(jax.sharding.get_abstract_mesh().shape)


def by_rows(x: Float[Array, "b t w"]) -> Float[Array, "b t w"]:
    """Returns `x`, cut by rows and tokens where the mesh in use divides both."""
    sizes = mesh_sizes()
    if not all(axis in sizes for axis in (*BATCH, SEQUENCE)):
        return x
    rows = math.prod(sizes[axis] for axis in BATCH)
    if x.shape[0] % rows or x.shape[1] % sizes[SEQUENCE]:
        return x  # a batch made for something else; what is computed is the same
    return jax.lax.with_sharding_constraint(x, jax.P(BATCH, SEQUENCE, None))


def whole_rows(table: Float[Array, "v w"]) -> Float[Array, "v w"]:
    """Returns a table to look rows up in: each row whole on a device of a mesh.

    Rows that come in parts would have to be put together for every token.
    """
    if not mesh_sizes():
        return table
    spec = jax.P(jax.P.UNCONSTRAINED, None)
    return jax.lax.with_sharding_constraint(table, spec)
