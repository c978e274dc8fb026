"""The facts that packaging states in several files agree, and no machine shows."""

import ast
import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import relpos_jax

ROOT = Path(__file__).resolve().parent.parent

# Folders that only some machine has, and hosts that packages come from. A path with a
# variable in front, such as `$HOME/work/`, is no machine's.
MACHINE = re.compile(
    r"(?<![\w.}/-])/(?:home|Users|root|work|tmp|mnt|scratch)/[\w.]"
    r"|[A-Z]:\\\\?Users\b"
    r"|index[-_]url\b|pypi\.org|python[h]osted"
)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def requirements() -> list[Requirement]:
    """All of the requirements in `setup.py`, read without running `setup`."""
    names = {}
    for node in ast.parse(read("setup.py")).body:
        if isinstance(node, ast.Assign):
            if node.targets[0].id in ("REQUIRES", "NOTEBOOKS", "TEST"):
                exec(compile(ast.Module([node], []), "setup.py", "exec"), names)
    return [Requirement(line) for line in names["REQUIRES"] + names["TEST"]]


def test_version_is_the_same_everywhere():
    version = relpos_jax.__version__
    assert f'version="{version}"' in read("setup.py")
    assert f"\nversion: {version}\n" in read("CITATION.cff")
    assert f"\n## [{version}]" in read("CHANGELOG.md")


def test_constraints_pin_what_setup_needs():
    lines = read("constraints.txt").splitlines()
    pins = {}
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), line
        name, version = line.split("==")
        pins[canonicalize_name(name)] = version
    assert len(pins) == len(lines)
    for requirement in requirements():
        pin = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), f"{requirement} but {pin} pinned"


def test_machine_pattern_knows_what_to_look_for():
    for text in ("see /home/" + "ada/x", "'/work" + "/main'", "--index" + "-url x"):
        assert MACHINE.search(text), text
    for text in ("a/work/b", "$HOME/work/x", "../shared/golden", "frame/tmp/x"):
        assert not MACHINE.search(text), text


def test_no_machine_in_the_tree():
    git = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others"]
    listed = subprocess.run(
        [*git, "--exclude-standard"], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout, so what belongs to it is not known")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        try:
            text = read(name)
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue  # binary, or deleted but not yet committed
        for number, line in enumerate(text.splitlines(), start=1):
            if MACHINE.search(line):
                found.append(f"{name}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)
