"""The study of lengths: its counts are those of greedy decoding, and it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import length_generalisation as file
from relpos_jax import config as configs
from relpos_jax.data.transduction import START, STOP, Transductions
from relpos_jax.evaluation import length_generalisation as lengths
from relpos_jax.models.encoder_decoder import greedy
from relpos_jax.positional import make
from relpos_jax.training.config import TrainingConfig

SMALL = dict(layers=1, width=32, heads=2, head_dim=16, feedforward=32, test_rows=64)


@pytest.mark.slow
def test_learns_and_counts_what_greedy_decoding_gives():
    study = lengths.LengthStudy(
        encodings=("t5",), train_length=3, test_lengths=(2, 5), seeds=(0, 1), **SMALL
    )
    training = TrainingConfig(
        steps=300, batch=32, length=3, learning_rate=1e-2, steps_per_call=50
    )
    losses = {}
    results = list(
        lengths.run(study, training, lambda *x: losses.setdefault(x[:2], []).append(x))
    )
    assert [(r.seed, r.length) for r in results] == [(0, 2), (0, 5), (1, 2), (1, 5)]
    for found in losses.values():
        assert found[-1][3] < 0.5 * found[0][3]
    assert all(r.sequences == 64 and r.tokens == 64 * (r.length + 1) for r in results)
    assert min(r.exact for r in results if r.length == 2) > 16  # of 64, chance is 1%
    lines = lengths.table(study, results).splitlines()
    assert len(lines) == 3 and "±" in lines[2]

    graphdef, params = lengths.train(study, "t5", training)
    pairs = Transductions("copy", 64, 2, 2, seed=9).batch(0)
    exact, right = lengths.count_right(graphdef, params, pairs)

    @jax.jit
    def decode(params):
        model = nnx.merge(graphdef, params)
        source = jnp.asarray(pairs.source)
        at = jax.tree.map(jnp.asarray, pairs.source_at)
        return greedy(model, source, at, 3, start=START, stop=STOP)

    same = np.all(np.asarray(decode(params)) == pairs.targets, axis=1)
    assert 0 < same.sum() == exact and right >= 3 * exact


def test_models_and_refusals():
    run = configs.take(file.get_config("reverse").study, lengths.LengthStudy, "study")
    assert run.task == "reverse"
    model = run.model("alibi")
    assert model.decoder.position == make("alibi")
    assert model.encoder.position == make("alibi_symmetric")
    assert run.model("t5").encoder.position == make("t5_bidirectional", gain=4.0)
    with pytest.raises(ValueError, match="task must be one of"):
        lengths.LengthStudy(task="sort")
    with pytest.raises(ValueError, match="keys at or before the query only"):
        lengths.LengthStudy(encodings=("cope",))
