"""Transformer-XL as a whole (the authors' PyTorch code), plain and adaptive softmax.

Losses, states, memories and gradients segment by segment, through `TransformerXL`.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from relpos_jax import where
from relpos_jax.interop import names as named
from relpos_jax.interop import official_transformer_xl
from relpos_jax.interop.parity.cases import Case, covers
from relpos_jax.models import ModelConfig, TransformerXL


def settings(config: dict) -> ModelConfig:
    """Returns our configuration for a case's."""
    memory = config["mem_len"]
    if config.get("reset_length"):
        # Evaluation: (target length, extended length, memory length) changed at once.
        memory = config["reset_length"][2]
    return official_transformer_xl.config_of({**config, "mem_len": memory})


def by_cluster(losses: jax.Array, targets: jax.Array, config: ModelConfig):
    """Returns losses in the order of the sources' default: cluster after cluster."""
    cutoffs = () if config.adaptive is None else config.adaptive.cutoffs
    flat = np.ravel(targets)
    order = np.argsort(np.searchsorted(cutoffs, flat, side="right"), kind="stable")
    return np.ravel(losses)[order].reshape(losses.shape)


@covers(
    "txl",
    arrays=("in.data.s*", "out.nll.s*", "w.layers.*.dec_attn.qkv_net.weight"),
    config=("mem_len", "pre_lnorm", "same_length", "clamp_len"),
    when=lambda case: not case.config.get("ext_len"),
)
def language_model(case: Case):
    config = settings(case.config)
    abstract = nnx.eval_shape(lambda: TransformerXL(config, key=jax.random.key(0)))
    graphdef, state = nnx.split(abstract)
    listed = named.entries(config)

    def model(weights):
        nnx.replace_by_pure_dict(state, named.to_tree(weights, listed))
        return nnx.merge(graphdef, state)

    @jax.jit
    def segment(weights, tokens, targets, at, memory):
        def loss(weights):
            states, _ = model(weights).hidden(tokens, at, memory)
            losses, after = model(weights).losses(tokens, targets, at, memory)
            return losses.mean(), (losses, states, after)

        grads, result = jax.grad(loss, has_aux=True)(weights)
        return grads, *result

    names = [name.removeprefix("w.") for name in case.names("w.*")]
    weights = {name: case[f"w.{name}"] for name in names}
    numbers = sorted(int(name.rpartition(".s")[2]) for name in case.names("in.data.s*"))
    grads, seen, last_states = {}, 0, []
    memory = None
    for number in numbers:
        tokens, targets = case[f"in.data.s{number}"].T, case[f"in.target.s{number}"].T
        if memory is None:
            # The source's memory starts empty and grows; ours starts with empty slots.
            memory = model_memory(config, tokens.shape[0])
        at = where.contiguous(*tokens.shape, start=seen)
        seen += tokens.shape[1]
        grads[number], losses, states, memory = segment(
            weights, tokens, targets, at, memory
        )
        last_states.append(states)
        near = case.tolerance("losses")
        yield f"out.nll.s{number}", losses.T, case[f"out.nll.s{number}"], near
        name = f"out.nll_as_returned.s{number}"
        if name in case:
            grouped = by_cluster(losses.T, targets.T, config)
            yield name, grouped, case[name], near
        name = f"out.hidden.s{number}"
        if name in case:
            yield name, jnp.swapaxes(states, 0, 1), case[name], near
        for name in case.names(f"out.mems.s{number}.l*"):
            layer = int(name.rpartition(".l")[2])
            count = min(config.memory_length, seen)
            # The source keeps the last layer's output too, which nothing looks at.
            every = jnp.concatenate(last_states, axis=1)
            kept = memory.hidden[layer] if layer < config.layers else every
            ours = jnp.swapaxes(kept[:, kept.shape[1] - count :], 0, 1)
            yield name, ours, case[name], near
    for name in case.names("grad.*"):
        stated = re.search(r"segment (\d+)", case.meaning(name))
        number = int(stated[1]) if stated else numbers[-1]
        ours = grads[number][name.removeprefix("grad.")]
        yield name, ours, case[name], case.tolerance("gradients")


def model_memory(config: ModelConfig, batch: int):
    """Returns the empty memory of a model of this configuration."""
    model = nnx.eval_shape(lambda: TransformerXL(config, key=jax.random.key(0)))
    return model.init_memory(batch)
