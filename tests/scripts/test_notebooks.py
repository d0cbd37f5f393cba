"""The notebooks run from top to bottom, one after the other, in a folder without a checkout."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "docs/notebooks"
# What comes first trains; with its pictures.
NOTEBOOKS = {"own_images": 2, "what_has_it_learned": 6}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_the_notebooks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "100")
    for name, num_pictures in NOTEBOOKS.items():
        notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
        resources = {"metadata": {"path": tmp_path}}
        NotebookClient(notebook, kernel_name="python3", resources=resources).execute()
        outputs = [each for cell in notebook.cells for each in cell.get("outputs", ())]
        assert sum("image/png" in each.get("data", {}) for each in outputs) == num_pictures


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_are_stored_without_outputs(name: str) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
