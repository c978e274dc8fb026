"""Settings of every test: strict shapes, a cache of compiled programs, fixtures."""

import os
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

# Compiling takes longer than running at these sizes. `make test-all` sets the variable
# and so tests the programs that users run. Processes that tests start follow.
if not os.environ.get("RELPOS_JAX_TEST_OPTIMISED"):
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    # The older way to make kernels compiles in two thirds of the time. Other releases
    # may not know the flag, and XLA ends a process for that.
    if jax.__version_info__[:2] == (0, 10):
        flag = "--xla_cpu_use_fusion_emitters=false"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks what `make test` leaves to `make test-all` in the conformance suite."""
    for item in items:
        if item.path.name == "test_conformance.py":
            from tests import conformance

            name = item.callspec.params["name"]
            if conformance.is_left_to_slow(item.originalname, name, item.callspec):
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_programs():
    """Keeps a run of all tests from holding thousands of programs in memory."""
    yield
    jax.clear_caches()


_ended = 0


@pytest.fixture(autouse=True)
def _forget_before_the_system_refuses():
    """Forgets programs within long modules too.

    A compiled program holds dozens of memory mappings, of which Linux grants a process
    65,530: after some hundred programs of a module, XLA crashed for want of one more.
    """
    yield
    global _ended
    _ended += 1
    maps = Path("/proc/self/maps")
    if _ended % 20 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference material beside the checkout; skips if absent."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("the reference material ../shared is not beside this checkout")
    return folder
