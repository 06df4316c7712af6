"""The notebooks run from top to bottom, their assertions hold, and nothing warns."""

import json
import os
import pathlib
import sys

import pytest

nbclient = pytest.importorskip("nbclient", reason="it runs notebooks: the group `dev`")
nbformat = pytest.importorskip("nbformat")

pytestmark = pytest.mark.published

FOLDER = pathlib.Path(__file__).parents[2] / "notebooks"
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
