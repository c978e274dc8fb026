"""This project, as a peer of the others: the compiled call that training uses."""

import jax
import jax.numpy as jnp
from absl import flags
from flax import nnx

from experiments.benchmarks import sublayer
from experiments.benchmarks.peers import Missing, Peer
from experiments.benchmarks.workloads import ADAM, LEARNING_RATE, Workload
from relpos_jax import data, positional
from relpos_jax.attention import fused
from relpos_jax.masks import Causal
from relpos_jax.models import ModelConfig, TransformerXL
from relpos_jax.relative import Layout
from relpos_jax.training import runtime
from relpos_jax.training.config import TrainingConfig
from relpos_jax.training.state import initial
from relpos_jax.training.step import make_train_call

# Updates in one compiled call; a run of more makes several.
CALL = 4


def training(variant: str, workload: dict) -> Peer:
    """Returns updates of the model with the encoding `variant`.

    "+accumulate=2" behind it cuts each batch into two micro-batches.
    """
    runtime.prepare(compilation_cache=False)
    variant, _, pieces = variant.partition("+accumulate=")
    sizes = Workload(**workload)
    config = ModelConfig(
        vocabulary=sizes.vocabulary,
        layers=sizes.layers,
        width=sizes.width,
        heads=sizes.heads,
        head_dim=sizes.width // sizes.heads,
        feedforward=sizes.feedforward,
        position=positional.make(variant),
        # What the peers of each encoding have.
        activation="relu" if variant == "transformer_xl" else "gelu",
        memory_length=sizes.memory,
        dtype=sizes.dtype,
    )
    settings = TrainingConfig(
        steps=10**6,
        batch=sizes.batch,
        length=sizes.length,
        learning_rate=LEARNING_RATE,
        warmup=0,
        final_learning_rate_fraction=1.0,
        weight_decay=0.0,
        b1=ADAM["b1"],
        b2=ADAM["b2"],
        epsilon=ADAM["eps"],
        clip=None,
        accumulate=int(pieces or 1),
        steps_per_call=CALL,
    )
    model = TransformerXL(config, key=jax.random.key(0))
    memory = model.init_memory(sizes.batch)
    graphdef, params = nnx.split(model)
    params = nnx.as_pure(params)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    state = initial(params, settings, memory)
    call = make_train_call(graphdef, settings)
    text = sizes.bytes(CALL + 1).reshape(-1)
    batches = data.Lanes(text, sizes.batch, sizes.length).stack(0, CALL)

    def run(count):
        nonlocal state, batches
        while count:
            now = min(count, CALL)
            state, report = call(state, batches, now, None)
            # The same bytes again, behind those that the memory holds.
            at = batches.at
            later = at._replace(position=at.position + now * sizes.length)
            batches = batches._replace(at=later)
            count -= now
        jax.block_until_ready((state, report))
        if not bool(jnp.isfinite(report.loss).all()):
            raise FloatingPointError("the loss of a timed step isn't finite")

    return Peer(run, parameters)


def attention(variant: str, length: int, heads: int, head_dim: int, dtype: str) -> Peer:
    """Returns a forward and a backward pass with the encoding `variant`.

    A path may stand behind it: "alibi+dense".

    Raises:
      Missing: "fused" where the platform or the encoding has no such kernel.
    """
    runtime.prepare(compilation_cache=False)
    sizes = (f"--heads={heads}", f"--head_dim={head_dim}", f"--dtype={dtype}")
    flags.FLAGS(["worker", *sizes])
    name, _, path = variant.partition("+")
    if path == "fused":
        encoding, mask = positional.make(name), Causal()
        reason = fused.why_not(encoding, mask, Layout(), length, length, None)
        if reason is None and fused.kernel(mask, head_dim, jnp.dtype(dtype)) == "xla":
            reason = f"none on this platform in {dtype} with heads of {head_dim}"
        if reason is not None:
            raise Missing(f"no fused kernel: {reason}")
    inputs = sublayer.inputs(name, length)
    function = sublayer.gradient(name, length, path or "auto")
    step = jax.jit(function).lower(*inputs).compile()

    def run(count):
        for _ in range(count):
            jax.block_until_ready(step(*inputs))

    return Peer(run, temporaries=step.memory_analysis().temp_size_in_bytes)
