"""Pictures show what attention computes, and are the same each time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax import where
from relpos_jax.attention import attend
from relpos_jax.positional import ENCODINGS, Dims, merge
from relpos_jax.report import encoding_pictures, encoding_table


@pytest.mark.parametrize("name", ["rope", "alibi", "shaw", "cope", "forgetting"])
def test_logits_are_those_of_attend(name):
    encoding, dims = ENCODINGS[name], Dims(2, 8, 16)
    params = merge(
        encoding.init(jax.random.key(0), dims),
        encoding.init_shared(jax.random.key(1), dims),
    )
    params = jax.tree.map(lambda x: x + 0.1, params)
    q, k, _ = jax.random.normal(jax.random.key(2), (3, 1, 5, 2, 8))
    x, at = jax.random.normal(jax.random.key(3), (1, 5, 16)), where.contiguous(1, 5)
    features = encoding.features(params, x)
    scores = encoding_pictures.logits(
        encoding, params, q, k, at, at, features, causal=True
    )
    scores = jnp.where(jnp.tril(jnp.ones((1, 1, 5, 5), bool)), scores, -1e30)
    ones = jnp.broadcast_to(jnp.eye(5)[None, :, None, :], (1, 5, 2, 5))
    if name == "shaw":  # its value vectors are not part of the score
        encoding = type(encoding)(values=False)
    weights = attend(encoding, params, q, k, ones, at, at, features=features)
    np.testing.assert_allclose(
        jax.nn.softmax(scores, -1), jnp.swapaxes(weights, 1, 2), atol=1e-6
    )


def test_alibi_curve_is_its_bias():
    found = encoding_pictures.curves(ENCODINGS["alibi"], far=64, ahead=4)
    assert found.distance.tolist() == list(range(-4, 65))
    slopes = np.asarray([2.0 ** (-2 * (h + 1)) for h in range(4)])
    expected = -slopes[:, None] * np.maximum(found.distance, 0)
    np.testing.assert_allclose(found.added[0], expected, atol=1e-5)


def test_files_are_small_and_always_the_same():
    files = [
        encoding_pictures.to_png(encoding_pictures.picture("t5", ENCODINGS["t5"]))
        for _ in range(2)
    ]
    assert files[0] == files[1]
    assert files[0].startswith(b"\x89PNG") and len(files[0]) < 60_000


def test_pages_by_name_and_prefix():
    pages = ["rope", "rope_scaling", "none", "t5", "alibi"]
    wanted = {
        "rope": "rope",
        "rope_yarn": "rope_scaling",
        "rope_partial": "rope",
        "none": "none",
        "t5_bidirectional": "t5",
        "shaw": None,
    }
    for name, page in wanted.items():
        assert encoding_table.page_of(name, pages) == page


def test_only_the_table_is_replaced():
    page = f"before\n{encoding_table.BEGIN}\nold\n{encoding_table.END}\nafter\n"
    new = encoding_table.between_markers(page, "new")
    assert new == page.replace("\nold\n", "\n\nnew\n\n")
    assert encoding_table.between_markers(new, "new") == new
    with pytest.raises(ValueError, match="once"):
        encoding_table.between_markers("nothing", "new")
