"""GPT-2 and LLaMA: whole models, scored as perplexities are measured (transformers)."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from relpos_jax import where
from relpos_jax.evaluation import windows
from relpos_jax.interop.parity.cases import Case, covers
from relpos_jax.models import ModelConfig, TransformerXL
from relpos_jax.positional.learned import Learned
from relpos_jax.positional.rope import Rope


def gpt2(case: Case) -> tuple[ModelConfig, dict]:
    """Returns our configuration and parameters of a GPT-2."""
    c = case.config
    width, heads = c["n_embd"], c["n_head"]
    config = ModelConfig(
        vocabulary=c["vocab_size"],
        layers=c["n_layer"],
        width=width,
        heads=heads,
        head_dim=width // heads,
        feedforward=c["n_inner"],
        position=Learned(rows=c["n_positions"]),
        attention_bias=True,
        tie_embeddings=False,
        norm_epsilon=c["layer_norm_epsilon"],
    )

    def norm(name):
        return {"scale": case[f"{name}.weight"], "bias": case[f"{name}.bias"]}

    def layer(i):
        name = f"w.transformer.h.{i}"
        fused = case[f"{name}.attn.c_attn.weight"].reshape(width, 3, heads, -1)
        biases = case[f"{name}.attn.c_attn.bias"].reshape(3, heads, -1)
        attention = {
            part: {"kernel": fused[:, j], "bias": biases[j]}
            for j, part in enumerate(("query", "key", "value"))
        }
        attention["output"] = {
            "kernel": case[f"{name}.attn.c_proj.weight"].reshape(heads, -1, width),
            "bias": case[f"{name}.attn.c_proj.bias"],
        }
        feedforward = {
            ours: {
                "kernel": case[f"{name}.mlp.{theirs}.weight"],
                "bias": case[f"{name}.mlp.{theirs}.bias"],
            }
            for ours, theirs in (("inner", "c_fc"), ("outer", "c_proj"))
        }
        return {
            "attention": attention,
            "attention_norm": norm(f"{name}.ln_1"),
            "feedforward": feedforward,
            "feedforward_norm": norm(f"{name}.ln_2"),
        }

    params = {
        "embedding": case["w.transformer.wte.weight"],
        "position": {"table": case["w.transformer.wpe.weight"]},
        "layers": {i: layer(i) for i in range(config.layers)},
        "norm": norm("w.transformer.ln_f"),
        "output": case["w.lm_head.weight"],
    }
    return config, params


def llama(case: Case) -> tuple[ModelConfig, dict]:
    """Returns our configuration and parameters of a LLaMA.

    Query heads that share a key head get a copy of it each.
    """
    c = case.config
    width, heads = c["hidden_size"], c["num_attention_heads"]
    copies = heads // c["num_key_value_heads"]
    config = ModelConfig(
        vocabulary=c["vocab_size"],
        layers=c["num_hidden_layers"],
        width=width,
        heads=heads,
        head_dim=width // heads,
        feedforward=c["intermediate_size"],
        position=Rope(base=c["rope_theta"]),
        norm_kind="rms",
        activation="swiglu",
        feedforward_bias=False,
        tie_embeddings=False,
        norm_epsilon=c["rms_norm_eps"],
    )

    def project(name, times=1):
        kernel = case[f"{name}.weight"].T.reshape(width, heads // times, -1)
        return {"kernel": jnp.repeat(kernel, times, axis=1)}

    def layer(i):
        name = f"w.model.layers.{i}"
        attention = {
            "query": project(f"{name}.self_attn.q_proj"),
            "key": project(f"{name}.self_attn.k_proj", copies),
            "value": project(f"{name}.self_attn.v_proj", copies),
        }
        out = case[f"{name}.self_attn.o_proj.weight"].T
        attention["output"] = {"kernel": out.reshape(heads, -1, width)}
        parts = {"gate": "gate_proj", "inner": "up_proj", "outer": "down_proj"}
        feedforward = {
            ours: {"kernel": case[f"{name}.mlp.{theirs}.weight"].T}
            for ours, theirs in parts.items()
        }
        norms = ("input_layernorm", "post_attention_layernorm")
        first, second = ({"scale": case[f"{name}.{n}.weight"]} for n in norms)
        return {
            "attention": attention,
            "attention_norm": first,
            "feedforward": feedforward,
            "feedforward_norm": second,
        }

    params = {
        "embedding": case["w.model.embed_tokens.weight"],
        "layers": {i: layer(i) for i in range(config.layers)},
        "norm": {"scale": case["w.model.norm.weight"]},
        "output": case["w.lm_head.weight"],
    }
    return config, params


def plan(protocol: str, size: int, window: int) -> windows.Plan:
    """Returns which targets a protocol of the source scores, in which windows.

    Where it predicts within a window of `window` tokens, the last is read by nobody:
    ours has one token less.
    """
    if protocol == "disjoint_next":
        return windows.non_overlapping(size, window)
    if protocol == "disjoint_hf":
        start = np.arange(0, size, window)
        stop = np.minimum(window - 1, size - 1 - start)
        return windows.Plan(window - 1, start, np.zeros_like(start), stop)
    stride = int(protocol.removeprefix("sliding_s"))
    return windows.sliding(size, window - 1, stride)


@covers("ppl", arrays=("in.bytes", "out.nll_*", "out.first_window_logits"))
def perplexities(case: Case):
    convert = gpt2 if "w.transformer.wte.weight" in case else llama
    config, params = convert(case)
    # The sources do not scale embeddings by the root of the width.
    params["embedding"] = params["embedding"] / config.width**0.5
    made = nnx.eval_shape(lambda: TransformerXL(config, key=jax.random.key(0)))
    graphdef, state = nnx.split(made)
    nnx.replace_by_pure_dict(state, params)

    @jax.jit
    def logits(tokens, segment):
        model = nnx.merge(graphdef, state)
        at = where.contiguous(*tokens.shape)._replace(segment=segment)
        return model(tokens, at, model.init_memory(len(tokens)))[0]

    @jax.jit
    def losses(block):
        found = jax.nn.log_softmax(logits(block.inputs, block.segment))
        return -jnp.take_along_axis(found, block.targets[..., None], axis=-1)[..., 0]

    text = case.arrays["in.bytes"]
    first = jnp.asarray(text[:16])[None]
    ours = logits(first, jnp.ones_like(first))[0]
    near = case.tolerance("token")
    yield "out.first_window_logits", ours, case["out.first_window_logits"], near
    for name in case.names("out.nll_*"):
        protocol = name.removeprefix("out.nll_")
        chosen = plan(protocol, len(text), case.config["window"])
        block = windows.fill(text, chosen, slice(None), len(chosen.start))
        found = np.asarray(losses(block), np.float64)
        nll = np.full(len(text), np.nan)
        target = chosen.start[:, None] + np.arange(chosen.length) + 1
        nll[target[block.weights]] = found[block.weights]
        expected = case.arrays[name]
        # The same targets are scored; those that are not are NaN in both.
        scored = np.isfinite(expected)
        yield name, np.isfinite(nll), scored, 0.0
        yield name, nll[scored], expected[scored], near
        stated = case.meta.get("aggregates", {}).get(protocol)
        if stated:
            mean = found[block.weights].mean()
            yield name, mean, stated["mean_nll"], case.tolerance("mean")
            yield name, chosen.tokens, stated["scored_tokens"], 0.0
