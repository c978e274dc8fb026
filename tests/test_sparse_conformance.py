"""Every encoding with every sparse pattern: the dense oracle, caches, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.attention.patterns import (
    BigBird,
    Dilated,
    Fixed,
    Strided,
    WindowGlobal,
    check_sense,
)
from relpos_jax.relative import Layout
from relpos_jax.where import Where
from tests import conformance as suite
from tests.conformance import LENGTH, NAMES, cut, encoding_of, model_of, tokens_of
from tests.test_conformance import close, full_forward

PATTERNS = {
    "dilated": Dilated(3, 2),
    "window_global": WindowGlobal(3, (0, 5)),
    "big_bird": BigBird(2, 1, 1, (0,), seed=1),
    "strided": Strided(3),
    "fixed": Fixed(4, 1),
    "dilated_symmetric": Dilated(2, 3, causal=False),
    "window_global_symmetric": WindowGlobal(2, (1, 9), causal=False),
    "big_bird_symmetric": BigBird(2, 1, 1, (0, 4), causal=False, blocks=8),
    "strided_symmetric": Strided(3, causal=False),
}
CAUSAL = [name for name, mask in PATTERNS.items() if mask.causal]

# For `make test`: each kind of strip with an encoding of another kind, since compiling
# all pairs takes long.
BRIEF = {
    ("rope", "dilated"),
    ("alibi", "strided"),
    ("fire", "window_global"),
}


def pairs(patterns, brief=BRIEF):
    """Returns every pair that makes sense; all but a few are slow."""
    found = []
    for name in NAMES:
        for pattern in patterns:
            try:
                check_sense(encoding_of(name), PATTERNS[pattern])
            except ValueError:
                continue
            marks = [pytest.mark.xdist_group(name)]
            if (name, pattern) not in brief:
                marks.append(pytest.mark.slow)
            found.append(pytest.param(name, pattern, marks=marks))
    return found


def refused(name, pattern):
    try:
        check_sense(encoding_of(name), PATTERNS[pattern])
    except ValueError:
        return True
    return False


def test_only_the_listed_pairs_are_refused():
    for name in NAMES:
        encoding = encoding_of(name)
        for pattern, mask in PATTERNS.items():
            senseless = encoding.whole_rows or (
                encoding.causal_only and not mask.causal
            )
            assert refused(name, pattern) == senseless


@pytest.mark.parametrize("name, pattern", pairs(PATTERNS))
def test_blocks_give_the_oracle_s_values_and_gradients(name, pattern):
    encoding, mask, memory, tokens = encoding_of(name), PATTERNS[pattern], 7, 17
    inputs = suite.inputs_of(encoding, tokens, tokens + memory)
    # Row 0 packs three documents behind memory; row 1 has empty slots in its memory.
    q_at, k_at = suite.memory_rows(2, memory, tokens)
    packed = where.packed((9, 4, 9), 24)
    k_at = Where(*(x.at[0].set(y[0]) for x, y in zip(k_at, packed, strict=True)))
    q_at = cut(k_at, memory, 24)

    def run(**options):
        options = tuple({"mask": mask, **options}.items())
        return suite.output_and_gradients(encoding, inputs, q_at, k_at, options)

    wanted = run(implementation="pairs")
    layout = Layout(memory)
    close(run(implementation="blockwise", layout=layout, blocks=(4, 8)), wanted)
    if (name, pattern) not in BRIEF:
        close(run(implementation="blockwise", blocks=(8, 4)), wanted)


DECODED = {("alibi", "window_global")}


@pytest.mark.parametrize("name, pattern", pairs(CAUSAL, DECODED))
def test_token_by_token_from_a_cache_is_the_full_forward(name, pattern):
    mask = PATTERNS[pattern]
    _, forward, params, model = model_of(name, pattern=mask)
    tokens, at = tokens_of(2, LENGTH), where.contiguous(2, LENGTH)
    # Where a pattern does not look farther back, a ring of its reach is enough.
    ring = mask.reach is not None and not encoding_of(name).length_dependent
    cache = model.init_cache(2, mask.reach if ring else LENGTH, ring=ring)
    logits = []
    for t in range(LENGTH):
        here, cache = forward(
            params, tokens[:, t : t + 1], cut(at, t, t + 1), cache, spacing="any"
        )
        logits.append(here)
    found = jnp.concatenate(logits, axis=1)
    close(found, full_forward(name, tokens, at, pattern=mask), 1e-4)


@pytest.mark.parametrize("name, pattern", pairs(CAUSAL, {("shaw", "strided")}))
def test_segment_by_segment_with_memory_is_the_full_forward(name, pattern):
    encoding, mask = encoding_of(name), PATTERNS[pattern]
    if encoding.absolute:
        pytest.skip("absolute embeddings are refused with memory")
    if encoding.length_dependent:
        pytest.skip("layers above the first remember states of shorter lengths")
    # Blockwise at every layer, since the lengths of tests are attended to densely.
    changes = dict(pattern=mask, attention="blockwise")
    _, forward, params, model = model_of(name, **changes)
    tokens, at = tokens_of(2, LENGTH), where.contiguous(2, LENGTH)
    memory, logits = model.init_memory(2, LENGTH), []
    for t in range(0, LENGTH, 4):
        here, memory = forward(params, tokens[:, t : t + 4], cut(at, t, t + 4), memory)
        logits.append(here)
    found = jnp.concatenate(logits, axis=1)
    close(found, full_forward(name, tokens, at, pattern=mask), 1e-4)
    assert np.all(np.isfinite(jax.device_get(found)))
