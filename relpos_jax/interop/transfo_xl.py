"""Hugging Face's TransfoXL folders: `config.json` and the weights, in both directions.

Where the port differs from the authors' code, the configuration says so: memory starts
as zero vectors that are attended, u and v are each layer's own by default, and the
head's columns are in the clusters' order.
"""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from flax import nnx
from jaxtyping import PyTree

from relpos_jax.interop import names, official_transformer_xl
from relpos_jax.models import ModelConfig

BODY = "transformer."
NEEDED = (
    "vocab_size",
    "n_layer",
    "n_head",
    "d_model",
    "d_embed",
    "d_head",
    "d_inner",
    "mem_len",
    "cutoffs",
    "div_val",
)
# What a config.json leaves out has the port's own default.
DEFAULTS = {
    "clamp_len": 1000,
    "same_length": True,
    "untie_r": True,
    "pre_lnorm": False,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "proj_share_all_but_first": True,
    "dropout": 0.1,
    "attn_type": 0,
    "sample_softmax": -1,
}


def config_of(settings: Mapping[str, Any]) -> ModelConfig:
    """Returns our configuration for a `config.json` of TransfoXL.

    Raises:
      ValueError: another model's file, a setting is missing, or one that the port
        refuses too (`attn_type` other than 0, a sampled softmax).
    """
    kind = settings.get("model_type", "transfo-xl")
    if kind != "transfo-xl":
        raise ValueError(f"model_type is {kind!r}: this reads 'transfo-xl'")
    missing = [name for name in NEEDED if name not in settings]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    settings = {**DEFAULTS, **settings}
    if settings["attn_type"] != 0 or settings["sample_softmax"] > 0:
        raise ValueError("only attn_type=0 without sample_softmax can be imported")
    cutoffs = settings["cutoffs"]
    flags = [False] + [settings["proj_share_all_but_first"]] * len(cutoffs)
    return official_transformer_xl.model_config(
        {
            **settings,
            "n_token": settings["vocab_size"],
            "tie_weight": settings.get("tie_weight", settings["tie_word_embeddings"]),
            "tie_projs": settings.get("tie_projs", flags),
        },
        untie=settings["untie_r"],
        head_order="hugging_face",
        memory_start="zeros",
        norm_epsilon=float(settings["layer_norm_epsilon"]),
    )


def settings_of(config: ModelConfig) -> dict[str, Any]:
    """Returns the `config.json` of a model.

    Raises:
      ValueError: a model that the port does not have; lists why.
    """
    names.refuse(config)
    reasons = []
    if config.memory_start != "zeros":
        reasons.append("memory_start is 'empty': the port's memory starts as zeros")
    if config.window not in (None, config.memory_length):
        reasons.append(
            f"window is {config.window}: the port has all keys, or memory_length"
        )
    if reasons:
        raise ValueError("TransfoXL has no such model:\n  " + "\n  ".join(reasons))
    xl = config.position
    return {
        "architectures": ["TransfoXLLMHeadModel"],
        "model_type": "transfo-xl",
        "vocab_size": config.vocabulary,
        "n_layer": config.layers,
        "n_head": config.heads,
        "d_model": config.width,
        "d_head": config.head_dim,
        "d_inner": config.feedforward,
        **official_transformer_xl.clusters_of(config),
        "tie_word_embeddings": config.tie_embeddings,
        "mem_len": config.memory_length,
        "clamp_len": -1 if xl.clamp is None else xl.clamp,
        "same_length": config.window is not None,
        "untie_r": xl.untie,
        "pre_lnorm": config.norm == "pre",
        "layer_norm_epsilon": config.norm_epsilon,
        "dropout": config.dropout,
        "dropatt": config.attention_dropout,
        "attn_type": 0,
        "sample_softmax": -1,
        "adaptive": True,
        "torch_dtype": "float32",
    }


def load(folder: str | os.PathLike) -> tuple[ModelConfig, nnx.GraphDef, PyTree]:
    """Returns the model of a folder with `config.json` and weights.

    The weights are `model.safetensors`, or else `pytorch_model.bin`, which needs torch;
    no pickled code is executed. Tied arrays may stand under one or all of their names
    (safetensors' holds each once).

    Returns:
      The configuration, and graph and parameters for `nnx.merge`.

    Raises:
      WrongWeights: names are missing or unknown, shapes differ, or tied arrays do;
        lists all of them.
      FileNotFoundError: a file is not there; says which.
      ValueError, ImportError: see `config_of` and `names.read`.
    """
    folder = pathlib.Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no config.json in {folder}")
    config = config_of(json.loads(path.read_text(encoding="utf-8")))
    files = [folder / name for name in ("model.safetensors", "pytorch_model.bin")]
    there = [file for file in files if file.is_file()]
    if not there:
        raise FileNotFoundError(
            f"{folder} has neither model.safetensors nor pytorch_model.bin"
        )
    weights, listed = names.read(there[0]), entries(config)
    buffers = {f"{BODY}{names.FREQUENCIES}": names.frequencies(config.width)}
    names.check(weights, listed, buffers, there[0])
    return config, *names.to_params(weights, listed, config)


def entries(config: ModelConfig) -> list[names.Entry]:
    """Returns every array of the port's state dictionary."""
    return names.entries(config, body=BODY, head_order="hugging_face")


def save(folder: str | os.PathLike, config: ModelConfig, params: PyTree) -> None:
    """Writes `config.json` and `model.safetensors`, tied arrays once, as the port does.

    Args:
      folder: is made where it does not exist.
      config: the model's.
      params: its parameters, as `nnx.split` gives them.

    Raises:
      ValueError: a model that the port does not have; lists why.
    """
    settings, folder = settings_of(config), pathlib.Path(folder)
    weights = names.from_tree(params, entries(config))
    buffers = {f"{BODY}{names.FREQUENCIES}": names.frequencies(config.width)}
    folder.mkdir(parents=True, exist_ok=True)
    names.write(folder / "model.safetensors", {**weights, **buffers})
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
