import re
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", ["bytes", "words"])
def test_a_corpus_does_not_enter_memory(tmp_path, vocabulary):
    """Training on 400 MB peaks where training on 1 MB does, or little above."""
    command = [sys.executable, "-m", "experiments.benchmarks.resident_memory"]
    command += ["--gigabytes=0.4", f"--vocabulary={vocabulary}", f"--where={tmp_path}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    above = re.search(r"above the small one: (-?[\d,]+) MB", found.stdout)
    assert int(above[1].replace(",", "")) < 200, found.stdout
