"""Every notebook runs from top to bottom, without the network and without a warning."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.timeout(900)
def test_notebooks_run_without_a_warning() -> None:
    cells = []
    for file in NOTEBOOKS:
        # All in one Python, for imports take most of the time; what the notebooks before have named is undone.
        cells += [new_code_cell("%reset -f"), *nbformat.read(file, as_version=4).cells]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    everything = new_notebook(cells=cells)
    client = NotebookClient(everything, timeout=300, kernel_name="python3", resources={"metadata": {"path": FOLDER}})
    client.execute()
    outputs = [output for cell in everything.cells for output in cell.get("outputs", [])]
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    shown = {kind for output in outputs for kind in output.get("data", {})}
    assert {"text/html", "application/vnd.plotly.v1+json", "image/png"} <= shown


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebook_is_committed_without_outputs(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert notebook.cells[0].cell_type == "markdown"


def test_there_are_six() -> None:
    assert [file.name[:2] for file in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06"]
