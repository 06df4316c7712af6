"""The notebooks run from top to bottom, their assertions hold, and nothing warns."""

import base64
import io
import json
import os
import pathlib
import sys

import matplotlib.font_manager
import matplotlib.image
import nbclient
import nbformat
import numpy as np
import pytest

pytestmark = pytest.mark.published

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
assert [path.name[0] for path in NOTEBOOKS] == list("123456")


def execute(notebook, folder):
    """Runs a notebook in a process of its own; raises where a cell does, or warns."""
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(folder)}}
    ).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.get("name") != "stderr", output["text"]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """A new user's, but that our own sources are found."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.delenv("XLA_FLAGS", raising=False)


# A network or two are trained in each: ten seconds on two CPU cores.
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs_and_its_assertions_hold(path, tmp_path):
    execute(nbformat.read(path, as_version=4), tmp_path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_asserts_draws_installs_and_keeps_small_outputs(path):
    assert path.stat().st_size < 300_000
    notebook = json.loads(path.read_text("utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert "%pip install" in "".join(code[0]["source"])
    assert any("assert " in line for cell in code for line in cell["source"])
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert "/home/" not in json.dumps(outputs)


def luminance(rgb):
    """As WCAG 2 defines it, from 0 to 1."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def least_contrast(picture):
    """WCAG's contrast of the drawn pixels, on white and on the black of dark pages."""
    drawn = luminance(picture[picture[..., 3] > 0.99][:, :3])
    black = luminance(np.array([13, 17, 23]) / 255)
    return min(1.05 / (np.max(drawn) + 0.05), (np.min(drawn) + 0.05) / (black + 0.05))


def pictures(path):
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                png = base64.b64decode(output["data"]["image/png"])
                yield matplotlib.image.imread(io.BytesIO(png))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_plots_are_legible_on_light_pages_and_on_dark_ones(path):
    for picture in pictures(path):
        assert picture[0, 0, 3] == 0  # the page shows through
        assert least_contrast(picture) > 2
