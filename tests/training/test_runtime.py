import os
import subprocess
import sys

import pytest

# Frees and takes again a block that glibc would otherwise map anew each time.
SCRIPT = """
import ctypes, resource
from relpos_jax.training import runtime
runtime.prepare(compilation_cache=False)
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
size = 64 << 20
for turn in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = library.malloc(ctypes.c_size_t(size))
    ctypes.memset(block, 1, size)
    library.free(ctypes.c_void_p(block))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's switches")
@pytest.mark.parametrize("tunables", [None, "glibc.malloc.check=0"])
def test_freed_memory_is_used_again(tunables):
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    if tunables is not None:  # whoever sets their own keeps them
        env["GLIBC_TUNABLES"] = tunables
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    faults = int(found.stdout)
    if tunables is None and "glibc" in os.confstr("CS_GNU_LIBC_VERSION"):
        assert faults < 100
    if tunables is not None:
        assert faults > 100
