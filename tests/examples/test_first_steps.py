"""examples/first_steps.ipynb runs from its first cell to its last."""

import nbformat
import pytest
from example_modules import EXAMPLES
from nbclient import NotebookClient


@pytest.mark.long
def test_every_cell_runs(monkeypatch):
    for name in ("MXNET_CPU_TEMP_COPY", "MXNET_CPU_PARALLEL_RAND_COPY"):
        monkeypatch.delenv(name)
    notebook = nbformat.read(EXAMPLES / "first_steps.ipynb", as_version=4)
    resources = {"metadata": {"path": str(EXAMPLES)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
