"""The authors' state dictionary: both directions, and runs' folders."""

import dataclasses
import json
import pickle
import sys
import types

import jax
import numpy as np
import pytest
from flax import nnx

from relpos_jax import config as configs
from relpos_jax.config import DataConfig, RunConfig
from relpos_jax.interop import names, official_transformer_xl, runs
from relpos_jax.models import AdaptiveConfig, ModelConfig, TransformerXL
from relpos_jax.positional import ENCODINGS, make
from relpos_jax.positional.transformer_xl import TransformerXLRelative
from relpos_jax.training import loop
from relpos_jax.training.config import TrainingConfig

CONFIG = ModelConfig(
    vocabulary=20,
    layers=2,
    width=8,
    heads=2,
    head_dim=3,
    feedforward=12,
    position=TransformerXLRelative(clamp=5),
    norm="post",
    final_norm=False,
    activation="relu",
    output_bias=True,
    memory_length=4,
    adaptive=AdaptiveConfig((4, 10), 1, 6, (False, True, False)),
)


def params_of(config, seed=0):
    params = nnx.as_pure(nnx.split(TransformerXL(config, key=jax.random.key(seed)))[1])
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)


def same_bytes(first, second):
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"adaptive": None, "norm": "pre", "window": 4},
        {"tie_embeddings": False, "adaptive": AdaptiveConfig((4,), 2, None)},
        {"adaptive": AdaptiveConfig((), 2, None, (True,))},
    ],
)
def test_export_then_import_gives_the_same_bytes(changes, tmp_path):
    config = dataclasses.replace(CONFIG, **changes)
    params, path = params_of(config), tmp_path / "model.safetensors"
    official_transformer_xl.save(path, config, params)
    settings = json.loads(json.dumps(official_transformer_xl.settings_of(config)))
    found, _, again = official_transformer_xl.load(path, settings)
    same_bytes(params, again)
    # () and as many True say the same.
    official_transformer_xl.save(tmp_path / "again.safetensors", found, again)
    assert path.read_bytes() == (tmp_path / "again.safetensors").read_bytes()


def test_the_golden_weights_are_the_names_that_are_expected(shared):
    found = 0
    for file in sorted((shared / "golden").glob("txl_lm_*.npz")):
        settings = json.loads(file.with_suffix(".json").read_text())["config"]
        config = official_transformer_xl.config_of(settings)
        with np.load(file) as stored:
            weights = {k[2:]: stored[k] for k in stored.files if k.startswith("w.")}
        listed = names.entries(config)
        names.check(weights, listed, {}, file.name)
        _, params = names.to_params(weights, listed, config)
        back = names.with_aliases(names.from_tree(params, listed), listed)
        assert set(back) == set(weights)
        assert all(back[k].tobytes() == weights[k].tobytes() for k in back)
        found += 1
    assert found > 5


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"memory_start": "zeros"}, "their memory starts empty"),
        ({"norm_epsilon": 0.1}, "theirs is 1e-5"),
        ({"position": TransformerXLRelative(untie=True)}, "their code shares them"),
        ({"position": make("rope")}, "its position is"),
    ],
)
def test_what_their_code_does_not_have_is_not_written(changes, message, tmp_path):
    config = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(ValueError, match=message):
        official_transformer_xl.save(tmp_path / "a.safetensors", config, {})


def test_settings_are_checked():
    settings = official_transformer_xl.settings_of(CONFIG)
    with pytest.raises(ValueError, match="lack d_model, mem_len"):
        short = {k: v for k, v in settings.items() if k not in ("d_model", "mem_len")}
        official_transformer_xl.config_of(short)
    with pytest.raises(ValueError, match="ext_len is 2"):
        official_transformer_xl.config_of({**settings, "ext_len": 2})


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_encoding_is_read_back_from_a_run_s_config(name):
    config = dataclasses.replace(
        CONFIG, position=make(name), memory_length=0, width=6, adaptive=None
    )
    values = json.loads(json.dumps(configs.resolved(config)))
    assert runs.model_config(values) == config


def test_patterns_chains_and_clusters_are_read_back():
    chain = make("chain", parts=[{"name": "rope"}, {"name": "alibi"}])
    pattern = (chain, make("none"), make("dape", inner={"name": "kerple_log"}))
    config = dataclasses.replace(CONFIG, position=pattern)
    values = json.loads(json.dumps(configs.resolved(config)))
    assert runs.model_config(values) == config
    with pytest.raises(ValueError, match="no encoding is called 'Rotary'"):
        runs.model_config({**values, "position": {"name": "Rotary"}})
    with pytest.raises(ValueError, match="nobody reads 'layer'"):
        runs.model_config({**values, "layer": 2})


def test_a_trained_run_is_loaded(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 4)
    model = dataclasses.replace(
        CONFIG, vocabulary=256, adaptive=AdaptiveConfig((97, 130), 2), dropout=0.1
    )
    training = TrainingConfig(steps=2, batch=2, length=4, warmup=1, steps_per_call=2)
    run = RunConfig(DataConfig(f"file:{text}", order="lanes"), model, training)
    with pytest.raises(FileNotFoundError, match="holds no run"):
        runs.load_run(tmp_path / "run")
    result = loop.train(run, tmp_path / "run", progress=False)
    config, graphdef, params = runs.load_run(tmp_path / "run")
    assert config == model and graphdef == result.graphdef
    same_bytes(params, result.params)


def test_a_pytorch_file_is_read_without_running_what_is_pickled(tmp_path, monkeypatch):
    """With a torch of our own, since the real one is no requirement."""
    path, asked = tmp_path / "model.pt", []
    path.write_bytes(b"")
    bias = np.arange(3, dtype=np.float32)
    tensor = types.SimpleNamespace(dtype="float32", numpy=lambda: bias)

    def load(file, map_location, weights_only):
        asked.append(weights_only)
        if isinstance(content, Exception):
            raise content
        return content

    torch = types.ModuleType("torch")
    torch.load, torch.is_tensor = load, lambda x: x is tensor
    torch.float16, torch.bfloat16 = "float16", "bfloat16"
    monkeypatch.setitem(sys.modules, "torch", torch)
    content = {"bias": tensor}
    np.testing.assert_array_equal(names.read(path)["bias"], bias)
    for content in ({"epoch": 3}, [tensor], pickle.UnpicklingError("a class")):
        with pytest.raises(ValueError, match="is no state dictionary"):
            names.read(path)
    assert asked == [True] * 4
