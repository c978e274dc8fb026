"""The state dictionary of the authors' PyTorch code (`MemTransformerLM`)."""

import os
from collections.abc import Mapping
from typing import Any

from flax import nnx
from jaxtyping import PyTree

from relpos_jax.interop import names
from relpos_jax.models import AdaptiveConfig, ModelConfig
from relpos_jax.models.config import same_length
from relpos_jax.positional.transformer_xl import TransformerXLRelative

NEEDED = ("n_token", "n_layer", "n_head", "d_model", "d_head", "d_inner", "mem_len")


def config_of(settings: Mapping[str, Any]) -> ModelConfig:
    """Returns our configuration for the arguments of `MemTransformerLM`.

    A state dictionary does not say them: they are in the run's `args` or its log.
    Defaults are the constructor's. Biases u and v are shared by the layers, memory
    starts empty, `same_length` gives each query `mem_len` keys, and the head has its
    clusters in reverse.

    Args:
      settings: `n_token`, `n_layer`, `n_head`, `d_model`, `d_head`, `d_inner`,
        `mem_len`, and where they differ from the defaults `d_embed`, `cutoffs`,
        `div_val`, `tie_weight`, `tie_projs`, `pre_lnorm`, `same_length`, `clamp_len`,
        `dropout`.

    Raises:
      ValueError: a setting is missing, or one that we do not have (`attn_type`,
        `ext_len`, `sample_softmax`).
    """
    missing = [name for name in NEEDED if name not in settings]
    if missing:
        raise ValueError(f"the settings of the model lack {', '.join(missing)}")
    for name, usual in (("attn_type", 0), ("ext_len", 0), ("sample_softmax", -1)):
        if settings.get(name, usual) not in (usual, None):
            raise ValueError(
                f"{name} is {settings[name]}: only {name}={usual} can be imported"
            )
    return model_config(settings, untie=False, head_order="official")


def model_config(
    settings: Mapping[str, Any], *, untie: bool, head_order: str, **more: Any
) -> ModelConfig:
    """Returns the part of a configuration that both PyTorch codes name alike.

    Args:
      settings: `MemTransformerLM`'s arguments.
      untie: whether u and v are a layer's own.
      head_order: see `AdaptiveConfig`.
      **more: further fields of `ModelConfig`.
    """
    width, memory = settings["d_model"], settings["mem_len"]
    clamp = settings.get("clamp_len", -1)
    return ModelConfig(
        vocabulary=settings["n_token"],
        layers=settings["n_layer"],
        width=width,
        heads=settings["n_head"],
        head_dim=settings["d_head"],
        feedforward=settings["d_inner"],
        position=TransformerXLRelative(untie=untie, clamp=clamp if clamp > 0 else None),
        norm="pre" if settings.get("pre_lnorm", False) else "post",
        final_norm=False,
        activation="relu",
        tie_embeddings=bool(settings.get("tie_weight", True)),
        output_bias=True,
        dropout=float(settings.get("dropout") or 0.0),
        attention_dropout=float(settings.get("dropatt") or 0.0),
        memory_length=memory,
        window=same_length(memory) if settings.get("same_length") else None,
        adaptive=_adaptive(settings, head_order),
        **more,
    )


def _adaptive(settings: Mapping[str, Any], head_order: str) -> AdaptiveConfig | None:
    """Returns the clusters; None where there is one table of the model's width."""
    cutoffs = tuple(settings.get("cutoffs") or ())
    div_val, width = settings.get("div_val", 1), settings["d_model"]
    embed = settings.get("d_embed") or width
    if not cutoffs and div_val == 1 and embed == width:
        return None
    flags = settings.get("tie_projs") or (False,)
    # Their code reads only as many flags as there are, and ties none of the others.
    flags = (*map(bool, flags), *[False] * (len(cutoffs) + 1))[: len(cutoffs) + 1]
    return AdaptiveConfig(
        cutoffs=cutoffs,
        div_val=div_val,
        embed_dim=None if embed == width else embed,
        tie_projections=flags,
        head_order=head_order,
    )


def settings_of(config: ModelConfig) -> dict[str, Any]:
    """Returns `MemTransformerLM`'s arguments for a model; undoes `config_of`.

    Raises:
      ValueError: a model that their code does not have; lists why.
    """
    names.refuse(config)
    xl, reasons = config.position, []
    if xl.untie:
        reasons.append("u and v are a layer's own (untie=True): their code shares them")
    if config.norm_epsilon != 1e-5:
        reasons.append(f"norm_epsilon is {config.norm_epsilon}: theirs is 1e-5")
    if config.memory_start != "empty":
        reasons.append("memory_start is 'zeros': their memory starts empty")
    if config.window not in (None, config.memory_length):
        reasons.append(f"window is {config.window}: theirs is None or memory_length")
    if reasons:
        raise ValueError(
            "MemTransformerLM has no such model:\n  " + "\n  ".join(reasons)
        )
    return {
        "n_token": config.vocabulary,
        "n_layer": config.layers,
        "n_head": config.heads,
        "d_model": config.width,
        "d_head": config.head_dim,
        "d_inner": config.feedforward,
        "mem_len": config.memory_length,
        "dropout": config.dropout,
        "tie_weight": config.tie_embeddings,
        "pre_lnorm": config.norm == "pre",
        "same_length": config.window is not None,
        "clamp_len": -1 if xl.clamp is None else xl.clamp,
        **clusters_of(config),
    }


def clusters_of(config: ModelConfig) -> dict[str, Any]:
    """Returns the settings of the adaptive softmax, as both PyTorch codes name them."""
    adaptive = config.adaptive or AdaptiveConfig()
    count = len(adaptive.cutoffs) + 1
    tied = [config.adaptive is not None] * count
    return {
        "d_embed": adaptive.widths(config.width)[0],
        "cutoffs": list(adaptive.cutoffs),
        "div_val": adaptive.div_val,
        "tie_projs": list(adaptive.tie_projections) or tied,
    }


def load(
    path: str | os.PathLike, settings: Mapping[str, Any]
) -> tuple[ModelConfig, nnx.GraphDef, PyTree]:
    """Returns the model of a state dictionary, `.safetensors` or PyTorch's.

    Tied arrays may stand under one or all of their names. No pickled code is executed.

    Args:
      path: the file.
      settings: see `config_of`.

    Returns:
      The configuration, and graph and parameters for `nnx.merge`.

    Raises:
      WrongWeights: names are missing or unknown, shapes differ, or tied arrays do;
        lists all of them.
      ValueError, ImportError, FileNotFoundError: see `config_of` and `names.read`.
    """
    config = config_of(settings)
    weights, listed = names.read(path), names.entries(config)
    buffers = {names.FREQUENCIES: names.frequencies(config.width)}
    names.check(weights, listed, buffers, path)
    return config, *names.to_params(weights, listed, config)


def save(path: str | os.PathLike, config: ModelConfig, params: PyTree) -> None:
    """Writes a `.safetensors` file that `MemTransformerLM.load_state_dict` takes.

    Tied arrays stand under all of their names.

    Args:
      path: the file; its folder exists.
      config: the model's.
      params: its parameters, as `nnx.split` gives them.

    Raises:
      ValueError: a model that their code does not have; lists why.
    """
    settings_of(config)  # raises where there is no such model
    listed = names.entries(config)
    weights = names.with_aliases(names.from_tree(params, listed), listed)
    names.write(path, {**weights, names.FREQUENCIES: names.frequencies(config.width)})
