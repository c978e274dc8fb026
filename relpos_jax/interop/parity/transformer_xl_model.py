"""Transformer-XL as a whole (the authors' PyTorch code), plain softmax.

Losses, states, memories and gradients segment by segment, through `TransformerXL`.
"""

import re

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from relpos_jax import where
from relpos_jax.interop.parity.cases import Case, covers
from relpos_jax.models import ModelConfig, TransformerXL
from relpos_jax.positional.transformer_xl import TransformerXLRelative


def settings(config: dict) -> ModelConfig:
    """Returns our configuration for the source's.

    Its `same_length` lets every query see `mem_len` keys, itself among them: a window.
    """
    memory = config["mem_len"]
    if config.get("reset_length"):
        # Evaluation: (target length, extended length, memory length) changed at once.
        memory = config["reset_length"][2]
    clamp = config["clamp_len"]
    return ModelConfig(
        vocabulary=config["n_token"],
        layers=config["n_layer"],
        width=config["d_model"],
        heads=config["n_head"],
        head_dim=config["d_head"],
        feedforward=config["d_inner"],
        position=TransformerXLRelative(clamp=clamp if clamp > 0 else None),
        norm="pre" if config["pre_lnorm"] else "post",
        final_norm=False,
        activation="relu",
        tie_embeddings=config["tie_weight"],
        output_bias=True,
        memory_length=memory,
        window=memory if config["same_length"] else None,
    )


def tree(weights: dict[str, jax.Array], config: ModelConfig) -> dict:
    """Returns the source's weights as the parameters of our model, differentiably."""
    heads, head_dim, width = config.heads, config.head_dim, config.width

    def norm(name):
        return {"scale": weights[f"{name}.weight"], "bias": weights[f"{name}.bias"]}

    def linear(name):
        return {"kernel": weights[f"{name}.weight"].T, "bias": weights[f"{name}.bias"]}

    def layer(name):
        attention, inner = f"{name}.dec_attn", f"{name}.pos_ff.CoreNet"
        # Rows of qkv_net: all queries, all keys, all values.
        fused = weights[f"{attention}.qkv_net.weight"].T
        fused = fused.reshape(width, 3, heads, head_dim)
        output = weights[f"{attention}.o_net.weight"].T
        r_net = weights[f"{attention}.r_net.weight"].T
        return {
            "attention": {
                "query": {"kernel": fused[:, 0]},
                "key": {"kernel": fused[:, 1]},
                "value": {"kernel": fused[:, 2]},
                "output": {"kernel": output.reshape(heads, head_dim, width)},
                "position": {"projection": r_net.reshape(width, heads, head_dim)},
            },
            "attention_norm": norm(f"{attention}.layer_norm"),
            "feedforward": {
                "inner": linear(f"{inner}.0"),
                "outer": linear(f"{inner}.3"),
            },
            "feedforward_norm": norm(f"{name}.pos_ff.layer_norm"),
        }

    made = {
        "embedding": weights["word_emb.emb_layers.0.weight"],
        "layers": {i: layer(f"layers.{i}") for i in range(config.layers)},
        "position": {
            "content_bias": weights["r_w_bias"],
            "position_bias": weights["r_r_bias"],
        },
        "output_bias": weights["crit.out_layers.0.bias"],
    }
    if not config.tie_embeddings:
        made["output"] = weights["crit.out_layers.0.weight"]
    return made


def plain_softmax(case: Case) -> bool:
    """Returns whether there is one embedding of the model's width and one softmax."""
    config = case.config
    same_width = config.get("d_embed") in (None, config.get("d_model"))
    return not config.get("cutoffs") and same_width and not config.get("ext_len")


@covers(
    "txl",
    arrays=("in.data.s*", "out.nll.s*", "w.layers.*.dec_attn.qkv_net.weight"),
    config=("mem_len", "pre_lnorm", "same_length", "clamp_len"),
    when=plain_softmax,
)
def language_model(case: Case):
    config = settings(case.config)
    abstract = nnx.eval_shape(lambda: TransformerXL(config, key=jax.random.key(0)))
    graphdef, state = nnx.split(abstract)

    def model(weights):
        nnx.replace_by_pure_dict(state, tree(weights, config))
        return nnx.merge(graphdef, state)

    @jax.jit
    def segment(weights, tokens, targets, at, memory):
        def loss(weights):
            states, after = model(weights).hidden(tokens, at, memory)
            logits = model(weights).logits(states)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
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
