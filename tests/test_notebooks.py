"""Every notebook runs from top to bottom."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda p: p.stem)
# The kernel's machinery warns of its own matters.
@pytest.mark.filterwarnings("ignore")
def test_notebook_runs(path):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(FOLDER.parent)}}
    )
    client.execute()
    assert all(
        cell.execution_count for cell in notebook.cells if cell.cell_type == "code"
    )
