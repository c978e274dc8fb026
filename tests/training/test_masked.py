"""An encoder through the training loop, its folder, and its evaluation."""

import jax.numpy as jnp
import numpy as np
import pytest

from configs import masked_lm
from relpos_jax import config as configs
from relpos_jax import data, positional, where
from relpos_jax.config import DataConfig, RunConfig
from relpos_jax.data.masking import Masking
from relpos_jax.evaluation import masked
from relpos_jax.evaluation.perplexity import Language
from relpos_jax.interop import runs
from relpos_jax.models import Encoder, ModelConfig
from relpos_jax.training import loop
from relpos_jax.training.config import TrainingConfig


@pytest.fixture(scope="module")
def corpus() -> data.Corpus:
    text = np.frombuffer(b"0123456789" * 400, np.uint8)
    return data.Corpus("digits", text[:3600], text[3600:], "the ten digits, in order")


def run_of(**training) -> RunConfig:
    model = ModelConfig(
        vocabulary=257,
        layers=1,
        width=32,
        heads=2,
        head_dim=16,
        feedforward=64,
        position=positional.make("t5_bidirectional"),
        bidirectional=True,
    )
    sizes = {"steps": 80, "batch": 16, "length": 16, "checkpoint_every": 40}
    sizes |= {"learning_rate": 1e-2, "warmup": 5, "steps_per_call": 20}
    return RunConfig(DataConfig(), model, TrainingConfig(**(sizes | training)))


@pytest.mark.slow
def test_learns_resumes_and_is_scored(corpus, tmp_path):
    run = run_of()
    for stop in (40, None):
        loop.train(run, tmp_path / "a", corpus=corpus, progress=False, stop_after=stop)

    model, *split = runs.load_run(tmp_path / "a", Encoder)
    masking = Masking(256)
    score = masked.evaluate(*split, corpus.held_out, 16, masking, batch=4)
    assert score.tokens == pytest.approx(0.15 * 384, abs=30)
    assert 0 < score.seen < score.tokens
    # Neighbours tell a digit: better than one in ten, after as few steps as these.
    assert score.accuracy > 0.2 and score.bits < np.log2(10)
    with pytest.raises(ValueError, match="TransformerXL needs bidirectional=False"):
        runs.load_run(tmp_path / "a")
    # Next-token protocols would let it see what it predicts.
    language = Language.of(*split)
    tokens, at = jnp.zeros((1, 16), jnp.int32), where.contiguous(1, 16)
    memory = language.init_memory(split[1], 1, 0)
    with pytest.raises(ValueError, match="give a weight"):
        language.score(split[1], tokens, tokens, at, memory)


def test_config_builds_an_encoder_with_a_mask_id():
    run = configs.build(masked_lm.get_config())
    assert run.model.bidirectional and run.model.vocabulary == 257
    batches = loop.make_batches(
        run, data.Corpus("x", np.zeros(20000, np.uint8), np.zeros(0, np.uint8), "")
    )
    assert batches.masking == Masking(256, 0.15)
    with pytest.raises(ValueError, match="keys at or before the query only"):
        configs.build(masked_lm.get_config("cope"))
