"""Hugging Face's TransfoXL: folders in both directions, and what is refused."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relpos_jax.evaluation import perplexity
from relpos_jax.interop import names, runs, transfo_xl
from relpos_jax.models import AdaptiveConfig, ModelConfig, TransformerXL
from relpos_jax.positional.transformer_xl import TransformerXLRelative

CONFIG = ModelConfig(
    vocabulary=20,
    layers=2,
    width=8,
    heads=2,
    head_dim=3,
    feedforward=12,
    position=TransformerXLRelative(untie=True, clamp=5),
    norm="post",
    final_norm=False,
    activation="relu",
    output_bias=True,
    memory_length=4,
    window=4,
    adaptive=AdaptiveConfig((4, 10), 2, 6, (False, True, True), "hugging_face"),
    memory_start="zeros",
)
VARIANTS = {
    "adaptive": {},
    "official order": {
        "adaptive": dataclasses.replace(CONFIG.adaptive, head_order="official")
    },
    "plain, shared biases": {
        "adaptive": None,
        "position": TransformerXLRelative(),
        "norm": "pre",
    },
    "untied": {"tie_embeddings": False, "window": None, "norm_epsilon": 0.001},
}


def model_of(config, seed=0):
    graphdef, params = nnx.split(TransformerXL(config, key=jax.random.key(seed)))
    leaves, structure = jax.tree.flatten(nnx.as_pure(params))
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    pairs = zip(keys, leaves, strict=True)
    return graphdef, structure.unflatten(
        [jax.random.normal(key, leaf.shape) for key, leaf in pairs]
    )


def same_bytes(first, second):
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("name", VARIANTS)
def test_export_then_import_gives_the_same_bytes(name, tmp_path):
    config = dataclasses.replace(CONFIG, **VARIANTS[name])
    graphdef, params = model_of(config)
    transfo_xl.save(tmp_path, config, params)
    found, _, again = transfo_xl.load(tmp_path)
    if name != "official order":
        assert found == config
        same_bytes(params, again)
        return
    # The port knows one order: the clusters' rows change places, and nothing else does.
    assert found == CONFIG
    softmax, other = params["softmax"], again["softmax"]
    np.testing.assert_array_equal(softmax["cluster"][::-1], other["cluster"])
    np.testing.assert_array_equal(softmax["cluster_bias"][::-1], other["cluster_bias"])


@pytest.mark.parametrize("letter", "abc")
def test_the_golden_folders_come_back_byte_for_byte(shared, tmp_path, letter):
    folder = shared / "golden" / f"hf_transfo_xl_{letter}"
    config, _, params = transfo_xl.load(folder)
    transfo_xl.save(tmp_path, config, params)
    wanted = names.read(folder / "model.safetensors")
    found = names.read(tmp_path / "model.safetensors")
    assert set(found) == set(wanted)
    assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)
    # Their settings, except what is of training or of their library alone.
    theirs = json.loads((folder / "config.json").read_text())
    ours = json.loads((tmp_path / "config.json").read_text())
    assert {name: theirs.get(name, ours[name]) for name in ours} == ours


def test_every_name_of_a_tied_array_may_stand_there(tmp_path):
    _, params = model_of(CONFIG)
    transfo_xl.save(tmp_path, CONFIG, params)
    file = tmp_path / "model.safetensors"
    weights, listed = names.read(file), transfo_xl.entries(CONFIG)
    every = names.with_aliases(weights, listed)
    assert len(every) == len(weights) + 5  # three tables and two projections
    names.write(file, every)
    same_bytes(params, transfo_xl.load(tmp_path)[2])
    # Only under the other name: what matters is that it is there.
    del every["transformer.word_emb.emb_layers.1.weight"]
    names.write(file, every)
    same_bytes(params, transfo_xl.load(tmp_path)[2])


def test_all_faults_are_listed_at_once(tmp_path):
    _, params = model_of(CONFIG)
    transfo_xl.save(tmp_path, CONFIG, params)
    file = tmp_path / "model.safetensors"
    weights = dict(names.read(file))
    prefix = "transformer.layers.1"
    table = "transformer.word_emb.emb_layers.0.weight"
    weights["crit.out_layers.0.weight"] = weights[table] + 1
    del weights[f"{prefix}.dec_attn.o_net.weight"]
    weights[f"{prefix}.pos_ff.CoreNet.0.bias"] = np.zeros(13, np.float32)
    weights["crit.cluster_bias"] = np.zeros(2, np.int32)
    weights["transformer.layers.2.dec_attn.r_w_bias"] = np.zeros((2, 3), np.float32)
    weights["transformer.pos_emb.inv_freq"] = np.ones(4, np.float32)
    names.write(file, weights)
    with pytest.raises(names.WrongWeights) as error:
        transfo_xl.load(tmp_path)
    lines = [line.strip() for line in str(error.value).splitlines()[1:]]
    assert sorted(lines) == [
        "dtype: crit.cluster_bias is int32, should be float32",
        f"missing: {prefix}.dec_attn.o_net.weight (8, 6)",
        f"not tied: crit.out_layers.0.weight differs from {table}",
        f"shape: {prefix}.pos_ff.CoreNet.0.bias is (13,), should be (12,)",
        "unknown: transformer.layers.2.dec_attn.r_w_bias",
        "value: transformer.pos_emb.inv_freq is not what the configuration implies",
    ]


def test_half_precision_is_widened_exactly(tmp_path):
    _, params = model_of(CONFIG)
    transfo_xl.save(tmp_path, CONFIG, params)
    file = tmp_path / "model.safetensors"
    half = {name: x.astype(np.float16) for name, x in names.read(file).items()}
    half["transformer.pos_emb.inv_freq"] = names.frequencies(8)
    names.write(file, half)
    found = transfo_xl.load(tmp_path)[2]
    rounded = jax.tree.map(lambda x: x.astype(jnp.float16).astype(jnp.float32), params)
    same_bytes(found, rounded)


def test_missing_files_and_torch_are_said(shared, tmp_path):
    with pytest.raises(FileNotFoundError, match="no config.json"):
        transfo_xl.load(tmp_path)
    source = shared / "golden" / "hf_transfo_xl_b"
    shutil.copyfile(source / "config.json", tmp_path / "config.json")
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        transfo_xl.load(tmp_path)
    shutil.copyfile(source / "pytorch_model.bin", tmp_path / "pytorch_model.bin")
    try:
        import torch  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="torch is not installed.*safetensors"):
            transfo_xl.load(tmp_path)
    else:
        same_bytes(transfo_xl.load(tmp_path)[2], transfo_xl.load(source)[2])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"activation": "gelu"}, "activation is 'relu', not 'gelu'"),
        ({"memory_start": "empty"}, "memory_start is 'empty'"),
        ({"window": 3}, "window is 3"),
        ({"final_norm": True}, "final_norm=False"),
    ],
)
def test_what_the_port_does_not_have_is_not_written(changes, message, tmp_path):
    config = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(ValueError, match=message):
        transfo_xl.save(tmp_path, config, {})
    assert not list(tmp_path.iterdir())


def test_settings_are_checked():
    settings = transfo_xl.settings_of(CONFIG)
    with pytest.raises(ValueError, match="lacks n_layer"):
        transfo_xl.config_of({k: v for k, v in settings.items() if k != "n_layer"})
    with pytest.raises(ValueError, match="attn_type=0"):
        transfo_xl.config_of({**settings, "attn_type": 2})
    with pytest.raises(ValueError, match="model_type is 'gpt2'"):
        transfo_xl.config_of({**settings, "model_type": "gpt2"})
    bare = {k: v for k, v in settings.items() if k in transfo_xl.NEEDED}
    config = transfo_xl.config_of(bare)  # the port's own defaults
    assert config.position == TransformerXLRelative(untie=True, clamp=1000)
    assert config.window == 4 and config.dropout == 0.1
    assert config.adaptive.tie_projections == (False, True, True)


def test_an_imported_run_scores_as_stored(shared, tmp_path):
    """The folder, through a run's folder and the evaluation, gives the case's sum."""
    folder = shared / "golden" / "hf_transfo_xl_a"
    config, _, params = transfo_xl.load(folder)
    runs.save_run(tmp_path / "run", config, params, kind="transfo-xl")
    again, graphdef, restored = runs.load_run(tmp_path / "run")
    assert again == config
    same_bytes(restored, params)
    with pytest.raises(FileExistsError, match="holds a run already"):
        runs.save_run(tmp_path / "run", config, params)
    with np.load(folder.with_suffix(".npz")) as stored:
        ids = [stored[f"in.input_ids.s{i}"][0] for i in range(3)]
        text = np.concatenate([*ids, stored["in.next_ids.s2"][0, -1:]])
        wanted = sum(stored[f"out.nll.s{i}"][0].sum(dtype=float) for i in range(3))
    np.save(tmp_path / "text.npy", text)
    source = f"ids:{tmp_path / 'text.npy'}"
    text = runs.read_text(source, tmp_path / "run", config.vocabulary).tokens
    language = perplexity.Language.of(graphdef, restored)
    score = runs.score(language, text, 8, config.memory_length)
    assert score.tokens == 24
    assert score.nll == pytest.approx(wanted, abs=1e-3)
    with pytest.raises(ValueError, match="not below 7"):
        runs.read_text(source, tmp_path / "run", 7)
    with pytest.raises(ValueError, match="no vocabulary.json.*--vocabulary=saved"):
        runs.read_text("stdlib", tmp_path / "run", config.vocabulary)


def test_another_memory_at_evaluation():
    with pytest.raises(ValueError, match="say which window, 9"):
        runs.evaluated(CONFIG, memory=9)
    config, _ = runs.evaluated(CONFIG, memory=9, window=9, clamp=0)
    assert config == dataclasses.replace(
        CONFIG,
        memory_length=9,
        window=9,
        position=TransformerXLRelative(untie=True, clamp=None),
    )
