"""The notebooks run from top to bottom, their assertions hold, and nothing warns."""

import base64
import io
import json
import os
import pathlib
import sys

import matplotlib.font_manager  # makes its cache, of which a notebook would warn
import matplotlib.image
import nbclient
import nbformat
import numpy as np
import pytest

pytestmark = pytest.mark.published

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
assert [path.name[0] for path in NOTEBOOKS] == list("123456")


each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@each
def test_the_notebook_runs_and_its_assertions_hold(path, tmp_path, monkeypatch):
    # A new user's environment, but that our own sources are found.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=place).execute()
    for output in outputs_of(notebook):
        assert output.get("name") != "stderr", output["text"]


def outputs_of(notebook):
    return [x for cell in notebook["cells"] for x in cell.get("outputs", [])]


@each
def test_the_notebook_asserts_draws_installs_and_keeps_small_outputs(path):
    assert path.stat().st_size < 300_000
    notebook = json.loads(path.read_text("utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert "%pip install" in "".join(code[0]["source"])
    assert any("assert " in line for cell in code for line in cell["source"])
    outputs = outputs_of(notebook)
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


@each
def test_its_plots_are_legible_on_light_pages_and_on_dark_ones(path):
    for output in outputs_of(json.loads(path.read_text("utf-8"))):
        if png := output.get("data", {}).get("image/png"):
            picture = matplotlib.image.imread(io.BytesIO(base64.b64decode(png)))
            assert picture[0, 0, 3] == 0  # the page shows through
            assert least_contrast(picture) > 2
