"""Hugging Face's TransfoXL: the folder beside a case, scored segment by segment."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from relpos_jax import where
from relpos_jax.interop import transfo_xl
from relpos_jax.interop.parity.cases import Case, covers
from relpos_jax.interop.parity.common import probabilities
from relpos_jax.interop.parity.transformer_xl_model import by_cluster
from relpos_jax.models.basics import as_arrays
from relpos_jax.positional import merge


@covers("txl", arrays=("in.input_ids.s*",), config=("checkpoint_folder",))
def checkpoint(case: Case):
    folder = case.folder / case.config["checkpoint_folder"]
    config, graphdef, params = transfo_xl.load(folder)

    @jax.jit
    def segment(params, tokens, targets, at, memory):
        model = nnx.merge(graphdef, params)
        logits, after = model(tokens, at, memory)
        states, _ = model.hidden(tokens, at, memory)
        losses, _ = model.losses(tokens, targets, at, memory)
        # With labels the source shifts inside the segment: its last token has none.
        shifted = jnp.roll(tokens, -1, axis=1)
        within, _ = model.losses(tokens, shifted, at, memory)
        weights = attention_weights(model, tokens, at, memory)
        return logits, states, losses, within[:, :-1], weights, after

    memory, seen = nnx.merge(graphdef, params).init_memory(case.config["batch"]), 0
    for number in range(case.config["segments"]):
        tokens = case[f"in.input_ids.s{number}"]
        targets = case[f"in.next_ids.s{number}"]
        at = where.contiguous(*tokens.shape, start=seen)
        seen += tokens.shape[1]
        found = segment(params, tokens, targets, at, memory)
        logits, states, losses, within, weights, memory = found
        within = by_cluster(within, tokens[:, 1:], config)
        ours = {
            "log_probs": logits,
            "nll": losses,
            "losses_labels_eq_input": within,
            "loss_labels_eq_input": within[within != 0].mean(),
            "last_hidden": states,
            "attention_l0": weights,
        }
        for name, value in ours.items():
            name = f"out.{name}.s{number}"
            yield name, value, case[name]
        for name in case.names(f"out.mems.s{number}.l*"):
            kept = memory.hidden[int(name.rpartition(".l")[2])]
            yield name, np.swapaxes(kept, 0, 1), case[name]


def attention_weights(model, tokens, at, memory):
    """Returns the first layer's attention weights `[b h q k]`, memory's keys first."""
    config, attention = model.config, model.layers[0].attention
    # What the first layer looks at: the embeddings, which a whole memory would keep.
    whole = model.init_memory(tokens.shape[0], tokens.shape[1])
    _, whole = model.hidden(tokens, at, whole)
    states = jnp.concatenate([memory.hidden[0], whole.hidden[0]], axis=1)
    if config.norm == "pre":
        states = model.layers[0].attention_norm(states)
    params = merge(as_arrays(attention.position), as_arrays(model.position))
    q = attention.query(states[:, memory.length :])
    k_at = where.concatenate(memory.at, at)
    return probabilities(
        attention.encoding, params, q, attention.key(states), at, k_at, config.masks[0]
    )
