"""The notebook runs from top to bottom in a real kernel, as shipped and with its switches turned."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "examples" / "splits.ipynb"


def execute(**switches):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cell = next(cell for cell in notebook.cells if cell.source.startswith("DATA ="))
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in switches.items())
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    return text, [output for output in outputs if "image/png" in output.get("data", {})]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("switches", "named"),
    [({}, "flagged: [0]"), ({"NETWORK": "fc", "NOISE": "none", "EPOCHS": 8}, "flagged: []")],
    ids=str,
)
def test_the_notebook(switches, named):
    text, pictures = execute(**switches)
    assert named in text
    assert "test accuracy 0.9" in text
    assert pictures


def test_it_is_committed_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
