"""Settings of every test: strict shapes, a cache of compiled programs, fixtures."""

from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parent.parent

# Adding `[t]` to `[b t]` is a slip more often than an intention; write the axis out.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Most of the tests' time is compilation, and most programs are as they were last time.
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference material beside the checkout; skips if absent."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("the reference material ../shared is not beside this checkout")
    return folder
