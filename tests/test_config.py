"""Configs: what is built, what is refused, and with which words."""

import dataclasses
import json
import pathlib

import ml_collections
import pytest
from absl import flags
from ml_collections import config_flags

from relpos_jax import config, positional
from relpos_jax.models.config import ModelConfig
from relpos_jax.training.config import TrainingConfig

# ml_collections loads config files in a way that Python 3.12 has dropped.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")

QUICK = pathlib.Path(__file__).parent.parent / "configs" / "quick.py"


def parse(*arguments: str, file: str = str(QUICK)) -> ml_collections.ConfigDict:
    """Returns the config that a command line with these arguments gives."""
    values = flags.FlagValues()
    line = ["train", f"--config={file}", *arguments]
    holder = config_flags.DEFINE_config_file(
        "config", flag_values=values, sys_argv=line
    )
    values(line)
    return holder.value


@pytest.mark.parametrize("name", positional.ENCODINGS)
def test_quick_builds_with_every_encoding(name):
    run = config.build(parse(file=f"{QUICK}:{name}"))
    assert run.model.position == positional.ENCODINGS[name]
    assert (run.model.vocabulary, run.training.length) == (256, 64)


def test_command_line_overrides_every_kind_of_field():
    run = config.build(
        parse(
            "--config.training.steps=77",
            "--config.training.learning_rate=1",
            "--config.training.clip=None",
            "--config.model.window=16",
            "--config.model.init_std=1",
            "--config.model.final_norm=False",
            "--config.model.dropout=0",
            "--config.model.position.knobs.base=500",
            "--config.data.source=file:a.txt",
            "--config.data.max_bytes=1000",
        )
    )
    assert run.training.steps == 77
    rate = run.training.learning_rate
    assert rate == 1.0 and isinstance(rate, float)
    assert run.training.clip is None
    assert run.model.window == 16
    assert run.model.init_std == 1.0 and isinstance(run.model.init_std, float)
    assert run.model.final_norm is False
    assert isinstance(run.model.dropout, float)
    assert run.model.position.base == 500.0
    assert run.data == config.DataConfig(source="file:a.txt", max_bytes=1000)


def test_command_line_refuses_a_wrong_key_with_the_nearest():
    with pytest.raises(Exception, match=r'Did you mean "?.?steps'):
        parse("--config.training.stps=3")


def test_command_line_refuses_a_wrong_type():
    with pytest.raises(flags.IllegalFlagValueError, match="many"):
        parse("--config.training.steps=many")
    with pytest.raises(TypeError, match=r"config\.model\.window must be int"):
        config.build(parse("--config.model.window=1.5"))


@pytest.mark.parametrize(
    "sections, message",
    [
        ({"trainin": {}}, r"config\.trainin.*did you mean 'training'"),
        ({"training": {"step": 1}}, r"config\.training\.step:.*mean 'steps'"),
        ({"model": {"layer": 1}}, r"config\.model\.layer:.*mean 'layers'"),
        ({"data": {"qqqq": 1}}, r"config\.data\.qqqq:.*known: source"),
        ({"model": {"position": {"name": "rop"}}}, "'rop'.*mean 'rope'"),
        ({"model": {"position": {"nam": "rope"}}}, "'nam'.*mean 'name'"),
        (
            {"model": {"position": {"name": "rope", "knobs": {"bas": 1}}}},
            "'bas'.*mean 'base'",
        ),
        ({"data": {"order": "lane"}}, r"config\.data\.order.*mean 'lanes'"),
        ({"training": {"clip": 0.0}}, r"training\.clip must be above 0"),
        ({"training": {"b2": 1.0}}, r"training\.b2 must be in \[0, 1\)"),
        ({"model": {}}, r"config\.model\.layers has no value and no default"),
        ({"model": {"vocabulary": 9}}, r"nobody reads 'vocabulary'"),
    ],
)
def test_wrong_keys_and_values_are_named(sections, message):
    with pytest.raises(ValueError, match=message):
        config.build(ml_collections.ConfigDict(sections))


@pytest.mark.parametrize(
    "section, key, value",
    [
        ("training", "steps", 1.0),
        ("training", "steps", True),
        ("training", "steps", "1"),
        ("training", "steps", None),
        ("training", "learning_rate", "1e-3"),
        ("training", "clip", True),
        ("model", "tie_embeddings", 1),
        ("model", "norm", 1),
        ("model", "window", 2.0),
        ("data", "source", None),
    ],
)
def test_wrong_types_are_named(section, key, value):
    sections = parse().to_dict()
    sections[section][key] = value
    with pytest.raises(TypeError, match=rf"config\.{section}\.{key} must be"):
        config.build(sections)


def test_knobs_are_checked_and_converted():
    sections = parse().to_dict()
    sections["model"]["position"]["knobs"]["base"] = 100
    base = config.build(sections).model.position.base
    assert base == 100.0 and isinstance(base, float)
    sections["model"]["position"]["knobs"]["base"] = "100"
    with pytest.raises(TypeError, match=r"config\.model\.position\.knobs\.base"):
        config.build(sections)


@pytest.mark.parametrize("name", ["sinusoidal", "learned"])
def test_absolute_embeddings_with_memory_are_refused_with_the_reason(name):
    with pytest.raises(ValueError, match=r"memory.*Dai et al\. 2019, section 3\.3"):
        config.build(
            parse(
                "--config.model.memory_length=8",
                "--config.data.order=lanes",
                file=f"{QUICK}:{name}",
            )
        )


def test_shuffled_windows_with_memory_are_refused():
    with pytest.raises(ValueError, match="data.order='windows' excludes memory"):
        config.build(parse("--config.model.memory_length=8"))
    lanes = ("--config.model.memory_length=8", "--config.data.order=lanes")
    assert config.build(parse(*lanes)).model.memory_length == 8


def test_other_sections_are_the_callers():
    sections = parse().to_dict() | {"evaluation": {"lengths": [64]}}
    with pytest.raises(ValueError, match="nobody reads 'evaluation'"):
        config.build(sections)
    config.build(sections, others=("evaluation",))

    @dataclasses.dataclass(frozen=True)
    class Evaluation:
        lengths: tuple[int, ...]
        strides: tuple[int, int] | None = None

    taken = config.take(sections["evaluation"], Evaluation, "evaluation")
    assert taken == Evaluation((64,))
    with pytest.raises(TypeError, match=r"evaluation\.lengths\[1\] must be int"):
        config.take({"lengths": [64, 1.5]}, Evaluation, "evaluation")
    with pytest.raises(TypeError, match=r"config\.evaluation\.strides"):
        config.take({"lengths": [], "strides": [1]}, Evaluation, "evaluation")


def test_sections_hold_every_field():
    section = config.section(TrainingConfig, steps=9)
    assert set(section) == {f.name for f in dataclasses.fields(TrainingConfig)}
    assert config.take(section, TrainingConfig, "training") == TrainingConfig(steps=9)
    with pytest.raises(ValueError, match="mean 'steps'"):
        config.section(TrainingConfig, stepz=9)
    assert "layers" not in config.section(ModelConfig)  # no default: to be given


def test_a_chain_can_be_configured():
    parts = [{"name": "rope"}, {"name": "alibi"}]
    sections = parse().to_dict()
    section = config.position("chain", parts=parts)
    sections["model"]["position"] = section
    chain = config.build(sections).model.position
    assert chain == positional.make("chain", parts=parts)
    assert config.resolved(chain)["parts"][1]["name"] == "Alibi"


def test_resolved_config_is_written_and_compared(tmp_path):
    run = config.build(parse())
    config.write_resolved(run, tmp_path, corpus={"size": 3})
    there = json.loads((tmp_path / "config.json").read_text())
    assert there["corpus"] == {"size": 3}
    assert there["model"]["position"]["name"] == "Rope"
    assert there["training"]["learning_rate"] == run.training.learning_rate
    assert list(tmp_path.iterdir()) == [tmp_path / "config.json"]
    here = config.resolved(run) | {"corpus": {"size": 3}}
    assert config.differences(there, here) == []
    other = config.build(
        parse("--config.training.seed=1", file=f"{QUICK}:alibi"),
    )
    lines = config.differences(there, config.resolved(other) | {"corpus": {"size": 3}})
    assert "training.seed: 0 there, 1 here" in lines
    assert any(line.startswith("model.position.name: 'Rope' there") for line in lines)
