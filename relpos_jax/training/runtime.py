"""What an experiment sets before JAX compiles anything."""

import ctypes
import logging
import os
import pathlib
import sys

import jax
from absl import logging as absl_logging

_SWITCH = "RELPOS_JAX_COMPILATION_CACHE"


def cache_folder() -> pathlib.Path | None:
    """Returns where compiled programs are kept between runs, None for nowhere.

    `RELPOS_JAX_COMPILATION_CACHE=off` (or 0, no, false) turns the cache off, any other
    value is the folder to use; without it, `relpos_jax/xla` in the user's cache folder.
    """
    wanted = os.environ.get(_SWITCH, "")
    if wanted.lower() in ("off", "0", "no", "false"):
        return None
    if wanted:
        return pathlib.Path(wanted).expanduser()
    if sys.platform == "darwin":
        user = pathlib.Path.home() / "Library" / "Caches"
    else:
        user = pathlib.Path.home() / ".cache"
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or user) / "relpos_jax" / "xla"


def prepare(*, compilation_cache: bool = True) -> None:
    """Sets the compilation cache, quietens libraries and tunes memory; call it first.

    A cache that the user has set for JAX (`JAX_COMPILATION_CACHE_DIR`) stays. Where the
    folder can't be made, there's no cache and a warning; nothing else depends on it.

    Args:
      compilation_cache: False leaves JAX without the cache.
    """
    # Orbax reports each of its internal steps at INFO; its warnings stay.
    absl_logging.set_verbosity(absl_logging.WARNING)
    _keep_freed_memory()
    if not compilation_cache or jax.config.jax_compilation_cache_dir:
        return
    folder = cache_folder()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logging.getLogger(__name__).warning("no compilation cache: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # The default keeps only what took a second to compile; ours are many and small.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def _keep_freed_memory() -> None:
    """Makes glibc keep large freed blocks instead of returning them to the system.

    A training step frees its temporaries, and with the default settings the next one
    has the system map and clear the same pages again: 50,000 page faults and a tenth of
    the processor time of a step of a small model on CPU. It works only before other
    threads have allocated, and not at all where the C library isn't glibc. Whoever has
    set `GLIBC_TUNABLES` keeps those settings.
    """
    if not sys.platform.startswith("linux") or "GLIBC_TUNABLES" in os.environ:
        return
    trim_threshold, mmap_max, arena_max = -1, -4, -8  # of glibc's malloc.h
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # no other C library numbers options like this
    except (OSError, AttributeError):
        return
    library.mallopt(mmap_max, 0)
    library.mallopt(trim_threshold, 2**31 - 1)
    library.mallopt(arena_max, 1)
