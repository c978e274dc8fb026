import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relpos_jax import positional, where
from relpos_jax.models import ModelConfig, TransformerXL, stack


@pytest.mark.parametrize(
    "encoding", [pytest.param("transformer_xl", marks=pytest.mark.slow), "rope"]
)
def test_scanned_layers_are_the_layers_one_by_one(encoding, monkeypatch):
    config = ModelConfig(
        vocabulary=11,
        layers=3,
        width=8,
        heads=2,
        head_dim=4,
        feedforward=16,
        position=positional.make(encoding),
        memory_length=5,
        dropout=0.1,
    )
    model = TransformerXL(config, key=jax.random.key(0))
    graphdef, params = nnx.split(model)
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 11)
    at = where.contiguous(2, 8)

    def run(params):
        model, memory = nnx.merge(graphdef, params), model_memory
        for start in (0, 4):
            cut = slice(start, start + 4)
            here = where.Where(at.position[:, cut], at.segment[:, cut])
            logits, memory = model(tokens[:, cut], here, memory, key=jax.random.key(2))
        return jnp.sum(jnp.sin(logits)), (logits, memory)

    model_memory = model.init_memory(2)
    outcomes, programs = [], []
    for least in (4, 3):
        monkeypatch.setattr(stack, "SCAN_FROM", least)
        step = jax.jit(lambda params: jax.value_and_grad(run, has_aux=True)(params))
        programs.append(str(step.trace(params).jaxpr))
        outcomes.append(step(params))
    assert "scan[" in programs[1] and "scan[" not in programs[0]
    for one, other in zip(*map(jax.tree.leaves, outcomes), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)


def test_mixed_layers_and_caches_are_not_scanned(monkeypatch):
    monkeypatch.setattr(stack, "SCAN_FROM", 2)
    sizes = dict(vocabulary=11, layers=2, width=8, heads=2, head_dim=4, feedforward=16)
    pattern = positional.make("rope"), positional.make("none")
    model = TransformerXL(ModelConfig(**sizes, position=pattern), key=jax.random.key(0))
    assert not model._scans(model.init_memory(1))
    model = TransformerXL(
        ModelConfig(**sizes, position=pattern[0]), key=jax.random.key(0)
    )
    assert model._scans(model.init_memory(1))
    assert not model._scans(model.init_cache(1, 4))
