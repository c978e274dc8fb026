import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from configs import extrapolate
from relpos_jax import data
from relpos_jax.evaluation import extrapolation, results
from relpos_jax.models.decoder import TransformerXL
from relpos_jax.report import extrapolation as report
from relpos_jax.report import tables
from relpos_jax.training import loop
from relpos_jax.training.state import key_for

ROOT = Path(__file__).resolve().parents[2]


def small(**changes):
    config = extrapolate.get_config("smoke")
    config.study.encodings = ("none", "learned")
    config.evaluation.multiples = (1, 4)
    config.update_from_flattened_dict(changes)
    return config


def study(config, folder):
    return extrapolation.run_study(config, folder, progress=False)


def csv(found):
    return tables.to_csv(tables.rows(found.results))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    return study(small(), folder), folder


def test_a_study_has_every_model_protocol_and_length(finished):
    found, folder = finished
    rows = tables.rows(found.results)
    expected = [
        (encoding, protocol, length)
        for encoding in ("none", "learned")
        for protocol in ("non_overlapping", "same_targets", "sliding", "memory")
        for length in (8, 32)
        if (encoding, protocol) != ("learned", "memory")
    ]
    assert [(r.encoding, r.protocol, r.length) for r in rows] == expected
    assert all(7 < row.bits_per_byte < 9 for row in rows)
    tokens = {row.protocol: row.tokens for row in rows}
    assert tokens == {
        "non_overlapping": 200,
        "same_targets": 40,
        "sliding": 100,
        "memory": 200,
    }
    assert "absolute" in found.results[1].skipped["memory"]
    assert found.results[1].past_training.startswith("The table has 8 rows")
    times = json.loads((folder / "study.json").read_text())["models"]
    assert set(times) == {"none-seed0", "learned-seed0"}
    assert not times["none-seed0"]["resumed"]
    assert report.write(found, folder)[0].exists()


def test_finished_models_are_not_touched_again(finished, monkeypatch):
    found, folder = finished

    def never(*_, **__):
        raise AssertionError("a finished model was trained again")

    monkeypatch.setattr(loop, "train", never)
    assert csv(study(small(), folder)) == csv(found)


def test_a_study_goes_on_where_it_was_interrupted(finished, tmp_path, monkeypatch):
    found, _ = finished
    config = small()
    # Half-trained, then stopped in the middle of its evaluation.
    run = extrapolation.plan_study(config).run("none", 0)
    loop.train(run, tmp_path / "models" / "none-seed0", progress=False, stop_after=2)
    with monkeypatch.context() as patch:

        def stop(*_, **__):
            raise KeyboardInterrupt

        patch.setattr(extrapolation, "evaluate_lengths", stop)
        with pytest.raises(KeyboardInterrupt):
            study(config, tmp_path)
    assert not (tmp_path / "models" / "none-seed0" / "result.json").exists()
    again = study(config, tmp_path)
    assert again.facts["models"]["none-seed0"]["resumed"]
    assert csv(again) == csv(found)
    for name in ("none-seed0", "learned-seed0"):
        ours, theirs = (
            (folder / "models" / name / "result.json").read_bytes()
            for folder in (tmp_path, finished[1])
        )
        assert ours == theirs


def test_another_config_is_refused_and_named(finished):
    _, folder = finished
    before = (folder / "config.json").read_bytes()
    for key, value in {
        "training.learning_rate": 0.5,
        "evaluation.sliding_tokens": 99,
        "study.seeds": (0, 1),
        "data.held_out_fraction": 0.2,
    }.items():
        with pytest.raises(ValueError, match=f"another config(.|\n)*{key}"):
            study(small(**{key: value}), folder)
    assert (folder / "config.json").read_bytes() == before
    # What changes no number may change.
    study(small(**{"training.checkpoint_every": 3}), folder)


def test_two_seeds_make_two_models_of_each(tmp_path):
    config = small()
    config.study.seeds = (3, 1)
    config.evaluation.protocols = ("non_overlapping",)
    config.evaluation.multiples = (1,)
    found = study(config, tmp_path)
    rows = [(row.encoding, row.seed) for row in tables.rows(found.results)]
    assert rows == [("none", 3), ("none", 1), ("learned", 3), ("learned", 1)]
    values = [row.bits_per_byte for row in tables.rows(found.results)]
    assert len(set(values)) == 4


def test_models_of_a_seed_are_paired():
    config = extrapolate.get_config("smoke")
    plan = extrapolation.plan_study(config)
    corpus = data.load("stdlib", max_bytes=20000)
    batches, shared = [], []
    for encoding in plan.study.encodings:
        run = plan.run(encoding, 5)
        batches.append(loop.make_batches(run, corpus).batch(2).inputs)
        model = TransformerXL(run.model, key=key_for(5, "parameters"))
        leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param))
        shared.append({jax.tree_util.keystr(path): leaf for path, leaf in leaves})
    for other in batches[1:]:
        np.testing.assert_array_equal(batches[0], other)
    for other in shared[1:]:
        # NoPE has no parameters of its own: all of its own are the others' as well.
        assert set(shared[0]) <= set(other)
        for name, value in shared[0].items():
            np.testing.assert_array_equal(value, other[name], err_msg=name)


def test_one_call_gives_every_protocol_and_learned_tables_follow_the_length():
    for variant in extrapolate.VARIANTS:
        plan = extrapolation.plan_study(extrapolate.get_config(variant))
        assert len(plan.evaluation.protocols) == 4
    config = extrapolate.get_config("quick")
    config.training.length = 32
    config.study.positions.t5.knobs.max_distance = 64
    plan = extrapolation.plan_study(config)
    assert plan.run("learned", 0).model.position.rows == 32
    assert plan.run("t5", 0).model.position.max_distance == 64
    others = {
        name: copy.copy(run.model.__dict__) | {"position": None}
        for name, run in plan.runs.items()
    }
    assert all(model == others["none"] for model in others.values())


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"study.encodings": ("none", "rop")}, "'rop'.*rope"),
        ({"study.encodings": ("none", "none")}, "none twice"),
        ({"study.encodings": ()}, "at least one"),
        ({"study.seeds": ()}, "study.seeds"),
        ({"data.max_bytes": 300}, "30 bytes held out.*needs 33"),
    ],
)
def test_senseless_studies_are_refused(changes, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        study(small(**changes), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_keys_that_nobody_reads_are_refused(tmp_path):
    config = small().to_dict()
    for section, key in (("study", "encoding"), ("evaluation", "protocol")):
        wrong = copy.deepcopy(config)
        wrong[section][key] = 1
        with pytest.raises(ValueError, match=f"config.{section}.{key}.*did you mean"):
            study(wrong, tmp_path)
    wrong = copy.deepcopy(config)
    wrong["model"]["position"] = {"name": "rope"}
    with pytest.raises(ValueError, match="set by the study"):
        study(wrong, tmp_path)
    with pytest.raises(ValueError, match="unknown variant 'fast'"):
        extrapolate.get_config("fast")


def test_a_broken_result_is_named(finished, tmp_path):
    found, _ = finished
    path = tmp_path / "result.json"
    results.save(found.results[0], path)
    back = results.load(path)
    assert csv(results.Study({}, (back,), {})) in csv(found)
    path.write_text(path.read_text()[:100])
    with pytest.raises(ValueError, match="result.json.*delete it"):
        results.load(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="result.json.*delete it"):
        results.load(path)


def command(folder, source):
    return [
        sys.executable,
        "-m",
        "experiments.extrapolate",
        "--config=configs/extrapolate.py:smoke",
        f"--config.data.source=file:{source}",
        "--config.study.encodings=('none', 'learned')",
        "--config.evaluation.multiples=(1, 4)",
        "--config.training.steps=40",
        f"--workdir={folder}",
    ]


@pytest.mark.slow
def test_killed_three_times_gives_the_same_table(tmp_path):
    source = tmp_path / "text.txt"
    source.write_bytes(bytes(range(32, 127)) * 300)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    environment = os.environ | {"RELPOS_JAX_COMPILATION_CACHE": str(tmp_path / "xla")}

    def start(folder):
        return subprocess.Popen(
            command(folder, source),
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    process = start(whole)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "encoding 2/2: learned-seed0" in output and "tokens/s" in output
    awaited = (
        "models/none-seed0/checkpoints/*",
        "models/none-seed0/result.json",
        "models/learned-seed0/checkpoints/*",
    )
    for pattern in awaited:
        process = start(broken)
        until = time.monotonic() + 200
        while process.poll() is None and time.monotonic() < until:
            if list(broken.glob(pattern)):
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    process = start(broken)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "none-seed0 is finished already" in output
    for name in ("results.csv", "extrapolation.png", "loss_by_position.png"):
        assert (whole / name).read_bytes() == (broken / name).read_bytes(), name
    facts = json.loads((broken / "study.json").read_text())
    assert "--config.training.steps=40" in facts["command"]


@pytest.mark.slow
def test_seeds_trained_together_give_the_study_up_to_rounding(tmp_path):
    changes = {"study.seeds": (0, 1), "study.encodings": ("none",)}
    alone = study(small(**changes), tmp_path / "alone")
    together = small(**changes, **{"study.together": True})
    found = study(together, tmp_path / "together")
    values = [
        [row.bits_per_byte for row in tables.rows(x.results)] for x in (alone, found)
    ]
    np.testing.assert_allclose(*values, rtol=1e-4)
    assert csv(study(together, tmp_path / "together")) == csv(found)
    with pytest.raises(ValueError, match="study.together: True there, None here"):
        study(small(**changes), tmp_path / "together")
